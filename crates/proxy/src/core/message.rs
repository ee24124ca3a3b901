//! Payloads of the frames that are not DATA. Every length is checked; a payload that is too short,
//! too long or holds text that is not UTF-8 is an error that closes the carrier.

/// The payload is not what its type demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0} message")]
pub(crate) struct Malformed(pub(crate) &'static str);

/// First frame on a control carrier, from the side that dialled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) protocol_min: u8,
    pub(crate) protocol_max: u8,
    /// Random per process; tells a restarted peer from the same one, and a loop from a peer.
    pub(crate) instance: [u8; 16],
    /// All zero: a new session is wanted.
    pub(crate) session: [u8; 16],
    /// Proof that the sender owns the session; zero for a new one.
    pub(crate) proof: [u8; 32],
    /// Changes with every HELLO, so a proof fits once.
    pub(crate) nonce: u64,
    /// Name of the connection at the sender.
    pub(crate) connection: String,
    /// The sender's outside address as configured there.
    pub(crate) my_outside: String,
    /// The address that the sender dials.
    pub(crate) peer_outside: String,
    /// Bit n set: codec n can be decoded.
    pub(crate) codecs: u32,
    /// Raw bytes that the sender is ready to hold per stream.
    pub(crate) window_bytes: u64,
}

/// Answer to HELLO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HelloAck {
    pub(crate) protocol: u8,
    pub(crate) resumed: bool,
    pub(crate) instance: [u8; 16],
    pub(crate) session: [u8; 16],
    /// Proves the ownership of the session later; the carrier is encrypted.
    pub(crate) key: [u8; 32],
    pub(crate) connection: String,
    pub(crate) codecs: u32,
    pub(crate) window_bytes: u64,
}

/// First frame on a bulk carrier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attach {
    pub(crate) session: [u8; 16],
    /// Number of the carrier in the session; counts up, so each proof is used once.
    pub(crate) number: u32,
    pub(crate) proof: [u8; 32],
}

/// Opens a lane for a carrier. Nothing in it for one of bulk, which says itself what it belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaneOpen {
    /// That of the HELLO with which the peer was asked for the connection, if it was.
    pub(crate) nonce: u64,
    /// The connection's outside addresses as the opener has them.
    pub(crate) my_outside: String,
    pub(crate) peer_outside: String,
}

/// Opens a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Open {
    pub(crate) class: u8,
    pub(crate) first: [u8; 8],
    /// Raw bytes that the opener accepts at first.
    pub(crate) window_end: u64,
}

/// State of one direction of a stream, as its receiver sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) stream: u32,
    /// Bytes accepted by the receiver's local socket; the end of the stream counts as one more.
    pub(crate) delivered: u64,
    /// Bytes received without a gap.
    pub(crate) received: u64,
    pub(crate) window_end: u64,
}

/// What one end measured, for the other end's decisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stats {
    /// Raw bytes per second that the decoders gave lately; 0 is unknown.
    pub(crate) decode_rate: u64,
    /// Thousandths of a core that its decoders can have; `None` is unknown.
    pub(crate) free_millicores: Option<u64>,
    /// (carrier number, bytes received on it); number 0 is the control carrier.
    pub(crate) carriers: Vec<(u32, u64)>,
}

/// Reader over a payload.
struct Cursor<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Cursor<'a> {
    fn new(what: &'static str, rest: &'a [u8]) -> Cursor<'a> {
        Cursor { rest, what }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(Malformed(self.what))?;
        self.rest = rest;
        Ok(*head)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Result<String, Malformed> {
        let len = usize::from(u16::from_le_bytes(self.array()?));
        if len > TEXT_MAX || len > self.rest.len() {
            return Err(Malformed(self.what));
        }
        let (head, rest) = self.rest.split_at(len);
        self.rest = rest;
        String::from_utf8(head.to_vec()).map_err(|_| Malformed(self.what))
    }

    fn end(self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Malformed(self.what))
        }
    }
}

/// In the place of a carrier's number in STATS: the free cores. No carrier has this number, so that
/// a proxy which does not know it looks past it.
const CORES: u32 = u32::MAX;
const TEXT_MAX: usize = 4096;

fn put_text(out: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&(end as u16).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.protocol_min, self.protocol_max];
        out.extend_from_slice(&self.instance);
        out.extend_from_slice(&self.session);
        out.extend_from_slice(&self.proof);
        out.extend_from_slice(&self.nonce.to_le_bytes());
        put_text(&mut out, &self.connection);
        put_text(&mut out, &self.my_outside);
        put_text(&mut out, &self.peer_outside);
        out.extend_from_slice(&self.codecs.to_le_bytes());
        out.extend_from_slice(&self.window_bytes.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Hello, Malformed> {
        let mut from = Cursor::new("HELLO", bytes);
        let hello = Hello {
            protocol_min: from.u8()?,
            protocol_max: from.u8()?,
            instance: from.array()?,
            session: from.array()?,
            proof: from.array()?,
            nonce: from.u64()?,
            connection: from.text()?,
            my_outside: from.text()?,
            peer_outside: from.text()?,
            codecs: from.u32()?,
            window_bytes: from.u64()?,
        };
        // A later version may append fields.
        Ok(hello)
    }
}

impl HelloAck {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.protocol, u8::from(self.resumed)];
        out.extend_from_slice(&self.instance);
        out.extend_from_slice(&self.session);
        out.extend_from_slice(&self.key);
        put_text(&mut out, &self.connection);
        out.extend_from_slice(&self.codecs.to_le_bytes());
        out.extend_from_slice(&self.window_bytes.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<HelloAck, Malformed> {
        let mut from = Cursor::new("HELLO_ACK", bytes);
        Ok(HelloAck {
            protocol: from.u8()?,
            resumed: from.u8()? != 0,
            instance: from.array()?,
            session: from.array()?,
            key: from.array()?,
            connection: from.text()?,
            codecs: from.u32()?,
            window_bytes: from.u64()?,
        })
    }
}

impl Attach {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = self.session.to_vec();
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.proof);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Attach, Malformed> {
        let mut from = Cursor::new("ATTACH", bytes);
        let attach = Attach {
            session: from.array()?,
            number: from.u32()?,
            proof: from.array()?,
        };
        from.end()?;
        Ok(attach)
    }
}

impl LaneOpen {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = self.nonce.to_le_bytes().to_vec();
        put_text(&mut out, &self.my_outside);
        put_text(&mut out, &self.peer_outside);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<LaneOpen, Malformed> {
        let mut from = Cursor::new("LANE_OPEN", bytes);
        let open = LaneOpen {
            nonce: from.u64()?,
            my_outside: from.text()?,
            peer_outside: from.text()?,
        };
        from.end()?;
        Ok(open)
    }
}

impl Open {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.class];
        out.extend_from_slice(&self.first);
        out.extend_from_slice(&self.window_end.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Open, Malformed> {
        let mut from = Cursor::new("OPEN", bytes);
        let open = Open {
            class: from.u8()?,
            first: from.array()?,
            window_end: from.u64()?,
        };
        from.end()?;
        Ok(open)
    }
}

impl Ack {
    const LEN: usize = 28;

    /// Several records in one payload, as ACK and RESUME carry them.
    pub(crate) fn encode_list(list: &[Ack]) -> Vec<u8> {
        let mut out = Vec::with_capacity(list.len() * Ack::LEN);
        for ack in list {
            out.extend_from_slice(&ack.stream.to_le_bytes());
            out.extend_from_slice(&ack.delivered.to_le_bytes());
            out.extend_from_slice(&ack.received.to_le_bytes());
            out.extend_from_slice(&ack.window_end.to_le_bytes());
        }
        out
    }

    pub(crate) fn decode_list(bytes: &[u8]) -> Result<Vec<Ack>, Malformed> {
        if !bytes.len().is_multiple_of(Ack::LEN) {
            return Err(Malformed("ACK"));
        }
        bytes
            .chunks(Ack::LEN)
            .map(|record| {
                let mut from = Cursor::new("ACK", record);
                Ok(Ack {
                    stream: from.u32()?,
                    delivered: from.u64()?,
                    received: from.u64()?,
                    window_end: from.u64()?,
                })
            })
            .collect()
    }
}

impl Stats {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = self.decode_rate.to_le_bytes().to_vec();
        let cores = self.free_millicores.map(|free| (CORES, free));
        for (number, bytes) in self.carriers.iter().chain(&cores) {
            out.extend_from_slice(&number.to_le_bytes());
            out.extend_from_slice(&bytes.to_le_bytes());
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Stats, Malformed> {
        let mut from = Cursor::new("STATS", bytes);
        let mut stats = Stats {
            decode_rate: from.u64()?,
            free_millicores: None,
            carriers: Vec::new(),
        };
        while !from.rest.is_empty() {
            match (from.u32()?, from.u64()?) {
                (CORES, free) => stats.free_millicores = Some(free),
                carrier => stats.carriers.push(carrier),
            }
        }
        Ok(stats)
    }
}

/// A HELLO for tests.
#[cfg(test)]
pub(crate) fn sample_hello() -> Hello {
    Hello {
        protocol_min: 1,
        protocol_max: 1,
        instance: [1; 16],
        session: [2; 16],
        proof: [3; 32],
        nonce: 4,
        connection: "r0-bob-alice".into(),
        my_outside: "192.0.2.1:7715".into(),
        peer_outside: "192.0.2.2:7715".into(),
        codecs: 63,
        window_bytes: 1 << 24,
    }
}

#[cfg(test)]
mod tests {
    use super::sample_hello as hello;
    use super::*;
    use crate::core::rng::Rng;

    #[test]
    fn messages_come_back_and_short_ones_are_refused() {
        let bytes = hello().encode();
        assert_eq!(Hello::decode(&bytes), Ok(hello()));
        for len in 0..bytes.len() {
            assert_eq!(Hello::decode(&bytes[..len]), Err(Malformed("HELLO")));
        }
        let attach = Attach {
            session: [9; 16],
            number: 77,
            proof: [4; 32],
        };
        assert_eq!(Attach::decode(&attach.encode()), Ok(attach));
        let open = Open {
            class: 2,
            first: *b"\x83\x74\x02\x67\xff\xf1\0\0",
            window_end: 5,
        };
        assert_eq!(Open::decode(&open.encode()), Ok(open));
        let lane = LaneOpen {
            nonce: 1 << 60,
            my_outside: "192.0.2.1:7715".into(),
            peer_outside: "[2001:db8::1]:7715".into(),
        };
        assert_eq!(LaneOpen::decode(&lane.encode()), Ok(lane));
        let stats = Stats {
            decode_rate: 8,
            free_millicores: Some(1500),
            carriers: vec![(0, 9), (3, 1 << 40)],
        };
        assert_eq!(Stats::decode(&stats.encode()), Ok(stats.clone()));
        let older = Stats {
            free_millicores: None,
            ..stats
        };
        assert_eq!(Stats::decode(&older.encode()), Ok(older));
        let acks = vec![
            Ack {
                stream: 1,
                delivered: 2,
                received: 3,
                window_end: 4
            };
            3
        ];
        assert_eq!(Ack::decode_list(&Ack::encode_list(&acks)), Ok(acks));
    }

    #[test]
    fn random_bytes_never_panic_in_any_message_decoder() {
        let mut rng = Rng::new(2);
        let seed = hello().encode();
        for _ in 0..3000 {
            let mut bytes = seed.clone();
            for _ in 0..rng.below(6) {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] = rng.next() as u8;
            }
            bytes.truncate(rng.below(bytes.len() as u64 + 1) as usize);
            let _ = Hello::decode(&bytes);
            let _ = HelloAck::decode(&bytes);
            let _ = Attach::decode(&bytes);
            let _ = Open::decode(&bytes);
            let _ = LaneOpen::decode(&bytes);
            let _ = Ack::decode_list(&bytes);
            let _ = Stats::decode(&bytes);
        }
    }
}
