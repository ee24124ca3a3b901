//! Wrong configurations and wrong disks: one clear message each, and nothing is changed.

use std::fs;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::nodes::{Nodes, Setup, can_run_stock_tools, output};

/// Our drbdadm on a node; exit code and what it said on standard error.
fn adm(nodes: &Nodes, node: usize, args: &[&str]) -> Result<(Option<i32>, String)> {
    let mut all = vec!["drbdadm"];
    all.extend(args);
    let output = nodes.tool(node, "lockstep", &all)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok((output.status.code(), said))
}

#[test]
fn a_wrong_configuration_is_told_by_place_and_changes_nothing() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "net { ping-int 9; }",
        test: 9,
        daemon: &["--no-device"],
    })?;
    nodes.stock(0, &["create-md", "--force", "r0"])?;
    nodes.stock(0, &["up", "r0"])?;
    let before = nodes.asked(0, &["show"])?;
    let conf = nodes.node_dir(0).join("drbd.conf");
    let good = fs::read_to_string(&conf)?;
    let include = nodes.node_dir(0).join("more.res");
    fs::write(&include, "resource other {\n  net { protocol C }\n}\n")?;
    let included = format!("{good}include \"{}\";\n", include.display());
    let cases: [(&str, String, &[&str]); 7] = [
        (
            "an unknown option",
            good.replace("ping-int 9", "ping-itn 9"),
            &["drbd.conf:3: ", "did you mean 'ping-int'?"],
        ),
        (
            "a value out of range",
            good.replace("ping-int 9", "ping-int 900"),
            &["drbd.conf:3: ", "too big", "1..120", "seconds"],
        ),
        (
            "two hosts with one node-id",
            good.replace("node-id 1;", "node-id 0;"),
            &["conflicting use of node-id", "first used here"],
        ),
        (
            "one address twice",
            good.replace("127.8.9.2", "127.8.9.1"),
            &["drbd.conf:", "127.8.9.1:7788"],
        ),
        (
            "one minor twice on a host",
            good.replace(
                "meta-disk internal; }\n  }\n  on bravo",
                "meta-disk internal; }\n volume 1 { device minor 30900; disk /x; }\n }\n on bravo",
            ),
            &["conflicting use of device-minor", "first used here"],
        ),
        (
            "an error in an included file",
            included,
            &["more.res:2: Parse error: ';' expected", "but got '}'"],
        ),
        (
            "a file that was cut off",
            good[..good.len() / 2].to_owned(),
            &["drbd.conf:"],
        ),
    ];
    for (what, text, wanted) in cases {
        ensure!(text != good, "{what}: the test changes nothing");
        fs::write(&conf, text)?;
        for command in ["adjust", "up", "down"] {
            let (code, said) = adm(&nodes, 0, &[command, "r0"])?;
            ensure!(code == Some(10), "{what}: {command} gave {code:?}: {said}");
            for part in wanted {
                ensure!(said.contains(part), "{what}: no '{part}' in: {said}");
            }
        }
        ensure!(
            nodes.asked(0, &["show"])? == before,
            "{what} changed something"
        );
    }
    fs::write(&conf, good)?;
    ensure!(adm(&nodes, 0, &["adjust", "r0"])?.0 == Some(0));
    Ok(())
}

#[test]
fn metadata_that_does_not_fit_is_named_and_not_attached() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 3,
        lines: "",
        test: 10,
        daemon: &["--no-device"],
    })?;
    let disk = nodes.disk(0).display().to_string();
    let minor = nodes.minor(0).to_string();
    let attach = || -> Result<(Option<i32>, String)> {
        let output = nodes.setup(0, &["attach", &minor, &disk, &disk, "internal"])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((output.status.code(), said))
    };
    nodes.stock(0, &["new-resource", "r0"])?;
    nodes.stock(0, &["new-minor", "r0"])?;
    nodes.stock(0, &["new-peer", "r0"])?;
    // None at all.
    let (code, said) = attach()?;
    ensure!(code == Some(10), "{said}");
    ensure!(said.contains("create-md"), "{said}");
    // For one peer, where there are two.
    let meta = |args: &[&str]| -> Result<String> {
        let mut all = vec!["--force", &minor, "v09", &disk, "internal"];
        all.extend(args);
        output(
            nodes
                .command(0, "drbdmeta", &all)
                .env("LOCKSTEP_PLAIN_FILES", "1"),
        )
    };
    meta(&["create-md", "1"])?;
    let (code, said) = attach()?;
    ensure!(code == Some(10), "too few slots: {code:?} {said}");
    ensure!(
        said.contains("1 bitmap slots, all taken; node 2 needs"),
        "{said}"
    );
    ensure!(nodes.asked(0, &["dstate", &minor])?.starts_with("Diskless"));
    // Of 8.4, which has room for one peer.
    meta(&["wipe-md"])?;
    output(Command::new("/usr/sbin/drbdmeta").args([
        "--force",
        "-",
        "v08",
        &disk,
        "internal",
        "create-md",
    ]))?;
    let (code, said) = attach()?;
    ensure!(code == Some(10), "v08: {code:?} {said}");
    ensure!(
        said.contains("version v08, which knows of one peer, but 2 are configured"),
        "{said}"
    );
    ensure!(nodes.asked(0, &["dstate", &minor])?.starts_with("Diskless"));
    Ok(())
}
