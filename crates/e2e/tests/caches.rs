//! A daemon that was killed knows whether the machine has gone down since: the disk has kept its cache if not.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount};

/// What a daemon notes of its disks.
fn notes(cluster: &Cluster, node: usize) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(cluster.node_dir(node).join("caches"))?;
    entries.map(|entry| Ok(entry?.path())).collect()
}

/// The node says that the disk may have lost what it had not flushed.
fn says_lost(cluster: &Cluster, node: usize) -> Result<bool> {
    Ok(cluster.log(node)?.contains("in its cache of writes"))
}

#[test]
fn a_killed_daemon_has_kept_its_disks_cache_unless_the_machine_went_down() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&Setup::quick(151, 2))?;
    cluster.first_primary(0)?;
    cluster.wait_in_sync()?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;

    cluster.kill(1)?;
    let found = notes(&cluster, 1)?;
    ensure!(found.len() == 1, "one disk is in use: {found:?}");
    let text = fs::read_to_string(&found[0])?;
    ensure!(text.starts_with(boot.trim()), "{text} is not of {boot}");
    cluster.start(1)?;
    cluster.adm(1, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    ensure!(!says_lost(&cluster, 1)?, "only the process had ended");

    // The machine starts again, as far as the note knows.
    cluster.kill(1)?;
    let (_, rest) = text.split_once(' ').context("the note has two parts")?;
    fs::write(
        &found[0],
        format!("00000000-0000-4000-8000-000000000000 {rest}"),
    )?;
    cluster.start(1)?;
    cluster.adm(1, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    ensure!(says_lost(&cluster, 1)?, "the machine had gone down");
    let renewed = fs::read_to_string(&found[0])?;
    ensure!(renewed.starts_with(boot.trim()), "{renewed} is not renewed");

    // Whoever uses the disk next is not this daemon.
    cluster.adm(1, &["down", "r0"])?;
    let left = notes(&cluster, 1)?;
    ensure!(left.is_empty(), "notes of disks that are closed: {left:?}");
    Ok(())
}
