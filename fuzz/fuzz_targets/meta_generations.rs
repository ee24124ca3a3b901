//! Lists of generations for `set-gi` with any bytes, on superblocks with any bytes.
#![no_main]

#[allow(dead_code)] // Each target calls its own entry.
#[path = "../../crates/format/tests/fuzz_entry_disk/mod.rs"]
mod fuzz_entry_disk;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_entry_disk::generations(data));
