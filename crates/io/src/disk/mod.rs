//! Disks of volumes: opening them, and running the core's operations on them to the end.
//!
//! A [`Task`] is one operation of the core. It wants one ring operation at a time and is told its
//! result, until it is finished: partial transfers go on, what a device cannot do is done in
//! another way, memory that direct IO cannot take is copied. A failed flush is never tried again.

mod cache_note;
mod device;
mod faults;
mod holder;
mod pmem;
mod ram;
mod sys;
mod task;

use std::sync::Arc;

use lockstep_core::event::DiskInfo;

pub(crate) use cache_note::CacheNote;
pub use cache_note::CacheNotes;
pub use device::{Device, OpenError};
pub use faults::{FaultOn, FaultPlan};
pub use holder::{Locked, lock_alone, open_alone, runs};
pub use pmem::stand_in;
pub use ram::{RAM_PREFIX, RamDisk, RamDiskError};
pub use task::{DataWork, MetaWork, Outcome, Step, Task};

/// A volume's disk: the data device and the one that holds its metadata.
#[derive(Clone, Debug)]
pub struct Disk {
    data: Arc<Device>,
    meta: Arc<Device>,
}

impl Disk {
    /// Opens both devices; without `meta_path` the metadata is on the data device.
    pub fn open(data_path: &str, meta_path: Option<&str>) -> Result<Disk, OpenError> {
        let data = Device::open(data_path)?;
        let meta = match meta_path {
            Some(path) => {
                let meta = Device::open_shared(path)?;
                meta.map();
                meta
            }
            None => data.clone(),
        };
        Ok(Disk { data, meta })
    }

    /// Looks how large both devices are now.
    pub fn probe(&self) -> Result<DiskInfo, OpenError> {
        self.data.probe()?;
        if !Arc::ptr_eq(&self.data, &self.meta) {
            self.meta.probe()?;
            self.meta.map();
        }
        Ok(self.info())
    }

    /// What the core is told of the disk.
    pub fn info(&self) -> DiskInfo {
        DiskInfo {
            meta_bytes: self.meta.info().data_bytes,
            persistent_memory: !Arc::ptr_eq(&self.data, &self.meta) && self.meta.is_mapped(),
            ..self.data.info()
        }
    }

    /// The data device.
    pub fn data(&self) -> &Arc<Device> {
        &self.data
    }

    /// The metadata device; the data device itself with internal metadata.
    pub fn meta(&self) -> &Arc<Device> {
        &self.meta
    }
}

#[cfg(test)]
mod tests;
