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

/// The operator of two Primaries.
#[derive(Debug)]
pub struct Pair {
    seed: u64,
    shares: Shares,
    /// Nodes that have everything acknowledged, a bit each.
    good: u32,
    /// Role command under way on each node.
    commands: [Option<u64>; 2],
    /// When each node is promoted again.
    promote_at: [u64; 2],
    /// When a node that was shot starts again.
    start_at: [Option<u64>; 2],
    /// Calls of `fence-peer` with the time of their answer.
    calls: Vec<(u64, usize, u32, Tag)>,
    draws: u64,
}

impl Pair {
    /// For a world that has been brought up with node 0 as Primary.
    pub fn new(plan: &Plan, shares: Shares, w: &mut World, o: &mut Operator) -> Self {
        w.fences = true;
        w.history.several_writers = true;
        o.primary = None;
        Pair {
            seed: plan.seed,
            shares,
            good: 0b11,
            commands: [None; 2],
            promote_at: [w.now; 2],
            start_at: [None; 2],
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
        for node in 0..2 {
            if self.start_at[node].is_some_and(|at| at <= w.now) && !w.is_up(node) {
                self.start_at[node] = None;
                o.start(w, node);
            }
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

    fn learn(&mut self, w: &mut World) {
        let of = |w: &mut World, node| {
            let volumes = 0..usize::from(w.config.volumes);
            volumes.fold(0b11, |all, v| all & mutual_holders(w, node, v))
        };
        if of(w, 0) == 0b11 && of(w, 1) == 0b11 {
            self.good = 0b11;
        }
        for node in 0..2 {
            if goes_on_alone(w, node) {
                self.good = 1 << node;
            }
        }
    }

    /// Promotes a Secondary that has the data or sees them.
    fn promote(&mut self, w: &mut World, o: &Operator, node: usize) {
        let waits = self.commands[node].is_some() || self.promote_at[node] > w.now;
        if waits || !o.is_up(node) || is_primary(w, node) {
            return;
        }
        let other = 1 - node;
        let alone = !w.is_up(other) && self.good & 1 << node != 0;
        let seen = w.is_up(other) && sees(w, node) && sees(w, other);
        if alone || seen {
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
        for (node, life, tag) in std::mem::take(&mut w.fence_calls) {
            let delay = self.rng().delay(20 * MS);
            self.calls.push((w.now + delay, node, life, tag));
        }
        let now = w.now;
        while let Some(at) = self.calls.iter().position(|(due, ..)| *due <= now) {
            let (_, node, life, tag) = self.calls.remove(at);
            let other = 1 - node;
            if w.nodes[node].life != life {
                continue;
            }
            let mut exit_code = 7;
            if w.is_up(other) {
                let again = sees(w, node) && sees(w, other);
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
        let other = 1 - node;
        let survives = w.is_up(other) && self.good & 1 << other != 0 && is_whole(w, other);
        if !w.is_up(node) || !survives {
            return;
        }
        // By 8.4's rules a lone crashed Primary is the source, whatever it lost.
        let lose = match is_primary(w, other) {
            true => lose,
            false => Lose::InFlight,
        };
        self.good = 1 << other;
        self.commands[node] = None;
        let pause = self.rng().delay(500 * MS);
        self.start_at[node] = Some(w.now + pause);
        self.promote_at[node] = w.now + pause + self.rng().delay(300 * MS);
        if lose == Lose::Unflushed {
            o.lost_power(node);
        }
        o.forget(node);
        w.crash(node, lose);
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

/// It completes writes that the other node does not get.
fn goes_on_alone(w: &mut World, node: usize) -> bool {
    let Some(view) = w.view(node) else {
        return false;
    };
    let frozen = w.snapshot(node).is_none_or(|s| !s.suspended.is_empty());
    let mut volumes = view.holders[..usize::from(w.config.volumes)].iter();
    view.role == Role::Primary && !frozen && volumes.any(|holders| *holders == 1 << node)
}

/// It is connected, as far as it knows.
fn sees(w: &World, node: usize) -> bool {
    w.snapshot(node).is_some_and(|s| {
        s.connections
            .iter()
            .all(|c| c.state == ConnState::Connected)
    })
}
