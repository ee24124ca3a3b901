//! A volume's block device of either kind: ublk, or a loop device on a file over FUSE.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use crate::apart::apart;
use crate::device::{self, ConnectPort, DeviceError, DeviceSpec, DeviceState, MountedDevice};
use crate::gate::Gate;
pub use crate::links::clean_links;
use crate::ublk::{self, Lifetime, UblkDevice, UblkState};
use crate::usage::{self, BlockAccess, BlockNumber};

/// Which kind of device is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// ublk where the kernel has it, else FUSE.
    Auto,
    /// ublk only.
    Ublk,
    /// A loop device on a file over FUSE only.
    Fuse,
}

/// What a new server must know to serve a device that a dead one made. Text, to be kept by the
/// holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// A loop device; the holder keeps the descriptor of `/dev/fuse` with it.
    Loop(DeviceState),
    /// A ublk device, which the kernel keeps.
    Ublk(UblkState),
}

impl BlockState {
    /// As one line.
    pub fn to_line(&self) -> String {
        match self {
            BlockState::Loop(state) => state.to_line(),
            BlockState::Ublk(state) => state.to_line(),
        }
    }

    /// From that line; `None` if another version wrote it.
    pub fn from_line(line: &str) -> Option<BlockState> {
        let ublk = UblkState::from_line(line).map(BlockState::Ublk);
        ublk.or_else(|| DeviceState::from_line(line).map(BlockState::Loop))
    }

    /// The device.
    pub fn number(&self) -> BlockNumber {
        match self {
            BlockState::Loop(state) => state.number.into(),
            BlockState::Ublk(state) => state.number.into(),
        }
    }
}

/// A volume's block device while it is served.
pub enum BlockDevice {
    /// A loop device on a file over FUSE.
    Loop(MountedDevice),
    /// A ublk device.
    Ublk(UblkDevice),
}

impl BlockDevice {
    /// Makes a device of the kind, with its links, and starts to serve it. What becomes of it when
    /// its server dies: ublk does what `lifetime` says, for the other kind the holder decides.
    pub fn create(
        kind: DeviceKind,
        spec: &DeviceSpec,
        lifetime: Lifetime,
        connect: ConnectPort<'_>,
    ) -> Result<BlockDevice, DeviceError> {
        let ublk = match kind {
            DeviceKind::Fuse => false,
            DeviceKind::Ublk => true,
            DeviceKind::Auto => ublk::is_present(),
        };
        if ublk {
            match UblkDevice::create(spec, lifetime, connect) {
                Ok(device) => return Ok(BlockDevice::Ublk(device)),
                Err(error) if kind == DeviceKind::Ublk => return Err(error),
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(%error, cause, "a loop device is made instead");
                }
            }
        }
        MountedDevice::create(spec, connect).map(BlockDevice::Loop)
    }

    /// Serves a device that a dead server left, with the descriptor that a holder kept.
    pub fn resume(
        spec: &DeviceSpec,
        descriptor: OwnedFd,
        state: BlockState,
        connect: ConnectPort<'_>,
    ) -> Result<BlockDevice, DeviceError> {
        match state {
            BlockState::Loop(state) => {
                MountedDevice::resume(spec, descriptor, state, connect).map(BlockDevice::Loop)
            }
            BlockState::Ublk(state) => {
                UblkDevice::resume(spec, state, connect).map(BlockDevice::Ublk)
            }
        }
    }

    /// The device's number.
    pub fn number(&self) -> BlockNumber {
        match self {
            BlockDevice::Loop(device) => device.state().number.into(),
            BlockDevice::Ublk(device) => device.number().into(),
        }
    }

    /// The device's own path.
    pub fn path(&self) -> PathBuf {
        self.number().path()
    }

    /// What the holder must keep for [`Self::resume`].
    pub fn state(&self) -> BlockState {
        match self {
            BlockDevice::Loop(device) => BlockState::Loop(device.state().clone()),
            BlockDevice::Ublk(device) => BlockState::Ublk(device.state().clone()),
        }
    }

    /// Whether its I/O waits when its server dies although no holder has a descriptor: then only a
    /// server or a holder that knows of it can end that.
    pub fn waits_by_itself(&self) -> bool {
        match self {
            BlockDevice::Loop(_) => false,
            BlockDevice::Ublk(device) => device.lifetime() == Lifetime::BeyondServer,
        }
    }

    /// A descriptor for the holder. That of a ublk device stands for nothing: the kernel itself keeps
    /// the device.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        match self {
            BlockDevice::Loop(device) => device.descriptor(),
            BlockDevice::Ublk(_) => File::open("/dev/null").map(OwnedFd::from),
        }
    }

    /// The opener of its volume, if it has to be opened.
    pub fn gate(&self) -> Option<&Arc<Gate>> {
        match self {
            BlockDevice::Loop(device) => device.gate(),
            BlockDevice::Ublk(device) => device.gate(),
        }
    }

    /// Everybody who seems to use the device, in words, found without touching it.
    pub fn visible_users(&self) -> Vec<String> {
        usage::visible_users(self.number()).unwrap_or_else(|error| vec![error.to_string()])
    }

    /// Lets writes through or not.
    pub fn set_access(&self, access: BlockAccess) -> io::Result<()> {
        apart(|| usage::set_access(self.number(), access))
    }

    /// Whether the size can change while the device is there.
    pub fn can_resize(&self) -> bool {
        matches!(self, BlockDevice::Loop(_))
    }

    /// Tells the kernel the volume's new size.
    pub fn resize(&self, size_bytes: u64) -> io::Result<()> {
        match self {
            BlockDevice::Loop(device) => device.resize(size_bytes),
            BlockDevice::Ublk(_) => {
                let text = "a ublk device keeps its size as long as it is there";
                Err(io::Error::new(io::ErrorKind::Unsupported, text))
            }
        }
    }

    /// Takes the device away, if nobody uses it. Else it goes on as it was and comes back with the
    /// error.
    pub fn detach(self) -> Result<(), (Box<BlockDevice>, DeviceError)> {
        match self {
            BlockDevice::Loop(device) => device
                .detach()
                .map_err(|(device, error)| (Box::new(BlockDevice::Loop(*device)), error)),
            BlockDevice::Ublk(device) => device
                .detach()
                .map_err(|(device, error)| (Box::new(BlockDevice::Ublk(*device)), error)),
        }
    }

    /// Leaves the device to the next server: its I/O waits from the end of this process on, which
    /// must come soon.
    pub fn leave(self) {
        match self {
            BlockDevice::Loop(device) => device.leave(),
            // The kernel keeps it when its server ends without a word.
            BlockDevice::Ublk(device) => std::mem::forget(device),
        }
    }

    /// Gives the device up while it may be in use: all I/O fails from now on.
    pub fn abandon(self) {
        match self {
            BlockDevice::Loop(device) => device.abandon(),
            BlockDevice::Ublk(device) => device.abandon(),
        }
    }
}

/// A device that a dead server of this node had left.
#[derive(Debug)]
pub struct Leftover {
    /// The device.
    pub number: BlockNumber,
    /// `None` if it is gone now, else who still uses it. It goes with its last user.
    pub in_use: Option<Vec<String>>,
}

/// Takes away the devices that dead servers of this node left, except those to be resumed.
pub fn clean_leftovers(owner: &str, keep: &[BlockNumber]) -> io::Result<Vec<Leftover>> {
    let (mut loops, mut ublks) = (Vec::new(), Vec::new());
    for number in keep {
        match number {
            BlockNumber::Loop(number) => loops.push(*number),
            BlockNumber::Ublk(number) => ublks.push(*number),
        }
    }
    let mut found: Vec<Leftover> = device::clean_leftovers(owner, &loops)?
        .into_iter()
        .map(|left| Leftover {
            number: left.number.into(),
            in_use: left.in_use,
        })
        .collect();
    for (number, users) in ublk::clean_leftovers(owner, &ublks)? {
        found.push(Leftover {
            number: number.into(),
            in_use: (!users.is_empty()).then_some(users),
        });
    }
    Ok(found)
}

/// Ends the wait of a held device whose next server did not come, where closing the descriptor does
/// not. `line` is a [`BlockState`].
pub(crate) fn end_waiting(line: &str) {
    if let Some(BlockState::Ublk(state)) = BlockState::from_line(line)
        && let Err(error) = ublk::end_waiting(&state)
    {
        tracing::warn!(%error, device = %state.number.path().display(), "its I/O waits on");
    }
}
