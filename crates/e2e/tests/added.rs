//! A volume that is added while the resource runs and its first volume is in use.

use std::fs;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use lockstep_e2e::{Cluster, Setup, can_mount};

/// A number that no other test uses.
const TEST: u8 = 88;

/// Adds volume 1 to a node's configuration, with a disk of its own.
fn add_volume(cluster: &Cluster, node: usize) -> Result<()> {
    let conf = cluster.node_dir(node).join("drbd.conf");
    let mut text = String::new();
    for line in fs::read_to_string(&conf)?.lines() {
        text.push_str(line);
        text.push('\n');
        if line.contains("volume 0 {") {
            let minor = line.split_whitespace().skip_while(|w| *w != "minor").nth(1);
            let minor: u32 = minor.context("a minor")?.trim_end_matches(';').parse()?;
            let added = line
                .replace("volume 0", "volume 1")
                .replace("disks/0", "disks/1")
                .replace(&format!("minor {minor};"), &format!("minor {};", minor + 1));
            text.push_str(&added);
            text.push('\n');
        }
    }
    fs::write(conf, text)?;
    let disk = fs::File::create(cluster.node_dir(node).join("disks/1"))?;
    Ok(disk.set_len(Setup::QUICK_DISK_MIB << 20)?)
}

/// Adds volume 1 to nodes that are connected, one after the other, while volume 0 is in use.
fn story(nodes: usize) -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&Setup::quick(TEST, nodes))?;
    cluster.primary_of_equal_disks(0)?;
    let used = fs::File::options()
        .write(true)
        .open(cluster.device(0, TEST, 0)?)?;
    used.write_all_at(&[3; 1 << 16], 0)?;
    for node in 0..nodes {
        add_volume(&cluster, node)?;
        cluster.adm(node, &["create-md", "--force", "r0/1"])?;
        cluster.adm(node, &["adjust", "r0"])?;
    }
    cluster.wait("volume 1 replicated", |c| {
        let status = c.status(0)?;
        let peers = status["connections"].as_array().context("connections")?;
        let good = |p: &serde_json::Value| {
            let added = &p["peer_devices"][1];
            added["replication-state"] == "Established"
                && added["peer-disk-state"] == "Inconsistent"
        };
        Ok(peers.iter().all(good))
    })?;
    used.write_all_at(&[4; 1 << 16], 1 << 16)?;
    cluster.adm(0, &["new-current-uuid", "--clear-bitmap", "r0/1"])?;
    cluster.wait_in_sync()?;
    let added = fs::File::options()
        .write(true)
        .open(cluster.device(0, TEST, 1)?)?;
    added.write_all_at(&[7; 1 << 20], 1 << 20)?;
    added.sync_all()?;
    used.sync_all()?;
    drop((used, added));
    cluster.wait("Secondary", |c| Ok(c.adm(0, &["secondary", "r0"]).is_ok()))?;
    cluster.wait_in_sync()?;
    for volume in 0..2 {
        cluster.check_same_data(volume, 60)?;
    }
    Ok(())
}

#[test]
fn a_volume_added_to_two_running_nodes_is_replicated_at_once() -> Result<()> {
    story(2)
}

#[test]
fn a_volume_added_to_three_running_nodes_is_replicated_at_once() -> Result<()> {
    story(3)
}
