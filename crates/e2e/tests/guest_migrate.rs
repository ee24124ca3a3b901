//! A kernel DRBD 8.4 pair becomes a Lockstep pair, node by node, as docs/compatibility.md says, and a
//! Lockstep pair becomes a kernel pair: the file system is mounted and written all the time, but for
//! the moment in which it moves.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::guest::{
    GUEST_ADDRESS, Guest, GuestSetup, HOST_IN_GUEST, HostFiles, can_emulate,
};
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, DRBD_PORT, wait_state};
use lockstep_e2e::guest_host::HostNode;
use lockstep_e2e::guest_line::{Line, Side};
use lockstep_e2e::guest_writes::{GuestLoad, HostLoad, Mounted, host_sh};
use lockstep_e2e::{can_mount, has_program};

const OPTIONS: &str = "global { usage-count no; }\nresource r0 {\n net { protocol C; connect-int 1; \
     ping-timeout 30; socket-check-timeout 3; }\n disk { c-plan-ahead 0; resync-rate 100M; \
     c-min-rate 0; }\n";

fn kernel_configuration(own: &str, peer_port: u16) -> String {
    let host = |name: &str| {
        let address = if name == own {
            format!("{GUEST_ADDRESS}:{DRBD_PORT}")
        } else {
            format!("{HOST_IN_GUEST}:{peer_port}")
        };
        format!(
            " on {name} {{ device minor 0; disk /dev/vda; meta-disk internal; address {address}; }}\n"
        )
    };
    format!("{OPTIONS}{}{}}}\n", host("alfa"), host("bravo"))
}

/// The same resource on Lockstep nodes: node ids, and the disks where they were.
fn own_configuration(dir: &Path, alfa: SocketAddr, bravo: SocketAddr) -> String {
    let host = |id: u32, name: &str, address: SocketAddr| {
        format!(
            " on {name} {{ node-id {id}; device minor {}; disk {}; meta-disk internal; \
             address ipv4 {address}; }}\n",
            FIRST_MINOR + id,
            dir.join(name).display()
        )
    };
    format!(
        "{OPTIONS}{}{}}}\n",
        host(0, "alfa", alfa),
        host(1, "bravo", bravo)
    )
}

const FIRST_MINOR: u32 = 8460;
const DISK_MIB: u64 = 32;

fn make_disk(dir: &Path, name: &str) -> Result<()> {
    Ok(fs::File::create(dir.join(name))?.set_len(DISK_MIB << 20)?)
}

fn boot(dir: &Path, name: &str) -> Result<Guest> {
    let disk = dir.join(name);
    Guest::start(GuestSetup {
        disks: vec![disk],
        ports: vec![DRBD_PORT],
        host_files: HostFiles::ReadOnly,
        ..GuestSetup::new(name)
    })
}

fn kernel_in_sync(guest: &Guest) -> Result<()> {
    wait_state(guest, "everything in sync", DRBD_LIMIT, |s| {
        s.connection == "Connected" && s.disks == "UpToDate/UpToDate" && s.out_of_sync_kib == 0
    })
    .map(drop)
}

fn sync_kib(guest: &Guest) -> Result<u64> {
    let lines = guest.sh("dmesg | grep -o 'will sync [0-9]* KB' || true")?;
    let words = lines.split_whitespace();
    Ok(words.filter_map(|word| word.parse::<u64>().ok()).sum())
}

/// A guest's node ends in good order, and Lockstep takes its place.
fn replace(
    dir: &Path,
    name: &str,
    guest: Guest,
    addresses: (SocketAddr, SocketAddr),
) -> Result<HostNode> {
    guest.sh("drbdadm down r0 && sync")?;
    check_kernel_log(&guest)?;
    drop(guest);
    let mut node = HostNode::new(dir, name, FIRST_MINOR + u32::from(name == "bravo"))?;
    node.write_configuration(&own_configuration(dir, addresses.0, addresses.1))?;
    node.start_daemon()?;
    node.adm(&["up", "r0"])?;
    Ok(node)
}

fn check_kernel_log(guest: &Guest) -> Result<()> {
    let errors = guest.kernel_errors()?;
    let of_drbd = errors.iter().filter(|line| line.contains("drbd"));
    let bad: Vec<_> = of_drbd.filter(|line| !only_a_lost_link(line)).collect();
    ensure!(bad.is_empty(), "{}: {bad:#?}", guest.name());
    Ok(())
}

/// A Lockstep node ends in good order, its metadata become the kernel's, and a guest takes its place,
/// reached at the same address.
fn give_back(
    dir: &Path,
    name: &str,
    node: HostNode,
    at: SocketAddr,
    peer: u16,
) -> Result<Returned> {
    node.adm(&["down", "r0"])?;
    let disk = dir.join(name);
    let disk = disk.to_str().context("a path in ASCII")?;
    let words = ["--force", "-", "v08", disk, "internal", "create-md"];
    let output = node.tool("drbdmeta", &words)?;
    ensure!(output.status.success(), "drbdmeta: {output:?}");
    drop(node);
    let guest = boot(dir, name)?;
    let line = Line::new(at, guest.address(DRBD_PORT), None)?;
    guest.write_file("/etc/drbd.conf", &kernel_configuration(name, peer))?;
    guest.sh("drbdadm up r0")?;
    Ok(Returned { guest, _line: line })
}

/// A guest that is reached where a Lockstep node was.
struct Returned {
    guest: Guest,
    _line: Line,
}

/// What a kernel logs when its link ends, also by its own `down` in the middle of a write's packet.
fn only_a_lost_link(line: &str) -> bool {
    [
        "error receiving Data, e: -5 ",
        "meta connection shut down by peer",
        "sock_sendmsg returned -",
        "sock_recvmsg returned -",
        "wanted_conn:WFReportParams",
        "State change failed: In transient state",
        "mask = 0x1f0 val = 0x90",
    ]
    .iter()
    .any(|text| line.contains(text))
}

fn wait_in_sync(nodes: &[&HostNode]) -> Result<()> {
    for node in nodes {
        node.wait("everything UpToDate", |node| node.is_in_sync(0))?;
    }
    Ok(())
}

/// A note that each owner of the file system adds to, and that the next one must find.
fn add_note(point: &Path, before: &str, text: &str) -> Result<()> {
    let note = point.join("note");
    ensure!(
        fs::read_to_string(&note)? == before,
        "the note is not {before:?}"
    );
    let file = fs::File::create(&note)?;
    fs::write(&note, format!("{before}{text}\n"))?;
    Ok(file.sync_all()?)
}

/// Mounts on a node that becomes Primary.
fn take_over(node: &HostNode, volume_minor: u32, point: PathBuf) -> Result<(PathBuf, Mounted)> {
    node.adm(&["primary", "r0"])?;
    let device = node
        .device(0)
        .with_context(|| format!("minor {volume_minor}"))?;
    host_sh("fsck.ext4 -f -n $0 > /dev/null", &device)?;
    let mounted = Mounted::new(&device, point)?;
    Ok((device, mounted))
}

#[test]
fn a_kernel_84_pair_becomes_a_lockstep_pair_under_a_mounted_file_system() -> Result<()> {
    if !can_emulate() || !can_mount() || !has_program("fio") || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let dir = tempfile::Builder::new()
        .prefix("lockstep-migrate-")
        .tempdir()?;
    let dir = dir.path();
    make_disk(dir, "alfa")?;
    make_disk(dir, "bravo")?;
    // Two kernel nodes. Alfa reaches bravo by a port of this host, which bravo's successor takes.
    let (alfa, bravo) = (boot(dir, "alfa")?, boot(dir, "bravo")?);
    let (alfa_at, bravo_behind) = (alfa.address(DRBD_PORT), bravo.address(DRBD_PORT));
    let to_bravo = Line::beside(Side::Above, DRBD_PORT, bravo_behind)?;
    let to_alfa = Line::beside(Side::Below, DRBD_PORT, alfa_at)?;
    let bravo_at = to_bravo.address();
    for (guest, peer_port) in [(&alfa, bravo_at.port()), (&bravo, to_alfa.address().port())] {
        let text = kernel_configuration(guest.name(), peer_port);
        guest.write_file("/etc/drbd.conf", &text)?;
        guest.sh("yes yes | drbdadm create-md --force r0 && drbdadm up r0")?;
    }
    for guest in [&alfa, &bravo] {
        wait_state(guest, "Connected", DRBD_LIMIT, |s| {
            s.connection == "Connected"
        })?;
    }
    alfa.sh("drbdadm new-current-uuid --clear-bitmap r0/0 && drbdadm primary r0")?;
    kernel_in_sync(&alfa)?;
    alfa.sh("mkfs.ext4 -q /dev/drbd0")?;
    let load = GuestLoad::start(&alfa)?;
    alfa.sh("echo kernel > /host/mnt/note && sync")?;
    load.wait_for_progress(&alfa)?;

    // The Secondary first, while the Primary is written.
    ensure!(sync_kib(&alfa)? == 0, "a resync before the first step");
    let bravo = {
        let addresses = (alfa_at, bravo_at);
        drop(to_bravo);
        drop(to_alfa);
        replace(dir, "bravo", bravo, addresses)?
    };
    load.wait_for_progress(&alfa)?;
    kernel_in_sync(&alfa)?;
    wait_in_sync(&[&bravo])?;
    let copied_kib = sync_kib(&alfa)?;
    ensure!(
        copied_kib < DISK_MIB * 1024 / 2,
        "{copied_kib} KiB: a full sync"
    );
    load.wait_for_progress(&alfa)?;

    // The file system moves to Lockstep.
    load.finish(&alfa)?;
    alfa.sh("drbdadm secondary r0")?;
    let (device, mounted) = take_over(&bravo, FIRST_MINOR + 1, dir.join("mnt"))?;
    add_note(mounted.point(), "kernel\n", "mixed")?;
    let mut load = HostLoad::start(&mounted, dir)?;
    load.wait_for_progress(&device)?;

    // Now the other node, under writes again.
    let alfa = replace(dir, "alfa", alfa, (alfa_at, bravo_at))?;
    load.wait_for_progress(&device)?;
    wait_in_sync(&[&alfa, &bravo])?;
    load.wait_for_progress(&device)?;
    let status = alfa.status()?;
    load.finish()?;
    mounted.unmount()?;
    bravo.adm(&["secondary", "r0"])?;
    let (device, mounted) = take_over(&alfa, FIRST_MINOR, dir.join("mnt"))?;
    add_note(mounted.point(), "kernel\nmixed\n", "lockstep")?;
    let mut load = HostLoad::start(&mounted, dir)?;
    load.wait_for_progress(&device)?;
    load.finish()?;
    mounted.unmount()?;
    host_sh("fsck.ext4 -f -n $0 > /dev/null", &device)?;
    wait_in_sync(&[&alfa, &bravo])?;
    for node in [&alfa, &bravo] {
        node.adm(&["down", "r0"])?;
    }
    let kib = status["devices"][0]["size"].as_u64().context("a size")?;
    check_equal_disks(dir, kib as usize * 1024)
}

fn check_equal_disks(dir: &Path, size_bytes: usize) -> Result<()> {
    let (a, b) = (fs::read(dir.join("alfa"))?, fs::read(dir.join("bravo"))?);
    let differs = (0..size_bytes).find(|&at| a[at] != b[at]);
    ensure!(
        differs.is_none(),
        "the disks differ from byte {differs:?} on"
    );
    Ok(())
}

/// A free port of this host on that side of the kernel's.
fn free_port(side: Side) -> Result<SocketAddr> {
    let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, DRBD_PORT));
    Ok(Line::beside(side, DRBD_PORT, nowhere)?.address())
}

#[test]
fn a_lockstep_pair_becomes_a_kernel_84_pair_under_a_mounted_file_system() -> Result<()> {
    if !can_emulate() || !can_mount() || !has_program("fio") || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let dir = tempfile::Builder::new()
        .prefix("lockstep-return-")
        .tempdir()?;
    let dir = dir.path();
    // With metadata of its own, of version 9.
    let (alfa_at, bravo_at) = (free_port(Side::Below)?, free_port(Side::Above)?);
    let mut nodes = Vec::new();
    for (name, minor) in [("alfa", FIRST_MINOR), ("bravo", FIRST_MINOR + 1)] {
        make_disk(dir, name)?;
        let mut node = HostNode::new(dir, name, minor)?;
        node.write_configuration(&own_configuration(dir, alfa_at, bravo_at))?;
        node.start_daemon()?;
        node.adm(&["create-md", "--force", "r0"])?;
        node.adm(&["up", "r0"])?;
        nodes.push(node);
    }
    let bravo = nodes.pop().context("bravo")?;
    let alfa = nodes.pop().context("alfa")?;
    alfa.wait("Connected", |node| Ok(node.state(0)?[0] == "Connected"))?;
    alfa.adm(&["new-current-uuid", "--clear-bitmap", "r0/0"])?;
    wait_in_sync(&[&alfa, &bravo])?;
    alfa.adm(&["primary", "r0"])?;
    let device = alfa.device(0)?;
    host_sh("mkfs.ext4 -q $0", &device)?;
    let mounted = Mounted::new(&device, dir.join("mnt"))?;
    fs::write(mounted.point().join("note"), "")?;
    add_note(mounted.point(), "", "lockstep")?;
    let mut load = HostLoad::start(&mounted, dir)?;
    load.wait_for_progress(&device)?;

    // The Secondary first, while the Primary is written.
    let bravo = give_back(dir, "bravo", bravo, bravo_at, alfa_at.port())?;
    load.wait_for_progress(&device)?;
    kernel_in_sync(&bravo.guest)?;
    wait_in_sync(&[&alfa])?;
    let copied_kib = sync_kib(&bravo.guest)?;
    ensure!(
        0 < copied_kib && copied_kib < DISK_MIB * 1024 / 2,
        "{copied_kib} KiB instead of what was written meanwhile"
    );
    load.wait_for_progress(&device)?;

    // The file system moves to the kernel.
    load.finish()?;
    mounted.unmount()?;
    alfa.adm(&["secondary", "r0"])?;
    let kernel = &bravo.guest;
    kernel.sh("drbdadm primary r0 && chroot /host fsck.ext4 -f -n /dev/drbd0")?;
    let load = GuestLoad::start(kernel)?;
    let note = kernel.sh("cat /host/mnt/note && echo mixed >> /host/mnt/note && sync")?;
    ensure!(note == "lockstep\n", "the note is {note:?}");
    load.wait_for_progress(kernel)?;

    // Now the other node, under writes again.
    let alfa = give_back(dir, "alfa", alfa, alfa_at, bravo_at.port())?;
    load.wait_for_progress(kernel)?;
    kernel_in_sync(&alfa.guest)?;
    kernel_in_sync(kernel)?;
    let copied_kib = sync_kib(&alfa.guest)?;
    ensure!(
        0 < copied_kib && copied_kib < DISK_MIB * 1024 / 2,
        "{copied_kib} KiB instead of what was written meanwhile"
    );
    load.wait_for_progress(kernel)?;
    load.finish(kernel)?;
    kernel.sh("drbdadm secondary r0")?;
    let kernel = &alfa.guest;
    kernel.sh("drbdadm primary r0")?;
    let load = GuestLoad::start(kernel)?;
    let note = kernel.sh("cat /host/mnt/note")?;
    ensure!(note == "lockstep\nmixed\n", "the note is {note:?}");
    load.wait_for_progress(kernel)?;
    load.finish(kernel)?;
    kernel_in_sync(kernel)?;
    let size = kernel.sh("blockdev --getsize64 /dev/drbd0")?;
    for node in [&alfa, &bravo] {
        node.guest.sh("drbdadm down r0 && sync")?;
        check_kernel_log(&node.guest)?;
    }
    drop((alfa, bravo));
    check_equal_disks(dir, size.trim().parse()?)
}
