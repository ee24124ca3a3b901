//! Clusters with quorum that fall apart in every way: at most one side works, and nobody who waits
//! is told an error.

use std::fs;
use std::io::Write;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::load::Load;
use lockstep_e2e::postgres::{Postgres, has_postgres};
use lockstep_e2e::{Cluster, Setup, Shape, can_mount, has_program, run};

fn quorate(clients: &[usize]) -> Shape {
    Shape {
        clients: clients.into(),
        options: "quorum majority; on-no-quorum suspend-io;".into(),
        ..Shape::default()
    }
}

fn has_quorum(cluster: &Cluster, node: usize) -> Result<bool> {
    let quorum = &cluster.status(node)?["devices"][0]["quorum"];
    quorum.as_bool().context("quorum")
}

fn is_suspended(cluster: &Cluster, node: usize) -> Result<bool> {
    let suspended = &cluster.status(node)?["suspended-quorum"];
    suspended.as_bool().context("suspended-quorum")
}

/// Waits until exactly these nodes have quorum.
fn wait_for_quorum_of(cluster: &Cluster, nodes: usize, with: &[usize]) -> Result<()> {
    for node in 0..nodes {
        cluster.wait(&format!("quorum is with {with:?}"), |c| {
            Ok(has_quorum(c, node)? == with.contains(&node))
        })?;
    }
    Ok(())
}

/// The load stands still, without an error, while its node has no quorum.
fn wait_until_held(cluster: &Cluster, node: usize, load: &Load) -> Result<()> {
    cluster.wait("I/O is suspended", |c| is_suspended(c, node))?;
    let done = load.done();
    let refused = cluster.adm_raw(node, &["secondary", "r0"])?;
    ensure!(!refused.status.success(), "a suspended volume was demoted");
    ensure!(
        load.done() == done,
        "a write was acknowledged without quorum"
    );
    Ok(())
}

#[test]
fn three_disks_and_a_client_work_on_in_the_larger_part_of_every_partition() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::shaped(&Setup::quick(61, 4), quorate(&[3]))?;
    cluster.primary_of_equal_disks(0)?;
    let device = cluster.device(0, 61, 0)?;
    let load = Load::start(&device, 4)?;
    // One part, the other part; the larger number of disks has quorum.
    let partitions: [(&[usize], &[usize]); 7] = [
        (&[0], &[1, 2, 3]),
        (&[1], &[0, 2, 3]),
        (&[2], &[0, 1, 3]),
        (&[3], &[0, 1, 2]),
        (&[0, 1], &[2, 3]),
        (&[0, 2], &[1, 3]),
        (&[0, 3], &[1, 2]),
    ];
    for (one, other) in partitions {
        load.wait_for_progress()?;
        cluster.partition(&[other, one])?;
        let disks = |part: &[usize]| part.iter().filter(|n| **n < 3).count();
        let larger = if disks(one) > disks(other) {
            one
        } else {
            other
        };
        wait_for_quorum_of(&cluster, 4, larger)?;
        if larger.contains(&0) {
            load.wait_for_progress()?;
        } else {
            wait_until_held(&cluster, 0, &load)?;
        }
        cluster.heal()?;
        cluster.wait_in_sync()?;
    }
    // One way only: neither end can use the link, and three disks are not torn apart by that.
    load.wait_for_progress()?;
    cluster.mute(1, 0)?;
    cluster.wait("the link is lost", |c| {
        Ok(!c.connection_is(0, 1, "Connected")?)
    })?;
    load.wait_for_progress()?;
    ensure!(has_quorum(&cluster, 0)?, "two of three disks are there");
    cluster.heal()?;
    cluster.wait_in_sync()?;
    load.wait_for_progress()?;
    let mut ledger = load.end()?;
    ensure!(ledger.error().is_none(), "{:?}", ledger.error());
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, Setup::QUICK_DISK_MIB - 4)?;
    ledger.check(&cluster.image(2, 0))
}

#[test]
fn a_client_without_a_disk_breaks_the_tie() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let mut cluster = Cluster::shaped(&Setup::quick(62, 3), quorate(&[2]))?;
    cluster.primary_of_equal_disks(0)?;
    let device = cluster.device(0, 62, 0)?;
    let load = Load::start(&device, 4)?;
    load.wait_for_progress()?;
    cluster.partition(&[&[0, 2], &[1]])?;
    wait_for_quorum_of(&cluster, 3, &[0, 2])?;
    load.wait_for_progress()?;
    let refused = cluster.adm_raw(1, &["primary", "r0"])?;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success(), "promoted without quorum");
    ensure!(text.contains("quorum"), "{text}");
    cluster.heal()?;
    cluster.wait_in_sync()?;

    cluster.partition(&[&[1, 2], &[0]])?;
    wait_for_quorum_of(&cluster, 3, &[1, 2])?;
    wait_until_held(&cluster, 0, &load)?;
    cluster.heal()?;
    cluster.wait_in_sync()?;
    load.wait_for_progress()?;

    // Without the tie-breaker the two disks are all there is.
    cluster.kill(2)?;
    cluster.wait("the loss is noticed", |c| {
        Ok(!c.connection_is(0, 2, "Connected")? && !c.connection_is(1, 2, "Connected")?)
    })?;
    load.wait_for_progress()?;
    let mut ledger = load.end()?;
    ensure!(ledger.error().is_none(), "{:?}", ledger.error());
    cluster.start(2)?;
    cluster.adm(2, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, Setup::QUICK_DISK_MIB - 4)?;
    ledger.check(&cluster.image(1, 0))
}

#[test]
fn postgres_sleeps_through_a_loss_of_quorum_and_io_error_means_errors() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") || !has_postgres() {
        return Ok(());
    }
    let disk_mib = 256;
    let setup = Setup {
        disk_mib,
        ..Setup::quick(63, 3)
    };
    let mut cluster = Cluster::shaped(&setup, quorate(&[]))?;
    cluster.primary_of_equal_disks(0)?;
    let device = cluster.device(0, 63, 0)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&device))?;
    let mount = cluster.mount(&device)?;
    let mut postgres = Postgres::new(&cluster.dir().join("postgres"))?;
    postgres.create(&mount)?;
    let mut load = postgres.load(0)?;
    for _ in 0..2 {
        load.wait_for_progress()?;
        // A disk that is being resynced has no vote.
        cluster.wait_in_sync()?;
        cluster.partition(&[&[1, 2], &[0]])?;
        wait_for_quorum_of(&cluster, 3, &[1, 2])?;
        cluster.wait("I/O is suspended", |c| is_suspended(c, 0))?;
        cluster.heal()?;
        load.wait_for_progress()?;
    }
    let acknowledged = load.end(&postgres)?;
    postgres.check(&[acknowledged])?;
    postgres.stop()?;
    cluster.unmount(&mount)?;
    run(Command::new("fsck.ext4").args(["-f", "-n"]).arg(&device))?;
    cluster.wait_in_sync()?;

    let changed = cluster.setup_raw(0, &["resource-options", "r0", "--on-no-quorum=io-error"])?;
    ensure!(changed.status.success(), "{changed:?}");
    // The load begins on an empty device.
    let mut file = fs::File::options().write(true).open(&device)?;
    file.write_all(&vec![0; 32 << 20])?;
    file.sync_all()?;
    drop(file);
    let load = Load::start(&device, 4)?;
    load.wait_for_progress()?;
    cluster.partition(&[&[1, 2], &[0]])?;
    wait_for_quorum_of(&cluster, 3, &[1, 2])?;
    ensure!(!is_suspended(&cluster, 0)?, "nothing waits");
    let mut ledger = load.end()?;
    ensure!(ledger.error().is_some(), "a write without quorum succeeded");
    cluster.heal()?;
    cluster.wait_in_sync()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, disk_mib - 4)?;
    ledger.check(&cluster.image(1, 0))
}
