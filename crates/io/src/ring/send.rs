//! A gathered send: headers in one vector, payload in pool buffers, sent in one system call.

use std::convert::Infallible;

use crate::pool::BufRef;

/// Most pieces of one system call (the kernel's limit is 1024).
const PIECES_PER_CALL: usize = 512;
/// Headers that follow each other are one piece up to so many bytes, so that a part of them can be
/// cut off without cutting a packet.
const HEAD_PIECE_BYTES: usize = 4096;
/// Most bytes of one system call, so that progress is seen on a slow line.
const BYTES_PER_CALL: usize = 1 << 20;

/// What is to be sent on one stream, in order, and how much of it has been sent.
#[derive(Debug, Default)]
pub struct SendList {
    head: Vec<u8>,
    pieces: Vec<Piece>,
    /// First piece that is not completely sent, and bytes of it that are.
    next: (usize, usize),
    left: usize,
    vectors: Vectors,
}

#[derive(Debug)]
enum Piece {
    /// A range of `head`.
    Head { start: usize, len: usize },
    /// A part of a buffer.
    Buf {
        buf: BufRef,
        start: usize,
        len: usize,
    },
}

/// Whether a piece may be cut in two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Payload.
    Anywhere,
    /// Whole packets.
    Never,
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Head { len, .. } | Piece::Buf { len, .. } => *len,
        }
    }
}

/// The kernel's view of the next call. Valid from `prepare` until the list is changed.
#[derive(Default)]
struct Vectors {
    vectors: Vec<libc::iovec>,
    message: Option<Box<libc::msghdr>>,
}

// SAFETY: the pointers are only used between `prepare` and the completion of the call, by whoever
// owns the whole list; they point into memory that the list owns.
unsafe impl Send for Vectors {}

impl std::fmt::Debug for Vectors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vectors({})", self.vectors.len())
    }
}

impl SendList {
    /// Appends header bytes that `write` puts behind those that are there.
    pub fn push_head<E>(
        &mut self,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = self.head.len();
        if let Err(error) = write(&mut self.head) {
            self.head.truncate(start);
            return Err(error);
        }
        let len = self.head.len() - start;
        self.left += len;
        match self.pieces.last_mut() {
            Some(Piece::Head { len: before, .. }) if *before + len <= HEAD_PIECE_BYTES => {
                *before += len;
            }
            _ => self.pieces.push(Piece::Head { start, len }),
        }
        Ok(())
    }

    /// Appends bytes by copying them.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        let Ok(()) = self.push_head(|head| -> Result<(), Infallible> {
            head.extend_from_slice(bytes);
            Ok(())
        });
    }

    /// Appends `len` bytes of a buffer from `start` on.
    pub fn push_buf(&mut self, buf: BufRef, start: usize, len: usize) {
        assert!(
            start + len <= buf.capacity(),
            "the payload lies within its buffer"
        );
        self.left += len;
        self.pieces.push(Piece::Buf { buf, start, len });
    }

    /// Bytes that are not sent yet.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Notes that the first `count` unsent bytes are sent; their buffers are given back.
    pub fn advance(&mut self, mut count: usize) {
        assert!(count <= self.left, "no more bytes are sent than there are");
        self.left -= count;
        while let Some(piece) = self.pieces.get_mut(self.next.0) {
            let rest = piece.len() - self.next.1;
            if count < rest {
                self.next.1 += count;
                return;
            }
            count -= rest;
            // The buffer goes back to the pool now, not when the whole list is sent.
            *piece = Piece::Head { start: 0, len: 0 };
            self.next = (self.next.0 + 1, 0);
        }
    }

    /// Bytes of the first piece that is not sent, and whether it is payload, which may be cut.
    pub fn first_piece(&self) -> Option<(usize, Cut)> {
        let piece = self.pieces.get(self.next.0)?;
        let cut = match piece {
            Piece::Head { .. } => Cut::Never,
            Piece::Buf { .. } => Cut::Anywhere,
        };
        Some((piece.len() - self.next.1, cut))
    }

    /// Moves the first `len` bytes, which lie in the first piece, to the end of another list.
    /// Payload is not copied.
    pub fn move_to(&mut self, to: &mut SendList, len: usize) {
        let skip = self.next.1;
        match self.pieces.get(self.next.0) {
            None => return,
            Some(Piece::Head { start, len: whole }) => {
                assert!(skip + len <= *whole, "the bytes lie in one piece");
                to.push_bytes(&self.head[start + skip..start + skip + len]);
            }
            Some(Piece::Buf { buf, start, .. }) => to.push_buf(buf.clone(), start + skip, len),
        }
        self.advance(len);
    }

    /// The unsent bytes, copied: for those who look at them before they leave.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut skip = self.next.1;
        for piece in &self.pieces[self.next.0..] {
            let len = piece.len() - skip;
            match piece {
                Piece::Head { start, .. } => {
                    bytes.extend_from_slice(&self.head[start + skip..start + skip + len]);
                }
                Piece::Buf { buf, start, .. } => {
                    buf.with_bytes(start + skip, len, |part| bytes.extend_from_slice(part));
                }
            }
            skip = 0;
        }
        bytes
    }

    /// Empties the list and keeps its memory for the next use.
    pub fn clear(&mut self) {
        self.head.clear();
        self.pieces.clear();
        self.next = (0, 0);
        self.left = 0;
        self.vectors.vectors.clear();
    }

    /// Describes the next call. The pointer is valid while the list is neither changed nor dropped;
    /// moving the list is allowed, because everything pointed to is on the heap.
    pub(super) fn prepare(&mut self) -> *const libc::msghdr {
        let vectors = &mut self.vectors.vectors;
        vectors.clear();
        let mut room = BYTES_PER_CALL;
        let mut skip = self.next.1;
        for piece in self.pieces[self.next.0..].iter().take(PIECES_PER_CALL) {
            let len = (piece.len() - skip).min(room);
            if len == 0 {
                break;
            }
            let base = match piece {
                Piece::Head { start, .. } => self.head[start + skip..start + skip + len]
                    .as_ptr()
                    .cast_mut(),
                Piece::Buf { buf, start, .. } => buf.ptr_at(start + skip, len),
            };
            vectors.push(libc::iovec {
                iov_base: base.cast(),
                iov_len: len,
            });
            room -= len;
            skip = 0;
        }
        let message = self.vectors.message.get_or_insert_with(|| {
            // SAFETY: all-zero bytes are a valid `msghdr`: no address, no vectors, no control.
            Box::new(unsafe { std::mem::zeroed() })
        });
        message.msg_iov = vectors.as_mut_ptr();
        message.msg_iovlen = vectors.len() as _;
        &raw const **message
    }
}

#[cfg(test)]
mod tests {
    use super::SendList;
    use crate::pool::IoBuf;

    /// The bytes that the next call would send.
    fn bytes_of_next_call(list: &mut SendList) -> Vec<u8> {
        let message = list.prepare();
        let mut bytes = Vec::new();
        // SAFETY: `prepare` has just filled the message, and the list is not changed meanwhile.
        unsafe {
            for n in 0..(*message).msg_iovlen {
                let vector = *(*message).msg_iov.add(n);
                bytes.extend_from_slice(std::slice::from_raw_parts(
                    vector.iov_base.cast::<u8>(),
                    vector.iov_len,
                ));
            }
        }
        bytes
    }

    #[test]
    fn a_list_cut_anywhere_goes_on_with_the_next_byte() {
        let mut source = IoBuf::standalone(8192).unwrap();
        source
            .iter_mut()
            .enumerate()
            .for_each(|(n, byte)| *byte = n as u8);
        let source = source.share();
        let mut list = SendList::default();
        let fill = |list: &mut SendList| {
            list.clear();
            list.push_head(|head| -> Result<(), ()> {
                head.extend_from_slice(b"one");
                Ok(())
            })
            .unwrap();
            assert!(
                list.push_head(|head| {
                    head.push(9);
                    Err(())
                })
                .is_err()
            );
            list.push_head(|head| -> Result<(), ()> {
                head.extend_from_slice(b"two");
                Ok(())
            })
            .unwrap();
            list.push_buf(source.clone(), 5, 7);
            list.push_head(|head| -> Result<(), ()> {
                head.push(b'3');
                Ok(())
            })
            .unwrap();
        };
        let whole = b"onetwo\x05\x06\x07\x08\x09\x0a\x0b3";
        for cut in 0..=whole.len() {
            fill(&mut list);
            assert_eq!(list.left(), whole.len());
            assert_eq!(bytes_of_next_call(&mut list), whole);
            list.advance(cut);
            assert_eq!(bytes_of_next_call(&mut list), whole[cut..]);
            assert_eq!(list.left(), whole.len() - cut);
        }
        drop(list);
        assert!(source.try_into_buf().is_ok());
    }
}
