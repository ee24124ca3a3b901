//! Writes for tests with a guest, on this machine and in the guest: scattered blocks on the bare
//! device, and a file system under fio.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::guest::Guest;

/// Bounds the end of a load, which includes one round of fio in an emulated machine.
const LOAD_LIMIT: Duration = Duration::from_secs(240);

/// What counts as progress of a load.
const PROGRESS_SECTORS: u64 = 400;

/// Of the text of a block device's `stat`.
fn sectors_written(stat: &str) -> Result<u64> {
    let field = stat.split_whitespace().nth(6).context("sectors written")?;
    Ok(field.parse()?)
}

/// A shell command on this machine that must succeed; `$0` is the device.
pub fn host_sh(script: &str, device: &Path) -> Result<()> {
    let mut command = Command::new("sh");
    let status = command.arg("-c").arg(script).arg(device).status();
    ensure!(status.context("sh")?.success(), "{script}: {device:?}");
    Ok(())
}

/// What [`rot`] changes.
pub const ROT_KIB: u64 = 12;

/// Changes a node's disk behind its back: three blocks of 4 KiB.
pub fn rot(image: &Path) -> Result<()> {
    let file = fs::File::options().write(true).open(image)?;
    for block in [5u64, 300, 301] {
        file.write_all_at(&[0x77; 4096], block * 4096)?;
    }
    Ok(file.sync_all()?)
}

/// Writes random blocks at 20 places of the first 32 MiB, durably.
pub fn scribble(device: &Path) -> Result<()> {
    host_sh(
        "for n in $(seq 20); do dd if=/dev/urandom of=$0 bs=4k count=2 oflag=direct conv=notrunc \
         seek=$((n * 7919 % 8000)) status=none || exit 1; done; sync $0",
        device,
    )
}

/// The same on a volume of the guest's DRBD, at other places.
pub fn scribble_in_kernel(kernel: &Guest, volume: u32) -> Result<()> {
    let script = format!(
        "for n in $(seq 20); do dd if=/dev/urandom of=/dev/drbd{volume} bs=4k count=3 \
         conv=notrunc,fsync seek=$((n * 6997 % 8000)) || exit 1; done"
    );
    kernel.sh(&script).map(drop)
}

/// Arguments of fio: random writes with many fsyncs, each block read back and verified.
fn fio_words(directory: &str) -> String {
    format!(
        "fio --name=load --directory={directory} --rw=randwrite --bs=4k --size=4m --fsync=16 \
         --ioengine=psync --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_state_save=0 \
         --randrepeat=0 --overwrite=1"
    )
}

/// A file system of a block device of this machine; unmounted at the end, whatever happens.
#[derive(Debug)]
pub struct Mounted {
    point: PathBuf,
    mounted: bool,
}

impl Mounted {
    /// Mounts `device` at `point`, which is made.
    pub fn new(device: &Path, point: PathBuf) -> Result<Mounted> {
        std::fs::create_dir_all(&point)?;
        let status = Command::new("mount").arg(device).arg(&point).status()?;
        ensure!(status.success(), "mounting {device:?}");
        Ok(Mounted {
            point,
            mounted: true,
        })
    }

    /// Where it is.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Unmounts it.
    pub fn unmount(mut self) -> Result<()> {
        let status = Command::new("umount").arg(&self.point).status()?;
        ensure!(status.success(), "unmounting {:?}", self.point);
        self.mounted = false;
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.mounted {
            // A failed test must not leave it behind.
            let _ = Command::new("umount").arg("-l").arg(&self.point).status();
        }
    }
}

/// fio in rounds on a file system of this machine, until it is told to stop.
#[derive(Debug)]
pub struct HostLoad {
    child: Child,
    stop: PathBuf,
}

impl HostLoad {
    /// Starts it; `beside` is a directory for its notes, outside of what it writes to.
    pub fn start(mounted: &Mounted, beside: &Path) -> Result<HostLoad> {
        let stop = beside.join("stop-load");
        // An earlier one's.
        let _ = std::fs::remove_file(&stop);
        let fio = fio_words(&mounted.point.display().to_string());
        let script = format!(
            "while :; do {fio} || exit 1; [ -e {} ] && exit 0; done",
            stop.display()
        );
        let child = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("sh and fio")?;
        Ok(HostLoad { child, stop })
    }

    /// Waits until more was written to the device, or the load has ended with an error.
    pub fn wait_for_progress(&mut self, device: &Path) -> Result<()> {
        let name = device.file_name().context("a device has a name")?;
        let stat = Path::new("/sys/block").join(name).join("stat");
        let written = || sectors_written(&std::fs::read_to_string(&stat)?);
        let (begin, before) = (Instant::now(), written()?);
        while written()? <= before + PROGRESS_SECTORS {
            let status = self.child.try_wait()?;
            ensure!(status.is_none(), "the load has ended: {status:?}");
            ensure!(begin.elapsed() < LOAD_LIMIT, "no more writes");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Lets the round end; every block of it must have been read back.
    pub fn finish(mut self) -> Result<()> {
        std::fs::write(&self.stop, "")?;
        ensure!(self.child.wait()?.success(), "fio found a fault");
        Ok(())
    }

    /// Waits for an end that is an error, as after the loss of the device.
    pub fn fail(mut self) -> Result<()> {
        ensure!(!self.child.wait()?.success(), "fio noticed nothing");
        Ok(())
    }
}

impl Drop for HostLoad {
    fn drop(&mut self) {
        // The fio of the round under way ends with its next write.
        let _ = std::fs::write(&self.stop, "");
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The same on `/dev/drbd0` of a guest that sees the host's files.
pub struct GuestLoad;

impl GuestLoad {
    /// Mounts the device, which has an ext4, and starts fio in rounds.
    pub fn start(kernel: &Guest) -> Result<GuestLoad> {
        kernel.sh("rm -f /run/stop-load; mount /dev/drbd0 /host/mnt")?;
        let fio = fio_words("/mnt");
        kernel.start_job(
            "load",
            &format!(
                "while :; do chroot /host {fio} || exit 1; echo round >> /run/rounds; \
                 [ -e /run/stop-load ] && exit 0; done"
            ),
        )?;
        Ok(GuestLoad)
    }

    /// Waits until more was written to the device, or the load has ended with an error.
    pub fn wait_for_progress(&self, kernel: &Guest) -> Result<()> {
        let written = |kernel: &Guest| -> Result<u64> {
            sectors_written(&kernel.sh("cat /sys/block/drbd0/stat")?)
        };
        let before = written(kernel)?;
        kernel.wait("more writes", LOAD_LIMIT, |kernel| {
            let status = kernel.job_status("load")?;
            ensure!(status.is_none(), "the load has ended: {status:?}");
            Ok(written(kernel)? > before + PROGRESS_SECTORS)
        })
    }

    /// Lets the round end and unmounts; every block of it must have been read back.
    pub fn finish(self, kernel: &Guest) -> Result<()> {
        kernel.sh("touch /run/stop-load")?;
        kernel.finish_job("load", LOAD_LIMIT)?;
        kernel.sh("umount /host/mnt && chroot /host fsck.ext4 -f -n /dev/drbd0")?;
        Ok(())
    }
}
