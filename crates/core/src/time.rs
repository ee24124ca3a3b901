//! Time as the core sees it: a number that the driver passes in. The core never asks for it.

/// A point in time in nanoseconds since an origin that the driver chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

/// A span of time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Duration(pub u64);

impl Duration {
    /// From whole seconds.
    pub const fn from_secs(seconds: u64) -> Self {
        Duration(seconds * 1_000_000_000)
    }

    /// From milliseconds.
    pub const fn from_millis(milliseconds: u64) -> Self {
        Duration(milliseconds * 1_000_000)
    }

    /// From DRBD's unit for time-outs, a tenth of a second.
    pub const fn from_tenths(tenths: u64) -> Self {
        Duration(tenths * 100_000_000)
    }

    /// Whole milliseconds, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// This span `factor` times.
    pub const fn times(self, factor: u64) -> Self {
        Duration(self.0 * factor)
    }
}

impl core::ops::Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, span: Duration) -> Instant {
        Instant(self.0.saturating_add(span.0))
    }
}

impl core::ops::Sub<Instant> for Instant {
    type Output = Duration;

    /// The time since `earlier`; zero if that lies ahead.
    fn sub(self, earlier: Instant) -> Duration {
        Duration(self.0.saturating_sub(earlier.0))
    }
}
