//! A node: its resources on their shards, and every command that changes them.

use std::collections::BTreeMap;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockstep_core::command::{Command, CommandError, ErrorCode};
use lockstep_core::options::ResourceOptions;
use lockstep_core::resource::{Resource, ResourceConfig};
use lockstep_core::state::Role;
use lockstep_format::conf::options::Set;
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_front::block::DeviceKind;
use lockstep_io::disk::CacheNotes;
use lockstep_io::port::{PortSink, VolumePort};
use lockstep_io::shard::{ResourceId, ResourceView, ShardConfig, ShardEnv, ShardHandle};
use lockstep_io::tcp::Acceptor;

use crate::address::{check_name, path, volume_nr};
use crate::board::Board;
use crate::devices::{Devices, OpenPort, Promote};
use crate::handlers::{self, FindHandler, Handlers};
use crate::meter::{Counted, Meter, Metering};
use crate::metrics::{AckCounts, VolumeCounts};
use crate::minors::{Minors, check_has_no_disk};
use crate::namespaces::Namespaces;
use crate::options::{self, Moment, OptionError};
use crate::path_pairs::PathPairs;
use crate::peers;
use crate::place::Place;
use crate::progress::Progress;
use crate::report::{
    Configured, ConfiguredPeer, ConfiguredVolume, DiskReport, OptionTexts, ResourceReport,
};
use crate::resync_order::{self, ResyncOrder};
use crate::touched::{self, Touched};
use crate::watching::Watching;

/// How a node is made.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Shard threads.
    pub shards: usize,
    /// Payload memory of each in bytes.
    pub pool_bytes: usize,
    /// Make mountable devices.
    pub devices: bool,
    /// How long a device's I/O waits for the next daemon if this one is killed; without it fails at
    /// once.
    pub hold: Option<Duration>,
    /// Which kind of block device volumes get.
    pub device_kind: DeviceKind,
    /// Volumes of this node that resync or verify at the same time; 0 is no limit.
    pub max_parallel_resyncs: usize,
    /// Newest protocol version that is offered to peers.
    pub protocol_max: u32,
    /// Looks handlers up in the configuration.
    pub find_handler: FindHandler,
}

/// A node.
pub struct Node {
    shards: Vec<ShardHandle<Resource>>,
    resources: Mutex<BTreeMap<String, Arc<Entry>>>,
    minors: Minors<Arc<Entry>>,
    path_pairs: PathPairs,
    namespaces: Namespaces,
    board: Arc<Board>,
    devices: Mutex<Devices>,
    handlers: Arc<Handlers>,
    touched: Arc<Touched>,
    watching: Watching,
    resync_order: ResyncOrder,
    protocol_max: u32,
    /// What users of each volume ask for; as long as the volume is configured.
    meters: Mutex<BTreeMap<(String, u16), Arc<Meter>>>,
}

/// A resource of the node.
struct Entry {
    shard: usize,
    id: ResourceId,
    node_id: u8,
    /// Held while a report is made and published, so that an older one never follows a newer one.
    configured: Mutex<State>,
}

struct State {
    configured: Configured,
    progress: Progress,
    /// The resource was removed: nothing is published any more.
    gone: bool,
}

/// What a command answers.
pub type CommandResult = Result<(), CommandError>;

/// Most resources of a node, of volumes and of paths of a resource: bounds what a client can use.
const MAX_RESOURCES: usize = 16_384;
const MAX_MINOR: u32 = (1 << 20) - 1;

fn refuse<T>(code: ErrorCode, text: impl Into<String>) -> Result<T, CommandError> {
    Err(CommandError {
        code,
        text: text.into(),
    })
}

impl From<OptionError> for CommandError {
    fn from(error: OptionError) -> CommandError {
        CommandError {
            code: error.code(),
            text: error.to_string(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// Starts shards, devices and the thread that keeps reports fresh.
    pub fn start(place: &Place, config: &NodeConfig) -> std::io::Result<Arc<Node>> {
        let board = Arc::new(Board::default());
        let handlers = Arc::new(Handlers::new(
            board.clone(),
            place.clone(),
            config.find_handler,
        ));
        let env = ShardEnv {
            acceptor: Acceptor::new()?,
            handlers: handlers.clone(),
        };
        let (wake, woken) = sync_channel(1);
        let touched = Arc::new(Touched::new(wake));
        let generations = touched.generations();
        let mut shards = Vec::new();
        let cache_notes = CacheNotes::of_this_boot(place.cache_dir());
        if let Err(error) = &cache_notes {
            tracing::warn!(%error, "a crash of this daemon will count as a loss of power");
        }
        let cache_notes = cache_notes.ok();
        for index in 0..config.shards {
            let shard = ShardConfig {
                cache_notes: cache_notes.clone(),
                pool_bytes: config.pool_bytes,
                reserve_bytes: config.pool_bytes / 2,
                ..ShardConfig::default()
            };
            let handle = ShardHandle::start(&format!("shard{index}"), shard, env.clone())?;
            let touched = touched.clone();
            handle.subscribe(Box::new(move |id, event, paths| {
                touched.event(index, id, event, paths);
            }));
            shards.push(handle);
        }
        let node = Arc::new(Node {
            watching: Watching::new(board.clone(), shards.clone()),
            shards,
            resources: Mutex::default(),
            minors: Minors::default(),
            path_pairs: PathPairs::default(),
            namespaces: Namespaces::default(),
            board: board.clone(),
            devices: Mutex::new(Devices::none()),
            handlers: handlers.clone(),
            touched,
            resync_order: ResyncOrder::new(config.max_parallel_resyncs),
            protocol_max: config.protocol_max,
            meters: Mutex::default(),
        });
        if config.devices {
            let weak = Arc::downgrade(&node);
            let open_port: OpenPort = Arc::new(move |resource, volume, sink| {
                weak.upgrade()?.open_port(resource, volume, sink)
            });
            let weak = Arc::downgrade(&node);
            let promote: Promote = Arc::new(move |name| match weak.upgrade() {
                Some(node) => node.promote(name),
                None => Err("the daemon is ending".to_owned()),
            });
            *lock(&node.devices) = Devices::start(
                board,
                place.clone(),
                config,
                generations,
                open_port,
                promote,
            )?;
        }
        let weak = Arc::downgrade(&node);
        handlers.close_by(Box::new(move |name| {
            if let Some(node) = weak.upgrade() {
                node.settle_closed(name);
            }
        }));
        let weak = Arc::downgrade(&node);
        handlers.after(Box::new(move |name| {
            if let Some(node) = weak.upgrade() {
                node.refresh(name);
            }
        }));
        let weak = Arc::downgrade(&node);
        std::thread::Builder::new()
            .name("reports".into())
            .spawn(move || {
                let mut elapsed = std::time::Instant::now();
                loop {
                    let tick = touched::wait(&woken, &mut elapsed);
                    let Some(node) = weak.upgrade() else { return };
                    node.follow(tick);
                }
            })?;
        Ok(node)
    }

    /// Reports and watchers.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// Whoever may watch.
    pub(crate) fn watching(&self) -> &Watching {
        &self.watching
    }

    /// Fresh reports of one resource or all, by name.
    pub fn reports(&self, resource: Option<&str>) -> Vec<ResourceReport> {
        let names: Vec<String> = match resource {
            Some(name) => vec![name.to_owned()],
            None => lock(&self.resources).keys().cloned().collect(),
        };
        for name in &names {
            self.refresh(name);
        }
        names
            .iter()
            .filter_map(|name| self.board.report(name))
            .collect()
    }

    /// A port of a volume for a front end.
    pub fn open_port(
        &self,
        resource: &str,
        volume: u16,
        sink: Box<dyn PortSink>,
    ) -> Option<Box<dyn VolumePort + Send>> {
        let entry = self.find(resource).ok()?;
        let discards = {
            let configured = &lock(&entry.configured).configured;
            options::discards(&configured.volumes.get(&volume)?.device_options)
        };
        let shard = &self.shards[entry.shard];
        let meter = lock(&self.meters)
            .entry((resource.to_owned(), volume))
            .or_default()
            .clone();
        let metering = Metering::new(meter, discards);
        let sink = metering.sink(sink);
        let port = shard.open_port(entry.id, VolumeNr(volume), sink).ok()??;
        Some(metering.port(Box::new(port)))
    }

    /// What users of the volumes have asked for, by resource and volume.
    pub fn counts(&self) -> Vec<VolumeCounts> {
        lock(&self.meters)
            .iter()
            .map(|((resource, volume), meter)| VolumeCounts {
                resource: resource.clone(),
                volume: *volume,
                kinds: meter.counted(),
            })
            .collect()
    }

    /// How long peers take to acknowledge writes, by resource, volume and peer.
    pub fn acks(&self) -> Vec<AckCounts> {
        let entries: Vec<(String, Arc<Entry>)> = lock(&self.resources)
            .iter()
            .map(|(name, entry)| (name.clone(), entry.clone()))
            .collect();
        let mut all = Vec::new();
        for (resource, entry) in entries {
            let Ok(Some(snapshot)) = self.shards[entry.shard].snapshot(entry.id) else {
                continue;
            };
            for connection in &snapshot.connections {
                for peer_device in &connection.peer_devices {
                    all.push(AckCounts {
                        resource: resource.clone(),
                        volume: peer_device.volume.0,
                        peer: connection.name.clone(),
                        counted: Counted::of_acks(&peer_device.ack_times),
                    });
                }
            }
        }
        all
    }

    pub(crate) fn devices(&self) -> Devices {
        lock(&self.devices).clone()
    }

    fn find(&self, name: &str) -> Result<Arc<Entry>, CommandError> {
        match lock(&self.resources).get(name) {
            Some(entry) => Ok(entry.clone()),
            None => refuse(
                ErrorCode::ERR_RES_NOT_KNOWN,
                format!("resource '{name}' is not known to this node; `drbdadm up` creates it"),
            ),
        }
    }

    /// The resource and volume behind a minor number.
    fn find_minor(&self, minor: u32) -> Result<(String, Arc<Entry>, VolumeNr), CommandError> {
        if let Some((entry, volume)) = self.minors.find(minor) {
            let state = lock(&entry.configured);
            let configured = &state.configured;
            if !state.gone && configured.volumes.contains_key(&volume.0) {
                let name = configured.name.clone();
                drop(state);
                return Ok((name, entry, volume));
            }
        }
        refuse(
            ErrorCode::ERR_MINOR_INVALID,
            format!("no volume has minor {minor}"),
        )
    }

    /// Runs a command on the core and waits for its answer.
    fn core(&self, entry: &Entry, command: Command) -> CommandResult {
        self.settle(entry, &command);
        match self.shards[entry.shard].command(entry.id, command).recv() {
            Ok(result) => result.map(|_| ()),
            Err(_) => refuse(ErrorCode::UNKNOWN_ERROR, "the daemon is ending"),
        }
    }

    /// Changes what is configured once the core has agreed, and publishes the result.
    fn done(
        &self,
        name: &str,
        entry: &Entry,
        result: CommandResult,
        change: impl FnOnce(&mut Configured),
    ) -> CommandResult {
        if result.is_ok() {
            change(&mut lock(&entry.configured).configured);
        }
        self.refresh(name);
        result
    }

    /// Publishes a resource as it is now.
    fn refresh(&self, name: &str) {
        let Ok(entry) = self.find(name) else { return };
        let mut state = lock(&entry.configured);
        if state.gone {
            return;
        }
        let Ok(Some(view)) = self.shards[entry.shard].view(entry.id) else {
            return;
        };
        let mut changed = false;
        // What led to it comes first; what came after it comes with a later view.
        let last = view.snapshot.step;
        while let Some(step) = self.touched.step(entry.shard, entry.id, last) {
            changed |= self.publish(&mut state, &step);
        }
        changed |= self.publish(&mut state, &view);
        if changed {
            drop(state);
            self.devices().look();
        }
    }

    /// Publishes what a resource looked like; `true` if more than counters changed.
    fn publish(&self, state: &mut State, view: &ResourceView) -> bool {
        let now = lockstep_io::shard::now();
        let mut report = ResourceReport::join(&state.configured, &view.snapshot, now);
        for connection in &mut report.connections {
            let used = view.paths.get(&NodeId(connection.peer_node_id));
            for p in &mut connection.paths {
                let path = path(&p.local, &p.remote);
                p.established = used.is_some_and(|used| path.is_ok_and(|p| used.contains(&p)));
            }
        }
        state.progress.follow(&mut report, now);
        self.board.publish(report)
    }

    /// The thread that keeps reports fresh: what the cores touched, and with the clock what moves.
    fn follow(&self, tick: bool) {
        let mut names = self.touched.take();
        if tick && self.board.wants_statistics() {
            names.extend(lock(&self.resources).keys().cloned());
        } else if tick {
            names.extend(self.board.in_progress());
        }
        for name in names {
            self.refresh(&name);
        }
        self.order_resyncs();
        if tick {
            self.watching.look();
        }
    }

    /// Tells every resource which of its resyncs wait for others of this node.
    fn order_resyncs(&self) {
        if !self.resync_order.is_wanted() {
            return;
        }
        let _turn = self.resync_order.turn();
        let entries: Vec<(String, Arc<Entry>)> = lock(&self.resources)
            .iter()
            .map(|(name, entry)| (name.clone(), entry.clone()))
            .collect();
        let mut volumes = BTreeMap::new();
        for (name, entry) in &entries {
            let Some(report) = self.board.report(name) else {
                continue;
            };
            let state = lock(&entry.configured);
            for (volume, configured) in &state.configured.volumes {
                let device = report.devices.iter().find(|d| d.volume == *volume);
                if let Some(device) = device {
                    let after = resync_order::resync_after(&configured.disk_options);
                    let id = (entry.shard, entry.id);
                    let seen = resync_order::seen(&report, id, device, after);
                    volumes.insert(configured.minor, seen);
                }
            }
        }
        for (told, verdict) in self.resync_order.news(volumes) {
            let entry = entries.iter().find(|(name, _)| *name == told.resource);
            let Some((_, entry)) = entry else { continue };
            let volume = VolumeNr(told.volume);
            let result = self.core(entry, Command::ResyncOrder { volume, verdict });
            if let Err(error) = result {
                // It has gone meanwhile.
                tracing::debug!(resource = told.resource, %error, "no order for a resync");
            }
        }
    }

    /// Refuses a `resync-after` that leads back to its volume.
    fn check_resync_after(&self, minor: u32, texts: &OptionTexts) -> CommandResult {
        if resync_order::resync_after(texts).is_none() {
            return Ok(());
        }
        let mut configured = BTreeMap::new();
        for entry in lock(&self.resources).values() {
            for volume in lock(&entry.configured).configured.volumes.values() {
                let after = resync_order::resync_after(&volume.disk_options);
                configured.insert(volume.minor, after);
            }
        }
        let follows = |minor| configured.get(&minor).copied().flatten();
        self.resync_order.check(minor, texts, follows)
    }

    // Resources.

    fn resource_config(&self, texts: &OptionTexts) -> Result<ResourceOptions, OptionError> {
        let options = options::resource(texts, &handlers::names())?;
        Ok(ResourceOptions {
            protocol_max: self.protocol_max,
            ..options
        })
    }

    pub(crate) fn new_resource(
        &self,
        name: &str,
        node_id: u32,
        given: &OptionTexts,
    ) -> CommandResult {
        check_name(name)?;
        let node_id = node(node_id)?;
        let texts = options::merged(Set::Resource, &OptionTexts::new(), given, Moment::Creation)?;
        let config = ResourceConfig {
            name: name.to_owned(),
            node_id,
            options: self.resource_config(&texts)?,
        };
        let seed = random().map_err(|error| CommandError {
            code: ErrorCode::UNKNOWN_ERROR,
            text: format!("reading /dev/urandom: {error}"),
        })?;
        let mut resources = lock(&self.resources);
        if resources.contains_key(name) {
            return refuse(
                ErrorCode::ERR_ALREADY_EXISTS,
                format!("resource '{name}' exists already"),
            );
        }
        if resources.len() >= MAX_RESOURCES {
            return refuse(
                ErrorCode::ERR_INVALID_REQUEST,
                format!("a node has at most {MAX_RESOURCES} resources"),
            );
        }
        let shard = self.touched.least_loaded(self.shards.len());
        let engine = Resource::new(config, seed);
        let Ok(id) = self.shards[shard].add_resource(name, engine) else {
            return refuse(ErrorCode::UNKNOWN_ERROR, "the daemon is ending");
        };
        self.touched.name(shard, id, name);
        let configured = Configured {
            name: name.to_owned(),
            options: texts,
            ..Configured::default()
        };
        let entry = Entry {
            shard,
            id,
            node_id: node_id.0,
            configured: Mutex::new(State {
                configured,
                progress: Progress::default(),
                gone: false,
            }),
        };
        resources.insert(name.to_owned(), Arc::new(entry));
        drop(resources);
        self.refresh(name);
        Ok(())
    }

    pub(crate) fn resource_options(
        &self,
        name: &str,
        given: &OptionTexts,
        moment: Moment,
    ) -> CommandResult {
        let entry = self.find(name)?;
        let old = lock(&entry.configured).configured.options.clone();
        let texts = options::merged(Set::Resource, &old, given, moment)?;
        let options = self.resource_config(&texts)?;
        let result = self.core(&entry, Command::ResourceOptions { options });
        self.done(name, &entry, result, |c| c.options = texts)
    }

    pub(crate) fn del_resource(&self, name: &str) -> CommandResult {
        let entry = self.find(name)?;
        {
            let state = lock(&entry.configured);
            if !state.configured.volumes.is_empty() {
                return refuse(
                    ErrorCode::ERR_RES_IN_USE,
                    format!("resource '{name}' still has volumes; `drbdsetup down` removes all"),
                );
            }
            if !state.configured.peers.is_empty() {
                return refuse(
                    ErrorCode::ERR_NET_CONFIGURED,
                    format!("resource '{name}' still has peers; `drbdsetup down` removes all"),
                );
            }
        }
        self.remove(name, &entry)
    }

    /// Another name for a running resource. Its devices bear the name in their links, so there may
    /// be none: it has to be Secondary.
    pub(crate) fn rename_resource(&self, name: &str, new: &str) -> CommandResult {
        check_name(new)?;
        let entry = self.find(name)?;
        let devices = self.devices();
        devices
            .release(name, None, false)
            .or_else(|users| refuse(ErrorCode::DEVICE_IN_USE, users))?;
        let renamed = self.rename(name, new, &entry);
        // Whichever name it has now, its devices may come back.
        for name in [name, new] {
            devices.resume(name);
        }
        devices.look_at(if renamed.is_ok() { new } else { name });
        renamed
    }

    fn rename(&self, name: &str, new: &str, entry: &Arc<Entry>) -> CommandResult {
        let mut resources = lock(&self.resources);
        if resources.contains_key(new) {
            return refuse(
                ErrorCode::ERR_ALREADY_EXISTS,
                format!("resource '{new}' exists already"),
            );
        }
        let mut state = lock(&entry.configured);
        if state.gone || resources.remove(name).is_none() {
            return refuse(
                ErrorCode::ERR_RES_NOT_KNOWN,
                format!("resource '{name}' has gone meanwhile"),
            );
        }
        resources.insert(new.to_owned(), entry.clone());
        new.clone_into(&mut state.configured.name);
        self.touched.name(entry.shard, entry.id, new);
        {
            let mut meters = lock(&self.meters);
            let all = std::mem::take(&mut *meters).into_iter();
            meters.extend(all.map(|((resource, volume), meter)| {
                let resource = if resource == name {
                    new.to_owned()
                } else {
                    resource
                };
                ((resource, volume), meter)
            }));
        }
        self.board.rename(name, new);
        match self.shards[entry.shard].rename_resource(entry.id, new) {
            Ok(_) => Ok(()),
            Err(_) => refuse(ErrorCode::UNKNOWN_ERROR, "the daemon is ending"),
        }
    }

    fn remove(&self, name: &str, entry: &Entry) -> CommandResult {
        self.handlers.wait_until_ended(name);
        {
            let mut state = lock(&entry.configured);
            state.gone = true;
            let mut meters = lock(&self.meters);
            for (volume, configured) in &state.configured.volumes {
                self.minors.free(configured.minor);
                meters.remove(&(name.to_owned(), *volume));
            }
            drop(meters);
            let peers = state.configured.peers.values();
            peers.for_each(|peer| self.path_pairs.free_all(peer));
            self.board.remove(name);
        }
        lock(&self.resources).remove(name);
        self.touched.forget(entry.shard, entry.id);
        self.devices().set_explicit(name, false);
        self.devices().resume(name);
        match self.shards[entry.shard].remove_resource(entry.id) {
            Ok(_) => Ok(()),
            Err(_) => refuse(ErrorCode::UNKNOWN_ERROR, "the daemon is ending"),
        }
    }

    /// Secondary, disconnected, detached, gone.
    pub(crate) fn down(&self, name: &str) -> CommandResult {
        let entry = self.find(name)?;
        self.take_devices(name, None, false)?;
        let result = match self.demote(name, &entry, false) {
            Ok(()) => self.core(&entry, Command::Down),
            refused => refused,
        };
        if result.is_err() {
            self.devices().resume(name);
            self.refresh(name);
            return result;
        }
        self.remove(name, &entry)
    }

    pub(crate) fn primary(&self, name: &str, force: bool) -> CommandResult {
        let entry = self.find(name)?;
        self.settle_closed(name);
        let result = self.core(&entry, Command::Primary { force });
        if result.is_ok() {
            self.devices().set_explicit(name, true);
        }
        self.refresh(name);
        if result.is_ok() {
            // Whoever promotes is going to mount next.
            self.devices().look_at(name);
        }
        result
    }

    /// Primary for a device that waits.
    fn promote(&self, name: &str) -> Result<(), String> {
        let entry = self.find(name).map_err(|error| error.text)?;
        let result = self.core(&entry, Command::Primary { force: false });
        if result.is_ok() {
            self.devices().set_explicit(name, true);
        }
        self.refresh(name);
        result.map_err(|error| error.text)
    }

    pub(crate) fn secondary(&self, name: &str, force: bool) -> CommandResult {
        let entry = self.find(name)?;
        self.refresh(name);
        // A Secondary's readers stay.
        let is_primary = |report: ResourceReport| report.role == Role::Primary;
        if self.board.report(name).is_some_and(is_primary) {
            self.take_devices(name, None, force)?;
        }
        let result = self.demote(name, &entry, force);
        self.refresh(name);
        self.devices().resume(name);
        self.devices().look_at(name);
        result
    }

    fn demote(&self, name: &str, entry: &Entry, force: bool) -> CommandResult {
        let result = self.core(entry, Command::Secondary { force });
        if result.is_ok() {
            self.devices().set_explicit(name, false);
        }
        result
    }

    /// Takes devices away: the kernel refuses that while somebody uses one.
    fn take_devices(&self, name: &str, volume: Option<u16>, force: bool) -> CommandResult {
        self.devices()
            .release(name, volume, force)
            .or_else(|users| refuse(ErrorCode::DEVICE_IN_USE, users))
    }

    pub(crate) fn suspend_io(&self, minor: u32) -> CommandResult {
        let (name, entry, _) = self.find_minor(minor)?;
        let result = self.core(&entry, Command::SuspendIo);
        self.done(&name, &entry, result, |_| {})
    }

    pub(crate) fn resume_io(&self, minor: u32) -> CommandResult {
        let (name, entry, _) = self.find_minor(minor)?;
        let result = self.core(&entry, Command::ResumeIo);
        self.done(&name, &entry, result, |_| {})
    }

    // Volumes.

    pub(crate) fn new_minor(
        &self,
        name: &str,
        minor: u32,
        volume: u32,
        given: &OptionTexts,
    ) -> CommandResult {
        let entry = self.find(name)?;
        let texts = options::merged(Set::Device, &OptionTexts::new(), given, Moment::Creation)?;
        let volume = volume_nr(volume)?;
        if minor > MAX_MINOR {
            return refuse(
                ErrorCode::ERR_MINOR_INVALID,
                format!("minor {minor}: the largest is {MAX_MINOR}"),
            );
        }
        if let Err(owner) = self.minors.take(minor, entry.clone(), volume) {
            let owner = lock(&owner.configured).configured.name.clone();
            return refuse(
                ErrorCode::ERR_MINOR_OR_VOLUME_EXISTS,
                format!("minor {minor} belongs to resource '{owner}'"),
            );
        }
        let diskless = options::is_diskless(&texts);
        let result = self.core(
            &entry,
            Command::NewVolume {
                volume,
                minor,
                diskless,
            },
        );
        if result.is_err() {
            self.minors.free(minor);
        }
        self.done(name, &entry, result, |c| {
            let new = ConfiguredVolume {
                minor,
                device_options: texts,
                ..ConfiguredVolume::default()
            };
            c.volumes.insert(volume.0, new);
        })
    }

    pub(crate) fn del_minor(&self, minor: u32) -> CommandResult {
        let (name, entry, volume) = self.find_minor(minor)?;
        // Said before who has it open.
        if let Ok(Some(snapshot)) = self.shards[entry.shard].snapshot(entry.id) {
            check_has_no_disk(&snapshot, volume)?;
        }
        self.take_devices(&name, Some(volume.0), false)?;
        let result = self.core(&entry, Command::DelVolume { volume });
        if result.is_ok() {
            lock(&self.meters).remove(&(name.clone(), volume.0));
            self.minors.free(minor);
        }
        let result = self.done(&name, &entry, result, |c| {
            c.volumes.remove(&volume.0);
            for peer in c.peers.values_mut() {
                peer.peer_device_options.remove(&volume.0);
            }
        });
        self.devices().resume(&name);
        result
    }

    pub(crate) fn attach(
        &self,
        minor: u32,
        data_path: String,
        meta_path: String,
        meta_index: &str,
        given: &OptionTexts,
    ) -> CommandResult {
        use lockstep_core::command::MetaIndex;
        let (name, entry, volume) = self.find_minor(minor)?;
        let texts = options::merged(Set::Disk, &OptionTexts::new(), given, Moment::Creation)?;
        peers::check_bitmap(&texts, &lock(&entry.configured).configured)?;
        let disk_options = options::disk(&texts)?;
        self.check_resync_after(minor, &texts)?;
        let (index, meta) = match meta_index {
            "internal" => (MetaIndex::Internal, None),
            "flexible" => (MetaIndex::FlexExternal, Some(meta_path.clone())),
            number => match number.parse() {
                Ok(index) => (MetaIndex::Indexed(index), Some(meta_path.clone())),
                Err(_) => {
                    return refuse(
                        ErrorCode::ERR_INVALID_REQUEST,
                        format!(
                            "meta-disk index '{number}': internal, flexible or a number is needed"
                        ),
                    );
                }
            },
        };
        let disk = DiskReport {
            meta_path: meta.clone().unwrap_or_else(|| data_path.clone()),
            data_path: data_path.clone(),
            meta_index: meta_index.to_owned(),
        };
        // Reports name the disk while it is being attached.
        let before = {
            let mut state = lock(&entry.configured);
            let slot = state.configured.volumes.get_mut(&volume.0);
            slot.map(|v| {
                (
                    v.disk.replace(disk),
                    std::mem::replace(&mut v.disk_options, texts),
                )
            })
        };
        let result = self.core(
            &entry,
            Command::Attach {
                volume,
                data_path,
                meta_path: meta,
                index,
                options: disk_options,
            },
        );
        if let (Err(_), Some((disk, texts))) = (&result, before)
            && let Some(v) = lock(&entry.configured)
                .configured
                .volumes
                .get_mut(&volume.0)
        {
            v.disk = disk;
            v.disk_options = texts;
        }
        self.refresh(&name);
        if result.is_ok() {
            // Its device is there when the command returns.
            self.devices().look_at(&name);
        }
        self.order_resyncs();
        result
    }

    pub(crate) fn disk_options(
        &self,
        minor: u32,
        given: &OptionTexts,
        moment: Moment,
    ) -> CommandResult {
        let (name, entry, volume) = self.find_minor(minor)?;
        let state = lock(&entry.configured);
        let old = state.configured.volumes.get(&volume.0);
        let old = old.map(|v| v.disk_options.clone()).unwrap_or_default();
        let texts = options::merged(Set::Disk, &old, given, moment)?;
        peers::check_bitmap(&texts, &state.configured)?;
        drop(state);
        let options = options::disk(&texts)?;
        self.check_resync_after(minor, &texts)?;
        let result = self.core(&entry, Command::DiskOptions { volume, options });
        let result = self.done(&name, &entry, result, |c| {
            if let Some(v) = c.volumes.get_mut(&volume.0) {
                v.disk_options = texts;
            }
        });
        self.order_resyncs();
        result
    }

    pub(crate) fn detach(&self, minor: u32, force: bool, diskless: bool) -> CommandResult {
        let (name, entry, volume) = self.find_minor(minor)?;
        let result = self.core(
            &entry,
            Command::Detach {
                volume,
                force,
                diskless,
            },
        );
        self.done(&name, &entry, result, |c| {
            if let Some(v) = c.volumes.get_mut(&volume.0) {
                v.disk = None;
                v.disk_options.clear();
                if diskless {
                    v.device_options
                        .insert("diskless".to_owned(), "yes".to_owned());
                }
            }
        })
    }

    /// A command about a volume that changes no configuration.
    pub(crate) fn volume_command(
        &self,
        minor: u32,
        command: impl FnOnce(VolumeNr) -> Result<Command, CommandError>,
    ) -> CommandResult {
        let (name, entry, volume) = self.find_minor(minor)?;
        let result = self.core(&entry, command(volume)?);
        self.done(&name, &entry, result, |_| {})
    }

    // Peers.

    pub(crate) fn new_peer(&self, name: &str, peer: u32, given: &OptionTexts) -> CommandResult {
        let entry = self.find(name)?;
        let peer = node(peer)?;
        if peer.0 == entry.node_id {
            return refuse(
                ErrorCode::ERR_INVALID_PEER_NODE_ID,
                format!("node id {} is this node's own", peer.0),
            );
        }
        let mut texts = options::merged(Set::Net, &OptionTexts::new(), given, Moment::Creation)?;
        peers::check_new(&mut texts, peer, &lock(&entry.configured).configured)?;
        let net = options::net(&texts)?;
        let result = self.core(&entry, Command::NewPeer { peer, net });
        self.done(name, &entry, result, |c| {
            c.peers.insert(
                peer.0,
                ConfiguredPeer {
                    options: texts,
                    ..ConfiguredPeer::default()
                },
            );
        })
    }

    pub(crate) fn del_peer(&self, name: &str, peer: u32, force: bool) -> CommandResult {
        let entry = self.find(name)?;
        let peer = node(peer)?;
        let disconnected = self.core(&entry, Command::Disconnect { peer, force });
        match disconnected {
            Err(error) if error.code != ErrorCode::ALREADY_STANDALONE => return Err(error),
            Ok(()) | Err(_) => {}
        }
        self.handlers.wait_until_ended(name);
        let result = self.core(&entry, Command::DelPeer { peer });
        self.done(name, &entry, result, |c| {
            let gone = c.peers.remove(&peer.0);
            gone.iter().for_each(|peer| self.path_pairs.free_all(peer));
        })
    }

    pub(crate) fn net_options(
        &self,
        name: &str,
        peer: u32,
        given: &OptionTexts,
        moment: Moment,
    ) -> CommandResult {
        let entry = self.find(name)?;
        let peer = node(peer)?;
        let mut old = known_peer(&entry, peer)?.options;
        if let Ok(Some(snapshot)) = self.shards[entry.shard].snapshot(entry.id)
            && let Some(conn) = snapshot.connections.iter().find(|conn| conn.peer == peer)
        {
            old = options::with_shared(&old, &conn.shared);
        }
        let mut texts = options::merged(Set::Net, &old, given, moment)?;
        peers::name(&mut texts, peer, &lock(&entry.configured).configured)?;
        let net = options::net(&texts)?;
        let result = self.core(&entry, Command::NetOptions { peer, net });
        let result = self.done(name, &entry, result, |c| {
            if let Some(configured) = c.peers.get_mut(&peer.0) {
                configured.options = texts;
            }
        });
        self.tell_paths(&entry, peer)?;
        result
    }

    pub(crate) fn connect(
        &self,
        name: &str,
        peer: u32,
        discard_my_data: bool,
        tentative: bool,
    ) -> CommandResult {
        let entry = self.find(name)?;
        let peer = node(peer)?;
        if known_peer(&entry, peer)?.paths.is_empty() {
            return refuse(
                ErrorCode::ERR_INVALID_REQUEST,
                format!("node {} has no path; `drbdsetup new-path` adds one", peer.0),
            );
        }
        let result = self.core(
            &entry,
            Command::Connect {
                peer,
                discard_my_data,
                tentative,
            },
        );
        self.done(name, &entry, result, |_| {})
    }

    /// A command about a peer that changes no configuration.
    pub(crate) fn peer_command(
        &self,
        name: &str,
        peer: u32,
        command: impl FnOnce(NodeId) -> Command,
    ) -> CommandResult {
        let entry = self.find(name)?;
        let peer = node(peer)?;
        let result = self.core(&entry, command(peer));
        self.done(name, &entry, result, |_| {})
    }

    /// A command about a volume with a peer that changes no configuration.
    pub(crate) fn peer_device_command(
        &self,
        name: &str,
        peer: u32,
        volume: u32,
        command: impl FnOnce(NodeId, VolumeNr) -> Command,
    ) -> CommandResult {
        let volume = volume_nr(volume)?;
        self.peer_command(name, peer, |peer| command(peer, volume))
    }

    pub(crate) fn peer_device_options(
        &self,
        name: &str,
        peer: u32,
        volume: u32,
        given: &OptionTexts,
        moment: Moment,
    ) -> CommandResult {
        let entry = self.find(name)?;
        let (peer, volume) = (node(peer)?, volume_nr(volume)?);
        let known = known_peer(&entry, peer)?;
        let old = known
            .peer_device_options
            .get(&volume.0)
            .cloned()
            .unwrap_or_default();
        let texts = options::merged(Set::PeerDevice, &old, given, moment)?;
        let options = options::peer_device(&texts)?;
        let result = self.core(
            &entry,
            Command::PeerDeviceOptions {
                peer,
                volume,
                options,
            },
        );
        self.done(name, &entry, result, |c| {
            if let Some(configured) = c.peers.get_mut(&peer.0) {
                configured.peer_device_options.insert(volume.0, texts);
            }
        })
    }
}

fn known_peer(entry: &Entry, peer: NodeId) -> Result<ConfiguredPeer, CommandError> {
    match lock(&entry.configured).configured.peers.get(&peer.0) {
        Some(configured) => Ok(configured.clone()),
        None => refuse(
            ErrorCode::ERR_INVALID_REQUEST,
            format!("there is no connection to node {}", peer.0),
        ),
    }
}

/// A node id, checked.
pub(crate) fn node(id: u32) -> Result<NodeId, CommandError> {
    match NodeId::new(id) {
        Some(node) => Ok(node),
        None => refuse(
            ErrorCode::ERR_INVALID_PEER_NODE_ID,
            format!("node id {id}: the largest is {}", NodeId::COUNT - 1),
        ),
    }
}

#[path = "node_end.rs"]
mod end;
pub use end::Left;
#[path = "node_paths.rs"]
mod paths;
#[path = "node_settle.rs"]
mod settle;

/// A seed that nobody can guess, for UUIDs.
fn random() -> std::io::Result<u64> {
    use std::io::Read;
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}
