//! Worlds that never end. A core that goes round in circles within one input gives nothing back, so
//! that only another thread can tell; and it may fill the machine's memory meanwhile.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Which world each thread runs, and since when.
#[derive(Debug)]
pub struct Watch {
    limit: Duration,
    running: Vec<Mutex<Option<Running>>>,
}

#[derive(Debug)]
struct Running {
    seed: u64,
    /// Where the system says how long the thread has run.
    clock: PathBuf,
    from: Duration,
}

impl Watch {
    /// Of so many threads; a world may take so much time of a core.
    pub fn new(threads: usize, limit: Duration) -> Self {
        Watch {
            limit,
            running: (0..threads).map(|_| Mutex::new(None)).collect(),
        }
    }

    /// The calling thread, with this number, begins a world. Where the system does not say how long
    /// a thread has run, nothing is watched.
    pub fn begins(&self, thread: usize, seed: u64) {
        let clock = std::fs::read_link("/proc/thread-self")
            .map(|link| Path::new("/proc").join(link).join("schedstat"));
        let running = clock.ok().and_then(|clock| {
            let from = core_time(&clock)?;
            Some(Running { seed, clock, from })
        });
        *self.running[thread]
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = running;
    }

    /// The thread's world has ended.
    pub fn ends(&self, thread: usize) {
        *self.running[thread]
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The seed of a world that has taken more time than it may.
    pub fn endless(&self) -> Option<u64> {
        self.running.iter().find_map(|running| {
            let running = running.lock().unwrap_or_else(PoisonError::into_inner);
            let running = running.as_ref()?;
            let took = core_time(&running.clock)?.saturating_sub(running.from);
            (took > self.limit).then_some(running.seed)
        })
    }
}

/// How long a thread has run.
fn core_time(clock: &Path) -> Option<Duration> {
    let text = std::fs::read_to_string(clock).ok()?;
    let nanos = text.split_whitespace().next()?.parse().ok()?;
    Some(Duration::from_nanos(nanos))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_world_that_does_not_end_is_noticed_while_it_runs() {
        let watch = Watch::new(2, Duration::from_millis(50));
        let seen = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                watch.begins(1, 77);
                while !seen.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                watch.ends(1);
            });
            let found = loop {
                if let Some(seed) = watch.endless() {
                    break seed;
                }
                std::thread::yield_now();
            };
            seen.store(true, Ordering::Relaxed);
            assert_eq!(found, 77);
        });
        assert_eq!(watch.endless(), None);
    }
}
