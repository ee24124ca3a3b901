//! drbdmon of drbd-utils, unchanged, in a terminal of its own.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::has_program;

use crate::nodes::{Nodes, Setup, can_run_stock_tools};

#[test]
fn drbdmon_shows_the_resource_and_its_peer() -> Result<()> {
    if !can_run_stock_tools() || !has_program("drbdmon") || !has_program("script") {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "",
        test: 8,
        daemon: &["--no-device"],
    })?;
    nodes.bring_up()?;
    let screen = nodes.node_dir(0).join("screen");
    let file = screen.to_str().context("the path is UTF-8")?;
    let inner = "stty rows 40 cols 120; exec drbdmon --ascii";
    let mut terminal = nodes
        .command(0, "script", &["-q", "-f", "-c", inner, file])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    let mut keys = terminal.stdin.take().context("standard input")?;
    let shown = nodes.wait("the resource on its screen", |_| {
        let text = String::from_utf8_lossy(&fs::read(&screen)?).into_owned();
        Ok(text.contains("r0") && text.contains("bravo") && text.contains("Primary"))
    });
    // It ends with its key, also when nothing was shown.
    keys.write_all(b"q")?;
    if shown.is_err() {
        terminal.kill()?;
    }
    let ended = terminal.wait()?;
    shown?;
    ensure!(ended.success(), "{ended}");
    Ok(())
}
