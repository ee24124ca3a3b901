//! Does what the core says: shards, rings, buffers, disks and transports.
//!
//! Nothing here reads a DRBD state to decide what to do next; decisions are the core's. Unsafe code
//! is confined to `pool`, `ring`, `disk::sys`, `disk::pmem`, `tcp::socket` and `tcp::info`, where
//! memory and descriptors meet the kernel.

mod arena;
pub mod digest;
pub mod disk;
pub mod pool;
pub mod port;
pub mod reassembly;
pub mod receive;
pub mod ring;
pub mod shard;
pub mod spread;
pub mod table;
pub mod tcp;
mod timers;
pub mod transmit;
