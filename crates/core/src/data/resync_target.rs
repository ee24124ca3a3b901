//! Resync as target: which blocks to ask for and when, writing them, and the end.
//!
//! A block's bits are cleared, and its source is told, only after the data have been flushed:
//! both sides then forget that it ever differed. Requests run ahead of that by the amount that
//! the rate controller grants.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use core::ops::Range;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::{BlockAck, BlockId, BlockRequest, DagtagRequest, Data};
use lockstep_format::wire::{Digest, Features, Packet, ReplState, Role, bio_len_max};

use super::disk::FlushWaiter;
use super::in_sync::Part;
use super::slab::{Key, Slab};
use super::write::Local;
use super::{DataOp, DiskFault, Owner};
use crate::event::{DiskError, Payload, RequestKind, Stream};
use crate::interval::{Origin, RangeId, WatchId};
use crate::options::NetOptions;
use crate::rate::{BLOCK_SECTORS, Pace, RateInput, STEP};
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::time::{Duration, Instant};
use crate::timers::Timer;

mod confirm;
mod csum;
mod flush;
mod pieces;
mod replication;
mod thin;
mod third;
mod two_sources;
mod unanswered;

use confirm::Confirm;
use pieces::request_bits;

/// The part of what is in flight that is worth a flush of its own.
const FLUSH_SHARE: u64 = 2;
/// Longest time that written data wait for the flush that they share with others.
const FLUSH_DELAY: Duration = Duration::from_millis(10);
/// After this time without an answer the flush before the end is asked for again.
const FLUSH_PATIENCE: Duration = Duration::from_secs(1);
/// How long bits that were cleared may wait to be written.
const BITMAP_DELAY: Duration = Duration::from_secs(2);
/// Largest request in sectors.
const MOST_SECTORS: u64 = 2048;

/// A running resync from one peer.
#[derive(Debug, Default)]
pub(crate) struct TargetSync {
    requests: Slab<TargetRequest>,
    by_sector: BTreeMap<Sector, Key>,
    /// Next bit of this pass.
    cursor: u64,
    done_sectors: u64,
    pace: Pace,
    /// Written and not flushed.
    unflushed: Vec<Key>,
    unflushed_sectors: u64,
    /// On the disk, but not durable or not acknowledged: nothing that the rate controller counts.
    written_sectors: u64,
    /// In the flush in flight.
    flushing: Vec<Key>,
    /// Flushed, but marks towards third nodes are still on their way to the disk.
    marking: Vec<Key>,
    /// Digests whose blocks wait for a flush, and those in the flush in flight.
    hashed: Vec<Key>,
    hash_flushing: Vec<Key>,
    /// Bits that failed in this pass, and in all.
    pass_failed: u64,
    failed: u64,
    /// Writes of marks that requests wait for.
    held: u32,
    /// Asked for on this link on behalf of a disk before this one, and not answered.
    forgotten: Vec<(Sector, u32)>,
    /// The resync is over or the link is gone: nothing is asked for any more.
    over: bool,
    /// The link is gone, too: nobody waits for acks.
    lost: bool,
    /// Flush answers that are awaited: the Primary and the nodes that have to answer for it.
    flush_waits: Vec<(NodeId, NodeMask)>,
    flush_sequence: u64,
    flush_asked: Instant,
    /// A write of the source has cleared marks, and no flush since is known of.
    overwritten: bool,
    /// Number of the flush before the end that is in flight.
    end_flush: Option<u64>,
    /// Whether the source has the acks.
    confirm: Confirm,
    /// All peers send their writes, or were asked to.
    replicating: bool,
    /// Marks that were left at the end of the last pass without replication.
    left_bits: u64,
    /// Of the disk that it began on.
    disk_serial: u64,
}

#[derive(Debug)]
struct TargetRequest {
    sector: Sector,
    size_bytes: u32,
    range: Option<RangeId>,
    payload: Option<Payload>,
    /// Digest of this node's block, once it was computed.
    digest: Option<Digest>,
    /// Sees writes of the block from before its digest on.
    watch: Option<WatchId>,
    stage: Stage,
    /// The source may answer that the block is all zero, and did so.
    thin: bool,
    zero: bool,
    /// The source marked the block again: what it sent may be older than the mark.
    marked_again: bool,
    /// On the disk.
    written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Waits before it is sent.
    Waiting,
    /// Its block is read and made durable for the digest.
    Hashing,
    /// Sent.
    Sent,
    /// The reply is here and waits for writes.
    Replied,
    /// On its way to the disk, or there and not flushed.
    Writing,
}

impl TargetSync {
    /// Requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.requests.len()
    }

    /// Sectors of requests in flight.
    pub(crate) fn in_flight_sectors(&self) -> u64 {
        self.pace.in_flight_sectors
    }

    /// The first request in flight that overlaps this part, in sectors.
    fn first_in_flight(&self, sector: Sector, end: Sector) -> Option<Range<u64>> {
        let sectors = |(start, key): (&Sector, &Key)| {
            let request = self.requests.get(*key)?;
            let count = u64::from(request.size_bytes) / Sector::SIZE;
            Some(start.0..start.0 + count)
        };
        let before = self.by_sector.range(..=sector).next_back();
        let before = before.and_then(sectors).filter(|r| r.end > sector.0);
        before.or_else(|| self.by_sector.range(sector..end).next().and_then(sectors))
    }

    /// Sectors that came back.
    pub(crate) fn done_sectors(&self) -> u64 {
        self.done_sectors
    }
}

impl Resource {
    fn target(&mut self, volume: VolumeNr, peer: NodeId) -> Option<&mut TargetSync> {
        self.peer_io(volume, peer)?.target.as_mut()
    }

    /// A resync begins, in either direction.
    pub(crate) fn resync_entered(&mut self, volume: VolumeNr, peer: NodeId) {
        let now = self.now;
        let total = self
            .disk_io(volume)
            .and_then(|io| io.slot(peer).map(|slot| io.bitmap.count(slot)));
        let target = self.state.peer_device(volume, peer).repl.is_sync_target();
        let disk_serial = self.forget_unanswered(volume, peer);
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        io.resync_total_bits = total.unwrap_or(0);
        io.resync_failed_bits = 0;
        io.resync_same_sectors = 0;
        io.verify.found = false;
        io.resync_started = now;
        if target {
            let mut sync = TargetSync {
                pace: Pace::new(now),
                disk_serial,
                ..TargetSync::default()
            };
            if let Some(old) = io.target.take() {
                // Requests of an earlier resync on this link are still to be answered.
                sync.requests = old.requests;
                sync.by_sector = old.by_sector;
                sync.unflushed = old.unflushed;
                sync.unflushed_sectors = old.unflushed_sectors;
                sync.written_sectors = old.written_sectors;
                sync.flushing = old.flushing;
                sync.marking = old.marking;
                sync.hashed = old.hashed;
                sync.hash_flushing = old.hash_flushing;
                sync.held = old.held;
                sync.overwritten = old.overwritten;
                sync.forgotten = old.forgotten;
                sync.end_flush = old.end_flush;
                sync.pace.in_flight_sectors = old.pace.in_flight_sectors;
            }
            sync.left_bits = total.unwrap_or(0);
            io.target = Some(sync);
            self.mark_third_nodes(volume, peer);
            self.recopy_failed_writes(volume, peer);
            self.replication_ended_for_others(volume, peer);
            let replicating = self.begins_with_replication(volume, peer);
            self.writes_are_followed_by_marks(volume, peer, replicating);
            if replicating {
                self.request_flushes(volume, peer);
            }
            self.request_flushes_of_others(volume, peer);
            self.timers.set(Timer::ResyncStep(volume, peer), now);
        }
    }

    /// A paused resync goes on: from the first bit, because marks may lie behind.
    pub(crate) fn resync_resumed(&mut self, volume: VolumeNr, peer: NodeId) {
        let now = self.now;
        if !self.resync_is_ready(volume, peer) || planted!(self, ResumeForgotten) {
            return;
        }
        if let Some(sync) = self.target(volume, peer).filter(|sync| !sync.over) {
            sync.cursor = 0;
            sync.pass_failed = 0;
            self.timers.set(Timer::ResyncStep(volume, peer), now);
        } else {
            self.resync_entered(volume, peer);
        }
    }

    /// The resync ended or was given up; answers to what was asked still come.
    pub(crate) fn resync_left(&mut self, volume: VolumeNr, peer: NodeId) {
        self.timers.clear(Timer::ResyncStep(volume, peer));
        if let Some(sync) = self.target(volume, peer) {
            sync.over = true;
        }
        self.drop_waiting(volume, peer);
        self.target_gone_if_empty(volume, peer);
    }

    /// Requests that were not sent are forgotten; with a lost link also those that were.
    fn drop_waiting(&mut self, volume: VolumeNr, peer: NodeId) {
        let keeps = planted!(self, LostRequestsKept);
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        let lost = sync.lost && !keeps;
        for key in sync.requests.keys() {
            let Some(sync) = self.target(volume, peer) else {
                return;
            };
            let drop = sync.requests.get(key).is_some_and(|r| match r.stage {
                Stage::Waiting | Stage::Hashing => true,
                Stage::Sent | Stage::Replied => lost,
                Stage::Writing => false,
            });
            if drop {
                self.target_end(volume, peer, key);
            }
        }
    }

    pub(crate) fn target_link_lost(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(sync) = self.target(volume, peer) {
            sync.over = true;
            sync.lost = true;
        }
        self.timers.clear(Timer::ResyncStep(volume, peer));
        self.drop_waiting(volume, peer);
        self.target_gone_if_empty(volume, peer);
        // A node that owed the answer to a flush can owe it no more.
        let peers: Vec<NodeId> = self
            .devices
            .get(&volume)
            .map(|d| d.peers.keys().copied().collect())
            .unwrap_or_default();
        for other in peers {
            if planted!(self, LostFlushAwaited) {
                break;
            }
            if let Some(sync) = self.target(volume, other) {
                for (_, nodes) in &mut sync.flush_waits {
                    nodes.remove(peer);
                }
                sync.flush_waits
                    .retain(|(primary, nodes)| *primary != peer && !nodes.is_empty());
                self.target_kick(volume, other);
            }
        }
    }

    fn target_gone_if_empty(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        if io
            .target
            .as_ref()
            .is_some_and(|sync| sync.over && sync.requests.len() == 0)
        {
            io.target = None;
            self.drained(peer);
        }
    }

    /// `Timer::ResyncStep`.
    pub(crate) fn resync_step_timer(&mut self, volume: VolumeNr, peer: NodeId) {
        let repl = self.state.peer_device(volume, peer).repl;
        if repl != ReplState::SyncTarget || self.target(volume, peer).is_none_or(|s| s.over) {
            return;
        }
        let at = self.now + STEP;
        if !planted!(self, ResyncTimerNotRearmed) {
            self.timers.set(Timer::ResyncStep(volume, peer), at);
        }
        self.grant(volume, peer);
        self.target_step(volume, peer);
    }

    /// Asks the controller how much may be requested.
    fn grant(&mut self, volume: VolumeNr, peer: NodeId) {
        let now = self.now;
        let Some(disk) = self.disk_io(volume) else {
            return;
        };
        let Some(slot) = disk.slot(peer) else { return };
        let left_sectors = disk.bitmap.out_of_sync_sectors(slot);
        let load = self.resync_load(volume, peer);
        let all = u64::from(planted!(self, RateUnlimited)) * left_sectors;
        let stops = load.application_sectors > 0 && planted!(self, LoadStopsResync);
        let Some(pd) = self
            .devices
            .get_mut(&volume)
            .and_then(|d| d.peers.get_mut(&peer))
        else {
            return;
        };
        if let Some(sync) = pd.io.target.as_mut() {
            sync.pace.grant(now, &pd.options, load);
            sync.pace.grant_sectors = sync.pace.grant_sectors.max(all);
            if stops {
                sync.pace.grant_sectors = 0;
            }
        }
    }

    /// What a rate controller has to know of the rest of this node's work.
    pub(crate) fn resync_load(&mut self, volume: VolumeNr, peer: NodeId) -> RateInput {
        let mut load = RateInput {
            max_buffers: self.max_buffers(peer),
            ..RateInput::default()
        };
        load.granule_sectors = self.common_block_sectors(volume, peer);
        if let Some(disk) = self.disk_io(volume) {
            load.application_waits = disk.al.has_waiters();
        }
        if let Some(device) = self.devices.get_mut(&volume) {
            let written = device.io.written_sectors + device.io.told_sectors;
            load.application_sectors = written.saturating_sub(device.io.written_at_grant);
            device.io.written_at_grant = written;
        }
        load
    }

    /// `max-buffers` in 4 KiB pages.
    fn max_buffers(&self, peer: NodeId) -> u32 {
        let conn = self.connections.get(&peer);
        match planted!(self, MaxBuffersIgnored) {
            true => NetOptions::default().max_buffers * 8,
            false => conn.map_or(NetOptions::default().max_buffers, |c| c.net.max_buffers),
        }
    }

    /// Something came back or was marked: go on if the pipe runs dry.
    pub(crate) fn target_kick(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        if sync.over {
            return;
        }
        if sync.pace.runs_dry() {
            self.grant(volume, peer);
        }
        self.target_step(volume, peer);
    }

    /// Requests out-of-sync blocks as far as granted; notices the end.
    fn target_step(&mut self, volume: VolumeNr, peer: NodeId) {
        let held = self.target(volume, peer).is_some_and(|sync| sync.held > 0)
            || self.source_may_be_smaller(volume, peer);
        if held || self.state.peer_device(volume, peer).repl != ReplState::SyncTarget {
            return;
        }
        let thin_sectors = self.thin_sectors(volume, peer);
        let most_written_sectors = u64::from(self.max_buffers(peer)) * BLOCK_SECTORS;
        // Requests of whole blocks of both sides: what is clear in a larger block of the peer's
        // comes once more.
        let block = self.common_block_sectors(volume, peer);
        let longest_sectors = u64::from(bio_len_max(self.spoken(peer))) / Sector::SIZE;
        loop {
            let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
            let Some(device) = self.devices.get_mut(&volume) else {
                return;
            };
            let Some(disk) = device.disk.as_ref().map(|d| &d.io) else {
                return;
            };
            let Some(slot) = disk.slot(peer) else { return };
            let Some(sync) = device
                .peers
                .get_mut(&peer)
                .and_then(|p| p.io.target.as_mut())
            else {
                return;
            };
            if sync.over {
                return;
            }
            let Some(bit) = disk.bitmap.next_set(slot, sync.cursor) else {
                self.end_pass(volume, peer);
                return;
            };
            if sync.pace.grant_sectors == 0 || sync.written_sectors >= most_written_sectors {
                return;
            }
            let own_bits = block / disk.bitmap.shape().block().sectors();
            let unit = thin_sectors / block;
            let granted = sync
                .pace
                .grant_sectors
                .max(thin_sectors)
                .min(longest_sectors);
            let most = (MOST_SECTORS / block).max(unit) + 1;
            let clear = disk.bitmap.next_clear_within(slot, bit, most * own_bits);
            let (start, end) = request_bits(
                clear.div_ceil(own_bits),
                bit / own_bits,
                block,
                granted,
                unit,
            );
            let sector = Sector(start * block);
            let mut end_sector = (end * block).min(size);
            sync.cursor = end * own_bits;
            if end_sector <= sector.0 {
                continue;
            }
            // In flight from the pass before, which may have asked for other sizes.
            if let Some(flying) = sync.first_in_flight(sector, Sector(end_sector)) {
                sync.cursor = flying.end.div_ceil(block) * own_bits;
                end_sector = flying.start;
                if end_sector <= sector.0 {
                    continue;
                }
            }
            let sectors = end_sector - sector.0;
            sync.pace.asked(sectors);
            let size_bytes = (sectors * Sector::SIZE) as u32;
            let key = sync.requests.insert(TargetRequest {
                sector,
                size_bytes,
                range: None,
                payload: None,
                digest: None,
                watch: None,
                stage: Stage::Waiting,
                thin: false,
                zero: false,
                marked_again: false,
                written: false,
            });
            sync.by_sector.insert(sector, key);
            let owner = Owner::Target(peer, key);
            let (range, clear) =
                device
                    .io
                    .ranges
                    .insert(Origin::ResyncTarget(peer), sector, size_bytes, owner);
            if let Some(request) = self
                .target(volume, peer)
                .and_then(|s| s.requests.get_mut(key))
            {
                request.range = Some(range);
            }
            if clear {
                self.target_range_clear(volume, peer, key);
            }
        }
    }

    /// No further bit in this pass: finished, or once more from the start.
    fn end_pass(&mut self, volume: VolumeNr, peer: NodeId) {
        let now = self.now;
        if self.source_exchanges(volume, peer) {
            return;
        }
        let count = self
            .disk_io(volume)
            .and_then(|io| io.slot(peer).map(|slot| io.bitmap.count(slot)));
        let count = count.filter(|_| !planted!(self, ResyncForgetsBehindCursor));
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        if sync.requests.len() > 0 {
            return;
        }
        let left = count.unwrap_or(0);
        if !sync.replicating {
            self.end_pass_of_marks(volume, peer, left);
            return;
        }
        if left > sync.pass_failed {
            sync.cursor = 0;
            sync.pass_failed = 0;
            sync.confirm = Confirm::Unasked;
            // The next step goes on: bits were set behind the cursor, or requests were cancelled.
            if !planted!(self, ResyncTimerNotRearmed) {
                self.timers
                    .set_earliest(Timer::ResyncStep(volume, peer), now + STEP);
            }
            return;
        }
        if self.flush_is_awaited(volume, peer)
            || self.flush_before_end(volume, peer)
            || !self.source_has_acks(volume, peer)
        {
            return;
        }
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        let failed = left;
        sync.over = true;
        sync.failed = failed;
        self.timers.clear(Timer::ResyncStep(volume, peer));
        self.target_gone_if_empty(volume, peer);
        self.resync_finished(volume, peer, failed);
    }

    /// Nothing overlaps: the request is sent, or its reply written.
    pub(crate) fn target_range_clear(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        let Some(request) = sync.requests.get_mut(key) else {
            return;
        };
        match request.stage {
            Stage::Waiting => {
                if !self.target_hash(volume, peer, key) {
                    self.target_send(volume, peer, key);
                }
            }
            Stage::Replied => self.target_write(volume, peer, key),
            Stage::Hashing | Stage::Sent | Stage::Writing => {}
        }
    }

    /// Sends a request, with its digest if there is one.
    fn target_send(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let request = self
            .target(volume, peer)
            .and_then(|sync| sync.requests.get_mut(key));
        let Some(request) = request else {
            return;
        };
        request.stage = Stage::Sent;
        let (sector, size_bytes) = (request.sector, request.size_bytes);
        if let Some(digest) = request.digest {
            let packet = self.csum_request(peer, key, (sector, size_bytes), digest);
            self.send(peer, Stream::Data, volume, packet);
            return;
        }
        let thin = u64::from(size_bytes) / Sector::SIZE == self.thin_sectors(volume, peer);
        if let Some(request) = self
            .target(volume, peer)
            .and_then(|s| s.requests.get_mut(key))
        {
            request.thin = thin;
        }
        let request = BlockRequest {
            sector,
            block_id: BlockId(key.0),
            size_bytes,
        };
        let packet = match (self.after_primary(peer, request), thin) {
            (Some(request), false) => Packet::RsDagtagReq(request),
            (Some(request), true) => Packet::RsThinDagtagReq(request),
            (None, false) => Packet::RsDataRequest(request),
            (None, true) => Packet::RsThinReq(request),
        };
        self.send(peer, Stream::Data, volume, packet);
    }

    /// The request as one that waits at the peer for the Primary's writes, if the peer knows such.
    pub(crate) fn after_primary(
        &self,
        peer: NodeId,
        request: BlockRequest,
    ) -> Option<DagtagRequest> {
        if !self.resync_dagtags(peer) {
            return None;
        }
        let (dagtag_node_id, dagtag) = self.followed_primary(peer);
        Some(DagtagRequest {
            sector: request.sector,
            block_id: request.block_id,
            size_bytes: request.size_bytes,
            dagtag_node_id,
            dagtag,
        })
    }

    /// The peer knows requests that wait for writes.
    pub(crate) fn resync_dagtags(&self, peer: NodeId) -> bool {
        self.connections
            .get(&peer)
            .is_some_and(|c| c.features().contains(Features::RESYNC_DAGTAG))
    }

    /// Whose writes the source must have before it reads (wire.md, 7.5). What a source has written itself
    /// comes in the same stream as its answer, so of two Primaries the other one counts. Where this
    /// node is one of them, what it wrote itself has arrived before it asks: that overlaps with no
    /// write under way, and two Primaries have protocol C.
    pub(crate) fn followed_primary(&self, source: NodeId) -> (NodeId, Dagtag) {
        let own = (self.state.role == Role::Primary).then_some((self.node_id, self.io.dagtag));
        let mut of_peers = self
            .state
            .connections
            .iter()
            .filter(|(_, c)| c.peer_role == Role::Primary)
            .filter_map(|(node, _)| {
                let conn = self.connections.get(node).filter(|c| c.dagtag_fresh)?;
                Some((*node, conn.last_dagtag))
            });
        let none = (NodeId(0), Dagtag(0));
        if own.is_some() && !self.is_shared() {
            return own.unwrap_or(none);
        }
        let other = of_peers.clone().find(|(node, _)| *node != source);
        other.or(own).or_else(|| of_peers.next()).unwrap_or(none)
    }

    pub(crate) fn target_reply(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        data: &Data,
        payload: Option<Payload>,
    ) {
        let found = self.target_asked(volume, peer, data.sector, data.payload_len);
        let (Some((key, over)), Some(payload)) = (found, payload) else {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            if self.answers_forgotten(volume, peer, (data.sector, data.payload_len)) {
                return;
            }
            let text = format!(
                "resync data of an unknown request at sector {}",
                data.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        };
        if let Some(io) = self.peer_io(volume, peer) {
            io.received_sectors += u64::from(data.payload_len) / Sector::SIZE;
        }
        if over || !self.takes_writes(volume) {
            if !planted!(self, LateReplyLeaked) {
                self.release(payload.buf);
            }
            self.target_failed(volume, peer, key);
            return;
        }
        self.target_answered(volume, peer, key, Some(payload));
    }

    /// A request that was sent and not answered; says whether its resync is over.
    fn target_asked(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) -> Option<(Key, bool)> {
        let sync = self.target(volume, peer)?;
        let key = *sync.by_sector.get(&sector)?;
        let request = sync.requests.get(key)?;
        let fits = request.stage == Stage::Sent && request.size_bytes == size_bytes;
        fits.then_some((key, sync.over))
    }

    /// The source's block is here, or known to be all zero: it is written when nothing overlaps.
    fn target_answered(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        key: Key,
        payload: Option<Payload>,
    ) {
        let Some(request) = self.target(volume, peer).and_then(|s| s.requests.get(key)) else {
            return;
        };
        let (sector, size) = (request.sector, request.size_bytes);
        // How other nodes stand to this block is not known from here on.
        if !planted!(self, ReplacedNotMarked)
            && let Some(io) = self.disk_io(volume)
        {
            io.mark_replaced(peer, sector, size);
        }
        let primary = self.state.primary_peer();
        self.overtake_peer_writes(volume, sector, size, primary);
        self.overtake_source_reads(volume, sector, size);
        self.overtake_copies(volume, peer, sector, size);
        self.forward_marks(volume, peer, NodeMask::EMPTY, sector, size);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let Some(sync) = device
            .peers
            .get_mut(&peer)
            .and_then(|p| p.io.target.as_mut())
        else {
            return;
        };
        let Some(request) = sync.requests.get_mut(key) else {
            return;
        };
        request.zero = payload.is_none();
        request.payload = payload;
        request.stage = Stage::Replied;
        let clear = request
            .range
            .is_none_or(|range| device.io.ranges.reply(range));
        if clear || planted!(self, ResyncReplyOverWrite) {
            self.target_write(volume, peer, key);
        }
    }

    fn target_write(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let takes_writes = self.takes_writes(volume);
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        let Some(request) = sync.requests.get_mut(key) else {
            return;
        };
        let (sector, size_bytes) = (request.sector, request.size_bytes);
        let (payload, zero) = (request.payload, request.zero);
        if payload.is_none() && !zero {
            return;
        }
        if !takes_writes {
            self.target_failed(volume, peer, key);
            return;
        }
        request.stage = Stage::Writing;
        let size_bytes = match zero && planted!(self, ZeroedShort) {
            true => size_bytes - 4096,
            false => size_bytes,
        };
        let kind = match zero {
            true => RequestKind::Discard,
            false => RequestKind::Write { fua: false },
        };
        self.io.foreign_count += 1;
        let op = self.disk_write(volume, kind, sector, size_bytes, payload);
        self.disk_op(volume, op, DataOp::TargetWrite(volume, peer, key));
    }

    pub(crate) fn target_write_done(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        key: Key,
        result: Result<(), DiskError>,
    ) {
        if result.is_err() && !planted!(self, ResyncWriteErrorIgnored) {
            self.disk_failed(volume, DiskFault::Data);
            self.target_failed(volume, peer, key);
            return;
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let Some(sync) = device
            .peers
            .get_mut(&peer)
            .and_then(|p| p.io.target.as_mut())
        else {
            return;
        };
        let Some(request) = sync.requests.get_mut(key) else {
            return;
        };
        let payload = request.payload.take();
        let range = request.range.take();
        request.written = true;
        let (sector, size_bytes) = (request.sector, request.size_bytes);
        let sectors = u64::from(request.size_bytes) / Sector::SIZE;
        let idle = sync.flushing.is_empty() && sync.marking.is_empty();
        sync.unflushed.push(key);
        sync.unflushed_sectors += sectors;
        sync.written_sectors += sectors;
        sync.pace.answered(sectors);
        let mut ready = Vec::new();
        if let Some(range) = range {
            device.io.ranges.remove(range, &mut ready);
        }
        // One flush serves many blocks, but source and link must not wait for it: the blocks that
        // are not part of it keep them busy meanwhile.
        let enough = sync.unflushed_sectors >= sync.pace.in_flight_sectors / FLUSH_SHARE
            || sync.unflushed.len() == sync.requests.len()
            || device.disk.as_ref().is_some_and(|d| !d.io.flushes());
        let lost = sync.lost;
        self.overwrite_others(volume, peer, sector, size_bytes);
        self.wake_ranges(volume, ready);
        if let Some(payload) = payload {
            self.release(payload.buf);
        }
        if lost {
            // Nobody is told; the bits stay and the next resync writes the block again.
            self.target_forget(volume, peer, key);
        } else if idle && enough {
            self.start_target_flush(volume, peer);
        } else {
            if idle {
                let at = self.now + FLUSH_DELAY;
                self.timers.set_earliest(Timer::ResyncFlush(volume), at);
            }
            self.target_kick(volume, peer);
        }
    }

    /// What another source gave before, and is not flushed yet, is not here any more: it settles nothing.
    fn overwrite_others(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) {
        let device = self.devices.get(&volume);
        let targets = device.into_iter().flat_map(|d| &d.peers);
        let others = targets.filter(|(other, pd)| **other != peer && pd.io.target.is_some());
        let others: Vec<NodeId> = others.map(|(other, _)| *other).collect();
        for other in others {
            self.target_marked_again(volume, other, sector, size_bytes);
        }
    }

    /// `Timer::ResyncFlush`.
    pub(crate) fn resync_flush_timer(&mut self, volume: VolumeNr) {
        let peers: Vec<NodeId> = self
            .devices
            .get(&volume)
            .map(|d| d.peers.keys().copied().collect())
            .unwrap_or_default();
        for peer in peers {
            self.start_target_flush(volume, peer);
        }
    }

    fn start_target_flush(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        let idle = sync.flushing.is_empty() && sync.marking.is_empty();
        if idle && !sync.unflushed.is_empty() {
            sync.flushing = core::mem::take(&mut sync.unflushed);
            sync.unflushed_sectors = 0;
            if planted!(self, ResyncAckBeforeFlush) {
                self.target_flushed(volume, peer, Ok(()));
                return;
            }
            self.flush_disk(volume, FlushWaiter::Target(peer));
        }
    }

    pub(crate) fn target_flushed(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        result: Result<(), DiskError>,
    ) {
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        let done = core::mem::take(&mut sync.flushing);
        if result.is_ok() {
            // A third node that is away may come back when the source is gone: this disk alone
            // knows then what it was given since.
            let replaced: Vec<(Sector, u32)> = done
                .iter()
                .filter_map(|key| sync.requests.get(*key))
                .map(|request| (request.sector, request.size_bytes))
                .collect();
            sync.marking = done;
            if !self.write_replaced(volume, peer, &replaced) || planted!(self, ThirdMarksNotAwaited)
            {
                self.replaced_marks_written(volume, peer);
            }
            return;
        }
        for key in done {
            self.target_failed(volume, peer, key);
        }
        self.target_settled(volume, peer, &[]);
    }

    /// What was flushed is marked durably towards third nodes: the source may forget it.
    pub(crate) fn replaced_marks_written(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        let done = core::mem::take(&mut sync.marking);
        let lost = sync.lost;
        let gone = !self.takes_writes(volume);
        let mut settled = Vec::new();
        for key in done {
            if lost {
                self.target_forget(volume, peer, key);
            } else if gone {
                self.target_failed(volume, peer, key);
            } else {
                self.target_in_sync(volume, peer, key, &mut settled);
            }
        }
        self.target_settled(volume, peer, &settled);
    }

    fn target_settled(&mut self, volume: VolumeNr, peer: NodeId, settled: &[Part]) {
        self.tell_settled(volume, settled);
        self.bits_cleared(volume);
        self.start_target_flush(volume, peer);
        self.target_gone_if_empty(volume, peer);
        self.target_kick(volume, peer);
    }

    /// A block is durable: its bits go, and the source may forget it.
    fn target_in_sync(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        key: Key,
        settled: &mut Vec<Part>,
    ) {
        let Some(request) = self.target(volume, peer).and_then(|s| s.requests.get(key)) else {
            return;
        };
        let (sector, size_bytes) = (request.sector, request.size_bytes);
        let marked_again = request.marked_again;
        if let Some(io) = self.disk_io(volume)
            && let Some(slot) = io.slot(peer)
            && !marked_again
        {
            io.bitmap.clear_range(slot, sector, size_bytes);
        }
        settled.push((sector, size_bytes));
        let seq_num = self.next_seq(volume, peer);
        let ack = BlockAck {
            sector,
            block_id: BlockId(key.0),
            size_bytes,
            seq_num,
        };
        self.send(peer, Stream::Control, volume, Packet::RsWriteAck(ack));
        self.target_end(volume, peer, key);
    }

    /// The source marked a range: requests that were sent before do not settle it.
    pub(crate) fn target_marked_again(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) {
        let forgets = planted!(self, MarkedAgainForgotten);
        let Some(sync) = self.target(volume, peer).filter(|_| !forgets) else {
            return;
        };
        let end = sector.end_of(size_bytes);
        for key in sync.requests.keys() {
            if let Some(request) = sync.requests.get_mut(key)
                && request.stage > Stage::Hashing
            {
                request.marked_again |=
                    request.sector < end && sector < request.sector.end_of(request.size_bytes);
            }
        }
    }

    /// A write is settled that these nodes lack, or that failed here: what this node has got of them in the range, and
    /// not flushed yet, does not make it equal to them.
    pub(crate) fn copies_differ(
        &mut self,
        volume: VolumeNr,
        nodes: NodeMask,
        sector: Sector,
        size_bytes: u32,
    ) {
        if planted!(self, CopyHidesLaterMark) {
            return;
        }
        for source in self.sources_of(volume).intersection(nodes).iter() {
            self.target_marked_again(volume, source, sector, size_bytes);
        }
    }

    /// A resync from this node has ended. What failed to be written here before, and is not settled yet, was copied with
    /// it: the marks are gone and do not come back.
    pub(crate) fn failures_are_copied(&mut self, volume: VolumeNr, source: NodeId) {
        let Some(slot) = self.disk_io(volume).and_then(|io| io.slot(source)) else {
            return;
        };
        let keys: Vec<Key> = self.io.log.iter().copied().collect();
        for key in keys {
            let Some(req) = self.io.requests.get(key) else {
                continue;
            };
            let (sector, size) = (req.sector, req.size_bytes);
            let failed = req.volume == volume && req.local == Local::Failed;
            let marked = self.disk_io(volume).is_none_or(|io| {
                let bits = io.bitmap.shape().touched_bits(sector, u64::from(size));
                io.bitmap.any_set(slot, bits)
            });
            if failed
                && !marked
                && let Some(req) = self.io.requests.get_mut(key)
            {
                req.accounted.insert(source);
            }
        }
    }

    /// A reply that is not on this disk.
    fn target_failed(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        let lost = sync.lost;
        let Some(request) = sync.requests.get(key) else {
            return;
        };
        let (sector, size_bytes) = (request.sector, request.size_bytes);
        if !lost {
            self.count_failed(volume, peer, size_bytes);
            let seq_num = self.next_seq(volume, peer);
            let ack = BlockAck {
                sector,
                block_id: BlockId(key.0),
                size_bytes,
                seq_num,
            };
            self.send(peer, Stream::Control, volume, Packet::RsNegAck(ack));
        }
        self.target_forget(volume, peer, key);
    }

    fn count_failed(&mut self, volume: VolumeNr, peer: NodeId, size_bytes: u32) {
        let block = self
            .disk_io(volume)
            .map_or(4096, |io| io.bitmap.shape().block().bytes());
        let bits = u64::from(size_bytes.div_ceil(block));
        if let Some(io) = self.peer_io(volume, peer) {
            io.resync_failed_bits += bits;
            if let Some(sync) = io.target.as_mut() {
                sync.pass_failed += bits;
            }
        }
    }

    fn target_forget(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        self.target_end(volume, peer, key);
        self.target_gone_if_empty(volume, peer);
        self.target_kick(volume, peer);
    }

    fn target_end(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let Some(sync) = device
            .peers
            .get_mut(&peer)
            .and_then(|p| p.io.target.as_mut())
        else {
            return;
        };
        let Some(request) = sync.requests.remove(key) else {
            return;
        };
        sync.by_sector.remove(&request.sector);
        let sectors = u64::from(request.size_bytes) / Sector::SIZE;
        let before = sync.unflushed.len();
        sync.unflushed.retain(|k| *k != key);
        if sync.unflushed.len() < before {
            sync.unflushed_sectors -= sectors;
        }
        if request.written {
            sync.written_sectors -= sectors;
        } else {
            sync.pace.answered(sectors);
        }
        sync.done_sectors += sectors;
        let mut ready = Vec::new();
        if let Some(watch) = request.watch {
            device.io.ranges.unwatch(watch);
        }
        if let Some(range) = request.range {
            device.io.ranges.remove(range, &mut ready);
        }
        self.wake_ranges(volume, ready);
        if let Some(payload) = request.payload {
            self.release(payload.buf);
        }
    }

    /// The source cannot or will not answer now.
    pub(crate) fn target_refused(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        ack: &BlockAck,
        failed: bool,
    ) {
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        let Some(key) = sync.by_sector.get(&ack.sector).copied() else {
            return;
        };
        let sent = sync
            .requests
            .get(key)
            .is_some_and(|r| r.stage == Stage::Sent);
        if !sent {
            return;
        }
        if failed && planted!(self, ResyncRefusalIgnored) {
            return;
        }
        if !failed && planted!(self, PutOffCountsAsCopied) {
            self.disk_io(volume).and_then(|io| {
                let slot = io.slot(peer)?;
                Some(io.bitmap.clear_range(slot, ack.sector, ack.size_bytes))
            });
        }
        if failed {
            self.count_failed(volume, peer, ack.size_bytes);
        }
        // A cancelled block is asked for again by the next pass, not at once.
        self.target_end(volume, peer, key);
        self.target_gone_if_empty(volume, peer);
        if let Some(sync) = self.target(volume, peer)
            && sync.requests.len() == 0
            && !sync.over
        {
            self.target_step(volume, peer);
        }
    }

    /// Bits were cleared: they are written some time later.
    pub(crate) fn bits_cleared(&mut self, volume: VolumeNr) {
        let at = self.now + BITMAP_DELAY;
        self.timers.set_earliest(Timer::BitmapWrite(volume), at);
    }
}
