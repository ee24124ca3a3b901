//! Resync without replication (semantics.md, 19.3): while the bulk is copied, the peers send marks
//! instead of their writes, so that no block travels twice. Passes follow each other as long as
//! each leaves less than half of the one before; then the peers are asked for their writes, too,
//! and what is still marked is copied beside those.
//!
//! Marks that the peers owe at that moment must be here before the end: the flush that every resync
//! ends with is asked for behind the request for the writes.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::Packet;
use lockstep_format::wire::packet::EnableReplication;

use crate::event::Stream;
use crate::rate::STEP;
use crate::resource::Resource;
use crate::timers::Timer;

impl Resource {
    /// What `P_ENABLE_REPLICATION_NEXT` tells the peer. Only nodes of this project vouch for the
    /// acks of an earlier Primary in their answer to a flush, so kernel peers are asked for all their
    /// writes. Where two nodes write, each reads what the other has written: a mark would be too late.
    pub(crate) fn wants_replication(&self, peer: NodeId, volume: VolumeNr) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return true;
        };
        let marks = device
            .peers
            .get(&peer)
            .is_some_and(|pd| pd.options.resync_without_replication);
        // A resync that may be in its last pass must not get marks of somebody new.
        let runs = device.peers.values().any(|pd| pd.io.target.is_some());
        !marks || runs || self.is_shared() || !self.is_lockstep(peer)
    }

    /// Nobody was asked for marks.
    pub(super) fn begins_with_replication(&mut self, volume: VolumeNr, source: NodeId) -> bool {
        let asked = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.peers.values().any(|pd| pd.asked_marks));
        if let Some(sync) = self.target(volume, source) {
            sync.replicating = !asked;
        }
        !asked
    }

    /// What comes from the source for these blocks may be newer than the writes that are here: while the bitmaps travelled, and
    /// during a resync without replication, a Primary marks blocks instead of sending its writes.
    pub(super) fn writes_are_followed_by_marks(
        &mut self,
        volume: VolumeNr,
        source: NodeId,
        replicating: bool,
    ) {
        if planted!(self, AcksCoverCopies) {
            return;
        }
        for conn in self.connections.values_mut() {
            if conn.peer != source && replicating {
                continue;
            }
            for write in conn.io.writes.iter_mut().filter(|w| w.volume == volume) {
                write.followed_by_marks = true;
            }
        }
    }

    /// A peer that becomes a source goes back to marks.
    pub(super) fn replication_ended_for_others(&mut self, volume: VolumeNr, source: NodeId) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        if device.peers.get(&source).is_none_or(|pd| !pd.asked_marks) {
            return;
        }
        for (_, pd) in device.peers.iter_mut().filter(|(n, _)| **n != source) {
            if let Some(sync) = pd.io.target.as_mut() {
                sync.replicating = false;
            }
        }
    }

    /// All that was marked has been asked for, and nothing is under way.
    pub(super) fn end_pass_of_marks(&mut self, volume: VolumeNr, source: NodeId, left_bits: u64) {
        let now = self.now;
        let Some(sync) = self.target(volume, source) else {
            return;
        };
        let again = sync.pass_failed == 0 && left_bits > 0 && left_bits < sync.left_bits / 2;
        sync.left_bits = left_bits;
        sync.cursor = 0;
        sync.pass_failed = 0;
        if !again {
            sync.replicating = true;
            if !planted!(self, WritesNotAskedFor) {
                self.ask_for_writes(volume);
            }
            if !planted!(self, WritesAskedForWithoutFlush) {
                self.request_flushes(volume, source);
            }
        }
        self.timers
            .set_earliest(Timer::ResyncStep(volume, source), now + STEP);
        if !again {
            self.target_step(volume, source);
        }
    }

    fn ask_for_writes(&mut self, volume: VolumeNr) {
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let asked = |peer: &NodeId| device.peers.get(peer).is_some_and(|pd| pd.asked_marks);
        let peers: Vec<NodeId> = self.established().into_iter().filter(asked).collect();
        for peer in peers {
            let packet = Packet::EnableReplication(EnableReplication { enable: true });
            self.send(peer, Stream::Data, volume, packet);
        }
    }
}
