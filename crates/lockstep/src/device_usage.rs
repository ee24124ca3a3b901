//! `lockstep device-usage`: how a device is used, and the end of what its last user wrote. The daemon
//! starts it; people have no need to.

use std::process::ExitCode;

use lockstep_front::BlockNumber;

const USAGE: &str = "\
Usage: lockstep device-usage loopN|ublkN

Prints how /dev/loopN or /dev/ublkbN is used: mounted-read-only, claimed, open, unused or unwritten. If unused,
everything that was written to it is durable; if unwritten, the last of it has failed. Started by the daemon that serves the device.";

/// Runs `lockstep device-usage ARGS`.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let number = match args {
        [number] => BlockNumber::from_word(number),
        _ => None,
    };
    let Some(number) = number else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match number.settled_usage() {
        Ok(usage) => {
            println!("{}", usage.word());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!(
                "lockstep device-usage: {}: {error}",
                number.path().display()
            );
            ExitCode::FAILURE
        }
    }
}
