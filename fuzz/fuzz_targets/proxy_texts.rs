//! What operators write for the proxy.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lockstep_proxy::fuzz::texts(data));
