//! Two nodes that are set up in the words of DRBD 8.4, the same ones on both: nobody has a number.

use anyhow::{Result, ensure};

use crate::nodes::{Nodes, Setup, can_run_stock_tools};

#[test]
fn the_words_of_8_4_make_a_pair_without_node_ids() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "",
        test: 15,
        daemon: &["--no-device"],
    })?;
    let address = |node: usize| format!("ipv4:127.8.15.{}:7788", node + 1);
    let (alfa, bravo) = (address(0), address(1));
    let connect = |node: usize| -> Result<()> {
        let (own, other) = if node == 0 {
            (&alfa, &bravo)
        } else {
            (&bravo, &alfa)
        };
        nodes.asked(node, &["connect", "r0", own, other, "--protocol=C"])?;
        Ok(())
    };
    for node in 0..2 {
        nodes.stock(node, &["create-md", "--force", "r0"])?;
        let minor = nodes.minor(node).to_string();
        let disk = nodes.disk(node).display().to_string();
        nodes.asked(node, &["new-resource", "r0"])?;
        nodes.asked(node, &["new-minor", "r0", &minor, "0"])?;
        let attach = [
            &minor,
            "attach",
            &disk,
            &disk,
            "internal",
            "--c-max-rate=50M",
        ];
        nodes.asked(node, &attach)?;
        connect(node)?;
        let shown = nodes.asked(node, &["show", "r0"])?;
        ensure!(
            shown.contains("# This resource is in drbd-8.4 compatibility mode!"),
            "{shown}"
        );
        ensure!(shown.contains("c-max-rate      \t51200k"), "{shown}");
    }
    for node in 0..2 {
        let minor = nodes.minor(node).to_string();
        nodes.asked(node, &[&minor, "wait-connect", "--wfc-timeout=60"])?;
    }
    nodes.asked(0, &["--force", "primary", "r0"])?;
    nodes.wait_in_sync()?;
    let said = nodes.tool(0, "lockstep", &["proc"])?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    ensure!(
        said.contains(": cs:Connected ro:Primary/Secondary ds:UpToDate/UpToDate C r-----\n"),
        "{said}"
    );

    // Away and back.
    nodes.asked(1, &["disconnect", "r0", &bravo, &alfa])?;
    nodes.wait("the Primary is alone", |nodes| {
        Ok(nodes.asked(0, &["cstate", "r0", "1"])? == "Connecting\n")
    })?;
    connect(1)?;
    nodes.wait_in_sync()?;
    nodes.asked(0, &["secondary", "r0"])?;
    nodes.asked(1, &["primary", "r0"])?;
    nodes.wait("the other one is Primary", |nodes| {
        Ok(nodes.status(0)?["connections"][0]["peer-role"] == "Primary")
    })?;
    for node in 0..2 {
        nodes.asked(node, &["down", "r0"])?;
    }
    Ok(())
}
