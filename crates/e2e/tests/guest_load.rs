//! One Lockstep node and one kernel DRBD 8.4 node under load: a file system is mounted and written
//! on one side while the other one, or the same one, dies and comes back.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::guest::{HOST_IN_GUEST, HostFiles, can_emulate};
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, wait_state};
use lockstep_e2e::guest_mixed::{AfterBoot, Mixed84, MixedSetup};
use lockstep_e2e::guest_writes::{GuestLoad, HostLoad, Mounted, host_sh};
use lockstep_e2e::load::Load;
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

/// Both machines die in the same moment, and come back as two Secondaries of which one was Primary.
fn both_die(pair: &mut Mixed84) -> Result<()> {
    pair.kill_daemon()?;
    pair.kernel.power_cut()
}

fn both_come_back(pair: &mut Mixed84) -> Result<()> {
    pair.start_daemon()?;
    pair.adm(&["up", "r0"])?;
    pair.boot_kernel(AfterBoot::Up)?;
    pair.wait_in_sync()
}

/// Block of the kernel's write with this number; each has one of its own.
const fn place(number: u64) -> u64 {
    number * 37 % 8000
}

/// The numbers of the kernel's durable writes, as it tells them over the network.
fn listen() -> Result<(u16, Arc<Mutex<Vec<u64>>>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let acknowledged: Arc<Mutex<Vec<u64>>> = Arc::default();
    let list = acknowledged.clone();
    std::thread::spawn(move || {
        // Ends with the guest, whose last line may be cut.
        let Ok((stream, _)) = listener.accept() else {
            return;
        };
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        while matches!(reader.read_line(&mut line), Ok(1..)) && line.ends_with('\n') {
            if let Ok(number) = line.trim().parse() {
                list.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(number);
            }
            line.clear();
        }
    });
    Ok((port, acknowledged))
}

fn both_die_beside_a_kernel_primary(pair: &mut Mixed84) -> Result<()> {
    let (port, acknowledged) = listen()?;
    let numbers = || {
        let list = acknowledged.lock();
        list.unwrap_or_else(PoisonError::into_inner).clone()
    };
    pair.kernel.sh("drbdadm primary r0")?;
    let writes = format!(
        "n=0; while :; do n=$((n + 1)); yes \"write $n\" | head -c 4096 > /run/block; \
         dd if=/run/block of=/dev/drbd0 bs=4k count=1 conv=notrunc,fsync \
         seek=$((n * 37 % 8000)) 2> /dev/null || exit 1; echo $n; done | nc {HOST_IN_GUEST} {port}"
    );
    pair.kernel.start_job("writes", &writes)?;
    pair.wait("acknowledged writes", |_| Ok(numbers().len() >= 100))?;
    both_die(pair)?;
    both_come_back(pair)?;
    let numbers = numbers();
    eprintln!("{} acknowledged writes of the kernel", numbers.len());
    for name in ["alfa", "bravo"] {
        let image = std::fs::File::open(pair.disk(name, 0))?;
        for number in &numbers {
            let mut block = [0; 4096];
            image.read_exact_at(&mut block, place(*number) * 4096)?;
            let wanted = format!("write {number}\n");
            let whole = block
                .iter()
                .zip(wanted.bytes().cycle())
                .all(|(a, b)| *a == b);
            ensure!(whole, "{name} has lost write {number} of {}", numbers.len());
        }
    }
    Ok(())
}

fn both_die_beside_a_lockstep_primary(pair: &mut Mixed84) -> Result<()> {
    pair.adm(&["primary", "r0"])?;
    // Zeroes are what the load takes for blocks that it has not written.
    let device = pair.device(0)?;
    host_sh("blkdiscard -f -z $0", &device)?;
    let load = Load::start(&device, 3)?;
    load.wait_for_progress()?;
    both_die(pair)?;
    let mut ledger = load.end()?;
    ledger.error().context("no write failed without a daemon")?;
    both_come_back(pair)?;
    for name in ["alfa", "bravo"] {
        ledger.check(&pair.disk(name, 0)).with_context(|| name)?;
    }
    Ok(())
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
    both_die_beside_a_kernel_primary(&mut pair)?;
    both_die_beside_a_lockstep_primary(&mut pair)?;
    pair.check_same_data()
}
