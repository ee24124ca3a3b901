//! Reads the kernel's requests for the one file and answers them.
//!
//! Each reader thread has its own port of the volume. Requests are read until none is left (or a
//! batch is full), then the volume is woken once. Replies are written by the port's sink, on the
//! shard's thread, so a completion needs no further thread to wake up. A write to `/dev/fuse`
//! copies and never waits.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockstep_core::event::{RequestError, RequestId, RequestKind};
use lockstep_format::units::Sector;
use lockstep_io::pool::IoBuf;
use lockstep_io::port::{PortEvent, PortRequest, PortSink, SubmitError, VolumePort};
use rustix::event::epoll;

use crate::gate::{Access, Gate, Pass};

use super::abi::{self, IN_HEADER_LEN, InHeader, WRITE_HEAD_LEN, fallocate_mode, opcode};

/// Requests read before the volume is woken.
const BATCH: usize = 16;
/// Payload up to this length is copied into a buffer of its own size; more is handed over as read.
const COPY_BYTES: usize = 64 << 10;
/// Parts of one FALLOCATE; the block layer cuts its requests at 4 GiB.
const MAX_PARTS: u64 = 1 << 20;
/// How often a reader that waits for the volume looks whether it was told to abandon it.
const ORDER_CHECK: Duration = Duration::from_millis(100);
/// How long a reader waits before it asks again for memory that others hold.
const MEMORY_RETRY: Duration = Duration::from_millis(1);

/// What the file looks like, for all readers.
#[derive(Debug)]
pub(crate) struct FileShape {
    /// Its size in bytes.
    pub(crate) size_bytes: AtomicU64,
    /// What `st_blksize` says.
    pub(crate) block_bytes: u32,
    /// The unit of discards; 0 for none.
    pub(crate) granularity_bytes: u32,
    /// Largest payload of a request.
    pub(crate) max_write: u32,
    /// A loop device is bound to it.
    pub(crate) bound: AtomicBool,
}

/// Tells readers to stop.
#[derive(Debug)]
pub(crate) struct Stop {
    order: AtomicU8,
    wake: OwnedFd,
}

/// What readers are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Finish what was taken, then end.
    Finish,
    /// End without waiting for the volume.
    Abandon,
}

impl Stop {
    pub(crate) fn new() -> std::io::Result<Stop> {
        use rustix::event::EventfdFlags;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Stop {
            order: AtomicU8::new(0),
            wake,
        })
    }

    /// Tells all readers.
    pub(crate) fn tell(&self, order: Order) {
        let number = match order {
            Order::Finish => 1,
            Order::Abandon => 2,
        };
        self.order.fetch_max(number, Ordering::SeqCst);
        // It fails only if it was told very often, and then the readers know.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn told(&self) -> Option<Order> {
        match self.order.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(Order::Finish),
            _ => Some(Order::Abandon),
        }
    }
}

/// One request of the kernel in work.
#[derive(Debug)]
struct Slot {
    unique: u64,
    reply: Reply,
    parts_left: u32,
    error: i32,
    live: bool,
}

#[derive(Clone, Copy, Debug)]
enum Reply {
    Data { len: u32 },
    Written { len: u32 },
    Empty,
}

/// The requests in flight of one reader, shared with its sink.
#[derive(Debug, Default)]
struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Completions so far, so that a waiter sees that something came back.
    completions: u64,
    /// Some reader waits on the condition.
    waiting: bool,
    gone: bool,
}

struct Shared {
    fuse: Arc<OwnedFd>,
    table: Mutex<Table>,
    completed: Condvar,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reply(&self, unique: u64, error: i32, body: &[u8]) {
        let header = abi::out_header(unique, error, body.len());
        let result = rustix::io::writev(&*self.fuse, &[IoSlice::new(&header), IoSlice::new(body)]);
        match result {
            // ENOENT: the caller was killed meanwhile. ENODEV: the file system is gone.
            Ok(_) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV) => {}
            Err(error) => tracing::error!(%error, unique, "the kernel refused a FUSE reply"),
        }
    }

    /// Books the end of one part; replies if it was the last.
    fn part_done(&self, id: RequestId, result: Result<(), RequestError>, buf: Option<IoBuf>) {
        let index = (id.0 >> 32) as usize;
        let mut table = self.table();
        table.completions += 1;
        let notify = std::mem::take(&mut table.waiting);
        let slot = &mut table.slots[index];
        assert!(
            slot.live && slot.parts_left > 0,
            "a completion names a request in flight"
        );
        if let Err(error) = result {
            slot.error = errno(error);
        }
        slot.parts_left -= 1;
        if slot.parts_left > 0 {
            return;
        }
        slot.live = false;
        let (unique, reply, error) = (slot.unique, slot.reply, slot.error);
        table.free.push(index as u32);
        drop(table);
        if notify {
            self.completed.notify_all();
        }
        match (error, reply, &buf) {
            (0, Reply::Data { len }, Some(buf)) => self.reply(unique, 0, &buf[..len as usize]),
            (0, Reply::Data { .. }, None) => self.reply(unique, libc::EIO, &[]),
            (0, Reply::Written { len }, _) => self.reply(unique, 0, &abi::write_out(len)),
            (0, Reply::Empty, _) => self.reply(unique, 0, &[]),
            (error, _, _) => self.reply(unique, error, &[]),
        }
    }
}

/// The volume's side of a reader.
struct Sink {
    shared: Arc<Shared>,
    shape: Arc<FileShape>,
}

impl PortSink for Sink {
    fn event(&mut self, event: PortEvent) {
        match event {
            PortEvent::Done(done) => self.shared.part_done(done.id, done.result, done.buf),
            // A volume that has lost its data for now keeps its size for those who use it.
            PortEvent::Changed(properties) if properties.size_bytes == 0 => {}
            PortEvent::Changed(properties) => {
                let before = self
                    .shape
                    .size_bytes
                    .swap(properties.size_bytes, Ordering::SeqCst);
                if before != properties.size_bytes {
                    // It fails before the file system is mounted, and then nobody knows the size.
                    let _ =
                        rustix::io::write(&*self.shared.fuse, &abi::notify_attributes_changed());
                }
            }
            PortEvent::Gone => {
                self.shared.table().gone = true;
                self.shared.completed.notify_all();
            }
            PortEvent::Opened { .. } => {}
        }
    }
}

/// Why a reader ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It was told to stop; the connection lives.
    Stopped,
    /// The kernel ended the connection: the file is unmounted or was aborted.
    Unmounted,
    /// A system call failed in a way that leaves nothing to do.
    Failed,
}

impl Ended {
    /// What an error of a read means that is not about one request.
    fn by(error: rustix::io::Errno) -> Ended {
        match error {
            // ECONNABORTED: the kernel had given this reader a request already when the connection ended.
            rustix::io::Errno::NODEV | rustix::io::Errno::CONNABORTED => Ended::Unmounted,
            _ => Ended::Failed,
        }
    }
}

/// One thread's reading side.
pub(crate) struct Reader {
    shared: Arc<Shared>,
    shape: Arc<FileShape>,
    port: Box<dyn VolumePort + Send>,
    stop: Arc<Stop>,
    epoll: OwnedFd,
    scratch: IoBuf,
    unkicked: usize,
    /// Opens the volume when it is used; without, it is used as it is.
    gate: Option<Arc<Gate>>,
}

impl Reader {
    /// Makes a reader; `connect` gives it its port.
    pub(crate) fn new(
        fuse: Arc<OwnedFd>,
        stop: Arc<Stop>,
        shape: Arc<FileShape>,
        gate: Option<Arc<Gate>>,
        connect: &mut dyn FnMut(Box<dyn PortSink>) -> Box<dyn VolumePort + Send>,
    ) -> std::io::Result<Reader> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(0);
        let readable = epoll::EventFlags::IN;
        // One request wakes one reader.
        epoll::add(
            &epoll,
            &*fuse,
            data,
            readable | epoll::EventFlags::EXCLUSIVE,
        )?;
        epoll::add(&epoll, &stop.wake, data, readable)?;
        let shared = Arc::new(Shared {
            fuse,
            table: Mutex::new(Table::default()),
            completed: Condvar::new(),
        });
        let port = connect(Box::new(Sink {
            shared: shared.clone(),
            shape: shape.clone(),
        }));
        let scratch = IoBuf::standalone(shape.max_write as usize)?;
        Ok(Reader {
            shared,
            shape,
            port,
            stop,
            epoll,
            scratch,
            unkicked: 0,
            gate,
        })
    }

    /// Asks the kernel to repeat what a dead server had read, and does it in order, before
    /// anything that came later.
    pub(crate) fn replay(&mut self) -> std::io::Result<u32> {
        rustix::io::write(&*self.shared.fuse, &abi::notify_resend())?;
        let mut count = 0;
        loop {
            match self.read_one() {
                Read::Request(unique) => {
                    // One after the other: a later write may overlap an earlier one.
                    self.drain();
                    if unique & abi::UNIQUE_RESEND == 0 {
                        return Ok(count);
                    }
                    count += 1;
                }
                Read::Nothing | Read::Ended(_) => return Ok(count),
            }
        }
    }

    /// Serves until the connection ends or the reader is stopped. All requests that it took are
    /// answered before it returns, unless the volume never answers.
    pub(crate) fn run(mut self) -> Ended {
        let ended = self.serve();
        self.drain();
        ended
    }

    fn serve(&mut self) -> Ended {
        while self.stop.told().is_none() {
            match self.read_one() {
                Read::Request(_) if self.unkicked >= BATCH => self.kick(),
                Read::Request(_) => {}
                Read::Nothing => {
                    self.kick();
                    if let Some(ended) = self.wait() {
                        return ended;
                    }
                }
                Read::Ended(ended) => {
                    self.kick();
                    return ended;
                }
            }
        }
        self.kick();
        Ended::Stopped
    }

    fn kick(&mut self) {
        if std::mem::take(&mut self.unkicked) > 0 {
            self.port.kick();
        }
    }

    /// Waits for a request or the order to stop.
    fn wait(&self) -> Option<Ended> {
        let mut events = Vec::with_capacity(2);
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut events),
            None,
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "waiting for FUSE requests failed");
                return Some(Ended::Failed);
            }
        }
        None
    }

    /// Waits until nothing of this reader is in flight.
    fn drain(&mut self) {
        self.kick();
        let mut table = self.shared.table();
        while table.slots.len() > table.free.len()
            && !table.gone
            && self.stop.told() != Some(Order::Abandon)
        {
            table.waiting = true;
            // The time limit is for an order that comes while nothing completes.
            let wait = self.shared.completed.wait_timeout(table, ORDER_CHECK);
            table = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn read_one(&mut self) -> Read {
        let mut head = [0; WRITE_HEAD_LEN];
        let max = self.shape.max_write as usize;
        let result = rustix::io::readv(
            &*self.shared.fuse,
            &mut [
                IoSliceMut::new(&mut head),
                IoSliceMut::new(&mut self.scratch[..max]),
            ],
        );
        let len = match result {
            Ok(len) => len,
            Err(rustix::io::Errno::AGAIN) => return Read::Nothing,
            // The request was taken back before it could be copied.
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::INTR) => return self.read_one(),
            Err(error) => {
                let ended = Ended::by(error);
                if ended == Ended::Failed {
                    tracing::error!(%error, "reading FUSE requests failed");
                }
                return Read::Ended(ended);
            }
        };
        match InHeader::decode(&head[..len.min(WRITE_HEAD_LEN)]) {
            Some(header) if header.len as usize == len => {
                let args = &head[IN_HEADER_LEN..len.min(WRITE_HEAD_LEN)];
                self.handle(&header, args, len.saturating_sub(WRITE_HEAD_LEN));
                Read::Request(header.unique)
            }
            Some(_) | None => {
                tracing::error!(len, "the kernel sent a FUSE request of a wrong length");
                Read::Ended(Ended::Failed)
            }
        }
    }

    fn handle(&mut self, header: &InHeader, args: &[u8], payload_len: usize) {
        let unique = header.unique;
        let size = self.shape.size_bytes.load(Ordering::SeqCst);
        let invalid = |reader: &mut Reader| reader.shared.reply(unique, libc::EINVAL, &[]);
        let gate = self.gate.clone();
        let _pass = match (&gate, header.opcode) {
            (Some(gate), opcode::READ | opcode::WRITE | opcode::FALLOCATE) => {
                match self.pass(gate, header.opcode) {
                    Ok(pass) => Some(pass),
                    Err(error) => return self.shared.reply(unique, error, &[]),
                }
            }
            // What was written has been flushed before the volume was closed.
            (Some(gate), opcode::FSYNC) if gate.session().is_none() => {
                return self.shared.reply(unique, 0, &[]);
            }
            // Nothing was written yet. The kernel flushes when it binds the loop device, with a lock
            // held that everybody needs who asks for a free one.
            (_, opcode::FSYNC) if !self.shape.bound.load(Ordering::SeqCst) => {
                return self.shared.reply(unique, 0, &[]);
            }
            _ => None,
        };
        match header.opcode {
            opcode::READ => match abi::io_range(args) {
                Some(range) => self.read(unique, range, size),
                None => invalid(self),
            },
            opcode::WRITE => match abi::io_range(args) {
                Some(range) if range.len == payload_len as u64 => self.write(unique, range, size),
                Some(_) | None => invalid(self),
            },
            opcode::FSYNC => {
                let index = self.slot(unique, Reply::Empty, 1);
                self.submit(index, 0, RequestKind::Flush, 0, 0, None);
            }
            opcode::FALLOCATE => match abi::fallocate(args) {
                Some((range, mode)) => self.fallocate(unique, range, mode, size),
                None => invalid(self),
            },
            opcode::LOOKUP => {
                let entry = abi::entry_out(size, self.shape.block_bytes);
                self.shared.reply(unique, 0, &entry);
            }
            opcode::GETATTR if header.node == abi::ROOT_NODE => {
                self.shared.reply(unique, 0, &abi::root_attr_out());
            }
            opcode::GETATTR => {
                self.shared
                    .reply(unique, 0, &abi::attr_out(size, self.shape.block_bytes));
            }
            opcode::OPEN => self.shared.reply(unique, 0, &abi::open_out()),
            // The loop driver takes the granularity of discards from here, and offers neither
            // discards nor writes of zeroes if there is no answer.
            opcode::STATFS => match self.shape.granularity_bytes {
                0 => self.shared.reply(unique, libc::EOPNOTSUPP, &[]),
                bytes => self.shared.reply(unique, 0, &abi::statfs_out(size, bytes)),
            },
            opcode::RELEASE | opcode::FLUSH | opcode::DESTROY => {
                self.shared.reply(unique, 0, &[]);
            }
            // These have no reply. An interrupted request is finished nevertheless.
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => {}
            // INIT was answered at the start; there is no second one.
            opcode::INIT => invalid(self),
            _ => self.shared.reply(unique, libc::ENOSYS, &[]),
        }
    }

    /// Has the volume opened for a request.
    fn pass<'a>(&mut self, gate: &'a Gate, opcode: u32) -> Result<Pass<'a>, i32> {
        let (access, error) = match opcode {
            opcode::READ => (Access::Read, libc::EMEDIUMTYPE),
            _ => (Access::Write, libc::EROFS),
        };
        if let Some(pass) = gate.try_pass(access) {
            return Ok(pass);
        }
        // Opening may wait for what was submitted before.
        self.kick();
        let given_up = || self.stop.told() == Some(Order::Abandon);
        gate.enter(access, &given_up).map_err(|_| error)
    }

    fn read(&mut self, unique: u64, range: abi::Range, size: u64) {
        // As in every file, what lies beyond the end is not there.
        let len = range.len.min(size.saturating_sub(range.offset));
        if len == 0 {
            self.shared.reply(unique, 0, &[]);
            return;
        }
        if !whole_sectors(range.offset, len) || len > u64::from(self.shape.max_write) {
            self.shared.reply(unique, libc::EINVAL, &[]);
            return;
        }
        let len = len as u32;
        let Some(buf) = self.alloc(len as usize) else {
            self.shared.reply(unique, libc::EIO, &[]);
            return;
        };
        let index = self.slot(unique, Reply::Data { len }, 1);
        self.submit(index, 0, RequestKind::Read, range.offset, len, Some(buf));
    }

    fn write(&mut self, unique: u64, range: abi::Range, size: u64) {
        if !whole_sectors(range.offset, range.len) || range.len == 0 {
            self.shared.reply(unique, libc::EINVAL, &[]);
            return;
        }
        if range
            .offset
            .checked_add(range.len)
            .is_none_or(|end| end > size)
        {
            self.shared.reply(unique, libc::ENOSPC, &[]);
            return;
        }
        let len = range.len as usize;
        // A large payload keeps the memory it was read into, and the reader takes new memory.
        let whole = len > COPY_BYTES && 2 * len > self.scratch.len();
        let wanted = if whole {
            self.shape.max_write as usize
        } else {
            len
        };
        let Some(mut buf) = self.alloc(wanted) else {
            self.shared.reply(unique, libc::EIO, &[]);
            return;
        };
        if whole {
            std::mem::swap(&mut self.scratch, &mut buf);
        } else {
            buf[..len].copy_from_slice(&self.scratch[..len]);
        }
        let index = self.slot(unique, Reply::Written { len: len as u32 }, 1);
        let kind = RequestKind::Write { fua: false };
        self.submit(index, 0, kind, range.offset, len as u32, Some(buf));
    }

    fn fallocate(&mut self, unique: u64, range: abi::Range, mode: u32, size: u64) {
        let properties = self.port.properties();
        let kind = match mode {
            // The loop driver sends this for a discard *and* for write-zeroes that may unmap, and
            // the two cannot be told apart. Reading zeroes afterwards is right for both.
            mode if mode == fallocate_mode::PUNCH_HOLE | fallocate_mode::KEEP_SIZE
                && properties.discard =>
            {
                RequestKind::Zeroes { unmap: true }
            }
            mode if mode & !fallocate_mode::KEEP_SIZE == fallocate_mode::ZERO_RANGE => {
                RequestKind::Zeroes { unmap: false }
            }
            _ => {
                self.shared.reply(unique, libc::EOPNOTSUPP, &[]);
                return;
            }
        };
        let part_bytes = u64::from(properties.max_discard_bytes).max(4096) / 4096 * 4096;
        let parts = range.len.div_ceil(part_bytes);
        let in_range = range
            .offset
            .checked_add(range.len)
            .is_some_and(|end| end <= size);
        let wrong = !whole_sectors(range.offset, range.len) || parts > MAX_PARTS;
        if wrong || !in_range || range.len == 0 {
            self.shared.reply(unique, libc::EINVAL, &[]);
            return;
        }
        let index = self.slot(unique, Reply::Empty, parts as u32);
        for part in 0..parts {
            let start = part * part_bytes;
            let len = part_bytes.min(range.len - start) as u32;
            self.submit(index, part as u32, kind, range.offset + start, len, None);
        }
    }

    /// Memory for a payload; waits while others hold all of it. `None` once the volume is gone.
    fn alloc(&mut self, len: usize) -> Option<IoBuf> {
        loop {
            if let Some(buf) = self.port.alloc(len) {
                return Some(buf);
            }
            if !self.wait_for_completion() {
                return None;
            }
        }
    }

    /// Waits a moment for anything in flight to come back. False once the volume is gone.
    fn wait_for_completion(&mut self) -> bool {
        self.kick();
        if self.stop.told() == Some(Order::Abandon) {
            return false;
        }
        let mut table = self.shared.table();
        table.waiting = true;
        let seen = table.completions;
        let (table, _) = self
            .shared
            .completed
            .wait_timeout_while(table, MEMORY_RETRY, |table| {
                table.completions == seen && !table.gone
            })
            .unwrap_or_else(PoisonError::into_inner);
        !table.gone
    }

    fn slot(&mut self, unique: u64, reply: Reply, parts_left: u32) -> u32 {
        let slot = Slot {
            unique,
            reply,
            parts_left,
            error: 0,
            live: true,
        };
        let mut table = self.shared.table();
        match table.free.pop() {
            Some(index) => {
                table.slots[index as usize] = slot;
                index
            }
            None => {
                table.slots.push(slot);
                (table.slots.len() - 1) as u32
            }
        }
    }

    fn submit(
        &mut self,
        index: u32,
        part: u32,
        kind: RequestKind,
        offset: u64,
        len: u32,
        buf: Option<IoBuf>,
    ) {
        let id = RequestId(u64::from(index) << 32 | u64::from(part));
        let sector = Sector(offset / Sector::SIZE);
        let mut request = PortRequest {
            id,
            kind,
            sector,
            len,
            buf,
            buf_offset: 0,
        };
        loop {
            match self.port.submit(request) {
                Ok(()) => {
                    self.unkicked += 1;
                    return;
                }
                Err(SubmitError::Full { request: back, .. }) if self.wait_for_completion() => {
                    request = back;
                }
                Err(SubmitError::Full { request: back, .. } | SubmitError::Gone(back)) => {
                    self.shared
                        .part_done(id, Err(RequestError::NoMedium), back.buf);
                    return;
                }
            }
        }
    }
}

enum Read {
    /// A request was taken; its number.
    Request(u64),
    Nothing,
    Ended(Ended),
}

fn whole_sectors(offset: u64, len: u64) -> bool {
    (offset | len).is_multiple_of(Sector::SIZE)
}

fn errno(error: RequestError) -> i32 {
    match error {
        RequestError::Io => libc::EIO,
        RequestError::ReadOnly => libc::EROFS,
        RequestError::NoMedium => libc::ENOMEDIUM,
        RequestError::Invalid => libc::EINVAL,
        RequestError::Unsupported => libc::EOPNOTSUPP,
    }
}

/// Waits until the descriptor can be read.
pub(crate) fn wait_readable(fd: &OwnedFd, timeout: Duration) -> std::io::Result<()> {
    let mut fds = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    let timeout = rustix::event::Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    match rustix::event::poll(&mut fds, Some(&timeout))? {
        0 => Err(ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::Ended;

    /// Which of the two it is depends on what the reader did when the file was unmounted.
    #[test]
    fn an_unmounted_file_is_no_failure() {
        assert_eq!(Ended::by(Errno::NODEV), Ended::Unmounted);
        assert_eq!(Ended::by(Errno::CONNABORTED), Ended::Unmounted);
        assert_eq!(Ended::by(Errno::IO), Ended::Failed);
    }
}
