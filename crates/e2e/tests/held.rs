//! Devices that outlive their daemon: I/O waits over SIGKILL and restart, and fails if another node
//! has been Primary meanwhile.

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use lockstep_e2e::hold::Record;
use lockstep_e2e::{Cluster, PATIENCE, Setup, can_mount, has_program, machine_has, run};

/// How long a device waits for its daemon in these tests.
const HOLD: &str = "60";

fn setup(test: u8) -> Setup {
    Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 96,
        net: "protocol C; connect-int 1; ping-int 1;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: vec!["--hold".into(), HOLD.into()],
        test,
    }
}

/// The kernel can repeat requests.
fn can_hold() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map(str::parse::<u32>);
    let version = (numbers.next(), numbers.next());
    let new = matches!(version, (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= (6, 9));
    machine_has("a kernel from 6.9 on", new) && can_mount()
}

/// Appends numbered lines, each durable, and remembers the longest wait.
struct Prober {
    stop: Arc<AtomicBool>,
    durable: Arc<AtomicU64>,
    /// The longest wait since this was last set to 0, in microseconds.
    longest_us: Arc<AtomicU64>,
    thread: JoinHandle<Result<()>>,
}

impl Prober {
    fn start(path: &Path) -> Result<Prober> {
        let mut file = fs::File::create(path)?;
        let stop = Arc::new(AtomicBool::new(false));
        let durable = Arc::new(AtomicU64::new(0));
        let longest_us = Arc::new(AtomicU64::new(0));
        let (until, count) = (stop.clone(), durable.clone());
        let recent = longest_us.clone();
        let thread = std::thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                let begin = Instant::now();
                writeln!(file, "{}", count.load(Ordering::Relaxed) + 1)?;
                file.sync_all()?;
                count.fetch_add(1, Ordering::Relaxed);
                recent.fetch_max(begin.elapsed().as_micros() as u64, Ordering::Relaxed);
            }
            Ok(())
        });
        Ok(Prober {
            stop,
            durable,
            longest_us,
            thread,
        })
    }

    /// Waits until some more lines are durable.
    fn wait_for_progress(&self) -> Result<()> {
        let enough = self.durable.load(Ordering::Relaxed) + 20;
        let begin = Instant::now();
        while self.durable.load(Ordering::Relaxed) < enough {
            ensure!(begin.elapsed() < PATIENCE, "no fsync returns");
            ensure!(!self.thread.is_finished(), "an fsync failed");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Lines that are durable.
    fn end(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("a panic"))??;
        Ok(self.durable.load(Ordering::Relaxed))
    }
}

/// How often the Primary's daemon is killed in one test.
const KILLS: usize = 20;

/// Kills that do not wait until the daemon before has brought the I/O back.
const QUICK_KILLS: u64 = 10;
/// The longest time between two of them, from the end of `drbdadm up` on.
const QUICK_MS: u64 = 1200;

#[test]
fn twenty_kills_of_the_daemon_lose_no_write_and_fail_none() -> Result<()> {
    under_load(41, |cluster, prober| {
        let mut stalls = Vec::new();
        for _ in 0..KILLS {
            prober.wait_for_progress()?;
            prober.longest_us.store(0, Ordering::Relaxed);
            kill_and_start(cluster)?;
            prober.wait_for_progress()?;
            stalls.push(Duration::from_micros(
                prober.longest_us.load(Ordering::Relaxed),
            ));
            ensure!(cluster.status(0)?["role"] == "Primary", "not Primary again");
        }
        stalls.sort();
        eprintln!("waits over {KILLS} kills: {stalls:?}");
        Ok(())
    })
}

#[test]
fn kills_in_quick_succession_lose_no_write_and_fail_none() -> Result<()> {
    under_load(45, |cluster, prober| {
        prober.wait_for_progress()?;
        for kill in 0..QUICK_KILLS {
            // In any step of the recovery; some after it.
            std::thread::sleep(Duration::from_millis(kill * 7919 % QUICK_MS));
            kill_and_start(cluster)?;
        }
        prober.wait_for_progress()
    })
}

fn kill_and_start(cluster: &mut Cluster) -> Result<()> {
    cluster.kill(0)?;
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"]).map(drop)
}

/// A file system with two loads on the Primary's device, and what is done to it.
fn under_load(test: u8, story: impl FnOnce(&mut Cluster, &Prober) -> Result<()>) -> Result<()> {
    if !can_hold() || !has_program("mkfs.ext4") || !has_program("fio") {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(test))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, test, 0)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&device))?;
    let mount = cluster.mount(&device)?;
    let prober = Prober::start(&mount.join("lines"))?;
    let stop = cluster.dir().join("stop");
    // Rounds of random writes with fsyncs, each block read back and verified.
    let fio = format!(
        "while :; do fio --name=load --directory={} --rw=randwrite --bs=4k --size=8m --fsync=8 \
         --direct=1 --ioengine=libaio --iodepth=8 --overwrite=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
         --verify_state_save=0 --randrepeat=0 || exit 1; [ -e {} ] && exit 0; done",
        mount.display(),
        stop.display()
    );
    let mut load = Command::new("sh")
        .args(["-c", &fio])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context("sh and fio")?;
    if let Err(error) = story(&mut cluster, &prober) {
        return Err(error.context(cluster.log(0)?));
    }
    fs::write(&stop, "")?;
    ensure!(load.wait()?.success(), "fio found a fault");
    let durable = prober.end()?;
    eprintln!("{durable} lines durable");
    let lines = fs::read_to_string(mount.join("lines"))?;
    let expected: Vec<String> = (1..=durable).map(|n| n.to_string()).collect();
    ensure!(
        lines.lines().eq(expected),
        "the lines are not what was written"
    );
    ensure!(
        cluster.device(0, test, 0)? == device,
        "the device is another one"
    );
    cluster.wait_in_sync()?;
    cluster.unmount(&mount)?;
    run(Command::new("fsck.ext4").args(["-f", "-n"]).arg(&device))?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 92)
}

#[test]
fn a_device_whose_volume_was_written_elsewhere_fails() -> Result<()> {
    if !can_hold() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(42))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 42, 0)?;
    let file = fs::File::options().write(true).open(&device)?;
    file.write_all_at(&[1; 4096], 0)?;
    file.sync_all()?;
    cluster.kill(0)?;
    // This write waits for the daemon.
    let waiting = std::thread::spawn(move || -> std::io::Result<()> {
        file.write_all_at(&[2; 4096], 0)?;
        file.sync_all()
    });
    // Meanwhile the other node takes over, writes, and steps back.
    cluster.adm(1, &["primary", "r0"])?;
    let other = cluster.device(1, 42, 0)?;
    let file = fs::File::options().write(true).open(&other)?;
    file.write_all_at(&[3; 4096], 0)?;
    file.sync_all()?;
    drop(file);
    cluster.adm(1, &["secondary", "r0"])?;
    ensure!(!waiting.is_finished(), "the write did not wait");
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"])?;
    let begin = Instant::now();
    while !waiting.is_finished() {
        ensure!(begin.elapsed() < PATIENCE, "the write waits for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
    let written = waiting.join().map_err(|_| anyhow!("a panic"))?;
    ensure!(written.is_err(), "a write went on over another node's data");
    cluster.wait_in_sync()?;
    ensure!(cluster.status(0)?["role"] == "Secondary", "promoted");
    cluster.check_same_data(0, 92)?;
    let image = fs::read(cluster.image(0, 0))?;
    ensure!(image[..4096] == [3; 4096], "the other node's write is lost");
    Ok(())
}

#[test]
fn the_only_node_waits_for_its_peer_or_its_operator() -> Result<()> {
    if !can_hold() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(43))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 43, 0)?;
    cluster.kill(1)?;
    let file = fs::File::options().write(true).open(&device)?;
    file.write_all_at(&[1; 4096], 0)?;
    file.sync_all()?;
    let connected = |c: &Cluster| c.connection_is(0, 1, "Connected");
    cluster.wait("the loss is noticed", |c| Ok(!connected(c)?))?;
    file.write_all_at(&[2; 4096], 4096)?;
    file.sync_all()?;
    cluster.kill(0)?;
    let waiting = std::thread::spawn(move || -> std::io::Result<()> {
        file.write_all_at(&[3; 4096], 8192)?;
        file.sync_all()
    });
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"])?;
    ensure!(
        cluster.status(0)?["role"] == "Secondary",
        "the peer may be Primary"
    );
    ensure!(!waiting.is_finished(), "the write did not wait");
    cluster.adm(0, &["primary", "r0"])?;
    waiting.join().map_err(|_| anyhow!("a panic"))??;
    let image = fs::read(cluster.image(0, 0))?;
    for (block, byte) in [1, 2, 3].into_iter().enumerate() {
        ensure!(
            image[block * 4096..][..4096] == [byte; 4096],
            "block {block}"
        );
    }
    Ok(())
}

#[test]
fn a_generation_that_the_holder_has_not_heard_of_keeps_the_device() -> Result<()> {
    if !can_hold() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(44))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 44, 0)?;
    let file = fs::File::options().write(true).open(&device)?;
    file.write_all_at(&[1; 4096], 0)?;
    file.sync_all()?;
    let record = |c: &Cluster| Record::read(c.node_dir(0), "r0/0");
    cluster.wait("the holder knows the device", |c| Ok(record(c).is_ok()))?;
    let old = record(&cluster)?;
    // Without the peer the next write is one of a new generation.
    cluster.kill(1)?;
    let connected = |c: &Cluster| c.connection_is(0, 1, "Connected");
    cluster.wait("the loss is noticed", |c| Ok(!connected(c)?))?;
    file.write_all_at(&[2; 4096], 4096)?;
    file.sync_all()?;
    cluster.wait("the new generation is known", |c| {
        Ok(record(c)?.generation()? != old.generation()?)
    })?;
    cluster.kill(0)?;
    // As if the daemon had been killed before it told.
    old.put_back(cluster.node_dir(0))?;
    let waiting = std::thread::spawn(move || -> std::io::Result<fs::File> {
        file.write_all_at(&[3; 4096], 8192)?;
        file.sync_all()?;
        Ok(file)
    });
    for node in [0, 1] {
        cluster.start(node)?;
        cluster.adm(node, &["up", "r0"])?;
    }
    let begin = Instant::now();
    while !waiting.is_finished() {
        ensure!(begin.elapsed() < PATIENCE, "the write waits for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
    let file = waiting.join().map_err(|_| anyhow!("a panic"))??;
    // What the daemon of before has made counts for the next one, too: killed again at once, it has
    // told the holder nothing but what it found.
    cluster.kill(0)?;
    old.put_back(cluster.node_dir(0))?;
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"])?;
    file.write_all_at(&[4; 4096], 12288)?;
    file.sync_all()?;
    drop(file);
    cluster.wait_in_sync()?;
    let image = fs::read(cluster.image(0, 0))?;
    for (block, byte) in [1, 2, 3, 4].into_iter().enumerate() {
        ensure!(
            image[block * 4096..][..4096] == [byte; 4096],
            "block {block}"
        );
    }
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 92)
}

#[test]
fn an_upgrade_under_load_fails_nothing() -> Result<()> {
    under_load(146, |cluster, prober| {
        for _ in 0..3 {
            prober.wait_for_progress()?;
            // SIGTERM, as a package's new version asks for; the daemon has to end in order.
            cluster.stop(0)?;
            cluster.start(0)?;
            cluster.adm(0, &["up", "r0"])?;
            prober.wait_for_progress()?;
            ensure!(cluster.status(0)?["role"] == "Primary", "not Primary again");
        }
        // One that ends before the devices of the one before are served again.
        cluster.stop(0)?;
        cluster.start(0)?;
        cluster.stop(0)?;
        cluster.start(0)?;
        cluster.adm(0, &["up", "r0"])?;
        prober.wait_for_progress()
    })
}

#[test]
fn an_orderly_end_leaves_no_device_that_nobody_uses() -> Result<()> {
    if !can_hold() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(147))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 147, 0)?;
    let file = fs::File::options().write(true).open(&device)?;
    file.write_all_at(&[1; 4096], 0)?;
    drop(file);
    let link = fs::read_link(cluster.node_dir(0).join("dev/drbd14700"))?;
    ensure!(link == device, "{link:?}");
    cluster.stop(0)?;
    for left in ["dev/drbd14700", "dev/drbd/by-res/r0/0"] {
        let path = cluster.node_dir(0).join(left);
        ensure!(fs::symlink_metadata(&path).is_err(), "{left} is left");
    }
    cluster.wait("the holder ends", |c| {
        Ok(UnixStream::connect(c.node_dir(0).join("hold.sock")).is_err())
    })
}

#[test]
fn the_next_daemons_time_to_wait_counts_and_links_of_the_dead_go() -> Result<()> {
    if !can_hold() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(148))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 148, 0)?;
    let file = fs::File::options().write(true).open(&device)?;
    file.write_all_at(&[1; 4096], 0)?;
    file.sync_all()?;
    cluster.wait("the holder knows the device", |c| {
        Ok(Record::read(c.node_dir(0), "r0/0").is_ok())
    })?;
    cluster.kill(0)?;
    // The holder was started with a minute.
    cluster.set_daemon_args(&["--hold", "1"]);
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"])?;
    file.write_all_at(&[2; 4096], 0)?;
    file.sync_all()?;
    cluster.kill(0)?;
    let begin = Instant::now();
    let written = file
        .write_all_at(&[3; 4096], 0)
        .and_then(|()| file.sync_all());
    // Not that there is no room: the device has kept its size.
    let error = written.err().and_then(|error| error.raw_os_error());
    ensure!(
        error == Some(libc::EIO),
        "a write without a daemon: {error:?}"
    );
    ensure!(begin.elapsed() < Duration::from_secs(30), "the old time");
    drop(file);
    let link = cluster.node_dir(0).join("dev/drbd14800");
    ensure!(fs::read_link(&link)? == device, "the dead daemon's link");
    // The number may be somebody else's now: the link goes before the resource is up again.
    cluster.start(0)?;
    ensure!(
        fs::symlink_metadata(&link).is_err(),
        "the link is left: {}",
        cluster.log(0)?
    );
    cluster.adm(0, &["up", "r0"])?;
    cluster.wait_in_sync()
}

#[test]
fn a_name_that_is_taken_is_left_alone() -> Result<()> {
    if !can_hold() {
        return Ok(());
    }
    let cluster = Cluster::new(&setup(149))?;
    cluster.first_primary(0)?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.adm(0, &["down", "r0"])?;
    // Somebody else's file has the name of the device.
    let taken = cluster.node_dir(0).join("dev/drbd14900");
    fs::write(&taken, "mine")?;
    cluster.adm(0, &["up", "r0"])?;
    cluster.adm(0, &["primary", "r0"])?;
    ensure!(fs::read_to_string(&taken)? == "mine", "it was replaced");
    let said = cluster.log(0)?;
    ensure!(said.contains("drbd14900"), "{said}");
    // Once the name is free, the next `up` makes the device.
    cluster.adm(0, &["down", "r0"])?;
    fs::remove_file(&taken)?;
    cluster.adm(0, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.adm(0, &["primary", "r0"])?;
    let device = cluster.device(0, 149, 0)?;
    let file = fs::File::options().write(true).open(&device)?;
    file.write_all_at(&[1; 4096], 0)?;
    Ok(file.sync_all()?)
}
