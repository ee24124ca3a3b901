//! Live migration: while one node is Primary another one is made one as well, by the operator's word. It stands
//! by, users ask both for something, and the turn goes from one to the other. Then one of them leaves.

use lockstep_core::command::Command;
use lockstep_core::options::Quorum;
use lockstep_core::state::{ConnState, Role};

use crate::operator::{Operator, peer_id};
use crate::rng::Rng;
use crate::sometimes;
use crate::world::{World, name};

/// The other one of two Primaries that take turns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guest {
    pub(crate) node: usize,
    /// The command that it has not answered yet.
    command: Option<u64>,
    /// It gets nothing more to do, since it leaves.
    leaves: bool,
    /// Requests that it had served when it was last seen to stand by.
    served: u64,
}

impl Operator {
    /// A migration begins, or ends at one of its two nodes.
    pub(crate) fn migrate(&mut self, w: &mut World, rng: &mut Rng) {
        let Some(primary) = self.primary.filter(|_| !self.is_changing() && !self.calm) else {
            return;
        };
        match self.guest {
            None => {
                let others: Vec<usize> = (0..w.nodes.len())
                    .filter(|n| *n != primary && self.is_up(*n) && w.bad_node != Some(*n))
                    .filter(|n| meets(w, primary, *n) && meets(w, *n, primary))
                    .collect();
                let Some(node) = others.get(rng.below(others.len().max(1) as u64) as usize) else {
                    return;
                };
                let command = w.command(*node, Command::Primary { force: false });
                self.guest = Some(Guest {
                    node: *node,
                    command: Some(command),
                    leaves: false,
                    served: w.nodes[*node].served,
                });
            }
            Some(ref mut guest) if rng.permille(500) => guest.leaves = true,
            Some(guest) if stands_by(w, guest.node) => {
                self.demote(w);
            }
            Some(_) => {}
        }
    }

    /// The node whose user asks for something next. A guest whose command ended when it had lost the Primary already has
    /// taken over: its users wait until that one is frozen, but for those who had asked before: whoever asks the other
    /// one then may see older data.
    pub(crate) fn user(&self, w: &mut World, primary: usize, number: u32) -> usize {
        let ready = |g: &Guest| g.command.is_none() && !g.leaves && self.is_up(g.node);
        let guest = self.guest.filter(|g| number % 3 == 1 && ready(g));
        let guest = guest.map(|guest| guest.node);
        if let Some(guest) = self.guest
            && self.is_up(guest.node)
            && has_role(w, guest.node)
            && has_role(w, primary)
            && acts(w, &guest)
        {
            sometimes!(w.marks, true, "turn-taken-unseen");
            return guest.node;
        }
        match guest.filter(|guest| !(has_role(w, *guest) && has_role(w, primary))) {
            Some(guest) => guest,
            None => primary,
        }
    }

    /// Another node is asked for its word.
    pub(crate) fn is_inviting(&self) -> bool {
        self.guest.is_some_and(|guest| guest.command.is_some())
    }
}

/// Follows the turn, and goes on with what the operator has begun.
pub(crate) fn follow(o: &mut Operator, w: &mut World) {
    let Some(mut guest) = o.guest else { return };
    let answer = |w: &World, command| w.nodes[guest.node].answers.get(&command).cloned();
    if let Some(command) = guest.command
        && let Some(answer) = answer(w, command)
    {
        guest.command = None;
        // A refused guest is none; one that leaves may have got its turn meanwhile.
        let is_none = match guest.leaves {
            true => answer.is_ok(),
            false => answer.is_err(),
        };
        guest.leaves = false;
        o.guest = (!is_none).then_some(guest);
        sometimes!(w.marks, !is_none && stands_by(w, guest.node), "stands-by");
        if is_none {
            return;
        }
    }
    if o.primary == Some(guest.node) && guest.command.is_none() {
        // It was promoted otherwise while it stood by.
        o.guest = None;
        return;
    }
    let gone = o.primary.is_none() && !o.is_changing();
    let passed = o.primary.is_some_and(|p| !has_role(w, p)) && !o.is_changing();
    let others = o.promoting.is_some() || o.is_inviting();
    let frozen = o.primary.filter(|p| {
        let view = w.view(*p);
        view.is_some_and(|v| v.role == Role::Primary && !v.quorate) && !others
    });
    if (gone || passed || frozen.is_some()) && has_role(w, guest.node) {
        let before = o.primary.filter(|_| frozen.is_none());
        if let Some(node) = frozen {
            // Its requests are frozen, and its demotion, if that has begun, would wait for them.
            o.frozen = frozen;
            w.give_up_writes(node);
            if o.demoting.take().is_some() {
                w.command(node, Command::Secondary { force: true });
            }
        }
        w.trace(guest.node, || "== has its turn".into());
        sometimes!(w.marks, passed, "turn-passed");
        sometimes!(w.marks, gone, "turn-of-a-lost-one");
        o.took_role(guest.node, w.nodes[guest.node].served);
        guest.command = None;
        o.guest = before
            .filter(|node| stands_by(w, *node))
            .map(|node| Guest { node, ..guest });
        return;
    }
    if let Some(primary) = o.primary
        && o.settings.resource.quorum != Quorum::Off
        && has_role(w, guest.node)
        && has_role(w, primary)
        && acts(w, &guest)
    {
        // The Primary has lost the guest and whoever made it one, and does not know yet. It is frozen when it does.
        w.give_up_writes(primary);
    }
    guest.leaves |= o.calm;
    if stands_by(w, guest.node) {
        guest.served = w.nodes[guest.node].served;
    }
    o.guest = Some(guest);
    if guest.leaves && guest.command.is_none() && w.nodes[guest.node].requests.is_empty() {
        if stands_by(w, guest.node) {
            w.trace(guest.node, || format!("== {} leaves", name(guest.node)));
            let command = w.command(guest.node, Command::Secondary { force: false });
            guest.command = Some(command);
            o.guest = Some(guest);
        } else if !has_role(w, guest.node) {
            o.guest = None;
        }
    }
}

fn meets(w: &World, node: usize, peer: usize) -> bool {
    w.snapshot(node).is_some_and(|s| {
        let mut peers = s.connections.iter().filter(|c| c.peer == peer_id(peer));
        peers.any(|c| c.state == ConnState::Connected)
    })
}

/// Something was asked of it while it stood by, and it has served that, or will.
fn acts(w: &World, guest: &Guest) -> bool {
    let node = &w.nodes[guest.node];
    node.served != guest.served || !node.requests.is_empty()
}

/// It is Primary, and does not only stand by.
fn has_role(w: &mut World, node: usize) -> bool {
    w.view(node).is_some_and(|v| v.role == Role::Primary)
}

fn stands_by(w: &World, node: usize) -> bool {
    w.snapshot(node).is_some_and(|s| s.stands_by)
}
