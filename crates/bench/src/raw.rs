//! The raw disk: io_uring and O_DIRECT on a file, nothing else.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use crate::stats::{Figure, Latencies, process_cpu};

/// Bytes of one operation.
pub const BLOCK: usize = 4096;

/// Whether the raw disk is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Random reads.
    Read,
    /// Random writes.
    Write,
}

/// Blocks of memory aligned for O_DIRECT.
pub struct Aligned {
    pages: Vec<Page>,
}

#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u8; BLOCK]);

impl Aligned {
    /// `blocks` blocks with some content.
    pub fn new(blocks: usize) -> Self {
        Aligned {
            pages: vec![Page([0x5a; BLOCK]); blocks],
        }
    }

    /// Where block `index` lies.
    pub fn pointer(&mut self, index: usize) -> *mut u8 {
        self.pages[index].0.as_mut_ptr()
    }
}

/// Opens a file for O_DIRECT and gives it real blocks, so that no allocation is measured.
pub fn prepare(path: &Path, bytes: u64) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(libc::O_DIRECT)
        .open(path)?;
    if file.metadata()?.len() < bytes {
        file.set_len(bytes)?;
        let mut block = Aligned::new(256);
        let pointer = block.pointer(0);
        let chunk = 256 * BLOCK;
        let mut at = 0u64;
        while at < bytes {
            let len = chunk.min((bytes - at) as usize);
            // SAFETY: `pointer` leads to 256 blocks that live until the end of this function, and
            // `len` is at most that many bytes.
            let done =
                unsafe { libc::pwrite(file.as_raw_fd(), pointer.cast(), len, at as libc::off_t) };
            if done < 0 {
                return Err(io::Error::last_os_error());
            }
            at += done as u64;
        }
        file.sync_all()?;
    }
    Ok(file)
}

/// Submits, and waits for one completion. The kernel may come back without one, to do other work of
/// the thread; then the caller finds nothing and comes again.
pub(crate) fn submit_and_wait(ring: &IoUring) -> io::Result<()> {
    match ring.submit_and_wait(1) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

/// Random operations at depth `qd` over the first `bytes` of the file, for `time`.
pub fn measure(
    file: &File,
    bytes: u64,
    direction: Direction,
    qd: usize,
    time: Duration,
) -> io::Result<Figure> {
    let mut ring: IoUring = IoUring::builder().build(u32::try_from(qd.max(8)).unwrap_or(1024))?;
    let mut memory = Aligned::new(qd);
    let mut started = vec![Instant::now(); qd];
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut latencies = Latencies::with_capacity(1 << 20);
    let blocks = bytes / BLOCK as u64;
    let fd = types::Fd(file.as_raw_fd());
    let begin = Instant::now();
    let cpu = process_cpu();
    let mut ready: Vec<usize> = (0..qd).collect();
    let mut in_flight = 0;
    loop {
        let over = begin.elapsed() >= time;
        if !over {
            for slot in ready.drain(..) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let offset = random % blocks * BLOCK as u64;
                let pointer = memory.pointer(slot);
                let entry = match direction {
                    Direction::Read => opcode::Read::new(fd, pointer, BLOCK as u32)
                        .offset(offset)
                        .build(),
                    Direction::Write => opcode::Write::new(fd, pointer, BLOCK as u32)
                        .offset(offset)
                        .build(),
                };
                started[slot] = Instant::now();
                // SAFETY: the block of `slot` is used by this operation only, and `memory` lives
                // until every completion was taken.
                unsafe { ring.submission().push(&entry.user_data(slot as u64)) }
                    .map_err(|_| io::Error::other("the ring is full"))?;
                in_flight += 1;
            }
        }
        if in_flight == 0 {
            break;
        }
        submit_and_wait(&ring)?;
        let now = Instant::now();
        for entry in ring.completion() {
            let slot = entry.user_data() as usize;
            if entry.result() != BLOCK as i32 {
                return Err(io::Error::from_raw_os_error(-entry.result()));
            }
            latencies.add(now - started[slot]);
            ready.push(slot);
            in_flight -= 1;
        }
    }
    let elapsed = begin.elapsed();
    Ok(Figure::new(
        latencies,
        elapsed,
        process_cpu().saturating_sub(cpu),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_counted_once() {
        let directory = std::env::temp_dir().join(format!("lockstep-raw-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("disk");
        match prepare(&path, 1 << 20) {
            Ok(file) => {
                let figure = measure(
                    &file,
                    1 << 20,
                    Direction::Write,
                    4,
                    Duration::from_millis(50),
                )
                .unwrap();
                assert!(figure.iops > 0.0 && figure.p99_us >= figure.p50_us);
            }
            // A filesystem without O_DIRECT says so.
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL)),
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
