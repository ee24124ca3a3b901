//! Marks that a resync with another node left behind.
//!
//! A node that is copied from one UpToDate node gives up its resync with the others. If they are all
//! equal, they tell each other so and the marks go. If two of them differed themselves, by writes that
//! were under way when their Primary died, nobody can vouch for these blocks: the pair compares.

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState};

use crate::resource::Resource;

/// How often a node asks about marks between it and an UpToDate peer before it compares.
const SETTLING_ROUNDS: u32 = 3;

/// Peers with which a resync was given up, and what is marked towards them.
#[derive(Debug, Default)]
pub(crate) struct Unsettled {
    peers: NodeMask,
    blocks: u64,
    rounds: u32,
}

impl Resource {
    /// Another node was the source of a resync, and this one with the peer was given up. The other may
    /// not have known of everything that is marked towards the peer.
    pub(crate) fn note_unsettled(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(io) = self.disk_io(volume) {
            io.unsettled.peers = io.unsettled.peers.with(peer);
            io.unsettled.rounds = 0;
        }
    }

    /// `Timer::LeftMarks`: where a while has settled none of the marks towards such a peer, both
    /// compare.
    pub(crate) fn compare_unsettled(&mut self, volume: VolumeNr) {
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let count = |peer: NodeId| io.slot(peer).map_or(0, |slot| io.bitmap.count(slot));
        let marked: NodeMask = io
            .unsettled
            .peers
            .iter()
            .filter(|p| count(*p) > 0)
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
