//! Debian's drbdadm, unchanged, drives our drbdsetup and drbdmeta.

use anyhow::{Context, Result, ensure};

use crate::nodes::{Nodes, Setup, can_run_stock_tools, output};

#[test]
fn debians_drbdadm_drives_a_resource_through_its_life() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 3,
        lines: "net { protocol C; }",
        test: 1,
        daemon: &["--no-device"],
    })?;
    nodes.bring_up()?;
    let is = |args: &[&str], wanted: &str| -> Result<()> {
        let found = nodes.stock(0, args)?;
        ensure!(found.trim() == wanted, "drbdadm {args:?}: {found}");
        Ok(())
    };
    is(&["role", "r0"], "Primary")?;
    is(&["cstate", "r0:bravo"], "Connected")?;
    is(&["dstate", "r0"], "UpToDate/UpToDate/UpToDate")?;
    ensure!(
        nodes.stock(0, &["status"])?
            == "r0 role:Primary\n  disk:UpToDate open:no\n  bravo role:Secondary\n    \
                peer-disk:UpToDate\n  charlie role:Secondary\n    peer-disk:UpToDate\n\n",
        "{}",
        nodes.stock(0, &["status"])?
    );
    // What runs is what is configured: its `show` reader takes ours without a difference.
    ensure!(nodes.stock(0, &["-d", "adjust", "r0"])?.is_empty(), "{}", {
        nodes.stock(0, &["-d", "adjust", "r0"])?
    });
    nodes.configure(
        "net { protocol C; ping-int 7; }\n options { quorum majority; }\n disk { c-max-rate 50M; }",
    )?;
    let planned = nodes.stock(0, &["-d", "adjust", "r0"])?;
    for call in [
        "drbdsetup resource-options r0 --set-defaults --quorum=majority",
        "drbdsetup net-options r0 1 --set-defaults --_name=bravo --ping-int=7 --protocol=C",
        "drbdsetup peer-device-options r0 2 0 --set-defaults --c-max-rate=50M",
    ] {
        ensure!(planned.contains(call), "{call}\nis not in\n{planned}");
    }
    for node in 0..3 {
        nodes.stock(node, &["adjust", "r0"])?;
        let left = nodes.stock(node, &["-d", "adjust", "r0"])?;
        ensure!(left.is_empty(), "after adjust there is still: {left}");
    }
    let shown = nodes.asked(0, &["show", "r0"])?;
    ensure!(shown.contains("ping-int        \t7;"), "{shown}");
    nodes.wait_in_sync()
}

#[test]
fn debians_drbdadm_moves_connections_disks_and_roles() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "net { protocol C; }",
        test: 2,
        daemon: &["--no-device"],
    })?;
    nodes.bring_up()?;
    // The role moves.
    nodes.stock(0, &["secondary", "r0"])?;
    nodes.stock(1, &["primary", "r0"])?;
    let refused = nodes.stock_raw(0, &["primary", "r0"])?;
    ensure!(refused.status.code() == Some(11), "{refused:?}");
    nodes.stock(1, &["secondary", "r0"])?;
    // The connection goes and comes.
    nodes.stock(0, &["disconnect", "r0"])?;
    ensure!(nodes.stock(0, &["cstate", "r0"])?.trim() == "StandAlone");
    nodes.stock(0, &["connect", "r0"])?;
    nodes.stock(0, &["wait-connect", "r0"])?;
    // The disk goes and comes: drbdadm lets drbdmeta apply the activity log first.
    nodes.stock(0, &["detach", "r0"])?;
    ensure!(nodes.stock(0, &["dstate", "r0"])?.trim() == "Diskless/UpToDate");
    nodes.stock(0, &["attach", "r0"])?;
    nodes.wait_in_sync()?;
    // The size of the disk is remembered for the day it has grown.
    let minor = nodes.minor(0).to_string();
    output(&mut nodes.command(0, "drbdsetup", &["check-resize", &minor]))?;
    let known = nodes
        .node_dir(0)
        .join(format!("lib/drbd-minor-{minor}.lkbd"));
    let known = std::fs::read_to_string(known)?;
    let disk = nodes.disk(0).display().to_string();
    ensure!(known.contains(&disk) && known.contains("uuid:"), "{known}");
    // Data is replaced by the peer's.
    nodes.stock(0, &["invalidate", "r0"])?;
    nodes.wait_in_sync()?;
    nodes.stock(0, &["wait-sync", "r0"])?;
    nodes.stock(0, &["pause-sync", "r0"])?;
    nodes.stock(0, &["resume-sync", "r0"])?;
    nodes.stock(0, &["suspend-io", "r0"])?;
    nodes.stock(0, &["resume-io", "r0"])?;
    let gi = nodes.stock(0, &["get-gi", "r0"])?;
    ensure!(gi.trim().split(':').count() == 16, "{gi}");
    let registered = nodes.node_dir(0).join("run/drbd-resource-r0.conf");
    ensure!(
        registered.is_symlink(),
        "drbdadm registers what it brings up"
    );
    nodes.stock(0, &["down", "r0"])?;
    ensure!(!registered.is_symlink(), "still registered");
    ensure!(nodes.asked(0, &["status"])? == "# No currently configured DRBD found.\n");
    // Without a daemon's object the tools ask the metadata on the disk.
    let gi_of_disk = nodes.stock(0, &["get-gi", "r0"])?;
    ensure!(gi_of_disk.trim().split(':').count() == 16, "{gi_of_disk}");
    nodes.stock(0, &["up", "r0"])?;
    nodes.wait_in_sync()?;
    nodes.stock(0, &["down", "all"])?;
    nodes.stock(1, &["down", "all"])?;
    Ok(())
}

#[test]
fn what_the_core_refuses_is_refused_with_exit_code_and_name() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "net { protocol C; }",
        test: 3,
        daemon: &["--no-device"],
    })?;
    // Without metadata the original's hint appears.
    let failed = nodes.stock_raw(0, &["up", "r0"])?;
    ensure!(!failed.status.success(), "{failed:?}");
    nodes.stock(0, &["down", "r0"])?;
    nodes.stock(0, &["create-md", "--force", "r0"])?;
    nodes.stock(0, &["up", "r0"])?;
    // Inconsistent data is not promoted: exit code 17.
    let refused = nodes.stock_raw(0, &["primary", "r0"])?;
    ensure!(refused.status.code() == Some(17), "{refused:?}");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        text.contains("State change failed: (-2) Need access to UpToDate data"),
        "{text}"
    );
    // A disk in use keeps its metadata.
    let refused = nodes.stock_raw(0, &["create-md", "--force", "r0"])?;
    ensure!(refused.status.code() == Some(20), "{refused:?}");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(text.contains("is configured!"), "{text}");
    ensure!(nodes.asked(0, &["role", "r0"])?.trim() == "Secondary");
    nodes.stock(0, &["down", "r0"])?;
    Ok(())
}

#[test]
fn debians_drbdadm_verifies_and_resizes_a_volume_in_use() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "net { protocol C; verify-alg crc32c; }",
        test: 12,
        daemon: &["--no-device"],
    })?;
    nodes.bring_up()?;
    nodes.stock(0, &["verify", "r0"])?;
    nodes.stock(0, &["wait-sync", "r0"])?;
    nodes.stock(1, &["wait-sync", "r0"])?;
    let size_kib = |node: usize| -> Result<u64> {
        let status = nodes.status(node)?;
        let size = status["devices"][0]["size"].as_u64();
        size.context("a size")
    };
    let before = size_kib(0)?;
    for node in 0..2 {
        let image = nodes.node_dir(node).join("image");
        std::fs::File::options()
            .write(true)
            .open(image)?
            .set_len(64 << 20)?;
        output(
            std::process::Command::new("losetup")
                .arg("-c")
                .arg(nodes.disk(node)),
        )?;
    }
    // There is no /sys/block/drbdMINOR whose size could be watched, and drbdadm does not mind.
    nodes.stock(0, &["resize", "r0"])?;
    let grown = size_kib(0)?;
    ensure!(
        grown > before + (15 << 10),
        "{before} KiB became {grown} KiB"
    );
    nodes.wait("the peer has grown", |_| Ok(size_kib(1)? == grown))?;
    nodes.wait_in_sync()?;
    nodes.stock(0, &["resize", "--size=40M", "r0"])?;
    ensure!(size_kib(0)? == 40 << 10, "{} KiB", size_kib(0)?);
    nodes.wait("the peer has shrunk", |_| Ok(size_kib(1)? == 40 << 10))?;
    // Both nodes know the size that was asked for. The configuration has none, which `adjust` sees;
    // with the same size there is nothing left to do.
    for node in 0..2 {
        let shown = nodes.asked(node, &["show", "r0"])?;
        ensure!(shown.contains("81920s"), "{shown}");
        let planned = nodes.stock(node, &["-d", "adjust", "r0"])?;
        let call = format!("drbdsetup resize {}\n", nodes.minor(node));
        ensure!(planned.contains(&call), "{planned}");
    }
    let lines = "net { protocol C; verify-alg crc32c; }\n disk { size 40M; }";
    nodes.configure(lines)?;
    ensure!(nodes.stock(0, &["-d", "adjust", "r0"])?.is_empty());
    // Other disk options leave the size alone.
    nodes.configure(&lines.replace("size 40M;", "size 40M; disk-timeout 50;"))?;
    nodes.stock(0, &["adjust", "r0"])?;
    ensure!(nodes.stock(0, &["-d", "adjust", "r0"])?.is_empty());
    ensure!(nodes.asked(0, &["show", "r0"])?.contains("81920s"));
    // What one node changes of the connection is what its peer shows, and keeps.
    nodes.asked(
        0,
        &["net-options", "r0", "1", "--protocol=A", "--csums-alg=sha1"],
    )?;
    let has = |node: usize, word: &str| -> Result<bool> {
        Ok(nodes.asked(node, &["show", "r0"])?.contains(word))
    };
    nodes.wait("the peer shows it", |_| {
        Ok(has(1, "csums-alg       \t\"sha1\";")? && has(1, "protocol        \tA;")?)
    })?;
    nodes.asked(1, &["net-options", "r0", "0", "--ping-int=9"])?;
    ensure!(has(1, "protocol        \tA;")? && has(1, "ping-int        \t9;")?);
    Ok(())
}
