//! A Primary whose own disk was merely Consistent, and becomes current (semantics.md, 12.6).
//!
//! Until then it labels the data that it exposes, and peers have taken that label. Its disk was written all
//! the time. From now on it labels its disk, which gets the label of its data: else the next generation
//! would be one of another branch for those peers.

use lockstep_format::units::{NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{DiskState, Role};

use crate::generation::{PeerView, Rotation};
use crate::resource::Resource;
use crate::state::State;
use crate::uuid_spread::NewUuid;
use crate::uuids::is_real;

impl Resource {
    /// The generation would name a disk that is on its way out, and has to be left behind by one that does not.
    pub(crate) fn named_disk_goes(&self, new: &NewUuid) -> bool {
        let goes = |volume: VolumeNr| self.state.disk(volume) < DiskState::UpToDate;
        let mut plans = new.plans.iter();
        plans.any(|(volume, plan)| plan.sets.is_some() && goes(*volume))
            && !planted!(self, GoingDiskNamed)
    }

    /// True: the metadata have changed.
    pub(crate) fn take_exposed_generation(
        &mut self,
        volume: VolumeNr,
        old: &State,
        new: &State,
    ) -> bool {
        let stayed = old.role == Role::Primary && new.role == Role::Primary;
        let becomes_current =
            old.disk(volume) == DiskState::Consistent && new.disk(volume) == DiskState::UpToDate;
        if !stayed || !becomes_current {
            return false;
        }
        let views = self.peer_views(volume);
        let exposed = self.devices.get(&volume).map(|d| d.exposed_uuid);
        let Some(exposed) = exposed.filter(|e| is_real(*e) && *e != Uuid::JUST_CREATED) else {
            return false;
        };
        let follows = |view: &&PeerView| {
            let set = self.peer_uuids(volume, view.node);
            set.is_some_and(|set| set.current.same_generation(exposed))
        };
        let following: NodeMask = views.iter().filter(follows).map(|v| v.node).collect();
        let rotation = Rotation {
            peers: &views,
            weak: following.complement(),
            dagtag: self.io.dagtag,
        };
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return false;
        };
        if disk.generations.knows(exposed) {
            return false;
        }
        disk.generations
            .receive_new_datagen(exposed, &rotation, DiskState::UpToDate, new.role);
        true
    }
}
