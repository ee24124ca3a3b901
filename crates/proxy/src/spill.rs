//! The spill disk: append-only segment files that hold coded chunks while memory is short. Records
//! are sealed under a key that exists only in this process, so after a crash the files are noise;
//! they are unlinked at once after opening and need no recovery.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use crate::core::frame::Bytes;
use crate::core::{Input, JobId, SpillRef};
use crate::mail::Post;

/// Size of a segment file in bytes.
const SEGMENT_BYTES: u64 = 64 << 20;
const TAG_LEN: usize = 16;

/// Work for the spill thread.
#[derive(Debug)]
enum Task {
    Write(JobId, Bytes),
    Read(JobId, SpillRef),
    Free(SpillRef),
}

/// The spill thread.
#[derive(Debug)]
pub(crate) struct Spill {
    tasks: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
}

/// One file; freed as a whole when nothing in it is needed.
struct Segment {
    file: File,
    used: u64,
    live: u64,
}

struct Disk {
    directory: PathBuf,
    key: LessSafeKey,
    segments: BTreeMap<u32, Segment>,
    current: u32,
    post: Post,
}

impl Spill {
    /// Checks the directory by writing to it, and starts the thread.
    pub(crate) fn start(directory: &Path, post: &Post) -> Result<Spill, String> {
        let failed =
            |error: std::io::Error| format!("spill directory {}: {error}", directory.display());
        let mut key = [0u8; 32];
        SystemRandom::new()
            .fill(&mut key)
            .map_err(|_| "no random numbers".to_string())?;
        let key = UnboundKey::new(&AES_256_GCM, &key).map_err(|_| "no key".to_string())?;
        let mut disk = Disk {
            directory: directory.to_path_buf(),
            key: LessSafeKey::new(key),
            segments: BTreeMap::new(),
            current: 0,
            post: post.clone(),
        };
        disk.new_segment().map_err(failed)?;
        let (tasks, inbox) = channel();
        let thread = std::thread::Builder::new()
            .name("spill".into())
            .spawn(move || disk.run(&inbox))
            .map_err(failed)?;
        Ok(Spill {
            tasks: Some(tasks),
            thread: Some(thread),
        })
    }

    /// Stores a payload; the answer is `Input::SpillWritten`.
    pub(crate) fn write(&self, job: JobId, payload: Bytes) {
        self.push(Task::Write(job, payload));
    }

    /// Reads a record back; the answer is `Input::SpillRead`.
    pub(crate) fn read(&self, job: JobId, from: SpillRef) {
        self.push(Task::Read(job, from));
    }

    /// A record is not needed any more.
    pub(crate) fn free(&self, record: SpillRef) {
        self.push(Task::Free(record));
    }

    fn push(&self, task: Task) {
        if let Some(tasks) = &self.tasks {
            let _ = tasks.send(task);
        }
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Disk {
    fn run(&mut self, inbox: &Receiver<Task>) {
        while let Ok(task) = inbox.recv() {
            match task {
                Task::Write(job, payload) => {
                    let result = self.write(&payload).map_err(|error| error.to_string());
                    self.post.input(Input::SpillWritten(job, result));
                }
                Task::Read(job, from) => {
                    let result = self.read(from);
                    self.post.input(Input::SpillRead(job, result));
                }
                Task::Free(record) => self.free(record),
            }
        }
    }

    fn new_segment(&mut self) -> std::io::Result<()> {
        let number = self.current + 1;
        let path = self
            .directory
            .join(format!("lockstep-spill-{}-{number}", std::process::id()));
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).create_new(true);
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(&path)?;
        // Nobody else needs the name, and a crash leaves nothing behind.
        std::fs::remove_file(&path)?;
        self.current = number;
        self.segments.insert(
            number,
            Segment {
                file,
                used: 0,
                live: 0,
            },
        );
        Ok(())
    }

    fn write(&mut self, payload: &[u8]) -> std::io::Result<SpillRef> {
        let len = payload.len() + TAG_LEN;
        let full = self
            .segments
            .get(&self.current)
            .is_none_or(|segment| segment.used + len as u64 > SEGMENT_BYTES);
        if full {
            self.new_segment()?;
        }
        let number = self.current;
        let segment = self.segments.get_mut(&number).expect("just made");
        let record = SpillRef {
            segment: number,
            position: segment.used as u32,
            len: payload.len() as u32,
        };
        let mut sealed = payload.to_vec();
        self.key
            .seal_in_place_append_tag(nonce(record), Aad::empty(), &mut sealed)
            .map_err(|_| std::io::Error::other("sealing failed"))?;
        if let Err(error) = segment.file.write_all_at(&sealed, segment.used) {
            // A part of it may be on the disk: this place, and so its nonce, is not used again.
            segment.used = SEGMENT_BYTES;
            if segment.live == 0 {
                self.segments.remove(&number);
            }
            return Err(error);
        }
        segment.used += len as u64;
        segment.live += 1;
        Ok(record)
    }

    fn read(&self, from: SpillRef) -> Result<Vec<u8>, String> {
        let segment = self.segments.get(&from.segment).ok_or("no such segment")?;
        let mut sealed = vec![0; from.len as usize + TAG_LEN];
        segment
            .file
            .read_exact_at(&mut sealed, u64::from(from.position))
            .map_err(|error| error.to_string())?;
        self.key
            .open_in_place(nonce(from), Aad::empty(), &mut sealed)
            .map_err(|_| "the record on disk was changed".to_string())?;
        sealed.truncate(from.len as usize);
        Ok(sealed)
    }

    fn free(&mut self, record: SpillRef) {
        let Some(segment) = self.segments.get_mut(&record.segment) else {
            return;
        };
        segment.live = segment.live.saturating_sub(1);
        if segment.live == 0 {
            if record.segment == self.current {
                // The place is written again only in a new segment: a nonce is used once.
                let _ = segment.file.set_len(0);
            } else {
                self.segments.remove(&record.segment);
            }
        }
    }
}

/// Place on the disk: never used twice under one key.
fn nonce(record: SpillRef) -> Nonce {
    let mut bytes = [0u8; 12];
    bytes[..4].copy_from_slice(&record.segment.to_le_bytes());
    bytes[4..8].copy_from_slice(&record.position.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mail::{Mail, mailbox};
    use std::sync::Arc;

    #[test]
    fn records_come_back_and_leave_no_file_behind() {
        let directory = tempfile::tempdir().unwrap();
        let (post, mailbox) = mailbox().unwrap();
        let spill = Spill::start(directory.path(), &post).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let payload: Bytes = Arc::new((0..100_000).map(|i| i as u8).collect());
        spill.write(JobId(1), Arc::clone(&payload));
        spill.write(JobId(2), Arc::new(vec![5; 10]));
        let next = || loop {
            let fds = &mut [rustix::event::PollFd::from_borrowed_fd(
                mailbox.bell(),
                rustix::event::PollFlags::IN,
            )];
            rustix::event::poll(fds, None).unwrap();
            if let Some(Mail::Input(input)) = mailbox.take() {
                return input;
            }
        };
        let Input::SpillWritten(JobId(1), Ok(first)) = next() else {
            panic!()
        };
        let Input::SpillWritten(JobId(2), Ok(second)) = next() else {
            panic!()
        };
        spill.read(JobId(3), second);
        spill.read(JobId(4), first);
        assert!(matches!(next(), Input::SpillRead(JobId(3), Ok(data)) if data == [5; 10]));
        assert!(matches!(next(), Input::SpillRead(JobId(4), Ok(data)) if data == *payload));
        spill.free(first);
        spill.free(second);
        spill.read(JobId(5), first);
        assert!(matches!(next(), Input::SpillRead(JobId(5), Err(_))));
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_named() {
        let (post, _mailbox) = mailbox().unwrap();
        let error = Spill::start(Path::new("/nonexistent/spill"), &post).unwrap_err();
        assert!(error.contains("/nonexistent/spill"), "{error}");
    }
}
