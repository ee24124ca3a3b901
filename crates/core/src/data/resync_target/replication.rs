//! Resync without replication (semantics.md, 19.3): while the bulk is copied, the peers send marks
//! instead of their writes, so that no block travels twice. Passes follow each other as long as
//! each leaves less than half of the one before; then the peers are asked for their writes, too,
//! and what is still marked is copied beside those.
//!
//! Marks that the peers owe at that moment must be here before the end: the flush that every resync
//! ends with is asked for behind the request for the writes.

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::Packet;
use lockstep_format::wire::packet::EnableReplication;

use crate::device::PeerDevice;
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

    /// A peer that becomes a source goes back to marks.
    pub(super) fn replication_ended_for_others(&mut self, volume: VolumeNr, source: NodeId) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let Some(pd) = device.peers.get_mut(&source).filter(|pd| pd.asked_marks) else {
            return;
        };
        pd.asked_writes = false;
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
            self.ask_for_writes(volume);
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

    /// The peer was asked for marks on this connection; it may have been asked for writes since.
    pub(super) fn asked_for_marks(&self, volume: VolumeNr, peer: NodeId) -> bool {
        self.devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .is_some_and(|pd| pd.asked_marks)
    }

    /// Somebody was asked for marks and not for writes since, such as a peer whose handshake was
    /// under way when the others were.
    pub(super) fn marks_may_come(&self, volume: VolumeNr) -> bool {
        self.devices.get(&volume).is_some_and(|d| {
            let mut peers = d.peers.values();
            peers.any(|pd| pd.asked_marks && !pd.asked_writes)
        })
    }

    /// Asks them, too, as soon as they are there.
    pub(super) fn await_writes(&mut self, volume: VolumeNr, source: NodeId) {
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let late = |(peer, pd): (&NodeId, &PeerDevice)| {
            pd.asked_marks && !pd.asked_writes && !self.is_established(*peer)
        };
        if !device.peers.iter().any(late) {
            self.ask_for_writes(volume);
            self.request_flushes(volume, source);
        }
        let at = self.now + STEP;
        self.timers
            .set_earliest(Timer::ResyncStep(volume, source), at);
    }

    fn ask_for_writes(&mut self, volume: VolumeNr) {
        let peers = self.established();
        for peer in peers {
            let Some(pd) = self.peer_device_mut(volume, peer) else {
                continue;
            };
            if !pd.asked_marks {
                continue;
            }
            pd.asked_writes = true;
            let packet = Packet::EnableReplication(EnableReplication { enable: true });
            self.send(peer, Stream::Data, volume, packet);
        }
    }
}
