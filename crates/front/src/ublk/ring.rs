//! The io_uring of a queue and of the control device, and the memory that the kernel reads and
//! writes through them. The module of ublk with unsafe code.
//!
//! A buffer that the kernel fills belongs to the ring until the command that names it has ended;
//! one that it reads belongs to it until the command was taken, because the kernel copies then. The
//! ring submits only from the thread that waits, so no command runs beside its thread.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use lockstep_io::pool::IoBuf;

use super::abi::{self, Command, Description, DeviceInfo, Parameters, TagCommand};

type WideRing = IoUring<squeue::Entry128, cqueue::Entry>;

/// Marks the completion of the wake-up's read.
const WAKE: u64 = u64::MAX;

/// The control device.
pub(super) struct Control {
    ring: WideRing,
    file: File,
}

impl Control {
    /// Opens it. Fails where the kernel has no ublk, or this process may not use it.
    pub(super) fn open() -> io::Result<Control> {
        let path = "/dev/ublk-control";
        let file = File::options().read(true).write(true).open(path)?;
        let ring = IoUring::builder().build(4)?;
        Ok(Control { ring, file })
    }

    /// Makes a device and tells what the kernel made of the wishes.
    pub(super) fn add(&mut self, wanted: DeviceInfo) -> io::Result<DeviceInfo> {
        let mut bytes = wanted.encode().to_vec();
        self.run(Command::Add, wanted.device, &mut bytes, 0)?;
        decode_info(&bytes)
    }

    /// What the kernel has of a device.
    pub(super) fn info(&mut self, device: u32) -> io::Result<DeviceInfo> {
        let mut bytes = vec![0; DeviceInfo::LEN];
        self.run(Command::GetInfo, device, &mut bytes, 0)?;
        decode_info(&bytes)
    }

    /// Says what the disk is to look like.
    pub(super) fn set_parameters(&mut self, device: u32, wanted: &Parameters) -> io::Result<()> {
        let mut bytes = wanted.encode().to_vec();
        self.run(Command::SetParameters, device, &mut bytes, 0)
    }

    /// A command without memory; `number` is the server's process for those that start something.
    pub(super) fn plain(&mut self, command: Command, device: u32, number: u64) -> io::Result<()> {
        self.run(command, device, &mut Vec::new(), number)
    }

    fn run(
        &mut self,
        command: Command,
        device: u32,
        memory: &mut Vec<u8>,
        number: u64,
    ) -> io::Result<()> {
        let address = match memory.is_empty() {
            true => 0,
            false => memory.as_mut_ptr() as u64,
        };
        let body = abi::control(device, memory.len(), address, number);
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, command.number())
            .cmd(body)
            .build();
        // SAFETY: the command names `memory` with its length, which lives until the command has
        // ended: the wait below is repeated until then, and what cannot be waited for is leaked.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::Error::from(ErrorKind::WouldBlock))?;
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => {
                    std::mem::forget(std::mem::take(memory));
                    return Err(error);
                }
            }
            if let Some(done) = self.ring.completion().next() {
                return match done.result() {
                    0.. => Ok(()),
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
        }
    }
}

fn decode_info(bytes: &[u8]) -> io::Result<DeviceInfo> {
    let bytes = bytes.try_into().map_err(|_| ErrorKind::InvalidData)?;
    Ok(DeviceInfo::decode(bytes))
}

/// The descriptions of a queue's requests, which the kernel writes.
struct Descriptions {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and may be read on any thread.
unsafe impl Send for Descriptions {}

impl Descriptions {
    fn map(file: &File, depth: u16) -> io::Result<Descriptions> {
        let len = (usize::from(depth) * Description::LEN).next_multiple_of(4096);
        // SAFETY: a shared mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(ErrorKind::InvalidData)?;
        Ok(Descriptions { base, len })
    }

    fn read(&self, tag: u16) -> Description {
        let at = usize::from(tag) * Description::LEN;
        assert!(at + Description::LEN <= self.len, "tag {tag} is no tag");
        let mut bytes = [0; Description::LEN];
        // SAFETY: the range lies in the mapping, and the kernel writes a tag's description only
        // before it tells of the request; volatile, as another writes there at other times.
        unsafe {
            for (index, byte) in bytes.iter_mut().enumerate() {
                *byte = self.base.as_ptr().add(at + index).read_volatile();
            }
        }
        Description::decode(&bytes)
    }
}

impl Drop for Descriptions {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// What has happened in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A tag's command has ended.
    Tag { tag: u16, result: i32 },
    /// Somebody woke the queue.
    Woken,
}

/// A device's one queue, used by one thread from its first command on: the kernel insists.
pub(super) struct QueueRing {
    ring: WideRing,
    descriptions: Descriptions,
    file: File,
    wake: OwnedFd,
    /// Where the wake-up's count is read to.
    count: Box<[u8; 8]>,
    /// Buffers that the kernel is filling, by tag.
    filling: Vec<Option<IoBuf>>,
    /// Buffers whose content goes with the next submission.
    leaving: Vec<IoBuf>,
    /// Named where the kernel wants an address and copies nothing.
    unused: IoBuf,
}

impl QueueRing {
    /// For the device's character file; `wake` ends a wait.
    pub(super) fn new(file: File, depth: u16, wake: OwnedFd) -> io::Result<QueueRing> {
        // Each tag has one command at most; one more is for the wake-up.
        let entries = u32::from(depth) + 1;
        Ok(QueueRing {
            ring: IoUring::builder().build(entries.next_power_of_two())?,
            descriptions: Descriptions::map(&file, depth)?,
            file,
            wake,
            count: Box::default(),
            filling: (0..depth).map(|_| None).collect(),
            leaving: Vec::new(),
            unused: IoBuf::standalone(4096)?,
        })
    }

    /// The request that a tag has now.
    pub(super) fn description(&self, tag: u16) -> Description {
        self.descriptions.read(tag)
    }

    /// Tells of wake-ups; once after each.
    pub(super) fn arm_wake(&mut self) -> io::Result<()> {
        let fd = types::Fd(self.wake.as_raw_fd());
        let entry = opcode::Read::new(fd, self.count.as_mut_ptr(), 8)
            .build()
            .user_data(WAKE);
        self.push(entry.into())
    }

    /// Frees a tag for its first request.
    pub(super) fn fetch(&mut self, tag: u16) -> io::Result<()> {
        self.command(TagCommand::Fetch, tag, -1, 0)
    }

    /// Asks for a write's payload; [`Self::filled`] gives the buffer back.
    pub(super) fn get_data(&mut self, tag: u16, buf: IoBuf) -> io::Result<()> {
        let address = buf.as_ptr() as u64;
        self.filling[usize::from(tag)] = Some(buf);
        self.command(TagCommand::GetData, tag, 0, address)
    }

    /// The buffer of a [`Self::get_data`] that has ended.
    pub(super) fn filled(&mut self, tag: u16) -> Option<IoBuf> {
        self.filling[usize::from(tag)].take()
    }

    /// Ends a tag's request and frees the tag for the next one. `data` is a read's.
    pub(super) fn commit(
        &mut self,
        tag: u16,
        result: i32,
        is_read: bool,
        data: Option<IoBuf>,
    ) -> io::Result<()> {
        assert!(
            result <= 0 || !is_read || data.as_ref().is_some_and(|d| d.len() >= result as usize),
            "a read is answered with its bytes"
        );
        // The kernel wants an address with every read, also with one that failed.
        let address = match (&data, is_read) {
            (Some(data), true) => data.as_ptr() as u64,
            (None, true) => self.unused.as_ptr() as u64,
            (_, false) => 0,
        };
        self.command(TagCommand::CommitAndFetch, tag, result, address)?;
        self.leaving.extend(data);
        Ok(())
    }

    /// Submits everything and, if asked to, waits for an event.
    pub(super) fn submit(&mut self, wait: bool) -> io::Result<()> {
        let result = match wait {
            true => self.ring.submit_and_wait(1),
            false => self.ring.submit(),
        };
        match result {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) => return Err(error),
        }
        if self.ring.submission().is_empty() {
            self.leaving.clear();
        }
        Ok(())
    }

    /// The next event that has happened.
    pub(super) fn event(&mut self) -> Option<Event> {
        let done = self.ring.completion().next()?;
        Some(match done.user_data() {
            WAKE => Event::Woken,
            tag => Event::Tag {
                tag: tag as u16,
                result: done.result(),
            },
        })
    }

    fn command(
        &mut self,
        command: TagCommand,
        tag: u16,
        result: i32,
        address: u64,
    ) -> io::Result<()> {
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, command.number())
            .cmd(abi::tag_command(tag, result, address))
            .build()
            .user_data(u64::from(tag));
        self.push(entry)
    }

    fn push(&mut self, entry: squeue::Entry128) -> io::Result<()> {
        loop {
            // SAFETY: the memory that an entry names is `count`, or a buffer in `filling`, `leaving`
            // or `unused`, all of which live until the command has ended (see the module's text).
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return Ok(());
            }
            self.submit(false)?;
        }
    }
}

impl Drop for QueueRing {
    /// The kernel may still fill what it was not told to stop with.
    fn drop(&mut self) {
        for buf in self.filling.drain(..).flatten() {
            std::mem::forget(buf);
        }
        std::mem::forget(std::mem::take(&mut self.count));
    }
}
