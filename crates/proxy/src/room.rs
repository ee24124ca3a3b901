//! Memory of large blocks. What is freed is kept for the next block of about that size: a fresh one
//! from the system costs a page fault for every 4 KiB, on a virtual machine often one of the host as
//! well, which is more than a fast codec can spare. Only blocks of a chunk's order of size are kept;
//! the rest is the allocator's. Blocks in use and kept ones together are never more than there were
//! in use at once, and what nobody needs goes back to the system, half of it in about ten seconds.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

use crate::core::frame::CHUNK_MAX;

/// Blocks come in multiples of this, so that one fits where another was.
const UNIT: usize = 64 << 10;
/// Shorter blocks would waste too much of a unit.
const LEAST: usize = 4 * UNIT;
/// Units of the largest block.
const UNITS_MAX: usize = CHUNK_MAX / UNIT;
/// Bytes that stay for all connections together, however long nobody needs them.
const KEEP_BYTES: usize = 16 << 20;
/// The part of idle memory that each call of `age` gives back.
const AGE_PART: usize = 16;

static KEPT: Mutex<Kept> = Mutex::new(Kept::new());

/// Free blocks by the count of their units, the one freed last at the end.
struct Kept {
    by_units: [VecDeque<Vec<u8>>; UNITS_MAX + 1],
    bytes: usize,
    /// The least of `bytes` since the last call of `age`: so much nobody has needed.
    idle_bytes: usize,
}

impl Kept {
    const fn new() -> Kept {
        Kept {
            by_units: [const { VecDeque::new() }; UNITS_MAX + 1],
            bytes: 0,
            idle_bytes: 0,
        }
    }

    fn keep(&mut self, bytes: Vec<u8>) {
        self.bytes += bytes.capacity();
        self.by_units[bytes.capacity() / UNIT].push_back(bytes);
    }

    /// A block, or what has to go for a fresh one, so that memory does not grow.
    fn take(&mut self, units: usize) -> Result<Vec<u8>, Vec<Vec<u8>>> {
        match self.by_units[units].pop_back() {
            Some(found) => {
                self.shrink_by(found.capacity());
                Ok(found)
            }
            None => Err(self.spare(units * UNIT)),
        }
    }

    fn shrink_by(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.idle_bytes = self.idle_bytes.min(self.bytes);
    }

    /// Takes out at least so many bytes of what is more than stays, the longest unused of the
    /// commonest size first.
    fn spare(&mut self, bytes: usize) -> Vec<Vec<u8>> {
        let end = self.bytes.saturating_sub(bytes).max(KEEP_BYTES);
        let mut spared = Vec::new();
        while self.bytes > end {
            let most = |units: &usize| self.by_units[*units].len() * units;
            let Some(block) = (0..=UNITS_MAX)
                .max_by_key(most)
                .and_then(|units| self.by_units[units].pop_front())
            else {
                break;
            };
            self.shrink_by(block.capacity());
            spared.push(block);
        }
        spared
    }

    fn age(&mut self) -> Vec<Vec<u8>> {
        let idle = self.idle_bytes.saturating_sub(KEEP_BYTES);
        let spared = match idle {
            0 => Vec::new(),
            _ => self.spare(idle.div_ceil(AGE_PART)),
        };
        self.idle_bytes = self.bytes;
        spared
    }
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
    kept.keep(bytes);
}

/// Gives back some of what nobody has needed since the last call, to be called once in a second.
/// Says whether there is more than what stays.
pub(crate) fn age() -> bool {
    let (spared, is_more) = {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        (kept.age(), kept.bytes > KEEP_BYTES)
    };
    drop(spared);
    is_more
}

fn take(len: usize) -> Vec<u8> {
    if !(LEAST..=UNITS_MAX * UNIT).contains(&len) {
        return Vec::with_capacity(len);
    }
    let units = len.div_ceil(UNIT);
    let found = {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        kept.take(units)
    };
    found.unwrap_or_else(|spared| {
        drop(spared);
        Vec::with_capacity(units * UNIT)
    })
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
    fn only_blocks_of_a_chunks_order_of_size_are_kept() {
        let before: Vec<Block> = (0..64).map(|_| Block::from(filled(CHUNK_MAX))).collect();
        drop(before);
        for size in [CHUNK_MAX + UNIT, LEAST - UNIT, LEAST + 1] {
            give(Vec::with_capacity(size));
        }
        let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes = || kept.by_units.iter().flatten().map(Vec::capacity);
        assert_eq!(sizes().sum::<usize>(), kept.bytes);
        assert!(sizes().all(|size| (LEAST..=CHUNK_MAX).contains(&size) && size % UNIT == 0));
    }

    #[test]
    fn blocks_kept_and_in_use_are_not_more_than_there_were_in_use_at_once() {
        let (mut kept, mut used) = (Kept::new(), Vec::new());
        let most = 4 * KEEP_BYTES;
        for round in 0..2000 {
            let units = 4 + round * 7 % (UNITS_MAX - 3);
            let block = kept.take(units);
            used.push(block.unwrap_or_else(|_| Vec::with_capacity(units * UNIT)));
            let mut sum: usize = used.iter().map(Vec::capacity).sum();
            while sum > most - CHUNK_MAX || round % 300 > 250 && !used.is_empty() {
                let block = used.swap_remove(round % used.len());
                sum -= block.capacity();
                kept.keep(block);
            }
            let free: usize = kept.by_units.iter().flatten().map(Vec::capacity).sum();
            assert_eq!(free, kept.bytes);
            // What stays in any case comes on top.
            assert!(
                sum + free <= most + KEEP_BYTES,
                "round {round}: {sum} and {free}"
            );
        }
        assert!(kept.bytes > KEEP_BYTES);
    }

    #[test]
    fn idle_memory_goes_back_and_what_is_in_turn_stays() {
        let mut kept = Kept::new();
        for _ in 0..256 {
            kept.keep(Vec::with_capacity(CHUNK_MAX));
        }
        assert!(
            kept.age().is_empty(),
            "nothing was idle for the time between two calls"
        );
        let all = kept.bytes;
        // Half of it is needed in each second.
        for _ in 0..300 {
            let used: Vec<_> = (0..128).filter_map(|_| kept.take(UNITS_MAX).ok()).collect();
            assert_eq!(used.len(), 128);
            used.into_iter().for_each(|block| kept.keep(block));
            drop(kept.age());
        }
        assert!(kept.bytes >= 128 * CHUNK_MAX && kept.bytes <= 128 * CHUNK_MAX + KEEP_BYTES);
        let begin = kept.bytes;
        for _ in 0..12 {
            drop(kept.age());
        }
        assert!(kept.bytes < begin * 6 / 10, "{} of {begin}", kept.bytes);
        for _ in 0..300 {
            drop(kept.age());
        }
        assert_eq!(kept.bytes, KEEP_BYTES);
        assert!(all > begin);
    }
}
