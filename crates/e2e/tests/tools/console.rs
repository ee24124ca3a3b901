//! What Lockstep adds: status with advice, explain, top, recovery of a split brain, metrics.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{has_program, run};

use crate::exporters;
use crate::nodes::{Nodes, Setup, can_run_stock_tools};

fn get(path: &str) -> Result<String> {
    exporters::get(METRICS, path)
}

/// An address of this test's own network.
const METRICS: &str = "127.8.7.1:9942";

#[test]
fn a_split_brain_is_explained_and_ended_by_choice() -> Result<()> {
    if !can_run_stock_tools() || !has_program("qemu-io") {
        return Ok(());
    }
    let mut nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "net { protocol C; }",
        test: 7,
        daemon: &["--no-device"],
    })?;
    nodes.bring_up()?;
    let said = |node: usize, args: &[&str], code: i32| -> Result<String> {
        let output = nodes.tool(node, "lockstep", args)?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(code), "{args:?}: {output:?}");
        Ok(text + &error)
    };
    let good = said(0, &["status"], 0)?;
    ensure!(
        good.contains("bravo  Connected  Secondary  UpToDate"),
        "{good}"
    );
    said(0, &["recover", "r0"], 1)?;

    // Both sides are written while apart: 64 KiB here, 256 KiB there.
    let write = |node: usize, kib: u32| {
        let socket = nodes.node_dir(node).join("nbd.sock");
        run(Command::new("qemu-io")
            .args([
                "-f",
                "raw",
                "-c",
                &format!("write -P {node} 0 {kib}k"),
                "-c",
                "flush",
            ])
            .arg(format!("nbd+unix:///r0/0?socket={}", socket.display())))
    };
    nodes.stock(0, &["disconnect", "r0"])?;
    write(0, 64)?;
    nodes.stock(0, &["secondary", "r0"])?;
    nodes.stock(1, &["primary", "--force", "r0"])?;
    write(1, 256)?;
    nodes.stock(1, &["secondary", "r0"])?;
    nodes.stock(0, &["connect", "r0"])?;
    nodes.wait("both StandAlone", |c| {
        let alone = |node: usize| -> Result<bool> {
            Ok(c.status(node)?["connections"][0]["connection-state"] == "StandAlone")
        };
        Ok(alone(0)? && alone(1)?)
    })?;
    let bad = said(0, &["status"], 3)?;
    ensure!(bad.contains("lockstep recover r0"), "{bad}");
    ensure!(bad.contains("64.0 KiB changed here since"), "{bad}");
    let why = said(0, &["explain", "r0"], 0)?;
    ensure!(
        why.contains("current generation") && why.contains("quorum is off"),
        "{why}"
    );

    // Nothing is discarded without the other side's numbers.
    let refused = said(0, &["recover", "r0", "--discard-mine", "--yes"], 1)?;
    ensure!(refused.contains("nothing was done"), "{refused}");
    let files = [0, 1].map(|node| nodes.node_dir(node).join("status.json"));
    for node in [0, 1] {
        fs::write(
            &files[node],
            nodes.asked(node, &["status", "r0", "--json"])?,
        )?;
    }
    let file = |node: usize| format!("--peer-status={}", files[node].display());
    let shown = said(0, &["recover", "r0", &file(1)], 0)?;
    ensure!(
        shown.contains("64.0 KiB  lost with --discard-mine"),
        "{shown}"
    );
    ensure!(
        shown.contains("256.0 KiB  lost with --keep-mine"),
        "{shown}"
    );
    said(
        0,
        &["recover", "r0", &file(1), "--discard-mine", "--yes"],
        0,
    )?;
    said(1, &["recover", "r0", &file(0), "--keep-mine"], 0)?;
    nodes.wait_in_sync()?;
    said(0, &["status"], 0)?;
    let top = said(1, &["top", "--once", "--interval=0.1"], 0)?;
    ensure!(top.contains("r0/0"), "{top}");

    // Metrics, on a daemon that gives them out.
    nodes.stock(0, &["down", "r0"])?;
    nodes.kill(0)?;
    nodes.start(0, &["--no-device", "--metrics", METRICS])?;
    nodes.stock(0, &["up", "r0"])?;
    nodes.wait_in_sync()?;
    nodes.stock(0, &["primary", "r0"])?;
    let socket = nodes.node_dir(0).join("nbd.sock");
    run(Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write 0 4k", "-c", "write 4k 4k"])
        .arg(format!("nbd+unix:///r0/0?socket={}", socket.display())))?;
    let page = get("/metrics")?;
    let (head, body) = page.split_once("\r\n\r\n").context("an answer")?;
    ensure!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    for line in [
        "lockstep_resource_role{resource=\"r0\",role=\"Primary\"} 1",
        "lockstep_request_bytes_total{resource=\"r0\",volume=\"0\",kind=\"write\"} 8192",
        "lockstep_request_duration_seconds_count{resource=\"r0\",volume=\"0\",kind=\"write\"} 2",
        "lockstep_peer_device_out_of_sync_bytes{resource=\"r0\",peer=\"bravo\",volume=\"0\"} 0",
    ] {
        ensure!(
            body.lines().any(|found| found == line),
            "{line}\nis not in\n{body}"
        );
    }
    ensure!(get("/")?.starts_with("HTTP/1.1 404"), "another path");

    // The same under the names of exporters of others, and as the text that they read.
    let reactor = get("/metrics/drbd-reactor")?;
    for line in [
        "drbd_resource_role{name=\"r0\",drbd_resource_role=\"Primary\"} 1",
        "drbd_connection_state{name=\"r0\",conn_name=\"bravo\",drbd_connection_state=\"Connected\"} 1",
        "drbd_device_state{name=\"r0\",volume=\"0\",minor=\"30700\",drbd_device_state=\"UpToDate\"} 1",
    ] {
        ensure!(
            reactor.lines().any(|found| found == line),
            "{line}\nis not in\n{reactor}"
        );
    }
    let text = nodes.tool(0, "lockstep", &["proc"])?.stdout;
    let text = String::from_utf8(text)?;
    ensure!(text.contains("30700: cs:Connected ro:Primary/"), "{text}");
    let page = get("/metrics/node-exporter")?;
    exporters::reads_as(nodes.node_dir(0), &text, &page)?;
    Ok(())
}
