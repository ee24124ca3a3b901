//! The exact calls of drbd-reactor (config-and-cli.md, 21.1), and what it reads from the answers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{PATIENCE, has_program, run};

use crate::lines::Lines;
use crate::nodes::{Nodes, Setup, can_run_stock_tools};

/// Fields that a complete line carries, and whether each is a number.
const FIELDS: &[(&str, &[&str])] = &[
    (
        "resource",
        &[
            "name",
            "role",
            "suspended",
            "write-ordering",
            "force-io-failures",
            "may_promote",
            "#promotion_score",
        ],
    ),
    (
        "device",
        &[
            "name",
            "#volume",
            "#minor",
            "disk",
            "client",
            "backing_dev",
            "quorum",
            "#size",
            "#read",
            "#written",
            "#al-writes",
            "#bm-writes",
            "#upper-pending",
            "#lower-pending",
            "al-suspended",
            "blocked",
            "open",
        ],
    ),
    (
        "connection",
        &[
            "name",
            "#peer-node-id",
            "conn-name",
            "connection",
            "role",
            "congested",
            "#ap-in-flight",
            "#rs-in-flight",
        ],
    ),
    (
        "peer-device",
        &[
            "name",
            "conn-name",
            "#volume",
            "#peer-node-id",
            "replication",
            "peer-disk",
            "peer-client",
            "resync-suspended",
            "#received",
            "#sent",
            "#out-of-sync",
            "#pending",
            "#unacked",
        ],
    ),
    (
        "path",
        &[
            "name",
            "#peer-node-id",
            "conn-name",
            "local",
            "peer",
            "established",
        ],
    ),
];

/// A line as the reader takes it: every field of its object is there and numbers are numbers.
pub(crate) fn parse(line: &str) -> Result<(String, BTreeMap<String, String>)> {
    let mut words = line.split(' ');
    let verb = words.next().context("a verb")?;
    // Runs of handlers are not read.
    if ["call", "response"].contains(&verb) {
        return Ok((verb.to_owned(), BTreeMap::new()));
    }
    ensure!(
        ["exists", "create", "change", "destroy"].contains(&verb),
        "{line}"
    );
    let object = words.next().context("an object")?;
    if object == "-" || verb == "destroy" {
        return Ok((format!("{verb} {object}"), BTreeMap::new()));
    }
    let mut fields = BTreeMap::new();
    for word in words {
        let (key, value) = word.split_once(':').with_context(|| line.to_owned())?;
        fields.insert(key.to_owned(), value.to_owned());
    }
    let (_, wanted) = FIELDS
        .iter()
        .find(|(name, _)| *name == object)
        .with_context(|| line.to_owned())?;
    for name in *wanted {
        let key = name.trim_start_matches('#');
        let value = fields
            .get(key)
            .with_context(|| format!("no '{key}' in: {line}"))?;
        ensure!(
            !name.starts_with('#') || value.parse::<u64>().is_ok(),
            "'{key}' is no number: {line}"
        );
    }
    Ok((format!("{verb} {object}"), fields))
}

#[test]
fn drbd_reactors_calls_are_answered_as_it_needs() -> Result<()> {
    if !can_run_stock_tools() || !has_program("qemu-io") {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "options { quorum majority; auto-promote no; } net { rr-conflict retry-connect; }",
        test: 4,
        daemon: &["--no-device"],
    })?;
    nodes.bring_up()?;
    let mut events = Lines::start(nodes.command(0, "drbdsetup", &["events2", "--full", "--poll"]))?;
    events.until("the end of the initial state", |line| line == "exists -")?;
    for line in &events.seen {
        let (kind, _) = parse(line)?;
        ensure!(kind.starts_with("exists "), "before `exists -`: {line}");
    }

    // Counters come when they are asked for.
    let socket = nodes.node_dir(0).join("nbd.sock");
    run(Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write -P 7 0 1M", "-c", "flush"])
        .arg(format!("nbd+unix:///r0/0?socket={}", socket.display())))?;
    events.say("n\n")?;
    let device = events.until("counters after a poke", |line| {
        line.starts_with("change device ") && !line.contains(" written:0 ")
    })?;
    let written: u64 = parse(&device)?.1["written"].parse()?;
    ensure!(written >= 1024, "{device}");

    // Its services around a promotion.
    let ok = |args: &[&str]| nodes.asked(0, args).map(drop);
    ok(&["secondary", "r0"])?;
    let line = events.until("a promotable resource", |line| {
        line.starts_with("change resource ")
            && line.contains(" role:Secondary ")
            && line.contains(" may_promote:yes ")
    })?;
    let score: u64 = parse(&line)?.1["promotion_score"].parse()?;
    ensure!(score == 10_102, "{line}");
    ok(&["primary", "r0"])?;
    events.until("the promotion", |line| {
        line.starts_with("change resource ")
            && line.contains(" role:Primary ")
            && line.contains(" may_promote:no ")
    })?;
    ok(&["secondary", "--force=yes", "r0"])?;
    nodes.stock(0, &["adjust", "r0"])?;
    for line in nodes.stock(0, &["sh-ll-dev", "r0"])?.lines() {
        ensure!(line == "none" || line.starts_with("/dev/"), "{line}");
    }

    let shown = nodes.asked(0, &["show", "--show-defaults", "--json", "r0"])?;
    let shown: serde_json::Value = serde_json::from_str(&shown)?;
    let one = &shown
        .as_array()
        .filter(|all| all.len() == 1)
        .context("one resource")?[0];
    ensure!(one["resource"] == "r0");
    ensure!(one["options"]["auto-promote"] == false, "{one}");
    ensure!(one["options"]["quorum"] == "majority", "{one}");
    for key in [
        "on-no-quorum",
        "on-suspended-primary-outdated",
        "on-no-data-accessible",
    ] {
        ensure!(one["options"][key].is_string(), "{key} in {one}");
    }
    let net = &one["connections"][0]["net"];
    ensure!(
        net["rr-conflict"] == "retry-connect" && net["fencing"].is_string(),
        "{net}"
    );
    let status = nodes.asked(0, &["status", "--json", "r0"])?;
    let status: serde_json::Value = serde_json::from_str(&status)?;
    ensure!(status[0]["connections"][0]["name"] == "bravo");
    ensure!(status[0]["connections"][0]["peer-role"] == "Secondary");

    ok(&["down", "r0"])?;
    events.until("the end of the resource", |line| {
        line == "destroy resource name:r0"
    })?;
    ensure!(nodes.asked(0, &["events2", "--now", "r0"])? == "exists -\n");
    for line in &events.seen {
        parse(line)?;
    }
    ensure!(
        events.end()? == Some(0),
        "the end of its input ends events2"
    );
    Ok(())
}

#[test]
fn events2_ends_with_its_reader_and_says_when_the_daemon_has_gone() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let mut nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "",
        test: 5,
        daemon: &["--no-device"],
    })?;
    // The reader goes while nothing happens.
    let mut gone = nodes
        .command(0, "drbdsetup", &["events2", "--timestamps"])
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    drop(gone.stdout.take());
    ensure!(gone.wait()?.code() == Some(0));
    // The first reader's line has a time of 32 characters and a blank before it.
    let mut events = Lines::start(nodes.command(0, "drbdsetup", &["events2", "-T", "all"]))?;
    let line = events.until("the initial state", |line| line.ends_with("exists -"))?;
    ensure!(
        line.len() == 33 + "exists -".len() && line.as_bytes()[10] == b'T',
        "{line}"
    );
    nodes.kill(0)?;
    ensure!(events.end()? == Some(121), "as when the module is unloaded");
    Ok(())
}

#[test]
fn a_watcher_that_does_not_read_holds_nothing_up_and_ends_with_the_last_state() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let nodes = Nodes::new(&Setup {
        nodes: 2,
        lines: "net { protocol C; }",
        test: 14,
        daemon: &["--no-device"],
    })?;
    nodes.bring_up()?;
    let mut watcher = nodes
        .command(0, "drbdsetup", &["events2", "--full", "r0"])
        .process_group(0)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(watcher.stdout.take().context("its output")?).lines();
    let mut next = || lines.next().context("it has ended")?.context("a line");
    while next()? != "exists -" {}
    // From here on its pipe fills. Each request is answered, and each is a change to be told.
    let mut control = UnixStream::connect(nodes.node_dir(0).join("control.sock"))?;
    control.set_read_timeout(Some(PATIENCE))?;
    let mut answers = BufReader::new(control.try_clone()?).lines();
    let mut ask = |request: &str| -> Result<()> {
        writeln!(control, "{request}")?;
        let answer = answers.next().context("an answer")??;
        ensure!(
            answer.contains("\"is\":\"done\"") || answer.contains("hello"),
            "{answer}"
        );
        Ok(())
    };
    let minor = nodes.minor(0);
    ask(r#"{"do":"hello","version":1}"#)?;
    for _ in 0..ROUNDS {
        ask(&format!(r#"{{"do":"suspend-io","minor":{minor}}}"#))?;
        ask(&format!(r#"{{"do":"resume-io","minor":{minor}}}"#))?;
    }
    ask(r#"{"do":"secondary","resource":"r0"}"#)?;
    // What it has missed is left out; what it says in the end is how things are.
    let mut told = 0;
    let last = loop {
        let line = next()?;
        told += 1;
        if line.starts_with("change resource") && line.contains(" role:Secondary ") {
            break line;
        }
    };
    ensure!(last.contains(" suspended:no "), "{last}");
    ensure!(
        told < 2 * ROUNDS,
        "{told} lines: it missed nothing, so the test shows nothing"
    );
    watcher.kill()?;
    watcher.wait()?;
    Ok(())
}

/// Changes that fill a pipe, a socket and the daemon's backlog of one watcher.
const ROUNDS: usize = 1000;
