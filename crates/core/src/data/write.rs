//! Writes of the application: submission, replication, acks, epochs, and what is left of them.
//!
//! The rules are those of semantics.md, 15 and 18.3. A write stays in the log (`ResourceIo::log`)
//! until everybody it was sent to has it on stable storage or is given up, its out-of-sync bits are
//! set, and all writes before it are settled. Only then its activity-log extents are let go.

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::{BlockAck, BlockDesc, BlockId, ConfirmStable, Data, Trim};
use lockstep_format::wire::{DataFlags, DiskState, Features, Packet, ReplState};

use super::slab::Key;
use super::{DataOp, DiskFault, Owner};
use crate::event::{DiskError, Payload, RequestError, RequestId, RequestKind, Stream};
use crate::interval::{Origin, RangeId};
use crate::options::{OnLoss, Protocol};
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::time::Instant;

/// First protocol version whose writes say which acks they want.
const FIRST_WITH_ACK_FLAGS: u32 = 100;

/// A request of a front end from its admission to its end.
#[derive(Clone, Debug)]
pub(crate) struct AppRequest {
    pub(crate) id: RequestId,
    pub(crate) volume: VolumeNr,
    pub(crate) kind: RequestKind,
    pub(crate) sector: Sector,
    pub(crate) size_bytes: u32,
    pub(crate) payload: Option<Payload>,
    /// The front end was answered.
    pub(crate) completed: bool,
    /// It is in the list of held completions.
    pub(crate) held: bool,
    /// It has left the log; only its completion is held.
    pub(crate) settled: bool,
    pub(crate) local: Local,
    /// The peer let its own write go first: this one is made again.
    pub(crate) again: bool,
    /// It is made again, and the disk has it from the first time.
    pub(crate) was_written: bool,
    /// Place among the ranges in flight, until the completion to the front end.
    pub(crate) range: Option<RangeId>,
    /// Extents are referenced in the log of this serial.
    pub(crate) al: Option<u64>,
    pub(crate) submitted: bool,
    pub(crate) submitted_at: Instant,
    /// For a read under a policy: reads in flight on its path when it left, itself included.
    pub(crate) depth: u32,
    pub(crate) dagtag: Dagtag,
    pub(crate) epoch: u32,
    /// Peers that it was sent to. For a read: peers that were tried.
    pub(crate) sent: NodeMask,
    /// Peers whose ack the completion waits for.
    pub(crate) pending: NodeMask,
    /// Peers that have it as far as the protocol promises.
    pub(crate) ok: NodeMask,
    /// Peers that have it and are in sync for it.
    pub(crate) in_sync: NodeMask,
    /// Peers that did not say that it is on stable storage.
    pub(crate) unsettled: NodeMask,
    /// Peers lost during a suspension, which get it again or are given up at its end.
    pub(crate) parked: NodeMask,
    /// Peers that are told that the range is out of sync, if that is news.
    pub(crate) mark: NodeMask,
    /// Peers whose bits were set already because a resync with them started.
    pub(crate) accounted: NodeMask,
    /// Peers that this disk is copied from since they were sent it: it clears no mark of what they have.
    pub(crate) replaced: NodeMask,
    /// Peers that were sent it while this node's disk counted as a copy: theirs may be in a cache when they acknowledge it.
    pub(crate) relied: NodeMask,
    /// Peers that were sent it while another peer's disk may have counted as one for them.
    pub(crate) beside: NodeMask,
    /// Peers that refused it, whose bits on the disk that it went to are set.
    pub(crate) refused: NodeMask,
    /// Peers that have it and were lost before it was settled: a resync may have replaced it there.
    pub(crate) left: NodeMask,
    /// It is not on this node's disk, which counted as there when it was sent.
    pub(crate) missed: bool,
    /// For a flush: writes of each connection that have to be settled.
    pub(crate) waits: Vec<(NodeId, u64)>,
    /// For a flush: barriers that have to be acked.
    pub(crate) barriers: Vec<(NodeId, u32)>,
}

/// The local part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Local {
    /// Not on the local disk.
    None,
    /// In flight.
    Pending,
    /// Done.
    Ok,
    /// Failed.
    Failed,
}

/// What a peer says of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ack {
    /// It is in the peer's memory.
    Received,
    /// It is on the peer's disk.
    Written,
    /// The same, and the peer cleared its bits for it.
    InSync,
    /// The peer does not have it.
    Failed,
}

impl AppRequest {
    pub(crate) fn new(request: &crate::event::Request) -> Self {
        AppRequest {
            id: request.id,
            volume: request.volume,
            kind: request.kind,
            sector: request.sector,
            size_bytes: request.len,
            payload: request.payload,
            completed: false,
            held: false,
            settled: false,
            local: Local::None,
            again: false,
            was_written: false,
            range: None,
            al: None,
            submitted: false,
            submitted_at: Instant(0),
            depth: 0,
            dagtag: Dagtag(0),
            epoch: 0,
            sent: NodeMask::EMPTY,
            pending: NodeMask::EMPTY,
            ok: NodeMask::EMPTY,
            in_sync: NodeMask::EMPTY,
            unsettled: NodeMask::EMPTY,
            parked: NodeMask::EMPTY,
            left: NodeMask::EMPTY,
            mark: NodeMask::EMPTY,
            accounted: NodeMask::EMPTY,
            replaced: NodeMask::EMPTY,
            refused: NodeMask::EMPTY,
            relied: NodeMask::EMPTY,
            beside: NodeMask::EMPTY,
            missed: false,
            waits: Vec::new(),
            barriers: Vec::new(),
        }
    }

    /// Everybody it was sent to has it on stable storage or is given up. A completion that is held
    /// changes nothing of that, and others may wait for the peer ack (`settle_flush_requests`):
    /// the target of a resync, without which the data lack their redundancy.
    fn is_settled(&self) -> bool {
        (self.completed || self.held)
            && self.local != Local::Pending
            && self.pending.is_empty()
            && self.unsettled.is_empty()
            && self.parked.is_empty()
    }
}

impl Resource {
    /// An admitted write takes its place among the ranges in flight.
    pub(crate) fn start_write(&mut self, key: Key) {
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        let Some(device) = self.devices.get_mut(&req.volume) else {
            return;
        };
        let owner = Owner::App(key);
        #[cfg(feature = "planted")]
        (device.io.ranges.planted = self.planted);
        let (range, clear) =
            device
                .io
                .ranges
                .insert(Origin::LocalWrite, req.sector, req.size_bytes, owner);
        req.range = Some(range);
        if clear {
            self.app_write_clear(key);
        }
    }

    /// Nothing overlaps: activity log next.
    pub(crate) fn app_write_clear(&mut self, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        let (volume, sector, size) = (req.volume, req.sector, req.size_bytes);
        let serial = self.al_serial(volume);
        let hot = req.al == Some(serial) || req.al.is_some() && planted!(self, OldLogCounts);
        let hot = hot || req.kind == RequestKind::Discard && planted!(self, DiscardSkipsLog);
        if hot || !self.takes_writes(volume) || self.al_get(volume, sector, size, Owner::App(key)) {
            self.app_write_hot(volume, key);
        }
    }

    /// The write's extents are in the activity log: submit, unless requests have to wait.
    pub(crate) fn app_write_hot(&mut self, volume: VolumeNr, key: Key) {
        let serial = self.al_serial(volume);
        let takes_writes = self.takes_writes(volume);
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        let unlogged = req.kind == RequestKind::Discard && planted!(self, DiscardSkipsLog);
        if takes_writes && !unlogged {
            req.al = Some(serial);
        }
        if req.range.is_none() {
            // A write of a peer has passed it meanwhile.
            self.start_write(key);
            return;
        }
        if takes_writes && !self.begun_wait(volume) && !self.io_fails(volume) {
            // What it changes may make this write wait.
            self.relieve_congestion(volume);
        }
        let no_data = !self.data_reachable(volume);
        if self.io_fails(volume) {
            self.abandon_write(key, RequestError::Io);
        } else if self.begun_wait(volume)
            || (no_data && self.options.on_no_data_accessible == OnLoss::SuspendIo)
        {
            self.drop_range(key);
            self.io.postponed.push_back(key);
            self.want_held_uuids();
        } else if no_data {
            self.abandon_write(key, RequestError::Io);
        } else {
            self.submit_write(key);
        }
    }

    /// The end of a suspension: writes that were admitted before it go on.
    pub(crate) fn retry_postponed(&mut self) {
        let skipped = usize::from(planted!(self, PostponedLost));
        for key in core::mem::take(&mut self.io.postponed)
            .into_iter()
            .skip(skipped)
        {
            self.start_write(key);
        }
    }

    /// Fails a write that was never submitted, or not again.
    fn abandon_write(&mut self, key: Key, error: RequestError) {
        self.drop_range(key);
        let Some(req) = self.io.requests.remove(key) else {
            return;
        };
        if req.was_written {
            // Here it stays, and the peer never gets it.
            self.set_out_of_sync(req.volume, req.sector, req.size_bytes, NodeMask::EMPTY);
        }
        if let Some(serial) = req.al {
            self.al_put(req.volume, req.sector, req.size_bytes, serial);
        }
        self.request_ended(req.volume);
        self.complete(req.id, Err(error));
    }

    pub(crate) fn drop_range(&mut self, key: Key) {
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        let (volume, range) = (req.volume, req.range.take());
        if let (Some(range), Some(device)) = (range, self.devices.get_mut(&volume)) {
            let mut ready = Vec::new();
            device.io.ranges.remove(range, &mut ready);
            if planted!(self, LostRangeWakeUp) {
                return;
            }
            self.wake_ranges(volume, ready);
        }
    }

    /// UpToDate data are here or at a peer, whatever remote reads are allowed.
    fn data_reachable(&self, volume: VolumeNr) -> bool {
        self.state
            .devices
            .get(&volume)
            .is_some_and(crate::state::DeviceState::data_accessible)
    }

    fn submit_write(&mut self, key: Key) {
        let takes_writes = self
            .io
            .requests
            .get(key)
            .is_some_and(|r| self.takes_writes(r.volume));
        let unsent = planted!(self, DiscardNotReplicated);
        let one = planted!(self, ClientSendsToOne) && !takes_writes;
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        let volume = req.volume;
        let before = self.io.dagtag;
        self.io.dagtag = before.advanced_by_bytes(req.size_bytes);
        req.dagtag = self.io.dagtag;
        req.epoch = self.io.epoch;
        req.submitted = true;
        req.submitted_at = self.now;
        self.io.epoch_writes += 1;
        let mut sent = NodeMask::EMPTY;
        if let Some(device) = self.state.devices.get(&volume) {
            for (peer, p) in &device.peers {
                if p.replicates() && (!one || sent.is_empty()) {
                    sent.insert(*peer);
                } else if p.marks_out_of_sync() {
                    req.mark.insert(*peer);
                }
            }
        }
        if unsent && req.kind == RequestKind::Discard {
            (req.ok, req.in_sync) = (sent, sent);
            sent = NodeMask::EMPTY;
        }
        req.sent = sent;
        req.unsettled = sent;
        if takes_writes {
            req.local = Local::Pending;
        }
        let (kind, sector, size, payload) = (req.kind, req.sector, req.size_bytes, req.payload);
        self.io.log.push_back(key);
        self.overtake_peer_writes(volume, sector, size, None);
        if takes_writes {
            let op = self.disk_write(volume, kind, sector, size, payload);
            self.disk_op(volume, op, DataOp::AppWrite(key));
        }
        for peer in sent.iter() {
            self.send_write(peer, key);
        }
        let longest = self
            .connections
            .values()
            .map(|c| c.net.max_epoch_size)
            .min()
            .unwrap_or(2048)
            .max(1);
        if self.io.epoch_writes >= longest && !planted!(self, EpochUnlimited) {
            self.close_epoch();
        }
        let trims = matches!(kind, RequestKind::Discard | RequestKind::Zeroes { .. });
        if trims && self.legacy_peer().is_some() {
            // 8.4 orders nothing within an epoch that a discard is in (wire.md, 6.2).
            self.close_epoch();
        }
        // Protocol A waits for nothing but the local disk, a diskless node not even for that.
        self.try_complete(key);
    }

    /// Sends a write to a peer, for the first time or again.
    pub(super) fn send_write(&mut self, peer: NodeId, key: Key) {
        let Some(req) = self.carried(peer, key) else {
            return;
        };
        let (volume, epoch, dagtag) = (req.volume, req.epoch, req.dagtag);
        let (kind, sector, size, payload) = (req.kind, req.sector, req.size_bytes, req.payload);
        // Nor is a copy on a disk that is not whole: the next resync overwrites it.
        let is_local = req.local != Local::None;
        let only_copy = !is_local || self.state.disk(volume) <= DiskState::Inconsistent;
        let has_progress = self.state.peer_device(volume, peer).repl.has_progress();
        // Only what is on this node's disk as well: that one may have come after the write.
        let may_set_in_sync = has_progress && (is_local || planted!(self, NotHereInSync));
        // Before that the peer marks it.
        let missed = !is_local && self.state.disk(volume) >= DiskState::Inconsistent;
        if missed && let Some(req) = self.io.requests.get_mut(key) {
            req.missed |= !planted!(self, NotHereInSync);
        }
        let careless = planted!(self, OnlyCopyNotAwaited);
        self.owe_less(volume, peer, sector, size);
        self.barrier_before(peer, epoch);
        let beside = only_copy && self.has_copies_beside(volume, peer);
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        // Without a disk here the peer's copy is the only one: sent is not kept.
        let only_copy = only_copy && conn.protocol() >= FIRST_WITH_ACK_FLAGS && !careless;
        let protocol = if only_copy {
            Protocol::C
        } else {
            conn.net.protocol
        };
        let early = protocol == Protocol::B && planted!(self, ProtocolBAsA);
        let protocol = if early { Protocol::A } else { protocol };
        let features = conn.features();
        let start = Dagtag(dagtag.0.wrapping_sub(u64::from(size) / Sector::SIZE));
        let jump = conn.io.mirror != Some(start);
        conn.io.mirror = Some(dagtag);
        conn.io.epoch = epoch;
        conn.io.epoch_writes += 1;
        conn.io.epoch_is_open = true;
        // Sent late, it may be the last one of an epoch that has ended: no other write will tell.
        let over = epoch != self.io.epoch && !planted!(self, LateBarrierForgotten);
        self.io.barriers_due |= over;
        conn.io.sent.push_back(key);
        conn.io.sent_count += 1;
        conn.io.ap_in_flight_sectors += u64::from(size) / Sector::SIZE;
        if jump && !planted!(self, DagtagJumpUntold) {
            self.send(peer, Stream::Data, VolumeNr::NONE, Packet::Dagtag(start));
        }
        let mut flags = DataFlags::empty();
        match protocol {
            Protocol::C if planted!(self, ProtocolCAsB) => flags |= DataFlags::SEND_RECEIVE_ACK,
            Protocol::C => flags |= DataFlags::SEND_WRITE_ACK,
            Protocol::B => flags |= DataFlags::SEND_RECEIVE_ACK,
            Protocol::A => {}
        }
        if may_set_in_sync {
            flags |= DataFlags::MAY_SET_IN_SYNC | DataFlags::SEND_WRITE_ACK;
        }
        let seq_num = self.next_seq(volume, peer);
        let block_id = BlockId(key.0);
        let trim = |flags| Trim {
            sector,
            block_id,
            seq_num,
            flags,
            size_bytes: size,
        };
        let packet = match kind {
            RequestKind::Write { fua } => {
                if fua && !planted!(self, FuaNotSent) {
                    flags |= DataFlags::FUA;
                }
                Packet::Data(Data {
                    sector,
                    block_id,
                    seq_num,
                    flags,
                    payload_len: size,
                    ..Data::default()
                })
            }
            RequestKind::Discard => Packet::Trim(trim(flags | DataFlags::DISCARD)),
            RequestKind::Zeroes { unmap } if features.contains(Features::WZEROES) => {
                let unmap = if unmap {
                    DataFlags::DISCARD
                } else {
                    DataFlags::empty()
                };
                Packet::Zeroes(trim(flags | DataFlags::ZEROES | unmap))
            }
            // Without the feature the receiver executes a trim as a zero-out.
            RequestKind::Zeroes { .. } => Packet::Trim(trim(flags | DataFlags::DISCARD)),
            RequestKind::Read | RequestKind::Flush => unreachable!("only writes are replicated"),
        };
        if let Some(req) = self.io.requests.get_mut(key) {
            req.refused.remove(peer);
            match only_copy {
                true => req.relied.remove(peer),
                false => req.relied.insert(peer),
            }
            match beside {
                true => req.beside.insert(peer),
                false => req.beside.remove(peer),
            }
            if protocol == Protocol::A {
                // Handed to the network: that is all that A promises.
                req.ok.insert(peer);
            } else {
                req.pending.insert(peer);
            }
        }
        self.await_verdict(peer, key);
        if let Some(io) = self.peer_io(volume, peer) {
            io.sent_sectors += u64::from(size) / Sector::SIZE;
        }
        self.watch_age(peer);
        let payload = if packet.payload_len() > 0 {
            payload
        } else {
            None
        };
        self.send_payload(peer, Stream::Data, volume, packet, payload, None);
    }

    pub(crate) fn app_write_done(&mut self, key: Key, result: Result<(), DiskError>) {
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        let (volume, sector, size) = (req.volume, req.sector, req.size_bytes);
        req.local = if result.is_ok() || planted!(self, LocalErrorIgnored) {
            Local::Ok
        } else {
            Local::Failed
        };
        let range = req.range;
        let sectors = u64::from(size) / Sector::SIZE;
        if let Some(device) = self.devices.get_mut(&volume) {
            device.io.written_sectors += sectors;
            if let Some(range) = range {
                let mut ready = Vec::new();
                device.io.ranges.disk_done(range, &mut ready);
                self.wake_ranges(volume, ready);
            }
        }
        // Zero-outs are always possible, so a failed one is as bad as a failed write.
        if result.is_err() && !planted!(self, LocalErrorIgnored) {
            if !planted!(self, OnlyCopiesNotAwaited) {
                self.await_only_copies(key);
            }
            // Nobody knows what is here now. With `pass_on` the disk stays, and whatever is marked
            // is not read from it.
            self.set_out_of_sync(volume, sector, size, NodeMask::EMPTY);
            self.disk_failed(volume, DiskFault::Data);
        }
        self.write_again(key);
        self.try_complete(key);
        self.settle_log();
    }

    /// An ack of a write, in whatever form.
    pub(crate) fn write_ack(&mut self, peer: NodeId, volume: VolumeNr, ack: &BlockAck, how: Ack) {
        let key = Key(ack.block_id.0);
        let late = planted!(self, LateRefusalIgnored);
        let late_is_lost = planted!(self, LateFailureUnmarked);
        let known = self.io.requests.get_mut(key).filter(|req| {
            req.volume == volume && req.sector == ack.sector && req.sent.contains(peer)
        });
        let Some(req) = known else {
            if how == Ack::Failed && late_is_lost {
                return;
            }
            if how == Ack::Failed {
                // Long completed, perhaps forgotten: the peer does not have it.
                self.peer_refuses(volume, peer);
                if let Some(io) = self.disk_io(volume)
                    && let Some(slot) = io.slot(peer)
                {
                    io.mark(slot, ack.sector, ack.size_bytes);
                }
            } else {
                let text = format!("ack of an unknown write at sector {}", ack.sector);
                self.protocol_error(peer, Some(volume), text);
            }
            return;
        };
        let time = req
            .pending
            .contains(peer)
            .then(|| self.now - req.submitted_at);
        req.pending.remove(peer);
        let mut refused = false;
        match how {
            Ack::Failed if late => {}
            Ack::Failed => {
                req.ok.remove(peer);
                req.in_sync.remove(peer);
                req.accounted.remove(peer);
                refused = true;
            }
            Ack::Received => req.ok.insert(peer),
            Ack::Written if !planted!(self, WrittenCountsAsInSync) => req.ok.insert(peer),
            Ack::Written | Ack::InSync => {
                req.ok.insert(peer);
                req.note_in_sync(peer);
            }
        }
        if let Some(time) = time
            && let Some(device) = self.devices.get_mut(&volume)
            && let Some(pd) = device.peers.get_mut(&peer)
        {
            pd.io.ack_times.add(time);
        }
        if refused {
            self.mark_refused(peer, key);
        }
        self.verdict_is_in(key);
        self.try_complete(key);
        self.settle_log();
    }

    /// Completes a write to its front end if nothing is missing.
    pub(crate) fn try_complete(&mut self, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        if req.completed
            || !req.submitted
            || req.again
            || req.local == Local::Pending
            || (req.ok.is_empty() || !planted!(self, FirstAckCompletes)) && !req.pending.is_empty()
            || !req.parked.is_empty()
        {
            return;
        }
        let volume = req.volume;
        let fails = self.io_fails(volume);
        let waits = self.completions_wait(volume) && !planted!(self, CompletesBeforeNewUuid)
            || self.failure_is_unnoted(volume, req.local);
        if !fails && waits {
            if let Some(req) = self.io.requests.get_mut(key)
                && !req.held
            {
                req.held = true;
                self.io.held_completions.push_back(key);
                self.want_held_uuids();
            }
            return;
        }
        // A copy on a disk that is gone is none, and one on a disk that is not whole neither: a
        // resync overwrites it. Whoever serves the data has to get the write.
        let lost_copy = self.state.disk(volume) <= DiskState::Inconsistent
            && !planted!(self, CopyOnFailedDiskCounts);
        if !fails && self.awaits_stable_copy(key, lost_copy) {
            return;
        }
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        let is_whole = |peer| self.state.peer_device(volume, peer).disk > DiskState::Inconsistent;
        let has_copy = req.local == Local::Ok && !lost_copy || req.ok.iter().any(is_whole);
        if !fails && !has_copy && req.local == Local::Ok && self.data_reachable(volume) {
            self.submit_again(key);
            return;
        }
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        req.completed = true;
        let ok = !fails && has_copy;
        let (id, epoch, settled, sent) = (req.id, req.epoch, req.settled, !req.sent.is_empty());
        if epoch == self.io.epoch {
            self.close_epoch();
        }
        self.drop_range(key);
        if planted!(self, ExtentLetGoEarly)
            && let Some(req) = self.io.requests.get_mut(key)
            && let Some(serial) = req.al.take()
        {
            let (sector, size) = (req.sector, req.size_bytes);
            self.al_put(volume, sector, size, serial);
        }
        if settled {
            self.io.requests.remove(key);
        }
        self.request_ended(volume);
        self.complete_write(volume, id, (ok, sent));
        self.settle_log();
    }

    /// The only copy of a write went with the disk before anybody was told of its end: the write is
    /// made again, at the peers that there are now.
    fn submit_again(&mut self, key: Key) {
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        if !req.unsettled.is_empty() {
            // A peer that refused it may still have it in an epoch: that one ends first, or its
            // end would be taken for an ack.
            self.close_epoch();
            return;
        }
        let attempt = (!req.settled).then(|| req.clone());
        (req.submitted, req.settled, req.missed) = (false, false, false);
        req.local = Local::None;
        req.ok = NodeMask::EMPTY;
        req.in_sync = NodeMask::EMPTY;
        req.mark = NodeMask::EMPTY;
        req.accounted = NodeMask::EMPTY;
        req.refused = NodeMask::EMPTY;
        req.left = NodeMask::EMPTY;
        let (volume, sector, size) = (req.volume, req.sector, req.size_bytes);
        self.attempt_ends(key, attempt);
        // The disk that is gone, or not whole, has it, and nobody else yet.
        if !planted!(self, RedoneUnmarked) {
            self.set_out_of_sync(volume, sector, size, NodeMask::EMPTY);
        }
        // Its place in the activity log may be given back already, and a resync reply may be on its
        // way to the disk where the write was.
        self.drop_range(key);
        self.start_write(key);
    }

    /// Completions that were held go on if nothing holds them any more.
    pub(crate) fn release_completions(&mut self) {
        let count = self.io.held_completions.len();
        for _ in 0..count {
            let Some(key) = self.io.held_completions.pop_front() else {
                break;
            };
            if let Some(req) = self.io.requests.get_mut(key) {
                req.held = false;
            }
            self.try_complete(key);
        }
        if !self.io.flushes.is_empty() {
            for key in self.io.flushes.clone() {
                self.try_finish_flush(key);
            }
        }
    }

    /// Takes settled writes out of the log, oldest first.
    pub(super) fn settle_log(&mut self) {
        while let Some(key) = self.io.log.front().copied() {
            let Some(req) = self.io.requests.get(key) else {
                self.io.log.pop_front();
                continue;
            };
            if !req.is_settled() {
                break;
            }
            self.io.log.pop_front();
            self.settle_write(key);
        }
        self.settle_flush_requests();
    }

    /// A newer write of the same blocks, not settled yet, has failed here: what is marked is marked for it.
    fn newer_has_failed(&mut self, req: &AppRequest) -> bool {
        let (volume, from, size) = (req.volume, req.sector, req.size_bytes);
        let slots = self
            .disk_io(volume)
            .map_or(0, |io| io.slot_mask(req.in_sync));
        let marked = slots != 0
            && self.disk_io(volume).is_some_and(|io| {
                let bits = io.bitmap.shape().touched_bits(from, u64::from(size));
                (0..io.bitmap.shape().slots())
                    .any(|slot| slots >> slot & 1 == 1 && io.bitmap.any_set(slot, bits.clone()))
            });
        let end = |sector: Sector, size: u32| sector.0 + u64::from(size) / Sector::SIZE;
        marked
            && self.io.log.iter().any(|key| {
                self.io.requests.get(*key).is_some_and(|newer| {
                    newer.volume == volume
                        && newer.local == Local::Failed
                        && newer.sector.0 < end(from, size)
                        && from.0 < end(newer.sector, newer.size_bytes)
                })
            })
    }

    fn settle_write(&mut self, key: Key) {
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        req.settled = true;
        let al = req.al.take();
        let req = match req.completed {
            true => self.io.requests.remove(key),
            false => Some(req.clone()),
        };
        let Some(req) = req else { return };
        if !req.submitted {
            // A first attempt (`attempt_ends`): the write itself marks what differs.
            return self.note_peer_ack(&req);
        }
        let (volume, sector, size) = (req.volume, req.sector, req.size_bytes);
        let mut news = NodeMask::EMPTY;
        let gone = al.is_some_and(|serial| serial != self.al_serial(volume));
        // Whoever has it differs from this disk if it failed here.
        let (have, in_sync) = match req.local {
            Local::Failed if !planted!(self, LocalFailureNotMarked) => {
                (NodeMask::EMPTY, NodeMask::EMPTY)
            }
            _ if req.missed => (NodeMask::EMPTY, NodeMask::EMPTY),
            // It was on a disk that went. What is marked now is copied, and marked at the peer as well.
            _ if gone => (req.ok, NodeMask::EMPTY),
            _ if self.newer_has_failed(&req) && !planted!(self, OlderClearsFailed) => {
                (req.ok, NodeMask::EMPTY)
            }
            _ => (req.ok, req.in_sync),
        };
        let marked_before = match gone {
            true => req.accounted,
            false => req.accounted.union(req.refused),
        };
        let discards = planted!(self, DiscardsNotMarked) && req.kind == RequestKind::Discard;
        let forgets = discards || planted!(self, BitsNotSetWhileAway);
        let partial = planted!(self, ClearsPartialBits);
        let short = planted!(self, MarksMissLastBlock) && size > 4096;
        let marked = if short { size - 4096 } else { size };
        let mut cleared = 0;
        if let Some(io) = self.disk_io(volume) {
            let had = if forgets {
                have.union(req.sent.complement())
            } else {
                have
            };
            let ok = io.slot_mask(had);
            let in_sync = io.slot_mask(in_sync);
            let accounted = io.slot_mask(marked_before);
            for slot in 0..io.bitmap.shape().slots() {
                if in_sync >> slot & 1 == 1 && partial {
                    let bits = io.bitmap.shape().touched_bits(sector, u64::from(size));
                    io.bitmap.clear_bits(slot, bits);
                } else if in_sync >> slot & 1 == 1 {
                    cleared += io.bitmap.clear_range(slot, sector, size);
                } else if (ok | accounted) >> slot & 1 == 0 && io.mark(slot, sector, marked) > 0 {
                    for node in req.mark.iter().filter(|n| io.slot(*n) == Some(slot)) {
                        news.insert(node);
                    }
                }
            }
        }
        self.own_write_cleared(volume, cleared);
        self.acked_in_exchange(volume, in_sync, sector, size);
        self.copies_differ(volume, have.union(marked_before).complement(), sector, size);
        for peer in news.iter() {
            let told = !planted!(self, OutOfSyncNotTold);
            if told && self.state.peer_device(volume, peer).repl > ReplState::Off {
                self.barrier_before(peer, self.io.epoch);
                let desc = BlockDesc {
                    sector,
                    size_bytes: size,
                };
                self.send(peer, Stream::Data, volume, Packet::OutOfSync(desc));
            }
        }
        if let Some(serial) = al {
            self.al_put(volume, sector, size, serial);
        }
        self.note_peer_ack(&req);
    }

    /// The range that the writes of a peer's resync miss is marked before the bitmap is sent.
    pub(crate) fn mark_in_flight(&mut self, volume: VolumeNr, peer: NodeId) {
        let slot = self.disk_io(volume).and_then(|io| io.slot(peer));
        let keys: Vec<Key> = self.io.log.iter().copied().collect();
        for key in keys {
            let Some(req) = self.io.requests.get_mut(key) else {
                continue;
            };
            if req.volume != volume || req.ok.contains(peer) || req.mark.contains(peer) {
                continue;
            }
            if req.parked.contains(peer) {
                req.parked.remove(peer);
                req.unsettled.remove(peer);
                self.io.parked = self.io.parked.saturating_sub(1);
            }
            if !req.unsettled.contains(peer) {
                req.accounted.insert(peer);
            }
            let (sector, size) = (req.sector, req.size_bytes);
            self.clear_in_sync(volume, peer, sector, size);
            if let (Some(slot), Some(io)) = (slot, self.disk_io(volume)) {
                io.mark(slot, sector, size);
            }
            self.try_complete(key);
        }
        self.settle_log();
    }

    /// The end of Ahead or of a bitmap exchange: what was not sent and is not settled is marked and told now,
    /// so that the resync that follows cannot miss it.
    pub(crate) fn tell_marks(&mut self, volume: VolumeNr, peer: NodeId) {
        if planted!(self, AheadForgetsMarks) {
            return;
        }
        let keys: Vec<Key> = self.io.log.iter().copied().collect();
        for key in keys {
            let Some(req) = self.io.requests.get_mut(key) else {
                continue;
            };
            if req.volume != volume || !req.mark.contains(peer) {
                continue;
            }
            req.mark.remove(peer);
            req.accounted.insert(peer);
            let (sector, size_bytes) = (req.sector, req.size_bytes);
            self.clear_in_sync(volume, peer, sector, size_bytes);
            let io = self.disk_io(volume);
            let news = io.is_some_and(|io| {
                io.slot(peer)
                    .is_some_and(|slot| io.mark(slot, sector, size_bytes) > 0)
            });
            if news {
                self.barrier_before(peer, self.io.epoch);
                let desc = BlockDesc { sector, size_bytes };
                self.send(peer, Stream::Data, volume, Packet::OutOfSync(desc));
            }
        }
    }

    /// Writes that still wait for somebody else were never sent to a peer that connects now: they
    /// differ already, and the comparison has to see it. Third nodes may have brought the peer to
    /// this node's generation meanwhile.
    pub(crate) fn mark_unsent(&mut self, volume: VolumeNr, peer: NodeId) {
        let unsent: Vec<(Sector, u32)> = self
            .io
            .log
            .iter()
            .filter_map(|key| self.io.requests.get(*key))
            .filter(|req| req.volume == volume && !req.sent.contains(peer))
            .filter(|_| !planted!(self, UnsentNotMarked))
            .map(|req| (req.sector, req.size_bytes))
            .collect();
        for (sector, size_bytes) in unsent
            .into_iter()
            .chain(self.without_peer_ack(volume, peer))
        {
            self.mark_towards(volume, peer, sector, size_bytes);
        }
    }

    /// Received writes whose peer ack is still on its way. One who has left this generation has none of them; without
    /// them a split brain would look as if nothing had changed here.
    fn without_peer_ack(&self, volume: VolumeNr, peer: NodeId) -> Vec<(Sector, u32)> {
        if self.slot_uuid(volume, peer).is_zero() || planted!(self, UnackedNotCounted) {
            return Vec::new();
        }
        let others = self.connections.iter().filter(|(node, _)| **node != peer);
        let writes = others.flat_map(|(_, conn)| &conn.io.writes);
        let writes = writes.filter(|write| write.volume == volume);
        writes
            .map(|write| (write.sector, write.size_bytes))
            .collect()
    }

    // Epochs (semantics.md, 15.8).

    /// Later writes may depend on what was completed: they belong to a new epoch.
    pub(crate) fn close_epoch(&mut self) {
        if self.io.epoch_writes > 0 && !planted!(self, EpochNeverCloses) {
            self.io.epoch = self.io.epoch.wrapping_add(1);
            self.io.epoch_writes = 0;
            self.io.barriers_due = true;
        }
    }

    pub(crate) fn send_due_barriers(&mut self) {
        for peer in self.established() {
            self.barrier_before(peer, self.io.epoch);
        }
    }

    /// Ends the connection's epoch if something of a later one follows.
    pub(super) fn barrier_before(&mut self, peer: NodeId, epoch: u32) {
        let refused = self.open_epoch_has_refused(peer);
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let barrier = conn.io.epoch;
        if barrier == epoch || !conn.io.epoch_is_open {
            return;
        }
        match core::mem::take(&mut conn.io.epoch_writes) {
            0 if !refused => return,
            // Nothing of it is left, so that nothing is acked.
            0 => self.epoch_is_acked(peer, barrier),
            writes => self.owe_barrier_ack(peer, barrier, writes),
        }
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.epoch_is_open = false;
        }
        self.send_barrier(peer, barrier);
    }

    pub(crate) fn barrier_ack(&mut self, peer: NodeId, barrier: u32, set_size: u32) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        if conn.io.unacked.front() != Some(&(barrier, set_size)) {
            if self.uneven_barrier_ack(peer, barrier, set_size) {
                return;
            }
            let Some(conn) = self.connections.get(&peer) else {
                return;
            };
            let text = format!(
                "barrier ack {barrier} of {set_size} writes; expected {:?}",
                conn.io.unacked.front()
            );
            self.protocol_error(peer, None, text);
            return;
        }
        conn.io.unacked.pop_front();
        conn.io.barrier_since = self.now;
        self.epoch_is_acked(peer, barrier);
        let set_size = set_size + u32::from(planted!(self, BarrierAckAcrossEpochs));
        self.settle_sent(peer, set_size);
    }

    pub(crate) fn confirm_stable(&mut self, peer: NodeId, confirm: &ConfirmStable) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let count = confirm.set_size;
        let io = &mut conn.io;
        let oldest = io.sent.front().copied();
        let youngest = (count as usize)
            .checked_sub(1)
            .and_then(|at| io.sent.get(at))
            .copied();
        let in_epoch = match io.unacked.front_mut() {
            Some((_, writes)) => writes,
            None => &mut io.epoch_writes,
        };
        let fits = oldest.map(|k| k.0) == Some(confirm.oldest_block_id.0)
            && youngest.map(|k| k.0) == Some(confirm.youngest_block_id.0)
            && *in_epoch >= count;
        if !fits {
            let text = format!("confirmation of {count} writes that are not the oldest ones");
            self.protocol_error(peer, None, text);
            return;
        }
        *in_epoch -= count;
        self.settle_sent(peer, count);
    }

    /// The oldest `count` writes sent to the peer are on its stable storage.
    pub(super) fn settle_sent(&mut self, peer: NodeId, count: u32) {
        for _ in 0..count {
            let Some(conn) = self.connections.get_mut(&peer) else {
                return;
            };
            let Some(key) = conn.io.sent.pop_front() else {
                break;
            };
            conn.io.settled_count += 1;
            let Some(req) = self.io.requests.get_mut(key) else {
                continue;
            };
            let sectors = u64::from(req.size_bytes) / Sector::SIZE;
            let arrived = sectors * u64::from(!planted!(self, CongestionNeverFalls));
            conn.io.ap_in_flight_sectors = conn.io.ap_in_flight_sectors.saturating_sub(arrived);
            req.unsettled.remove(peer);
            if req.pending.contains(peer) {
                // Stable is more than written.
                req.pending.remove(peer);
                req.ok.insert(peer);
            }
            if !req.completed {
                self.try_complete(key);
            }
        }
        self.settle_log();
        self.settle_flushes(peer);
        self.ahead_progress(peer);
    }

    // A lost connection (semantics.md, 9.3 and 15.4).

    /// The link is gone and what it had received is written: requests stop waiting for the peer.
    pub(crate) fn lose_requests(&mut self, peer: NodeId) {
        self.note_cached(peer);
        let suspended = self.state.suspended();
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let forgets = planted!(self, LossForgetsUnacked);
        let keeps_questions = planted!(self, QuestionsSurviveLoss);
        let sent = core::mem::take(&mut conn.io.sent);
        conn.io.unacked.clear();
        conn.io.epoch_writes = 0;
        conn.io.epoch_is_open = false;
        conn.io.sent_count = 0;
        conn.io.was_async = false;
        conn.io.settled_count = 0;
        conn.io.foreign_covered = None;
        conn.io.mirror = None;
        conn.io.ap_in_flight_sectors = 0;
        conn.io.resync_in_flight_sectors = 0;
        if !keeps_questions {
            conn.io.flush_requests.clear();
        }
        self.io.peer_ack.last.retain(|(node, _)| *node != peer);
        let (mut missed, mut lost) = (Vec::new(), Vec::new());
        for key in sent {
            let parks = suspended || self.cannot_mark(key);
            let Some(req) = self.io.requests.get_mut(key) else {
                continue;
            };
            // With protocol A nothing is pending but what has no other copy (`send_write`).
            if parks && req.pending.contains(peer) {
                req.pending.remove(peer);
                req.parked.insert(peer);
                self.io.parked += 1;
                continue;
            }
            req.pending.remove(peer);
            if !forgets {
                req.ok.remove(peer);
                if req.completed && req.local == Local::Ok && req.ok.is_empty() {
                    lost.push(req.volume);
                }
                missed.push((req.volume, req.sector, req.size_bytes));
            }
            req.in_sync.remove(peer);
            req.unsettled.remove(peer);
            self.try_complete(key);
        }
        let stays_in_sync = planted!(self, InSyncSurvivesLoss);
        let copies_count = !planted!(self, CopiedWriteForgotten);
        for key in self.io.log.iter() {
            if let Some(req) = self.io.requests.get_mut(*key) {
                req.mark.remove(peer);
                // Who has it, or has copied it, may become the target of a third node that does not have it yet.
                let has = req.ok.contains(peer) || copies_count && req.accounted.contains(peer);
                if has && self.connections.len() > 1 {
                    req.left.insert(peer);
                    if !stays_in_sync {
                        req.in_sync.remove(peer);
                    }
                    req.accounted.insert(peer);
                    missed.push((req.volume, req.sector, req.size_bytes));
                }
            }
        }
        // A write may stay unsettled for long, if quorum is lost with the next peer: this one may
        // be back before that, and must be told what it missed.
        for (volume, sector, size_bytes) in missed {
            self.mark_towards(volume, peer, sector, size_bytes);
        }
        self.copies_are_lost(lost, peer);
        self.settle_log();
        self.lose_reads(peer);
        self.settle_flushes(peer);
        if self.io.parked > 0 {
            self.io.parked_due = true;
        }
        self.want_held_uuids();
    }

    /// A connected peer has lost its disk: nobody knows whether the writes on their way to it came
    /// before that. They are marked, so that the comparison at its next attach sees them.
    pub(crate) fn mark_sent(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        let ranges: Vec<(Sector, u32)> = conn
            .io
            .sent
            .iter()
            .filter_map(|key| self.io.requests.get(*key))
            .filter(|req| req.volume == volume)
            .filter(|_| !planted!(self, PeerDiskLossForgetsSent))
            .map(|req| (req.sector, req.size_bytes))
            .collect();
        for (sector, size_bytes) in ranges {
            self.mark_towards(volume, peer, sector, size_bytes);
        }
    }
}
