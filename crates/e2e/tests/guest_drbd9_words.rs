//! Lockstep and kernel DRBD 9 nodes where an operator or a handler has the last word: verifies among three, forced
//! promotions, and fencing.

use anyhow::{Result, ensure};
use lockstep_e2e::guest_drbd9::{Kind, Nine, NineSetup, can_join_drbd9};
use lockstep_e2e::guest_writes::{ROT_KIB, rot};

use Kind::{Kernel, Lockstep};

const PAIR: [Kind; 2] = [Lockstep, Kernel];

/// Both mixtures of three.
const MIXTURES: [[Kind; 3]; 2] = [[Lockstep, Lockstep, Kernel], [Kernel, Lockstep, Kernel]];

/// Waits until no verify runs and all marks between two nodes are as `kib` says, of either side.
fn wait_verified(cluster: &Nine, kib: impl Fn(usize, usize) -> u64) -> Result<()> {
    let nodes = cluster.setup.nodes.len();
    cluster.wait("the end of a verify", |cluster| {
        for a in 0..nodes {
            for b in (0..nodes).filter(|b| *b != a) {
                if cluster.replication(a, b, 0)? != "Established"
                    || cluster.out_of_sync_kib(a, b, 0)? != kib(a, b)
                {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    })
}

#[test]
fn a_verify_among_three_marks_who_differs() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let setup = NineSetup::new(&kinds, 9800 + n as u32).net("verify-alg crc32c;");
        let cluster = Nine::start_equal(setup)?;
        for starter in [0, 1, 2] {
            let rotten = (starter + 1) % 3;
            cluster.make_primary(starter)?;
            cluster.scribble(starter, 0)?;
            cluster.adm(starter, "verify r0/0")?;
            wait_verified(&cluster, |_, _| 0)?;
            rot(&cluster.image(rotten, 0))?;
            // All of a node's peers at once.
            cluster.adm(starter, "verify r0/0")?;
            let between = [starter, rotten];
            wait_verified(&cluster, |a, b| {
                let differ = between.contains(&a) && between.contains(&b);
                if differ { ROT_KIB } else { 0 }
            })?;
            // All blocks of a kernel's disk may stay marked towards the node that it is not copied from
            // (docs/compatibility.md), so that only the marked ones are copied.
            let words =
                format!("-- --sync-from-peer-node-id={starter} --reset-bitmap=no invalidate r0/0");
            cluster.adm(rotten, &words)?;
            cluster.wait_in_sync()?;
            cluster.adm(starter, "verify r0/0")?;
            wait_verified(&cluster, |_, _| 0)?;
            cluster.adm(starter, "secondary r0")?;
        }
        cluster.check_end(&[
            "Out of sync: start=",
            "Online verify found 3",
            "12 KiB out of sync",
            "bitmap locked for 'set_n_write sync_handshake'",
        ])?;
    }
    Ok(())
}

#[test]
fn an_outdated_disk_of_three_is_made_the_good_one() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, kinds) in MIXTURES.into_iter().enumerate() {
        let cluster = Nine::start_equal(NineSetup::new(&kinds, 9810 + n as u32))?;
        for forced in [0, 1, 2] {
            let others = [(forced + 1) % 3, (forced + 2) % 3];
            cluster.make_primary(others[0])?;
            cluster.scribble(others[0], 0)?;
            cluster.adm(others[0], "secondary r0")?;
            cluster.adm(forced, "disconnect r0")?;
            // `drbdadm outdate` of Debian's tools takes metadata that are not in use only.
            cluster.setup_tool(forced, &format!("outdate {}", cluster.setup.minor))?;
            ensure!(cluster.disk_state(forced, 0)? == "Outdated");
            for other in others {
                cluster.adm(other, "down r0")?;
            }
            cluster.refused(forced, "primary r0", "-2")?;
            cluster.adm(forced, "primary --force r0")?;
            ensure!(cluster.disk_state(forced, 0)? == "UpToDate");
            cluster.scribble(forced, 0)?;
            cluster.adm(forced, "connect r0")?;
            for other in others {
                cluster.adm(other, "up r0")?;
            }
            cluster.wait_in_sync()?;
            cluster.scribble(forced, 0)?;
            cluster.adm(forced, "secondary r0")?;
        }
        cluster.check_end(&["bitmap locked for 'set_n_write sync_handshake'"])?;
    }
    Ok(())
}

/// Whoever unmounts is Secondary before the next command runs on the other node, which would be Outdated else.
#[test]
fn a_peer_that_leaves_behind_an_unmount_is_not_outdated() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let cluster = Nine::start_equal(NineSetup::new(&PAIR, 9830))?;
    for (user, leaver) in [(0, 1), (1, 0)] {
        cluster.sh(user, 0, "mkfs.ext4 -q $D")?;
        for _ in 0..5 {
            let script = "m=$(mktemp -d) && mount -t ext4 $D $m && date > $m/file && umount $m";
            cluster.sh(user, 0, script)?;
            cluster.adm(leaver, "disconnect r0")?;
            ensure!(
                cluster.disk_state(leaver, 0)? == "UpToDate",
                "{}",
                cluster.report()
            );
            cluster.adm(leaver, "connect r0")?;
            cluster.wait_in_sync()?;
        }
    }
    cluster.check_end(&["EXT4-fs"])
}

#[test]
fn a_fenced_peer_does_not_hold_writes_and_is_released() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut setup = NineSetup::new(&PAIR, 9820).net("fencing resource-and-stonith; ping-int 2;");
    setup.handlers = &[("fence-peer", 7), ("unfence-peer", 0)];
    let mut cluster = Nine::start_equal(setup)?;
    for (source, target) in [(0, 1), (1, 0)] {
        for dies in [false, true] {
            cluster.make_primary(source)?;
            cluster.scribble(source, 0)?;
            for node in [0, 1] {
                cluster.called(node)?;
            }
            match dies {
                true => cluster.kill(target)?,
                false => cluster.cut(1, true)?,
            }
            cluster.scribble(source, 0)?;
            let called = cluster.called(source)?;
            // The name is a part of `unfence-peer`.
            ensure!(called.lines().any(|name| name == "fence-peer"), "{called}");
            match dies {
                true => cluster.revive(target)?,
                false => cluster.cut(1, false)?,
            }
            cluster.wait_in_sync()?;
            cluster.wait("the release of the peer", |cluster| {
                let mut released = false;
                for node in [0, 1] {
                    released |= cluster.called(node)?.contains("unfence-peer");
                }
                Ok(released)
            })?;
            cluster.scribble(source, 0)?;
            cluster.adm(source, "secondary r0")?;
        }
    }
    cluster.check_end(&[
        "the connection was lost: Closed",
        "the connection was lost: Broken",
        "fence-peer",
    ])
}
