//! The wire protocol: packets, headers, flags, state words and the run-length bitmap code.
//!
//! The layouts are those of `docs/spec/wire.md` (cited as "wire.md" with a section number).
//! Decoding is total: no byte string of a peer panics, and no length that a peer names is used to
//! take memory before it was checked. Payload of application and resync data is never owned here:
//! a packet says `payload_len`, and the driver moves the bytes.
//!
//! A reader of a stream asks for the header until it is whole, then holds
//! [`Header::fixed_len`] bytes in memory, decodes them, and moves [`Header::payload_len`] bytes of
//! bulk to where they belong:
//!
//! ```
//! use lockstep_format::units::VolumeNr;
//! use lockstep_format::wire::packet::Barrier;
//! use lockstep_format::wire::{Dialect, Features, Packet, Stream, decode, decode_header, encode};
//!
//! let dialect = Dialect::new(124, Features::TRIM | Features::WSAME);
//! let packet = Packet::Barrier(Barrier { barrier: 7 });
//! let mut bytes = Vec::new();
//! encode(&packet, VolumeNr::NONE, &dialect, &mut bytes);
//!
//! assert_eq!(decode_header(&bytes[..9], Stream::Data, &dialect)?, None);
//! let header = decode_header(&bytes, Stream::Data, &dialect)?.expect("16 bytes are there");
//! let body = &bytes[header.kind.len()..];
//! assert_eq!((header.fixed_len(&dialect), header.payload_len(&dialect)), (8, 0));
//! assert_eq!(decode(&header, body, &dialect)?, packet);
//! # Ok::<(), lockstep_format::wire::WireError>(())
//! ```

pub mod alg;
pub mod command;
pub mod decode;
pub mod encode;
pub mod error;
pub mod flags;
pub mod header;
pub mod packet;
pub mod state;
pub mod transport;
pub mod vli;

pub use command::{Command, Stream};
pub use decode::decode;
pub use encode::{encode, encode_with};
pub use error::WireError;
pub use flags::{
    AfterSb, ConnFlags, DataFlags, DeviceDescFlags, Features, OvResultCode, ReplicationProtocol,
    TwopcFlags, UuidFlags,
};
pub use header::{Dialect, Header, HeaderKind, decode_header, decode_initial};
pub use packet::{BlockId, Digest, Packet};
pub use state::{
    ConnState, DiskNumbering, DiskState, PeerState, ReplState, Role, StateChange, StateWord,
};

/// Magic of an 8-byte header with a 16-bit length.
pub const MAGIC_80: u32 = 0x8374_0267;
/// Magic of an 8-byte header with a 32-bit length.
pub const MAGIC_95: u16 = 0x835A;
/// Magic of a 16-byte header with a volume number.
pub const MAGIC_100: u32 = 0x8620_EC20;

/// Oldest protocol version that is spoken (8.3 and 8.4 peers announce it as their minimum).
pub const PROTOCOL_MIN: u32 = 86;
/// Newest protocol version of the 8.x family.
pub const PROTOCOL_MAX_84: u32 = 101;
/// Oldest protocol version of the 9.x family that is spoken; 102..=117 are refused.
pub const PROTOCOL_MIN_9: u32 = 118;
/// Newest protocol version that is spoken.
pub const PROTOCOL_MAX: u32 = 124;

/// Largest header in bytes.
pub const HEADER_LEN_MAX: usize = 16;
/// Largest payload of a control packet in bytes.
pub const CONTROL_LEN_MAX: u32 = 32;
/// Largest bitmap packet in bytes, header included.
pub const BITMAP_PACKET_LEN: u32 = 4096;
/// Most bytes of one write, read or resync request at protocol 100 and later.
pub const BIO_LEN_MAX: u32 = 1 << 20;
/// Most bytes of one request at protocols 95..=99.
pub const BIO_LEN_MAX_P95: u32 = 1 << 17;
/// Most bytes of one request at protocols up to 94.
pub const BIO_LEN_MAX_P80: u32 = 1 << 15;
/// Most bytes of one discard or zero-out with [`Features::WSAME`].
pub const DISCARD_LEN_MAX: u32 = 128 << 20;
/// Most bytes of one discard or zero-out without [`Features::WSAME`].
pub const DISCARD_LEN_MAX_OLD: u32 = 4 << 20;
/// Most bytes of a digest that travels in a packet.
pub const DIGEST_LEN_MAX: usize = 64;
/// Bytes of an authentication challenge.
pub const CHALLENGE_LEN: usize = 64;
/// Size of an algorithm name field, terminating NUL included.
pub const ALG_NAME_LEN: usize = 64;
/// Code number of the run-length code in a compressed bitmap; there is no other.
pub(crate) const RLE_VLI_BITS: u8 = 2;
/// History UUIDs that a 9.x peer sends and that a receiver keeps.
pub const HISTORY_UUIDS_MAX: usize = 32;

/// Most bytes of one write, read or resync request at agreed version `protocol`.
pub const fn bio_len_max(protocol: u32) -> u32 {
    match protocol {
        0..=94 => BIO_LEN_MAX_P80,
        95..=99 => BIO_LEN_MAX_P95,
        _ => BIO_LEN_MAX,
    }
}
