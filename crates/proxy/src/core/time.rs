//! Time as the core knows it: nanoseconds since an arbitrary start, given by the driver.

use std::time::Duration;

/// A point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Instant(pub(crate) u64);

impl Instant {
    /// The time `later` after this one.
    pub(crate) fn after(self, later: Duration) -> Instant {
        Instant(
            self.0
                .saturating_add(later.as_nanos().min(u128::from(u64::MAX)) as u64),
        )
    }

    /// Time since `earlier`, zero if that lies ahead.
    pub(crate) fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
