//! One Lockstep node and one kernel DRBD 8.4 node that write, lose their links at random moments,
//! die, change their roles, lose their disks, change their options, grow, and quarrel with the operator. After each round both must come together
//! by themselves, and at the end both disks are equal.
//!
//! `LOCKSTEP_SOAK_ROUNDS` says how many rounds, `LOCKSTEP_SOAK_SEED` which; a failure names both.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::{COMMAND_LIMIT, can_emulate};
use lockstep_e2e::guest_line::LineState;
use lockstep_e2e::guest_mixed::{AfterBoot, Mixed84, MixedSetup};
use lockstep_e2e::guest_trouble::{DETACHED_WORDS, Dice, Side, TROUBLE_WORDS, Writer};

/// Commands that the state of the moment may forbid: a refusal is an answer too.
fn perhaps_here(pair: &Mixed84, verb: &str, object: &str) -> Result<()> {
    pair.node.tool("drbdadm", &[verb, object]).map(drop)
}

fn perhaps_there(pair: &Mixed84, command: &str) -> Result<()> {
    pair.kernel.sh_raw(command, COMMAND_LIMIT).map(drop)
}

fn trouble(pair: &mut Mixed84, dice: &mut Dice, kernel_writes: bool) -> Result<String> {
    let pause = Duration::from_millis(dice.below(2500));
    let what = dice.below(13);
    Ok(match what {
        0..=2 => {
            let times = 1 + dice.below(4);
            for _ in 0..times {
                pair.line_state(LineState::Down);
                sleep(Duration::from_millis(dice.below(700)));
                pair.line_state(LineState::Up);
                sleep(Duration::from_millis(dice.below(1500)));
            }
            format!("{times} cuts")
        }
        3 => {
            pair.line_state(LineState::Stalled);
            sleep(pause * 2);
            pair.line_state(LineState::Up);
            format!("a stall of {:?}", pause * 2)
        }
        4 => {
            perhaps_here(pair, "disconnect", "r0")?;
            sleep(pause);
            perhaps_here(pair, "connect", "r0")?;
            "disconnect here".into()
        }
        5 => {
            perhaps_there(pair, "drbdadm disconnect r0")?;
            sleep(pause);
            perhaps_there(pair, "drbdadm connect r0")?;
            "disconnect there".into()
        }
        6 if kernel_writes => {
            pair.kill_daemon()?;
            sleep(pause);
            pair.start_daemon()?;
            pair.adm(&["up", "r0"])?;
            "a kill here".into()
        }
        6 => {
            pair.kernel.power_cut()?;
            pair.boot_kernel(AfterBoot::Up)?;
            "a power cut there".into()
        }
        7 if kernel_writes => {
            perhaps_here(pair, "invalidate", "r0/0")?;
            pair.line_state(LineState::Down);
            pair.line_state(LineState::Up);
            "invalidate here, cut".into()
        }
        7 => {
            perhaps_there(pair, "drbdadm invalidate r0/0")?;
            pair.line_state(LineState::Down);
            pair.line_state(LineState::Up);
            "invalidate there, cut".into()
        }
        8 => {
            perhaps_here(pair, "pause-sync", "r0")?;
            pair.line_state(LineState::Down);
            sleep(pause);
            pair.line_state(LineState::Up);
            sleep(pause);
            pair.adm(&["resume-sync", "r0"])?;
            "a pause here over a cut".into()
        }
        9 => {
            if dice.below(2) == 0 {
                perhaps_here(pair, "verify", "r0/0")?;
            } else {
                perhaps_there(pair, "drbdadm verify r0/0")?;
            }
            sleep(pause / 4);
            pair.line_state(LineState::Down);
            sleep(pause / 4);
            pair.line_state(LineState::Up);
            "a verify that is cut".into()
        }
        10 => {
            let side = Side::BOTH[dice.below(2) as usize];
            // Another's resync would make the disk the only good one, which cannot go.
            pair.wait_in_sync()?;
            side.adm(pair, &["detach", "r0"])?;
            side.wait_disk(pair, "Diskless")?;
            sleep(pause);
            side.adm(pair, &["attach", "r0"])?;
            if side.is_kernel() {
                // It gives up a disk whose attaching is cut (Negotiating -> Diskless), and fails its own
                // users then.
                pair.wait_in_sync()?;
            }
            pair.line_state(LineState::Down);
            pair.line_state(LineState::Up);
            format!("{side:?} without a disk, cut when it is back")
        }
        11 => {
            let letter = ["A", "B", "C"][dice.below(3) as usize];
            let epoch = 100 + dice.below(2000);
            let net = format!("protocol {letter}; max-epoch-size {epoch}; {NET}");
            pair.set_net(&net, &net)?;
            let first = Side::BOTH[dice.below(2) as usize];
            first.adm(pair, &["adjust", "r0"])?;
            pair.line_state(LineState::Down);
            sleep(pause / 4);
            pair.line_state(LineState::Up);
            first.other().adm(pair, &["adjust", "r0"])?;
            format!("protocol {letter}, first on {first:?}, cut between")
        }
        _ => {
            let side = Side::BOTH[dice.below(2) as usize];
            // Refused where it would throw away the only good disk.
            let words = if side.is_kernel() == kernel_writes {
                "invalidate-remote"
            } else {
                "invalidate"
            };
            match side {
                Side::Kernel => perhaps_there(pair, &format!("drbdadm {words} r0/0"))?,
                Side::Lockstep => perhaps_here(pair, words, "r0/0")?,
            }
            sleep(pause / 4);
            perhaps_here(pair, "verify", "r0/0")?;
            perhaps_there(pair, "drbdadm verify r0/0")?;
            format!("{words} on {side:?}, and verifies at once")
        }
    })
}

/// What needs that nobody writes.
fn quiet_trouble(pair: &mut Mixed84, dice: &mut Dice, mib: &mut u64) -> Result<String> {
    let words = [TROUBLE_WORDS, DETACHED_WORDS].concat();
    Ok(match dice.below(6) {
        0 => {
            pair.kill_daemon()?;
            pair.check_kernel_log(&words)?;
            pair.kernel.power_cut()?;
            pair.boot_kernel(AfterBoot::Up)?;
            pair.start_daemon()?;
            pair.adm(&["up", "r0"])?;
            "both have died".into()
        }
        1 => {
            pair.down()?;
            pair.up()?;
            "both were down".into()
        }
        2 => {
            let side = Side::BOTH[dice.below(2) as usize];
            *mib += 2;
            side.adm(pair, &["primary", "r0"])?;
            pair.grow_disks(*mib)?;
            side.adm(pair, &["resize", "r0"])?;
            pair.wait_grown(*mib)?;
            side.adm(pair, &["secondary", "r0"])?;
            format!("{mib} MiB by {side:?}")
        }
        3 => {
            let side = Side::BOTH[dice.below(2) as usize];
            side.adm(pair, &["primary", "r0"])?;
            match side {
                Side::Kernel => {
                    side.writes(pair)?;
                    pair.check_kernel_log(&words)?;
                    pair.kernel.power_cut()?;
                    pair.boot_kernel(AfterBoot::Up)?;
                }
                Side::Lockstep => {
                    side.writes(pair)?;
                    pair.kill_daemon()?;
                    pair.start_daemon()?;
                    pair.adm(&["up", "r0"])?;
                }
            }
            format!("{side:?} has died as Primary")
        }
        _ => return Ok("nothing".into()),
    })
}

/// All but the protocol, which the seed and the dice choose.
const NET: &str = "verify-alg crc32c; csums-alg crc32c; connect-int 1; ping-int 1; ping-timeout 20; \
     socket-check-timeout 2; timeout 40;";

#[test]
fn a_pair_with_a_kernel_comes_together_after_every_trouble() -> Result<()> {
    if !can_emulate() || !can_mount() {
        return Ok(());
    }
    let number = |name: &str, otherwise: u64| -> u64 {
        let value = std::env::var(name).ok().and_then(|v| v.parse().ok());
        value.unwrap_or(otherwise)
    };
    let (rounds, seed) = (
        number("LOCKSTEP_SOAK_ROUNDS", 5),
        number("LOCKSTEP_SOAK_SEED", 1),
    );
    let protocol = ["A", "B", "C"][(seed % 3) as usize];
    let minor = 8470 + (seed % 20) as u32;
    let mut pair = Mixed84::start(MixedSetup::new(
        &format!("protocol {protocol}; {NET}"),
        minor,
    ))?;
    pair.wait_connected()?;
    pair.kernel
        .sh("drbdadm new-current-uuid --clear-bitmap r0/0")?;
    pair.wait_in_sync()?;
    let mut dice = Dice::new(seed);
    let mut mib = 32;
    for round in 0..rounds {
        let kernel_writes = dice.below(2) == 0;
        let writer = Writer::start(&pair, kernel_writes, dice.below(100_000))?;
        let mut done = Vec::new();
        let result = (|| {
            for _ in 0..1 + dice.below(3) {
                sleep(Duration::from_millis(dice.below(1500)));
                done.push(trouble(&mut pair, &mut dice, kernel_writes)?);
            }
            pair.wait_in_sync()
        })();
        let who = if kernel_writes { "kernel" } else { "Lockstep" };
        eprintln!(
            "seed {seed} round {round}, {who} writes: {}",
            done.join(", ")
        );
        result.with_context(|| format!("seed {seed}, round {round}, {who} writes: {done:?}"))?;
        writer
            .stop(&pair)
            .with_context(|| format!("seed {seed}, round {round}"))?;
        pair.wait_in_sync()?;
        let quiet = quiet_trouble(&mut pair, &mut dice, &mut mib)
            .with_context(|| format!("seed {seed}, after round {round}"))?;
        eprintln!("  then: {quiet}");
        pair.wait_in_sync()
            .with_context(|| format!("seed {seed}, round {round}, then {quiet}"))?;
    }
    pair.check_end(&[TROUBLE_WORDS, DETACHED_WORDS].concat())
}
