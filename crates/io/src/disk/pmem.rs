//! Persistent memory under the metadata: a file of a DAX file system, mapped so that stores reach
//! the medium without the kernel (building-blocks.md, 5).
//!
//! A mapping with `MAP_SYNC` is what the kernel gives on such a file system only. On it a store is
//! persistent once its cache line was written back and a fence has passed. A store of 64 bytes
//! costs about 0.1 µs, a page of the bitmap 1 µs. Reads go through the file, so that a damaged
//! medium is an error of the operation and not a signal.
//!
//! Tests have no such medium: for a path that [`stand_in`] names, an ordinary file is mapped and
//! `msync` takes the place of the fence. Its stores are as durable, but 10,000 times slower, and
//! nothing but tests names one.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use lockstep_format::disk::pmem::WORD_BYTES;

use crate::ring::Errno;

/// What the processor writes back at a time.
const LINE_BYTES: usize = 64;
/// A multiple of the page size of any machine.
const PAGE_BYTES_MOST: usize = 65536;

static STAND_INS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The ordinary file of this path is taken for persistent memory from now on. For tests: `msync`
/// makes its stores durable.
pub fn stand_in(path: &str) {
    let mut paths = STAND_INS.lock().unwrap_or_else(PoisonError::into_inner);
    paths.insert(path.to_owned());
}

fn is_stand_in(path: &str) -> bool {
    let paths = STAND_INS.lock().unwrap_or_else(PoisonError::into_inner);
    paths.contains(path)
}

/// How stores become persistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Persist {
    /// Cache lines are written back so, then a fence passes.
    Lines(WriteBack),
    /// `msync`.
    Msync,
}

/// Instructions that write a cache line back, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteBack {
    Clwb,
    Clflushopt,
    Clflush,
}

/// A device's bytes in memory.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    persist: Persist,
}

// SAFETY: the mapping lives as long as the value and belongs to no thread; it is only touched by
// atomic stores and by instructions that write cache lines back.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of an open file; `None` if it is no persistent memory, or if this
    /// processor cannot write back to it.
    pub(super) fn of(fd: &OwnedFd, path: &str, len: u64) -> Option<Mapping> {
        let len = usize::try_from(len).ok().filter(|len| *len > 0)?;
        let (flags, persist) = if is_stand_in(path) {
            (libc::MAP_SHARED, Persist::Msync)
        } else {
            let sync = libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC;
            (sync, Persist::Lines(WriteBack::detect()?))
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), len, access, flags, fd.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = NonNull::new(base.cast())?;
        let mapping = Mapping { base, len, persist };
        // A store to a hole of the file needs space, and without that it were a signal.
        if let Err(error) = mapping.populate() {
            tracing::warn!(path, %error, "persistent memory cannot be mapped whole; blocks are written");
            return None;
        }
        tracing::info!(path, how = ?persist, "metadata on persistent memory");
        Some(mapping)
    }

    /// Bytes that are mapped.
    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Stores whole words of 8 bytes, each of which is there whole or not at all whatever happens;
    /// all of them are persistent on return.
    pub(super) fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.len()) {
            return Err(Errno(libc::ENOSPC));
        }
        let words = bytes.chunks_exact(WORD_BYTES as usize);
        if !offset.is_multiple_of(WORD_BYTES) || !words.remainder().is_empty() {
            return Err(Errno(libc::EINVAL));
        }
        // Both fit in memory's addresses: the mapping does.
        let start = offset as usize;
        for (i, word) in words.enumerate() {
            let Ok(word) = word.try_into() else { continue };
            // SAFETY: the word lies in the mapping, and at a multiple of its size, since the
            // mapping begins at a page. Nobody has a reference to the mapped bytes.
            let place = unsafe {
                let place = self.base.add(start + i * WORD_BYTES as usize);
                AtomicU64::from_ptr(place.cast().as_ptr())
            };
            place.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        self.persist(start, bytes.len())
    }

    fn persist(&self, start: usize, len: usize) -> Result<(), Errno> {
        match self.persist {
            Persist::Lines(write_back) => {
                let first = start / LINE_BYTES * LINE_BYTES;
                for line in (first..start + len).step_by(LINE_BYTES) {
                    // SAFETY: the line begins in the mapping, which ends at a page.
                    write_back.line(unsafe { self.base.add(line) });
                }
                fence();
                Ok(())
            }
            Persist::Msync => {
                let first = start / PAGE_BYTES_MOST * PAGE_BYTES_MOST;
                // SAFETY: the pages lie in the mapping; msync changes nothing in memory.
                let result = unsafe {
                    let at = self.base.add(first).as_ptr();
                    libc::msync(at.cast(), start + len - first, libc::MS_SYNC)
                };
                check(result)
            }
        }
    }

    /// Every page gets its place on the medium now.
    fn populate(&self) -> io::Result<()> {
        // SAFETY: the range is the mapping; its content does not change.
        let result = unsafe {
            libc::madvise(
                self.base.as_ptr().cast(),
                self.len,
                libc::MADV_POPULATE_WRITE,
            )
        };
        check(result).map_err(|errno| io::Error::from_raw_os_error(errno.0))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping, and nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn check(result: libc::c_int) -> Result<(), Errno> {
    if result == 0 {
        return Ok(());
    }
    let errno = io::Error::last_os_error().raw_os_error();
    Err(Errno(errno.unwrap_or(libc::EIO)))
}

#[cfg(target_arch = "x86_64")]
impl WriteBack {
    /// The best that this processor has.
    fn detect() -> Option<WriteBack> {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        let features = match __cpuid(0).eax {
            0..7 => 0,
            _ => __cpuid_count(7, 0).ebx,
        };
        Some(match features {
            has if has >> 24 & 1 == 1 => WriteBack::Clwb,
            has if has >> 23 & 1 == 1 => WriteBack::Clflushopt,
            // Every processor of this architecture has it.
            _ => WriteBack::Clflush,
        })
    }

    /// Writes back the line that holds the byte.
    fn line(self, place: NonNull<u8>) {
        let place = place.as_ptr();
        // SAFETY: these instructions change no register and no memory as the program sees it; the
        // processor has the one that `detect` chose, and the byte is mapped.
        unsafe {
            use std::arch::asm;
            match self {
                WriteBack::Clwb => {
                    asm!("clwb [{}]", in(reg) place, options(nostack, preserves_flags));
                }
                WriteBack::Clflushopt => {
                    asm!("clflushopt [{}]", in(reg) place, options(nostack, preserves_flags));
                }
                WriteBack::Clflush => {
                    asm!("clflush [{}]", in(reg) place, options(nostack, preserves_flags));
                }
            }
        }
    }
}

/// What was written back before is persistent behind it.
#[cfg(target_arch = "x86_64")]
fn fence() {
    // SAFETY: every processor of this architecture has it.
    unsafe { std::arch::asm!("sfence", options(nostack, preserves_flags)) };
}

#[cfg(not(target_arch = "x86_64"))]
impl WriteBack {
    /// No way is known on this architecture: metadata are written as on any disk.
    fn detect() -> Option<WriteBack> {
        None
    }

    fn line(self, _place: NonNull<u8>) {}
}

#[cfg(not(target_arch = "x86_64"))]
fn fence() {}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn file(len: u64) -> (tempfile::NamedTempFile, String) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(len).unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        (file, path)
    }

    fn open(path: &str) -> OwnedFd {
        let options = File::options().read(true).write(true).open(path);
        options.unwrap().into()
    }

    #[test]
    fn an_ordinary_file_is_no_persistent_memory() {
        let (_file, path) = file(8192);
        assert!(Mapping::of(&open(&path), &path, 8192).is_none());
    }

    #[test]
    fn words_are_stored_where_they_belong_and_nothing_else() {
        let (_file, path) = file(8192);
        stand_in(&path);
        let fd = open(&path);
        let mapping = Mapping::of(&fd, &path, 8192).expect("a stand-in");
        mapping.store(4088, &[7; 16]).unwrap();
        mapping.store(8184, b"the last").unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes[4088..4104], [7; 16]);
        assert_eq!(&bytes[8184..], b"the last");
        assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 24);
        for (offset, len, errno) in [
            (8184, 16, libc::ENOSPC),
            (u64::MAX - 7, 8, libc::ENOSPC),
            (4, 8, libc::EINVAL),
            (8, 12, libc::EINVAL),
        ] {
            let result = mapping.store(offset, &vec![1; len]);
            assert_eq!(result, Err(Errno(errno)), "{offset}+{len}");
        }
    }

    /// The instructions run on any memory; whether they make anything persistent no test can see.
    #[test]
    fn lines_are_written_back_with_every_instruction_that_there_is() {
        let (_file, path) = file(4096);
        stand_in(&path);
        let fd = open(&path);
        let mut mapping = Mapping::of(&fd, &path, 4096).expect("a stand-in");
        let Some(best) = WriteBack::detect() else {
            return;
        };
        let all = [WriteBack::Clwb, WriteBack::Clflushopt, WriteBack::Clflush];
        let known = all.into_iter().skip_while(|way| *way != best);
        for (i, way) in known.enumerate() {
            mapping.persist = Persist::Lines(way);
            mapping.store(56, &[i as u8 + 1; 24]).unwrap();
            assert_eq!(std::fs::read(&path).unwrap()[56..80], [i as u8 + 1; 24]);
        }
    }
}
