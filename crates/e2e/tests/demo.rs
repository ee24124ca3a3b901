//! `lockstep demo` as an ordinary user.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

/// The user that owns nothing.
const NOBODY: u32 = 65_534;

#[test]
fn the_demo_without_root_proves_its_writes_over_nbd_and_cleans_up() -> Result<()> {
    let dir = tempfile::Builder::new()
        .prefix("lockstep-demo-")
        .tempdir()?;
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777))?;
    // The build may lie where only its owner may go.
    let program = dir.path().join("lockstep");
    fs::copy(lockstep_e2e::binary()?, &program)?;
    let place = dir.path().join("place");
    let mut command = Command::new(&program);
    command
        .args([
            "demo",
            "--kills",
            "2",
            "--seconds",
            "1",
            "--size-mib",
            "128",
        ])
        .arg("--dir")
        .arg(&place)
        .current_dir("/")
        .stdin(Stdio::null());
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{text}{errors}");
    for needed in [
        "without root nothing is mounted",
        "hold their last acknowledged write on bravo",
        "hold their last acknowledged write on charlie",
        "the three replicas are identical",
    ] {
        ensure!(text.contains(needed), "'{needed}' is missing:\n{text}");
    }
    ensure!(!place.exists(), "the demo leaves its directory behind");
    Ok(())
}
