//! What must hold, seen from outside the core.

use lockstep_core::options::Protocol;
use lockstep_core::report::{ConnectionReport, Snapshot};
use lockstep_core::state::{ConnState, DiskState, ReplState, Role};

use lockstep_format::disk::v09::DeviceFlags;

use crate::cover;
use crate::history::seconds;
use crate::world::{Asked, Weather, World, name};

/// Whatever differs between two disks is marked on one of them, whoever dies now.
pub fn differences_are_marked(w: &mut World) {
    for volume in 0..w.config.volumes {
        let blocks = w.history.touched(volume);
        for x in w.storage() {
            for y in x + 1..w.storage().end {
                let v = usize::from(volume);
                let mut blocks = blocks.clone();
                blocks.extend(new_area(w, v, [x, y]));
                // A disk that is being resynced is marked by its source. Its own marks towards
                // third nodes are written lazily.
                let resyncing = [x, y].into_iter().any(|n| {
                    w.nodes[n].disks[v]
                        .superblock()
                        .is_ok_and(|s| !s.flags.contains(DeviceFlags::CONSISTENT))
                });
                if resyncing && w.storage().len() > 2 {
                    continue;
                }
                let differing: Vec<u64> = blocks
                    .iter()
                    .copied()
                    .filter(|b| {
                        let b = *b as usize;
                        w.nodes[x].disks[v].content[b] != w.nodes[y].disks[v].content[b]
                    })
                    .filter(|b| !w.spoiled.contains_key(&(volume, *b)))
                    .filter(|b| !cover::is_known_bad(w, v, x, y, *b))
                    .collect();
                if differing.is_empty() {
                    continue;
                }
                let all = |marks: &Result<Vec<bool>, String>| {
                    marks.as_ref().is_ok_and(|m| !m.contains(&false))
                };
                let own = w.nodes[x].disks[v].marks(y, &differing);
                if all(&own) {
                    continue;
                }
                let marks = own.and_then(|a| Ok((a, w.nodes[y].disks[v].marks(x, &differing)?)));
                match marks {
                    Err(text) => w.fail(format!("metadata do not open: {text}")),
                    Ok((a, b)) => {
                        if let Some(i) = (0..differing.len()).find(|i| !a[*i] && !b[*i]) {
                            let block = differing[i];
                            let text = format!(
                                "volume {volume} block {block} differs between {} ({}) and {} \
                                 ({}) and neither disk marks it; {}",
                                name(x),
                                w.nodes[x].disks[v].content[block as usize],
                                name(y),
                                w.nodes[y].disks[v].content[block as usize],
                                w.history.describe(volume, block)
                            );
                            w.fail(text);
                        }
                    }
                }
            }
        }
    }
}

/// Blocks of the area that a resize has added on both nodes, some of them.
fn new_area(w: &World, volume: usize, nodes: [usize; 2]) -> Vec<u64> {
    let size = |node: usize| {
        let superblock = w.nodes[node].disks[volume].superblock();
        superblock.map_or(0, |s| s.effective_size.0 / 8)
    };
    let first = w.nodes[nodes[0]].disks[volume].first_blocks;
    let end = size(nodes[0]).min(size(nodes[1]));
    (first..end).step_by(7).collect()
}

/// If a node lost its power now, what it might lose is marked: its unflushed blocks lie in its
/// activity log or are marked on one of two disks.
pub fn losses_are_marked(w: &mut World) {
    if w.limits.no_log {
        // What a Primary sent is unsettled in its memory until it is durable; a log would say so twice.
        return;
    }
    for volume in 0..w.config.volumes {
        let v = usize::from(volume);
        for x in w.storage() {
            let volatile = w.nodes[x].disks[v].volatile();
            if volatile.is_empty() || !is_whole(w, x, v) {
                continue;
            }
            for y in w.storage().filter(|y| *y != x) {
                if !is_whole(w, y, v) {
                    continue;
                }
                let lost: Vec<u64> = volatile
                    .iter()
                    .filter(|(block, old)| {
                        w.nodes[y].disks[v].content[*block as usize] != *old
                            && !w.spoiled.contains_key(&(volume, *block))
                            && !cover::is_known_bad(w, v, x, y, *block)
                    })
                    .map(|(block, _)| *block)
                    .collect();
                let marks = |of: usize, towards: usize| w.nodes[of].disks[v].marks(towards, &lost);
                let (Ok(own), Ok(theirs)) = (marks(x, y), marks(y, x)) else {
                    continue;
                };
                if let Some(i) = (0..lost.len()).find(|i| !own[*i] && !theirs[*i]) {
                    let block = lost[i];
                    let text = format!(
                        "volume {volume} block {block} is not flushed on {}, and if it were lost \
                         neither it nor {} would mark the difference; {}",
                        name(x),
                        name(y),
                        w.history.describe(volume, block)
                    );
                    w.fail(text);
                    return;
                }
            }
        }
    }
}

/// A flush that began at `issued` is acknowledged: what was acknowledged before it lies on stable
/// storage of every replica that the Primary counts on, also what another Primary wrote.
pub fn flushed_is_durable(w: &mut World, primary: usize, volume: u16, issued: u64) {
    for node in replicas(w, primary, volume) {
        let volatile = w.nodes[node].disks[usize::from(volume)].volatile();
        let lost = volatile.into_iter().find(|(block, old)| {
            !w.spoiled.contains_key(&(volume, *block))
                && !w.history.may_be_durable(volume, *block, *old, issued, None)
        });
        if let Some((block, old)) = lost {
            let text = format!(
                "{} acknowledges a flush of volume {volume} that began at {}, but {} would \
                 lose block {block} with its power and have version {old} there; {}",
                name(primary),
                seconds(issued),
                name(node),
                w.history.describe(volume, block)
            );
            w.fail(text);
            return;
        }
    }
}

/// A write with FUA is acknowledged: it lies on stable storage.
pub(crate) fn fua_is_durable(w: &mut World, primary: usize, asked: &Asked) {
    for node in replicas(w, primary, asked.volume) {
        is_durable_at(w, primary, asked, node);
    }
}

/// A write that is acknowledged lies on a node's stable storage.
pub(crate) fn is_durable_at(w: &mut World, primary: usize, asked: &Asked, node: usize) {
    let writer = whose(w, primary, node);
    let blocks = asked.block..asked.block + asked.count;
    let volatile = w.nodes[node].disks[usize::from(asked.volume)].volatile_in(blocks);
    // Between the write and its flush, where these are two.
    let history = &w.history;
    let came_between = |block: u64, old: u64| {
        w.fua_is_two && history.began_since(asked.volume, block, old, asked.start)
    };
    // The peer has refused the write, as it detaches its disk, and the Primary has marked the block.
    let snapshot = w.snapshot(node);
    let mut devices = snapshot.iter().flat_map(|s| &s.devices);
    let leaves =
        devices.any(|d| d.volume.0 == asked.volume && d.disk_state == DiskState::Detaching);
    let is_known = |block: u64| {
        node != primary
            && leaves
            && crate::cover::suspects(w, asked.volume.into(), primary, node, block)
    };
    // Its own data are enough: a later write may have been acknowledged before it.
    let lost = volatile.iter().find(|(block, old)| {
        !is_known(*block)
            && !w.spoiled.contains_key(&(asked.volume, *block))
            && *old != asked.value_of(*block - asked.block)
            && !w
                .history
                .may_be_durable(asked.volume, *block, *old, w.now + 1, writer)
            && !came_between(*block, *old)
    });
    if let Some((block, old)) = lost {
        let text = format!(
            "{} acknowledges a durable write of volume {}, but {} would lose block {block} \
             with its power and have version {old} there; {}",
            name(primary),
            asked.volume,
            name(node),
            w.history.describe(asked.volume, *block)
        );
        w.fail(text);
    }
}

/// Whose writes on a node's disk a flush of the Primary is about; all of them if none is named.
fn whose(w: &World, primary: usize, node: usize) -> Option<usize> {
    (w.history.several_writers && node != primary).then_some(primary)
}

/// The disks that have all acknowledged data by protocol C, as the Primary sees it.
fn replicas(w: &mut World, primary: usize, volume: u16) -> Vec<usize> {
    if w.config.protocol != Protocol::C {
        return Vec::new();
    }
    // A node that is not Primary any more has nothing to make durable.
    let view = w.view(primary).filter(|v| v.role == Role::Primary);
    let holders = view.map_or(0, |v| v.holders[usize::from(volume)]);
    let v = usize::from(volume);
    let storage = w.storage();
    let mut replicas: Vec<usize> = storage
        .filter(|n| holders & 1 << n != 0 && (*n == primary || w.flushes_peers))
        .filter(|n| is_whole(w, *n, v))
        .collect();
    replicas.retain(|n| !has_just_failed(w, *n, v));
    replicas
}

/// The node's disk had an error, and the node does not count on it any more: the refusal of a write
/// may reach the Primary before the state that follows from it.
fn has_just_failed(w: &mut World, node: usize, volume: usize) -> bool {
    w.nodes[node].disks[volume].had_errors
        && w.view(node)
            .is_some_and(|view| view.holders[volume] & 1 << node == 0)
}

/// According to its metadata the disk has all data of a generation.
pub(crate) fn is_whole(w: &World, node: usize, volume: usize) -> bool {
    let flags = w.nodes[node].disks[volume].flags();
    flags.is_some_and(|f| f.contains(DeviceFlags::CONSISTENT | DeviceFlags::WAS_UP_TO_DATE))
}

/// A resync has ended, and the metadata call the disk current from now on: what a power cut could take back must
/// not be what a flush has made safe, or another node would have to be asked.
pub(crate) fn current_is_durable(w: &mut World, node: usize, volume: usize) {
    // With protocols A and B, and in 8.4's dialect, a flush does not wait for what is on its way.
    let is_sharp = w.config.weather == Weather::ByPlace
        && w.config.protocol == Protocol::C
        && w.flushes_peers
        && !w.history.several_writers;
    let disk = &w.nodes[node].disks[volume];
    if !is_sharp || disk.had_errors || !is_whole(w, node, volume) || is_left(w, node, volume) {
        return;
    }
    let volatile = disk.volatile().into_iter();
    let mut volatile =
        volatile.filter(|(block, _)| !w.spoiled.contains_key(&(volume as u16, *block)));
    let lost =
        volatile.find(|(block, old)| !w.history.may_come_back(volume as u16, *block, *old, w.now));
    if let Some((block, old)) = lost {
        let text = format!(
            "the metadata of {} call volume {volume} current, but with its power it would lose block {block} and have \
             version {old} there, which a flush has made impossible; {}",
            name(node),
            w.history.describe(volume as u16, block)
        );
        w.fail(text);
        return;
    }
    target_has_it(w, node, volume);
}

/// A resync has ended: the target has what was acknowledged, as far as a node has it that it is equal to.
fn target_has_it(w: &mut World, node: usize, volume: usize) {
    let view = w.view(node);
    let holders = view.map_or(0, |v| v.holders[volume]);
    if holders & 1 << node == 0 {
        return;
    }
    let generation = |n: usize| w.nodes[n].disks[volume].generation();
    let sources: Vec<usize> = w
        .storage()
        .filter(|n| *n != node && holders & 1 << n != 0 && is_whole(w, *n, volume))
        .filter(|n| generation(*n) == generation(node))
        .collect();
    let content = |n: usize, block: u64| w.nodes[n].disks[volume].content[block as usize];
    let is_new = |block: u64, value| w.history.is_current(volume as u16, block, value, w.now);
    let touched = w.history.touched(volume as u16);
    let lost = touched.into_iter().find_map(|block| {
        let spoiled = w.spoiled.contains_key(&(volume as u16, block));
        if spoiled || is_new(block, content(node, block)) {
            return None;
        }
        let source = sources
            .iter()
            .find(|n| is_new(block, content(**n, block)))?;
        Some((block, *source))
    });
    if let Some((block, source)) = lost {
        let text = format!(
            "the metadata of {} call volume {volume} current, whose block {block} has version {} there, which is older \
             than what was acknowledged, and {} on {}; {}",
            name(node),
            content(node, block),
            content(source, block),
            name(source),
            w.history.describe(volume as u16, block)
        );
        w.fail(text);
    }
}

/// A Primary has gone on without this node, which does not know that: what is flushed there is not its own.
fn is_left(w: &World, node: usize, volume: usize) -> bool {
    let generation = |n: usize| {
        let resource = w.nodes[n].resource.as_ref()?;
        Some(
            resource
                .generation(lockstep_format::units::VolumeNr(volume as u16))?
                .0
                & !1,
        )
    };
    let goes_on = |n: usize| w.snapshot(n).is_some_and(|s| s.role == Role::Primary);
    let others = (0..w.nodes.len()).filter(|n| *n != node);
    others
        .filter(|n| goes_on(*n))
        .any(|n| generation(n) != generation(node))
}

/// The same of some generation, however old.
pub(crate) fn is_consistent(w: &World, node: usize, volume: usize) -> bool {
    let flags = w.nodes[node].disks[volume].flags();
    flags.is_some_and(|f| f.contains(DeviceFlags::CONSISTENT))
}

/// The generations on a node's disks follow the rules: it opens, and the history neither repeats
/// itself nor names the present generation.
pub fn generations_are_sound(w: &mut World, node: usize) {
    for volume in 0..w.nodes[node].disks.len() {
        let superblock = match w.nodes[node].disks[volume].superblock() {
            Ok(superblock) => superblock,
            Err(text) => {
                w.fail(format!(
                    "{}: metadata of volume {volume} do not open: {text}",
                    name(node)
                ));
                return;
            }
        };
        let history: Vec<u64> = superblock
            .history
            .iter()
            .map(|u| u.0 & !1)
            .filter(|u| *u != 0)
            .collect();
        let current = superblock.current_uuid.0 & !1;
        let twice = (0..history.len()).any(|i| history[..i].contains(&history[i]));
        if twice || history.contains(&current) {
            w.fail(format!(
                "{}: history of volume {volume} repeats a generation: current {current:#x}, \
                 history {history:#x?}",
                name(node)
            ));
        }
    }
}

/// All nodes are at rest on the same generation.
pub fn generations_agree(w: &mut World) {
    for node in w.storage() {
        generations_are_sound(w, node);
    }
    for volume in 0..usize::from(w.config.volumes) {
        let current = |w: &World, node: usize| {
            let superblock = w.nodes[node].disks[volume].superblock().ok()?;
            Some(superblock.current_uuid.0 & !1)
        };
        for node in 1..w.storage().end {
            let (a, b) = (current(w, 0), current(w, node));
            if a != b {
                w.fail(format!(
                    "volume {volume} is at rest and UpToDate everywhere, but its generation is \
                     {a:x?} on A and {b:x?} on {}",
                    name(node)
                ));
            }
        }
    }
}

/// All nodes are at rest and whole: their metadata say nothing else, and name no crash and nobody who is behind.
pub fn metadata_are_at_rest(w: &mut World, primary: Option<usize>) {
    use lockstep_format::disk::v09::PeerFlags;
    if !w.flushes_peers || w.config.weather != Weather::ByPlace {
        return;
    }
    // Among more nodes a flag may outlive what it stood for until the next attach, and a crash what nobody compares.
    if w.nodes.len() > 2 || w.storage().count() < 2 {
        return;
    }
    for node in w.storage() {
        for volume in 0..w.nodes[node].disks.len() {
            let Ok(superblock) = w.nodes[node].disks[volume].superblock() else {
                continue;
            };
            let (flags, is_primary) = (superblock.flags, primary == Some(node));
            let whole = DeviceFlags::CONSISTENT | DeviceFlags::WAS_UP_TO_DATE;
            let crashed = flags.contains(DeviceFlags::CRASHED_PRIMARY);
            let mut peers = w.storage().filter(|peer| *peer != node);
            let odd = peers.find(|peer| {
                let slot = superblock.peer(crate::world::id(*peer));
                slot.flags.contains(PeerFlags::OUTDATED)
            });
            let what = match odd {
                _ if !flags.contains(whole) => "do not call it current".to_string(),
                _ if crashed && !is_primary => "call it a crashed Primary".to_string(),
                Some(peer) => format!("call {} Outdated", name(peer)),
                None => continue,
            };
            w.fail(format!(
                "all is at rest and in sync, and the metadata of volume {volume} of {} {what}",
                name(node)
            ));
            return;
        }
    }
}

/// All nodes are at rest: every write is durable at all peers, and its sender knows it.
pub fn writes_are_settled(w: &mut World) {
    for node in 0..w.nodes.len() {
        let resource = w.nodes[node].resource.as_ref();
        let unsettled = resource.map_or(0, |r| r.unsettled());
        if unsettled > 0 && w.config.weather == Weather::ByPlace {
            w.fail(format!(
                "all is at rest, and {} waits for the end of {unsettled} writes at its peers",
                name(node)
            ));
        }
    }
}

/// Nothing grows without bound.
pub fn memory_is_bounded(w: &mut World, depth: usize) {
    for node in 0..w.nodes.len() {
        let buffers = w.buffers(node);
        let commands = w.nodes[node].commands.len();
        let most = BUFFERS_MOST + depth * w.nodes.len();
        if buffers > most || commands > COMMANDS_MOST {
            w.fail(format!(
                "{} holds {buffers} buffers (at most {most} are right) and {commands} commands",
                name(node)
            ));
        }
    }
}

/// Buffers that one node may hold: what `max-buffers` grants for each peer, with room to spare.
const BUFFERS_MOST: usize = 10_000;
/// Commands that may wait on one node.
const COMMANDS_MOST: usize = 200;

/// At most one node is Primary, where two are not allowed; one that is frozen without quorum does
/// not count, nor one that has lost it and does not know yet.
pub fn one_primary(w: &mut World) {
    if w.history.several_writers {
        return;
    }
    let is_primary = |w: &mut World, n: usize| {
        w.view(n)
            .is_some_and(|v| v.role == Role::Primary && v.quorate)
    };
    let mut count = 0;
    for node in 0..w.nodes.len() {
        count += usize::from(is_primary(w, node));
    }
    if count > 1 {
        let mut primaries: Vec<usize> = (0..w.nodes.len()).collect();
        primaries.retain(|n| is_primary(w, *n));
        if w.wants_majority && w.config.protocol == Protocol::C {
            primaries.retain(|n| !is_left_by_most(w, *n));
        }
        if primaries.len() > 1 {
            let primaries: Vec<char> = primaries.into_iter().map(name).collect();
            w.fail(format!("several Primaries: {primaries:?}"));
        }
    }
}

/// Most nodes have lost their connection with this Primary, which sees it when a ping is not answered. Until
/// then nothing that it writes is completed, and a frozen Primary that the others meet may go on (its quorum
/// is what they give it).
fn is_left_by_most(w: &World, primary: usize) -> bool {
    let connected = |node: usize, peer: usize| {
        w.snapshot(node).is_some_and(|s| {
            let to_peer = |c: &&ConnectionReport| usize::from(c.peer.0) == peer;
            let state = s.connections.iter().find(to_peer).map(|c| c.state);
            state == Some(ConnState::Connected)
        })
    };
    let others = (0..w.nodes.len()).filter(|n| *n != primary);
    let with_it = others.filter(|n| connected(primary, *n) && connected(*n, primary));
    (with_it.count() + 1) * 2 <= w.nodes.len()
}

/// Why the cluster is not yet at rest and whole; none if it is.
pub fn not_converged(w: &World) -> Option<String> {
    for node in 0..w.nodes.len() {
        let Some(snapshot) = w.snapshot(node) else {
            return Some(format!("{} is down", name(node)));
        };
        if let Some(text) = node_not_converged(w, node, &snapshot) {
            return Some(format!("{}: {text}", name(node)));
        }
        if let Some((id, c)) = w.nodes[node].commands.first_key_value() {
            return Some(format!("{}: command {id} {} waits", name(node), c.text));
        }
        if let Some((id, r)) = w.nodes[node].requests.first_key_value() {
            return Some(format!(
                "{}: request {id} {:?} of block {} waits",
                name(node),
                r.kind,
                r.block
            ));
        }
    }
    None
}

/// Somewhere a block is marked.
pub fn marks_are_left(w: &World) -> bool {
    let marked = |node: usize| {
        let connections = w.snapshot(node).map(|s| s.connections).unwrap_or_default();
        let mut devices = connections.iter().flat_map(|c| &c.peer_devices);
        devices.any(|p| p.out_of_sync_sectors > 0)
    };
    (0..w.nodes.len()).any(marked)
}

/// A node is down or does not count on every disk, so that the cluster is not whole; spares looking
/// closely.
pub fn lacks_a_disk(w: &mut World) -> bool {
    let all = (1u32 << w.storage().end) - 1;
    let volumes = usize::from(w.config.volumes);
    (0..w.nodes.len()).any(|node| {
        w.view(node)
            .is_none_or(|view| view.holders.iter().take(volumes).any(|h| *h != all))
    })
}

/// Two nodes of before protocol 91 are apart because one of them missed the end of a resync: the comparison of that time
/// has no answer (semantics.md, 13.3, rules 34 and 35), so the operator has to write new metadata on one of them.
pub fn is_refused_for_its_age(w: &mut World, protocol: u32) -> bool {
    const WORDS: &str = "requires-newer-protocol";
    protocol < 91
        && (0..w.nodes.len()).any(|n| w.nodes[n].log.iter().any(|l| l.text.contains(WORDS)))
        && w.snapshot(0).is_some_and(|snapshot| {
            let mut connections = snapshot.connections.iter();
            connections.all(|c| c.state != ConnState::Connected)
        })
}

/// It is plain at first sight that the cluster is not at rest; spares making the reason's text.
pub fn is_busy(w: &World) -> bool {
    (0..w.nodes.len())
        .any(|n| !w.is_up(n) || !w.nodes[n].requests.is_empty() || !w.nodes[n].commands.is_empty())
}

fn node_not_converged(w: &World, node: usize, snapshot: &Snapshot) -> Option<String> {
    let due = |node: usize| match w.has_disk(node) {
        true => DiskState::UpToDate,
        false => DiskState::Diskless,
    };
    for device in &snapshot.devices {
        if device.disk_state != due(node) {
            return Some(format!(
                "volume {} is {:?}",
                device.volume, device.disk_state
            ));
        }
        if device.upper_pending > 0 || device.lower_pending > 0 {
            return Some(format!(
                "volume {}: {} requests and {} disk operations pending",
                device.volume, device.upper_pending, device.lower_pending
            ));
        }
    }
    if !snapshot.suspended.is_empty() {
        return Some(format!("suspended: {:?}", snapshot.suspended));
    }
    for connection in &snapshot.connections {
        if connection.state != ConnState::Connected {
            return Some(format!(
                "connection to node {} is {:?}",
                connection.peer, connection.state
            ));
        }
        for p in &connection.peer_devices {
            if p.repl_state != ReplState::Established
                || p.disk_state != due(usize::from(connection.peer.0))
            {
                return Some(format!(
                    "volume {} with node {}: {:?}, peer disk {:?}, {} sectors out of sync",
                    p.volume, connection.peer, p.repl_state, p.disk_state, p.out_of_sync_sectors
                ));
            }
            // Bits between two nodes that both follow a third may outlive its resync: the packet
            // that clears them is not sent where the activity log is in use. They are harmless.
            // With 8.4 equal generations mean no resync, whatever is marked: what an activity log has
            // marked at an attach then stays marked until the next resync. The data are compared.
            let kept = snapshot.connections.len() > 1 || !w.flushes_peers;
            let bits = if kept { 0 } else { p.out_of_sync_sectors };
            if bits + p.pending + p.unacked > 0 {
                return Some(format!(
                    "volume {} with node {}: {} sectors out of sync, {} pending, {} unacked",
                    p.volume, connection.peer, p.out_of_sync_sectors, p.pending, p.unacked
                ));
            }
        }
    }
    None
}

/// Sectors that resyncs still have to copy, as all nodes see it.
pub fn left_to_sync(w: &World) -> u64 {
    let snapshots = (0..w.nodes.len()).filter_map(|node| w.snapshot(node));
    snapshots
        .flat_map(|s| s.connections)
        .flat_map(|c| c.peer_devices)
        .map(|p| p.out_of_sync_sectors)
        .sum()
}

/// All replicas are equal and hold what the history allows; nothing leaks.
pub fn replicas_are_equal(w: &mut World) {
    for volume in 0..w.config.volumes {
        let v = usize::from(volume);
        let size = |node| {
            let devices = w.snapshot(node).map(|s| s.devices).unwrap_or_default();
            let mut sizes = devices.iter().filter(|d| d.volume.0 == volume);
            sizes.next().map_or(0, |d| d.size_sectors)
        };
        let sizes: Vec<u64> = (0..w.nodes.len()).map(size).collect();
        if sizes.iter().any(|s| *s != sizes[0]) {
            w.fail(format!(
                "volume {volume} has different sizes: {sizes:?} sectors"
            ));
            return;
        }
        let blocks = (sizes[0] / 8) as usize;
        for node in 1..w.storage().end {
            let (a, b) = (
                &w.nodes[0].disks[v].content,
                &w.nodes[node].disks[v].content,
            );
            let differs = |block: usize| {
                a[block] != b[block] && !w.spoiled.contains_key(&(volume, block as u64))
            };
            if a != b
                && let Some(block) = (0..blocks.min(a.len())).find(|block| differs(*block))
            {
                let text = format!(
                    "replicas differ while everything is UpToDate: volume {volume} block {block} \
                     is {} on A and {} on {}; {}",
                    a[block],
                    b[block],
                    name(node),
                    w.history.describe(volume, block as u64)
                );
                w.fail(text);
                return;
            }
        }
        for block in w.history.touched(volume) {
            if w.spoiled.contains_key(&(volume, block)) {
                continue;
            }
            let value = w.nodes[0].disks[v].content[block as usize];
            let now = w.now;
            if let Err(text) = w.history.read(volume, block, value, now, now) {
                w.fail(format!("an acknowledged write is lost: {text}"));
                return;
            }
        }
    }
    for node in 0..w.nodes.len() {
        let held = w.buffers(node);
        if held > 0 {
            w.fail(format!(
                "{} holds {held} buffers while it is idle",
                name(node)
            ));
        }
    }
}
