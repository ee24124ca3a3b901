//! Chunks on several paths, as they come and as they must not.

use lockstep_core::event::Stream;
use lockstep_format::units::{Sector, VolumeNr};
use lockstep_format::wire::packet::Data;
use lockstep_format::wire::transport::LbTcpChunk;
use lockstep_format::wire::{self, Dialect, Features, Packet};

use super::{AHEAD_MAX, BUSY_BYTES, ChunkError, Inlet, Paths, QUIET_BYTES, Reassembly};
use crate::pool::IoBuf;
use crate::receive::{Parsed, Receiver, Target};
use crate::ring::Memory;

/// Several paths of one stream, without sockets: what each of them still has to bring.
struct Streams {
    inlets: Vec<Inlet>,
    rest: Vec<Vec<u8>>,
    reassembly: Reassembly,
    receiver: Receiver,
    got: Vec<Whole>,
    random: u64,
}

/// A packet with its payload.
type Whole = (Packet, Vec<u8>);

fn dialect() -> Dialect {
    Dialect::new(122, Features::empty())
}

fn chunk(sequence: u32, bytes: &[u8]) -> Vec<u8> {
    let len = bytes.len() as u32;
    let mut chunk = LbTcpChunk { sequence, len }.encode().to_vec();
    chunk.extend_from_slice(bytes);
    chunk
}

fn ping() -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(
        &Packet::UnplugRemote,
        VolumeNr::NONE,
        &dialect(),
        &mut bytes,
    );
    bytes
}

impl Streams {
    fn new(rest: Vec<Vec<u8>>, seed: u64) -> Streams {
        Streams {
            inlets: rest.iter().map(|_| Inlet::default()).collect(),
            rest,
            reassembly: Reassembly::default(),
            receiver: Receiver::new(Stream::Data),
            got: Vec::new(),
            random: seed,
        }
    }

    fn random(&mut self, below: usize) -> usize {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) as usize % below
    }

    /// Takes packets out until more bytes must come.
    fn take(&mut self, paths: Paths) -> Result<(), ChunkError> {
        loop {
            let alloc = |len| IoBuf::standalone(len).ok().map(IoBuf::share);
            match self.receiver.next(&dialect(), alloc) {
                Parsed::Packet {
                    packet, payload, ..
                } => {
                    let bytes =
                        payload.map(|(buf, len)| buf.with_bytes(0, len as usize, <[u8]>::to_vec));
                    self.got.push((packet, bytes.unwrap_or_default()));
                }
                Parsed::More { .. } => {
                    let (inlets, receiver) = (&mut self.inlets, &mut self.receiver);
                    if !self
                        .reassembly
                        .supply(inlets, |inlet| inlet, paths, receiver)?
                    {
                        return Ok(());
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Some bytes arrive on a path that can take any; `false` if it cannot.
    fn arrive(&mut self, n: usize, most: usize) -> bool {
        let direct = Reassembly::direct(&self.inlets[n], &mut self.receiver);
        let target = match direct {
            Some(target) => target,
            None => match self.inlets[n].target() {
                Some(target) => target,
                None => return false,
            },
        };
        let Target {
            mut memory,
            start,
            len,
        } = target;
        let (start, rest) = (start as usize, &mut self.rest[n]);
        let count = rest.len().min(len as usize).min(most);
        let bytes: Vec<u8> = rest.drain(..count).collect();
        match &mut memory {
            Memory::Bytes(to) => to[start..start + count].copy_from_slice(&bytes),
            Memory::Buf(to) => to.write_at(start, &bytes),
        }
        match memory {
            Memory::Bytes(memory) => {
                assert!(memory.len() <= BUSY_BYTES, "memory of a path is bounded");
                self.inlets[n].received(memory, count);
            }
            Memory::Buf(_) => {
                self.receiver.received(memory, count);
                self.reassembly
                    .received_directly(&mut self.inlets[n], count);
            }
        }
        count > 0
    }

    /// Bytes arrive on paths in any order until all have.
    fn run(&mut self, most: usize) -> Result<(), ChunkError> {
        while self.rest.iter().any(|rest| !rest.is_empty()) {
            let (n, part) = (self.random(self.rest.len()), 1 + self.random(most));
            self.arrive(n, part);
            self.take(Paths::All)?;
        }
        Ok(())
    }
}

/// A stream of packets, cut into chunks that lie on several paths: the paths, and the packets.
fn spread_stream(paths: usize, seed: u64) -> (Vec<Vec<u8>>, Vec<Whole>) {
    let mut source = Streams::new(vec![Vec::new()], seed);
    let (mut bytes, mut packets) = (Vec::new(), Vec::new());
    for n in 0..30u32 {
        let len = [0, 512, 4096, 40_960, 300_032][source.random(5)];
        let packet = match len {
            0 => Packet::UnplugRemote,
            len => Packet::Data(Data {
                sector: Sector(u64::from(n)),
                block_id: Default::default(),
                seq_num: n,
                flags: wire::DataFlags::empty(),
                digest: wire::Digest::EMPTY,
                payload_len: len,
            }),
        };
        let volume = match len {
            0 => VolumeNr::NONE,
            _ => VolumeNr(0),
        };
        wire::encode(&packet, volume, &dialect(), &mut bytes);
        let payload: Vec<u8> = (0..len).map(|at| (at / 7 + n) as u8).collect();
        bytes.extend_from_slice(&payload);
        packets.push((packet, payload));
    }
    let mut on = vec![Vec::new(); paths];
    let (mut rest, mut sequence) = (&bytes[..], 0);
    while !rest.is_empty() {
        let most = [30, 700, 90_000, 400_000][source.random(4)];
        let (now, later) = rest.split_at(rest.len().min(1 + source.random(most)));
        sequence += 1;
        on[source.random(paths)].extend(chunk(sequence, now));
        rest = later;
    }
    (on, packets)
}

#[test]
fn packets_are_whole_and_in_order_however_chunks_lie_on_paths_and_arrive() {
    for seed in 0..40 {
        let (on, packets) = spread_stream(1 + seed as usize % 4, seed);
        let mut streams = Streams::new(on, seed);
        let most = [1000, 20_000, 1 << 20][seed as usize % 3];
        streams.run(most).unwrap();
        assert!(streams.got == packets, "seed {seed}");
        assert!(streams.receiver.is_between_packets());
        assert!(streams.inlets.iter().all(Inlet::is_between_chunks));
    }
}

#[test]
fn what_comes_early_waits_in_bounded_memory_and_holds_its_path_up() {
    let early = chunk(2, &ping().repeat(1 << 16));
    let mut streams = Streams::new(vec![chunk(1, &ping()), early], 0);
    assert!(streams.arrive(1, usize::MAX));
    for _ in 0..3 {
        streams.take(Paths::All).unwrap();
        assert!(!streams.arrive(1, usize::MAX), "its turn has not come");
    }
    assert_eq!(streams.rest[1].len(), 8 + (1 << 20) - QUIET_BYTES);
    assert!(streams.got.is_empty());
    assert!(streams.arrive(0, usize::MAX));
    streams.take(Paths::All).unwrap();
    assert_eq!(streams.got.len(), 1 + (QUIET_BYTES - 8) / 16);
    streams.run(usize::MAX >> 1).unwrap();
    assert_eq!(streams.got.len(), 1 + (1 << 16));
}

#[test]
fn a_header_may_come_byte_by_byte() {
    let bytes = chunk(1, &ping());
    let len = bytes.len();
    let mut streams = Streams::new(vec![bytes, Vec::new()], 0);
    for n in 0..len {
        assert!(streams.got.is_empty(), "after {n} bytes");
        assert!(streams.arrive(0, 1));
        streams.take(Paths::All).unwrap();
    }
    assert_eq!(streams.got.len(), 1);
}

#[test]
fn the_sequence_goes_on_at_zero_after_its_largest_value() {
    let bytes = ping();
    let mut streams = Streams::new(
        vec![
            [chunk(u32::MAX, &bytes[..4]), chunk(1, &bytes[5..])].concat(),
            chunk(0, &bytes[4..5]),
        ],
        3,
    );
    streams.reassembly.next = u32::MAX;
    streams.run(100).unwrap();
    assert_eq!(streams.got.len(), 1);
    assert_eq!(streams.reassembly.next, 2);
}

/// What two paths with these bytes lead to.
fn error_of(one: Vec<u8>, other: Vec<u8>, paths: Paths) -> Option<ChunkError> {
    let mut streams = Streams::new(vec![one, other], 1);
    let mut error = None;
    for n in [0, 1, 0, 1] {
        streams.arrive(n, usize::MAX);
        error = error.or(streams.take(paths).err());
    }
    error
}

#[test]
fn chunks_that_cannot_be_are_refused() {
    let empty = LbTcpChunk {
        sequence: 1,
        len: 0,
    };
    assert_eq!(
        error_of(empty.encode().to_vec(), Vec::new(), Paths::All),
        Some(ChunkError::Empty { sequence: 1 })
    );
    let (sequence, len) = (5, LbTcpChunk::LEN_MAX + 1);
    let large = LbTcpChunk { sequence, len };
    assert_eq!(
        error_of(Vec::new(), large.encode().to_vec(), Paths::All),
        Some(ChunkError::TooLarge { sequence, len })
    );
    // The same one again, on the same path, on another one, or at once on both.
    let (found, next) = (1, 2);
    let one = chunk(1, &ping());
    let again = Some(ChunkError::Behind { found, next });
    let twice = [one.clone(), one.clone()].concat();
    assert_eq!(error_of(twice, Vec::new(), Paths::All), again);
    assert_eq!(error_of(one.clone(), one.clone(), Paths::All), again);
    let mut both = Streams::new(vec![one.clone(), one.clone()], 1);
    assert!(both.arrive(0, usize::MAX) && both.arrive(1, usize::MAX));
    let (found, next) = (1, 1);
    assert_eq!(
        both.take(Paths::All).err(),
        Some(ChunkError::Behind { found, next })
    );
    assert!(both.got.is_empty());
    let found = 2 + AHEAD_MAX;
    assert_eq!(
        error_of(chunk(found, &ping()), Vec::new(), Paths::Some),
        Some(ChunkError::Ahead { found, next: 1 })
    );
}

#[test]
fn a_gap_that_no_path_can_fill_ends_the_stream_and_one_that_a_new_path_can_does_not() {
    let (three, four) = (chunk(3, &ping()), chunk(4, &ping()));
    let missing = error_of(three.clone(), four.clone(), Paths::All);
    assert_eq!(missing, Some(ChunkError::Missing { next: 1 }));
    assert_eq!(error_of(three.clone(), four.clone(), Paths::Some), None);
    assert_eq!(error_of(three, Vec::new(), Paths::All), None);
}
