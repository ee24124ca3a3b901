//! Framing of the transports that are not plain TCP: lb-tcp chunks, RDMA messages (wire.md 9).

use super::error::WireError;

/// Header of a chunk on a path of the lb-tcp transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbTcpChunk {
    /// Number of the chunk in its stream, from 1, over all paths, modulo 2^32.
    pub sequence: u32,
    /// Bytes that follow the header.
    pub len: u32,
}

impl LbTcpChunk {
    /// Bytes of the header.
    pub const LEN: usize = 8;
    /// Most bytes of one chunk. A kernel puts at most the rest of one payload into it.
    pub const LEN_MAX: u32 = 16 << 20;
    /// The header of the first packet on each connection, which is not counted.
    pub const FIRST: LbTcpChunk = LbTcpChunk {
        sequence: 0,
        len: 8,
    };

    /// Reads the header of a chunk. `None` asks for more bytes.
    pub fn decode(bytes: &[u8]) -> Option<LbTcpChunk> {
        let [a, b, c, d, e, f, g, h] = *bytes.first_chunk::<8>()?;
        let sequence = u32::from_be_bytes([a, b, c, d]);
        let len = u32::from_be_bytes([e, f, g, h]);
        Some(LbTcpChunk { sequence, len })
    }

    /// The header as it travels.
    pub const fn encode(self) -> [u8; 8] {
        let word = (self.sequence as u64) << 32 | self.len as u64;
        word.to_be_bytes()
    }
}

/// Flow-control message of the RDMA transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaFlowControl {
    /// Receive buffers newly posted for the data stream.
    pub new_data_buffers: u32,
    /// Receive buffers newly posted for the control stream.
    pub new_control_buffers: u32,
    /// Stream whose credit this message used.
    pub credit_of: super::Stream,
}

impl RdmaFlowControl {
    /// "RWIN".
    pub const MAGIC: u32 = 0x5257_494E;
    /// Bytes of the message.
    pub const LEN: usize = 16;

    /// Reads a message, which is exactly 16 bytes long.
    pub fn decode(bytes: &[u8; 16]) -> Result<RdmaFlowControl, WireError> {
        let word = |at: usize| {
            bytes[at..at + 4]
                .iter()
                .fold(0, |word, byte| word << 8 | u32::from(*byte))
        };
        if word(0) != Self::MAGIC {
            return Err(WireError::Magic {
                found: word(0),
                protocol: 0,
            });
        }
        let credit_of = match word(12) {
            0 => super::Stream::Data,
            1 => super::Stream::Control,
            other => {
                return Err(WireError::Magic {
                    found: other,
                    protocol: 0,
                });
            }
        };
        Ok(RdmaFlowControl {
            new_data_buffers: word(4),
            new_control_buffers: word(8),
            credit_of,
        })
    }

    /// The message as it travels.
    pub fn encode(self) -> [u8; 16] {
        let credit_of = u32::from(self.credit_of == super::Stream::Control);
        let words = [
            Self::MAGIC,
            self.new_data_buffers,
            self.new_control_buffers,
            credit_of,
        ];
        let mut bytes = [0; 16];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::{LbTcpChunk, RdmaFlowControl};
    use crate::wire::Stream;

    #[test]
    fn a_chunk_header_is_sequence_and_length() {
        let bytes = [0, 0, 0, 1, 0, 0, 0, 16, 0x86];
        let chunk = LbTcpChunk {
            sequence: 1,
            len: 16,
        };
        assert_eq!(LbTcpChunk::decode(&bytes), Some(chunk));
        assert_eq!(chunk.encode(), bytes[..8]);
        assert_eq!(LbTcpChunk::decode(&bytes[..7]), None);
    }

    #[test]
    fn a_flow_control_message_names_the_stream_whose_credit_it_used() {
        let bytes = *b"RWIN\x00\x00\x01\x04\x00\x00\x00\x08\x00\x00\x00\x01";
        let message = RdmaFlowControl {
            new_data_buffers: 260,
            new_control_buffers: 8,
            credit_of: Stream::Control,
        };
        assert_eq!(RdmaFlowControl::decode(&bytes), Ok(message));
        assert_eq!(message.encode(), bytes);
        let mut unknown = bytes;
        unknown[15] = 2;
        assert!(RdmaFlowControl::decode(&unknown).is_err());
    }
}
