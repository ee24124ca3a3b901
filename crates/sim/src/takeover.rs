//! Who takes over from a Primary that is frozen, and what becomes of that one.

use lockstep_core::command::Command;
use lockstep_core::options::{OnLoss, OnSuspendedPrimaryOutdated, Protocol, Quorum};
use lockstep_core::state::{ConnState, Role};

use crate::heirs::LONG_ENOUGH;
use crate::operator::{Operator, generations, members};
use crate::promises::View;
use crate::sometimes;
use crate::world::World;

/// Another node is to become Primary as soon as this one is frozen.
#[derive(Clone, Debug)]
pub(crate) struct Takeover {
    primary: usize,
    /// Of each volume the nodes that have everything that was acknowledged.
    heirs: Vec<u32>,
    /// Lives of all nodes: who died meanwhile may lack something.
    lives: Vec<u32>,
}

impl Operator {
    /// The Primary is about to be cut off: once it is frozen, one of those who have all its data
    /// takes over. None where nobody could know who has them.
    pub fn take_over_soon(&mut self, w: &mut World) -> Option<usize> {
        let primary = self.primary?;
        let possible = w.config.protocol == Protocol::C
            && self.settings.resource.quorum != Quorum::Off
            && self.settings.resource.on_no_quorum == OnLoss::SuspendIo
            && self.frozen.is_none()
            && !self.is_changing()
            && self.is_up(primary);
        let view = w.view(primary).filter(|v| possible && v.quorate)?;
        let shares = |peer: &usize| *peer != primary && w.shares_link(primary, *peer);
        let heirs = (0..self.heirs.len()).map(|volume| {
            let holders = members(view.holders[volume]).into_iter().filter(shares);
            holders.fold(0, |all, peer| all | 1 << peer)
        });
        self.takeover = Some(Takeover {
            primary,
            heirs: heirs.collect(),
            lives: w.nodes.iter().map(|n| n.life).collect(),
        });
        Some(primary)
    }

    /// Lets others take over from a Primary that is frozen now, and forgets one that is none.
    pub(crate) fn look_at_frozen(&mut self, w: &mut World) {
        if let Some(takeover) = self.takeover.clone() {
            let view = w.view(takeover.primary);
            let lives: Vec<u32> = w.nodes.iter().map(|n| n.life).collect();
            let same = |n: usize| lives[n] == takeover.lives[n];
            if self.primary != Some(takeover.primary) || !same(takeover.primary) || self.calm {
                self.takeover = None;
            } else if view.is_some_and(|v| v.role == Role::Primary && !v.quorate)
                && self.demoting.is_none()
            {
                let alive = (0..lives.len()).filter(|n| same(*n));
                let alive = alive.fold(0, |all, n| all | 1 << n);
                let heirs: Vec<u32> = takeover.heirs.iter().map(|h| h & alive).collect();
                if heirs.iter().fold(u32::MAX, |all, of| all & of) != 0 {
                    self.heirs = heirs;
                    self.frozen = Some(takeover.primary);
                    self.primary = None;
                    w.trace(takeover.primary, || {
                        "== is frozen; another takes over".into()
                    });
                }
                self.takeover = None;
            }
        }
        let Some(frozen) = self.frozen else { return };
        let view = w.view(frozen).filter(|v| v.role == Role::Primary);
        sometimes!(w.marks, view.is_none() && w.is_up(frozen), "gave-way");
        let goes_on =
            view.as_ref().is_some_and(|v| v.quorate && !v.suspended) && !self.is_changing();
        match (view, self.primary) {
            (None, _) => self.frozen = None,
            // Nobody was promoted in time, or who was had nothing to do before most others left it again.
            (Some(_), None) if goes_on => {
                self.primary = Some(frozen);
                self.frozen = None;
            }
            (Some(_), Some(successor)) if goes_on && self.is_up(successor) => {
                let view = w.view(successor);
                if view
                    .as_ref()
                    .is_some_and(|v| v.role != Role::Primary || !v.quorate)
                {
                    self.frozen = view.and_then(|v| (v.role == Role::Primary).then_some(successor));
                    self.primary = Some(frozen);
                }
            }
            (Some(_), _) => {}
        }
    }

    /// A node that dies took over as a guest from a Primary that it had lost, and which has not noticed that yet, so that
    /// the guest's users still wait. Others have what it has.
    pub(crate) fn is_early_guest(&mut self, w: &mut World, node: usize, guest: &View) -> bool {
        let Some(primary) = self.primary.filter(|primary| *primary != node) else {
            return false;
        };
        let is_one = guest.role == Role::Primary
            && self.guest.is_some_and(|guest| guest.node == node)
            && w.view(primary)
                .is_some_and(|view| view.role == Role::Primary);
        if is_one {
            let heirs = (0..self.heirs.len()).map(|volume| guest.holders[volume] & !(1 << node));
            self.takeover = Some(Takeover {
                primary,
                heirs: heirs.collect(),
                lives: w.nodes.iter().map(|n| n.life).collect(),
            });
        }
        is_one
    }

    /// A Primary that stays frozen beside its successor is demoted by hand. It gives way by itself,
    /// if it may, to newer data only: a successor that has written nothing is refused.
    pub(crate) fn demote_frozen(&mut self, w: &mut World) {
        let by_hand = self.settings.resource.on_suspended_primary_outdated
            == OnSuspendedPrimaryOutdated::Disconnect;
        if let Some(frozen) = self.frozen.filter(|_| self.primary.is_none()) {
            self.demote_abandoned(w, frozen);
        } else if let Some(frozen) = self.frozen
            && let Some(successor) = self.primary
            && (by_hand || are_of_one_generation(w, frozen, successor))
            && w.nodes[frozen].commands.is_empty()
        {
            w.command(frozen, Command::Secondary { force: true });
        }
    }

    /// Nobody took over from a frozen Primary, or who did has left its role, and for long it has not gone on either: the
    /// others have newer data, which it does not take as a Primary, and nobody is promoted beside it.
    fn demote_abandoned(&mut self, w: &mut World, frozen: usize) {
        if self.is_stuck(w, frozen) && w.nodes[frozen].commands.is_empty() {
            w.command(frozen, Command::Secondary { force: true });
        }
    }

    /// The node is a frozen Primary, and for long has not been connected to somebody. Nothing goes wrong any more.
    pub(crate) fn is_stuck(&mut self, w: &World, node: usize) -> bool {
        let stuck = w.snapshot(node).is_some_and(|s| {
            s.role == Role::Primary
                && !s.suspended.is_empty()
                && s.connections
                    .iter()
                    .any(|c| c.state != ConnState::Connected)
        });
        let since = stuck.then(|| *self.stuck.get(&node).unwrap_or(&w.now));
        match since {
            Some(since) => self.stuck.insert(node, since),
            None => self.stuck.remove(&node),
        };
        since.is_some_and(|since| since + LONG_ENOUGH < w.now)
    }

    /// The node is a frozen Primary without a disk that is connected to everybody, and for long nobody has been of the
    /// generation that its applications have seen.
    fn is_outlived(&mut self, w: &World, node: usize) -> bool {
        let mut storage = w.storage();
        let outlived = w.snapshot(node).is_some_and(|s| {
            s.role == Role::Primary
                && !s.suspended.is_empty()
                && s.connections
                    .iter()
                    .all(|c| c.state == ConnState::Connected)
        }) && storage
            .all(|other| other != node && !are_of_one_generation(w, node, other));
        let since = outlived.then(|| *self.outlived.get(&node).unwrap_or(&w.now));
        match since {
            Some(since) => self.outlived.insert(node, since),
            None => self.outlived.remove(&node),
        };
        since.is_some_and(|since| since + LONG_ENOUGH < w.now)
    }

    /// Migrations can leave more than one frozen Primary behind, each of which was the last one for a while. Where
    /// another one goes on, it is the one that counts; where nobody does, and none can be promoted, they are all demoted.
    pub(crate) fn demote_left_behind(&mut self, w: &mut World) {
        let goes_on = |w: &mut World, node: usize| {
            let view = w.view(node);
            view.is_some_and(|v| v.role == Role::Primary && v.quorate && !v.suspended)
        };
        let nodes = 0..w.nodes.len();
        let one = nodes.clone().find(|n| self.is_up(*n) && goes_on(w, *n));
        // One that is to be Primary, and is not, may be refused because of those that are.
        let is_primary =
            |w: &mut World, node: usize| w.view(node).is_some_and(|v| v.role == Role::Primary);
        let other = one.is_none() && self.primary.is_some_and(|node| is_primary(w, node));
        if !self.settings.migrates || self.demoting.is_some() || other {
            return;
        }
        for node in nodes.filter(|node| Some(*node) != one) {
            let stuck = self.is_up(node) && (self.is_stuck(w, node) || self.is_outlived(w, node));
            if !stuck {
                continue;
            }
            w.give_up_writes(node);
            w.command(node, Command::Secondary { force: true });
            if let Some(one) = one.filter(|_| self.primary == Some(node)) {
                self.took_role(one, w.nodes[one].served);
            }
        }
    }
}

/// Both are up, and all their volumes are of one generation.
fn are_of_one_generation(w: &World, a: usize, b: usize) -> bool {
    let of_a = generations(w, a);
    of_a.is_some() && of_a == generations(w, b)
}
