//! Who hears how far this node's writes have come: dagtags beside the writes that carry them
//! (semantics.md, 5.1).

use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, VolumeNr};
use lockstep_format::wire::Packet;

use crate::event::Stream;
use crate::resource::Resource;

impl Resource {
    /// A peer that gets writes from now on hears how far they have come, even if none follows:
    /// others wait for what was written before (semantics.md, 5.1 point 1). Without other nodes or
    /// earlier writes nobody does, and the first write says it.
    pub(crate) fn send_dagtag(&mut self, peer: NodeId) {
        let dagtag = self.io.dagtag;
        let matters = dagtag != Dagtag(0) && self.connections.len() > 1;
        if !matters || !self.is_established(peer) || self.is_legacy(peer) {
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

    /// This node's dagtag has jumped: all who get its writes hear that at once. Otherwise a peer
    /// that hears of it elsewhere would wait here for a write that may never come.
    pub(crate) fn tell_dagtag(&mut self) {
        let peers: Vec<NodeId> = self.connections.keys().copied().collect();
        for peer in peers {
            let mut devices = self.state.devices.values();
            if !devices.any(|d| d.peers.get(&peer).is_some_and(|p| p.replicates())) {
                continue;
            }
            if let Some(conn) = self.connections.get_mut(&peer) {
                conn.io.mirror = None;
            }
            self.send_dagtag(peer);
        }
    }

    /// A peer begins to get writes: what it was told of the dagtag may be of before.
    pub(crate) fn replication_started(&mut self, peer: NodeId) {
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.mirror = None;
        }
        self.io.parked_due = true;
    }
}
