//! An open disk: a regular file, a block device, or memory; taken exclusively.
//!
//! A file is locked (flock), a block device opened with O_EXCL, so that no second daemon, mount or
//! stacked device works on the same bytes. Direct IO is used where the file system can.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use lockstep_core::event::{DiskCache, DiskInfo};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::cache_note::Identity;
use super::faults::FaultPlan;
use super::holder::{self, Locked};
use super::pmem::Mapping;
use super::ram::{RAM_PREFIX, RamDisk, RamDiskError};
use super::sys;
use crate::ring::Fd;

/// Why a disk could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It does not exist, or may not be opened.
    #[error("{path}: cannot open: {source}")]
    Open {
        /// The path.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// Somebody else uses it.
    #[error("{path}: in use by {holder}; stop that first")]
    Busy {
        /// The path.
        path: String,
        /// Who, as far as the kernel tells.
        holder: String,
    },
    /// It is neither file nor block device.
    #[error("{path}: neither a regular file nor a block device")]
    Kind {
        /// The path.
        path: String,
    },
    /// Its properties cannot be read.
    #[error("{path}: cannot read its size and block sizes: {source}")]
    Properties {
        /// The path.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// A RAM disk's path is wrong.
    #[error(transparent)]
    Ram(#[from] RamDiskError),
}

/// What the bytes are on.
#[derive(Clone, Debug)]
pub(super) enum Medium {
    File(Fd),
    Block(Fd),
    Ram(Arc<RamDisk>),
}

/// An open disk. Closed with its last owner.
#[derive(Debug)]
pub struct Device {
    path: String,
    pub(super) medium: Medium,
    info: DiskInfo,
    /// Its size now: it may grow while it is open.
    size_bytes: AtomicU64,
    /// Memory must be aligned so (in bytes) for transfers.
    pub(super) memory_align: usize,
    /// `RWF_DSYNC` was refused: a flush follows instead.
    pub(super) no_dsync: AtomicBool,
    /// `FALLOC_FL_ZERO_RANGE` (or its like) was refused: zeroes are written instead.
    pub(super) no_zero_range: AtomicBool,
    /// Its bytes, if it is persistent memory that holds metadata.
    mapping: Mutex<Option<Arc<Mapping>>>,
    pub(super) faults: Option<Arc<FaultPlan>>,
    /// Operations that failed.
    failed: AtomicU64,
}

/// Metadata devices in use: one may hold the metadata of several volumes of this process.
static SHARED: Mutex<Vec<(u64, u64, Weak<Device>)>> = Mutex::new(Vec::new());

impl Device {
    /// Opens a disk for one volume's data.
    pub fn open(path: &str) -> Result<Arc<Device>, OpenError> {
        if path.starts_with(RAM_PREFIX) {
            return Ok(Arc::new(Device::open_ram(path)?));
        }
        let open = |source| OpenError::Open {
            path: path.into(),
            source,
        };
        let metadata = std::fs::metadata(path).map_err(open)?;
        let kind = metadata.file_type();
        let device = if kind.is_file() {
            Device::open_file(path)?
        } else if kind.is_block_device() {
            Device::open_block(path, metadata.rdev())?
        } else {
            return Err(OpenError::Kind { path: path.into() });
        };
        Ok(Arc::new(device))
    }

    /// Opens a disk for metadata, or shares it if this process has it open for metadata already.
    pub fn open_shared(path: &str) -> Result<Arc<Device>, OpenError> {
        let Ok(metadata) = std::fs::metadata(path) else {
            return Device::open(path);
        };
        let key = (metadata.dev(), metadata.ino());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|(.., device)| device.strong_count() > 0);
        let found = shared.iter().find(|(dev, ino, _)| (*dev, *ino) == key);
        if let Some(device) = found.and_then(|(.., device)| device.upgrade()) {
            return Ok(device);
        }
        let device = Device::open(path)?;
        shared.push((key.0, key.1, Arc::downgrade(&device)));
        Ok(device)
    }

    /// What was found at opening or when its size was looked at last; `meta_bytes` is that of this
    /// device alone.
    pub fn info(&self) -> DiskInfo {
        let size_bytes = self.size_bytes.load(Ordering::Relaxed);
        DiskInfo {
            data_bytes: size_bytes,
            meta_bytes: size_bytes,
            ..self.info
        }
    }

    /// Looks how large it is now. May wait for the file system.
    pub fn probe(&self) -> Result<(), OpenError> {
        let properties = |source| OpenError::Properties {
            path: self.path.clone(),
            source,
        };
        let size_bytes = match &self.medium {
            Medium::File(fd) => {
                let stat = rustix::fs::fstat(&**fd).map_err(|e| properties(e.into()))?;
                stat.st_size as u64 / 512 * 512
            }
            Medium::Block(fd) => sys::block_sizes(fd).map_err(properties)?.size_bytes,
            Medium::Ram(disk) => disk.size_bytes(),
        };
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Maps it if it is persistent memory, or maps it again if it has grown.
    pub(super) fn map(&self) {
        let Medium::File(fd) = &self.medium else {
            return;
        };
        let len = self.info().data_bytes;
        let mut mapping = self.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        if mapping.as_ref().is_none_or(|m| m.len() < len)
            && let Some(new) = Mapping::of(fd, &self.path, len)
        {
            *mapping = Some(Arc::new(new));
        }
    }

    pub(super) fn mapping(&self) -> Option<Arc<Mapping>> {
        let mapping = self.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        mapping.clone()
    }

    /// It is persistent memory and holds metadata.
    pub fn is_mapped(&self) -> bool {
        self.mapping().is_some()
    }

    /// The path it was opened by.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What tells it from other disks of this machine; memory is of this process alone.
    pub(super) fn identity(&self) -> Option<Identity> {
        let (kind, fd) = match &self.medium {
            Medium::File(fd) => ("file", fd),
            Medium::Block(fd) => ("block", fd),
            Medium::Ram(_) => return None,
        };
        let stat = rustix::fs::fstat(&**fd).ok()?;
        let number = |dev| format!("{}-{}", rustix::fs::major(dev), rustix::fs::minor(dev));
        Some(match self.medium {
            Medium::Block(_) => Identity {
                name: format!("{kind}-{}", number(stat.st_rdev)),
                // One that is put back has another number; kernels before 5.15 have none.
                instance: Queue::of(stat.st_rdev).disk_sequence().unwrap_or(0),
            },
            Medium::File(_) | Medium::Ram(_) => Identity {
                name: format!("{kind}-{}-{}", number(stat.st_dev), stat.st_ino),
                instance: 0,
            },
        })
    }

    pub(super) fn is_direct(&self) -> bool {
        self.memory_align > 1
    }

    fn open_file(path: &str) -> Result<Device, OpenError> {
        let (fd, mut direct) = open_direct(path, OFlags::empty())?;
        match holder::lock_alone(&fd) {
            Ok(Locked::Ours) => {}
            Ok(Locked::By(holder)) => {
                return Err(OpenError::Busy {
                    path: path.into(),
                    holder,
                });
            }
            Err(error) => {
                return Err(OpenError::Open {
                    path: path.into(),
                    source: error.into(),
                });
            }
        }
        // Only now nobody else can change the size.
        let stat = rustix::fs::fstat(&fd).map_err(|e| OpenError::Properties {
            path: path.into(),
            source: e.into(),
        })?;
        let (memory, position) = sys::direct_io_alignment(&fd).unwrap_or((512, 512));
        if direct && position > 4096 {
            // Requests are made of 4 KiB blocks at best.
            tracing::warn!(
                path,
                position,
                "direct IO needs larger blocks; the page cache is used"
            );
            let flags = rustix::fs::fcntl_getfl(&fd).unwrap_or(OFlags::empty());
            let _ = rustix::fs::fcntl_setfl(&fd, flags - OFlags::DIRECT);
            direct = false;
        }
        let size_bytes = stat.st_size as u64 / 512 * 512;
        let discard = sys::can_punch(fd.as_fd(), size_bytes);
        let logical = if direct { position.max(512) } else { 512 };
        let granularity = u32::try_from(stat.st_blksize)
            .unwrap_or(4096)
            .clamp(512, 1 << 20);
        let info = DiskInfo {
            data_bytes: size_bytes,
            meta_bytes: size_bytes,
            logical_block_bytes: logical,
            physical_block_bytes: logical.max(4096),
            discard,
            discard_zeroes: discard,
            discard_granularity_bytes: if discard { granularity } else { 0 },
            max_discard_bytes: if discard { MAX_DISCARD_BYTES } else { 0 },
            write_through: false,
            persistent_memory: false,
            cache: DiskCache::MayBeLost,
        };
        let align = if direct { memory as usize } else { 1 };
        Ok(Device::new(path, Medium::File(Arc::new(fd)), info, align))
    }

    fn open_block(path: &str, rdev: u64) -> Result<Device, OpenError> {
        let (fd, direct) = open_direct(path, OFlags::EXCL)?;
        let sizes = sys::block_sizes(&fd).map_err(|source| OpenError::Properties {
            path: path.into(),
            source,
        })?;
        let queue = Queue::of(rdev);
        let granularity = queue.number("discard_granularity").unwrap_or(0);
        let max = queue
            .number("discard_max_bytes")
            .unwrap_or(0)
            .min(u64::from(MAX_DISCARD_BYTES));
        let discard = max > 0;
        let info = DiskInfo {
            data_bytes: sizes.size_bytes,
            meta_bytes: sizes.size_bytes,
            logical_block_bytes: sizes.logical_bytes,
            physical_block_bytes: sizes.physical_bytes,
            discard,
            discard_zeroes: discard && queue.number("discard_zeroes_data") == Some(1),
            discard_granularity_bytes: if discard {
                u32::try_from(granularity)
                    .unwrap_or(1 << 31)
                    .max(sizes.logical_bytes)
            } else {
                0
            },
            max_discard_bytes: max as u32,
            write_through: queue.text("write_cache").as_deref() == Some("write through"),
            persistent_memory: false,
            cache: DiskCache::MayBeLost,
        };
        let align = if direct { 512 } else { 1 };
        Ok(Device::new(path, Medium::Block(Arc::new(fd)), info, align))
    }

    fn open_ram(path: &str) -> Result<Device, OpenError> {
        let disk = RamDisk::of_path(path)?;
        let info = DiskInfo {
            data_bytes: disk.size_bytes(),
            meta_bytes: disk.size_bytes(),
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            discard: true,
            discard_zeroes: true,
            discard_granularity_bytes: 4096,
            max_discard_bytes: MAX_DISCARD_BYTES,
            write_through: true,
            persistent_memory: false,
            cache: DiskCache::MayBeLost,
        };
        Ok(Device::new(path, Medium::Ram(disk), info, 1))
    }

    fn new(path: &str, medium: Medium, info: DiskInfo, memory_align: usize) -> Device {
        Device {
            path: path.into(),
            medium,
            info,
            size_bytes: AtomicU64::new(info.data_bytes),
            memory_align,
            no_dsync: AtomicBool::new(false),
            no_zero_range: AtomicBool::new(false),
            mapping: Mutex::new(None),
            faults: FaultPlan::find(path),
            failed: AtomicU64::new(0),
        }
    }

    /// An operation failed: tells an operator why, but not a thousand times.
    pub(super) fn failed(&self, operation: &'static str, offset: u64, errno: i32) {
        let count = self.failed.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            let error = std::io::Error::from_raw_os_error(errno);
            tracing::error!(path = self.path, operation, offset, %error, count, "the disk failed");
        }
    }

    pub(super) fn dsync_works(&self) -> bool {
        !self.no_dsync.load(Ordering::Relaxed)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A child process between fork and exec has a copy of the descriptor for a moment; the
        // lock must not live on in it.
        if let Medium::File(fd) = &self.medium {
            let _ = rustix::fs::flock(fd, FlockOperation::Unlock);
        }
    }
}

/// Largest discard or zero-out that is passed on as one operation.
const MAX_DISCARD_BYTES: u32 = 128 << 20;

/// Opens for reading and writing, direct if possible.
fn open_direct(path: &str, more: OFlags) -> Result<(OwnedFd, bool), OpenError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | more;
    let open = |flags| {
        holder::open_alone(Path::new(path), || {
            rustix::fs::open(path, flags, Mode::empty())
        })
    };
    let (result, direct) = match open(flags | OFlags::DIRECT) {
        Err((Errno::INVAL | Errno::OPNOTSUPP, _)) => {
            tracing::warn!(
                path,
                "the file system refuses direct IO; the page cache is used, which costs memory and \
                 copies and may deadlock under memory pressure"
            );
            (open(flags), false)
        }
        result => (result, true),
    };
    match result {
        Ok(fd) => Ok((fd, direct)),
        Err((Errno::BUSY, holder)) => Err(OpenError::Busy {
            path: path.into(),
            holder: holder.unwrap_or_else(|| "another process or the kernel".into()),
        }),
        Err((errno, _)) => Err(OpenError::Open {
            path: path.into(),
            source: errno.into(),
        }),
    }
}

/// The `queue` directory of a block device in sysfs; a partition's is its disk's.
struct Queue {
    directory: std::path::PathBuf,
}

impl Queue {
    fn of(rdev: u64) -> Queue {
        let number = format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev));
        let device = Path::new("/sys/dev/block").join(number);
        let own = device.join("queue");
        let directory = if own.is_dir() {
            own
        } else {
            device.join("../queue")
        };
        Queue { directory }
    }

    fn text(&self, name: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.directory.join(name)).ok()?;
        Some(text.trim().to_owned())
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    /// Another one for each disk that the kernel has seen.
    fn disk_sequence(&self) -> Option<u64> {
        self.number("../diskseq")
    }
}
