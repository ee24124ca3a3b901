//! The transmission phase of one NBD connection, without its socket: bytes of the client become
//! requests to the volume, completions become replies.
//!
//! Bounds: at most `Limits::requests` requests and about `Limits::bytes` of payload are held, the
//! rest stays in the client's socket. Requests larger than the volume takes are cut into parts. A
//! finished part of a read is sent as a chunk of its own, so nothing waits while it holds memory
//! that others need.

use std::collections::VecDeque;
use std::io::IoSlice;

use lockstep_core::event::{RequestError, RequestId, RequestKind};
use lockstep_format::units::Sector;
use lockstep_io::pool::IoBuf;
use lockstep_io::port::{Completion, PortRequest, SubmitError, VolumePort, VolumeProperties};

use super::handshake::Negotiated;
use super::proto::{HeaderStyle, Last, NbdError, ReplyHead, RequestHeader, command, command_flag};

/// Largest payload of one request in bytes: what every client may assume.
pub(crate) const MAX_PAYLOAD_BYTES: u32 = 32 << 20;
/// Parts of one discard or write of zeroes that run at the same time.
const MAX_RANGE_PARTS: u32 = 4;
/// Slices given to one gathered send.
const MAX_SLICES: usize = 64;

/// What one connection may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Requests at the same time.
    pub(crate) requests: usize,
    /// Payload in bytes at the same time, exceeded by at most one part.
    pub(crate) bytes: usize,
}

/// Whether the client may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Reads only.
    ReadOnly,
    /// Everything.
    ReadWrite,
}

/// The transmission phase of one connection.
pub(crate) struct Session {
    negotiated: Negotiated,
    access: Access,
    limits: Limits,
    port: Box<dyn VolumePort + Send>,
    properties: VolumeProperties,
    rx: Rx,
    ops: Vec<Op>,
    free_ops: Vec<u32>,
    /// Requests that the port has.
    in_flight: usize,
    held_bytes: usize,
    stalled: VecDeque<Stalled>,
    kick: bool,
    out: VecDeque<OutItem>,
    end: End,
}

/// How far the connection is from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Requests are taken.
    Open,
    /// The client said goodbye: what runs is answered.
    Draining,
    /// The volume has gone or the server ends: new requests are answered with `ESHUTDOWN`.
    Shutdown,
    /// The client has gone or broke the protocol: nothing is answered.
    Broken,
}

/// Where in the client's byte stream we are.
#[derive(Debug)]
enum Rx {
    Header,
    /// Payload of a write: the current part. Without `buf` it waits for memory.
    Payload {
        op: u32,
        buf: Option<IoBuf>,
        len: u32,
        filled: u32,
    },
    /// Payload that nobody wants.
    Skip {
        left: u64,
        then: AfterSkip,
    },
    /// No more bytes are taken.
    Ended,
}

#[derive(Clone, Copy, Debug)]
enum AfterSkip {
    /// The write had failed before its payload was complete.
    Settle(u32),
    Refuse(RequestHeader, NbdError),
}

/// One request in work.
#[derive(Debug)]
struct Op {
    request: RequestHeader,
    work: Work,
    /// Length of a part in bytes, but for the last.
    part_bytes: u32,
    /// Bytes of the request that were given to the port.
    next: u64,
    in_flight: u32,
    /// The first error.
    error: Option<NbdError>,
    /// The client is still sending this write's payload.
    receiving: bool,
    /// It is in `Session::stalled`.
    stalled: bool,
    /// For simple replies: the head is out, so an error can no longer be told.
    head_sent: bool,
    live: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Read,
    Write {
        fua: bool,
    },
    Flush,
    /// Discard or zeroes.
    Range {
        kind: RequestKind,
        fua: bool,
    },
    /// The flush that makes a range with `FUA` durable.
    RangeFlush,
}

#[derive(Debug)]
enum Stalled {
    Pump(u32),
    Request(PortRequest),
}

/// A reply or a part of one on its way out.
#[derive(Debug)]
struct OutItem {
    head: ReplyHead,
    body: Option<(IoBuf, u32)>,
    sent: usize,
}

impl OutItem {
    fn len(&self) -> usize {
        self.head.as_slice().len() + self.body_len()
    }

    fn body_len(&self) -> usize {
        self.body.as_ref().map_or(0, |(_, len)| *len as usize)
    }
}

impl Op {
    fn part_len(&self, part: u32) -> u32 {
        let start = u64::from(part) * u64::from(self.part_bytes);
        u64::from(self.part_bytes).min(self.request.length - start) as u32
    }

    fn next_part(&self) -> u32 {
        (self.next / u64::from(self.part_bytes)) as u32
    }

    fn all_submitted(&self) -> bool {
        self.next >= self.request.length
    }
}

impl Session {
    pub(crate) fn new(
        negotiated: Negotiated,
        access: Access,
        limits: Limits,
        port: Box<dyn VolumePort + Send>,
    ) -> Session {
        let properties = port.properties();
        Session {
            negotiated,
            access,
            limits,
            port,
            properties,
            rx: Rx::Header,
            ops: Vec::with_capacity(limits.requests),
            free_ops: Vec::with_capacity(limits.requests),
            in_flight: 0,
            held_bytes: 0,
            stalled: VecDeque::new(),
            kick: false,
            out: VecDeque::new(),
            end: End::Open,
        }
    }

    /// Takes bytes of the client; returns how many it used. Fewer than given means that it needs
    /// more at once (a header) or, if `paused`, that it must first get rid of work.
    pub(crate) fn receive(&mut self, input: &[u8]) -> usize {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            let took = match self.rx {
                Rx::Header => self.receive_header(rest),
                Rx::Payload { .. } => self.receive_payload(rest),
                Rx::Skip { .. } => self.receive_skipped(rest),
                Rx::Ended => return input.len(),
            };
            match took {
                Some(len) => used += len,
                None => return used,
            }
        }
    }

    /// Memory for the payload that comes next, if one is expected.
    pub(crate) fn payload_target(&mut self) -> Option<&mut [u8]> {
        match &mut self.rx {
            Rx::Payload {
                buf: Some(buf),
                len,
                filled,
                ..
            } => Some(&mut buf[*filled as usize..*len as usize]),
            Rx::Payload { buf: None, .. } | Rx::Header | Rx::Skip { .. } | Rx::Ended => None,
        }
    }

    /// `received` bytes were read into `payload_target`.
    pub(crate) fn payload_received(&mut self, received: usize) {
        if let Rx::Payload { len, filled, .. } = &mut self.rx {
            *filled += received as u32;
            assert!(
                *filled <= *len,
                "no more is read than the target has room for"
            );
            if *filled == *len {
                self.payload_part_complete();
            }
        }
    }

    /// A request of this session is done.
    pub(crate) fn completed(&mut self, completion: Completion) {
        let index = (completion.id.0 >> 32) as u32;
        let part = completion.id.0 as u32;
        self.in_flight -= 1;
        let op = &mut self.ops[index as usize];
        assert!(
            op.live && op.in_flight > 0,
            "a completion names an operation in flight"
        );
        op.in_flight -= 1;
        if let Err(error) = completion.result {
            op.error.get_or_insert(error_code(error));
        }
        match op.work {
            Work::Read => {
                let len = op.part_len(part);
                if completion.buf.is_none() {
                    op.error.get_or_insert(NbdError::Io);
                }
                match completion.buf {
                    Some(buf) if op.error.is_none() && self.end != End::Broken => {
                        self.send_part(index, part, buf, len);
                        self.pump(index);
                    }
                    Some(_) | None => self.held_bytes -= len as usize,
                }
            }
            Work::Write { .. } => self.held_bytes -= op.part_len(part) as usize,
            Work::Flush | Work::RangeFlush => {}
            Work::Range { .. } => self.pump(index),
        }
        self.settle(index);
    }

    /// The volume's properties changed.
    pub(crate) fn changed(&mut self, properties: VolumeProperties) {
        // A volume that has lost its data for now keeps its shape for those who use it.
        if properties.size_bytes > 0 {
            self.properties = properties;
        }
    }

    /// No new request is served: the volume has gone or the server ends.
    pub(crate) fn shut_down(&mut self) {
        if self.end == End::Open {
            self.end = End::Shutdown;
        }
    }

    /// The client has gone: nothing more is read or sent.
    pub(crate) fn abandon(&mut self) {
        self.end = End::Broken;
        self.rx = Rx::Ended;
        self.held_bytes -= self.out.iter().map(OutItem::body_len).sum::<usize>();
        self.out.clear();
        for stalled in std::mem::take(&mut self.stalled) {
            match stalled {
                Stalled::Pump(_) => {}
                Stalled::Request(request) => {
                    self.in_flight -= 1;
                    self.ops[(request.id.0 >> 32) as usize].in_flight -= 1;
                }
            }
        }
    }

    /// Tries again what waited for memory or for room in the port; then wakes the volume if it has
    /// been given anything. Call after every batch of events.
    pub(crate) fn turn(&mut self) {
        for _ in 0..self.stalled.len() {
            match self.stalled.pop_front() {
                Some(Stalled::Request(request)) => {
                    let index = (request.id.0 >> 32) as u32;
                    self.submit(request);
                    self.settle(index);
                }
                Some(Stalled::Pump(index)) => {
                    self.ops[index as usize].stalled = false;
                    self.pump(index);
                    self.settle(index);
                }
                None => break,
            }
        }
        if let Rx::Payload {
            buf: None, op, len, ..
        } = self.rx
        {
            self.begin_payload_part(op, len);
        }
        if std::mem::take(&mut self.kick) {
            self.port.kick();
        }
    }

    /// Bytes of the client are of no use now.
    pub(crate) fn paused(&self) -> bool {
        match self.rx {
            Rx::Header => {
                !self.stalled.is_empty()
                    || self.live_ops() >= self.limits.requests
                    || self.out.len() >= 2 * self.limits.requests
            }
            Rx::Payload { ref buf, .. } => buf.is_none(),
            Rx::Skip { .. } => self.out.len() >= 2 * self.limits.requests,
            Rx::Ended => true,
        }
    }

    /// Something waits for memory or for room in the port.
    pub(crate) fn stalled(&self) -> bool {
        !self.stalled.is_empty() || matches!(self.rx, Rx::Payload { buf: None, .. })
    }

    /// It waits for memory that no completion or send of its own will bring.
    pub(crate) fn starved(&self) -> bool {
        self.stalled() && self.in_flight == self.stalled_requests() && self.out.is_empty()
    }

    /// Everything is done that had to be done before the socket may be closed.
    pub(crate) fn finished(&self) -> bool {
        match self.end {
            End::Open => false,
            End::Draining => self.live_ops() == 0 && self.out.is_empty(),
            // A write whose payload is still coming is not waited for.
            End::Shutdown => self.in_flight == 0 && self.stalled.is_empty() && self.out.is_empty(),
            End::Broken => self.in_flight == 0,
        }
    }

    /// Nothing is in the port's hands any more, so it may be closed and dropped.
    pub(crate) fn idle(&self) -> bool {
        self.in_flight == 0
    }

    /// The protocol was broken; the socket is to be closed at once.
    pub(crate) fn broken(&self) -> bool {
        self.end == End::Broken
    }

    /// The port, to close it.
    pub(crate) fn into_port(self) -> (Box<dyn VolumePort + Send>, Access) {
        (self.port, self.access)
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.out.is_empty()
    }

    /// Gathers output for one send and passes it to `send`, which returns how much was sent.
    pub(crate) fn transmit<E>(
        &mut self,
        send: impl FnOnce(&[IoSlice<'_>]) -> Result<usize, E>,
    ) -> Result<usize, E> {
        let mut slices = [IoSlice::new(&[]); MAX_SLICES];
        let mut count = 0;
        for item in &self.out {
            if count + 2 > MAX_SLICES {
                break;
            }
            let head = item.head.as_slice();
            if item.sent < head.len() {
                slices[count] = IoSlice::new(&head[item.sent..]);
                count += 1;
            }
            if let Some((buf, len)) = &item.body {
                let start = item.sent.saturating_sub(head.len());
                slices[count] = IoSlice::new(&buf[start..*len as usize]);
                count += 1;
            }
        }
        let sent = send(&slices[..count])?;
        self.sent(sent);
        Ok(sent)
    }

    fn sent(&mut self, mut bytes: usize) {
        while let Some(item) = self.out.front_mut() {
            let left = item.len() - item.sent;
            if bytes < left {
                item.sent += bytes;
                return;
            }
            bytes -= left;
            self.held_bytes -= item.body_len();
            self.out.pop_front();
        }
    }

    fn receive_header(&mut self, input: &[u8]) -> Option<usize> {
        let len = self.negotiated.style.request_len();
        if self.paused() || input.len() < len {
            return None;
        }
        match RequestHeader::decode(self.negotiated.style, &input[..len]) {
            Some(request) => self.begin(request),
            None => self.abandon(),
        }
        Some(len)
    }

    fn begin(&mut self, request: RequestHeader) {
        let extended = self.negotiated.style == HeaderStyle::Extended;
        let marked = extended && request.flags & command_flag::PAYLOAD_LEN != 0;
        if request.command == command::DISC {
            self.end = End::Draining;
            self.rx = Rx::Ended;
            return;
        }
        // A write always has its payload; with extended headers any request may claim one.
        let has_payload = request.command == command::WRITE || marked;
        if has_payload && request.length > u64::from(MAX_PAYLOAD_BYTES) {
            self.abandon();
            return;
        }
        match self.plan(&request) {
            Err(error) if has_payload => {
                let then = AfterSkip::Refuse(request, error);
                self.rx = Rx::Skip {
                    left: request.length,
                    then,
                };
            }
            Err(error) => self.reply_error(&request, error),
            Ok(Plan::Done) => self.reply(ReplyHead::done(self.negotiated.style, &request)),
            Ok(Plan::AllData) => {
                self.reply(ReplyHead::all_data(self.negotiated.style, &request));
            }
            Ok(Plan::Work(work)) => self.start(request, work),
        }
    }

    fn start(&mut self, request: RequestHeader, work: Work) {
        let index = self.new_op(request, work);
        match work {
            Work::Read | Work::Range { .. } => {
                self.pump(index);
                self.settle(index);
            }
            Work::Write { .. } => {
                self.ops[index as usize].receiving = true;
                let len = self.ops[index as usize].part_len(0);
                self.begin_payload_part(index, len);
            }
            Work::Flush | Work::RangeFlush => self.submit_flush(index),
        }
    }

    fn new_op(&mut self, request: RequestHeader, work: Work) -> u32 {
        let whole_blocks = |bytes: u32| {
            let block = self.properties.logical_block_bytes.max(512);
            (bytes / block * block).max(block)
        };
        let part_bytes = match work {
            Work::Read | Work::Write { .. } => whole_blocks(self.properties.max_request_bytes),
            Work::Range { .. } => whole_blocks(self.properties.max_discard_bytes),
            Work::Flush | Work::RangeFlush => 1,
        };
        let op = Op {
            request,
            work,
            part_bytes,
            next: 0,
            in_flight: 0,
            error: None,
            receiving: false,
            stalled: false,
            head_sent: false,
            live: true,
        };
        match self.free_ops.pop() {
            Some(index) => {
                self.ops[index as usize] = op;
                index
            }
            None => {
                self.ops.push(op);
                (self.ops.len() - 1) as u32
            }
        }
    }

    /// What to do with a request, or why not.
    fn plan(&self, request: &RequestHeader) -> Result<Plan, NbdError> {
        if self.end == End::Shutdown {
            return Err(NbdError::Shutdown);
        }
        let structured = self.negotiated.style != HeaderStyle::Simple;
        let extended = self.negotiated.style == HeaderStyle::Extended;
        let mut known_flags = command_flag::FUA;
        known_flags |= match request.command {
            command::READ if structured => command_flag::DF,
            command::WRITE if extended => command_flag::PAYLOAD_LEN,
            command::WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
            command::BLOCK_STATUS => command_flag::REQ_ONE,
            _ => 0,
        };
        if request.flags & !known_flags != 0 {
            return Err(NbdError::Invalid);
        }
        let fua = request.flags & command_flag::FUA != 0;
        match request.command {
            command::READ => self.plan_read(request),
            command::WRITE => self.plan_change(request, Work::Write { fua }),
            command::FLUSH => Ok(Plan::Work(Work::Flush)),
            command::TRIM if self.properties.discard => {
                let kind = RequestKind::Discard;
                self.plan_change(request, Work::Range { kind, fua })
            }
            command::CACHE => self
                .in_range(request, NbdError::Invalid)
                .map(|()| Plan::Done),
            command::WRITE_ZEROES => {
                let fast = request.flags & command_flag::FAST_ZERO != 0;
                if fast && !self.properties.discard {
                    return Err(NbdError::Unsupported);
                }
                let unmap = request.flags & command_flag::NO_HOLE == 0;
                let kind = RequestKind::Zeroes { unmap };
                self.plan_change(request, Work::Range { kind, fua })
            }
            command::BLOCK_STATUS if self.negotiated.base_allocation && request.length > 0 => self
                .in_range(request, NbdError::Invalid)
                .map(|()| Plan::AllData),
            _ => Err(NbdError::Invalid),
        }
    }

    fn plan_read(&self, request: &RequestHeader) -> Result<Plan, NbdError> {
        self.in_range(request, NbdError::Invalid)?;
        self.aligned(request)?;
        let one_chunk = request.flags & command_flag::DF != 0;
        let one_part = request.length <= u64::from(self.properties.max_request_bytes);
        if request.length > u64::from(MAX_PAYLOAD_BYTES) || (one_chunk && !one_part) {
            return Err(NbdError::Overflow);
        }
        Ok(if request.length == 0 {
            Plan::Done
        } else {
            Plan::Work(Work::Read)
        })
    }

    fn plan_change(&self, request: &RequestHeader, work: Work) -> Result<Plan, NbdError> {
        if self.access == Access::ReadOnly {
            return Err(NbdError::Perm);
        }
        let beyond = match work {
            Work::Range {
                kind: RequestKind::Discard,
                ..
            } => NbdError::Invalid,
            _ => NbdError::NoSpace,
        };
        self.in_range(request, beyond)?;
        self.aligned(request)?;
        Ok(if request.length == 0 {
            Plan::Done
        } else {
            Plan::Work(work)
        })
    }

    fn in_range(&self, request: &RequestHeader, beyond: NbdError) -> Result<(), NbdError> {
        match request.offset.checked_add(request.length) {
            Some(end) if end <= self.properties.size_bytes => Ok(()),
            Some(_) | None => Err(beyond),
        }
    }

    fn aligned(&self, request: &RequestHeader) -> Result<(), NbdError> {
        let block = u64::from(self.properties.logical_block_bytes.max(512));
        if request.offset.is_multiple_of(block) && request.length.is_multiple_of(block) {
            Ok(())
        } else {
            Err(NbdError::Invalid)
        }
    }

    fn receive_payload(&mut self, input: &[u8]) -> Option<usize> {
        let target = self.payload_target()?;
        let len = target.len().min(input.len());
        if len == 0 {
            return None;
        }
        target[..len].copy_from_slice(&input[..len]);
        self.payload_received(len);
        Some(len)
    }

    fn receive_skipped(&mut self, input: &[u8]) -> Option<usize> {
        let Rx::Skip { left, then } = &mut self.rx else {
            return None;
        };
        let len = (*left).min(input.len() as u64);
        *left -= len;
        if *left == 0 {
            let then = *then;
            self.rx = Rx::Header;
            match then {
                AfterSkip::Refuse(request, error) => self.reply_error(&request, error),
                AfterSkip::Settle(index) => {
                    self.ops[index as usize].receiving = false;
                    self.settle(index);
                }
            }
        } else if len == 0 {
            return None;
        }
        Some(len as usize)
    }

    fn begin_payload_part(&mut self, op: u32, len: u32) {
        let buf = if self.held_bytes < self.limits.bytes {
            self.port.alloc(len as usize)
        } else {
            None
        };
        if buf.is_some() {
            self.held_bytes += len as usize;
        }
        self.rx = Rx::Payload {
            op,
            buf,
            len,
            filled: 0,
        };
    }

    fn payload_part_complete(&mut self) {
        let Rx::Payload {
            op: index,
            buf,
            len,
            ..
        } = std::mem::replace(&mut self.rx, Rx::Header)
        else {
            return;
        };
        let op = &mut self.ops[index as usize];
        let part = op.next_part();
        let kind = match op.work {
            Work::Write { fua } => RequestKind::Write { fua },
            work => unreachable!("{work:?} has no payload"),
        };
        let offset = op.request.offset + op.next;
        op.next += u64::from(len);
        let left = op.request.length - op.next;
        if left == 0 {
            op.receiving = false;
        }
        self.submit_new(index, part, kind, offset, len, buf);
        let op = &self.ops[index as usize];
        if left == 0 {
            self.settle(index);
        } else if op.error.is_some() {
            self.rx = Rx::Skip {
                left,
                then: AfterSkip::Settle(index),
            };
        } else {
            let len = op.part_len(op.next_part());
            self.begin_payload_part(index, len);
        }
    }

    /// Submits the parts of a read or a range that may run now.
    fn pump(&mut self, index: u32) {
        let ordered = self.negotiated.style == HeaderStyle::Simple;
        loop {
            let op = &self.ops[index as usize];
            let full = match op.work {
                Work::Read => ordered && op.in_flight > 0,
                _ => op.in_flight >= MAX_RANGE_PARTS,
            };
            let stop = op.error.is_some() || op.all_submitted() || op.stalled;
            if full || stop || self.end == End::Broken {
                return;
            }
            let part = op.next_part();
            let len = op.part_len(part);
            let (kind, buf) = match op.work {
                Work::Range { kind, .. } => (kind, None),
                _ => {
                    let room = self.held_bytes < self.limits.bytes;
                    let Some(buf) = room.then(|| self.port.alloc(len as usize)).flatten() else {
                        self.ops[index as usize].stalled = true;
                        self.stalled.push_back(Stalled::Pump(index));
                        return;
                    };
                    self.held_bytes += len as usize;
                    (RequestKind::Read, Some(buf))
                }
            };
            let op = &mut self.ops[index as usize];
            let offset = op.request.offset + op.next;
            op.next += u64::from(len);
            self.submit_new(index, part, kind, offset, len, buf);
        }
    }

    fn submit_flush(&mut self, index: u32) {
        self.submit_new(index, 0, RequestKind::Flush, 0, 0, None);
        self.settle(index);
    }

    fn submit_new(
        &mut self,
        index: u32,
        part: u32,
        kind: RequestKind,
        offset: u64,
        len: u32,
        buf: Option<IoBuf>,
    ) {
        self.in_flight += 1;
        self.ops[index as usize].in_flight += 1;
        self.submit(PortRequest {
            id: RequestId(u64::from(index) << 32 | u64::from(part)),
            kind,
            sector: Sector(offset / Sector::SIZE),
            len,
            buf,
            buf_offset: 0,
        });
    }

    /// Gives a request to the port, which is already counted as in flight.
    fn submit(&mut self, request: PortRequest) {
        match self.port.submit(request) {
            Ok(()) => self.kick = true,
            Err(SubmitError::Full { request, .. }) => {
                self.stalled.push_back(Stalled::Request(request));
            }
            Err(SubmitError::Gone(request)) => {
                self.in_flight -= 1;
                if request.buf.is_some() {
                    self.held_bytes -= request.len as usize;
                }
                let op = &mut self.ops[(request.id.0 >> 32) as usize];
                op.in_flight -= 1;
                op.error.get_or_insert(NbdError::Shutdown);
            }
        }
    }

    fn send_part(&mut self, index: u32, part: u32, buf: IoBuf, len: u32) {
        let op = &mut self.ops[index as usize];
        let last = if op.all_submitted() && op.in_flight == 0 {
            Last::Yes
        } else {
            Last::No
        };
        let head = if op.head_sent && self.negotiated.style == HeaderStyle::Simple {
            ReplyHead::none()
        } else {
            let offset = op.request.offset + u64::from(part) * u64::from(op.part_bytes);
            ReplyHead::data(self.negotiated.style, &op.request, offset, len, last)
        };
        op.head_sent = true;
        self.out.push_back(OutItem {
            head,
            body: Some((buf, len)),
            sent: 0,
        });
    }

    /// Ends an operation of which nothing is in flight any more.
    fn settle(&mut self, index: u32) {
        let op = &mut self.ops[index as usize];
        let more = op.error.is_none()
            && match op.work {
                Work::Read | Work::Write { .. } | Work::Range { .. } => !op.all_submitted(),
                Work::Flush | Work::RangeFlush => false,
            };
        if !op.live || op.in_flight > 0 || op.receiving || op.stalled || more {
            return;
        }
        let request = op.request;
        match (op.error, op.work) {
            (None, Work::Range { fua: true, .. }) => {
                op.work = Work::RangeFlush;
                self.submit_flush(index);
                return;
            }
            (None, Work::Read) => {}
            (None, _) => self.reply(ReplyHead::done(self.negotiated.style, &request)),
            (Some(_), Work::Read)
                if op.head_sent && self.negotiated.style == HeaderStyle::Simple =>
            {
                // Data was promised that cannot be had, and simple replies cannot take it back.
                op.live = false;
                self.free_ops.push(index);
                self.abandon();
                return;
            }
            (Some(error), _) => self.reply_error(&request, error),
        }
        self.ops[index as usize].live = false;
        self.free_ops.push(index);
    }

    fn reply_error(&mut self, request: &RequestHeader, error: NbdError) {
        self.reply(ReplyHead::error(self.negotiated.style, request, error));
    }

    fn reply(&mut self, head: ReplyHead) {
        if self.end != End::Broken {
            self.out.push_back(OutItem {
                head,
                body: None,
                sent: 0,
            });
        }
    }

    fn live_ops(&self) -> usize {
        self.ops.len() - self.free_ops.len()
    }

    fn stalled_requests(&self) -> usize {
        let is_request = |stalled: &&Stalled| matches!(stalled, Stalled::Request(_));
        self.stalled.iter().filter(is_request).count()
    }
}

/// What a request without an obvious error leads to.
enum Plan {
    Done,
    AllData,
    Work(Work),
}

fn error_code(error: RequestError) -> NbdError {
    match error {
        RequestError::Io => NbdError::Io,
        RequestError::ReadOnly => NbdError::Perm,
        RequestError::NoMedium => NbdError::Shutdown,
        RequestError::Invalid => NbdError::Invalid,
        RequestError::Unsupported => NbdError::Unsupported,
    }
}
