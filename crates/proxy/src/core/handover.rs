//! What one process gives another so that DRBD's sockets survive an upgrade: connections with
//! their sessions, streams, and every byte that is not yet delivered.
//!
//! The giver freezes first (carriers closed, no new jobs) and waits until no job runs. Giving
//! changes nothing, so a failed hand-over thaws and goes on. Only open streams without an end
//! under way travel, what is on disk as the descriptors of its files; the others end with the old
//! process and DRBD reconnects. The taker continues as after an interrupted line.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::{Dial, LinkConfig, LinkOptions, format_bytes};
use super::dscp::Dscp;
use super::engine::{Engine, Job};
use super::frame::Bytes;
use super::history::RxHistory;
use super::limits::{Origin, memory_needed};
use super::link::{Link, Phase, SessionKey, Stream, StreamPhase};
use super::ping::PingHold;
use super::plugin::Plugin;
use super::shaper::{Limit, Schedule};
use super::stats::Counters;
use super::stream::{Body, Chunk, Class, Coded, Rx, Stub, Tx};
use super::time::Instant;
use super::{CarrierId, LinkId, LocalId, SpillRef};

/// Form of the hand-over; a process refuses another one's.
pub(crate) const VERSION: u32 = 3;

/// A whole engine. The bytes travel behind it, in the order of the streams: for each its chunks,
/// then what its local socket has not taken, then what is remembered of what it was given.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HandedEngine {
    instance: [u8; 16],
    next_id: u64,
    pub(crate) uptime_ms: u64,
    pub(crate) links: Vec<HandedLink>,
    /// Limits of sessions that a command has set.
    #[serde(default)]
    sessions: Vec<(IpAddr, Limit)>,
}

/// One connection.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HandedLink {
    id: u32,
    name: String,
    inside: SocketAddr,
    peer_outside: SocketAddr,
    pub(crate) my_outside: SocketAddr,
    local_drbd: SocketAddr,
    options: HandedOptions,
    session: Option<([u8; 16], [u8; 32])>,
    session_dialer: bool,
    /// For how long the line had been cut.
    #[serde(default)]
    suspended_ms: u64,
    peer_codecs: u32,
    peer_window: u64,
    history_granted: u64,
    attach_number: u32,
    next_stream: u32,
    last_peer_stream: u32,
    counters: Counters,
    pub(crate) streams: Vec<HandedStream>,
}

#[derive(Debug, Serialize, Deserialize)]
struct HandedOptions {
    memlimit_bytes: u64,
    rate: Schedule,
    #[serde(default)]
    burst_bytes: u64,
    #[serde(default = "af31")]
    dscp_control: Dscp,
    #[serde(default = "af11")]
    dscp_bulk: Dscp,
    sndbuf_bytes: u64,
    rcvbuf_bytes: u64,
    wan_timeout: Duration,
    session_hold: Duration,
    max_lag: Duration,
    #[serde(default)]
    ping_hold: Duration,
    #[serde(default = "one")]
    weight: u32,
    bulk_carriers: u32,
    dial: Dial,
    plugins: Vec<String>,
    inert: Vec<(String, String)>,
}

/// The weight of a connection of a process that knew none.
fn one() -> u32 {
    1
}

/// The marks of a process that knew no others.
fn af31() -> Dscp {
    Dscp::AF31
}

fn af11() -> Dscp {
    Dscp::AF11
}

/// One DRBD socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HandedStream {
    id: u32,
    pub(crate) local: u64,
    class: u8,
    pair: Option<u32>,
    tx: HandedTx,
    /// Bytes written to the local socket, and given to it.
    delivered: u64,
    handed: u64,
    granted: u64,
    /// Bytes that later chunks may refer to; `None` if nothing is remembered.
    history: Option<u64>,
    /// Where the packets of a control socket stand whose pings may be answered here.
    #[serde(default)]
    ping_hold: Option<PingHold>,
}

#[derive(Debug, Serialize, Deserialize)]
struct HandedTx {
    delivered: u64,
    received: u64,
    window_end: u64,
    chunks: Vec<HandedChunk>,
}

#[derive(Debug, Serialize, Deserialize)]
struct HandedChunk {
    offset: u64,
    raw_len: u32,
    age_ms: u64,
    was_sent: bool,
    /// Codec and checksum of a coded chunk.
    coded: Option<(u8, u32)>,
    begins: bool,
    /// Where a coded chunk is that is on disk; no bytes of it follow.
    spilled: Option<SpillRef>,
    bytes: u32,
}

impl HandedEngine {
    /// Lengths of the pieces of bytes that follow.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = usize> {
        let streams = self.links.iter().flat_map(|link| &link.streams);
        streams.flat_map(|stream| {
            let chunks = stream.tx.chunks.iter().map(|chunk| chunk.bytes as usize);
            let history = stream.history.unwrap_or(0) as usize;
            chunks.chain([(stream.handed - stream.delivered) as usize, history])
        })
    }

    /// How many records of each segment of the spill disk are still needed.
    pub(crate) fn spilled(&self) -> BTreeMap<u32, u64> {
        let mut counts = BTreeMap::new();
        let streams = self.links.iter().flat_map(|link| &link.streams);
        for record in streams
            .flat_map(|stream| &stream.tx.chunks)
            .filter_map(|chunk| chunk.spilled)
        {
            *counts.entry(record.segment).or_insert(0) += 1;
        }
        counts
    }

    /// What each local socket has not taken yet, out of all the pieces.
    pub(crate) fn unwritten(&self, pieces: &[Bytes]) -> Result<BTreeMap<LocalId, Bytes>, String> {
        let mut pieces = pieces.iter();
        let streams = self.links.iter().flat_map(|link| &link.streams);
        streams
            .map(|stream| {
                let rest = pieces.nth(stream.tx.chunks.len());
                let rest = rest.ok_or("the hand-over has too few pieces")?;
                pieces.next();
                Ok((LocalId(stream.local), Arc::clone(rest)))
            })
            .collect()
    }
}

impl HandedLink {
    /// Its connection's configuration, checked like any other.
    pub(crate) fn config(&self) -> Result<LinkConfig, String> {
        let from = &self.options;
        let plugins = from
            .plugins
            .iter()
            .map(|text| {
                let words: Vec<&str> = text.split_whitespace().collect();
                Plugin::parse(&words).map_err(|error| error.to_string())
            })
            .collect::<Result<_, _>>()?;
        let config = LinkConfig {
            name: self.name.clone(),
            inside: self.inside,
            peer_outside: self.peer_outside,
            my_outside: self.my_outside,
            local_drbd: self.local_drbd,
            options: LinkOptions {
                memlimit_bytes: from.memlimit_bytes,
                limit: Limit {
                    rate: from.rate.clone(),
                    burst_bytes: from.burst_bytes,
                },
                dscp_control: from.dscp_control,
                dscp_bulk: from.dscp_bulk,
                sndbuf_bytes: from.sndbuf_bytes,
                rcvbuf_bytes: from.rcvbuf_bytes,
                wan_timeout: from.wan_timeout,
                session_hold: from.session_hold,
                max_lag: from.max_lag,
                ping_hold: from.ping_hold,
                weight: from.weight,
                bulk_carriers: from.bulk_carriers,
                dial: from.dial,
                plugins,
                inert: from.inert.clone(),
            },
        };
        config.check().map_err(|error| error.to_string())?;
        Ok(config)
    }

    /// The engine's number for it.
    pub(crate) fn id(&self) -> LinkId {
        LinkId(self.id)
    }
}

impl Engine {
    /// Closes all carriers and starts no more work; sockets of DRBD stay.
    pub(crate) fn freeze(&mut self, now: Instant) {
        self.frozen = true;
        let ids: Vec<LinkId> = self.links.keys().copied().collect();
        for id in ids {
            let Some(link) = self.links.get_mut(&id) else {
                continue;
            };
            if let Some(dialing) = link.dialing.take() {
                self.drop_carrier(dialing);
            }
            if self.links.get(&id).is_some_and(|l| l.session.is_some()) {
                self.suspend(now, id, "the proxy hands over to a new process");
            }
        }
        // Accepted ones that have not said for whom they are.
        let rest: Vec<CarrierId> = self.carriers.keys().copied().collect();
        for carrier in rest {
            self.drop_carrier(carrier);
        }
        self.drop_trunks();
    }

    /// Goes on after a hand-over that failed.
    pub(crate) fn thaw(&mut self, now: Instant) {
        self.frozen = false;
        let ids: Vec<LinkId> = self.links.keys().copied().collect();
        for id in ids {
            self.settle(now, id);
        }
    }

    /// Whether a job runs whose result belongs to what is handed over.
    pub(crate) fn is_busy(&self) -> bool {
        self.jobs
            .values()
            .any(|job| !matches!(job, Job::Probe { .. }))
    }

    /// Everything that can be handed over. `unwritten` gives what the local socket has not taken
    /// of what it was given.
    pub(crate) fn give(
        &self,
        now: Instant,
        unwritten: impl Fn(LocalId) -> Vec<u8>,
    ) -> (HandedEngine, Vec<Bytes>) {
        assert!(self.frozen && !self.is_busy(), "freeze and wait first");
        let mut pieces = Vec::new();
        let links = self
            .links
            .iter()
            .map(|(id, link)| give_link(now, *id, link, &unwritten, &mut pieces))
            .collect();
        let by_command = self
            .sessions
            .iter()
            .filter(|(_, session)| session.origin == Origin::Command);
        let sessions = by_command
            .map(|(peer, session)| (*peer, session.limit.clone()))
            .collect();
        let handed = HandedEngine {
            instance: self.instance,
            next_id: self.next_id,
            uptime_ms: now.since(self.started).as_millis() as u64,
            links,
            sessions,
        };
        (handed, pieces)
    }

    /// Takes over what another process gave; this engine must be fresh. On an error it is useless.
    pub(crate) fn take_over(
        &mut self,
        now: Instant,
        handed: &HandedEngine,
        pieces: Vec<Bytes>,
    ) -> Result<(), String> {
        self.check_room(handed)?;
        self.instance = handed.instance;
        self.next_id = self.next_id.max(handed.next_id);
        for (peer, limit) in &handed.sessions {
            // What this process was started with counts.
            if !self.sessions.contains_key(peer) {
                self.put_session_limit(now, *peer, limit.clone(), Origin::Command);
            }
        }
        let mut pieces = pieces.into_iter();
        for from in &handed.links {
            let id = from.id();
            let mut link = Link::new(now, from.config()?);
            link.bucket
                .set(now, &link.config.options.limit, self.wall_minute);
            link.session = from.session.map(|(id, key)| SessionKey { id, key });
            if link.session.is_some() {
                let since = now
                    .0
                    .saturating_sub(from.suspended_ms.saturating_mul(1_000_000));
                link.phase = Phase::Suspended {
                    since: Instant(since),
                };
            }
            link.session_dialer = from.session_dialer;
            link.peer_codecs = from.peer_codecs;
            link.peer_window = from.peer_window;
            link.history_granted = from.history_granted;
            link.attach_number = from.attach_number;
            link.next_stream = from.next_stream;
            link.last_peer_stream = from.last_peer_stream;
            link.counters = from.counters.clone();
            link.last_raw_in = link.counters.raw_in_bytes;
            for stream in &from.streams {
                let local = LocalId(stream.local);
                let taken = take_stream(now, stream, from.history_granted, &mut pieces)?;
                let records = stream.tx.chunks.iter().filter_map(|chunk| chunk.spilled);
                self.spill_used += records.map(SpillRef::disk_bytes).sum::<u64>();
                link.streams.insert(stream.id, taken);
                self.locals.insert(local, (id, stream.id));
            }
            self.links.insert(id, link);
            self.settle(now, id);
        }
        Ok(())
    }
}

impl Engine {
    /// Everything that is given must fit the memory of this process: bytes that DRBD believes to be
    /// on their way cannot be left out, and a limit that is broken from the start is none.
    fn check_room(&self, handed: &HandedEngine) -> Result<(), String> {
        let max = self.options.memory_max_bytes;
        let count = handed.links.len() as u64;
        let needed = memory_needed(count, self.options.memlimit_min_bytes);
        let held: u64 = handed.lengths().map(|len| len as u64).sum();
        let (most, why) = match held > needed {
            true => (held, "for what the running proxy has buffered".to_string()),
            false => (needed, format!("for {count} connections")),
        };
        if most <= max {
            return Ok(());
        }
        Err(format!(
            "memory-max {} is too small: {} are needed {why}; start with a larger --memory-max, or \
             set the running proxy's 'memory-max' and wait until its buffers have drained; it goes \
             on as before",
            format_bytes(max),
            format_bytes(most.next_multiple_of(1 << 20))
        ))
    }
}

fn give_link(
    now: Instant,
    id: LinkId,
    link: &Link,
    unwritten: &impl Fn(LocalId) -> Vec<u8>,
    pieces: &mut Vec<Bytes>,
) -> HandedLink {
    let options = &link.config.options;
    let fit = |stream: &Stream| can_travel(stream);
    let streams = link
        .streams
        .iter()
        .filter(|(_, stream)| {
            // One socket of a DRBD connection is of no use without the other.
            let pair = stream.pair.and_then(|pair| link.streams.get(&pair));
            fit(stream) && pair.is_none_or(fit)
        })
        .map(|(id, stream)| give_stream(now, *id, stream, unwritten, pieces))
        .collect();
    HandedLink {
        id: id.0,
        name: link.config.name.clone(),
        inside: link.config.inside,
        peer_outside: link.config.peer_outside,
        my_outside: link.config.my_outside,
        local_drbd: link.config.local_drbd,
        options: HandedOptions {
            memlimit_bytes: options.memlimit_bytes,
            rate: options.limit.rate.clone(),
            burst_bytes: options.limit.burst_bytes,
            dscp_control: options.dscp_control,
            dscp_bulk: options.dscp_bulk,
            sndbuf_bytes: options.sndbuf_bytes,
            rcvbuf_bytes: options.rcvbuf_bytes,
            wan_timeout: options.wan_timeout,
            session_hold: options.session_hold,
            max_lag: options.max_lag,
            ping_hold: options.ping_hold,
            weight: options.weight,
            bulk_carriers: options.bulk_carriers,
            dial: options.dial,
            plugins: options.plugins.iter().map(|p| p.text.clone()).collect(),
            inert: options.inert.clone(),
        },
        session: link.session.map(|session| (session.id, session.key)),
        session_dialer: link.session_dialer,
        suspended_ms: match link.phase {
            Phase::Suspended { since } => now.since(since).as_millis() as u64,
            Phase::Down | Phase::Live | Phase::Resuming { .. } => 0,
        },
        peer_codecs: link.peer_codecs,
        peer_window: link.peer_window,
        history_granted: link.history_granted,
        attach_number: link.attach_number,
        next_stream: link.next_stream,
        last_peer_stream: link.last_peer_stream,
        counters: link.counters.clone(),
        streams,
    }
}

fn can_travel(stream: &Stream) -> bool {
    stream.phase == StreamPhase::Open
        && stream.tx.eof.is_none()
        && stream.rx.is_contiguous_and_open()
        && stream.uncounted == 0
        && stream.end_by.is_none()
        && !stream.local_gone
        && !stream.rx.sink
}

fn give_stream(
    now: Instant,
    id: u32,
    stream: &Stream,
    unwritten: &impl Fn(LocalId) -> Vec<u8>,
    pieces: &mut Vec<Bytes>,
) -> HandedStream {
    let chunks = stream
        .tx
        .iter()
        .map(|(_, chunk)| {
            let mut spilled = None;
            let (coded, bytes) = match &chunk.body {
                Body::Raw(raw) => (None, Arc::new(raw.clone().into())),
                Body::Ready(coded) => (Some((coded.codec, coded.crc)), Arc::clone(&coded.payload)),
                Body::Spilled(record, stub) => {
                    spilled = Some(*record);
                    (Some((stub.codec, stub.crc)), Bytes::default())
                }
                other => unreachable!("no job runs and the end has not come: {other:?}"),
            };
            let given = HandedChunk {
                offset: chunk.offset,
                raw_len: chunk.raw_len,
                age_ms: now.since(chunk.born).as_millis() as u64,
                was_sent: chunk.was_sent,
                coded,
                begins: chunk.begins,
                spilled,
                bytes: bytes.len() as u32,
            };
            pieces.push(bytes);
            given
        })
        .collect();
    let rest = unwritten(stream.local);
    assert_eq!(
        rest.len() as u64,
        stream.rx.handed - stream.rx.delivered,
        "the shell counts what the engine counts"
    );
    pieces.push(Arc::new(rest.into()));
    let kept = stream.rx.history.kept();
    let history = kept.as_ref().map(|kept| kept.len() as u64);
    pieces.push(kept.unwrap_or_default());
    HandedStream {
        id,
        local: stream.local.0,
        class: stream.class.code(),
        pair: stream.pair,
        tx: HandedTx {
            delivered: stream.tx.delivered,
            received: stream.tx.received,
            window_end: stream.tx.window_end,
            chunks,
        },
        delivered: stream.rx.delivered,
        handed: stream.rx.handed,
        granted: stream.rx.granted,
        history,
        ping_hold: stream.ping_hold.clone(),
    }
}

fn take_stream(
    now: Instant,
    from: &HandedStream,
    history_granted: u64,
    pieces: &mut impl Iterator<Item = Bytes>,
) -> Result<Stream, String> {
    let class = match from.class {
        1 => Class::Bulk,
        2 => Class::Control,
        _ => Class::Unknown,
    };
    let mut chunks = Vec::new();
    for chunk in &from.tx.chunks {
        let bytes = pieces.next().ok_or("the hand-over has too few pieces")?;
        let body = match (chunk.coded, chunk.spilled) {
            (Some((codec, crc)), Some(record)) => Body::Spilled(
                record,
                Stub {
                    codec,
                    crc,
                    payload_len: record.len,
                },
            ),
            (Some((codec, crc)), None) => Body::Ready(Coded {
                codec,
                crc,
                payload: bytes,
            }),
            (None, Some(_)) => return Err("what is on disk must be coded".into()),
            (None, None) => Body::Raw(bytes.to_vec()),
        };
        chunks.push(Chunk {
            offset: chunk.offset,
            raw_len: chunk.raw_len,
            born: Instant(now.0.saturating_sub(chunk.age_ms.saturating_mul(1_000_000))),
            body,
            // Whatever carrier had it is gone; the peer's RESUME says what is missing.
            sent: chunk.was_sent.then_some(CarrierId(0)),
            was_sent: chunk.was_sent,
            begins: chunk.begins,
        });
    }
    // The shell writes these.
    pieces.next().ok_or("the hand-over has too few pieces")?;
    let kept = pieces.next().ok_or("the hand-over has too few pieces")?;
    let kept = from.history.map(|_| kept);
    let local = LocalId(from.local);
    let mut stream = Stream::new(now, from.id, class, local, StreamPhase::Open, 0, 0);
    stream.tx = Tx::taken_over(
        from.tx.delivered,
        from.tx.received,
        from.tx.window_end,
        chunks,
    )?;
    stream.rx = Rx::taken_over(from.id, from.delivered, from.handed, from.granted)?;
    stream.rx.history = RxHistory::taken_over(history_granted, kept);
    stream.pair = from.pair;
    stream.ping_hold.clone_from(&from.ping_hold);
    Ok(stream)
}
