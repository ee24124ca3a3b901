//! `lockstep hold`: the process that keeps the devices of a killed daemon until the next one comes.
//! The daemon starts it; people have no need to.

use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "\
Usage: lockstep hold --seconds S

Started by `lockstepd --hold S`, with the socket that it serves as standard input. Ends when it holds
nothing, or when no daemon has come for S seconds: then the I/O that waits fails.";

/// Runs `lockstep hold ARGS`.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let seconds = match args {
        [flag, seconds] if flag == "--seconds" => seconds.parse().ok(),
        _ => None,
    };
    let Some(seconds) = seconds.filter(|seconds| *seconds > 0) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let served = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .and_then(|listener| {
            lockstep_front::hold::run(listener, Some(Duration::from_secs(seconds)))
        });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockstep hold: {error}");
            ExitCode::FAILURE
        }
    }
}
