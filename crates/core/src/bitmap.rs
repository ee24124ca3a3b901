//! The bitmap of one volume in memory: for each peer slot, which blocks are out of sync.
//!
//! Pages of a slot exist only where they differ from the slot's default, so an all-clear or an
//! all-set slot costs nothing, whatever the size of the device. Beside the bits it keeps which
//! 4 KiB pages of the bitmap area on disk (slots interleaved, metadata.md, 12) differ from what
//! was last written, and writes each page once at a time.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use lockstep_format::disk::bitmap::{BitmapShape, PAGE_BYTES, Piece};
use lockstep_format::units::{AlExtent, Sector};

/// Bits of one page in memory: 1 KiB, 32 MiB of a device with 4 KiB blocks.
const PAGE_BITS: u64 = 8192;
const PAGE_WORDS: usize = 128;
/// Most bytes of one write of the bitmap.
const WRITE_BYTES: u64 = 1 << 20;

#[derive(Clone, Debug)]
enum Page {
    Clear,
    Set,
    Bits(Box<[u64; PAGE_WORDS]>, u32),
}

/// One peer's bits.
#[derive(Clone, Debug)]
struct Slot {
    /// Value of pages that are not in `pages`.
    default_set: bool,
    pages: BTreeMap<u32, Page>,
    /// Set bits.
    count: u64,
    /// Bits are cleared in whole groups of so many: the peer has larger blocks and could not
    /// clear a part of one.
    clear_unit: u64,
}

/// The bitmap of one volume.
#[derive(Debug)]
pub struct Bitmap {
    shape: BitmapShape,
    slots: Vec<Slot>,
    changed: ChangedPages,
    /// First disk page and count of each write in flight.
    writing: BTreeSet<(u64, u64)>,
    #[cfg(feature = "planted")]
    pub(crate) planted: Option<crate::planted::Planted>,
}

/// A part of the bitmap area that is to be written.
#[derive(Debug, PartialEq, Eq)]
pub struct PageWrite {
    /// First disk page.
    pub first_page: u64,
    /// The bytes, a multiple of 4096, at `first_page` × 4096 of the bitmap area.
    pub bytes: Vec<u8>,
}

impl Bitmap {
    /// A bitmap with no bit set.
    pub fn new(shape: BitmapShape) -> Self {
        let slot = Slot {
            default_set: false,
            pages: BTreeMap::new(),
            count: 0,
            clear_unit: 1,
        };
        Bitmap {
            slots: vec![slot; usize::from(shape.slots())],
            changed: ChangedPages::default(),
            writing: BTreeSet::new(),
            shape,
            #[cfg(feature = "planted")]
            planted: None,
        }
    }

    /// Number and place of the bits.
    pub fn shape(&self) -> &BitmapShape {
        &self.shape
    }

    /// Takes over a part of the bitmap area that was read from disk, starting at byte `at` (a
    /// multiple of 4). What is behind the last bit is ignored.
    pub fn load(&mut self, at: u64, bytes: &[u8]) {
        let piece = Piece::new(&self.shape, at, bytes);
        let bits = self.shape.bits();
        for slot in 0..self.shape.slots() {
            for (index, word) in piece.words(slot) {
                let first = index * 32;
                if word == 0 || first >= bits {
                    continue;
                }
                let valid = (bits - first).min(32);
                let word = u64::from(word) & low_bits(valid);
                self.slots[usize::from(slot)].merge32(index, word as u32, bits);
            }
        }
    }

    /// Set bits of a slot.
    pub fn count(&self, slot: u8) -> u64 {
        self.slots[usize::from(slot)].count
    }

    /// Sectors marked out of sync in a slot, clipped to the device by the block size only.
    pub fn out_of_sync_sectors(&self, slot: u8) -> u64 {
        self.count(slot) * self.shape.block().sectors()
    }

    /// Sets every bit that a write touches; returns how many were clear.
    pub fn set_range(&mut self, slot: u8, sector: Sector, size_bytes: u32) -> u64 {
        let bits = match planted!(self, PartialWritesUnmarked) {
            true => self.shape.covered_bits(sector, u64::from(size_bytes)),
            false => self.shape.touched_bits(sector, u64::from(size_bytes)),
        };
        self.set_bits(slot, bits)
    }

    /// Sets every bit that a write touches in all slots but those of `except` (bit n is slot n);
    /// returns how many were not set.
    pub fn set_range_in_all(&mut self, sector: Sector, size_bytes: u32, except: u32) -> u64 {
        let slots = (0..self.shape.slots()).filter(|slot| except >> slot & 1 == 0);
        slots
            .map(|slot| self.set_range(slot, sector, size_bytes))
            .sum()
    }

    /// Clears the bits of blocks that lie wholly in the range; returns how many were set.
    pub fn clear_range(&mut self, slot: u8, sector: Sector, size_bytes: u32) -> u64 {
        let bits = self.whole_bits(slot, sector, size_bytes);
        self.clear_bits(slot, bits)
    }

    /// The bits that the range covers wholly, in whole blocks of the slot's peer.
    pub(crate) fn whole_bits(&self, slot: u8, sector: Sector, size_bytes: u32) -> Range<u64> {
        let bits = self.shape.covered_bits(sector, u64::from(size_bytes));
        let unit = self.slots[usize::from(slot)].clear_unit;
        let end = match bits.end >= self.shape.bits() {
            true => bits.end,
            false => bits.end / unit * unit,
        };
        let start = bits.start.next_multiple_of(unit);
        start..end.max(start)
    }

    /// Sets bits; returns how many were clear.
    pub fn set_bits(&mut self, slot: u8, bits: Range<u64>) -> u64 {
        self.change(slot, bits, true)
    }

    /// Clears bits; returns how many were set.
    pub fn clear_bits(&mut self, slot: u8, bits: Range<u64>) -> u64 {
        self.change(slot, bits, false)
    }

    /// The slot's peer has blocks of so many sectors.
    pub fn set_peer_block(&mut self, slot: u8, sectors: u64) {
        let unit = sectors / self.shape.block().sectors();
        self.slots[usize::from(slot)].clear_unit = unit.max(1);
    }

    /// Sets or clears a whole slot.
    pub fn fill(&mut self, slot: u8, set: bool) {
        let total = self.shape.bits();
        let target = &mut self.slots[usize::from(slot)];
        if target.count == if set { total } else { 0 } {
            return;
        }
        target.pages.clear();
        target.default_set = set;
        target.count = if set { total } else { 0 };
        if planted!(self, FillNotWritten) {
            return;
        }
        let pages = self.disk_pages_of(0..total);
        self.changed.add(pages);
    }

    /// Makes slot `to` equal to slot `from`.
    pub fn copy_slot(&mut self, from: u8, to: u8) {
        self.slots[usize::from(to)] = self.slots[usize::from(from)].clone();
        let pages = self.disk_pages_of(0..self.shape.bits());
        self.changed.add(pages);
    }

    /// Sets in slot `to` what is set in slot `from`.
    pub fn merge_slot(&mut self, from: u8, to: u8) {
        let mut at = 0;
        while let Some(start) = self.next_set(from, at) {
            let end = self.next_clear(from, start).min(self.shape.bits());
            self.set_bits(to, start..end);
            at = end;
            if planted!(self, SlotMergedInPart) {
                break;
            }
        }
    }

    /// The first set bit at or behind `from`.
    pub fn next_set(&self, slot: u8, from: u64) -> Option<u64> {
        self.slots[usize::from(slot)].next(from, self.shape.bits(), true)
    }

    /// The first clear bit at or behind `from`; the number of bits if there is none.
    pub fn next_clear(&self, slot: u8, from: u64) -> u64 {
        let bits = self.shape.bits();
        self.slots[usize::from(slot)]
            .next(from, bits, false)
            .unwrap_or(bits)
    }

    /// The first clear bit at or behind `from`, but at most `most` bits behind it.
    pub fn next_clear_within(&self, slot: u8, from: u64, most: u64) -> u64 {
        let end = self.shape.bits().min(from.saturating_add(most));
        self.slots[usize::from(slot)]
            .next(from, end, false)
            .unwrap_or(end)
    }

    /// Some bit in `bits` is set.
    pub fn any_set(&self, slot: u8, bits: Range<u64>) -> bool {
        let end = bits.end.min(self.shape.bits());
        self.slots[usize::from(slot)]
            .next(bits.start, end, true)
            .is_some()
    }

    /// Set bits of those that a range touches.
    pub fn count_touched(&self, slot: u8, sector: Sector, size_bytes: u32) -> u64 {
        let bits = self.shape.touched_bits(sector, u64::from(size_bytes));
        let end = bits.end.min(self.shape.bits());
        let mut count = 0;
        let mut at = bits.start;
        while let Some(set) = self.slots[usize::from(slot)].next(at, end, true) {
            at = self.next_clear_within(slot, set, end - set);
            count += at - set;
        }
        count
    }

    /// Some bit that the range touches is set in any slot.
    pub fn any_set_in_all(&self, sector: Sector, size_bytes: u32) -> bool {
        let bits = self.shape.touched_bits(sector, u64::from(size_bytes));
        (0..self.shape.slots()).any(|slot| self.any_set(slot, bits.clone()))
    }

    /// Bits of an activity-log extent within the device.
    pub fn extent_bits(&self, extent: AlExtent) -> Range<u64> {
        let bits = self.shape.extent_bits(extent);
        bits.start.min(self.shape.bits())..bits.end.min(self.shape.bits())
    }

    /// The page of the area on disk that holds each extent's bits, at most two.
    pub fn extent_pages(&self, extent: AlExtent) -> Range<u64> {
        self.disk_pages_of(self.extent_bits(extent))
    }

    /// Some page differs from the disk, or a write is in flight.
    pub fn is_dirty(&self) -> bool {
        self.changed.count > 0 || !self.writing.is_empty()
    }

    /// The next page from `page` on that differs from the disk.
    pub(crate) fn next_changed(&self, page: u64) -> Option<u64> {
        self.changed.first_in(page..u64::MAX)
    }

    /// A page of `pages` differs from the disk, or is being written.
    pub fn is_dirty_in(&self, pages: Range<u64>) -> bool {
        self.changed.first_in(pages.clone()).is_some() || self.is_writing_in(pages)
    }

    /// A page of `pages` is being written.
    pub fn is_writing_in(&self, pages: Range<u64>) -> bool {
        self.writing
            .iter()
            .any(|(first, count)| *first < pages.end && pages.start < first + count)
    }

    /// All pages of the area.
    pub fn all_pages(&self) -> Range<u64> {
        0..self.shape.area_bytes() / PAGE_BYTES
    }

    /// Takes the next run of changed pages in `pages` that is not being written. The caller
    /// writes it and says [`Bitmap::written`].
    pub fn next_write(&mut self, pages: Range<u64>) -> Option<PageWrite> {
        let mut from = pages.start;
        loop {
            let first = self.changed.first_in(from..pages.end)?;
            if let Some((busy, count)) = self.busy(first) {
                from = busy + count;
                continue;
            }
            let most = WRITE_BYTES / PAGE_BYTES;
            let mut end = first + 1;
            while end < pages.end
                && end - first < most
                && self.changed.contains(end)
                && self.busy(end).is_none()
            {
                end += 1;
            }
            for page in first..end {
                self.changed.remove(page);
            }
            self.writing.insert((first, end - first));
            return Some(PageWrite {
                first_page: first,
                bytes: self.encode(first..end),
            });
        }
    }

    /// The write that started at this page is durable.
    pub fn written(&mut self, first_page: u64) {
        self.take_writing(first_page);
    }

    /// The write that started at this page failed: its pages count as changed again.
    pub fn write_failed(&mut self, first_page: u64) {
        if let Some(count) = self.take_writing(first_page) {
            self.changed.add(first_page..first_page + count);
        }
    }

    /// Marks every page as changed: the area on disk is not known.
    pub fn mark_all_changed(&mut self) {
        let pages = self.all_pages();
        self.changed.add(pages);
    }

    /// Adopts another size of the device. New bits get the value `set`.
    pub fn resize(&mut self, shape: BitmapShape, set: bool) {
        assert_eq!(
            shape.slots(),
            self.shape.slots(),
            "a resize keeps the slots"
        );
        let old = self.shape.bits();
        let new = shape.bits();
        let pages_before = self.all_pages();
        for slot in 0..self.shape.slots() {
            if new < old {
                self.clear_bits(slot, new..old);
            }
        }
        self.shape = shape;
        for slot in 0..self.shape.slots() {
            if new <= old {
                continue;
            }
            let target = &mut self.slots[usize::from(slot)];
            if target.default_set {
                // Pages behind the old end would count as set: write the default down.
                target.materialise(old);
            } else {
                target.write_end_down(old);
            }
            if set {
                self.set_bits(slot, old..new);
            }
        }
        let pages = self.all_pages();
        for page in pages.end..pages_before.end {
            self.changed.remove(page);
        }
        self.mark_all_changed();
    }

    /// The 64 bits from bit `index` × 64 on; zero behind the end.
    pub fn word(&self, slot: u8, index: u64) -> u64 {
        let bits = self.shape.bits();
        let first = index * 64;
        if first >= bits {
            return 0;
        }
        self.slots[usize::from(slot)].word(index) & low_bits((bits - first).min(64))
    }

    fn busy(&self, page: u64) -> Option<(u64, u64)> {
        let (first, count) = *self.writing.range(..=(page, u64::MAX)).next_back()?;
        (page < first + count).then_some((first, count))
    }

    fn take_writing(&mut self, first_page: u64) -> Option<u64> {
        let entry = *self
            .writing
            .range((first_page, 0)..=(first_page, u64::MAX))
            .next()?;
        self.writing.remove(&entry);
        Some(entry.1)
    }

    fn change(&mut self, slot: u8, bits: Range<u64>, set: bool) -> u64 {
        let total = self.shape.bits();
        let bits = bits.start.min(total)..bits.end.min(total);
        if bits.is_empty() {
            return 0;
        }
        let changed = self.slots[usize::from(slot)].change(bits.clone(), set, total);
        if changed > 0 {
            let pages = self.disk_pages_of(bits);
            self.changed.add(pages);
        }
        changed
    }

    fn disk_pages_of(&self, bits: Range<u64>) -> Range<u64> {
        let bytes = self.shape.page_bytes(bits);
        bytes.start / PAGE_BYTES..bytes.end / PAGE_BYTES
    }

    fn encode(&self, pages: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0u8; ((pages.end - pages.start) * PAGE_BYTES) as usize];
        let mut piece = Piece::new(&self.shape, pages.start * PAGE_BYTES, bytes.as_mut_slice());
        for slot in 0..self.shape.slots() {
            if self.slots[usize::from(slot)].count == 0 {
                continue;
            }
            let words = piece.word_range(slot);
            let missing = u64::from(planted!(self, LastWordNotWritten));
            for index in words.start..words.end.min(self.shape.words()) - missing {
                let word = self.word(slot, index / 2);
                let half = (word >> (32 * (index % 2))) as u32;
                if half != 0 {
                    piece.set_word(slot, index, half);
                }
            }
        }
        bytes
    }
}

impl Slot {
    fn page(&self, page: u32) -> &Page {
        match self.pages.get(&page) {
            Some(page) => page,
            None if self.default_set => &Page::Set,
            None => &Page::Clear,
        }
    }

    fn word(&self, index: u64) -> u64 {
        match self.page((index / PAGE_WORDS as u64) as u32) {
            Page::Clear => 0,
            Page::Set => u64::MAX,
            Page::Bits(words, _) => words[(index % PAGE_WORDS as u64) as usize],
        }
    }

    /// Changes bits below `total`; returns how many changed.
    fn change(&mut self, bits: Range<u64>, set: bool, total: u64) -> u64 {
        let mut changed = 0;
        let mut at = bits.start;
        while at < bits.end {
            let number = (at / PAGE_BITS) as u32;
            let page_start = u64::from(number) * PAGE_BITS;
            let page_end = (page_start + PAGE_BITS).min(total);
            let end = bits.end.min(page_end);
            changed += self.change_page(number, at - page_start..end - page_start, set, {
                page_end - page_start
            });
            at = end;
        }
        if set {
            self.count += changed;
        } else {
            self.count -= changed;
        }
        if changed > 0 && (self.count == 0 || self.count == total) {
            self.default_set = self.count != 0;
            self.pages.clear();
        }
        changed
    }

    fn change_page(&mut self, number: u32, bits: Range<u64>, set: bool, valid: u64) -> u64 {
        let default = if self.default_set {
            Page::Set
        } else {
            Page::Clear
        };
        let page = self.pages.entry(number).or_insert(default);
        let whole = bits == (0..valid);
        let changed = match page {
            Page::Set if set => 0,
            Page::Clear if !set => 0,
            Page::Set | Page::Clear if whole => valid,
            Page::Set => {
                let mut words = Box::new([0; PAGE_WORDS]);
                fill_words(&mut words, 0..valid, true);
                let changed = fill_words(&mut words, bits, set);
                *page = Page::Bits(words, (valid - changed) as u32);
                changed
            }
            Page::Clear => {
                let mut words = Box::new([0; PAGE_WORDS]);
                let changed = fill_words(&mut words, bits, set);
                *page = Page::Bits(words, changed as u32);
                changed
            }
            Page::Bits(words, count) => {
                let changed = fill_words(words, bits, set);
                if set {
                    *count += changed as u32;
                } else {
                    *count -= changed as u32;
                }
                changed
            }
        };
        let uniform = match page {
            Page::Bits(_, 0) => Some(false),
            Page::Bits(_, count) if u64::from(*count) == valid => Some(true),
            Page::Bits(..) => None,
            _ if changed == valid => Some(set),
            Page::Set => Some(true),
            Page::Clear => Some(false),
        };
        if let Some(value) = uniform {
            if value == self.default_set {
                self.pages.remove(&number);
            } else {
                *page = if value { Page::Set } else { Page::Clear };
            }
        }
        changed
    }

    /// Adds a 32-bit word read from disk.
    fn merge32(&mut self, index: u64, mut word: u32, total: u64) {
        let mut first = index * 32;
        while word != 0 {
            let skip = word.trailing_zeros();
            first += u64::from(skip);
            word = if skip == 32 { 0 } else { word >> skip };
            let run = word.trailing_ones();
            if run > 0 {
                self.change(first..first + u64::from(run), true, total);
            }
            first += u64::from(run);
            word = if run == 32 { 0 } else { word >> run };
        }
    }

    /// Turns an all-set default with `bits` valid bits into pages over a clear default.
    fn materialise(&mut self, bits: u64) {
        let last = bits.div_ceil(PAGE_BITS) as u32;
        for number in 0..last {
            self.pages.entry(number).or_insert(Page::Set);
        }
        self.pages.retain(|_, page| !matches!(page, Page::Clear));
        self.default_set = false;
        self.write_end_down(bits);
    }

    /// The last page is set as far as it has bits, `bits` in all: so that it does not count as set
    /// behind them, it gets its words.
    fn write_end_down(&mut self, bits: u64) {
        let number = (bits / PAGE_BITS) as u32;
        let valid = bits % PAGE_BITS;
        if valid == 0 || !matches!(self.pages.get(&number), Some(Page::Set)) {
            return;
        }
        let mut words = Box::new([0; PAGE_WORDS]);
        fill_words(&mut words, 0..valid, true);
        self.pages.insert(number, Page::Bits(words, valid as u32));
    }

    fn next(&self, from: u64, total: u64, set: bool) -> Option<u64> {
        let mut at = from;
        while at < total {
            let number = (at / PAGE_BITS) as u32;
            let next_page = (u64::from(number) + 1) * PAGE_BITS;
            match self.page(number) {
                Page::Set if set => return Some(at),
                Page::Clear if !set => return Some(at),
                Page::Set | Page::Clear => {
                    at = if self.pages.contains_key(&number) || self.default_set == set {
                        next_page
                    } else {
                        // Skip to the next page that is not the default.
                        match self.pages.range(number + 1..).next() {
                            Some((next, _)) => u64::from(*next) * PAGE_BITS,
                            None => return None,
                        }
                    };
                }
                Page::Bits(words, _) => {
                    let start = u64::from(number) * PAGE_BITS;
                    match next_in_words(words, at - start, set) {
                        Some(bit) if start + bit < total => return Some(start + bit),
                        _ => at = next_page,
                    }
                }
            }
        }
        None
    }
}

/// Which pages of the area on disk have to be written.
#[derive(Debug, Default)]
struct ChangedPages {
    words: BTreeMap<u64, u64>,
    count: u64,
}

impl ChangedPages {
    fn add(&mut self, pages: Range<u64>) {
        let mut at = pages.start;
        while at < pages.end {
            let end = pages.end.min((at / 64 + 1) * 64);
            let mask = low_bits(end - at) << (at % 64);
            let word = self.words.entry(at / 64).or_insert(0);
            self.count += u64::from((mask & !*word).count_ones());
            *word |= mask;
            at = end;
        }
    }

    fn remove(&mut self, page: u64) {
        if let Some(word) = self.words.get_mut(&(page / 64)) {
            let mask = 1 << (page % 64);
            if *word & mask != 0 {
                *word &= !mask;
                self.count -= 1;
                if *word == 0 {
                    self.words.remove(&(page / 64));
                }
            }
        }
    }

    fn contains(&self, page: u64) -> bool {
        self.words
            .get(&(page / 64))
            .is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    fn first_in(&self, pages: Range<u64>) -> Option<u64> {
        if pages.is_empty() {
            return None;
        }
        for (index, word) in self.words.range(pages.start / 64..=(pages.end - 1) / 64) {
            let base = index * 64;
            let word = if base < pages.start {
                word & !low_bits(pages.start - base)
            } else {
                *word
            };
            if word != 0 {
                let page = base + u64::from(word.trailing_zeros());
                return (page < pages.end).then_some(page);
            }
        }
        None
    }
}

/// A word with the lowest `count` bits set, 0..=64.
fn low_bits(count: u64) -> u64 {
    if count >= 64 {
        u64::MAX
    } else {
        (1 << count) - 1
    }
}

/// Gives bits of a page a value; returns how many changed.
fn fill_words(words: &mut [u64; PAGE_WORDS], bits: Range<u64>, set: bool) -> u64 {
    let mut changed = 0;
    let mut at = bits.start;
    while at < bits.end {
        let end = bits.end.min((at / 64 + 1) * 64);
        let mask = low_bits(end - at) << (at % 64);
        let word = &mut words[(at / 64) as usize];
        let new = if set { *word | mask } else { *word & !mask };
        changed += u64::from((new ^ *word).count_ones());
        *word = new;
        at = end;
    }
    changed
}

fn next_in_words(words: &[u64; PAGE_WORDS], from: u64, set: bool) -> Option<u64> {
    let mut index = (from / 64) as usize;
    let mut skip = low_bits(from % 64);
    while index < PAGE_WORDS {
        let word = if set { words[index] } else { !words[index] } & !skip;
        if word != 0 {
            return Some(index as u64 * 64 + u64::from(word.trailing_zeros()));
        }
        skip = 0;
        index += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_format::disk::layout::BitmapBlock;

    fn bitmap(bits: u64, slots: u8) -> Bitmap {
        Bitmap::new(BitmapShape::new(bits * 8, slots, BitmapBlock::DEFAULT))
    }

    /// The same operations on a plain vector.
    struct Model(Vec<bool>);

    impl Model {
        fn change(&mut self, bits: Range<u64>, set: bool) -> u64 {
            let mut changed = 0;
            for bit in bits {
                if let Some(value) = self.0.get_mut(bit as usize) {
                    changed += u64::from(*value != set);
                    *value = set;
                }
            }
            changed
        }
    }

    #[test]
    fn it_behaves_as_a_vector_of_bits() {
        let total = 3 * PAGE_BITS + 77;
        let mut bitmap = bitmap(total, 2);
        let mut model = Model(vec![false; total as usize]);
        let mut seed = 7u64;
        let mut random = move |limit: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % limit
        };
        for step in 0..3000 {
            let start = random(total);
            let longest = [3, 100, PAGE_BITS, total][random(4) as usize];
            let end = (start + 1 + random(longest)).min(total);
            let set = random(2) == 0;
            match random(60) {
                0 => {
                    bitmap.fill(1, set);
                    model.0.fill(set);
                }
                _ if set => {
                    assert_eq!(
                        bitmap.set_bits(1, start..end),
                        model.change(start..end, true)
                    );
                }
                _ => {
                    assert_eq!(
                        bitmap.clear_bits(1, start..end),
                        model.change(start..end, false)
                    );
                }
            }
            let from = random(total);
            let next = |set: bool| (from..total).find(|bit| model.0[*bit as usize] == set);
            assert_eq!(bitmap.next_set(1, from), next(true), "step {step}");
            let clear = next(false).unwrap_or(total);
            assert_eq!(bitmap.next_clear(1, from), clear);
            let most = 1 + random(PAGE_BITS * 2);
            assert_eq!(
                bitmap.next_clear_within(1, from, most),
                clear.min(from + most)
            );
            let count = model.0.iter().filter(|b| **b).count() as u64;
            assert_eq!(bitmap.count(1), count);
            assert_eq!(bitmap.count(0), 0);
        }
    }

    #[test]
    fn pages_are_written_once_at_a_time_and_read_back_equal() {
        let mut bitmap = bitmap(200_000, 3);
        bitmap.set_bits(0, 5..9);
        bitmap.set_bits(2, 199_999..200_000);
        bitmap.fill(1, true);
        let mut copy = Bitmap::new(*bitmap.shape());
        let first = bitmap.next_write(bitmap.all_pages()).unwrap();
        assert!(bitmap.next_write(bitmap.all_pages()).is_none());
        bitmap.set_bits(0, 20..21);
        assert!(
            bitmap.next_write(bitmap.all_pages()).is_none(),
            "the page is in flight"
        );
        assert!(bitmap.is_dirty_in(0..1));
        bitmap.written(first.first_page);
        let second = bitmap.next_write(bitmap.all_pages()).unwrap();
        assert_eq!((second.first_page, second.bytes.len()), (0, 4096));
        bitmap.written(0);
        assert!(!bitmap.is_dirty());
        copy.load(0, &first.bytes);
        copy.load(0, &second.bytes);
        for slot in 0..3 {
            assert_eq!(copy.count(slot), bitmap.count(slot));
        }
        assert_eq!(copy.next_set(0, 0), Some(5));
        assert_eq!(copy.next_clear(0, 5), 9);
        assert_eq!(copy.next_set(0, 9), Some(20));
        assert_eq!(copy.next_set(2, 0), Some(199_999));
    }

    #[test]
    fn a_failed_write_leaves_its_pages_changed() {
        let mut bitmap = bitmap(1000, 1);
        bitmap.set_range(0, Sector(8), 4096);
        let write = bitmap.next_write(0..1).unwrap();
        assert_eq!(write.bytes[0], 2);
        bitmap.write_failed(0);
        assert!(bitmap.next_write(0..1).is_some());
    }

    #[test]
    fn a_range_sets_what_it_touches_and_clears_what_it_covers() {
        let mut bitmap = bitmap(1000, 2);
        assert_eq!(bitmap.set_range(0, Sector(7), 1024), 2);
        assert_eq!(bitmap.clear_range(0, Sector(7), 4096), 0);
        assert_eq!(bitmap.clear_range(0, Sector(0), 4608), 1);
        bitmap.set_range_in_all(Sector(80), 4096, 0b01);
        assert_eq!((bitmap.count(0), bitmap.count(1)), (1, 1));
        assert!(bitmap.any_set_in_all(Sector(80), 512));
        assert!(!bitmap.any_set_in_all(Sector(88), 512));
        bitmap.copy_slot(1, 0);
        assert_eq!(bitmap.next_set(0, 0), Some(10));
    }

    #[test]
    fn a_last_page_that_was_set_as_far_as_it_went_does_not_reach_behind_the_old_end() {
        for set in [true, false] {
            let mut bitmap = bitmap(PAGE_BITS + 500, 1);
            bitmap.set_bits(0, PAGE_BITS..PAGE_BITS + 500);
            let shape = BitmapShape::new((PAGE_BITS + 1500) * 8, 1, BitmapBlock::DEFAULT);
            bitmap.resize(shape, set);
            let end = PAGE_BITS + if set { 1500 } else { 500 };
            assert_eq!(bitmap.count(0), end - PAGE_BITS);
            assert_eq!(bitmap.next_clear(0, PAGE_BITS), end);
            assert_eq!(bitmap.clear_bits(0, 0..PAGE_BITS + 1500), end - PAGE_BITS);
            assert_eq!((bitmap.count(0), bitmap.next_set(0, 0)), (0, None));
        }
    }

    #[test]
    fn growing_an_all_set_bitmap_sets_the_new_bits_only_if_asked() {
        for set in [false, true] {
            let mut bitmap = bitmap(1000, 1);
            bitmap.fill(0, true);
            bitmap.resize(BitmapShape::new(20_000 * 8, 1, BitmapBlock::DEFAULT), set);
            assert_eq!(bitmap.count(0), if set { 20_000 } else { 1000 });
            assert_eq!(bitmap.next_set(0, 1000), set.then_some(1000));
            bitmap.resize(BitmapShape::new(500 * 8, 1, BitmapBlock::DEFAULT), set);
            assert_eq!(bitmap.count(0), 500);
        }
    }
}
