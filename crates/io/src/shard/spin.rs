//! Looking for work for a moment before sleeping.
//!
//! A sleep and its wake-up cost more than a disk or a peer nearby needs to answer. So a shard that
//! has just worked looks for a moment, without system calls, whether the next completion is there.
//! Where that is in vain (a slow disk, a far peer, other programs that need the processor) it soon
//! does so only now and then. An idle shard never spins.

use std::time::{Duration, Instant};

/// Most sleeps in a row without a look before.
const MOST_SKIPPED: u32 = 255;
/// Looks at the clock are rarer than looks for work.
const LOOKS_PER_CLOCK: u32 = 16;

/// Decides whether to look, and learns from it.
#[derive(Debug)]
pub(super) struct Spin {
    time: Duration,
    /// Sleeps until the next look.
    skip: u32,
    /// Sleeps without a look after the next look in vain.
    penalty: u32,
}

impl Spin {
    /// Looks for so long; zero for never.
    pub(super) fn new(time: Duration) -> Spin {
        Spin {
            time,
            skip: 0,
            penalty: 0,
        }
    }

    /// Whether to look before the sleep that is due.
    pub(super) fn is_due(&mut self) -> bool {
        if self.time.is_zero() {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        true
    }

    /// Looks; whether there is something.
    pub(super) fn look(&mut self, mut is_there: impl FnMut() -> bool) -> bool {
        let begin = Instant::now();
        let found = loop {
            if (0..LOOKS_PER_CLOCK).any(|_| {
                std::hint::spin_loop();
                is_there()
            }) {
                break true;
            }
            if begin.elapsed() >= self.time {
                break false;
            }
        };
        self.learn(found);
        found
    }

    fn learn(&mut self, found: bool) {
        if found {
            self.penalty /= 2;
        } else {
            self.penalty = (self.penalty * 2 + 1).min(MOST_SKIPPED);
            self.skip = self.penalty;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, MOST_SKIPPED, Spin};

    #[test]
    fn looks_in_vain_become_rare_and_found_work_brings_them_back() {
        let mut spin = Spin::new(Duration::from_nanos(1));
        let mut looks = 0;
        for _ in 0..10_000 {
            if spin.is_due() {
                looks += 1;
                assert!(!spin.look(|| false));
            }
        }
        assert!(looks < 60, "{looks}");
        assert_eq!(spin.penalty, MOST_SKIPPED);
        while !spin.is_due() {}
        for _ in 0..10 {
            assert!(spin.is_due() && spin.look(|| true));
        }
        assert_eq!(spin.penalty, 0);
        assert!(!Spin::new(Duration::ZERO).is_due());
    }
}
