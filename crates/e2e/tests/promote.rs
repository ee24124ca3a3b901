//! Auto-promote between real daemons: whoever opens a volume for writing is Primary meanwhile.

use std::process::{Command, Output};

use anyhow::{Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount, has_program};

fn setup(test: u8) -> Setup {
    Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 32,
        net: "protocol C;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test,
    }
}

/// A cluster in sync whose nodes are all Secondary.
fn secondaries(test: u8) -> Result<Cluster> {
    let cluster = Cluster::new(&setup(test))?;
    cluster.first_primary(0)?;
    cluster.adm(0, &["secondary", "r0"])?;
    Ok(cluster)
}

/// `qemu-io` on a node's export: connects, runs one command, and closes.
fn qemu_io(cluster: &Cluster, node: usize, command: &str) -> Result<Output> {
    let socket = cluster.node_dir(node).join("nbd.sock");
    let uri = format!("nbd+unix:///r0/0?socket={}", socket.display());
    let mut run = Command::new("qemu-io");
    run.args(["-f", "raw", "-c", command, &uri]);
    Ok(run.output()?)
}

fn text(output: &Output) -> String {
    let both = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&both).into_owned()
}

#[test]
fn an_nbd_client_makes_its_node_primary_for_as_long_as_it_is_connected() -> Result<()> {
    if !can_mount() || !has_program("qemu-io") {
        return Ok(());
    }
    let cluster = secondaries(81)?;
    let one = |node: usize| cluster.status(node);
    for (node, pattern) in [(0, 0x51), (1, 0x52), (0, 0x53)] {
        let written = qemu_io(&cluster, node, &format!("write -P {pattern} 1M 64k"))?;
        ensure!(written.status.success(), "{}", text(&written));
        cluster.wait("the last close demotes", |_| {
            Ok(one(node)?["role"] == "Secondary" && one(node)?["devices"][0]["open"] == false)
        })?;
        let read = qemu_io(&cluster, 1 - node, &format!("read -P {pattern} 1M 64k"))?;
        ensure!(
            read.status.success() && !text(&read).contains("verification failed"),
            "{}",
            text(&read)
        );
        cluster.wait("the last close demotes", |_| {
            Ok(one(1 - node)?["role"] == "Secondary")
        })?;
    }
    let listed = cluster.setup_raw(0, &["events2", "--now", "r0"])?;
    ensure!(
        text(&listed).contains("may_promote:yes promotion_score:10102"),
        "{}",
        text(&listed)
    );

    // Where another node is Primary by command, a client is refused and told why.
    cluster.adm(0, &["primary", "r0"])?;
    let refused = qemu_io(&cluster, 1, "write -P 1 0 4k")?;
    ensure!(
        text(&refused).contains("node 0 is Primary"),
        "{}",
        text(&refused)
    );
    ensure!(one(1)?["role"] == "Secondary", "not promoted");
    // And there the last close changes nothing.
    let written = qemu_io(&cluster, 0, "write -P 7 0 4k")?;
    ensure!(written.status.success(), "{}", text(&written));
    ensure!(one(0)?["role"] == "Primary", "promoted in words");
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 31)?;

    // Without auto-promote nobody becomes Primary unasked.
    let off = cluster.setup_raw(1, &["resource-options", "r0", "--auto-promote=no"])?;
    ensure!(off.status.success(), "{}", text(&off));
    let refused = qemu_io(&cluster, 1, "write -P 1 0 4k")?;
    ensure!(
        text(&refused).contains("auto-promote is off"),
        "{}",
        text(&refused)
    );
    ensure!(one(1)?["role"] == "Secondary", "not promoted");
    Ok(())
}
