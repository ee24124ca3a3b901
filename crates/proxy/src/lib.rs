//! The WAN proxy: stands between two DRBD nodes, takes what they send at memory speed and moves it
//! over a slow link in order, compressed and exactly once. The core (`core`) decides and knows no
//! IO; the shells (sockets, codec pool, spill, control) do what it says.

mod bench;
mod codec;
mod control;
mod core;
mod daemon;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod live;
mod load;
mod mail;
mod metrics;
mod net;
pub mod plan;
mod room;
mod service;
mod spill;
mod threads;
mod tls;
mod wall;
mod workers;

pub use bench::{BenchOptions, REPLAY_BYTES, Report, bench};
pub use daemon::{
    Answer, Daemon, Options, Request, Security, SessionOption, SharedSecret, rate_option, request,
};
pub use live::{IdentitySource, LogLevel, log_filter};
pub use service::tell_ready;

/// A new private key and its public key, both in hex, for `Security::Keys`.
pub fn generate_keys() -> Result<(String, String), String> {
    let seed = random_bytes()?;
    Ok((tls::hex(&seed), tls::public_of(&seed)?))
}

/// A new shared secret: 256 random bits in hex.
pub fn generate_secret() -> Result<String, String> {
    random_bytes().map(|bytes| tls::hex(&bytes))
}

fn random_bytes() -> Result<[u8; 32], String> {
    use ring::rand::SecureRandom;
    let mut bytes = [0u8; 32];
    ring::rand::SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| "no random numbers")?;
    Ok(bytes)
}
