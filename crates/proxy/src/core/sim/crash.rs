//! Troubles at chosen events: a proxy dies at every single one, lines are cut and fall silent,
//! codecs and options change, the spill disk fills up. Also the long cuts that no test can wait for.

use super::*;
use crate::core::engine::{Job, keyed};
use crate::core::frame::Kind;
use crate::core::link::StreamPhase;
use crate::core::message::Attach;

/// Something that goes wrong, or that an operator does.
#[derive(Clone, Debug)]
pub(super) enum Trouble {
    /// The process dies and another one starts with the same configuration.
    Crash(usize),
    /// All carriers break; the line is back after so many milliseconds.
    Cut(u64),
    /// One carrier breaks.
    CutOne,
    /// What is under way is lost and nobody is told.
    Silence,
    /// Another codec at one end.
    Plugin(usize, &'static str),
    /// Another option at one end.
    Set(usize, &'static str, &'static str),
    /// An upgrade at one end.
    HandOver(usize),
    DiskFull(bool),
}

/// Bytes that each end must get.
pub(super) struct Expected {
    /// The node whose DRBD opened the connection.
    pub(super) opener: usize,
    pub(super) data: Vec<u8>,
    pub(super) meta: Vec<u8>,
    pub(super) back: Vec<u8>,
}

const CODECS: [&str; 8] = [
    "lz4",
    "zstd level 1",
    "none",
    "zlib level 1",
    "auto",
    "lzma level 1",
    "zstd level 1 history 1M",
    "zstd level 2 history 4M",
];
const CHANGES: [(&str, &str); 12] = [
    ("ping-hold", "30"),
    ("carriers", "1"),
    ("carriers", "4"),
    ("memlimit", "1M"),
    ("memlimit", "3M"),
    ("bwlimit", "300k"),
    ("bwlimit", "0"),
    ("max-lag", "1"),
    ("max-lag", "0"),
    ("schedule", "mon-fri/08:00-18:00=200k,*=0"),
    ("session-hold", "60"),
    ("wan-timeout", "2"),
];

impl Expected {
    pub(super) fn of(&self, node: usize, first: &[u8; 8]) -> &[u8] {
        match (node == self.opener, *first == DATA_FIRST) {
            (true, _) => &self.back,
            (false, true) => &self.data,
            (false, false) => &self.meta,
        }
    }
}

impl World {
    /// One more event has happened: what is planned for now is done.
    pub(super) fn step(&mut self) {
        self.steps += 1;
        while self.plan.front().is_some_and(|(at, _)| *at <= self.steps) {
            if let Some((_, trouble)) = self.plan.pop_front() {
                self.suffer(trouble);
            }
        }
    }

    fn suffer(&mut self, trouble: Trouble) {
        let (ms, step) = (self.now / MS, self.steps);
        self.log.push(format!("{ms} ms, event {step}: {trouble:?}"));
        match trouble {
            Trouble::Crash(node) => self.crash(node),
            Trouble::Cut(ms) => {
                self.down = true;
                self.cut();
                self.at(ms, Event::Heal);
            }
            Trouble::CutOne if !self.pipes.is_empty() => self.cut_one(),
            Trouble::CutOne => {}
            Trouble::Silence => {
                self.pipes.clear();
                self.pipe_of.clear();
            }
            Trouble::Plugin(node, text) => {
                let words: Vec<&str> = text.split(' ').collect();
                let plugin = Plugin::parse(&words).expect("a constant plugin");
                self.change(node, |options| options.plugins = vec![plugin.clone()]);
            }
            Trouble::Set(node, option, value) => self.change(node, |options| {
                options.set(option, value).expect("a constant option");
            }),
            Trouble::HandOver(node) => self.hand_over(node),
            Trouble::DiskFull(full) => self.disk_full = full,
        }
    }

    fn change(&mut self, node: usize, change: impl Fn(&mut LinkOptions)) {
        let Some(config) = self.engines[node].config(self.links[node]) else {
            // It is removed just now.
            return;
        };
        let (name, mut options) = (config.name.clone(), config.options.clone());
        change(&mut options);
        self.engines[node]
            .set_options(Instant(self.now), &name, options)
            .unwrap();
    }

    /// Memory, sockets, jobs and spilled records go; the configuration stays.
    fn crash(&mut self, node: usize) {
        self.crashes += 1;
        let now = Instant(self.now);
        let old = &self.engines[node];
        let configs: Vec<LinkConfig> = old.configs().cloned().collect();
        let mut seed = [node as u8; 32];
        seed[..8].copy_from_slice(&self.order.to_le_bytes());
        let mut fresh = Engine::new(now, old.options.clone(), seed);
        let links = configs
            .into_iter()
            .map(|config| fresh.add_link(now, config).unwrap());
        self.numbers[node] = links.collect();
        self.links[node] = self.numbers[node][0];
        self.engines[node] = fresh;
        self.sockets[node].clear();
        self.ordered[node].clear();
        self.outbox.retain(|(owner, ..), _| *owner != node);
        self.disk.retain(|record, _| record.segment != node as u32);
        self.queue.retain(|_, event| match event {
            Event::Input(owner, _)
            | Event::Read { node: owner, .. }
            | Event::Brought { node: owner, .. }
            | Event::ConnectLocal { node: owner, .. }
            | Event::Dialed { from: owner, .. } => *owner != node,
            Event::Arrive { .. } | Event::Cut | Event::Heal => true,
        });
        self.pipe_of.clear();
        for pipe in std::mem::take(&mut self.pipes).into_values() {
            for (owner, wire) in pipe.ends {
                if owner != node {
                    self.outbox
                        .retain(|(at, on, _), _| (*at, *on) != (owner, wire));
                    let input = Input::WireDown(wire, "the peer died".into());
                    self.later(300, Event::Input(owner, input));
                }
            }
        }
    }

    pub(super) fn all_ended(&self) -> bool {
        let mut all = self.sockets.iter().flat_map(BTreeMap::values);
        all.all(|socket| socket.reset || socket.got_fin && socket.eof_given)
    }

    pub(super) fn count(&self, phase: StreamPhase) -> [usize; 2] {
        [0, 1].map(|node| {
            let links = self.engines[node].links.values();
            links
                .flat_map(|link| link.streams.values())
                .filter(|stream| stream.phase == phase)
                .count()
        })
    }

    /// One DRBD connection from its opening to its orderly end; false if a crash ended it. Every
    /// byte is checked as it is written.
    fn connection(&mut self, expected: Expected) -> bool {
        let crashes = self.crashes;
        let live = self.run(60_000, World::live);
        self.check(live, "no session");
        if self.crashes > crashes {
            return false;
        }
        let (node, far) = (expected.opener, 1 - expected.opener);
        self.sockets = [BTreeMap::new(), BTreeMap::new()];
        let (data, meta) = (expected.data.clone(), expected.meta.clone());
        let back = expected.back.clone();
        self.expected = vec![expected];
        let near = [
            self.drbd_opens(node, DATA_FIRST, 0, &data),
            self.drbd_opens(node, META_FIRST, 0, &meta),
        ];
        let crashed = |w: &World| w.crashes > crashes;
        let lost = |w: &World| w.sockets.iter().any(|all| all.values().any(|s| s.reset));
        self.run(30_000, |w| {
            crashed(w) || w.count(StreamPhase::Open) == [2, 2] || lost(w)
        });
        // A session that broke while they opened: DRBD gives up both sockets and tries again.
        if !crashed(self) && lost(self) {
            for node in 0..2 {
                let open: Vec<LocalId> = self.engines[node].locals.keys().copied().collect();
                for local in open {
                    self.sockets[node].get_mut(&local).unwrap().reset = true;
                    self.feed(node, Input::LocalFailed(local, "reset".into()));
                }
            }
            let ended = self.run(60_000, World::all_ended);
            self.check(ended, "a socket stays after an interrupted opening");
            return false;
        }
        if !crashed(self) {
            self.check(self.count(StreamPhase::Open) == [2, 2], "not opened");
            let locals: Vec<LocalId> = self.engines[far].locals.keys().copied().collect();
            for local in locals {
                let socket = self.sockets[far].get_mut(&local).unwrap();
                socket.to_send.extend(&back);
                self.at(0, Event::Read { node: far, local });
            }
            self.run(300_000, |w| {
                let full = |(at, sockets): (usize, &BTreeMap<LocalId, Socket>)| {
                    sockets.values().all(|socket| {
                        let want = w.expected.first().map(|e| e.of(at, &socket.first).len());
                        Some(socket.got.len()) == want
                    })
                };
                crashed(w) || w.sockets.iter().enumerate().all(full)
            });
        }
        if !crashed(self) {
            let whole = self.sockets[far].values().all(|socket| !socket.reset);
            self.check(whole, "reset without a crash");
            for local in near {
                let socket = self.sockets[node].get_mut(&local).unwrap();
                self.log
                    .push(format!("got {} of {}", socket.got.len(), back.len()));
                socket.closing = true;
                self.at(0, Event::Read { node, local });
            }
            let done = self.run(120_000, |w| crashed(w) || w.all_ended());
            self.check(done, "not all bytes arrived, or no end");
        }
        if crashed(self) {
            let ended = self.run(60_000, World::all_ended);
            self.check(ended, "a socket stays after a crash");
            return false;
        }
        let sockets = self.sockets.iter().enumerate();
        for (at, socket) in sockets.flat_map(|(at, all)| all.values().map(move |s| (at, s))) {
            let want = self.expected[0].of(at, &socket.first).len();
            self.check(socket.got.len() == want, "bytes are missing");
        }
        true
    }

    /// Nothing is left of what was.
    fn check_empty(&mut self) {
        self.disk_full = false;
        let empty = self.run(60_000, |w| {
            w.engines.iter().all(|engine| {
                engine.links.values().all(|link| link.streams.is_empty())
                    && engine.total_held == 0
                    && engine.running == 0
                    && engine.spill_used == 0
            })
        });
        self.check(empty, "something stays");
        self.check(self.disk.is_empty(), "records stay on the disk");
        for peak in self.memory_peak {
            // One read and one decision may be under way when the limit is met.
            self.check(peak <= (4 << 20) + (3 << 20), "memory over its limit");
        }
    }
}

pub(super) fn expected(rng: &mut Rng) -> Expected {
    let len = 150_000 + rng.below(150_000) as usize;
    let mut data = noise_and_text(rng, len);
    data.extend_from_within(..40_000);
    Expected {
        opener: rng.below(2) as usize,
        data,
        meta: noise_and_text(rng, 3000),
        back: noise_and_text(rng, 40_000),
    }
}

/// Codec and option changes at either end, cuts and upgrades at random events.
pub(super) fn plan(rng: &mut Rng, spill: bool) -> VecDeque<(u64, Trouble)> {
    let mut plan: Vec<(u64, Trouble)> = (0..4 + rng.below(8))
        .map(|_| {
            let node = rng.below(2) as usize;
            let (option, value) = CHANGES[rng.below(CHANGES.len() as u64) as usize];
            let trouble = match rng.below(12) {
                0 => Trouble::Cut(rng.below(3000)),
                1 => Trouble::CutOne,
                2 => Trouble::Silence,
                3 if spill => Trouble::DiskFull(rng.below(2) == 0),
                3 | 4 => Trouble::HandOver(node),
                5..=7 => Trouble::Set(node, option, value),
                _ => Trouble::Plugin(node, CODECS[rng.below(CODECS.len() as u64) as usize]),
            };
            (1 + rng.below(350), trouble)
        })
        .collect();
    plan.sort_by_key(|(at, _)| *at);
    plan.into()
}

/// One world with its troubles, and a crash at the given event. Answers with the events that it
/// took until the first DRBD connection had ended.
fn world(seed: u64, crash: Option<(u64, usize)>) -> u64 {
    let mut rng = Rng::new(seed ^ 0xc4a5);
    let spill = rng.below(3) == 0;
    let options = DaemonOptions {
        memory_max_bytes: 24 << 20,
        spill_limit_bytes: if spill { 64 << 20 } else { 0 },
        jobs_max: 1 + rng.below(4) as usize,
        ..DaemonOptions::default()
    };
    let mut world = World::new(seed, &options);
    if spill {
        world.options(|options| {
            options.set("memlimit", "1M").unwrap();
            options.set("bwlimit", "200k").unwrap();
        });
    }
    world.plan = plan(&mut rng, spill);
    if let Some((at, node)) = crash {
        let after = world.plan.partition_point(|(step, _)| *step <= at);
        world.plan.insert(after, (at, Trouble::Crash(node)));
    }
    let mut first = 0;
    for round in 0..2 {
        // A session that ends by itself is a reason to try again, but not for ever.
        let mut tries = 0;
        let (mut seen, mut again) = (false, rng.below(u64::MAX));
        while !seen {
            let mut own = Rng::new(again);
            seen = world.connection(expected(&mut own));
            again = own.below(u64::MAX);
            tries += 1;
            world.check(seen || tries < 20, "DRBD does not come back");
        }
        if round == 0 {
            first = world.steps;
        }
    }
    world.check_empty();
    first
}

/// A proxy dies at each event of a world, first one, then the other.
fn crash_at_every_event(seed: u64) -> u64 {
    let steps = world(seed, None);
    for node in 0..2 {
        for at in 1..=steps {
            world(seed, Some((at, node)));
        }
    }
    steps * 2
}

/// `FROM..TO` in the environment, for long runs; docs/testing.md names the command.
pub(super) fn seeds(from: u64, to: u64) -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("LOCKSTEP_PROXY_SEEDS") else {
        return from..to;
    };
    let (from, to) = text.split_once("..").expect("FROM..TO");
    from.parse().expect("a number")..to.parse().expect("a number")
}

/// Runs the seeds on all cores. A failing one panics with its number.
pub(super) fn each(seeds: std::ops::Range<u64>, what: fn(u64) -> u64) {
    let next = std::sync::atomic::AtomicU64::new(seeds.start);
    let worlds = std::sync::atomic::AtomicU64::new(0);
    let (next, worlds, end) = (&next, &worlds, seeds.end);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    worlds.fetch_add(what(seed), std::sync::atomic::Ordering::Relaxed);
                }
            });
        }
    });
    println!("{worlds:?} worlds");
}

#[test]
fn soak_a_proxy_that_dies_at_every_event_loses_no_byte_that_arrived_and_comes_back() {
    each(seeds(0, 1), crash_at_every_event);
}

#[test]
fn soak_random_troubles_and_two_random_crashes() {
    each(seeds(1000, 1060), |seed| {
        let mut rng = Rng::new(seed);
        world(seed, None);
        world(seed, Some((1 + rng.below(500), rng.below(2) as usize)));
        2
    });
}

#[test]
fn ten_minutes_without_a_line_cost_nothing_but_time_if_the_session_is_held() {
    let mut world = up(21, &DaemonOptions::default());
    world.options(|options| {
        options.set("session-hold", "3600").unwrap();
        options.set("memlimit", "1M").unwrap();
    });
    let data = noise_and_text(&mut Rng::new(8), 4_000_000);
    let local = world.drbd_opens(0, DATA_FIRST, 0, &data);
    world.drbd_opens(0, META_FIRST, 0, b"x");
    let begun = world.run(5000, |w| {
        w.received(1, DATA_FIRST)
            .is_some_and(|socket| socket.got.len() > 200_000)
    });
    world.check(begun, "no bytes");
    world.down = true;
    world.at(0, Event::Cut);
    world.run(600_000, |_| false);
    let link = &world.engines[0].links[&world.links[0]];
    assert_eq!(link.state_name(), "Suspended");
    let held = link.tx_held();
    // The control socket's bytes are not counted against the limit.
    assert!(held <= (1 << 20) + 4096, "{held} bytes are held");
    assert!(!world.sockets[0][&local].reset);
    world.down = false;
    world.all_arrive(60_000, &data);
    let link = &world.engines[0].links[&world.links[0]];
    assert_eq!((link.counters.resumes, link.counters.sessions), (1, 1));
}

#[test]
fn after_ten_minutes_without_a_line_a_new_session_stands_within_seconds() {
    let mut world = up(22, &DaemonOptions::default());
    let data = noise_and_text(&mut Rng::new(8), 1_000_000);
    let local = world.drbd_opens(0, DATA_FIRST, 0, &data);
    world.run(40, |_| false);
    world.down = true;
    world.at(0, Event::Cut);
    world.run(600_000, |_| false);
    assert!(world.sockets[0][&local].reset);
    assert_eq!(world.engines[0].total_held, 0, "nothing is kept for nobody");
    // DRBD tries all the time and is told at once that nobody is there.
    let tried = world.drbd_opens(0, DATA_FIRST, 1, b"");
    assert!(world.run(10, |w| w.sockets[0][&tried].reset));
    world.down = false;
    let live = world.run(6000, World::live);
    world.check(live, "no session");
    world.sockets = [BTreeMap::new(), BTreeMap::new()];
    world.drbd_opens(0, DATA_FIRST, 2, &data);
    world.all_arrive(30_000, &data);
}

#[test]
fn with_ping_hold_pings_are_answered_while_the_line_is_cut_but_not_for_longer() {
    const PING: [u8; 8] = *b"\x83\x74\x02\x67\0\x13\0\0";
    const ACK: [u8; 8] = *b"\x83\x74\x02\x67\0\x14\0\0";
    let mut world = up(24, &DaemonOptions::default());
    world.options(|options| {
        options.set("ping-hold", "40").unwrap();
        options.set("session-hold", "60").unwrap();
    });
    world.drbd_opens(0, DATA_FIRST, 0, b"");
    let meta = world.drbd_opens(0, META_FIRST, 0, &PING);
    let got = |w: &World, count: usize| w.sockets[0][&meta].got == ACK.repeat(count);
    let ask = |w: &mut World| {
        w.sockets[0].get_mut(&meta).unwrap().to_send.extend(PING);
        w.at(
            0,
            Event::Read {
                node: 0,
                local: meta,
            },
        );
    };
    let arrived = |w: &World| {
        w.received(1, META_FIRST)
            .map_or(0, |socket| socket.got.len())
    };
    assert!(world.run(5000, |w| arrived(w) == 8));
    assert!(got(&world, 0), "not while the line is there");
    world.down = true;
    world.at(0, Event::Cut);
    assert!(
        world.run(1000, |w| got(w, 1)),
        "the ping that was under way"
    );
    world.run(10_000, |_| false);
    ask(&mut world);
    assert!(world.run(1000, |w| got(w, 2)));
    world.run(35_000, |_| false);
    ask(&mut world);
    world.run(2000, |_| false);
    assert!(got(&world, 2), "longer than ping-hold");
    world.down = false;
    let done = world.run(10_000, |w| arrived(w) == 24);
    world.check(
        done,
        "each ping arrives once, also those that were answered",
    );
    let far = world.received(1, META_FIRST).unwrap();
    assert_eq!(far.got, PING.repeat(3));
    assert!(!world.sockets[0][&meta].reset && !far.reset);
    let link = &world.engines[0].links[&world.links[0]];
    assert_eq!(link.counters.pings_answered, 2);
}

#[test]
fn an_upgrade_keeps_ping_hold_for_open_sockets_and_does_not_prolong_it() {
    const PING: [u8; 8] = *b"\x83\x74\x02\x67\0\x13\0\0";
    const ACK: [u8; 8] = *b"\x83\x74\x02\x67\0\x14\0\0";
    let mut world = up(27, &DaemonOptions::default());
    world.options(|options| {
        options.set("ping-hold", "40").unwrap();
        options.set("session-hold", "60").unwrap();
    });
    world.drbd_opens(0, DATA_FIRST, 0, b"");
    // The first half of a packet is there at the upgrade.
    let meta = world.drbd_opens(0, META_FIRST, 0, &PING[..3]);
    let say = |w: &mut World, bytes: &[u8]| {
        let socket = w.sockets[0].get_mut(&meta).unwrap();
        socket.to_send.extend(bytes);
        let read = Event::Read {
            node: 0,
            local: meta,
        };
        w.at(0, read);
    };
    let got = |w: &World, count: usize| w.sockets[0][&meta].got == ACK.repeat(count);
    let begun = |w: &World| {
        w.received(1, META_FIRST)
            .is_some_and(|socket| socket.got.len() == 3)
    };
    assert!(world.run(5000, begun));
    // Sockets that are opening do not survive an upgrade.
    world.run(500, |_| false);
    world.hand_over(0);
    let resumed = |w: &World| w.engines[0].links[&w.links[0]].counters.resumes == 1;
    let resumed = world.run(6000, resumed);
    world.check(resumed, "no session after the upgrade");
    world.down = true;
    world.at(0, Event::Cut);
    say(&mut world, &PING[3..]);
    let answered = world.run(1000, |w| got(w, 1));
    world.check(answered, "not answered by the new one");
    world.run(25_000, |_| false);
    world.hand_over(0);
    say(&mut world, &PING);
    let answered = world.run(1000, |w| got(w, 2));
    world.check(answered, "not answered by its successor");
    world.run(20_000, |_| false);
    say(&mut world, &PING);
    world.run(2000, |_| false);
    assert!(got(&world, 2), "longer than ping-hold");
    world.down = false;
    let done = world.run(10_000, |w| {
        w.received(1, META_FIRST)
            .is_some_and(|socket| socket.got == PING.repeat(3))
    });
    world.check(done, "each ping arrives once");
    assert!(!world.sockets[0][&meta].reset);
}

#[test]
fn an_upgrade_takes_along_what_is_on_disk() {
    let options = DaemonOptions {
        memory_max_bytes: 24 << 20,
        spill_limit_bytes: 64 << 20,
        ..DaemonOptions::default()
    };
    let mut world = up(25, &options);
    world.options(|options| {
        options.set("memlimit", "1M").unwrap();
        options.set("bwlimit", "200k").unwrap();
    });
    let data = noise_and_text(&mut Rng::new(9), 6_000_000);
    let local = world.drbd_opens(0, DATA_FIRST, 0, &data);
    for round in 0..2 {
        let spilled = world.run(20_000, |w| w.disk.len() > 4);
        world.check(spilled, "nothing was spilled");
        world.hand_over(0);
        let used: u64 = world.disk.keys().map(|record| u64::from(record.len)).sum();
        assert!(used > 0, "round {round}");
        // The new one may have begun to write more.
        assert!(world.engines[0].spill_used >= used);
    }
    world.options(|options| {
        options.set("bwlimit", "0").unwrap();
    });
    world.all_arrive(60_000, &data);
    world.check(!world.sockets[0][&local].reset, "reset");
    // The last acknowledgements are still under way.
    world.run(2000, |_| false);
    assert_eq!((world.disk.len(), world.engines[0].spill_used), (0, 0));
}

#[test]
fn a_reset_frees_what_is_on_its_way_back_from_the_disk() {
    let options = DaemonOptions {
        memory_max_bytes: 24 << 20,
        spill_limit_bytes: 64 << 20,
        ..DaemonOptions::default()
    };
    let mut world = up(26, &options);
    world.options(|options| {
        options.set("memlimit", "1M").unwrap();
        options.set("bwlimit", "200k").unwrap();
    });
    let data = noise_and_text(&mut Rng::new(10), 6_000_000);
    let local = world.drbd_opens(0, DATA_FIRST, 0, &data);
    let spilled = world.run(20_000, |w| w.disk.len() > 4);
    world.check(spilled, "nothing was spilled");
    let reading = |w: &World| {
        let jobs = w.engines[0].jobs.values();
        jobs.into_iter()
            .any(|job| matches!(job, Job::SpillRead { .. }))
    };
    let read = world.run(60_000, reading);
    world.check(read, "nothing is read back");
    world.sockets[0].get_mut(&local).unwrap().reset = true;
    world.feed(0, Input::LocalFailed(local, "reset".into()));
    world.check_empty();
}

#[test]
fn a_proof_made_for_another_tls_connection_is_refused() {
    let mut world = up(27, &DaemonOptions::default());
    let session = world.engines[1].links[&world.links[1]].session.unwrap();
    let mut answer = |binding: [u8; 32], number: u32| {
        let peer = Peer {
            binding,
            ..Peer::default()
        };
        let now = Instant(world.now);
        let engine = &mut world.engines[1];
        let carrier = engine.accept_carrier(now, link_config(1).my_outside, peer);
        let proof = keyed(&session.key, &[b"attach", &number.to_le_bytes(), &[7; 32]]);
        let attach = Attach {
            session: session.id,
            number,
            proof,
        };
        let frame = Frame::message(Kind::Attach, attach.encode());
        engine.carrier_frame(now, carrier, frame);
        engine.carriers.contains_key(&carrier)
    };
    assert!(!answer([8; 32], 50));
    assert!(answer([7; 32], 50));
    // And only once.
    assert!(!answer([7; 32], 50));
}

#[test]
fn a_full_spill_disk_falls_back_to_memory_and_loses_nothing() {
    let options = DaemonOptions {
        memory_max_bytes: 24 << 20,
        spill_limit_bytes: 64 << 20,
        ..DaemonOptions::default()
    };
    let mut world = up(23, &options);
    world.options(|options| {
        options.set("memlimit", "1M").unwrap();
        options.set("bwlimit", "200k").unwrap();
    });
    let data = noise_and_text(&mut Rng::new(8), 6_000_000);
    let local = world.drbd_opens(0, DATA_FIRST, 0, &data);
    let spilled = world.run(20_000, |w| w.disk.len() > 4);
    world.check(spilled, "nothing was spilled");
    world.disk_full = true;
    let seen = world.run(20_000, |w| {
        let link = &w.engines[0].links[&w.links[0]];
        link.counters.spill_errors > 0 && link.tx_held() > 700_000
    });
    world.check(seen, "the full disk was not noticed");
    let written = |w: &World| {
        let link = &w.engines[0].links[&w.links[0]];
        link.counters.spill_written_bytes
    };
    let before = written(&world);
    // Room again: it is used again.
    world.disk_full = false;
    let again = world.run(60_000, |w| written(w) > before);
    world.check(again, "the disk is not used any more");
    world.options(|options| {
        options.set("bwlimit", "0").unwrap();
    });
    world.all_arrive(60_000, &data);
    world.check(!world.sockets[0][&local].reset, "reset");
    world.check(world.memory_peak[0] <= 4 << 20, "memory over its limit");
    world.run(2000, |_| false);
    world.check(world.disk.is_empty(), "records stay on the disk");
}
