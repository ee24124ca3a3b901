//! Marks towards third nodes that are away, before a resync begins.
//!
//! What a target is given replaces blocks that such a node may have as they were. If this node
//! loses its power, and the source is gone for good, only its own marks can tell the third one;
//! so they are durable before the first block is written, not only before the source may forget
//! it. A third node that is connected hears of the resync itself, and gets its marks with the data; for it
//! the marks towards the source are durable, from which an attach after a crash makes them. What the source
//! marks while the resync runs is durable, too, before it is asked for.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState, UuidFlags};

use crate::data::BitmapThen;
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::timers::Timer;

impl Resource {
    /// Marks what a resync from `peer` will copy towards whoever is away; requests wait until
    /// that is durable, and with it what is marked towards the source.
    pub(super) fn mark_third_nodes(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let thirds: Vec<NodeId> = device
            .peers
            .keys()
            .copied()
            .filter(|n| *n != peer)
            .collect();
        let away = |node: &NodeId| {
            self.state.conn(*node) != ConnState::Connected && !planted!(self, AwayNotMarkedBefore)
        };
        let away: Vec<NodeId> = thirds.iter().copied().filter(away).collect();
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let Some(from) = io.slot(peer) else {
            return;
        };
        let known = thirds.iter().any(|node| io.slot(*node).is_some());
        if !known || io.bitmap.count(from) == 0 {
            return;
        }
        let slots: Vec<u8> = away.iter().filter_map(|node| io.slot(*node)).collect();
        for slot in slots {
            io.bitmap.merge_slot(from, slot);
        }
        let early = planted!(self, StartNotHeld);
        if let Some(sync) = self.target(volume, peer).filter(|_| !early) {
            sync.held += 1;
        }
        self.write_bitmap(volume, BitmapThen::Started(peer));
    }

    /// The source has marked blocks while the resync runs: as at its start, none of them is replaced before the mark is
    /// durable.
    pub(crate) fn hold_for_new_marks(&mut self, volume: VolumeNr, peer: NodeId) {
        let device = self.devices.get(&volume);
        let third = device.and_then(|d| d.attached()).is_some_and(|disk| {
            let mut others = self.connections.keys().filter(|node| **node != peer);
            others.any(|node| disk.io.slot(*node).is_some())
        });
        if !third || planted!(self, NewMarksNotAwaited) {
            return;
        }
        let Some(sync) = self.target(volume, peer).filter(|sync| !sync.over) else {
            return;
        };
        sync.held += 1;
        self.write_bitmap(volume, BitmapThen::Started(peer));
    }

    /// Marks towards third nodes are durable: requests may be sent.
    pub(crate) fn third_nodes_marked(&mut self, volume: VolumeNr, peer: NodeId) {
        let now = self.now;
        if let Some(sync) = self.target(volume, peer) {
            sync.held = sync.held.saturating_sub(1);
            if sync.held == 0 && !sync.over {
                self.timers.set(Timer::ResyncStep(volume, peer), now);
            }
        }
    }

    /// Marks towards the peer tell all that differs. A node that is behind, or that resyncs with
    /// somebody else, differs where nothing is marked here. So does one that resynced with somebody
    /// else before: what it was given is marked at its end alone, until it says that nothing is left.
    pub(crate) fn vouches_for(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let p = self.state.peer_device(volume, peer);
        let marked_there = self
            .peer_uuids(volume, peer)
            .is_some_and(|set| set.dirty_bits > 0);
        let known = !marked_there || !self.is_lockstep(peer);
        let careless = planted!(self, VouchesForAnybody) && p.repl == ReplState::Established;
        // The target of a resync that is paused is copied from another node meanwhile.
        let syncs = p.repl.is_sync() && p.repl != ReplState::PausedSyncS;
        let doubtful = self.may_be_lost_there(peer) && !planted!(self, VouchesForTheLost);
        let doubtful = doubtful || self.is_in_doubt(peer);
        !doubtful && ((self.both_are_whole(volume, peer) && known) || syncs) || careless
    }

    /// Whoever says that others are in sync with it has seen this node's blocks in the range: they did
    /// not change by a resync with a third node.
    pub(crate) fn is_known_to(
        &self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) -> bool {
        let p = self.state.peer_device(volume, peer);
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let marked = disk.map(|disk| &disk.io).is_some_and(|io| {
            let slot = io.slot(peer);
            slot.is_some_and(|slot| io.bitmap.count_touched(slot, sector, size_bytes) > 0)
        });
        let compared = p.repl.is_sync() || self.was_copied(volume, peer);
        (self.both_are_whole(volume, peer) || compared) && !marked
    }

    /// One of the two was copied from the other one, to the end, on this connection, but is not whole by
    /// it because its source was not stable. What is said of the last blocks comes behind that end, and
    /// without it whoever copies the target next would send them once more.
    pub(crate) fn was_copied(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let p = self.state.peer_device(volume, peer);
        let device = self.devices.get(&volume);
        let pd = device.and_then(|d| d.peers.get(&peer));
        let (good, copied) = (DiskState::UpToDate, DiskState::Inconsistent);
        let disks = (self.state.disk(volume), p.disk);
        p.repl == ReplState::Established
            && [(good, copied), (copied, good)].contains(&disks)
            && pd.is_some_and(|pd| pd.was_copied)
    }

    /// Connected nodes whose disk is away.
    pub(crate) fn without_disk(&self, volume: VolumeNr) -> NodeMask {
        let peers = self.established();
        let mut gone = NodeMask::EMPTY;
        for peer in peers {
            let disk = self.state.peer_device(volume, peer).disk;
            if disk < DiskState::Inconsistent {
                gone.insert(peer);
            }
        }
        gone
    }

    pub(crate) fn both_are_whole(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let p = self.state.peer_device(volume, peer);
        p.repl == ReplState::Established
            && p.disk == DiskState::UpToDate
            && self.state.disk(volume) == DiskState::UpToDate
    }

    /// The peer has UUIDs of this node by which so many blocks are marked towards it.
    pub(crate) fn note_told_marks(&mut self, volume: VolumeNr, peer: NodeId, blocks: u64) {
        if let Some(io) = self.peer_io(volume, peer) {
            io.told_marks = blocks > 0;
        }
        if blocks > 0 && self.connections.len() > 1 {
            self.watch_left_marks(volume);
        }
    }

    /// Peers that were told of marks towards them hear when none is left: they may vouch for this node
    /// again.
    pub(crate) fn tell_marks_gone(&mut self, volume: VolumeNr) {
        for peer in self.established() {
            let gone = self.is_lockstep(peer)
                && self.both_are_whole(volume, peer)
                && self.out_of_sync_blocks(volume, peer) == 0;
            let told = |io: &mut crate::data::PeerIo| core::mem::take(&mut io.told_marks);
            if gone && self.peer_io(volume, peer).is_some_and(told) {
                self.send_uuids(peer, volume, UuidFlags::empty());
            }
        }
    }
}
