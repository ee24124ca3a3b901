//! A shard: one thread that owns resources and does what their cores say.
//!
//! A turn takes completions, messages and timers, feeds the cores, drains their outputs, and hands
//! everything to the ring, which starts it with one system call. Packets for one stream that are
//! emitted within a turn leave in one gathered send. The shard never looks into a core's state
//! to decide anything; it only renders reports.
//!
//! `links` moves bytes of established links, `lanes` those over several paths at once, `connect` makes links, `disks` runs disk operations,
//! `ports` serves front ends, `handle` is the shard from outside.

mod connect;
mod disks;
mod engine;
mod handle;
mod lanes;
mod links;
mod mailbox;
mod ports;
mod service;
mod spin;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockstep_core::event::{BufId, CommandId, Input, Output, Payload};
use lockstep_core::report::Event;
use lockstep_core::time::Instant;
use lockstep_format::units::{NodeId, VolumeNr};

pub use engine::{Engine, HandlerCall, HandlerDone, HandlerExecutor};
pub use handle::{CommandReply, ResourceView, ShardGone, ShardHandle};
pub use ports::ShardPort;
pub use service::{Service, ServiceCx, ServiceId, ServiceWaker};

use crate::arena::{Arena, Key};
use crate::digest::digest;
use crate::disk::CacheNotes;
use crate::pool::{BufRef, BufferPool};
use crate::ring::{Done, Ring, RingKind, Wait};
use crate::table::BufTable;
use crate::tcp::{Acceptor, Path, PeerNet};
use crate::timers::{Armed, TimerHeap};
use mailbox::{Mailbox, Message};
use spin::Spin;

/// How a shard is made.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// The ring; `None` chooses (see [`crate::ring::open`]).
    pub ring: Option<RingKind>,
    /// Payload memory in bytes.
    pub pool_bytes: usize,
    /// Part of it that is kept for received packets.
    pub reserve_bytes: usize,
    /// How long to look for the next work after some was done, before sleeping; less often where
    /// that is in vain. Saves wake-ups and costs processor time.
    pub spin: Duration,
    /// Requests in flight that one port may have.
    pub port_requests: usize,
    /// Where it is noted what disks have in their caches; without it every crash counts as a loss of power.
    pub cache_notes: Option<CacheNotes>,
}

impl Default for ShardConfig {
    fn default() -> Self {
        ShardConfig {
            ring: None,
            pool_bytes: 256 << 20,
            reserve_bytes: 128 << 20,
            spin: default_spin(),
            port_requests: 1024,
            cache_notes: None,
        }
    }
}

/// Where processors are few, applications need them more than a shard needs its next completion at
/// once.
fn default_spin() -> Duration {
    match std::thread::available_parallelism() {
        Ok(count) if count.get() >= 4 => Duration::from_micros(50),
        _ => Duration::ZERO,
    }
}

/// What all shards of a process share.
#[derive(Clone)]
pub struct ShardEnv {
    /// Listeners.
    pub acceptor: Acceptor,
    /// Runs handlers.
    pub handlers: Arc<dyn HandlerExecutor>,
}

/// Names a resource on its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceId(u64);

/// Told of events of resources, on the shard's thread. With an [`Event::Step`] come the paths that
/// were in use then.
pub type Subscriber = Box<dyn FnMut(ResourceId, &Event, &UsedPaths) + Send>;

/// The paths that links to peers run over.
pub type UsedPaths = BTreeMap<NodeId, Vec<Path>>;

/// The shard itself; lives on its thread.
pub(crate) struct Shard<E: Engine> {
    config: ShardConfig,
    env: ShardEnv,
    ring: Box<dyn Ring>,
    pool: BufferPool,
    table: BufTable,
    now: Instant,
    random: u64,
    mailbox: Arc<Mailbox<E>>,
    messages: Vec<Message<E>>,
    resources: Arena<Slot<E>>,
    /// Inputs that follow from outputs, fed in order after them.
    inputs: VecDeque<(Key, Input)>,
    timers: TimerHeap<TimerKey>,
    commands: Arena<PendingCommand>,
    subscribers: Vec<Subscriber>,
    tells_steps: bool,
    links: Arena<links::Link>,
    /// Which link a path of a stream belongs to.
    lanes: Arena<LaneRef>,
    /// Links with packets that were queued in this turn.
    dirty_links: Vec<Key>,
    connecting: Arena<connect::Connecting>,
    opening: Arena<disks::Opening>,
    runs: Arena<disks::Run>,
    /// Work that waits for pool memory.
    starved: disks::Starved,
    ports: Arena<ports::PortEntry>,
    requests: Arena<ports::RequestEntry>,
    /// Ports whose sinks were told something in this turn.
    told_ports: Vec<Key>,
    /// Resources whose properties may have changed in this turn.
    changed: Vec<Key>,
    services: Arena<service::Entry>,
    service_ops: Arena<service::PendingOp>,
    woken_services: Vec<Key>,
    stop: bool,
}

/// A resource on this shard.
struct Slot<E> {
    name: String,
    engine: E,
    armed: Armed,
    nets: BTreeMap<NodeId, PeerNet>,
    /// Peers that the core wants to be connected to.
    connecting: BTreeMap<NodeId, Vec<Key>>,
    links: Vec<Key>,
    disks: BTreeMap<VolumeNr, disks::OpenDisk>,
    ports: Vec<Key>,
    changed: bool,
}

/// Objects with timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TimerKey {
    Resource(Key),
    Connecting(Key),
    Link(Key),
}

/// A path of one stream of a link.
#[derive(Clone, Copy, Debug)]
struct LaneRef {
    link: Key,
    stream: lockstep_core::event::Stream,
}

struct PendingCommand {
    resource: Key,
    reply: CommandReply,
}

/// What a completion belongs to: four bits beside a key of 60.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Disk,
    Open,
    ReceiveData,
    ReceiveControl,
    SendData,
    SendControl,
    LaneReceive,
    LaneSend,
    Connect,
    FirstPacket,
    Service,
}

const OWNERS: [Owner; 11] = [
    Owner::Disk,
    Owner::Open,
    Owner::ReceiveData,
    Owner::ReceiveControl,
    Owner::SendData,
    Owner::SendControl,
    Owner::LaneReceive,
    Owner::LaneSend,
    Owner::Connect,
    Owner::FirstPacket,
    Owner::Service,
];

impl Owner {
    const fn token(self, key: Key) -> u64 {
        (self as u64) << 60 | key.0
    }

    fn of(token: u64) -> (Owner, Key) {
        (OWNERS[(token >> 60) as usize], Key(token & ((1 << 60) - 1)))
    }
}

/// The time of all shards: nanoseconds since the first call.
pub fn now() -> Instant {
    static ORIGIN: OnceLock<std::time::Instant> = OnceLock::new();
    // One second ahead, so that no time is the core's zero.
    Instant(
        ORIGIN
            .get_or_init(std::time::Instant::now)
            .elapsed()
            .as_nanos() as u64
            + 1_000_000_000,
    )
}

/// How often a turn looks again for messages that it caused itself. The rest waits for the next
/// turn, so that a busy front end does not keep disks and peers waiting.
const MORE_ROUNDS: usize = 2;

/// With memory used up, somebody on another thread may give it back without a wake-up.
const STARVED_POLL: Duration = Duration::from_millis(1);

impl<E: Engine> Shard<E> {
    fn new(config: ShardConfig, env: ShardEnv) -> std::io::Result<Shard<E>> {
        let ring = crate::ring::open(config.ring)?;
        let pool = BufferPool::new(config.pool_bytes, config.reserve_bytes)?;
        let mailbox = Arc::new(Mailbox::new(ring.waker()));
        let now = now();
        Ok(Shard {
            random: now.0 ^ (&raw const *mailbox as u64) << 20,
            config,
            env,
            ring,
            pool,
            table: BufTable::default(),
            now,
            mailbox,
            messages: Vec::new(),
            resources: Arena::default(),
            inputs: VecDeque::new(),
            timers: TimerHeap::default(),
            commands: Arena::default(),
            subscribers: Vec::new(),
            tells_steps: false,
            links: Arena::default(),
            lanes: Arena::default(),
            dirty_links: Vec::new(),
            connecting: Arena::default(),
            opening: Arena::default(),
            runs: Arena::default(),
            starved: disks::Starved::default(),
            ports: Arena::default(),
            requests: Arena::default(),
            told_ports: Vec::new(),
            changed: Vec::new(),
            services: Arena::default(),
            service_ops: Arena::default(),
            woken_services: Vec::new(),
            stop: false,
        })
    }

    /// Turns until it is told to stop. An error of the ring itself ends the shard.
    fn run(&mut self) -> std::io::Result<()> {
        let mut spin = Spin::new(self.config.spin);
        let mut worked = false;
        while !self.stop {
            let mut wait = self.wait();
            if worked && wait != Wait::No && self.ring.kind() == RingKind::Uring && spin.is_due() {
                self.ring.turn(Wait::No)?;
                let (ring, mailbox) = (&mut self.ring, &self.mailbox);
                if spin.look(|| ring.is_due() || mailbox.is_signalled()) {
                    wait = Wait::No;
                }
            }
            if wait != Wait::No && !self.mailbox.may_sleep() {
                wait = Wait::No;
            }
            self.ring.turn(wait)?;
            self.mailbox.woke_up();
            self.now = now();
            worked = false;
            while let Some(done) = self.ring.pop() {
                worked = true;
                self.completed(done);
            }
            worked |= self.take_messages();
            self.fire_timers();
            self.feed_starved();
            self.turn_services();
            self.tell_ports();
            // What front ends on this thread ask for next starts with the same system call.
            for _ in 0..MORE_ROUNDS {
                if !self.mailbox.is_signalled() {
                    break;
                }
                self.take_messages();
                self.turn_services();
                self.tell_ports();
            }
            self.flush_links();
        }
        Ok(())
    }

    fn wait(&self) -> Wait {
        if self.mailbox.is_signalled() || !self.woken_services.is_empty() {
            return Wait::No;
        }
        let now = now();
        let timer = self
            .timers
            .next()
            .map(|at| Duration::from_nanos((at - now).0));
        let starved = (!self.starved.is_empty()).then_some(STARVED_POLL);
        match [timer, starved].into_iter().flatten().min() {
            Some(Duration::ZERO) => Wait::No,
            Some(time) => Wait::AtMost(time),
            None => Wait::Forever,
        }
    }

    fn completed(&mut self, done: Done) {
        let (owner, key) = Owner::of(done.token);
        match owner {
            Owner::Disk => self.disk_completed(key, done),
            Owner::Open => self.disk_opened(key),
            Owner::ReceiveData | Owner::ReceiveControl => self.received(owner, key, done),
            Owner::SendData | Owner::SendControl => self.sent(owner, key, done),
            Owner::LaneReceive => self.lane_received(key, done),
            Owner::LaneSend => self.lane_sent(key, done),
            Owner::Connect => self.connect_completed(key, done),
            Owner::FirstPacket => self.first_packet_received(key, done),
            Owner::Service => self.service_completed(key, done),
        }
        self.pump();
    }

    fn take_messages(&mut self) -> bool {
        let mut messages = std::mem::take(&mut self.messages);
        self.mailbox.take(&mut messages);
        let any = !messages.is_empty();
        for message in messages.drain(..) {
            match message {
                Message::Run(job) => job(self),
                Message::Submit { port, request } => self.submit(port, request),
                Message::Accepted {
                    connecting,
                    path,
                    socket,
                } => {
                    self.accepted(connecting, path, socket);
                }
                Message::Handled {
                    resource,
                    tag,
                    exit_code,
                } => {
                    self.inputs
                        .push_back((resource, Input::HandlerDone { tag, exit_code }));
                }
                Message::Wake { service } => self.woken_services.push(service),
            }
            self.pump();
        }
        self.messages = messages;
        any
    }

    fn fire_timers(&mut self) {
        // Only those that are there now: a timer that is due again at once gets the next turn.
        for _ in 0..self.timers.len() {
            let Some((at, key)) = self.timers.pop_due(self.now) else {
                return;
            };
            match key {
                TimerKey::Resource(key) => self.resource_timer(at, key),
                TimerKey::Connecting(key) => self.connecting_timer(at, key),
                TimerKey::Link(key) => self.link_timer(at, key),
            }
            self.pump();
        }
    }

    fn resource_timer(&mut self, at: Instant, key: Key) {
        let Some(slot) = self.resources.get_mut(key) else {
            return;
        };
        if !slot.armed.fired(at) {
            return;
        }
        match slot.engine.next_timeout() {
            Some(due) if due <= self.now => self.inputs.push_back((key, Input::Timeout)),
            Some(later) => self
                .timers
                .arm(&mut slot.armed, TimerKey::Resource(key), later),
            None => {}
        }
    }

    /// Feeds what waits, one input at a time, and does what the cores want.
    fn pump(&mut self) {
        while let Some((key, input)) = self.inputs.pop_front() {
            let Some(slot) = self.resources.get_mut(key) else {
                self.drop_input(input);
                continue;
            };
            slot.engine.handle(self.now, input);
            while let Some(output) = self.resources.get_mut(key).and_then(next_output) {
                self.output(key, output);
            }
            let Some(slot) = self.resources.get_mut(key) else {
                continue;
            };
            if let Some(at) = slot.engine.next_timeout() {
                self.timers
                    .arm(&mut slot.armed, TimerKey::Resource(key), at);
            }
        }
    }

    /// The resource has gone; what the input brought goes too.
    fn drop_input(&mut self, input: Input) {
        match input {
            Input::Packet {
                payload: Some(payload),
                ..
            }
            | Input::DiskDone {
                result: Ok(Some(payload)),
                ..
            } => {
                // If it was named before the resource went, it has been released with that.
                let _ = self.table.release(payload.buf);
            }
            Input::Request(request) => self.request_refused(request.id),
            _ => {}
        }
    }

    fn output(&mut self, key: Key, output: Output) {
        match output {
            Output::OpenDisk {
                tag,
                volume,
                data_path,
                meta_path,
            } => {
                self.open_disk(key, tag, volume, data_path, meta_path);
            }
            Output::ProbeDisk { tag, volume } | Output::LookAtDisk { tag, volume } => {
                self.probe_disk(key, tag, volume)
            }
            Output::NoteCache { volume, untold } => self.note_cache(key, volume, untold),
            Output::CloseDisk { tag, volume } => self.close_disk(key, tag, volume),
            Output::AbandonDisk { volume } => self.abandon_disk(key, volume),
            Output::Disk { tag, volume, op } => self.disk_op(key, tag, volume, op),
            Output::Meta { tag, volume, op } => self.meta_op(key, tag, volume, op),
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
                let what = links::Outgoing {
                    stream,
                    volume,
                    packet,
                    payload,
                    integrity,
                    want_sent,
                };
                self.send(key, peer, Key(link.0), what);
            }
            Output::Connect { peer } => self.connect(key, peer),
            Output::StopConnecting { peer } => self.stop_connecting(key, peer),
            Output::CloseLink { link, end, .. } => self.close_link(key, Key(link.0), end),
            Output::Complete { id, result } => self.complete(id, result),
            Output::Answer {
                id: CommandId(id),
                result,
            } => {
                if let Some(command) = self.commands.remove(Key(id)) {
                    (command.reply)(result);
                }
            }
            Output::Digest {
                tag,
                algorithm,
                payload,
            } => {
                self.compute_digest(key, tag, &algorithm, payload);
            }
            Output::Copy { from, to } => self.copy(from, to),
            Output::Handler {
                tag,
                name,
                volume,
                peer,
            } => {
                self.run_handler(key, tag, name, volume, peer);
            }
            Output::Release { buf } => self.release(buf),
            Output::Event(event) => self.event(key, &event),
        }
    }

    fn compute_digest(
        &mut self,
        key: Key,
        tag: lockstep_core::event::Tag,
        algorithm: &str,
        payload: Payload,
    ) {
        let buf = self.payload(payload);
        let (start, len) = (payload.offset as usize, payload.len as usize);
        let digest =
            buf.and_then(|buf| buf.with_bytes(start, len, |bytes| digest(algorithm, bytes)));
        if digest.is_none() {
            // Names are checked when they are configured; an empty digest equals no peer's.
            tracing::error!(algorithm, "a digest cannot be computed");
        }
        let digest = digest.unwrap_or_default();
        self.inputs
            .push_back((key, Input::DigestDone { tag, digest }));
    }

    fn copy(&mut self, from: Payload, to: Payload) {
        let (Some(source), Some(destination)) = (self.payload(from), self.payload(to)) else {
            return;
        };
        let len = from.len.min(to.len) as usize;
        if from.len != to.len {
            tracing::error!(
                ?from,
                ?to,
                "the core copies between payloads of different lengths"
            );
        }
        source.with_bytes(from.offset as usize, len, |bytes| {
            destination.write_at(to.offset as usize, bytes);
        });
    }

    fn run_handler(
        &mut self,
        key: Key,
        tag: lockstep_core::event::Tag,
        handler: &'static str,
        volume: Option<VolumeNr>,
        peer: Option<NodeId>,
    ) {
        let Some(slot) = self.resources.get(key) else {
            return;
        };
        let mailbox = self.mailbox.clone();
        let done = HandlerDone::new(move |exit_code| {
            // A shard that has ended does not care any more.
            let _ = mailbox.post(Message::Handled {
                resource: key,
                tag,
                exit_code,
            });
        });
        let call = HandlerCall {
            resource: slot.name.clone(),
            handler,
            volume,
            peer,
            snapshot: slot.engine.snapshot(),
        };
        self.env.handlers.run(call, done);
    }

    fn event(&mut self, key: Key, event: &Event) {
        let paths = match event {
            Event::Step(_) => self.used_paths(key),
            _ => UsedPaths::new(),
        };
        for subscriber in &mut self.subscribers {
            subscriber(ResourceId(key.0), event, &paths);
        }
        let changes = match event {
            Event::Resource | Event::Device(_) | Event::PeerDevice(..) => true,
            // A peer may have become Primary.
            Event::Connection(_) | Event::Created(_) | Event::Destroyed(_) => true,
            Event::Log { .. } | Event::NewGeneration { .. } | Event::Step(_) => false,
        };
        if let Some(slot) = self.resources.get_mut(key)
            && changes
            && !std::mem::replace(&mut slot.changed, true)
        {
            self.changed.push(key);
        }
    }

    fn release(&mut self, buf: BufId) {
        if let Err(error) = self.table.release(buf) {
            tracing::error!(%error, "the core released a buffer twice");
        }
    }

    /// The memory of a payload that the core named; `None`, with an error in the log, if the core
    /// named a buffer that is not its own or a range outside of it.
    fn payload(&self, payload: Payload) -> Option<BufRef> {
        match self.table.get(payload.buf) {
            Ok(buf) if payload.offset as usize + payload.len as usize <= buf.capacity() => {
                Some(buf.clone())
            }
            Ok(buf) => {
                let capacity = buf.capacity();
                tracing::error!(
                    ?payload,
                    capacity,
                    "the core named bytes outside of a buffer"
                );
                None
            }
            Err(error) => {
                tracing::error!(%error, "the core named a buffer that it does not have");
                None
            }
        }
    }

    fn random(&mut self) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.random
    }
}

impl<E: Engine> Drop for Shard<E> {
    /// Also when a core panicked: nobody may wait for a shard that has ended.
    fn drop(&mut self) {
        for (_, port) in self.ports.iter() {
            port.set_gone();
        }
        // Dropped messages drop their reply channels, which tells those who wait.
        drop(self.mailbox.close());
    }
}

fn next_output<E: Engine>(slot: &mut Slot<E>) -> Option<Output> {
    slot.engine.poll_output()
}

#[cfg(test)]
mod tests;
