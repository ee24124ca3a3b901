//! What somebody new tries: everything twice, and everything in the middle of something else.

use anyhow::{Result, ensure};
use lockstep_e2e::load::Load;
use lockstep_e2e::{Cluster, Setup, can_mount};

fn text(output: &std::process::Output) -> String {
    let both = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&both).into_owned()
}

fn setup(test: u8) -> Setup {
    Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 64,
        net: "protocol C; connect-int 1;".into(),
        // A resync of 60 MiB takes some time.
        disk: "c-plan-ahead 0; resync-rate 4M; c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test,
    }
}

#[test]
fn a_second_up_and_a_second_daemon_change_nothing() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&setup(68))?;
    cluster.primary_of_equal_disks(0)?;
    let load = Load::start(&cluster.device(0, 68, 0)?, 4)?;
    load.wait_for_progress()?;
    let second = cluster.second_daemon(0)?;
    ensure!(!second.status.success(), "two daemons in one directory");
    let said = text(&second);
    ensure!(
        said.contains("another lockstepd (pid ") && said.contains("--dir"),
        "{said}"
    );
    let before = cluster.status(1)?;
    for node in 0..2 {
        let up = cluster.adm_raw(node, &["up", "r0"])?;
        let said = text(&up);
        ensure!(up.status.success() || said.contains("r0"), "{said}");
        ensure!(!said.contains("panicked"), "{said}");
    }
    ensure!(before["role"] == cluster.status(1)?["role"], "another role");
    ensure!(cluster.status(0)?["role"] == "Primary", "still Primary");
    for node in 0..2 {
        ensure!(cluster.is_in_sync(node)?, "still in sync");
    }
    load.wait_for_progress()?;
    let mut ledger = load.end()?;
    ensure!(ledger.error().is_none(), "{:?}", ledger.error());
    cluster.adm(0, &["secondary", "r0"])?;
    ledger.check(&cluster.image(1, 0))
}

#[test]
fn a_node_that_goes_down_in_the_middle_of_a_resync_resumes_it() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&setup(69))?;
    cluster.primary_of_equal_disks(0)?;
    let load = Load::start(&cluster.device(0, 69, 0)?, 4)?;
    load.wait_for_progress()?;
    cluster.adm(1, &["invalidate", "r0"])?;
    let copied = |c: &Cluster| c.received_kib(1, 0, 0);
    let before = copied(&cluster)?;
    cluster.wait("some blocks are copied", |c| Ok(copied(c)? > before + 8192))?;
    ensure!(
        cluster.status(1)?["devices"][0]["disk-state"] == "Inconsistent",
        "the resync has ended already"
    );
    let left_before = cluster.out_of_sync_kib(0, 1, 0)?;
    cluster.adm(1, &["down", "r0"])?;
    let gone = cluster.setup_raw(1, &["status", "r0"])?;
    ensure!(
        text(&gone).contains("No such resource") || !gone.status.success(),
        "{}",
        text(&gone)
    );
    cluster.adm(1, &["down", "r0"])?;
    load.wait_for_progress()?;
    cluster.adm(1, &["up", "r0"])?;
    cluster.wait("the resync goes on", |c| {
        Ok(c.status(1)?["connections"][0]["peer_devices"][0]["replication-state"] == "SyncTarget")
    })?;
    let left = cluster.out_of_sync_kib(0, 1, 0)?;
    // The load owns four times 1 MiB.
    ensure!(left <= left_before + 4096, "{left} KiB: it begins anew");
    for node in 0..2 {
        let faster = [
            "peer-device-options",
            "r0",
            if node == 0 { "1" } else { "0" },
            "0",
        ];
        let faster = [&faster[..], &["--resync-rate=400M"]].concat();
        let changed = cluster.setup_raw(node, &faster)?;
        ensure!(changed.status.success(), "{}", text(&changed));
    }
    cluster.wait_in_sync()?;
    let mut ledger = load.end()?;
    ensure!(ledger.error().is_none(), "{:?}", ledger.error());
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)?;
    ledger.check(&cluster.image(1, 0))
}
