//! Blocks that the own disk does not give any more.
//!
//! With `on-io-error pass_on` the disk stays, and is Inconsistent until a peer's copy has replaced them. No extent of the
//! activity log stands for such a block: the mark has to be durable before the metadata call the disk Inconsistent.
//! A node that died between the two would be copied without it.

use lockstep_format::units::{NodeMask, Sector, VolumeNr};
use lockstep_format::wire::DiskState;

use super::DiskFault;
use super::disk::BitmapThen;
use crate::options::OnIoError;
use crate::resource::Resource;

impl Resource {
    /// A read failed. Nobody knows what this range holds here: it is out of sync towards everybody.
    pub(crate) fn unreadable(&mut self, volume: VolumeNr, sector: Sector, size_bytes: u32) {
        self.set_out_of_sync(volume, sector, size_bytes, NodeMask::EMPTY);
        let stays = self.state.disk(volume) > DiskState::Failed && self.passes_on(volume);
        let held = stays && !planted!(self, ReadErrorMarkedLate);
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.writer.unmarked += u32::from(held);
        }
        self.disk_failed(volume, DiskFault::Data);
        if planted!(self, ReadErrorMarkedLazily) {
            self.unreadable_marked(volume);
        } else if stays {
            self.write_bitmap(volume, BitmapThen::Unreadable);
        }
    }

    /// The marks are on disk, and the superblock may follow.
    pub(crate) fn unreadable_marked(&mut self, volume: VolumeNr) {
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.writer.unmarked = disk.writer.unmarked.saturating_sub(1);
        }
        self.push_superblock(volume);
    }

    fn passes_on(&self, volume: VolumeNr) -> bool {
        let disk = self.devices.get(&volume).and_then(|d| d.disk.as_ref());
        disk.is_some_and(|disk| disk.options.on_io_error == OnIoError::PassOn)
    }
}
