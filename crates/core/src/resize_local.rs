//! What a resize does to this node's disk: bits for the new area, the new size in the superblock,
//! and the move of internal metadata to the end of a disk that has grown (metadata.md, 17).
//!
//! Order of writes, so that a power cut at any point leaves something that opens:
//!
//! * Growing: the bits of the new area, then the superblock with the new size. Before the second
//!   the bits do not count, after it they are there.
//! * Shrinking: the superblock first; until it is durable no bit behind the new end is dropped.
//! * Moving: if old and new areas do not overlap, bitmap and activity log are written to the new
//!   place while the old superblock still names the old one; then the new superblock, then the old
//!   one is erased. If they overlap, a superblock at the new place that calls for a full sync of
//!   every peer goes first, because old areas are overwritten; the final superblock takes that back.
//!
//! Meanwhile nobody gets a reference to the activity log and no superblock is written, so nothing
//! new reaches the disk; what is in flight was logged before and stays where it is.

use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::layout::{Layout, Placement};
use lockstep_format::disk::v09::{DeviceFlags, PeerFlags};
use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState};

use crate::attach::placement;
use crate::data::{BitmapThen, DiskFault};
use crate::device::{AfterMeta, DiskPhase, LocalDisk};
use crate::event::{DiskError, DiskInfo, MetaOp};
use crate::report::{Event, Level};
use crate::resize::{AfterResize, NewArea, Side};
use crate::resource::{Pending, Resource};

/// Writes of a move that are in flight at once.
const MOVE_WRITES: u32 = 8;
/// Largest write of a move in bytes.
const MOVE_BYTES: usize = 1 << 20;

/// A change of this disk that is under way.
#[derive(Debug)]
pub(crate) enum LocalResize {
    /// The size changes.
    Size {
        /// It shrinks: the bitmap follows the superblock.
        shrinks: bool,
        after: AfterResize,
    },
    /// The metadata move.
    Move(Move),
}

/// A move of the metadata.
#[derive(Debug)]
pub(crate) struct Move {
    info: DiskInfo,
    layout: Layout,
    step: MoveStep,
    /// Writes that were not started yet.
    writes: VecDeque<MetaOp>,
    in_flight: u32,
    after: AfterResize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MoveStep {
    /// Writes in flight end.
    Drain,
    /// A superblock that calls for a full sync is written at the new place.
    Stamp,
    /// Bitmap and log are written at the new place.
    Copy,
    /// The superblock is written at the new place.
    Switch,
    /// The old superblock is erased.
    Erase,
}

/// The disk as it was found now, and what that means for the metadata.
pub(crate) enum Found {
    /// Nothing moves; the limits may have changed.
    Same,
    /// The metadata belong somewhere else.
    Moved(Layout),
}

impl LocalDisk {
    /// What a new look at the disk means; an error if it has become smaller.
    pub(crate) fn compare_info(&self, info: &DiskInfo) -> Result<Found, String> {
        let Some(layout) = self.layout.as_ref() else {
            return Ok(Found::Same);
        };
        if info.meta_bytes < self.info.meta_bytes || info.data_bytes < self.info.data_bytes {
            return Err(format!(
                "{}: the disk has shrunk from {} to {} bytes under the volume",
                self.data_path, self.info.data_bytes, info.data_bytes
            ));
        }
        if info.meta_bytes == self.info.meta_bytes {
            return Ok(Found::Same);
        }
        let new = Layout::new(placement(self.index), layout.geometry(), info.meta_bytes)
            .map_err(|e| format!("{}: {e}", self.data_path))?;
        match layout.placement() {
            Placement::Internal => Ok(Found::Moved(new)),
            // Nothing moves on a device of its own; more of it may be used.
            Placement::FlexExternal
                if new.al_byte() == layout.al_byte()
                    && new.bitmap_byte() == layout.bitmap_byte() =>
            {
                Ok(Found::Moved(new))
            }
            Placement::FlexExternal | Placement::Indexed(_) => Ok(Found::Same),
        }
    }

    /// The sizes of a handshake are what they will be after it: the disk is there, and no metadata move.
    pub(crate) fn may_be_told(&self) -> bool {
        matches!(self.phase, DiskPhase::Attached { .. })
            && !matches!(self.resize, Some(LocalResize::Move(_)))
    }

    /// Nothing is changed at present.
    pub(crate) fn may_resize(&self) -> bool {
        self.resize.is_none() && self.leaving.is_none()
    }
}

impl Resource {
    /// Gives the volume another size. `after` runs when that is durable here.
    pub(crate) fn change_size(
        &mut self,
        volume: VolumeNr,
        sectors: u64,
        area: NewArea,
        after: AfterResize,
    ) {
        if self.queue_size(volume, sectors, area, &after) {
            return;
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let old = device.size_sectors;
        device.size_sectors = sectors;
        if sectors < old {
            // Writes that the peers sent before they knew still come.
            device.growth.shrunk_from = device.growth.shrunk_from.max(old);
        }
        let mut bits_first = false;
        let mut has_more_bits = false;
        let waits = !planted!(self, SizeBeforeBits);
        let resyncs = !planted!(self, NewAreaUnmarked);
        let attached = match device.attached_mut() {
            Some(disk) => {
                let shape = disk.layout.as_ref().map(|l| l.bitmap_shape(sectors));
                let loaded = disk.io.bitmap.shape().bits();
                // A disk that was away may have been larger than the volume is by now.
                has_more_bits = shape.as_ref().is_some_and(|s| s.bits() < loaded);
                if let Some(shape) = shape.filter(|s| s.bits() > loaded) {
                    disk.io
                        .bitmap
                        .resize(shape, matches!(area, NewArea::Resync) && resyncs);
                    bits_first = waits;
                }
                disk.io.al.freeze(true);
                disk.writer.changed += 1;
                disk.writer.hold = bits_first;
                true
            }
            None => false,
        };
        self.log(
            Level::Info,
            None,
            Some(volume),
            format!("size: {old} -> {sectors} sectors"),
        );
        self.event(Event::Device(volume));
        if !attached {
            self.resized(volume, after);
            return;
        }
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.resize = Some(LocalResize::Size {
                shrinks: sectors < old || has_more_bits,
                after,
            });
        }
        if bits_first {
            self.write_bitmap(volume, BitmapThen::Resized);
        } else {
            self.after_superblock(volume, AfterMeta::Resized);
        }
        if sectors != old {
            self.end_bitmap_exchanges(volume);
        }
    }

    /// A bitmap that is on its way has the length of the old size: the receiver would wait for its end
    /// for ever, or take it for too long. The handshake after a reconnect begins with equal sizes.
    fn end_bitmap_exchanges(&mut self, volume: VolumeNr) {
        for peer in self.established_peers().iter() {
            let repl = self.state.peer_device(volume, peer).repl;
            let exchanges = matches!(repl, ReplState::WfBitmapS | ReplState::WfBitmapT);
            if exchanges && !planted!(self, SizeDuringExchange) {
                let text = "the size has changed while bitmaps were exchanged: connecting anew";
                self.log(Level::Info, Some(peer), Some(volume), text.into());
                self.drop_connection(peer, ConnState::NetworkFailure);
            }
        }
    }

    /// The bits of the new area are on disk: the size may follow.
    pub(crate) fn new_bits_written(&mut self, volume: VolumeNr) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        if matches!(disk.resize, Some(LocalResize::Size { .. })) {
            disk.writer.hold = false;
            self.after_superblock(volume, AfterMeta::Resized);
        }
    }

    /// While the size became durable the peer may have become the target of a third node, which it met. Then it
    /// does not begin with the new area either, and the two compare again.
    pub(crate) fn stays_with(&self, volume: VolumeNr, peer: NodeId, side: Side) -> bool {
        self.is_legacy(peer)
            || planted!(self, NewAreaWithoutSide)
            || self.state.peer_device(volume, peer).disk == DiskState::UpToDate
            || side == Side::Source && self.is_target_already(volume, peer)
    }

    /// The superblock with the new size, or at the new place, is durable.
    pub(crate) fn resize_durable(&mut self, volume: VolumeNr) {
        let keeps = planted!(self, ShrinkKeepsMarks);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let sectors = device.size_sectors;
        let Some(disk) = device.attached_mut() else {
            return;
        };
        match disk.resize.as_mut() {
            Some(LocalResize::Size { shrinks, .. }) => {
                if *shrinks
                    && !keeps
                    && let Some(layout) = disk.layout.as_ref()
                {
                    let shape = layout.bitmap_shape(sectors);
                    disk.io.bitmap.resize(shape, false);
                }
                self.local_resize_ends(volume);
            }
            Some(LocalResize::Move(job)) => {
                job.step = MoveStep::Erase;
                self.move_progress(volume);
            }
            None => {}
        }
    }

    /// Everything goes on.
    fn local_resize_ends(&mut self, volume: VolumeNr) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let Some(resize) = disk.resize.take() else {
            return;
        };
        let (LocalResize::Size { after, .. } | LocalResize::Move(Move { after, .. })) = resize;
        disk.io.hold_pages(false);
        disk.io.al.freeze(false);
        disk.writer.hold = false;
        self.run_page_jobs(volume);
        self.al_run(volume);
        self.schedule_bitmap_write(volume);
        self.write_superblock(volume);
        self.resized(volume, after);
        self.detach_progress(volume);
    }

    /// The disk goes while it is being changed: who waits hears of it.
    pub(crate) fn local_resize_gone(&mut self, volume: VolumeNr) {
        let resize = self
            .devices
            .get_mut(&volume)
            .and_then(|d| d.disk.as_mut())
            .and_then(|disk| disk.resize.take());
        if let Some(LocalResize::Size { after, .. } | LocalResize::Move(Move { after, .. })) =
            resize
        {
            self.resize_failed(volume, after);
        }
    }

    // Moving.

    /// Takes over what was found of the disk; moves the metadata if they belong elsewhere.
    pub(crate) fn adopt_info(
        &mut self,
        volume: VolumeNr,
        info: DiskInfo,
        found: Found,
        after: AfterResize,
    ) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        match found {
            Found::Same => {
                disk.info = info;
                self.resized(volume, after);
            }
            Found::Moved(layout) => {
                self.log(
                    Level::Info,
                    None,
                    Some(volume),
                    format!(
                        "the disk has grown to {} bytes; its metadata follow",
                        info.meta_bytes
                    ),
                );
                if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
                    disk.io.al.freeze(true);
                    disk.writer.changed += 1;
                    disk.writer.hold = true;
                    disk.resize = Some(LocalResize::Move(Move {
                        info,
                        layout,
                        step: MoveStep::Drain,
                        writes: VecDeque::new(),
                        in_flight: 0,
                        after,
                    }));
                }
                self.move_progress(volume);
            }
        }
    }

    /// Moves that waited for something which the last input has ended go on.
    pub(crate) fn settle_moves(&mut self) {
        let drains = |d: &crate::device::Device| {
            d.disk.as_ref().is_some_and(|disk| {
                matches!(&disk.resize, Some(LocalResize::Move(job)) if job.step == MoveStep::Drain)
            })
        };
        if self.devices.values().any(drains) {
            let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
            for volume in volumes {
                self.move_progress(volume);
            }
        }
    }

    /// A write of a move is done.
    pub(crate) fn move_written(&mut self, volume: VolumeNr, result: Result<(), DiskError>) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let Some(LocalResize::Move(job)) = disk.resize.as_mut() else {
            return;
        };
        job.in_flight -= 1;
        if result.is_err() {
            job.writes.clear();
            self.log(
                Level::Error,
                None,
                Some(volume),
                "moving the metadata failed".into(),
            );
            self.disk_failed(volume, DiskFault::Meta);
            return;
        }
        self.move_progress(volume);
    }

    fn move_progress(&mut self, volume: VolumeNr) {
        let hasty = planted!(self, MoveWithoutDrain);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let (drained, writes_superblock) = (disk.io.is_drained(), disk.writer.in_flight.is_some());
        let Some(LocalResize::Move(job)) = disk.resize.as_mut() else {
            return;
        };
        if job.step == MoveStep::Drain {
            if !(drained || hasty) || writes_superblock {
                return;
            }
            disk.io.hold_pages(true);
            self.move_starts(volume);
            return;
        }
        let mut start = Vec::new();
        while job.in_flight < MOVE_WRITES
            && let Some(op) = job.writes.pop_front()
        {
            job.in_flight += 1;
            start.push(op);
        }
        let idle = job.in_flight == 0;
        let step = job.step;
        for op in start {
            self.meta(volume, op, Pending::Move(volume));
        }
        if !idle {
            return;
        }
        match step {
            MoveStep::Stamp => self.move_copies(volume),
            MoveStep::Copy => self.move_switches(volume),
            MoveStep::Erase => self.local_resize_ends(volume),
            MoveStep::Drain | MoveStep::Switch => {}
        }
    }

    /// Nothing is in flight: the first writes at the new place.
    fn move_starts(&mut self, volume: VolumeNr) {
        let members = self.state.members;
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let Some(LocalResize::Move(job)) = disk.resize.as_ref() else {
            return;
        };
        let new = job.layout;
        let Some(old) = disk.layout else { return };
        if old.bitmap_byte() == new.bitmap_byte() {
            self.move_switches(volume);
            return;
        }
        let overlaps = new.bitmap_byte() < old.superblock_byte() + BLOCK_BYTES as u64;
        if !overlaps || planted!(self, MoveUnstamped) {
            self.move_copies(volume);
            return;
        }
        // The old areas are about to be overwritten: until the new ones are whole, everything
        // counts as different.
        let before = disk.generations.clone();
        for node in 0..NodeId::COUNT {
            let slot = disk.generations.slot_mut(NodeId(node));
            slot.flags.insert(PeerFlags::FULL_SYNC);
        }
        disk.generations
            .flags
            .insert(DeviceFlags::AL_CLEAN | DeviceFlags::AL_DISABLED);
        disk.layout = Some(new);
        if let Some(block) = disk.superblock.as_mut() {
            block.set_layout(&new);
        }
        let stamp = disk.encode_superblock(size, members, false);
        disk.generations = before;
        disk.layout = Some(old);
        if let Some(block) = disk.superblock.as_mut() {
            block.set_layout(&old);
        }
        let flush_data = disk.options.disk_flushes && !disk.info.write_through;
        if let Some(LocalResize::Move(job)) = disk.resize.as_mut() {
            job.step = MoveStep::Stamp;
            job.writes
                .extend(stamp.map(|(offset, bytes)| MetaOp::Write {
                    offset,
                    bytes,
                    flush_data,
                }));
        }
        self.move_progress(volume);
    }

    /// Bitmap and log, as they are in memory, go to the new place.
    fn move_copies(&mut self, volume: VolumeNr) {
        let erases = planted!(self, MoveErasesFirst);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let Some(LocalResize::Move(job)) = disk.resize.as_mut() else {
            return;
        };
        job.step = MoveStep::Copy;
        let bitmap = &mut disk.io.bitmap;
        bitmap.mark_all_changed();
        let all = bitmap.all_pages();
        while let Some(write) = bitmap.next_write(all.clone()) {
            bitmap.written(write.first_page);
            job.writes.push_back(MetaOp::Write {
                offset: job.layout.bitmap_byte() + write.first_page * BLOCK_BYTES as u64,
                bytes: write.bytes,
                flush_data: false,
            });
        }
        if erases && let Some(old) = disk.layout.as_ref() {
            job.writes.push_back(MetaOp::Write {
                offset: old.superblock_byte(),
                bytes: vec![0; BLOCK_BYTES],
                flush_data: false,
            });
        }
        let log = disk.io.al.rewrite();
        for (index, part) in log.chunks(MOVE_BYTES).enumerate() {
            job.writes.push_back(MetaOp::Write {
                offset: job.layout.al_byte() + (index * MOVE_BYTES) as u64,
                bytes: part.to_vec(),
                flush_data: false,
            });
        }
        self.move_progress(volume);
    }

    /// Everything is at the new place: the superblock says so.
    fn move_switches(&mut self, volume: VolumeNr) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let Some(LocalResize::Move(job)) = disk.resize.as_mut() else {
            return;
        };
        job.step = MoveStep::Switch;
        let Some(old) = disk.layout.replace(job.layout) else {
            return;
        };
        let new = job.layout;
        disk.info = job.info;
        if let Some(block) = disk.superblock.as_mut() {
            block.set_layout(&new);
        }
        disk.io.moved(new.al_byte(), new.bitmap_byte());
        let erase = old.superblock_byte();
        if erase < new.bitmap_byte()
            && erase != new.superblock_byte()
            && old.placement() == Placement::Internal
        {
            job.writes.push_back(MetaOp::Write {
                offset: erase,
                bytes: vec![0; BLOCK_BYTES],
                flush_data: false,
            });
        }
        disk.writer.hold = false;
        self.after_superblock(volume, AfterMeta::Resized);
    }

    /// Sectors that the disk of this volume could give it; a diskless node sets no limit.
    pub(crate) fn own_limit(&self, volume: VolumeNr) -> Option<u64> {
        let disk = self.devices.get(&volume)?.attached()?;
        Some(disk.usable_sectors())
    }

    /// The stored size, for where nothing better is known.
    pub(crate) fn stored_size(&self, volume: VolumeNr) -> Sector {
        self.devices
            .get(&volume)
            .and_then(|d| d.attached())
            .and_then(|d| d.superblock.as_ref())
            .map_or(Sector(0), |b| b.effective_size)
    }
}
