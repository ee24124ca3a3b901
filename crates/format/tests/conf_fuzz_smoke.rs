//! The fuzzers' entry functions for the configuration over mutated files, the same ones at every
//! run.

mod fuzz_entry_conf;

const FILES: [&[u8]; 4] = [
    include_bytes!("../../../testdata/conf/all.conf"),
    include_bytes!("../../../testdata/conf/example.conf"),
    include_bytes!("../../../testdata/conf/managed.conf"),
    include_bytes!("../../../testdata/conf/web.show"),
];

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

#[test]
fn mutated_configurations_never_panic_and_print_the_same_twice() {
    const PIECES: [&[u8]; 12] = [
        b"{",
        b"}",
        b";",
        b"\"",
        b"[",
        b"#",
        b"4294967296",
        b"no-",
        b"skip",
        b"\\",
        b"\xff",
        b"\n",
    ];
    let mut random = Random(0x1234_5678_9abc_def1);
    for round in 0..1000 {
        let mut bytes = FILES[round % FILES.len()].to_vec();
        for _ in 0..=random.below(4) {
            let at = random.below(bytes.len());
            match random.below(4) {
                0 => bytes.truncate(at.max(1)),
                1 => {
                    let end = (at + random.below(40)).min(bytes.len());
                    bytes.drain(at..end);
                    if bytes.is_empty() {
                        bytes.push(b' ');
                    }
                }
                _ => {
                    let piece = PIECES[random.below(PIECES.len())];
                    bytes.splice(at..at, piece.iter().copied());
                }
            }
        }
        fuzz_entry_conf::file(&bytes);
    }
    for file in FILES {
        fuzz_entry_conf::file(file);
    }
}

#[test]
fn any_value_of_an_option_is_refused_or_printed_as_it_is_read() {
    const SEEDS: [&str; 12] = [
        "0",
        "1",
        "yes",
        "no",
        "16k",
        "8192s",
        "4G",
        "majority",
        "C",
        "18446744073709551616",
        "1e9",
        "-1",
    ];
    let mut random = Random(0xfeed_beef_0bad_cafe);
    for round in 0..4000 {
        let mut bytes = SEEDS[round % SEEDS.len()].as_bytes().to_vec();
        for _ in 0..random.below(3) {
            let at = random.below(bytes.len() + 1);
            bytes.insert(at, b"0123456789kKMGs-\" \\"[random.below(19)]);
        }
        fuzz_entry_conf::value(&bytes);
    }
}
