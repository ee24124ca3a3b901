//! PostgreSQL under pgbench while daemons are killed: everything that was acknowledged is there.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use lockstep_e2e::postgres::{Acknowledged, Postgres, has_postgres};
use lockstep_e2e::{Cluster, Setup, can_mount, has_program, run};

const TEST: u8 = 31;
const DISK_MIB: u64 = 256;

/// Promotes a node, checks the filesystem after its journal's replay, and mounts it.
fn take_over(cluster: &mut Cluster, node: usize) -> Result<std::path::PathBuf> {
    cluster.adm(node, &["primary", "r0"])?;
    let device = cluster.device(node, TEST, 0)?;
    let mount = cluster.mount(&device)?;
    cluster.unmount(&mount)?;
    run(Command::new("fsck.ext4").args(["-f", "-n"]).arg(&device))?;
    cluster.mount(&device)
}

/// The server dies with its node, and everything acknowledged is found on another.
fn recover(
    cluster: &mut Cluster,
    postgres: &mut Postgres,
    node: usize,
    all: &[Acknowledged],
) -> Result<std::path::PathBuf> {
    let mount = take_over(cluster, node)?;
    postgres.start(&mount)?;
    postgres.check(all)?;
    Ok(mount)
}

fn lose(cluster: &mut Cluster, postgres: &mut Postgres, mount: &Path) -> Result<()> {
    postgres.kill()?;
    cluster.unmount(mount)
}

#[test]
fn acknowledged_transactions_survive_kills_of_either_node_and_of_both() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") || !has_postgres() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: DISK_MIB,
        net: "protocol C;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test: TEST,
    })?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, TEST, 0)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&device))?;
    let mount = cluster.mount(&device)?;
    let mut postgres = Postgres::new(&cluster.dir().join("postgres"))?;
    postgres.create(&mount)?;
    let mut all = Vec::new();

    // The Secondary's daemon: the load goes on without it, and goes on while it comes back.
    let mut load = postgres.load(0)?;
    load.wait_for_progress()?;
    cluster.kill(1)?;
    load.wait_for_progress()?;
    cluster.start(1)?;
    cluster.adm(1, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    load.wait_for_progress()?;
    all.push(load.end(&postgres)?);
    postgres.check(&all)?;

    // The Primary's daemon: the other node takes over.
    let mut load = postgres.load(1)?;
    load.wait_for_progress()?;
    cluster.kill(0)?;
    lose(&mut cluster, &mut postgres, &mount)?;
    all.push(load.end(&postgres)?);
    let mount = recover(&mut cluster, &mut postgres, 1, &all)?;
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"])?;
    cluster.wait_in_sync()?;

    // Both: the former Secondary takes over.
    let mut load = postgres.load(2)?;
    load.wait_for_progress()?;
    cluster.kill(1)?;
    cluster.kill(0)?;
    lose(&mut cluster, &mut postgres, &mount)?;
    all.push(load.end(&postgres)?);
    for node in 0..2 {
        cluster.start(node)?;
        cluster.adm(node, &["up", "r0"])?;
    }
    cluster.wait_in_sync()?;
    let mount = recover(&mut cluster, &mut postgres, 0, &all)?;

    postgres.stop()?;
    cluster.unmount(&mount)?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, DISK_MIB - 4)?;
    ensure!(all.len() == 3, "three rounds");
    Ok(())
}
