//! The units of the package under a real systemd: the socket starts the daemon, and after a crash
//! the daemon and its resources come back while a tool waits.
//!
//! It is an instance for a user. The units are those of the package with other directories.

use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::user_systemd::Instance;

const UNITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd");
const READJUST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/readjust");

const STORY: &str = r#"
mount --bind "$HERE/drbd.conf" /etc/drbd.conf
PATH=$HERE/bin:$PATH
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
    if !Path::new("/etc/drbd.conf").exists() {
        eprintln!("skipped: this machine lacks /etc/drbd.conf");
        return Ok(());
    }
    let names = ["lockstep", "drbdadm", "drbdsetup", "drbdmeta"];
    let Some(instance) = Instance::prepare(&names)? else {
        return Ok(());
    };
    let root = instance.root();
    for unit in fs::read_dir(UNITS)? {
        let unit = unit?;
        let text = fs::read_to_string(unit.path())?
            .replace("/usr/lib/lockstep/bin/", &format!("{root}/bin/"))
            .replace("/usr/lib/lockstep/", &format!("{root}/"))
            .replace("/usr/bin/lockstep", &format!("{root}/bin/lockstep"))
            .replace("/etc/default/lockstep", &format!("{root}/default"));
        fs::write(instance.path("units").join(unit.file_name()), text)?;
    }
    let readjust = fs::read_to_string(READJUST)?.replace("systemctl ", "systemctl --user ");
    instance.place_program("readjust", &readjust)?;
    fs::write(instance.path("default"), "LOCKSTEPD_OPTIONS=--no-device\n")?;
    fs::File::create(instance.path("disk"))?.set_len(16 << 20)?;
    let config = format!(
        "global {{ disable-ip-verification; usage-count no; }}\n\
         resource r0 {{ device minor 31300; disk {root}/disk;\n\
         on alfa {{ node-id 0; address 127.8.13.1:7788; }}\n\
         on bravo {{ node-id 1; address 127.8.13.2:7788; }} }}\n"
    );
    fs::write(instance.path("drbd.conf"), config)?;
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
    instance.tells("alfa", STORY, wanted)
}
