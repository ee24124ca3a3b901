//! Packets of a hostile peer behind a header of kind 100.
#![no_main]

#[allow(dead_code)] // Each target calls its own entry.
#[path = "../../crates/format/tests/fuzz_entry/mod.rs"]
mod fuzz_entry;

use lockstep_format::wire::HeaderKind;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_entry::wire_decode(HeaderKind::H100, data));
