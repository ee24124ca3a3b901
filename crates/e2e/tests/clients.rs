//! Nodes without a disk that get one while everything runs, and give it back.

use std::fs;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use lockstep_e2e::{Cluster, Setup, Shape, can_mount, terminate};

/// A number that no other test uses.
const TEST: u8 = 93;
/// Another one.
const TEST_EVENTS: u8 = 101;
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

/// The client's only device.
fn device_of(cluster: &Cluster) -> Result<PathBuf> {
    let links = fs::read_dir(cluster.node_dir(CLIENT).join("dev")).context("no device at all")?;
    for link in links {
        let link = link?;
        if link.file_name().to_string_lossy().starts_with("drbd") && link.path().exists() {
            let target = fs::canonicalize(link.path())?;
            if !target.is_dir() {
                return Ok(target);
            }
        }
    }
    bail!("no device")
}

/// A watcher that hears of a volume's size may use its device at once.
#[test]
fn the_device_is_there_when_events2_tells_its_size() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let shape = Shape {
        clients: vec![CLIENT],
        ..Shape::default()
    };
    let mut cluster = Cluster::shaped(&Setup::quick(TEST_EVENTS, 3), shape)?;
    cluster.primary_of_equal_disks(0)?;
    cluster.adm(CLIENT, &["down", "r0"])?;
    for _ in 0..5 {
        let mut events = Command::new(cluster.dir().join("bin/drbdsetup"))
            .args(["events2", "--timestamps", "--statistics"])
            .env("LOCKSTEP_DIR", cluster.node_dir(CLIENT))
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(events.stdout.take().context("its output")?).lines();
        let told = std::thread::scope(|scope| -> Result<bool> {
            let up = scope.spawn(|| cluster.adm(CLIENT, &["up", "r0"]));
            let mut told = false;
            for line in lines {
                let line = line?;
                let size = line.split(" size:").nth(1);
                if line.contains(" device ") && size.is_some_and(|size| !size.starts_with("0 ")) {
                    told = true;
                    break;
                }
            }
            // Without any patience: it has to be there now.
            let device = device_of(&cluster)?;
            ensure!(fs::metadata(&device)?.file_type().is_block_device());
            let bytes = fs::File::open(&device)?.seek(SeekFrom::End(0))?;
            ensure!(bytes > 0, "{} has no size", device.display());
            up.join().expect("`up` does not panic")?;
            Ok(told)
        });
        terminate(&mut events);
        ensure!(told?, "no size was told");
        cluster.adm(CLIENT, &["down", "r0"])?;
    }
    cluster.stop(CLIENT)?;
    cluster.stop(0)
}
