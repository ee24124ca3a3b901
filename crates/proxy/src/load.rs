//! How much of the machine is free for coding: what is idle, and what the codec threads have now.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two looks.
const EVERY: Duration = Duration::from_millis(500);

/// Watches the machine whenever the codec threads work.
#[derive(Debug)]
pub(crate) struct Load {
    workers: usize,
    last: Mutex<Look>,
}

#[derive(Debug)]
struct Look {
    at: Instant,
    ticks: Option<Ticks>,
    /// Processor time of the codec threads since then.
    used: Duration,
}

/// Time of all processors since the machine started, in the kernel's ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    idle: u64,
    all: u64,
    processors: usize,
}

impl Load {
    /// Begins to watch, for a pool of so many threads.
    pub(crate) fn new(workers: usize) -> Load {
        let look = Look {
            at: Instant::now(),
            ticks: ticks(),
            used: Duration::ZERO,
        };
        Load {
            workers,
            last: Mutex::new(look),
        }
    }

    /// A codec thread had the processor for so long. From time to time the answer is how many
    /// thousandths of a core coding can have.
    pub(crate) fn account(&self, cpu: Duration) -> Option<u64> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.used += cpu;
        let passed = last.at.elapsed();
        if passed < EVERY {
            return None;
        }
        let now = ticks();
        let free = free_millicores(self.workers, last.ticks?, now?, passed, last.used);
        *last = Look {
            at: Instant::now(),
            ticks: now,
            used: Duration::ZERO,
        };
        free
    }
}

/// What was idle between two looks, and what the pool had itself, but no more than it has threads.
fn free_millicores(
    workers: usize,
    before: Ticks,
    now: Ticks,
    passed: Duration,
    used: Duration,
) -> Option<u64> {
    let all = now.all.checked_sub(before.all).filter(|all| *all > 0)?;
    let idle = now.idle.saturating_sub(before.idle).min(all);
    let idle = now.processors as f64 * idle as f64 / all as f64;
    let own = used.as_secs_f64() / passed.as_secs_f64();
    Some(((idle + own).min(workers as f64) * 1000.0) as u64)
}

fn ticks() -> Option<Ticks> {
    read_ticks(&std::fs::read_to_string("/proc/stat").ok()?)
}

/// The first line is the sum of all processors: user, nice, system, idle, waiting for disks, ...
fn read_ticks(text: &str) -> Option<Ticks> {
    let mut lines = text.lines();
    let numbers = lines.next()?.strip_prefix("cpu ")?.split_whitespace();
    let numbers: Vec<u64> = numbers.map_while(|word| word.parse().ok()).collect();
    let (idle, waiting) = (numbers.get(3)?, numbers.get(4).copied().unwrap_or(0));
    Some(Ticks {
        idle: idle + waiting,
        // The time of guests is in that of the user already.
        all: numbers.iter().take(8).sum(),
        processors: lines.take_while(|line| line.starts_with("cpu")).count(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_and_that_of_the_pool_are_free_up_to_its_threads() {
        let text = "cpu  100 50 30 600 20 1 2 3 9 9\ncpu0 1 2\ncpu1 1 2\nintr 7\n";
        let before = read_ticks(text).unwrap();
        let wanted = Ticks {
            idle: 620,
            all: 806,
            processors: 2,
        };
        assert_eq!(before, wanted);
        let after = |busy: u64, idle: u64| Ticks {
            idle: before.idle + idle,
            all: before.all + busy + idle,
            processors: 2,
        };
        let second = Duration::from_secs(1);
        let free = |workers, now, used| {
            free_millicores(workers, before, now, second, Duration::from_millis(used))
        };
        // Half of two cores is idle, and the pool had a quarter of one.
        assert_eq!(free(2, after(100, 100), 250), Some(1250));
        assert_eq!(free(1, after(100, 100), 250), Some(1000));
        // Others have everything.
        assert_eq!(free(2, after(200, 0), 100), Some(100));
        assert_eq!(free(2, before, 0), None);
        assert_eq!(read_ticks("intr 7\n"), None);
        assert!(ticks().is_some_and(|now| now.processors > 0 && now.all >= now.idle));
    }

    #[test]
    fn a_look_is_taken_now_and_then() {
        let load = Load::new(2);
        assert_eq!(load.account(Duration::from_millis(1)), None);
        load.last.lock().unwrap().at -= EVERY;
        // A machine that has just been looked at may not have counted a tick since.
        load.last.lock().unwrap().ticks = ticks().map(|now| Ticks {
            all: now.all - 10,
            ..now
        });
        let free = load.account(Duration::from_millis(100)).unwrap();
        assert!((100..=2000).contains(&free), "{free}");
        assert_eq!(load.account(Duration::from_millis(1)), None);
    }
}
