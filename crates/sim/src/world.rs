//! A cluster in one process: nodes that run the real core, disks, links and virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use lockstep_core::command::{Answer, Command, CommandError};
use lockstep_core::event::{
    BufId, CommandId, Input, LinkEnd, Output, Payload, RequestKind, Stream, Tag,
};
use lockstep_core::options::{Protocol, Quorum};
use lockstep_core::report::{Event, Level, Snapshot};
use lockstep_core::resource::{Resource, ResourceConfig};
use lockstep_core::time::Instant;
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire;

use crate::buffers::Buffers;
use crate::digest::digest_of;
use crate::disk::{BLOCK, Disk, Lose, Toll, Trouble, Where};
use crate::history::History;
use crate::marks::{self, Marks};
use crate::promises::View;
use crate::rng::Rng;
use crate::sometimes;
use crate::story::{self, Tail};

/// One millisecond in nanoseconds.
pub const MS: u64 = 1_000_000;
/// One second in nanoseconds.
pub const SECOND: u64 = 1_000 * MS;

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct Config {
    /// Everything random follows from it.
    pub seed: u64,
    /// How many nodes.
    pub nodes: usize,
    /// Protocol of all connections.
    pub protocol: Protocol,
    /// Volumes.
    pub volumes: u16,
    /// Blocks of 4 KiB of each volume.
    pub blocks: u64,
    /// Typical one-way delay of the network in nanoseconds.
    pub net_delay: u64,
    /// Typical time of a disk operation in nanoseconds.
    pub disk_delay: u64,
    /// Resync ceiling in KiB/s.
    pub resync_max_kib_s: u32,
    /// Print every event.
    pub trace: bool,
    /// Where chance comes from.
    pub weather: Weather,
    /// Bytes per second that one stream carries; none is without a limit.
    pub bandwidth: Option<u64>,
    /// Where the metadata of all disks lies.
    pub metadata: Where,
    /// The last so many nodes have no disk on purpose.
    pub diskless: usize,
    /// One direction in which packets take longer.
    pub slow: Option<SlowWire>,
    /// Handlers run for a while and may fail.
    pub handlers: bool,
    /// log2 of each node's bitmap block; 4 KiB where none is given.
    pub bitmap_shifts: Vec<u8>,
}

/// A direction in which packets take longer than elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowWire {
    /// Sender.
    pub from: usize,
    /// Receiver.
    pub to: usize,
    /// Only the data (0) or the control (1) stream.
    pub stream: Option<usize>,
    /// So many times longer.
    pub factor: u64,
}

/// Where the delays and other small chances of a world come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// One stream of numbers for everything: whatever happens changes all that follows.
    OneStream,
    /// Each disk, wire and node has numbers of its own that depend on the time only, so that a
    /// world stays almost the same when one of its faults is left out.
    ByPlace,
}

/// Who asks for chance.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// A node's process.
    Node(usize),
    /// A volume's data on a node.
    Disk(usize, usize),
    /// A volume's metadata on a node.
    Meta(usize, usize),
    /// A stream from a node to another.
    Wire(usize, usize, usize),
}

impl Place {
    /// Nodes are below 8, volumes below 8, streams below 2.
    fn number(self) -> usize {
        match self {
            Place::Node(node) => node,
            Place::Disk(node, volume) => 8 + node * 8 + volume,
            Place::Meta(node, volume) => 72 + node * 8 + volume,
            Place::Wire(from, to, stream) => 136 + (from * 8 + to) * 2 + stream,
        }
    }

    const COUNT: usize = 264;
}

impl Config {
    /// Two nodes, protocol C, one small volume.
    pub fn small(seed: u64) -> Self {
        Config {
            seed,
            nodes: 2,
            protocol: Protocol::C,
            volumes: 1,
            blocks: 16384,
            net_delay: MS / 5,
            disk_delay: MS / 5,
            resync_max_kib_s: 102_400,
            trace: false,
            weather: Weather::OneStream,
            bandwidth: None,
            metadata: Where::External,
            diskless: 0,
            slow: None,
            handlers: false,
            bitmap_shifts: Vec::new(),
        }
    }
}

/// A front end's request under way.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The volume.
    pub volume: u16,
    /// What.
    pub kind: RequestKind,
    /// First block.
    pub block: u64,
    /// Blocks.
    pub count: u64,
    /// Version of the first block; the others follow.
    pub value: u64,
    /// When.
    pub start: u64,
    /// The generation of the node's data then.
    pub(crate) generation: Option<u64>,
    pub(crate) payload: Option<Payload>,
    /// Its applications count as dead since another node took over.
    pub(crate) is_given_up: bool,
}

/// A command under way.
#[derive(Clone, Debug)]
pub struct Commanded {
    /// In words.
    pub text: String,
    /// When.
    pub start: u64,
}

/// A node: its disks stay, the rest lives from start to crash.
#[derive(Debug)]
pub struct Node {
    /// The core, while the node is up.
    pub resource: Option<Resource>,
    /// Counts starts; completions of an earlier life are void.
    pub life: u32,
    /// One per volume.
    pub disks: Vec<Disk>,
    pub(crate) buffers: Buffers,
    pub(crate) connecting: BTreeSet<usize>,
    pub(crate) links: BTreeMap<u64, usize>,
    /// Requests of front ends that went well, in all of its lives.
    pub(crate) served: u64,
    /// Requests of front ends that were not completed.
    pub requests: BTreeMap<u64, Asked>,
    /// Commands that were not answered.
    pub commands: BTreeMap<u64, Commanded>,
    /// Since then its disks work and its requests are not suspended, as a checker saw it.
    pub(crate) works_since: u64,
    /// Results of the last commands.
    pub answers: BTreeMap<u64, Result<Answer, CommandError>>,
    pub(crate) timer_at: u64,
    /// The process stands still, or stood, from then until then; everything that comes meanwhile waits.
    pub(crate) frozen_from: u64,
    pub(crate) frozen_until: u64,
    /// When it stood still before that, in this life.
    pub(crate) frozen_before: Vec<(u64, u64)>,
    /// The next link's news comes so much later here.
    pub(crate) late_link: Option<u64>,
    /// How far the node's clock is ahead of the world's.
    pub(crate) skew: u64,
    /// The last state lines, for failures.
    pub log: VecDeque<LogLine>,
    /// What the core's state amounts to; none after a change.
    view: Option<View>,
}

/// A line of a node's log; put into words only when somebody reads it.
#[derive(Clone, Debug)]
pub struct LogLine {
    /// When.
    pub at: u64,
    /// How bad.
    pub level: Level,
    /// The connection it is about.
    pub peer: Option<NodeId>,
    /// The volume it is about.
    pub volume: Option<VolumeNr>,
    /// The text.
    pub text: String,
}

impl std::fmt::Display for LogLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.level)?;
        if let Some(peer) = self.peer {
            write!(f, " peer {}", name(usize::from(peer.0)))?;
        }
        if let Some(volume) = self.volume {
            write!(f, " volume {volume}")?;
        }
        write!(f, ": {}", self.text)
    }
}

/// First version with writes that are durable by themselves.
const WITH_DURABLE_WRITES: u32 = 95;

/// Most volumes of a world.
pub const MAX_VOLUMES: usize = 4;

#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) at: u64,
    /// None is the end of the stream.
    pub(crate) bytes: Option<Vec<u8>>,
    pub(crate) payload: Option<Vec<u64>>,
}

#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) queue: VecDeque<Message>,
    pub(crate) scheduled: bool,
    pub(crate) last: u64,
    pub(crate) stalled_until: u64,
    /// When the last byte so far has left the sender, if the bandwidth is limited.
    pub(crate) busy_until: u64,
    /// The network broke the link: nothing that is sent from now on arrives.
    pub(crate) cut: bool,
}

/// An established pair of streams.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) ends: [usize; 2],
    pub(crate) lives: [u32; 2],
    /// When each side was told; `u64::MAX` before.
    pub(crate) up: [bool; 2],
    pub(crate) closed: [bool; 2],
    /// The end of its streams was sent by this side.
    pub(crate) ended: [bool; 2],
    /// By sender (0, 1), by stream (data, control).
    pub(crate) wires: [[Wire; 2]; 2],
    /// What each side has received and not answered for good.
    pub(crate) received: [VecDeque<crate::acks::Received>; 2],
    /// What each side has received and heard no peer ack of.
    pub(crate) untold: [crate::acks::Untold; 2],
    /// What each side has asked for and got no answer to.
    pub(crate) open: [crate::limits::Open; 2],
    /// It was reset: some packets are missing.
    pub(crate) broken: bool,
    pub(crate) dead: bool,
}

/// What happens later.
#[derive(Debug)]
pub(crate) enum Ev {
    Timer {
        node: usize,
        life: u32,
    },
    Disk {
        node: usize,
        life: u32,
        volume: usize,
        id: u64,
    },
    Meta {
        node: usize,
        life: u32,
        volume: usize,
        id: u64,
    },
    Input {
        node: usize,
        life: u32,
        input: Box<Input>,
    },
    /// An input that waited for a process that stood still.
    Feed {
        node: usize,
        life: u32,
        input: Box<Input>,
    },
    LinkUp {
        link: u64,
        side: usize,
    },
    Deliver {
        link: u64,
        side: usize,
        stream: usize,
    },
    Connect {
        a: usize,
        b: usize,
    },
}

/// An entry of the calendar; the event itself stays in its slot, so that the heap moves little.
pub(crate) struct Scheduled {
    at: u64,
    order: u64,
    slot: u32,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// The cluster.
pub struct World {
    /// What it is made of.
    pub config: Config,
    /// Virtual time in nanoseconds.
    pub now: u64,
    /// Chance.
    pub rng: Rng,
    /// By place: the time slice of the last draw and the draws in it.
    draws: Vec<(u64, u64)>,
    local: Rng,
    /// The last lines of each node's trace, if they are kept.
    pub tail: Option<Tail>,
    /// Rare paths that were reached.
    pub marks: Marks,
    /// The node whose disks fail, once one has.
    pub bad_node: Option<usize>,
    /// The operator answers `fence-peer`: node, its life, the peer, and the call.
    pub fence_calls: Vec<(usize, u32, usize, Tag)>,
    /// There is an operator who does.
    pub fences: bool,
    /// A state changed since the last look at who is Primary.
    changed: bool,
    /// The trouble is over: no handler fails any more.
    pub handlers_behave: bool,
    /// The marks are compared with the raw images at every metadata write.
    pub watches: bool,
    /// What nodes rely on, as the checkers saw it last.
    pub(crate) seen: crate::promises::Seen,
    /// Front ends read at once what was acknowledged; what they are about to read.
    pub(crate) read_back: Option<Vec<(usize, Asked)>>,
    /// A flush reaches the peers; those of 8.4 answer none.
    pub flushes_peers: bool,
    /// A write that is to be durable goes as a write and a flush: others come between the two.
    pub fua_is_two: bool,
    /// Nobody writes without a majority.
    pub wants_majority: bool,
    /// Times that the configuration names.
    pub(crate) limits: crate::limits::Limits,
    /// Blocks that a disk silently spoiled, with the node that did it.
    pub spoiled: BTreeMap<(u16, u64), usize>,
    pub(crate) heap: BinaryHeap<Reverse<Scheduled>>,
    events: Vec<Option<Ev>>,
    free_events: Vec<u32>,
    pub(crate) order: u64,
    /// The nodes.
    pub nodes: Vec<Node>,
    pub(crate) links: BTreeMap<u64, Link>,
    pub(crate) next_link: u64,
    pub(crate) next_id: u64,
    pub(crate) next_value: u64,
    /// Directions (from, to) in which nothing passes.
    pub blocked: BTreeSet<(usize, usize)>,
    /// Two generations of data are made on purpose.
    pub(crate) branches: bool,
    /// Payloads from one node to another that will arrive changed.
    pub(crate) spoils: BTreeMap<(usize, usize), u32>,
    pub(crate) connect_pending: BTreeSet<(usize, usize)>,
    /// The oracle.
    pub history: History,
    /// What went wrong first.
    pub violation: Option<String>,
    /// Counts packets, for tests that cut a story at each of them.
    pub trap: crate::cuts::Trap,
    /// Hash over everything that happened.
    pub fingerprint: u64,
    /// Events so far.
    pub steps: u64,
    /// The present second, and the events before it.
    pub(crate) second: (u64, u64),
    /// Blocks that resyncs have sent.
    pub(crate) copied: u64,
    /// Packets by name, for the report.
    pub packets: u64,
    /// Writes acknowledged.
    pub acked: u64,
}

pub(crate) fn id(node: usize) -> NodeId {
    NodeId(node as u8)
}

pub(crate) fn stream_index(stream: Stream) -> usize {
    match stream {
        Stream::Data => 0,
        Stream::Control => 1,
    }
}

impl World {
    /// A cluster of fresh disks; no node is up yet.
    pub fn new(config: Config) -> Self {
        assert!(usize::from(config.volumes) <= MAX_VOLUMES);
        let nodes = (0..config.nodes)
            .map(|n| Node {
                resource: None,
                life: 0,
                disks: (0..config.volumes)
                    .map(|_| {
                        let peers = config.nodes as u8 - 1;
                        let shift = config.bitmap_shifts.get(n).copied();
                        Disk::new(n, config.blocks, peers, config.metadata, shift)
                    })
                    .collect(),
                buffers: Buffers::default(),
                connecting: BTreeSet::new(),
                links: BTreeMap::new(),
                requests: BTreeMap::new(),
                commands: BTreeMap::new(),
                served: 0,
                works_since: 0,
                answers: BTreeMap::new(),
                timer_at: u64::MAX,
                frozen_from: 0,
                frozen_until: 0,
                frozen_before: Vec::new(),
                late_link: None,
                skew: 0,
                log: VecDeque::new(),
                view: None,
            })
            .collect();
        World {
            now: 1,
            rng: Rng::new(config.seed),
            draws: vec![(0, 0); Place::COUNT],
            local: Rng::new(0),
            tail: None,
            marks: Marks::default(),
            bad_node: None,
            fence_calls: Vec::new(),
            fences: false,
            changed: false,
            branches: false,
            handlers_behave: true,
            watches: false,
            seen: crate::promises::Seen::of(config.nodes),
            read_back: None,
            flushes_peers: true,
            fua_is_two: false,
            wants_majority: false,
            limits: Default::default(),
            spoiled: BTreeMap::new(),
            heap: BinaryHeap::new(),
            events: Vec::new(),
            free_events: Vec::new(),
            order: 0,
            nodes,
            links: BTreeMap::new(),
            next_link: 1,
            next_id: 1,
            next_value: 1,
            blocked: BTreeSet::new(),
            spoils: BTreeMap::new(),
            connect_pending: BTreeSet::new(),
            history: History::default(),
            violation: None,
            trap: Default::default(),
            fingerprint: 0xcbf2_9ce4_8422_2325,
            steps: 0,
            second: (0, 0),
            copied: 0,
            packets: 0,
            acked: 0,
            config,
        }
    }

    pub(crate) fn at(&mut self, delay: u64, ev: Ev) {
        self.order += 1;
        let slot = match self.free_events.pop() {
            Some(slot) => {
                self.events[slot as usize] = Some(ev);
                slot
            }
            None => {
                self.events.push(Some(ev));
                self.events.len() as u32 - 1
            }
        };
        self.heap.push(Reverse(Scheduled {
            at: self.now.saturating_add(delay),
            order: self.order,
            slot,
        }));
    }

    /// The numbers for a place at this time.
    pub(crate) fn chance(&mut self, place: Place) -> &mut Rng {
        if self.config.weather == Weather::OneStream {
            return &mut self.rng;
        }
        let place = place.number();
        let slice = self.now / (MS / 20);
        let (last, count) = &mut self.draws[place];
        if *last != slice {
            (*last, *count) = (slice, 0);
        }
        *count += 1;
        let seed = crate::rng::mixed(&[self.config.seed, place as u64, slice, *count]);
        self.local = Rng::new(seed);
        &mut self.local
    }

    /// A time that something takes at a place.
    pub(crate) fn delay(&mut self, place: Place, typical: u64) -> u64 {
        self.chance(place).delay(typical)
    }

    /// How long a packet is under way.
    pub(crate) fn wire_delay(&mut self, from: usize, to: usize, stream: usize) -> u64 {
        let slow = self
            .config
            .slow
            .filter(|s| (s.from, s.to) == (from, to) && s.stream.is_none_or(|only| only == stream));
        let typical = self.config.net_delay * slow.map_or(1, |s| s.factor);
        self.delay(Place::Wire(from, to, stream), typical)
    }

    pub(crate) fn mix(&mut self, value: u64) {
        self.fingerprint = (self.fingerprint ^ value).wrapping_mul(0x0100_0000_01b3);
    }

    /// Somebody reads the trace.
    pub(crate) fn is_traced(&self) -> bool {
        self.config.trace || self.tail.is_some()
    }

    /// A line of the trace; the text is made only if somebody reads it.
    pub fn trace(&mut self, node: usize, text: impl FnOnce() -> String) {
        if !self.is_traced() {
            return;
        }
        let line = format!(
            "{:>12.6}  {}  {}",
            self.now as f64 / 1e9,
            name(node),
            text()
        );
        if self.config.trace {
            println!("{line}");
        }
        if let Some(tail) = &mut self.tail {
            tail.push(node, line);
        }
    }

    /// A rare path was reached.
    pub fn reached(&mut self, mark: u32) {
        self.marks.set(mark);
    }

    /// The first violation counts.
    pub fn fail(&mut self, text: impl Into<String>) {
        if self.violation.is_none() {
            let text = text.into();
            if self.config.trace {
                println!("{:>12.6}  VIOLATION  {text}", self.now as f64 / 1e9);
            }
            self.violation = Some(text);
        }
    }

    /// Nodes with disks.
    pub fn storage(&self) -> std::ops::Range<usize> {
        0..self.nodes.len() - self.config.diskless
    }

    /// The node has disks.
    pub fn has_disk(&self, node: usize) -> bool {
        self.storage().contains(&node)
    }

    /// The node is up.
    pub fn is_up(&self, node: usize) -> bool {
        self.nodes[node].resource.is_some()
    }

    /// The node's state, if it is up.
    pub fn snapshot(&self, node: usize) -> Option<Snapshot> {
        self.nodes[node].resource.as_ref().map(Resource::snapshot)
    }

    /// The gist of the node's state, if it is up; made anew only after a change.
    pub fn view(&mut self, node: usize) -> Option<View> {
        let n = &mut self.nodes[node];
        let resource = n.resource.as_ref()?;
        if n.view.is_none() {
            let snapshot = resource.snapshot();
            marks::see_state(&mut self.marks, &snapshot);
            let storage = self.config.nodes - self.config.diskless;
            n.view = Some(View::of(node, &snapshot, storage));
        }
        n.view
    }

    // Life of nodes.

    /// The process starts; the operator's commands are still to come.
    pub fn start(&mut self, node: usize, options: lockstep_core::options::ResourceOptions) {
        assert!(!self.is_up(node));
        self.flushes_peers = options.protocol_max > 101;
        self.fua_is_two = options.protocol_max < WITH_DURABLE_WRITES;
        self.wants_majority = options.quorum == Quorum::Majority;
        self.seen.copies = crate::promises::copies(&options);
        let seed = self.chance(Place::Node(node)).bits();
        let n = &mut self.nodes[node];
        n.life += 1;
        n.resource = Some(Resource::new(
            ResourceConfig {
                name: "r0".into(),
                node_id: id(node),
                options,
            },
            seed,
        ));
        n.timer_at = u64::MAX;
        n.view = None;
        #[cfg(feature = "planted")]
        if let Some(resource) = n.resource.as_mut() {
            resource.plant(crate::planted::present());
        }
        self.trace(node, || "== starts".into());
    }

    /// The node dies.
    pub fn crash(&mut self, node: usize, lose: Lose) {
        if !self.is_up(node) {
            return;
        }
        self.trace(node, || format!("== crash, loses {lose:?}"));
        let now = self.now;
        self.seen.forget(node);
        let n = &mut self.nodes[node];
        n.resource = None;
        n.view = None;
        n.life += 1;
        n.buffers.clear();
        n.connecting.clear();
        n.commands.clear();
        let requests = std::mem::take(&mut n.requests);
        n.frozen_until = 0;
        n.frozen_before.clear();
        let links: Vec<u64> = std::mem::take(&mut n.links).into_keys().collect();
        for volume in 0..self.nodes[node].disks.len() {
            let mut rng = self.chance(Place::Disk(node, volume)).clone();
            let toll = self.nodes[node].disks[volume].crash(lose, &mut rng);
            if self.config.weather == Weather::OneStream {
                self.rng = rng;
            }
            self.mark_crash(lose, toll);
        }
        for asked in requests.into_values() {
            self.abandon(&asked, now);
        }
        for link in links {
            // A dead process closes its sockets; a node without power just falls silent.
            self.close(link, node, false, lose == Lose::Unflushed);
        }
    }

    fn mark_crash(&mut self, lose: Lose, toll: Toll) {
        sometimes!(self.marks, toll.torn, "crash-tears-write");
        sometimes!(self.marks, toll.meta, "crash-cuts-metadata");
        let cut = lose == Lose::Unflushed;
        sometimes!(self.marks, cut && toll.lost, "power-cut-loses-writes");
        sometimes!(self.marks, cut && toll.lucky, "power-cut-loses-nothing");
    }

    /// The process stands still for a while, as under a debugger or on a paused guest. What comes
    /// meanwhile is for the end of it, so one that stands still already goes on at its time.
    pub fn freeze(&mut self, node: usize, time: u64) {
        if self.nodes[node].frozen_until > self.now {
            return;
        }
        self.trace(node, || {
            format!("== the process stands still for {} ms", time / MS)
        });
        let n = &mut self.nodes[node];
        if n.frozen_until > 0 {
            n.frozen_before.push((n.frozen_from, n.frozen_until));
        }
        (n.frozen_from, n.frozen_until) = (self.now, self.now + time);
    }

    /// The disk works again.
    pub fn cure(&mut self, node: usize, volume: u16) {
        let trouble = &mut self.nodes[node].disks[usize::from(volume)].trouble;
        *trouble = Trouble {
            happened: trouble.happened,
            ..Trouble::default()
        };
        self.nodes[node].disks[usize::from(volume)].answers_since = self.now;
        self.unhang(node, usize::from(volume));
    }

    /// The node's clock jumps ahead.
    pub fn jump(&mut self, node: usize, time: u64) {
        self.trace(node, || {
            format!("== the clock jumps ahead by {} ms", time / MS)
        });
        self.nodes[node].skew += time;
        self.nodes[node].timer_at = u64::MAX;
        self.arm(node);
    }

    // The border.

    /// Feeds a node.
    pub fn input(&mut self, node: usize, input: Input) {
        let frozen_until = self.nodes[node].frozen_until;
        if frozen_until > self.now {
            let life = self.nodes[node].life;
            self.at(
                frozen_until - self.now,
                Ev::Feed {
                    node,
                    life,
                    input: Box::new(input),
                },
            );
            return;
        }
        if self.is_traced()
            && let Some(text) = story::input(&input)
        {
            self.trace(node, || text);
        }
        crate::acks::before(self, node, &input);
        let now = Instant(self.now + self.nodes[node].skew);
        let Some(resource) = self.nodes[node].resource.as_mut() else {
            return;
        };
        resource.handle(now, input);
        while let Some(output) = self.nodes[node]
            .resource
            .as_mut()
            .and_then(Resource::poll_output)
        {
            self.output(node, output);
        }
        self.arm(node);
    }

    fn arm(&mut self, node: usize) {
        let now = self.now;
        let n = &mut self.nodes[node];
        let Some(next) = n.resource.as_ref().and_then(Resource::next_timeout) else {
            return;
        };
        let at = next.0.saturating_sub(n.skew).max(now);
        if at < n.timer_at {
            n.timer_at = at;
            let life = n.life;
            self.at(at - now, Ev::Timer { node, life });
        }
    }

    fn output(&mut self, node: usize, output: Output) {
        let life = self.nodes[node].life;
        match output {
            Output::OpenDisk { tag, volume, .. } => {
                let disk = &mut self.nodes[node].disks[usize::from(volume.0)];
                let left = disk.abandoned.len() + disk.abandoned_meta.len();
                let result = if disk.open {
                    Err("the disk is open already".to_string())
                } else if left > 0 {
                    disk.trouble.happened = true;
                    Err("operations of its last use may still happen".to_string())
                } else {
                    disk.opened(self.now);
                    Ok(disk.info())
                };
                let delay = self.delay(Place::Node(node), self.config.disk_delay);
                let input = Box::new(Input::DiskOpened { tag, result });
                self.at(delay, Ev::Input { node, life, input });
            }
            Output::ProbeDisk { tag, volume } => {
                let result = Ok(self.nodes[node].disks[usize::from(volume.0)].info());
                let delay = self.delay(Place::Node(node), self.config.disk_delay);
                let input = Box::new(Input::DiskOpened { tag, result });
                self.at(delay, Ev::Input { node, life, input });
            }
            Output::LookAtDisk { tag, volume } => self.look_at_disk(node, life, tag, volume),
            Output::NoteCache { volume, untold } => {
                let disk = &mut self.nodes[node].disks[usize::from(volume.0)];
                disk.note.write(untold);
            }
            Output::CloseDisk { tag, volume } => {
                let disk = &mut self.nodes[node].disks[usize::from(volume.0)];
                disk.closing = Some(tag);
                self.try_close(node, usize::from(volume.0));
            }
            Output::AbandonDisk { volume } => self.abandon_disk(node, usize::from(volume.0)),
            Output::Disk { tag, volume, op } => self.disk_output(node, tag, volume, op),
            Output::Meta { tag, volume, op } => self.meta_output(node, tag, volume, op),
            Output::Send {
                peer,
                link,
                stream,
                volume,
                packet,
                payload,
                integrity,
                want_sent,
            } => {
                let content = payload.map(|p| self.content(node, p));
                let mut packet = packet;
                if let (Some(alg), Some(content)) = (integrity, &content) {
                    let digest = digest_of(alg.name(), content);
                    packet.set_integrity(wire::Digest::new(&digest).unwrap_or_default());
                }
                self.send(node, peer, link, stream, volume, &packet, content);
                if let Some(tag) = want_sent {
                    let place = Place::Wire(node, usize::from(peer.0), stream_index(stream));
                    let delay = self.delay(place, self.config.net_delay);
                    let input = Box::new(Input::Sent { tag });
                    self.at(delay, Ev::Input { node, life, input });
                }
            }
            Output::Connect { peer } => {
                self.trace(node, || {
                    format!("wants a connection to {}", name(usize::from(peer.0)))
                });
                self.nodes[node].connecting.insert(usize::from(peer.0));
                self.consider_connect(node, usize::from(peer.0));
            }
            Output::StopConnecting { peer } => {
                self.trace(node, || {
                    format!(
                        "wants no connection to {} any more",
                        name(usize::from(peer.0))
                    )
                });
                self.nodes[node].connecting.remove(&usize::from(peer.0));
            }
            Output::CloseLink { link, end, .. } => {
                self.trace(node, || format!("closes link {}", link.0));
                self.nodes[node].links.remove(&link.0);
                self.close(link.0, node, end != LinkEnd::AtOnce, false);
            }
            Output::Complete { id, result } => self.complete(node, id, result),
            Output::Answer { id, result } => {
                self.trace(node, || {
                    format!("command {} ends: {}", id.0, story::answer(&result))
                });
                sometimes!(self.marks, result.is_err(), "command-refused");
                let Some(asked) = self.nodes[node].commands.remove(&id.0) else {
                    self.fail(format!("command {} was answered twice", id.0));
                    return;
                };
                crate::promises::answered(self, node, &asked, result.as_ref().ok());
                self.nodes[node].answers.insert(id.0, result);
            }
            Output::Digest {
                tag,
                algorithm,
                payload,
            } => {
                let content = self.content(node, payload);
                let digest = digest_of(&algorithm, &content);
                let delay = self.delay(Place::Node(node), self.config.disk_delay / 4);
                let input = Box::new(Input::DigestDone { tag, digest });
                self.at(delay, Ev::Input { node, life, input });
            }
            Output::Copy { from, to } => {
                let content = self.content(node, from);
                self.fill(node, to, &content);
            }
            Output::Handler {
                tag, name, peer, ..
            } => self.run_handler(node, tag, name, peer),
            Output::Release { buf } => self.release(node, buf),
            Output::Event(Event::Log {
                level,
                peer,
                volume,
                text,
            }) => {
                self.watch_log(node, &text);
                crate::calm::nothing_differs(self, node, &text);
                if let Some(peer) = peer {
                    crate::limits::strikes(self, node, peer, &text);
                    self.seen.log_line(node, peer, &text);
                    if level == Level::Error {
                        crate::calm::nobody_is_misunderstood(self, node, peer, &text);
                    }
                }
                marks::see_log(&mut self.marks, &text);
                let line = LogLine {
                    at: self.now,
                    level,
                    peer,
                    volume,
                    text,
                };
                self.trace(node, || format!("log: {line}"));
                let log = &mut self.nodes[node].log;
                log.push_back(line);
                if log.len() > 40 {
                    log.pop_front();
                }
            }
            Output::Event(_) => {
                self.nodes[node].view = None;
                self.changed = true;
            }
        }
    }

    /// Words that must never be logged in a world whose operator makes no second generation.
    fn watch_log(&mut self, node: usize, text: &str) {
        const WORDS: [&str; 6] = [
            "split brain",
            "Split brain",
            "split-brain",
            "Split-Brain",
            "unrelated",
            "Unrelated",
        ];
        if !self.branches && WORDS.iter().any(|word| text.contains(word)) {
            self.fail(format!("{} reports \"{text}\" without cause", name(node)));
        }
    }

    // Buffers.

    pub(crate) fn new_buffer(&mut self, node: usize, content: Vec<u64>) -> Payload {
        let len = (content.len() as u64 * BLOCK) as u32;
        let buf = self.nodes[node].buffers.add(content);
        Payload {
            buf: BufId(buf),
            offset: 0,
            len,
        }
    }

    pub(crate) fn content(&mut self, node: usize, payload: Payload) -> Vec<u64> {
        let (from, len) = span(payload);
        match self.nodes[node].buffers.get(payload.buf.0) {
            Some(content) => content[from..from + len].to_vec(),
            None => {
                self.fail(format!(
                    "{} uses buffer {} after its release",
                    name(node),
                    payload.buf.0
                ));
                vec![0; len]
            }
        }
    }

    pub(crate) fn fill(&mut self, node: usize, payload: Payload, content: &[u64]) {
        let (from, len) = span(payload);
        assert_eq!(len, content.len());
        if let Some(buffer) = self.nodes[node].buffers.get(payload.buf.0) {
            buffer[from..from + len].copy_from_slice(content);
        } else {
            self.fail(format!(
                "{} fills buffer {} after its release",
                name(node),
                payload.buf.0
            ));
        }
    }

    pub(crate) fn hold(&mut self, node: usize, buf: BufId) {
        self.nodes[node].buffers.hold(buf.0);
    }

    pub(crate) fn release(&mut self, node: usize, buf: BufId) {
        if !self.nodes[node].buffers.release(buf.0) {
            self.fail(format!("{} releases buffer {} twice", name(node), buf.0));
        }
    }

    /// Buffers that nobody released yet.
    pub fn buffers(&self, node: usize) -> usize {
        self.nodes[node].buffers.len()
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    // Commands.

    /// Gives a node a command; its answer appears in `answers`.
    pub fn command(&mut self, node: usize, command: Command) -> u64 {
        let id = self.next();
        let text = format!("{command:?}");
        let start = self.now;
        self.nodes[node]
            .commands
            .insert(id, Commanded { text, start });
        self.input(
            node,
            Input::Command {
                id: CommandId(id),
                command,
            },
        );
        id
    }

    // Time.

    /// When the next thing happens.
    pub fn next_at(&self) -> u64 {
        self.heap.peek().map_or(u64::MAX, |s| s.0.at)
    }

    /// The next thing happens. False if there is none before `end`.
    pub fn step(&mut self, end: u64) -> bool {
        if self.violation.is_some() || self.next_at() > end {
            return false;
        }
        let Some(Reverse(Scheduled { at, slot, .. })) = self.heap.pop() else {
            return false;
        };
        self.free_events.push(slot);
        let Some(ev) = self.events[slot as usize].take() else {
            return false;
        };
        self.now = at;
        self.steps += 1;
        self.check_pace();
        self.mix(at);
        match ev {
            Ev::Timer { node, life } => {
                // One that was set for a later time than the present one is void.
                let n = &self.nodes[node];
                if n.life == life && n.timer_at == at {
                    self.nodes[node].timer_at = u64::MAX;
                    let skew = self.nodes[node].skew;
                    let due = self.nodes[node]
                        .resource
                        .as_ref()
                        .and_then(Resource::next_timeout)
                        .is_some_and(|t| t.0 <= at + skew);
                    if due {
                        self.input(node, Input::Timeout);
                        self.check_timer(node);
                    } else {
                        self.arm(node);
                    }
                }
            }
            Ev::Disk {
                node,
                life,
                volume,
                id,
            } => {
                if self.nodes[node].life == life {
                    self.disk_done(node, volume, id);
                }
            }
            Ev::Meta {
                node,
                life,
                volume,
                id,
            } => {
                if self.nodes[node].life == life {
                    self.meta_done(node, volume, id);
                }
            }
            Ev::Input { node, life, input } => {
                if self.nodes[node].life == life {
                    match *input {
                        Input::LinkDown { link, reason, .. } => {
                            self.link_down(link.0, node, reason)
                        }
                        input => self.input(node, input),
                    }
                }
            }
            Ev::Feed { node, life, input } => {
                if self.nodes[node].life == life {
                    self.input(node, *input);
                }
            }
            Ev::LinkUp { link, side } => self.link_up(link, side),
            Ev::Deliver { link, side, stream } => self.deliver(link, side, stream),
            Ev::Connect { a, b } => self.connect(a, b),
        }
        if std::mem::take(&mut self.changed) && self.config.weather == Weather::ByPlace {
            crate::check::one_primary(self);
            crate::promises::states_changed(self);
        }
        self.read_back();
        true
    }

    fn check_timer(&mut self, node: usize) {
        if self.nodes[node].frozen_until > self.now {
            return;
        }
        let now = self.now + self.nodes[node].skew;
        let stuck = self.nodes[node]
            .resource
            .as_ref()
            .and_then(Resource::next_timeout)
            .is_some_and(|t| t.0 < now);
        if stuck {
            self.fail(format!("{} has a timer that stays due", name(node)));
        }
    }

    /// Runs for so long.
    pub fn run_for(&mut self, time: u64) {
        let end = self.now + time;
        while self.step(end) {}
        if self.violation.is_none() {
            self.now = end;
        }
    }
}

impl Asked {
    pub(crate) fn value_of(&self, i: u64) -> u64 {
        if self.value == 0 { 0 } else { self.value + i }
    }
}

pub(crate) fn span(payload: Payload) -> (usize, usize) {
    let (offset, len) = (u64::from(payload.offset), u64::from(payload.len));
    assert!(
        offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK),
        "{payload:?} is whole blocks"
    );
    ((offset / BLOCK) as usize, (len / BLOCK) as usize)
}

/// How a node is called in texts.
pub fn name(node: usize) -> char {
    (b'A' + node as u8) as char
}
