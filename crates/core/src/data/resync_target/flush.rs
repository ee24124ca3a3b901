//! The flush before the end of a resync: peer acks that are still on their way (semantics.md, 19.6).

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::packet::FlushRequests;
use lockstep_format::wire::{DiskState, Packet, Role};

use super::TargetSync;
use crate::connection::{Connection, WITH_FLUSH};
use crate::event::Stream;
use crate::resource::Resource;

impl Resource {
    pub(super) fn request_flushes(&mut self, volume: VolumeNr, peer: NodeId) {
        let primaries: Vec<NodeId> = self
            .established()
            .into_iter()
            .filter(|node| {
                let primary = self
                    .state
                    .connections
                    .get(node)
                    .is_some_and(|c| c.peer_role == Role::Primary);
                // A source that was demoted meanwhile may owe marks of its last writes.
                let owes = |c: &Connection| *node == peer && c.is_lockstep();
                self.connections
                    .get(node)
                    .is_some_and(|c| (primary || owes(c)) && c.protocol() >= WITH_FLUSH)
            })
            .collect();
        if primaries.is_empty() {
            if let Some(sync) = self.target(volume, peer) {
                sync.flush_waits.clear();
            }
            return;
        }
        let answering: NodeMask = self
            .established()
            .into_iter()
            .filter(|node| {
                self.state.peer_device(volume, *node).disk == DiskState::UpToDate
                    && self
                        .connections
                        .get(node)
                        .is_some_and(|c| c.protocol() >= WITH_FLUSH)
            })
            .collect();
        let mut waits = Vec::new();
        self.io.flush_sequence += 1;
        let flush_sequence = self.io.flush_sequence;
        for primary in primaries {
            let is_primary = self
                .state
                .connections
                .get(&primary)
                .is_some_and(|c| c.peer_role == Role::Primary);
            // What a demoted source owes comes from itself.
            let answering = if is_primary {
                answering
            } else {
                NodeMask::of(primary)
            };
            if answering.count() > 0 {
                waits.push((primary, answering));
            }
            let packet = Packet::FlushRequests(FlushRequests { flush_sequence });
            self.send(primary, Stream::Data, VolumeNr::NONE, packet);
        }
        let now = self.now;
        if let Some(sync) = self.target(volume, peer) {
            sync.flush_waits = waits;
            sync.flush_asked = now;
            sync.flush_sequence = flush_sequence;
        }
    }

    /// Asks connected Primaries for the peer acks of what they have written so far.
    pub(crate) fn flush_peer_acks(&mut self) {
        self.io.flush_sequence += 1;
        let flush_sequence = self.io.flush_sequence;
        for primary in self.established() {
            let connection = self.state.connections.get(&primary);
            let is_primary = connection.is_some_and(|c| c.peer_role == Role::Primary);
            let link = self.connections.get(&primary);
            if is_primary && link.is_some_and(|c| c.protocol() >= WITH_FLUSH) {
                let packet = Packet::FlushRequests(FlushRequests { flush_sequence });
                self.send(primary, Stream::Data, VolumeNr::NONE, packet);
            }
        }
    }

    /// A Primary was away when resyncs from other nodes began: they may owe marks of what it wrote
    /// since, and must not end before those are here.
    pub(super) fn request_flushes_of_others(&mut self, volume: VolumeNr, primary: NodeId) {
        let connection = self.state.connections.get(&primary);
        if connection.is_none_or(|c| c.peer_role != Role::Primary) {
            return;
        }
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let running = |io: &Option<TargetSync>| io.as_ref().is_some_and(|sync| !sync.over);
        let others: Vec<NodeId> = device
            .peers
            .iter()
            .filter(|(node, pd)| **node != primary && running(&pd.io.target))
            .map(|(node, _)| *node)
            .collect();
        for other in others {
            self.request_flushes(volume, other);
        }
    }

    /// A node has passed on everything that the Primary had for it.
    pub(crate) fn flush_acked(&mut self, peer: NodeId, sequence: u64, primary: NodeId) {
        let mut kicked = Vec::new();
        for (volume, device) in &mut self.devices {
            for (source, pd) in &mut device.peers {
                let Some(sync) = pd.io.target.as_mut() else {
                    continue;
                };
                if sync.flush_sequence != sequence {
                    continue;
                }
                for (node, waits) in &mut sync.flush_waits {
                    if *node == primary {
                        waits.remove(peer);
                    }
                }
                sync.flush_waits.retain(|(_, waits)| !waits.is_empty());
                kicked.push((*volume, *source));
            }
        }
        for (volume, source) in kicked {
            self.target_kick(volume, source);
        }
    }
}
