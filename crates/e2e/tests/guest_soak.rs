//! One Lockstep node and one kernel DRBD 8.4 node that write, lose their links at random moments,
//! die, change their roles and quarrel with the operator. After each round both must come together
//! by themselves, and at the end both disks are equal.
//!
//! `LOCKSTEP_SOAK_ROUNDS` says how many rounds, `LOCKSTEP_SOAK_SEED` which; a failure names both.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::can_mount;
use lockstep_e2e::guest::{COMMAND_LIMIT, can_emulate};
use lockstep_e2e::guest_line::LineState;
use lockstep_e2e::guest_mixed::{AfterBoot, Mixed84, MixedSetup};

/// A small generator of numbers; the same seed gives the same plan.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// Who is Primary, with what it writes by.
enum Writer {
    Kernel,
    Lockstep(Child, PathBuf),
}

const WRITE: &str = "n=$SEED; while [ ! -e $STOP ]; do n=$((n + 1)); dd if=/dev/urandom of=$DEV \
     bs=4k count=$((n % 5 + 1)) conv=notrunc,fsync seek=$((n * 6997 % 8000)) 2> /dev/null || \
     exit 1; done";

fn start_writer(pair: &Mixed84, kernel: bool, seed: u64) -> Result<Writer> {
    let script = WRITE.replace("$SEED", &seed.to_string());
    if kernel {
        pair.kernel.sh("drbdadm primary r0; rm -f /run/stop")?;
        let script = script
            .replace("$STOP", "/run/stop")
            .replace("$DEV", "/dev/drbd0");
        pair.kernel.start_job("writes", &script)?;
        return Ok(Writer::Kernel);
    }
    pair.adm(&["primary", "r0"])?;
    let stop = pair.notes().join(format!("stop{seed}"));
    let device = pair.device(0)?;
    let script = script
        .replace("$STOP", &stop.display().to_string())
        .replace("$DEV", &device.display().to_string());
    let child = Command::new("sh")
        .args(["-c", &script])
        .stdin(Stdio::null())
        .spawn()
        .context("sh")?;
    Ok(Writer::Lockstep(child, stop))
}

fn stop_writer(pair: &Mixed84, writer: Writer) -> Result<()> {
    match writer {
        Writer::Kernel => {
            pair.kernel.sh("touch /run/stop")?;
            pair.kernel.finish_job("writes", Duration::from_secs(120))?;
            pair.kernel.sh("drbdadm secondary r0").map(drop)
        }
        Writer::Lockstep(mut child, stop) => {
            std::fs::write(stop, "")?;
            ensure!(child.wait()?.success(), "a write failed here");
            pair.adm(&["secondary", "r0"])
        }
    }
}

/// Commands that the state of the moment may forbid: a refusal is an answer too.
fn perhaps_here(pair: &Mixed84, verb: &str, object: &str) -> Result<()> {
    pair.node.tool("drbdadm", &[verb, object]).map(drop)
}

fn perhaps_there(pair: &Mixed84, command: &str) -> Result<()> {
    pair.kernel.sh_raw(command, COMMAND_LIMIT).map(drop)
}

fn trouble(pair: &mut Mixed84, dice: &mut Dice, kernel_writes: bool) -> Result<String> {
    let pause = Duration::from_millis(dice.below(2500));
    let what = dice.below(10);
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
        _ => {
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
    })
}

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
    let net = "verify-alg crc32c; csums-alg crc32c; connect-int 1; ping-int 1; ping-timeout 20; \
               socket-check-timeout 2; timeout 40;";
    let protocol = ["A", "B", "C"][(seed % 3) as usize];
    let minor = 8470 + (seed % 20) as u32;
    let mut pair = Mixed84::start(MixedSetup::new(
        &format!("protocol {protocol}; {net}"),
        minor,
    ))?;
    pair.wait_connected()?;
    pair.kernel
        .sh("drbdadm new-current-uuid --clear-bitmap r0/0")?;
    pair.wait_in_sync()?;
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    for round in 0..rounds {
        let kernel_writes = dice.below(2) == 0;
        let writer = start_writer(&pair, kernel_writes, dice.below(100_000))?;
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
        stop_writer(&pair, writer).with_context(|| format!("seed {seed}, round {round}"))?;
        pair.wait_in_sync()?;
    }
    pair.check_end(EXPECTED)
}

/// Words of the kernel about what this test does to it.
const EXPECTED: &[&str] = &[
    "timed out",
    "error receiving",
    "() failed",
    "State change failed",
    "state = {",
    "wanted = {",
    "Out of sync: start=",
    "Online verify found",
    "sock_sendmsg",
    "sock_recvmsg",
    "short read",
    "old_conn:",
    "mask = 0x",
];
