//! The activity log: transaction blocks, the persistent-memory form, the form of DRBD 8.3, and
//! their replay (sections 9, 10 and 11).
//!
//! A transaction names up to 64 slots whose extent changes and a part of all slots as they were
//! before. Replaying the ring from the oldest to the newest transaction gives the set of 4 MiB
//! extents that may have been written to at the moment of a crash.

use alloc::vec;
use alloc::vec::Vec;

use super::BLOCK_BYTES;
use super::crc32c::crc32c_raw;
use super::layout::AlGeometry;
use crate::units::AlExtent;

/// Most slot changes in one transaction.
pub const UPDATES_PER_TRANSACTION: usize = 64;
/// Slots that one transaction repeats.
pub const CONTEXT_PER_TRANSACTION: u32 = 919;
/// Slot numbers are below this.
pub const SLOTS_MAX: usize = 65534;
/// "No extent": the slot is free.
pub const FREE: AlExtent = AlExtent(u32::MAX);
/// Magic of a transaction block.
pub const AL_MAGIC: u32 = 0x69cb_65a2;
/// Magic of the persistent-memory form.
pub const AL_PMEM_MAGIC: u32 = 0x6aa6_67a6;
/// Magic of a sector of the form of DRBD 8.3.
pub const AL_LEGACY_MAGIC: u32 = 0x8374_0267;
/// Bytes of the activity log of DRBD 8.3.
pub const LEGACY_BYTES: usize = 64 * 512;

const UNUSED_SLOT: u16 = 0xffff;
const TYPE_UPDATE: u16 = 0;
const TYPE_INITIALISED: u16 = 0xffff;
const CRC_AT: usize = 8;
const UPDATE_SLOTS_AT: usize = 36;
const UPDATE_EXTENTS_AT: usize = 164;
const CONTEXT_AT: usize = 420;
const LEGACY_CONTEXT: u32 = 61;

/// One slot gets another extent (or [`FREE`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotUpdate {
    /// Slot number.
    pub slot: u16,
    /// Extent that the slot holds from now on.
    pub extent: AlExtent,
}

/// A transaction to be written.
#[derive(Clone, Copy, Debug)]
pub struct Transaction<'a> {
    /// Counts up by one per transaction; decides the place in the ring.
    pub number: u32,
    /// First slot of the context; see [`next_context_start`].
    pub context_start: u16,
    /// The changes, at most 64.
    pub updates: &'a [SlotUpdate],
    /// All slots (`al-extents` many) as they are **before** the changes.
    pub slots: &'a [AlExtent],
}

impl Transaction<'_> {
    /// Writes the block, CRC included.
    ///
    /// # Panics
    /// With more than 64 updates, more than 65534 slots, or a context that starts behind them.
    pub fn encode(&self, out: &mut [u8; BLOCK_BYTES]) {
        assert!(self.slots.len() <= SLOTS_MAX, "al-extents is at most 65534");
        let context = self.slots.get(usize::from(self.context_start)..);
        let context = context.expect("the context starts at an existing slot");
        let head = BlockHead {
            number: self.number,
            kind: TYPE_UPDATE,
            context_size: self.slots.len() as u16,
            context_start: self.context_start,
        };
        encode_block(out, head, self.updates, context);
    }
}

/// Where the context of the transaction after one that started at `start` begins.
pub const fn next_context_start(start: u16, slots: u16) -> u16 {
    let next = start as u32 + CONTEXT_PER_TRANSACTION;
    if next >= slots as u32 { 0 } else { next as u16 }
}

/// Writes an initialised (empty) block; a fresh log has only these.
pub fn encode_initialised(out: &mut [u8; BLOCK_BYTES]) {
    out.fill(0);
    out[..4].copy_from_slice(&AL_MAGIC.to_be_bytes());
    out[12..14].copy_from_slice(&TYPE_INITIALISED.to_be_bytes());
    let crc = crc32c_raw(&[&out[..]]);
    out[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_be_bytes());
}

struct BlockHead {
    number: u32,
    kind: u16,
    context_size: u16,
    context_start: u16,
}

fn encode_block(
    out: &mut [u8; BLOCK_BYTES],
    head: BlockHead,
    updates: &[SlotUpdate],
    context: &[AlExtent],
) {
    assert!(
        updates.len() <= UPDATES_PER_TRANSACTION,
        "at most 64 updates per transaction"
    );
    out[..CONTEXT_AT].fill(0);
    out[..4].copy_from_slice(&AL_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&head.number.to_be_bytes());
    out[12..14].copy_from_slice(&head.kind.to_be_bytes());
    out[14..16].copy_from_slice(&(updates.len() as u16).to_be_bytes());
    out[16..18].copy_from_slice(&head.context_size.to_be_bytes());
    out[18..20].copy_from_slice(&head.context_start.to_be_bytes());
    out[UPDATE_SLOTS_AT..].fill(0xff);
    for (i, update) in updates.iter().enumerate() {
        let slot_at = UPDATE_SLOTS_AT + 2 * i;
        out[slot_at..slot_at + 2].copy_from_slice(&update.slot.to_be_bytes());
        let extent_at = UPDATE_EXTENTS_AT + 4 * i;
        out[extent_at..extent_at + 4].copy_from_slice(&update.extent.0.to_be_bytes());
    }
    for (word, extent) in out[CONTEXT_AT..].chunks_exact_mut(4).zip(context) {
        word.copy_from_slice(&extent.0.to_be_bytes());
    }
    let crc = crc32c_raw(&[&out[..]]);
    out[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_be_bytes());
}

/// A block as read from the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    /// Written by create-md or apply-al; holds nothing.
    Initialised,
    /// A transaction.
    Update(Update),
}

/// A transaction as read from the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// Transaction number.
    pub number: u32,
    /// Number of slots when it was written.
    pub context_size: u16,
    /// First slot of the context.
    pub context_start: u16,
    /// Changes.
    pub updates: Vec<SlotUpdate>,
    /// 919 slots from `context_start` on, before the changes.
    pub context: Vec<AlExtent>,
}

/// Why a block of the ring cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// Not a transaction block.
    #[error("the magic number is {found:#010x}")]
    Magic {
        /// First 32 bits.
        found: u32,
    },
    /// Torn or damaged.
    #[error("the CRC is {found:#010x}, computed {computed:#010x}")]
    Crc {
        /// Value on disk.
        found: u32,
        /// Value of the bytes on disk.
        computed: u32,
    },
    /// A block that was written like this.
    #[error("the transaction type is {found:#06x}")]
    Type {
        /// Value on disk.
        found: u16,
    },
    /// A block that was written like this.
    #[error("it has {found} updates, more than 64")]
    UpdateCount {
        /// Value on disk.
        found: u16,
    },
}

impl Block {
    /// Reads and checks one block.
    pub fn decode(block: &[u8; BLOCK_BYTES]) -> Result<Self, BlockError> {
        let magic = be32(block, 0);
        if magic != AL_MAGIC {
            return Err(BlockError::Magic { found: magic });
        }
        let found = be32(block, CRC_AT);
        let computed = crc32c_raw(&[&block[..CRC_AT], &[0; 4], &block[CRC_AT + 4..]]);
        if found != computed {
            return Err(BlockError::Crc { found, computed });
        }
        match be16(block, 12) {
            TYPE_INITIALISED => return Ok(Self::Initialised),
            TYPE_UPDATE => {}
            found => return Err(BlockError::Type { found }),
        }
        let count = be16(block, 14);
        if usize::from(count) > UPDATES_PER_TRANSACTION {
            return Err(BlockError::UpdateCount { found: count });
        }
        // An entry behind the count that names a slot is taken too: one extent too many is
        // harmless, one too few is not.
        let updates = (0..UPDATES_PER_TRANSACTION)
            .map(|i| SlotUpdate {
                slot: be16(block, UPDATE_SLOTS_AT + 2 * i),
                extent: AlExtent(be32(block, UPDATE_EXTENTS_AT + 4 * i)),
            })
            .enumerate()
            .filter(|(i, update)| *i < usize::from(count) || update.slot != UNUSED_SLOT)
            .map(|(_, update)| update)
            .collect();
        Ok(Self::Update(Update {
            number: be32(block, 4),
            context_size: be16(block, 16),
            context_start: be16(block, 18),
            updates,
            context: block[CONTEXT_AT..]
                .chunks_exact(4)
                .map(|w| AlExtent(u32::from_be_bytes([w[0], w[1], w[2], w[3]])))
                .collect(),
        }))
    }

    /// Writes the block back.
    pub fn encode(&self, out: &mut [u8; BLOCK_BYTES]) {
        match self {
            Self::Initialised => encode_initialised(out),
            Self::Update(update) => {
                let head = BlockHead {
                    number: update.number,
                    kind: TYPE_UPDATE,
                    context_size: update.context_size,
                    context_start: update.context_start,
                };
                encode_block(out, head, &update.updates, &update.context);
            }
        }
    }
}

/// Form of an activity log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlForm {
    /// Transactions in 4 KiB blocks (DRBD 8.4 and later).
    Blocks,
    /// One array of slots on persistent memory.
    PersistentMemory,
    /// Transactions in 512-byte sectors (DRBD 8.3 and older).
    Legacy,
}

impl AlForm {
    /// Form of the log in `area`. Only v08 metadata with a `clean_magic` (0x8374026b) and the
    /// old fixed shape can hold the legacy form (section 9.8).
    pub fn of(area: &[u8], geometry: AlGeometry, may_be_legacy: bool) -> Self {
        let first = |at: usize| {
            area.get(at..at + 4)
                .map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
        };
        let modern = !may_be_legacy
            || geometry != AlGeometry::DEFAULT
            || first(0) == Some(AL_MAGIC)
            || first(BLOCK_BYTES) == Some(AL_MAGIC);
        match (modern, first(0)) {
            (true, Some(AL_PMEM_MAGIC)) => Self::PersistentMemory,
            (true, _) => Self::Blocks,
            (false, _) => Self::Legacy,
        }
    }
}

/// What a replay found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// Extents that were active, ascending, each once.
    pub active: Vec<AlExtent>,
    /// Whether these are all of them.
    pub coverage: Coverage,
    /// Blocks of the ring that are not valid.
    pub corrupt_blocks: u32,
    /// Number that the next transaction of this ring would have.
    pub next_number: u32,
    /// Slot numbers that were out of range and ignored.
    pub slots_out_of_range: u32,
    /// True if the log holds nothing and need not be initialised again.
    pub clean: bool,
}

/// Whether a replay gives every extent that may have been active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// Every slot is known.
    Complete,
    /// Context is missing: extents may have been active that are not in the result, so that
    /// only a full resync is safe.
    Incomplete(Gap),
}

/// Why context is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// A block that is neither the newest nor the one after it is damaged or missing.
    HoleInRing,
    /// Transactions are not where their numbers say.
    Misplaced,
    /// The blocks that are left do not repeat all slots.
    Context {
        /// The first slot that no block repeats.
        slot: u16,
    },
}

/// A log that gives no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// Not one valid block: there is no log here.
    #[error("no usable activity log found; create-md writes one")]
    NoData,
    /// Initialised and damaged blocks, but no transaction.
    #[error("no valid activity-log transaction found, and {corrupt_blocks} blocks are damaged")]
    NoTransaction {
        /// Number of damaged blocks.
        corrupt_blocks: u32,
    },
    /// The bytes given are not the ring.
    #[error("{found} bytes of activity log were given, the ring has {needed}")]
    AreaSize {
        /// Bytes given.
        found: u64,
        /// Bytes of the ring.
        needed: u64,
    },
}

/// Replays a log of the block form. `area` is the whole ring as it lies on disk.
///
/// Transactions are taken in the order of their numbers (signed 32-bit difference), which is the
/// ring order unless a block was lost or misplaced. Section 9.7, with our stricter rule: the
/// result says whether context may be missing.
pub fn replay(area: &[u8], geometry: AlGeometry) -> Result<Replay, ReplayError> {
    check_area(area, geometry)?;
    let blocks = (0..geometry.blocks()).map(|position| block_at(area, geometry, position));
    let blocks: Vec<_> = blocks.collect();
    replay_blocks(&blocks, geometry)
}

/// The block at a position of the ring in an area of the geometry's size.
///
/// # Panics
///
/// The area ends before it.
pub fn block_at(area: &[u8], geometry: AlGeometry, position: u32) -> Result<Block, BlockError> {
    let at = geometry.block_of_position(position) as usize * BLOCK_BYTES;
    let block = area[at..].first_chunk().expect("the area has its size");
    Block::decode(block)
}

/// As [`replay`], of blocks that were decoded before, by position.
pub fn replay_blocks<'a>(
    decoded: impl IntoIterator<Item = &'a Result<Block, BlockError>>,
    geometry: AlGeometry,
) -> Result<Replay, ReplayError> {
    let blocks = geometry.blocks();
    let mut initialised = 0u32;
    let mut corrupt = Vec::new();
    let mut found: Vec<(u32, &Update)> = Vec::new();
    for (position, block) in (0..blocks).zip(decoded) {
        match block {
            Ok(Block::Initialised) => initialised += 1,
            Ok(Block::Update(update)) => found.push((position, update)),
            Err(_) => corrupt.push(position),
        }
    }
    let corrupt_blocks = corrupt.len() as u32;
    if corrupt_blocks == blocks {
        return Err(ReplayError::NoData);
    }
    let Some(newest) = found.iter().map(|(_, update)| update.number).reduce(later) else {
        // The very first transaction after initialisation may be torn.
        return if corrupt.is_empty() || corrupt == [0] {
            Ok(Replay {
                active: Vec::new(),
                coverage: Coverage::Complete,
                corrupt_blocks,
                next_number: 0,
                slots_out_of_range: 0,
                clean: true,
            })
        } else {
            Err(ReplayError::NoTransaction { corrupt_blocks })
        };
    };
    found.sort_by_key(|(_, update)| core::cmp::Reverse(newest.wrapping_sub(update.number)));
    let mut hot = HotSlots::default();
    for (_, update) in &found {
        hot.apply(update);
    }
    let coverage = match find_gap(&found, &corrupt, initialised, geometry) {
        None => Coverage::Complete,
        Some(gap) => Coverage::Incomplete(gap),
    };
    Ok(Replay {
        coverage,
        corrupt_blocks,
        next_number: newest.wrapping_add(1),
        slots_out_of_range: hot.out_of_range,
        active: hot.into_active(),
        clean: false,
    })
}

/// Replays a log of the persistent-memory form; slots from `al_extents` (of the superblock) on
/// are ignored (section 10). It has no checksum, so this always gives an answer.
pub fn replay_persistent_memory(area: &[u8], al_extents: u32) -> Replay {
    let slots = area.get(4..).unwrap_or_default().chunks_exact(4);
    let active = slots
        .take(al_extents as usize)
        .map(|w| AlExtent(u32::from_be_bytes([w[0], w[1], w[2], w[3]])))
        .collect();
    Replay {
        active: sorted_active(active),
        coverage: Coverage::Complete,
        corrupt_blocks: 0,
        next_number: 0,
        slots_out_of_range: 0,
        clean: false,
    }
}

/// Replays a log of DRBD 8.3 (section 11). No valid sector is not an error there.
pub fn replay_legacy(area: &[u8], al_extents: u32) -> Replay {
    let ring = (1 + al_extents.div_ceil(LEGACY_CONTEXT)).min(64) as usize;
    let mut corrupt_blocks = 0;
    let mut found: Vec<(u32, &[u8])> = Vec::new();
    for sector in area.chunks_exact(512).take(ring) {
        let xor = (0..62).fold(0, |xor, i| xor ^ be32(sector, 8 + 8 * i + 4));
        if be32(sector, 0) == AL_LEGACY_MAGIC && be32(sector, 8 + 62 * 8) == xor {
            found.push((be32(sector, 4), sector));
        } else {
            corrupt_blocks += 1;
        }
    }
    let newest = found
        .iter()
        .map(|(number, _)| *number)
        .reduce(later)
        .unwrap_or(u32::MAX);
    found.sort_by_key(|(number, _)| core::cmp::Reverse(newest.wrapping_sub(*number)));
    let mut hot = HotSlots::default();
    for (_, sector) in &found {
        for i in (0..62).rev() {
            let extent = AlExtent(be32(sector, 8 + 8 * i + 4));
            if extent != FREE {
                hot.set(be32(sector, 8 + 8 * i), extent);
            }
        }
    }
    Replay {
        coverage: Coverage::Complete,
        corrupt_blocks,
        next_number: 0,
        slots_out_of_range: hot.out_of_range,
        active: hot.into_active(),
        clean: false,
    }
}

fn check_area(area: &[u8], geometry: AlGeometry) -> Result<(), ReplayError> {
    let (found, needed) = (area.len() as u64, geometry.bytes());
    if found == needed {
        Ok(())
    } else {
        Err(ReplayError::AreaSize { found, needed })
    }
}

fn later(a: u32, b: u32) -> u32 {
    if b.wrapping_sub(a) as i32 > 0 { b } else { a }
}

/// `found` is sorted from the oldest to the newest.
fn find_gap(
    found: &[(u32, &Update)],
    corrupt: &[u32],
    initialised: u32,
    geometry: AlGeometry,
) -> Option<Gap> {
    let blocks = geometry.blocks();
    if found
        .windows(2)
        .any(|pair| pair[1].1.number != pair[0].1.number.wrapping_add(1))
    {
        return Some(Gap::HoleInRing);
    }
    if found
        .iter()
        .any(|(position, update)| update.number % blocks != *position)
    {
        return Some(Gap::Misplaced);
    }
    let newest = found.last()?.1.number;
    // Only the transaction that was being written when the machine stopped may be damaged.
    let after_newest = newest.wrapping_add(1) % blocks;
    if corrupt.iter().any(|position| *position != after_newest) {
        return Some(Gap::HoleInRing);
    }
    if initialised > 0 {
        // Nothing was overwritten since the log was empty: the updates alone say everything.
        return None;
    }
    let newest = &found.last()?.1;
    let mut covered = vec![false; usize::from(newest.context_size)];
    for (_, update) in found {
        let start = usize::from(update.context_start).min(covered.len());
        let end = (start + CONTEXT_PER_TRANSACTION as usize).min(covered.len());
        covered[start..end].fill(true);
    }
    let slot = covered.iter().position(|c| !c)?;
    Some(Gap::Context { slot: slot as u16 })
}

/// Extents by slot.
#[derive(Default)]
struct HotSlots {
    slots: Vec<AlExtent>,
    out_of_range: u32,
}

impl HotSlots {
    fn apply(&mut self, update: &Update) {
        for (slot, extent) in (u32::from(update.context_start)..).zip(&update.context) {
            // Behind the last slot the context is padded with free entries.
            if *extent != FREE || slot < u32::from(update.context_size) {
                self.set(slot, *extent);
            }
        }
        for change in &update.updates {
            self.set(u32::from(change.slot), change.extent);
        }
    }

    fn set(&mut self, slot: u32, extent: AlExtent) {
        let slot = slot as usize;
        if slot >= SLOTS_MAX {
            self.out_of_range += 1;
            return;
        }
        if slot >= self.slots.len() {
            self.slots.resize(slot + 1, FREE);
        }
        self.slots[slot] = extent;
    }

    fn into_active(self) -> Vec<AlExtent> {
        sorted_active(self.slots)
    }
}

fn sorted_active(mut extents: Vec<AlExtent>) -> Vec<AlExtent> {
    extents.retain(|extent| *extent != FREE);
    extents.sort_unstable();
    extents.dedup();
    extents
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
