//! Metadata on persistent memory: the activity log as slots that are changed in place, and an
//! update of the superblock that no power cut leaves half done (section 10).
//!
//! A device of this kind promises that an aligned word of 8 bytes is stored whole or not at all,
//! and no more: of the words stored since the last fence any may be there after a power cut. So
//! what belongs together goes in several steps, each persistent before the next. A step is one or
//! more [`WordStore`]s; this module says which bytes, never when.
//!
//! The superblock has no copy and no checksum, but 2,704 bytes that every reader ignores. Before
//! it is changed in place, its new content is put down there with a checksum; whoever finds such a
//! record takes it for the superblock. Before the record goes, the superblock is whole. Tools that
//! do not know of it see an unclean log as long as it is there: [`DeviceFlags::AL_CLEAN`] goes
//! first and comes last.

use alloc::vec::Vec;

use super::al::{AL_PMEM_MAGIC, FREE};
use super::crc32c::crc32c_raw;
use super::layout::AlGeometry;
use super::v09::DeviceFlags;
use super::{BLOCK_BYTES, Magic};
use crate::units::AlExtent;

/// Bytes that are stored whole or not at all, at offsets that are multiples of it.
pub const WORD_BYTES: u64 = 8;

/// Bytes of the superblock that mean something: the peers and the history are the last.
const USED_BYTES: usize = 1392;
/// The word of the superblock that holds flags and magic.
const FLAGS_AT: usize = 56;
/// Where the record of an update lies in the superblock's block.
const RECORD_AT: usize = 1408;
/// First bytes of a record.
const RECORD_MAGIC: [u8; 8] = *b"redo-v09";
/// Magic, the checksum of what follows it, four bytes of zero.
const RECORD_HEAD_BYTES: usize = 16;
const RECORD_BYTES: usize = RECORD_HEAD_BYTES + USED_BYTES;

/// Whole words to be stored: offset and length are multiples of 8 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WordStore {
    /// First byte, from where the caller counts.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl WordStore {
    fn shifted(mut self, base: u64) -> Self {
        self.offset += base;
        self
    }
}

/// Slots that the area has room for, whatever `al-extents` is.
pub const fn slot_count(geometry: AlGeometry) -> u32 {
    geometry.blocks() * 1024 - 1
}

/// The whole area: the magic and all slots, those that are not given as free.
///
/// # Panics
/// With more slots than there are places.
pub fn encode_area(slots: &[AlExtent], geometry: AlGeometry) -> Vec<u8> {
    let count = slot_count(geometry) as usize;
    assert!(slots.len() <= count, "the area has room for all slots");
    let mut area = Vec::with_capacity(4 * (count + 1));
    area.extend(AL_PMEM_MAGIC.to_be_bytes());
    let free = core::iter::repeat_n(&FREE, count - slots.len());
    area.extend(slots.iter().chain(free).flat_map(|e| e.0.to_be_bytes()));
    area
}

/// The words that hold the slots from `first` to `last`; offsets count from the area's start.
/// Slots that are not given are free.
pub fn encode_slots(slots: &[AlExtent], first: u16, last: u16) -> WordStore {
    // Slot 0 is the second half of the first word: slot s is half s + 1.
    let word = |slot: u16| u64::from(slot).div_ceil(2);
    let halves = 2 * word(first)..2 * word(last) + 2;
    let half = |half: u64| match half.checked_sub(1) {
        None => AL_PMEM_MAGIC,
        Some(slot) => slots.get(slot as usize).unwrap_or(&FREE).0,
    };
    WordStore {
        offset: word(first) * WORD_BYTES,
        bytes: halves.flat_map(|at| half(at).to_be_bytes()).collect(),
    }
}

/// Makes an area of any form one of slots, in two steps: the magic comes last. Offsets count from
/// the start of the area. What was there must not matter any more.
pub fn convert(slots: &[AlExtent], geometry: AlGeometry) -> [WordStore; 2] {
    let mut first = encode_area(slots, geometry);
    let rest = first.split_off(WORD_BYTES as usize);
    let store = |offset, bytes| WordStore { offset, bytes };
    [store(WORD_BYTES, rest), store(0, first)]
}

/// Changes the superblock at byte `base` into `block`, in steps that each have to be persistent
/// before the next.
///
/// # Panics
/// If it is no v09 superblock: others have no room for the record.
pub fn superblock_steps(block: &[u8; BLOCK_BYTES], base: u64) -> Vec<WordStore> {
    assert!(
        Magic::of(block) == Some(Magic::V09),
        "only v09 has room for a record"
    );
    let mut unclean = [0; USED_BYTES];
    unclean.copy_from_slice(&block[..USED_BYTES]);
    let flags = u32::from_be_bytes([block[56], block[57], block[58], block[59]]);
    let without = flags & !DeviceFlags::AL_CLEAN.bits();
    unclean[FLAGS_AT..FLAGS_AT + 4].copy_from_slice(&without.to_be_bytes());

    let mut record = Vec::with_capacity(RECORD_BYTES);
    record.extend(RECORD_MAGIC);
    record.extend(crc32c_raw(&[&unclean]).to_be_bytes());
    record.extend([0; 4]);
    record.extend(unclean);
    let word = |bytes: &[u8]| bytes[FLAGS_AT..FLAGS_AT + WORD_BYTES as usize].to_vec();
    let store = |offset: usize, bytes| {
        let offset = offset as u64;
        WordStore { offset, bytes }.shifted(base)
    };
    let mut steps = Vec::from([
        store(RECORD_AT, record),
        store(FLAGS_AT, word(&unclean)),
        store(0, unclean.to_vec()),
        store(RECORD_AT, [0; WORD_BYTES as usize].to_vec()),
    ]);
    if without != flags {
        steps.push(store(FLAGS_AT, word(block)));
    }
    steps
}

/// The superblock that an interrupted update was about to make of this one.
pub(super) fn interrupted(block: &[u8; BLOCK_BYTES]) -> Option<[u8; BLOCK_BYTES]> {
    let record = &block[RECORD_AT..RECORD_AT + RECORD_BYTES];
    let (head, image) = record.split_at(RECORD_HEAD_BYTES);
    let known = head[..8] == RECORD_MAGIC && head[8..12] == crc32c_raw(&[image]).to_be_bytes();
    let mut whole = [0; BLOCK_BYTES];
    whole[..USED_BYTES].copy_from_slice(image);
    (known && Magic::of(&whole) == Some(Magic::V09)).then_some(whole)
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::disk::al::{AlForm, encode_initialised, replay_persistent_memory};
    use crate::disk::layout::{Geometry, Layout, Placement};
    use crate::disk::v09::SuperBlock;
    use crate::units::Uuid;

    fn apply(area: &mut [u8], store: &WordStore) {
        assert!(store.offset.is_multiple_of(8) && store.bytes.len().is_multiple_of(8));
        let at = store.offset as usize;
        area[at..at + store.bytes.len()].copy_from_slice(&store.bytes);
    }

    #[test]
    fn the_area_is_the_magic_and_big_endian_slots_to_its_end() {
        let geometry = AlGeometry::DEFAULT;
        assert_eq!(slot_count(geometry), 8191);
        let area = encode_area(&[AlExtent(3), AlExtent(0x0102_0304)], geometry);
        assert_eq!(area.len(), 32 << 10);
        assert_eq!(area[..12], [0x6a, 0xa6, 0x67, 0xa6, 0, 0, 0, 3, 1, 2, 3, 4]);
        assert!(area[12..].iter().all(|byte| *byte == 0xff));
    }

    #[test]
    fn changed_slots_are_whole_words_around_them() {
        let geometry = AlGeometry::DEFAULT;
        let mut slots = vec![FREE; 67];
        let mut area = encode_area(&slots, geometry);
        let cases = [
            (0, 0, 0, 8),
            (1, 1, 8, 8),
            (2, 2, 8, 8),
            (66, 66, 264, 8),
            (0, 66, 0, 272),
            (2, 3, 8, 16),
        ];
        for (round, (first, last, offset, len)) in (1..).zip(cases) {
            for slot in first..=last {
                slots[usize::from(slot)] = AlExtent(round * 1000 + u32::from(slot));
            }
            let store = encode_slots(&slots, first, last);
            assert_eq!((store.offset, store.bytes.len()), (offset, len));
            apply(&mut area, &store);
            assert_eq!(area, encode_area(&slots, geometry));
        }
        assert_eq!(replay_persistent_memory(&area, 67).active.len(), 67);
    }

    #[test]
    fn a_conversion_shows_its_form_only_when_it_is_done() {
        let geometry = AlGeometry::DEFAULT;
        let mut area = vec![0; geometry.bytes() as usize];
        for block in area.chunks_exact_mut(BLOCK_BYTES) {
            encode_initialised(block.try_into().unwrap());
        }
        let [slots, magic] = convert(&[], geometry);
        apply(&mut area, &slots);
        assert_eq!(AlForm::of(&area, geometry, false), AlForm::Blocks);
        apply(&mut area, &magic);
        assert_eq!(AlForm::of(&area, geometry, false), AlForm::PersistentMemory);
        assert_eq!(area, encode_area(&[], geometry));
    }

    fn superblocks() -> [(SuperBlock, [u8; BLOCK_BYTES]); 2] {
        let layout = Layout::new(Placement::FlexExternal, Geometry::for_peers(3), 1 << 20).unwrap();
        let mut old = SuperBlock::fresh(&layout);
        let mut new = old.clone();
        old.current_uuid = Uuid(2);
        new.current_uuid = Uuid(4);
        new.peers[1].bitmap_uuid = Uuid(2);
        new.peers[1].bitmap_index = Some(0);
        new.history[31] = Uuid(8);
        [old, new].map(|superblock| {
            let mut block = [0; BLOCK_BYTES];
            superblock.encode(&mut block);
            (superblock, block)
        })
    }

    /// Every step, with any subset of its words: what is read is the old superblock or the new
    /// one, and whoever does not know of records sees one of them whole if the log is clean.
    #[test]
    fn an_update_that_is_cut_anywhere_leaves_one_superblock_or_the_other() {
        for (old_clean, new_clean) in [(false, false), (false, true), (true, false), (true, true)] {
            let [(mut old, mut from), (mut new, mut to)] = superblocks();
            old.flags.set(DeviceFlags::AL_CLEAN, old_clean);
            new.flags.set(DeviceFlags::AL_CLEAN, new_clean);
            old.encode(&mut from);
            new.encode(&mut to);
            let mut was_new = false;
            let mut medium = from;
            for step in superblock_steps(&to, 0) {
                // A few hundred subsets, the whole and the empty one among them.
                for subset in 0..300_u64 {
                    let mut torn = medium;
                    for (i, word) in step.bytes.chunks_exact(8).enumerate() {
                        let pick = subset
                            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                            .wrapping_add(i as u64)
                            .wrapping_mul(0xd134_2543_de82_ef95);
                        if subset == 0 || subset != 1 && pick >> 63 == 1 {
                            let at = step.offset as usize + 8 * i;
                            torn[at..at + 8].copy_from_slice(word);
                        }
                    }
                    let mut read = SuperBlock::decode(&torn).unwrap();
                    let [mut a, mut b] = [&old, &new].map(Clone::clone);
                    for superblock in [&mut read, &mut a, &mut b] {
                        superblock.flags.remove(DeviceFlags::AL_CLEAN);
                    }
                    assert!(read == a || read == b);
                    assert!(!was_new || read == b, "an update does not go back");
                    let flags = u32::from_be_bytes(torn[56..60].try_into().unwrap());
                    if flags & DeviceFlags::AL_CLEAN.bits() != 0 {
                        assert!(
                            torn[..USED_BYTES] == from[..USED_BYTES]
                                || torn[..USED_BYTES] == to[..USED_BYTES]
                        );
                    }
                }
                apply(&mut medium, &step);
                let mut read = SuperBlock::decode(&medium).unwrap();
                read.flags.set(DeviceFlags::AL_CLEAN, new_clean);
                was_new |= read == new;
            }
            assert!(was_new);
            assert_eq!(SuperBlock::decode(&medium).unwrap(), new);
            assert_eq!(medium[..USED_BYTES], to[..USED_BYTES]);
            assert_eq!(interrupted(&medium), None);
        }
    }

    #[test]
    fn a_damaged_record_is_none() {
        let [(old, mut block), (_, to)] = superblocks();
        apply(&mut block, &superblock_steps(&to, 0)[0]);
        assert!(interrupted(&block).is_some());
        block[RECORD_AT + RECORD_BYTES - 1] ^= 1;
        assert_eq!(SuperBlock::decode(&block).unwrap(), old);
    }
}
