//! How much a resync target (or the driver of an online verify) asks for next (semantics.md 19.10).
//!
//! Pure and deterministic. One promise above all options of the controller: while there is something
//! to do, at least one request is in flight or being issued after each step. An application that
//! keeps the disk busy for ever slows a resync down to that, but never stops it. A request may be
//! larger than what the fixed or largest rate leaves for a step: later steps make up for it, with at
//! most a second without a request.

use alloc::collections::VecDeque;

use crate::data::slab::Key;
use crate::options::PeerDeviceOptions;
use crate::time::{Duration, Instant};

/// How often [`RateController::step`] shall be called.
pub const STEP: Duration = Duration::from_millis(100);
/// Sectors of the smallest request.
pub const BLOCK_SECTORS: u64 = 8;

const SECTORS_PER_KIB: u64 = 2;
const STEPS_PER_SECOND: u64 = 10;
const MARK_SPACING: Duration = Duration::from_secs(3);
/// Application sectors in a step's time from which on the disk counts as busy: 4 MiB/s.
const BUSY_SECTORS: u64 = 820;

/// What a step has to know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateInput {
    /// Sectors that were asked for and have not come back.
    pub in_flight_sectors: u64,
    /// Sectors that came back since the last step.
    pub received_sectors: u64,
    /// Sectors that one bit of the bitmap stands for (8 with 4 KiB).
    pub granule_sectors: u64,
    /// `max-buffers` in 4 KiB pages.
    pub max_buffers: u32,
    /// Application I/O waits for the activity log.
    pub application_waits: bool,
    /// Sectors of the disk's traffic since the last step that the resync did not cause.
    pub application_sectors: u64,
}

/// How much a resync target or the driver of a verify has asked for, and may still ask for: the
/// controller's grant, bounded by `c-max-rate` also between its steps.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Asked for and not come back.
    pub(crate) in_flight_sectors: u64,
    /// Granted and not asked for yet.
    pub(crate) grant_sectors: u64,
    /// In flight and granted, after the last grant.
    topped_sectors: u64,
    /// Came back since the controller's last step.
    received_sectors: u64,
    /// Asked for since `window`, and what was asked for too early before.
    window: Instant,
    window_sectors: u64,
    rate: RateController,
}

impl Pace {
    /// For what begins now.
    pub(crate) fn new(now: Instant) -> Self {
        Pace {
            window: now,
            ..Pace::default()
        }
    }

    /// Something was asked for.
    pub(crate) fn asked(&mut self, sectors: u64) {
        self.grant_sectors = self.grant_sectors.saturating_sub(sectors);
        self.window_sectors += sectors;
        self.in_flight_sectors += sectors;
    }

    /// The answer was dealt with.
    pub(crate) fn answered(&mut self, sectors: u64) {
        self.in_flight_sectors -= sectors;
        self.received_sectors += sectors;
    }

    /// So much came back that it is time for another grant: the rest keeps disk and link busy
    /// until its answers are here. What makes way for an application waits for the next step: the
    /// least that is always granted would be asked for as often as there are answers.
    pub(crate) fn runs_dry(&self) -> bool {
        !self.rate.throttled && self.in_flight_sectors <= self.topped_sectors / 4 * 3
    }

    /// Asks the controller. What `load` says of flight and arrival is this value's own.
    pub(crate) fn grant(&mut self, now: Instant, options: &PeerDeviceOptions, load: RateInput) {
        let rate_kib_s = match options.c_plan_ahead_tenths {
            0 => options.resync_rate_kib_s,
            _ => options.c_max_rate_kib_s,
        };
        if now - self.window >= STEP {
            self.next_window(now, u64::from(rate_kib_s) * SECTORS_PER_KIB);
        }
        let input = RateInput {
            in_flight_sectors: self.in_flight_sectors,
            received_sectors: core::mem::take(&mut self.received_sectors),
            ..load
        };
        let mut grant = self.rate.step(now, options, &input);
        if rate_kib_s > 0 {
            let most = u64::from(rate_kib_s) * SECTORS_PER_KIB / STEPS_PER_SECOND;
            let rest = most.saturating_sub(self.window_sectors);
            if self.in_flight_sectors > 0 || self.window_sectors > 0 {
                grant = grant.min(rest);
            }
        }
        self.grant_sectors = grant;
        self.topped_sectors = self.in_flight_sectors + grant;
    }

    /// Requests are not cut to fit the rate; what they exceeded it by is kept for later windows,
    /// up to a second's worth.
    fn next_window(&mut self, now: Instant, sectors_per_s: u64) {
        let second_ns = Duration::from_secs(1).0;
        let asked = self.window_sectors.min(sectors_per_s);
        let elapsed_ns = (now - self.window).0.min(second_ns);
        let paid = elapsed_ns * sectors_per_s / second_ns;
        if paid >= asked {
            self.window = now;
            self.window_sectors = 0;
        } else {
            // What was paid for is whole sectors; the rest of the time counts on.
            self.window = self.window + Duration(paid * second_ns / sectors_per_s);
            self.window_sectors = asked - paid;
        }
    }
}

/// Controller of one peer device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RateController {
    plan: VecDeque<i64>,
    plan_total: i64,
    last: Option<Instant>,
    /// Sectors that came back since the start.
    done_sectors: u64,
    /// Times and sectors that had come back, at least 3 s apart, oldest first.
    marks: VecDeque<(Instant, u64)>,
    load: Load,
    /// The last step made way for the application.
    throttled: bool,
}

/// The application's traffic, by windows of a step's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Load {
    since: Instant,
    sectors: u64,
    /// What the last whole window was.
    busy: bool,
}

impl Load {
    fn is_busy(&mut self, now: Instant, sectors: u64) -> bool {
        self.sectors = self.sectors.saturating_add(sectors);
        let elapsed = now - self.since;
        if elapsed >= STEP {
            let most = u128::from(BUSY_SECTORS) * u128::from(elapsed.0);
            self.busy = u128::from(self.sectors) * u128::from(STEP.0) > most;
            (self.since, self.sectors) = (now, 0);
        }
        self.busy
    }
}

impl RateController {
    /// A controller for a resync that starts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sectors to ask for now: a multiple of the granule. Not zero if nothing is in flight.
    pub fn step(&mut self, now: Instant, options: &PeerDeviceOptions, input: &RateInput) -> u64 {
        self.done_sectors += input.received_sectors;
        self.mark(now);
        let elapsed = self.last.map_or(STEP, |last| now - last);
        self.last = Some(now);
        let wanted = if options.c_plan_ahead_tenths == 0 {
            u64::from(options.resync_rate_kib_s) * SECTORS_PER_KIB / STEPS_PER_SECOND
        } else {
            self.plan_step(elapsed, options, input)
        };
        self.throttled = self.throttles(now, options, input);
        let granule = input.granule_sectors.max(BLOCK_SECTORS);
        let limit =
            (u64::from(input.max_buffers) * BLOCK_SECTORS).saturating_sub(input.in_flight_sectors);
        let granted = if self.throttled { 0 } else { wanted.min(limit) };
        let sectors = (granted / BLOCK_SECTORS * BLOCK_SECTORS).next_multiple_of(granule);
        if sectors == 0 && input.in_flight_sectors == 0 {
            granule
        } else {
            sectors
        }
    }

    fn plan_step(
        &mut self,
        elapsed: Duration,
        options: &PeerDeviceOptions,
        input: &RateInput,
    ) -> u64 {
        let steps = options.c_plan_ahead_tenths as usize;
        self.resize(steps);
        let elapsed_ns = elapsed.0.clamp(1, Duration::from_secs(1).0);
        // A short step is scaled up to a whole one.
        let window_ns = elapsed_ns.max(STEP.0);
        let came_in = scale(input.received_sectors, window_ns, elapsed_ns);
        let in_flight = clamp(input.in_flight_sectors);
        let want = if in_flight + came_in == 0 {
            let per_step =
                u64::from(options.resync_rate_kib_s) * SECTORS_PER_KIB / STEPS_PER_SECOND;
            clamp(per_step) * steps as i64
        } else if options.c_fill_target_sectors != 0 {
            i64::from(options.c_fill_target_sectors)
        } else {
            let target_ns = Duration::from_tenths(u64::from(options.c_delay_target_tenths)).0;
            scale(came_in.unsigned_abs(), target_ns, window_ns)
        };
        let correction = want - in_flight - self.plan_total;
        let per_slot = correction / steps as i64;
        for slot in &mut self.plan {
            *slot += per_slot;
        }
        let due = self.plan.pop_front().unwrap_or(0);
        self.plan.push_back(0);
        self.plan_total = self.plan.iter().sum();
        let wanted = (came_in + due).max(0).unsigned_abs();
        if options.c_max_rate_kib_s == 0 {
            return wanted;
        }
        let most = u64::from(options.c_max_rate_kib_s) * SECTORS_PER_KIB / STEPS_PER_SECOND;
        wanted.min(most)
    }

    /// A changed `c-plan-ahead` starts a new plan.
    fn resize(&mut self, steps: usize) {
        if self.plan.len() != steps {
            self.plan.clear();
            self.plan.resize(steps, 0);
            self.plan_total = 0;
        }
    }

    fn mark(&mut self, now: Instant) {
        let due = self
            .marks
            .back()
            .is_none_or(|(at, _)| now - *at >= MARK_SPACING);
        if due {
            self.marks.push_back((now, self.done_sectors));
            if self.marks.len() > 2 {
                self.marks.pop_front();
            }
        }
    }

    /// `c-min-rate`: the application has priority as long as the resync is faster than that. What
    /// counts is what it copied, not how much less is marked: it may be marked again.
    fn throttles(&mut self, now: Instant, options: &PeerDeviceOptions, input: &RateInput) -> bool {
        let busy = self.load.is_busy(now, input.application_sectors) || input.application_waits;
        let Some((since, before)) = self.marks.front() else {
            return false;
        };
        if options.c_min_rate_kib_s == 0 || !busy {
            return false;
        }
        let elapsed_ns = (now - *since).0.max(1);
        let done_kib = (self.done_sectors - before) / SECTORS_PER_KIB;
        let rate_kib_s = u128::from(done_kib) * 1_000_000_000 / u128::from(elapsed_ns);
        rate_kib_s > u128::from(options.c_min_rate_kib_s)
    }
}

/// `c-min-rate` at a source whose target is not sent the application's writes (19.3), and so cannot
/// make way for them itself.
#[derive(Debug, Default)]
pub(crate) struct SourcePace {
    load: Load,
    /// Sectors that the application had written at the last look; none before the first one.
    written_sectors: Option<u64>,
    /// When what was read is paid for at the minimal rate.
    paid: Instant,
    /// Requests that wait for their turn, in their order.
    pub(crate) held: VecDeque<Key>,
}

impl SourcePace {
    /// Whether a request of so many sectors is read now. Without an application it is.
    pub(crate) fn admits(
        &mut self,
        now: Instant,
        c_min_rate_kib_s: u32,
        (waits, written_sectors): (bool, u64),
        sectors: u64,
    ) -> bool {
        let before = self.written_sectors.replace(written_sectors);
        if before.is_none() {
            self.load.since = now;
        }
        let news = written_sectors - before.unwrap_or(written_sectors).min(written_sectors);
        let busy = self.load.is_busy(now, news) || waits;
        if !busy || c_min_rate_kib_s == 0 {
            self.paid = now;
            return true;
        }
        if self.paid > now {
            return false;
        }
        let per_s = u64::from(c_min_rate_kib_s) * SECTORS_PER_KIB;
        let second_ns = Duration::from_secs(1).0;
        // A look may be late by a step, which is no reason to be slower.
        let from = self.paid.max(Instant(now.0.saturating_sub(STEP.0)));
        self.paid = from + Duration(sectors * second_ns / per_s);
        true
    }
}

/// Largest number of sectors in a plan; far above every device.
const PLAN_MAX: u64 = 1 << 42;

fn clamp(sectors: u64) -> i64 {
    sectors.min(PLAN_MAX) as i64
}

fn scale(sectors: u64, by: u64, per: u64) -> i64 {
    let scaled = u128::from(sectors) * u128::from(by) / u128::from(per.max(1));
    clamp(u64::try_from(scaled).unwrap_or(PLAN_MAX))
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::rng::Rng;

    fn input(in_flight_sectors: u64, received_sectors: u64) -> RateInput {
        RateInput {
            in_flight_sectors,
            received_sectors,
            granule_sectors: 8,
            max_buffers: 8000,
            application_waits: false,
            application_sectors: 0,
        }
    }

    /// Runs against a link and disk that return `rate` sectors per step; gives (total, in flight).
    fn run(options: &PeerDeviceOptions, rate: u64, steps: u64, busy: bool) -> (u64, u64) {
        let mut controller = RateController::new();
        let (mut in_flight, mut done) = (0, 0);
        for step in 0..steps {
            let received = rate.min(in_flight);
            in_flight -= received;
            done += received;
            let input = RateInput {
                application_waits: busy,
                application_sectors: if busy { 1000 } else { 0 },
                ..input(in_flight, received)
            };
            in_flight += controller.step(Instant(step * STEP.0), options, &input);
            assert!(
                in_flight > 0,
                "step {step}: nothing in flight and nothing issued"
            );
        }
        (done, in_flight)
    }

    #[test]
    fn a_fixed_rate_is_kept() {
        let options = PeerDeviceOptions {
            c_plan_ahead_tenths: 0,
            resync_rate_kib_s: 4000,
            ..PeerDeviceOptions::default()
        };
        let mut controller = RateController::new();
        assert_eq!(controller.step(Instant(0), &options, &input(0, 0)), 800);
        assert_eq!(
            controller.step(Instant(STEP.0), &options, &input(800, 0)),
            800
        );
    }

    /// Answers everything at once, a thousand times per step; gives what was asked for in `steps`
    /// steps, and the most that was asked for in one of them.
    fn ask(options: &PeerDeviceOptions, steps: u64, load: RateInput) -> (u64, u64) {
        let mut pace = Pace::new(Instant(0));
        let (mut asked, mut most) = (0, 0);
        for step in 0..steps {
            let before = asked;
            for tick in 0..1000 {
                let now = Instant(step * STEP.0 + tick * STEP.0 / 1000);
                if tick == 0 || pace.runs_dry() {
                    pace.grant(now, options, load);
                }
                let sectors = pace.grant_sectors;
                pace.asked(sectors);
                asked += sectors;
                pace.answered(sectors);
            }
            most = most.max(asked - before);
        }
        (asked, most)
    }

    #[test]
    fn quick_answers_do_not_break_a_fixed_rate() {
        let options = PeerDeviceOptions {
            c_plan_ahead_tenths: 0,
            resync_rate_kib_s: 4000,
            ..PeerDeviceOptions::default()
        };
        let (asked, most) = ask(&options, 50, input(0, 0));
        assert!((40_000 - 800..=40_000).contains(&asked), "{asked}");
        assert!(most <= 800, "{most}");
    }

    /// The largest number of sectors in ten seconds that begin with a step, of a hundred, with
    /// requests that are never smaller than `request`.
    fn asked_in_large_requests(options: &PeerDeviceOptions, request: u64) -> u64 {
        let mut pace = Pace::new(Instant(0));
        let mut asked = Vec::new();
        for step in 0..1000u64 {
            let load = RateInput {
                granule_sectors: request,
                max_buffers: 131_072,
                ..input(0, 0)
            };
            pace.grant(Instant(step * STEP.0), options, load);
            let mut sectors = 0;
            while pace.grant_sectors > 0 {
                pace.asked(request);
                pace.answered(request);
                sectors += request;
            }
            asked.push(sectors);
        }
        asked.windows(100).map(|w| w.iter().sum()).max().unwrap()
    }

    #[test]
    fn requests_larger_than_a_step_keep_the_rate() {
        for c_plan_ahead_tenths in [0, 20] {
            let options = PeerDeviceOptions {
                c_plan_ahead_tenths,
                resync_rate_kib_s: 4096,
                c_max_rate_kib_s: 4096,
                c_fill_target_sectors: 1 << 20,
                ..PeerDeviceOptions::default()
            };
            let asked = asked_in_large_requests(&options, 1024);
            let most = 4096 * 2 * 10;
            assert!((most / 10 * 9..=most + 1024).contains(&asked), "{asked}");
        }
    }

    #[test]
    fn a_request_of_many_seconds_is_followed_by_one_each_second() {
        let options = PeerDeviceOptions {
            c_plan_ahead_tenths: 0,
            resync_rate_kib_s: 1,
            ..PeerDeviceOptions::default()
        };
        assert_eq!(asked_in_large_requests(&options, 2048), 10 * 2048);
    }

    #[test]
    fn the_next_grant_comes_while_most_of_the_last_is_in_flight() {
        let options = PeerDeviceOptions {
            c_plan_ahead_tenths: 0,
            resync_rate_kib_s: 4 << 20,
            ..PeerDeviceOptions::default()
        };
        let mut pace = Pace::new(Instant(0));
        let load = RateInput {
            max_buffers: 2048,
            ..input(0, 0)
        };
        pace.grant(Instant(1), &options, load);
        assert_eq!(pace.grant_sectors, 16_384);
        for at in 2..100 {
            pace.asked(pace.grant_sectors);
            assert!(!pace.runs_dry());
            pace.answered(4096);
            assert!(pace.runs_dry());
            pace.grant(Instant(at), &options, load);
            assert_eq!(pace.grant_sectors, 4096);
        }
    }

    #[test]
    fn the_fill_target_is_reached_and_the_link_used() {
        let options = PeerDeviceOptions {
            c_fill_target_sectors: 2048,
            ..PeerDeviceOptions::default()
        };
        let (done, in_flight) = run(&options, 2000, 200, false);
        assert!(done > 2000 * 180, "{done}");
        let target = u64::from(options.c_fill_target_sectors);
        assert!((target / 2..target * 3).contains(&in_flight), "{in_flight}");
    }

    #[test]
    fn the_delay_target_keeps_that_much_in_flight() {
        let options = PeerDeviceOptions {
            c_fill_target_sectors: 0,
            ..PeerDeviceOptions::default()
        };
        let (done, in_flight) = run(&options, 1000, 600, false);
        assert!(done > 0);
        // One second of what comes back.
        assert!((1000..40_000).contains(&in_flight), "{in_flight}");
    }

    #[test]
    fn the_maximal_rate_is_not_exceeded() {
        let options = PeerDeviceOptions {
            c_max_rate_kib_s: 1000,
            ..PeerDeviceOptions::default()
        };
        let (done, _) = run(&options, 1 << 20, 100, false);
        assert!(done <= 200 * 100, "{done}");
        assert!(done > 200 * 50, "{done}");
    }

    #[test]
    fn application_load_throttles_to_about_the_minimal_rate_but_never_stops() {
        let options = PeerDeviceOptions::default();
        let seconds = 120;
        let (done, _) = run(&options, 1 << 20, seconds * 10, true);
        let rate_kib_s = done / 2 / seconds;
        assert!((100..2000).contains(&rate_kib_s), "{rate_kib_s}");
        let (free, _) = run(&options, 1 << 20, seconds * 10, false);
        assert!(free > done * 10);
        let off = PeerDeviceOptions {
            c_min_rate_kib_s: 0,
            ..options
        };
        assert_eq!(run(&off, 1 << 20, seconds * 10, true).0, free);
    }

    /// KiB/s of a resync over 20 s beside an application that writes so much each second. Everything
    /// is answered at once; it is looked at a hundred times per step.
    fn beside(application_kib_s: u64) -> u64 {
        let options = PeerDeviceOptions::default();
        let mut pace = Pace::new(Instant(0));
        let (steps, mut asked, mut written) = (200, 0, 0);
        for tick in 0..steps * 100 {
            let now = Instant(tick * STEP.0 / 100);
            if tick % 100 == 0 || pace.runs_dry() {
                let writes = application_kib_s * SECTORS_PER_KIB * tick / 1000;
                let load = RateInput {
                    application_sectors: writes - written,
                    ..input(0, 0)
                };
                written = writes;
                pace.grant(now, &options, load);
            }
            let sectors = pace.grant_sectors;
            pace.asked(sectors);
            asked += sectors;
            pace.answered(sectors);
        }
        asked / SECTORS_PER_KIB * STEPS_PER_SECOND / steps
    }

    #[test]
    fn an_application_that_writes_steadily_counts_however_often_it_is_looked_at() {
        // Ten MiB/s are 10 KiB each time.
        let least = u64::from(PeerDeviceOptions::default().c_min_rate_kib_s);
        let busy = beside(10 << 10);
        assert!((least / 2..least * 4).contains(&busy), "{busy}");
        assert_eq!(beside(1 << 10), beside(0), "a light load");
    }

    #[test]
    fn a_source_reads_at_the_minimal_rate_while_its_application_writes() {
        let mut pace = SourcePace::default();
        let (mut read, mut written) = (0, 0);
        // 10 MiB/s for ten seconds, then nothing.
        for step in 0..200u64 {
            let now = Instant(step * STEP.0);
            if step < 100 {
                written += 2048;
            }
            let mut here = 0;
            while here < 100 && pace.admits(now, 250, (false, written), 64) {
                here += 1;
            }
            read += here * 64;
            if step == 100 {
                // At first it could not know.
                assert!((5000..5700 + 6400 * 2).contains(&read), "{read}");
            }
            assert!(step < 102 || here == 100, "nobody to make way for");
        }
    }

    #[test]
    fn with_any_options_and_load_something_is_in_flight_after_each_step() {
        let mut rng = Rng::new(3);
        for _ in 0..300 {
            let mut pick = |from: &[u32]| from[rng.below(from.len() as u64) as usize];
            let options = PeerDeviceOptions {
                resync_rate_kib_s: pick(&[1, 250, 4_194_304]),
                c_plan_ahead_tenths: pick(&[0, 1, 20, 300]),
                c_delay_target_tenths: pick(&[1, 10, 100]),
                c_fill_target_sectors: pick(&[0, 1, 100, 2048, 1_048_576]),
                c_max_rate_kib_s: pick(&[0, 250, 102_400]),
                c_min_rate_kib_s: pick(&[0, 1, 250, 4_194_304]),
                ..PeerDeviceOptions::default()
            };
            let mut controller = RateController::new();
            let (mut now, mut in_flight) = (0, 0u64);
            let max_buffers = pick(&[32, 2048, 131_072]);
            let granule_sectors = u64::from(pick(&[8, 32, 2048]));
            for step in 0..200 {
                now += rng.below(3 * STEP.0);
                let received = rng.below(in_flight + 1);
                let received = if rng.below(3) == 0 {
                    in_flight
                } else {
                    received
                };
                in_flight -= received;
                let issued = controller.step(
                    Instant(now),
                    &options,
                    &RateInput {
                        in_flight_sectors: in_flight,
                        received_sectors: received,
                        granule_sectors,
                        max_buffers,
                        application_waits: true,
                        application_sectors: 1 << 20,
                    },
                );
                assert_eq!(issued % granule_sectors, 0);
                assert!(in_flight + issued > 0, "step {step} of {options:?}");
                let most = u64::from(max_buffers) * 8 + granule_sectors;
                assert!(issued == 0 || in_flight + issued <= most);
                in_flight += issued;
            }
        }
    }
}
