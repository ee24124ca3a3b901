//! The units of the package under a real systemd: the socket starts the daemon, and after a crash
//! the daemon and its resources come back while a tool waits.
//!
//! It is an instance for a user, with a `/run` of its own, so it needs neither the machine's systemd nor its
//! bus. The units are those of the package with other directories.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use lockstep_e2e::machine_has;

use crate::nodes::binary;

const UNITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd");
const READJUST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/readjust");

/// Starts the instance, runs the story, and ends the instance however the story went.
const STORY: &str = r#"
set -u
mount -t tmpfs none /run
mkdir -p /run/systemd/system /run/user
mount --bind "$HERE/drbd.conf" /etc/drbd.conf
export XDG_RUNTIME_DIR=/run/user SYSTEMD_UNIT_PATH=$HERE/units:/usr/lib/systemd/user
/lib/systemd/systemd --user >"$HERE/log" 2>&1 &
instance=$!
trap 'systemctl --user exit; wait $instance; cat "$HERE/log" >&2' EXIT
tries=0
until systemctl --user is-system-running >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || exit 77
    kill -0 $instance || exit 77
    sleep 0.1
done
PATH=$HERE/bin:$PATH
told() { echo "$1: $(eval "$2" 2>&1)"; }
systemctl --user start lockstep.socket
told "socket" "systemctl --user is-active lockstep.socket"
told "before" "systemctl --user is-active lockstep.service"
told "first tool" "drbdsetup status"
told "metadata" "drbdadm create-md --force r0 2>/dev/null | tail -n 1"
systemctl --user start lockstep@r0.service
told "resource" "drbdsetup role r0"
told "watchdog" "systemctl --user show -p WatchdogUSec --value lockstep.service"
before=$(systemctl --user show -p MainPID --value lockstep.service)
kill -9 $before
# It waits for the next daemon instead of failing.
told "meanwhile" "timeout 20 drbdsetup status >/dev/null && echo answered"
told "restarts" "systemctl --user show -p NRestarts --value lockstep.service"
# The units of active resources are reloaded once the daemon is up.
timeout 20 drbdsetup events2 r0 | grep -q --max-count=1 "device name:r0"
told "again" "drbdsetup role r0"
until [ "$(systemctl --user is-active lockstep@r0.service)" != reloading ]; do sleep 0.1; done
told "unit" "systemctl --user is-active lockstep@r0.service"
systemctl --user stop lockstep@r0.service
told "stopped" "drbdsetup role r0"
systemctl --user stop lockstep.service lockstep.socket
told "end" "systemctl --user is-active lockstep.service"
"#;

#[test]
fn the_socket_starts_the_daemon_and_after_a_crash_its_resources_come_back() -> Result<()> {
    let can_run = machine_has("root", rustix::process::geteuid().is_root())
        && Path::new("/usr/bin/unshare").exists()
        && Path::new("/lib/systemd/systemd").exists()
        && Path::new("/etc/drbd.conf").exists();
    if !can_run {
        eprintln!("skipped: this machine lacks systemd, unshare or /etc/drbd.conf");
        return Ok(());
    }
    let dir = tempfile::Builder::new()
        .prefix("lockstep-units-")
        .tempdir()?;
    let here = dir.path();
    let bin = here.join("bin");
    fs::create_dir(&bin)?;
    for name in ["lockstep", "drbdadm", "drbdsetup", "drbdmeta"] {
        std::os::unix::fs::symlink(binary()?, bin.join(name))?;
    }
    let root = here.display();
    fs::create_dir(here.join("units"))?;
    for unit in fs::read_dir(UNITS)? {
        let unit = unit?;
        let text = fs::read_to_string(unit.path())?
            .replace("/usr/lib/lockstep/bin/", &format!("{root}/bin/"))
            .replace("/usr/lib/lockstep/", &format!("{root}/"))
            .replace("/usr/bin/lockstep", &format!("{root}/bin/lockstep"))
            .replace("/etc/default/lockstep", &format!("{root}/default"));
        fs::write(here.join("units").join(unit.file_name()), text)?;
    }
    let readjust = fs::read_to_string(READJUST)?.replace("systemctl ", "systemctl --user ");
    fs::write(here.join("readjust"), readjust)?;
    ensure!(
        Command::new("chmod")
            .arg("755")
            .arg(here.join("readjust"))
            .status()?
            .success(),
        "chmod"
    );
    fs::write(here.join("default"), "LOCKSTEPD_OPTIONS=--no-device\n")?;
    fs::File::create(here.join("disk"))?.set_len(16 << 20)?;
    let config = format!(
        "global {{ disable-ip-verification; usage-count no; }}\n\
         resource r0 {{ device minor 31300; disk {root}/disk;\n\
         on alfa {{ node-id 0; address 127.8.13.1:7788; }}\n\
         on bravo {{ node-id 1; address 127.8.13.2:7788; }} }}\n"
    );
    fs::write(here.join("drbd.conf"), config)?;
    let output = Command::new("timeout")
        .args(["90", "unshare", "--mount", "bash", "-c", STORY])
        .env("HERE", here)
        .env("__DRBD_NODE__", "alfa")
        .env_remove("LOCKSTEP_DIR")
        .stdin(Stdio::null())
        .output()?;
    let log = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(77) {
        eprintln!("skipped: no user instance of systemd can run here:\n{log}");
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stdout);
    let wanted = "\
        socket: active\n\
        before: inactive\n\
        first tool: # No currently configured DRBD found.\n\
        metadata: New drbd meta data block successfully created.\n\
        resource: Secondary\n\
        watchdog: 1min\n\
        meanwhile: answered\n\
        restarts: 1\n\
        again: Secondary\n\
        unit: active\n\
        stopped: r0: Unknown resource\n\
        end: inactive\n";
    ensure!(told == wanted, "{told}\n--- log:\n{log}");
    Ok(())
}
