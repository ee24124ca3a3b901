//! A device or file with metadata, opened for one of the tools.
//!
//! Reads and writes go through the page cache with `fsync`, not O_DIRECT: nobody else writes
//! while we hold the device, and unaligned devices work the same.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use lockstep_format::disk::store::Store;
use lockstep_io::disk::{Locked, lock_alone, open_alone};
use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

/// What a command does with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Only reads; the device may be in use.
    Read,
    /// Changes it; nobody else may hold it.
    Write,
    /// Goes through the motions of a change, writes nothing.
    DryRun,
}

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// No such file, no permission, ...
    #[error("open({path}) failed: {source}")]
    Open {
        /// Name as given.
        path: String,
        /// Reason.
        source: io::Error,
    },
    /// A plain file without `--force`.
    #[error("'{path}' is not a block device!")]
    NotABlockDevice {
        /// Name as given.
        path: String,
    },
    /// Somebody holds it.
    #[error("'{path}' is in use by {holder}; bring down what uses it first")]
    Busy {
        /// Name as given.
        path: String,
        /// Who, as far as the kernel tells.
        holder: String,
    },
}

/// Whether a plain file may stand in for a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlainFile {
    /// With `--force`, or when `drbdadm` calls for a disk of its configuration.
    Allowed,
    /// Without.
    Refused,
}

/// An open device.
#[derive(Debug)]
pub(crate) struct Device {
    file: File,
    size_bytes: u64,
    dry_run: bool,
}

impl Device {
    /// Opens a device. `exclusive` asks the kernel that nobody else (file system, device mapper)
    /// has claimed a block device: for metadata that does not share its device. A lock on the
    /// file keeps a running daemon and other tools out, also from plain files.
    pub(crate) fn open(
        path: &str,
        access: Access,
        exclusive: bool,
        plain: PlainFile,
    ) -> Result<Self, OpenError> {
        let open = |source| OpenError::Open {
            path: path.to_owned(),
            source,
        };
        let metadata = Path::new(path).metadata().map_err(open)?;
        let is_block = metadata.file_type().is_block_device();
        #[cfg(test)]
        let plain = if PLAIN_FILES.get() {
            PlainFile::Allowed
        } else {
            plain
        };
        if !is_block && (plain == PlainFile::Refused || !metadata.is_file()) {
            return Err(OpenError::NotABlockDevice {
                path: path.to_owned(),
            });
        }
        let mut options = OpenOptions::new();
        options.read(true).write(access == Access::Write);
        if is_block && exclusive && access == Access::Write {
            options.custom_flags(rustix::fs::OFlags::EXCL.bits() as i32);
        }
        let busy = |holder| OpenError::Busy {
            path: path.to_owned(),
            holder,
        };
        let file = open_alone(Path::new(path), || {
            let failed = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
            options.open(path).map_err(failed)
        });
        let file = file.map_err(|(error, holder)| match error {
            Errno::BUSY => busy(holder.unwrap_or_else(|| "another process".into())),
            error => open(error.into()),
        })?;
        match access {
            Access::Write => match lock_alone(&file).map_err(|error| open(error.into()))? {
                Locked::Ours => {}
                Locked::By(holder) => return Err(busy(holder)),
            },
            Access::Read | Access::DryRun => {
                match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
                    // Reading beside a daemon is allowed; what is read may be old.
                    Ok(()) | Err(Errno::WOULDBLOCK) => {}
                    Err(error) => return Err(open(error.into())),
                }
            }
        }
        let size_bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
            .map_err(|error| open(error.into()))?;
        Ok(Self {
            file,
            size_bytes,
            dry_run: access != Access::Write,
        })
    }

    /// Size in bytes.
    pub(crate) const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn zero_by_writes(&self, at: u64, len: u64) -> io::Result<()> {
        let zeros = vec![0; len.min(1 << 20) as usize];
        let mut done = 0;
        while done < len {
            let size = (len - done).min(zeros.len() as u64);
            self.file.write_all_at(&zeros[..size as usize], at + done)?;
            done += size;
        }
        Ok(())
    }
}

impl Drop for Device {
    /// A process that is being started elsewhere may hold a copy of the descriptor for a moment;
    /// the lock must not live that long.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

impl Store for Device {
    type Error = io::Error;

    fn read(&mut self, at: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, at)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        if self.dry_run {
            return Ok(());
        }
        // A file would grow.
        if at + bytes.len() as u64 > self.size_bytes {
            return Err(io::Error::other("write behind the end of the device"));
        }
        self.file.write_all_at(bytes, at)
    }

    fn zero(&mut self, at: u64, len: u64) -> io::Result<()> {
        if self.dry_run || len == 0 {
            return Ok(());
        }
        if at + len > self.size_bytes {
            return Err(io::Error::other("write behind the end of the device"));
        }
        // Keeps a sparse file sparse, and is one command to a block device that can zero.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, hole, at, len) {
            Ok(()) => Ok(()),
            Err(_) => self.zero_by_writes(at, len),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.dry_run {
            Ok(())
        } else {
            self.file.sync_data()
        }
    }
}

#[cfg(test)]
std::thread_local! {
    static PLAIN_FILES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs `work` with plain files taken for block devices, so that tests can see what happens
/// without `--force`.
#[cfg(test)]
pub(super) fn tests_allow_plain_files<T>(work: impl FnOnce() -> T) -> T {
    PLAIN_FILES.set(true);
    let result = work();
    PLAIN_FILES.set(false);
    result
}
