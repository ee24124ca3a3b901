//! Neighbours that may have lost the connection while this node has not noticed (semantics.md, 19.7).
//!
//! A node that loses its power comes back with less than others know of it. Whoever is still connected with its former life
//! takes it for what it was, until a ping is not answered, and would vouch for it to nodes that have met it meanwhile. They
//! meet anew by a cluster-wide change, so from the moment in which a node hears of one, it says nothing of a neighbour that
//! this may be about, before that one has answered a ping. What it would have said is held until then.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};

use super::in_sync::{Cause, Part};
use crate::resource::Resource;

/// Most ranges that are held; the rest is asked about later.
const HELD_PARTS: usize = 1024;

/// Whether a neighbour has answered since nodes met anew.
#[derive(Debug, Default)]
pub(crate) struct Doubt {
    stage: Stage,
    /// What was to be said, and why.
    held: Vec<(VolumeNr, Part, Cause)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Answered,
    /// A ping was under way already, whose answer may be older.
    PingWanted,
    Pinged,
}

impl Doubt {
    /// It has not answered yet, or something is held.
    pub(crate) fn is_open(&self) -> bool {
        self.stage != Stage::Answered || !self.held.is_empty()
    }
}

impl Resource {
    /// Two nodes meet anew. One of them may be a neighbour in another life; a node that meets another one itself does
    /// not know whom that one has met before.
    pub(crate) fn doubt_who_meets(&mut self, initiator: NodeId, target: Option<NodeId>) {
        let me = self.node_id;
        let ends = NodeMask::of(initiator).union(target.map_or(NodeMask::EMPTY, NodeMask::of));
        let peers = self.established_peers();
        let doubtful = match ends.contains(me) {
            true => peers.difference(ends),
            false => peers.intersection(ends),
        };
        for peer in doubtful.iter() {
            let link = self.connections.get_mut(&peer);
            if let Some(link) = link.and_then(|c| c.link.as_mut()) {
                link.doubt.stage = Stage::PingWanted;
            }
            self.ping_in_doubt(peer);
        }
    }

    /// Nothing is said of this neighbour for now.
    pub(crate) fn is_in_doubt(&self, peer: NodeId) -> bool {
        let link = self.connections.get(&peer).and_then(|c| c.link.as_ref());
        let unasked = link.is_some_and(|link| link.doubt.stage != Stage::Answered);
        unasked && !planted!(self, VouchesUnasked)
    }

    /// What would be said of a range, were it not for that.
    pub(super) fn hold_word(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        (sector, size_bytes): Part,
        cause: Cause,
    ) {
        let link = self.connections.get_mut(&peer);
        let Some(link) = link.and_then(|c| c.link.as_mut()) else {
            return;
        };
        let held = &mut link.doubt.held;
        let word = (volume, (sector, size_bytes), cause);
        if held.contains(&word) {
            return;
        }
        if held.len() >= HELD_PARTS {
            self.watch_left_marks(volume);
            return;
        }
        held.push(word);
    }

    /// The peer has answered a ping.
    pub(crate) fn doubt_answered(&mut self, peer: NodeId) {
        let link = self.connections.get_mut(&peer);
        let Some(link) = link.and_then(|c| c.link.as_mut()) else {
            return;
        };
        match link.doubt.stage {
            Stage::Answered => {}
            Stage::PingWanted => self.ping_in_doubt(peer),
            Stage::Pinged => {
                let doubt = core::mem::take(&mut link.doubt);
                for (volume, part, cause) in doubt.held {
                    if planted!(self, DoubtsForgotten) {
                        continue;
                    }
                    self.tell_in_sync(volume, &[part], NodeMask::EMPTY, cause);
                }
            }
        }
    }

    fn ping_in_doubt(&mut self, peer: NodeId) {
        let link = self.connections.get_mut(&peer);
        let Some(link) = link.and_then(|c| c.link.as_mut()) else {
            return;
        };
        if link.doubt.stage == Stage::PingWanted && !link.ping_outstanding {
            link.doubt.stage = Stage::Pinged;
            self.ping(peer);
        }
    }
}
