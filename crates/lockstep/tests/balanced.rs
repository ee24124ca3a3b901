//! The streams of two kernels over two paths (`load-balance-paths yes`) through this project's
//! receiver, and their chunks from its sender.
//!
//! The capture is testdata/captures/9x/33, of DRBD 9.3.3.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

use lockstep_core::event::Stream;
use lockstep_core::time::Instant;
use lockstep_format::units::VolumeNr;
use lockstep_format::wire::transport::LbTcpChunk;
use lockstep_format::wire::{self, Dialect, Features, Packet};
use lockstep_io::pool::{BufRef, IoBuf};
use lockstep_io::reassembly::{Inlet, Paths, Reassembly};
use lockstep_io::receive::{Parsed, Receiver, Target};
use lockstep_io::ring::{Memory, SendList};
use lockstep_io::spread::Spread;
use lockstep_io::tcp::first::Framing;
use lockstep_io::transmit::Transmitter;

/// An address with its port.
type End = ([u8; 4], u16);

/// Where a segment comes from and goes to.
type Ends = (End, End);

/// One direction of a TCP connection.
#[derive(Default)]
struct Flow {
    next: Option<u32>,
    early: BTreeMap<u32, Vec<u8>>,
}

/// What arrives on the flows, in the order of the capture.
fn arrivals() -> Vec<(Ends, Vec<u8>)> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/captures/9x/33-2node-lb-tcp-balanced.pcap.gz");
    let mut bytes = Vec::new();
    let file = std::fs::File::open(file).unwrap();
    flate2::read::GzDecoder::new(file)
        .read_to_end(&mut bytes)
        .unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(word(20), 1, "Ethernet");
    let (mut at, mut flows, mut arrivals) = (24, BTreeMap::<_, Flow>::new(), Vec::new());
    while at < bytes.len() {
        let len = word(at + 8) as usize;
        let frame = &bytes[at + 16..at + 16 + len];
        at += 16 + len;
        let Some((ends, flags, sequence, payload)) = segment(frame) else {
            continue;
        };
        let flow = flows.entry(ends).or_default();
        if flags & 2 != 0 {
            *flow = Flow {
                next: Some(sequence.wrapping_add(1)),
                ..Flow::default()
            };
        } else if !payload.is_empty() {
            flow.early.insert(sequence, payload.to_vec());
        }
        while let Some(next) = flow.next
            && let Some(bytes) = flow.early.remove(&next)
        {
            flow.next = Some(next.wrapping_add(bytes.len() as u32));
            arrivals.push((ends, bytes));
        }
    }
    arrivals
}

/// A TCP segment over IPv4: its ends, flags, sequence and payload.
fn segment(frame: &[u8]) -> Option<(Ends, u8, u32, &[u8])> {
    let ip = frame.get(14..)?;
    if frame[12..14] != [8, 0] || ip[9] != 6 {
        return None;
    }
    let all = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
    let tcp = &ip[usize::from(ip[0] & 15) * 4..all];
    let end = |at: usize, port: usize| -> End {
        let port = u16::from_be_bytes([tcp[port], tcp[port + 1]]);
        (ip[at..at + 4].try_into().unwrap(), port)
    };
    let sequence = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
    let payload = &tcp[usize::from(tcp[12] >> 4) * 4..];
    Some(((end(12, 0), end(16, 2)), tcp[13], sequence, payload))
}

/// One direction of a stream over both paths.
struct Half {
    stream: Stream,
    lanes: Vec<Lane>,
    reassembly: Reassembly,
    receiver: Receiver,
    got: Vec<Whole>,
}

/// One of its connections.
#[derive(Default)]
struct Lane {
    inlet: Inlet,
    /// What came, and how much of it was taken.
    bytes: Vec<u8>,
    taken: usize,
}

/// A packet with its volume and payload.
type Whole = (VolumeNr, Packet, Option<(BufRef, u32)>);

impl Half {
    fn new(stream: Stream) -> Half {
        Half {
            stream,
            lanes: Vec::new(),
            reassembly: Reassembly::default(),
            receiver: Receiver::new(stream),
            got: Vec::new(),
        }
    }

    fn dialect(&self) -> Dialect {
        dialect(self.stream, self.got.len())
    }

    /// Takes what the lanes have, as long as one of them can go on.
    fn go_on(&mut self) {
        while (0..self.lanes.len()).any(|n| self.receive(n)) {
            self.parse();
        }
    }

    fn receive(&mut self, n: usize) -> bool {
        let lane = &mut self.lanes[n];
        let rest = &lane.bytes[lane.taken..];
        if rest.is_empty() {
            return false;
        }
        let direct = Reassembly::direct(&lane.inlet, &mut self.receiver);
        let Some(target) = direct.or_else(|| lane.inlet.target()) else {
            return false;
        };
        let Target {
            mut memory,
            start,
            len,
        } = target;
        let (start, count) = (start as usize, rest.len().min(len as usize));
        match &mut memory {
            Memory::Bytes(to) => to[start..start + count].copy_from_slice(&rest[..count]),
            Memory::Buf(to) => to.write_at(start, &rest[..count]),
        }
        lane.taken += count;
        match memory {
            Memory::Bytes(memory) => lane.inlet.received(memory, count),
            Memory::Buf(_) => {
                self.receiver.received(memory, count);
                self.reassembly.received_directly(&mut lane.inlet, count);
            }
        }
        true
    }

    fn parse(&mut self) {
        loop {
            let dialect = self.dialect();
            let alloc = |len| IoBuf::standalone(len).ok().map(IoBuf::share);
            match self.receiver.next(&dialect, alloc) {
                Parsed::Packet {
                    volume,
                    packet,
                    payload,
                } => self.got.push((volume, packet, payload)),
                Parsed::More { .. } => {
                    let (lanes, receiver) = (&mut self.lanes, &mut self.receiver);
                    let supplied = self.reassembly.supply(
                        lanes,
                        |lane| &mut lane.inlet,
                        Paths::Some,
                        receiver,
                    );
                    if !supplied.unwrap() {
                        return;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// The chunks as the kernel has sent them, by sequence.
    fn chunks(&self) -> BTreeMap<u32, Vec<u8>> {
        let mut chunks = BTreeMap::new();
        for lane in &self.lanes {
            let mut rest = &lane.bytes[..];
            while let Some(chunk) = LbTcpChunk::decode(rest) {
                let (bytes, later) = rest.split_at(LbTcpChunk::LEN + chunk.len as usize);
                chunks.insert(chunk.sequence, bytes.to_vec());
                rest = later;
            }
        }
        chunks
    }
}

/// How the packet behind `before` others is written: the data stream begins with the features.
fn dialect(stream: Stream, before: usize) -> Dialect {
    match (stream, before) {
        (Stream::Data, 0) => Dialect::INITIAL,
        _ => Dialect::new(124, Features::from_bits_retain(0x3ff)),
    }
}

/// Both directions of both streams, after all that the capture has.
fn received() -> Vec<Half> {
    let mut halves: Vec<Half> = Vec::new();
    // Each direction of a connection with its half and the lane in that.
    let mut places: BTreeMap<Ends, (usize, usize)> = BTreeMap::new();
    // The last part of an address names the node.
    let mut names: Vec<(bool, u8)> = Vec::new();
    for (ends, bytes) in arrivals() {
        if let Some((half, lane)) = places.get(&ends) {
            let half = &mut halves[*half];
            half.lanes[*lane].bytes.extend_from_slice(&bytes);
            half.go_on();
            continue;
        }
        // The first packet names the stream of a connection, for both of its directions.
        let stream = match Framing::Chunks.first(&bytes).unwrap().unwrap() {
            wire::Stream::Data => Stream::Data,
            wire::Stream::Control => Stream::Control,
        };
        assert_eq!(bytes.len(), 16, "a first packet is sent alone");
        for ends in [ends, (ends.1, ends.0)] {
            let name = (stream == Stream::Data, ends.0.0[3]);
            let half = names.iter().position(|other| *other == name);
            let half = half.unwrap_or_else(|| {
                names.push(name);
                halves.push(Half::new(stream));
                halves.len() - 1
            });
            places.insert(ends, (half, halves[half].lanes.len()));
            halves[half].lanes.push(Lane::default());
        }
    }
    halves
}

#[test]
fn the_streams_of_two_kernels_come_out_whole() {
    let halves = received();
    assert_eq!(halves.len(), 4);
    let (mut packets, mut both) = (0, 0);
    for half in &halves {
        assert_eq!(half.lanes.len(), 2, "two paths");
        assert!(half.receiver.is_between_packets());
        for lane in &half.lanes {
            assert!(lane.inlet.is_between_chunks() && lane.taken == lane.bytes.len());
        }
        both += usize::from(half.lanes.iter().all(|lane| !lane.bytes.is_empty()));
        // What the packets are written as is what the chunks have, in order.
        let mut written = Vec::new();
        for (n, (volume, packet, payload)) in half.got.iter().enumerate() {
            wire::encode(packet, *volume, &dialect(half.stream, n), &mut written);
            if let Some((buf, len)) = payload {
                buf.with_bytes(0, *len as usize, |bytes| written.extend_from_slice(bytes));
            }
        }
        let chunks = half.chunks();
        let sequences: Vec<u32> = chunks.keys().copied().collect();
        assert_eq!(sequences, Vec::from_iter(1..=chunks.len() as u32));
        let stream: Vec<u8> = chunks
            .values()
            .flat_map(|c| &c[LbTcpChunk::LEN..])
            .copied()
            .collect();
        assert!(written == stream, "{:?}", half.stream);
        packets += half.got.len();
    }
    // With the four first packets these are all that `lockstep inspect wire` finds.
    assert_eq!(packets, 297 - 4);
    assert_eq!(both, 2, "data came over both paths in both directions");
}

/// Each chunk of whole packets, and each payload up to the first cut, leaves this project's sender
/// as it left the kernel.
#[test]
fn chunks_are_the_bytes_that_a_kernel_sends() {
    let mut compared = 0;
    for half in received() {
        let (mut spread, mut transmitter) = (Spread::default(), Transmitter::default());
        let mut list = SendList::default();
        let (mut queued, mut chunk_end) = (0, 0);
        let mut packets = half.got.iter().enumerate().peekable();
        for (sequence, chunk) in half.chunks() {
            chunk_end += chunk.len() - LbTcpChunk::LEN;
            // The packets that begin in the chunk; payload has chunks of its own.
            while let Some((n, (volume, packet, payload))) = packets.next_if(|_| queued < chunk_end)
            {
                let dialect = dialect(half.stream, n);
                let payload = payload.clone().map(|(buf, len)| (buf, 0, len as usize));
                let before = transmitter.queued_bytes();
                transmitter.push(Instant(1), packet, *volume, &dialect, payload, None);
                queued += (transmitter.queued_bytes() - before) as usize;
            }
            // The kernel cuts a payload that is larger than its sockets have room for.
            let room = (chunk.len() - LbTcpChunk::LEN).next_multiple_of(4096);
            let cut = spread.cut(&mut transmitter, &mut list, room);
            if room > 64 << 10 {
                break;
            }
            assert_eq!(cut, Some((sequence, chunk.len())), "chunk {sequence}");
            assert!(list.bytes() == chunk, "chunk {sequence}");
            let count = list.left();
            list.advance(count);
            list.clear();
            compared += 1;
        }
    }
    assert!(compared > 270, "{compared} chunks");
}
