//! Reconciliation between the survivors of a lost Primary (semantics.md, 18.5).

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::packet::PeerDagtag;
use lockstep_format::wire::{ConnState, DiskState, Packet, ReplState, Role, StateWord, UuidFlags};

use crate::compare::{Direction, Strategy};
use crate::device::{PeerDevice, Reconcile};
use crate::event::Stream;
use crate::report::Level;
use crate::resource::Resource;
use crate::transition::Change;
use crate::twopc::Transaction;

impl Resource {
    /// The lost peer was Primary: the other survivors hear how far this node came.
    pub(crate) fn notify_lost_primary(&mut self, lost: NodeId) {
        let Some(conn) = self.connections.get_mut(&lost) else {
            return;
        };
        if !conn.notify_lost_primary {
            // Others may have lost it as a Primary, before they heard of its demotion.
            self.answer_words_about(lost);
            return;
        }
        // Whoever has said so before has asked, and may be outdated by what it was answered.
        let outdates = |t: &Transaction| {
            let told = t.answered.is_some() && t.primary_nodes.contains(lost);
            told && t.asker_lost.contains(lost)
        };
        let verdict = self.twopc.current.as_ref();
        if verdict.is_some_and(outdates) && !planted!(self, AskerTrusted) {
            return;
        }
        conn.notify_lost_primary = false;
        if planted!(self, SurvivorsNotCompared) {
            self.reconcile_settled();
            return;
        }
        let dagtag = conn.last_dagtag;
        let left_before = self.take_kept_words(lost);
        let survivors = self.established_peers().without(lost);
        for peer in survivors.iter() {
            let mut owed = false;
            let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
            for volume in volumes {
                let p = self.state.peer_device(volume, peer);
                let own = self.state.disk(volume);
                let diskful = p.disk >= DiskState::Inconsistent && p.disk != DiskState::DUnknown;
                if !diskful || own < DiskState::Inconsistent {
                    continue;
                }
                if self.is_lockstep(peer) {
                    self.send_uuids(peer, volume, UuidFlags::empty());
                } else {
                    self.send_current_uuid(peer, volume);
                }
                if p.repl == ReplState::Established
                    && own >= DiskState::Consistent
                    && !left_before.contains(peer)
                    && let Some(pd) = self.peer_device_mut(volume, peer)
                    && pd.reconcile == Reconcile::No
                {
                    pd.reconcile = Reconcile::Pending { lost };
                }
                owed = true;
            }
            if owed {
                self.tell_lost(peer, lost, dagtag);
            }
            self.try_reconcile(peer);
        }
        self.reconcile_settled();
    }

    pub(crate) fn peer_dagtag_received(&mut self, peer: NodeId, packet: PeerDagtag) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        conn.peer_dagtag = Some((packet.node_id, packet.dagtag));
        conn.lost_word = conn.peer_dagtag;
        if self.state.conn(peer) != ConnState::Connected {
            return;
        }
        if self.state.conn(packet.node_id) == ConnState::Connected
            && self.word_given(packet.node_id, peer).is_none()
        {
            // It is alive as far as this node knows; a ping tells.
            self.ping(packet.node_id);
            return;
        }
        self.try_reconcile(peer);
    }

    /// What this node had told a survivor of a lost node, which is back since then, and no Primary. The survivor has
    /// lost it only now, and has less: it goes by this word. The returned node may be copied from here, so nothing is
    /// copied to here.
    fn word_given(&self, lost: NodeId, survivor: NodeId) -> Option<Dagtag> {
        let (named, theirs) = self.connections.get(&survivor)?.peer_dagtag?;
        let conn = self.connections.get(&lost)?;
        let told = conn.told_lost.contains(survivor) && !conn.notify_lost_primary;
        let is_back =
            self.state.conn(lost) == ConnState::Connected && self.peer_role(lost) != Role::Primary;
        let holds = told && is_back && named == lost && conn.told_dagtag.is_newer_than(theirs);
        (holds && !planted!(self, ReturnedForgotten)).then_some(conn.told_dagtag)
    }

    /// Both survivors have said how far they came and have cleaned up: the shorter one follows.
    fn try_reconcile(&mut self, peer: NodeId) {
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        let Some((lost, theirs)) = conn.peer_dagtag else {
            return;
        };
        let Some(lost_conn) = self.connections.get(&lost) else {
            return;
        };
        let gone = self.state.conn(lost) != ConnState::Connected
            && !lost_conn.draining
            && !lost_conn.notify_lost_primary;
        let mine = match gone {
            true => Some(lost_conn.last_dagtag),
            false => self.word_given(lost, peer),
        };
        let Some(mine) = mine else {
            return;
        };
        let told = lost_conn.told_lost.contains(peer);
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.peer_dagtag = None;
        }
        if !told && self.is_lockstep(peer) {
            // It became Primary and was lost before this node heard of that; the peer waits for
            // an answer all the same.
            self.tell_lost(peer, lost, mine);
        }
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            let p = self.state.peer_device(volume, peer);
            let own = self.state.disk(volume);
            let whole = |disk| matches!(disk, DiskState::Consistent | DiskState::UpToDate);
            // One of both may be Outdated, because the other one still had the Primary then.
            let outdated = |disk| disk == DiskState::Outdated;
            let leads = outdated(own) && self.is_lockstep(peer) && mine.is_newer_than(theirs);
            let takes_part = whole(own) && (whole(p.disk) || outdated(p.disk))
                || whole(p.disk) && leads && !planted!(self, OutdatedDoesNotLead);
            if p.repl != ReplState::Established || !takes_part {
                // A copy that runs already ends as what it is.
                if let Some(pd) = self.peer_device_mut(volume, peer)
                    && matches!(pd.reconcile, Reconcile::Pending { .. })
                {
                    pd.reconcile = Reconcile::No;
                }
                continue;
            }
            self.reconcile_volume(volume, peer, lost, mine, theirs);
        }
        self.reconcile_settled();
    }

    fn reconcile_volume(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        lost: NodeId,
        mine: Dagtag,
        theirs: Dagtag,
    ) {
        let equal = self.same_current(volume, peer);
        // Of two Primaries one is lost and the other goes on: applications see its data, and nothing that
        // the lost one acknowledged is missing there.
        let primary = |role| role == Role::Primary;
        let by_role = (primary(self.state.role), primary(self.peer_role(peer)));
        let repl = if !equal {
            // Different generations: the comparison knows the direction.
            None
        } else if mine != theirs && by_role == (true, false) {
            Some(ReplState::WfBitmapS)
        } else if mine != theirs && by_role == (false, true) {
            Some(ReplState::WfBitmapT)
        } else if mine == theirs {
            Some(ReplState::Established)
        } else if mine.is_newer_than(theirs) {
            Some(ReplState::WfBitmapS)
        } else {
            Some(ReplState::WfBitmapT)
        };
        let Some(pd) = self.peer_device_mut(volume, peer) else {
            return;
        };
        match repl {
            None => {
                pd.reconcile = Reconcile::No;
                self.compare_now(peer, volume);
                self.reconciles_generations(volume, peer, lost, (mine, theirs));
            }
            Some(ReplState::Established) => {
                pd.reconcile = Reconcile::No;
                if !self.is_lockstep(peer) {
                    // A kernel forgets its marks, too; it would not take a bitmap now.
                    self.clear_slot(volume, peer);
                } else if self.marked_towards(volume, peer) {
                    // Both have the same prefix of the stream, but a mark is older than it.
                    let source = match by_role {
                        (true, false) => true,
                        (false, true) => false,
                        (true, true) | (false, false) => self.node_id < peer,
                    };
                    let repl = if source {
                        ReplState::WfBitmapS
                    } else {
                        ReplState::WfBitmapT
                    };
                    self.hard_change(Change::new().repl(volume, peer, repl));
                }
            }
            Some(repl) => {
                pd.reconcile = Reconcile::Running {
                    lost,
                    dagtag: if mine.is_newer_than(theirs) {
                        mine
                    } else {
                        theirs
                    },
                };
                self.log(
                    Level::Info,
                    Some(peer),
                    Some(volume),
                    format!("reconciling after the loss of node {lost}: {repl:?}"),
                );
                self.hard_change(Change::new().repl(volume, peer, repl));
            }
        }
    }

    /// The comparison has chosen who came further in the lost Primary's stream, and the other one lacks a generation of
    /// that: at the end of the copy both are where the lost one had been with the source.
    fn reconciles_generations(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        lost: NodeId,
        (mine, theirs): (Dagtag, Dagtag),
    ) {
        let further = match self.state.peer_device(volume, peer).repl {
            ReplState::WfBitmapS => mine,
            ReplState::WfBitmapT => theirs,
            _ => return,
        };
        let goes_along = !mine.is_newer_than(further)
            && !theirs.is_newer_than(further)
            && !planted!(self, GenerationsNotReconciled);
        if let Some(pd) = self.peer_device_mut(volume, peer)
            && goes_along
        {
            pd.reconcile = Reconcile::Running {
                lost,
                dagtag: further,
            };
        }
    }

    /// How far in the stream of a lost node the copy from this peer goes: it reconciles, or another one does that is no
    /// further.
    pub(crate) fn reconciled_with(
        &self,
        volume: VolumeNr,
        peer: NodeId,
    ) -> Option<(NodeId, Dagtag)> {
        let running = |pd: &PeerDevice| match pd.reconcile {
            Reconcile::Running { lost, dagtag } => Some((lost, dagtag)),
            Reconcile::No | Reconcile::Pending { .. } => None,
        };
        let peers = &self.devices.get(&volume)?.peers;
        if let Some(own) = running(peers.get(&peer)?) {
            return Some(own);
        }
        let (named, theirs) = self.connections.get(&peer)?.lost_word?;
        let mut others = peers.values().filter_map(running);
        let as_far = |(lost, dagtag): &(NodeId, Dagtag)| {
            *lost == named && !dagtag.is_newer_than(theirs) && !planted!(self, FirstCopyCounts)
        };
        others.find(as_far)
    }

    /// How far this node and the peer had come when they lost the same Primary, as they have told each other.
    pub(crate) fn words_between(
        &self,
        peer: NodeId,
    ) -> Option<((NodeId, Dagtag), (NodeId, Dagtag))> {
        let theirs = self.connections.get(&peer)?.lost_word?;
        let conn = self.connections.get(&theirs.0)?;
        let told = conn.told_lost.contains(peer) && !planted!(self, WordsForgotten);
        told.then_some(((theirs.0, conn.told_dagtag), theirs))
    }

    /// This node has lost a Primary after the peer, which had come as far and said so, or has been copied since from one
    /// that had: it has a newer generation then. This node is copied from it before it has told its own loss, or because of
    /// that generation. `own` is what its disk was: Consistent, if it is not being copied from another one like that.
    pub(crate) fn reconciles_late(&mut self, volume: VolumeNr, peer: NodeId, own: DiskState) {
        let runs = |pd: &PeerDevice| matches!(pd.reconcile, Reconcile::Running { .. });
        let survivor = own == DiskState::Consistent
            || (self.devices.get(&volume)).is_some_and(|d| d.peers.values().any(runs));
        let target = self.state.peer_device(volume, peer).repl == ReplState::WfBitmapT;
        let Some(conn) = (self.connections.get(&peer)).filter(|_| target && survivor) else {
            return;
        };
        let newer = !self.same_current(volume, peer);
        let further = conn.lost_word.and_then(|(lost, theirs)| {
            let gone = self.state.conn(lost) != ConnState::Connected;
            let mine = self.connections.get(&lost).map(|c| c.last_dagtag);
            match mine.filter(|_| gone)? {
                mine if !mine.is_newer_than(theirs) => Some((lost, theirs)),
                mine => newer.then_some((lost, mine)),
            }
        });
        if let Some((lost, dagtag)) = further.filter(|_| !planted!(self, LateLossForgotten))
            && let Some(pd) = self.peer_device_mut(volume, peer)
            && pd.reconcile == Reconcile::No
        {
            pd.reconcile = Reconcile::Running { lost, dagtag };
        }
    }

    /// The peer has lost a Primary that this node is connected to and follows. A generation of that which the peer has
    /// been told is on its way here, with all that was written: nothing is copied from what is left behind.
    pub(crate) fn is_left_to_primary(
        &self,
        volume: VolumeNr,
        peer: NodeId,
        theirs: DiskState,
        strategy: Strategy,
    ) -> bool {
        let up_to_date = |disk| disk == DiskState::UpToDate;
        let follows = |node: NodeId| {
            let p = self.state.peer_device(volume, node);
            let serves = p.repl == ReplState::Established && up_to_date(p.disk);
            node != peer && serves && self.peer_role(node) == Role::Primary
        };
        strategy.direction() == Some(Direction::Target)
            && self.state.role == Role::Secondary
            && up_to_date(self.state.disk(volume))
            && matches!(theirs, DiskState::Outdated | DiskState::Consistent)
            && self.peer_role(peer) == Role::Secondary
            && self.is_lockstep(peer)
            && self.established_peers().iter().any(follows)
            && !planted!(self, FollowsLeftBehind)
    }

    /// A transaction has ended: a loss that its initiator had told of before is told on.
    pub(crate) fn tell_lost_primaries(&mut self) {
        let owed = |c: &&crate::connection::Connection| c.notify_lost_primary && !c.draining;
        let lost: Vec<NodeId> = self
            .connections
            .values()
            .filter(owed)
            .map(|c| c.peer)
            .collect();
        for lost in lost {
            self.notify_lost_primary(lost);
        }
    }

    /// Primaries that this node has not lost, or not told of yet, and the peer has said to have lost.
    pub(crate) fn lost_by(&self, peer: NodeId) -> NodeMask {
        let Some(conn) = self.connections.get(&peer) else {
            return NodeMask::EMPTY;
        };
        let words = conn.peer_dagtag.iter().chain(&conn.kept_dagtag);
        words.map(|(node, _)| *node).collect()
    }

    /// The commit shows a Primary that its initiator had lost before it asked: it outdates itself.
    pub(crate) fn asker_left_behind(&mut self, t: &Transaction, primary_nodes: NodeMask) {
        let left = !t.asker_lost.intersection(primary_nodes).is_empty();
        if !left || primary_nodes.contains(t.initiator) || planted!(self, AskerTrusted) {
            return;
        }
        let mut change = Change::new();
        for (volume, device) in &self.state.devices {
            let p = device.peers.get(&t.initiator).copied().unwrap_or_default();
            let whole = [DiskState::Consistent, DiskState::UpToDate].contains(&p.disk);
            if whole && p.repl == ReplState::Established {
                change = change.peer_disk(*volume, t.initiator, DiskState::Outdated);
            }
        }
        self.hard_change(change);
    }

    /// A node that was lost as a Primary, its demotion being on its way, is there, and none: another node that is connected
    /// to it has nothing to say of its loss, and all that it wrote.
    pub(crate) fn forget_demoted(&mut self, primary_nodes: NodeMask) {
        if planted!(self, DemotedAwaited) {
            return;
        }
        let (members, connected) = (self.state.members, self.state.connected());
        let there = members.difference(connected).difference(primary_nodes);
        let is_owed = |reconcile: &Reconcile| matches!(reconcile, Reconcile::Pending { lost } if there.contains(*lost));
        let devices = self.devices.iter();
        let owed = devices.flat_map(|(volume, device)| {
            let peers = device.peers.iter().filter(|(_, pd)| is_owed(&pd.reconcile));
            peers.map(|(peer, _)| (*volume, *peer))
        });
        for (volume, peer) in owed.collect::<Vec<_>>() {
            if self.same_current(volume, peer)
                && let Some(pd) = self.peer_device_mut(volume, peer)
            {
                pd.reconcile = Reconcile::No;
            }
        }
    }

    /// Nothing is owed any more: Consistent disks ask whether they may be UpToDate.
    pub(crate) fn reconcile_settled(&mut self) {
        let open = self
            .devices
            .keys()
            .any(|v| self.state.disk(*v) == DiskState::Consistent && !self.reconcile_hold(*v));
        if open && !planted!(self, ReconciledNotTold) {
            self.schedule_empty_twopc();
        }
    }

    /// Whoever said that it had lost this Primary has lost its own link only, as the Primary answers.
    /// What it said holds when this node loses the Primary, too: it is not said again.
    pub(crate) fn keep_words_about(&mut self, primary: NodeId) {
        let mut tellers = NodeMask::EMPTY;
        for conn in self.connections.values_mut() {
            if conn.peer_dagtag.is_some_and(|(lost, _)| lost == primary) {
                conn.kept_dagtag = conn.peer_dagtag.take();
                tellers.insert(conn.peer);
            }
        }
        // It is none any more, and this node has all that it wrote. Whoever lost it before they heard of that waits.
        if self.peer_role(primary) == Role::Primary || planted!(self, DemotedAwaited) {
            return;
        }
        let mine = self.connections.get(&primary).map(|c| c.last_dagtag);
        for teller in tellers.iter() {
            if self.is_lockstep(teller) {
                self.tell_lost(teller, primary, mine.unwrap_or_default());
            }
        }
    }

    /// This node has lost a peer that was no Primary any more.
    fn answer_words_about(&mut self, lost: NodeId) {
        let tellers: Vec<NodeId> = self
            .connections
            .values()
            .filter(|c| c.peer_dagtag.is_some_and(|(node, _)| node == lost))
            .map(|c| c.peer)
            .collect();
        for teller in tellers {
            if self.is_lockstep(teller) && !planted!(self, DemotedAwaited) {
                self.try_reconcile(teller);
            }
        }
    }

    /// This node has lost the Primary that others had lost before. Says which of them have been outdated
    /// meanwhile and have no more than this node: they follow whoever is UpToDate, and have no say in that.
    fn take_kept_words(&mut self, lost: NodeId) -> NodeMask {
        let mut left_before = NodeMask::EMPTY;
        let mine = self.connections.get(&lost).map(|c| c.last_dagtag);
        let mine = mine.unwrap_or_default();
        let forgets = planted!(self, KeptWordsOfLess);
        for (peer, conn) in &mut self.connections {
            let Some(word) = conn.kept_dagtag.filter(|(node, _)| *node == lost) else {
                continue;
            };
            conn.kept_dagtag = None;
            // A kernel that is Outdated takes no part.
            let more = word.1.is_newer_than(mine) && conn.is_lockstep() && !forgets;
            let mut disks = self.state.devices.values().map(|d| d.peers.get(peer));
            if !more && disks.any(|p| p.is_some_and(|p| p.disk == DiskState::Outdated)) {
                left_before.insert(*peer);
            } else {
                conn.peer_dagtag = conn.peer_dagtag.or(Some(word));
            }
        }
        left_before
    }

    /// Two other nodes are connected again: what one said of the loss of the other is outdated.
    pub(crate) fn forget_words_of_pair(&mut self, t: &Transaction) {
        let connects =
            t.change.mask.has(StateWord::CONN) && t.change.val.conn() == Some(ConnState::Connected);
        let keeps = planted!(self, OldWordsKept);
        let Some(target) = t.target.filter(|_| connects && !keeps) else {
            return;
        };
        for (teller, about) in [(t.initiator, target), (target, t.initiator)] {
            if let Some(conn) = self.connections.get_mut(&teller)
                && conn.kept_dagtag.is_some_and(|(node, _)| node == about)
            {
                conn.kept_dagtag = None;
            }
        }
    }

    /// How far this node came in the stream of a lost node.
    pub(crate) fn tell_lost(&mut self, peer: NodeId, lost: NodeId, dagtag: Dagtag) {
        if let Some(conn) = self.connections.get_mut(&lost) {
            conn.told_lost.insert(peer);
            conn.told_dagtag = dagtag;
        }
        let packet = Packet::PeerDagtag(PeerDagtag {
            dagtag,
            node_id: lost,
        });
        self.send(peer, Stream::Data, VolumeNr::NONE, packet);
    }
}
