//! A histogram of times on a logarithmic scale: four steps for each doubling, from 64 us on.

use std::time::Duration;

use serde::{Deserialize, Serialize};

const STEPS: usize = 96;
const FIRST_US: f64 = 64.0;
const STEPS_PER_DOUBLING: f64 = 4.0;

/// Bounds that metrics show, in microseconds.
pub(crate) const BOUNDS_US: [u64; 13] = [
    1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000,
    5_000_000, 10_000_000,
];

/// How long something took, many times.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// Empty until the first sample.
    steps: Vec<u64>,
    pub(crate) count: u64,
    pub(crate) sum_us: u64,
    pub(crate) max_us: u64,
}

fn upper_us(step: usize) -> f64 {
    FIRST_US * (step as f64 / STEPS_PER_DOUBLING).exp2()
}

impl Latency {
    pub(crate) fn sample(&mut self, time: Duration) {
        let us = time.as_micros().min(u128::from(u64::MAX)) as u64;
        self.steps.resize(STEPS, 0);
        let step = ((us as f64 / FIRST_US).log2() * STEPS_PER_DOUBLING).ceil();
        self.steps[step.clamp(0.0, STEPS as f64 - 1.0) as usize] += 1;
        self.count += 1;
        self.sum_us = self.sum_us.saturating_add(us);
        self.max_us = self.max_us.max(us);
    }

    /// The time that a share of all samples did not exceed, at most 19 % too long.
    pub(crate) fn quantile_us(&self, share: f64) -> u64 {
        let wanted = (self.count as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (step, count) in self.steps.iter().enumerate() {
            seen += count;
            if seen >= wanted && seen > 0 {
                return (upper_us(step) as u64).min(self.max_us);
            }
        }
        0
    }

    /// Samples that took at most `bound` microseconds, to within one step.
    pub(crate) fn up_to(&self, bound_us: u64) -> u64 {
        let fits = |step: usize| upper_us(step) <= bound_us as f64 * 1.01;
        (0..self.steps.len())
            .filter(|step| fits(*step))
            .map(|step| self.steps[step])
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_never_too_short_and_at_most_a_step_too_long() {
        let mut latency = Latency::default();
        assert_eq!(latency.quantile_us(0.99), 0);
        for ms in 1..=1000u64 {
            latency.sample(Duration::from_millis(ms));
        }
        let p50 = latency.quantile_us(0.5);
        assert!((500_000..=595_000).contains(&p50), "{p50}");
        let p99 = latency.quantile_us(0.99);
        assert!((990_000..=1_000_000).contains(&p99), "{p99}");
        assert_eq!((latency.count, latency.max_us), (1000, 1_000_000));
        assert!(latency.up_to(100_000) <= 100 && latency.up_to(100_000) > 80);
        assert_eq!(latency.up_to(10_000_000), 1000);
        latency.sample(Duration::ZERO);
        latency.sample(Duration::from_secs(u64::MAX));
        assert_eq!(latency.count, 1002);
    }
}
