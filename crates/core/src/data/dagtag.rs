//! Who hears how far this node's writes have come: dagtags beside the writes that carry them
//! (semantics.md, 5.1). And who waits here for writes of a third node.
//!
//! A dagtag counts the writes of one life of a node. A peer that has not noticed that the node died
//! asks for blocks after a dagtag of the life before; if the node is back here already, that may
//! come late or never, and no link breaks that would end the waiting. Nothing on the wire tells one
//! life from another. So a wait ends when the node's writes do not come any nearer, and after a
//! minute in any case: the peer asks again, with what it knows of the node then.

use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, Sector, VolumeNr};
use lockstep_format::wire::Packet;

use crate::event::Stream;
use crate::resource::Resource;
use crate::time::{Duration, Instant};
use crate::timers::Timer;

/// Longest time that anything waits for a node from which no write comes.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest time that it waits at all.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// A write of a third node that has to be here before a block is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    pub(super) node: NodeId,
    pub(super) dagtag: Dagtag,
    since: Instant,
}

impl Awaited {
    /// It is here, if the node's writes have come as far as this.
    pub(super) fn is_met(&self, reached: Dagtag) -> bool {
        !self.dagtag.is_newer_than(reached)
    }

    pub(super) fn is_too_old(&self, now: Instant) -> bool {
        now - self.since >= LONGEST_WAIT
    }
}

impl Resource {
    /// A peer that gets writes from now on hears how far they have come, even if none follows:
    /// others wait for what was written before (semantics.md, 5.1 point 1), and a kernel also before it answers
    /// this node's own requests of a verify or a resync. Without earlier writes nobody does, and the first
    /// write says it. Writes that were parked are sent again, or given up, soon: until then the peer has only
    /// what was before them.
    pub(crate) fn send_dagtag(&mut self, peer: NodeId) {
        let dagtag = self.before_parked().unwrap_or(self.io.dagtag);
        if dagtag == Dagtag(0) || !self.is_established(peer) || self.is_legacy(peer) {
            return;
        }
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        if conn.io.mirror.is_none() {
            conn.io.mirror = Some(dagtag);
            self.send(peer, Stream::Data, VolumeNr::NONE, Packet::Dagtag(dagtag));
        }
    }

    /// Where the first write begins that is parked.
    fn before_parked(&self) -> Option<Dagtag> {
        if self.io.parked == 0 || planted!(self, ParkedCountAsSent) {
            return None;
        }
        let log = self
            .io
            .log
            .iter()
            .filter_map(|key| self.io.requests.get(*key));
        let first = log.into_iter().find(|req| !req.parked.is_empty())?;
        let sectors = u64::from(first.size_bytes) / Sector::SIZE;
        Some(Dagtag(first.dagtag.0.wrapping_sub(sectors)))
    }

    /// Nothing is parked any more: who was told of less, and did not get the last write, hears the rest.
    pub(super) fn tell_after_parked(&mut self) {
        if self.io.parked > 0 {
            return;
        }
        let told = |io: &super::ConnIo| io.mirror.is_some_and(|told| told != self.io.dagtag);
        let peers = self.connections.iter();
        let behind: Vec<NodeId> = peers
            .filter(|(_, conn)| told(&conn.io))
            .map(|(peer, _)| *peer)
            .collect();
        for peer in behind {
            self.tell_dagtag_to(peer);
        }
    }

    /// This node's dagtag has jumped: all who get its writes hear that at once. Otherwise a peer
    /// that hears of it elsewhere would wait here for a write that may never come.
    pub(crate) fn tell_dagtag(&mut self) {
        let peers: Vec<NodeId> = self.connections.keys().copied().collect();
        for peer in peers {
            self.tell_dagtag_to(peer);
        }
    }

    fn tell_dagtag_to(&mut self, peer: NodeId) {
        let mut devices = self.state.devices.values();
        if !devices.any(|d| d.peers.get(&peer).is_some_and(|p| p.replicates())) {
            return;
        }
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.mirror = None;
        }
        self.send_dagtag(peer);
    }

    /// Nothing is read later because of this dagtag. A node of this project asks for nothing that a write of its own
    /// overlaps which is under way, and what it wrote before comes here first. A kernel counts a write before it
    /// sends it, may ask for the same block in between, and puts what it gets over its own write then.
    pub(super) fn is_here_already(&self, peer: NodeId, (node, dagtag): (NodeId, Dagtag)) -> bool {
        let own = node == peer && !self.is_kernel(peer);
        dagtag == Dagtag(0) || node == self.node_id || own
    }

    /// Something waits from now on for a write of a node.
    pub(super) fn await_write(&mut self, node: NodeId, dagtag: Dagtag) -> Awaited {
        let since = self.now;
        let timer = Timer::WriteAwaited(node);
        self.timers.set_earliest(timer, since + PATIENCE);
        Awaited {
            node,
            dagtag,
            since,
        }
    }

    /// Writes of a node came in.
    pub(super) fn dagtag_progress(&mut self, node: NodeId) {
        let sources_wait = self.source_dagtag_progress(node);
        let verifies_wait = self.verify_dagtag_progress(node);
        let timer = Timer::WriteAwaited(node);
        if sources_wait || verifies_wait {
            self.timers.set(timer, self.now + PATIENCE);
        } else {
            self.timers.clear(timer);
        }
    }

    /// The link to a node is lost, or, `Timer::WriteAwaited`, its writes do not come any nearer:
    /// nobody can wait for them.
    pub(crate) fn dagtag_lost(&mut self, node: NodeId) {
        self.timers.clear(Timer::WriteAwaited(node));
        if planted!(self, LostDagtagAwaited) {
            return;
        }
        self.source_dagtag_lost(node);
        self.verify_dagtag_lost(node);
    }

    /// A peer begins to get writes: what it was told of the dagtag may be of before.
    pub(crate) fn replication_started(&mut self, peer: NodeId) {
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.mirror = None;
        }
        self.io.parked_due = true;
    }
}
