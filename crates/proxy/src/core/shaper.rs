//! Bandwidth: a token bucket whose rate may follow a weekly timetable, and how both are written.
//! Tokens are wire bytes.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::{format_bytes, parse_bytes};
use super::time::Instant;

/// Minutes in a week; minute 0 is Monday 00:00 UTC.
const WEEK_MINUTES: u32 = 7 * 24 * 60;
const DAY_MINUTES: u32 = 24 * 60;
const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
/// Least burst: less would cut frames into very small TLS records.
const BURST_MIN: u64 = 64 << 10;
const BURST_MAX: u64 = 1 << 30;

/// The limit of one level: how many bytes per second, and how many at once after a pause.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Limit {
    pub(crate) rate: Schedule,
    /// 0: what the rate gives in 20 ms, at least 64 KiB.
    pub(crate) burst_bytes: u64,
}

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
    /// 0: by the rate.
    burst_bytes: u64,
    tokens: i64,
    filled: Instant,
}

impl Limit {
    /// A rate for the whole week, with the burst that follows from it.
    #[cfg(test)]
    pub(crate) fn flat(rate: u64) -> Limit {
        Limit {
            rate: Schedule::flat(rate),
            burst_bytes: 0,
        }
    }

    /// Sets `bwlimit`, `schedule` or `burst`; `None` is another option. The error is what was
    /// expected.
    pub(crate) fn set(&mut self, option: &str, value: &str) -> Option<Result<(), String>> {
        let done = match option {
            "bwlimit" => match parse_bytes(value) {
                Some(rate) => {
                    self.rate = Schedule::flat(rate);
                    Ok(())
                }
                None => Err("bytes per second, 0 for none".into()),
            },
            "schedule" => Schedule::parse(value).map(|rate| self.rate = rate),
            "burst" => match parse_bytes(value) {
                Some(bytes) if bytes == 0 || (BURST_MIN..=BURST_MAX).contains(&bytes) => {
                    self.burst_bytes = bytes;
                    Ok(())
                }
                _ => Err("64K to 1G, or 0 for what the rate gives in 20 ms".into()),
            },
            _ => return None,
        };
        Some(done)
    }

    /// The options that give this limit; none for no limit.
    pub(crate) fn words(&self) -> Vec<(&'static str, String)> {
        let mut words = Vec::new();
        if !self.rate.entries.is_empty() {
            words.push(("schedule", self.rate.to_string()));
        } else if self.rate.otherwise > 0 {
            words.push(("bwlimit", self.rate.to_string()));
        }
        if self.burst_bytes > 0 {
            words.push(("burst", format_bytes(self.burst_bytes)));
        }
        words
    }
}

/// As `Schedule::parse` reads it; one rate alone is a number.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in &self.entries {
            let first = entry.days.trailing_zeros() as usize;
            let last = 7 - (entry.days << 1).leading_zeros() as usize - 1;
            match (first, last) {
                (0, 6) => f.write_str("*")?,
                _ if first == last => f.write_str(DAYS[first])?,
                _ => write!(f, "{}-{}", DAYS[first], DAYS[last])?,
            }
            if (entry.from_minute, entry.to_minute) != (0, DAY_MINUTES) {
                let time = |minute: u32| format!("{:02}:{:02}", minute / 60, minute % 60);
                write!(f, "/{}-{}", time(entry.from_minute), time(entry.to_minute))?;
            } else if (first, last) == (0, 6) {
                // `*` alone is what stands for the rest.
                f.write_str("/*")?;
            }
            write!(f, "={},", format_bytes(entry.rate))?;
        }
        let rest = format_bytes(self.otherwise);
        match self.entries.is_empty() {
            true => f.write_str(&rest),
            false => write!(f, "*={rest}"),
        }
    }
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
    let day = |text: &str| DAYS.iter().position(|name| *name == text);
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
            burst_bytes: 0,
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

    /// A bucket with the limit of a minute of the week.
    pub(crate) fn limited(now: Instant, limit: &Limit, minute: u32) -> Bucket {
        let mut bucket = Bucket::new(limit.rate.rate_at(minute));
        bucket.set(now, limit, minute);
        bucket
    }

    /// Changes rate and burst to those of a minute of the week.
    pub(crate) fn set(&mut self, now: Instant, limit: &Limit, minute: u32) {
        if self.burst_bytes != limit.burst_bytes {
            self.refill(now);
            self.burst_bytes = limit.burst_bytes;
            self.tokens = self.tokens.min(self.burst());
        }
        self.set_rate(now, limit.rate.rate_at(minute));
    }

    /// Bytes per second; 0 is unlimited.
    pub(crate) fn rate(&self) -> u64 {
        self.rate
    }

    /// Bytes that may pass at once; 0 where there is no limit.
    pub(crate) fn burst_bytes(&self) -> u64 {
        match self.rate {
            0 => 0,
            _ => self.burst() as u64,
        }
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
        let bytes = match self.burst_bytes {
            0 => (self.rate / 50).max(BURST_MIN),
            bytes => bytes,
        };
        bytes.min(i64::MAX as u64) as i64
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
    fn what_is_set_can_be_written_and_read_again() {
        for text in [
            "mon-fri/08:00-18:00=2M,sat=8M,*=0",
            "*/01:30-02:00=77,sun=3K,*=1G",
            "*/*=5,*=6",
        ] {
            let schedule = Schedule::parse(text).unwrap();
            assert_eq!(schedule.to_string(), text);
        }
        let mut limit = Limit::default();
        assert_eq!(limit.words(), []);
        assert_eq!(limit.set("bwlimit", "2M"), Some(Ok(())));
        assert_eq!(limit.set("burst", "64K"), Some(Ok(())));
        let words = [("bwlimit", "2M".to_string()), ("burst", "64K".to_string())];
        assert_eq!(limit.words(), words);
        assert_eq!(limit.set("weight", "1"), None);
        for bad in ["1", "65535", "1025M", "-1", "x", ""] {
            let error = limit.set("burst", bad).unwrap().unwrap_err();
            assert!(error.contains("64K to 1G"), "{error}");
        }
        assert_eq!(limit.burst_bytes, 64 << 10);
        assert_eq!(limit.set("burst", "0"), Some(Ok(())));
        assert_eq!(limit, Limit::flat(2 << 20));
    }

    /// What passes at once after a long pause.
    fn at_once(bucket: &mut Bucket, now: Instant) -> usize {
        let mut passed = 0;
        loop {
            let allowed = bucket.available(now).min(10_000);
            if allowed == 0 {
                return passed;
            }
            bucket.charge(allowed);
            passed += allowed;
        }
    }

    #[test]
    fn after_a_pause_one_burst_passes_at_once() {
        let second = |n: u64| Instant(n * 1_000_000_000);
        let mut limit = Limit::flat(10 << 20);
        let mut bucket = Bucket::limited(second(0), &limit, 0);
        assert_eq!(at_once(&mut bucket, second(9)), (10 << 20) / 50);
        limit.burst_bytes = 4 << 20;
        bucket.set(second(10), &limit, 0);
        assert_eq!(bucket.burst_bytes(), 4 << 20);
        assert_eq!(at_once(&mut bucket, second(19)), 4 << 20);
        // Made smaller while it is full.
        limit.burst_bytes = 64 << 10;
        bucket.set(second(29), &limit, 0);
        assert_eq!(at_once(&mut bucket, second(29)), 64 << 10);
        // The debt of urgent bytes is as large.
        bucket.charge(10 << 20);
        let wait = bucket.ready_at(1).since(second(29));
        assert!(wait <= Duration::from_millis(7), "{wait:?}");
        assert_eq!(
            Bucket::limited(second(0), &Limit::default(), 0).burst_bytes(),
            0
        );
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
