//! The fuzzers' entry functions over mutated test vectors, the same ones at every run.
//!
//! Real fuzzing needs a nightly compiler (see `/fuzz`); this finds what a day of it would find in
//! its first seconds, everywhere.

mod fuzz_entry;

use lockstep_format::wire::{Command, HeaderKind};

const VECTORS: &str = include_str!("../../../testdata/wire/vectors.hex");

/// The vectors as bytes.
fn corpus() -> Vec<Vec<u8>> {
    let mut vectors: Vec<String> = Vec::new();
    for line in VECTORS.lines() {
        if line.starts_with('V') {
            vectors.push(String::new());
        } else if let (Some(hex), Some(vector)) = (line.strip_prefix("  "), vectors.last_mut()) {
            vector.push_str(hex);
        }
    }
    let byte = |hex: &str, at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    vectors
        .iter()
        .map(|hex| (0..hex.len()).step_by(2).map(|at| byte(hex, at)).collect())
        .collect()
}

/// A small generator with a fixed seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Bytes that choose a dialect in which much is possible, then a changed vector.
fn mutate(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[random.below(corpus.len())].clone();
    match random.below(4) {
        // Another command with a length of its own, long header.
        0 if bytes.len() >= 16 => {
            let command = Command::ALL[random.below(Command::ALL.len())].to_wire();
            bytes[6..8].copy_from_slice(&command.to_be_bytes());
            let body = (bytes.len() - 16) as u32;
            bytes[8..12].copy_from_slice(&body.to_be_bytes());
        }
        // The same in a short header.
        1 if bytes.len() >= 16 => {
            let command = Command::ALL[random.below(Command::ALL.len())].to_wire();
            bytes[4..6].copy_from_slice(&command.to_be_bytes());
            let body = (bytes.len() - 8) as u16;
            bytes[6..8].copy_from_slice(&body.to_be_bytes());
        }
        2 => bytes.truncate(random.below(bytes.len() + 1)),
        _ => {
            let other = &corpus[random.below(corpus.len())];
            let tail = random.below(other.len());
            bytes.extend_from_slice(&other[tail..]);
        }
    }
    for _ in 0..random.below(4) {
        let (at, value) = (random.below(bytes.len()), random.next() as u8);
        if let Some(byte) = bytes.get_mut(at) {
            *byte = if value & 1 == 0 {
                *byte ^ 1 << (value >> 5)
            } else {
                value
            };
        }
    }
    let choice = random.next();
    // Three of four: newest version, no digest, every feature; the rest: anything.
    let mut out = if choice & 3 == 0 {
        choice.to_be_bytes()[2..].to_vec()
    } else {
        vec![15, (choice >> 8) as u8 & 0x80, 0xFF, 0xFF, 0xFF, 0xFF]
    };
    assert_eq!(out.len(), fuzz_entry::CHOICE_LEN);
    out.extend_from_slice(&bytes);
    out
}

fn decode_with(kind: HeaderKind, seed: u64) {
    let corpus = corpus();
    assert_eq!(corpus.len(), 52);
    let mut random = Random(seed);
    for _ in 0..100_000 {
        let bytes = mutate(&mut random, &corpus);
        fuzz_entry::wire_decode(kind, &bytes);
    }
}

#[test]
fn no_bytes_behind_a_short_header_break_the_decoder() {
    decode_with(HeaderKind::H80, 0x80);
}

#[test]
fn no_bytes_behind_a_medium_header_break_the_decoder() {
    decode_with(HeaderKind::H95, 0x95);
}

#[test]
fn no_bytes_behind_a_long_header_break_the_decoder() {
    decode_with(HeaderKind::H100, 0x100);
}

#[test]
fn no_bytes_break_the_bitmap_code() {
    let mut random = Random(7);
    for _ in 0..100_000 {
        let len = random.below(40);
        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        fuzz_entry::vli(&bytes);
    }
}

/// The mutations reach what they are meant to reach; else the tests above would prove nothing.
#[test]
fn mutated_vectors_reach_most_commands() {
    use lockstep_format::wire::{Dialect, Features, Stream, decode, decode_header};
    let corpus = corpus();
    let mut random = Random(0x100);
    let dialect = Dialect::new(124, Features::all());
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..100_000 {
        let bytes = mutate(&mut random, &corpus);
        let bytes = &bytes[fuzz_entry::CHOICE_LEN..];
        for stream in [Stream::Data, Stream::Control] {
            let Ok(Some(header)) = decode_header(bytes, stream, &dialect) else {
                continue;
            };
            if decode(&header, &bytes[header.kind.len()..], &dialect).is_ok() {
                seen.insert(header.command);
            }
        }
    }
    assert!(seen.len() >= 65, "{}: {seen:?}", seen.len());
}
