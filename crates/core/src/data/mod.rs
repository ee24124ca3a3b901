//! The data path: application requests, writes of peers, resync, and the bookkeeping of both.
//!
//! What the rest of the core calls: `front_request`, `data_packet`, the completions (`data_done`,
//! `data_meta_done`, `data_sent`, `data_digest`), `settle_data` after every input, the hooks of a
//! state change (`close_epoch`, `replication_started`, `thawed`, `resync_left`, `resync_entered`,
//! `resync_resumed`, `queue_peer_ack`), of a lost connection (`drain_connection`, answered by
//! `connection_drained`; `lose_requests`), and of a bitmap exchange (`send_bitmap`).
//!
//! Wake-ups never nest: whoever may go on is queued in `ResourceIo::wakes` and runs from
//! `settle_data`.

mod ack_times;
mod answer_age;
mod audit;
mod balance;
mod before_detach;
mod conflict;
mod dagtag;
mod disk;
pub(crate) mod doubt;
mod exchange;
mod failed_writes;
mod flush_due;
mod flush_foreign;
mod in_sync;
mod last_copy;
mod late_words;
mod leftovers;
mod local_op;
mod newcomers;
mod owed;
mod peer_ack;
mod peer_write;
pub(crate) mod pieces;
mod request;
mod resync_source;
mod resync_target;
pub(crate) mod slab;
mod unreadable;
mod unsettled;
mod verify;
mod write;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::BlockRequest;
use lockstep_format::wire::{ConnState, DiskState, OvResultCode, Packet, bio_len_max};

pub use ack_times::{AckTimes, BOUNDS_US};
use balance::ReadPath;
pub use disk::{BitmapThen, DiskIo, DiskIoGeometry};

use crate::connection::Connection;
use crate::event::{DiskError, DiskOp, Output, Payload, Request, Stream};
use crate::interval::Intervals;
use crate::options::Protocol;
use crate::report::Level;
use crate::resource::{Pending, Resource};
use disk::FlushWaiter;
use peer_ack::PeerAckQueue;
use peer_write::{PeerWrite, ReceivedEpoch};
use resync_source::SourceRead;
pub(crate) use resync_source::Wanted;
use resync_target::TargetSync;
use slab::{Key, Slab};
pub(crate) use write::AppRequest;

/// What an output of the data path is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataOp {
    /// Local write, discard or zero-out of an application request.
    AppWrite(Key),
    /// Local read of an application request.
    AppRead(Key),
    /// A write received from a peer.
    PeerWrite(VolumeNr, NodeId, u64),
    /// Read for a peer's `P_DATA_REQUEST`.
    Serve(Key),
    /// Read for a peer's resync.
    SourceRead(VolumeNr, NodeId, Key),
    /// Digest of a block for a peer's checksum resync.
    SourceDigest(VolumeNr, NodeId, Key),
    /// Read of a block for an online verify.
    VerifyRead(VolumeNr, NodeId, Key),
    /// Digest of it.
    VerifyDigest(VolumeNr, NodeId, Key),
    /// Read of a block that a resync asks for with its digest.
    TargetRead(VolumeNr, NodeId, Key),
    /// Digest of it.
    TargetDigest(VolumeNr, NodeId, Key),
    /// Write of a resync reply.
    TargetWrite(VolumeNr, NodeId, Key),
    /// Flush of a volume's data device.
    Flush(VolumeNr),
    /// Bitmap pages starting at this one.
    BitmapPages(VolumeNr, u64),
    /// An activity-log transaction.
    AlBlock(VolumeNr),
}

/// Who waits for an extent, a range or a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// An application request.
    App(Key),
    /// A peer's write: its number on the connection.
    Peer(NodeId, u64),
    /// A resync request of this node.
    Target(NodeId, Key),
    /// A resync request of the peer.
    Source(NodeId, Key),
    /// A read for a peer.
    Serve(Key),
    /// A read of the application on the local disk.
    Read(Key),
}

/// Something that may go on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wake {
    /// Its extents are in the activity log.
    Al(VolumeNr, Owner),
    /// Nothing overlaps any more.
    Range(VolumeNr, Owner),
    /// The flush is done.
    Flushed(VolumeNr, FlushWaiter, Result<(), DiskError>),
}

/// The data path's part of a resource.
#[derive(Debug, Default)]
pub struct ResourceIo {
    /// Sectors written by this node's applications so far.
    pub(crate) dagtag: Dagtag,
    /// Number of the open epoch, and writes in it.
    pub(crate) epoch: u32,
    pub(crate) epoch_writes: u32,
    /// Application requests that were admitted.
    pub(crate) requests: Slab<AppRequest>,
    /// Submitted writes in order, until they are settled.
    pub(crate) log: VecDeque<Key>,
    /// Requests that are not admitted yet, in order.
    pub(crate) held: VecDeque<Request>,
    /// Admitted writes that wait for the end of a suspension, in order.
    pub(crate) postponed: VecDeque<Key>,
    /// Finished writes whose completion is held.
    pub(crate) held_completions: VecDeque<Key>,
    /// Number of the last `P_FLUSH_REQUESTS` sent.
    pub(crate) flush_sequence: u64,
    /// Flushes of front ends.
    pub(crate) flushes: Vec<Key>,
    /// Counts what came from other nodes, which others may have in a cache only.
    pub(crate) foreign_count: u64,
    /// Reads for peers.
    pub(crate) serving: Slab<Serving>,
    pub(crate) peer_ack: PeerAckQueue,
    pub(crate) wakes: VecDeque<Wake>,
    /// Some connection may owe a barrier.
    pub(crate) barriers_due: bool,
    /// Writes parked during a suspension have to be resent or given up.
    pub(crate) parked_due: bool,
    /// Writes parked so far that are still in the log.
    pub(crate) parked: usize,
    /// Requests that go in pieces.
    pub(crate) pieces: pieces::Pieces,
}

/// A read for a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Serving {
    pub(crate) peer: NodeId,
    pub(crate) link: crate::event::LinkId,
    pub(crate) volume: VolumeNr,
    pub(crate) request: lockstep_format::wire::packet::BlockRequest,
    /// Holds the read back behind received writes.
    pub(crate) range: Option<crate::interval::RangeId>,
}

/// The data path's part of a volume.
#[derive(Debug, Default)]
pub struct DeviceIo {
    pub(crate) ranges: Intervals<Owner>,
    /// Writes of peers whose acks wait until the volume's metadata are durable.
    pub(crate) gated_acks: Vec<(NodeId, u64)>,
    /// Counts the disks that were attached and went.
    pub(crate) disk_serial: u64,
    /// Peer that served the last remote read.
    pub(crate) last_read_peer: Option<NodeId>,
    /// A read may have shown what a peer has of writes that are still on their way to this disk.
    pub(crate) read_at_peer: bool,
    /// `round-robin`: the next read that may go either way goes to a peer.
    pub(crate) read_turn: bool,
    /// Reads of front ends on the local disk and at the peers.
    pub(crate) local_reads: ReadPath,
    pub(crate) read_paths: BTreeMap<NodeId, ReadPath>,
    /// Front-end requests admitted and not completed.
    pub upper_pending: u64,
    /// Local disk operations in flight.
    pub lower_pending: u64,
    /// Sectors read by front ends from the local disk.
    pub read_sectors: u64,
    /// Sectors written to the local disk.
    pub written_sectors: u64,
    /// Sectors that peers have marked here instead of sending their writes.
    pub(crate) told_sectors: u64,
    /// The sum of both at the last step of a resync's rate controller.
    pub(crate) written_at_grant: u64,
}

/// The data path's part of a connection.
#[derive(Debug, Default)]
pub struct ConnIo {
    /// Writes of this link may have been sent with protocol A, whatever it is now.
    pub(crate) was_async: bool,
    /// Epoch of the last write sent and the writes sent in it without a barrier.
    pub(crate) epoch: u32,
    pub(crate) epoch_writes: u32,
    /// A write of that epoch was sent, though the peer may have refused it since, and no barrier.
    pub(crate) epoch_is_open: bool,
    /// Barriers sent and not acked: epoch and unconfirmed writes.
    pub(crate) unacked: VecDeque<(u32, u32)>,
    /// When the first of them was sent, or became the first.
    pub(crate) barrier_since: crate::time::Instant,
    /// Writes sent and neither barrier-acked nor confirmed, in order.
    pub(crate) sent: VecDeque<Key>,
    /// When writes were sent that had been kept back.
    pub(crate) resent_at: crate::time::Instant,
    /// Counts of all writes sent and of those settled on this link.
    pub(crate) sent_count: u64,
    pub(crate) settled_count: u64,
    /// `foreign_count` when the last barrier without a write was sent on this link, if all that was counted had been
    /// settled. None since a disk of the peer began to count, or another node became Primary.
    pub(crate) foreign_covered: Option<u64>,
    /// The peer's mirror of this node's dagtag; none before the first `P_DAGTAG` of the link.
    pub(crate) mirror: Option<Dagtag>,
    /// Writes received and not peer-acked, in the order in which they came.
    pub(crate) writes: VecDeque<PeerWrite>,
    /// Number of the next one.
    pub(crate) next_write: u64,
    /// Some may stand behind ones with newer dagtags.
    pub(crate) has_late: bool,
    /// Epochs received and not acked; the last one is open.
    pub(crate) epochs: VecDeque<ReceivedEpoch>,
    pub(crate) first_epoch: u64,
    /// Epochs that the flush in progress covers, and disks that it waits for.
    pub(crate) flushing: Option<peer_write::EpochFlush>,
    pub(crate) flush_serial: u64,
    /// The link is gone; what was received is still being written.
    pub(crate) draining: bool,
    /// `P_FLUSH_REQUESTS` of the peer that wait for the settling of earlier writes.
    pub(crate) flush_requests: VecDeque<flush_due::FlushDue>,
    /// Application writes in flight, in sectors.
    pub ap_in_flight_sectors: u64,
    /// Data of a resync on their way to the peer, in sectors.
    pub(crate) resync_in_flight_sectors: u64,
    /// On this link the peer was sent marks instead of writes.
    pub(crate) was_ahead: bool,
    /// Overlapping writes of two Primaries.
    pub(crate) conflicts: conflict::Conflicts,
}

/// The data path's part of a volume towards a peer.
#[derive(Debug, Default)]
pub struct PeerIo {
    /// Counter of wire.md, 6.4.
    pub(crate) seq: u32,
    /// The peer's counter, as far as its packets have come.
    pub(crate) peer_seq: u32,
    /// Resync from this peer.
    pub(crate) target: Option<TargetSync>,
    /// Resync requests of the peer, and their keys by first sector.
    pub(crate) source: Slab<SourceRead>,
    /// When they are read, beside an application.
    pub(crate) source_pace: crate::rate::SourcePace,
    /// Online verify with this peer.
    pub(crate) verify: verify::Verify,
    pub(crate) source_by_sector: BTreeMap<Sector, Key>,
    /// The UUIDs that the peer has of this node say that something is marked towards it.
    pub(crate) told_marks: bool,
    /// Blocks that the target of this node's resync has marked for certain.
    pub(crate) owed_blocks: u64,
    /// Bit position up to which the peer's bitmap has come.
    pub(crate) bitmap_in: u64,
    /// Bits of blocks that the target got and called in sync while its bitmap was on its way.
    pub(crate) acked_in_exchange: BTreeSet<u64>,
    /// What the peer says of these extents may be older than marks there.
    pub(crate) late_marks: late_words::LateMarks,
    /// The peer's whole bitmap is here and was not used yet.
    pub(crate) bitmap_received: bool,
    /// Bits when the resync started, and failed ones.
    pub resync_total_bits: u64,
    /// Bits that failed.
    pub resync_failed_bits: u64,
    /// Sectors whose digests were equal.
    pub resync_same_sectors: u64,
    /// When the resync started.
    pub resync_started: crate::time::Instant,
    /// Sectors received since the last `connect`.
    pub received_sectors: u64,
    /// Sectors sent since the last `connect`.
    pub sent_sectors: u64,
    /// How long the peer takes to acknowledge writes.
    pub ack_times: AckTimes,
}

/// What failed on a local disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// A read or write of data.
    Data,
    /// Metadata, or a flush: what is on disk is not known any more.
    Meta,
}

impl PeerIo {
    /// Resync requests of the peer that are not answered and acknowledged.
    pub(crate) fn source_requests(&self) -> usize {
        self.source.len()
    }

    /// Sectors of resync requests in flight.
    pub fn rs_in_flight_sectors(&self) -> u64 {
        self.target
            .as_ref()
            .map_or(0, TargetSync::in_flight_sectors)
    }

    /// Speed of the resync so far in KiB/s.
    pub fn resync_rate_kib_s(&self, now: crate::time::Instant) -> u32 {
        let sectors = self.target.as_ref().map_or(0, TargetSync::done_sectors);
        let ms = (now - self.resync_started).as_millis().max(1);
        (sectors / 2 * 1000 / ms) as u32
    }
}

impl Resource {
    /// A disk operation of the data path is done.
    pub(crate) fn data_done(&mut self, op: DataOp, result: Result<Option<Payload>, DiskError>) {
        if let Some(volume) = self.volume_of(op)
            && let Some(device) = self.devices.get_mut(&volume)
        {
            device.io.lower_pending = device.io.lower_pending.saturating_sub(1);
        }
        match op {
            DataOp::AppWrite(key) => self.app_write_done(key, result.map(|_| ())),
            DataOp::AppRead(key) => self.app_read_done(key, result.map(|_| ())),
            DataOp::PeerWrite(volume, peer, number) => {
                self.peer_write_done(volume, peer, number, result.map(|_| ()));
            }
            DataOp::Serve(key) => self.serve_done(key, result),
            DataOp::SourceRead(volume, peer, key) => {
                self.source_read_done(volume, peer, key, result);
            }
            DataOp::TargetWrite(volume, peer, key) => {
                self.target_write_done(volume, peer, key, result.map(|_| ()));
            }
            DataOp::Flush(volume) => self.flush_done(volume, result.map(|_| ())),
            DataOp::VerifyRead(volume, peer, key) => {
                self.verify_read_done(volume, peer, key, result);
            }
            DataOp::TargetRead(volume, peer, key) => {
                self.target_read_done(volume, peer, key, result);
            }
            DataOp::SourceDigest(..)
            | DataOp::TargetDigest(..)
            | DataOp::VerifyDigest(..)
            | DataOp::BitmapPages(..)
            | DataOp::AlBlock(_) => {
                unreachable!("not a disk operation")
            }
        }
    }

    /// A metadata operation of the data path is done.
    pub(crate) fn data_meta_done(&mut self, op: DataOp, result: Result<Vec<u8>, DiskError>) {
        let result = result.map(|_| ());
        match op {
            DataOp::BitmapPages(volume, page) => self.bitmap_pages_done(volume, page, result),
            DataOp::AlBlock(volume) => self.al_block_done(volume, result),
            _ => unreachable!("not a metadata operation"),
        }
    }

    /// Bytes of a send have left; the data path does not ask for it.
    pub(crate) fn data_sent(&mut self, _op: DataOp) {}

    /// A digest is computed.
    pub(crate) fn data_digest(&mut self, op: DataOp, digest: Vec<u8>) {
        match op {
            DataOp::SourceDigest(volume, peer, key) => {
                self.source_digest_done(volume, peer, key, &digest);
            }
            DataOp::VerifyDigest(volume, peer, key) => {
                self.verify_digest_done(volume, peer, key, &digest);
            }
            DataOp::TargetDigest(volume, peer, key) => {
                self.target_digest_done(volume, peer, key, &digest);
            }
            _ => {}
        }
    }

    /// Runs whatever may go on after an input.
    pub(crate) fn settle_data(&mut self) {
        loop {
            while let Some(wake) = self.io.wakes.pop_front() {
                self.wake(wake);
            }
            if self.io.parked_due {
                self.io.parked_due = false;
                self.settle_parked();
            }
            self.release_completions();
            self.admit_held();
            if self.io.wakes.is_empty() {
                break;
            }
        }
        if self.io.barriers_due {
            self.io.barriers_due = false;
            self.send_due_barriers();
        }
    }

    fn wake(&mut self, wake: Wake) {
        match wake {
            Wake::Al(volume, Owner::App(key)) => self.app_write_hot(volume, key),
            Wake::Al(volume, Owner::Peer(peer, number)) => {
                self.peer_write_hot(volume, peer, number);
            }
            Wake::Al(..) => unreachable!("resync does not use the activity log"),
            Wake::Range(_, Owner::App(key)) => self.app_write_clear(key),
            Wake::Range(volume, Owner::Peer(peer, number)) => {
                self.peer_write_submit(volume, peer, number);
            }
            Wake::Range(volume, Owner::Target(peer, key)) => {
                self.target_range_clear(volume, peer, key);
            }
            Wake::Range(_, Owner::Serve(key)) => self.serve_start(key),
            Wake::Range(_, Owner::Read(key)) => self.local_read(key),
            Wake::Range(volume, Owner::Source(peer, key)) => {
                self.source_range_clear(volume, peer, key);
            }
            Wake::Flushed(volume, waiter, result) => self.flushed(volume, waiter, result),
        }
    }

    /// A packet of an established connection that is not about states.
    pub(crate) fn data_packet(
        &mut self,
        peer: NodeId,
        _stream: Stream,
        volume: VolumeNr,
        packet: Packet,
        payload: Option<Payload>,
    ) {
        if self.is_left_over(peer, &packet) {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            let text = "it has lost this connection: what is left in it is old".into();
            self.log(Level::Warn, Some(peer), None, text);
            self.drop_connection(peer, ConnState::NetworkFailure);
            return;
        }
        let nowhere = (NodeId(0), Dagtag(0));
        match packet {
            Packet::Data(data) => self.peer_data(peer, volume, &data, payload),
            Packet::Trim(trim) => self.peer_trim(peer, volume, &trim, false),
            Packet::Zeroes(trim) => self.peer_trim(peer, volume, &trim, true),
            Packet::Barrier(barrier) => self.peer_barrier(peer, barrier.barrier),
            Packet::Dagtag(dagtag) => self.peer_dagtag_jump(peer, dagtag),
            Packet::PeerAck(ack) => self.peer_ack(peer, ack.dagtag, ack.mask),
            Packet::PeersInSync(sync) => self.peers_in_sync(peer, volume, &sync),
            Packet::OutOfSync(desc) => self.peer_out_of_sync(peer, volume, &desc),
            Packet::UnplugRemote | Packet::DelayProbe(_) => {}
            Packet::RecvAck(ack) => self.write_ack(peer, volume, &ack, write::Ack::Received),
            Packet::WriteAck(ack) => self.write_ack(peer, volume, &ack, write::Ack::Written),
            Packet::WriteAckInSync(ack) => self.write_ack(peer, volume, &ack, write::Ack::InSync),
            Packet::NegAck(ack) if planted!(self, NegAckIgnored) => {
                self.write_ack(peer, volume, &ack, write::Ack::Written);
            }
            Packet::NegAck(ack) => self.write_ack(peer, volume, &ack, write::Ack::Failed),
            Packet::Superseded(ack) => self.write_superseded(peer, volume, &ack),
            Packet::RetryWrite(ack) => self.write_postponed(peer, volume, &ack),
            Packet::BarrierAck(ack) => self.barrier_ack(peer, ack.barrier, ack.set_size),
            Packet::ConfirmStable(confirm) => self.confirm_stable(peer, &confirm),
            Packet::DataRequest(request) => self.serve_read(peer, volume, request),
            Packet::DataReply(data) => self.read_reply(peer, volume, &data, payload),
            Packet::NegDreply(ack) => self.read_refused(peer, volume, &ack),
            Packet::FlushRequests(flush) => {
                self.flush_requested(peer, flush.flush_sequence);
            }
            Packet::FlushForward(forward) => {
                self.flush_forwarded(peer, forward.flush_sequence, forward.initiator_node_id);
            }
            Packet::FlushRequestsAck(ack) => {
                self.flush_acked(peer, ack.flush_sequence, ack.primary_node_id);
            }
            Packet::Bitmap(words) => self.bitmap_words(peer, volume, &words),
            Packet::CompressedBitmap(code) => self.bitmap_code(peer, volume, &code),
            Packet::RsDataRequest(r) => {
                self.source_request(peer, volume, r, nowhere, Wanted::Data);
            }
            Packet::CsumRsRequest(r) => {
                let wanted = Wanted::DataUnless(r.digest);
                self.source_request(peer, volume, r.block(), nowhere, wanted);
            }
            Packet::RsThinReq(r) => {
                self.source_request(peer, volume, r, nowhere, Wanted::DataUnlessZero);
            }
            Packet::RsDagtagReq(r) => {
                let after = (r.dagtag_node_id, r.dagtag);
                self.source_request(peer, volume, r.block(), after, Wanted::Data);
            }
            Packet::RsThinDagtagReq(r) => {
                let after = (r.dagtag_node_id, r.dagtag);
                self.source_request(peer, volume, r.block(), after, Wanted::DataUnlessZero);
            }
            Packet::RsCsumDagtagReq(r) => {
                let after = (r.dagtag_node_id, r.dagtag);
                let wanted = Wanted::DataUnless(r.digest);
                self.source_request(peer, volume, r.block(), after, wanted);
            }
            Packet::OvRequest(r) => self.verify_asked(peer, volume, r, (NodeId(0), Dagtag(0))),
            Packet::OvDagtagReq(r) => {
                self.verify_asked(peer, volume, r.block(), (r.dagtag_node_id, r.dagtag));
            }
            Packet::OvReply(r) => {
                let after = (NodeId(0), Dagtag(0));
                self.verify_answered(peer, volume, r.block(), after, r.digest);
            }
            Packet::OvDagtagReply(r) => {
                let after = (r.dagtag_node_id, r.dagtag);
                self.verify_answered(peer, volume, r.block(), after, r.digest);
            }
            Packet::OvResult(ack) => {
                let different = ack.block_id == verify::DIFFERENT_ID;
                self.verify_told(peer, volume, ack.sector, ack.size_bytes, different);
            }
            Packet::OvResultId(r) => {
                let different = r.result == OvResultCode::OutOfSync;
                self.verify_told(peer, volume, r.sector, r.size_bytes, different);
            }
            Packet::RsWriteAck(ack) => self.source_ack(peer, volume, &ack, true),
            Packet::RsNegAck(ack) => self.source_ack(peer, volume, &ack, false),
            Packet::RsIsInSync(ack) => self.target_equal(peer, volume, &ack),
            Packet::RsDataReply(data) => self.target_reply(peer, volume, &data, payload),
            Packet::RsDeallocated(desc) => {
                self.target_deallocated(peer, volume, desc.sector, desc.size_bytes);
            }
            Packet::RsDeallocatedId(ack) => {
                self.target_deallocated(peer, volume, ack.sector, ack.size_bytes);
            }
            Packet::NegRsDreply(ack) => {
                if !self.verify_refused(volume, peer, &ack, true) {
                    self.target_refused(peer, volume, &ack, true);
                }
            }
            Packet::RsCancel(ack) | Packet::RsCancelAhead(ack) => {
                if !self.verify_refused(volume, peer, &ack, false) {
                    self.target_refused(peer, volume, &ack, false);
                }
            }
            other => {
                if let Some(payload) = payload {
                    self.release(payload.buf);
                }
                let text = alloc::format!("{:?} is not supported here", other.command());
                self.protocol_error(peer, Some(volume), text);
            }
        }
    }

    pub(crate) fn protocol_error(
        &mut self,
        peer: NodeId,
        volume: Option<VolumeNr>,
        text: alloc::string::String,
    ) {
        self.log(crate::report::Level::Error, Some(peer), volume, text);
        self.drop_connection(peer, ConnState::ProtocolError);
    }

    /// A block that a peer asks for is whole and within the volume.
    fn is_block_of(&self, peer: NodeId, volume: VolumeNr, request: &BlockRequest) -> bool {
        // The answer has to fit in a packet of the peer's version.
        let most = bio_len_max(self.spoken(peer));
        self.devices.get(&volume).is_some_and(|d| {
            request.size_bytes > 0
                && request.size_bytes <= most
                && u64::from(request.size_bytes).is_multiple_of(Sector::SIZE)
                && request.sector.end_of(request.size_bytes).0 <= d.size_sectors
        })
    }

    /// Starts a disk operation.
    fn disk_op(&mut self, volume: VolumeNr, op: DiskOp, data: DataOp) {
        if let Some(device) = self.devices.get_mut(&volume) {
            device.io.lower_pending += 1;
        }
        let tag = self.tags.insert_timed(Pending::Data(data), self.now);
        self.watch_disk(volume);
        self.output(Output::Disk { tag, volume, op });
    }

    /// Activity log, bitmap and flushes of a volume with an attached disk.
    pub(crate) fn disk_io(&mut self, volume: VolumeNr) -> Option<&mut DiskIo> {
        Some(&mut self.devices.get_mut(&volume)?.attached_mut()?.io)
    }

    /// The local disk takes writes.
    fn takes_writes(&self, volume: VolumeNr) -> bool {
        let disk = self.state.disk(volume);
        disk >= DiskState::Inconsistent
            && disk != DiskState::DUnknown
            && self
                .devices
                .get(&volume)
                .is_some_and(|d| d.attached().is_some())
    }

    fn peer_io(&mut self, volume: VolumeNr, peer: NodeId) -> Option<&mut PeerIo> {
        Some(&mut self.devices.get_mut(&volume)?.peers.get_mut(&peer)?.io)
    }

    /// Next number of wire.md, 6.4.
    fn next_seq(&mut self, volume: VolumeNr, peer: NodeId) -> u32 {
        match self.peer_io(volume, peer) {
            Some(io) => {
                io.seq = io.seq.wrapping_add(1);
                io.seq
            }
            None => 0,
        }
    }

    /// The new current UUID of this volume has to be durable before requests go on.
    fn uuid_hold(&self, volume: VolumeNr) -> bool {
        self.devices
            .get(&volume)
            .is_some_and(|d| d.new_uuid_pending)
            || self.new_uuid.is_some()
    }

    /// Owners whose ranges are clear now go on.
    fn wake_ranges(&mut self, volume: VolumeNr, ready: Vec<Owner>) {
        self.io
            .wakes
            .extend(ready.into_iter().map(|owner| Wake::Range(volume, owner)));
    }

    /// Nodes of established connections.
    fn established(&self) -> Vec<NodeId> {
        self.connections
            .keys()
            .copied()
            .filter(|p| self.is_established(*p))
            .collect()
    }

    pub(crate) fn volume_of(&self, op: DataOp) -> Option<VolumeNr> {
        match op {
            DataOp::AppWrite(key) | DataOp::AppRead(key) => {
                self.io.requests.get(key).map(|r| r.volume)
            }
            DataOp::Serve(key) => self.io.serving.get(key).map(|s| s.volume),
            DataOp::PeerWrite(volume, ..)
            | DataOp::SourceRead(volume, ..)
            | DataOp::SourceDigest(volume, ..)
            | DataOp::VerifyRead(volume, ..)
            | DataOp::VerifyDigest(volume, ..)
            | DataOp::TargetRead(volume, ..)
            | DataOp::TargetDigest(volume, ..)
            | DataOp::TargetWrite(volume, ..)
            | DataOp::Flush(volume)
            | DataOp::BitmapPages(volume, _)
            | DataOp::AlBlock(volume) => Some(volume),
        }
    }

    /// Writes that this peer missed are not in the bitmap yet.
    pub(crate) fn unsettled_requests(&self, peer: NodeId) -> bool {
        !self.state.suspended()
            && self
                .io
                .log
                .iter()
                .filter_map(|key| self.io.requests.get(*key))
                .any(|req| {
                    req.sent.contains(peer)
                        && !req.ok.contains(peer)
                        && !req.unsettled.contains(peer)
                        && !req.accounted.contains(peer)
                })
    }

    /// Writes that this peer did not say to have on stable storage.
    pub(crate) fn unsettled_towards(&self, peer: NodeId) -> bool {
        self.io
            .log
            .iter()
            .filter_map(|key| self.io.requests.get(*key))
            .any(|req| req.unsettled.contains(peer))
    }

    /// Writes of this volume are on their way to the local disk.
    pub(crate) fn local_requests_open(&self, volume: VolumeNr) -> bool {
        self.io
            .log
            .iter()
            .filter_map(|key| self.io.requests.get(*key))
            .any(|req| req.volume == volume && req.local == write::Local::Pending)
    }

    /// No write is on its way: every submitted one is where it can get.
    pub(crate) fn io_is_quiet(&self) -> bool {
        self.io
            .log
            .iter()
            .filter_map(|key| self.io.requests.get(*key))
            .all(|req| {
                req.completed || (req.local != write::Local::Pending && req.pending.is_empty())
            })
    }

    /// Every request of this node's applications was answered.
    pub(crate) fn requests_are_answered(&self) -> bool {
        self.io.held.is_empty() && self.begun_are_answered()
    }

    /// The same for those that have begun.
    pub(crate) fn begun_are_answered(&self) -> bool {
        let all = |key: Key| self.io.requests.get(key).is_none_or(|req| req.completed);
        self.io.flushes.is_empty() && self.io.requests.keys().into_iter().all(all)
    }

    /// Every request of this node's applications was answered, and what was written is on stable
    /// storage at every peer where a flush does not wait for that (semantics.md, 7.3): were this
    /// node demoted before, the peer could be promoted after a common loss of power and serve what
    /// flushed writes have replaced.
    pub(crate) fn requests_are_through(&self) -> bool {
        self.io.held.is_empty() && self.begun_are_through()
    }

    /// The same for those that have begun.
    pub(crate) fn begun_are_through(&self) -> bool {
        // Peers among themselves count as different what they have not heard a peer ack of, and that takes
        // settled writes.
        let alone = self.connections.len() == 1;
        let stable = |conn: &Connection| {
            let flushed = alone && conn.is_lockstep() && conn.net.protocol == Protocol::C;
            flushed || conn.io.sent_count <= conn.io.settled_count
        };
        self.begun_are_answered()
            && self.connections.values().all(stable)
            && !self.is_ahead_of_legacy()
            && !self.leaves_peer_behind()
    }

    /// Requests sent to the peer without an answer.
    pub(crate) fn pending_towards(&self, volume: VolumeNr, peer: NodeId) -> u64 {
        let writes = self
            .io
            .log
            .iter()
            .filter_map(|key| self.io.requests.get(*key));
        let writes = writes
            .filter(|r| r.volume == volume && r.pending.contains(peer))
            .count();
        let resync = self
            .devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer)?.io.target.as_ref())
            .map_or(0, TargetSync::in_flight);
        (writes + resync) as u64
    }

    /// Requests of the peer without an answer.
    pub(crate) fn unacked_of(&self, volume: VolumeNr, peer: NodeId) -> u64 {
        let writes = self.connections.get(&peer).map_or(0, |c| {
            c.io.writes
                .iter()
                .filter(|w| w.volume == volume && w.is_active())
                .count()
        });
        let resync = self
            .devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .map_or(0, |pd| pd.io.source.len());
        (writes + resync) as u64
    }

    /// The connection is past its handshake.
    pub(crate) fn connection_established(&mut self, peer: NodeId) {
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.mirror = None;
        }
        self.io.parked_due = true;
        self.tell_room(peer);
    }

    /// Sends all peer acks that are due, for a demotion.
    pub(crate) fn flush_peer_ack(&mut self) {
        self.close_epoch();
        self.queue_peer_ack();
    }

    /// Marks a range out of sync towards all peers but those of `except`.
    fn set_out_of_sync(
        &mut self,
        volume: VolumeNr,
        sector: Sector,
        size_bytes: u32,
        except: NodeMask,
    ) {
        if let Some(io) = self.disk_io(volume) {
            let slots = io.slot_mask(except);
            io.mark_all(sector, size_bytes, slots);
        }
        self.copies_differ(volume, except.complement(), sector, size_bytes);
    }
}

#[cfg(test)]
mod tests;
