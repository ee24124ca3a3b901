//! The fields of packets by name, for people and for scripts.
//!
//! Names are those of the specification; sizes in bytes and counts are numbers, identifiers and
//! masks are hexadecimal text, flags and states are words.

use lockstep_format::units::{NodeId, NodeMask, Sector, Uuid};
use lockstep_format::wire::packet::{
    AlgName, BlockAck, BlockRequest, CompressedBitmap, ConnectionFeatures, DagtagRequest, Data,
    Protocol, Sizes, SyncParam89, Trim, TwopcHead, TwopcOutcome, TwopcReply, Uuids, Uuids110,
};
use lockstep_format::wire::vli::RleDecoder;
use lockstep_format::wire::{
    BlockId, Digest, DiskNumbering, Packet, PeerState, StateChange, StateWord, TwopcFlags,
};
use serde_json::Value;

/// Fields in the order of the packet.
pub(crate) type Fields = Vec<(&'static str, Value)>;

/// The fields of a packet.
pub(crate) fn fields(packet: &Packet) -> Fields {
    match packet {
        Packet::Data(p) | Packet::DataReply(p) | Packet::RsDataReply(p) => data(p),
        Packet::Wsame(p) => {
            let mut out = block(p.sector, p.block_id, "size", p.size_bytes);
            out.extend([
                ("seq_num", p.seq_num.into()),
                ("dp_flags", flags(&p.flags)),
                ("digest", digest(&p.digest)),
                ("payload", p.payload_len.into()),
            ]);
            out
        }
        Packet::Trim(p) | Packet::Zeroes(p) => trim(p),
        Packet::Barrier(p) => vec![("barrier", hex32(p.barrier))],
        Packet::BarrierAck(p) => {
            vec![
                ("barrier", hex32(p.barrier)),
                ("set_size", p.set_size.into()),
            ]
        }
        Packet::Bitmap(p) => vec![("words", (p.words.len() / 8).into())],
        Packet::CompressedBitmap(p) => compressed_bitmap(p),
        Packet::DataRequest(p)
        | Packet::RsDataRequest(p)
        | Packet::OvRequest(p)
        | Packet::RsThinReq(p) => block_request(p),
        Packet::CsumRsRequest(p) | Packet::OvReply(p) => {
            let mut out = block(p.sector, p.block_id, "blksize", p.size_bytes);
            out.push(("digest", digest(&p.digest)));
            out
        }
        Packet::RsDagtagReq(p) | Packet::RsThinDagtagReq(p) | Packet::OvDagtagReq(p) => {
            dagtag_request(p)
        }
        Packet::RsCsumDagtagReq(p) | Packet::OvDagtagReply(p) => {
            let mut out = block(p.sector, p.block_id, "blksize", p.size_bytes);
            out.extend([
                ("dagtag_node_id", node(p.dagtag_node_id)),
                ("dagtag", hex(p.dagtag.0)),
                ("digest", digest(&p.digest)),
            ]);
            out
        }
        Packet::RecvAck(p)
        | Packet::WriteAck(p)
        | Packet::RsWriteAck(p)
        | Packet::Superseded(p)
        | Packet::NegAck(p)
        | Packet::NegDreply(p)
        | Packet::NegRsDreply(p)
        | Packet::OvResult(p)
        | Packet::RsIsInSync(p)
        | Packet::RsCancel(p)
        | Packet::RetryWrite(p)
        | Packet::RsCancelAhead(p)
        | Packet::WriteAckInSync(p)
        | Packet::RsNegAck(p)
        | Packet::RsDeallocatedId(p) => block_ack(p),
        Packet::OvResultId(p) => {
            let mut out = block(p.sector, p.block_id, "blksize", p.size_bytes);
            out.extend([("seq_num", p.seq_num.into()), ("result", word(&p.result))]);
            out
        }
        Packet::OutOfSync(p) | Packet::RsDeallocated(p) => {
            vec![
                ("sector", sector(p.sector)),
                ("blksize", p.size_bytes.into()),
            ]
        }
        Packet::SyncParam(p) => {
            let mut out: Fields = vec![("resync_rate", p.resync_rate_kib_s.into())];
            out.extend(p.verify_alg.as_ref().map(|name| ("verify_alg", alg(name))));
            out
        }
        Packet::SyncParam89(p) => sync_param89(p),
        Packet::Protocol(p) | Packet::ProtocolUpdate(p) => protocol(p),
        Packet::Uuids(p) => uuids(p),
        Packet::Uuids110(p) => uuids110(p),
        Packet::CurrentUuid(p) => {
            vec![("uuid", uuid(p.uuid)), ("weak_nodes", mask(p.weak_nodes))]
        }
        Packet::SyncUuid(p) => vec![("uuid", uuid(*p))],
        Packet::Sizes(p) => sizes(p),
        Packet::State(p) => state(p),
        Packet::StateChgReq(p) | Packet::ConnStChgReq(p) => change(*p),
        Packet::StateChgReply(p) | Packet::ConnStChgReply(p) => vec![("retcode", p.0.into())],
        Packet::AuthChallenge(p) => vec![("challenge", bytes(p))],
        Packet::AuthResponse(p) => vec![("response", digest(p))],
        Packet::DelayProbe(p) => vec![("seq", p.seq.into()), ("offset", p.offset_us.into())],
        Packet::TwopcPrepare(p) => {
            let mut out = twopc_head(&p.head);
            out.extend(twopc_change(p.change));
            out
        }
        Packet::TwopcPrepRsz(p) => {
            let mut out = twopc_head(&p.head);
            out.extend([
                ("user_size", sector(p.user_size)),
                ("dds_flags", flags(&p.dds_flags)),
            ]);
            out
        }
        Packet::TwopcAbort(p) | Packet::TwopcCommit(p) => twopc_outcome(p),
        Packet::TwopcYes(p) | Packet::TwopcNo(p) | Packet::TwopcRetry(p) => twopc_reply(p),
        Packet::Dagtag(p) => vec![("dagtag", hex(p.0))],
        Packet::PeerAck(p) => vec![("mask", mask(p.mask)), ("dagtag", hex(p.dagtag.0))],
        Packet::PeersInSync(p) => vec![
            ("sector", sector(p.sector)),
            ("mask", mask(p.mask)),
            ("size", p.size_bytes.into()),
        ],
        Packet::PeerDagtag(p) => {
            vec![("dagtag", hex(p.dagtag.0)), ("node_id", node(p.node_id))]
        }
        Packet::ConfirmStable(p) => vec![
            ("oldest_block_id", hex(p.oldest_block_id.0)),
            ("youngest_block_id", hex(p.youngest_block_id.0)),
            ("set_size", p.set_size.into()),
        ],
        Packet::FlushRequests(p) => vec![("flush_sequence", p.flush_sequence.into())],
        Packet::FlushForward(p) => vec![
            ("flush_sequence", p.flush_sequence.into()),
            ("initiator_node_id", node(p.initiator_node_id)),
        ],
        Packet::FlushRequestsAck(p) => vec![
            ("flush_sequence", p.flush_sequence.into()),
            ("primary_node_id", node(p.primary_node_id)),
        ],
        Packet::EnableReplicationNext(p) | Packet::EnableReplication(p) => {
            vec![("enable", p.enable.into())]
        }
        Packet::ConnectionFeatures(p) => connection_features(p),
        Packet::UnplugRemote
        | Packet::Ping
        | Packet::PingAck
        | Packet::Disconnect
        | Packet::InitialMeta
        | Packet::InitialData => Vec::new(),
    }
}

fn block(at: Sector, id: BlockId, size_name: &'static str, size_bytes: u32) -> Fields {
    vec![
        ("sector", sector(at)),
        ("block_id", hex(id.0)),
        (size_name, size_bytes.into()),
    ]
}

fn data(p: &Data) -> Fields {
    let mut out = vec![
        ("sector", sector(p.sector)),
        ("block_id", hex(p.block_id.0)),
        ("seq_num", p.seq_num.into()),
        ("dp_flags", flags(&p.flags)),
    ];
    if !p.digest.is_empty() {
        out.push(("digest", digest(&p.digest)));
    }
    out.push(("payload", p.payload_len.into()));
    out
}

fn trim(p: &Trim) -> Fields {
    let mut out = block(p.sector, p.block_id, "size", p.size_bytes);
    out.extend([("seq_num", p.seq_num.into()), ("dp_flags", flags(&p.flags))]);
    out
}

fn block_request(p: &BlockRequest) -> Fields {
    block(p.sector, p.block_id, "blksize", p.size_bytes)
}

fn dagtag_request(p: &DagtagRequest) -> Fields {
    let mut out = block(p.sector, p.block_id, "blksize", p.size_bytes);
    out.extend([
        ("dagtag_node_id", node(p.dagtag_node_id)),
        ("dagtag", hex(p.dagtag.0)),
    ]);
    out
}

fn block_ack(p: &BlockAck) -> Fields {
    let mut out = block(p.sector, p.block_id, "blksize", p.size_bytes);
    out.push(("seq_num", p.seq_num.into()));
    out
}

fn compressed_bitmap(p: &CompressedBitmap) -> Fields {
    let runs: Result<Vec<_>, _> = RleDecoder::new(p).collect();
    let mut out: Fields = vec![
        ("first_run", word(&p.first_run)),
        ("code", p.code.len().into()),
    ];
    match runs {
        Ok(runs) => {
            let bits = runs
                .iter()
                .fold(0_u64, |sum, (_, run)| sum.saturating_add(*run));
            out.extend([("runs", runs.len().into()), ("bits", bits.into())]);
        }
        Err(error) => out.push(("broken", error.to_string().into())),
    }
    out
}

fn connection_features(p: &ConnectionFeatures) -> Fields {
    vec![
        ("protocol_min", p.protocol_min.into()),
        ("protocol_max", p.protocol_max.into()),
        ("feature_flags", flags(&p.features)),
        ("sender_node_id", node(p.sender_node_id)),
        ("receiver_node_id", node(p.receiver_node_id)),
    ]
}

fn sync_param89(p: &SyncParam89) -> Fields {
    let mut out = vec![
        ("resync_rate", p.resync_rate_kib_s.into()),
        ("verify_alg", alg(&p.verify_alg)),
        ("csums_alg", alg(&p.csums_alg)),
    ];
    if let Some(rate) = p.dynamic {
        out.extend([
            ("c_plan_ahead", rate.plan_ahead_ds.into()),
            ("c_delay_target", rate.delay_target_ds.into()),
            ("c_fill_target", rate.fill_target_sectors.into()),
            ("c_max_rate", rate.max_rate_kib_s.into()),
        ]);
    }
    out
}

fn protocol(p: &Protocol) -> Fields {
    vec![
        ("protocol", word(&p.protocol)),
        ("after_sb_0p", word(&p.after_sb_0p)),
        ("after_sb_1p", word(&p.after_sb_1p)),
        ("after_sb_2p", word(&p.after_sb_2p)),
        ("conn_flags", flags(&p.conn_flags)),
        ("two_primaries", p.two_primaries.into()),
        ("integrity_alg", alg(&p.integrity_alg)),
    ]
}

fn uuids(p: &Uuids) -> Fields {
    vec![
        ("current_uuid", uuid(p.current)),
        ("bitmap_uuid", uuid(p.bitmap)),
        ("history", list(&p.history)),
        ("dirty_bits", p.dirty_bits.into()),
        ("uuid_flags", flags(&p.flags)),
    ]
}

fn uuids110(p: &Uuids110) -> Fields {
    let slots: serde_json::Map<_, _> = p
        .bitmap_uuids
        .iter()
        .map(|(node, slot)| (node.to_string(), uuid(*slot)))
        .collect();
    let used = p
        .history
        .iter()
        .rposition(|entry| !entry.is_zero())
        .map_or(0, |last| last + 1);
    vec![
        ("current_uuid", uuid(p.current)),
        ("dirty_bits", p.dirty_bits.into()),
        ("uuid_flags", flags(&p.flags)),
        ("node_mask", mask(p.node_mask)),
        ("bitmap_uuids", slots.into()),
        ("history_count", p.history.len().into()),
        ("history", list(&p.history[..used])),
    ]
}

fn sizes(p: &Sizes) -> Fields {
    let mut out = vec![
        ("d_size", sector(p.d_size)),
        ("u_size", sector(p.u_size)),
        ("c_size", sector(p.c_size)),
        ("max_bio_size", p.max_bio_size_bytes.into()),
        ("queue_order_type", p.queue_order_type.into()),
        ("dds_flags", flags(&p.dds_flags)),
    ];
    if let Some(limits) = p.limits {
        out.extend([
            (
                "physical_block_size",
                limits.physical_block_size_bytes.into(),
            ),
            ("logical_block_size", limits.logical_block_size_bytes.into()),
            ("alignment_offset", limits.alignment_offset_bytes.into()),
            ("io_min", limits.io_min_bytes.into()),
            ("io_opt", limits.io_opt_bytes.into()),
            ("discard_enabled", limits.discard_enabled.into()),
            ("discard_zeroes_data", limits.discard_zeroes_data.into()),
            ("write_same_capable", limits.write_same_capable.into()),
            (
                "bm_block_shift_minus_12",
                limits.bm_block_shift_minus_12.into(),
            ),
        ]);
    }
    out
}

fn state(p: &PeerState) -> Fields {
    let marks = [
        (p.susp, "susp"),
        (p.aftr_isp, "aftr_isp"),
        (p.peer_isp, "peer_isp"),
        (p.user_isp, "user_isp"),
        (p.susp_nod, "susp_nod"),
        (p.susp_fen, "susp_fen"),
        (p.quorum, "quorum"),
    ];
    let marks: Vec<Value> = marks
        .into_iter()
        .filter(|(set, _)| *set)
        .map(|(_, name)| name.into())
        .collect();
    vec![
        ("role", word(&p.role)),
        ("peer", word(&p.peer)),
        ("conn", word(&p.conn)),
        ("repl", word(&p.repl)),
        ("disk", word(&p.disk)),
        ("pdsk", word(&p.pdsk)),
        ("flags", marks.into()),
    ]
}

/// Disk states are named only in two-phase commits: in the older requests their numbering depends
/// on the sender's release (wire.md 4.3).
fn twopc_change(p: StateChange) -> Fields {
    let mut out = change(p);
    if p.mask.has(StateWord::DISK) {
        out.extend(
            p.val
                .disk(DiskNumbering::V9)
                .map(|disk| ("disk", word(&disk))),
        );
    }
    if p.mask.has(StateWord::PDSK) {
        out.extend(
            p.val
                .pdsk(DiskNumbering::V9)
                .map(|disk| ("pdsk", word(&disk))),
        );
    }
    out
}

fn change(p: StateChange) -> Fields {
    let mut out = vec![("mask", hex32(p.mask.0)), ("val", hex32(p.val.0))];
    if p.mask.has(StateWord::ROLE) {
        out.extend(p.val.role().map(|role| ("role", word(&role))));
    }
    if p.mask.has(StateWord::CONN) {
        out.extend(p.val.conn().map(|conn| ("conn", word(&conn))));
        out.extend(p.val.repl().map(|repl| ("repl", word(&repl))));
    }
    out
}

fn twopc_head(p: &TwopcHead) -> Fields {
    vec![
        ("tid", hex32(p.tid)),
        ("flags", flags(&p.flags)),
        ("initiator_node_id", node(p.initiator_node_id)),
        ("target_node_id", p.target_node_id.map_or(Value::Null, node)),
        ("nodes_to_reach", mask(p.nodes_to_reach)),
    ]
}

/// The last word of a second phase means reachable nodes, a change or a size; only the
/// transaction tells a change from a size.
fn twopc_outcome(p: &TwopcOutcome) -> Fields {
    let mut out = twopc_head(&p.head);
    out.push(("primary_nodes", mask(p.primary_nodes)));
    if p.head.flags.contains(TwopcFlags::HAS_REACHABLE) {
        out.push(("reachable_nodes", mask(p.reachable_nodes())));
    } else {
        out.push(("mask_val_or_size", hex(p.word)));
    }
    out
}

fn twopc_reply(p: &TwopcReply) -> Fields {
    vec![
        ("tid", hex32(p.tid)),
        ("initiator_node_id", node(p.initiator_node_id)),
        ("reachable_nodes", mask(p.reachable_nodes)),
        ("primary_nodes", mask(p.primary_nodes)),
        ("weak_nodes_or_max_size", hex(p.word)),
    ]
}

fn sector(value: Sector) -> Value {
    value.0.into()
}

fn node(value: NodeId) -> Value {
    value.0.into()
}

fn uuid(value: Uuid) -> Value {
    value.to_string().into()
}

fn list(values: &[Uuid]) -> Value {
    values.iter().copied().map(uuid).collect()
}

fn mask(value: NodeMask) -> Value {
    hex(value.0)
}

fn hex(value: u64) -> Value {
    format!("{value:#x}").into()
}

fn hex32(value: u32) -> Value {
    hex(value.into())
}

fn bytes(value: &[u8]) -> Value {
    value
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<String>()
        .into()
}

fn digest(value: &Digest) -> Value {
    bytes(value.as_bytes())
}

fn alg(value: &AlgName) -> Value {
    value.as_bytes().escape_ascii().to_string().into()
}

/// The name of an enumeration's variant.
fn word(value: &impl std::fmt::Debug) -> Value {
    format!("{value:?}").into()
}

/// Names of the set flags; bits without a name as one number.
fn flags<F: bitflags::Flags>(value: &F) -> Value
where
    F::Bits: std::fmt::LowerHex,
{
    let mut names = value.iter_names();
    let mut out: Vec<Value> = names.by_ref().map(|(name, _)| name.into()).collect();
    let rest = names.remaining().bits();
    if rest != F::empty().bits() {
        out.push(format!("{rest:#x}").into());
    }
    out.into()
}
