//! Streams: opening, data in both directions, acknowledging, closing. Every
//! broken guarantee ends as a reset of the stream at both ends, never as wrong bytes.

use std::sync::Arc;
use std::time::Duration;

use super::config::LinkOptions;
use super::engine::{Engine, Job, is_live};
use super::frame::{Bytes, FLAG_BEGIN, FLAG_FIN, Frame, Header, Kind};
use super::link::{Link, Phase, Pre, Stream, StreamPhase};
use super::message::{Ack, Malformed, Open};
use super::ping::PingHold;
use super::plugin::{CODEC_HISTORY, CODEC_NONE, CODEC_ZERO};
use super::session::Violation;
use super::stats::{CodecWork, Took};
use super::stream::{Body, Class, Verdict};
use super::time::Instant;
use super::{Close, JobId, Level, LinkId, LocalId, Output, SpillRef};
use crate::codec::{DecodeError, decode};

/// DRBD's first eight bytes must come within this time.
const FIRST_BYTES: Duration = Duration::from_secs(2);
/// The peer's answer to OPEN.
const OPENING: Duration = Duration::from_secs(4);
/// The local DRBD must accept within this time.
const CONNECTING: Duration = Duration::from_secs(1);
/// When one of DRBD's two sockets ends, the other has this long.
const PAIR: Duration = Duration::from_secs(2);
/// A lone socket of a DRBD connection: three times DRBD's `connect-int`.
const LONE: Duration = Duration::from_secs(30);
/// An acknowledgement waits at most this long, and for at most so many bytes.
const ACK_DELAY: Duration = Duration::from_millis(10);
const ACK_BYTES: u64 = 64 << 10;
/// Streams of one connection, old ones that drain included.
const STREAMS_MAX: usize = 64;

/// Reasons in RST and OPEN_ERR frames.
const RST_LOCAL: u8 = 1;
const RST_PAIR: u8 = 2;
const RST_BROKEN: u8 = 3;
const RST_REFUSED: u8 = 4;
const RST_CROSSED: u8 = 5;
const RST_TIMEOUT: u8 = 6;

fn reason_text(code: u8) -> &'static str {
    match code {
        RST_LOCAL => "DRBD's socket at the other end was reset",
        RST_PAIR => "the other socket of the DRBD connection ended",
        RST_BROKEN => "the stream was damaged on the way",
        RST_REFUSED => "DRBD at the other end does not accept the connection",
        RST_CROSSED => "both ends opened at once",
        RST_TIMEOUT => "timeout",
        _ => "unknown reason",
    }
}

/// Only where it was asked for, and never for data.
fn held_pings(options: &LinkOptions, class: Class) -> Option<PingHold> {
    (class == Class::Control && !options.ping_hold.is_zero()).then(PingHold::default)
}

impl Engine {
    pub(crate) fn local_accepted(&mut self, now: Instant, id: LinkId, local: LocalId) {
        let Some(link) = self.links.get_mut(&id) else {
            self.out.push_back(Output::CloseLocal(local, Close::Reset));
            return;
        };
        if !is_live(link) || link.streams.len() + link.pre.len() >= STREAMS_MAX {
            // DRBD must learn at once that nobody is at the other end, or it would believe in a
            // connection that is none.
            link.counters.opens_refused += 1;
            if link.dialing.is_none() {
                link.redial_at = link.redial_at.min(now);
            }
            self.out.push_back(Output::CloseLocal(local, Close::Reset));
        } else {
            link.pre.insert(
                local,
                Pre {
                    since: now,
                    first: Vec::new(),
                },
            );
            self.locals.insert(local, (id, 0));
            self.out.push_back(Output::WantRead(local));
        }
        self.settle(now, id);
    }

    pub(crate) fn local_data(&mut self, now: Instant, local: LocalId, data: Vec<u8>) {
        let Some((id, stream_id)) = self.locals.get(&local).copied() else {
            return;
        };
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let limit = link.chunk_limit();
        if stream_id == 0 {
            let Some(pre) = link.pre.get_mut(&local) else {
                return;
            };
            pre.first.extend_from_slice(&data);
            if let Ok(first) = <[u8; 8]>::try_from(pre.first.as_slice()) {
                link.pre.remove(&local);
                self.open(now, id, local, first);
            }
        } else if let Some(stream) = link.streams.get_mut(&stream_id)
            && !data.is_empty()
            && stream.tx.eof.is_none()
        {
            link.counters.raw_in_bytes += data.len() as u64;
            if stream.class == Class::Control {
                link.counters.control_raw_in_bytes += data.len() as u64;
                link.share.charge(data.len());
            }
            link.smooth.charge(data.len());
            if let Some(hold) = &mut stream.ping_hold {
                hold.sent(&data);
            }
            stream.tx.push(now, data, limit);
            self.answer_pings(now, id);
        }
        self.settle(now, id);
    }

    fn open(&mut self, now: Instant, id: LinkId, local: LocalId, first: [u8; 8]) {
        let grant = self.window();
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let class = Class::of(&first);
        let Some(control) = link.control.filter(|_| link.phase == Phase::Live) else {
            self.locals.remove(&local);
            self.out.push_back(Output::CloseLocal(local, Close::Reset));
            return;
        };
        let stream_id = link.next_stream;
        link.next_stream += 2;
        let phase = StreamPhase::Opening { since: now };
        let history = link.history_granted;
        let stream = Stream::new(now, stream_id, class, local, phase, grant, history);
        link.streams.insert(stream_id, stream);
        self.locals.insert(local, (id, stream_id));
        let open = Open {
            class: class.code(),
            first,
            window_end: grant,
        };
        let mut frame = Frame::message(Kind::Open, open.encode());
        frame.header.stream = stream_id;
        self.send(control, frame);
    }

    pub(crate) fn on_open(
        &mut self,
        now: Instant,
        id: LinkId,
        frame: &Frame,
    ) -> Result<(), Violation> {
        let open = Open::decode(&frame.payload)?;
        let stream_id = frame.header.stream;
        let grant = self.window();
        let Some(link) = self.links.get_mut(&id) else {
            return Ok(());
        };
        if !is_live(link) {
            return Ok(());
        }
        let foreign = stream_id % 2 != link.next_stream % 2;
        if stream_id == 0 || !foreign || stream_id <= link.last_peer_stream {
            return Err(Malformed("OPEN").into());
        }
        link.last_peer_stream = stream_id;
        let class = Class::of(&open.first);
        let crossing: Vec<u32> = link
            .streams
            .iter()
            .filter(|(_, stream)| {
                stream.class == class
                    && class != Class::Unknown
                    && matches!(stream.phase, StreamPhase::Opening { .. })
            })
            .map(|(stream, _)| *stream)
            .collect();
        let own_wins = link.next_stream % 2 == 1;
        if link.streams.len() >= STREAMS_MAX {
            self.answer(id, Kind::OpenErr, stream_id, RST_REFUSED, 0);
            return Ok(());
        }
        if !crossing.is_empty() && own_wins {
            self.answer(id, Kind::OpenErr, stream_id, RST_CROSSED, 0);
            return Ok(());
        }
        for own in crossing {
            self.reset_both(now, id, own, RST_CROSSED);
        }
        let local = LocalId(self.fresh());
        let history = self.links.get(&id).map_or(0, |link| link.history_granted);
        let phase = StreamPhase::Connecting { since: now };
        let mut stream = Stream::new(now, stream_id, class, local, phase, grant, history);
        stream.tx.window_end = open.window_end;
        stream.uncounted = open.first.len();
        if let Some(link) = self.links.get_mut(&id) {
            link.streams.insert(stream_id, stream);
        }
        self.locals.insert(local, (id, stream_id));
        self.out.push_back(Output::ConnectLocal { local, link: id });
        // Written as soon as the socket is there.
        self.out.push_back(Output::WriteLocal(
            local,
            Arc::new(open.first.to_vec().into()),
        ));
        Ok(())
    }

    pub(crate) fn local_connected(&mut self, now: Instant, local: LocalId) {
        let Some((id, stream_id)) = self.locals.get(&local).copied() else {
            return;
        };
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return;
        };
        if !matches!(stream.phase, StreamPhase::Connecting { .. }) {
            return;
        }
        stream.phase = StreamPhase::Open;
        stream.opened = now;
        stream.ping_hold = held_pings(&link.config.options, stream.class);
        link.counters.streams_opened += 1;
        let grant = stream.rx.granted;
        pair_up(link, stream_id);
        self.answer(id, Kind::OpenOk, stream_id, 0, grant);
        self.out.push_back(Output::WantRead(local));
        self.settle(now, id);
    }

    pub(crate) fn on_open_ok(&mut self, now: Instant, id: LinkId, frame: &Frame) {
        let stream_id = frame.header.stream;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            // Given up meanwhile; the RST is on its way.
            return;
        };
        if !matches!(stream.phase, StreamPhase::Opening { .. }) {
            return;
        }
        stream.phase = StreamPhase::Open;
        stream.opened = now;
        stream.ping_hold = held_pings(&link.config.options, stream.class);
        stream.tx.window_end = frame.header.offset;
        let local = stream.local;
        link.counters.streams_opened += 1;
        pair_up(link, stream_id);
        self.out.push_back(Output::WantRead(local));
    }

    pub(crate) fn on_open_err(&mut self, now: Instant, id: LinkId, frame: &Frame) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.counters.opens_refused += 1;
        link.last_error = reason_text(frame.header.code).into();
        self.reset_local(now, id, frame.header.stream, reason_text(frame.header.code));
    }

    pub(crate) fn on_rst(&mut self, now: Instant, id: LinkId, frame: &Frame) {
        let (stream_id, code) = (frame.header.stream, frame.header.code);
        let orderly = code == RST_PAIR && frame.header.flags & FLAG_FIN != 0;
        let Some(link) = self.links.get(&id) else {
            return;
        };
        if !link.streams.contains_key(&stream_id) {
            return;
        }
        if code == RST_BROKEN {
            self.log(
                Level::Error,
                id,
                format!("stream {stream_id}: {}", reason_text(code)),
            );
        }
        let how = if orderly {
            Close::Orderly
        } else {
            Close::Reset
        };
        self.remove_stream(now, id, stream_id, how);
    }

    pub(crate) fn local_eof(&mut self, now: Instant, local: LocalId) {
        let Some((id, stream_id)) = self.locals.get(&local).copied() else {
            return;
        };
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if stream_id == 0 {
            link.pre.remove(&local);
            self.locals.remove(&local);
            self.out
                .push_back(Output::CloseLocal(local, Close::Orderly));
        } else if let Some(stream) = link.streams.get_mut(&stream_id) {
            stream.tx.push_fin(now);
            stream.paused = None;
        }
        self.settle(now, id);
    }

    pub(crate) fn local_failed(&mut self, now: Instant, local: LocalId, reason: &str) {
        let Some((id, stream_id)) = self.locals.get(&local).copied() else {
            return;
        };
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if stream_id == 0 {
            link.pre.remove(&local);
            self.locals.remove(&local);
            return;
        }
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return;
        };
        match stream.phase {
            StreamPhase::Connecting { .. } => {
                link.counters.opens_refused += 1;
                let text = format!("local DRBD {}: {reason}", link.config.local_drbd);
                link.last_error = text;
                self.answer(id, Kind::OpenErr, stream_id, RST_REFUSED, 0);
                self.remove_stream(now, id, stream_id, Close::Reset);
            }
            StreamPhase::Open if stream.tx.eof.is_some() => {
                // It sent everything and left: its bytes still go to the peer, what comes for it
                // is dropped.
                stream.local_gone = true;
                stream.rx.sink = true;
                stream.rx.written(u64::MAX / 2);
                self.deliver(now, id, stream_id);
            }
            StreamPhase::Open | StreamPhase::Opening { .. } => {
                self.reset_both(now, id, stream_id, RST_LOCAL);
            }
        }
        self.settle(now, id);
    }

    pub(crate) fn local_written(&mut self, now: Instant, local: LocalId, bytes: usize) {
        let Some((id, stream_id)) = self.locals.get(&local).copied() else {
            return;
        };
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return;
        };
        let skip = stream.uncounted.min(bytes);
        stream.uncounted -= skip;
        stream.rx.written((bytes - skip) as u64);
        link.counters.raw_out_bytes += (bytes - skip) as u64;
        if stream.class == Class::Control {
            link.counters.control_raw_out_bytes += (bytes - skip) as u64;
        }
        self.deliver(now, id, stream_id);
        self.settle(now, id);
    }

    pub(crate) fn on_data(&mut self, now: Instant, id: LinkId, frame: Frame) {
        let header = frame.header;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(stream) = link.streams.get_mut(&header.stream) else {
            return;
        };
        // Bulk data may overtake the OPEN_OK on the control carrier; none can come before OPEN.
        if matches!(stream.phase, StreamPhase::Connecting { .. }) {
            return;
        }
        if header.flags & !(FLAG_FIN | FLAG_BEGIN) != 0 {
            self.break_stream(now, id, header.stream, "unknown flag");
            return;
        }
        let fin = header.flags & FLAG_FIN != 0;
        match stream.rx.offer(header.offset, header.raw_len, fin) {
            Verdict::Broken(why) => {
                self.break_stream(now, id, header.stream, why);
                return;
            }
            Verdict::Duplicate => {
                link.counters.duplicate_chunks += 1;
                // The acknowledgement may have been lost with a carrier.
                link.ack_at.get_or_insert(now.after(ACK_DELAY));
                return;
            }
            Verdict::New => {}
        }
        link.ack_at.get_or_insert(now.after(ACK_DELAY));
        if header.raw_len > 0 {
            if let Some(count) = link
                .counters
                .received_by_codec
                .get_mut(usize::from(header.code))
            {
                *count += 1;
            }
            if header.flags & FLAG_BEGIN != 0 {
                stream.rx.begin_history(header.offset);
            }
            if header.code == CODEC_HISTORY {
                stream.rx.wait(header.offset, header.raw_crc, frame.payload);
                self.deliver(now, id, header.stream);
                return;
            }
            if matches!(header.code, CODEC_NONE | CODEC_ZERO) {
                let raw_len = header.raw_len as usize;
                let result = decode(
                    header.code,
                    raw_len,
                    header.raw_crc,
                    &frame.payload,
                    &Vec::new(),
                );
                self.fill(now, id, header.stream, header.offset, result);
                return;
            }
            let job = Job::Decode {
                link: id,
                stream: header.stream,
                offset: header.offset,
                codec: header.code,
            };
            let job = self.new_job(job);
            self.out.push_back(Output::Decode {
                job,
                codec: header.code,
                raw_len: header.raw_len,
                crc: header.raw_crc,
                payload: frame.payload,
                prefix: Vec::new(),
            });
        }
        self.deliver(now, id, header.stream);
    }

    pub(crate) fn decoded(
        &mut self,
        now: Instant,
        job: JobId,
        result: Result<Bytes, DecodeError>,
        took: Took,
    ) {
        let Some(Job::Decode {
            link: id,
            stream,
            offset,
            codec,
        }) = self.jobs.remove(&job)
        else {
            return;
        };
        if let Some(link) = self.links.get_mut(&id) {
            let class = link.streams.get(&stream).map(|stream| stream.class);
            let cpu = &mut link.counters.codec_cpu_us;
            let class = class.unwrap_or(Class::Unknown);
            cpu.add(CodecWork::Decode, class, codec, took.cpu);
            if let Ok(raw) = &result
                && raw.len() >= ACK_BYTES as usize
            {
                link.decode_rate
                    .sample(raw.len() as u64, took.cpu.max(Duration::from_micros(1)));
            }
        }
        self.fill(now, id, stream, offset, result);
        self.settle(now, id);
    }

    fn fill(
        &mut self,
        now: Instant,
        id: LinkId,
        stream_id: u32,
        offset: u64,
        result: Result<Bytes, DecodeError>,
    ) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return;
        };
        match result {
            Ok(raw) => {
                stream.rx.fill(offset, raw);
                self.deliver(now, id, stream_id);
            }
            Err(error) => {
                link.counters.checksum_errors += 1;
                self.break_stream(now, id, stream_id, &error.to_string());
            }
        }
    }

    /// Hands what is in order to the local socket.
    fn deliver(&mut self, now: Instant, id: LinkId, stream_id: u32) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return;
        };
        while let Some(raw) = stream.rx.take() {
            if let Some(hold) = &mut stream.ping_hold {
                hold.given(&raw);
            }
            if stream.rx.sink {
                stream.rx.written(raw.len() as u64);
            } else {
                self.out.push_back(Output::WriteLocal(stream.local, raw));
            }
        }
        if stream.rx.take_fin() && !stream.local_gone {
            self.out.push_back(Output::ShutdownLocal(stream.local));
        }
        link.ack_at.get_or_insert(now.after(ACK_DELAY));
        let Some(due) = stream.rx.take_due() else {
            return;
        };
        let Some(prefix) = due.prefix else {
            let why = "a chunk refers to more history than was granted";
            self.break_stream(now, id, stream_id, why);
            return;
        };
        let job = self.new_job(Job::Decode {
            link: id,
            stream: stream_id,
            offset: due.offset,
            codec: CODEC_HISTORY,
        });
        self.out.push_back(Output::Decode {
            job,
            codec: CODEC_HISTORY,
            raw_len: due.raw_len,
            crc: due.crc,
            payload: due.payload,
            prefix,
        });
    }

    /// While the line is cut, and not for longer than was allowed.
    pub(crate) fn answer_pings(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let (Phase::Suspended { since } | Phase::Resuming { since }) = link.phase else {
            return;
        };
        if now.since(since) >= link.config.options.ping_hold {
            return;
        }
        for stream in link.streams.values_mut() {
            let answers = stream.ping_hold.as_mut().and_then(PingHold::answers);
            if let Some(answers) = answers.filter(|_| !stream.local_gone) {
                link.counters.pings_answered += 1;
                stream.uncounted += answers.len();
                self.out
                    .push_back(Output::WriteLocal(stream.local, Arc::new(answers.into())));
            }
        }
    }

    pub(crate) fn on_ack(&mut self, now: Instant, id: LinkId, ack: &Ack) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(stream) = link.streams.get_mut(&ack.stream) else {
            return;
        };
        let before = stream.tx.backlog_bytes();
        match stream.tx.acked(ack) {
            Ok((free, born)) => {
                let drained = before - stream.tx.backlog_bytes();
                if stream.class != Class::Control {
                    link.drained_bytes += drained;
                } else if let Some(born) = born {
                    // The acknowledgement is sent at once and takes half a round trip back.
                    let way = now.since(born).saturating_sub(link.rtt / 2);
                    link.counters.control_latency.sample(way);
                }
                for spill in free {
                    self.free_spill(spill);
                }
                self.finish(now, id, ack.stream);
            }
            Err(_) => self.break_stream(now, id, ack.stream, "impossible acknowledgement"),
        }
    }

    /// After a resumption the peer does not list this stream.
    pub(crate) fn absent_at_peer(&mut self, now: Instant, id: LinkId, stream_id: u32) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let done = link
            .streams
            .get(&stream_id)
            .is_some_and(|stream| stream.rx.fin_delivered);
        // The peer had finished with it; only its last acknowledgement was lost.
        let how = if done { Close::Orderly } else { Close::Reset };
        self.remove_stream(now, id, stream_id, how);
    }

    /// Resets the DRBD socket here; the peer learns of it otherwise.
    pub(crate) fn reset_local(&mut self, now: Instant, id: LinkId, stream_id: u32, reason: &str) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if link.streams.contains_key(&stream_id) {
            link.counters.streams_reset += 1;
            self.log(
                Level::Info,
                id,
                format!("stream {stream_id} reset: {reason}"),
            );
            self.remove_stream(now, id, stream_id, Close::Reset);
        }
    }

    fn reset_both(&mut self, now: Instant, id: LinkId, stream_id: u32, code: u8) {
        self.answer(id, Kind::Rst, stream_id, code, 0);
        let reason = if code == RST_LOCAL {
            "DRBD's socket failed"
        } else {
            reason_text(code)
        };
        self.reset_local(now, id, stream_id, reason);
    }

    /// A guarantee is broken: never deliver another byte of this stream.
    pub(super) fn break_stream(&mut self, now: Instant, id: LinkId, stream_id: u32, why: &str) {
        if let Some(link) = self.links.get_mut(&id) {
            link.counters.protocol_errors += 1;
        }
        self.log(
            Level::Error,
            id,
            format!("stream {stream_id}: {why}; DRBD's sockets are reset"),
        );
        self.reset_both(now, id, stream_id, RST_BROKEN);
    }

    fn answer(&mut self, id: LinkId, kind: Kind, stream: u32, code: u8, offset: u64) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let Some(control) = link.control.filter(|_| is_live(link)) else {
            return;
        };
        let header = Header {
            stream,
            code,
            offset,
            ..Header::session(kind)
        };
        self.send(
            control,
            Frame {
                header,
                payload: Bytes::default(),
            },
        );
    }

    fn remove_stream(&mut self, now: Instant, id: LinkId, stream_id: u32, how: Close) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(stream) = link.streams.remove(&stream_id) else {
            return;
        };
        self.locals.remove(&stream.local);
        let patience = PAIR.max(link.rtt * 4);
        if let Some(other) = stream.pair.and_then(|pair| link.streams.get_mut(&pair)) {
            other.end_by.get_or_insert(now.after(patience));
            other.end_orderly = how == Close::Orderly;
        }
        let spills: Vec<SpillRef> = stream
            .tx
            .iter()
            .filter_map(|(_, chunk)| match &chunk.body {
                Body::Spilled(spill, _) | Body::SpillIn(spill, _) => Some(*spill),
                _ => None,
            })
            .collect();
        if !stream.local_gone {
            self.out.push_back(Output::CloseLocal(stream.local, how));
        }
        for spill in spills {
            self.free_spill(spill);
        }
    }

    /// Both directions are through: forget the stream.
    fn finish(&mut self, now: Instant, id: LinkId, stream_id: u32) {
        let window = self.window();
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return;
        };
        if !stream.tx.finished() || !stream.rx.fin_delivered || link.phase != Phase::Live {
            return;
        }
        let ack = stream.rx.report(stream_id, window);
        if let Some(control) = link.control
            && ack != stream.rx.acked
        {
            self.send(control, Frame::message(Kind::Ack, Ack::encode_list(&[ack])));
        }
        self.remove_stream(now, id, stream_id, Close::Orderly);
    }

    /// Sends acknowledgements that are due.
    pub(crate) fn flush_acks(&mut self, now: Instant, id: LinkId) {
        let window = self.window();
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(control) = link.control.filter(|_| link.phase == Phase::Live) else {
            return;
        };
        let Some(ack_at) = link.ack_at else { return };
        let urgent = link.streams.values().any(|stream| {
            let new = stream.rx.delivered - stream.rx.acked.delivered.min(stream.rx.delivered);
            new >= ACK_BYTES
                || new > 0 && stream.class == Class::Control
                || stream.rx.fin_delivered && stream.rx.acked.delivered <= stream.rx.delivered
        });
        if !urgent && now < ack_at {
            return;
        }
        link.ack_at = None;
        let mut list = Vec::new();
        for (stream_id, stream) in &mut link.streams {
            if stream.phase == StreamPhase::Open {
                let ack = stream.rx.report(*stream_id, window);
                if ack != stream.rx.acked {
                    stream.rx.acked = ack;
                    list.push(ack);
                }
            }
        }
        let done: Vec<u32> = list.iter().map(|ack| ack.stream).collect();
        if !list.is_empty() {
            self.send(control, Frame::message(Kind::Ack, Ack::encode_list(&list)));
        }
        for stream_id in done {
            self.finish(now, id, stream_id);
        }
    }

    /// Everything about streams that depends on time.
    pub(crate) fn check_streams(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let live = is_live(link);
        let late: Vec<LocalId> = link
            .pre
            .iter()
            .filter(|(_, pre)| now.since(pre.since) >= FIRST_BYTES)
            .map(|(local, _)| *local)
            .collect();
        for local in late {
            link.pre.remove(&local);
            self.locals.remove(&local);
            self.out.push_back(Output::CloseLocal(local, Close::Reset));
        }
        let due: Vec<(u32, bool)> = link
            .streams
            .iter()
            .filter(|(_, stream)| deadline(stream, live).is_some_and(|at| at <= now))
            .map(|(stream_id, stream)| (*stream_id, stream.end_by.is_some_and(|at| at <= now)))
            .collect();
        for (stream_id, pair_ended) in due {
            if !pair_ended {
                if let Some(link) = self.links.get(&id)
                    && let Some(stream) = link.streams.get(&stream_id)
                    && matches!(stream.phase, StreamPhase::Connecting { .. })
                {
                    self.answer(id, Kind::OpenErr, stream_id, RST_TIMEOUT, 0);
                }
                self.reset_both(now, id, stream_id, RST_TIMEOUT);
                continue;
            }
            let orderly = self
                .links
                .get(&id)
                .and_then(|link| link.streams.get(&stream_id))
                .is_some_and(|stream| stream.end_orderly);
            if let Some(control) = self.links.get(&id).and_then(|link| link.control) {
                let flags = if orderly { FLAG_FIN } else { 0 };
                let header = Header {
                    stream: stream_id,
                    code: RST_PAIR,
                    flags,
                    ..Header::session(Kind::Rst)
                };
                self.send(
                    control,
                    Frame {
                        header,
                        payload: Bytes::default(),
                    },
                );
            }
            let how = if orderly {
                Close::Orderly
            } else {
                Close::Reset
            };
            self.remove_stream(now, id, stream_id, how);
        }
    }

    /// When `check_streams` or a held-back FIN is due.
    pub(crate) fn stream_timeout(&self, link: &Link) -> Option<Instant> {
        let live = is_live(link);
        let pre = link.pre.values().map(|pre| pre.since.after(FIRST_BYTES));
        let streams = link
            .streams
            .values()
            .filter_map(|stream| deadline(stream, live));
        let fins = link.streams.values().filter_map(|stream| {
            let partner = stream.pair.and_then(|pair| link.streams.get(&pair))?;
            let eof = stream.tx.eof.filter(|_| stream.class == Class::Control)?;
            (partner.tx.eof.is_none() && stream.tx.unsent_fin()).then(|| eof.after(PAIR))
        });
        pre.chain(streams).chain(fins).min()
    }

    pub(super) fn stream_mut(&mut self, id: LinkId, stream_id: u32) -> Option<&mut Stream> {
        self.links.get_mut(&id)?.streams.get_mut(&stream_id)
    }
}

/// DRBD's two sockets of one connection find each other.
fn pair_up(link: &mut Link, stream_id: u32) {
    let Some(class) = link.streams.get(&stream_id).map(|stream| stream.class) else {
        return;
    };
    let wanted = match class {
        Class::Bulk => Class::Control,
        Class::Control => Class::Bulk,
        Class::Unknown => return,
    };
    let partner = link
        .streams
        .iter()
        .filter(|(_, other)| {
            other.class == wanted
                && other.pair.is_none()
                && other.phase == StreamPhase::Open
                && other.tx.eof.is_none()
        })
        .max_by_key(|(_, other)| other.opened)
        .map(|(partner, _)| *partner);
    if let Some(partner) = partner {
        // DRBD is connected through: what was in the way before is over.
        link.last_error.clear();
        if let Some(stream) = link.streams.get_mut(&stream_id) {
            stream.pair = Some(partner);
        }
        if let Some(stream) = link.streams.get_mut(&partner) {
            stream.pair = Some(stream_id);
        }
    }
}

/// Whether the end of a control stream must wait: DRBD treats a closed control socket as a network
/// failure, so the data before it go first.
pub(super) fn fin_held(now: Instant, link: &Link, stream_id: u32) -> bool {
    let Some(stream) = link.streams.get(&stream_id) else {
        return false;
    };
    let Some(eof) = stream.tx.eof else {
        return false;
    };
    let Some(partner) = stream.pair.and_then(|pair| link.streams.get(&pair)) else {
        return false;
    };
    match partner.tx.eof {
        Some(_) => !partner.tx.finished(),
        None => now.since(eof) < PAIR,
    }
}

/// When a stream must be looked at.
fn deadline(stream: &Stream, live: bool) -> Option<Instant> {
    let own = match stream.phase {
        StreamPhase::Opening { since } => Some(since.after(OPENING)),
        StreamPhase::Connecting { since } => Some(since.after(CONNECTING)),
        StreamPhase::Open => {
            let lone = stream.pair.is_none() && stream.class != Class::Unknown;
            (lone && live && stream.tx.eof.is_none() && !stream.rx.fin_delivered)
                .then(|| stream.opened.after(LONE))
        }
    };
    let pair = stream.end_by.filter(|_| live);
    [own, pair].into_iter().flatten().min()
}
