//! A two-phase commit seen from a participant (semantics.md, 10.3).

use alloc::collections::VecDeque;
use alloc::format;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::packet::{TwopcOutcome, TwopcReply};
use lockstep_format::wire::{
    ConnState, DiskNumbering, DiskState, Packet, ReplState, Role, StateChange, StateWord,
    TwopcFlags,
};

use crate::command::ErrorCode;
use crate::connection::{LostThere, Phase};
use crate::event::Stream;
use crate::report::Level;
use crate::resize::PhaseOne;
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::time::Duration;
use crate::timers::Timer;
use crate::transition::Change;
use crate::twopc::{ReplyKind, Transaction, WishKind};
use crate::validity::Refusal;

/// Transactions that are over and known again.
const NUMBERS_KEPT: usize = 8;

/// Keeps the number of a transaction that is over.
pub(crate) fn note_number(kept: &mut VecDeque<(NodeId, u32)>, t: &Transaction) {
    if kept.len() == NUMBERS_KEPT {
        kept.pop_front();
    }
    kept.push_back((t.initiator, t.tid));
}

impl Resource {
    /// The peer begins to connect: what it told of itself before, in an attempt that came to nothing, does not
    /// count. It may have arrived after this node had refused that attempt, and the peer tells all of it once more,
    /// after this packet (semantics.md, 9.2).
    pub(crate) fn forget_old_handshake(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        prepare: &PhaseOne,
    ) {
        let head = prepare.head;
        if !is_connect(volume, prepare)
            || head.initiator_node_id != peer
            || head.target_node_id != Some(self.node_id)
            || self.state.conn(peer) != ConnState::Connecting
        {
            return;
        }
        self.forget_words(peer);
    }

    /// What the peer told in an attempt to connect does not count in the next one, in which it tells all of it once more. The
    /// answer to an attempt of this node that came to nothing may have arrived after its end.
    pub(crate) fn forget_words(&mut self, peer: NodeId) {
        if planted!(self, OldWordsCount) {
            return;
        }
        for device in self.devices.values_mut() {
            if let Some(pd) = device.peers.get_mut(&peer) {
                pd.verdict = None;
                pd.refusal = None;
                pd.last_state = None;
            }
        }
    }

    /// Phase one of somebody else's transaction.
    pub(crate) fn prepare_received(&mut self, peer: NodeId, volume: VolumeNr, prepare: PhaseOne) {
        let head = prepare.head;
        let is_connect = is_connect(volume, &prepare);
        self.note_if_lost_there(peer, head.initiator_node_id);
        if is_connect {
            self.doubt_who_meets(head.initiator_node_id, head.target_node_id);
        }
        let number = (head.initiator_node_id, head.tid);
        if self.twopc.committed.contains(&number) {
            // A redundant path that is slower than the commit: this node's own question was taken for the
            // answer, and nobody will say how it ended.
            return;
        }
        if let Some(t) = self.twopc.current.as_mut() {
            if t.initiator == head.initiator_node_id && t.tid == head.tid {
                // A redundant path: it is answered with what the others get.
                t.parents.insert(peer);
                t.waiting.remove(peer);
                if let Some(kind) = t.answered {
                    self.send_reply(peer, kind);
                } else {
                    self.twopc_progress();
                }
                return;
            }
            if t.initiator == head.initiator_node_id && !t.parents.contains(peer) {
                let patience =
                    Duration::from_tenths(u64::from(self.options.twopc_timeout_tenths) / 20);
                let until = self.now + patience;
                if self.twopc.postponed.is_none() {
                    self.twopc.postponed = Some((peer, volume, prepare, until));
                    return;
                }
            }
            let Some(t) = self.twopc.current.as_ref() else {
                return;
            };
            let own_gives_way = t.wish.is_some()
                && (head.initiator_node_id < self.node_id || planted!(self, TwopcBothGiveWay));
            if own_gives_way {
                let Some(t) = self.twopc.current.take() else {
                    return;
                };
                self.timers.clear(Timer::Twopc);
                self.abort(&t);
                self.requeue(t);
            } else {
                self.reply(
                    peer,
                    head.tid,
                    head.initiator_node_id,
                    ReplyKind::Retry,
                    None,
                );
                return;
            }
        }
        self.note_verify(volume, &prepare);
        let asks = prepare.change == StateChange::default() && volume.is_none();
        let initiator = head.initiator_node_id;
        let stays = prepare.change.mask.has(StateWord::CONN)
            || prepare.change.val.role() != Some(Role::Secondary);
        if (asks && self.asks_itself()) || (stays && self.may_be_far_from(initiator)) {
            self.reply(peer, head.tid, initiator, ReplyKind::Retry, None);
        } else {
            self.accept(peer, volume, prepare, is_connect);
        }
        self.resume_yielded();
    }

    /// Others begin a verify, perhaps with this node.
    fn note_verify(&mut self, volume: VolumeNr, prepare: &PhaseOne) {
        let StateChange { mask, val } = prepare.change;
        let one_volume = !volume.is_none() && mask.has(StateWord::CONN);
        if one_volume && val.repl().is_some_and(ReplState::is_verify) {
            let target = prepare.head.target_node_id;
            let ends = target.map_or(NodeMask::EMPTY, NodeMask::of);
            self.verify_begins(volume, ends.with(prepare.head.initiator_node_id));
        }
    }

    /// An initiator asks its neighbours itself, and others only through them (semantics.md, 10.3). One
    /// that asks through `peer` has lost its connection with this node, which does not know of that
    /// yet. Writes that are left in the stream are old: the Primary that sent them may have been
    /// followed by another one, whose data they would replace. But a question that was under way for
    /// long may have been asked before there was this connection: then the initiator answers a ping.
    fn note_if_lost_there(&mut self, peer: NodeId, initiator: NodeId) {
        if peer == initiator || !self.is_established(initiator) {
            return;
        }
        let link = self.connections.get_mut(&initiator);
        if let Some(link) = link.and_then(|c| c.link.as_mut()) {
            link.lost_there = LostThere::Perhaps;
        }
        self.ask_if_lost_there(initiator);
    }

    /// A Primary that has lost the connection may have written since, and told so only nodes that follow it.
    /// After it has become Secondary nothing shows that, so this node's data count as old when it
    /// turns out that the connection is lost.
    fn note_demoted_apart(&mut self, t: &Transaction) {
        let initiator = t.initiator;
        let conn = self.state.connections.get(&initiator);
        let was_primary = conn.is_some_and(|c| c.peer_role == Role::Primary);
        let demotes = !t.change.mask.has(StateWord::CONN) && t.initiators_role() == Role::Secondary;
        if !was_primary || !demotes || t.parents.contains(initiator) {
            return;
        }
        let link = self.connections.get_mut(&initiator);
        if let Some(link) = link.and_then(|c| c.link.as_mut()) {
            link.demoted_apart = link.lost_there != LostThere::No;
        }
    }

    /// A ping from now on decides; the answer to an earlier one may be as old as what is in the stream.
    pub(crate) fn ask_if_lost_there(&mut self, peer: NodeId) {
        let link = self.connections.get_mut(&peer);
        let Some(link) = link.and_then(|c| c.link.as_mut()) else {
            return;
        };
        if link.lost_there == LostThere::Perhaps && !link.ping_outstanding {
            link.lost_there = LostThere::Asked;
            self.ping(peer);
        }
    }

    /// A Primary asks through others, so that it has no connection to this node, which takes itself for its neighbour
    /// still. It would count a vote as the word of one that knows better, and go on without this node.
    fn may_be_far_from(&self, initiator: NodeId) -> bool {
        self.peer_role(initiator) == Role::Primary
            && self.may_be_lost_there(initiator)
            && !planted!(self, FarVoteCounts)
    }

    /// The peer may have lost the connection: with it, and with a life of its own, what this node knows of its
    /// disk.
    pub(crate) fn may_be_lost_there(&self, peer: NodeId) -> bool {
        let link = self.connections.get(&peer).and_then(|c| c.link.as_ref());
        link.is_some_and(|l| l.lost_there != LostThere::No)
    }

    /// A write, or the word that others are in sync, came from a peer that has lost the connection.
    pub(crate) fn is_left_over(&self, peer: NodeId, packet: &Packet) -> bool {
        self.may_be_lost_there(peer)
            && matches!(
                packet,
                Packet::Data(_) | Packet::Trim(_) | Packet::Zeroes(_) | Packet::PeersInSync(_)
            )
    }

    /// This node's own transaction made place for another one; it is tried again later.
    fn requeue(&mut self, t: Transaction) {
        let attempt = t.attempt;
        if let Some(wish) = t.wish {
            self.yield_wish(wish, attempt, t.handshake);
        }
    }

    fn accept(&mut self, peer: NodeId, volume: VolumeNr, prepare: PhaseOne, is_connect: bool) {
        let head = prepare.head;
        let me = self.node_id;
        let targeted = head.target_node_id == Some(me);
        let direct = head.initiator_node_id == peer;
        let connecting = is_connect && targeted && direct;
        if connecting && !self.can_handshake(peer) {
            self.reply(
                peer,
                head.tid,
                head.initiator_node_id,
                ReplyKind::Retry,
                None,
            );
            return;
        }
        let mut reachable = self.established_peers().with(me);
        if is_connect {
            reachable.insert(head.initiator_node_id);
        }
        let disconnects = prepare.change.mask.has(StateWord::CONN)
            && prepare.change.val.conn() == Some(ConnState::Disconnecting);
        if disconnects {
            if targeted && direct && self.puts_leaving_off(peer) {
                self.reply(
                    peer,
                    head.tid,
                    head.initiator_node_id,
                    ReplyKind::Retry,
                    None,
                );
                return;
            }
            reachable.remove(head.initiator_node_id);
        }
        let mut t = Transaction {
            tid: head.tid,
            initiator: head.initiator_node_id,
            target: head.target_node_id,
            volume,
            change: prepare.change,
            wish: None,
            attempt: 0,
            parents: NodeMask::of(peer),
            children: NodeMask::EMPTY,
            waiting: NodeMask::EMPTY,
            lost: NodeMask::EMPTY,
            asker_lost: self.lost_by(head.initiator_node_id),
            nodes_to_reach: head.nodes_to_reach,
            reachable,
            target_reachable: NodeMask::EMPTY,
            primary_nodes: NodeMask::EMPTY,
            weak_nodes: NodeMask::EMPTY,
            retry: false,
            no: false,
            refusal: None,
            answered: None,
            handshake: connecting.then_some(peer),
            resize: None,
        };
        let check = match &prepare.resize {
            Some(packet) => self.resize_vote(volume, packet).map(|vote| {
                t.resize = Some(vote);
            }),
            None => self.check_remote(&t),
        };
        if self.state.role == Role::Primary {
            t.primary_nodes.insert(me);
            if self.state.devices.values().any(|d| d.data_accessible()) {
                t.weak_nodes = reachable.complement();
            }
        }
        if let Err(refusal) = &check {
            self.turn_is_asked(&t, refusal);
        }
        match check {
            Ok(()) => {}
            Err(refusal)
                if refusal.code == ErrorCode::IN_TRANSIENT_STATE
                    || self.puts_promotion_off(&refusal) =>
            {
                self.reply(
                    peer,
                    head.tid,
                    head.initiator_node_id,
                    ReplyKind::Retry,
                    None,
                );
                return;
            }
            Err(refusal) => t.refusal = Some(refusal),
        }
        if prepare.resize.is_some() && t.resize.is_none() {
            // Nobody has to be asked about what this node refuses.
            self.log(
                Level::Info,
                Some(peer),
                None,
                t.refusal.map_or_else(Default::default, |r| r.text),
            );
            self.reply(peer, head.tid, head.initiator_node_id, ReplyKind::No, None);
            return;
        }
        let forward = self
            .established_peers()
            .intersection(head.nodes_to_reach)
            .without(peer)
            .without(head.initiator_node_id);
        t.children = forward;
        t.waiting = forward;
        t.nodes_to_reach = head.nodes_to_reach.difference(forward).without(me);
        let packet = self.phase_one(&t);
        let probes = t.resize.is_some_and(|vote| vote.is_probing());
        self.twopc.current = Some(t);
        let patience = Duration::from_tenths(u64::from(self.options.twopc_timeout_tenths));
        let at = self.now + patience;
        self.timers.set(Timer::Twopc, at);
        for child in forward.iter() {
            self.send(child, Stream::Data, volume, packet.clone());
            self.ping(child);
        }
        if probes {
            self.probe_for_vote(volume, head.tid, head.initiator_node_id);
        }
        if connecting {
            self.timers.clear(Timer::Handshake(peer));
            self.send_handshake(peer);
        }
        self.twopc_progress();
    }

    /// Whether this node agrees, before anything is applied.
    fn check_remote(&self, t: &Transaction) -> Result<(), Refusal> {
        let forced = t.change.mask.has(StateWord::DISK) || t.change.mask.has(StateWord::PDSK);
        if t.parents.contains(t.initiator) && !forced {
            let seen = t.nodes_to_reach.complement();
            self.unmet_beside(t.initiator, t.initiators_role(), seen)?;
            if !t.change.mask.has(StateWord::CONN) {
                self.refuse_older_primary(t.initiator, t.initiators_role(), seen)?;
            }
        }
        if t.handshake.is_some() {
            // Decided when the peer's packets are in; `handshake_verdict`.
            return Ok(());
        }
        match self.remote_change(t) {
            Some(change) => self.check_change(&change).map(|_| ()),
            None => self.check_far(t),
        }
    }

    /// A change between other nodes: only what concerns the whole cluster is checked.
    fn check_far(&self, t: &Transaction) -> Result<(), Refusal> {
        // A connect says the role of the node that asks, too.
        let is_primary =
            t.change.mask.has(StateWord::ROLE) && t.change.val.role() == Some(Role::Primary);
        if is_primary && self.state.role == Role::Primary {
            let two = self.may_both_be_primary(t.initiator);
            let has_disk = self
                .state
                .devices
                .values()
                .any(|d| d.disk > DiskState::Diskless);
            if !two {
                return Err(Refusal {
                    code: ErrorCode::TWO_PRIMARIES,
                    text: "this node is Primary".into(),
                });
            }
            if has_disk && !t.change.mask.has(StateWord::CONN) {
                return Err(Refusal {
                    code: ErrorCode::WEAKLY_CONNECTED,
                    text: "this Primary is not connected to the new one".into(),
                });
            }
        }
        Ok(())
    }

    /// What the transaction changes here; none if it is between other nodes.
    fn remote_change(&self, t: &Transaction) -> Option<Change> {
        let me = self.node_id;
        let initiator = t.initiator;
        let affected = self.state.conn(initiator) == ConnState::Connected
            && (t.target.is_none() || t.target == Some(me));
        if !affected || t.change == StateChange::default() {
            return None;
        }
        let StateChange { mask, val } = t.change;
        let mut change = Change::new();
        if mask.has(StateWord::ROLE) && !mask.has(StateWord::CONN) {
            change = change.peer_role(initiator, val.role()?);
        }
        let disk = val
            .disk(DiskNumbering::V9)
            .filter(|_| mask.has(StateWord::DISK));
        let pdsk = val
            .pdsk(DiskNumbering::V9)
            .filter(|_| mask.has(StateWord::PDSK));
        if t.volume.is_none() {
            if mask.has(StateWord::CONN) && val.conn() == Some(ConnState::Disconnecting) {
                change = change.conn(initiator, ConnState::TearDown);
                change.graceful = true;
            }
            for (volume, device) in &self.state.devices {
                if let Some(disk) = disk {
                    let known = device.peers.get(&initiator).map(|p| p.disk);
                    // A disk that was detached beside this Primary comes back as an outdated one.
                    let detached = mask.has(StateWord::CONN)
                        && known == Some(DiskState::Diskless)
                        && !self.is_client(initiator);
                    let lowers = disk == DiskState::Outdated
                        && known.is_some_and(|d| d < DiskState::Outdated)
                        && !detached;
                    let raises = disk == DiskState::UpToDate
                        && known.is_some_and(|d| d < DiskState::Inconsistent);
                    if !lowers && !raises {
                        change = change.peer_disk(*volume, initiator, disk);
                    }
                }
            }
            if pdsk == Some(DiskState::Outdated) {
                change = change.lower_disks(DiskState::Outdated);
                change.ignore_impossible_outdate = true;
            }
        } else {
            if let Some(disk) = disk {
                change = change.peer_disk(t.volume, initiator, disk);
            }
            if mask.has(StateWord::CONN) {
                let mirrored = StateChange { mask, val }.mirrored();
                change = change.repl(t.volume, initiator, mirrored.val.repl()?);
            }
        }
        Some(change)
    }

    /// All children have answered: so does this node.
    pub(crate) fn answer_parents(&mut self) {
        let Some(t) = self.twopc.current.as_ref() else {
            return;
        };
        if t.answered.is_some() {
            return;
        }
        let handshake = t.handshake;
        let verdict = match handshake {
            Some(peer) if !t.retry => self.handshake_verdict(peer).and_then(|()| {
                self.check_change(&self.connect_change(peer, t.initiators_role()))
                    .map(|_| ())
            }),
            _ => Ok(()),
        };
        let Some(t) = self.twopc.current.as_mut() else {
            return;
        };
        if let Err(refusal) = verdict {
            if refusal.code == ErrorCode::IN_TRANSIENT_STATE
                || refusal.code == ErrorCode::HANDSHAKE_RETRY
            {
                t.retry = true;
            } else if t.refusal.is_none() {
                t.refusal = Some(refusal);
            }
        }
        let kind = if t.retry {
            ReplyKind::Retry
        } else if t.no || t.refusal.is_some() {
            ReplyKind::No
        } else {
            ReplyKind::Yes
        };
        t.answered = Some(kind);
        let parents = t.parents;
        if let Some(text) = t.refusal.as_ref().map(|r| r.text.clone()) {
            self.log(
                Level::Info,
                None,
                None,
                format!("refused a state change: {text}"),
            );
        }
        for parent in parents.iter() {
            self.send_reply(parent, kind);
        }
    }

    fn send_reply(&mut self, peer: NodeId, kind: ReplyKind) {
        let Some(t) = self.twopc.current.as_ref() else {
            return;
        };
        let (primary_nodes, word) = match &t.resize {
            Some(vote) => vote.words(),
            None => (t.primary_nodes, t.weak_nodes.0),
        };
        let reply = TwopcReply {
            tid: t.tid,
            initiator_node_id: t.initiator,
            reachable_nodes: t.reachable,
            primary_nodes,
            word,
        };
        let (tid, initiator) = (t.tid, t.initiator);
        self.reply(peer, tid, initiator, kind, Some(reply));
    }

    fn reply(
        &mut self,
        peer: NodeId,
        tid: u32,
        initiator: NodeId,
        kind: ReplyKind,
        full: Option<TwopcReply>,
    ) {
        let reply = full.unwrap_or(TwopcReply {
            tid,
            initiator_node_id: initiator,
            reachable_nodes: self.established_peers().with(self.node_id),
            ..TwopcReply::default()
        });
        let packet = match kind {
            ReplyKind::Yes => Packet::TwopcYes(reply),
            ReplyKind::No => Packet::TwopcNo(reply),
            ReplyKind::Retry => Packet::TwopcRetry(reply),
        };
        self.send(peer, Stream::Control, VolumeNr::NONE, packet);
    }

    /// The disk may have been taken away since a change of it was asked for, and be on its way back: that is another
    /// attach, whose metadata are not read yet.
    pub(crate) fn is_still_wanted(&self, kind: &WishKind) -> Result<(), Refusal> {
        let attaching = |volume: &VolumeNr| self.state.disk(*volume) == DiskState::Attaching;
        let device = |volume: &VolumeNr| self.devices.get(volume).and_then(|d| d.attached());
        let text = match kind {
            WishKind::Detach(volume) if attaching(volume) => {
                format!("volume {volume}: its disk was detached and is being attached")
            }
            WishKind::Attach(volume) if !attaching(volume) || device(volume).is_none() => {
                format!("volume {volume}: its disk was detached while it was being attached")
            }
            _ => return Ok(()),
        };
        Err(Refusal {
            code: ErrorCode::IN_TRANSIENT_STATE,
            text,
        })
    }

    /// Phase two.
    pub(crate) fn outcome_received(&mut self, peer: NodeId, outcome: TwopcOutcome, commit: bool) {
        let head = outcome.head;
        let matches = self.twopc.current.as_ref().is_some_and(|t| {
            t.wish.is_none() && t.tid == head.tid && t.initiator == head.initiator_node_id
        });
        let postponed = self.twopc.postponed.as_ref().is_some_and(|(_, _, p, _)| {
            p.head.tid == head.tid && p.head.initiator_node_id == head.initiator_node_id
        });
        if postponed {
            self.twopc.postponed = None;
        }
        if !matches {
            // Done already, or given up here; an abort is told to whoever may still wait.
            let number = (head.initiator_node_id, head.tid);
            if !commit {
                self.forward_outcome(peer, outcome, VolumeNr::NONE, false);
            } else if self.twopc.given_up.contains(&number) {
                self.commit_missed(peer, number.0);
            }
            return;
        }
        let Some(t) = self.twopc.current.take() else {
            return;
        };
        self.timers.clear(Timer::Twopc);
        let kept = match commit {
            true => planted!(self, CommitNotForwarded),
            false => planted!(self, AbortNotForwarded),
        };
        if !kept {
            self.forward_outcome(peer, outcome, t.volume, commit);
        }
        if !commit {
            if let Some(peer) = t.handshake.filter(|_| !planted!(self, AbortKeepsHandshake)) {
                self.handshake_aborted(peer);
            }
            self.next_wish();
            return;
        }
        note_number(&mut self.twopc.committed, &t);
        if let Some(vote) = t.resize {
            let size = outcome.exposed_size().0;
            self.resize_committed(&t, &vote, size, outcome.primary_nodes, None);
            self.next_wish();
            return;
        }
        let incapable = head.flags.contains(TwopcFlags::PRI_INCAPABLE);
        let has_reachable = head.flags.contains(TwopcFlags::HAS_REACHABLE);
        let mut members = self.state.members;
        if has_reachable && !planted!(self, MembersForgotten) {
            let quorate = self.state.devices.values().all(|d| d.have_quorum);
            // Whoever connects is a neighbour from now on.
            let joins = t
                .handshake
                .is_some_and(|peer| self.is_quorate_anywhere(peer));
            if quorate || joins || self.any_peer_quorate() {
                members = outcome.reachable_nodes().with(self.node_id);
            }
        }
        let mut near = self.state.connected();
        if self.is_left_by_asker(&t) && has_reachable {
            // It takes its leave, with whom it reaches: that side counts as gone here.
            near.remove(t.initiator);
        }
        members = members.union(near);
        let empty = t.change == StateChange::default();
        self.forget_words_of_pair(&t);
        self.note_primaries(outcome.primary_nodes);
        if let Some(peer) = t.handshake
            && let Some(refusal) = self.handshake_changed(peer)
        {
            // Between this node's yes and the commit: the initiator goes by what does not hold any more.
            let text = format!("{}; connecting again", refusal.text);
            self.log(Level::Warn, Some(peer), None, text);
            self.drop_connection(peer, ConnState::NetworkFailure);
        } else if let Some(peer) = t.handshake {
            let change = self
                .connect_change(peer, t.initiators_role())
                .members(members);
            let near = self.state.connected().with(peer).union(t.lost);
            let change = self.far_from_primary(change, near, outcome.primary_nodes, incapable);
            self.connect_committed(peer);
            self.hard_change(change);
            self.far_primary(outcome.primary_nodes, t.lost, incapable);
        } else if let Some(change) = self.remote_change(&t) {
            self.note_demoted_apart(&t);
            let mut change = change.members(members);
            if self.is_left_by_asker(&t) && !planted!(self, LeftInTwoSteps) {
                let near = self.state.connected().without(t.initiator).union(t.lost);
                change = self.far_from_primary(change, near, outcome.primary_nodes, incapable);
            }
            self.hard_change(change);
        } else {
            self.hard_change(Change::new().members(members));
            // A Primary beside this one serves what applications have, as this one does.
            let serves = outcome.primary_nodes.contains(t.initiator);
            if empty && self.state.role == Role::Primary && !serves {
                self.outdate_asker(t.initiator);
            }
        }
        if empty {
            self.empty_committed(outcome.primary_nodes, t.lost, incapable);
        } else {
            self.far_primary(outcome.primary_nodes, t.lost, incapable);
        }
        if !incapable {
            self.asker_left_behind(&t, outcome.primary_nodes);
        }
        if has_reachable && !incapable {
            self.far_nodes_told(outcome.reachable_nodes(), outcome.primary_nodes, t.lost);
        }
        if t.handshake.is_none() && t.change.val.conn() == Some(ConnState::Connected) {
            self.ask_about_met();
        }
        self.next_wish();
    }

    /// Others have done what this node agreed to and then gave up: it does not know what they are now. A new
    /// connection tells.
    fn commit_missed(&mut self, peer: NodeId, initiator: NodeId) {
        let from = match self.state.conn(initiator) {
            ConnState::Connected => initiator,
            _ => peer,
        };
        let text = "a state change was committed that this node had given up; connecting again";
        self.log(Level::Warn, Some(from), None, text.into());
        self.drop_connection(from, ConnState::NetworkFailure);
    }

    /// The node that asks ends its connection to this one.
    fn is_left_by_asker(&self, t: &Transaction) -> bool {
        t.target == Some(self.node_id)
            && t.change.mask.has(StateWord::CONN)
            && t.change.val.conn() == Some(ConnState::Disconnecting)
    }

    /// Someone far away had to ask whether a Primary is left: its data is not current.
    fn outdate_asker(&mut self, initiator: NodeId) {
        if self.state.conn(initiator) == ConnState::Connected {
            return;
        }
        let mut change = Change::new();
        for (volume, device) in &self.state.devices {
            if device
                .peers
                .get(&initiator)
                .is_some_and(|p| p.disk == DiskState::DUnknown)
            {
                change = change.peer_disk(*volume, initiator, DiskState::Outdated);
            }
        }
        self.hard_change(change);
    }

    fn forward_outcome(
        &mut self,
        from: NodeId,
        outcome: TwopcOutcome,
        volume: VolumeNr,
        commit: bool,
    ) {
        let to = self
            .established_peers()
            .intersection(outcome.head.nodes_to_reach)
            .without(from)
            .without(outcome.head.initiator_node_id);
        if to.is_empty() {
            return;
        }
        let mut forwarded = outcome;
        forwarded.head.nodes_to_reach = outcome
            .head
            .nodes_to_reach
            .difference(to)
            .without(self.node_id);
        for peer in to.iter() {
            let packet = if commit {
                Packet::TwopcCommit(forwarded)
            } else {
                Packet::TwopcAbort(forwarded)
            };
            self.send(peer, Stream::Data, volume, packet);
        }
    }

    /// The peer's packets may be exchanged now: the link waits for exactly this.
    fn can_handshake(&self, peer: NodeId) -> bool {
        self.state.conn(peer) == ConnState::Connecting
            && self
                .connections
                .get(&peer)
                .and_then(|c| c.link.as_ref())
                .is_some_and(|l| l.phase == Phase::Ready)
            && self.may_connect_now(peer)
    }

    /// Whether a running transaction may still change what a new generation depends on.
    pub(crate) fn in_handshake(&self) -> bool {
        self.twopc
            .current
            .as_ref()
            .is_some_and(|t| t.handshake.is_some())
            || self.in_legacy_handshake()
    }
}

/// The initiator and the target are to be connected.
fn is_connect(volume: VolumeNr, prepare: &PhaseOne) -> bool {
    prepare.change.mask.has(StateWord::CONN)
        && prepare.change.val.conn() == Some(ConnState::Connected)
        && volume.is_none()
}
