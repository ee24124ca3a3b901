//! The mechanical procedures on a whole metadata area: create, apply the activity log, restore,
//! move, wipe. They fix the order of writes and flushes (section 15, rules 14 and 15), so that a
//! crash between any two of them loses nothing; who calls them, and when, is decided elsewhere.
//!
//! The storage behind them is a [`Store`]: a device for the tools and the daemon, memory with
//! simulated crashes for tests.

use alloc::vec;
use alloc::vec::Vec;

use super::al::{self, AlForm, Coverage, Gap, Replay, ReplayError};
use super::any::AnySuperBlock;
use super::bitmap::{BitmapShape, Piece};
use super::gi::{self, GiError};
use super::layout::Layout;
use super::v09::DeviceFlags;
use super::{BLOCK_BYTES, v08};
use crate::units::{AlExtent, NodeId, Sector, Uuid};

/// A device or file that holds metadata. All positions and lengths are multiples of 4096 bytes
/// but for positions on a device whose size is none.
pub trait Store {
    /// What can go wrong below.
    type Error;
    /// Fills `out` from byte `at` on.
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), Self::Error>;
    /// Writes `bytes` at byte `at`. Durable only after [`Store::flush`].
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Self::Error>;
    /// Makes `len` bytes from byte `at` on read as zero. Durable only after [`Store::flush`].
    fn zero(&mut self, at: u64, len: u64) -> Result<(), Self::Error>;
    /// Returns when everything written is durable.
    fn flush(&mut self) -> Result<(), Self::Error>;
}

/// What a new bitmap holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapInit {
    /// All bits clear.
    Clear,
    /// All bits set.
    Set,
    /// Whatever is there.
    Keep,
}

/// Bytes moved at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// Writes new metadata. The superblock is erased first and written last, so that a crash leaves
/// either what was there before or nothing that looks valid.
pub fn create<S: Store>(
    store: &mut S,
    layout: &Layout,
    superblock: &AnySuperBlock,
    bitmap: BitmapInit,
) -> Result<(), S::Error> {
    wipe(store, layout)?;
    initialise_al(store, layout)?;
    let (at, len) = (layout.bitmap_byte(), layout.bitmap_area_bytes());
    match bitmap {
        BitmapInit::Clear => store.zero(at, len)?,
        BitmapInit::Set => fill(store, at, len)?,
        BitmapInit::Keep => {}
    }
    store.flush()?;
    write_superblock(store, layout, superblock)
}

/// Erases the superblock, nothing else.
pub fn wipe<S: Store>(store: &mut S, layout: &Layout) -> Result<(), S::Error> {
    store.write(layout.superblock_byte(), &[0; BLOCK_BYTES])?;
    store.flush()
}

/// Writes the superblock of `layout` and makes it durable, with all writes before it.
pub fn write_superblock<S: Store>(
    store: &mut S,
    layout: &Layout,
    superblock: &AnySuperBlock,
) -> Result<(), S::Error> {
    let mut block = [0; BLOCK_BYTES];
    superblock.encode(&mut block);
    store.flush()?;
    store.write(layout.superblock_byte(), &block)?;
    store.flush()
}

/// Writes an empty activity log.
pub fn initialise_al<S: Store>(store: &mut S, layout: &Layout) -> Result<(), S::Error> {
    let mut block = [0; BLOCK_BYTES];
    al::encode_initialised(&mut block);
    for i in 0..u64::from(layout.geometry().al.blocks()) {
        store.write(layout.al_byte() + i * BLOCK_BYTES as u64, &block)?;
    }
    Ok(())
}

fn fill<S: Store>(store: &mut S, at: u64, len: u64) -> Result<(), S::Error> {
    let ones = vec![0xff; len.min(CHUNK_BYTES) as usize];
    for (start, size) in chunks(len) {
        store.write(at + start, &ones[..size as usize])?;
    }
    Ok(())
}

fn chunks(len: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..len.div_ceil(CHUNK_BYTES)).map(move |i| {
        let start = i * CHUNK_BYTES;
        (start, CHUNK_BYTES.min(len - start))
    })
}

/// What [`apply_al`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Extents found active and marked out of sync in all slots.
    pub extents: Vec<AlExtent>,
    /// Active extents that lie behind the bitmap: extent and its first byte there.
    pub beyond: Vec<(AlExtent, u64)>,
    /// Bytes of the bitmap of the agreed size.
    pub bitmap_bytes: u64,
    /// Bits that were clear and are set now, over all slots.
    pub newly_set_bits: u64,
    /// Damaged blocks of the ring.
    pub corrupt_blocks: u32,
    /// The log could not be used, but need not be applied either.
    pub ignored: Option<ReplayError>,
    /// The log does not tell everything: all bits of all slots were set.
    pub everything_marked: Option<FullReason>,
}

/// Why everything was marked out of sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FullReason {
    /// Context is missing in the log.
    Gap(Gap),
    /// We crashed as primary while the log was switched off.
    LogDisabled,
}

/// Why the activity log cannot be applied. Nothing was changed on [`ApplyError::Log`].
#[derive(Debug, PartialEq, Eq)]
pub enum ApplyError<E> {
    /// The storage failed.
    Store(E),
    /// The log is needed and gives no answer.
    Log {
        /// Damaged blocks.
        corrupt_blocks: u32,
        /// Why.
        error: ReplayError,
    },
}

impl<E> From<E> for ApplyError<E> {
    fn from(error: E) -> Self {
        Self::Store(error)
    }
}

/// Sets all extents of the activity log out of sync in all slots, empties the log and marks the
/// metadata clean (section 9.8). Doing it twice is harmless, so a crash within is too.
pub fn apply_al<S: Store>(
    store: &mut S,
    layout: &Layout,
    superblock: &mut AnySuperBlock,
) -> Result<Applied, ApplyError<S::Error>> {
    let mut area = vec![0; layout.geometry().al.bytes() as usize];
    store.read(layout.al_byte(), &mut area)?;
    let replay = replay(&area, layout, superblock);
    let flags = superblock.device_flags();
    // A disk that was given up in good order has extents in its log that are in the bitmap, and says so.
    let needed = flags.contains(DeviceFlags::PRIMARY_IND) && !superblock.is_clean();
    let mut applied = Applied::default();
    let empty = match replay {
        Ok(replay) => {
            applied.corrupt_blocks = replay.corrupt_blocks;
            if needed {
                mark(store, layout, superblock, &replay, &mut applied)?;
            }
            replay.clean
        }
        Err(error) => {
            applied.corrupt_blocks = match error {
                ReplayError::NoTransaction { corrupt_blocks } => corrupt_blocks,
                ReplayError::NoData | ReplayError::AreaSize { .. } => 0,
            };
            if needed {
                let corrupt_blocks = applied.corrupt_blocks;
                return Err(ApplyError::Log {
                    corrupt_blocks,
                    error,
                });
            }
            applied.ignored = Some(error);
            false
        }
    };
    store.flush()?;
    if !empty {
        initialise_al(store, layout)?;
    }
    superblock.set_clean();
    write_superblock(store, layout, superblock)?;
    Ok(applied)
}

/// Why a list of `set-gi` was not taken over.
#[derive(Debug, PartialEq, Eq)]
pub enum SetGiError<E> {
    /// The storage failed.
    Store(E),
    /// The list is wrong.
    List(GiError),
}

/// Takes over a list of `set-gi`; the superblock is not written. A log that a detach in good order marked as clean
/// counts again if the list makes a Primary of the disk and says nothing of the log: a kernel leaves no such mark
/// (section 21). A log that the tools marked is empty and keeps it.
pub fn set_gi<S: Store>(
    store: &mut S,
    layout: &Layout,
    superblock: &mut AnySuperBlock,
    node: NodeId,
    list: &str,
) -> Result<(), SetGiError<S::Error>> {
    let primary = |superblock: &AnySuperBlock| {
        let flags = superblock.device_flags();
        flags.contains(DeviceFlags::PRIMARY_IND)
    };
    let mut new = superblock.clone();
    gi::apply(&mut new, node, list).map_err(SetGiError::List)?;
    let becomes_primary = primary(&new) && !primary(superblock);
    if becomes_primary && new.is_clean() && !gi::names_al_clean(&new, list) {
        let mut area = vec![0; layout.geometry().al.bytes() as usize];
        let read = store.read(layout.al_byte(), &mut area);
        read.map_err(SetGiError::Store)?;
        if replay(&area, layout, &new).is_ok_and(|replay| !replay.active.is_empty()) {
            new.set_unclean();
        }
    }
    *superblock = new;
    Ok(())
}

fn replay(area: &[u8], layout: &Layout, superblock: &AnySuperBlock) -> Result<Replay, ReplayError> {
    let geometry = layout.geometry().al;
    let extents = superblock.al_extents();
    match al_form(area, layout, superblock) {
        AlForm::Blocks => al::replay(area, geometry),
        AlForm::PersistentMemory => Ok(al::replay_persistent_memory(area, extents)),
        AlForm::Legacy => Ok(al::replay_legacy(area, extents)),
    }
}

/// Form of the log in `area`, the whole ring, for this superblock.
pub fn al_form(area: &[u8], layout: &Layout, superblock: &AnySuperBlock) -> AlForm {
    let may_be_legacy = match superblock {
        AnySuperBlock::V08(v08::SuperBlock {
            magic_84_unclean, ..
        }) => !magic_84_unclean,
        AnySuperBlock::V09(_) => false,
    };
    AlForm::of(area, layout.geometry().al, may_be_legacy)
}

/// The bitmap of the agreed size, clipped to what the device can hold.
pub fn agreed_bitmap(layout: &Layout, superblock: &AnySuperBlock) -> BitmapShape {
    let sectors = superblock
        .effective_size()
        .0
        .min(layout.tool_usable_sectors());
    layout.bitmap_shape(sectors)
}

fn mark<S: Store>(
    store: &mut S,
    layout: &Layout,
    superblock: &AnySuperBlock,
    replay: &Replay,
    applied: &mut Applied,
) -> Result<(), S::Error> {
    let shape = agreed_bitmap(layout, superblock);
    applied.bitmap_bytes = shape.area_bytes();
    let disabled =
        DeviceFlags::CRASHED_PRIMARY | DeviceFlags::PRIMARY_IND | DeviceFlags::AL_DISABLED;
    applied.everything_marked = match replay.coverage {
        _ if superblock.device_flags().contains(disabled) || leaves_peers_behind(superblock) => {
            Some(FullReason::LogDisabled)
        }
        Coverage::Incomplete(gap) => Some(FullReason::Gap(gap)),
        Coverage::Complete => None,
    };
    if applied.everything_marked.is_some() {
        let bits = 0..shape.bits();
        applied.newly_set_bits = set_bits(store, layout, &shape, bits)?;
        applied.extents = replay.active.clone();
        return Ok(());
    }
    for extent in &replay.active {
        let bits = shape.extent_bits(*extent);
        let start = bits.start / 32 * u64::from(shape.slots()) * 4;
        if start >= shape.area_bytes() {
            applied.beyond.push((*extent, start));
            continue;
        }
        applied.newly_set_bits += set_bits(store, layout, &shape, bits)?;
        applied.extents.push(*extent);
    }
    Ok(())
}

/// A Primary wrote here without an activity log, and some peer was left behind at a generation: what it
/// lacks was in memory only.
fn leaves_peers_behind(superblock: &AnySuperBlock) -> bool {
    let unlogged = DeviceFlags::PRIMARY_IND | DeviceFlags::AL_DISABLED;
    let is_named = |uuid: Uuid| !uuid.without_primary_bit().is_zero();
    let behind = match superblock {
        AnySuperBlock::V08(old) => is_named(old.bitmap_uuid),
        AnySuperBlock::V09(new) => {
            let peers = new.peers.iter().filter(|p| p.bitmap_index.is_some());
            peers.map(|p| p.bitmap_uuid).any(is_named)
        }
    };
    superblock.device_flags().contains(unlogged) && behind
}

/// Sets bits in every slot on disk, within the pages that the bitmap has.
fn set_bits<S: Store>(
    store: &mut S,
    layout: &Layout,
    shape: &BitmapShape,
    bits: core::ops::Range<u64>,
) -> Result<u64, S::Error> {
    let pages = shape.page_bytes(bits.clone());
    let end = pages.end.min(shape.area_bytes());
    let mut newly_set = 0;
    let mut at = pages.start;
    let mut buf = vec![0; CHUNK_BYTES.min(end.saturating_sub(at)) as usize];
    while at < end {
        let len = CHUNK_BYTES.min(end - at) as usize;
        let buf = &mut buf[..len];
        store.read(layout.bitmap_byte() + at, buf)?;
        let mut piece = Piece::new(shape, at, &mut *buf);
        for slot in 0..shape.slots() {
            newly_set += piece.set_bits(slot, bits.clone());
        }
        store.write(layout.bitmap_byte() + at, buf)?;
        at += len as u64;
    }
    Ok(newly_set)
}

/// True if any bit of the agreed size is set in any slot.
pub fn any_bit_set<S: Store>(
    store: &mut S,
    layout: &Layout,
    superblock: &AnySuperBlock,
) -> Result<bool, S::Error> {
    let shape = agreed_bitmap(layout, superblock);
    for (at, len) in chunks(shape.area_bytes()) {
        let mut buf = vec![0; len as usize];
        store.read(layout.bitmap_byte() + at, &mut buf)?;
        let piece = Piece::new(&shape, at, &buf[..]);
        if (0..shape.slots()).any(|slot| piece.count(slot, shape.bits()) > 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Writes a whole metadata area from a superblock and the words of each slot, as runs of 64-bit
/// words (see [`super::dump::Dump`]). What the words do not cover becomes zero; words behind the
/// bitmap of the agreed size are ignored. The activity log becomes empty.
pub fn restore<S: Store>(
    store: &mut S,
    layout: &Layout,
    superblock: &AnySuperBlock,
    bitmap: &[Vec<(u64, u64)>],
) -> Result<(), S::Error> {
    wipe(store, layout)?;
    initialise_al(store, layout)?;
    let shape = agreed_bitmap(layout, superblock);
    let area = layout.bitmap_area_bytes();
    let used = shape.area_bytes().min(area);
    store.zero(layout.bitmap_byte() + used, area - used)?;
    let mut words: Vec<_> = bitmap.iter().map(|runs| WordRuns::new(runs)).collect();
    for (at, len) in chunks(used) {
        let mut buf = vec![0; len as usize];
        let mut piece = Piece::new(&shape, at, &mut buf[..]);
        for (slot, words) in (0u8..shape.slots()).zip(&mut words) {
            for index in piece.word_range(slot) {
                piece.set_word(slot, index, words.next_half());
            }
        }
        store.write(layout.bitmap_byte() + at, &buf)?;
    }
    write_superblock(store, layout, superblock)
}

/// Runs of 64-bit words as a stream of 32-bit halves, the lower first; zero after the end.
struct WordRuns<'a> {
    runs: core::slice::Iter<'a, (u64, u64)>,
    left: u64,
    word: u64,
    upper: bool,
}

impl<'a> WordRuns<'a> {
    fn new(runs: &'a [(u64, u64)]) -> Self {
        Self {
            runs: runs.iter(),
            left: 0,
            word: 0,
            upper: false,
        }
    }

    fn next_half(&mut self) -> u32 {
        if self.upper {
            self.upper = false;
            return (self.word >> 32) as u32;
        }
        while self.left == 0 {
            let Some((count, word)) = self.runs.next() else {
                self.word = 0;
                self.left = u64::MAX;
                break;
            };
            (self.left, self.word) = (*count, *word);
        }
        self.left -= 1;
        self.upper = true;
        self.word as u32
    }
}

/// Moves clean internal metadata from `old` to `new`, where the device has grown: bitmap first
/// (from its end, since the areas may overlap), then an empty log and the superblock, then the
/// old superblock is erased. `superblock` describes the old place before and the new one after.
pub fn move_internal<S: Store>(
    store: &mut S,
    old: &Layout,
    new: &Layout,
    superblock: &mut AnySuperBlock,
) -> Result<(), S::Error> {
    assert!(superblock.is_clean(), "only an applied log may be dropped");
    assert!(
        new.bitmap_byte() >= old.bitmap_byte(),
        "metadata moves towards the end"
    );
    let kept = old.bitmap_area_bytes().min(new.bitmap_area_bytes());
    let list: Vec<_> = chunks(kept).collect();
    let mut buf = vec![0; CHUNK_BYTES as usize];
    for (at, len) in list.into_iter().rev() {
        let buf = &mut buf[..len as usize];
        store.read(old.bitmap_byte() + at, buf)?;
        store.write(new.bitmap_byte() + at, buf)?;
    }
    store.zero(new.bitmap_byte() + kept, new.bitmap_area_bytes() - kept)?;
    initialise_al(store, new)?;
    superblock.set_layout(new);
    write_superblock(store, new, superblock)?;
    erase_old(store, old, new)?;
    store.flush()
}

/// Zeroes what the old metadata covered and the new does not.
fn erase_old<S: Store>(store: &mut S, old: &Layout, new: &Layout) -> Result<(), S::Error> {
    let start = old.bitmap_byte();
    let end = (old.superblock_byte() + BLOCK_BYTES as u64).min(new.bitmap_byte());
    store.zero(start, end.saturating_sub(start))
}

/// Clips the agreed size to what the device can hold; returns what it was if it was larger.
pub fn clip_effective_size(
    layout: &Layout,
    superblock: &mut AnySuperBlock,
) -> Option<(Sector, Sector)> {
    let usable = Sector(layout.tool_usable_sectors());
    let size = superblock.effective_size_mut();
    let found = *size;
    *size = usable.min(found);
    (found > usable).then_some((found, usable))
}

/// Reads the superblock at `at`.
pub fn read_block<S: Store>(store: &mut S, at: u64) -> Result<[u8; BLOCK_BYTES], S::Error> {
    let mut block = [0; BLOCK_BYTES];
    store.read(at, &mut block)?;
    Ok(block)
}
