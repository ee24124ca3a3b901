//! Real workloads on whole clusters: fio with verification on ext4 and xfs, several volumes, the
//! asynchronous protocols.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount, has_program, run};

/// Random writes into a file, all read back and compared by fio.
fn fio(directory: &Path) -> Result<()> {
    run(Command::new("fio")
        .args(["--name=verify", "--rw=randwrite", "--bs=4k", "--size=24m"])
        .args([
            "--direct=1",
            "--ioengine=libaio",
            "--iodepth=16",
            "--fsync=64",
        ])
        .args([
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--verify_state_save=0",
        ])
        .arg(format!("--directory={}", directory.display())))
}

/// The filesystem on the first node while the second one is killed and comes back; then the second
/// node has the same and takes over.
fn verified_on(filesystem: &str, test: u8, disk_mib: u64) -> Result<()> {
    let maker = format!("mkfs.{filesystem}");
    if !can_mount() || !has_program(&maker) || !has_program("fio") {
        return Ok(());
    }
    let setup = Setup {
        nodes: 2,
        volumes: 1,
        disk_mib,
        net: "protocol C;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test,
    };
    let mut cluster = Cluster::new(&setup)?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, test, 0)?;
    run(Command::new(&maker).arg("-q").arg(&device))?;
    let mount = cluster.mount(&device)?;
    fio(&mount)?;
    cluster.kill(1)?;
    fio(&mount)?;
    cluster.start(1)?;
    cluster.adm(1, &["up", "r0"])?;
    fio(&mount)?;
    cluster.wait_in_sync()?;
    cluster.unmount(&mount)?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, disk_mib - 4)?;
    cluster.adm(1, &["primary", "r0"])?;
    let device = cluster.device(1, test, 0)?;
    let mount = cluster.mount(&device)?;
    fio(&mount)?;
    cluster.unmount(&mount)
}

#[test]
fn fio_verifies_ext4() -> Result<()> {
    verified_on("ext4", 11, 96)
}

#[test]
fn fio_verifies_xfs() -> Result<()> {
    verified_on("xfs", 12, 400)
}

fn fill(device: &Path, byte: u8, len: usize) -> Result<()> {
    let mut file = fs::File::options().write(true).open(device)?;
    file.write_all(&vec![byte; len])?;
    file.sync_all()?;
    Ok(())
}

#[test]
fn both_volumes_of_a_resource_survive_a_failover() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let setup = Setup {
        nodes: 2,
        volumes: 2,
        disk_mib: 64,
        net: "protocol C;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test: 13,
    };
    let mut cluster = Cluster::new(&setup)?;
    cluster.first_primary(0)?;
    for volume in 0..2u8 {
        let device = cluster.device(0, 13, usize::from(volume))?;
        fill(&device, 10 + volume, 1 << 20)?;
    }
    cluster.kill(0)?;
    cluster.adm(1, &["primary", "r0"])?;
    for volume in 0..2u8 {
        let device = cluster.device(1, 13, usize::from(volume))?;
        let image = fs::read(cluster.image(1, usize::from(volume)))?;
        ensure!(
            image[..1 << 20] == vec![10 + volume; 1 << 20][..],
            "volume {volume} lost its data"
        );
        fill(&device, 20 + volume, 1 << 19)?;
    }
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.adm(1, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)?;
    cluster.check_same_data(1, 60)
}

#[test]
fn protocols_a_and_b_end_with_equal_replicas() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    for (protocol, test) in [("A", 14), ("B", 15)] {
        let setup = Setup {
            nodes: 2,
            volumes: 1,
            disk_mib: 64,
            net: format!("protocol {protocol};"),
            disk: "c-min-rate 0;".into(),
            cramped: None,
            daemon: Vec::new(),
            test,
        };
        let cluster = Cluster::new(&setup)?;
        cluster.first_primary(0)?;
        let device = cluster.device(0, test, 0)?;
        fill(&device, 5, 8 << 20)?;
        cluster.wait_in_sync()?;
        cluster.adm(0, &["secondary", "r0"])?;
        cluster.check_same_data(0, 60)?;
        let image = fs::read(cluster.image(1, 0))?;
        ensure!(
            image[..8 << 20] == vec![5; 8 << 20][..],
            "protocol {protocol}: not replicated"
        );
    }
    Ok(())
}
