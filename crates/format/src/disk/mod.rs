//! On-disk metadata: superblocks (v09, v08), activity log, bitmap, and where they lie.
//!
//! Pure layout: this module decodes, checks and encodes; it never decides when something is
//! written and never does I/O. Facts and section numbers are those of `docs/spec/metadata.md`.
//!
//! A metadata area has four parts: one 4 KiB superblock, the activity log (a ring of 4 KiB
//! transactions), the bitmap (one slot per peer, interleaved) and, with internal metadata, the
//! data before them. [`layout::Layout`] says where each part is.

pub mod al;
pub mod any;
pub mod bitmap;
mod crc32c;
pub mod dump;
mod error;
pub mod gi;
pub mod layout;
pub mod pmem;
pub mod store;
pub mod v08;
pub mod v09;

pub use error::{DiskError, LayoutError, Magic};

/// Bytes of a superblock, of an activity-log transaction and of any metadata I/O unit.
pub const BLOCK_BYTES: usize = 4096;
/// Sectors of a 4 KiB metadata block.
pub const BLOCK_SECTORS: u64 = 8;
/// Bytes of a sector, whatever the device's logical block size is.
pub const SECTOR_BYTES: u64 = 512;
/// Peer entries of a v09 superblock: node ids 0..=31.
pub const PEERS_MAX: usize = 32;
/// Upper limit of the bitmap slots chosen at create-md.
pub const MAX_BITMAP_SLOTS: u8 = 31;
/// History UUIDs of a v09 superblock, newest first.
pub const HISTORY_UUIDS: usize = 32;
/// Largest device: 2^41 sectors, 1 PiB.
pub const MAX_DEVICE_SECTORS: u64 = 1 << 41;
/// Number of activity-log extents that a fresh superblock names (section 3).
pub const CREATE_AL_EXTENTS: u32 = 257;
