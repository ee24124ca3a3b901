//! Who is in sync with whom (`P_PEERS_IN_SYNC`, semantics.md, 19.7): what a node says when its marks go,
//! what it makes of such a word, and what becomes of marks between two nodes that a third one has
//! copied.
//!
//! A word is about blocks that nobody writes: a write that is not settled may be at one node and not at
//! the other. Kernels leave out every extent of 4 MiB with such a write. Between nodes of this project
//! the rest of such an extent is named by its parts, so that a busy Primary does not keep marks between
//! two others for ever.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::vec::Vec;
use core::ops::Range;

use lockstep_format::units::{AlExtent, NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::PeersInSync;
use lockstep_format::wire::{ConnState, DISCARD_LEN_MAX, DiskState, Packet, ReplState, Role};

use super::disk::DiskIo;
use crate::al::Extents;
use crate::event::Stream;
use crate::interval::Origin;
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::time::Duration;
use crate::timers::Timer;

/// How often third nodes are asked about marks that are left, and how many extents at once.
const LEFT_MARKS_DELAY: Duration = Duration::from_secs(1);
/// The same where a resync has just ended: its last acknowledgements are on their way.
const ENDED_DELAY: Duration = Duration::from_millis(20);
/// The same where a neighbour has just met the node in question, which may be on its way to here, too.
const MET_DELAY: Duration = Duration::from_millis(2);
const LEFT_MARKS_EXTENTS: usize = 512;
/// How many extents a target names to its source, a kernel, at the end: 64 GiB.
const AT_END_EXTENTS: usize = 16 << 10;

/// A range of a volume, as packets name it.
pub(crate) type Part = (Sector, u32);

/// Why it is said who is in sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Marks have gone here: in a resync, or by what a node has said.
    Cleared(Option<NodeId>),
    /// Nothing is new: who knows that others are equal there is to say so.
    Asked,
    /// This node has said something that is no news here, and may know less.
    Answers(NodeId),
}

impl Cause {
    /// Whose word it is about.
    fn speaker(self) -> Option<NodeId> {
        match self {
            Cause::Cleared(from) => from,
            Cause::Asked => None,
            Cause::Answers(from) => Some(from),
        }
    }
}

impl Resource {
    /// Tells the peers who is in sync with this node there. With `known` ones it is an answer to who
    /// said that these are equal, and given only by a node that knows all of them and more as equal: so
    /// answers to answers end, whoever is connected.
    pub(crate) fn tell_in_sync(
        &mut self,
        volume: VolumeNr,
        parts: &[Part],
        known: NodeMask,
        cause: Cause,
    ) {
        if self.connections.len() < 2 {
            // Nobody is left whose relation the packet could settle.
            return;
        }
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let is_write = |origin| matches!(origin, Origin::LocalWrite | Origin::PeerWrite(_));
        for (extent, part) in by_extent(parts, size) {
            let referenced = |io: &mut DiskIo| io.al.is_referenced(extent);
            let hot = self.disk_io(volume).is_none_or(referenced);
            let free = match planted!(self, EqualWhileWritten) {
                true => alloc::vec![part],
                false => self.free_parts(volume, part, is_write),
            };
            for part in free {
                self.say_in_sync(volume, part, known, (hot, cause));
            }
        }
    }

    /// A resync has copied some ranges: whole extents are named, when their last block is there.
    pub(super) fn tell_settled(&mut self, volume: VolumeNr, copied: &[Part]) {
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let extents = whole_extents(copied, size);
        self.tell_in_sync(volume, &extents, NodeMask::EMPTY, Cause::Cleared(None));
    }

    /// A resync from a kernel ends. What it copied before the source knew of it, or before a third node came back, is
    /// marked towards others: the source says so if it is told once more while it is one.
    pub(super) fn ask_source_for_others(&mut self, volume: VolumeNr, source: NodeId) {
        if !self.is_kernel(source) || self.connections.len() < 2 {
            return;
        }
        let device = self.state.devices.get(&volume);
        let peers = device.into_iter().flat_map(|d| d.peers.iter());
        let others: Vec<NodeId> = peers
            .filter(|(peer, p)| **peer != source && p.repl >= ReplState::Established)
            .map(|(peer, _)| *peer)
            .collect();
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let mut extents = BTreeSet::new();
        for slot in others.iter().filter_map(|peer| io.slot(*peer)) {
            let mut next = 0;
            while let Some(bit) = io.bitmap.next_set(slot, next)
                && extents.len() < AT_END_EXTENTS
            {
                let extent = Sector(bit * io.bitmap.shape().block().sectors()).al_extent();
                extents.insert(extent);
                next = io.bitmap.extent_bits(extent).end;
            }
        }
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let parts: Vec<Part> = extents.iter().map(|e| whole_extent(*e, size)).collect();
        self.tell_in_sync(volume, &parts, NodeMask::EMPTY, Cause::Cleared(None));
    }

    /// One word; kernels are told of no extent that is being written.
    fn say_in_sync(
        &mut self,
        volume: VolumeNr,
        (sector, size_bytes): Part,
        known: NodeMask,
        (hot, cause): (bool, Cause),
    ) {
        let from = cause.speaker();
        for peer in self.established() {
            if self.is_in_doubt(peer) {
                self.hold_word(peer, volume, (sector, size_bytes), cause);
            }
        }
        let equal = |peer: &NodeId| {
            let disk = self.devices.get(&volume).and_then(|d| d.attached());
            let io = disk.map(|disk| &disk.io);
            let marks = io.and_then(|io| {
                let slot = io.slot(*peer)?;
                Some(io.bitmap.count_touched(slot, sector, size_bytes))
            });
            let copied = || from == Some(*peer) && self.was_copied(volume, *peer);
            marks == Some(0) && (self.vouches_for(volume, *peer) || copied())
        };
        let mask: NodeMask = self.established().into_iter().filter(equal).collect();
        let knows_more = !mask.difference(known).is_empty();
        let knows_all = known.difference(mask.with(self.node_id)).is_empty();
        if size_bytes == 0 || !knows_more || !knows_all {
            return;
        }
        let unseen = |node: &NodeId| self.changes_unseen(volume, *node, self.node_id);
        let unseen: NodeMask = mask.iter().filter(unseen).collect();
        for peer in mask.iter() {
            let lockstep = self.is_lockstep(peer);
            let heard = match lockstep {
                true => mask,
                false => mask.intersection(self.heard_by_kernel(volume, peer, cause)),
            };
            if lockstep || !hot && !heard.is_empty() {
                // Of itself the peer knows what this node cannot know.
                let mask = heard.difference(unseen).with(peer);
                let packet = Packet::PeersInSync(PeersInSync {
                    sector,
                    mask,
                    size_bytes,
                });
                self.send(peer, Stream::Control, volume, packet);
            }
        }
    }

    /// Of whom a kernel is told. It believes each word, also about what a verify with that node has found, which others
    /// know nothing of. So where nothing is new here it is told as a kernel would: if this node is the source of who
    /// spoke, whose last word may come behind the end. A node of this project has said about which marks of its own it
    /// asks, and they are none that a verify has found.
    fn heard_by_kernel(&self, volume: VolumeNr, peer: NodeId, cause: Cause) -> NodeMask {
        let all = NodeMask::EMPTY.complement();
        match cause {
            Cause::Cleared(_) => all,
            Cause::Asked => NodeMask::EMPTY,
            Cause::Answers(from) if self.is_lockstep(from) => NodeMask::of(from).with(peer),
            Cause::Answers(from) if self.has_served(volume, from) => all,
            Cause::Answers(_) => NodeMask::EMPTY,
        }
    }

    /// The peer is, or was last, copied from this node.
    fn has_served(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let served = device.and_then(|d| d.peers.get(&peer)).map(|pd| pd.served);
        self.state.peer_device(volume, peer).repl.is_sync_source() || served == Some(true)
    }

    /// A verify begins at these nodes: what they say from now on is of no resync before it.
    pub(crate) fn verify_begins(&mut self, volume: VolumeNr, ends: NodeMask) {
        for peer in ends.iter() {
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.served = false;
            }
        }
    }

    /// The node follows a Primary that the other one, `by`, is not connected to. What that one writes
    /// is marked at the node alone, and nobody else can say who is equal to it. A Primary names no other
    /// one; it is connected to this node, and writes nothing while it is apart from another Primary. What
    /// this node itself wrote as one it has marked, and `by` is connected to it.
    fn changes_unseen(&self, volume: VolumeNr, node: NodeId, by: NodeId) -> bool {
        let primaries = |node: NodeId| match self.peer_uuids(volume, node) {
            Some(set) if !self.is_stable_set(set) => set.node_mask,
            _ => NodeMask::EMPTY,
        };
        let connections = self.state.connections.iter();
        let met: NodeMask = connections
            .filter(|(_, c)| c.peer_role == Role::Primary)
            .map(|(node, _)| *node)
            .collect();
        let seen = match by == self.node_id || met.contains(by) {
            true => met,
            false => primaries(by),
        };
        let seen = seen.with(by).with(self.node_id);
        let careless = planted!(self, VouchesForAnybody);
        !careless && !primaries(node).difference(seen).is_empty()
    }

    /// What of a range is not touched by a write that is on its way: whoever has it is not known. The
    /// ranges in flight count by their origin.
    fn free_parts(
        &self,
        volume: VolumeNr,
        (sector, size_bytes): Part,
        pick: impl Fn(Origin) -> bool,
    ) -> Vec<Part> {
        let device = self.devices.get(&volume);
        let in_flight = device.map(|d| d.io.ranges.overlaps(sector, size_bytes, pick));
        let mut taken = in_flight.unwrap_or_default();
        taken.extend(self.unsettled_writes(volume));
        taken.sort_unstable_by_key(|range| range.start);
        let end = sector.end_of(size_bytes).0;
        let mut free = Vec::new();
        let mut at = sector.0;
        for range in taken.into_iter().chain(core::iter::once(end..end)) {
            let until = range.start.min(end);
            if until > at {
                free.push((Sector(at), ((until - at) * Sector::SIZE) as u32));
            }
            at = at.max(range.end);
        }
        free
    }

    /// Where this node's writes, and those that it got, are not settled: who has them is not known.
    pub(super) fn unsettled_writes(&self, volume: VolumeNr) -> Vec<Range<u64>> {
        let own = self.io.log.iter().filter_map(|key| {
            let req = self.io.requests.get(*key)?;
            (req.volume == volume).then_some((req.sector, req.size_bytes))
        });
        let got = self.connections.values().flat_map(|conn| {
            let writes = conn.io.writes.iter().filter(|w| w.volume == volume);
            writes.map(|w| (w.sector, w.size_bytes))
        });
        own.chain(got)
            .map(|(sector, size_bytes)| sector.0..sector.end_of(size_bytes).0)
            .collect()
    }

    /// `P_PEERS_IN_SYNC`: these nodes and this one have identical data in the range.
    pub(crate) fn peers_in_sync(&mut self, peer: NodeId, volume: VolumeNr, sync: &PeersInSync) {
        if !self.is_within(volume, sync.sector, sync.size_bytes, DISCARD_LEN_MAX) {
            let text = format!(
                "in-sync range of {} bytes at {}",
                sync.size_bytes, sync.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        }
        // Something is being written: what the sender saw may be over.
        let part = (sync.sector, sync.size_bytes);
        let free = match planted!(self, InSyncWhileBusy) {
            true => alloc::vec![part],
            false => self.free_parts(volume, part, |_| true),
        };
        for part in free {
            self.part_in_sync(peer, volume, part, sync.mask);
        }
    }

    fn part_in_sync(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        (sector, size_bytes): Part,
        equal: NodeMask,
    ) {
        let lockstep = self.is_lockstep(peer);
        let sources = self.sources_of(volume);
        let changed_by_another = self.is_target_of_another(volume, peer);
        let known = self.is_known_to(volume, peer, sector, size_bytes);
        if lockstep && (changed_by_another || !known) {
            // The sender does not know this node's blocks.
            return;
        }
        let gone = self.without_disk(volume);
        let own = self.node_id;
        let verified = self.verified(volume);
        let unseen = |node: &NodeId| lockstep && self.changes_unseen(volume, *node, peer);
        let unseen: NodeMask = equal.iter().filter(unseen).collect();
        let (said, equal) = (equal, equal.difference(unseen));
        // What a verify found is settled by a resync only. And a node that this one is to be copied from
        // may itself have got newer blocks, which the sender has not heard of yet.
        let mask = equal.without(own).difference(verified);
        // Nor is anything said about the blocks of a disk that has gone since: it misses what is written.
        let mask = match lockstep {
            true => mask.difference(sources).difference(gone),
            false => mask,
        };
        let hides = planted!(self, WordHidesLaterMark);
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let marked = |node: NodeId| {
            let slot = io.slot(node);
            slot.is_some_and(|slot| io.bitmap.count_touched(slot, sector, size_bytes) > 0)
        };
        let careful = !hides && mask.iter().any(marked);
        if careful && self.may_be_late(volume, peer, sector, size_bytes) {
            return;
        }
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let mut known_by = Vec::new();
        for node in mask.iter() {
            if let Some(slot) = io.slot(node) {
                let blocks = io.bitmap.clear_range(slot, sector, size_bytes);
                known_by.push((node, blocks));
            }
        }
        let cleared = known_by.iter().any(|(_, blocks)| *blocks > 0);
        for (node, blocks) in known_by {
            self.no_longer_owed(volume, node, blocks);
        }
        if cleared {
            self.bits_cleared(volume);
        }
        // Whoever knows of another node in sync passes it on, also when the resync has ended
        // meanwhile: its last packet crosses the state change on the other stream. Without news
        // there is no answer, so two nodes do not answer each other for ever. What the sender knows is what it
        // said, also where that does not count here.
        let (known, cause) = match cleared {
            true => (NodeMask::EMPTY, Cause::Cleared(Some(peer))),
            false => (said.with(peer), Cause::Answers(peer)),
        };
        self.tell_in_sync(volume, &[(sector, size_bytes)], known, cause);
    }

    /// Two nodes are equal as far as the states say: marks between them go soon, or it is asked.
    pub(crate) fn watch_left_marks(&mut self, volume: VolumeNr) {
        let at = self.now + LEFT_MARKS_DELAY;
        self.timers.set_earliest(Timer::LeftMarks(volume), at);
    }

    /// A resync has ended. What is marked towards another source is settled by who was copied from: it is
    /// asked at once, and both compare only where that did not help.
    pub(crate) fn ask_soon(&mut self, volume: VolumeNr) {
        if self.connections.len() < 2 {
            return;
        }
        let (at, until) = (self.now + ENDED_DELAY, self.now + LEFT_MARKS_DELAY);
        if let Some(io) = self.disk_io(volume) {
            io.asks_only = true;
            io.asks_until = Some(until);
            self.timers.set_earliest(Timer::LeftMarks(volume), at);
        }
    }

    /// A neighbour has met a node that is not connected here: what is marked towards that one is asked for before
    /// it comes here, too, and all of it would be copied once more.
    pub(crate) fn ask_about_met(&mut self) {
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            let device = self.devices.get(&volume);
            let mut nodes = device.into_iter().flat_map(|d| d.peers.keys().copied());
            let apart = nodes.any(|node| {
                self.caught_up_apart(volume, node) && self.out_of_sync_blocks(volume, node) > 0
            });
            if !apart || self.connections.len() < 2 {
                continue;
            }
            let at = self.now + MET_DELAY;
            if let Some(io) = self.disk_io(volume) {
                io.asks_only = true;
                self.timers.set_earliest(Timer::LeftMarks(volume), at);
            }
        }
    }

    /// Both are whole and of one generation, a resync has just ended at this node, and another whole node
    /// can say whether what is marked between the two differs at all.
    pub(crate) fn is_asking(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let until = disk.and_then(|disk| disk.io.asks_until);
        let others = self.established_peers().without(peer);
        until.is_some_and(|until| self.now < until)
            && self.is_lockstep(peer)
            && self.both_are_whole(volume, peer)
            && self.same_current(volume, peer)
            && others
                .iter()
                .any(|other| self.both_are_whole(volume, other))
    }

    /// A node that is not connected here, and of which another one has told that it lacks nothing.
    fn caught_up_apart(&self, volume: VolumeNr, peer: NodeId) -> bool {
        self.state.conn(peer) < ConnState::Connected && self.slot_uuid(volume, peer).is_zero()
    }

    /// `Timer::LeftMarks`: the news of a node in sync is dropped wherever a write is on its way,
    /// and a mark between two nodes that were both copied from a third would stay for ever. So a
    /// node with marks towards an UpToDate peer says again who is in sync with it there; a third
    /// node that knows both of them as equal answers with that.
    pub(crate) fn left_marks_timer(&mut self, volume: VolumeNr) {
        let io = self.disk_io(volume);
        let asks_only = io.is_some_and(|io| core::mem::take(&mut io.asks_only));
        if self.state.disk(volume) != DiskState::UpToDate
            || self.connections.len() < 2
            || planted!(self, LeftMarksStay)
        {
            return;
        }
        self.tell_marks_gone(volume);
        // What a verify found is not asked about: who answers has not looked at the blocks, and a kernel believes it.
        let verified = self.verified(volume);
        let device = self.devices.get(&volume);
        let peers: Vec<NodeId> = device
            .into_iter()
            .flat_map(|d| d.peers.keys().copied())
            .filter(|peer| !verified.contains(*peer))
            .filter(|peer| {
                self.both_are_whole(volume, *peer) || self.caught_up_apart(volume, *peer)
            })
            .collect();
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let bits = io.bitmap.shape().bits();
        let mut extents = Vec::new();
        let mut left = false;
        for slot in peers.iter().filter_map(|peer| io.slot(*peer)) {
            left |= io.bitmap.count(slot) > 0;
            let mut next = io.left_marks_cursor;
            while let Some(bit) = io.bitmap.next_set(slot, next)
                && extents.len() < LEFT_MARKS_EXTENTS
            {
                let extent = Sector(bit * io.bitmap.shape().block().sectors()).al_extent();
                if !extents.contains(&extent) {
                    extents.push(extent);
                }
                next = io.bitmap.extent_bits(extent).end;
            }
        }
        if !left {
            self.compare_unsettled(volume);
            return;
        }
        // Extents that cannot be settled now do not keep the others from their turn.
        io.left_marks_cursor = match extents.iter().max() {
            Some(last) if extents.len() == LEFT_MARKS_EXTENTS => {
                io.bitmap.extent_bits(*last).end.min(bits)
            }
            _ => 0,
        };
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let parts: Vec<Part> = extents.iter().map(|e| whole_extent(*e, size)).collect();
        self.tell_in_sync(volume, &parts, NodeMask::EMPTY, Cause::Asked);
        self.watch_left_marks(volume);
        if !asks_only {
            self.compare_unsettled(volume);
        }
    }
}

fn whole_extent(extent: AlExtent, size_sectors: u64) -> Part {
    let first = extent.first_sector();
    let end = (first.0 + AlExtent::SIZE / Sector::SIZE).min(size_sectors);
    (first, (end.saturating_sub(first.0) * Sector::SIZE) as u32)
}

/// The extents that some ranges touch.
fn whole_extents(parts: &[Part], size_sectors: u64) -> Vec<Part> {
    let touched = parts
        .iter()
        .flat_map(|part| Extents::of(part.0, part.1).iter());
    let extents: BTreeSet<AlExtent> = touched.collect();
    let whole = |extent: &AlExtent| whole_extent(*extent, size_sectors);
    extents.iter().map(whole).collect()
}

/// Cuts ranges at the borders of extents.
fn by_extent(parts: &[Part], size_sectors: u64) -> Vec<(AlExtent, Part)> {
    let mut found = Vec::new();
    for (sector, size_bytes) in parts {
        for extent in Extents::of(*sector, *size_bytes).iter() {
            let (first, len) = whole_extent(extent, size_sectors);
            let start = first.max(*sector);
            let end = sector.end_of(*size_bytes).min(first.end_of(len));
            let sectors = end.0.saturating_sub(start.0);
            found.push((extent, (start, (sectors * Sector::SIZE) as u32)));
        }
    }
    found
}
