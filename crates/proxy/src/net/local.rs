//! Sockets towards the local DRBD: reading as the engine allows, writing in order, and the three
//! ways to end (FIN, orderly close, reset). What is said here of the control lane holds until a
//! socket is known to be a data socket; then a shard has it (`far`).

use std::collections::VecDeque;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use socket2::Socket;

use super::watch::Watch;
use super::{Reactor, Source, TURN_BYTES, connect};
use crate::core::frame::Bytes;
use crate::core::{Close, Input, LinkId, LocalId};
use crate::room;

impl AsFd for LocalSock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A socket towards DRBD.
#[derive(Debug)]
pub(super) struct LocalSock {
    pub(super) socket: Arc<Socket>,
    pub(super) token: u64,
    pub(super) connecting: bool,
    pub(super) queue: VecDeque<(Bytes, usize)>,
    /// FIN is to follow the queue.
    pub(super) shutdown: bool,
    pub(super) shutdown_done: bool,
    /// Closed by the engine, but the queue is not yet written.
    pub(super) closing: bool,
    pub(super) want_read: bool,
    watched: Watch,
}

impl Reactor {
    /// Takes over a socket that was accepted on an inside address.
    pub(super) fn adopt_local(&mut self, local: LocalId, id: LinkId, socket: Socket) {
        let token = self.token(Source::Local(local));
        self.tune_local(&socket, id);
        self.locals
            .insert(local, LocalSock::new(socket, token, false));
    }

    /// Takes over a socket of another process, with what it has not been given yet.
    pub(super) fn adopt_handed(&mut self, local: LocalId, socket: Socket, rest: Bytes) {
        let token = self.token(Source::Local(local));
        let mut sock = LocalSock::new(socket, token, false);
        if !rest.is_empty() {
            sock.queue.push_back((rest, 0));
        }
        self.locals.insert(local, sock);
        self.update_local(local);
    }

    /// Connects to DRBD from the inside address, which is the only one that DRBD accepts.
    pub(super) fn connect_local(&mut self, local: LocalId, id: LinkId) {
        let Some(config) = self.engine.config(id) else {
            return;
        };
        let (from, to) = (config.inside.ip(), config.local_drbd);
        let from = (!from.is_unspecified()).then_some(from);
        let socket = match connect(from, to) {
            Ok(socket) => socket,
            Err(error) => {
                let now = self.now();
                self.engine
                    .handle(now, Input::LocalFailed(local, error.to_string()));
                return;
            }
        };
        self.tune_local(&socket, id);
        let token = self.token(Source::Local(local));
        self.locals
            .insert(local, LocalSock::new(socket, token, true));
        self.update_local(local);
    }

    fn tune_local(&self, socket: &Socket, id: LinkId) {
        let _ = socket.set_tcp_nodelay(true);
        if let Some(config) = self.engine.config(id) {
            let (send, receive) = (config.options.sndbuf_bytes, config.options.rcvbuf_bytes);
            if send > 0 {
                let _ = socket.set_send_buffer_size(send as usize);
            }
            if receive > 0 {
                let _ = socket.set_recv_buffer_size(receive as usize);
            }
        }
    }

    pub(super) fn local_ready(&mut self, local: LocalId, flags: epoll::EventFlags) {
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        if sock.connecting {
            match sock.socket.take_error() {
                Ok(None) if flags.contains(epoll::EventFlags::OUT) => {
                    sock.connecting = false;
                    let now = self.now();
                    self.engine.handle(now, Input::LocalConnected(local));
                    self.local_flush(local);
                }
                Ok(None) => {}
                Ok(Some(error)) | Err(error) => self.local_lost(local, &error.to_string()),
            }
            return;
        }
        if flags.contains(epoll::EventFlags::ERR)
            && let Ok(Some(error)) = sock.socket.take_error()
        {
            self.local_lost(local, &error.to_string());
            return;
        }
        if flags.contains(epoll::EventFlags::OUT) {
            self.local_flush(local);
        }
        let hung = flags.contains(epoll::EventFlags::HUP);
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        if sock.want_read {
            self.local_read(local);
        } else if hung {
            // Both directions ended, but nobody may read yet: do not be told again and again.
            sock.unwatch(&self.epoll);
        }
    }

    pub(super) fn local_want_read(&mut self, local: LocalId) {
        if self.far_want_read(local) {
            return;
        }
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        if !sock.want_read && !sock.closing {
            sock.want_read = true;
            self.update_local(local);
        }
    }

    fn local_read(&mut self, local: LocalId) {
        let mut budget = TURN_BYTES;
        while budget > 0 {
            let now = self.now();
            let allowed = self.engine.read_allowance(now, local).min(budget);
            let Some(sock) = self.locals.get_mut(&local) else {
                return;
            };
            if allowed == 0 {
                sock.want_read = false;
                break;
            }
            let (data, end) = sock.read(allowed, &mut self.scratch);
            budget = match data.len() {
                // Nothing for now.
                0 => 0,
                len => budget.saturating_sub(len),
            };
            if !data.is_empty() {
                self.engine.handle(now, Input::LocalData(local, data));
            }
            match end {
                Some(Ok(())) => {
                    if let Some(sock) = self.locals.get_mut(&local) {
                        sock.want_read = false;
                    }
                    self.engine.handle(now, Input::LocalEof(local));
                    break;
                }
                Some(Err(error)) => {
                    self.local_lost(local, &error.to_string());
                    return;
                }
                None => {}
            }
        }
        self.update_local(local);
    }

    pub(super) fn local_write(&mut self, local: LocalId, data: Bytes) {
        let Some(data) = self.far_write(local, data) else {
            return;
        };
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        sock.queue.push_back((data, 0));
        if sock.queue.len() == 1 && !sock.connecting {
            self.local_flush(local);
        }
    }

    fn local_flush(&mut self, local: LocalId) {
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        let (written, failure) = sock.write_queue();
        let done = sock.closing && sock.queue.is_empty();
        if written > 0 {
            let now = self.now();
            self.engine.handle(now, Input::LocalWritten(local, written));
        }
        match failure {
            Some(error) => self.local_lost(local, &error.to_string()),
            None if done => self.forget_local(local),
            None => self.update_local(local),
        }
    }

    pub(super) fn local_shutdown(&mut self, local: LocalId) {
        if self.far_shutdown(local) {
            return;
        }
        if let Some(sock) = self.locals.get_mut(&local) {
            sock.shutdown = true;
            self.local_flush(local);
        }
    }

    pub(super) fn local_close(&mut self, local: LocalId, how: Close) {
        if self.far_close(local, how) {
            return;
        }
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        match how {
            Close::Orderly => {
                sock.closing = true;
                sock.want_read = false;
                self.local_flush(local);
            }
            Close::Reset => {
                let _ = sock.socket.set_linger(Some(Duration::ZERO));
                self.forget_local(local);
            }
        }
    }

    /// The socket failed by itself.
    pub(super) fn local_lost(&mut self, local: LocalId, reason: &str) {
        self.forget_local(local);
        let now = self.now();
        self.engine
            .handle(now, Input::LocalFailed(local, reason.into()));
    }

    fn forget_local(&mut self, local: LocalId) {
        if let Some(sock) = self.locals.remove(&local) {
            self.sources.remove(&sock.token);
            // Dropping the socket takes it out of the epoll set.
        }
    }

    pub(super) fn update_local(&mut self, local: LocalId) {
        let Some(sock) = self.locals.get_mut(&local) else {
            return;
        };
        let token = sock.token;
        if let Err(error) = sock.watch(&self.epoll, token) {
            self.local_lost(local, &error.to_string());
        }
    }
}

/// How much room a read takes when so much waits. All of it is read into, so there must not be more
/// than is allowed; but a little more than waits is better than a small rest for the next time.
const fn room_for(waiting: usize, allowed: usize) -> usize {
    let most = room::exact(allowed);
    match room::rounded(waiting) {
        wanted if wanted < most => wanted,
        _ => most,
    }
}

/// Reads what has come, at most `allowed` bytes, into memory of its own and of its size, which the
/// queue then keeps. The second is the end of the socket, or its failure.
fn read_once(
    socket: &Socket,
    allowed: usize,
    scratch: &mut [u8],
) -> (Vec<u8>, Option<std::io::Result<()>>) {
    let waiting = rustix::io::ioctl_fionread(socket).unwrap_or(0);
    let len = room_for(waiting as usize, allowed);
    let mut data = room::empty(len);
    loop {
        let read = match len {
            // Nothing, or the end.
            0 => rustix::io::read(socket, &mut scratch[..allowed]).inspect(|count| {
                data.extend_from_slice(&scratch[..*count]);
            }),
            _ => rustix::io::read(socket, spare_capacity(&mut data)),
        };
        return match read {
            Ok(0) => (data, Some(Ok(()))),
            Ok(_) | Err(rustix::io::Errno::AGAIN) => (data, None),
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => (data, Some(Err(error.into()))),
        };
    }
}

impl LocalSock {
    /// Reads what has come, at most `allowed` bytes; the second is the end, or a failure.
    pub(super) fn read(
        &self,
        allowed: usize,
        scratch: &mut [u8],
    ) -> (Vec<u8>, Option<std::io::Result<()>>) {
        read_once(&self.socket, allowed, scratch)
    }

    /// Writes what the kernel takes, for one turn, and the FIN behind it: the count of bytes, and
    /// a failure.
    pub(super) fn write_queue(&mut self) -> (usize, Option<std::io::Error>) {
        let mut written = 0;
        let failure = loop {
            let Some((data, at)) = self.queue.front_mut() else {
                break None;
            };
            if written >= TURN_BYTES {
                break None;
            }
            match (&*self.socket).write(&data[*at..]) {
                Ok(count) => {
                    *at += count;
                    written += count;
                    if *at == data.len() {
                        self.queue.pop_front();
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break None,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => break Some(error),
            }
        };
        if self.queue.is_empty() && (self.shutdown || self.closing) && !self.shutdown_done {
            self.shutdown_done = true;
            let _ = self.socket.shutdown(std::net::Shutdown::Write);
        }
        (written, failure)
    }

    /// Asks an epoll set for what is awaited now.
    pub(super) fn watch(&mut self, epoll: &OwnedFd, token: u64) -> rustix::io::Result<()> {
        let mut interest = epoll::EventFlags::empty();
        if self.want_read && !self.connecting {
            interest |= epoll::EventFlags::IN;
        }
        if self.connecting || !self.queue.is_empty() {
            interest |= epoll::EventFlags::OUT;
        }
        self.watched.set(epoll, &self.socket, token, interest)
    }

    /// Leaves the epoll set in which it is, if it is in one.
    pub(super) fn unwatch(&mut self, epoll: &OwnedFd) {
        self.watched.end(epoll, &self.socket);
    }

    /// How many bytes the kernel has not taken.
    pub(super) fn unwritten_bytes(&self) -> usize {
        self.queue.iter().map(|(data, at)| data.len() - at).sum()
    }

    /// Bytes that the kernel has not taken.
    pub(super) fn unwritten(&self) -> Vec<u8> {
        let parts = self.queue.iter().map(|(data, at)| &data[*at..]);
        parts.flatten().copied().collect()
    }

    pub(super) fn new(socket: Socket, token: u64, connecting: bool) -> LocalSock {
        LocalSock {
            socket: Arc::new(socket),
            token,
            connecting,
            queue: VecDeque::new(),
            shutdown: false,
            shutdown_done: false,
            closing: false,
            want_read: false,
            watched: Watch::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_takes_all_that_waits_within_what_is_allowed() {
        const K: usize = 1 << 10;
        for (waiting, allowed, room) in [
            (0, 5, 0),
            (3, 5, 3),
            (7, 5, 5),
            (255 * K, 1024 * K, 255 * K),
            (257 * K, 1024 * K, 320 * K),
            (1000 * K, 1024 * K, 1024 * K),
            (9000 * K, 1024 * K, 1024 * K),
            // Blocks have no byte to spare beyond what is allowed.
            (300 * K, 310 * K, 256 * K),
            (400 * K, 390 * K, 384 * K),
        ] {
            assert_eq!(room_for(waiting, allowed), room, "{waiting} {allowed}");
            assert!(room::empty(room).capacity() <= allowed.max(room));
        }
    }
}
