//! The io_uring implementation: everything of a turn is submitted with one system call.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};

use super::workers::Workers;
use super::{Done, Errno, Op, OpKey, Ring, RingKind, Slots, Wait, Waker, raw};

const SUBMISSIONS: u32 = 512;
const COMPLETIONS: u32 = 4096;
/// Threads for closures and ioctls, which io_uring cannot carry.
const WORKERS: usize = 2;
/// `user_data` of completions that nobody waits for. A slot number never gets that large.
const IGNORED: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// A send of more bytes than this is a copy that other operations should not wait for.
const LONG_SEND_BYTES: usize = 64 << 10;

/// An io_uring with the operations that are in it.
///
/// The kernel starts the operations of a turn one after the other, and starting a disk operation
/// takes it as long as sending a small packet. So packets go first, because somebody waits for them
/// elsewhere; then disks; and what only waits for others comes last.
pub struct Uring {
    ring: IoUring,
    slots: Slots<Entry>,
    /// Operations of this turn behind the short sends: on files, long sends, all others.
    files: Vec<squeue::Entry>,
    long_sends: Vec<squeue::Entry>,
    others: Vec<squeue::Entry>,
    /// Submissions that found the queue full.
    backlog: VecDeque<squeue::Entry>,
    ready: VecDeque<Done>,
    waker: Waker,
    wake_armed: bool,
    wake_bytes: Box<u64>,
    workers: Workers,
    worker_done: Vec<(OpKey, Op, Result<u32, Errno>)>,
}

/// When an operation of a turn is started.
#[derive(Clone, Copy)]
enum Class {
    File,
    LongSend,
    Other,
}

/// `None` for a short send, which is started first.
fn class_of(op: &Op) -> Option<Class> {
    match op {
        Op::Send { list, .. } if list.left() <= LONG_SEND_BYTES => None,
        Op::Send { .. } => Some(Class::LongSend),
        Op::Read { .. } | Op::Write { .. } | Op::Sync { .. } | Op::Fallocate { .. } => {
            Some(Class::File)
        }
        Op::Recv { .. } | Op::Connect { .. } | Op::Poll { .. } | Op::Blocking(_) => {
            Some(Class::Other)
        }
    }
}

struct Entry {
    token: u64,
    /// `None` while a worker has it.
    op: Option<Op>,
}

impl Uring {
    /// A new ring for this thread. Fails where the kernel refuses io_uring or lacks an operation.
    pub fn new() -> io::Result<Uring> {
        let ring = IoUring::builder()
            .setup_cqsize(COMPLETIONS)
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_defer_taskrun()
            .build(SUBMISSIONS)
            .or_else(|_| {
                IoUring::builder()
                    .setup_cqsize(COMPLETIONS)
                    .build(SUBMISSIONS)
            })?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
            opcode::Recv::CODE,
            opcode::SendMsg::CODE,
            opcode::Connect::CODE,
            opcode::PollAdd::CODE,
            opcode::AsyncCancel::CODE,
        ];
        let ext_arg = ring.params().is_feature_ext_arg() && ring.params().is_feature_nodrop();
        if !ext_arg || needed.iter().any(|code| !probe.is_supported(*code)) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring is too old (5.11 is needed)",
            ));
        }
        let waker = Waker::new()?;
        Ok(Uring {
            ring,
            slots: Slots::new(),
            files: Vec::new(),
            long_sends: Vec::new(),
            others: Vec::new(),
            backlog: VecDeque::new(),
            ready: VecDeque::new(),
            workers: Workers::new(WORKERS, waker.clone()),
            waker,
            wake_armed: false,
            wake_bytes: Box::new(0),
            worker_done: Vec::new(),
        })
    }

    fn submit_entry(&mut self, entry: squeue::Entry) {
        if !self.backlog.is_empty() {
            self.backlog.push_back(entry);
            return;
        }
        // SAFETY: what the entry points to is owned by the slot of its `user_data` (or by `self`
        // for the wake-up read) and stays there until its completion was taken.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.backlog.push_back(entry);
        }
    }

    fn fill_queue(&mut self) {
        for class in [Class::File, Class::LongSend, Class::Other] {
            let mut entries = std::mem::take(self.entries_of(class));
            for entry in entries.drain(..) {
                self.submit_entry(entry);
            }
            *self.entries_of(class) = entries;
        }
        let mut queue = self.ring.submission();
        while let Some(entry) = self.backlog.front() {
            // SAFETY: as in `submit_entry`.
            if unsafe { queue.push(entry) }.is_err() {
                return;
            }
            self.backlog.pop_front();
        }
    }

    fn entries_of(&mut self, class: Class) -> &mut Vec<squeue::Entry> {
        match class {
            Class::File => &mut self.files,
            Class::LongSend => &mut self.long_sends,
            Class::Other => &mut self.others,
        }
    }

    fn arm_wake(&mut self) {
        if self.wake_armed {
            return;
        }
        self.wake_armed = true;
        let to = (&raw mut *self.wake_bytes).cast::<u8>();
        let read = opcode::Read::new(types::Fd(raw(&self.waker.eventfd)), to, 8);
        self.others.push(read.build().user_data(WAKE));
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        if wait == Wait::No {
            let queue = self.ring.submission();
            if queue.is_empty() && !queue.taskrun() && !queue.cq_overflow() {
                // Nothing to start, and what is done is seen without the kernel.
                return Ok(());
            }
        }
        let result = match wait {
            Wait::Forever => self.ring.submitter().submit_and_wait(1),
            Wait::No => self.ring.submitter().submit(),
            Wait::AtMost(time) => {
                let time = types::Timespec::from(time);
                let args = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        match result {
            Ok(_) => Ok(()),
            // Time is over, a signal came, or completions must be taken before more fits.
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(error),
            },
        }
    }

    fn reap(&mut self) {
        loop {
            let Some(completion) = self.ring.completion().next() else {
                break;
            };
            self.completed(&completion);
        }
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

    fn completed(&mut self, completion: &cqueue::Entry) {
        match completion.user_data() {
            IGNORED => {}
            WAKE => self.wake_armed = false,
            key => {
                let entry = self.slots.remove(OpKey(key));
                let Some(Entry {
                    token,
                    op: Some(op),
                }) = entry
                else {
                    unreachable!("a completion belongs to an operation in flight")
                };
                let result = match completion.result() {
                    n if n < 0 => Err(Errno(-n)),
                    n => Ok(n as u32),
                };
                self.ready.push_back(Done { token, op, result });
            }
        }
    }
}

impl Ring for Uring {
    fn kind(&self) -> RingKind {
        RingKind::Uring
    }

    fn push(&mut self, token: u64, op: Op) -> OpKey {
        if let Op::Blocking(_) = op {
            let key = self.slots.insert(Entry { token, op: None });
            self.workers.push(key, op);
            return key;
        }
        let key = self.slots.insert(Entry {
            token,
            op: Some(op),
        });
        let op = self.slots.get_mut(key).and_then(|entry| entry.op.as_mut());
        let op = op.expect("the operation was put there one line above");
        let class = class_of(op);
        let entry = describe(op).user_data(key.0);
        match class {
            Some(class) => self.entries_of(class).push(entry),
            None => self.submit_entry(entry),
        }
        key
    }

    fn cancel(&mut self, key: OpKey) {
        let Some(entry) = self.slots.get_mut(key) else {
            return;
        };
        if entry.op.as_ref().is_some_and(Op::is_on_socket) {
            // Behind what it cancels, whatever class that is of.
            let cancel = opcode::AsyncCancel::new(key.0).build().user_data(IGNORED);
            self.others.push(cancel);
        }
    }

    fn turn(&mut self, wait: Wait) -> io::Result<()> {
        self.arm_wake();
        loop {
            self.fill_queue();
            let rest = !self.backlog.is_empty();
            let wait = if rest || !self.ready.is_empty() {
                Wait::No
            } else {
                wait
            };
            self.enter(wait)?;
            self.reap();
            if !rest {
                return Ok(());
            }
        }
    }

    fn pop(&mut self) -> Option<Done> {
        self.ready.pop_front()
    }

    fn is_due(&mut self) -> bool {
        !self.ready.is_empty()
            || !self.ring.completion().is_empty()
            || self.ring.submission().taskrun()
    }

    fn waker(&self) -> Waker {
        self.waker.clone()
    }

    fn in_flight(&self) -> usize {
        self.slots.len()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel may write into memory of operations in flight, so all must come back first.
        let keys: Vec<_> = (0..self.slots.slots.len())
            .filter(|n| self.slots.slots[*n].entry.is_some())
            .map(|n| OpKey::new(self.slots.slots[n].generation, n as u32))
            .collect();
        keys.into_iter().for_each(|key| self.cancel(key));
        self.waker.wake();
        for _ in 0..1000 {
            if self.slots.len() == 0 && !self.wake_armed {
                return;
            }
            self.fill_queue();
            if self.enter(Wait::AtMost(Duration::from_millis(20))).is_err() {
                break;
            }
            self.reap();
        }
        tracing::warn!(
            operations = self.slots.len(),
            "a ring ends with operations in flight"
        );
        // Better to lose the memory than to free what the kernel may still fill.
        std::mem::forget(std::mem::replace(&mut self.slots, Slots::new()));
        Box::leak(std::mem::replace(&mut self.wake_bytes, Box::new(0)));
    }
}

/// The submission for an operation. It points into what the operation owns on the heap.
fn describe(op: &mut Op) -> squeue::Entry {
    match op {
        Op::Read {
            fd,
            buf,
            start,
            len,
            offset,
        } => {
            let to = buf.ptr_at(*start as usize, *len as usize);
            opcode::Read::new(types::Fd(raw(fd)), to, *len)
                .offset(*offset)
                .build()
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
            opcode::Write::new(types::Fd(raw(fd)), from, *len)
                .offset(*offset)
                .rw_flags(if *durable { libc::RWF_DSYNC } else { 0 })
                .build()
        }
        Op::Sync { fd } => opcode::Fsync::new(types::Fd(raw(fd)))
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        Op::Fallocate {
            fd,
            mode,
            offset,
            len,
        } => opcode::Fallocate::new(types::Fd(raw(fd)), *len)
            .offset(*offset)
            .mode(*mode)
            .build(),
        Op::Recv {
            fd,
            into,
            start,
            len,
        } => {
            let to = into.ptr_at(*start as usize, *len as usize);
            opcode::Recv::new(types::Fd(raw(fd)), to, *len).build()
        }
        Op::Send { fd, list } => opcode::SendMsg::new(types::Fd(raw(fd)), list.prepare())
            .flags(libc::MSG_NOSIGNAL as u32)
            .build(),
        Op::Connect { fd, address } => {
            opcode::Connect::new(types::Fd(raw(fd)), address.as_ptr().cast(), address.len()).build()
        }
        Op::Poll { fd, events } => {
            opcode::PollAdd::new(types::Fd(raw(fd)), *events as u16 as u32).build()
        }
        Op::Blocking(_) => unreachable!("closures go to the workers"),
    }
}
