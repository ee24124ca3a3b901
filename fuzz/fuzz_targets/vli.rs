//! The run-length code of compressed bitmaps, in both directions.
#![no_main]

#[allow(dead_code)] // Each target calls its own entry.
#[path = "../../crates/format/tests/fuzz_entry/mod.rs"]
mod fuzz_entry;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_entry::vli(data));
