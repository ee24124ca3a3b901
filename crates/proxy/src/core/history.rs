//! Compression over chunk borders: what both ends remember of a stream so that a chunk can refer to
//! the bytes before it.
//!
//! The sender keeps what it took for coding, by offset; the receiver keeps what it delivered, in
//! order. A chunk that is marked as the beginning makes the receiver forget what was before it, so
//! a sender that restarts, or changes its codec and comes back, never refers to bytes that the
//! other end lacks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::frame::Bytes;

/// Least and largest history of one stream. The window of the codec fits into 2^28 bytes.
pub(crate) const HISTORY_MIN: u64 = 1 << 20;
pub(crate) const HISTORY_MAX: u64 = 128 << 20;

/// Place of the history's size (as a power of two; 0 is none) in the bitmap of codecs that HELLO
/// carries.
const GRANT_SHIFT: u32 = 24;

/// What a peer is told it may refer to. `bytes` is 0 or a power of two.
pub(crate) fn grant_bits(bytes: u64) -> u32 {
    if bytes == 0 {
        0
    } else {
        bytes.ilog2() << GRANT_SHIFT
    }
}

/// What the peer is ready to remember of one stream.
pub(crate) fn granted(codecs: u32) -> u64 {
    match codecs >> GRANT_SHIFT {
        0 => 0,
        power => 1u64.checked_shl(power).unwrap_or(0).min(HISTORY_MAX),
    }
}

/// The largest grant within `left` bytes and a fair `share`; 0 if that is too little.
pub(crate) fn grant(left: u64, share: u64) -> u64 {
    let bytes = left.min(share).min(HISTORY_MAX);
    if bytes < HISTORY_MIN {
        0
    } else {
        1 << bytes.ilog2()
    }
}

/// Pieces that follow each other, oldest first.
pub(crate) type Prefix = Vec<Bytes>;

/// Copies a prefix into one piece, as the codec wants it.
pub(crate) fn joined(prefix: &Prefix) -> Vec<u8> {
    let mut out = Vec::with_capacity(prefix.iter().map(|piece| piece.len()).sum());
    for piece in prefix {
        out.extend_from_slice(piece);
    }
    out
}

/// The sender's memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct TxHistory {
    pieces: BTreeMap<u64, Bytes>,
    bytes: u64,
    /// Nothing before this offset is known to the peer.
    start: Option<u64>,
}

impl TxHistory {
    pub(crate) fn held_bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a chunk at this offset must tell the peer to begin remembering.
    pub(crate) fn begin(&mut self, offset: u64) -> bool {
        let begins = self.start.is_none();
        self.start.get_or_insert(offset);
        begins
    }

    pub(crate) fn is_active(&self) -> bool {
        self.start.is_some()
    }

    /// The bytes directly before `offset`, at most `limit` of them.
    pub(crate) fn prefix(&self, offset: u64, limit: u64) -> Prefix {
        let mut out = VecDeque::new();
        let (mut at, mut left) = (offset, limit);
        for (from, piece) in self.pieces.range(..offset).rev() {
            let len = piece.len() as u64;
            if from + len != at || len > left {
                break;
            }
            out.push_front(Arc::clone(piece));
            (at, left) = (*from, left - len);
        }
        out.into()
    }

    /// Remembers a chunk and forgets what no later chunk may refer to.
    pub(crate) fn note(&mut self, offset: u64, raw: &Bytes, limit: u64) {
        if self.start.is_none_or(|start| offset < start) || raw.is_empty() {
            return;
        }
        self.bytes += raw.len() as u64;
        self.pieces.insert(offset, Arc::clone(raw));
        while self.bytes > limit
            && let Some((_, old)) = self.pieces.pop_first()
        {
            self.bytes -= old.len() as u64;
        }
    }

    pub(crate) fn clear(&mut self) {
        *self = TxHistory::default();
    }
}

/// The receiver's memory; `None` until the sender asks for it.
#[derive(Clone, Debug, Default)]
pub(crate) struct RxHistory {
    kept: Option<VecDeque<Bytes>>,
    bytes: u64,
    limit: u64,
}

impl RxHistory {
    pub(crate) fn new(limit: u64) -> RxHistory {
        RxHistory {
            kept: None,
            bytes: 0,
            limit,
        }
    }

    /// What another process had kept.
    pub(crate) fn taken_over(limit: u64, kept: Option<Bytes>) -> RxHistory {
        let bytes = kept.as_ref().map_or(0, |kept| kept.len() as u64);
        RxHistory {
            kept: kept.map(|kept| VecDeque::from([kept])),
            bytes,
            limit,
        }
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn kept(&self) -> Option<Bytes> {
        let kept = self.kept.as_ref()?;
        Some(Arc::new(joined(&kept.iter().cloned().collect()).into()))
    }

    /// The next chunk in order is here.
    pub(crate) fn push(&mut self, raw: &Bytes, begins: bool) {
        if begins {
            self.kept = (self.limit > 0).then(VecDeque::new);
            self.bytes = 0;
        }
        let Some(kept) = &mut self.kept else { return };
        kept.push_back(Arc::clone(raw));
        self.bytes += raw.len() as u64;
        // The oldest piece stays while a prefix of the full limit reaches into it.
        while let Some(oldest) = kept.front()
            && self.bytes - oldest.len() as u64 >= self.limit
        {
            self.bytes -= oldest.len() as u64;
            kept.pop_front();
        }
    }

    /// The last `len` bytes, or `None` if fewer are kept.
    pub(crate) fn last(&self, len: u64) -> Option<Prefix> {
        let kept = self.kept.as_ref()?;
        if len > self.bytes || len > self.limit {
            return None;
        }
        let mut out = VecDeque::new();
        let mut left = len as usize;
        for piece in kept.iter().rev() {
            if left == 0 {
                break;
            }
            let part = piece.len().min(left);
            let piece = if part == piece.len() {
                Arc::clone(piece)
            } else {
                Arc::new(piece[piece.len() - part..].to_vec().into())
            };
            out.push_front(piece);
            left -= part;
        }
        Some(out.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(byte: u8, len: usize) -> Bytes {
        Arc::new(vec![byte; len].into())
    }

    #[test]
    fn a_prefix_is_what_lies_directly_before_and_within_the_limit() {
        let mut tx = TxHistory::default();
        assert!(tx.begin(100) && !tx.begin(200));
        tx.note(50, &piece(0, 50), 1000);
        for (offset, byte) in [(100, 1), (110, 2), (130, 4)] {
            tx.note(offset, &piece(byte, 10), 25);
        }
        assert_eq!(tx.held_bytes(), 20, "the oldest is forgotten");
        assert_eq!(joined(&tx.prefix(120, 25)), [2; 10]);
        assert_eq!(joined(&tx.prefix(140, 25)), [4; 10], "a gap ends it");
        assert!(joined(&tx.prefix(130, 25)).is_empty());
        tx.note(120, &piece(3, 10), 1000);
        assert_eq!(joined(&tx.prefix(140, 15)), [4; 10], "whole chunks only");
        assert_eq!(joined(&tx.prefix(140, 1000)).len(), 30);
    }

    #[test]
    fn the_receiver_keeps_as_much_as_any_sender_may_refer_to() {
        let mut rx = RxHistory::new(25);
        rx.push(&piece(9, 10), false);
        assert!(rx.last(1).is_none(), "nobody asked to remember");
        rx.push(&piece(1, 10), true);
        rx.push(&piece(2, 10), false);
        rx.push(&piece(3, 10), false);
        assert_eq!(rx.last(30), None, "more than was granted");
        let last = joined(&rx.last(25).unwrap());
        assert_eq!((last[0], last[5], last[24]), (1, 2, 3));
        rx.push(&piece(4, 10), false);
        assert_eq!(rx.held_bytes(), 30);
        rx.push(&piece(5, 4), true);
        assert!(rx.last(5).is_none() && rx.last(4).is_some());
        assert_eq!(RxHistory::taken_over(25, rx.kept()).last(4), rx.last(4));
    }

    #[test]
    fn grants_travel_in_the_bitmap_and_are_bounded() {
        for bytes in [0, HISTORY_MIN, 8 << 20, HISTORY_MAX] {
            assert_eq!(granted(grant_bits(bytes) | 0x7f), bytes);
        }
        assert_eq!(granted(u32::MAX), 0);
        assert_eq!(grant(3 << 20, 100 << 20), 2 << 20);
        assert_eq!(grant(900 << 20, 100 << 20), 64 << 20);
        assert_eq!(grant(1 << 30, 1 << 30), HISTORY_MAX);
        assert_eq!(grant(HISTORY_MIN - 1, 1 << 30), 0);
    }
}
