//! A disk that does not answer: its filesystem is frozen, so writes stand still in the kernel.

use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount, has_program, run};

/// A filesystem whose writers wait until this is dropped.
struct Frozen(PathBuf);

impl Frozen {
    fn new(cluster: &Cluster, node: usize) -> Result<Frozen> {
        let image = cluster.image(node, 0);
        let point = image.parent().context("a disk lies in a directory")?;
        run(Command::new("fsfreeze").arg("-f").arg(point))?;
        Ok(Frozen(point.to_owned()))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Err(error) = run(Command::new("fsfreeze").arg("-u").arg(&self.0)) {
            eprintln!("{error:#}");
        }
    }
}

fn cluster(test: u8, node: usize, disk: &str) -> Result<Cluster> {
    let cluster = Cluster::new(&Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 32,
        net: "protocol C;".into(),
        disk: disk.into(),
        cramped: Some((node, 64)),
        daemon: Vec::new(),
        test,
    })?;
    cluster.first_primary(0)?;
    Ok(cluster)
}

/// Writes to two extents on another thread: one that the activity log has, and one more.
fn writer(device: &Path, fill: u8) -> Result<JoinHandle<std::io::Result<()>>> {
    let file = fs::File::options()
        .write(true)
        .custom_flags(libc::O_DSYNC)
        .open(device)?;
    let write = move || {
        file.write_all_at(&[fill; 8192], 4096)?;
        file.write_all_at(&[fill; 8192], 20 << 20)
    };
    Ok(std::thread::spawn(write))
}

fn written(writer: JoinHandle<std::io::Result<()>>) -> Result<()> {
    let result = writer
        .join()
        .map_err(|_| anyhow::anyhow!("the writer panicked"))?;
    result.context("a write failed although the other node has its disk")
}

fn is_diskless(cluster: &Cluster, node: usize) -> Result<bool> {
    Ok(cluster.status(node)?["devices"][0]["disk-state"] == "Diskless")
}

fn attach_again(cluster: &Cluster, node: usize) -> Result<()> {
    // What was given up comes back in a time of its own.
    cluster.wait("the disk is attached again", |c| {
        Ok(c.adm_raw(node, &["attach", "r0"])?.status.success())
    })?;
    cluster.wait_in_sync()?;
    cluster.check_same_data(0, 31)
}

fn disk_timeout(test: u8, node: usize) -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") || !has_program("fsfreeze") {
        return Ok(());
    }
    let cluster = cluster(test, node, "disk-timeout 20;")?;
    let device = cluster.device(0, test, 0)?;
    written(writer(&device, 1)?)?;
    let frozen = Frozen::new(&cluster, node)?;
    written(writer(&device, 2)?)?;
    cluster.wait("the frozen disk is given up", |c| is_diskless(c, node))?;
    let log = cluster.log(node)?;
    ensure!(log.contains("more than disk-timeout"), "{log}");
    // A write that was given up waits in the kernel: it must not hit what comes next.
    let minor = (usize::from(test) * 100 + node * 10).to_string();
    let image = cluster.image(node, 0);
    let path = image.to_str().context("a path in words")?;
    let attach = ["attach", minor.as_str(), path, path, "internal"];
    let early = cluster.setup_raw(node, &attach)?;
    let text = String::from_utf8_lossy(&early.stderr).into_owned();
    ensure!(!early.status.success(), "attached under a write that waits");
    ensure!(text.contains("operations of its last use"), "{text}");
    written(writer(&device, 3)?)?;
    drop(frozen);
    attach_again(&cluster, node)
}

#[test]
fn a_primary_goes_on_without_its_own_disk_after_disk_timeout() -> Result<()> {
    disk_timeout(191, 0)
}

#[test]
fn a_primary_goes_on_without_its_peers_disk_after_disk_timeout() -> Result<()> {
    disk_timeout(192, 1)
}

#[test]
fn a_forced_detach_gives_a_dead_disk_up() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") || !has_program("fsfreeze") {
        return Ok(());
    }
    let cluster = cluster(193, 0, "")?;
    let device = cluster.device(0, 193, 0)?;
    let frozen = Frozen::new(&cluster, 0)?;
    let writer = writer(&device, 7)?;
    cluster.wait("a write waits for the disk", |c| {
        let shown = c.setup_raw(0, &["status", "r0", "--verbose", "--statistics"])?;
        let text = String::from_utf8_lossy(&shown.stdout).into_owned();
        Ok(!text.contains("upper-pending:0"))
    })?;
    let forced = cluster.setup_raw(0, &["detach", "19300", "--force"])?;
    ensure!(forced.status.success(), "{forced:?}");
    ensure!(is_diskless(&cluster, 0)?);
    written(writer)?;
    drop(frozen);
    attach_again(&cluster, 0)
}
