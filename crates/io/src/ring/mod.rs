//! The shard's engine of system calls: operations in, completions out, one wait per turn.
//!
//! Two implementations of [`Ring`] with one meaning: io_uring ([`uring`]) and, where the kernel or
//! a container refuses that, epoll with a small thread pool ([`epoll`]). An operation owns what the
//! kernel touches (descriptor, memory) and comes back with its completion, so nothing that is in
//! flight can be freed. Operations may be cancelled, but their completion always comes.

pub mod epoll;
mod send;
pub mod uring;
mod workers;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

pub use send::{Cut, SendList};

use crate::pool::BufRef;

/// A descriptor that operations share; closed with its last owner.
pub type Fd = Arc<OwnedFd>;

/// Environment variable that forces an implementation: `uring` or `epoll`.
pub const RING_VARIABLE: &str = "LOCKSTEP_IO";

/// Which implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingKind {
    /// io_uring.
    Uring,
    /// epoll and threads.
    Epoll,
}

/// Memory that a receive fills.
#[derive(Debug)]
pub enum Memory {
    /// A vector with its full length usable.
    Bytes(Vec<u8>),
    /// A pool buffer.
    Buf(BufRef),
}

impl Memory {
    fn ptr_at(&mut self, start: usize, len: usize) -> *mut u8 {
        match self {
            Memory::Bytes(bytes) => bytes[start..start + len].as_mut_ptr(),
            Memory::Buf(buf) => buf.ptr_at(start, len),
        }
    }
}

/// Work that may block, done by a thread of the pool: gives the operation's result.
pub type Blocking = Box<dyn FnOnce() -> Result<u32, Errno> + Send>;

/// An operating system error number, always positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    /// The operation was cancelled.
    pub const CANCELED: Errno = Errno(libc::ECANCELED);

    fn last() -> Errno {
        Errno(
            io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
        )
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

/// An operation. Its result is a number of bytes where bytes move, else 0.
pub enum Op {
    /// Reads from a file at an offset. May end short.
    Read {
        /// The file.
        fd: Fd,
        /// Destination.
        buf: BufRef,
        /// First byte in the destination.
        start: u32,
        /// Bytes to read.
        len: u32,
        /// Position in the file in bytes.
        offset: u64,
    },
    /// Writes to a file at an offset. May end short.
    Write {
        /// The file.
        fd: Fd,
        /// Source.
        buf: BufRef,
        /// First byte in the source.
        start: u32,
        /// Bytes to write.
        len: u32,
        /// Position in the file in bytes.
        offset: u64,
        /// Durable at completion (`RWF_DSYNC`).
        durable: bool,
    },
    /// Makes completed writes durable (`fdatasync`).
    Sync {
        /// The file.
        fd: Fd,
    },
    /// `fallocate`.
    Fallocate {
        /// The file.
        fd: Fd,
        /// Mode bits of fallocate(2).
        mode: i32,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Receives what is there, at least one byte; 0 at the end of the stream.
    Recv {
        /// The socket.
        fd: Fd,
        /// Destination.
        into: Memory,
        /// First byte in the destination.
        start: u32,
        /// Most bytes to receive.
        len: u32,
    },
    /// Sends from the list's position on. May end short; the caller advances the list.
    Send {
        /// The socket.
        fd: Fd,
        /// What to send.
        list: SendList,
    },
    /// Connects a socket.
    Connect {
        /// The socket.
        fd: Fd,
        /// The address.
        address: Box<socket2::SockAddr>,
    },
    /// Waits until one of the events (poll(2) bits) is there; the result is the events.
    Poll {
        /// The descriptor.
        fd: Fd,
        /// Events.
        events: i16,
    },
    /// Runs a closure on a thread. `None` when it comes back.
    Blocking(Option<Blocking>),
}

impl Op {
    /// Whether it waits for a socket (or a poll), so that it may never end on its own.
    fn is_on_socket(&self) -> bool {
        match self {
            Op::Recv { .. } | Op::Send { .. } | Op::Connect { .. } | Op::Poll { .. } => true,
            Op::Read { .. } | Op::Write { .. } | Op::Sync { .. } => false,
            Op::Fallocate { .. } | Op::Blocking(_) => false,
        }
    }
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, fd) = match self {
            Op::Read { fd, .. } => ("Read", Some(fd)),
            Op::Write { fd, .. } => ("Write", Some(fd)),
            Op::Sync { fd } => ("Sync", Some(fd)),
            Op::Fallocate { fd, .. } => ("Fallocate", Some(fd)),
            Op::Recv { fd, .. } => ("Recv", Some(fd)),
            Op::Send { fd, .. } => ("Send", Some(fd)),
            Op::Connect { fd, .. } => ("Connect", Some(fd)),
            Op::Poll { fd, .. } => ("Poll", Some(fd)),
            Op::Blocking(_) => ("Blocking", None),
        };
        f.debug_struct(name)
            .field("fd", &fd.map(|fd| fd.as_raw_fd()))
            .finish_non_exhaustive()
    }
}

/// Names an operation in flight, for cancelling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpKey(u64);

impl OpKey {
    const fn new(generation: u32, slot: u32) -> OpKey {
        OpKey((generation as u64) << 32 | slot as u64)
    }

    const fn slot(self) -> usize {
        self.0 as u32 as usize
    }

    const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// An operation is done.
#[derive(Debug)]
pub struct Done {
    /// The caller's name for it.
    pub token: u64,
    /// The operation with all that it owned.
    pub op: Op,
    /// What it gave.
    pub result: Result<u32, Errno>,
}

/// How long a turn waits for a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// At most so long.
    AtMost(Duration),
    /// Until something happens.
    Forever,
}

/// Wakes a ring that waits on its thread. Cheap to clone; usable from any thread.
#[derive(Clone, Debug)]
pub struct Waker {
    eventfd: Fd,
}

impl Waker {
    fn new() -> io::Result<Waker> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        Ok(Waker {
            eventfd: Arc::new(rustix::event::eventfd(0, flags)?),
        })
    }

    /// Ends the ring's wait, or its next one if it does not wait now.
    pub fn wake(&self) {
        // It only fails when the counter is at its maximum, and then a wake-up is pending anyway.
        let _ = rustix::io::write(&*self.eventfd, &1u64.to_ne_bytes());
    }

    fn drain(&self) {
        let _ = rustix::io::read(&*self.eventfd, &mut [0u8; 8]);
    }
}

/// An engine of operations. Used by one thread.
pub trait Ring {
    /// Which implementation this is.
    fn kind(&self) -> RingKind;

    /// Takes an operation. It starts at the next [`Ring::turn`].
    fn push(&mut self, token: u64, op: Op) -> OpKey;

    /// Asks for an operation's early end. If it is still in flight, it completes with
    /// [`Errno::CANCELED`] or, if it was just done, with its result. File operations run to the end.
    fn cancel(&mut self, key: OpKey);

    /// Starts what was pushed and waits for a completion or a wake-up.
    fn turn(&mut self, wait: Wait) -> io::Result<()>;

    /// The next completion of past turns.
    fn pop(&mut self) -> Option<Done>;

    /// Whether a turn would find something, as far as can be told without a system call. Always
    /// `true` where that cannot be told.
    fn is_due(&mut self) -> bool {
        true
    }

    /// A handle to wake this ring from other threads.
    fn waker(&self) -> Waker;

    /// Operations in flight.
    fn in_flight(&self) -> usize;
}

/// A ring of the wanted kind. Without a wish [`RING_VARIABLE`] decides, and without that io_uring
/// is tried first and epoll taken, with a warning, if the system refuses.
pub fn open(wish: Option<RingKind>) -> io::Result<Box<dyn Ring>> {
    match wish.map_or_else(kind_of_environment, |kind| Ok(Some(kind)))? {
        Some(RingKind::Uring) => Ok(Box::new(uring::Uring::new()?)),
        Some(RingKind::Epoll) => Ok(Box::new(epoll::Epoll::new()?)),
        None => match uring::Uring::new() {
            Ok(ring) => Ok(Box::new(ring)),
            Err(error) => {
                tracing::warn!(%error, "io_uring is refused here, epoll and threads are used");
                Ok(Box::new(epoll::Epoll::new()?))
            }
        },
    }
}

fn kind_of_environment() -> io::Result<Option<RingKind>> {
    match std::env::var(RING_VARIABLE) {
        Err(std::env::VarError::NotPresent) => Ok(None),
        Ok(value) if value.is_empty() => Ok(None),
        Ok(value) if value == "uring" => Ok(Some(RingKind::Uring)),
        Ok(value) if value == "epoll" => Ok(Some(RingKind::Epoll)),
        other => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{RING_VARIABLE} is {other:?}; needed is `uring`, `epoll` or nothing"),
        )),
    }
}

/// Operations in flight by slot. A slot's generation tells a new operation from an old one.
struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

struct Slot<T> {
    generation: u32,
    entry: Option<T>,
}

impl<T> Slots<T> {
    fn new() -> Slots<T> {
        Slots {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    fn insert(&mut self, entry: T) -> OpKey {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                entry: None,
            });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.entry = Some(entry);
        OpKey::new(slot.generation, index)
    }

    fn get_mut(&mut self, key: OpKey) -> Option<&mut T> {
        let slot = self.slots.get_mut(key.slot())?;
        if slot.generation == key.generation() {
            slot.entry.as_mut()
        } else {
            None
        }
    }

    fn remove(&mut self, key: OpKey) -> Option<T> {
        let slot = self.slots.get_mut(key.slot())?;
        if slot.generation != key.generation() {
            return None;
        }
        let entry = slot.entry.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(key.slot() as u32);
        Some(entry)
    }

    fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

/// Runs a file operation or closure on this thread.
fn run_blocking(op: &mut Op) -> Result<u32, Errno> {
    match op {
        Op::Read {
            fd,
            buf,
            start,
            len,
            offset,
        } => {
            let to = buf.ptr_at(*start as usize, *len as usize);
            // SAFETY: `buf` keeps `len` bytes at `to` alive for the call.
            bytes(unsafe {
                libc::pread64(fd.as_raw_fd(), to.cast(), *len as usize, *offset as i64)
            })
        }
        Op::Write {
            fd,
            buf,
            start,
            len,
            offset,
            durable,
        } => {
            let from = buf.ptr_at(*start as usize, *len as usize);
            let vector = libc::iovec {
                iov_base: from.cast(),
                iov_len: *len as usize,
            };
            let flags = if *durable { libc::RWF_DSYNC } else { 0 };
            // SAFETY: `vector` describes `len` bytes that `buf` keeps alive for the call.
            bytes(unsafe {
                libc::pwritev2(fd.as_raw_fd(), &raw const vector, 1, *offset as i64, flags)
            })
        }
        // SAFETY: no memory is passed.
        Op::Sync { fd } => bytes(unsafe { libc::fdatasync(fd.as_raw_fd()) } as isize),
        Op::Fallocate {
            fd,
            mode,
            offset,
            len,
        } => {
            // SAFETY: no memory is passed.
            let result =
                unsafe { libc::fallocate64(fd.as_raw_fd(), *mode, *offset as i64, *len as i64) };
            bytes(result as isize)
        }
        Op::Blocking(work) => work.take().map_or(Err(Errno(libc::EINVAL)), |work| work()),
        Op::Recv { .. } | Op::Send { .. } | Op::Connect { .. } | Op::Poll { .. } => {
            unreachable!("socket operations never go to a thread")
        }
    }
}

fn bytes(result: isize) -> Result<u32, Errno> {
    if result < 0 {
        Err(Errno::last())
    } else {
        Ok(result as u32)
    }
}

/// The raw number, for a system call made while `fd` is owned.
fn raw(fd: &Fd) -> RawFd {
    fd.as_raw_fd()
}

#[cfg(test)]
mod tests;
