//! Fencing between real daemons: a Primary that has lost its peer asks a handler first.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount};

/// A handler that notes its environment, waits for the file `go` and ends with a code.
fn handler(dir: &Path, name: &str, exit_code: u8) -> Result<String> {
    let path = dir.join(name);
    let (env, go) = (dir.join(format!("{name}.env")), dir.join("go"));
    let text = format!(
        "#!/bin/sh\nenv > {0}.new && mv {0}.new {0}\nwhile [ -d {2} ] && [ ! -e {1} ]; do sleep 0.1; done\n\
         exit {exit_code}\n",
        env.display(),
        go.display(),
        dir.display()
    );
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path.display().to_string())
}

#[test]
fn io_waits_for_a_slow_fence_handler_and_nothing_else_does() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (fence, unfence) = (
        handler(dir.path(), "fence", 7)?,
        handler(dir.path(), "unfence", 0)?,
    );
    let mut cluster = Cluster::new(&Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 32,
        net: format!(
            "protocol C; fencing resource-and-stonith; }} \
             handlers {{ fence-peer \"{fence}\"; unfence-peer \"{unfence}\";"
        ),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test: 82,
    })?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 82, 0)?;
    // The initial sync has called it once.
    cluster.wait("the first unfence-peer", |_| {
        Ok(dir.path().join("unfence.env").exists())
    })?;
    fs::write(dir.path().join("go"), "")?;
    cluster.wait("the end of the first unfence-peer", |c| {
        Ok(c.log(0)?.contains("unfence-peer"))
    })?;
    fs::remove_file(dir.path().join("go"))?;

    cluster.kill(1)?;
    cluster.wait("frozen", |c| {
        Ok(c.status(0)?["suspended-fencing"] == true && dir.path().join("fence.env").exists())
    })?;
    let mut writer = Command::new("dd")
        .args(["if=/dev/urandom", "bs=4k", "count=1", "oflag=direct"])
        .arg(format!("of={}", device.display()))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    // The node answers, changes options, and its write waits.
    cluster.adm(0, &["status", "r0"])?;
    let options = cluster.setup_raw(0, &["resource-options", "r0", "--auto-promote=yes"])?;
    ensure!(options.status.success(), "{options:?}");
    ensure!(writer.try_wait()?.is_none(), "the write waits");
    ensure!(cluster.status(0)?["suspended-fencing"] == true, "still");

    fs::write(dir.path().join("go"), "")?;
    let ended = writer.wait()?;
    ensure!(ended.success(), "{ended}");
    let status = cluster.status(0)?;
    ensure!(status["suspended"] == false, "{status}");
    let peers = status["connections"].as_array().context("connections")?;
    ensure!(
        peers[0]["peer_devices"][0]["peer-disk-state"] == "Outdated",
        "{status}"
    );
    let env = fs::read_to_string(dir.path().join("fence.env"))?;
    for line in [
        "DRBD_PEER_NODE_ID=1",
        "DRBD_RESOURCE=r0",
        "DRBD_MINOR_0=8200",
        "UP_TO_DATE_NODES=0x00000001",
        "DRBD_PEER_AF=ipv4",
    ] {
        ensure!(env.lines().any(|l| l == line), "{line} in\n{env}");
    }
    fs::remove_file(dir.path().join("unfence.env"))?;
    cluster.start(1)?;
    cluster.adm(1, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.wait("unfence-peer", |_| {
        Ok(dir.path().join("unfence.env").exists())
    })?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 31)
}
