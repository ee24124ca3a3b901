//! Block devices of any kind: who uses one, and whether it lets writes through.
//!
//! Nothing here keeps a device open: an open descriptor of our own would count as a user.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::closes::Opens;
use crate::loopdev::{self, LoopNumber};
use crate::sys::{MemoryRequest, NumberRequest, control, control_memory};
use crate::ublk::UblkNumber;

/// How long somebody may look at a device that is to be taken away.
const PASSING_USER_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a device may be claimed by nobody who shows before that counts as a user.
const HIDDEN_USER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it is waited for who has just opened a device, and how often.
const PASSING_LOOK: Duration = Duration::from_millis(5);
const MOST_LOOKS: u32 = 4;
const HIDDEN_USER: &str = "a kernel user that shows in no process's mounts";

/// A block device that a volume has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockNumber {
    /// A loop device.
    Loop(LoopNumber),
    /// A ublk device.
    Ublk(UblkNumber),
}

impl From<LoopNumber> for BlockNumber {
    fn from(number: LoopNumber) -> BlockNumber {
        BlockNumber::Loop(number)
    }
}

impl From<UblkNumber> for BlockNumber {
    fn from(number: UblkNumber) -> BlockNumber {
        BlockNumber::Ublk(number)
    }
}

impl BlockNumber {
    /// The device's node.
    pub fn path(self) -> PathBuf {
        match self {
            BlockNumber::Loop(number) => number.path(),
            BlockNumber::Ublk(number) => number.path(),
        }
    }

    fn sysfs(self) -> PathBuf {
        match self {
            BlockNumber::Loop(number) => number.sysfs(),
            BlockNumber::Ublk(number) => number.sysfs(),
        }
    }

    fn open(self) -> io::Result<File> {
        match self {
            BlockNumber::Loop(number) => number.open(),
            BlockNumber::Ublk(number) => File::options().read(true).open(number.path()),
        }
    }

    /// Major and minor number, as text and as the kernel's number.
    fn device(self) -> io::Result<(String, u64)> {
        let text = fs::read_to_string(self.sysfs().join("dev"))?
            .trim()
            .to_owned();
        let numbers = text
            .split_once(':')
            .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        let (major, minor) = numbers.ok_or(io::ErrorKind::InvalidData)?;
        Ok((text, rustix::fs::makedev(major, minor)))
    }
}

/// Whether a block device lets writes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockAccess {
    /// Reads only.
    ReadOnly,
    /// Everything.
    ReadWrite,
}

/// Lets writes through or not.
pub(crate) fn set_access(number: BlockNumber, access: BlockAccess) -> io::Result<()> {
    set_access_of(&number.open()?, access)
}

pub(crate) fn set_access_of(device: &File, access: BlockAccess) -> io::Result<()> {
    let wanted = i32::from(access == BlockAccess::ReadOnly);
    let mut value = wanted.to_ne_bytes();
    control_memory(device, MemoryRequest::BlockSetReadOnly, &mut value)?;
    if access_of(device)? == access {
        Ok(())
    } else {
        Err(io::Error::other(
            "the kernel did not take the read-only flag of the loop device",
        ))
    }
}

/// Whether a device lets writes through.
pub(crate) fn access_of(device: &File) -> io::Result<BlockAccess> {
    let mut now = [0; 4];
    control_memory(device, MemoryRequest::BlockGetReadOnly, &mut now)?;
    Ok(match i32::from_ne_bytes(now) {
        0 => BlockAccess::ReadWrite,
        _ => BlockAccess::ReadOnly,
    })
}

/// Somebody has claimed the device: a mounted file system, device mapper, swap.
pub(crate) fn claimed(number: BlockNumber) -> io::Result<bool> {
    let exclusive = File::options()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(number.path());
    match exclusive {
        Ok(_) => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(true),
        Err(error) => Err(error),
    }
}

/// How a device is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Mounted, only for reading.
    MountedReadOnly,
    /// Mounted, or claimed by somebody who is going to write.
    Claimed,
    /// Open.
    Open,
    /// By nobody who can be found.
    Unused,
    /// By nobody who can be found, and what was written last has failed.
    Unwritten,
}

impl BlockNumber {
    /// Whether the device is mounted in this process's mount namespace. It does not touch the device.
    pub fn mounted(self) -> io::Result<Option<Usage>> {
        let (device, _) = self.device()?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let of_device = |line: &&str| line.split(' ').nth(2) == Some(device.as_str());
        let mut found = None;
        for line in mounts.lines().filter(of_device) {
            // The filesystem's own options are the last word.
            let read_only = line
                .rsplit(' ')
                .next()
                .is_some_and(|options| options.split(',').any(|option| option == "ro"));
            if !read_only {
                return Ok(Some(Usage::Claimed));
            }
            found = Some(Usage::MountedReadOnly);
        }
        Ok(found)
    }

    /// How the device is used as far as that shows without touching it.
    pub fn visible_usage(self) -> io::Result<Option<Usage>> {
        if let Some(mounted) = self.mounted()? {
            return Ok(Some(mounted));
        }
        let open = !find_users(self, Wanted::Any)?.is_empty();
        Ok(open.then_some(Usage::Open))
    }

    /// Another program has it open that could write to it. It does not touch the device.
    pub fn has_writer(self) -> io::Result<bool> {
        let (_, device) = self.device()?;
        let processes = fs::read_dir("/proc")?.flatten();
        Ok(processes.into_iter().any(|process| {
            let process = process.path();
            descriptors(device, &process)
                .any(|number| may_write(&process, &number) && !is_own(&process))
        }))
    }

    /// How the device is used. If by nobody, all that was written is durable then, and nothing that
    /// was read is remembered. It may wait for the device's own requests, so the process that
    /// answers them must ask in another one: killed while it waits, it could not end.
    pub fn settled_usage(self) -> io::Result<Usage> {
        // First what does not get in a user's way.
        // There are only so many watches. Without one, who opens it now may be refused.
        let opens = Opens::watch(&self.path()).ok();
        let opened = || opens.as_ref().map_or(Ok(false), Opens::seen);
        let user = passing_user(|| self.visible_usage(), opened)?;
        if let Some(usage) = user {
            return Ok(usage);
        }
        // Before the claim: the last close of a device writes out what is dirty, and keeps its claim meanwhile. Whoever
        // claims it then, such as `mkfs`, is refused.
        let device = self.open()?;
        if claimed(self)? {
            return Ok(Usage::Claimed);
        }
        let durable = device.sync_all();
        // What could not be written must not be read again.
        control(&device, NumberRequest::BlockFlushBuffers)?;
        Ok(match durable {
            Ok(()) => Usage::Unused,
            Err(_) => Usage::Unwritten,
        })
    }

    /// As one word, which another process reads: `loop3`, `ublk0`.
    pub fn word(self) -> String {
        match self {
            BlockNumber::Loop(number) => format!("loop{}", number.0),
            BlockNumber::Ublk(number) => format!("ublk{}", number.0),
        }
    }

    /// From that word.
    pub fn from_word(word: &str) -> Option<BlockNumber> {
        if let Some(number) = word.strip_prefix("loop") {
            return Some(LoopNumber(number.parse().ok()?).into());
        }
        let number = word.strip_prefix("ublk")?.parse().ok()?;
        Some(UblkNumber(number).into())
    }
}

impl Usage {
    const WORDS: [(Usage, &str); 5] = [
        (Usage::MountedReadOnly, "mounted-read-only"),
        (Usage::Claimed, "claimed"),
        (Usage::Open, "open"),
        (Usage::Unused, "unused"),
        (Usage::Unwritten, "unwritten"),
    ];

    /// As one word, which another process reads.
    pub fn word(self) -> &'static str {
        let known = Self::WORDS.iter().find(|(usage, _)| *usage == self);
        known.map_or("", |(_, word)| word)
    }

    /// From that word.
    pub fn from_word(word: &str) -> Option<Usage> {
        let known = Self::WORDS.iter().find(|(_, known)| *known == word);
        known.map(|(usage, _)| *usage)
    }
}

/// Somebody who shows, or has just opened the device: it may be claimed next, as by `mount`, which would be refused while
/// this process claims it.
fn passing_user(
    mut visible: impl FnMut() -> io::Result<Option<Usage>>,
    mut opened: impl FnMut() -> io::Result<bool>,
) -> io::Result<Option<Usage>> {
    for look in 0..MOST_LOOKS {
        if look > 0 {
            std::thread::sleep(PASSING_LOOK);
        }
        if let Some(usage) = visible()? {
            return Ok(Some(usage));
        }
        if !opened()? {
            return Ok(None);
        }
    }
    Ok(Some(Usage::Open))
}

/// Who uses the device, in words. What other users' processes have open is seen by root only.
pub(crate) fn users(number: BlockNumber) -> io::Result<Vec<String>> {
    let mut users = visible_users(number)?;
    if users.is_empty() && claimed(number)? {
        users.push(HIDDEN_USER.into());
    }
    Ok(users)
}

/// Until when a device is waited for that its last user seems to have left. Programs that look at
/// every block device (udev's, `losetup -a`) do so for a moment; and a file system can outlive its
/// last mount: that of a mount namespace whose last process has just ended.
pub(crate) struct Patience {
    start: Instant,
}

impl Patience {
    pub(crate) fn start() -> Patience {
        Patience {
            start: Instant::now(),
        }
    }

    /// Waits a moment for these users to go; or not, as they are there to stay.
    pub(crate) fn wait(&self, is_claimed: bool, users: &[String]) -> bool {
        let timeout = match (is_claimed, users) {
            (false, _) => PASSING_USER_TIMEOUT,
            (true, []) => HIDDEN_USER_TIMEOUT,
            (true, [user]) if user == HIDDEN_USER => HIDDEN_USER_TIMEOUT,
            (true, _) => return false,
        };
        if self.start.elapsed() > timeout {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
        true
    }
}

/// The same without opening the device, which may wait while its I/O is held.
pub(crate) fn visible_users(number: BlockNumber) -> io::Result<Vec<String>> {
    find_users(number, Wanted::All)
}

/// How many users are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// One is enough.
    Any,
    All,
}

fn find_users(number: BlockNumber, wanted: Wanted) -> io::Result<Vec<String>> {
    let mut users = BTreeSet::new();
    // Most processes see the same mounts.
    let mut views_of_mounts = BTreeSet::new();
    if let Ok(holders) = fs::read_dir(number.sysfs().join("holders")) {
        for holder in holders.flatten() {
            users.insert(format!(
                "block device {}",
                holder.file_name().to_string_lossy()
            ));
        }
    }
    if let Ok(swaps) = fs::read_to_string("/proc/swaps")
        && swaps
            .lines()
            .any(|line| line.split(' ').next() == number.path().to_str())
    {
        users.insert("swap".into());
    }
    let (name, device) = number.device()?;
    for (other, file) in loopdev::backing_files()? {
        if file == number.path() {
            users.insert(format!("loop device {}", other.path().display()));
        }
    }
    for process in fs::read_dir("/proc")?.flatten() {
        if wanted == Wanted::Any && !users.is_empty() {
            break;
        }
        let pid = process.file_name();
        if pid.to_str().is_some_and(|pid| pid.parse::<u32>().is_ok()) {
            let process = process.path();
            // A process sees the mounts of its namespace below its root.
            let views = ["ns/mnt", "root"].map(|link| fs::read_link(process.join(link)).ok());
            if views.contains(&None) || views_of_mounts.insert(views) {
                mounts_of_process(&name, &process, &mut users);
            }
            users_of_process(device, &process, &mut users);
        }
    }
    Ok(users.into_iter().collect())
}

fn mounts_of_process(name: &str, process: &Path, users: &mut BTreeSet<String>) {
    // Processes come and go; one that has gone uses nothing.
    if let Ok(mounts) = fs::read_to_string(process.join("mountinfo")) {
        for line in mounts.lines() {
            let mut fields = line.split(' ').skip(2);
            if fields.next() == Some(name) {
                let place = fields.nth(1).unwrap_or("?");
                users.insert(format!("mount on {place}"));
            }
        }
    }
}

fn users_of_process(device: u64, process: &Path, users: &mut BTreeSet<String>) {
    for _ in descriptors(device, process) {
        let program = fs::read_to_string(process.join("comm")).unwrap_or_default();
        let pid = process
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        users.insert(format!("process {pid} ({})", program.trim()));
    }
}

/// The numbers of a process's descriptors of this device.
fn descriptors(device: u64, process: &Path) -> impl Iterator<Item = OsString> {
    // Processes come and go; one that has gone has nothing open.
    let found = fs::read_dir(process.join("fd")).ok();
    found.into_iter().flatten().flatten().filter_map(move |fd| {
        let is_path = fs::read_link(fd.path()).is_ok_and(|target| target.has_root());
        let is_device = |metadata: &fs::Metadata| {
            metadata.file_type().is_block_device() && metadata.rdev() == device
        };
        (is_path && fs::metadata(fd.path()).is_ok_and(|metadata| is_device(&metadata)))
            .then(|| fd.file_name())
    })
}

/// This process, or one of its children, which look at devices and make them.
fn is_own(process: &Path) -> bool {
    let own = std::process::id().to_string();
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    let mut lines = status.lines();
    lines.any(|line| {
        let id = line
            .strip_prefix("Pid:")
            .or_else(|| line.strip_prefix("PPid:"));
        id.is_some_and(|id| id.trim() == own)
    })
}

fn may_write(process: &Path, descriptor: &OsStr) -> bool {
    let info = fs::read_to_string(process.join("fdinfo").join(descriptor)).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| matches!(flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_just_opened_a_device_is_waited_for() {
        let ask = |opened: &[bool]| {
            let mut looks = 0;
            let mut opened = opened.iter();
            let visible = || {
                looks += 1;
                Ok(None)
            };
            let found = passing_user(visible, || Ok(*opened.next().unwrap())).unwrap();
            (found, looks)
        };
        assert_eq!(ask(&[false]), (None, 1));
        assert_eq!(ask(&[true, true, false]), (None, 3));
        assert_eq!(ask(&[true; 4]), (Some(Usage::Open), 4));
        let shows = || Ok(Some(Usage::Claimed));
        let found = passing_user(shows, || unreachable!()).unwrap();
        assert_eq!(found, Some(Usage::Claimed));
    }
}
