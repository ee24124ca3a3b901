//! The end of a resync is known to both (semantics.md, 19.8). Its target takes the generation of its source; a source
//! that has gone on without it meanwhile would call other data so. A ping behind the last ack tells the
//! target that the source was there when it had all acks, and the source that the target may end.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::ReplState;

use crate::resource::Resource;
use crate::state::ReplSets;

/// What a target knows of its last acks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Confirm {
    /// Nothing.
    #[default]
    Unasked,
    /// They have arrived when the ping of this number is answered.
    Asked(u64),
    /// They have arrived.
    Arrived,
}

impl Resource {
    /// Whether the source has all acks of this target, or is asked.
    pub(super) fn source_has_acks(&mut self, volume: VolumeNr, peer: NodeId) -> bool {
        if planted!(self, EndsUnconfirmed) {
            return true;
        }
        let confirm = self.target(volume, peer).map(|sync| sync.confirm);
        if confirm == Some(Confirm::Unasked) {
            self.ask_source_for_others(volume, peer);
            // On a line that is slow because of the resync the answer takes its time: it has all of it.
            let number = self.ping_without_haste(peer);
            if let Some((sync, number)) = self.target(volume, peer).zip(number) {
                sync.confirm = Confirm::Asked(number);
            }
        }
        confirm == Some(Confirm::Arrived)
    }

    /// The peer has answered so many pings.
    pub(crate) fn acks_arrived(&mut self, peer: NodeId, answered: u64) {
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            if let Some(sync) = self.target(volume, peer)
                && let Confirm::Asked(number) = sync.confirm
                && number <= answered
            {
                sync.confirm = Confirm::Arrived;
                self.target_kick(volume, peer);
            }
        }
    }

    /// A ping of the peer is answered. Resyncs to it whose blocks it has all acknowledged may have ended when the
    /// answer arrives.
    pub(crate) fn targets_may_end(&mut self, peer: NodeId) {
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            let repl = self.state.peer_device(volume, peer).repl;
            // One that is paused waits for another source, say, and is not at its end.
            if repl == ReplState::SyncSource
                && self.out_of_sync_blocks(volume, peer) == 0
                && let Some(pd) = self.peer_device_mut(volume, peer)
            {
                pd.target_may_end = true;
            }
        }
    }

    /// Before a new generation: who may have ended a resync unheard has left at the present one.
    pub(crate) fn ended_unheard(&self, volume: VolumeNr) -> NodeMask {
        let device = self.devices.get(&volume);
        let peers = device.into_iter().flat_map(|device| device.peers.iter());
        peers
            .filter(|(peer, pd)| {
                let repl = self.state.peer_device(volume, **peer).repl;
                pd.target_may_end
                    && repl < ReplState::Established
                    && !planted!(self, LeftTargetForgotten)
            })
            .map(|(peer, _)| *peer)
            .collect()
    }

    /// What the peer has is known, by a handshake or by the end of the resync.
    pub(crate) fn target_heard(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        (before, after): (ReplState, ReplState),
    ) {
        let decided = before < ReplState::Established && after >= ReplState::Established;
        if (decided || after == ReplState::Established)
            && let Some(pd) = self.peer_device_mut(volume, peer)
        {
            pd.target_may_end = false;
        }
        if before != after
            && let Some(pd) = self.peer_device_mut(volume, peer)
        {
            pd.served = before.is_sync_source() && after == ReplState::Established;
        }
    }
}
