//! Clusters that lose nodes under load: the ones that remain agree, and nothing acknowledged is
//! lost.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::load::Load;
use lockstep_e2e::{Cluster, Setup, Shape, can_mount, has_program, run};

fn clients(clients: &[usize]) -> Shape {
    Shape {
        clients: clients.into(),
        options: "on-no-data-accessible suspend-io;".into(),
        ..Shape::default()
    }
}

/// A node and a peer see each other's disk UpToDate and have nothing to exchange.
fn agree(cluster: &Cluster, node: usize, peer: usize) -> Result<bool> {
    let status = cluster.status(node)?;
    let connections = status["connections"].as_array().context("connections")?;
    let mut connections = connections.iter();
    let peer = connections.find(|c| c["peer-node-id"] == peer);
    let device = &peer.context("the peer")?["peer_devices"][0];
    Ok(status["devices"][0]["disk-state"] == "UpToDate"
        && device["peer-disk-state"] == "UpToDate"
        && device["replication-state"] == "Established"
        && device["out-of-sync"] == 0)
}

#[test]
fn the_survivors_of_a_killed_primary_agree_and_have_every_acknowledged_write() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let mut cluster = Cluster::shaped(&Setup::quick(64, 4), clients(&[3]))?;
    cluster.primary_of_equal_disks(0)?;
    let mut ledger = None;
    for (primary, heir, third) in [(0, 1, 2), (1, 2, 0)] {
        let device = cluster.device(primary, 64, 0)?;
        let load = match ledger.take() {
            None => Load::start(&device, 6)?,
            Some(ledger) => Load::resume(&device, ledger)?,
        };
        load.wait_for_progress()?;
        cluster.kill(primary)?;
        let mut written = load.end()?;
        ensure!(written.error().is_some(), "the device outlived its daemon");
        cluster.wait("the survivors agree", |c| {
            let lost = !c.connection_is(heir, primary, "Connected")?;
            Ok(lost && agree(c, heir, third)? && agree(c, third, heir)?)
        })?;
        let mut images = Vec::new();
        for node in [heir, third] {
            let mut image = fs::read(cluster.image(node, 0))?;
            image.truncate((Setup::QUICK_DISK_MIB as usize - 4) << 20);
            images.push(image);
        }
        ensure!(images[0] == images[1], "the survivors' data differ");
        cluster.adm(heir, &["primary", "r0"])?;
        written.check(&cluster.device(heir, 64, 0)?)?;
        ledger = Some(written);
        cluster.start(primary)?;
        cluster.adm(primary, &["up", "r0"])?;
        cluster.wait_in_sync()?;
    }
    cluster.adm(2, &["secondary", "r0"])?;
    cluster.check_same_data(0, Setup::QUICK_DISK_MIB - 4)?;
    let mut ledger = ledger.context("two rounds")?;
    ledger.check(&cluster.image(0, 0))
}

#[test]
fn a_client_runs_ext4_while_its_storage_nodes_die_and_return() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let mut cluster = Cluster::shaped(&Setup::quick(65, 3), clients(&[2]))?;
    cluster.primary_of_equal_disks(2)?;
    let device = cluster.device(2, 65, 0)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&device))?;
    let mount = cluster.mount(&device)?;
    let file = mount.join("blocks");
    fs::File::create(&file)?.set_len(40 << 20)?;
    let load = Load::start(&file, 4)?;
    for storage in [0, 1, 0] {
        load.wait_for_progress()?;
        cluster.kill(storage)?;
        load.wait_for_progress()?;
        cluster.start(storage)?;
        cluster.adm(storage, &["up", "r0"])?;
        cluster.wait_in_sync()?;
    }
    // Without any storage the filesystem waits, and goes on when the data are back.
    load.wait_for_progress()?;
    cluster.kill(0)?;
    load.wait_for_progress()?;
    cluster.kill(1)?;
    cluster.wait("I/O is suspended", |c| {
        Ok(c.status(2)?["suspended-no-data"] == true)
    })?;
    let done = load.done();
    cluster.start(1)?;
    cluster.adm(1, &["up", "r0"])?;
    load.wait_for_progress()?;
    ensure!(load.done() > done, "the load goes on");
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    load.wait_for_progress()?;
    let mut ledger = load.end()?;
    ensure!(ledger.error().is_none(), "{:?}", ledger.error());
    ledger.check(&file)?;
    cluster.unmount(&mount)?;
    run(Command::new("fsck.ext4").args(["-f", "-n"]).arg(&device))?;
    cluster.adm(2, &["secondary", "r0"])?;
    cluster.check_same_data(0, Setup::QUICK_DISK_MIB - 4)
}

#[test]
fn eight_nodes_in_a_full_mesh_hold_the_same() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let small = Setup {
        disk_mib: 36,
        ..Setup::quick(66, 8)
    };
    let cluster = Cluster::shaped(&small, Shape::default())?;
    cluster.primary_of_equal_disks(0)?;
    let load = Load::start(&cluster.device(0, 66, 0)?, 4)?;
    load.wait_for_progress()?;
    let mut ledger = load.end()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.adm(7, &["primary", "r0"])?;
    let device = cluster.device(7, 66, 0)?;
    ledger.check(&device)?;
    let load = Load::resume(&device, ledger)?;
    load.wait_for_progress()?;
    let mut ledger = load.end()?;
    ensure!(ledger.error().is_none(), "{:?}", ledger.error());
    cluster.wait_in_sync()?;
    cluster.adm(7, &["secondary", "r0"])?;
    cluster.check_same_data(0, 32)?;
    ledger.check(&cluster.image(3, 0))
}
