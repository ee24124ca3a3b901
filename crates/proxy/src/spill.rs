//! The spill disk: append-only segment files that hold coded chunks while memory is short. Each
//! file's records are sealed under a key of its own that exists only in memory, so after a crash the
//! files are noise; they are unlinked at once after opening and need no recovery. They bypass the
//! page cache where the file system can, so that a long queue does not push out what others need. An
//! upgrade hands descriptors and keys to the new process.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
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

/// Most bytes that are read at once.
const READ_BYTES: u64 = 4 << 20;

/// Work for the spill thread.
#[derive(Debug)]
enum Task {
    Write(JobId, Bytes),
    Read(JobId, SpillRef),
    Free(SpillRef),
    Give(Sender<std::io::Result<Vec<Handed>>>),
    Adopt(Vec<(Handed, u64)>),
}

/// A segment file on its way to another process. The key is never to be logged.
pub(crate) struct Handed {
    pub(crate) number: u32,
    pub(crate) key: [u8; 32],
    pub(crate) file: File,
}

impl std::fmt::Debug for Handed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "segment {}", self.number)
    }
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
    secret: [u8; 32],
    key: LessSafeKey,
    used: u64,
    live: u64,
}

struct Disk {
    /// `None`: what another process wrote is only read.
    directory: Option<PathBuf>,
    segments: BTreeMap<u32, Segment>,
    current: u32,
    /// The file system takes direct access.
    direct: bool,
    /// For one write or read, with room to begin at a multiple of a block's size.
    room: Vec<u8>,
    post: Post,
}

impl Spill {
    /// Checks the directory by writing to it, and starts the thread.
    pub(crate) fn start(directory: &Path, post: &Post) -> Result<Spill, String> {
        let failed =
            |error: std::io::Error| format!("spill directory {}: {error}", directory.display());
        let mut disk = Disk::new(Some(directory.to_path_buf()), post);
        disk.new_segment().map_err(failed)?;
        Spill::spawn(disk).map_err(failed)
    }

    /// Starts a thread that only reads what another process has written.
    pub(crate) fn start_reading(post: &Post) -> Result<Spill, String> {
        Spill::spawn(Disk::new(None, post)).map_err(|error| error.to_string())
    }

    fn spawn(mut disk: Disk) -> std::io::Result<Spill> {
        let (tasks, inbox) = channel();
        let thread = std::thread::Builder::new()
            .name("spill".into())
            .spawn(move || disk.run(&inbox))?;
        Ok(Spill {
            tasks: Some(tasks),
            thread: Some(thread),
        })
    }

    /// Copies of all segments that hold anything, for another process.
    pub(crate) fn give(&self) -> std::io::Result<Vec<Handed>> {
        let (sender, receiver) = channel();
        self.push(Task::Give(sender));
        let ended = || Err(std::io::Error::other("the spill thread has ended"));
        receiver.recv().unwrap_or_else(|_| ended())
    }

    /// Continues the segments of another process, each with the count of its records that are
    /// still needed. Nothing may have been written before.
    pub(crate) fn adopt(&self, segments: Vec<(Handed, u64)>) {
        self.push(Task::Adopt(segments));
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
    fn new(directory: Option<PathBuf>, post: &Post) -> Disk {
        Disk {
            directory,
            segments: BTreeMap::new(),
            current: 0,
            direct: true,
            room: Vec::new(),
            post: post.clone(),
        }
    }

    fn run(&mut self, inbox: &Receiver<Task>) {
        let mut next = None;
        while let Some(task) = next.take().or_else(|| inbox.recv().ok()) {
            match task {
                Task::Write(job, payload) => {
                    let result = self.write(&payload).map_err(|error| error.to_string());
                    self.post.input(Input::SpillWritten(job, result));
                }
                Task::Read(job, from) => {
                    let reads = gather((job, from), inbox, &mut next);
                    let records: Vec<SpillRef> = reads.iter().map(|(_, from)| *from).collect();
                    for ((job, _), result) in reads.iter().zip(self.read_run(&records)) {
                        self.post.input(Input::SpillRead(*job, result));
                    }
                }
                Task::Free(record) => self.free(record),
                Task::Give(reply) => {
                    // Who asked waits for it, unless its thread has died.
                    let _ = reply.send(self.give());
                }
                Task::Adopt(segments) => self.adopt(segments),
            }
        }
    }

    fn give(&self) -> std::io::Result<Vec<Handed>> {
        let needed = self.segments.iter().filter(|(_, segment)| segment.live > 0);
        needed
            .map(|(number, segment)| {
                Ok(Handed {
                    number: *number,
                    key: segment.secret,
                    file: segment.file.try_clone()?,
                })
            })
            .collect()
    }

    fn adopt(&mut self, segments: Vec<(Handed, u64)>) {
        assert!(
            self.segments.values().all(|segment| segment.live == 0),
            "only a new process takes over"
        );
        self.segments.clear();
        for (handed, live) in segments {
            self.current = self.current.max(handed.number);
            let segment = Segment {
                file: handed.file,
                key: key_of(&handed.key),
                secret: handed.key,
                // The old process may go on after all: nothing is added to its files.
                used: SEGMENT_BYTES,
                live,
            };
            if live > 0 {
                self.segments.insert(handed.number, segment);
            }
        }
    }

    fn new_segment(&mut self) -> std::io::Result<()> {
        let number = self.current + 1;
        let directory = self.directory.as_ref();
        let path = directory
            .ok_or_else(|| std::io::Error::other("no spill directory"))?
            .join(format!("lockstep-spill-{}-{number}", std::process::id()));
        let file = match create(&path, self.direct) {
            Err(error) if self.direct && is_invalid(&error) => {
                // A file may have been made before its flags were looked at.
                let _ = std::fs::remove_file(&path);
                self.direct = false;
                create(&path, false)?
            }
            other => other?,
        };
        // Nobody else needs the name, and a crash leaves nothing behind.
        std::fs::remove_file(&path)?;
        let mut secret = [0; 32];
        SystemRandom::new()
            .fill(&mut secret)
            .map_err(|_| std::io::Error::other("no random numbers"))?;
        if self
            .segments
            .get(&self.current)
            .is_some_and(|old| old.live == 0)
        {
            self.segments.remove(&self.current);
        }
        self.current = number;
        self.segments.insert(
            number,
            Segment {
                file,
                key: key_of(&secret),
                secret,
                used: 0,
                live: 0,
            },
        );
        Ok(())
    }

    fn write(&mut self, payload: &[u8]) -> std::io::Result<SpillRef> {
        match self.append(payload) {
            // Some file systems say only now that they do not take direct access.
            Err(error) if self.direct && is_invalid(&error) => {
                self.direct = false;
                self.append(payload)
            }
            other => other,
        }
    }

    fn append(&mut self, payload: &[u8]) -> std::io::Result<SpillRef> {
        let len = SpillRef::disk_len(payload.len()) as u64;
        let full = self
            .segments
            .get(&self.current)
            .is_none_or(|segment| segment.used + len > SEGMENT_BYTES);
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
        if segment.used == 0 {
            // Where there is less room, or where it cannot be had before, the file grows as it must.
            let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&segment.file, keep, 0, SEGMENT_BYTES);
        }
        let sealed = aligned(&mut self.room, SpillRef::disk_len(payload.len()));
        let (body, tag) = sealed.split_at_mut(payload.len());
        body.copy_from_slice(payload);
        let made = segment
            .key
            .seal_in_place_separate_tag(nonce(record), Aad::empty(), body)
            .map_err(|_| std::io::Error::other("sealing failed"))?;
        tag[..SpillRef::TAG_LEN].copy_from_slice(made.as_ref());
        tag[SpillRef::TAG_LEN..].fill(0);
        if let Err(error) = segment.file.write_all_at(sealed, segment.used) {
            // A part of it may be on the disk: this place, and so its nonce, is not used again.
            segment.used = SEGMENT_BYTES;
            if segment.live == 0 {
                self.segments.remove(&number);
            }
            return Err(error);
        }
        segment.used += len;
        segment.live += 1;
        Ok(record)
    }

    /// Reads records that lie behind each other on the disk. If that cannot be done at once, each
    /// is tried alone, so that only what is bad is lost.
    fn read_run(&mut self, records: &[SpillRef]) -> Vec<Result<Vec<u8>, String>> {
        match self.read_at_once(records) {
            Err(_) if records.len() > 1 => records
                .iter()
                .map(|record| self.read_at_once(&[*record])?.remove(0))
                .collect(),
            Err(error) => vec![Err(error)],
            Ok(payloads) => payloads,
        }
    }

    fn read_at_once(
        &mut self,
        records: &[SpillRef],
    ) -> Result<Vec<Result<Vec<u8>, String>>, String> {
        let from = records.first().ok_or("no record")?;
        let segment = self.segments.get(&from.segment).ok_or("no such segment")?;
        let len = records.iter().map(|r| r.disk_bytes() as usize).sum();
        let mut sealed = aligned(&mut self.room, len);
        segment
            .file
            .read_exact_at(sealed, u64::from(from.position))
            .map_err(|error| error.to_string())?;
        let mut payloads = Vec::with_capacity(records.len());
        for record in records {
            let (own, rest) = sealed.split_at_mut(record.disk_bytes() as usize);
            sealed = rest;
            let payload = segment
                .key
                .open_in_place(
                    nonce(*record),
                    Aad::empty(),
                    &mut own[..record.len as usize + SpillRef::TAG_LEN],
                )
                .map(|payload| payload.to_vec())
                .map_err(|_| "the record on disk was changed".to_string());
            payloads.push(payload);
        }
        Ok(payloads)
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

/// The reads that wait already and lie directly behind the first one. The task that ends them is
/// left in `next`.
fn gather(
    first: (JobId, SpillRef),
    inbox: &Receiver<Task>,
    next: &mut Option<Task>,
) -> Vec<(JobId, SpillRef)> {
    let (segment, begin) = (first.1.segment, u64::from(first.1.position));
    let mut end = begin + first.1.disk_bytes();
    let mut reads = vec![first];
    while let Ok(task) = inbox.try_recv() {
        match task {
            Task::Read(job, record)
                if record.segment == segment
                    && u64::from(record.position) == end
                    && end + record.disk_bytes() - begin <= READ_BYTES =>
            {
                end += record.disk_bytes();
                reads.push((job, record));
            }
            other => {
                *next = Some(other);
                break;
            }
        }
    }
    reads
}

/// A new file that nobody else may read.
fn create(path: &Path, direct: bool) -> std::io::Result<File> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    if direct {
        options.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
    }
    options.open(path)
}

fn is_invalid(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error())
}

/// So many bytes of `room`, from a multiple of a block's size in memory.
fn aligned(room: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if room.len() < len + SpillRef::BLOCK {
        room.resize(len + SpillRef::BLOCK, 0);
    }
    let at = room.as_ptr().align_offset(SpillRef::BLOCK);
    &mut room[at..at + len]
}

fn key_of(secret: &[u8; 32]) -> LessSafeKey {
    let key = UnboundKey::new(&AES_256_GCM, secret).expect("the key has the cipher's length");
    LessSafeKey::new(key)
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
        let payload: Bytes = Arc::new((0..100_000).map(|i| i as u8).collect::<Vec<u8>>().into());
        spill.write(JobId(1), Arc::clone(&payload));
        spill.write(JobId(2), Arc::new(vec![5; 10].into()));
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
        assert!(matches!(next(), Input::SpillRead(JobId(4), Ok(data)) if data == **payload));
        spill.free(first);
        spill.free(second);
        spill.read(JobId(5), first);
        assert!(matches!(next(), Input::SpillRead(JobId(5), Err(_))));
    }

    #[test]
    fn reads_that_follow_each_other_are_one() {
        let (sender, inbox) = channel();
        let record = |segment, block: u32, blocks: u32| SpillRef {
            segment,
            position: block * SpillRef::BLOCK as u32,
            len: blocks * SpillRef::BLOCK as u32 - SpillRef::TAG_LEN as u32,
        };
        // Two together; a gap; another segment; a task of another kind; then 5 MiB in a row.
        let mut reads = vec![
            record(1, 0, 2),
            record(1, 2, 1),
            record(1, 4, 1),
            record(2, 5, 1),
        ];
        for (at, read) in reads.iter().enumerate() {
            sender.send(Task::Read(JobId(at as u64), *read)).unwrap();
        }
        sender.send(Task::Free(reads[0])).unwrap();
        for at in 0..5 {
            let read = record(3, at * 256, 256);
            reads.push(read);
            sender.send(Task::Read(JobId(at as u64 + 4), read)).unwrap();
        }
        drop(sender);
        let (mut next, mut runs, mut frees) = (None, Vec::new(), 0);
        while let Some(task) = next.take().or_else(|| inbox.recv().ok()) {
            match task {
                Task::Read(job, from) => runs.push(gather((job, from), &inbox, &mut next)),
                Task::Free(_) => frees += 1,
                other => panic!("{other:?}"),
            }
        }
        let lengths: Vec<usize> = runs.iter().map(Vec::len).collect();
        assert_eq!((lengths, frees), (vec![2, 1, 1, 4, 1], 1));
        for (at, (job, from)) in runs.concat().into_iter().enumerate() {
            assert_eq!((job, from), (JobId(at as u64), reads[at]));
        }
    }

    #[test]
    fn of_a_run_only_what_is_bad_is_lost() {
        let directory = tempfile::tempdir().unwrap();
        let (post, _mailbox) = mailbox().unwrap();
        let mut disk = Disk::new(Some(directory.path().to_path_buf()), &post);
        let payload = |at: usize| vec![at as u8; 3000 * (at + 1)];
        let records: Vec<SpillRef> = (0..5).map(|at| disk.write(&payload(at)).unwrap()).collect();
        let read = disk.read_run(&records);
        assert_eq!(read, (0..5).map(|at| Ok(payload(at))).collect::<Vec<_>>());
        let zeros = vec![0; SpillRef::BLOCK * 2];
        let at = zeros.as_ptr().align_offset(SpillRef::BLOCK);
        segment_of(&disk, records[2])
            .file
            .write_all_at(
                &zeros[at..at + SpillRef::BLOCK],
                u64::from(records[2].position),
            )
            .unwrap();
        let read = disk.read_run(&records);
        assert_eq!(
            read.iter().map(Result::is_ok).collect::<Vec<_>>(),
            [true, true, false, true, true]
        );
        // The end of the file lies within the last one.
        let end = u64::from(records[4].position) + SpillRef::BLOCK as u64;
        segment_of(&disk, records[4]).file.set_len(end).unwrap();
        let read = disk.read_run(&records);
        assert_eq!(
            read.iter().map(Result::is_ok).collect::<Vec<_>>(),
            [true, true, false, true, false]
        );
        assert_eq!(read[3], Ok(payload(3)));
    }

    fn segment_of(disk: &Disk, record: SpillRef) -> &Segment {
        &disk.segments[&record.segment]
    }

    #[test]
    fn another_process_reads_what_was_written_and_adds_to_files_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let (post, mailbox) = mailbox().unwrap();
        let next = || match mailbox.take_within(std::time::Duration::from_secs(60)) {
            Some(Mail::Input(input)) => input,
            other => panic!("{other:?}"),
        };
        let old = Spill::start(directory.path(), &post).unwrap();
        let payload: Bytes = Arc::new(
            (0..100_000)
                .map(|i| (i * 7) as u8)
                .collect::<Vec<u8>>()
                .into(),
        );
        old.write(JobId(1), Arc::clone(&payload));
        let Input::SpillWritten(_, Ok(record)) = next() else {
            panic!()
        };
        let give = || {
            let given = old.give().unwrap();
            given.into_iter().map(|handed| (handed, 1)).collect()
        };
        let reader = Spill::start_reading(&post).unwrap();
        reader.adopt(give());
        reader.read(JobId(2), record);
        assert!(matches!(next(), Input::SpillRead(JobId(2), Ok(data)) if data == **payload));
        reader.write(JobId(3), Arc::clone(&payload));
        assert!(matches!(next(), Input::SpillWritten(JobId(3), Err(_))));
        let new = Spill::start(directory.path(), &post).unwrap();
        new.adopt(give());
        drop(old);
        new.write(JobId(4), Arc::new(vec![9; 10].into()));
        let Input::SpillWritten(JobId(4), Ok(own)) = next() else {
            panic!()
        };
        assert_ne!(own.segment, record.segment);
        new.read(JobId(5), record);
        assert!(matches!(next(), Input::SpillRead(JobId(5), Ok(data)) if data == **payload));
        new.read(JobId(6), own);
        assert!(matches!(next(), Input::SpillRead(JobId(6), Ok(data)) if data == [9; 10]));
        new.free(record);
        new.read(JobId(7), record);
        assert!(matches!(next(), Input::SpillRead(JobId(7), Err(_))));
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_named() {
        let (post, _mailbox) = mailbox().unwrap();
        let error = Spill::start(Path::new("/nonexistent/spill"), &post).unwrap_err();
        assert!(error.contains("/nonexistent/spill"), "{error}");
    }
}
