//! Writes that a Primary without a disk gave up.
//!
//! All peers are lost, and a write that was on its way to them fails. Some of them may have it and others not, under one
//! name, and nothing says so before they have met. If they come back one by one, what applications read depends on who is
//! asked. So the generation that is due is made with the first one, before the next one is connected.

use alloc::format;

use lockstep_format::units::{NodeId, Uuid, VolumeNr};
use lockstep_format::wire::{DiskState, Role};

use crate::command::ErrorCode;
use crate::device::Device;
use crate::event::{RequestError, RequestId};
use crate::resource::Resource;
use crate::validity::Refusal;

impl Resource {
    /// A write ends. `sent`: peers may have it.
    pub(crate) fn complete_write(
        &mut self,
        volume: VolumeNr,
        id: RequestId,
        (ok, sent): (bool, bool),
    ) {
        if !ok
            && sent
            && let Some(device) = self.devices.get_mut(&volume)
        {
            device.gave_up_at = device.exposed_uuid;
        }
        self.complete(id, if ok { Ok(()) } else { Err(RequestError::Io) });
    }

    /// A request waits for a new generation, or what was given up does.
    pub(crate) fn is_new_uuid_wanted(&self) -> bool {
        let given_up = || self.devices.iter().any(|(v, d)| self.awaits_name(*v, d));
        self.new_uuid_wanted || self.demotion_wants_uuid() || given_up()
    }

    /// Peers may differ in what this Primary gave up, and the generation for it can be made.
    fn awaits_name(&self, volume: VolumeNr, device: &Device) -> bool {
        self.state.role == Role::Primary
            && self.state.disk(volume) < DiskState::UpToDate
            && device.new_uuid_pending
            && !device.gave_up_at.is_zero()
            && device.gave_up_at.same_generation(device.exposed_uuid)
            && self.can_label(volume)
            && !planted!(self, GivenUpUnnamed)
    }

    /// `peer` would count as UpToDate beside another one, and the two may differ in what was given up.
    pub(crate) fn given_up_in_handshake(&self, peer: NodeId) -> Option<Refusal> {
        if !self.is_lockstep(peer) || self.is_legacy(peer) || self.state.suspended() {
            return None;
        }
        let counts = |device: &Device| {
            let verdict = device.peers.get(&peer).and_then(|pd| pd.verdict.as_ref());
            verdict.is_some_and(|verdict| verdict.peer_disk == DiskState::UpToDate)
        };
        let mut devices = self.devices.iter();
        let (volume, _) = devices.find(|(v, d)| self.awaits_name(**v, d) && counts(d))?;
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!("volume {volume} gets another generation before node {peer} counts"),
        })
    }

    /// Connected clients were told what this Primary without a disk exposes, and do not answer. Gone, they would
    /// come back at that generation.
    pub(crate) fn clients_follow(&mut self, volume: VolumeNr, uuid: Uuid) {
        for peer in self.established_peers().iter() {
            if self.state.peer_device(volume, peer).disk == DiskState::Diskless
                && let Some(pd) = self.peer_device_mut(volume, peer)
            {
                pd.current_uuid = uuid;
                pd.uuids.get_or_insert_default().current = uuid;
            }
        }
    }
}
