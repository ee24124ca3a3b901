//! Commands that come from the driver below the operator: front ends that open and close volumes, and
//! the node's order of resyncs.
//!
//! With `Extra::Openers` nobody says `primary` and `secondary`: a front end's open makes its node
//! Primary (`auto-promote`), and its close makes it Secondary again.

use lockstep_core::command::Command;
use lockstep_core::options::Protocol;
use lockstep_core::resync_order::OrderVerdict;
use lockstep_core::state::{ConnState, Role};
use lockstep_format::units::VolumeNr;

use crate::operator::{GROWN_MOST_BLOCKS, Operator, peer_id};
use crate::rng::Rng;
use crate::sometimes;
use crate::turns::Told;
use crate::world::{World, name};

/// Volumes that front ends have open, and resyncs that wait for others.
#[derive(Debug, Default)]
pub(crate) struct Drivers {
    /// A node with another secret than its peer has, and the first link to which that applies.
    pub(crate) stranger: Option<(usize, usize, u64)>,
    /// The node with an open volume, and the volume.
    open: Option<(usize, u16)>,
    /// Volumes of nodes whose resyncs wait for other volumes of the node.
    ordered: Vec<(usize, u16)>,
    /// What nodes were told of the order of their resyncs.
    pub(crate) told: Told,
    /// The protocol was changed. A crash at the same moment may leave the ends with different ones.
    protocol: bool,
}

impl Drivers {
    /// The node is gone, and its front ends with it.
    pub(crate) fn forget(&mut self, node: usize) {
        self.forget_open(node);
        self.ordered.retain(|(n, _)| *n != node);
    }

    fn forget_open(&mut self, node: usize) {
        self.open = self.open.filter(|(opener, _)| *opener != node);
    }
}

impl Operator {
    /// The command that makes a node Primary.
    pub(crate) fn promotion(&mut self, w: &World, node: usize, force: bool) -> Command {
        if force || !self.settings.openers {
            return Command::Primary { force };
        }
        let volume = (node as u16 + w.nodes[node].life as u16) % w.config.volumes;
        self.drivers.open = Some((node, volume));
        Command::Open {
            volume: VolumeNr(volume),
            open: true,
            write: true,
        }
    }

    /// An open that was refused opened nothing.
    pub(crate) fn promotion_ended(&mut self, node: usize, went_well: bool) {
        if !went_well {
            self.drivers.forget_open(node);
        }
    }

    /// Makes a Primary Secondary; gives the command. Demoted by force, its front ends are failed, and
    /// close what they have open.
    pub(crate) fn give_demotion(&mut self, w: &mut World, node: usize, force: bool) -> u64 {
        let open = self.drivers.open.take_if(|(opener, _)| *opener == node);
        let close = open.map(|(_, volume)| Command::Open {
            volume: VolumeNr(volume),
            open: false,
            write: true,
        });
        match close {
            Some(close) if force => {
                let command = w.command(node, Command::Secondary { force });
                w.command(node, close);
                command
            }
            Some(close) => w.command(node, close),
            None => w.command(node, Command::Secondary { force }),
        }
    }

    /// A close is answered at once, and the role follows.
    pub(crate) fn demotion_is_over(&self, w: &mut World, node: usize) -> bool {
        !self.settings.openers || w.view(node).is_none_or(|v| v.role != Role::Primary)
    }

    /// The node's order of resyncs changes for a volume: another one goes first, or too many run.
    pub(crate) fn order(&mut self, w: &mut World, rng: &mut Rng, node: usize, volume: u16) -> bool {
        if !self.is_up(node) || self.settings.turns.is_some() {
            return false;
        }
        let verdict = OrderVerdict {
            dependency: rng.permille(500),
            max_parallel: rng.permille(500),
        };
        self.drivers.ordered.push((node, volume));
        give(w, node, volume, verdict);
        true
    }

    /// It is this volume's turn.
    pub(crate) fn in_order(&mut self, w: &mut World, node: usize, volume: u16) {
        let before = self.drivers.ordered.len();
        self.drivers.ordered.retain(|o| *o != (node, volume));
        if before != self.drivers.ordered.len() && w.is_up(node) {
            give(w, node, volume, OrderVerdict::default());
        }
    }

    /// It is the turn of all of them.
    pub(crate) fn all_in_order(&mut self, w: &mut World) {
        for (node, volume) in self.drivers.ordered.clone() {
            self.in_order(w, node, volume);
        }
    }

    /// A disk becomes larger, and the operator wants the volume as large as it can be.
    pub(crate) fn grow_one(&mut self, w: &mut World, rng: &mut Rng, node: usize, volume: u16) {
        let v = usize::from(volume);
        let most = w.config.blocks + GROWN_MOST_BLOCKS;
        let is_full = w.nodes[node].disks[v].content.len() as u64 > most;
        if is_full || !self.is_up(node) || !w.has_disk(node) {
            return;
        }
        let blocks = rng.pick(&[1, 8, 300, 1024]);
        w.nodes[node].disks[v].grow(node, blocks);
        w.trace(node, || {
            format!("== the disk of volume {volume} grows by {blocks} blocks here")
        });
        self.resize_at_most(w, node, volume);
    }

    /// Outdates a Secondary's disk while there is a Primary. One that follows the Primary refuses.
    pub(crate) fn outdate(&mut self, w: &mut World, node: usize, volume: u16) {
        let beside = self.primary.is_some_and(|primary| primary != node);
        if beside && !self.is_changing() && self.is_up(node) && w.has_disk(node) {
            let volume = VolumeNr(volume);
            w.command(node, Command::Outdate { volume });
        }
    }

    /// Both have disks, and somebody is Primary.
    pub(crate) fn may_regroup(&self, w: &World, node: usize, peer: usize) -> bool {
        self.primary.is_some() && w.has_disk(node) && w.has_disk(peer)
    }

    /// A node that has disconnected from another one forgets it, and is told of it anew.
    pub(crate) fn forget_and_know(&mut self, w: &mut World, node: usize, peer: usize) {
        let of_peer = |s: lockstep_core::report::Snapshot| {
            let mut connections = s.connections.into_iter();
            connections.find(|c| c.peer == peer_id(peer))
        };
        let connection = w.snapshot(node).and_then(of_peer);
        let alone = connection.is_some_and(|c| c.state == ConnState::StandAlone);
        let attached = w.nodes[node].disks.iter().all(|disk| disk.open);
        if !alone || !attached || !self.is_up(node) || !w.nodes[node].commands.is_empty() {
            return;
        }
        let id = peer_id(peer);
        w.command(node, Command::DelPeer { peer: id });
        w.command(node, Command::ForgetPeer { peer: id });
        self.new_peer(w, node, peer);
        sometimes!(w.marks, "peer-forgotten");
    }

    /// Changes the protocol of all connections, on each node by a command of its own.
    pub(crate) fn change_protocol(&mut self, w: &mut World, rng: &mut Rng) {
        let protocol = rng.pick(&[Protocol::A, Protocol::B, Protocol::C]);
        self.settings.net.protocol = protocol;
        self.drivers.protocol = true;
        self.tell_protocol(w);
    }

    fn tell_protocol(&mut self, w: &mut World) {
        for node in 0..w.nodes.len() {
            for peer in (0..w.nodes.len()).filter(|peer| *peer != node) {
                if w.is_up(node) {
                    let mut net = self.settings.net.clone();
                    net.peer_name = name(peer).to_string();
                    let peer = peer_id(peer);
                    w.command(node, Command::NetOptions { peer, net });
                }
            }
        }
    }

    /// A node is told another secret for a peer than the peer has: no new link between them may be used.
    pub(crate) fn other_secret(&mut self, w: &mut World, node: usize, peer: usize) -> bool {
        let is_secret = self.settings.net.shared_secret.is_some();
        if !is_secret || self.drivers.stranger.is_some() || !self.is_up(node) {
            return false;
        }
        let mut net = self.settings.net.clone();
        net.peer_name = name(peer).to_string();
        net.shared_secret = Some("a secret of somebody else".into());
        let command = Command::NetOptions {
            peer: peer_id(peer),
            net,
        };
        w.command(node, command);
        self.drivers.stranger = Some((node, peer, w.next_link));
        true
    }

    pub(crate) fn same_secret(&mut self, w: &mut World) {
        if std::mem::take(&mut self.drivers.protocol) {
            self.tell_protocol(w);
        }
        if let Some((node, peer, _)) = self.drivers.stranger.take().filter(|s| self.is_up(s.0)) {
            let mut net = self.settings.net.clone();
            net.peer_name = name(peer).to_string();
            let peer = peer_id(peer);
            w.command(node, Command::NetOptions { peer, net });
        }
    }

    /// Nodes without a common secret have not connected.
    pub(crate) fn look_at_stranger(&mut self, w: &mut World) {
        let Some((node, peer, since)) = self.drivers.stranger else {
            return;
        };
        if !self.is_up(node) {
            // It starts with the right one.
            self.drivers.stranger = None;
            return;
        }
        let links = w.nodes[node].links.iter();
        let is_new = links
            .into_iter()
            .any(|(link, of)| *of == peer && *link >= since);
        let connected = |s: lockstep_core::report::Snapshot| {
            let mut connections = s.connections.into_iter();
            connections.any(|c| c.peer == peer_id(peer) && c.state == ConnState::Connected)
        };
        if is_new && w.nodes[node].commands.is_empty() && w.snapshot(node).is_some_and(connected) {
            w.fail(format!(
                "{} and {} are connected and do not have the same secret",
                name(node),
                name(peer)
            ));
        }
    }

    /// Throws a Secondary's data away, by a command to the Primary.
    pub fn invalidate_remote(
        &mut self,
        w: &mut World,
        peer: usize,
        volume: u16,
        reset: bool,
    ) -> bool {
        let Some(primary) = self.may_invalidate(w, peer) else {
            return false;
        };
        w.expect_rot(peer, volume, reset);
        w.command(
            primary,
            Command::InvalidateRemote {
                peer: peer_id(peer),
                volume: VolumeNr(volume),
                reset_bitmap: reset,
            },
        );
        true
    }
}

fn give(w: &mut World, node: usize, volume: u16, verdict: OrderVerdict) {
    let volume = VolumeNr(volume);
    w.command(node, Command::ResyncOrder { volume, verdict });
}
