//! One Lockstep node and one kernel DRBD 8.4 node under load: a file system is mounted and written
//! on one side while the other one, or the same one, dies and comes back.

use anyhow::Result;
use lockstep_e2e::guest::{HostFiles, can_emulate};
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, wait_state};
use lockstep_e2e::guest_mixed::{AfterBoot, Mixed84, MixedSetup};
use lockstep_e2e::guest_writes::{GuestLoad, HostLoad, Mounted, host_sh};
use lockstep_e2e::{can_mount, has_program};

const NET: &str = "protocol C; connect-int 1; ping-timeout 30; socket-check-timeout 3;";

/// The kernel is Primary with a mounted ext4; this node is killed twice.
fn kernel_is_primary(pair: &mut Mixed84) -> Result<()> {
    pair.kernel
        .sh("drbdadm primary r0 && mkfs.ext4 -q /dev/drbd0")?;
    let load = GuestLoad::start(&pair.kernel)?;
    for _ in 0..2 {
        load.wait_for_progress(&pair.kernel)?;
        pair.kill_daemon()?;
        wait_state(&pair.kernel, "the loss", DRBD_LIMIT, |s| {
            s.connection != "Connected"
        })?;
        load.wait_for_progress(&pair.kernel)?;
        pair.start_daemon()?;
        pair.adm(&["up", "r0"])?;
        pair.wait_in_sync()?;
    }
    load.finish(&pair.kernel)?;

    // And then itself, in the middle of its writes.
    let load = GuestLoad::start(&pair.kernel)?;
    load.wait_for_progress(&pair.kernel)?;
    pair.check_kernel_log(&[])?;
    pair.kernel.power_cut()?;
    pair.wait("the loss of the kernel", |pair| {
        Ok(pair.state(0)?[0] != "Connected")
    })?;
    pair.boot_kernel(AfterBoot::Up)?;
    pair.wait_in_sync()?;
    // What it left can be read here: the journal is replayed, the file system is whole.
    pair.adm(&["primary", "r0"])?;
    host_sh("fsck.ext4 -f -p $0; [ $? -le 1 ]", &pair.device(0)?)
}

/// This node is Primary with the same ext4; the kernel loses its power twice.
fn lockstep_is_primary(pair: &mut Mixed84, notes: &std::path::Path) -> Result<()> {
    let device = pair.device(0)?;
    let mounted = Mounted::new(&device, notes.join("mnt"))?;
    let mut load = HostLoad::start(&mounted, notes)?;
    for _ in 0..2 {
        load.wait_for_progress(&device)?;
        pair.kernel.power_cut()?;
        pair.wait("the loss of the kernel", |pair| {
            Ok(pair.state(0)?[0] != "Connected")
        })?;
        load.wait_for_progress(&device)?;
        pair.boot_kernel(AfterBoot::Up)?;
        pair.wait_in_sync()?;
    }
    load.finish()?;
    mounted.unmount()?;
    host_sh("fsck.ext4 -f -n $0", &device)?;

    // And then itself: without a holder its device fails.
    let mounted = Mounted::new(&device, notes.join("mnt"))?;
    let mut load = HostLoad::start(&mounted, notes)?;
    load.wait_for_progress(&device)?;
    pair.kill_daemon()?;
    load.fail()?;
    mounted.unmount()?;
    wait_state(&pair.kernel, "the loss", DRBD_LIMIT, |s| {
        s.connection != "Connected"
    })?;
    pair.start_daemon()?;
    pair.adm(&["up", "r0"])?;
    pair.wait_in_sync()?;
    pair.kernel
        .sh("drbdadm primary r0; chroot /host fsck.ext4 -f -p /dev/drbd0; [ $? -le 1 ] && drbdadm secondary r0")
        .map(drop)
}

#[test]
fn file_systems_live_through_crashes_of_either_side() -> Result<()> {
    if !can_emulate() || !can_mount() || !has_program("fio") {
        return Ok(());
    }
    let notes = tempfile::Builder::new()
        .prefix("lockstep-load-")
        .tempdir()?;
    let mut pair = Mixed84::start(MixedSetup {
        host_files: HostFiles::ReadOnly,
        ..MixedSetup::new(NET, 8450)
    })?;
    pair.wait_connected()?;
    pair.kernel
        .sh("drbdadm new-current-uuid --clear-bitmap r0/0")?;
    pair.wait_in_sync()?;
    kernel_is_primary(&mut pair)?;
    lockstep_is_primary(&mut pair, notes.path())?;
    pair.wait_in_sync()?;
    pair.check_same_data()
}
