//! Simulated disks. Data is one version number per 4 KiB block behind a volatile cache; metadata
//! is bytes, durable at completion. On persistent memory these are stored by words of 8 bytes; of
//! those behind the last fence a power cut keeps any (`words`).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use lockstep_core::event::{DiskInfo, Tag};
use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::al::{self, AlForm};
use lockstep_format::disk::any::AnySuperBlock;
use lockstep_format::disk::layout::{BitmapBlock, Geometry, Layout, Placement};
use lockstep_format::disk::pmem::WordStore;
use lockstep_format::disk::v08;
use lockstep_format::disk::v09::{DeviceFlags, SuperBlock};
use lockstep_format::units::{AlExtent, NodeId, Sector};

use crate::cache_note::CacheNote;
use crate::rng::Rng;

/// A crashed Primary that kept no activity log.
const WITHOUT_LOG: DeviceFlags = DeviceFlags::CRASHED_PRIMARY
    .union(DeviceFlags::PRIMARY_IND)
    .union(DeviceFlags::AL_DISABLED);

/// A replica without an activity log: its peers that were left behind are copied as a whole after a crash.
const UNLOGGED: DeviceFlags = DeviceFlags::PRIMARY_IND.union(DeviceFlags::AL_DISABLED);

/// What a block holds that cannot be read, plus its number.
const LOST: u64 = 1 << 60;

/// Bytes of one block of simulated data.
pub const BLOCK: u64 = 4096;

/// Where metadata lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// On a device of its own.
    External,
    /// At the end of the data device.
    Internal,
    /// On a device of its own that is persistent memory.
    Persistent,
}

impl Where {
    /// On a device of its own.
    pub fn is_external(self) -> bool {
        self != Where::Internal
    }
}

/// What a crash does to the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lose {
    /// The process died: completed writes stay, those in flight may or may not have happened.
    InFlight,
    /// The power went: of what was not flushed any part may be lost too.
    Unflushed,
}

/// A data operation that is under way.
#[derive(Clone, Debug)]
pub enum DataOp {
    /// Into a buffer of the node.
    Read {
        /// The payload.
        payload: lockstep_core::event::Payload,
        /// First block.
        block: u64,
    },
    /// Into a new buffer.
    ReadNew {
        /// First block.
        block: u64,
        /// Blocks.
        count: u64,
    },
    /// New content.
    Write {
        /// First block.
        block: u64,
        /// The versions.
        content: Vec<u64>,
        /// Durable at completion.
        fua: bool,
    },
    /// Everything up to this sequence number becomes durable.
    Flush {
        /// Last write that completed before.
        upto: u64,
    },
}

/// An operation in flight with its tag.
#[derive(Clone, Debug)]
pub struct Flying<T> {
    /// The core's tag.
    pub tag: Tag,
    /// What.
    pub op: T,
    /// When it was asked for.
    pub since: u64,
}

/// A write of metadata or a read.
#[derive(Clone, Debug)]
pub enum MetaOp {
    /// Bytes at an offset.
    Read {
        /// First byte.
        offset: u64,
        /// Length.
        len: u32,
    },
    /// Whole blocks.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
        /// Data completed up to here becomes durable first.
        flush_upto: Option<u64>,
    },
    /// Words in place, one step after the other.
    Store {
        /// What to store.
        steps: Vec<WordStore>,
        /// Data completed up to here becomes durable first.
        flush_upto: Option<u64>,
    },
}

/// What is wrong with a disk. The counts say how many operations will meet it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Reads that fail.
    pub reads: u32,
    /// What a failed read was to give is gone.
    pub loses: bool,
    /// Writes that fail.
    pub writes: u32,
    /// Flushes that fail.
    pub flushes: u32,
    /// Metadata operations that fail.
    pub metas: u32,
    /// Writes of the bitmap that fail.
    pub bitmaps: u32,
    /// Writes that are acknowledged but never happen.
    pub lost: u32,
    /// Writes that go to another place.
    pub misdirected: u32,
    /// Operations take so many times longer.
    pub slowness: u64,
    /// Operations do not end.
    pub hangs: bool,
    /// Something failed since the node started.
    pub happened: bool,
    /// Nothing fails while no other node has the data: with `on-io-error pass_on` the only copy
    /// would be Inconsistent then, and only an operator can say what becomes of it.
    pub spares_last: bool,
}

impl Default for Trouble {
    fn default() -> Self {
        Trouble {
            reads: 0,
            loses: false,
            writes: 0,
            flushes: 0,
            metas: 0,
            bitmaps: 0,
            lost: 0,
            misdirected: 0,
            slowness: 1,
            hangs: false,
            happened: false,
            spares_last: false,
        }
    }
}

/// How an operation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// As it should.
    Good,
    /// With an error.
    Failed,
    /// Acknowledged, but it never happened.
    Lost,
    /// Acknowledged, but somewhere else.
    Misdirected,
}

impl Fate {
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Fate::Good => "the disk works",
            Fate::Failed => "the disk reports an error",
            Fate::Lost => "the disk silently loses a write",
            Fate::Misdirected => "the disk silently writes to a wrong place",
        }
    }
}

fn take(count: &mut u32) -> bool {
    let due = *count > 0;
    *count -= u32::from(due);
    due
}

impl Trouble {
    /// How the operation ends; counts it.
    pub(crate) fn fate(&mut self, op: &DataOp) -> Fate {
        let fate = match op {
            DataOp::Read { .. } | DataOp::ReadNew { .. } if take(&mut self.reads) => Fate::Failed,
            DataOp::Write { .. } if take(&mut self.writes) => Fate::Failed,
            DataOp::Write { .. } if take(&mut self.lost) => Fate::Lost,
            DataOp::Write { .. } if take(&mut self.misdirected) => Fate::Misdirected,
            DataOp::Flush { .. } if take(&mut self.flushes) => Fate::Failed,
            DataOp::Read { .. }
            | DataOp::ReadNew { .. }
            | DataOp::Write { .. }
            | DataOp::Flush { .. } => Fate::Good,
        };
        self.happened |= fate == Fate::Failed;
        fate
    }

    /// The next metadata operation fails; counts it.
    pub(crate) fn meta_fails(&mut self, writes_bitmap: bool) -> bool {
        let fails = take(&mut self.metas) || writes_bitmap && take(&mut self.bitmaps);
        self.happened |= fails;
        fails
    }
}

/// What a crash took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Toll {
    /// A write in flight happened in part.
    pub torn: bool,
    /// A metadata write was in flight.
    pub meta: bool,
    /// A completed write was lost.
    pub lost: bool,
    /// Completed writes that no flush protected were all kept.
    pub lucky: bool,
}

/// A completed write of one block that a power cut may take back.
#[derive(Clone, Copy, Debug)]
struct Volatile {
    sequence: u64,
    block: u64,
    old: u64,
    new: u64,
}

/// One volume's disk on one node. It outlives the node's crashes.
#[derive(Debug)]
pub struct Disk {
    /// What reads see.
    pub content: Vec<u64>,
    /// Completed writes that no flush made durable yet, oldest first.
    unflushed: VecDeque<Volatile>,
    sequence: u64,
    /// The metadata area.
    pub meta: Vec<u8>,
    /// Where it begins on its device.
    pub(crate) meta_base: u64,
    /// It is persistent memory.
    persistent: bool,
    /// Size of the metadata device.
    pub meta_bytes: u64,
    /// Size of the data device.
    pub data_bytes: u64,
    /// It has grown, and no connect has looked at it since.
    pub(crate) grown: bool,
    /// Blocks that cannot be read until they are written, and what they held before.
    pub(crate) bad: BTreeMap<u64, u64>,
    /// Those of them that were lost while the metadata called the disk whole.
    bad_of_whole: BTreeSet<u64>,
    /// It reported an error at least once.
    pub had_errors: bool,
    /// A discard leaves the old content, and the node is told so.
    pub keeps_discarded: bool,
    /// Where things are on it.
    pub layout: Layout,
    /// Where they would be if the device ended where it once did, or does now; the last is now.
    pub(crate) places: Vec<Layout>,
    /// Blocks of data that it had at first.
    pub(crate) first_blocks: u64,
    /// Opened by the node.
    pub open: bool,
    /// Operations in flight.
    pub flying: Vec<(u64, Flying<DataOp>)>,
    /// Metadata operations in flight.
    pub flying_meta: BTreeMap<u64, Flying<MetaOp>>,
    /// Operations that should have ended, were the disk not hanging; whether they are metadata's.
    pub hung: Vec<(u64, bool)>,
    /// A checker saw such operations first then.
    pub(crate) hangs_since: Option<u64>,
    /// Operations that the node has given up and that may still happen.
    pub abandoned: BTreeMap<u64, DataOp>,
    /// The same of metadata.
    pub abandoned_meta: BTreeMap<u64, MetaOp>,
    /// The node has given it up and not closed it.
    pub given_up: bool,
    /// When it was opened last.
    pub(crate) opened_at: u64,
    /// Nobody is to wait for it: a forced detach.
    pub(crate) is_forced: bool,
    /// Its data are being thrown away, because they are bad.
    pub(crate) is_bad: bool,
    /// It was cured last then.
    pub(crate) answers_since: u64,
    /// Completes when nothing is in flight any more.
    pub closing: Option<Tag>,
    /// What the next process finds of its cache.
    pub(crate) note: CacheNote,
    /// What is wrong with it.
    pub trouble: Trouble,
    /// What the metadata say beside the bitmap, as they were read last.
    read: RefCell<Option<Rc<Read>>>,
    /// The superblock as it was decoded last.
    read_superblock: RefCell<Option<Rc<Result<SuperBlock, String>>>>,
    /// The activity log's blocks by position, where they are as they were decoded last.
    log_blocks: RefCell<Vec<Option<Result<al::Block, al::BlockError>>>>,
}

/// What metadata say beside the bitmap.
#[derive(Debug)]
struct Read {
    superblock: Rc<Result<SuperBlock, String>>,
    log: Log,
}

/// Which extents an attach would mark.
#[derive(Debug)]
enum Log {
    None,
    Extents(Vec<AlExtent>),
    All,
}

/// Size of an external metadata device, and room for internal metadata.
pub const META_BYTES: u64 = 256 << 10;

impl Disk {
    /// A zeroed disk after `create-md`.
    pub fn new(node: usize, blocks: u64, peers: u8, place: Where, shift: Option<u8>) -> Self {
        let mut geometry = Geometry::for_peers(peers);
        if let Some(shift) = shift {
            geometry.bitmap_block =
                BitmapBlock::from_shift(shift).expect("a block of 4 KiB to 1 MiB");
        }
        let (placement, device_bytes) = match place {
            Where::External | Where::Persistent => (Placement::FlexExternal, META_BYTES),
            Where::Internal => (Placement::Internal, blocks * BLOCK + META_BYTES),
        };
        let layout = Layout::new(placement, geometry, device_bytes)
            .expect("the metadata device is large enough");
        let (meta_base, blocks, data_bytes) = match place {
            Where::External | Where::Persistent => (0, blocks, blocks * BLOCK),
            Where::Internal => {
                let blocks = layout.usable_sectors(device_bytes / 512) / 8;
                (blocks * BLOCK, blocks, device_bytes)
            }
        };
        let mut meta = vec![0u8; (device_bytes - meta_base) as usize];
        let mut superblock = SuperBlock::fresh(&layout);
        superblock.node_id = Some(NodeId(node as u8));
        let mut block = [0u8; BLOCK_BYTES];
        superblock.encode(&mut block);
        let at = (layout.superblock_byte() - meta_base) as usize;
        meta[at..at + BLOCK_BYTES].copy_from_slice(&block);
        al::encode_initialised(&mut block);
        for number in 0..layout.geometry().al.blocks() {
            let at = (layout.al_byte() - meta_base) as usize + number as usize * BLOCK_BYTES;
            meta[at..at + BLOCK_BYTES].copy_from_slice(&block);
        }
        Disk {
            content: vec![0; blocks as usize],
            unflushed: VecDeque::new(),
            sequence: 0,
            meta,
            meta_base,
            persistent: place == Where::Persistent,
            meta_bytes: device_bytes,
            data_bytes,
            grown: false,
            bad: BTreeMap::new(),
            bad_of_whole: BTreeSet::new(),
            had_errors: false,
            keeps_discarded: false,
            layout,
            places: vec![layout],
            first_blocks: blocks,
            open: false,
            flying: Vec::new(),
            flying_meta: BTreeMap::new(),
            hung: Vec::new(),
            hangs_since: None,
            abandoned: BTreeMap::new(),
            abandoned_meta: BTreeMap::new(),
            given_up: false,
            opened_at: 0,
            is_forced: false,
            is_bad: false,
            answers_since: 0,
            closing: None,
            note: CacheNote::default(),
            trouble: Trouble::default(),
            read: RefCell::default(),
            read_superblock: RefCell::default(),
            log_blocks: RefCell::default(),
        }
    }

    /// What the node is told of it.
    pub fn info(&self) -> DiskInfo {
        DiskInfo {
            data_bytes: self.data_bytes,
            meta_bytes: self.meta_bytes,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            discard: true,
            discard_zeroes: !self.keeps_discarded,
            discard_granularity_bytes: 4096,
            max_discard_bytes: 128 << 20,
            write_through: false,
            persistent_memory: self.persistent,
            cache: self.note.found(),
        }
    }

    /// Index into the metadata area of a byte of its device.
    fn meta_index(&self, byte: u64) -> usize {
        byte.checked_sub(self.meta_base)
            .expect("metadata is not read from the data area") as usize
    }

    /// Bytes of the metadata device.
    pub fn meta_at(&self, offset: u64, len: usize) -> &[u8] {
        let at = self.meta_index(offset);
        &self.meta[at..at + len]
    }

    /// Stores bytes on the metadata device.
    pub fn store_meta(&mut self, offset: u64, bytes: &[u8]) {
        let at = self.meta_index(offset);
        let end = offset + bytes.len() as u64;
        let block = BLOCK_BYTES as u64;
        let before = &self.meta[at..at + bytes.len()];
        // By blocks from the first byte; a block that is stored as it was needs no new look.
        let same: Vec<bool> = before
            .chunks(BLOCK_BYTES)
            .zip(bytes.chunks(BLOCK_BYTES))
            .map(|(before, now)| before == now)
            .collect();
        let is_whole = offset.is_multiple_of(block);
        let changed = |at: u64| {
            let number = at.checked_sub(offset).map(|bytes| (bytes / block) as usize);
            !is_whole || number.and_then(|n| same.get(n)) != Some(&true)
        };
        self.meta[at..at + bytes.len()].copy_from_slice(bytes);
        let touches = |at: u64| offset < at + block && at < end;
        let moves = self.places.iter().any(|l| touches(l.superblock_byte()));
        if moves {
            self.look_for_superblock();
        }
        if touches(self.layout.superblock_byte()) {
            self.forget_read();
        }
        let (log, geometry) = (self.layout.al_byte(), self.layout.geometry().al);
        if offset < log + geometry.bytes() && log < end {
            self.read.take();
            for (position, known) in (0..).zip(self.log_blocks.get_mut()) {
                let at = log + u64::from(geometry.block_of_position(position)) * block;
                if touches(at) && changed(at) {
                    *known = None;
                }
            }
        }
    }

    /// The superblock is another one than was read last.
    fn forget_read(&mut self) {
        self.read_superblock.take();
        self.read.take();
    }

    /// The areas lie where this says.
    pub(crate) fn lies_at(&mut self, layout: Layout) {
        self.layout = layout;
        self.log_blocks.take();
        self.forget_read();
    }

    /// The bytes lie in the metadata area.
    pub fn is_meta(&self, offset: u64, len: u64) -> bool {
        offset >= self.meta_base && offset + len <= self.meta_bytes
    }

    /// The last write that has completed.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Blocks whose content a power cut may take back, in order, with the oldest content that they
    /// may get.
    pub fn volatile(&self) -> Vec<(u64, u64)> {
        self.volatile_in(0..u64::MAX)
    }

    /// The same of a range of blocks.
    pub fn volatile_in(&self, blocks: std::ops::Range<u64>) -> Vec<(u64, u64)> {
        let inside = self.unflushed.iter().filter(|v| blocks.contains(&v.block));
        let mut oldest: Vec<(u64, u64)> = inside.map(|v| (v.block, v.old)).collect();
        // Stable: of each block's writes the oldest stays first.
        oldest.sort_by_key(|(block, _)| *block);
        oldest.dedup_by_key(|(block, _)| *block);
        oldest
    }

    /// The first block of which some content up to this write is not durable.
    pub fn first_volatile(&self, upto: u64) -> Option<u64> {
        let oldest = self.unflushed.front()?;
        (oldest.sequence <= upto).then_some(oldest.block)
    }

    /// Everything up to this sequence number is durable.
    pub fn flushed(&mut self, upto: u64) {
        while self.unflushed.front().is_some_and(|v| v.sequence <= upto) {
            self.unflushed.pop_front();
        }
    }

    /// Since when the oldest operation has been under way that has not ended yet.
    pub fn busy_since(&self) -> Option<u64> {
        let data = self.flying.iter().map(|(_, f)| f.since);
        let meta = self.flying_meta.values().map(|f| f.since);
        data.chain(meta).min()
    }

    /// An operation is over. There are few at a time.
    pub fn take_flying(&mut self, id: u64) -> Option<Flying<DataOp>> {
        let at = self.flying.iter().position(|(of, _)| *of == id)?;
        Some(self.flying.remove(at).1)
    }

    /// A write completes.
    pub fn write(&mut self, block: u64, content: &[u64], fua: bool) {
        self.overwrite_metadata(block, content.len() as u64);
        if !self.bad.is_empty() {
            self.bad
                .retain(|bad, _| !(block..block + content.len() as u64).contains(bad));
        }
        for (block, value) in (block..).zip(content) {
            self.sequence += 1;
            let old = std::mem::replace(&mut self.content[block as usize], *value);
            if !fua {
                let (sequence, new) = (self.sequence, *value);
                self.unflushed.push_back(Volatile {
                    sequence,
                    block,
                    old,
                    new,
                });
            }
        }
        if fua {
            let durable = block..block + content.len() as u64;
            self.unflushed.retain(|v| !durable.contains(&v.block));
        }
    }

    /// A read of a block has failed, and others will until it is written: what it held is gone.
    pub(crate) fn loses(&mut self, block: u64) {
        let old = std::mem::replace(&mut self.content[block as usize], LOST + block);
        self.bad.entry(block).or_insert(old);
        if self.is_called_whole() {
            self.bad_of_whole.insert(block);
        }
    }

    fn is_called_whole(&self) -> bool {
        let superblock = self.superblock();
        superblock.is_ok_and(|s| s.flags.contains(DeviceFlags::CONSISTENT))
    }

    /// The node dies before it has noted what it cannot read: the next read may be lucky. Not so where that is why the
    /// metadata call the disk Inconsistent: nobody reads it before it was copied.
    fn reads_again(&mut self) {
        let of_whole = std::mem::take(&mut self.bad_of_whole);
        let copied = !self.is_called_whole();
        for (block, old) in std::mem::take(&mut self.bad) {
            let is_why = copied && of_whole.contains(&block);
            match is_why || self.marks_somebody(block) {
                true => {
                    self.bad.insert(block, old);
                    self.bad_of_whole.extend(is_why.then_some(block));
                }
                false => self.content[block as usize] = old,
            }
        }
    }

    /// It reports an error.
    pub(crate) fn fails(&mut self) {
        self.had_errors = true;
        self.note.disk_fails();
    }

    /// The node dies. What is in flight happens in part, what is volatile is lost in part.
    pub fn crash(&mut self, lose: Lose, rng: &mut Rng) -> Toll {
        let mut toll = Toll::default();
        let flying = std::mem::take(&mut self.flying);
        let flying = flying.into_iter().map(|(_, f)| f.op);
        let flying_meta = std::mem::take(&mut self.flying_meta);
        let flying_meta = flying_meta.into_values().map(|f| f.op);
        let abandoned = std::mem::take(&mut self.abandoned).into_values();
        let abandoned_meta = std::mem::take(&mut self.abandoned_meta).into_values();
        for op in abandoned.chain(flying) {
            if let DataOp::Write { block, content, .. } = op {
                let all = rng.below(3);
                toll.torn |= all == 1 && content.len() > 1;
                for (i, value) in content.iter().enumerate() {
                    if all == 0 || all == 1 && rng.permille(500) {
                        self.write(block + i as u64, &[*value], false);
                    }
                }
            }
        }
        for op in abandoned_meta.chain(flying_meta) {
            match op {
                MetaOp::Read { .. } => {}
                // Nothing of it is there before the flush that it asks for is over.
                MetaOp::Write {
                    offset,
                    bytes,
                    flush_upto,
                } => {
                    toll.meta = true;
                    if self.torn_meta(offset, &bytes, rng) {
                        self.flushed(flush_upto.unwrap_or(0));
                    }
                }
                MetaOp::Store { steps, flush_upto } => {
                    toll.meta = true;
                    if self.torn_words(&steps, rng) {
                        self.flushed(flush_upto.unwrap_or(0));
                    }
                }
            }
        }
        if lose == Lose::Unflushed {
            let all = rng.below(3);
            let had = !self.unflushed.is_empty();
            let mut lost: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
            for v in std::mem::take(&mut self.unflushed) {
                lost.entry(v.block)
                    .or_insert_with(|| vec![v.old])
                    .push(v.new);
            }
            for (block, values) in lost {
                let pick = match all {
                    0 => 0,
                    1 => values.len() - 1,
                    _ => rng.below(values.len() as u64) as usize,
                };
                toll.lost |= pick + 1 < values.len();
                match self.bad.get_mut(&block) {
                    Some(old) => *old = values[pick],
                    None => self.content[block as usize] = values[pick],
                }
            }
            toll.lucky = had && !toll.lost;
        }
        self.note.crash(lose);
        self.reads_again();
        self.open = false;
        self.closing = None;
        self.hung.clear();
        self.given_up = false;
        self.trouble.happened = false;
        toll
    }

    /// A metadata write was cut: any part of its sectors is there. The superblock is atomic. Whether any is.
    fn torn_meta(&mut self, offset: u64, bytes: &[u8], rng: &mut Rng) -> bool {
        let all = rng.below(4);
        let mut any = false;
        for (i, chunk) in bytes.chunks(BLOCK_BYTES).enumerate() {
            let at = offset + (i * BLOCK_BYTES) as u64;
            if self.places.iter().any(|l| at == l.superblock_byte()) {
                if rng.permille(500) {
                    self.store_meta(at, chunk);
                    any = true;
                }
                continue;
            }
            for (j, sector) in chunk.chunks(512).enumerate() {
                if all == 0 || all > 1 && rng.permille(500) {
                    self.store_meta(at + j as u64 * 512, sector);
                    any = true;
                }
            }
        }
        any
    }

    /// The superblock on the medium.
    pub fn superblock(&self) -> Result<SuperBlock, String> {
        self.read().superblock.as_ref().clone()
    }

    /// What the medium says beside the bitmap.
    fn read(&self) -> Rc<Read> {
        let mut last = self.read.borrow_mut();
        let read = last.get_or_insert_with(|| {
            let mut known = self.read_superblock.borrow_mut();
            let superblock = known.get_or_insert_with(|| Rc::new(self.decode_superblock()));
            let superblock = Rc::clone(superblock);
            let log = match superblock.as_ref() {
                Ok(s) if s.flags.contains(WITHOUT_LOG) => Log::All,
                Ok(s) if !s.flags.contains(DeviceFlags::AL_CLEAN) => self.read_log(s.al_extents),
                Ok(_) | Err(_) => Log::None,
            };
            Rc::new(Read { superblock, log })
        });
        Rc::clone(read)
    }

    fn read_log(&self, al_extents: u32) -> Log {
        let geometry = self.layout.geometry().al;
        let area = self.meta_at(self.layout.al_byte(), geometry.bytes() as usize);
        let slots =
            self.persistent && AlForm::of(area, geometry, false) == AlForm::PersistentMemory;
        let replay = match slots {
            true => Ok(al::replay_persistent_memory(area, al_extents)),
            false => {
                let mut blocks = self.log_blocks.borrow_mut();
                blocks.resize_with(geometry.blocks() as usize, || None);
                for (position, known) in (0..).zip(blocks.iter_mut()) {
                    known.get_or_insert_with(|| al::block_at(area, geometry, position));
                }
                al::replay_blocks(blocks.iter().flatten(), geometry)
            }
        };
        match replay {
            Ok(replay) if replay.coverage == al::Coverage::Complete => Log::Extents(replay.active),
            // Nothing is known: an attach marks everything.
            _ => Log::All,
        }
    }

    fn decode_superblock(&self) -> Result<SuperBlock, String> {
        let block = self
            .meta_at(self.layout.superblock_byte(), BLOCK_BYTES)
            .try_into()
            .expect("a whole block");
        match AnySuperBlock::decode(block).map_err(|e| e.to_string())? {
            AnySuperBlock::V09(superblock) => Ok(superblock),
            AnySuperBlock::V08(old) => {
                // Of two nodes; which one this is does not matter to a reader of marks.
                let mut superblock = old.in_memory(NodeId(NodeId::COUNT - 1), None);
                for peer in &mut superblock.peers {
                    peer.bitmap_index = Some(0);
                }
                let unread = !old.flags.contains(v08::Flags::PRIMARY_IND) || old.is_clean();
                superblock.flags.set(DeviceFlags::AL_CLEAN, unread);
                Ok(superblock)
            }
        }
    }

    /// Turns fresh metadata of two nodes into those of DRBD 8.4.
    pub fn downgrade(&mut self) {
        let superblock = v08::SuperBlock::fresh(&self.layout);
        let mut block = [0u8; BLOCK_BYTES];
        superblock.encode(&mut block);
        let at = self.layout.superblock_byte();
        self.store_meta(at, &block);
    }

    /// The flags of the superblock on the medium; none if it does not open.
    pub fn flags(&self) -> Option<DeviceFlags> {
        self.read()
            .superblock
            .as_ref()
            .as_ref()
            .ok()
            .map(|s| s.flags)
    }

    /// The generation that the metadata of the disk in use name, without the Primary's bit.
    pub fn generation(&self) -> Option<u64> {
        let read = self.open.then(|| self.read())?;
        let superblock = read.superblock.as_ref().as_ref().ok()?;
        Some(superblock.current_uuid.0 & !1).filter(|uuid| *uuid > 4)
    }

    /// The metadata name the generation, or one of which it is an ancestor.
    pub fn knows(&self, generation: u64) -> bool {
        let read = self.read();
        read.superblock.as_ref().as_ref().is_ok_and(|s| {
            let of_peers = s.peers.iter().map(|p| p.bitmap_uuid.0);
            let mut known = of_peers.chain(s.history.iter().map(|u| u.0));
            s.current_uuid.0 & !1 == generation || known.any(|u| u & !1 == generation)
        })
    }

    /// An attach would mark these blocks towards everybody, because they are in the activity log.
    pub fn is_hot(&self, blocks: std::ops::Range<u64>) -> bool {
        let read = self.read();
        let extent = |block: u64| Sector(block * 8).al_extent();
        let Some(last) = blocks.end.checked_sub(1) else {
            return true;
        };
        match &read.log {
            Log::None => false,
            Log::Extents(active) => (extent(blocks.start).0..=extent(last).0)
                .all(|e| active.binary_search(&AlExtent(e)).is_ok()),
            Log::All => true,
        }
    }

    /// The activity log says which extents are in use.
    pub(crate) fn has_whole_log(&self) -> bool {
        !matches!(self.read().log, Log::All)
    }

    /// There is the bitmap, not the log or the superblock.
    pub(crate) fn is_bitmap(&self, offset: u64) -> bool {
        let starts = [self.layout.superblock_byte(), self.layout.al_byte()];
        let bitmap = self.layout.bitmap_byte();
        offset >= bitmap && !starts.iter().any(|start| (bitmap..=offset).contains(start))
    }

    /// For each block of the list: does this disk's metadata mark it towards the peer?
    pub fn marks(&self, peer: usize, blocks: &[u64]) -> Result<Vec<bool>, String> {
        let mut marks = Vec::with_capacity(blocks.len());
        self.look_at_marks(peer, blocks, |is_marked| marks.push(is_marked))?;
        Ok(marks)
    }

    /// The same of one block; a disk whose metadata do not open marks nothing.
    pub fn is_marked(&self, peer: usize, block: u64) -> bool {
        let mut found = false;
        let looked = self.look_at_marks(peer, &[block], |is_marked| found = is_marked);
        looked.is_ok() && found
    }

    /// Whether it is marked towards any node.
    pub(crate) fn marks_somebody(&self, block: u64) -> bool {
        (0..usize::from(NodeId::COUNT)).any(|peer| self.is_marked(peer, block))
    }

    /// The same without the activity log.
    pub(crate) fn bitmap(&self, peer: usize, blocks: &[u64]) -> Result<Vec<bool>, String> {
        let mut marks = Vec::with_capacity(blocks.len());
        let read = self.read();
        let without_log = Read {
            superblock: Rc::clone(&read.superblock),
            log: Log::None,
        };
        self.look_at_marks_of(&without_log, peer, blocks, |is_marked| {
            marks.push(is_marked)
        })?;
        Ok(marks)
    }

    fn look_at_marks(
        &self,
        peer: usize,
        blocks: &[u64],
        see: impl FnMut(bool),
    ) -> Result<(), String> {
        self.look_at_marks_of(&self.read(), peer, blocks, see)
    }

    fn look_at_marks_of(
        &self,
        read: &Read,
        peer: usize,
        blocks: &[u64],
        mut see: impl FnMut(bool),
    ) -> Result<(), String> {
        use lockstep_format::disk::v09::PeerFlags;
        let superblock = read.superblock.as_ref().as_ref().map_err(Clone::clone)?;
        let entry = superblock.peer(NodeId(peer as u8));
        let sectors = superblock.effective_size.0;
        let unlogged = superblock.flags.contains(UNLOGGED)
            && !superblock.flags.contains(DeviceFlags::AL_CLEAN)
            && entry.bitmap_index.is_some()
            && entry.bitmap_uuid.0 & !1 > 4;
        if entry.flags.contains(PeerFlags::FULL_SYNC) || sectors == 0 || unlogged {
            blocks.iter().for_each(|_| see(true));
            return Ok(());
        }
        let shape = self.layout.bitmap_shape(sectors);
        let base = self.meta_index(self.layout.bitmap_byte());
        // A node without a slot, because it was forgotten, gets the lowest free one.
        let taken = |slot: &u8| {
            superblock
                .peers
                .iter()
                .any(|p| p.bitmap_index == Some(*slot))
        };
        let free = || (0..superblock.geometry.max_peers).find(|slot| !taken(slot));
        let slot = entry.bitmap_index.or_else(free);
        let is_marked = |block: u64| {
            slot.is_some_and(|slot| {
                let bit = block * 8 / shape.block().sectors();
                let (byte, mask) = shape.position(slot, bit);
                self.meta[base + byte as usize] & mask != 0
            })
        };
        let is_hot = |block: u64| match &read.log {
            Log::None => false,
            Log::Extents(active) => active.binary_search(&Sector(block * 8).al_extent()).is_ok(),
            Log::All => true,
        };
        // A volume that is smaller by its metadata has to grow first, and then what is new is marked.
        let is_new = |block: u64| block * 8 >= sectors;
        for block in blocks {
            see(is_new(*block) || is_marked(*block) || is_hot(*block));
        }
        Ok(())
    }
}
