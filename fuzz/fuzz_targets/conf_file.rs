//! Files of the configuration with any bytes.
#![no_main]

#[allow(dead_code)] // Each target calls its own entry.
#[path = "../../crates/format/tests/fuzz_entry_conf/mod.rs"]
mod fuzz_entry_conf;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_entry_conf::file(data));
