//! Connections that use two paths over two networks at once (`load-balance-paths`).

use anyhow::{Context, Result, ensure};
use lockstep_e2e::net::{Cut, address, second_address};
use lockstep_e2e::writer::Writer;
use lockstep_e2e::{Cluster, Setup, can_mount};

const TEST: u8 = 207;
/// What one write of the load has.
const WRITE_BYTES: usize = 256 << 10;

/// Two nodes with two networks, connected over both.
fn cluster(test: u8) -> Result<Cluster> {
    let quick = Setup::quick(test, 2);
    let cluster = Cluster::new(&Setup {
        disk_mib: 48,
        net: format!(
            "transport lb-tcp; load-balance-paths yes; verify-alg crc32c; {}",
            quick.net
        ),
        ..quick
    })?;
    cluster.network().add_second_link()?;
    cluster.first_primary(0)?;
    for node in 0..2 {
        setup_ok(&cluster, node, &path("new-path", node, second_address))?;
    }
    wait_for_paths(&cluster, [true, true])?;
    Ok(cluster)
}

/// Whether the paths over the first and the second network are established.
fn established(cluster: &Cluster, node: usize) -> Result<[bool; 2]> {
    let status = cluster.status(node)?;
    let paths = status["connections"][0]["paths"].as_array();
    let paths = paths.context("paths")?;
    Ok([address(node), second_address(node)].map(|address| {
        let of = |path: &&serde_json::Value| path["this_host"]["address"] == address.as_str();
        let found = paths.iter().find(of);
        found.is_some_and(|path| path["established"] == true)
    }))
}

/// The nodes are connected over exactly these of the two networks, and replicate.
fn wait_for_paths(cluster: &Cluster, wanted: [bool; 2]) -> Result<()> {
    cluster.wait("exactly these paths are established", |c| {
        for node in 0..2 {
            if established(c, node)? != wanted || !c.connection_is(node, 1 - node, "Connected")? {
                return Ok(false);
            }
        }
        Ok(true)
    })?;
    cluster.wait_in_sync()
}

/// Bytes that a node's interface has sent.
fn sent_bytes(cluster: &Cluster, node: usize, interface: &str) -> Result<u64> {
    let output = cluster.network().inside(node, || {
        let words = ["-json", "-statistics", "link", "show", "dev", interface];
        Ok(std::process::Command::new("ip").args(words).output()?)
    })?;
    let links: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    links[0]["stats64"]["tx"]["bytes"]
        .as_u64()
        .with_context(|| format!("what {interface} has sent: {output:?}"))
}

fn setup_ok(cluster: &Cluster, node: usize, words: &str) -> Result<()> {
    let args: Vec<&str> = words.split(' ').collect();
    let output = cluster.setup_raw(node, &args)?;
    ensure!(output.status.success(), "drbdsetup {words}: {output:?}");
    Ok(())
}

/// The call fails, and says this.
fn setup_refused(cluster: &Cluster, node: usize, words: &str, why: &str) -> Result<()> {
    let args: Vec<&str> = words.split(' ').collect();
    let output = cluster.setup_raw(node, &args)?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "drbdsetup {words} succeeds");
    ensure!(text.contains(why), "drbdsetup {words}: {text}");
    Ok(())
}

/// `drbdsetup` words with both ends of a path.
fn path(verb: &str, node: usize, of: fn(usize) -> String) -> String {
    let peer = 1 - node;
    let (own, other) = (of(node), of(peer));
    format!("{verb} r0 {peer} ipv4:{own}:7788 ipv4:{other}:7788")
}

fn finish(cluster: &Cluster, load: Writer) -> Result<()> {
    load.wait_for_progress()?;
    load.end()?;
    cluster.wait_in_sync()?;
    setup_ok(cluster, 0, "verify r0 1 0")?;
    cluster.wait("the verify ends", |c| {
        let status = c.status(0)?;
        let state = &status["connections"][0]["peer_devices"][0]["replication-state"];
        Ok(state == "Established")
    })?;
    ensure!(
        cluster.out_of_sync_kib(0, 1, 0)? == 0,
        "the verify finds nothing"
    );
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 46)
}

/// Traffic goes over both networks, and a path may be removed and added under it.
#[test]
fn both_paths_carry_traffic_and_either_may_leave_under_load() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = cluster(TEST)?;
    let load = Writer::start(&cluster.device(0, TEST, 0)?, WRITE_BYTES, 120)?;
    // A path that has just joined is spared until the peer certainly has it too.
    let joined = sent_bytes(&cluster, 0, "eth1")?;
    cluster.wait("the second path carries data", |c| {
        Ok(sent_bytes(c, 0, "eth1")? > joined + (1 << 20))
    })?;
    let before = [
        sent_bytes(&cluster, 0, "eth0")?,
        sent_bytes(&cluster, 0, "eth1")?,
    ];
    let first = load.written();
    for _ in 0..5 {
        load.wait_for_progress()?;
    }
    let bytes = (load.written() - first) * WRITE_BYTES as u64;
    for (interface, before) in ["eth0", "eth1"].into_iter().zip(before) {
        let sent = sent_bytes(&cluster, 0, interface)? - before;
        ensure!(sent > bytes / 20, "{interface} has {sent} of {bytes} bytes");
    }

    // Each of the paths goes and comes back, and the connection stays all the time.
    let before = connected_count(&cluster)?;
    for (of, stay) in [
        (address as fn(usize) -> String, [false, true]),
        (second_address, [true, false]),
    ] {
        for node in 0..2 {
            setup_ok(&cluster, node, &path("del-path", node, of))?;
            load.wait_for_progress()?;
        }
        wait_for_paths(&cluster, stay)?;
        load.wait_for_progress()?;
        for node in 0..2 {
            setup_ok(&cluster, node, &path("new-path", node, of))?;
        }
        wait_for_paths(&cluster, [true, true])?;
        load.wait_for_progress()?;
    }
    ensure!(
        connected_count(&cluster)? == before,
        "the connection stayed"
    );
    finish(&cluster, load)
}

/// How often the nodes have connected.
fn connected_count(cluster: &Cluster) -> Result<usize> {
    let count = cluster
        .log(0)?
        .matches("the first path is established")
        .count();
    ensure!(count > 0, "the log tells of connections");
    Ok(count)
}

/// A network fails under load, first one, then the other, then both.
#[test]
fn writes_go_on_when_a_network_fails_and_when_both_do_for_a_while() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let test = TEST + 1;
    let cluster = cluster(test)?;
    let load = Writer::start(&cluster.device(0, test, 0)?, WRITE_BYTES, 120)?;
    load.wait_for_progress()?;

    cluster.network().set_second_link(0, true)?;
    wait_for_paths(&cluster, [true, false])?;
    load.wait_for_progress()?;
    cluster.network().set_second_link(0, false)?;
    wait_for_paths(&cluster, [true, true])?;
    load.wait_for_progress()?;

    // Nobody is told, whichever of the two it is.
    cluster.network().cut_second_link_silently(0)?;
    wait_for_paths(&cluster, [true, false])?;
    load.wait_for_progress()?;
    cluster.network().mend_second_link(0)?;
    wait_for_paths(&cluster, [true, true])?;
    load.wait_for_progress()?;
    cluster.cut(1, Cut::Silent)?;
    wait_for_paths(&cluster, [false, true])?;
    load.wait_for_progress()?;
    cluster.mend(1, Cut::Silent)?;
    wait_for_paths(&cluster, [true, true])?;
    load.wait_for_progress()?;

    // For a moment only: what was lost is sent again, and the connection may stay.
    for node in [0, 1, 0] {
        cluster.network().cut_second_link_silently(node)?;
        for _ in 0..5 {
            // Takes about as long as a segment waits before it is sent again.
            established(&cluster, 0)?;
        }
        cluster.network().mend_second_link(node)?;
        load.wait_for_progress()?;
    }
    wait_for_paths(&cluster, [true, true])?;

    cluster.cut(1, Cut::Silent)?;
    cluster.network().set_second_link(0, true)?;
    cluster.wait("the connection is noticed as lost", |c| {
        Ok(!c.connection_is(0, 1, "Connected")?)
    })?;
    cluster.network().set_second_link(0, false)?;
    wait_for_paths(&cluster, [false, true])?;
    cluster.mend(1, Cut::Silent)?;
    wait_for_paths(&cluster, [true, true])?;
    finish(&cluster, load)
}

/// An idle path that fails leaves the connection alone.
#[test]
fn an_idle_path_that_fails_does_not_end_the_connection() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let test = TEST + 2;
    let cluster = cluster(test)?;
    let before = connected_count(&cluster)?;
    cluster.network().set_second_link(0, true)?;
    wait_for_paths(&cluster, [true, false])?;
    cluster.network().set_second_link(0, false)?;
    wait_for_paths(&cluster, [true, true])?;
    ensure!(
        connected_count(&cluster)? == before,
        "the connection stayed"
    );
    Ok(())
}

/// What cannot work is refused, and unlike nodes do not connect.
#[test]
fn options_that_cannot_work_are_refused() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let test = TEST + 3;
    // Without load balancing it is the tcp transport.
    let quick = Setup::quick(test, 2);
    let cluster = Cluster::new(&Setup {
        net: format!("transport lb-tcp; {}", quick.net),
        ..quick
    })?;
    cluster.first_primary(0)?;
    setup_refused(
        &cluster,
        0,
        "net-options r0 1 --load-balance-paths=yes",
        "load-balance-paths",
    )?;
    setup_ok(&cluster, 0, "disconnect r0 1")?;
    setup_ok(&cluster, 0, "del-peer r0 1")?;
    let peer = "new-peer r0 1 --_name=bravo --ping-int=1 --connect-int=1 --load-balance-paths=yes";
    let wrong = [
        ("--transport=tcp", "needs transport lb-tcp"),
        ("--transport=rdma", "rdma"),
        ("--tls=yes", "no TLS over load-balanced paths"),
    ];
    for (option, why) in wrong {
        setup_refused(&cluster, 0, &format!("{peer} {option}"), why)?;
    }
    // One balances, the other does not: both say so, and connect when they agree.
    setup_ok(&cluster, 0, peer)?;
    setup_ok(&cluster, 0, &path("new-path", 0, address))?;
    setup_ok(&cluster, 0, "connect r0 1")?;
    cluster.wait("the reason is in a log", |c| {
        let logs = [c.log(0)?, c.log(1)?].concat();
        Ok(logs.contains("set load-balance-paths alike on both nodes"))
    })?;
    ensure!(!cluster.connection_is(0, 1, "Connected")?, "no connection");
    setup_ok(&cluster, 1, "disconnect r0 0 --force")?;
    setup_ok(&cluster, 1, "del-peer r0 0")?;
    let peer = peer.replace("r0 1 --_name=bravo", "r0 0 --_name=alfa");
    setup_ok(&cluster, 1, &peer)?;
    setup_ok(&cluster, 1, &path("new-path", 1, address))?;
    setup_ok(&cluster, 1, "connect r0 0")?;
    wait_for_paths(&cluster, [true, false])
}
