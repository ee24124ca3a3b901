//! Sockets towards the peer proxy: connecting, TLS, and the queues of what is to go out on them: the
//! session's own frames, and a queue for each lane. At most a few TLS records are ever ahead of
//! the kernel. This is done on the control lane until a socket is known to be one for bulk; then a
//! shard has it (`far`), and only the queues and the permission to send stay here.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use rustix::event::epoll;
use socket2::{Socket, TcpKeepalive};

use super::far::FarCarrier;
use super::wire::{Piece, Received, WireEnd};
use super::{Reactor, Source, TURN_BYTES, connect};
use crate::core::config::{LinkConfig, LinkOptions};
use crate::core::dscp::Dscp;
use crate::core::frame::{Bytes, Frame, HEADER_LEN, Header, Item, Kind, SEGMENT_MAX, WireCut};
use crate::core::identity::Peer;
use crate::core::stats::{CarrierSnapshot, Snapshot};
use crate::core::{CarrierId, CarrierKind, Input, LinkId, WireId};
use crate::tls::{Ends, Identity, failure};

/// Plain bytes given to TLS at once.
pub(super) const RECORD_BYTES: usize = 16 << 10;
/// Bytes that are taken out of the queues before the kernel takes them.
const AHEAD_BYTES: usize = 4 * RECORD_BYTES;
/// Unsent bytes that the kernel may hold for a carrier: at most this, on a limited line what
/// passes in 40 ms, and at least a TLS record.
const NOTSENT_MAX: u32 = 128 << 10;
const NOTSENT_MIN: u32 = RECORD_BYTES as u32;
/// Parts of a byte in a lane's share, so that nothing is lost by dividing.
const SCALE: u64 = 1 << 8;

/// A socket towards the peer proxy.
pub(super) struct CarrierSock {
    pub(super) socket: Arc<Socket>,
    pub(super) token: u64,
    pub(super) connecting: bool,
    /// `None`: a shard has it.
    pub(super) end: Option<Box<WireEnd>>,
    dialled: Option<SocketAddr>,
    /// The session's own frames go before those of lanes.
    first: VecDeque<Frame>,
    lanes: BTreeMap<u32, Lane>,
    /// The share of the lane that was served last.
    share: u64,
    /// A shard has the socket.
    pub(super) far: Option<FarCarrier>,
}

/// What one connection has to send on a socket.
struct Lane {
    carrier: CarrierId,
    queue: VecDeque<Outgoing>,
    /// What it was given, by its weight: who has had least is next.
    share: u64,
    /// The rest of the queue goes out, then the lane ends.
    closing: bool,
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
    pub(super) fn dial(&mut self, wire: WireId, id: LinkId, kind: CarrierKind) {
        let Some(config) = self.engine.config(id) else {
            return;
        };
        let (from, to) = (config.my_outside.ip(), config.peer_outside);
        let (options, rate) = (config.options.clone(), self.engine.wire_limit(wire));
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
                self.engine.handle(now, Input::WireDown(wire, error));
                return;
            }
        };
        self.live.carriers.insert(wire, id);
        sock.dialled = Some(to);
        sock.connecting = true;
        if let Some(end) = &mut sock.end {
            end.full = true;
        }
        tune(&sock.socket, kind, &options, rate);
        sock.token = self.token(Source::Carrier(wire));
        self.carriers.insert(wire, sock);
        self.update_carrier(wire);
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
        if let Some(end) = &mut sock.end {
            end.watch(&self.epoll, token)
                .map_err(|error| error.to_string())?;
        }
        self.pending.insert(token, (sock, listener, Clock::now()));
        Ok(())
    }

    pub(super) fn pending_ready(&mut self, token: u64) {
        let Some((sock, listener, _)) = self.pending.get_mut(&token) else {
            return;
        };
        let listener = *listener;
        let Some(tls) = sock.end.as_mut().and_then(|end| end.tls.as_mut()) else {
            return;
        };
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
        match (
            &self.identity,
            sock.end.as_ref().and_then(|end| end.tls.as_ref()),
        ) {
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
            let known = self.known_peer(listener, sock.dialled);
            self.refusals
                .note(listener, known, &peer, reason, Clock::now());
        }
    }

    /// The address of a peer that is configured for this listener.
    fn known_peer(&self, listener: SocketAddr, from: Option<SocketAddr>) -> Option<IpAddr> {
        let from = from?.ip();
        let known = self
            .engine
            .configs()
            .any(|config| config.my_outside == listener && config.peer_outside.ip() == from);
        known.then_some(from)
    }

    fn promote(&mut self, mut sock: CarrierSock, listener: SocketAddr) {
        let now = self.now();
        let peer = self.peer_of(&sock);
        tracing::debug!(%listener, from = ?sock.dialled, "a carrier was accepted");
        if let Some(from) = sock.dialled {
            self.refusals.clear(listener, from.ip());
        }
        let wire = self.engine.accept_wire(now, listener, peer);
        if sock.token != 0 {
            self.sources.insert(sock.token, Source::Carrier(wire));
        } else {
            sock.token = self.token(Source::Carrier(wire));
        }
        let options = LinkOptions::default();
        tune(&sock.socket, CarrierKind::Control, &options, 0);
        // Bytes may have come together with the end of the handshake.
        let rest = sock.end.as_mut().map(|end| end.rest_of_handshake());
        self.carriers.insert(wire, sock);
        self.update_carrier(wire);
        if let Some(Received { cut, failure, .. }) = rest
            && self.carrier_came(wire, cut)
            && let Some(reason) = failure
        {
            self.carrier_lost(wire, &reason);
        }
        self.carrier_flush(wire);
        self.move_carrier(wire);
    }

    /// What an accepted carrier is for is known since its first frame.
    fn retune(&self, wire: WireId) {
        let Some(sock) = self.carriers.get(&wire) else {
            return;
        };
        let Some(entry) = self.engine.trunks.wires.get(&wire) else {
            return;
        };
        let link = self.engine.wire_link(wire);
        if let Some(config) = link.and_then(|id| self.engine.config(id)) {
            let rate = self.engine.wire_limit(wire);
            tune(&sock.socket, entry.kind, &config.options, rate);
        }
    }

    /// A connection begins on this carrier: whose options count for it and for the others of the
    /// session, which may have come before, is known now.
    fn retune_with(&self, wire: WireId) {
        let link = self.engine.wire_link(wire);
        for other in self.carriers.keys() {
            if *other == wire || link.is_some() && self.engine.wire_link(*other) == link {
                self.retune(*other);
            }
        }
    }

    /// Options have changed that carriers which are up have to know.
    pub(crate) fn retune_all(&self) {
        for wire in self.carriers.keys() {
            self.retune(*wire);
        }
    }

    /// The rates may have changed with the time of day.
    pub(super) fn follow_rates(&self) {
        for (wire, sock) in &self.carriers {
            let _ = sock
                .socket
                .set_tcp_notsent_lowat(notsent_bytes(self.engine.wire_limit(*wire)));
        }
    }

    /// The state of everything, with what only the sockets know. Carriers are shown with each of
    /// the connections that share them; what is counted up, with the first of these.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.engine.snapshot(self.now());
        snapshot.log_level = self.live.log_level().into();
        snapshot.thread_cpu_us = crate::threads::cpu_us();
        let mut known: BTreeMap<WireId, CarrierSnapshot> = BTreeMap::new();
        for link in &mut snapshot.connections {
            let Some(id) = self.engine.find(&link.name) else {
                continue;
            };
            if matches!(link.state.as_str(), "Connecting" | "Suspended")
                && let Some(config) = self.engine.config(id)
            {
                let (at, peer) = (config.my_outside, config.peer_outside.ip());
                if let Some(text) = self.refusals.text(at, peer, Clock::now()) {
                    let before = std::mem::take(&mut link.last_error);
                    let parts = [before, text];
                    let parts = parts.iter().filter(|part| !part.is_empty());
                    link.last_error = parts.map(String::as_str).collect::<Vec<_>>().join("; ");
                }
            }
            for wire in self.engine.wires_of(id) {
                let seen = known.get(&wire).cloned();
                let Some(carrier) = seen.or_else(|| self.show_carrier(wire)) else {
                    continue;
                };
                if known.insert(wire, carrier.clone()).is_none() {
                    link.counters.retransmits += u64::from(carrier.tcp.retransmitted_segments);
                }
                link.carriers.push(carrier);
            }
        }
        snapshot
    }

    fn show_carrier(&self, wire: WireId) -> Option<CarrierSnapshot> {
        let (sock, entry) = (
            self.carriers.get(&wire)?,
            self.engine.trunks.wires.get(&wire)?,
        );
        let addr = |found: std::io::Result<socket2::SockAddr>| {
            let found = found.ok().and_then(|addr| addr.as_socket());
            found.map_or(String::new(), |addr| addr.to_string())
        };
        let congestion = sock.socket.tcp_congestion().unwrap_or_default();
        let congestion = String::from_utf8_lossy(&congestion);
        Some(CarrierSnapshot {
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
            tcp: super::tcp::tcp_of(&sock.socket),
        })
    }

    pub(super) fn carrier_ready(&mut self, wire: WireId, flags: epoll::EventFlags) {
        let Some(sock) = self.carriers.get_mut(&wire) else {
            return;
        };
        let Some(end) = &mut sock.end else { return };
        if sock.connecting {
            match sock.socket.take_error() {
                Ok(None) if flags.contains(epoll::EventFlags::OUT) => {
                    sock.connecting = false;
                    end.full = false;
                    if end.tls.is_none() {
                        let (now, peer) = (self.now(), Peer::default());
                        self.engine.handle(now, Input::WireUp(wire, peer));
                    }
                    self.carrier_flush(wire);
                }
                Ok(None) => {}
                Ok(Some(error)) | Err(error) => self.carrier_lost(wire, &error.to_string()),
            }
            return;
        }
        if flags.contains(epoll::EventFlags::OUT) {
            end.full = false;
            self.carrier_flush(wire);
        }
        if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR)
        {
            self.carrier_read(wire);
        }
    }

    fn carrier_read(&mut self, wire: WireId) {
        let mut budget = TURN_BYTES;
        while budget > 0 {
            let Some(end) = self
                .carriers
                .get_mut(&wire)
                .and_then(|sock| sock.end.as_mut())
            else {
                return;
            };
            let was_handshaking = end.is_handshaking();
            let Received {
                sealed,
                plain,
                cut,
                failure,
            } = end.receive(&mut self.scratch);
            if sealed == 0 && failure.is_none() {
                break;
            }
            budget = budget.saturating_sub(sealed);
            if was_handshaking && !end.is_handshaking() && failure.is_none() {
                // Our last handshake message goes first.
                self.carrier_flush(wire);
                let now = self.now();
                if let Some(sock) = self.carriers.get(&wire) {
                    let peer = self.peer_of(sock);
                    self.engine.handle(now, Input::WireUp(wire, peer));
                    // The engine may not want to have to do with this peer.
                    self.perform();
                }
            }
            if plain > 0 && !self.carrier_came(wire, cut) {
                return;
            }
            if let Some(reason) = failure {
                self.carrier_lost(wire, &reason);
                return;
            }
        }
        self.carrier_flush(wire);
    }

    /// Tells the engine what came; false when the carrier is gone.
    pub(super) fn carrier_came(&mut self, wire: WireId, cut: WireCut) -> bool {
        let now = self.now();
        for item in cut.items {
            if !self.carriers.contains_key(&wire) {
                return false;
            }
            match item {
                Item::Session(frame) => {
                    let begins = matches!(frame.header.kind, Kind::Hello | Kind::Attach);
                    self.engine.handle(now, Input::WireFrame(wire, frame));
                    // The engine may have closed this carrier because of the frame.
                    self.perform();
                    if begins {
                        self.note_carrier(wire);
                        self.retune(wire);
                    }
                }
                Item::Lane {
                    lane,
                    bytes,
                    frames,
                } => {
                    self.engine
                        .handle(now, Input::LaneReceived(wire, lane, bytes));
                    for frame in frames {
                        let begins = matches!(frame.header.kind, Kind::Hello | Kind::Attach);
                        self.engine.handle(now, Input::LaneFrame(wire, lane, frame));
                        self.perform();
                        if begins {
                            self.retune_with(wire);
                        }
                    }
                }
            }
        }
        if let Some(error) = cut.error
            && self.carriers.contains_key(&wire)
        {
            self.carrier_lost(wire, &error.to_string());
        }
        self.carriers.contains_key(&wire)
    }

    /// A frame of the session itself.
    pub(super) fn session_send(&mut self, wire: WireId, frame: Frame) {
        if let Some(sock) = self.carriers.get_mut(&wire) {
            sock.first.push_back(frame);
            self.carrier_flush(wire);
        }
    }

    pub(super) fn carrier_send(
        &mut self,
        wire: WireId,
        lane: u32,
        carrier: CarrierId,
        frame: Frame,
    ) {
        let Some(sock) = self.carriers.get_mut(&wire) else {
            return;
        };
        let share = sock.share;
        let lane = sock.lanes.entry(lane).or_insert_with(|| Lane {
            carrier,
            queue: VecDeque::new(),
            share,
            closing: false,
        });
        if lane.closing {
            return;
        }
        let header = frame.header.encode();
        lane.queue.push_back(Outgoing {
            header,
            frame,
            done: 0,
        });
        if lane.queue.len() == 1 {
            // Who had nothing to send saves nothing up.
            lane.share = lane.share.max(share);
            self.carrier_flush(wire);
        }
    }

    /// The engine is done with a lane. What it still had to say of the connection as a whole is
    /// said, and a frame that has begun is finished.
    pub(super) fn lane_close(&mut self, wire: WireId, number: u32) {
        let Some(sock) = self.carriers.get_mut(&wire) else {
            return;
        };
        let Some(lane) = sock.lanes.get_mut(&number) else {
            sock.first.push_back(lane_end(number));
            return self.carrier_flush(wire);
        };
        lane.closing = true;
        lane.queue
            .retain(|out| out.done > 0 || out.frame.header.stream == 0);
        self.carrier_flush(wire);
    }

    /// The carrier that the engine means may be written to again.
    pub(super) fn carrier_wants_write(&mut self, carrier: CarrierId) {
        let entry = self.engine.carriers.get(&carrier);
        if let Some((wire, _)) = entry.and_then(|entry| entry.wire) {
            self.carrier_flush(wire);
        }
    }

    /// Takes out of the queues what may go out now, until `room` is used up. Lanes have their turn
    /// by weight.
    pub(super) fn take_pieces(&mut self, wire: WireId, room: usize) -> Vec<Piece> {
        let (mut pieces, mut taken) = (Vec::new(), 0);
        let mut held: BTreeSet<u32> = BTreeSet::new();
        while taken < room {
            let Some(sock) = self.carriers.get_mut(&wire) else {
                break;
            };
            if let Some(frame) = sock.first.pop_front() {
                let (header, to) = (frame.header.encode(), frame.wire_len());
                pieces.push(Piece::of(None, header, &frame.payload, 0, to));
                taken += to;
                continue;
            }
            let waits = |(number, lane): &(&u32, &Lane)| {
                (lane.closing || !lane.queue.is_empty()) && !held.contains(number)
            };
            let next = sock.lanes.iter().filter(waits);
            let Some((number, lane)) = next.min_by_key(|(_, lane)| lane.share) else {
                break;
            };
            let (number, carrier, closing) = (*number, lane.carrier, lane.closing);
            if closing && lane.queue.is_empty() {
                sock.lanes.remove(&number);
                sock.first.push_back(lane_end(number));
                continue;
            }
            let now = self.now();
            // A goodbye of a carrier that the engine has forgotten needs no permission.
            let allowed = match closing {
                true => usize::MAX,
                false => self.engine.carrier_allowance(now, carrier),
            };
            if allowed == 0 {
                held.insert(number);
                continue;
            }
            let weight = self.engine.weight_of(carrier);
            let Some(sock) = self.carriers.get_mut(&wire) else {
                break;
            };
            let Some((piece, len)) = sock.take_piece(number, allowed, weight) else {
                break;
            };
            taken += piece.len();
            pieces.push(piece);
            if !closing {
                self.engine.handle(now, Input::CarrierSent(carrier, len));
            }
        }
        pieces
    }

    pub(super) fn carrier_flush(&mut self, wire: WireId) {
        if self
            .carriers
            .get(&wire)
            .is_some_and(|sock| sock.far.is_some())
        {
            return self.far_flush(wire);
        }
        let mut sent = 0;
        let failure = loop {
            let Some(sock) = self.carriers.get_mut(&wire) else {
                return;
            };
            let Some(end) = &mut sock.end else { return };
            if sock.connecting {
                break None;
            }
            if let Some(error) = end.write() {
                break Some(error);
            }
            if end.is_blocked() || end.is_handshaking() || end.queued_bytes > 0 {
                break None;
            }
            if sent >= TURN_BYTES {
                // The others first; the writable socket brings us back.
                end.full = true;
                break None;
            }
            let pieces = self.take_pieces(wire, AHEAD_BYTES);
            if pieces.is_empty() {
                break None;
            }
            sent += pieces.iter().map(Piece::len).sum::<usize>();
            if let Some(end) = self.carriers.get_mut(&wire).and_then(|s| s.end.as_mut()) {
                end.put(pieces);
            }
        };
        match failure {
            Some(error) => self.carrier_lost(wire, &error.to_string()),
            None => self.update_carrier(wire),
        }
    }

    /// The engine is done with a carrier. What it still had to say is said if the socket takes it.
    pub(super) fn carrier_close(&mut self, wire: WireId) {
        if let Some(sock) = self.carriers.get_mut(&wire) {
            sock.end_lanes();
            if sock.far.is_none() {
                self.carrier_flush(wire);
            }
        }
        // Waiting longer would keep a dead socket.
        self.forget_carrier(wire);
    }

    pub(super) fn carrier_lost(&mut self, wire: WireId, reason: &str) {
        self.forget_carrier(wire);
        let now = self.now();
        self.engine
            .handle(now, Input::WireDown(wire, reason.into()));
    }

    fn forget_carrier(&mut self, wire: WireId) {
        self.far_carrier_close(wire);
        if let Some(sock) = self.carriers.remove(&wire) {
            self.sources.remove(&sock.token);
            self.note_retransmits(wire, &sock.socket);
        }
    }

    fn update_carrier(&mut self, wire: WireId) {
        let Some(sock) = self.carriers.get_mut(&wire) else {
            return;
        };
        let token = sock.token;
        if let Some(end) = &mut sock.end
            && let Err(error) = end.watch(&self.epoll, token)
        {
            self.carrier_lost(wire, &error.to_string());
        }
    }
}

/// The frame that ends a lane.
fn lane_end(lane: u32) -> Frame {
    Frame {
        header: Header {
            stream: lane,
            ..Header::session(Kind::LaneClose)
        },
        payload: Bytes::default(),
    }
}

impl CarrierSock {
    fn new(socket: Socket, tls: Option<Box<rustls::Connection>>) -> CarrierSock {
        let socket = Arc::new(socket);
        CarrierSock {
            end: Some(Box::new(WireEnd::new(Arc::clone(&socket), tls))),
            socket,
            token: 0,
            connecting: false,
            dialled: None,
            first: VecDeque::new(),
            lanes: BTreeMap::new(),
            share: 0,
            far: None,
        }
    }

    /// Only the last words of lanes that end are left.
    pub(super) fn end_lanes(&mut self) {
        self.lanes.retain(|_, lane| lane.closing);
    }

    /// Takes at most `limit` bytes from the front of a lane's queue, of one frame, with their count.
    fn take_piece(&mut self, number: u32, limit: usize, weight: u32) -> Option<(Piece, usize)> {
        let lane = self.lanes.get_mut(&number)?;
        let out = lane.queue.front_mut()?;
        let end = HEADER_LEN + out.frame.payload.len();
        let from = out.done;
        let to = end.min(from.saturating_add(limit.min(SEGMENT_MAX)));
        let segment = Header {
            stream: number,
            payload_len: (to - from) as u32,
            ..Header::session(Kind::Lane)
        };
        let segment = Some(segment.encode());
        let piece = Piece::of(segment, out.header, &out.frame.payload, from, to);
        out.done = to;
        if to == end {
            lane.queue.pop_front();
        }
        self.share = lane.share;
        lane.share += piece.len() as u64 * SCALE / u64::from(weight.max(1));
        Some((piece, to - from))
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
