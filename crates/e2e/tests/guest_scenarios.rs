//! One Lockstep node and one kernel DRBD 8.4 node: what the captures of two kernels show, each in
//! both role assignments. Few boots: each test goes through several scenarios.

use anyhow::Result;
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::{Cable, can_emulate};
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, drbd_state, wait_state};
use lockstep_e2e::guest_mixed::{Mixed84, MixedSetup, PACE};
use lockstep_e2e::guest_writes::{ROT_KIB, host_sh, rot, scribble, scribble_in_kernel};

/// Does not wait long for a peer, and gives an emulated machine time to answer.
fn start(minor: u32, volumes: u32, net: &str) -> Result<Mixed84> {
    let pair = Mixed84::start(MixedSetup {
        volumes,
        ..MixedSetup::new(&format!("{net} {PACE}"), minor)
    })?;
    pair.wait_connected()?;
    Ok(pair)
}

/// A verify by the Primary finds what differs, and the next connect heals it.
fn verify(pair: &Mixed84) -> Result<()> {
    let kernel_marks =
        |pair: &Mixed84| -> Result<u64> { Ok(drbd_state(&pair.kernel, 1)?.out_of_sync_kib) };
    rot(&pair.disk("alfa", 1))?;
    pair.kernel.sh("drbdadm verify r0/1")?;
    pair.wait("marks in the kernel", |pair| {
        Ok(
            kernel_marks(pair)? == ROT_KIB
                && drbd_state(&pair.kernel, 1)?.connection == "Connected",
        )
    })?;
    pair.wait("the same marks here", |pair| {
        Ok(pair.out_of_sync_kib(1)? == ROT_KIB && pair.state(1)?[3] == "Established")
    })?;
    pair.kernel
        .sh("drbdadm disconnect r0 && drbdadm connect r0")?;
    pair.wait_in_sync()?;

    pair.hand_to_lockstep()?;
    rot(&pair.disk("bravo", 1))?;
    pair.adm(&["verify", "r0/1"])?;
    pair.wait("marks here", |pair| {
        Ok(pair.out_of_sync_kib(1)? == ROT_KIB && pair.state(1)?[3] == "Established")
    })?;
    pair.wait("the same marks in the kernel", |pair| {
        Ok(
            kernel_marks(pair)? == ROT_KIB
                && drbd_state(&pair.kernel, 1)?.connection == "Connected",
        )
    })?;
    pair.adm(&["disconnect", "r0"])?;
    pair.adm(&["connect", "r0"])?;
    pair.wait_in_sync()
}

/// A bitmap resync in either direction that either side pauses.
fn paused(pair: &Mixed84, kernel_is_source: bool, own: bool) -> Result<()> {
    let (here, there) = if kernel_is_source {
        ("PausedSyncT", "PausedSyncS")
    } else {
        ("PausedSyncS", "PausedSyncT")
    };
    pair.kernel.sh("drbdadm disconnect r0")?;
    if kernel_is_source {
        scribble_in_kernel(&pair.kernel, 0)?;
    } else {
        scribble(&pair.device(0)?)?;
    }
    let pause = |verb: &str| {
        if own {
            pair.adm(&[verb, "r0"])
        } else {
            pair.kernel.sh(&format!("drbdadm {verb} r0")).map(drop)
        }
    };
    pause("pause-sync")?;
    pair.kernel.sh("drbdadm connect r0")?;
    pair.wait("a paused resync", |pair| Ok(pair.state(0)?[3] == here))?;
    wait_state(&pair.kernel, "a paused resync", DRBD_LIMIT, |s| {
        s.connection == there
    })?;
    pause("resume-sync")?;
    pair.wait_in_sync()
}

#[test]
fn two_volumes_go_through_syncs_verifies_trims_and_pauses_in_both_directions() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    let mut pair = start(8420, 2, "protocol A; verify-alg crc32c;")?;
    // Full sync towards this node, with writes of protocol A.
    pair.kernel.sh("drbdadm primary --force r0")?;
    scribble_in_kernel(&pair.kernel, 0)?;
    scribble_in_kernel(&pair.kernel, 1)?;
    pair.wait_in_sync()?;
    verify(&pair)?;

    // This node is Primary with protocol A, and trims.
    let (first, second) = (pair.device(0)?, pair.device(1)?);
    scribble(&first)?;
    host_sh("blkdiscard -o 2M -l 4M $0 && sync $0", &second)?;
    scribble(&second)?;
    // A full sync of one volume in each direction, asked for by the node that needs it.
    pair.kernel.sh("drbdadm invalidate r0/1")?;
    pair.wait_in_sync()?;
    pair.hand_to_kernel()?;
    pair.adm(&["invalidate", "r0/1"])?;
    pair.wait_in_sync()?;
    pair.kernel
        .sh("blkdiscard -o 8388608 -l 4194304 /dev/drbd0")?;
    scribble_in_kernel(&pair.kernel, 0)?;

    paused(&pair, true, true)?;
    paused(&pair, true, false)?;
    pair.hand_to_lockstep()?;
    paused(&pair, false, true)?;
    paused(&pair, false, false)?;
    pair.adm(&["secondary", "r0"])?;

    // Protocol B, both as Primary.
    pair.down()?;
    let net = format!("protocol B; verify-alg crc32c; {PACE}");
    pair.set_net(&net, &net)?;
    pair.up()?;
    pair.wait_in_sync()?;
    pair.kernel.sh("drbdadm primary r0")?;
    scribble_in_kernel(&pair.kernel, 1)?;
    pair.hand_to_lockstep()?;
    scribble(&pair.device(0)?)?;
    pair.adm(&["secondary", "r0"])?;
    pair.wait_in_sync()?;
    // What the verifies found is an error to the kernel.
    pair.check_end(&["Out of sync: start=", "Online verify found 3 4k block"])
}

/// Both write alone. The kernel is Primary at the end if `kernel_stays`, else this node.
fn diverge(pair: &Mixed84, kernel_stays: bool) -> Result<()> {
    pair.adm(&["disconnect", "r0"])?;
    pair.kernel
        .sh("drbdadm disconnect r0; drbdadm primary r0")?;
    pair.adm(&["primary", "r0"])?;
    scribble_in_kernel(&pair.kernel, 0)?;
    scribble(&pair.device(0)?)?;
    if kernel_stays {
        pair.adm(&["secondary", "r0"])
    } else {
        pair.kernel.sh("drbdadm secondary r0").map(drop)
    }
}

fn wait_standalone(pair: &Mixed84) -> Result<()> {
    pair.wait("StandAlone here", |pair| {
        Ok(pair.state(0)?[0] == "StandAlone")
    })?;
    wait_state(&pair.kernel, "no connection", DRBD_LIMIT, |s| {
        matches!(s.connection.as_str(), "StandAlone" | "WFConnection")
    })
    .map(drop)
}

#[test]
fn quarrels_and_lost_links_end_as_the_policies_say() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    let secret = |word: &str| {
        format!("protocol C; cram-hmac-alg sha256; shared-secret {word}; ping-int 3; {PACE}")
    };
    let mut pair = start(8430, 1, "protocol C;")?;
    // Both disks count as equal.
    pair.kernel
        .sh("drbdadm new-current-uuid --clear-bitmap r0/0")?;
    pair.wait_in_sync()?;

    // Split brain that the operator ends, on either side.
    diverge(&pair, true)?;
    pair.adm(&["connect", "r0"])?;
    pair.kernel.sh("drbdadm connect r0")?;
    wait_standalone(&pair)?;
    pair.kernel
        .sh("drbdadm disconnect r0; drbdadm connect r0")?;
    pair.adm(&["connect", "--discard-my-data", "r0"])?;
    pair.wait_in_sync()?;
    pair.kernel.sh("drbdadm secondary r0")?;
    diverge(&pair, false)?;
    pair.kernel.sh("drbdadm connect r0")?;
    pair.adm(&["connect", "r0"])?;
    wait_standalone(&pair)?;
    pair.kernel
        .sh("drbdadm disconnect r0; drbdadm connect --discard-my-data r0")?;
    pair.adm(&["connect", "r0"])?;
    pair.wait_in_sync()?;
    pair.adm(&["secondary", "r0"])?;

    // And one that a policy ends.
    pair.down()?;
    let net = format!("protocol C; after-sb-1pri discard-secondary; {PACE}");
    pair.set_net(&net, &net)?;
    pair.up()?;
    pair.wait_in_sync()?;
    for kernel_stays in [true, false] {
        diverge(&pair, kernel_stays)?;
        pair.kernel.sh("drbdadm connect r0")?;
        pair.adm(&["connect", "r0"])?;
        pair.wait_in_sync()?;
        pair.kernel.sh("drbdadm secondary r0")?;
        pair.adm(&["secondary", "r0"])?;
    }

    // Different secrets: nothing connects, and nothing is lost by it.
    pair.down()?;
    pair.set_net(&secret("right"), &secret("wrong"))?;
    pair.up()?;
    pair.wait("a refused connection", |pair| {
        Ok(pair.state(0)?[0] == "StandAlone"
            || matches!(
                drbd_state(&pair.kernel, 0)?.connection.as_str(),
                "StandAlone"
            ))
    })?;
    pair.down()?;
    pair.set_net(&secret("right"), &secret("right"))?;
    pair.up()?;
    pair.wait_in_sync()?;

    // The cable is pulled under writes of either side.
    pair.kernel.sh("drbdadm primary r0")?;
    lose_link(&pair, || scribble_in_kernel(&pair.kernel, 0))?;
    pair.hand_to_lockstep()?;
    let device = pair.device(0)?;
    lose_link(&pair, || scribble(&device))?;
    pair.adm(&["secondary", "r0"])?;
    pair.check_end(EXPECTED)
}

/// Words of the kernel about what this test does to it.
const EXPECTED: &[&str] = &[
    "Split-Brain detected but unresolved",
    "error receiving ReportState",
    "Authentication of peer failed",
    "expected AuthChallenge packet",
    "expected AuthResponse packet",
    "timed out",
];

fn lose_link(pair: &Mixed84, write: impl FnOnce() -> Result<()>) -> Result<()> {
    pair.kernel.cable(Cable::Pulled)?;
    // The write ends when the peer is given up.
    write()?;
    pair.wait("the loss of the link", |pair| {
        Ok(pair.state(0)?[0] != "Connected")
    })?;
    wait_state(&pair.kernel, "the loss of the link", DRBD_LIMIT, |s| {
        s.connection != "Connected"
    })?;
    pair.kernel.cable(Cable::Plugged)?;
    pair.wait_in_sync()
}
