//! Finds the replication streams among TCP connections, and decodes them.
//!
//! A replication connection is a pair of TCP connections, which the first packet of each names
//! data or control. Versions, features and integrity digests are agreed on the data connection
//! and needed on both. Which two belong together is not on the wire: connections between the same
//! two addresses are paired, preferring the same listening port, then the newest.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use lockstep_format::wire::alg::digest_len;
use lockstep_format::wire::packet::{CompressedBitmap, ConnectionFeatures};
use lockstep_format::wire::transport::LbTcpChunk;
use lockstep_format::wire::vli::{Pushed, RleDecoder, RleEncoder};
use lockstep_format::wire::{
    Command, Dialect, Features, Header, Packet, Stream, WireError, decode, decode_header,
    decode_initial, encode_with,
};

use super::tcp::{Direction, TcpEvent, TcpId};

/// One packet that was decoded.
pub(crate) struct Seen<'a> {
    /// Replication connection, counted from 1; none while it cannot be told.
    pub(crate) connection: Option<usize>,
    pub(crate) stream: Stream,
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) header: Header,
    pub(crate) packet: &'a Packet,
}

/// Something that a reader of the capture must know.
#[derive(Debug)]
pub(crate) enum Problem {
    /// Bytes that are no packet; the rest of the direction is not decoded.
    Undecodable { error: WireError, bytes: Vec<u8> },
    /// A packet that encodes to other bytes.
    Differs {
        command: Command,
        captured: Vec<u8>,
        encoded: Vec<u8>,
    },
    /// The code of a compressed bitmap is not the one for its runs.
    BitmapCode { what: String },
    /// The sender was killed inside a packet.
    CutOff {
        command: Option<Command>,
        missing: u64,
    },
    /// The capture lacks bytes in front of others that it has.
    Missing { bytes: u64 },
    /// The capture lacks a chunk of the lb-tcp transport in front of others that it has.
    MissingChunk { sequence: u32 },
    /// So much came before a missing segment that it was given up.
    TooMuchPending,
    /// The integrity algorithm is not known, so packets with payload cannot be cut.
    UnknownAlgorithm { name: String },
    /// The streams are encrypted.
    Tls,
    /// A replication connection began before the capture.
    NoBeginning,
    /// A chunk of the lb-tcp transport is not possible.
    Chunk { sequence: u32, len: u32 },
}

impl Problem {
    /// Whether it speaks against the decoder or the capture, not only about the sender's end.
    pub(crate) fn is_failure(&self) -> bool {
        !matches!(self, Problem::CutOff { .. })
    }
}

/// What the decoder tells.
pub(crate) enum Report<'a> {
    Packet(Seen<'a>),
    Problem {
        from: SocketAddr,
        to: SocketAddr,
        problem: Problem,
    },
}

/// Decoder of all replication streams of a capture.
#[derive(Default)]
pub(crate) struct Sessions {
    sessions: Vec<Session>,
    flows: Vec<Flow>,
    /// TCP connections that carry something else.
    pub(crate) others: usize,
    /// Connections that were closed before anything but the first packet was sent.
    pub(crate) attempts: usize,
}

/// What one replication connection agreed on.
struct Session {
    /// Number for people, given when both sides have sent their features.
    number: Option<usize>,
    client: SocketAddr,
    server: SocketAddr,
    features: [Option<ConnectionFeatures>; 2],
    agreed: Option<(u32, Features)>,
    /// Bytes of the integrity digest by sending side; none if the algorithm is not known.
    integrity_len: [Option<u8>; 2],
    /// Streams of the lb-tcp transport, by stream and side.
    balanced: Option<[[Reorder; 2]; 2]>,
    open_flows: usize,
}

/// One TCP connection.
struct Flow {
    client: SocketAddr,
    server: SocketAddr,
    kind: Kind,
    session: Option<usize>,
    halves: [Half; 2],
    closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Not enough bytes yet.
    New,
    Plain(Stream),
    Balanced(Stream),
    Other,
}

/// One direction of a TCP connection.
#[derive(Default)]
struct Half {
    reader: Reader,
    /// lb-tcp: bytes that are not a whole chunk yet.
    chunk: Vec<u8>,
    any: bool,
}

/// One direction of a stream.
#[derive(Default)]
struct Reader {
    /// Bytes that are not a whole packet yet.
    buf: Vec<u8>,
    /// Payload bytes to pass over.
    skip: u64,
    last: Option<Command>,
    stopped: bool,
}

/// One direction of an lb-tcp stream, collected from all paths.
struct Reorder {
    next: u32,
    waiting: BTreeMap<u32, Vec<u8>>,
    reader: Reader,
    ends: Option<(SocketAddr, SocketAddr)>,
}

impl Default for Reorder {
    fn default() -> Self {
        Reorder {
            next: 1,
            waiting: BTreeMap::new(),
            reader: Reader::default(),
            ends: None,
        }
    }
}

impl Session {
    fn new(client: SocketAddr, server: SocketAddr) -> Session {
        Session {
            number: None,
            client,
            server,
            features: [None; 2],
            agreed: None,
            integrity_len: [Some(0); 2],
            balanced: None,
            open_flows: 0,
        }
    }

    /// 0 for the node that is the client of the data connection (lb-tcp: has the lower address).
    fn side_of(&self, sender: IpAddr) -> usize {
        usize::from(sender != self.client.ip())
    }

    fn dialect(&self, side: usize) -> Option<Dialect> {
        let (protocol, features) = self.agreed?;
        Some(Dialect {
            protocol,
            features,
            integrity_len: self.integrity_len[side]?,
        })
    }

    /// Learns from a packet of the data stream. `Err` names an unknown algorithm.
    fn learn(&mut self, packet: &Packet, side: usize) -> Result<(), String> {
        match packet {
            Packet::ConnectionFeatures(features) => self.features[side] = Some(*features),
            Packet::Protocol(protocol) | Packet::ProtocolUpdate(protocol) => {
                self.integrity_len[side] = digest_len(&protocol.integrity_alg);
                if self.integrity_len[side].is_none() {
                    return Err(protocol.integrity_alg.as_bytes().escape_ascii().to_string());
                }
            }
            _ => {}
        }
        if let ([Some(one), Some(other)], None) = (self.features, self.agreed) {
            let max = |side: ConnectionFeatures| match side.protocol_max {
                0 => side.protocol_min,
                newest => newest,
            };
            self.agreed = Some((max(one).min(max(other)), one.features & other.features));
        }
        Ok(())
    }
}

impl Sessions {
    /// Takes what the TCP connections did.
    pub(crate) fn handle(&mut self, event: TcpEvent<'_>, tell: &mut dyn FnMut(Report<'_>)) {
        match event {
            TcpEvent::Opened { id, client, server } => {
                assert_eq!(id.0, self.flows.len(), "connections are numbered in order");
                self.flows.push(Flow {
                    client,
                    server,
                    kind: Kind::New,
                    session: None,
                    halves: Default::default(),
                    closed: false,
                });
            }
            TcpEvent::Bytes {
                id,
                direction,
                bytes,
            } => self.bytes(id, direction, bytes, tell),
            TcpEvent::Closed { id } => self.close(id, tell),
            TcpEvent::Lost { id, direction } => {
                let (from, to) = self.flows[id.0].ends(direction);
                let problem = Problem::TooMuchPending;
                tell(Report::Problem { from, to, problem });
            }
            TcpEvent::Stray { from, to, bytes } => {
                let begins = |magic: &[u8]| bytes.starts_with(magic);
                if begins(&[0x86, 0x20, 0xEC, 0x20]) || begins(&[0x83, 0x74, 0x02, 0x67]) {
                    tell(Report::Problem {
                        from,
                        to,
                        problem: Problem::NoBeginning,
                    });
                }
            }
        }
    }

    /// The capture is over: what was not finished is reported. `missing` tells how many bytes of
    /// a direction the capture lacks.
    pub(crate) fn finish(
        &mut self,
        missing: impl Fn(TcpId, Direction) -> Option<u64>,
        tell: &mut dyn FnMut(Report<'_>),
    ) {
        for index in 0..self.flows.len() {
            for direction in [Direction::FromClient, Direction::FromServer] {
                if let Some(bytes) = missing(TcpId(index), direction)
                    && self.flows[index].is_ours()
                {
                    let (from, to) = self.flows[index].ends(direction);
                    let problem = Problem::Missing { bytes };
                    tell(Report::Problem { from, to, problem });
                    self.flows[index].halves[direction.index()].reader.stopped = true;
                }
            }
            self.close(TcpId(index), tell);
        }
    }

    /// Number of replication connections that came to an agreement.
    pub(crate) fn connections(&self) -> usize {
        self.sessions
            .iter()
            .filter(|session| session.agreed.is_some())
            .count()
    }

    fn bytes(
        &mut self,
        id: TcpId,
        direction: Direction,
        bytes: &[u8],
        tell: &mut dyn FnMut(Report<'_>),
    ) {
        let flow = &mut self.flows[id.0];
        let half = &mut flow.halves[direction.index()];
        match flow.kind {
            Kind::Other => {}
            Kind::New if direction == Direction::FromClient => {
                half.reader.buf.extend_from_slice(bytes);
                self.identify(id, tell);
            }
            // The accepting side of a replication connection never speaks first.
            Kind::New => {
                flow.kind = Kind::Other;
                flow.halves = Default::default();
                self.others += 1;
            }
            Kind::Plain(stream) => {
                half.any = true;
                self.plain(id, direction, stream, bytes, tell);
            }
            Kind::Balanced(stream) => {
                half.any = true;
                half.chunk.extend_from_slice(bytes);
                self.balanced(id, direction, stream, tell);
            }
        }
    }

    /// Looks at the first bytes of the connecting side.
    fn identify(&mut self, id: TcpId, tell: &mut dyn FnMut(Report<'_>)) {
        let flow = &mut self.flows[id.0];
        let first = &flow.halves[0].reader.buf;
        let balanced = first.starts_with(&LbTcpChunk::FIRST.encode());
        if first.len() < 8 || balanced && first.len() < 16 {
            return;
        }
        let head = if balanced { &first[8..] } else { first };
        let Ok(Some(stream)) = decode_initial(head) else {
            flow.kind = Kind::Other;
            flow.halves = Default::default();
            self.others += 1;
            return;
        };
        let used = if balanced { 16 } else { 8 };
        let (from, to) = flow.ends(Direction::FromClient);
        let rest = flow.halves[0].reader.buf.split_off(used);
        flow.halves[0].reader.buf.clear();
        flow.kind = if balanced {
            Kind::Balanced(stream)
        } else {
            Kind::Plain(stream)
        };
        self.attach(id, balanced, stream);
        let packet = match stream {
            Stream::Data => Packet::InitialData,
            Stream::Control => Packet::InitialMeta,
        };
        let header = Header {
            kind: lockstep_format::wire::HeaderKind::H80,
            volume: lockstep_format::units::VolumeNr(0),
            command: packet.command(),
            len: 0,
        };
        tell(Report::Packet(Seen {
            connection: None,
            stream,
            from,
            to,
            header,
            packet: &packet,
        }));
        if !rest.is_empty() {
            self.bytes(id, Direction::FromClient, &rest, tell);
        }
    }

    /// Gives a new connection its session; control connections find theirs later.
    fn attach(&mut self, id: TcpId, balanced: bool, stream: Stream) {
        let flow = &mut self.flows[id.0];
        let (client, server) = (flow.client, flow.server);
        if balanced {
            // All paths of a node pair form one session. Their addresses differ; that the node
            // with the lower address is the same on every path is a habit, not a rule.
            let (low, high) = if client.ip() < server.ip() {
                (client, server)
            } else {
                (server, client)
            };
            let open = self
                .sessions
                .iter()
                .rposition(|session| session.balanced.is_some() && session.open_flows > 0);
            let index = open.unwrap_or(self.sessions.len());
            if open.is_none() {
                let mut session = Session::new(low, high);
                session.balanced = Some(Default::default());
                self.sessions.push(session);
            }
            self.sessions[index].open_flows += 1;
            flow.session = Some(index);
        } else if stream == Stream::Data {
            flow.session = Some(self.sessions.len());
            let mut session = Session::new(client, server);
            session.open_flows = 1;
            self.sessions.push(session);
        }
    }

    /// The session whose control stream this connection is.
    fn find_session(&self, flow: &Flow) -> Option<usize> {
        let ips = |one: SocketAddr, other: SocketAddr| {
            (one.ip().min(other.ip()), one.ip().max(other.ip()))
        };
        let candidates = self.sessions.iter().enumerate().filter(|(_, session)| {
            session.balanced.is_none()
                && session.open_flows > 0
                && session.agreed.is_some()
                && ips(session.client, session.server) == ips(flow.client, flow.server)
        });
        let same_port = |session: &Session| session.server.port() == flow.server.port();
        candidates
            .max_by_key(|(index, session)| (same_port(session), *index))
            .map(|(index, _)| index)
    }

    fn plain(
        &mut self,
        id: TcpId,
        direction: Direction,
        stream: Stream,
        bytes: &[u8],
        tell: &mut dyn FnMut(Report<'_>),
    ) {
        let ends = self.flows[id.0].ends(direction);
        let mut reader = std::mem::take(&mut self.flows[id.0].halves[direction.index()].reader);
        reader.buf_bytes(bytes);
        loop {
            if self.flows[id.0].session.is_none() {
                self.flows[id.0].session = self.find_session(&self.flows[id.0]);
            }
            let session = self.flows[id.0].session;
            if !self.step(&mut reader, session, stream, ends, tell) {
                break;
            }
        }
        self.flows[id.0].halves[direction.index()].reader = reader;
    }

    fn balanced(
        &mut self,
        id: TcpId,
        direction: Direction,
        stream: Stream,
        tell: &mut dyn FnMut(Report<'_>),
    ) {
        let flow = &mut self.flows[id.0];
        let (from, to) = flow.ends(direction);
        let Some(index) = flow.session else { return };
        let session = &mut self.sessions[index];
        let low_sends = from.ip() < to.ip();
        let side = usize::from(!low_sends);
        let Some(streams) = &mut session.balanced else {
            return;
        };
        let order = &mut streams[stream as usize][side];
        order.ends.get_or_insert((from, to));
        let buf = &mut flow.halves[direction.index()].chunk;
        while let Some(chunk) = LbTcpChunk::decode(buf) {
            if chunk.len == 0 || chunk.len > LbTcpChunk::LEN_MAX {
                let problem = Problem::Chunk {
                    sequence: chunk.sequence,
                    len: chunk.len,
                };
                tell(Report::Problem { from, to, problem });
                flow.kind = Kind::Other;
                buf.clear();
                return;
            }
            let end = LbTcpChunk::LEN + chunk.len as usize;
            if buf.len() < end {
                break;
            }
            order
                .waiting
                .insert(chunk.sequence, buf[LbTcpChunk::LEN..end].to_vec());
            buf.drain(..end);
        }
        let mut reader = std::mem::take(&mut order.reader);
        while let Some(bytes) = order.waiting.remove(&order.next) {
            order.next = order.next.wrapping_add(1);
            reader.buf_bytes(&bytes);
        }
        let ends = order.ends.unwrap_or((from, to));
        while self.step(&mut reader, Some(index), stream, ends, tell) {}
        if let Some(streams) = &mut self.sessions[index].balanced {
            streams[stream as usize][side].reader = reader;
        }
    }

    /// Decodes the next packet of a direction. False if more bytes are needed.
    fn step(
        &mut self,
        reader: &mut Reader,
        session: Option<usize>,
        stream: Stream,
        (from, to): (SocketAddr, SocketAddr),
        tell: &mut dyn FnMut(Report<'_>),
    ) -> bool {
        let side = session.map_or(0, |index| self.sessions[index].side_of(from.ip()));
        let dialect = session
            .and_then(|index| self.sessions[index].dialect(side))
            .unwrap_or(Dialect::INITIAL);
        let mut fail = |reader: &mut Reader, problem| {
            reader.stopped = true;
            reader.buf.clear();
            tell(Report::Problem { from, to, problem });
            false
        };
        let (header, packet, used) = match reader.next(stream, &dialect) {
            Ok(Some(next)) => next,
            Ok(None) => return false,
            Err(_) if reader.looks_like_tls() => return fail(reader, Problem::Tls),
            Err(error) => {
                let bytes = reader.buf[..reader.buf.len().min(64)].to_vec();
                return fail(reader, Problem::Undecodable { error, bytes });
            }
        };
        let mut learned = Ok(());
        if let (Stream::Data, Some(index)) = (stream, session) {
            learned = self.sessions[index].learn(&packet, side);
            self.number(index);
        }
        let connection = session.and_then(|index| self.sessions[index].number);
        tell(Report::Packet(Seen {
            connection,
            stream,
            from,
            to,
            header,
            packet: &packet,
        }));
        if let Some(problem) = difference(&header, &packet, &dialect, &reader.buf[..used]) {
            tell(Report::Problem { from, to, problem });
        }
        reader.take(used, header.payload_len(&dialect), header.command);
        if let Err(name) = learned {
            reader.stopped = true;
            tell(Report::Problem {
                from,
                to,
                problem: Problem::UnknownAlgorithm { name },
            });
        }
        true
    }

    /// Numbers the session once it has agreed.
    fn number(&mut self, index: usize) {
        if self.sessions[index].number.is_none() && self.sessions[index].agreed.is_some() {
            let numbered = self
                .sessions
                .iter()
                .filter(|session| session.number.is_some())
                .count();
            self.sessions[index].number = Some(numbered + 1);
        }
    }

    fn close(&mut self, id: TcpId, tell: &mut dyn FnMut(Report<'_>)) {
        let flow = &mut self.flows[id.0];
        if std::mem::replace(&mut flow.closed, true) {
            return;
        }
        match flow.kind {
            Kind::New => self.attempts += 1,
            Kind::Other => {}
            Kind::Plain(_) | Kind::Balanced(_) => {
                self.attempts += usize::from(flow.halves.iter().all(|half| !half.any));
            }
        }
        for direction in [Direction::FromClient, Direction::FromServer] {
            let (from, to) = flow.ends(direction);
            let half = &flow.halves[direction.index()];
            let cut_chunk = (!half.chunk.is_empty()).then_some(Problem::CutOff {
                command: None,
                missing: 0,
            });
            if let (true, Some(problem)) = (flow.is_ours(), half.reader.cut_off().or(cut_chunk)) {
                tell(Report::Problem { from, to, problem });
            }
        }
        if let (Some(index), true) = (flow.session, flow.kind != Kind::Plain(Stream::Control)) {
            let session = &mut self.sessions[index];
            session.open_flows -= 1;
            if session.open_flows == 0 {
                session.end_balanced(tell);
            }
        }
    }
}

impl Session {
    /// The last path is gone: reports what was not delivered.
    fn end_balanced(&mut self, tell: &mut dyn FnMut(Report<'_>)) {
        for order in self.balanced.iter().flatten().flatten() {
            let Some((from, to)) = order.ends else {
                continue;
            };
            if !order.waiting.is_empty() {
                let problem = Problem::MissingChunk {
                    sequence: order.next,
                };
                tell(Report::Problem { from, to, problem });
            } else if let Some(problem) = order.reader.cut_off() {
                tell(Report::Problem { from, to, problem });
            }
        }
    }
}

impl Flow {
    fn ends(&self, direction: Direction) -> (SocketAddr, SocketAddr) {
        match direction {
            Direction::FromClient => (self.client, self.server),
            Direction::FromServer => (self.server, self.client),
        }
    }

    fn is_ours(&self) -> bool {
        matches!(self.kind, Kind::Plain(_) | Kind::Balanced(_))
    }
}

impl Reader {
    /// Takes bytes in, but not the payload that is passed over.
    fn buf_bytes(&mut self, bytes: &[u8]) {
        if self.stopped {
            return;
        }
        let over = self.skip.min(bytes.len() as u64) as usize;
        self.skip -= over as u64;
        self.buf.extend_from_slice(&bytes[over..]);
    }

    /// The next packet and the bytes of its header and fixed part.
    fn next(
        &self,
        stream: Stream,
        dialect: &Dialect,
    ) -> Result<Option<(Header, Packet, usize)>, WireError> {
        let Some(header) = decode_header(&self.buf, stream, dialect)? else {
            return Ok(None);
        };
        let head_len = header.kind.len();
        let end = head_len + header.fixed_len(dialect);
        let Some(body) = self.buf.get(head_len..end) else {
            return Ok(None);
        };
        Ok(Some((header, decode(&header, body, dialect)?, end)))
    }

    /// Removes a packet of `used` bytes and the payload behind it.
    fn take(&mut self, used: usize, payload_len: u32, command: Command) {
        let end = (used + payload_len as usize).min(self.buf.len());
        self.skip = (used + payload_len as usize - end) as u64;
        self.buf.drain(..end);
        self.last = Some(command);
    }

    /// A TLS record of type handshake or application data begins.
    fn looks_like_tls(&self) -> bool {
        matches!(self.buf[..], [0x14..=0x17, 3, 0..=4, ..])
    }

    /// The packet that the end of the stream has cut, if there is one.
    fn cut_off(&self) -> Option<Problem> {
        if self.stopped {
            return None;
        }
        if self.skip > 0 {
            return Some(Problem::CutOff {
                command: self.last,
                missing: self.skip,
            });
        }
        (!self.buf.is_empty()).then_some(Problem::CutOff {
            command: None,
            missing: 0,
        })
    }
}

/// Encodes the packet again and compares with what was captured, except for unchecked pads.
fn difference(
    header: &Header,
    packet: &Packet,
    dialect: &Dialect,
    captured: &[u8],
) -> Option<Problem> {
    let mut encoded = Vec::with_capacity(captured.len());
    encode_with(packet, header.volume, header.kind, dialect, &mut encoded);
    let mut expected = captured.to_vec();
    for range in unchecked(header.command, dialect) {
        let head = header.kind.len();
        if let Some(pad) = expected.get_mut(head + range.start..head + range.end) {
            pad.fill(0);
        }
    }
    if let Packet::CompressedBitmap(bitmap) = packet
        && let Err(what) = same_code(bitmap)
    {
        return Some(Problem::BitmapCode { what });
    }
    let command = header.command;
    (encoded != expected).then(|| Problem::Differs {
        command,
        captured: captured.to_vec(),
        encoded,
    })
}

/// Decodes the runs of a bitmap and codes them again: each run has only one code word.
fn same_code(bitmap: &CompressedBitmap) -> Result<(), String> {
    let mut encoder = RleEncoder::new(bitmap.first_run, bitmap.code.len());
    for run in RleDecoder::new(bitmap) {
        let (_, run) = run.map_err(|error| error.to_string())?;
        if encoder.push(run) == Pushed::Full {
            return Err("the runs need more room than they had".to_owned());
        }
    }
    if encoder.finish() == *bitmap {
        Ok(())
    } else {
        Err("the runs are coded to other bytes".to_owned())
    }
}

/// Bytes of the body that senders may leave undefined (wire.md 1 and 4.2); empty ranges are none.
fn unchecked(command: Command, dialect: &Dialect) -> [std::ops::Range<usize>; 2] {
    use Command as C;
    const NONE: std::ops::Range<usize> = 0..0;
    match command {
        C::OutOfSync | C::RsDeallocated => [12..16, NONE],
        C::DataRequest | C::RsDataRequest | C::RsThinReq | C::CsumRsRequest => [20..24, NONE],
        C::OvRequest | C::OvReply | C::PeersInSync | C::ConfirmStable => [20..24, NONE],
        C::OvResultId => [28..32, NONE],
        C::Barrier => [4..8, NONE],
        C::EnableReplication | C::EnableReplicationNext => [1..4, NONE],
        C::TwopcPrepare | C::TwopcAbort | C::TwopcCommit | C::TwopcPrepRsz => {
            let head = if dialect.features.contains(Features::TWOPC_V2) {
                8..10
            } else {
                NONE
            };
            let tail = if command == C::TwopcPrepRsz {
                30..36
            } else {
                NONE
            };
            [head, tail]
        }
        _ => [NONE, NONE],
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::{Problem, Report, Sessions};
    use crate::inspect::tcp::{Direction, TcpEvent, TcpId};

    const FEATURES: &[u8; 80] = &{
        let mut bytes = [0; 80];
        let head = [
            0x83, 0x74, 0x02, 0x67, 0xff, 0xfe, 0, 72, 0, 0, 0, 86, 0, 0, 0, 0, 0, 0, 0, 124,
        ];
        let mut at = 0;
        while at < head.len() {
            bytes[at] = head[at];
            at += 1;
        }
        bytes
    };

    /// Lets a data connection agree on protocol 124, then the client sends `tail` and ends.
    fn run(tail: &[u8]) -> (usize, Vec<Problem>) {
        let (mut packets, mut problems) = (0, Vec::new());
        let mut tell = |report: Report<'_>| match report {
            Report::Packet(_) => packets += 1,
            Report::Problem { problem, .. } => problems.push(problem),
        };
        let id = TcpId(0);
        let client = SocketAddr::from(([10, 0, 0, 1], 40_000));
        let server = SocketAddr::from(([10, 0, 0, 2], 7700));
        let mut sessions = Sessions::default();
        sessions.handle(TcpEvent::Opened { id, client, server }, &mut tell);
        let mut send = |direction, bytes: &[u8]| {
            for byte in bytes {
                let bytes = std::slice::from_ref(byte);
                sessions.handle(
                    TcpEvent::Bytes {
                        id,
                        direction,
                        bytes,
                    },
                    &mut tell,
                );
            }
        };
        send(
            Direction::FromClient,
            &[0x83, 0x74, 0x02, 0x67, 0xff, 0xf2, 0, 0],
        );
        send(Direction::FromClient, FEATURES);
        send(Direction::FromServer, FEATURES);
        send(Direction::FromClient, tail);
        sessions.handle(TcpEvent::Closed { id }, &mut tell);
        assert_eq!(sessions.connections(), 1);
        (packets, problems)
    }

    #[test]
    fn bytes_may_come_one_by_one() {
        let barrier = [
            0x86, 0x20, 0xec, 0x20, 255, 255, 0, 3, 0, 0, 0, 8, 0, 0, 0, 0,
        ];
        let tail = [&barrier[..], &[1; 8]].concat();
        let (packets, problems) = run(&tail);
        assert_eq!((packets, problems.len()), (4, 0));
        assert!(matches!(run(&tail[..20]).1[..], [Problem::CutOff { .. }]));
    }

    #[test]
    fn bytes_that_are_no_packet_are_reported_once() {
        let (packets, problems) = run(&[0x55; 64]);
        assert_eq!(packets, 3);
        assert!(
            matches!(problems[..], [Problem::Undecodable { .. }]),
            "{problems:?}"
        );
    }

    #[test]
    fn encrypted_streams_are_named() {
        assert!(matches!(
            run(&[0x17, 3, 3, 0, 9, 1, 2, 3, 4]).1[..],
            [Problem::Tls]
        ));
    }
}
