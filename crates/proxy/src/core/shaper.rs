//! Bandwidth: a token bucket whose rate may follow a weekly timetable. Tokens are wire bytes.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::parse_bytes;
use super::time::Instant;

/// Minutes in a week; minute 0 is Monday 00:00 UTC.
const WEEK_MINUTES: u32 = 7 * 24 * 60;
const DAY_MINUTES: u32 = 24 * 60;

/// A rate over the week: the first entry that holds the minute decides, else `otherwise`.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Schedule {
    entries: Vec<Entry>,
    /// Bytes per second; 0 is unlimited.
    otherwise: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    /// Bit n: day n, Monday first.
    days: u8,
    from_minute: u32,
    to_minute: u32,
    rate: u64,
}

/// Lets bytes pass at a rate.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    rate: u64,
    tokens: i64,
    filled: Instant,
}

impl Schedule {
    /// One rate for the whole week.
    pub(crate) fn flat(rate: u64) -> Schedule {
        Schedule {
            entries: Vec::new(),
            otherwise: rate,
        }
    }

    /// Reads `mon-fri/08:00-18:00=2M,sat/*=8M,*=0`: days, time and rate; 0 is unlimited. The error
    /// is what was expected.
    pub(crate) fn parse(text: &str) -> Result<Schedule, String> {
        let expected = || {
            "entries like mon-fri/08:00-18:00=2M separated by commas, and *=RATE for the rest; \
             0 is unlimited"
                .to_string()
        };
        let mut schedule = Schedule::default();
        for entry in text.split(',') {
            let (when, rate) = entry.split_once('=').ok_or_else(expected)?;
            let rate = parse_bytes(rate).ok_or_else(expected)?;
            if when == "*" {
                schedule.otherwise = rate;
                continue;
            }
            let (days, time) = when.split_once('/').unwrap_or((when, "*"));
            let (from_minute, to_minute) = parse_time(time).ok_or_else(expected)?;
            let days = parse_days(days).ok_or_else(expected)?;
            schedule.entries.push(Entry {
                days,
                from_minute,
                to_minute,
                rate,
            });
        }
        Ok(schedule)
    }

    /// The rate at a minute of the week.
    pub(crate) fn rate_at(&self, minute: u32) -> u64 {
        let minute = minute % WEEK_MINUTES;
        let (day, time) = (minute / DAY_MINUTES, minute % DAY_MINUTES);
        self.entries
            .iter()
            .find(|entry| {
                entry.days >> day & 1 == 1 && (entry.from_minute..entry.to_minute).contains(&time)
            })
            .map_or(self.otherwise, |entry| entry.rate)
    }
}

fn parse_time(text: &str) -> Option<(u32, u32)> {
    if text == "*" {
        return Some((0, DAY_MINUTES));
    }
    let minute = |text: &str| {
        let (hour, minute) = text.split_once(':')?;
        let (hour, minute): (u32, u32) = (hour.parse().ok()?, minute.parse().ok()?);
        (minute < 60 && hour * 60 + minute <= DAY_MINUTES).then_some(hour * 60 + minute)
    };
    let (from, to) = text.split_once('-')?;
    let (from, to) = (minute(from)?, minute(to)?);
    (from < to).then_some((from, to))
}

fn parse_days(text: &str) -> Option<u8> {
    const NAMES: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
    let day = |text: &str| NAMES.iter().position(|name| *name == text);
    if text == "*" {
        return Some(0x7f);
    }
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (day(first)?, day(last)?),
        None => (day(text)?, day(text)?),
    };
    (first <= last).then(|| (first..=last).fold(0, |mask, day| mask | 1 << day))
}

impl Bucket {
    /// A full bucket; rate 0 lets everything pass.
    pub(crate) fn new(rate: u64) -> Bucket {
        Bucket {
            rate,
            tokens: 0,
            filled: Instant(0),
        }
    }

    /// Changes the rate from now on.
    pub(crate) fn set_rate(&mut self, now: Instant, rate: u64) {
        if self.rate != rate {
            self.refill(now);
            self.rate = rate;
            self.tokens = self.tokens.min(self.burst());
        }
    }

    /// Bytes per second; 0 is unlimited.
    pub(crate) fn rate(&self) -> u64 {
        self.rate
    }

    /// Bytes that may pass now.
    pub(crate) fn available(&mut self, now: Instant) -> usize {
        if self.rate == 0 {
            return usize::MAX;
        }
        self.refill(now);
        self.tokens.max(0) as usize
    }

    /// Takes what has passed. The debt is limited to one burst, so urgent bytes cannot starve the
    /// rest for long.
    pub(crate) fn charge(&mut self, bytes: usize) {
        if self.rate != 0 {
            self.tokens = (self.tokens - bytes as i64).max(-self.burst());
        }
    }

    /// When at least `bytes` (at most a burst) may pass.
    pub(crate) fn ready_at(&self, bytes: usize) -> Instant {
        let missing = (bytes as i64).min(self.burst()) - self.tokens;
        if self.rate == 0 || missing <= 0 {
            return self.filled;
        }
        let nanos = (missing as u128 * 1_000_000_000).div_ceil(u128::from(self.rate));
        self.filled
            .after(Duration::from_nanos(nanos.min(u128::from(u64::MAX)) as u64))
    }

    fn burst(&self) -> i64 {
        (self.rate / 50).max(64 << 10).min(i64::MAX as u64) as i64
    }

    fn refill(&mut self, now: Instant) {
        let nanos = now.since(self.filled).as_nanos();
        let gained = nanos * u128::from(self.rate) / 1_000_000_000;
        if gained > 0 || self.rate == 0 {
            let gained = gained.min(i64::MAX as u128 / 2) as i64;
            self.tokens = self.tokens.saturating_add(gained).min(self.burst());
            self.filled = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timetable_gives_the_rate_of_the_minute() {
        let week = Schedule::parse("mon-fri/08:00-18:00=2M,sat=8M,*=0").unwrap();
        assert_eq!(week.rate_at(8 * 60), 2 << 20);
        assert_eq!(week.rate_at(18 * 60), 0);
        assert_eq!(week.rate_at(5 * DAY_MINUTES + 3), 8 << 20);
        assert_eq!(week.rate_at(6 * DAY_MINUTES + 9 * 60), 0);
        for bad in [
            "mon",
            "mon/8=1",
            "xyz=1M",
            "mon/18:00-08:00=1M",
            "mon=x",
            "fri-mon=1",
        ] {
            assert!(Schedule::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn over_a_minute_a_bucket_lets_its_rate_pass() {
        let mut bucket = Bucket::new(1_250_000);
        let (mut now, mut passed) = (Instant(1), 0u64);
        while now < Instant(60_000_000_000) {
            let allowed = bucket.available(now).min(16 << 10);
            if allowed == 0 {
                now = bucket.ready_at(1400).max(Instant(now.0 + 1));
                continue;
            }
            bucket.charge(allowed);
            passed += allowed as u64;
        }
        assert!((74_900_000..75_300_000).contains(&passed), "{passed}");
    }

    #[test]
    fn urgent_bytes_borrow_at_most_one_burst() {
        let mut bucket = Bucket::new(100_000);
        bucket.charge(10 << 20);
        assert!(bucket.ready_at(1) <= Instant(700_000_000));
        assert_eq!(Bucket::new(0).available(Instant(5)), usize::MAX);
    }
}
