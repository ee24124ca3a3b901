//! Latencies of one measurement, and how a row is shown.

use std::time::Duration;

use serde::Serialize;

/// Latencies of the operations of one measurement.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    nanoseconds: Vec<u32>,
}

impl Latencies {
    /// Room for so many without growing while it is measured.
    pub fn with_capacity(count: usize) -> Self {
        Latencies {
            nanoseconds: Vec::with_capacity(count),
        }
    }

    /// Notes one; more than 4 s count as 4 s.
    pub fn add(&mut self, latency: Duration) {
        self.nanoseconds
            .push(u32::try_from(latency.as_nanos()).unwrap_or(u32::MAX));
    }

    /// Operations noted.
    pub fn len(&self) -> usize {
        self.nanoseconds.len()
    }

    /// Nothing was noted.
    pub fn is_empty(&self) -> bool {
        self.nanoseconds.is_empty()
    }

    /// The latency in microseconds that `per_mille` of 1000 operations do not exceed.
    pub fn percentile_us(&mut self, per_mille: usize) -> f64 {
        if self.nanoseconds.is_empty() {
            return 0.0;
        }
        let index = (self.nanoseconds.len() - 1) * per_mille.min(1000) / 1000;
        let (_, value, _) = self.nanoseconds.select_nth_unstable(index);
        f64::from(*value) / 1000.0
    }
}

/// What one measurement gave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Figure {
    /// Operations per second.
    pub iops: f64,
    /// Median latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
    /// CPU time of the measuring process per operation, in microseconds.
    pub cpu_us_per_io: f64,
}

impl Figure {
    /// From what was noted in `elapsed`, with `cpu` spent.
    pub fn new(mut latencies: Latencies, elapsed: Duration, cpu: Duration) -> Self {
        let count = latencies.len() as f64;
        if count == 0.0 {
            return Figure::default();
        }
        Figure {
            iops: count / elapsed.as_secs_f64(),
            p50_us: latencies.percentile_us(500),
            p99_us: latencies.percentile_us(990),
            cpu_us_per_io: cpu.as_secs_f64() * 1e6 / count,
        }
    }

    /// The figure in the middle by operations per second.
    pub fn median(mut figures: Vec<Figure>) -> Figure {
        figures.sort_by(|a, b| a.iops.total_cmp(&b.iops));
        figures.get(figures.len() / 2).copied().unwrap_or_default()
    }
}

/// CPU time that this process has spent so far.
pub fn process_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// One line of the result (`--json` gives an array of these).
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What was measured.
    pub path: String,
    /// Operations in flight.
    pub qd: usize,
    /// The bare program's operations per second; 0 if there is none to compare with.
    pub floor_iops: f64,
    /// The raw disk's operations per second; 0 if none.
    pub raw_iops: f64,
    /// Lockstep's.
    pub iops: f64,
    /// Lockstep's by what it is compared with.
    pub ratio: f64,
    /// What it is compared with.
    pub against: String,
    /// Median latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
    /// CPU time per operation in microseconds, both nodes together.
    pub cpu_us_per_io: f64,
}

/// The rows as a table.
pub fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<34} {:>3} {:>10} {:>10} {:>10} {:>6} {:>9} {:>9} {:>7}\n",
        "path", "qd", "floor/s", "raw/s", "lockstep/s", "ratio", "p50 us", "p99 us", "cpu us"
    );
    let number = |value: f64| {
        if value == 0.0 {
            "-".to_string()
        } else {
            format!("{value:.0}")
        }
    };
    for row in rows {
        text.push_str(&format!(
            "{:<34} {:>3} {:>10} {:>10} {:>10} {:>6.2} {:>9.1} {:>9.1} {:>7.2}\n",
            row.path,
            row.qd,
            number(row.floor_iops),
            number(row.raw_iops),
            number(row.iops),
            row.ratio,
            row.p50_us,
            row.p99_us,
            row.cpu_us_per_io
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_sorted_latencies() {
        let mut latencies = Latencies::default();
        for us in (1..=1000).rev() {
            latencies.add(Duration::from_micros(us));
        }
        assert!((latencies.percentile_us(500) - 500.0).abs() < 2.0);
        assert!((latencies.percentile_us(990) - 990.0).abs() < 2.0);
        assert_eq!(Latencies::default().percentile_us(500), 0.0);
    }

    #[test]
    fn the_median_figure_is_the_one_in_the_middle() {
        let figure = |iops| Figure {
            iops,
            ..Figure::default()
        };
        let median = Figure::median(vec![figure(9.0), figure(1.0), figure(5.0)]);
        assert_eq!(median.iops, 5.0);
    }
}
