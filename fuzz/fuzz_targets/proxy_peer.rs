//! A whole proxy engine with an authenticated peer that says anything.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lockstep_proxy::fuzz::peer(data));
