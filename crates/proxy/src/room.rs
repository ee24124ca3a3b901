//! Memory of large blocks. What is freed is kept for the next block of about that size: a fresh one
//! from the system costs a page fault for every 4 KiB, which is more than a fast codec can spare.
//! Only blocks of a chunk's order of size are kept, and only so many; the rest is the allocator's.

use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

use crate::core::frame::CHUNK_MAX;

/// Blocks come in multiples of this, so that one fits where another was.
const UNIT: usize = 64 << 10;
/// Shorter blocks would waste too much of a unit.
const LEAST: usize = 4 * UNIT;
/// Units of the largest block.
const UNITS_MAX: usize = CHUNK_MAX / UNIT;
/// Bytes that are kept for all connections together.
const KEEP_BYTES: usize = 16 << 20;

static KEPT: Mutex<Kept> = Mutex::new(Kept {
    by_units: [const { Vec::new() }; UNITS_MAX + 1],
    bytes: 0,
});

/// Free blocks by the count of their units.
struct Kept {
    by_units: [Vec<Vec<u8>>; UNITS_MAX + 1],
    bytes: usize,
}

/// Bytes whose memory is kept when nobody has them any more.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Block(Vec<u8>);

impl From<Vec<u8>> for Block {
    fn from(bytes: Vec<u8>) -> Block {
        Block(bytes)
    }
}

impl Deref for Block {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        give(std::mem::take(&mut self.0));
    }
}

/// An empty vector with room for so many bytes, and for less than a unit more.
pub(crate) fn empty(len: usize) -> Vec<u8> {
    let mut bytes = take(len);
    bytes.clear();
    bytes
}

/// The greatest length up to `len` of which `empty` has no byte to spare.
pub(crate) const fn exact(len: usize) -> usize {
    match len {
        LEAST.. => len / UNIT * UNIT,
        _ => len,
    }
}

/// The room that `empty` makes for this length.
pub(crate) const fn rounded(len: usize) -> usize {
    match len {
        LEAST.. => len.div_ceil(UNIT) * UNIT,
        _ => len,
    }
}

/// A vector of so many bytes with any content, for one who writes all of them.
pub(crate) fn filled(len: usize) -> Vec<u8> {
    let mut bytes = take(len);
    bytes.resize(len, 0);
    bytes
}

/// A copy.
pub(crate) fn copied(bytes: &[u8]) -> Vec<u8> {
    let mut copy = empty(bytes.len());
    copy.extend_from_slice(bytes);
    copy
}

/// The same bytes with less than a unit to spare.
pub(crate) fn fitted(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.capacity() - bytes.len() >= UNIT {
        bytes.shrink_to_fit();
    }
    bytes
}

/// Takes memory back.
pub(crate) fn give(bytes: Vec<u8>) {
    let size = bytes.capacity();
    if size < LEAST || !size.is_multiple_of(UNIT) || size > UNITS_MAX * UNIT {
        return;
    }
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if kept.bytes + size <= KEEP_BYTES {
        kept.bytes += size;
        kept.by_units[size / UNIT].push(bytes);
    }
}

fn take(len: usize) -> Vec<u8> {
    if !(LEAST..=UNITS_MAX * UNIT).contains(&len) {
        return Vec::with_capacity(len);
    }
    let units = len.div_ceil(UNIT);
    let found = {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.by_units[units].pop();
        kept.bytes -= found.as_ref().map_or(0, Vec::capacity);
        found
    };
    found.unwrap_or_else(|| Vec::with_capacity(units * UNIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_length_asked_for_and_waste_less_than_a_unit() {
        for len in [0, 1, LEAST - 1, LEAST, LEAST + 1, CHUNK_MAX - 1, CHUNK_MAX] {
            for _ in 0..3 {
                let bytes = filled(len);
                assert_eq!(bytes.len(), len);
                assert!(bytes.capacity() < len + UNIT, "{len}");
                drop(Block::from(bytes));
                let bytes = empty(len);
                assert!(bytes.is_empty() && bytes.capacity() >= len);
                assert_eq!(empty(exact(len)).capacity(), exact(len));
                assert_eq!(empty(len).capacity(), rounded(len));
                give(bytes);
                assert_eq!(copied(&vec![7; len]), vec![7; len]);
            }
        }
        assert_eq!(filled(CHUNK_MAX + 1).len(), CHUNK_MAX + 1);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let blocks: Vec<Block> = (0..64).map(|_| Block::from(filled(CHUNK_MAX))).collect();
        drop(blocks);
        for size in [CHUNK_MAX + UNIT, LEAST - UNIT, LEAST + 1] {
            give(Vec::with_capacity(size));
        }
        let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes = kept.by_units.iter().flatten().map(Vec::capacity);
        assert_eq!(sizes.sum::<usize>(), kept.bytes);
        assert!(kept.bytes <= KEEP_BYTES);
    }
}
