//! Many resources on the same nodes: started, promoted, resynced.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, PATIENCE, Setup, Shape, can_mount};

const TEST: u8 = 67;
/// Names another number of resources: two hundred take a busy machine minutes.
const RESOURCES_VARIABLE: &str = "LOCKSTEP_E2E_RESOURCES";
const RESOURCES: usize = 40;
const DISK_MIB: u64 = 4;
/// Where each resource is written.
const PLACE: u64 = 64 << 10;

/// A client of one NBD export, as simple as can be.
struct Volume(UnixStream);

impl Volume {
    fn open(mut stream: UnixStream, export: &str) -> Result<Volume> {
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        ensure!(greeting.starts_with(b"NBDMAGICIHAVEOPT"), "{greeting:?}");
        // Fixed newstyle without the zeroes, and the option that names the export.
        let mut wish = 3u32.to_be_bytes().to_vec();
        wish.extend(b"IHAVEOPT");
        wish.extend(1u32.to_be_bytes());
        wish.extend((export.len() as u32).to_be_bytes());
        wish.extend(export.as_bytes());
        stream.write_all(&wish)?;
        stream.read_exact(&mut [0; 10])?;
        Ok(Volume(stream))
    }

    /// A write that is durable when it returns.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        // FUA, write, and a handle.
        request.extend([0, 1, 0, 1]);
        request.extend(7u64.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend((bytes.len() as u32).to_be_bytes());
        request.extend(bytes);
        self.0.write_all(&request)?;
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply)?;
        ensure!(
            reply[..8] == [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0],
            "{reply:?}"
        );
        Ok(())
    }
}

/// Every resource of a node satisfies this.
fn all(
    cluster: &Cluster,
    node: usize,
    count: usize,
    what: impl Fn(&serde_json::Value) -> bool,
) -> Result<bool> {
    let output = cluster.setup_raw(node, &["status", "--json"])?;
    let status: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let resources = status.as_array().context("resources")?;
    Ok(resources.len() == count && resources.iter().all(what))
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
fn many_resources_start_are_promoted_and_resync() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let count = match std::env::var(RESOURCES_VARIABLE) {
        Ok(number) => number.parse()?,
        Err(_) => RESOURCES,
    };
    let setup = Setup {
        nodes: 3,
        volumes: 1,
        disk_mib: DISK_MIB,
        net: "protocol C;".into(),
        disk: String::new(),
        cramped: None,
        // Six hundred block devices would be a test of the kernel.
        daemon: vec!["--no-device".into()],
        test: TEST,
    };
    let shape = Shape {
        last_resource: count - 1,
        ..Shape::default()
    };
    let begin = Instant::now();
    let took = |what: &str| eprintln!("{what} after {:.1} s", begin.elapsed().as_secs_f64());
    let mut cluster = Cluster::shaped(&setup, shape)?;
    took("started");
    for node in 0..3 {
        cluster.wait("every connection", |c| {
            all(c, node, count, |resource| {
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
        cluster.wait("the first resync", |c| all(c, node, count, is_in_sync))?;
    }
    took("resynced");

    cluster.kill(2)?;
    for resource in 0..count {
        let socket = cluster.node_dir(0).join("nbd.sock");
        let mut volume = Volume::open(UnixStream::connect(socket)?, &format!("r{resource}/0"))?;
        volume.write(PLACE, &[resource as u8 + 1; 4096])?;
    }
    took("written");
    cluster.start(2)?;
    cluster.adm(2, &["up", "all"])?;
    took("restarted");
    for node in 0..3 {
        cluster.wait("the resync of what was missed", |c| {
            all(c, node, count, is_in_sync)
        })?;
    }
    took("resynced");
    for node in 0..3 {
        for resource in 0..count {
            let name = match resource {
                0 => "disks/0".to_owned(),
                _ => format!("disks/r{resource}-0"),
            };
            let image = fs::read(cluster.node_dir(node).join(name))?;
            ensure!(
                image[PLACE as usize..][..4096] == [resource as u8 + 1; 4096],
                "node {node} lacks the write of resource {resource}"
            );
        }
    }
    cluster.adm(0, &["secondary", "all"])?;
    took("demoted");
    Ok(())
}
