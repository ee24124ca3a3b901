//! Resync as source: reads for a peer's requests, held until the peer has written them.

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::{BlockAck, BlockDesc, BlockRequest, Data};
use lockstep_format::wire::{Digest, DiskState, Packet, ReplState, Role};

use super::dagtag::Awaited;
use super::slab::Key;
use super::{Connection, DataOp, DiskFault, Owner};
use crate::event::{ALL_ZERO, DiskError, DiskOp, Output, Payload, Stream};
use crate::interval::{Origin, RangeId};
use crate::resource::{Pending, Resource};
use crate::state::ReplSets;
use crate::timers::Timer;

/// Most requests of one peer device at a time; a target keeps far below.
const MOST_REQUESTS: usize = 8192;
/// First protocol version whose answers name their request.
const FIRST_WITH_BLOCK_IDS: u32 = 122;

/// What a resync target wants of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    /// Its data.
    Data,
    /// Its data, unless they have this digest.
    DataUnless(Digest),
    /// Its data, unless they are all zero.
    DataUnlessZero,
}

/// A resync request of a peer.
#[derive(Debug)]
pub(crate) struct SourceRead {
    request: BlockRequest,
    /// Write of a third node that has to be here before.
    after: Option<Awaited>,
    wanted: Wanted,
    range: Option<RangeId>,
    payload: Option<Payload>,
    /// Something newer was written here since it was asked for, or waits for that: what the peer gets may be older.
    overtaken: bool,
    /// The data were sent.
    replied: bool,
}

impl Resource {
    /// A request of a resync target.
    pub(crate) fn source_request(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        request: BlockRequest,
        (node, dagtag): (NodeId, Dagtag),
        wanted: Wanted,
    ) {
        if self.keep_early_request(peer, volume, request, (node, dagtag), wanted) {
            return;
        }
        if !self.is_block_of(peer, volume, &request) {
            if self.sizes_differ(peer, volume) {
                return;
            }
            let text = format!(
                "resync of {} bytes at sector {}",
                request.size_bytes, request.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        }
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.target_may_end = false;
        }
        let disk = self.state.disk(volume);
        let repl = self.state.peer_device(volume, peer).repl;
        let full = self
            .peer_io(volume, peer)
            .is_none_or(|io| io.source.len() >= MOST_REQUESTS)
            || self
                .peer_io(volume, peer)
                .is_some_and(|io| io.source_by_sector.contains_key(&request.sector));
        if repl == ReplState::Ahead {
            let ack = self.source_answer(volume, peer, &request);
            self.send(peer, Stream::Control, volume, Packet::RsCancelAhead(ack));
            return;
        }
        if disk < DiskState::Outdated
            || disk == DiskState::DUnknown
            || self.disk_io(volume).is_none()
        {
            let ack = self.source_answer(volume, peer, &request);
            self.send(peer, Stream::Control, volume, Packet::NegRsDreply(ack));
            return;
        }
        // Without a packet that puts it off, what was asked for before a pause is answered.
        let paused =
            repl == ReplState::PausedSyncS && self.spoken(peer) < crate::legacy::WITH_OUT_OF_SYNC;
        // A kernel that is invalidated is PausedSyncT towards its other peers, to which this means
        // nothing, and asks one of them when it loses its source: for ever, if that does not answer.
        let unasked = repl == ReplState::Established
            && disk == DiskState::UpToDate
            && self.state.peer_device(volume, peer).disk == DiskState::Inconsistent
            && self.is_kernel(peer);
        if (repl != ReplState::SyncSource && !paused && !unasked) || full {
            self.source_cancel(volume, peer, &request);
            return;
        }
        let mut after = None;
        let writes = self
            .state
            .connections
            .get(&node)
            .is_some_and(|c| c.peer_role == Role::Primary);
        if !self.is_here_already(peer, (node, dagtag)) {
            // What it had said on the link before may be of its life before, which counted otherwise.
            let says = |conn: &Connection| conn.dagtag_fresh || planted!(self, DagtagOfLifeBefore);
            match self.connections.get(&node) {
                Some(conn)
                    if conn.link.is_some()
                        && says(conn)
                        && !dagtag.is_newer_than(conn.last_dagtag) => {}
                // One that is no Primary and has said nothing on this link will not say it: the
                // target speaks of a link from before.
                Some(conn) if conn.link.is_some() && (conn.dagtag_fresh || writes) => {
                    after = Some(self.await_write(node, dagtag));
                }
                // What the target has of that node never comes here any more on this stream.
                _ => {
                    self.source_cancel(volume, peer, &request);
                    return;
                }
            }
        }
        let after = after.filter(|_| !planted!(self, ResyncRequestIgnoresDagtag));
        let waits = after.is_some();
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        let read = SourceRead {
            request,
            after,
            wanted,
            range: None,
            payload: None,
            overtaken: false,
            replied: false,
        };
        let key = io.source.insert(read);
        io.source_by_sector.insert(request.sector, key);
        if waits {
            return;
        }
        io.source_pace.held.push_back(key);
        if io.source_pace.held.len() == 1 {
            self.source_pace_timer(volume, peer);
        }
    }

    /// `Timer::SourcePace`: reads what may be read now.
    pub(crate) fn source_pace_timer(&mut self, volume: VolumeNr, peer: NodeId) {
        while let Some(key) = self
            .peer_io(volume, peer)
            .and_then(|io| io.source_pace.held.front().copied())
        {
            let size = self
                .peer_io(volume, peer)
                .and_then(|io| Some(io.source.get(key)?.request.size_bytes));
            if let Some(size) = size
                && !self.source_admits(volume, peer, size)
            {
                let timer = Timer::SourcePace(volume, peer);
                self.timers.set(timer, self.now + crate::rate::STEP);
                return;
            }
            if let Some(io) = self.peer_io(volume, peer) {
                io.source_pace.held.pop_front();
            }
            self.source_start(volume, peer, key);
        }
        self.timers.clear(Timer::SourcePace(volume, peer));
    }

    /// Makes way for the application, where the target cannot know of its writes. A target that gets
    /// them makes way itself, and may hold them up until it has the block.
    fn source_admits(&mut self, volume: VolumeNr, peer: NodeId, size_bytes: u32) -> bool {
        let state = self.state.peer_device(volume, peer);
        if state.repl != ReplState::SyncSource || state.replication {
            return true;
        }
        let now = self.now;
        let waits = self.disk_io(volume).is_some_and(|io| io.al.has_waiters());
        let Some(device) = self.devices.get_mut(&volume) else {
            return true;
        };
        let written = device.io.written_sectors;
        let Some(pd) = device.peers.get_mut(&peer) else {
            return true;
        };
        let min_rate = pd.options.c_min_rate_kib_s;
        let sectors = u64::from(size_bytes) / Sector::SIZE;
        pd.io
            .source_pace
            .admits(now, min_rate, (waits, written), sectors)
    }

    fn source_start(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let Some(pd) = device.peers.get_mut(&peer) else {
            return;
        };
        let Some(read) = pd.io.source.get_mut(key) else {
            return;
        };
        read.after = None;
        let (sector, size) = (read.request.sector, read.request.size_bytes);
        let owner = Owner::Source(peer, key);
        let (range, clear) =
            device
                .io
                .ranges
                .insert(Origin::ResyncSource(peer), sector, size, owner);
        read.range = Some(range);
        if clear || planted!(self, ResyncReadIgnoresWrites) {
            self.source_range_clear(volume, peer, key);
        }
    }

    /// No write overlaps: read.
    pub(crate) fn source_range_clear(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        let Some(read) = io.source.get(key).map(|read| read.request) else {
            return;
        };
        if self.disk_io(volume).is_none() {
            // The disk went while the read waited for its range.
            self.source_read_done(volume, peer, key, Ok(None));
            return;
        }
        if self.is_behind_with(volume, read.sector, read.size_bytes) {
            self.source_give_up(volume, peer, key);
            return;
        }
        let op = DiskOp::ReadNew {
            sector: read.sector,
            len: read.size_bytes,
        };
        self.disk_op(volume, op, DataOp::SourceRead(volume, peer, key));
    }

    /// A Primary that is Ahead of this node has told it of the block instead of sending it: the target may have got
    /// newer data from the Primary itself.
    fn is_behind_with(&mut self, volume: VolumeNr, sector: Sector, size_bytes: u32) -> bool {
        let Some(state) = self.state.devices.get(&volume) else {
            return false;
        };
        let behind = state
            .peers
            .iter()
            .filter(|(_, p)| p.repl == ReplState::Behind);
        let behind: NodeMask = behind.map(|(peer, _)| *peer).collect();
        !behind.is_empty()
            && self.disk_io(volume).is_some_and(|io| {
                let bits = io
                    .bitmap
                    .shape()
                    .touched_bits(sector, u64::from(size_bytes));
                let mut slots = behind.iter().filter_map(|peer| io.slot(peer));
                slots.any(|slot| io.bitmap.any_set(slot, bits.clone()))
            })
    }

    pub(crate) fn source_read_done(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        key: Key,
        result: Result<Option<Payload>, DiskError>,
    ) {
        let failed = result.is_err();
        let payload = result.ok().flatten();
        let algorithm = self
            .connections
            .get(&peer)
            .and_then(|c| c.net.csums_alg.clone())
            .filter(|name| !name.is_empty());
        let read = self
            .peer_io(volume, peer)
            .and_then(|io| io.source.get_mut(key));
        let Some(read) = read else {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            return;
        };
        let request = read.request;
        let Some(payload) = payload else {
            self.source_end(volume, peer, key);
            let ack = self.source_answer(volume, peer, &request);
            self.send(peer, Stream::Control, volume, Packet::NegRsDreply(ack));
            if failed {
                if planted!(self, SourceErrorUnmarked) {
                    self.disk_failed(volume, DiskFault::Data);
                } else {
                    self.unreadable(volume, request.sector, request.size_bytes);
                }
            }
            return;
        };
        let algorithm = match read.wanted {
            Wanted::Data => None,
            Wanted::DataUnless(_) => algorithm,
            Wanted::DataUnlessZero => Some(ALL_ZERO.into()),
        };
        if let Some(algorithm) = algorithm {
            read.payload = Some(payload);
            let op = DataOp::SourceDigest(volume, peer, key);
            let tag = self.tags.insert(Pending::Data(op));
            self.output(Output::Digest {
                tag,
                algorithm,
                payload,
            });
            return;
        }
        self.source_reply(volume, peer, &request, payload);
    }

    fn source_reply(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        request: &BlockRequest,
        payload: Payload,
    ) {
        self.owe_less(volume, peer, request.sector, request.size_bytes);
        let data = Data {
            sector: request.sector,
            block_id: request.block_id,
            payload_len: request.size_bytes,
            ..Data::default()
        };
        if let Some(io) = self.peer_io(volume, peer) {
            io.sent_sectors += u64::from(request.size_bytes) / Sector::SIZE;
            let key = io.source_by_sector.get(&request.sector).copied();
            if let Some(read) = key.and_then(|key| io.source.get_mut(key)) {
                read.replied = true;
            }
        }
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.resync_in_flight_sectors += u64::from(request.size_bytes) / Sector::SIZE;
        }
        let packet = Packet::RsDataReply(data);
        self.send_payload(peer, Stream::Data, volume, packet, Some(payload), None);
        self.release(payload.buf);
    }

    pub(crate) fn source_digest_done(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        key: Key,
        digest: &[u8],
    ) {
        let always_equal = planted!(self, CsumsAlwaysEqual);
        let unchecked = planted!(self, ZeroUnchecked);
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        let Some(read) = io.source.get_mut(key) else {
            return;
        };
        let Some(payload) = read.payload.take() else {
            return;
        };
        let request = read.request;
        let needless = match read.wanted {
            Wanted::Data => false,
            Wanted::DataUnless(theirs) => always_equal || theirs.as_bytes() == digest,
            Wanted::DataUnlessZero => digest == [1] || unchecked,
        };
        let zero = matches!(read.wanted, Wanted::DataUnlessZero);
        if !needless {
            self.source_reply(volume, peer, &request, payload);
            return;
        }
        self.release(payload.buf);
        if zero {
            self.source_deallocated(volume, peer, &request);
            return;
        }
        if let Some(io) = self.peer_io(volume, peer) {
            io.resync_same_sectors += u64::from(request.size_bytes) / Sector::SIZE;
        }
        self.owe_less(volume, peer, request.sector, request.size_bytes);
        self.source_in_sync(volume, peer, &request);
        self.source_end(volume, peer, key);
        let ack = self.source_answer(volume, peer, &request);
        self.send(peer, Stream::Control, volume, Packet::RsIsInSync(ack));
    }

    /// The block is all zero: the target discards its own, and acknowledges that like data.
    fn source_deallocated(&mut self, volume: VolumeNr, peer: NodeId, request: &BlockRequest) {
        self.owe_less(volume, peer, request.sector, request.size_bytes);
        let with_id = self
            .connections
            .get(&peer)
            .is_some_and(|c| c.protocol() >= FIRST_WITH_BLOCK_IDS);
        let packet = match with_id {
            true => Packet::RsDeallocatedId(BlockAck {
                sector: request.sector,
                block_id: request.block_id,
                size_bytes: request.size_bytes,
                seq_num: 0,
            }),
            false => Packet::RsDeallocated(BlockDesc {
                sector: request.sector,
                size_bytes: request.size_bytes,
            }),
        };
        self.send(peer, Stream::Data, volume, packet);
    }

    /// The target has written a block, or could not.
    pub(crate) fn source_ack(&mut self, peer: NodeId, volume: VolumeNr, ack: &BlockAck, ok: bool) {
        let io = self.peer_io(volume, peer);
        let key = io.and_then(|io| io.source_by_sector.get(&ack.sector).copied());
        let request = key
            .and_then(|key| {
                self.peer_io(volume, peer)?
                    .source
                    .get(key)
                    .map(|read| read.request)
            })
            .filter(|request| request.size_bytes == ack.size_bytes);
        let (Some(key), Some(request)) = (key, request) else {
            let text = format!("ack of an unknown resync block at sector {}", ack.sector);
            self.protocol_error(peer, Some(volume), text);
            return;
        };
        if ok || planted!(self, ResyncNegAckClears) {
            self.source_in_sync(volume, peer, &request);
        } else {
            let block = self
                .disk_io(volume)
                .map_or(4096, |io| io.bitmap.shape().block().bytes());
            if let Some(io) = self.peer_io(volume, peer) {
                io.resync_failed_bits += u64::from(request.size_bytes.div_ceil(block));
            }
        }
        self.source_end(volume, peer, key);
    }

    /// This node's block is replaced by a resync of its own, which does not wait for what its
    /// targets were sent: their acks clear no mark.
    pub(crate) fn overtake_source_reads(&mut self, volume: VolumeNr, sector: Sector, size: u32) {
        let peers: Vec<NodeId> = self
            .devices
            .get(&volume)
            .map(|device| device.peers.keys().copied().collect())
            .unwrap_or_default();
        for peer in peers {
            self.overtake_source_reads_of(volume, peer, sector, size);
        }
    }

    /// A target misses a write that waits here until it has acknowledged the copy below it: that ack
    /// does not clear the write's mark.
    pub(crate) fn overtake_source_reads_of(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size: u32,
    ) {
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        let end = sector.end_of(size);
        for key in io.source.keys() {
            if let Some(read) = io.source.get_mut(key) {
                let request = &read.request;
                read.overtaken |=
                    request.sector < end && sector < request.sector.end_of(request.size_bytes);
            }
        }
    }

    fn source_in_sync(&mut self, volume: VolumeNr, peer: NodeId, request: &BlockRequest) {
        let overtaken = self.peer_io(volume, peer).is_some_and(|io| {
            let key = io.source_by_sector.get(&request.sector).copied();
            key.and_then(|key| io.source.get(key))
                .is_some_and(|read| read.overtaken)
        });
        if overtaken && !planted!(self, OvertakenReadClears) {
            self.tell_overtaken(volume, peer, request);
            return;
        }
        if let Some(io) = self.disk_io(volume)
            && let Some(slot) = io.slot(peer)
        {
            io.bitmap
                .clear_range(slot, request.sector, request.size_bytes);
        }
        self.bits_cleared(volume);
    }

    /// The target takes for equal what stays marked here, of which a later write would mark nothing more and tell nothing.
    fn tell_overtaken(&mut self, volume: VolumeNr, peer: NodeId, request: &BlockRequest) {
        let (sector, size_bytes) = (request.sector, request.size_bytes);
        let marked = self.disk_io(volume).is_some_and(|io| {
            let bits = io
                .bitmap
                .shape()
                .touched_bits(sector, u64::from(size_bytes));
            io.slot(peer)
                .is_some_and(|slot| io.bitmap.any_set(slot, bits))
        });
        // One that has lost its disk meanwhile has no marks.
        let target = self.state.peer_device(volume, peer);
        let copies = target.repl.is_sync_source() && target.disk == DiskState::Inconsistent;
        if marked && copies && !self.is_legacy(peer) && !planted!(self, OvertakenReadUntold) {
            let desc = BlockDesc { sector, size_bytes };
            self.barrier_before(peer, self.io.epoch);
            self.send(peer, Stream::Data, volume, Packet::OutOfSync(desc));
        }
    }

    fn source_end(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let Some(pd) = device.peers.get_mut(&peer) else {
            return;
        };
        let Some(read) = pd.io.source.remove(key) else {
            return;
        };
        pd.io.source_by_sector.remove(&read.request.sector);
        if read.replied
            && let Some(conn) = self.connections.get_mut(&peer)
        {
            let sectors = u64::from(read.request.size_bytes) / Sector::SIZE;
            let left = conn.io.resync_in_flight_sectors;
            conn.io.resync_in_flight_sectors = left.saturating_sub(sectors);
        }
        let mut ready = Vec::new();
        if let Some(range) = read.range {
            device.io.ranges.remove(range, &mut ready);
        }
        self.wake_ranges(volume, ready);
        if let Some(payload) = read.payload {
            self.release(payload.buf);
        }
    }

    fn source_cancel(&mut self, volume: VolumeNr, peer: NodeId, request: &BlockRequest) {
        let ack = self.source_answer(volume, peer, request);
        self.send(peer, Stream::Control, volume, Packet::RsCancel(ack));
    }

    fn source_answer(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        request: &BlockRequest,
    ) -> BlockAck {
        let seq_num = self.next_seq(volume, peer);
        BlockAck {
            sector: request.sector,
            block_id: request.block_id,
            size_bytes: request.size_bytes,
            seq_num,
        }
    }

    /// Writes of a node came in: requests that waited for them go on. Says whether some still wait.
    pub(super) fn source_dagtag_progress(&mut self, node: NodeId) -> bool {
        let Some(conn) = self.connections.get(&node) else {
            return false;
        };
        let reached = conn.last_dagtag;
        let mut wait = false;
        for (volume, peer, key, after) in self.source_waiting_for(node) {
            if !after.is_met(reached) {
                if after.is_too_old(self.now) {
                    self.source_give_up(volume, peer, key);
                } else {
                    wait = true;
                }
                continue;
            }
            // The node may have said how far its writes have come because it is copying them here:
            // what this disk has is older.
            let serves = self.state.peer_device(volume, peer).repl == ReplState::SyncSource;
            if serves {
                self.source_start(volume, peer, key);
            } else {
                self.source_give_up(volume, peer, key);
            }
        }
        wait
    }

    /// Nobody can wait for writes of this node any more.
    pub(super) fn source_dagtag_lost(&mut self, node: NodeId) {
        for (volume, peer, key, _) in self.source_waiting_for(node) {
            self.source_give_up(volume, peer, key);
        }
    }

    /// A request that cannot be served now: the target asks again.
    fn source_give_up(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let request = self
            .peer_io(volume, peer)
            .and_then(|io| Some(io.source.get(key)?.request));
        self.source_end(volume, peer, key);
        if let Some(request) = request {
            self.source_cancel(volume, peer, &request);
        }
    }

    fn source_waiting_for(&self, node: NodeId) -> Vec<(VolumeNr, NodeId, Key, Awaited)> {
        let mut found = Vec::new();
        for (volume, device) in &self.devices {
            for (peer, pd) in &device.peers {
                if pd.io.source.len() == 0 {
                    continue;
                }
                for key in pd.io.source_by_sector.values() {
                    let after = pd.io.source.get(*key).and_then(|read| read.after);
                    if let Some(after) = after.filter(|after| after.node == node) {
                        found.push((*volume, *peer, *key, after));
                    }
                }
            }
        }
        found
    }

    /// The link to the target is gone; reads in flight end without an owner.
    pub(crate) fn source_link_lost(&mut self, volume: VolumeNr, peer: NodeId) {
        let keys = self
            .peer_io(volume, peer)
            .map(|io| io.source.keys())
            .unwrap_or_default();
        for key in keys {
            self.source_end(volume, peer, key);
        }
        if let Some(io) = self.peer_io(volume, peer) {
            io.source_pace.held.clear();
        }
        self.timers.clear(Timer::SourcePace(volume, peer));
    }
}
