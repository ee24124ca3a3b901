//! From a byte stream to packets: what arrived, cut by the codec, payload in buffers of its own.
//!
//! The dialect is asked before every packet, because the core may change it with each one. Payload
//! that arrived together with its header is copied; the rest of a large one is received straight
//! into its buffer. Memory is bounded: a KiB for an idle stream, growing with its traffic, and given
//! back when the owner says that there is none ([`Receiver::rest`]).

use lockstep_core::event::Stream;
use lockstep_format::units::VolumeNr;
use lockstep_format::wire::{self, Dialect, Packet};

use crate::pool::BufRef;
use crate::ring::Memory;

/// Receive memory of a quiet stream in bytes. A longer packet gets more.
const QUIET_BYTES: usize = 1 << 10;
/// How many times as much memory a stream gets whose receives fill what it has.
const GROWTH: usize = 8;
/// Receive memory of a busy stream in bytes.
const BUSY_BYTES: usize = 256 << 10;
/// Receive memory of a busy control stream in bytes.
const BUSY_CONTROL_BYTES: usize = 64 << 10;
/// Bytes that are taken ahead of a packet's end from what arrived elsewhere.
const FEED_BYTES: usize = 8 << 10;
/// From so many missing bytes on, payload is received without a copy.
pub const DIRECT_BYTES: usize = 32 << 10;

/// The receiving half of a stream.
#[derive(Debug)]
pub struct Receiver {
    stream: Stream,
    memory: Vec<u8>,
    /// Bytes `start..end` of the memory are not parsed yet.
    start: usize,
    end: usize,
    payload: Option<Incoming>,
    /// Bytes of the next receive's memory.
    wanted: usize,
}

/// A packet whose payload is on its way.
#[derive(Debug)]
struct Incoming {
    volume: VolumeNr,
    packet: Packet,
    buf: BufRef,
    filled: usize,
    len: usize,
}

/// What the bytes so far give.
#[derive(Debug)]
pub enum Parsed {
    /// A whole packet.
    Packet {
        /// The header's volume number.
        volume: VolumeNr,
        /// The packet.
        packet: Packet,
        /// Its payload and the payload's length; it starts at byte 0 of the buffer.
        payload: Option<(BufRef, u32)>,
    },
    /// More bytes must arrive. `partial`: there is a part of a packet.
    More {
        /// Bytes are left that are no whole packet.
        partial: bool,
    },
    /// A buffer is needed and there is none: call again when memory came back.
    NoBuffer,
    /// The peer broke the protocol.
    Bad(wire::WireError),
}

/// A receive to start: where to, from which byte on, and how many bytes.
#[derive(Debug)]
pub struct Target {
    /// The memory; give it back with [`Receiver::received`].
    pub memory: Memory,
    /// First byte.
    pub start: u32,
    /// Most bytes.
    pub len: u32,
}

impl Receiver {
    /// A stream without bytes.
    pub fn new(stream: Stream) -> Receiver {
        Receiver {
            stream,
            memory: vec![0; QUIET_BYTES],
            start: 0,
            end: 0,
            payload: None,
            wanted: QUIET_BYTES,
        }
    }

    /// Where the next bytes go. Only when no packet can be parsed any more and no receive runs.
    pub fn target(&mut self) -> Target {
        if self.wants_payload()
            && let Some(payload) = &self.payload
        {
            let (start, len) = (payload.filled as u32, (payload.len - payload.filled) as u32);
            return Target {
                memory: Memory::Buf(payload.buf.clone()),
                start,
                len,
            };
        }
        self.memory.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        if self.memory.len() < self.wanted {
            self.memory.resize(self.wanted, 0);
        } else if self.memory.len() > self.wanted && self.end == 0 {
            self.memory = vec![0; self.wanted];
        }
        let memory = Memory::Bytes(std::mem::take(&mut self.memory));
        let Memory::Bytes(bytes) = &memory else {
            unreachable!("made one line above")
        };
        let len = (bytes.len() - self.end) as u32;
        Target {
            start: self.end as u32,
            len,
            memory,
        }
    }

    /// A receive into a target brought `count` bytes.
    pub fn received(&mut self, memory: Memory, count: usize) {
        match memory {
            Memory::Bytes(bytes) => {
                self.memory = bytes;
                self.end += count;
                if self.end == self.memory.len() {
                    // More was waiting.
                    let most = match self.stream {
                        Stream::Data => BUSY_BYTES,
                        Stream::Control => BUSY_CONTROL_BYTES,
                    };
                    self.wanted = most.min(self.wanted * GROWTH);
                }
            }
            Memory::Buf(_) => {
                if let Some(payload) = &mut self.payload {
                    payload.filled += count;
                }
            }
        }
    }

    /// Takes bytes that arrived elsewhere, and tells how many: payload that is due at once goes
    /// straight to its buffer. Only when no packet can be parsed any more and no receive runs.
    pub fn feed(&mut self, bytes: &[u8]) -> usize {
        if let Some(payload) = &mut self.payload
            && self.start == self.end
        {
            let count = bytes.len().min(payload.len - payload.filled);
            payload.buf.write_at(payload.filled, &bytes[..count]);
            payload.filled += count;
            return count;
        }
        self.memory.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let room = self.memory.len().max(FEED_BYTES);
        let count = bytes.len().min(room - self.end);
        if self.memory.len() < self.end + count {
            self.memory.resize(self.end + count, 0);
        }
        self.memory[self.end..self.end + count].copy_from_slice(&bytes[..count]);
        self.end += count;
        count
    }

    /// Whether so much payload is missing that it is worth to be received without a copy.
    pub fn wants_payload(&self) -> bool {
        let missing = self.payload.as_ref().map_or(0, |p| p.len - p.filled);
        self.start == self.end && missing >= DIRECT_BYTES
    }

    /// The next packet, decoded in `dialect`. `alloc` gives memory for payload.
    pub fn next(
        &mut self,
        dialect: &Dialect,
        alloc: impl FnOnce(usize) -> Option<BufRef>,
    ) -> Parsed {
        if self.payload.is_some() {
            return self.next_of_payload();
        }
        let bytes = &self.memory[self.start..self.end];
        let partial = !bytes.is_empty();
        let header = match wire::decode_header(bytes, wire_stream(self.stream), dialect) {
            Ok(Some(header)) => header,
            Ok(None) => return Parsed::More { partial },
            Err(error) => return Parsed::Bad(error),
        };
        let (head, fixed) = (header.kind.len(), header.fixed_len(dialect));
        let Some(body) = bytes.get(head..head + fixed) else {
            self.make_room_for(head + fixed);
            return Parsed::More { partial };
        };
        let packet = match wire::decode(&header, body, dialect) {
            Ok(packet) => packet,
            Err(error) => return Parsed::Bad(error),
        };
        let len = packet.payload_len() as usize;
        if len == 0 {
            self.start += head + fixed;
            return Parsed::Packet {
                volume: header.volume,
                packet,
                payload: None,
            };
        }
        let Some(buf) = alloc(len) else {
            return Parsed::NoBuffer;
        };
        self.start += head + fixed;
        self.payload = Some(Incoming {
            volume: header.volume,
            packet,
            buf,
            filled: 0,
            len,
        });
        self.next_of_payload()
    }

    /// Has more memory than a quiet stream needs, and nothing in it.
    pub fn may_rest(&self) -> bool {
        self.wanted > QUIET_BYTES && self.is_between_packets()
    }

    /// The stream is quiet: the next receive gets as little memory as a new stream's.
    pub fn rest(&mut self) {
        self.wanted = QUIET_BYTES;
    }

    /// Whether the stream is between two packets.
    pub fn is_between_packets(&self) -> bool {
        self.payload.is_none() && self.start == self.end
    }

    fn next_of_payload(&mut self) -> Parsed {
        let Some(payload) = &mut self.payload else {
            return Parsed::More { partial: false };
        };
        let here = (self.end - self.start).min(payload.len - payload.filled);
        payload
            .buf
            .write_at(payload.filled, &self.memory[self.start..self.start + here]);
        payload.filled += here;
        self.start += here;
        if payload.filled < payload.len {
            return Parsed::More { partial: true };
        }
        let Some(Incoming {
            volume,
            packet,
            buf,
            len,
            ..
        }) = self.payload.take()
        else {
            return Parsed::More { partial: false };
        };
        Parsed::Packet {
            volume,
            packet,
            payload: Some((buf, len as u32)),
        }
    }

    /// The codec bounds fixed parts, so this stays small.
    fn make_room_for(&mut self, len: usize) {
        if self.memory.len() < len {
            self.memory.resize(len, 0);
        }
    }
}

fn wire_stream(stream: Stream) -> wire::Stream {
    match stream {
        Stream::Data => wire::Stream::Data,
        Stream::Control => wire::Stream::Control,
    }
}

#[cfg(test)]
mod tests {
    use lockstep_core::event::Stream;
    use lockstep_format::units::{Sector, VolumeNr};
    use lockstep_format::wire::packet::{Barrier, Data};
    use lockstep_format::wire::{self, Dialect, Features, Packet};

    use super::{DIRECT_BYTES, Parsed, Receiver, Target};
    use crate::pool::{BufRef, IoBuf};
    use crate::ring::Memory;

    fn dialect() -> Dialect {
        Dialect::new(122, Features::empty())
    }

    fn data(len: u32, sector: u64) -> Packet {
        Packet::Data(Data {
            sector: Sector(sector),
            block_id: Default::default(),
            seq_num: 7,
            flags: wire::DataFlags::empty(),
            digest: wire::Digest::EMPTY,
            payload_len: len,
        })
    }

    fn payload(len: usize, salt: u8) -> Vec<u8> {
        (0..len).map(|n| (n / 5) as u8 ^ salt).collect()
    }

    /// A packet with its volume and payload.
    type Whole = (VolumeNr, Packet, Vec<u8>);

    /// A stream with packets of all sorts: bytes, and what must come out.
    fn stream(sizes: &[usize]) -> (Vec<u8>, Vec<Whole>) {
        let (mut bytes, mut expected) = (Vec::new(), Vec::new());
        for (n, size) in sizes.iter().enumerate() {
            let volume = VolumeNr(n as u16);
            let packet = match size {
                0 => Packet::Barrier(Barrier { barrier: n as u32 }),
                size => data(*size as u32, n as u64 * 8),
            };
            wire::encode(&packet, volume, &dialect(), &mut bytes);
            let payload = payload(*size, n as u8);
            bytes.extend_from_slice(&payload);
            expected.push((volume, packet, payload));
        }
        (bytes, expected)
    }

    fn alloc(len: usize) -> Option<BufRef> {
        IoBuf::standalone(len).ok().map(IoBuf::share)
    }

    fn give(receiver: &mut Receiver, bytes: &mut &[u8], most: usize) {
        let Target {
            mut memory,
            start,
            len,
        } = receiver.target();
        let (start, count) = (start as usize, bytes.len().min(len as usize).min(most));
        let (now, later) = bytes.split_at(count);
        match &mut memory {
            Memory::Bytes(to) => to[start..start + count].copy_from_slice(now),
            Memory::Buf(to) => to.write_at(start, now),
        }
        receiver.received(memory, count);
        *bytes = later;
    }

    fn take_all(receiver: &mut Receiver, got: &mut Vec<Whole>) -> bool {
        loop {
            match receiver.next(&dialect(), alloc) {
                Parsed::Packet {
                    volume,
                    packet,
                    payload,
                } => {
                    let bytes =
                        payload.map(|(buf, len)| buf.with_bytes(0, len as usize, <[u8]>::to_vec));
                    got.push((volume, packet, bytes.unwrap_or_default()));
                }
                Parsed::More { partial } => return partial,
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn packets_are_whole_wherever_the_stream_is_cut() {
        let (bytes, expected) = stream(&[0, 512, 0, 0, 1024]);
        for cut in 0..=bytes.len() {
            let mut receiver = Receiver::new(Stream::Data);
            let mut got = Vec::new();
            for mut part in [&bytes[..cut], &bytes[cut..]] {
                while !part.is_empty() {
                    give(&mut receiver, &mut part, usize::MAX);
                }
                let partial = take_all(&mut receiver, &mut got);
                assert_eq!(partial, !receiver.is_between_packets(), "cut at {cut}");
            }
            assert!(got == expected, "cut at {cut}");
            assert!(receiver.is_between_packets());
        }
    }

    #[test]
    fn packets_are_whole_when_bytes_come_one_by_one_or_in_odd_pieces() {
        let sizes = [512, 0, DIRECT_BYTES + 1024, 0, 1 << 20, 4096, 0];
        let (bytes, expected) = stream(&sizes);
        for most in [997, 65_537, usize::MAX] {
            let mut receiver = Receiver::new(Stream::Data);
            let (mut got, mut rest) = (Vec::new(), &bytes[..]);
            while !rest.is_empty() {
                give(&mut receiver, &mut rest, most);
                take_all(&mut receiver, &mut got);
            }
            assert!(got == expected, "pieces of {most}");
        }
        let (bytes, expected) = stream(&[0, 512, 0]);
        let mut receiver = Receiver::new(Stream::Data);
        let (mut got, mut rest) = (Vec::new(), &bytes[..]);
        while !rest.is_empty() {
            give(&mut receiver, &mut rest, 1);
            take_all(&mut receiver, &mut got);
        }
        assert!(got == expected);
    }

    #[test]
    fn a_busy_stream_gets_more_memory_and_a_quiet_one_gives_it_back() {
        let (bytes, expected) = stream(&[4096; 300]);
        let mut receiver = Receiver::new(Stream::Data);
        let (mut got, mut rest, mut largest) = (Vec::new(), &bytes[..], 0);
        while !rest.is_empty() {
            let before = rest.len();
            give(&mut receiver, &mut rest, usize::MAX);
            largest = largest.max(before - rest.len());
            take_all(&mut receiver, &mut got);
        }
        assert!(got == expected);
        assert_eq!(largest, super::BUSY_BYTES);
        assert!(receiver.may_rest());
        receiver.rest();
        assert!(!receiver.may_rest());
        let target = receiver.target();
        assert_eq!(target.len as usize, super::QUIET_BYTES);
        let Memory::Bytes(memory) = target.memory else {
            panic!("no payload is due");
        };
        assert_eq!(memory.capacity(), super::QUIET_BYTES);
    }

    #[test]
    fn a_packet_waits_for_memory_and_nothing_is_lost() {
        let (bytes, expected) = stream(&[4096, 0]);
        let mut receiver = Receiver::new(Stream::Data);
        let mut rest = &bytes[..];
        give(&mut receiver, &mut rest, usize::MAX);
        for _ in 0..3 {
            assert!(matches!(
                receiver.next(&dialect(), |_| None),
                Parsed::NoBuffer
            ));
        }
        let mut got = Vec::new();
        take_all(&mut receiver, &mut got);
        while !rest.is_empty() {
            give(&mut receiver, &mut rest, usize::MAX);
            take_all(&mut receiver, &mut got);
        }
        assert!(got == expected);
    }

    #[test]
    fn the_dialect_may_change_between_two_packets() {
        let mut bytes = Vec::new();
        wire::encode(&Packet::Ping, VolumeNr::NONE, &Dialect::INITIAL, &mut bytes);
        wire::encode(&Packet::Ping, VolumeNr::NONE, &dialect(), &mut bytes);
        let mut receiver = Receiver::new(Stream::Control);
        let mut rest = &bytes[..];
        give(&mut receiver, &mut rest, usize::MAX);
        for dialect in [Dialect::INITIAL, dialect()] {
            let parsed = receiver.next(&dialect, |_| None);
            assert!(
                matches!(
                    parsed,
                    Parsed::Packet {
                        packet: Packet::Ping,
                        ..
                    }
                ),
                "{parsed:?}"
            );
        }
    }

    #[test]
    fn nonsense_is_an_error() {
        let mut receiver = Receiver::new(Stream::Data);
        let mut rest = &[0x55; 64][..];
        give(&mut receiver, &mut rest, usize::MAX);
        assert!(matches!(receiver.next(&dialect(), alloc), Parsed::Bad(_)));
    }
}
