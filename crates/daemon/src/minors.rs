//! Which volume has which minor number, so that a node with thousands of volumes need not search.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lockstep_core::command::{CommandError, ErrorCode};
use lockstep_core::report::Snapshot;
use lockstep_format::units::VolumeNr;
use lockstep_format::wire::DiskState;

/// The minors of a node; `T` stands for a resource.
pub(crate) struct Minors<T> {
    taken: Mutex<BTreeMap<u32, (T, VolumeNr)>>,
}

impl<T> Default for Minors<T> {
    fn default() -> Self {
        Minors {
            taken: Mutex::default(),
        }
    }
}

impl<T: Clone> Minors<T> {
    /// Takes a minor for a volume, before the volume is made; who has it, if somebody does.
    pub(crate) fn take(&self, minor: u32, resource: T, volume: VolumeNr) -> Result<(), T> {
        match self.lock().entry(minor) {
            Entry::Occupied(taken) => Err(taken.get().0.clone()),
            Entry::Vacant(free) => {
                free.insert((resource, volume));
                Ok(())
            }
        }
    }

    /// The volume has gone, or was not made.
    pub(crate) fn free(&self, minor: u32) {
        self.lock().remove(&minor);
    }

    /// The volume behind a minor.
    pub(crate) fn find(&self, minor: u32) -> Option<(T, VolumeNr)> {
        self.lock().get(&minor).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, (T, VolumeNr)>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A volume is deleted when its disk is detached.
pub(crate) fn check_has_no_disk(snapshot: &Snapshot, volume: VolumeNr) -> Result<(), CommandError> {
    let device = snapshot
        .devices
        .iter()
        .find(|device| device.volume == volume);
    match device {
        Some(device) if device.disk_state != DiskState::Diskless => Err(CommandError {
            code: ErrorCode::ERR_MINOR_CONFIGURED,
            text: format!("volume {volume} has a disk; detach it first"),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minor_belongs_to_one_volume_until_it_is_free() {
        let minors = Minors::default();
        assert_eq!(minors.take(7, "a", VolumeNr(0)), Ok(()));
        assert_eq!(minors.take(7, "b", VolumeNr(1)), Err("a"));
        assert_eq!(minors.find(7), Some(("a", VolumeNr(0))));
        minors.free(7);
        assert_eq!(minors.find(7), None);
        assert_eq!(minors.take(7, "b", VolumeNr(1)), Ok(()));
    }
}
