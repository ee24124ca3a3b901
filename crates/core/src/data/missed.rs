//! Where writes missed a node, and what third nodes say of such places.
//!
//! `P_PEERS_IN_SYNC` says that two nodes are equal in a range. It travels on another connection than
//! the writes and their marks, so it may be older than a mark that is there already, and must not
//! clear that. While all writes go everywhere this is rare, because the activity log holds the range
//! until each node has its writes; a node that is told of writes by marks (semantics.md, 19.3) misses
//! every one. So both the node and its peers remember where that happened, and believe nobody there
//! until its disk is UpToDate: then it has all of that, and what is left of the marks is asked for.

use alloc::vec::Vec;

use lockstep_format::units::{AlExtent, NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState, Role};

use crate::al::Extents;
use crate::resource::Resource;
use crate::state::ReplSets;

/// A set of extents; one bit for each, up to the last one that was put in.
#[derive(Debug, Default)]
pub(crate) struct Missed {
    words: Vec<u64>,
}

impl Missed {
    fn insert(&mut self, extent: AlExtent) {
        let (word, bit) = place(extent);
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << bit;
    }

    fn contains(&self, extent: AlExtent) -> bool {
        let (word, bit) = place(extent);
        self.words.get(word).is_some_and(|w| w >> bit & 1 == 1)
    }

    pub(crate) fn clear(&mut self) {
        self.words = Vec::new();
    }
}

impl Resource {
    /// A write is settled that only `have` and perhaps this node have.
    pub(super) fn note_missed(
        &mut self,
        volume: VolumeNr,
        have: NodeMask,
        sector: Sector,
        size_bytes: u32,
    ) {
        if self.connections.len() < 2 {
            // There is no third node that could say anything.
            return;
        }
        let (state, Some(device)) = (&self.state, self.devices.get_mut(&volume)) else {
            return;
        };
        for (node, pd) in &mut device.peers {
            if have.contains(*node) || state.peer_device(volume, *node).disk == DiskState::UpToDate
            {
                continue;
            }
            for extent in Extents::of(sector, size_bytes).iter() {
                pd.io.missed.insert(extent);
            }
        }
    }

    /// A peer has marked a range. If that is a write that this node misses, every other source of a
    /// resync has it, or will know that it does not: whoever this node is copied from next has to be
    /// asked for it. What a source merely passes on concerns that source alone, or the marks would
    /// go round among nodes that copy from each other.
    pub(super) fn mark_of_missed_write(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) {
        if self.connections.len() < 2 || self.state.disk(volume) == DiskState::UpToDate {
            return;
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        for extent in Extents::of(sector, size_bytes).iter() {
            device.io.missed.insert(extent);
        }
        let repl = self.state.peer_device(volume, peer).repl;
        let passed_on = repl.is_sync_target() || repl == ReplState::WfBitmapT;
        if passed_on && !device.io.writers.contains(peer) {
            return;
        }
        let others: Vec<NodeId> = device.peers.keys().copied().collect();
        if let Some(io) = self.disk_io(volume) {
            io.mark_replaced(peer, sector, size_bytes);
        }
        for other in others.into_iter().filter(|other| *other != peer) {
            self.target_marked_again(volume, other, sector, size_bytes);
            self.target_kick(volume, other);
        }
    }

    /// The peer writes, or did, while this node is told of writes by marks.
    pub(crate) fn note_writer(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(device) = self.devices.get_mut(&volume) {
            device.io.writers.insert(peer);
        }
    }

    /// All marks of a node that writes no more are here.
    pub(super) fn forget_writer(&mut self, peer: NodeId) {
        let role = self.state.connections.get(&peer).map(|c| c.peer_role);
        if role == Some(Role::Primary) {
            return;
        }
        for device in self.devices.values_mut() {
            device.io.writers.remove(peer);
        }
    }

    /// Those of the nodes that a third node's word is believed about.
    pub(super) fn not_missed(
        &self,
        volume: VolumeNr,
        nodes: NodeMask,
        extents: &[AlExtent],
    ) -> NodeMask {
        let Some(device) = self.devices.get(&volume) else {
            return NodeMask::EMPTY;
        };
        let missed = |missed: &Missed| extents.iter().any(|extent| missed.contains(*extent));
        if missed(&device.io.missed) {
            return NodeMask::EMPTY;
        }
        nodes
            .iter()
            .filter(|node| {
                device
                    .peers
                    .get(node)
                    .is_none_or(|pd| !missed(&pd.io.missed))
            })
            .collect()
    }

    /// The peer is told of writes by marks, or may be.
    pub(super) fn misses_writes(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        self.state.peer_device(volume, peer).disk != DiskState::UpToDate
            && device
                .and_then(|d| d.peers.get(&peer))
                .is_some_and(|pd| !pd.replicates_to_target)
    }

    /// This node is told of writes by marks, or may be.
    pub(super) fn is_told_marks(&self, volume: VolumeNr) -> bool {
        self.state.disk(volume) != DiskState::UpToDate
            && self
                .devices
                .get(&volume)
                .is_some_and(|d| d.peers.values().any(|pd| pd.asked_marks))
    }
}

fn place(extent: AlExtent) -> (usize, u32) {
    (extent.0 as usize / 64, extent.0 % 64)
}
