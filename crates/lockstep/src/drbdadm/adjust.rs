//! `adjust`: compares the running state with the configuration and schedules the differences.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_format::conf::model::{
    Address, Config, Connection, MetaDisk, Resource, Settings, Volume,
};
use lockstep_format::conf::options::{self, Change, Set};
use lockstep_format::conf::resolve::{ConnectionView, resync_after_minor};

use super::calls::{self, Call, OptionWords};
use super::commands::TimeClass;
use super::deferred::{Id, Schedule, Stage, Work, attach_calls};
use super::targets::Target;

/// What to leave out, and how to connect.
#[derive(Clone, Debug, Default)]
pub(super) struct Wishes {
    pub(super) skip_disk: bool,
    pub(super) skip_net: bool,
    /// Options for `connect`.
    pub(super) connect_words: Vec<String>,
}

/// Schedules the differences of one resource; `running` is none when it does not run at all.
pub(super) fn schedule(
    schedule: &mut Schedule,
    config: &Config,
    target: &Target,
    running: Option<&Resource>,
    wishes: &Wishes,
) {
    let resource = target.resource(config);
    let mut run = Run {
        schedule,
        config,
        resource,
        words: OptionWords { config, cli: &[] },
        wishes,
        first: None,
        last_new_minor: None,
        last_wait: None,
        waits: Vec::new(),
        disconnects: false,
        peer_devices: BTreeSet::new(),
    };
    run.resource_options(running);
    run.volumes(target, running);
    if !wishes.skip_net {
        run.connections(target, running);
    }
}

/// The state of one comparison.
struct Run<'a> {
    schedule: &'a mut Schedule,
    config: &'a Config,
    resource: &'a Resource,
    words: OptionWords<'a>,
    wishes: &'a Wishes,
    /// The call that creates the resource.
    first: Option<Id>,
    last_new_minor: Option<Id>,
    last_wait: Option<Id>,
    waits: Vec<Id>,
    disconnects: bool,
    /// Peer devices (peer, volume) whose options are scheduled already.
    peer_devices: BTreeSet<(u32, u32)>,
}

impl Run<'_> {
    fn resource_options(&mut self, running: Option<&Resource>) {
        let name = &self.resource.name;
        match running {
            None => {
                let call = self.words.new_resource(self.resource);
                self.first = Some(self.schedule.call(Stage::Prerequisite, name, call, None));
            }
            Some(running) => {
                let wanted = &self.resource.sections.options;
                if !self.same(Set::Resource, &running.sections.options, wanted) {
                    let call = Call::setup(["resource-options", name, "--set-defaults"])
                        .with(self.words.words(wanted));
                    self.schedule.call(Stage::Resource, name, call, None);
                }
            }
        }
    }

    fn volumes(&mut self, target: &Target, running: Option<&Resource>) {
        let mut numbers: BTreeMap<u32, (Option<&Volume>, Option<&Volume>)> = BTreeMap::new();
        let host = running.and_then(|running| running.hosts.first());
        let is_meant = |volume: &&Volume| target.volume.is_none_or(|only| only == volume.number);
        let known = host.into_iter().flat_map(|host| &host.volumes);
        for volume in known.filter(is_meant) {
            numbers.entry(volume.number).or_default().0 = Some(volume);
        }
        for volume in target.volumes(self.config) {
            numbers.entry(volume.number).or_default().1 = Some(volume);
        }
        let wanted = numbers.values().filter_map(|(_, wanted)| *wanted);
        let minors: BTreeSet<u32> = wanted.filter_map(Volume::minor).collect();
        for (running, wanted) in numbers.into_values() {
            match (running, wanted) {
                (Some(running), None) => {
                    if !self.wishes.skip_disk {
                        // Another volume that is to have its minor comes after it.
                        let gives = running.minor().is_some_and(|m| minors.contains(&m));
                        let after = self.last_new_minor.filter(|_| !gives);
                        self.remove(running, after);
                    }
                }
                (None, Some(wanted)) => self.create(wanted, self.first),
                (Some(running), Some(wanted)) => self.change(running, wanted),
                (None, None) => {}
            }
        }
    }

    /// A volume that goes: detach, del-minor.
    fn remove(&mut self, running: &Volume, after: Option<Id>) -> Id {
        self.detach(running, after);
        let minor = running.minor().unwrap_or_default().to_string();
        let call = Call::setup(["del-minor", &minor]);
        self.schedule
            .call(Stage::DiskPrepareDown, &self.resource.name, call, after)
    }

    fn detach(&mut self, running: &Volume, after: Option<Id>) {
        if running.disk_path().is_some() {
            let minor = running.minor().unwrap_or_default().to_string();
            let call = Call::setup(["detach", "--diskless", &minor]);
            self.schedule
                .call(Stage::DiskPrepareDown, &self.resource.name, call, after);
        }
    }

    /// A volume that comes: new-minor, attach, options of its peer devices.
    fn create(&mut self, wanted: &Volume, after: Option<Id>) {
        let name = &self.resource.name;
        let call = self.words.new_minor(self.resource, wanted);
        let minor = self.schedule.call(Stage::DiskPrepareUp, name, call, after);
        self.last_new_minor = Some(minor);
        if self.wishes.skip_disk {
            return;
        }
        self.attach(wanted, Some(minor));
        if !self.wishes.skip_net {
            for view in self.resource.my_connections() {
                self.peer_device(&view, wanted.number, Some(minor));
            }
        }
    }

    fn attach(&mut self, wanted: &Volume, after: Option<Id>) {
        if wanted.disk_path().is_some() {
            let work = Work::Calls(attach_calls(&self.words, wanted), TimeClass::Medium);
            self.schedule
                .add(Stage::Disk, &self.resource.name, work, after);
        }
    }

    fn change(&mut self, running: &Volume, wanted: &Volume) {
        if running.minor() != wanted.minor() {
            if self.wishes.skip_disk {
                return;
            }
            // The old minor goes first: two minors of one volume are refused.
            let gone = self.remove(running, None);
            self.create(wanted, Some(gone));
            return;
        }
        if self.wishes.skip_disk {
            return;
        }
        if !same_disk(running, wanted) {
            self.detach(running, None);
            self.attach(wanted, None);
            return;
        }
        if wanted.disk_path().is_none() {
            return;
        }
        self.resize(running, wanted);
        let [mut old, mut new] = [running, wanted].map(|volume| volume.settings.disk.clone());
        for settings in [&mut old, &mut new] {
            settings.0.retain(|setting| setting.name != "size");
        }
        if !self.same(Set::Disk, &old, &new) {
            let no_bitmap = |settings: &Settings| settings.get("bitmap") == Some("no");
            // A peer that is being added must find the bitmap enabled.
            let early = no_bitmap(&old) && !no_bitmap(&new);
            let stage = if early {
                Stage::DiskPrepareUp
            } else {
                Stage::Disk
            };
            let call = self.words.disk_options(wanted, &["--set-defaults"]);
            self.schedule.call(stage, &self.resource.name, call, None);
        }
    }

    fn resize(&mut self, running: &Volume, wanted: &Volume) {
        let size = options::find(Set::Disk, "size");
        let [old, new] = [running, wanted].map(|volume| {
            let text = volume.settings.disk.get("size").unwrap_or("0");
            size.and_then(|spec| spec.parse(text).ok())
        });
        if old == new {
            return;
        }
        let minor = wanted.minor().unwrap_or_default();
        let size = wanted.settings.disk.get("size").map(str::to_owned);
        let words = size.iter().map(|size| format!("--size={size}"));
        let calls = vec![
            Call::setup(["resize", &minor.to_string()]).with(words),
            Call::setup(["check-resize", &minor.to_string()]),
        ];
        let work = Work::Resize { minor, calls, size };
        self.schedule
            .add(Stage::Disk, &self.resource.name, work, None);
    }

    fn connections(&mut self, target: &Target, running: Option<&Resource>) {
        let views = target.connections(self.config);
        let known = running
            .map(|running| &running.connections[..])
            .unwrap_or_default();
        let find = |view: &ConnectionView<'_>| {
            known
                .iter()
                .find(|connection| connection.peer_node_id == Some(view.peer_node_id()))
        };
        for pass in [false, true] {
            for view in views
                .iter()
                .filter(|view| find(view).is_some_and(is_connected) == pass)
            {
                match find(view) {
                    None => self.new_connection(view, self.last_wait.or(self.first)),
                    Some(running) => self.change_connection(view, running),
                }
            }
        }
        if target.peer.is_none() {
            for connection in known {
                let is_wanted = views
                    .iter()
                    .any(|view| connection.peer_node_id == Some(view.peer_node_id()));
                if !is_wanted {
                    self.del_peer(connection.peer_node_id.unwrap_or_default());
                }
            }
        }
        self.cancel_waits(known.iter().any(is_connected));
    }

    fn new_connection(&mut self, view: &ConnectionView<'_>, after: Option<Id>) {
        let name = &self.resource.name;
        let call = self.words.net("new-peer", self.resource, view, &[]);
        let peer = Some(self.schedule.call(Stage::NetPrepareUp, name, call, after));
        for path in &view.paths {
            let call = calls::path("new-path", name, view.peer_node_id(), path);
            self.schedule.call(Stage::NetPath, name, call, peer);
        }
        for volume in self
            .resource
            .my_host()
            .into_iter()
            .flat_map(|host| &host.effective)
        {
            self.peer_device(view, volume.number, peer);
        }
        self.connect(view, peer);
    }

    fn change_connection(&mut self, view: &ConnectionView<'_>, running: &Connection) {
        let name = &self.resource.name;
        let id = view.peer_node_id();
        let after = self.last_wait;
        let [old, new] = [&running.net, &view.connection.net];
        let fixed = |settings: &Settings| {
            let mut only = settings.clone();
            only.0
                .retain(|setting| calls::is_fixed(Set::Net, &setting.name));
            only
        };
        if !self.same(Set::Net, &fixed(old), &fixed(new)) {
            self.disconnects = true;
            let call = Call::setup(["del-peer", name, &id.to_string()]);
            let gone = self.schedule.call(Stage::NetPrepareDown, name, call, after);
            self.peer_devices.retain(|(peer, _)| *peer != id);
            self.new_connection(view, Some(gone));
            return;
        }
        let mut connect = running.state.as_deref() == Some("StandAlone");
        connect |= self.paths(view, running, after);
        if !self.same(Set::Net, old, new) {
            let call = self
                .words
                .net("net-options", self.resource, view, &["--set-defaults"]);
            self.schedule.call(Stage::Net, name, call, after);
        }
        for volume in self
            .resource
            .my_host()
            .into_iter()
            .flat_map(|host| &host.effective)
        {
            let known = running
                .volumes
                .iter()
                .find(|known| known.number == volume.number);
            let old = known
                .map(|known| known.settings.clone())
                .unwrap_or_default();
            let new = calls::peer_device_settings(view, volume.number);
            if !self.same(Set::PeerDevice, &old, &new)
                && self.peer_devices.insert((id, volume.number))
            {
                let number = volume.number;
                let more = &["--set-defaults"];
                let call = self.words.peer_device(self.resource, view, number, more);
                self.schedule.call(Stage::PeerDevice, name, call, after);
            }
        }
        if connect {
            self.connect(view, after);
        }
    }

    /// Schedules the changes of paths; true when the connection has to be made anew.
    fn paths(
        &mut self,
        view: &ConnectionView<'_>,
        running: &Connection,
        after: Option<Id>,
    ) -> bool {
        let name = &self.resource.name;
        let id = view.peer_node_id();
        let wanted: Vec<(Address, Address)> = view
            .paths
            .iter()
            .map(|path| (normal(&path.own), normal(&path.connect_to)))
            .collect();
        let known: Vec<(&Address, &Address)> = running
            .paths
            .iter()
            .filter_map(|path| Some((path.this_host.as_ref()?, path.remote_host.as_ref()?)))
            .collect();
        let is_wanted =
            |(own, other): &(&Address, &Address)| wanted.contains(&(normal(own), normal(other)));
        let surplus: Vec<_> = known.iter().filter(|path| !is_wanted(path)).collect();
        let is_standalone = running.state.as_deref() == Some("StandAlone");
        let anew = known.len() == 1 && surplus.len() == 1 && !is_standalone;
        if anew {
            self.disconnects = true;
            let call = Call::setup(["disconnect", name, &id.to_string()]);
            self.schedule.call(Stage::NetDisconnect, name, call, after);
        }
        for (own, other) in surplus {
            let (own, other) = (own.argument(), other.argument());
            let call = Call::setup(["del-path", name, &id.to_string(), &own, &other]);
            self.schedule.call(Stage::NetPrepareDown, name, call, after);
        }
        for (path, (own, other)) in view.paths.iter().zip(&wanted) {
            let is_known = known
                .iter()
                .any(|known| normal(known.0) == *own && normal(known.1) == *other);
            if !is_known {
                let call = calls::path("new-path", name, id, path);
                self.schedule.call(Stage::NetPath, name, call, after);
            }
        }
        anew
    }

    fn peer_device(&mut self, view: &ConnectionView<'_>, number: u32, after: Option<Id>) {
        let is_empty = calls::peer_device_settings(view, number).is_empty();
        if is_empty || !self.peer_devices.insert((view.peer_node_id(), number)) {
            return;
        }
        let call = self
            .words
            .peer_device(self.resource, view, number, &["--set-defaults"]);
        self.schedule
            .call(Stage::PeerDevice, &self.resource.name, call, after);
    }

    fn connect(&mut self, view: &ConnectionView<'_>, after: Option<Id>) {
        let name = &self.resource.name;
        let id = view.peer_node_id().to_string();
        let call = Call::setup(["connect", name, &id]).with(self.wishes.connect_words.clone());
        let connect = self.schedule.call(Stage::NetConnect, name, call, after);
        let seconds = self.wait_seconds().to_string();
        let call = Call::setup([
            "wait-connect-connection",
            name,
            &id,
            "--wfc-timeout",
            &seconds,
            "--degr-wfc-timeout",
            &seconds,
            "--outdated-wfc-timeout",
            &seconds,
        ]);
        let wait = self
            .schedule
            .add(Stage::WaitConnect, name, Work::Wait(call), Some(connect));
        self.last_wait = Some(wait);
        self.waits.push(wait);
    }

    /// Twice the time in which a socket proves alive, in whole seconds, at least one.
    fn wait_seconds(&self) -> i64 {
        let tenths = ["socket-check-timeout", "ping-timeout"]
            .iter()
            .find_map(|name| {
                let text = self.resource.sections.net.get(name)?;
                options::find(Set::Net, name)?
                    .parse(text)
                    .ok()?
                    .number()
                    .filter(|number| *number > 0)
            });
        tenths.map_or(1, |tenths| (2 * tenths / 10).max(1))
    }

    fn del_peer(&mut self, id: u32) {
        self.disconnects = true;
        let name = &self.resource.name;
        let call = Call::setup(["del-peer", name, &id.to_string()]);
        self.schedule
            .call(Stage::NetPrepareDown, name, call, self.last_wait);
    }

    /// Waits only keep the quorum while connections are cycled one after another; where nothing
    /// that was connected goes, or nothing follows, they would only take time.
    fn cancel_waits(&mut self, was_connected: bool) {
        let needed = self.disconnects && was_connected;
        for wait in &self.waits {
            let is_last = self.last_wait == Some(*wait) && !self.schedule.is_depended_on(*wait);
            if !needed || is_last {
                self.schedule.cancel(*wait);
            }
        }
    }

    /// Whether running and wanted options mean the same.
    fn same(&self, set: Set, running: &Settings, wanted: &Settings) -> bool {
        let unknown: BTreeSet<&str> = running
            .0
            .iter()
            .filter(|setting| setting.unknown)
            .map(|setting| setting.name.as_str())
            .collect();
        options::all(set)
            .iter()
            .filter(|spec| spec.change != Change::CommandOnly)
            .all(|spec| {
                if unknown.contains(spec.name) {
                    return true;
                }
                let default = spec.default().to_string();
                let old = running.get(spec.name).unwrap_or(&default).to_owned();
                let new = wanted.get(spec.name).unwrap_or(&default).to_owned();
                if spec.name == "resync-after" && wanted.get(spec.name).is_some() {
                    let minor = resync_after_minor(self.config, &new);
                    let new = minor.map_or_else(|| "-1".to_owned(), |minor| minor.to_string());
                    return spec.same_value(&old, &new);
                }
                spec.same_value(&old, &new)
            })
    }
}

fn is_connected(connection: &Connection) -> bool {
    // Older output of `show` has no state.
    connection
        .state
        .as_deref()
        .is_none_or(|state| state == "Connected")
}

/// Whether both have the same backing disk and metadata; the index of metadata does not count.
fn same_disk(running: &Volume, wanted: &Volume) -> bool {
    let meta = |volume: &Volume| match &volume.meta_disk {
        _ if volume.disk_path().is_none() => None,
        None | Some(MetaDisk::Internal) => None,
        Some(MetaDisk::Flexible(path) | MetaDisk::Indexed(path, _)) => Some(path.clone()),
    };
    running.disk_path() == wanted.disk_path() && meta(running) == meta(wanted)
}

/// An address in one spelling.
fn normal(address: &Address) -> Address {
    let mut address = address.clone();
    if let Ok(parsed) = address.host.parse::<std::net::IpAddr>() {
        address.host = parsed.to_string();
    }
    address
}
