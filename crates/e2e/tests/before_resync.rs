//! Resyncs between real daemons: a handler decides whether they start, and zeroes stay where they
//! are.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount};

#[test]
fn a_resync_starts_when_the_targets_handler_agrees_and_sends_no_zeroes() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (script, code) = (dir.path().join("handler"), dir.path().join("code"));
    fs::write(&code, "0\n")?;
    fs::write(
        &script,
        format!("#!/bin/sh\nread code < {}\nexit $code\n", code.display()),
    )?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let cluster = Cluster::new(&Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 32,
        net: format!(
            "protocol C; }} handlers {{ before-resync-target \"{}\";",
            script.display()
        ),
        disk: "rs-discard-granularity 65536;".into(),
        cramped: None,
        daemon: Vec::new(),
        test: 86,
    })?;
    cluster.first_primary(0)?;
    cluster.wait_in_sync()?;
    let status = cluster.status(0)?;
    let sent_kib = status["connections"][0]["peer_devices"][0]["sent"]
        .as_u64()
        .with_context(|| format!("sent in {status}"))?;
    ensure!(
        sent_kib < 4096,
        "{sent_kib} KiB of an empty volume were sent"
    );

    cluster.adm(1, &["disconnect", "r0"])?;
    let device = cluster.device(0, 86, 0)?;
    let written = Command::new("dd")
        .args(["if=/dev/urandom", "bs=64k", "count=4", "oflag=direct"])
        .arg(format!("of={}", device.display()))
        .output()?;
    ensure!(written.status.success(), "{written:?}");
    fs::write(&code, "1\n")?;
    cluster.adm(1, &["connect", "r0"])?;
    cluster.wait("the refusal", |c| {
        let status = c.status(1)?;
        Ok(status["connections"][0]["connection-state"] == "StandAlone")
    })?;
    fs::write(&code, "0\n")?;
    cluster.adm(1, &["connect", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 31)
}
