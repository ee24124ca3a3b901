//! `lockstep proxy bench`: the figures of `docs/proxy.md`, measured on this machine. Both proxies,
//! the line between them, and both fake DRBD nodes share its cores; every byte is compared at the
//! far end. A figure with a bar says whether it is met; nothing is left out when it is not.

mod data;
mod pair;

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::codec::{decode, encode};
use crate::core::frame::{Bytes, CHUNK_MAX};
use crate::core::plugin::{Choice, CodecSpec, Plugin};
use data::{Flow, made_up, noise, read_sample};
use pair::{Pair, Setup, text};

const PLUGINS: [&str; 8] = [
    "none",
    "lz4",
    "zstd level 1",
    "zstd level 3",
    "zstd level 9",
    "zlib level 2",
    "lzma level 1",
    "auto",
];
/// Bytes of the published example.
pub const REPLAY_BYTES: u64 = 3_712_983_040;
const MIB: u64 = 1 << 20;
const SECTIONS: [&str; 7] = [
    "codecs",
    "fill",
    "replay",
    "latency",
    "connections",
    "cut",
    "spill",
];

/// What is measured, and how large.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Sections by name; empty is all but `spill`, which wants a directory.
    pub only: Vec<String>,
    /// What `codecs` measures; empty is a choice of usual ones.
    pub plugins: Vec<String>,
    /// Sample data for codecs and replay; made up without it.
    pub file: Option<PathBuf>,
    /// Bytes of sample data.
    pub sample_bytes: u64,
    /// Bytes written into the buffer by `fill`.
    pub fill_bytes: u64,
    /// Bytes of the replay; the times of the published run shrink with it.
    pub replay_bytes: u64,
    /// Bytes per second of the replay's line.
    pub link_bytes_s: u64,
    /// How long each codec and the control traffic are measured.
    pub seconds: f64,
    /// Connections that share a pool.
    pub connections: u16,
    /// How long the line is cut.
    pub cut_s: u64,
    /// Where `spill` may write, and how much.
    pub spill_directory: Option<PathBuf>,
    /// Bytes that are to be on the disk.
    pub spill_bytes: u64,
}

impl Default for BenchOptions {
    fn default() -> BenchOptions {
        BenchOptions {
            only: Vec::new(),
            plugins: Vec::new(),
            file: None,
            sample_bytes: 64 * MIB,
            fill_bytes: 1024 * MIB,
            replay_bytes: REPLAY_BYTES,
            link_bytes_s: 220_000_000,
            seconds: 10.0,
            connections: 100,
            cut_s: 20,
            spill_directory: None,
            spill_bytes: 1024 * MIB,
        }
    }
}

/// One measured number.
#[derive(Clone, Debug)]
struct Figure {
    section: &'static str,
    name: String,
    value: f64,
    unit: &'static str,
    bar: Option<Bar>,
}

#[derive(Clone, Copy, Debug)]
enum Bar {
    AtLeast(f64),
    AtMost(f64),
}

/// All figures of one run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    figures: Vec<Figure>,
    load: [String; 2],
}

impl Report {
    fn add(
        &mut self,
        section: &'static str,
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
    ) {
        self.figures.push(Figure {
            section,
            name: name.into(),
            value,
            unit,
            bar: None,
        });
    }

    fn bar(&mut self, bar: Bar) {
        if let Some(last) = self.figures.last_mut() {
            last.bar = Some(bar);
        }
    }

    /// Whether every figure with a bar meets it.
    pub fn all_met(&self) -> bool {
        self.figures
            .iter()
            .all(|figure| figure.met() != Some(false))
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut out = format!(
            "{} cores, {} build, load {} before and {} after; both ends on this machine, TLS on\n",
            cores(),
            build(),
            self.load[0],
            self.load[1]
        );
        let mut section = "";
        for figure in &self.figures {
            if figure.section != section {
                section = figure.section;
                let _ = writeln!(out, "\n{section}");
            }
            let value = if figure.value.abs() < 100.0 {
                format!("{:.2}", figure.value)
            } else {
                format!("{:.0}", figure.value)
            };
            let _ = write!(out, "  {:48} {value:>10} {:6}", figure.name, figure.unit);
            if let (Some(bar), Some(met)) = (figure.bar, figure.met()) {
                let (sign, bar) = match bar {
                    Bar::AtLeast(bar) => ("≥", bar),
                    Bar::AtMost(bar) => ("≤", bar),
                };
                let _ = write!(
                    out,
                    "  bar {sign} {bar}: {}",
                    if met { "met" } else { "MISSED" }
                );
            }
            out.truncate(out.trim_end().len());
            out.push('\n');
        }
        out
    }

    /// For programs.
    pub fn json(&self) -> String {
        let figures: Vec<_> = self
            .figures
            .iter()
            .map(|figure| {
                let (least, most) = match figure.bar {
                    Some(Bar::AtLeast(bar)) => (Some(bar), None),
                    Some(Bar::AtMost(bar)) => (None, Some(bar)),
                    None => (None, None),
                };
                json!({
                    "section": figure.section, "name": figure.name, "value": figure.value,
                    "unit": figure.unit, "at_least": least, "at_most": most, "met": figure.met(),
                })
            })
            .collect();
        let all = json!({
            "version": env!("CARGO_PKG_VERSION"), "build": build(), "cores": cores(),
            "load_before": self.load[0], "load_after": self.load[1], "figures": figures,
        });
        format!("{all:#}\n")
    }
}

impl Figure {
    fn met(&self) -> Option<bool> {
        Some(match self.bar? {
            Bar::AtLeast(bar) => self.value >= bar,
            Bar::AtMost(bar) => self.value <= bar,
        })
    }
}

/// Measures the chosen sections.
pub fn bench(options: &BenchOptions) -> Result<Report, String> {
    for name in &options.only {
        if !SECTIONS.contains(&name.as_str()) {
            return Err(format!("unknown section '{name}'; known are {SECTIONS:?}"));
        }
    }
    let plugins = match options.plugins.is_empty() {
        true => PLUGINS.map(String::from).to_vec(),
        false => options.plugins.clone(),
    };
    // Before anything takes time.
    let plugins: Vec<(String, Plugin)> = plugins
        .into_iter()
        .map(|name| Ok((name.clone(), parse_plugin(&name)?)))
        .collect::<Result<_, String>>()?;
    let wanted = |name: &str| match options.only.is_empty() {
        true => name != "spill" || options.spill_directory.is_some(),
        false => options.only.iter().any(|only| only == name),
    };
    let mut report = Report::default();
    report.load[0] = load();
    let len = usize::try_from(options.sample_bytes.clamp(MIB, 4 << 30))
        .map_err(|error| error.to_string())?;
    let sample = Arc::new(match &options.file {
        Some(path) => read_sample(path, len)?,
        None => made_up(len),
    });
    if wanted("codecs") {
        codecs(&mut report, &plugins, &sample, options.seconds)?;
    }
    if wanted("fill") {
        fill(&mut report, options.fill_bytes)?;
    }
    if wanted("replay") {
        replay(&mut report, &sample, options)?;
    }
    if wanted("latency") {
        latency(&mut report, options.seconds)?;
    }
    if wanted("connections") {
        connections(&mut report, &sample, options)?;
    }
    if wanted("cut") {
        cut(&mut report, options.cut_s)?;
    }
    if wanted("spill") {
        spill(&mut report, options)?;
    }
    report.load[1] = load();
    Ok(report)
}

fn parse_plugin(name: &str) -> Result<Plugin, String> {
    let words: Vec<&str> = name.split_whitespace().collect();
    Plugin::parse(&words).map_err(|error| format!("plugin '{name}': {error}"))
}

fn mib_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / MIB as f64 / time.as_secs_f64().max(1e-9)
}

/// What is sent before a whole path is measured: as much as the buffer holds.
const FULL_BYTES: u64 = 512 * MIB;

/// Each codec alone, on one core, and then the whole path through two proxies.
fn codecs(
    report: &mut Report,
    plugins: &[(String, Plugin)],
    sample: &Arc<Vec<u8>>,
    seconds: f64,
) -> Result<(), String> {
    let len = sample.len() as u64;
    for (name, plugin) in plugins {
        let mut alone = None;
        if let Choice::Fixed(spec) = &plugin.choice {
            let chunks: Vec<Bytes> = sample
                .chunks(CHUNK_MAX)
                .map(|chunk| Arc::new(chunk.to_vec().into()))
                .collect();
            let (mut encoding, mut decoding) = (Duration::ZERO, Duration::ZERO);
            let mut wire = 0;
            for chunk in &chunks {
                let (size, none) = (chunk.len(), Vec::new());
                let begun = Instant::now();
                let coded = encode(spec, chunk, &none);
                encoding += begun.elapsed();
                wire += coded.payload.len() + 32;
                let begun = Instant::now();
                let back = decode(coded.codec, size, coded.crc, &coded.payload, &none);
                decoding += begun.elapsed();
                if back.as_ref() != Ok(chunk) {
                    return Err(format!("{name} did not give back its input"));
                }
            }
            let (coding, decoding) = (mib_s(len, encoding), mib_s(len, decoding));
            report.add(
                "codecs",
                format!("{name}: ratio"),
                len as f64 / wire as f64,
                "",
            );
            report.add(
                "codecs",
                format!("{name}: coding, one core"),
                coding,
                "MiB/s",
            );
            report.add(
                "codecs",
                format!("{name}: decoding, one core"),
                decoding,
                "MiB/s",
            );
            alone = (*spec != CodecSpec::None).then_some(coding);
        }
        // Long enough to mean something, also for a fast codec.
        let expected = alone.unwrap_or(500.0) * cores() as f64 * seconds.min(3.0);
        let rounds = (expected as u64 * MIB / len).clamp(1, 64);
        let pair = Pair::start(&Setup {
            plugin: name.clone(),
            ..Setup::default()
        })?;
        // As after the first burst: the memory of a full buffer is there.
        let full = (expected as u64 * MIB).min(FULL_BYTES);
        through(&pair, sample, full)?;
        let times = || {
            let [a, b] = pair.processor_time();
            [processor_time(), a, b]
        };
        let before = times();
        let (time, _) = through(&pair, sample, len * rounds)?;
        let gib = (len * rounds) as f64 / (1 << 30) as f64;
        let after = times();
        let per_gib = |which: usize| after[which].saturating_sub(before[which]).as_secs_f64() / gib;
        let path = mib_s(len * rounds, time);
        report.add("codecs", format!("{name}: whole path"), path, "MiB/s");
        let whose = ["all of it", "the sending proxy", "the receiving proxy"];
        for (which, whose) in whose.iter().enumerate() {
            report.add(
                "codecs",
                format!("{name}: processor time of {whose}"),
                per_gib(which),
                "s/GiB",
            );
        }
        if let Some(alone) = alone {
            let ratio = path / alone;
            report.add(
                "codecs",
                format!("{name}: path over codec's own speed"),
                ratio,
                "",
            );
            report.bar(Bar::AtLeast(0.85));
        }
    }
    Ok(())
}

/// Sends through the first connection; time until the last byte, and time until all was taken.
fn through(pair: &Pair, sample: &Arc<Vec<u8>>, total: u64) -> Result<(Duration, Duration), String> {
    let (near, far) = pair.open(0)?;
    let flow = Flow::new(Arc::clone(sample), total);
    let begun = Instant::now();
    let receiver = flow.receive(far);
    let taken = join(flow.send(near))?;
    let end = join(receiver)?;
    Ok((end - begun, taken))
}

fn join<T>(thread: std::thread::JoinHandle<Result<T, String>>) -> Result<T, String> {
    thread.join().map_err(|_| "a thread failed".to_string())?
}

/// How fast DRBD can get rid of its bytes while the line is slow.
fn fill(report: &mut Report, total: u64) -> Result<(), String> {
    for plugin in ["none", "lz4"] {
        let pair = Pair::start(&Setup {
            memory_max_bytes: total * 2,
            options: format!("--memlimit={} --max-lag=0", total / 2 * 3),
            plugin: plugin.into(),
            line: Some((MIB, Duration::ZERO)),
            ..Setup::default()
        })?;
        let (mut near, _far) = pair.open(0)?;
        let block = noise(MIB as usize);
        let begun = Instant::now();
        for _ in 0..total / MIB {
            near.write_all(&block).map_err(text)?;
        }
        pair.wait("the buffer holds everything", |pair| {
            pair.state()["counters"]["raw_in_bytes"].as_u64() >= Some(total / MIB * MIB)
        })?;
        let rate = mib_s(total / MIB * MIB, begun.elapsed());
        report.add(
            "fill",
            format!("into the buffer, plugin {plugin}"),
            rate,
            "MiB/s",
        );
        if plugin == "none" {
            report.bar(Bar::AtLeast(500.0));
        }
    }
    Ok(())
}

/// The published example: a burst, a line of 220 MB/s, and three codecs switched live.
fn replay(
    report: &mut Report,
    sample: &Arc<Vec<u8>>,
    options: &BenchOptions,
) -> Result<(), String> {
    let total = options.replay_bytes;
    let scale = total as f64 / REPLAY_BYTES as f64;
    let setup = |plugin: &str| Setup {
        memory_max_bytes: total / 2 * 3 + 64 * MIB,
        options: format!("--memlimit={} --max-lag=0", total / 4 * 5 + 16 * MIB),
        plugin: plugin.into(),
        line: Some((options.link_bytes_s, Duration::ZERO)),
        ..Setup::default()
    };
    report.add("replay", "size", total as f64 / 1e6, "MB");
    report.add("replay", "line", options.link_bytes_s as f64 / 1e6, "MB/s");
    for (what, data) in [
        ("sample data", Arc::clone(sample)),
        ("noise", Arc::new(noise(sample.len()))),
    ] {
        let pair = Pair::start(&setup("auto"))?;
        let (time, taken) = through(&pair, &data, total)?;
        let state = pair.state();
        report.add(
            "replay",
            format!("auto, {what}: buffer filled"),
            taken.as_secs_f64(),
            "s",
        );
        report.add(
            "replay",
            format!("auto, {what}: all delivered"),
            time.as_secs_f64(),
            "s",
        );
        // Scaled with size and line: 18 s for the published ones.
        let bar = 18.0 * scale * 220e6 / options.link_bytes_s as f64;
        report.bar(Bar::AtMost((bar * 100.0).round() / 100.0));
        let ratio = state["ratio"].as_f64().unwrap_or(0.0);
        report.add("replay", format!("auto, {what}: ratio"), ratio, "");
    }
    // The times of the published run: lzma to 44 s, zlib to 56 s, then none.
    let pair = Pair::start(&setup("lzma level 6 contexts 1"))?;
    let (near, far) = pair.open(0)?;
    let flow = Flow::new(Arc::clone(sample), total);
    let begun = Instant::now();
    let receiver = flow.receive(far);
    let sender = flow.send(near);
    let mut before = 0;
    let mut phase = |report: &mut Report, name: &str, time: Duration| {
        let got = flow.received();
        let rate = (got - before) as f64 / 1e6 / time.as_secs_f64().max(1e-9);
        report.add("replay", format!("forced {name}: drained"), rate, "MB/s");
        before = got;
    };
    let lzma = Duration::from_secs_f64(44.0 * scale);
    sleep(lzma);
    phase(report, "lzma", lzma);
    pair.command("set plugin a0 0 zlib level 6")?;
    let zlib = Duration::from_secs_f64(12.0 * scale);
    sleep(zlib);
    phase(report, "zlib", zlib);
    pair.command("set plugin a0 0 none")?;
    let switched = Instant::now();
    let taken = join(sender)?;
    let end = join(receiver)?;
    phase(report, "none", end - switched);
    report.add("replay", "forced: buffer filled", taken.as_secs_f64(), "s");
    report.add(
        "replay",
        "forced: all delivered",
        (end - begun).as_secs_f64(),
        "s",
    );
    let counters = pair.state()["counters"].clone();
    for name in ["streams_reset", "sessions_dropped"] {
        let count = counters[name].as_f64().unwrap_or(-1.0);
        report.add("replay", format!("forced: {name}"), count, "");
        report.bar(Bar::AtMost(0.0));
    }
    Ok(())
}

/// One way of DRBD's control traffic while bulk has more than the line takes.
fn latency(report: &mut Report, seconds: f64) -> Result<(), String> {
    let delay = Duration::from_millis(50);
    let pair = Pair::start(&Setup {
        options: "--memlimit=64M --max-lag=0 --bwlimit=1250000".into(),
        // 10 Mbit/s is the proxies' own rate; headers of TCP and IP come on top of it.
        line: Some((1_400_000, delay)),
        ..Setup::default()
    })?;
    let ((mut bulk, mut sink), (mut near, mut far)) = pair.open_both(0)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let _sender = spawn(move || {
        let block = noise(MIB as usize);
        while !stopped.load(Ordering::Relaxed) && bulk.write_all(&block).is_ok() {}
    });
    let arrived = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&arrived);
    let _receiver = spawn(move || {
        let mut room = vec![0; 1 << 16];
        while let Ok(len) = sink.read(&mut room) {
            if len == 0 {
                return;
            }
            counted.fetch_add(len as u64, Ordering::Relaxed);
        }
    });
    pair.wait("bulk flows", |_| arrived.load(Ordering::Relaxed) > 500_000)?;
    let from = arrived.load(Ordering::Relaxed);
    let begun = Instant::now();
    let listener = spawn(move || {
        let mut times = Vec::new();
        let mut packet = [0; 16];
        while far.read_exact(&mut packet).is_ok() {
            let sent = u64::from_le_bytes(*packet.first_chunk::<8>().expect("16 bytes have 8"));
            if sent == u64::MAX {
                break;
            }
            times.push(begun.elapsed().as_micros() as u64 - sent);
        }
        Ok::<_, String>(times)
    });
    while begun.elapsed().as_secs_f64() < seconds {
        let mut packet = [0; 16];
        let now = begun.elapsed().as_micros() as u64;
        packet[..8].copy_from_slice(&now.to_le_bytes());
        near.write_all(&packet).map_err(text)?;
        sleep(Duration::from_millis(17));
    }
    let carried = arrived.load(Ordering::Relaxed) - from;
    let rate = carried as f64 * 8.0 / 1e6 / begun.elapsed().as_secs_f64();
    near.write_all(&[0xff; 16]).map_err(text)?;
    let mut times = join(listener)?;
    stop.store(true, Ordering::Relaxed);
    times.sort_unstable();
    let at = |part: f64| {
        let place = (times.len() as f64 * part) as usize;
        times
            .get(place.min(times.len() - 1))
            .map_or(0.0, |us| *us as f64 / 1e3)
    };
    if times.is_empty() {
        return Err("no control packet came through".into());
    }
    report.add(
        "latency",
        "bulk under way, shaped to 10 Mbit/s",
        rate,
        "Mbit/s",
    );
    report.add("latency", "control packets", times.len() as f64, "");
    report.add("latency", "control, one way of 50 ms: p50", at(0.5), "ms");
    report.add("latency", "control, one way of 50 ms: p99", at(0.99), "ms");
    report.bar(Bar::AtMost(55.0));
    report.add("latency", "control, one way of 50 ms: worst", at(1.0), "ms");
    Ok(())
}

/// Many connections with less memory than they ask for.
fn connections(
    report: &mut Report,
    sample: &Arc<Vec<u8>>,
    options: &BenchOptions,
) -> Result<(), String> {
    raise_open_files();
    let count = options.connections.clamp(1, 800);
    let memory_max_bytes = u64::from(count) * 5 / 2 * MIB + 8 * MIB;
    let pair = Pair::start(&Setup {
        memory_max_bytes,
        options: "--memlimit=16M".into(),
        plugin: "lz4".into(),
        connections: count,
        ..Setup::default()
    })?;
    let total = 8 * MIB;
    let begun = Instant::now();
    let mut threads = Vec::new();
    for number in 0..usize::from(count) {
        let (near, far) = pair.open(number)?;
        let flow = Flow::new(Arc::clone(sample), total);
        threads.push((flow.send(near), flow.receive(far)));
    }
    let mut peak = 0.0f64;
    while threads.iter().any(|(_, receiver)| !receiver.is_finished()) {
        for daemon in [&pair.a, &pair.b] {
            let used = daemon.state()["memory_used_bytes"].as_f64().unwrap_or(0.0);
            peak = peak.max(used / memory_max_bytes as f64);
        }
        sleep(Duration::from_millis(5));
    }
    for (sender, receiver) in threads {
        join(sender)?;
        join(receiver)?;
    }
    let rate = mib_s(total * u64::from(count), begun.elapsed());
    report.add(
        "connections",
        "connections that share one pool",
        f64::from(count),
        "",
    );
    report.add(
        "connections",
        "memory-max",
        (memory_max_bytes / MIB) as f64,
        "MiB",
    );
    report.add("connections", "all together, lz4", rate, "MiB/s");
    report.add(
        "connections",
        "most memory in use over memory-max",
        peak,
        "",
    );
    report.bar(Bar::AtMost(1.0));
    Ok(())
}

/// The line stands still under load, then comes back.
fn cut(report: &mut Report, cut_s: u64) -> Result<(), String> {
    let pair = Pair::start(&Setup {
        options: format!("--memlimit=64M --session-hold={}", cut_s + 30),
        plugin: "zstd level 1".into(),
        line: Some((20_000_000, Duration::from_millis(10))),
        ..Setup::default()
    })?;
    let (near, far) = pair.open(0)?;
    let flow = Flow::new(Arc::new(noise(4 << 20)), 160 * MIB);
    let (sender, receiver) = (flow.send(near), flow.receive(far));
    pair.wait("bytes flow", |_| flow.received() > 8 * MIB)?;
    pair.line_down(true);
    sleep(Duration::from_secs(cut_s));
    let held = pair.state();
    let before = flow.received();
    pair.line_down(false);
    let back = pair.wait("bytes flow again", |_| flow.received() > before)?;
    join(sender)?;
    join(receiver)?;
    let counters = pair.state()["counters"].clone();
    report.add("cut", "length", cut_s as f64, "s");
    let buffered = held["buffered_raw_bytes"].as_f64().unwrap_or(0.0) / MIB as f64;
    report.add("cut", "buffered at its end", buffered, "MiB");
    report.add(
        "cut",
        "first byte after the line was back",
        back.as_secs_f64(),
        "s",
    );
    for (name, most) in [("streams_reset", 0.0), ("resumes", 1.0)] {
        let count = counters[name].as_f64().unwrap_or(-1.0);
        report.add("cut", name, count, "");
        report.bar(Bar::AtMost(most));
    }
    Ok(())
}

/// Much more than memory, on disk and back.
fn spill(report: &mut Report, options: &BenchOptions) -> Result<(), String> {
    let directory = options.spill_directory.clone();
    let directory = directory.ok_or("section spill needs --spill-dir")?;
    let memory_max_bytes = 64 * MIB;
    let total = options.spill_bytes;
    let pair = Pair::start(&Setup {
        memory_max_bytes,
        options: "--memlimit=48M --max-lag=0 --bwlimit=200k".into(),
        plugin: "none".into(),
        spill: Some((directory, total + total / 8 + 64 * MIB)),
        ..Setup::default()
    })?;
    let (near, far) = pair.open(0)?;
    let flow = Flow::new(Arc::new(noise(8 << 20)), total);
    let before = resident();
    let peak = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let (seen, stopped) = (Arc::clone(&peak), Arc::clone(&stop));
    let watcher = spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            seen.fetch_max(resident(), Ordering::Relaxed);
            sleep(Duration::from_millis(20));
        }
    });
    let receiver = flow.receive(far);
    let taken = join(flow.send(near))?;
    let state = pair.state();
    let spilled = state["spilled_bytes"].as_f64().unwrap_or(0.0);
    let resets = state["counters"]["streams_reset"].as_f64().unwrap_or(-1.0);
    report.add("spill", "size", (total / MIB) as f64, "MiB");
    report.add(
        "spill",
        "memory-max of each proxy",
        (memory_max_bytes / MIB) as f64,
        "MiB",
    );
    report.add("spill", "taken from DRBD", mib_s(total, taken), "MiB/s");
    report.add(
        "spill",
        "on disk when all was taken",
        spilled / MIB as f64,
        "MiB",
    );
    let begun = Instant::now();
    pair.command("set bwlimit a0 0")?;
    let end = join(receiver)?;
    report.add(
        "spill",
        "back from disk and delivered",
        mib_s(total, end - begun),
        "MiB/s",
    );
    pair.wait("the disk is empty", |pair| {
        pair.a.state()["spill_used_bytes"].as_u64() == Some(0)
    })?;
    stop.store(true, Ordering::Relaxed);
    watcher.join().map_err(|_| "a thread failed".to_string())?;
    report.add("spill", "streams reset", resets, "");
    report.bar(Bar::AtMost(0.0));
    let peak = peak.load(Ordering::Relaxed);
    report.add(
        "spill",
        "resident before",
        before as f64 / MIB as f64,
        "MiB",
    );
    report.add(
        "spill",
        "most resident, both proxies and this test",
        peak as f64 / MIB as f64,
        "MiB",
    );
    // Twice for each of the two.
    report.bar(Bar::AtMost((4 * memory_max_bytes / MIB) as f64));
    Ok(())
}

/// Processor time of this process: both proxies, the line and both ends.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn build() -> &'static str {
    if cfg!(debug_assertions) {
        "development"
    } else {
        "release"
    }
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("?").to_string()
}

/// Bytes of memory that this process has.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .unwrap_or(0)
        * 1024
}

/// Each connection takes about twenty descriptors when all ends are in one process.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // With too few the section says so when a socket cannot be made.
    let _ = setrlimit(Resource::Nofile, raised);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(only: &[&str]) -> Report {
        let directory = tempfile::tempdir().unwrap();
        let options = BenchOptions {
            only: only.iter().map(|name| (*name).into()).collect(),
            sample_bytes: 2 * MIB,
            fill_bytes: 16 * MIB,
            replay_bytes: 6 * MIB,
            link_bytes_s: 100_000_000,
            seconds: 0.3,
            connections: 5,
            cut_s: 0,
            spill_directory: Some(directory.path().into()),
            spill_bytes: 80 * MIB,
            ..BenchOptions::default()
        };
        bench(&options).unwrap()
    }

    #[test]
    fn every_plugin_is_measured() {
        let report = small(&["codecs"]);
        for plugin in PLUGINS {
            assert!(report.text().contains(&format!("{plugin}: whole path")));
            let time = |whose: &str| {
                let name = format!("{plugin}: processor time of {whose}");
                let found = report.figures.iter().find(|figure| figure.name == name);
                found.unwrap_or_else(|| panic!("{name} is missing")).value
            };
            let [sending, receiving] = ["the sending proxy", "the receiving proxy"].map(time);
            assert!(sending > 0.0 && receiving > 0.0, "{}", report.text());
            // The benchmark's own ends have the rest.
            assert!(sending + receiving < time("all of it"), "{}", report.text());
        }
        let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        assert!(json["figures"].as_array().unwrap().len() > 20);
    }

    #[test]
    fn only_the_chosen_plugins_are_measured() {
        let report = bench(&BenchOptions {
            only: vec!["codecs".into()],
            plugins: vec!["zstd level -1".into()],
            sample_bytes: MIB,
            seconds: 0.1,
            ..BenchOptions::default()
        });
        let text = report.unwrap().text();
        assert!(text.contains("zstd level -1: whole path"), "{text}");
        assert!(!text.contains("lz4"), "{text}");
    }

    #[test]
    fn fill_replay_latency_connections_cut_and_spill_are_measured() {
        let report = small(&["fill", "replay", "latency", "connections", "cut", "spill"]);
        let value = |name: &str| {
            let found = report.figures.iter().find(|figure| figure.name == name);
            found.unwrap_or_else(|| panic!("{name} is missing")).value
        };
        assert_eq!(value("forced: streams_reset"), 0.0);
        assert_eq!(value("streams_reset"), 0.0);
        assert_eq!(value("resumes"), 1.0);
        assert!(value("on disk when all was taken") > 10.0);
        let memory = value("most memory in use over memory-max");
        assert!(memory <= 1.0, "{}", report.text());
        assert!(value("control, one way of 50 ms: p50") >= 50.0);
        assert!(report.text().contains("bar"));
    }

    #[test]
    fn a_wrong_section_or_file_is_named() {
        let mut options = BenchOptions {
            only: vec!["speed".into()],
            ..BenchOptions::default()
        };
        assert!(bench(&options).unwrap_err().contains("'speed'"));
        options.only.clear();
        options.plugins = vec!["lz4".into(), "lz5 level 1".into()];
        assert!(bench(&options).unwrap_err().contains("'lz5 level 1'"));
        options.plugins.clear();
        options.file = Some("/nonexistent".into());
        assert!(bench(&options).unwrap_err().contains("/nonexistent"));
    }
}
