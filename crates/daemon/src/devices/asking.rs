//! Asks how a device is used.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use lockstep_front::gate::Gate;
use lockstep_front::{BlockNumber, Usage};

use super::lock;

/// An unmount is seen when it begins. What it still writes may take a while; after that it is looked for
/// as for any other user.
const LEAVES: Duration = Duration::from_secs(2);
/// How soon it is looked whether it has ended; the longer it takes, the less often.
const LEAVES_LOOK: Duration = Duration::from_millis(3);

/// How a device is used that was mounted and is not any more, once the kernel has let go of it, and the
/// count of its uses that belongs to that. With a kernel's volume the unmount demotes before it returns;
/// here as soon after it as can be.
pub(super) fn left_usage(number: BlockNumber, gate: &Gate, check: &Mutex<()>) -> (u64, Usage) {
    let uses = || gate.session().map_or(0, |session| session.uses);
    let begin = Instant::now();
    loop {
        let before = uses();
        let busy = lock(check);
        let usage = find_usage(number);
        drop(busy);
        let is_leaving = match usage {
            // It looks at mounts as well: another one may have begun.
            Usage::Claimed => matches!(number.mounted(), Ok(None)),
            // Its last write came meanwhile.
            Usage::Unused => uses() != before,
            Usage::MountedReadOnly | Usage::Open | Usage::Unwritten => false,
        };
        if !is_leaving || begin.elapsed() > LEAVES {
            return (before, usage);
        }
        std::thread::sleep(LEAVES_LOOK.max(begin.elapsed() / 8));
    }
}

/// Finds out how a device is used. If nobody uses it, all that was written is durable then, or has
/// failed, and nothing that was read is remembered.
pub(super) fn find_usage(number: BlockNumber) -> Usage {
    let found = match number.visible_usage() {
        Ok(Some(visible)) => Ok(visible),
        Ok(None) => ask_device(number),
        Err(error) => Err(error),
    };
    or_open(number, found)
}

pub(super) fn or_open(number: BlockNumber, found: std::io::Result<Usage>) -> Usage {
    found.unwrap_or_else(|error| {
        tracing::warn!(device = number.word(), %error, "how a device is used cannot be told");
        Usage::Open
    })
}

/// What the device says may have to wait for this daemon's own answers, so another process asks: a
/// killed daemon ends at once and does not wait for its successor.
pub(super) fn ask_device(number: BlockNumber) -> std::io::Result<Usage> {
    // This program, also after an upgrade has replaced its file.
    let output = std::process::Command::new("/proc/self/exe")
        .args(["device-usage", &number.word()])
        .stdin(std::process::Stdio::null())
        .output()?;
    let word = String::from_utf8_lossy(&output.stdout);
    Usage::from_word(word.trim()).ok_or_else(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        std::io::Error::other(format!("{}: {}", output.status, said.trim()))
    })
}
