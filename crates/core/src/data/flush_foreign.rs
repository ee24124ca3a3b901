//! Flushes that reach what peers hold of other nodes' writes (semantics.md, 15.8).

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::Packet;
use lockstep_format::wire::packet::Barrier;

use crate::event::Stream;
use crate::options::Protocol;
use crate::resource::Resource;
use crate::state::{ConnState, DiskState, Role, State};

impl Resource {
    /// A peer's copy begins to count for this Primary: it is asked now, so that the first flush finds it answered, and
    /// does not wait for a peer that is cut off meanwhile.
    pub(crate) fn flush_foreign_early(&mut self, old: &State, new: &State) {
        // From now on others may have what this node does not get.
        let promoted = |peer: &NodeId| {
            let before = old.connections.get(peer).map(|c| c.peer_role);
            let after = new.connections.get(peer).map(|c| c.peer_role);
            after == Some(Role::Primary) && before != after
        };
        if new.connections.keys().any(promoted) {
            for conn in self.connections.values_mut() {
                conn.io.foreign_covered = None;
            }
        }
        if new.role != Role::Primary {
            return;
        }
        let counts = |state: &State, volume: VolumeNr, peer: NodeId| {
            let p = state.peer_device(volume, peer);
            state.role == Role::Primary && p.replicates() && p.disk == DiskState::UpToDate
        };
        let begins = |volume: VolumeNr, peer: NodeId| {
            counts(new, volume, peer) && !counts(old, volume, peer)
        };
        let mut asked = Vec::new();
        for (peer, conn) in &self.connections {
            let promises =
                |volume: VolumeNr| conn.net.protocol == Protocol::C || !self.takes_writes(volume);
            let up = conn.link.is_some() && self.state.conn(*peer) == ConnState::Connected;
            let mut volumes = new.devices.keys();
            if up
                && conn.is_lockstep()
                && volumes.any(|volume| begins(*volume, *peer) && promises(*volume))
            {
                asked.push(*peer);
            }
        }
        if asked.is_empty() {
            return;
        }
        self.close_epoch();
        for peer in asked {
            // What a disk that came later holds was not reached before.
            if let Some(conn) = self.connections.get_mut(&peer) {
                conn.io.foreign_covered = None;
            }
            self.flush_foreign(peer);
        }
    }

    /// Makes the peer flush what it has of other nodes. Gives the barrier whose ack says that it has done so,
    /// unless it has nothing to flush.
    pub(super) fn flush_foreign(&mut self, peer: NodeId) -> Option<u32> {
        if planted!(self, ForeignNotFlushed) {
            return None;
        }
        // One that is due belongs to the writes before it.
        self.barrier_before(peer, self.io.epoch);
        let (count, barrier) = (self.io.foreign_count, self.io.epoch);
        // A write of others may not have reached every disk yet, as long as its sender does not say so.
        let settles = !self.foreign_is_unsettled() || planted!(self, ForeignFlushedOnce);
        let conn = self.connections.get_mut(&peer)?;
        if conn.io.foreign_covered != Some(count) {
            conn.io.foreign_covered = settles.then_some(count);
            self.io.epoch = barrier.wrapping_add(1);
            self.owe_barrier_ack(peer, barrier, 0);
            self.send_barrier(peer, barrier);
        }
        let io = &self.connections.get(&peer)?.io;
        io.unacked.back().map(|(barrier, _)| *barrier)
    }

    /// Writes of other Primaries may be on their way to a disk still. In 8.4's dialect nobody tells when they have arrived.
    fn foreign_is_unsettled(&self) -> bool {
        self.connections.values().any(|conn| {
            let told = !conn.is_legacy() || self.peer_role(conn.peer) != Role::Primary;
            !told || !conn.io.writes.is_empty()
        }) || self.reads_of_primaries() && !planted!(self, UnseenNotFlushed)
    }

    /// Another Primary may write what this node does not get, but reads at a peer.
    fn reads_of_primaries(&self) -> bool {
        let mut disks = self.state.devices.values().map(|device| device.disk);
        disks.any(|disk| disk != DiskState::UpToDate) && self.state.primary_peer().is_some()
    }

    /// The ack of a barrier is due, as of its writes.
    pub(super) fn owe_barrier_ack(&mut self, peer: NodeId, barrier: u32, writes: u32) {
        let now = self.now;
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        if conn.io.unacked.is_empty() {
            conn.io.barrier_since = now;
        }
        conn.io.unacked.push_back((barrier, writes));
        self.watch_age(peer);
    }

    pub(super) fn send_barrier(&mut self, peer: NodeId, barrier: u32) {
        self.send(
            peer,
            Stream::Data,
            VolumeNr::NONE,
            Packet::Barrier(Barrier { barrier }),
        );
    }
}
