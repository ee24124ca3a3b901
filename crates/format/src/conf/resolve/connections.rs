//! Connections: meshes, implied ones, ends, node ids, addresses.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::super::model::{
    Address, Config, Connection, Endpoint, HostKind, Origin, Path, Pos, Resource, Style, Via,
};
use super::super::parse::Severity;
use super::{Report, head, same_host};

/// Adds the connections of meshes and the implied one, finds the host of each end.
pub(super) fn complete(config: &mut Config, index: usize, report: &mut Report) {
    add_meshes(&mut config.resources[index]);
    let resource = &config.resources[index];
    let only_implied = resource.connections.is_empty();
    match resource.hosts.len() {
        2 if only_implied => {
            let connection = implied(resource);
            config.resources[index].connections.push(connection);
        }
        3.. if only_implied => {
            let text = format!(
                "Resource {}:\n\tUse explicit 'connection' sections (or a 'connection-mesh' \
                 section) with more than two 'on' sections.",
                resource.name
            );
            report.push(Severity::Warning, config, resource.pos, &text);
        }
        _ => {}
    }
    let implied_only = config.resources[index].connections.len() == 1
        && config.resources[index].connections[0].origin == Origin::Implied;
    find_hosts(config, index, report);
    node_ids(config, index, implied_only, report);
    check_ends(config, index, report);
}

fn add_meshes(resource: &mut Resource) {
    let mut added = Vec::new();
    for mesh in &resource.meshes {
        for (index, first) in mesh.hosts.iter().enumerate() {
            for second in &mesh.hosts[index + 1..] {
                let ends = [first, second].map(|name| Endpoint {
                    host_name: Some(name.clone()),
                    pos: mesh.pos,
                    ..Endpoint::default()
                });
                added.push(Connection {
                    origin: Origin::Mesh,
                    paths: Vec::from([Path {
                        ends: Vec::from(ends),
                        pos: mesh.pos,
                        ..Path::default()
                    }]),
                    net: mesh.net.clone(),
                    pos: mesh.pos,
                    ..Connection::default()
                });
            }
        }
    }
    resource.connections.append(&mut added);
}

fn implied(resource: &Resource) -> Connection {
    let ends = [0, 1].map(|index| Endpoint {
        host: Some(index),
        pos: resource.hosts[index].pos,
        ..Endpoint::default()
    });
    Connection {
        origin: Origin::Implied,
        paths: Vec::from([Path {
            ends: Vec::from(ends),
            pos: resource.pos,
            ..Path::default()
        }]),
        pos: resource.pos,
        ..Connection::default()
    }
}

/// Finds the host section of each end by name, or by address where there is no name.
fn find_hosts(config: &mut Config, index: usize, report: &mut Report) {
    let mut unknown = Vec::new();
    let resource = &mut config.resources[index];
    let hosts = &resource.hosts;
    for end in resource
        .connections
        .iter_mut()
        .flat_map(|connection| &mut connection.paths)
        .flat_map(|path| &mut path.ends)
    {
        if end.host.is_some() {
            continue;
        }
        end.host = match (&end.host_name, &end.address) {
            (Some(name), _) => hosts
                .iter()
                .position(|host| host.names.iter().any(|known| known == name))
                .or_else(|| {
                    let same = |known: &String| same_host(known, name);
                    hosts.iter().position(|host| host.names.iter().any(same))
                })
                .or_else(|| hosts.iter().position(|host| host.joined_name() == *name)),
            (None, Some(address)) => hosts
                .iter()
                .position(|host| host.address.as_ref() == Some(address)),
            (None, None) => None,
        };
        if end.host.is_none() {
            let name = match (&end.host_name, &end.address) {
                (Some(name), _) => name.clone(),
                (None, address) => address.as_ref().map(Address::plain).unwrap_or_default(),
            };
            let text = format!(
                "in resource {} a hostname (\"{name}\") is given\nwith a \"host\" keyword, has no \
                 matching\nhost section (\"on\" keyword)",
                resource.name
            );
            unknown.push((end.pos, text));
        }
    }
    for (pos, text) in unknown {
        report.error(config, pos, &text);
    }
}

/// Invents the node ids of an old configuration; else asks for missing ones.
fn node_ids(config: &mut Config, index: usize, implied_only: bool, report: &mut Report) {
    let resource = &config.resources[index];
    let none_written = resource.hosts.iter().all(|host| host.node_id.is_none());
    if implied_only && none_written {
        let ends = [0, 1].map(|host| resource.hosts[host].address.clone());
        let outside = [0, 1].map(|host| {
            resource.hosts[host]
                .proxy
                .as_ref()
                .and_then(|proxy| proxy.outside.clone())
        });
        let ids = invented(&ends).or_else(|| invented(&outside));
        match ids {
            Some(ids) => {
                let hosts = &mut config.resources[index].hosts;
                hosts[0].node_id = Some(ids[0]);
                hosts[1].node_id = Some(ids[1]);
                if config.style == Style::Ambiguous {
                    config.style = Style::V8;
                }
            }
            // Said of the hosts themselves.
            None if ends.contains(&None) => {}
            None => {
                let text = format!(
                    "in resource {}: BAD LUCK, equal hashes: give each host a node-id.",
                    resource.name
                );
                report.error(config, resource.pos, &text);
            }
        }
        return;
    }
    if resource.connections.is_empty() && none_written {
        return;
    }
    for host in resource.hosts.iter().filter(|host| host.node_id.is_none()) {
        let name = &resource.name;
        let text = format!(
            "in resource {name}, {}: 'node-id' keyword missing.",
            head(host)
        );
        report.error(config, host.pos, &text);
    }
}

/// Node ids for two addresses: the greater hash gets 0. None if a tie or an address is missing.
fn invented(addresses: &[Option<Address>; 2]) -> Option<[u32; 2]> {
    let [first, second] = addresses;
    let first = address_hash(&first.as_ref()?.host);
    let second = address_hash(&second.as_ref()?.host);
    match first.cmp(&second) {
        core::cmp::Ordering::Greater => Some([0, 1]),
        core::cmp::Ordering::Less => Some([1, 0]),
        core::cmp::Ordering::Equal => None,
    }
}

/// CRC-32C without final inversion over the address text, compared as a signed number.
fn address_hash(address: &str) -> i32 {
    let mut crc: u32 = 0x1a65_6f21;
    for byte in address.bytes() {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    crc.cast_signed()
}

/// The address of one end: its own, else the host's, with its own port if it has one.
pub(in crate::conf) fn end_address(resource: &Resource, end: &Endpoint) -> Option<Address> {
    if let Some(address) = &end.address {
        return Some(address.clone());
    }
    let mut address = resource.hosts[end.host?].address.clone()?;
    if let Some(port) = end.port {
        address.port = port;
    }
    Some(address)
}

fn check_ends(config: &Config, index: usize, report: &mut Report) {
    let resource = &config.resources[index];
    let name = &resource.name;
    for connection in &resource.connections {
        let mut pairs = connection
            .paths
            .iter()
            .filter_map(|path| match &path.ends[..] {
                [left, right] => Some((left.host?.min(right.host?), left.host?.max(right.host?))),
                _ => None,
            });
        let first = pairs.next();
        if pairs.any(|pair| Some(pair) != first) {
            let text = format!(
                "in resource {name}: the paths of a connection must all connect the same two hosts"
            );
            report.error(config, connection.pos, &text);
        }
        for path in &connection.paths {
            let [left, right] = &path.ends[..] else {
                continue;
            };
            let mut addresses = Vec::new();
            for end in [left, right] {
                let Some(host) = end.host else { continue };
                match end_address(resource, end) {
                    Some(address) => addresses.push(address),
                    None => {
                        let head = head(&resource.hosts[host]);
                        let text =
                            format!("in resource {name}, {head}: 'address' keyword missing.");
                        report.error(config, end.pos, &text);
                    }
                }
            }
            let has_proxy = |end: &Endpoint| {
                matches!(end.via, Some(Via::Proxy(_)))
                    || end
                        .host
                        .is_some_and(|host| resource.hosts[host].proxy.is_some())
            };
            let proxied = has_proxy(left) || has_proxy(right);
            if left.host.is_some() && left.host == right.host {
                let text = format!("in resource {name}: a connection from a host to itself");
                report.error(config, path.pos, &text);
            } else if !proxied && addresses.len() == 2 && addresses[0] == addresses[1] {
                let text = format!(
                    "in resource {name}: both ends of a path have the address {}",
                    addresses[0].plain()
                );
                report.error(config, path.pos, &text);
            }
        }
    }
}

/// Checks that no address is used by two resources. Loopback addresses are exempt, behind which
/// each node has its own proxy.
pub(super) fn check_addresses(config: &Config, report: &mut Report) {
    let mut used: BTreeMap<String, (usize, Pos)> = BTreeMap::new();
    let mut conflicts = Vec::new();
    for (index, resource) in config.resources.iter().enumerate() {
        for host in &resource.hosts {
            let stacked = matches!(host.kind, HostKind::Stacked { .. });
            let Some(address) = host.address.as_ref().filter(|_| !stacked) else {
                continue;
            };
            if address.host.starts_with("127.") || address.host == "::1" {
                continue;
            }
            let key = format!("{}:{}", address.family.name(), address.plain());
            match used.get(&key) {
                Some((other, first)) if *other != index => {
                    conflicts.push((key, host.pos, *first, resource.name.clone()));
                }
                Some(_) => {}
                None => {
                    used.insert(key, (index, host.pos));
                }
            }
        }
    }
    for (key, pos, first, name) in conflicts {
        let text = format!("in resource {name}\n    address {key} is also used");
        report.error(config, pos, &text);
        report.error(config, first, &format!("address {key} first used here."));
    }
}
