//! Faults on purpose: tests make operations of a disk fail with a chosen error, and measurements
//! make its reads slow, or stop it.
//!
//! Plans are kept per path for the process and looked up when a disk is opened, so a disk without
//! a plan costs one comparison per operation.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::ring::{Errno, Fd};

/// What fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultOn {
    /// Reads of data and metadata.
    Read,
    /// Writes of data and metadata.
    Write,
    /// Flushes, also those within a durable write.
    Flush,
    /// Discards and zero-outs.
    Discard,
}

/// Which operations of one disk fail, and how.
#[derive(Debug, Default)]
pub struct FaultPlan {
    rules: Mutex<Vec<Rule>>,
    pace: Mutex<Option<Pace>>,
    /// While it is there, transfers wait until it becomes readable.
    gate: Mutex<Option<Fd>>,
}

/// Reads leave one after the other with this time between them.
#[derive(Debug)]
struct Pace {
    interval: Duration,
    next: Instant,
}

#[derive(Debug)]
struct Rule {
    on: FaultOn,
    skip: u64,
    times: u64,
    errno: Errno,
}

/// Turns that nobody took are kept for so long: on a busy machine the asker may come late.
const CREDIT: Duration = Duration::from_millis(20);

static PLANS: Mutex<Option<HashMap<String, Arc<FaultPlan>>>> = Mutex::new(None);

impl FaultPlan {
    /// The plan of a path, empty at first. Take it before the disk is opened.
    pub fn of_path(path: &str) -> Arc<FaultPlan> {
        let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
        plans
            .get_or_insert_default()
            .entry(path.into())
            .or_default()
            .clone()
    }

    pub(super) fn find(path: &str) -> Option<Arc<FaultPlan>> {
        let plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
        plans.as_ref()?.get(path).cloned()
    }

    /// After `skip` more operations of this sort, `times` of them fail.
    pub fn fail(&self, on: FaultOn, skip: u64, times: u64, errno: Errno) {
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        rules.push(Rule {
            on,
            skip,
            times,
            errno,
        });
    }

    /// Everything works again.
    pub fn clear(&self) {
        self.rules
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    /// At most so many reads per second from now on; the others wait for their turn. `None` takes
    /// the limit away.
    pub fn slow_reads(&self, per_second: Option<NonZeroU32>) {
        let pace = per_second.map(|rate| Pace {
            interval: Duration::from_secs(1) / rate.get(),
            next: Instant::now(),
        });
        *self.pace.lock().unwrap_or_else(PoisonError::into_inner) = pace;
    }

    /// Reads and writes that start from now on do not end until [`FaultPlan::release`].
    pub fn hold(&self) -> std::io::Result<()> {
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let gate = Arc::new(rustix::event::eventfd(0, flags)?);
        *self.gate.lock().unwrap_or_else(PoisonError::into_inner) = Some(gate);
        Ok(())
    }

    /// The disk answers again.
    pub fn release(&self) -> std::io::Result<()> {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gate) = gate.take() {
            rustix::io::write(&*gate, &1_u64.to_ne_bytes())?;
        }
        Ok(())
    }

    pub(super) fn gate(&self) -> Option<Fd> {
        self.gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Takes the next turn; how long to wait for it, if at all.
    pub(super) fn turn(&self) -> Option<Duration> {
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        let pace = pace.as_mut()?;
        let now = Instant::now();
        let since = now.checked_sub(CREDIT).unwrap_or(now);
        pace.next = pace.next.max(since) + pace.interval;
        pace.next.checked_duration_since(now)
    }

    pub(super) fn check(&self, on: FaultOn) -> Result<(), Errno> {
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        for rule in rules.iter_mut().filter(|rule| rule.on == on) {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if rule.times > 0 {
                rule.times -= 1;
                return Err(rule.errno);
            }
        }
        Ok(())
    }
}
