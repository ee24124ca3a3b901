//! One end of a TCP connection to the peer proxy, whoever has it, the control lane or a shard:
//! TLS, cutting what comes into frames, and writing what was given, in order.

use std::collections::VecDeque;
use std::io::{BufRead, IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use rustix::event::epoll;
use socket2::Socket;

use super::TURN_BYTES;
use super::carrier::RECORD_BYTES;
use super::watch::Watch;
use crate::core::frame::{Bytes, HEADER_LEN, WireCut, WireReader};
use crate::tls::failure;

/// A part of a frame on its way out: bytes `from..to` of header and payload, behind the header of
/// the segment if it is a lane's.
pub(super) struct Piece {
    segment: Option<[u8; HEADER_LEN]>,
    header: [u8; HEADER_LEN],
    payload: Bytes,
    from: usize,
    to: usize,
    /// Bytes of the segment's header that went out.
    begun: usize,
}

impl Piece {
    pub(super) fn of(
        segment: Option<[u8; HEADER_LEN]>,
        header: [u8; HEADER_LEN],
        payload: &Bytes,
        from: usize,
        to: usize,
    ) -> Piece {
        Piece {
            segment,
            header,
            payload: Arc::clone(payload),
            from,
            to,
            begun: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.segment.map_or(0, |_| HEADER_LEN - self.begun) + self.to - self.from
    }

    /// What is left of it: of the segment's header, of the header and of the payload.
    fn parts(&self) -> [&[u8]; 3] {
        let segment = self
            .segment
            .as_ref()
            .map_or(&[][..], |head| &head[self.begun..]);
        let head = &self.header[self.from.min(HEADER_LEN)..self.to.min(HEADER_LEN)];
        let start = self.from.saturating_sub(HEADER_LEN);
        let end = self.to.saturating_sub(HEADER_LEN).max(start);
        [segment, head, &self.payload[start..end]]
    }

    /// So many bytes went out; true when it is through.
    fn advance(&mut self, count: usize) -> bool {
        let left = self.segment.map_or(0, |_| HEADER_LEN - self.begun);
        self.begun += count.min(left);
        self.from += count - count.min(left);
        self.len() == 0
    }
}

/// What one look at the socket brought.
pub(super) struct Received {
    /// Bytes that the kernel had; 0 without a failure: nothing is there now.
    pub(super) sealed: usize,
    /// Bytes of frames.
    pub(super) plain: usize,
    pub(super) cut: WireCut,
    /// Why no more will follow.
    pub(super) failure: Option<String>,
}

/// A socket to the peer proxy.
pub(super) struct WireEnd {
    socket: Arc<Socket>,
    pub(super) tls: Option<Box<rustls::Connection>>,
    reader: WireReader,
    queue: VecDeque<Piece>,
    /// Bytes in the queue, and bytes that went out and of which the control lane was not told.
    pub(super) queued_bytes: usize,
    pub(super) untold_bytes: usize,
    /// Bytes that the control lane has not looked at.
    pub(super) unread: Arc<AtomicUsize>,
    pub(super) resting: bool,
    /// Without TLS: the kernel had no room. Also after a full turn, and while connecting.
    pub(super) full: bool,
    watched: Watch,
}

impl WireEnd {
    pub(super) fn new(socket: Arc<Socket>, mut tls: Option<Box<rustls::Connection>>) -> WireEnd {
        if let Some(tls) = &mut tls {
            tls.set_buffer_limit(Some(BATCH_BYTES));
        }
        WireEnd {
            socket,
            tls,
            reader: WireReader::default(),
            queue: VecDeque::new(),
            queued_bytes: 0,
            untold_bytes: 0,
            unread: Arc::default(),
            resting: false,
            full: false,
            watched: Watch::default(),
        }
    }

    pub(super) fn is_handshaking(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_handshaking())
    }

    /// Reads once.
    pub(super) fn receive(&mut self, scratch: &mut [u8]) -> Received {
        let nothing = |failure| Received {
            sealed: 0,
            plain: 0,
            cut: WireCut::default(),
            failure,
        };
        let sealed = loop {
            match (&*self.socket).read(scratch) {
                Ok(0) => return nothing(Some(CLOSED.into())),
                Ok(len) => break len,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return nothing(None);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return nothing(Some(error.to_string())),
            }
        };
        let (plain, cut, failure) = self.open(&scratch[..sealed]);
        Received {
            sealed,
            plain,
            cut,
            failure,
        }
    }

    /// Opens and cuts received bytes: the count of plain bytes, what they are, and why no more
    /// will follow.
    fn open(&mut self, mut sealed: &[u8]) -> (usize, WireCut, Option<String>) {
        let Some(tls) = &mut self.tls else {
            return (sealed.len(), self.reader.cut(sealed), None);
        };
        let (mut total, mut all) = (0, WireCut::default());
        while !sealed.is_empty() && all.error.is_none() {
            let result = tls
                .read_tls(&mut sealed)
                .map_err(|error| error.to_string())
                .and_then(|_| tls.process_new_packets().map_err(|error| failure(&error)));
            if let Err(error) = result {
                // Tell the peer why, if the socket takes it.
                while tls.wants_write() && tls.write_tls(&mut (&*self.socket)).is_ok() {}
                return (total, all, Some(format!("TLS: {error}")));
            }
            if let Some(end) = take_plain(tls, &mut self.reader, &mut total, &mut all) {
                return (total, all, Some(end));
            }
        }
        (total, all, None)
    }

    /// What came together with the end of the handshake.
    pub(super) fn rest_of_handshake(&mut self) -> Received {
        let (mut plain, mut cut) = (0, WireCut::default());
        let failure = match &mut self.tls {
            Some(tls) => take_plain(tls, &mut self.reader, &mut plain, &mut cut),
            None => None,
        };
        Received {
            sealed: 0,
            plain,
            cut,
            failure,
        }
    }

    pub(super) fn put(&mut self, pieces: Vec<Piece>) {
        self.queued_bytes += pieces.iter().map(Piece::len).sum::<usize>();
        self.queue.extend(pieces);
    }

    /// Whether it has something that the kernel does not take now.
    pub(super) fn is_blocked(&self) -> bool {
        self.full || self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Writes what the kernel takes, for one turn; a failure ends the carrier.
    pub(super) fn write(&mut self) -> Option<std::io::Error> {
        let mut sent = 0;
        loop {
            if let Err(error) = self.push_tls() {
                return Some(error);
            }
            if self.is_blocked() || self.queue.is_empty() {
                return None;
            }
            if sent >= TURN_BYTES {
                // The others first; the writable socket brings us back.
                self.full = true;
                return None;
            }
            match self.write_some() {
                Ok(count) => {
                    sent += count;
                    self.queued_bytes -= count;
                    self.untold_bytes += count;
                }
                Err(error) => return Some(error),
            }
        }
    }

    /// Moves sealed bytes to the kernel as far as it takes them.
    fn push_tls(&mut self) -> std::io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return Ok(());
        };
        while tls.wants_write() {
            match tls.write_tls(&mut (&*self.socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Gives TLS or the kernel the front of the queue, over the borders of its pieces: a record, a
    /// call and a packet cost the same for a few bytes as for many.
    fn write_some(&mut self) -> std::io::Result<usize> {
        let mut parts = Vec::with_capacity(3 * self.queue.len().min(PIECES_MAX));
        let mut room = BATCH_BYTES;
        for piece in self.queue.iter().take(PIECES_MAX) {
            for part in piece.parts() {
                let part = &part[..part.len().min(room)];
                room -= part.len();
                if !part.is_empty() {
                    parts.push(IoSlice::new(part));
                }
            }
        }
        let count = match &mut self.tls {
            // It takes no more than its buffer's limit.
            Some(tls) => tls.writer().write_vectored(&parts)?,
            None => loop {
                match (&*self.socket).write_vectored(&parts) {
                    Ok(count) => break count,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        self.full = true;
                        return Ok(0);
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            },
        };
        let mut left = count;
        while let Some(piece) = self.queue.front_mut() {
            let done = left.min(piece.len());
            left -= done;
            if !piece.advance(done) {
                break;
            }
            self.queue.pop_front();
        }
        Ok(count)
    }

    pub(super) fn watch(&mut self, epoll: &OwnedFd, token: u64) -> rustix::io::Result<()> {
        let mut interest = match self.resting {
            true => epoll::EventFlags::empty(),
            false => epoll::EventFlags::IN,
        };
        if self.is_blocked() {
            interest |= epoll::EventFlags::OUT;
        }
        self.watched.set(epoll, &self.socket, token, interest)
    }

    /// Leaves the epoll set in which it is, if it is in one.
    pub(super) fn unwatch(&mut self, epoll: &OwnedFd) {
        self.watched.end(epoll, &self.socket);
    }
}

/// Bytes that go to TLS, and sealed to the kernel, at once: whole records, with the lane's queue for
/// a thin line being shorter than this.
const BATCH_BYTES: usize = 16 * RECORD_BYTES;
/// Pieces that are looked at for it; with three parts each, fewer parts than the kernel takes.
const PIECES_MAX: usize = 64;

const CLOSED: &str = "the peer closed the connection";

/// Cuts the plain bytes that TLS has; an answer says why no more will follow.
fn take_plain(
    tls: &mut rustls::Connection,
    reader: &mut WireReader,
    total: &mut usize,
    all: &mut WireCut,
) -> Option<String> {
    let mut plain = tls.reader();
    loop {
        match plain.fill_buf() {
            Ok([]) => return Some(CLOSED.into()),
            Ok(bytes) => {
                let len = bytes.len();
                let mut cut = reader.cut(bytes);
                plain.consume(len);
                *total += len;
                all.items.append(&mut cut.items);
                all.error = cut.error;
                if all.error.is_some() {
                    return None;
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
            Err(error) => return Some(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn small_pieces_go_out_together_and_never_more_than_a_batch() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let mut end = WireEnd::new(Arc::new(near.into()), None);
        let sent: Vec<u8> = (0..300_000u32).map(|at| (at / 7) as u8).collect();
        let payload: Bytes = Arc::new(sent.clone().into());
        let to = HEADER_LEN + sent.len();
        let piece =
            |from, to| Piece::of(Some([9; HEADER_LEN]), [8; HEADER_LEN], &payload, from, to);
        let cuts = [0, 10, HEADER_LEN + 1, 5000, to];
        end.put(cuts.windows(2).map(|cut| piece(cut[0], cut[1])).collect());
        let total = end.queued_bytes;
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; total];
            far.read_exact(&mut got).unwrap();
            got
        });
        // The socket blocks, so it takes all that it is given.
        assert_eq!(end.write_some().unwrap(), BATCH_BYTES);
        assert_eq!(end.queue.len(), 1);
        assert_eq!(end.write_some().unwrap(), total - BATCH_BYTES);
        assert!(end.queue.is_empty());
        let frame = [&[8; HEADER_LEN][..], &sent].concat();
        let mut want = Vec::new();
        for cut in cuts.windows(2) {
            want.extend([9; HEADER_LEN]);
            want.extend(&frame[cut[0]..cut[1]]);
        }
        assert!(reader.join().unwrap() == want);
    }
}
