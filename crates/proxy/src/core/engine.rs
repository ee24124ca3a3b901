//! The engine: owner of all connections, carriers, jobs and of the shared memory. Dispatches
//! events, shares memory, bandwidth and workers between connections, and keeps the timers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::coding::conditions;
use super::config::{ConfigError, DaemonOptions, LinkConfig, LinkOptions};
use super::frame::{CHUNK_MAX, Frame};
use super::identity::Peer;
use super::limits::{SessionLimit, memory_needed};
use super::link::{Blocked, CONTROL_LIMIT, Carrier, CarrierState, Link, Phase, StreamPhase};
use super::rng::Rng;
use super::shaper::Bucket;
use super::stats::{LinkSnapshot, SessionSnapshot, Snapshot, StreamSnapshot};
use super::stream::Class;
use super::time::Instant;
use super::trunk::Trunks;
use super::{
    CarrierId, CarrierKind, Close, Input, JobId, Level, LinkId, LocalId, Output, SpillRef,
};

/// Raw bytes at the front of a queue that never go to disk.
pub(crate) const SPILL_HEAD: u64 = 8 << 20;
/// Bytes per second that control sockets may use on the thinnest line.
const SHARE_MIN: u64 = 64 << 10;
/// Reads smaller than this are put off while the buffer is nearly full.
const READ_MIN: u64 = 64 << 10;
/// Fewest: small grants would make small TLS records.
pub(crate) const WRITE_MIN: usize = 1400;
/// How long a connection waits before it asks again whether it has its turn.
const TURN: Duration = Duration::from_millis(1);
/// Most bytes that one question about a carrier grants.
const WRITE_QUANTUM: usize = 64 << 10;
/// Most raw bytes on the way to one local DRBD.
const WINDOW_MAX: u64 = 64 << 20;

/// What a job belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Job {
    Encode {
        link: LinkId,
        stream: u32,
        seq: u64,
        rung: Option<usize>,
        codec: u8,
    },
    /// Tried only to learn what another rung would give.
    Probe {
        link: LinkId,
        rung: usize,
        codec: u8,
        raw_len: usize,
    },
    Decode {
        link: LinkId,
        stream: u32,
        offset: u64,
        codec: u8,
    },
    SpillWrite {
        link: LinkId,
        stream: u32,
        seq: u64,
        len: u64,
    },
    SpillRead {
        link: LinkId,
        stream: u32,
        seq: u64,
    },
}

/// The proxy's state machine.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) options: DaemonOptions,
    pub(crate) instance: [u8; 16],
    seed: [u8; 32],
    drawn: u64,
    pub(crate) rng: Rng,
    pub(crate) links: BTreeMap<LinkId, Link>,
    pub(crate) carriers: BTreeMap<CarrierId, Carrier>,
    /// Sessions with peer proxies, and their TCP connections.
    pub(crate) trunks: Trunks,
    /// Stream 0 is a socket whose first eight bytes have not all come.
    pub(crate) locals: BTreeMap<LocalId, (LinkId, u32)>,
    pub(crate) jobs: BTreeMap<JobId, Job>,
    pub(crate) running: usize,
    pub(crate) total_held: u64,
    /// What the shell was told to read and has not brought yet.
    promised_bytes: u64,
    pub(crate) spill_used: u64,
    /// After an error the disk is left alone until then.
    pub(crate) spill_rest_until: Instant,
    pub(crate) spilling: usize,
    pool_blocked: BTreeSet<LinkId>,
    job_blocked: VecDeque<LinkId>,
    pub(crate) bucket: Bucket,
    /// Limits of all connections with one peer proxy.
    pub(crate) sessions: BTreeMap<IpAddr, SessionLimit>,
    /// The greatest `served` of all connections.
    pub(crate) most_served: u64,
    pub(crate) wall_minute: u32,
    /// Thousandths of a core that the codec pool can have.
    pub(crate) free_millicores: Option<u64>,
    pub(crate) started: Instant,
    pub(crate) next_id: u64,
    /// A hand-over is under way: no carrier is dialled, no job begun.
    pub(crate) frozen: bool,
    timers: BTreeSet<(Instant, LinkId)>,
    timer_of: BTreeMap<LinkId, Instant>,
    orphan_timer: Option<Instant>,
    pub(crate) out: VecDeque<Output>,
}

impl Engine {
    /// An engine without connections. `seed` is secret and random in production.
    pub(crate) fn new(now: Instant, options: DaemonOptions, seed: [u8; 32]) -> Engine {
        let mut engine = Engine {
            bucket: Bucket::limited(now, &options.limit, 0),
            sessions: BTreeMap::new(),
            options,
            instance: [0; 16],
            seed,
            drawn: 0,
            rng: Rng::new(0),
            links: BTreeMap::new(),
            carriers: BTreeMap::new(),
            trunks: Trunks::default(),
            locals: BTreeMap::new(),
            jobs: BTreeMap::new(),
            running: 0,
            total_held: 0,
            promised_bytes: 0,
            spill_used: 0,
            spill_rest_until: now,
            spilling: 0,
            pool_blocked: BTreeSet::new(),
            job_blocked: VecDeque::new(),
            most_served: 0,
            wall_minute: 0,
            free_millicores: None,
            started: now,
            next_id: 1,
            frozen: false,
            timers: BTreeSet::new(),
            timer_of: BTreeMap::new(),
            orphan_timer: None,
            out: VecDeque::new(),
        };
        engine.instance = engine.random();
        engine.rng = Rng::new(u64::from_le_bytes(engine.random()));
        engine
    }

    /// Adds a connection, or says why not and changes nothing.
    pub(crate) fn add_link(
        &mut self,
        now: Instant,
        config: LinkConfig,
    ) -> Result<LinkId, ConfigError> {
        self.check_new(&config)?;
        let id = LinkId(self.fresh() as u32);
        let mut link = Link::new(now, config);
        link.bucket = Bucket::limited(now, &link.config.options.limit, self.wall_minute);
        self.links.insert(id, link);
        self.settle(now, id);
        Ok(id)
    }

    /// Whether a connection can be added to those that there are.
    pub(crate) fn check_new(&self, config: &LinkConfig) -> Result<(), ConfigError> {
        config.check()?;
        if self.find(&config.name).is_some() {
            return Err(ConfigError::Exists(config.name.clone()));
        }
        for other in self.links.values().map(|link| &link.config) {
            let taken = |what, addr| ConfigError::Taken {
                name: config.name.clone(),
                what,
                addr,
                other: other.name.clone(),
            };
            if other.inside == config.inside {
                return Err(taken("inside address", config.inside));
            }
            if config.inside == other.my_outside || config.my_outside == other.inside {
                return Err(taken("listening address", config.inside));
            }
            // What comes for DRBD must not enter a proxy again.
            for (a, addr, b, listener) in [
                (
                    "local DRBD address",
                    config.local_drbd,
                    "inside",
                    other.inside,
                ),
                (
                    "local DRBD address",
                    config.local_drbd,
                    "outside",
                    other.my_outside,
                ),
                (
                    "inside address",
                    config.inside,
                    "local DRBD",
                    other.local_drbd,
                ),
                (
                    "own outside address",
                    config.my_outside,
                    "local DRBD",
                    other.local_drbd,
                ),
                (
                    "peer's outside address",
                    config.peer_outside,
                    "own outside",
                    other.my_outside,
                ),
                (
                    "own outside address",
                    config.my_outside,
                    "peer's outside",
                    other.peer_outside,
                ),
            ] {
                if addr == listener {
                    return Err(ConfigError::Circle {
                        name: config.name.clone(),
                        a,
                        b,
                        addr,
                        other: other.name.clone(),
                    });
                }
            }
            if other.my_outside == config.my_outside && other.peer_outside == config.peer_outside {
                return Err(taken(
                    "pair of outside addresses with own address",
                    config.my_outside,
                ));
            }
        }
        let count = self.links.len() as u64 + 1;
        let needed = memory_needed(count, self.options.memlimit_min_bytes);
        if needed > self.options.memory_max_bytes {
            return Err(ConfigError::Value {
                option: "memory-max".into(),
                value: self.options.memory_max_bytes.to_string(),
                expected: format!("at least {needed} for {count} connections"),
            });
        }
        Ok(())
    }

    /// Removes a connection; its DRBD sockets are reset.
    pub(crate) fn remove_link(&mut self, now: Instant, name: &str) -> Result<LinkId, ConfigError> {
        let id = self
            .find(name)
            .ok_or_else(|| ConfigError::Unknown(name.into()))?;
        if let Some(control) = self.links.get(&id).and_then(|link| link.control) {
            self.farewell(control, "the connection was removed there");
        }
        self.end_session(now, id, "the connection was removed");
        if let Some(mut link) = self.links.remove(&id) {
            for (local, _) in std::mem::take(&mut link.pre) {
                self.locals.remove(&local);
                self.out.push_back(Output::CloseLocal(local, Close::Reset));
            }
            self.total_held = self.total_held.saturating_sub(link.held_bytes);
            self.promised_bytes -= link.promised_bytes;
        }
        let carriers: Vec<CarrierId> = self
            .carriers
            .iter()
            .filter(|(_, carrier)| carrier.link == Some(id))
            .map(|(carrier, _)| *carrier)
            .collect();
        for carrier in carriers {
            self.drop_carrier(carrier);
        }
        if let Some(at) = self.timer_of.remove(&id) {
            self.timers.remove(&(at, id));
        }
        self.wake_blocked(now);
        Ok(id)
    }

    /// Changes options of a running connection; DRBD's sockets stay.
    pub(crate) fn set_options(
        &mut self,
        now: Instant,
        name: &str,
        options: LinkOptions,
    ) -> Result<(), ConfigError> {
        let id = self
            .find(name)
            .ok_or_else(|| ConfigError::Unknown(name.into()))?;
        let minute = self.wall_minute;
        if let Some(link) = self.links.get_mut(&id) {
            link.bucket.set(now, &options.limit, minute);
            link.config.options = options;
        }
        self.settle(now, id);
        self.keep_trunks(now);
        Ok(())
    }

    /// The id of a connection by its name.
    pub(crate) fn find(&self, name: &str) -> Option<LinkId> {
        self.links
            .iter()
            .find(|(_, link)| link.config.name == name)
            .map(|(id, _)| *id)
    }

    /// A connection's configuration.
    pub(crate) fn config(&self, id: LinkId) -> Option<&LinkConfig> {
        self.links.get(&id).map(|link| &link.config)
    }

    /// All configurations, in the order in which they were added.
    pub(crate) fn configs(&self) -> impl Iterator<Item = &LinkConfig> {
        self.links.values().map(|link| &link.config)
    }

    /// The shell accepted a socket on a connection's inside address.
    pub(crate) fn accept_local(&mut self, now: Instant, id: LinkId) -> LocalId {
        let local = LocalId(self.fresh());
        self.local_accepted(now, id, local);
        local
    }

    /// The peer opened a lane, for a connection on this outside address.
    pub(crate) fn accept_carrier(
        &mut self,
        now: Instant,
        listener: SocketAddr,
        peer: Peer,
    ) -> CarrierId {
        let id = CarrierId(self.fresh());
        let mut carrier = Carrier::new(now, None, CarrierKind::Control, CarrierState::Handshake);
        carrier.listener = Some(listener);
        carrier.peer = peer;
        self.carriers.insert(id, carrier);
        let deadline = now.after(Duration::from_secs(10));
        self.orphan_timer = Some(self.orphan_timer.map_or(deadline, |at| at.min(deadline)));
        id
    }

    /// Feeds one event.
    pub(crate) fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Tick => self.tick(now),
            Input::LocalConnected(local) => self.local_connected(now, local),
            Input::LocalData(local, data) => self.local_data(now, local, data),
            Input::LocalEof(local) => self.local_eof(now, local),
            Input::LocalWritten(local, bytes) => self.local_written(now, local, bytes),
            Input::LocalFailed(local, reason) => self.local_failed(now, local, &reason),
            Input::WireUp(..)
            | Input::WireFrame(..)
            | Input::LaneReceived(..)
            | Input::LaneFrame(..)
            | Input::WireDown(..) => self.wire_input(now, input),
            Input::CarrierSent(carrier, bytes) => self.carrier_sent(now, carrier, bytes),
            Input::Encoded(job, coded, took) => self.encoded(now, job, coded, took),
            Input::Decoded(job, result, took) => self.decoded(now, job, result, took),
            Input::SpillWritten(job, result) => self.spill_written(now, job, result),
            Input::SpillRead(job, result) => self.spill_read(now, job, result),
            Input::FreeCores(millicores) => self.free_millicores = Some(millicores),
            Input::Wall(minute) => self.follow_timetables(now, minute),
        }
    }

    /// The next thing to do.
    pub(crate) fn poll_output(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// When to call `handle(now, Input::Tick)` at the latest.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let first = self.timers.first().map(|(at, _)| *at);
        let trunks = self.trunks.timeout();
        [first, self.orphan_timer, trunks]
            .into_iter()
            .flatten()
            .min()
    }

    /// How many bytes the shell may read from a DRBD socket now. After 0 it waits for `WantRead`.
    pub(crate) fn read_allowance(&mut self, now: Instant, local: LocalId) -> usize {
        let Some((id, stream_id)) = self.locals.get(&local).copied() else {
            return 0;
        };
        if stream_id == 0 {
            let pre = self.links.get(&id).and_then(|link| link.pre.get(&local));
            return pre.map_or(0, |pre| 8 - pre.first.len());
        }
        let Some(class) = self
            .links
            .get(&id)
            .and_then(|link| link.streams.get(&stream_id))
            .filter(|stream| stream.phase == StreamPhase::Open && stream.tx.eof.is_none())
            .map(|stream| stream.class)
        else {
            return 0;
        };
        let answer = match class {
            Class::Control => self.control_allowance(now, id, stream_id),
            Class::Bulk | Class::Unknown => self.bulk_allowance(now, id),
        };
        let limit = self.links.get(&id).map_or(CHUNK_MAX, Link::chunk_limit);
        let Some(stream) = self
            .links
            .get_mut(&id)
            .and_then(|link| link.streams.get_mut(&stream_id))
        else {
            return 0;
        };
        match answer {
            Ok(bytes) => {
                stream.paused = None;
                bytes.min(limit as u64) as usize
            }
            Err(reason) => {
                let since = stream.paused.map_or(now, |(_, since)| since);
                stream.paused = Some((Some(reason), since));
                if reason == Blocked::Pool {
                    self.pool_blocked.insert(id);
                }
                if matches!(reason, Blocked::Lag | Blocked::Share) {
                    self.arm(id, now.after(Duration::from_millis(20)));
                }
                0
            }
        }
    }

    /// The shell reads up to so many bytes for a connection elsewhere; until they come, they count
    /// as memory that is used.
    pub(crate) fn promise(&mut self, id: LinkId, bytes: usize) {
        if let Some(link) = self.links.get_mut(&id) {
            link.promised_bytes += bytes as u64;
            self.promised_bytes += bytes as u64;
        }
    }

    /// What was promised has come, as many bytes as there were, or will not come.
    pub(crate) fn release(&mut self, now: Instant, id: LinkId, bytes: usize) {
        // A connection that is gone has taken its promises along.
        if let Some(link) = self.links.get_mut(&id) {
            link.promised_bytes -= bytes as u64;
            self.promised_bytes -= bytes as u64;
            self.wake_readers(now, id);
            self.wake_blocked(now);
        }
    }

    /// How many frame bytes the shell may write to a bulk carrier now. After 0 it waits for
    /// `WantWrite`. Control carriers are never held back.
    pub(crate) fn carrier_allowance(&mut self, now: Instant, carrier: CarrierId) -> usize {
        let Some(entry) = self.carriers.get_mut(&carrier) else {
            return 0;
        };
        let (Some(id), CarrierKind::Bulk) = (entry.link, entry.kind) else {
            return usize::MAX;
        };
        if !self.links.contains_key(&id) {
            return usize::MAX;
        }
        let allowed = self.may_pass(now, id).min(WRITE_QUANTUM);
        let short = allowed < WRITE_MIN;
        if short || !self.has_turn(now, id) {
            let at = self.writers_at(now, id, short);
            if let Some(entry) = self.carriers.get_mut(&carrier) {
                (entry.wants_write, entry.woken) = (true, None);
            }
            self.arm(id, at);
            self.note_wait(now, id);
            return 0;
        }
        if let Some(entry) = self.carriers.get_mut(&carrier) {
            entry.woken = None;
        }
        allowed
    }

    /// Everything for the operator.
    pub(crate) fn snapshot(&self, now: Instant) -> Snapshot {
        // The shell knows what is empty here.
        Snapshot {
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_ms: now.since(self.started).as_millis() as u64,
            log_level: String::new(),
            memory_max_bytes: self.options.memory_max_bytes,
            memlimit_min_bytes: self.options.memlimit_min_bytes,
            memory_used_bytes: self.total_held
                + self.links.values().map(Link::rx_held).sum::<u64>(),
            spill_limit_bytes: self.options.spill_limit_bytes,
            spill_used_bytes: self.spill_used,
            codec_jobs: self.running,
            rate_limit: self.bucket.rate(),
            burst_bytes: self.bucket.burst_bytes(),
            sessions: self
                .sessions
                .iter()
                .map(|(peer, session)| SessionSnapshot {
                    peer: peer.to_string(),
                    rate_limit: session.bucket.rate(),
                    burst_bytes: session.bucket.burst_bytes(),
                })
                .collect(),
            thread_cpu_us: BTreeMap::new(),
            peers: self.trunk_snapshots(),
            connections: self
                .links
                .values()
                .map(|link| snapshot_of(now, link, self.workers()))
                .collect(),
        }
    }

    /// Codec threads: jobs also wait in the pool's queue.
    pub(crate) fn workers(&self) -> usize {
        self.options.jobs_max.div_ceil(2)
    }

    /// Raw bytes that this end is ready to hold for one stream.
    pub(crate) fn window(&self) -> u64 {
        let share = self.options.memory_max_bytes / 4 / (self.links.len() as u64).max(1);
        share.clamp(CHUNK_MAX as u64, WINDOW_MAX)
    }

    /// Unpredictable bytes from the seed.
    pub(crate) fn random<const N: usize>(&mut self) -> [u8; N] {
        self.drawn += 1;
        let block = keyed(&self.seed, &[&self.drawn.to_le_bytes()]);
        let mut out = [0; N];
        let len = N.min(32);
        out[..len].copy_from_slice(&block[..len]);
        out
    }

    /// A number for a carrier, socket, job or connection.
    pub(crate) fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(crate) fn log(&mut self, level: Level, id: LinkId, text: String) {
        if level != Level::Info
            && let Some(link) = self.links.get_mut(&id)
        {
            link.last_error.clone_from(&text);
        }
        self.out.push_back(Output::Log(level, id, text));
    }

    /// Gives a frame to a carrier's queue.
    pub(crate) fn send(&mut self, carrier: CarrierId, frame: Frame) {
        if let Some(entry) = self.carriers.get_mut(&carrier) {
            entry.queued_bytes += frame.wire_len();
            if let Some((wire, lane)) = entry.wire {
                self.out.push_back(Output::Send {
                    wire,
                    lane,
                    carrier,
                    frame,
                });
            }
        }
    }

    /// After every event of a link: send what can be sent, wake what may go on, set the timer.
    pub(crate) fn settle(&mut self, now: Instant, id: LinkId) {
        self.keep_session(now, id);
        self.pump(now, id);
        self.flush_acks(now, id);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let held = link.tx_held();
        let freed = held < link.held_bytes;
        self.total_held = self.total_held + held - link.held_bytes;
        link.held_bytes = held;
        self.wake_readers(now, id);
        if freed {
            self.wake_blocked(now);
        }
        self.note_wait(now, id);
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let at = self.link_timeout(now, link);
        self.set_timer(id, at);
        self.place_all(now);
    }

    /// Makes sure that the link is looked at by `at`.
    pub(crate) fn arm(&mut self, id: LinkId, at: Instant) {
        if self.timer_of.get(&id).is_none_or(|held| *held > at) {
            self.set_timer(id, at);
        }
    }

    /// A worker is free: the connections that wait for one get it in turn.
    pub(crate) fn job_done(&mut self, now: Instant) {
        for _ in 0..self.job_blocked.len() {
            if self.running >= self.options.jobs_max {
                return;
            }
            let Some(id) = self.job_blocked.pop_front() else {
                return;
            };
            self.settle(now, id);
        }
    }

    pub(crate) fn wait_for_worker(&mut self, id: LinkId) {
        if !self.job_blocked.contains(&id) {
            self.job_blocked.push_back(id);
        }
    }

    pub(crate) fn free_spill(&mut self, spill: SpillRef) {
        self.spill_used = self.spill_used.saturating_sub(spill.disk_bytes());
        self.out.push_back(Output::SpillFree(spill));
    }

    pub(crate) fn new_job(&mut self, job: Job) -> JobId {
        let id = JobId(self.fresh());
        self.jobs.insert(id, job);
        id
    }

    fn tick(&mut self, now: Instant) {
        if self.orphan_timer.is_some_and(|at| at <= now) {
            self.orphan_timer = None;
            let mut late = Vec::new();
            for (id, carrier) in &self.carriers {
                if carrier.link.is_none() {
                    let deadline = carrier.since.after(Duration::from_secs(10));
                    if deadline <= now {
                        late.push(*id);
                    } else {
                        let next = self.orphan_timer.map_or(deadline, |at| at.min(deadline));
                        self.orphan_timer = Some(next);
                    }
                }
            }
            for id in late {
                self.drop_carrier(id);
            }
        }
        self.check_trunks(now);
        while let Some((at, id)) = self.timers.first().copied() {
            if at > now {
                break;
            }
            self.timers.remove(&(at, id));
            self.timer_of.remove(&id);
            self.check_session(now, id);
            self.check_streams(now, id);
            self.measure(now, id);
            self.wake_writers(now, id);
            self.settle(now, id);
        }
    }

    fn set_timer(&mut self, id: LinkId, at: Instant) {
        if let Some(old) = self.timer_of.insert(id, at) {
            self.timers.remove(&(old, id));
        }
        self.timers.insert((at, id));
    }

    /// When carriers that may not write now are to ask again: once the buckets hold enough, or,
    /// where only another connection has its turn, soon.
    fn writers_at(&self, now: Instant, id: LinkId, short: bool) -> Instant {
        let Some(link) = self.links.get(&id).filter(|_| short) else {
            return now.after(TURN);
        };
        self.may_pass_at(link, WRITE_MIN).max(Instant(now.0 + 1))
    }

    fn wake_writers(&mut self, now: Instant, id: LinkId) {
        let short = self.may_pass(now, id) < WRITE_MIN;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if short {
            if link
                .bulk
                .iter()
                .any(|c| self.carriers.get(c).is_some_and(|c| c.wants_write))
            {
                let at = self.writers_at(now, id, true);
                self.arm(id, at);
            }
            return;
        }
        for carrier in &link.bulk {
            if let Some(entry) = self.carriers.get_mut(carrier)
                && std::mem::take(&mut entry.wants_write)
            {
                entry.woken = Some(now);
                self.out.push_back(Output::WantWrite(*carrier));
            }
        }
    }

    /// Tells the shell to read again where that is possible now.
    fn wake_readers(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let paused: Vec<(u32, LocalId)> = link
            .streams
            .iter()
            .filter(|(_, stream)| stream.paused.is_some())
            .map(|(stream, entry)| (*stream, entry.local))
            .collect();
        for (stream_id, local) in paused {
            let Some((reason, since)) = self
                .links
                .get(&id)
                .and_then(|link| link.streams.get(&stream_id)?.paused)
            else {
                continue;
            };
            if self.read_allowance(now, local) == 0 {
                continue;
            }
            if let Some(link) = self.links.get_mut(&id) {
                let spent = now.since(since).as_millis() as u64;
                match reason {
                    Some(Blocked::Memory) => link.counters.blocked_memory_ms += spent,
                    Some(Blocked::Pool) => link.counters.blocked_pool_ms += spent,
                    Some(Blocked::Lag) => link.counters.blocked_lag_ms += spent,
                    Some(Blocked::Share) | None => {}
                }
            }
            self.out.push_back(Output::WantRead(local));
        }
    }

    /// Memory was freed: those that wait for the shared pool may go on.
    pub(crate) fn wake_blocked(&mut self, now: Instant) {
        for id in std::mem::take(&mut self.pool_blocked) {
            self.wake_readers(now, id);
        }
    }

    /// Control is never held back by bulk. On a limited line it may use a quarter of the rate: far
    /// more than DRBD needs, and a bound for what is not DRBD.
    fn control_allowance(&mut self, now: Instant, id: LinkId, stream: u32) -> Result<u64, Blocked> {
        let rate = self.lowest_rate(id);
        let Some(link) = self.links.get_mut(&id) else {
            return Err(Blocked::Memory);
        };
        let held = link
            .streams
            .get(&stream)
            .map_or(u64::MAX, |stream| stream.tx.backlog_bytes());
        if held >= CONTROL_LIMIT {
            return Err(Blocked::Memory);
        }
        let share = match rate {
            0 => 0,
            rate => (rate / 4).max(SHARE_MIN),
        };
        link.share.set_rate(now, share);
        match link.share.available(now) {
            0 => Err(Blocked::Share),
            bytes => Ok(READ_MIN.min(bytes as u64)),
        }
    }

    /// Memory of the connection, of the pool, and the bound in time. From 80 % on the rate is
    /// lowered towards the drain rate, so that DRBD's sender always makes some progress.
    fn bulk_allowance(&mut self, now: Instant, id: LinkId) -> Result<u64, Blocked> {
        let floor = self.options.memlimit_min_bytes;
        // The rest is for what arrives for the local DRBD.
        let max = self.options.memory_max_bytes / 4 * 3;
        let Some(link) = self.links.get(&id) else {
            return Err(Blocked::Memory);
        };
        // Events since the last settling are not in `total_held` yet.
        let held = link.tx_held();
        let total = self.total_held + held - link.held_bytes + self.promised_bytes;
        let used = held + link.promised_bytes;
        let cap = link.config.options.memlimit_bytes;
        if used >= cap {
            return Err(Blocked::Memory);
        }
        let mut room = cap - used;
        // What is left of a guaranteed floor, unless it is too little to be worth a read.
        let own = floor.saturating_sub(used);
        if own < READ_MIN {
            // What the others have not used of their guaranteed floors stays free for them.
            let reserve: u64 = self
                .links
                .iter()
                .filter(|(other, _)| **other != id)
                .map(|(_, other)| floor.saturating_sub(other.held_bytes + other.promised_bytes))
                .sum();
            let busy = self
                .links
                .values()
                .filter(|other| other.held_bytes > floor)
                .count() as u64;
            let share = max / busy.max(1);
            let tight = total + reserve > max / 4 * 3;
            if total + reserve >= max || tight && busy > 1 && used >= share {
                return Err(Blocked::Pool);
            }
            room = room.min(max - total - reserve);
        } else {
            room = room.min(own);
        }
        if room < READ_MIN.min(cap / 16) {
            return Err(Blocked::Memory);
        }
        let max_lag = link.config.options.max_lag.as_secs_f64();
        let lag = match link.lag_seconds() {
            Some(lag) if max_lag > 0.0 && link.backlog_bytes() > READ_MIN * 4 => lag / max_lag,
            _ => 0.0,
        };
        if lag >= 1.0 {
            return Err(Blocked::Lag);
        }
        let fill = lag.max(used as f64 / cap as f64);
        if fill > 0.8
            && let Some(drain) = link.drain_rate.get()
        {
            let rate = (drain.max(64e3) * 0.2 / (fill - 0.8)).min(1e12) as u64;
            let Some(link) = self.links.get_mut(&id) else {
                return Err(Blocked::Memory);
            };
            link.smooth.set_rate(now, rate.max(1));
            let tokens = link.smooth.available(now) as u64;
            if tokens < READ_MIN / 4 {
                return Err(Blocked::Lag);
            }
            room = room.min(tokens);
        }
        Ok(room)
    }
}

/// HMAC-SHA-256 over parts.
pub(crate) fn keyed(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

fn snapshot_of(now: Instant, link: &Link, workers: usize) -> LinkSnapshot {
    let config = &link.config;
    let blocked = link.streams.values().find_map(|stream| stream.paused?.0);
    let drain = link.drain_rate.whole();
    let backlog = link.backlog_bytes();
    let mut counters = link.counters.clone();
    if let Some((wait, since)) = link.waiting {
        counters.send_blocked.add(wait, now.since(since));
    }
    LinkSnapshot {
        name: config.name.clone(),
        inside: config.inside.to_string(),
        peer_outside: config.peer_outside.to_string(),
        my_outside: config.my_outside.to_string(),
        local_drbd: config.local_drbd.to_string(),
        state: link.state_name().into(),
        role: if config.dials() { "dialer" } else { "listener" }.into(),
        memlimit_bytes: config.options.memlimit_bytes,
        plugins: config
            .options
            .plugins
            .iter()
            .map(|plugin| plugin.text.clone())
            .collect(),
        codec: link.codec().0.to_string(),
        codec_switches: link.adaptive.switches,
        rungs: conditions(link, workers, link.is_starved())
            .map(|at| link.adaptive.snapshot(&at))
            .unwrap_or_default(),
        bulk_carriers: link.bulk.len(),
        buffered_raw_bytes: backlog,
        buffered_memory_bytes: link.tx_held(),
        buffered_encoded_bytes: link
            .streams
            .values()
            .map(|stream| stream.tx.encoded_bytes())
            .sum(),
        spilled_bytes: link.spilled_bytes(),
        receive_memory_bytes: link.rx_held(),
        oldest_byte_age_ms: link
            .oldest()
            .map_or(0, |at| now.since(at).as_millis() as u64),
        drain_rate: drain,
        wire_rate: link.wire_rate.whole(),
        input_rate: link.input_rate.whole(),
        drain_ms: (drain > 0 || backlog == 0)
            .then(|| (u128::from(backlog) * 1000 / u128::from(drain.max(1))) as u64),
        ratio: counters.coded_raw_bytes as f64 / (counters.coded_wire_bytes.max(1)) as f64,
        rtt_us: link.rtt.as_micros() as u64,
        peer_decode_rate: link.peer_decode_rate.unwrap_or(0.0) as u64,
        peer_free_millicores: link.peer_free_millicores,
        control_p50_us: counters.control_latency.quantile_us(0.5),
        control_p99_us: counters.control_latency.quantile_us(0.99),
        control_max_us: counters.control_latency.max_us,
        rate_limit: link.bucket.rate(),
        burst_bytes: link.bucket.burst_bytes(),
        blocked_by: match blocked {
            Some(Blocked::Memory) => "memory",
            Some(Blocked::Pool) => "pool",
            Some(Blocked::Lag) => "lag",
            Some(Blocked::Share) => "share",
            None => "",
        }
        .into(),
        last_error: link.last_error.clone(),
        // The shell knows.
        carriers: Vec::new(),
        streams: link
            .streams
            .iter()
            .map(|(id, stream)| StreamSnapshot {
                id: *id,
                class: stream.class.name().into(),
                phase: match stream.phase {
                    StreamPhase::Opening { .. } => "opening",
                    StreamPhase::Connecting { .. } => "connecting",
                    StreamPhase::Open if stream.tx.eof.is_some() => "closing",
                    StreamPhase::Open => "open",
                }
                .into(),
                sent_bytes: stream.tx.next_offset,
                delivered_bytes: stream.tx.delivered.min(stream.tx.next_offset),
                received_bytes: stream.rx.delivered,
                window_bytes: stream.tx.window_end.saturating_sub(stream.tx.next_offset),
            })
            .collect(),
        counters,
    }
}

/// Whether the session is up.
pub(crate) fn is_live(link: &Link) -> bool {
    link.phase == Phase::Live
}
