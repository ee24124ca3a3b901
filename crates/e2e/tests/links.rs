//! Cut links, a node that is replaced, and disks that are full.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::net::Cut;
use lockstep_e2e::{Cluster, Setup, can_mount, has_program, run};

const BLOCK: u64 = 4096;

/// Writes 512 bytes into each of these blocks, durable.
fn write_sectors(device: &Path, blocks: impl IntoIterator<Item = u64>, byte: u8) -> Result<()> {
    let file = fs::File::options().write(true).open(device)?;
    for block in blocks {
        file.write_all_at(&[byte; 512], block * BLOCK + 512)?;
    }
    file.sync_all()?;
    Ok(())
}

/// Cuts the last node off in both ways. Gives for each what was written meanwhile, and what the
/// node then received from each other, in KiB.
fn cut_and_mend(cluster: &Cluster, test: u8, nodes: usize) -> Result<Vec<(u64, Vec<u64>)>> {
    let last = nodes - 1;
    let received = || -> Result<Vec<u64>> {
        let from = |peer| cluster.received_kib(last, peer, 0);
        (0..last).map(from).collect()
    };
    cluster.first_primary(0)?;
    let device = cluster.device(0, test, 0)?;
    let mut all = Vec::new();
    for (cut, byte) in [(Cut::Down, 2), (Cut::Silent, 3)] {
        let before = received()?;
        cluster.cut(last, cut)?;
        // The first write finds out that the node does not answer, and is completed without it.
        let first: Vec<u64> = (0..40).map(|n| n * 97 + u64::from(byte)).collect();
        write_sectors(&device, first.iter().copied(), byte)?;
        cluster.wait("the cut is noticed", |c| {
            Ok((0..last).all(|peer| c.connection_is(peer, last, "Connected").is_ok_and(|on| !on)))
        })?;
        let second: Vec<u64> = (0..60).map(|n| n * 211 + 7).collect();
        write_sectors(&device, second.iter().copied(), byte)?;
        let written: BTreeSet<u64> = first.into_iter().chain(second).collect();
        let written_kib = written.len() as u64 * BLOCK / 1024;
        let missing_kib = cluster.out_of_sync_kib(0, last, 0)?;
        ensure!(
            missing_kib == written_kib,
            "{cut:?}: {written_kib} KiB of blocks written, {missing_kib} KiB marked"
        );
        cluster.mend(last, cut)?;
        cluster.wait_in_sync()?;
        let resynced = received()?
            .iter()
            .zip(&before)
            .map(|(a, b)| a - b)
            .collect();
        all.push((written_kib, resynced));
    }
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)?;
    Ok(all)
}

#[test]
fn a_cut_link_costs_exactly_the_blocks_written_meanwhile() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&Setup::quick(21, 2))?;
    for (written_kib, resynced) in cut_and_mend(&cluster, 21, 2)? {
        ensure!(
            resynced == [written_kib],
            "{written_kib} KiB out of sync, {resynced:?} KiB resynced"
        );
    }
    Ok(())
}

#[test]
fn no_source_sends_a_cut_off_node_more_than_it_missed() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&Setup::quick(26, 3))?;
    for (written_kib, resynced) in cut_and_mend(&cluster, 26, 3)? {
        // What came from one source before the other one was connected may come from both.
        ensure!(
            resynced.iter().all(|kib| *kib <= written_kib)
                && resynced.iter().sum::<u64>() >= written_kib,
            "{written_kib} KiB out of sync, {resynced:?} KiB resynced"
        );
    }
    Ok(())
}

#[test]
fn a_primary_that_is_cut_off_goes_on_and_keeps_its_data() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&Setup::quick(22, 3))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 22, 0)?;
    cluster.cut(0, Cut::Silent)?;
    write_sectors(&device, 0..50, 5)?;
    cluster.wait("both are lost", |c| {
        Ok(!c.connection_is(0, 1, "Connected")? && !c.connection_is(0, 2, "Connected")?)
    })?;
    for peer in 1..3 {
        let missing = cluster.out_of_sync_kib(0, peer, 0)?;
        ensure!(missing == 200, "{missing} KiB marked for node {peer}");
    }
    cluster.mend(0, Cut::Silent)?;
    cluster.wait_in_sync()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)?;
    let image = fs::read(cluster.image(2, 0))?;
    ensure!(
        image[49 * 4096 + 512..][..512] == [5; 512],
        "the write is lost"
    );
    Ok(())
}

#[test]
fn a_node_with_a_new_disk_gets_everything_under_load() -> Result<()> {
    if !can_mount() || !has_program("fio") {
        return Ok(());
    }
    let mut cluster = Cluster::new(&Setup::quick(23, 3))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 23, 0)?;
    cluster.kill(2)?;
    write_sectors(&device, 0..2000, 9)?;
    // As after a broken disk: an empty one in its place.
    let image = cluster.image(2, 0);
    fs::remove_file(&image)?;
    fs::File::create(&image)?.set_len(64 << 20)?;
    let mut fio = Command::new("fio")
        .args(["--name=load", "--rw=randwrite", "--bs=4k", "--size=48m"])
        .args(["--direct=1", "--ioengine=libaio", "--iodepth=8"])
        .args([
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
        ])
        // Slow enough that the resync runs beside it.
        .args(["--rate_iops=3000"])
        .arg(format!("--filename={}", device.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context("fio")?;
    cluster.start(2)?;
    cluster.adm(2, &["create-md", "--force", "r0"])?;
    cluster.adm(2, &["up", "r0"])?;
    let done = cluster.wait_in_sync();
    ensure!(fio.wait()?.success(), "fio found a fault");
    done?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)
}

/// A node's disk lies on a filesystem that has no room for all its blocks.
fn full_disk(node: usize, test: u8) -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let setup = Setup {
        disk: "on-io-error detach;".into(),
        cramped: Some((node, 80)),
        ..Setup::quick(test, 2)
    };
    let cluster = Cluster::new(&setup)?;
    let ballast = cluster.image(node, 0).with_file_name("ballast");
    fs::write(&ballast, vec![1; 52 << 20])?;
    // The other node's disk holds everything; nothing is copied to the small one at first.
    cluster.wait("connections", |c| c.connection_is(0, 1, "Connected"))?;
    cluster.adm(0, &["new-current-uuid", "--clear-bitmap", "r0/0"])?;
    cluster.adm(0, &["primary", "r0"])?;
    cluster.wait_in_sync()?;
    let device = cluster.device(0, test, 0)?;
    let file = fs::File::options()
        .write(true)
        .custom_flags(libc::O_DSYNC)
        .open(&device)?;
    // More than fits; no write may fail, and none may be lost.
    for mib in 0..48u64 {
        file.write_all_at(&vec![mib as u8 + 1; 1 << 20], mib << 20)?;
    }
    drop(file);
    cluster.wait("the full disk is detached", |c| {
        Ok(c.status(node)?["devices"][0]["disk-state"] == "Diskless")
    })?;
    let log = cluster.log(node)?;
    ensure!(
        log.contains("No space left on device") || log.contains("os error 28"),
        "the log does not name the reason:\n{log}"
    );
    // Read from the volume, not from what the kernel remembers of the writes.
    run(Command::new("blockdev").arg("--flushbufs").arg(&device))?;
    let kept = fs::read(cluster.image(1 - node, 0))?;
    let file = fs::File::open(&device)?;
    for mib in 0..48u64 {
        let expected = vec![mib as u8 + 1; 1 << 20];
        let mut bytes = vec![0; 1 << 20];
        file.read_exact_at(&mut bytes, mib << 20)?;
        ensure!(bytes == expected, "MiB {mib} is not what was written");
        ensure!(
            kept[(mib as usize) << 20..][..1 << 20] == expected,
            "MiB {mib} is not on the other node's disk"
        );
    }
    // With room again the disk comes back.
    fs::remove_file(&ballast)?;
    cluster.adm(node, &["attach", "r0"])?;
    cluster.wait_in_sync()?;
    drop(file);
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)
}

#[test]
fn a_full_disk_below_the_primary_is_detached_and_nothing_is_lost() -> Result<()> {
    full_disk(0, 24)
}

#[test]
fn a_full_disk_below_the_secondary_is_detached_and_nothing_is_lost() -> Result<()> {
    full_disk(1, 25)
}
