//! Inheritance of options, from general to special sections.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::vec::Vec;

use super::super::model::{
    Config, Connection, Disk, DiskSettings, PeerVolume, Resource, Settings, Via,
};
use super::super::parse::{Diagnostic, Severity};

/// Copies options into every section that does not have them, in the order of section 4.1.
pub fn inherit(config: &mut Config) -> Vec<Diagnostic> {
    let common = config.common.clone();
    let mut conflicts: Vec<(usize, Conflict)> = Vec::new();
    for (index, resource) in config.resources.iter_mut().enumerate() {
        let general = resource
            .template
            .as_ref()
            .map(|template| template.sections.clone());
        let mut found = Vec::new();
        if let Some(general) = general.or_else(|| common.clone()) {
            let own = &mut resource.sections;
            copy(&general.net, &mut own.net, &mut found);
            let mut inherited = DiskSettings::default();
            copy_disk(&general.disk, &mut own.disk, &mut inherited, &mut found);
            copy(&general.startup, &mut own.startup, &mut found);
            copy(&general.proxy, &mut own.proxy, &mut found);
            copy_plugins(&general.plugins, &mut own.plugins);
            copy(&general.handlers, &mut own.handlers, &mut found);
            copy(&general.options, &mut own.options, &mut found);
            own.stacked_timeouts |= general.stacked_timeouts;
        }
        found.extend(volumes(resource));
        found.extend(connections(resource));
        for conflict in found {
            // Each host of the resource has the same.
            if !conflicts.contains(&(index, conflict.clone())) {
                conflicts.push((index, conflict));
            }
        }
    }
    let mut diagnostics = Vec::new();
    for (index, conflict) in conflicts {
        let resource = &config.resources[index];
        let text = format!(
            "{}: in resource {}, ambiguous inheritance for option \"{}\".\n\
             should be \"{}\" and \"{}\" at the same time\n.",
            config.place(resource.pos),
            resource.name,
            conflict.name,
            conflict.first,
            conflict.second
        );
        let pos = Some(resource.pos);
        diagnostics.push(Diagnostic {
            severity: Severity::Error,
            pos,
            text,
        });
    }
    diagnostics
}

/// An option that a section gets twice with different values.
#[derive(Clone, PartialEq, Eq)]
struct Conflict {
    name: alloc::string::String,
    first: alloc::string::String,
    second: alloc::string::String,
}

/// Copies each option that `own` lacks to its head, so that later ones come first.
fn copy(general: &Settings, own: &mut Settings, conflicts: &mut Vec<Conflict>) {
    copy_checked(general, own, &mut Settings::default(), conflicts);
}

fn copy_plugins(general: &[alloc::string::String], own: &mut Vec<alloc::string::String>) {
    let missing: Vec<_> = general
        .iter()
        .filter(|line| !own.contains(line))
        .cloned()
        .collect();
    own.splice(0..0, missing);
}

fn volumes(resource: &mut Resource) -> Vec<Conflict> {
    let mut conflicts = Vec::new();
    let general = &resource.sections.disk;
    for volume in resource
        .hosts
        .iter_mut()
        .flat_map(|host| &mut host.effective)
    {
        let mut inherited = DiskSettings::default();
        let own = &mut volume.settings;
        copy_disk(general, own, &mut inherited, &mut conflicts);
        let level = resource
            .volumes
            .iter()
            .find(|level| level.number == volume.number);
        if let Some(level) = level {
            copy_disk(&level.settings, own, &mut inherited, &mut conflicts);
        }
        if volume.disk == Some(Disk::None) {
            volume.meta_disk = None;
        }
        if let Some(device) = &mut volume.device {
            let minor = device.minor;
            device
                .name
                .get_or_insert_with(|| format!("/dev/drbd{minor}"));
        }
    }
    conflicts
}

fn copy_disk(
    general: &DiskSettings,
    own: &mut DiskSettings,
    inherited: &mut DiskSettings,
    conflicts: &mut Vec<Conflict>,
) {
    let sets = [
        (&general.disk, &mut own.disk, &mut inherited.disk),
        (&general.device, &mut own.device, &mut inherited.device),
        (
            &general.peer_device,
            &mut own.peer_device,
            &mut inherited.peer_device,
        ),
    ];
    for (general, own, inherited) in sets {
        copy_checked(general, own, inherited, conflicts);
    }
}

fn connections(resource: &mut Resource) -> Vec<Conflict> {
    let mut conflicts = Vec::new();
    let Resource {
        sections,
        hosts,
        connections,
        ..
    } = resource;
    for connection in connections {
        copy(&sections.net, &mut connection.net, &mut conflicts);
        for end in connection.paths.iter_mut().flat_map(|path| &mut path.ends) {
            if let Some(Via::Proxy(proxy)) = &mut end.via {
                copy(&sections.proxy, &mut proxy.settings, &mut conflicts);
                copy_plugins(&sections.plugins, &mut proxy.plugins);
            }
        }
        let ends: Vec<usize> = match connection.paths.first() {
            Some(path) => path.ends.iter().filter_map(|end| end.host).collect(),
            None => Vec::new(),
        };
        let numbers: BTreeSet<u32> = ends
            .iter()
            .flat_map(|end| &hosts[*end].effective)
            .map(|volume| volume.number)
            .collect();
        let mut effective = Vec::new();
        for number in numbers {
            let mut own = written(connection, number);
            let mut inherited = Settings::default();
            copy_checked(
                &connection.peer_device,
                &mut own,
                &mut inherited,
                &mut conflicts,
            );
            for end in &ends {
                if let Some(volume) = hosts[*end].volume(number) {
                    let general = &volume.settings.peer_device;
                    copy_checked(general, &mut own, &mut inherited, &mut conflicts);
                }
            }
            effective.push(PeerVolume {
                number,
                settings: own,
            });
        }
        connection.effective = effective;
    }
    for host in hosts {
        if let Some(proxy) = &mut host.proxy {
            copy(&sections.proxy, &mut proxy.settings, &mut conflicts);
            copy_plugins(&sections.plugins, &mut proxy.plugins);
        }
    }
    conflicts
}

fn written(connection: &Connection, number: u32) -> Settings {
    let mut all = Settings::default();
    for volume in connection
        .volumes
        .iter()
        .filter(|volume| volume.number == number)
    {
        all.0.extend(volume.settings.0.iter().cloned());
    }
    all
}

/// Like [`copy`], but an option inherited twice must have the same value both times.
fn copy_checked(
    general: &Settings,
    own: &mut Settings,
    inherited: &mut Settings,
    conflicts: &mut Vec<Conflict>,
) {
    for setting in &general.0 {
        match inherited.get(&setting.name) {
            Some(first) if first != setting.value => conflicts.push(Conflict {
                name: setting.name.clone(),
                first: first.into(),
                second: setting.value.clone(),
            }),
            Some(_) => {}
            None if own.get(&setting.name).is_some() => {}
            None => {
                own.0.insert(0, setting.clone());
                inherited.0.push(setting.clone());
            }
        }
    }
}
