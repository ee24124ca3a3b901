//! Wake-up times of a shard's objects, in one heap.
//!
//! An object keeps the earliest time at which it has an entry. A later wish leaves the entry where
//! it is: when it fires, the object says its present wish, so timers that move with every packet
//! cost nothing until then.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use lockstep_core::time::Instant;

/// The heap. `K` names an object.
#[derive(Debug)]
pub(crate) struct TimerHeap<K> {
    heap: BinaryHeap<Reverse<(Instant, K)>>,
}

/// An object's part: when its earliest entry fires.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Armed(Option<Instant>);

impl<K: Ord> Default for TimerHeap<K> {
    fn default() -> Self {
        TimerHeap {
            heap: BinaryHeap::new(),
        }
    }
}

impl<K: Ord + Copy> TimerHeap<K> {
    /// The object wants to be woken at `at` or before.
    pub(crate) fn arm(&mut self, armed: &mut Armed, key: K, at: Instant) {
        if armed.0.is_none_or(|earliest| at < earliest) {
            armed.0 = Some(at);
            self.heap.push(Reverse((at, key)));
        }
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    /// When the next entry fires.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// An entry that is due, with its time; tell the object's `fired`.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<(Instant, K)> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }
}

impl Armed {
    /// Notes that an entry fired; `false` if an earlier one replaced it, so it means nothing.
    pub(crate) fn fired(&mut self, at: Instant) -> bool {
        if self.0 == Some(at) {
            self.0 = None;
            return true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use lockstep_core::time::Instant;

    use super::{Armed, TimerHeap};

    #[test]
    fn a_wish_that_moves_later_adds_no_entry() {
        let mut heap = TimerHeap::default();
        let mut armed = Armed::default();
        for at in 10..1000 {
            heap.arm(&mut armed, 'a', Instant(at));
        }
        heap.arm(&mut armed, 'a', Instant(5));
        assert_eq!(heap.pop_due(Instant(4)), None);
        assert_eq!(heap.pop_due(Instant(20)), Some((Instant(5), 'a')));
        assert!(armed.fired(Instant(5)));
        heap.arm(&mut armed, 'a', Instant(900));
        // The old entry of time 10 fires, but an object that armed anew ignores it.
        assert_eq!(heap.pop_due(Instant(20)), Some((Instant(10), 'a')));
        assert!(!armed.fired(Instant(10)));
        assert_eq!(heap.next(), Some(Instant(900)));
    }
}
