//! Kernel 8.4 speaks protocols 86 to 101. A Lockstep node that offers no more than an old one makes
//! it speak that. `LOCKSTEP_DIALECTS="96 97 101"` tries others than the usual ones.

use std::path::Path;

use anyhow::{Context, Result};
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::can_emulate;
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, wait_state};
use lockstep_e2e::guest_mixed::{Mixed84, MixedSetup};
use lockstep_e2e::guest_writes::{host_sh, scribble, scribble_in_kernel};

/// Requests of 1 MiB, longer than any of these versions carries, and durable ones.
fn long_writes(device: &Path) -> Result<()> {
    host_sh(
        "dd if=/dev/urandom of=$0 bs=1M count=4 seek=3 oflag=direct conv=notrunc status=none && \
         dd if=/dev/urandom of=$0 bs=4k count=3 seek=77 oflag=direct,dsync conv=notrunc status=none",
        device,
    )
}

/// Both directions of replication, of the full sync and of the bitmap resync at one version.
fn speaks(pair: &mut Mixed84, version: &str) -> Result<()> {
    pair.node.set_daemon_args(&["--protocol-max", version]);
    pair.start_daemon()?;
    pair.up()?;
    pair.wait_connected()?;
    pair.kernel.sh(&format!(
        "dmesg | grep 'Agreed network protocol version' | tail -1 | grep -w {version}"
    ))?;
    pair.wait_in_sync()?;

    pair.adm(&["primary", "r0"])?;
    let device = pair.device(0)?;
    scribble(&device)?;
    long_writes(&device)?;
    pair.kernel.sh("drbdadm disconnect r0")?;
    scribble(&device)?;
    pair.kernel.sh("drbdadm connect r0")?;
    long_writes(&device)?;
    pair.wait_in_sync()?;

    pair.kernel.sh("drbdadm invalidate r0/0")?;
    pair.wait_in_sync()?;
    pair.hand_to_kernel()?;
    pair.adm(&["invalidate", "r0/0"])?;
    pair.wait_in_sync()?;

    scribble_in_kernel(&pair.kernel, 0)?;
    pair.kill_daemon()?;
    wait_state(&pair.kernel, "the loss", DRBD_LIMIT, |s| {
        s.connection != "Connected"
    })?;
    scribble_in_kernel(&pair.kernel, 0)?;
    pair.start_daemon()?;
    pair.adm(&["up", "r0"])?;
    pair.wait_in_sync()?;
    pair.kernel.sh("drbdadm secondary r0")?;
    pair.check_same_data()?;
    pair.kill_daemon()
}

#[test]
fn a_kernel_84_peer_speaks_the_dialects_of_83_as_well() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    let net = "protocol C; csums-alg sha1; connect-int 1; ping-timeout 30; socket-check-timeout 3;";
    let mut pair = Mixed84::start(MixedSetup::new(net, 8480))?;
    pair.wait_connected()?;
    pair.adm(&["primary", "--force", "r0"])?;
    pair.wait_in_sync()?;
    pair.adm(&["secondary", "r0"])?;
    pair.down()?;
    pair.kill_daemon()?;
    let versions = std::env::var("LOCKSTEP_DIALECTS").unwrap_or("86 90 95 100".into());
    for version in versions.split_whitespace() {
        speaks(&mut pair, version).with_context(|| format!("protocol {version}"))?;
    }
    Ok(())
}
