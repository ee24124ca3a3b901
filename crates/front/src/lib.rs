//! What gives a volume to its users: the NBD server and the mountable device.
//!
//! Front ends decide nothing about replication. They turn their protocol's requests into requests
//! of `lockstep_io::port` and completions into replies.

#![deny(unsafe_code)]

pub mod apart;
pub mod block;
pub mod closes;
pub mod device;
mod fuse;
pub mod gate;
pub mod hold;
mod links;
mod loopdev;
pub mod nbd;
pub mod ram;
mod sys;
pub mod ublk;
mod usage;

pub use loopdev::LoopNumber;
pub use usage::{BlockAccess, BlockNumber, Usage};
