//! Connections with two paths over two networks, and what is added and removed under I/O.

use anyhow::{Context, Result, ensure};
use lockstep_e2e::net::{Cut, address, second_address};
use lockstep_e2e::writer::Writer;
use lockstep_e2e::{Cluster, Setup, can_mount};

const TEST: u8 = 97;

/// The address of this end of each path, and whether the path is in use.
fn paths(cluster: &Cluster, node: usize) -> Result<Vec<(String, bool)>> {
    let status = cluster.status(node)?;
    let paths = status["connections"][0]["paths"].as_array();
    let of_path = |path: &serde_json::Value| {
        let address = path["this_host"]["address"].as_str().unwrap_or_default();
        (address.to_owned(), path["established"] == true)
    };
    Ok(paths.context("paths")?.iter().map(of_path).collect())
}

/// The nodes are connected over exactly this one of the two paths of each, and replicate.
fn wait_for_path(cluster: &Cluster, used: fn(usize) -> String) -> Result<()> {
    cluster.wait("the path is in use at both ends", |c| {
        for node in 0..2 {
            let now = paths(c, node)?;
            let right = now
                .iter()
                .all(|(address, is)| *is == (*address == used(node)));
            if !right || now.is_empty() || !c.connection_is(node, 1 - node, "Connected")? {
                return Ok(false);
            }
        }
        Ok(true)
    })?;
    cluster.wait_in_sync()
}

fn setup_ok(cluster: &Cluster, node: usize, words: &str) -> Result<()> {
    let args: Vec<&str> = words.split(' ').collect();
    let output = cluster.setup_raw(node, &args)?;
    ensure!(output.status.success(), "drbdsetup {words}: {output:?}");
    Ok(())
}

/// `drbdsetup` words with both ends of a path.
fn path(verb: &str, node: usize, of: fn(usize) -> String) -> String {
    let peer = 1 - node;
    let (own, other) = (of(node), of(peer));
    format!("{verb} r0 {peer} ipv4:{own}:7788 ipv4:{other}:7788")
}

#[test]
fn a_connection_fails_over_between_its_paths_under_io() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&Setup {
        disk_mib: 48,
        ..Setup::quick(TEST, 2)
    })?;
    cluster.network().add_second_link()?;
    cluster.first_primary(0)?;
    let writer = Writer::start(&cluster.device(0, TEST, 0)?, 4096, 4096)?;
    writer.wait_for_progress()?;
    wait_for_path(&cluster, address)?;

    // A second path joins the first without a disturbance.
    for node in 0..2 {
        setup_ok(&cluster, node, &path("new-path", node, second_address))?;
        ensure!(paths(&cluster, node)?.len() == 2, "both are shown");
    }
    writer.wait_for_progress()?;
    wait_for_path(&cluster, address)?;

    // Each takes over when the other one is cut.
    cluster.cut(1, Cut::Silent)?;
    wait_for_path(&cluster, second_address)?;
    writer.wait_for_progress()?;
    cluster.mend(1, Cut::Silent)?;
    cluster.network().set_second_link(0, true)?;
    wait_for_path(&cluster, address)?;
    writer.wait_for_progress()?;
    cluster.network().set_second_link(0, false)?;

    // The one in use is removed.
    for node in 0..2 {
        setup_ok(&cluster, node, &path("del-path", node, address))?;
    }
    wait_for_path(&cluster, second_address)?;
    ensure!(paths(&cluster, 0)?.len() == 1, "one is left");
    writer.wait_for_progress()?;

    // The whole peer goes and comes back.
    setup_ok(&cluster, 0, "disconnect r0 1")?;
    setup_ok(&cluster, 0, "del-peer r0 1")?;
    writer.wait_for_progress()?;
    setup_ok(
        &cluster,
        0,
        "new-peer r0 1 --_name=bravo --protocol=C --ping-int=1 --connect-int=1",
    )?;
    setup_ok(&cluster, 0, &path("new-path", 0, second_address))?;
    setup_ok(&cluster, 0, "connect r0 1")?;
    wait_for_path(&cluster, second_address)?;
    writer.wait_for_progress()?;

    writer.end()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 46)
}

/// Of three nodes one leaves for good and comes back while the first one writes.
#[test]
fn a_peer_leaves_a_cluster_of_three_and_comes_back_under_io() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let test = 194;
    let cluster = Cluster::new(&Setup {
        nodes: 3,
        volumes: 1,
        disk_mib: 32,
        net: "protocol C; connect-int 1;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test,
    })?;
    cluster.first_primary(0)?;
    let writer = Writer::start(&cluster.device(0, test, 0)?, 4096, 4096)?;
    writer.wait_for_progress()?;

    // The third node is taken out of the cluster.
    cluster.adm(2, &["down", "r0"])?;
    for node in 0..2 {
        setup_ok(&cluster, node, "disconnect r0 2 --force")?;
        setup_ok(&cluster, node, "del-peer r0 2")?;
        let known = cluster.status(node)?["connections"]
            .as_array()
            .map(Vec::len);
        ensure!(known == Some(1), "{known:?} peers are left");
    }
    writer.wait_for_progress()?;

    // The third one is configured again, and gets what it missed.
    for node in 0..2 {
        cluster.adm(node, &["adjust", "r0"])?;
        writer.wait_for_progress()?;
    }
    cluster.adm(2, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    writer.wait_for_progress()?;
    writer.end()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 30)
}
