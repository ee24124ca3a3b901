//! The good case: a cluster that is whole, with nothing wrong, goes on as if no trouble had been.
//! Requests and commands are answered in time, no connection is lost, a short absence is soon made
//! up for. A bug that a broken link or a time-out makes up for shows here.

use std::collections::BTreeSet;

use lockstep_core::event::RequestKind;
use lockstep_core::state::ReplState;
use lockstep_format::units::NodeId;

use crate::check::left_to_sync;
use crate::faults::Fault;
use crate::operator::Operator;
use crate::plan::Plan;
use crate::rng::{Rng, mixed};
use crate::swarm::{rest, wait_for};
use crate::world::{MS, SECOND, Weather, World, name};

/// How long anything may take that nothing stands in the way of.
const SOON: u64 = 20 * SECOND;

/// All nodes are whole and at rest, and nothing happens to them any more.
pub(crate) fn goes_on(w: &mut World, o: &mut Operator, plan: &Plan) {
    // A payload that is still to be changed ends a connection; on a slow wire a ping may do so.
    if w.config.slow.is_some() {
        return;
    }
    if w.violation.is_some() || w.spoils.values().any(|left| *left > 0) {
        return;
    }
    let mut rng = Rng::new(mixed(&[plan.seed, 0x6361_6c6d]));
    w.trace(0, || "== from here on nothing goes wrong".into());
    let links = links(w);
    requests(w, o, plan, &mut rng);
    is_at_rest(w, o, "requests were answered");
    if rng.permille(500) {
        let primary = o.primary;
        let is_asked = primary.is_some() && o.demote(w);
        if is_asked {
            write_in_demotion(w, plan, primary);
            changes_roles(w, o, &mut rng);
            requests(w, o, plan, &mut rng);
            is_at_rest(w, o, "a role was handed over");
        }
    }
    are_kept(w, &links);
    // A third node that is brought up to date by one that the Primary may write beside copies
    // everything again and again until it meets the Primary.
    // Nobody takes the only disk from a client.
    let two = w.nodes.len() == 2 && w.storage().len() == 2;
    if rng.permille(700) && two && w.violation.is_none() {
        is_away(w, o, plan, &mut rng);
    }
}

/// Applications begin writes while their node is demoted: each is served, or fails, and is answered in any case.
fn write_in_demotion(w: &mut World, plan: &Plan, primary: Option<usize>) {
    let mut rng = Rng::new(mixed(&[plan.seed, 0x6465_6d6f_7465]));
    let Some(node) = primary.filter(|_| rng.permille(500)) else {
        return;
    };
    for _ in 0..rng.range(1, 6) {
        w.run_for(rng.delay(MS / 2));
        let kind = RequestKind::Write { fua: false };
        w.request(node, 0, kind, 5000 + rng.below(24), rng.range(1, 4));
    }
}

/// One of two nodes is away for a while, or its disk is, by command. What is copied afterwards is what was
/// written meanwhile, and a replica that is thrown away is copied once.
fn is_away(w: &mut World, o: &mut Operator, plan: &Plan, rng: &mut Rng) {
    let node = rng.below(2) as usize;
    let peer = 1 - node;
    let volume = rng.below(u64::from(w.config.volumes)) as u16;
    let before = w.copied;
    let mut whole = 0;
    let sizes = sizes(w);
    let how = rng.below(5);
    let (began, what) = match how {
        0 | 1 => (o.disconnect(w, node, peer, false), "two nodes were apart"),
        2 => (o.detach(w, node, volume, false), "a disk was away"),
        3 if o.primary.is_some_and(|primary| primary != node) => {
            (o.down(w, node), "a node was away")
        }
        4 if takes_soon(w, plan) && o.may_invalidate(w, node).is_some() => {
            let reset = rng.permille(500);
            let began = o.invalidate(w, node, volume, reset);
            whole = w.nodes[node].disks[usize::from(volume)].content.len() as u64;
            (began, "a replica was thrown away")
        }
        _ => return,
    };
    if !began {
        return;
    }
    let command = "an operator's command ends";
    wait_for(w, o, SOON, command, |w, o| {
        let is_over = w.nodes[node].commands.is_empty() && (how != 3 || o.is_down(node));
        (!is_over).then(|| "the command waits".into())
    });
    let mut changed = requests(w, o, plan, rng);
    if whole > 0 {
        changed.extend(resync_goes_on(w, o, plan, node));
    }
    match how {
        0 | 1 => {
            o.reconnect(w);
        }
        2 => {
            o.reattach(w);
        }
        3 => o.start(w, node),
        _ => {}
    }
    is_at_rest(w, o, what);
    // A resync goes block by block of the bitmap, on the node whose blocks are larger. What changes
    // while everything is copied may be copied twice.
    let bit = |block: u64| block / blocks_of_bit(w);
    let bits: BTreeSet<(u16, u64)> = changed.iter().map(|(v, block)| (*v, bit(*block))).collect();
    let bits = if whole > 0 { changed.len() } else { bits.len() };
    let most = bits as u64 * blocks_of_bit(w) + whole.next_multiple_of(blocks_of_bit(w));
    let copied = w.copied - before;
    // A disk that comes back may be larger than it was, and what is new is copied.
    let is_same = sizes == self::sizes(w);
    // With 8.4 what an attach has marked stays so until nodes that are not equal meet.
    let is_same = is_same && w.flushes_peers;
    if w.violation.is_none() && is_same && copied > most {
        w.fail(format!(
            "{copied} blocks were copied after {what} and nothing went wrong, and at most {most} can differ"
        ));
    }
}

/// Applications go on writing while everything is copied to a node: that goes on as well. Gives the blocks that
/// they have changed.
fn resync_goes_on(w: &mut World, o: &mut Operator, plan: &Plan, node: usize) -> Vec<(u16, u64)> {
    let mut rng = Rng::new(mixed(&[plan.seed, 0x6c6f_6164]));
    let mut changed = Vec::new();
    let mut began = None;
    for round in 0..LOAD_WRITES {
        let Some(primary) = o.accepts_io().filter(|_| w.violation.is_none()) else {
            return changed;
        };
        if w.nodes[primary].requests.len() < 16 {
            let volume = rng.below(u64::from(w.config.volumes)) as u16;
            let block = 5000 + rng.below(LOAD_BLOCKS);
            w.request(primary, volume, RequestKind::Write { fua: false }, block, 1);
            changed.push((volume, block));
        }
        w.run_for(LOAD_PAUSE);
        o.tick(w);
        if round == LOAD_WRITES / 4 {
            began = is_copied_to(w, node).then(|| (w.copied, left_to_sync(w)));
        }
    }
    // Blocks with equal checksums are not copied. What is written clears its marks on both nodes.
    let by_writes = 2 * LOAD_BLOCKS * 8;
    let stands = began
        .is_some_and(|(copied, left)| copied == w.copied && left <= left_to_sync(w) + by_writes);
    // A handler may take its time first.
    if is_copied_to(w, node) && stands && !w.config.handlers && w.violation.is_none() {
        w.fail(format!(
            "{} is copied to, and nothing came for {} ms while applications wrote",
            name(node),
            LOAD_WRITES * 3 / 4 * (LOAD_PAUSE / MS)
        ));
    }
    changed
}

/// Writes under which a resync has to go on, and the time between two of them.
const LOAD_WRITES: u64 = 100;
const LOAD_BLOCKS: u64 = 24;
const LOAD_PAUSE: u64 = 40 * MS;

fn is_copied_to(w: &World, node: usize) -> bool {
    w.snapshot(node).is_some_and(|s| {
        let mut pairs = s.connections.iter().flat_map(|c| &c.peer_devices);
        pairs.any(|p| p.repl_state == ReplState::SyncTarget)
    })
}

fn sizes(w: &World) -> Vec<u64> {
    let snapshots = (0..w.nodes.len()).filter_map(|node| w.snapshot(node));
    let devices = snapshots.flat_map(|s| s.devices);
    devices.map(|d| d.size_sectors).collect()
}

/// Blocks of 4 KiB that one bit of the coarsest bitmap stands for.
fn blocks_of_bit(w: &World) -> u64 {
    let shift = w.config.bitmap_shifts.iter().copied().max();
    1 << (shift.unwrap_or(BLOCK_SHIFT) - BLOCK_SHIFT)
}

/// 4 KiB.
const BLOCK_SHIFT: u8 = 12;

/// What is marked may be copied at the slowest rate. In the dialect of 8.4 whole extents stay marked until nodes that are
/// not equal meet.
fn time_of_copies(w: &World) -> u64 {
    // A resync that has not begun yet may be one of everything in 8.4's dialect.
    let whole = if w.flushes_peers {
        0
    } else {
        w.config.blocks * 4
    };
    let kib = whole.max(crate::check::left_to_sync(w) / 2);
    kib * SECOND / u64::from(w.config.resync_max_kib_s.min(SLOW_KIB_S))
}

/// The rate that the operator of a world may set.
const SLOW_KIB_S: u32 = 2048;

/// A full resync does not take long.
pub(crate) fn takes_soon(w: &World, plan: &Plan) -> bool {
    // Somebody may have changed it to this.
    let is_slow = plan.faults.iter().any(|f| f.fault == Fault::Options);
    let slowest = if is_slow { SLOW_KIB_S } else { u32::MAX };
    let rate = w.config.resync_max_kib_s.min(slowest);
    let seconds = w.config.blocks * 4 / u64::from(rate);
    // So many blocks at a time make a round, and slow disks and wires take some 40 ms for each.
    let rounds = w.config.blocks / u64::from(w.limits.max_buffers.max(1));
    let seconds = seconds.max(rounds / 25);
    seconds * SECOND < SOON && w.config.bandwidth.is_none()
}

/// Another node becomes Primary; each command is answered soon.
fn changes_roles(w: &mut World, o: &mut Operator, rng: &mut Rng) {
    let number = rng.below(16) as usize;
    let mut is_asked = false;
    // Followers of a node that is promoted again at once may take each other for outdated.
    let not_before = w.now + if w.nodes.len() > 2 { 2 * SECOND } else { 0 };
    wait_for(w, o, SOON, "an operator's handover ends", |w, o| {
        if o.primary.is_some() && !o.is_changing() && is_asked {
            return None;
        }
        if w.now < not_before {
            return Some("the operator waits".into());
        }
        let heirs: Vec<usize> = o.heirs().into_iter().filter(|n| o.is_up(*n)).collect();
        if o.primary.is_none() && !o.is_changing() && !heirs.is_empty() {
            is_asked |= o.promote(w, heirs[number % heirs.len()], false);
        }
        Some("there is no new Primary".into())
    });
}

fn links(w: &World) -> Vec<Vec<u64>> {
    let nodes = w.nodes.iter();
    nodes.map(|n| n.links.keys().copied().collect()).collect()
}

fn are_kept(w: &mut World, before: &[Vec<u64>]) {
    if w.violation.is_some() {
        return;
    }
    let now = links(w);
    if let Some(node) = (0..now.len()).find(|n| now[*n] != before[*n]) {
        w.fail(format!(
            "{} loses a connection although nothing is wrong",
            name(node)
        ));
    }
}

fn is_at_rest(w: &mut World, o: &mut Operator, after: &str) {
    let what = format!("after {after} and nothing went wrong, all is at rest");
    let mut since = None;
    // Each volume may wait for two handlers.
    let handlers = u64::from(w.config.handlers);
    let limit = SOON * (3 + 6 * handlers) + time_of_copies(w);
    wait_for(w, o, limit, &what, |w, _| {
        let missing = rest(w);
        since = match missing {
            None => since.or(Some(w.now)),
            Some(_) => None,
        };
        // With protocol A nobody waits for what is on its way.
        missing.or_else(|| {
            let stays = since.is_some_and(|since| w.now >= since + SECOND);
            (!stays).then(|| "it does not stay so".into())
        })
    });
}

/// Some requests with pauses, each answered soon. Gives the blocks that they have changed.
pub(crate) fn requests(
    w: &mut World,
    o: &mut Operator,
    plan: &Plan,
    rng: &mut Rng,
) -> Vec<(u16, u64)> {
    let mut changed = Vec::new();
    let discards = plan.requests.iter();
    let discards = discards
        .filter(|r| r.kind == RequestKind::Discard)
        .take(1)
        .count();
    for _ in 0..ROUNDS {
        let Some(node) = o.accepts_io() else {
            return changed;
        };
        for _ in 0..rng.range(1, 5) {
            let count = rng.range(1, 9);
            let block = rng.pick(&[100, 2048 - 4, 5000]) + rng.below(24);
            let kind = match rng.below(12) {
                0..=5 => RequestKind::Write { fua: false },
                6 => RequestKind::Write { fua: true },
                7 => RequestKind::Flush,
                8 if discards > 0 => RequestKind::Discard,
                _ => RequestKind::Read,
            };
            let (block, count) = match kind {
                RequestKind::Flush => (0, 0),
                _ => (block, count),
            };
            let volume = rng.below(u64::from(w.config.volumes)) as u16;
            w.request(node, volume, kind, block, count);
            if !matches!(kind, RequestKind::Read | RequestKind::Flush) {
                changed.extend((block..block + count).map(|block| (volume, block)));
            }
        }
        let pause = rng.pick(&[0, MS, 30 * MS, 2 * SECOND, 11 * SECOND]);
        let until = w.now + pause;
        wait_for(
            w,
            o,
            SOON,
            "requests are answered, with nothing wrong,",
            |w, _| {
                let waits = !w.nodes[node].requests.is_empty();
                (waits || w.now < until).then(|| "some wait".into())
            },
        );
    }
    changed
}

/// How often requests come.
const ROUNDS: usize = 4;

/// Nodes of one program understand each other, unless payloads change on their way: what one says of
/// another as an error has a cause outside of both.
pub(crate) fn nobody_is_misunderstood(w: &mut World, node: usize, peer: NodeId, text: &str) {
    let is_sharp = w.config.weather == Weather::ByPlace && w.spoils.is_empty();
    // Two Primaries that write to the same place are told so.
    let is_sharp = is_sharp && !w.history.several_writers;
    if is_sharp && !CAUSES.iter().any(|cause| text.contains(cause)) {
        let (node, peer) = (name(node), name(usize::from(peer.0)));
        w.fail(format!(
            "{node} reports an error of {peer} without cause: \"{text}\""
        ));
    }
}

/// A verify that has found a difference: a disk must have changed by itself.
pub(crate) fn nothing_differs(w: &mut World, node: usize, text: &str) {
    let found = text.starts_with("online verify done") && !text.contains(" 0 KiB out of sync");
    if !found || w.config.weather != Weather::ByPlace || w.history.several_writers {
        return;
    }
    let disks = || w.nodes.iter().flat_map(|n| &n.disks);
    let erred = disks().any(|d| d.had_errors || d.given_up || d.trouble.happened);
    let rots = |d: &crate::disk::Disk| {
        d.content
            .iter()
            .any(|value| *value >= crate::rot::BY_ITSELF)
    };
    if erred || !w.spoiled.is_empty() || !w.spoils.is_empty() || disks().any(rots) {
        return;
    }
    w.fail(format!(
        "{} says, and no disk has changed by itself: {text}",
        name(node)
    ));
}

/// Words of errors that are policy, or that faults of the world explain.
const CAUSES: [&str; 16] = [
    "compare shared-secret",
    "incompatible protocol settings",
    "is longer than the peer's version takes",
    "blocks that could not be copied",
    "a write is without an answer for",
    "a barrier is without an answer for",
    "the peer did not take a new generation within",
    "fence-peer ended with",
    "before-resync-",
    "the connection was refused",
    "the peer refused the connection",
    "sync-target-primary",
    "the disks here cannot be outdated",
    "this Primary is frozen",
    "a write came without the acks",
    "came back after a crash",
];
