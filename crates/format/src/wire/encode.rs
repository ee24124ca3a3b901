//! From packets to bytes. Pads and undefined tails are zero.

use alloc::vec::Vec;

use super::flags::{AfterSb, Features};
use super::header::{Dialect, Header, HeaderKind};
use super::packet::{
    AlgName, BlockAck, BlockRequest, CompressedBitmap, ConnectionFeatures, DagtagRequest, Data,
    DigestDagtagRequest, DigestRequest, DynamicRate, OvResultId, Packet, Protocol, RunKind, Sizes,
    SyncParam, SyncParam89, Trim, TwopcHead, Uuids, Uuids110, Wsame,
};
use super::state::{DiskNumbering, StateChange};
use super::{ALG_NAME_LEN, HISTORY_UUIDS_MAX, RLE_VLI_BITS};
use crate::units::{NodeMask, VolumeNr};

/// Appends header and fixed part of `packet`; the `Packet::payload_len` bytes of bulk payload are
/// sent behind it by the driver.
///
/// The volume travels only in the long header; use [`VolumeNr::NONE`] for packets that concern the
/// connection. What the dialect has no place for is left out: flags of the first two-phase commit
/// layout, limits without the feature, names at old versions. Limits and rates that the dialect
/// has a place for but the packet does not name are sent as zero. Each packet brings its own
/// integrity digest: the two directions of a connection may use different ones, and
/// [`Dialect::integrity_len`] is that of the direction which is decoded.
///
/// # Panics
///
/// If the header cannot carry the packet's length. That is a bug of the caller, and sending on
/// would put wrong data on the peer's disk.
pub fn encode(packet: &Packet, volume: VolumeNr, dialect: &Dialect, out: &mut Vec<u8>) {
    encode_in(packet, volume, None, dialect, out);
}

/// As [`encode`], with a header of the given kind: a ping may be sent before a version is agreed,
/// and what was received with one kind can be repeated with the same.
pub fn encode_with(
    packet: &Packet,
    volume: VolumeNr,
    kind: HeaderKind,
    dialect: &Dialect,
    out: &mut Vec<u8>,
) {
    encode_in(packet, volume, Some(kind), dialect, out);
}

fn encode_in(
    packet: &Packet,
    volume: VolumeNr,
    kind: Option<HeaderKind>,
    dialect: &Dialect,
    out: &mut Vec<u8>,
) {
    let start = out.len();
    // The short and the medium header are equally long, so the body's place is known already.
    let header_len = kind.map_or(dialect.header_len(), HeaderKind::len);
    out.resize(start + header_len, 0);
    body(packet, dialect, out);
    let fixed = out.len() - start - header_len;
    let len = u32::try_from(fixed).expect("fixed parts are small") + packet.payload_len();
    let kind = kind.unwrap_or(dialect.header_kind(len));
    Header {
        kind,
        volume,
        command: packet.command(),
        len,
    }
    .write(&mut out[start..start + header_len]);
}

fn body(packet: &Packet, dialect: &Dialect, out: &mut Vec<u8>) {
    match packet {
        Packet::Data(p) | Packet::DataReply(p) | Packet::RsDataReply(p) => data(p, out),
        Packet::Wsame(p) => {
            let Wsame {
                sector,
                block_id,
                seq_num,
                flags,
                size_bytes,
                digest,
                ..
            } = *p;
            trim(
                &Trim {
                    sector,
                    block_id,
                    seq_num,
                    flags,
                    size_bytes,
                },
                out,
            );
            out.extend_from_slice(digest.as_bytes());
        }
        Packet::Trim(p) | Packet::Zeroes(p) => trim(p, out),
        Packet::Barrier(p) => put32(out, [p.barrier, 0]),
        Packet::BarrierAck(p) => put32(out, [p.barrier, p.set_size]),
        Packet::Bitmap(p) => out.extend_from_slice(&p.words),
        Packet::CompressedBitmap(p) => compressed_bitmap(p, out),
        Packet::UnplugRemote | Packet::Ping | Packet::PingAck | Packet::Disconnect => {}
        Packet::InitialMeta | Packet::InitialData => {}
        Packet::DataRequest(p)
        | Packet::RsDataRequest(p)
        | Packet::OvRequest(p)
        | Packet::RsThinReq(p) => block_request(p, out),
        Packet::CsumRsRequest(p) | Packet::OvReply(p) => {
            let DigestRequest {
                sector,
                block_id,
                size_bytes,
                digest,
            } = *p;
            block_request(
                &BlockRequest {
                    sector,
                    block_id,
                    size_bytes,
                },
                out,
            );
            out.extend_from_slice(digest.as_bytes());
        }
        Packet::RsDagtagReq(p) | Packet::RsThinDagtagReq(p) | Packet::OvDagtagReq(p) => {
            dagtag_request(p, out);
        }
        Packet::RsCsumDagtagReq(p) | Packet::OvDagtagReply(p) => {
            let DigestDagtagRequest {
                sector,
                block_id,
                size_bytes,
                ..
            } = *p;
            let DigestDagtagRequest {
                dagtag_node_id,
                dagtag,
                digest,
                ..
            } = *p;
            let request = DagtagRequest {
                sector,
                block_id,
                size_bytes,
                dagtag_node_id,
                dagtag,
            };
            dagtag_request(&request, out);
            out.extend_from_slice(digest.as_bytes());
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
        | Packet::RsDeallocatedId(p) => block_ack(p, out),
        Packet::OvResultId(p) => {
            let OvResultId {
                sector,
                block_id,
                size_bytes,
                seq_num,
                result,
            } = *p;
            block_ack(
                &BlockAck {
                    sector,
                    block_id,
                    size_bytes,
                    seq_num,
                },
                out,
            );
            put32(out, [result.to_wire(), 0]);
        }
        Packet::OutOfSync(p) | Packet::RsDeallocated(p) => {
            put64(out, [p.sector.0]);
            put32(out, [p.size_bytes, 0]);
        }
        Packet::SyncParam(p) => sync_param(p, dialect, out),
        Packet::SyncParam89(p) => sync_param89(p, dialect, out),
        Packet::Protocol(p) | Packet::ProtocolUpdate(p) => protocol(p, dialect, out),
        Packet::Uuids(p) => uuids(p, out),
        Packet::Uuids110(p) => uuids110(p, out),
        Packet::CurrentUuid(p) => put64(out, [p.uuid.0, p.weak_nodes.0]),
        Packet::SyncUuid(uuid) => put64(out, [uuid.0]),
        Packet::Sizes(p) => sizes(p, dialect, out),
        Packet::State(p) => {
            put32(
                out,
                [p.pack(DiskNumbering::of_protocol(dialect.protocol)).0],
            );
        }
        Packet::StateChgReq(p) | Packet::ConnStChgReq(p) => put32(out, [p.mask.0, p.val.0]),
        Packet::StateChgReply(p) | Packet::ConnStChgReply(p) => put32(out, [p.0 as u32]),
        Packet::AuthChallenge(challenge) => out.extend_from_slice(challenge),
        Packet::AuthResponse(digest) => out.extend_from_slice(digest.as_bytes()),
        Packet::DelayProbe(p) => put32(out, [p.seq, p.offset_us]),
        Packet::TwopcPrepare(p) => {
            let StateChange { mask, val } = p.change;
            twopc_head(&p.head, dialect, out);
            put64(out, [p.primary_nodes.0]);
            put32(out, [mask.0, val.0]);
        }
        Packet::TwopcPrepRsz(p) => {
            twopc_head(&p.head, dialect, out);
            put64(out, [p.user_size.0]);
            out.extend_from_slice(&p.dds_flags.bits().to_be_bytes());
            out.extend_from_slice(&[0; 6]);
        }
        Packet::TwopcAbort(p) | Packet::TwopcCommit(p) => {
            twopc_head(&p.head, dialect, out);
            put64(out, [p.primary_nodes.0, p.word]);
        }
        Packet::TwopcYes(p) | Packet::TwopcNo(p) | Packet::TwopcRetry(p) => {
            put32(out, [p.tid, p.initiator_node_id.0.into()]);
            put64(out, [p.reachable_nodes.0, p.primary_nodes.0, p.word]);
        }
        Packet::Dagtag(dagtag) => put64(out, [dagtag.0]),
        Packet::PeerAck(p) => put64(out, [p.mask.0, p.dagtag.0]),
        Packet::PeersInSync(p) => {
            put64(out, [p.sector.0, p.mask.0]);
            put32(out, [p.size_bytes, 0]);
        }
        Packet::PeerDagtag(p) => {
            put64(out, [p.dagtag.0]);
            put32(out, [p.node_id.0.into()]);
        }
        Packet::ConfirmStable(p) => {
            put64(out, [p.oldest_block_id.0, p.youngest_block_id.0]);
            put32(out, [p.set_size, 0]);
        }
        Packet::FlushRequests(p) => put64(out, [p.flush_sequence]),
        Packet::FlushForward(p) => {
            put64(out, [p.flush_sequence]);
            put32(out, [p.initiator_node_id.0.into()]);
        }
        Packet::FlushRequestsAck(p) => {
            put64(out, [p.flush_sequence]);
            put32(out, [p.primary_node_id.0.into()]);
        }
        Packet::EnableReplicationNext(p) | Packet::EnableReplication(p) => {
            out.extend_from_slice(&[u8::from(p.enable), 0, 0, 0]);
        }
        Packet::ConnectionFeatures(p) => connection_features(p, out),
    }
}

fn data(p: &Data, out: &mut Vec<u8>) {
    put64(out, [p.sector.0, p.block_id.0]);
    put32(out, [p.seq_num, p.flags.bits()]);
    out.extend_from_slice(p.digest.as_bytes());
}

fn trim(p: &Trim, out: &mut Vec<u8>) {
    put64(out, [p.sector.0, p.block_id.0]);
    put32(out, [p.seq_num, p.flags.bits(), p.size_bytes]);
}

fn block_request(p: &BlockRequest, out: &mut Vec<u8>) {
    put64(out, [p.sector.0, p.block_id.0]);
    put32(out, [p.size_bytes, 0]);
}

fn dagtag_request(p: &DagtagRequest, out: &mut Vec<u8>) {
    put64(out, [p.sector.0, p.block_id.0]);
    put32(out, [p.size_bytes, p.dagtag_node_id.0.into()]);
    put64(out, [p.dagtag.0]);
}

fn block_ack(p: &BlockAck, out: &mut Vec<u8>) {
    put64(out, [p.sector.0, p.block_id.0]);
    put32(out, [p.size_bytes, p.seq_num]);
}

fn connection_features(p: &ConnectionFeatures, out: &mut Vec<u8>) {
    put32(out, [p.protocol_min, p.features.bits(), p.protocol_max]);
    put32(
        out,
        [p.sender_node_id.0.into(), p.receiver_node_id.0.into()],
    );
    out.extend_from_slice(&[0; 52]);
}

fn sync_param(p: &SyncParam, dialect: &Dialect, out: &mut Vec<u8>) {
    put32(out, [p.resync_rate_kib_s]);
    if dialect.protocol >= 88 {
        let name = p.verify_alg.as_ref().map_or(&[][..], AlgName::as_bytes);
        out.extend_from_slice(name);
        out.push(0);
    }
}

fn sync_param89(p: &SyncParam89, dialect: &Dialect, out: &mut Vec<u8>) {
    put32(out, [p.resync_rate_kib_s]);
    for name in [&p.verify_alg, &p.csums_alg] {
        let start = out.len();
        out.extend_from_slice(name.as_bytes());
        out.resize(start + ALG_NAME_LEN, 0);
    }
    if dialect.protocol >= 95 {
        let DynamicRate {
            plan_ahead_ds,
            delay_target_ds,
            fill_target_sectors,
            max_rate_kib_s,
        } = p.dynamic.unwrap_or_default();
        put32(
            out,
            [
                plan_ahead_ds,
                delay_target_ds,
                fill_target_sectors,
                max_rate_kib_s,
            ],
        );
    }
}

fn protocol(p: &Protocol, dialect: &Dialect, out: &mut Vec<u8>) {
    put32(out, [p.protocol.to_wire()]);
    put32(
        out,
        [p.after_sb_0p, p.after_sb_1p, p.after_sb_2p].map(AfterSb::to_wire),
    );
    put32(out, [p.conn_flags.bits(), p.two_primaries.into()]);
    if dialect.protocol >= 87 {
        out.extend_from_slice(p.integrity_alg.as_bytes());
        out.push(0);
    }
}

fn uuids(p: &Uuids, out: &mut Vec<u8>) {
    put64(
        out,
        [p.current.0, p.bitmap.0, p.history[0].0, p.history[1].0],
    );
    put64(out, [p.dirty_bits, p.flags.bits()]);
}

fn uuids110(p: &Uuids110, out: &mut Vec<u8>) {
    assert!(
        p.bitmap_uuids
            .is_sorted_by(|(left, _), (right, _)| left < right),
        "bitmap UUIDs are in ascending order of node ids"
    );
    let slots: NodeMask = p.bitmap_uuids.iter().map(|(node, _)| *node).collect();
    put64(
        out,
        [
            p.current.0,
            p.dirty_bits,
            p.flags.bits(),
            p.node_mask.0,
            slots.0,
        ],
    );
    for (_, uuid) in &p.bitmap_uuids {
        put64(out, [uuid.0]);
    }
    for uuid in p.history.iter().take(HISTORY_UUIDS_MAX) {
        put64(out, [uuid.0]);
    }
}

fn sizes(p: &Sizes, dialect: &Dialect, out: &mut Vec<u8>) {
    put64(out, [p.d_size.0, p.u_size.0, p.c_size.0]);
    put32(out, [p.max_bio_size_bytes]);
    out.extend_from_slice(&p.queue_order_type.to_be_bytes());
    out.extend_from_slice(&p.dds_flags.bits().to_be_bytes());
    if dialect.features.contains(Features::WSAME) {
        let limits = p.limits.unwrap_or_default();
        put32(
            out,
            [
                limits.physical_block_size_bytes,
                limits.logical_block_size_bytes,
            ],
        );
        put32(
            out,
            [
                limits.alignment_offset_bytes,
                limits.io_min_bytes,
                limits.io_opt_bytes,
            ],
        );
        out.extend_from_slice(&[
            limits.discard_enabled,
            limits.discard_zeroes_data,
            limits.write_same_capable,
            limits.bm_block_shift_minus_12,
        ]);
    }
}

fn compressed_bitmap(p: &CompressedBitmap, out: &mut Vec<u8>) {
    let start = match p.first_run {
        RunKind::Clear => 0,
        RunKind::Set => 0x80,
    };
    out.push(start | (p.pad_bits & 7) << 4 | RLE_VLI_BITS);
    out.extend_from_slice(&p.code);
}

fn twopc_head(p: &TwopcHead, dialect: &Dialect, out: &mut Vec<u8>) {
    put32(out, [p.tid]);
    let initiator = p.initiator_node_id.0;
    if dialect.features.contains(Features::TWOPC_V2) {
        put32(out, [p.flags.bits()]);
        out.extend_from_slice(&[
            0,
            0,
            initiator,
            p.target_node_id.map_or(0xFF, |node| node.0),
        ]);
    } else {
        let target = p.target_node_id.map_or(u32::MAX, |node| node.0.into());
        put32(out, [initiator.into(), target]);
    }
    put64(out, [p.nodes_to_reach.0]);
}

fn put32<const N: usize>(out: &mut Vec<u8>, values: [u32; N]) {
    for value in values {
        out.extend_from_slice(&value.to_be_bytes());
    }
}

fn put64<const N: usize>(out: &mut Vec<u8>, values: [u64; N]) {
    for value in values {
        out.extend_from_slice(&value.to_be_bytes());
    }
}
