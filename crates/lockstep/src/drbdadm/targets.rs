//! The objects of a command line: `R`, `R/VNR`, `R:PEER`, `R:PEER/VNR`, `minor-N`, `all`.

use lockstep_format::conf::model::{Config, Resource, Volume};
use lockstep_format::conf::resolve::{ConnectionView, same_host};

/// What one object word means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// Index of the resource.
    pub(super) resource: usize,
    /// The one volume that is meant.
    pub(super) volume: Option<u32>,
    /// Node id of the one peer that is meant.
    pub(super) peer: Option<u32>,
}

impl Target {
    /// A whole resource.
    pub(super) fn whole(resource: usize) -> Self {
        Target {
            resource,
            volume: None,
            peer: None,
        }
    }

    pub(super) fn resource<'a>(&self, config: &'a Config) -> &'a Resource {
        &config.resources[self.resource]
    }

    /// Whether the resource has but one volume, written without a number.
    pub(super) fn is_sole_volume(&self, config: &Config) -> bool {
        let host = self.resource(config).my_host();
        host.is_some_and(|host| matches!(&host.effective[..], [only] if only.implicit))
    }

    /// The volumes of this node that are meant, ascending by number.
    pub(super) fn volumes<'a>(&self, config: &'a Config) -> Vec<&'a Volume> {
        let host = self.resource(config).my_host();
        let all = host.into_iter().flat_map(|host| &host.effective);
        all.filter(|volume| self.volume.is_none_or(|wanted| wanted == volume.number))
            .collect()
    }

    /// The connections of this node that are meant, in file order.
    pub(super) fn connections<'a>(&self, config: &'a Config) -> Vec<ConnectionView<'a>> {
        let all = self.resource(config).my_connections().into_iter();
        all.filter(|view| self.peer.is_none_or(|wanted| wanted == view.peer_node_id()))
            .collect()
    }
}

/// Finds the objects of `all`: those of this node, stacked ones only on request.
pub(super) fn all(config: &Config, stacked: bool) -> Vec<Target> {
    let resources = config.resources.iter().enumerate();
    resources
        .filter(|(_, resource)| resource.me.is_some())
        .filter(|(_, resource)| resource.lower().is_some() == stacked)
        .map(|(index, _)| Target::whole(index))
        .collect()
}

/// Finds one object. The error is the text for stderr.
pub(super) fn find(config: &Config, word: &str) -> Result<Target, String> {
    let unknown = || format!("'{word}' not defined in your config (for this host).\n");
    if let Some(minor) = word.strip_prefix("minor-") {
        let minor: u32 = minor.parse().map_err(|_| unknown())?;
        return by_minor(config, minor).ok_or_else(unknown);
    }
    if let Some(index) = index_of(config, word) {
        return Ok(Target::whole(index));
    }
    let (rest, volume) = match word.rsplit_once('/') {
        Some((rest, number)) => (rest, Some(number.parse::<u32>().map_err(|_| unknown())?)),
        None => (word, None),
    };
    let (name, peer) = match rest.split_once(':') {
        Some((name, peer)) => (name, Some(peer)),
        None => (rest, None),
    };
    let index = index_of(config, name).ok_or_else(unknown)?;
    let resource = &config.resources[index];
    let mut target = Target {
        resource: index,
        volume,
        peer: None,
    };
    if let Some(peer) = peer {
        let id = find_peer(resource, peer).ok_or_else(|| {
            let own = resource.my_host().map_or(&[][..], |host| &host.names);
            if own.iter().any(|known| same_host(known, peer)) {
                return format!(
                    "Host name '{peer}' (from '{word}') is not a peer, but the local node\n"
                );
            }
            format!(
                "Not a valid connection ({name}:{peer}) for this host\n\
                 '{word}' unexpected ctx_by_* result r=-2\n"
            )
        })?;
        target.peer = Some(id);
    }
    if let Some(number) = volume
        && target.volumes(config).is_empty()
    {
        return Err(format!("Resource '{name}' has no volume {number}\n"));
    }
    Ok(target)
}

/// A resource of this node by name.
fn index_of(config: &Config, name: &str) -> Option<usize> {
    let found = config
        .resources
        .iter()
        .position(|resource| resource.name == name)?;
    config.resources[found].me.is_some().then_some(found)
}

fn by_minor(config: &Config, minor: u32) -> Option<Target> {
    config
        .resources
        .iter()
        .enumerate()
        .find_map(|(index, resource)| {
            let volumes = &resource.my_host()?.effective;
            let volume = volumes
                .iter()
                .find(|volume| volume.minor() == Some(minor))?;
            Some(Target {
                resource: index,
                volume: Some(volume.number),
                peer: None,
            })
        })
}

/// A peer by one of its names or by the name of the connection.
fn find_peer(resource: &Resource, name: &str) -> Option<u32> {
    let views = resource.my_connections();
    let by = |matches: &dyn Fn(&ConnectionView<'_>) -> bool| {
        views
            .iter()
            .find(|view| matches(view))
            .map(ConnectionView::peer_node_id)
    };
    by(&|view| view.peer.names.iter().any(|known| known == name))
        .or_else(|| by(&|view| view.peer.names.iter().any(|known| same_host(known, name))))
        .or_else(|| by(&|view| view.peer.joined_name() == name))
        .or_else(|| by(&|view| view.connection.net.get("_name") == Some(name)))
        .or_else(|| by(&|view| view.connection.name.as_deref() == Some(name)))
}
