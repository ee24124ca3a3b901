//! Effective volumes of each host, and their checks.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::super::model::{Config, Disk, HostKind, MetaDisk, Pos, Volume};
use super::{Report, head};

/// Merges the volumes of a resource into those of its hosts; what the host says wins.
pub(super) fn complete(config: &mut Config, index: usize) {
    let resource = &mut config.resources[index];
    for host in &mut resource.hosts {
        let mut effective = host.volumes.clone();
        let is_stacked = matches!(host.kind, HostKind::Stacked { .. });
        for general in &resource.volumes {
            let known = effective
                .iter_mut()
                .find(|volume| volume.number == general.number);
            match known {
                Some(volume) => merge(volume, general, is_stacked),
                None => {
                    let mut volume = general.clone();
                    volume.settings = Default::default();
                    if is_stacked {
                        volume.disk = None;
                        volume.meta_disk = None;
                    }
                    effective.push(volume);
                }
            }
        }
        for volume in &mut effective {
            if volume.disk_path().is_some() && volume.meta_disk.is_none() {
                volume.meta_disk = Some(MetaDisk::Internal);
            }
            // Neither a disk nor metadata: a client. Metadata alone are an error (see `check`).
            if volume.disk.is_none() && volume.meta_disk.is_none() && !is_stacked {
                volume.disk = Some(Disk::None);
            }
        }
        effective.sort_by_key(|volume| volume.number);
        host.effective = effective;
    }
}

fn merge(volume: &mut Volume, general: &Volume, is_stacked: bool) {
    volume.device = volume.device.take().or_else(|| general.device.clone());
    if !is_stacked {
        volume.disk = volume.disk.take().or_else(|| general.disk.clone());
        volume.meta_disk = volume
            .meta_disk
            .take()
            .or_else(|| general.meta_disk.clone());
    }
    volume.tiebreaker = volume.tiebreaker.or(general.tiebreaker);
}

/// Gives the volumes of stacked sections their disks: the devices of the lower resource.
pub(super) fn complete_stacked(config: &mut Config) {
    let mut minors: BTreeMap<(String, u32), u32> = BTreeMap::new();
    for resource in &config.resources {
        for volume in resource.hosts.iter().flat_map(|host| &host.effective) {
            if let Some(minor) = volume.minor() {
                minors
                    .entry((resource.name.clone(), volume.number))
                    .or_insert(minor);
            }
        }
    }
    for host in config
        .resources
        .iter_mut()
        .flat_map(|resource| &mut resource.hosts)
    {
        let HostKind::Stacked { lower } = &host.kind else {
            continue;
        };
        for volume in &mut host.effective {
            if let Some(minor) = minors.get(&(lower.clone(), volume.number)) {
                volume.disk = Some(Disk::Path(format!("/dev/drbd{minor}")));
                volume.meta_disk = Some(MetaDisk::Internal);
            }
        }
    }
}

/// Checks the volumes of the hosts of a resource against each other.
pub(super) fn check(config: &Config, index: usize, report: &mut Report) {
    let resource = &config.resources[index];
    let name = &resource.name;
    let mut implicit: Option<(&str, &Volume)> = None;
    let mut explicit: Option<(&str, &Volume)> = None;
    for host in &resource.hosts {
        let host_name = host.names.first().map_or("", String::as_str);
        for volume in &host.effective {
            if volume.implicit {
                implicit.get_or_insert((host_name, volume));
            } else {
                explicit.get_or_insert((host_name, volume));
            }
            let mut missing = |what: &str| {
                let text = format!(
                    "in resource {name}, {}: '{what}' keyword missing.",
                    head(host)
                );
                report.error(config, host.pos, &text);
            };
            if volume.device.is_none() {
                missing("device");
            }
            if volume.disk.is_none() {
                missing("disk");
            }
        }
    }
    if let (Some(implicit), Some(explicit)) = (implicit, explicit) {
        let text = match implicit.0 == explicit.0 {
            true => format!("in resource {name}: you must not mix implicit and explicit volumes"),
            false => format!(
                "in resource {name}, on {} resp. {}: volume {} must not be implicit on one but \
                 not the other",
                implicit.0, explicit.0, explicit.1.number
            ),
        };
        report.error(config, explicit.1.pos, &text);
    }
    for host in &resource.hosts {
        for other in &resource.hosts {
            let other_name = other.names.first().map_or("", String::as_str);
            let lower_may_have_more = resource.is_stacked();
            let missing = other
                .effective
                .iter()
                .filter(|wanted| host.volume(wanted.number).is_none());
            for volume in missing.filter(|_| !lower_may_have_more) {
                let number = volume.number;
                let text = format!(
                    "in resource {name}, {}: volume {number} missing (present on {other_name})",
                    head(host)
                );
                report.error(config, host.pos, &text);
            }
        }
    }
}

/// Checks that volumes for which connections have options exist on both hosts.
pub(super) fn check_references(config: &Config, index: usize, report: &mut Report) {
    let resource = &config.resources[index];
    for connection in &resource.connections {
        let ends = connection.paths.first().map_or(&[][..], |path| &path.ends);
        for volume in &connection.volumes {
            let number = volume.number;
            for host in ends.iter().filter_map(|end| end.host) {
                let host = &resource.hosts[host];
                if host.volume(number).is_none() {
                    let text = format!(
                        "Resource {}: There is a reference to a volume {number} that is not \
                         known in this resource on host {}",
                        resource.name,
                        host.joined_name()
                    );
                    report.error(config, connection.pos, &text);
                }
            }
        }
    }
}

/// Checks that no host uses a minor, device name, disk or metadata slot twice.
pub(super) fn check_unique(config: &Config, report: &mut Report) {
    let mut used: BTreeMap<(&str, String), Pos> = BTreeMap::new();
    let mut conflicts: Vec<(&str, String, Pos, Pos)> = Vec::new();
    for resource in &config.resources {
        for host in &resource.hosts {
            // The names of a stacked section are those of all lower hosts, on which it may run.
            let name = host.joined_name().to_ascii_lowercase();
            for volume in &host.effective {
                let pos = volume
                    .device
                    .as_ref()
                    .map_or(volume.pos, |device| device.pos);
                for (what, key) in claims(&name, volume) {
                    match used.get(&(what, key.clone())) {
                        Some(first) => conflicts.push((what, key, pos, *first)),
                        None => {
                            used.insert((what, key), pos);
                        }
                    }
                }
            }
        }
    }
    for (what, key, pos, first) in conflicts {
        report.error(
            config,
            pos,
            &format!("conflicting use of {what} '{what}:{key}' ..."),
        );
        report.error(
            config,
            first,
            &format!("{what} '{what}:{key}' first used here."),
        );
    }
}

/// What a volume occupies on a host.
fn claims(host: &str, volume: &Volume) -> Vec<(&'static str, String)> {
    let mut claims = Vec::new();
    if let Some(device) = &volume.device {
        claims.push(("device-minor", format!("{host}:{}", device.minor)));
        if let Some(name) = &device.name {
            claims.push(("device", format!("{host}:{name}")));
        }
    }
    // Management programs write this path for the disks of other hosts.
    let disk = volume.disk_path().filter(|path| *path != PLACEHOLDER_DISK);
    if let Some(path) = disk {
        claims.push(("disk", format!("{host}:{path}")));
    }
    match &volume.meta_disk {
        Some(MetaDisk::Indexed(path, index)) => {
            claims.push(("meta-disk", format!("{host}:{path}[{index}]")));
        }
        Some(MetaDisk::Flexible(path)) => claims.push(("meta-disk", format!("{host}:{path}"))),
        Some(MetaDisk::Internal) | None => {}
    }
    claims
}

/// Path that stands for "some disk" in files for other hosts.
const PLACEHOLDER_DISK: &str = "/dev/drbd/this/is/not/used";
