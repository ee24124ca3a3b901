//! Disks in memory, for benchmarks and tests: `ram:<bytes>` or `ram:<bytes>:<name>`.
//!
//! A RAM disk lives as long as the process, so what was written is there at the next attach.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::pool::{BLOCK_BYTES_MAX, BufRef, BufferPool, Claim, IoBuf};

/// What a path of a RAM disk starts with.
pub const RAM_PREFIX: &str = "ram:";

/// A disk in memory.
#[derive(Debug)]
pub struct RamDisk {
    size_bytes: u64,
    chunks: Vec<Mutex<IoBuf>>,
}

static DISKS: Mutex<Option<HashMap<String, Arc<RamDisk>>>> = Mutex::new(None);

/// Why a RAM disk cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RamDiskError {
    /// The text behind the prefix is no size.
    #[error("{path}: needed is `ram:<bytes>` or `ram:<bytes>:<name>`, bytes a multiple of 4096")]
    Size {
        /// The path.
        path: String,
    },
    /// The system gives no memory.
    #[error("{path}: no memory for the disk")]
    Memory {
        /// The path.
        path: String,
        /// The cause.
        source: std::io::Error,
    },
}

impl RamDisk {
    /// The disk with this path, new and zero if nobody asked for it before.
    pub fn of_path(path: &str) -> Result<Arc<RamDisk>, RamDiskError> {
        let mut disks = DISKS.lock().unwrap_or_else(PoisonError::into_inner);
        let disks = disks.get_or_insert_default();
        if let Some(disk) = disks.get(path) {
            return Ok(disk.clone());
        }
        let size = path
            .strip_prefix(RAM_PREFIX)
            .and_then(|rest| rest.split(':').next());
        let size = size.and_then(|size| size.parse::<u64>().ok());
        let size = size.filter(|size| *size > 0 && size.is_multiple_of(4096));
        let size_bytes = size.ok_or_else(|| RamDiskError::Size { path: path.into() })?;
        let disk = RamDisk::new(size_bytes).map_err(|source| RamDiskError::Memory {
            path: path.into(),
            source,
        })?;
        let disk = Arc::new(disk);
        disks.insert(path.into(), disk.clone());
        Ok(disk)
    }

    fn new(size_bytes: u64) -> std::io::Result<RamDisk> {
        let too_large = || std::io::Error::from_raw_os_error(libc::ENOMEM);
        let count = size_bytes.div_ceil(BLOCK_BYTES_MAX as u64);
        let count = usize::try_from(count).map_err(|_| too_large())?;
        let pool = BufferPool::new(count * BLOCK_BYTES_MAX, 0)?;
        let chunk = |_| pool.alloc(BLOCK_BYTES_MAX, Claim::Receive).map(Mutex::new);
        let chunks = (0..count)
            .map(chunk)
            .collect::<Option<_>>()
            .ok_or_else(too_large)?;
        Ok(RamDisk { size_bytes, chunks })
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Copies bytes of the disk to `bytes`; `false` if the range ends behind the disk.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> bool {
        self.each(offset, bytes.len(), |chunk, at, done, len| {
            bytes[done..done + len].copy_from_slice(&chunk[at..at + len]);
        })
    }

    /// Copies `bytes` to the disk; `false` if the range ends behind the disk.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> bool {
        self.each(offset, bytes.len(), |chunk, at, done, len| {
            chunk[at..at + len].copy_from_slice(&bytes[done..done + len]);
        })
    }

    /// Copies bytes of the disk to a buffer.
    pub(super) fn read_to(&self, offset: u64, buf: &BufRef, start: usize, len: usize) -> bool {
        self.each(offset, len, |chunk, at, done, len| {
            buf.write_at(start + done, &chunk[at..at + len]);
        })
    }

    /// Copies bytes of a buffer to the disk.
    pub(super) fn write_from(&self, offset: u64, buf: &BufRef, start: usize, len: usize) -> bool {
        self.each(offset, len, |chunk, at, done, len| {
            buf.read_at(start + done, &mut chunk[at..at + len]);
        })
    }

    /// Zeroes a range.
    pub(super) fn zero(&self, offset: u64, len: usize) -> bool {
        self.each(offset, len, |chunk, at, _, len| chunk[at..at + len].fill(0))
    }

    /// Calls `f` with each chunk of the range, the place in it, the bytes before and its length.
    fn each(
        &self,
        offset: u64,
        len: usize,
        mut f: impl FnMut(&mut [u8], usize, usize, usize),
    ) -> bool {
        if offset
            .checked_add(len as u64)
            .is_none_or(|end| end > self.size_bytes)
        {
            return false;
        }
        let mut done = 0;
        while done < len {
            let position = offset as usize + done;
            let at = position % BLOCK_BYTES_MAX;
            let piece = (len - done).min(BLOCK_BYTES_MAX - at);
            f(
                &mut lock(&self.chunks[position / BLOCK_BYTES_MAX]),
                at,
                done,
                piece,
            );
            done += piece;
        }
        true
    }
}

fn lock(chunk: &Mutex<IoBuf>) -> MutexGuard<'_, IoBuf> {
    // A chunk is bytes; there is no state that a panic could leave half changed.
    chunk.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::RamDisk;

    #[test]
    fn a_ram_disk_is_found_again_by_its_path_and_ends_where_it_ends() {
        let disk = RamDisk::of_path("ram:4198400:found-again").unwrap();
        let bytes: Vec<u8> = (0..8192u32).map(|n| (n % 251) as u8).collect();
        // Across the border of two chunks.
        assert!(disk.write((2 << 20) - 4096, &bytes));
        let again = RamDisk::of_path("ram:4198400:found-again").unwrap();
        let mut read = vec![0; 8192];
        assert!(again.read((2 << 20) - 4096, &mut read));
        assert!(read == bytes);
        assert!(!disk.write(4_198_400 - 512, &[0; 1024]));
        assert!(!disk.read(u64::MAX, &mut read));
        for path in ["ram:", "ram:x", "ram:0", "ram:1000:a"] {
            let error = RamDisk::of_path(path).unwrap_err().to_string();
            assert!(error.starts_with(path), "{error}");
        }
    }
}
