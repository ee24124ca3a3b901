//! Two Primaries: where they are allowed, and what that means for their generations
//! (semantics.md, 7.1). What becomes of their writes is in `data/conflict.rs`.

use alloc::format;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{Role, UuidFlags};

use crate::command::ErrorCode;
use crate::device::PeerDevice;
use crate::resource::Resource;
use crate::twopc::Transaction;
use crate::uuid_spread::SpreadStep;
use crate::validity::Refusal;

impl Resource {
    /// Both ends of the connection may write.
    pub(crate) fn both_may_write(&self, peer: NodeId) -> bool {
        self.connections
            .get(&peer)
            .is_some_and(|c| c.net.allow_two_primaries)
    }

    /// Some connection lets both its ends write.
    pub(crate) fn is_shared(&self) -> bool {
        self.connections.values().any(|c| c.net.allow_two_primaries)
    }

    /// This node and the peer may be Primary at the same time. A third disk would have to put the
    /// writes of both into one order, which is not done, and a peer of 8.3 knows no retried writes.
    pub(crate) fn may_both_be_primary(&self, peer: NodeId) -> bool {
        let old = |conn: &crate::connection::Connection| crate::legacy::is_old(conn.protocol());
        let mut others = self.connections.keys().filter(|other| **other != peer);
        self.both_may_write(peer)
            && others.all(|other| self.is_client(*other))
            && !self.connections.get(&peer).is_some_and(old)
    }

    /// After the connect the Primaries are neighbours of each other, and this node, if it is one, may
    /// be one beside them (semantics.md, 10.5).
    pub(crate) fn primaries_meet(&self, t: &Transaction) -> bool {
        let beside = |peer| self.may_both_be_primary(peer);
        let others = t.primary_nodes.without(self.node_id);
        let apart = t.primary_nodes.intersection(t.weak_nodes);
        let allowed = self.state.role != Role::Primary || others.iter().all(beside);
        allowed && apart.is_empty()
    }

    /// A node that was added while two are Primary, and may have a disk, has to wait.
    pub(crate) fn third_disk(&self, peer: NodeId) -> Result<(), Refusal> {
        let another = |n: &NodeId| *n != peer && self.peer_role(*n) == Role::Primary;
        let both = self.state.role == Role::Primary && self.connections.keys().any(another);
        if both && !self.is_client(peer) {
            return Err(Refusal {
                code: ErrorCode::TWO_PRIMARIES,
                text: format!("two nodes are Primary, and node {peer} may have a disk as well"),
            });
        }
        Ok(())
    }

    /// The configuration gives the peer no bitmap, so it never has a disk.
    pub(crate) fn is_client(&self, peer: NodeId) -> bool {
        let mut devices = self.devices.values();
        devices.all(|d| d.peers.get(&peer).is_some_and(|pd| !pd.options.bitmap))
    }

    /// A peer is Primary as well, or may be: it may go on without this node, whose disk is not
    /// whole, before that is noticed here.
    pub(crate) fn others_may_write(&self) -> bool {
        let peers = self.connections.keys().copied();
        peers
            .filter(|peer| self.both_may_write(*peer))
            .any(|peer| self.peer_role(peer) != Role::Secondary)
    }

    /// A generation that this Primary has planned comes before one that a Lockstep peer, Primary
    /// as well, plans at the same time.
    pub(crate) fn precedes(&self, peer: NodeId, volume: VolumeNr) -> bool {
        let told = self.new_uuid.as_ref().is_some_and(|new| {
            new.step != SpreadStep::Pings
                && new
                    .plans
                    .get(&volume)
                    .is_some_and(|plan| plan.confirm.contains(peer) && !plan.written)
        });
        told && self.node_id < peer
            && self.is_lockstep(peer)
            && self.state.role == Role::Primary
            && self.peer_role(peer) == Role::Primary
    }

    /// Two Primaries that lost nothing but their connection (`compare_marks.rs`). What a verify
    /// found between them stays marked.
    pub(crate) fn both_stayed(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let pd = device.and_then(|d| d.peers.get(&peer));
        let theirs = |pd: &PeerDevice| {
            pd.uuids
                .as_ref()
                .is_some_and(|set| set.flags.contains(UuidFlags::RECONNECT))
        };
        self.may_both_be_primary(peer)
            && self.state.role == Role::Primary
            && self.peer_role(peer) == Role::Primary
            && pd.is_some_and(|pd| pd.reconnect && theirs(pd) && !pd.io.verify.found)
    }
}
