//! What a cluster that is whole and has nothing to do leaves behind: nothing. A bug that a later world would meet
//! as a leak, a stale answer or a mark too few is here at once.

use lockstep_core::state::{ConnState, Role};
use lockstep_format::disk::v09::DeviceFlags;
use lockstep_format::units::{Sector, Uuid, VolumeNr};

use crate::promises::View;
use crate::world::{Weather, World, id, name};

/// All nodes are connected, whole and quiet for some seconds.
pub(crate) fn is_clean(w: &mut World) {
    if w.violation.is_some() || w.config.weather != Weather::ByPlace {
        return;
    }
    let found = watchers_know(w)
        .or_else(|| nothing_is_left(w))
        .or_else(|| peers_are_known(w))
        .or_else(|| generations_are_known(w))
        .or_else(|| heirs_are_named(w))
        .or_else(|| marks_are_written(w))
        .or_else(|| logs_are_whole(w))
        .or_else(|| quorum_is_noted(w))
        .or_else(|| members_are_noted(w));
    if let Some(text) = found {
        w.fail(format!("all is at rest, and {text}"));
    }
}

/// A cluster-wide change waits for its next try, which may be some seconds away, or metadata are being written.
pub(crate) fn change_waits(w: &World, nodes: impl IntoIterator<Item = usize>) -> Option<String> {
    nodes.into_iter().find_map(|node| {
        let resource = w.nodes[node].resource.as_ref()?;
        let waits = resource.changes_pending() > 0;
        let writes = resource.disk_operations() > 0;
        if waits {
            return Some(format!("a cluster-wide change of {} waits", name(node)));
        }
        writes.then(|| format!("a disk operation of {} runs", name(node)))
    })
}

/// No table has an entry of something that has ended.
fn nothing_is_left(w: &World) -> Option<String> {
    (0..w.nodes.len()).find_map(|node| {
        let resource = w.nodes[node].resource.as_ref()?;
        let left = resource.leftover().or_else(|| resource.unfinished())?;
        Some(format!("{} still has {left}", name(node)))
    })
}

/// What nodes think of each other's roles is right.
fn peers_are_known(w: &World) -> Option<String> {
    let roles: Vec<_> = (0..w.nodes.len())
        .map(|node| w.snapshot(node).map(|s| s.role))
        .collect();
    (0..w.nodes.len()).find_map(|node| {
        let connections = w.snapshot(node)?.connections;
        let wrong = connections.iter().find(|c| {
            let role = roles.get(usize::from(c.peer.0)).copied().flatten();
            c.state == ConnState::Connected && role.is_some_and(|role| role != c.role)
        })?;
        let peer = name(usize::from(wrong.peer.0));
        Some(format!("{} takes {peer} for {:?}", name(node), wrong.role))
    })
}

/// Nodes with disks know each other's generations, and all of them who has quorum.
fn generations_are_known(w: &World) -> Option<String> {
    let bare = |uuid: Uuid| uuid.0 & !1;
    for volume in (0..w.config.volumes).map(VolumeNr) {
        for peer in 0..w.nodes.len() {
            let resource = w.nodes[peer].resource.as_ref()?;
            let current = resource.generation(volume).filter(|_| w.has_disk(peer));
            let devices = w.snapshot(peer)?.devices;
            let quorum = devices.iter().find(|d| d.volume == volume)?.quorum;
            for node in (0..w.nodes.len()).filter(|node| *node != peer) {
                let resource = w.nodes[node].resource.as_ref()?;
                let Some((believed, quorate)) = resource.believes_of(volume, id(peer)) else {
                    continue;
                };
                let what = if current.is_some_and(|current| bare(current) != bare(believed)) {
                    format!("at generation {:#x}", bare(believed))
                } else if quorate != quorum {
                    format!("{} quorum", if quorate { "with" } else { "without" })
                } else {
                    continue;
                };
                let (node, peer) = (name(node), name(peer));
                return Some(format!(
                    "{node} takes {peer} for a node {what} (volume {volume}), which it is not"
                ));
            }
        }
    }
    None
}

/// Whoever was told of each change has the present state.
fn watchers_know(w: &mut World) -> Option<String> {
    let storage = w.storage().end;
    (0..w.nodes.len()).find_map(|node| {
        let told = w.view(node)?;
        let is = View::of(node, &w.snapshot(node)?, storage);
        let node = name(node);
        (told != is).then(|| format!("{node} told watchers of {told:?} last, and it is {is:?}"))
    })
}

/// Where nobody is Primary each node with a good disk may be promoted, beside a Primary none.
fn heirs_are_named(w: &World) -> Option<String> {
    if w.history.several_writers {
        return None;
    }
    let is_led = (0..w.nodes.len()).any(|node| {
        let snapshot = w.snapshot(node);
        snapshot.is_some_and(|s| s.role == Role::Primary)
    });
    w.storage().find_map(|node| {
        let snapshot = w.snapshot(node)?;
        let is_heir = snapshot.may_promote;
        let node = name(node);
        match (is_led, is_heir, snapshot.promotion_score) {
            (true, true, _) => Some(format!(
                "{node} says that it may be promoted beside a Primary"
            )),
            (false, false, score) => Some(format!(
                "{node} says that it may not be promoted (score {score}), and nobody is Primary"
            )),
            _ => None,
        }
    })
}

/// The bitmaps on the disks are those that the nodes go by.
fn marks_are_written(w: &World) -> Option<String> {
    // Among more nodes marks that are gone may stay on a disk until something is written beside them.
    let is_pair = w.nodes.len() == 2;
    for volume in 0..w.config.volumes {
        let mut blocks = w.history.touched(volume);
        blocks.extend((0..w.config.blocks).step_by(61));
        for node in w.storage() {
            let resource = w.nodes[node].resource.as_ref()?;
            let disk = &w.nodes[node].disks[usize::from(volume)];
            for peer in w.storage().filter(|peer| *peer != node) {
                let Ok(written) = disk.bitmap(peer, &blocks) else {
                    continue;
                };
                let known =
                    |block: u64| resource.suspects(VolumeNr(volume), id(peer), Sector(block * 8));
                let differs = blocks.iter().zip(written);
                let mut differs = differs.filter(|(block, written)| {
                    // What lies in the activity log is written before it leaves that.
                    (is_pair || !*written)
                        && !disk.is_hot(**block..**block + 1)
                        && known(**block).is_some_and(|known| known != *written)
                });
                if let Some((block, written)) = differs.next() {
                    let what = if written {
                        "still marks"
                    } else {
                        "does not mark"
                    };
                    return Some(format!(
                        "the bitmap on the disk of {} {what} block {block} of volume {volume} towards {}",
                        name(node),
                        name(peer)
                    ));
                }
            }
        }
    }
    None
}

/// Each activity log on a disk names all of its slots: an attach after a crash marks what was in use, and not everything.
fn logs_are_whole(w: &World) -> Option<String> {
    if w.limits.no_log {
        return None;
    }
    let mut disks = w.storage().flat_map(|node| {
        let disks = w.nodes[node].disks.iter().enumerate();
        disks.map(move |(volume, disk)| (node, volume, disk))
    });
    let (node, volume, _) = disks.find(|(.., disk)| disk.open && !disk.has_whole_log())?;
    Some(format!(
        "the activity log of volume {volume} on the disk of {} does not say all that it should",
        name(node)
    ))
}

/// The metadata say whether a node has quorum, and that none has lost it as Primary if it has it again: a later comparison
/// would go by that.
fn quorum_is_noted(w: &World) -> Option<String> {
    if !w.flushes_peers {
        return None;
    }
    w.storage().find_map(|node| {
        let devices = w.snapshot(node)?.devices;
        devices.iter().find_map(|device| {
            let volume = usize::from(device.volume.0);
            let flags = w.nodes[node].disks[volume].flags()?;
            let what = if device.quorum != flags.contains(DeviceFlags::HAVE_QUORUM) {
                if device.quorum { "without" } else { "with" }
            } else if device.quorum && flags.contains(DeviceFlags::PRIMARY_LOST_QUORUM) {
                "that was Primary when it lost"
            } else {
                return None;
            };
            let node = name(node);
            Some(format!(
                "the metadata of volume {volume} call the node {node} one {what} quorum"
            ))
        })
    })
}

/// The metadata name all nodes as those that have quorum together: who is lost later is missed.
fn members_are_noted(w: &World) -> Option<String> {
    if !w.flushes_peers || !w.wants_majority {
        return None;
    }
    w.storage().find_map(|node| {
        let mut disks = w.nodes[node].disks.iter().enumerate();
        disks.find_map(|(volume, disk)| {
            let members = disk.superblock().ok()?.members;
            let mut nodes = 0..w.nodes.len();
            let missed = nodes.find(|peer| !members.contains(id(*peer)))?;
            let (node, missed) = (name(node), name(missed));
            Some(format!(
                "the metadata of volume {volume} of {node} do not count {missed} among those that have quorum together"
            ))
        })
    })
}
