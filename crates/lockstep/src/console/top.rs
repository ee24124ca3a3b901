//! `lockstep top`: what users ask of each volume, how long it takes, and how resyncs go.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use lockstep_core::state::{ConnState, ReplState};
use lockstep_daemon::client::Client;
use lockstep_daemon::meter::Counted;
use lockstep_daemon::metrics::{AckCounts, VolumeCounts};
use lockstep_daemon::names::Named;
use lockstep_daemon::place::Place;
use lockstep_daemon::protocol::{Reply, Request};
use lockstep_daemon::report::{DeviceReport, ResourceReport};

use super::super::drbdsetup::status::{done_percent, eta_seconds};
use super::tree::{bar, duration, size};

/// Shows the page every `every` until interrupted, or once after one interval.
pub(super) fn run(place: &Place, every: Duration, once: bool) -> Result<(), String> {
    let mut client = Client::connect(place).map_err(|error| error.to_string())?;
    let mut before = ask(&mut client)?.1;
    let mut since = Instant::now();
    loop {
        std::thread::sleep(every);
        let (reports, counts) = ask(&mut client)?;
        let page = page(&reports, &counts, &before, since.elapsed());
        (before, since) = (counts, Instant::now());
        let mut out = std::io::stdout().lock();
        // Home and clear, only where somebody looks.
        let clear = if !once && out.is_terminal() {
            "\x1b[H\x1b[2J"
        } else {
            ""
        };
        let shown = write!(out, "{clear}{page}").and_then(|()| out.flush());
        if once || shown.is_err() {
            return Ok(());
        }
    }
}

/// What has been counted up to a moment.
struct Counts {
    volumes: Vec<VolumeCounts>,
    acks: Vec<AckCounts>,
}

type Answer = (Vec<ResourceReport>, Counts);

fn ask(client: &mut Client) -> Result<Answer, String> {
    let mut call = |request| client.call(&request).map_err(|error| error.to_string());
    match (
        call(Request::Report { resource: None })?,
        call(Request::Counts)?,
    ) {
        (Reply::Report { resources }, Reply::Counts { volumes, acks }) => {
            Ok((resources, Counts { volumes, acks }))
        }
        (other, _) => Err(format!("an unexpected answer: {other:?}")),
    }
}

fn page(reports: &[ResourceReport], counts: &Counts, before: &Counts, elapsed: Duration) -> String {
    let old: BTreeMap<_, _> = before
        .volumes
        .iter()
        .map(|v| ((v.resource.as_str(), v.volume), v))
        .collect();
    let mut out = format!(
        "{:<20} {:<10} {:<13} {:>9} {:>9} {:>12} {:>9} {:>9} {:>12}\n",
        "VOLUME", "ROLE", "DISK", "reads/s", "p50/p99", "bytes/s", "writes/s", "p50/p99", "bytes/s"
    );
    for r in reports {
        for d in &r.devices {
            let now = counts
                .volumes
                .iter()
                .find(|v| v.resource == r.name && v.volume == d.volume);
            let then = old.get(&(r.name.as_str(), d.volume)).copied();
            volume(&mut out, r, d, (now, then), elapsed);
        }
        peers(&mut out, r, counts, before);
    }
    if reports.is_empty() {
        out.push_str("nothing is configured\n");
    }
    out
}

fn volume(
    out: &mut String,
    r: &ResourceReport,
    d: &DeviceReport,
    (now, then): (Option<&VolumeCounts>, Option<&VolumeCounts>),
    elapsed: Duration,
) {
    let name = format!("{}/{}", r.name, d.volume);
    let _ = write!(
        out,
        "{name:<20} {:<10} {:<13}",
        r.role.text(),
        d.disk_state.text()
    );
    let none = Counted::default();
    for kind in [0, 1] {
        let of = |v: Option<&VolumeCounts>| v.and_then(|v| v.kinds.get(kind)).cloned();
        let new = of(now)
            .unwrap_or_default()
            .since(&of(then).unwrap_or(none.clone()));
        let per_second = |count: u64| count as f64 / elapsed.as_secs_f64().max(0.001);
        let times = times(&new);
        let _ = write!(
            out,
            " {:>9.0} {times:>9} {:>12}",
            per_second(new.done),
            size(per_second(new.bytes) as u64)
        );
    }
    out.push('\n');
}

/// Bounds below which half and 99 % lay.
fn times(counted: &Counted) -> String {
    match (counted.quantile_us(0.5), counted.quantile_us(0.99)) {
        (Some(half), Some(most)) => format!("{}/{}", time(half), time(most)),
        _ => "-".to_owned(),
    }
}

/// How long a peer took to acknowledge writes in the interval, if there were any.
fn ack_times(key: (&str, &str, u16), counts: &Counts, before: &Counts) -> Option<String> {
    let of = |counts: &Counts| {
        let mut all = counts.acks.iter();
        let found = all.find(|a| (a.resource.as_str(), a.peer.as_str(), a.volume) == key);
        found.map(|a| a.counted.clone()).unwrap_or_default()
    };
    let new = of(counts).since(&of(before));
    (new.done > 0).then(|| times(&new))
}

fn peers(out: &mut String, r: &ResourceReport, counts: &Counts, before: &Counts) {
    for c in &r.connections {
        if c.state != ConnState::Connected {
            let _ = writeln!(out, "  {:<18} {}", c.name, c.state.text());
            continue;
        }
        for p in &c.peer_devices {
            let state = p.repl_state.text();
            let key = (r.name.as_str(), c.name.as_str(), p.volume);
            let acks = ack_times(key, counts, before)
                .map(|times| format!("  acknowledges in {times}"))
                .unwrap_or_default();
            let Some(resync) = &p.resync else {
                if p.repl_state != ReplState::Established || !acks.is_empty() {
                    let _ = writeln!(out, "  {:<18} volume {} {state}{acks}", c.name, p.volume);
                }
                continue;
            };
            let done = done_percent(resync);
            let left = eta_seconds(resync).map_or("no end in sight".to_owned(), duration);
            let rate = size(u64::from(resync.rate_kib_s) * 1024);
            let _ = writeln!(
                out,
                "  {:<18} volume {} {state} {} {done:.1}% {rate}/s {left}{acks}",
                c.name,
                p.volume,
                bar(done)
            );
        }
    }
}

/// Microseconds, short.
fn time(us: u64) -> String {
    match us {
        0..1000 => format!("{us}us"),
        1000..1_000_000 => format!("{}ms", us / 1000),
        u64::MAX => "more".to_owned(),
        _ => format!("{}s", us / 1_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::drbdsetup::sample;
    use super::*;

    #[test]
    fn rates_are_those_of_the_interval() {
        let counts = |done: u64| {
            let mut kinds = vec![Counted::default(); 4];
            kinds[1] = Counted {
                done,
                failed: 0,
                bytes: done * 4096,
                sum_us: 0,
                buckets: vec![0, 0, done],
            };
            let counted = kinds[1].clone();
            Counts {
                volumes: vec![VolumeCounts {
                    resource: "web".into(),
                    volume: 0,
                    kinds,
                }],
                acks: vec![AckCounts {
                    resource: "web".into(),
                    volume: 1,
                    peer: "bravo".into(),
                    counted,
                }],
            }
        };
        let page = page(
            &[sample::web()],
            &counts(3000),
            &counts(1000),
            Duration::from_secs(2),
        );
        let line = page.lines().nth(1).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[..3], ["web/0", "Primary", "UpToDate"]);
        assert_eq!(
            words[words.len() - 4..],
            ["1000", "100us/100us", "3.9", "MiB"]
        );
        assert!(
            page.contains("bravo              volume 0 SyncSource [#"),
            "{page}"
        );
        let acks = "bravo              volume 1 Established  acknowledges in 100us/100us\n";
        assert!(page.contains(acks), "{page}");
        assert!(page.contains("charlie            Connecting"), "{page}");
    }
}
