//! Time-outs that strike: nobody is given up before the time is over that was agreed on, and nobody who has
//! answered. What a link still owes an answer is counted at its ends, outside the core.

use std::collections::VecDeque;

use lockstep_core::event::LinkId;
use lockstep_core::options::OnIoError;
use lockstep_format::units::NodeId;
use lockstep_format::wire::Packet;
use lockstep_format::wire::flags::DataFlags;
use lockstep_format::wire::packet::BlockId;

use crate::operator::Settings;
use crate::world::{MS, Node, World, name};

/// Times that the configuration of a world names, in nanoseconds; 0 where there is none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// `disk-timeout`.
    disk: u64,
    /// `timeout` × `ko-count`.
    answer: u64,
    /// `ping-timeout`.
    ping: u64,
    /// The largest `max-epoch-size` that any connection had.
    pub(crate) epoch: u32,
    /// `al-updates no`.
    pub(crate) no_log: bool,
    /// `on-io-error pass_on`.
    pub(crate) passes_on: bool,
    /// The largest `max-buffers` that any connection had, in pages.
    pub(crate) max_buffers: u32,
}

impl Limits {
    /// A node starts with these settings.
    pub(crate) fn of(settings: &Settings, before: Limits) -> Limits {
        let tenths = |tenths: u64| tenths * 100 * MS;
        let net = &settings.net;
        Limits {
            disk: tenths(u64::from(settings.disk.disk_timeout_tenths)),
            answer: tenths(u64::from(net.timeout_tenths)) * u64::from(net.ko_count),
            ping: tenths(u64::from(net.ping_timeout_tenths)),
            epoch: net.max_epoch_size.max(before.epoch),
            no_log: !settings.disk.al_updates,
            passes_on: settings.disk.on_io_error == OnIoError::PassOn,
            max_buffers: net.max_buffers.max(before.max_buffers),
        }
    }
}

/// What one end of a link waits for.
#[derive(Debug, Default)]
pub(crate) struct Open {
    /// Writes and barriers without an answer, oldest first, and when they were sent.
    asked: VecDeque<(u64, Key)>,
    /// Pings without an answer: when their time began.
    pings: VecDeque<u64>,
    /// Writes since the last barrier.
    epoch: u32,
    /// Parts of resyncs.
    pub(crate) resync: crate::asking::Asked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Write(BlockId),
    Barrier(u32),
}

const ACKED: DataFlags = DataFlags::SEND_RECEIVE_ACK.union(DataFlags::SEND_WRITE_ACK);

/// What a node's end of a link waits for.
pub(crate) fn open(w: &mut World, node: usize, link: u64) -> Option<&mut Open> {
    let l = w.links.get_mut(&link)?;
    let side = usize::from(l.ends[0] != node);
    l.open.get_mut(side)
}

/// A node sends a packet.
pub(crate) fn sent(w: &mut World, node: usize, link: LinkId, packet: &Packet) {
    let now = w.now;
    // Before version 100 the flags are not there, and whether there will be an ack goes by the protocol.
    let is_old = !w.flushes_peers;
    count(w, node, link, packet);
    let key = match packet {
        Packet::Data(data) if is_old || data.flags.intersects(ACKED) => Key::Write(data.block_id),
        Packet::Trim(trim) | Packet::Zeroes(trim) if is_old || trim.flags.intersects(ACKED) => {
            Key::Write(trim.block_id)
        }
        Packet::Barrier(barrier) => Key::Barrier(barrier.barrier),
        Packet::Ping => {
            if let Some(open) = open(w, node, link.0) {
                open.pings.push_back(now);
            }
            return;
        }
        // The time-out of a ping that is under way begins anew with other options.
        Packet::ProtocolUpdate(_) => {
            let open = open(w, node, link.0);
            for ping in open.into_iter().flat_map(|open| &mut open.pings) {
                *ping = now;
            }
            return;
        }
        _ => return,
    };
    if let Some(open) = open(w, node, link.0) {
        open.asked.push_back((now, key));
    }
}

/// No epoch is larger than `max-epoch-size` allows.
fn count(w: &mut World, node: usize, link: LinkId, packet: &Packet) {
    let most = w.limits.epoch;
    let Some(open) = open(w, node, link.0) else {
        return;
    };
    match packet {
        Packet::Data(_) | Packet::Trim(_) | Packet::Zeroes(_) => open.epoch += 1,
        Packet::Barrier(_) => open.epoch = 0,
        _ => return,
    }
    if open.epoch > most {
        let writes = open.epoch;
        w.fail(format!(
            "{} sends {writes} writes without a barrier, and max-epoch-size is {most}",
            name(node)
        ));
    }
}

/// A packet reaches a node.
pub(crate) fn heard(w: &mut World, node: usize, link: u64, packet: &Packet) {
    let now = w.now;
    // What comes on the control stream gives the answer to a ping the whole time again.
    if let Packet::Ping | Packet::PingAck = packet {
        let open = open(w, node, link);
        for ping in open.into_iter().flat_map(|open| &mut open.pings) {
            *ping = now;
        }
    }
    let write = match packet {
        Packet::RecvAck(ack)
        | Packet::WriteAck(ack)
        | Packet::WriteAckInSync(ack)
        | Packet::Superseded(ack)
        | Packet::RetryWrite(ack)
        | Packet::NegAck(ack) => ack.block_id,
        Packet::BarrierAck(ack) => {
            if let Some(open) = open(w, node, link) {
                let of = Key::Barrier(ack.barrier);
                let end = open.asked.iter().position(|(_, key)| *key == of);
                if let Some(end) = end {
                    open.asked.drain(..=end);
                }
            }
            return;
        }
        Packet::PingAck => {
            if let Some(open) = open(w, node, link) {
                open.pings.pop_front();
            }
            return;
        }
        _ => return,
    };
    if let Some(open) = open(w, node, link) {
        let answered = open
            .asked
            .iter()
            .position(|(_, key)| *key == Key::Write(write));
        if let Some(at) = answered {
            open.asked.remove(at);
        }
    }
}

/// A node says that it gives a peer up.
pub(crate) fn strikes(w: &mut World, node: usize, peer: NodeId, text: &str) {
    let waits = text.contains("is without an answer for");
    let is_silent = text.contains("did not answer a ping");
    if !waits && !is_silent || w.nodes[node].skew > 0 {
        return;
    }
    let peer = usize::from(peer.0);
    let mut links = w.nodes[node].links.iter();
    let Some(link) = links.find(|(_, of)| **of == peer).map(|(link, _)| *link) else {
        return;
    };
    let (now, limits) = (w.now, w.limits);
    let awake_since = w.nodes[node].frozen_until;
    let Some(open) = open(w, node, link) else {
        return;
    };
    let (since, last, limit) = match waits {
        true => {
            let since = open.asked.front().map(|(at, _)| *at);
            (since, since, limits.answer)
        }
        false => {
            let pings = &open.pings;
            (pings.front().copied(), pings.back().copied(), limits.ping)
        }
    };
    // Whoever stood still looks at the clock before it reads what came meanwhile, so it has to look twice.
    let due = last.map(|at| at + limit).filter(|due| *due < awake_since);
    if due.is_some_and(|due| awake_for(&w.nodes[node], due, now) < LOOK) {
        w.fail(format!(
            "{} stood still until {} ms ago, and gives up {} without a look at what it has answered",
            name(node),
            (now - awake_since) / MS,
            name(peer)
        ));
    }
    if is_silent && now <= awake_since + limits.ping {
        return;
    }
    if since.is_none_or(|since| now < since + limit) {
        let waited = since.map(|since| (now - since) / MS);
        w.fail(format!(
            "{} gives up {} (\"{text}\"), which owes an answer since {waited:?} ms, and may take {} ms",
            name(node),
            name(peer),
            limit / MS
        ));
    }
}

/// A disk that answers in time is not given up, and nobody who stood still looks at what came meanwhile only
/// after that.
pub(crate) fn disk_is_given_up(w: &mut World, node: usize, volume: usize) {
    let n = &w.nodes[node];
    let disk = &n.disks[volume];
    let (now, limit) = (w.now, w.limits.disk);
    if disk.is_forced || n.skew > 0 || limit == 0 {
        return;
    }
    let data = disk.flying.iter().map(|(_, f)| f.since);
    let since = data.chain(disk.flying_meta.values().map(|f| f.since)).min();
    let waited = since.map_or(0, |since| now - since);
    if waited < limit {
        w.fail(format!(
            "{} gives up the disk of volume {volume} after {} ms, and disk-timeout is {} ms",
            name(node),
            waited / MS,
            limit / MS
        ));
    } else if now - waited + limit >= n.frozen_from && now < n.frozen_until + AWAKE {
        w.fail(format!(
            "{} stood still until {} ms ago, and gives up the disk of volume {volume} without a look at \
             what it has answered",
            name(node),
            (now - n.frozen_until) / MS
        ));
    }
}

/// How much of this time the process was awake.
fn awake_for(node: &Node, from: u64, to: u64) -> u64 {
    let last = (node.frozen_from, node.frozen_until);
    let times = node.frozen_before.iter().chain([&last]);
    let slept = times.map(|(start, end)| (*end).min(to).saturating_sub((*start).max(from)));
    (to - from) - slept.sum::<u64>()
}

/// What came meanwhile is read in less.
const LOOK: u64 = MS;
/// Whoever stood still when the time was over has to look twice.
const AWAKE: u64 = 90 * MS;
