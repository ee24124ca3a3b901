//! The NBD server: listeners, connections and their event loop on one thread of its own.
//!
//! The loop is level-triggered epoll. A volume's completions arrive on the shard's thread in each
//! connection's sink, are handed over in one batch per shard turn, and wake the loop through an
//! eventfd. Nothing here blocks but the wait for events.

use std::collections::HashMap;
use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lockstep_core::command::{CommandError, ErrorCode};
use lockstep_core::event::RequestId;
use lockstep_io::port::{PortEvent, PortSink, VolumePort, VolumeProperties};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use super::handshake::{ExportInfo, Handshake, Lookup, Negotiated, Purpose, Refused, Step};
use super::proto::export_flag;
use super::session::{Access, Limits, MAX_PAYLOAD_BYTES, Session};

/// What the server knows about the node's volumes. Called on the server's thread, so the answers
/// must come without waiting.
pub trait Exports: Send + Sync {
    /// Names of all volumes, as `resource/volume`.
    fn names(&self) -> Vec<String>;

    /// Describes an export without opening it.
    fn describe(&self, name: &str) -> Result<ExportDescription, ExportRefusal>;

    /// A new port of the volume, not yet opened.
    fn connect(
        &self,
        name: &str,
        sink: Box<dyn PortSink>,
    ) -> Result<Box<dyn VolumePort + Send>, ExportRefusal>;
}

/// An export, for those who only ask.
#[derive(Clone, Debug)]
pub struct ExportDescription {
    /// Size, blocks and abilities.
    pub properties: VolumeProperties,
    /// One line for people.
    pub text: String,
}

/// Why a client does not get an export. The text is shown to the client's user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportRefusal {
    /// No volume has this name.
    Unknown(String),
    /// The volume cannot be opened now.
    Unavailable(String),
}

/// Where the server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A unix socket, accessible to its owner only. A dead socket at the path is replaced.
    Unix(PathBuf),
    /// A TCP address. NBD has no authentication here: bind it to a trusted network only.
    Tcp(SocketAddr),
}

/// Bounds of the server.
#[derive(Clone, Copy, Debug)]
pub struct NbdLimits {
    /// Connections at the same time; more are closed at once.
    pub connections: usize,
    /// Requests in flight of one connection.
    pub requests_per_connection: usize,
    /// Payload held for one connection in bytes, exceeded by at most one request's part.
    pub bytes_per_connection: usize,
    /// Time a client has to get through the handshake.
    pub handshake_timeout: Duration,
}

impl Default for NbdLimits {
    fn default() -> Self {
        NbdLimits {
            connections: 64,
            requests_per_connection: 128,
            bytes_per_connection: 8 << 20,
            handshake_timeout: Duration::from_secs(60),
        }
    }
}

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another server answers on the socket.
    #[error(
        "{}: another process listens on this socket; stop it or choose another path",
        .path.display()
    )]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// An address cannot be bound.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The system refused something else.
    #[error("cannot start the NBD server")]
    System(#[from] std::io::Error),
}

/// A running server. Dropping it stops it.
pub struct NbdServer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    addresses: Vec<Listen>,
}

impl NbdServer {
    /// Binds all addresses and starts the thread.
    pub fn start(
        exports: Arc<dyn Exports>,
        listen: &[Listen],
        limits: NbdLimits,
    ) -> Result<NbdServer, StartError> {
        let mut listeners = Vec::new();
        for address in listen {
            listeners.push(Listener::bind(address)?);
        }
        let addresses = listeners
            .iter()
            .map(|listener| listener.address.clone())
            .collect();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(std::io::Error::from)?;
        let shared = Arc::new(Shared {
            inbox: Mutex::new(Vec::new()),
            wake,
            wake_pending: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            users: Mutex::new(HashMap::new()),
        });
        let server = Loop::new(shared.clone(), exports, listeners, limits)?;
        let thread = std::thread::Builder::new()
            .name("nbd".into())
            .spawn(move || server.run())
            .map_err(StartError::System)?;
        Ok(NbdServer {
            shared,
            thread: Some(thread),
            addresses,
        })
    }

    /// Where the server listens, with the port that the system chose for port 0.
    pub fn addresses(&self) -> &[Listen] {
        &self.addresses
    }

    /// Clients that use the export now.
    pub fn user_count(&self, export: &str) -> usize {
        self.shared.users().get(export).copied().unwrap_or(0)
    }

    /// Ends all connections when their requests in flight are done, and the server.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the NBD server's thread had panicked");
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Names a connection for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ConnId(u64);

struct Shared {
    inbox: Mutex<Vec<(ConnId, PortEvent)>>,
    wake: OwnedFd,
    wake_pending: AtomicBool,
    stop: AtomicBool,
    users: Mutex<HashMap<String, usize>>,
}

impl Shared {
    fn wake(&self) {
        if !self.wake_pending.swap(true, Ordering::SeqCst) {
            // It fails only if the counter is full, and then the loop wakes anyway.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    fn users(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inbox(&self) -> MutexGuard<'_, Vec<(ConnId, PortEvent)>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's end of its volume's port.
struct Sink {
    conn: ConnId,
    shared: Arc<Shared>,
    batch: Vec<(ConnId, PortEvent)>,
}

impl PortSink for Sink {
    fn event(&mut self, event: PortEvent) {
        self.batch.push((self.conn, event));
    }

    fn batch_end(&mut self) {
        if !self.batch.is_empty() {
            self.shared.inbox().append(&mut self.batch);
            self.shared.wake();
        }
    }
}

struct Listener {
    address: Listen,
    socket: ListenSocket,
}

enum ListenSocket {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    fn bind(address: &Listen) -> Result<Listener, StartError> {
        match address {
            Listen::Unix(path) => {
                let source = |source| StartError::Listen {
                    address: path.display().to_string(),
                    source,
                };
                let socket = bind_unix(path).map_err(|error| match error.kind() {
                    ErrorKind::AddrInUse => StartError::InUse { path: path.clone() },
                    _ => source(error),
                })?;
                Ok(Listener {
                    address: address.clone(),
                    socket: ListenSocket::Unix(socket),
                })
            }
            Listen::Tcp(tcp) => {
                let bind = || {
                    let socket = TcpListener::bind(tcp)?;
                    socket.set_nonblocking(true)?;
                    let address = Listen::Tcp(socket.local_addr()?);
                    Ok(Listener {
                        address,
                        socket: ListenSocket::Tcp(socket),
                    })
                };
                bind().map_err(|source| StartError::Listen {
                    address: tcp.to_string(),
                    source,
                })
            }
        }
    }

    fn accept(&self) -> std::io::Result<Stream> {
        match &self.socket {
            ListenSocket::Unix(socket) => {
                let (stream, _) = socket.accept()?;
                stream.set_nonblocking(true)?;
                Ok(Stream::Unix(stream))
            }
            ListenSocket::Tcp(socket) => {
                let (stream, _) = socket.accept()?;
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                socket2::SockRef::from(&stream).set_keepalive(true)?;
                Ok(Stream::Tcp(stream))
            }
        }
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            ListenSocket::Unix(socket) => socket.as_fd(),
            ListenSocket::Tcp(socket) => socket.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listen::Unix(path) = &self.address {
            // Somebody may have removed it already.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn bind_unix(path: &Path) -> std::io::Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        return Err(ErrorKind::AddrInUse.into());
    }
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        return Err(error);
    }
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    // The mode that the socket's file gets, without a moment in which it is wider.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    socket.bind(&socket2::SockAddr::unix(path)?)?;
    socket.listen(128)?;
    socket.set_nonblocking(true)?;
    Ok(UnixListener::from(OwnedFd::from(socket)))
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> std::io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read_vectored(bufs),
            Stream::Tcp(stream) => stream.read_vectored(bufs),
        }
    }

    fn write_vectored(&mut self, bufs: &[std::io::IoSlice<'_>]) -> std::io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write_vectored(bufs),
            Stream::Tcp(stream) => stream.write_vectored(bufs),
        }
    }
}

struct Conn {
    stream: Stream,
    /// Received bytes that are not used yet: `input[start..end]`.
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes of the handshake on their way out.
    greeting: Vec<u8>,
    phase: Phase,
    interest: epoll::EventFlags,
    deadline: Instant,
    /// The socket is closed as far as we are concerned.
    hung_up: bool,
    watched: bool,
}

enum Phase {
    Handshake(Handshake),
    Opening(Box<Opening>),
    Transmission {
        session: Box<Session>,
        export: String,
    },
    /// Sends the rest of the handshake, then ends.
    Farewell,
}

/// A volume is being opened for a client.
struct Opening {
    handshake: Handshake,
    export: String,
    description: ExportDescription,
    port: Box<dyn VolumePort + Send>,
    access: Access,
    /// Why it was refused for writing.
    refusal: Option<CommandError>,
    /// It was opened for writing a second time.
    again: bool,
}

struct Loop {
    shared: Arc<Shared>,
    exports: Arc<dyn Exports>,
    listeners: Vec<Listener>,
    limits: NbdLimits,
    epoll: OwnedFd,
    conns: HashMap<ConnId, Conn>,
    next_conn: u64,
    stopping: bool,
}

const TOKEN_WAKE: u64 = 0;
const TOKEN_LISTENERS: u64 = 1;
const TOKEN_CONNS: u64 = 1 << 16;
/// Buffer of one connection for what has arrived, in bytes.
const INPUT_BYTES: usize = 64 << 10;
/// Reads from one socket before the others have their turn.
const READS_PER_TURN: usize = 4;
/// A payload of which less is missing comes through the input buffer together with what follows.
const DIRECT_READ_BYTES: usize = 32 << 10;
/// How many times the limit of connections there may be, counting those whose client has gone but
/// whose requests the volume still has.
const DEAD_FACTOR: usize = 4;
/// How long the clients have to take their last replies when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(2);
/// How often a connection without memory asks for it while nothing of its own is in flight.
const STARVED_RETRY: Duration = Duration::from_millis(2);

impl Loop {
    fn new(
        shared: Arc<Shared>,
        exports: Arc<dyn Exports>,
        listeners: Vec<Listener>,
        limits: NbdLimits,
    ) -> Result<Loop, StartError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let add = |fd: BorrowedFd<'_>, token| {
            epoll::add(
                &epoll,
                fd,
                epoll::EventData::new_u64(token),
                epoll::EventFlags::IN,
            )
            .map_err(std::io::Error::from)
        };
        add(shared.wake.as_fd(), TOKEN_WAKE)?;
        for (index, listener) in listeners.iter().enumerate() {
            add(listener.as_fd(), TOKEN_LISTENERS + index as u64)?;
        }
        Ok(Loop {
            shared,
            exports,
            listeners,
            limits,
            epoll,
            conns: HashMap::new(),
            next_conn: 0,
            stopping: false,
        })
    }

    fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let timeout = self.timeout();
            let timeout = timeout.map(|left| Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            });
            let buffer = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, buffer, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "waiting for events failed, the NBD server ends");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    TOKEN_WAKE => self.woken(),
                    token if token < TOKEN_CONNS => {
                        self.accept((token - TOKEN_LISTENERS) as usize);
                    }
                    token => self.socket_ready(ConnId(token - TOKEN_CONNS), event.flags),
                }
            }
            self.expire();
            if self.shared.stop.load(Ordering::SeqCst) && !self.stopping {
                self.begin_stop();
            }
            if self.stopping && self.conns.is_empty() {
                return;
            }
        }
    }

    /// How long to wait at most.
    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        let wanted = |conn: &Conn| match &conn.phase {
            Phase::Handshake(_) | Phase::Farewell => {
                Some(conn.deadline.saturating_duration_since(now))
            }
            Phase::Opening(_) | Phase::Transmission { .. } if self.stopping => {
                Some(conn.deadline.saturating_duration_since(now))
            }
            Phase::Opening(_) => None,
            Phase::Transmission { session, .. } => session.starved().then_some(STARVED_RETRY),
        };
        self.conns.values().filter_map(wanted).min()
    }

    /// Ends handshakes that take too long and lets starved connections try again.
    fn expire(&mut self) {
        let now = Instant::now();
        let due: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, conn)| match &conn.phase {
                Phase::Handshake(_) | Phase::Farewell => conn.deadline <= now,
                Phase::Opening(_) => self.stopping && conn.deadline <= now,
                Phase::Transmission { session, .. } => {
                    session.starved() || (self.stopping && conn.deadline <= now)
                }
            })
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            let Some(conn) = self.conns.get_mut(&id) else {
                continue;
            };
            if self.stopping && conn.deadline <= now {
                // What the volume has not answered by now (its I/O may be suspended) it may keep.
                self.close(id);
                continue;
            }
            if matches!(conn.phase, Phase::Handshake(_) | Phase::Farewell) {
                conn.hung_up = true;
            }
            self.advance(id);
        }
    }

    fn begin_stop(&mut self) {
        self.stopping = true;
        self.listeners.clear();
        let ids: Vec<ConnId> = self.conns.keys().copied().collect();
        for id in ids {
            if let Some(conn) = self.conns.get_mut(&id) {
                conn.deadline = Instant::now() + STOP_GRACE;
                match &mut conn.phase {
                    Phase::Handshake(_) | Phase::Farewell => conn.hung_up = true,
                    Phase::Opening(_) => {}
                    Phase::Transmission { session, .. } => session.shut_down(),
                }
            }
            self.advance(id);
        }
    }

    fn accept(&mut self, listener: usize) {
        let Some(listener) = self.listeners.get(listener) else {
            return;
        };
        let stream = match listener.accept() {
            Ok(stream) => stream,
            Err(error) => {
                if error.kind() != ErrorKind::WouldBlock {
                    tracing::warn!(%error, "an NBD connection could not be accepted");
                }
                return;
            }
        };
        // Clients that have gone while their requests hang do not keep others out, within reason.
        let living = self.conns.values().filter(|conn| !conn.hung_up).count();
        let limit = self.limits.connections;
        if living >= limit || self.conns.len() >= DEAD_FACTOR * limit {
            tracing::warn!(limit = self.limits.connections, "too many NBD connections");
            return;
        }
        let id = ConnId(self.next_conn);
        self.next_conn += 1;
        let interest = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        let data = epoll::EventData::new_u64(TOKEN_CONNS + id.0);
        if let Err(error) = epoll::add(&self.epoll, stream.as_fd(), data, interest) {
            tracing::warn!(%error, "an NBD connection could not be watched");
            return;
        }
        let conn = Conn {
            stream,
            input: vec![0; INPUT_BYTES].into(),
            start: 0,
            end: 0,
            greeting: Vec::new(),
            phase: Phase::Handshake(Handshake::new()),
            interest,
            deadline: Instant::now() + self.limits.handshake_timeout,
            hung_up: false,
            watched: true,
        };
        self.conns.insert(id, conn);
        self.advance(id);
    }

    fn woken(&mut self) {
        let mut count = [0; 8];
        // Only this thread reads it; an empty counter is no error.
        let _ = rustix::io::read(&self.shared.wake, &mut count);
        self.shared.wake_pending.store(false, Ordering::SeqCst);
        let events = std::mem::take(&mut *self.shared.inbox());
        let mut touched = Vec::new();
        for (id, event) in events {
            if touched.last() != Some(&id) {
                touched.push(id);
            }
            self.port_event(id, event);
        }
        for id in touched {
            self.advance(id);
        }
    }

    fn port_event(&mut self, id: ConnId, event: PortEvent) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        match event {
            PortEvent::Done(completion) => {
                if let Phase::Transmission { session, .. } = &mut conn.phase {
                    session.completed(completion);
                }
            }
            PortEvent::Changed(properties) => {
                if let Phase::Transmission { session, .. } = &mut conn.phase {
                    session.changed(properties);
                }
            }
            PortEvent::Gone => match &mut conn.phase {
                Phase::Transmission { session, .. } => session.shut_down(),
                // No answer to `open` will come, and there is nothing to close.
                Phase::Opening(_) => conn.phase = Phase::Farewell,
                Phase::Handshake(_) | Phase::Farewell => {}
            },
            PortEvent::Opened { result, .. } => {
                self.opened(id, result);
            }
        }
    }

    fn socket_ready(&mut self, id: ConnId, flags: epoll::EventFlags) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let gone = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
        if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::RDHUP) {
            // What a client sent before it left still counts.
            conn.read();
        } else if flags.intersects(gone) {
            conn.hung_up = true;
        }
        self.advance(id);
    }

    /// Does everything that a connection can do now, and closes it if it is done.
    fn advance(&mut self, id: ConnId) {
        loop {
            let Some(conn) = self.conns.get_mut(&id) else {
                return;
            };
            match conn.progress() {
                Progress::Idle if conn.flush() == Flushed::MadeRoom => {}
                Progress::Idle => break,
                Progress::Again => {}
                Progress::List => {
                    let names = self.exports.names();
                    if let Phase::Handshake(handshake) = &mut conn.phase {
                        handshake.answer_list(&names);
                    }
                }
                Progress::Lookup(lookup) => self.look_up(id, lookup),
            }
        }
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        if conn.finished() {
            self.close(id);
            return;
        }
        if conn.hung_up {
            conn.unwatch(&self.epoll);
            return;
        }
        let wanted = conn.wanted_interest();
        if wanted != conn.interest {
            conn.interest = wanted;
            let data = epoll::EventData::new_u64(TOKEN_CONNS + id.0);
            if let Err(error) = epoll::modify(&self.epoll, conn.stream.as_fd(), data, wanted) {
                tracing::warn!(%error, "an NBD connection could not be watched any more");
                conn.hung_up = true;
            }
        }
    }

    fn look_up(&mut self, id: ConnId, lookup: Lookup) {
        let found = self.find(&lookup);
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let Phase::Handshake(handshake) = &mut conn.phase else {
            return;
        };
        let (name, description) = match found {
            Ok(found) => found,
            Err(refused) => {
                handshake.answer(Err(refused));
                return;
            }
        };
        let access = if description.properties.writable {
            Access::ReadWrite
        } else {
            Access::ReadOnly
        };
        let info = export_info(&description, access);
        if lookup.purpose == Purpose::Info || Handshake::refuses_block_size(&lookup, &info) {
            handshake.answer(Ok(info));
            return;
        }
        let sink = Sink {
            conn: id,
            shared: self.shared.clone(),
            batch: Vec::new(),
        };
        match self.exports.connect(&name, Box::new(sink)) {
            Err(refusal) => {
                handshake.answer(Err(refusal.into()));
            }
            Ok(mut port) => {
                port.open(OPEN_ID, true);
                port.kick();
                let handshake = std::mem::replace(handshake, Handshake::new());
                conn.phase = Phase::Opening(Box::new(Opening {
                    handshake,
                    export: name,
                    description,
                    port,
                    access: Access::ReadWrite,
                    refusal: None,
                    again: false,
                }));
            }
        }
    }

    fn find(&self, lookup: &Lookup) -> Result<(String, ExportDescription), Refused> {
        if self.stopping {
            return Err(Refused::Shutdown);
        }
        let name = if lookup.name.is_empty() {
            let mut names = self.exports.names();
            match (names.pop(), names.pop()) {
                (Some(only), None) => only,
                _ => {
                    let text = "there is not exactly one volume, so name one: resource/volume";
                    return Err(Refused::Unknown(text.into()));
                }
            }
        } else {
            lookup.name.clone()
        };
        let description = self.exports.describe(&name)?;
        Ok((name, description))
    }

    /// The answer to an `open` has come.
    fn opened(&mut self, id: ConnId, result: Result<(), CommandError>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.deadline = Instant::now() + self.limits.handshake_timeout;
        let phase = std::mem::replace(&mut conn.phase, Phase::Farewell);
        let Phase::Opening(mut opening) = phase else {
            conn.phase = phase;
            return;
        };
        match (result, opening.access) {
            (Err(error), Access::ReadWrite) if is_passing(error.code) => {
                // A client that comes back after the server's death does not expect less than it
                // had, and may not look: it tries again.
                let Opening { mut handshake, .. } = *opening;
                let text = format!("{}; try again", error.text);
                handshake.answer(Err(Refused::Policy(text)));
                conn.phase = Phase::Handshake(handshake);
            }
            (Err(error), Access::ReadWrite) => {
                // A volume that cannot be written may still be readable.
                opening.refusal = Some(error);
                opening.access = Access::ReadOnly;
                opening.port.open(OPEN_ID, false);
                opening.port.kick();
                conn.phase = Phase::Opening(opening);
            }
            (Err(error), Access::ReadOnly) => {
                let Opening {
                    mut handshake,
                    refusal,
                    ..
                } = *opening;
                let text = refusal.unwrap_or(error).text;
                handshake.answer(Err(Refused::Policy(text)));
                conn.phase = Phase::Handshake(handshake);
            }
            (Ok(()), Access::ReadOnly) if !opening.again && is_past(opening.refusal.as_ref()) => {
                opening.again = true;
                opening.access = Access::ReadWrite;
                opening.port.close(false);
                opening.port.open(OPEN_ID, true);
                opening.port.kick();
                conn.phase = Phase::Opening(opening);
            }
            (Ok(()), access) => {
                let Opening {
                    mut handshake,
                    mut port,
                    export,
                    mut description,
                    refusal,
                    ..
                } = *opening;
                if access == Access::ReadOnly {
                    let reason = refusal.map(|error| error.text);
                    tracing::info!(export, reason, "exported for reading only");
                }
                description.properties = port.properties();
                let info = export_info(&description, access);
                match handshake.answer(Ok(info)) {
                    Some(negotiated) => {
                        conn.greeting.append(&mut handshake.out);
                        let session = new_session(negotiated, access, self.limits, port);
                        *self.shared.users().entry(export.clone()).or_insert(0) += 1;
                        conn.phase = Phase::Transmission { session, export };
                    }
                    None => {
                        port.close(access == Access::ReadWrite);
                        port.kick();
                        conn.phase = Phase::Handshake(handshake);
                    }
                }
                if self.stopping
                    && let Phase::Transmission { session, .. } = &mut conn.phase
                {
                    session.shut_down();
                }
            }
        }
    }

    fn close(&mut self, id: ConnId) {
        let Some(conn) = self.conns.remove(&id) else {
            return;
        };
        let Conn { stream, phase, .. } = conn;
        if let Phase::Transmission { session, export } = phase {
            let (mut port, access) = session.into_port();
            port.close(access == Access::ReadWrite);
            port.kick();
            let mut users = self.shared.users();
            if let Some(count) = users.get_mut(&export) {
                *count -= 1;
                if *count == 0 {
                    users.remove(&export);
                }
            }
        }
        // Closing the socket also ends its registration.
        drop(stream);
    }
}

/// Whether a promotion was refused only because of what goes on at this moment.
fn is_passing(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::IN_TRANSIENT_STATE | ErrorCode::CONCURRENT_ST_CHG | ErrorCode::TIMEOUT
    )
}

/// Whether a volume that can be read contradicts this: its disk was being attached, its quorum on the
/// way. It may hold for another volume of the resource all the same.
fn is_past(refusal: Option<&CommandError>) -> bool {
    let past = |code| matches!(code, ErrorCode::NO_UP_TO_DATE_DISK | ErrorCode::NO_QUORUM);
    refusal.is_some_and(|error| past(error.code))
}

/// The id of a port's only `open` that is unanswered.
const OPEN_ID: RequestId = RequestId(u64::MAX);

fn new_session(
    negotiated: Negotiated,
    access: Access,
    limits: NbdLimits,
    port: Box<dyn VolumePort + Send>,
) -> Box<Session> {
    let limits = Limits {
        requests: limits.requests_per_connection,
        bytes: limits.bytes_per_connection,
    };
    Box::new(Session::new(negotiated, access, limits, port))
}

fn export_info(description: &ExportDescription, access: Access) -> ExportInfo {
    let properties = &description.properties;
    let mut flags = export_flag::HAS_FLAGS
        | export_flag::SEND_FLUSH
        | export_flag::SEND_FUA
        | export_flag::SEND_WRITE_ZEROES
        | export_flag::SEND_FAST_ZERO
        | export_flag::SEND_DF
        | export_flag::CAN_MULTI_CONN
        | export_flag::SEND_CACHE;
    if properties.discard {
        flags |= export_flag::SEND_TRIM;
    }
    if access == Access::ReadOnly {
        flags |= export_flag::READ_ONLY;
    }
    let min_block_bytes = properties.logical_block_bytes.max(512);
    ExportInfo {
        size_bytes: properties.size_bytes,
        flags,
        min_block_bytes,
        preferred_block_bytes: properties.physical_block_bytes.max(4096),
        max_block_bytes: MAX_PAYLOAD_BYTES,
        description: description.text.clone(),
    }
}

impl From<ExportRefusal> for Refused {
    fn from(refusal: ExportRefusal) -> Refused {
        match refusal {
            ExportRefusal::Unknown(text) => Refused::Unknown(text),
            ExportRefusal::Unavailable(text) => Refused::Policy(text),
        }
    }
}

/// What sending came to.
#[derive(PartialEq, Eq)]
enum Flushed {
    /// Something was sent, and there is something that waited for that.
    MadeRoom,
    Nothing,
}

/// What `Conn::progress` needs of the loop.
enum Progress {
    Idle,
    Again,
    List,
    Lookup(Lookup),
}

impl Conn {
    /// Reads what has arrived, as far as there is room.
    fn read(&mut self) {
        for _ in 0..READS_PER_TURN {
            self.consume();
            if self.start > 0 {
                self.input.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.start = 0;
            }
            let room = &mut self.input[self.end..];
            let target = match &mut self.phase {
                // Only if nothing lies before it in the input buffer.
                Phase::Transmission { session, .. } if self.end == 0 => session.payload_target(),
                _ => None,
            };
            let target = target.filter(|target| target.len() >= DIRECT_READ_BYTES);
            let direct = target.as_ref().map_or(0, |target| target.len());
            if room.is_empty() && direct == 0 {
                return;
            }
            let result = match target {
                Some(target) => {
                    let mut slices = [IoSliceMut::new(target), IoSliceMut::new(room)];
                    self.stream.read_vectored(&mut slices)
                }
                None => self.stream.read_vectored(&mut [IoSliceMut::new(room)]),
            };
            match result {
                Ok(0) => {
                    self.hung_up = true;
                    return;
                }
                Ok(len) => {
                    let to_target = len.min(direct);
                    self.end += len - to_target;
                    if to_target > 0
                        && let Phase::Transmission { session, .. } = &mut self.phase
                    {
                        session.payload_received(to_target);
                    }
                    if len < direct + INPUT_BYTES / 2 {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    self.hung_up = true;
                    return;
                }
            }
        }
        self.consume();
    }

    /// Hands received bytes to the session.
    fn consume(&mut self) {
        if let Phase::Transmission { session, .. } = &mut self.phase {
            self.start += session.receive(&self.input[self.start..self.end]);
            if self.start == self.end {
                self.start = 0;
                self.end = 0;
            }
        }
    }

    /// One step that needs no socket.
    fn progress(&mut self) -> Progress {
        match &mut self.phase {
            Phase::Handshake(handshake) => {
                let input = &self.input[self.start..self.end];
                let (used, step) = handshake.step(input);
                self.start += used;
                self.greeting.append(&mut handshake.out);
                match step {
                    Step::NeedBytes if used > 0 => Progress::Again,
                    Step::NeedBytes => Progress::Idle,
                    Step::Lookup(lookup) => Progress::Lookup(lookup),
                    Step::List => Progress::List,
                    Step::Close => {
                        self.phase = Phase::Farewell;
                        Progress::Idle
                    }
                }
            }
            Phase::Opening(_) | Phase::Farewell => Progress::Idle,
            Phase::Transmission { session, .. } => {
                if self.hung_up && !session.broken() {
                    session.abandon();
                }
                session.turn();
                self.consume();
                if let Phase::Transmission { session, .. } = &mut self.phase {
                    session.turn();
                }
                Progress::Idle
            }
        }
    }

    /// Sends as much as the socket takes.
    fn flush(&mut self) -> Flushed {
        let mut sent_any = false;
        while !self.hung_up {
            let result = if !self.greeting.is_empty() {
                let sent = self
                    .stream
                    .write_vectored(&[std::io::IoSlice::new(&self.greeting)]);
                sent.inspect(|len| {
                    self.greeting.drain(..*len);
                })
            } else {
                match &mut self.phase {
                    Phase::Transmission { session, .. } if session.has_output() => {
                        let stream = &mut self.stream;
                        session.transmit(|slices| stream.write_vectored(slices))
                    }
                    _ => break,
                }
            };
            match result {
                Ok(0) => self.hung_up = true,
                Ok(_) => sent_any = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.hung_up = true,
            }
        }
        match &mut self.phase {
            Phase::Transmission { session, .. } => {
                if self.hung_up && !session.broken() {
                    session.abandon();
                }
                let waits = session.stalled() || self.start < self.end;
                if sent_any && waits {
                    Flushed::MadeRoom
                } else {
                    Flushed::Nothing
                }
            }
            Phase::Handshake(_) | Phase::Opening(_) | Phase::Farewell => Flushed::Nothing,
        }
    }

    /// A socket whose peer has gone reports that for ever, so it is not watched any more.
    fn unwatch(&mut self, epoll: &OwnedFd) {
        if std::mem::take(&mut self.watched)
            && let Err(error) = epoll::delete(epoll, self.stream.as_fd())
        {
            tracing::warn!(%error, "a dead NBD connection is still watched");
        }
    }

    fn finished(&self) -> bool {
        match &self.phase {
            Phase::Handshake(_) => self.hung_up,
            Phase::Farewell => self.hung_up || self.greeting.is_empty(),
            // The answer to `open` must be awaited, so that the volume is closed again.
            Phase::Opening(_) => false,
            Phase::Transmission { session, .. } => session.finished() && session.idle(),
        }
    }

    fn wanted_interest(&self) -> epoll::EventFlags {
        let mut interest = epoll::EventFlags::empty();
        if self.hung_up {
            return interest;
        }
        let (reads, writes) = match &self.phase {
            Phase::Handshake(_) => (self.end - self.start < INPUT_BYTES, false),
            Phase::Opening(_) | Phase::Farewell => (false, false),
            Phase::Transmission { session, .. } => (!session.paused(), session.has_output()),
        };
        if reads {
            interest |= epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        }
        if writes || !self.greeting.is_empty() {
            interest |= epoll::EventFlags::OUT;
        }
        interest
    }
}
