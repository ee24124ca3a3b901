//! Crash points of metadata: every prefix of the writes of a procedure, the last one torn at
//! every sector, with and without what was not flushed; then the procedure again.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_format::disk::al::{
    self, Coverage, FREE, ReplayError, SlotUpdate, Transaction, next_context_start,
};
use lockstep_format::disk::any::{AnySuperBlock, Format};
use lockstep_format::disk::bitmap::Piece;
use lockstep_format::disk::layout::{AlGeometry, BitmapBlock, Geometry, Layout, Placement};
use lockstep_format::disk::store::{self, ApplyError, BitmapInit, Store};
use lockstep_format::disk::v09::DeviceFlags;
use lockstep_format::units::{AlExtent, NodeId, Sector};

/// Deterministic numbers.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// A ring with the writer that fills it and what is really active.
struct Log {
    geometry: AlGeometry,
    area: Vec<u8>,
    slots: Vec<AlExtent>,
    number: u32,
    cycle: u16,
}

impl Log {
    fn new(geometry: AlGeometry, slots: u16) -> Self {
        assert!(slots <= geometry.max_extents());
        let mut area = vec![0; geometry.bytes() as usize];
        for block in area.chunks_exact_mut(4096) {
            al::encode_initialised(block.first_chunk_mut().unwrap());
        }
        let slots = vec![FREE; slots.into()];
        Self {
            geometry,
            area,
            slots,
            number: 0,
            cycle: 0,
        }
    }

    fn active(&self) -> Vec<AlExtent> {
        let set: BTreeSet<_> = self.slots.iter().copied().filter(|e| *e != FREE).collect();
        set.into_iter().collect()
    }

    /// The next transaction: its block, where it goes, and the slots after it.
    fn prepare(&self, random: &mut Lcg) -> ([u8; 4096], usize, Vec<AlExtent>) {
        let mut after = self.slots.clone();
        let count = 1 + random.below(64) as usize;
        let mut updates: Vec<SlotUpdate> = Vec::new();
        for _ in 0..count {
            let slot = random.below(self.slots.len() as u64) as u16;
            let extent = AlExtent(random.below(200_000) as u32);
            let taken = after.contains(&extent) || updates.iter().any(|u| u.slot == slot);
            if !taken {
                updates.push(SlotUpdate { slot, extent });
                after[usize::from(slot)] = extent;
            }
        }
        let mut block = [0; 4096];
        let transaction = Transaction {
            number: self.number,
            context_start: self.cycle,
            updates: &updates,
            slots: &self.slots,
        };
        transaction.encode(&mut block);
        (
            block,
            self.geometry.block_of(self.number) as usize * 4096,
            after,
        )
    }

    fn commit(&mut self, block: &[u8; 4096], at: usize, after: Vec<AlExtent>) {
        self.area[at..at + 4096].copy_from_slice(block);
        self.slots = after;
        self.number += 1;
        self.cycle = next_context_start(self.cycle, self.slots.len() as u16);
    }
}

#[test]
fn a_torn_transaction_leaves_the_state_before_or_after_it() {
    for (stripes, blocks, slots, transactions) in [
        (1, 8, 67, 40),
        (1, 8, 2000, 30),
        (1, 8, 6433, 20),
        (3, 5, 1237, 40),
        (4, 8, 919, 70),
    ] {
        let geometry = AlGeometry::new(stripes, blocks).unwrap();
        let mut log = Log::new(geometry, slots);
        let mut random = Lcg(u64::from(slots));
        for _ in 0..transactions {
            let (block, at, after) = log.prepare(&mut random);
            let before = log.active();
            let wanted: BTreeSet<_> = after.iter().copied().filter(|e| *e != FREE).collect();
            let wanted: Vec<_> = wanted.into_iter().collect();
            for sectors in 0..=8 {
                let mut torn = log.area.clone();
                torn[at..at + sectors * 512].copy_from_slice(&block[..sectors * 512]);
                check(&torn, &log, sectors, &before, &wanted);
            }
            for sectors in (0..8).map(|_| random.below(256)) {
                let mut torn = log.area.clone();
                for k in (0..8).filter(|k| sectors >> k & 1 == 1) {
                    let range = k * 512..(k + 1) * 512;
                    torn[at + range.start..at + range.end].copy_from_slice(&block[range]);
                }
                check(
                    &torn,
                    &log,
                    if sectors == 255 { 8 } else { 1 },
                    &before,
                    &wanted,
                );
            }
            log.commit(&block, at, after);
        }
    }
}

/// A transaction of which `sectors` of 8 arrived gives the old state, all of it the new one.
fn check(torn: &[u8], log: &Log, sectors: usize, before: &[AlExtent], after: &[AlExtent]) {
    let replay = al::replay(torn, log.geometry).unwrap();
    let context = format!("transaction {} with {sectors} sectors", log.number);
    assert_eq!(replay.coverage, Coverage::Complete, "{context}");
    if sectors == 8 {
        assert_eq!(replay.active, after, "{context}");
        assert_eq!(replay.next_number, log.number + 1, "{context}");
    } else {
        // A prefix may hold all that differs from what was there.
        assert!(
            replay.active == before || replay.active == after,
            "{context}"
        );
    }
}

#[test]
fn a_damaged_transaction_inside_the_ring_is_not_taken_for_complete() {
    let geometry = AlGeometry::DEFAULT;
    let mut log = Log::new(geometry, 2000);
    let mut random = Lcg(7);
    for _ in 0..21 {
        let (block, at, after) = log.prepare(&mut random);
        log.commit(&block, at, after);
    }
    assert_eq!(
        al::replay(&log.area, geometry).unwrap().coverage,
        Coverage::Complete
    );
    let newest = geometry.block_of(log.number - 1);
    for damaged in 0..8 {
        let mut area = log.area.clone();
        area[damaged as usize * 4096 + 700] ^= 1;
        let coverage = al::replay(&area, geometry).unwrap().coverage;
        // The newest may be torn; the one after it is the oldest, whose context may be repeated.
        let harmless = damaged == newest || damaged == (newest + 1) % 8;
        assert_eq!(
            coverage == Coverage::Complete,
            harmless,
            "block {damaged} of newest {newest}"
        );
    }
    // A lost write: the place still holds the transaction of one round before.
    let mut lost = log.area.clone();
    let old = (log.number - 3) % 8;
    let mut stale = Log::new(geometry, 2000);
    let mut random = Lcg(7);
    for _ in 0..log.number - 8 {
        let (block, at, after) = stale.prepare(&mut random);
        stale.commit(&block, at, after);
    }
    let at = old as usize * 4096;
    lost[at..at + 4096].copy_from_slice(&stale.area[at..at + 4096]);
    let coverage = al::replay(&lost, geometry).unwrap().coverage;
    assert_ne!(coverage, Coverage::Complete);
}

/// What the store was asked to do.
#[derive(Clone)]
enum Step {
    Write(u64, Vec<u8>),
    Flush,
}

/// A sparse device that remembers the order of writes and flushes.
#[derive(Clone, Default)]
struct Memory {
    blocks: BTreeMap<u64, [u8; 512]>,
    steps: Vec<Step>,
}

impl Memory {
    fn put(&mut self, at: u64, bytes: &[u8]) {
        for (sector, bytes) in (at / 512..).zip(bytes.chunks_exact(512)) {
            self.blocks.insert(sector, bytes.try_into().unwrap());
        }
    }

    /// All states that a crash during `steps` may leave on a device that was `self` before.
    fn crashes(&self, steps: &[Step]) -> Vec<Memory> {
        let base = Memory {
            blocks: self.blocks.clone(),
            steps: Vec::new(),
        };
        let (mut states, mut kept, mut durable) = (vec![base.clone()], base.clone(), base);
        for step in steps {
            match step {
                Step::Flush => durable = kept.clone(),
                Step::Write(at, bytes) => {
                    for sectors in 1..=bytes.len().min(4096) / 512 {
                        // In order, the last one torn; and: only this one survived.
                        for start in [&kept, &durable] {
                            let mut state = start.clone();
                            state.put(*at, &bytes[..sectors * 512]);
                            states.push(state);
                        }
                    }
                    kept.put(*at, bytes);
                    states.push(kept.clone());
                }
            }
        }
        states
    }
}

impl Store for Memory {
    type Error = std::convert::Infallible;

    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), Self::Error> {
        assert!(
            at.is_multiple_of(4096) && out.len().is_multiple_of(4096),
            "whole blocks"
        );
        for (sector, out) in (at / 512..).zip(out.chunks_exact_mut(512)) {
            out.copy_from_slice(self.blocks.get(&sector).unwrap_or(&[0; 512]));
        }
        Ok(())
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Self::Error> {
        assert!(
            at.is_multiple_of(4096) && bytes.len().is_multiple_of(4096),
            "whole blocks"
        );
        self.put(at, bytes);
        self.steps.push(Step::Write(at, bytes.to_vec()));
        Ok(())
    }

    fn zero(&mut self, at: u64, len: u64) -> Result<(), Self::Error> {
        if len > 0 {
            self.write(at, &vec![0; len as usize])?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Self::Error> {
        self.steps.push(Step::Flush);
        Ok(())
    }
}

const DEVICE_BYTES: u64 = 64 << 20;

fn layout(device_bytes: u64, peers: u8) -> Layout {
    Layout::new(
        Placement::Internal,
        Geometry::for_peers(peers),
        device_bytes,
    )
    .unwrap()
}

fn load(memory: &mut Memory, layout: &Layout) -> Option<AnySuperBlock> {
    let block = store::read_block(memory, layout.superblock_byte()).unwrap();
    let superblock = AnySuperBlock::decode(&block).ok()?;
    superblock.layout(Placement::Internal, DEVICE_BYTES).ok()?;
    Some(superblock)
}

fn bitmap(memory: &mut Memory, layout: &Layout) -> Vec<u8> {
    let mut bytes = vec![0; layout.bitmap_area_bytes() as usize];
    memory.read(layout.bitmap_byte(), &mut bytes).unwrap();
    bytes
}

/// A crashed primary with transactions in its log.
fn crashed_primary(transactions: u32) -> (Memory, Layout, Vec<AlExtent>) {
    let layout = layout(DEVICE_BYTES, 3);
    let mut memory = Memory::default();
    let mut superblock = AnySuperBlock::fresh(Format::V09, &layout);
    *superblock.effective_size_mut() = Sector(layout.tool_usable_sectors());
    let AnySuperBlock::V09(sb) = &mut superblock else {
        unreachable!()
    };
    sb.flags = DeviceFlags::CONSISTENT | DeviceFlags::PRIMARY_IND | DeviceFlags::CRASHED_PRIMARY;
    sb.al_extents = 67;
    store::create(&mut memory, &layout, &superblock, BitmapInit::Clear).unwrap();
    let mut log = Log::new(AlGeometry::DEFAULT, 67);
    let mut random = Lcg(3);
    for _ in 0..transactions {
        let slot = random.below(67) as u16;
        let extent = AlExtent(random.below(15) as u32);
        let updates = match log.slots.contains(&extent) {
            true => vec![],
            false => vec![SlotUpdate { slot, extent }],
        };
        let mut block = [0; 4096];
        let (number, slots) = (log.number, &log.slots);
        Transaction {
            number,
            context_start: 0,
            updates: &updates,
            slots,
        }
        .encode(&mut block);
        let mut after = log.slots.clone();
        updates
            .iter()
            .for_each(|u| after[usize::from(u.slot)] = u.extent);
        let at = log.geometry.block_of(number) as usize * 4096;
        log.commit(&block, at, after);
    }
    memory.put(layout.al_byte(), &log.area);
    memory.steps.clear();
    (memory, layout, log.active())
}

#[test]
fn apply_al_interrupted_anywhere_and_repeated_loses_no_extent() {
    for transactions in [1, 2, 5, 9, 21] {
        let (start, layout, active) = crashed_primary(transactions);
        assert!(!active.is_empty());
        let mut whole = start.clone();
        let mut superblock = load(&mut whole, &layout).unwrap();
        store::apply_al(&mut whole, &layout, &mut superblock).unwrap();
        let done = bitmap(&mut whole, &layout);
        let shape = store::agreed_bitmap(&layout, &superblock);
        let piece = Piece::new(&shape, 0, &done[..]);
        for slot in 0..3 {
            let set = piece.count(slot, shape.bits());
            assert!(set >= (active.len() as u64 - 1) * 1024, "{set}");
        }
        for mut state in start.crashes(&whole.steps) {
            // The superblock is rewritten with one flag changed, which is in its first sector.
            let mut superblock = load(&mut state, &layout).expect("metadata stays readable");
            if superblock.is_clean() {
                assert!(
                    bitmap(&mut state, &layout) == done,
                    "clean before the bits are set"
                );
                continue;
            }
            match store::apply_al(&mut state, &layout, &mut superblock) {
                Ok(_) => {}
                // The only block with a transaction was torn by its own erasure.
                Err(ApplyError::Log {
                    error: ReplayError::NoTransaction { .. },
                    ..
                }) => {}
                Err(error) => panic!("{error:?}"),
            }
            let after = bitmap(&mut state, &layout);
            let missing = done
                .iter()
                .zip(&after)
                .any(|(want, have)| want & !have != 0);
            assert!(
                !missing,
                "an extent is lost after {transactions} transactions"
            );
        }
    }
}

#[test]
fn a_disabled_log_of_a_crashed_primary_marks_everything() {
    let (mut memory, layout, _) = crashed_primary(3);
    let mut superblock = load(&mut memory, &layout).unwrap();
    let AnySuperBlock::V09(sb) = &mut superblock else {
        unreachable!()
    };
    sb.flags |= DeviceFlags::AL_DISABLED;
    let applied = store::apply_al(&mut memory, &layout, &mut superblock).unwrap();
    assert_eq!(
        applied.everything_marked,
        Some(store::FullReason::LogDisabled)
    );
    let shape = store::agreed_bitmap(&layout, &superblock);
    let bytes = bitmap(&mut memory, &layout);
    let piece = Piece::new(&shape, 0, &bytes[..]);
    for slot in 0..3 {
        assert_eq!(piece.count(slot, shape.bits()), shape.bits());
    }
}

#[test]
fn create_interrupted_anywhere_leaves_no_half_made_metadata() {
    let (mut start, layout, _) = crashed_primary(5);
    let old_bitmap = bitmap(&mut start, &layout);
    let mut whole = start.clone();
    let fresh = AnySuperBlock::fresh(Format::V09, &layout);
    store::create(&mut whole, &layout, &fresh, BitmapInit::Clear).unwrap();
    let mut finished = 0;
    for mut state in start.crashes(&whole.steps) {
        match load(&mut state, &layout) {
            None => {}
            Some(superblock) if superblock == fresh => {
                assert!(bitmap(&mut state, &layout).iter().all(|b| *b == 0));
                let mut area = vec![0; layout.geometry().al.bytes() as usize];
                state.read(layout.al_byte(), &mut area).unwrap();
                assert!(al::replay(&area, layout.geometry().al).unwrap().clean);
                finished += 1;
            }
            Some(superblock) => {
                // Before anything else was touched.
                assert!(!superblock.is_clean());
                assert!(bitmap(&mut state, &layout) == old_bitmap);
                let log_is_there = state.blocks[&(layout.al_byte() / 512)][12..14] == [0, 0];
                assert!(log_is_there);
            }
        }
    }
    assert!(finished > 0);
}

#[test]
fn a_move_interrupted_anywhere_leaves_one_whole_metadata() {
    let old = layout(DEVICE_BYTES, 2);
    let new_bytes = DEVICE_BYTES + (8 << 20);
    let new = layout(new_bytes, 2);
    let mut start = Memory::default();
    let mut superblock = AnySuperBlock::fresh(Format::V09, &old);
    *superblock.effective_size_mut() = Sector(100_000);
    store::create(&mut start, &old, &superblock, BitmapInit::Clear).unwrap();
    start.put(old.bitmap_byte(), &[0x5a; 4096]);
    start.steps.clear();
    let mut whole = start.clone();
    store::move_internal(&mut whole, &old, &new, &mut superblock).unwrap();
    let (mut at_old, mut at_new) = (0, 0);
    for mut state in start.crashes(&whole.steps) {
        let before = at_old + at_new;
        for (layout, device_bytes, count) in [
            (&new, new_bytes, &mut at_new),
            (&old, DEVICE_BYTES, &mut at_old),
        ] {
            let block = store::read_block(&mut state, layout.superblock_byte()).unwrap();
            let Ok(found) = AnySuperBlock::decode(&block) else {
                continue;
            };
            assert_eq!(
                found.layout(Placement::Internal, device_bytes).unwrap(),
                *layout
            );
            assert_eq!(found.effective_size(), Sector(100_000));
            let bytes = bitmap(&mut state, layout);
            assert!(bytes[..4096].iter().all(|b| *b == 0x5a));
            assert!(bytes[4096..].iter().all(|b| *b == 0));
            *count += 1;
            break;
        }
        assert_eq!(at_old + at_new, before + 1, "one of both is valid");
    }
    assert!(at_old > 0 && at_new > 0);
    assert!(
        load(&mut whole, &old).is_none(),
        "the old superblock is erased"
    );
}

#[test]
fn bitmap_blocks_of_every_size_are_marked_by_extent() {
    for shift in 12..=20 {
        let block = BitmapBlock::from_shift(shift).unwrap();
        let geometry = Geometry {
            max_peers: 2,
            bitmap_block: block,
            al: AlGeometry::DEFAULT,
        };
        let layout = Layout::new(Placement::Internal, geometry, 1 << 30).unwrap();
        let shape = layout.bitmap_shape(layout.tool_usable_sectors());
        let bits = shape.extent_bits(AlExtent(3));
        assert_eq!(bits.end - bits.start, (4 << 20) >> shift);
        assert_eq!(bits.start << shift, 3 * (4 << 20));
    }
}

/// A disk that was given up in good order keeps its log, and its bitmap says what differs.
#[test]
fn a_log_that_is_called_clean_marks_nothing_and_is_emptied() {
    let (mut memory, layout, active) = crashed_primary(5);
    assert!(!active.is_empty());
    let before = bitmap(&mut memory, &layout);
    let mut superblock = load(&mut memory, &layout).unwrap();
    superblock.set_clean();
    store::apply_al(&mut memory, &layout, &mut superblock).unwrap();
    assert!(bitmap(&mut memory, &layout) == before);
    // Called unclean once more, it has nothing.
    let AnySuperBlock::V09(sb) = &mut superblock else {
        unreachable!()
    };
    sb.flags.remove(DeviceFlags::AL_CLEAN);
    store::apply_al(&mut memory, &layout, &mut superblock).unwrap();
    assert!(bitmap(&mut memory, &layout) == before);
}

/// A kernel leaves no clean mark at a detach, so who makes a crashed Primary of such a disk by hand gets what the log
/// names marked.
#[test]
fn set_gi_to_a_primary_opens_a_log_that_a_detach_marked_as_clean() {
    let (mut memory, layout, active) = crashed_primary(5);
    let mut superblock = load(&mut memory, &layout).unwrap();
    let set = |memory: &mut Memory, superblock: &mut AnySuperBlock, list: &str| {
        store::set_gi(memory, &layout, superblock, NodeId::new(1).unwrap(), list).unwrap();
        let flags = superblock.device_flags();
        (flags & (DeviceFlags::PRIMARY_IND | DeviceFlags::AL_CLEAN)).bits()
    };
    let (primary, clean) = (
        DeviceFlags::PRIMARY_IND.bits(),
        DeviceFlags::AL_CLEAN.bits(),
    );
    // As a detach in good order leaves it.
    assert_eq!(set(&mut memory, &mut superblock, "::::1:1:0::1"), clean);
    assert_eq!(set(&mut memory, &mut superblock, "::::1:0"), clean);
    let asked_for = set(&mut memory, &mut superblock, "::::::1::1");
    assert_eq!(asked_for, primary | clean);
    assert_eq!(set(&mut memory, &mut superblock, "::::::0"), clean);
    assert_eq!(set(&mut memory, &mut superblock, "::::::1"), primary);
    let applied = store::apply_al(&mut memory, &layout, &mut superblock).unwrap();
    assert_eq!(applied.extents.len() + applied.beyond.len(), active.len());
    assert_eq!(set(&mut memory, &mut superblock, "::::::0"), clean);
    let empty = set(&mut memory, &mut superblock, "::::::1");
    assert_eq!(empty, primary | clean, "an empty log keeps its mark");
}
