//! Flushes that reach what peers hold of other nodes' writes (semantics.md, 15.8).

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::Packet;
use lockstep_format::wire::packet::Barrier;

use crate::event::Stream;
use crate::resource::Resource;
use crate::state::{DiskState, Role};

impl Resource {
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
