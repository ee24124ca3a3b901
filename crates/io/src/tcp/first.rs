//! The first packet on a connection, plain or as a chunk (wire.md, 2.3 and 9.1).

use lockstep_format::wire::transport::LbTcpChunk;
use lockstep_format::wire::{self, WireError};

/// How the bytes of a connection are framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Packets follow each other.
    Plain,
    /// They are in chunks.
    Chunks,
}

/// Why a connection is closed after its first packet.
#[derive(Debug, thiserror::Error)]
pub enum FirstPacketError {
    /// Only the peer uses all paths.
    #[error(
        "the peer uses all paths at once and this node does not: \
         set load-balance-paths alike on both nodes"
    )]
    PeerBalances,
    /// Only this node uses all paths.
    #[error(
        "this node uses all paths at once and the peer does not: \
         set load-balance-paths alike on both nodes"
    )]
    PeerIsPlain,
    /// Something else.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl Framing {
    /// What stands before the first packet.
    pub fn prefix(self) -> &'static [u8] {
        const CHUNK: [u8; LbTcpChunk::LEN] = LbTcpChunk::FIRST.encode();
        match self {
            Framing::Plain => &[],
            Framing::Chunks => &CHUNK,
        }
    }

    /// What the first packet says; `None` asks for more bytes.
    pub fn first(self, bytes: &[u8]) -> Result<Option<wire::Stream>, FirstPacketError> {
        match (self, LbTcpChunk::decode(bytes)) {
            (Framing::Plain, Some(LbTcpChunk::FIRST)) => Err(FirstPacketError::PeerBalances),
            (Framing::Plain, _) => Ok(wire::decode_initial(bytes)?),
            (Framing::Chunks, None) => Ok(None),
            // The sequence of a first packet means nothing.
            (Framing::Chunks, Some(chunk)) if chunk.len == LbTcpChunk::FIRST.len => {
                Ok(wire::decode_initial(&bytes[LbTcpChunk::LEN..])?)
            }
            (Framing::Chunks, Some(_)) => match wire::decode_initial(bytes)? {
                Some(_) => Err(FirstPacketError::PeerIsPlain),
                None => Ok(None),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use lockstep_format::wire::Stream;

    use super::{FirstPacketError, Framing};

    const DATA: [u8; 8] = [0x83, 0x74, 0x02, 0x67, 0xff, 0xf2, 0, 0];
    const CONTROL: [u8; 8] = [0x83, 0x74, 0x02, 0x67, 0xff, 0xf1, 0, 0];

    #[test]
    fn the_first_packet_of_a_path_is_a_chunk_whose_sequence_means_nothing() {
        let mut bytes = Framing::Chunks.prefix().to_vec();
        assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 8]);
        bytes.extend(CONTROL);
        for len in 0..16 {
            assert!(matches!(Framing::Chunks.first(&bytes[..len]), Ok(None)));
        }
        let first = |bytes: &[u8]| Framing::Chunks.first(bytes).unwrap();
        assert_eq!(first(&bytes), Some(Stream::Control));
        bytes[3] = 7;
        assert_eq!(first(&bytes), Some(Stream::Control));
        assert_eq!(Framing::Plain.first(&DATA).unwrap(), Some(Stream::Data));
    }

    #[test]
    fn a_peer_with_the_other_framing_is_told_apart() {
        let plain = Framing::Chunks.first(&DATA);
        assert!(matches!(plain, Err(FirstPacketError::PeerIsPlain)));
        let chunk = Framing::Plain.first(Framing::Chunks.prefix());
        assert!(matches!(chunk, Err(FirstPacketError::PeerBalances)));
        for framing in [Framing::Plain, Framing::Chunks] {
            let stranger = framing.first(b"GET / HTTP/1.1\r\n");
            assert!(matches!(stranger, Err(FirstPacketError::Wire(_))));
        }
    }
}
