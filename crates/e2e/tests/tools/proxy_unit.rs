//! The WAN proxy's unit under a real systemd: it starts with the packaged configuration, a reload
//! puts another process in its place that has the same connections and DRBD's sockets, one that
//! cannot take over leaves the old one alone, and a crash is followed by a new start.
//!
//! It is an instance for a user. The unit is the package's with other directories, and without
//! what only the machine's systemd may do (another user, capabilities, file systems).

use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::user_systemd::Instance;

const PACKAGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging");

const STORY: &str = r#"
main() { systemctl --user show -p MainPID --value lockstep-proxy.service; }
ctl() { "$HERE/bin/lockstep" proxy ctl --socket /run/user/proxy.sock "$@"; }
told "start" "systemctl --user start lockstep-proxy.service && echo ready"
told "connections" "ctl -c show | cut -d ' ' -f 1-3 | head -n 1"
first=$(main)
told "reload" "systemctl --user reload lockstep-proxy.service && echo done"
second=$(main)
told "another process" "[ $first != $second ] && echo yes"
told "the old one" "kill -0 $first 2>/dev/null || echo gone"
told "still" "ctl -c show | cut -d ' ' -f 1-3 | head -n 1"
told "state" "systemctl --user is-active lockstep-proxy.service"
cp "$HERE/default-proxy" "$HERE/good"
echo 'LOCKSTEP_PROXY_OPTIONS="--no-such-option"' >"$HERE/default-proxy"
told "bad options" "systemctl --user reload lockstep-proxy.service 2>/dev/null || echo refused"
told "same process" "[ $second = $(main) ] && echo yes"
told "state" "systemctl --user is-active lockstep-proxy.service"
cp "$HERE/good" "$HERE/default-proxy"
kill -9 $second
tries=0
until [ "$(main)" != $second ] && [ "$(main)" != 0 ] && ctl -c show >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] || break
    sleep 0.1
done
told "restarts" "systemctl --user show -p NRestarts --value lockstep-proxy.service"
told "again" "ctl -c show | cut -d ' ' -f 1-3 | head -n 1"
systemctl --user stop lockstep-proxy.service
told "end" "systemctl --user show -p Result -p ActiveState --value lockstep-proxy.service | paste -sd ' '"
"#;

/// Lines that the instance of a user cannot follow.
const ONLY_FOR_THE_SYSTEM: [&str; 8] = [
    "User=",
    "AmbientCapabilities=",
    "CapabilityBoundingSet=",
    "Protect",
    "PrivateTmp=",
    "OOMScoreAdjust=",
    "RuntimeDirectory",
    "StateDirectory",
];

#[test]
fn a_reload_puts_another_process_in_the_proxys_place() -> Result<()> {
    let Some(instance) = Instance::prepare(&["lockstep", "drbdadm"])? else {
        return Ok(());
    };
    let root = instance.root();
    let placed = |name: &str| -> Result<String> {
        Ok(fs::read_to_string(Path::new(PACKAGING).join(name))?
            .replace("/usr/lib/lockstep/", &format!("{root}/"))
            .replace("/usr/bin/lockstep", &format!("{root}/bin/lockstep"))
            .replace(
                "/etc/default/lockstep-proxy",
                &format!("{root}/default-proxy"),
            )
            .replace("/etc/lockstep/", &format!("{root}/")))
    };
    let unit: String = placed("systemd/lockstep-proxy.service")?
        .lines()
        .filter(|line| {
            !ONLY_FOR_THE_SYSTEM
                .iter()
                .any(|word| line.starts_with(word))
        })
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(instance.path("units/lockstep-proxy.service"), unit)?;
    instance.place_program("proxy-upgrade", &placed("proxy-upgrade")?)?;
    let options =
        placed("default-proxy")?.replace("1G\"", "64M --socket /run/user/proxy.sock --log warn\"");
    fs::write(instance.path("default-proxy"), options)?;
    fs::write(
        instance.path("proxy.secret"),
        "0123456789abcdef0123456789abcdef",
    )?;
    // The example, with addresses of this test.
    let pid = std::process::id().to_be_bytes();
    let own = format!("127.13.{}.{}", pid[2], pid[3]);
    let config = placed("proxy.conf")?
        .replace("#add", "add")
        .replace("#set", "set")
        .replace("127.0.0.2", &own)
        .replace("192.0.2.1", &own)
        .replace("127.0.0.1", &own);
    fs::write(instance.path("proxy.conf"), config)?;
    let wanted = "\
        start: ready\n\
        connections: add connection r0-bob-alice\n\
        reload: done\n\
        another process: yes\n\
        the old one: gone\n\
        still: add connection r0-bob-alice\n\
        state: active\n\
        bad options: refused\n\
        same process: yes\n\
        state: active\n\
        restarts: 1\n\
        again: add connection r0-bob-alice\n\
        end: success inactive\n";
    instance.tells("alice", STORY, wanted)
}
