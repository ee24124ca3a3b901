//! Stories that are cut at every packet.
//!
//! A story is played once to its good end, and the packets of each direction are counted. Then it
//! is played again for each packet: after that one was delivered the link breaks, a process dies or
//! a node loses its power; what was on its way is lost. Everything is mended, and the cluster must
//! come together with nothing lost.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;

use lockstep_core::event::LinkId;
use lockstep_core::event::{Input, LinkDownReason};
use lockstep_core::options::{Protocol, Quorum};

use crate::check;
use crate::disk::{Lose, MetaOp, Where};
use crate::operator::Settings;
use crate::scenario::Scenario;
use crate::words;
use crate::world::{Config, Ev, MS, SECOND, World, id, name};

/// Counts delivered packets by direction; stops the story at one of them.
#[derive(Clone, Debug, Default)]
pub struct Trap {
    counts: Option<BTreeMap<(usize, usize), u64>>,
    stop: Option<(usize, usize, u64)>,
    sprung: bool,
    /// Sectors of each metadata write of a node that is done.
    meta: Option<(usize, Vec<u32>)>,
    meta_stop: Option<MetaPoint>,
}

/// A metadata write of a node that only begins: the first sectors are there, then the node dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaPoint {
    /// Writes that are done before.
    pub before: usize,
    /// Sectors of it that are on the disk; of a store to persistent memory, lines of 64 bytes.
    pub sectors: u32,
}

impl Trap {
    /// Records a node's metadata writes, and stops in one of them.
    pub fn on_metadata(node: usize, stop: Option<MetaPoint>) -> Self {
        Trap {
            meta: Some((node, Vec::new())),
            meta_stop: stop,
            ..Trap::default()
        }
    }

    /// The story has come to the point where it is cut.
    pub fn has_sprung(&self) -> bool {
        self.sprung
    }

    /// Sectors of each metadata write that was done.
    pub fn metadata_writes(&self) -> &[u32] {
        self.meta.as_ref().map_or(&[], |(_, writes)| writes)
    }
}

impl World {
    /// A metadata write of a node is about to be done. True: it is torn, and the node must die.
    pub(crate) fn tears_metadata(&mut self, node: usize, volume: usize, id: u64) -> bool {
        let Some((watched, writes)) = self.trap.meta.as_mut() else {
            return false;
        };
        let disk = &mut self.nodes[node].disks[volume];
        if *watched != node {
            return false;
        }
        let (offset, bytes) = match disk.flying_meta.get(&id).map(|f| &f.op) {
            Some(MetaOp::Write { offset, bytes, .. }) => (offset, bytes),
            Some(MetaOp::Store { steps, .. }) => {
                let stop = self.trap.meta_stop.filter(|s| s.before == writes.len());
                writes.push(words::count_lines(steps));
                let Some(stop) = stop else { return false };
                self.trap.sprung = true;
                let steps = steps.clone();
                disk.store_lines(&steps, stop.sectors as usize);
                disk.flying_meta.remove(&id);
                return true;
            }
            Some(MetaOp::Read { .. }) | None => return false,
        };
        let stop = self.trap.meta_stop.filter(|s| s.before == writes.len());
        writes.push((bytes.len() / 512) as u32);
        let Some(stop) = stop else { return false };
        self.trap.sprung = true;
        let at = *offset;
        // The superblock is written whole or not at all.
        let whole = *offset == disk.layout.superblock_byte() && (stop.sectors as usize) < 8;
        let len = if whole {
            0
        } else {
            stop.sectors as usize * 512
        };
        let bytes = bytes[..len].to_vec();
        disk.store_meta(at, &bytes);
        disk.flying_meta.remove(&id);
        true
    }

    /// A packet was handed to a node.
    pub(crate) fn count_delivery(&mut self, from: usize, to: usize) {
        let Some(counts) = self.trap.counts.as_mut() else {
            return;
        };
        let count = counts.entry((from, to)).or_default();
        *count += 1;
        self.trap.sprung |= self.trap.stop == Some((from, to, *count));
    }

    /// The link between two nodes breaks with everything that is on its way.
    pub fn sever(&mut self, a: usize, b: usize) {
        let ends = [a.min(b), a.max(b)];
        let mut told = Vec::new();
        for (link, l) in &mut self.links {
            if l.ends != ends || l.dead {
                continue;
            }
            for side in 0..2 {
                for wire in &mut l.wires[side] {
                    wire.queue.clear();
                    // What is sent before the ends hear of it is lost as well.
                    wire.stalled_until = u64::MAX;
                }
                if l.up[side] && !l.closed[side] {
                    told.push((l.ends[side], l.lives[side], l.ends[1 - side], *link));
                }
            }
        }
        for (node, life, peer, link) in told {
            let input = Box::new(Input::LinkDown {
                peer: id(peer),
                link: LinkId(link),
                reason: LinkDownReason::Broken,
            });
            let delay = self.rng.delay(self.config.net_delay);
            self.at(delay, Ev::Input { node, life, input });
        }
    }
}

/// What happens at a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blow {
    /// The link breaks.
    Link,
    /// The sender's or the receiver's process dies.
    Crash(End),
    /// The sender or the receiver loses its power.
    PowerCut(End),
    /// The sender's or the receiver's links to all others break and stay broken for a while. Only
    /// where a majority is asked for: afterwards at most one side may have it.
    Isolate(End),
}

/// One end of a packet's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Who sent it.
    Sender,
    /// Who got it.
    Receiver,
}

/// All blows with their words.
const BLOWS: [(Blow, &str); 7] = [
    (Blow::Link, "link"),
    (Blow::Crash(End::Sender), "crash-sender"),
    (Blow::Crash(End::Receiver), "crash-receiver"),
    (Blow::PowerCut(End::Sender), "powercut-sender"),
    (Blow::PowerCut(End::Receiver), "powercut-receiver"),
    (Blow::Isolate(End::Sender), "isolate-sender"),
    (Blow::Isolate(End::Receiver), "isolate-receiver"),
];

/// A point of a story.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Sender of the packet.
    pub from: usize,
    /// Receiver.
    pub to: usize,
    /// Packets of this direction that were delivered before the blow.
    pub packet: u64,
    /// What happens.
    pub blow: Blow,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = BLOWS.iter().find(|(b, _)| *b == self.blow);
        let word = word.map_or("", |(_, word)| word);
        let (from, to) = (name(self.from), name(self.to));
        write!(f, "{from}-{to}-{}-{word}", self.packet)
    }
}

impl FromStr for Cut {
    type Err = String;

    /// `A-B-7-link`: after the seventh packet from A to B the link breaks.
    fn from_str(text: &str) -> Result<Self, String> {
        let node = |word: &str| match word.as_bytes() {
            [letter @ b'A'..=b'E'] => Ok(usize::from(letter - b'A')),
            _ => Err(format!("{word} is no node")),
        };
        let mut words = text.splitn(4, '-');
        let mut next = || words.next().ok_or("a cut is FROM-TO-PACKET-BLOW");
        let (from, to) = (node(next()?)?, node(next()?)?);
        let packet = next()?.parse().map_err(|e| format!("{text}: {e}"))?;
        let word = next()?;
        let blow = BLOWS.iter().find(|(_, w)| *w == word);
        let (blow, _) = blow.ok_or_else(|| {
            let all = BLOWS.map(|(_, word)| word);
            format!("no blow is called {word}; there are {}", all.join(", "))
        })?;
        Ok(Cut {
            from,
            to,
            packet,
            blow: *blow,
        })
    }
}

/// A story that can be told again and again.
#[derive(Clone, Copy)]
pub struct Story {
    /// Its name on the command line.
    pub name: &'static str,
    /// What happens in it.
    pub text: &'static str,
    /// It has at least so many packets: a story that became empty would prove nothing.
    pub least_packets: u64,
    /// Number of nodes.
    pub nodes: usize,
    /// Blocks of the volume.
    pub blocks: u64,
    /// Where the metadata lies.
    pub metadata: Where,
    /// The first resync copies everything.
    pub full_sync: bool,
    /// A majority is asked for.
    pub majority: bool,
    /// Protocol of all connections.
    pub protocol: Protocol,
    /// Newest version that the nodes speak, if it is not the newest that there is.
    pub dialect: Option<u32>,
    /// What comes before the part that is cut.
    pub before: fn(&mut Scenario),
    /// Drives the story on; called every millisecond with the number of steps done so far. True:
    /// this step is done.
    pub step: fn(&mut Scenario, u32) -> bool,
    /// Number of steps.
    pub steps: u32,
    /// Print every event.
    pub trace: bool,
}

impl Story {
    /// Plays to the good end; gives the packets of each direction.
    pub fn record(&self) -> Result<BTreeMap<(usize, usize), u64>, String> {
        let mut s = self.begin(None);
        self.tell(&mut s);
        if let Some(text) = s.world.violation {
            return Err(format!("the uncut story fails: {text}"));
        }
        match check::not_converged(&s.world) {
            Some(text) => Err(format!("the uncut story does not end: {text}")),
            None => Ok(s.world.trap.counts.unwrap_or_default()),
        }
    }

    /// What may happen at a packet.
    fn blows(&self) -> impl Iterator<Item = Blow> + use<> {
        let majority = self.majority;
        let blows = BLOWS.into_iter().map(|(blow, _)| blow);
        blows.filter(move |blow| majority || !matches!(blow, Blow::Isolate(_)))
    }

    /// As `play`, and an assertion of the core that fails is a result like others.
    pub fn survives(&self, cut: Cut) -> Result<(), String> {
        let played = catch_unwind(AssertUnwindSafe(|| self.play(cut)));
        played.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("panic: {}", text.unwrap_or_default()))
        })
    }

    /// Plays with a cut; gives what is wrong afterwards.
    pub fn play(&self, cut: Cut) -> Result<(), String> {
        let mut s = self.begin(Some(cut));
        self.tell(&mut s);
        if s.world.violation.is_none() {
            if !s.world.trap.sprung {
                return Err("the story ended before the packet".into());
            }
            blow(&mut s, cut);
            mend(&mut s);
        }
        s.world.violation.map_or(Ok(()), Err)
    }

    /// The story up to the part that is cut.
    pub(crate) fn begin(&self, cut: Option<Cut>) -> Scenario {
        let config = Config {
            nodes: self.nodes,
            blocks: self.blocks,
            metadata: self.metadata,
            protocol: self.protocol,
            disk_delay: MS / 10,
            net_delay: MS / 5,
            trace: self.trace,
            ..Config::small(11)
        };
        let quorum = match self.majority {
            true => Quorum::Majority,
            false => Quorum::Off,
        };
        let change = |o: &mut Settings| {
            o.resource.quorum = quorum;
            if let Some(dialect) = self.dialect {
                o.resource.protocol_max = dialect;
            }
        };
        let mut s = Scenario::with(config, change, self.full_sync);
        (self.before)(&mut s);
        s.world.trap = Trap {
            counts: Some(BTreeMap::new()),
            stop: cut.map(|c| (c.from, c.to, c.packet)),
            ..Trap::default()
        };
        s
    }

    /// Tells the part that is cut, to its end or to the packet.
    pub(crate) fn tell(&self, s: &mut Scenario) {
        let end = s.world.now + 60 * SECOND;
        let mut done = 0;
        while s.world.now < end && s.world.violation.is_none() {
            while done < self.steps && (self.step)(s, done) {
                done += 1;
            }
            if done == self.steps && check::not_converged(&s.world).is_none() {
                return;
            }
            let slice = s.world.now + MS;
            while !s.world.trap.sprung && s.world.step(slice) {}
            if s.world.trap.sprung {
                return;
            }
            s.world.now = s.world.now.max(slice);
            s.operator.tick(&mut s.world);
        }
    }
}

fn blow(s: &mut Scenario, cut: Cut) {
    let node = |end| match end {
        End::Sender => cut.from,
        End::Receiver => cut.to,
    };
    match cut.blow {
        Blow::Link => s.world.sever(cut.from, cut.to),
        Blow::Crash(end) => s.operator.crash(&mut s.world, node(end), Lose::InFlight),
        Blow::PowerCut(end) => s.operator.crash(&mut s.world, node(end), Lose::Unflushed),
        Blow::Isolate(end) => {
            let node = node(end);
            for other in (0..s.world.nodes.len()).filter(|other| *other != node) {
                s.world.set_blocked(node, other, true);
                s.world.set_blocked(other, node, true);
                s.world.sever(node, other);
            }
            one_majority(s, node);
        }
    }
    check::differences_are_marked(&mut s.world);
}

/// A node was cut off from all others: when each side knows it, a write is acknowledged or data are
/// served on one side at most. It dies in the end, and comes back alone: that gives it no majority.
fn one_majority(s: &mut Scenario, apart: usize) {
    let pass = |s: &mut Scenario, time: u64| {
        let end = s.world.now + time;
        while s.world.now < end && s.world.violation.is_none() {
            s.world.run_for(20 * MS);
            s.operator.tick(&mut s.world);
        }
    };
    pass(s, 20 * SECOND);
    two_majorities(s, apart);
    s.operator.crash(&mut s.world, apart, Lose::InFlight);
    s.operator.start(&mut s.world, apart);
    pass(s, 5 * SECOND);
    two_majorities(s, apart);
}

/// Both sides could have a Primary.
fn two_majorities(s: &mut Scenario, apart: usize) {
    let may_serve: Vec<usize> = (0..s.world.nodes.len())
        .filter(|node| {
            let view = s.world.view(*node);
            view.is_some_and(|v| v.quorate && v.holders[0] & 1 << node != 0)
        })
        .collect();
    if may_serve.contains(&apart) && may_serve.len() > 1 {
        let names = may_serve.into_iter().map(name).collect::<String>();
        let text = format!(
            "{} is cut off from the others, and all of {names} have quorum and current data",
            name(apart)
        );
        s.world.fail(text);
    }
}

/// Everything works again: somebody becomes Primary and writes, and all come together.
pub(crate) fn mend(s: &mut Scenario) {
    s.world.trap = Trap::default();
    for a in 0..s.world.nodes.len() {
        for b in 0..s.world.nodes.len() {
            s.world.set_blocked(a, b, false);
        }
    }
    let end = s.world.now + 200 * SECOND;
    let mut wrote = false;
    let mut round = 0u32;
    while s.world.violation.is_none() {
        if round.is_multiple_of(50) {
            s.operator.heal(&mut s.world);
        }
        round += 1;
        if s.operator.primary.is_none() && !s.operator.is_changing() {
            let heir = s
                .operator
                .heirs()
                .into_iter()
                .find(|n| s.operator.is_up(*n));
            if let Some(heir) = heir {
                s.operator.promote(&mut s.world, heir, false);
            }
        }
        if let Some(primary) = s.operator.accepts_io().filter(|_| !wrote) {
            wrote = true;
            s.write(primary, 100, 2);
            s.write(primary, 1500, 1);
        }
        let rest = check::not_converged(&s.world);
        match rest {
            None if wrote => break,
            Some(text) if s.world.now >= end => {
                s.world.fail(format!("not in sync within 200 s: {text}"));
                return;
            }
            _ if s.world.now >= end => {
                let heirs = s.operator.heirs().into_iter().map(name);
                let text = format!(
                    "nobody became Primary; heirs: {}",
                    heirs.collect::<String>()
                );
                s.world.fail(text);
                return;
            }
            _ => {}
        }
        s.world.run_for(20 * MS);
        s.operator.tick(&mut s.world);
    }
    s.world.run_for(2 * SECOND);
    s.operator.tick(&mut s.world);
    crate::swarm::settle_marks(&mut s.world, &mut s.operator);
    if let Some(text) = check::not_converged(&s.world) {
        s.world.fail(format!("it does not stay in sync: {text}"));
    }
    check::replicas_are_equal(&mut s.world);
    check::differences_are_marked(&mut s.world);
    check::one_primary(&mut s.world);
}

/// Plays a story with every blow at every packet of every direction; tells `report` of each cut.
pub fn cut_everywhere(
    story: &Story,
    mut report: impl FnMut(Cut, &Result<(), String>),
) -> Result<Report, String> {
    let mut sum = Report::default();
    for ((from, to), packets) in story.record()? {
        sum.packets += packets;
        for packet in 1..=packets {
            for blow in story.blows() {
                let cut = Cut {
                    from,
                    to,
                    packet,
                    blow,
                };
                sum.cuts += 1;
                let result = story.survives(cut);
                report(cut, &result);
                if let Err(text) = result {
                    sum.failed.push((cut, text));
                }
            }
        }
    }
    Ok(sum)
}

/// Every cut of every story, in an order in which neighbours have little in common.
pub fn all_cuts(stories: &'static [Story]) -> Result<Vec<(&'static Story, Cut)>, String> {
    let mut all = Vec::new();
    for story in stories {
        for ((from, to), packets) in story.record()? {
            for packet in 1..=packets {
                let cut = |blow| Cut {
                    from,
                    to,
                    packet,
                    blow,
                };
                all.extend(story.blows().map(|blow| (story, cut(blow))));
            }
        }
    }
    let (len, mut at) = (all.len(), 0);
    let stride = (0..len).map(|n| len * 5 / 8 + n).find(|n| coprime(*n, len));
    Ok((0..len)
        .map(|_| {
            at = (at + stride.unwrap_or(1)) % len;
            all[at]
        })
        .collect())
}

fn coprime(a: usize, b: usize) -> bool {
    if b == 0 { a == 1 } else { coprime(b, a % b) }
}

/// What became of the cuts of a story.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Packets of the uncut story.
    pub packets: u64,
    /// Cuts that were played.
    pub cuts: u64,
    /// Those after which something was wrong.
    pub failed: Vec<(Cut, String)>,
}
