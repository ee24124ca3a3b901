//! Serves a device's requests: one thread, which is the only one that talks to the kernel about
//! them, because the kernel insists on that.
//!
//! Each of the device's tags is in one of few states: free (the kernel has it), a write whose payload
//! is on its way, or in the volume's hands. Completions come on the shard's thread, which puts them
//! into a box and wakes this thread by an event descriptor, which is on the ring like all else.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockstep_core::event::{RequestError, RequestId, RequestKind};
use lockstep_format::units::Sector;
use lockstep_io::pool::IoBuf;
use lockstep_io::port::{Completion, PortEvent, PortRequest, PortSink, SubmitError, VolumePort};

use super::abi::{self, Description, op};
use super::ring::{Event, QueueRing};
use crate::device::ConnectPort;
use crate::gate::{Access, Gate};
use crate::sys;

/// Requests in flight at most.
pub(super) const DEPTH: u16 = 128;

/// How long the thread waits before it asks again for memory that others hold.
const MEMORY_RETRY: Duration = Duration::from_millis(1);

/// What others tell the thread.
pub(super) struct Mail {
    done: Mutex<Vec<Completion>>,
    /// Everything fails from now on.
    abandoned: AtomicBool,
    wake: OwnedFd,
}

impl Mail {
    pub(super) fn new() -> io::Result<Mail> {
        use rustix::event::EventfdFlags;
        Ok(Mail {
            done: Mutex::default(),
            abandoned: AtomicBool::new(false),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
        })
    }

    /// From now on every request fails, those in the volume's hands too.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    fn wake(&self) {
        // It cannot fail before the count has overflowed.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn done(&self) -> MutexGuard<'_, Vec<Completion>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Sink(Arc<Mail>);

impl PortSink for Sink {
    fn event(&mut self, event: PortEvent) {
        if let PortEvent::Done(completion) = event {
            let mut done = self.0.done();
            done.push(completion);
            // Who has found some takes all.
            if done.len() == 1 {
                drop(done);
                self.0.wake();
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The kernel has the tag.
    Free,
    /// A request came, and there is no memory for it now.
    Hungry,
    /// A write's payload is asked for.
    Payload,
    /// The volume has the request.
    InWork { is_read: bool, bytes: u32 },
    /// The kernel has taken the tag away.
    Ended,
}

#[derive(Clone, Copy, Debug)]
struct Tag {
    state: State,
    /// Counts requests, so that a late completion of an abandoned one is known.
    turn: u32,
}

/// The thread's side of a device.
pub(super) struct Queue {
    ring: QueueRing,
    mail: Arc<Mail>,
    port: Box<dyn VolumePort + Send>,
    gate: Option<Arc<Gate>>,
    tags: Vec<Tag>,
    live: usize,
    unkicked: bool,
    /// Requests that the volume had no room for.
    refused: Vec<(u16, PortRequest)>,
}

impl Queue {
    /// For the device's character file. It must run on the thread that calls [`Self::run`].
    pub(super) fn new(
        file: File,
        mail: Arc<Mail>,
        gate: Option<Arc<Gate>>,
        connect: ConnectPort<'_>,
    ) -> io::Result<Queue> {
        let wake = mail.wake.try_clone()?;
        let free = Tag {
            state: State::Free,
            turn: 0,
        };
        Ok(Queue {
            ring: QueueRing::new(file, DEPTH, wake)?,
            port: connect(Box::new(Sink(mail.clone()))),
            mail,
            gate,
            tags: vec![free; usize::from(DEPTH)],
            live: usize::from(DEPTH),
            unkicked: false,
            refused: Vec::new(),
        })
    }

    /// Serves until the kernel has taken all tags away. Tells when all tags are fetched.
    pub(super) fn run(mut self, fetched: &SyncSender<io::Result<()>>) {
        let begun = self.begin();
        let works = begun.is_ok();
        // Who waits for it gives up after a while.
        let _ = fetched.send(begun);
        if !works {
            return;
        }
        if let Err(error) = self.serve() {
            tracing::error!(%error, "serving a ublk device failed; its requests wait or fail");
        }
    }

    fn begin(&mut self) -> io::Result<()> {
        self.ring.arm_wake()?;
        for tag in 0..DEPTH {
            self.ring.fetch(tag)?;
        }
        // The kernel looks for no partitions on a device whose server may not administer it. Its
        // search would wait for this process with a lock held that a new server's commands need:
        // after a SIGKILL in that moment nothing could take the device away.
        sys::without_administration(|| self.ring.submit(false))
    }

    fn serve(&mut self) -> io::Result<()> {
        while self.live > 0 {
            let hungry = self.tags.iter().any(|tag| tag.state == State::Hungry);
            if hungry {
                // Others hold the memory, and nothing tells when they give it back.
                std::thread::sleep(MEMORY_RETRY);
            }
            self.ring.submit(!hungry)?;
            while let Some(event) = self.ring.event() {
                match event {
                    Event::Woken => self.ring.arm_wake()?,
                    Event::Tag { tag, result } => self.tag(tag, result)?,
                }
            }
            self.take_mail()?;
            self.kick();
        }
        Ok(())
    }

    /// Whatever happened to a tag's command.
    fn tag(&mut self, tag: u16, result: i32) -> io::Result<()> {
        let state = self.tags[usize::from(tag)].state;
        match (result, state) {
            (abi::RESULT_OK, State::Payload) => match self.ring.filled(tag) {
                Some(buf) => self.write(tag, buf),
                None => self.fail(tag, RequestError::Io),
            },
            (abi::RESULT_OK | abi::RESULT_NEED_DATA, State::Free) => self.request(tag),
            (error, _) => {
                // The usual end is ENODEV.
                if error != -libc::ENODEV {
                    tracing::error!(tag, error, ?state, "a tag of a ublk device has ended");
                }
                drop(self.ring.filled(tag));
                if state != State::Ended {
                    self.tags[usize::from(tag)].state = State::Ended;
                    self.live -= 1;
                }
                Ok(())
            }
        }
    }

    /// A tag's request, as the kernel describes it.
    fn request(&mut self, tag: u16) -> io::Result<()> {
        let Description {
            op, flags, sectors, ..
        } = self.ring.description(tag);
        let hopeless = self.mail.is_abandoned();
        // A write's payload has to be taken first: the kernel accepts nothing else.
        if hopeless && op != op::WRITE {
            return self.fail(tag, RequestError::Io);
        }
        let bytes = sectors.saturating_mul(Sector::SIZE as u32);
        match op {
            op::READ | op::WRITE => {
                let mut buf = self.port.alloc(bytes as usize);
                if buf.is_none() && hopeless {
                    buf = Some(IoBuf::standalone(bytes as usize)?);
                }
                let Some(buf) = buf else {
                    self.tags[usize::from(tag)].state = State::Hungry;
                    return Ok(());
                };
                if op == op::WRITE {
                    self.tags[usize::from(tag)].state = State::Payload;
                    return self.ring.get_data(tag, buf);
                }
                self.submit(tag, RequestKind::Read, Access::Read, Some(buf))
            }
            op::FLUSH => {
                // What was written has been flushed before the volume was closed.
                if self.gate.as_ref().is_some_and(|g| g.session().is_none()) {
                    return self.end(tag, 0, false, None);
                }
                self.hand_over(tag, RequestKind::Flush, 0, 0, None)
            }
            // Both must read as zeroes afterwards, so that replicas stay equal.
            op::DISCARD => {
                let kind = RequestKind::Zeroes { unmap: true };
                self.submit(tag, kind, Access::Write, None)
            }
            op::WRITE_ZEROES => {
                let unmap = flags & abi::REQUEST_NO_UNMAP == 0 && self.port.properties().discard;
                let kind = RequestKind::Zeroes { unmap };
                self.submit(tag, kind, Access::Write, None)
            }
            _ => self.fail(tag, RequestError::Unsupported),
        }
    }

    /// A write whose payload has come.
    fn write(&mut self, tag: u16, buf: IoBuf) -> io::Result<()> {
        if self.mail.is_abandoned() {
            return self.fail(tag, RequestError::Io);
        }
        let fua = self.ring.description(tag).flags & abi::REQUEST_FUA != 0;
        self.submit(tag, RequestKind::Write { fua }, Access::Write, Some(buf))
    }

    /// Has the volume opened for a request and gives it to the volume.
    fn submit(
        &mut self,
        tag: u16,
        kind: RequestKind,
        access: Access,
        buf: Option<IoBuf>,
    ) -> io::Result<()> {
        let Description { sectors, start, .. } = self.ring.description(tag);
        let bytes = sectors.saturating_mul(Sector::SIZE as u32);
        let Some(gate) = self.gate.clone() else {
            return self.hand_over(tag, kind, start, bytes, buf);
        };
        let pass = match gate.try_pass(access) {
            Some(pass) => Ok(pass),
            None => {
                // Opening may wait for what was submitted before, and for its users.
                self.kick();
                self.ring.submit(false)?;
                let mail = self.mail.clone();
                gate.enter(access, &|| mail.is_abandoned())
            }
        };
        match pass {
            Ok(_pass) => self.hand_over(tag, kind, start, bytes, buf),
            Err(_refused) => self.fail(tag, RequestError::ReadOnly),
        }
    }

    fn hand_over(
        &mut self,
        tag: u16,
        kind: RequestKind,
        start: u64,
        bytes: u32,
        buf: Option<IoBuf>,
    ) -> io::Result<()> {
        let entry = &mut self.tags[usize::from(tag)];
        entry.turn = entry.turn.wrapping_add(1);
        entry.state = State::InWork {
            is_read: kind == RequestKind::Read,
            bytes,
        };
        let request = PortRequest {
            id: RequestId(u64::from(entry.turn) << 16 | u64::from(tag)),
            kind,
            sector: Sector(start),
            len: bytes,
            buf,
            buf_offset: 0,
        };
        self.give(tag, request)
    }

    fn give(&mut self, tag: u16, request: PortRequest) -> io::Result<()> {
        match self.port.submit(request) {
            Ok(()) => self.unkicked = true,
            Err(SubmitError::Full { request, .. }) => self.refused.push((tag, request)),
            Err(SubmitError::Gone(_)) => return self.fail(tag, RequestError::NoMedium),
        }
        Ok(())
    }

    fn kick(&mut self) {
        if std::mem::take(&mut self.unkicked) {
            self.port.kick();
        }
    }

    fn take_mail(&mut self) -> io::Result<()> {
        let done = std::mem::take(&mut *self.mail.done());
        let news = !done.is_empty();
        for Completion { id, result, buf } in done {
            let (tag, turn) = (id.0 as u16, (id.0 >> 16) as u32);
            let entry = self.tags[usize::from(tag)];
            let State::InWork { is_read, bytes } = entry.state else {
                continue;
            };
            if entry.turn != turn {
                continue;
            }
            match (result, is_read) {
                (Ok(()), true) if buf.is_none() => self.fail(tag, RequestError::Io)?,
                (Ok(()), _) => self.end(tag, bytes as i32, is_read, buf)?,
                (Err(error), _) => self.fail(tag, error)?,
            }
        }
        if self.mail.is_abandoned() {
            return self.fail_all();
        }
        if news {
            for (tag, request) in std::mem::take(&mut self.refused) {
                self.give(tag, request)?;
            }
        }
        // Memory comes back with any request of the shard, so these are asked again at each turn.
        for tag in 0..DEPTH {
            if self.tags[usize::from(tag)].state == State::Hungry {
                self.request(tag)?;
            }
        }
        Ok(())
    }

    /// Fails all that the kernel has not got back. Completions that come later find nobody.
    fn fail_all(&mut self) -> io::Result<()> {
        self.refused.clear();
        for tag in 0..DEPTH {
            match self.tags[usize::from(tag)].state {
                State::Hungry => self.request(tag)?,
                State::InWork { .. } => self.fail(tag, RequestError::Io)?,
                State::Free | State::Payload | State::Ended => {}
            }
        }
        Ok(())
    }

    fn fail(&mut self, tag: u16, error: RequestError) -> io::Result<()> {
        let errno = match error {
            RequestError::Unsupported => libc::EOPNOTSUPP,
            // The block layer has no words for the others.
            RequestError::Io
            | RequestError::ReadOnly
            | RequestError::NoMedium
            | RequestError::Invalid => libc::EIO,
        };
        let is_read = self.ring.description(tag).op == op::READ;
        self.end(tag, -errno, is_read, None)
    }

    /// Gives a tag back to the kernel.
    fn end(&mut self, tag: u16, result: i32, is_read: bool, buf: Option<IoBuf>) -> io::Result<()> {
        let entry = &mut self.tags[usize::from(tag)];
        entry.state = State::Free;
        entry.turn = entry.turn.wrapping_add(1);
        // A write's buffer is not looked at any more.
        let data = buf.filter(|_| is_read);
        self.ring.commit(tag, result, is_read, data)
    }
}
