//! Pacemaker's script for DRBD, `ocf:linbit:drbd` of drbd-utils, unchanged, called as a cluster
//! manager calls it, by the wrapper of the package.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::machine_has;

use crate::nodes::{Nodes, Setup, can_run_stock_tools};

const SCRIPT: &str = "/usr/lib/ocf/resource.d/linbit/drbd";

/// The wrapper of the package, which gives the script its view of the machine.
const WRAPPER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/ocf-drbd");

/// Programs of a cluster manager that the script calls.
const VIEW: &str = "PATH=$LOCKSTEP_DIR/cluster:$PATH\n";

/// Runs one action; its exit code and what it said.
fn act(nodes: &Nodes, node: usize, action: &str, meta: &[(&str, &str)]) -> Result<(i32, String)> {
    let dir = nodes.node_dir(node);
    let mut command = nodes.command(node, WRAPPER, &[action]);
    command
        .env("OCF_ROOT", "/usr/lib/ocf")
        .env("OCF_FUNCTIONS_DIR", dir.join("cluster"))
        .env("HA_SBIN_DIR", dir.join("cluster"))
        .env("HA_RSCTMP", dir)
        .env("OCF_RA_VERSION_MAJOR", "1")
        .env("OCF_RA_VERSION_MINOR", "0")
        .env("OCF_RESOURCE_INSTANCE", "drbd:0")
        .env("OCF_RESOURCE_TYPE", "drbd")
        .env("OCF_RESOURCE_PROVIDER", "linbit")
        .env("OCF_RESKEY_drbd_resource", "r0")
        .env("OCF_RESKEY_drbdconf", dir.join("drbd.conf"))
        .env("OCF_RESKEY_crm_feature_set", "3.17.4")
        .env("OCF_RESKEY_CRM_meta_timeout", "30000")
        .env("OCF_RESKEY_CRM_meta_interval", "0")
        .env("OCF_RESKEY_CRM_meta_clone", "0")
        .env("OCF_RESKEY_CRM_meta_clone_max", "2")
        .env("OCF_RESKEY_CRM_meta_clone_node_max", "1")
        .env("OCF_RESKEY_CRM_meta_master_max", "1")
        .env("OCF_RESKEY_CRM_meta_master_node_max", "1")
        .env("OCF_RESKEY_CRM_meta_globally_unique", "false")
        .env("OCF_RESKEY_CRM_meta_notify", "true")
        .env("LOCKSTEP_OCF_AGENT", SCRIPT)
        .env("LOCKSTEP_TEST_SCORES", dir.join("scores"));
    for (name, value) in meta {
        command.env(format!("OCF_RESKEY_CRM_meta_{name}"), value);
    }
    let output = command.output().context(WRAPPER)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let code = output.status.code().context("it ended by a signal")?;
    Ok((code, said))
}

#[test]
fn pacemakers_script_starts_promotes_demotes_and_stops() -> Result<()> {
    if !can_run_stock_tools() || !machine_has("ocf:linbit:drbd", Path::new(SCRIPT).exists()) {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "net { protocol C; }",
        test: 6,
        daemon: &["--no-device"],
    })?;
    for node in 0..2 {
        nodes.stock(node, &["create-md", "--force", "r0"])?;
        let cluster = nodes.node_dir(node).join("cluster");
        fs::create_dir(&cluster)?;
        fs::write(
            cluster.join("ocf-shellfuncs"),
            include_str!("ocf-functions.sh"),
        )?;
        for name in ["crm_master", "crm_attribute", "crm_node"] {
            let stub = cluster.join(name);
            fs::write(
                &stub,
                "#!/bin/sh\necho \"$*\" >> \"$LOCKSTEP_TEST_SCORES\"\n",
            )?;
            fs::set_permissions(&stub, fs::Permissions::from_mode(0o755))?;
        }
        fs::write(nodes.node_dir(node).join("view"), VIEW)?;
    }
    let expect = |node: usize, action: &str, meta: &[(&str, &str)], code: i32| -> Result<()> {
        let (found, said) = act(&nodes, node, action, meta)?;
        ensure!(
            found == code,
            "{action} on node {node}: {found}, not {code}\n{said}\n{}",
            nodes.story()
        );
        Ok(())
    };
    const NOT_RUNNING: i32 = 7;
    const PROMOTED: i32 = 8;
    expect(0, "monitor", &[], NOT_RUNNING)?;
    // Both at once, as a cluster manager does: each start waits for the other side.
    std::thread::scope(|scope| {
        let second = scope.spawn(|| expect(1, "start", &[], 0));
        expect(0, "start", &[], 0)?;
        second.join().expect("the other start")
    })?;
    expect(0, "monitor", &[], 0)?;
    nodes.asked(0, &["primary", "--force", "r0"])?;
    nodes.wait_in_sync()?;
    nodes.asked(0, &["secondary", "r0"])?;

    let scores = nodes.node_dir(0).join("scores");
    fs::write(&scores, "")?;
    expect(0, "monitor", &[], 0)?;
    let said = fs::read_to_string(&scores)?;
    ensure!(said.contains("-v 10000"), "the score of good data: {said}");
    let started = [
        ("notify_type", "post"),
        ("notify_operation", "start"),
        ("notify_start_uname", "bravo"),
        ("notify_active_uname", "alfa"),
    ];
    expect(0, "notify", &started, 0)?;
    expect(0, "promote", &[], 0)?;
    ensure!(nodes.status(0)?["role"] == "Primary");
    expect(0, "monitor", &[], PROMOTED)?;
    expect(1, "monitor", &[], 0)?;
    expect(0, "demote", &[], 0)?;
    expect(0, "monitor", &[], 0)?;
    for node in 0..2 {
        expect(node, "stop", &[], 0)?;
        expect(node, "monitor", &[], NOT_RUNNING)?;
    }
    ensure!(nodes.asked(0, &["status"])? == "# No currently configured DRBD found.\n");
    let link = format!("/dev/drbd{}", nodes.minor(0));
    ensure!(fs::symlink_metadata(&link).is_err(), "{link} is left");
    Ok(())
}
