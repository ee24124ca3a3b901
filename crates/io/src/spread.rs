//! The sending half of a stream that goes over several paths: what is queued, cut into chunks
//! (wire.md, 9.1).
//!
//! As from a kernel, headers travel in chunks of whole packets and payload in chunks of its own, of
//! which one may be cut in two where a path has not enough room for all of it.

use std::collections::VecDeque;

use lockstep_format::wire::transport::LbTcpChunk;

use crate::ring::{Cut, SendList};
use crate::transmit::Transmitter;

/// Parts of payload are multiples of this many bytes.
const PART_BYTES: usize = 4096;
/// No part of payload is larger, so that one write keeps several paths busy. Larger than what is
/// worth to be received without a copy.
const PART_BYTES_MAX: usize = 64 << 10;

/// The chunks of a stream: the next one, and those under way.
#[derive(Debug)]
pub struct Spread {
    /// Sequence of the next chunk.
    next: u32,
    /// What chunks are cut from.
    list: Option<SendList>,
    /// Bytes of the chunks since the first one that has not left, and whether they have left.
    under_way: VecDeque<(usize, bool)>,
}

impl Default for Spread {
    fn default() -> Self {
        Spread {
            next: 1,
            list: None,
            under_way: VecDeque::new(),
        }
    }
}

impl Spread {
    /// Whether there is something to cut.
    pub fn is_waiting(&mut self, from: &mut Transmitter) -> bool {
        if self.list.is_none() {
            self.list = from.take();
        }
        self.list.is_some()
    }

    /// Cuts the next chunk and puts it at the end of `to`, which has room for so many bytes: its
    /// sequence and the bytes that went to `to`. `None` if nothing is queued.
    pub fn cut(
        &mut self,
        from: &mut Transmitter,
        to: &mut SendList,
        room: usize,
    ) -> Option<(u32, usize)> {
        if !self.is_waiting(from) {
            return None;
        }
        let list = self.list.as_mut()?;
        let (whole, cut) = list.first_piece()?;
        let len = match cut {
            Cut::Never => whole,
            Cut::Anywhere => {
                let part = room.min(PART_BYTES_MAX) / PART_BYTES * PART_BYTES;
                whole.min(part.max(PART_BYTES))
            }
        };
        let sequence = self.next;
        self.next = self.next.wrapping_add(1);
        let header = LbTcpChunk {
            sequence,
            len: len as u32,
        };
        to.push_bytes(&header.encode());
        list.move_to(to, len);
        if list.left() == 0
            && let Some(list) = self.list.take()
        {
            from.given_out(list);
        }
        self.under_way.push_back((len, false));
        Some((sequence, LbTcpChunk::LEN + len))
    }

    /// A chunk has left: the bytes of the stream that have left now because of it.
    pub fn left(&mut self, sequence: u32) -> u64 {
        let first = self.next.wrapping_sub(self.under_way.len() as u32);
        let at = sequence.wrapping_sub(first) as usize;
        if let Some((_, left)) = self.under_way.get_mut(at) {
            *left = true;
        }
        let mut bytes = 0;
        while let Some((len, _)) = self.under_way.pop_front_if(|(_, left)| *left) {
            bytes += len as u64;
        }
        bytes
    }
}

#[cfg(test)]
#[path = "spread_tests.rs"]
mod tests;
