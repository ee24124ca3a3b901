//! From bytes to packets. Total: no input panics, and memory is bounded by `Header::fixed_len`.

use super::command::Command;
use super::error::WireError;
use super::flags::{
    AfterSb, ConnFlags, DataFlags, DeviceDescFlags, Features, OvResultCode, ReplicationProtocol,
    TwopcFlags, UuidFlags,
};
use super::header::{Dialect, Header};
use super::packet::{
    AlgName, Barrier, BarrierAck, BitmapWords, BlockAck, BlockDesc, BlockId, BlockRequest,
    CompressedBitmap, ConfirmStable, ConnectionFeatures, CurrentUuid, DagtagRequest, Data,
    DelayProbe, DeviceLimits, Digest, DigestDagtagRequest, DigestRequest, DynamicRate,
    EnableReplication, FlushForward, FlushRequests, FlushRequestsAck, OvResultId, Packet, PeerAck,
    PeerDagtag, PeersInSync, Protocol, RunKind, Sizes, StateRv, SyncParam, SyncParam89, Trim,
    TwopcHead, TwopcOutcome, TwopcPrepare, TwopcReply, TwopcResize, Uuids, Uuids110, Wsame,
};
use super::state::{DiskNumbering, PeerState, StateChange, StateWord};
use super::{
    ALG_NAME_LEN, BIO_LEN_MAX, CHALLENGE_LEN, DISCARD_LEN_MAX, DISCARD_LEN_MAX_OLD,
    HISTORY_UUIDS_MAX, RLE_VLI_BITS,
};
use crate::units::{Dagtag, NodeId, NodeMask, Sector, Uuid};

/// Decodes the packet behind `header`, which `decode_header` returned for the same dialect.
///
/// `body` are the `Header::fixed_len` bytes behind the header; more are ignored.
pub fn decode(header: &Header, body: &[u8], dialect: &Dialect) -> Result<Packet, WireError> {
    let need = header.fixed_len(dialect);
    let command = header.command;
    let Some(bytes) = body.get(..need) else {
        return Err(WireError::ShortBody {
            command,
            have: body.len(),
            need,
        });
    };
    let payload_len = header.payload_len(dialect);
    let mut body = Body {
        command,
        need,
        bytes,
    };
    packet(&mut body, payload_len, dialect)
}

fn packet(body: &mut Body<'_>, payload_len: u32, dialect: &Dialect) -> Result<Packet, WireError> {
    use Command as C;
    Ok(match body.command {
        C::Data => Packet::Data(data(body, payload_len)?),
        C::DataReply => Packet::DataReply(data(body, payload_len)?),
        C::RsDataReply => Packet::RsDataReply(data(body, payload_len)?),
        C::Barrier => Packet::Barrier(Barrier {
            barrier: body.u32()?,
        }),
        C::Bitmap => Packet::Bitmap(BitmapWords {
            words: body.rest().to_vec(),
        }),
        C::UnplugRemote => Packet::UnplugRemote,
        C::DataRequest => Packet::DataRequest(block_request(body)?),
        C::RsDataRequest => Packet::RsDataRequest(block_request(body)?),
        C::SyncParam => Packet::SyncParam(sync_param(body)?),
        C::Protocol => Packet::Protocol(protocol(body)?),
        C::Uuids => Packet::Uuids(uuids(body)?),
        C::Sizes => Packet::Sizes(sizes(body, dialect)?),
        C::State => Packet::State(state(body, dialect)?),
        C::SyncUuid => Packet::SyncUuid(Uuid(body.u64()?)),
        C::AuthChallenge => Packet::AuthChallenge(body.take::<CHALLENGE_LEN>()?),
        C::AuthResponse => Packet::AuthResponse(body.digest()?),
        C::StateChgReq => Packet::StateChgReq(state_change(body)?),
        C::Ping => Packet::Ping,
        C::PingAck => Packet::PingAck,
        C::RecvAck => Packet::RecvAck(block_ack(body)?),
        C::WriteAck => Packet::WriteAck(block_ack(body)?),
        C::RsWriteAck => Packet::RsWriteAck(block_ack(body)?),
        C::Superseded => Packet::Superseded(block_ack(body)?),
        C::NegAck => Packet::NegAck(block_ack(body)?),
        C::NegDreply => Packet::NegDreply(block_ack(body)?),
        C::NegRsDreply => Packet::NegRsDreply(block_ack(body)?),
        C::BarrierAck => Packet::BarrierAck(BarrierAck {
            barrier: body.u32()?,
            set_size: body.u32()?,
        }),
        C::StateChgReply => Packet::StateChgReply(StateRv(body.u32()? as i32)),
        C::OvRequest => Packet::OvRequest(block_request(body)?),
        C::OvReply => Packet::OvReply(digest_request(body)?),
        C::OvResult => Packet::OvResult(block_ack(body)?),
        C::CsumRsRequest => Packet::CsumRsRequest(digest_request(body)?),
        C::RsIsInSync => Packet::RsIsInSync(block_ack(body)?),
        C::SyncParam89 => Packet::SyncParam89(sync_param89(body)?),
        C::CompressedBitmap => Packet::CompressedBitmap(compressed_bitmap(body)?),
        C::DelayProbe => Packet::DelayProbe(DelayProbe {
            seq: body.u32()?,
            offset_us: body.u32()?,
        }),
        C::OutOfSync => Packet::OutOfSync(block_desc(body)?),
        C::RsCancel => Packet::RsCancel(block_ack(body)?),
        C::ConnStChgReq => Packet::ConnStChgReq(state_change(body)?),
        C::ConnStChgReply => Packet::ConnStChgReply(StateRv(body.u32()? as i32)),
        C::RetryWrite => Packet::RetryWrite(block_ack(body)?),
        C::ProtocolUpdate => Packet::ProtocolUpdate(protocol(body)?),
        C::TwopcPrepare => Packet::TwopcPrepare(TwopcPrepare {
            head: twopc_head(body, dialect)?,
            primary_nodes: body.mask()?,
            change: state_change(body)?,
        }),
        C::TwopcAbort => Packet::TwopcAbort(twopc_outcome(body, dialect)?),
        C::Dagtag => Packet::Dagtag(Dagtag(body.u64()?)),
        C::Trim => Packet::Trim(trim(body, dialect)?),
        C::RsThinReq => Packet::RsThinReq(block_request(body)?),
        C::RsDeallocated => Packet::RsDeallocated(block_desc(body)?),
        C::Wsame => Packet::Wsame(wsame(body, payload_len, dialect)?),
        C::TwopcPrepRsz => Packet::TwopcPrepRsz(TwopcResize {
            head: twopc_head(body, dialect)?,
            user_size: body.sector()?,
            dds_flags: DeviceDescFlags::from_bits_retain(body.u16()?),
        }),
        C::Zeroes => Packet::Zeroes(trim(body, dialect)?),
        C::PeerAck => Packet::PeerAck(PeerAck {
            mask: body.mask()?,
            dagtag: Dagtag(body.u64()?),
        }),
        C::PeersInSync => Packet::PeersInSync(PeersInSync {
            sector: body.sector()?,
            mask: body.mask()?,
            size_bytes: body.u32()?,
        }),
        C::Uuids110 => Packet::Uuids110(uuids110(body)?),
        C::PeerDagtag => Packet::PeerDagtag(PeerDagtag {
            dagtag: Dagtag(body.u64()?),
            node_id: body.node_id("node_id")?,
        }),
        C::CurrentUuid => Packet::CurrentUuid(CurrentUuid {
            uuid: Uuid(body.u64()?),
            weak_nodes: body.mask()?,
        }),
        C::TwopcYes => Packet::TwopcYes(twopc_reply(body)?),
        C::TwopcNo => Packet::TwopcNo(twopc_reply(body)?),
        C::TwopcCommit => Packet::TwopcCommit(twopc_outcome(body, dialect)?),
        C::TwopcRetry => Packet::TwopcRetry(twopc_reply(body)?),
        C::ConfirmStable => Packet::ConfirmStable(ConfirmStable {
            oldest_block_id: body.block_id()?,
            youngest_block_id: body.block_id()?,
            set_size: body.u32()?,
        }),
        C::RsCancelAhead => Packet::RsCancelAhead(block_ack(body)?),
        C::Disconnect => Packet::Disconnect,
        C::RsDagtagReq => Packet::RsDagtagReq(dagtag_request(body)?),
        C::RsCsumDagtagReq => Packet::RsCsumDagtagReq(digest_dagtag_request(body)?),
        C::RsThinDagtagReq => Packet::RsThinDagtagReq(dagtag_request(body)?),
        C::OvDagtagReq => Packet::OvDagtagReq(dagtag_request(body)?),
        C::OvDagtagReply => Packet::OvDagtagReply(digest_dagtag_request(body)?),
        C::WriteAckInSync => Packet::WriteAckInSync(block_ack(body)?),
        C::RsNegAck => Packet::RsNegAck(block_ack(body)?),
        C::OvResultId => Packet::OvResultId(ov_result_id(body)?),
        C::RsDeallocatedId => Packet::RsDeallocatedId(block_ack(body)?),
        C::FlushRequests => Packet::FlushRequests(FlushRequests {
            flush_sequence: body.u64()?,
        }),
        C::FlushForward => Packet::FlushForward(FlushForward {
            flush_sequence: body.u64()?,
            initiator_node_id: body.node_id("initiator_node_id")?,
        }),
        C::FlushRequestsAck => Packet::FlushRequestsAck(FlushRequestsAck {
            flush_sequence: body.u64()?,
            primary_node_id: body.node_id("primary_node_id")?,
        }),
        C::EnableReplicationNext => Packet::EnableReplicationNext(enable_replication(body)?),
        C::EnableReplication => Packet::EnableReplication(enable_replication(body)?),
        C::InitialMeta => Packet::InitialMeta,
        C::InitialData => Packet::InitialData,
        C::ConnectionFeatures => Packet::ConnectionFeatures(connection_features(body)?),
    })
}

fn data(body: &mut Body<'_>, payload_len: u32) -> Result<Data, WireError> {
    Ok(Data {
        sector: body.sector()?,
        block_id: body.block_id()?,
        seq_num: body.u32()?,
        flags: DataFlags::from_bits_retain(body.u32()?),
        digest: body.digest()?,
        payload_len,
    })
}

fn trim(body: &mut Body<'_>, dialect: &Dialect) -> Result<Trim, WireError> {
    Ok(Trim {
        sector: body.sector()?,
        block_id: body.block_id()?,
        seq_num: body.u32()?,
        flags: DataFlags::from_bits_retain(body.u32()?),
        size_bytes: discard_size(body, dialect)?,
    })
}

fn wsame(body: &mut Body<'_>, payload_len: u32, dialect: &Dialect) -> Result<Wsame, WireError> {
    let Trim {
        sector,
        block_id,
        seq_num,
        flags,
        size_bytes,
    } = trim(body, dialect)?;
    let digest = body.digest()?;
    Ok(Wsame {
        sector,
        block_id,
        seq_num,
        flags,
        size_bytes,
        digest,
        payload_len,
    })
}

fn discard_size(body: &mut Body<'_>, dialect: &Dialect) -> Result<u32, WireError> {
    let max = if dialect.features.contains(Features::WSAME) {
        DISCARD_LEN_MAX
    } else {
        DISCARD_LEN_MAX_OLD
    };
    body.size("size", max)
}

fn block_request(body: &mut Body<'_>) -> Result<BlockRequest, WireError> {
    let sector = body.sector()?;
    let block_id = body.block_id()?;
    let size_bytes = body.size("blksize", BIO_LEN_MAX)?;
    body.skip::<4>()?;
    Ok(BlockRequest {
        sector,
        block_id,
        size_bytes,
    })
}

fn digest_request(body: &mut Body<'_>) -> Result<DigestRequest, WireError> {
    let BlockRequest {
        sector,
        block_id,
        size_bytes,
    } = block_request(body)?;
    Ok(DigestRequest {
        sector,
        block_id,
        size_bytes,
        digest: body.digest()?,
    })
}

fn dagtag_request(body: &mut Body<'_>) -> Result<DagtagRequest, WireError> {
    Ok(DagtagRequest {
        sector: body.sector()?,
        block_id: body.block_id()?,
        size_bytes: body.size("blksize", BIO_LEN_MAX)?,
        dagtag_node_id: body.node_id("dagtag_node_id")?,
        dagtag: Dagtag(body.u64()?),
    })
}

fn digest_dagtag_request(body: &mut Body<'_>) -> Result<DigestDagtagRequest, WireError> {
    let request = dagtag_request(body)?;
    Ok(DigestDagtagRequest {
        sector: request.sector,
        block_id: request.block_id,
        size_bytes: request.size_bytes,
        dagtag_node_id: request.dagtag_node_id,
        dagtag: request.dagtag,
        digest: body.digest()?,
    })
}

fn block_ack(body: &mut Body<'_>) -> Result<BlockAck, WireError> {
    Ok(BlockAck {
        sector: body.sector()?,
        block_id: body.block_id()?,
        size_bytes: body.u32()?,
        seq_num: body.u32()?,
    })
}

fn ov_result_id(body: &mut Body<'_>) -> Result<OvResultId, WireError> {
    let BlockAck {
        sector,
        block_id,
        size_bytes,
        seq_num,
    } = block_ack(body)?;
    let result = body.enumerated("result", OvResultCode::from_wire)?;
    Ok(OvResultId {
        sector,
        block_id,
        size_bytes,
        seq_num,
        result,
    })
}

fn block_desc(body: &mut Body<'_>) -> Result<BlockDesc, WireError> {
    Ok(BlockDesc {
        sector: body.sector()?,
        size_bytes: body.u32()?,
    })
}

fn connection_features(body: &mut Body<'_>) -> Result<ConnectionFeatures, WireError> {
    let protocol_min = body.u32()?;
    let features = Features::from_bits_retain(body.u32()?);
    let protocol_max = body.u32()?;
    Ok(ConnectionFeatures {
        protocol_min,
        protocol_max,
        features,
        sender_node_id: body.node_id("sender_node_id")?,
        receiver_node_id: body.node_id("receiver_node_id")?,
    })
}

fn sync_param(body: &mut Body<'_>) -> Result<SyncParam, WireError> {
    let resync_rate_kib_s = body.u32()?;
    let name = body.rest();
    let verify_alg = if name.is_empty() {
        None
    } else {
        Some(body.alg_name("verify_alg", name)?)
    };
    Ok(SyncParam {
        resync_rate_kib_s,
        verify_alg,
    })
}

fn sync_param89(body: &mut Body<'_>) -> Result<SyncParam89, WireError> {
    let resync_rate_kib_s = body.u32()?;
    let verify = body.take::<ALG_NAME_LEN>()?;
    let csums = body.take::<ALG_NAME_LEN>()?;
    let dynamic = if body.bytes.is_empty() {
        None
    } else {
        Some(DynamicRate {
            plan_ahead_ds: body.u32()?,
            delay_target_ds: body.u32()?,
            fill_target_sectors: body.u32()?,
            max_rate_kib_s: body.u32()?,
        })
    };
    Ok(SyncParam89 {
        resync_rate_kib_s,
        verify_alg: body.alg_name("verify_alg", &verify)?,
        csums_alg: body.alg_name("csums_alg", &csums)?,
        dynamic,
    })
}

fn protocol(body: &mut Body<'_>) -> Result<Protocol, WireError> {
    let protocol = body.enumerated("protocol", ReplicationProtocol::from_wire)?;
    let after_sb_0p = body.enumerated("after_sb_0p", AfterSb::from_wire)?;
    let after_sb_1p = body.enumerated("after_sb_1p", AfterSb::from_wire)?;
    let after_sb_2p = body.enumerated("after_sb_2p", AfterSb::from_wire)?;
    let conn_flags = ConnFlags::from_bits_retain(body.u32()?);
    let two_primaries = body.enumerated("two_primaries", |value| match value {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    })?;
    let name = body.rest();
    let integrity_alg = if name.is_empty() {
        AlgName::default()
    } else {
        body.alg_name("integrity_alg", name)?
    };
    Ok(Protocol {
        protocol,
        after_sb_0p,
        after_sb_1p,
        after_sb_2p,
        conn_flags,
        two_primaries,
        integrity_alg,
    })
}

fn uuids(body: &mut Body<'_>) -> Result<Uuids, WireError> {
    Ok(Uuids {
        current: Uuid(body.u64()?),
        bitmap: Uuid(body.u64()?),
        history: [Uuid(body.u64()?), Uuid(body.u64()?)],
        dirty_bits: body.u64()?,
        flags: UuidFlags::from_bits_retain(body.u64()?),
    })
}

fn uuids110(body: &mut Body<'_>) -> Result<Uuids110, WireError> {
    let current = Uuid(body.u64()?);
    let dirty_bits = body.u64()?;
    let flags = UuidFlags::from_bits_retain(body.u64()?);
    let node_mask = body.mask()?;
    let slots = body.mask()?;
    if slots.0 >> NodeId::COUNT != 0 {
        return Err(body.bad("bitmap_uuids_mask", slots.0));
    }
    let mut words = body.rest().chunks_exact(8).map(be64);
    if (words.len() as u32) < slots.count() {
        return Err(body.bad("bitmap_uuids_mask", slots.0));
    }
    let bitmap_uuids = slots.iter().zip(words.by_ref()).collect();
    // `zip` stops before it takes a word that has no node, so what is left is the history.
    let history = words.take(HISTORY_UUIDS_MAX).collect();
    Ok(Uuids110 {
        current,
        dirty_bits,
        flags,
        node_mask,
        bitmap_uuids,
        history,
    })
}

fn be64(chunk: &[u8]) -> Uuid {
    Uuid(
        chunk
            .iter()
            .fold(0, |word, byte| word << 8 | u64::from(*byte)),
    )
}

fn sizes(body: &mut Body<'_>, dialect: &Dialect) -> Result<Sizes, WireError> {
    let mut sizes = Sizes {
        d_size: body.sector()?,
        u_size: body.sector()?,
        c_size: body.sector()?,
        max_bio_size_bytes: body.u32()?,
        queue_order_type: body.u16()?,
        dds_flags: DeviceDescFlags::from_bits_retain(body.u16()?),
        limits: None,
    };
    if dialect.features.contains(Features::WSAME) {
        sizes.limits = Some(DeviceLimits {
            physical_block_size_bytes: body.u32()?,
            logical_block_size_bytes: body.u32()?,
            alignment_offset_bytes: body.u32()?,
            io_min_bytes: body.u32()?,
            io_opt_bytes: body.u32()?,
            discard_enabled: body.u8()?,
            discard_zeroes_data: body.u8()?,
            write_same_capable: body.u8()?,
            bm_block_shift_minus_12: body.u8()?,
        });
    }
    Ok(sizes)
}

fn state(body: &mut Body<'_>, dialect: &Dialect) -> Result<PeerState, WireError> {
    let word = body.u32()?;
    StateWord(word)
        .unpack(DiskNumbering::of_protocol(dialect.protocol))
        .ok_or(body.bad("state", u64::from(word)))
}

fn state_change(body: &mut Body<'_>) -> Result<StateChange, WireError> {
    Ok(StateChange {
        mask: StateWord(body.u32()?),
        val: StateWord(body.u32()?),
    })
}

fn compressed_bitmap(body: &mut Body<'_>) -> Result<CompressedBitmap, WireError> {
    let encoding = body.u8()?;
    if encoding & 0x0F != RLE_VLI_BITS {
        return Err(body.bad("encoding", u64::from(encoding)));
    }
    Ok(CompressedBitmap {
        first_run: if encoding & 0x80 == 0 {
            RunKind::Clear
        } else {
            RunKind::Set
        },
        pad_bits: encoding >> 4 & 7,
        code: body.rest().to_vec(),
    })
}

fn twopc_head(body: &mut Body<'_>, dialect: &Dialect) -> Result<TwopcHead, WireError> {
    let tid = body.u32()?;
    if dialect.features.contains(Features::TWOPC_V2) {
        let flags = TwopcFlags::from_bits_retain(body.u32()?);
        body.skip::<2>()?;
        // Sign extension makes -1 in one byte the -1 of the older layout.
        let initiator = i32::from(body.u8()? as i8);
        let target = i32::from(body.u8()? as i8);
        twopc_nodes(body, tid, flags, initiator, target)
    } else {
        let initiator = body.u32()? as i32;
        let target = body.u32()? as i32;
        twopc_nodes(body, tid, TwopcFlags::empty(), initiator, target)
    }
}

fn twopc_nodes(
    body: &mut Body<'_>,
    tid: u32,
    flags: TwopcFlags,
    initiator: i32,
    target: i32,
) -> Result<TwopcHead, WireError> {
    let initiator_node_id = NodeId::new(initiator as u32)
        .ok_or(body.bad("initiator_node_id", u64::from(initiator as u32)))?;
    let target_node_id = match target {
        -1 => None,
        id => Some(NodeId::new(id as u32).ok_or(body.bad("target_node_id", id as u32 as u64))?),
    };
    let nodes_to_reach = body.mask()?;
    Ok(TwopcHead {
        tid,
        flags,
        initiator_node_id,
        target_node_id,
        nodes_to_reach,
    })
}

fn twopc_outcome(body: &mut Body<'_>, dialect: &Dialect) -> Result<TwopcOutcome, WireError> {
    Ok(TwopcOutcome {
        head: twopc_head(body, dialect)?,
        primary_nodes: body.mask()?,
        word: body.u64()?,
    })
}

fn twopc_reply(body: &mut Body<'_>) -> Result<TwopcReply, WireError> {
    Ok(TwopcReply {
        tid: body.u32()?,
        initiator_node_id: body.node_id("initiator_node_id")?,
        reachable_nodes: body.mask()?,
        primary_nodes: body.mask()?,
        word: body.u64()?,
    })
}

fn enable_replication(body: &mut Body<'_>) -> Result<EnableReplication, WireError> {
    match body.u8()? {
        0 => Ok(EnableReplication { enable: false }),
        1 => Ok(EnableReplication { enable: true }),
        other => Err(body.bad("enable", u64::from(other))),
    }
}

/// The bytes that are not decoded yet.
struct Body<'a> {
    command: Command,
    need: usize,
    bytes: &'a [u8],
}

impl<'a> Body<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let Some((head, tail)) = self.bytes.split_first_chunk::<N>() else {
            let Body {
                command,
                need,
                bytes,
            } = *self;
            return Err(WireError::ShortBody {
                command,
                have: need,
                need: need + N - bytes.len(),
            });
        };
        self.bytes = tail;
        Ok(*head)
    }

    fn skip<const N: usize>(&mut self) -> Result<(), WireError> {
        self.take::<N>().map(drop)
    }

    fn rest(&mut self) -> &'a [u8] {
        core::mem::take(&mut self.bytes)
    }

    fn u8(&mut self) -> Result<u8, WireError> {
        Ok(u8::from_be_bytes(self.take()?))
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_be_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_be_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_be_bytes(self.take()?))
    }

    fn sector(&mut self) -> Result<Sector, WireError> {
        Ok(Sector(self.u64()?))
    }

    fn block_id(&mut self) -> Result<BlockId, WireError> {
        Ok(BlockId(self.u64()?))
    }

    fn mask(&mut self) -> Result<NodeMask, WireError> {
        Ok(NodeMask(self.u64()?))
    }

    fn node_id(&mut self, field: &'static str) -> Result<NodeId, WireError> {
        self.enumerated(field, NodeId::new)
    }

    /// Bytes of a request: whole sectors, at least one, at most `max`.
    fn size(&mut self, field: &'static str, max: u32) -> Result<u32, WireError> {
        self.enumerated(field, |size| {
            (size != 0 && size <= max && size.is_multiple_of(512)).then_some(size)
        })
    }

    fn enumerated<T>(
        &mut self,
        field: &'static str,
        meaning: impl Fn(u32) -> Option<T>,
    ) -> Result<T, WireError> {
        let value = self.u32()?;
        meaning(value).ok_or(self.bad(field, u64::from(value)))
    }

    fn digest(&mut self) -> Result<Digest, WireError> {
        let bytes = self.rest();
        Digest::new(bytes).ok_or(self.bad("digest length", bytes.len() as u64))
    }

    /// The name before the first NUL of `bytes`; there must be one.
    fn alg_name(&self, field: &'static str, bytes: &[u8]) -> Result<AlgName, WireError> {
        let mut parts = bytes.splitn(2, |byte| *byte == 0);
        let name = parts.next().unwrap_or_default();
        let terminated = parts.next().is_some();
        AlgName::new(name)
            .filter(|_| terminated)
            .ok_or(self.bad(field, bytes.len() as u64))
    }

    fn bad(&self, field: &'static str, value: u64) -> WireError {
        WireError::Field {
            command: self.command,
            field,
            value,
        }
    }
}
