//! Lockstep and kernel DRBD 9 nodes in rarer situations: volumes in an order, resyncs and whole clusters that die,
//! frozen writes, lost servers of a client, redundancy, and growth without a third node.

use anyhow::{Result, ensure};
use lockstep_e2e::NAMES;
use lockstep_e2e::guest_drbd9::{Kind, Nine, NineSetup, can_join_drbd9, scribble_words};

use Kind::{Kernel, Lockstep};

const PAIR: [Kind; 2] = [Lockstep, Kernel];

/// Both role assignments: who is Primary, and the other one.
const ROLES: [(usize, usize); 2] = [(0, 1), (1, 0)];

/// Both mixtures of three.
const MIXTURES: [[Kind; 3]; 2] = [[Lockstep, Lockstep, Kernel], [Kernel, Lockstep, Kernel]];

/// A slow resync, in which something else can happen.
const SLOW_RESYNC: &str = "c-plan-ahead 0; resync-rate 2M;";

/// Durable blocks at a place that [`scribble_words`] leaves alone.
const MARK: &str = "dd if=/dev/urandom of=$D bs=4k count=16 seek=8050 conv=notrunc,fsync";

/// What is at the place of [`MARK`].
fn mark(cluster: &Nine, node: usize) -> Result<String> {
    let words = "dd if=$D bs=4k count=16 skip=8050 iflag=direct 2>/dev/null | md5sum";
    cluster.sh(node, 0, words)
}

/// Starts writes that do not end, and waits until a peer has got some.
fn write_on(cluster: &Nine, source: usize, target: usize) -> Result<()> {
    let received = |cluster: &Nine| -> Result<u64> {
        let status = cluster.status(target)?;
        let all = status["connections"].as_array();
        let all = all.cloned().unwrap_or_default();
        let each = all.iter().map(|c| &c["peer_devices"][0]["received"]);
        Ok(each.filter_map(serde_json::Value::as_u64).sum())
    };
    let before = received(cluster)?;
    cluster.job(source, 0, &scribble_words(source, 100_000))?;
    cluster.wait("writes", |cluster| Ok(received(cluster)? > before + 400))
}

#[test]
fn a_volume_is_resynced_after_another_one() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut setup = NineSetup::new(&PAIR, 9700);
    setup.volumes = 2;
    setup.disk = SLOW_RESYNC.to_string();
    let minor = setup.minor;
    let cluster = Nine::start_equal(setup)?;
    for (source, target) in ROLES {
        for chooser in [source, target] {
            let after = |other: i64| format!("disk-options {minor} --resync-after={other}");
            cluster.setup_tool(chooser, &after(i64::from(minor) + 1))?;
            cluster.make_primary(source)?;
            cluster.adm(target, "disconnect r0")?;
            for volume in [0, 1] {
                let bulk = "dd if=/dev/urandom of=$D bs=1M count=20 conv=notrunc,fsync";
                cluster.sh(source, volume, bulk)?;
            }
            cluster.adm(source, "pause-sync r0/1")?;
            cluster.adm(target, "connect r0")?;
            cluster.wait("both volumes wait", |cluster| {
                for volume in [0, 1] {
                    if cluster.replication(source, target, volume)? != "PausedSyncS"
                        || cluster.replication(target, source, volume)? != "PausedSyncT"
                    {
                        return Ok(false);
                    }
                }
                Ok(true)
            })?;
            cluster.scribble(source, 0)?;
            cluster.scribble(source, 1)?;
            ensure!(
                cluster.replication(target, source, 0)? == "PausedSyncT",
                "volume 0 does not wait"
            );
            cluster.adm(source, "resume-sync r0/1")?;
            cluster.wait_in_sync()?;
            cluster.setup_tool(chooser, &after(-1))?;
            cluster.adm(source, "secondary r0")?;
        }
    }
    cluster.check_end(&[])
}

#[test]
fn both_nodes_die_under_writes_and_return() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut cluster = Nine::start_equal(NineSetup::new(&PAIR, 9710))?;
    for (source, target) in ROLES {
        for order in [[source, target], [target, source]] {
            cluster.make_primary(source)?;
            cluster.sh(source, 0, MARK)?;
            let marked = mark(&cluster, source)?;
            write_on(&cluster, source, target)?;
            for node in order {
                cluster.kill(node)?;
            }
            for node in order {
                cluster.revive(node)?;
            }
            cluster.wait_in_sync()?;
            cluster.make_primary(target)?;
            ensure!(mark(&cluster, target)? == marked, "a durable write is gone");
            cluster.scribble(target, 0)?;
            cluster.adm(target, "secondary r0")?;
        }
    }
    cluster.check_end(LOST)
}

#[test]
fn a_resync_whose_source_or_target_dies_goes_on() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut setup = NineSetup::new(&PAIR, 9720);
    setup.disk = SLOW_RESYNC.to_string();
    let mut cluster = Nine::start_equal(setup)?;
    for (source, target) in ROLES {
        for victim in [target, source] {
            cluster.make_primary(source)?;
            cluster.sh(source, 0, MARK)?;
            let marked = mark(&cluster, source)?;
            write_on(&cluster, source, target)?;
            cluster.adm(target, "invalidate r0/0")?;
            cluster.wait("a resync", |cluster| {
                Ok(cluster.replication(target, source, 0)? == "SyncTarget")
            })?;
            cluster.kill(victim)?;
            cluster.wait_apart_one(1 - victim)?;
            cluster.revive(victim)?;
            cluster.wait_in_sync()?;
            if victim == target {
                // Ends the writes, which go on.
                cluster.kill(source)?;
                cluster.wait_apart_one(target)?;
                cluster.revive(source)?;
                cluster.wait_in_sync()?;
            }
            cluster.make_primary(target)?;
            ensure!(mark(&cluster, target)? == marked, "a durable write is gone");
            cluster.scribble(target, 0)?;
            cluster.adm(target, "secondary r0")?;
        }
    }
    cluster.check_end(LOST)
}

#[test]
fn writes_that_the_operator_holds_back_survive_a_lost_peer() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let cluster = Nine::start_equal(NineSetup::new(&PAIR, 9730).net("ping-int 2;"))?;
    for (source, _) in ROLES {
        cluster.make_primary(source)?;
        for cut in [false, true] {
            cluster.scribble(source, 0)?;
            cluster.adm(source, "suspend-io r0/0")?;
            let job = cluster.job(source, 0, MARK)?;
            if cut {
                cluster.cut(1, true)?;
                cluster.wait_apart(0, 1)?;
            }
            cluster.adm(source, "resume-io r0/0")?;
            cluster.finish(job)?;
            if cut {
                cluster.cut(1, false)?;
            }
            cluster.wait_in_sync()?;
        }
        cluster.adm(source, "secondary r0")?;
    }
    cluster.check_end(LOST)
}

#[test]
fn a_client_without_its_only_server_waits_for_it() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for client in [0, 1] {
        let mut setup = NineSetup::new(&PAIR, 9740 + client as u32).net("ping-int 2;");
        setup.diskless = vec![client];
        setup.options = "on-no-data-accessible suspend-io;".to_string();
        let mut cluster = Nine::start(setup)?;
        cluster.wait_connected()?;
        let server = 1 - client;
        cluster.adm(server, "primary --force r0")?;
        cluster.adm(server, "secondary r0")?;
        cluster.wait_in_sync()?;
        cluster.adm(client, "primary r0")?;
        cluster.sh(client, 0, MARK)?;
        let marked = mark(&cluster, client)?;
        let job = cluster.job(client, 0, &scribble_words(client, 200))?;
        cluster.kill(server)?;
        cluster.wait_apart_one(client)?;
        ensure!(
            cluster.status(client)?["suspended"] == true,
            "it is not frozen"
        );
        cluster.revive(server)?;
        cluster.finish(job)?;
        cluster.wait_in_sync()?;
        let job = cluster.job(client, 0, &scribble_words(client, 200))?;
        cluster.cut(1, true)?;
        cluster.wait_apart(0, 1)?;
        cluster.cut(1, false)?;
        cluster.finish(job)?;
        cluster.wait_in_sync()?;
        ensure!(mark(&cluster, client)? == marked, "a durable write is gone");
        cluster.adm(client, "secondary r0")?;
        cluster.make_primary(server)?;
        ensure!(mark(&cluster, server)? == marked, "a durable write is gone");
        cluster.adm(server, "secondary r0")?;
        cluster.check_end(LOST)?;
    }
    Ok(())
}

#[test]
fn a_server_that_missed_a_clients_last_writes_is_copied() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        for client in [1, 2] {
            let mut setup = NineSetup::new(&kinds, 9750 + n as u32).net("ping-int 2;");
            setup.diskless = vec![client];
            let mut cluster = Nine::start_equal(setup)?;
            for (lost, kept) in [
                ((client + 1) % 3, (client + 2) % 3),
                ((client + 2) % 3, (client + 1) % 3),
            ] {
                cluster.make_primary(client)?;
                cluster.scribble(client, 0)?;
                cluster.cut(lost, true)?;
                cluster.wait_apart(client, lost)?;
                cluster.sh(client, 0, MARK)?;
                let marked = mark(&cluster, client)?;
                cluster.kill(client)?;
                cluster.wait("the loss of the client", |cluster| {
                    Ok(cluster.connection_state(kept, client)? != "Connected"
                        && cluster.connection_state(kept, lost)? != "Connected")
                })?;
                cluster.adm(kept, "primary r0")?;
                ensure!(mark(&cluster, kept)? == marked, "a durable write is gone");
                cluster.scribble(kept, 0)?;
                cluster.cut(lost, false)?;
                cluster.revive(client)?;
                cluster.wait_in_sync()?;
                cluster.make_primary(lost)?;
                ensure!(mark(&cluster, lost)? == marked, "a durable write is gone");
                cluster.scribble(lost, 0)?;
                cluster.adm(lost, "secondary r0")?;
            }
            cluster.check_end(LOST)?;
        }
    }
    Ok(())
}

#[test]
fn a_primary_needs_as_many_good_disks_as_the_redundancy_says() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let mut setup = NineSetup::new(&kinds, 9760 + n as u32);
        setup.options =
            "quorum majority; quorum-minimum-redundancy 2; on-no-quorum suspend-io;".to_string();
        let mut cluster = Nine::start_equal(setup)?;
        for primary in [0, 1, 2] {
            let (a, b) = ((primary + 1) % 3, (primary + 2) % 3);
            cluster.make_primary(primary)?;
            cluster.scribble(primary, 0)?;
            cluster.kill(a)?;
            cluster.wait("the loss of a node", |cluster| {
                Ok(cluster.connection_state(primary, a)? != "Connected"
                    && cluster.connection_state(b, a)? != "Connected")
            })?;
            cluster.scribble(primary, 0)?;
            cluster.adm(b, "detach --force r0/0")?;
            cluster.wait("the loss of the quorum", |cluster| {
                Ok(cluster.status(primary)?["devices"][0]["quorum"] == false)
            })?;
            let job = cluster.job(primary, 0, MARK)?;
            cluster.adm(b, "attach r0/0")?;
            if kinds[primary] == Kernel {
                // A kernel parts from the node that has cost it the quorum, of either kind, until an operator
                // connects them again.
                cluster.wait("the kernel may connect again", |cluster| {
                    Ok(cluster.connection_state(primary, b)? == "StandAlone"
                        && cluster
                            .adm_raw(primary, &format!("connect r0:{}", NAMES[b]))?
                            .0)
                })?;
            }
            cluster.finish(job)?;
            cluster.revive(a)?;
            // A kernel whose disk came back under the generation of the Primary that it has followed already wants
            // to copy all to another kernel that was away. If that one is copied by the Primary first, marks stay
            // on both until the next resync between them.
            let two_kernels = |x: usize, y: usize| {
                ![x, y].contains(&primary) && [kinds[x], kinds[y]] == [Kernel; 2]
            };
            cluster.wait("in sync", |cluster| cluster.is_in_sync_but(two_kernels))?;
            cluster.scribble(primary, 0)?;
            cluster.adm(primary, "secondary r0")?;
        }
        let parted = [
            "nodes up_to_date, need 2 for quorum-minimum-redundancy",
            "State change failed: No quorum",
            // Copied from the one while the other one connects.
            "is of another generation than node",
        ];
        cluster.check_end(&[LOST, &parted].concat())?;
    }
    Ok(())
}

#[test]
fn a_volume_grows_while_a_third_node_is_away() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let mut cluster = Nine::start_equal(NineSetup::new(&kinds, 9770 + n as u32))?;
        let mut mib = 33;
        for primary in [0, 1, 2] {
            let (other, away) = ((primary + 1) % 3, (primary + 2) % 3);
            cluster.make_primary(primary)?;
            cluster.scribble(primary, 0)?;
            cluster.adm(away, "disconnect r0")?;
            mib += 4;
            cluster.resize_disks(mib)?;
            // Nobody knows whether the third one has grown.
            let before = cluster.size_kib(primary, 0)?;
            let _ = cluster.adm_raw(other, "resize r0")?;
            ensure!(cluster.size_kib(primary, 0)? == before, "it has grown");
            cluster.adm(primary, "-- --assume-peer-has-space resize r0")?;
            let is_grown = |cluster: &Nine, node: usize| {
                let kib = cluster.size_kib(node, 0);
                kib.is_ok_and(|kib| kib > (mib - 1) * 1024)
            };
            cluster.wait("the new size", |cluster| {
                Ok(is_grown(cluster, primary) && is_grown(cluster, other))
            })?;
            let seek = (mib - 2) * 256;
            let write =
                format!("dd if=/dev/urandom of=$D bs=4k count=64 seek={seek} conv=notrunc,fsync");
            cluster.sh(primary, 0, &write)?;
            cluster.adm(away, "connect r0")?;
            cluster.wait("the new size on all", |cluster| {
                Ok((0..3).all(|node| is_grown(cluster, node)))
            })?;
            cluster.wait_in_sync()?;
            cluster.sh(primary, 0, &write)?;
            cluster.adm(primary, "secondary r0")?;
        }
        let grown = [
            "ASSERTION drbd_md_ss(device->ldev) == device->ldev->md.md_offset FAILED",
            "nobody knows how large its disk is",
        ];
        // A kernel that meets the other kernel first does not grow with it, and cannot read its bitmap.
        let kernels = (0..3).filter(|node| kinds[*node] == Kernel);
        let between: Vec<String> = match n {
            0 => Vec::new(),
            _ => kernels
                .flat_map(|node| refused_bitmap(NAMES[node]))
                .collect(),
        };
        let between: Vec<&str> = between.iter().map(String::as_str).collect();
        cluster.check_end(&[LOST, &grown, &between].concat())?;
    }
    Ok(())
}

/// What a kernel logs when it cannot read the bitmap of a peer.
fn refused_bitmap(peer: &str) -> [String; 4] {
    [
        format!("{peer}: bitmap overflow"),
        format!("{peer}: error receiving P_COMPRESSED_BITMAP"),
        format!("{peer}: conn( Connected -> ProtocolError )"),
        format!("{peer}: conn( ProtocolError -> Unconnected )"),
    ]
}

/// What is logged about lost nodes.
const LOST: &[&str] = &[
    "the connection was lost: Closed",
    // A process that is killed with bytes that it has not read resets its connections.
    "the connection was lost: Broken",
    // A kernel that is copied from one node sets all marks towards another one at the same time.
    "bitmap locked for 'set_n_write sync_handshake'",
    // And clears marks towards one node while it receives the bitmap of another one.
    "op clear, bitmap locked for 'receive bitmap'",
];
