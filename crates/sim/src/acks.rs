//! What an acknowledgement says is true at the moment in which it is said: the data are on the disk of
//! the node that acknowledges, its metadata are what it goes by, and with a barrier ack nothing of
//! the epoch can be lost with the power.

use std::collections::VecDeque;
use std::rc::Rc;

use lockstep_core::event::{Input, LinkId};
use lockstep_core::options::Protocol;
use lockstep_core::state::{DiskState, ReplSets};
use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::Packet;
use lockstep_format::wire::packet::{BlockAck, ConfirmStable, PeerAck};

use crate::check::{is_consistent, is_whole};
use crate::world::{Asked, Weather, World, id, name};

/// What a node has received on a link and may still say something about, oldest first.
#[derive(Clone, Debug)]
pub(crate) enum Received {
    /// A write; the values of its blocks.
    Write {
        /// The sender's name of it.
        id: u64,
        volume: u16,
        block: u64,
        content: Rc<[u64]>,
        /// It was said to be on the disk.
        is_acked: bool,
        /// It was said not to be there, or not any more.
        is_refused: bool,
    },
    /// The end of an epoch.
    Barrier(u32),
}

/// Where a node that receives is in the sender's stream of writes, and those of which it has not heard who
/// else has them.
#[derive(Debug, Default)]
pub(crate) struct Untold {
    dagtag: u64,
    writes: VecDeque<(u64, u16, u64, Rc<[u64]>)>,
}

impl Untold {
    /// A write has come, or what goes the same way.
    fn advance(&mut self, size_bytes: u64) -> u64 {
        self.dagtag = self.dagtag.wrapping_add(size_bytes / Sector::SIZE);
        self.dagtag
    }
}

/// Writes of which a node may wait to hear.
const UNTOLD_MOST: usize = 10_000;

/// A node gets a packet: what it will say of it is checked later.
pub(crate) fn received(
    w: &mut World,
    link: u64,
    to: usize,
    packet: &Packet,
    content: Option<&[u64]>,
    volume: VolumeNr,
) {
    if w.config.weather != Weather::ByPlace || w.history.several_writers {
        return;
    }
    let Some(l) = w.links.get_mut(&link) else {
        return;
    };
    let side = usize::from(l.ends[0] != to);
    let untold = &mut l.untold[side];
    let entry = match (packet, content) {
        (Packet::Data(data), Some(content)) => {
            let content: Rc<[u64]> = content.into();
            let dagtag = untold.advance(u64::from(data.payload_len));
            let block = data.sector.0 / 8;
            let write = (dagtag, volume.0, block, Rc::clone(&content));
            untold.writes.push_back(write);
            if untold.writes.len() > UNTOLD_MOST {
                untold.writes.pop_front();
            }
            Received::Write {
                id: data.block_id.0,
                volume: volume.0,
                block,
                content,
                is_acked: false,
                is_refused: false,
            }
        }
        (Packet::Barrier(barrier), _) => Received::Barrier(barrier.barrier),
        (Packet::Trim(trim) | Packet::Zeroes(trim), _) => {
            untold.advance(u64::from(trim.size_bytes));
            return;
        }
        (Packet::Dagtag(dagtag), _) => {
            untold.dagtag = dagtag.0;
            return;
        }
        _ => return,
    };
    l.received[side].push_back(entry);
}

/// A node says something about what it has received.
pub(crate) fn said(
    w: &mut World,
    node: usize,
    peer: NodeId,
    link: LinkId,
    packet: &Packet,
    volume: VolumeNr,
) {
    match packet {
        Packet::WriteAck(ack) | Packet::WriteAckInSync(ack) => {
            let Some(index) = find(w, node, link.0, ack.block_id.0, ack.sector) else {
                return;
            };
            let volume = volume.0;
            let side = usize::from(w.links.get(&link.0).is_some_and(|l| l.ends[0] != node));
            let received = w.links.get(&link.0).map(|l| &l.received[side][index]);
            if let Some(Received::Write { block, content, .. }) = received
                && let Some(text) = not_on_disk(w, node, (volume, *block), content.iter().copied())
            {
                w.fail(text);
            }
            is_noted(w, node, peer, volume);
        }
        Packet::NegAck(ack) => is_refused(w, node, link.0, ack),
        Packet::PeerAck(ack) => have_it(w, node, peer, link.0, ack),
        Packet::ConfirmStable(ack) => part_is_durable(w, node, link.0, ack),
        Packet::RsWriteAck(ack) => third_is_marked(w, node, peer, volume, ack),
        Packet::RsIsInSync(ack) => equal_is_durable(w, node, peer, volume, ack),
        Packet::BarrierAck(ack) => epoch_is_durable(w, node, link.0, ack.barrier),
        Packet::Uuids110(uuids) => {
            crate::claims::generation_is_durable(w, node, peer, volume, uuids)
        }
        _ => {}
    }
}

fn of_link(w: &mut World, node: usize, link: u64) -> Option<&mut VecDeque<Received>> {
    let l = w.links.get_mut(&link)?;
    let side = usize::from(l.ends[0] != node);
    l.received.get_mut(side)
}

/// Where the write is among what was received; nobody asks a second time.
fn find(w: &mut World, node: usize, link: u64, wanted: u64, sector: Sector) -> Option<usize> {
    let received = of_link(w, node, link)?;
    let index = received.iter().position(|entry| match entry {
        Received::Write {
            id,
            block,
            is_acked,
            ..
        } => *id == wanted && *block == sector.0 / 8 && !*is_acked,
        Received::Barrier(_) => false,
    })?;
    if let Received::Write { is_acked, .. } = &mut received[index] {
        *is_acked = true;
    }
    Some(index)
}

/// The block has this version, or one that came later.
fn is_as_new(w: &World, volume: u16, block: u64, found: u64, value: u64) -> bool {
    found >= value
        || w.spoiled.contains_key(&(volume, block))
        || !w.history.is_older(volume, block, found, value)
}

/// Its disk has all of a write.
pub(crate) fn has_it(w: &World, node: usize, asked: &Asked) -> bool {
    let values = (0..asked.count).map(|i| asked.value_of(i));
    not_on_disk(w, node, (asked.volume, asked.block), values).is_none()
}

/// What is wrong if a node says that its disk has these versions.
fn not_on_disk(
    w: &World,
    node: usize,
    (volume, first): (u16, u64),
    values: impl Iterator<Item = u64>,
) -> Option<String> {
    let disk = &w.nodes[node].disks[usize::from(volume)];
    if disk.had_errors || disk.given_up {
        return None;
    }
    is_elsewhere(w, node, (volume, first), values)
}

/// The same of a disk with errors as well.
fn is_elsewhere(
    w: &World,
    node: usize,
    (volume, first): (u16, u64),
    values: impl Iterator<Item = u64>,
) -> Option<String> {
    let disk = &w.nodes[node].disks[usize::from(volume)];
    for (block, value) in (first..).zip(values) {
        let found = disk.content.get(block as usize).copied();
        if found.is_some_and(|found| !is_as_new(w, volume, block, found, value)) {
            return Some(format!(
                "{} says that it has version {value} in block {block} of volume {volume}, and its disk has \
                 {found:?}; {}",
                name(node),
                w.history.describe(volume, block)
            ));
        }
    }
    None
}

/// What the node goes by, counted in changes: how much of it the metadata say, and all. None where it has no
/// disk any more that takes writes.
fn noted(w: &World, node: usize, volume: u16) -> Option<(u64, u64)> {
    let disk = &w.nodes[node].disks[usize::from(volume)];
    let resource = w.nodes[node].resource.as_ref()?;
    let is_good = !disk.had_errors && !disk.given_up;
    resource.noted(VolumeNr(volume)).filter(|_| is_good)
}

/// Before an input. The end of a disk operation brings no news that an ack would have to wait for; but what is
/// acknowledged by it may be the last thing that the end of a resync waited for, and then the generation
/// changes in the same step, after the ack.
pub(crate) fn before(w: &mut World, node: usize, input: &Input) {
    let ends = matches!(input, Input::DiskDone { .. } | Input::MetaDone { .. });
    for volume in 0..w.config.volumes {
        let known = noted(w, node, volume).filter(|_| ends);
        w.seen.known[usize::from(volume)] = known.map(|(_, all)| all);
    }
}

fn is_noted(w: &mut World, node: usize, peer: NodeId, volume: u16) {
    let known = w.seen.known[usize::from(volume)];
    if let Some((durable, all)) = noted(w, node, volume)
        && durable < known.unwrap_or(all)
    {
        w.fail(format!(
            "{} acknowledges a write of {} of volume {volume}, and its metadata do not say yet what it \
             goes by",
            name(node),
            name(usize::from(peer.0))
        ));
    }
}

fn epoch_is_durable(w: &mut World, node: usize, link: u64, wanted: u32) {
    let mut over = Vec::new();
    if let Some(received) = of_link(w, node, link) {
        let end = received
            .iter()
            .position(|entry| matches!(entry, Received::Barrier(number) if *number == wanted));
        if let Some(end) = end {
            over.extend(received.drain(..=end));
        }
    }
    for entry in over {
        if !is_durable(w, node, link, &entry, "a barrier") {
            return;
        }
    }
}

/// A part of an epoch is confirmed early.
fn part_is_durable(w: &mut World, node: usize, link: u64, ack: &ConfirmStable) {
    let Some(received) = of_link(w, node, link) else {
        return;
    };
    let of = |wanted: u64| {
        let mut entries = received.iter();
        entries.position(|entry| matches!(entry, Received::Write { id, .. } if *id == wanted))
    };
    let (first, last) = (of(ack.oldest_block_id.0), of(ack.youngest_block_id.0));
    let (Some(first), Some(last)) = (first, last) else {
        return;
    };
    let part: Vec<Received> = received.range(first..=last.max(first)).cloned().collect();
    for entry in part {
        if !is_durable(w, node, link, &entry, "a part of an epoch") {
            return;
        }
    }
}

/// Two nodes copy the disk in turn. The one that turns out to be behind may have sent an older block over a write;
/// the disk is not whole, the log tells what was written, and the other one copies it.
fn copied_by_two(w: &World, node: usize, volume: u16) -> bool {
    let snapshot = w.nodes[node].resource.as_ref().map(|r| r.snapshot());
    let connections = snapshot.iter().flat_map(|s| &s.connections);
    let disks = connections.flat_map(|c| &c.peer_devices);
    let copies = disks.filter(|p| p.volume.0 == volume && p.repl_state.is_sync_target());
    !is_consistent(w, node, usize::from(volume)) && copies.count() > 1
}

/// What a node calls durable is, or it has refused it before, or marks it itself.
fn is_durable(w: &mut World, node: usize, link: u64, entry: &Received, what: &str) -> bool {
    let Received::Write {
        volume,
        block,
        content,
        is_refused,
        ..
    } = entry
    else {
        return true;
    };
    let disk = &w.nodes[node].disks[usize::from(*volume)];
    // Of a disk that is gone nothing is said.
    if noted(w, node, *volume).is_none() && !(disk.had_errors && disk.open && !disk.given_up)
        || *is_refused
    {
        return true;
    }
    let peer = w
        .links
        .get(&link)
        .map_or(node, |l| l.ends[usize::from(l.ends[0] == node)]);
    let failed = disk.had_errors;
    let blocks = *block..block + content.len() as u64;
    let mut volatile = disk.volatile_in(blocks).into_iter();
    let lost = volatile.find(|(b, old)| {
        let is_known = failed && crate::cover::suspects(w, usize::from(*volume), node, peer, *b);
        !is_known && !is_as_new(w, *volume, *b, *old, content[(*b - block) as usize])
    });
    let Some((block, old)) = lost else {
        return true;
    };
    if copied_by_two(w, node, *volume) {
        return true;
    }
    let text = format!(
        "{} acknowledges {what}, but would lose block {block} of volume {volume} of it with its power \
         and have version {old} there; {}",
        name(node),
        w.history.describe(*volume, block)
    );
    w.fail(text);
    false
}

/// A write was refused, perhaps after it had been acknowledged.
fn is_refused(w: &mut World, node: usize, link: u64, ack: &BlockAck) {
    let Some(received) = of_link(w, node, link) else {
        return;
    };
    for entry in received {
        if let Received::Write {
            id,
            block,
            is_acked,
            is_refused,
            ..
        } = entry
            && (*id, *block) == (ack.block_id.0, ack.sector.0 / 8)
        {
            (*is_acked, *is_refused) = (true, true);
        }
    }
}

/// A Primary says which nodes have its writes up to one of them: they do.
fn have_it(w: &mut World, node: usize, peer: NodeId, link: u64, ack: &PeerAck) {
    let Some(l) = w.links.get_mut(&link) else {
        return;
    };
    let untold = &mut l.untold[usize::from(l.ends[0] == node)];
    // What was sent late stands behind newer ones.
    let all = std::mem::take(&mut untold.writes).into_iter();
    let told: VecDeque<_>;
    (told, untold.writes) = all.partition(|(dagtag, ..)| *dagtag <= ack.dagtag.0);
    for (_, volume, block, content) in told {
        for holder in w.storage().filter(|n| ack.mask.contains(id(*n))) {
            // One that is gone without this node's knowing may be another one's target by now.
            let met = w.shares_link(node, holder) && w.shares_link(holder, node);
            if holder != node && !met {
                continue;
            }
            // What failed here as well, with the source of this disk, is copied over, and marked for all others.
            if holder == node && is_being_copied(w, node, volume) {
                continue;
            }
            let values = content.iter().copied();
            if let Some(text) = is_elsewhere(w, holder, (volume, block), values) {
                let (by, to) = (name(node), name(usize::from(peer.0)));
                w.fail(format!(
                    "{by} tells {to} that {} has a write; {text}",
                    name(holder)
                ));
                return;
            }
        }
    }
}

/// The node's disk is Inconsistent.
fn is_being_copied(w: &World, node: usize, volume: u16) -> bool {
    w.snapshot(node).is_some_and(|s| {
        let mut devices = s.devices.iter();
        devices.any(|d| d.volume == VolumeNr(volume) && d.disk_state == DiskState::Inconsistent)
    })
}

/// A target acknowledges a block of a resync. A third node that is away does not have what it was given, and may come
/// back when the source is gone: if the target died now, its metadata or the third node's say so.
fn third_is_marked(w: &mut World, node: usize, source: NodeId, volume: VolumeNr, ack: &BlockAck) {
    let v = usize::from(volume.0);
    let first = ack.sector.0 / 8;
    let blocks = first..first + u64::from(ack.size_bytes) / crate::disk::BLOCK;
    if w.config.weather != Weather::ByPlace || w.nodes[node].disks[v].is_hot(blocks.clone()) {
        return;
    }
    for third in w.storage() {
        if third == node || third == usize::from(source.0) || !is_consistent(w, third, v) {
            continue;
        }
        let (here, there) = (&w.nodes[node].disks[v], &w.nodes[third].disks[v]);
        let differs = |b: &u64| here.content.get(*b as usize) != there.content.get(*b as usize);
        let unmarked = blocks.clone().filter(differs).find(|b| {
            !w.spoiled.contains_key(&(volume.0, *b))
                && !there.is_hot(*b..*b + 1)
                && !here.is_marked(third, *b)
                && !there.is_marked(node, *b)
                && !crate::cover::is_asked_for(w, v, *b)
        });
        if let Some(block) = unmarked {
            let text = format!(
                "{} acknowledges block {block} of volume {volume} in a resync from {}; if it died now, neither its \
                 metadata nor those of {} would mark the difference; {}",
                name(node),
                name(usize::from(source.0)),
                name(third),
                w.history.describe(volume.0, block)
            );
            w.fail(text);
            return;
        }
    }
}

/// A source calls a target's block equal, and clears its mark: a power cut of the target must not bring
/// something older back that nobody knows of.
fn equal_is_durable(w: &mut World, node: usize, peer: NodeId, volume: VolumeNr, ack: &BlockAck) {
    let target = usize::from(peer.0);
    let v = usize::from(volume.0);
    let first = ack.sector.0 / 8;
    let blocks = first..first + u64::from(ack.size_bytes) / crate::disk::BLOCK;
    let here = &w.nodes[node].disks[v];
    let lost = w.nodes[target].disks[v].volatile_in(blocks).into_iter();
    let mut lost = lost.filter(|(block, old)| here.content.get(*block as usize) != Some(old));
    let lost = lost.find(|(block, _)| {
        !w.spoiled.contains_key(&(volume.0, *block))
            && !here.is_hot(*block..*block + 1)
            && !w.nodes[target].disks[v].is_marked(node, *block)
            && !crate::cover::is_asked_for(w, v, *block)
            && !crate::cover::suspects(w, v, node, target, *block)
    });
    if let Some((block, old)) = lost {
        let text = format!(
            "{} calls block {block} of volume {volume} equal on {}, which would have {old} there after a \
             power cut; {}",
            name(node),
            name(target),
            w.history.describe(volume.0, block)
        );
        w.fail(text);
    }
}

/// With protocol C, a write is acknowledged to its front end: every node that the Primary counts on,
/// and that counts on itself, has it. With protocol B it has it in memory at least.
pub(crate) fn is_everywhere(w: &mut World, primary: usize, asked: &Asked) {
    let is_sharp = w.config.weather == Weather::ByPlace && !w.history.several_writers;
    if w.config.protocol == Protocol::A || !is_sharp || asked.value == 0 || asked.is_given_up {
        return;
    }
    let v = usize::from(asked.volume);
    let holders = w.view(primary).map_or(0, |view| view.holders[v]);
    for node in w.storage() {
        let mine = w.view(node).map_or(0, |view| view.holders[v]);
        let both = holders & mine & 1 << node != 0;
        let met = node == primary || w.shares_link(primary, node) && w.shares_link(node, primary);
        if !both || !met || !is_whole(w, node, v) || w.nodes[node].frozen_until > w.now {
            continue;
        }
        if w.config.protocol == Protocol::B && (node == primary || is_in_memory(w, node, asked)) {
            continue;
        }
        let values = (0..asked.count).map(|i| asked.value_of(i));
        if let Some(text) = not_on_disk(w, node, (asked.volume, asked.block), values) {
            let by = name(primary);
            w.fail(format!(
                "{by} acknowledges a write and counts on its peers; {text}"
            ));
            return;
        }
    }
}

/// A write is acknowledged that failed on the node's own disk, which stays with `pass_on`: its metadata do
/// not call it current any more.
pub(crate) fn failure_is_noted(w: &mut World, node: usize, asked: &Asked) {
    let v = usize::from(asked.volume);
    let disk = &w.nodes[node].disks[v];
    // One that came after the write is not what it failed on.
    let was_there = disk.open && disk.opened_at <= asked.start;
    let stays = w.limits.passes_on && was_there && !disk.given_up && disk.had_errors;
    if !stays || w.config.weather != Weather::ByPlace || w.history.several_writers {
        return;
    }
    if asked.value == 0 || asked.is_given_up || !is_whole(w, node, v) {
        return;
    }
    // One that is given up as a whole, because its metadata failed, can note nothing any more.
    let stays = |s: lockstep_core::report::Snapshot| {
        let mut devices = s.devices.into_iter();
        let own = devices.find(|d| d.volume.0 == asked.volume);
        own.is_some_and(|d| d.disk_state >= DiskState::Inconsistent)
    };
    if !w.snapshot(node).is_some_and(stays) {
        return;
    }
    let values = (0..asked.count).map(|i| asked.value_of(i));
    if let Some(text) = is_elsewhere(w, node, (asked.volume, asked.block), values) {
        w.fail(format!(
            "{} acknowledges a write that failed there, and its metadata call its disk current; {text}",
            name(node)
        ));
    }
}

/// A node has received all of a write, or has it on its disk already.
fn is_in_memory(w: &World, node: usize, asked: &Asked) -> bool {
    let links = w.nodes[node].links.keys();
    let links = links.filter_map(|link| w.links.get(link));
    let received: Vec<&VecDeque<Received>> = links
        .map(|l| &l.received[usize::from(l.ends[0] != node)])
        .collect();
    (0..asked.count).all(|i| {
        let (wanted, value) = (asked.block + i, asked.value_of(i));
        let is_received = |entry: &Received| match entry {
            Received::Write {
                volume,
                block,
                content,
                ..
            } => {
                let at = wanted.checked_sub(*block);
                let at = at.and_then(|at| content.get(at as usize));
                *volume == asked.volume && at == Some(&value)
            }
            Received::Barrier(_) => false,
        };
        let mut entries = received.iter().copied().flatten();
        let values = std::iter::once(value);
        entries.any(is_received) || not_on_disk(w, node, (asked.volume, wanted), values).is_none()
    })
}
