//! What an acknowledgement says is true at the moment in which it is said: the data are on the disk of
//! the node that acknowledges, its metadata are what it goes by, and with a barrier ack nothing of
//! the epoch can be lost with the power.

use std::collections::VecDeque;

use lockstep_core::event::{Input, LinkId};
use lockstep_core::options::Protocol;
use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::Packet;

use crate::check::is_whole;
use crate::world::{Asked, Weather, World, name};

/// What a node has received on a link and may still say something about, oldest first.
#[derive(Debug)]
pub(crate) enum Received {
    /// A write; the values of its blocks.
    Write {
        /// The sender's name of it.
        id: u64,
        volume: u16,
        block: u64,
        content: Vec<u64>,
        /// It was said to be on the disk.
        is_acked: bool,
    },
    /// The end of an epoch.
    Barrier(u32),
}

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
    let entry = match (packet, content) {
        (Packet::Data(data), Some(content)) => Received::Write {
            id: data.block_id.0,
            volume: volume.0,
            block: data.sector.0 / 8,
            content: content.to_vec(),
            is_acked: false,
        },
        (Packet::Barrier(barrier), _) => Received::Barrier(barrier.barrier),
        _ => return,
    };
    if let Some(l) = w.links.get_mut(&link) {
        l.received[usize::from(l.ends[0] != to)].push_back(entry);
    }
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
        Packet::NegAck(ack) => {
            find(w, node, link.0, ack.block_id.0, ack.sector);
        }
        Packet::BarrierAck(ack) => epoch_is_durable(w, node, link.0, ack.barrier),
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
        let Received::Write {
            volume,
            block,
            content,
            ..
        } = entry
        else {
            continue;
        };
        if noted(w, node, volume).is_none() {
            continue;
        }
        let disk = &w.nodes[node].disks[usize::from(volume)];
        let blocks = block..block + content.len() as u64;
        let lost = disk
            .volatile_in(blocks)
            .into_iter()
            .find(|(b, old)| !is_as_new(w, volume, *b, *old, content[(*b - block) as usize]));
        if let Some((block, old)) = lost {
            let text = format!(
                "{} acknowledges a barrier, but would lose block {block} of volume {volume} of its epoch \
                 with its power and have version {old} there; {}",
                name(node),
                w.history.describe(volume, block)
            );
            w.fail(text);
            return;
        }
    }
}

/// With protocol C, a write is acknowledged to its front end: every node that the Primary counts on,
/// and that counts on itself, has it.
pub(crate) fn is_everywhere(w: &mut World, primary: usize, asked: &Asked) {
    let is_sharp = w.config.weather == Weather::ByPlace && !w.history.several_writers;
    if w.config.protocol != Protocol::C || !is_sharp || asked.value == 0 || asked.is_given_up {
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
