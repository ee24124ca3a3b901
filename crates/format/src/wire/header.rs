//! The three headers, the agreed dialect, and the length rules (wire.md 3).

use alloc::vec::Vec;

use super::command::{Command, Stream};
use super::error::WireError;
use super::flags::Features;
use super::{
    ALG_NAME_LEN, BIO_LEN_MAX, BITMAP_PACKET_LEN, CHALLENGE_LEN, DIGEST_LEN_MAX, MAGIC_80,
    MAGIC_95, MAGIC_100, bio_len_max,
};
use crate::units::VolumeNr;

/// What both sides agreed on, for one direction of a connection: received packets are decoded with
/// the integrity digests that the peer announced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    /// Agreed protocol version; 0 until the feature packets were exchanged.
    pub protocol: u32,
    /// Agreed features.
    pub features: Features,
    /// Bytes of the integrity digest in packets with payload; 0 if the sender uses none.
    pub integrity_len: u8,
}

impl Dialect {
    /// The dialect before the feature packets were exchanged.
    pub const INITIAL: Dialect = Dialect {
        protocol: 0,
        features: Features::empty(),
        integrity_len: 0,
    };

    /// A dialect without integrity digests.
    pub const fn new(protocol: u32, features: Features) -> Dialect {
        Dialect {
            protocol,
            features,
            integrity_len: 0,
        }
    }

    /// Header of a packet with `len` payload bytes that is sent in this dialect.
    pub const fn header_kind(&self, len: u32) -> HeaderKind {
        match self.protocol {
            100.. => HeaderKind::H100,
            95..=99 if len.saturating_add(8) > 32_768 => HeaderKind::H95,
            _ => HeaderKind::H80,
        }
    }

    /// Bytes to have before [`decode_header`] can succeed on the data stream.
    pub const fn header_len(&self) -> usize {
        if self.protocol >= 100 { 16 } else { 8 }
    }

    /// Most code bytes of one compressed bitmap packet sent in this dialect.
    pub const fn bitmap_code_len_max(&self) -> usize {
        self.bitmap_words_len_max() - 1
    }

    /// Most bytes of words of one plain bitmap packet sent in this dialect.
    pub const fn bitmap_words_len_max(&self) -> usize {
        BITMAP_PACKET_LEN as usize - self.header_len()
    }

    /// Whether the command belongs to the agreed version and features.
    ///
    /// Checked is what makes a command possible, not what made it superfluous: a peer that sends
    /// an older form than it had to does no harm. `P_ENABLE_REPLICATION` is let through without
    /// its feature, because DRBD 9.3.3 sends it to peers of every version when a resync ends, and
    /// `P_FLUSH_REQUESTS_ACK` before a version is agreed, because it may come before its features.
    pub const fn speaks(&self, command: Command) -> bool {
        let version = match command {
            Command::InitialMeta | Command::InitialData | Command::ConnectionFeatures => 0,
            Command::Ping | Command::PingAck => 0,
            Command::OvRequest | Command::OvReply | Command::OvResult => 88,
            Command::CsumRsRequest | Command::RsIsInSync | Command::SyncParam89 => 89,
            Command::CompressedBitmap => 90,
            Command::OutOfSync | Command::RsCancel => 96,
            Command::ConnStChgReq | Command::ConnStChgReply => 100,
            Command::RetryWrite | Command::ProtocolUpdate => 100,
            Command::TwopcPrepare | Command::TwopcAbort | Command::TwopcCommit => 110,
            Command::TwopcYes | Command::TwopcNo | Command::TwopcRetry => 110,
            Command::Dagtag | Command::PeerAck | Command::PeersInSync => 110,
            Command::Uuids110 | Command::PeerDagtag | Command::CurrentUuid => 110,
            Command::TwopcPrepRsz => 112,
            Command::ConfirmStable => 114,
            Command::RsCancelAhead => 115,
            Command::Disconnect => 118,
            Command::WriteAckInSync | Command::RsNegAck => 122,
            Command::OvResultId | Command::RsDeallocatedId => 122,
            Command::FlushRequestsAck if self.protocol == 0 => 0,
            Command::FlushRequests | Command::FlushForward | Command::FlushRequestsAck => 123,
            _ => 1,
        };
        let feature = match command {
            Command::Trim => Features::TRIM,
            Command::RsThinReq | Command::RsDeallocated => Features::THIN_RESYNC,
            Command::Wsame => Features::WSAME,
            Command::Zeroes => Features::WZEROES,
            Command::RsDagtagReq | Command::RsCsumDagtagReq => Features::RESYNC_DAGTAG,
            Command::RsThinDagtagReq => Features::RESYNC_DAGTAG.union(Features::THIN_RESYNC),
            Command::OvDagtagReq | Command::OvDagtagReply => Features::RESYNC_DAGTAG,
            _ => Features::empty(),
        };
        let refused = match command {
            Command::StateChgReq | Command::ConnStChgReq => self.protocol >= 110,
            _ => false,
        };
        self.protocol >= version && self.features.contains(feature) && !refused
    }
}

/// Kind of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeaderKind {
    /// 8 bytes, 16-bit length.
    H80,
    /// 8 bytes, 32-bit length.
    H95,
    /// 16 bytes, 32-bit length, volume number.
    H100,
}

impl HeaderKind {
    /// Bytes of the header.
    pub const fn len(self) -> usize {
        match self {
            HeaderKind::H80 | HeaderKind::H95 => 8,
            HeaderKind::H100 => 16,
        }
    }

    /// Always false: a header has bytes.
    pub const fn is_empty(self) -> bool {
        false
    }
}

/// A checked header: the command may travel here and its length is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of header that was used.
    pub kind: HeaderKind,
    /// Volume number; 0 where the kind has none.
    pub volume: VolumeNr,
    /// Command.
    pub command: Command,
    /// Bytes that follow the header.
    pub len: u32,
}

impl Header {
    /// Bytes behind the header to hold in memory for `decode`; all but the bulk payload. Bounded
    /// by 4 KiB whatever the peer sends.
    pub fn fixed_len(&self, dialect: &Dialect) -> usize {
        match bulk_fixed_len(self.command, dialect) {
            Some(fixed) => fixed as usize,
            None => self.len as usize,
        }
    }

    /// Bytes of bulk payload that follow the fixed part on the stream.
    pub fn payload_len(&self, dialect: &Dialect) -> u32 {
        match bulk_fixed_len(self.command, dialect) {
            Some(fixed) => self.len.saturating_sub(fixed),
            None => 0,
        }
    }

    /// Bytes of header, fixed part and payload together.
    pub const fn packet_len(&self) -> u64 {
        self.kind.len() as u64 + self.len as u64
    }

    /// Appends the header.
    ///
    /// # Panics
    ///
    /// If the length does not fit in a header of this kind, which is a bug of the caller.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + self.kind.len(), 0);
        self.write(&mut out[start..]);
    }

    /// Overwrites `out`, which has the length of the header.
    pub(super) fn write(&self, out: &mut [u8]) {
        let command = self.command.to_wire().to_be_bytes();
        let len = self.len.to_be_bytes();
        match self.kind {
            HeaderKind::H80 => {
                assert!(
                    self.len <= 0xFFFF,
                    "a short header carries 16 bits of length"
                );
                out[..4].copy_from_slice(&MAGIC_80.to_be_bytes());
                out[4..6].copy_from_slice(&command);
                out[6..8].copy_from_slice(&len[2..]);
            }
            HeaderKind::H95 => {
                out[..2].copy_from_slice(&MAGIC_95.to_be_bytes());
                out[2..4].copy_from_slice(&command);
                out[4..8].copy_from_slice(&len);
            }
            HeaderKind::H100 => {
                out[..4].copy_from_slice(&MAGIC_100.to_be_bytes());
                out[4..6].copy_from_slice(&self.volume.0.to_be_bytes());
                out[6..8].copy_from_slice(&command);
                out[8..12].copy_from_slice(&len);
                out[12..16].fill(0);
            }
        }
    }
}

/// Reads the 8 bytes with which the connecting side names the stream of a new TCP connection.
///
/// `None` asks for more bytes. The length field is not checked, as kernel peers do not check it.
pub fn decode_initial(bytes: &[u8]) -> Result<Option<Stream>, WireError> {
    let Some(head) = bytes.first_chunk::<8>() else {
        return Ok(None);
    };
    let (magic, command) = (be32(head, 0), be16(head, 4));
    if magic != MAGIC_80 {
        return Err(WireError::Magic {
            found: magic,
            protocol: 0,
        });
    }
    match Command::from_wire(command) {
        Some(Command::InitialData) => Ok(Some(Stream::Data)),
        Some(Command::InitialMeta) => Ok(Some(Stream::Control)),
        _ => Err(WireError::UnknownCommand {
            command,
            len: u32::from(be16(head, 6)),
        }),
    }
}

/// Reads and checks the header at the start of `bytes`. `None` asks for more bytes.
///
/// On the data stream only the kinds of the agreed version are accepted (before one is agreed the
/// short one and the 16-byte one), on the control stream all three.
pub fn decode_header(
    bytes: &[u8],
    stream: Stream,
    dialect: &Dialect,
) -> Result<Option<Header>, WireError> {
    let Some(head) = bytes.first_chunk::<8>() else {
        return Ok(None);
    };
    let magic = be32(head, 0);
    let kind = kind_of(magic)
        .filter(|kind| stream == Stream::Control || accepts(dialect.protocol, *kind))
        .ok_or(WireError::Magic {
            found: magic,
            protocol: dialect.protocol,
        })?;
    let (volume, command, len) = match kind {
        HeaderKind::H80 => (VolumeNr(0), be16(head, 4), u32::from(be16(head, 6))),
        HeaderKind::H95 => (VolumeNr(0), be16(head, 2), be32(head, 4)),
        HeaderKind::H100 => {
            let Some(long) = bytes.first_chunk::<16>() else {
                return Ok(None);
            };
            let (command, pad) = (be16(long, 6), be32(long, 12));
            if pad != 0 {
                return Err(WireError::HeaderPad {
                    command,
                    found: pad,
                });
            }
            (VolumeNr(be16(long, 4)), command, be32(long, 8))
        }
    };
    let command = Command::from_wire(command).ok_or(WireError::UnknownCommand { command, len })?;
    let header = Header {
        kind,
        volume,
        command,
        len,
    };
    check(&header, stream, dialect)?;
    Ok(Some(header))
}

fn kind_of(magic: u32) -> Option<HeaderKind> {
    match magic {
        MAGIC_100 => Some(HeaderKind::H100),
        MAGIC_80 => Some(HeaderKind::H80),
        _ if magic >> 16 == u32::from(MAGIC_95) => Some(HeaderKind::H95),
        _ => None,
    }
}

/// Whether a data stream of this version may use the kind.
fn accepts(protocol: u32, kind: HeaderKind) -> bool {
    match kind {
        HeaderKind::H100 => protocol == 0 || protocol >= 100,
        HeaderKind::H95 => (95..=99).contains(&protocol),
        HeaderKind::H80 => protocol < 100,
    }
}

fn check(header: &Header, stream: Stream, dialect: &Dialect) -> Result<(), WireError> {
    let Header { command, len, .. } = *header;
    if !command.streams().allow(stream) {
        return Err(WireError::WrongStream { command });
    }
    if !dialect.speaks(command) {
        let Dialect {
            protocol, features, ..
        } = *dialect;
        return Err(WireError::NotInDialect {
            command,
            protocol,
            features: features.bits(),
        });
    }
    let rule = length_rule(header, dialect);
    if len < rule.min || len > rule.max {
        return Err(WireError::Length {
            command,
            len,
            min: rule.min,
            max: rule.max,
        });
    }
    if !(len - rule.min).is_multiple_of(rule.unit) {
        return Err(WireError::Granularity {
            command,
            len,
            unit: rule.unit,
        });
    }
    Ok(())
}

/// Which lengths a command may have: `min + n * unit`, at most `max`.
struct LengthRule {
    min: u32,
    max: u32,
    unit: u32,
}

const fn exactly(len: u32) -> LengthRule {
    LengthRule {
        min: len,
        max: len,
        unit: 1,
    }
}

const fn between(min: u32, max: u32) -> LengthRule {
    LengthRule { min, max, unit: 1 }
}

/// Fixed part of the commands with bulk payload.
const fn bulk_fixed_len(command: Command, dialect: &Dialect) -> Option<u32> {
    match command {
        Command::Data | Command::DataReply | Command::RsDataReply => {
            Some(24 + dialect.integrity_len as u32)
        }
        Command::Wsame => Some(28 + dialect.integrity_len as u32),
        _ => None,
    }
}

/// Longest list of UUIDs: 32 bitmap slots and room for more history than anybody sends.
const UUIDS110_LEN_MAX: u32 = 40 + 8 * 128;

fn length_rule(header: &Header, dialect: &Dialect) -> LengthRule {
    use Command as C;
    let bitmap_max = BITMAP_PACKET_LEN - header.kind.len() as u32;
    match header.command {
        C::Data | C::DataReply | C::RsDataReply | C::Wsame => {
            let fixed = bulk_fixed_len(header.command, dialect).unwrap_or(0);
            // Replies are as long as their request, which is 1 MiB at most in every version.
            let limit = if header.command == C::Data {
                bio_len_max(dialect.protocol)
            } else {
                BIO_LEN_MAX
            };
            LengthRule {
                min: fixed + 512,
                max: fixed + limit,
                unit: 512,
            }
        }
        C::Bitmap => LengthRule {
            min: 0,
            max: bitmap_max,
            unit: 8,
        },
        C::CompressedBitmap => between(2, bitmap_max),
        C::OvReply | C::CsumRsRequest => between(24, 24 + DIGEST_LEN_MAX as u32),
        C::RsCsumDagtagReq | C::OvDagtagReply => between(32, 32 + DIGEST_LEN_MAX as u32),
        C::AuthResponse => between(1, DIGEST_LEN_MAX as u32),
        C::AuthChallenge => exactly(CHALLENGE_LEN as u32),
        C::Protocol | C::ProtocolUpdate if dialect.protocol < 87 => exactly(24),
        C::Protocol | C::ProtocolUpdate => between(25, 24 + ALG_NAME_LEN as u32),
        C::SyncParam if dialect.protocol < 88 => exactly(4),
        C::SyncParam => between(5, 4 + ALG_NAME_LEN as u32),
        C::SyncParam89 if dialect.protocol < 95 => exactly(132),
        C::SyncParam89 => exactly(148),
        C::Uuids110 => LengthRule {
            min: 40,
            max: UUIDS110_LEN_MAX,
            unit: 8,
        },
        C::Sizes if dialect.features.contains(Features::WSAME) => exactly(56),
        C::Sizes => exactly(32),
        C::InitialMeta | C::InitialData => exactly(0),
        C::UnplugRemote | C::Ping | C::PingAck | C::Disconnect => exactly(0),
        C::State | C::StateChgReply | C::ConnStChgReply => exactly(4),
        C::EnableReplication | C::EnableReplicationNext => exactly(4),
        C::Barrier | C::BarrierAck | C::SyncUuid | C::DelayProbe => exactly(8),
        C::StateChgReq | C::ConnStChgReq | C::Dagtag | C::FlushRequests => exactly(8),
        C::PeerDagtag | C::FlushForward | C::FlushRequestsAck => exactly(12),
        C::OutOfSync | C::RsDeallocated | C::PeerAck | C::CurrentUuid => exactly(16),
        C::DataRequest | C::RsDataRequest | C::OvRequest | C::RsThinReq => exactly(24),
        C::RecvAck | C::WriteAck | C::RsWriteAck | C::Superseded | C::NegAck => exactly(24),
        C::NegDreply | C::NegRsDreply | C::OvResult | C::RsIsInSync => exactly(24),
        C::RsCancel | C::RetryWrite | C::RsCancelAhead | C::WriteAckInSync => exactly(24),
        C::RsNegAck | C::RsDeallocatedId | C::PeersInSync | C::ConfirmStable => exactly(24),
        C::Trim | C::Zeroes => exactly(28),
        C::TwopcYes | C::TwopcNo | C::TwopcRetry | C::OvResultId => exactly(32),
        C::RsDagtagReq | C::RsThinDagtagReq | C::OvDagtagReq => exactly(32),
        C::TwopcPrepare | C::TwopcAbort | C::TwopcCommit | C::TwopcPrepRsz => exactly(36),
        C::Uuids => exactly(48),
        C::ConnectionFeatures => exactly(72),
    }
}

fn be16<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
