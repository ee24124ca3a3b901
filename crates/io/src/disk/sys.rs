//! System calls about block devices and files that no safe crate wraps.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::ring::Errno;

/// What `ioctl` and `statx` say about an open block device or file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockSizes {
    pub(super) size_bytes: u64,
    pub(super) logical_bytes: u32,
    pub(super) physical_bytes: u32,
}

/// Sizes of a block device.
pub(super) fn block_sizes(fd: &OwnedFd) -> io::Result<BlockSizes> {
    let (mut size_bytes, mut logical, mut physical) = (0u64, 0i32, 0u32);
    let raw = fd.as_raw_fd();
    // SAFETY: each request writes one integer of the type that its pointer has.
    let results = unsafe {
        [
            libc::ioctl(raw, BLKGETSIZE64 as _, &raw mut size_bytes),
            libc::ioctl(raw, libc::BLKSSZGET as _, &raw mut logical),
            libc::ioctl(raw, libc::BLKPBSZGET as _, &raw mut physical),
        ]
    };
    if results.iter().any(|result| *result < 0) {
        return Err(io::Error::last_os_error());
    }
    let logical_bytes = u32::try_from(logical).unwrap_or(512).max(512);
    Ok(BlockSizes {
        size_bytes,
        logical_bytes,
        physical_bytes: physical.max(logical_bytes),
    })
}

/// Alignment for direct IO on a file: of memory and of positions; `None` if the kernel is silent.
pub(super) fn direct_io_alignment(fd: &OwnedFd) -> Option<(u32, u32)> {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let flags = StatxFlags::DIOALIGN | StatxFlags::BASIC_STATS;
    let found = statx(fd, c"", AtFlags::EMPTY_PATH, flags).ok()?;
    let known = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::DIOALIGN);
    let (memory, position) = (found.stx_dio_mem_align, found.stx_dio_offset_align);
    (known && memory > 0 && position > 0).then_some((memory, position))
}

/// `BLKDISCARD`.
pub(super) fn discard(fd: &OwnedFd, offset: u64, len: u64) -> Result<(), Errno> {
    range_ioctl(fd, BLKDISCARD, offset, len)
}

/// `BLKZEROOUT`: zeroes without deallocation.
pub(super) fn zero_out(fd: &OwnedFd, offset: u64, len: u64) -> Result<(), Errno> {
    range_ioctl(fd, BLKZEROOUT, offset, len)
}

fn range_ioctl(fd: &OwnedFd, request: u32, offset: u64, len: u64) -> Result<(), Errno> {
    let range = [offset, len];
    // SAFETY: both requests read two 64-bit numbers, first byte and length.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, range.as_ptr()) };
    if result < 0 {
        let errno = io::Error::last_os_error().raw_os_error();
        return Err(Errno(errno.unwrap_or(libc::EIO)));
    }
    Ok(())
}

/// Whether the file's file system can punch holes. Tried behind the end of the file, where there is
/// nothing to lose.
pub(super) fn can_punch(fd: BorrowedFd<'_>, size_bytes: u64) -> bool {
    use rustix::fs::{FallocateFlags, fallocate};
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(fd, flags, size_bytes.next_multiple_of(4096), 4096).is_ok()
}

const BLKGETSIZE64: u32 = 0x8008_1272;
const BLKDISCARD: u32 = 0x1277;
const BLKZEROOUT: u32 = 0x127F;
