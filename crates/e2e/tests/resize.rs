//! A volume grows while a filesystem on it is in use, and its metadata follow the disk.

use std::fs;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount, has_program};

const TEST: u8 = 71;
const MIB: u64 = 1 << 20;

fn size_of(device: &std::path::Path) -> Result<u64> {
    Ok(fs::File::open(device)?.seek(SeekFrom::End(0))?)
}

fn grow(cluster: &Cluster, bytes: u64) -> Result<()> {
    for node in 0..2 {
        let image = fs::File::options()
            .write(true)
            .open(cluster.image(node, 0))?;
        image.set_len(bytes)?;
    }
    Ok(())
}

/// Writes and reads on a mounted filesystem until it is told to stop, or a thousand times, so that
/// what it writes stays far below what a full sync would copy; says how often.
fn work(point: &std::path::Path, stop: &AtomicBool) -> Result<u64> {
    let file = fs::File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(point.join("busy"))?;
    let mut rounds = 0u64;
    while rounds < 1000 && (!stop.load(Ordering::Relaxed) || rounds == 0) {
        let at = rounds % 64 * 4096;
        let block = [rounds as u8; 4096];
        file.write_all_at(&block, at)?;
        file.sync_data()?;
        let mut seen = [0; 4096];
        file.read_exact_at(&mut seen, at)?;
        ensure!(seen == block, "round {rounds}");
        rounds += 1;
    }
    Ok(rounds)
}

#[test]
fn a_mounted_volume_grows_with_its_disks() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") || !has_program("resize2fs") {
        return Ok(());
    }
    let mut cluster = Cluster::new(&Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 64,
        net: "protocol C;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test: TEST,
    })?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, TEST, 0)?;
    let before = size_of(&device)?;
    let made = Command::new("mkfs.ext4").arg("-q").arg(&device).status()?;
    ensure!(made.success(), "mkfs.ext4");
    let point = cluster.mount(&device)?;
    let received = cluster.received_kib(1, 0, 0)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let worker = scope.spawn(|| work(&point, &stop));
        let grown = (|| -> Result<()> {
            grow(&cluster, 96 * MIB)?;
            cluster.adm(0, &["resize", "r0"])?;
            cluster.wait("the device grows", |_| {
                Ok(size_of(&device)? > before + 31 * MIB)
            })?;
            cluster.wait_in_sync()
        })();
        stop.store(true, Ordering::Relaxed);
        let rounds = worker.join().ok().context("the worker ends")?;
        grown?;
        ensure!(rounds? > 0, "the work went on");
        Ok(())
    })?;
    let after = size_of(&device)?;
    let status = cluster.status(1)?;
    ensure!(
        status["devices"][0]["size"].as_u64() == Some(after / 1024),
        "the Secondary's size: {status}"
    );
    // The new area was copied, and not everything.
    let copied = cluster.received_kib(1, 0, 0)? - received;
    let new_kib = (after - before) / 1024;
    ensure!(
        copied >= new_kib && copied < new_kib + 48 * 1024,
        "{copied} KiB were copied, {new_kib} are new"
    );
    // The filesystem takes the room and fills it. It does so unmounted, because the kernel lets
    // only some processes resize a mounted one.
    cluster.unmount(&point)?;
    for (program, option) in [("e2fsck", "-fp"), ("resize2fs", "-p")] {
        let done = Command::new(program).arg(option).arg(&device).output()?;
        ensure!(done.status.success(), "{program}: {done:?}");
    }
    let point = cluster.mount(&device)?;
    let file = fs::File::create(point.join("filler"))?;
    for at in 0..70 {
        file.write_all_at(&vec![at as u8 + 1; MIB as usize], at * MIB)?;
    }
    file.sync_all()?;
    drop(file);
    cluster.unmount(&point)?;
    // So little more that the metadata move over themselves, and nothing to copy.
    grow(&cluster, 96 * MIB + 16384)?;
    cluster.adm(0, &["--assume-clean", "resize", "r0"])?;
    cluster.wait("the device grows again", |_| Ok(size_of(&device)? > after))?;
    cluster.wait_in_sync()?;
    // The metadata are where a restart looks for them.
    cluster.kill(1)?;
    cluster.start(1)?;
    cluster.adm(1, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 95)?;
    Ok(())
}
