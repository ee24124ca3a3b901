//! Three nodes, Lockstep and kernel DRBD 9 mixed: quorum, promotions, a lost Primary, nodes without a disk.

use anyhow::{Result, ensure};
use lockstep_e2e::NAMES;
use lockstep_e2e::guest_drbd9::{Kind, Nine, NineSetup, can_join_drbd9, scribble_words};

use Kind::{Kernel, Lockstep};

/// Both mixtures of three.
const MIXTURES: [[Kind; 3]; 2] = [[Lockstep, Lockstep, Kernel], [Kernel, Lockstep, Kernel]];

#[test]
fn three_mixed_nodes_sync_hand_over_and_resync() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let cluster = Nine::start(NineSetup::new(&kinds, 9600 + n as u32))?;
        cluster.wait_connected()?;
        cluster.adm(2, "primary --force r0")?;
        cluster.scribble(2, 0)?;
        // What a kernel writes during the first sync may stay marked between the two that it copies to, until the
        // next resync between them (docs/compatibility.md).
        let copied =
            |x: usize, y: usize| ![x, y].contains(&2) && [kinds[x], kinds[y]].contains(&Kernel);
        cluster.wait("in sync", |cluster| cluster.is_in_sync_but(copied))?;
        for primary in [0, 1, 2] {
            cluster.make_primary(primary)?;
            cluster.scribble(primary, 0)?;
            let (a, b) = ((primary + 1) % 3, (primary + 2) % 3);
            for away in [a, b] {
                cluster.adm(away, "disconnect r0")?;
                cluster.scribble(primary, 0)?;
                cluster.adm(away, "connect r0")?;
                cluster.wait_in_sync()?;
            }
            // Nobody else becomes Primary beside it.
            cluster.refused(a, "primary r0", "")?;
            // Nobody writes meanwhile: kernels leave marks between the copied node and the third one
            // in extents of 4 MiB that are being written when their last block is copied.
            cluster.adm(a, "invalidate r0/0")?;
            cluster.wait_in_sync()?;
            cluster.scribble(primary, 0)?;
        }
        cluster.adm(2, "secondary r0")?;
        cluster.check_end(EXPECTED)?;
    }
    Ok(())
}

#[test]
fn the_survivors_of_a_lost_primary_agree() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let mut cluster = Nine::start_equal(NineSetup::new(&kinds, 9610 + n as u32))?;
        for primary in [0, 1, 2] {
            let (a, b) = ((primary + 1) % 3, (primary + 2) % 3);
            cluster.make_primary(primary)?;
            let job = cluster.job(primary, 0, &scribble_words(primary, 100_000))?;
            cluster.wait("writes", |cluster| {
                let status = cluster.status(a)?;
                let all = status["connections"]
                    .as_array()
                    .cloned()
                    .unwrap_or_default();
                Ok(all
                    .iter()
                    .any(|c| c["peer_devices"][0]["received"].as_u64().unwrap_or(0) > 400))
            })?;
            cluster.kill(primary)?;
            drop(job);
            cluster.wait("both have lost it, and are equal", |cluster| {
                for (me, other) in [(a, b), (b, a)] {
                    if cluster.connection_state(me, primary)? == "Connected"
                        || cluster.replication(me, other, 0)? != "Established"
                        || cluster.out_of_sync_kib(me, other, 0)? != 0
                        || cluster.disk_state(me, 0)? != "UpToDate"
                    {
                        return Ok(false);
                    }
                }
                Ok(true)
            })?;
            cluster.adm(a, "primary r0")?;
            cluster.scribble(a, 0)?;
            cluster.revive(primary)?;
            cluster.wait("the dead node in sync again", |cluster| {
                connect_kernels(cluster, &kinds)?;
                cluster.is_in_sync()
            })?;
            cluster.adm(a, "secondary r0")?;
        }
        cluster.check_end(EXPECTED)?;
    }
    Ok(())
}

/// Two kernels compare twice when one of them returns, and the second time drop their connection for good; an
/// operator makes it again.
const KERNELS_AT_ODDS: &str = "Can not start OV/resync since it is already active";

fn connect_kernels(cluster: &Nine, kinds: &[Kind]) -> Result<()> {
    let kernels: Vec<usize> = (0..kinds.len()).filter(|n| kinds[*n] == Kernel).collect();
    if let [a, b] = kernels[..] {
        for (node, peer) in [(a, b), (b, a)] {
            if cluster.connection_state(node, peer)? == "StandAlone"
                && cluster.kernel_log(node)?.contains(KERNELS_AT_ODDS)
            {
                eprintln!("two kernels are at odds and are connected again");
                // Not all of its connections: the tool gives up at one that is there.
                cluster.adm(node, &format!("connect r0:{}", NAMES[peer]))?;
            }
        }
    }
    Ok(())
}

#[test]
fn quorum_holds_writes_back_or_fails_them() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        for policy in ["suspend-io", "io-error"] {
            let mut setup = NineSetup::new(&kinds, 9620 + n as u32).net("ping-int 2;");
            setup.options = format!("quorum majority; on-no-quorum {policy};");
            let cluster = Nine::start_equal(setup)?;
            for primary in [1, 2] {
                let kernels = kinds.iter().filter(|kind| **kind == Kernel).count();
                if policy == "suspend-io" && kinds[primary] == Kernel && kernels > 1 {
                    // A kernel may leave another one without the write that it has held back, for good
                    // (docs/compatibility.md).
                    continue;
                }
                cluster.make_primary(primary)?;
                cluster.scribble(primary, 0)?;
                cluster.cut(primary, true)?;
                cluster.wait("the loss of the quorum", |cluster| {
                    Ok(cluster.status(primary)?["devices"][0]["quorum"] == false)
                })?;
                let write = "dd if=/dev/urandom of=$D bs=4k count=4 conv=notrunc,fsync seek=100";
                if policy == "io-error" {
                    let (good, text) = cluster.sh_raw(primary, 0, write)?;
                    ensure!(!good, "written without quorum: {text}");
                    cluster.cut(primary, false)?;
                } else {
                    let job = cluster.job(primary, 0, write)?;
                    cluster.cut(primary, false)?;
                    cluster.finish(job)?;
                }
                cluster.wait_in_sync()?;
                cluster.scribble(primary, 0)?;
                cluster.adm(primary, "secondary r0")?;
            }
            cluster.check_end(EXPECTED)?;
        }
    }
    Ok(())
}

#[test]
fn a_client_of_either_kind_writes_to_two_servers_of_unlike_kind() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        for client in [1, 2] {
            let mut setup = NineSetup::new(&kinds, 9630 + n as u32);
            setup.diskless = vec![client];
            let mut cluster = Nine::start_equal(setup)?;
            let (a, b) = ((client + 1) % 3, (client + 2) % 3);
            cluster.make_primary(client)?;
            cluster.scribble(client, 0)?;
            for away in [a, b] {
                cluster.adm(away, "down r0")?;
                cluster.scribble(client, 0)?;
                cluster.adm(away, "up r0")?;
                cluster.wait_in_sync()?;
            }
            let job = cluster.job(client, 0, &scribble_words(client, 200))?;
            cluster.kill(a)?;
            cluster.wait("its loss", |cluster| {
                Ok(cluster.connection_state(b, a)? != "Connected")
            })?;
            cluster.revive(a)?;
            cluster.finish(job)?;
            cluster.wait_in_sync()?;
            cluster.adm(client, "secondary r0")?;
            cluster.check_end(EXPECTED)?;
        }
    }
    Ok(())
}

/// `on-suspended-primary-outdated force-secondary`. A kernel that is met needs `rr-conflict retry-connect` for it.
#[test]
fn a_frozen_primary_gives_way_to_newer_data() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let net = "ping-int 2; rr-conflict retry-connect;";
        let mut setup = NineSetup::new(&kinds, 9670 + n as u32).net(net);
        setup.options = "quorum majority; on-no-quorum suspend-io; \
             on-suspended-primary-outdated force-secondary;"
            .to_string();
        let cluster = Nine::start_equal(setup)?;
        for frozen in [0, 1, 2] {
            let other = (frozen + 1) % 3;
            cluster.make_primary(frozen)?;
            cluster.scribble(frozen, 0)?;
            cluster.cut(frozen, true)?;
            cluster.wait("the loss of the quorum", |cluster| {
                Ok(cluster.status(frozen)?["devices"][0]["quorum"] == false)
            })?;
            // It waits, and fails when its node gives way.
            let write = "! dd if=/dev/urandom of=$D bs=4k count=4 conv=notrunc,fsync seek=100";
            let job = cluster.job(frozen, 0, write)?;
            cluster.wait("the others may have a Primary", |cluster| {
                Ok(cluster.adm_raw(other, "primary r0")?.0)
            })?;
            cluster.scribble(other, 0)?;
            ensure!(
                cluster.status(frozen)?["suspended"] == true,
                "it is not frozen"
            );
            cluster.cut(frozen, false)?;
            cluster.finish(job)?;
            cluster.wait_in_sync()?;
            ensure!(
                cluster.status(frozen)?["role"] == "Secondary",
                "it is still Primary"
            );
            cluster.scribble(other, 0)?;
            cluster.adm(other, "secondary r0")?;
        }
        let gives_way = [
            "I shall become SyncTarget, but I am primary!",
            "Rejected WRITE request, not in Primary role",
            "this Primary is frozen and the peer has newer data",
            // A kernel marks what fails while it writes its bitmap for the change of its role.
            "bitmap locked for 'demote'",
        ];
        cluster.check_end(&[EXPECTED, &gives_way].concat())?;
    }
    Ok(())
}

/// An invalidated node goes on with another one when it loses its source, and that one knows of no resync. Between two
/// kernels a node of this project has to ask.
#[test]
fn the_source_of_a_resync_goes_away_and_returns() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let mut setup = NineSetup::new(&kinds, 9660 + n as u32);
        setup.disk = "c-plan-ahead 0; resync-rate 4M;".to_string();
        let cluster = Nine::start_equal(setup)?;
        for target in [0, 1, 2] {
            let (a, b) = ((target + 1) % 3, (target + 2) % 3);
            cluster.make_primary(a)?;
            cluster.adm(target, "invalidate r0/0")?;
            let mut source = a;
            cluster.wait("a resync", |cluster| {
                for node in [a, b] {
                    if cluster.replication(target, node, 0)? == "SyncTarget" {
                        source = node;
                        return Ok(true);
                    }
                }
                Ok(false)
            })?;
            cluster.scribble(a, 0)?;
            let of_source = format!("r0:{}", NAMES[source]);
            cluster.adm(target, &format!("disconnect {of_source}"))?;
            cluster.scribble(a, 0)?;
            cluster.wait("it may connect again", |cluster| {
                Ok(cluster.adm_raw(target, &format!("connect {of_source}"))?.0)
            })?;
            cluster.wait_in_sync()?;
            cluster.adm(a, "secondary r0")?;
        }
        cluster.check_end(EXPECTED)?;
    }
    Ok(())
}

/// The target of a live migration is asked to be Primary before its source, a kernel, has stopped.
#[test]
fn a_migration_from_a_kernel_beside_a_third_disk_waits_for_the_demotion() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let mut setup = NineSetup::new(&kinds, 9650 + n as u32).net("allow-two-primaries yes;");
        setup.options = "auto-promote-timeout 300;".to_string();
        let cluster = Nine::start_equal(setup)?;
        for source in (0..3).filter(|node| kinds[*node] == Kernel) {
            cluster.make_primary(source)?;
            cluster.scribble(source, 0)?;
            cluster.adm(1, "primary r0")?;
            ensure!(
                cluster.status(1)?["role"] == "Primary",
                "it does not stand by"
            );
            let all = "dd if=$D bs=1M iflag=direct 2>/dev/null | md5sum";
            let (here, there) = (cluster.sh(1, 0, all)?, cluster.sh(source, 0, all)?);
            ensure!(here == there, "it reads something else: {here} {there}");
            let job = cluster.job(1, 0, &scribble_words(1, 20))?;
            // The source writes still, and nobody else does.
            cluster.scribble(source, 0)?;
            ensure!(
                cluster.status(source)?["role"] == "Primary",
                "it has lost its role"
            );
            cluster.adm(source, "secondary r0")?;
            cluster.finish(job)?;
            cluster.wait("the new Primary", |cluster| {
                Ok(cluster.status(source)?["connections"]
                    .as_array()
                    .is_some_and(|all| {
                        all.iter()
                            .any(|c| c["peer-node-id"] == 1 && c["peer-role"] == "Primary")
                    }))
            })?;
            cluster.wait_in_sync()?;
            // A kernel would write as soon as it is Primary: it is refused, and an open there waits.
            cluster.refused(source, "primary r0", "refused by peer")?;
            let job = cluster.job(source, 0, &scribble_words(source, 5))?;
            cluster.scribble(1, 0)?;
            cluster.adm(1, "secondary r0")?;
            cluster.finish(job)?;
            cluster.wait("the end of its turn", |cluster| {
                Ok(cluster.status(source)?["role"] == "Secondary")
            })?;
            cluster.wait_in_sync()?;
        }
        cluster.check_end(&[EXPECTED, &["Declined by peer"]].concat())?;
    }
    Ok(())
}

#[test]
fn promotions_at_once_have_one_winner_and_nodes_come_and_go() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let cluster = Nine::start_equal(NineSetup::new(&kinds, 9640 + n as u32))?;
        for _ in 0..4 {
            std::thread::scope(|scope| -> Result<()> {
                let all: Vec<_> = (0..3)
                    .map(|node| {
                        let cluster = &cluster;
                        scope.spawn(move || cluster.adm_raw(node, "primary r0"))
                    })
                    .collect();
                let mut winners = 0;
                for thread in all {
                    let (good, _) = thread.join().expect("it does not panic")?;
                    winners += u32::from(good);
                }
                ensure!(winners == 1, "{winners} nodes were promoted at once");
                Ok(())
            })?;
            for node in 0..3 {
                cluster.adm(node, "secondary r0")?;
            }
        }
        // An opened device makes its node Primary, by auto-promote.
        for node in [1, 2] {
            cluster.scribble(node, 0)?;
            cluster.wait("auto-demoted", |cluster| {
                Ok(cluster.status(node)?["role"] == "Secondary")
            })?;
        }
        // A node is forgotten, and comes as a new one.
        cluster.make_primary(1)?;
        cluster.adm(2, "down r0")?;
        for node in [0, 1] {
            cluster.setup_tool(node, "del-peer r0 2")?;
            cluster.setup_tool(node, "forget-peer r0 2")?;
        }
        cluster.scribble(1, 0)?;
        cluster.create_md(2)?;
        for node in [0, 1] {
            cluster.adm(node, "adjust r0")?;
        }
        cluster.adm(2, "up r0")?;
        cluster.wait_in_sync()?;
        cluster.scribble(1, 0)?;
        cluster.adm(1, "secondary r0")?;
        cluster.check_end(EXPECTED)?;
    }
    Ok(())
}

/// What is logged about refused promotions, lost nodes and writes that fail.
const EXPECTED: &[&str] = &[
    "State change failed",
    "Multiple primaries not allowed",
    "the connection was lost: Closed",
    // A process that is killed with bytes that it has not read resets its connections.
    "the connection was lost: Broken",
    "what was written last has failed, and its volume stays open",
    "Buffer I/O error on dev drbd",
    // A kernel that is copied from one node sets all marks towards another one at the same time.
    "bitmap locked for 'set_n_write sync_handshake'",
];
