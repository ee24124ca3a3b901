//! Mountable devices of the volumes that are Primary here, on a thread of their own: what the
//! kernel does with a device may wait for a suspended volume.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use lockstep_core::event::RequestId;
use lockstep_core::state::Role;
use lockstep_front::device::{DeviceError, DeviceSpec, MountedDevice, clean_leftovers};
use lockstep_front::{BlockAccess, LoopNumber};
use lockstep_io::port::{PortEvent, PortSink, VolumePort};

use crate::board::Board;
use crate::holding::{Holding, Key, Verdict};
use crate::place::Place;
use crate::report::ResourceReport;

/// Makes a port of `resource`, volume; none if it has gone.
pub(crate) type OpenPort =
    Arc<dyn Fn(&str, u16, Box<dyn PortSink>) -> Option<Box<dyn VolumePort + Send>> + Send + Sync>;

/// Makes a resource Primary, without a device. Waits for the answer.
pub(crate) type Promote = Arc<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// What the thread is asked. It also looks by itself, once a second.
enum Order {
    /// Look at the board.
    Look { done: Option<SyncSender<()>> },
    /// Take a resource's devices away and make none until `Resume`.
    Release {
        resource: String,
        force: bool,
        done: SyncSender<Result<(), String>>,
    },
    /// The resource may have devices again.
    Resume { resource: String },
    /// Take all away and end.
    End { done: SyncSender<()> },
}

/// The thread from outside.
#[derive(Clone)]
pub(crate) struct Devices {
    orders: Option<SyncSender<Order>>,
}

/// Orders that may wait.
const BACKLOG: usize = 64;
/// How long a device may take to come or go.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often the kernel is asked who uses a device.
const LOOK: Duration = Duration::from_secs(1);

impl Devices {
    /// No devices: not root, or not wanted. Volumes are used over NBD.
    pub(crate) fn none() -> Devices {
        Devices { orders: None }
    }

    /// Starts the thread. With `hold`, devices outlive this daemon for so long.
    pub(crate) fn start(
        board: Arc<Board>,
        place: Place,
        hold: Option<Duration>,
        open_port: OpenPort,
        promote: Promote,
    ) -> std::io::Result<Devices> {
        let (sender, receiver) = sync_channel(BACKLOG);
        let holding = Holding::start(&place, hold)?;
        clean(&place, &holding.waiting())?;
        let worker = Worker {
            board,
            place,
            open_port,
            promote,
            holding,
            devices: BTreeMap::new(),
            released: BTreeSet::new(),
            failed: BTreeMap::new(),
        };
        std::thread::Builder::new()
            .name("devices".into())
            .spawn(move || worker.run(&receiver))?;
        Ok(Devices {
            orders: Some(sender),
        })
    }

    /// Something may have changed. Never waits.
    pub(crate) fn look(&self) {
        if let Some(orders) = &self.orders {
            match orders.try_send(Order::Look { done: None }) {
                // With a full queue it looks soon anyway.
                Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
            }
        }
    }

    /// The same, and waits until it has looked.
    pub(crate) fn look_and_wait(&self) {
        if let Some(orders) = &self.orders {
            let (done, wait) = sync_channel(1);
            if orders.send(Order::Look { done: Some(done) }).is_ok() {
                // Without an answer in time the device comes later, which the log tells.
                let _ = wait.recv_timeout(PATIENCE);
            }
        }
    }

    /// Takes the devices of a resource away. The error says who uses one; then all stay.
    pub(crate) fn release(&self, resource: &str, force: bool) -> Result<(), String> {
        let Some(orders) = &self.orders else {
            return Ok(());
        };
        let (done, wait) = sync_channel(1);
        let order = Order::Release {
            resource: resource.to_owned(),
            force,
            done,
        };
        if orders.send(order).is_err() {
            return Ok(());
        }
        match wait.recv_timeout(PATIENCE) {
            Ok(result) => result,
            Err(_) => Err("the kernel does not let go of the device in time".to_owned()),
        }
    }

    /// The resource may have devices again.
    pub(crate) fn resume(&self, resource: &str) {
        if let Some(orders) = &self.orders {
            // A thread that has ended makes no devices.
            let _ = orders.send(Order::Resume {
                resource: resource.to_owned(),
            });
        }
    }

    /// Takes all devices away; those in use fail from now on.
    pub(crate) fn end(&self) {
        if let Some(orders) = &self.orders {
            let (done, wait) = sync_channel(1);
            if orders.send(Order::End { done }).is_ok() {
                let _ = wait.recv_timeout(PATIENCE);
            }
        }
    }
}

/// A served device and the opener that stands for its users.
struct Served {
    device: MountedDevice,
    size_bytes: u64,
    /// Open while somebody uses the device.
    opener: Option<Box<dyn VolumePort + Send>>,
}

struct Worker {
    board: Arc<Board>,
    place: Place,
    open_port: OpenPort,
    promote: Promote,
    holding: Holding,
    devices: BTreeMap<Key, Served>,
    released: BTreeSet<String>,
    /// Devices that could not be made, with the size that was tried.
    failed: BTreeMap<Key, u64>,
}

impl Worker {
    fn run(mut self, orders: &Receiver<Order>) {
        loop {
            match orders.recv_timeout(LOOK) {
                Ok(Order::Look { done }) => {
                    self.look();
                    // Who asked may have stopped waiting.
                    done.map(|done| done.send(()));
                }
                Ok(Order::Release {
                    resource,
                    force,
                    done,
                }) => {
                    let result = self.release(&resource, force);
                    let _ = done.send(result);
                }
                Ok(Order::Resume { resource }) => {
                    self.released.remove(&resource);
                    self.look();
                }
                Ok(Order::End { done }) => {
                    for (key, served) in std::mem::take(&mut self.devices) {
                        self.take_away(&key, served.device);
                        self.holding.forget(&key);
                    }
                    for key in self.holding.keys() {
                        self.give_up(&key, "the daemon ends");
                    }
                    let _ = done.send(());
                    return;
                }
                Err(RecvTimeoutError::Timeout) => self.look(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Brings devices to what the board says.
    fn look(&mut self) {
        let waiting = self.look_at_waiting();
        let reports = self.board.reports();
        let mut wanted = BTreeMap::new();
        for report in &reports {
            if report.role != Role::Primary || self.released.contains(&report.name) {
                continue;
            }
            for device in report.devices.iter().filter(|d| d.size_sectors > 0) {
                let key = (report.name.clone(), device.volume);
                if waiting.contains(&key) {
                    continue;
                }
                wanted.insert(key, (report, device.minor, device.size_sectors * 512));
            }
        }
        self.failed.retain(|key, _| wanted.contains_key(key));
        let unwanted: Vec<Key> = self
            .devices
            .keys()
            .filter(|key| !wanted.contains_key(*key))
            .cloned()
            .collect();
        for key in unwanted {
            self.try_detach(&key);
        }
        for (key, (report, minor, size_bytes)) in wanted {
            match self.devices.get_mut(&key) {
                Some(served) if served.size_bytes == size_bytes => {}
                Some(served) => match served.device.resize(size_bytes) {
                    Ok(()) => served.size_bytes = size_bytes,
                    Err(error) => tracing::warn!(%error, "the device's size is still the old one"),
                },
                None if self.failed.get(&key) == Some(&size_bytes) => {}
                None => self.create(key, report, minor, size_bytes),
            }
        }
        for (key, served) in &mut self.devices {
            follow_users(&self.open_port, key, served);
            let report = reports.iter().find(|report| report.name == key.0);
            let device = report.and_then(|r| r.devices.iter().find(|d| d.volume == key.1));
            if let Some(device) = device {
                self.holding.keep(key, &served.device, device.current_uuid);
            }
        }
    }

    /// Devices that a dead daemon left: promotes for them, gives up what must not go on, and gives
    /// those that have to wait longer.
    fn look_at_waiting(&mut self) -> BTreeSet<Key> {
        for (key, verdict) in self.holding.judge(&self.board.reports()) {
            match verdict {
                Verdict::Promote => match (self.promote)(&key.0) {
                    Ok(()) => tracing::info!(resource = key.0, "Primary again for its device"),
                    Err(error) => tracing::debug!(resource = key.0, error, "not Primary yet"),
                },
                Verdict::Fail(reason) => self.give_up(&key, &reason),
                Verdict::Wait | Verdict::Resume => {}
            }
        }
        let verdicts = self.holding.judge(&self.board.reports());
        let unready = verdicts.into_iter().filter(|(_, v)| *v != Verdict::Resume);
        unready.map(|(key, _)| key).collect()
    }

    /// All I/O of a waiting device fails.
    fn give_up(&mut self, key: &Key, reason: &str) {
        let device = format!("{}/{}", key.0, key.1);
        tracing::error!(
            device,
            reason,
            "the device of before fails: its users start anew"
        );
        drop(self.holding.take(key));
        self.holding.forget(key);
        let mut others = self.holding.waiting();
        others.extend(self.devices.values().map(|d| d.device.state().number));
        if let Err(error) = clean(&self.place, &others) {
            tracing::warn!(%error, "a loop device could not be taken away");
        }
    }

    fn create(&mut self, key: Key, report: &ResourceReport, minor: u32, size_bytes: u64) {
        let name = format!("{}/{}", key.0, key.1);
        let Some(probe) = (self.open_port)(&key.0, key.1, Box::new(Silent)) else {
            return;
        };
        let mut properties = probe.properties();
        properties.size_bytes = size_bytes;
        drop(probe);
        let spec = DeviceSpec {
            owner: owner(self.place.dir()),
            name: name.clone(),
            properties,
            links: self.links(report, key.1, minor),
            readers: 1,
            access: BlockAccess::ReadWrite,
        };
        let open_port = self.open_port.clone();
        let mut connect = |sink: Box<dyn PortSink>| -> Box<dyn VolumePort + Send> {
            // A volume that has gone meanwhile answers every request with an error.
            match open_port(&key.0, key.1, sink) {
                Some(port) => port,
                None => Box::new(NoVolume),
            }
        };
        let made = match self.holding.take(&key) {
            Some(left) => MountedDevice::resume(&spec, left.descriptor, left.state, &mut connect),
            None => MountedDevice::create(&spec, &mut connect),
        };
        match made {
            Ok(device) => {
                tracing::info!(volume = name, device = %device.path().display(), "device made");
                self.devices.insert(
                    key,
                    Served {
                        device,
                        size_bytes,
                        opener: None,
                    },
                );
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(%error, cause, "no mountable device; the volume is there by NBD");
                self.failed.insert(key, size_bytes);
            }
        }
    }

    fn links(&self, report: &ResourceReport, volume: u16, minor: u32) -> Vec<PathBuf> {
        let mut roots = vec![self.place.dev_dir()];
        if self.place.is_default() {
            roots.push(PathBuf::from("/dev"));
        }
        let of_root = |root: PathBuf| {
            let by_res = root
                .join("drbd/by-res")
                .join(&report.name)
                .join(volume.to_string());
            [root.join(format!("drbd{minor}")), by_res]
        };
        roots.into_iter().flat_map(of_root).collect()
    }

    fn release(&mut self, resource: &str, force: bool) -> Result<(), String> {
        self.released.insert(resource.to_owned());
        for key in self.holding.keys().iter().filter(|key| key.0 == resource) {
            self.give_up(key, "the resource is made Secondary");
        }
        let keys: Vec<Key> = self
            .devices
            .keys()
            .filter(|key| key.0 == resource)
            .cloned()
            .collect();
        for key in keys {
            if force {
                if let Some(served) = self.devices.remove(&key) {
                    self.take_away(&key, served.device);
                    self.holding.forget(&key);
                }
            } else if let Some(users) = self.try_detach(&key) {
                self.released.remove(resource);
                self.look();
                return Err(users);
            }
        }
        Ok(())
    }

    /// Why a resource's I/O is suspended, if it is.
    fn suspended(&self, resource: &str) -> Option<String> {
        let reports = self.board.reports();
        let report = reports.iter().find(|report| report.name == resource)?;
        (!report.suspended.is_empty()).then(|| report.suspended.join(", "))
    }

    /// Detaches, or makes all I/O of its users fail.
    fn take_away(&self, key: &Key, device: MountedDevice) {
        if let Some(reasons) = self.suspended(&key.0) {
            tracing::warn!(
                device = %device.path().display(),
                reasons,
                "I/O is suspended: the device is given up, what it holds fails"
            );
            device.abandon();
        } else if let Err((device, error)) = device.detach() {
            tracing::warn!(%error, "the device is given up under its users");
            device.abandon();
        }
    }

    /// Takes a device away, or says who uses it.
    fn try_detach(&mut self, key: &Key) -> Option<String> {
        if let Some(served) = self.devices.get(key)
            && let Some(reasons) = self.suspended(&key.0)
        {
            // With requests held the kernel would wait for them, and nothing could end that.
            let users = served.device.visible_users();
            if !users.is_empty() {
                return Some(format!(
                    "{} is in use by {}, and I/O is suspended ({reasons}); resume it or use --force",
                    served.device.path().display(),
                    users.join(", ")
                ));
            }
        }
        let Served {
            device,
            size_bytes,
            opener,
        } = self.devices.remove(key)?;
        match device.detach() {
            Ok(()) => {
                self.holding.forget(key);
                if let Some(mut opener) = opener {
                    opener.close(true);
                }
                None
            }
            Err((device, error)) => {
                let text = match &error {
                    DeviceError::InUse { users, .. } if !users.is_empty() => {
                        format!(
                            "{} is in use by {}",
                            device.path().display(),
                            users.join(", ")
                        )
                    }
                    other => other.to_string(),
                };
                self.devices.insert(
                    key.clone(),
                    Served {
                        device: *device,
                        size_bytes,
                        opener,
                    },
                );
                Some(text)
            }
        }
    }
}

/// Takes away what dead daemons of this node left, but for the devices that are to be kept.
fn clean(place: &Place, keep: &[LoopNumber]) -> std::io::Result<()> {
    for left in clean_leftovers(&owner(place.dir()), keep)? {
        match left.in_use {
            None => tracing::info!(volume = left.name, "removed a dead daemon's device"),
            Some(users) => tracing::warn!(
                volume = left.name,
                ?users,
                "a dead daemon's device is still in use; it goes with its last user"
            ),
        }
    }
    Ok(())
}

/// The core is told whether the device is used, by an opener that stands for all users.
fn follow_users(open_port: &OpenPort, key: &Key, served: &mut Served) {
    match (served.device.is_claimed(), served.opener.take()) {
        (true, None) => {
            if let Some(mut port) = open_port(&key.0, key.1, Box::new(Silent)) {
                port.open(RequestId(0), true);
                served.opener = Some(port);
            }
        }
        (false, Some(mut port)) => port.close(true),
        (_, unchanged) => served.opener = unchanged,
    }
}

/// Names the node in labels of loop devices.
fn owner(dir: &Path) -> String {
    let hash = dir
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("{hash:016x}")
}

/// A sink of a port that asks for nothing but properties and opens.
pub(crate) struct Silent;

impl PortSink for Silent {
    fn event(&mut self, _: PortEvent) {}
}

/// Stands for a volume that has gone.
struct NoVolume;

impl VolumePort for NoVolume {
    fn properties(&self) -> lockstep_io::port::VolumeProperties {
        lockstep_io::port::VolumeProperties::default()
    }

    fn alloc(&self, _: usize) -> Option<lockstep_io::pool::IoBuf> {
        None
    }

    fn submit(
        &mut self,
        request: lockstep_io::port::PortRequest,
    ) -> Result<(), lockstep_io::port::SubmitError> {
        Err(lockstep_io::port::SubmitError::Gone(request))
    }

    fn kick(&mut self) {}

    fn open(&mut self, _: RequestId, _: bool) {}

    fn close(&mut self, _: bool) {}
}
