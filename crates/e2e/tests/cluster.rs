//! Whole clusters with filesystems on them: failover, return, split brain, wrong use.

use std::fs;
use std::io::Write;
use std::process::Command;

use anyhow::{Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount, has_program, run};

fn setup(test: u8, nodes: usize) -> Setup {
    Setup {
        nodes,
        volumes: 1,
        disk_mib: 64,
        net: "protocol C;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test,
    }
}

/// Writes a file and waits until it is durable.
fn durable(path: &std::path::Path, content: &[u8]) -> Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(content)?;
    file.sync_all()?;
    Ok(())
}

#[test]
fn a_file_survives_the_kill_of_the_primary_and_the_lost_node_comes_back() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(1, 3))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 1, 0)?;
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device))?;
    let mount = cluster.mount(&device)?;
    durable(&mount.join("before"), &vec![7u8; 1 << 20])?;
    cluster.kill(0)?;
    cluster.unmount(&mount)?;
    cluster.adm(1, &["primary", "r0"])?;
    let device = cluster.device(1, 1, 0)?;
    let mount = cluster.mount(&device)?;
    ensure!(
        fs::read(mount.join("before"))? == vec![7u8; 1 << 20],
        "the file is not the same"
    );
    durable(&mount.join("after"), &vec![9u8; 1 << 20])?;
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    ensure!(
        fs::read(mount.join("after"))? == vec![9u8; 1 << 20],
        "the file is not the same"
    );
    cluster.unmount(&mount)?;
    cluster.adm(1, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)
}

#[test]
fn a_killed_secondary_gets_what_it_missed() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(2, 2))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 2, 0)?;
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device))?;
    let mount = cluster.mount(&device)?;
    cluster.kill(1)?;
    for n in 0..20u8 {
        durable(&mount.join(format!("file{n}")), &vec![n; 100_000])?;
    }
    cluster.start(1)?;
    cluster.adm(1, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.unmount(&mount)?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)?;
    cluster.adm(1, &["primary", "r0"])?;
    let device = cluster.device(1, 2, 0)?;
    let mount = cluster.mount(&device)?;
    for n in 0..20u8 {
        ensure!(
            fs::read(mount.join(format!("file{n}")))? == vec![n; 100_000],
            "file{n} differs"
        );
    }
    cluster.unmount(&mount)
}

#[test]
fn an_fsync_is_on_the_secondary_when_it_returns() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(3, 2))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 3, 0)?;
    let mut file = fs::File::options().write(true).open(&device)?;
    let pattern: Vec<u8> = (0..8192u32).map(|n| (n % 251) as u8).collect();
    file.write_all(&pattern)?;
    file.sync_all()?;
    cluster.kill(0)?;
    drop(file);
    let image = fs::read(cluster.image(1, 0))?;
    ensure!(
        image[..pattern.len()] == pattern[..],
        "the acknowledged bytes are not there"
    );
    Ok(())
}

#[test]
fn a_split_brain_is_refused_and_ends_with_discard_my_data() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&setup(4, 2))?;
    cluster.first_primary(0)?;
    cluster.adm(0, &["disconnect", "r0"])?;
    let write = |node: usize, byte: u8| -> Result<()> {
        let device = cluster.device(node, 4, 0)?;
        let mut file = fs::File::options().write(true).open(&device)?;
        file.write_all(&vec![byte; 65536])?;
        file.sync_all()?;
        Ok(())
    };
    write(0, 1)?;
    cluster.adm(0, &["secondary", "r0"])?;
    // What the Primary left behind is old.
    let refused = cluster.adm_raw(1, &["primary", "r0"])?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && said.contains("(-2)"), "{said}");
    cluster.adm(1, &["primary", "--force", "r0"])?;
    write(1, 2)?;
    cluster.adm(1, &["secondary", "r0"])?;
    let _ = cluster.adm_raw(1, &["disconnect", "r0"])?;
    cluster.adm(0, &["connect", "r0"])?;
    cluster.adm(1, &["connect", "r0"])?;
    cluster.wait("both StandAlone", |c| {
        let alone = |node| -> Result<bool> {
            Ok(c.status(node)?["connections"][0]["connection-state"] == "StandAlone")
        };
        Ok(alone(0)? && alone(1)?)
    })?;
    cluster.adm(1, &["connect", "--discard-my-data", "r0"])?;
    cluster.adm(0, &["connect", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.check_same_data(0, 60)?;
    let image = fs::read(cluster.image(1, 0))?;
    ensure!(
        image[..65536] == vec![1u8; 65536][..],
        "the wrong side was discarded"
    );
    Ok(())
}

#[test]
fn a_mounted_volume_is_not_demoted_and_wrong_words_change_nothing() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(5, 2))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 5, 0)?;
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device))?;
    let mount = cluster.mount(&device)?;
    let refused = cluster.adm_raw(0, &["secondary", "r0"])?;
    ensure!(!refused.status.success(), "a mounted volume was demoted");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(text.contains("held open"), "{text}");
    ensure!(
        !cluster.adm_raw(1, &["primary", "r0"])?.status.success(),
        "two Primaries"
    );
    ensure!(
        !cluster.adm_raw(0, &["primari", "r0"])?.status.success(),
        "an unknown command"
    );
    ensure!(
        !cluster.adm_raw(0, &["up", "nothere"])?.status.success(),
        "an unknown resource"
    );
    ensure!(
        cluster.status(0)?["role"] == "Primary",
        "the role has changed"
    );
    durable(&mount.join("still"), b"works")?;
    cluster.unmount(&mount)?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.adm(0, &["down", "r0"])?;
    Ok(())
}
