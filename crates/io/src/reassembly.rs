//! The receiving half of a stream that comes over several paths: chunks in the order of their
//! sequence (wire.md, 9.1).
//!
//! Only the chunk at the head of each path is looked at. Until its turn comes it waits where it is,
//! with what came behind it in the same receive; the rest stays in the socket, so the peer is slowed
//! down, and memory is bounded by one receive for each path. Nothing is passed on out of order or
//! with a gap: what does not fit ends the connection.

use lockstep_format::wire::transport::LbTcpChunk;

use crate::receive::{DIRECT_BYTES, Receiver, Target};
use crate::ring::Memory;

/// Receive memory of a quiet path in bytes.
const QUIET_BYTES: usize = 1 << 10;
/// Receive memory of a busy path in bytes.
const BUSY_BYTES: usize = 256 << 10;
/// How much memory grows when receives fill it, and shrinks when they do not.
const GROWTH: usize = 8;
/// How far a path may be ahead of the others, in chunks. Socket buffers hold less.
const AHEAD_MAX: u32 = 1 << 24;

/// What one path brought of the stream.
#[derive(Debug)]
pub struct Inlet {
    memory: Vec<u8>,
    /// Bytes `start..end` of the memory are not passed on yet.
    start: usize,
    end: usize,
    /// The chunk whose header was read last, until it has been passed on.
    head: Option<LbTcpChunk>,
    /// Bytes of it that are not passed on.
    left: usize,
    /// It is the chunk that the stream goes on with.
    in_turn: bool,
    /// Bytes of the next receive's memory.
    wanted: usize,
}

impl Default for Inlet {
    fn default() -> Self {
        Inlet {
            memory: Vec::new(),
            start: 0,
            end: 0,
            head: None,
            left: 0,
            in_turn: false,
            wanted: QUIET_BYTES,
        }
    }
}

impl Inlet {
    /// Where the next bytes go; `None` while there are some whose turn has not come.
    pub fn target(&mut self) -> Option<Target> {
        if self.start < self.end
            && (self.head.is_some() || self.end - self.start >= LbTcpChunk::LEN)
        {
            return None;
        }
        // At most a part of a header is left.
        self.memory.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        if self.memory.len() != self.wanted {
            let mut memory = vec![0; self.wanted];
            memory[..self.end].copy_from_slice(&self.memory[..self.end]);
            self.memory = memory;
        }
        let (start, len) = (self.end as u32, (self.wanted - self.end) as u32);
        let memory = Memory::Bytes(std::mem::take(&mut self.memory));
        Some(Target { memory, start, len })
    }

    /// A receive into such a target brought `count` bytes.
    pub fn received(&mut self, memory: Vec<u8>, count: usize) {
        self.memory = memory;
        self.end += count;
        if self.end == self.memory.len() {
            self.wanted = BUSY_BYTES.min(self.wanted * GROWTH);
        } else if count < self.wanted / GROWTH {
            self.wanted = QUIET_BYTES.max(self.wanted / GROWTH);
        }
    }

    /// Nothing has come that is not passed on.
    pub fn is_between_chunks(&self) -> bool {
        self.head.is_none() && self.start == self.end
    }

    /// Forgets what has come: nobody wants it any more.
    pub fn discard(&mut self) {
        (self.start, self.end, self.left) = (0, 0, 0);
        (self.head, self.in_turn) = (None, false);
    }

    /// The chunk at the head, if its header is there.
    fn head(&mut self) -> Result<Option<LbTcpChunk>, ChunkError> {
        if self.head.is_none()
            && let Some(chunk) = LbTcpChunk::decode(&self.memory[self.start..self.end])
        {
            let LbTcpChunk { sequence, len } = chunk;
            if len == 0 {
                return Err(ChunkError::Empty { sequence });
            }
            if len > LbTcpChunk::LEN_MAX {
                return Err(ChunkError::TooLarge { sequence, len });
            }
            self.start += LbTcpChunk::LEN;
            self.left = len as usize;
            self.head = Some(chunk);
        }
        Ok(self.head)
    }

    /// Notes that `count` bytes of the chunk were passed on; `true` if that was all of it.
    fn passed(&mut self, count: usize) -> bool {
        self.left -= count;
        if self.left > 0 {
            return false;
        }
        (self.head, self.in_turn) = (None, false);
        true
    }
}

/// Where a stream stands.
#[derive(Debug)]
pub struct Reassembly {
    /// Sequence of the chunk that is being passed on or comes next.
    next: u32,
}

/// Whether every path that can bring a chunk is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paths {
    /// All that are configured stand.
    All,
    /// The peer may use one already that does not stand here yet.
    Some,
}

/// The peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// A chunk without bytes.
    #[error("chunk {sequence} has no bytes; a chunk has at least one")]
    Empty {
        /// Its sequence.
        sequence: u32,
    },
    /// More than any sender has at hand.
    #[error(
        "chunk {sequence} announces {len} bytes; a chunk has at most {}",
        LbTcpChunk::LEN_MAX
    )]
    TooLarge {
        /// Its sequence.
        sequence: u32,
        /// Its bytes.
        len: u32,
    },
    /// It has been passed on, or is of another connection.
    #[error("chunk {found} came again or late: {next} is the next one")]
    Behind {
        /// Its sequence.
        found: u32,
        /// What was expected.
        next: u32,
    },
    /// It cannot belong to what is under way.
    #[error("chunk {found} is too far ahead: {next} is the next one")]
    Ahead {
        /// Its sequence.
        found: u32,
        /// What was expected.
        next: u32,
    },
    /// No path can bring it any more.
    #[error("chunk {next} is missing: every path has gone on with a later one")]
    Missing {
        /// Its sequence.
        next: u32,
    },
}

impl ChunkError {
    /// What a peer sends that has given the connection up and begins a new one: to this node the
    /// path looks like a further one of the old connection.
    pub fn is_new_beginning(&self) -> bool {
        matches!(self, ChunkError::Behind { found: 1, .. })
    }
}

impl Default for Reassembly {
    fn default() -> Self {
        Reassembly { next: 1 }
    }
}

impl Reassembly {
    /// Gives the receiver the next bytes of the stream; `false` if they have not come.
    pub fn supply<L>(
        &mut self,
        lanes: &mut [L],
        inlet: impl Fn(&mut L) -> &mut Inlet,
        paths: Paths,
        receiver: &mut Receiver,
    ) -> Result<bool, ChunkError> {
        let at = lanes.iter_mut().position(|lane| inlet(lane).in_turn);
        let at = match at {
            Some(at) => Some(at),
            None => self.choose(lanes, &inlet, paths)?,
        };
        let Some(inlet) = at.map(|at| inlet(&mut lanes[at])) else {
            return Ok(false);
        };
        let here = inlet.left.min(inlet.end - inlet.start);
        let took = receiver.feed(&inlet.memory[inlet.start..inlet.start + here]);
        inlet.start += took;
        self.pass(inlet, took);
        Ok(took > 0)
    }

    /// Where payload goes that can be received without a copy: `inlet` has nothing else to bring
    /// now, and nobody but it.
    pub fn direct(inlet: &Inlet, receiver: &mut Receiver) -> Option<Target> {
        let waits = inlet.in_turn && inlet.start == inlet.end && inlet.left >= DIRECT_BYTES;
        if !waits || !receiver.wants_payload() {
            return None;
        }
        let target = receiver.target();
        let len = target.len.min(inlet.left as u32);
        Some(Target { len, ..target })
    }

    /// A receive into such a target brought `count` bytes.
    pub fn received_directly(&mut self, inlet: &mut Inlet, count: usize) {
        self.pass(inlet, count);
    }

    fn pass(&mut self, inlet: &mut Inlet, count: usize) {
        if count > 0 && inlet.passed(count) {
            self.next = self.next.wrapping_add(1);
        }
    }

    /// Looks for the path whose head is next.
    fn choose<L>(
        &self,
        lanes: &mut [L],
        inlet: impl Fn(&mut L) -> &mut Inlet,
        paths: Paths,
    ) -> Result<Option<usize>, ChunkError> {
        let next = self.next;
        let (mut chosen, mut later) = (None, 0);
        for (n, lane) in lanes.iter_mut().enumerate() {
            let Some(head) = inlet(lane).head()? else {
                continue;
            };
            let found = head.sequence;
            match found.wrapping_sub(next) {
                0 if chosen.is_some() => return Err(ChunkError::Behind { found, next }),
                0 => chosen = Some(n),
                ahead if ahead <= AHEAD_MAX => later += 1,
                ahead if ahead > u32::MAX / 2 => return Err(ChunkError::Behind { found, next }),
                _ => return Err(ChunkError::Ahead { found, next }),
            }
        }
        if let Some(chosen) = chosen {
            inlet(&mut lanes[chosen]).in_turn = true;
        } else if later > 0 && later == lanes.len() && paths == Paths::All {
            return Err(ChunkError::Missing { next });
        }
        Ok(chosen)
    }
}

#[cfg(test)]
#[path = "reassembly_tests.rs"]
mod tests;
