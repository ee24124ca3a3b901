//! One direction of one DRBD socket: `Tx` holds what DRBD sent until the peer has delivered it,
//! `Rx` puts what arrives back into order. Both know offsets only; they never touch a socket.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::frame::{Bytes, CHUNK_MAX};
use super::history::{Prefix, RxHistory, TxHistory};
use super::message::Ack;
use super::time::Instant;
use super::{CarrierId, SpillRef};
use crate::room;

/// Received chunks that may wait for an earlier one. The window bounds their bytes, this their
/// number.
const PARTS_MAX: usize = 64 << 10;
/// Memory that a chunk takes beside its bytes.
const CHUNK_OVERHEAD: u64 = 160;
/// From this length on a growing chunk is expected to become a full one.
const GROWING: usize = 64 << 10;
/// A piece of this length stays a chunk of its own, and a chunk of this length is not copied for the
/// sake of more: that costs a fast codec more than it gains.
const OWN_CHUNK: usize = 256 << 10;

/// What kind of socket a stream carries, from its first eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    Bulk,
    Control,
    /// Not DRBD's first packet; treated as bulk.
    Unknown,
}

impl Class {
    /// Reads DRBD's first header: magic, command, length zero.
    pub(crate) fn of(first: &[u8; 8]) -> Class {
        match first {
            [0x83, 0x74, 0x02, 0x67, 0xff, 0xf2, 0, 0] => Class::Bulk,
            [0x83, 0x74, 0x02, 0x67, 0xff, 0xf1, 0, 0] => Class::Control,
            _ => Class::Unknown,
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Class::Bulk => 1,
            Class::Control => 2,
            Class::Unknown => 3,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Class::Bulk => "data",
            Class::Control => "control",
            Class::Unknown => "unknown",
        }
    }
}

/// Where the bytes of a chunk are.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// As DRBD sent them; may still grow.
    Raw(Vec<u8>),
    Encoding,
    Ready(Coded),
    /// On the way to disk; the payload is kept until the disk has it.
    SpillOut(Coded),
    Spilled(SpillRef, Stub),
    SpillIn(SpillRef, Stub),
    /// The end of the stream.
    Fin,
}

/// A chunk as its frame needs it.
#[derive(Clone, Debug)]
pub(crate) struct Coded {
    pub(crate) codec: u8,
    pub(crate) crc: u32,
    pub(crate) payload: Bytes,
}

/// What stays in memory of a spilled chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stub {
    pub(crate) codec: u8,
    pub(crate) crc: u32,
    pub(crate) payload_len: u32,
}

/// A piece of the stream, never cut again once it was coded.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) offset: u64,
    pub(crate) raw_len: u32,
    pub(crate) born: Instant,
    pub(crate) body: Body,
    /// The carrier that has it now.
    pub(crate) sent: Option<CarrierId>,
    /// Some carrier had it once, so the peer may acknowledge it.
    pub(crate) was_sent: bool,
    /// The peer is to remember from here on.
    pub(crate) begins: bool,
}

/// The sending direction.
#[derive(Clone, Debug)]
pub(crate) struct Tx {
    chunks: VecDeque<Chunk>,
    /// Sequence number of the first chunk in `chunks`.
    first_seq: u64,
    /// No chunk before this sequence number waits to be sent.
    unsent_from: u64,
    /// No chunk before this sequence number is raw.
    raw_from: u64,
    /// No chunk between where the last search for spillable ones began and here is one.
    spill_from: u64,
    spill_start: u64,
    pub(crate) next_offset: u64,
    pub(crate) delivered: u64,
    pub(crate) received: u64,
    pub(crate) window_end: u64,
    /// When the local socket ended.
    pub(crate) eof: Option<Instant>,
    /// Memory that the chunks hold.
    pub(crate) held_bytes: u64,
    /// Bytes on disk.
    pub(crate) spilled_bytes: u64,
    /// Raw bytes that were never handed to a carrier.
    pub(crate) unsent_bytes: u64,
    pub(crate) history: TxHistory,
}

/// The peer acknowledged what was never sent, or takes back what it acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadAck;

impl Chunk {
    /// Offset after the chunk; the end of the stream counts as one byte.
    pub(crate) fn end(&self) -> u64 {
        self.offset + u64::from(self.raw_len) + u64::from(matches!(self.body, Body::Fin))
    }

    fn held(&self) -> u64 {
        CHUNK_OVERHEAD
            + match &self.body {
                Body::Raw(raw) => raw.len() as u64,
                Body::Encoding => u64::from(self.raw_len),
                Body::Ready(coded) | Body::SpillOut(coded) => coded.payload.len() as u64,
                Body::Spilled(..) | Body::Fin => 0,
                Body::SpillIn(_, stub) => u64::from(stub.payload_len),
            }
    }

    /// Coded, unsent, and worth a record on disk.
    fn may_spill(&self) -> bool {
        let ready = matches!(&self.body, Body::Ready(coded) if coded.payload.len() >= 4096);
        ready && self.sent.is_none()
    }

    fn spilled(&self) -> u64 {
        match &self.body {
            Body::Spilled(_, stub) | Body::SpillIn(_, stub) => u64::from(stub.payload_len),
            _ => 0,
        }
    }
}

impl Tx {
    pub(crate) fn new(window_end: u64) -> Tx {
        Tx {
            chunks: VecDeque::new(),
            first_seq: 0,
            unsent_from: 0,
            raw_from: 0,
            spill_from: 0,
            spill_start: 0,
            next_offset: 0,
            delivered: 0,
            received: 0,
            window_end,
            eof: None,
            held_bytes: 0,
            spilled_bytes: 0,
            unsent_bytes: 0,
            history: TxHistory::default(),
        }
    }

    /// The state of another process. The chunks must follow each other without a gap.
    pub(crate) fn taken_over(
        delivered: u64,
        received: u64,
        window_end: u64,
        chunks: Vec<Chunk>,
    ) -> Result<Tx, String> {
        let mut tx = Tx::new(window_end);
        tx.delivered = delivered;
        tx.received = received;
        tx.next_offset = chunks.first().map_or(delivered, |chunk| chunk.offset);
        for chunk in chunks {
            let raw = matches!(&chunk.body, Body::Raw(raw) if raw.len() != chunk.raw_len as usize);
            if chunk.offset != tx.next_offset || raw || chunk.raw_len as usize > CHUNK_MAX {
                return Err(format!("chunk at {} does not fit", chunk.offset));
            }
            tx.next_offset = chunk.end();
            tx.held_bytes += chunk.held();
            tx.spilled_bytes += chunk.spilled();
            if chunk.sent.is_none() {
                tx.unsent_bytes += u64::from(chunk.raw_len);
            }
            tx.chunks.push_back(chunk);
        }
        if received > tx.next_offset || delivered > received {
            return Err("more is acknowledged than was sent".into());
        }
        Ok(tx)
    }

    /// Takes bytes from the local socket. They join the last chunk while nobody has begun with it
    /// and it holds at most `limit` bytes.
    pub(crate) fn push(&mut self, now: Instant, data: Vec<u8>, limit: usize) {
        assert!(self.eof.is_none(), "data after the end of the stream");
        let len = data.len();
        self.next_offset += len as u64;
        self.unsent_bytes += len as u64;
        if let Some(Chunk {
            body: Body::Raw(raw),
            raw_len,
            ..
        }) = self.chunks.back_mut()
            && raw.len() + len <= limit.min(CHUNK_MAX)
            && len < OWN_CHUNK
            && (raw.len() < OWN_CHUNK || raw.len() + len <= raw.capacity())
        {
            if raw.len() + len >= GROWING {
                // A large chunk grows once more at most: each growth copies it.
                let full = limit.min(2 * OWN_CHUNK);
                if raw.capacity() < raw.len() + len {
                    let mut larger = room::empty(full);
                    larger.extend_from_slice(raw);
                    room::give(std::mem::replace(raw, larger));
                }
            }
            raw.extend_from_slice(&data);
            room::give(data);
            *raw_len += len as u32;
            self.held_bytes += len as u64;
            return;
        }
        self.append(
            now,
            len as u32,
            Body::Raw(data),
            self.next_offset - len as u64,
        );
    }

    /// The local socket ended: everything before is to be delivered, then the end.
    pub(crate) fn push_fin(&mut self, now: Instant) {
        if self.eof.is_none() {
            self.eof = Some(now);
            self.append(now, 0, Body::Fin, self.next_offset);
        }
    }

    fn append(&mut self, born: Instant, raw_len: u32, body: Body, offset: u64) {
        let chunk = Chunk {
            offset,
            raw_len,
            born,
            body,
            sent: None,
            was_sent: false,
            begins: false,
        };
        self.held_bytes += chunk.held();
        self.chunks.push_back(chunk);
    }

    /// Handles the peer's report. Returns what is free on disk, and when the newest byte that is
    /// now delivered was read.
    pub(crate) fn acked(&mut self, ack: &Ack) -> Result<(Vec<SpillRef>, Option<Instant>), BadAck> {
        let end = self.next_offset + u64::from(self.eof.is_some());
        if ack.delivered > ack.received || ack.received > end {
            return Err(BadAck);
        }
        self.window_end = self.window_end.max(ack.window_end);
        self.received = self.received.max(ack.received);
        if ack.delivered <= self.delivered {
            return Ok((Vec::new(), None));
        }
        self.delivered = ack.delivered;
        let (mut free, mut born) = (Vec::new(), None);
        while let Some(chunk) = self.chunks.front() {
            if chunk.end() > self.delivered {
                break;
            }
            if !chunk.was_sent {
                return Err(BadAck);
            }
            if chunk.sent.is_none() {
                // Its carrier was lost, but it had arrived.
                self.unsent_bytes -= u64::from(chunk.raw_len);
            }
            if let Body::Spilled(spill, _) | Body::SpillIn(spill, _) = &chunk.body {
                free.push(*spill);
            }
            born = Some(chunk.born);
            self.held_bytes -= chunk.held();
            self.spilled_bytes -= chunk.spilled();
            self.chunks.pop_front();
            self.first_seq += 1;
        }
        Ok((free, born))
    }

    /// Everything, the end included, has reached the peer's DRBD.
    pub(crate) fn finished(&self) -> bool {
        self.eof.is_some() && self.delivered == self.next_offset + 1
    }

    /// The end is queued and no carrier has it.
    pub(crate) fn unsent_fin(&self) -> bool {
        self.chunks
            .back()
            .is_some_and(|c| matches!(c.body, Body::Fin) && c.sent.is_none())
    }

    /// Raw bytes that the peer has not delivered.
    pub(crate) fn backlog_bytes(&self) -> u64 {
        self.next_offset - self.delivered.min(self.next_offset)
    }

    /// Memory of coded chunks; looks at every chunk.
    pub(crate) fn encoded_bytes(&self) -> u64 {
        let coded = self.chunks.iter().map(|chunk| match &chunk.body {
            Body::Ready(coded) | Body::SpillOut(coded) => coded.payload.len() as u64,
            _ => 0,
        });
        coded.sum()
    }

    /// When the oldest byte was read that the peer has not delivered.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.chunks.front().map(|chunk| chunk.born)
    }

    /// The chunk with a sequence number, while it is held.
    pub(crate) fn chunk(&self, seq: u64) -> Option<&Chunk> {
        self.chunks.get(seq.checked_sub(self.first_seq)? as usize)
    }

    /// The next chunks that wait to be sent, at most `count` of them.
    pub(crate) fn unsent(&mut self, count: usize) -> Vec<u64> {
        self.unsent_from = self.unsent_from.max(self.first_seq);
        while self
            .chunk(self.unsent_from)
            .is_some_and(|chunk| chunk.sent.is_some())
        {
            self.unsent_from += 1;
        }
        let end = self.first_seq + self.chunks.len() as u64;
        (self.unsent_from..end)
            .filter(|seq| self.chunk(*seq).is_some_and(|chunk| chunk.sent.is_none()))
            .take(count)
            .collect()
    }

    /// The next raw chunk from `seq` on, and whether it can still grow.
    pub(crate) fn next_raw(&mut self, limit: usize) -> Option<(u64, bool)> {
        self.raw_from = self.raw_from.max(self.first_seq);
        while let Some(chunk) = self.chunk(self.raw_from) {
            if matches!(chunk.body, Body::Raw(_)) {
                let last = self.raw_from + 1 == self.first_seq + self.chunks.len() as u64;
                let room = (chunk.raw_len as usize) < limit / 16 * 15;
                return Some((self.raw_from, last && room));
            }
            self.raw_from += 1;
        }
        None
    }

    /// Takes the raw bytes of a chunk out for coding.
    pub(crate) fn take_raw(&mut self, seq: u64) -> Option<Bytes> {
        let at = seq.checked_sub(self.first_seq)? as usize;
        let chunk = self.chunks.get_mut(at)?;
        let Body::Raw(raw) = &mut chunk.body else {
            return None;
        };
        let raw = std::mem::take(raw);
        chunk.body = Body::Encoding;
        Some(Arc::new(raw.into()))
    }

    /// Makes the chunk one from which on the peer remembers, if it is the first of them.
    pub(crate) fn begin_history(&mut self, seq: u64) {
        let Some(at) = seq.checked_sub(self.first_seq) else {
            return;
        };
        if let Some(chunk) = self.chunks.get_mut(at as usize)
            && self.history.begin(chunk.offset)
        {
            chunk.begins = true;
        }
    }

    /// Changes where a chunk's bytes are.
    pub(crate) fn set_body(&mut self, seq: u64, body: Body) {
        let Some(at) = seq.checked_sub(self.first_seq) else {
            return;
        };
        let Some(chunk) = self.chunks.get_mut(at as usize) else {
            return;
        };
        let (held, spilled) = (chunk.held(), chunk.spilled());
        chunk.body = body;
        if chunk.may_spill() {
            self.spill_from = self.spill_from.min(seq);
        }
        self.held_bytes = self.held_bytes + chunk.held() - held;
        self.spilled_bytes = self.spilled_bytes + chunk.spilled() - spilled;
    }

    /// Marks a chunk as handed to a carrier.
    pub(crate) fn mark_sent(&mut self, seq: u64, carrier: CarrierId) {
        let Some(at) = seq.checked_sub(self.first_seq) else {
            return;
        };
        let Some(chunk) = self.chunks.get_mut(at as usize) else {
            return;
        };
        chunk.was_sent = true;
        if chunk.sent.replace(carrier).is_none() {
            self.unsent_bytes -= u64::from(chunk.raw_len);
        }
    }

    /// Takes back what was handed to a carrier that is lost (`None`: to any carrier) and that the
    /// peer has not received. Returns the raw bytes to be sent again.
    pub(crate) fn unsend(&mut self, carrier: Option<CarrierId>) -> u64 {
        let mut again = 0;
        for (at, chunk) in self.chunks.iter_mut().enumerate() {
            let lost = chunk.sent.is_some() && (carrier.is_none() || chunk.sent == carrier);
            if lost && chunk.end() > self.received {
                chunk.sent = None;
                again += u64::from(chunk.raw_len);
                let seq = self.first_seq + at as u64;
                self.unsent_from = self.unsent_from.min(seq);
                self.spill_from = self.spill_from.min(seq);
            }
        }
        self.unsent_bytes += again;
        again
    }

    /// Coded chunks that may go to disk: unsent, at least `head_bytes` behind the first of these.
    /// Newest chunks first would be read back last, so oldest first.
    ///
    /// This is asked all the time, and a queue on disk may be long: the search goes on where the
    /// last one ended.
    pub(crate) fn spillable(&mut self, head_bytes: u64, count: usize) -> Vec<u64> {
        let first = self.unsent(1).first().and_then(|seq| self.chunk(*seq));
        let from = first.map_or(self.next_offset, |chunk| chunk.offset) + head_bytes;
        let start = self.chunks.partition_point(|chunk| chunk.offset < from);
        let start = self.first_seq + start as u64;
        if start < self.spill_start {
            self.spill_from = self.spill_from.min(start);
        }
        self.spill_start = start;
        let end = self.first_seq + self.chunks.len() as u64;
        let found: Vec<u64> = (start.max(self.spill_from)..end)
            .filter(|seq| self.chunk(*seq).is_some_and(Chunk::may_spill))
            .take(count)
            .collect();
        self.spill_from = found.first().copied().unwrap_or(end);
        found
    }

    /// Every chunk, with its sequence number; for an orderly hand-over and for freeing the disk.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Chunk)> {
        self.chunks
            .iter()
            .enumerate()
            .map(|(at, chunk)| (self.first_seq + at as u64, chunk))
    }
}

/// What to do with a DATA frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    New,
    Duplicate,
    /// Overlaps, lies behind the window or after the end: the stream is broken.
    Broken(&'static str),
}

/// A received chunk that waits for its turn.
#[derive(Clone, Debug)]
struct Part {
    len: u32,
    /// The sender begins to remember with it, and so must the receiver.
    begins: bool,
    state: PartState,
}

#[derive(Clone, Debug)]
enum PartState {
    Decoding,
    /// Refers to the bytes before it, which must be here first.
    Waiting {
        crc: u32,
        payload: Bytes,
    },
    Ready(Bytes),
}

/// A chunk whose turn to be decoded has come.
#[derive(Debug)]
pub(crate) struct Due {
    pub(crate) offset: u64,
    pub(crate) raw_len: u32,
    pub(crate) crc: u32,
    pub(crate) payload: Bytes,
    /// `None`: it refers to more than is remembered.
    pub(crate) prefix: Option<Prefix>,
}

/// The receiving direction.
#[derive(Clone, Debug)]
pub(crate) struct Rx {
    parts: BTreeMap<u64, Part>,
    /// Bytes received without a gap; the end counts as one more.
    pub(crate) received: u64,
    /// Bytes handed to the local socket's queue.
    pub(crate) handed: u64,
    /// Bytes accepted by the local kernel.
    pub(crate) delivered: u64,
    /// The end was passed on.
    pub(crate) fin_delivered: bool,
    fin: Option<u64>,
    pub(crate) granted: u64,
    /// The local socket is gone: what still comes is taken and dropped.
    pub(crate) sink: bool,
    /// What the peer knows.
    pub(crate) acked: Ack,
    pub(crate) history: RxHistory,
}

impl Rx {
    pub(crate) fn new(stream: u32, granted: u64, history: u64) -> Rx {
        Rx {
            history: RxHistory::new(history),
            parts: BTreeMap::new(),
            received: 0,
            handed: 0,
            delivered: 0,
            fin_delivered: false,
            fin: None,
            granted,
            sink: false,
            acked: Ack {
                stream,
                delivered: 0,
                received: 0,
                window_end: granted,
            },
        }
    }

    /// The state of another process, whose local socket was given everything before `handed`.
    pub(crate) fn taken_over(
        stream: u32,
        delivered: u64,
        handed: u64,
        granted: u64,
    ) -> Result<Rx, String> {
        if delivered > handed || handed > granted {
            return Err(format!(
                "stream {stream}: {delivered} of {handed} of {granted}"
            ));
        }
        let mut rx = Rx::new(stream, granted, 0);
        (rx.received, rx.handed, rx.delivered) = (handed, handed, delivered);
        Ok(rx)
    }

    /// All that was received without a gap is with the local socket, and the end has not come.
    pub(crate) fn is_contiguous_and_open(&self) -> bool {
        self.fin.is_none() && self.received == self.handed
    }

    /// Judges a DATA frame and, if it is new, keeps its place.
    pub(crate) fn offer(&mut self, offset: u64, raw_len: u32, fin: bool) -> Verdict {
        let Some(end) = offset.checked_add(u64::from(raw_len)) else {
            return Verdict::Broken("offset overflow");
        };
        if end > self.granted {
            return Verdict::Broken("data outside the window");
        }
        if self.fin.is_some_and(|at| end > at || fin && end != at) {
            return Verdict::Broken("data after the end");
        }
        let mut verdict = Verdict::Duplicate;
        if raw_len > 0 && end > self.handed {
            if offset < self.handed {
                return Verdict::Broken("overlap with delivered data");
            }
            match self.parts.get(&offset).map(|part| part.len) {
                Some(len) if len == raw_len => {}
                Some(_) => return Verdict::Broken("overlap"),
                None => {
                    let before = self.parts.range(..offset).next_back();
                    let overlap = before
                        .is_some_and(|(at, part)| at + u64::from(part.len) > offset)
                        || self.parts.range(offset..end).next().is_some();
                    if overlap {
                        return Verdict::Broken("overlap");
                    }
                    if self.parts.len() >= PARTS_MAX {
                        return Verdict::Broken("too many pieces");
                    }
                    let part = Part {
                        len: raw_len,
                        begins: false,
                        state: PartState::Decoding,
                    };
                    self.parts.insert(offset, part);
                    verdict = Verdict::New;
                }
            }
        } else if raw_len == 0 && !fin {
            return Verdict::Broken("empty chunk");
        }
        if fin && self.fin.is_none() {
            if self
                .parts
                .last_key_value()
                .is_some_and(|(at, part)| at + u64::from(part.len) > end)
                || self.handed > end
            {
                return Verdict::Broken("the end lies before received data");
            }
            self.fin = Some(end);
            verdict = Verdict::New;
        }
        while let Some(part) = self.parts.get(&self.received) {
            self.received += u64::from(part.len);
        }
        if self.fin == Some(self.received) {
            self.received += 1;
        }
        verdict
    }

    /// Gives the raw bytes of a chunk whose place was kept.
    pub(crate) fn fill(&mut self, offset: u64, raw: Bytes) {
        if let Some(part) = self.parts.get_mut(&offset)
            && matches!(part.state, PartState::Decoding)
        {
            assert_eq!(part.len as usize, raw.len(), "the codec checks the length");
            part.state = PartState::Ready(raw);
        }
    }

    /// The chunk, whose place was kept, is the first to be remembered.
    pub(crate) fn begin_history(&mut self, offset: u64) {
        if let Some(part) = self.parts.get_mut(&offset) {
            part.begins = true;
        }
    }

    /// The chunk, whose place was kept, waits until everything before it is here.
    pub(crate) fn wait(&mut self, offset: u64, crc: u32, payload: Bytes) {
        if let Some(part) = self.parts.get_mut(&offset) {
            part.state = PartState::Waiting { crc, payload };
        }
    }

    /// The chunk that waited and can be decoded now.
    pub(crate) fn take_due(&mut self) -> Option<Due> {
        let mut entry = self.parts.first_entry()?;
        let offset = *entry.key();
        if offset != self.handed {
            return None;
        }
        let part = entry.get_mut();
        let PartState::Waiting { crc, payload } = &part.state else {
            return None;
        };
        let len = crate::codec::prefix_len(payload);
        let due = Due {
            offset,
            raw_len: part.len,
            crc: *crc,
            payload: Arc::clone(payload),
            prefix: len.and_then(|len| self.history.last(len)),
        };
        part.state = PartState::Decoding;
        Some(due)
    }

    /// The next bytes in order, if they are here.
    pub(crate) fn take(&mut self) -> Option<Bytes> {
        let entry = self.parts.first_entry()?;
        if *entry.key() != self.handed || !matches!(entry.get().state, PartState::Ready(_)) {
            return None;
        }
        let part = entry.remove();
        let PartState::Ready(raw) = part.state else {
            return None;
        };
        self.history.push(&raw, part.begins);
        self.handed += raw.len() as u64;
        Some(raw)
    }

    /// The local kernel took some bytes.
    pub(crate) fn written(&mut self, bytes: u64) {
        self.delivered = (self.delivered + bytes).min(self.handed);
    }

    /// Everything is delivered and the end is to be passed on now.
    pub(crate) fn take_fin(&mut self) -> bool {
        let due = self.fin == Some(self.delivered) && !self.fin_delivered;
        self.fin_delivered |= due;
        due
    }

    /// The report to the peer, with a window of `window` bytes from here on.
    pub(crate) fn report(&mut self, stream: u32, window: u64) -> Ack {
        self.granted = self.granted.max(self.delivered + window);
        let delivered = self.delivered + u64::from(self.fin_delivered);
        Ack {
            stream,
            delivered,
            received: self.received,
            window_end: self.granted,
        }
    }

    /// Raw bytes received or expected from a running decoder, not yet taken by the local kernel.
    pub(crate) fn held_bytes(&self) -> u64 {
        let parts: u64 = self.parts.values().map(|part| u64::from(part.len)).sum();
        parts + self.handed - self.delivered + self.history.held_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_eight_bytes_tell_the_class() {
        assert_eq!(Class::of(b"\x83\x74\x02\x67\xff\xf2\0\0"), Class::Bulk);
        assert_eq!(Class::of(b"\x83\x74\x02\x67\xff\xf1\0\0"), Class::Control);
        assert_eq!(Class::of(b"GET / HT"), Class::Unknown);
    }

    #[test]
    fn small_pieces_join_and_large_ones_are_not_copied_for_it() {
        const K: usize = 1 << 10;
        let chunks = |pieces: &[usize]| {
            let mut tx = Tx::new(u64::MAX);
            let (mut all, mut copied) = (Vec::new(), 0);
            for len in pieces {
                let data: Vec<u8> = (0..*len).map(|at| (at * 7 + all.len()) as u8).collect();
                all.extend_from_slice(&data);
                let place = data.as_ptr();
                tx.push(Instant(0), data, CHUNK_MAX);
                let Some(Body::Raw(raw)) = tx.chunks.back().map(|chunk| &chunk.body) else {
                    panic!("nothing else is in there");
                };
                copied += if raw.as_ptr() == place { 0 } else { *len };
            }
            let mut held = Vec::new();
            for chunk in &tx.chunks {
                let Body::Raw(raw) = &chunk.body else {
                    panic!("nothing else is in there");
                };
                assert_eq!(chunk.offset as usize, held.len());
                assert_eq!(chunk.raw_len as usize, raw.len());
                held.extend_from_slice(raw);
            }
            assert!(held == all);
            let lens: Vec<usize> = tx
                .chunks
                .iter()
                .map(|chunk| chunk.raw_len as usize)
                .collect();
            (lens, copied)
        };
        assert_eq!(chunks(&[300 * K, 400 * K]), (vec![300 * K, 400 * K], 0));
        assert_eq!(chunks(&[20 * K, 1000 * K]), (vec![20 * K, 1000 * K], 0));
        assert_eq!(chunks(&[300 * K, 9 * K]), (vec![300 * K, 9 * K], 0));
        assert_eq!(chunks(&[100; 9]), (vec![900], 800));
        let (lens, _) = chunks(&[60 * K; 30]);
        assert_eq!(lens.iter().sum::<usize>(), 1800 * K);
        assert!(lens[..lens.len() - 1].iter().all(|len| *len >= OWN_CHUNK));
    }

    #[test]
    fn what_may_be_spilled_is_found_without_looking_at_everything() {
        let mut rng = super::super::rng::Rng::new(3);
        let mut tx = Tx::new(u64::MAX);
        let coded = |len: usize| {
            let payload = Arc::new(vec![0; len].into());
            let (codec, crc) = (0, 0);
            Coded {
                codec,
                crc,
                payload,
            }
        };
        let (mut found_any, mut pushed) = (0, 0);
        for _ in 0..4000 {
            let some = tx.first_seq + rng.below(tx.chunks.len() as u64 + 1);
            match rng.below(8) {
                0 | 1 => {
                    tx.push(Instant(0), vec![0; 5000], 0);
                    pushed += 1;
                }
                2 | 3 => {
                    let len = if rng.below(4) == 0 { 100 } else { 5000 };
                    tx.set_body(some, Body::Ready(coded(len)));
                }
                4 => tx.set_body(some, Body::SpillOut(coded(5000))),
                5 => {
                    let next = tx.unsent(1);
                    next.iter().for_each(|seq| tx.mark_sent(*seq, CarrierId(1)));
                }
                6 if rng.below(8) == 0 => {
                    tx.unsend(None);
                }
                _ => {}
            }
            let (head, count) = (rng.below(60_000), 1 + rng.below(5) as usize);
            let first = tx.unsent(1).first().copied();
            let from = first.map_or(tx.next_offset, |seq| tx.chunk(seq).unwrap().offset) + head;
            let expected: Vec<u64> = tx
                .iter()
                .filter(|(_, chunk)| chunk.offset >= from && chunk.may_spill())
                .map(|(seq, _)| seq)
                .take(count)
                .collect();
            assert_eq!(tx.spillable(head, count), expected);
            found_any += usize::from(!expected.is_empty());
        }
        assert!(found_any > 500 && pushed > 500, "{found_any} of {pushed}");
    }

    #[test]
    fn chunks_arrive_in_any_order_and_leave_in_one() {
        let mut rx = Rx::new(1, 100, 0);
        assert_eq!(rx.offer(10, 5, false), Verdict::New);
        assert_eq!(rx.offer(15, 0, true), Verdict::New);
        assert_eq!(rx.received, 0);
        assert_eq!(rx.offer(0, 10, false), Verdict::New);
        assert_eq!(rx.received, 16);
        rx.fill(10, Arc::new(vec![2; 5].into()));
        assert!(rx.take().is_none());
        rx.fill(0, Arc::new(vec![1; 10].into()));
        assert_eq!(rx.take().map(|raw| raw.len()), Some(10));
        assert_eq!(rx.take().map(|raw| raw.len()), Some(5));
        assert!(!rx.take_fin());
        rx.written(15);
        assert!(rx.take_fin() && !rx.take_fin());
        assert_eq!(rx.report(1, 50).delivered, 16);
        assert_eq!(rx.offer(10, 5, false), Verdict::Duplicate);
    }

    #[test]
    fn overlaps_and_data_outside_the_window_break_the_stream() {
        let mut rx = Rx::new(1, 100, 0);
        assert_eq!(rx.offer(10, 10, false), Verdict::New);
        assert_eq!(rx.offer(10, 10, false), Verdict::Duplicate);
        for (offset, len) in [(10, 9), (5, 6), (19, 5), (5, 30), (95, 6), (u64::MAX, 2)] {
            assert!(
                matches!(rx.offer(offset, len, false), Verdict::Broken(_)),
                "{offset} {len}"
            );
        }
        assert!(matches!(rx.offer(3, 0, true), Verdict::Broken(_)));
        assert!(matches!(rx.offer(3, 0, false), Verdict::Broken(_)));
        assert_eq!(rx.offer(20, 10, true), Verdict::New);
        assert!(matches!(rx.offer(30, 1, false), Verdict::Broken(_)));
        assert!(matches!(rx.offer(29, 0, true), Verdict::Broken(_)));
    }

    #[test]
    fn a_lost_carrier_gives_back_only_what_the_peer_lacks() {
        let mut tx = Tx::new(1 << 20);
        for len in [10, 20, 30] {
            tx.push(Instant(0), vec![0; len], 4096);
            let seq = tx.next_raw(1).map(|(seq, _)| seq).unwrap();
            let raw = tx.take_raw(seq).unwrap();
            let coded = Coded {
                codec: 0,
                crc: 0,
                payload: raw,
            };
            tx.set_body(seq, Body::Ready(coded));
            tx.mark_sent(seq, CarrierId(if len == 20 { 2 } else { 1 }));
        }
        assert!(tx.unsent(9).is_empty());
        let ack = |delivered, received| Ack {
            stream: 1,
            delivered,
            received,
            window_end: 0,
        };
        assert_eq!(tx.acked(&ack(4, 10)).map(|(free, _)| free.len()), Ok(0));
        assert_eq!(tx.unsend(Some(CarrierId(1))), 30);
        assert_eq!(tx.unsent(9), vec![2]);
        assert_eq!(tx.unsend(None), 20);
        assert_eq!(tx.unsent(9), vec![1, 2]);
        assert_eq!(tx.acked(&ack(61, 61)), Err(BadAck));
        assert!(
            tx.acked(&ack(30, 30)).is_ok(),
            "it had arrived before its carrier was lost"
        );
        tx.push(Instant(0), vec![0; 7], 4096);
        tx.mark_sent(2, CarrierId(1));
        assert_eq!(tx.acked(&ack(67, 67)), Err(BadAck), "never sent");
    }
}
