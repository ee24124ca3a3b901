//! Every decompressor of the proxy.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lockstep_proxy::fuzz::decoders(data));
