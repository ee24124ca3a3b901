//! Sockets towards the peer proxy: connecting, TLS, cutting bytes into frames, and writing frames as
//! the bandwidth limits allow. At most a few TLS records are ever ahead of the kernel.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant as Clock};

use rustix::event::epoll;
use socket2::{Socket, TcpKeepalive};

use super::{Reactor, Source, TURN_BYTES, connect};
use crate::core::config::LinkConfig;
use crate::core::frame::{Frame, FrameReader, HEADER_LEN, Kind};
use crate::core::identity::Peer;
use crate::core::{CarrierId, CarrierKind, Input, LinkId};
use crate::tls::{Ends, Identity, failure};

/// Plain bytes given to TLS at once.
const RECORD_BYTES: usize = 16 << 10;
/// Unsent bytes that the kernel may hold for a bulk carrier.
const NOTSENT_BYTES: u32 = 128 << 10;
/// DiffServ code points AF31 and AF11, as the TOS byte.
const TOS_CONTROL: u32 = 26 << 2;
const TOS_BULK: u32 = 10 << 2;

/// A socket towards the peer proxy.
pub(super) struct CarrierSock {
    socket: Socket,
    token: u64,
    connecting: bool,
    tls: Option<Box<rustls::Connection>>,
    dialled: Option<SocketAddr>,
    reader: FrameReader,
    queue: VecDeque<Outgoing>,
    interest: epoll::EventFlags,
    registered: bool,
    /// The rest of the queue is written, then the socket is closed.
    closing: bool,
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
struct Outgoing {
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
        let wan_timeout = config.options.wan_timeout;
        let ends = ends_of(config);
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
        sock.dialled = Some(to);
        sock.connecting = true;
        tune(&sock.socket, kind, wan_timeout);
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
        let failure = match tls.read_tls(&mut (&sock.socket)) {
            Ok(0) => Some("closed while authenticating".to_string()),
            Ok(_) => tls.process_new_packets().err().map(|error| failure(&error)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(error) => Some(error.to_string()),
        };
        // The few handshake bytes fit the kernel's buffer; an alert goes out on failure too.
        while tls.wants_write() {
            if tls.write_tls(&mut (&sock.socket)).is_err() {
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
        let carrier = self.engine.accept_carrier(now, listener, peer);
        if sock.registered {
            self.sources.insert(sock.token, Source::Carrier(carrier));
        } else {
            sock.token = self.token(Source::Carrier(carrier));
        }
        tune(&sock.socket, CarrierKind::Control, Duration::from_secs(5));
        self.carriers.insert(carrier, sock);
        self.update_carrier(carrier);
        // Bytes may have come together with the end of the handshake.
        self.carrier_take(carrier);
        self.carrier_flush(carrier);
    }

    /// What an accepted carrier is for is known since its first frame.
    fn retune(&self, carrier: CarrierId) {
        let Some(sock) = self.carriers.get(&carrier) else {
            return;
        };
        let entry = self.engine.carriers.get(&carrier);
        let known = entry.and_then(|entry| Some((entry.kind, self.engine.config(entry.link?)?)));
        if let Some((kind, config)) = known {
            tune(&sock.socket, kind, config.options.wan_timeout);
        }
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
            let len = match (&sock.socket).read(&mut self.scratch) {
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
                let plain = self.scratch[..len].to_vec();
                if !self.carrier_bytes(carrier, &plain) {
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
                while tls.wants_write() && tls.write_tls(&mut (&sock.socket)).is_ok() {}
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
        let mut plain = [0; RECORD_BYTES];
        loop {
            let Some(sock) = self.carriers.get_mut(&carrier) else {
                return false;
            };
            let Some(tls) = &mut sock.tls else {
                return true;
            };
            match tls.reader().read(&mut plain) {
                Ok(0) => {
                    self.carrier_lost(carrier, "the peer closed the connection");
                    return false;
                }
                Ok(len) => {
                    if !self.carrier_bytes(carrier, &plain[..len]) {
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

    /// Cuts plain bytes into frames; false when the carrier is gone.
    fn carrier_bytes(&mut self, carrier: CarrierId, mut rest: &[u8]) -> bool {
        let now = self.now();
        self.engine
            .handle(now, Input::CarrierReceived(carrier, rest.len()));
        loop {
            let Some(sock) = self.carriers.get_mut(&carrier) else {
                return false;
            };
            match sock.reader.push(rest) {
                Ok((used, frame)) => {
                    rest = &rest[used..];
                    match frame {
                        Some(frame) => {
                            let begins = matches!(frame.header.kind, Kind::Hello | Kind::Attach);
                            self.engine.handle(now, Input::CarrierFrame(carrier, frame));
                            // The engine may have closed this carrier because of the frame.
                            self.perform();
                            if begins {
                                self.retune(carrier);
                            }
                        }
                        None if rest.is_empty() => return true,
                        None => {}
                    }
                }
                Err(error) => {
                    self.carrier_lost(carrier, &error.to_string());
                    return false;
                }
            }
        }
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
        self.carrier_flush(carrier);
        // Waiting longer would keep a dead socket.
        self.forget_carrier(carrier);
    }

    fn carrier_lost(&mut self, carrier: CarrierId, reason: &str) {
        self.forget_carrier(carrier);
        let now = self.now();
        self.engine
            .handle(now, Input::CarrierDown(carrier, reason.into()));
    }

    fn forget_carrier(&mut self, carrier: CarrierId) {
        if let Some(sock) = self.carriers.remove(&carrier) {
            self.sources.remove(&sock.token);
        }
    }

    fn update_carrier(&mut self, carrier: CarrierId) {
        let Some(sock) = self.carriers.get_mut(&carrier) else {
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
            socket,
            token: 0,
            connecting: false,
            tls,
            dialled: None,
            reader: FrameReader::default(),
            queue: VecDeque::new(),
            interest: epoll::EventFlags::empty(),
            registered: false,
            closing: false,
            full: false,
        }
    }

    /// Moves sealed bytes to the kernel as far as it takes them.
    fn push_tls(&mut self) -> std::io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return Ok(());
        };
        while tls.wants_write() {
            match tls.write_tls(&mut (&self.socket)) {
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
        let small = out.done == 0 && out.frame.payload.len() <= RECORD_BYTES - HEADER_LEN;
        let joined;
        let rest: &[u8] = if small {
            // One record, one system call for header and payload.
            joined = [&out.header, out.frame.payload.as_slice()].concat();
            &joined
        } else if out.done < HEADER_LEN {
            &out.header[out.done..]
        } else {
            &out.frame.payload[out.done - HEADER_LEN..]
        };
        let rest = &rest[..rest.len().min(allowed)];
        let count = match &mut self.tls {
            Some(tls) => tls
                .writer()
                .write(&rest[..rest.len().min(4 * RECORD_BYTES)])?,
            None => loop {
                match (&self.socket).write(rest) {
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

fn tune(socket: &Socket, kind: CarrierKind, wan_timeout: Duration) {
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_tcp_user_timeout(Some(wan_timeout * 2));
    let keepalive = TcpKeepalive::new()
        .with_time(wan_timeout.max(Duration::from_secs(1)))
        .with_interval(Duration::from_secs(1).max(wan_timeout / 4));
    let _ = socket.set_tcp_keepalive(&keepalive);
    let tos = match kind {
        CarrierKind::Control => TOS_CONTROL,
        CarrierKind::Bulk => TOS_BULK,
    };
    let _ = socket.set_tos_v4(tos);
    let _ = socket.set_tclass_v6(tos);
    let _ = socket.set_tcp_notsent_lowat(NOTSENT_BYTES);
    if kind == CarrierKind::Bulk {
        // Keeps its rate where packets are lost. Kernels that lack it keep their default.
        let _ = socket.set_tcp_congestion(b"bbr");
    }
}
