//! The packets as values: one variant per command, one struct per layout (wire.md 4.2).
//!
//! Values carry meaning, not layout: pads are gone, disk states are in 9.x numbering, sizes that
//! end in `_bytes` count bytes and everything of type `Sector` counts sectors. Opaque numbers are
//! kept as they travel, read as big-endian, and must only be compared and echoed.

use alloc::vec::Vec;
use core::fmt;

use super::command::Command;
use super::flags::{
    AfterSb, ConnFlags, DataFlags, DeviceDescFlags, Features, OvResultCode, ReplicationProtocol,
    TwopcFlags, UuidFlags,
};
use super::state::{PeerState, StateChange, StateWord};
use super::{ALG_NAME_LEN, CHALLENGE_LEN, DIGEST_LEN_MAX};
use crate::units::{Dagtag, NodeId, NodeMask, Sector, Uuid};

/// One packet. The variant is the command; the value is what travels behind the header.
///
/// Bulk payload (application, resync and write-same data) is not part of it: where a struct has
/// `payload_len`, that many bytes follow on the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packet {
    /// `P_DATA`: application write.
    Data(Data),
    /// `P_DATA_REPLY`: answer to a remote read.
    DataReply(Data),
    /// `P_RS_DATA_REPLY`: data for a resync.
    RsDataReply(Data),
    /// `P_BARRIER`: end of a write epoch.
    Barrier(Barrier),
    /// `P_BITMAP`: plain bitmap words.
    Bitmap(BitmapWords),
    /// `P_UNPLUG_REMOTE`: hint: submit what is queued.
    UnplugRemote,
    /// `P_DATA_REQUEST`: remote read.
    DataRequest(BlockRequest),
    /// `P_RS_DATA_REQUEST`: resync request.
    RsDataRequest(BlockRequest),
    /// `P_SYNC_PARAM`: resync parameters (protocol up to 88).
    SyncParam(SyncParam),
    /// `P_PROTOCOL`: connection parameters.
    Protocol(Protocol),
    /// `P_UUIDS`: data generations (protocol below 110).
    Uuids(Uuids),
    /// `P_SIZES`: sizes and limits of a volume.
    Sizes(Sizes),
    /// `P_STATE`: state of a volume.
    State(PeerState),
    /// `P_SYNC_UUID`: generation of a starting resync (protocol below 110).
    SyncUuid(Uuid),
    /// `P_AUTH_CHALLENGE`: challenge.
    AuthChallenge([u8; CHALLENGE_LEN]),
    /// `P_AUTH_RESPONSE`: answer to a challenge.
    AuthResponse(Digest),
    /// `P_STATE_CHG_REQ`: state change of a volume (protocol below 110).
    StateChgReq(StateChange),
    /// `P_PING`: are you there?
    Ping,
    /// `P_PING_ACK`: answer to a ping.
    PingAck,
    /// `P_RECV_ACK`: write was received (protocol B).
    RecvAck(BlockAck),
    /// `P_WRITE_ACK`: write is on disk (protocol C).
    WriteAck(BlockAck),
    /// `P_RS_WRITE_ACK`: resync write is on disk.
    RsWriteAck(BlockAck),
    /// `P_SUPERSEDED`: A conflicting write supersedes this one.
    Superseded(BlockAck),
    /// `P_NEG_ACK`: write failed.
    NegAck(BlockAck),
    /// `P_NEG_DREPLY`: remote read failed.
    NegDreply(BlockAck),
    /// `P_NEG_RS_DREPLY`: resync read failed.
    NegRsDreply(BlockAck),
    /// `P_BARRIER_ACK`: epoch is stable.
    BarrierAck(BarrierAck),
    /// `P_STATE_CHG_REPLY`: answer to a state change request.
    StateChgReply(StateRv),
    /// `P_OV_REQUEST`: verify request.
    OvRequest(BlockRequest),
    /// `P_OV_REPLY`: digest of a verify request.
    OvReply(DigestRequest),
    /// `P_OV_RESULT`: result of a verified block (protocol below 122).
    OvResult(BlockAck),
    /// `P_CSUM_RS_REQUEST`: resync request with a digest.
    CsumRsRequest(DigestRequest),
    /// `P_RS_IS_IN_SYNC`: digest was equal.
    RsIsInSync(BlockAck),
    /// `P_SYNC_PARAM89`: resync parameters.
    SyncParam89(SyncParam89),
    /// `P_COMPRESSED_BITMAP`: run-length coded bitmap.
    CompressedBitmap(CompressedBitmap),
    /// `P_DELAY_PROBE`: 8.3 only; skipped.
    DelayProbe(DelayProbe),
    /// `P_OUT_OF_SYNC`: mark a range out of sync.
    OutOfSync(BlockDesc),
    /// `P_RS_CANCEL`: ask for this resync block later.
    RsCancel(BlockAck),
    /// `P_CONN_ST_CHG_REQ`: state change of a connection (protocol 100..=109).
    ConnStChgReq(StateChange),
    /// `P_CONN_ST_CHG_REPLY`: answer to a connection state change.
    ConnStChgReply(StateRv),
    /// `P_RETRY_WRITE`: send this write again later.
    RetryWrite(BlockAck),
    /// `P_PROTOCOL_UPDATE`: new connection parameters.
    ProtocolUpdate(Protocol),
    /// `P_TWOPC_PREPARE`: first phase of a cluster-wide state change.
    TwopcPrepare(TwopcPrepare),
    /// `P_TWOPC_ABORT`: gives a two-phase commit up.
    TwopcAbort(TwopcOutcome),
    /// `P_DAGTAG`: sets the dagtag.
    Dagtag(Dagtag),
    /// `P_TRIM`: discard.
    Trim(Trim),
    /// `P_RS_THIN_REQ`: resync request, "deallocated" allowed.
    RsThinReq(BlockRequest),
    /// `P_RS_DEALLOCATED`: resync block is all zero (protocol below 122).
    RsDeallocated(BlockDesc),
    /// `P_WSAME`: write-same.
    Wsame(Wsame),
    /// `P_TWOPC_PREP_RSZ`: first phase of a cluster-wide resize.
    TwopcPrepRsz(TwopcResize),
    /// `P_ZEROES`: zero-out.
    Zeroes(Trim),
    /// `P_PEER_ACK`: nodes that have all writes up to a dagtag.
    PeerAck(PeerAck),
    /// `P_PEERS_IN_SYNC`: nodes that have identical data in a range.
    PeersInSync(PeersInSync),
    /// `P_UUIDS110`: data generations.
    Uuids110(Uuids110),
    /// `P_PEER_DAGTAG`: dagtag of a commonly lost primary.
    PeerDagtag(PeerDagtag),
    /// `P_CURRENT_UUID`: generation of a node without a disk.
    CurrentUuid(CurrentUuid),
    /// `P_TWOPC_YES`: agrees to a two-phase commit.
    TwopcYes(TwopcReply),
    /// `P_TWOPC_NO`: refuses a two-phase commit.
    TwopcNo(TwopcReply),
    /// `P_TWOPC_COMMIT`: second phase of a two-phase commit.
    TwopcCommit(TwopcOutcome),
    /// `P_TWOPC_RETRY`: try the two-phase commit again later.
    TwopcRetry(TwopcReply),
    /// `P_CONFIRM_STABLE`: A part of the current epoch is stable.
    ConfirmStable(ConfirmStable),
    /// `P_RS_CANCEL_AHEAD`: source is Ahead: stop asking.
    RsCancelAhead(BlockAck),
    /// `P_DISCONNECT`: the handshake ended in a refusal.
    Disconnect,
    /// `P_RS_DAGTAG_REQ`: resync request with a dagtag.
    RsDagtagReq(DagtagRequest),
    /// `P_RS_CSUM_DAGTAG_REQ`: resync request with digest and dagtag.
    RsCsumDagtagReq(DigestDagtagRequest),
    /// `P_RS_THIN_DAGTAG_REQ`: thin resync request with a dagtag.
    RsThinDagtagReq(DagtagRequest),
    /// `P_OV_DAGTAG_REQ`: verify request with a dagtag.
    OvDagtagReq(DagtagRequest),
    /// `P_OV_DAGTAG_REPLY`: digest of a verify request, with a dagtag.
    OvDagtagReply(DigestDagtagRequest),
    /// `P_WRITE_ACK_IN_SYNC`: write is on disk and the block in sync.
    WriteAckInSync(BlockAck),
    /// `P_RS_NEG_ACK`: resync write failed.
    RsNegAck(BlockAck),
    /// `P_OV_RESULT_ID`: result of a verified block.
    OvResultId(OvResultId),
    /// `P_RS_DEALLOCATED_ID`: resync block is all zero.
    RsDeallocatedId(BlockAck),
    /// `P_FLUSH_REQUESTS`: push peer acks out before a resync ends.
    FlushRequests(FlushRequests),
    /// `P_FLUSH_FORWARD`: forwarded flush.
    FlushForward(FlushForward),
    /// `P_FLUSH_REQUESTS_ACK`: answer to a flush.
    FlushRequestsAck(FlushRequestsAck),
    /// `P_ENABLE_REPLICATION_NEXT`: whether the next resync replicates writes.
    EnableReplicationNext(EnableReplication),
    /// `P_ENABLE_REPLICATION`: whether writes are replicated now.
    EnableReplication(EnableReplication),
    /// `P_INITIAL_META`: first packet of a control stream.
    InitialMeta,
    /// `P_INITIAL_DATA`: first packet of a data stream.
    InitialData,
    /// `P_CONNECTION_FEATURES`: versions and features.
    ConnectionFeatures(ConnectionFeatures),
}

impl Packet {
    /// The command under which the packet travels.
    pub const fn command(&self) -> Command {
        match self {
            Packet::Data(_) => Command::Data,
            Packet::DataReply(_) => Command::DataReply,
            Packet::RsDataReply(_) => Command::RsDataReply,
            Packet::Barrier(_) => Command::Barrier,
            Packet::Bitmap(_) => Command::Bitmap,
            Packet::UnplugRemote => Command::UnplugRemote,
            Packet::DataRequest(_) => Command::DataRequest,
            Packet::RsDataRequest(_) => Command::RsDataRequest,
            Packet::SyncParam(_) => Command::SyncParam,
            Packet::Protocol(_) => Command::Protocol,
            Packet::Uuids(_) => Command::Uuids,
            Packet::Sizes(_) => Command::Sizes,
            Packet::State(_) => Command::State,
            Packet::SyncUuid(_) => Command::SyncUuid,
            Packet::AuthChallenge(_) => Command::AuthChallenge,
            Packet::AuthResponse(_) => Command::AuthResponse,
            Packet::StateChgReq(_) => Command::StateChgReq,
            Packet::Ping => Command::Ping,
            Packet::PingAck => Command::PingAck,
            Packet::RecvAck(_) => Command::RecvAck,
            Packet::WriteAck(_) => Command::WriteAck,
            Packet::RsWriteAck(_) => Command::RsWriteAck,
            Packet::Superseded(_) => Command::Superseded,
            Packet::NegAck(_) => Command::NegAck,
            Packet::NegDreply(_) => Command::NegDreply,
            Packet::NegRsDreply(_) => Command::NegRsDreply,
            Packet::BarrierAck(_) => Command::BarrierAck,
            Packet::StateChgReply(_) => Command::StateChgReply,
            Packet::OvRequest(_) => Command::OvRequest,
            Packet::OvReply(_) => Command::OvReply,
            Packet::OvResult(_) => Command::OvResult,
            Packet::CsumRsRequest(_) => Command::CsumRsRequest,
            Packet::RsIsInSync(_) => Command::RsIsInSync,
            Packet::SyncParam89(_) => Command::SyncParam89,
            Packet::CompressedBitmap(_) => Command::CompressedBitmap,
            Packet::DelayProbe(_) => Command::DelayProbe,
            Packet::OutOfSync(_) => Command::OutOfSync,
            Packet::RsCancel(_) => Command::RsCancel,
            Packet::ConnStChgReq(_) => Command::ConnStChgReq,
            Packet::ConnStChgReply(_) => Command::ConnStChgReply,
            Packet::RetryWrite(_) => Command::RetryWrite,
            Packet::ProtocolUpdate(_) => Command::ProtocolUpdate,
            Packet::TwopcPrepare(_) => Command::TwopcPrepare,
            Packet::TwopcAbort(_) => Command::TwopcAbort,
            Packet::Dagtag(_) => Command::Dagtag,
            Packet::Trim(_) => Command::Trim,
            Packet::RsThinReq(_) => Command::RsThinReq,
            Packet::RsDeallocated(_) => Command::RsDeallocated,
            Packet::Wsame(_) => Command::Wsame,
            Packet::TwopcPrepRsz(_) => Command::TwopcPrepRsz,
            Packet::Zeroes(_) => Command::Zeroes,
            Packet::PeerAck(_) => Command::PeerAck,
            Packet::PeersInSync(_) => Command::PeersInSync,
            Packet::Uuids110(_) => Command::Uuids110,
            Packet::PeerDagtag(_) => Command::PeerDagtag,
            Packet::CurrentUuid(_) => Command::CurrentUuid,
            Packet::TwopcYes(_) => Command::TwopcYes,
            Packet::TwopcNo(_) => Command::TwopcNo,
            Packet::TwopcCommit(_) => Command::TwopcCommit,
            Packet::TwopcRetry(_) => Command::TwopcRetry,
            Packet::ConfirmStable(_) => Command::ConfirmStable,
            Packet::RsCancelAhead(_) => Command::RsCancelAhead,
            Packet::Disconnect => Command::Disconnect,
            Packet::RsDagtagReq(_) => Command::RsDagtagReq,
            Packet::RsCsumDagtagReq(_) => Command::RsCsumDagtagReq,
            Packet::RsThinDagtagReq(_) => Command::RsThinDagtagReq,
            Packet::OvDagtagReq(_) => Command::OvDagtagReq,
            Packet::OvDagtagReply(_) => Command::OvDagtagReply,
            Packet::WriteAckInSync(_) => Command::WriteAckInSync,
            Packet::RsNegAck(_) => Command::RsNegAck,
            Packet::OvResultId(_) => Command::OvResultId,
            Packet::RsDeallocatedId(_) => Command::RsDeallocatedId,
            Packet::FlushRequests(_) => Command::FlushRequests,
            Packet::FlushForward(_) => Command::FlushForward,
            Packet::FlushRequestsAck(_) => Command::FlushRequestsAck,
            Packet::EnableReplicationNext(_) => Command::EnableReplicationNext,
            Packet::EnableReplication(_) => Command::EnableReplication,
            Packet::InitialMeta => Command::InitialMeta,
            Packet::InitialData => Command::InitialData,
            Packet::ConnectionFeatures(_) => Command::ConnectionFeatures,
        }
    }

    /// Bytes of bulk payload that follow the packet on the stream.
    pub const fn payload_len(&self) -> u32 {
        match self {
            Packet::Data(data) | Packet::DataReply(data) | Packet::RsDataReply(data) => {
                data.payload_len
            }
            Packet::Wsame(wsame) => wsame.payload_len,
            _ => 0,
        }
    }

    /// The integrity digest of a packet that may carry one (wire.md 6.6).
    pub const fn integrity(&self) -> Option<&Digest> {
        match self {
            Packet::Data(data) | Packet::DataReply(data) | Packet::RsDataReply(data) => {
                Some(&data.digest)
            }
            Packet::Wsame(wsame) => Some(&wsame.digest),
            _ => None,
        }
    }

    /// Puts the integrity digest of the payload into a packet that may carry one.
    pub fn set_integrity(&mut self, digest: Digest) {
        match self {
            Packet::Data(data) | Packet::DataReply(data) | Packet::RsDataReply(data) => {
                data.digest = digest;
            }
            Packet::Wsame(wsame) => wsame.digest = digest,
            _ => {}
        }
    }
}

/// Opaque identifier of a block or request, echoed in its answers.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u64);

impl BlockId {
    /// "This belongs to resync" in resync packets below protocol 122.
    pub const SYNCER: BlockId = BlockId(u64::MAX);
    /// `P_OV_RESULT`: not compared.
    pub const OV_SKIP: BlockId = BlockId(4710);
    /// `P_OV_RESULT`: equal.
    pub const OV_IN_SYNC: BlockId = BlockId(4711);
    /// `P_OV_RESULT`: different.
    pub const OV_OUT_OF_SYNC: BlockId = BlockId(4712);
}

impl fmt::Debug for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockId({:#x})", self.0)
    }
}

/// A digest of 0..=64 bytes, held in place. Empty where none is in use.
#[derive(Clone, Copy)]
pub struct Digest {
    len: u8,
    bytes: [u8; DIGEST_LEN_MAX],
}

impl Digest {
    /// No digest.
    pub const EMPTY: Digest = Digest {
        len: 0,
        bytes: [0; DIGEST_LEN_MAX],
    };

    /// The digest with these bytes, none if there are more than 64.
    pub fn new(bytes: &[u8]) -> Option<Digest> {
        let mut digest = Digest::EMPTY;
        digest.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        digest.len = bytes.len() as u8;
        Some(digest)
    }

    /// The bytes as they travel.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Number of bytes.
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there is no digest.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Default for Digest {
    fn default() -> Self {
        Digest::EMPTY
    }
}

impl PartialEq for Digest {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Digest {}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digest(")?;
        for byte in self.as_bytes() {
            write!(f, "{byte:02x}")?;
        }
        f.write_str(")")
    }
}

/// Name of a digest algorithm, at most 63 bytes without NUL; empty means "none".
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct AlgName(Vec<u8>);

impl AlgName {
    /// The name with these bytes; none if it is too long or contains a NUL.
    pub fn new(name: &[u8]) -> Option<AlgName> {
        (name.len() < ALG_NAME_LEN && !name.contains(&0)).then(|| AlgName(name.to_vec()))
    }

    /// The bytes without the terminating NUL.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The name as text; none if a peer sent something else than UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        core::str::from_utf8(&self.0).ok()
    }

    /// Whether no algorithm is named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for AlgName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

/// A write or a reply with data; `payload_len` bytes follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Data {
    /// First sector.
    pub sector: Sector,
    /// Identifier of the request.
    pub block_id: BlockId,
    /// Counter of the volume (wire.md 6.4); 0 in replies.
    pub seq_num: u32,
    /// Flags; none in replies.
    pub flags: DataFlags,
    /// Integrity digest of the payload, empty if integrity is not in use.
    pub digest: Digest,
    /// Bytes of payload that follow.
    pub payload_len: u32,
}

/// A discard or zero-out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trim {
    /// First sector.
    pub sector: Sector,
    /// Identifier of the request.
    pub block_id: BlockId,
    /// Counter of the volume (wire.md 6.4).
    pub seq_num: u32,
    /// Flags.
    pub flags: DataFlags,
    /// Bytes affected.
    pub size_bytes: u32,
}

/// A write-same; one logical block of `payload_len` bytes follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wsame {
    /// First sector.
    pub sector: Sector,
    /// Identifier of the request.
    pub block_id: BlockId,
    /// Counter of the volume (wire.md 6.4).
    pub seq_num: u32,
    /// Flags.
    pub flags: DataFlags,
    /// Bytes affected.
    pub size_bytes: u32,
    /// Integrity digest of the payload, empty if integrity is not in use.
    pub digest: Digest,
    /// Bytes of payload that follow.
    pub payload_len: u32,
}

/// An ack of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockAck {
    /// First sector of the request.
    pub sector: Sector,
    /// Identifier of the request, or a magic value (wire.md 4.3).
    pub block_id: BlockId,
    /// Bytes of the request.
    pub size_bytes: u32,
    /// The sender's counter (wire.md 6.4); 0 in `P_RS_DEALLOCATED_ID`.
    pub seq_num: u32,
}

/// Result of an online verify of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OvResultId {
    /// First sector of the request.
    pub sector: Sector,
    /// Identifier of the request.
    pub block_id: BlockId,
    /// Bytes of the request.
    pub size_bytes: u32,
    /// The sender's counter (wire.md 6.4).
    pub seq_num: u32,
    /// What the comparison said.
    pub result: OvResultCode,
}

/// A request for a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockRequest {
    /// First sector.
    pub sector: Sector,
    /// Identifier of the request.
    pub block_id: BlockId,
    /// Bytes wanted.
    pub size_bytes: u32,
}

/// A request that carries a digest of the sender's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DigestRequest {
    /// First sector.
    pub sector: Sector,
    /// Identifier of the request.
    pub block_id: BlockId,
    /// Bytes covered.
    pub size_bytes: u32,
    /// Digest with csums-alg or verify-alg.
    pub digest: Digest,
}

impl DigestRequest {
    /// The block without what travels with it.
    pub const fn block(&self) -> BlockRequest {
        BlockRequest {
            sector: self.sector,
            block_id: self.block_id,
            size_bytes: self.size_bytes,
        }
    }
}

/// A request that depends on a dagtag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DagtagRequest {
    /// First sector.
    pub sector: Sector,
    /// Identifier of the request.
    pub block_id: BlockId,
    /// Bytes wanted.
    pub size_bytes: u32,
    /// Primary whose dagtag must have arrived before the answer; ignored with dagtag 0.
    pub dagtag_node_id: NodeId,
    /// The dagtag, 0 for no dependency.
    pub dagtag: Dagtag,
}

impl DagtagRequest {
    /// The block without what travels with it.
    pub const fn block(&self) -> BlockRequest {
        BlockRequest {
            sector: self.sector,
            block_id: self.block_id,
            size_bytes: self.size_bytes,
        }
    }
}

/// A request that depends on a dagtag and carries a digest of the sender's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DigestDagtagRequest {
    /// First sector.
    pub sector: Sector,
    /// Identifier of the request.
    pub block_id: BlockId,
    /// Bytes covered.
    pub size_bytes: u32,
    /// Primary whose dagtag must have arrived before the answer; ignored with dagtag 0.
    pub dagtag_node_id: NodeId,
    /// The dagtag, 0 for no dependency.
    pub dagtag: Dagtag,
    /// Digest with csums-alg or verify-alg.
    pub digest: Digest,
}

impl DigestDagtagRequest {
    /// The block without what travels with it.
    pub const fn block(&self) -> BlockRequest {
        BlockRequest {
            sector: self.sector,
            block_id: self.block_id,
            size_bytes: self.size_bytes,
        }
    }
}

/// Versions and features of the sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionFeatures {
    /// Oldest protocol version that the sender speaks.
    pub protocol_min: u32,
    /// Newest protocol version that the sender speaks; 0 means `protocol_min`.
    pub protocol_max: u32,
    /// Announced features.
    pub features: Features,
    /// Node id of the sender; 0 from 8.4.
    pub sender_node_id: NodeId,
    /// Node id that the sender expects of the receiver; 0 from 8.4.
    pub receiver_node_id: NodeId,
}

/// End of an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Barrier {
    /// Opaque number of the epoch.
    pub barrier: u32,
}

/// Answer to a barrier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BarrierAck {
    /// Opaque number of the epoch, echoed.
    pub barrier: u32,
    /// Writes of the epoch that were not confirmed before.
    pub set_size: u32,
}

/// A part of the current epoch is stable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConfirmStable {
    /// First write that is confirmed.
    pub oldest_block_id: BlockId,
    /// Last write that is confirmed.
    pub youngest_block_id: BlockId,
    /// Number of writes that are confirmed.
    pub set_size: u32,
}

/// Resync parameters at protocol 88 and earlier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncParam {
    /// Resync rate in KiB/s.
    pub resync_rate_kib_s: u32,
    /// Algorithm of online verify; protocol 88 only.
    pub verify_alg: Option<AlgName>,
}

/// Resync parameters at protocol 89 and later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncParam89 {
    /// Resync rate in KiB/s.
    pub resync_rate_kib_s: u32,
    /// Algorithm of online verify.
    pub verify_alg: AlgName,
    /// Algorithm of resync with digests.
    pub csums_alg: AlgName,
    /// Parameters of the dynamic rate; protocol 95 and later, and always there.
    pub dynamic: Option<DynamicRate>,
}

/// Parameters of the dynamic resync rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DynamicRate {
    /// Length of the plan in 0.1 s.
    pub plan_ahead_ds: u32,
    /// Wanted delay in 0.1 s.
    pub delay_target_ds: u32,
    /// Wanted data in flight in sectors.
    pub fill_target_sectors: u32,
    /// Limit of the rate in KiB/s.
    pub max_rate_kib_s: u32,
}

/// Connection parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Replication protocol.
    pub protocol: ReplicationProtocol,
    /// Split-brain policy without a primary.
    pub after_sb_0p: AfterSb,
    /// Split-brain policy with one primary.
    pub after_sb_1p: AfterSb,
    /// Split-brain policy with two primaries.
    pub after_sb_2p: AfterSb,
    /// Flags.
    pub conn_flags: ConnFlags,
    /// Two primaries are allowed.
    pub two_primaries: bool,
    /// Algorithm of the sender's integrity digests; protocol 87 and later, empty for none.
    pub integrity_alg: AlgName,
}

/// Data generations at protocols below 110.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uuids {
    /// Current UUID.
    pub current: Uuid,
    /// Bitmap UUID.
    pub bitmap: Uuid,
    /// History UUIDs, newest first.
    pub history: [Uuid; 2],
    /// Out-of-sync 4 KiB blocks.
    pub dirty_bits: u64,
    /// Flags; only the lowest four.
    pub flags: UuidFlags,
}

/// Data generations at protocols 110 and later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uuids110 {
    /// Current UUID.
    pub current: Uuid,
    /// Bits set towards the receiver, in the sender's granularity.
    pub dirty_bits: u64,
    /// Flags.
    pub flags: UuidFlags,
    /// Weak nodes (with `NEW_DATAGEN`) or authoritative nodes (without `STABLE`).
    pub node_mask: NodeMask,
    /// Bitmap UUIDs, ascending by node id, each node at most once.
    pub bitmap_uuids: Vec<(NodeId, Uuid)>,
    /// History UUIDs, newest first, at most 32.
    pub history: Vec<Uuid>,
}

/// Generation of a node without a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CurrentUuid {
    /// Exposed data UUID, 0 if none.
    pub uuid: Uuid,
    /// Nodes that do not have the generation.
    pub weak_nodes: NodeMask,
}

/// Sizes of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Usable size of the backing disk in sectors, 0 if diskless.
    pub d_size: Sector,
    /// Configured size in sectors, 0 if none.
    pub u_size: Sector,
    /// Exposed size in sectors.
    pub c_size: Sector,
    /// Most bytes of a request.
    pub max_bio_size_bytes: u32,
    /// Always 0, ignored.
    pub queue_order_type: u16,
    /// Flags.
    pub dds_flags: DeviceDescFlags,
    /// Limits of the backing device; there if and only if [`Features::WSAME`] is agreed.
    pub limits: Option<DeviceLimits>,
}

/// Limits of a backing device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Physical block size in bytes.
    pub physical_block_size_bytes: u32,
    /// Logical block size in bytes.
    pub logical_block_size_bytes: u32,
    /// Alignment offset in bytes.
    pub alignment_offset_bytes: u32,
    /// Smallest efficient request in bytes.
    pub io_min_bytes: u32,
    /// Best request size in bytes.
    pub io_opt_bytes: u32,
    /// Discards work: 0 or 1.
    pub discard_enabled: u8,
    /// Discarded blocks read as zeroes: 0 or 1.
    pub discard_zeroes_data: u8,
    /// Write-same works: 0 or 1.
    pub write_same_capable: u8,
    /// log2 of the bitmap block size minus 12: 0..=8 with [`Features::BM_BLOCK_SHIFT`], else 0.
    pub bm_block_shift_minus_12: u8,
}

/// Result of a state change request below protocol 110; 1 and more is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateRv(pub i32);

impl StateRv {
    /// Done.
    pub const SUCCESS: StateRv = StateRv(1);
    /// Another state change is going on; try again.
    pub const CONCURRENT_ST_CHG: StateRv = StateRv(-19);

    /// Whether the change was accepted.
    pub const fn is_success(self) -> bool {
        self.0 >= 1
    }
}

/// Probe of 8.3, accepted and skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayProbe {
    /// Number of the probe.
    pub seq: u32,
    /// Offset in microseconds.
    pub offset_us: u32,
}

/// A range of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockDesc {
    /// First sector.
    pub sector: Sector,
    /// Bytes.
    pub size_bytes: u32,
}

/// What all requests of a two-phase commit begin with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TwopcHead {
    /// Transaction number, random, never 0.
    pub tid: u32,
    /// Flags; travel only with [`Features::TWOPC_V2`].
    pub flags: TwopcFlags,
    /// Node that started the transaction.
    pub initiator_node_id: NodeId,
    /// Node that is addressed, none for all.
    pub target_node_id: Option<NodeId>,
    /// Nodes that have not seen the request yet.
    pub nodes_to_reach: NodeMask,
}

/// First phase of a cluster-wide state change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TwopcPrepare {
    /// Common part.
    pub head: TwopcHead,
    /// Sent as empty, read by the receiver as a value.
    pub primary_nodes: NodeMask,
    /// The wanted change in the initiator's view.
    pub change: StateChange,
}

/// First phase of a cluster-wide resize.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TwopcResize {
    /// Common part.
    pub head: TwopcHead,
    /// Configured size in sectors, 0 if none.
    pub user_size: Sector,
    /// Flags.
    pub dds_flags: DeviceDescFlags,
}

/// Second phase. What the two words mean depends on the transaction, which only `tid` names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TwopcOutcome {
    /// Common part.
    pub head: TwopcHead,
    /// State change: primary nodes. Resize: diskful primary nodes.
    pub primary_nodes: NodeMask,
    /// State change with `HAS_REACHABLE`: reachable nodes; without: mask and val. Resize: size.
    pub word: u64,
}

impl TwopcOutcome {
    /// State change with `HAS_REACHABLE` and [`Features::TWOPC_V2`]: the reachable nodes.
    pub const fn reachable_nodes(&self) -> NodeMask {
        NodeMask(self.word)
    }

    /// State change without `HAS_REACHABLE`: the change.
    pub const fn change(&self) -> StateChange {
        StateChange {
            mask: StateWord((self.word >> 32) as u32),
            val: StateWord(self.word as u32),
        }
    }

    /// Resize: the size to expose, in sectors.
    pub const fn exposed_size(&self) -> Sector {
        Sector(self.word)
    }
}

impl StateChange {
    /// The pair as the last word of a [`TwopcOutcome`].
    pub const fn to_word(self) -> u64 {
        (self.mask.0 as u64) << 32 | self.val.0 as u64
    }
}

/// Answer to the first phase. What the words mean depends on the transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TwopcReply {
    /// Transaction number.
    pub tid: u32,
    /// Node that started the transaction.
    pub initiator_node_id: NodeId,
    /// Nodes that the sender and those behind it reach.
    pub reachable_nodes: NodeMask,
    /// State change: primary nodes. Resize: diskful primary nodes.
    pub primary_nodes: NodeMask,
    /// State change: weak nodes. Resize: largest possible size in sectors.
    pub word: u64,
}

impl TwopcReply {
    /// State change: nodes without access to good data.
    pub const fn weak_nodes(&self) -> NodeMask {
        NodeMask(self.word)
    }

    /// Resize: the largest possible size in sectors.
    pub const fn max_possible_size(&self) -> Sector {
        Sector(self.word)
    }
}

/// Nodes that have all writes up to a dagtag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerAck {
    /// The nodes.
    pub mask: NodeMask,
    /// Dagtag of one write that the receiver got from the sender.
    pub dagtag: Dagtag,
}

/// Nodes that have identical data in a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeersInSync {
    /// First sector.
    pub sector: Sector,
    /// The nodes.
    pub mask: NodeMask,
    /// Bytes.
    pub size_bytes: u32,
}

/// Dagtag of a primary that was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerDagtag {
    /// Last dagtag received from that primary.
    pub dagtag: Dagtag,
    /// The primary.
    pub node_id: NodeId,
}

/// Flush before the end of a resync.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushRequests {
    /// Number of the flush, ascending from 1.
    pub flush_sequence: u64,
}

/// Flush on behalf of another node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushForward {
    /// Number of the flush.
    pub flush_sequence: u64,
    /// Node that waits for the answer.
    pub initiator_node_id: NodeId,
}

/// Answer to a flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushRequestsAck {
    /// Number of the flush.
    pub flush_sequence: u64,
    /// Primary whose writes were flushed.
    pub primary_node_id: NodeId,
}

/// Whether writes are replicated towards the sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EnableReplication {
    /// True if they are.
    pub enable: bool,
}

/// Plain bitmap words; empty at the end of a plain transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BitmapWords {
    /// Little-endian 64-bit words: bit *n* is bit *n* % 8 of byte *n* / 8.
    pub words: Vec<u8>,
}

/// Value of the bits of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunKind {
    /// In sync.
    Clear,
    /// Out of sync.
    Set,
}

/// Run-length coded bits, coded as `vli` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompressedBitmap {
    /// Value of the first run.
    pub first_run: RunKind,
    /// Unused bits at the end of the last byte, 0..=7.
    pub pad_bits: u8,
    /// The code, at least one byte.
    pub code: Vec<u8>,
}
