//! I/O shards: threads that do the heavy socket work. DRBD's data sockets and bulk carriers move
//! here once it is known what they are; reading, writing, TLS and the cutting of frames then cost
//! the control lane nothing. A shard decides nothing: it reads as much as it was told to, writes
//! what it was given, in order, and tells the lane what happened.
//!
//! What is on its way between the threads is bounded: a socket of DRBD is read once per order, what
//! is written to it is bounded by the stream's window, a carrier is given at most `PIPE_MAX` bytes,
//! and reading from it rests while the lane has more than `UNREAD_MAX` of its bytes to look at.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use rustix::buffer::spare_capacity;
use rustix::event::epoll;

use super::TURN_BYTES;
use super::local::LocalSock;
use super::wire::{Piece, Received, WireEnd};
use crate::core::frame::{Bytes, WireCut};
use crate::core::{Close, LocalId, WireId};
use crate::mail::{Bell, Mail, Post};

/// Bytes of a carrier that a shard may have and the kernel not: what passes in 20 ms, so that
/// neither thread waits for the other's turn, and not more, for a choice made late (codec, carrier,
/// rate) is to take effect soon.
pub(super) const PIPE_MAX: usize = 1 << 20;
/// At least so many.
pub(super) const PIPE_MIN: usize = 64 << 10;
/// As long as nobody knows what passes.
pub(super) const PIPE_FIRST: usize = 256 << 10;
/// Bytes of a carrier that the control lane may have to look at before reading rests.
pub(super) const UNREAD_MAX: usize = 2 << 20;
/// Orders that are taken before sockets get their turn.
const ORDERS_PER_TURN: usize = 64;
/// Shards are so much nicer than the control lane, and less nice than the codecs.
const NICENESS: i32 = 2;
/// Token of the bell; sockets have their number, which all kinds draw from one sequence.
const BELL: u64 = 0;

/// What a shard is to do.
pub(super) enum Order {
    /// Owns this socket from now on.
    AdoptLocal(LocalId, LocalSock),
    /// Reads once, at most so many bytes, and waits if nothing is there.
    ReadLocal(LocalId, usize),
    WriteLocal(LocalId, Bytes),
    /// Ends the sending direction after everything queued.
    ShutdownLocal(LocalId),
    CloseLocal(LocalId, Close),
    AdoptCarrier(WireId, Box<WireEnd>),
    Send(WireId, Vec<Piece>),
    /// The control lane has caught up.
    Resume(WireId),
    /// Writes these if the socket takes them, then closes it.
    CloseCarrier(WireId, Vec<Piece>),
    /// Gives all sockets of DRBD back that are not closing.
    Recall(Sender<Vec<(LocalId, LocalSock)>>),
    Stop,
}

/// What a shard has done.
#[derive(Debug)]
pub(crate) enum News {
    /// A read order found nothing then; something is there now.
    Readable(LocalId),
    /// The answer to a read order.
    Data(LocalId, Vec<u8>),
    /// Another answer: nothing is there; `Readable` will follow.
    Nothing(LocalId),
    /// Another answer: nothing will come any more.
    Eof(LocalId),
    /// The kernel took so many bytes.
    Written(LocalId, usize),
    /// The socket failed and is closed.
    Failed(LocalId, String),
    /// Bytes came on a carrier, and what they are.
    Came(WireId, usize, WireCut),
    /// The kernel or TLS took so many bytes of a carrier.
    Sent(WireId, usize),
    /// The carrier failed and is closed.
    Down(WireId, String),
}

/// A shard as the control lane sees it.
pub(crate) struct Shard {
    orders: Sender<Order>,
    bell: Bell,
    thread: Option<JoinHandle<()>>,
}

impl Shard {
    pub(crate) fn start(number: usize, post: &Post) -> std::io::Result<Shard> {
        let bell = Bell::new()?;
        let (orders, receiver) = channel();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(BELL);
        epoll::add(&epoll, &bell, data, epoll::EventFlags::IN)?;
        let work = Work {
            epoll,
            orders: receiver,
            bell: bell.clone(),
            post: post.clone(),
            locals: BTreeMap::new(),
            carriers: BTreeMap::new(),
            scratch: vec![0; TURN_BYTES],
            untold: false,
        };
        let thread = std::thread::Builder::new()
            .name(format!("proxy-io-{number}"))
            .spawn(move || work.run())?;
        Ok(Shard {
            orders,
            bell,
            thread: Some(thread),
        })
    }

    pub(super) fn send(&self, order: Order) {
        // A shard ends only when it is told to.
        let _ = self.orders.send(order);
        self.bell.ring();
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        self.send(Order::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What a shard's thread owns.
struct Work {
    epoll: OwnedFd,
    orders: Receiver<Order>,
    bell: Bell,
    post: Post,
    locals: BTreeMap<LocalId, LocalSock>,
    carriers: BTreeMap<WireId, WireEnd>,
    scratch: Vec<u8>,
    /// There is news of which the lane was not woken.
    untold: bool,
}

impl Work {
    fn run(mut self) {
        // On Linux this is the thread's own priority. Without the right to it a shard works as well.
        let _ = rustix::process::nice(NICENESS);
        let mut events = Vec::with_capacity(64);
        let mut more = false;
        loop {
            if std::mem::take(&mut self.untold) {
                self.post.ring();
            }
            let timeout = more.then(rustix::event::Timespec::default);
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "epoll failed; an I/O shard stops");
                    return;
                }
            }
            for event in &events {
                let (token, flags) = (event.data.u64(), event.flags);
                if token == BELL {
                    self.bell.silence();
                } else if self.locals.contains_key(&LocalId(token)) {
                    self.local_ready(LocalId(token), flags);
                } else {
                    self.carrier_ready(WireId(token), flags);
                }
            }
            more = false;
            for count in 0.. {
                match self.orders.try_recv() {
                    Ok(Order::Stop) => return,
                    Ok(order) => self.obey(order),
                    Err(_) => break,
                }
                if count == ORDERS_PER_TURN {
                    more = true;
                    break;
                }
            }
        }
    }

    /// The lane is woken once for all that a turn brings.
    fn tell(&mut self, news: News) {
        self.post.put(Mail::News(news));
        self.untold = true;
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::AdoptLocal(local, sock) => {
                self.locals.insert(local, sock);
                self.local_flush(local);
            }
            Order::ReadLocal(local, allowed) => self.local_read(local, allowed),
            Order::WriteLocal(local, data) => {
                if let Some(sock) = self.locals.get_mut(&local) {
                    sock.queue.push_back((data, 0));
                    if sock.queue.len() == 1 {
                        self.local_flush(local);
                    }
                }
            }
            Order::ShutdownLocal(local) => {
                if let Some(sock) = self.locals.get_mut(&local) {
                    sock.shutdown = true;
                    self.local_flush(local);
                }
            }
            Order::CloseLocal(local, Close::Orderly) => {
                if let Some(sock) = self.locals.get_mut(&local) {
                    sock.closing = true;
                    sock.want_read = false;
                    self.local_flush(local);
                }
            }
            Order::CloseLocal(local, Close::Reset) => {
                // The lane has told the socket to reset; dropping it does.
                self.forget_local(local);
            }
            Order::AdoptCarrier(carrier, end) => {
                self.carriers.insert(carrier, *end);
                self.carrier_flush(carrier);
            }
            Order::Send(carrier, pieces) => {
                if let Some(end) = self.carriers.get_mut(&carrier) {
                    end.put(pieces);
                    self.carrier_flush(carrier);
                }
            }
            Order::Resume(carrier) => {
                if let Some(end) = self.carriers.get_mut(&carrier) {
                    end.resting = false;
                    self.watch_carrier(carrier);
                }
            }
            Order::CloseCarrier(carrier, pieces) => {
                if let Some(end) = self.carriers.get_mut(&carrier) {
                    end.put(pieces);
                    // What it still had to say is said if the socket takes it; waiting longer
                    // would keep a dead socket.
                    let _ = end.write();
                    self.forget_carrier(carrier);
                }
            }
            Order::Recall(reply) => {
                let mut back = Vec::new();
                for (local, mut sock) in std::mem::take(&mut self.locals) {
                    if sock.closing {
                        self.locals.insert(local, sock);
                    } else {
                        sock.unwatch(&self.epoll);
                        back.push((local, sock));
                    }
                }
                // Who asked may have lost patience.
                if let Err(refused) = reply.send(back) {
                    for (local, sock) in refused.0 {
                        self.locals.insert(local, sock);
                        self.watch_local(local);
                    }
                }
            }
            Order::Stop => {}
        }
    }

    fn local_ready(&mut self, local: LocalId, flags: epoll::EventFlags) {
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        if flags.contains(epoll::EventFlags::ERR)
            && let Ok(Some(error)) = sock.socket.take_error()
        {
            self.local_lost(local, &error.to_string());
            return;
        }
        if flags.contains(epoll::EventFlags::OUT) {
            self.local_flush(local);
        }
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        if sock.want_read {
            let readable = epoll::EventFlags::IN | epoll::EventFlags::HUP;
            if flags.intersects(readable) {
                sock.want_read = false;
                self.tell(News::Readable(local));
                self.watch_local(local);
            }
        } else if flags.contains(epoll::EventFlags::HUP) {
            // Both directions ended, but nobody may read yet: do not be told again and again.
            sock.unwatch(&self.epoll);
        }
    }

    fn local_read(&mut self, local: LocalId, allowed: usize) {
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        let (data, end) = sock.read(allowed, &mut self.scratch);
        match end {
            None if data.is_empty() => {
                sock.want_read = true;
                self.tell(News::Nothing(local));
                self.watch_local(local);
            }
            None => self.tell(News::Data(local, data)),
            Some(Ok(())) => self.tell(News::Eof(local)),
            Some(Err(error)) => self.local_lost(local, &error.to_string()),
        }
    }

    fn local_flush(&mut self, local: LocalId) {
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        let (written, failure) = sock.write_queue();
        let done = sock.closing && sock.queue.is_empty();
        if written > 0 {
            self.tell(News::Written(local, written));
        }
        match failure {
            Some(error) => self.local_lost(local, &error.to_string()),
            None if done => self.forget_local(local),
            None => self.watch_local(local),
        }
    }

    /// The lane may still hold the socket, so it must leave the set by itself.
    fn forget_local(&mut self, local: LocalId) {
        if let Some(mut sock) = self.locals.remove(&local) {
            sock.unwatch(&self.epoll);
        }
    }

    fn local_lost(&mut self, local: LocalId, reason: &str) {
        self.forget_local(local);
        self.tell(News::Failed(local, reason.into()));
    }

    fn watch_local(&mut self, local: LocalId) {
        if let Some(sock) = self.locals.get_mut(&local)
            && let Err(error) = sock.watch(&self.epoll, local.0)
        {
            self.local_lost(local, &error.to_string());
        }
    }

    fn carrier_ready(&mut self, carrier: WireId, flags: epoll::EventFlags) {
        let Some(end) = self.carriers.get_mut(&carrier) else {
            return;
        };
        let resting = end.resting;
        if flags.contains(epoll::EventFlags::OUT) {
            end.full = false;
            self.carrier_flush(carrier);
        }
        let failed = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
        // A failed one is told again and again, and what it has still brought is of no use.
        if failed || flags.contains(epoll::EventFlags::IN) && !resting {
            self.carrier_read(carrier);
        }
    }

    fn carrier_read(&mut self, carrier: WireId) {
        let mut budget = TURN_BYTES;
        while budget > 0 {
            let Some(end) = self.carriers.get_mut(&carrier) else {
                return;
            };
            let Received {
                sealed,
                plain,
                cut,
                failure,
            } = end.receive(&mut self.scratch);
            if sealed == 0 && failure.is_none() {
                break;
            }
            budget = budget.saturating_sub(sealed);
            let broken = cut.error.is_some();
            if plain > 0 {
                let before = end.unread.fetch_add(plain, Ordering::AcqRel);
                end.resting = before + plain > UNREAD_MAX;
                self.tell(News::Came(carrier, plain, cut));
            }
            if let Some(reason) = failure {
                self.carrier_lost(carrier, &reason);
                return;
            }
            let resting = self.carriers.get(&carrier).is_none_or(|end| end.resting);
            if broken || resting {
                break;
            }
        }
        // TLS may have something to answer.
        self.carrier_flush(carrier);
    }

    fn carrier_flush(&mut self, carrier: WireId) {
        let Some(end) = self.carriers.get_mut(&carrier) else {
            return;
        };
        let failure = end.write();
        // Not for every record: while half of it waits here, the lane need not bring more.
        if end.untold_bytes > 0 && end.untold_bytes >= end.queued_bytes {
            let sent = std::mem::take(&mut end.untold_bytes);
            self.tell(News::Sent(carrier, sent));
        }
        match failure {
            Some(error) => self.carrier_lost(carrier, &error.to_string()),
            None => self.watch_carrier(carrier),
        }
    }

    fn forget_carrier(&mut self, carrier: WireId) {
        if let Some(mut end) = self.carriers.remove(&carrier) {
            end.unwatch(&self.epoll);
        }
    }

    fn carrier_lost(&mut self, carrier: WireId, reason: &str) {
        self.forget_carrier(carrier);
        self.tell(News::Down(carrier, reason.into()));
    }

    fn watch_carrier(&mut self, carrier: WireId) {
        if let Some(end) = self.carriers.get_mut(&carrier)
            && let Err(error) = end.watch(&self.epoll, carrier.0)
        {
            self.carrier_lost(carrier, &error.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use socket2::Socket;

    use super::*;
    use crate::core::frame::{Frame, Header, Item, Kind};
    use crate::mail::{Mailbox, mailbox};

    const PATIENCE: Duration = Duration::from_secs(20);

    fn sockets() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        far.set_read_timeout(Some(PATIENCE)).unwrap();
        let near: Socket = listener.accept().unwrap().0.into();
        near.set_nonblocking(true).unwrap();
        (near, far)
    }

    fn frame(number: u64, len: usize) -> Frame {
        let header = Header {
            offset: number,
            raw_len: len as u32,
            payload_len: len as u32,
            ..Header::session(Kind::Data)
        };
        Frame {
            header,
            payload: Arc::new(
                (0..len)
                    .map(|at| (at as u64 * 7 + number) as u8)
                    .collect::<Vec<u8>>()
                    .into(),
            ),
        }
    }

    fn segment(lane: u32, len: usize) -> Header {
        Header {
            stream: lane,
            payload_len: len as u32,
            ..Header::session(Kind::Lane)
        }
    }

    fn news(mailbox: &Mailbox) -> News {
        match mailbox.take_within(PATIENCE) {
            Some(Mail::News(news)) => news,
            other => panic!("{other:?}"),
        }
    }

    fn carrier(near: Socket) -> (Order, Arc<AtomicUsize>) {
        let unread = Arc::new(AtomicUsize::new(0));
        let mut end = WireEnd::new(Arc::new(near), None);
        end.unread = Arc::clone(&unread);
        (Order::AdoptCarrier(WireId(7), Box::new(end)), unread)
    }

    #[test]
    fn a_carrier_rests_while_the_lane_is_behind_and_loses_nothing() {
        const FRAMES: u64 = 160;
        let (post, mailbox) = mailbox().unwrap();
        let shard = Shard::start(0, &post).unwrap();
        let (near, mut far) = sockets();
        let (adopt, unread) = carrier(near);
        shard.send(adopt);
        let writer = std::thread::spawn(move || {
            for number in 0..FRAMES {
                let frame = frame(number, 100_000);
                let bytes = [&frame.header.encode()[..], &frame.payload].concat();
                for piece in bytes.chunks(40_000) {
                    far.write_all(&segment(5, piece.len()).encode()).unwrap();
                    far.write_all(piece).unwrap();
                }
            }
            far
        });
        let (mut next, mut behind) = (0, 0);
        while next < FRAMES {
            let News::Came(WireId(7), len, cut) = news(&mailbox) else {
                panic!("nothing else is to be told");
            };
            assert!(cut.error.is_none());
            for item in cut.items {
                let Item::Lane {
                    lane: 5, frames, ..
                } = item
                else {
                    panic!("nothing else was sent");
                };
                for got in frames {
                    assert_eq!(got, frame(next, 100_000));
                    next += 1;
                }
            }
            behind += len;
            assert!(behind <= UNREAD_MAX + TURN_BYTES, "{behind}");
            if behind > UNREAD_MAX {
                // Only now the lane looks at it all.
                unread.fetch_sub(std::mem::take(&mut behind), Ordering::AcqRel);
                shard.send(Order::Resume(WireId(7)));
            }
        }
        drop(writer.join().unwrap());
        assert!(matches!(news(&mailbox), News::Down(WireId(7), _)));
    }

    #[test]
    fn pieces_of_frames_go_out_in_order_and_the_last_words_before_the_end() {
        let (post, mailbox) = mailbox().unwrap();
        let shard = Shard::start(0, &post).unwrap();
        let (near, mut far) = sockets();
        shard.send(carrier(near).0);
        let sent = frame(3, 5000);
        let whole = [&sent.header.encode()[..], &sent.payload].concat();
        let cuts = [0, 1, 31, 32, 33, 4000, whole.len()];
        let piece = |from, to| Piece::of(None, sent.header.encode(), &sent.payload, from, to);
        for (from, to) in cuts.iter().zip(&cuts[1..]) {
            shard.send(Order::Send(WireId(7), vec![piece(*from, *to)]));
        }
        let mut got = vec![0; whole.len()];
        far.read_exact(&mut got).unwrap();
        assert!(got == whole);
        let mut told = 0;
        while told < whole.len() {
            let News::Sent(WireId(7), bytes) = news(&mailbox) else {
                panic!("nothing else is to be told");
            };
            told += bytes;
        }
        assert_eq!(told, whole.len());
        let last = vec![piece(0, whole.len())];
        shard.send(Order::CloseCarrier(WireId(7), last));
        let mut rest = Vec::new();
        far.read_to_end(&mut rest).unwrap();
        assert!(rest == whole);
    }

    #[test]
    fn drbds_sockets_are_read_as_told_and_come_back_with_what_is_not_written() {
        let (post, mailbox) = mailbox().unwrap();
        let shard = Shard::start(0, &post).unwrap();
        let (near, mut far) = sockets();
        let local = LocalId(9);
        shard.send(Order::AdoptLocal(local, LocalSock::new(near, 0, false)));
        shard.send(Order::ReadLocal(local, 3));
        assert!(matches!(news(&mailbox), News::Nothing(LocalId(9))));
        far.write_all(b"hello").unwrap();
        assert!(matches!(news(&mailbox), News::Readable(LocalId(9))));
        for want in [&b"hel"[..], b"lo"] {
            shard.send(Order::ReadLocal(local, 3));
            let News::Data(LocalId(9), got) = news(&mailbox) else {
                panic!("there is something to read");
            };
            assert_eq!(got, want);
        }
        // More than the kernel takes; what it took is told before the socket comes back.
        let data: Bytes = Arc::new(
            (0..64_000_000u32)
                .map(|at| (at / 3) as u8)
                .collect::<Vec<u8>>()
                .into(),
        );
        shard.send(Order::WriteLocal(local, Arc::clone(&data)));
        let (sender, receiver) = channel();
        shard.send(Order::Recall(sender));
        let back = receiver.recv_timeout(PATIENCE).unwrap();
        let [(LocalId(9), sock)] = &back[..] else {
            panic!("one socket: {back:?}");
        };
        let mut written = 0;
        while let Some(mail) = mailbox.take() {
            let Mail::News(News::Written(LocalId(9), bytes)) = mail else {
                panic!("nothing else is to be told");
            };
            written += bytes;
        }
        assert!(written > 0 && written < data.len());
        assert_eq!(sock.unwritten_bytes(), data.len() - written);
        assert!(sock.unwritten() == data[written..]);
        let mut got = vec![0; written];
        far.read_exact(&mut got).unwrap();
        assert!(got == data[..written]);
        drop(back);
        assert_eq!(far.read(&mut [0; 8]).unwrap(), 0);
    }

    #[test]
    fn the_end_follows_what_is_queued_and_a_reset_does_not_wait() {
        let (post, mailbox) = mailbox().unwrap();
        let shard = Shard::start(0, &post).unwrap();
        let (near, mut far) = sockets();
        let local = LocalId(11);
        shard.send(Order::AdoptLocal(local, LocalSock::new(near, 0, false)));
        let data: Bytes = Arc::new(vec![5; 16_000_000].into());
        shard.send(Order::WriteLocal(local, Arc::clone(&data)));
        shard.send(Order::ShutdownLocal(local));
        let mut got = Vec::new();
        far.read_to_end(&mut got).unwrap();
        assert!(got == **data);
        far.write_all(b"bye").unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        let mut end = false;
        shard.send(Order::ReadLocal(local, 100));
        while !end {
            match news(&mailbox) {
                News::Written(..) | News::Nothing(_) => {}
                News::Readable(_) => shard.send(Order::ReadLocal(local, 100)),
                News::Data(_, bytes) => {
                    assert_eq!(bytes, b"bye");
                    shard.send(Order::ReadLocal(local, 100));
                }
                News::Eof(_) => end = true,
                other => panic!("{other:?}"),
            }
        }
        shard.send(Order::CloseLocal(local, Close::Orderly));
        let (near, mut far) = sockets();
        near.set_linger(Some(Duration::ZERO)).unwrap();
        let local = LocalId(12);
        shard.send(Order::AdoptLocal(local, LocalSock::new(near, 0, false)));
        shard.send(Order::CloseLocal(local, Close::Reset));
        let error = far.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
}
