//! The good case: a cluster that is whole, with nothing wrong, goes on as if no trouble had been.
//! Requests and commands are answered in time, no connection is lost, a short absence is soon made
//! up for. A bug that a broken link or a time-out makes up for shows here.

use lockstep_core::event::RequestKind;
use lockstep_format::units::NodeId;

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
        let is_asked = o.primary.is_some() && o.demote(w);
        if is_asked {
            changes_roles(w, o, &mut rng);
            requests(w, o, plan, &mut rng);
            is_at_rest(w, o, "a role was handed over");
        }
    }
    are_kept(w, &links);
    // A third node that is brought up to date by one that the Primary may write beside copies
    // everything again and again until it meets the Primary.
    if rng.permille(500) && w.nodes.len() == 2 {
        let node = rng.below(w.nodes.len() as u64) as usize;
        let peer = (node + 1 + rng.below(w.nodes.len() as u64 - 1) as usize) % w.nodes.len();
        if w.violation.is_none() && o.disconnect(w, node, peer, false) {
            wait_for(w, o, SOON, "an operator's disconnect ends", |w, _| {
                let waits = !w.nodes[node].commands.is_empty();
                waits.then(|| "the command waits".into())
            });
            requests(w, o, plan, &mut rng);
            o.reconnect(w);
            is_at_rest(w, o, "two nodes were apart");
        }
    }
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
    wait_for(w, o, SOON * 3, &what, |w, _| {
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

/// Some requests with pauses, each answered soon.
fn requests(w: &mut World, o: &mut Operator, plan: &Plan, rng: &mut Rng) {
    let discards = plan.requests.iter();
    let discards = discards
        .filter(|r| r.kind == RequestKind::Discard)
        .take(1)
        .count();
    for _ in 0..ROUNDS {
        let Some(node) = o.accepts_io() else { return };
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

/// Words of errors that are policy, or that faults of the world explain.
const CAUSES: [&str; 12] = [
    "is longer than the peer's version takes",
    "blocks that could not be copied",
    "a write is without an answer for",
    "a barrier is without an answer for",
    "fence-peer ended with",
    "before-resync-",
    "the connection was refused",
    "the peer refused the connection",
    "sync-target-primary",
    "the disks here cannot be outdated",
    "this Primary is frozen",
    "a write came without the acks",
];
