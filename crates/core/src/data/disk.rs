//! What a volume's disk needs besides data: activity log, bitmap pages, flushes.

use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use lockstep_format::disk::bitmap::{BitmapShape, PAGE_BYTES};
use lockstep_format::disk::layout::AlGeometry;
use lockstep_format::units::{NodeId, NodeMask, Sector, VolumeNr};

use super::slab::Key;
use super::unsettled::Unsettled;
use super::{DataOp, DiskFault, Owner, Wake};
use crate::al::{ActivityLog, AlMode, AlPriority, Extents, Prepared};
use crate::bitmap::Bitmap;
use crate::event::{DiskError, DiskOp, MetaOp};
use crate::resource::{Pending, Resource};
use crate::time::Instant;

/// Where activity log and bitmap lie, and their shapes.
#[derive(Clone, Copy, Debug)]
pub struct DiskIoGeometry {
    /// First byte of the activity log on the metadata device.
    pub al_offset_bytes: u64,
    /// Shape of the activity log.
    pub al: AlGeometry,
    /// First byte of the bitmap on the metadata device.
    pub bitmap_offset_bytes: u64,
    /// Shape of the bitmap.
    pub bitmap: BitmapShape,
}

/// What follows when the bitmap has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapThen {
    /// Nothing.
    Nothing,
    /// A step of a detach.
    Detach,
    /// A step before the exchange with this peer.
    Prepared(NodeId),
    /// Another step of a full sync with this peer.
    FullSync(NodeId),
    /// A change of the size: the new bits come before the superblock that makes them count.
    Resized,
    /// Resync data of this peer may be acknowledged.
    Target(NodeId),
    /// A resync from this peer may begin.
    Started(NodeId),
    /// Everything is marked of a disk that was invalidated without a peer.
    Invalidated,
    /// A block that could not be read is marked.
    Unreadable,
}

/// Activity log, bitmap and flushes of one disk.
#[derive(Debug)]
pub struct DiskIo {
    geometry: DiskIoGeometry,
    /// The bitmap.
    pub bitmap: Bitmap,
    pub(crate) al: ActivityLog<Owner>,
    slots: [Option<u8>; NodeId::COUNT as usize],
    /// The activity-log transaction whose block is not written yet.
    prepared: Option<Prepared>,
    jobs: Vec<PageJob>,
    /// No bitmap page is written: the bitmap moves.
    hold_pages: bool,
    /// Flushes do something on this disk.
    flushes: bool,
    flushing: Option<Vec<FlushWaiter>>,
    flush_next: Vec<FlushWaiter>,
    /// Pages with marks towards third nodes that came with resync data and were not written yet.
    fresh_pages: BTreeSet<u64>,
    /// Writes of the bitmap.
    pub bitmap_writes: u64,
    /// Where the search for marks that a resync left behind goes on.
    pub(crate) left_marks_cursor: u64,
    /// The next such search compares nothing.
    pub(crate) asks_only: bool,
    /// A resync has ended, and until then third nodes are asked about what it left marked.
    pub(crate) asks_until: Option<Instant>,
    pub(crate) unsettled: Unsettled,
}

/// Who waits for a flush of the data device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushWaiter {
    /// A flush of a front end.
    App(Key),
    /// Epochs received from a peer.
    Epochs(NodeId, u64),
    /// Resync data received from a peer.
    Target(NodeId),
    /// Writes of the source that took the place of resync data.
    ResyncEnd(NodeId, u64),
    /// Blocks whose digests go to a peer.
    Hashed(NodeId),
    /// A write of a peer without a disk, which this disk alone has.
    LastCopy(NodeId, u64),
}

/// Bitmap pages that have to be written before something.
#[derive(Debug)]
struct PageJob {
    ranges: Vec<Range<u64>>,
    /// First pages of the writes that it waits for; none before they were started.
    writes: Option<BTreeSet<u64>>,
    /// One of its writes failed: it ends with the disk.
    failed: bool,
    then: JobThen,
}

#[derive(Clone, Copy, Debug)]
enum JobThen {
    AlBlock,
    Hook(BitmapThen),
}

impl DiskIo {
    /// The first thing that is only there while log or bitmap are written, for a checker outside.
    pub(crate) fn busy_with(&self) -> Option<&'static str> {
        let flags = [
            ("a log transaction to write", self.prepared.is_some()),
            ("writes of bitmap pages", !self.jobs.is_empty()),
            ("a hold of the bitmap's pages", self.hold_pages),
            ("a flush", self.flushing.is_some()),
            ("a flush to come", !self.flush_next.is_empty()),
        ];
        let mut set = flags.iter().filter(|(_, is_set)| *is_set);
        set.next().map(|(what, _)| *what)
    }

    /// An empty activity log and an all-clear bitmap; the attach loads the latter.
    pub fn new(geometry: DiskIoGeometry, al_extents: u32, al_updates: bool, flushes: bool) -> Self {
        let mode = if al_updates {
            AlMode::Logged
        } else {
            AlMode::Unlogged
        };
        DiskIo {
            bitmap: Bitmap::new(geometry.bitmap),
            al: ActivityLog::new(al_extents, geometry.al, mode),
            geometry,
            slots: [None; NodeId::COUNT as usize],
            prepared: None,
            left_marks_cursor: 0,
            asks_only: false,
            asks_until: None,
            unsettled: Unsettled::default(),
            jobs: Vec::new(),
            hold_pages: false,
            flushes,
            flushing: None,
            flush_next: Vec::new(),
            fresh_pages: BTreeSet::new(),
            bitmap_writes: 0,
        }
    }

    /// Log and bitmap have the resource's deliberate bug.
    #[cfg(feature = "planted")]
    pub(crate) fn plant(&mut self, bug: Option<crate::planted::Planted>) {
        (self.al.planted, self.bitmap.planted) = (bug, bug);
    }

    /// Says which bitmap slot belongs to a node.
    pub fn set_slot(&mut self, node: NodeId, slot: Option<u8>) {
        if let Some(entry) = self.slots.get_mut(usize::from(node.0)) {
            *entry = slot.filter(|s| *s < self.bitmap.shape().slots());
        }
    }

    /// The bitmap slot of a node.
    pub fn slot(&self, node: NodeId) -> Option<u8> {
        *self.slots.get(usize::from(node.0))?
    }

    /// Slots of a set of nodes; bit n is slot n.
    pub(crate) fn slot_mask(&self, nodes: NodeMask) -> u32 {
        nodes
            .iter()
            .filter_map(|n| self.slot(n))
            .fold(0, |mask, slot| mask | 1 << slot)
    }

    /// Marks a range in all slots because resync data from `source` replace it. What is new
    /// towards third nodes has to be durable before the source forgets that this disk was marked.
    pub(crate) fn mark_replaced(&mut self, source: NodeId, sector: Sector, size_bytes: u32) {
        let of_source = self.slot(source);
        let third = self.slots.iter().flatten().copied();
        let third = third.filter(|slot| Some(*slot) != of_source);
        let third = third.fold(0_u32, |mask, slot| mask | 1 << slot);
        for slot in 0..self.bitmap.shape().slots() {
            let news = self.bitmap.set_range(slot, sector, size_bytes);
            if news > 0 && third >> slot & 1 == 1 {
                self.note_fresh(sector, size_bytes);
            }
        }
    }

    /// Marks a range in a slot. A resync that replaces it may find it marked already, and has to wait for
    /// the mark all the same.
    pub(crate) fn mark(&mut self, slot: u8, sector: Sector, size_bytes: u32) -> u64 {
        let news = self.bitmap.set_range(slot, sector, size_bytes);
        if news > 0 && self.has_third_slots() {
            self.note_fresh(sector, size_bytes);
        }
        news
    }

    /// Marks a range in all slots but those of `except`; bit n is slot n.
    pub(crate) fn mark_all(&mut self, sector: Sector, size_bytes: u32, except: u32) {
        let news = self.bitmap.set_range_in_all(sector, size_bytes, except);
        if news > 0 && self.has_third_slots() && !planted!(self.bitmap, UnackedCountDurable) {
            self.note_fresh(sector, size_bytes);
        }
    }

    fn note_fresh(&mut self, sector: Sector, size_bytes: u32) {
        for extent in Extents::of(sector, size_bytes).iter() {
            self.fresh_pages.extend(self.bitmap.extent_pages(extent));
        }
    }

    /// Marks of a whole slot are new.
    pub(crate) fn note_slot_fresh(&mut self) {
        if !self.has_third_slots() || planted!(self.bitmap, SlotCountsDurable) {
            return;
        }
        let mut from = 0;
        while let Some(page) = self.bitmap.next_changed(from) {
            self.fresh_pages.insert(page);
            from = page + 1;
        }
    }

    /// Pages of a range with such marks that are not durable.
    fn fresh_pages_of(&self, sector: Sector, size_bytes: u32) -> Vec<Range<u64>> {
        let pages = Extents::of(sector, size_bytes).iter();
        pages
            .map(|extent| self.bitmap.extent_pages(extent))
            .filter(|pages| {
                self.fresh_pages.range(pages.clone()).next().is_some()
                    || (self.has_third_slots() && self.bitmap.is_writing_in(pages.clone()))
            })
            .collect()
    }

    fn has_third_slots(&self) -> bool {
        self.slots.iter().flatten().count() > 1
    }

    /// Nothing of the disk's bookkeeping is in flight.
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.prepared.is_none() && self.flushing.is_none()
    }

    /// Nothing is in flight; what still waits does so for a write that failed.
    pub(crate) fn is_still(&self) -> bool {
        let still = |job: &PageJob| job.writes.as_ref().is_none_or(BTreeSet::is_empty);
        self.flushing.is_none() && self.jobs.iter().all(still)
    }

    /// No write of log or bitmap is in flight or waits.
    pub(crate) fn is_drained(&self) -> bool {
        self.jobs.is_empty()
            && self.prepared.is_none()
            && self.al.is_settled()
            && !self.bitmap.is_writing_in(self.bitmap.all_pages())
    }

    /// Bitmap pages are written or not.
    pub(crate) fn hold_pages(&mut self, hold: bool) {
        self.hold_pages = hold;
    }

    /// The areas lie somewhere else from now on.
    pub(crate) fn moved(&mut self, al_offset_bytes: u64, bitmap_offset_bytes: u64) {
        self.geometry.al_offset_bytes = al_offset_bytes;
        self.geometry.bitmap_offset_bytes = bitmap_offset_bytes;
    }

    /// A flush of this disk does something.
    pub(crate) fn flushes(&self) -> bool {
        self.flushes
    }

    /// The activity log has moved.
    pub fn transactions(&self) -> u64 {
        self.al.transactions()
    }

    /// Requests wait for the activity log.
    pub fn al_suspended(&self) -> bool {
        self.al.has_waiters()
    }
}

impl Resource {
    /// References to the extents of a write; false if the owner has to wait for its wake-up.
    pub(crate) fn al_get(
        &mut self,
        volume: VolumeNr,
        sector: Sector,
        size_bytes: u32,
        owner: Owner,
    ) -> bool {
        let priority = match owner {
            Owner::Peer(..) => AlPriority::Peer,
            _ => AlPriority::Local,
        };
        let logged = match planted!(self, LogSkipsLastExtent) {
            true => 1,
            false => size_bytes,
        };
        let shared = self.is_shared() && !planted!(self, NoRoomForPeers);
        let Some(io) = self.disk_io(volume) else {
            return true;
        };
        io.al.keep_room_for_peers(shared);
        if io.al.get(Extents::of(sector, logged), owner, priority) {
            return true;
        }
        self.al_run(volume);
        false
    }

    /// Names the present log of a volume: references of an older one went with it.
    pub(crate) fn al_serial(&self, volume: VolumeNr) -> u64 {
        self.devices.get(&volume).map_or(0, |d| d.io.disk_serial)
    }

    /// Gives the references of a write back that were taken from the log named `serial`.
    pub(crate) fn al_put(&mut self, volume: VolumeNr, sector: Sector, size: u32, serial: u64) {
        if serial != self.al_serial(volume) {
            return;
        }
        let logged = match planted!(self, LogSkipsLastExtent) {
            true => 1,
            false => size,
        };
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        io.al.put(Extents::of(sector, logged));
        if io.al.has_waiters() {
            self.al_run(volume);
        }
    }

    pub(crate) fn al_run(&mut self, volume: VolumeNr) {
        let evicts_early = planted!(self, EvictBeforeBitmap);
        let wakes_early = planted!(self, DataBeforeActivityLog);
        let unfenced = planted!(self, SlotNotFenced);
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let mut ready = Vec::new();
        let prepared = io.al.prepare(&mut ready);
        if wakes_early || unfenced && io.al.is_in_place() {
            ready.append(io.al.granted_mut());
        }
        let starving = io.al.is_starving();
        if let Some(prepared) = prepared {
            let ranges = prepared
                .evicted
                .iter()
                .filter(|_| !evicts_early)
                .map(|e| io.bitmap.extent_pages(*e))
                .collect::<Vec<_>>();
            io.prepared = Some(prepared);
            io.jobs.push(PageJob {
                ranges,
                writes: None,
                failed: false,
                then: JobThen::AlBlock,
            });
        }
        self.io
            .wakes
            .extend(ready.into_iter().map(|owner| Wake::Al(volume, owner)));
        self.run_page_jobs(volume);
        if starving {
            self.al_starves(volume);
        }
    }

    /// Nobody gets an extent before a reference drops: settle what can be settled early.
    fn al_starves(&mut self, volume: VolumeNr) {
        self.close_epoch();
        self.queue_peer_ack();
        for peer in self.established() {
            self.confirm_early(volume, peer);
        }
    }

    /// Writes the changed pages of the whole bitmap, then does `then`.
    pub(crate) fn write_bitmap(&mut self, volume: VolumeNr, then: BitmapThen) {
        if then == BitmapThen::Detach && !planted!(self, DetachForgetsUnsettled) {
            self.mark_unsettled(volume);
        }
        let Some(io) = self.disk_io(volume) else {
            self.bitmap_written(volume, then);
            return;
        };
        let ranges = vec![io.bitmap.all_pages()];
        io.jobs.push(PageJob {
            ranges,
            writes: None,
            failed: false,
            then: JobThen::Hook(then),
        });
        self.run_page_jobs(volume);
    }

    /// The activity log is about to be forgotten: what it stands for becomes bits.
    fn mark_unsettled(&mut self, volume: VolumeNr) {
        let mut ranges = Vec::new();
        for key in &self.io.log {
            let Some(req) = self.io.requests.get(*key) else {
                continue;
            };
            if req.volume == volume {
                ranges.push((req.sector, req.size_bytes, req.ok.difference(req.unsettled)));
            }
        }
        for (sector, size, have) in ranges {
            self.set_out_of_sync(volume, sector, size, have);
        }
        self.apply_unacked(volume);
    }

    /// Writes what resync data of `peer` in these ranges marked towards third nodes; false if
    /// there is nothing to wait for.
    pub(crate) fn write_replaced(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        replaced: &[(Sector, u32)],
    ) -> bool {
        let Some(io) = self.disk_io(volume) else {
            return false;
        };
        let ranges: Vec<Range<u64>> = replaced
            .iter()
            .flat_map(|(sector, size_bytes)| io.fresh_pages_of(*sector, *size_bytes))
            .collect();
        if ranges.is_empty() {
            return false;
        }
        io.jobs.push(PageJob {
            ranges,
            writes: None,
            failed: false,
            then: JobThen::Hook(BitmapThen::Target(peer)),
        });
        self.run_page_jobs(volume);
        true
    }

    /// Writes the changed pages of all bitmaps.
    pub(crate) fn write_all_bitmaps(&mut self) {
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            self.write_bitmap(volume, BitmapThen::Nothing);
        }
    }

    /// `Timer::BitmapWrite`: bits that were cleared are written lazily.
    pub(crate) fn bitmap_write_timer(&mut self, volume: VolumeNr) {
        if self.disk_io(volume).is_some_and(|io| io.bitmap.is_dirty()) {
            self.write_bitmap(volume, BitmapThen::Nothing);
        }
    }

    pub(crate) fn run_page_jobs(&mut self, volume: VolumeNr) {
        let misses = planted!(self, PageWriteMissesBits);
        let mut done = Vec::new();
        let mut out = Vec::new();
        {
            let Some(io) = self.disk_io(volume) else {
                return;
            };
            if io.hold_pages {
                return;
            }
            let DiskIo {
                jobs,
                bitmap,
                fresh_pages,
                ..
            } = io;
            jobs.retain_mut(|job| {
                if job.writes.is_none() {
                    // A write in flight may lack the newest bits: wait for it, then write again.
                    if job.ranges.iter().any(|r| bitmap.is_writing_in(r.clone())) && !misses {
                        return true;
                    }
                    let mut writes = BTreeSet::new();
                    for range in &job.ranges {
                        while let Some(write) = bitmap.next_write(range.clone()) {
                            writes.insert(write.first_page);
                            let count = write.bytes.len() as u64 / PAGE_BYTES;
                            for page in write.first_page..write.first_page + count {
                                fresh_pages.remove(&page);
                            }
                            out.push(write);
                        }
                    }
                    job.writes = Some(writes);
                }
                let finished = !job.failed && job.writes.as_ref().is_some_and(BTreeSet::is_empty);
                if finished {
                    done.push(job.then);
                }
                !finished
            });
            io.bitmap_writes += out.len() as u64;
        }
        let Some(base) = self
            .disk_io(volume)
            .map(|io| io.geometry.bitmap_offset_bytes)
        else {
            return;
        };
        for write in out {
            let op = MetaOp::Write {
                offset: base + write.first_page * PAGE_BYTES,
                bytes: write.bytes,
                flush_data: false,
            };
            self.meta(
                volume,
                op,
                Pending::Data(DataOp::BitmapPages(volume, write.first_page)),
            );
        }
        for then in done {
            match then {
                JobThen::AlBlock => self.write_al_block(volume),
                JobThen::Hook(then) => self.bitmap_written(volume, then),
            }
        }
    }

    /// Writes the transaction that is prepared, once a superblock names the size: a disk whose first use was
    /// written down without one would come back after a crash with no block that the log could mark.
    pub(crate) fn write_al_block(&mut self, volume: VolumeNr) {
        let evicts_early = planted!(self, EvictBeforeFlush);
        let unsized_log = planted!(self, SizeNotAwaited);
        let disk = self.devices.get_mut(&volume).and_then(|d| d.attached_mut());
        let Some(disk) = disk else {
            return;
        };
        if !disk.writer.size_named && !unsized_log {
            if disk.io.prepared.is_some() && !disk.writer.size_awaited {
                disk.writer.size_awaited = true;
                self.write_superblock(volume);
            }
            return;
        }
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let Some(prepared) = io.prepared.take() else {
            return;
        };
        let op = MetaOp::Write {
            offset: io.geometry.al_offset_bytes + prepared.offset,
            bytes: prepared.bytes,
            // The data of an extent are durable before it leaves the log.
            flush_data: !prepared.evicted.is_empty() && io.flushes && !evicts_early,
        };
        self.meta(volume, op, Pending::Data(DataOp::AlBlock(volume)));
    }

    pub(crate) fn bitmap_pages_done(
        &mut self,
        volume: VolumeNr,
        page: u64,
        result: Result<(), DiskError>,
    ) {
        let misses = planted!(self, PageWriteMissesBits);
        let ignores = planted!(self, PageErrorIgnored);
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        if result.is_err() && !ignores {
            io.bitmap.write_failed(page);
            for job in &mut io.jobs {
                job.failed |= job.writes.as_mut().is_some_and(|w| w.remove(&page));
            }
            self.disk_failed(volume, DiskFault::Meta);
            return;
        }
        io.bitmap.written(page);
        while misses && let Some(write) = io.bitmap.next_write(page..page + 1) {
            io.bitmap.written(write.first_page);
        }
        for job in &mut io.jobs {
            if let Some(writes) = job.writes.as_mut() {
                writes.remove(&page);
            }
        }
        self.run_page_jobs(volume);
    }

    pub(crate) fn al_block_done(&mut self, volume: VolumeNr, result: Result<(), DiskError>) {
        if self.disk_io(volume).is_none() {
            return;
        }
        if result.is_err() && !planted!(self, LogErrorIgnored) {
            self.disk_failed(volume, DiskFault::Meta);
            return;
        }
        let stuck = planted!(self, LogNumberStuck);
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let mut ready = Vec::new();
        io.al.committed(&mut ready);
        if stuck {
            io.al.repeat_number();
        }
        if planted!(self, LostLogWakeUp) {
            ready.truncate(1);
        }
        self.io
            .wakes
            .extend(ready.into_iter().map(|owner| Wake::Al(volume, owner)));
        self.al_run(volume);
    }

    /// The disk is not used any more: what waits for its metadata goes on without it.
    pub(crate) fn data_disk_gone(&mut self, volume: VolumeNr) {
        if let Some(device) = self.devices.get_mut(&volume) {
            device.io.disk_serial += 1;
            device.io.local_reads = super::balance::ReadPath::default();
            for peer in device.peers.values_mut() {
                // What came for this disk would be taken for what the next one waits for.
                peer.io.bitmap_received = false;
                peer.io.acked_in_exchange.clear();
            }
        }
        let Some(io) = self
            .devices
            .get_mut(&volume)
            .and_then(|d| d.disk.as_mut())
            .map(|d| &mut d.io)
        else {
            return;
        };
        let owners = io.al.abandon();
        let jobs = core::mem::take(&mut io.jobs);
        io.prepared = None;
        let mut waiters = io.flushing.take().unwrap_or_default();
        waiters.append(&mut io.flush_next);
        for owner in owners {
            self.io.wakes.push_back(Wake::Al(volume, owner));
        }
        for waiter in waiters {
            self.io
                .wakes
                .push_back(Wake::Flushed(volume, waiter, Err(DiskError::Gone)));
        }
        let gated = match self.devices.get_mut(&volume) {
            Some(device) => core::mem::take(&mut device.io.gated_acks),
            None => Vec::new(),
        };
        for (peer, number) in gated {
            self.peer_write_failed(volume, peer, number);
        }
        for job in jobs {
            if let JobThen::Hook(then) = job.then {
                self.bitmap_written(volume, then);
            }
        }
    }

    /// Flushes the data device for `waiter`; one flush serves all who asked before it started.
    pub(crate) fn flush_disk(&mut self, volume: VolumeNr, waiter: FlushWaiter) {
        let skips = planted!(self, FlushSkipsLocalDisk) && matches!(waiter, FlushWaiter::App(_));
        let joins = planted!(self, FlushJoinsRunningOne);
        let needed = self.disk_io(volume).map(|io| io.flushes && !skips);
        match needed {
            Some(true) => {}
            Some(false) => {
                self.io
                    .wakes
                    .push_back(Wake::Flushed(volume, waiter, Ok(())));
                return;
            }
            None => {
                self.io
                    .wakes
                    .push_back(Wake::Flushed(volume, waiter, Err(DiskError::Gone)));
                return;
            }
        }
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        if joins && let Some(running) = io.flushing.as_mut() {
            running.push(waiter);
            return;
        }
        io.flush_next.push(waiter);
        if io.flushing.is_none() {
            self.start_flush(volume);
        }
    }

    fn start_flush(&mut self, volume: VolumeNr) {
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        io.flushing = Some(core::mem::take(&mut io.flush_next));
        self.disk_op(volume, DiskOp::Flush, DataOp::Flush(volume));
    }

    pub(crate) fn flush_done(&mut self, volume: VolumeNr, result: Result<(), DiskError>) {
        let result = result.or_else(|error| match planted!(self, FlushErrorIgnored) {
            true => Ok(()),
            false => Err(error),
        });
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let waiters = io.flushing.take().unwrap_or_default();
        let more = !io.flush_next.is_empty();
        for waiter in waiters {
            self.io
                .wakes
                .push_back(Wake::Flushed(volume, waiter, result));
        }
        if result.is_err() {
            self.disk_failed(volume, DiskFault::Meta);
        } else if more {
            self.start_flush(volume);
        }
    }

    pub(crate) fn flushed(
        &mut self,
        volume: VolumeNr,
        waiter: FlushWaiter,
        result: Result<(), DiskError>,
    ) {
        match waiter {
            FlushWaiter::App(key) => self.app_flush_done(key, result),
            FlushWaiter::Epochs(peer, serial) => self.epochs_flushed(volume, peer, serial, result),
            FlushWaiter::Target(peer) => self.target_flushed(volume, peer, result),
            FlushWaiter::ResyncEnd(peer, serial) => self.end_flushed(volume, peer, serial),
            FlushWaiter::Hashed(peer) => self.hashed_flushed(volume, peer, result),
            FlushWaiter::LastCopy(peer, number) => {
                self.last_copy_flushed(volume, peer, number, result);
            }
        }
    }
}
