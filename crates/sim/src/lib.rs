//! Lockstep's deterministic simulator: clusters of the real replication core in virtual time.
//!
//! One seed gives everything. See `world` for the machinery, `swarm` for random worlds, `history`
//! and `check` for what must hold, and `scenario` for the words that tests are written in.

mod absence;
mod acks;
mod asking;
mod at_rest;
mod branches;
mod buffers;
mod cache_note;
mod calm;
pub mod check;
mod claims;
mod cover;
pub mod crash_points;
pub mod cuts;
mod digest;
pub mod disk;
pub mod drive;
pub mod extras;
pub mod faults;
mod front;
pub mod handlers;
mod heirs;
pub mod history;
mod io;
mod legal;
mod limits;
pub mod marks;
mod migrate;
mod moved;
mod net;
mod noted;
mod openers;
pub mod operator;
mod pace;
mod packets;
pub mod pair;
pub mod plan;
#[cfg(feature = "planted")]
pub mod planted;
pub mod promises;
pub mod rng;
mod rot;
pub mod scenario;
pub mod shrink;
pub mod soak;
pub mod stories;
pub mod story;
pub mod swarm;
mod takeover;
pub mod themes;
pub mod turns;
pub mod variety;
pub mod watch;
pub mod words;
pub mod world;
