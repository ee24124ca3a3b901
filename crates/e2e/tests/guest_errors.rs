//! One Lockstep node and one kernel DRBD 8.4 node whose disks fail: with each `on-io-error`, on
//! either side, as Primary and as Secondary. No user of the device notices while one disk is left,
//! and a repaired or new disk is resynced.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::guest::can_emulate;
use lockstep_e2e::guest_disks::{BAD_BLOCK, Fault};
use lockstep_e2e::guest_drbd::drbd_state;
use lockstep_e2e::guest_mixed::{Disks, Mixed84, MixedSetup, PACE};
use lockstep_e2e::guest_trouble::Side;
use lockstep_e2e::{can_mount, run};

/// What a user of the Primary's device does first once a disk has failed.
#[derive(Clone, Copy, Debug)]
enum First {
    Read,
    Write,
}

/// Blocks that are written and read, the bad one among them.
const BLOCKS: std::ops::Range<u64> = BAD_BLOCK - 2..BAD_BLOCK + 6;

/// What `dd` needs to read them.
fn place() -> String {
    let count = BLOCKS.end - BLOCKS.start;
    format!("bs=4k skip={} count={count}", BLOCKS.start)
}

/// Digests of the blocks in a file, in order.
fn digests(file: &str) -> String {
    format!(
        "for n in 0 1 2 3 4 5 6 7; do dd if={file} bs=4k skip=$n count=1 2> /dev/null | md5sum; done"
    )
}

/// The same of a device or file of this machine.
fn digests_here(pair: &Mixed84, path: &Path, direct: &str) -> Result<String> {
    let copy = pair.notes().join("read");
    let copy = copy.display();
    let script = format!(
        "dd if=\"$0\" of={copy} {} {direct} status=none && {}",
        place(),
        digests(&copy.to_string())
    );
    let output = Command::new("sh")
        .arg("-c")
        .arg(script)
        .arg(path)
        .output()?;
    ensure!(output.status.success(), "{path:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// The blocks as a user of the Primary's device sees them.
fn seen(pair: &Mixed84, primary: Side) -> Result<String> {
    match primary {
        Side::Kernel => pair.kernel.sh(&format!(
            "dd if=/dev/drbd0 of=/run/read {} iflag=direct 2> /dev/null || exit 1; {}",
            place(),
            digests("/run/read")
        )),
        Side::Lockstep => digests_here(pair, &pair.device(0)?, "iflag=direct"),
    }
}

/// The blocks on a node's disk.
fn stored(pair: &Mixed84, side: Side) -> Result<String> {
    digests_here(pair, &pair.disk(side.name(), 0), "")
}

/// Writes them anew on the Primary.
fn write(pair: &Mixed84, primary: Side) -> Result<()> {
    let words = format!(
        "if=/dev/urandom bs=4k seek={} count={} conv=notrunc,fsync",
        BLOCKS.start,
        BLOCKS.end - BLOCKS.start
    );
    match primary {
        Side::Kernel => pair
            .kernel
            .sh(&format!("dd of=/dev/drbd0 {words}"))
            .map(drop),
        Side::Lockstep => run(Command::new("dd")
            .arg(format!("of={}", pair.device(0)?.display()))
            .args(words.split_whitespace())
            .arg("status=none"))
        .map(drop),
    }
}

/// The users of the Primary read and write, and see what is on the disk that is left.
fn use_it(pair: &Mixed84, primary: Side, left: Side, first: First) -> Result<()> {
    if matches!(first, First::Write) {
        write(pair, primary).context("the first write")?;
    }
    for _ in 0..2 {
        let seen = seen(pair, primary).context("a read")?;
        let stored = [stored(pair, left)?, stored(pair, left.other())?];
        ensure!(
            seen == stored[0],
            "old or wrong data are read:\n{seen}the good disk has\n{}the other one\n{}{}",
            stored[0],
            stored[1],
            pair.report()
        );
        write(pair, primary).context("a write")?;
    }
    Ok(())
}

/// A disk fails as a whole, is left, repaired, and taken back.
fn whole_disk(pair: &Mixed84, failing: Side, primary: Side, first: First) -> Result<()> {
    primary.adm(pair, &["primary", "r0"])?;
    write(pair, primary)?;
    pair.set_fault(failing, Fault::Everything)?;
    use_it(pair, primary, failing.other(), first)?;
    failing.wait_disk(pair, "Diskless")?;
    use_it(pair, primary, failing.other(), First::Read)?;
    pair.set_fault(failing, Fault::None)?;
    failing.adm(pair, &["attach", "r0"])?;
    pair.wait_in_sync()?;
    ensure!(stored(pair, failing)? == stored(pair, failing.other())?);
    primary.adm(pair, &["secondary", "r0"])
}

/// The failed disk is exchanged for an empty one.
fn new_disk(pair: &Mixed84, failing: Side, primary: Side) -> Result<()> {
    primary.adm(pair, &["primary", "r0"])?;
    pair.set_fault(failing, Fault::Everything)?;
    use_it(pair, primary, failing.other(), First::Write)?;
    failing.wait_disk(pair, "Diskless")?;
    pair.set_fault(failing, Fault::None)?;
    match failing {
        Side::Kernel => {
            pair.kernel
                .sh("dd if=/dev/zero of=/dev/dm-0 bs=64k count=512 conv=fsync")?;
            pair.kernel.sh("yes yes | drbdadm create-md --force r0")?;
        }
        Side::Lockstep => {
            let disk = std::fs::File::options()
                .write(true)
                .open(pair.disk(failing.name(), 0))?;
            disk.write_all_at(&vec![0; disk.metadata()?.len() as usize], 0)?;
            pair.adm(&["create-md", "--force", "r0"])?;
        }
    }
    failing.adm(pair, &["attach", "r0"])?;
    pair.wait_in_sync()?;
    ensure!(stored(pair, failing)? == stored(pair, failing.other())?);
    primary.adm(pair, &["secondary", "r0"])
}

/// One block of a disk is bad. The disk stays, but does not count as good any more.
fn bad_block(pair: &Mixed84, failing: Side, primary: Side, first: First) -> Result<()> {
    primary.adm(pair, &["primary", "r0"])?;
    write(pair, primary)?;
    pair.set_fault(failing, Fault::OneBlock)?;
    use_it(pair, primary, failing.other(), first)?;
    failing.wait_disk(pair, "Inconsistent")?;
    pair.set_fault(failing, Fault::None)?;
    if failing == primary {
        // It is copied as a whole.
        failing.adm(pair, &["invalidate", "r0/0"])?;
    } else {
        // When it is attached again, it gets what it may lack.
        failing.adm(pair, &["detach", "r0"])?;
        failing.wait_disk(pair, "Diskless")?;
        failing.adm(pair, &["attach", "r0"])?;
    }
    pair.wait_in_sync()?;
    ensure!(stored(pair, failing)? == stored(pair, failing.other())?);
    primary.adm(pair, &["secondary", "r0"])
}

#[test]
fn failing_disks_beside_a_kernel_84_peer_cost_no_data() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    let mut pair = Mixed84::start(MixedSetup {
        disk: "on-io-error detach;".into(),
        disks: Disks::CanFail,
        handlers: &["local-io-error"],
        ..MixedSetup::new(
            &format!("protocol C; data-integrity-alg crc32c; {PACE}"),
            8590,
        )
    })?;
    pair.wait_connected()?;
    pair.kernel
        .sh("drbdadm new-current-uuid --clear-bitmap r0/0")?;
    pair.wait_in_sync()?;
    let every = |pair: &Mixed84, one: &dyn Fn(&Mixed84, Side, Side, First) -> Result<()>| {
        for failing in Side::BOTH {
            for primary in Side::BOTH {
                // Reads go to the Primary's own disk.
                let firsts = [First::Write, First::Read];
                for first in &firsts[..1 + usize::from(failing == primary)] {
                    let first = *first;
                    one(pair, failing, primary, first).with_context(|| {
                        format!("{failing:?} fails, {primary:?} is Primary, {first:?} first")
                    })?;
                }
            }
        }
        Ok::<_, anyhow::Error>(())
    };
    every(&pair, &|pair, failing, primary, first| {
        whole_disk(pair, failing, primary, first)
    })
    .context("detach")?;
    for side in Side::BOTH {
        let called = pair.called(side)?;
        ensure!(called.is_empty(), "{side:?} has called {called:?}");
    }
    for (failing, primary) in [
        (Side::Kernel, Side::Lockstep),
        (Side::Lockstep, Side::Kernel),
    ] {
        new_disk(&pair, failing, primary)
            .with_context(|| format!("{failing:?} gets a new disk"))?;
    }

    pair.adjust_disk("on-io-error call-local-io-error;")?;
    every(&pair, &|pair, failing, primary, first| {
        whole_disk(pair, failing, primary, first)?;
        let called = pair.called(failing)?;
        ensure!(called.contains("local-io-error"), "called: {called:?}");
        let other = pair.called(failing.other())?;
        ensure!(other.is_empty(), "called at the peer: {other:?}");
        Ok(())
    })
    .context("call-local-io-error")?;

    pair.adjust_disk("on-io-error pass_on;")?;
    every(&pair, &|pair, failing, primary, first| {
        bad_block(pair, failing, primary, first)
    })
    .context("pass_on")?;
    let state = drbd_state(&pair.kernel, 0)?;
    ensure!(state.disks == "UpToDate/UpToDate", "{state:?}");
    pair.check_end(&[
        "Local IO failed in ",
        "IO ERROR 10 on bitmap page idx ",
        "we had at least one MD IO ERROR during bitmap IO",
        "meta data update failed!",
        // Of its metadata, which lie on the same disk.
        "failed with error -5",
    ])
}
