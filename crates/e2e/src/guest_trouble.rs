//! What tests that give a mixed pair trouble at random share: numbers, the two sides by name, a
//! writer on either, and the kernel's words for what they do to it.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::guest_drbd::{DRBD_LIMIT, DrbdState, wait_state};
use crate::guest_mixed::Mixed84;
use crate::guest_writes::{scribble, scribble_in_kernel};

/// A small generator of numbers; the same seed gives the same plan.
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    /// For a seed.
    pub const fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number from 0 to `bound` - 1.
    pub const fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// One side or the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The kernel's node.
    Kernel,
    /// The Lockstep node.
    Lockstep,
}

impl Side {
    /// Each.
    pub const BOTH: [Side; 2] = [Side::Kernel, Side::Lockstep];

    /// The other one.
    pub const fn other(self) -> Side {
        match self {
            Side::Kernel => Side::Lockstep,
            Side::Lockstep => Side::Kernel,
        }
    }

    /// Whether it is the kernel.
    pub const fn is_kernel(self) -> bool {
        matches!(self, Side::Kernel)
    }

    /// The host name.
    pub const fn name(self) -> &'static str {
        match self {
            Side::Kernel => "bravo",
            Side::Lockstep => "alfa",
        }
    }

    /// `drbdadm` on this side.
    pub fn adm(self, pair: &Mixed84, words: &[&str]) -> Result<()> {
        match self {
            Side::Kernel => {
                let command = format!("drbdadm {}", words.join(" "));
                pair.kernel.sh(&command).map(drop)
            }
            Side::Lockstep => pair.adm(words),
        }
    }

    /// Durable random writes to volume 0.
    pub fn writes(self, pair: &Mixed84) -> Result<()> {
        match self {
            Side::Kernel => scribble_in_kernel(&pair.kernel, 0),
            Side::Lockstep => scribble(&pair.device(0)?),
        }
    }

    /// Waits until its replication is as said; a kernel has one word for both ends.
    pub fn wait(self, pair: &Mixed84, repl: &str) -> Result<()> {
        match self {
            Side::Kernel => {
                wait_state(&pair.kernel, repl, DRBD_LIMIT, |s| s.connection == repl).map(drop)
            }
            Side::Lockstep => pair.wait(repl, |pair| Ok(pair.state(0)?[3] == repl)),
        }
    }

    /// Waits until its disk is as said.
    pub fn wait_disk(self, pair: &Mixed84, disk: &str) -> Result<()> {
        match self {
            Side::Kernel => {
                let begin = format!("{disk}/");
                let is_it = |s: &DrbdState| s.disks.starts_with(&begin);
                wait_state(&pair.kernel, disk, DRBD_LIMIT, is_it).map(drop)
            }
            Side::Lockstep => pair.wait(disk, |pair| Ok(pair.state(0)?[1] == disk)),
        }
    }
}

/// Durable writes all over volume 0 of the node that is Primary for it.
#[derive(Debug)]
pub enum Writer {
    /// On the kernel's node.
    Kernel,
    /// On the Lockstep node, with the file that ends it.
    Lockstep(Child, PathBuf),
}

const WRITE: &str = "n=$SEED; while [ ! -e $STOP ]; do n=$((n + 1)); dd if=/dev/urandom of=$DEV \
     bs=4k count=$((n % 5 + 1)) conv=notrunc,fsync seek=$((n * 6997 % 8000)) 2> /dev/null || \
     exit 1; done";

impl Writer {
    /// Makes a node Primary and starts to write there.
    pub fn start(pair: &Mixed84, kernel: bool, seed: u64) -> Result<Writer> {
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
        // An earlier one's.
        let _ = std::fs::remove_file(&stop);
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

    /// Ends it, and the node's role. No write may have failed.
    pub fn stop(self, pair: &Mixed84) -> Result<()> {
        match self {
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
}

/// Words of the kernel about disks that are detached in the middle of a resync: replies and requests
/// were on their way.
pub const DETACHED_WORDS: &[&str] = &[
    "Can not write resync data to local disk.",
    "drbd_rs_complete_io() called, but extent not found",
    "Not sending RSDataReply, partner DISKLESS!",
];

/// Words of the kernel about lost links, ended verifies and refused commands.
pub const TROUBLE_WORDS: &[&str] = &[
    "timed out",
    "error receiving",
    "() failed",
    "csum) failed",
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
