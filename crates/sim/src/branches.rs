//! The last thing in some worlds of two nodes: the operator lets each of them write apart from the other, and what
//! `after-sb-0pri`, `after-sb-1pri` and `--discard-my-data` say decides whose changes stay. Everywhere else in the
//! simulator two generations of data are an error; here they are made on purpose, when all else was checked.

use std::collections::BTreeSet;

use lockstep_core::command::Command;
use lockstep_core::event::RequestKind;
use lockstep_core::options::{AfterSplitBrain, Fencing, Quorum};
use lockstep_core::state::ConnState;

use crate::faults::Fault;
use crate::operator::{Operator, peer_id};
use crate::plan::Plan;
use crate::rng::{Rng, mixed};
use crate::swarm::{rest, wait_for};
use crate::world::{SECOND, Weather, World, name};

/// How long commands, requests and the way back together may take.
const SOON: u64 = 60 * SECOND;
/// How long nodes stay apart that nothing brings together.
const APART: u64 = 8 * SECOND;

/// What the policies have to make of two branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// This node's data stay.
    Wins(usize),
    /// One of them wins, whichever.
    Either,
    /// The nodes stay apart.
    Apart,
}

/// Two nodes that are whole and at rest write apart and come together again.
pub(crate) fn are_mended(w: &mut World, o: &mut Operator, plan: &Plan) {
    let mut rng = Rng::new(mixed(&[plan.seed, 0x6272_616e_6368]));
    if !rng.permille(SHARE_PERMILLE) || !is_possible(w, o) || may_grow(plan) {
        return;
    }
    w.trace(0, || "== from here on each node writes apart".into());
    w.branches = true;
    w.watches = false;
    w.history.several_writers = true;
    let zero = rng.pick(&[
        AfterSplitBrain::Disconnect,
        AfterSplitBrain::DiscardZeroChanges,
        AfterSplitBrain::DiscardLeastChanges,
        AfterSplitBrain::DiscardLeastChanges,
        AfterSplitBrain::DiscardYoungerPrimary,
        AfterSplitBrain::DiscardOlderPrimary,
    ]);
    let one = rng.pick(&[
        AfterSplitBrain::Disconnect,
        AfterSplitBrain::Consensus,
        AfterSplitBrain::DiscardSecondary,
        AfterSplitBrain::ViolentlyAs0p,
    ]);
    if o.primary.is_some() {
        o.demote(w);
    }
    wait_for(w, o, SOON, "the last demotion ends", |_, o| {
        (o.primary.is_some() || o.is_changing()).then(|| "it runs".into())
    });
    set_policies(w, o, zero, one);
    let first = rng.below(2) as usize;
    o.disconnect(w, first, 1 - first, rng.permille(300));
    wait_for(w, o, SOON, "two nodes part", |w, _| {
        let parted = (0..2).all(|n| !is_connected(w, n) && w.nodes[n].commands.is_empty());
        (!parted).then(|| "they are connected".into())
    });
    let second_stays = rng.permille(500);
    let mut changed = [0, 0];
    for node in [first, 1 - first] {
        let last = node != first;
        // A Primary that has changed nothing is no branch, and cannot give way either.
        let least = u64::from(last && second_stays);
        let writes = rng.range(least, 7);
        changed[node] = writes_alone(w, o, &mut rng, node, writes, !(last && second_stays));
    }
    // Of as many changes the conflict resolver's are given up, which this does not know.
    if w.violation.is_some() || second_stays && changed[0] == changed[1] {
        return;
    }
    let primary = second_stays.then_some(1 - first);
    let verdict = decide(changed, primary, zero, one);
    let before = [content(w, 0), content(w, 1)];
    let what = format!(
        "{zero:?}, {one:?}, {} and {} changed blocks, {}",
        changed[0],
        changed[1],
        primary.map_or("no Primary".into(), |n| format!("{} is Primary", name(n)))
    );
    w.trace(0, || format!("== {what}: {verdict:?}"));
    o.reconnect(w);
    let verdict = match verdict {
        Verdict::Apart => {
            stay_apart(w, o, &before, &what);
            if let Some(primary) = primary {
                command(w, o, primary, Command::Secondary { force: false });
            }
            let loser = rng.below(2) as usize;
            for node in [1 - loser, loser] {
                if is_standalone(w, node) {
                    let connect = Command::Connect {
                        peer: peer_id(1 - node),
                        discard_my_data: node == loser,
                        tentative: false,
                    };
                    command(w, o, node, connect);
                }
            }
            // Without a Primary another policy counts, and it goes before the operator's word.
            match decide(changed, None, zero, one) {
                Verdict::Apart => Verdict::Wins(1 - loser),
                decided => decided,
            }
        }
        other => other,
    };
    let mut since = None;
    let end = format!("two branches ({what}) become one");
    wait_for(w, o, SOON, &end, |w, _| {
        let missing = rest(w);
        since = match missing {
            None => since.or(Some(w.now)),
            Some(_) => None,
        };
        missing.or_else(|| {
            let stays = since.is_some_and(|since| w.now >= since + SECOND);
            (!stays).then(|| "it does not stay so".into())
        })
    });
    if w.violation.is_some() {
        return;
    }
    let after = [content(w, 0), content(w, 1)];
    let of = |winner: usize| after.iter().all(|content| *content == before[winner]);
    let is_right = match verdict {
        Verdict::Wins(winner) => of(winner),
        Verdict::Either | Verdict::Apart => of(0) || of(1),
    };
    if !is_right {
        let is = match (of(0), of(1)) {
            (true, _) => "A's data stayed",
            (_, true) => "B's data stayed",
            _ => "the data are of neither, or differ",
        };
        w.fail(format!(
            "of two branches ({what}) the wrong data stayed: {verdict:?} was due, and {is}"
        ));
    }
}

/// Worlds of two nodes that end so, where it is possible.
const SHARE_PERMILLE: u32 = 350;

/// Nothing but the policies decides: no quorum, no fencing, nothing that still disturbs.
fn is_possible(w: &World, o: &Operator) -> bool {
    let settings = &o.settings;
    w.violation.is_none()
        && w.nodes.len() == 2
        && w.storage().len() == 2
        && w.config.volumes == 1
        && w.config.weather == Weather::ByPlace
        && w.config.slow.is_none()
        && w.config.bitmap_shifts.is_empty()
        && w.flushes_peers
        && w.bad_node.is_none()
        && w.spoils.values().all(|left| *left == 0)
        && w.spoiled.is_empty()
        && !w.history.several_writers
        && !settings.openers
        && settings.turns.is_none()
        && settings.net.fencing == Fencing::DontCare
        && settings.resource.quorum == Quorum::Off
}

/// Nodes may agree on another size when they meet.
fn may_grow(plan: &Plan) -> bool {
    let sizes = [Fault::Resize, Fault::CutResize, Fault::GrowOne];
    plan.faults.iter().any(|f| sizes.contains(&f.fault))
}

fn set_policies(w: &mut World, o: &mut Operator, zero: AfterSplitBrain, one: AfterSplitBrain) {
    let net = &mut o.settings.net;
    (net.after_sb_0pri, net.after_sb_1pri) = (zero, one);
    for node in 0..2 {
        let mut net = o.settings.net.clone();
        net.peer_name = name(1 - node).to_string();
        let peer = peer_id(1 - node);
        command(w, o, node, Command::NetOptions { peer, net });
    }
}

/// Promotes a node, lets it write, and demotes it again. Gives how many blocks it has changed.
fn writes_alone(
    w: &mut World,
    o: &mut Operator,
    rng: &mut Rng,
    node: usize,
    writes: u64,
    demotes: bool,
) -> u64 {
    command(w, o, node, Command::Primary { force: false });
    let mut changed = BTreeSet::new();
    for _ in 0..writes {
        let (block, count) = (rng.pick(&[100, 5000]) + rng.below(24), rng.range(1, 9));
        w.request(node, 0, RequestKind::Write { fua: false }, block, count);
        changed.extend(block..block + count);
    }
    wait_for(w, o, SOON, "a node writes alone", |w, _| {
        (!w.nodes[node].requests.is_empty()).then(|| "some requests wait".into())
    });
    if demotes {
        command(w, o, node, Command::Secondary { force: false });
    }
    changed.len() as u64
}

/// semantics.md, 13.6, and what nodes of this project do about one that has changed nothing.
fn decide(
    changed: [u64; 2],
    primary: Option<usize>,
    zero: AfterSplitBrain,
    one: AfterSplitBrain,
) -> Verdict {
    let more = match changed[0].cmp(&changed[1]) {
        std::cmp::Ordering::Greater => Verdict::Wins(0),
        std::cmp::Ordering::Less => Verdict::Wins(1),
        std::cmp::Ordering::Equal => Verdict::Either,
    };
    if changed.contains(&0) {
        return more;
    }
    let as_zero = match zero {
        AfterSplitBrain::DiscardLeastChanges => more,
        // Both were Primary: then the number of changes decides.
        AfterSplitBrain::DiscardYoungerPrimary | AfterSplitBrain::DiscardOlderPrimary => more,
        _ => Verdict::Apart,
    };
    let Some(primary) = primary else {
        return as_zero;
    };
    match one {
        AfterSplitBrain::DiscardSecondary => Verdict::Wins(primary),
        AfterSplitBrain::Consensus | AfterSplitBrain::ViolentlyAs0p => match as_zero {
            // The resolver's choice may be the Primary, which does not give way.
            Verdict::Wins(winner) if winner == primary => as_zero,
            _ => Verdict::Apart,
        },
        _ => Verdict::Apart,
    }
}

/// Nobody gives way: both keep what they have until the operator says who does.
fn stay_apart(w: &mut World, o: &mut Operator, before: &[Vec<u64>; 2], what: &str) {
    let until = w.now + APART;
    wait_for(w, o, APART * 2, "nodes stay apart", |w, _| {
        (w.now < until).then(|| "the time is not over".into())
    });
    for (node, before) in before.iter().enumerate() {
        if is_connected(w, node) && w.violation.is_none() {
            w.fail(format!(
                "{} connects although no policy decides between two branches ({what})",
                name(node)
            ));
        }
        if content(w, node) != *before && w.violation.is_none() {
            w.fail(format!(
                "{} lost data although no policy decides between two branches ({what})",
                name(node)
            ));
        }
    }
}

/// What is on a node's disk, as far as the volume reaches.
fn content(w: &World, node: usize) -> Vec<u64> {
    let devices = w.snapshot(node).map(|s| s.devices).unwrap_or_default();
    let blocks = devices.first().map_or(0, |d| d.size_sectors as usize / 8);
    let on_disk = w.nodes[node].disks[0].content.iter();
    on_disk.take(blocks).copied().collect()
}

/// A command that has to go well.
fn command(w: &mut World, o: &mut Operator, node: usize, command: Command) {
    if w.violation.is_some() {
        return;
    }
    let text = format!("{command:?}");
    let id = w.command(node, command);
    wait_for(w, o, SOON, "a command is answered", |w, _| {
        let waits = !w.nodes[node].answers.contains_key(&id);
        waits.then(|| text.clone())
    });
    if let Some(Err(error)) = w.nodes[node].answers.get(&id) {
        let text = format!("{} refuses {text}: {}", name(node), error.text);
        w.fail(text);
    }
}

fn connection(w: &World, node: usize) -> Option<ConnState> {
    let snapshot = w.snapshot(node)?;
    snapshot.connections.first().map(|c| c.state)
}

fn is_connected(w: &World, node: usize) -> bool {
    connection(w, node) == Some(ConnState::Connected)
}

fn is_standalone(w: &World, node: usize) -> bool {
    connection(w, node) == Some(ConnState::StandAlone)
}
