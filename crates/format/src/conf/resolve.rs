//! From what was written to what holds: which host we are, volumes, connections, node ids, checks.
//!
//! [`resolve`] is always needed before a configuration is used; [`inherit()`] copies options from
//! general to special sections and is needed for everything but a plain dump.

mod connections;
mod inherit;
mod proxied;
mod volumes;

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::model::{
    Address, Config, Connection, Endpoint, Host, HostKind, Path, Pos, Proxy, Resource, Via,
};
use super::parse::{Diagnostic, Severity};

pub(super) use connections::end_address;
pub use inherit::inherit;
pub use proxied::check_proxied;

/// The machine on which the configuration is used.
pub struct Node<'a> {
    /// Its host name.
    pub name: &'a str,
    /// Whether an address is configured on one of its interfaces.
    pub has_address: &'a dyn Fn(&Address) -> bool,
}

/// Completes a configuration for a node. The messages are in the order found.
///
/// Also run it over several files' resources together: names and addresses are checked across all.
pub fn resolve(config: &mut Config, node: &Node<'_>) -> Vec<Diagnostic> {
    let mut report = Report::default();
    stacked_names(config, &mut report);
    for index in 0..config.resources.len() {
        volumes::complete(config, index);
    }
    // The disks of stacked sections are the devices of the lower resources, complete by now.
    volumes::complete_stacked(config);
    for index in 0..config.resources.len() {
        select_host(config, index, node, &mut report);
        connections::complete(config, index, &mut report);
        volumes::check(config, index, &mut report);
        volumes::check_references(config, index, &mut report);
    }
    volumes::check_unique(config, &mut report);
    connections::check_addresses(config, &mut report);
    report.0
}

/// Messages with their places.
#[derive(Debug, Default)]
struct Report(Vec<Diagnostic>);

impl Report {
    fn error(&mut self, config: &Config, pos: Pos, text: &str) {
        self.push(Severity::Error, config, pos, text);
    }

    fn push(&mut self, severity: Severity, config: &Config, pos: Pos, text: &str) {
        let text = format!("{}: {text}", config.place(pos));
        self.0.push(Diagnostic {
            severity,
            pos: Some(pos),
            text,
        });
    }
}

/// Gives stacked sections the names of all hosts of the lower resource.
fn stacked_names(config: &mut Config, report: &mut Report) {
    let names: BTreeMap<String, Vec<String>> = config
        .resources
        .iter()
        .map(|resource| {
            let hosts = resource
                .hosts
                .iter()
                .flat_map(|host| host.names.iter().cloned());
            (resource.name.clone(), hosts.collect())
        })
        .collect();
    let mut missing = Vec::new();
    for resource in &mut config.resources {
        let own_name = resource.name.clone();
        for host in &mut resource.hosts {
            let HostKind::Stacked { lower } = &host.kind else {
                continue;
            };
            match names.get(lower) {
                Some(names) if *lower != own_name => host.names = names.clone(),
                _ => missing.push((
                    host.pos,
                    format!("in resource {own_name}, referenced resource '{lower}' not defined."),
                )),
            }
        }
    }
    for (pos, text) in missing {
        report.error(config, pos, &text);
    }
}

/// Finds the host section of this node.
fn select_host(config: &mut Config, index: usize, node: &Node<'_>, report: &mut Report) {
    let resource = &config.resources[index];
    let matching: Vec<usize> = resource
        .hosts
        .iter()
        .enumerate()
        .filter(|(_, host)| is_me(host, node, config))
        .map(|(index, _)| index)
        .collect();
    if let [first, second, ..] = matching[..] {
        let heads = [first, second].map(|host| head(&resource.hosts[host]));
        let text = format!(
            "in resource {}, {} ... {}:\n\tThere are multiple host sections for this node.",
            resource.name, heads[0], heads[1]
        );
        report.error(config, resource.hosts[second].pos, &text);
    }
    let me = matching.first().copied();
    if let Some(host) = me {
        check_device_names(config, &config.resources[index].hosts[host], report);
    }
    let resource = &mut config.resources[index];
    resource.me = me;
    resource.proxy_only = me.is_none() && runs_proxy(resource, node.name);
}

fn is_me(host: &Host, node: &Node<'_>, config: &Config) -> bool {
    match &host.kind {
        HostKind::On => host.names.iter().any(|name| same_host(name, node.name)),
        HostKind::Floating => host
            .address
            .as_ref()
            .is_some_and(|address| (node.has_address)(address) || address.host == node.name),
        // A section on top of a resource is ours if the lower one has a section of ours. Looking
        // one level down is enough: a stacked resource cannot be the lower one of another.
        HostKind::Stacked { lower } => config.resource(lower).is_some_and(|lower| {
            lower.hosts.iter().any(|host| {
                !matches!(host.kind, HostKind::Stacked { .. }) && is_me(host, node, config)
            })
        }),
        HostKind::ThisHost => true,
    }
}

/// Whether a node that has no host section runs a proxy of the resource.
fn runs_proxy(resource: &Resource, name: &str) -> bool {
    let old = resource.hosts.iter().filter_map(|host| host.proxy.as_ref());
    let ends = resource
        .connections
        .iter()
        .flat_map(|conn| &conn.paths)
        .flat_map(|path| &path.ends);
    let new = ends.filter_map(|end| match &end.via {
        Some(Via::Proxy(proxy)) => Some(proxy),
        _ => None,
    });
    old.chain(new)
        .flat_map(|proxy| &proxy.hosts)
        .any(|host| same_host(host, name))
}

/// Names of hosts are the same without regard to case; the domain counts only if both have one.
pub fn same_host(left: &str, right: &str) -> bool {
    let (left_label, left_domain) = left
        .split_once('.')
        .map_or((left, None), |(l, d)| (l, Some(d)));
    let (right_label, right_domain) = right
        .split_once('.')
        .map_or((right, None), |(l, d)| (l, Some(d)));
    left_label.eq_ignore_ascii_case(right_label)
        && match (left_domain, right_domain) {
            (Some(left), Some(right)) => left.eq_ignore_ascii_case(right),
            _ => true,
        }
}

/// The introduction of a host section, for messages.
fn head(host: &Host) -> String {
    match &host.kind {
        HostKind::On => format!("on {} {{ ... }}", host.names.join(" ")),
        HostKind::Floating => {
            let address = host
                .address
                .as_ref()
                .map(Address::to_string)
                .unwrap_or_default();
            format!("floating {address} {{ ... }}")
        }
        HostKind::Stacked { lower } => format!("stacked-on-top-of {lower} {{ ... }}"),
        HostKind::ThisHost => "_this_host { ... }".into(),
    }
}

/// The rules for device names, which hold on this node only.
fn check_device_names(config: &Config, host: &Host, report: &mut Report) {
    for volume in &host.effective {
        let Some(device) = &volume.device else {
            continue;
        };
        let Some(name) = &device.name else { continue };
        let Some(rest) = name.strip_prefix("/dev/drbd") else {
            let text = "device name must start with /dev/drbd\n\
                        \t(/dev/ is optional, but drbd is required)";
            report.error(config, device.pos, text);
            continue;
        };
        let minor = device.minor;
        if rest.parse() != Ok(minor) && !rest.starts_with('_') {
            let text = format!(
                "explicit minor number must match with device name\n\
                 \tTry \"device /dev/drbd{minor} minor {minor};\",\n\
                 \tor leave off either device name or explicit minor.\n\
                 \tArbitrary device names must start with /dev/drbd_\n\
                 \tmind the '_'! (/dev/ is optional, but drbd_ is required)"
            );
            report.error(config, device.pos, &text);
        }
    }
}

/// A path as this node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathView<'a> {
    /// Own address.
    pub own: Address,
    /// The peer's address as written.
    pub peer: Address,
    /// Where to connect to: own proxy, the peer's outside address, or the peer itself.
    pub connect_to: Address,
    /// Own end has a proxy.
    pub own_proxy: Option<&'a Proxy>,
    /// The peer's end has a proxy.
    pub peer_proxy: Option<&'a Proxy>,
}

/// A connection as one of its hosts sees it.
#[derive(Clone, Debug)]
pub struct ConnectionView<'a> {
    /// The connection.
    pub connection: &'a Connection,
    /// The peer.
    pub peer: &'a Host,
    /// Index of the peer in [`Resource::hosts`].
    pub peer_index: usize,
    /// Its paths.
    pub paths: Vec<PathView<'a>>,
}

impl ConnectionView<'_> {
    /// The peer's node id.
    pub fn peer_node_id(&self) -> u32 {
        self.peer.node_id.unwrap_or_default()
    }
}

impl Resource {
    /// The connections of this node in file order, from its point of view.
    pub fn my_connections(&self) -> Vec<ConnectionView<'_>> {
        self.me
            .map(|me| self.connections_of(me))
            .unwrap_or_default()
    }

    /// The connections of one of the hosts.
    pub fn connections_of(&self, host: usize) -> Vec<ConnectionView<'_>> {
        self.connections
            .iter()
            .filter_map(|connection| self.view(connection, host))
            .collect()
    }

    fn view<'a>(&'a self, connection: &'a Connection, me: usize) -> Option<ConnectionView<'a>> {
        let peer_index = connection.paths.iter().find_map(|path| peer_of(path, me))?;
        let paths = connection
            .paths
            .iter()
            .filter_map(|path| self.path_view(path, me))
            .collect();
        let peer = &self.hosts[peer_index];
        Some(ConnectionView {
            connection,
            peer,
            peer_index,
            paths,
        })
    }

    fn path_view<'a>(&'a self, path: &'a Path, me: usize) -> Option<PathView<'a>> {
        let own = path.ends.iter().find(|end| end.host == Some(me))?;
        let peer = path.ends.iter().find(|end| end.host != Some(me))?;
        let own_address = end_address(self, own)?;
        let peer_address = end_address(self, peer)?;
        let own_proxy = end_proxy(self, own);
        let connect_to = match (own_proxy, &peer.via) {
            (Some(proxy), _) => proxy.inside.clone().unwrap_or_else(|| peer_address.clone()),
            (None, Some(Via::OutsideAddress(outside))) => outside.clone(),
            (None, _) => peer_address.clone(),
        };
        let peer_proxy = end_proxy(self, peer);
        Some(PathView {
            own: own_address,
            peer: peer_address,
            connect_to,
            own_proxy,
            peer_proxy,
        })
    }
}

/// The proxy of one end: its own, else the host's.
pub(super) fn end_proxy<'a>(resource: &'a Resource, end: &'a Endpoint) -> Option<&'a Proxy> {
    match &end.via {
        Some(Via::Proxy(proxy)) => Some(proxy),
        Some(Via::OutsideAddress(_)) => None,
        None => end
            .host
            .and_then(|host| resource.hosts[host].proxy.as_ref()),
    }
}

/// The other host of a path that `me` is an end of.
fn peer_of(path: &Path, me: usize) -> Option<usize> {
    match (path.ends.first()?.host?, path.ends.get(1)?.host?) {
        (own, peer) | (peer, own) if own == me => Some(peer),
        _ => None,
    }
}

/// Puts the connection's name before its options, as drbdsetup gets it.
pub fn add_names(resource: &mut Resource) {
    let Some(me) = resource.me else { return };
    for index in 0..resource.connections.len() {
        let Some(view) = resource.view(&resource.connections[index], me) else {
            continue;
        };
        let (name, pos) = (view.peer.joined_name(), view.connection.pos);
        let net = &mut resource.connections[index].net;
        if net.get("_name").is_none() {
            net.push_front("_name", &name, pos);
        }
    }
}

/// The local minor that a `resync-after` value means: `R` or `R/V`.
pub fn resync_after_minor(config: &Config, value: &str) -> Option<u32> {
    let (name, number) = match value.split_once('/') {
        Some((name, number)) => (name, Some(number.parse::<u32>().ok()?)),
        None => (value, None),
    };
    let host = config.resource(name)?.my_host()?;
    match number {
        Some(number) => host.volume(number)?.minor(),
        None => match &host.effective[..] {
            [only] => only.minor(),
            _ => None,
        },
    }
}
