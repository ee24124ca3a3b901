//! The frame parser of the proxy.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lockstep_proxy::fuzz::frames(data));
