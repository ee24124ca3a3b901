//! Metadata on emulated persistent memory: a file of a DAX file system in a guest. Lockstep maps
//! it, changes it in place and dies; the original's `drbdmeta` replays the log of slots.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::guest::{COMMAND_LIMIT, Guest, GuestSetup, HostFiles, can_emulate};
use lockstep_e2e::{binary, has_program};

const MIB: u64 = 1 << 20;
/// Each program comes over 9p into an emulated machine.
const LIMIT: Duration = Duration::from_secs(300);

/// Where the node and the file system lie; `/tmp` is the same inside and outside of `/host`.
const NODE: &str = "/tmp/node";
const META: &str = "/tmp/dax/meta";

/// The raw namespace becomes one with DAX, without ndctl.
const FSDAX: &str = "cd /sys/bus/nd && \
    echo namespace0.0 > drivers/nd_pmem/unbind && \
    echo pmem > devices/pfn0.0/mode && \
    echo 2097152 > devices/pfn0.0/align && \
    cat /proc/sys/kernel/random/uuid > devices/pfn0.0/uuid && \
    echo namespace0.0 > devices/pfn0.0/namespace && \
    echo pfn0.0 > drivers/nd_pmem/bind && \
    cat /sys/block/pmem0/queue/dax";

fn host(guest: &Guest, command: &str) -> Result<String> {
    guest.sh(&format!("chroot /host {command}"))
}

fn adm(guest: &Guest, words: &str) -> Result<String> {
    let run = format!("LOCKSTEP_DIR={NODE} chroot /host {NODE}/bin/drbdadm {words}");
    let (code, text) = guest.sh_raw(&run, LIMIT)?;
    ensure!(code == 0, "drbdadm {words}: {code}\n{text}");
    Ok(text)
}

fn start_daemon(guest: &Guest) -> Result<()> {
    guest.sh(&format!("rm -f {NODE}/control.sock"))?;
    let run = format!("exec chroot /host {NODE}/bin/lockstepd --no-device");
    guest.start_job("daemon", &format!("export LOCKSTEP_DIR={NODE}; {run}"))?;
    guest.wait("the daemon answers", LIMIT, |guest| {
        let status = guest.job_status("daemon")?;
        let said = || guest.sh("cat /run/job-daemon.out");
        ensure!(status.is_none(), "the daemon has ended: {}", said()?);
        Ok(guest
            .sh_raw(&format!("[ -S {NODE}/control.sock ]"), LIMIT)?
            .0
            == 0)
    })
}

/// The activity log's first 8 KiB in words of 4 bytes: the magic, and more slots than are in use.
fn log_words(guest: &Guest) -> Result<Vec<String>> {
    let words = guest.sh(&format!(
        "od -An -v -tx1 -j4096 -N8192 {META} | tr -d ' \\n'"
    ))?;
    let bytes = words.trim().as_bytes();
    let words = bytes.chunks(8).map(|word| String::from_utf8_lossy(word));
    Ok(words.map(|word| word.into_owned()).collect())
}

#[test]
fn metadata_on_a_dax_file_system_are_changed_in_place() -> Result<()> {
    if !can_emulate() || !has_program("qemu-io") {
        return Ok(());
    }
    let dir = tempfile::Builder::new()
        .prefix("lockstep-pmem-")
        .tempdir()?;
    let [data, pmem] = ["data", "pmem"].map(|name| dir.path().join(name));
    fs::File::create(&data)?.set_len(64 * MIB)?;
    fs::File::create(&pmem)?.set_len(128 * MIB)?;
    let memory = format!(
        "memory-backend-file,id=memory,share=on,size=128M,mem-path={}",
        pmem.display()
    );
    let arguments = [
        "-machine",
        "nvdimm=on",
        "-m",
        "slots=2,maxmem=2G",
        "-object",
        &memory,
        "-device",
        "nvdimm,id=nvdimm,memdev=memory",
    ];
    let guest = Guest::start(GuestSetup {
        host_files: HostFiles::ReadOnly,
        cpu_model: "max",
        disks: vec![data],
        qemu_args: arguments.map(String::from).into(),
        ..GuestSetup::new("alfa")
    })?;
    for module in ["nfit", "nd_pmem", "ext4"] {
        guest.load_module(module, "")?;
    }
    let dax = guest.sh(FSDAX)?;
    ensure!(dax.trim() == "1", "queue/dax of the namespace: {dax}");
    host(&guest, "mkfs.ext4 -q -b 4096 /dev/pmem0")?;
    guest.sh("mkdir -p /tmp/dax && mount -t ext4 -o dax /dev/pmem0 /tmp/dax")?;
    guest.sh("mountpoint -q /host/tmp/dax || mount -o bind /tmp/dax /host/tmp/dax")?;
    guest.sh(&format!("dd if=/dev/zero of={META} bs=1M count=4 2>&1"))?;

    let binary = binary()?;
    let binary = binary.to_str().context("a path of plain letters")?;
    guest.sh(&format!(
        "mkdir -p {NODE}/bin && for n in lockstepd drbdadm drbdsetup drbdmeta; do \
         ln -s /run/host{binary} {NODE}/bin/$n; done; echo alfa > {NODE}/node-name"
    ))?;
    guest.write_file(
        &format!("{NODE}/drbd.conf"),
        &format!(
            "resource r0 {{\n net {{ protocol C; }}\n \
             on alfa {{ node-id 0; address ipv4 127.0.0.1:7000; volume 0 {{ device minor 0; \
             disk /dev/vda; meta-disk {META}; }} }}\n \
             on bravo {{ node-id 1; address ipv4 127.0.0.1:7001; volume 0 {{ device minor 0; \
             disk /dev/vda; meta-disk {META}; }} }}\n}}\n"
        ),
    )?;
    start_daemon(&guest)?;
    adm(&guest, "create-md --force r0")?;
    adm(&guest, "up r0")?;
    let said = guest.sh("cat /run/job-daemon.out")?;
    ensure!(
        said.contains("metadata on persistent memory, changed in place"),
        "the daemon: {said}"
    );
    let words = log_words(&guest)?;
    ensure!(words[0] == "6aa667a6", "the log begins with {}", words[0]);
    ensure!(
        words[1..].iter().all(|w| w == "ffffffff"),
        "the log is not empty"
    );

    adm(&guest, "primary --force r0")?;
    let uri = format!("nbd+unix:///r0/0?socket={NODE}/nbd.sock");
    let write = "-c 'write -P 1 0 4k' -c 'write -P 2 20M 4k' -c 'write -P 3 41M 4k'";
    let run = format!("chroot /host qemu-io -f raw {write} '{uri}'");
    let (code, text) = guest.sh_raw(&run, LIMIT)?;
    ensure!(code == 0, "qemu-io: {text}");
    let extents: Vec<String> = log_words(&guest)?.split_off(1);
    let mut used: Vec<_> = extents.iter().filter(|w| *w != "ffffffff").collect();
    used.sort();
    ensure!(
        used == ["00000000", "00000005", "0000000a"],
        "extents of the three writes: {used:?}"
    );

    // The daemon is killed, and a tool that is not ours reads what it left.
    guest.sh("kill -9 $(pidof lockstepd)")?;
    guest.wait("the daemon's end", COMMAND_LIMIT, |guest| {
        Ok(guest.job_status("daemon")?.is_some())
    })?;
    guest.sh(&format!("cp {META} /tmp/copy"))?;
    let apply = "chroot /host drbdmeta --force - v09 /tmp/copy flex-external apply-al 2>&1";
    let (code, text) = guest.sh_raw(apply, LIMIT)?;
    ensure!(code == 0, "the original's drbdmeta: {code} {text}");
    ensure!(
        text.contains("based on AL"),
        "the original's drbdmeta: {text}"
    );

    // Lockstep applies it, too, and goes on in place.
    start_daemon(&guest)?;
    adm(&guest, "up r0")?;
    let words = log_words(&guest)?;
    ensure!(words[0] == "6aa667a6", "the log begins with {}", words[0]);
    ensure!(
        words[1..].iter().all(|w| w == "ffffffff"),
        "the log is not empty"
    );
    adm(&guest, "down r0")?;
    Ok(())
}
