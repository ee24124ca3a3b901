//! One Lockstep node and one kernel DRBD 8.4 node: commands in the middle of what other commands have
//! begun, while one side writes; each in both role assignments.
//!
//! `LOCKSTEP_CUTS_S` says for how many seconds the link is cut at random, `LOCKSTEP_SOAK_SEED` how.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::can_emulate;
use lockstep_e2e::guest_drbd::drbd_state;
use lockstep_e2e::guest_line::LineState;
use lockstep_e2e::guest_mixed::{Mixed84, MixedSetup, PACE};
use lockstep_e2e::guest_trouble::{DETACHED_WORDS, Dice, Side, TROUBLE_WORDS, Writer};
use lockstep_e2e::guest_writes::rot;

/// How fast a resync is that others are to interrupt: all takes four seconds.
const SLOW: &str = "8M";
const FAST: &str = "100M";

/// The rate of the next resyncs, in which the target has the say.
fn rate(pair: &Mixed84, rate: &str) -> Result<()> {
    let option = format!("--resync-rate={rate}");
    pair.kernel
        .sh(&format!("drbdsetup disk-options 0 {option}"))?;
    let words = ["peer-device-options", "r0", "1", "0", &option];
    let output = pair.node.tool("drbdsetup", &words)?;
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

/// Who is Primary changes twice while a full sync runs: its target serves all data, too.
fn roles_change_in_a_resync(pair: &Mixed84, source: Side) -> Result<()> {
    let target = source.other();
    rate(pair, SLOW)?;
    source.adm(pair, &["primary", "r0"])?;
    target.adm(pair, &["invalidate", "r0/0"])?;
    target.wait(pair, "SyncTarget")?;
    source.writes(pair)?;
    source.adm(pair, &["secondary", "r0"])?;
    target.adm(pair, &["primary", "r0"])?;
    target.writes(pair)?;
    target.adm(pair, &["secondary", "r0"])?;
    source.adm(pair, &["primary", "r0"])?;
    source.writes(pair)?;
    pair.wait_in_sync()?;
    source.adm(pair, &["secondary", "r0"])?;
    rate(pair, FAST)
}

/// The Primary throws its peer's data away under load; the target's disk goes in the middle of the
/// resync and comes back, then the Primary's own one does.
fn disks_go_under_load(pair: &Mixed84, primary: Side) -> Result<()> {
    let secondary = primary.other();
    let writer = Writer::start(pair, primary.is_kernel(), 100)?;
    rate(pair, SLOW)?;
    primary.adm(pair, &["invalidate-remote", "r0/0"])?;
    secondary.wait(pair, "SyncTarget")?;
    secondary.adm(pair, &["detach", "r0"])?;
    secondary.wait_disk(pair, "Diskless")?;
    sleep(Duration::from_millis(500));
    secondary.adm(pair, &["attach", "r0"])?;
    rate(pair, FAST)?;
    pair.wait_in_sync()?;
    primary.adm(pair, &["detach", "r0"])?;
    primary.wait_disk(pair, "Diskless")?;
    sleep(Duration::from_millis(500));
    primary.adm(pair, &["attach", "r0"])?;
    pair.wait_in_sync()?;
    writer.stop(pair)
}

/// A verify finds differences under load while options change; the next connect heals them.
fn options_change_in_a_verify(pair: &mut Mixed84, primary: Side) -> Result<()> {
    let secondary = primary.other();
    let writer = Writer::start(pair, primary.is_kernel(), 200)?;
    rot(&pair.disk(secondary.name(), 0))?;
    primary.adm(pair, &["verify", "r0/0"])?;
    let net = |protocol: char, more: &str| {
        format!("protocol {protocol}; verify-alg crc32c; {more} {PACE}")
    };
    for more in ["max-buffers 4000;", "max-epoch-size 300;", ""] {
        for (side, protocol) in [(primary, 'A'), (secondary, 'B'), (primary, 'C')] {
            let text = net(protocol, more);
            pair.set_net(&text, &text)?;
            side.adm(pair, &["adjust", "r0"])?;
        }
    }
    for side in Side::BOTH {
        side.adm(pair, &["adjust", "r0"])?;
    }
    // A kernel skips no extent that is in use: it goes on when the writer has left it. Under this load it
    // was seen to verify 4 MiB in 150 s, with no request of it under way.
    writer.stop(pair)?;
    // The state may be one in which it runs, or has ended.
    pair.wait("the end of the verify", |pair| {
        let own = pair.state(0)?;
        let kernel = drbd_state(&pair.kernel, 0)?;
        Ok(own[3] == "Established" && kernel.connection == "Connected")
    })?;
    // What the verify found is resynced with what a Primary writes meanwhile; without a Primary no
    // generation begins, and both kinds of node leave the marks as they are.
    let writer = Writer::start(pair, primary.is_kernel(), 200)?;
    secondary.adm(pair, &["disconnect", "r0"])?;
    secondary.adm(pair, &["connect", "r0"])?;
    pair.wait_in_sync()?;
    writer.stop(pair)
}

/// The link is cut at random, in the middle of handshakes and resyncs, too.
fn cuts(pair: &Mixed84, primary: Side, seed: u64, time: Duration) -> Result<()> {
    let mut dice = Dice::new(seed);
    let writer = Writer::start(pair, primary.is_kernel(), 300)?;
    let begin = Instant::now();
    let mut count = 0;
    while begin.elapsed() < time {
        pair.line_state(LineState::Down);
        sleep(Duration::from_millis(dice.below(300)));
        pair.line_state(LineState::Up);
        // Some too short for a connection, some long enough for a resync.
        let longest = if dice.below(3) == 0 { 6000 } else { 1500 };
        sleep(Duration::from_millis(dice.below(longest)));
        count += 1;
    }
    let what = format!("{count} cuts, seed {seed}");
    pair.wait_in_sync().context(what)?;
    writer.stop(pair)
}

#[test]
fn commands_in_the_middle_of_others_end_well_with_a_kernel_84_peer() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    let number = |name: &str, otherwise: u64| -> u64 {
        let value = std::env::var(name).ok().and_then(|v| v.parse().ok());
        value.unwrap_or(otherwise)
    };
    let cut_time = Duration::from_secs(number("LOCKSTEP_CUTS_S", 8));
    let seed = number("LOCKSTEP_SOAK_SEED", 1);
    let net = format!("protocol C; verify-alg crc32c; {PACE}");
    let mut pair = Mixed84::start(MixedSetup::new(&net, 8570))?;
    pair.wait_connected()?;
    pair.kernel
        .sh("drbdadm new-current-uuid --clear-bitmap r0/0")?;
    pair.wait_in_sync()?;
    for side in Side::BOTH {
        let begin = Instant::now();
        let context = || format!("{side:?}");
        roles_change_in_a_resync(&pair, side).with_context(context)?;
        pair.wait_in_sync()?;
        disks_go_under_load(&pair, side).with_context(context)?;
        pair.wait_in_sync()?;
        options_change_in_a_verify(&mut pair, side).with_context(context)?;
        pair.wait_in_sync()?;
        cuts(&pair, side, seed, cut_time).with_context(context)?;
        pair.wait_in_sync()?;
        eprintln!("{side:?}: {:?}", begin.elapsed());
    }
    let expected = [TROUBLE_WORDS, DETACHED_WORDS].concat();
    pair.check_end(&expected)
}
