//! Online verify between real daemons: a difference behind their back is found and healed.

use std::fs;
use std::os::unix::fs::FileExt;

use anyhow::{Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount};

#[test]
fn a_verify_finds_what_changed_behind_the_daemon_and_the_next_connect_heals_it() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&Setup {
        nodes: 2,
        volumes: 1,
        disk_mib: 64,
        net: "protocol C; verify-alg crc32c;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test: 60,
    })?;
    cluster.first_primary(0)?;
    let device = cluster.device(0, 60, 0)?;
    let file = fs::File::options().write(true).open(&device)?;
    file.write_all_at(&vec![0xa5; 1 << 20], 4 << 20)?;
    file.sync_all()?;
    drop(file);
    // Rot on the Secondary: two blocks of 4 KiB, one of them by a single byte.
    let image = fs::File::options().write(true).open(cluster.image(1, 0))?;
    image.write_all_at(&[0x5a; 4096], (4 << 20) + 8192)?;
    image.write_all_at(&[1], 40 << 20)?;
    image.sync_all()?;
    drop(image);
    cluster.adm(0, &["verify", "r0"])?;
    cluster.wait("end of the verify", |c| {
        let log = c.log(0)?;
        Ok(log.contains("online verify done"))
    })?;
    ensure!(
        cluster.out_of_sync_kib(0, 1, 0)? == 8,
        "the Primary marks two blocks"
    );
    cluster.wait("marks on the Secondary", |c| {
        Ok(c.out_of_sync_kib(1, 0, 0)? == 8)
    })?;
    let text = String::from_utf8(cluster.setup_raw(0, &["status", "r0", "-v", "-s"])?.stdout)?;
    ensure!(text.contains("out-of-sync:8"), "{text}");
    cluster.adm(0, &["disconnect", "r0"])?;
    cluster.adm(0, &["connect", "r0"])?;
    cluster.wait_in_sync()?;
    cluster.wait("no marks", |c| Ok(c.out_of_sync_kib(0, 1, 0)? == 0))?;
    cluster.adm(0, &["secondary", "r0"])?;
    cluster.check_same_data(0, 60)?;
    let healed = fs::read(cluster.image(1, 0))?;
    ensure!(
        healed[(4 << 20) + 8192] == 0xa5 && healed[40 << 20] == 0,
        "the Primary's data"
    );
    Ok(())
}
