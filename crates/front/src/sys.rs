//! The few system calls of this crate that have no safe wrapper: control requests of the loop and
//! block layers, and open files of a thread's own. The only module of the crate with unsafe code.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

/// A control request whose argument is a plain number, and which returns a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberRequest {
    /// Unbind a loop device from its file (on the last close, if others have it open).
    LoopClear,
    /// Take over the backing file's new size.
    LoopSetCapacity,
    /// Write and then forget what the page cache has of a block device.
    BlockFlushBuffers,
    /// A loop device's number that is free now.
    GetFreeLoop,
    /// Remove the unbound loop device of this number.
    RemoveLoop(u32),
}

/// A control request whose argument is memory that the kernel reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryRequest {
    /// `struct loop_config`, read.
    LoopConfigure,
    /// `struct loop_info64`, read.
    LoopSetStatus,
    /// `struct loop_info64`, written.
    LoopGetStatus,
    /// An `int`, read: 1 makes the block device read-only.
    BlockSetReadOnly,
    /// An `int`, written.
    BlockGetReadOnly,
}

impl NumberRequest {
    const fn number(self) -> libc::c_ulong {
        match self {
            NumberRequest::LoopClear => 0x4C01,
            NumberRequest::LoopSetCapacity => 0x4C07,
            NumberRequest::BlockFlushBuffers => 0x1261,
            NumberRequest::RemoveLoop(_) => 0x4C81,
            NumberRequest::GetFreeLoop => 0x4C82,
        }
    }

    const fn argument(self) -> libc::c_ulong {
        match self {
            NumberRequest::RemoveLoop(number) => number as libc::c_ulong,
            NumberRequest::LoopClear
            | NumberRequest::LoopSetCapacity
            | NumberRequest::BlockFlushBuffers
            | NumberRequest::GetFreeLoop => 0,
        }
    }
}

impl MemoryRequest {
    const fn number(self) -> libc::c_ulong {
        match self {
            MemoryRequest::LoopSetStatus => 0x4C04,
            MemoryRequest::LoopGetStatus => 0x4C05,
            MemoryRequest::LoopConfigure => 0x4C0A,
            MemoryRequest::BlockSetReadOnly => 0x125D,
            MemoryRequest::BlockGetReadOnly => 0x125E,
        }
    }

    /// How many bytes the kernel reads or writes.
    const fn len(self) -> usize {
        match self {
            MemoryRequest::LoopConfigure => 304,
            MemoryRequest::LoopSetStatus | MemoryRequest::LoopGetStatus => 232,
            MemoryRequest::BlockSetReadOnly | MemoryRequest::BlockGetReadOnly => 4,
        }
    }
}

/// Runs a control request without memory.
pub(crate) fn control(fd: impl AsFd, request: NumberRequest) -> std::io::Result<u32> {
    let (fd, argument) = (fd.as_fd().as_raw_fd(), request.argument());
    // SAFETY: these requests take their argument as a number or ignore it, so the kernel touches no
    // memory of ours.
    let result = unsafe { libc::ioctl(fd, request.number() as _, argument) };
    match u32::try_from(result) {
        Ok(number) => Ok(number),
        Err(_) => Err(std::io::Error::last_os_error()),
    }
}

/// Runs a control request on `memory`, which must have the request's length.
pub(crate) fn control_memory(
    fd: impl AsFd,
    request: MemoryRequest,
    memory: &mut [u8],
) -> std::io::Result<()> {
    assert_eq!(
        memory.len(),
        request.len(),
        "{request:?} has a fixed length"
    );
    // SAFETY: the kernel reads or writes exactly `request.len()` bytes there (without any need for
    // alignment, it copies), which the exclusive borrow covers; it keeps no pointer.
    let result = unsafe {
        libc::ioctl(
            fd.as_fd().as_raw_fd(),
            request.number() as _,
            memory.as_mut_ptr(),
        )
    };
    if result < 0 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Gives the calling thread a table of open files of its own that has the standard streams only.
pub(crate) fn leave_open_files() -> std::io::Result<()> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: the call takes no memory. With CLOSE_RANGE_UNSHARE the descriptors are closed in a copy
    // of the table that belongs to this thread alone, so no other thread's descriptor goes away.
    let result = unsafe {
        libc::close_range(
            FIRST,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_UNSHARE as libc::c_int,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

/// Runs `work` on this thread without the right to administer the system.
pub(crate) fn without_administration<T>(
    work: impl FnOnce() -> std::io::Result<T>,
) -> std::io::Result<T> {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let all = capabilities(None)?;
    let mut fewer = all;
    fewer.effective.remove(CapabilitySet::SYS_ADMIN);
    set_capabilities(None, fewer)?;
    let result = work();
    set_capabilities(None, all)?;
    result
}
