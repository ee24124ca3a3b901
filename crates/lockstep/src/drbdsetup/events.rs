//! `drbdsetup events2`: differences of consistent reports as lines (config-and-cli.md, 13).

use std::collections::BTreeMap;

use lockstep_daemon::names::Named;
use lockstep_daemon::report::{
    ConnectionReport, DeviceReport, PathReport, PeerDeviceReport, ResourceReport,
};

use super::paint::{Colour, Side, yes_no};
use super::status::{blocked, done_percent, eta_text, list_or_no, raw_progress};

/// What is printed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Detail {
    /// Statistics fields, and lines when only they changed.
    pub(super) statistics: bool,
    /// Every line carries all fields.
    pub(super) full: bool,
    /// The figures behind the progress of a resync or verify.
    pub(super) raw: bool,
    /// `OLD->NEW` for state fields.
    pub(super) diff: bool,
    pub(super) colour: Colour,
}

/// The word before the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Exists,
    Create,
    Change,
}

impl Verb {
    fn text(self) -> &'static str {
        match self {
            Verb::Exists => "exists",
            Verb::Create => "create",
            Verb::Change => "change",
        }
    }
}

/// Lines of the initial state, without the closing `exists -`.
pub(super) fn initial(resource: &ResourceReport, detail: Detail) -> Vec<String> {
    Lines {
        detail,
        first: Verb::Exists,
        out: Vec::new(),
    }
    .differences(None, Some(resource))
}

/// Lines from one state of a resource to the next.
pub(super) fn changes(
    old: Option<&ResourceReport>,
    new: Option<&ResourceReport>,
    detail: Detail,
) -> Vec<String> {
    Lines {
        detail,
        first: Verb::Create,
        out: Vec::new(),
    }
    .differences(old, new)
}

/// A `call helper` or `response helper` line.
pub(super) fn helper(
    resource: &str,
    peer: Option<(u8, &str)>,
    volume: Option<(u16, u32)>,
    helper: &str,
    status: Option<i32>,
) -> String {
    let mut line = match status {
        None => format!("call helper name:{resource}"),
        Some(_) => format!("response helper name:{resource}"),
    };
    if let Some((node, name)) = peer {
        line.push_str(&format!(" peer-node-id:{node} conn-name:{name}"));
    }
    if let Some((volume, minor)) = volume {
        line.push_str(&format!(" volume:{volume} minor:{minor}"));
    }
    line.push_str(&format!(" helper:{helper}"));
    if let Some(status) = status {
        line.push_str(&format!(" status:{status}"));
    }
    line
}

struct Lines {
    detail: Detail,
    /// What a new object is announced with.
    first: Verb,
    out: Vec<String>,
}

/// A field that is shown if it is new or has changed.
struct Field {
    key: &'static str,
    old: Option<String>,
    new: String,
}

/// Counters at the end of a line.
enum Tail<'a> {
    None,
    /// Printed where the line is printed anyway.
    Known(&'a str),
    /// They have changed.
    New(&'a str),
}

fn field<O>(key: &'static str, old: Option<&O>, new: &O, text: impl Fn(&O) -> String) -> Field {
    Field {
        key,
        old: old.map(&text),
        new: text(new),
    }
}

impl Field {
    fn changed(&self) -> bool {
        self.old.as_ref() != Some(&self.new)
    }
}

impl Lines {
    fn differences(
        mut self,
        old: Option<&ResourceReport>,
        new: Option<&ResourceReport>,
    ) -> Vec<String> {
        if let Some(new) = new {
            self.resource(old, new);
        }
        let name = old.or(new).map_or("", |r| r.name.as_str());
        let empty_connections = Vec::new();
        let empty_devices = Vec::new();
        let old_connections = old.map_or(&empty_connections, |r| &r.connections);
        let new_connections = new.map_or(&empty_connections, |r| &r.connections);
        let old_devices = old.map_or(&empty_devices, |r| &r.devices);
        let new_devices = new.map_or(&empty_devices, |r| &r.devices);
        let before = |id: u8| old_connections.iter().find(|c| c.peer_node_id == id);
        for connection in new_connections {
            // A path is established before its connection is connected, also if both are told at once.
            if let Some(old) = before(connection.peer_node_id) {
                self.established_paths(name, old, connection);
            }
            self.connection(name, before(connection.peer_node_id), connection);
        }
        for device in new_devices.iter().rev() {
            let before = old_devices.iter().find(|d| d.volume == device.volume);
            self.device(name, before, device);
        }
        for connection in new_connections {
            self.below_connection(name, before(connection.peer_node_id), Some(connection));
        }
        let gone: Vec<_> = old_connections
            .iter()
            .filter(|o| {
                !new_connections
                    .iter()
                    .any(|n| n.peer_node_id == o.peer_node_id)
            })
            .collect();
        for connection in &gone {
            self.below_connection(name, Some(connection), None);
        }
        for connection in &gone {
            self.out.push(format!(
                "destroy connection name:{name}{}",
                of_connection(connection)
            ));
        }
        for device in old_devices {
            if !new_devices.iter().any(|n| n.volume == device.volume) {
                self.out.push(format!(
                    "destroy device name:{name} volume:{}",
                    device.volume
                ));
            }
        }
        if new.is_none() && old.is_some() {
            self.out.push(format!("destroy resource name:{name}"));
        }
        self.out
    }

    fn below_connection(
        &mut self,
        name: &str,
        old: Option<&ConnectionReport>,
        new: Option<&ConnectionReport>,
    ) {
        let Some(any) = new.or(old) else { return };
        let id = of_connection(any);
        let none = Vec::new();
        let (old_devices, new_devices) = (
            old.map_or(&none, |c| &c.peer_devices),
            new.map_or(&none, |c| &c.peer_devices),
        );
        for device in new_devices.iter().rev() {
            let before = old_devices.iter().find(|d| d.volume == device.volume);
            self.peer_device(name, &id, before, device);
        }
        let none = Vec::new();
        let (old_paths, new_paths) = (
            old.map_or(&none, |c| &c.paths),
            new.map_or(&none, |c| &c.paths),
        );
        for path in new_paths.iter().rev() {
            let before = old_paths.iter().find(|p| same_path(p, path));
            if before.is_none_or(|before| !comes_first(before, path)) {
                self.path(name, &id, before, path);
            }
        }
        for path in old_paths
            .iter()
            .filter(|o| !new_paths.iter().any(|n| same_path(o, n)))
        {
            let (local, remote) = (&path.local, &path.remote);
            self.out.push(format!(
                "destroy path name:{name}{id} local:{local} peer:{remote}"
            ));
        }
        for device in old_devices {
            if !new_devices.iter().any(|n| n.volume == device.volume) {
                let volume = device.volume;
                self.out.push(format!(
                    "destroy peer-device name:{name}{id} volume:{volume}"
                ));
            }
        }
    }

    fn resource(&mut self, old: Option<&ResourceReport>, new: &ResourceReport) {
        let colour = self.detail.colour;
        let role = field("role", old, new, |r| {
            colour.role(Side::Own, r.role, r.role.text())
        });
        let suspended = field("suspended", old, new, |r| list_or_no(&r.suspended));
        let failing = field("force-io-failures", old, new, |r| {
            colour.failing(r.force_io_failures)
        });
        let mut groups = vec![vec![role], vec![suspended], vec![failing]];
        if self.detail.statistics {
            groups.push(vec![field("write-ordering", old, new, |r| {
                r.write_ordering.clone()
            })]);
        }
        groups.push(vec![
            field("may_promote", old, new, |r| {
                yes_no(r.may_promote).to_owned()
            }),
            field("promotion_score", old, new, |r| {
                r.promotion_score.to_string()
            }),
        ]);
        self.line(
            "resource",
            &format!(" name:{}", new.name),
            old.is_none(),
            groups,
            Tail::None,
        );
    }

    fn connection(&mut self, name: &str, old: Option<&ConnectionReport>, new: &ConnectionReport) {
        let colour = self.detail.colour;
        let mut groups = vec![
            vec![field("connection", old, new, |c| {
                colour.conn(c.state, c.state.text())
            })],
            vec![field("role", old, new, |c| {
                colour.role(Side::Peer, c.role, c.role.text())
            })],
        ];
        if self.detail.statistics {
            groups.push(vec![field("congested", old, new, |c| {
                yes_no(c.congested).to_owned()
            })]);
            groups.push(vec![
                field("ap-in-flight", old, new, |c| {
                    c.ap_in_flight_sectors.to_string()
                }),
                field("rs-in-flight", old, new, |c| {
                    c.rs_in_flight_sectors.to_string()
                }),
            ]);
        }
        let id = format!(" name:{name}{}", of_connection(new));
        self.line("connection", &id, old.is_none(), groups, Tail::None);
    }

    fn device(&mut self, name: &str, old: Option<&DeviceReport>, new: &DeviceReport) {
        let colour = self.detail.colour;
        let backing = |d: &DeviceReport| {
            d.disk
                .as_ref()
                .map_or_else(|| "none".to_owned(), |disk| disk.data_path.clone())
        };
        let disk =
            |d: &DeviceReport| colour.disk(Side::Own, d.disk_state, d.client, d.disk_state.text());
        let mut groups = vec![vec![
            field("backing_dev", old, new, backing),
            field("disk", old, new, disk),
            field("client", old, new, |d| yes_no(d.client).to_owned()),
            field("open", old, new, |d| colour.open(d.open)),
            field("quorum", old, new, |d| colour.quorum(d.quorum)),
        ]];
        if self.detail.statistics {
            let figures = vec![
                field("size", old, new, |d| (d.size_sectors / 2).to_string()),
                field("read", old, new, |d| (d.read_sectors / 2).to_string()),
                field("written", old, new, |d| (d.written_sectors / 2).to_string()),
                field("al-writes", old, new, |d| d.al_writes.to_string()),
                field("bm-writes", old, new, |d| d.bm_writes.to_string()),
                field("upper-pending", old, new, |d| d.upper_pending.to_string()),
                field("lower-pending", old, new, |d| d.lower_pending.to_string()),
                field("al-suspended", old, new, |d| {
                    yes_no(d.al_suspended).to_owned()
                }),
            ];
            // What the kernel tells with a change of state differs from before in figures that are not
            // printed, so those that are come along.
            if groups[0].iter().any(Field::changed) {
                groups[0].extend(figures);
            } else {
                groups.push(figures);
            }
            groups.push(vec![field("blocked", old, new, |d| blocked(d).to_owned())]);
        }
        let id = format!(" name:{name} volume:{} minor:{}", new.volume, new.minor);
        self.line("device", &id, old.is_none(), groups, Tail::None);
    }

    fn peer_device(
        &mut self,
        name: &str,
        id: &str,
        old: Option<&PeerDeviceReport>,
        new: &PeerDeviceReport,
    ) {
        let colour = self.detail.colour;
        let disk = |p: &PeerDeviceReport| {
            colour.disk(Side::Peer, p.disk_state, p.client, p.disk_state.text())
        };
        let groups = vec![
            vec![field("replication", old, new, |p| {
                colour.repl(p.repl_state, p.repl_state.text())
            })],
            vec![
                field("peer-disk", old, new, disk),
                field("peer-client", old, new, |p| yes_no(p.client).to_owned()),
            ],
            vec![field("resync-suspended", old, new, |p| {
                list_or_no(&p.resync_suspended)
            })],
        ];
        let counters = peer_device_counters(new, self.detail);
        // As with devices, they come along with every change of state.
        let tail = if old.is_none_or(|o| counters_differ(o, new)) {
            Tail::New(&counters)
        } else if self.detail.full || self.detail.statistics {
            Tail::Known(&counters)
        } else {
            Tail::None
        };
        let id = format!(" name:{name}{id} volume:{}", new.volume);
        self.line("peer-device", &id, old.is_none(), groups, tail);
    }

    fn established_paths(&mut self, name: &str, old: &ConnectionReport, new: &ConnectionReport) {
        let id = of_connection(new);
        for path in new.paths.iter().rev() {
            let before = old.paths.iter().find(|p| same_path(p, path));
            if let Some(before) = before.filter(|before| comes_first(before, path)) {
                self.path(name, &id, Some(before), path);
            }
        }
    }

    fn path(&mut self, name: &str, id: &str, old: Option<&PathReport>, new: &PathReport) {
        let groups = vec![vec![field("established", old, new, |p| {
            yes_no(p.established).to_owned()
        })]];
        let id = format!(" name:{name}{id} local:{} peer:{}", new.local, new.remote);
        self.line("path", &id, old.is_none(), groups, Tail::None);
    }

    fn line(
        &mut self,
        object: &str,
        id: &str,
        is_new: bool,
        groups: Vec<Vec<Field>>,
        tail: Tail<'_>,
    ) {
        let verb = if is_new { self.first } else { Verb::Change };
        let (tail, moved) = match tail {
            Tail::None => ("", false),
            Tail::Known(text) => (text, false),
            Tail::New(text) => (text, !text.is_empty()),
        };
        let any = groups.iter().flatten().any(Field::changed) || moved;
        if !is_new && !any {
            return;
        }
        let mut line = format!("{} {object}{id}", verb.text());
        for group in groups {
            if self.detail.full || is_new || group.iter().any(Field::changed) {
                for field in group {
                    self.one_field(&mut line, is_new, &field);
                }
            }
        }
        line.push_str(tail);
        self.out.push(line);
    }

    fn one_field(&self, line: &mut String, is_new: bool, field: &Field) {
        let number = field.new.bytes().all(|b| b.is_ascii_digit());
        let old = match &field.old {
            Some(old) => old.as_str(),
            None if number => "0",
            None => "UNKNOWN",
        };
        if self.detail.diff && (is_new || field.changed()) {
            line.push_str(&format!(" {}:{old}->{}", field.key, field.new));
        } else {
            line.push_str(&format!(" {}:{}", field.key, field.new));
        }
    }
}

fn same_path(a: &PathReport, b: &PathReport) -> bool {
    a.local == b.local && a.remote == b.remote
}

fn comes_first(old: &PathReport, new: &PathReport) -> bool {
    new.established && !old.established
}

fn of_connection(c: &ConnectionReport) -> String {
    format!(" peer-node-id:{} conn-name:{}", c.peer_node_id, c.name)
}

fn counters_differ(old: &PeerDeviceReport, new: &PeerDeviceReport) -> bool {
    (
        old.received_sectors,
        old.sent_sectors,
        old.out_of_sync_sectors,
    ) != (
        new.received_sectors,
        new.sent_sectors,
        new.out_of_sync_sectors,
    ) || (old.pending, old.unacked) != (new.pending, new.unacked)
        || old.resync.as_ref().map(|r| r.left_sectors)
            != new.resync.as_ref().map(|r| r.left_sectors)
}

/// Empty when there is nothing to say: no resync, and no statistics wanted.
fn peer_device_counters(p: &PeerDeviceReport, detail: Detail) -> String {
    let mut text = String::new();
    if let Some(resync) = &p.resync {
        text.push_str(&format!(" done:{:.2}", done_percent(resync)));
    }
    if detail.statistics {
        text.push_str(&format!(
            " received:{} sent:{} out-of-sync:{} pending:{} unacked:{}",
            p.received_sectors / 2,
            p.sent_sectors / 2,
            p.out_of_sync_sectors / 2,
            p.pending,
            p.unacked
        ));
        if let Some(resync) = &p.resync {
            if detail.raw {
                for (key, value) in raw_progress(p.repl_state, resync) {
                    text.push_str(&format!(" {key}:{value}"));
                }
            }
            let rate = f64::from(resync.rate_kib_s) / 1024.0;
            text.push_str(&format!(" dbdt1:{rate:.2} eta:{}", eta_text(resync)));
        }
    }
    text
}

/// The last known state of each resource: turns reports into lines.
#[derive(Debug, Default)]
pub(super) struct Known {
    resources: BTreeMap<String, ResourceReport>,
    /// Names of the connections that handlers were called for: one may go before its handler ends.
    called: BTreeMap<(String, u8), String>,
}

impl Known {
    /// The name of the connection that a handler is about.
    pub(super) fn called(&mut self, resource: &str, peer: u8, status: Option<i32>) -> String {
        let key = (resource.to_owned(), peer);
        let found = self.resources.get(resource).and_then(|report| {
            let mut connections = report.connections.iter();
            connections.find(|c| c.peer_node_id == peer)
        });
        let name = match found {
            Some(connection) => connection.name.clone(),
            None => self.called.get(&key).cloned().unwrap_or_default(),
        };
        match status {
            None => self.called.insert(key, name.clone()),
            Some(_) => self.called.remove(&key),
        };
        name
    }

    /// Lines for a resource as it is now.
    pub(super) fn changed(&mut self, new: ResourceReport, detail: Detail) -> Vec<String> {
        let lines = changes(self.resources.get(&new.name), Some(&new), detail);
        self.resources.insert(new.name.clone(), new);
        lines
    }

    /// Lines for a resource that is seen for the first time in the initial dump.
    pub(super) fn initial(&mut self, new: ResourceReport, detail: Detail) -> Vec<String> {
        let lines = initial(&new, detail);
        self.resources.insert(new.name.clone(), new);
        lines
    }

    /// Lines for a resource that has gone.
    pub(super) fn removed(&mut self, name: &str, detail: Detail) -> Vec<String> {
        let old = self.resources.remove(name);
        changes(old.as_ref(), None, detail)
    }

    /// A resource has another name.
    pub(super) fn rename(&mut self, name: &str, new_name: &str) {
        if let Some(mut resource) = self.resources.remove(name) {
            new_name.clone_into(&mut resource.name);
            self.resources.insert(new_name.to_owned(), resource);
        }
    }

    /// A resource as last seen.
    pub(super) fn get(&self, name: &str) -> Option<&ResourceReport> {
        self.resources.get(name)
    }
}

#[cfg(test)]
mod tests {
    use lockstep_core::state::{ConnState, DiskState, ReplState, Role};

    use super::super::sample;
    use super::*;

    fn detail() -> Detail {
        Detail {
            statistics: false,
            full: false,
            raw: false,
            diff: false,
            colour: Colour::Off,
        }
    }

    #[test]
    fn the_initial_state_of_the_specification() {
        assert_eq!(initial(&sample::web(), detail()).join("\n"), "\
exists resource name:web role:Primary suspended:no force-io-failures:no may_promote:no promotion_score:101
exists connection name:web peer-node-id:1 conn-name:bravo connection:Connected role:Secondary
exists connection name:web peer-node-id:2 conn-name:charlie connection:Connecting role:Unknown
exists device name:web volume:1 minor:11 backing_dev:none disk:Diskless client:yes open:yes quorum:yes
exists device name:web volume:0 minor:10 backing_dev:/dev/vg0/web0 disk:UpToDate client:no open:yes quorum:yes
exists peer-device name:web peer-node-id:1 conn-name:bravo volume:1 replication:Established peer-disk:UpToDate peer-client:no resync-suspended:no
exists peer-device name:web peer-node-id:1 conn-name:bravo volume:0 replication:SyncSource peer-disk:Inconsistent peer-client:no resync-suspended:no done:57.08
exists path name:web peer-node-id:1 conn-name:bravo local:ipv4:10.1.0.1:7790 peer:ipv4:10.1.0.2:7790 established:yes
exists peer-device name:web peer-node-id:2 conn-name:charlie volume:1 replication:Off peer-disk:DUnknown peer-client:no resync-suspended:no
exists peer-device name:web peer-node-id:2 conn-name:charlie volume:0 replication:Off peer-disk:DUnknown peer-client:no resync-suspended:no
exists path name:web peer-node-id:2 conn-name:charlie local:ipv4:10.2.0.1:7790 peer:ipv4:10.2.0.3:7790 established:no
exists path name:web peer-node-id:2 conn-name:charlie local:ipv4:10.1.0.1:7790 peer:ipv4:10.1.0.3:7790 established:no");
    }

    #[test]
    fn statistics_come_behind_the_state() {
        let lines = initial(
            &sample::web(),
            Detail {
                statistics: true,
                ..detail()
            },
        );
        assert!(lines.contains(&"exists device name:web volume:0 minor:10 backing_dev:/dev/vg0/web0 disk:UpToDate client:no open:yes quorum:yes size:1048576 read:2500 written:45000 al-writes:14 bm-writes:3 upper-pending:1 lower-pending:2 al-suspended:no blocked:no".to_owned()));
        assert!(lines.contains(&"exists peer-device name:web peer-node-id:1 conn-name:bravo volume:0 replication:SyncSource peer-disk:Inconsistent peer-client:no resync-suspended:no done:57.08 received:0 sent:150000 out-of-sync:450000 pending:0 unacked:1 dbdt1:52.08 eta:8".to_owned()));
    }

    #[test]
    fn the_figures_behind_the_progress_come_before_its_speed() {
        let detail = Detail {
            statistics: true,
            full: true,
            raw: true,
            ..detail()
        };
        let lines = initial(&sample::web(), detail);
        let wanted = " unacked:1 rs-total:2097152 rs-dt-start-ms:12000 rs-paused-ms:0 \
                      rs-dt0-ms:3000 rs-db0-sectors:300000 rs-dt1-ms:6000 rs-db1-sectors:640000 \
                      rs-failed:0 rs-same-csum:0 want:50.00 dbdt:48.71 dbdt0:48.83 dbdt1:52.08 \
                      eta:8";
        assert!(
            lines.iter().any(|line| line.ends_with(wanted)),
            "{lines:#?}"
        );
    }

    #[test]
    fn a_renamed_resource_is_compared_with_what_it_was() {
        let mut known = Known::default();
        known.initial(sample::web(), detail());
        known.rename("web", "shop");
        let mut shop = sample::web();
        shop.name = "shop".into();
        assert!(known.changed(shop.clone(), detail()).is_empty());
        shop.role = Role::Secondary;
        assert_eq!(
            known.changed(shop, detail()),
            ["change resource name:shop role:Secondary"]
        );
    }

    #[test]
    fn a_change_names_only_what_changed() {
        let old = sample::web();
        let mut new = old.clone();
        new.role = Role::Secondary;
        new.connections[1].state = ConnState::StandAlone;
        new.connections[0].peer_devices[1].repl_state = ReplState::VerifyS;
        assert_eq!(
            changes(Some(&old), Some(&new), detail()),
            [
                "change resource name:web role:Secondary",
                "change connection name:web peer-node-id:2 conn-name:charlie connection:StandAlone",
                "change peer-device name:web peer-node-id:1 conn-name:bravo volume:1 replication:VerifyS",
            ]
        );
        assert!(changes(Some(&old), Some(&old), detail()).is_empty());
        let diff = Detail {
            diff: true,
            ..detail()
        };
        assert_eq!(
            changes(Some(&old), Some(&new), diff)[0],
            "change resource name:web role:Primary->Secondary"
        );
    }

    #[test]
    fn a_path_is_established_before_its_connection_and_given_up_after_it() {
        let up = sample::web();
        let mut down = up.clone();
        let connection = &mut down.connections[0];
        connection.state = ConnState::Connecting;
        connection.paths[0].established = false;
        let words = |old, new| -> Vec<String> {
            let lines = changes(Some(old), Some(new), detail());
            let of = |line: &String| line.split(' ').nth(1).map(str::to_owned);
            lines.iter().filter_map(of).collect()
        };
        assert_eq!(words(&down, &up), ["path", "connection"]);
        assert_eq!(words(&up, &down), ["connection", "path"]);
    }

    #[test]
    fn figures_come_along_with_a_change_of_state() {
        let old = sample::web();
        let mut new = old.clone();
        new.devices[0].open = !new.devices[0].open;
        new.connections[0].peer_devices[1].repl_state = ReplState::VerifyS;
        let detail = Detail {
            statistics: true,
            ..detail()
        };
        let lines = changes(Some(&old), Some(&new), detail);
        let has = |start: &str, figures: &str| {
            let found = lines.iter().find(|line| line.starts_with(start));
            found.is_some_and(|line| line.contains(figures))
        };
        assert!(has("change device ", " size:"), "{lines:#?}");
        assert!(
            has("change peer-device ", " replication:VerifyS received:"),
            "{lines:#?}"
        );
    }

    #[test]
    fn progress_streams_without_statistics_but_counters_do_not() {
        let old = sample::web();
        let mut new = old.clone();
        new.connections[0].peer_devices[0]
            .resync
            .as_mut()
            .unwrap()
            .left_sectors = 0;
        new.connections[0].peer_devices[1].sent_sectors += 8;
        assert_eq!(
            changes(Some(&old), Some(&new), detail()),
            ["change peer-device name:web peer-node-id:1 conn-name:bravo volume:0 done:100.00",]
        );
    }

    #[test]
    fn full_lines_are_complete_but_come_for_what_changed_only() {
        let full = Detail {
            full: true,
            statistics: true,
            ..detail()
        };
        let old = sample::web();
        assert!(changes(Some(&old), Some(&old), full).is_empty());
        let mut new = old.clone();
        new.connections[0].peer_devices[1].sent_sectors += 8;
        let lines = changes(Some(&old), Some(&new), full);
        assert_eq!(lines.len(), 1, "{lines:?}");
        let start = "change peer-device name:web peer-node-id:1 conn-name:bravo volume:1 \
                     replication:Established peer-disk:UpToDate";
        assert!(lines[0].starts_with(start), "{}", lines[0]);
        // Another change of the same object brings the counters along.
        new = old.clone();
        new.connections[0].peer_devices[1].disk_state = DiskState::Outdated;
        let lines = changes(Some(&old), Some(&new), full);
        assert!(lines[0].contains(" sent:"), "{lines:?}");
    }

    #[test]
    fn children_go_before_their_parents() {
        let old = sample::web();
        let lines = changes(Some(&old), None, detail());
        assert_eq!(
            lines.first().unwrap(),
            "destroy path name:web peer-node-id:1 conn-name:bravo local:ipv4:10.1.0.1:7790 peer:ipv4:10.1.0.2:7790"
        );
        assert_eq!(
            lines[lines.len() - 5..],
            [
                "destroy connection name:web peer-node-id:1 conn-name:bravo",
                "destroy connection name:web peer-node-id:2 conn-name:charlie",
                "destroy device name:web volume:0",
                "destroy device name:web volume:1",
                "destroy resource name:web",
            ]
        );
    }

    #[test]
    fn the_end_of_a_handler_names_a_connection_that_has_gone() {
        let mut known = Known::default();
        known.changed(sample::web(), detail());
        assert_eq!(known.called("web", 1, None), "bravo");
        let mut without = sample::web();
        without.connections.retain(|c| c.peer_node_id != 1);
        known.changed(without, detail());
        assert_eq!(known.called("web", 1, Some(0)), "bravo");
        assert_eq!(known.called("web", 1, None), "");
    }

    #[test]
    fn helper_lines_name_what_they_are_about() {
        assert_eq!(
            helper(
                "web",
                Some((1, "bravo")),
                Some((0, 10)),
                "split-brain",
                Some(256)
            ),
            "response helper name:web peer-node-id:1 conn-name:bravo volume:0 minor:10 \
             helper:split-brain status:256"
        );
        assert_eq!(
            helper("web", None, None, "x", None),
            "call helper name:web helper:x"
        );
    }
}
