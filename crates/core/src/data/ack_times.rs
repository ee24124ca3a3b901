//! How long a peer takes to acknowledge writes: a histogram of fixed size, for metrics.

use crate::time::Duration;

/// Upper bounds of the buckets in microseconds; one more takes everything above.
pub const BOUNDS_US: [u64; 18] = [
    20, 50, 100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600, 51_200, 102_400, 204_800,
    409_600, 1_000_000, 4_000_000, 16_000_000,
];

/// Times from a write's submission to the peer's acknowledgement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AckTimes {
    /// Sum of the times in microseconds.
    pub sum_us: u64,
    /// Acknowledgements per bucket of [`BOUNDS_US`], the last one above all bounds.
    pub buckets: [u64; BOUNDS_US.len() + 1],
}

impl AckTimes {
    /// Counts one acknowledgement.
    pub(crate) fn add(&mut self, time: Duration) {
        let us = time.0 / 1000;
        let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
        self.buckets[bucket] += 1;
        self.sum_us = self.sum_us.saturating_add(us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_counted_below_the_next_bound() {
        let mut times = AckTimes::default();
        for us in [20, 21, 20_000_000] {
            times.add(Duration(us * 1000));
        }
        assert_eq!((times.buckets[0], times.buckets[1]), (1, 1));
        assert_eq!(times.buckets[BOUNDS_US.len()], 1);
        assert_eq!(times.sum_us, 20_000_041);
    }
}
