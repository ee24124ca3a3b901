//! Nodes without a disk that get one while everything runs, and give it back.

use std::fs;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, Shape, can_mount};

/// A number that no other test uses.
const TEST: u8 = 93;
const CLIENT: usize = 2;

/// In a node's configuration the client has a disk, or none.
fn configure(cluster: &Cluster, node: usize, disk: bool) -> Result<()> {
    let file = cluster.node_dir(CLIENT).join("disks/0");
    let with = format!("disk {}; meta-disk internal;", file.display());
    let (from, to) = match disk {
        true => ("disk none;", with.as_str()),
        false => (with.as_str(), "disk none;"),
    };
    let conf = cluster.node_dir(node).join("drbd.conf");
    let text = fs::read_to_string(&conf)?;
    ensure!(text.contains(from), "{text}");
    Ok(fs::write(conf, text.replace(from, to))?)
}

/// What a node sees of the client: connection, replication, disk.
fn seen(cluster: &Cluster, node: usize) -> Result<[String; 3]> {
    let status = cluster.status(node)?;
    let all = status["connections"].as_array().context("connections")?;
    let peer = all.iter().find(|c| c["peer-node-id"] == CLIENT);
    let peer = peer.context("the client")?;
    let device = &peer["peer_devices"][0];
    let words = [
        &peer["connection-state"],
        &device["replication-state"],
        &device["peer-disk-state"],
    ];
    Ok(words.map(|word| word.as_str().unwrap_or_default().to_owned()))
}

fn own_disk(cluster: &Cluster) -> Result<String> {
    let status = cluster.status(CLIENT)?;
    let disk = status["devices"][0]["disk-state"].as_str();
    Ok(disk.context("a disk state")?.to_owned())
}

fn wait_for(cluster: &Cluster, disk: &str) -> Result<()> {
    cluster.wait("the client's disk", |c| {
        let expected = ["Connected", "Established", disk];
        Ok(own_disk(c)? == disk && seen(c, 0)? == expected && seen(c, 1)? == expected)
    })
}

#[test]
fn a_client_gets_a_disk_when_its_peers_have_a_bitmap_for_it() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let shape = Shape {
        clients: vec![CLIENT],
        ..Shape::default()
    };
    let mut cluster = Cluster::shaped(&Setup::quick(TEST, 3), shape)?;
    // Room for the bitmap of a second disk, which `create-md` does not foresee.
    for node in 0..2 {
        cluster.adm(node, &["down", "r0"])?;
        cluster.adm(node, &["create-md", "--force", "--max-peers=2", "r0"])?;
        cluster.adm(node, &["up", "r0"])?;
    }
    cluster.primary_of_equal_disks(0)?;
    let disk = fs::File::create(cluster.node_dir(CLIENT).join("disks/0"))?;
    disk.set_len(Setup::QUICK_DISK_MIB << 20)?;

    configure(&cluster, CLIENT, true)?;
    cluster.adm(CLIENT, &["create-md", "--force", "--max-peers=2", "r0"])?;
    let refused = cluster.adm_raw(CLIENT, &["adjust", "r0"])?;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(1), "{text}");
    ensure!(text.contains("(-10) State change was refused"), "{text}");
    ensure!(text.contains("bitmap no"), "{text}");
    wait_for(&cluster, "Diskless")?;

    for node in 0..2 {
        configure(&cluster, node, true)?;
        cluster.adm(node, &["adjust", "r0"])?;
    }
    cluster.adm(CLIENT, &["adjust", "r0"])?;
    wait_for(&cluster, "UpToDate")?;

    // Whichever is told first: the peers, or the node that gives its disk back.
    for node in 0..3 {
        configure(&cluster, node, false)?;
        cluster.adm(node, &["adjust", "r0"])?;
    }
    wait_for(&cluster, "Diskless")?;
    for node in 0..3 {
        configure(&cluster, node, true)?;
        cluster.adm(node, &["adjust", "r0"])?;
    }
    wait_for(&cluster, "UpToDate")?;
    cluster.stop(CLIENT)?;
    cluster.stop(0)
}
