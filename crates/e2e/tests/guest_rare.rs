//! One Lockstep node and one kernel DRBD 8.4 node: what is rarer than a resync. A Primary that
//! loses its disk and gets it back, resyncs of discarded areas, a verify between two Secondaries, a
//! Primary that goes ahead of a slow line, and each policy for a split brain; all in both role
//! assignments.

use anyhow::{Result, ensure};
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::can_emulate;
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, drbd_state, wait_state};
use lockstep_e2e::guest_line::LineState;
use lockstep_e2e::guest_mixed::{Mixed84, MixedSetup};
use lockstep_e2e::guest_writes::{ROT_KIB, host_sh, rot, scribble, scribble_in_kernel};

const PACE: &str = "connect-int 1; ping-timeout 30; socket-check-timeout 3;";

/// Less than a volume has.
const DATA_BYTES: usize = 31 << 20;

/// Two blocks, far apart.
fn write_two(device: &str) -> String {
    format!(
        "for seek in 11 6000; do dd if=/dev/urandom of={device} bs=4k count=1 conv=notrunc,fsync \
         seek=$seek status=none || exit 1; done"
    )
}

/// The Primary's disk goes away; it reads and writes through its peer. The disk comes back while the
/// connection stands, and gets what it misses.
fn without_a_disk(pair: &Mixed84) -> Result<()> {
    pair.kernel.sh("drbdadm primary r0")?;
    scribble_in_kernel(&pair.kernel, 0)?;
    pair.kernel.sh("drbdadm detach r0")?;
    wait_state(&pair.kernel, "Diskless", DRBD_LIMIT, |s| {
        s.disks == "Diskless/UpToDate"
    })?;
    pair.kernel
        .sh("dd if=/dev/drbd0 of=/dev/null bs=64k count=32 iflag=direct")?;
    scribble_in_kernel(&pair.kernel, 0)?;
    pair.kernel.sh("drbdadm attach r0")?;
    pair.wait_in_sync()?;
    pair.kernel.sh("drbdadm secondary r0")?;

    pair.adm(&["primary", "r0"])?;
    let device = pair.device(0)?;
    scribble(&device)?;
    pair.adm(&["detach", "r0"])?;
    pair.wait("Diskless here", |pair| Ok(pair.state(0)?[1] == "Diskless"))?;
    host_sh(
        "dd if=$0 of=/dev/null bs=64k count=32 iflag=direct status=none",
        &device,
    )?;
    scribble(&device)?;
    pair.adm(&["attach", "r0"])?;
    pair.wait_in_sync()?;
    pair.adm(&["secondary", "r0"])
}

/// What the source discarded while it was alone is discarded at the target as well.
fn discarded(pair: &Mixed84) -> Result<()> {
    let discard = "blkdiscard -o 4194304 -l 8388608";
    pair.kernel
        .sh("drbdadm primary r0 && drbdadm disconnect r0")?;
    pair.kernel.sh(&format!("{discard} /dev/drbd0"))?;
    scribble_in_kernel(&pair.kernel, 0)?;
    pair.kernel.sh("drbdadm connect r0")?;
    pair.wait_in_sync()?;
    pair.kernel.sh("drbdadm secondary r0")?;
    pair.adm(&["primary", "r0"])?;
    let device = pair.device(0)?;
    pair.adm(&["disconnect", "r0"])?;
    host_sh(&format!("{discard} $0 && sync $0"), &device)?;
    scribble(&device)?;
    pair.adm(&["connect", "r0"])?;
    pair.wait_in_sync()?;
    pair.adm(&["secondary", "r0"])
}

/// Both were Primary alone. Both are Secondary when they meet.
fn split(pair: &Mixed84, kernel_first: bool, kernel_writes: bool, own_writes: bool) -> Result<()> {
    apart(pair, kernel_first, kernel_writes, own_writes)?;
    meet(pair)
}

fn meet(pair: &Mixed84) -> Result<()> {
    pair.kernel.sh("drbdadm connect r0")?;
    pair.adm(&["connect", "r0"])
}

fn apart(pair: &Mixed84, kernel_first: bool, kernel_writes: bool, own_writes: bool) -> Result<()> {
    pair.adm(&["disconnect", "r0"])?;
    pair.kernel.sh("drbdadm disconnect r0")?;
    let kernel = |pair: &Mixed84| -> Result<()> {
        pair.kernel.sh("drbdadm primary r0")?;
        if kernel_writes {
            pair.kernel.sh(&write_two("/dev/drbd0"))?;
        }
        pair.kernel.sh("drbdadm secondary r0").map(drop)
    };
    let own = |pair: &Mixed84| -> Result<()> {
        pair.adm(&["primary", "r0"])?;
        let device = pair.device(0)?;
        if own_writes {
            scribble(&device)?;
        }
        pair.adm(&["secondary", "r0"])
    };
    if kernel_first {
        kernel(pair)?;
        own(pair)?;
    } else {
        own(pair)?;
        kernel(pair)?;
    }
    Ok(())
}

/// The data of a node's disk, without the metadata.
fn data(pair: &Mixed84, node: &str) -> Result<Vec<u8>> {
    pair.kernel.sh("sync")?;
    let mut bytes = std::fs::read(pair.disk(node, 0))?;
    bytes.truncate(DATA_BYTES);
    Ok(bytes)
}

/// One node's changes are dropped because they are that node's.
fn policies_by_place(pair: &mut Mixed84) -> Result<()> {
    let sides = ["discard-local", "discard-remote"];
    for (kernel, own, winner) in [(sides[0], sides[1], "alfa"), (sides[1], sides[0], "bravo")] {
        pair.down()?;
        let net = |policy| format!("protocol C; after-sb-0pri {policy}; {PACE}");
        pair.set_net(&net(kernel), &net(own))?;
        pair.up()?;
        pair.wait_in_sync()?;
        apart(pair, true, true, true)?;
        let before = data(pair, winner)?;
        let unlike = data(pair, "alfa")? != data(pair, "bravo")?;
        ensure!(unlike, "nothing to decide");
        meet(pair)?;
        pair.wait_in_sync()?;
        ensure!(data(pair, winner)? == before, "{winner} lost its changes");
    }
    Ok(())
}

/// A Primary that loses is resynced under its users, since both sides say so.
fn violently(pair: &mut Mixed84) -> Result<()> {
    pair.down()?;
    let net = format!(
        "protocol C; after-sb-0pri discard-least-changes; after-sb-1pri violently-as0p; \
         rr-conflict violently; {PACE}"
    );
    pair.set_net(&net, &net)?;
    pair.up()?;
    pair.wait_in_sync()?;
    for kernel_stays in [true, false] {
        pair.adm(&["disconnect", "r0"])?;
        pair.kernel
            .sh("drbdadm disconnect r0 && drbdadm primary r0")?;
        pair.adm(&["primary", "r0"])?;
        let device = pair.device(0)?;
        let winner = if kernel_stays {
            scribble(&device)?;
            pair.kernel.sh(&write_two("/dev/drbd0"))?;
            pair.adm(&["secondary", "r0"])?;
            "alfa"
        } else {
            scribble_in_kernel(&pair.kernel, 0)?;
            host_sh(&write_two("$0"), &device)?;
            pair.kernel.sh("drbdadm secondary r0")?;
            "bravo"
        };
        let before = data(pair, winner)?;
        meet(pair)?;
        pair.wait_in_sync()?;
        ensure!(data(pair, winner)? == before, "{winner} lost its changes");
        let roles = drbd_state(&pair.kernel, 0)?.roles;
        let stays = ["Secondary/Primary", "Primary/Secondary"][usize::from(kernel_stays)];
        ensure!(roles == stays, "{roles}");
        pair.kernel.sh("drbdadm secondary r0")?;
        pair.adm(&["secondary", "r0"])?;
    }
    Ok(())
}

/// A Primary whose line stands still goes on alone, and copies what it wrote when the line goes on.
fn congested(pair: &mut Mixed84) -> Result<()> {
    pair.down()?;
    let net = format!("protocol A; on-congestion pull-ahead; congestion-fill 128k; {PACE}");
    pair.set_net(&net, &net)?;
    pair.up()?;
    pair.wait_in_sync()?;
    pair.kernel.sh("drbdadm primary r0")?;
    pair.line_state(LineState::Stalled);
    pair.kernel
        .sh("dd if=/dev/urandom of=/dev/drbd0 bs=16k count=64 seek=3 oflag=direct")?;
    wait_state(&pair.kernel, "Ahead", DRBD_LIMIT, |s| {
        s.connection == "Ahead"
    })?;
    pair.line_state(LineState::Up);
    pair.wait_in_sync()?;
    pair.hand_to_lockstep()?;
    let device = pair.device(0)?;
    pair.line_state(LineState::Stalled);
    host_sh(
        "dd if=/dev/urandom of=$0 bs=16k count=64 seek=99 oflag=direct conv=notrunc status=none",
        &device,
    )?;
    pair.wait("Ahead here", |pair| Ok(pair.state(0)?[3] == "Ahead"))?;
    pair.line_state(LineState::Up);
    pair.wait_in_sync()?;
    pair.adm(&["secondary", "r0"])
}

/// Each policy for two Secondaries decides the same on both sides, whoever has to give way.
fn policies(pair: &mut Mixed84) -> Result<()> {
    for policy in [
        "discard-zero-changes",
        "discard-least-changes",
        "discard-younger-primary",
        "discard-older-primary",
    ] {
        pair.down()?;
        let net = format!("protocol C; after-sb-0pri {policy}; {PACE}");
        pair.set_net(&net, &net)?;
        pair.up()?;
        pair.wait_in_sync()?;
        let zero = policy == "discard-zero-changes";
        split(pair, true, true, !zero)?;
        pair.wait_in_sync()?;
        split(pair, false, !zero, true)?;
        pair.wait_in_sync()?;
    }
    Ok(())
}

/// One side stays Primary, and wrote more. The policies for that case discard the other's changes.
fn policies_with_a_primary(pair: &mut Mixed84) -> Result<()> {
    for policy in ["consensus", "call-pri-lost-after-sb"] {
        pair.down()?;
        let net = format!(
            "protocol C; after-sb-0pri discard-least-changes; after-sb-1pri {policy}; {PACE}"
        );
        pair.set_net(&net, &net)?;
        pair.up()?;
        pair.wait_in_sync()?;
        for kernel_stays in [true, false] {
            pair.adm(&["disconnect", "r0"])?;
            pair.kernel
                .sh("drbdadm disconnect r0 && drbdadm primary r0")?;
            pair.adm(&["primary", "r0"])?;
            let device = pair.device(0)?;
            if kernel_stays {
                scribble_in_kernel(&pair.kernel, 0)?;
                host_sh(&write_two("$0"), &device)?;
                pair.adm(&["secondary", "r0"])?;
            } else {
                scribble(&device)?;
                pair.kernel.sh(&write_two("/dev/drbd0"))?;
                pair.kernel.sh("drbdadm secondary r0")?;
            }
            pair.kernel.sh("drbdadm connect r0")?;
            pair.adm(&["connect", "r0"])?;
            pair.wait_in_sync()?;
            pair.kernel.sh("drbdadm secondary r0")?;
            pair.adm(&["secondary", "r0"])?;
        }
    }
    Ok(())
}

/// What a verify between two Secondaries found is still marked on both after a reconnect, and is
/// copied from the one that the operator means.
fn secondaries_verify(pair: &Mixed84) -> Result<()> {
    for own in [true, false] {
        rot(&pair.disk(if own { "alfa" } else { "bravo" }, 0))?;
        if own {
            pair.adm(&["verify", "r0/0"])?;
        } else {
            pair.kernel.sh("drbdadm verify r0/0")?;
        }
        pair.wait("marks on both", |pair| {
            let kernel = drbd_state(&pair.kernel, 0)?;
            Ok(pair.out_of_sync_kib(0)? == ROT_KIB
                && pair.state(0)?[3] == "Established"
                && kernel.out_of_sync_kib == ROT_KIB
                && kernel.connection == "Connected")
        })?;
        pair.adm(&["disconnect", "r0"])?;
        pair.adm(&["connect", "r0"])?;
        pair.wait_connected()?;
        let (kernel, here) = (drbd_state(&pair.kernel, 0)?, pair.out_of_sync_kib(0)?);
        ensure!(
            (kernel.out_of_sync_kib, here) == (ROT_KIB, ROT_KIB),
            "forgotten: {here} KiB here, {kernel:?}"
        );
        ensure!(kernel.disks == "UpToDate/UpToDate", "{kernel:?}");
        if own {
            pair.adm(&["invalidate", "r0/0"])?;
        } else {
            pair.kernel.sh("drbdadm invalidate r0/0")?;
        }
        pair.wait_in_sync()?;
    }
    Ok(())
}

#[test]
fn a_kernel_84_peer_agrees_in_rare_states_too() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    let net = format!("protocol C; verify-alg crc32c; {PACE}");
    let mut pair = Mixed84::start(MixedSetup {
        disk: "rs-discard-granularity 65536;".into(),
        ..MixedSetup::new(&net, 8450)
    })?;
    pair.wait_connected()?;
    pair.kernel
        .sh("drbdadm new-current-uuid --clear-bitmap r0/0")?;
    pair.wait_in_sync()?;
    discarded(&pair)?;
    without_a_disk(&pair)?;
    secondaries_verify(&pair)?;
    policies(&mut pair)?;
    policies_with_a_primary(&mut pair)?;
    policies_by_place(&mut pair)?;
    violently(&mut pair)?;
    congested(&mut pair)?;
    pair.check_end(&["Out of sync: start=", "Online verify found 3 4k block"])
}
