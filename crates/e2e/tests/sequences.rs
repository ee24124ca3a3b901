//! Commands as somebody types them who does not know better: twice, in the wrong order, in the wrong
//! state. Each answers at once, with the code and the reason that the original has, and leaves a
//! cluster that works. Meanwhile others watch.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount};

/// A number that no other test uses; minors are 9500, 9510 and 9520.
const TEST: u8 = 95;
/// No command of these waits for anything longer.
const AT_ONCE: Duration = Duration::from_secs(15);

/// A command, its exit code, and what it says.
struct Step(&'static str, i32, &'static str);

/// Runs steps such as `0 adm connect r0`.
fn run(cluster: &Cluster, steps: &[Step]) -> Result<()> {
    for Step(line, code, says) in steps {
        let words: Vec<&str> = line.split(' ').collect();
        let node: usize = words[0].parse()?;
        let begin = Instant::now();
        let output = match words[1] {
            "adm" => cluster.adm_raw(node, &words[2..])?,
            _ => cluster.setup_raw(node, &words[2..])?,
        };
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        ensure!(
            output.status.code() == Some(*code) && text.contains(says),
            "{line}: {}, expected {code} and {says:?}:\n{text}",
            output.status
        );
        ensure!(begin.elapsed() < AT_ONCE, "{line}: {:?}", begin.elapsed());
    }
    Ok(())
}

const NOTHING_IS_UP: [Step; 12] = [
    Step("0 adm down r0", 0, ""),
    Step("0 adm down r0", 0, ""),
    Step("0 adm status r0", 10, "r0: No such resource"),
    Step("0 adm role r0", 10, "r0: Unknown resource"),
    Step("0 adm cstate r0", 10, "No such connection"),
    Step("0 adm primary r0", 10, "(158) Unknown resource"),
    Step("0 adm resize r0", 10, "(127) Device minor not allocated"),
    Step("0 adm suspend-io r0", 10, "(127)"),
    Step("0 adm wait-connect r0", 0, ""),
    Step("0 adm up nosuch", 1, "not defined in your config"),
    Step("0 setup primry r0", 20, "did you mean 'primary'?"),
    Step("0 setup primary r0 r1", 20, "Excess arguments"),
];

const EVERYTHING_IS_UP: [Step; 33] = [
    Step("0 adm up r0", 1, "(174) Already exists"),
    Step("0 adm create-md --force r0", 20, "is configured!"),
    Step("0 setup new-minor r0 9599 0", 10, "(161)"),
    Step("0 setup new-peer r0 0", 10, "(171) Invalid peer-node-id"),
    Step("0 setup new-peer r0 5 --_name=bravo", 10, "(174)"),
    Step("0 setup new-peer r0 5 --_name=x", 0, ""),
    Step("0 setup connect r0 5", 10, "(162)"),
    Step("0 setup del-peer r0 5", 0, ""),
    Step("0 setup del-peer r0 5", 10, "there is no connection"),
    Step("0 setup forget-peer r0 5", 0, ""),
    Step("0 setup forget-peer r0 1", 10, "(125)"),
    Step("0 adm connect r0", 10, "(125)"),
    Step("0 adm connect r0:nobody", 1, "Not a valid connection"),
    Step("0 adm attach r0", 20, "is configured!"),
    Step("1 adm primary r0", 11, "(-1) Multiple primaries"),
    Step("1 adm primary --force r0", 11, "(-1)"),
    Step("0 adm primary r0", 0, ""),
    Step("0 adm primary --force r0", 0, ""),
    Step("1 adm outdate r0", 20, ""),
    Step("0 adm resume-sync r0", 10, "(135)"),
    Step("0 adm new-current-uuid r0/0", 10, "(151)"),
    Step("0 setup del-minor 9500", 10, "(160)"),
    Step("0 setup del-resource r0", 10, "(159)"),
    Step("0 setup rename-resource r0 r0", 10, "(174)"),
    Step("0 setup resize 9599", 10, "(127)"),
    Step("0 adm --size=4G resize r0", 10, "(111)"),
    Step("0 setup verify r0 1 0 --start=4M --stop=2M", 10, "(162)"),
    Step("0 setup verify r0 1 7", 10, "(127)"),
    Step(
        "0 setup wait-connect-resource r0 -t 300001",
        20,
        "out of range",
    ),
    Step("0 setup wait-connect-resource r0 -t 5", 0, ""),
    Step("0 setup wait-sync-resource r0 -t 5", 0, ""),
    Step("0 adm suspend-io r0", 0, ""),
    Step("0 adm suspend-io r0", 0, ""),
];

const WHILE_SUSPENDED: [Step; 8] = [
    Step("0 adm verify r0:bravo", 0, ""),
    Step("0 adm verify r0:bravo", 11, "(-8)"),
    Step("1 adm verify r0:alfa", 11, "(-8)"),
    Step("0 adm disconnect r0:charlie", 0, ""),
    Step("0 adm disconnect r0:charlie", 0, ""),
    Step("0 adm connect r0:charlie", 0, ""),
    Step("0 adm resume-io r0", 0, ""),
    Step("0 adm resume-io r0", 0, ""),
];

const A_RESYNC: [Step; 8] = [
    Step("0 adm pause-sync r0:bravo", 0, ""),
    Step("0 adm pause-sync r0:bravo", 10, "(134)"),
    Step("1 adm invalidate r0", 0, ""),
    Step("1 adm invalidate r0", 11, ""),
    Step("0 adm invalidate-remote r0:bravo", 11, "(-8)"),
    Step("0 adm verify r0:bravo", 11, "(-8)"),
    Step("1 adm resume-sync r0:alfa", 10, "(157)"),
    Step("0 adm resume-sync r0:bravo", 0, ""),
];

const WITHOUT_THE_DISK: [Step; 8] = [
    Step("0 adm detach r0", 0, ""),
    Step("0 adm detach r0", 0, ""),
    Step("0 setup new-current-uuid 9500", 10, "(138)"),
    Step("0 setup verify r0 1 0", 10, "(138)"),
    Step("0 setup invalidate-remote r0 1 0", 10, "(138)"),
    Step("0 setup invalidate 9500", 10, "(138)"),
    Step("0 adm adjust r0", 0, ""),
    Step("0 adm adjust r0", 0, ""),
];

/// Watches a node by `events2` and `status --json` until told to end; gives the number of lines.
fn watch(cluster: &Cluster, node: usize, ends: &AtomicBool) -> Result<usize> {
    let mut events = Command::new(cluster.dir().join("bin/drbdsetup"))
        .arg("events2")
        .env("LOCKSTEP_DIR", cluster.node_dir(node))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(events.stdout.take().context("its output")?).lines();
    let reader = std::thread::spawn(move || -> Result<usize> {
        let verbs = ["exists", "create", "change", "destroy", "rename"];
        let verbs = [&verbs[..], &["call", "response"]].concat();
        let mut count = 0;
        for line in lines {
            let line = line?;
            let verb = line.split(' ').next().unwrap_or_default();
            ensure!(verbs.contains(&verb), "{line}");
            count += 1;
        }
        Ok(count)
    });
    while !ends.load(Ordering::Relaxed) {
        let output = cluster.setup_raw(node, &["status", "--json"])?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "{output:?}");
        let _: serde_json::Value = serde_json::from_str(&text).context(text.into_owned())?;
        ensure!(events.try_wait()?.is_none(), "events2 has ended");
        std::thread::sleep(Duration::from_millis(20));
    }
    events.kill()?;
    events.wait()?;
    reader.join().expect("the reader does not panic")
}

fn story(cluster: &Cluster) -> Result<()> {
    run(cluster, &EVERYTHING_IS_UP)?;
    run(cluster, &WHILE_SUSPENDED)?;
    cluster.wait_in_sync()?;
    run(cluster, &A_RESYNC)?;
    cluster.wait_in_sync()?;
    run(cluster, &WITHOUT_THE_DISK)?;
    cluster.wait_in_sync()?;
    let renamed = [
        Step("2 setup rename-resource r0 other", 0, ""),
        Step("2 adm status r0", 10, "No such resource"),
        Step("2 setup rename-resource other r0", 0, ""),
        Step("2 adm adjust r0", 0, ""),
    ];
    run(cluster, &renamed)?;
    cluster.wait_in_sync()
}

#[test]
fn commands_in_the_wrong_state_say_so_and_nothing_is_stuck() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let mut setup = Setup::quick(TEST, 3);
    setup.daemon = vec!["--no-device".into()];
    setup.net.push_str(" verify-alg crc32c;");
    setup.disk = "c-max-rate 12M; c-min-rate 0;".into();
    let mut cluster = Cluster::new(&setup)?;
    cluster.adm(0, &["down", "r0"])?;
    run(&cluster, &NOTHING_IS_UP)?;
    cluster.adm(0, &["adjust", "r0"])?;
    cluster.primary_of_equal_disks(0)?;
    let ends = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| -> Result<()> {
        let watchers: Vec<_> = (0..2)
            .map(|node| {
                let (cluster, ends) = (&cluster, ends.clone());
                scope.spawn(move || watch(cluster, node, &ends))
            })
            .collect();
        let told = story(&cluster);
        ends.store(true, Ordering::Relaxed);
        told?;
        for watcher in watchers {
            let lines = watcher.join().expect("a watcher does not panic")?;
            ensure!(lines > 20, "{lines} lines of events2");
        }
        Ok(())
    })?;
    // A node that was killed does as it is told when it is back.
    cluster.kill(0)?;
    run(
        &cluster,
        &[Step("0 adm primary r0", 20, "lockstepd is not running")],
    )?;
    cluster.start(0)?;
    run(&cluster, &[Step("0 adm primary r0", 10, "(158)")])?;
    cluster.adm(0, &["adjust", "r0"])?;
    cluster.wait_in_sync()?;
    for node in 0..3 {
        let log = cluster.log(node)?;
        ensure!(!log.contains("panicked"), "{log}");
        cluster.stop(node)?;
    }
    Ok(())
}
