//! The bitmap on disk: one slot per peer, interleaved by 32-bit little-endian words (section 12).
//!
//! A set bit says "out of sync with that peer". The functions here work on pieces of the bitmap
//! area that the caller has read, named by their byte position in the area; they never look at
//! bits behind the last one of the device, which are undefined on disk.

use core::ops::Range;

use super::layout::BitmapBlock;
use crate::units::{AlExtent, Sector};

/// Size of the bitmap of one replicated device: how many bits, and where each lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapShape {
    device_sectors: u64,
    slots: u8,
    block: BitmapBlock,
}

/// Bytes of the unit in which the bitmap is read and written.
pub const PAGE_BYTES: u64 = 4096;

impl BitmapShape {
    /// Bitmap of `slots` peers (at least 1) over a device of `device_sectors`.
    pub const fn new(device_sectors: u64, slots: u8, block: BitmapBlock) -> Self {
        assert!(slots > 0, "a bitmap has at least one slot");
        Self {
            device_sectors,
            slots,
            block,
        }
    }

    /// Bits of one slot.
    pub const fn bits(&self) -> u64 {
        self.device_sectors.div_ceil(self.block.sectors())
    }

    /// Number of peers.
    pub const fn slots(&self) -> u8 {
        self.slots
    }

    /// What one bit stands for.
    pub const fn block(&self) -> BitmapBlock {
        self.block
    }

    /// Bytes of all slots together, each padded to 64 bits.
    pub const fn used_bytes(&self) -> u64 {
        self.bits().div_ceil(64) * 8 * self.slots as u64
    }

    /// Bytes of all slots together, rounded up to 4 KiB pages.
    pub const fn area_bytes(&self) -> u64 {
        self.used_bytes().next_multiple_of(PAGE_BYTES)
    }

    /// Byte in the bitmap area and mask in that byte of one bit of a slot.
    pub const fn position(&self, slot: u8, bit: u64) -> (u64, u8) {
        let word = bit / 32 * self.slots as u64 + slot as u64;
        (word * 4 + bit % 32 / 8, 1 << (bit % 8))
    }

    /// Bits that a write of `size_bytes` at `sector` makes out of sync: every bit it touches,
    /// clipped to the device.
    pub const fn touched_bits(&self, sector: Sector, size_bytes: u64) -> Range<u64> {
        let start = sector.bytes();
        let end = start.saturating_add(size_bytes);
        let shift = self.block.shift();
        let block = self.block.bytes() as u64;
        min_range(start >> shift, end.div_ceil(block), self.bits())
    }

    /// Bits that are in sync after `size_bytes` at `sector` were made equal: only those whose
    /// whole block is covered; the device's last bit counts as covered when the range reaches
    /// the last sector.
    pub const fn covered_bits(&self, sector: Sector, size_bytes: u64) -> Range<u64> {
        let start = sector.bytes();
        let end = start.saturating_add(size_bytes);
        let block = self.block.bytes() as u64;
        let first = start.div_ceil(block);
        let last = if end >= self.device_sectors * Sector::SIZE {
            self.bits()
        } else {
            end / block
        };
        min_range(first, last, self.bits())
    }

    /// Bits of a 4 MiB activity-log extent, **not** clipped to the device: the tools set stray
    /// bits behind the last valid one too, within the last page (section 9.8).
    pub const fn extent_bits(&self, extent: AlExtent) -> Range<u64> {
        let per_extent = AlExtent::SIZE >> self.block.shift();
        let first = extent.0 as u64 * per_extent;
        first..first + per_extent
    }

    /// The bytes of the bitmap area, in whole pages, that hold the words of `bits` of all slots.
    /// A 4 MiB extent touches at most two pages.
    pub const fn page_bytes(&self, bits: Range<u64>) -> Range<u64> {
        if bits.start >= bits.end {
            return 0..0;
        }
        let row = self.slots as u64 * 4;
        let first = bits.start / 32 * row;
        let end = bits.end.div_ceil(32) * row;
        first / PAGE_BYTES * PAGE_BYTES..end.next_multiple_of(PAGE_BYTES)
    }

    /// Number of 32-bit words of one slot, padding to 64 bits included.
    pub const fn words(&self) -> u64 {
        self.bits().div_ceil(64) * 2
    }
}

const fn min_range(start: u64, end: u64, limit: u64) -> Range<u64> {
    let end = if end < limit { end } else { limit };
    if start < end { start..end } else { end..end }
}

/// A piece of the bitmap area in memory: `bytes` start at byte `at` of the area. Both are
/// multiples of 4, so that no word is cut.
#[derive(Debug)]
pub struct Piece<B> {
    slots: u64,
    first_word: u64,
    bytes: B,
}

impl<B: AsRef<[u8]>> Piece<B> {
    /// The piece of a bitmap of `shape` that starts at byte `at` of the bitmap area.
    pub fn new(shape: &BitmapShape, at: u64, bytes: B) -> Self {
        assert!(at.is_multiple_of(4), "a piece of a bitmap starts at a word");
        assert!(
            bytes.as_ref().len().is_multiple_of(4),
            "a piece of a bitmap ends at a word"
        );
        Self {
            slots: u64::from(shape.slots),
            first_word: at / 4,
            bytes,
        }
    }

    /// Word indices within `slot` that lie wholly in this piece: word *k* holds bits 32k..32k+32.
    pub fn word_range(&self, slot: u8) -> Range<u64> {
        let end_word = self.first_word + self.bytes.as_ref().len() as u64 / 4;
        let index = |raw: u64| raw.saturating_sub(u64::from(slot)).div_ceil(self.slots);
        index(self.first_word)..index(end_word)
    }

    /// One 32-bit word of a slot; `None` outside of this piece.
    pub fn word(&self, slot: u8, index: u64) -> Option<u32> {
        let at = self.offset(slot, index)?;
        let word = self.bytes.as_ref().get(at..at + 4)?;
        Some(u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
    }

    /// Words of `slot` in this piece, with their indices.
    pub fn words(&self, slot: u8) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.word_range(slot)
            .filter_map(move |i| Some((i, self.word(slot, i)?)))
    }

    /// Set bits of `slot` in this piece among the first `bits` of the slot.
    pub fn count(&self, slot: u8, bits: u64) -> u64 {
        let valid = |index: u64| {
            let left = bits.saturating_sub(index * 32);
            if left >= 32 {
                u32::MAX
            } else {
                (1u32 << left) - 1
            }
        };
        self.words(slot)
            .map(|(i, word)| u64::from((word & valid(i)).count_ones()))
            .sum()
    }

    fn offset(&self, slot: u8, index: u64) -> Option<usize> {
        let raw = index
            .checked_mul(self.slots)?
            .checked_add(u64::from(slot))?;
        usize::try_from(raw.checked_sub(self.first_word)?)
            .ok()?
            .checked_mul(4)
    }
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> Piece<B> {
    /// Sets one 32-bit word of a slot; returns false outside of this piece.
    pub fn set_word(&mut self, slot: u8, index: u64, value: u32) -> bool {
        let Some(at) = self.offset(slot, index) else {
            return false;
        };
        let Some(word) = self.bytes.as_mut().get_mut(at..at + 4) else {
            return false;
        };
        word.copy_from_slice(&value.to_le_bytes());
        true
    }

    /// Sets `bits` of `slot`, as far as they lie in this piece; returns how many were clear.
    pub fn set_bits(&mut self, slot: u8, bits: Range<u64>) -> u64 {
        self.change(slot, bits, |word, mask| word | mask)
    }

    /// Clears `bits` of `slot`, as far as they lie in this piece; returns how many were set.
    pub fn clear_bits(&mut self, slot: u8, bits: Range<u64>) -> u64 {
        self.change(slot, bits, |word, mask| word & !mask)
    }

    /// Adds the set bits of `words`, whose first is word `first` of `slot`, to this piece, as
    /// far as they lie in it; returns how many were clear.
    pub fn merge(&mut self, slot: u8, first: u64, words: &[u32]) -> u64 {
        let mut changed = 0;
        for (index, add) in (first..).zip(words) {
            if let Some(old) = self.word(slot, index) {
                changed += u64::from((add & !old).count_ones());
                self.set_word(slot, index, old | add);
            }
        }
        changed
    }

    fn change(&mut self, slot: u8, bits: Range<u64>, new: impl Fn(u32, u32) -> u32) -> u64 {
        if bits.start >= bits.end {
            return 0;
        }
        let here = self.word_range(slot);
        let first = (bits.start / 32).max(here.start);
        let last = bits.end.div_ceil(32).min(here.end);
        let mut changed = 0;
        for index in first..last {
            let from = bits.start.saturating_sub(index * 32).min(32);
            let to = (bits.end - index * 32).min(32);
            let mask = (((1u64 << to) - 1) & !((1u64 << from) - 1)) as u32;
            if let Some(old) = self.word(slot, index) {
                let word = new(old, mask);
                changed += u64::from((word ^ old).count_ones());
                self.set_word(slot, index, word);
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    fn shape(bits: u64, slots: u8) -> BitmapShape {
        BitmapShape::new(bits * 8, slots, BitmapBlock::DEFAULT)
    }

    #[test]
    fn example_of_the_specification_bits_36_to_43_of_slot_1_of_3() {
        let shape = shape(1000, 3);
        let mut area = vec![0u8; 4096];
        assert_eq!(Piece::new(&shape, 0, &mut area[..]).set_bits(1, 36..44), 8);
        assert_eq!(area[16..18], [0xf0, 0x0f]);
        assert_eq!(area.iter().map(|b| b.count_ones()).sum::<u32>(), 8);
        assert_eq!(shape.position(1, 36), (16, 0x10));
        assert_eq!(shape.position(1, 43), (17, 0x08));
    }

    #[test]
    fn pieces_together_do_what_the_whole_does() {
        for slots in [1u8, 2, 3, 7, 31] {
            let shape = shape(2000, slots);
            let size = shape.area_bytes() as usize;
            let slot = slots - 1;
            let mut whole = vec![0u8; size];
            Piece::new(&shape, 0, &mut whole[..]).set_bits(slot, 17..1999);
            let mut parts = vec![0u8; size];
            let mut changed = 0;
            for (i, part) in parts.chunks_mut(52).enumerate() {
                changed += Piece::new(&shape, i as u64 * 52, part).set_bits(slot, 17..1999);
            }
            assert_eq!(whole, parts);
            assert_eq!(changed, 1982);
            let counted: u64 = whole
                .chunks(100)
                .enumerate()
                .map(|(i, c)| Piece::new(&shape, i as u64 * 100, c).count(slot, 1000))
                .sum();
            assert_eq!(counted, 983);
            let words: Vec<u64> = Piece::new(&shape, 0, &whole[..])
                .words(slot)
                .map(|w| w.0)
                .collect();
            assert_eq!(words.len() as u64, words.last().unwrap() + 1);
            for bit in [0, 16, 17, 1998, 1999] {
                let (byte, mask) = shape.position(slot, bit);
                let set = whole[byte as usize] & mask != 0;
                assert_eq!(set, (17..1999).contains(&bit), "bit {bit} of {slots} slots");
            }
        }
    }

    #[test]
    fn merge_only_adds() {
        let shape = shape(128, 2);
        let mut area = [0u8; 64];
        let mut piece = Piece::new(&shape, 0, &mut area[..]);
        piece.set_bits(1, 0..8);
        assert_eq!(piece.merge(1, 0, &[0xff00_000f, 1]), 9);
        assert_eq!(piece.word(1, 0), Some(0xff00_00ff));
        assert_eq!(piece.word(0, 0), Some(0));
        assert_eq!(piece.clear_bits(1, 4..33), 4 + 8 + 1);
    }

    #[test]
    fn marking_rounds_outwards_and_clearing_inwards() {
        // 100 bits and a half: the last bit covers four sectors.
        let shape = BitmapShape::new(804, 1, BitmapBlock::DEFAULT);
        assert_eq!(shape.bits(), 101);
        assert_eq!(shape.touched_bits(Sector(7), 1024), 0..2);
        assert_eq!(shape.covered_bits(Sector(7), 1024), 1..1);
        assert_eq!(shape.covered_bits(Sector(7), 9 * 512), 1..2);
        assert_eq!(shape.covered_bits(Sector(800), 4 * 512), 100..101);
        assert_eq!(shape.covered_bits(Sector(800), 3 * 512), 100..100);
        assert_eq!(shape.touched_bits(Sector(803), 4096), 100..101);
        assert!(shape.touched_bits(Sector(8000), 4096).is_empty());
    }

    #[test]
    fn an_extent_lies_in_at_most_two_pages() {
        for slots in 1..=31 {
            let shape = shape(1 << 20, slots);
            for extent in 0..1024 {
                let pages = shape.page_bytes(shape.extent_bits(AlExtent(extent)));
                assert!(pages.end - pages.start <= 2 * PAGE_BYTES);
                assert!(pages.end <= shape.area_bytes());
            }
        }
    }
}
