//! Deterministic simulation: two engines, a network of carriers with delay, cuts and stalls, codec
//! workers and a spill disk that answer late and out of order, and fake DRBD nodes that check every
//! byte. Everything follows from one seed.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use super::config::{DaemonOptions, Dial, LinkConfig, LinkOptions};
use super::engine::Engine;
use super::frame::{Bytes, Frame, HEADER_LEN, Kind, SEGMENT_MAX};
use super::handover::HandedEngine;
use super::identity::Peer;
use super::plugin::Plugin;
use super::rng::Rng;
use super::stats::Took;
use super::stream::Body;
use super::time::Instant;
use super::{
    CarrierId, CarrierKind, Close, Input, JobId, LinkId, LocalId, Output, SpillRef, WireId,
};
use crate::codec;

mod crash;
mod peer;
mod reads;
mod several;
mod spill;
mod waits;
mod wires;

use wires::{Outbox, Parcel};

const MS: u64 = 1_000_000;
const DATA_FIRST: [u8; 8] = *b"\x83\x74\x02\x67\xff\xf2\0\0";
const META_FIRST: [u8; 8] = *b"\x83\x74\x02\x67\xff\xf1\0\0";

/// Something that will happen in the world.
#[derive(Debug)]
enum Event {
    Input(usize, Input),
    /// Bytes of a frame leave the sender's kernel.
    Arrive {
        pipe: u64,
        to: usize,
        parcel: Parcel,
    },
    Dialed {
        from: usize,
        wire: WireId,
        listener: SocketAddr,
    },
    ConnectLocal {
        node: usize,
        local: LocalId,
        link: LinkId,
    },
    /// A local socket takes or gives some bytes.
    Read {
        node: usize,
        local: LocalId,
    },
    /// What was ordered to be read from a socket comes.
    Brought {
        node: usize,
        local: LocalId,
    },
    Cut,
    Heal,
}

/// A TCP connection between the proxies.
#[derive(Debug)]
struct Pipe {
    ends: [(usize, WireId); 2],
    /// When the last frame in each direction arrives; keeps the order.
    last: [u64; 2],
}

/// A socket between a fake DRBD and its proxy.
#[derive(Debug, Default)]
struct Socket {
    first: [u8; 8],
    /// Which DRBD connection (generation) it belongs to.
    generation: u32,
    /// Bytes that DRBD still wants to send.
    to_send: VecDeque<u8>,
    closing: bool,
    eof_given: bool,
    got: Vec<u8>,
    got_fin: bool,
    reset: bool,
    reading: bool,
    skip: usize,
    /// Which of several connections it belongs to.
    number: usize,
}

struct World {
    seed: u64,
    rng: Rng,
    now: u64,
    queue: BTreeMap<(u64, u64), Event>,
    order: u64,
    engines: [Engine; 2],
    links: [LinkId; 2],
    /// All connections in their order; the first are those of `links`.
    numbers: [Vec<LinkId>; 2],
    pipes: BTreeMap<u64, Pipe>,
    pipe_of: BTreeMap<(usize, WireId), u64>,
    sockets: [BTreeMap<LocalId, Socket>; 2],
    /// Frames that the shell holds per lane.
    outbox: BTreeMap<(usize, WireId, u32), Outbox>,
    disk: BTreeMap<SpillRef, Vec<u8>>,
    /// Records and bytes that are being read, and the most of them so far.
    reads: (usize, usize),
    reads_peak: (usize, usize),
    refuse_local: bool,
    down: bool,
    faults: bool,
    memory_peak: [u64; 2],
    log: Vec<String>,
    /// Events that have happened, those of the clock included.
    steps: u64,
    /// What goes wrong or is changed once so many events have happened; in order.
    plan: VecDeque<(u64, crash::Trouble)>,
    crashes: u32,
    /// What the sockets of each connection must get, as far as it is known: checked at every write.
    expected: Vec<crash::Expected>,
    /// The spill disk takes nothing.
    disk_full: bool,
    /// A hand-over is under way.
    handing: [bool; 2],
    /// Data sockets are read by another thread: what may be read is promised first and comes later.
    far: bool,
    /// Reads that are ordered, with their bytes.
    ordered: [BTreeMap<LocalId, usize>; 2],
}

fn link_config(mine: usize) -> LinkConfig {
    numbered(mine, 0)
}

/// One of several connections, each with ports of its own.
fn numbered(mine: usize, number: u16) -> LinkConfig {
    let addr = |host: [u8; 4], port: u16| SocketAddr::from((host, port + number));
    let outside = [[192, 0, 2, 1], [192, 0, 2, 2]];
    LinkConfig {
        name: format!("r{number}-{}", ["b-a", "a-b"][mine]),
        inside: addr([127, 0, 0, 1], 7815),
        peer_outside: addr(outside[1 - mine], 7715),
        my_outside: addr(outside[mine], 7715),
        local_drbd: addr([127, 0, 0, 1], 7915),
        options: LinkOptions {
            memlimit_bytes: 4 << 20,
            ..LinkOptions::default()
        },
    }
}

impl World {
    fn new(seed: u64, options: &DaemonOptions) -> World {
        let now = Instant(0);
        let mut engines =
            [1u8, 2].map(|byte| Engine::new(now, options.clone(), [byte ^ seed as u8; 32]));
        let links = [0, 1].map(|mine| {
            engines[mine]
                .add_link(now, link_config(mine))
                .expect("the configuration is good")
        });
        World {
            numbers: links.map(|link| vec![link]),
            seed,
            rng: Rng::new(seed),
            now: 0,
            queue: BTreeMap::new(),
            order: 0,
            engines,
            links,
            pipes: BTreeMap::new(),
            pipe_of: BTreeMap::new(),
            sockets: [BTreeMap::new(), BTreeMap::new()],
            outbox: BTreeMap::new(),
            disk: BTreeMap::new(),
            reads: (0, 0),
            reads_peak: (0, 0),
            refuse_local: false,
            down: false,
            faults: false,
            memory_peak: [0; 2],
            log: Vec::new(),
            steps: 0,
            plan: VecDeque::new(),
            crashes: 0,
            expected: Vec::new(),
            disk_full: false,
            handing: [false; 2],
            far: seed % 2 == 1,
            ordered: [BTreeMap::new(), BTreeMap::new()],
        }
    }

    fn options(&mut self, change: impl Fn(&mut LinkOptions)) {
        for node in 0..2 {
            let mut options = self.engines[node]
                .config(self.links[node])
                .unwrap()
                .options
                .clone();
            change(&mut options);
            let name = self.engines[node]
                .config(self.links[node])
                .unwrap()
                .name
                .clone();
            self.engines[node]
                .set_options(Instant(self.now), &name, options)
                .unwrap();
        }
    }

    fn at(&mut self, delay_ms: u64, event: Event) {
        self.order += 1;
        self.queue.insert(
            (self.now + delay_ms * MS + self.order % 1000, self.order),
            event,
        );
    }

    fn later(&mut self, most_ms: u64, event: Event) {
        let delay = self.rng.below(most_ms + 1);
        self.at(delay, event);
    }

    /// Runs until `done` or until nothing happens before `limit_ms`.
    fn run(&mut self, limit_ms: u64, done: impl Fn(&World) -> bool) -> bool {
        let end = self.now + limit_ms * MS;
        loop {
            self.drain();
            if done(self) {
                return true;
            }
            let timeout = |engine: &Engine| engine.next_timeout().map(|at| at.0);
            let timer = [timeout(&self.engines[0]), timeout(&self.engines[1])];
            let event = self.queue.first_key_value().map(|((at, _), _)| *at);
            let next = [timer[0], timer[1], event].into_iter().flatten().min();
            let Some(next) = next.filter(|next| *next <= end) else {
                self.now = end;
                return done(self);
            };
            self.now = self.now.max(next);
            for (node, timer) in timer.into_iter().enumerate() {
                if timer.is_some_and(|at| at <= self.now) {
                    self.engines[node].handle(Instant(self.now), Input::Tick);
                    self.step();
                }
            }
            while let Some(entry) = self.queue.first_entry() {
                if entry.key().0 > self.now {
                    break;
                }
                let event = entry.remove();
                self.happen(event);
                self.drain();
                self.step();
            }
        }
    }

    fn feed(&mut self, node: usize, input: Input) {
        if let Input::SpillRead(_, data) = &input {
            let len = data.as_ref().map_or(0, Vec::len);
            self.reads = (self.reads.0 - 1, self.reads.1 - len);
        }
        self.engines[node].handle(Instant(self.now), input);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Input(node, input) => self.feed(node, input),
            Event::Arrive { pipe, to, parcel } => {
                if let Some(pipe) = self.pipes.get(&pipe) {
                    let (node, wire) = pipe.ends[to];
                    match parcel {
                        Parcel::Session(frame) => self.feed(node, Input::WireFrame(wire, frame)),
                        Parcel::Lane(lane, frame, pieces) => {
                            let len = frame.wire_len() + pieces * HEADER_LEN;
                            self.feed(node, Input::LaneReceived(wire, lane, len));
                            self.feed(node, Input::LaneFrame(wire, lane, frame));
                        }
                    }
                }
            }
            Event::Dialed {
                from,
                wire,
                listener,
            } => {
                if self.down {
                    self.feed(from, Input::WireDown(wire, "no route".into()));
                    return;
                }
                if !self.engines[from].trunks.wires.contains_key(&wire) {
                    return;
                }
                let to = 1 - from;
                let accepted =
                    self.engines[to].accept_wire(Instant(self.now), listener, Peer::default());
                self.order += 1;
                let id = self.order;
                self.pipe_of.insert((from, wire), id);
                self.pipe_of.insert((to, accepted), id);
                let ends = [(from, wire), (to, accepted)];
                self.pipes.insert(id, Pipe { ends, last: [0; 2] });
                self.feed(from, Input::WireUp(wire, Peer::default()));
            }
            Event::ConnectLocal { node, local, link } => {
                assert!(self.numbers[node].contains(&link));
                if self.refuse_local {
                    self.sockets[node].remove(&local);
                    self.feed(node, Input::LocalFailed(local, "refused".into()));
                } else {
                    self.feed(node, Input::LocalConnected(local));
                }
            }
            Event::Read { node, local } => self.read(node, local),
            Event::Brought { node, local } => self.brought(node, local),
            Event::Cut => self.cut(),
            Event::Heal => self.down = false,
        }
    }

    /// The network breaks all carriers.
    fn cut(&mut self) {
        let pipes = std::mem::take(&mut self.pipes);
        self.pipe_of.clear();
        self.outbox.clear();
        for pipe in pipes.into_values() {
            for (node, wire) in pipe.ends {
                // One end may learn of it late.
                let delay = self.rng.below(300);
                self.at(
                    delay,
                    Event::Input(node, Input::WireDown(wire, "cut".into())),
                );
            }
        }
    }

    fn cut_one(&mut self) {
        let ids: Vec<u64> = self.pipes.keys().copied().collect();
        let id = ids[self.rng.below(ids.len() as u64) as usize];
        if let Some(pipe) = self.pipes.remove(&id) {
            for (node, wire) in pipe.ends {
                self.pipe_of.remove(&(node, wire));
                self.outbox
                    .retain(|(at, on, _), _| (*at, *on) != (node, wire));
                self.at(1, Event::Input(node, Input::WireDown(wire, "lost".into())));
            }
        }
    }

    fn drain(&mut self) {
        loop {
            let mut idle = true;
            for node in 0..2 {
                while let Some(output) = self.engines[node].poll_output() {
                    idle = false;
                    self.perform(node, output);
                }
                let snapshot = self.engines[node].total_held;
                self.memory_peak[node] = self.memory_peak[node].max(snapshot);
            }
            if idle {
                return;
            }
        }
    }

    fn perform(&mut self, node: usize, output: Output) {
        match output {
            Output::Dial { wire, kind, link } => {
                let Some(config) = self.engines[node].config(link) else {
                    return;
                };
                let event = Event::Dialed {
                    from: node,
                    wire,
                    listener: config.peer_outside,
                };
                let delay = if kind == CarrierKind::Control { 5 } else { 20 };
                self.later(delay, event);
            }
            Output::SendSession(wire, frame) => self.transmit(node, wire, Parcel::Session(frame)),
            Output::Send {
                wire,
                lane,
                carrier,
                frame,
            } => {
                let frames = VecDeque::new();
                let outbox = self
                    .outbox
                    .entry((node, wire, lane))
                    .or_insert(Outbox { carrier, frames });
                outbox.frames.push_back((frame, 0, 0));
                self.flush(node, wire, lane);
            }
            Output::WantWrite(carrier) => {
                let entry = self.engines[node].carriers.get(&carrier);
                if let Some((wire, lane)) = entry.and_then(|entry| entry.wire) {
                    self.flush(node, wire, lane);
                }
            }
            Output::CloseLane(wire, lane) => {
                self.outbox.remove(&(node, wire, lane));
                let mut frame = Frame::message(Kind::LaneClose, Vec::new());
                frame.header.stream = lane;
                self.transmit(node, wire, Parcel::Session(frame));
            }
            Output::CloseWire(wire) => {
                self.outbox
                    .retain(|(at, on, _), _| (*at, *on) != (node, wire));
                if let Some(pipe) = self
                    .pipe_of
                    .remove(&(node, wire))
                    .and_then(|id| self.pipes.remove(&id))
                {
                    for (other, wire) in pipe.ends {
                        self.pipe_of.remove(&(other, wire));
                        let input = Input::WireDown(wire, "closed".into());
                        self.later(30, Event::Input(other, input));
                    }
                }
            }
            Output::ConnectLocal { local, link } => {
                self.sockets[node].insert(
                    local,
                    Socket {
                        skip: 8,
                        number: self.number_of(node, link),
                        ..Socket::default()
                    },
                );
                self.later(3, Event::ConnectLocal { node, local, link });
            }
            Output::WriteLocal(local, data) => {
                let Some(socket) = self.sockets[node].get_mut(&local) else {
                    return;
                };
                assert!(!socket.got_fin && !socket.reset, "write after the end");
                let mut rest: &[u8] = &data;
                if socket.skip > 0 {
                    socket.first.copy_from_slice(rest);
                    rest = &[];
                    socket.skip = 0;
                }
                let begin = socket.got.len();
                socket.got.extend_from_slice(rest);
                if let Some(expected) = self.expected.get(socket.number) {
                    let want = expected.of(node, &socket.first);
                    let same = want.get(begin..socket.got.len()) == Some(rest);
                    assert!(same, "seed {}: wrong bytes from {begin} on", self.seed);
                }
                let input = Input::LocalWritten(local, data.len());
                self.later(2, Event::Input(node, input));
            }
            Output::ShutdownLocal(local) => {
                if let Some(socket) = self.sockets[node].get_mut(&local) {
                    socket.got_fin = true;
                    // A DRBD whose peer closed closes too.
                    socket.closing = true;
                    self.later(3, Event::Read { node, local });
                }
            }
            Output::CloseLocal(local, how) => {
                self.called_off(node, local);
                if let Some(socket) = self.sockets[node].get_mut(&local) {
                    socket.reset |= how == Close::Reset;
                    socket.got_fin = true;
                    socket.eof_given = true;
                }
            }
            Output::WantRead(local) => {
                if let Some(socket) = self.sockets[node].get_mut(&local)
                    && !socket.reading
                {
                    socket.reading = true;
                    self.later(1, Event::Read { node, local });
                }
            }
            Output::Encode {
                job,
                spec,
                raw,
                sample: _,
                prefix,
            } => {
                let coded = codec::encode(&spec, &raw, &prefix);
                let took = Duration::from_micros(10 + raw.len() as u64 / 100);
                self.later(
                    30,
                    Event::Input(node, Input::Encoded(job, coded, Took::alone(took))),
                );
            }
            Output::Decode {
                job,
                codec,
                raw_len,
                crc,
                payload,
                prefix,
            } => {
                let result = codec::decode(codec, raw_len as usize, crc, &payload, &prefix);
                let took = Duration::from_micros(10);
                self.later(
                    10,
                    Event::Input(node, Input::Decoded(job, result, Took::alone(took))),
                );
            }
            Output::SpillWrite { job, payload } => self.spill(node, job, &payload),
            Output::SpillRead { job, from } => {
                let data = self
                    .disk
                    .get(&from)
                    .cloned()
                    .ok_or("no such record".to_string());
                let len = data.as_ref().map_or(0, Vec::len);
                let (records, bytes) = (self.reads.0 + 1, self.reads.1 + len);
                self.reads = (records, bytes);
                let (most, most_bytes) = self.reads_peak;
                self.reads_peak = (most.max(records), most_bytes.max(bytes));
                self.later(10, Event::Input(node, Input::SpillRead(job, data)));
            }
            Output::SpillFree(spill) => {
                assert!(self.disk.remove(&spill).is_some(), "freed once");
            }
            Output::Log(_, _, text) => {
                self.log
                    .push(format!("{} ms, node {node}: {text}", self.now / MS));
            }
        }
    }

    fn spill(&mut self, node: usize, job: JobId, payload: &Bytes) {
        self.order += 1;
        if self.disk_full {
            let failed = Err("no space left on device".to_string());
            self.later(20, Event::Input(node, Input::SpillWritten(job, failed)));
            return;
        }
        let spill = SpillRef {
            segment: node as u32,
            position: self.order as u32,
            len: payload.len() as u32,
        };
        self.disk.insert(spill, payload.to_vec());
        self.later(20, Event::Input(node, Input::SpillWritten(job, Ok(spill))));
    }

    fn number_of(&self, node: usize, link: LinkId) -> usize {
        let mut all = self.numbers[node].iter();
        all.position(|known| *known == link)
            .expect("it is configured")
    }

    /// A fake DRBD opens one socket and wants to send `data`.
    fn drbd_opens(&mut self, node: usize, first: [u8; 8], generation: u32, data: &[u8]) -> LocalId {
        self.drbd_opens_on(0, node, first, generation, data)
    }

    fn drbd_opens_on(
        &mut self,
        number: usize,
        node: usize,
        first: [u8; 8],
        generation: u32,
        data: &[u8],
    ) -> LocalId {
        let link = self.numbers[node][number];
        let local = self.engines[node].accept_local(Instant(self.now), link);
        let mut socket = Socket {
            number,
            first,
            generation,
            ..Socket::default()
        };
        socket.to_send.extend(first);
        socket.to_send.extend(data);
        self.sockets[node].insert(local, socket);
        self.later(1, Event::Read { node, local });
        local
    }

    /// The proxy of a node gives everything to a new process, as in an upgrade.
    fn hand_over(&mut self, node: usize) {
        if std::mem::replace(&mut self.handing[node], true) {
            return;
        }
        let crashes = self.crashes;
        self.recall(node);
        self.engines[node].freeze(Instant(self.now));
        let ready = self.run(10_000, |world| {
            if world.crashes > crashes {
                return true;
            }
            let engine = &world.engines[node];
            let mut streams = engine.links.values().flat_map(|l| l.streams.values());
            !engine.is_busy() && streams.all(|stream| stream.uncounted == 0)
        });
        self.check(ready, "jobs do not end");
        self.handing[node] = false;
        if self.crashes > crashes {
            // Whichever died: the hand-over has failed, and the one that is left goes on.
            self.engines[node].thaw(Instant(self.now));
            return;
        }
        let now = Instant(self.now);
        let old = &self.engines[node];
        let unwritten = |local: LocalId| {
            let (link, stream) = old.locals[&local];
            let rx = &old.links[&link].streams[&stream].rx;
            vec![0; (rx.handed - rx.delivered) as usize]
        };
        let (given, pieces) = old.give(now, unwritten);
        let text = serde_json::to_string(&given).expect("it is plain data");
        let given: HandedEngine = serde_json::from_str(&text).expect("it was written above");
        assert!(given.lengths().eq(pieces.iter().map(|piece| piece.len())));
        let seed = [self.order as u8; 32];
        let mut fresh = Engine::new(now, old.options.clone(), seed);
        fresh
            .take_over(now, &given, pieces)
            .expect("what was given can be taken");
        for (local, socket) in &mut self.sockets[node] {
            if old.locals.contains_key(local) && !fresh.locals.contains_key(local) {
                (socket.reset, socket.got_fin, socket.eof_given) = (true, true, true);
            }
        }
        let streams = fresh.links.values().flat_map(|link| link.streams.values());
        let kept: Vec<SpillRef> = streams
            .flat_map(|stream| stream.tx.iter())
            .filter_map(|(_, chunk)| match &chunk.body {
                Body::Spilled(record, _) => Some(*record),
                _ => None,
            })
            .collect();
        self.disk
            .retain(|record, _| record.segment != node as u32 || kept.contains(record));
        self.engines[node] = fresh;
    }

    fn live(&self) -> bool {
        self.engines.iter().all(|engine| {
            engine
                .links
                .values()
                .all(|link| link.state_name() == "ProxyConnected")
                && engine.links.values().all(|link| !link.bulk.is_empty())
        })
    }

    fn received(&self, node: usize, first: [u8; 8]) -> Option<&Socket> {
        self.sockets[node]
            .values()
            .rfind(|socket| socket.first == first)
    }

    /// DRBD at node 1 gets on its data socket what the other one sent.
    fn all_arrive(&mut self, ms: u64, data: &[u8]) {
        let done = self.run(ms, |w| {
            w.received(1, DATA_FIRST)
                .is_some_and(|socket| socket.got == data)
        });
        self.check(done, "not all bytes arrived");
    }

    fn check(&self, ok: bool, what: &str) {
        let at = Instant(self.now);
        assert!(
            ok,
            "seed {}: {what} at {} ms: {:#?} {:#?}",
            self.seed,
            self.now / MS,
            self.engines
                .iter()
                .map(|engine| engine.snapshot(at))
                .collect::<Vec<_>>(),
            self.log
        );
    }
}

fn noise_and_text(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut data = Vec::with_capacity(len + 4096);
    while data.len() < len {
        let piece = 1 + rng.below(100_000) as usize;
        match rng.below(3) {
            0 => data.extend((0..piece).map(|_| rng.next() as u8)),
            1 => data.extend(std::iter::repeat_n(0, piece)),
            _ => data.extend((0..piece).map(|i| (i / 7 % 97) as u8)),
        }
    }
    data.truncate(len);
    data
}

fn up(seed: u64, options: &DaemonOptions) -> World {
    let mut world = World::new(seed, options);
    let live = world.run(20_000, World::live);
    world.check(live, "no session");
    world
}

#[test]
fn bytes_arrive_in_order_and_the_end_after_them() {
    let mut world = up(1, &DaemonOptions::default());
    let data = noise_and_text(&mut Rng::new(5), 3_000_000);
    let local = world.drbd_opens(0, DATA_FIRST, 0, &data);
    let meta = world.drbd_opens(0, META_FIRST, 0, b"ping");
    let got = |world: &World, first, len| {
        world
            .received(1, first)
            .is_some_and(|socket| socket.got.len() == len)
    };
    assert!(world.run(60_000, |w| got(w, META_FIRST, 4)));
    for id in [local, meta] {
        world.sockets[0].get_mut(&id).unwrap().closing = true;
        world.at(0, Event::Read { node: 0, local: id });
    }
    let done = world.run(60_000, |w| {
        [DATA_FIRST, META_FIRST]
            .iter()
            .all(|f| w.received(1, *f).is_some_and(|s| s.got_fin))
            && w.engines
                .iter()
                .all(|engine| engine.links.values().all(|l| l.streams.is_empty()))
    });
    world.check(done, "not closed");
    let socket = world.received(1, DATA_FIRST).unwrap();
    assert!(socket.got == data && !socket.reset);
    assert!(!world.received(1, META_FIRST).unwrap().reset);
    assert_eq!(world.engines[0].total_held, 0);
}

#[test]
fn without_a_peer_drbd_is_reset_at_once() {
    let mut world = World::new(3, &DaemonOptions::default());
    world.down = true;
    let local = world.drbd_opens(0, DATA_FIRST, 0, b"");
    assert!(world.run(10, |w| w.sockets[0][&local].reset));
}

#[test]
fn a_refusing_drbd_at_the_far_end_resets_the_near_one() {
    let mut world = up(4, &DaemonOptions::default());
    world.refuse_local = true;
    let local = world.drbd_opens(0, DATA_FIRST, 0, b"hello");
    assert!(world.run(1000, |w| w.sockets[0][&local].reset));
    world.check(world.live(), "the session must stay");
}

#[test]
fn crossing_opens_leave_one_stream() {
    let mut world = up(5, &DaemonOptions::default());
    let a = world.drbd_opens(0, DATA_FIRST, 0, b"from a");
    let b = world.drbd_opens(1, DATA_FIRST, 1, b"from b");
    world.run(2000, |_| false);
    let dead = [world.sockets[0][&a].reset, world.sockets[1][&b].reset];
    assert_eq!(dead.iter().filter(|reset| **reset).count(), 1);
    for engine in &world.engines {
        assert!(engine.links.values().all(|link| link.streams.len() == 1));
    }
}

#[test]
fn after_session_hold_the_sockets_are_reset_and_a_new_session_begins() {
    let mut world = up(6, &DaemonOptions::default());
    let local = world.drbd_opens(0, DATA_FIRST, 0, b"abc");
    assert!(world.run(5000, |w| {
        w.received(1, DATA_FIRST).is_some_and(|s| s.got == b"abc")
    }));
    world.down = true;
    world.at(0, Event::Cut);
    world.run(24_000, |_| false);
    assert!(!world.sockets[0][&local].reset);
    world.run(3000, |_| false);
    assert!(world.sockets[0][&local].reset);
    assert!(world.sockets[1].values().all(|socket| socket.reset));
    world.down = false;
    assert!(world.run(20_000, World::live));
}

#[test]
fn a_silent_line_is_noticed_and_resumed_without_a_reset() {
    let mut world = up(7, &DaemonOptions::default());
    world.drbd_opens(0, DATA_FIRST, 0, b"abc");
    assert!(world.run(5000, |w| {
        w.received(1, DATA_FIRST).is_some_and(|s| s.got == b"abc")
    }));
    // Frames vanish, nobody is told.
    for pipe in std::mem::take(&mut world.pipes).into_values() {
        for (node, carrier) in pipe.ends {
            world.pipe_of.remove(&(node, carrier));
        }
    }
    world.run(12_000, |_| false);
    let link = &world.engines[0].links[&world.links[0]];
    assert_eq!((link.counters.resumes, link.state_name()), (1, "Connected"));
}

#[test]
fn history_finds_what_was_sent_long_before_also_after_cuts_and_upgrades() {
    let mut world = up(8, &DaemonOptions::default());
    let plugin = Plugin::parse(&["zstd", "level", "1", "history", "4M"]).unwrap();
    world.options(|options| {
        options.memlimit_bytes = 32 << 20;
        options.plugins = vec![plugin.clone()];
    });
    let mut rng = Rng::new(99);
    let block: Vec<u8> = (0..1_200_000).map(|_| rng.next() as u8).collect();
    let data = block.repeat(6);
    world.drbd_opens(0, DATA_FIRST, 0, &data);
    for step in 1..6 {
        let reached = world.run(60_000, |w| {
            w.received(1, DATA_FIRST)
                .is_some_and(|s| s.got.len() >= step * block.len())
        });
        assert!(reached, "step {step}");
        match step {
            2 => world.at(0, Event::Cut),
            3 => world.hand_over(0),
            4 => world.hand_over(1),
            _ => {}
        }
    }
    assert!(world.run(60_000, |w| {
        w.received(1, DATA_FIRST)
            .is_some_and(|s| s.got.len() == data.len())
    }));
    assert!(world.received(1, DATA_FIRST).unwrap().got == data);
    let counters = &world.engines[0].links[&world.links[0]].counters;
    // Once as it is, and once more after the upgrade of the sender.
    assert!(
        counters.coded_wire_bytes < 3 * block.len() as u64,
        "{} bytes on the line",
        counters.coded_wire_bytes
    );
    assert!(counters.chunks_by_codec[usize::from(super::plugin::CODEC_HISTORY)] > 3);
}

/// One random world: several DRBD connections after each other with data in both directions, cuts,
/// lost carriers, option and codec changes. Bytes that arrive are always a prefix of those sent; a
/// connection that is not reset delivers all of them.
fn swarm(seed: u64) {
    let mut rng = Rng::new(seed ^ 0xabcd);
    let spill = rng.below(2) == 0;
    let options = DaemonOptions {
        memory_max_bytes: 24 << 20,
        spill_limit_bytes: if spill { 64 << 20 } else { 0 },
        jobs_max: 1 + rng.below(4) as usize,
        ..DaemonOptions::default()
    };
    let mut world = up(seed, &options);
    // The larger one leaves room for a history worth the name.
    let memlimit_max = if seed % 4 == 1 { 16 } else { 4 };
    let memlimit = (1 + rng.below(memlimit_max)) << 20;
    let carriers = 1 + rng.below(4) as u32;
    world.options(|options| {
        options.memlimit_bytes = memlimit;
        options.bulk_carriers = carriers;
        if seed.is_multiple_of(3) {
            options.set("bwlimit", "2M").unwrap();
        }
        if seed.is_multiple_of(5) {
            options.dial = Dial::Always;
        }
    });
    world.faults = true;
    for generation in 0..3u32 {
        if !world.run(30_000, World::live) {
            world.check(false, "no session before a generation");
        }
        let node = rng.below(2) as usize;
        let len = 200_000 + rng.below(3_000_000) as usize;
        let mut data = noise_and_text(&mut rng, len);
        if rng.below(2) == 0 {
            data.extend_from_within(len / 4..);
        }
        let meta = noise_and_text(&mut rng, 40_000);
        let locals = [world.drbd_opens(node, DATA_FIRST, generation, &data), {
            world.drbd_opens(node, META_FIRST, generation, &meta)
        }];
        // The other DRBD answers on the same sockets.
        let opened = world.run(8000, |w| {
            w.engines.iter().all(|engine| {
                let streams = engine.links.values().flat_map(|link| link.streams.values());
                streams
                    .filter(|s| s.phase == super::link::StreamPhase::Open)
                    .count()
                    == 2
            })
        });
        world.check(opened, "not opened");
        let back = noise_and_text(&mut rng, 500_000);
        let far: Vec<LocalId> = {
            let link = &world.engines[1 - node].links[&world.links[1 - node]];
            link.streams.values().map(|stream| stream.local).collect()
        };
        for local in &far {
            let socket = world.sockets[1 - node].get_mut(local).unwrap();
            socket.generation = generation;
            socket.to_send.extend(&back);
            world.at(
                0,
                Event::Read {
                    node: 1 - node,
                    local: *local,
                },
            );
        }
        for _ in 0..rng.below(9) {
            world.run(rng.below(400), |_| false);
            match rng.below(6) {
                0 => {
                    world.down = true;
                    world.at(0, Event::Cut);
                    world.at(rng.below(4000), Event::Heal);
                }
                1 if !world.pipes.is_empty() => world.cut_one(),
                2 => {
                    let text = [
                        "lz4",
                        "zstd level 1",
                        "none",
                        "zlib level 1",
                        "auto",
                        "lzma level 1",
                        "zstd level 1 history 1M",
                        "zstd level 2 history 4M",
                    ][rng.below(8) as usize];
                    let words: Vec<&str> = text.split(' ').collect();
                    let plugin = Plugin::parse(&words).unwrap();
                    world.options(|options| options.plugins = vec![plugin.clone()]);
                }
                3 => {
                    let count = 1 + rng.below(4) as u32;
                    world.options(|options| options.bulk_carriers = count);
                }
                4 => {
                    let bytes = (1 + rng.below(memlimit_max)) << 20;
                    world.options(|options| options.memlimit_bytes = bytes);
                    let memory = ["4M", "9M", "24M"][rng.below(3) as usize];
                    world.engines[rng.below(2) as usize]
                        .set_daemon_limit(Instant(world.now), "memory-max", memory)
                        .unwrap();
                }
                // What lies on disk does not travel.
                _ if !spill => world.hand_over(rng.below(2) as usize),
                _ => {}
            }
        }
        let want = [&data, &meta];
        let done = world.run(120_000, |w| {
            let forth = far.iter().zip(want).all(|(local, _)| {
                let socket = &w.sockets[1 - node][local];
                let want = if socket.first == DATA_FIRST {
                    &data
                } else {
                    &meta
                };
                socket.got.len() == want.len()
            });
            forth
                && locals
                    .iter()
                    .all(|local| w.sockets[node][local].got.len() == back.len())
        });
        for local in &far {
            let socket = &world.sockets[1 - node][local];
            let want = if socket.first == DATA_FIRST {
                &data
            } else {
                &meta
            };
            world.check(want.starts_with(&socket.got), "wrong bytes forth");
            world.check(!socket.reset, "reset");
        }
        for local in &locals {
            world.check(
                back.starts_with(&world.sockets[node][local].got),
                "wrong bytes back",
            );
        }
        world.check(done, "not all bytes arrived");
        // Orderly in most worlds, by reset of one socket in the others.
        if rng.below(3) > 0 {
            for local in locals {
                world.sockets[node].get_mut(&local).unwrap().closing = true;
                world.at(0, Event::Read { node, local });
            }
        } else {
            let local = locals[rng.below(2) as usize];
            world.sockets[node].get_mut(&local).unwrap().reset = true;
            let input = Input::LocalFailed(local, "reset".into());
            world.at(0, Event::Input(node, input));
        }
        let empty = world.run(60_000, |w| {
            w.engines
                .iter()
                .all(|engine| engine.links.values().all(|l| l.streams.is_empty()))
        });
        world.check(empty, "streams stay");
    }
    for node in 0..2 {
        world.check(world.engines[node].total_held == 0, "memory stays");
        let peak = world.memory_peak[node];
        // One read and one decision may be under way when the limit is met.
        world.check(
            peak <= (memlimit_max << 20) + (3 << 20),
            "memory over its limit",
        );
    }
    world.run(5000, |_| false);
    world.check(world.disk.is_empty(), "records stay on the disk");
    world.check(
        world
            .engines
            .iter()
            .all(|e| e.running == 0 && e.spill_used == 0),
        "jobs stay",
    );
}

#[test]
fn random_worlds_deliver_every_byte_once_and_in_order() {
    for seed in 0..40 {
        swarm(seed);
    }
}

#[test]
fn a_flood_on_a_control_socket_gets_its_share_and_no_more() {
    let mut world = up(9, &DaemonOptions::default());
    world.options(|options| {
        options.set("bwlimit", "400000").unwrap();
    });
    let data = noise_and_text(&mut Rng::new(4), 2_000_000);
    world.drbd_opens(0, DATA_FIRST, 0, &data);
    world.drbd_opens(0, META_FIRST, 0, &data);
    let got = |w: &World, first| w.received(1, first).map_or(0, |socket| socket.got.len());
    world.run(10_000, |_| false);
    // A quarter of the rate and the burst at the start.
    let control = got(&world, META_FIRST);
    assert!((800_000..1_200_000).contains(&control), "{control}");
    assert!(got(&world, DATA_FIRST) > 1_000_000);
    let done = world.run(30_000, |w| got(w, META_FIRST) == data.len());
    world.check(done, "control stands still");
}

#[test]
fn a_hand_over_in_mid_stream_resets_nothing() {
    for seed in 200..220 {
        let mut world = up(seed, &DaemonOptions::default());
        let mut rng = Rng::new(seed);
        let data = noise_and_text(&mut rng, 2_000_000);
        let local = world.drbd_opens(0, DATA_FIRST, 0, &data);
        world.drbd_opens(0, META_FIRST, 0, b"x");
        let opened = world.run(8000, |w| {
            let open = super::link::StreamPhase::Open;
            w.engines.iter().all(|engine| {
                let mut links = engine.links.values();
                links.all(|l| l.streams.values().filter(|s| s.phase == open).count() == 2)
            })
        });
        world.check(opened, "not opened");
        world.run(rng.below(300), |_| false);
        for _ in 0..1 + rng.below(3) {
            world.hand_over(rng.below(2) as usize);
            world.run(rng.below(200), |_| false);
        }
        world.all_arrive(60_000, &data);
        world.check(!world.sockets[0][&local].reset, "reset");
    }
}

#[test]
fn a_hand_over_that_fails_goes_on_as_before() {
    let mut world = up(8, &DaemonOptions::default());
    let data = noise_and_text(&mut Rng::new(3), 1_000_000);
    world.drbd_opens(0, DATA_FIRST, 0, &data);
    world.run(100, |_| false);
    world.engines[0].freeze(Instant(world.now));
    world.run(2000, |_| false);
    world.engines[0].thaw(Instant(world.now));
    world.all_arrive(60_000, &data);
}

#[test]
fn a_crashed_proxy_resets_both_drbd_nodes_and_never_delivers_wrong_bytes() {
    for seed in 100..120 {
        let mut world = up(seed, &DaemonOptions::default());
        let mut rng = Rng::new(seed);
        let data = noise_and_text(&mut rng, 1_000_000);
        world.drbd_opens(0, DATA_FIRST, 0, &data);
        world.drbd_opens(0, META_FIRST, 0, b"x");
        world.run(20 + rng.below(300), |_| false);
        let dead = rng.below(2) as usize;
        let now = Instant(world.now);
        let seed_bytes = [77 ^ seed as u8; 32];
        let mut fresh = Engine::new(now, DaemonOptions::default(), seed_bytes);
        world.links[dead] = fresh.add_link(now, link_config(dead)).unwrap();
        world.numbers[dead] = vec![world.links[dead]];
        world.engines[dead] = fresh;
        // Its sockets die with it, as the kernel does it.
        for socket in world.sockets[dead].values_mut() {
            world_check_prefix(socket, &data);
        }
        world.sockets[dead].clear();
        world.ordered[dead].clear();
        world.queue.retain(|_, event| match event {
            Event::Input(node, _)
            | Event::Read { node, .. }
            | Event::Brought { node, .. }
            | Event::ConnectLocal { node, .. }
            | Event::Dialed { from: node, .. } => *node != dead,
            _ => true,
        });
        world.cut();
        let reset = world.run(20_000, |w| {
            w.sockets[1 - dead].values().all(|socket| socket.reset) && w.live()
        });
        world.check(reset, "sockets not reset after a crash");
        for socket in world.sockets[1 - dead].values() {
            world_check_prefix(socket, &data);
        }
    }
}

fn world_check_prefix(socket: &Socket, data: &[u8]) {
    if socket.first == DATA_FIRST && socket.skip == 0 {
        assert!(data.starts_with(&socket.got));
    }
}
