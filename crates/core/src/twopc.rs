//! Two-phase commit: changes on which all reachable nodes agree (semantics.md, 10; wire.md, 8.2).
//!
//! A node takes part in one transaction at a time. What an initiator wants is a [`Wish`]; what a
//! participant makes of it is in `twopc_peer.rs`.

use alloc::collections::VecDeque;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::packet::{TwopcHead, TwopcOutcome, TwopcPrepare, TwopcReply};
use lockstep_format::wire::{
    ConnState, DeviceDescFlags, DiskState, Packet, ReplState, Role, StateChange, StateWord,
    TwopcFlags,
};

use crate::command::{Answer, CommandError, ErrorCode};
use crate::event::{CommandId, Stream};
use crate::report::Level;
use crate::resize::{PhaseOne, ResizeVote};
use crate::resource::Resource;
use crate::time::{Duration, Instant};
use crate::timers::Timer;
use crate::transition::Change;
use crate::validity::Refusal;

/// Wishes that wait for the running transaction; more are refused.
const QUEUE_LIMIT: usize = 64;
/// Retries of a wish before it is given up.
const ATTEMPT_LIMIT: u32 = 12;

/// The two-phase commits of a resource.
#[derive(Debug, Default)]
pub struct Twopc {
    /// The running transaction.
    pub(crate) current: Option<Transaction>,
    pub(crate) queue: VecDeque<(Wish, u32)>,
    /// The wish that waits for its next attempt.
    pub(crate) retry: Option<(Wish, u32)>,
    /// A PREPARE that waits for the running transaction to end.
    pub(crate) postponed: Option<(NodeId, VolumeNr, PhaseOne, Instant)>,
    /// The last ones of others that were committed here: initiator and number.
    pub(crate) committed: VecDeque<(NodeId, u32)>,
    /// And those whose outcome did not come in time.
    pub(crate) given_up: VecDeque<(NodeId, u32)>,
    /// Requests of the running change that an 8.4 peer was not asked yet.
    pub(crate) legacy: VecDeque<(VolumeNr, StateChange)>,
    /// Nodes behind others that will hear of this Primary by the last commit (`far.rs`).
    pub(crate) telling: NodeMask,
    /// Those that have.
    pub(crate) told: NodeMask,
    /// Primaries that were lost since this node's last question.
    pub(crate) lost_primaries: NodeMask,
}

impl Twopc {
    /// Changes that run or wait.
    pub(crate) fn pending(&self) -> usize {
        let one = [
            self.current.is_some(),
            self.retry.is_some(),
            self.postponed.is_some(),
        ];
        let one: usize = one.into_iter().map(usize::from).sum();
        one + self.queue.len() + self.legacy.len()
    }
}

/// What this node wants the cluster to agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// What.
    pub kind: WishKind,
    /// Who waits.
    pub command: Option<CommandId>,
}

/// Kinds of wishes (wire.md, 8.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WishKind {
    /// Establish a connection whose handshake is ready.
    Connect(NodeId),
    /// End a connection. `outdate_self`, `outdate_peer`: as fencing and quorum ask.
    Disconnect {
        /// The peer.
        peer: NodeId,
        /// This Secondary outdates its disks when it leaves the Primary.
        outdate_self: bool,
        /// This Primary outdates the peer's disks.
        outdate_peer: bool,
    },
    /// Become Primary.
    Promote {
        /// Own data are taken for UpToDate.
        force_up_to_date: bool,
        /// Absent peers are taken for Outdated.
        outdate_absent: bool,
    },
    /// A Primary takes its own data of one volume for UpToDate, where nobody has good ones.
    ForceUpToDate(VolumeNr),
    /// Become Secondary.
    Demote {
        /// Openers do not matter.
        force: bool,
    },
    /// Attaching to Negotiating.
    Attach(VolumeNr),
    /// To Detaching.
    Detach(VolumeNr),
    /// Start a resync on an operator's word.
    Resync {
        /// The volume.
        volume: VolumeNr,
        /// The peer.
        peer: NodeId,
        /// StartingSyncS or T (full), WFBitMapS or T (marked blocks).
        repl: ReplState,
    },
    /// Give a volume another size.
    Resize {
        /// The volume.
        volume: VolumeNr,
        /// The wanted size in sectors, 0 for as much as possible.
        user_sectors: u64,
        /// What the operator says about the new area and absent peers.
        flags: DeviceDescFlags,
    },
    /// Ask whether a Primary is left somewhere (semantics.md, 10.7).
    Empty,
}

/// A running transaction.
#[derive(Debug)]
pub struct Transaction {
    pub(crate) tid: u32,
    pub(crate) initiator: NodeId,
    pub(crate) target: Option<NodeId>,
    pub(crate) volume: VolumeNr,
    pub(crate) change: StateChange,
    /// What this node wants; none for a participant.
    pub(crate) wish: Option<Wish>,
    pub(crate) attempt: u32,
    /// Nodes that asked this one.
    pub(crate) parents: NodeMask,
    /// Nodes that this one asked.
    pub(crate) children: NodeMask,
    /// Of these, the ones that did not answer yet.
    pub(crate) waiting: NodeMask,
    /// Nodes whose connection was lost since it began.
    pub(crate) lost: NodeMask,
    /// Primaries that the initiator had said to have lost before it began.
    pub(crate) asker_lost: NodeMask,
    pub(crate) nodes_to_reach: NodeMask,
    pub(crate) reachable: NodeMask,
    pub(crate) target_reachable: NodeMask,
    pub(crate) primary_nodes: NodeMask,
    pub(crate) weak_nodes: NodeMask,
    pub(crate) retry: bool,
    pub(crate) no: bool,
    /// Why this node itself does not agree.
    pub(crate) refusal: Option<Refusal>,
    /// The answer that went to the parents.
    pub(crate) answered: Option<ReplyKind>,
    /// The peer whose handshake packets have to be in before the vote.
    pub(crate) handshake: Option<NodeId>,
    /// It is a resize.
    pub(crate) resize: Option<ResizeVote>,
}

impl Transaction {
    /// The role of a node that has answered.
    pub(crate) fn role_of(&self, peer: NodeId) -> Role {
        if self.primary_nodes.contains(peer) {
            Role::Primary
        } else {
            Role::Secondary
        }
    }

    /// The initiator's role as its question tells it; it does where it connects.
    pub(crate) fn initiators_role(&self) -> Role {
        let told = self.change.mask.has(StateWord::ROLE);
        let role = self.change.val.role().filter(|_| told);
        role.unwrap_or(Role::Unknown)
    }
}

/// A participant's vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyKind {
    Yes,
    No,
    Retry,
}

impl Resource {
    /// Asks the cluster. The answer goes to the wish's command.
    pub(crate) fn wish(&mut self, kind: WishKind, command: Option<CommandId>) {
        self.enqueue(Wish { kind, command }, 0);
    }

    fn enqueue(&mut self, wish: Wish, attempt: u32) {
        let busy = self.twopc.current.is_some() || self.twopc.retry.is_some();
        if busy {
            let known = wish.command.is_none()
                && (self.twopc.queue.iter().any(|(w, _)| w.kind == wish.kind)
                    || self
                        .twopc
                        .retry
                        .as_ref()
                        .is_some_and(|(w, _)| w.kind == wish.kind));
            if known {
                return;
            }
            if self.twopc.queue.len() >= QUEUE_LIMIT {
                self.end_wish(
                    &wish,
                    Err(Refusal {
                        code: ErrorCode::CONCURRENT_ST_CHG,
                        text: "too many state changes wait already".into(),
                    }),
                );
                return;
            }
            self.twopc.queue.push_back((wish, attempt));
            return;
        }
        self.start(wish, attempt);
    }

    /// Starts what waits, if nothing runs.
    pub(crate) fn next_wish(&mut self) {
        if self.twopc.current.is_some() {
            return;
        }
        self.tell_lost_primaries();
        if let Some((peer, volume, prepare, _)) = self.twopc.postponed.take() {
            self.prepare_received(peer, volume, prepare);
            if self.twopc.current.is_some() {
                return;
            }
        }
        if self.twopc.retry.is_some() {
            return;
        }
        if let Some((wish, attempt)) = self.twopc.queue.pop_front() {
            self.start(wish, attempt);
        }
    }

    pub(crate) fn twopc_retry(&mut self) {
        if self.twopc.current.is_some() {
            let at = self.now + Duration::from_millis(50);
            if self.twopc.retry.is_some() {
                self.timers.set(Timer::TwopcRetry, at);
            }
            return;
        }
        if let Some((wish, attempt)) = self.twopc.retry.take() {
            self.start(wish, attempt);
        }
    }

    fn start(&mut self, wish: Wish, attempt: u32) {
        let Some((volume, target, change)) = self.wire_change(&wish.kind) else {
            self.end_wish(
                &wish,
                Err(Refusal {
                    code: ErrorCode::NEED_CONNECTION,
                    text: "the peer is not connected".into(),
                }),
            );
            self.next_wish();
            return;
        };
        if let WishKind::Resync { peer, repl, .. } = &wish.kind
            && matches!(repl, ReplState::WfBitmapS | ReplState::WfBitmapT)
            && self.is_legacy(*peer)
        {
            let refusal = Refusal {
                code: ErrorCode::NOT_SUPPORTED,
                text: "an 8.4 peer can only invalidate everything: use --reset-bitmap=yes".into(),
            };
            self.end_wish(&wish, Err(refusal));
            self.next_wish();
            return;
        }
        if let WishKind::Resize { volume, .. } = wish.kind
            && let Err(refusal) = self.check_resize(volume)
        {
            self.end_wish(&wish, Err(refusal));
            self.next_wish();
            return;
        }
        // A local check before anybody is asked.
        let is_connect = matches!(wish.kind, WishKind::Connect(_));
        if !is_connect {
            let local = self.wish_change(&wish.kind, NodeMask::EMPTY);
            match self.check_change(&local) {
                Err(refusal) if !self.asks_for_turn(&wish.kind, &refusal) => {
                    self.end_wish(&wish, Err(refusal));
                    self.next_wish();
                    return;
                }
                Ok(false)
                    if let WishKind::Resync { volume, peer, .. } = wish.kind
                        && attempt == 0 =>
                {
                    let refusal = self.no_new_resync(volume, peer);
                    self.end_wish(&wish, Err(refusal));
                    self.next_wish();
                    return;
                }
                Ok(false) if !matches!(wish.kind, WishKind::Empty | WishKind::Resize { .. }) => {
                    self.end_wish(&wish, Ok(Answer::NothingToDo));
                    self.next_wish();
                    return;
                }
                _ => {}
            }
        }
        let mut asked: NodeMask = self.established_peers();
        if let (true, Some(target)) = (is_connect, target) {
            asked.insert(target);
        }
        let me = NodeMask::of(self.node_id);
        let tid = self.rng.next_u32() | 1;
        let mut reachable = self.established_peers().union(me);
        let mut target_reachable = reachable;
        match (&wish.kind, target) {
            (WishKind::Connect(_), Some(target)) => {
                reachable.insert(target);
                target_reachable = reachable;
            }
            (WishKind::Disconnect { .. }, Some(target)) => {
                target_reachable = NodeMask::of(target);
                reachable.remove(target);
            }
            _ => {}
        }
        let nodes_to_reach = asked.union(me).complement();
        let resize = self.own_resize_vote(&wish.kind);
        let transaction = Transaction {
            tid,
            initiator: self.node_id,
            target,
            volume,
            change,
            handshake: is_connect.then_some(target).flatten(),
            wish: Some(wish),
            attempt,
            parents: NodeMask::EMPTY,
            children: asked,
            waiting: asked,
            lost: NodeMask::EMPTY,
            asker_lost: NodeMask::EMPTY,
            nodes_to_reach,
            reachable,
            target_reachable,
            primary_nodes: NodeMask::EMPTY,
            weak_nodes: NodeMask::EMPTY,
            retry: false,
            no: false,
            refusal: None,
            answered: None,
            resize,
        };
        let kind = transaction.wish.as_ref().map(|w| &w.kind);
        if matches!(kind, Some(WishKind::Demote { .. })) {
            // With the commit the peers compare their marks.
            self.flush_peer_ack();
        }
        let packet = self.phase_one(&transaction);
        let handshake = transaction.handshake;
        let kind = transaction.wish.as_ref().map(|w| w.kind.clone());
        self.twopc.current = Some(transaction);
        let patience = Duration::from_tenths(u64::from(self.options.twopc_timeout_tenths));
        let at = self.now + patience;
        self.timers.set(Timer::Twopc, at);
        if let Some(peer) = handshake {
            self.doubt_who_meets(self.node_id, Some(peer));
        }
        for peer in asked.iter() {
            if self.is_legacy(peer) {
                let asks = kind
                    .as_ref()
                    .is_some_and(|kind| self.legacy_ask(peer, kind, change));
                if let Some(t) = self.twopc.current.as_mut().filter(|_| !asks) {
                    t.waiting.remove(peer);
                }
                continue;
            }
            self.send(peer, Stream::Data, volume, packet.clone());
            self.ping(peer);
        }
        if let Some(peer) = handshake {
            self.forget_words(peer);
            self.send_handshake(peer);
        }
        self.twopc_progress();
    }

    /// Volume, target and `mask`/`val` of a wish; none if its connection is not there.
    fn wire_change(&self, kind: &WishKind) -> Option<(VolumeNr, Option<NodeId>, StateChange)> {
        let word = |fields: &[(StateWord, u32)]| {
            let mut change = StateChange::default();
            for (field, value) in fields {
                change.mask = change.mask.union(*field);
                change.val = change.val.with_field(*field, *value);
            }
            change
        };
        let conn = |state: ConnState| state as u32;
        let disk = |state: DiskState| state as u32;
        Some(match kind {
            WishKind::Connect(peer) => {
                let link = self.connections.get(peer)?.link.as_ref()?;
                if link.phase != crate::connection::Phase::Ready {
                    return None;
                }
                (
                    VolumeNr::NONE,
                    Some(*peer),
                    word(&[
                        (StateWord::CONN, conn(ConnState::Connected)),
                        (StateWord::ROLE, self.state.role as u32),
                    ]),
                )
            }
            WishKind::Disconnect {
                peer,
                outdate_self,
                outdate_peer,
            } => {
                if !self.is_established(*peer) {
                    return None;
                }
                let mut fields = alloc::vec![(StateWord::CONN, conn(ConnState::Disconnecting))];
                if *outdate_self {
                    fields.push((StateWord::DISK, disk(DiskState::Outdated)));
                }
                if *outdate_peer {
                    fields.push((StateWord::PDSK, disk(DiskState::Outdated)));
                }
                (VolumeNr::NONE, Some(*peer), word(&fields))
            }
            WishKind::Promote {
                force_up_to_date, ..
            } => {
                let mut fields = alloc::vec![(StateWord::ROLE, Role::Primary as u32)];
                if *force_up_to_date {
                    fields.push((StateWord::DISK, disk(DiskState::UpToDate)));
                }
                (VolumeNr::NONE, None, word(&fields))
            }
            WishKind::Demote { .. } => (
                VolumeNr::NONE,
                None,
                word(&[(StateWord::ROLE, Role::Secondary as u32)]),
            ),
            WishKind::ForceUpToDate(volume) => (
                *volume,
                None,
                word(&[(StateWord::DISK, disk(DiskState::UpToDate))]),
            ),
            WishKind::Attach(volume) => (
                *volume,
                None,
                word(&[(StateWord::DISK, disk(DiskState::Negotiating))]),
            ),
            WishKind::Detach(volume) => (
                *volume,
                None,
                word(&[(StateWord::DISK, disk(DiskState::Detaching))]),
            ),
            WishKind::Resync { volume, peer, repl } => {
                if !self.is_established(*peer) {
                    return None;
                }
                (
                    *volume,
                    Some(*peer),
                    word(&[(StateWord::CONN, *repl as u32)]),
                )
            }
            WishKind::Resize { volume, .. } => (*volume, None, StateChange::default()),
            WishKind::Empty => (VolumeNr::NONE, None, StateChange::default()),
        })
    }

    /// The packet that asks for what the transaction is about.
    pub(crate) fn phase_one(&self, t: &Transaction) -> Packet {
        let head = self.head(t, t.nodes_to_reach);
        match &t.resize {
            Some(vote) => Packet::TwopcPrepRsz(vote.packet(head)),
            None => Packet::TwopcPrepare(TwopcPrepare {
                head,
                primary_nodes: NodeMask::EMPTY,
                change: t.change,
            }),
        }
    }

    /// What the wish changes on this node. `reachable` is known at the commit only.
    fn wish_change(&self, kind: &WishKind, reachable: NodeMask) -> Change {
        match kind {
            WishKind::Connect(peer) => self.connect_change(*peer, Role::Unknown),
            WishKind::Disconnect {
                peer,
                outdate_self,
                outdate_peer,
            } => {
                let mut change = Change::new().conn(*peer, ConnState::Disconnecting);
                change.graceful = true;
                if *outdate_self {
                    change = change.lower_disks(DiskState::Outdated);
                    change.ignore_impossible_outdate = true;
                }
                if *outdate_peer {
                    for (volume, device) in &self.state.devices {
                        if device
                            .peers
                            .get(peer)
                            .is_some_and(|p| p.disk > DiskState::Outdated)
                        {
                            change = change.peer_disk(*volume, *peer, DiskState::Outdated);
                        }
                    }
                }
                change
            }
            WishKind::Promote {
                force_up_to_date,
                outdate_absent,
            } => {
                let mut change = Change::new().role(Role::Primary);
                for (volume, device) in &self.state.devices {
                    if *force_up_to_date {
                        change = self.forced_data(change, *volume);
                    }
                    for (peer, p) in &device.peers {
                        let far = reachable.contains(*peer)
                            && self.state.conn(*peer) != ConnState::Connected;
                        if p.disk == DiskState::DUnknown && (*outdate_absent || far) {
                            change = change.peer_disk(*volume, *peer, DiskState::Outdated);
                        }
                    }
                }
                change
            }
            WishKind::Demote { force } => {
                let mut change = Change::new().role(Role::Secondary);
                change.ignore_openers = *force;
                change
            }
            WishKind::ForceUpToDate(volume) => self.forced_data(Change::new(), *volume),
            WishKind::Attach(volume) => Change::new().disk(*volume, DiskState::Negotiating),
            WishKind::Detach(volume) => {
                let mut change = Change::new().disk(*volume, DiskState::Detaching);
                change.graceful = true;
                change
            }
            WishKind::Resync { volume, peer, repl } => Change::new().repl(*volume, *peer, *repl),
            WishKind::Resize { .. } | WishKind::Empty => Change::new(),
        }
    }

    pub(crate) fn head(&self, transaction: &Transaction, nodes_to_reach: NodeMask) -> TwopcHead {
        let mut flags = TwopcFlags::HAS_FLAGS;
        flags.set(TwopcFlags::HAS_REACHABLE, transaction.resize.is_none());
        TwopcHead {
            tid: transaction.tid,
            flags,
            initiator_node_id: transaction.initiator,
            target_node_id: transaction.target,
            nodes_to_reach,
        }
    }

    /// Peers past the connect two-phase commit.
    pub(crate) fn established_peers(&self) -> NodeMask {
        self.state
            .connected()
            .iter()
            .filter(|peer| self.is_established(*peer))
            .collect()
    }

    /// A two-phase commit packet. Returns the packet if it is another one.
    pub(crate) fn twopc_packet(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        packet: Packet,
    ) -> Option<Packet> {
        match packet {
            Packet::TwopcPrepare(prepare) => {
                let prepare = prepare.into();
                self.forget_old_handshake(peer, volume, &prepare);
                self.prepare_received(peer, volume, prepare);
            }
            Packet::TwopcPrepRsz(resize) => self.prepare_received(peer, volume, resize.into()),
            Packet::TwopcYes(reply) => self.reply_received(peer, reply, ReplyKind::Yes),
            Packet::TwopcNo(reply) => self.reply_received(peer, reply, ReplyKind::No),
            Packet::TwopcRetry(reply) => self.reply_received(peer, reply, ReplyKind::Retry),
            Packet::TwopcCommit(outcome) => self.outcome_received(peer, outcome, true),
            Packet::TwopcAbort(outcome) => self.outcome_received(peer, outcome, false),
            Packet::Disconnect => {
                self.go_standalone(peer, "the peer refused the connection".into());
            }
            other => return Some(other),
        }
        None
    }

    fn reply_received(&mut self, peer: NodeId, reply: TwopcReply, kind: ReplyKind) {
        let stale = planted!(self, StaleReplyCounts);
        let Some(t) = self.twopc.current.as_mut() else {
            return;
        };
        if t.tid != reply.tid && !stale
            || t.initiator != reply.initiator_node_id
            || !t.waiting.contains(peer)
        {
            return;
        }
        t.waiting.remove(peer);
        let careless = planted!(self, WeakVotesIgnored);
        match kind {
            ReplyKind::Yes if t.resize.is_some() => {
                t.reachable = t.reachable.union(reply.reachable_nodes);
                if let Some(vote) = t.resize.as_mut() {
                    vote.add(reply.primary_nodes, reply.max_possible_size().0);
                }
            }
            ReplyKind::Yes => {
                let target_side = matches!(
                    t.wish.as_ref().map(|w| &w.kind),
                    Some(WishKind::Disconnect { .. })
                ) && t.target == Some(peer);
                if target_side {
                    t.target_reachable = t.target_reachable.union(reply.reachable_nodes);
                } else {
                    t.reachable = t.reachable.union(reply.reachable_nodes);
                }
                t.primary_nodes = t.primary_nodes.union(reply.primary_nodes);
                if !careless {
                    t.weak_nodes = t.weak_nodes.union(reply.weak_nodes());
                }
            }
            ReplyKind::No => t.no = !planted!(self, TwopcNoIgnored),
            ReplyKind::Retry => t.retry = !planted!(self, RetryCountsAsYes),
        }
        self.twopc_progress();
    }

    /// Looks whether the running transaction can be decided or answered.
    pub(crate) fn twopc_progress(&mut self) {
        let Some(t) = self.twopc.current.as_ref() else {
            return;
        };
        let ready = match t.handshake {
            Some(peer) => self.handshake_ready(peer),
            None => true,
        };
        let ready = ready && !t.resize.is_some_and(|vote| vote.is_probing());
        let decided = t.retry || (ready && (t.no || t.waiting.is_empty()));
        if !decided {
            return;
        }
        if t.wish.is_some() {
            self.decide();
        } else {
            self.answer_parents();
        }
    }

    fn decide(&mut self) {
        let Some(mut t) = self.twopc.current.take() else {
            return;
        };
        self.timers.clear(Timer::Twopc);
        // Of a link that broke, or stood still, before they were asked.
        self.twopc.legacy.clear();
        let Some(wish) = t.wish.take() else { return };
        if t.retry || self.is_told_before(&wish.kind) {
            self.abort(&t);
            self.try_again(wish, t.attempt, t.handshake);
            return;
        }
        if t.no {
            // What speaks against a connect at its two ends goes before the others' votes.
            let own = match wish.kind {
                WishKind::Connect(peer) => self.handshake_verdict(peer),
                _ => Ok(()),
            };
            let mut refusal = own.err().unwrap_or_else(|| Refusal {
                code: ErrorCode::CW_FAILED_BY_PEER,
                text: match wish.kind {
                    WishKind::Attach(volume) => format!(
                        "a peer refused the attach, and its log says why; one that has no bitmap \
                         for volume {volume} of this node (bitmap no) has to be adjusted first"
                    ),
                    _ => "a peer refused the state change; its log says why".into(),
                },
            });
            self.learn_from_refusal(&wish, &mut refusal);
            self.abort(&t);
            self.wish_failed(&wish, refusal);
            self.next_wish();
            return;
        }
        if let Some(vote) = t.resize {
            self.decide_resize(&t, &wish, &vote);
            self.next_wish();
            return;
        }
        let me = self.node_id;
        let becomes = matches!(wish.kind, WishKind::Promote { .. });
        let demotes = matches!(wish.kind, WishKind::Demote { .. });
        if becomes || (self.state.role == Role::Primary && !demotes) {
            t.primary_nodes.insert(me);
            let accessible = self.state.devices.values().any(|d| d.data_accessible());
            if accessible {
                let mut near = self.established_peers();
                near.insert(me);
                if let WishKind::Connect(peer) = wish.kind {
                    near.insert(peer);
                }
                if let WishKind::Disconnect { peer, .. } = wish.kind {
                    near.remove(peer);
                }
                t.weak_nodes = t.weak_nodes.union(near.complement());
            }
        }
        let split = matches!(wish.kind, WishKind::Disconnect { .. })
            && t.reachable.intersection(t.target_reachable).is_empty();
        if !split {
            t.reachable = t.reachable.union(t.target_reachable);
            t.target_reachable = t.reachable;
        }
        if let Err(mut refusal) = self.initiator_verdict(&t, &wish) {
            self.learn_from_refusal(&wish, &mut refusal);
            self.abort(&t);
            self.wish_failed(&wish, refusal);
            self.next_wish();
            return;
        }
        self.commit_wish(&t, wish);
        self.next_wish();
    }

    /// What only the sum of the answers shows (semantics.md, 10.5).
    fn initiator_verdict(&self, t: &Transaction, wish: &Wish) -> Result<(), Refusal> {
        // Who has left since is counted as it will be after the commit: it may be what gave quorum.
        let members = t.reachable.union(t.target_reachable);
        let checked = |kind: &WishKind| {
            let change = self.wish_change(kind, t.reachable).members(members);
            self.check_change(&change).map(|_| ())
        };
        match &wish.kind {
            WishKind::Promote { .. } => {
                self.may_join(t)?;
                checked(&wish.kind)
            }
            WishKind::Connect(peer) => {
                self.handshake_verdict(*peer)?;
                self.unmet_beside(*peer, t.role_of(*peer), t.reachable)?;
                if t.primary_nodes.count() > 1 && !self.primaries_meet(t) {
                    return Err(Refusal {
                        code: ErrorCode::TWO_PRIMARIES,
                        text: "both sides have a Primary".into(),
                    });
                }
                self.check_change(&self.connect_change(*peer, t.role_of(*peer)))
                    .map(|_| ())
            }
            WishKind::Empty => Ok(()),
            // Without its target it would be a resync of nobody, and begin beside the next handshake.
            WishKind::Resync { peer, .. } if !t.children.contains(*peer) => Err(Refusal {
                code: ErrorCode::NEED_CONNECTION,
                text: format!("the connection to node {peer} was lost"),
            }),
            kind => {
                self.is_still_wanted(kind)?;
                checked(kind)
            }
        }
    }

    fn commit_wish(&mut self, t: &Transaction, wish: Wish) {
        let incapable = !t.primary_nodes.is_empty() && t.weak_nodes.is_empty();
        // Local last where a peer must not see effects, or lose the stream, before the commit.
        let local_last = matches!(
            wish.kind,
            WishKind::Demote { .. }
                | WishKind::Attach(_)
                | WishKind::Detach(_)
                | WishKind::Connect(_)
                | WishKind::Disconnect { .. }
                | WishKind::Resync { .. }
        );
        let mut to = self.established_peers();
        if let WishKind::Connect(peer) = wish.kind {
            to.insert(peer);
        }
        if matches!(wish.kind, WishKind::Demote { .. }) {
            self.flush_peer_ack();
        }
        if local_last {
            self.send_outcome(t, to, incapable);
        }
        // Whoever leaves does not count those that stay as gone: they may go on (semantics.md, 11.1).
        let members = t.reachable.union(t.target_reachable);
        let mut forced: Vec<VolumeNr> = match &wish.kind {
            WishKind::Promote {
                force_up_to_date: true,
                ..
            } => self.state.devices.keys().copied().collect(),
            WishKind::ForceUpToDate(volume) => vec![*volume],
            _ => Vec::new(),
        };
        forced.retain(|volume| self.may_be_forced(*volume));
        self.note_primaries(t.primary_nodes);
        match &wish.kind {
            WishKind::Empty => {
                self.hard_change(Change::new().members(members));
                self.twopc.lost_primaries = self.twopc.lost_primaries.intersection(t.lost);
                self.empty_committed(t.primary_nodes, t.lost, incapable);
            }
            WishKind::Connect(peer) => {
                let peer = *peer;
                let change = self.connect_change(peer, t.role_of(peer)).members(members);
                let near = self.state.connected().with(peer).union(t.lost);
                let change = self.far_from_primary(change, near, t.primary_nodes, incapable);
                self.connect_committed(peer);
                self.hard_change(change);
                self.far_primary(t.primary_nodes, t.lost, incapable);
            }
            kind => {
                let change = self.wish_change(kind, t.reachable).members(members);
                self.hard_change(change);
                if matches!(kind, WishKind::Disconnect { .. }) {
                    // A Primary on the other side, near or far, writes on without us.
                    self.far_primary(t.primary_nodes, NodeMask::EMPTY, incapable);
                }
            }
        }
        if !local_last {
            self.send_outcome(t, to, incapable);
        }
        if !incapable {
            self.far_nodes_told(t.reachable, t.primary_nodes, t.lost);
        }
        // The others are as current as before, and their peers follow them.
        self.forced_generation(&forced);
        self.end_wish(&wish, Ok(Answer::Done));
    }

    fn send_outcome(&mut self, t: &Transaction, to: NodeMask, incapable: bool) {
        let me = NodeMask::of(self.node_id);
        let mut head = self.head(t, to.union(me).complement());
        if incapable {
            head.flags |= TwopcFlags::PRI_INCAPABLE;
        }
        let outcome = TwopcOutcome {
            head,
            primary_nodes: t.primary_nodes,
            word: t.target_reachable.0,
        };
        for peer in to.iter() {
            self.send(peer, Stream::Data, t.volume, Packet::TwopcCommit(outcome));
        }
    }

    pub(crate) fn abort(&mut self, t: &Transaction) {
        let head = self.head(t, t.children.with(self.node_id).complement());
        // Nothing was decided about who is where.
        let outcome = TwopcOutcome {
            head,
            primary_nodes: NodeMask::EMPTY,
            word: 0,
        };
        for peer in t.children.iter() {
            self.send(peer, Stream::Data, t.volume, Packet::TwopcAbort(outcome));
        }
        if let Some(peer) = t.handshake {
            self.handshake_aborted(peer);
        }
    }

    fn try_again(&mut self, wish: Wish, attempt: u32, handshake: Option<NodeId>) {
        if let Some(peer) = handshake {
            // The connect attempt has its own timer.
            self.connect_attempt_failed(peer, Duration::from_millis(50));
            self.next_wish();
            return;
        }
        if attempt >= ATTEMPT_LIMIT {
            let refusal = Refusal {
                code: ErrorCode::CONCURRENT_ST_CHG,
                text: "other state changes kept coming between; try again".into(),
            };
            self.wish_failed(&wish, refusal);
            self.next_wish();
            return;
        }
        let links = self
            .state
            .connections
            .values()
            .filter(|c| c.conn >= ConnState::Connecting)
            .count()
            .max(1) as u64;
        let unit = u64::from(self.options.twopc_retry_timeout_tenths) * 100;
        let span = unit * links * (1 << attempt.min(5));
        let wait = Duration::from_millis(self.rng.below(span.max(1)) + 1);
        let at = self.now + wait;
        self.timers.set(Timer::TwopcRetry, at);
        if planted!(self, TwopcRetryAppliedTwice) {
            self.twopc.queue.push_back((wish.clone(), attempt));
        }
        self.twopc.retry = Some((wish, attempt + 1));
        if let Some((peer, volume, prepare, _)) = self.twopc.postponed.take() {
            self.prepare_received(peer, volume, prepare);
        }
    }

    /// A wish made place for a transaction that was refused at once: nobody's end wakes it.
    pub(crate) fn resume_yielded(&mut self) {
        if self.twopc.current.is_some() || self.twopc.retry.is_some() {
            return;
        }
        if let Some(wish) = self.twopc.queue.pop_front() {
            self.twopc.retry = Some(wish);
            let at = self.now + Duration::from_millis(50);
            self.timers.set(Timer::TwopcRetry, at);
        }
    }

    /// A wish that made place for another node's transaction.
    pub(crate) fn yield_wish(&mut self, wish: Wish, attempt: u32, handshake: Option<NodeId>) {
        if let Some(peer) = handshake {
            self.connect_attempt_failed(peer, Duration::from_millis(50));
        } else {
            self.twopc.queue.push_front((wish, attempt));
        }
    }

    /// What a failed connect has taught; the abort drops what the handshake found.
    fn learn_from_refusal(&mut self, wish: &Wish, refusal: &mut Refusal) {
        if let WishKind::Connect(peer) = wish.kind {
            self.learn_from_handshake(peer, refusal.code);
            self.wait_for_loser(peer, refusal);
        }
    }

    /// A connect that failed has consequences of its own; other wishes only have an answer.
    fn wish_failed(&mut self, wish: &Wish, refusal: Refusal) {
        if let WishKind::Connect(peer) = wish.kind {
            self.connect_refused(peer, &refusal);
        }
        self.end_wish(wish, Err(refusal));
    }

    pub(crate) fn end_wish(&mut self, wish: &Wish, result: Result<Answer, Refusal>) {
        if let Err(refusal) = &result {
            self.log(
                Level::Debug,
                None,
                None,
                format!("{:?}: {}", wish.kind, refusal.text),
            );
            if wish.kind == WishKind::Empty {
                self.schedule_empty_twopc();
            }
            if let WishKind::Attach(volume) = wish.kind {
                self.attach_refused(volume, command_error(refusal.clone()));
            }
        }
        let steps_down = matches!(
            wish.kind,
            WishKind::Disconnect { .. } | WishKind::Demote { .. }
        );
        self.turn_answered(wish, &result);
        self.source_answered(wish, result.is_ok());
        match wish.command {
            Some(command) => self.wish_answered(command, &wish.kind, result),
            None if steps_down && result.is_err() => {
                // `down` does not ask again at once.
                self.down_pause = self.now + crate::admin::RETRY;
            }
            None => {}
        }
    }

    /// The transaction takes too long.
    pub(crate) fn twopc_timeout(&mut self) {
        if planted!(self, TwopcNeverTimesOut) {
            return;
        }
        let Some(mut t) = self.twopc.current.take() else {
            return;
        };
        self.twopc.legacy.clear();
        if let Some(wish) = t.wish.take() {
            self.abort(&t);
            self.try_again(wish, t.attempt, t.handshake);
        } else {
            crate::twopc_peer::note_number(&mut self.twopc.given_up, &t);
            self.abort(&t);
        }
        self.next_wish();
    }

    /// A link broke: its vote counts as RETRY, and a transaction that came only over it ends.
    pub(crate) fn twopc_peer_lost(&mut self, peer: NodeId) {
        let Some(t) = self.twopc.current.as_mut() else {
            return;
        };
        let voted = !t.waiting.contains(peer);
        t.lost.insert(peer);
        let waits = planted!(self, LostPeerAwaited);
        if !waits {
            t.waiting.remove(peer);
        }
        t.children.remove(peer);
        let was_parent = t.parents.contains(peer);
        t.parents.remove(peer);
        let yes = planted!(self, LostVoteCountsAsYes);
        let orphan = t.wish.is_none() && was_parent && t.parents.is_empty();
        let handshake_gone = t.handshake == Some(peer);
        if orphan {
            if let Some(t) = self.twopc.current.take() {
                self.timers.clear(Timer::Twopc);
                self.abort(&t);
            }
            self.next_wish();
        } else {
            if let Some(t) = self.twopc.current.as_mut()
                && (!voted && !yes && !waits || handshake_gone)
            {
                t.retry = true;
            }
            self.twopc_progress();
        }
        let lost_wish = |w: &Wish| {
            matches!(&w.kind,
                WishKind::Connect(p) | WishKind::Resync { peer: p, .. } if *p == peer)
        };
        let mut gone = alloc::vec::Vec::new();
        self.twopc.queue.retain(|(w, _)| {
            let lost = lost_wish(w);
            if lost {
                gone.push(w.clone());
            }
            !lost
        });
        for wish in gone {
            let refusal = Refusal {
                code: ErrorCode::NEED_CONNECTION,
                text: format!("the connection to node {peer} was lost"),
            };
            self.end_wish(&wish, Err(refusal));
        }
        if self
            .twopc
            .postponed
            .as_ref()
            .is_some_and(|(p, ..)| *p == peer)
        {
            self.twopc.postponed = None;
        }
    }

    /// Asks soon whether a Primary is left somewhere.
    pub(crate) fn schedule_empty_twopc(&mut self) {
        let at = self.now + Duration::from_millis(10);
        self.timers.set_earliest(Timer::EmptyTwopc, at);
    }

    pub(crate) fn start_empty_twopc(&mut self) {
        let quorum = self.options.quorum != crate::options::Quorum::Off;
        let open = self
            .state
            .devices
            .values()
            .any(|d| d.disk == DiskState::Consistent);
        let gone = self
            .state
            .members
            .difference(self.state.connected())
            .without(self.node_id);
        if quorum || open || !gone.is_empty() || !self.far_primaries.is_empty() {
            self.wish(WishKind::Empty, None);
        }
    }

    /// The commit of the empty transaction (semantics.md, 10.7).
    pub(crate) fn empty_committed(
        &mut self,
        primary_nodes: NodeMask,
        lost: NodeMask,
        incapable: bool,
    ) {
        if self.far_primary(primary_nodes, lost, incapable) {
            return;
        }
        if !incapable && !primary_nodes.intersection(lost).is_empty() {
            // What this transaction shows is no more. The next one asks who is left.
            self.schedule_empty_twopc();
            return;
        }
        if !incapable {
            self.forget_demoted(primary_nodes);
        }
        let mut change = Change::new();
        for (volume, device) in &self.state.devices {
            let busy = device
                .peers
                .values()
                .any(|p| p.repl > ReplState::Established);
            if device.disk == DiskState::Consistent
                && !self.reconcile_hold(*volume)
                && !busy
                && !self.diskless_primary_of_other_generation(*volume)
                && !self.another_went_on(*volume)
            {
                change = change.disk(*volume, DiskState::UpToDate);
            }
        }
        if !change.is_empty() {
            self.hard_change(change);
        }
    }

    /// A commit that shows a Primary with data outside the direct neighbours: this node's data
    /// cannot be current (semantics.md, 10.5). A neighbour that was lost since the transaction began had not
    /// gone on without this node by then.
    pub(crate) fn far_primary(
        &mut self,
        primary_nodes: NodeMask,
        lost: NodeMask,
        incapable: bool,
    ) -> bool {
        self.note_primaries(primary_nodes);
        let near = self.state.connected().with(self.node_id).union(lost);
        let far = !primary_nodes.difference(near).is_empty() && !incapable;
        if far {
            self.outdate_self();
        }
        far
    }

    /// The same for the commit of a connect, or of a Primary's leave, in one change with it: nobody sees this
    /// node connected and current in between, or is told by it that it is stable.
    pub(crate) fn far_from_primary(
        &mut self,
        change: Change,
        near: NodeMask,
        primary_nodes: NodeMask,
        incapable: bool,
    ) -> Change {
        let far = primary_nodes.difference(near.with(self.node_id));
        if far.is_empty() || incapable || !self.may_outdate_self() {
            return change;
        }
        self.forget_stable_news(None);
        change.lower_disks(DiskState::Outdated)
    }

    fn may_outdate_self(&self) -> bool {
        self.state.role != Role::Primary && !planted!(self, OutdateIgnored)
    }

    pub(crate) fn outdate_self(&mut self) {
        if !self.may_outdate_self() {
            return;
        }
        // A neighbour that said before that its data are stable is as far from the Primary as this node: it is no
        // reason to be UpToDate again.
        self.forget_stable_news(None);
        let mut change = Change::new().lower_disks(DiskState::Outdated);
        change.ignore_impossible_outdate = true;
        self.hard_change(change);
    }
}

/// Answers of commands about a transaction that failed.
pub(crate) fn command_error(refusal: Refusal) -> CommandError {
    CommandError {
        code: refusal.code,
        text: refusal.text,
    }
}
