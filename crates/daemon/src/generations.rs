//! The data generations that this node made as Primary, where they outlive the daemon.
//!
//! A device that waits for the next daemon is known by the generation that its volume had when the
//! holder was told last. The cores tell here of each further one before a peer hears of it and
//! before it is on disk, and the holder keeps the memory that it is written to. So whatever moment
//! the daemon is killed at, the next one knows whether the generation that it finds is one of its
//! own making, or another node's.
//!
//! Records, each in one page of the memory: number, generation, the one made of it, zero, in this
//! machine's byte order. The oldest are overwritten: then a device fails that need not have.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, memfd_create};

/// Records that are kept.
const CAPACITY: usize = 8192;
/// Bytes of a record.
const RECORD_BYTES: usize = 32;

/// What this node has made of what.
#[derive(Default)]
pub(crate) struct Generations {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// A generation and the one made of it, oldest first.
    made: VecDeque<(u64, u64)>,
    /// Number of the newest record; the first one has 1.
    number: u64,
    memory: Option<File>,
}

impl Generations {
    /// Remembers the records in memory of its own from now on.
    pub(crate) fn keep(&self) -> std::io::Result<()> {
        let memory = memfd_create("lockstep-generations", MemfdFlags::CLOEXEC)?;
        self.lock().memory = Some(memory.into());
        Ok(())
    }

    /// Goes on with the memory of a dead daemon. Called before any resource is there.
    pub(crate) fn go_on(&self, memory: OwnedFd) -> std::io::Result<()> {
        let memory = File::from(memory);
        let mut bytes = vec![0; CAPACITY * RECORD_BYTES];
        let mut len = 0;
        while len < bytes.len() {
            match memory.read_at(&mut bytes[len..], len as u64)? {
                0 => break,
                count => len += count,
            }
        }
        let mut records: Vec<[u64; 3]> = bytes[..len]
            .chunks_exact(RECORD_BYTES)
            .map(decode)
            .filter(|[number, _, _]| *number != 0)
            .collect();
        records.sort_unstable();
        let mut inner = self.lock();
        inner.number = records.last().map_or(0, |[number, _, _]| *number);
        inner.made = records.iter().map(|[_, from, to]| (*from, *to)).collect();
        inner.memory = Some(memory);
        Ok(())
    }

    /// Shows the memory, for the holder.
    pub(crate) fn with_memory<T>(
        &self,
        then: impl FnOnce(BorrowedFd<'_>) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        match &self.lock().memory {
            Some(memory) => then(memory.as_fd()),
            None => Err(std::io::ErrorKind::NotFound.into()),
        }
    }

    /// This node, as Primary, is going to make `to` of its data of generation `from`.
    pub(crate) fn made(&self, from: u64, to: u64) {
        let mut inner = self.lock();
        inner.number += 1;
        if inner.made.len() == CAPACITY {
            inner.made.pop_front();
        }
        inner.made.push_back((from, to));
        let Some(memory) = &inner.memory else { return };
        let index = (inner.number - 1) % CAPACITY as u64;
        let record = encode([inner.number, from, to]);
        if let Err(error) = memory.write_all_at(&record, index * RECORD_BYTES as u64) {
            tracing::warn!(%error, "devices may fail if this daemon is killed");
        }
    }

    /// Whether `current` is `from`, or what this node alone has made of it.
    pub(crate) fn descends(&self, from: u64, current: u64) -> bool {
        let mut reached = BTreeSet::from([from]);
        for (of, to) in &self.lock().made {
            if reached.contains(of) {
                reached.insert(*to);
            }
        }
        reached.contains(&current)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Without the bit that tells of a Primary.
pub(crate) fn plain(uuid: u64) -> u64 {
    uuid & !1
}

fn encode(words: [u64; 3]) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    for (bytes, word) in record.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    record
}

fn decode(record: &[u8]) -> [u64; 3] {
    let mut words = [0; 3];
    for (word, bytes) in words.iter_mut().zip(record.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the next daemon knows after a SIGKILL of this one.
    fn next(dead: &Generations) -> Generations {
        let next = Generations::default();
        let memory = dead.with_memory(|fd| fd.try_clone_to_owned()).unwrap();
        next.go_on(memory).unwrap();
        next
    }

    #[test]
    fn only_what_this_node_made_of_it_descends_from_a_generation() {
        let first = Generations::default();
        first.keep().unwrap();
        first.made(10, 20);
        first.made(20, 30);
        first.made(77, 78);
        let second = next(&first);
        assert!(second.descends(10, 10), "unchanged");
        assert!(second.descends(10, 20) && second.descends(10, 30));
        assert!(!second.descends(20, 10), "never back");
        assert!(!second.descends(10, 78), "what was made of other data");
        assert!(!second.descends(10, 77), "what another node made");
        second.made(30, 40);
        assert!(next(&second).descends(10, 40), "over two kills");
    }

    #[test]
    fn the_oldest_go_first() {
        let first = Generations::default();
        first.keep().unwrap();
        let count = CAPACITY as u64 + 3;
        for from in 1..=count {
            first.made(from, from + 1);
        }
        for known in [&first, &next(&first)] {
            assert!(known.descends(4, count + 1));
            assert!(!known.descends(3, count + 1), "forgotten");
        }
        let second = next(&first);
        second.made(count + 1, count + 2);
        assert!(next(&second).descends(5, count + 2));
    }
}
