//! Entries for fuzzers: every decoder of bytes that come from the peer proxy or from an operator,
//! and a whole engine with a peer that is authenticated and says anything. None may panic, and none
//! may hold more memory than was granted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::codec;
use crate::core::config::{DaemonOptions, Dial, LinkConfig, LinkOptions, parse_addr, parse_bytes};
use crate::core::engine::Engine;
use crate::core::frame::{
    CHUNK_MAX, Frame, FrameReader, HEADER_LEN, Header, Item, Kind, WireReader,
};
use crate::core::identity::Peer;
use crate::core::message::{Ack, Attach, Hello, HelloAck, LaneOpen, Open, Stats};
use crate::core::plugin::{CODEC_COUNT, Plugin};
use crate::core::shaper::Schedule;
use crate::core::stats::Took;
use crate::core::time::Instant;
use crate::core::{CarrierKind, Input, LinkId, LocalId, Output, SpillRef, WireId};

/// What every codec job is said to have taken.
const TOOK: Took = Took {
    wall: Duration::from_micros(9),
    cpu: Duration::from_micros(9),
};

/// The frame parser, once in one piece and once in small ones: both must say the same.
pub fn frames(data: &[u8]) {
    lanes(data);
    let read = |step: usize| {
        let mut reader = FrameReader::default();
        let mut found = Vec::new();
        for mut piece in data.chunks(step.max(1)) {
            while !piece.is_empty() {
                match reader.push(piece) {
                    Ok((used, frame)) => {
                        assert!(used > 0 || frame.is_some(), "the parser stands still");
                        piece = &piece[used..];
                        found.extend(frame);
                    }
                    Err(error) => return (found, Some(error)),
                }
            }
        }
        (found, None)
    };
    let (whole, end) = read(data.len());
    let (pieces, other_end) = read(1 + data.len() % 37);
    assert_eq!((&whole, end), (&pieces, other_end));
    for frame in whole {
        assert!(frame.payload.len() <= data.len() && frame.header.raw_len as usize <= CHUNK_MAX);
        assert_eq!(frame.header.encode().len(), HEADER_LEN);
    }
}

/// The parser of a TCP connection with its lanes, in one piece and in small ones.
fn lanes(data: &[u8]) {
    let read = |step: usize| {
        let mut reader = WireReader::default();
        let (mut found, mut came) = (Vec::new(), BTreeMap::new());
        for piece in data.chunks(step) {
            let cut = reader.cut(piece);
            for item in cut.items {
                match item {
                    Item::Session(frame) => found.push((None, frame)),
                    Item::Lane {
                        lane,
                        bytes,
                        frames,
                    } => {
                        *came.entry(lane).or_insert(0) += bytes;
                        found.extend(frames.into_iter().map(|frame| (Some(lane), frame)));
                    }
                }
            }
            if cut.error.is_some() {
                return (found, came, cut.error);
            }
        }
        (found, came, None)
    };
    let whole = read(data.len().max(1));
    let (found, came, error) = read(1 + data.len() % 37);
    assert_eq!((&whole.0, whole.2), (&found, error));
    assert!(error.is_some() || whole.1 == came);
    assert!(came.values().sum::<usize>() <= data.len());
}

/// Every message that travels in a frame.
pub fn messages(data: &[u8]) {
    let _ = Hello::decode(data).map(|message| Hello::decode(&message.encode()));
    let _ = HelloAck::decode(data);
    let _ = Attach::decode(data);
    let _ = Open::decode(data);
    let _ = LaneOpen::decode(data).map(|message| LaneOpen::decode(&message.encode()));
    let _ = Stats::decode(data);
    if let Ok(list) = Ack::decode_list(data) {
        assert!(list.len() <= data.len());
    }
}

/// Every decompressor: at most the declared length comes out.
pub fn decoders(data: &[u8]) {
    let Some((head, rest)) = data.split_first_chunk::<4>() else {
        return;
    };
    let raw_len = usize::from(u16::from_le_bytes([head[1], head[2]])) << (head[3] % 6);
    let payload = Arc::new(rest.to_vec().into());
    let before = vec![Arc::new(vec![7; 5000].into())];
    for codec in 0..=CODEC_COUNT as u8 {
        for prefix in [&Vec::new(), &before] {
            // A wrong checksum must not hide what the decoder does.
            if let Ok(raw) = codec::decode(codec, raw_len, 0, &payload, prefix) {
                assert_eq!(raw.len(), raw_len);
            }
        }
    }
    let _ = codec::prefix_len(rest);
}

/// What an operator or drbdadm may write.
pub fn texts(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let words: Vec<&str> = text.split_whitespace().collect();
    let _ = Plugin::parse(&words);
    let _ = Schedule::parse(&text);
    let _ = parse_bytes(&text);
    let _ = parse_addr("address", &text);
    let _ = crate::plan::parse_bits(&text);
    let _ = crate::plan::parse_ms(&text);
    let _ = serde_json::from_slice::<crate::Request>(data);
    let mut options = LinkOptions::default();
    for pair in words.chunks(2) {
        if let [option, value] = pair {
            let _ = options.set(option, value);
        }
    }
}

/// A session between two engines, into which the bytes mix frames of their own.
pub fn peer(data: &[u8]) {
    let mut pair = Pair::connected();
    let mut rest = data;
    while let Some((op, more)) = rest.split_first_chunk::<6>() {
        rest = more;
        let [what, a, b, c, d, e] = *op;
        let len = usize::from(e).min(rest.len());
        let (body, more) = rest.split_at(len);
        rest = more;
        pair.now += u64::from(d) * 1_000_000;
        match what % 8 {
            0 => pair.local(b"DRBD's bytes, and more of them"),
            1 => pair.tick(),
            _ => {
                let kind = Kind::ALL[usize::from(what) % Kind::ALL.len()];
                let header = Header {
                    code: a,
                    flags: b & 7,
                    stream: u32::from(c % 8),
                    offset: u64::from(d) << (b % 24),
                    raw_len: (u32::from(a) << (c % 13)).min(CHUNK_MAX as u32),
                    payload_len: body.len() as u32,
                    raw_crc: crc32c::crc32c(body),
                    ..Header::session(kind)
                };
                let payload = Arc::new(body.to_vec().into());
                pair.inject(a % 2 == 0, Frame { header, payload });
            }
        }
        pair.settle();
        pair.check();
    }
}

const NEAR: usize = 0;
const FAR: usize = 1;

/// Two engines whose frames arrive at once; the fuzzer speaks in the place of `NEAR`.
struct Pair {
    now: u64,
    engines: [Engine; 2],
    links: [LinkId; 2],
    /// The other end of each carrier.
    pipes: BTreeMap<(usize, WireId), (usize, WireId)>,
    kinds: BTreeMap<(usize, WireId), CarrierKind>,
    local: LocalId,
    disk: BTreeMap<SpillRef, Vec<u8>>,
}

impl Pair {
    fn connected() -> Pair {
        let addr = |text: &str| parse_addr("address", text).expect("a constant address");
        let options = DaemonOptions {
            memory_max_bytes: 16 << 20,
            jobs_max: 2,
            ..DaemonOptions::default()
        };
        let mut engines = [5u8, 6].map(|byte| Engine::new(Instant(0), options.clone(), [byte; 32]));
        let outside = ["192.0.2.1:7715", "192.0.2.2:7715"];
        let links = [NEAR, FAR].map(|node| {
            let config = LinkConfig {
                name: "r0".into(),
                inside: addr("127.0.0.1:7815"),
                peer_outside: addr(outside[1 - node]),
                my_outside: addr(outside[node]),
                local_drbd: addr("127.0.0.1:7915"),
                options: LinkOptions {
                    dial: [Dial::Always, Dial::Never][node],
                    ..LinkOptions::default()
                },
            };
            engines[node]
                .add_link(Instant(0), config)
                .expect("the configuration is good")
        });
        let mut pair = Pair {
            now: 1,
            engines,
            links,
            pipes: BTreeMap::new(),
            kinds: BTreeMap::new(),
            local: LocalId(0),
            disk: BTreeMap::new(),
        };
        pair.settle();
        pair.local = pair.engines[NEAR].accept_local(Instant(pair.now), pair.links[NEAR]);
        pair.local(b"\x83\x74\x02\x67\xff\xf2\0\0");
        pair.settle();
        assert!(!pair.pipes.is_empty(), "there is a session");
        pair
    }

    fn feed(&mut self, node: usize, input: Input) {
        self.engines[node].handle(Instant(self.now), input);
    }

    fn local(&mut self, bytes: &[u8]) {
        if self.engines[NEAR].read_allowance(Instant(self.now), self.local) >= bytes.len() {
            self.feed(NEAR, Input::LocalData(self.local, bytes.to_vec()));
        }
    }

    fn tick(&mut self) {
        self.now += 300_000_000;
        for node in [NEAR, FAR] {
            self.feed(node, Input::Tick);
        }
    }

    /// A frame on a wire of `FAR`, which may also be a fresh one, or on one of its lanes.
    fn inject(&mut self, control: bool, frame: Frame) {
        let wanted = if control {
            CarrierKind::Control
        } else {
            CarrierKind::Bulk
        };
        let known = self.pipes.iter().find_map(|((node, wire), from)| {
            (*node == FAR && self.kinds.get(from) == Some(&wanted)).then_some(*wire)
        });
        let wire = known.unwrap_or_else(|| {
            let listener = self.engines[FAR]
                .config(self.links[FAR])
                .expect("the link stays")
                .my_outside;
            self.engines[FAR].accept_wire(Instant(self.now), listener, Peer::default())
        });
        let lanes = self.engines[FAR].lanes_of(wire);
        match lanes.first() {
            Some(lane) if frame.header.flags & 0x80 == 0 => {
                self.feed(FAR, Input::LaneFrame(wire, *lane, frame));
            }
            _ => self.feed(FAR, Input::WireFrame(wire, frame)),
        }
    }

    /// Does everything that the engines want, until they want nothing more.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            let mut idle = true;
            for node in [NEAR, FAR] {
                while let Some(output) = self.engines[node].poll_output() {
                    idle = false;
                    self.perform(node, output);
                }
            }
            if idle {
                return;
            }
        }
        panic!("the engines do not come to rest");
    }

    fn perform(&mut self, node: usize, output: Output) {
        match output {
            Output::Dial { wire, kind, .. } => {
                let other = 1 - node;
                let listener = self.engines[other]
                    .config(self.links[other])
                    .expect("the link stays")
                    .my_outside;
                let accepted =
                    self.engines[other].accept_wire(Instant(self.now), listener, Peer::default());
                self.pipes.insert((node, wire), (other, accepted));
                self.pipes.insert((other, accepted), (node, wire));
                self.kinds.insert((node, wire), kind);
                self.feed(node, Input::WireUp(wire, Peer::default()));
            }
            Output::SendSession(wire, frame) => {
                if let Some((other, wire)) = self.pipes.get(&(node, wire)).copied() {
                    self.feed(other, Input::WireFrame(wire, frame));
                }
            }
            Output::Send {
                wire,
                lane,
                carrier,
                frame,
            } => {
                let len = frame.wire_len();
                self.feed(node, Input::CarrierSent(carrier, len));
                if let Some((other, wire)) = self.pipes.get(&(node, wire)).copied() {
                    let received = len + HEADER_LEN;
                    self.feed(other, Input::LaneReceived(wire, lane, received));
                    self.feed(other, Input::LaneFrame(wire, lane, frame));
                }
            }
            Output::CloseLane(wire, lane) => {
                if let Some((other, wire)) = self.pipes.get(&(node, wire)).copied() {
                    let mut frame = Frame::message(Kind::LaneClose, Vec::new());
                    frame.header.stream = lane;
                    self.feed(other, Input::WireFrame(wire, frame));
                }
            }
            Output::CloseWire(wire) => {
                if let Some((other, end)) = self.pipes.remove(&(node, wire)) {
                    self.pipes.remove(&(other, end));
                    self.feed(other, Input::WireDown(end, "closed".into()));
                }
            }
            Output::ConnectLocal { local, .. } => self.feed(node, Input::LocalConnected(local)),
            Output::WriteLocal(local, bytes) => {
                self.feed(node, Input::LocalWritten(local, bytes.len()));
            }
            Output::Encode {
                job,
                spec,
                raw,
                prefix,
                ..
            } => {
                let coded = codec::encode(&spec, &raw, &prefix);
                self.feed(node, Input::Encoded(job, coded, TOOK));
            }
            Output::Decode {
                job,
                codec,
                raw_len,
                crc,
                payload,
                prefix,
            } => {
                let raw = codec::decode(codec, raw_len as usize, crc, &payload, &prefix);
                self.feed(node, Input::Decoded(job, raw, TOOK));
            }
            Output::SpillWrite { job, .. } => {
                self.feed(node, Input::SpillWritten(job, Err("no disk".into())));
            }
            Output::SpillRead { job, from } => {
                let found = self.disk.get(&from).cloned().ok_or("no disk".to_string());
                self.feed(node, Input::SpillRead(job, found));
            }
            Output::WantWrite(_)
            | Output::WantRead(_)
            | Output::ShutdownLocal(_)
            | Output::CloseLocal(..)
            | Output::SpillFree(_)
            | Output::Log(..) => {}
        }
    }

    /// Nothing beyond what was granted is held, whatever the peer says.
    fn check(&self) {
        let state = self.engines[FAR].snapshot(Instant(self.now));
        assert!(
            state.memory_used_bytes <= state.memory_max_bytes * 2,
            "{} bytes are held",
            state.memory_used_bytes
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::message::sample_hello;
    use crate::core::rng::Rng;

    /// Good input, damaged: what a coverage-guided fuzzer would begin with.
    fn mutated(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut data = seeds[rng.below(seeds.len() as u64) as usize].clone();
        for _ in 0..rng.below(6) {
            let at = rng.below(data.len() as u64 + 1) as usize;
            match rng.below(5) {
                0 if at < data.len() => data[at] ^= 1 << rng.below(8),
                1 => data.truncate(at),
                2 => data.insert(at, rng.next() as u8),
                3 => {
                    let other = &seeds[rng.below(seeds.len() as u64) as usize];
                    data.extend_from_slice(&other[..other.len().min(at)]);
                }
                _ if at < data.len() => data[at] = rng.next() as u8,
                _ => {}
            }
        }
        data
    }

    fn smoke(entry: fn(&[u8]), seeds: &[Vec<u8>], rounds: usize) {
        let mut rng = Rng::new(7);
        for _ in 0..rounds {
            entry(&mutated(&mut rng, seeds));
            let noise: Vec<u8> = (0..rng.below(300)).map(|_| rng.next() as u8).collect();
            entry(&noise);
        }
    }

    fn good_messages() -> Vec<(Kind, Vec<u8>)> {
        let open = Open {
            class: 1,
            first: *b"\x83\x74\x02\x67\xff\xf2\0\0",
            window_end: 1 << 20,
        };
        vec![
            (Kind::Hello, sample_hello().encode()),
            (Kind::Open, open.encode()),
            (Kind::Data, vec![9; 700]),
            (Kind::Ping, vec![1; 8]),
            (Kind::Ack, vec![0; 64]),
        ]
    }

    #[test]
    fn fuzz_smoke_of_the_frame_parser() {
        let seeds: Vec<Vec<u8>> = good_messages()
            .into_iter()
            .map(|(kind, payload)| {
                let frame = Frame::message(kind, payload);
                [&frame.header.encode()[..], &frame.payload].concat()
            })
            .collect();
        smoke(frames, &seeds, 3000);
    }

    #[test]
    fn fuzz_smoke_of_every_message() {
        let seeds: Vec<Vec<u8>> = good_messages().into_iter().map(|(_, body)| body).collect();
        smoke(messages, &seeds, 3000);
    }

    #[test]
    fn fuzz_smoke_of_every_decompressor() {
        let raw = Arc::new(b"what a disk holds, again and again; ".repeat(40).into());
        let mut seeds = Vec::new();
        for text in [
            "none",
            "lz4",
            "zstd level 3",
            "zlib level 6",
            "lzma level 1",
            "zstd level 1 history 1M",
        ] {
            let words: Vec<&str> = text.split(' ').collect();
            let choice = Plugin::parse(&words).unwrap().choice;
            let crate::core::plugin::Choice::Fixed(spec) = choice else {
                panic!("{text} is fixed")
            };
            let coded = codec::encode(&spec, &raw, &Vec::new());
            let len = (raw.len() as u16).to_le_bytes();
            seeds.push([&[0, len[0], len[1], 0][..], &coded.payload].concat());
        }
        smoke(decoders, &seeds, 600);
    }

    #[test]
    fn fuzz_smoke_of_what_operators_write() {
        let seeds = [
            "zstd level 3 history 32M",
            "lzma level 9 dict-size 1M lc 3 lp 0 pb 2 mf bt4 mode normal",
            "mon-fri/08:00-18:00=2M,*=0",
            "memlimit 512M bwlimit 2M carriers 4 max-lag 20 dial never",
            "fd00::2:7715",
            "{\"commands\":[\"show\"],\"json\":true}",
            "20mbit",
        ]
        .map(|text| text.as_bytes().to_vec());
        smoke(texts, &seeds, 3000);
    }

    #[test]
    fn fuzz_smoke_of_a_peer_that_says_anything() {
        // Each kind of frame with a good body first; then anything.
        let seeds: Vec<Vec<u8>> = (2..40u8)
            .map(|what| {
                let mut out = Vec::new();
                for (number, (_, body)) in good_messages().into_iter().enumerate() {
                    let len = body.len().min(255) as u8;
                    out.extend([what, number as u8, 1, 2, 0, len]);
                    out.extend(&body[..usize::from(len)]);
                    out.extend([0, 0, 0, 0, 0, 0]);
                    out.extend([1, 0, 0, 0, 0, 0]);
                }
                out
            })
            .collect();
        smoke(peer, &seeds, 400);
    }
}
