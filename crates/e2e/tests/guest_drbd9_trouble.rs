//! One Lockstep node and one kernel DRBD 9 node: split brains, invalidated disks, paused resyncs,
//! lost links and deaths, in both role assignments.

use anyhow::{Result, ensure};
use lockstep_e2e::guest_drbd9::{Kind, Nine, NineSetup, PACE, can_join_drbd9, scribble_words};

use Kind::{Kernel, Lockstep};

const PAIR: [Kind; 2] = [Lockstep, Kernel];

/// Both role assignments: who is Primary, and the other one.
const ROLES: [(usize, usize); 2] = [(0, 1), (1, 0)];

/// Both are StandAlone. Until its connection is closed a kernel refuses further changes for the moment, and logs that.
fn part(cluster: &Nine) -> Result<()> {
    for node in [0, 1] {
        cluster.adm(node, "disconnect r0")?;
    }
    cluster.wait("both are StandAlone", |cluster| {
        Ok(cluster.connection_state(0, 1)? == "StandAlone"
            && cluster.connection_state(1, 0)? == "StandAlone")
    })
}

/// Both write alone; then both are Secondary, but for `stays`.
fn diverge(cluster: &Nine, stays: Option<usize>) -> Result<()> {
    part(cluster)?;
    for node in [0, 1] {
        cluster.adm(node, "primary --force r0")?;
        cluster.scribble(node, 0)?;
        if stays != Some(node) {
            cluster.adm(node, "secondary r0")?;
        }
    }
    Ok(())
}

fn connect(cluster: &Nine) -> Result<()> {
    cluster.adm(0, "connect r0")?;
    cluster.adm(1, "connect r0").map(drop)
}

#[test]
fn split_brains_end_as_the_operator_or_the_policies_say() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut cluster = Nine::start_equal(NineSetup::new(&PAIR, 9400))?;
    for (source, target) in ROLES {
        // Refused, then ended by the operator.
        diverge(&cluster, Some(source))?;
        connect(&cluster)?;
        cluster.wait("nobody connects", |cluster| {
            Ok(cluster.connection_state(0, 1)? == "StandAlone"
                || cluster.connection_state(1, 0)? == "StandAlone")
        })?;
        part(&cluster)?;
        cluster.adm(target, "connect --discard-my-data r0")?;
        cluster.adm(source, "connect r0")?;
        cluster.wait_in_sync()?;
        cluster.adm(source, "secondary r0")?;
    }
    for policy in [
        "after-sb-0pri discard-younger-primary;",
        "after-sb-0pri discard-older-primary;",
        "after-sb-0pri discard-least-changes;",
    ] {
        cluster.setup.net = format!("protocol C; {PACE} {policy}");
        cluster.adjust()?;
        diverge(&cluster, None)?;
        connect(&cluster)?;
        cluster.wait_in_sync()?;
    }
    cluster.setup.net = format!("protocol C; {PACE} after-sb-0pri discard-zero-changes;");
    cluster.adjust()?;
    for (source, target) in ROLES {
        part(&cluster)?;
        cluster.adm(target, "primary --force r0")?;
        cluster.adm(target, "secondary r0")?;
        cluster.adm(source, "primary --force r0")?;
        cluster.scribble(source, 0)?;
        cluster.adm(source, "secondary r0")?;
        connect(&cluster)?;
        cluster.wait_in_sync()?;
    }
    for policy in ["discard-secondary", "consensus", "violently-as0p"] {
        cluster.setup.net = format!(
            "protocol C; {PACE} after-sb-0pri discard-least-changes; after-sb-1pri {policy};"
        );
        cluster.adjust()?;
        for (source, _) in ROLES {
            if policy == "violently-as0p" {
                continue;
            }
            diverge(&cluster, Some(source))?;
            if policy == "consensus" {
                // Who has fewer changes is the Secondary.
                cluster.sh(source, 0, &scribble_words(source, 60))?;
            }
            connect(&cluster)?;
            cluster.wait_in_sync()?;
            cluster.adm(source, "secondary r0")?;
        }
    }
    let expected = [
        "Split-Brain",
        "split-brain",
        "split brain on volume 0",
        "Can not disconnect a StandAlone device",
    ];
    cluster.check_end(&expected)
}

#[test]
fn invalidated_disks_and_paused_resyncs_work_both_ways() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let cluster = Nine::start_equal(NineSetup::new(&PAIR, 9410))?;
    for (source, target) in ROLES {
        cluster.make_primary(source)?;
        cluster.scribble(source, 0)?;
        cluster.adm(target, "invalidate r0/0")?;
        cluster.scribble(source, 0)?;
        cluster.wait_in_sync()?;
        cluster.adm(source, "invalidate-remote r0/0")?;
        cluster.scribble(source, 0)?;
        cluster.wait_in_sync()?;
        for pauser in [source, target] {
            cluster.adm(target, "disconnect r0")?;
            cluster.scribble(source, 0)?;
            cluster.adm(pauser, "pause-sync r0")?;
            cluster.adm(target, "connect r0")?;
            cluster.wait("a paused resync", |cluster| {
                Ok(cluster.replication(source, target, 0)? == "PausedSyncS"
                    && cluster.replication(target, source, 0)? == "PausedSyncT")
            })?;
            cluster.scribble(source, 0)?;
            cluster.adm(pauser, "resume-sync r0")?;
            cluster.wait_in_sync()?;
        }
        cluster.adm(source, "secondary r0")?;
        // Without a Primary.
        cluster.adm(target, "invalidate r0/0")?;
        cluster.wait_in_sync()?;
        cluster.adm(target, "invalidate-remote r0/0")?;
        cluster.wait_in_sync()?;
        // The other one outdates itself alone, and follows afterwards.
        cluster.adm(target, "disconnect r0")?;
        // `drbdadm outdate` of Debian's tools takes metadata that are not in use only.
        let words = format!("outdate {}", cluster.setup.minor);
        cluster.setup_tool(target, &words)?;
        ensure!(cluster.disk_state(target, 0)? == "Outdated", "not outdated");
        cluster.refused(target, "primary r0", "")?;
        cluster.adm(target, "connect r0")?;
        cluster.wait_in_sync()?;
    }
    cluster.check_end(&[])
}

#[test]
fn a_congested_line_is_left_ahead_and_caught_up() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    // A kernel's writer waits for its socket, whose 64 KiB hold 128 to 256 KiB of writes that are not acknowledged.
    let mut setup = NineSetup::new(&PAIR, 9420);
    setup.net = "protocol A; connect-int 1; ping-timeout 100; timeout 200; sndbuf-size 64k; \
         on-congestion pull-ahead; congestion-fill 128k; congestion-extents 500;"
        .to_string();
    let cluster = Nine::start_equal(setup)?;
    for (source, target) in ROLES {
        cluster.make_primary(source)?;
        cluster.scribble(source, 0)?;
        cluster.network().slow(target, Some(1))?;
        cluster.sh(
            source,
            0,
            "dd if=/dev/urandom of=$D bs=64k count=80 oflag=direct conv=notrunc",
        )?;
        // By the log: what went Ahead may have caught up when a status comes.
        let log = match PAIR[source] {
            Lockstep => cluster.own_log(source)?,
            Kernel => cluster.kernel_log(source)?,
        };
        ensure!(
            log.contains("Established -> Ahead"),
            "it is not Ahead\n{}",
            cluster.report()
        );
        cluster.network().slow(target, None)?;
        cluster.wait_in_sync()?;
        cluster.scribble(source, 0)?;
        cluster.adm(source, "secondary r0")?;
    }
    cluster.check_end(&[])
}

#[test]
fn lost_links_and_deaths_under_writes_lose_nothing() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut cluster = Nine::start_equal(NineSetup::new(&PAIR, 9430).net("ping-int 2;"))?;
    for (source, target) in ROLES {
        cluster.make_primary(source)?;
        // A pulled cable.
        let job = cluster.job(source, 0, &scribble_words(source, 400))?;
        cluster.cut(1, true)?;
        cluster.wait_apart(0, 1)?;
        cluster.cut(1, false)?;
        cluster.finish(job)?;
        cluster.wait_in_sync()?;
        // The other one dies.
        let job = cluster.job(source, 0, &scribble_words(source, 400))?;
        cluster.kill(target)?;
        cluster.wait_apart_one(source)?;
        cluster.revive(target)?;
        cluster.finish(job)?;
        cluster.wait_in_sync()?;
        cluster.adm(source, "secondary r0")?;
    }
    for (source, target) in ROLES {
        // The Primary dies, and the other one takes over.
        cluster.make_primary(source)?;
        let job = cluster.job(source, 0, &scribble_words(source, 100_000))?;
        cluster.wait("writes", |cluster| {
            let status = cluster.status(target)?;
            let device = &status["connections"][0]["peer_devices"][0];
            Ok(device["received"].as_u64().unwrap_or(0) > 400)
        })?;
        cluster.kill(source)?;
        drop(job);
        cluster.wait_apart_one(target)?;
        cluster.adm(target, "primary --force r0")?;
        cluster.scribble(target, 0)?;
        cluster.revive(source)?;
        cluster.wait_in_sync()?;
        cluster.adm(target, "secondary r0")?;
    }
    cluster.check_end(&[])
}
