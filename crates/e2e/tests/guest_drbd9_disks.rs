//! One Lockstep node and one kernel DRBD 9 node: disks that come and go, grow, shrink and are
//! exchanged, nodes without a disk, and other settings of disks and paths, in both role assignments.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::guest_drbd9::{
    Kind, Nine, NineSetup, can_balance_with_drbd9, can_enlarge_drbd9_blocks, can_join_drbd9,
    scribble_words,
};
use lockstep_e2e::guest_writes::{ROT_KIB, rot};

use Kind::{Kernel, Lockstep};

const PAIR: [Kind; 2] = [Lockstep, Kernel];

/// Both role assignments: who is Primary, and the other one.
const ROLES: [(usize, usize); 2] = [(0, 1), (1, 0)];

#[test]
fn a_primary_without_its_disk_goes_on_and_gets_it_back() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let cluster = Nine::start_equal(NineSetup::new(&PAIR, 9500))?;
    for (source, target) in ROLES {
        cluster.make_primary(source)?;
        cluster.scribble(source, 0)?;
        for loser in [source, target] {
            cluster.adm(loser, "detach r0/0")?;
            ensure!(cluster.disk_state(loser, 0)? == "Diskless", "not detached");
            cluster.scribble(source, 0)?;
            cluster.sh(
                source,
                0,
                "dd if=$D bs=64k count=20 iflag=direct of=/dev/null",
            )?;
            cluster.adm(loser, "attach r0/0")?;
            cluster.wait_in_sync()?;
            cluster.scribble(source, 0)?;
        }
        // Under writes.
        let job = cluster.job(source, 0, &scribble_words(source, 300))?;
        for loser in [source, target] {
            cluster.adm(loser, "detach r0/0")?;
            cluster.adm(loser, "attach r0/0")?;
            cluster.wait("its disk is back", |cluster| {
                // A kernel with writes on their way marks what its activity log has, and without a new generation
                // nothing copies that; two kernels do the same. The next resync clears it.
                let may_have_marks = PAIR[source] == Kernel
                    && cluster.replication(source, target, 0)? == "Established"
                    && cluster.disk_state(source, 0)? == "UpToDate"
                    && cluster.disk_state(target, 0)? == "UpToDate";
                Ok(may_have_marks || cluster.is_in_sync()?)
            })?;
        }
        cluster.finish(job)?;
        cluster.adm(target, "disconnect r0")?;
        cluster.scribble(source, 0)?;
        cluster.adm(target, "connect r0")?;
        cluster.wait_in_sync()?;
        cluster.adm(source, "secondary r0")?;
    }
    cluster.check_end(&[])
}

#[test]
fn a_node_without_a_disk_of_either_kind_is_a_client_of_the_other() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for client in [0, 1] {
        let mut setup = NineSetup::new(&PAIR, 9510 + client as u32);
        setup.diskless = vec![client];
        let cluster = Nine::start(setup)?;
        cluster.wait_connected()?;
        let server = 1 - client;
        cluster.adm(server, "primary --force r0")?;
        cluster.adm(server, "secondary r0")?;
        cluster.wait_in_sync()?;
        cluster.adm(client, "primary r0")?;
        cluster.scribble(client, 0)?;
        let write = "dd if=/dev/urandom of=/tmp/client-DIR bs=64k count=9 2>/dev/null; \
             dd if=/tmp/client-DIR of=$D bs=64k seek=50 conv=notrunc,fsync 2>/dev/null; \
             dd if=$D bs=64k skip=50 count=9 iflag=direct 2>/dev/null | cmp - /tmp/client-DIR && rm /tmp/client-DIR";
        cluster.sh(client, 0, &write.replace("DIR", &format!("9510-{client}")))?;
        cluster.sh(client, 0, "blkdiscard -o 8388608 -l 4194304 $D")?;
        cluster.adm(client, "secondary r0")?;
        cluster.adm(server, "primary r0")?;
        cluster.scribble(server, 0)?;
        cluster.adm(server, "secondary r0")?;
        cluster.check_end(&[])?;
    }
    Ok(())
}

#[test]
fn volumes_grow_and_shrink_with_their_disks() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut cluster = Nine::start_equal(NineSetup::new(&PAIR, 9520))?;
    let mut mib = 33;
    for (source, target) in ROLES {
        cluster.make_primary(source)?;
        cluster.scribble(source, 0)?;
        for (commander, words) in [
            (source, "resize r0"),
            (target, "resize r0"),
            (source, "-- --assume-clean resize r0"),
        ] {
            mib += 4;
            cluster.resize_disks(mib)?;
            cluster.adm(commander, words)?;
            cluster.wait("the new size", |cluster| {
                Ok((0..2).all(|node| {
                    cluster
                        .size_kib(node, 0)
                        .is_ok_and(|kib| kib > (mib - 1) * 1024)
                }))
            })?;
            cluster.wait_in_sync()?;
            let seek = (mib - 2) * 256;
            cluster.sh(
                source,
                0,
                &format!("dd if=/dev/urandom of=$D bs=4k count=64 seek={seek} conv=notrunc,fsync"),
            )?;
            // What nobody wrote is not equal if it was taken for equal.
        }
        let before = cluster.size_kib(source, 0)?;
        cluster.adm(source, "secondary r0")?;
        cluster.adm(source, "-- --size=24M resize r0")?;
        cluster.wait("the smaller size", |cluster| {
            Ok((0..2).all(|node| cluster.size_kib(node, 0).is_ok_and(|kib| kib == 24 * 1024)))
        })?;
        cluster.wait_in_sync()?;
        cluster.adm(target, "resize r0")?;
        cluster.wait("the whole size again", |cluster| {
            Ok((0..2).all(|node| cluster.size_kib(node, 0).is_ok_and(|kib| kib == before)))
        })?;
        cluster.wait_in_sync()?;
        cluster.make_primary(source)?;
        cluster.scribble(source, 0)?;
        cluster.adm(source, "secondary r0")?;
    }
    // A disk that has grown before its kernel is told moves what the kernel takes for the place of its metadata, and
    // it may write them in that moment.
    cluster.check_end(&["ASSERTION drbd_md_ss(device->ldev) == device->ldev->md.md_offset FAILED"])
}

#[test]
fn trimmed_blocks_are_resynced_thin_and_bitmap_blocks_may_be_larger() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (n, create_md) in ["", "--bitmap-block-size=64k"].into_iter().enumerate() {
        let mut setup = NineSetup::new(&PAIR, 9530 + n as u32);
        setup.disk += " rs-discard-granularity 64k; discard-zeroes-if-aligned yes;";
        setup.create_md = create_md;
        let cluster = Nine::start_equal(setup)?;
        for (source, target) in ROLES {
            cluster.make_primary(source)?;
            cluster.sh(
                source,
                0,
                "dd if=/dev/urandom of=$D bs=1M count=20 conv=notrunc,fsync",
            )?;
            cluster.wait_in_sync()?;
            cluster.adm(target, "disconnect r0")?;
            cluster.scribble(source, 0)?;
            cluster.sh(source, 0, "blkdiscard -o 4194304 -l 8388608 $D")?;
            cluster.adm(target, "connect r0")?;
            cluster.wait_in_sync()?;
            cluster.scribble(source, 0)?;
            cluster.adm(source, "secondary r0")?;
        }
        cluster.check_end(&[])?;
    }
    Ok(())
}

/// A verify to its end; what was changed behind a node's back is marked in whole bitmap blocks.
fn verify(cluster: &Nine, starter: usize, rotten: bool) -> Result<()> {
    cluster.adm(starter, "verify r0/0")?;
    cluster.wait("the end of a verify", |cluster| {
        for (node, peer) in ROLES {
            let kib = cluster.out_of_sync_kib(node, peer, 0)?;
            let expected = if rotten { kib >= ROT_KIB } else { kib == 0 };
            if cluster.replication(node, peer, 0)? != "Established" || !expected {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

#[test]
fn bitmap_blocks_of_the_kernel_may_be_larger() -> Result<()> {
    if !can_enlarge_drbd9_blocks() {
        return Ok(());
    }
    const BLOCKS: [&str; 4] = [
        "",
        "--bitmap-block-size=16k",
        "--bitmap-block-size=64k",
        "--bitmap-block-size=1M",
    ];
    for (n, (own, kernels)) in [(0, 2), (1, 3), (2, 2), (3, 1)].into_iter().enumerate() {
        let net = "csums-alg sha1; verify-alg crc32c;";
        let mut setup = NineSetup::new(&PAIR, 9580 + n as u32).net(net);
        setup.create_md = BLOCKS[own];
        setup.kernels_create_md = BLOCKS[kernels];
        let cluster = Nine::start(setup)?;
        cluster.wait_connected()?;
        // A first sync of everything.
        cluster.adm(0, "primary --force r0")?;
        cluster.wait_in_sync()?;
        cluster.adm(0, "secondary r0")?;
        for (source, target) in ROLES {
            cluster.make_primary(source)?;
            cluster.scribble(source, 0)?;
            cluster.adm(target, "disconnect r0")?;
            cluster.scribble(source, 0)?;
            cluster.sh(source, 0, "blkdiscard -o 4194304 -l 8388608 $D")?;
            cluster.adm(target, "connect r0")?;
            cluster.wait_in_sync()?;
            for starter in [source, target] {
                verify(&cluster, starter, false)?;
                rot(&cluster.image(target, 0))?;
                verify(&cluster, starter, true)?;
                cluster.adm(target, "invalidate r0/0")?;
                cluster.wait_in_sync()?;
            }
            cluster.scribble(source, 0)?;
            cluster.adm(source, "secondary r0")?;
        }
        cluster.check_end(&[
            "Out of sync: start=",
            "Online verify found",
            "KiB out of sync",
        ])?;
    }
    Ok(())
}

#[test]
fn disks_are_exchanged_with_their_metadata() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut cluster = Nine::start_equal(NineSetup::new(&PAIR, 9540))?;
    for round in 0..2 {
        for (source, target) in ROLES {
            cluster.make_primary(source)?;
            cluster.scribble(source, 0)?;
            if round == 1 {
                cluster.adm(target, "disconnect r0")?;
                cluster.scribble(source, 0)?;
            }
            cluster.adm(source, "secondary r0")?;
            for node in [target, source] {
                cluster.adm(node, "down r0")?;
            }
            cluster
                .guest(1)
                .sh("sync; echo 3 > /proc/sys/vm/drop_caches")?;
            cluster.swap_disks()?;
            for node in [0, 1] {
                cluster.adm(node, "up r0")?;
            }
            cluster.wait_in_sync()?;
        }
    }
    cluster.check_end(&[])
}

/// A node of this project notes in reserved bytes that nothing was written since an older generation. A kernel that
/// uses the disk writes zeros there with the first thing that it notes itself, which is before its first write.
#[test]
fn a_kernel_leaves_no_note_of_unwritten_data() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let cluster = Nine::start_equal(NineSetup::new(&PAIR, 9545))?;
    let (source, kernel) = (0, 1);
    cluster.make_primary(source)?;
    cluster.scribble(source, 0)?;
    for attached_only in [true, false] {
        cluster.adm(kernel, "down r0")?;
        let mut block = superblock(&cluster, kernel)?;
        let current: [u8; 8] = block[8..16].try_into()?;
        block[24..32].copy_from_slice(b"LKSU\0\0\0\x07");
        block[32..40].copy_from_slice(&current);
        block[40..48].copy_from_slice(&0x5a5a_1234_0000_0000_u64.to_be_bytes());
        let image = OpenOptions::new()
            .write(true)
            .open(cluster.image(kernel, 0))?;
        image.write_all_at(&block, image.metadata()?.len() - 4096)?;
        image.sync_all()?;
        cluster
            .guest(1)
            .sh("sync; echo 3 > /proc/sys/vm/drop_caches")?;
        cluster.adm(kernel, "up r0")?;
        cluster.wait_in_sync()?;
        if !attached_only {
            cluster.scribble(source, 0)?;
        }
        cluster.adm(kernel, "down r0")?;
        let block = superblock(&cluster, kernel)?;
        ensure!(block[24..48] == [0; 24], "{:02x?}", &block[24..48]);
        cluster.adm(kernel, "up r0")?;
        cluster.wait_in_sync()?;
    }
    cluster.adm(source, "secondary r0")?;
    cluster.check_end(&[])
}

/// The end of the disk, where internal metadata have their superblock.
fn superblock(cluster: &Nine, node: usize) -> Result<[u8; 4096]> {
    let image = File::open(cluster.image(node, 0))?;
    let mut block = [0; 4096];
    image.read_exact_at(&mut block, image.metadata()?.len() - 4096)?;
    ensure!(block[60..64] == [0x83, 0x74, 0x02, 0x6d], "no superblock");
    Ok(block)
}

#[test]
fn a_connection_with_two_paths_survives_the_loss_of_either() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut setup = NineSetup::new(&PAIR, 9550).net("ping-int 2;");
    setup.two_paths = true;
    let cluster = Nine::start_equal(setup)?;
    for (source, _) in ROLES {
        cluster.make_primary(source)?;
        let job = cluster.job(source, 0, &scribble_words(source, 400))?;
        cluster.cut(0, true)?;
        cluster.wait_apart(0, 1)?;
        cluster.wait_connected()?;
        cluster.cut(0, false)?;
        cluster.network().set_second_link(0, true)?;
        cluster.wait_apart_one(1)?;
        cluster.wait_connected()?;
        cluster.network().set_second_link(0, false)?;
        cluster.finish(job)?;
        cluster.wait_in_sync()?;
        cluster.adm(source, "secondary r0")?;
    }
    cluster.check_end(&[])
}

/// What has passed the two interfaces of the Lockstep node.
fn passed_bytes(cluster: &Nine) -> Result<[u64; 2]> {
    let of = |interface: &str| {
        let output = cluster.network().inside(0, || {
            let words = ["-json", "-statistics", "link", "show", "dev", interface];
            Ok(std::process::Command::new("ip").args(words).output()?)
        })?;
        let links: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let bytes = |way: &str| links[0]["stats64"][way]["bytes"].as_u64();
        let sum = bytes("tx").zip(bytes("rx")).map(|(tx, rx)| tx + rx);
        sum.with_context(|| format!("what has passed {interface}: {output:?}"))
    };
    Ok([of("eth0")?, of("eth1")?])
}

fn wait_for_both_paths(cluster: &Nine) -> Result<()> {
    cluster.wait("both paths established", |cluster| {
        for node in [0, 1] {
            let status = cluster.status(node)?;
            let paths = status["connections"][0]["paths"].as_array().cloned();
            let paths = paths.with_context(|| format!("paths in {status}"))?;
            if paths.len() != 2 || paths.iter().any(|path| path["established"] != true) {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

/// A node disconnects in this way and connects again, in the time of one attempt.
fn reconnect_over_both_paths(cluster: &Nine, node: usize, disconnect: &str) -> Result<()> {
    cluster.adm(node, disconnect)?;
    let begin = Instant::now();
    cluster.wait("the node may connect again", |cluster| {
        Ok(cluster.adm_raw(node, "connect r0")?.0)
    })?;
    wait_for_both_paths(cluster)?;
    cluster.wait_in_sync()?;
    let took = begin.elapsed();
    ensure!(took < Duration::from_secs(20), "it took {took:?}");
    Ok(())
}

#[test]
fn all_paths_at_once_carry_writes_and_are_made_anew() -> Result<()> {
    if !can_balance_with_drbd9() {
        return Ok(());
    }
    let net = "transport lb-tcp; load-balance-paths yes; ping-int 2; verify-alg crc32c;";
    let mut setup = NineSetup::new(&PAIR, 9580).net(net);
    setup.two_paths = true;
    let mut cluster = Nine::start_equal(setup)?;
    for (source, _) in ROLES {
        cluster.make_primary(source)?;
        wait_for_both_paths(&cluster)?;
        cluster.scribble(source, 0)?;
        let bulk = "dd if=/dev/urandom of=$D bs=1M count=12 conv=notrunc,fsync 2>/dev/null";
        let before = passed_bytes(&cluster)?;
        cluster.wait("both paths carry writes", |cluster| {
            cluster.sh(source, 0, bulk)?;
            let now = passed_bytes(cluster)?;
            Ok((0..2).all(|path| now[path] - before[path] > 256 << 10))
        })?;
        cluster.wait_in_sync()?;
        cluster.adm(source, "secondary r0")?;
        // A kernel that took the end of a path for its loss would hang in most of them.
        for node in [0, 1, 0, 1] {
            reconnect_over_both_paths(&cluster, node, "disconnect r0")?;
        }
        // Without a word to the peer.
        for node in [0, 1, 0, 1] {
            reconnect_over_both_paths(&cluster, node, "disconnect --force r0")?;
        }
    }
    // And after the death of either, and of both networks.
    for node in [0, 1] {
        cluster.kill(node)?;
        cluster.revive(node)?;
        wait_for_both_paths(&cluster)?;
    }
    cluster.cut(0, true)?;
    cluster.network().set_second_link(0, true)?;
    cluster.wait_apart(0, 1)?;
    cluster.cut(0, false)?;
    cluster.network().set_second_link(0, false)?;
    wait_for_both_paths(&cluster)?;
    // Two kernels log the first as well while a further path pairs.
    cluster.check_end(&[
        "Closing unexpected connection",
        "the connection was lost: Closed",
        "the connection was lost: Broken",
        "a path acknowledges nothing any more",
    ])
}

#[test]
fn two_primaries_of_unlike_kind_write_apart_and_in_turn() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let setup = NineSetup::new(&PAIR, 9560).net("allow-two-primaries yes;");
    let cluster = Nine::start_equal(setup)?;
    cluster.adm(0, "primary r0")?;
    cluster.adm(1, "primary r0")?;
    for node in [0, 1, 0, 1] {
        cluster.scribble(node, 0)?;
    }
    // Each in a half of its own, at once.
    let words = |node: usize| {
        format!(
            "for n in $(seq 150); do dd if=/dev/urandom of=$D bs=4k count=2 conv=notrunc,fsync \
             seek=$((n * 26 + {})) 2>/dev/null || exit 1; done",
            node * 4096
        )
    };
    let here = cluster.job(0, 0, &words(0))?;
    let there = cluster.job(1, 0, &words(1))?;
    cluster.finish(here)?;
    cluster.finish(there)?;
    for node in [0, 1] {
        cluster.adm(node, "secondary r0")?;
    }
    cluster.check_end(&[])
}
