//! What happens to bytes that wait for the peer: coding by the pool, choice of carrier, spilling to
//! disk and reading back, and the codec decision.

use std::sync::Arc;
use std::time::Duration;

use super::adaptive::{Adaptive, Conditions};
use super::engine::{Engine, Job, SPILL_HEAD, is_live};
use super::flow::fin_held;
use super::frame::{Bytes, CHUNK_MAX, FLAG_BEGIN, FLAG_FIN, Frame, Header, Kind};
use super::history::{HISTORY_MIN, Prefix, granted};
use super::link::{CARRIER_QUEUE, Link, StreamPhase};
use super::plugin::{CODEC_NONE, Choice, CodecSpec};
use super::stats::{CodecWork, Took};
use super::stream::{Body, Class, Coded, Stub};
use super::time::Instant;
use super::{CarrierId, JobId, Level, LinkId, Output, SpillRef};
use crate::codec::{CODEC_MIN, Encoded, encode};

/// Chunks beyond the first unsent one that may overtake it or be prepared.
const LOOKAHEAD: usize = 32;
/// Chunks that may be read back ahead of the line; their bytes are bounded by the head.
const READ_AHEAD: usize = 64;
/// Spill writes under way at once.
const SPILLS_MAX: usize = 8;
/// How long the disk is left alone after an error.
const SPILL_REST: Duration = Duration::from_secs(10);

/// Raw bytes at the front of a queue that stay in memory, or come back to it.
fn spill_head(link: &Link) -> u64 {
    SPILL_HEAD.min(link.config.options.memlimit_bytes / 4)
}

impl Engine {
    /// Moves a link's bytes on: code, send, spill.
    pub(crate) fn pump(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get(&id).filter(|_| !self.frozen) else {
            return;
        };
        let live = is_live(link);
        let (mut control, mut bulk) = (Vec::new(), Vec::new());
        for (stream_id, stream) in &link.streams {
            if stream.phase == StreamPhase::Open {
                let list = if stream.class == Class::Control {
                    &mut control
                } else {
                    &mut bulk
                };
                list.push(*stream_id);
            }
        }
        if live {
            for stream_id in control {
                self.pump_control(now, id, stream_id);
            }
        }
        for stream_id in &bulk {
            if live {
                self.pump_bulk(id, *stream_id);
                self.read_ahead(id, *stream_id);
            }
            self.code_ahead(id, *stream_id);
            self.spill_some(now, id, *stream_id);
        }
    }

    fn pump_control(&mut self, now: Instant, id: LinkId, stream_id: u32) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(carrier) = link.control else { return };
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return;
        };
        let unsent = stream.tx.unsent(usize::MAX);
        let hold = fin_held(now, link, stream_id);
        for seq in unsent {
            let Some(stream) = self
                .links
                .get_mut(&id)
                .and_then(|l| l.streams.get_mut(&stream_id))
            else {
                return;
            };
            if let Some(raw) = stream.tx.take_raw(seq) {
                let crc = crc32c::crc32c(&raw);
                let coded = Coded {
                    codec: CODEC_NONE,
                    crc,
                    payload: raw,
                };
                stream.tx.set_body(seq, Body::Ready(coded));
                if let Some(link) = self.links.get_mut(&id) {
                    link.counters.chunks_by_codec[usize::from(CODEC_NONE)] += 1;
                }
            }
            let Some(stream) = self.stream_mut(id, stream_id) else {
                return;
            };
            let is_fin = stream
                .tx
                .chunk(seq)
                .is_some_and(|c| matches!(c.body, Body::Fin));
            if is_fin && hold || !self.send_chunk(id, stream_id, seq, carrier) {
                return;
            }
        }
    }

    fn pump_bulk(&mut self, id: LinkId, stream_id: u32) {
        loop {
            let Some(link) = self.links.get_mut(&id) else {
                return;
            };
            let Some(stream) = link.streams.get_mut(&stream_id) else {
                return;
            };
            let unsent = stream.tx.unsent(LOOKAHEAD);
            let Some(first) = unsent.first().copied() else {
                return;
            };
            let free = link
                .bulk
                .iter()
                .filter_map(|carrier| Some((self.carriers.get(carrier)?.queued_bytes, *carrier)))
                .filter(|(queued, _)| *queued < CARRIER_QUEUE)
                .min();
            let Some((_, carrier)) = free else {
                if link.streams.get(&stream_id).is_some_and(|stream| {
                    stream
                        .tx
                        .chunk(first)
                        .is_some_and(|c| matches!(c.body, Body::Ready(_)))
                }) {
                    link.wire_bound = true;
                }
                return;
            };
            let mut sent = false;
            for seq in unsent {
                if self.prepare(id, stream_id, seq, seq == first)
                    && self.send_chunk(id, stream_id, seq, carrier)
                {
                    sent = true;
                    break;
                }
            }
            if !sent {
                if let Some(link) = self.links.get_mut(&id) {
                    let coding = link.streams.get(&stream_id).is_some_and(|stream| {
                        stream.tx.chunk(first).is_some_and(|chunk| {
                            matches!(chunk.body, Body::Encoding | Body::Raw(_))
                        })
                    });
                    link.codec_bound |= coding && link.unsent_bytes() > 2 * CHUNK_MAX as u64;
                }
                return;
            }
        }
    }

    /// Makes a chunk ready for sending if that needs no waiting; else starts what is needed.
    fn prepare(&mut self, id: LinkId, stream_id: u32, seq: u64, first: bool) -> bool {
        let Some(link) = self.links.get_mut(&id) else {
            return false;
        };
        let limit = link.chunk_limit();
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return false;
        };
        let window_end = stream.tx.window_end;
        let growing = stream
            .tx
            .next_raw(limit)
            .is_some_and(|(raw, grows)| raw == seq && grows);
        let Some(chunk) = stream.tx.chunk(seq) else {
            return false;
        };
        if chunk.offset + u64::from(chunk.raw_len) > window_end {
            return false;
        }
        match &chunk.body {
            Body::Ready(_) | Body::SpillOut(..) | Body::Fin => true,
            // From the disk it comes by `read_ahead`.
            Body::Encoding | Body::SpillIn(..) | Body::Spilled(..) => false,
            Body::Raw(_) => {
                // The last chunk may still grow while others are ahead of it.
                if growing && !first {
                    return false;
                }
                self.encode_chunk(id, stream_id, seq)
            }
        }
    }

    /// Codes a raw chunk: at once where that costs nothing, else by a worker. True: it is ready.
    fn encode_chunk(&mut self, id: LinkId, stream_id: u32, seq: u64) -> bool {
        let (jobs_max, running) = (self.options.jobs_max, self.running);
        let Some(link) = self.links.get_mut(&id) else {
            return false;
        };
        let (mut spec, rung) = link.codec();
        if link.peer_codecs >> spec.code() & 1 == 0 {
            spec = CodecSpec::None;
        }
        // Within what the peer remembers, and within a quarter of the buffer's limit.
        let mut history = 0;
        if let CodecSpec::History { level, bytes } = spec {
            let quarter = link.config.options.memlimit_bytes / 4;
            history = bytes.min(granted(link.peer_codecs)).min(quarter);
            if history < HISTORY_MIN {
                history = 0;
                spec = CodecSpec::Zstd { level };
            }
        }
        let mut contexts = usize::MAX;
        if let CodecSpec::Lzma(lzma) = &spec {
            if lzma.contexts > 0 {
                contexts = lzma.contexts as usize;
            }
            if lzma.fallback_to_zlib && link.unsent_bytes() > 8 * CHUNK_MAX as u64 {
                spec = CodecSpec::Zlib { level: 6 };
            }
        }
        let busy = running >= jobs_max || link.running_jobs >= contexts;
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return false;
        };
        if history == 0 && stream.tx.history.is_active() {
            stream.tx.history.clear();
        }
        let Some(chunk) = stream.tx.chunk(seq) else {
            return false;
        };
        let offset = chunk.offset;
        let inline = spec == CodecSpec::None || (chunk.raw_len as usize) < CODEC_MIN;
        if inline {
            let Some(raw) = stream.tx.take_raw(seq) else {
                return false;
            };
            if history > 0 {
                stream.tx.history.note(offset, &raw, history);
            }
            let coded = encode(&CodecSpec::None, &raw, &Prefix::new());
            let raw_len = raw.len();
            self.store_coded(id, stream_id, seq, raw_len, coded);
            if let Some(Choice::Auto { max_level, .. }) =
                self.links.get(&id).map(|link| link.config.options.choice())
                && raw_len >= CODEC_MIN
            {
                self.probe(id, max_level, &raw);
            }
            return true;
        }
        if busy {
            self.wait_for_worker(id);
            return false;
        }
        let job = self.new_job(Job::Encode {
            link: id,
            stream: stream_id,
            seq,
            rung,
            codec: spec.code(),
        });
        let Some(link) = self.links.get_mut(&id) else {
            return false;
        };
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return false;
        };
        let Some(raw) = stream.tx.take_raw(seq) else {
            self.jobs.remove(&job);
            return false;
        };
        let mut prefix = Prefix::new();
        if history > 0 {
            stream.tx.begin_history(seq);
            prefix = stream.tx.history.prefix(offset, history);
            stream.tx.history.note(offset, &raw, history);
            if let (CodecSpec::History { level, .. }, true) = (spec, prefix.is_empty()) {
                spec = CodecSpec::Zstd { level };
            }
        }
        link.running_jobs += 1;
        self.running += 1;
        let auto = link.config.options.choice();
        self.out.push_back(Output::Encode {
            job,
            spec,
            raw: Arc::clone(&raw),
            sample: rung.is_some(),
            prefix,
        });
        if let Choice::Auto { max_level, .. } = auto {
            self.probe(id, max_level, &raw);
        }
        false
    }

    /// Now and then, and only with an idle worker, a chunk is also tried with another rung.
    fn probe(&mut self, id: LinkId, max_level: i32, raw: &Bytes) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(rung) = link.adaptive.probe(max_level) else {
            return;
        };
        if self.running >= self.options.jobs_max {
            return;
        }
        self.running += 1;
        let spec = Adaptive::spec(rung);
        let job = self.new_job(Job::Probe {
            link: id,
            rung,
            codec: spec.code(),
            raw_len: raw.len(),
        });
        self.out.push_back(Output::Encode {
            job,
            spec,
            raw: Arc::clone(raw),
            sample: false,
            prefix: Prefix::new(),
        });
    }

    /// Chunks that wait anyway are coded meanwhile.
    fn code_ahead(&mut self, id: LinkId, stream_id: u32) {
        loop {
            let Some(link) = self.links.get_mut(&id) else {
                return;
            };
            if link.codec().0 == CodecSpec::None {
                return;
            }
            let limit = link.chunk_limit();
            let Some(stream) = link.streams.get_mut(&stream_id) else {
                return;
            };
            match stream.tx.next_raw(limit) {
                Some((seq, false)) => {
                    let before = self.running;
                    if !self.encode_chunk(id, stream_id, seq) && self.running == before {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    pub(crate) fn encoded(&mut self, now: Instant, job: JobId, coded: Encoded, took: Took) {
        match self.jobs.remove(&job) {
            Some(Job::Encode {
                link: id,
                stream: stream_id,
                seq,
                rung,
                codec,
            }) => {
                self.running -= 1;
                if let Some(link) = self.links.get_mut(&id) {
                    link.running_jobs -= 1;
                    let stream = link.streams.get(&stream_id);
                    let class = stream.map_or(Class::Unknown, |stream| stream.class);
                    let cpu = &mut link.counters.codec_cpu_us;
                    cpu.add(CodecWork::Encode, class, codec, took.cpu);
                    let raw_len = stream
                        .and_then(|stream| stream.tx.chunk(seq))
                        .map(|chunk| chunk.raw_len as usize);
                    if let Some(raw_len) = raw_len {
                        if let Some(rung) = rung {
                            let wire_len = coded.payload.len() + super::frame::HEADER_LEN;
                            link.adaptive.observe(rung, raw_len, wire_len, took.wall);
                        }
                        self.store_coded(id, stream_id, seq, raw_len, coded);
                    }
                }
                self.settle(now, id);
            }
            Some(Job::Probe {
                link: id,
                rung,
                codec,
                raw_len,
            }) => {
                self.running -= 1;
                if let Some(link) = self.links.get_mut(&id) {
                    let wire_len = coded.payload.len() + super::frame::HEADER_LEN;
                    let adaptive = &mut link.adaptive;
                    adaptive.observe_probe(rung, raw_len, wire_len, took.wall);
                    let cpu = &mut link.counters.codec_cpu_us;
                    cpu.add(CodecWork::Probe, Class::Bulk, codec, took.cpu);
                }
            }
            _ => return,
        }
        self.job_done(now);
    }

    fn store_coded(
        &mut self,
        id: LinkId,
        stream_id: u32,
        seq: u64,
        raw_len: usize,
        coded: Encoded,
    ) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.counters.coded_raw_bytes += raw_len as u64;
        link.counters.coded_wire_bytes += coded.payload.len() as u64;
        link.counters.chunks_by_codec[usize::from(coded.codec)] += 1;
        if let Some(stream) = link.streams.get_mut(&stream_id) {
            let Encoded {
                codec,
                crc,
                payload,
            } = coded;
            stream.tx.set_body(
                seq,
                Body::Ready(Coded {
                    codec,
                    crc,
                    payload,
                }),
            );
        }
    }

    fn send_chunk(&mut self, id: LinkId, stream_id: u32, seq: u64, carrier: CarrierId) -> bool {
        let Some(stream) = self.stream_mut(id, stream_id) else {
            return false;
        };
        let window_end = stream.tx.window_end;
        let Some(chunk) = stream.tx.chunk(seq) else {
            return false;
        };
        if chunk.offset + u64::from(chunk.raw_len) > window_end {
            return false;
        }
        let mut header = Header {
            stream: stream_id,
            offset: chunk.offset,
            raw_len: chunk.raw_len,
            ..Header::session(Kind::Data)
        };
        let payload = match &chunk.body {
            Body::Ready(coded) | Body::SpillOut(coded) => {
                header.code = coded.codec;
                header.raw_crc = coded.crc;
                Arc::clone(&coded.payload)
            }
            Body::Fin => {
                header.flags = FLAG_FIN;
                Bytes::default()
            }
            _ => return false,
        };
        if chunk.begins {
            header.flags |= FLAG_BEGIN;
        }
        header.payload_len = payload.len() as u32;
        stream.tx.mark_sent(seq, carrier);
        self.send(carrier, Frame { header, payload });
        true
    }

    /// Reads spilled chunks back before the line wants them: the head of the queue, in pieces of
    /// half of it, so that the disk gets long reads and is not asked for each chunk.
    fn read_ahead(&mut self, id: LinkId, stream_id: u32) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let head = spill_head(link);
        let Some(stream) = link.streams.get_mut(&stream_id) else {
            return;
        };
        if stream.tx.spilled_bytes == 0 {
            return;
        }
        let unsent = stream.tx.unsent(READ_AHEAD);
        let Some(first) = unsent.first().and_then(|seq| stream.tx.chunk(*seq)) else {
            return;
        };
        let urgent = matches!(first.body, Body::Spilled(..));
        let begin = first.offset;
        let (mut wanted, mut missing, mut span) = (Vec::new(), 0, 0);
        for seq in unsent {
            let Some(chunk) = stream.tx.chunk(seq) else {
                break;
            };
            let far = chunk.offset - begin >= head;
            if far || chunk.offset + u64::from(chunk.raw_len) > stream.tx.window_end {
                break;
            }
            span += u64::from(chunk.raw_len);
            if let Body::Spilled(spill, stub) = chunk.body {
                missing += u64::from(chunk.raw_len);
                wanted.push((seq, spill, stub));
            }
        }
        if !urgent && missing * 2 < span {
            return;
        }
        for (seq, spill, stub) in wanted {
            let job = self.new_job(Job::SpillRead {
                link: id,
                stream: stream_id,
                seq,
            });
            if let Some(stream) = self.stream_mut(id, stream_id) {
                stream.tx.set_body(seq, Body::SpillIn(spill, stub));
            }
            self.out.push_back(Output::SpillRead { job, from: spill });
        }
    }

    /// Moves chunks from the middle of the queue to disk when memory gets short.
    fn spill_some(&mut self, now: Instant, id: LinkId, stream_id: u32) {
        let limit = self.options.spill_limit_bytes;
        if limit == 0 || now < self.spill_rest_until {
            return;
        }
        let (total, max) = (self.total_held, self.options.memory_max_bytes);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let short = link.tx_held() > link.config.options.memlimit_bytes / 2 || total > max / 2;
        if !short || self.spilling >= SPILLS_MAX {
            return;
        }
        let head = spill_head(link);
        let chunk_limit = link.chunk_limit();
        if link.codec().0 == CodecSpec::None {
            // Without a codec nothing was prepared ahead.
            for _ in 0..SPILLS_MAX {
                match self
                    .stream_mut(id, stream_id)
                    .and_then(|s| s.tx.next_raw(chunk_limit))
                {
                    Some((seq, false)) => self.encode_chunk(id, stream_id, seq),
                    _ => break,
                };
            }
        }
        let count = SPILLS_MAX - self.spilling;
        let Some(stream) = self.stream_mut(id, stream_id) else {
            return;
        };
        let chunks = stream.tx.spillable(head, count);
        for seq in chunks {
            let Some(stream) = self.stream_mut(id, stream_id) else {
                return;
            };
            let Some(Body::Ready(coded)) = stream.tx.chunk(seq).map(|chunk| chunk.body.clone())
            else {
                continue;
            };
            let payload = Arc::clone(&coded.payload);
            let len = SpillRef::disk_len(payload.len()) as u64;
            if self.spill_used + len > limit {
                return;
            }
            let job = self.new_job(Job::SpillWrite {
                link: id,
                stream: stream_id,
                seq,
                len,
            });
            if let Some(stream) = self.stream_mut(id, stream_id) {
                stream.tx.set_body(seq, Body::SpillOut(coded));
            }
            self.spilling += 1;
            self.spill_used += len;
            self.out.push_back(Output::SpillWrite { job, payload });
        }
    }

    pub(crate) fn spill_written(
        &mut self,
        now: Instant,
        job: JobId,
        result: Result<SpillRef, String>,
    ) {
        let Some(Job::SpillWrite {
            link: id,
            stream: stream_id,
            seq,
            len,
        }) = self.jobs.remove(&job)
        else {
            return;
        };
        self.spilling -= 1;
        let mut coded = None;
        if let Some(stream) = self.stream_mut(id, stream_id)
            && let Some(chunk) = stream.tx.chunk(seq)
            && let Body::SpillOut(held) = &chunk.body
        {
            let sent = chunk.sent.is_some();
            let stub = Stub {
                codec: held.codec,
                crc: held.crc,
                payload_len: held.payload.len() as u32,
            };
            coded = Some((held.clone(), stub, sent));
        }
        match (result, coded) {
            (Ok(spill), Some((_, stub, false))) => {
                if let Some(link) = self.links.get_mut(&id) {
                    link.counters.spill_written_bytes += u64::from(stub.payload_len);
                }
                if let Some(stream) = self.stream_mut(id, stream_id) {
                    stream.tx.set_body(seq, Body::Spilled(spill, stub));
                }
            }
            (Ok(spill), held) => {
                // Sent or acknowledged meanwhile: the record on disk is not needed.
                self.free_spill(spill);
                if let (Some((coded, ..)), Some(stream)) = (held, self.stream_mut(id, stream_id)) {
                    stream.tx.set_body(seq, Body::Ready(coded));
                }
            }
            (Err(error), held) => {
                if let Some(link) = self.links.get_mut(&id) {
                    link.counters.spill_errors += 1;
                }
                // Once for all writes that were under way.
                if now >= self.spill_rest_until {
                    let seconds = SPILL_REST.as_secs();
                    let text = format!(
                        "spill to disk failed, only memory is used for {seconds} s: {error}"
                    );
                    self.log(Level::Error, id, text);
                }
                self.spill_rest_until = now.after(SPILL_REST);
                self.spill_used = self.spill_used.saturating_sub(len);
                if let (Some((coded, ..)), Some(stream)) = (held, self.stream_mut(id, stream_id)) {
                    stream.tx.set_body(seq, Body::Ready(coded));
                }
            }
        }
        self.settle(now, id);
    }

    pub(crate) fn spill_read(&mut self, now: Instant, job: JobId, result: Result<Vec<u8>, String>) {
        let Some(Job::SpillRead {
            link: id,
            stream: stream_id,
            seq,
        }) = self.jobs.remove(&job)
        else {
            return;
        };
        let body = self
            .stream_mut(id, stream_id)
            .and_then(|stream| stream.tx.chunk(seq))
            .map(|chunk| chunk.body.clone());
        let Some(Body::SpillIn(spill, stub)) = body else {
            return;
        };
        self.free_spill(spill);
        match result {
            Ok(payload) if payload.len() == stub.payload_len as usize => {
                let coded = Coded {
                    codec: stub.codec,
                    crc: stub.crc,
                    payload: Arc::new(payload.into()),
                };
                if let Some(stream) = self.stream_mut(id, stream_id) {
                    stream.tx.set_body(seq, Body::Ready(coded));
                }
            }
            Ok(_) => self.break_stream(now, id, stream_id, "a spilled record has another length"),
            Err(error) => {
                let why = format!("a spilled record cannot be read: {error}");
                self.break_stream(now, id, stream_id, &why);
            }
        }
        self.settle(now, id);
    }

    /// Decides about the codec from what was measured.
    pub(crate) fn choose_codec(&mut self, now: Instant, id: LinkId, workers: usize) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let starved = link.is_starved();
        (link.codec_bound, link.wire_bound) = (false, false);
        if starved {
            // The line can take more than was seen. How much does not matter beyond what makes a
            // faster codec worth a trial.
            let enough = 2.0 * link.adaptive.current_speed(workers);
            link.wire_rate.raise(2.0, enough);
        }
        if let Some(conditions) = conditions(link, workers, starved) {
            link.adaptive.decide(now, &conditions);
        }
    }
}

/// What the automatic choice goes by; `None` with another plugin.
pub(crate) fn conditions(link: &Link, workers: usize, starved: bool) -> Option<Conditions> {
    let Choice::Auto { max_level, policy } = link.config.options.choice() else {
        return None;
    };
    let unsent = link.unsent_bytes() as f64;
    let wire_rate = link.wire_rate.get();
    let low_water = (wire_rate.unwrap_or(0.0) * 0.25).max(2.0 * CHUNK_MAX as f64);
    Some(Conditions {
        wire_rate,
        input_rate: link.input_rate.get().unwrap_or(0.0),
        workers,
        decode_rate: link.peer_decode_rate,
        backlog: unsent > low_water,
        starved,
        max_level,
        policy,
    })
}
