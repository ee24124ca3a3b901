//! The session of two proxies: TCP connections ("wires", one for control and some for bulk) that
//! all connections between the two share. Each connection has lanes on them, and a lane is what
//! its carriers run on: what is said on one lane never waits for another lane's reader. Here are
//! dialling, the handshake of a session, liveness, and the opening and closing of lanes. What a
//! lane carries is the business of `session` and `flow`; so is what survives the wires.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::config::CARRIERS_MAX;
use super::engine::Engine;
use super::frame::{Frame, Header, Kind, LANES_MAX};
use super::identity::Peer;
use super::link::{Carrier, CarrierState};
use super::message::{Attach, Hello, HelloAck, LaneOpen, Malformed};
use super::session::{BACKOFF_MIN, PROTOCOL, Violation, attach_proof, rule};
use super::stats::TrunkSnapshot;
use super::time::Instant;
use super::{CarrierId, CarrierKind, Input, Level, LinkId, Output, WireId};

/// A connection waits so long for another's dialling to the same host: it may share the session.
const STAGGER: Duration = Duration::from_millis(500);
/// A session without lanes is kept so long.
const IDLE: Duration = Duration::from_secs(3);
/// How long an accepted wire may take to say what it is for.
const ORPHAN: Duration = Duration::from_secs(10);
/// Connections that were told to use a session which is there already, and have not yet.
const REDIRECTS_MAX: usize = 1024;

/// Code of a LANE_CLOSE: the addresses are not configured here as a pair. The opener may dial.
const LANE_UNKNOWN: u8 = 1;
/// Code of a GOODBYE: the session that was named is not known at this end.
const GOODBYE_UNKNOWN: u8 = 2;

/// A session with a peer proxy, by its number here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TrunkId(u64);

/// A TCP connection to a peer proxy.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) kind: CarrierKind,
    /// The session that it belongs to, once that is known.
    pub(crate) trunk: Option<TrunkId>,
    state: CarrierState,
    since: Instant,
    peer: Peer,
    /// Address on which it was accepted.
    listener: Option<SocketAddr>,
    /// The connection whose addresses and identity it was dialled with.
    dialled_for: Option<LinkId>,
    /// The connection that the dialler named.
    accepted_for: Option<LinkId>,
    /// The carrier for which it was dialled.
    wants: Option<CarrierId>,
    nonce: u64,
    /// In its session; 0 is the control wire.
    pub(crate) number: u32,
    lanes: BTreeMap<u32, CarrierId>,
    next_lane: u32,
    last_peer_lane: u32,
    last_received: Instant,
    /// When the peer last reported to have received more.
    pub(crate) progress: Instant,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    /// The dialler was told to use this one.
    redirected: Option<TrunkId>,
}

/// A session with a peer proxy.
#[derive(Debug)]
pub(crate) struct Trunk {
    id: [u8; 16],
    /// Proves that a bulk wire belongs to the session.
    key: [u8; 32],
    instance: [u8; 16],
    identity: [u8; 32],
    /// This end dialled.
    dialled: bool,
    /// The peer's outside address, as configured.
    far: IpAddr,
    control: WireId,
    bulk: Vec<WireId>,
    bulk_dialling: Vec<WireId>,
    bulk_redial_at: Instant,
    attach_number: u32,
    ping_at: Instant,
    rtt: Duration,
    /// Carriers that wait for a wire of bulk.
    waiting: Vec<CarrierId>,
    idle_since: Option<Instant>,
}

/// All sessions, and what is on its way to one.
#[derive(Debug, Default)]
pub(crate) struct Trunks {
    pub(crate) all: BTreeMap<TrunkId, Trunk>,
    pub(crate) wires: BTreeMap<WireId, Wire>,
    /// Carriers that a connection has just begun to dial.
    placing: Vec<CarrierId>,
    is_placing: bool,
    /// Carriers that wait for another's dialling.
    unplaced: Vec<CarrierId>,
    /// HELLOs that were answered and whose connection has no lane yet: nonce, listener, time.
    redirects: Vec<(u64, SocketAddr, Instant)>,
    at: Option<Instant>,
}

impl Wire {
    fn new(now: Instant, kind: CarrierKind, state: CarrierState) -> Wire {
        Wire {
            kind,
            trunk: None,
            state,
            since: now,
            peer: Peer::default(),
            listener: None,
            dialled_for: None,
            accepted_for: None,
            wants: None,
            nonce: 0,
            number: 0,
            lanes: BTreeMap::new(),
            next_lane: 2,
            last_peer_lane: 0,
            last_received: now,
            progress: now,
            sent_bytes: 0,
            received_bytes: 0,
            redirected: None,
        }
    }
}

impl Trunks {
    /// When to look at the sessions at the latest.
    pub(crate) fn timeout(&self) -> Option<Instant> {
        self.at
    }

    fn arm(&mut self, at: Instant) {
        self.at = Some(self.at.map_or(at, |held| held.min(at)));
    }

    /// The session of a carrier.
    fn of(&self, carrier: &Carrier) -> Option<TrunkId> {
        self.wires.get(&carrier.wire?.0)?.trunk
    }
}

impl Engine {
    /// The shell accepted and authenticated a TCP connection on an outside address.
    pub(crate) fn accept_wire(&mut self, now: Instant, listener: SocketAddr, peer: Peer) -> WireId {
        let id = WireId(self.fresh());
        let mut wire = Wire::new(now, CarrierKind::Control, CarrierState::Handshake);
        wire.listener = Some(listener);
        wire.peer = peer;
        self.trunks.wires.insert(id, wire);
        self.trunks.arm(now.after(ORPHAN));
        id
    }

    /// What happened to wires and on them.
    pub(crate) fn wire_input(&mut self, now: Instant, input: Input) {
        match input {
            Input::WireUp(wire, peer) => self.wire_up(now, wire, peer),
            Input::WireFrame(wire, frame) => self.wire_frame(now, wire, &frame),
            Input::WireDown(wire, reason) => self.wire_down(now, wire, &reason),
            Input::LaneReceived(id, lane, bytes) => {
                let Some(wire) = self.trunks.wires.get_mut(&id) else {
                    return;
                };
                wire.received_bytes += bytes as u64;
                wire.last_received = now;
                if let Some(carrier) = wire.lanes.get(&lane).copied() {
                    self.carrier_received(now, carrier, bytes);
                }
            }
            Input::LaneFrame(id, lane, frame) => {
                let wire = self.trunks.wires.get(&id);
                if let Some(carrier) = wire.and_then(|wire| wire.lanes.get(&lane)).copied() {
                    self.carrier_frame(now, carrier, frame);
                }
            }
            _ => unreachable!("the caller chooses"),
        }
    }

    /// A carrier was begun to be dialled; it is placed when the event is through.
    pub(crate) fn want_lane(&mut self, carrier: CarrierId) {
        self.trunks.placing.push(carrier);
    }

    /// Finds lanes for the carriers that want one.
    pub(crate) fn place_all(&mut self, now: Instant) {
        if std::mem::replace(&mut self.trunks.is_placing, true) {
            return;
        }
        while let Some(carrier) = self.trunks.placing.pop() {
            self.place(now, carrier);
        }
        self.trunks.is_placing = false;
    }

    fn place(&mut self, now: Instant, carrier: CarrierId) {
        let Some(entry) = self.carriers.get(&carrier) else {
            return;
        };
        let Some(id) = entry.link.filter(|_| {
            entry.state == CarrierState::Dialing && entry.wire.is_none() && !self.frozen
        }) else {
            return;
        };
        let since = entry.since;
        if entry.kind == CarrierKind::Bulk {
            return self.place_bulk(now, id, carrier);
        }
        if let Some(trunk) = self.trunk_for(id) {
            let wire = self.trunks.all.get(&trunk).map(|trunk| trunk.control);
            if let Some(wire) = wire {
                return self.open_lane(now, wire, carrier);
            }
        }
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let far = link.config.peer_outside.ip();
        let dialled = self.trunks.wires.values().any(|wire| {
            let by = wire.dialled_for.and_then(|id| self.links.get(&id));
            wire.trunk.is_none()
                && wire.kind == CarrierKind::Control
                && by.is_some_and(|link| link.config.peer_outside.ip() == far)
        });
        if dialled && now.since(since) < STAGGER {
            self.trunks.unplaced.push(carrier);
            self.trunks.arm(since.after(STAGGER));
            return;
        }
        self.dial_wire(now, id, CarrierKind::Control, Some(carrier), None);
    }

    /// The session that a connection may use: the one that the peer has named, else one with the
    /// same host that has not said that it does not know the connection.
    fn trunk_for(&self, id: LinkId) -> Option<TrunkId> {
        let link = self.links.get(&id)?;
        let named = link.redirect.map(|(trunk, _)| trunk);
        if let Some(trunk) = named.filter(|trunk| self.trunks.all.contains_key(trunk)) {
            return Some(trunk);
        }
        let far = link.config.peer_outside.ip();
        let found = self.trunks.all.iter().find(|(trunk, entry)| {
            let wire = self.trunks.wires.get(&entry.control);
            entry.far == far
                && !link.not_at.contains(trunk)
                && wire.is_some_and(|wire| {
                    wire.peer.refusal(&link.config.name).is_none() && wire.lanes.len() < LANES_MAX
                })
        });
        found.map(|(trunk, _)| *trunk)
    }

    fn place_bulk(&mut self, now: Instant, id: LinkId, carrier: CarrierId) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let control = link.control.and_then(|control| self.carriers.get(&control));
        let Some(trunk) = control.and_then(|control| self.trunks.of(control)) else {
            self.carrier_down(now, carrier, "the session is gone");
            return;
        };
        let own: Vec<WireId> = link
            .bulk
            .iter()
            .chain(&link.bulk_dialing)
            .filter_map(|other| Some(self.carriers.get(other)?.wire?.0))
            .collect();
        let Some(entry) = self.trunks.all.get(&trunk) else {
            self.carrier_down(now, carrier, "the session is gone");
            return;
        };
        let lanes = |wire: &&WireId| self.trunks.wires.get(wire).map_or(0, |w| w.lanes.len());
        let unused = entry.bulk.iter().filter(|wire| !own.contains(wire));
        let any = entry.bulk.iter().min_by_key(lanes).filter(|_| {
            // Only the end that dials can have another one.
            !entry.dialled || entry.bulk.len() >= self.bulk_wanted(trunk)
        });
        match unused.min_by_key(lanes).or(any).copied() {
            Some(wire) => self.open_lane(now, wire, carrier),
            None => {
                if let Some(entry) = self.trunks.all.get_mut(&trunk) {
                    let known = |other: &CarrierId| self.carriers.contains_key(other);
                    entry.waiting.retain(known);
                    entry.waiting.push(carrier);
                }
                self.keep_trunk(now, trunk);
            }
        }
    }

    /// Wires for bulk: as many as the connection wants that wants most.
    fn bulk_wanted(&self, trunk: TrunkId) -> usize {
        let links = self.links_on(trunk);
        let most = links.map(|(_, link)| link.config.options.bulk_carriers);
        most.max().unwrap_or(1).min(CARRIERS_MAX) as usize
    }

    /// The connections of a session.
    fn links_on(&self, trunk: TrunkId) -> impl Iterator<Item = (LinkId, &super::link::Link)> + '_ {
        let wire = self.trunks.all.get(&trunk).map(|trunk| trunk.control);
        let wire = wire.and_then(|wire| self.trunks.wires.get(&wire));
        let carriers = wire.into_iter().flat_map(|wire| wire.lanes.values());
        carriers.filter_map(|carrier| {
            let id = self.carriers.get(carrier)?.link?;
            Some((id, self.links.get(&id)?))
        })
    }

    /// Dials the wires for bulk that are missing, drops what is too much.
    fn keep_trunk(&mut self, now: Instant, id: TrunkId) {
        let wanted = self.bulk_wanted(id);
        let Some(trunk) = self.trunks.all.get_mut(&id) else {
            return;
        };
        if !trunk.dialled || self.frozen {
            return;
        }
        let lanes = |wire: &WireId| self.trunks.wires.get(wire).map_or(0, |w| w.lanes.len());
        let surplus = (trunk.bulk.len() > wanted)
            .then(|| trunk.bulk.iter().min_by_key(|wire| lanes(wire)).copied())
            .flatten();
        let missing = wanted.saturating_sub(trunk.bulk.len() + trunk.bulk_dialling.len());
        if let Some(wire) = surplus {
            self.out.push_back(Output::CloseWire(wire));
            self.wire_down(now, wire, "fewer carriers are wanted");
            return self.keep_trunk(now, id);
        }
        if missing == 0 {
            return;
        }
        if trunk.bulk_redial_at > now {
            let at = trunk.bulk_redial_at;
            self.trunks.arm(at);
            return;
        }
        let Some((via, _)) = self.links_on(id).min_by_key(|(link, _)| *link) else {
            return;
        };
        for _ in 0..missing {
            self.dial_wire(now, via, CarrierKind::Bulk, None, Some(id));
        }
    }

    fn dial_wire(
        &mut self,
        now: Instant,
        link: LinkId,
        kind: CarrierKind,
        wants: Option<CarrierId>,
        trunk: Option<TrunkId>,
    ) {
        let id = WireId(self.fresh());
        let mut wire = Wire::new(now, kind, CarrierState::Dialing);
        (wire.dialled_for, wire.wants, wire.trunk) = (Some(link), wants, trunk);
        wire.next_lane = 1;
        self.trunks.wires.insert(id, wire);
        if let Some(trunk) = trunk.and_then(|trunk| self.trunks.all.get_mut(&trunk)) {
            trunk.bulk_dialling.push(id);
        }
        self.trunks.arm(now.after(self.handshake_time(link)));
        self.out.push_back(Output::Dial {
            wire: id,
            link,
            kind,
        });
    }

    /// How long a wire may take to be connected, authenticated and answered.
    fn handshake_time(&self, link: LinkId) -> Duration {
        let wan = self.config(link).map(|config| config.options.wan_timeout);
        wan.unwrap_or_default().max(Duration::from_secs(2)) * 2
    }

    fn open_lane(&mut self, now: Instant, id: WireId, carrier: CarrierId) {
        let Some(entry) = self.carriers.get_mut(&carrier) else {
            return;
        };
        let Some(wire) = self.trunks.wires.get_mut(&id) else {
            self.carrier_down(now, carrier, "the session is gone");
            return;
        };
        let lane = wire.next_lane;
        wire.next_lane += 2;
        wire.lanes.insert(lane, carrier);
        entry.wire = Some((id, lane));
        let (peer, mut open) = (wire.peer.clone(), LaneOpen::default());
        if entry.kind == CarrierKind::Control
            && let Some(link) = entry.link.and_then(|id| self.links.get(&id))
        {
            open = LaneOpen {
                nonce: link.redirect.map_or(0, |(_, nonce)| nonce),
                my_outside: link.config.my_outside.to_string(),
                peer_outside: link.config.peer_outside.to_string(),
            };
        }
        let mut frame = Frame::message(Kind::LaneOpen, open.encode());
        frame.header.stream = lane;
        self.send_session(id, frame);
        self.carrier_up(now, carrier, peer);
    }

    /// Ends a carrier's lane.
    pub(crate) fn close_lane(&mut self, carrier: CarrierId) {
        let place = self.carriers.get_mut(&carrier).and_then(|c| c.wire.take());
        if let Some((id, lane)) = place
            && let Some(wire) = self.trunks.wires.get_mut(&id)
            && wire.lanes.remove(&lane).is_some()
        {
            self.out.push_back(Output::CloseLane(id, lane));
        }
    }

    /// A carrier brings nothing through. If nothing else on its wire does, the wire is dead.
    pub(crate) fn carrier_stands_still(
        &mut self,
        now: Instant,
        carrier: CarrierId,
        patience: Duration,
    ) {
        let wire = self.carriers.get(&carrier).and_then(|entry| entry.wire);
        if let Some((id, _)) = wire
            && let Some(entry) = self.trunks.wires.get(&id)
            && now.since(entry.progress.max(entry.since)) >= patience
        {
            self.out.push_back(Output::CloseWire(id));
            self.wire_down(now, id, "no progress");
            return;
        }
        self.close_lane(carrier);
        self.carrier_down(now, carrier, "no progress");
    }

    /// The round trip time to the peer proxy of a connection.
    pub(crate) fn trunk_rtt(&self, carrier: Option<CarrierId>) -> Option<Duration> {
        let carrier = self.carriers.get(&carrier?)?;
        Some(self.trunks.all.get(&self.trunks.of(carrier)?)?.rtt)
    }

    /// Gives a frame of the session itself to a wire.
    fn send_session(&mut self, id: WireId, frame: Frame) {
        let Some(wire) = self.trunks.wires.get_mut(&id) else {
            return;
        };
        wire.sent_bytes += frame.wire_len() as u64;
        self.bucket.charge(frame.wire_len());
        self.out.push_back(Output::SendSession(id, frame));
    }

    fn wire_up(&mut self, now: Instant, id: WireId, peer: Peer) {
        let Some(wire) = self.trunks.wires.get_mut(&id) else {
            return;
        };
        let Some(link) = wire.dialled_for.and_then(|link| self.links.get(&link)) else {
            // The connection was removed meanwhile.
            self.out.push_back(Output::CloseWire(id));
            self.wire_down(now, id, "the connection was removed");
            return;
        };
        let refusal = peer.refusal(&link.config.name);
        let (link, kind, binding) = (wire.dialled_for, wire.kind, peer.binding);
        wire.peer = peer;
        (wire.since, wire.last_received) = (now, now);
        if let Some(refusal) = refusal {
            return self.reject(now, id, 0, &refusal);
        }
        wire.state = CarrierState::Handshake;
        match (kind, wire.trunk, link) {
            (CarrierKind::Control, _, Some(link)) => {
                let mut hello = self.hello(link, &binding);
                (hello.session, hello.proof) = ([0; 16], [0; 32]);
                if let Some(wire) = self.trunks.wires.get_mut(&id) {
                    wire.nonce = hello.nonce;
                }
                self.trunks.arm(now.after(self.handshake_time(link)));
                self.send_session(id, Frame::message(Kind::Hello, hello.encode()));
            }
            (CarrierKind::Bulk, Some(trunk_id), _) => {
                wire.state = CarrierState::Up;
                let Some(trunk) = self.trunks.all.get_mut(&trunk_id) else {
                    return;
                };
                trunk.attach_number += 1;
                wire.number = trunk.attach_number;
                trunk.bulk_dialling.retain(|other| *other != id);
                trunk.bulk.push(id);
                let attach = Attach {
                    session: trunk.id,
                    number: wire.number,
                    proof: attach_proof(&trunk.key, wire.number, &binding),
                };
                self.send_session(id, Frame::message(Kind::Attach, attach.encode()));
                self.bulk_is_there(now, trunk_id);
            }
            _ => {}
        }
        self.place_all(now);
    }

    fn bulk_is_there(&mut self, now: Instant, id: TrunkId) {
        if let Some(trunk) = self.trunks.all.get_mut(&id) {
            let mut waiting = std::mem::take(&mut trunk.waiting);
            waiting.reverse();
            self.trunks.placing.append(&mut waiting);
        }
        self.place_all(now);
    }

    fn wire_frame(&mut self, now: Instant, id: WireId, frame: &Frame) {
        let Some(wire) = self.trunks.wires.get_mut(&id) else {
            return;
        };
        wire.received_bytes += frame.wire_len() as u64;
        wire.last_received = now;
        if let Err(violation) = self.wire_dispatch(now, id, frame) {
            let by = self.trunks.wires.get(&id).and_then(|wire| wire.dialled_for);
            if let Some(link) = by.and_then(|id| self.links.get_mut(&id)) {
                link.counters.protocol_errors += 1;
            }
            self.reject(now, id, 0, &violation.to_string());
        }
        self.place_all(now);
    }

    /// Ends a wire with a reason for the other end's operator.
    fn reject(&mut self, now: Instant, id: WireId, code: u8, text: &str) {
        let mut frame = Frame::message(Kind::Goodbye, text.as_bytes().to_vec());
        frame.header.code = code;
        self.send_session(id, frame);
        self.out.push_back(Output::CloseWire(id));
        self.wire_down(now, id, text);
    }

    fn wire_dispatch(&mut self, now: Instant, id: WireId, frame: &Frame) -> Result<(), Violation> {
        let Some(wire) = self.trunks.wires.get(&id) else {
            return Ok(());
        };
        let (kind, header) = (wire.kind, frame.header);
        match (wire.state, wire.dialled_for, kind, header.kind) {
            (.., Kind::Goodbye) => {
                self.on_wire_goodbye(now, id, frame);
                Ok(())
            }
            (CarrierState::Handshake, None, _, Kind::Hello) => {
                self.on_wire_hello(now, id, &Hello::decode(&frame.payload)?)
            }
            (CarrierState::Handshake, None, _, Kind::Attach) => {
                self.on_wire_attach(now, id, &Attach::decode(&frame.payload)?)
            }
            (CarrierState::Handshake, None, ..) => {
                Err(rule("the first frame of a carrier must be HELLO or ATTACH"))
            }
            (CarrierState::Handshake, Some(_), CarrierKind::Control, Kind::HelloAck) => {
                self.on_wire_ack(now, id, &HelloAck::decode(&frame.payload)?)
            }
            (CarrierState::Up, _, CarrierKind::Control, Kind::Ping) => {
                let mut pong = frame.clone();
                pong.header.kind = Kind::Pong;
                self.send_session(id, pong);
                Ok(())
            }
            (CarrierState::Up, _, CarrierKind::Control, Kind::Pong) => {
                let sent =
                    <[u8; 8]>::try_from(frame.payload.as_slice()).map_err(|_| Malformed("PONG"))?;
                self.on_wire_pong(now, id, Instant(u64::from_le_bytes(sent)));
                Ok(())
            }
            (CarrierState::Up, _, _, Kind::LaneOpen) => {
                let open = LaneOpen::decode(&frame.payload)?;
                self.on_lane_open(now, id, header.stream, &open)
            }
            (CarrierState::Up, _, _, Kind::LaneClose) => {
                self.on_lane_close(now, id, header.stream, header.code);
                Ok(())
            }
            (.., kind) => Err(rule(format!("unexpected {kind:?} in the session"))),
        }
    }

    fn on_wire_pong(&mut self, now: Instant, id: WireId, sent: Instant) {
        let trunk = self.trunks.wires.get(&id).and_then(|wire| wire.trunk);
        let Some(trunk) = trunk else { return };
        let rtt = now.since(sent);
        let links: Vec<LinkId> = self.links_on(trunk).map(|(id, _)| id).collect();
        if let Some(trunk) = self.trunks.all.get_mut(&trunk) {
            trunk.rtt = rtt;
        }
        for id in links {
            if let Some(link) = self.links.get_mut(&id) {
                link.rtt = rtt;
            }
        }
    }

    fn on_wire_goodbye(&mut self, now: Instant, id: WireId, frame: &Frame) {
        let text = String::from_utf8_lossy(&frame.payload).into_owned();
        let shown: String = text.chars().filter(|c| !c.is_control()).take(300).collect();
        let reason = format!("the peer proxy said: {shown}");
        let Some(wire) = self.trunks.wires.get(&id) else {
            return;
        };
        let redirected = wire
            .redirected
            .filter(|_| frame.header.code == GOODBYE_UNKNOWN);
        if let Some(link) = wire.dialled_for {
            self.log(Level::Warn, link, reason.clone());
        }
        self.out.push_back(Output::CloseWire(id));
        self.wire_down(now, id, &reason);
        if let Some(trunk) = redirected {
            self.trunk_down(
                now,
                trunk,
                "the peer proxy does not know the session any more",
            );
        }
    }

    fn on_wire_hello(&mut self, now: Instant, id: WireId, hello: &Hello) -> Result<(), Violation> {
        self.check_hello(hello)?;
        let Some(wire) = self.trunks.wires.get(&id) else {
            return Ok(());
        };
        let (listener, identity) = (wire.listener, wire.peer.identity);
        let link = self.match_link(listener, hello)?;
        let config = self.config(link).expect("match_link returns a live id");
        if let Some(refusal) = wire.peer.refusal(&config.name) {
            return Err(rule(refusal));
        }
        let (far, connection) = (config.peer_outside.ip(), config.name.clone());
        let mut ack = HelloAck {
            protocol: PROTOCOL,
            resumed: false,
            instance: self.instance,
            session: self.random(),
            key: self.random(),
            connection,
            codecs: hello.codecs,
            window_bytes: hello.window_bytes,
        };
        let redirects = &mut self.trunks.redirects;
        redirects.retain(|(_, _, at)| now.since(*at) < ORPHAN);
        if redirects.len() < REDIRECTS_MAX
            && let Some(listener) = listener
        {
            redirects.push((hello.nonce, listener, now));
        }
        let same = |trunk: &Trunk| trunk.instance == hello.instance && trunk.identity == identity;
        let there = self.trunks.all.iter().find(|(_, trunk)| same(trunk));
        if let Some((trunk, entry)) = there {
            (ack.resumed, ack.session, ack.key) = (true, entry.id, [0; 32]);
            let trunk = *trunk;
            if let Some(wire) = self.trunks.wires.get_mut(&id) {
                wire.redirected = Some(trunk);
            }
            self.send_session(id, Frame::message(Kind::HelloAck, ack.encode()));
            return Ok(());
        }
        let (session, key) = (ack.session, ack.key);
        if let Some(wire) = self.trunks.wires.get_mut(&id) {
            wire.accepted_for = Some(link);
        }
        self.send_session(id, Frame::message(Kind::HelloAck, ack.encode()));
        self.trunk_up(now, id, far, hello.instance, (session, key));
        Ok(())
    }

    fn on_wire_ack(&mut self, now: Instant, id: WireId, ack: &HelloAck) -> Result<(), Violation> {
        self.check_ack(ack)?;
        let Some(wire) = self.trunks.wires.get_mut(&id) else {
            return Ok(());
        };
        let Some(link) = wire.dialled_for.and_then(|id| self.links.get_mut(&id)) else {
            return Err(rule("the connection was removed"));
        };
        let far = link.config.peer_outside.ip();
        if !ack.resumed {
            let wants = wire.wants.take();
            let named = (wire.dialled_for, wire.nonce);
            let trunk = self.trunk_up(now, id, far, ack.instance, (ack.session, ack.key));
            if let (Some(link), nonce) = named
                && let Some(link) = self.links.get_mut(&link)
            {
                link.redirect = trunk.map(|trunk| (trunk, nonce));
            }
            self.trunks.placing.extend(wants);
            return Ok(());
        }
        let there = self
            .trunks
            .all
            .iter()
            .find(|(_, trunk)| trunk.id == ack.session);
        let Some(trunk) = there.map(|(trunk, _)| *trunk) else {
            self.reject(
                now,
                id,
                GOODBYE_UNKNOWN,
                "that session is not known here any more",
            );
            return Ok(());
        };
        link.redirect = Some((trunk, wire.nonce));
        let wants = wire.wants.take();
        self.out.push_back(Output::CloseWire(id));
        self.wire_down(now, id, "there is a session with this peer proxy");
        self.trunks.placing.extend(wants);
        Ok(())
    }

    fn on_wire_attach(
        &mut self,
        now: Instant,
        id: WireId,
        attach: &Attach,
    ) -> Result<(), Violation> {
        let there = self
            .trunks
            .all
            .iter_mut()
            .find(|(_, trunk)| trunk.id == attach.session);
        let Some((trunk_id, trunk)) = there else {
            return Err(rule("ATTACH to a session that is unknown here"));
        };
        let trunk_id = *trunk_id;
        let Some(wire) = self.trunks.wires.get_mut(&id) else {
            return Ok(());
        };
        let proof = attach_proof(&trunk.key, attach.number, &wire.peer.binding);
        if trunk.dialled || proof != attach.proof || attach.number <= trunk.attach_number {
            return Err(rule("ATTACH without the right to it"));
        }
        trunk.attach_number = attach.number;
        trunk.bulk.push(id);
        (wire.kind, wire.state) = (CarrierKind::Bulk, CarrierState::Up);
        (wire.trunk, wire.number, wire.progress) = (Some(trunk_id), attach.number, now);
        self.bulk_is_there(now, trunk_id);
        Ok(())
    }

    /// Both ends of a control wire know each other.
    fn trunk_up(
        &mut self,
        now: Instant,
        id: WireId,
        far: IpAddr,
        instance: [u8; 16],
        (session, key): ([u8; 16], [u8; 32]),
    ) -> Option<TrunkId> {
        let trunk = TrunkId(self.fresh());
        let wire = self.trunks.wires.get_mut(&id)?;
        (wire.trunk, wire.state) = (Some(trunk), CarrierState::Up);
        let (dialled, identity) = (wire.dialled_for.is_some(), wire.peer.identity);
        let entry = Trunk {
            id: session,
            key,
            instance,
            identity,
            dialled,
            far,
            control: id,
            bulk: Vec::new(),
            bulk_dialling: Vec::new(),
            bulk_redial_at: now,
            attach_number: 0,
            ping_at: now,
            rtt: Duration::ZERO,
            waiting: Vec::new(),
            idle_since: Some(now),
        };
        self.trunks.all.insert(trunk, entry);
        self.trunks.arm(now);
        // Both ends may have dialled: what the lower one dialled is kept. The other end's dialling
        // is its own to give up.
        let own_loses = self.instance > instance;
        let twins: Vec<TrunkId> = self
            .trunks
            .all
            .iter()
            .filter(|(_, other)| other.instance == instance && other.identity == identity)
            .map(|(trunk, _)| *trunk)
            .collect();
        let is_own = |trunk: &&TrunkId| self.trunks.all.get(trunk).is_some_and(|t| t.dialled);
        let loser = twins.iter().find(is_own).copied();
        if let Some(loser) = loser.filter(|_| twins.len() > 1 && own_loses) {
            self.trunk_down(now, loser, "both ends dialled; the other session is kept");
        }
        self.place_waiting();
        Some(trunk)
    }

    /// What waited for another's dialling is placed anew.
    fn place_waiting(&mut self) {
        let mut unplaced = std::mem::take(&mut self.trunks.unplaced);
        unplaced.reverse();
        self.trunks.placing.append(&mut unplaced);
    }

    fn on_lane_open(
        &mut self,
        now: Instant,
        id: WireId,
        lane: u32,
        open: &LaneOpen,
    ) -> Result<(), Violation> {
        let Some(wire) = self.trunks.wires.get_mut(&id) else {
            return Ok(());
        };
        if lane % 2 == wire.next_lane % 2 || lane <= wire.last_peer_lane {
            return Err(rule("a lane with a number that is not its opener's to use"));
        }
        wire.last_peer_lane = lane;
        let (peer, kind, full) = (wire.peer.clone(), wire.kind, wire.lanes.len() >= LANES_MAX);
        let listener = match kind {
            // Its ATTACH says what it belongs to.
            CarrierKind::Bulk => Some(SocketAddr::from(([0; 4], 0))),
            CarrierKind::Control => self.lane_is_for(open),
        };
        let Some(listener) = listener.filter(|_| !full) else {
            let header = Header {
                stream: lane,
                code: LANE_UNKNOWN,
                ..Header::session(Kind::LaneClose)
            };
            let payload = super::frame::Bytes::default();
            self.send_session(id, Frame { header, payload });
            return Ok(());
        };
        let carrier = self.accept_carrier(now, listener, peer);
        if let Some(entry) = self.carriers.get_mut(&carrier) {
            entry.wire = Some((id, lane));
        }
        if let Some(wire) = self.trunks.wires.get_mut(&id) {
            wire.lanes.insert(lane, carrier);
        }
        Ok(())
    }

    /// The listening address of the connection that a lane is for: that of the pair of outside
    /// addresses, or the one on which the peer asked for it before.
    fn lane_is_for(&mut self, open: &LaneOpen) -> Option<SocketAddr> {
        let exact = self.links.values().find(|link| {
            link.config.my_outside.to_string() == open.peer_outside
                && link.config.peer_outside.to_string() == open.my_outside
        });
        if let Some(link) = exact {
            return Some(link.config.my_outside);
        }
        let redirects = &mut self.trunks.redirects;
        let at = redirects
            .iter()
            .position(|(nonce, ..)| *nonce == open.nonce)?;
        Some(redirects.swap_remove(at).1)
    }

    fn on_lane_close(&mut self, now: Instant, id: WireId, lane: u32, code: u8) {
        let Some(wire) = self.trunks.wires.get_mut(&id) else {
            return;
        };
        let Some(carrier) = wire.lanes.remove(&lane) else {
            return;
        };
        let trunk = wire.trunk;
        self.out.push_back(Output::CloseLane(id, lane));
        let Some(entry) = self.carriers.get_mut(&carrier) else {
            return;
        };
        entry.wire = None;
        let link = entry.link;
        let unknown = code == LANE_UNKNOWN && entry.kind == CarrierKind::Control;
        if unknown && let Some(link) = link.and_then(|id| self.links.get_mut(&id)) {
            link.not_at
                .retain(|trunk| self.trunks.all.contains_key(trunk));
            link.not_at.extend(trunk);
            link.redirect = None;
        }
        let backoff = link.and_then(|id| Some(self.links.get(&id)?.backoff));
        self.carrier_down(now, carrier, "the peer closed the connection");
        if unknown
            && let (Some(id), Some(backoff)) = (link, backoff)
            && let Some(link) = self.links.get_mut(&id)
        {
            // Not a failure: now it dials.
            (link.redial_at, link.backoff) = (now, backoff);
            self.settle(now, id);
        }
    }

    /// A wire is gone; the shell has closed it or will.
    pub(crate) fn wire_down(&mut self, now: Instant, id: WireId, reason: &str) {
        let Some(wire) = self.trunks.wires.remove(&id) else {
            return;
        };
        let jitter = Duration::from_millis(self.rng.below(100));
        if let Some(trunk) = wire.trunk {
            if wire.kind == CarrierKind::Control {
                self.end_trunk(now, trunk, wire.lanes, reason);
            } else if let Some(trunk) = self.trunks.all.get_mut(&trunk) {
                trunk.bulk.retain(|other| *other != id);
                trunk.bulk_dialling.retain(|other| *other != id);
                trunk.bulk_redial_at = now.after(BACKOFF_MIN + jitter);
                let at = trunk.bulk_redial_at;
                self.trunks.arm(at);
                self.lanes_down(now, wire.lanes, reason);
            }
        }
        if let Some(carrier) = wire.wants {
            self.carrier_down(now, carrier, reason);
        }
        if wire.trunk.is_none() && wire.dialled_for.is_some() {
            self.place_waiting();
        }
        self.place_all(now);
    }

    fn lanes_down(&mut self, now: Instant, lanes: BTreeMap<u32, CarrierId>, reason: &str) {
        for carrier in lanes.into_values() {
            if let Some(entry) = self.carriers.get_mut(&carrier) {
                entry.wire = None;
            }
            self.carrier_down(now, carrier, reason);
        }
    }

    fn trunk_down(&mut self, now: Instant, id: TrunkId, reason: &str) {
        self.end_trunk(now, id, BTreeMap::new(), reason);
    }

    /// The session goes first, then its wires, then what ran on them: nothing that is dialled
    /// anew meanwhile may find a part of it.
    fn end_trunk(
        &mut self,
        now: Instant,
        id: TrunkId,
        lanes: BTreeMap<u32, CarrierId>,
        reason: &str,
    ) {
        let Some(trunk) = self.trunks.all.remove(&id) else {
            return;
        };
        let mut gone = vec![lanes];
        let wires = trunk.bulk.into_iter().chain(trunk.bulk_dialling);
        for id in [trunk.control].into_iter().chain(wires) {
            if let Some(wire) = self.trunks.wires.remove(&id) {
                self.out.push_back(Output::CloseWire(id));
                gone.push(wire.lanes);
            }
        }
        for lanes in gone {
            self.lanes_down(now, lanes, reason);
        }
        for carrier in trunk.waiting {
            self.carrier_down(now, carrier, reason);
        }
        self.place_all(now);
    }

    /// All wires are closed at once, as for a hand-over.
    pub(crate) fn drop_trunks(&mut self) {
        for id in std::mem::take(&mut self.trunks.wires).into_keys() {
            self.out.push_back(Output::CloseWire(id));
        }
        self.trunks = Trunks::default();
    }

    /// Everything about sessions that depends on time.
    pub(crate) fn check_trunks(&mut self, now: Instant) {
        if self.trunks.at.is_none_or(|at| at > now) {
            return;
        }
        self.trunks.at = None;
        let ids: Vec<TrunkId> = self.trunks.all.keys().copied().collect();
        for id in ids {
            self.check_trunk(now, id);
        }
        let mut late = Vec::new();
        for (id, wire) in &self.trunks.wires {
            if wire.state == CarrierState::Up {
                continue;
            }
            let patience = wire
                .dialled_for
                .map_or(ORPHAN, |id| self.handshake_time(id));
            let at = wire.since.after(patience);
            match at <= now {
                true => late.push(*id),
                false => self.trunks.at = Some(self.trunks.at.map_or(at, |held| held.min(at))),
            }
        }
        for id in late {
            self.out.push_back(Output::CloseWire(id));
            self.wire_down(now, id, "no answer");
        }
        let waiting = std::mem::take(&mut self.trunks.unplaced);
        self.trunks.placing.extend(waiting);
        self.place_all(now);
    }

    fn check_trunk(&mut self, now: Instant, id: TrunkId) {
        let wan = self
            .links_on(id)
            .map(|(_, link)| link.config.options.wan_timeout)
            .min();
        let wan = wan.unwrap_or(Duration::from_secs(5));
        let Some(trunk) = self.trunks.all.get_mut(&id) else {
            return;
        };
        let Some(wire) = self.trunks.wires.get(&trunk.control) else {
            return;
        };
        if now.since(wire.last_received) >= wan {
            return self.trunk_down(now, id, "the peer proxy is silent");
        }
        trunk.idle_since = match wire.lanes.is_empty() {
            true => Some(trunk.idle_since.unwrap_or(now)),
            false => None,
        };
        if trunk
            .idle_since
            .is_some_and(|since| now.since(since) >= IDLE)
        {
            return self.trunk_down(now, id, "no connection uses the session");
        }
        let mut at = wire.last_received.after(wan);
        let (control, ping) = (trunk.control, trunk.ping_at <= now);
        if ping {
            trunk.ping_at = now.after(ping_every(wan));
        }
        at = at.min(trunk.ping_at);
        if let Some(since) = trunk.idle_since {
            at = at.min(since.after(IDLE));
        }
        self.trunks.arm(at);
        if ping {
            let frame = Frame::message(Kind::Ping, now.0.to_le_bytes().to_vec());
            self.send_session(control, frame);
        }
        self.keep_trunk(now, id);
    }

    /// The session's count of wires may have to change with a connection's options.
    pub(crate) fn keep_trunks(&mut self, now: Instant) {
        let ids: Vec<TrunkId> = self.trunks.all.keys().copied().collect();
        for id in ids {
            self.keep_trunk(now, id);
        }
        self.trunks.arm(now);
        self.place_all(now);
    }

    /// The connection whose options a wire has: the first of its session.
    pub(crate) fn wire_link(&self, id: WireId) -> Option<LinkId> {
        let wire = self.trunks.wires.get(&id)?;
        let first = wire
            .trunk
            .and_then(|trunk| self.links_on(trunk).map(|(id, _)| id).min());
        first.or(wire.dialled_for).or(wire.accepted_for)
    }

    /// The lowest rate that limits all of a wire's lanes together; 0 is unlimited.
    pub(crate) fn wire_limit(&self, id: WireId) -> u64 {
        let wire = self.trunks.wires.get(&id);
        let (mut sum, mut count, mut upper) = (0u64, 0, self.bucket.rate());
        if let Some(trunk) = wire.and_then(|wire| wire.trunk) {
            for (link, _) in self.links_on(trunk) {
                match self.lowest_rate(link) {
                    0 => return 0,
                    rate => sum = sum.saturating_add(rate),
                }
                count += 1;
            }
            if let Some(trunk) = self.trunks.all.get(&trunk) {
                upper = [upper, self.session_rate(trunk.far)]
                    .into_iter()
                    .filter(|rate| *rate > 0)
                    .min()
                    .unwrap_or(0);
            }
        }
        match (count, upper) {
            (0, upper) => upper,
            (_, 0) => sum,
            (_, upper) => sum.min(upper),
        }
    }

    /// What the lanes of a wire were seen to bring through, per second.
    pub(crate) fn wire_rate(&self, id: WireId) -> Option<u64> {
        let trunk = self.trunks.wires.get(&id)?.trunk?;
        let rates = self
            .links_on(trunk)
            .filter_map(|(_, link)| link.wire_rate.get());
        rates.reduce(|a, b| a + b).map(|rate| rate as u64)
    }

    /// The wires of a connection's session, control first.
    pub(crate) fn wires_of(&self, id: LinkId) -> Vec<WireId> {
        let control = self.links.get(&id).and_then(|link| link.control);
        let control = control.and_then(|control| self.carriers.get(&control));
        let trunk = control.and_then(|control| self.trunks.of(control));
        let Some(trunk) = trunk.and_then(|trunk| self.trunks.all.get(&trunk)) else {
            return Vec::new();
        };
        [trunk.control]
            .into_iter()
            .chain(trunk.bulk.iter().copied())
            .collect()
    }

    /// The lanes of a wire, to be tried with anything.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn lanes_of(&self, id: WireId) -> Vec<u32> {
        let wire = self.trunks.wires.get(&id).into_iter();
        wire.flat_map(|wire| wire.lanes.keys().copied()).collect()
    }

    /// For the operator.
    pub(crate) fn trunk_snapshots(&self) -> Vec<TrunkSnapshot> {
        let sessions = self.trunks.all.iter();
        sessions
            .map(|(id, trunk)| TrunkSnapshot {
                id: trunk.id.iter().map(|byte| format!("{byte:02x}")).collect(),
                peer: trunk.far.to_string(),
                role: if trunk.dialled { "dialer" } else { "listener" }.into(),
                rtt_us: trunk.rtt.as_micros() as u64,
                tcp_connections: 1 + trunk.bulk.len(),
                connections: {
                    let links = self.links_on(*id);
                    links.map(|(_, link)| link.config.name.clone()).collect()
                },
            })
            .collect()
    }
}

/// Time between signs of life.
fn ping_every(wan: Duration) -> Duration {
    (wan / 4).clamp(Duration::from_millis(100), Duration::from_secs(5))
}
