//! One Lockstep node and one kernel DRBD 9 node: syncs, writes, options, verifies, in both role
//! assignments.

use anyhow::{Result, ensure};
use lockstep_e2e::guest_drbd9::{Kind, Nine, NineSetup, PACE, can_join_drbd9};
use lockstep_e2e::guest_writes::{ROT_KIB, rot};

use Kind::{Kernel, Lockstep};

const PAIR: [Kind; 2] = [Lockstep, Kernel];

/// Both role assignments: who is Primary, and the other one.
const ROLES: [(usize, usize); 2] = [(0, 1), (1, 0)];

#[test]
fn full_sync_and_bitmap_resync_work_both_ways() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    for (source, target) in ROLES {
        let cluster = Nine::start(NineSetup::new(&PAIR, 9300 + 10 * source as u32))?;
        cluster.wait_connected()?;
        cluster.adm(source, "primary --force r0")?;
        cluster.scribble(source, 0)?;
        cluster.wait_in_sync()?;
        for node in [target, source] {
            cluster.adm(node, "disconnect r0")?;
            cluster.scribble(source, 0)?;
            cluster.adm(node, "connect r0")?;
            cluster.wait_in_sync()?;
        }
        cluster.make_primary(target)?;
        cluster.scribble(target, 0)?;
        cluster.adm(target, "secondary r0")?;
        cluster.check_end(&[])?;
    }
    Ok(())
}

/// Writes that are read back, a discard, and a file system with what mkfs zeroes.
const MIXED_WRITES: &str = "set -e; F=$(mktemp); for n in 1 2 3 4 5; do \
    dd if=/dev/urandom of=$F bs=64k count=9 2>/dev/null; \
    dd if=$F of=$D bs=64k seek=$((n * 37)) conv=notrunc,fsync 2>/dev/null; \
    dd if=$D bs=64k skip=$((n * 37)) count=9 iflag=direct 2>/dev/null | cmp - $F; done; rm $F; \
    blkdiscard -o 8388608 -l 4194304 $D; \
    dd if=/dev/urandom of=$D bs=4k count=9 seek=2100 conv=notrunc,fsync 2>/dev/null; \
    dd if=$D bs=4k skip=2048 count=52 iflag=direct 2>/dev/null | tr -d '\\0' | wc -c | grep -qx 0; \
    mkfs.ext4 -q -F -E lazy_itable_init=0,nodiscard $D; sync";

#[test]
fn protocols_that_change_while_connected_carry_writes_discards_and_zeroes() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let mut setup = NineSetup::new(&PAIR, 9320);
    setup.volumes = 2;
    let mut cluster = Nine::start_equal(setup)?;
    for letter in ['A', 'B', 'C'] {
        cluster.setup.net = format!("protocol {letter}; {PACE}");
        cluster.adjust()?;
        for (source, _) in ROLES {
            cluster.make_primary(source)?;
            for volume in [0, 1] {
                cluster.sh(source, volume, MIXED_WRITES)?;
                cluster.scribble(source, volume)?;
            }
            cluster.adm(source, "secondary r0")?;
            cluster.wait_in_sync()?;
        }
    }
    for node in [0, 1, 0] {
        cluster.adm(node, "down r0")?;
        cluster.wait_apart_one(1 - node)?;
        cluster.adm(node, "up r0")?;
        cluster.wait_in_sync()?;
    }
    cluster.check_end(&[])
}

/// 100 blocks that are written again as they are, and some that change.
const SAME: &str = "dd if=$D of=$D bs=4k count=100 seek=1000 skip=1000 conv=notrunc,fsync";

#[test]
fn checksums_and_verifies_work_both_ways() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let setup = NineSetup::new(&PAIR, 9330).net("csums-alg sha1; verify-alg crc32c;");
    let cluster = Nine::start_equal(setup)?;
    for (source, target) in ROLES {
        cluster.make_primary(source)?;
        cluster.scribble(source, 0)?;
        cluster.adm(target, "disconnect r0")?;
        cluster.sh(source, 0, SAME)?;
        cluster.scribble(source, 0)?;
        cluster.adm(target, "connect r0")?;
        cluster.wait_in_sync()?;
        for starter in [source, target] {
            // Nothing differs.
            verify(&cluster, starter, 0)?;
            rot(&cluster.image(target, 0))?;
            verify(&cluster, starter, ROT_KIB)?;
            // A kernel keeps what it found when it reconnects, and copies nothing.
            cluster.adm(target, "invalidate r0/0")?;
            cluster.wait_in_sync()?;
            verify(&cluster, starter, 0)?;
        }
        cluster.adm(source, "secondary r0")?;
    }
    let log = cluster.kernel_log(1)?;
    ensure!(log.contains("eliminated"), "no resync by checksums");
    cluster.check_end(&[
        "Out of sync: start=",
        "Online verify found 3 4k block",
        "Online verify found 3",
        "12 KiB out of sync",
    ])
}

/// A verify to its end; both count the same marks.
fn verify(cluster: &Nine, starter: usize, kib: u64) -> Result<()> {
    cluster.adm(starter, "verify r0/0")?;
    cluster.wait("the end of a verify", |cluster| {
        for node in [0, 1] {
            if cluster.replication(node, 1 - node, 0)? != "Established"
                || cluster.out_of_sync_kib(node, 1 - node, 0)? != kib
            {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

#[test]
fn secrets_and_digests_are_understood_both_ways() -> Result<()> {
    if !can_join_drbd9() {
        return Ok(());
    }
    let right = "cram-hmac-alg sha256; shared-secret right;";
    let base = format!("protocol C; {PACE}");
    let mut cluster = Nine::start_equal(
        NineSetup::new(&PAIR, 9340).net(&format!("{right} data-integrity-alg crc32c;")),
    )?;
    for (source, _) in ROLES {
        cluster.make_primary(source)?;
        cluster.sh(source, 0, MIXED_WRITES)?;
        cluster.scribble(source, 0)?;
        cluster.adm(source, "secondary r0")?;
    }
    cluster.wait_in_sync()?;
    // Each side in turn has another secret.
    for wrong in [0, 1] {
        for node in [0, 1] {
            cluster.adm(node, "down r0")?;
        }
        for node in [0, 1] {
            let word = if node == wrong { "wrong" } else { "right" };
            cluster.setup.net = format!("{base} cram-hmac-alg sha1; shared-secret {word};");
            cluster.configure_node(node)?;
            cluster.adm(node, "up r0")?;
        }
        cluster.wait("a refused connection", |cluster| {
            Ok(cluster.connection_state(0, 1)? == "StandAlone"
                || cluster.connection_state(1, 0)? == "StandAlone")
        })?;
        for node in [0, 1] {
            cluster.adm(node, "down r0")?;
        }
        cluster.setup.net = format!("{base} {right}");
        cluster.configure()?;
        for node in [0, 1] {
            cluster.adm(node, "up r0")?;
        }
        cluster.wait_in_sync()?;
    }
    cluster.check_end(&[
        "Authentication of peer failed",
        "Failed to create",
        "authentication",
        "compare shared-secret",
    ])
}
