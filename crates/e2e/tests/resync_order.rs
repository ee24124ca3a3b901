//! `resync-after` between the volumes of real daemons: a resync waits for the volume before it.

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{Cluster, Setup, can_mount};

#[test]
fn a_volume_resyncs_after_the_one_it_is_told_to_wait_for() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let cluster = Cluster::new(&Setup {
        nodes: 2,
        volumes: 2,
        disk_mib: 48,
        net: "protocol C;".into(),
        disk: "c-min-rate 0;".into(),
        cramped: None,
        daemon: Vec::new(),
        test: 84,
    })?;
    cluster.first_primary(0)?;
    cluster.adm(0, &["secondary", "r0"])?;
    for (node, minor, after) in [(0, "8401", "8400"), (1, "8411", "8410")] {
        let set = format!("--resync-after={after}");
        let done = cluster.setup_raw(node, &["disk-options", minor, &set])?;
        ensure!(done.status.success(), "{done:?}");
        // The other way round would be a circle.
        let back = format!("--resync-after={minor}");
        let refused = cluster.setup_raw(node, &["disk-options", after, &back])?;
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(
            refused.status.code() == Some(10) && text.contains("cycle"),
            "{refused:?}"
        );
    }
    // What a status says of node 1's volumes: state, reasons to wait, KiB out of sync.
    let peers = |c: &Cluster| -> Result<Vec<(String, String, u64)>> {
        let status = c.status(1)?;
        let volumes = status["connections"][0]["peer_devices"]
            .as_array()
            .context("peer devices")?;
        let text = |v: &serde_json::Value| v.as_str().unwrap_or_default().to_owned();
        let row = |v: &serde_json::Value| {
            let left = v["out-of-sync"].as_u64().context("out-of-sync")?;
            let state = text(&v["replication-state"]);
            Ok((state, text(&v["resync-suspended"]), left))
        };
        volumes.iter().map(row).collect()
    };
    // A paused volume holds those that come after it, so nothing here depends on speed.
    cluster.adm(1, &["pause-sync", "r0/0"])?;
    cluster.wait("volume 1 is held", |c| {
        let both = peers(c)?;
        Ok(both[0].1.contains("user") && both[1].1.contains("dependency"))
    })?;
    for volume in ["r0/0", "r0/1"] {
        cluster.adm(1, &["invalidate", volume])?;
    }
    cluster.wait("both wait", |c| {
        let both = peers(c)?;
        Ok(both.iter().all(|volume| volume.0 == "PausedSyncT"))
    })?;
    let both = peers(&cluster)?;
    ensure!(both[1].1.contains("dependency"), "{both:?}");
    ensure!(both[1].2 > 40 << 10, "it was resynced: {both:?}");
    // The first one ends, the other one follows by itself.
    cluster.adm(1, &["resume-sync", "r0/0"])?;
    cluster.wait_in_sync()?;
    cluster.check_same_data(0, 47)?;
    cluster.check_same_data(1, 47)
}
