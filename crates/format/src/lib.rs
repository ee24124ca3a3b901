//! Byte and text layouts that Lockstep does not own: wire packets, metadata, configuration.
//!
//! Pure parsing and encoding; nothing here decides anything or touches the outside world.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

pub mod conf;
pub mod disk;
pub mod units;
pub mod wire;
