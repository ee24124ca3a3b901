//! Many planned worlds on all cores: counts, a live line, and a report of each new kind of failure
//! with the shortest command that repeats it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::drive::{Played, Trace, run};
use crate::marks::{MARKS, Marks};
use crate::plan::{Orders, Plan};
use crate::shrink::{Shrunk, kind, shrink};
use crate::story::LEGEND;
use crate::variety;
use crate::watch::Watch;

/// What to run.
#[derive(Clone, Debug)]
pub struct Soak {
    /// What the command line fixes of each world.
    pub orders: Orders,
    /// Where it fixes nothing, other kinds of worlds come in turn (`variety`).
    pub varies: bool,
    /// The first seed; the others follow.
    pub base: u64,
    /// Worlds; none is without end.
    pub worlds: Option<u64>,
    /// Time; none is without end.
    pub time: Option<Duration>,
    /// Threads.
    pub threads: usize,
    /// End after so many failures.
    pub stop_after: u64,
    /// Failures are written here too.
    pub record: Option<PathBuf>,
    /// Show a line of progress.
    pub live: bool,
    /// Lines of each node's trace in a report.
    pub lines: usize,
    /// Look for a smaller world that fails in the same way.
    pub shrink: bool,
}

/// What came out.
#[derive(Clone, Debug, Default)]
pub struct Sum {
    /// Worlds that ran.
    pub worlds: u64,
    /// Worlds that failed.
    pub failed: u64,
    /// Events.
    pub steps: u64,
    /// Virtual time in nanoseconds.
    pub time: u64,
    /// Acknowledged writes.
    pub acked: u64,
    /// Rare paths that were reached.
    pub marks: Marks,
    /// Failures by kind: how many, and the first seed.
    pub kinds: BTreeMap<String, (u64, u64)>,
    /// Real time.
    pub elapsed: Duration,
}

impl Soak {
    /// Runs until the end that was asked for. Reports go to standard output.
    pub fn run(&self) -> Sum {
        let started = Instant::now();
        let next = AtomicU64::new(self.base);
        let stop = AtomicBool::new(false);
        let end = self.worlds.map(|n| self.base.saturating_add(n));
        let (send, receive) = mpsc::channel::<Played>();
        let mut sum = Sum::default();
        let threads = self.threads.max(1);
        let watch = Watch::new(threads, LONGEST_WORLD);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let send = send.clone();
                let (next, stop, watch) = (&next, &stop, &watch);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if end.is_some_and(|end| seed >= end) {
                            return;
                        }
                        watch.begins(thread, seed);
                        let result = run(seed, &self.orders_of(seed), Trace::Off);
                        watch.ends(thread);
                        if send.send(result).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(send);
            let mut shown = started;
            loop {
                match receive.recv_timeout(Duration::from_millis(200)) {
                    Ok(result) => {
                        sum.elapsed = started.elapsed();
                        self.take(&mut sum, &result);
                    }
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => break,
                }
                if let Some(seed) = watch.endless() {
                    self.give_up(seed);
                }
                sum.elapsed = started.elapsed();
                if self.live && shown.elapsed() >= Duration::from_secs(1) {
                    shown = Instant::now();
                    show(&sum);
                }
                let late = self.time.is_some_and(|time| sum.elapsed >= time);
                if late || sum.failed >= self.stop_after {
                    stop.store(true, Ordering::Relaxed);
                }
            }
        });
        sum.elapsed = started.elapsed();
        if self.live {
            show(&sum);
            eprintln!();
        }
        sum
    }

    /// A world does not end. No thread can be made to stop, so this process ends.
    fn give_up(&self, seed: u64) -> ! {
        let orders = self.orders_of(seed);
        let text = format!(
            "FAILED: the world does not end: it has taken {} s of a core\n  seed {seed}, commit {}\n  \
             found in: {}\n  repeat it: {} --trace",
            LONGEST_WORLD.as_secs(),
            commit(),
            Plan::new(seed, &orders).describe(),
            orders.command(seed)
        );
        println!("{text}");
        self.note(&text);
        std::process::exit(1);
    }

    /// Appends a failure to the file of failures.
    fn note(&self, text: &str) {
        let Some(path) = &self.record else { return };
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path);
        if let Err(error) = file.and_then(|mut f| writeln!(f, "{text}")) {
            eprintln!("{}: cannot record the failure: {error}", path.display());
        }
    }

    fn orders_of(&self, seed: u64) -> Orders {
        match self.varies && variety::is_open(&self.orders) {
            true => variety::orders(seed),
            false => self.orders.clone(),
        }
    }

    fn take(&self, sum: &mut Sum, result: &Played) {
        sum.worlds += 1;
        sum.steps += result.steps;
        sum.time += result.time;
        sum.acked += result.acked;
        sum.marks.join(&result.marks);
        let Some(violation) = &result.violation else {
            return;
        };
        sum.failed += 1;
        let entry = sum.kinds.entry(kind(violation)).or_insert((0, result.seed));
        entry.0 += 1;
        if self.live && std::io::stderr().is_terminal() {
            eprintln!();
        }
        // The first of its kind is reported in full, the others in a line.
        if entry.0 > 1 {
            println!(
                "FAILED again: {violation}\n  {}",
                self.orders_of(result.seed).command(result.seed)
            );
            return;
        }
        // When the time is over, a failure is reported as it was found.
        let is_late = self.time.is_some_and(|time| sum.elapsed >= time);
        let budget = if self.shrink && !is_late {
            SHRINK_EVENTS
        } else {
            0
        };
        let small = shrink(result.seed, &self.orders_of(result.seed), result, budget);
        let text = report(result, &small, self.lines);
        println!("{text}");
        self.note(&text);
    }
}

/// Time of a core that a world may take.
const LONGEST_WORLD: Duration = Duration::from_secs(20);

/// Events that the search for a smaller world may spend.
pub const SHRINK_EVENTS: u64 = 10_000_000;

fn show(sum: &Sum) {
    let line = format!(
        "{} worlds, {:.1}/s, {:.1} virtual hours, {} of {} marks, {} failures of {} kinds",
        sum.worlds,
        sum.worlds as f64 / sum.elapsed.as_secs_f64().max(0.001),
        sum.time as f64 / 3.6e12,
        sum.marks.count(),
        MARKS.len(),
        sum.failed,
        sum.kinds.len()
    );
    if std::io::stderr().is_terminal() {
        eprint!("\r{line}\x1b[K");
    } else {
        eprintln!("{line}");
    }
}

impl Sum {
    /// The end of a run in words: counts, kinds of failures, marks that were not reached.
    pub fn describe(&self) -> String {
        let mut text = format!(
            "{} worlds, {} failed, {:.1} worlds/s, {} events, {:.2} virtual hours, {} writes\n",
            self.worlds,
            self.failed,
            self.worlds as f64 / self.elapsed.as_secs_f64().max(0.001),
            self.steps,
            self.time as f64 / 3.6e12,
            self.acked
        );
        for (kind, (count, seed)) in &self.kinds {
            let _ = writeln!(text, "  {count} x {kind} (first with seed {seed})");
        }
        let missing: Vec<_> = self.marks.missing().collect();
        let _ = writeln!(
            text,
            "marks: {} of {} rare paths were reached{}",
            self.marks.count(),
            MARKS.len(),
            if missing.is_empty() {
                "."
            } else {
                "; not reached:"
            }
        );
        for (name, meaning) in missing {
            let _ = writeln!(text, "  {name}: {meaning}");
        }
        text
    }
}

/// A failure for a reader who sees such a thing for the first time.
pub fn report(found: &Played, small: &Shrunk, lines: usize) -> String {
    let traced = run(found.seed, &small.orders, Trace::Keep(lines));
    let mut text = String::new();
    let _ = writeln!(
        text,
        "FAILED: {}",
        found.violation.as_deref().unwrap_or("-")
    );
    let _ = writeln!(text, "  seed {}, commit {}", found.seed, commit());
    let _ = writeln!(text, "  found in: {}", found.shape);
    let _ = writeln!(
        text,
        "  shrunk to: {} ({} worlds tried)",
        small.result.shape, small.tries
    );
    let _ = writeln!(
        text,
        "  now: {}",
        traced
            .violation
            .as_deref()
            .unwrap_or("it does not fail any more")
    );
    let _ = writeln!(
        text,
        "  repeat it: {} --trace",
        small.orders.command(found.seed)
    );
    if let Some(tail) = &traced.tail {
        let _ = writeln!(text, "\n{LEGEND}");
        for node in 0..traced.nodes {
            let _ = writeln!(text, "\nThe last events of {}:", crate::world::name(node));
            for line in tail.of(node) {
                let _ = writeln!(text, "{line}");
            }
            if let Some(state) = traced.states.get(node) {
                let _ = writeln!(text, "Its state at the end: {state}");
            }
        }
    }
    text
}

/// The commit of the working tree, for reports.
fn commit() -> String {
    let output = std::process::Command::new("git")
        .args(["rev-parse", "--short=12", "HEAD"])
        .output();
    match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_string()
        }
        _ => "unknown (no git here)".to_string(),
    }
}
