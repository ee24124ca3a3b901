//! One Lockstep node and one kernel DRBD 8.4 node: resyncs by checksums, integrity digests, options
//! that change while both write, and volumes that grow, each in both role assignments.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::{COMMAND_LIMIT, can_emulate};
use lockstep_e2e::guest_drbd::drbd_state;
use lockstep_e2e::guest_mixed::{Mixed84, MixedSetup, PACE};
use lockstep_e2e::guest_writes::{host_sh, scribble, scribble_in_kernel};

/// What resyncs by checksums did not copy, in KiB, as the kernel's log says.
fn eliminated_kib(pair: &Mixed84) -> Result<u64> {
    let lines = pair
        .kernel
        .sh("dmesg | grep -o 'eliminated: [0-9]*' || true")?;
    let words = lines.split_whitespace();
    Ok(words.filter_map(|word| word.parse::<u64>().ok()).sum())
}

/// 100 blocks that are written again as they are, and some that change.
const SAME: &str = "dd if=$D of=$D bs=4k count=100 seek=1000 skip=1000 conv=notrunc,fsync";

fn checksums(pair: &Mixed84) -> Result<()> {
    let before = eliminated_kib(pair)?;
    pair.adm(&["disconnect", "r0"])?;
    pair.kernel.sh(&SAME.replace("$D", "/dev/drbd0"))?;
    scribble_in_kernel(&pair.kernel, 0)?;
    pair.adm(&["connect", "r0"])?;
    pair.wait_in_sync()?;
    let towards_us = eliminated_kib(pair)?;
    ensure!(
        towards_us >= before + 300,
        "equal: {before} to {towards_us} KiB"
    );
    pair.hand_to_lockstep()?;
    pair.kernel.sh("drbdadm disconnect r0")?;
    let device = pair.device(0)?;
    host_sh(&SAME.replace("$D", "$0"), &device)?;
    scribble(&device)?;
    pair.kernel.sh("drbdadm connect r0")?;
    pair.wait_in_sync()?;
    let towards_kernel = eliminated_kib(pair)?;
    ensure!(
        towards_kernel >= towards_us + 300,
        "equal: {towards_us} to {towards_kernel} KiB"
    );
    pair.hand_to_kernel()
}

/// The protocol that the kernel's connection has, and whether it was connected all the time.
fn protocol(pair: &Mixed84, letter: char) -> Result<()> {
    let what = format!("protocol {letter}");
    pair.wait(&what, |pair| {
        let text = pair.kernel.sh("cat /proc/drbd")?;
        Ok(text.contains(&format!(" {letter} r-----")))
    })
}

/// Connections that the kernel made.
fn handshakes(pair: &Mixed84) -> Result<usize> {
    let lines = pair
        .kernel
        .sh("dmesg | grep 'Handshake successful' || true")?;
    Ok(lines.lines().count())
}

fn change_options(pair: &mut Mixed84, common: &str) -> Result<()> {
    let before = handshakes(pair)?;
    pair.kernel.start_job(
        "writes",
        "n=0; while [ ! -e /run/stop-writes ]; do n=$((n + 1)); dd if=/dev/urandom of=/dev/drbd0 \
         bs=4k count=4 conv=notrunc,fsync seek=$((n * 6997 % 8000)) || exit 1; done",
    )?;
    // The other side follows what one of them says.
    let net = |protocol: char, more: &str| format!("protocol {protocol}; {more} {common}");
    let own = net('A', "csums-alg md5; verify-alg sha1;");
    pair.set_net(&net('C', ""), &own)?;
    pair.adm(&["adjust", "r0"])?;
    protocol(pair, 'A')?;
    let kernel = net('B', "csums-alg sha256; after-sb-1pri discard-secondary;");
    pair.set_net(&kernel, &own)?;
    pair.kernel.sh("drbdadm adjust r0")?;
    protocol(pair, 'B')?;
    let last = net('C', "csums-alg crc32c; verify-alg crc32c;");
    pair.set_net(&last, &last)?;
    pair.kernel.sh("drbdadm adjust r0")?;
    pair.adm(&["adjust", "r0"])?;
    protocol(pair, 'C')?;
    pair.kernel.sh("touch /run/stop-writes")?;
    pair.kernel.finish_job("writes", COMMAND_LIMIT)?;
    pair.wait_in_sync()?;
    ensure!(handshakes(pair)? == before, "the connection was lost");
    // Both know the algorithm of the last change.
    pair.adm(&["verify", "r0/0"])?;
    pair.wait("the verify in the kernel", |pair| {
        let log = pair.kernel.sh("dmesg | tail -40")?;
        Ok(log.contains("Online verify done"))
    })?;
    pair.wait_in_sync()?;
    ensure!(pair.out_of_sync_kib(0)? == 0, "they differ");
    // The kernel has the pace of the next one.
    let verifies = |pair: &Mixed84| -> Result<usize> {
        let log = pair.kernel.sh("dmesg")?;
        Ok(log.matches("Online verify done").count())
    };
    let before = verifies(pair)?;
    pair.kernel.sh("drbdadm verify r0/0")?;
    pair.wait("the kernel's own verify", |pair| {
        Ok(verifies(pair)? > before)
    })?;
    pair.wait_in_sync()
}

const MIB: u64 = 1 << 20;

fn write_at_end(device: &Path, mib: u64) -> Result<()> {
    let seek = (mib - 2) * 256;
    host_sh(
        &format!(
            "dd if=/dev/urandom of=$0 bs=4k count=64 seek={seek} oflag=direct conv=notrunc \
             status=none && sync $0"
        ),
        device,
    )
}

fn resize(pair: &Mixed84) -> Result<()> {
    pair.grow_disks(40)?;
    pair.kernel.sh("drbdadm resize r0")?;
    pair.wait_grown(40)?;
    let seek = 38 * 256;
    pair.kernel.sh(&format!(
        "dd if=/dev/urandom of=/dev/drbd0 bs=4k count=64 seek={seek} conv=notrunc,fsync"
    ))?;
    pair.hand_to_lockstep()?;
    pair.grow_disks(48)?;
    pair.adm(&["resize", "r0"])?;
    pair.wait_grown(48)?;
    let device = pair.device(0)?;
    pair.wait("the device's size", |_| {
        let name = device.file_name().context("a name")?;
        let size = fs::read_to_string(Path::new("/sys/block").join(name).join("size"))?;
        Ok(size.trim().parse::<u64>()? * 512 > 47 * MIB)
    })?;
    write_at_end(&device, 48)
}

#[test]
fn checksums_integrity_changed_options_and_grown_disks_work_with_a_kernel_84_peer() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    let common = format!("data-integrity-alg sha1; {PACE}");
    let net = format!("protocol C; csums-alg sha1; verify-alg crc32c; {common}");
    let mut pair = Mixed84::start(MixedSetup::new(&net, 8440))?;
    pair.wait_connected()?;
    pair.kernel
        .sh("drbdadm new-current-uuid --clear-bitmap r0/0 && drbdadm primary r0")?;
    pair.wait_in_sync()?;
    // Each write carries a digest, both ways.
    scribble_in_kernel(&pair.kernel, 0)?;
    pair.hand_to_lockstep()?;
    scribble(&pair.device(0)?)?;
    pair.hand_to_kernel()?;
    checksums(&pair)?;
    change_options(&mut pair, &common)?;
    resize(&pair)?;
    pair.adm(&["secondary", "r0"])?;
    ensure!(
        drbd_state(&pair.kernel, 0)?.disks == "UpToDate/UpToDate",
        "not UpToDate"
    );
    pair.check_same_data()
}
