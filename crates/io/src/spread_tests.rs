//! What is queued, as chunks for several paths.

use lockstep_core::event::Tag;
use lockstep_core::time::Instant;
use lockstep_format::units::{Sector, VolumeNr};
use lockstep_format::wire::packet::Data;
use lockstep_format::wire::transport::LbTcpChunk;
use lockstep_format::wire::{self, Dialect, Features, Packet};

use super::{PART_BYTES, PART_BYTES_MAX, Spread};
use crate::pool::{BufRef, IoBuf};
use crate::ring::SendList;
use crate::transmit::Transmitter;

fn dialect() -> Dialect {
    Dialect::new(122, Features::empty())
}

fn payload(len: usize) -> BufRef {
    let mut buf = IoBuf::standalone(len).unwrap();
    buf.iter_mut()
        .enumerate()
        .for_each(|(at, byte)| *byte = (at / 5) as u8);
    buf.share()
}

fn push(to: &mut Transmitter, len: usize, tag: u64) {
    let packet = match len {
        0 => Packet::UnplugRemote,
        len => Packet::Data(Data {
            sector: Sector(8),
            block_id: Default::default(),
            seq_num: 1,
            flags: wire::DataFlags::empty(),
            digest: wire::Digest::EMPTY,
            payload_len: len as u32,
        }),
    };
    let payload = (len > 0).then(|| (payload(len), 0, len));
    let volume = match len {
        0 => VolumeNr::NONE,
        _ => VolumeNr(0),
    };
    let tag = Some(Tag(tag));
    to.push(Instant(1), &packet, volume, &dialect(), payload, tag);
}

/// All that is queued, cut for paths with this room: sequences with bytes, and what each path gets.
fn cut_all(
    spread: &mut Spread,
    from: &mut Transmitter,
    rooms: &[usize],
) -> (Vec<(u32, usize)>, Vec<SendList>) {
    let mut lists: Vec<SendList> = rooms.iter().map(|_| SendList::default()).collect();
    let mut chunks = Vec::new();
    for n in (0..rooms.len()).cycle() {
        let Some(chunk) = spread.cut(from, &mut lists[n], rooms[n]) else {
            break;
        };
        chunks.push(chunk);
    }
    (chunks, lists)
}

#[test]
fn headers_and_payload_are_chunks_of_their_own_as_from_a_kernel() {
    let (mut spread, mut from) = (Spread::default(), Transmitter::default());
    push(&mut from, 0, 1);
    push(&mut from, 4096, 2);
    push(&mut from, 0, 3);
    let (chunks, lists) = cut_all(&mut spread, &mut from, &[1 << 20, 1 << 20]);
    // Unplug and the data's header, payload, unplug.
    let head = 16 + 40;
    assert_eq!(chunks, [(1, 8 + head), (2, 8 + 4096), (3, 8 + 16)]);
    assert_eq!(lists[0].left(), 8 + head + 8 + 16);
    assert_eq!(lists[1].left(), 8 + 4096);
    let bytes = lists[0].bytes();
    let first = LbTcpChunk {
        sequence: 1,
        len: head as u32,
    };
    assert_eq!(bytes[..8], first.encode());
    let (mut unplug, mut at) = (Vec::new(), 8);
    wire::encode(
        &Packet::UnplugRemote,
        VolumeNr::NONE,
        &dialect(),
        &mut unplug,
    );
    assert_eq!(bytes[at..at + 16], unplug);
    at += head;
    assert_eq!(bytes[at..at + 8], [0, 0, 0, 3, 0, 0, 0, 16]);
    assert_eq!(bytes[at + 8..], unplug);
    assert_eq!(
        lists[1].bytes()[8..],
        payload(4096).with_bytes(0, 4096, <[u8]>::to_vec)
    );
}

#[test]
fn payload_is_cut_where_a_path_has_no_more_room() {
    let (mut spread, mut from) = (Spread::default(), Transmitter::default());
    let len = 1 << 20;
    push(&mut from, len, 1);
    let rooms = [49_152 + 17, usize::MAX, 0];
    let (chunks, lists) = cut_all(&mut spread, &mut from, &rooms);
    assert_eq!(chunks[0], (1, 48));
    assert_eq!(chunks[1], (2, 8 + PART_BYTES_MAX));
    assert_eq!(
        chunks[2],
        (3, 8 + PART_BYTES),
        "without room it is the least"
    );
    assert_eq!(chunks[3], (4, 8 + 49_152));
    // What the paths have, put together by sequence, is the payload.
    let mut parts = std::collections::BTreeMap::new();
    for list in lists {
        let bytes = list.bytes();
        let mut rest = &bytes[..];
        while let Some(chunk) = LbTcpChunk::decode(rest) {
            let (part, later) = rest[8..].split_at(chunk.len as usize);
            parts.insert(chunk.sequence, part.to_vec());
            rest = later;
        }
    }
    let sequences: Vec<u32> = parts.keys().copied().collect();
    assert_eq!(sequences, Vec::from_iter(1..=chunks.len() as u32));
    let stream: Vec<u8> = parts.into_values().flatten().collect();
    assert!(stream[40..] == payload(len).with_bytes(0, len, <[u8]>::to_vec));
}

#[test]
fn a_packet_has_left_when_all_chunks_before_its_end_have() {
    let (mut spread, mut from) = (Spread::default(), Transmitter::default());
    push(&mut from, 4096, 1);
    push(&mut from, 0, 2);
    let (chunks, _lists) = cut_all(&mut spread, &mut from, &[1 << 20]);
    assert_eq!(chunks.len(), 3);
    let mut left = |sequence| {
        let bytes = spread.left(sequence);
        from.progress(Instant(2), bytes);
        std::iter::from_fn(|| from.next_sent()).collect::<Vec<_>>()
    };
    assert_eq!(left(3), []);
    assert_eq!(left(2), []);
    assert_eq!(left(1), [Tag(1), Tag(2)]);
    assert_eq!(from.queued_bytes(), 0);
    assert_eq!(from.waiting_since(), None);
    // What is queued later goes on with the sequence.
    push(&mut from, 0, 3);
    let (chunks, _lists) = cut_all(&mut spread, &mut from, &[1 << 20]);
    assert_eq!(chunks, [(4, 8 + 16)]);
}

#[test]
fn the_sequence_goes_on_at_zero_after_its_largest_value() {
    let (mut spread, mut from) = (Spread::default(), Transmitter::default());
    spread.next = u32::MAX;
    push(&mut from, 4096, 1);
    push(&mut from, 0, 2);
    let (chunks, _lists) = cut_all(&mut spread, &mut from, &[1 << 20]);
    let sequences: Vec<u32> = chunks.iter().map(|chunk| chunk.0).collect();
    assert_eq!(sequences, [u32::MAX, 0, 1]);
    assert_eq!(spread.left(0), 0);
    assert_eq!(spread.left(u32::MAX), 40 + 4096);
    assert_eq!(spread.left(1), 16);
}
