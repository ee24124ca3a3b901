//! Disks that fail on command. On this machine: a file of a small FUSE server, which answers requests
//! with errors. In a guest: a device of the device mapper.
//!
//! (QEMU's storage daemon 7.2 has such an export, too, but mixes up the data of writes that come at the
//! same time.)

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};

/// What a disk does with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It executes them.
    None,
    /// It fails all reads and writes.
    Everything,
    /// It fails those of block [`BAD_BLOCK`].
    OneBlock,
}

/// Number of the 4 KiB block that cannot be read or written with [`Fault::OneBlock`].
pub const BAD_BLOCK: u64 = 1500;

const SECTORS_PER_BLOCK: u64 = 8;

/// Shell commands that put this fault on the guest's `/dev/dm-0`, which lies on `/dev/vda`; the first
/// time they make it.
pub fn dm_commands(fault: Fault, sectors: u64) -> String {
    let bad = BAD_BLOCK * SECTORS_PER_BLOCK;
    let behind = bad + SECTORS_PER_BLOCK;
    let table = match fault {
        Fault::None => format!("0 {sectors} linear /dev/vda 0\\n"),
        Fault::Everything => format!("0 {sectors} error\\n"),
        Fault::OneBlock => format!(
            "0 {bad} linear /dev/vda 0\\n{bad} {SECTORS_PER_BLOCK} error\\n\
             {behind} {} linear /dev/vda {behind}\\n",
            sectors - behind
        ),
    };
    // Without `--noflush` a suspension waits for requests in flight, with it they meet the new table.
    format!(
        "if [ -e /dev/dm-0 ]; then printf '{table}' | dmsetup load d0 && \
         dmsetup suspend --noflush d0 && dmsetup resume d0; \
         else printf '{table}' | dmsetup create d0; fi"
    )
}

/// A file that can fail, over another one that holds the data. Needs root.
#[derive(Debug)]
pub struct FailingFile {
    path: PathBuf,
    fault: Arc<Mutex<Fault>>,
    server: Option<JoinHandle<()>>,
}

impl FailingFile {
    /// Shows `image` in `dir`, whole and sound.
    pub fn new(image: &Path, dir: &Path) -> Result<FailingFile> {
        let path = dir.join("failing");
        fs::File::create(&path)?;
        let image = fs::File::options().read(true).write(true).open(image)?;
        let fuse = fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .context("/dev/fuse")?;
        // The descriptor is the command's standard input.
        let status = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o"])
            .arg("fd=0,rootmode=100000,user_id=0,group_id=0,allow_other")
            .arg("lockstep-failing")
            .arg(&path)
            .stdin(Stdio::from(fuse.try_clone()?))
            .status()
            .context("mount")?;
        ensure!(status.success(), "mounting {}", path.display());
        let fault = Arc::new(Mutex::new(Fault::None));
        let server = Server {
            fuse,
            image,
            fault: Arc::clone(&fault),
        };
        Ok(FailingFile {
            path,
            fault,
            server: Some(std::thread::spawn(move || server.run())),
        })
    }

    /// The file that fails.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// From the next request on it does this.
    pub fn set_fault(&self, fault: Fault) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }
}

impl Drop for FailingFile {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
        if let Some(server) = self.server.take() {
            // It ends when the last user has closed the file.
            let _ = server.join();
        }
    }
}

/// Numbers of include/uapi/linux/fuse.h, version 7.31.
mod fuse {
    pub(super) const GETATTR: u32 = 3;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const FORGET: u32 = 2;
    pub(super) const BATCH_FORGET: u32 = 42;
    /// Every read and write comes here, none is answered from the page cache.
    pub(super) const OPEN_DIRECT_IO: u32 = 1;
    /// Writes may be longer than a page.
    pub(super) const BIG_WRITES: u32 = 1 << 5;
    pub(super) const IN_HEADER: usize = 40;
    pub(super) const WRITE_HEAD: usize = 40;
    pub(super) const MAX_WRITE: u32 = 128 << 10;
}

const EIO: i32 = 5;
const ENOSYS: i32 = 38;

/// Answers the requests for the one file, one after the other.
struct Server {
    fuse: fs::File,
    image: fs::File,
    fault: Arc<Mutex<Fault>>,
}

impl Server {
    fn run(mut self) {
        let mut buffer =
            vec![0; fuse::IN_HEADER + fuse::WRITE_HEAD + fuse::MAX_WRITE as usize + 4096];
        loop {
            let length = match self.fuse.read(&mut buffer) {
                Ok(length) if length >= fuse::IN_HEADER => length,
                // A request that was taken back.
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Interrupted) => {
                    continue;
                }
                // Unmounted.
                _ => return,
            };
            let request = &buffer[..length];
            let operation = u32_at(request, 4);
            if matches!(operation, fuse::FORGET | fuse::BATCH_FORGET) {
                continue;
            }
            let answer = self.answer(operation, &request[fuse::IN_HEADER..]);
            let (error, body) = match answer {
                Ok(body) => (0, body),
                Err(number) => (-number, Vec::new()),
            };
            let mut reply = Vec::with_capacity(16 + body.len());
            reply.extend((16 + body.len() as u32).to_ne_bytes());
            reply.extend(error.to_ne_bytes());
            reply.extend(&request[8..16]);
            reply.extend(body);
            // A request whose caller has gone needs no answer.
            let _ = self.fuse.write(&reply);
        }
    }

    /// The body of the answer, or the number of an error.
    fn answer(&self, operation: u32, body: &[u8]) -> Result<Vec<u8>, i32> {
        match operation {
            fuse::INIT => {
                let mut out = Vec::new();
                let words = [7, 31, u32_at(body, 8), fuse::BIG_WRITES, 0, fuse::MAX_WRITE];
                for word in words {
                    out.extend(u32::to_ne_bytes(word));
                }
                out.resize(64, 0);
                Ok(out)
            }
            fuse::GETATTR => {
                let size = self.image.metadata().map_err(|_| EIO)?.len();
                let mut out = vec![0; 16];
                for word in [1, size, size / 512, 0, 0, 0] {
                    out.extend(u64::to_ne_bytes(word));
                }
                // Three times in nanoseconds, mode, links, owner, group, device, block size, flags.
                for word in [0, 0, 0, 0o100_600, 1, 0, 0, 0, 4096, 0] {
                    out.extend(u32::to_ne_bytes(word));
                }
                Ok(out)
            }
            fuse::OPEN => {
                let mut out = vec![0; 8];
                out.extend(fuse::OPEN_DIRECT_IO.to_ne_bytes());
                out.resize(16, 0);
                Ok(out)
            }
            fuse::READ => {
                let (offset, length) = self.place(body)?;
                let mut out = vec![0; length];
                let size = self.image.metadata().map_err(|_| EIO)?.len();
                out.truncate(usize::try_from(size.saturating_sub(offset)).unwrap_or(length));
                self.image
                    .read_exact_at(&mut out, offset)
                    .map_err(|_| EIO)?;
                Ok(out)
            }
            fuse::WRITE => {
                let (offset, length) = self.place(body)?;
                let data = body.get(fuse::WRITE_HEAD..).unwrap_or_default();
                let data = data.get(..length).ok_or(EIO)?;
                self.image.write_all_at(data, offset).map_err(|_| EIO)?;
                let mut out = (length as u32).to_ne_bytes().to_vec();
                out.resize(8, 0);
                Ok(out)
            }
            fuse::FSYNC if self.now() == Fault::Everything => Err(EIO),
            fuse::FSYNC => self.image.sync_data().map_err(|_| EIO).map(|()| Vec::new()),
            fuse::FLUSH | fuse::RELEASE => Ok(Vec::new()),
            // The kernel does without: no discards, no locks, no attributes.
            _ => Err(ENOSYS),
        }
    }

    fn now(&self) -> Fault {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offset and length of a read or write that does not fail.
    fn place(&self, body: &[u8]) -> Result<(u64, usize), i32> {
        let offset = u64::from(u32_at(body, 8)) | u64::from(u32_at(body, 12)) << 32;
        let length = u64::from(u32_at(body, 16));
        let bad = BAD_BLOCK * SECTORS_PER_BLOCK * 512;
        let fails = match self.now() {
            Fault::None => false,
            Fault::Everything => true,
            Fault::OneBlock => offset < bad + SECTORS_PER_BLOCK * 512 && bad < offset + length,
        };
        if fails {
            return Err(EIO);
        }
        Ok((offset, length as usize))
    }
}

/// Zero where the request is shorter.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    word.map_or(0, u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::{BAD_BLOCK, FailingFile, Fault};
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_failing_file_fails_where_it_is_told_to_and_holds_what_it_was_given() {
        if !crate::can_mount() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::File::create(&image)
            .unwrap()
            .set_len(8 << 20)
            .unwrap();
        let failing = FailingFile::new(&image, dir.path()).unwrap();
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(failing.path())
            .unwrap();
        assert_eq!(file.metadata().unwrap().len(), 8 << 20);
        let (mut block, bad) = ([0; 4096], BAD_BLOCK * 4096);
        file.write_all_at(&[7; 300 << 10], bad - 4096).unwrap();
        failing.set_fault(Fault::OneBlock);
        assert!(file.read_exact_at(&mut block, bad).is_err());
        assert!(file.write_all_at(&[8; 512], bad + 4096 - 512).is_err());
        file.write_all_at(&[9; 4096], bad + 4096).unwrap();
        file.read_exact_at(&mut block, bad - 4096).unwrap();
        assert_eq!(block, [7; 4096]);
        failing.set_fault(Fault::Everything);
        assert!(file.read_exact_at(&mut block, 0).is_err());
        assert!(file.sync_data().is_err());
        failing.set_fault(Fault::None);
        file.sync_data().unwrap();
        drop(file);
        drop(failing);
        let stored = std::fs::read(image).unwrap();
        let at = bad as usize;
        assert!(stored[at - 4096..at + 4096].iter().all(|b| *b == 7));
        assert!(stored[at + 4096..at + 8192].iter().all(|b| *b == 9));
    }
}
