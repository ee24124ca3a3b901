//! Attach and detach: reading and checking the metadata, recovery after a crash, the size of a
//! volume (semantics.md, 8.3 and 22; metadata.md, 14).
//!
//! An unclean activity log is applied here, in an order that a second crash does not hurt: bits,
//! then the emptied log, then the superblock.

use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::al::{self, AlForm, Coverage, ReplayError};
use lockstep_format::disk::any::Format;
use lockstep_format::disk::layout::{self, Layout, Placement};
use lockstep_format::disk::v09::{DeviceFlags, PeerFlags, SuperBlock};
use lockstep_format::units::{Dagtag, NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState, UuidFlags};

use crate::command::{Answer, CommandError, ErrorCode, MetaIndex};
use crate::data::{BitmapThen, DiskIo, DiskIoGeometry};
use crate::device::{AfterMeta, Device, DiskPhase, LocalDisk, MetaWriter};
use crate::event::{CommandId, DiskCache, DiskError, DiskInfo, MetaOp, Output};
use crate::generation::Generations;
use crate::options::DiskOptions;
use crate::resource::{Pending, Resource};
use crate::state::State;
use crate::transition::Change;
use crate::twopc::WishKind;
use crate::uuids::is_real;

/// Largest single read of the bitmap in bytes.
const BITMAP_READ_BYTES: u64 = 1 << 20;
/// A Primary wrote to this disk, and no activity log was kept.
const UNLOGGED: DeviceFlags = DeviceFlags::PRIMARY_IND.union(DeviceFlags::AL_DISABLED);

/// An operation of an attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttachIo {
    /// The superblock is read.
    Superblock,
    /// The activity log is read.
    Al,
    /// A part of the bitmap is read, from this byte of its area on.
    Bitmap(u64),
    /// Recovered bits or the emptied log are written.
    Recover,
}

/// What is on its way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadStep {
    outstanding: u32,
    al: Vec<u8>,
    bitmap: Vec<(u64, Vec<u8>)>,
    recovered: bool,
    stamped: bool,
    log_emptied: bool,
}

/// How far a detach has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// Operations in flight end.
    Drain {
        /// The metadata are left clean.
        graceful: bool,
    },
    /// The bitmap is written.
    Bitmap,
    /// The superblock is written.
    Superblock,
}

impl LocalDisk {
    /// Largest size that this disk could give the volume, in sectors.
    pub fn usable_sectors(&self) -> u64 {
        self.layout
            .as_ref()
            .map_or(0, |l| l.usable_sectors(self.info.data_bytes / 512))
    }
}

pub(crate) fn placement(index: MetaIndex) -> Placement {
    match index {
        MetaIndex::Internal => Placement::Internal,
        MetaIndex::FlexExternal => Placement::FlexExternal,
        MetaIndex::Indexed(slot) => Placement::Indexed(slot),
    }
}

fn error(code: ErrorCode, text: String) -> CommandError {
    CommandError { code, text }
}

impl Resource {
    /// `attach`.
    pub(crate) fn command_attach(
        &mut self,
        id: CommandId,
        volume: VolumeNr,
        data_path: String,
        meta_path: Option<String>,
        index: MetaIndex,
        options: DiskOptions,
    ) {
        let Some(device) = self.devices.get(&volume) else {
            self.answer(id, Err(crate::admin::no_volume(volume)));
            return;
        };
        if device.disk.is_some() || self.state.disk(volume) != DiskState::Diskless {
            let text = format!("volume {volume} has a disk already; detach it first");
            self.answer(id, Err(error(ErrorCode::ERR_DISK_CONFIGURED, text)));
            return;
        }
        if let Err(refusal) = self.soft_change(Change::new().disk(volume, DiskState::Attaching)) {
            self.answer(id, Err(crate::twopc::command_error(refusal)));
            return;
        }
        let generations = Generations::just_created(self.node_id, 1);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let geometry = lockstep_format::disk::layout::Geometry::for_peers(1);
        device.disk = Some(LocalDisk {
            data_path: data_path.clone(),
            meta_path: meta_path.clone(),
            index,
            io: DiskIo::new(
                DiskIoGeometry {
                    al_offset_bytes: 0,
                    al: geometry.al,
                    bitmap_offset_bytes: 0,
                    bitmap: lockstep_format::disk::bitmap::BitmapShape::new(
                        0,
                        1,
                        geometry.bitmap_block,
                    ),
                },
                options.al_extents,
                options.al_updates,
                options.disk_flushes,
            ),
            options,
            info: DiskInfo {
                data_bytes: 0,
                meta_bytes: 0,
                logical_block_bytes: 512,
                physical_block_bytes: 4096,
                discard: false,
                discard_zeroes: false,
                discard_granularity_bytes: 0,
                max_discard_bytes: 0,
                write_through: false,
                persistent_memory: false,
                cache: DiskCache::MayBeLost,
            },
            phase: DiskPhase::Opening { command: id },
            format: Format::V09,
            superblock: None,
            layout: None,
            generations,
            crashed_primary: false,
            crashed_for: NodeMask::EMPTY,
            crashed_with: NodeMask::EMPTY,
            primary_lost_quorum: false,
            restore_quorum: false,
            degraded: NodeMask::EMPTY,
            missed_exposed: false,
            leaving: None,
            forced: false,
            abandoned: false,
            suspect: None,
            resize: None,
            writer: MetaWriter::default(),
        });
        let tag = self.tags.insert(Pending::Open(volume));
        self.output(Output::OpenDisk {
            tag,
            volume,
            data_path,
            meta_path,
        });
    }

    pub(crate) fn disk_opened(&mut self, volume: VolumeNr, result: Result<DiskInfo, String>) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        let DiskPhase::Opening { command } = disk.phase else {
            return;
        };
        let info = match result {
            Ok(info) => info,
            Err(text) => {
                if let Some(device) = self.devices.get_mut(&volume) {
                    device.disk = None;
                }
                self.hard_change(Change::new().disk(volume, DiskState::Diskless));
                self.answer(command, Err(error(ErrorCode::ERR_OPEN_DISK, text)));
                return;
            }
        };
        disk.info = info;
        if let Some(device) = self.devices.get_mut(&volume) {
            device.growth.looks.opened();
        }
        if self.state.disk(volume) != DiskState::Attaching {
            self.attach_taken_back(volume);
            return;
        }
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        let Some(sector) = layout::superblock_sector(placement(disk.index), info.meta_bytes) else {
            let text = format!(
                "{}: {} bytes are too few for metadata",
                disk.meta_path.as_ref().unwrap_or(&disk.data_path),
                info.meta_bytes
            );
            self.attach_failed(volume, error(ErrorCode::ERR_MD_DISK_TOO_SMALL, text));
            return;
        };
        disk.phase = DiskPhase::Reading {
            command,
            step: ReadStep {
                outstanding: 1,
                ..ReadStep::default()
            },
        };
        self.meta(
            volume,
            MetaOp::Read {
                offset: sector * 512,
                len: BLOCK_BYTES as u32,
            },
            Pending::AttachRead(volume, AttachIo::Superblock),
        );
    }

    /// An attach cannot go on: the disk is closed, the command gets the cause.
    fn attach_failed(&mut self, volume: VolumeNr, cause: CommandError) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        let command = match &disk.phase {
            DiskPhase::Opening { command } | DiskPhase::Reading { command, .. } => Some(*command),
            DiskPhase::Attached { command } | DiskPhase::Closing { command } => *command,
        };
        disk.phase = DiskPhase::Closing { command: None };
        if let Some(command) = command {
            self.answer(command, Err(cause));
        }
        let tag = self.tags.insert(Pending::Close(volume));
        self.output(Output::CloseDisk { tag, volume });
    }

    /// The disk was detached before it was attached.
    fn attach_taken_back(&mut self, volume: VolumeNr) {
        let text = format!("volume {volume}: detached while it was being attached");
        self.attach_failed(volume, error(ErrorCode::ERR_IO_MD_DISK, text));
    }

    /// The superblock of a disk that is being attached cannot be written.
    pub(crate) fn attach_cannot_write(&mut self, volume: VolumeNr) {
        let text = format!("volume {volume}: writing its metadata failed");
        self.attach_failed(volume, error(ErrorCode::ERR_IO_MD_DISK, text));
    }

    /// A metadata operation of an attach is done.
    pub(crate) fn attach_io_done(
        &mut self,
        volume: VolumeNr,
        io: AttachIo,
        result: Result<Vec<u8>, DiskError>,
    ) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        let path = disk
            .meta_path
            .clone()
            .unwrap_or_else(|| disk.data_path.clone());
        let DiskPhase::Reading { step, .. } = &mut disk.phase else {
            return;
        };
        let bytes = match result {
            Ok(bytes) => bytes,
            Err(cause) => {
                let text = format!("{path}: metadata IO failed: {cause:?}");
                self.attach_failed(volume, error(ErrorCode::ERR_IO_MD_DISK, text));
                return;
            }
        };
        step.outstanding -= 1;
        match io {
            AttachIo::Superblock => {
                if let Err(cause) = self.superblock_read(volume, &path, &bytes) {
                    self.attach_failed(volume, cause);
                }
                return;
            }
            AttachIo::Al => step.al = bytes,
            AttachIo::Bitmap(at) => step.bitmap.push((at, bytes)),
            AttachIo::Recover => {}
        }
        if step.outstanding > 0 {
            return;
        }
        let next = match (step.recovered, step.stamped, step.log_emptied) {
            (false, ..) => self.recover(volume, &path),
            (true, false, _) => self.stamp_clean(volume),
            (true, true, false) => self.empty_log(volume),
            (true, true, true) => {
                self.metadata_ready(volume);
                return;
            }
        };
        if let Err(cause) = next {
            self.attach_failed(volume, cause);
        }
    }

    fn superblock_read(
        &mut self,
        volume: VolumeNr,
        path: &str,
        bytes: &[u8],
    ) -> Result<(), CommandError> {
        let node_id = self.node_id;
        let invalid = |text: String| error(ErrorCode::ERR_MD_INVALID, text);
        let block: &[u8; BLOCK_BYTES] = bytes
            .try_into()
            .map_err(|_| invalid(format!("{path}: the superblock could not be read whole")))?;
        let (format, superblock) = self.decode_superblock(volume, path, block)?;
        let in_use = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return Ok(());
        };
        let layout = superblock
            .layout(placement(disk.index), disk.info.meta_bytes)
            .map_err(|e| invalid(format!("{path}: {e}")))?;
        if superblock.node_id.is_some_and(|n| n != node_id) {
            return Err(error(
                ErrorCode::ERR_INVALID_REQUEST,
                format!(
                    "{path}: the metadata belong to node {}, but this is node {node_id}",
                    superblock.node_id.unwrap_or(node_id)
                ),
            ));
        }
        let usable = layout.usable_sectors(disk.info.data_bytes / 512);
        if superblock.flags.contains(DeviceFlags::CONSISTENT)
            && usable < superblock.effective_size.0
            && disk.options.size_sectors.is_none_or(|s| s > usable)
        {
            return Err(error(
                ErrorCode::ERR_IMPLICIT_SHRINK,
                format!(
                    "{}: {usable} usable sectors, but the volume has {} with good data",
                    disk.data_path, superblock.effective_size.0
                ),
            ));
        }
        if usable < in_use {
            return Err(error(
                ErrorCode::ERR_DISK_TOO_SMALL,
                format!(
                    "{}: {usable} usable sectors, but the volume has {in_use}; enlarge the disk, or \
                     make the volume smaller first",
                    disk.data_path
                ),
            ));
        }
        let mut generations = Generations::from_superblock(&superblock, node_id);
        self.undo_unmade(volume, &mut generations);
        // It is still set after a crash as Primary. Kernels compare slots with it, and would take the
        // one that this generation goes to for unknown: everything would be copied.
        generations.set_primary_bit(self.state.role);
        if self.serves_newer_data(volume, &generations, &self.state) {
            return Err(self.data_not_current(volume, path, generations.current));
        }
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return Ok(());
        };
        let geometry = layout.geometry();
        let shape = layout.bitmap_shape(superblock.effective_size.0.min(usable));
        disk.io = DiskIo::new(
            DiskIoGeometry {
                al_offset_bytes: layout.al_byte(),
                al: geometry.al,
                bitmap_offset_bytes: layout.bitmap_byte(),
                bitmap: shape,
            },
            disk.options.al_extents,
            disk.options.al_updates,
            disk.options.disk_flushes && !disk.info.write_through,
        );
        #[cfg(feature = "planted")]
        disk.io.plant(self.planted);
        disk.crashed_primary = superblock.flags.contains(DeviceFlags::CRASHED_PRIMARY)
            && !planted!(self, CrashedPrimaryForgotten);
        disk.primary_lost_quorum = superblock.flags.contains(DeviceFlags::PRIMARY_LOST_QUORUM)
            && !planted!(self, LostQuorumForgotten);
        disk.crashed_for = match disk.crashed_primary || disk.primary_lost_quorum {
            true => (0..NodeId::COUNT).map(NodeId).collect(),
            false => NodeMask::EMPTY,
        };
        disk.restore_quorum = superblock
            .flags
            .contains(DeviceFlags::HAVE_QUORUM | DeviceFlags::WAS_UP_TO_DATE)
            && (superblock.members == NodeMask::of(node_id)
                || planted!(self, LonelyQuorumRestored));
        disk.degraded = NodeMask::EMPTY;
        if superblock.flags.contains(DeviceFlags::PRIMARY_IND) {
            for peer in (0..NodeId::COUNT).map(NodeId) {
                if !generations.slot(peer).flags.contains(PeerFlags::CONNECTED) {
                    disk.degraded.insert(peer);
                }
            }
        }
        disk.generations = generations;
        disk.note_crash();
        self.caches_unnoted = true;
        if !disk.restore_quorum {
            // Until the nodes are counted anew: superblocks of an attach that is cut short name no
            // other member, and would make a last man standing of this node.
            disk.generations.flags.remove(DeviceFlags::HAVE_QUORUM);
        }
        disk.format = format;
        disk.writer.size_named = superblock.effective_size.0 != 0;
        disk.superblock = Some(superblock);
        let al_byte = layout.al_byte();
        let al_len = geometry.al.bytes() as u32;
        let bitmap_byte = layout.bitmap_byte();
        let bitmap_len = shape.used_bytes().next_multiple_of(BLOCK_BYTES as u64);
        let bitmap_len = if shape.bits() == 0 { 0 } else { bitmap_len };
        disk.layout = Some(layout);
        let mut reads = vec![(
            MetaOp::Read {
                offset: al_byte,
                len: al_len,
            },
            AttachIo::Al,
        )];
        let mut at = 0;
        while at < bitmap_len {
            let len = (bitmap_len - at).min(BITMAP_READ_BYTES);
            reads.push((
                MetaOp::Read {
                    offset: bitmap_byte + at,
                    len: len as u32,
                },
                AttachIo::Bitmap(at),
            ));
            at += len;
        }
        if let DiskPhase::Reading { step, .. } = &mut disk.phase {
            step.outstanding = reads.len() as u32;
        }
        for (op, io) in reads {
            self.meta(volume, op, Pending::AttachRead(volume, io));
        }
        self.log_lost_cache(volume);
        self.choose_form(volume, path);
        Ok(())
    }

    /// Everything is read: bits are loaded, an unclean log is applied, new space is marked.
    fn recover(&mut self, volume: VolumeNr, path: &str) -> Result<(), CommandError> {
        let peers: Vec<(NodeId, bool)> = self
            .devices
            .get(&volume)
            .map(|d| {
                d.peers
                    .iter()
                    .map(|(n, pd)| (*n, pd.options.bitmap))
                    .collect()
            })
            .unwrap_or_default();
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return Ok(());
        };
        let DiskPhase::Reading { step, .. } = &mut disk.phase else {
            return Ok(());
        };
        let (Some(layout), Some(superblock)) = (disk.layout.as_ref(), disk.superblock.as_ref())
        else {
            return Ok(());
        };
        step.recovered = true;
        for (at, bytes) in core::mem::take(&mut step.bitmap) {
            disk.io.bitmap.load(at, &bytes);
        }
        let slots = 0..disk.io.bitmap.shape().slots();
        let unmarked: Vec<bool> = slots.map(|s| disk.io.bitmap.count(s) == 0).collect();
        let mut of_log = Vec::new();
        let al_area = core::mem::take(&mut step.al);
        // Nobody wrote: then other programs that know v08 empty the log unread, and so must this,
        // as a kernel leaves it behind at a clean end, too.
        let unused =
            disk.format == Format::V08 && !superblock.flags.contains(DeviceFlags::PRIMARY_IND);
        if !superblock.is_clean() && !unused && !planted!(self, LogNotReplayed) {
            let geometry = layout.geometry().al;
            let replayed = match (disk.format, AlForm::of(&al_area, geometry, false)) {
                (Format::V09, AlForm::PersistentMemory) => Ok(al::replay_persistent_memory(
                    &al_area,
                    superblock.al_extents,
                )),
                _ => al::replay(&al_area, geometry),
            };
            let replay = match replayed {
                Ok(replay) => Some(replay),
                // Each attach rewrites the log; cut in between, it may hold nothing whole. Then
                // nothing is known, which is safe to repair by copying everything.
                Err(ReplayError::NoData | ReplayError::NoTransaction { .. }) => None,
                Err(e) => {
                    return Err(error(
                        ErrorCode::ERR_MD_UNCLEAN,
                        format!("{path}: the activity log cannot be applied: {e}"),
                    ));
                }
            };
            if let Some(replay) = replay
                && matches!(replay.coverage, Coverage::Complete)
            {
                let size = disk.io.bitmap.shape().bits();
                let missed = usize::from(planted!(self, ReplayMissesExtent));
                for extent in replay.active.iter().skip(missed) {
                    let bits = disk.io.bitmap.extent_bits(*extent);
                    let last = u64::from(planted!(self, ReplayLeavesLastBlock));
                    let bits = bits.start.min(size)..bits.end.min(size) - last;
                    let slots = match planted!(self, LogMarksFirstPeer) {
                        true => 0..1,
                        false => 0..disk.io.bitmap.shape().slots(),
                    };
                    for slot in slots {
                        disk.io.bitmap.set_bits(slot, bits.clone());
                    }
                }
            } else {
                for slot in 0..disk.io.bitmap.shape().slots() {
                    disk.io.bitmap.fill(slot, true);
                }
            }
            let no_log = superblock.flags.contains(
                DeviceFlags::CRASHED_PRIMARY | DeviceFlags::PRIMARY_IND | DeviceFlags::AL_DISABLED,
            );
            if no_log && !planted!(self, DisabledLogTrusted) {
                for slot in 0..disk.io.bitmap.shape().slots() {
                    disk.io.bitmap.fill(slot, true);
                }
            } else if superblock.flags.contains(UNLOGGED) {
                // A Primary wrote here, and which blocks is known where else it wrote. A peer that was
                // left behind at a generation has none of them: the marks were in this node's memory.
                for peer in &superblock.peers {
                    if let Some(slot) = peer.bitmap_index
                        && is_real(peer.bitmap_uuid)
                    {
                        disk.io.bitmap.fill(slot, true);
                    }
                }
            }
        }
        if !superblock.is_clean() && !superblock.flags.contains(DeviceFlags::CONSISTENT) {
            // What this disk lacks of its source differs from every other disk that has it by now, and
            // towards a node that was connected those marks were in memory only.
            let slots: Vec<u8> = superblock
                .peers
                .iter()
                .filter_map(|p| p.bitmap_index)
                .collect();
            for source in &slots {
                for slot in slots.iter().filter(|s| *s != source) {
                    disk.io.bitmap.merge_slot(*source, *slot);
                }
            }
        }
        for (peer, wants) in peers {
            let slot = if wants {
                disk.generations.allocate_slot(peer)
            } else {
                None
            };
            let held = disk.generations.slot(peer).bitmap_index;
            if wants && slot.is_none() && held.is_none() {
                return Err(error(
                    ErrorCode::ERR_INVALID_REQUEST,
                    format!(
                        "{path}: the metadata have {} bitmap slots, all taken; node {peer} needs \
                         one; run `drbdadm create-md --max-peers` after a backup, or forget-peer",
                        disk.generations.max_peers
                    ),
                ));
            }
            let index = slot.or(held);
            disk.io.set_slot(peer, index);
            if let Some(slot) = index
                && disk
                    .generations
                    .slot(peer)
                    .flags
                    .contains(PeerFlags::FULL_SYNC)
                && !planted!(self, FullSyncFlagIgnored)
            {
                disk.io.bitmap.fill(slot, true);
            } else if let Some(slot) = index
                && unmarked.get(usize::from(slot)) == Some(&true)
            {
                of_log.push(peer);
            }
        }
        let no_bitmap = !disk.options.bitmap;
        if no_bitmap || superblock_calls_for_all(&disk.generations) {
            // A move of the metadata was cut; also what no node has a slot for is not known. Nor is it of a disk
            // that does without a bitmap.
            for slot in 0..disk.io.bitmap.shape().slots() {
                disk.io.bitmap.fill(slot, true);
            }
            of_log.clear();
        }
        if let Some(device) = self.devices.get_mut(&volume) {
            for (peer, pd) in &mut device.peers {
                pd.marks_of_log = of_log.contains(peer);
            }
        }
        self.write_recovered(volume)
    }

    /// Writes the bits that the recovery has set.
    fn write_recovered(&mut self, volume: VolumeNr) -> Result<(), CommandError> {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return Ok(());
        };
        let DiskPhase::Reading { step, .. } = &mut disk.phase else {
            return Ok(());
        };
        let Some(layout) = disk.layout.as_ref() else {
            return Ok(());
        };
        let base = layout.bitmap_byte();
        let mut writes = Vec::new();
        let all = disk.io.bitmap.all_pages();
        while let Some(write) = disk.io.bitmap.next_write(all.clone()) {
            disk.io.bitmap.written(write.first_page);
            writes.push(MetaOp::Write {
                offset: base + write.first_page * BLOCK_BYTES as u64,
                bytes: write.bytes,
                flush_data: false,
            });
        }
        step.outstanding = writes.len() as u32;
        let none = writes.is_empty();
        if planted!(self, RecoveryStampsEarly) {
            for op in writes {
                self.meta(volume, op, Pending::Handler);
            }
            return self.stamp_clean(volume);
        }
        for op in writes {
            self.meta(volume, op, Pending::AttachRead(volume, AttachIo::Recover));
        }
        if none {
            self.stamp_clean(volume)
        } else {
            Ok(())
        }
    }

    /// The bits are durable, so the log does not count any more. It is said before the log is
    /// overwritten: a log that is cut in the middle of that would not be readable.
    fn stamp_clean(&mut self, volume: VolumeNr) -> Result<(), CommandError> {
        let members = self.state.members;
        let unflushed = planted!(self, RecoveryWithoutFlush);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return Ok(());
        };
        let DiskPhase::Reading { step, .. } = &mut disk.phase else {
            return Ok(());
        };
        step.stamped = true;
        if disk.superblock.as_ref().is_some_and(SuperBlock::is_clean) {
            return self.empty_log(volume);
        }
        step.outstanding = 1;
        // What this disk's writes of an earlier life left in its cache may be lost until it is
        // flushed, and only the log said so: the bits that come from it are cleared by a resync
        // that reads the cache.
        let flush_data = disk.options.disk_flushes && !disk.info.write_through && !unflushed;
        disk.generations.flags.insert(DeviceFlags::AL_CLEAN);
        if let Some((offset, bytes)) = disk.encode_superblock(0, members, false) {
            let op = MetaOp::Write {
                offset,
                bytes,
                flush_data,
            };
            self.meta(volume, op, Pending::AttachRead(volume, AttachIo::Recover));
        }
        Ok(())
    }

    /// Writes an empty log: what it held is in the bitmap now.
    fn empty_log(&mut self, volume: VolumeNr) -> Result<(), CommandError> {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return Ok(());
        };
        let DiskPhase::Reading { step, .. } = &mut disk.phase else {
            return Ok(());
        };
        let Some(layout) = disk.layout.as_ref() else {
            return Ok(());
        };
        step.log_emptied = true;
        step.outstanding = 1;
        if let Some(op) = disk.empty_slots() {
            self.meta(volume, op, Pending::AttachRead(volume, AttachIo::Recover));
            return Ok(());
        }
        let blocks = layout.geometry().al.blocks() as usize;
        let mut bytes = vec![0u8; blocks * BLOCK_BYTES];
        if let Some((first, others)) = bytes.split_first_chunk_mut() {
            al::encode_initialised(first);
            for block in others.chunks_exact_mut(BLOCK_BYTES) {
                block.copy_from_slice(first);
            }
        }
        let op = MetaOp::Write {
            offset: layout.al_byte(),
            bytes,
            flush_data: false,
        };
        self.meta(volume, op, Pending::AttachRead(volume, AttachIo::Recover));
        Ok(())
    }

    /// Applications of this Primary saw newer data than those of a disk, and nobody is there who
    /// could bring it up to date (semantics.md, 6). It is asked again when the disk comes into use,
    /// because such a node may have been lost meanwhile. A disk that was given up while this node
    /// wrote its next generation there may have that one all the same.
    pub(crate) fn serves_newer_data(
        &self,
        volume: VolumeNr,
        on_disk: &Generations,
        state: &State,
    ) -> bool {
        let exposed = self
            .devices
            .get(&volume)
            .map_or(Uuid::ZERO, |d| d.exposed_uuid);
        let current_elsewhere = state.devices.get(&volume).is_some_and(|d| {
            d.peers
                .values()
                .any(|p| p.repl > ReplState::Off && p.disk == DiskState::UpToDate)
        });
        state.role == lockstep_format::wire::Role::Primary
            && !exposed.is_zero()
            && !current_elsewhere
            && !on_disk.knows(exposed)
            && !self.was_kept_alone(volume, on_disk)
    }

    fn data_not_current(&self, volume: VolumeNr, path: &str, current: Uuid) -> CommandError {
        let exposed = self
            .devices
            .get(&volume)
            .map_or(Uuid::ZERO, |d| d.exposed_uuid);
        error(
            ErrorCode::ERR_DATA_NOT_CURRENT,
            format!(
                "{path}: holds data of generation {current}, but this Primary served generation \
                 {exposed}; connect a node that has these, or demote this one first"
            ),
        )
    }

    /// The metadata are in memory and recovered: the disk takes part from now on.
    fn metadata_ready(&mut self, volume: VolumeNr) {
        let keeps_clean = planted!(self, CleanFlagStays);
        let node_id = self.node_id;
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let announced = device.announced.clone();
        let Some(disk) = device.disk.as_mut() else {
            return;
        };
        let DiskPhase::Reading { command, .. } = disk.phase else {
            return;
        };
        disk.phase = DiskPhase::Attached {
            command: Some(command),
        };
        if let Some(block) = disk.superblock.as_mut() {
            block.node_id = Some(node_id);
        }
        for uuid in announced {
            disk.generations.note_planned(uuid);
        }
        self.take_kept_generation(volume);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        // The bits that a full sync calls for are on disk now.
        let all = superblock_calls_for_all(&disk.generations);
        for node in (0..NodeId::COUNT).map(NodeId) {
            if all || disk.io.slot(node).is_some() {
                let slot = disk.generations.slot_mut(node);
                slot.flags.remove(PeerFlags::FULL_SYNC);
            }
        }
        if !keeps_clean {
            disk.generations.flags.remove(DeviceFlags::AL_CLEAN);
        }
        disk.generations
            .flags
            .set(DeviceFlags::AL_DISABLED, !disk.options.al_updates);
        let highest = (0..NodeId::COUNT)
            .map(|n| *disk.generations.slot(NodeId(n)))
            .filter(|slot| !slot.bitmap_uuid.is_zero())
            .map(|slot| slot.bitmap_dagtag)
            .max_by_key(|d| d.0)
            .unwrap_or(Dagtag(0));
        let jumps = highest.is_newer_than(self.io.dagtag) && !planted!(self, AttachKeepsDagtag);
        if jumps {
            self.io.dagtag = highest;
        }
        let old_size = disk
            .superblock
            .as_ref()
            .map_or(0, |b| b.effective_size.0)
            .min(disk.usable_sectors());
        if let Some(size) = self.new_size(volume) {
            self.apply_size(volume, old_size, size);
        }
        if jumps {
            self.tell_dagtag();
        }
        // No write may reach the log while the superblock still calls it clean.
        self.after_superblock(volume, AfterMeta::Attached);
    }

    /// The superblock says that the disk is in use: it takes part.
    pub(crate) fn attach_stamped(&mut self, volume: VolumeNr) {
        if self.state.disk(volume) != DiskState::Attaching {
            return;
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        device.unmade = None;
        for pd in device.peers.values_mut() {
            pd.negotiation = None;
        }
        self.adopt_block_sizes(volume);
        let with_disk = self.state.devices.get(&volume).is_some_and(|d| {
            d.peers
                .values()
                .any(|p| p.repl > ReplState::Off && p.disk > DiskState::Diskless)
        });
        if with_disk {
            self.wish(WishKind::Attach(volume), None);
        } else {
            self.attach_alone(volume);
        }
    }

    /// No connected peer has a disk: the metadata say what this one is worth.
    pub(crate) fn attach_alone(&mut self, volume: VolumeNr) {
        let attached = self.devices.get(&volume).and_then(|d| d.attached());
        if let Some(disk) =
            attached.filter(|disk| self.serves_newer_data(volume, &disk.generations, &self.state))
        {
            let cause = self.data_not_current(volume, &disk.data_path, disk.generations.current);
            self.attach_failed(volume, cause);
            return;
        }
        let disk_state = self.disk_state_from_metadata(volume);
        let missed = disk_state == DiskState::Outdated && self.only_missed_exposed(volume);
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.missed_exposed = missed;
        }
        let mut change = Change::new().disk(volume, disk_state);
        let outdated: Vec<NodeId> = self
            .devices
            .get(&volume)
            .map(|d| {
                d.peers
                    .keys()
                    .copied()
                    .filter(|n| self.slot_is_outdated(volume, *n))
                    .collect()
            })
            .unwrap_or_default();
        for peer in outdated {
            if self.state.peer_device(volume, peer).disk == DiskState::DUnknown {
                change = change.peer_disk(volume, peer, DiskState::Outdated);
            }
        }
        self.hard_change(change);
        self.attach_finished(volume);
    }

    /// The disk's state is decided; the attach command is answered when it is durable.
    pub(crate) fn attach_finished(&mut self, volume: VolumeNr) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        let DiskPhase::Attached { command } = &mut disk.phase else {
            return;
        };
        let Some(command) = command.take() else {
            return;
        };
        match self.state.disk(volume) {
            DiskState::Detaching | DiskState::Diskless | DiskState::Failed => {
                let text = format!(
                    "volume {volume}: every connected peer has data that have diverged from \
                     this disk"
                );
                self.answer(command, Err(error(ErrorCode::ERR_DATA_NOT_CURRENT, text)));
            }
            _ => {
                if let Some(device) = self.devices.get_mut(&volume) {
                    device.lost_disk = None;
                }
                self.answer(command, Ok(Answer::Done));
            }
        }
    }

    /// The two-phase commit of an attach ended in a refusal.
    pub(crate) fn attach_refused(&mut self, volume: VolumeNr, cause: CommandError) {
        let device = self.devices.get(&volume);
        // Not what is being read now: that is another attach.
        if device.is_some_and(|d| d.attached().is_some())
            && self.state.disk(volume) == DiskState::Attaching
        {
            self.attach_failed(volume, cause);
        }
    }

    // Detach.

    /// The disk state says that the disk goes.
    pub(crate) fn begin_detach(&mut self, volume: VolumeNr) {
        let graceful = self.state.disk(volume) == DiskState::Detaching;
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            self.hard_change(Change::new().disk(volume, DiskState::Diskless));
            return;
        };
        match disk.phase {
            // What is not attached yet needs no leave: the attach fails. While the disk is being
            // opened there is nothing to close; `disk_opened` looks.
            DiskPhase::Reading { .. } => {
                self.attach_taken_back(volume);
                return;
            }
            DiskPhase::Opening { .. } | DiskPhase::Closing { .. } => return,
            DiskPhase::Attached { .. } if disk.leaving.is_some() => return,
            DiskPhase::Attached { .. } => {}
        }
        disk.leaving = Some(Leaving::Drain { graceful });
        if !graceful {
            self.give_up_unmade(volume);
            self.disk_is_lost(volume);
        }
        self.detach_progress(volume);
    }

    /// Detaches that waited for something which the last input has ended go on.
    pub(crate) fn settle_detaches(&mut self) {
        let leaving = |d: &Device| d.disk.as_ref().is_some_and(|disk| disk.leaving.is_some());
        if self.devices.values().any(leaving) {
            let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
            for volume in volumes {
                self.detach_progress(volume);
            }
        }
    }

    /// Its metadata cannot be written any more: the disk leaves as it is.
    pub(crate) fn leave_ungracefully(&mut self, volume: VolumeNr) {
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut())
            && disk.leaving.is_some()
        {
            disk.leaving = Some(Leaving::Drain { graceful: false });
            self.detach_progress(volume);
        }
    }

    /// Looks whether a detach can go one step on.
    pub(crate) fn detach_progress(&mut self, volume: VolumeNr) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let pending = device.io.lower_pending;
        let Some(disk) = device.disk.as_mut() else {
            return;
        };
        let Some(leaving) = disk.leaving else { return };
        let writer_idle = disk.writer.in_flight.is_none();
        match leaving {
            Leaving::Drain { graceful: true } => {
                if pending > 0
                    || disk.resize.is_some()
                    || !disk.io.is_idle()
                    || self.local_requests_open(volume) && !planted!(self, DetachIgnoresRequests)
                {
                    return;
                }
                if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) {
                    disk.leaving = Some(Leaving::Bitmap);
                }
                match planted!(self, DetachWritesNoBitmap) {
                    true => self.bitmap_written(volume, BitmapThen::Detach),
                    false => self.write_bitmap(volume, BitmapThen::Detach),
                }
            }
            Leaving::Drain { graceful: false } => {
                if pending == 0 && writer_idle && disk.io.is_still() {
                    self.close_disk(volume);
                }
            }
            Leaving::Bitmap => {}
            Leaving::Superblock => {
                if writer_idle && disk.writer.durable == disk.writer.changed {
                    self.close_disk(volume);
                }
            }
        }
    }

    /// Bitmap pages that a procedure waits for are on disk.
    pub(crate) fn bitmap_written(&mut self, volume: VolumeNr, then: BitmapThen) {
        match then {
            BitmapThen::Detach => {
                let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
                    return;
                };
                if disk.leaving == Some(Leaving::Bitmap) {
                    disk.leaving = Some(Leaving::Superblock);
                    disk.generations.flags.insert(DeviceFlags::AL_CLEAN);
                    disk.parts_clean();
                    self.write_superblock(volume);
                    self.detach_progress(volume);
                }
            }
            BitmapThen::FullSync(peer) => self.full_sync_written(volume, peer),
            BitmapThen::Resized => self.new_bits_written(volume),
            BitmapThen::Target(peer) => self.replaced_marks_written(volume, peer),
            BitmapThen::Started(peer) => self.third_nodes_marked(volume, peer),
            BitmapThen::Invalidated => self.invalidated(volume),
            BitmapThen::Unreadable => self.unreadable_marked(volume),
            BitmapThen::Prepared(_) | BitmapThen::Nothing => {}
        }
    }

    fn close_disk(&mut self, volume: VolumeNr) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        let DiskPhase::Attached { command } = &mut disk.phase else {
            // It is being closed already, perhaps for an attach that still has to be answered.
            return;
        };
        disk.phase = DiskPhase::Closing {
            command: command.take(),
        };
        self.local_resize_gone(volume);
        self.data_disk_gone(volume);
        let tag = self.tags.insert(Pending::Close(volume));
        self.output(Output::CloseDisk { tag, volume });
    }

    pub(crate) fn disk_closed(&mut self, volume: VolumeNr) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let sets = device.disk.as_ref().map(|d| &d.generations);
        let exposed = sets.map_or(Uuid::ZERO, |s| s.current);
        if device.exposed_uuid.is_zero() && exposed != Uuid::JUST_CREATED {
            device.exposed_uuid = exposed;
        }
        if let Some(sets) = sets {
            // While it went, a peer may have taken the next generation already.
            if sets.current.same_generation(device.exposed_uuid) {
                device.left_behind.clear();
            }
            for old in sets.older() {
                if !device.left_behind.contains(&old) {
                    device.left_behind.push(old);
                }
            }
        }
        let mut unanswered = Vec::new();
        let command = device.disk.take().and_then(|d| {
            let waiting = d.writer.waiting.iter().map(|(_, then)| then);
            unanswered.extend(waiting.filter_map(AfterMeta::command));
            match d.phase {
                DiskPhase::Closing { command } => command,
                _ => None,
            }
        });
        self.hard_change(Change::new().disk(volume, DiskState::Diskless));
        // While it was there, peers were told its generation.
        self.vouch_for_all(volume);
        if let Some(command) = command {
            let text = format!("volume {volume}: the disk failed while it was being attached");
            self.answer(command, Err(error(ErrorCode::ERR_IO_MD_DISK, text)));
        }
        for command in unanswered {
            self.answer(command, Err(taken_away(volume)));
        }
    }

    /// UUIDs and state for peers when one of them attaches.
    pub(crate) fn answer_attaching_peer(&mut self, volume: VolumeNr, peer: NodeId) {
        self.send_uuids(peer, volume, UuidFlags::empty());
        let state = self.state.clone();
        self.send_state(peer, volume, &state);
    }
}

/// What a command hears that waited for metadata.
pub(crate) fn taken_away(volume: VolumeNr) -> CommandError {
    let text = format!("volume {volume}: the disk was taken away before its metadata were written");
    error(ErrorCode::ERR_IO_MD_DISK, text)
}

/// Every node's entry calls for a full sync: `drbdmeta invalidate`, or a move of the metadata.
pub(crate) fn superblock_calls_for_all(generations: &Generations) -> bool {
    (0..NodeId::COUNT)
        .map(NodeId)
        .all(|node| generations.slot(node).flags.contains(PeerFlags::FULL_SYNC))
}

/// A device's layout, for tools and tests.
pub fn layout_of(device: &Device) -> Option<&Layout> {
    device.disk.as_ref()?.layout.as_ref()
}
