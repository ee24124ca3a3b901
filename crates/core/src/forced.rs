//! Data that are called good by force: `primary --force` where nobody has better ones
//! (semantics.md, 7.1).

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState, Role};

use crate::admin::{Wait, Waiting};
use crate::event::CommandId;
use crate::resource::Resource;
use crate::time::Instant;
use crate::transition::Change;
use crate::twopc::WishKind;

impl Resource {
    /// `primary --force` on a Primary is for volumes without good data, such as one that was added
    /// since: each becomes a generation of its own. False if there is none behind this one.
    pub(crate) fn force_next(&mut self, id: CommandId, behind: Option<VolumeNr>) -> bool {
        let mut volumes = self.devices.keys().copied();
        let next = |volume: &VolumeNr| Some(*volume) > behind && self.may_be_forced(*volume);
        match volumes.find(next) {
            Some(volume) => {
                self.wish(WishKind::ForceUpToDate(volume), Some(id));
                true
            }
            None => false,
        }
    }

    /// Old data count as good from now on. The command is answered when the metadata say so: a crash before that leaves
    /// disks that nobody takes for good, and whoever gave the command would not know.
    pub(crate) fn answer_when_forced(&mut self, id: CommandId) {
        let (what, until) = (Wait::Forced, Instant(u64::MAX));
        self.waiting.push(Waiting { id, what, until });
    }

    pub(crate) fn forced_is_durable(&self) -> bool {
        self.devices.keys().all(|v| self.meta_is_durable(*v))
    }

    /// The node's slot would have said by the next generation that it was left behind. Without the slot it may come back
    /// under the present one, beside what is written from now on: that gets a name of its own.
    pub(crate) fn fork_for_forgotten(&mut self, volume: VolumeNr, peer: NodeId) {
        let primary = self.state.role == Role::Primary;
        if let Some(device) = self.devices.get_mut(&volume)
            && let Some(disk) = device.attached()
            && let slot = disk.generations.slot(peer)
            && primary
            && slot.bitmap_index.is_some()
            && slot.bitmap_uuid.is_zero()
            && !planted!(self, ForgottenNotLeft)
        {
            device.uuid_is_due(true, false);
        }
    }

    /// The own disk is not UpToDate, and nobody's is that this node knows of.
    pub(crate) fn may_be_forced(&self, volume: VolumeNr) -> bool {
        self.state.devices.get(&volume).is_some_and(|d| {
            d.disk >= DiskState::Inconsistent
                && d.disk < DiskState::UpToDate
                && d.peers.values().all(|p| p.disk != DiskState::UpToDate)
        })
    }

    /// The own data of a volume become the good ones, if there are no others.
    pub(crate) fn forced_data(&self, mut change: Change, volume: VolumeNr) -> Change {
        let device = self.state.devices.get(&volume);
        let Some(device) = device.filter(|_| self.may_be_forced(volume)) else {
            return change;
        };
        change = change.disk(volume, DiskState::UpToDate);
        // What waits for a source that has no good data either waits no longer.
        for (peer, p) in &device.peers {
            if p.repl == ReplState::PausedSyncT {
                change = change.repl(volume, *peer, ReplState::Established);
            }
        }
        change
    }
}
