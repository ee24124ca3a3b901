//! Mountable devices of this node's volumes, on a thread of their own: what the kernel does with a
//! device may wait for a suspended volume.
//!
//! A device opens its volume when it is used ([`lockstep_front::gate`]). This thread looks whether
//! somebody still uses it, and closes it when nobody does: then an automatic Primary is Secondary
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockstep_core::state::Role;
use lockstep_front::block::{BlockDevice, DeviceKind, clean_leftovers, clean_links};
use lockstep_front::closes::Closes;
use lockstep_front::device::{ConnectPort, DeviceError, DeviceSpec, Discards, Opening};
use lockstep_front::gate::{Access, Gate, Session};
use lockstep_front::ublk::Lifetime;
use lockstep_front::{BlockAccess, BlockNumber, Usage};
use lockstep_io::port::{PortEvent, PortSink, VolumePort};

use crate::board::Board;
use crate::generations::Generations;
use crate::holding::{Holding, Key, Left, Promotion, Verdict};
use crate::no_volume::NoVolume;
use crate::node::NodeConfig;
use crate::opener::Opener;
use crate::options;
use crate::place::Place;
use crate::report::{DeviceReport, ResourceReport};

mod asking;
mod watches;

use asking::{ask_device, find_usage, left_usage, or_open};
use watches::{watch_closes, watch_mounts};

/// Makes a port of `resource`, volume; none if it has gone.
pub(crate) type OpenPort =
    Arc<dyn Fn(&str, u16, Box<dyn PortSink>) -> Option<Box<dyn VolumePort + Send>> + Send + Sync>;

/// Makes a resource Primary, without a device. Waits for the answer.
pub(crate) type Promote = Arc<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// What the thread is asked. It also looks by itself, once a second.
enum Order {
    /// Look at the board.
    Look,
    /// Bring one resource's devices to what the board says, and tell when it is done.
    LookAt {
        resource: String,
        done: SyncSender<()>,
    },
    /// Somebody has opened a device.
    Opened(BlockNumber),
    /// Somebody who could write has closed a device.
    Closed(BlockNumber),
    /// How a device is used, as was found out on another thread.
    Checked {
        key: Key,
        of: Arc<Mutex<()>>,
        uses: u64,
        usage: Usage,
    },
    /// Take a resource's devices away, or that of one volume, and make none until `Resume`.
    Release {
        resource: String,
        volume: Option<u16>,
        force: bool,
        done: SyncSender<Result<(), String>>,
    },
    /// The resource may have devices again.
    Resume { resource: String },
    /// Close what nobody uses any more; tells once for each device whether it was closed.
    Settle {
        resource: String,
        closed: Sender<bool>,
    },
    /// Tell which resources have devices that wait for this daemon.
    Waiting { done: SyncSender<BTreeSet<String>> },
    /// Take all away, but for those that the holder keeps for the next daemon, and end.
    End { done: SyncSender<End> },
}

/// The thread from outside.
#[derive(Clone)]
pub(crate) struct Devices {
    orders: Option<SyncSender<Order>>,
    /// It is told to look and has not begun: that look will see what is new.
    looks: Arc<AtomicBool>,
    /// Resources that were made Primary by command.
    explicit: Arc<Mutex<BTreeSet<String>>>,
}

/// What an orderly end leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum End {
    /// No devices.
    Nothing,
    /// Devices in use, whose I/O waits for the next daemon. Nothing may answer it any more.
    Devices,
}

/// Orders that may wait.
const BACKLOG: usize = 64;
/// How long a device may take to come or go.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the news of a volume's size wait for its device.
const WATCHER_PATIENCE: Duration = Duration::from_secs(2);
/// How often the kernel is asked who uses a device that is mounted or otherwise claimed.
const LOOK: Duration = Duration::from_secs(1);
/// How long a device was not used before it is asked whether it is used at all. The question claims it
/// for a moment, and whoever claims it then is refused.
const QUIET: Duration = Duration::from_millis(200);
/// The same after somebody has closed it: programs such as `mkfs` open a device several times in a row.
const CLOSED: Duration = Duration::from_millis(5);
/// The same for a device that may soon be used by nobody.
const LOOK_SOON: Duration = Duration::from_millis(200);
/// How long a command waits to learn whether devices are still used.
const SETTLE: Duration = Duration::from_secs(1);
/// A volume whose size is unknown for so long has a device without size.
const SIZELESS: Duration = Duration::from_secs(1);

impl Devices {
    /// No devices: not root, or not wanted. Volumes are used over NBD.
    pub(crate) fn none() -> Devices {
        Devices {
            orders: None,
            looks: Arc::default(),
            explicit: Arc::default(),
        }
    }

    /// Starts the thread. With `hold` in the configuration, devices outlive this daemon for so long.
    pub(crate) fn start(
        board: Arc<Board>,
        place: Place,
        config: &NodeConfig,
        generations: Arc<Generations>,
        open_port: OpenPort,
        promote: Promote,
    ) -> std::io::Result<Devices> {
        let (sender, receiver) = sync_channel(BACKLOG);
        let holding = Holding::start(&place, config.hold, generations)?;
        let waiting = holding.waiting();
        clean(&place, &waiting)?;
        let waiting: Vec<PathBuf> = waiting.into_iter().map(|number| number.path()).collect();
        for root in link_roots(&place) {
            clean_links(&root, &waiting);
        }
        let explicit: Arc<Mutex<BTreeSet<String>>> = Arc::default();
        watch_mounts(sender.clone())?;
        let closes = Arc::new(Closes::new()?);
        watch_closes(closes.clone(), sender.clone())?;
        let looks: Arc<AtomicBool> = Arc::default();
        let worker = Worker {
            orders: sender.clone(),
            looks: looks.clone(),
            explicit: explicit.clone(),
            sizeless: BTreeMap::new(),
            board,
            place,
            kind: config.device_kind,
            open_port,
            promote,
            holding,
            closes,
            devices: BTreeMap::new(),
            released: BTreeSet::new(),
            failed: BTreeMap::new(),
        };
        std::thread::Builder::new()
            .name("devices".into())
            .spawn(move || worker.run(&receiver))?;
        Ok(Devices {
            orders: Some(sender),
            looks,
            explicit,
        })
    }

    /// Something may have changed. Never waits.
    pub(crate) fn look(&self) {
        if let Some(orders) = &self.orders
            && !self.looks.swap(true, Ordering::SeqCst)
            && orders.try_send(Order::Look).is_err()
        {
            // With a full queue it looks soon anyway.
            self.looks.store(false, Ordering::SeqCst);
        }
    }

    /// Brings one resource's devices to what the board says, and waits for that.
    pub(crate) fn look_at(&self, resource: &str) {
        self.look_at_within(resource, PATIENCE);
    }

    /// The same for a watcher, who is not kept waiting for long.
    pub(crate) fn look_at_soon(&self, resource: &str) {
        self.look_at_within(resource, WATCHER_PATIENCE);
    }

    fn look_at_within(&self, resource: &str, patience: Duration) {
        if let Some(orders) = &self.orders {
            let (done, wait) = sync_channel(1);
            let resource = resource.to_owned();
            if orders.send(Order::LookAt { resource, done }).is_ok() {
                // Without an answer in time the device comes later, which the log tells.
                let _ = wait.recv_timeout(patience);
            }
        }
    }

    /// The resource was made Primary by command, or is Secondary again.
    pub(crate) fn set_explicit(&self, resource: &str, primary: bool) {
        let mut explicit = lock(&self.explicit);
        if primary {
            explicit.insert(resource.to_owned());
        } else {
            explicit.remove(resource);
        }
    }

    /// Takes the devices of a resource away, or that of one volume. The error says who uses one; then
    /// all stay.
    pub(crate) fn release(
        &self,
        resource: &str,
        volume: Option<u16>,
        force: bool,
    ) -> Result<(), String> {
        let Some(orders) = &self.orders else {
            return Ok(());
        };
        let (done, wait) = sync_channel(1);
        let order = Order::Release {
            resource: resource.to_owned(),
            volume,
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

    /// Closes the volumes of a resource whose devices nobody uses any more, and waits for that; `true` if
    /// there were some. A command sees what it would see if closing a device told this daemon so.
    pub(crate) fn settle(&self, resource: &str) -> bool {
        let (closed, wait) = channel();
        let resource = resource.to_owned();
        match &self.orders {
            Some(orders) if orders.send(Order::Settle { resource, closed }).is_ok() => {}
            _ => return false,
        }
        let begin = Instant::now();
        let mut any = false;
        // Ends when each device has been looked at. One that does not answer is left to itself.
        while let Ok(closed) = wait.recv_timeout(SETTLE.saturating_sub(begin.elapsed())) {
            any |= closed;
        }
        any
    }

    /// Resources with devices of a daemon before this one that still wait.
    pub(crate) fn waiting(&self) -> BTreeSet<String> {
        let (done, wait) = sync_channel(1);
        match &self.orders {
            Some(orders) if orders.send(Order::Waiting { done }).is_ok() => {
                wait.recv_timeout(PATIENCE).unwrap_or_default()
            }
            _ => BTreeSet::new(),
        }
    }

    /// Takes all devices away. Those in use are left to the holder; without one they fail from now on.
    pub(crate) fn end(&self) -> End {
        let (done, wait) = sync_channel(1);
        match &self.orders {
            Some(orders) if orders.send(Order::End { done }).is_ok() => {
                wait.recv_timeout(PATIENCE).unwrap_or(End::Nothing)
            }
            _ => End::Nothing,
        }
    }
}

/// A served device.
struct Served {
    device: BlockDevice,
    size_bytes: u64,
    block_bytes: u32,
    access: BlockAccess,
    opener: Opener,
    /// Held by the thread that finds out how the device is used.
    check: Arc<Mutex<()>>,
    /// Such a thread is on its way.
    checking: bool,
    /// It was closed since that thread went.
    closed: bool,
    /// It was claimed or mounted when last seen.
    claimed: bool,
    /// It was mounted when last seen.
    mounted: bool,
    /// What was written last had failed when last seen, which was told.
    unwritten: bool,
    /// The count of its uses when last seen, and since when it is that.
    last_use: Option<(u64, Instant)>,
    /// The holder was told of it.
    held: bool,
}

impl Served {
    /// Has a thread find out how the device is used, after a while.
    fn ask(&mut self, orders: &SyncSender<Order>, key: Key, uses: u64, after: Duration) {
        let number = self.device.number();
        self.closed = false;
        self.look(orders, key, move |check| {
            std::thread::sleep(after);
            let _busy = lock(check);
            let usage = match after.is_zero() {
                true => find_usage(number),
                // The other process looks for what shows from here as well.
                false => or_open(number, ask_device(number)),
            };
            (uses, usage)
        });
    }

    /// The same after an unmount has begun, as soon as it has ended.
    fn ask_left(&mut self, orders: &SyncSender<Order>, key: Key, gate: Arc<Gate>) {
        let number = self.device.number();
        self.look(orders, key, move |check| left_usage(number, &gate, check));
    }

    /// Runs a look at the device's use in a thread of its own. It gives the count of uses that it belongs to.
    fn look(
        &mut self,
        orders: &SyncSender<Order>,
        key: Key,
        find: impl FnOnce(&Mutex<()>) -> (u64, Usage) + Send + 'static,
    ) {
        let (orders, check) = (orders.clone(), self.check.clone());
        let asked = std::thread::Builder::new()
            .name("usage".into())
            .spawn(move || {
                let (uses, usage) = find(&check);
                // A thread of devices that has ended needs no answer.
                let _ = orders.send(Order::Checked {
                    key,
                    of: check,
                    uses,
                    usage,
                });
            });
        self.checking = asked.is_ok();
    }
}

struct Worker {
    orders: SyncSender<Order>,
    looks: Arc<AtomicBool>,
    explicit: Arc<Mutex<BTreeSet<String>>>,
    board: Arc<Board>,
    place: Place,
    kind: DeviceKind,
    open_port: OpenPort,
    promote: Promote,
    holding: Holding,
    closes: Arc<Closes>,
    devices: BTreeMap<Key, Served>,
    /// Resources, or volumes of them, that have no devices for now.
    released: BTreeSet<(String, Option<u16>)>,
    /// Devices that could not be made, with the size that was tried.
    failed: BTreeMap<Key, u64>,
    /// Volumes without size and device, since when.
    sizeless: BTreeMap<Key, Instant>,
}

impl Worker {
    fn run(mut self, orders: &Receiver<Order>) {
        loop {
            match orders.recv_timeout(self.pause()) {
                Ok(Order::Look) | Err(RecvTimeoutError::Timeout) => {
                    self.looks.store(false, Ordering::SeqCst);
                    self.look();
                }
                Ok(Order::LookAt { resource, done }) => {
                    let waiting = self.look_at_waiting();
                    if let Some(report) = self.board.report(&resource) {
                        self.look_at(&report, &waiting);
                    }
                    // Who asked may have stopped waiting.
                    let _ = done.send(());
                }
                Ok(Order::Opened(number)) => self.opened(number),
                Ok(Order::Closed(number)) => self.closed(number),
                Ok(Order::Checked {
                    key,
                    of,
                    uses,
                    usage,
                }) => {
                    // Not of a device that was there before.
                    let served = self.devices.get(&key);
                    if served.is_some_and(|served| Arc::ptr_eq(&served.check, &of)) {
                        self.checked(&key, uses, usage);
                    }
                }
                Ok(Order::Release {
                    resource,
                    volume,
                    force,
                    done,
                }) => {
                    let result = self.release(&resource, volume, force);
                    let _ = done.send(result);
                }
                Ok(Order::Resume { resource }) => {
                    self.released.retain(|(name, _)| *name != resource);
                    self.look();
                }
                Ok(Order::Settle { resource, closed }) => self.settle(&resource, &closed),
                Ok(Order::Waiting { done }) => {
                    let keys = self.holding.keys().into_iter();
                    let _ = done.send(keys.map(|(resource, _)| resource).collect());
                }
                Ok(Order::End { done }) => {
                    let _ = done.send(self.end());
                    return;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn end(&mut self) -> End {
        // The holder has to know all that is in use.
        self.look();
        // The holder goes on with what waits already.
        let mut end = match self.holding.keys().is_empty() {
            true => End::Nothing,
            false => End::Devices,
        };
        let keys: Vec<Key> = self.devices.keys().cloned().collect();
        for key in keys {
            let held = self.devices.get(&key).is_some_and(|served| served.held);
            let users = match held {
                true => self.try_detach(&key),
                false => None,
            };
            let Some(served) = self.devices.remove(&key) else {
                continue;
            };
            match users {
                Some(users) => {
                    self.closes.forget(served.device.number());
                    tracing::info!(users, "the device waits for the next daemon");
                    served.device.leave();
                    end = End::Devices;
                }
                None => {
                    self.take_away(&key, served.device);
                    self.holding.forget(&key);
                }
            }
        }
        end
    }

    /// How long nothing has to be looked at.
    fn pause(&self) -> Duration {
        let is_loose = |served: &Served| {
            let session = served.device.gate().and_then(|gate| gate.session());
            session.is_some() && !served.claimed
        };
        if self.devices.values().any(is_loose) {
            LOOK_SOON
        } else {
            LOOK
        }
    }

    /// Brings devices to what the board says.
    fn look(&mut self) {
        let waiting = self.look_at_waiting();
        let reports = self.board.reports();
        let has_report = |key: &Key| reports.iter().any(|report| report.name == key.0);
        let keys = self.devices.keys().filter(|key| !has_report(key));
        for key in keys.cloned().collect::<Vec<_>>() {
            self.try_detach(&key);
        }
        for report in &reports {
            self.look_at(report, &waiting);
        }
        self.tend();
    }

    /// Brings one resource's devices to its report.
    fn look_at(&mut self, report: &ResourceReport, waiting: &BTreeSet<Key>) {
        let mut wanted = BTreeMap::new();
        for device in &report.devices {
            let key = (report.name.clone(), device.volume);
            let is_released = [None, Some(device.volume)]
                .into_iter()
                .any(|volume| self.released.contains(&(report.name.clone(), volume)));
            if !is_released && !waiting.contains(&key) {
                wanted.insert(key, device);
            }
        }
        let of_resource = |key: &Key| key.0 == report.name;
        self.failed
            .retain(|key, _| !of_resource(key) || wanted.contains_key(key));
        self.sizeless
            .retain(|key, _| !of_resource(key) || wanted.contains_key(key));
        let unwanted = self.devices.keys().filter(|key| of_resource(key));
        let unwanted = unwanted.filter(|key| !wanted.contains_key(*key));
        for key in unwanted.cloned().collect::<Vec<_>>() {
            self.try_detach(&key);
        }
        for (key, device) in wanted {
            self.bring(&key, report, device);
            self.hold(&key, report, device.current_uuid);
        }
    }

    /// Brings one device to what is wanted.
    fn bring(&mut self, key: &Key, report: &ResourceReport, device: &DeviceReport) {
        let size_bytes = device.size_sectors * 512;
        let access = access(report);
        if let Some(served) = self.devices.get_mut(key) {
            if served.size_bytes == size_bytes || size_bytes == 0 {
                // A volume that has lost its data for now keeps its size for those who use it.
            } else if served.size_bytes == 0 {
                // Its limits are known only now.
                self.try_detach(key);
            } else if !served.device.can_resize() {
                // A new one has the new size, as soon as nobody uses this one.
                if let Some(users) = self.try_detach(key) {
                    tracing::debug!(users, "the device's size is still the old one");
                }
            } else {
                match served.device.resize(size_bytes) {
                    Ok(()) => served.size_bytes = size_bytes,
                    Err(error) => tracing::warn!(%error, "the device's size is still the old one"),
                }
            }
        }
        if let Some(served) = self.devices.get_mut(key)
            && served.block_bytes < options::block_bytes(device)
            && !served.claimed
            && served
                .device
                .gate()
                .is_some_and(|gate| gate.session().is_none())
        {
            // Nobody uses it, and its users would send requests that are too small for a disk.
            self.try_detach(key);
        }
        if let Some(served) = self.devices.get_mut(key) {
            if served.access != access {
                match served.device.set_access(access) {
                    Ok(()) => served.access = access,
                    Err(error) => {
                        tracing::warn!(%error, "the device's access is still the old one")
                    }
                }
            }
            return;
        }
        if size_bytes == 0 {
            // Most volumes get their size in the next moment, and a better device then.
            let since = *self
                .sizeless
                .entry(key.clone())
                .or_insert_with(Instant::now);
            if since.elapsed() < SIZELESS {
                return;
            }
        }
        if self.failed.get(key) != Some(&size_bytes) {
            self.create(key, report, device, size_bytes);
        }
    }

    /// Tells the holder of devices whose users must not notice the end of this daemon.
    fn hold(&mut self, key: &Key, report: &ResourceReport, uuid: u64) {
        let Some(served) = self.devices.get_mut(key) else {
            return;
        };
        let explicit = lock(&self.explicit).contains(&key.0);
        let session = served.device.gate().and_then(|gate| gate.session());
        let writes = session.is_some_and(|session| session.access == Some(Access::Write));
        let promotion = match report.role == Role::Primary {
            true if explicit => Some(Promotion::Explicit),
            true if writes => Some(Promotion::Automatic),
            // Without the holder nothing would end its wait for a daemon that never comes.
            _ if served.device.waits_by_itself() => Some(Promotion::Never),
            _ => None,
        };
        match promotion {
            Some(promotion) => self.holding.keep(key, &served.device, uuid, promotion),
            None if served.held => self.holding.forget(key),
            None => {}
        }
        served.held = promotion.is_some();
    }

    /// Finds out how open devices are used.
    fn tend(&mut self) {
        let mut open = Vec::new();
        for (key, served) in &self.devices {
            let session = served.device.gate().and_then(|gate| gate.session());
            if let Some(session) = session
                && !served.checking
            {
                open.push((key.clone(), session.uses));
            }
        }
        let now = Instant::now();
        for (key, uses) in open {
            // What holds I/O back may hold back the answer, too.
            if self.suspended(&key.0).is_some() {
                continue;
            }
            let Some(served) = self.devices.get_mut(&key) else {
                continue;
            };
            if let Ok(Some(usage)) = served.device.number().mounted() {
                served.mounted = true;
                self.checked(&key, uses, usage);
                continue;
            }
            if std::mem::take(&mut served.mounted)
                && let Some(gate) = served.device.gate().cloned()
            {
                served.ask_left(&self.orders, key, gate);
                continue;
            }
            // A mount reads before it claims, and must not meet the question.
            let since = match served.last_use {
                Some((last, since)) if last == uses => since,
                _ => now,
            };
            served.last_use = Some((uses, since));
            if !served.claimed && now.duration_since(since) < QUIET {
                continue;
            }
            served.ask(&self.orders, key, uses, Duration::ZERO);
        }
    }

    /// Whoever has opened it for writing is a user from now on, as with a kernel.
    fn opened(&mut self, number: BlockNumber) {
        let mut all = self.devices.iter();
        let found = all.find(|(_, served)| served.device.number() == number);
        if let Some((key, served)) = found
            && served.access == BlockAccess::ReadWrite
            && self.suspended(&key.0).is_none()
            && let Some(gate) = served.device.gate()
        {
            served.opener.opened(number, gate.clone());
        }
    }

    /// Whoever has closed it may have been its last user: an automatic Primary is Secondary again at once,
    /// as other nodes may ask for the next moment.
    fn closed(&mut self, number: BlockNumber) {
        let mut all = self.devices.iter_mut();
        let Some((key, served)) = all.find(|(_, served)| served.device.number() == number) else {
            return;
        };
        served.closed = true;
        let key = key.clone();
        self.ask_closed(&key);
    }

    /// Looks at each device that an automatic Primary was promoted for, on a thread of its own.
    fn settle(&self, resource: &str, closed: &Sender<bool>) {
        if lock(&self.explicit).contains(resource) || self.suspended(resource).is_some() {
            return;
        }
        let report = self.board.report(resource);
        let fails = report.is_some_and(|report| report.force_io_failures);
        for (_, served) in self.devices.iter().filter(|(key, _)| key.0 == resource) {
            let Some(gate) = served.device.gate().cloned() else {
                continue;
            };
            let session = gate.session();
            let writes = session.filter(|session| session.access == Some(Access::Write));
            let number = served.device.number();
            // A claim may have ended with a mount a moment ago.
            let claimed = served.claimed && !matches!(number.mounted(), Ok(None));
            let Some(session) = writes.filter(|_| !claimed) else {
                continue;
            };
            let check = served.check.clone();
            let closed = closed.clone();
            let asked = std::thread::Builder::new()
                .name("usage".into())
                .spawn(move || {
                    let busy = lock(&check);
                    // As in `checked`, which waits for a device that nobody asks about.
                    let unused = match find_usage(number) {
                        Usage::Unused => true,
                        Usage::Unwritten => fails,
                        Usage::Claimed | Usage::MountedReadOnly | Usage::Open => false,
                    };
                    drop(busy);
                    // Who asked may have stopped waiting.
                    let _ = closed.send(unused && gate.close(session.uses));
                });
            if let Err(error) = asked {
                tracing::warn!(%error, "how a device is used cannot be told");
            }
        }
    }

    fn ask_closed(&mut self, key: &Key) {
        // The question claims the device for a moment, and who stays Primary can wait for it.
        if self.suspended(&key.0).is_some() || lock(&self.explicit).contains(&key.0) {
            return;
        }
        let Some(served) = self.devices.get_mut(key) else {
            return;
        };
        let session = served.device.gate().and_then(|gate| gate.session());
        // Who only reads, such as a program that probes devices, holds up nobody for long.
        let writes = |session: &Session| session.access == Some(Access::Write);
        if let Some(session) = session.filter(writes)
            && !served.claimed
            && !served.checking
        {
            served.ask(&self.orders, key.clone(), session.uses, CLOSED);
        }
    }

    /// Closes a volume whose device nobody uses, and opens one for writing whose device is claimed.
    fn checked(&mut self, key: &Key, uses: u64, usage: Usage) {
        let report = self.board.report(&key.0);
        let fails = report.is_some_and(|report| report.force_io_failures);
        let Some(served) = self.devices.get_mut(key) else {
            return;
        };
        served.checking = false;
        let closed_since = served.closed && usage == Usage::Open;
        served.claimed = matches!(usage, Usage::Claimed | Usage::MountedReadOnly);
        let known = std::mem::replace(&mut served.unwritten, usage == Usage::Unwritten);
        let Some(gate) = served.device.gate().cloned() else {
            return;
        };
        let access = gate.session().and_then(|session| session.access);
        match usage {
            Usage::Unused => {
                gate.close(uses);
            }
            // After a demotion by force everything fails until the last user has gone.
            Usage::Unwritten if fails => {
                gate.close(uses);
            }
            Usage::Unwritten if known => {}
            Usage::Unwritten => {
                tracing::warn!(
                    device = %served.device.path().display(),
                    "what was written last has failed, and its volume stays open"
                );
            }
            Usage::Claimed if access == Some(Access::Read) => {
                // It may take `auto-promote-timeout`, and a refusal meets the next write as well.
                let opened = std::thread::Builder::new()
                    .name("open".into())
                    .spawn(move || gate.open(Access::Write));
                if let Err(error) = opened {
                    tracing::warn!(%error, "a claimed device is not open for writing yet");
                }
            }
            Usage::Claimed | Usage::MountedReadOnly | Usage::Open => {}
        }
        if closed_since {
            self.ask_closed(key);
        }
    }

    /// Devices that a dead daemon left: promotes for them, gives up what must not go on, and gives
    /// those that have to wait longer.
    fn look_at_waiting(&mut self) -> BTreeSet<Key> {
        for (key, verdict) in self.holding.judge(&self.board.reports()) {
            match verdict {
                Verdict::Promote if self.holding.is_automatic(&key) => {}
                Verdict::Promote => match (self.promote)(&key.0) {
                    Ok(()) => tracing::info!(resource = key.0, "Primary again for its device"),
                    Err(error) => tracing::debug!(resource = key.0, error, "not Primary yet"),
                },
                Verdict::Fail(reason) => self.give_up(&key, &reason),
                Verdict::Wait | Verdict::Resume => {}
            }
        }
        let verdicts = self.holding.judge(&self.board.reports());
        let is_ready = |key: &Key, verdict: &Verdict| match verdict {
            Verdict::Resume => true,
            // Its requests promote, as those of before did.
            Verdict::Promote => self.holding.is_automatic(key),
            Verdict::Wait | Verdict::Fail(_) => false,
        };
        let unready = verdicts.into_iter().filter(|(key, v)| !is_ready(key, v));
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
        others.extend(self.devices.values().map(|d| d.device.number()));
        if let Err(error) = clean(&self.place, &others) {
            tracing::warn!(%error, "a device could not be taken away");
        }
    }

    fn create(
        &mut self,
        key: &Key,
        report: &ResourceReport,
        volume: &DeviceReport,
        size_bytes: u64,
    ) {
        let name = format!("{}/{}", key.0, key.1);
        let Some(probe) = (self.open_port)(&key.0, key.1, Box::new(Silent)) else {
            return;
        };
        let mut properties = probe.properties();
        properties.size_bytes = size_bytes;
        properties.logical_block_bytes = options::block_bytes(volume);
        drop(probe);
        let spec = DeviceSpec {
            owner: owner(self.place.dir()),
            name: name.clone(),
            properties,
            links: self.links(report, key.1, volume.minor),
            readers: 1,
            access: access(report),
            opening: Opening::OnUse,
            discards: discards(report, key.1),
        };
        let open_port = self.open_port.clone();
        let mut connect = |sink: Box<dyn PortSink>| -> Box<dyn VolumePort + Send> {
            // A volume that has gone meanwhile answers every request with an error.
            match open_port(&key.0, key.1, sink) {
                Some(port) => port,
                None => Box::new(NoVolume),
            }
        };
        let made = match self.holding.take(key) {
            Some(left) => self.resume(&spec, left, &mut connect),
            None => {
                let lifetime = match self.holding.is_wanted() {
                    true => Lifetime::BeyondServer,
                    false => Lifetime::Server,
                };
                BlockDevice::create(self.kind, &spec, lifetime, &mut connect)
            }
        };
        match made {
            Ok(device) => {
                tracing::info!(volume = name, device = %device.path().display(), "device made");
                self.sizeless.remove(key);
                if let Err(error) = self.closes.watch(device.number()) {
                    tracing::warn!(%error, "a moment passes until it shows that nobody uses a device");
                }
                self.devices.insert(
                    key.clone(),
                    Served {
                        device,
                        size_bytes,
                        block_bytes: options::block_bytes(volume),
                        access: spec.access,
                        opener: Opener::default(),
                        check: Arc::default(),
                        checking: false,
                        closed: false,
                        claimed: false,
                        mounted: false,
                        unwritten: false,
                        last_use: None,
                        held: false,
                    },
                );
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(%error, cause, "no mountable device; the volume is there by NBD");
                self.failed.insert(key.clone(), size_bytes);
            }
        }
    }

    /// Serves a device again that a dead daemon left.
    fn resume(
        &self,
        spec: &DeviceSpec,
        left: Left,
        connect: ConnectPort<'_>,
    ) -> Result<BlockDevice, DeviceError> {
        let device = BlockDevice::resume(spec, left.descriptor, left.state, connect)?;
        if left.promotion == Promotion::Automatic
            && let Some(gate) = device.gate()
            && let Err(refused) = gate.open(Access::Write)
        {
            // Its users have read what they want to change.
            let error = DeviceError::Resume {
                name: spec.name.clone(),
                device: device.path(),
                reason: refused.0,
            };
            device.abandon();
            return Err(error);
        }
        Ok(device)
    }

    fn links(&self, report: &ResourceReport, volume: u16, minor: u32) -> Vec<PathBuf> {
        let of_root = |root: PathBuf| {
            let by_res = root
                .join("drbd/by-res")
                .join(&report.name)
                .join(volume.to_string());
            [root.join(format!("drbd{minor}")), by_res]
        };
        let roots = link_roots(&self.place).into_iter();
        roots.flat_map(of_root).collect()
    }

    fn release(&mut self, resource: &str, volume: Option<u16>, force: bool) -> Result<(), String> {
        let is_meant = |key: &Key| key.0 == resource && volume.is_none_or(|v| v == key.1);
        for key in self.holding.keys().iter().filter(|key| is_meant(key)) {
            self.give_up(key, "the resource is made Secondary");
        }
        // What the operator has suspended is answered by nobody, not even with an error.
        let report = self.board.report(resource);
        let is_primary = report.as_ref().is_some_and(|r| r.role == Role::Primary);
        if force && !report.is_some_and(|r| r.suspended.iter().any(|reason| reason == "user")) {
            tracing::warn!(
                resource,
                "Secondary by force: all I/O of a device in use fails until its last user has gone"
            );
            let meant = self.devices.iter().filter(|(key, _)| is_meant(key));
            for (_, served) in meant.filter(|_| is_primary) {
                Self::count_users(served);
            }
            return Ok(());
        }
        self.released.insert((resource.to_owned(), volume));
        let keys = self.devices.keys().filter(|key| is_meant(key));
        let keys: Vec<Key> = keys.cloned().collect();
        for key in keys {
            if force {
                if let Some(served) = self.devices.remove(&key) {
                    self.take_away(&key, served.device);
                    self.holding.forget(&key);
                }
            } else if let Some(users) = self.try_detach(&key) {
                self.released.remove(&(resource.to_owned(), volume));
                self.look();
                return Err(users);
            }
        }
        Ok(())
    }

    /// Who has a Primary's device open without having used it is a user as well: the first request would
    /// otherwise be one that promotes.
    fn count_users(served: &Served) {
        let Some(gate) = served.device.gate() else {
            return;
        };
        let writes = |session: Session| session.access == Some(Access::Write);
        if gate.session().is_some_and(writes) || served.device.visible_users().is_empty() {
            return;
        }
        if let Err(refused) = gate.open(Access::Write) {
            let device = served.device.path();
            tracing::warn!(device = %device.display(), reason = refused.0, "its users are not counted");
        }
    }

    /// Why a resource's I/O is suspended, if it is.
    fn suspended(&self, resource: &str) -> Option<String> {
        let report = self.board.report(resource)?;
        (!report.suspended.is_empty()).then(|| report.suspended.join(", "))
    }

    /// Detaches, or makes all I/O of its users fail.
    fn take_away(&self, key: &Key, device: BlockDevice) {
        self.closes.forget(device.number());
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
        let mut served = self.devices.remove(key)?;
        // A look of our own at the device would count as a user.
        let check = served.check.clone();
        let busy = lock(&check);
        let number = served.device.number();
        let detached = served.device.detach();
        drop(busy);
        match detached {
            Ok(()) => {
                self.closes.forget(number);
                self.holding.forget(key);
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
                served.device = *device;
                self.devices.insert(key.clone(), served);
                Some(text)
            }
        }
    }
}

fn discards(report: &ResourceReport, volume: u16) -> Discards {
    let device = report.devices.iter().find(|d| d.volume == volume);
    device.map_or(Discards::AsVolume, |d| options::discards(&d.device_options))
}

/// Without `auto-promote` nothing can be written before `primary`, and the kernel may say so.
fn access(report: &ResourceReport) -> BlockAccess {
    let auto_promote = report.options.get("auto-promote").map(String::as_str);
    if report.role == Role::Primary || auto_promote != Some("no") {
        BlockAccess::ReadWrite
    } else {
        BlockAccess::ReadOnly
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes away what dead daemons of this node left, but for the devices that are to be kept.
fn clean(place: &Place, keep: &[BlockNumber]) -> std::io::Result<()> {
    for left in clean_leftovers(&owner(place.dir()), keep)? {
        let device = left.number.path().display().to_string();
        match left.in_use {
            None => tracing::info!(device, "removed a dead daemon's device"),
            Some(users) => tracing::warn!(
                device,
                ?users,
                "a dead daemon's device is still in use; it goes with its last user"
            ),
        }
    }
    Ok(())
}

/// Below which directories links lead to devices.
fn link_roots(place: &Place) -> Vec<PathBuf> {
    let mut roots = vec![place.dev_dir()];
    if place.is_default() {
        roots.push(PathBuf::from("/dev"));
    }
    roots
}

/// Names the node in the files of loop devices. Loop devices belong to the machine, so nodes in
/// containers of one machine see those of each other, though their directories may have the same
/// path.
fn owner(dir: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    let place = std::fs::metadata(dir).map_or([0; 2], |found| [found.dev(), found.ino()]);
    let place = place.map(u64::to_ne_bytes);
    let hash = dir
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .chain(place.as_flattened())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_told_apart_by_their_directories_not_only_by_their_paths() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("node");
        std::fs::create_dir(&dir).unwrap();
        let first = owner(&dir);
        assert_eq!(owner(&dir), first, "the same after a restart");
        // As in another container: the same path, another directory.
        std::fs::rename(&dir, place.path().join("other")).unwrap();
        std::fs::create_dir(&dir).unwrap();
        assert_ne!(owner(&dir), first);
    }
}
