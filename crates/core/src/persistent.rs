//! Metadata on persistent memory (metadata.md, 10): who gets it, and how writes become stores.
//!
//! The rest of the core writes blocks and whole areas as on any disk, in the same order and with
//! the same waits. Here each such write becomes stores in place: the activity log is an array of
//! slots, of which only the words that change are stored; the superblock changes in steps that no
//! power cut leaves half done; pages of the bitmap are stored as they are.

use alloc::format;
use alloc::vec;

use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::any::Format;
use lockstep_format::disk::pmem::{self, WordStore};
use lockstep_format::units::VolumeNr;

use crate::command::MetaIndex;
use crate::device::LocalDisk;
use crate::event::MetaOp;
use crate::report::Level;
use crate::resource::Resource;

impl LocalDisk {
    /// An empty log of slots in place of whatever the area held. None if this disk's log is a ring.
    pub(crate) fn empty_slots(&self) -> Option<MetaOp> {
        let layout = self.layout.as_ref().filter(|_| self.io.al.is_in_place())?;
        let mut steps = pmem::convert(&[], layout.geometry().al);
        for step in &mut steps {
            step.offset += layout.al_byte();
        }
        Some(MetaOp::Store {
            steps: steps.into(),
            flush_data: false,
        })
    }
}

impl Resource {
    /// The superblock of an attach is read: does the disk get a log of slots?
    pub(crate) fn choose_form(&mut self, volume: VolumeNr, path: &str) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        if !disk.info.persistent_memory {
            return;
        }
        let text = match (disk.index, disk.format) {
            (MetaIndex::Internal, _) => {
                format!("{path}: internal metadata are written in blocks on persistent memory, too")
            }
            (_, Format::V08) => {
                format!("{path}: metadata of version v08 are written in blocks on any medium")
            }
            (MetaIndex::FlexExternal | MetaIndex::Indexed(_), Format::V09) => {
                disk.io.al.keep_in_place();
                format!("{path}: metadata on persistent memory, changed in place")
            }
        };
        self.log(Level::Info, None, Some(volume), text);
    }

    /// A write of metadata as this volume's medium takes it.
    pub(crate) fn in_place(&self, volume: VolumeNr, op: MetaOp) -> MetaOp {
        let disk = self.devices.get(&volume).and_then(|d| d.disk.as_ref());
        let Some(disk) = disk.filter(|d| d.io.al.is_in_place()) else {
            return op;
        };
        match op {
            MetaOp::Write {
                offset,
                bytes,
                flush_data,
            } => {
                let superblock = disk.layout.as_ref().map(|l| l.superblock_byte());
                let whole: Option<&[u8; BLOCK_BYTES]> = bytes.as_slice().try_into().ok();
                let in_order = !planted!(self, SuperblockInOneGo);
                let steps = match whole.filter(|_| superblock == Some(offset) && in_order) {
                    Some(block) => pmem::superblock_steps(block, offset),
                    None => vec![WordStore { offset, bytes }],
                };
                MetaOp::Store { steps, flush_data }
            }
            MetaOp::Read { .. } | MetaOp::Store { .. } => op,
        }
    }
}
