//! The calls of LINSTOR's satellite, drbdtop and ha_cluster_exporter (config-and-cli.md, 21.2, 21.4,
//! 21.5), word for word, with our own drbdadm, and what they read from the answers.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::nodes::{Nodes, Setup, can_run_stock_tools};
use crate::reactor;

/// Our drbdadm; what it printed.
fn adm(nodes: &Nodes, node: usize, line: &str) -> Result<String> {
    let mut words = vec!["drbdadm"];
    words.extend(line.split(' '));
    let output = nodes.tool(node, "lockstep", &words)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "drbdadm {line}: {said}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn setup(nodes: &Nodes, node: usize, line: &str) -> Result<String> {
    let words: Vec<&str> = line.split(' ').collect();
    nodes.asked(node, &words)
}

/// Every number must fit into 64 bits with a sign, or a whole scrape fails.
fn check_numbers(value: &serde_json::Value) -> Result<()> {
    match value {
        serde_json::Value::Number(number) => {
            ensure!(number.is_f64() || number.as_i64().is_some(), "{number}");
        }
        serde_json::Value::Array(all) => all.iter().try_for_each(check_numbers)?,
        serde_json::Value::Object(all) => all.values().try_for_each(check_numbers)?,
        _ => {}
    }
    Ok(())
}

fn has(value: &serde_json::Value, keys: &str) -> Result<()> {
    for key in keys.split(' ') {
        ensure!(value.get(key).is_some(), "no '{key}' in {value}");
    }
    Ok(())
}

#[test]
fn the_calls_of_management_programs_and_monitors_are_answered_as_they_need() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "",
        test: 16,
        daemon: &["--no-device"],
    })?;
    // A satellite tries a generated file beside the others, makes metadata, adjusts.
    for node in 0..2 {
        let conf = nodes.node_dir(node).join("drbd.conf");
        let tried = nodes.node_dir(node).join("tried.res");
        let text = fs::read_to_string(&conf)?;
        let from = text.find("resource").context("a resource")?;
        fs::write(&tried, &text[from..])?;
        let (conf, tried) = (conf.display(), tried.display());
        adm(
            &nodes,
            node,
            &format!("--config-to-test {tried} --config-to-exclude {conf} sh-nop"),
        )?;
        ensure!(adm(&nodes, node, "sh-list-adjustable all")? == "r0\n");
        adm(&nodes, node, "-vvv --max-peers 7 -- --force create-md r0/0")?;
        adm(&nodes, node, "-vvv adjust r0")?;
        ensure!(adm(&nodes, node, "sh-list-adjustable all")?.is_empty());
    }
    let wait = "--wait-after-sb=yes --wfc-timeout=60 r0";
    setup(&nodes, 0, &format!("wait-connect-resource {wait}"))?;
    setup(&nodes, 0, "--force primary r0")?;
    setup(&nodes, 0, &format!("wait-sync-resource {wait}"))?;
    nodes.wait_in_sync()?;
    setup(&nodes, 0, "status")?;
    setup(&nodes, 0, "status r0")?;
    ensure!(setup(&nodes, 0, "show-gi r0 1 0")?.contains(":1:1:1:"));
    ensure!(setup(&nodes, 0, "events2 all --now")?.ends_with("\nexists -\n"));
    for verb in ["resource-options", "peer-device-options", "new-peer"] {
        let help = setup(&nodes, 0, &format!("xml-help {verb}"))?;
        ensure!(
            help.starts_with(&format!("<command name=\"{verb}\">")),
            "{help}"
        );
    }
    adm(&nodes, 0, "suspend-io r0")?;
    setup(&nodes, 0, &format!("resume-io {}", nodes.minor(0)))?;
    adm(&nodes, 0, "-vvv secondary r0")?;
    adm(&nodes, 0, "-vvv primary r0")?;

    // drbdtop: a time of 32 characters and a blank, then the fields with their statistics.
    let shown = setup(&nodes, 0, "events2 --timestamps --statistics --now")?;
    for line in shown.lines() {
        let (time, event) = line.split_at_checked(33).context("a time")?;
        ensure!(time.as_bytes()[10] == b'T' && time.ends_with(' '), "{line}");
        reactor::parse(event)?;
    }
    let calls = adm(&nodes, 0, "-d connect all")?;
    for call in calls.lines() {
        ensure!(call.starts_with("drbdsetup connect r0 "), "{call}");
        ensure!(call.split(' ').count() == 4, "{call}");
    }

    // ha_cluster_exporter.
    let status: serde_json::Value = serde_json::from_str(&setup(&nodes, 0, "status --json")?)?;
    check_numbers(&status)?;
    has(&status[0], "name role devices connections")?;
    has(
        &status[0]["devices"][0],
        "volume written read al-writes bm-writes upper-pending lower-pending quorum disk-state",
    )?;
    let connection = &status[0]["connections"][0];
    has(connection, "peer-node-id peer-role peer_devices")?;
    has(
        &connection["peer_devices"][0],
        "volume received sent pending unacked peer-disk-state percent-in-sync",
    )?;

    // A resource goes: first one peer, then all.
    adm(&nodes, 0, "disconnect r0")?;
    setup(&nodes, 0, "del-peer r0 1")?;
    setup(&nodes, 0, "forget-peer r0 1")?;
    setup(&nodes, 0, "secondary r0")?;
    for node in 0..2 {
        setup(&nodes, node, "down r0")?;
        ensure!(setup(&nodes, node, "events2 --now r0")? == "exists -\n");
    }
    Ok(())
}
