//! A volume as one regular file of a FUSE file system that speaks `/dev/fuse` itself.
//!
//! The file system is never attached to a directory: the mount lives only as a descriptor. Its root
//! is a directory with the one file in it, whose name the kernel shows as the backing file of the
//! loop device: so devices are told apart without opening any. No other process can reach it, no mount namespace copies it, a killed
//! server leaves no dead mount point, and closing the last descriptor unmounts it.

pub(crate) mod abi;
pub(crate) mod serve;

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

use abi::{IN_HEADER_LEN, InHeader, InitIn, InitOut, init_flag, opcode};

/// How long the kernel may take for its first request.
const INIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Requests that the kernel may have sent without waiting for an answer.
const MAX_BACKGROUND: u16 = 256;
/// From how many on it tells writers to slow down.
const CONGESTION_THRESHOLD: u16 = 192;

/// A mounted file system before anybody serves it.
pub(crate) struct Connection {
    /// The descriptor that the server reads and writes.
    pub(crate) fuse: OwnedFd,
    /// Keeps the file system mounted until the file is open.
    pub(crate) mount: OwnedFd,
    /// The kernel can repeat requests that a dead server had read.
    pub(crate) can_resend: bool,
}

impl Connection {
    /// Mounts the file system and answers its INIT. `name` appears in diagnostics only.
    pub(crate) fn mount(name: &str, max_write: u32) -> std::io::Result<Connection> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fuse = rustix::fs::open("/dev/fuse", flags, Mode::empty())?;
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let uid = rustix::process::geteuid().as_raw().to_string();
        let gid = rustix::process::getegid().as_raw().to_string();
        for (key, value) in [
            ("source", format!("lockstep:{name}")),
            ("subtype", "lockstep".into()),
            ("fd", fuse.as_raw_fd().to_string()),
            ("rootmode", "40700".into()),
            ("user_id", uid),
            ("group_id", gid),
            ("max_read", max_write.to_string()),
        ] {
            fsconfig_set_string(&context, key, value)?;
        }
        fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let can_resend = answer_init(&fuse, max_write)?;
        Ok(Connection {
            fuse,
            mount,
            can_resend,
        })
    }
}

/// Opens the file of a mount by the name that it is to have. A server must be answering already.
pub(crate) fn open_file(mount: &OwnedFd, name: &str) -> std::io::Result<File> {
    // The mount has no path but this one.
    let path = format!("/proc/self/fd/{}/{name}", mount.as_raw_fd());
    File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
}

/// Ends a connection by its number (the minor number of the file's device): all its I/O fails, also
/// if nobody serves it or a descriptor of it is still open somewhere.
pub(crate) fn abort_connection(number: u32) -> std::io::Result<()> {
    // The control file system is often not mounted, so it is mounted for this call alone.
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    match rustix::fs::openat(&mount, format!("{number}/abort"), flags, Mode::empty()) {
        Ok(file) => rustix::io::write(&file, b"1").map(drop).map_err(Into::into),
        // It has ended by itself.
        Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn answer_init(fuse: &OwnedFd, max_write: u32) -> std::io::Result<bool> {
    serve::wait_readable(fuse, INIT_TIMEOUT)?;
    // The kernel insists on room for its largest request.
    let mut request = vec![0; abi::WRITE_HEAD_LEN + max_write as usize];
    let len = rustix::io::read(fuse, &mut request[..])?;
    let invalid = |text: &str| std::io::Error::new(std::io::ErrorKind::Unsupported, text);
    let header = InHeader::decode(&request[..len]);
    let header = header.filter(|header| header.opcode == opcode::INIT);
    let header = header.ok_or_else(|| invalid("the kernel's first FUSE request is not INIT"))?;
    let init = InitIn::decode(&request[IN_HEADER_LEN..len])
        .ok_or_else(|| invalid("the kernel's FUSE protocol is older than 7.31"))?;
    let wanted = init_flag::ASYNC_READ
        | init_flag::BIG_WRITES
        | init_flag::ASYNC_DIO
        | init_flag::MAX_PAGES
        | init_flag::INIT_EXT
        | init_flag::HAS_RESEND;
    let out = InitOut {
        flags: init.flags & wanted,
        max_background: MAX_BACKGROUND,
        congestion_threshold: CONGESTION_THRESHOLD,
        max_write,
    };
    let body = out.encode(&init);
    let reply = [
        &abi::out_header(header.unique, 0, body.len())[..],
        &body[..],
    ]
    .concat();
    rustix::io::write(fuse, &reply)?;
    tracing::debug!(
        minor = init.minor,
        flags = init.flags,
        "FUSE connection is up"
    );
    Ok(out.flags & init_flag::HAS_RESEND != 0)
}
