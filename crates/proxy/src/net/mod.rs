//! The control lane: one epoll loop that owns the engine, DRBD's control sockets, the control
//! carriers and the listeners. It does what the engine says and tells it what happened; it decides
//! nothing but how much one socket may do per turn. Sockets that carry bulk are on the shards'
//! threads (`shard`), so that neither their bytes nor their encryption are in the way of control.

mod carrier;
mod far;
pub(crate) mod handover;
mod local;
mod refusals;
pub(crate) mod shard;
mod tcp;
mod watch;
mod wire;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant as Clock};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use socket2::{Domain, Protocol, Socket, Type};

use crate::core::config::LinkConfig;
use crate::core::engine::Engine;
use crate::core::time::Instant;
use crate::core::{Input, Level, LinkId, LocalId, Output, WireId};
use crate::live::Live;
use crate::mail::{Mail, Mailbox, Post};
use crate::spill::Spill;
use crate::tls::Identity;
use crate::workers::{Work, Workers};
use carrier::CarrierSock;
use far::FarLocal;
use local::LocalSock;
use refusals::Refusals;
use shard::Shard;

/// Bytes that one socket may move per turn.
const TURN_BYTES: usize = 1 << 20;
/// Mail that is read before sockets get their turn: those of control come first.
const MAIL_PER_TURN: usize = 16;
/// Accepted carriers whose handshake is under way.
const PENDING_MAX: usize = 64;
/// How long an accepted carrier may take to authenticate.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a listener rests after a failed accept.
const ACCEPT_REST: Duration = Duration::from_millis(200);
/// Time between looks at the wall clock.
const WALL_EVERY: Duration = Duration::from_secs(20);

/// Time between looks for memory that nobody needs any more, while there is any.
const AGE_EVERY: Duration = Duration::from_secs(1);

/// What an epoll event belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Bell,
    Inside(LinkId),
    Outside(SocketAddr),
    Local(LocalId),
    Carrier(WireId),
    /// Accepted, not yet authenticated.
    Pending(u64),
}

/// Threads that work for the control lane.
pub(crate) struct Threads {
    pub(crate) shards: Vec<Shard>,
    pub(crate) workers: Workers,
    pub(crate) spill: Option<Spill>,
}

/// Everything that the control lane owns.
pub(crate) struct Reactor {
    pub(crate) engine: Engine,
    epoll: OwnedFd,
    mailbox: Mailbox,
    /// The last carrier that did not authenticate: at which listener, and from which configured peer.
    refusals: Refusals,
    /// There is mail that was not read yet.
    more_mail: bool,
    shards: Vec<Shard>,
    /// The one that got a socket last.
    turn_shard: usize,
    workers: Workers,
    spill: Option<Spill>,
    identity: Identity,
    pub(crate) live: Live,
    sources: BTreeMap<u64, Source>,
    next_token: u64,
    inside: BTreeMap<LinkId, (Socket, u64)>,
    /// Outside listeners with the count of connections that use them.
    outside: BTreeMap<SocketAddr, (Socket, u64, usize)>,
    locals: BTreeMap<LocalId, LocalSock>,
    far_locals: BTreeMap<LocalId, FarLocal>,
    carriers: BTreeMap<WireId, CarrierSock>,
    pending: BTreeMap<u64, (CarrierSock, SocketAddr, Clock)>,
    scratch: Vec<u8>,
    started: Clock,
    wall_at: Clock,
    age_at: Clock,
    stopping: bool,
    /// Everything now belongs to another process.
    handed: bool,
    /// Listeners that rest after a failed accept, and until when.
    resting: Vec<(Source, Clock)>,
}

impl Reactor {
    /// A reactor without connections.
    pub(crate) fn new(
        engine: Engine,
        mailbox: Mailbox,
        threads: Threads,
        identity: Identity,
        live: Live,
        started: Clock,
    ) -> std::io::Result<Reactor> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut reactor = Reactor {
            engine,
            epoll,
            mailbox,
            refusals: Refusals::default(),
            more_mail: false,
            shards: threads.shards,
            turn_shard: 0,
            workers: threads.workers,
            spill: threads.spill,
            identity,
            live,
            sources: BTreeMap::new(),
            next_token: 1,
            inside: BTreeMap::new(),
            outside: BTreeMap::new(),
            locals: BTreeMap::new(),
            far_locals: BTreeMap::new(),
            carriers: BTreeMap::new(),
            pending: BTreeMap::new(),
            scratch: vec![0; TURN_BYTES],
            started,
            wall_at: started,
            age_at: started,
            stopping: false,
            handed: false,
            resting: Vec::new(),
        };
        let token = reactor.token(Source::Bell);
        let data = epoll::EventData::new_u64(token);
        epoll::add(
            &reactor.epoll,
            reactor.mailbox.bell(),
            data,
            epoll::EventFlags::IN,
        )?;
        reactor.look_at_wall();
        Ok(reactor)
    }

    /// Runs until it is told to stop.
    /// Whether everything was handed over to another process is the answer.
    pub(crate) fn run(mut self) -> bool {
        let mut events = Vec::with_capacity(64);
        // Not before: until now DRBD's sockets might have stayed with another process.
        self.spread();
        while !self.stopping {
            self.perform();
            let wait = match self.more_mail {
                true => Duration::ZERO,
                false => self.patience(),
            };
            events.clear();
            let timeout = Timespec {
                tv_sec: wait.as_secs() as i64,
                tv_nsec: i64::from(wait.subsec_nanos()),
            };
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "epoll failed; the proxy stops");
                    return false;
                }
            }
            for event in &events {
                let (data, flags) = (event.data.u64(), event.flags);
                if let Some(source) = self.sources.get(&data).copied() {
                    self.happened(source, flags);
                    self.perform();
                }
            }
            if self.more_mail {
                self.read_mail();
                if self.handed {
                    // Another process reads the sockets now.
                    return true;
                }
            }
            self.clocks();
        }
        // The peers learn it at once and need not wait for a session that will not come back.
        let names: Vec<String> = self
            .engine
            .configs()
            .map(|config| config.name.clone())
            .collect();
        for name in names {
            let _ = self.remove_link(&name);
        }
        false
    }

    /// Nanoseconds since the start, as the engine counts.
    pub(crate) fn now(&self) -> Instant {
        Instant(self.started.elapsed().as_nanos() as u64)
    }

    /// Opens the listeners of a connection and adds it; on an error nothing changes.
    pub(crate) fn add_link(&mut self, config: LinkConfig) -> Result<(), String> {
        // First, for it knows more than that an address is in use.
        self.engine
            .check_new(&config)
            .map_err(|error| error.to_string())?;
        let inside = listen(config.inside).map_err(|error| {
            format!("cannot listen on inside address {}: {error}", config.inside)
        })?;
        let outside = if self.outside.contains_key(&config.my_outside) {
            None
        } else {
            let socket = listen(config.my_outside).map_err(|error| {
                format!(
                    "cannot listen on outside address {}: {error}",
                    config.my_outside
                )
            })?;
            Some(socket)
        };
        let (name, my_outside) = (config.name.clone(), config.my_outside);
        let now = self.now();
        let id = self
            .engine
            .add_link(now, config)
            .map_err(|error| error.to_string())?;
        let watched = (|| {
            let token = self.watch(&inside, Source::Inside(id))?;
            self.inside.insert(id, (inside, token));
            match outside {
                Some(socket) => {
                    let token = self.watch(&socket, Source::Outside(my_outside))?;
                    self.outside.insert(my_outside, (socket, token, 1));
                }
                None => {
                    if let Some((_, _, users)) = self.outside.get_mut(&my_outside) {
                        *users += 1;
                    }
                }
            }
            std::io::Result::Ok(())
        })();
        if let Err(error) = watched {
            self.remove_link(&name).ok();
            return Err(error.to_string());
        }
        tracing::info!(connection = name, "connection added");
        Ok(())
    }

    /// Removes a connection and closes its listeners.
    pub(crate) fn remove_link(&mut self, name: &str) -> Result<(), String> {
        let now = self.now();
        let outside = self
            .engine
            .find(name)
            .and_then(|id| self.engine.config(id))
            .map(|config| config.my_outside);
        let id = self
            .engine
            .remove_link(now, name)
            .map_err(|error| error.to_string())?;
        self.perform();
        if let Some((_, token)) = self.inside.remove(&id) {
            self.sources.remove(&token);
        }
        if let Some(addr) = outside
            && let Some((_, token, users)) = self.outside.get_mut(&addr)
        {
            *users -= 1;
            if *users == 0 {
                let token = *token;
                self.sources.remove(&token);
                self.outside.remove(&addr);
                self.refusals.forget(addr);
            }
        }
        tracing::info!(connection = name, "connection removed");
        Ok(())
    }

    /// Who this proxy is for carriers that come from now on.
    pub(crate) fn set_identity(&mut self, identity: Identity) {
        self.identity = identity;
    }

    /// Ends the loop after this turn.
    pub(crate) fn stop(&mut self) {
        self.stopping = true;
    }

    fn token(&mut self, source: Source) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        self.sources.insert(token, source);
        token
    }

    /// Starts to watch a socket for reading.
    fn watch(&mut self, socket: impl AsFd, source: Source) -> std::io::Result<u64> {
        let token = self.token(source);
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, socket, data, epoll::EventFlags::IN)?;
        Ok(token)
    }

    fn patience(&self) -> Duration {
        let mut wait = self.wall_at.saturating_duration_since(Clock::now());
        if let Some(at) = self.engine.next_timeout() {
            wait = wait.min(at.since(self.now()));
        }
        if !self.pending.is_empty() {
            wait = wait.min(Duration::from_secs(1));
        }
        if !self.resting.is_empty() {
            wait = wait.min(ACCEPT_REST);
        }
        wait.min(self.age_at.saturating_duration_since(Clock::now()))
    }

    fn clocks(&mut self) {
        let now = self.now();
        if self.engine.next_timeout().is_some_and(|at| at <= now) {
            self.engine.handle(now, Input::Tick);
        }
        if Clock::now() >= self.wall_at {
            self.look_at_wall();
        }
        if !self.resting.is_empty() {
            self.wake_listeners();
        }
        if Clock::now() >= self.age_at {
            let is_more = crate::room::age();
            self.age_at = Clock::now() + if is_more { AGE_EVERY } else { WALL_EVERY };
        }
        let late: Vec<u64> = self
            .pending
            .iter()
            .filter(|(_, (_, _, since))| since.elapsed() >= HANDSHAKE)
            .map(|(token, _)| *token)
            .collect();
        for token in late {
            self.drop_pending(token, "no authentication in time");
        }
    }

    /// Stops watching a listener for a moment. Without descriptors to accept with, it would stay
    /// readable and turn the loop into a busy one.
    fn rest(&mut self, source: Source) {
        self.set_listener(source, epoll::EventFlags::empty());
        self.resting.push((source, Clock::now() + ACCEPT_REST));
    }

    fn wake_listeners(&mut self) {
        let now = Clock::now();
        let (due, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.resting)
            .into_iter()
            .partition(|(_, until)| *until <= now);
        self.resting = rest;
        for (source, _) in due {
            self.set_listener(source, epoll::EventFlags::IN);
        }
    }

    fn set_listener(&self, source: Source, interest: epoll::EventFlags) {
        let found = match source {
            Source::Inside(id) => self.inside.get(&id).map(|(socket, token)| (socket, *token)),
            Source::Outside(addr) => self
                .outside
                .get(&addr)
                .map(|(socket, token, _)| (socket, *token)),
            _ => None,
        };
        if let Some((socket, token)) = found {
            let data = epoll::EventData::new_u64(token);
            if let Err(error) = epoll::modify(&self.epoll, socket, data, interest) {
                tracing::error!(%error, "a listener cannot be watched");
            }
        }
    }

    fn look_at_wall(&mut self) {
        self.wall_at = Clock::now() + WALL_EVERY;
        let now = self.now();
        self.engine
            .handle(now, Input::Wall(crate::wall::minute_of_week()));
        self.follow_rates();
    }

    fn happened(&mut self, source: Source, flags: epoll::EventFlags) {
        match source {
            Source::Bell => {
                self.mailbox.silence();
                self.more_mail = true;
            }
            Source::Inside(id) => self.accept_inside(id),
            Source::Outside(addr) => self.accept_outside(addr),
            Source::Local(local) => {
                self.local_ready(local, flags);
                self.move_local(local);
            }
            Source::Carrier(carrier) => {
                self.carrier_ready(carrier, flags);
                self.move_carrier(carrier);
            }
            Source::Pending(token) => self.pending_ready(token),
        }
    }

    fn read_mail(&mut self) {
        for _ in 0..MAIL_PER_TURN {
            let Some(mail) = self.mailbox.take() else {
                self.more_mail = false;
                return;
            };
            match mail {
                Mail::News(news) => self.news(news),
                Mail::Input(input) => {
                    let now = self.now();
                    self.engine.handle(now, input);
                }
                Mail::Commands {
                    commands,
                    json,
                    reply,
                } => {
                    let answers = self.commands(&commands, json);
                    let _ = reply.send(answers);
                }
                Mail::Snapshot(reply) => {
                    let _ = reply.send(Box::new(self.snapshot()));
                }
                Mail::HandOver(stream, reply) => {
                    let result = self.hand_over(&stream);
                    match &result {
                        Ok(()) => {
                            tracing::info!("handed over to a new process");
                            if let Ok(peer) = rustix::net::sockopt::socket_peercred(&stream) {
                                let id = peer.pid.as_raw_nonzero().get();
                                crate::service::tell_main_process(id.unsigned_abs());
                            }
                        }
                        Err(error) => tracing::warn!(error, "hand-over failed"),
                    }
                    self.handed = result.is_ok();
                    self.stopping |= self.handed;
                    // The asking thread answers the client, which may have gone.
                    let _ = reply.send(result);
                    if self.handed {
                        return;
                    }
                }
                Mail::Stop => self.stopping = true,
            }
            self.perform();
        }
    }

    fn commands(&mut self, commands: &[String], json: bool) -> Vec<crate::mail::Reply> {
        let mut answers = Vec::new();
        for command in commands {
            let answer = crate::control::execute(self, command, json);
            self.perform();
            let failed = answer.is_err();
            answers.push(answer);
            if failed {
                break;
            }
        }
        answers
    }

    fn accept_inside(&mut self, id: LinkId) {
        loop {
            let Some((listener, _)) = self.inside.get(&id) else {
                return;
            };
            match accept(listener) {
                Accepted::Socket(socket, _) => {
                    let now = self.now();
                    let local = self.engine.accept_local(now, id);
                    self.adopt_local(local, id, socket);
                    self.perform();
                }
                Accepted::Nothing => return,
                Accepted::Failed(error) => {
                    tracing::warn!(%error, "accept on an inside address failed");
                    self.rest(Source::Inside(id));
                    return;
                }
            }
        }
    }

    fn accept_outside(&mut self, addr: SocketAddr) {
        loop {
            let Some((listener, ..)) = self.outside.get(&addr) else {
                return;
            };
            match accept(listener) {
                Accepted::Socket(socket, _) if self.pending.len() >= PENDING_MAX => drop(socket),
                Accepted::Socket(socket, peer) => {
                    if let Err(error) = self.adopt_pending(socket, addr, peer) {
                        tracing::warn!(error, "carrier refused");
                    }
                }
                Accepted::Nothing => return,
                Accepted::Failed(error) => {
                    tracing::warn!(%error, "accept on an outside address failed");
                    self.rest(Source::Outside(addr));
                    return;
                }
            }
        }
    }

    /// Does everything that the engine wants.
    fn perform(&mut self) {
        while let Some(output) = self.engine.poll_output() {
            match output {
                Output::Dial { wire, link, kind } => self.dial(wire, link, kind),
                Output::SendSession(wire, frame) => self.session_send(wire, frame),
                Output::Send {
                    wire,
                    lane,
                    carrier,
                    frame,
                } => self.carrier_send(wire, lane, carrier, frame),
                Output::WantWrite(carrier) => self.carrier_wants_write(carrier),
                Output::CloseLane(wire, lane) => self.lane_close(wire, lane),
                Output::CloseWire(wire) => self.carrier_close(wire),
                Output::ConnectLocal { local, link } => self.connect_local(local, link),
                Output::WriteLocal(local, data) => self.local_write(local, data),
                Output::ShutdownLocal(local) => self.local_shutdown(local),
                Output::CloseLocal(local, how) => self.local_close(local, how),
                Output::WantRead(local) => self.local_want_read(local),
                Output::Encode {
                    job,
                    spec,
                    raw,
                    sample,
                    prefix,
                } => {
                    self.workers.push(Work::Encode {
                        job,
                        spec,
                        raw,
                        sample,
                        prefix,
                    });
                }
                Output::Decode {
                    job,
                    codec,
                    raw_len,
                    crc,
                    payload,
                    prefix,
                } => {
                    self.workers.push(Work::Decode {
                        job,
                        codec,
                        raw_len,
                        crc,
                        payload,
                        prefix,
                    });
                }
                Output::SpillWrite { job, payload } => match &self.spill {
                    Some(spill) => spill.write(job, payload),
                    None => {
                        let now = self.now();
                        let result = Err("no spill directory".to_string());
                        self.engine.handle(now, Input::SpillWritten(job, result));
                    }
                },
                Output::SpillRead { job, from } => {
                    if let Some(spill) = &self.spill {
                        spill.read(job, from);
                    }
                }
                Output::SpillFree(record) => {
                    if let Some(spill) = &self.spill {
                        spill.free(record);
                    }
                }
                Output::Log(level, id, text) => {
                    let name = self
                        .engine
                        .config(id)
                        .map_or("", |config| config.name.as_str());
                    match level {
                        Level::Info => tracing::info!(connection = name, "{text}"),
                        Level::Warn => tracing::warn!(connection = name, "{text}"),
                        Level::Error => tracing::error!(connection = name, "{text}"),
                    }
                }
            }
        }
    }
}

enum Accepted {
    Socket(Socket, Option<SocketAddr>),
    Nothing,
    Failed(std::io::Error),
}

fn accept(listener: &Socket) -> Accepted {
    match listener.accept() {
        Ok((socket, peer)) => match socket.set_nonblocking(true) {
            Ok(()) => Accepted::Socket(socket, peer.as_socket()),
            Err(error) => Accepted::Failed(error),
        },
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Accepted::Nothing,
        // The client went away between its SYN and now.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => Accepted::Nothing,
        Err(error) => Accepted::Failed(error),
    }
}

fn listen(addr: SocketAddr) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(128)?;
    Ok(socket)
}

/// Begins a connection from an address of this machine.
fn connect(from: Option<std::net::IpAddr>, to: SocketAddr) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    if let Some(ip) = from {
        socket.bind(&SocketAddr::new(ip, 0).into())?;
    }
    match socket.connect(&to.into()) {
        Ok(()) => Ok(socket),
        Err(error)
            if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) =>
        {
            Ok(socket)
        }
        Err(error) => Err(error),
    }
}

/// Sends completions of other threads into the loop.
pub(crate) fn stop(post: &Post) {
    post.send(Mail::Stop);
}
