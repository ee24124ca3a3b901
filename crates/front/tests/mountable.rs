//! The mountable device under real file systems and tools. Needs root, FUSE and loop devices.

mod support;

use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockstep_core::event::RequestError;
use lockstep_front::device::{
    DeviceError, DeviceSpec, Discards, MountedDevice, Opening, clean_leftovers,
};
use lockstep_front::ram::{Hold, RamVolume, Runs};
use lockstep_front::{BlockAccess, BlockNumber, Usage};
use support::{can_use_devices, have_programs, run};

const MIB: u64 = 1 << 20;

/// One test at a time: a process that another test starts has, until it becomes its program, all
/// our descriptors open, so devices would seem to be in use.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The right to use devices, if the machine can do it at all.
fn can_mount() -> Option<MutexGuard<'static, ()>> {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    can_use_devices().then_some(guard)
}

fn spec(volume: &RamVolume, owner: &str, links: &[&Path]) -> DeviceSpec {
    DeviceSpec {
        owner: owner.into(),
        name: "r0/0".into(),
        properties: volume.properties(),
        links: links.iter().map(|link| link.to_path_buf()).collect(),
        readers: 1,
        access: BlockAccess::ReadWrite,
        opening: Opening::Never,
        discards: Discards::AsVolume,
    }
}

/// An owner that no other test or run has.
fn owner(test: &str) -> String {
    format!("{}-{test}", std::process::id())
}

fn create(volume: &RamVolume, test: &str) -> MountedDevice {
    let spec = spec(volume, &owner(test), &[]);
    MountedDevice::create(&spec, &mut |sink| volume.port(sink)).unwrap()
}

/// Whether it comes true within a time that is much longer than needed.
fn becomes(condition: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

fn detach(device: MountedDevice) {
    device.detach().map_err(|(_, error)| error).unwrap();
}

/// Runs a shell script in a mount namespace of its own.
fn script(text: &str, args: &[&str]) -> String {
    let mut all = vec!["-m", "--propagation", "private", "sh", "-euc", text, "sh"];
    all.extend_from_slice(args);
    run("unshare", &all)
}

#[test]
fn ext4_lives_on_the_device_and_every_kind_of_request_passes() {
    let Some(_guard) = can_mount() else { return };
    if !have_programs(&["mkfs.ext4", "e2fsck", "fstrim", "unshare", "blkdiscard"]) {
        return;
    }
    for runs in [Runs::Inline, Runs::OwnThread] {
        let volume = RamVolume::new(128 * MIB, runs).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("drbd7");
        let spec = spec(&volume, &owner("ext4"), &[&link]);
        let device = MountedDevice::create(&spec, &mut |sink| volume.port(sink)).unwrap();
        assert_eq!(std::fs::canonicalize(&link).unwrap(), device.path());
        let place = dir.path().join("mnt");
        std::fs::create_dir(&place).unwrap();
        let out = script(
            "mkfs.ext4 -q -F $1; mount $1 $2
             dd if=/dev/urandom of=$2/a bs=64k count=200 2>/dev/null
             cp $2/a $2/b; sync; rm $2/b
             dd if=/dev/zero of=$2/c bs=4k count=50 oflag=dsync 2>/dev/null
             fstrim -v $2; sum1=$(cksum <$2/a)
             umount $2; e2fsck -fn $1 >&2; mount $1 $2
             sum2=$(cksum <$2/a); umount $2
             echo \"$sum1 = $sum2\"",
            &[link.to_str().unwrap(), place.to_str().unwrap()],
        );
        let sums = out.lines().last().unwrap();
        let (before, after) = sums.split_once(" = ").unwrap();
        assert_eq!(before, after, "{out}");
        let counts = volume.counts();
        assert!(
            counts.flushes.load(Ordering::Relaxed) >= 50,
            "each dsync write is flushed"
        );
        assert!(
            counts.zeroes.load(Ordering::Relaxed) > 0,
            "fstrim reaches the volume"
        );
        run("blkdiscard", &["-z", device.path().to_str().unwrap()]);
        let mut bytes = vec![1; MIB as usize];
        volume.peek(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0));
        detach(device);
        assert!(!link.exists());
    }
}

#[test]
fn fio_verifies_random_writes_on_the_device() {
    let Some(_guard) = can_mount() else { return };
    if !have_programs(&["fio"]) {
        return;
    }
    let volume = RamVolume::new(64 * MIB, Runs::OwnThread).unwrap();
    let device = create(&volume, "fio");
    let filename = format!("--filename={}", device.path().display());
    let mut args = vec![
        "--name=check",
        &filename,
        "--ioengine=libaio",
        "--direct=1",
        "--rw=randrw",
        "--bsrange=512-2m",
        "--blockalign=512",
        "--iodepth=32",
        "--size=48m",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--output-format=terse",
    ];
    run("fio", &args);
    args[4] = "--rw=randwrite";
    args[5] = "--bs=4k";
    args.push("--fdatasync=8");
    run("fio", &args);
    detach(device);
}

#[test]
fn unaligned_and_out_of_range_requests_fail_and_large_ones_are_whole() {
    let Some(_guard) = can_mount() else { return };
    let volume = RamVolume::new(16 * MIB, Runs::OwnThread).unwrap();
    let device = create(&volume, "range");
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(device.path())
        .unwrap();
    let data: Vec<u8> = (0..5 * MIB).map(|at| (at / 311) as u8).collect();
    file.write_all_at(&data, 12345).unwrap();
    file.sync_all().unwrap();
    let mut bytes = vec![0; data.len()];
    volume.peek(12345, &mut bytes);
    assert!(
        bytes == data,
        "the kernel's page cache makes whole blocks of anything"
    );
    assert!(
        file.write_at(&[1; 512], 16 * MIB).is_err(),
        "beyond the end"
    );
    assert_eq!(file.read_at(&mut [0; 512], 16 * MIB).unwrap(), 0);
    drop(file);
    let direct = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(device.path())
        .unwrap();
    let mut buf = lockstep_io::pool::IoBuf::standalone(4096).unwrap();
    assert!(
        direct.read_at(&mut buf[..100], 0).is_err(),
        "less than a block"
    );
    drop(direct);
    detach(device);
}

#[test]
fn errors_of_the_volume_reach_the_application() {
    let Some(_guard) = can_mount() else { return };
    let volume = RamVolume::new(4 * MIB, Runs::OwnThread).unwrap();
    let device = create(&volume, "error");
    let mut options = std::fs::File::options();
    let file = options.read(true).write(true).open(device.path()).unwrap();
    volume.fail_requests(Some(RequestError::Io));
    file.write_all_at(&[1; 4096], 0).unwrap();
    let error = file.sync_all().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    volume.fail_requests(None);
    file.write_all_at(&[2; 4096], 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    volume.remove();
    let file = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(device.path())
        .unwrap();
    let mut buf = lockstep_io::pool::IoBuf::standalone(512).unwrap();
    assert!(
        file.read_at(&mut buf[..512], 0).is_err(),
        "a removed volume answers with errors"
    );
    drop(file);
    detach(device);
}

#[test]
fn a_device_in_use_is_not_taken_away_and_its_users_are_named() {
    let Some(_guard) = can_mount() else { return };
    if !have_programs(&["mkfs.ext4", "unshare"]) {
        return;
    }
    let volume = RamVolume::new(32 * MIB, Runs::OwnThread).unwrap();
    let device = create(&volume, "use");
    assert!(becomes(|| !device.is_in_use()));
    run("mkfs.ext4", &["-q", "-F", device.path().to_str().unwrap()]);

    // A plain opener.
    let file = std::fs::File::open(device.path()).unwrap();
    assert!(!device.is_claimed());
    assert!(device.is_in_use());
    let (device, error) = device.detach().err().unwrap();
    let text = error.to_string();
    assert!(
        text.contains(&format!("process {}", std::process::id())),
        "{text}"
    );
    assert!(matches!(error, DeviceError::InUse { .. }));
    drop(file);
    assert!(becomes(|| !device.is_in_use()));

    // A mount, even in a namespace of its own.
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new("unshare")
        .args([
            "-m",
            "--propagation",
            "private",
            "sh",
            "-ec",
            "mount $1 $2; echo up; read x",
            "sh",
        ])
        .args([&device.path(), dir.path()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
    assert!(device.is_claimed());
    let (device, error) = device.detach().err().unwrap();
    let text = error.to_string();
    assert!(
        text.contains(&format!("mount on {}", dir.path().display())),
        "{text}"
    );
    child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    detach(*device);
}

#[test]
fn a_file_system_that_outlives_its_last_mount_for_a_moment_is_waited_for() {
    let Some(_guard) = can_mount() else { return };
    if !have_programs(&["mkfs.ext4", "unshare"]) {
        return;
    }
    let volume = RamVolume::new(32 * MIB, Runs::OwnThread).unwrap();
    let device = create(&volume, "outlives");
    run("mkfs.ext4", &["-q", "-F", device.path().to_str().unwrap()]);
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new("unshare")
        .args(["-m", "--propagation", "private", "sh", "-ec"])
        .args(["mount $1 $2; echo up; read x", "sh"])
        .args([&device.path(), dir.path()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
    // The namespace without a process.
    let namespace = std::fs::File::open(format!("/proc/{}/ns/mnt", child.id())).unwrap();
    child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    assert!(device.is_claimed());
    let (device, error) = device.detach().err().unwrap();
    assert!(error.to_string().contains("no process's mounts"), "{error}");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            drop(namespace);
        });
        detach(*device);
    });
}

#[test]
fn who_has_a_device_open_may_claim_it_while_others_ask_how_it_is_used() {
    let Some(_guard) = can_mount() else { return };
    let volume = RamVolume::new(4 * MIB, Runs::OwnThread).unwrap();
    let device = create(&volume, "asked");
    let number = BlockNumber::from(device.state().number);
    let file = std::fs::File::open(device.path()).unwrap();
    let stop = AtomicBool::new(false);
    let (asked, claimed) = std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(number.settled_usage().unwrap(), Usage::Open);
            }
        });
        let claim = |_| {
            let mut options = std::fs::File::options();
            options.read(true).custom_flags(libc::O_EXCL);
            options.open(device.path()).map(drop)
        };
        let claimed: Result<(), _> = (0..1000).try_for_each(claim);
        stop.store(true, Ordering::Relaxed);
        (asked.join(), claimed)
    });
    asked.unwrap();
    claimed.unwrap();
    drop(file);
    detach(device);
}

#[test]
fn a_secondary_device_takes_no_writes_and_a_later_one_is_writable_again() {
    let Some(_guard) = can_mount() else { return };
    let volume = RamVolume::new(4 * MIB, Runs::OwnThread).unwrap();
    let device = create(&volume, "ro");
    device.set_access(BlockAccess::ReadOnly).unwrap();
    let refused = std::fs::File::options().write(true).open(device.path());
    let refused = refused.and_then(|file| file.write_all_at(&[1; 512], 0));
    assert!(refused.is_err());
    let number = device.path().file_name().unwrap().to_owned();
    detach(device);
    // Whoever gets the number next, perhaps another program, may write.
    let flag = Path::new("/sys/block").join(number).join("ro");
    assert_eq!(std::fs::read_to_string(flag).unwrap(), "0\n");
    let device = create(&volume, "ro");
    let file = std::fs::File::options()
        .write(true)
        .open(device.path())
        .unwrap();
    file.write_all_at(&[1; 512], 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    detach(device);
}

#[test]
fn the_device_follows_the_volumes_size() {
    let Some(_guard) = can_mount() else { return };
    if !have_programs(&["blockdev"]) {
        return;
    }
    let volume = RamVolume::new(8 * MIB, Runs::OwnThread).unwrap();
    volume.change(|properties| properties.size_bytes = 4 * MIB);
    let device = create(&volume, "size");
    let size = || {
        run(
            "blockdev",
            &["--getsize64", device.path().to_str().unwrap()],
        )
    };
    assert_eq!(size().trim(), "4194304");
    volume.change(|properties| properties.size_bytes = 8 * MIB);
    device.resize(8 * MIB).unwrap();
    assert_eq!(size().trim(), "8388608");
    detach(device);
}

/// Requests that complete while the kernel asks for the new size make it forget the answer for the file, though
/// not for the loop device, and a read of the new part would end with an error.
#[test]
fn a_device_that_grows_under_load_can_be_read_up_to_its_end() {
    let Some(_guard) = can_mount() else { return };
    const STEPS: u64 = 200;
    const START: u64 = 4 * MIB;
    let volume = RamVolume::new(START + STEPS * 4096, Runs::OwnThread).unwrap();
    volume.change(|properties| properties.size_bytes = START);
    let device = create(&volume, "grow");
    let open = || {
        std::fs::File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_DIRECT)
            .open(device.path())
            .unwrap()
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let file = open();
            let stop = &stop;
            scope.spawn(move || {
                let buf = lockstep_io::pool::IoBuf::standalone(4096).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    file.write_all_at(&buf[..4096], worker * 4096).unwrap();
                }
            });
        }
        let file = open();
        let mut buf = lockstep_io::pool::IoBuf::standalone(4096).unwrap();
        let failed = (1..=STEPS).find_map(|step| {
            let size = START + step * 4096;
            volume.change(|properties| properties.size_bytes = size);
            device.resize(size).unwrap();
            let read = file.read_at(&mut buf[..4096], size - 4096);
            (!matches!(read, Ok(4096))).then_some((step, read))
        });
        stop.store(true, Ordering::Relaxed);
        assert!(failed.is_none(), "{failed:?}");
    });
    detach(device);
}

#[test]
fn abandoning_a_device_in_use_gives_errors_and_no_hanging_process() {
    let Some(_guard) = can_mount() else { return };
    let volume = RamVolume::new(4 * MIB, Runs::OwnThread).unwrap();
    let device = create(&volume, "abandon");
    let path = device.path();
    let file = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .unwrap();
    // A read that the volume never answers hangs in the kernel until the device is given up.
    volume.hold(Hold::Stopped);
    let reader = std::thread::spawn(move || {
        let mut buf = lockstep_io::pool::IoBuf::standalone(4096).unwrap();
        file.read_at(&mut buf[..4096], 0)
    });
    wait_for_a_read_in_flight(&path);
    device.abandon();
    assert!(reader.join().unwrap().is_err());
    volume.hold(Hold::Running);
    assert!(clean_leftovers(&owner("abandon"), &[]).unwrap().is_empty());
}

#[test]
fn a_device_is_made_while_its_volume_answers_nothing() {
    let Some(_guard) = can_mount() else { return };
    let volume = RamVolume::new(4 * MIB, Runs::OwnThread).unwrap();
    volume.hold(Hold::Stopped);
    let held = volume.clone();
    let (made, wait) = std::sync::mpsc::sync_channel(1);
    let maker = std::thread::spawn(move || {
        let device = create(&held, "held");
        // Nobody waits any more if it came late.
        let _ = made.send(());
        device
    });
    let in_time = wait.recv_timeout(Duration::from_secs(10));
    // A maker that hangs can go on, so that nothing is left.
    volume.hold(Hold::Running);
    let device = maker.join().unwrap();
    detach(device);
    assert_eq!(in_time, Ok(()), "the kernel waits for the volume");
}

/// Returns when the kernel waits for a read of the loop device.
fn wait_for_a_read_in_flight(device: &Path) {
    let name = device.file_name().unwrap().to_str().unwrap();
    let inflight = format!("/sys/block/{name}/inflight");
    while std::fs::read_to_string(&inflight)
        .unwrap()
        .split_whitespace()
        .next()
        == Some("0")
    {
        std::thread::yield_now();
    }
}

#[test]
fn a_bad_link_undoes_everything() {
    let Some(_guard) = can_mount() else { return };
    let volume = RamVolume::new(4 * MIB, Runs::OwnThread).unwrap();
    let spec = spec(&volume, &owner("link"), &[Path::new("/proc/version")]);
    let error = MountedDevice::create(&spec, &mut |sink| volume.port(sink))
        .err()
        .unwrap();
    assert!(matches!(error, DeviceError::Link { .. }), "{error}");
    assert!(clean_leftovers(&owner("link"), &[]).unwrap().is_empty());
}

#[test]
fn cleaning_up_does_not_open_devices_of_others() {
    use rustix::fs::inotify;
    let Some(_guard) = can_mount() else { return };
    if !have_programs(&["losetup"]) {
        return;
    }
    struct Foreign(String);
    impl Drop for Foreign {
        fn drop(&mut self) {
            run("losetup", &["--detach", &self.0]);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    std::fs::write(&file, vec![0; MIB as usize]).unwrap();
    let out = run(
        "losetup",
        &["--find", "--show", "--read-only", file.to_str().unwrap()],
    );
    let foreign = Foreign(out.trim().to_owned());
    // Anybody may look at a new device, so one attempt without an open is enough: if cleaning up
    // opened the device, there would be none.
    assert!(becomes(|| {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let watch = inotify::init(flags).unwrap();
        inotify::add_watch(&watch, &foreign.0, inotify::WatchFlags::OPEN).unwrap();
        assert!(clean_leftovers(&owner("others"), &[]).unwrap().is_empty());
        let opened = rustix::io::read(&watch, &mut [0u8; 256][..]);
        opened == Err(rustix::io::Errno::AGAIN)
    }));
}

#[test]
fn a_limit_on_discards_that_somebody_left_on_the_loop_device_is_lifted() {
    let Some(_guard) = can_mount() else { return };
    let volume = RamVolume::new(4 * MIB, Runs::OwnThread).unwrap();
    let device = create(&volume, "limit");
    let name = device
        .path()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_string();
    let limit = |name: &str| format!("/sys/block/{name}/queue/discard_max_bytes");
    std::fs::write(limit(&name), "0").unwrap();
    detach(device);
    let device = create(&volume, "limit");
    let name = device
        .path()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_string();
    assert_ne!(std::fs::read_to_string(limit(&name)).unwrap().trim(), "0");
    detach(device);
}

#[test]
fn the_kernel_is_told_the_configured_granularity_of_discards_or_that_there_are_none() {
    let Some(_guard) = can_mount() else { return };
    let volume = RamVolume::new(4 * MIB, Runs::OwnThread).unwrap();
    for (discards, expected) in [
        (Discards::AsVolume, "4096"),
        (Discards::Every(12288), "12288"),
        (Discards::Every(1 << 20), "1048576"),
        (Discards::Never, "0"),
    ] {
        let mut spec = spec(&volume, &owner("granularity"), &[]);
        spec.discards = discards;
        let device = MountedDevice::create(&spec, &mut |sink| volume.port(sink)).unwrap();
        let path = device.path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let limit = |what: &str| {
            let file = format!("/sys/block/{name}/queue/discard_{what}");
            std::fs::read_to_string(file).unwrap().trim().to_owned()
        };
        assert_eq!(limit("granularity"), expected, "{discards:?}");
        let none = limit("max_bytes") == "0";
        assert_eq!(none, discards == Discards::Never, "{discards:?}");
        detach(device);
    }
}
