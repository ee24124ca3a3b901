//! Words about who is in sync that are older than a mark (semantics.md, 19.7).
//!
//! `P_PEERS_IN_SYNC` says what its sender knew. A line may hold it up while a write is made that a third node lacks: the
//! Primary's peer ack, which comes on another connection, marks that node here, and then the old word would
//! clear the mark. The sender had got the write before the Primary acknowledged it, so what it says later is right.
//! Extents that were marked by peer acks are noted for each neighbour, therefore, and a word about one of them
//! counts only if a ping after the mark was answered before. Who is in sync is asked again by then. A kernel does not
//! answer that, so it gets the ping with the mark and not with the word.

use alloc::collections::BTreeSet;

use lockstep_format::units::{AlExtent, NodeId, NodeMask, Sector, VolumeNr};

use crate::al::Extents;
use crate::resource::Resource;

/// Most extents that are noted; with more of them no word counts.
const LATE_EXTENTS: usize = 256;

/// Extents with marks that are newer than what the peer may still say.
#[derive(Debug, Default)]
pub(crate) struct LateMarks {
    /// No ping was sent since.
    noted: BTreeSet<AlExtent>,
    /// A ping was sent since and is not answered.
    pinged: BTreeSet<AlExtent>,
    /// Another ping is due: a word came about noted ones, or the peer is a kernel.
    wanted: bool,
}

impl LateMarks {
    fn has(&self, extents: Extents) -> bool {
        let full = |set: &BTreeSet<AlExtent>| set.len() >= LATE_EXTENTS;
        let any = |set: &BTreeSet<AlExtent>| {
            full(set) || extents.iter().any(|extent| set.contains(&extent))
        };
        any(&self.noted) || any(&self.pinged)
    }
}

impl Resource {
    /// A peer ack said that of these nodes all have a write of `sender`; others are marked.
    pub(crate) fn note_late_marks(
        &mut self,
        volume: VolumeNr,
        sender: NodeId,
        have: NodeMask,
        (sector, size_bytes): (Sector, u32),
    ) {
        let witnesses = have.without(self.node_id).without(sender);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        if device
            .peers
            .keys()
            .all(|peer| have.with(sender).contains(*peer))
        {
            return;
        }
        for peer in witnesses.iter() {
            let Some(pd) = device.peers.get_mut(&peer) else {
                continue;
            };
            for extent in Extents::of(sector, size_bytes).iter() {
                if pd.io.late_marks.noted.len() < LATE_EXTENTS {
                    pd.io.late_marks.noted.insert(extent);
                }
            }
        }
        // A kernel says it once, so what it says from now on shall count soon.
        for peer in witnesses.iter() {
            if !self.is_kernel(peer) {
                continue;
            }
            if let Some(io) = self.peer_io(volume, peer) {
                io.late_marks.wanted = true;
            }
            self.ping_about_late_marks(peer);
        }
    }

    /// What `peer` says of the range may be older than marks there; it is asked again when it cannot be any more.
    pub(crate) fn may_be_late(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) -> bool {
        let fresh = planted!(self, LateWordsCount);
        let late = self.peer_io(volume, peer).map(|io| &mut io.late_marks);
        let Some(late) = late.filter(|late| late.has(Extents::of(sector, size_bytes)) && !fresh)
        else {
            return false;
        };
        late.wanted = true;
        self.ping_about_late_marks(peer);
        self.watch_left_marks(volume);
        true
    }

    /// The answer to a ping is behind all that the peer had said before it got the ping.
    pub(crate) fn late_marks_answered(&mut self, peer: NodeId) {
        let forgets = planted!(self, LateMarksForgotten);
        for device in self.devices.values_mut() {
            if let Some(pd) = device.peers.get_mut(&peer) {
                pd.io.late_marks.pinged.clear();
                if forgets {
                    pd.io.late_marks.noted.clear();
                }
            }
        }
        self.ping_about_late_marks(peer);
    }

    /// Sends a ping for what a word came about, unless one is under way that may be older.
    fn ping_about_late_marks(&mut self, peer: NodeId) {
        let link = self.connections.get(&peer).and_then(|c| c.link.as_ref());
        if link.is_none_or(|link| link.ping_outstanding) {
            return;
        }
        let mut wanted = false;
        for device in self.devices.values_mut() {
            if let Some(pd) = device.peers.get_mut(&peer) {
                let late = &mut pd.io.late_marks;
                if core::mem::take(&mut late.wanted) {
                    wanted = true;
                    late.pinged = core::mem::take(&mut late.noted);
                }
            }
        }
        if wanted {
            self.ping(peer);
        }
    }
}
