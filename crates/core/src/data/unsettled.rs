//! Marks that a resync with another node left behind.
//!
//! A node that is copied from one UpToDate node gives up its resync with the others, and marks what it
//! was given towards those that it had none with. If they are all equal, they tell each other so and
//! the marks go. If two of them differed themselves, by writes that were under way when their Primary
//! died, or if the source is gone, nobody can vouch for these blocks: the pair compares.

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState};

use crate::resource::Resource;

/// How often a node asks about marks between it and an UpToDate peer before it compares.
const SETTLING_ROUNDS: u32 = 1;

/// Peers that have become equal by their states alone, and what is marked towards them.
#[derive(Debug, Default)]
pub(crate) struct Unsettled {
    peers: NodeMask,
    blocks: u64,
    rounds: u32,
}

impl Resource {
    /// This node and the peer are whole, and at least one of them by a resync with another node. That one
    /// may not have known of everything that is marked between the two.
    pub(crate) fn note_unsettled(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(io) = self.disk_io(volume) {
            io.unsettled.peers = io.unsettled.peers.with(peer);
            io.unsettled.rounds = 0;
        }
    }

    /// Peers towards which a verify has marked differences: an operator decides about these.
    pub(crate) fn verified(&self, volume: VolumeNr) -> NodeMask {
        self.devices.get(&volume).map_or(NodeMask::EMPTY, |d| {
            let found = d.peers.iter().filter(|(_, pd)| pd.io.verify.found);
            found.map(|(node, _)| *node).collect()
        })
    }

    /// `Timer::LeftMarks`: where a while has settled none of the marks towards such a peer, both
    /// compare.
    pub(crate) fn compare_unsettled(&mut self, volume: VolumeNr) {
        let verified = self.verified(volume);
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let count = |peer: NodeId| io.slot(peer).map_or(0, |slot| io.bitmap.count(slot));
        let marked: NodeMask = io
            .unsettled
            .peers
            .iter()
            .filter(|p| count(*p) > 0 && !verified.contains(*p))
            .collect();
        let blocks = marked.iter().map(count).sum();
        io.unsettled.peers = marked;
        io.unsettled.rounds = match io.unsettled.blocks == blocks {
            true => io.unsettled.rounds + 1,
            false => 0,
        };
        io.unsettled.blocks = blocks;
        if marked.is_empty() || io.unsettled.rounds < SETTLING_ROUNDS || self.is_busy(volume) {
            return;
        }
        for peer in marked.iter() {
            if let Some(io) = self.disk_io(volume) {
                io.unsettled.peers = io.unsettled.peers.without(peer);
            }
            let p = self.state.peer_device(volume, peer);
            let equal = p.repl == ReplState::Established && p.disk == DiskState::UpToDate;
            if equal && self.is_lockstep(peer) && !self.is_busy(volume) {
                self.tell_and_compare(volume, peer);
            }
        }
    }
}
