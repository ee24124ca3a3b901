//! Worlds with two Primaries: the operator keeps both nodes Primary, writers run on both, and
//! whoever loses the other one shoots it (`fencing resource-and-stonith`).
//!
//! One node with all data is always alive, so no acknowledged write may ever be lost.

use lockstep_core::command::Command;
use lockstep_core::event::{Input, Tag};
use lockstep_core::state::{ConnState, DiskState, Role};

use crate::disk::Lose;
use crate::faults::Fault;
use crate::operator::{Operator, mutual_holders};
use crate::plan::{Plan, PlannedRequest};
use crate::rng::{Rng, mixed};
use crate::world::{MS, World, name};

/// What a plan says of a world with two Primaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// So many of a thousand requests may overlap with those of the other node; the others stay in
    /// their node's half.
    pub common_permille: u32,
}

/// Kinds of faults that leave one node with all data alive.
pub const KINDS: [Fault; 15] = [
    Fault::Reset,
    Fault::Partition,
    Fault::OneWay,
    Fault::Stall,
    Fault::Crash,
    Fault::PowerCut,
    Fault::Handover,
    Fault::Pause,
    Fault::Isolate,
    Fault::LateLink,
    Fault::Freeze,
    Fault::Clock,
    Fault::SlowDisk,
    Fault::Options,
    Fault::Disconnect,
];

/// A node's call of `fence-peer`, in one of its lives.
#[derive(Clone, Copy, Debug)]
struct Call {
    node: usize,
    life: u32,
    peer: usize,
    tag: Tag,
}

/// The operator of two Primaries.
#[derive(Debug)]
pub struct Pair {
    seed: u64,
    shares: Shares,
    /// Nodes with disks; the first two are the Primaries.
    disks: usize,
    /// Nodes that have everything acknowledged, a bit each.
    good: u32,
    /// Primaries that lost their power, until they have everything again.
    lost: u32,
    /// Role command under way on each Primary.
    commands: [Option<u64>; 2],
    /// When each Primary is promoted again.
    promote_at: [u64; 2],
    /// When a node that was shot starts again.
    start_at: Vec<Option<u64>>,
    /// Calls of `fence-peer` with the time of their answer.
    calls: Vec<(u64, Call)>,
    draws: u64,
}

impl Pair {
    /// For a world that has been brought up with node 0 as Primary.
    pub fn new(plan: &Plan, shares: Shares, w: &mut World, o: &mut Operator) -> Self {
        w.fences = true;
        w.history.several_writers = true;
        o.primary = None;
        let disks = w.config.nodes - w.config.diskless;
        Pair {
            seed: plan.seed,
            shares,
            disks,
            good: (1 << disks) - 1,
            lost: 0,
            commands: [None; 2],
            promote_at: [w.now; 2],
            start_at: vec![None; disks],
            calls: Vec::new(),
            draws: 0,
        }
    }

    fn rng(&mut self) -> Rng {
        self.draws += 1;
        Rng::new(mixed(&[self.seed, 0x7061_6972, self.draws]))
    }

    /// Where a request goes, and its first block there; none while nobody takes it.
    pub fn place(&self, w: &mut World, request: &PlannedRequest) -> Option<(usize, u64)> {
        let mut rng = Rng::new(mixed(&[
            self.seed,
            0x77_7269_7465,
            u64::from(request.number),
        ]));
        let wanted = rng.below(2) as usize;
        let common = rng.permille(self.shares.common_permille);
        let node = [wanted, 1 - wanted]
            .into_iter()
            .find(|n| self.commands[*n].is_none() && is_primary(w, *n))?;
        let half = w.config.blocks / 2;
        let block = match common {
            true => request.block,
            false => request.block % (half - 64) + half * node as u64,
        };
        Some((node, block))
    }

    /// Looks around: answers, fencing, promotions.
    pub fn look(&mut self, w: &mut World, o: &mut Operator) {
        self.learn(w);
        for node in 0..self.disks {
            if self.start_at[node].is_some_and(|at| at <= w.now) && !w.is_up(node) {
                self.start_at[node] = None;
                o.start(w, node);
            }
        }
        for node in 0..2 {
            if let Some(command) = self.commands[node]
                && let Some(answer) = w.nodes[node].answers.get(&command)
            {
                let refused = answer.is_err();
                self.commands[node] = None;
                let pause = if refused { 100 * MS } else { 0 };
                self.promote_at[node] = self.promote_at[node].max(w.now + pause);
            }
            self.promote(w, o, node);
        }
        self.fence(w, o);
    }

    /// Who has everything: who is in sync with a node that has, unless a Primary goes on without it.
    fn learn(&mut self, w: &mut World) {
        let volumes = 0..usize::from(w.config.volumes);
        let mut good = self.good;
        for node in (0..self.disks).filter(|n| self.good & 1 << n != 0) {
            good |= volumes
                .clone()
                .fold(self.all(), |all, v| all & mutual_holders(w, node, v));
        }
        for node in 0..2 {
            if let Some(followers) = followers(w, node)
                && good & followers != 0
            {
                good &= followers;
            }
        }
        self.good = good;
        self.lost &= !good;
    }

    fn all(&self) -> u32 {
        (1 << self.disks) - 1
    }

    /// Promotes a Secondary that has the data or sees them.
    fn promote(&mut self, w: &mut World, o: &Operator, node: usize) {
        let waits = self.commands[node].is_some() || self.promote_at[node] > w.now;
        if waits || !o.is_up(node) || is_primary(w, node) {
            return;
        }
        let other = 1 - node;
        let has_all = self.good & 1 << node != 0;
        let may = if self.disks == 2 {
            let seen = w.is_up(other) && sees(w, node) && sees(w, other);
            !w.is_up(other) && has_all || seen
        } else {
            let mut others = (0..self.disks).filter(|n| *n != node && w.is_up(*n));
            let beside = !w.is_up(other) || meets(w, node, other);
            has_all && beside || others.all(|n| meets(w, node, n))
        };
        if may {
            let command = w.command(node, Command::Primary { force: false });
            self.commands[node] = Some(command);
        }
    }

    /// Makes one of the Primaries Secondary for a while.
    pub fn demote(&mut self, w: &mut World, o: &Operator, node: usize, time: u64) {
        if self.commands[node].is_none() && o.is_up(node) && is_primary(w, node) {
            let command = w.command(node, Command::Secondary { force: false });
            self.commands[node] = Some(command);
            self.promote_at[node] = w.now + time;
        }
    }

    /// Answers the calls of `fence-peer` that are due: whoever calls first and has the data lives.
    fn fence(&mut self, w: &mut World, o: &mut Operator) {
        self.learn(w);
        for (node, life, peer, tag) in std::mem::take(&mut w.fence_calls) {
            let delay = self.rng().delay(20 * MS);
            let call = Call {
                node,
                life,
                peer,
                tag,
            };
            self.calls.push((w.now + delay, call));
        }
        let now = w.now;
        while let Some(at) = self.calls.iter().position(|(due, ..)| *due <= now) {
            let (_, call) = self.calls.remove(at);
            let (node, tag) = (call.node, call.tag);
            // What is asked about a client is about the other Primary.
            let other = if call.peer < self.disks {
                call.peer
            } else {
                1 - node
            };
            if w.nodes[node].life != call.life {
                continue;
            }
            let mut exit_code = 7;
            if w.is_up(other) {
                let again = meets(w, node, other);
                if again && self.rng().permille(500) {
                    exit_code = 1;
                } else if self.good & 1 << node != 0 && is_whole(w, node) {
                    w.trace(node, || format!("== shoots {}", name(other)));
                    self.kill(w, o, other, Lose::Unflushed);
                } else {
                    self.kill(w, o, node, Lose::Unflushed);
                    continue;
                }
            }
            w.input(node, Input::HandlerDone { tag, exit_code });
        }
    }

    /// A node dies and starts again later. Not if it is the only one with all data.
    pub fn kill(&mut self, w: &mut World, o: &mut Operator, node: usize, lose: Lose) {
        self.learn(w);
        let left = self.good & !(1 << node);
        let mut others = (0..self.disks).filter(|n| left & 1 << n != 0);
        let survives = others.any(|n| w.is_up(n) && is_whole(w, n));
        if !w.is_up(node) || !survives {
            return;
        }
        // By 8.4's rules a lone crashed Primary is the source, whatever it lost, and so may be one of two.
        if node < 2 && self.lost & 1 << (1 - node) != 0 {
            return;
        }
        let lose = match (0..2).any(|n| n != node && is_primary(w, n)) {
            true => lose,
            false => Lose::InFlight,
        };
        self.good = left;
        let pause = self.rng().delay(500 * MS);
        self.start_at[node] = Some(w.now + pause);
        if node < 2 {
            self.commands[node] = None;
            self.promote_at[node] = w.now + pause + self.rng().delay(300 * MS);
        }
        if lose == Lose::Unflushed {
            self.lost |= 1 << node & 0b11;
            o.lost_power(node);
        }
        o.forget(node);
        w.crash(node, lose);
    }

    /// The node has a disk.
    pub fn has(&self, node: usize) -> bool {
        node < self.disks
    }
}

fn is_primary(w: &mut World, node: usize) -> bool {
    w.view(node).is_some_and(|view| view.role == Role::Primary)
}

/// All its own disks are good.
fn is_whole(w: &World, node: usize) -> bool {
    w.snapshot(node).is_some_and(|s| {
        s.devices
            .iter()
            .all(|d| d.disk_state == DiskState::UpToDate)
    })
}

/// The nodes that get all that this Primary completes; none if it completes nothing.
fn followers(w: &mut World, node: usize) -> Option<u32> {
    let view = w.view(node)?;
    let frozen = w.snapshot(node).is_none_or(|s| !s.suspended.is_empty());
    let volumes = view.holders[..usize::from(w.config.volumes)].iter();
    let followers = volumes.fold(u32::MAX, |all, holders| all & holders);
    (view.role == Role::Primary && !frozen).then_some(followers)
}

/// Both are up and connected with each other, as far as they know.
fn meets(w: &World, node: usize, peer: usize) -> bool {
    let knows = |node: usize, peer: usize| {
        w.snapshot(node).is_some_and(|s| {
            let mut connections = s.connections.iter();
            connections.any(|c| usize::from(c.peer.0) == peer && c.state == ConnState::Connected)
        })
    };
    knows(node, peer) && knows(peer, node)
}

/// It is connected with all, as far as it knows.
fn sees(w: &World, node: usize) -> bool {
    w.snapshot(node).is_some_and(|s| {
        s.connections
            .iter()
            .all(|c| c.state == ConnState::Connected)
    })
}
