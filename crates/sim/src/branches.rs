//! The last thing in some worlds of two or three nodes: the operator lets two sides write apart from each other, and what
//! `after-sb-0pri`, `after-sb-1pri`, `after-sb-2pri` and `--discard-my-data` say decides whose changes stay. Everywhere else in
//! the simulator two generations of data are an error; here they are made on purpose, when all else was checked.

use std::collections::BTreeSet;

use lockstep_core::command::Command;
use lockstep_core::event::RequestKind;
use lockstep_core::options::{AfterSplitBrain, Fencing, OnCongestion, Quorum};
use lockstep_core::state::{ConnState, ReplState};

use crate::faults::Fault;
use crate::operator::{Operator, peer_id};
use crate::plan::Plan;
use crate::rng::{Rng, mixed};
use crate::swarm::{rest, wait_for, wait_for_copies};
use crate::world::{SECOND, Weather, World, name};

/// How long commands, requests and the way back together may take.
const SOON: u64 = 60 * SECOND;
/// How long nodes stay apart that nothing brings together.
const APART: u64 = 8 * SECOND;

/// What the policies have to make of two branches of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The data of this side stay.
    Wins(usize),
    /// One of them wins, whichever.
    Either,
    /// The nodes stay apart.
    Apart,
}

/// What every node has of every volume.
type Contents = Vec<Vec<Vec<u64>>>;

/// Two sides that write apart: the first node of each is promoted, and a third node follows one of them.
#[derive(Clone, Debug)]
struct Sides {
    /// The nodes of each.
    nodes: [Vec<usize>; 2],
    /// Who wrote last, and who before.
    first: usize,
    /// Sides whose node stays Primary.
    stay: [bool; 2],
    policies: Policies,
    /// The side that has quorum when the nodes meet, where that is asked for again by then.
    quorate: Option<usize>,
    /// Blocks that each has changed, of every volume.
    changed: [Vec<u64>; 2],
}

#[derive(Clone, Copy, Debug)]
struct Policies {
    zero: AfterSplitBrain,
    one: AfterSplitBrain,
    two: AfterSplitBrain,
}

/// Nodes that are whole and at rest write apart and come together again.
pub(crate) fn are_mended(w: &mut World, o: &mut Operator, plan: &Plan) {
    let mut rng = Rng::new(mixed(&[plan.seed, 0x6272_616e_6368]));
    if !rng.permille(SHARE_PERMILLE) || !is_possible(w, o) {
        return;
    }
    w.trace(0, || "== from here on two sides write apart".into());
    w.branches = true;
    w.watches = false;
    w.history.several_writers = true;
    if o.primary.is_some() {
        o.demote(w);
    }
    wait_for(w, o, SOON, "the last demotion ends", |_, o| {
        (o.primary.is_some() || o.is_changing()).then(|| "it runs".into())
    });
    let mut sides = Sides::choose(w, &mut rng);
    set_policies(w, o, sides.policies);
    let wanted = o.settings.resource.quorum;
    if wanted != Quorum::Off {
        quorum(w, o, Quorum::Off);
        // The operator asks for it again before the nodes meet, or not.
        let counts = matches!(wanted, Quorum::Majority | Quorum::Number(2)) && rng.permille(500);
        let larger = sides.nodes.iter().position(|side| side.len() > 1);
        sides.quorate = larger.filter(|_| counts);
    }
    part(w, o, &sides, rng.permille(300));
    for side in [sides.first, 1 - sides.first] {
        sides.write(w, o, &mut rng, side);
    }
    let verdicts = sides.verdicts(w);
    // What else decides, the conflict resolver of two nodes or several volumes in turn, this does not know.
    if w.violation.is_some() || sides.is_open(&verdicts) {
        return;
    }
    let before = contents(w);
    let what = sides.describe();
    w.trace(0, || format!("== {what}: {verdicts:?}"));
    if sides.quorate.is_some() {
        quorum(w, o, wanted);
    }
    while o.reconnect(w) {}
    let verdicts = match verdicts.contains(&Verdict::Apart) {
        true => {
            stay_apart(w, o, &sides, &before, &what);
            sides.operator_decides(w, o, &mut rng)
        }
        false => verdicts,
    };
    let mut since = None;
    let mut faults = plan.faults.iter().map(|planned| planned.fault);
    let resized = faults.any(|fault| matches!(fault, Fault::Resize | Fault::CutResize));
    let end = format!("two branches ({what}) become one");
    let mut round = 0;
    // A target of two may copy everything, at the rate of resyncs.
    wait_for_copies(w, o, SOON, &end, |w, o| {
        // Who becomes a target where it has no quorum may have refused another one before. Who grows in the middle of a
        // connect drops it, and the word that its data are given up with it.
        round += 1;
        if (sides.quorate.is_some() || resized) && round % 50 == 0 {
            o.heal(w);
        }
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
    let after = contents(w);
    for (volume, verdict) in verdicts.iter().enumerate() {
        if w.violation.is_none() {
            sides.are_right(w, volume, *verdict, (&before, &after));
        }
    }
}

/// The last protocol of 8.4.
const DIALECT_84: u32 = 101;

/// Worlds that end so, where it is possible.
const SHARE_PERMILLE: u32 = 350;

/// Nothing but the policies decides: no fencing, nothing that still disturbs. Where quorum is asked for, no side could be
/// written to without an operator who gives that up.
fn is_possible(w: &World, o: &Operator) -> bool {
    let settings = &o.settings;
    w.violation.is_none()
        && w.nodes.len() <= 3
        && w.storage().len() == w.nodes.len()
        && w.config.weather == Weather::ByPlace
        && w.config.slow.is_none()
        && w.config.bitmap_shifts.is_empty()
        && (w.flushes_peers || settings.resource.protocol_max == DIALECT_84)
        && w.bad_node.is_none()
        && w.spoils.values().all(|left| *left == 0)
        && w.spoiled.is_empty()
        && !has_grown(w)
        && !w.history.several_writers
        && !settings.openers
        && settings.turns.is_none()
        && settings.net.fencing == Fencing::DontCare
        && settings.net.on_congestion == OnCongestion::Block
}

/// A disk that is larger than its node knows yet: what it marks of that when the sides meet again counts as changes.
fn has_grown(w: &World) -> bool {
    let mut disks = w.nodes.iter().flat_map(|node| &node.disks);
    disks.any(|disk| disk.grown)
}

/// The operator changes what every node asks for.
fn quorum(w: &mut World, o: &mut Operator, quorum: Quorum) {
    w.wants_majority = false;
    w.seen.copies = 0;
    for node in 0..w.nodes.len() {
        let mut options = o.settings.resource.clone();
        options.quorum = quorum;
        command(w, o, node, Command::ResourceOptions { options });
    }
}

impl Sides {
    fn choose(w: &World, rng: &mut Rng) -> Sides {
        let three = w.nodes.len() > 2;
        let zero = rng.pick(&[
            AfterSplitBrain::Disconnect,
            AfterSplitBrain::DiscardZeroChanges,
            AfterSplitBrain::DiscardLeastChanges,
            AfterSplitBrain::DiscardLeastChanges,
            AfterSplitBrain::DiscardYoungerPrimary,
            AfterSplitBrain::DiscardOlderPrimary,
        ]);
        // Whether a Primary wrote, a node that followed one does not know.
        let zero = match zero {
            AfterSplitBrain::DiscardYoungerPrimary | AfterSplitBrain::DiscardOlderPrimary
                if three =>
            {
                AfterSplitBrain::DiscardLeastChanges
            }
            zero => zero,
        };
        let one = rng.pick(&[
            AfterSplitBrain::Disconnect,
            AfterSplitBrain::Consensus,
            AfterSplitBrain::DiscardSecondary,
            AfterSplitBrain::ViolentlyAs0p,
        ]);
        let two = rng.pick(&[
            AfterSplitBrain::Disconnect,
            AfterSplitBrain::ViolentlyAs0p,
            AfterSplitBrain::CallPriLostAfterSb,
            AfterSplitBrain::CallPriLostAfterSb,
        ]);
        let mut nodes: Vec<usize> = (0..w.nodes.len()).collect();
        let first = rng.below(2) as usize;
        if three {
            nodes.rotate_left(rng.below(3) as usize);
        }
        let mut sides = [vec![nodes[0]], vec![nodes[1]]];
        if let Some(third) = nodes.get(2) {
            sides[rng.below(2) as usize].push(*third);
        }
        let mut stay = [false; 2];
        // A follower of a Primary is compared by another policy than that one.
        if !three {
            stay[1 - first] = rng.permille(500);
            // With 8.4 both may go on refusing each other.
            stay[first] = stay[1 - first] && rng.permille(500) && w.flushes_peers;
        }
        Sides {
            nodes: sides,
            first,
            stay,
            policies: Policies { zero, one, two },
            quorate: None,
            changed: [Vec::new(), Vec::new()],
        }
    }

    fn primaries(&self) -> Vec<usize> {
        (0..2).filter(|side| self.stay[*side]).collect()
    }

    fn of(&self, node: usize) -> usize {
        usize::from(self.nodes[1].contains(&node))
    }

    /// Pairs of nodes that write apart.
    fn pairs(&self) -> Vec<(usize, usize)> {
        let of = |a: &usize| self.nodes[1].iter().map(|b| (*a, *b)).collect::<Vec<_>>();
        self.nodes[0].iter().flat_map(of).collect()
    }

    /// Promotes a side's node, lets it write, and demotes it again, or not.
    fn write(&mut self, w: &mut World, o: &mut Operator, rng: &mut Rng, side: usize) {
        let node = self.nodes[side][0];
        let volumes = u64::from(w.config.volumes);
        command(w, o, node, Command::Primary { force: false });
        let mut changed = vec![BTreeSet::new(); volumes as usize];
        // A Primary that has changed nothing is no branch, and cannot give way either; nor is a volume that has not
        // changed beside one that has.
        let mut writes = rng.range(u64::from(self.stay[side]), 7);
        // With 8.4 a promotion alone begins a generation.
        if writes > 0 || !w.flushes_peers {
            writes = writes.max(volumes);
        }
        for i in 0..writes {
            let volume = i % volumes;
            let (block, count) = (rng.pick(&[100, 5000]) + rng.below(24), rng.range(1, 9));
            let kind = RequestKind::Write { fua: false };
            w.request(node, volume as u16, kind, block, count);
            changed[volume as usize].extend(block..block + count);
        }
        let group = self.nodes[side].clone();
        wait_for(w, o, SOON, "a side writes alone", |w, _| {
            let waits = !w.nodes[node].requests.is_empty();
            let differs = group.iter().any(|n| content(w, *n) != content(w, node));
            (waits || differs).then(|| "some requests wait".into())
        });
        if !self.stay[side] {
            command(w, o, node, Command::Secondary { force: false });
        }
        self.changed[side] = changed.iter().map(|blocks| blocks.len() as u64).collect();
        if !w.flushes_peers {
            // With 8.4 what an attach has marked stays so until nodes that are not equal meet, and counts.
            let peer = peer_id(self.nodes[1 - side][0]);
            let snapshot = w.snapshot(node);
            let connections = snapshot.iter().flat_map(|s| &s.connections);
            let marked = connections
                .filter(|c| c.peer == peer)
                .flat_map(|c| &c.peer_devices);
            for p in marked {
                let count = &mut self.changed[side][usize::from(p.volume.0)];
                *count = (*count).max(p.out_of_sync_sectors / 8);
            }
        }
    }

    fn verdicts(&self, w: &World) -> Vec<Verdict> {
        let volumes = 0..usize::from(w.config.volumes);
        volumes
            .map(|v| self.decide([self.changed[0][v], self.changed[1][v]], &self.primaries()))
            .collect()
    }

    /// The end depends on more than the policies.
    fn is_open(&self, verdicts: &[Verdict]) -> bool {
        let mut wins = verdicts.iter().filter(|v| matches!(v, Verdict::Wins(_)));
        let one = wins.next();
        let mixed =
            wins.any(|v| Some(v) != one) || verdicts.contains(&Verdict::Either) && one.is_some();
        let equal = (0..self.changed[0].len()).any(|v| self.changed[0][v] == self.changed[1][v]);
        let written = |side: usize| self.changed[side].iter().any(|count| *count > 0);
        let three = self.nodes.iter().any(|side| side.len() > 1);
        (equal && (three || !self.primaries().is_empty()) && (written(0) || written(1)))
            || (mixed && (three || !self.primaries().is_empty()))
    }

    /// semantics.md, 13.6, and what nodes of this project do about one that has changed nothing.
    fn decide(&self, changed: [u64; 2], primaries: &[usize]) -> Verdict {
        let more = match changed[0].cmp(&changed[1]) {
            std::cmp::Ordering::Greater => Verdict::Wins(0),
            std::cmp::Ordering::Less => Verdict::Wins(1),
            std::cmp::Ordering::Equal => Verdict::Either,
        };
        if changed.contains(&0) {
            return more;
        }
        if let Some(side) = self.quorate {
            return Verdict::Wins(side);
        }
        let as_zero = match self.policies.zero {
            AfterSplitBrain::DiscardLeastChanges => more,
            // Both were Primary: then the number of changes decides.
            AfterSplitBrain::DiscardYoungerPrimary | AfterSplitBrain::DiscardOlderPrimary => more,
            _ => Verdict::Apart,
        };
        match primaries {
            [] => as_zero,
            [primary] => match self.policies.one {
                AfterSplitBrain::DiscardSecondary => Verdict::Wins(*primary),
                AfterSplitBrain::Consensus | AfterSplitBrain::ViolentlyAs0p => match as_zero {
                    // The resolver's choice may be the Primary, which does not give way.
                    Verdict::Wins(winner) if winner == *primary => as_zero,
                    _ => Verdict::Apart,
                },
                _ => Verdict::Apart,
            },
            // The loser demotes itself. Nobody becomes a target as a Primary (`rr-conflict`).
            _ => match self.policies.two {
                AfterSplitBrain::CallPriLostAfterSb => as_zero,
                _ => Verdict::Apart,
            },
        }
    }

    fn describe(&self) -> String {
        let Policies { zero, one, two } = self.policies;
        let primaries: Vec<char> = self
            .primaries()
            .iter()
            .map(|s| name(self.nodes[*s][0]))
            .collect();
        let side = |side: usize| -> String { self.nodes[side].iter().map(|n| name(*n)).collect() };
        format!(
            "{zero:?}, {one:?}, {two:?}, {} with {:?} and {} with {:?} changed blocks, Primary: {primaries:?}",
            side(0),
            self.changed[0],
            side(1),
            self.changed[1],
        )
    }

    /// No policy did: one side gives its changes up on the operator's word.
    fn operator_decides(&self, w: &mut World, o: &mut Operator, rng: &mut Rng) -> Vec<Verdict> {
        let loser = rng.below(2) as usize;
        for (a, b) in self.pairs() {
            for (node, peer) in [(a, b), (b, a)] {
                if !is_standalone(w, node, peer) {
                    let peer = peer_id(peer);
                    command(w, o, node, Command::Disconnect { peer, force: false });
                }
            }
        }
        for side in self.primaries() {
            command(
                w,
                o,
                self.nodes[side][0],
                Command::Secondary { force: false },
            );
        }
        for (a, b) in self.pairs() {
            let (winner, loser_node) = if self.of(a) == loser { (b, a) } else { (a, b) };
            for (node, peer) in [(winner, loser_node), (loser_node, winner)] {
                let connect = Command::Connect {
                    peer: peer_id(peer),
                    discard_my_data: node == loser_node,
                    tentative: false,
                };
                command(w, o, node, connect);
            }
        }
        // Without a Primary another policy counts, and it goes before the operator's word.
        let volumes = 0..self.changed[0].len();
        volumes
            .map(
                |v| match self.decide([self.changed[0][v], self.changed[1][v]], &[]) {
                    Verdict::Apart => Verdict::Wins(1 - loser),
                    decided => decided,
                },
            )
            .collect()
    }

    fn are_right(
        &self,
        w: &mut World,
        volume: usize,
        verdict: Verdict,
        (before, after): (&Contents, &Contents),
    ) {
        // Nodes that meet may have agreed on a larger size.
        let same = |a: &[u64], b: &[u64]| a.len() >= b.len() && a[..b.len()] == *b;
        let of = |side: usize| {
            let winner = &before[self.nodes[side][0]][volume];
            after.iter().all(|node| same(&node[volume], winner))
        };
        let is_right = match verdict {
            Verdict::Wins(winner) => of(winner),
            Verdict::Either | Verdict::Apart => of(0) || of(1),
        };
        if !is_right {
            let is = match (of(0), of(1)) {
                (true, _) => format!("the data of {} stayed", name(self.nodes[0][0])),
                (_, true) => format!("the data of {} stayed", name(self.nodes[1][0])),
                _ => "the data are of neither, or differ".into(),
            };
            let what = self.describe();
            w.fail(format!(
                "of two branches ({what}) the wrong data of volume {volume} stayed: {verdict:?} was due, and {is}"
            ));
        }
    }
}

/// The two sides do not reach each other any more.
fn part(w: &mut World, o: &mut Operator, sides: &Sides, force: bool) {
    for (a, b) in sides.pairs() {
        let (node, peer) = if sides.first == 0 { (a, b) } else { (b, a) };
        o.disconnect(w, node, peer, force);
        wait_for(w, o, SOON, "two nodes part", |w, _| {
            let connected = is_connected(w, a, b) || is_connected(w, b, a);
            let busy = (0..w.nodes.len()).any(|n| !w.nodes[n].commands.is_empty());
            // Who is cut off next must be whole: two that both lost the first may compare what they have.
            let copies = (0..w.nodes.len()).any(|n| is_copying(w, n));
            (connected || busy || copies).then(|| "they are connected".into())
        });
    }
}

fn set_policies(w: &mut World, o: &mut Operator, policies: Policies) {
    let net = &mut o.settings.net;
    net.after_sb_0pri = policies.zero;
    net.after_sb_1pri = policies.one;
    net.after_sb_2pri = policies.two;
    for node in 0..w.nodes.len() {
        for peer in (0..w.nodes.len()).filter(|peer| *peer != node) {
            let mut net = o.settings.net.clone();
            net.peer_name = name(peer).to_string();
            let peer = peer_id(peer);
            command(w, o, node, Command::NetOptions { peer, net });
        }
    }
}

/// Nobody gives way: all keep what they have until the operator says who does.
fn stay_apart(w: &mut World, o: &mut Operator, sides: &Sides, before: &Contents, what: &str) {
    let until = w.now + APART;
    wait_for(w, o, APART * 2, "nodes stay apart", |w, _| {
        (w.now < until).then(|| "the time is not over".into())
    });
    for (a, b) in sides.pairs() {
        let met = is_connected(w, a, b) || is_connected(w, b, a);
        if met && w.violation.is_none() {
            w.fail(format!(
                "{} and {} connect although no policy decides between two branches ({what})",
                name(a),
                name(b)
            ));
        }
    }
    for (node, before) in before.iter().enumerate() {
        // A disk that has grown may show that before the comparison.
        let now = content(w, node);
        let mut volumes = now.iter().zip(before);
        if !volumes.all(|(now, before)| now.starts_with(before)) && w.violation.is_none() {
            w.fail(format!(
                "{} lost data although no policy decides between two branches ({what})",
                name(node)
            ));
        }
    }
}

fn contents(w: &World) -> Contents {
    (0..w.nodes.len()).map(|node| content(w, node)).collect()
}

/// What is on a node's disks, as far as the volumes reach.
fn content(w: &World, node: usize) -> Vec<Vec<u64>> {
    let devices = w.snapshot(node).map(|s| s.devices).unwrap_or_default();
    let blocks = devices
        .iter()
        .map(|d| (usize::from(d.volume.0), d.size_sectors as usize / 8));
    let on_disk = |(volume, blocks): (usize, usize)| {
        let content = w.nodes[node].disks[volume].content.iter();
        content.take(blocks).copied().collect()
    };
    blocks.map(on_disk).collect()
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

fn connection(w: &World, node: usize, peer: usize) -> Option<ConnState> {
    let snapshot = w.snapshot(node)?;
    let mut connections = snapshot.connections.iter();
    let to_peer = connections.find(|c| usize::from(c.peer.0) == peer);
    to_peer.map(|c| c.state)
}

fn is_connected(w: &World, node: usize, peer: usize) -> bool {
    connection(w, node, peer) == Some(ConnState::Connected)
}

/// A resync runs with a neighbour, or begins.
fn is_copying(w: &World, node: usize) -> bool {
    let connections = w.snapshot(node).map(|s| s.connections);
    let mut of_all = connections.iter().flatten().flat_map(|c| &c.peer_devices);
    of_all.any(|p| p.repl_state > ReplState::Established)
}

fn is_standalone(w: &World, node: usize, peer: usize) -> bool {
    connection(w, node, peer) == Some(ConnState::StandAlone)
}
