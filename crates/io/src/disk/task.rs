//! One operation of the core on a disk, as a chain of ring operations.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockstep_core::event::DiskError;
use lockstep_format::disk::pmem::WordStore;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::device::{Device, Medium};
use super::faults::FaultOn;
use super::{Disk, sys};
use crate::pool::{BufRef, BufferPool, Claim, IoBuf};
use crate::ring::{Errno, Fd, Op};

/// Largest piece of a metadata transfer and of zeroes that are written, in bytes.
const PIECE_BYTES: usize = 1 << 20;
/// Metadata is read in whole blocks of this size.
const META_BLOCK_BYTES: u64 = 4096;

/// An operation on the data device. Offsets are bytes.
#[derive(Debug)]
pub enum DataWork {
    /// Fills a part of the buffer.
    Read {
        /// Destination.
        buf: BufRef,
        /// First byte in the buffer.
        start: u32,
        /// Length in bytes.
        len: u32,
        /// First byte on the device.
        offset: u64,
    },
    /// Writes a part of the buffer.
    Write {
        /// Source.
        buf: BufRef,
        /// First byte in the buffer.
        start: u32,
        /// Length in bytes.
        len: u32,
        /// First byte on the device.
        offset: u64,
        /// Durable at completion.
        fua: bool,
    },
    /// Makes completed writes durable.
    Flush,
    /// Deallocates a range.
    Discard {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Zeroes a range.
    Zeroes {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u32,
        /// It may be deallocated.
        unmap: bool,
    },
}

/// An operation on the metadata device.
#[derive(Debug)]
pub enum MetaWork {
    /// Reads bytes.
    Read {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Writes whole blocks, durable at completion.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
        /// Flush the data device before.
        flush_data: bool,
    },
    /// Stores words to persistent memory, each step persistent before the next.
    Store {
        /// What to store; offsets from the device's start.
        steps: Vec<WordStore>,
        /// Flush the data device before.
        flush_data: bool,
    },
}

/// What a task wants next.
#[derive(Debug)]
pub enum Step {
    /// Run this and tell [`Task::advance`] the result.
    Run(Op),
    /// It is over.
    Finished(Result<Outcome, DiskError>),
}

/// What a finished task gives.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing but the fact.
    Done,
    /// The bytes of a metadata read.
    Bytes(Vec<u8>),
}

/// An operation under way.
#[derive(Debug)]
pub struct Task {
    stage: Stage,
    rest: VecDeque<Stage>,
    /// Bytes read so far, cut out of whole blocks: what to skip, what to keep.
    read: Option<MetaRead>,
}

#[derive(Debug)]
struct MetaRead {
    bytes: Vec<u8>,
    skip: usize,
    len: usize,
}

#[derive(Debug)]
enum Stage {
    Transfer(Transfer),
    Sync(Arc<Device>),
    Store {
        device: Arc<Device>,
        steps: Vec<WordStore>,
    },
    Discard {
        device: Arc<Device>,
        offset: u64,
        len: u32,
    },
    Zeroes {
        device: Arc<Device>,
        offset: u64,
        len: u32,
        way: ZeroWay,
    },
}

/// How zeroes come to the device; each way falls back on the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZeroWay {
    /// Deallocate.
    Punch,
    /// Let the file system or the device do it.
    Range,
    /// Write them.
    Write,
}

#[derive(Debug)]
struct Transfer {
    device: Arc<Device>,
    write: bool,
    durable: bool,
    buf: BufRef,
    start: usize,
    len: usize,
    offset: u64,
    done: usize,
    /// Aligned memory in place of `buf`, if the device cannot take that.
    bounce: Option<BufRef>,
    turn: Turn,
}

/// A transfer of a disk that is slow or stopped on purpose waits for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    NotTaken,
    Waiting,
    Come,
}

impl Task {
    /// An operation on the data device.
    pub fn data(disk: &Disk, work: DataWork) -> Task {
        let device = disk.data().clone();
        let stage = match work {
            DataWork::Read {
                buf,
                start,
                len,
                offset,
            } => Stage::Transfer(Transfer::new(device, false, false, buf, start, len, offset)),
            DataWork::Write {
                buf,
                start,
                len,
                offset,
                fua,
            } => Stage::Transfer(Transfer::new(device, true, fua, buf, start, len, offset)),
            DataWork::Flush => Stage::Sync(device),
            DataWork::Discard { offset, len } => Stage::Discard {
                device,
                offset,
                len,
            },
            DataWork::Zeroes { offset, len, unmap } => {
                let way = if unmap {
                    ZeroWay::Punch
                } else {
                    ZeroWay::Range
                };
                Stage::Zeroes {
                    device,
                    offset,
                    len,
                    way,
                }
            }
        };
        Task {
            stage,
            rest: VecDeque::new(),
            read: None,
        }
    }

    /// An operation on the metadata device. Its memory comes from `pool` if possible.
    pub fn meta(disk: &Disk, work: MetaWork, pool: &BufferPool) -> Result<Task, DiskError> {
        let mut stages = VecDeque::new();
        let mut read = None;
        match work {
            MetaWork::Read { offset, len } => {
                let device = disk.meta();
                check_range(device, offset, u64::from(len))?;
                let first = offset / META_BLOCK_BYTES * META_BLOCK_BYTES;
                let end = (offset + u64::from(len)).next_multiple_of(META_BLOCK_BYTES);
                let end = end.min(device.info().data_bytes);
                transfers(device, false, first, end, pool, &mut stages)?;
                let (skip, len) = ((offset - first) as usize, len as usize);
                read = Some(MetaRead {
                    bytes: Vec::with_capacity(len),
                    skip,
                    len,
                });
            }
            MetaWork::Write {
                offset,
                bytes,
                flush_data,
            } => {
                if flush_data {
                    stages.push_back(Stage::Sync(disk.data().clone()));
                }
                let end = offset.saturating_add(bytes.len() as u64);
                let first = stages.len();
                transfers(disk.meta(), true, offset, end, pool, &mut stages)?;
                let mut rest = &bytes[..];
                for stage in stages.iter_mut().skip(first) {
                    if let Stage::Transfer(transfer) = stage {
                        let (piece, others) = rest.split_at(transfer.len);
                        transfer.buf.write_at(0, piece);
                        rest = others;
                    }
                }
            }
            MetaWork::Store { steps, flush_data } => {
                if flush_data {
                    stages.push_back(Stage::Sync(disk.data().clone()));
                }
                let device = disk.meta().clone();
                stages.push_back(Stage::Store { device, steps });
            }
        }
        // Nothing to transfer: a flush is the nearest thing with a completion.
        let stage = stages
            .pop_front()
            .unwrap_or_else(|| Stage::Sync(disk.meta().clone()));
        Ok(Task {
            stage,
            rest: stages,
            read,
        })
    }

    /// The first step.
    pub fn start(&mut self) -> Step {
        loop {
            match self.issue() {
                Ok(Some(op)) => return Step::Run(op),
                Ok(None) => {
                    if let Some(finished) = self.stage_done() {
                        return finished;
                    }
                }
                Err(error) => return Step::Finished(Err(error)),
            }
        }
    }

    /// The step after a ring operation with this result.
    pub fn advance(&mut self, result: Result<u32, Errno>) -> Step {
        match self.stage.advance(result) {
            Ok(Progress::More) => self.start(),
            Ok(Progress::Then(stage)) => {
                self.rest.push_front(stage);
                self.next_stage()
            }
            Ok(Progress::Done) => self.next_stage(),
            Err(error) => Step::Finished(Err(error)),
        }
    }

    fn next_stage(&mut self) -> Step {
        self.stage_done().unwrap_or_else(|| self.start())
    }

    /// Goes to the next stage; the result if there is none.
    fn stage_done(&mut self) -> Option<Step> {
        if let (Some(read), Stage::Transfer(transfer)) = (&mut self.read, &self.stage) {
            let skip = std::mem::take(&mut read.skip);
            let len = (transfer.len - skip).min(read.len - read.bytes.len());
            transfer
                .buf
                .with_bytes(skip, len, |bytes| read.bytes.extend_from_slice(bytes));
        }
        match self.rest.pop_front() {
            Some(stage) => {
                self.stage = stage;
                None
            }
            None => {
                let read = self.read.take();
                let outcome = read.map_or(Outcome::Done, |read| Outcome::Bytes(read.bytes));
                Some(Step::Finished(Ok(outcome)))
            }
        }
    }

    /// The stage's next ring operation, `None` if it is done without one.
    fn issue(&mut self) -> Result<Option<Op>, DiskError> {
        match &mut self.stage {
            Stage::Transfer(transfer) => transfer.issue(),
            Stage::Sync(device) => {
                fault(device, FaultOn::Flush)?;
                Ok(device.fd().map(|fd| Op::Sync { fd }))
            }
            Stage::Store { device, steps } => {
                store(device, steps)?;
                Ok(None)
            }
            Stage::Discard {
                device,
                offset,
                len,
            } => discard(device, *offset, *len),
            Stage::Zeroes {
                device,
                offset,
                len,
                way,
            } => {
                let zeroes = zeroes(device, *offset, *len, *way)?;
                let ZeroOp::Write = zeroes else {
                    return Ok(if let ZeroOp::Run(op) = zeroes {
                        Some(op)
                    } else {
                        None
                    });
                };
                let (device, offset, len) = (device.clone(), *offset, *len as usize);
                self.write_zeroes(&device, offset, len)?;
                self.issue()
            }
        }
    }

    /// Replaces the stage by writes of zeroes.
    fn write_zeroes(
        &mut self,
        device: &Arc<Device>,
        offset: u64,
        len: usize,
    ) -> Result<(), DiskError> {
        let zero = zero_piece()?;
        for done in (0..len).step_by(PIECE_BYTES).rev() {
            let piece = (len - done).min(PIECE_BYTES) as u32;
            let offset = offset + done as u64;
            let transfer =
                Transfer::new(device.clone(), true, false, zero.clone(), 0, piece, offset);
            self.rest.push_front(Stage::Transfer(transfer));
        }
        if let Some(stage) = self.rest.pop_front() {
            self.stage = stage;
        }
        Ok(())
    }
}

enum Progress {
    /// The same stage goes on.
    More,
    /// The stage is done.
    Done,
    /// The stage is done, but this must follow at once.
    Then(Stage),
}

impl Stage {
    fn advance(&mut self, result: Result<u32, Errno>) -> Result<Progress, DiskError> {
        match self {
            Stage::Transfer(transfer) => transfer.advance(result),
            Stage::Sync(device) => match result {
                Ok(_) => Ok(Progress::Done),
                Err(errno) => Err(failed(device, "flush", 0, errno)),
            },
            // It is done without the ring.
            Stage::Store { .. } => Ok(Progress::Done),
            Stage::Discard { device, offset, .. } => match result {
                Ok(_) => Ok(Progress::Done),
                Err(errno) if unsupported(errno) => Err(DiskError::Unsupported),
                Err(errno) => Err(failed(device, "discard", *offset, errno)),
            },
            Stage::Zeroes {
                device,
                way,
                offset,
                ..
            } => match result {
                Ok(_) => Ok(Progress::Done),
                Err(errno) if unsupported(errno) && *way != ZeroWay::Write => {
                    *way = match way {
                        ZeroWay::Punch => ZeroWay::Range,
                        ZeroWay::Range | ZeroWay::Write => {
                            device.no_zero_range.store(true, Ordering::Relaxed);
                            ZeroWay::Write
                        }
                    };
                    Ok(Progress::More)
                }
                Err(errno) => Err(failed(device, "write of zeroes", *offset, errno)),
            },
        }
    }
}

impl Transfer {
    fn new(
        device: Arc<Device>,
        write: bool,
        durable: bool,
        buf: BufRef,
        start: u32,
        len: u32,
        offset: u64,
    ) -> Transfer {
        let (start, len) = (start as usize, len as usize);
        Transfer {
            device,
            write,
            durable,
            buf,
            start,
            len,
            offset,
            done: 0,
            bounce: None,
            turn: Turn::NotTaken,
        }
    }

    fn issue(&mut self) -> Result<Option<Op>, DiskError> {
        fault(
            &self.device,
            if self.write {
                FaultOn::Write
            } else {
                FaultOn::Read
            },
        )?;
        if self.write && self.durable {
            fault(&self.device, FaultOn::Flush)?;
        }
        check_range(&self.device, self.offset, self.len as u64)?;
        if let Some(op) = self.wait_for_turn()? {
            return Ok(Some(op));
        }
        let fd = match &self.device.medium {
            Medium::File(fd) | Medium::Block(fd) => fd.clone(),
            Medium::Ram(disk) => {
                if self.write {
                    disk.write_from(self.offset, &self.buf, self.start, self.len);
                } else {
                    disk.read_to(self.offset, &self.buf, self.start, self.len);
                }
                return Ok(None);
            }
        };
        self.align_memory()?;
        let (buf, start) = match &self.bounce {
            Some(bounce) => (bounce.clone(), self.done),
            None => (self.buf.clone(), self.start + self.done),
        };
        let (start, len) = (start as u32, (self.len - self.done) as u32);
        let offset = self.offset + self.done as u64;
        Ok(Some(if self.write {
            let durable = self.durable && self.device.dsync_works();
            Op::Write {
                fd,
                buf,
                start,
                len,
                offset,
                durable,
            }
        } else {
            Op::Read {
                fd,
                buf,
                start,
                len,
                offset,
            }
        }))
    }

    /// What a read waits for before it starts, if its disk is slow on purpose.
    fn wait_for_turn(&mut self) -> Result<Option<Op>, DiskError> {
        let Some(plan) = &self.device.faults else {
            return Ok(None);
        };
        if self.turn != Turn::NotTaken {
            return Ok(None);
        }
        if let Some(fd) = plan.gate() {
            self.turn = Turn::Waiting;
            let events = libc::POLLIN;
            return Ok(Some(Op::Poll { fd, events }));
        }
        if self.write {
            return Ok(None);
        }
        let Some(wait) = plan.turn() else {
            return Ok(None);
        };
        self.turn = Turn::Waiting;
        let timer = alarm(wait).map_err(|errno| failed(&self.device, "timer", 0, errno))?;
        Ok(Some(Op::Poll {
            fd: Arc::new(timer),
            events: libc::POLLIN,
        }))
    }

    /// Direct IO needs aligned memory; payload that is not aligned is copied once.
    fn align_memory(&mut self) -> Result<(), DiskError> {
        let aligned = self.start.is_multiple_of(self.device.memory_align);
        if aligned || self.bounce.is_some() || !self.device.is_direct() {
            return Ok(());
        }
        let bounce = IoBuf::standalone(self.len).map_err(no_memory)?.share();
        if self.write {
            let (start, len) = (self.start, self.len);
            self.buf
                .with_bytes(start, len, |bytes| bounce.write_at(0, bytes));
        }
        self.bounce = Some(bounce);
        Ok(())
    }

    fn advance(&mut self, result: Result<u32, Errno>) -> Result<Progress, DiskError> {
        if self.turn == Turn::Waiting {
            self.turn = Turn::Come;
            return Ok(Progress::More);
        }
        let count = match result {
            Ok(count) => count as usize,
            Err(errno) if self.durable && self.device.dsync_works() && unsupported(errno) => {
                // Nothing was written, so writing again, with a flush after it, is no retry.
                self.device.no_dsync.store(true, Ordering::Relaxed);
                return Ok(Progress::More);
            }
            Err(Errno(libc::EINTR | libc::EAGAIN)) => return Ok(Progress::More),
            Err(errno) => {
                let operation = if self.write { "write" } else { "read" };
                let at = self.offset + self.done as u64;
                return Err(failed(&self.device, operation, at, errno));
            }
        };
        if count == 0 {
            // The device ends where it had more bytes when it was opened.
            return Err(DiskError::Io { errno: libc::EIO });
        }
        self.done += count;
        if self.done < self.len {
            return Ok(Progress::More);
        }
        if let (false, Some(bounce)) = (self.write, &self.bounce) {
            let (start, buf) = (self.start, &self.buf);
            bounce.with_bytes(0, self.len, |bytes| buf.write_at(start, bytes));
        }
        if self.write && self.durable && !self.device.dsync_works() {
            return Ok(Progress::Then(Stage::Sync(self.device.clone())));
        }
        Ok(Progress::Done)
    }
}

impl Device {
    fn fd(&self) -> Option<Fd> {
        match &self.medium {
            Medium::File(fd) | Medium::Block(fd) => Some(fd.clone()),
            Medium::Ram(_) => None,
        }
    }
}

/// Transfers of `first..end` in pieces, each with memory of its own.
fn transfers(
    device: &Arc<Device>,
    write: bool,
    first: u64,
    end: u64,
    pool: &BufferPool,
    stages: &mut VecDeque<Stage>,
) -> Result<(), DiskError> {
    let mut offset = first;
    while offset < end {
        let len = (end - offset).min(PIECE_BYTES as u64) as u32;
        let buf = match pool.alloc(len as usize, Claim::Receive) {
            Some(buf) => buf,
            None => IoBuf::standalone(len as usize).map_err(no_memory)?,
        };
        let transfer = Transfer::new(device.clone(), write, write, buf.share(), 0, len, offset);
        stages.push_back(Stage::Transfer(transfer));
        offset += u64::from(len);
    }
    Ok(())
}

/// Stores to persistent memory; no call of the kernel is made.
fn store(device: &Device, steps: &[WordStore]) -> Result<(), DiskError> {
    fault(device, FaultOn::Write)?;
    fault(device, FaultOn::Flush)?;
    let Some(mapping) = device.mapping() else {
        return Err(DiskError::Unsupported);
    };
    for WordStore { offset, bytes } in steps {
        let stored = mapping.store(*offset, bytes);
        stored.map_err(|errno| failed(device, "store", *offset, errno))?;
    }
    Ok(())
}

fn discard(device: &Arc<Device>, offset: u64, len: u32) -> Result<Option<Op>, DiskError> {
    fault(device, FaultOn::Discard)?;
    check_range(device, offset, u64::from(len))?;
    if !device.info().discard {
        return Err(DiskError::Unsupported);
    }
    Ok(match &device.medium {
        Medium::File(fd) => Some(Op::Fallocate {
            fd: fd.clone(),
            mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            offset,
            len: u64::from(len),
        }),
        Medium::Block(fd) => {
            let fd = fd.clone();
            let work = move || sys::discard(&fd, offset, u64::from(len)).map(|()| 0);
            Some(Op::Blocking(Some(Box::new(work))))
        }
        Medium::Ram(disk) => {
            disk.zero(offset, len as usize);
            None
        }
    })
}

enum ZeroOp {
    Run(Op),
    Write,
    Done,
}

fn zeroes(device: &Arc<Device>, offset: u64, len: u32, way: ZeroWay) -> Result<ZeroOp, DiskError> {
    fault(device, FaultOn::Discard)?;
    check_range(device, offset, u64::from(len))?;
    let no_range = device.no_zero_range.load(Ordering::Relaxed);
    let fallocate = |fd: &Fd, mode| {
        let (fd, mode) = (fd.clone(), mode | libc::FALLOC_FL_KEEP_SIZE);
        ZeroOp::Run(Op::Fallocate {
            fd,
            mode,
            offset,
            len: u64::from(len),
        })
    };
    Ok(match (&device.medium, way) {
        (Medium::Ram(disk), _) => {
            disk.zero(offset, len as usize);
            ZeroOp::Done
        }
        (_, ZeroWay::Write) => ZeroOp::Write,
        (Medium::File(fd) | Medium::Block(fd), ZeroWay::Punch) => {
            fallocate(fd, libc::FALLOC_FL_PUNCH_HOLE)
        }
        (_, ZeroWay::Range) if no_range => ZeroOp::Write,
        (Medium::File(fd), ZeroWay::Range) => fallocate(fd, libc::FALLOC_FL_ZERO_RANGE),
        (Medium::Block(fd), ZeroWay::Range) => {
            let fd = fd.clone();
            let work = move || sys::zero_out(&fd, offset, u64::from(len)).map(|()| 0);
            ZeroOp::Run(Op::Blocking(Some(Box::new(work))))
        }
    })
}

/// A range behind the end would make a file grow; it is refused for every medium.
fn check_range(device: &Device, offset: u64, len: u64) -> Result<(), DiskError> {
    match offset.checked_add(len) {
        Some(end) if end <= device.info().data_bytes => Ok(()),
        _ => Err(DiskError::Io {
            errno: libc::ENOSPC,
        }),
    }
}

fn fault(device: &Device, on: FaultOn) -> Result<(), DiskError> {
    match &device.faults {
        None => Ok(()),
        Some(plan) => plan
            .check(on)
            .map_err(|errno| failed(device, "planned fault", 0, errno)),
    }
}

/// A descriptor that becomes readable after this time.
fn alarm(wait: Duration) -> Result<OwnedFd, Errno> {
    let failed = |error: rustix::io::Errno| Errno(error.raw_os_error());
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).map_err(failed)?;
    let zero = Timespec::default();
    let value = Timespec {
        tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
        // Zero would never come.
        tv_nsec: i64::from(wait.subsec_nanos().max(1)),
    };
    let once = Itimerspec {
        it_interval: zero,
        it_value: value,
    };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &once).map_err(failed)?;
    Ok(timer)
}

fn zero_piece() -> Result<BufRef, DiskError> {
    static ZERO: OnceLock<BufRef> = OnceLock::new();
    if let Some(zero) = ZERO.get() {
        return Ok(zero.clone());
    }
    // New memory of the kernel is zero.
    let zero = IoBuf::standalone(PIECE_BYTES).map_err(no_memory)?.share();
    Ok(ZERO.get_or_init(|| zero).clone())
}

fn unsupported(errno: Errno) -> bool {
    matches!(errno.0, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY)
}

fn failed(device: &Device, operation: &'static str, offset: u64, errno: Errno) -> DiskError {
    // The disk was closed under the operation; nothing is wrong with it.
    if errno != Errno::CANCELED {
        device.failed(operation, offset, errno.0);
    }
    DiskError::Io { errno: errno.0 }
}

fn no_memory(error: std::io::Error) -> DiskError {
    DiskError::Io {
        errno: error.raw_os_error().unwrap_or(libc::ENOMEM),
    }
}
