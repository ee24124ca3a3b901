//! The guests beside all that needs no guest: an emulated guest waits more than it works, so simulated
//! worlds and the other end-to-end tests fill the time that it leaves.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus};

/// A test of this name has emulated guests.
const GUESTS: &str = "guest_";

/// What `cargo test` runs of the end-to-end crate: tests with guests.
pub(crate) fn guests() -> Vec<String> {
    vec!["--test".into(), format!("{GUESTS}*")]
}

/// The same for all others. A pattern cannot say that, so each one is named.
pub(crate) fn others(root: &Path) -> Result<Vec<String>, String> {
    let tests = root.join("crates/e2e/tests");
    let failed = |e: io::Error| format!("{}: {e}", tests.display());
    let mut args = vec!["--lib".to_owned(), "--bins".into()];
    for entry in std::fs::read_dir(&tests).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let is_test = path.extension().is_some_and(|e| e == "rs") || path.join("main.rs").exists();
        if is_test && !name.starts_with(GUESTS) {
            args.extend(["--test".into(), name.into_owned()]);
        }
    }
    Ok(args)
}

/// Runs the task of this program in a process of its own while `first` runs. What it says appears when it has
/// ended. The failure of one does not end the other.
pub(crate) fn beside(
    root: &Path,
    task: &str,
    first: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    let log = root.join("target").join(format!("xtask-{task}.log"));
    let failed = |e: io::Error| format!("{task}: {e}");
    let file = File::create(&log).map_err(failed)?;
    let mut child = alone(task)
        .map_err(failed)?
        .current_dir(root)
        .stdout(file.try_clone().map_err(failed)?)
        .stderr(file)
        .spawn()
        .map_err(failed)?;
    eprintln!("== {task} runs beside: {}", log.display());
    let guests = first();
    let status = child.wait().map_err(failed)?;
    io::copy(&mut File::open(&log).map_err(failed)?, &mut io::stderr()).map_err(failed)?;
    guests.and(ended(task, status))
}

fn ended(task: &str, status: ExitStatus) -> Result<(), String> {
    match status.success() {
        true => Ok(()),
        false => Err(format!("{task}: {status}")),
    }
}

/// A network of its own, so that neither takes a port that the other has just found free. Only root can
/// have one; without it, most end-to-end tests do not run either.
fn alone(task: &str) -> io::Result<Command> {
    let program = std::env::current_exe()?;
    let may = Command::new("unshare").args(["--net", "true"]).status()?;
    if !may.success() {
        let mut command = Command::new(program);
        command.arg(task);
        return Ok(command);
    }
    let mut command = Command::new("unshare");
    command
        .args([
            "--net",
            "sh",
            "-c",
            "PATH=$PATH:/usr/sbin:/sbin; ip link set lo up && exec \"$0\" \"$1\"",
        ])
        .arg(program)
        .arg(task);
    Ok(command)
}
