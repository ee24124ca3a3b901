//! Taking a file or block device for oneself, and who has it otherwise. The latter is best effort:
//! the kernel tells what mounts and stacked devices there are, and which process holds a file lock.
//!
//! A process that was killed holds what it had for a moment longer: the kernel ends its ring with
//! the requests in it, and a child that it was starting has its files until it is a program of its
//! own. That is waited for, as the next daemon comes at once.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// How long what a dead process left is waited for: as long as a disk may take for its requests.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same for a block device, of which the kernel does not tell who has it: a living process may.
const BLOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(5);

/// A lock was taken, or is another one's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Locked {
    /// It is ours until the file is closed.
    Ours,
    /// Who has it, as far as the kernel tells.
    By(String),
}

/// Locks a file (flock) against everybody else.
///
/// A living process's lock is told at once; that of a dead one, or of one that cannot be seen from
/// here, is waited for up to 30 s.
///
/// # Errors
///
/// What the kernel says, other than that the lock is taken.
pub fn lock_alone(file: impl AsFd) -> Result<Locked, Errno> {
    let begin = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Locked::Ours),
            Err(Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error),
        }
        let stat = rustix::fs::fstat(&file)?;
        if let Some(holder) = of_file(stat.st_dev, stat.st_ino) {
            return Ok(Locked::By(holder));
        }
        if begin.elapsed() >= PATIENCE {
            return Ok(Locked::By(
                "what a dead process left, or one out of sight".into(),
            ));
        }
        std::thread::sleep(LOOK);
    }
}

/// Opens a block device for oneself alone: repeats what fails because another one has it, while
/// nobody is known who does, for up to 5 s. The second value is the error's holder.
///
/// # Errors
///
/// The last one of `open`.
pub fn open_alone<T>(
    path: &Path,
    mut open: impl FnMut() -> Result<T, Errno>,
) -> Result<T, (Errno, Option<String>)> {
    let begin = Instant::now();
    loop {
        match open() {
            Ok(opened) => return Ok(opened),
            Err(Errno::BUSY) => {}
            Err(error) => return Err((error, None)),
        }
        let rdev = rustix::fs::stat(path).map_or(0, |stat| stat.st_rdev);
        let holder = of_block(rdev);
        if holder.is_some() || begin.elapsed() >= BLOCK_PATIENCE {
            return Err((Errno::BUSY, holder));
        }
        std::thread::sleep(LOOK);
    }
}

/// The process with this number (as text) is there and not dead.
pub fn runs(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

/// The living process that holds a lock on the file with this device and inode number.
fn of_file(dev: u64, inode: u64) -> Option<String> {
    let wanted = format!(
        "{:02x}:{:02x}:{inode}",
        rustix::fs::major(dev),
        rustix::fs::minor(dev)
    );
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let line = locks
        .lines()
        .find(|line| line.split_whitespace().any(|word| word == wanted))?;
    // "1: FLOCK ADVISORY WRITE 4711 fe:00:123 0 EOF"
    let pid = line.split_whitespace().nth(4)?;
    if !runs(pid) {
        return None;
    }
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(format!("process {pid} ({})", name.trim_end()))
}

/// Who uses the block device with this number: devices on top of it, or a mount.
fn of_block(rdev: u64) -> Option<String> {
    let number = format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let holders = Path::new("/sys/dev/block").join(&number).join("holders");
    let mut names: Vec<String> = fs::read_dir(holders)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| format!("device {}", entry.file_name().to_string_lossy()))
        .collect();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for line in mounts.lines() {
        let mut words = line.split(' ');
        // "36 35 98:0 /root /mount-point …"
        if words.nth(2) == Some(&number)
            && let Some(place) = words.nth(1)
        {
            names.push(format!("the mount at {place}"));
        }
    }
    (!names.is_empty()).then(|| names.join(", "))
}
