//! What the end of a resync waits for: a source that is not through with its start, peer acks that are still on their way (semantics.md, 19.6),
//! and a flush of the own disk.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::packet::FlushRequests;
use lockstep_format::wire::{ConnState, DiskState, Packet, ReplState, Role};

use super::{FLUSH_PATIENCE, TargetSync};
use crate::connection::{Connection, WITH_FLUSH};
use crate::data::disk::FlushWaiter;
use crate::event::Stream;
use crate::resource::Resource;
use crate::state::{ConnectionState, State};

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

    /// The source is not through with the exchange of bitmaps, because of a handler, say. Until it is it sends
    /// nothing and tells only marks of its writes; a disk that lacks them must not be taken for whole. (8.4 begins
    /// with the UUID of the resync.)
    pub(super) fn source_exchanges(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let state = device.and_then(|d| d.peers.get(&peer)?.last_state);
        !self.is_legacy(peer) && state.is_some_and(|state| state.repl == ReplState::WfBitmapS)
    }

    /// Some node owes the answer to a flush.
    pub(super) fn flush_is_awaited(&mut self, volume: VolumeNr, peer: NodeId) -> bool {
        let now = self.now;
        let Some(sync) = self.target(volume, peer) else {
            return false;
        };
        // A node that is gone or not UpToDate any more owes no answer.
        let mut waits = core::mem::take(&mut sync.flush_waits);
        for (primary, nodes) in &mut waits {
            let up_to_date = |node: NodeId| {
                self.is_established(node)
                    && self.state.peer_device(volume, node).disk == DiskState::UpToDate
            };
            let reachable = self.is_established(*primary);
            *nodes = nodes
                .iter()
                .filter(|node| reachable && up_to_date(*node))
                .collect();
        }
        waits.retain(|(_, nodes)| !nodes.is_empty());
        let Some(sync) = self.target(volume, peer) else {
            return false;
        };
        sync.flush_waits = waits;
        if sync.flush_waits.is_empty() {
            return false;
        }
        // A node that was not connected to the Primary then never hears of the question.
        let once = now - sync.flush_asked < FLUSH_PATIENCE;
        if !once && !planted!(self, FlushAskedOnce) {
            self.request_flushes(volume, peer);
        }
        true
    }

    /// Marks that a write of the source has cleared stood for older data that applications may have flushed
    /// already. Metadata that call the disk UpToDate must not outlive that write.
    pub(super) fn flush_before_end(&mut self, volume: VolumeNr, peer: NodeId) -> bool {
        let serial = self.io.flush_sequence + 1;
        let skips = planted!(self, EndNotFlushed);
        let Some(sync) = self.target(volume, peer) else {
            return false;
        };
        if sync.overwritten && sync.end_flush.is_none() && !skips {
            sync.overwritten = false;
            sync.end_flush = Some(serial);
            self.io.flush_sequence = serial;
            self.flush_disk(volume, FlushWaiter::ResyncEnd(peer, serial));
            return true;
        }
        sync.end_flush.is_some()
    }

    /// A write of the source has cleared marks.
    pub(crate) fn target_overwritten(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(sync) = self.target(volume, peer) {
            sync.overwritten = true;
        }
    }

    /// A write of this Primary, which is a target itself, has cleared so many marks.
    pub(crate) fn own_write_cleared(&mut self, volume: VolumeNr, cleared: u64) {
        let device = self.devices.get_mut(&volume).filter(|_| cleared > 0);
        let peers = device.map(|device| device.peers.values_mut());
        for sync in peers
            .into_iter()
            .flatten()
            .filter_map(|pd| pd.io.target.as_mut())
        {
            sync.overwritten = !planted!(self, OwnOverwriteNotFlushed);
        }
    }

    /// The flush before the end is done. A disk whose flush failed is gone, and the resync with it.
    pub(crate) fn end_flushed(&mut self, volume: VolumeNr, peer: NodeId, serial: u64) {
        let sync = self.target(volume, peer);
        if let Some(sync) = sync.filter(|sync| sync.end_flush == Some(serial)) {
            sync.end_flush = None;
            self.target_kick(volume, peer);
        }
    }

    /// A Primary was away when resyncs from other nodes began: they may owe marks of what it wrote
    /// since, and must not end before those are here.
    pub(super) fn request_flushes_of_others(&mut self, volume: VolumeNr, primary: NodeId) {
        let connection = self.state.connections.get(&primary);
        let is_primary = connection.is_some_and(|c| c.peer_role == Role::Primary);
        if !is_primary || planted!(self, LatePrimaryNotAsked) {
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

    /// The same for one that is connected from now on, and is no source: it may have no disk.
    pub(crate) fn primaries_have_come(&mut self, old: &State, new: &State) {
        let comes = |(peer, c): &(&NodeId, &ConnectionState)| {
            c.conn == ConnState::Connected
                && c.peer_role == Role::Primary
                && old.conn(**peer) != ConnState::Connected
        };
        let came = new.connections.iter().filter(comes);
        let came: Vec<NodeId> = came.map(|(peer, _)| *peer).collect();
        if planted!(self, ComingPrimaryNotAsked) {
            return;
        }
        for primary in came {
            for volume in new.devices.keys() {
                self.request_flushes_of_others(*volume, primary);
            }
        }
    }

    /// A node has passed on everything that the Primary had for it.
    pub(crate) fn flush_acked(&mut self, peer: NodeId, sequence: u64, primary: NodeId) {
        let mut kicked = Vec::new();
        let any = planted!(self, OldFlushAnswerCounts);
        let first = planted!(self, FirstFlushAnswerEnds);
        for (volume, device) in &mut self.devices {
            for (source, pd) in &mut device.peers {
                let Some(sync) = pd.io.target.as_mut() else {
                    continue;
                };
                if sync.flush_sequence != sequence && !any {
                    continue;
                }
                for (node, waits) in &mut sync.flush_waits {
                    if *node == primary {
                        waits.remove(peer);
                    }
                }
                sync.flush_waits
                    .retain(|(_, waits)| !waits.is_empty() && !first);
                kicked.push((*volume, *source));
            }
        }
        for (volume, source) in kicked {
            self.target_kick(volume, source);
        }
    }
}
