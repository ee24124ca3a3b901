//! The epoll implementation: sockets on this thread, files and closures on a small thread pool.
//!
//! Each descriptor is registered once, edge-triggered, for both directions. An operation is tried
//! first and waits for an edge only after `EAGAIN`, so an edge cannot be missed.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{Timespec, epoll};

use super::workers::Workers;
use super::{Done, Errno, Op, OpKey, Ring, RingKind, Slots, Wait, Waker, bytes, raw};

/// File operations run on threads, so this bounds their depth.
const WORKERS: usize = 8;
const EVENTS_PER_TURN: usize = 256;
/// Epoll data of the wake-up descriptor; others have their number.
const WAKE: u64 = u64::MAX;
/// Descriptors whose owner has gone are forgotten when the table has grown to this.
const TABLE_MIN: usize = 64;

/// An epoll descriptor, the operations that wait on it, and the threads.
pub struct Epoll {
    epoll: OwnedFd,
    slots: Slots<Entry>,
    todo: VecDeque<OpKey>,
    waiting: HashMap<RawFd, Registered>,
    purge_at: usize,
    ready: VecDeque<Done>,
    waker: Waker,
    workers: Workers,
    worker_done: Vec<(OpKey, Op, Result<u32, Errno>)>,
    events: Vec<epoll::Event>,
}

struct Entry {
    token: u64,
    /// `None` while a worker has it.
    op: Option<Op>,
    /// A connect has been started and waits for its end.
    connecting: bool,
}

/// A descriptor in the epoll set.
struct Registered {
    /// Tells this descriptor from a later one with the same number.
    owner: Weak<OwnedFd>,
    keys: Vec<OpKey>,
}

impl Epoll {
    /// A new ring.
    pub fn new() -> io::Result<Epoll> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let waker = Waker::new()?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &*waker.eventfd, data, epoll::EventFlags::IN)?;
        Ok(Epoll {
            epoll,
            slots: Slots::new(),
            todo: VecDeque::new(),
            waiting: HashMap::new(),
            purge_at: TABLE_MIN,
            ready: VecDeque::new(),
            workers: Workers::new(WORKERS, waker.clone()),
            waker,
            worker_done: Vec::new(),
            events: Vec::with_capacity(EVENTS_PER_TURN),
        })
    }

    /// Tries an operation; it completes or waits for its descriptor.
    fn attempt(&mut self, key: OpKey) {
        let Some(entry) = self.slots.get_mut(key) else {
            return;
        };
        let connecting = &mut entry.connecting;
        let op = entry
            .op
            .as_mut()
            .expect("only file operations are with the workers");
        match try_socket(op, connecting) {
            Err(Errno(libc::EAGAIN)) => {
                let fd = socket_of(op).clone();
                if let Err(errno) = self.wait_for(&fd, key) {
                    self.finish(key, Err(errno));
                }
            }
            result => self.finish(key, result),
        }
    }

    fn wait_for(&mut self, fd: &Arc<OwnedFd>, key: OpKey) -> Result<(), Errno> {
        if self.waiting.len() >= self.purge_at {
            self.waiting
                .retain(|_, registered| registered.owner.strong_count() > 0);
            self.purge_at = (self.waiting.len() * 2).max(TABLE_MIN);
        }
        if let Some(registered) = self.waiting.get_mut(&raw(fd))
            && registered.owner.as_ptr() == Arc::as_ptr(fd)
        {
            if !registered.keys.contains(&key) {
                registered.keys.push(key);
            }
            return Ok(());
        }
        let data = epoll::EventData::new_u64(raw(fd) as u64);
        let flags = epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP
            | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd.as_fd(), data, flags).map_err(|e| Errno(e.raw_os_error()))?;
        let registered = Registered {
            owner: Arc::downgrade(fd),
            keys: vec![key],
        };
        self.waiting.insert(raw(fd), registered);
        Ok(())
    }

    fn finish(&mut self, key: OpKey, result: Result<u32, Errno>) {
        if let Some(Entry {
            token,
            op: Some(op),
            ..
        }) = self.slots.remove(key)
        {
            self.ready.push_back(Done { token, op, result });
        }
    }

    fn take_events(&mut self, wait: Wait) -> io::Result<()> {
        let timeout = match wait {
            Wait::No => Some(Timespec::default()),
            Wait::AtMost(time) => Some(timespec(time)),
            Wait::Forever => None,
        };
        self.events.clear();
        let events = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, events, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        for n in 0..self.events.len() {
            match self.events[n].data.u64() {
                WAKE => self.waker.drain(),
                fd => {
                    let keys = self.waiting.get_mut(&(fd as RawFd)).map(|r| &mut r.keys);
                    let mut keys = keys.map(std::mem::take).unwrap_or_default();
                    keys.drain(..).for_each(|key| self.attempt(key));
                }
            }
        }
        Ok(())
    }

    fn take_worker_results(&mut self) {
        self.workers.take_done(&mut self.worker_done);
        let mut done = std::mem::take(&mut self.worker_done);
        for (key, op, result) in done.drain(..) {
            if let Some(entry) = self.slots.remove(key) {
                self.ready.push_back(Done {
                    token: entry.token,
                    op,
                    result,
                });
            }
        }
        self.worker_done = done;
    }
}

impl Ring for Epoll {
    fn kind(&self) -> RingKind {
        RingKind::Epoll
    }

    fn push(&mut self, token: u64, op: Op) -> OpKey {
        if op.is_on_socket() {
            let key = self.slots.insert(Entry {
                token,
                op: Some(op),
                connecting: false,
            });
            self.todo.push_back(key);
            return key;
        }
        let key = self.slots.insert(Entry {
            token,
            op: None,
            connecting: false,
        });
        self.workers.push(key, op);
        key
    }

    fn cancel(&mut self, key: OpKey) {
        let Some(Entry { op: Some(op), .. }) = self.slots.get_mut(key) else {
            return;
        };
        let fd = raw(socket_of(op));
        if let Some(registered) = self.waiting.get_mut(&fd) {
            registered.keys.retain(|waiting| *waiting != key);
        }
        self.finish(key, Err(Errno::CANCELED));
    }

    fn turn(&mut self, wait: Wait) -> io::Result<()> {
        // Only what is queued now: an operation that is tried does not queue others.
        for _ in 0..self.todo.len() {
            if let Some(key) = self.todo.pop_front() {
                self.attempt(key);
            }
        }
        let wait = if self.ready.is_empty() {
            wait
        } else {
            Wait::No
        };
        self.take_events(wait)?;
        self.take_worker_results();
        Ok(())
    }

    fn pop(&mut self) -> Option<Done> {
        self.ready.pop_front()
    }

    fn waker(&self) -> Waker {
        self.waker.clone()
    }

    fn in_flight(&self) -> usize {
        self.slots.len()
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

fn socket_of(op: &Op) -> &Arc<OwnedFd> {
    match op {
        Op::Recv { fd, .. } | Op::Send { fd, .. } => fd,
        Op::Connect { fd, .. } | Op::Poll { fd, .. } => fd,
        _ => unreachable!("file operations are with the workers"),
    }
}

/// One attempt; `EAGAIN` if it would block.
fn try_socket(op: &mut Op, connecting: &mut bool) -> Result<u32, Errno> {
    match op {
        Op::Recv {
            fd,
            into,
            start,
            len,
        } => {
            let to = into.ptr_at(*start as usize, *len as usize);
            // SAFETY: the operation owns `len` bytes at `to`.
            bytes(unsafe { libc::recv(raw(fd), to.cast(), *len as usize, libc::MSG_DONTWAIT) })
        }
        Op::Send { fd, list } => {
            let message = list.prepare();
            // SAFETY: `message` and all it points to belong to the operation.
            bytes(unsafe {
                libc::sendmsg(raw(fd), message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            })
        }
        Op::Connect { fd, address } => try_connect(fd, address, connecting),
        Op::Poll { fd, events } => {
            let mut poll = libc::pollfd {
                fd: raw(fd),
                events: *events,
                revents: 0,
            };
            // SAFETY: one valid `pollfd`.
            match unsafe { libc::poll(&raw mut poll, 1, 0) } {
                0 => Err(Errno(libc::EAGAIN)),
                n if n < 0 => Err(Errno::last()),
                _ => Ok(u32::from(poll.revents as u16)),
            }
        }
        _ => unreachable!("file operations are with the workers"),
    }
}

fn try_connect(
    fd: &Arc<OwnedFd>,
    address: &socket2::SockAddr,
    connecting: &mut bool,
) -> Result<u32, Errno> {
    let socket = socket2::SockRef::from(fd);
    let errno = |error: io::Error| Errno(error.raw_os_error().unwrap_or(libc::EIO));
    if !*connecting {
        socket.set_nonblocking(true).map_err(errno)?;
        match socket.connect(address).map_err(errno) {
            Err(Errno(libc::EINPROGRESS)) => {
                *connecting = true;
                return Err(Errno(libc::EAGAIN));
            }
            result => {
                socket.set_nonblocking(false).map_err(errno)?;
                return result.map(|()| 0);
            }
        }
    }
    let mut poll = libc::pollfd {
        fd: raw(fd),
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: one valid `pollfd`.
    if unsafe { libc::poll(&raw mut poll, 1, 0) } == 0 {
        return Err(Errno(libc::EAGAIN));
    }
    socket.set_nonblocking(false).map_err(errno)?;
    match socket.take_error().map_err(errno)? {
        Some(error) => Err(errno(error)),
        None => Ok(0),
    }
}
