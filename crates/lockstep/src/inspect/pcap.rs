//! Reads capture files: plain or gzip-compressed pcap, and the TCP segments in their frames.
//!
//! Nothing here knows the replication protocol. Lengths in the file are checked before memory is
//! taken for them.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use flate2::read::MultiGzDecoder;

/// Largest frame that a capture may hold, in bytes; tcpdump writes at most 256 KiB.
const FRAME_LEN_MAX: u32 = 1 << 20;

/// Why a capture cannot be read (further).
#[derive(Debug, thiserror::Error)]
pub(crate) enum PcapError {
    #[error("cannot open the file")]
    Open(#[source] io::Error),
    #[error("cannot read the file at byte {offset} of the capture; is the compressed file broken?")]
    Read {
        offset: u64,
        #[source]
        source: io::Error,
    },
    #[error("not a capture: it begins with {found:02x?} instead of a pcap header")]
    NoCapture { found: Vec<u8> },
    #[error("a pcapng capture, which is not read; convert it with `editcap -F pcap IN OUT`")]
    PcapNg,
    #[error("link type {found} is not read; Ethernet, Linux cooked and raw IP are")]
    LinkType { found: u32 },
    #[error(
        "the capture is truncated: {what} at byte {offset} needs {need} bytes, {have} are left"
    )]
    Truncated {
        what: &'static str,
        offset: u64,
        need: usize,
        have: usize,
    },
    #[error("frame at byte {offset} says it has {len} bytes, more than {FRAME_LEN_MAX}")]
    FrameLen { offset: u64, len: u32 },
}

/// How frames begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkType {
    Ethernet,
    LinuxCooked,
    LinuxCookedV2,
    RawIp,
}

/// One frame of a capture.
pub(crate) struct Frame<'a> {
    /// Nanoseconds since 1970.
    pub(crate) time_ns: u64,
    pub(crate) bytes: &'a [u8],
}

/// A capture file that is being read.
pub(crate) struct Capture {
    input: Box<dyn Read>,
    offset: u64,
    big_endian: bool,
    nanoseconds: bool,
    link: LinkType,
    frame: Vec<u8>,
}

impl Capture {
    /// Opens a file; whether it is compressed is seen from its first bytes.
    pub(crate) fn open(path: &Path) -> Result<Capture, PcapError> {
        let mut file = File::open(path).map_err(PcapError::Open)?;
        let mut magic = Vec::new();
        (&mut file)
            .take(2)
            .read_to_end(&mut magic)
            .map_err(|source| PcapError::Read { offset: 0, source })?;
        let compressed = magic == [0x1f, 0x8b];
        let whole = BufReader::with_capacity(1 << 16, io::Cursor::new(magic).chain(file));
        if compressed {
            Capture::new(Box::new(MultiGzDecoder::new(whole)))
        } else {
            Capture::new(Box::new(whole))
        }
    }

    /// Reads the file header.
    pub(crate) fn new(input: Box<dyn Read>) -> Result<Capture, PcapError> {
        let mut capture = Capture {
            input,
            offset: 0,
            big_endian: false,
            nanoseconds: false,
            link: LinkType::Ethernet,
            frame: Vec::new(),
        };
        let mut head = [0; 24];
        let have = capture.fill(&mut head)?;
        let magic = head
            .first_chunk()
            .map_or(0, |bytes| u32::from_le_bytes(*bytes));
        (capture.big_endian, capture.nanoseconds) = match magic {
            0xa1b2_c3d4 => (false, false),
            0xa1b2_3c4d => (false, true),
            0xd4c3_b2a1 => (true, false),
            0x4d3c_b2a1 => (true, true),
            0x0a0d_0d0a if have >= 4 => return Err(PcapError::PcapNg),
            _ => {
                return Err(PcapError::NoCapture {
                    found: head[..have.min(8)].to_vec(),
                });
            }
        };
        if have < head.len() {
            return Err(truncated("the file header", 0, head.len(), have));
        }
        // The upper bits of the field say how long a frame check sequence is.
        capture.link = match capture.u32_at(&head, 20) & 0xFFFF {
            1 => LinkType::Ethernet,
            101 | 228 | 229 => LinkType::RawIp,
            113 => LinkType::LinuxCooked,
            276 => LinkType::LinuxCookedV2,
            found => return Err(PcapError::LinkType { found }),
        };
        Ok(capture)
    }

    /// How the frames begin.
    pub(crate) fn link(&self) -> LinkType {
        self.link
    }

    /// The next frame, none at the end of the file.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Frame<'_>>, PcapError> {
        let start = self.offset;
        let mut head = [0; 16];
        match self.fill(&mut head)? {
            0 => return Ok(None),
            16 => {}
            have => return Err(truncated("a frame header", start, head.len(), have)),
        }
        let fraction = u64::from(self.u32_at(&head, 4));
        let fraction_ns = if self.nanoseconds {
            fraction
        } else {
            fraction * 1000
        };
        let time_ns = u64::from(self.u32_at(&head, 0)) * 1_000_000_000 + fraction_ns;
        let len = self.u32_at(&head, 8);
        if len > FRAME_LEN_MAX {
            return Err(PcapError::FrameLen { offset: start, len });
        }
        let mut frame = std::mem::take(&mut self.frame);
        frame.resize(len as usize, 0);
        let have = self.fill(&mut frame)?;
        self.frame = frame;
        if have < self.frame.len() {
            return Err(truncated("a frame", start, self.frame.len(), have));
        }
        Ok(Some(Frame {
            time_ns,
            bytes: &self.frame,
        }))
    }

    /// Fills `out` as far as the file reaches and says how far.
    fn fill(&mut self, out: &mut [u8]) -> Result<usize, PcapError> {
        let mut have = 0;
        while have < out.len() {
            match self.input.read(&mut out[have..]) {
                Ok(0) => break,
                Ok(count) => have += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(PcapError::Read {
                        offset: self.offset + have as u64,
                        source,
                    });
                }
            }
        }
        self.offset += have as u64;
        Ok(have)
    }

    fn u32_at(&self, bytes: &[u8], at: usize) -> u32 {
        let word = bytes[at..at + 4]
            .iter()
            .fold(0, |word, byte| word << 8 | u32::from(*byte));
        if self.big_endian {
            word
        } else {
            word.swap_bytes()
        }
    }
}

fn truncated(what: &'static str, offset: u64, need: usize, have: usize) -> PcapError {
    PcapError::Truncated {
        what,
        offset,
        need,
        have,
    }
}

/// What a frame holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Content<'a> {
    Tcp(Segment<'a>),
    /// A UDP datagram to this port.
    Udp {
        port: u16,
    },
    /// Something else, or a fragment or cut frame that cannot be used.
    Other,
}

/// A TCP segment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Segment<'a> {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) sequence: u32,
    pub(crate) syn: bool,
    pub(crate) ack: bool,
    pub(crate) fin: bool,
    pub(crate) rst: bool,
    pub(crate) payload: &'a [u8],
}

/// Finds the TCP segment in a frame.
pub(crate) fn content<'a>(link: LinkType, frame: &'a [u8]) -> Content<'a> {
    parse(link, frame).unwrap_or(Content::Other)
}

fn parse<'a>(link: LinkType, frame: &'a [u8]) -> Option<Content<'a>> {
    let packet = match link {
        LinkType::Ethernet => ethernet(frame)?,
        LinkType::LinuxCooked => frame.get(16..)?,
        LinkType::LinuxCookedV2 => frame.get(20..)?,
        LinkType::RawIp => frame,
    };
    match packet.first()? >> 4 {
        4 => ipv4(packet),
        6 => ipv6(packet),
        _ => None,
    }
}

/// The packet behind the Ethernet header and up to two VLAN tags.
fn ethernet(frame: &[u8]) -> Option<&[u8]> {
    let mut at = 12;
    for _ in 0..3 {
        match be16(frame, at)? {
            0x8100 | 0x88a8 => at += 4,
            0x0800 | 0x86dd => return frame.get(at + 2..),
            _ => return None,
        }
    }
    None
}

fn ipv4(packet: &[u8]) -> Option<Content<'_>> {
    let head_len = usize::from(packet[0] & 15) * 4;
    let total = usize::from(be16(packet, 2)?);
    // Segments that the network card was to cut may be too long for the field, which then is 0.
    let packet = if total == 0 {
        packet
    } else {
        packet.get(..total)?
    };
    let fragment = be16(packet, 6)? & 0x3FFF;
    let protocol = *packet.get(9)?;
    let from = IpAddr::V4(Ipv4Addr::from(*packet.get(12..)?.first_chunk::<4>()?));
    let to = IpAddr::V4(Ipv4Addr::from(*packet.get(16..)?.first_chunk::<4>()?));
    if fragment != 0 {
        return None;
    }
    transport(protocol, from, to, packet.get(head_len..)?)
}

fn ipv6(packet: &[u8]) -> Option<Content<'_>> {
    let len = usize::from(be16(packet, 4)?);
    let packet = if len == 0 {
        packet
    } else {
        packet.get(..40 + len)?
    };
    let protocol = *packet.get(6)?;
    let from = IpAddr::V6(Ipv6Addr::from(*packet.get(8..)?.first_chunk::<16>()?));
    let to = IpAddr::V6(Ipv6Addr::from(*packet.get(24..)?.first_chunk::<16>()?));
    transport(protocol, from, to, packet.get(40..)?)
}

fn transport(protocol: u8, from: IpAddr, to: IpAddr, body: &[u8]) -> Option<Content<'_>> {
    let (from_port, to_port) = (be16(body, 0)?, be16(body, 2)?);
    match protocol {
        6 => {
            let head_len = usize::from(*body.get(12)? >> 4) * 4;
            let flags = *body.get(13)?;
            Some(Content::Tcp(Segment {
                from: SocketAddr::new(from, from_port),
                to: SocketAddr::new(to, to_port),
                sequence: u32::from_be_bytes(*body.get(4..)?.first_chunk()?),
                syn: flags & 0x02 != 0,
                ack: flags & 0x10 != 0,
                fin: flags & 0x01 != 0,
                rst: flags & 0x04 != 0,
                payload: body.get(head_len..)?,
            }))
        }
        17 => Some(Content::Udp { port: to_port }),
        _ => None,
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::{Capture, Content, LinkType, PcapError, content};

    fn capture(bytes: &[u8]) -> Result<Capture, PcapError> {
        Capture::new(Box::new(Cursor::new(bytes.to_vec())))
    }

    /// A little-endian Ethernet capture with one frame of four bytes.
    fn one_frame() -> Vec<u8> {
        let mut bytes = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0];
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&[0, 0, 4, 0, 1, 0, 0, 0]);
        bytes.extend_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0]);
        bytes.extend_from_slice(b"abcd");
        bytes
    }

    #[test]
    fn a_frame_has_its_time_and_bytes() {
        let mut capture = capture(&one_frame()).unwrap();
        assert_eq!(capture.link(), LinkType::Ethernet);
        let frame = capture.next_frame().unwrap().unwrap();
        assert_eq!((frame.time_ns, frame.bytes), (1_000_002_000, &b"abcd"[..]));
        assert!(capture.next_frame().unwrap().is_none());
    }

    #[test]
    fn a_cut_file_is_truncated_wherever_it_is_cut() {
        let whole = one_frame();
        for len in 4..whole.len() {
            let result = capture(&whole[..len]).map(|mut capture| capture.next_frame().map(drop));
            match result {
                Err(PcapError::Truncated { .. }) | Ok(Err(PcapError::Truncated { .. })) => {}
                Ok(Ok(())) if len == 24 => {}
                Ok(other) => panic!("{len}: {other:?}"),
                Err(other) => panic!("{len}: {other:?}"),
            }
        }
    }

    #[test]
    fn another_file_is_no_capture() {
        assert!(matches!(
            capture(b"#!/bin/sh\n"),
            Err(PcapError::NoCapture { .. })
        ));
        assert!(matches!(capture(b""), Err(PcapError::NoCapture { .. })));
        assert!(matches!(
            capture(&[0x0a, 0x0d, 0x0d, 0x0a, 0]),
            Err(PcapError::PcapNg)
        ));
    }

    #[test]
    fn a_huge_frame_takes_no_memory() {
        let mut bytes = one_frame();
        bytes[32..36].fill(0xFF);
        let mut capture = capture(&bytes).unwrap();
        assert!(matches!(
            capture.next_frame(),
            Err(PcapError::FrameLen { .. })
        ));
    }

    #[test]
    fn mutated_captures_never_panic() {
        let mut state = 0x7063_6170_u64;
        let mut below = |bound: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as usize % bound
        };
        for _ in 0..5000 {
            let mut bytes = one_frame();
            bytes.truncate(40);
            // A frame of any bytes that begins like IPv4 over Ethernet or after a cooked header.
            let len = below(120);
            bytes[32] = len as u8;
            bytes[36] = len as u8;
            bytes.extend((0..len).map(|_| below(256) as u8));
            if len > 14 {
                bytes[52..54].copy_from_slice(&[0x08, [0x00, 0x06][below(2)]]);
                bytes[54] = 0x40 | below(16) as u8;
            }
            for _ in 0..below(4) {
                let at = below(bytes.len());
                bytes[at] = [0, 1, 113, 0xFF, below(256) as u8][below(5)];
            }
            let Ok(mut capture) = capture(&bytes) else {
                continue;
            };
            let link = capture.link();
            while let Ok(Some(frame)) = capture.next_frame() {
                content(link, frame.bytes);
            }
        }
    }

    #[test]
    fn padding_of_a_short_frame_is_not_payload() {
        let mut frame = vec![0; 12];
        frame.extend_from_slice(&[0x08, 0x00, 0x45, 0, 0, 42, 0, 0, 0, 0, 64, 6, 0, 0]);
        frame.extend_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend_from_slice(&[0x1e, 0x14, 0x1e, 0x15, 0, 0, 0, 9, 0, 0, 0, 0, 0x50, 0x10]);
        frame.extend_from_slice(&[0, 0, 0, 0, 0, 0]);
        frame.extend_from_slice(b"hi\0\0\0\0");
        let Content::Tcp(segment) = content(LinkType::Ethernet, &frame) else {
            panic!("no segment")
        };
        assert_eq!(
            (segment.payload, segment.sequence, segment.ack),
            (&b"hi"[..], 9, true)
        );
        assert_eq!(segment.from.to_string(), "10.0.0.1:7700");
        for len in 0..frame.len() - 4 {
            assert_eq!(content(LinkType::Ethernet, &frame[..len]), Content::Other);
        }
    }
}
