//! Who uses a file or block device, for the text of an error. Best effort: the kernel tells what
//! mounts and stacked devices there are, and which process holds a file lock.

use std::fs;
use std::path::Path;

/// Who holds a lock on the file with this device and inode number.
pub(super) fn of_file(dev: u64, inode: u64) -> Option<String> {
    let wanted = format!(
        "{:02x}:{:02x}:{inode}",
        rustix::fs::major(dev),
        rustix::fs::minor(dev)
    );
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let line = locks
        .lines()
        .find(|line| line.split_whitespace().any(|word| word == wanted))?;
    // "1: FLOCK ADVISORY WRITE 4711 fe:00:123 0 EOF"
    let pid = line.split_whitespace().nth(4)?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(format!("process {pid} ({})", name.trim_end()))
}

/// Who uses the block device with this number: devices on top of it, or a mount.
pub(super) fn of_block(rdev: u64) -> Option<String> {
    let number = format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let holders = Path::new("/sys/dev/block").join(&number).join("holders");
    let mut names: Vec<String> = fs::read_dir(holders)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| format!("device {}", entry.file_name().to_string_lossy()))
        .collect();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for line in mounts.lines() {
        let mut words = line.split(' ');
        // "36 35 98:0 /root /mount-point …"
        if words.nth(2) == Some(&number)
            && let Some(place) = words.nth(1)
        {
            names.push(format!("the mount at {place}"));
        }
    }
    (!names.is_empty()).then(|| names.join(", "))
}
