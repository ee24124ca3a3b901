//! A kernel DRBD 8.4 pair becomes a Lockstep pair, node by node, as docs/compatibility.md says: the
//! file system is mounted and written all the time, but for the moment in which it moves.

use std::fs;
use std::net::SocketAddr;
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
     ping-timeout 30; socket-check-timeout 3; }\n disk { c-plan-ahead 0; resync-rate 100M; }\n";

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

fn boot(dir: &Path, name: &str) -> Result<Guest> {
    let disk = dir.join(name);
    fs::File::create(&disk)?.set_len(DISK_MIB << 20)?;
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
    let errors = guest.kernel_errors()?;
    let of_drbd = errors.iter().filter(|line| line.contains("drbd"));
    let bad: Vec<_> = of_drbd.filter(|line| !only_a_lost_link(line)).collect();
    ensure!(bad.is_empty(), "{name}: {bad:#?}");
    drop(guest);
    let mut node = HostNode::new(dir, name, FIRST_MINOR + u32::from(name == "bravo"))?;
    node.write_configuration(&own_configuration(dir, addresses.0, addresses.1))?;
    node.start_daemon()?;
    node.adm(&["up", "r0"])?;
    Ok(node)
}

fn only_a_lost_link(line: &str) -> bool {
    [
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
    let (a, b) = (fs::read(dir.join("alfa"))?, fs::read(dir.join("bravo"))?);
    let differs = (0..kib as usize * 1024).find(|&at| a[at] != b[at]);
    ensure!(
        differs.is_none(),
        "the disks differ from byte {differs:?} on"
    );
    Ok(())
}
