//! Two kernel DRBD 8.4 nodes with nothing of ours between or beside them: what the harness
//! promises to the tests that do have something of ours.

use anyhow::{Result, ensure};
use lockstep_e2e::guest::{COMMAND_LIMIT, can_emulate};
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, DRBD_PORT, Pair84, PairSetup, wait_state};
use lockstep_e2e::guest_line::{Line, LineState, Side};

#[test]
fn two_kernel_nodes_sync_carry_a_filesystem_and_resync_after_a_cut_and_a_crash() -> Result<()> {
    if !can_emulate() {
        return Ok(());
    }
    let mut lines = None;
    let pair = Pair84::start(&PairSetup::new("protocol C;"), |alfa, bravo| {
        let made = (
            Line::beside(Side::Above, DRBD_PORT, bravo)?,
            Line::beside(Side::Below, DRBD_PORT, alfa)?,
        );
        let ports = (made.0.address().port(), made.1.address().port());
        lines = Some(made);
        Ok(ports)
    })?;
    let (forth, back) = lines.expect("the pair is joined");
    pair.connect()?;
    pair.alfa.sh("drbdadm primary --force r0")?;
    pair.alfa
        .sh("mkfs.ext4 -q /dev/drbd0 && mount /dev/drbd0 /mnt && echo one > /mnt/one && sync")?;
    pair.wait_in_sync()?;

    for line in [&forth, &back] {
        line.set_state(LineState::Down);
    }
    wait_state(&pair.alfa, "the cut", DRBD_LIMIT, |s| {
        s.connection == "WFConnection"
    })?;
    pair.alfa
        .sh("dd if=/dev/urandom of=/mnt/two bs=64k count=32 conv=fsync")?;
    for line in [&forth, &back] {
        line.set_state(LineState::Up);
    }
    pair.wait_in_sync()?;

    pair.alfa.start_job(
        "load",
        "for n in $(seq 40); do dd if=/dev/urandom of=/mnt/load$((n % 8)) bs=64k count=8 conv=fsync || exit 1; done",
    )?;
    pair.bravo.power_cut()?;
    wait_state(&pair.alfa, "the crash", DRBD_LIMIT, |s| {
        s.connection == "WFConnection"
    })?;
    pair.alfa.finish_job("load", COMMAND_LIMIT)?;
    pair.restart_bravo()?;
    pair.wait_in_sync()?;
    let sums = pair.alfa.sh("cd /mnt && sha256sum one two load*")?;
    pair.alfa.sh("umount /mnt")?;
    pair.check_same_data()?;
    // The other node alone has the same files.
    pair.bravo
        .sh("drbdadm up r0 && drbdadm primary --force r0 && mount /dev/drbd0 /mnt")?;
    ensure!(pair.bravo.sh("cd /mnt && sha256sum one two load*")? == sums);
    pair.bravo.sh("umount /mnt && drbdadm down r0").map(drop)
}
