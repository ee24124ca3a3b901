//! A disk that kernel DRBD 8.4 used before goes to a Lockstep node, and the other way round.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::can_emulate;
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, wait_state};
use lockstep_e2e::guest_mixed::{AfterBoot, Metadata, Mixed84, MixedSetup};

/// Writes 60 times 8 KiB into the first 12 MiB, which are three of eight extents of the log.
fn scribble(device: &Path) -> Result<()> {
    let script = "for n in $(seq 60); do dd if=/dev/urandom of=$0 bs=4k count=2 oflag=direct \
                  conv=notrunc seek=$((n * 7919 % 3000)) status=none || exit 1; done; sync $0";
    let mut command = Command::new("sh");
    let status = command.arg("-c").arg(script).arg(device).status();
    ensure!(status.context("sh")?.success(), "writing {device:?} failed");
    Ok(())
}

const SCRIBBLE_IN_KERNEL: &str = "for n in $(seq 60); do dd if=/dev/urandom of=/dev/drbd0 bs=4k \
     count=2 conv=notrunc,fsync seek=$((n * 6997 % 3000)) || exit 1; done";

/// Most that the three extents can need.
const THREE_EXTENTS_KIB: u64 = 12 << 10;

/// Sums up what the resyncs of one life of the kernel wanted to copy, as its log says.
#[derive(Default)]
struct Resyncs {
    seen_kib: u64,
}

impl Resyncs {
    /// What came since the last call.
    fn new_kib(&mut self, pair: &Mixed84) -> Result<u64> {
        let lines = pair
            .kernel
            .sh("dmesg | grep -o 'will sync [0-9]* KB' || true")?;
        let words = lines.split_whitespace();
        let all: u64 = words.filter_map(|word| word.parse::<u64>().ok()).sum();
        let new = all - self.seen_kib;
        self.seen_kib = all;
        Ok(new)
    }
}

fn up(pair: &Mixed84) -> Result<()> {
    pair.up()?;
    pair.wait_in_sync()
}

#[test]
fn a_disk_of_a_kernel_84_node_goes_to_lockstep_and_back_without_a_full_sync() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    let net = "protocol C; connect-int 1; ping-timeout 30; socket-check-timeout 3;";
    let mut pair = Mixed84::start(MixedSetup {
        metadata: Metadata::V08,
        ..MixedSetup::new(net, 8410)
    })?;
    pair.wait_connected()?;
    let mut resyncs = Resyncs::default();
    pair.kernel.sh("drbdadm primary --force r0")?;
    pair.kernel.sh(SCRIBBLE_IN_KERNEL)?;
    pair.wait_in_sync()?;
    ensure!(resyncs.new_kib(&pair)? > THREE_EXTENTS_KIB, "the full sync");

    // A clean end: nothing is copied.
    pair.kernel.sh("drbdadm secondary r0")?;
    pair.down()?;
    pair.swap_disks()?;
    up(&pair)?;
    ensure!(resyncs.new_kib(&pair)? == 0, "a copy after a clean end");

    // What one of them wrote alone is on the disk that the other gets.
    pair.adm(&["disconnect", "r0"])?;
    pair.adm(&["primary", "r0"])?;
    scribble(&pair.device(0)?)?;
    pair.adm(&["secondary", "r0"])?;
    pair.down()?;
    pair.swap_disks()?;
    up(&pair)?;
    let kib = resyncs.new_kib(&pair)?;
    ensure!(0 < kib && kib <= 480, "{kib} KiB of what Lockstep wrote");
    pair.kernel
        .sh("drbdadm disconnect r0 && drbdadm primary r0")?;
    pair.kernel.sh(SCRIBBLE_IN_KERNEL)?;
    pair.kernel.sh("drbdadm secondary r0")?;
    pair.down()?;
    pair.swap_disks()?;
    up(&pair)?;
    let kib = resyncs.new_kib(&pair)?;
    ensure!(0 < kib && kib <= 480, "{kib} KiB of what the kernel wrote");

    // Both crash while the kernel is Primary: each reads the log that the other left.
    pair.kernel.sh("drbdadm primary r0")?;
    pair.kernel.sh(SCRIBBLE_IN_KERNEL)?;
    pair.check_kernel_log(&[])?;
    pair.kernel.power_cut()?;
    let mut resyncs = Resyncs::default();
    pair.kill_daemon()?;
    pair.swap_disks_offline()?;
    pair.boot_kernel(AfterBoot::Up)?;
    pair.start_daemon()?;
    pair.adm(&["up", "r0"])?;
    pair.wait_in_sync()?;
    let kib = resyncs.new_kib(&pair)?;
    ensure!(
        0 < kib && kib <= THREE_EXTENTS_KIB,
        "{kib} KiB after a crash"
    );

    // The Lockstep node crashes as Primary, and the kernel gets its disk.
    pair.adm(&["primary", "r0"])?;
    scribble(&pair.device(0)?)?;
    pair.kill_daemon()?;
    wait_state(&pair.kernel, "the loss", DRBD_LIMIT, |s| {
        s.connection != "Connected"
    })?;
    pair.kernel.sh("drbdadm down r0")?;
    pair.swap_disks()?;
    pair.start_daemon()?;
    up(&pair)?;
    let kib = resyncs.new_kib(&pair)?;
    ensure!(
        0 < kib && kib <= THREE_EXTENTS_KIB,
        "{kib} KiB after a kill"
    );
    pair.check_same_data()
}
