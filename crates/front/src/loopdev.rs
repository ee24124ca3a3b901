//! Loop devices: binding one to a file, its settings, and letting it go.
//!
//! Nothing here keeps a loop device open: an open descriptor of our own would count as a user.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::sys::{MemoryRequest, NumberRequest, control, control_memory};
use crate::usage::{
    BlockAccess, Patience, access_of, claimed, set_access, set_access_of, visible_users,
};

/// Attempts to get a free loop device while other processes take them too.
const ATTACH_ATTEMPTS: u32 = 64;
/// How long the kernel may take to let go of a device that nobody uses.
const DETACH_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest label of a loop device in bytes, for old tools; the kernel keeps 64 with the final zero.
const MAX_LABEL_LEN: usize = 63;
/// The block layer's major number of loop devices.
const LOOP_MAJOR: u32 = 7;

const FLAG_AUTOCLEAR: u32 = 4;
const FLAG_DIRECT_IO: u32 = 16;

/// Offsets within `struct loop_info64`, which has 232 bytes.
mod info {
    pub(super) const LEN: usize = 232;
    pub(super) const FLAGS: usize = 52;
    pub(super) const FILE_NAME: usize = 56;
}

/// A loop device by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoopNumber(pub u32);

/// How a device is to be set up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Logical block size in bytes: 512 or 4096.
    pub(crate) logical_block_bytes: u32,
    /// Whether discards have any effect.
    pub(crate) discard: Discard,
    /// Whether writes are let through.
    pub(crate) access: BlockAccess,
}

/// Whether discards have any effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Discard {
    /// They are refused.
    Refused,
    /// They are passed on.
    Passed,
}

/// What became of an attempt to detach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Detached {
    /// The device is free.
    Yes,
    /// Somebody uses it; it stays as it was.
    InUse,
}

impl LoopNumber {
    /// The device's node.
    pub fn path(self) -> PathBuf {
        PathBuf::from(format!("/dev/loop{}", self.0))
    }

    pub(crate) fn sysfs(self) -> PathBuf {
        PathBuf::from(format!("/sys/block/loop{}", self.0))
    }

    pub(crate) fn open(self) -> io::Result<File> {
        let path = self.path();
        match File::options().read(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                // Without devtmpfs the nodes are ours to make.
                let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
                let device = rustix::fs::makedev(LOOP_MAJOR, self.0);
                let kind = rustix::fs::FileType::BlockDevice;
                rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, device)?;
                File::options().read(true).open(&path)
            }
            opened => opened,
        }
    }
}

/// Binds a free loop device to the file of that name, with direct I/O.
pub(crate) fn attach(
    file: BorrowedFd<'_>,
    name: &str,
    settings: Settings,
) -> io::Result<LoopNumber> {
    let control_file = File::options()
        .read(true)
        .write(true)
        .open("/dev/loop-control")?;
    let mut config = [0u8; 304];
    config[..4].copy_from_slice(&(file.as_raw_fd() as u32).to_ne_bytes());
    config[4..8].copy_from_slice(&settings.logical_block_bytes.to_ne_bytes());
    put_label(&mut config[8..8 + info::LEN], name);
    put_flags(&mut config[8..8 + info::LEN], FLAG_DIRECT_IO);
    for _ in 0..ATTACH_ATTEMPTS {
        let number = LoopNumber(control(&control_file, NumberRequest::GetFreeLoop)?);
        // Writable, or the kernel makes the device read-only.
        let device = match number
            .open()
            .and_then(|_| File::options().read(true).write(true).open(number.path()))
        {
            Ok(device) => device,
            // Somebody removed it, or holds it exclusively.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::EBUSY)) => {
                continue;
            }
            Err(error) => return Err(error),
        };
        // What failed to be written under an earlier file is told once, also to a later one's user.
        let _ = device.sync_all();
        match control_memory(&device, MemoryRequest::LoopConfigure, &mut config) {
            Ok(()) => {
                if let Err(error) = finish_attach(number, &device, settings) {
                    drop(device);
                    // The first error is the one to tell.
                    let _ = detach(number, name);
                    return Err(error);
                }
                if settings.discard == Discard::Passed && discards_forbidden(number) {
                    drop(device);
                    // The kernel makes a new one without limits when it is needed.
                    if detach(number, name)? == Detached::Yes
                        && control(&control_file, NumberRequest::RemoveLoop(number.0)).is_ok()
                    {
                        continue;
                    }
                    let text = "a limit of 0 on its discards cannot be lifted";
                    return Err(io::Error::other(format!(
                        "{}: {text}",
                        number.path().display()
                    )));
                }
                return Ok(number);
            }
            // Another process was faster.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    let text = format!("no loop device stayed free in {ATTACH_ATTEMPTS} attempts");
    Err(io::Error::new(ErrorKind::ResourceBusy, text))
}

fn finish_attach(number: LoopNumber, device: &File, settings: Settings) -> io::Result<()> {
    // The read-only flag of a block device outlives its last user, so it is always set.
    set_access_of(device, settings.access)?;
    if !reads(number, "loop/dio", "1") {
        let text = format!("{}: the kernel refused direct I/O", number.path().display());
        return Err(io::Error::new(ErrorKind::Unsupported, text));
    }
    for (setting, value) in [
        // The volume orders its requests itself, and its replicas have schedulers of their own.
        ("queue/scheduler", "none"),
        ("queue/add_random", "0"),
        ("queue/rotational", "0"),
    ] {
        // Each change stops the device's queue for some 20 ms, and most devices are as they should be.
        if !is_set(number, setting, value) {
            set(number, setting, value);
        }
    }
    Ok(())
}

/// Whether a setting has this value already; a choice among several stands in brackets.
fn is_set(number: LoopNumber, setting: &str, value: &str) -> bool {
    let chosen = format!("[{value}]");
    fs::read_to_string(number.sysfs().join(setting)).is_ok_and(|text| {
        text.trim() == value || text.split_whitespace().any(|word| word == chosen)
    })
}

/// An administrator's limit on discards outlives the binding too, and the kernel takes no other
/// value once it was 0.
fn discards_forbidden(number: LoopNumber) -> bool {
    reads(number, "queue/discard_max_bytes", "0")
        && !reads(number, "queue/discard_max_hw_bytes", "0")
}

fn set(number: LoopNumber, setting: &str, value: &str) {
    if let Err(error) = fs::write(number.sysfs().join(setting), value) {
        tracing::debug!(number = number.0, setting, value, %error, "setting not taken");
    }
}

/// The device's size, as its users see it.
pub(crate) fn size_bytes(number: LoopNumber) -> io::Result<u64> {
    let text = fs::read_to_string(number.sysfs().join("size"))?;
    let sectors: u64 = text.trim().parse().map_err(io::Error::other)?;
    Ok(sectors * 512)
}

/// Takes over the file's new size.
pub(crate) fn update_size(number: LoopNumber) -> io::Result<()> {
    control(number.open()?, NumberRequest::LoopSetCapacity).map(drop)
}

/// Unbinds the device of the file with this name, unless somebody uses it. Programs that look at
/// every block device for a moment (udev's, `losetup -a`) are waited for.
pub(crate) fn detach(number: LoopNumber, expected: &str) -> io::Result<Detached> {
    // The read-only flag outlives the binding, and whoever gets the number next did not ask for it.
    let access = access_of(&number.open()?)?;
    if access == BlockAccess::ReadWrite {
        return detach_unused(number, expected);
    }
    set_access(number.into(), BlockAccess::ReadWrite)?;
    let detached = detach_unused(number, expected);
    if !matches!(detached, Ok(Detached::Yes)) {
        set_access(number.into(), access)?;
    }
    detached
}

fn detach_unused(number: LoopNumber, expected: &str) -> io::Result<Detached> {
    let patience = Patience::start();
    loop {
        let detached = try_detach(number, expected)?;
        if detached == Detached::Yes {
            return Ok(detached);
        }
        let is_claimed = claimed(number.into())?;
        let users = match is_claimed {
            true => visible_users(number.into())?,
            false => Vec::new(),
        };
        if !patience.wait(is_claimed, &users) {
            return Ok(detached);
        }
    }
}

fn try_detach(number: LoopNumber, expected: &str) -> io::Result<Detached> {
    let device = number.open()?;
    if !is_bound_to(number, expected) {
        return Ok(Detached::Yes);
    }
    match control(&device, NumberRequest::LoopClear) {
        Ok(_) => {}
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(Detached::Yes),
        Err(error) => return Err(error),
    }
    // With other users the kernel only notes that the last close unbinds it, and the status can
    // still be read; else it cannot. Taking the note back fails if the last user went meanwhile.
    if let Ok(mut status) = status_of(&device)
        && flags_of(&status) & FLAG_AUTOCLEAR != 0
    {
        let flags = flags_of(&status) & !FLAG_AUTOCLEAR;
        put_flags(&mut status, flags);
        if control_memory(&device, MemoryRequest::LoopSetStatus, &mut status).is_ok() {
            return Ok(Detached::InUse);
        }
    }
    drop(device);
    let deadline = Instant::now() + DETACH_TIMEOUT;
    // Another process may bind the number to something else at once.
    while file_name(number).is_ok_and(|now| now == expected) {
        if Instant::now() > deadline {
            return Ok(Detached::InUse);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(Detached::Yes)
}

/// What a number that is open is bound to stays so until it is closed: only then it may be said of the
/// number what is meant for the device. It may have gone with its last user, and another process may
/// have bound the number to something else.
fn is_bound_to(number: LoopNumber, expected: &str) -> bool {
    file_name(number).is_ok_and(|now| now == expected)
}

/// Lets the kernel unbind the device of the file with this name when its last user closes it.
pub(crate) fn detach_on_last_close(number: LoopNumber, expected: &str) -> io::Result<()> {
    let device = number.open()?;
    if !is_bound_to(number, expected) {
        return Ok(());
    }
    // As in `detach`. Nobody writes anything more: its I/O fails.
    set_access_of(&device, BlockAccess::ReadWrite)?;
    match control(device, NumberRequest::LoopClear) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(()),
        result => result.map(drop),
    }
}

/// All bound loop devices with the names of their files.
pub(crate) fn bound() -> io::Result<Vec<(LoopNumber, String)>> {
    let named = |(number, path): (LoopNumber, PathBuf)| {
        let name = path.file_name()?.to_str()?.to_owned();
        Some((number, name))
    };
    Ok(backing_files()?.into_iter().filter_map(named).collect())
}

/// All bound loop devices with the paths of their files. It opens none: opening a device waits for
/// whoever holds it, for instance for I/O that another daemon does not answer.
pub(crate) fn backing_files() -> io::Result<Vec<(LoopNumber, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("loop")?.parse().ok());
        // One that is not bound, or goes meanwhile, has no file.
        if let Some(number) = number.map(LoopNumber)
            && let Ok(path) = backing_file(number)
        {
            found.push((number, path));
        }
    }
    found.sort();
    Ok(found)
}

fn backing_file(number: LoopNumber) -> io::Result<PathBuf> {
    let text = fs::read(number.sysfs().join("loop/backing_file"))?;
    let text = String::from_utf8_lossy(&text);
    Ok(text.strip_suffix('\n').unwrap_or(&text).into())
}

/// The last part of the path of the file that the device is bound to. It does not open the device.
pub(crate) fn file_name(number: LoopNumber) -> io::Result<String> {
    let path = backing_file(number)?;
    let name = path.file_name().unwrap_or_default();
    Ok(name.to_string_lossy().into_owned())
}

fn reads(number: LoopNumber, attribute: &str, value: &str) -> bool {
    fs::read_to_string(number.sysfs().join(attribute)).is_ok_and(|text| text.trim() == value)
}

fn status_of(device: &File) -> io::Result<[u8; info::LEN]> {
    let mut status = [0; info::LEN];
    control_memory(device, MemoryRequest::LoopGetStatus, &mut status)?;
    Ok(status)
}

fn flags_of(status: &[u8]) -> u32 {
    let bytes = status[info::FLAGS..info::FLAGS + 4]
        .try_into()
        .expect("four bytes");
    u32::from_ne_bytes(bytes)
}

fn put_flags(status: &mut [u8], flags: u32) {
    status[info::FLAGS..info::FLAGS + 4].copy_from_slice(&flags.to_ne_bytes());
}

fn put_label(status: &mut [u8], label: &str) {
    let bytes = &label.as_bytes()[..label.len().min(MAX_LABEL_LEN)];
    status[info::FILE_NAME..info::FILE_NAME + bytes.len()].copy_from_slice(bytes);
}
