//! A disk that does not answer (`disk-timeout`, `detach --force`; semantics.md, 8.4 and 15.6).
//!
//! Such a disk is taken for failed, and the driver is told to give its operations up: each ends at
//! once with [`DiskError::Gone`](crate::event::DiskError::Gone), so that requests go on with the
//! peers. What the medium still makes of an operation that was given up is as unknown as after a
//! crash, and what covers a crash covers it: the extent is in the activity log on disk. The driver
//! keeps the memory, and refuses to open the disk again, until the system has returned them.

use alloc::format;

use lockstep_format::units::VolumeNr;
use lockstep_format::wire::DiskState;

use crate::device::DiskPhase;
use crate::event::{Output, Tag};
use crate::report::Level;
use crate::resource::{Pending, Resource};
use crate::second_look::SECOND_LOOK;
use crate::time::{Duration, Instant};
use crate::timers::Timer;
use crate::transition::Change;

impl Resource {
    /// An operation of this volume's disk was started, or its options have changed.
    pub(crate) fn watch_disk(&mut self, volume: VolumeNr) {
        let Some(limit) = self.disk_timeout(volume) else {
            return;
        };
        if !self.timers.is_set(Timer::DiskTimeout(volume)) && !planted!(self, DiskTimeoutIgnored) {
            let at = self.now + limit;
            self.timers.set(Timer::DiskTimeout(volume), at);
        }
    }

    /// `detach --force`: a disk that works may still end what it does and write its metadata, but
    /// nobody waits longer for it.
    pub(crate) fn force_detach(&mut self, volume: VolumeNr) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        disk.forced = true;
        let at = self.now + FORCED_WAIT;
        self.timers.set(Timer::DiskTimeout(volume), at);
        self.leave_ungracefully(volume);
    }

    /// `Timer::DiskTimeout`.
    pub(crate) fn disk_timeout_timer(&mut self, volume: VolumeNr) {
        let oldest = self.oldest_disk_operation(volume);
        let limit = self.disk_timeout(volume);
        let hasty = planted!(self, DiskTimeoutHasty);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        if disk.forced {
            self.abandon_disk(volume);
            return;
        }
        // A process that stood still between the two looks has not waited for the second one.
        let late = |(_, due): &(Tag, Instant)| self.now - *due >= SECOND_LOOK;
        let suspect = disk.suspect.take().filter(|suspect| !late(suspect));
        let (Some((tag, since)), Some(limit)) = (oldest, limit) else {
            return;
        };
        let due = since + limit;
        if self.now < due {
            self.timers.set(Timer::DiskTimeout(volume), due);
        } else if suspect.map(|(tag, _)| tag) != Some(tag) && !hasty {
            // If this process stood still itself, the answers are there but were not looked at.
            let at = self.now + SECOND_LOOK;
            disk.suspect = Some((tag, at));
            self.timers.set(Timer::DiskTimeout(volume), at);
        } else {
            let text = format!(
                "{}: no answer for {} ms, which is more than disk-timeout: the disk is given up",
                disk.data_path,
                (self.now - since).as_millis()
            );
            self.log(Level::Error, None, Some(volume), text);
            if self.state.disk(volume) > DiskState::Failed {
                if let Some(device) = self.devices.get_mut(&volume) {
                    device.lost_disk = Some(crate::device::LostDisk::Timeout);
                }
                self.hard_change(Change::new().disk(volume, DiskState::Failed));
            }
            self.abandon_disk(volume);
        }
    }

    /// Nobody waits for the disk any more: what is in flight ends, and so does what still comes.
    fn abandon_disk(&mut self, volume: VolumeNr) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        if disk.abandoned || matches!(disk.phase, DiskPhase::Opening { .. }) {
            return;
        }
        disk.abandoned = true;
        self.output(Output::AbandonDisk { volume });
        self.leave_ungracefully(volume);
    }

    /// How long an operation may take; none if that does not matter (any more).
    fn disk_timeout(&self, volume: VolumeNr) -> Option<Duration> {
        let disk = self.devices.get(&volume)?.disk.as_ref()?;
        let tenths = disk.options.disk_timeout_tenths;
        (tenths > 0 && !disk.abandoned).then(|| Duration::from_tenths(u64::from(tenths)))
    }

    fn oldest_disk_operation(&self, volume: VolumeNr) -> Option<(Tag, Instant)> {
        let of_volume = |pending: &Pending| match pending {
            Pending::AttachRead(v, _) | Pending::Superblock(v, _) | Pending::Move(v) => {
                *v == volume
            }
            Pending::Data(op) => self.volume_of(*op) == Some(volume),
            Pending::Open(_)
            | Pending::Close(_)
            | Pending::Probe(..)
            | Pending::Handler
            | Pending::Fence(_)
            | Pending::CloseUnused
            | Pending::BeforeResync(..) => false,
        };
        self.tags
            .timed()
            .filter(|(_, pending, _)| of_volume(pending))
            .map(|(tag, _, since)| (tag, since))
            .min_by_key(|(_, since)| *since)
    }
}

/// How long a forced detach lets a disk end what it does.
const FORCED_WAIT: Duration = Duration::from_millis(500);
