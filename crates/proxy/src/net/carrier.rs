//! Sockets towards the peer proxy: connecting, TLS, cutting bytes into frames, and writing frames as
//! the bandwidth limits allow. At most a few TLS records are ever ahead of the kernel. This is
//! done on the control lane until a carrier is known to be one for bulk; then a shard has its
//! socket (`far`), and only the queue and the permission to send stay here.

use std::collections::VecDeque;
use std::io::{BufRead, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use rustix::event::epoll;
use socket2::{Socket, TcpKeepalive};

use super::far::FarCarrier;
use super::shard::Piece;
use super::{Reactor, Source, TURN_BYTES, connect};
use crate::core::config::{LinkConfig, LinkOptions};
use crate::core::dscp::Dscp;
use crate::core::frame::{Cut, Frame, FrameReader, HEADER_LEN, Kind};
use crate::core::identity::Peer;
use crate::core::stats::{CarrierSnapshot, Snapshot};
use crate::core::{CarrierId, CarrierKind, Input, LinkId};
use crate::tls::{Ends, Identity, failure};

/// Plain bytes given to TLS at once.
pub(super) const RECORD_BYTES: usize = 16 << 10;
/// Unsent bytes that the kernel may hold for a carrier: at most this, on a limited line what
/// passes in 40 ms, and at least a TLS record.
const NOTSENT_MAX: u32 = 128 << 10;
const NOTSENT_MIN: u32 = RECORD_BYTES as u32;

/// A socket towards the peer proxy.
pub(super) struct CarrierSock {
    pub(super) socket: Arc<Socket>,
    pub(super) token: u64,
    pub(super) connecting: bool,
    /// With a carrier of a shard, the shard has it.
    pub(super) tls: Option<Box<rustls::Connection>>,
    dialled: Option<SocketAddr>,
    pub(super) reader: FrameReader,
    pub(super) queue: VecDeque<Outgoing>,
    interest: epoll::EventFlags,
    registered: bool,
    /// The rest of the queue is written, then the socket is closed.
    pub(super) closing: bool,
    /// A shard has the socket.
    pub(super) far: Option<FarCarrier>,
    /// Without TLS: the kernel had no room.
    full: bool,
}

/// What choosing an identity needs to know of a connection.
fn ends_of(config: &LinkConfig) -> Ends<'_> {
    Ends {
        name: &config.name,
        my_outside: config.my_outside,
        peer_outside: config.peer_outside,
    }
}

/// A frame on its way out.
pub(super) struct Outgoing {
    header: [u8; HEADER_LEN],
    frame: Frame,
    done: usize,
}

impl Reactor {
    pub(super) fn dial(&mut self, carrier: CarrierId, id: LinkId, kind: CarrierKind) {
        let Some(config) = self.engine.config(id) else {
            return;
        };
        let (from, to) = (config.my_outside.ip(), config.peer_outside);
        let (options, rate) = (config.options.clone(), self.engine.lowest_rate(id));
        let ends = ends_of(config);
        tracing::debug!(connection = config.name, %to, ?kind, "dialling");
        // Behind address translation the outside address is not one of this machine's.
        let from = (!from.is_unspecified() && from.is_ipv4() == to.is_ipv4()).then_some(from);
        let begun = connect(from, to).or_else(|error| match error.kind() {
            std::io::ErrorKind::AddrNotAvailable => connect(None, to),
            _ => Err(error),
        });
        let mut sock = match begun.map_err(|error| error.to_string()).and_then(|socket| {
            let tls = match &self.identity {
                Identity::Insecure => None,
                Identity::Tls(tls) => Some(Box::new(tls.dial(ends)?)),
            };
            Ok(CarrierSock::new(socket, tls))
        }) {
            Ok(sock) => sock,
            Err(error) => {
                let now = self.now();
                self.engine.handle(now, Input::CarrierDown(carrier, error));
                return;
            }
        };
        self.live.carriers.insert(carrier, id);
        sock.dialled = Some(to);
        sock.connecting = true;
        tune(&sock.socket, kind, &options, rate);
        sock.token = self.token(Source::Carrier(carrier));
        self.carriers.insert(carrier, sock);
        self.update_carrier(carrier);
    }

    /// Takes over a socket that was accepted on an outside address; it becomes a carrier when it
    /// is authenticated.
    pub(super) fn adopt_pending(
        &mut self,
        socket: Socket,
        listener: SocketAddr,
        peer: Option<SocketAddr>,
    ) -> Result<(), String> {
        let _ = socket.set_tcp_nodelay(true);
        let tls = match &self.identity {
            Identity::Insecure => None,
            Identity::Tls(tls) => {
                let known = self.engine.links.values().map(|link| ends_of(&link.config));
                Some(Box::new(tls.accept(listener, known)?))
            }
        };
        let plain = tls.is_none();
        let mut sock = CarrierSock::new(socket, tls);
        sock.dialled = peer;
        if plain {
            self.promote(sock, listener);
            return Ok(());
        }
        let token = self.next_token;
        sock.token = self.token(Source::Pending(token));
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, &sock.socket, data, epoll::EventFlags::IN)
            .map_err(|error| error.to_string())?;
        sock.registered = true;
        sock.interest = epoll::EventFlags::IN;
        self.pending.insert(token, (sock, listener, Clock::now()));
        Ok(())
    }

    pub(super) fn pending_ready(&mut self, token: u64) {
        let Some((sock, listener, _)) = self.pending.get_mut(&token) else {
            return;
        };
        let listener = *listener;
        let Some(tls) = &mut sock.tls else { return };
        let failure = match tls.read_tls(&mut (&*sock.socket)) {
            Ok(0) => Some("closed while authenticating".to_string()),
            Ok(_) => tls.process_new_packets().err().map(|error| failure(&error)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(error) => Some(error.to_string()),
        };
        // The few handshake bytes fit the kernel's buffer; an alert goes out on failure too.
        while tls.wants_write() {
            if tls.write_tls(&mut (&*sock.socket)).is_err() {
                break;
            }
        }
        if let Some(reason) = failure {
            self.drop_pending(token, &reason);
        } else if !tls.is_handshaking()
            && let Some((sock, ..)) = self.pending.remove(&token)
        {
            self.promote(sock, listener);
        }
    }

    /// Who is at the other end, after the handshake.
    fn peer_of(&self, sock: &CarrierSock) -> Peer {
        match (&self.identity, &sock.tls) {
            (Identity::Tls(known), Some(connection)) => known.peer_of(connection),
            _ => Peer::default(),
        }
    }

    pub(super) fn drop_pending(&mut self, token: u64, reason: &str) {
        if let Some((sock, listener, _)) = self.pending.remove(&token) {
            self.sources.remove(&token);
            let peer = sock
                .dialled
                .map(|peer| peer.to_string())
                .unwrap_or_default();
            tracing::warn!(%listener, peer, reason, "a carrier was refused");
        }
    }

    fn promote(&mut self, mut sock: CarrierSock, listener: SocketAddr) {
        let now = self.now();
        let peer = self.peer_of(&sock);
        tracing::debug!(%listener, from = ?sock.dialled, "a carrier was accepted");
        let carrier = self.engine.accept_carrier(now, listener, peer);
        if sock.registered {
            self.sources.insert(sock.token, Source::Carrier(carrier));
        } else {
            sock.token = self.token(Source::Carrier(carrier));
        }
        let options = LinkOptions::default();
        tune(&sock.socket, CarrierKind::Control, &options, 0);
        self.carriers.insert(carrier, sock);
        self.update_carrier(carrier);
        // Bytes may have come together with the end of the handshake.
        self.carrier_take(carrier);
        self.carrier_flush(carrier);
        self.move_carrier(carrier);
    }

    /// What an accepted carrier is for is known since its first frame.
    fn retune(&self, carrier: CarrierId) {
        let Some(sock) = self.carriers.get(&carrier) else {
            return;
        };
        let Some(entry) = self.engine.carriers.get(&carrier) else {
            return;
        };
        let Some(id) = entry.link else { return };
        if let Some(config) = self.engine.config(id) {
            let rate = self.engine.lowest_rate(id);
            tune(&sock.socket, entry.kind, &config.options, rate);
        }
    }

    /// Options have changed that carriers which are up have to know.
    pub(crate) fn retune_all(&self) {
        for carrier in self.carriers.keys() {
            self.retune(*carrier);
        }
    }

    /// The rates may have changed with the time of day.
    pub(super) fn follow_rates(&self) {
        for (carrier, sock) in &self.carriers {
            let entry = self.engine.carriers.get(carrier);
            if let Some(id) = entry.and_then(|entry| entry.link) {
                let _ = sock
                    .socket
                    .set_tcp_notsent_lowat(notsent_bytes(self.engine.lowest_rate(id)));
            }
        }
    }

    /// The state of everything, with what only the sockets know.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.engine.snapshot(self.now());
        snapshot.log_level = self.live.log_level().into();
        snapshot.thread_cpu_us = crate::threads::cpu_us();
        for (carrier, sock) in &self.carriers {
            let Some(entry) = self.engine.carriers.get(carrier) else {
                continue;
            };
            let config = entry.link.and_then(|id| self.engine.config(id));
            let mut links = snapshot.connections.iter_mut();
            let Some(link) = config.and_then(|config| links.find(|link| link.name == config.name))
            else {
                continue;
            };
            let addr = |found: std::io::Result<socket2::SockAddr>| {
                let found = found.ok().and_then(|addr| addr.as_socket());
                found.map_or(String::new(), |addr| addr.to_string())
            };
            let tcp = super::tcp::tcp_of(&sock.socket);
            link.counters.retransmits += u64::from(tcp.retransmitted_segments);
            let congestion = sock.socket.tcp_congestion().unwrap_or_default();
            let congestion = String::from_utf8_lossy(&congestion);
            link.carriers.push(CarrierSnapshot {
                class: match entry.kind {
                    CarrierKind::Control => "control",
                    CarrierKind::Bulk => "bulk",
                }
                .into(),
                local: addr(sock.socket.local_addr()),
                peer: addr(sock.socket.peer_addr()),
                sent_bytes: entry.sent_bytes,
                received_bytes: entry.received_bytes,
                dscp: dscp_of(&sock.socket).map_or(String::new(), |code| code.to_string()),
                congestion: congestion.trim_end_matches('\0').into(),
                notsent_bytes: sock.socket.tcp_notsent_lowat().unwrap_or(0),
                number: entry.number,
                tcp,
            });
        }
        snapshot
    }

    pub(super) fn carrier_ready(&mut self, carrier: CarrierId, flags: epoll::EventFlags) {
        let Some(sock) = self.carriers.get_mut(&carrier) else {
            return;
        };
        if sock.connecting {
            match sock.socket.take_error() {
                Ok(None) if flags.contains(epoll::EventFlags::OUT) => {
                    sock.connecting = false;
                    if sock.tls.is_none() {
                        let (now, peer) = (self.now(), Peer::default());
                        self.engine.handle(now, Input::CarrierUp(carrier, peer));
                    }
                    self.carrier_flush(carrier);
                }
                Ok(None) => {}
                Ok(Some(error)) | Err(error) => self.carrier_lost(carrier, &error.to_string()),
            }
            return;
        }
        if flags.contains(epoll::EventFlags::OUT) {
            sock.full = false;
            self.carrier_flush(carrier);
        }
        if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR)
        {
            self.carrier_read(carrier);
        }
    }

    fn carrier_read(&mut self, carrier: CarrierId) {
        let mut budget = TURN_BYTES;
        while budget > 0 {
            let Some(sock) = self.carriers.get_mut(&carrier) else {
                return;
            };
            let len = match (&*sock.socket).read(&mut self.scratch) {
                Ok(0) => {
                    self.carrier_lost(carrier, "the peer closed the connection");
                    return;
                }
                Ok(len) => len,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    self.carrier_lost(carrier, &error.to_string());
                    return;
                }
            };
            budget = budget.saturating_sub(len);
            let Some(sock) = self.carriers.get_mut(&carrier) else {
                return;
            };
            if sock.tls.is_none() {
                let cut = sock.reader.cut(&self.scratch[..len]);
                if !self.carrier_came(carrier, len, cut) {
                    return;
                }
                continue;
            }
            let scratch = std::mem::take(&mut self.scratch);
            let going = self.carrier_decrypt(carrier, &scratch[..len]);
            self.scratch = scratch;
            if !going {
                return;
            }
        }
        self.carrier_flush(carrier);
    }

    /// Gives received bytes to TLS; false when the carrier is gone.
    fn carrier_decrypt(&mut self, carrier: CarrierId, mut rest: &[u8]) -> bool {
        while !rest.is_empty() {
            let Some(sock) = self.carriers.get_mut(&carrier) else {
                return false;
            };
            let Some(tls) = &mut sock.tls else {
                return false;
            };
            let was_handshaking = tls.is_handshaking();
            let result = tls
                .read_tls(&mut rest)
                .map_err(|error| error.to_string())
                .and_then(|_| tls.process_new_packets().map_err(|error| failure(&error)));
            if let Err(error) = result {
                // Tell the peer why, if the socket takes it.
                while tls.wants_write() && tls.write_tls(&mut (&*sock.socket)).is_ok() {}
                self.carrier_lost(carrier, &format!("TLS: {error}"));
                return false;
            }
            if was_handshaking && !tls.is_handshaking() {
                // Our last handshake message goes first.
                self.carrier_flush(carrier);
                let now = self.now();
                if let Some(sock) = self.carriers.get(&carrier) {
                    let peer = self.peer_of(sock);
                    self.engine.handle(now, Input::CarrierUp(carrier, peer));
                    // The engine may not want to have to do with this peer.
                    self.perform();
                }
            }
            if !self.carrier_take(carrier) {
                return false;
            }
        }
        true
    }

    /// Takes the plain bytes that TLS has; false when the carrier is gone.
    fn carrier_take(&mut self, carrier: CarrierId) -> bool {
        loop {
            let Some(sock) = self.carriers.get_mut(&carrier) else {
                return false;
            };
            let Some(tls) = &mut sock.tls else {
                return true;
            };
            let mut plain = tls.reader();
            let came = plain.fill_buf().map(|bytes| {
                let (len, cut) = (bytes.len(), sock.reader.cut(bytes));
                (len, cut)
            });
            match came {
                Ok((0, _)) => {
                    self.carrier_lost(carrier, "the peer closed the connection");
                    return false;
                }
                Ok((len, cut)) => {
                    plain.consume(len);
                    if !self.carrier_came(carrier, len, cut) {
                        return false;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return true,
                Err(error) => {
                    self.carrier_lost(carrier, &error.to_string());
                    return false;
                }
            }
        }
    }

    /// Tells the engine what came; false when the carrier is gone.
    pub(super) fn carrier_came(&mut self, carrier: CarrierId, len: usize, cut: Cut) -> bool {
        let now = self.now();
        self.engine
            .handle(now, Input::CarrierReceived(carrier, len));
        for frame in cut.frames {
            if !self.carriers.contains_key(&carrier) {
                return false;
            }
            let begins = matches!(frame.header.kind, Kind::Hello | Kind::Attach);
            self.engine.handle(now, Input::CarrierFrame(carrier, frame));
            // The engine may have closed this carrier because of the frame.
            self.perform();
            if begins {
                self.note_carrier(carrier);
                self.retune(carrier);
            }
        }
        if let Some(error) = cut.error
            && self.carriers.contains_key(&carrier)
        {
            self.carrier_lost(carrier, &error.to_string());
        }
        self.carriers.contains_key(&carrier)
    }

    pub(super) fn carrier_send(&mut self, carrier: CarrierId, frame: Frame) {
        let Some(sock) = self.carriers.get_mut(&carrier) else {
            return;
        };
        if sock.closing {
            return;
        }
        let header = frame.header.encode();
        sock.queue.push_back(Outgoing {
            header,
            frame,
            done: 0,
        });
        if sock.queue.len() == 1 {
            self.carrier_flush(carrier);
        }
    }

    pub(super) fn carrier_flush(&mut self, carrier: CarrierId) {
        if self
            .carriers
            .get(&carrier)
            .is_some_and(|sock| sock.far.is_some())
        {
            return self.far_flush(carrier);
        }
        let mut sent = 0;
        let failure = loop {
            let now = self.now();
            let Some(sock) = self.carriers.get_mut(&carrier) else {
                return;
            };
            if sock.connecting {
                break None;
            }
            if let Err(error) = sock.push_tls() {
                break Some(error);
            }
            let handshaking = sock.tls.as_ref().is_some_and(|tls| tls.is_handshaking());
            let blocked = sock.full || sock.tls.as_ref().is_some_and(|tls| tls.wants_write());
            if blocked || handshaking || sock.queue.is_empty() {
                break None;
            }
            if sent >= TURN_BYTES {
                // The others first; the writable socket brings us back.
                sock.full = true;
                break None;
            }
            // A goodbye on a carrier that the engine has forgotten needs no permission.
            let allowed = match sock.closing {
                true => usize::MAX,
                false => self.engine.carrier_allowance(now, carrier),
            };
            if allowed == 0 {
                break None;
            }
            let Some(sock) = self.carriers.get_mut(&carrier) else {
                return;
            };
            match sock.write_some(allowed) {
                Ok(count) => {
                    sent += count;
                    if count > 0 {
                        self.engine.handle(now, Input::CarrierSent(carrier, count));
                    }
                }
                Err(error) => break Some(error),
            }
        };
        if let Some(error) = failure {
            self.carrier_lost(carrier, &error.to_string());
            return;
        }
        let Some(sock) = self.carriers.get(&carrier) else {
            return;
        };
        let clear = sock.queue.is_empty()
            && !sock.full
            && !sock.tls.as_ref().is_some_and(|tls| tls.wants_write());
        if sock.closing && clear {
            self.forget_carrier(carrier);
        } else {
            self.update_carrier(carrier);
        }
    }

    /// The engine is done with a carrier. What it still had to say is said if the socket takes it.
    pub(super) fn carrier_close(&mut self, carrier: CarrierId) {
        let Some(sock) = self.carriers.get_mut(&carrier) else {
            return;
        };
        if sock.closing {
            return;
        }
        sock.closing = true;
        sock.queue
            .retain(|out| out.done > 0 || out.frame.header.stream == 0);
        if sock.far.is_none() {
            self.carrier_flush(carrier);
        }
        // Waiting longer would keep a dead socket.
        self.forget_carrier(carrier);
    }

    pub(super) fn carrier_lost(&mut self, carrier: CarrierId, reason: &str) {
        self.forget_carrier(carrier);
        let now = self.now();
        self.engine
            .handle(now, Input::CarrierDown(carrier, reason.into()));
    }

    fn forget_carrier(&mut self, carrier: CarrierId) {
        self.far_carrier_close(carrier);
        if let Some(sock) = self.carriers.remove(&carrier) {
            self.sources.remove(&sock.token);
            self.note_retransmits(carrier, &sock.socket);
        }
    }

    fn update_carrier(&mut self, carrier: CarrierId) {
        let Some(sock) = self
            .carriers
            .get_mut(&carrier)
            .filter(|sock| sock.far.is_none())
        else {
            return;
        };
        let mut interest = epoll::EventFlags::IN;
        let more = sock.full || sock.tls.as_ref().is_some_and(|tls| tls.wants_write());
        if sock.connecting || more {
            interest |= epoll::EventFlags::OUT;
        }
        let data = epoll::EventData::new_u64(sock.token);
        let result = if !sock.registered {
            sock.registered = true;
            epoll::add(&self.epoll, &sock.socket, data, interest)
        } else if interest != sock.interest {
            epoll::modify(&self.epoll, &sock.socket, data, interest)
        } else {
            Ok(())
        };
        sock.interest = interest;
        if let Err(error) = result {
            self.carrier_lost(carrier, &error.to_string());
        }
    }
}

impl CarrierSock {
    fn new(socket: Socket, tls: Option<Box<rustls::Connection>>) -> CarrierSock {
        CarrierSock {
            socket: Arc::new(socket),
            token: 0,
            connecting: false,
            tls,
            dialled: None,
            reader: FrameReader::default(),
            queue: VecDeque::new(),
            interest: epoll::EventFlags::empty(),
            registered: false,
            closing: false,
            far: None,
            full: false,
        }
    }

    /// Leaves the epoll set of the control lane.
    pub(super) fn unwatch(&mut self, epoll: &OwnedFd) {
        if std::mem::take(&mut self.registered) {
            let _ = epoll::delete(epoll, &self.socket);
        }
    }

    /// Takes at most `limit` bytes from the front of the queue, of one frame.
    pub(super) fn take_piece(&mut self, limit: usize) -> Option<Piece> {
        let out = self.queue.front_mut()?;
        let end = HEADER_LEN + out.frame.payload.len();
        let piece = Piece {
            header: out.header,
            payload: Arc::clone(&out.frame.payload),
            from: out.done,
            to: end.min(out.done.saturating_add(limit)),
        };
        out.done = piece.to;
        if out.done == end {
            self.queue.pop_front();
        }
        Some(piece)
    }

    /// Moves sealed bytes to the kernel as far as it takes them.
    fn push_tls(&mut self) -> std::io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return Ok(());
        };
        while tls.wants_write() {
            match tls.write_tls(&mut (&*self.socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes at most `allowed` bytes of the queue; 0 when the kernel takes none.
    fn write_some(&mut self, allowed: usize) -> std::io::Result<usize> {
        let Some(out) = self.queue.front_mut() else {
            return Ok(0);
        };
        let limit = match self.tls {
            Some(_) => allowed.min(4 * RECORD_BYTES),
            None => allowed,
        };
        // Header and payload go together, so that they share records and system calls.
        let head = &out.header[out.done.min(HEADER_LEN)..];
        let head = &head[..head.len().min(limit)];
        let body = &out.frame.payload[out.done.saturating_sub(HEADER_LEN)..];
        let body = &body[..body.len().min(limit - head.len())];
        let parts = [IoSlice::new(head), IoSlice::new(body)];
        let count = match &mut self.tls {
            Some(tls) => tls.writer().write_vectored(&parts)?,
            None => loop {
                match (&*self.socket).write_vectored(&parts) {
                    Ok(count) => break count,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        self.full = true;
                        return Ok(0);
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            },
        };
        out.done += count;
        if out.done == HEADER_LEN + out.frame.payload.len() {
            self.queue.pop_front();
        }
        Ok(count)
    }
}

/// `rate` is the lowest that limits the carrier; 0 is none.
fn tune(socket: &Socket, kind: CarrierKind, options: &LinkOptions, rate: u64) {
    let wan_timeout = options.wan_timeout;
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_tcp_user_timeout(Some(wan_timeout * 2));
    let keepalive = TcpKeepalive::new()
        .with_time(wan_timeout.max(Duration::from_secs(1)))
        .with_interval(Duration::from_secs(1).max(wan_timeout / 4));
    let _ = socket.set_tcp_keepalive(&keepalive);
    let tos = match kind {
        CarrierKind::Control => options.dscp_control.tos(),
        CarrierKind::Bulk => options.dscp_bulk.tos(),
    };
    let _ = match is_v6(socket) {
        true => socket.set_tclass_v6(tos),
        false => socket.set_tos_v4(tos),
    };
    let _ = socket.set_tcp_notsent_lowat(notsent_bytes(rate));
    if kind == CarrierKind::Bulk {
        // Keeps its rate where packets are lost. Kernels that lack it keep their default.
        let _ = socket.set_tcp_congestion(b"bbr");
    }
}

fn notsent_bytes(rate: u64) -> u32 {
    match u32::try_from(rate / 25) {
        Ok(0) if rate == 0 => NOTSENT_MAX,
        Ok(bytes) => bytes.clamp(NOTSENT_MIN, NOTSENT_MAX),
        Err(_) => NOTSENT_MAX,
    }
}

fn is_v6(socket: &Socket) -> bool {
    let domain = socket.domain();
    domain.is_ok_and(|domain| domain == socket2::Domain::IPV6)
}

fn dscp_of(socket: &Socket) -> Option<Dscp> {
    let tos = match is_v6(socket) {
        true => socket.tclass_v6(),
        false => socket.tos_v4(),
    };
    tos.ok().map(Dscp::of_tos)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A connected pair on a loopback address.
    fn sockets(addr: &str) -> (Socket, Socket) {
        let listener = TcpListener::bind(addr).unwrap();
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near.into(), listener.accept().unwrap().0.into())
    }

    #[test]
    fn carriers_are_marked_by_kind_and_option_with_both_families() {
        for addr in ["127.0.0.1:0", "[::1]:0"] {
            let (socket, _other) = sockets(addr);
            let v6 = addr.starts_with('[');
            let tos = || match v6 {
                true => socket.tclass_v6().unwrap(),
                false => socket.tos_v4().unwrap(),
            };
            let mut options = LinkOptions::default();
            tune(&socket, CarrierKind::Control, &options, 0);
            assert_eq!(tos(), 26 << 2, "{addr}");
            assert_eq!(dscp_of(&socket), Some(Dscp::AF31));
            assert!(socket.tcp_nodelay().unwrap());
            tune(&socket, CarrierKind::Bulk, &options, 0);
            assert_eq!(tos(), 10 << 2, "{addr}");
            options.set("dscp-bulk", "ef").unwrap();
            options.set("dscp-control", "63").unwrap();
            tune(&socket, CarrierKind::Bulk, &options, 0);
            assert_eq!(tos(), 46 << 2, "{addr}");
            tune(&socket, CarrierKind::Control, &options, 0);
            assert_eq!(tos(), 63 << 2, "{addr}");
            options.set("dscp-control", "default").unwrap();
            tune(&socket, CarrierKind::Control, &options, 0);
            assert_eq!(tos(), 0, "{addr}");
        }
    }

    #[test]
    fn the_kernel_holds_little_that_is_not_sent_and_less_on_a_thin_line() {
        let (socket, _other) = sockets("127.0.0.1:0");
        for (rate, bytes) in [
            (0, 128 << 10),
            (10 << 30, 128 << 10),
            (u64::MAX, 128 << 10),
            (1_250_000, 50_000),
            (100_000, 16 << 10),
            (1, 16 << 10),
        ] {
            tune(&socket, CarrierKind::Bulk, &LinkOptions::default(), rate);
            assert_eq!(socket.tcp_notsent_lowat().unwrap(), bytes, "{rate}");
        }
    }

    #[test]
    fn bulk_uses_bbr_where_the_machine_has_it() {
        let allowed = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
        let allowed = std::fs::read_to_string(allowed).unwrap_or_default();
        let (socket, _other) = sockets("127.0.0.1:0");
        let usual = socket.tcp_congestion().unwrap();
        tune(&socket, CarrierKind::Bulk, &LinkOptions::default(), 0);
        let name = socket.tcp_congestion().unwrap();
        if allowed.split_whitespace().any(|name| name == "bbr") {
            assert!(name.starts_with(b"bbr"));
        } else if !name.starts_with(b"bbr") {
            // A privileged process may have loaded it.
            assert_eq!(name, usual);
        }
    }
}
