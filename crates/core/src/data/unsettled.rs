//! Marks that a resync with another node left behind.
//!
//! A node that is copied from one UpToDate node gives up its resync with the others, and marks what it
//! was given towards those that it had none with. If they are all equal, they tell each other so and
//! the marks go. If two of them differed themselves, by writes that were under way when their Primary
//! died, or if the source is gone, nobody can vouch for these blocks: the pair compares.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::mem;

use lockstep_format::units::{NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState, Role};

use crate::resource::Resource;
use crate::state::ReplSets;

/// How often a node asks about marks between it and an UpToDate peer before it compares.
const SETTLING_ROUNDS: u32 = 1;

/// The same while the node only serves a resync of another one, which may be able to tell when it is whole. It is not
/// where it was copied from one of the two.
const SERVING_ROUNDS: u32 = 10;

/// Peers that have become equal by their states alone, each with what was marked towards it last and
/// for how many rounds.
#[derive(Debug, Default)]
pub(crate) struct Unsettled {
    peers: BTreeMap<NodeId, Left>,
}

#[derive(Debug, Default)]
struct Left {
    blocks: u64,
    rounds: u32,
    /// Rounds of these in which a resync of another node was served.
    serving: u32,
    /// Primaries were asked for the acks of what they have written.
    flushed: bool,
}

impl Resource {
    /// This node and the peer are whole, and at least one of them by a resync with another node. That one
    /// may not have known of everything that is marked between the two.
    pub(crate) fn note_unsettled(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(io) = self.disk_io(volume) {
            io.unsettled.peers.insert(peer, Left::default());
        }
    }

    /// Peers towards which a verify has marked differences: an operator decides about these.
    pub(crate) fn verified(&self, volume: VolumeNr) -> NodeMask {
        self.devices.get(&volume).map_or(NodeMask::EMPTY, |d| {
            let found = d.peers.iter().filter(|(_, pd)| pd.io.verify.found);
            found.map(|(node, _)| *node).collect()
        })
    }

    /// The disk is whole, and all that goes on is that others are copied from it.
    fn serves_only(&self, volume: VolumeNr) -> bool {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let rests = disk.is_some_and(|disk| disk.resize.is_none()) && self.new_uuid.is_none();
        let serves = |repl: ReplState| {
            repl <= ReplState::Established || repl == ReplState::WfBitmapS || repl.is_sync_source()
        };
        let state = self.state.devices.get(&volume);
        rests
            && state.is_some_and(|d| {
                d.disk == DiskState::UpToDate && d.peers.values().all(|p| serves(p.repl))
            })
    }

    /// `Timer::LeftMarks`: where a while has settled none of the marks towards such a peer, both
    /// compare.
    pub(crate) fn compare_unsettled(&mut self, volume: VolumeNr) {
        let verified = self.verified(volume);
        let writes = self.unsettled_writes(volume);
        // Who is being resynced may be the one that can tell, when it is whole.
        let busy = self.is_busy(volume) && !planted!(self, BusyCompared);
        let serves = busy && self.serves_only(volume) && !planted!(self, ServingWaits);
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let mut all = mem::take(&mut io.unsettled.peers);
        let mut due = Vec::new();
        let mut flushes = false;
        all.retain(|peer, left| {
            let blocks = io.slot(*peer).map_or(0, |slot| io.bitmap.count(slot));
            // Nobody says anything about a block that is being written; the write settles it.
            let written = |slot| writes.iter().map(move |w| (slot, w));
            let written: u64 = (io.slot(*peer).into_iter().flat_map(written))
                .map(|(slot, w)| {
                    let size_bytes = ((w.end - w.start) * Sector::SIZE) as u32;
                    io.bitmap.count_touched(slot, Sector(w.start), size_bytes)
                })
                .sum();
            let same = left.blocks == blocks && written < blocks;
            left.serving = match same && serves {
                true => left.serving + 1,
                false => 0,
            };
            left.rounds = match same && (!busy || left.serving >= SERVING_ROUNDS) {
                true => left.rounds + 1,
                false => 0,
            };
            left.blocks = blocks;
            let marked = blocks > 0 && !verified.contains(*peer);
            if marked && left.rounds >= SETTLING_ROUNDS {
                left.rounds = 0;
                if mem::replace(&mut left.flushed, true) {
                    due.push(*peer);
                } else {
                    flushes = true;
                }
            }
            marked
        });
        io.unsettled.peers = all;
        if flushes {
            // A busy Primary acks late, and until then nobody vouches for what it wrote.
            self.flush_peer_acks();
        }
        for peer in due {
            if self.is_busy(volume) && !self.serves_only(volume) {
                return;
            }
            // A Primary's generation is on its way to that one as well.
            let mut peers = self.connections.keys();
            let follows = self.is_shared()
                || peers.any(|n| self.peer_role(*n) == Role::Primary)
                    && !planted!(self, SettledWhileFollowing);
            if follows && self.may_follow_yet(volume, peer) {
                self.watch_left_marks(volume);
                continue;
            }
            if let Some(io) = self.disk_io(volume) {
                io.unsettled.peers.remove(&peer);
            }
            let p = self.state.peer_device(volume, peer);
            let equal = p.repl == ReplState::Established && p.disk == DiskState::UpToDate;
            if equal && self.is_lockstep(peer) {
                self.tell_and_compare(volume, peer);
            }
        }
    }
}
