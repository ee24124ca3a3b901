//! Asks how a device is used.

use lockstep_front::{BlockNumber, Usage};

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
