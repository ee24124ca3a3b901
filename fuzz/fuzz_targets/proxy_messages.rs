//! Every message between two proxies.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lockstep_proxy::fuzz::messages(data));
