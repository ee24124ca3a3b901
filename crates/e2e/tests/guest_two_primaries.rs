//! Two Primaries: one Lockstep node and one kernel DRBD 8.4 node, and writers on both.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::guest::{HostFiles, can_emulate};
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, drbd_state, wait_state};
use lockstep_e2e::guest_mixed::{AfterBoot, Mixed84, MixedSetup, PACE};
use lockstep_e2e::guest_trouble::Side;
use lockstep_e2e::guest_writes::{host_sh, scribble, scribble_in_kernel};
use lockstep_e2e::{can_mount, has_program};

const LIMIT: Duration = Duration::from_secs(240);

/// Random writes to a part of a device, all read back and compared.
fn verified(from_mib: u32, mib: u32) -> String {
    format!(
        "--name=part --rw=randwrite --direct=1 --bsrange=4k-64k --ioengine=psync \
         --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0 --randrepeat=0 \
         --offset={from_mib}m --size={mib}m"
    )
}

/// Random writes to the same few blocks, from four threads.
const SAME: &str = "--name=same --rw=randwrite --direct=1 --bs=4k --ioengine=psync --thread \
     --numjobs=4 --size=64k --randrepeat=0 --time_based --runtime=5";

fn here(device: &Path, fio: &str) -> Result<Child> {
    Command::new("fio")
        .args(fio.split_whitespace())
        .arg(format!("--filename={}", device.display()))
        .stdout(Stdio::null())
        .spawn()
        .context("fio")
}

/// The same job on both nodes, with words for each.
fn at_once(pair: &Mixed84, own: &str, kernel: &str) -> Result<()> {
    let job = format!("chroot /host fio {kernel} --filename=/dev/drbd0");
    pair.kernel.start_job("fio", &job)?;
    let ended = here(&pair.device(0)?, own)?.wait()?;
    pair.kernel.finish_job("fio", LIMIT)?;
    ensure!(ended.success(), "fio found a fault");
    Ok(())
}

/// One is part of every run; more are for hours when nobody waits.
fn rounds_of_overlap() -> u32 {
    let rounds = std::env::var("LOCKSTEP_OVERLAP_ROUNDS").ok();
    rounds.and_then(|r| r.parse().ok()).unwrap_or(1)
}

/// The kernel's words when it drops a connection because two writes met and the barrier acks do not
/// come in the order that it has in mind. Two kernels do so after seconds (docs/compatibility.md).
const BARRIERS_MIXED_UP: &str = "BAD! BarrierAck #";

/// What its receiver says after that, if it was waiting for an own write of the same block.
const WAITED_IN_VAIN: &str = "error receiving Data, e: -110";

/// What else the kernel says about what is done to it here.
const EXPECTED: &[&str] = &[
    BARRIERS_MIXED_UP,
    WAITED_IN_VAIN,
    "Split-Brain detected",
    "error receiving ReportState",
    // It says at the end that it never finished the epochs in which it refused a write.
    "current_epoch->list not empty",
    // Its own try to give way to another Primary.
    "State change failed",
    "state = {",
    "wanted = {",
];

fn barriers_mixed_up(pair: &Mixed84) -> Result<u32> {
    let said = format!("dmesg | grep -e '{BARRIERS_MIXED_UP}' -e '{WAITED_IN_VAIN}' || true");
    let said = pair.kernel.sh(&said)?;
    let mut drops = 0;
    let mut before = "";
    for line in said.lines() {
        if line.contains(BARRIERS_MIXED_UP) {
            drops += 1;
        } else {
            ensure!(
                before.contains(BARRIERS_MIXED_UP),
                "a wait for an ack ended, and the connection was not dropped before: {said}"
            );
        }
        before = line;
    }
    Ok(drops)
}

/// The two are still connected, or the kernel has dropped the connection for the one reason that is
/// known, and has said so; then the operator ends the split brain. Answers with whether it has.
fn after_overlap(pair: &Mixed84, known: u32) -> Result<bool> {
    let drops = barriers_mixed_up(pair)? - known;
    if drops == 0 {
        // Whatever else has ended the connection fails here, since nobody makes it again: both have
        // changes of their own.
        let kernel = drbd_state(&pair.kernel, 0)?;
        let own = pair.state(0)?;
        ensure!(
            kernel.connection == "Connected" && own[0] == "Connected",
            "the connection was lost, and the kernel does not say why: {kernel:?}\n{}",
            pair.report()
        );
        return Ok(false);
    }
    eprintln!("the kernel has dropped the connection: {BARRIERS_MIXED_UP}");
    pair.wait("what came of it", |pair| {
        let kernel = drbd_state(&pair.kernel, 0)?.connection;
        Ok(kernel == "StandAlone" || kernel == "Connected" || pair.state(0)?[0] == "StandAlone")
    })?;
    if drbd_state(&pair.kernel, 0)?.connection != "Connected" {
        pair.kernel.sh(
            "drbdadm disconnect r0; drbdadm secondary r0 && drbdadm connect --discard-my-data r0",
        )?;
        // It may still be connecting.
        pair.adm(&["disconnect", "r0"])?;
        pair.adm(&["connect", "r0"])?;
        pair.wait_in_sync()?;
        pair.kernel.sh("drbdadm primary r0")?;
    }
    Ok(true)
}

/// Both write the same blocks at the same time. Who wins is open, but both agree on it.
fn overlapping(pair: &Mixed84) -> Result<()> {
    // The emulated fio takes long to start: it may end when this one has begun.
    let done = pair.notes().join("done");
    let job = format!("chroot /host fio {SAME} --filename=/dev/drbd0");
    pair.kernel.start_job("fio", &job)?;
    let device = pair.device(0)?;
    let script = format!(
        "while [ ! -e {} ]; do fio {SAME} --filename={} > /dev/null || exit 1; done",
        done.display(),
        device.display()
    );
    let mut own = Command::new("sh").args(["-c", &script]).spawn()?;
    let ended = pair.kernel.finish_job("fio", LIMIT);
    std::fs::write(done, "")?;
    let own = own.wait()?;
    ended?;
    ensure!(own.success(), "a write failed here");
    Ok(())
}

/// The same block in turn: each reads what the other wrote.
fn in_turn(pair: &Mixed84) -> Result<()> {
    let device = pair.device(0)?;
    let text = pair.notes().join("text");
    for round in 0..3u32 {
        let block = format!("round {round}").repeat(1024);
        std::fs::write(&text, &block.as_bytes()[..4096])?;
        lockstep_e2e::run(
            Command::new("dd")
                .arg(format!("if={}", text.display()))
                .arg(format!("of={}", device.display()))
                .args(["bs=4k", "count=1", "oflag=direct", "conv=notrunc"])
                .arg("status=none"),
        )?;
        let read = "chroot /host dd if=/dev/drbd0 bs=4k count=1 iflag=direct status=none";
        let seen = pair.kernel.sh(&format!("{read} | head -c 7"))?;
        ensure!(
            seen == format!("round {round}"),
            "the kernel reads {seen:?}"
        );
        pair.kernel.sh(&format!(
            "yes answer{round} | chroot /host dd of=/dev/drbd0 bs=4k count=1 oflag=direct \
             iflag=fullblock conv=notrunc status=none"
        ))?;
        let back = Command::new("dd")
            .arg(format!("if={}", device.display()))
            .args(["bs=4k", "count=1", "iflag=direct", "status=none"])
            .output()?
            .stdout;
        let answer = format!("answer{round}\n");
        ensure!(back.starts_with(answer.as_bytes()), "round {round}");
    }
    Ok(())
}

/// Both wrote alone and stay Primary: each policy for that.
fn split_brains(pair: &mut Mixed84) -> Result<()> {
    let net = |policy: &str| {
        format!(
            "protocol C; allow-two-primaries yes; after-sb-0pri discard-least-changes; {policy} \
             {PACE}"
        )
    };
    let apart = |pair: &Mixed84, kernel_writes_more: bool| -> Result<()> {
        pair.adm(&["disconnect", "r0"])?;
        pair.kernel.sh("drbdadm disconnect r0")?;
        let device = pair.device(0)?;
        let one = "bs=4k count=1 conv=notrunc,fsync seek=77";
        if kernel_writes_more {
            scribble_in_kernel(&pair.kernel, 0)?;
            host_sh(
                &format!("dd if=/dev/urandom of=$0 {one} status=none"),
                &device,
            )?;
        } else {
            scribble(&device)?;
            let kernel = format!("dd if=/dev/urandom of=/dev/drbd0 {one}");
            pair.kernel.sh(&kernel)?;
        }
        pair.kernel.sh("drbdadm connect r0")?;
        pair.adm(&["connect", "r0"])
    };
    let roles = |pair: &Mixed84| Ok::<_, anyhow::Error>(drbd_state(&pair.kernel, 0)?.roles);

    // Nobody is asked to give way: both stay apart, until the operator says who does.
    apart(pair, false)?;
    pair.wait("StandAlone", |pair| Ok(pair.state(0)?[0] == "StandAlone"))?;
    wait_state(&pair.kernel, "StandAlone", DRBD_LIMIT, |s| {
        s.connection == "StandAlone"
    })?;
    pair.kernel
        .sh("drbdadm secondary r0 && drbdadm connect --discard-my-data r0")?;
    pair.adm(&["connect", "r0"])?;
    pair.wait_in_sync()?;
    pair.kernel.sh("drbdadm primary r0")?;

    // The one with fewer changes is demoted, since nobody has its device open, and gives its changes
    // up in the next handshake.
    let give_way = net("after-sb-1pri discard-secondary; after-sb-2pri call-pri-lost-after-sb;");
    pair.set_net(&give_way, &give_way)?;
    pair.adm(&["adjust", "r0"])?;
    pair.kernel.sh("drbdadm adjust r0")?;
    apart(pair, true)?;
    pair.wait_in_sync()?;
    let found = roles(pair)?;
    ensure!(found == "Primary/Secondary", "{found}");
    ensure!(
        pair.called(Side::Lockstep)?.is_empty(),
        "its handler was called"
    );
    pair.adm(&["primary", "r0"])?;

    // A kernel cannot demote itself in a handshake. It calls its handler and stays away, until the
    // operator demotes it, or the handler has rebooted it. Then the policy for one Primary decides;
    // it must not be one that counts changes, as a reboot marks all that the activity log covers.
    for reboot in [false, true] {
        apart(pair, false)?;
        wait_state(&pair.kernel, "the end of the handshake", DRBD_LIMIT, |s| {
            s.connection == "StandAlone"
        })
        .with_context(|| pair.report())?;
        let called = pair.called(Side::Kernel)?;
        ensure!(called.contains("pri-lost-after-sb"), "called: {called:?}");
        let found = roles(pair)?;
        ensure!(found.starts_with("Primary/"), "demoted unasked: {found}");
        ensure!(
            pair.called(Side::Lockstep)?.is_empty(),
            "the winner's was called"
        );
        if reboot {
            pair.check_kernel_log(EXPECTED)?;
            pair.kernel.power_cut()?;
            pair.boot_kernel(AfterBoot::Up)?;
        } else {
            pair.kernel
                .sh("drbdadm secondary r0 && drbdadm connect r0")?;
        }
        pair.adm(&["adjust", "r0"])?;
        pair.wait_in_sync()?;
        let found = roles(pair)?;
        ensure!(
            found == "Secondary/Primary",
            "the kernel was to lose, reboot {reboot}: {found}\n{}",
            pair.report()
        );
        pair.kernel.sh("drbdadm primary r0")?;
    }

    // It is resynced as a Primary, since both say so.
    let violently = net("after-sb-2pri violently-as0p; rr-conflict violently;");
    pair.set_net(&violently, &violently)?;
    pair.adm(&["adjust", "r0"])?;
    pair.kernel.sh("drbdadm adjust r0")?;
    for kernel_writes_more in [false, true] {
        apart(pair, kernel_writes_more)?;
        pair.wait_in_sync()?;
        let found = roles(pair)?;
        ensure!(found == "Primary/Primary", "{found}");
    }
    Ok(())
}

fn both_primary(minor: u32) -> Result<Mixed84> {
    let pair = Mixed84::start(MixedSetup {
        host_files: HostFiles::ReadOnly,
        handlers: &["pri-lost-after-sb"],
        ..MixedSetup::new(
            &format!("protocol C; allow-two-primaries yes; {PACE}"),
            minor,
        )
    })?;
    pair.wait_connected()?;
    pair.adm(&["primary", "--force", "r0"])?;
    pair.wait_in_sync()?;
    pair.kernel.sh("drbdadm primary r0")?;
    let roles = drbd_state(&pair.kernel, 0)?.roles;
    ensure!(roles == "Primary/Primary", "{roles}");
    Ok(pair)
}

#[test]
fn a_kernel_84_peer_may_be_primary_as_well() -> Result<()> {
    if !can_emulate() || !can_mount() || !has_program("fio") {
        return Ok(());
    }
    let mut pair = both_primary(8520)?;
    in_turn(&pair)?;
    at_once(&pair, &verified(0, 4), &verified(16, 1))?;
    pair.wait_in_sync()?;
    let mut drops = 0;
    for round in 0..rounds_of_overlap() {
        let known = barriers_mixed_up(&pair)?;
        overlapping(&pair).with_context(|| format!("round {round}"))?;
        // Blocks of which the kernel does not say that they are stable are marked here.
        let dropped = after_overlap(&pair, known).with_context(|| format!("round {round}"))?;
        drops += u32::from(dropped);
    }
    eprintln!("{drops} connections dropped by the kernel");
    split_brains(&mut pair)?;
    barriers_mixed_up(&pair)?;
    pair.kernel.sh("drbdadm secondary r0")?;
    pair.adm(&["secondary", "r0"])?;
    pair.check_end(EXPECTED)
}
