//! The state of one configured connection: its session with the peer proxy, its streams, its
//! rates. Only data and small questions about it; the procedures are in `session` and `flow`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::adaptive::Adaptive;
use super::config::LinkConfig;
use super::frame::CHUNK_MAX;
use super::identity::Peer;
use super::ping::PingHold;
use super::plugin::{Choice, CodecSpec};
use super::shaper::Bucket;
use super::stats::{Counters, Rate};
use super::stream::{Class, Rx, Tx};
use super::time::Instant;
use super::trunk::TrunkId;
use super::waits::Wait;
use super::{CarrierId, CarrierKind, LinkId, LocalId, WireId};

/// Frame bytes that may wait in the shell for one bulk carrier. Small, so that a choice made late
/// (codec, carrier, rate) takes effect soon.
pub(crate) const CARRIER_QUEUE: usize = 256 << 10;
/// Unacknowledged bytes of a control stream before reading stops. DRBD's control traffic is far
/// below; this only bounds abuse.
pub(crate) const CONTROL_LIMIT: u64 = 1 << 20;

/// A connection's lane on a TCP connection to the peer proxy.
#[derive(Debug)]
pub(crate) struct Carrier {
    /// `None`: accepted, and the first frame has not come.
    pub(crate) link: Option<LinkId>,
    /// Where it runs, once it does.
    pub(crate) wire: Option<(WireId, u32)>,
    pub(crate) kind: CarrierKind,
    pub(crate) number: u32,
    pub(crate) state: CarrierState,
    pub(crate) since: Instant,
    /// Who is at the other end.
    pub(crate) peer: Peer,
    /// Listening address on which it was accepted.
    pub(crate) listener: Option<std::net::SocketAddr>,
    /// Frame bytes given to the shell and not yet to the kernel.
    pub(crate) queued_bytes: usize,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    /// Of these, what the peer was told.
    pub(crate) told_bytes: u64,
    pub(crate) last_received: Instant,
    /// What the peer says it received, and when that last grew.
    pub(crate) peer_received: u64,
    pub(crate) peer_progress: Instant,
    pub(crate) wants_write: bool,
    /// When it was told that it may write again, until it asks.
    pub(crate) woken: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CarrierState {
    Dialing,
    /// HELLO or the answer to it is awaited.
    Handshake,
    Up,
}

/// What both ends remember to resume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionKey {
    pub(crate) id: [u8; 16],
    pub(crate) key: [u8; 32],
}

/// Where the session with the peer proxy stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No session.
    Down,
    /// The control carrier is there and both ends know where to go on.
    Live,
    /// The session is remembered, the control carrier is lost.
    Suspended { since: Instant },
    /// The control carrier is back; the peer's RESUME is awaited.
    Resuming { since: Instant },
}

/// A socket accepted from DRBD whose first eight bytes have not all come.
#[derive(Debug)]
pub(crate) struct Pre {
    pub(crate) since: Instant,
    pub(crate) first: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamPhase {
    /// OPEN was sent.
    Opening {
        since: Instant,
    },
    /// The peer's OPEN came; connecting to the local DRBD.
    Connecting {
        since: Instant,
    },
    Open,
}

/// Why reading from DRBD is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// `memlimit`.
    Memory,
    /// The memory that all connections share.
    Pool,
    /// `max-lag`.
    Lag,
    /// A control socket's share of a limited rate.
    Share,
}

/// One DRBD socket and its way to the other end.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) class: Class,
    pub(crate) local: LocalId,
    pub(crate) phase: StreamPhase,
    pub(crate) opened: Instant,
    pub(crate) tx: Tx,
    pub(crate) rx: Rx,
    /// The stream of the other class that belongs to the same DRBD connection.
    pub(crate) pair: Option<u32>,
    /// The other one ended; this one must end by then.
    pub(crate) end_by: Option<Instant>,
    /// The other one ended by FIN, so this one may too.
    pub(crate) end_orderly: bool,
    /// The first eight bytes that this end wrote itself and that must not be counted.
    pub(crate) uncounted: usize,
    pub(crate) local_gone: bool,
    /// For a control socket, if its pings may be answered here.
    pub(crate) ping_hold: Option<PingHold>,
    /// The shell does not read until it is told.
    pub(crate) paused: Option<(Option<Blocked>, Instant)>,
}

/// One configured connection.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) config: LinkConfig,
    pub(crate) phase: Phase,
    pub(crate) session: Option<SessionKey>,
    pub(crate) peer_codecs: u32,
    pub(crate) peer_window: u64,
    /// Bytes of each stream that the peer was told to be remembered here.
    pub(crate) history_granted: u64,
    pub(crate) control: Option<CarrierId>,
    /// A control carrier on its way, ours or accepted.
    pub(crate) dialing: Option<CarrierId>,
    pub(crate) bulk: Vec<CarrierId>,
    pub(crate) bulk_dialing: Vec<CarrierId>,
    pub(crate) redial_at: Instant,
    pub(crate) backoff: Duration,
    pub(crate) bulk_redial_at: Instant,
    pub(crate) bulk_missing_since: Option<Instant>,
    pub(crate) attach_number: u32,
    pub(crate) streams: BTreeMap<u32, Stream>,
    pub(crate) pre: BTreeMap<LocalId, Pre>,
    pub(crate) next_stream: u32,
    pub(crate) last_peer_stream: u32,
    pub(crate) bucket: Bucket,
    /// Part of the daemon's rate that it has had.
    pub(crate) served: u64,
    /// Part of its session's rate that it has had.
    pub(crate) served_in_session: u64,
    pub(crate) smooth: Bucket,
    /// What control sockets may use of a limited rate.
    pub(crate) share: Bucket,
    pub(crate) adaptive: Adaptive,
    pub(crate) running_jobs: usize,
    /// Since the last measurement: coded chunks waited for a carrier; a carrier waited for a codec.
    pub(crate) wire_bound: bool,
    pub(crate) codec_bound: bool,
    /// This end dialled the session.
    pub(crate) session_dialer: bool,
    /// The session that the peer has named for this connection, and the number of the question.
    pub(crate) redirect: Option<(TrunkId, u64)>,
    /// Sessions whose other end does not know the connection.
    pub(crate) not_at: BTreeSet<TrunkId>,
    pub(crate) ack_at: Option<Instant>,
    pub(crate) measured: Instant,
    /// Sums at the last measurement.
    pub(crate) last_raw_in: u64,
    pub(crate) last_drained: u64,
    pub(crate) last_peer_received: u64,
    pub(crate) drained_bytes: u64,
    pub(crate) peer_received_bytes: u64,
    pub(crate) busy_since: Option<Instant>,
    pub(crate) wire_rate: Rate,
    pub(crate) drain_rate: Rate,
    pub(crate) input_rate: Rate,
    pub(crate) decode_rate: Rate,
    pub(crate) peer_decode_rate: Option<f64>,
    pub(crate) peer_free_millicores: Option<u64>,
    pub(crate) rtt: Duration,
    pub(crate) held_bytes: u64,
    /// What the shell was told to read and has not brought yet.
    pub(crate) promised_bytes: u64,
    /// What sending waits for, and since when.
    pub(crate) waiting: Option<(Wait, Instant)>,
    pub(crate) last_error: String,
    pub(crate) counters: Counters,
}

impl Link {
    pub(crate) fn new(now: Instant, config: LinkConfig) -> Link {
        Link {
            bucket: Bucket::new(0),
            served: 0,
            served_in_session: 0,
            smooth: Bucket::new(0),
            share: Bucket::new(0),
            config,
            phase: Phase::Down,
            session: None,
            peer_codecs: 0,
            peer_window: 0,
            history_granted: 0,
            control: None,
            dialing: None,
            bulk: Vec::new(),
            bulk_dialing: Vec::new(),
            redial_at: now,
            backoff: Duration::from_millis(100),
            bulk_redial_at: now,
            bulk_missing_since: None,
            attach_number: 0,
            streams: BTreeMap::new(),
            pre: BTreeMap::new(),
            next_stream: 0,
            last_peer_stream: 0,
            adaptive: Adaptive::default(),
            running_jobs: 0,
            wire_bound: false,
            codec_bound: false,
            session_dialer: false,
            redirect: None,
            not_at: BTreeSet::new(),
            ack_at: None,
            measured: now,
            last_raw_in: 0,
            last_drained: 0,
            last_peer_received: 0,
            drained_bytes: 0,
            peer_received_bytes: 0,
            busy_since: None,
            wire_rate: Rate::default(),
            drain_rate: Rate::default(),
            input_rate: Rate::default(),
            decode_rate: Rate::default(),
            peer_decode_rate: None,
            peer_free_millicores: None,
            rtt: Duration::ZERO,
            held_bytes: 0,
            promised_bytes: 0,
            waiting: None,
            last_error: String::new(),
            counters: Counters::default(),
        }
    }

    /// Raw bytes of bulk streams that the peer's DRBD has not got.
    pub(crate) fn backlog_bytes(&self) -> u64 {
        self.bulk_streams()
            .map(|stream| stream.tx.backlog_bytes())
            .sum()
    }

    /// Raw bytes of bulk streams that no carrier has.
    pub(crate) fn unsent_bytes(&self) -> u64 {
        self.bulk_streams()
            .map(|stream| stream.tx.unsent_bytes)
            .sum()
    }

    /// Memory of everything that waits for the peer.
    pub(crate) fn tx_held(&self) -> u64 {
        self.streams
            .values()
            .map(|stream| stream.tx.held_bytes + stream.tx.history.held_bytes())
            .sum()
    }

    /// Memory of what waits for the local DRBD.
    pub(crate) fn rx_held(&self) -> u64 {
        self.streams
            .values()
            .map(|stream| stream.rx.held_bytes())
            .sum()
    }

    pub(crate) fn spilled_bytes(&self) -> u64 {
        self.streams
            .values()
            .map(|stream| stream.tx.spilled_bytes)
            .sum()
    }

    /// When the oldest byte was read that the peer's DRBD has not got.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.bulk_streams()
            .filter_map(|stream| stream.tx.oldest())
            .min()
    }

    /// Largest chunk: small enough for several of them in the buffer, and to pass the line in about
    /// half a second.
    pub(crate) fn chunk_limit(&self) -> usize {
        let memory = (self.config.options.memlimit_bytes / 8).max(64 << 10);
        let rate = match self.bucket.rate() {
            0 => self.wire_rate.get().map_or(u64::MAX, |rate| rate as u64),
            rate => rate,
        };
        memory.min((rate / 2).max(64 << 10)).min(CHUNK_MAX as u64) as usize
    }

    /// Expected wait of a byte that enters now, in seconds, once the drain rate is known.
    pub(crate) fn lag_seconds(&self) -> Option<f64> {
        let rate = self.drain_rate.get()?.max(1.0);
        Some(self.backlog_bytes() as f64 / rate)
    }

    /// Since the last measurement the line waited for the codec, and never the codec for the line.
    pub(crate) fn is_starved(&self) -> bool {
        self.codec_bound && !self.wire_bound
    }

    /// The codec for the next chunk, and the rung if it was chosen automatically.
    pub(crate) fn codec(&self) -> (CodecSpec, Option<usize>) {
        match self.config.options.choice() {
            Choice::Fixed(spec) => (spec, None),
            Choice::Auto { .. } => {
                let rung = self.adaptive.current();
                (Adaptive::spec(rung), Some(rung))
            }
        }
    }

    /// The word for the operator.
    pub(crate) fn state_name(&self) -> &'static str {
        let up = self
            .streams
            .values()
            .filter(|stream| stream.phase == StreamPhase::Open)
            .count();
        match self.phase {
            Phase::Down => "Connecting",
            Phase::Suspended { .. } | Phase::Resuming { .. } => "Suspended",
            Phase::Live if up >= 1 => "Connected",
            Phase::Live => "ProxyConnected",
        }
    }

    fn bulk_streams(&self) -> impl Iterator<Item = &Stream> {
        self.streams
            .values()
            .filter(|stream| stream.class != Class::Control)
    }
}

impl Stream {
    pub(crate) fn new(
        now: Instant,
        id: u32,
        class: Class,
        local: LocalId,
        phase: StreamPhase,
        grant: u64,
        history: u64,
    ) -> Stream {
        Stream {
            class,
            local,
            phase,
            opened: now,
            tx: Tx::new(0),
            rx: Rx::new(id, grant, history),
            pair: None,
            end_by: None,
            end_orderly: false,
            uncounted: 0,
            local_gone: false,
            ping_hold: None,
            paused: Some((None, now)),
        }
    }
}
