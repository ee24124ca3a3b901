//! The automatic choice of a codec for one connection: measures what each rung of a ladder gives
//! and picks the one that drains fastest while there is a backlog, or the cheapest that keeps up.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::plugin::{CodecSpec, Lzma, Policy};
use super::time::Instant;

/// Rungs from cheap to thorough.
const RUNGS: usize = 11;
/// First guesses: raw MB/s of one core, and ratio on ordinary data.
const PRIOR: [(f64, f64); RUNGS] = [
    (4000.0, 1.0),
    (500.0, 1.8),
    (400.0, 1.9),
    (330.0, 2.3),
    (200.0, 2.5),
    (80.0, 2.7),
    (45.0, 2.8),
    (20.0, 2.85),
    (8.0, 2.95),
    (3.0, 3.1),
    (2.5, 3.3),
];
const ZSTD_LEVELS: [i32; 8] = [-1, 1, 3, 6, 9, 12, 15, 19];
/// Time between decisions.
pub(crate) const DECIDE_EVERY: Duration = Duration::from_millis(250);
/// One chunk of this many is also tried with the neighbouring rungs.
pub(crate) const PROBE_EVERY: u32 = 64;

/// What was measured on one rung.
#[derive(Clone, Copy, Debug)]
struct Rung {
    speed: f64,
    ratio: f64,
    seen: bool,
    /// Chunks that were coded on it, and the trials among them.
    chunks: u64,
    probes: u64,
}

/// What is known of a rung, for the operator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RungSnapshot {
    pub(crate) codec: String,
    /// Whether it was measured; else it is inferred from the nearest that was.
    pub(crate) measured: bool,
    pub(crate) chunks: u64,
    pub(crate) probes: u64,
    /// Raw bytes over wire bytes.
    pub(crate) ratio: f64,
    /// Raw bytes per second that all cores of both ends code.
    pub(crate) speed: u64,
    /// Raw bytes per second that get through; 0 while the line is not known.
    pub(crate) effective: u64,
}

/// The state of one connection's choice.
#[derive(Clone, Debug)]
pub(crate) struct Adaptive {
    rungs: [Rung; RUNGS],
    current: usize,
    changed: Instant,
    decided: Instant,
    chunks: u32,
    /// Times that the rung changed.
    pub(crate) switches: u64,
}

/// The measured surroundings of a decision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions {
    /// Wire bytes per second that the link takes; `None` while unknown.
    pub(crate) wire_rate: Option<f64>,
    /// Raw bytes per second that DRBD offers.
    pub(crate) input_rate: f64,
    /// Cores that code.
    pub(crate) workers: usize,
    /// Raw bytes per second that the peer's decoders give; `None` while unknown.
    pub(crate) decode_rate: Option<f64>,
    /// More is buffered than the link takes in a blink.
    pub(crate) backlog: bool,
    /// The link waited for the codec, and never the codec for the link.
    pub(crate) starved: bool,
    pub(crate) max_level: i32,
    pub(crate) policy: Policy,
}

impl Default for Adaptive {
    fn default() -> Adaptive {
        let rungs = PRIOR.map(|(speed, ratio)| Rung {
            speed: speed * 1e6,
            ratio,
            seen: false,
            chunks: 0,
            probes: 0,
        });
        Adaptive {
            rungs,
            current: 1,
            changed: Instant(0),
            decided: Instant(0),
            chunks: 0,
            switches: 0,
        }
    }
}

impl Adaptive {
    /// The codec of a rung.
    pub(crate) fn spec(rung: usize) -> CodecSpec {
        match rung {
            0 => CodecSpec::None,
            1 => CodecSpec::Lz4,
            2..=9 => CodecSpec::Zstd {
                level: ZSTD_LEVELS[rung - 2],
            },
            _ => CodecSpec::Lzma(Lzma {
                level: 6,
                ..Lzma::default()
            }),
        }
    }

    /// The rung in use.
    pub(crate) fn current(&self) -> usize {
        self.current
    }

    /// A chunk was coded on `rung`: learn. `wire_len` includes the frame header.
    pub(crate) fn observe(&mut self, rung: usize, raw_len: usize, wire_len: usize, took: Duration) {
        let slot = &mut self.rungs[rung];
        let weight = if slot.seen { 0.2 } else { 1.0 };
        let ratio = raw_len as f64 / wire_len.max(1) as f64;
        slot.ratio += (ratio.min(10_000.0) - slot.ratio) * weight;
        if rung > 0 {
            let speed = raw_len as f64 / took.as_secs_f64().max(1e-7);
            slot.speed += (speed - slot.speed) * weight;
        }
        slot.seen = true;
        slot.chunks += 1;
    }

    /// The same for a trial.
    pub(crate) fn observe_probe(
        &mut self,
        rung: usize,
        raw_len: usize,
        wire_len: usize,
        took: Duration,
    ) {
        self.observe(rung, raw_len, wire_len, took);
        self.rungs[rung].probes += 1;
    }

    /// What the next decision would know.
    pub(crate) fn snapshot(&self, at: &Conditions) -> Vec<RungSnapshot> {
        let known = |rung: usize| RungSnapshot {
            codec: Adaptive::spec(rung).to_string(),
            measured: self.rungs[rung].seen,
            chunks: self.rungs[rung].chunks,
            probes: self.rungs[rung].probes,
            ratio: self.ratio(rung),
            speed: self.speed(rung, at) as u64,
            effective: at
                .wire_rate
                .map_or(0, |rate| self.effective(rung, rate, at) as u64),
        };
        (0..=top(at.max_level)).map(known).collect()
    }

    /// Whether this chunk should also be tried with another rung, and which.
    pub(crate) fn probe(&mut self, max_level: i32) -> Option<usize> {
        self.chunks = self.chunks.wrapping_add(1);
        if !self.chunks.is_multiple_of(PROBE_EVERY) {
            return None;
        }
        let up = (self.chunks / PROBE_EVERY).is_multiple_of(2);
        let rung = if up {
            self.current + 1
        } else {
            self.current.checked_sub(1)?
        };
        (1..top(max_level) + 1).contains(&rung).then_some(rung)
    }

    /// Chooses anew when it is time.
    pub(crate) fn decide(&mut self, now: Instant, at: &Conditions) {
        if now.since(self.decided) < DECIDE_EVERY {
            return;
        }
        self.decided = now;
        let Some(wire_rate) = at.wire_rate else {
            return;
        };
        let best = self.best(wire_rate, at);
        if best == self.current {
            return;
        }
        let settled = now.since(self.changed) >= Duration::from_secs(1);
        let gain = self.effective(best, wire_rate, at)
            / self.effective(self.current, wire_rate, at).max(1.0);
        let to_cheap = best <= 1;
        // Upwards only for a real gain; downwards it saves work at no loss.
        let worthwhile = !at.backlog || best < self.current || gain > 1.15;
        if !worthwhile || !(settled || to_cheap) {
            return;
        }
        let limited = if to_cheap {
            best
        } else {
            best.clamp(self.current.saturating_sub(2), self.current + 2)
        };
        self.current = limited;
        self.changed = now;
        self.switches += 1;
    }

    /// Raw bytes per second that the rung in use codes.
    pub(crate) fn current_speed(&self, workers: usize) -> f64 {
        self.known_speed(self.current) * workers.max(1) as f64
    }

    fn best(&self, wire_rate: f64, at: &Conditions) -> usize {
        let mut rungs = 0..=top(at.max_level);
        if at.starved && at.backlog {
            // While the link waits for the codec, a more thorough one can only make it worse.
            rungs = 0..=self.current.min(top(at.max_level));
        }
        let by = |a: f64, b: f64| a.total_cmp(&b);
        if at.backlog {
            return rungs
                .max_by(|a, b| {
                    // The cheaper one wins a tie: compare with the order reversed.
                    by(
                        self.effective(*a, wire_rate, at),
                        self.effective(*b, wire_rate, at),
                    )
                    .then(b.cmp(a))
                })
                .unwrap_or(0);
        }
        match at.policy {
            Policy::Save => rungs
                .filter(|rung| self.speed(*rung, at) >= 1.5 * at.input_rate)
                .max_by(|a, b| by(self.ratio(*a), self.ratio(*b)).then(b.cmp(a)))
                .unwrap_or(0),
            Policy::Speed => rungs
                .clone()
                .find(|rung| self.effective(*rung, wire_rate, at) >= 1.25 * at.input_rate)
                .unwrap_or_else(|| {
                    rungs
                        .max_by(|a, b| {
                            by(
                                self.effective(*a, wire_rate, at),
                                self.effective(*b, wire_rate, at),
                            )
                            .then(b.cmp(a))
                        })
                        .unwrap_or(0)
                }),
        }
    }

    /// Raw bytes per second that get through with a rung.
    fn effective(&self, rung: usize, wire_rate: f64, at: &Conditions) -> f64 {
        self.speed(rung, at).min(wire_rate * self.ratio(rung))
    }

    fn speed(&self, rung: usize, at: &Conditions) -> f64 {
        let own = self.known_speed(rung) * at.workers.max(1) as f64;
        if rung == 0 {
            own
        } else {
            own.min(at.decode_rate.unwrap_or(f64::INFINITY))
        }
    }

    /// The measured speed of one worker, or a guess from the nearest rung that was measured: the
    /// first guesses are of another machine, which perhaps had nothing else to do.
    fn known_speed(&self, rung: usize) -> f64 {
        let prior = |rung: usize| PRIOR[rung].0 * 1e6;
        match self.nearest(rung) {
            Some(known) if rung > 0 => prior(rung) * self.rungs[known].speed / prior(known),
            _ => self.rungs[rung].speed,
        }
    }

    /// The measured rung that is nearest to this one, if any but `none` was measured.
    fn nearest(&self, rung: usize) -> Option<usize> {
        (1..RUNGS)
            .filter(|other| self.rungs[*other].seen)
            .min_by_key(|other| other.abs_diff(rung))
    }

    /// The measured ratio, or a guess from the nearest rung that was measured.
    fn ratio(&self, rung: usize) -> f64 {
        if rung == 0 {
            return 1.0;
        }
        if self.rungs[rung].seen {
            return self.rungs[rung].ratio;
        }
        let Some(known) = self.nearest(rung) else {
            return PRIOR[rung].1;
        };
        let scale = (self.rungs[known].ratio - 1.0) / (PRIOR[known].1 - 1.0);
        (1.0 + (PRIOR[rung].1 - 1.0) * scale).max(0.99)
    }
}

fn top(max_level: i32) -> usize {
    if max_level >= 22 {
        return RUNGS - 1;
    }
    1 + ZSTD_LEVELS
        .iter()
        .filter(|level| **level <= max_level)
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the choice against a machine where rung r codes at `speed[r]` MB/s with `ratio[r]`.
    fn settle(ratio_scale: f64, at: Conditions) -> usize {
        let mut choice = Adaptive::default();
        let mut now = Instant(1);
        for _ in 0..400 {
            now = now.after(Duration::from_millis(260));
            for _ in 0..PROBE_EVERY {
                let learn = |choice: &mut Adaptive, rung: usize| {
                    let (speed, ratio) = PRIOR[rung];
                    let ratio = 1.0 + (ratio - 1.0) * ratio_scale;
                    let raw = 1 << 20;
                    let took = Duration::from_secs_f64(raw as f64 / speed / 1e6);
                    choice.observe(rung, raw, (raw as f64 / ratio) as usize, took);
                };
                let current = choice.current();
                learn(&mut choice, current);
                if let Some(rung) = choice.probe(at.max_level) {
                    learn(&mut choice, rung);
                }
            }
            choice.decide(now, &at);
        }
        choice.current()
    }

    fn at(wire_mb: f64) -> Conditions {
        Conditions {
            wire_rate: Some(wire_mb * 1e6),
            input_rate: 0.0,
            workers: 2,
            decode_rate: None,
            backlog: true,
            starved: false,
            max_level: 19,
            policy: Policy::Speed,
        }
    }

    #[test]
    fn a_fast_link_gets_a_fast_codec_and_a_thin_link_a_thorough_one() {
        assert_eq!(settle(1.0, at(5000.0)), 0);
        assert_eq!(
            Adaptive::spec(settle(1.0, at(220.0))),
            CodecSpec::Zstd { level: 1 }
        );
        assert!(settle(1.0, at(1.0)) >= 5);
    }

    #[test]
    fn a_link_that_waits_for_a_slow_codec_gets_a_faster_one_or_none() {
        // A tenth of the expected speed, as on a machine with other work, and a line that is far
        // from full: nothing more thorough is tried, and once the line is believed to take more
        // than the codec gives, it is left alone.
        let mut choice = Adaptive::default();
        let mut now = Instant(1);
        let mut wire = 20e6;
        for _ in 0..40 {
            now = now.after(Duration::from_millis(260));
            let rung = choice.current();
            if rung > 0 {
                let took = Duration::from_secs_f64(1e6 / (PRIOR[rung].0 * 1e5));
                choice.observe(rung, 1_000_000, 500_000, took);
                wire = f64::min(wire * 2.0, 2.0 * choice.current_speed(2)).max(wire);
            }
            let starved = Conditions {
                wire_rate: Some(wire),
                starved: rung > 0,
                ..at(0.0)
            };
            let before = choice.current();
            choice.decide(now, &starved);
            assert!(choice.current() <= before.max(1), "a slower one was chosen");
        }
        assert_eq!(choice.current(), 0);
    }

    #[test]
    fn what_was_measured_and_tried_is_shown() {
        let mut choice = Adaptive::default();
        let ms = Duration::from_millis;
        choice.observe(1, 1_000_000, 500_000, ms(2));
        choice.observe_probe(2, 1_000_000, 250_000, ms(4));
        let shown = choice.snapshot(&at(100.0));
        let names: Vec<&str> = shown.iter().map(|rung| rung.codec.as_str()).collect();
        assert_eq!(names[..4], ["none", "lz4", "zstd level -1", "zstd level 1"]);
        let lz4 = &shown[1];
        assert_eq!((lz4.measured, lz4.chunks, lz4.probes), (true, 1, 0));
        assert_eq!(
            (lz4.ratio, lz4.speed, lz4.effective),
            (2.0, 1_000_000_000, 200_000_000)
        );
        let zstd = &shown[2];
        assert_eq!((zstd.measured, zstd.chunks, zstd.probes), (true, 1, 1));
        assert_eq!(
            (zstd.ratio, zstd.speed, zstd.effective),
            (4.0, 500_000_000, 400_000_000)
        );
        assert!(!shown[3].measured && shown[3].speed < zstd.speed);
        let unknown = Conditions {
            wire_rate: None,
            decode_rate: Some(7e6),
            ..at(100.0)
        };
        let shown = choice.snapshot(&unknown);
        assert_eq!((shown[2].speed, shown[2].effective), (7_000_000, 0));
    }

    #[test]
    fn incompressible_data_is_left_alone() {
        assert_eq!(settle(0.0, at(1.0)), 0);
    }

    #[test]
    fn without_backlog_the_cheapest_codec_that_keeps_up_is_used() {
        let calm = Conditions {
            backlog: false,
            input_rate: 5e6,
            ..at(10.0)
        };
        assert_eq!(settle(1.0, calm), 0);
        let busy = Conditions {
            backlog: false,
            input_rate: 14e6,
            ..at(10.0)
        };
        assert_eq!(settle(1.0, busy), 1);
        let save = Conditions {
            policy: Policy::Save,
            ..calm
        };
        assert!(settle(1.0, save) >= 7);
    }

    #[test]
    fn the_level_bound_is_kept() {
        let bound = Conditions {
            max_level: 3,
            ..at(0.1)
        };
        assert!((2..=4).contains(&settle(1.0, bound)));
    }
}
