//! Puts the segments of TCP connections into order.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;

use super::pcap::Segment;

/// Most bytes that may wait for a missing segment, per direction.
const PENDING_BYTES_MAX: usize = 64 << 20;

/// Number of a connection in a capture, in the order of their beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TcpId(pub(crate) usize);

/// Direction inside a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the side that did `connect()`.
    FromClient,
    /// From the side that did `accept()`.
    FromServer,
}

impl Direction {
    /// 0 for the client, 1 for the server.
    pub(crate) fn index(self) -> usize {
        usize::from(self == Direction::FromServer)
    }
}

/// What a segment caused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TcpEvent<'a> {
    /// A connection began.
    Opened {
        id: TcpId,
        client: SocketAddr,
        server: SocketAddr,
    },
    /// The next bytes of a direction.
    Bytes {
        id: TcpId,
        direction: Direction,
        bytes: &'a [u8],
    },
    /// Both directions are over, or one side reset the connection.
    Closed { id: TcpId },
    /// More is missing than can be kept waiting.
    Lost { id: TcpId, direction: Direction },
    /// Bytes of a connection whose beginning is not in the capture.
    Stray {
        from: SocketAddr,
        to: SocketAddr,
        bytes: &'a [u8],
    },
}

/// Bytes of a direction that were left over at the end of the capture.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    pub(crate) id: TcpId,
    pub(crate) direction: Direction,
    /// Bytes missing before the first one that waits.
    pub(crate) missing: u64,
}

#[derive(Default)]
struct Half {
    /// Sequence number and stream offset of the next byte, once the SYN was seen.
    next: Option<(u32, u64)>,
    /// Segments that came too early, by stream offset.
    pending: BTreeMap<u64, Vec<u8>>,
    pending_bytes: usize,
    /// Stream offset behind the last byte, once the FIN was seen.
    end: Option<u64>,
    lost: bool,
}

struct Connection {
    id: TcpId,
    client: SocketAddr,
    client_sequence: u32,
    halves: [Half; 2],
    closed: bool,
}

/// All connections of a capture.
#[derive(Default)]
pub(crate) struct TcpTable {
    /// The current connection of each pair of addresses, lower one first.
    current: HashMap<(SocketAddr, SocketAddr), usize>,
    connections: Vec<Connection>,
}

impl TcpTable {
    /// Takes the next segment and tells what it caused.
    pub(crate) fn push(&mut self, segment: &Segment<'_>, mut tell: impl FnMut(TcpEvent<'_>)) {
        let key = (segment.from.min(segment.to), segment.from.max(segment.to));
        if segment.syn && !segment.ack {
            self.open(key, segment, &mut tell);
            return;
        }
        let Some(connection) = self
            .current
            .get(&key)
            .and_then(|index| self.connections.get_mut(*index))
        else {
            let (from, to) = (segment.from, segment.to);
            if !segment.payload.is_empty() {
                tell(TcpEvent::Stray {
                    from,
                    to,
                    bytes: segment.payload,
                });
            }
            return;
        };
        connection.push(segment, &mut tell);
    }

    /// What is missing in connections at the end of the capture.
    pub(crate) fn gaps(&self) -> Vec<Gap> {
        let mut gaps = Vec::new();
        for connection in &self.connections {
            for direction in [Direction::FromClient, Direction::FromServer] {
                let half = &connection.halves[direction.index()];
                if let (Some((_, at)), Some((first, _))) =
                    (half.next, half.pending.first_key_value())
                {
                    gaps.push(Gap {
                        id: connection.id,
                        direction,
                        missing: first - at,
                    });
                }
            }
        }
        gaps
    }

    fn open(
        &mut self,
        key: (SocketAddr, SocketAddr),
        segment: &Segment<'_>,
        tell: &mut impl FnMut(TcpEvent<'_>),
    ) {
        if let Some(old) = self
            .current
            .get(&key)
            .and_then(|i| self.connections.get_mut(*i))
        {
            let repeated = old.client == segment.from
                && old.client_sequence == segment.sequence
                && !old.closed;
            if repeated {
                return;
            }
            old.close(tell);
        }
        let id = TcpId(self.connections.len());
        let mut connection = Connection {
            id,
            client: segment.from,
            client_sequence: segment.sequence,
            halves: Default::default(),
            closed: false,
        };
        connection.halves[0].next = Some((segment.sequence.wrapping_add(1), 0));
        self.current.insert(key, id.0);
        self.connections.push(connection);
        tell(TcpEvent::Opened {
            id,
            client: segment.from,
            server: segment.to,
        });
    }
}

impl Connection {
    fn push(&mut self, segment: &Segment<'_>, tell: &mut impl FnMut(TcpEvent<'_>)) {
        if self.closed {
            return;
        }
        let direction = if segment.from == self.client {
            Direction::FromClient
        } else {
            Direction::FromServer
        };
        let id = self.id;
        let half = &mut self.halves[direction.index()];
        if segment.syn {
            half.next
                .get_or_insert((segment.sequence.wrapping_add(1), 0));
        }
        half.push(segment, |bytes| {
            tell(TcpEvent::Bytes {
                id,
                direction,
                bytes,
            })
        });
        if half.pending_bytes > PENDING_BYTES_MAX && !half.lost {
            half.lost = true;
            tell(TcpEvent::Lost { id, direction });
        }
        let over = self.halves.iter().all(Half::is_over);
        if segment.rst || over {
            self.close(tell);
        }
    }

    fn close(&mut self, tell: &mut impl FnMut(TcpEvent<'_>)) {
        if !self.closed {
            self.closed = true;
            tell(TcpEvent::Closed { id: self.id });
        }
    }
}

impl Half {
    fn push(&mut self, segment: &Segment<'_>, mut deliver: impl FnMut(&[u8])) {
        let Some((sequence, offset)) = self.next else {
            return;
        };
        let ahead = segment.sequence.wrapping_sub(sequence) as i32;
        if segment.fin {
            let start = offset.saturating_add_signed(i64::from(ahead));
            self.end = Some(start + segment.payload.len() as u64);
        }
        if segment.payload.is_empty() || segment.syn || self.lost {
            return;
        }
        if ahead > 0 {
            let place = self
                .pending
                .entry(offset + u64::from(ahead as u32))
                .or_default();
            if place.len() < segment.payload.len() {
                self.pending_bytes += segment.payload.len() - place.len();
                *place = segment.payload.to_vec();
            }
            return;
        }
        self.advance(segment.payload, ahead.unsigned_abs() as usize, &mut deliver);
        while let Some(entry) = self.pending.first_entry() {
            let Some((_, next)) = self.next.filter(|(_, next)| entry.key() <= next) else {
                break;
            };
            let (start, bytes) = entry.remove_entry();
            self.pending_bytes -= bytes.len();
            self.advance(&bytes, (next - start) as usize, &mut deliver);
        }
    }

    /// Whether everything up to the FIN was delivered.
    fn is_over(&self) -> bool {
        self.next
            .zip(self.end)
            .is_some_and(|((_, next), end)| next >= end)
    }

    /// Delivers what is new of `bytes`, whose first `known` bytes were delivered before.
    fn advance(&mut self, bytes: &[u8], known: usize, deliver: &mut impl FnMut(&[u8])) {
        let Some(new) = bytes.get(known..).filter(|new| !new.is_empty()) else {
            return;
        };
        if let Some((sequence, offset)) = &mut self.next {
            *sequence = sequence.wrapping_add(new.len() as u32);
            *offset += new.len() as u64;
        }
        deliver(new);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::{Direction, TcpEvent, TcpTable};
    use crate::inspect::pcap::Segment;

    fn addr(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], port))
    }

    fn segment(from: u16, to: u16, sequence: u32, payload: &[u8]) -> Segment<'_> {
        Segment {
            from: addr(from),
            to: addr(to),
            sequence,
            syn: false,
            ack: true,
            fin: false,
            rst: false,
            payload,
        }
    }

    /// Feeds the segments and returns the bytes of the client and how often it was closed.
    fn run(table: &mut TcpTable, segments: &[Segment<'_>]) -> (Vec<u8>, usize) {
        let (mut bytes_seen, mut closed) = (Vec::new(), 0);
        for segment in segments {
            table.push(segment, |event| match event {
                TcpEvent::Bytes {
                    direction: Direction::FromClient,
                    bytes,
                    ..
                } => {
                    bytes_seen.extend_from_slice(bytes);
                }
                TcpEvent::Closed { .. } => closed += 1,
                _ => {}
            });
        }
        (bytes_seen, closed)
    }

    fn syn() -> Segment<'static> {
        Segment {
            syn: true,
            ack: false,
            ..segment(1, 2, u32::MAX - 2, b"")
        }
    }

    #[test]
    fn repeated_and_reordered_segments_give_each_byte_once() {
        let mut table = TcpTable::default();
        let start = u32::MAX - 1;
        let segments = [
            syn(),
            syn(),
            segment(1, 2, start.wrapping_add(4), b"efg"),
            segment(1, 2, start, b"ab"),
            segment(1, 2, start, b"abcd"),
            segment(1, 2, start.wrapping_add(2), b"cdefghi"),
            segment(1, 2, start.wrapping_add(4), b"efg"),
        ];
        assert_eq!(run(&mut table, &segments), (b"abcdefghi".to_vec(), 0));
        assert!(table.gaps().is_empty());
    }

    #[test]
    fn a_missing_segment_is_a_gap_at_the_end() {
        let mut table = TcpTable::default();
        let segments = [syn(), segment(1, 2, 9, b"late")];
        assert_eq!(run(&mut table, &segments), (Vec::new(), 0));
        assert_eq!(table.gaps()[0].missing, 11);
    }

    #[test]
    fn the_same_ports_may_be_used_again() {
        let mut table = TcpTable::default();
        let again = Segment {
            sequence: 77,
            ..syn()
        };
        let segments = [
            syn(),
            segment(1, 2, u32::MAX - 1, b"x"),
            again,
            segment(1, 2, 78, b"y"),
        ];
        assert_eq!(run(&mut table, &segments), (b"xy".to_vec(), 1));
    }

    #[test]
    fn bytes_without_a_beginning_are_stray() {
        let mut stray = 0;
        TcpTable::default().push(&segment(1, 2, 5, b"x"), |event| {
            stray += usize::from(matches!(event, TcpEvent::Stray { .. }));
        });
        assert_eq!(stray, 1);
    }
}
