//! One Lockstep node and one kernel DRBD 8.4 node: what is rarer than a resync. A Primary that
//! loses its disk and gets it back, resyncs of discarded areas, a verify between two Secondaries, and
//! each policy for a split brain; all in both role assignments.

use anyhow::{Result, ensure};
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::can_emulate;
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, drbd_state, wait_state};
use lockstep_e2e::guest_mixed::{Mixed84, MixedSetup};
use lockstep_e2e::guest_writes::{ROT_KIB, host_sh, rot, scribble, scribble_in_kernel};

const PACE: &str = "connect-int 1; ping-timeout 30; socket-check-timeout 3;";

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
    pair.kernel.sh("drbdadm connect r0")?;
    pair.adm(&["connect", "r0"])
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
    pair.check_end(&["Out of sync: start=", "Online verify found 3 4k block"])
}
