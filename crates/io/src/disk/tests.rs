//! Claims about disks hold for files, RAM disks and, where the machine allows, block devices, on
//! both rings.

use std::io::Write;
use std::process::Command;

use lockstep_core::event::DiskError;

use lockstep_format::disk::pmem::WordStore;

use super::{
    DataWork, Disk, FaultOn, FaultPlan, MetaWork, OpenError, Outcome, Step, Task, stand_in,
};
use crate::pool::{BufRef, BufferPool, IoBuf};
use crate::ring::{Errno, Ring, RingKind, Wait, open};

const DISK_BYTES: u64 = 8 << 20;

fn run(ring: &mut dyn Ring, mut task: Task) -> Result<Outcome, DiskError> {
    let mut step = task.start();
    loop {
        match step {
            Step::Finished(result) => return result,
            Step::Run(op) => {
                ring.push(1, op);
                let done = loop {
                    if let Some(done) = ring.pop() {
                        break done;
                    }
                    ring.turn(Wait::Forever).unwrap();
                };
                step = task.advance(done.result);
            }
        }
    }
}

fn pool() -> BufferPool {
    BufferPool::new(4 << 20, 0).unwrap()
}

fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|n| (n / 3) as u8 ^ salt).collect()
}

fn buffer(bytes: &[u8], start: usize) -> BufRef {
    let mut buf = IoBuf::standalone(start + bytes.len()).unwrap();
    buf[start..start + bytes.len()].copy_from_slice(bytes);
    buf.share()
}

fn write(offset: u64, bytes: &[u8], start: u32, fua: bool) -> DataWork {
    let buf = buffer(bytes, start as usize);
    DataWork::Write {
        buf,
        start,
        len: bytes.len() as u32,
        offset,
        fua,
    }
}

fn read(ring: &mut dyn Ring, disk: &Disk, offset: u64, len: u32, start: u32) -> Vec<u8> {
    let buf = buffer(&vec![0xA5; len as usize], start as usize);
    let work = DataWork::Read {
        buf: buf.clone(),
        start,
        len,
        offset,
    };
    assert_eq!(run(ring, Task::data(disk, work)), Ok(Outcome::Done));
    buf.with_bytes(start as usize, len as usize, <[u8]>::to_vec)
}

/// What every disk must do.
fn claims(ring: &mut dyn Ring, disk: &Disk) {
    let info = disk.info();
    assert_eq!(info.data_bytes, DISK_BYTES);
    let mut model = vec![0; DISK_BYTES as usize];
    // Aligned and unaligned memory, with and without durability.
    let writes = [
        (0, 4096, 0, false),
        (8192, 65536, 512, true),
        (1 << 20, 1 << 20, 24, true),
    ];
    for (n, (offset, len, start, fua)) in writes.into_iter().enumerate() {
        let bytes = pattern(len, n as u8);
        let task = Task::data(disk, write(offset as u64, &bytes, start, fua));
        assert_eq!(run(ring, task), Ok(Outcome::Done));
        model[offset..offset + len].copy_from_slice(&bytes);
    }
    assert_eq!(
        run(ring, Task::data(disk, DataWork::Flush)),
        Ok(Outcome::Done)
    );
    assert!(read(ring, disk, 0, 1 << 20, 0) == model[..1 << 20]);
    assert!(read(ring, disk, 1 << 20, 1 << 20, 24) == model[1 << 20..2 << 20]);
    for (offset, unmap) in [(4096u64, false), (1 << 20, true)] {
        let work = DataWork::Zeroes {
            offset,
            len: 12288,
            unmap,
        };
        assert_eq!(run(ring, Task::data(disk, work)), Ok(Outcome::Done));
        model[offset as usize..offset as usize + 12288].fill(0);
    }
    let work = DataWork::Discard {
        offset: 16384,
        len: 8192,
    };
    let discarded = run(ring, Task::data(disk, work));
    if info.discard {
        assert_eq!(discarded, Ok(Outcome::Done));
    } else {
        assert_eq!(discarded, Err(DiskError::Unsupported));
    }
    if info.discard_zeroes {
        model[16384..24576].fill(0);
        assert!(read(ring, disk, 0, 65536, 0) == model[..65536]);
    }
    assert!(read(ring, disk, 24576, 1 << 20, 0) == model[24576..24576 + (1 << 20)]);
    // Behind the end nothing happens.
    let behind = Task::data(disk, write(DISK_BYTES - 4096, &pattern(8192, 9), 0, false));
    assert!(matches!(run(ring, behind), Err(DiskError::Io { .. })));
    metadata_claims(ring, disk);
}

fn metadata_claims(ring: &mut dyn Ring, disk: &Disk) {
    let pool = pool();
    // More than one piece, at the device's end.
    let bytes = pattern((1 << 20) + 8192, 0x77);
    let offset = DISK_BYTES - bytes.len() as u64;
    let work = MetaWork::Write {
        offset,
        bytes: bytes.clone(),
        flush_data: true,
    };
    assert_eq!(
        run(ring, Task::meta(disk, work, &pool).unwrap()),
        Ok(Outcome::Done)
    );
    for (skip, len) in [
        (0usize, bytes.len()),
        (1, 1),
        (4095, 2),
        (5000, (1 << 20) + 100),
    ] {
        let work = MetaWork::Read {
            offset: offset + skip as u64,
            len: len as u32,
        };
        let result = run(ring, Task::meta(disk, work, &pool).unwrap());
        assert!(
            result == Ok(Outcome::Bytes(bytes[skip..skip + len].to_vec())),
            "{skip} {len}"
        );
    }
    let work = MetaWork::Read {
        offset: DISK_BYTES - 1,
        len: 2,
    };
    assert!(Task::meta(disk, work, &pool).is_err());
    assert_eq!(pool.free_bytes(), pool.total_bytes());
}

fn on_both_rings(claim: impl Fn(&mut dyn Ring)) {
    for kind in [RingKind::Epoll, RingKind::Uring] {
        match open(Some(kind)) {
            Ok(mut ring) => claim(&mut *ring),
            Err(error) => eprintln!("skipped: {kind:?} ({error})"),
        }
    }
}

fn file() -> (tempfile::NamedTempFile, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(DISK_BYTES).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    (file, path)
}

#[test]
fn a_file_is_a_disk() {
    on_both_rings(|ring| {
        let (_file, path) = file();
        let disk = Disk::open(&path, None).unwrap();
        assert_eq!(disk.info().meta_bytes, DISK_BYTES);
        claims(ring, &disk);
    });
}

#[test]
fn a_file_without_direct_io_is_a_disk_too() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: no /dev/shm");
        return;
    };
    let path = directory.path().join("disk");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(DISK_BYTES)
        .unwrap();
    let path = path.to_str().unwrap();
    on_both_rings(|ring| {
        let disk = Disk::open(path, None).unwrap();
        std::fs::File::options()
            .write(true)
            .open(path)
            .unwrap()
            .write_all(&vec![0; DISK_BYTES as usize])
            .unwrap();
        claims(ring, &disk);
    });
}

#[test]
fn memory_is_a_disk() {
    for kind in [RingKind::Epoll, RingKind::Uring] {
        let Ok(mut ring) = open(Some(kind)) else {
            eprintln!("skipped: {kind:?}");
            continue;
        };
        let disk = Disk::open(&format!("ram:{DISK_BYTES}:{kind:?}"), None).unwrap();
        claims(&mut *ring, &disk);
        drop(disk);
        let again = Disk::open(&format!("ram:{DISK_BYTES}:{kind:?}"), None).unwrap();
        assert_eq!(read(&mut *ring, &again, 0, 4096, 0), pattern(4096, 0));
    }
}

/// A loop device over a file, taken down at the end.
struct Loop {
    path: String,
    _file: tempfile::NamedTempFile,
}

impl Loop {
    fn new() -> Option<Loop> {
        let (file, path) = file();
        let output = Command::new("losetup")
            .args(["--find", "--show", &path])
            .output()
            .ok()?;
        let device = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !device.is_empty()).then_some(Loop {
            path: device,
            _file: file,
        })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.path]).status();
    }
}

#[test]
fn a_block_device_is_a_disk_and_is_taken_exclusively() {
    on_both_rings(|ring| {
        let Some(device) = Loop::new() else {
            eprintln!("skipped: no loop device (needs root)");
            return;
        };
        let disk = Disk::open(&device.path, None).unwrap();
        claims(ring, &disk);
        let error = Disk::open(&device.path, None).unwrap_err();
        assert!(matches!(error, OpenError::Busy { .. }), "{error}");
        drop(disk);
        assert!(Disk::open(&device.path, None).is_ok());
    });
}

#[test]
fn a_file_in_use_is_refused_with_its_holder() {
    let (_file, path) = file();
    let disk = Disk::open(&path, None).unwrap();
    let error = Disk::open(&path, None).unwrap_err().to_string();
    assert!(
        error.contains(&format!("process {}", std::process::id())),
        "{error}"
    );
    drop(disk);
    assert!(Disk::open(&path, None).is_ok());
    let error = Disk::open("/nowhere/disk", None).unwrap_err().to_string();
    assert!(error.starts_with("/nowhere/disk: cannot open"), "{error}");
    assert!(matches!(
        Disk::open("/dev/null", None),
        Err(OpenError::Kind { .. })
    ));
}

/// A killed daemon's ring, or a child that it was starting, keeps the lock for a moment.
#[test]
fn a_file_that_a_dead_process_left_locked_is_waited_for() {
    let (_file, path) = file();
    // The lock is that of `flock`, which has ended when it is told; the shell keeps the file.
    let mut shell = Command::new("sh")
        .args(["-c", "exec 9<$0; flock 9; echo; read line", &path])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut [0]).unwrap();
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| Disk::open(&path, None).map(drop));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!opened.is_finished());
        drop(shell.stdin.take());
        opened.join().unwrap().expect("the lock is free");
    });
    shell.wait().unwrap();
}

#[test]
fn a_block_device_is_waited_for_while_nobody_is_known_to_use_it() {
    let Some(device) = Loop::new() else {
        eprintln!("skipped: no loop device (needs root)");
        return;
    };
    let disk = Disk::open(&device.path, None).unwrap();
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| Disk::open(&device.path, None).map(drop));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!opened.is_finished());
        drop(disk);
        opened.join().unwrap().expect("the device is free");
    });
}

#[test]
fn a_metadata_device_is_shared_by_the_volumes_of_a_process() {
    let ((_a, a), (_b, b), (_meta, meta)) = (file(), file(), file());
    let first = Disk::open(&a, Some(&meta)).unwrap();
    let second = Disk::open(&b, Some(&meta)).unwrap();
    assert!(std::sync::Arc::ptr_eq(first.meta(), second.meta()));
    assert!(matches!(
        Disk::open(&meta, None),
        Err(OpenError::Busy { .. })
    ));
    drop((first, second));
    assert!(Disk::open(&meta, None).is_ok());
}

fn stores(list: &[(u64, &[u8])]) -> Vec<WordStore> {
    let store = |(offset, bytes): &(u64, &[u8])| WordStore {
        offset: *offset,
        bytes: bytes.to_vec(),
    };
    list.iter().map(store).collect()
}

#[test]
fn metadata_on_persistent_memory_are_stored_without_the_ring() {
    on_both_rings(|ring| {
        let ((_data, data), (meta_file, meta)) = (file(), file());
        stand_in(&meta);
        let plan = FaultPlan::of_path(&meta);
        let disk = Disk::open(&data, Some(&meta)).unwrap();
        assert!(disk.info().persistent_memory);
        let pool = pool();
        let (last, first) = (DISK_BYTES - 16, [3; 4096]);
        let work = |flush_data| MetaWork::Store {
            steps: stores(&[(4096, &first), (last, &[5; 16]), (8, &[7; 8])]),
            flush_data,
        };
        let mut task = Task::meta(&disk, work(false), &pool).unwrap();
        assert!(matches!(task.start(), Step::Finished(Ok(Outcome::Done))));
        // What is stored can be read through the file, and what is written is in the memory.
        let mut read = |offset, len| {
            let work = MetaWork::Read { offset, len };
            run(ring, Task::meta(&disk, work, &pool).unwrap())
        };
        assert_eq!(read(4096, 4096), Ok(Outcome::Bytes(first.to_vec())));
        assert_eq!(read(last, 16), Ok(Outcome::Bytes(vec![5; 16])));
        assert_eq!(
            read(0, 17),
            Ok(Outcome::Bytes([&[0; 8][..], &[7; 8], &[0]].concat()))
        );
        let flushing = Task::meta(&disk, work(true), &pool).unwrap();
        assert_eq!(run(ring, flushing), Ok(Outcome::Done));

        let mut fails = |steps, errno| {
            let flush_data = false;
            let work = MetaWork::Store { steps, flush_data };
            let result = run(ring, Task::meta(&disk, work, &pool).unwrap());
            assert_eq!(result, Err(DiskError::Io { errno }));
        };
        fails(stores(&[(DISK_BYTES - 8, &[1; 16])]), libc::ENOSPC);
        fails(stores(&[(4, &[1; 8])]), libc::EINVAL);
        plan.fail(FaultOn::Flush, 0, 1, Errno(libc::EREMOTEIO));
        fails(stores(&[(0, &[1; 8])]), libc::EREMOTEIO);

        // A larger file is mapped again when it is looked at.
        meta_file.as_file().set_len(2 * DISK_BYTES).unwrap();
        assert_eq!(disk.probe().unwrap().meta_bytes, 2 * DISK_BYTES);
        let work = MetaWork::Store {
            steps: stores(&[(DISK_BYTES - 8, &[9; 16])]),
            flush_data: false,
        };
        assert_eq!(
            run(ring, Task::meta(&disk, work, &pool).unwrap()),
            Ok(Outcome::Done)
        );
    });
}

#[test]
fn a_disk_without_persistent_memory_takes_no_stores() {
    let ((_data, data), (_meta, meta)) = (file(), file());
    let disk = Disk::open(&data, Some(&meta)).unwrap();
    assert!(!disk.info().persistent_memory);
    let work = MetaWork::Store {
        steps: stores(&[(0, &[1; 8])]),
        flush_data: false,
    };
    let mut task = Task::meta(&disk, work, &pool()).unwrap();
    assert!(matches!(
        task.start(),
        Step::Finished(Err(DiskError::Unsupported))
    ));
    drop(disk);
    // Internal metadata stay blocks, whatever they lie on.
    stand_in(&data);
    let disk = Disk::open(&data, None).unwrap();
    assert!(!disk.info().persistent_memory);
}

#[test]
fn planned_faults_hit_exactly_what_they_name() {
    on_both_rings(|ring| {
        let (_file, path) = file();
        let plan = FaultPlan::of_path(&path);
        let disk = Disk::open(&path, None).unwrap();
        plan.fail(FaultOn::Write, 1, 1, Errno(libc::EIO));
        plan.fail(FaultOn::Flush, 0, 1, Errno(libc::EREMOTEIO));
        let bytes = pattern(4096, 1);
        let mut go = |work| run(ring, Task::data(&disk, work));
        assert_eq!(go(write(0, &bytes, 0, false)), Ok(Outcome::Done));
        let error = |errno| Err(DiskError::Io { errno });
        assert_eq!(go(write(4096, &bytes, 0, false)), error(libc::EIO));
        assert_eq!(go(write(4096, &bytes, 0, true)), error(libc::EREMOTEIO));
        assert_eq!(go(DataWork::Flush), Ok(Outcome::Done));
        // The failed writes left nothing.
        assert!(
            read(ring, &disk, 4096, 4096, 0)
                .iter()
                .all(|byte| *byte == 0)
        );
    });
}

#[test]
fn slow_reads_take_turns_until_the_limit_is_taken_away() {
    on_both_rings(|ring| {
        let (_file, path) = file();
        let plan = FaultPlan::of_path(&path);
        let disk = Disk::open(&path, None).unwrap();
        let bytes = pattern(4096, 3);
        let done = run(ring, Task::data(&disk, write(0, &bytes, 0, false)));
        assert_eq!(done, Ok(Outcome::Done));
        let begin = std::time::Instant::now();
        plan.slow_reads(std::num::NonZeroU32::new(100));
        for _ in 0..3 {
            assert_eq!(read(ring, &disk, 0, 4096, 0), bytes);
        }
        assert!(begin.elapsed() >= std::time::Duration::from_millis(30));
        // From now on a read takes no turn.
        plan.slow_reads(None);
        let buf = IoBuf::standalone(4096).unwrap().share();
        let work = DataWork::Read {
            buf,
            start: 0,
            len: 4096,
            offset: 0,
        };
        let Step::Run(op) = Task::data(&disk, work).start() else {
            panic!("nothing to do");
        };
        assert!(matches!(op, crate::ring::Op::Read { .. }), "{op:?}");
    });
}

#[test]
fn a_short_transfer_goes_on_and_a_missing_flag_is_replaced_by_a_flush() {
    let (_file, path) = file();
    let disk = Disk::open(&path, None).unwrap();
    let mut task = Task::data(&disk, write(0, &pattern(12288, 0), 0, true));
    let Step::Run(crate::ring::Op::Write { durable: true, .. }) = task.start() else {
        panic!()
    };
    // The kernel does not know the flag: the same write without it …
    let Step::Run(op) = task.advance(Err(Errno(libc::EOPNOTSUPP))) else {
        panic!()
    };
    assert!(matches!(
        op,
        crate::ring::Op::Write {
            durable: false,
            start: 0,
            len: 12288,
            ..
        }
    ));
    // … in two parts …
    let Step::Run(op) = task.advance(Ok(4096)) else {
        panic!()
    };
    let crate::ring::Op::Write {
        start: 4096,
        len: 8192,
        offset: 4096,
        ..
    } = op
    else {
        panic!()
    };
    // … and a flush, whose failure is the end.
    assert!(matches!(
        task.advance(Ok(8192)),
        Step::Run(crate::ring::Op::Sync { .. })
    ));
    let Step::Finished(result) = task.advance(Err(Errno(libc::EIO))) else {
        panic!()
    };
    assert_eq!(result, Err(DiskError::Io { errno: libc::EIO }));
    // Later durable writes know it already.
    let mut task = Task::data(&disk, write(0, &pattern(4096, 0), 0, true));
    assert!(matches!(
        task.start(),
        Step::Run(crate::ring::Op::Write { durable: false, .. })
    ));
    // The end of the file where there should be more is an error, not an endless loop.
    let Step::Finished(result) = task.advance(Ok(0)) else {
        panic!()
    };
    assert_eq!(result, Err(DiskError::Io { errno: libc::EIO }));
}

#[test]
fn zeroes_are_written_where_the_device_has_no_command() {
    on_both_rings(|ring| {
        let (_file, path) = file();
        let disk = Disk::open(&path, None).unwrap();
        let bytes = pattern(3 << 20, 1);
        for offset in 0..3u64 {
            let piece = &bytes[(offset as usize) << 20..][..1 << 20];
            let task = Task::data(&disk, write(offset << 20, piece, 0, false));
            assert_eq!(run(ring, task), Ok(Outcome::Done));
        }
        let (offset, len) = (4096, (2 << 20) + 4096);
        let work = DataWork::Zeroes {
            offset,
            len,
            unmap: true,
        };
        let mut task = Task::data(&disk, work);
        let mut step = task.start();
        // Refuse both commands, then let the writes pass.
        for _ in 0..2 {
            assert!(matches!(step, Step::Run(crate::ring::Op::Fallocate { .. })));
            step = task.advance(Err(Errno(libc::EOPNOTSUPP)));
        }
        let mut writes = 0;
        loop {
            match step {
                Step::Finished(result) => break assert_eq!(result, Ok(Outcome::Done)),
                Step::Run(op) => {
                    assert!(matches!(op, crate::ring::Op::Write { .. }));
                    ring.push(1, op);
                    writes += 1;
                    let done = loop {
                        if let Some(done) = ring.pop() {
                            break done;
                        }
                        ring.turn(Wait::Forever).unwrap();
                    };
                    step = task.advance(done.result);
                }
            }
        }
        assert_eq!(writes, 3);
        assert!(read(ring, &disk, 0, 4096, 0) == bytes[..4096]);
        assert!(
            read(ring, &disk, 4096, 1 << 20, 0)
                .iter()
                .all(|byte| *byte == 0)
        );
        let behind = (2 << 20) + 8192;
        assert!(read(ring, &disk, behind as u64, 4096, 0) == bytes[behind..behind + 4096]);
    });
}
