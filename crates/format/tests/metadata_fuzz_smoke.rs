//! The metadata fuzzers' entry functions over mutated vectors, the same ones at every run.

mod fuzz_entry_disk;
mod metadata_vectors;

use metadata_vectors::{all, text};

/// A small generator with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound.max(1)
    }
}

/// Changes a few bytes, preferring values at the borders.
fn mutate(random: &mut Random, bytes: &mut [u8], hot: usize) {
    const BORDERS: [u8; 8] = [0, 1, 2, 0x1f, 0x20, 0x7f, 0x80, 0xff];
    for _ in 0..1 + random.below(4) {
        let limit = if random.below(2) == 0 {
            hot
        } else {
            bytes.len()
        };
        let at = random.below(limit.min(bytes.len()));
        if let Some(byte) = bytes.get_mut(at) {
            *byte = match random.below(3) {
                0 => *byte ^ 1 << random.below(8),
                _ => BORDERS[random.below(8)],
            };
        }
    }
}

#[test]
fn mutated_superblocks_and_logs_never_panic() {
    let mut random = Random(0x6c6f_636b);
    let vectors = all();
    for vector in vectors.iter().filter(|v| v.json.get("md_offset").is_some()) {
        for (_, image) in vector.images() {
            let block = image.block(vector.number("md_offset") as u64);
            for _ in 0..150 {
                let mut bytes = block;
                mutate(&mut random, &mut bytes, 400);
                fuzz_entry_disk::superblock(&bytes);
            }
            let ring = image.read(vector.number("al_offset_byte") as u64, 8 * 4096);
            for _ in 0..6 {
                let mut bytes = ring.clone();
                mutate(&mut random, &mut bytes, 40);
                if random.below(4) == 0 {
                    // Blocks at other places, as after misdirected writes.
                    let (from, to) = (random.below(8), random.below(8));
                    bytes.copy_within(from * 4096..(from + 1) * 4096, to * 4096);
                }
                fuzz_entry_disk::activity_log(&bytes);
            }
        }
    }
}

#[test]
fn mutated_dumps_never_panic() {
    let mut random = Random(0x7374_6570);
    for name in [
        "c100-v09-int-64m-p1.dump",
        "c120-v08-int-64m.dump",
        "r308-v09-known-bits.dump",
    ] {
        let original = text(name).into_bytes();
        for round in 0..1500 {
            let mut bytes = original.clone();
            mutate(&mut random, &mut bytes, original.len());
            if round % 3 == 0 {
                bytes.truncate(random.below(original.len()));
            }
            if round % 5 == 0 {
                let at = random.below(bytes.len());
                bytes.splice(at..at, *b"999999999999999999 times ");
            }
            fuzz_entry_disk::dump_text(&bytes);
        }
    }
}

#[test]
fn mutated_generations_never_panic() {
    const PIECES: [&str; 8] = ["::", ":1", ":0", ":2", "F", "-", "é", "0123456789ABCDEF0"];
    const LIST: &str = "1122334455667789:99887766554433FF:AAAAAAAAAAAAAAA0:BBBBBBBBBBBBBBB0:\
                        1:1:1:0:1:0:0:1:0:0:0:1";
    let mut random = Random(0x6765_6e73);
    let vectors = all();
    let with_superblock = vectors.iter().filter(|v| v.json.get("md_offset").is_some());
    for vector in with_superblock {
        let images = vector.images();
        let Some((_, image)) = images.first() else {
            continue;
        };
        let block = image.block(vector.number("md_offset") as u64);
        for _ in 0..20 {
            let mut list = LIST.to_owned();
            for _ in 0..random.below(4) {
                let at = random.below(list.len());
                match (random.below(3), list.is_char_boundary(at)) {
                    (0, true) => list.truncate(at),
                    (_, true) => list.insert_str(at, PIECES[random.below(PIECES.len())]),
                    (_, false) => {}
                }
            }
            let mut bytes = block.to_vec();
            bytes.extend_from_slice(list.as_bytes());
            fuzz_entry_disk::generations(&bytes);
        }
    }
}
