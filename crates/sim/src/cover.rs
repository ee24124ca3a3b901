//! Marks, looked at block by block all the time: before a write reaches a disk, whether a node that
//! died now would know of the difference; and whether nodes that are up, and will not read their
//! metadata again before they meet, know it in memory.

use lockstep_format::disk::v09::DeviceFlags;
use lockstep_format::units::{Sector, VolumeNr};

use crate::disk::{DataOp, Disk};
use crate::world::{SECOND, World, id, name};

/// A write goes to a node's disk, and from now on any part of it may be there: where it differs
/// from another node's disk one of the two metadata areas says so.
pub(crate) fn write_is_marked(w: &mut World, node: usize, volume: usize, op: &DataOp) {
    let DataOp::Write { block, content, .. } = op else {
        return;
    };
    if w.nodes[node].disks[volume].is_hot(*block..*block + content.len() as u64) {
        return;
    }
    let among = w.storage().len() > 2;
    let is_target = among && is_partial(w, node, volume);
    for peer in w.storage().filter(|peer| *peer != node) {
        if among && is_partial(w, peer, volume) {
            // A disk that is being resynced is marked by its source.
            continue;
        }
        let theirs = &w.nodes[peer].disks[volume].content;
        let differing: Vec<u64> = (*block..*block + content.len() as u64)
            .filter(|b| theirs.get(*b as usize) != content.get((*b - *block) as usize))
            .filter(|b| !w.spoiled.contains_key(&(volume as u16, *b)))
            .filter(|b| !is_known_bad(w, volume, node, peer, *b))
            .collect();
        if differing.is_empty() {
            continue;
        }
        let marks =
            |of: usize, towards: usize| w.nodes[of].disks[volume].marks(towards, &differing);
        // What it marks towards anybody an attach makes marks towards all.
        let own = match is_target {
            true => marks_of_target(w, node, volume, &differing),
            false => marks(node, peer),
        };
        let (Ok(own), Ok(theirs)) = (own, marks(peer, node)) else {
            continue;
        };
        if let Some(i) = (0..differing.len()).find(|i| !own[*i] && !theirs[*i]) {
            let block = differing[i];
            let text = format!(
                "{} writes block {block} of volume {volume}; if it died now, neither its metadata \
                 nor those of {} would mark the difference; {}",
                name(node),
                name(peer),
                w.history.describe(volume as u16, block)
            );
            w.fail(text);
            return;
        }
    }
}

/// What a disk that is being resynced marks towards any other one.
fn marks_of_target(
    w: &World,
    node: usize,
    volume: usize,
    blocks: &[u64],
) -> Result<Vec<bool>, String> {
    let mut all = vec![false; blocks.len()];
    for peer in w.storage().filter(|peer| *peer != node) {
        let marks = w.nodes[node].disks[volume].marks(peer, blocks)?;
        for (all, mark) in all.iter_mut().zip(marks) {
            *all |= mark;
        }
    }
    Ok(all)
}

/// Nodes that are up know in memory what differs between them. One that is down, or has no disk
/// now, will know what its metadata say.
pub(crate) fn differences_are_known(w: &mut World) {
    for volume in 0..usize::from(w.config.volumes) {
        for x in w.storage() {
            for y in x + 1..w.storage().end {
                pair_knows(w, volume, (x, y), &(0..u64::MAX));
            }
        }
    }
}

/// A node has taken a range for equal with others on a third node's word.
pub(crate) fn range_is_known(
    w: &mut World,
    node: usize,
    volume: VolumeNr,
    sector: Sector,
    size_bytes: u32,
) {
    let first = sector.0 / 8;
    let blocks = first..first + u64::from(size_bytes) / crate::disk::BLOCK;
    for peer in w.storage().filter(|peer| *peer != node) {
        pair_knows(
            w,
            usize::from(volume.0),
            (node.min(peer), node.max(peer)),
            &blocks,
        );
    }
}

fn pair_knows(w: &mut World, volume: usize, (x, y): (usize, usize), range: &std::ops::Range<u64>) {
    let content = |node: usize| &w.nodes[node].disks[volume].content[..];
    let (of_x, of_y) = (content(x), content(y));
    let blocks = w.history.touched_blocks(volume as u16).iter();
    let blocks = blocks.filter(|b| range.contains(b)).copied();
    let differing = blocks.filter(|b| of_x.get(*b as usize) != of_y.get(*b as usize));
    let unknown = differing
        .filter(|block| !w.spoiled.contains_key(&(volume as u16, *block)))
        .find(|block| !suspects(w, volume, x, y, *block) && !suspects(w, volume, y, x, *block));
    let key = (x, y, volume);
    let Some(block) = unknown else {
        if range.end == u64::MAX {
            w.seen.unknown.remove(&key);
        }
        return;
    };
    if is_asked_for(w, volume, block) {
        return;
    }
    let partial = is_partial(w, x, volume) || is_partial(w, y, volume);
    if partial && w.storage().len() > 2 {
        // A disk that is being resynced is marked by its source, until that has told it all.
        let since = *w.seen.unknown.entry(key).or_insert(w.now);
        if w.now < since + UNKNOWN_MOST {
            return;
        }
    }
    let text = format!(
        "volume {volume} block {block} differs between {} ({}) and {} ({}), and neither of them \
         knows it; {}",
        name(x),
        w.nodes[x].disks[volume].content[block as usize],
        name(y),
        w.nodes[y].disks[volume].content[block as usize],
        w.history.describe(volume as u16, block)
    );
    w.fail(text);
}

/// How long it may be that a disk which is not whole, and a third one, know of no difference.
const UNKNOWN_MOST: u64 = 2 * SECOND;

/// The node would compare the block with the peer's.
pub(crate) fn suspects(w: &World, volume: usize, node: usize, peer: usize, block: u64) -> bool {
    let resource = w.nodes[node].resource.as_ref();
    let known =
        resource.and_then(|r| r.suspects(VolumeNr(volume as u16), id(peer), Sector(block * 8)));
    known.unwrap_or_else(|| {
        let disk = &w.nodes[node].disks[volume];
        let copied = w.storage().len() > 2 && is_partial_disk(disk);
        // What a disk that is not whole marks towards anybody an attach makes marks towards all.
        disk.is_marked(peer, block) || copied && disk.marks_somebody(block)
    })
}

/// A front end waits for a request of the block: whatever becomes of it is not decided.
pub(crate) fn is_asked_for(w: &World, volume: usize, block: u64) -> bool {
    let mut requests = w.nodes.iter().flat_map(|n| n.requests.values());
    requests
        .any(|r| usize::from(r.volume) == volume && (r.block..r.block + r.count).contains(&block))
}

/// The same of requests that change it.
pub(crate) fn is_asked_for_writing(w: &World, volume: usize, block: u64) -> bool {
    let mut requests = w.nodes.iter().flat_map(|n| n.requests.values());
    requests.any(|r| {
        usize::from(r.volume) == volume
            && r.kind != lockstep_core::event::RequestKind::Read
            && (r.block..r.block + r.count).contains(&block)
    })
}

/// The block cannot be read on a node's disk, and the node knows it.
pub(crate) fn is_known_bad(w: &World, volume: usize, x: usize, y: usize, block: u64) -> bool {
    let is_bad = |node: usize| w.nodes[node].disks[volume].bad.contains_key(&block);
    (is_bad(x) || is_bad(y))
        && (suspects(w, volume, x, y, block) || suspects(w, volume, y, x, block))
}

/// According to its metadata the disk does not have all data of a generation.
fn is_partial(w: &World, node: usize, volume: usize) -> bool {
    is_partial_disk(&w.nodes[node].disks[volume])
}

pub(crate) fn is_partial_disk(disk: &Disk) -> bool {
    let flags = disk.flags();
    flags.is_some_and(|f| !f.contains(DeviceFlags::CONSISTENT))
}
