//! The mountable device: a volume as a real block device, without a kernel module.
//!
//! A volume is served as a regular file over FUSE, a loop device with direct I/O is bound to that
//! file, and symbolic links (`/dev/drbd0`) point to the loop device. What the kernel's block layer
//! sends arrives as requests of `lockstep_io::port`: a flush as a flush (force unit access too, as
//! two flushes, because loop devices know no FUA), a discard and a write of zeroes as zeroes.
//!
//! What the kernel tells about users: a mount or another exclusive user is seen at once
//! ([`MountedDevice::is_claimed`]); plain openers are found by looking at all processes
//! ([`MountedDevice::users`]); and the final word is the detach itself, which the kernel refuses
//! atomically while anybody has the device open.
//!
//! When the server dies, the kernel ends the FUSE connection as soon as the last copy of its
//! descriptor is closed: all I/O fails with an error and no process hangs. If a holder process
//! (`hold`) has a copy, I/O waits instead until a new server resumes. So whatever of this process may
//! wait for its own devices does so without the descriptor (`apart`).

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lockstep_io::port::{PortSink, VolumePort, VolumeProperties};

use crate::apart::apart;
use crate::fuse::serve::{Ended, FileShape, Order, Reader, Stop};
use crate::fuse::{Connection, abort_connection};
use crate::gate::Gate;
use crate::links::Links;
use crate::loopdev::{self, Detached, Discard, LoopNumber, Settings};
use crate::usage::{self, BlockAccess};

/// What the names of all files begin with.
const FILE_PREFIX: &str = "lockstep";
/// Largest payload of one request in bytes.
const MAX_WRITE_BYTES: u32 = 1 << 20;
/// Largest block that the file is said to have, in bytes.
const MAX_BLOCK_BYTES: u32 = 1 << 16;

/// How long the volume has to answer what it was asked when its device is no longer served.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// Gives a reader thread its port of the volume.
pub type ConnectPort<'a> = &'a mut dyn FnMut(Box<dyn PortSink>) -> Box<dyn VolumePort + Send>;

/// What device to make.
#[derive(Clone, Debug)]
pub struct DeviceSpec {
    /// Names the node on this machine, so that nodes of several directories do not take each
    /// other's devices for their own: at most 16 bytes.
    pub owner: String,
    /// `resource/volume`, for the file's name and messages.
    pub name: String,
    /// The volume's properties now.
    pub properties: VolumeProperties,
    /// Symbolic links that are made to the device, with their directories.
    pub links: Vec<PathBuf>,
    /// Threads that read the kernel's requests; 1 is right unless the volume runs on them itself.
    pub readers: usize,
    /// Whether writes are let through.
    pub access: BlockAccess,
    /// Whether the volume has to be opened before it is used.
    pub opening: Opening,
    /// The discards that users are offered.
    pub discards: Discards,
}

/// The discards that a device offers to its users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discards {
    /// In units of what the volume says.
    AsVolume,
    /// None, nor writes of zeroes without data.
    Never,
    /// In units of so many bytes.
    Every(u32),
}

/// Whether a device opens its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// The volume can be used as it is.
    Never,
    /// The first request opens it; see [`Gate`].
    OnUse,
}

/// Why a device could not be made or let go.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The kernel has no FUSE, or this process may not use it.
    #[error(
        "{name}: cannot make a FUSE file; the mountable device needs root, /dev/fuse and a \
         kernel from 5.8 on (volumes can be used over NBD without)"
    )]
    Fuse {
        /// The volume.
        name: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// No loop device could be bound.
    #[error("{name}: cannot bind a loop device; it needs root and /dev/loop-control")]
    Loop {
        /// The volume.
        name: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// No ublk device could be made or taken away.
    #[error("{name}: no ublk device; it needs root, /dev/ublk-control and a kernel from 6.4 on")]
    Ublk {
        /// The volume.
        name: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A link could not be made.
    #[error("{name}: cannot make the link {}", .link.display())]
    Link {
        /// The volume.
        name: String,
        /// The link.
        link: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Somebody uses the device.
    #[error("{name}: {} is in use by {}", .device.display(), users_text(.users))]
    InUse {
        /// The volume.
        name: String,
        /// The block device.
        device: PathBuf,
        /// Who, in words.
        users: Vec<String>,
    },
    /// The device that a dead server left cannot be resumed.
    #[error("{name}: cannot resume {}: {reason}", .device.display())]
    Resume {
        /// The volume.
        name: String,
        /// The block device.
        device: PathBuf,
        /// What was found.
        reason: String,
    },
}

fn users_text(users: &[String]) -> String {
    if users.is_empty() {
        "a process that has just gone".into()
    } else {
        users.join(", ")
    }
}

/// What a new server must know to serve a device that a dead one made. Text, to be kept by the
/// holder together with the descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// The loop device.
    pub number: LoopNumber,
    max_write: u32,
    block_bytes: u32,
    connection: u32,
    can_resend: bool,
}

impl DeviceState {
    /// As one line.
    pub fn to_line(&self) -> String {
        let resend = u8::from(self.can_resend);
        let DeviceState {
            number,
            max_write,
            block_bytes,
            connection,
            ..
        } = self;
        format!(
            "2 {} {max_write} {block_bytes} {connection} {resend}",
            number.0
        )
    }

    /// From that line; `None` if another version wrote it.
    pub fn from_line(line: &str) -> Option<DeviceState> {
        let numbers: Option<Vec<u32>> = line.split(' ').map(|word| word.parse().ok()).collect();
        match numbers?[..] {
            [2, number, max_write, block_bytes, connection, resend] => Some(DeviceState {
                number: LoopNumber(number),
                max_write,
                block_bytes,
                connection,
                can_resend: resend == 1,
            }),
            _ => None,
        }
    }
}

/// A volume's block device while it is served.
pub struct MountedDevice {
    name: String,
    /// The file's name, which tells whose loop device it is.
    file: String,
    links: Links,
    state: DeviceState,
    fuse: Arc<OwnedFd>,
    stop: Arc<Stop>,
    shape: Arc<FileShape>,
    readers: Vec<JoinHandle<Ended>>,
    gate: Option<Arc<Gate>>,
}

impl MountedDevice {
    /// Makes the device and its links and starts to serve it.
    pub fn create(
        spec: &DeviceSpec,
        connect: ConnectPort<'_>,
    ) -> Result<MountedDevice, DeviceError> {
        let properties = &spec.properties;
        let name = spec.name.clone();
        let fuse_error = |source| DeviceError::Fuse {
            name: spec.name.clone(),
            source,
        };
        let max_write = MAX_WRITE_BYTES
            .min(properties.max_request_bytes)
            .max(1 << 16)
            & !4095;
        let connection = Connection::mount(&name, max_write).map_err(fuse_error)?;
        let shape = Arc::new(FileShape {
            size_bytes: AtomicU64::new(properties.size_bytes),
            block_bytes: block_bytes(spec),
            granularity_bytes: granularity(spec),
            max_write,
            bound: AtomicBool::new(false),
        });
        let Connection {
            fuse,
            mount,
            can_resend,
        } = connection;
        let fuse = Arc::new(fuse);
        let stop = Arc::new(Stop::new().map_err(fuse_error)?);
        let mut device = MountedDevice {
            file: file_name(&spec.owner, &name),
            name,
            links: Links::default(),
            state: DeviceState {
                number: LoopNumber(u32::MAX),
                max_write,
                block_bytes: shape.block_bytes,
                connection: 0,
                can_resend,
            },
            fuse,
            stop,
            shape,
            readers: Vec::new(),
            gate: gate(spec, connect),
        };
        device
            .start_readers(spec.readers.max(1), connect)
            .map_err(fuse_error)?;
        match device.bind(spec, &mount) {
            Ok(()) => Ok(device),
            Err(error) => {
                drop(mount);
                device.stop_readers(Order::Finish);
                Err(error)
            }
        }
    }

    /// Serves a device that a dead server left, with the descriptor that a holder kept. I/O that
    /// waited goes on: first what the dead server had begun, in order, then the rest.
    pub fn resume(
        spec: &DeviceSpec,
        fuse: OwnedFd,
        state: DeviceState,
        connect: ConnectPort<'_>,
    ) -> Result<MountedDevice, DeviceError> {
        let refuse = |reason: String| DeviceError::Resume {
            name: spec.name.clone(),
            device: state.number.path(),
            reason,
        };
        let file = file_name(&spec.owner, &spec.name);
        if !loopdev::file_name(state.number).is_ok_and(|found| found == file) {
            return Err(refuse("it is not bound to this volume any more".into()));
        }
        if !state.can_resend {
            let reason = "the kernel cannot repeat requests (it needs 6.9 or newer)";
            return Err(refuse(reason.into()));
        }
        let shape = Arc::new(FileShape {
            size_bytes: AtomicU64::new(spec.properties.size_bytes),
            block_bytes: state.block_bytes,
            granularity_bytes: granularity(spec),
            max_write: state.max_write,
            bound: AtomicBool::new(true),
        });
        let stop = Arc::new(Stop::new().map_err(|error| refuse(error.to_string()))?);
        let mut device = MountedDevice {
            name: spec.name.clone(),
            file,
            links: Links::default(),
            state,
            fuse: Arc::new(fuse),
            stop,
            shape,
            readers: Vec::new(),
            gate: gate(spec, connect),
        };
        device.tell_gate();
        let refuse = |device: &MountedDevice, error: std::io::Error| DeviceError::Resume {
            name: device.name.clone(),
            device: device.path(),
            reason: error.to_string(),
        };
        let mut first = device
            .reader(connect)
            .map_err(|error| refuse(&device, error))?;
        let repeated = first.replay().map_err(|error| refuse(&device, error))?;
        tracing::info!(device = %device.path().display(), repeated, "device resumed");
        device
            .spawn(first)
            .map_err(|error| refuse(&device, error))?;
        let more = spec.readers.saturating_sub(1);
        device
            .start_readers(more, connect)
            .map_err(|error| refuse(&device, error))?;
        // The size may have changed meanwhile; nothing hangs on it if it cannot be told. Only then: a server that is
        // killed while the kernel asks it for the size leaves a device of size 0.
        let size_bytes = device.shape.size_bytes.load(Ordering::SeqCst);
        let known = loopdev::size_bytes(device.state.number).ok();
        if known != Some(size_bytes)
            && let Err(error) = device.tell_size(size_bytes)
        {
            tracing::warn!(%error, "the resumed device's size could not be checked");
        }
        let path = device.path();
        device.links.make(&spec.name, &path, &spec.links)?;
        Ok(device)
    }

    /// The block device's own path, `/dev/loopN`.
    pub fn path(&self) -> PathBuf {
        self.state.number.path()
    }

    /// What the holder must keep for [`Self::resume`].
    pub fn state(&self) -> &DeviceState {
        &self.state
    }

    /// A copy of the descriptor for the holder.
    pub fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.fuse.try_clone()
    }

    /// The opener of its volume, if it has to be opened.
    pub fn gate(&self) -> Option<&Arc<Gate>> {
        self.gate.as_ref()
    }

    /// A file system or another exclusive user has the device.
    pub fn is_claimed(&self) -> bool {
        apart(|| usage::claimed(self.state.number.into())).unwrap_or(true)
    }

    /// Everybody who uses the device, in words; looks at all processes, so it takes milliseconds.
    pub fn users(&self) -> Vec<String> {
        apart(|| usage::users(self.state.number.into()))
            .unwrap_or_else(|error| vec![error.to_string()])
    }

    /// The same without touching the device: also for one whose I/O is held.
    pub fn visible_users(&self) -> Vec<String> {
        usage::visible_users(self.state.number.into())
            .unwrap_or_else(|error| vec![error.to_string()])
    }

    /// Anybody has the device open or mounted.
    pub fn is_in_use(&self) -> bool {
        self.is_claimed() || !self.users().is_empty()
    }

    /// Lets writes through or not.
    pub fn set_access(&self, access: BlockAccess) -> std::io::Result<()> {
        apart(|| usage::set_access(self.state.number.into(), access))
    }

    /// Tells the kernel the volume's new size.
    pub fn resize(&self, size_bytes: u64) -> std::io::Result<()> {
        self.shape.size_bytes.store(size_bytes, Ordering::SeqCst);
        self.tell_size(size_bytes)
    }

    fn tell_size(&self, size_bytes: u64) -> std::io::Result<()> {
        use crate::fuse::abi::{notify_attributes_changed, notify_grown};
        rustix::io::write(&*self.fuse, &notify_attributes_changed())?;
        rustix::io::write(&*self.fuse, &notify_grown(size_bytes))?;
        apart(|| loopdev::update_size(self.state.number))
    }

    /// Takes the device away, if nobody uses it. Else it goes on as it was and comes back with the
    /// error.
    pub fn detach(mut self) -> Result<(), (Box<MountedDevice>, DeviceError)> {
        let name = self.name.clone();
        match apart(|| loopdev::detach(self.state.number, &self.file)) {
            Ok(Detached::Yes) => {}
            Ok(Detached::InUse) => {
                let error = DeviceError::InUse {
                    name,
                    device: self.path(),
                    users: self.users(),
                };
                return Err((Box::new(self), error));
            }
            Err(source) => return Err((Box::new(self), DeviceError::Loop { name, source })),
        }
        self.links.remove(&self.state.number.path());
        self.stop_readers(Order::Finish);
        Ok(())
    }

    /// Stops serving and leaves the device to a holder: I/O waits until the next server resumes.
    /// Without a holder this ends as [`Self::abandon`] does.
    pub fn leave(mut self) {
        self.stop_readers(Order::Finish);
    }

    /// Gives the device up while it may be in use: all I/O fails from now on, and the loop device
    /// goes away with its last user.
    pub fn abandon(mut self) {
        self.links.remove(&self.state.number.path());
        if let Err(error) = abort_connection(self.state.connection) {
            tracing::warn!(%error, "the FUSE connection could not be aborted");
        }
        if let Err(error) = apart(|| loopdev::detach_on_last_close(self.state.number, &self.file)) {
            tracing::warn!(%error, "the loop device could not be detached");
        }
        self.stop_readers(Order::Abandon);
    }

    fn bind(&mut self, spec: &DeviceSpec, mount: &OwnedFd) -> Result<(), DeviceError> {
        let name = || self.name.clone();
        let properties = &spec.properties;
        let settings = Settings {
            logical_block_bytes: properties.logical_block_bytes.clamp(512, 4096),
            discard: if spec.discards.of(properties) {
                Discard::Passed
            } else {
                Discard::Refused
            },
            access: spec.access,
        };
        let bound = apart(|| {
            let opened = crate::fuse::open_file(mount, &self.file)
                .and_then(|file| Ok((rustix::fs::minor(file.metadata()?.dev()), file)));
            let (connection, file) = match opened {
                Ok(opened) => opened,
                Err(source) => {
                    return Ok(Err(DeviceError::Fuse {
                        name: name(),
                        source,
                    }));
                }
            };
            let number = loopdev::attach(file.as_fd(), &self.file, settings)?;
            Ok(Ok((number, connection)))
        });
        let bound = bound.map_err(|source| DeviceError::Loop {
            name: name(),
            source,
        })?;
        (self.state.number, self.state.connection) = bound?;
        self.shape.bound.store(true, Ordering::SeqCst);
        // From here on the loop device keeps the file and its mount alive.
        self.tell_gate();
        let device = self.path();
        let made = self.links.make(&self.name, &device, &spec.links);
        if made.is_err() {
            self.links.remove(&device);
            if let Err(error) = apart(|| loopdev::detach(self.state.number, &self.file)) {
                tracing::warn!(%error, "the loop device could not be detached");
            }
        }
        made
    }

    fn reader(&self, connect: ConnectPort<'_>) -> std::io::Result<Reader> {
        Reader::new(
            self.fuse.clone(),
            self.stop.clone(),
            self.shape.clone(),
            self.gate.clone(),
            connect,
        )
    }

    fn tell_gate(&self) {
        if let Some(gate) = &self.gate {
            gate.set_number(self.state.number.into());
        }
    }

    fn spawn(&mut self, reader: Reader) -> std::io::Result<()> {
        let thread = std::thread::Builder::new()
            .name(format!("fuse {}", self.name))
            .spawn(move || reader.run())?;
        self.readers.push(thread);
        Ok(())
    }

    fn start_readers(&mut self, count: usize, connect: ConnectPort<'_>) -> std::io::Result<()> {
        for _ in 0..count {
            let reader = self.reader(connect)?;
            self.spawn(reader)?;
        }
        Ok(())
    }

    fn stop_readers(&mut self, order: Order) {
        self.stop.tell(order);
        let deadline = Instant::now() + FINISH_TIMEOUT;
        while self.readers.iter().any(|reader| !reader.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The volume's I/O may be suspended. What it was asked is repeated for the next server.
        self.stop.tell(Order::Abandon);
        for reader in std::mem::take(&mut self.readers) {
            match reader.join() {
                Ok(Ended::Stopped | Ended::Unmounted) => {}
                Ok(Ended::Failed) => tracing::error!("a reader of the device had failed"),
                Err(_) => tracing::error!("a reader of the device had panicked"),
            }
        }
        if let Some(gate) = &self.gate {
            gate.end();
        }
    }
}

impl Drop for MountedDevice {
    /// A device that was neither detached nor left is given up as [`Self::abandon`] does, so that
    /// no process hangs on it.
    fn drop(&mut self) {
        if self.readers.is_empty() {
            return;
        }
        self.links.remove(&self.state.number.path());
        if self.state.number != LoopNumber(u32::MAX) {
            // Errors have nobody to go to, and the descriptors are closed anyway.
            let _ = abort_connection(self.state.connection);
            let _ = apart(|| loopdev::detach_on_last_close(self.state.number, &self.file));
        }
        self.stop_readers(Order::Abandon);
    }
}

/// A device that a dead server of this node had left.
#[derive(Debug)]
pub struct Leftover {
    /// Its loop device.
    pub number: LoopNumber,
    /// Its volume.
    pub name: String,
    /// `None` if it is gone now, else who still uses it. It goes with its last user.
    pub in_use: Option<Vec<String>>,
}

/// Takes away the devices that dead servers of this node left, except those to be resumed. Call it
/// at the start, when no server of the node runs.
pub fn clean_leftovers(owner: &str, keep: &[LoopNumber]) -> std::io::Result<Vec<Leftover>> {
    let prefix = format!("{FILE_PREFIX}:{owner}:");
    let mut found = Vec::new();
    for (number, file) in loopdev::bound()? {
        let Some(name) = file.strip_prefix(&prefix) else {
            continue;
        };
        if keep.contains(&number) {
            continue;
        }
        let in_use = apart(|| match loopdev::detach(number, &file)? {
            Detached::Yes => Ok(None),
            Detached::InUse => {
                let users = usage::users(number.into())?;
                loopdev::detach_on_last_close(number, &file)?;
                Ok(Some(users))
            }
        })?;
        found.push(Leftover {
            number,
            name: name.replace(':', "/"),
            in_use,
        });
    }
    Ok(found)
}

/// The name of a volume's file. Names of resources have neither slashes nor colons.
fn file_name(owner: &str, name: &str) -> String {
    format!("{FILE_PREFIX}:{owner}:{}", name.replace('/', ":"))
}

pub(crate) fn gate(spec: &DeviceSpec, connect: ConnectPort<'_>) -> Option<Arc<Gate>> {
    (spec.opening == Opening::OnUse).then(|| Arc::new(Gate::new(connect)))
}

impl Discards {
    /// Whether discards of a volume have any effect.
    pub(crate) fn of(self, properties: &VolumeProperties) -> bool {
        match self {
            Discards::AsVolume => properties.discard,
            Discards::Never => false,
            Discards::Every(_) => true,
        }
    }
}

/// The unit in which discards are announced, in bytes; 0 for none.
pub(crate) fn granularity(spec: &DeviceSpec) -> u32 {
    let properties = &spec.properties;
    let smallest = properties.physical_block_bytes.max(4096);
    match spec.discards {
        Discards::Never => 0,
        Discards::AsVolume => block_bytes(spec),
        Discards::Every(bytes) => bytes.max(smallest).next_multiple_of(512),
    }
}

/// What the file says its blocks are: a power of two.
fn block_bytes(spec: &DeviceSpec) -> u32 {
    let properties = &spec.properties;
    let wanted = properties
        .discard_granularity_bytes
        .max(properties.physical_block_bytes);
    wanted.clamp(4096, MAX_BLOCK_BYTES).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holders_line_comes_back_and_other_versions_do_not() {
        let state = DeviceState {
            number: LoopNumber(3),
            max_write: 1 << 20,
            block_bytes: 4096,
            connection: 57,
            can_resend: true,
        };
        assert_eq!(DeviceState::from_line(&state.to_line()), Some(state));
        assert_eq!(DeviceState::from_line("1 3 4 5 6 1"), None);
        assert_eq!(DeviceState::from_line(""), None);
    }

    #[test]
    fn files_are_named_by_owner_and_volume() {
        assert_eq!(file_name("ab", "r0/0"), "lockstep:ab:r0:0");
    }
}
