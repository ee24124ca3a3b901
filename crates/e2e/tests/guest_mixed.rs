//! One Lockstep node and one kernel DRBD 8.4 node.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::can_emulate;
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, wait_state};
use lockstep_e2e::guest_mixed::{Mixed84, MixedSetup};

/// Writes random blocks at random places, durably.
fn scribble(device: &Path, blocks: u32) -> Result<()> {
    let script = format!(
        "for n in $(seq {blocks}); do dd if=/dev/urandom of=$0 bs=4k count=2 oflag=direct \
         conv=notrunc seek=$((n * 7919 % 8000)) status=none || exit 1; done; sync $0"
    );
    let status = Command::new("sh")
        .arg("-c")
        .arg(script)
        .arg(device)
        .status();
    ensure!(status.context("sh")?.success(), "writing {device:?} failed");
    Ok(())
}

const SCRIBBLE_IN_KERNEL: &str = "for n in $(seq 40); do dd if=/dev/urandom of=/dev/drbd0 bs=4k \
     count=3 conv=notrunc,fsync seek=$((n * 6997 % 8000)) || exit 1; done";

fn run(net: &str, minor: u32) -> Result<()> {
    let mut pair = Mixed84::start(MixedSetup::new(net, minor))?;
    pair.wait_connected()?;

    // A full sync towards the kernel, with writes.
    pair.adm(&["primary", "--force", "r0"])?;
    let device = pair.device(0)?;
    scribble(&device, 30)?;
    pair.wait_in_sync()?;
    scribble(&device, 30)?;

    // A bitmap resync towards the kernel.
    pair.kernel.sh("drbdadm disconnect r0")?;
    scribble(&device, 30)?;
    pair.kernel.sh("drbdadm connect r0")?;
    pair.wait_in_sync()?;

    // The kernel writes, this node is killed and comes back.
    pair.adm(&["secondary", "r0"])?;
    pair.kernel.sh("drbdadm primary r0")?;
    pair.kernel.sh(SCRIBBLE_IN_KERNEL)?;
    pair.kill_daemon()?;
    wait_state(&pair.kernel, "the loss", DRBD_LIMIT, |s| {
        s.connection != "Connected"
    })?;
    pair.kernel.sh(SCRIBBLE_IN_KERNEL)?;
    pair.start_daemon()?;
    pair.adm(&["up", "r0"])?;
    pair.wait_in_sync()?;
    pair.kernel.sh("drbdadm secondary r0")?;
    pair.check_same_data()
}

#[test]
fn a_kernel_84_peer_syncs_both_ways_and_both_disks_end_equal() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    run(
        "protocol C; cram-hmac-alg sha1; shared-secret \"both know it\"; connect-int 2; \
         ping-timeout 30; socket-check-timeout 3;",
        8400,
    )
}
