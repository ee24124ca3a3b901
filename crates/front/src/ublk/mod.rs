//! Volumes as ublk devices: the kernel's block layer asks this process directly, without a file
//! system and a loop device between them.
//!
//! The device is the kernel's, not the server's: with recovery it stays when its server dies, its
//! requests wait, and the next server gets again what the dead one had begun. What the kernel does
//! not tell is who opens the device, so a volume is opened by use, as with loop devices, and the
//! device is taken away only while it is claimed here and no process has it open.

mod abi;
mod queue;
mod ring;

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use abi::{Command, DeviceInfo, Parameters};
use queue::{DEPTH, Mail, Queue};
use ring::Control;

use crate::apart::apart;
use crate::device::{ConnectPort, DeviceError, DeviceSpec, gate, granularity};
use crate::gate::Gate;
use crate::links::Links;
use crate::usage::{self, BlockNumber, Patience};

/// Largest payload of one request in bytes.
const MAX_BYTES: u32 = 1 << 20;
/// How long the kernel may take for a step that needs no answer of a volume.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a volume may take for what the kernel still wants when a device is taken away.
const FINISH_TIMEOUT: Duration = Duration::from_secs(15);
/// How often something is looked at that the kernel does not announce.
const LOOK: Duration = Duration::from_millis(2);

/// A ublk device by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UblkNumber(pub u32);

impl UblkNumber {
    /// The device's node.
    pub fn path(self) -> PathBuf {
        PathBuf::from(format!("/dev/ublkb{}", self.0))
    }

    pub(crate) fn sysfs(self) -> PathBuf {
        PathBuf::from(format!("/sys/block/ublkb{}", self.0))
    }
}

/// Whether this machine's kernel has ublk now, and this process may use it.
pub fn is_present() -> bool {
    Path::new("/dev/ublk-control").exists()
}

/// What becomes of a device when its server dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// All I/O fails.
    Server,
    /// I/O waits for the next server.
    BeyondServer,
}

/// What a new server must know to serve a device that a dead one made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkState {
    /// The device.
    pub number: UblkNumber,
    owner: u64,
}

impl UblkState {
    /// As one line.
    pub fn to_line(&self) -> String {
        format!("ublk 1 {} {:016x}", self.number.0, self.owner)
    }

    /// From that line; `None` if it is of something else.
    pub fn from_line(line: &str) -> Option<UblkState> {
        let (number, owner) = line.strip_prefix("ublk 1 ")?.split_once(' ')?;
        Some(UblkState {
            number: UblkNumber(number.parse().ok()?),
            owner: u64::from_str_radix(owner, 16).ok()?,
        })
    }
}

/// A volume's ublk device while it is served.
pub struct UblkDevice {
    name: String,
    state: UblkState,
    lifetime: Lifetime,
    links: Links,
    mail: Arc<Mail>,
    thread: Option<JoinHandle<()>>,
    gate: Option<Arc<Gate>>,
}

impl UblkDevice {
    /// Makes the device and its links and starts to serve it.
    pub fn create(
        spec: &DeviceSpec,
        lifetime: Lifetime,
        connect: ConnectPort<'_>,
    ) -> Result<UblkDevice, DeviceError> {
        let wrong = |source| DeviceError::Ublk {
            name: spec.name.clone(),
            source,
        };
        let mut control = Control::open().map_err(wrong)?;
        let recovery = match lifetime {
            Lifetime::Server => 0,
            Lifetime::BeyondServer => abi::FLAG_RECOVERY | abi::FLAG_REISSUE,
        };
        let wanted = DeviceInfo {
            depth: DEPTH,
            state: 0,
            max_bytes: max_bytes(spec),
            device: u32::MAX,
            flags: recovery | abi::FLAG_NEED_GET_DATA | abi::FLAG_IOCTL_NUMBERS,
            owner: owner_number(&spec.owner),
        };
        let made = control.add(wanted).map_err(wrong)?;
        let state = UblkState {
            number: UblkNumber(made.device),
            owner: wanted.owner,
        };
        let mut device = match UblkDevice::begin(spec, state, lifetime, connect) {
            Ok(device) => device,
            Err(error) => {
                // The first error is the one to tell.
                let _ = control.plain(Command::Delete, made.device, 0);
                return Err(wrong(error));
            }
        };
        let started = device.start(
            &mut control,
            spec,
            made.flags & wanted.flags == wanted.flags,
        );
        let started = started.map_err(wrong);
        match started.and_then(|()| device.make_links(&spec.links)) {
            Ok(()) => Ok(device),
            Err(error) => {
                device.abandon();
                Err(error)
            }
        }
    }

    /// Serves a device that a dead server left. I/O that waited goes on, and what the dead server
    /// had begun is repeated.
    pub fn resume(
        spec: &DeviceSpec,
        state: UblkState,
        connect: ConnectPort<'_>,
    ) -> Result<UblkDevice, DeviceError> {
        let number = state.number;
        let refuse = |error: io::Error| DeviceError::Resume {
            name: spec.name.clone(),
            device: number.path(),
            reason: error.to_string(),
        };
        let mut control = Control::open().map_err(refuse)?;
        let info = control.info(number.0).map_err(refuse)?;
        if info.owner != state.owner || state.owner != owner_number(&spec.owner) {
            let text = "it does not belong to this node any more";
            return Err(refuse(io::Error::other(text)));
        }
        if info.depth != DEPTH {
            let text = format!("it has {} requests, not {DEPTH}", info.depth);
            return Err(refuse(io::Error::other(text)));
        }
        // The dead server may still be on its way out.
        patiently(ErrorKind::ResourceBusy, || {
            control.plain(Command::StartRecovery, number.0, 0)
        })
        .map_err(refuse)?;
        let beyond = Lifetime::BeyondServer;
        let mut device = match UblkDevice::begin(spec, state, beyond, connect) {
            Ok(device) => device,
            Err(error) => {
                discard(&mut control, number);
                return Err(refuse(error));
            }
        };
        let pid = u64::from(std::process::id());
        let resumed = control.plain(Command::EndRecovery, number.0, pid);
        let resumed = resumed.map_err(&refuse);
        match resumed.and_then(|()| device.make_links(&spec.links)) {
            Ok(()) => {
                tracing::info!(device = %number.path().display(), "device resumed");
                Ok(device)
            }
            Err(error) => {
                device.abandon();
                Err(error)
            }
        }
    }

    /// What the holder must keep for [`Self::resume`].
    pub fn state(&self) -> &UblkState {
        &self.state
    }

    /// What becomes of it when this server dies.
    pub fn lifetime(&self) -> Lifetime {
        self.lifetime
    }

    /// The device's number.
    pub fn number(&self) -> UblkNumber {
        self.state.number
    }

    /// The opener of its volume, if it has to be opened.
    pub fn gate(&self) -> Option<&Arc<Gate>> {
        self.gate.as_ref()
    }

    /// Takes the device away, if nobody uses it. Else it goes on as it was and comes back with the
    /// error.
    pub fn detach(mut self) -> Result<(), (Box<UblkDevice>, DeviceError)> {
        let number = self.number();
        let (name, mail) = (self.name.clone(), self.mail.clone());
        // It waits for this process's answers: see there.
        let ended = apart(|| Ok(end_unused(number, &name, mail)));
        let ended = ended.unwrap_or_else(|source| Err(DeviceError::Ublk { name, source }));
        if let Err(error) = ended {
            return Err((Box::new(self), error));
        }
        self.links.remove(&number.path());
        self.join();
        match Control::open() {
            Ok(mut control) => delete(&mut control, number),
            Err(error) => tracing::warn!(%error, "a ublk device without a disk is left"),
        }
        Ok(())
    }

    /// Gives the device up while it may be in use: all I/O fails from now on, and the disk goes away.
    pub fn abandon(mut self) {
        self.give_up();
    }

    /// Everything up to the point where all tags are the server's.
    fn begin(
        spec: &DeviceSpec,
        state: UblkState,
        lifetime: Lifetime,
        connect: ConnectPort<'_>,
    ) -> io::Result<UblkDevice> {
        let path = PathBuf::from(format!("/dev/ublkc{}", state.number.0));
        let file = patiently(ErrorKind::NotFound, || {
            patiently(ErrorKind::ResourceBusy, || {
                File::options().read(true).write(true).open(&path)
            })
        })?;
        let mail = Arc::new(Mail::new()?);
        let gate = gate(spec, connect);
        let queue = Queue::new(file, mail.clone(), gate.clone(), connect)?;
        let (fetched, wait) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name(format!("ublk {}", spec.name))
            .spawn(move || queue.run(&fetched))?;
        wait.recv_timeout(STEP_TIMEOUT)
            .map_err(|_| io::Error::from(ErrorKind::TimedOut))??;
        Ok(UblkDevice {
            name: spec.name.clone(),
            state,
            lifetime,
            links: Links::default(),
            mail,
            thread: Some(thread),
            gate,
        })
    }

    /// Makes the disk.
    fn start(
        &mut self,
        control: &mut Control,
        spec: &DeviceSpec,
        has_flags: bool,
    ) -> io::Result<()> {
        if !has_flags {
            let text = "this kernel's ublk lacks recovery or numbers its commands in another way";
            return Err(io::Error::new(ErrorKind::Unsupported, text));
        }
        let number = self.number();
        control.set_parameters(number.0, &parameters(spec))?;
        control.plain(Command::Start, number.0, u64::from(std::process::id()))?;
        for (setting, value) in [("queue/scheduler", "none"), ("queue/add_random", "0")] {
            if let Err(error) = std::fs::write(number.sysfs().join(setting), value) {
                tracing::debug!(number = number.0, setting, value, %error, "setting not taken");
            }
        }
        // The read-only flag may be lifted later, so it is not the disk's but the node's.
        usage::set_access(number.into(), spec.access)
    }

    fn give_up(&mut self) {
        self.links.remove(&self.state.number.path());
        self.mail.abandon();
        match Control::open() {
            Ok(mut control) => discard(&mut control, self.number()),
            Err(error) => tracing::warn!(%error, "a ublk device could not be taken away"),
        }
        self.join();
    }

    /// Waits for the thread, which ends when the kernel has taken all tags away.
    fn join(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        let deadline = Instant::now() + STEP_TIMEOUT;
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
        if !thread.is_finished() {
            tracing::error!(
                volume = self.name,
                "the thread of a ublk device does not end"
            );
        } else if thread.join().is_err() {
            tracing::error!(
                volume = self.name,
                "the thread of a ublk device had panicked"
            );
        }
        if let Some(gate) = &self.gate {
            gate.end();
        }
    }

    fn make_links(&mut self, links: &[PathBuf]) -> Result<(), DeviceError> {
        let number = BlockNumber::from(self.number());
        if let Some(gate) = &self.gate {
            gate.set_number(number);
        }
        self.links.make(&self.name, &number.path(), links)
    }
}

impl Drop for UblkDevice {
    /// A device that was not detached is given up as [`Self::abandon`] does.
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.give_up();
        }
    }
}

/// Takes away the devices that dead servers of this node left, except those to be resumed; tells
/// which, and who uses them still.
pub(crate) fn clean_leftovers(
    owner: &str,
    keep: &[UblkNumber],
) -> io::Result<Vec<(UblkNumber, Vec<String>)>> {
    let mut found = Vec::new();
    if !is_present() {
        return Ok(found);
    }
    let mut control = match Control::open() {
        Ok(control) => control,
        // Whoever may not use ublk has left nothing there.
        Err(_) => return Ok(found),
    };
    let owner = owner_number(owner);
    for entry in std::fs::read_dir("/sys/class/ublk-char")? {
        let name = entry?.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("ublkc")?.parse().ok())
            .map(UblkNumber);
        let Some(number) = number.filter(|number| !keep.contains(number)) else {
            continue;
        };
        // One that goes meanwhile has no information.
        if control.info(number.0).is_ok_and(|info| info.owner == owner) {
            let users = usage::visible_users(number.into()).unwrap_or_default();
            discard(&mut control, number);
            found.push((number, users));
        }
    }
    found.sort();
    Ok(found)
}

/// Lets all that waits in a device fail, whose server has died and whose next one did not come.
pub(crate) fn end_waiting(state: &UblkState) -> io::Result<()> {
    let mut control = Control::open()?;
    let info = control.info(state.number.0)?;
    if info.owner == state.owner && info.state == abi::STATE_QUIESCED {
        discard(&mut control, state.number);
    }
    Ok(())
}

/// Takes a device's disk away, if nobody uses it. It may wait for the device's own requests.
fn end_unused(number: UblkNumber, name: &str, mail: Arc<Mail>) -> Result<(), DeviceError> {
    let claim = claim_alone(number, name)?;
    let mut kernel = Control::open().map_err(|source| DeviceError::Ublk {
        name: name.to_owned(),
        source,
    })?;
    // Should the volume not answer, what the kernel still wants fails.
    let (finished, finish) = sync_channel::<()>(1);
    let late = mail.clone();
    let watch = std::thread::spawn(move || {
        if finish.recv_timeout(FINISH_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::error!("a volume does not answer; what its device still wants fails");
            late.abandon();
        }
    });
    if let Err(error) = claim.sync_all() {
        tracing::warn!(%error, "a device's last writes failed");
    }
    // Held while the disk goes, so that nobody mounts it now.
    let stopped = kernel.plain(Command::Stop, number.0, 0);
    drop(claim);
    drop(finished);
    if watch.join().is_err() {
        tracing::error!("the watch over a device's end had panicked");
    }
    if let Err(error) = stopped {
        tracing::warn!(%error, "a device could not be stopped");
        mail.abandon();
    }
    Ok(())
}

/// Claims the device for this process alone.
fn claim_alone(number: UblkNumber, name: &str) -> Result<File, DeviceError> {
    let device = BlockNumber::from(number);
    let patience = Patience::start();
    loop {
        let claim = File::options()
            .read(true)
            .custom_flags(libc::O_EXCL)
            .open(number.path());
        let users = match &claim {
            Ok(_) => users_but_this_process(device),
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                usage::users(device).unwrap_or_else(|error| vec![error.to_string()])
            }
            Err(error) => {
                return Err(DeviceError::Ublk {
                    name: name.to_owned(),
                    source: io::Error::new(error.kind(), error.to_string()),
                });
            }
        };
        match claim {
            Ok(claim) if users.is_empty() => return Ok(claim),
            claim if !patience.wait(claim.is_err(), &users) => {
                return Err(DeviceError::InUse {
                    name: name.to_owned(),
                    device: number.path(),
                    users,
                });
            }
            _ => {}
        }
    }
}

/// Takes a device away under its users.
fn discard(control: &mut Control, number: UblkNumber) {
    if let Err(error) = control.plain(Command::Stop, number.0, 0) {
        tracing::warn!(number = number.0, %error, "a ublk device could not be stopped");
    }
    delete(control, number);
}

/// Removes a stopped device, which goes with its last user.
fn delete(control: &mut Control, number: UblkNumber) {
    if let Err(error) = control.plain(Command::DeleteLater, number.0, 0) {
        // Before 6.9. What is left is seen by the next start.
        tracing::warn!(number = number.0, %error, "a ublk device without a disk is left");
    }
}

fn users_but_this_process(number: BlockNumber) -> Vec<String> {
    let own = format!("process {} ", std::process::id());
    let mut users = usage::visible_users(number).unwrap_or_else(|error| vec![error.to_string()]);
    users.retain(|user| !user.starts_with(&own));
    users
}

/// Repeats what fails in this way, for a while.
fn patiently<T>(kind: ErrorKind, mut step: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + STEP_TIMEOUT;
    loop {
        match step() {
            Err(error) if error.kind() == kind && Instant::now() < deadline => {
                std::thread::sleep(LOOK);
            }
            result => return result,
        }
    }
}

fn max_bytes(spec: &DeviceSpec) -> u32 {
    MAX_BYTES
        .min(spec.properties.max_request_bytes)
        .max(1 << 16)
        & !4095
}

fn parameters(spec: &DeviceSpec) -> Parameters {
    let properties = &spec.properties;
    let logical_bytes = properties.logical_block_bytes.clamp(512, 4096);
    let largest_sectors = (properties.max_discard_bytes / 4096 * 8).max(8);
    Parameters {
        logical_bytes,
        physical_bytes: properties
            .physical_block_bytes
            .clamp(logical_bytes, 4096)
            .next_power_of_two(),
        max_bytes: max_bytes(spec),
        sectors: properties.size_bytes / 512,
        // The kernel refuses a device without one, also if it has no discards.
        granularity_bytes: granularity(spec).max(4096),
        discard_sectors: if spec.discards.of(properties) {
            largest_sectors
        } else {
            0
        },
        zeroes_sectors: largest_sectors,
    }
}

/// The node's name as a number, which the kernel keeps with its devices.
fn owner_number(owner: &str) -> u64 {
    u64::from_str_radix(owner, 16).unwrap_or_else(|_| {
        owner.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holders_line_comes_back_and_others_do_not() {
        let state = UblkState {
            number: UblkNumber(3),
            owner: 0x1234,
        };
        assert_eq!(UblkState::from_line(&state.to_line()), Some(state));
        assert_eq!(UblkState::from_line("2 3 4 5 6 1"), None);
        assert_eq!(UblkState::from_line("ublk 2 3 4"), None);
    }
}
