//! Two Primaries between real daemons: each node writes through its own device.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, Shape, can_mount, has_program, run};

const MIB: u64 = 1 << 20;
/// The number of the cluster whose Primaries take turns.
const TURNS: u8 = 249;

fn both_primary(test: u8) -> Result<(Cluster, Vec<PathBuf>)> {
    both_primary_beside(test, 0)
}

/// With so many clients beside the two, and quorum if there are any.
fn both_primary_beside(test: u8, clients: usize) -> Result<(Cluster, Vec<PathBuf>)> {
    let setup = Setup {
        net: "protocol C; allow-two-primaries yes;".into(),
        ..Setup::quick(test, 2 + clients)
    };
    let mut shape = Shape {
        clients: (2..2 + clients).collect(),
        ..Shape::default()
    };
    if clients > 0 {
        shape.options = "quorum majority; on-no-quorum suspend-io;".into();
    }
    let cluster = Cluster::shaped(&setup, shape)?;
    cluster.first_primary(0)?;
    cluster.wait_in_sync()?;
    cluster.adm(1, &["primary", "r0"])?;
    let devices = vec![cluster.device(0, test, 0)?, cluster.device(1, test, 0)?];
    Ok((cluster, devices))
}

/// Random writes in a part of the device, all read back and compared.
fn fio(device: &Path, from: u64, len: u64) -> Result<Child> {
    Command::new("fio")
        .args(["--name=part", "--rw=randwrite", "--direct=1"])
        .args(["--bsrange=4k-64k", "--ioengine=libaio", "--iodepth=8"])
        .args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1"])
        .arg("--verify_state_save=0")
        .arg(format!("--offset={from}"))
        .arg(format!("--size={len}"))
        .arg(format!("--filename={}", device.display()))
        .stdout(Stdio::null())
        .spawn()
        .context("fio")
}

/// One on each node, in areas of their own.
fn two_writers(devices: &[PathBuf]) -> Result<[Child; 2]> {
    Ok([
        fio(&devices[0], 0, 24 * MIB)?,
        fio(&devices[1], 32 * MIB, 24 * MIB)?,
    ])
}

fn end_well<const N: usize>(parts: [Child; N]) -> Result<()> {
    for mut part in parts {
        ensure!(part.wait()?.success(), "fio found a fault");
    }
    Ok(())
}

#[test]
fn two_writers_in_areas_of_their_own_and_then_in_turn_leave_equal_disks() -> Result<()> {
    if !can_mount() || !has_program("fio") {
        return Ok(());
    }
    let (cluster, devices) = both_primary(131)?;
    for node in 0..2 {
        ensure!(cluster.status(node)?["role"] == "Primary", "node {node}");
    }
    let parts = two_writers(&devices)?;
    end_well(parts)?;
    // The same blocks in turn: each sees what the other wrote.
    for round in 0..6 {
        let (writer, reader) = (round % 2, 1 - round % 2);
        let text = format!("round {round}").repeat(1024);
        let block = &text.as_bytes()[..4096];
        let file = cluster.dir().join("text");
        std::fs::write(&file, block)?;
        run(Command::new("dd")
            .arg(format!("if={}", file.display()))
            .arg(format!("of={}", devices[writer].display()))
            .args(["bs=4096", "count=1", "conv=notrunc", "oflag=direct"])
            .arg("status=none"))?;
        let back = Command::new("dd")
            .arg(format!("if={}", devices[reader].display()))
            .args(["bs=4096", "count=1", "iflag=direct", "status=none"])
            .output()?;
        ensure!(back.stdout == block, "round {round}");
    }
    ensure!(cluster.connection_is(0, 1, "Connected")?, "the connection");
    cluster.wait_in_sync()?;
    cluster.adm(1, &["secondary", "r0"])?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)
}

/// Random writes into a few blocks, until it is ended.
fn scribble(device: &Path) -> Result<Child> {
    Command::new("fio")
        .args(["--name=same", "--rw=randwrite", "--direct=1", "--bs=4k"])
        .args(["--ioengine=libaio", "--iodepth=8", "--size=64k"])
        .args(["--time_based", "--runtime=600"])
        .arg(format!("--filename={}", device.display()))
        .stdout(Stdio::null())
        .spawn()
        .context("fio")
}

/// Writers that end with the test.
struct Writers(Vec<Child>);

impl Writers {
    fn end(&mut self) -> Result<()> {
        for writer in &mut self.0 {
            ensure!(writer.try_wait()?.is_none(), "a write failed");
            lockstep_e2e::terminate(writer);
        }
        self.0.clear();
        Ok(())
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        for writer in &mut self.0 {
            lockstep_e2e::terminate(writer);
        }
    }
}

#[test]
fn writers_of_the_same_blocks_are_separated_and_one_side_gives_in() -> Result<()> {
    if !can_mount() || !has_program("fio") {
        return Ok(());
    }
    let (cluster, devices) = both_primary(132)?;
    let mut writers = Writers(Vec::new());
    for device in &devices {
        writers.0.push(scribble(device)?);
    }
    cluster.wait("one has noticed", |c| {
        let seen = c.log(0)? + &c.log(1)?;
        Ok(seen.contains("concurrent writes detected"))
    })?;
    cluster.wait("both are StandAlone", |c| {
        Ok(c.connection_is(0, 1, "StandAlone")? && c.connection_is(1, 0, "StandAlone")?)
    })?;
    writers.end()?;
    cluster.adm(1, &["secondary", "r0"])?;
    cluster.adm(1, &["connect", "--discard-my-data", "r0"])?;
    cluster.adm(0, &["connect", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)
}

/// As in a live migration: both are Primary while the application moves, and a third node without a
/// disk keeps the quorum.
#[test]
fn an_application_moves_to_a_second_primary_beside_a_tie_breaker() -> Result<()> {
    if !can_mount() || !has_program("fio") {
        return Ok(());
    }
    let (mut cluster, devices) = both_primary_beside(133, 1)?;
    // A third Primary, on the client, would write to two disks besides the first two: it waits for its turn.
    cluster.adm(2, &["primary", "r0"])?;
    ensure!(cluster.status(2)?["role"] == "Primary");
    for node in 0..2 {
        ensure!(cluster.status(node)?["role"] == "Primary", "node {node}");
    }
    cluster.adm(2, &["secondary", "r0"])?;
    ensure!(cluster.status(2)?["role"] == "Secondary");

    let parts = two_writers(&devices)?;
    cluster.kill(2)?;
    end_well(parts)?;
    cluster.start(2)?;
    cluster.adm(2, &["up", "all"])?;
    cluster.wait_in_sync()?;
    for node in 0..2 {
        ensure!(cluster.status(node)?["role"] == "Primary", "node {node}");
    }
    cluster.adm(0, &["secondary", "r0"])?;
    // The one that is left goes on without the other, with the tie-breaker's vote.
    cluster.kill(0)?;
    ensure!(fio(&devices[1], 8 * MIB, 8 * MIB)?.wait()?.success());
    cluster.start(0)?;
    cluster.adm(0, &["up", "all"])?;
    cluster.wait_in_sync()?;
    cluster.adm(1, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)
}

/// A live migration between three disks and a client without fencing: one Primary at a time, and the second one waits for
/// its turn. While both are used, both get on.
#[test]
fn an_application_moves_between_three_disks_and_a_client() -> Result<()> {
    if !can_mount() || !has_program("fio") {
        return Ok(());
    }
    let setup = Setup {
        net: "protocol C; allow-two-primaries yes;".into(),
        ..Setup::quick(TURNS, 4)
    };
    let shape = Shape {
        clients: vec![3],
        ..Shape::default()
    };
    let cluster = Cluster::shaped(&setup, shape)?;
    cluster.first_primary(0)?;
    cluster.wait_in_sync()?;
    let mut source = 0;
    for target in [1, 3, 2] {
        cluster.adm(target, &["primary", "r0"])?;
        for node in [source, target] {
            ensure!(cluster.status(node)?["role"] == "Primary", "node {node}");
        }
        let old = cluster.device(source, TURNS, 0)?;
        let new = cluster.device(target, TURNS, 0)?;
        end_well([fio(&old, 0, 2 * MIB)?, fio(&new, 32 * MIB, 2 * MIB)?])?;
        cluster.adm(source, &["secondary", "r0"])?;
        ensure!(cluster.status(source)?["role"] == "Secondary");
        ensure!(fio(&new, 8 * MIB, 2 * MIB)?.wait()?.success());
        source = target;
    }
    cluster.adm(source, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)
}

/// The same beside a third disk: the other Primary is fenced before the one that is left goes on.
#[test]
fn an_application_moves_to_a_second_primary_beside_a_third_disk() -> Result<()> {
    if !can_mount() || !has_program("fio") {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (handler, calls) = (dir.path().join("fence"), dir.path().join("calls"));
    let text = format!(
        "#!/bin/sh\necho $DRBD_PEER_NODE_ID >> {}\nexit 7\n",
        calls.display()
    );
    fs::write(&handler, text)?;
    fs::set_permissions(&handler, fs::Permissions::from_mode(0o755))?;
    let setup = Setup {
        net: format!(
            "protocol C; allow-two-primaries yes; fencing resource-and-stonith; }} \
             handlers {{ fence-peer \"{}\";",
            handler.display()
        ),
        ..Setup::quick(150, 3)
    };
    let mut cluster = Cluster::new(&setup)?;
    cluster.first_primary(0)?;
    cluster.wait_in_sync()?;
    cluster.adm(1, &["primary", "r0"])?;
    let third = cluster.adm_raw(2, &["primary", "r0"])?;
    ensure!(!third.status.success(), "a third Primary");
    let refusal = String::from_utf8_lossy(&third.stderr).into_owned();
    ensure!(refusal.contains("more than two Primaries"), "{refusal}");

    let devices = [cluster.device(0, 150, 0)?, cluster.device(1, 150, 0)?];
    let parts = two_writers(&devices)?;
    end_well(parts)?;
    // The application has moved, and the node that it left dies.
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.kill(0)?;
    ensure!(fio(&devices[1], 8 * MIB, 8 * MIB)?.wait()?.success());
    cluster.start(0)?;
    cluster.adm(0, &["up", "all"])?;
    cluster.wait_in_sync()?;
    // It moves back, and the other one dies while it is Primary and this one writes.
    cluster.adm(0, &["primary", "r0"])?;
    let device = cluster.device(0, 150, 0)?;
    let _ = fs::remove_file(&calls);
    let mut writer = fio(&device, 16 * MIB, 24 * MIB)?;
    cluster.kill(1)?;
    ensure!(writer.wait()?.success(), "fio found a fault");
    let calls = fs::read_to_string(&calls)?;
    ensure!(calls.lines().any(|line| line == "1"), "{calls}");
    cluster.start(1)?;
    cluster.adm(1, &["up", "all"])?;
    cluster.wait_in_sync()?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)
}
