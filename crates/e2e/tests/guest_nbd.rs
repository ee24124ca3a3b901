//! The kernel's NBD client on the export of a Lockstep node, over TCP: a file system is mounted
//! and written on it while the node's daemon is killed and started again.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::guest::{
    COMMAND_LIMIT, Guest, GuestSetup, HOST_IN_GUEST, HostFiles, can_emulate,
};
use lockstep_e2e::guest_host::HostNode;
use lockstep_e2e::has_program;

/// How long the kernel's requests wait for a server.
const WAIT_S: u32 = 200;

/// One round of fio in an emulated machine.
const ROUND_LIMIT: Duration = Duration::from_secs(300);

const KILLS: usize = 3;

const MIB: u64 = 1 << 20;
const DISK_MIB: u64 = 48;

/// A port of 127.0.0.1 that nobody has now.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Two nodes on this machine, in sync; the first one exports its volume at the port.
fn pair(dir: &Path, export: u16) -> Result<[HostNode; 2]> {
    let mut text = String::from("resource r0 {\n net { protocol C; connect-int 1; }\n");
    for (id, name) in ["alfa", "bravo"].into_iter().enumerate() {
        let disk = dir.join(name);
        fs::File::create(&disk)?.set_len(DISK_MIB * MIB)?;
        text += &format!(
            " on {name} {{ node-id {id}; address ipv4 127.0.0.1:{}; volume 0 {{ device minor {}; \
             disk {}; meta-disk internal; }} }}\n",
            free_port()?,
            8490 + id,
            disk.display()
        );
    }
    text += "}\n";
    let mut nodes = [
        HostNode::new(dir, "alfa", 8490)?,
        HostNode::new(dir, "bravo", 8491)?,
    ];
    let listen = format!("127.0.0.1:{export}");
    nodes[0].set_daemon_args(&["--no-device", "--nbd-listen", &listen]);
    nodes[1].set_daemon_args(&["--no-device"]);
    for node in &mut nodes {
        node.write_configuration(&text)?;
        node.start_daemon()?;
        node.adm(&["create-md", "--force", "r0"])?;
        node.adm(&["up", "r0"])?;
    }
    nodes[0].wait("the connection", |n| Ok(n.state(0)?[0] == "Connected"))?;
    nodes[0].adm(&["new-current-uuid", "--clear-bitmap", "r0/0"])?;
    nodes[0].wait("both in sync", |node| node.is_in_sync(0))?;
    Ok(nodes)
}

fn sectors_written(guest: &Guest) -> Result<u64> {
    let stat = guest.sh("cat /sys/block/nbd0/stat")?;
    let field = stat.split_whitespace().nth(6).context("sectors written")?;
    Ok(field.parse()?)
}

/// The first bytes of both disks are the same, and not only zeroes.
fn check_equal_disks(dir: &Path, size_bytes: u64) -> Result<()> {
    let disks = [
        fs::File::open(dir.join("alfa"))?,
        fs::File::open(dir.join("bravo"))?,
    ];
    let mut parts = [vec![0; MIB as usize], vec![0; MIB as usize]];
    let mut written = 0;
    for at in (0..size_bytes).step_by(MIB as usize) {
        let len = MIB.min(size_bytes - at) as usize;
        for (disk, part) in disks.iter().zip(&mut parts) {
            disk.read_exact_at(&mut part[..len], at)?;
        }
        ensure!(
            parts[0][..len] == parts[1][..len],
            "the replicas differ at {at}"
        );
        written += usize::from(parts[0][..len].iter().any(|&byte| byte != 0));
    }
    ensure!(
        written > 4,
        "only {written} MiB of the disks hold any byte but zero"
    );
    Ok(())
}

#[test]
fn a_file_system_on_the_kernels_nbd_client_lives_through_kills_of_the_daemon() -> Result<()> {
    if !can_emulate() || !has_program("fio") {
        return Ok(());
    }
    let dir = tempfile::Builder::new().prefix("lockstep-nbd-").tempdir()?;
    let guest = Guest::start(GuestSetup {
        host_files: HostFiles::ReadOnly,
        ..GuestSetup::new("guest")
    })?;
    let port = free_port()?;
    let mut nodes = pair(dir.path(), port)?;

    guest.load_module("nbd", "nbds_max=1")?;
    let helper = env!("CARGO_BIN_EXE_nbd-attach");
    guest.start_job(
        "attach",
        &format!("chroot /host /run/host{helper} {HOST_IN_GUEST}:{port} r0/0 0 {WAIT_S}"),
    )?;
    guest.wait("the device", COMMAND_LIMIT, |guest| {
        let status = guest.job_status("attach")?;
        let said = || guest.sh("cat /run/job-attach.out");
        ensure!(status.is_none(), "nbd-attach has ended: {}", said()?);
        Ok(guest.sh("cat /sys/block/nbd0/size")?.trim() != "0")
    })?;
    guest.sh("mkfs.ext4 -q /dev/nbd0 && mount /dev/nbd0 /host/mnt")?;
    // What is written is read back and compared, beyond the page cache.
    let fio = "fio --name=load --directory=/mnt --rw=randwrite --bs=4k --size=4m --fsync=16 \
               --ioengine=psync --verify=crc32c --verify_fatal=1 --do_verify=1 \
               --verify_state_save=0 --randrepeat=0 --overwrite=1";
    guest.start_job(
        "load",
        &format!(
            "while :; do chroot /host {fio} || exit 1; echo 1 > /proc/sys/vm/drop_caches; \
             [ -e /run/stop-load ] && exit 0; done"
        ),
    )?;
    for kill in 0..KILLS {
        let before = sectors_written(&guest)?;
        guest.wait("more writes", ROUND_LIMIT, |guest| {
            let status = guest.job_status("load")?;
            ensure!(
                status.is_none(),
                "the load has ended before kill {kill}: {}",
                guest.sh("cat /run/job-load.out")?
            );
            Ok(sectors_written(guest)? > before + 100)
        })?;
        nodes[0].kill_daemon()?;
        nodes[0].start_daemon()?;
        // The client's open makes it Primary again.
        nodes[0].adm(&["up", "r0"])?;
    }
    guest.sh("touch /run/stop-load")?;
    guest
        .finish_job("load", ROUND_LIMIT)
        .with_context(|| guest.sh("dmesg | tail -n 40").unwrap_or_default())
        .with_context(|| nodes[0].report())?;
    let said = guest.sh("cat /run/job-attach.out")?;
    ensure!(
        said.matches("attached again").count() >= KILLS,
        "the client: {said}"
    );
    guest.sh("umount /host/mnt && chroot /host fsck.ext4 -f -n /dev/nbd0")?;
    let log = guest.sh("dmesg")?;
    for word in ["I/O error", "EXT4-fs error", "Buffer I/O"] {
        ensure!(!log.contains(word), "{log}");
    }
    nodes[0].wait("both in sync", |node| node.is_in_sync(0))?;
    let sectors: u64 = guest.sh("cat /sys/block/nbd0/size")?.trim().parse()?;
    check_equal_disks(dir.path(), sectors * 512)
}
