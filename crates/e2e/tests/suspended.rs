//! A volume whose I/O is suspended can still be left: by its users' word, by force, and by the end
//! of the daemon.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount};

fn write_one_block(device: &Path) -> Result<Child> {
    Ok(Command::new("dd")
        .args(["if=/dev/urandom", "bs=4k", "count=1", "oflag=direct"])
        .arg(format!("of={}", device.display()))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?)
}

#[test]
fn a_daemon_ends_although_the_io_of_its_device_is_held() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 32,
        net: "protocol C;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test: 83,
    })?;
    cluster.first_primary(0)?;
    for by_force in [true, false] {
        let device = cluster.device(0, 83, 0)?;
        let suspended = cluster.setup_raw(0, &["suspend-io", "8300"])?;
        ensure!(suspended.status.success(), "{suspended:?}");
        let mut writer = write_one_block(&device)?;
        cluster.wait("the write is held", |_| {
            let stat = std::fs::read_to_string(
                Path::new("/sys/block")
                    .join(device.file_name().unwrap_or_default())
                    .join("inflight"),
            )?;
            Ok(stat.split_whitespace().nth(1) == Some("1"))
        })?;
        let refused = cluster.adm_raw(0, &["secondary", "r0"])?;
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(!refused.status.success(), "secondary succeeded");
        ensure!(text.contains("I/O is suspended (user)"), "{text}");
        ensure!(writer.try_wait()?.is_none(), "the write is still held");
        if by_force {
            let forced = cluster.setup_raw(0, &["secondary", "r0", "--force"])?;
            ensure!(!writer.wait()?.success(), "the write fails: {forced:?}");
            let resumed = cluster.setup_raw(0, &["resume-io", "8300"])?;
            ensure!(resumed.status.success(), "{resumed:?}");
            cluster.adm_raw(0, &["secondary", "r0"])?;
            cluster.adm(0, &["primary", "r0"])?;
        } else {
            cluster.stop(0)?;
            ensure!(!writer.wait()?.success(), "the write fails");
        }
    }
    cluster.start(0)?;
    cluster.adm(0, &["up", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.check_same_data(0, 31)
}
