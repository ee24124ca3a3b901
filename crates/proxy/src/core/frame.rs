//! The frame of the WAN protocol: a 32-byte header and a payload, and the incremental parser that
//! cuts a carrier's byte stream into frames. It checks lengths before it takes memory; what a
//! payload means is decided elsewhere.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::room::{self, Block};

/// Length of a frame header in bytes.
pub(crate) const HEADER_LEN: usize = 32;
/// Largest count of raw bytes in one chunk.
pub(crate) const CHUNK_MAX: usize = 1 << 20;
/// Largest payload of any frame: a chunk that did not shrink.
const PAYLOAD_MAX: usize = CHUNK_MAX;
/// Largest payload of a frame that is not DATA.
pub(crate) const MESSAGE_MAX: usize = 64 << 10;
/// Largest piece of a lane: after it another lane may have its turn.
pub(crate) const SEGMENT_MAX: usize = MESSAGE_MAX;
/// Lanes of one TCP connection.
pub(crate) const LANES_MAX: usize = 4096;
/// Version of the frame layout.
const VERSION: u8 = 1;

/// FIN: the sender's direction of the stream ends after this frame.
pub(crate) const FLAG_FIN: u8 = 1;
/// Flag of a DATA frame: remember this chunk and what follows, forget what was before.
pub(crate) const FLAG_BEGIN: u8 = 4;

/// Bytes that several owners (queue, socket, codec job) hold without a copy.
pub(crate) type Bytes = Arc<Block>;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Hello,
    HelloAck,
    Attach,
    Open,
    OpenOk,
    OpenErr,
    Data,
    Ack,
    Rst,
    Ping,
    Pong,
    Resume,
    Stats,
    Goodbye,
    /// A piece of what a lane carries; `stream` is the lane.
    Lane,
    LaneOpen,
    LaneClose,
}

impl Kind {
    pub(crate) const ALL: [Kind; 17] = [
        Kind::Hello,
        Kind::HelloAck,
        Kind::Attach,
        Kind::Open,
        Kind::OpenOk,
        Kind::OpenErr,
        Kind::Data,
        Kind::Ack,
        Kind::Rst,
        Kind::Ping,
        Kind::Pong,
        Kind::Resume,
        Kind::Stats,
        Kind::Goodbye,
        Kind::Lane,
        Kind::LaneOpen,
        Kind::LaneClose,
    ];

    fn code(self) -> u8 {
        self as u8 + 1
    }

    fn from_code(code: u8) -> Option<Kind> {
        Kind::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }
}

/// The decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Codec of a DATA frame, reason of an RST or OPEN_ERR, else 0.
    pub(crate) code: u8,
    pub(crate) flags: u8,
    /// 0 is the session itself.
    pub(crate) stream: u32,
    /// Count of raw bytes before this chunk in this direction.
    pub(crate) offset: u64,
    pub(crate) raw_len: u32,
    pub(crate) payload_len: u32,
    /// CRC-32C of the raw bytes.
    pub(crate) raw_crc: u32,
}

/// A frame with its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) header: Header,
    pub(crate) payload: Bytes,
}

/// Why a carrier's bytes are not frames of ours. The carrier must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error(
        "the peer speaks frame version {0}, this proxy speaks version 1; upgrade the older one"
    )]
    Version(u8),
    #[error("frame type {0} is unknown; is the other end a Lockstep proxy?")]
    Kind(u8),
    #[error("frame header checksum mismatch")]
    HeaderCrc,
    #[error("more than {LANES_MAX} lanes on one carrier")]
    Lanes,
    #[error(
        "frame with a payload of {payload_bytes} bytes for {raw_bytes} raw bytes: out of bounds"
    )]
    Length { payload_bytes: u32, raw_bytes: u32 },
}

impl Header {
    /// A header of a session frame without payload.
    pub(crate) fn session(kind: Kind) -> Header {
        Header {
            kind,
            code: 0,
            flags: 0,
            stream: 0,
            offset: 0,
            raw_len: 0,
            payload_len: 0,
            raw_crc: 0,
        }
    }

    /// The 32 bytes on the wire, little-endian, with their own checksum.
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0u8; HEADER_LEN];
        out[0] = VERSION;
        out[1] = self.kind.code();
        out[2] = self.code;
        out[3] = self.flags;
        out[4..8].copy_from_slice(&self.stream.to_le_bytes());
        out[8..16].copy_from_slice(&self.offset.to_le_bytes());
        out[16..20].copy_from_slice(&self.raw_len.to_le_bytes());
        out[20..24].copy_from_slice(&self.payload_len.to_le_bytes());
        out[24..28].copy_from_slice(&self.raw_crc.to_le_bytes());
        let crc = crc32c::crc32c(&out[..28]);
        out[28..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Header, FrameError> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[0] != VERSION {
            return Err(FrameError::Version(bytes[0]));
        }
        if crc32c::crc32c(&bytes[..28]) != word(28) {
            return Err(FrameError::HeaderCrc);
        }
        let kind = Kind::from_code(bytes[1]).ok_or(FrameError::Kind(bytes[1]))?;
        let header = Header {
            kind,
            code: bytes[2],
            flags: bytes[3],
            stream: word(4),
            offset: u64::from(word(8)) | u64::from(word(12)) << 32,
            raw_len: word(16),
            payload_len: word(20),
            raw_crc: word(24),
        };
        let limit = if kind == Kind::Data {
            PAYLOAD_MAX
        } else {
            MESSAGE_MAX
        };
        if header.payload_len as usize > limit || header.raw_len as usize > CHUNK_MAX {
            return Err(FrameError::Length {
                payload_bytes: header.payload_len,
                raw_bytes: header.raw_len,
            });
        }
        Ok(header)
    }
}

impl Frame {
    /// A session frame with a message as payload.
    pub(crate) fn message(kind: Kind, payload: Vec<u8>) -> Frame {
        let mut header = Header::session(kind);
        header.payload_len = payload.len() as u32;
        Frame {
            header,
            payload: Arc::new(payload.into()),
        }
    }

    /// Bytes that the frame takes on the wire, before TLS.
    pub(crate) fn wire_len(&self) -> usize {
        HEADER_LEN + self.payload.len()
    }
}

/// What came on a TCP connection between the proxies.
#[derive(Debug)]
pub(crate) enum Item {
    /// A frame of the session itself.
    Session(Frame),
    /// Bytes of a lane, and the frames that they completed.
    Lane {
        lane: u32,
        bytes: usize,
        frames: Vec<Frame>,
    },
}

/// What some bytes of a TCP connection held.
#[derive(Debug, Default)]
pub(crate) struct WireCut {
    pub(crate) items: Vec<Item>,
    /// What came behind them is no frame.
    pub(crate) error: Option<FrameError>,
}

/// Cuts the bytes of one TCP connection into frames of the session and of its lanes. Only lanes in
/// the middle of a frame take memory.
#[derive(Debug, Default)]
pub(crate) struct WireReader {
    session: FrameReader,
    /// The lane whose piece is being read, and how much of it is to come.
    piece: Option<(u32, usize)>,
    lanes: BTreeMap<u32, FrameReader>,
}

impl WireReader {
    /// Takes all of `input`, up to the first error.
    pub(crate) fn cut(&mut self, input: &[u8]) -> WireCut {
        let mut cut = WireCut::default();
        if let Err(error) = self.cut_into(input, &mut cut.items) {
            cut.error = Some(error);
        }
        cut
    }

    fn cut_into(&mut self, mut input: &[u8], items: &mut Vec<Item>) -> Result<(), FrameError> {
        while !input.is_empty() {
            if let Some((lane, left)) = self.piece {
                let (piece, rest) = input.split_at(left.min(input.len()));
                input = rest;
                self.piece = (left > piece.len()).then(|| (lane, left - piece.len()));
                let reader = self.lanes.entry(lane).or_default();
                let cut = reader.cut(piece);
                if reader.is_between() {
                    self.lanes.remove(&lane);
                }
                note(items, lane, piece.len(), cut.frames);
                match cut.error {
                    Some(error) => return Err(error),
                    None if self.lanes.len() > LANES_MAX => return Err(FrameError::Lanes),
                    None => {}
                }
                continue;
            }
            let (used, frame) = self.session.push(input)?;
            input = &input[used..];
            items.extend(frame.map(Item::Session));
            if let Some(header) = self.session.take_piece() {
                self.piece = (header.payload_len > 0)
                    .then_some((header.stream, header.payload_len as usize));
                note(items, header.stream, HEADER_LEN, Vec::new());
            }
        }
        Ok(())
    }
}

/// Adds to the last item if that is of the same lane.
fn note(items: &mut Vec<Item>, lane: u32, bytes: usize, mut frames: Vec<Frame>) {
    if let Some(Item::Lane {
        lane: last,
        bytes: sum,
        frames: list,
    }) = items.last_mut()
        && *last == lane
    {
        *sum += bytes;
        list.append(&mut frames);
        return;
    }
    items.push(Item::Lane {
        lane,
        bytes,
        frames,
    });
}

/// What some bytes of a lane held.
#[derive(Debug, Default)]
pub(crate) struct Cut {
    /// The frames that they completed.
    pub(crate) frames: Vec<Frame>,
    /// What came behind them is no frame.
    pub(crate) error: Option<FrameError>,
}

/// Cuts a stream of bytes into frames.
#[derive(Debug, Default)]
pub(crate) struct FrameReader {
    head: Vec<u8>,
    current: Option<(Header, Vec<u8>)>,
    failed: Option<FrameError>,
}

impl FrameReader {
    /// No frame has begun.
    fn is_between(&self) -> bool {
        self.head.is_empty() && self.current.is_none() && self.failed.is_none()
    }

    /// The header of a piece of a lane, when that is what has come; its bytes are not a payload.
    fn take_piece(&mut self) -> Option<Header> {
        let (header, _) = self
            .current
            .take_if(|(header, _)| header.kind == Kind::Lane)?;
        Some(header)
    }

    /// Takes all of `input`, up to the first error.
    pub(crate) fn cut(&mut self, mut input: &[u8]) -> Cut {
        let mut cut = Cut::default();
        while !input.is_empty() {
            match self.push(input) {
                Ok((used, frame)) => {
                    input = &input[used..];
                    cut.frames.extend(frame);
                }
                Err(error) => {
                    cut.error = Some(error);
                    break;
                }
            }
        }
        cut
    }

    /// Takes some bytes from the front of `input` and returns how many, with the frame that they
    /// completed. After an error the carrier is of no more use and the same error is returned.
    pub(crate) fn push(&mut self, input: &[u8]) -> Result<(usize, Option<Frame>), FrameError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let mut used = 0;
        if self.current.is_none() {
            let take = (HEADER_LEN - self.head.len()).min(input.len());
            self.head.extend_from_slice(&input[..take]);
            used = take;
            let Ok(bytes) = <&[u8; HEADER_LEN]>::try_from(self.head.as_slice()) else {
                return Ok((used, None));
            };
            match Header::decode(bytes) {
                Ok(header) => {
                    self.head.clear();
                    self.current = Some((header, Vec::new()));
                    if header.kind == Kind::Lane {
                        return Ok((used, None));
                    }
                }
                Err(error) => {
                    self.failed = Some(error);
                    return Err(error);
                }
            }
        }
        if let Some((header, payload)) = &mut self.current {
            let want = header.payload_len as usize;
            let take = (want - payload.len()).min(input.len() - used);
            if payload.len() + take > payload.capacity() {
                // Memory follows the bytes that came, not the length that the peer claims. Once
                // there are some, all of the frame's comes at once: growing would copy them again
                // and again.
                let room = match payload.is_empty() {
                    true => want.min(take.max(64 << 10)),
                    false => want,
                };
                let mut larger = room::empty(room);
                larger.extend_from_slice(payload);
                room::give(std::mem::replace(payload, larger));
            }
            payload.extend_from_slice(&input[used..used + take]);
            used += take;
            if payload.len() < want {
                return Ok((used, None));
            }
        }
        let frame = self.current.take().map(|(header, payload)| Frame {
            header,
            payload: Arc::new(payload.into()),
        });
        Ok((used, frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::rng::Rng;

    fn sample(len: usize) -> Frame {
        let payload: Vec<u8> = (0..len).map(|i| i as u8).collect();
        Frame {
            header: Header {
                kind: Kind::Data,
                code: 3,
                flags: FLAG_FIN,
                stream: 7,
                offset: 0x0102_0304_0506_0708,
                raw_len: 99,
                payload_len: len as u32,
                raw_crc: 0xdead_beef,
            },
            payload: Arc::new(payload.into()),
        }
    }

    fn parse_all(bytes: &[u8], step: usize) -> Result<Vec<Frame>, FrameError> {
        let mut reader = FrameReader::default();
        let mut frames = Vec::new();
        for piece in bytes.chunks(step) {
            let cut = reader.cut(piece);
            frames.extend(cut.frames);
            if let Some(error) = cut.error {
                return Err(error);
            }
        }
        Ok(frames)
    }

    #[test]
    fn frames_before_a_damaged_one_are_found() {
        let good = sample(300);
        let mut bytes = good.header.encode().to_vec();
        bytes.extend_from_slice(&good.payload);
        let mut twice = [bytes.clone(), bytes].concat();
        let end = twice.len();
        twice[end - 300 - 1] ^= 1;
        let cut = FrameReader::default().cut(&twice);
        assert_eq!(cut.frames, [good]);
        assert_eq!(cut.error, Some(FrameError::HeaderCrc));
    }

    #[test]
    fn a_large_payload_grows_once_and_only_after_some_of_it_came() {
        let frame = sample(CHUNK_MAX);
        let mut reader = FrameReader::default();
        reader.cut(&frame.header.encode());
        reader.cut(&frame.payload[..1000]);
        let room = |reader: &FrameReader| reader.current.as_ref().unwrap().1.capacity();
        assert!(room(&reader) <= 64 << 10);
        reader.cut(&frame.payload[1000..80_000]);
        assert_eq!(room(&reader), CHUNK_MAX);
        let cut = reader.cut(&frame.payload[80_000..]);
        assert_eq!(cut.frames, [frame]);
    }

    #[test]
    fn header_has_the_documented_layout() {
        let bytes = sample(5).header.encode();
        assert_eq!(&bytes[..8], &[1, 7, 3, 1, 7, 0, 0, 0]);
        assert_eq!(&bytes[8..16], &[8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(&bytes[16..24], &[99, 0, 0, 0, 5, 0, 0, 0]);
        assert_eq!(&bytes[24..28], &[0xef, 0xbe, 0xad, 0xde]);
    }

    #[test]
    fn frames_survive_any_cut_of_the_byte_stream() {
        let frames = [sample(0), sample(300), sample(1), sample(70_000)];
        let mut bytes = Vec::new();
        for frame in &frames {
            bytes.extend_from_slice(&frame.header.encode());
            bytes.extend_from_slice(&frame.payload);
        }
        for step in [1, 7, 31, 32, 33, 4096, bytes.len()] {
            assert_eq!(parse_all(&bytes, step).as_deref(), Ok(&frames[..]));
        }
    }

    #[test]
    fn wrong_version_type_checksum_and_length_are_named() {
        let good = sample(4).header.encode();
        let with = |at: usize, value: u8, fix: bool| {
            let mut bytes = good;
            bytes[at] = value;
            if fix {
                let crc = crc32c::crc32c(&bytes[..28]);
                bytes[28..].copy_from_slice(&crc.to_le_bytes());
            }
            parse_all(&bytes, 32).unwrap_err()
        };
        assert_eq!(with(0, 9, true), FrameError::Version(9));
        assert_eq!(with(1, 18, true), FrameError::Kind(18));
        assert_eq!(with(1, 0, true), FrameError::Kind(0));
        assert_eq!(with(9, 1, false), FrameError::HeaderCrc);
        assert!(matches!(with(23, 1, true), FrameError::Length { .. }));
        assert!(matches!(with(19, 1, true), FrameError::Length { .. }));
    }

    #[test]
    fn random_bytes_never_panic_and_never_take_much_memory() {
        let mut rng = Rng::new(1);
        for _ in 0..2000 {
            let mut bytes = sample(40).header.encode().to_vec();
            bytes.extend((0..rng.below(200)).map(|_| rng.next() as u8));
            for _ in 0..rng.below(4) {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] = rng.next() as u8;
            }
            if rng.below(2) == 0 {
                let crc = crc32c::crc32c(&bytes[..28]);
                bytes[28..32].copy_from_slice(&crc.to_le_bytes());
            }
            let mut reader = FrameReader::default();
            let mut at = 0;
            while let Ok((used, frame)) = reader.push(&bytes[at..]) {
                at += used;
                if frame.is_none() && at == bytes.len() {
                    break;
                }
            }
            if let Some((_, payload)) = &reader.current {
                assert!(payload.capacity() <= 64 << 10);
            }
        }
    }
}
