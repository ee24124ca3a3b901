//! The guest harness itself: boot, commands, files, jobs, modules, a power cut, a dead guest.

use std::time::Duration;

use anyhow::{Result, ensure};
use lockstep_e2e::guest::{COMMAND_LIMIT, Cable, Guest, GuestSetup, HostFiles, can_emulate};

#[test]
fn a_guest_runs_commands_keeps_its_disk_and_says_how_it_died() -> Result<()> {
    if !can_emulate() {
        return Ok(());
    }
    let disk = tempfile::NamedTempFile::new()?;
    disk.as_file().set_len(16 << 20)?;
    let guest = Guest::start(GuestSetup {
        disks: vec![disk.path().to_path_buf()],
        host_files: HostFiles::ReadOnly,
        ..GuestSetup::new("alfa")
    })?;
    ensure!(guest.sh("uname -r; hostname")?.starts_with("6.12"));
    ensure!(
        guest.sh_raw("echo out; echo err >&2; exit 7", COMMAND_LIMIT)? == (7, "out\nerr\n".into())
    );
    // Larger than any buffer on the way.
    ensure!(guest.sh("seq 100000")?.lines().count() == 100_000);
    guest.write_file("/tmp/f", "two\nlines\n")?;
    ensure!(guest.sh("cat /tmp/f")? == "two\nlines\n");
    ensure!(guest.sh("cat /proc/drbd")?.contains("version: 8.4"));
    for module in ["ublk_drv", "nbd"] {
        guest.load_module(module, "")?;
    }
    guest.sh("[ -c /dev/ublk-control ] && [ -b /dev/nbd0 ]")?;
    ensure!(guest.sh("chroot /host fio --version")?.starts_with("fio"));
    guest.start_job(
        "write",
        "mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && echo kept > /mnt/f && sync && echo done",
    )?;
    ensure!(guest.finish_job("write", COMMAND_LIMIT)? == "done\n");
    guest.cable(Cable::Pulled)?;
    guest.wait("no carrier", COMMAND_LIMIT, |g| {
        Ok(g.sh("cat /sys/class/net/eth0/carrier")? == "0\n")
    })?;
    // A guest that hangs ends the test with its console.
    guest.sh("echo last words > /dev/console")?;
    let hung = guest.sh_raw("sleep 1000", Duration::from_secs(1));
    let text = format!("{:#}", hung.expect_err("a command without end"));
    ensure!(
        text.contains("does not answer") && text.contains("last words"),
        "{text}"
    );
    guest.power_cut()?;
    ensure!(guest.sh("true").is_err());
    guest.boot()?;
    ensure!(guest.sh("mount /dev/vda /mnt && cat /mnt/f")? == "kept\n");
    let errors = guest.kernel_errors()?;
    ensure!(errors.is_empty(), "{errors:?}");
    // So does one that dies.
    let dead = guest.sh_raw("echo c > /proc/sysrq-trigger", COMMAND_LIMIT);
    let text = format!("{:#}", dead.expect_err("a crashed kernel"));
    ensure!(
        text.contains("has ended") && text.contains("sysrq triggered crash"),
        "{text}"
    );
    Ok(())
}
