//! Sessions and carriers: dialling, HELLO, ATTACH, liveness, suspension, resumption and the end.
//! A session outlives its carriers; DRBD's sockets are reset only when it ends.

use std::net::SocketAddr;
use std::time::Duration;

use super::engine::{Engine, WRITE_MIN, is_live, keyed};
use super::frame::{Frame, HEADER_LEN, Kind};
use super::history::{grant, grant_bits};
use super::identity::Peer;
use super::link::{Carrier, CarrierState, Link, Phase, SessionKey, StreamPhase};
use super::message::{Ack, Attach, Hello, HelloAck, Malformed, Stats};
use super::plugin::CODEC_COUNT;
use super::time::Instant;
use super::{CarrierId, CarrierKind, Level, LinkId, Output};

/// Version of the messages that this build speaks.
pub(crate) const PROTOCOL: u8 = 3;
/// Code of a GOODBYE that ends the session, not only the carrier.
const GOODBYE_FINAL: u8 = 1;
pub(crate) const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Time between measurements and reports to the peer.
const MEASURE_EVERY: Duration = Duration::from_millis(250);

/// Fewest thousandths of a core that a peer's decoders are expected to get: about what threads of
/// low priority have on a machine that is busy. The most is more than any machine has.
const MILLICORES_MIN: u64 = 250;
const MILLICORES_MAX: u64 = 1024 * 1000;

/// The peer broke the rules: its carrier is closed with this text.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Violation {
    #[error("{0}")]
    Malformed(#[from] Malformed),
    #[error("{0}")]
    Rule(String),
}

pub(crate) fn rule(text: impl Into<String>) -> Violation {
    Violation::Rule(text.into())
}

/// Proofs that both ends know the session's key. They hold for one TLS connection only, so they
/// cannot be played to anybody on another one.
fn resume_proof(key: &[u8; 32], nonce: u64, binding: &[u8; 32]) -> [u8; 32] {
    keyed(key, &[b"resume", &nonce.to_le_bytes(), binding])
}

pub(crate) fn attach_proof(key: &[u8; 32], number: u32, binding: &[u8; 32]) -> [u8; 32] {
    keyed(key, &[b"attach", &number.to_le_bytes(), binding])
}

impl Carrier {
    pub(crate) fn new(
        now: Instant,
        link: Option<LinkId>,
        kind: CarrierKind,
        state: CarrierState,
    ) -> Carrier {
        Carrier {
            link,
            wire: None,
            kind,
            number: 0,
            state,
            since: now,
            peer: Peer::default(),
            listener: None,
            queued_bytes: 0,
            sent_bytes: 0,
            received_bytes: 0,
            told_bytes: 0,
            last_received: now,
            peer_received: 0,
            peer_progress: now,
            wants_write: false,
            woken: None,
        }
    }
}

impl Engine {
    /// Dials what is missing.
    pub(crate) fn keep_session(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if !link.config.dials() || self.frozen {
            return;
        }
        if link.control.is_none() && link.dialing.is_none() && link.redial_at <= now {
            self.dial(now, id, CarrierKind::Control);
        }
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if !is_live(link) || !link.session_dialer {
            return;
        }
        let wanted = link.config.options.bulk_carriers as usize;
        let mut surplus = Vec::new();
        while link.bulk.len() > wanted {
            surplus.extend(link.bulk.pop());
        }
        let missing = wanted.saturating_sub(link.bulk.len() + link.bulk_dialing.len());
        let due = link.bulk_redial_at <= now;
        for carrier in surplus {
            self.lose_bulk(now, id, carrier);
            self.drop_carrier(carrier);
        }
        if due {
            for _ in 0..missing {
                self.dial(now, id, CarrierKind::Bulk);
            }
        }
    }

    fn dial(&mut self, now: Instant, id: LinkId, kind: CarrierKind) {
        let carrier = CarrierId(self.fresh());
        let entry = Carrier::new(now, Some(id), kind, CarrierState::Dialing);
        self.carriers.insert(carrier, entry);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        match kind {
            CarrierKind::Control => link.dialing = Some(carrier),
            CarrierKind::Bulk => link.bulk_dialing.push(carrier),
        }
        self.want_lane(carrier);
    }

    /// A carrier's lane is there: introduce it.
    pub(crate) fn carrier_up(&mut self, now: Instant, carrier: CarrierId, peer: Peer) {
        let Some(entry) = self.carriers.get_mut(&carrier) else {
            return;
        };
        let Some(id) = entry.link else { return };
        let binding = peer.binding;
        entry.peer = peer;
        if let Some(refusal) = self.refusal(carrier, id) {
            self.goodbye(carrier, &refusal);
            self.close_lane(carrier);
            self.carrier_down(now, carrier, &refusal);
            return;
        }
        let Some(entry) = self.carriers.get_mut(&carrier) else {
            return;
        };
        entry.since = now;
        entry.last_received = now;
        entry.peer_progress = now;
        match entry.kind {
            CarrierKind::Control => {
                entry.state = CarrierState::Handshake;
                let hello = self.hello(id, &binding);
                self.send(carrier, Frame::message(Kind::Hello, hello.encode()));
            }
            CarrierKind::Bulk => {
                entry.state = CarrierState::Up;
                let Some(link) = self.links.get_mut(&id) else {
                    return;
                };
                link.bulk_dialing.retain(|other| *other != carrier);
                let Some(session) = link.session.filter(|_| link.phase == Phase::Live) else {
                    self.drop_carrier(carrier);
                    return;
                };
                link.attach_number += 1;
                let number = link.attach_number;
                link.bulk.push(carrier);
                link.counters.carriers_up += 1;
                link.bulk_missing_since = None;
                entry.number = number;
                let proof = attach_proof(&session.key, number, &binding);
                let attach = Attach {
                    session: session.id,
                    number,
                    proof,
                };
                self.send(carrier, Frame::message(Kind::Attach, attach.encode()));
            }
        }
        self.settle(now, id);
    }

    /// What this end remembers of each stream of the connection. All connections together get an
    /// eighth of the memory, and a promise once made is kept.
    fn grant_history(&mut self, id: LinkId) -> u64 {
        let eighth = self.options.memory_max_bytes / 8;
        let share = eighth / (self.links.len() as u64).max(1);
        let promised: u64 = self.links.values().map(|link| link.history_granted).sum();
        let Some(link) = self.links.get_mut(&id) else {
            return 0;
        };
        if link.history_granted == 0 && link.streams.is_empty() {
            link.history_granted = grant(eighth.saturating_sub(promised), share);
        }
        link.history_granted
    }

    pub(crate) fn hello(&mut self, id: LinkId, binding: &[u8; 32]) -> Hello {
        let nonce = u64::from_le_bytes(self.random());
        let (instance, window_bytes) = (self.instance, self.window());
        let history = self.grant_history(id);
        let link = self
            .links
            .get(&id)
            .expect("the caller holds a live link id");
        let (session, proof) = match &link.session {
            Some(session) => (session.id, resume_proof(&session.key, nonce, binding)),
            None => ([0; 16], [0; 32]),
        };
        Hello {
            protocol_min: PROTOCOL,
            protocol_max: PROTOCOL,
            instance,
            session,
            proof,
            nonce,
            connection: link.config.name.clone(),
            my_outside: link.config.my_outside.to_string(),
            peer_outside: link.config.peer_outside.to_string(),
            codecs: ((1 << CODEC_COUNT) - 1) | grant_bits(history),
            window_bytes,
        }
    }

    /// A whole frame came in on a carrier.
    pub(crate) fn carrier_frame(&mut self, now: Instant, carrier: CarrierId, frame: Frame) {
        let Some(entry) = self.carriers.get(&carrier) else {
            return;
        };
        let link = entry.link;
        if let Err(violation) = self.dispatch(now, carrier, link, frame) {
            if let Some(link) = link.and_then(|id| self.links.get_mut(&id)) {
                link.counters.protocol_errors += 1;
            }
            let text = violation.to_string();
            self.goodbye(carrier, &text);
            self.close_lane(carrier);
            self.carrier_down(now, carrier, &text);
        } else if let Some(id) = self.carriers.get(&carrier).and_then(|entry| entry.link) {
            self.settle(now, id);
        }
    }

    fn dispatch(
        &mut self,
        now: Instant,
        carrier: CarrierId,
        link: Option<LinkId>,
        frame: Frame,
    ) -> Result<(), Violation> {
        let kind = frame.header.kind;
        let Some(id) = link else {
            return match kind {
                Kind::Hello => self.on_hello(now, carrier, &Hello::decode(&frame.payload)?),
                Kind::Attach => self.on_attach(now, carrier, &Attach::decode(&frame.payload)?),
                _ => Err(rule("the first frame of a carrier must be HELLO or ATTACH")),
            };
        };
        let Some(entry) = self.carriers.get(&carrier) else {
            return Ok(());
        };
        if kind == Kind::Goodbye {
            let text = String::from_utf8_lossy(&frame.payload).into_owned();
            let last = frame.header.code == GOODBYE_FINAL;
            return self.on_goodbye(now, carrier, id, &text, last);
        }
        match (entry.kind, entry.state, kind) {
            (CarrierKind::Control, CarrierState::Handshake, Kind::HelloAck) => {
                self.on_hello_ack(now, carrier, id, &HelloAck::decode(&frame.payload)?)
            }
            (CarrierKind::Control, CarrierState::Up, Kind::Resume) => {
                self.on_resume(now, id, &Ack::decode_list(&frame.payload)?)
            }
            (CarrierKind::Control, CarrierState::Up, Kind::Stats) => {
                self.on_stats(now, id, &Stats::decode(&frame.payload)?);
                Ok(())
            }
            (CarrierKind::Control, CarrierState::Up, Kind::Ack) => {
                for ack in Ack::decode_list(&frame.payload)? {
                    self.on_ack(now, id, &ack);
                }
                Ok(())
            }
            (CarrierKind::Control, CarrierState::Up, Kind::Open) => self.on_open(now, id, &frame),
            (CarrierKind::Control, CarrierState::Up, Kind::OpenOk) => {
                self.on_open_ok(now, id, &frame);
                Ok(())
            }
            (CarrierKind::Control, CarrierState::Up, Kind::OpenErr) => {
                self.on_open_err(now, id, &frame);
                Ok(())
            }
            (CarrierKind::Control, CarrierState::Up, Kind::Rst) => {
                self.on_rst(now, id, &frame);
                Ok(())
            }
            (_, CarrierState::Up, Kind::Data) => {
                self.on_data(now, id, frame);
                Ok(())
            }
            (at, _, kind) => Err(rule(format!("unexpected {kind:?} on a {at:?} carrier"))),
        }
    }

    fn on_hello(
        &mut self,
        now: Instant,
        carrier: CarrierId,
        hello: &Hello,
    ) -> Result<(), Violation> {
        self.check_hello(hello)?;
        let listener = self.carriers.get(&carrier).and_then(|entry| entry.listener);
        let id = self.match_link(listener, hello)?;
        if let Some(refusal) = self.refusal(carrier, id) {
            return Err(rule(refusal));
        }
        let entry = self.carriers.get(&carrier);
        let binding = entry.map(|entry| entry.peer.binding).unwrap_or_default();
        let link = self
            .links
            .get_mut(&id)
            .expect("match_link returns a live id");
        let own_dial = link
            .dialing
            .or(link.control.filter(|_| link.phase == Phase::Live));
        if link.config.dials() && own_dial.is_some() && hello.instance > self.instance {
            // Both ends dial: the carrier of the lower instance wins.
            return Err(rule("both ends dial; the other carrier is kept"));
        }
        let resumed = link.session.is_some_and(|session| {
            session.id == hello.session
                && hello.proof == resume_proof(&session.key, hello.nonce, &binding)
        });
        link.peer_codecs = hello.codecs;
        link.peer_window = hello.window_bytes;
        if let Some(dialing) = link.dialing.take() {
            self.drop_carrier(dialing);
        }
        if resumed {
            // The old carriers may not have been noticed as lost.
            self.suspend(now, id, "the peer dialled anew");
        } else {
            self.end_session(now, id, "the peer began a new session");
            let session = SessionKey {
                id: self.random(),
                key: self.random(),
            };
            let link = self.links.get_mut(&id).expect("the link is still there");
            link.session = Some(session);
            link.session_dialer = false;
        }
        let (instance, window_bytes) = (self.instance, self.window());
        let history = self.grant_history(id);
        let link = self.links.get_mut(&id).expect("the link is still there");
        let session = link.session.expect("set above");
        link.control = Some(carrier);
        link.counters.carriers_up += 1;
        let ack = HelloAck {
            protocol: PROTOCOL,
            resumed,
            instance,
            session: session.id,
            key: session.key,
            connection: link.config.name.clone(),
            codecs: ((1 << CODEC_COUNT) - 1) | grant_bits(history),
            window_bytes,
        };
        if let Some(entry) = self.carriers.get_mut(&carrier) {
            entry.link = Some(id);
            entry.kind = CarrierKind::Control;
            entry.state = CarrierState::Up;
            entry.last_received = now;
        }
        self.send(carrier, Frame::message(Kind::HelloAck, ack.encode()));
        if resumed {
            self.begin_resume(now, id, carrier);
        } else {
            self.go_live(now, id);
        }
        Ok(())
    }

    /// Whether a HELLO is another proxy's, and one that can be talked to.
    pub(crate) fn check_hello(&self, hello: &Hello) -> Result<(), Violation> {
        if hello.instance == self.instance {
            return Err(rule(format!(
                "connection {}: this proxy has connected to itself; check the outside addresses",
                hello.connection
            )));
        }
        if hello.protocol_min > PROTOCOL || hello.protocol_max < PROTOCOL {
            return Err(rule(format!(
                "protocol versions {} to {} are offered, {PROTOCOL} is spoken here",
                hello.protocol_min, hello.protocol_max
            )));
        }
        Ok(())
    }

    /// The same of the answer.
    pub(crate) fn check_ack(&self, ack: &HelloAck) -> Result<(), Violation> {
        if ack.instance == self.instance {
            return Err(rule(
                "this proxy has connected to itself; check the outside addresses",
            ));
        }
        if ack.protocol != PROTOCOL {
            return Err(rule(format!("the peer chose protocol {}", ack.protocol)));
        }
        Ok(())
    }

    /// Finds the connection that a HELLO means: by the pair of outside addresses, else, where
    /// addresses are translated on the way, by the address that it was accepted on.
    pub(crate) fn match_link(
        &self,
        listener: Option<SocketAddr>,
        hello: &Hello,
    ) -> Result<LinkId, Violation> {
        let exact = self.links.iter().find(|(_, link)| {
            link.config.my_outside.to_string() == hello.peer_outside
                && link.config.peer_outside.to_string() == hello.my_outside
        });
        if let Some((id, _)) = exact {
            return Ok(*id);
        }
        let mut here = self
            .links
            .iter()
            .filter(|(_, link)| Some(link.config.my_outside) == listener);
        match (here.next(), here.next()) {
            (Some((id, _)), None) => Ok(*id),
            (Some(_), Some(_)) => Err(rule(format!(
                "connection {}: several connections listen on this address and none has {} as \
                 its peer",
                hello.connection, hello.my_outside
            ))),
            _ => Err(rule(format!(
                "connection {}: none is configured here with the outside addresses {} and {}",
                hello.connection, hello.peer_outside, hello.my_outside
            ))),
        }
    }

    fn on_hello_ack(
        &mut self,
        now: Instant,
        carrier: CarrierId,
        id: LinkId,
        ack: &HelloAck,
    ) -> Result<(), Violation> {
        self.check_ack(ack)?;
        let Some(link) = self.links.get(&id) else {
            return Ok(());
        };
        let resumed = ack.resumed
            && link
                .session
                .is_some_and(|session| session.id == ack.session);
        if ack.resumed && !resumed {
            return Err(rule("the peer resumes a session that was not asked for"));
        }
        if !resumed {
            self.end_session(now, id, "the peer does not know the session any more");
        }
        let Some(link) = self.links.get_mut(&id) else {
            return Ok(());
        };
        link.dialing = None;
        link.control = Some(carrier);
        link.counters.carriers_up += 1;
        link.session_dialer |= !resumed;
        link.session = Some(SessionKey {
            id: ack.session,
            key: ack.key,
        });
        link.peer_codecs = ack.codecs;
        link.peer_window = ack.window_bytes;
        link.backoff = BACKOFF_MIN;
        if let Some(entry) = self.carriers.get_mut(&carrier) {
            entry.state = CarrierState::Up;
            entry.last_received = now;
        }
        if resumed {
            self.begin_resume(now, id, carrier);
        } else {
            self.go_live(now, id);
        }
        Ok(())
    }

    fn begin_resume(&mut self, now: Instant, id: LinkId, carrier: CarrierId) {
        let window = self.window();
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        // `session-hold` runs on until the peer's RESUME is here.
        let since = match link.phase {
            Phase::Suspended { since } | Phase::Resuming { since } => since,
            Phase::Live | Phase::Down => now,
        };
        link.phase = Phase::Resuming { since };
        let list: Vec<Ack> = link
            .streams
            .iter_mut()
            .filter(|(_, stream)| stream.phase == StreamPhase::Open)
            .map(|(stream, entry)| entry.rx.report(*stream, window))
            .collect();
        self.send(
            carrier,
            Frame::message(Kind::Resume, Ack::encode_list(&list)),
        );
    }

    fn on_resume(&mut self, now: Instant, id: LinkId, list: &[Ack]) -> Result<(), Violation> {
        let Some(link) = self.links.get(&id) else {
            return Ok(());
        };
        if !matches!(link.phase, Phase::Resuming { .. }) {
            return Err(rule("RESUME without a suspended session"));
        }
        let unknown: Vec<u32> = link
            .streams
            .keys()
            .filter(|stream| !list.iter().any(|ack| ack.stream == **stream))
            .copied()
            .collect();
        for stream in unknown {
            self.absent_at_peer(now, id, stream);
        }
        for ack in list {
            self.on_ack(now, id, ack);
        }
        let Some(link) = self.links.get_mut(&id) else {
            return Ok(());
        };
        link.counters.resumes += 1;
        let mut resent = 0;
        for stream in link.streams.values_mut() {
            resent += stream.tx.unsend(None);
        }
        link.counters.resent_bytes += resent;
        self.log(
            Level::Info,
            id,
            format!("session resumed, {resent} bytes to send again"),
        );
        self.go_live(now, id);
        Ok(())
    }

    fn go_live(&mut self, now: Instant, id: LinkId) {
        let control = self.links.get(&id).and_then(|link| link.control);
        let rtt = self.trunk_rtt(control);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let fresh = !matches!(link.phase, Phase::Resuming { .. });
        link.phase = Phase::Live;
        link.bulk_redial_at = now;
        link.bulk_missing_since = Some(now);
        link.rtt = rtt.unwrap_or(link.rtt);
        link.measured = now;
        link.busy_since = None;
        link.last_error.clear();
        if fresh {
            link.counters.sessions += 1;
            link.attach_number = 0;
            link.next_stream = if link.session_dialer { 1 } else { 2 };
            link.last_peer_stream = 0;
            self.log(Level::Info, id, "session with the peer proxy is up".into());
        }
    }

    fn on_attach(
        &mut self,
        now: Instant,
        carrier: CarrierId,
        attach: &Attach,
    ) -> Result<(), Violation> {
        let found = self.links.iter().find(|(_, link)| {
            link.session
                .is_some_and(|session| session.id == attach.session)
        });
        let Some(id) = found.map(|(id, _)| *id) else {
            return Err(rule("ATTACH to a session that is unknown here"));
        };
        if let Some(refusal) = self.refusal(carrier, id) {
            return Err(rule(refusal));
        }
        let entry = self.carriers.get(&carrier);
        let binding = entry.map(|entry| entry.peer.binding).unwrap_or_default();
        let link = self.links.get_mut(&id).expect("found above");
        let key = link.session.map(|session| session.key).unwrap_or_default();
        let proof = attach_proof(&key, attach.number, &binding);
        if proof != attach.proof || attach.number <= link.attach_number {
            return Err(rule("ATTACH without the right to it"));
        }
        if !matches!(link.phase, Phase::Live | Phase::Resuming { .. }) {
            return Err(rule("ATTACH to a suspended session"));
        }
        link.attach_number = attach.number;
        link.bulk.push(carrier);
        link.counters.carriers_up += 1;
        link.bulk_missing_since = None;
        if let Some(entry) = self.carriers.get_mut(&carrier) {
            entry.link = Some(id);
            entry.kind = CarrierKind::Bulk;
            entry.state = CarrierState::Up;
            entry.number = attach.number;
            entry.peer_progress = now;
        }
        Ok(())
    }

    /// Why the other end of a carrier must not use a connection.
    fn refusal(&self, carrier: CarrierId, id: LinkId) -> Option<String> {
        let (entry, link) = (self.carriers.get(&carrier)?, self.links.get(&id)?);
        entry.peer.refusal(&link.config.name)
    }

    /// Ends a carrier with a reason for the other end's operator.
    pub(crate) fn goodbye(&mut self, carrier: CarrierId, text: &str) {
        self.send(
            carrier,
            Frame::message(Kind::Goodbye, text.as_bytes().to_vec()),
        );
    }

    /// Ends the whole session at both ends: waiting for it would be in vain.
    pub(crate) fn farewell(&mut self, control: CarrierId, text: &str) {
        let mut frame = Frame::message(Kind::Goodbye, text.as_bytes().to_vec());
        frame.header.code = GOODBYE_FINAL;
        self.send(control, frame);
    }

    fn on_goodbye(
        &mut self,
        now: Instant,
        carrier: CarrierId,
        id: LinkId,
        text: &str,
        last: bool,
    ) -> Result<(), Violation> {
        let shown: String = text.chars().filter(|c| !c.is_control()).take(300).collect();
        let reason = format!("the peer proxy said: {shown}");
        self.log(Level::Warn, id, reason.clone());
        self.close_lane(carrier);
        let control = self
            .links
            .get(&id)
            .is_some_and(|link| link.control == Some(carrier));
        self.carrier_down(now, carrier, &reason);
        if last && control {
            self.end_session(now, id, &reason);
        }
        Ok(())
    }

    pub(crate) fn carrier_received(&mut self, now: Instant, carrier: CarrierId, bytes: usize) {
        let Some(entry) = self.carriers.get_mut(&carrier) else {
            return;
        };
        entry.received_bytes += bytes as u64;
        entry.last_received = now;
        let kind = entry.kind;
        if let Some(link) = entry.link.and_then(|id| self.links.get_mut(&id)) {
            link.counters.wire_in_bytes += bytes as u64;
            if kind == CarrierKind::Control {
                link.counters.control_wire_in_bytes += bytes as u64;
            }
        }
    }

    pub(crate) fn carrier_sent(&mut self, now: Instant, carrier: CarrierId, bytes: usize) {
        let Some(entry) = self.carriers.get_mut(&carrier) else {
            return;
        };
        let queued = bytes;
        let place = entry.wire;
        let bytes = queued + HEADER_LEN;
        if let Some(wire) = place.and_then(|(id, _)| self.trunks.wires.get_mut(&id)) {
            wire.sent_bytes += bytes as u64;
        }
        if entry.sent_bytes == entry.peer_received {
            // Idle until now: the time without progress begins here.
            entry.peer_progress = now;
        }
        entry.queued_bytes = entry.queued_bytes.saturating_sub(queued);
        entry.sent_bytes += bytes as u64;
        let (kind, link) = (entry.kind, entry.link);
        self.charge(now, link, bytes);
        let Some(id) = link else { return };
        if let Some(link) = self.links.get_mut(&id) {
            link.counters.wire_out_bytes += bytes as u64;
            if kind == CarrierKind::Control {
                link.counters.control_wire_out_bytes += bytes as u64;
            }
        }
        if kind == CarrierKind::Bulk {
            self.count_served(id, bytes);
        }
        self.settle(now, id);
    }

    /// A carrier is gone; the shell has closed it or will.
    pub(crate) fn carrier_down(&mut self, now: Instant, carrier: CarrierId, reason: &str) {
        let Some(entry) = self.carriers.remove(&carrier) else {
            return;
        };
        let Some(id) = entry.link else { return };
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let jitter = Duration::from_millis(self.rng.below(100));
        if link.dialing == Some(carrier) {
            link.dialing = None;
            link.redial_at = now.after(link.backoff + jitter);
            link.backoff = (link.backoff * 2).min(BACKOFF_MAX);
            link.last_error = format!("peer proxy {}: {reason}", link.config.peer_outside);
        } else if link.control == Some(carrier) {
            link.counters.carriers_lost += 1;
            self.suspend(now, id, reason);
        } else if entry.kind == CarrierKind::Bulk {
            let was_up = link.bulk.contains(&carrier);
            link.bulk.retain(|other| *other != carrier);
            link.bulk_dialing.retain(|other| *other != carrier);
            link.bulk_redial_at = now.after(BACKOFF_MIN + jitter);
            if link.bulk.is_empty() && link.bulk_missing_since.is_none() {
                link.bulk_missing_since = Some(now);
            }
            if was_up {
                link.counters.carriers_lost += 1;
                self.lose_bulk(now, id, carrier);
                self.log(Level::Warn, id, format!("bulk carrier lost: {reason}"));
            }
        }
        self.settle(now, id);
    }

    fn lose_bulk(&mut self, _now: Instant, id: LinkId, carrier: CarrierId) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let mut resent = 0;
        for stream in link.streams.values_mut() {
            resent += stream.tx.unsend(Some(carrier));
        }
        link.counters.resent_bytes += resent;
    }

    /// Closes a carrier without a word.
    pub(crate) fn drop_carrier(&mut self, carrier: CarrierId) {
        self.close_lane(carrier);
        self.carriers.remove(&carrier);
    }

    /// The control carrier is lost: keep DRBD's sockets, close the rest, come back.
    pub(crate) fn suspend(&mut self, now: Instant, id: LinkId, reason: &str) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let since = match link.phase {
            Phase::Suspended { since } | Phase::Resuming { since } => since,
            Phase::Live | Phase::Down => now,
        };
        let was_live = link.phase == Phase::Live;
        link.phase = Phase::Suspended { since };
        link.redial_at = now;
        link.backoff = BACKOFF_MIN;
        let mut gone: Vec<CarrierId> = link.bulk.drain(..).collect();
        gone.append(&mut link.bulk_dialing);
        gone.extend(link.control.take());
        let unfinished: Vec<u32> = link
            .streams
            .iter()
            .filter(|(_, stream)| stream.phase != StreamPhase::Open)
            .map(|(stream, _)| *stream)
            .collect();
        for carrier in gone {
            self.drop_carrier(carrier);
        }
        for stream in unfinished {
            self.reset_local(now, id, stream, "the session was interrupted while opening");
        }
        if was_live {
            self.log(Level::Warn, id, format!("session suspended: {reason}"));
        }
        self.answer_pings(now, id);
    }

    /// Ends the session and resets DRBD's sockets.
    pub(crate) fn end_session(&mut self, now: Instant, id: LinkId, reason: &str) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let had = link.session.take().is_some();
        link.phase = Phase::Down;
        link.redial_at = now;
        let mut gone: Vec<CarrierId> = link.bulk.drain(..).collect();
        gone.append(&mut link.bulk_dialing);
        gone.extend(link.control.take());
        let streams: Vec<u32> = link.streams.keys().copied().collect();
        let pre: Vec<_> = std::mem::take(&mut link.pre).into_keys().collect();
        if had {
            link.counters.sessions_dropped += 1;
        }
        for carrier in gone {
            self.drop_carrier(carrier);
        }
        for local in pre {
            self.locals.remove(&local);
            self.out
                .push_back(Output::CloseLocal(local, super::Close::Reset));
        }
        for stream in streams {
            self.reset_local(now, id, stream, reason);
        }
        if had {
            self.log(Level::Warn, id, format!("session ended: {reason}"));
        }
    }

    /// Everything about the session that depends on time.
    pub(crate) fn check_session(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let wan = link.config.options.wan_timeout;
        let hold = link.config.options.session_hold;
        let handshake = wan.max(Duration::from_secs(2)) * 2;
        if let Some(carrier) = link.dialing
            && self
                .carriers
                .get(&carrier)
                .is_some_and(|c| now.since(c.since) >= handshake)
        {
            self.close_lane(carrier);
            self.carrier_down(now, carrier, "no answer");
        }
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let stalled: Vec<CarrierId> = link
            .bulk
            .iter()
            .chain(&link.bulk_dialing)
            .filter(|carrier| {
                self.carriers.get(carrier).is_some_and(|c| match c.state {
                    CarrierState::Up => {
                        c.sent_bytes > c.peer_received && now.since(c.peer_progress) >= wan * 2
                    }
                    _ => now.since(c.since) >= handshake,
                })
            })
            .copied()
            .collect();
        for carrier in stalled {
            self.carrier_stands_still(now, carrier, wan * 2);
        }
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        match link.phase {
            Phase::Suspended { since } | Phase::Resuming { since } if now.since(since) >= hold => {
                self.end_session(now, id, "no way to the peer proxy for session-hold");
            }
            Phase::Live
                if link
                    .bulk_missing_since
                    .is_some_and(|at| now.since(at) >= hold)
                    && link.bulk.is_empty() =>
            {
                self.end_session(now, id, "no bulk carrier for session-hold");
            }
            _ => {}
        }
    }

    /// Measures rates and tells the peer what was received.
    pub(crate) fn measure(&mut self, now: Instant, id: LinkId) {
        let workers = self.workers();
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let passed = now.since(link.measured);
        if passed < MEASURE_EVERY {
            return;
        }
        link.measured = now;
        let raw_in = link.counters.raw_in_bytes - link.last_raw_in;
        link.last_raw_in = link.counters.raw_in_bytes;
        link.input_rate.sample(raw_in, passed);
        let drained = link.drained_bytes - link.last_drained;
        link.last_drained = link.drained_bytes;
        let wired = link.peer_received_bytes - link.last_peer_received;
        link.last_peer_received = link.peer_received_bytes;
        // Only a link that was busy all the time shows what it can take.
        let busy = link.phase == Phase::Live && link.unsent_bytes() > 0;
        let was_busy = link
            .busy_since
            .is_some_and(|since| now.since(since) >= passed);
        let full = busy && was_busy;
        // More than was believed is proof enough, even from a link that was not always busy; else
        // a rate once measured too low would hold reading back and never be corrected.
        if full || link.drain_rate.is_below(drained, passed) {
            link.drain_rate.sample(drained, passed);
        }
        // A line that waited for the codec shows the codec.
        let shown = full && (!link.is_starved() || link.wire_rate.get().is_none());
        if shown || link.wire_rate.is_below(wired, passed) {
            link.wire_rate.sample(wired, passed);
        }
        link.busy_since = busy.then(|| link.busy_since.unwrap_or(now));
        self.choose_codec(now, id, workers);
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let Some(control) = link.control.filter(|_| is_live(link)) else {
            return;
        };
        let carriers: Vec<(u32, u64)> = link
            .bulk
            .iter()
            .filter_map(|carrier| self.carriers.get(carrier))
            .filter(|carrier| carrier.received_bytes > 0)
            .map(|carrier| (carrier.number, carrier.received_bytes))
            .collect();
        let stats = Stats {
            decode_rate: link.decode_rate.whole(),
            free_millicores: self.free_millicores,
            carriers,
        };
        for carrier in &link.bulk {
            if let Some(entry) = self.carriers.get_mut(carrier) {
                entry.told_bytes = entry.received_bytes;
            }
        }
        if !stats.carriers.is_empty() {
            self.send(control, Frame::message(Kind::Stats, stats.encode()));
        }
    }

    fn on_stats(&mut self, now: Instant, id: LinkId, stats: &Stats) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.peer_free_millicores = stats.free_millicores;
        // Of a peer that does not say, one core is expected.
        let cores = stats.free_millicores.map_or(1.0, |free| {
            free.clamp(MILLICORES_MIN, MILLICORES_MAX) as f64 / 1e3
        });
        link.peer_decode_rate = (stats.decode_rate > 0).then_some(stats.decode_rate as f64 * cores);
        for carrier in &link.bulk {
            let Some(entry) = self.carriers.get_mut(carrier) else {
                continue;
            };
            let report = stats
                .carriers
                .iter()
                .find(|(number, _)| *number == entry.number);
            if let Some((_, received)) = report
                && *received > entry.peer_received
            {
                // A peer cannot have received what was not sent.
                let received = (*received).min(entry.sent_bytes);
                link.peer_received_bytes += received.saturating_sub(entry.peer_received);
                entry.peer_received = received;
                entry.peer_progress = now;
                if let Some((wire, _)) = entry.wire
                    && let Some(wire) = self.trunks.wires.get_mut(&wire)
                {
                    wire.progress = now;
                }
            }
        }
    }

    /// When this link must be looked at again.
    pub(crate) fn link_timeout(&self, now: Instant, link: &Link) -> Instant {
        let wan = link.config.options.wan_timeout;
        let hold = link.config.options.session_hold;
        let mut at = now.after(Duration::from_secs(60));
        if self.frozen {
            return at;
        }
        let mut by = |when: Instant| at = at.min(when);
        if link.config.dials() && link.control.is_none() && link.dialing.is_none() {
            by(link.redial_at);
        }
        let wanted = link.config.options.bulk_carriers as usize;
        if is_live(link)
            && link.session_dialer
            && link.bulk.len() + link.bulk_dialing.len() < wanted
        {
            by(link.bulk_redial_at);
        }
        for carrier in link.dialing.iter().chain(&link.bulk_dialing) {
            if let Some(entry) = self.carriers.get(carrier) {
                by(entry.since.after(wan.max(Duration::from_secs(2)) * 2));
            }
        }
        match link.phase {
            Phase::Suspended { since } | Phase::Resuming { since } => by(since.after(hold)),
            Phase::Live => {
                if let Some(since) = link.bulk_missing_since.filter(|_| link.bulk.is_empty()) {
                    by(since.after(hold));
                }
            }
            Phase::Down => {}
        }
        // Also without a stream the peer must hear of what came, or it takes the carrier for dead.
        let untold = link.bulk.iter().any(|carrier| {
            let entry = self.carriers.get(carrier);
            entry.is_some_and(|entry| entry.received_bytes > entry.told_bytes)
        });
        if link.control.is_some() && (!link.streams.is_empty() || is_live(link) && untold) {
            by(link.measured.after(MEASURE_EVERY));
        }
        for carrier in &link.bulk {
            if let Some(entry) = self.carriers.get(carrier)
                && entry.sent_bytes > entry.peer_received
            {
                by(entry.peer_progress.after(wan * 2));
            }
            if self
                .carriers
                .get(carrier)
                .is_some_and(|entry| entry.wants_write)
            {
                by(self.may_pass_at(link, WRITE_MIN));
            }
        }
        if let Some(ack_at) = link.ack_at.filter(|_| link.phase == Phase::Live) {
            by(ack_at);
        }
        if let Some(next) = self.stream_timeout(link) {
            by(next);
        }
        for stream in link.streams.values() {
            if let Some((Some(super::link::Blocked::Lag | super::link::Blocked::Share), _)) =
                stream.paused
            {
                by(now.after(Duration::from_millis(20)));
            }
        }
        at.max(Instant(now.0 + 1))
    }
}
