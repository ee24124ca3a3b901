//! The second look of whoever is about to give a peer up.
//!
//! A process that stood still (a debugger, a paused guest, a host without time for it) looks at the clock before it reads
//! what came meanwhile, and how late it is does not tell: it may have stood still until just after the time was over.
//! So the end of a time-out gives nobody up, but a second look does, for which the process has read what was there.

use crate::resource::Resource;
use crate::time::{Duration, Instant};
use crate::timers::Timer;

/// A time-out that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    /// Which one.
    pub timer: Timer,
    /// For when it was set.
    pub at: Instant,
    /// It was set for a second look.
    pub is_second: bool,
}

impl Resource {
    /// Whether this is no look to go by: another one comes.
    pub(crate) fn looks_again(&mut self, over: Over) -> bool {
        if planted!(self, StoodStillGivesUp) {
            return false;
        }
        let late = self.now - over.at;
        // A process that stood still between the two looks has not waited for the second one.
        if over.is_second && late < SECOND_LOOK {
            return false;
        }
        let wait = match late < LATE {
            true => LATE,
            false => SECOND_LOOK,
        };
        let at = self.now + wait;
        self.timers.set_second_look(over.timer, at);
        true
    }
}

/// Between two looks if the first one came late.
pub(crate) const SECOND_LOOK: Duration = Duration::from_millis(100);
/// A look that comes later than this after its time is late. One that is not is soon followed by the second one.
const LATE: Duration = Duration::from_millis(10);
