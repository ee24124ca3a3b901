//! Block devices of nodes that are not Primary: using one promotes, and the end of its use demotes.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, Shape, can_mount, has_program, run};

fn setup(test: u8) -> Setup {
    Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 48,
        net: "protocol C;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test,
    }
}

/// A cluster in sync whose nodes are all Secondary.
fn secondaries(test: u8, options: &str) -> Result<Cluster> {
    let shape = Shape {
        options: options.into(),
        ..Shape::default()
    };
    let cluster = Cluster::shaped(&setup(test), shape)?;
    cluster.first_primary(0)?;
    cluster.adm(0, &["secondary", "r0"])?;
    Ok(cluster)
}

fn role(cluster: &Cluster, node: usize) -> Result<String> {
    let status = cluster.status(node)?;
    Ok(status["role"].as_str().context("role")?.to_owned())
}

fn is_open(cluster: &Cluster, node: usize) -> Result<bool> {
    Ok(cluster.status(node)?["devices"][0]["open"] == true)
}

/// Nobody uses the device any more, and the node knows.
fn wait_closed(cluster: &Cluster, node: usize) -> Result<()> {
    cluster.wait("the end of the use", |c| {
        Ok(role(c, node)? == "Secondary" && !is_open(c, node)?)
    })
}

fn read(device: &Path, offset: u64) -> std::io::Result<[u8; 4096]> {
    let mut bytes = [0; 4096];
    fs::File::open(device)?.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

#[test]
fn a_mount_promotes_its_node_and_the_unmount_demotes_it() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    // However slow the machine is, a mount waits for the other node's demotion.
    let mut cluster = secondaries(94, "auto-promote-timeout 300;")?;
    // Both nodes have a device from the beginning on.
    let devices = [cluster.device(0, 94, 0)?, cluster.device(1, 94, 0)?];
    run(Command::new("mkfs.ext4").arg("-q").arg(&devices[0]))?;
    for round in 0..4 {
        let node = round % 2;
        // Where the other node's use has just ended, this one waits until it is known.
        let point = cluster.mount(&devices[node])?;
        cluster.wait("the mount promotes", |c| Ok(role(c, node)? == "Primary"))?;
        for before in 0..round {
            let text = fs::read_to_string(point.join(before.to_string()))?;
            ensure!(text == "text", "{text:?} in file {before}");
        }
        fs::write(point.join(round.to_string()), "text")?;
        ensure!(is_open(&cluster, node)?, "open while mounted");
        let refused = cluster.adm_raw(node, &["secondary", "r0"])?;
        ensure!(!refused.status.success(), "demoted under a mount");
        cluster.unmount(&point)?;
    }
    wait_closed(&cluster, 1)?;
    ensure!(role(&cluster, 0)? == "Secondary", "only one was in use");
    for (node, device) in devices.iter().enumerate() {
        ensure!(
            cluster.device(node, 94, 0)? == *device,
            "the device is another one"
        );
    }
    run(Command::new("fsck.ext4")
        .args(["-f", "-n"])
        .arg(&devices[0]))?;
    wait_closed(&cluster, 0)?;
    cluster.check_same_data(0, 46)
}

/// Who disconnects from a Primary is Outdated, and with a kernel who unmounts is none any more.
#[test]
fn a_peer_that_disconnects_behind_an_unmount_is_not_outdated() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let mut cluster = secondaries(249, "")?;
    let device = cluster.device(0, 249, 0)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&device))?;
    for round in 0..5 {
        let point = cluster.mount(&device)?;
        fs::write(point.join(round.to_string()), "text")?;
        cluster.unmount(&point)?;
        cluster.adm(1, &["disconnect", "r0"])?;
        let disk = cluster.status(1)?["devices"][0]["disk-state"].clone();
        ensure!(disk == "UpToDate", "round {round}: {disk}");
        cluster.adm(1, &["connect", "r0"])?;
        cluster.wait_in_sync()?;
    }
    Ok(())
}

/// With a kernel the unmount demotes before it returns, so a promotion by command after it is one that
/// others see, however soon it comes.
#[test]
fn a_promotion_after_an_unmount_is_a_new_one() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let mut cluster = secondaries(98, "auto-promote-timeout 300;")?;
    let device = cluster.device(0, 98, 0)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&device))?;
    wait_closed(&cluster, 0)?;
    let demotions = |cluster: &Cluster| -> Result<usize> {
        let log = cluster.log(0)?;
        Ok(log.matches("role: Primary -> Secondary").count())
    };
    for round in 0..5 {
        let before = demotions(&cluster)?;
        let point = cluster.mount(&device)?;
        cluster.wait("the mount promotes", |c| Ok(role(c, 0)? == "Primary"))?;
        cluster.unmount(&point)?;
        cluster.adm(0, &["primary", "r0"])?;
        let after = demotions(&cluster)?;
        ensure!(after == before + 1, "round {round}: {before}, then {after}");
        ensure!(role(&cluster, 0)? == "Primary", "promoted by command");
        cluster.adm(0, &["secondary", "r0"])?;
    }
    Ok(())
}

/// Another node may disconnect in the next moment, and is Outdated if it leaves a Primary.
#[test]
fn the_demotion_after_an_unmount_waits_for_no_tick() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let mut cluster = secondaries(92, "auto-promote-timeout 300;")?;
    let device = cluster.device(0, 92, 0)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&device))?;
    wait_closed(&cluster, 0)?;
    let mut waits = Vec::new();
    for round in 0..5 {
        let point = cluster.mount(&device)?;
        cluster.wait("the mount promotes", |c| Ok(role(c, 0)? == "Primary"))?;
        fs::write(point.join(round.to_string()), "text")?;
        cluster.unmount(&point)?;
        let begin = Instant::now();
        wait_closed(&cluster, 0)?;
        waits.push(begin.elapsed());
    }
    // Which took a second each time when the daemon looked once a second. However busy the machine is, one of them is
    // sooner.
    let least = waits.iter().min().context("a round")?;
    ensure!(least.as_millis() < 900, "{waits:?}");
    Ok(())
}

#[test]
fn reading_promotes_nobody_and_writing_is_refused_beside_a_primary() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = secondaries(95, "")?;
    let devices = [cluster.device(0, 95, 0)?, cluster.device(1, 95, 0)?];
    let write = |node: usize, byte: u8| -> std::io::Result<()> {
        let file = fs::File::options().write(true).open(&devices[node])?;
        file.write_all_at(&[byte; 4096], 8192)?;
        file.sync_all()
    };
    // Both may be read at the same time.
    let readers = [fs::File::open(&devices[0])?, fs::File::open(&devices[1])?];
    for (node, device) in devices.iter().enumerate() {
        ensure!(read(device, 8192)? == [0; 4096], "zeroes");
        ensure!(role(&cluster, node)? == "Secondary", "a reader promotes");
        ensure!(is_open(&cluster, node)?, "open while a reader is there");
    }
    // A reader of another node is in the way of a promotion, as long as it is there.
    let refused = cluster.adm_raw(0, &["primary", "r0"])?;
    ensure!(!refused.status.success(), "promoted under a reader");
    drop(readers);
    wait_closed(&cluster, 1)?;
    write(0, 7)?;
    wait_closed(&cluster, 0)?;
    ensure!(read(&devices[1], 8192)? == [7; 4096], "what was written");
    wait_closed(&cluster, 1)?;

    // Beside a Primary neither works, and the log tells why.
    cluster.adm(0, &["primary", "r0"])?;
    ensure!(write(1, 8).is_err(), "written beside a Primary");
    ensure!(read(&devices[1], 0).is_err(), "read beside a Primary");
    ensure!(role(&cluster, 1)? == "Secondary", "promoted");
    let log = cluster.log(1)?;
    ensure!(log.contains("node 0 is Primary"), "{log}");
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.wait("the demotion is known", |c| {
        Ok(c.status(1)?["connections"][0]["peer-role"] == "Secondary")
    })?;
    write(1, 9)?;
    wait_closed(&cluster, 1)?;

    // Without auto-promote a Secondary refuses everything.
    let off = cluster.setup_raw(1, &["resource-options", "r0", "--auto-promote=no"])?;
    ensure!(off.status.success(), "{off:?}");
    ensure!(read(&devices[1], 0).is_err(), "read without auto-promote");
    cluster.wait("the kernel knows", |_| Ok(write(1, 1).is_err()))?;
    cluster.adm(1, &["primary", "r0"])?;
    write(1, 10)?;
    cluster.adm(1, &["secondary", "r0"])?;
    cluster.check_same_data(0, 46)
}

/// As with a kernel, whose users need not have written anything yet.
#[test]
fn who_has_opened_a_device_for_writing_is_a_user_before_the_first_write() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = secondaries(99, "")?;
    let device = cluster.device(0, 99, 0)?;
    for _ in 0..3 {
        let file = fs::File::options().read(true).write(true).open(&device)?;
        cluster.wait("the open promotes", |c| Ok(role(c, 0)? == "Primary"))?;
        ensure!(is_open(&cluster, 0)?, "open");
        let refused = cluster.adm_raw(1, &["primary", "r0"])?;
        ensure!(!refused.status.success(), "promoted beside its user");
        drop(file);
        wait_closed(&cluster, 0)?;
    }
    // Beside a Primary it stays without effect until the role is free.
    cluster.adm(1, &["primary", "r0"])?;
    let file = fs::File::options().write(true).open(&device)?;
    cluster.wait("the refusal", |c| {
        Ok(c.log(0)?.contains("node 1 is Primary"))
    })?;
    cluster.adm(1, &["secondary", "r0"])?;
    cluster.wait("the demotion is known", |c| {
        Ok(c.status(0)?["connections"][0]["peer-role"] == "Secondary")
    })?;
    file.write_all_at(&[7; 4096], 0)?;
    file.sync_all()?;
    drop(file);
    wait_closed(&cluster, 0)?;
    cluster.check_same_data(0, 46)
}

#[test]
fn the_command_after_the_last_close_finds_a_secondary() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = secondaries(97, "")?;
    let device = cluster.device(0, 97, 0)?;
    for round in 0..5 {
        let file = fs::File::options().write(true).open(&device)?;
        file.write_all_at(&[7; 4096], round * 4096)?;
        file.sync_all()?;
        cluster.wait("the write promotes", |c| Ok(role(c, 0)? == "Primary"))?;
        // Whoever still has it open stays Primary.
        cluster.adm(0, &["disconnect", "r0"])?;
        ensure!(role(&cluster, 0)? == "Primary", "demoted under its user");
        cluster.adm(0, &["connect", "r0"])?;
        cluster.wait_in_sync()?;
        drop(file);
        // Disconnected as a Primary, it would make a generation of its own.
        cluster.adm(0, &["disconnect", "r0"])?;
        ensure!(role(&cluster, 0)? == "Secondary", "Primary after the close");
        cluster.adm(0, &["connect", "r0"])?;
        cluster.wait_in_sync()?;
    }
    Ok(())
}

/// Whoever looked at the device because of that open is behind by then, and must not hold the volume.
#[test]
fn a_demotion_right_after_the_last_close_is_not_refused() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = secondaries(93, "")?;
    for round in 0..30 {
        cluster.adm(0, &["primary", "r0"])?;
        let device = cluster.device(0, 93, 0)?;
        let file = fs::File::options().write(true).open(&device)?;
        file.write_all_at(&[round; 4096], 0)?;
        file.sync_all()?;
        drop(file);
        let demoted = cluster.adm(0, &["secondary", "r0"]);
        demoted.with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

#[test]
fn volumes_come_and_go_beside_one_in_use() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = secondaries(96, "")?;
    let device = cluster.device(0, 96, 0)?;
    let user = fs::File::options().write(true).open(&device)?;
    user.write_all_at(&[1; 4096], 0)?;
    // It is Primary before there is a volume without data, with which it could not be promoted.
    user.sync_all()?;
    let minor = "9690";
    let link = cluster.node_dir(0).join("dev/drbd9690");
    let call = |args: &[&str]| -> Result<bool> { Ok(cluster.setup_raw(0, args)?.status.success()) };
    ensure!(call(&["new-minor", "r0", minor, "7"])?, "new-minor");
    cluster.wait("its device", |_| Ok(link.exists()))?;
    let reader = fs::File::open(&link)?;
    ensure!(!call(&["del-minor", minor])?, "deleted while it is open");
    drop(reader);
    let gone = cluster.setup_raw(0, &["del-minor", minor])?;
    ensure!(gone.status.success(), "del-minor: {gone:?}");
    ensure!(!link.exists(), "its device stays");
    let used = cluster.setup_raw(0, &["del-minor", "9600"])?;
    let said = String::from_utf8_lossy(&used.stderr);
    ensure!(!used.status.success(), "deleted while it is written");
    ensure!(said.contains("(160)"), "{said}");
    user.write_all_at(&[2; 4096], 4096)?;
    user.sync_all()?;
    drop(user);
    wait_closed(&cluster, 0)?;
    cluster.check_same_data(0, 46)
}

#[test]
fn a_forced_demotion_fails_the_io_of_a_mounted_device_until_it_is_unmounted() -> Result<()> {
    if !can_mount() || !has_program("mkfs.ext4") {
        return Ok(());
    }
    let mut cluster = Cluster::new(&setup(47))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 47, 0)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&device))?;
    let mount = cluster.mount(&device)?;
    let kept = fs::File::create(mount.join("kept"))?;
    kept.write_all_at(b"kept", 0)?;
    kept.sync_all()?;
    let forced = cluster.setup_raw(0, &["secondary", "r0", "--force"])?;
    ensure!(forced.status.success(), "{forced:?}");
    ensure!(cluster.device(0, 47, 0)? == device, "the device has gone");
    let lost = kept.write_all_at(b"lost", 0).and_then(|()| kept.sync_all());
    ensure!(lost.is_err(), "a write on a Secondary");
    ensure!(cluster.log(0)?.contains("Secondary by force"), "no word");
    // The other node takes over, although the old users are still there.
    cluster.adm(1, &["primary", "r0"])?;
    let other = cluster.device(1, 47, 0)?;
    let at_other = cluster.mount(&other)?;
    ensure!(fs::read(at_other.join("kept"))? == b"kept");
    fs::write(at_other.join("other"), "other")?;
    cluster.unmount(&at_other)?;
    cluster.adm(1, &["secondary", "r0"])?;
    let early = cluster.adm_raw(0, &["primary", "r0"])?;
    ensure!(!early.status.success(), "Primary under the old mount");
    drop(kept);
    run(Command::new("umount").arg(&mount))?;
    cluster.wait("the end of the use", |c| {
        Ok(c.adm_raw(0, &["primary", "r0"])?.status.success())
    })?;
    let device = cluster.device(0, 47, 0)?;
    let mount = cluster.mount(&device)?;
    ensure!(fs::read(mount.join("kept"))? == b"kept");
    ensure!(fs::read(mount.join("other"))? == b"other");
    cluster.unmount(&mount)?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 44)
}

/// The device had been opened and not used: its first write after the demotion promoted the node again.
#[test]
fn a_forced_demotion_fails_the_io_of_who_has_not_begun() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&setup(48))?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 48, 0)?;
    let user = fs::OpenOptions::new().write(true).open(&device)?;
    let forced = cluster.setup_raw(0, &["secondary", "r0", "--force"])?;
    ensure!(forced.status.success(), "{forced:?}");
    let lost = user
        .write_all_at(&[1; 4096], 0)
        .and_then(|()| user.sync_all());
    ensure!(lost.is_err(), "a write on a Secondary");
    ensure!(role(&cluster, 0)? == "Secondary", "promoted by a write");
    let status = cluster.status(0)?;
    ensure!(status["force-io-failures"] == true, "{status}");
    drop(user);
    cluster.wait("the end of the use", |c| {
        Ok(c.adm_raw(0, &["primary", "r0"])?.status.success())
    })?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 44)
}
