//! The NBD protocol's numbers and layouts: magics, options, commands, headers of requests and
//! replies. Pure encode and decode over slices; it keeps no state and decides nothing.
//!
//! Everything on the wire is big endian. The names follow the protocol document's, without the
//! `NBD_` prefix.

/// First eight bytes of every server.
pub(crate) const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes of a newstyle server, and the start of each option.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of each option reply.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of a request with a compact header.
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a request with an extended header.
pub(crate) const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Start of a simple reply.
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a structured reply chunk.
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Start of an extended reply chunk.
pub(crate) const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flag, both directions: fixed newstyle.
pub(crate) const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag, both directions: no 124 zero bytes after `EXPORT_NAME`.
pub(crate) const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Transmission flags, sent with an export.
pub(crate) mod export_flag {
    pub(crate) const HAS_FLAGS: u16 = 1 << 0;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const SEND_TRIM: u16 = 1 << 5;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const SEND_DF: u16 = 1 << 7;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(crate) const SEND_CACHE: u16 = 1 << 10;
    pub(crate) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Options of the handshake.
pub(crate) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
    pub(crate) const EXTENDED_HEADERS: u32 = 11;
}

/// Types of option replies.
pub(crate) mod option_reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    pub(crate) const ERR_UNSUP: u32 = ERROR | 1;
    pub(crate) const ERR_POLICY: u32 = ERROR | 2;
    pub(crate) const ERR_INVALID: u32 = ERROR | 3;
    pub(crate) const ERR_UNKNOWN: u32 = ERROR | 6;
    pub(crate) const ERR_SHUTDOWN: u32 = ERROR | 7;
    pub(crate) const ERR_BLOCK_SIZE_REQD: u32 = ERROR | 8;
    pub(crate) const ERR_TOO_BIG: u32 = ERROR | 9;
    pub(crate) const ERR_EXT_HEADER_REQD: u32 = ERROR | 10;
}

/// Kinds of information within `INFO` and `GO`.
pub(crate) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const NAME: u16 = 1;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Commands of the transmission phase.
pub(crate) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISC: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const CACHE: u16 = 5;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command.
pub(crate) mod command_flag {
    pub(crate) const FUA: u16 = 1 << 0;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const DF: u16 = 1 << 2;
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
    pub(crate) const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Flag of a reply chunk: the last of its request.
pub(crate) const REPLY_FLAG_DONE: u16 = 1;

/// Types of reply chunks.
pub(crate) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const BLOCK_STATUS_EXT: u16 = 6;
    pub(crate) const ERROR: u16 = (1 << 15) | 1;
}

/// The id that `base:allocation` gets on every connection.
pub(crate) const BASE_ALLOCATION_ID: u32 = 1;
/// The one metadata context.
pub(crate) const BASE_ALLOCATION: &[u8] = b"base:allocation";

/// Errors as NBD numbers them; equal to Linux's numbers, but only these may appear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NbdError {
    /// Not permitted: a write to a read-only export.
    Perm,
    /// Input or output failed.
    Io,
    /// A request that makes no sense.
    Invalid,
    /// A write beyond the end.
    NoSpace,
    /// A length that cannot be handled.
    Overflow,
    /// The request is not supported, or not fast enough for `FAST_ZERO`.
    Unsupported,
    /// The server or the volume is going away.
    Shutdown,
}

impl NbdError {
    /// The number on the wire.
    pub(crate) const fn code(self) -> u32 {
        match self {
            NbdError::Perm => 1,
            NbdError::Io => 5,
            NbdError::Invalid => 22,
            NbdError::NoSpace => 28,
            NbdError::Overflow => 75,
            NbdError::Unsupported => 95,
            NbdError::Shutdown => 108,
        }
    }
}

/// What was negotiated about headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum HeaderStyle {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured replies.
    Structured,
    /// Extended requests and replies.
    Extended,
}

impl HeaderStyle {
    /// Length of a request's header in bytes.
    pub(crate) const fn request_len(self) -> usize {
        match self {
            HeaderStyle::Simple | HeaderStyle::Structured => 28,
            HeaderStyle::Extended => 32,
        }
    }
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestHeader {
    /// `command_flag` bits.
    pub(crate) flags: u16,
    /// One of `command`.
    pub(crate) command: u16,
    /// Chosen by the client, returned with each reply.
    pub(crate) cookie: u64,
    /// First byte.
    pub(crate) offset: u64,
    /// Length of the effect, or of the payload.
    pub(crate) length: u64,
}

impl RequestHeader {
    /// Decodes `bytes`, which are `style.request_len()` long; `None` if the magic is wrong.
    pub(crate) fn decode(style: HeaderStyle, bytes: &[u8]) -> Option<RequestHeader> {
        let magic = be32(bytes, 0)?;
        let (expected, length) = match style {
            HeaderStyle::Simple | HeaderStyle::Structured => {
                (REQUEST_MAGIC, u64::from(be32(bytes, 24)?))
            }
            HeaderStyle::Extended => (EXTENDED_REQUEST_MAGIC, be64(bytes, 24)?),
        };
        (magic == expected).then_some(RequestHeader {
            flags: be16(bytes, 4)?,
            command: be16(bytes, 6)?,
            cookie: be64(bytes, 8)?,
            offset: be64(bytes, 16)?,
            length,
        })
    }
}

/// Whether a chunk ends its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    /// More chunks follow.
    No,
    /// It is the last.
    Yes,
}

/// A reply's head: at most a header and the eight bytes of offset that precede data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyHead {
    bytes: [u8; Self::MAX_LEN],
    len: u8,
}

impl ReplyHead {
    /// Longest head: an extended header, 8 bytes of offset, or an error or status body.
    const MAX_LEN: usize = 56;

    const fn empty() -> ReplyHead {
        ReplyHead {
            bytes: [0; Self::MAX_LEN],
            len: 0,
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        let start = usize::from(self.len);
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len() as u8;
    }

    /// The bytes to send.
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    fn chunk(style: HeaderStyle, kind: u16, request: &RequestHeader, body_len: u64) -> ReplyHead {
        Self::chunk_of(style, kind, request, body_len, Last::Yes)
    }

    fn chunk_of(
        style: HeaderStyle,
        kind: u16,
        request: &RequestHeader,
        body_len: u64,
        last: Last,
    ) -> ReplyHead {
        let mut head = ReplyHead::empty();
        let flags = match last {
            Last::Yes => REPLY_FLAG_DONE,
            Last::No => 0,
        };
        match style {
            HeaderStyle::Simple => unreachable!("simple replies have no chunks"),
            HeaderStyle::Structured => {
                head.put(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
                head.put(&flags.to_be_bytes());
                head.put(&kind.to_be_bytes());
                head.put(&request.cookie.to_be_bytes());
                let len = u32::try_from(body_len).expect("reads are limited below 4 GiB");
                head.put(&len.to_be_bytes());
            }
            HeaderStyle::Extended => {
                head.put(&EXTENDED_REPLY_MAGIC.to_be_bytes());
                head.put(&flags.to_be_bytes());
                head.put(&kind.to_be_bytes());
                head.put(&request.cookie.to_be_bytes());
                head.put(&request.offset.to_be_bytes());
                head.put(&body_len.to_be_bytes());
            }
        }
        head
    }

    fn simple(error: u32, request: &RequestHeader) -> ReplyHead {
        let mut head = ReplyHead::empty();
        head.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        head.put(&error.to_be_bytes());
        head.put(&request.cookie.to_be_bytes());
        head
    }

    /// The whole reply of a request that worked and returns no bytes.
    pub(crate) fn done(style: HeaderStyle, request: &RequestHeader) -> ReplyHead {
        match style {
            HeaderStyle::Simple => Self::simple(0, request),
            HeaderStyle::Structured | HeaderStyle::Extended => {
                Self::chunk(style, chunk::NONE, request, 0)
            }
        }
    }

    /// The whole reply of a request that failed.
    pub(crate) fn error(style: HeaderStyle, request: &RequestHeader, error: NbdError) -> ReplyHead {
        match style {
            HeaderStyle::Simple => Self::simple(error.code(), request),
            HeaderStyle::Structured | HeaderStyle::Extended => {
                let mut head = Self::chunk(style, chunk::ERROR, request, 6);
                head.put(&error.code().to_be_bytes());
                head.put(&0u16.to_be_bytes());
                head
            }
        }
    }

    /// What precedes `len` bytes of a read from `offset` on. A simple reply has one head for the
    /// whole read, so it is asked for with the first bytes only.
    pub(crate) fn data(
        style: HeaderStyle,
        request: &RequestHeader,
        offset: u64,
        len: u32,
        last: Last,
    ) -> ReplyHead {
        match style {
            HeaderStyle::Simple => Self::simple(0, request),
            HeaderStyle::Structured | HeaderStyle::Extended => {
                let body_len = 8 + u64::from(len);
                let kind = chunk::OFFSET_DATA;
                let mut head = Self::chunk_of(style, kind, request, body_len, last);
                head.put(&offset.to_be_bytes());
                head
            }
        }
    }

    /// Nothing before the data: the rest of a simple reply.
    pub(crate) fn none() -> ReplyHead {
        Self::empty()
    }

    /// The whole reply of a block status request: one extent, all data.
    pub(crate) fn all_data(style: HeaderStyle, request: &RequestHeader) -> ReplyHead {
        match style {
            HeaderStyle::Simple => unreachable!("block status needs structured replies"),
            HeaderStyle::Structured => {
                let mut head = Self::chunk(style, chunk::BLOCK_STATUS, request, 12);
                head.put(&BASE_ALLOCATION_ID.to_be_bytes());
                let len = u32::try_from(request.length).expect("compact lengths have 32 bits");
                head.put(&len.to_be_bytes());
                head.put(&0u32.to_be_bytes());
                head
            }
            HeaderStyle::Extended => {
                let mut head = Self::chunk(style, chunk::BLOCK_STATUS_EXT, request, 24);
                head.put(&BASE_ALLOCATION_ID.to_be_bytes());
                head.put(&1u32.to_be_bytes());
                head.put(&request.length.to_be_bytes());
                head.put(&0u64.to_be_bytes());
                head
            }
        }
    }
}

/// The big-endian number at `at`; `None` if the slice is too short.
pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    let part = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes(part.try_into().ok()?))
}

/// The big-endian number at `at`; `None` if the slice is too short.
pub(crate) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    let part = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes(part.try_into().ok()?))
}

/// The big-endian number at `at`; `None` if the slice is too short.
pub(crate) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_be_bytes(part.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: RequestHeader = RequestHeader {
        flags: 1,
        command: 1,
        cookie: 0x1122_3344_5566_7788,
        offset: 0x1000,
        length: 0x200,
    };

    #[test]
    fn request_headers_decode_field_by_field() {
        let compact = [
            0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0,
            0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0,
        ];
        assert_eq!(
            RequestHeader::decode(HeaderStyle::Structured, &compact),
            Some(REQUEST)
        );
        assert_eq!(
            RequestHeader::decode(HeaderStyle::Extended, &compact),
            None,
            "an extended header has another magic and more bytes"
        );
        let mut extended = [0u8; 32];
        extended[..4].copy_from_slice(&[0x21, 0xe4, 0x1c, 0x71]);
        extended[4..24].copy_from_slice(&compact[4..24]);
        extended[30] = 2;
        assert_eq!(
            RequestHeader::decode(HeaderStyle::Extended, &extended),
            Some(REQUEST)
        );
    }

    #[test]
    fn reply_heads_have_the_documented_bytes() {
        let done = ReplyHead::done(HeaderStyle::Simple, &REQUEST);
        assert_eq!(
            done.as_slice(),
            [
                0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88
            ]
        );
        let data = ReplyHead::data(HeaderStyle::Structured, &REQUEST, 0x1000, 0x200, Last::Yes);
        assert_eq!(
            data.as_slice(),
            [
                0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88,
                0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0
            ]
        );
        let error = ReplyHead::error(HeaderStyle::Structured, &REQUEST, NbdError::NoSpace);
        assert_eq!(&error.as_slice()[4..8], [0, 1, 0x80, 1]);
        assert_eq!(&error.as_slice()[16..], [0, 0, 0, 6, 0, 0, 0, 28, 0, 0]);
        let status = ReplyHead::all_data(HeaderStyle::Extended, &REQUEST);
        assert_eq!(&status.as_slice()[..4], [0x6e, 0x8a, 0x27, 0x8c]);
        assert_eq!(status.as_slice().len(), 32 + 24);
        assert_eq!(&status.as_slice()[24..32], [0, 0, 0, 0, 0, 0, 0, 24]);
    }
}
