//! Many resources on the same nodes: started, promoted, resynced.

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, Shape, can_mount};

const TEST: u8 = 67;
const RESOURCES: usize = 200;
const DISK_MIB: u64 = 4;

/// Every resource of a node satisfies this.
fn all(cluster: &Cluster, node: usize, what: impl Fn(&serde_json::Value) -> bool) -> Result<bool> {
    let output = cluster.setup_raw(node, &["status", "--json"])?;
    let status: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let resources = status.as_array().context("resources")?;
    Ok(resources.len() == RESOURCES && resources.iter().all(what))
}

/// A resource's disk and both peers are UpToDate, and nothing is left to copy.
fn is_in_sync(resource: &serde_json::Value) -> bool {
    let peer = |c: &serde_json::Value| {
        let device = &c["peer_devices"][0];
        device["replication-state"] == "Established" && device["peer-disk-state"] == "UpToDate"
    };
    let connections = resource["connections"].as_array();
    resource["devices"][0]["disk-state"] == "UpToDate"
        && connections.is_some_and(|all| all.len() == 2 && all.iter().all(peer))
}

#[test]
fn two_hundred_resources_start_are_promoted_and_resync() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let setup = Setup {
        nodes: 3,
        volumes: 1,
        disk_mib: DISK_MIB,
        net: "protocol C;".into(),
        disk: String::new(),
        cramped: None,
        daemon: Vec::new(),
        test: TEST,
    };
    let shape = Shape {
        last_resource: RESOURCES - 1,
        ..Shape::default()
    };
    let begin = Instant::now();
    let took = |what: &str| eprintln!("{what} after {:.1} s", begin.elapsed().as_secs_f64());
    let mut cluster = Cluster::shaped(&setup, shape)?;
    took("started");
    for node in 0..3 {
        cluster.wait("every connection", |c| {
            all(c, node, |resource| {
                let connections = resource["connections"].as_array();
                let connected = |c: &serde_json::Value| c["connection-state"] == "Connected";
                connections.is_some_and(|all| all.len() == 2 && all.iter().all(connected))
            })
        })?;
    }
    took("connected");
    cluster.adm(0, &["primary", "--force", "all"])?;
    took("promoted");
    for node in 0..3 {
        cluster.wait("the first resync", |c| all(c, node, is_in_sync))?;
    }
    took("resynced");

    cluster.kill(2)?;
    for resource in 0..RESOURCES {
        let link = cluster.node_dir(0).join(format!(
            "dev/drbd{}",
            u32::from(TEST) * 100 + resource as u32
        ));
        let device = fs::File::options().write(true).open(&link)?;
        device.write_all_at(&[resource as u8 + 1; 4096], 64 << 10)?;
        device.sync_all()?;
    }
    took("written");
    cluster.start(2)?;
    cluster.adm(2, &["up", "all"])?;
    took("restarted");
    for node in 0..3 {
        cluster.wait("the resync of what was missed", |c| {
            all(c, node, is_in_sync)
        })?;
    }
    took("resynced");
    for node in 0..3 {
        for resource in 0..RESOURCES {
            let name = match resource {
                0 => "disks/0".to_owned(),
                _ => format!("disks/r{resource}-0"),
            };
            let image = fs::read(cluster.node_dir(node).join(name))?;
            ensure!(
                image[64 << 10..][..4096] == [resource as u8 + 1; 4096],
                "node {node} lacks the write of resource {resource}"
            );
        }
    }
    cluster.adm(0, &["secondary", "all"])?;
    took("demoted");
    Ok(())
}
