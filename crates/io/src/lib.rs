//! Does what the core says: shards, rings, buffers, disks and transports.
//!
//! Nothing here reads a DRBD state to decide what to do next; decisions are the core's. Unsafe code
//! is confined to `pool`, `ring` and `disk::sys`, where memory and descriptors meet the kernel.

pub mod disk;
pub mod pool;
pub mod port;
pub mod ring;
pub mod table;
pub mod tcp;
