//! Nodes that have all data, but hear late, or not at all, what they are called.

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, Uuid, VolumeNr};
use lockstep_format::wire::packet::CurrentUuid;
use lockstep_format::wire::{ConnState, DiskState, Packet, PeerState, ReplState, Role, UuidFlags};

use crate::admin::Wait;
use crate::change::Change;
use crate::command::ErrorCode;
use crate::compare::Strategy;
use crate::device::{ConnectVerdict, Device};
use crate::event::Stream;
use crate::frozen::outdates_primary;
use crate::generation::Generations;
use crate::look_again::diskful;
use crate::options::{Protocol, Quorum};
use crate::report::Level;
use crate::resource::Resource;
use crate::rule::Rule;
use crate::state::State;
use crate::twopc::WishKind;
use crate::uuid_spread::SpreadStep;
use crate::uuids::{PeerUuids, is_real};
use crate::validity::Refusal;

/// Generations that a node without a disk remembers as old.
const LEFT_BEHIND_COUNT: usize = 64;

impl Resource {
    /// A target ended its resync while this Primary, its source, made a generation: it has all
    /// data, but under the old name, and would look like another branch if it were promoted. So
    /// there is a further generation before the next write, which it follows like any other.
    pub(crate) fn renew_for_late(&mut self, volume: VolumeNr) {
        if self.state.role != Role::Primary
            || self.new_uuid.is_some()
            || self.state.disk(volume) != DiskState::UpToDate
            || self.late_peer(volume).is_none()
            || planted!(self, LatePeerKept)
        {
            return;
        }
        if let Some(device) = self.devices.get_mut(&volume)
            && !device.new_uuid_pending
        {
            device.uuid_is_due(false, true);
            device.new_uuid_forced = true;
            device.new_uuid_for_late = true;
            self.want_new_uuid_now();
        }
    }

    /// The further generation is about to be made, and all acks that were under way are here: a
    /// peer that lacks data all the same is not late but behind, and gets a resync instead.
    pub(crate) fn late_is_behind(&mut self, volume: VolumeNr) -> Option<NodeId> {
        let device = self.devices.get_mut(&volume)?;
        if !core::mem::take(&mut device.new_uuid_for_late) {
            return None;
        }
        let peer = self.late_peer(volume)?;
        self.lacks_writes(volume, peer).then_some(peer)
    }

    /// A peer that calls itself UpToDate at an ancestor of the generation here.
    fn late_peer(&self, volume: VolumeNr) -> Option<NodeId> {
        let disk = self.devices.get(&volume)?.attached()?;
        self.established_peers().iter().find(|peer| {
            let p = self.state.peer_device(volume, *peer);
            let current = self.peer_uuids(volume, *peer).map(|set| set.current);
            let known = |uuid: Uuid| {
                disk.generations
                    .ancestors()
                    .any(|u| u.same_generation(uuid))
            };
            p.repl == ReplState::Established
                && p.disk == DiskState::UpToDate
                && self.is_lockstep(*peer)
                && !self.is_legacy(*peer)
                && !self.same_current(volume, *peer)
                && current.is_some_and(known)
        })
    }

    /// A target ended its resync while a Primary without a disk, this node, made a generation, and its source heard of
    /// that a moment too late. It was connected here, so it has all data, under the old name: it is told the new one.
    pub(crate) fn relabel_targets(&mut self, old: &State, new: &State) {
        let spreads = self.new_uuid.is_some() && !self.is_writing_new_uuid();
        if new.role != Role::Primary || spreads || planted!(self, LatePeerKept) {
            return;
        }
        for (volume, state) in &new.devices {
            let ended = state.peers.iter().filter(|(peer, p)| {
                let before = old.peer_device(*volume, **peer);
                before.disk == DiskState::Inconsistent
                    && before.repl == ReplState::Established
                    && p.disk == DiskState::UpToDate
                    && p.repl == ReplState::Established
            });
            for (peer, _) in ended {
                if state.disk < DiskState::Inconsistent && self.is_old_name(*volume, *peer) {
                    self.relabel(*volume, *peer);
                }
            }
        }
    }

    /// The peer's disk is called by a name that another one, which is called as this node exposes it, had before.
    fn is_old_name(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let exposed = self.devices.get(&volume).map(|d| d.exposed_uuid);
        let (Some(exposed), Some(set)) = (exposed, self.peer_uuids(volume, peer)) else {
            return false;
        };
        let knows = |third: NodeId| {
            let set_of_third = self.peer_uuids(volume, third);
            third != peer
                && self.state.peer_device(volume, third).disk == DiskState::UpToDate
                && set_of_third.is_some_and(|third| {
                    third.current.same_generation(exposed) && third.knows(set.current)
                })
        };
        is_real(exposed)
            && is_real(set.current)
            && !set.current.same_generation(exposed)
            && self.is_lockstep(peer)
            && !self.lacks_writes(volume, peer)
            && self.established_peers().iter().any(knows)
    }

    fn relabel(&mut self, volume: VolumeNr, peer: NodeId) {
        let uuid = self
            .devices
            .get(&volume)
            .map_or(Uuid::ZERO, |d| d.exposed_uuid);
        let weak_nodes = self.weak_nodes(volume);
        let packet = CurrentUuid { uuid, weak_nodes };
        self.send(peer, Stream::Data, volume, Packet::CurrentUuid(packet));
    }

    /// A peer took a generation that this Primary announced and gave up with a crash, and looks newer. Nobody can
    /// have gone on with it while this one has the quorum, and its next write would leave the peer behind; but none may
    /// come, and the two would not connect. So the further generation is made at once.
    pub(crate) fn go_on_without(&mut self, volume: VolumeNr, peer: NodeId, strategy: Strategy) {
        let good = DiskState::UpToDate;
        let follower = self.established_peers().iter().any(|node| {
            let p = self.state.peer_device(volume, node);
            p.repl == ReplState::Established && p.disk == good && self.same_current(volume, node)
        });
        let Some(set) = self.peer_uuids(volume, peer) else {
            return;
        };
        let device = self.devices.get(&volume);
        let noted = device.and_then(|d| d.attached()).is_some_and(|disk| {
            let mut history = disk.generations.history.iter();
            history.any(|e| e.0 & Uuid::PRIMARY_BIT != 0 && e.same_generation(set.current))
        });
        if outdates_primary(strategy)
            && noted
            && follower
            && !set.flags.contains(UuidFlags::CRASHED_PRIMARY)
            && self.options.quorum != Quorum::Off
            && self.state.disk(volume) == good
            && let Some(device) = self.devices.get_mut(&volume)
        {
            device.uuid_is_due(false, true);
            device.new_uuid_forced = true;
            self.want_new_uuid_now();
        }
    }

    /// The same, seen from the target, where the Primary lost its disk before it could make the
    /// further one: what its disk is called is an ancestor of what is written from now on.
    pub(crate) fn catch_up_with(&mut self, primary: NodeId, volume: VolumeNr) {
        let Some(set) = self.peer_uuids(volume, primary).cloned() else {
            return;
        };
        let missed = self.state.disk(volume) == DiskState::UpToDate
            && self.state.peer_device(volume, primary).repl == ReplState::Established
            && self.is_lockstep(primary)
            && is_real(set.current)
            && !self.same_current(volume, primary)
            && set.dirty_bits == 0
            && set.slot_is_real(self.node_id);
        let (me, role) = (self.node_id, self.state.role);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let generations = &mut disk.generations;
        let known = generations
            .ancestors()
            .any(|u| u.same_generation(set.current));
        let old = generations.current;
        let left = set.slot(me).same_generation(old) || set.history_has(old);
        if missed && !known && left {
            generations.adopt_without_resync(set.current, primary, role);
            generations.push_retired_current(old);
        }
    }

    /// This node's resync ended while a word of its source, a Primary, was on its way: the generation that it has made
    /// meanwhile, as beside a target. That one has not heard of the end, and this node has all data that were called so
    /// before. Had it heard a moment earlier, it would have got the name with the end. Without it, it would look like
    /// another branch, should the Primary die before it makes the further one.
    pub(crate) fn ended_before(&self, source: NodeId, volume: VolumeNr, set: &PeerUuids) -> bool {
        let device = self.devices.get(&volume);
        let Some(disk) = device.and_then(|d| d.attached()) else {
            return false;
        };
        let pd = device.and_then(|d| d.peers.get(&source));
        let old = disk.generations.current;
        let ended = pd.is_some_and(|pd| pd.ended_at.same_generation(old));
        let said = pd.and_then(|pd| pd.last_state);
        let unheard = said.is_some_and(|said| {
            said.repl == ReplState::SyncSource && said.pdsk == DiskState::Inconsistent
        });
        ended
            && unheard
            && self.is_lockstep(source)
            && !self.is_legacy(source)
            && self.peer_role(source) == Role::Primary
            && self.state.role == Role::Secondary
            && self.state.disk(volume) == DiskState::UpToDate
            && self.state.peer_device(volume, source).repl == ReplState::Established
            && is_real(set.current)
            && !set.flags.contains(UuidFlags::RESYNC)
            && set.dirty_bits == 0
            && self.out_of_sync_blocks(volume, source) == 0
            && (set.slot(self.node_id).same_generation(old) || set.history_has(old))
            && !planted!(self, CrossedEndStays)
    }

    /// A generation that began during a handshake, after the UUIDs were sent, went to the connected
    /// peers alone. This one would take an end of a resync by the old name for another branch.
    pub(crate) fn tell_generation_of_handshake(&mut self, peer: NodeId) {
        if !self.is_lockstep(peer) || self.is_legacy(peer) {
            return;
        }
        let began = |device: &Device| {
            let told = device
                .peers
                .get(&peer)
                .and_then(|pd| pd.sent_uuids.as_ref());
            let disk = device.attached();
            told.zip(disk)
                .is_some_and(|(told, disk)| !disk.generations.current.same_generation(told.current))
        };
        let devices = self.devices.iter();
        let volumes: Vec<VolumeNr> = devices
            .filter(|(_, device)| began(device))
            .map(|(volume, _)| *volume)
            .collect();
        for volume in volumes {
            self.send_uuids(peer, volume, UuidFlags::empty());
        }
    }

    /// The initial sync was skipped (semantics.md, 12.8): what a peer said of its disk before it heard of that comes
    /// late. It tells its UUIDs first when it has.
    pub(crate) fn disk_as_told(
        &self,
        peer: NodeId,
        volume: VolumeNr,
        told: DiskState,
    ) -> DiskState {
        let mine = self.state.peer_device(volume, peer);
        let device = self.devices.get(&volume);
        let created = |uuid: Option<Uuid>| uuid == Some(Uuid::JUST_CREATED);
        // Nothing but a verify may have begun meanwhile.
        let calm = matches!(
            mine.repl,
            ReplState::Established | ReplState::VerifyS | ReplState::VerifyT
        );
        let skipped = told == DiskState::Inconsistent
            && mine.disk == DiskState::UpToDate
            && calm
            && self.is_lockstep(peer)
            && created(self.peer_uuids(volume, peer).map(|u| u.current))
            && !created(device.map(|d| d.current_uuid()));
        if skipped { mine.disk } else { told }
    }

    /// A disk has got another generation since its UUIDs went into the handshake with `peer`, by the end of a
    /// resync for example: what both ends made of the old set is wrong (semantics.md, 13.1, rule
    /// initial-handshake-changed). Beside a Primary it follows, and tells the peer afterwards; but it does not give
    /// its copy up for one of the set from before.
    pub(crate) fn handshake_changed(&self, peer: NodeId) -> Option<Refusal> {
        let other_disk = self.attached_in_handshake(peer);
        if let Some(refusal) = other_disk.or_else(|| self.copied_in_handshake(peer)) {
            return Some(refusal);
        }
        if self.state.role == Role::Primary {
            let given_up = || self.given_up_in_handshake(peer);
            return self
                .missed_in_handshake(peer)
                .or_else(|| self.renamed_in_handshake(peer))
                .or_else(given_up);
        }
        if planted!(self, HandshakeGoesStale) {
            return None;
        }
        let mut primaries = self.state.connections.values();
        let follows = primaries.any(|c| c.peer_role == Role::Primary);
        let changed = |volume: VolumeNr, device: &Device| {
            let pd = device.peers.get(&peer)?;
            let sent = pd.sent_uuids.as_ref()?;
            let verdict = pd.verdict.as_ref();
            let gives_up = verdict.is_some_and(|v| v.repl == ReplState::WfBitmapT)
                && self.state.disk(volume) >= DiskState::Consistent;
            if follows && (!gives_up || planted!(self, FollowerGivesUp)) {
                return None;
            }
            let now = self.own_uuids(peer, volume, UuidFlags::empty())?;
            (!now.current.same_generation(sent.current)).then_some(volume)
        };
        let volume = self.devices.iter().find_map(|(v, d)| changed(*v, d))?;
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!("volume {volume} is of another generation than node {peer} was told"),
        })
    }

    /// A disk was Negotiating when its UUIDs went into the handshake with `peer`, which decided nothing therefore, and
    /// other nodes have decided since: nobody would compare it with that peer's.
    fn attached_in_handshake(&self, peer: NodeId) -> Option<Refusal> {
        let decided = |volume: VolumeNr, device: &Device| {
            let pd = device.peers.get(&peer)?;
            let disk = self.state.disk(volume);
            let negotiated = pd.sent_handshake && pd.sent_disk == DiskState::Negotiating;
            (negotiated && disk != DiskState::Negotiating && disk >= DiskState::Inconsistent)
                .then_some(volume)
        };
        if planted!(self, AttachedInHandshakeOverlooked) {
            return None;
        }
        let volume = self.devices.iter().find_map(|(v, d)| decided(*v, d))?;
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!("volume {volume} was attached while node {peer} connected"),
        })
    }

    /// Who is copied from whom was decided while this disk was Inconsistent, and a third node has made it whole since: it
    /// does not give that copy up, least of all for one that is Inconsistent as well. Or it was whole, and is a third
    /// node's target since: it is no source for a disk that may be whole.
    fn copied_in_handshake(&self, peer: NodeId) -> Option<Refusal> {
        let decided = |volume: VolumeNr, device: &Device| {
            let pd = device.peers.get(&peer)?;
            let (told, now) = (pd.sent_disk, self.state.disk(volume));
            let other = match pd.verdict.as_ref()?.repl {
                ReplState::WfBitmapT => {
                    told == DiskState::Inconsistent && now > DiskState::Inconsistent
                }
                ReplState::WfBitmapS => {
                    told > DiskState::Inconsistent && now == DiskState::Inconsistent
                }
                _ => false,
            };
            (pd.sent_handshake && other).then_some(volume)
        };
        if planted!(self, HandshakeGoesStale) {
            return None;
        }
        let volume = self.devices.iter().find_map(|(v, d)| decided(*v, d))?;
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!("volume {volume} was copied while node {peer} connected"),
        })
    }

    /// A write began since this Primary's UUIDs went into the handshake with `peer`, one that was frozen for
    /// example and went on when another node connected. The peer is not sent it, and without a resync it would
    /// count as UpToDate. In the next handshake the write is marked.
    fn missed_in_handshake(&self, peer: NodeId) -> Option<Refusal> {
        // What is frozen waits for peers to connect, and goes to them as well.
        if !self.is_lockstep(peer)
            || self.is_legacy(peer)
            || self.state.suspended()
            || planted!(self, WrittenInHandshake)
        {
            return None;
        }
        let misses = |volume: VolumeNr, device: &Device| {
            let pd = device.peers.get(&peer)?;
            let verdict = pd.verdict.as_ref()?;
            let counts =
                verdict.repl == ReplState::Established && verdict.peer_disk == DiskState::UpToDate;
            let told = match self.state.disk(volume) {
                // Marks of a disk that is being attached were told with its UUIDs, and count when it is compared.
                DiskState::UpToDate | DiskState::Negotiating => {
                    pd.sent_uuids.as_ref()?.dirty_bits > 0
                }
                own => own >= DiskState::Inconsistent,
            };
            (counts && !told && self.lacks_writes(volume, peer)).then_some(volume)
        };
        let volume = self.devices.iter().find_map(|(v, d)| misses(*v, d))?;
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!("volume {volume} was written while node {peer} connected"),
        })
    }

    /// This Primary has made a generation since its UUIDs went into the handshake with `peer`, which would go
    /// on at the one before, and not take the next.
    fn renamed_in_handshake(&self, peer: NodeId) -> Option<Refusal> {
        if !self.is_lockstep(peer) || self.is_legacy(peer) || planted!(self, RenamedInHandshake) {
            return None;
        }
        let renamed = |volume: VolumeNr, device: &Device| {
            let pd = device.peers.get(&peer)?;
            let verdict = pd.verdict.as_ref()?;
            let counts = verdict.repl == ReplState::Established
                && verdict.peer_disk >= DiskState::Outdated
                && diskful(verdict.peer_disk);
            let sent = pd.sent_uuids.as_ref()?.current;
            let now = self.own_uuids(peer, volume, UuidFlags::empty())?.current;
            (counts && !now.same_generation(sent)).then_some(volume)
        };
        let volume = self.devices.iter().find_map(|(v, d)| renamed(*v, d))?;
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!("volume {volume} is of another generation than node {peer} was told"),
        })
    }

    /// A peer that is away lacks a write that was acknowledged without its answer, as protocols A and B allow,
    /// and the generation that says so is due. As a Secondary this node would not make it any more, and nobody
    /// could tell the followers that have the write from those that lack it. That an operator holds requests back
    /// changes nothing of that.
    pub(crate) fn leaves_peer_behind(&self) -> bool {
        if self.state.role != Role::Primary
            || !self.only_operator_suspends()
            || planted!(self, DemotionLeavesBehind)
        {
            return false;
        }
        let async_peer = |peer: NodeId| {
            let conn = self.connections.get(&peer);
            conn.is_some_and(|c| c.net.protocol != Protocol::C)
                && self.state.conn(peer) != ConnState::Connected
        };
        self.devices.iter().any(|(volume, device)| {
            device.new_uuid_pending
                && self.can_label(*volume)
                && self.state.disk(*volume) == DiskState::UpToDate
                && device.peers.keys().any(|peer| {
                    async_peer(*peer)
                        && self.slot_uuid(*volume, *peer).is_zero()
                        && self.out_of_sync_blocks(*volume, *peer) > 0
                })
        })
    }

    /// The peers are asked whether this Primary may become Secondary: a generation that they are told now would be
    /// given up at the end, and who has taken it would be of another one than this disk, with nothing to copy.
    pub(crate) fn demotion_is_voted(&self) -> bool {
        let current = self.twopc.current.as_ref().and_then(|t| t.wish.as_ref());
        current.is_some_and(|wish| matches!(wish.kind, WishKind::Demote { .. }))
            && !planted!(self, DemotionGivesUpTold)
    }

    /// The other way round: peers were told of a generation before they were asked for the demotion.
    pub(crate) fn is_told_before(&self, wish: &WishKind) -> bool {
        let told = self.new_uuid.as_ref();
        *wish == WishKind::Demote { force: false }
            && told.is_some_and(|new| new.step == SpreadStep::Confirm)
            && !planted!(self, DemotionGivesUpTold)
    }

    /// The node is about to be demoted, and somebody would not know what it lacks.
    pub(crate) fn demotion_wants_uuid(&self) -> bool {
        let demotes = self.opens.demote_at.is_some()
            || self.turns.yields
            || self
                .waiting
                .iter()
                .any(|w| matches!(w.what, Wait::Demote | Wait::Down));
        demotes && self.leaves_peer_behind()
    }

    /// A follower of this Primary without a disk brought a node up to date that is not connected here. That one
    /// has the generation that applications see from now on, and gets no writes: there has to be another one
    /// before the next of them is answered.
    pub(crate) fn notice_caught_up(&mut self, peer: NodeId, volume: VolumeNr, set: &PeerUuids) {
        let before = self.peer_uuids(volume, peer);
        let caught_up = before.is_some_and(|before| {
            self.state.connections.iter().any(|(third, c)| {
                *third != peer
                    && c.conn != ConnState::Connected
                    && before.slot_is_real(*third)
                    && set.slots.contains(*third)
                    && set.slot(*third).is_zero()
            })
        });
        let exposed = self
            .devices
            .get(&volume)
            .map_or(Uuid::ZERO, Device::current_uuid);
        let follows = self.state.peer_device(volume, peer).disk == DiskState::UpToDate;
        let serves = self.state.role == Role::Primary
            && self.state.disk(volume) < DiskState::Inconsistent
            && set.current.same_generation(exposed);
        if caught_up
            && follows
            && serves
            && let Some(device) = self.devices.get_mut(&volume)
        {
            device.uuid_is_due(false, true);
        }
    }

    /// The peer is being resynced beside a Primary that this node does not reach, from data of a generation
    /// that is unknown here. The two connect when that has ended; until then this disk is no current one.
    pub(crate) fn outdated_beside_target(&mut self, volume: VolumeNr, peer: NodeId, rule: Rule) {
        let Some(theirs) = self.peer_uuids(volume, peer) else {
            return;
        };
        let target = theirs.flags.contains(UuidFlags::SYNC_TARGET);
        let unstable = !theirs.flags.contains(UuidFlags::STABLE);
        let primaries = theirs.node_mask.without(self.node_id);
        let current = theirs.current;
        let own = self.state.disk(volume);
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let knows = disk.is_none_or(|disk| disk.generations.knows(current));
        if rule == Rule::TargetOfAnother
            && target
            && unstable
            && !primaries.is_empty()
            && !knows
            && self.is_lockstep(peer)
            && self.state.role == Role::Secondary
            && self.state.stable()
            && matches!(own, DiskState::UpToDate | DiskState::Consistent)
        {
            self.hard_change(Change::new().disk(volume, DiskState::Outdated));
        }
    }

    /// The superblock with a new generation hung when this node gave the disk up, and was written after
    /// all. Nothing was written under that generation, and others may have gone on: the disk is of the
    /// one before, and the other is noted. An attach may fail before that is on the disk: the next one does it again.
    pub(crate) fn undo_unmade(&mut self, volume: VolumeNr, found: &mut Generations) {
        let unmade = self.devices.get(&volume).and_then(|d| d.unmade.as_ref());
        if let Some((base, uuid)) = unmade {
            go_back(found, base, *uuid);
        }
    }

    /// The disk goes before a new generation on it was made, so nothing will be written under that: the peer that it
    /// was to leave behind may be promoted, and this disk must not look like another branch when it comes back. What is
    /// on its way to the disk may still come there, so the generation stays known as unmade.
    pub(crate) fn give_up_unmade(&mut self, volume: VolumeNr) {
        let keeps = planted!(self, UnmadeKept);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let unmade = device.unmade.clone().filter(|_| !keeps);
        let Some(((base, uuid), disk)) = unmade.zip(device.attached_mut()) else {
            return;
        };
        if go_back(&mut disk.generations, &base, uuid) {
            self.write_superblock(volume);
        }
    }

    /// A Primary without a disk says that applications have seen nothing newer than this disk, which is
    /// Outdated only because that Primary had announced a generation that never got to it.
    pub(crate) fn vouched_for(&mut self, volume: VolumeNr) {
        let device = self.devices.get_mut(&volume);
        let Some(disk) = device.and_then(|d| d.attached_mut()) else {
            return;
        };
        let missed = core::mem::take(&mut disk.missed_exposed);
        if missed
            && self.state.role == Role::Secondary
            && self.state.disk(volume) == DiskState::Outdated
        {
            self.hard_change(Change::new().disk(volume, DiskState::UpToDate));
        }
    }

    /// A disk that comes back cannot know whether a Primary without a disk went on without it.
    /// This one says that it did not.
    pub(crate) fn vouch_for(&mut self, peer: NodeId, volume: VolumeNr, current: Uuid) {
        let exposed = self
            .devices
            .get(&volume)
            .map_or(Uuid::ZERO, |d| d.exposed_uuid);
        if self.state.role == Role::Primary
            && self.state.peer_device(volume, peer).disk != DiskState::UpToDate
            && !exposed.is_zero()
            && current.same_generation(exposed)
        {
            self.send_uuids(peer, volume, UuidFlags::empty());
        }
    }

    pub(crate) fn vouch_for_all(&mut self, volume: VolumeNr) {
        for peer in self.established_peers().iter() {
            if let Some(current) = self.peer_uuids(volume, peer).map(|set| set.current)
                && self.state.peer_device(volume, peer).disk >= DiskState::Inconsistent
            {
                self.vouch_for(peer, volume, current);
            }
        }
    }

    /// A diskless Secondary takes the generation of the UpToDate peer for its own, a Primary one that
    /// it has announced and had no answer to.
    pub(crate) fn learn_exposed(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        verdict: &ConnectVerdict,
    ) {
        let own = self.state.disk(volume);
        let told = self.is_told_by_primary(volume, peer);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        if own >= DiskState::Inconsistent || verdict.peer_disk != DiskState::UpToDate || told {
            return;
        }
        let current = device
            .peers
            .get(&peer)
            .and_then(|pd| pd.uuids.as_ref())
            .map(|u| u.current);
        let Some(current) = current else { return };
        let is_secondary = self.state.role == Role::Secondary;
        let announced = device.announced.len();
        if !is_secondary {
            device.announced.retain(|u| !u.same_generation(current));
        }
        let confirmed = device.announced.len() < announced;
        if confirmed || is_secondary || device.exposed_uuid.is_zero() {
            device.exposed_uuid = current;
        }
    }

    /// A peer attaches the disk that took a generation which this Primary without a disk had announced; the
    /// link broke before the answer, and the disk went before the next handshake. What it exposes is in there, unless
    /// another disk serves it meanwhile.
    pub(crate) fn expose_announced(&mut self, volume: VolumeNr, peer: NodeId, set: &PeerUuids) {
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let exposed = device.exposed_uuid;
        let knows =
            set.history_has(exposed) || set.bitmap.iter().any(|slot| slot.same_generation(exposed));
        let named = |uuid: &Uuid| uuid.same_generation(set.current);
        let served = device.peers.keys().any(|node| {
            *node != peer && self.state.peer_device(volume, *node).disk == DiskState::UpToDate
        });
        if self.state.role == Role::Primary
            && !exposed.is_zero()
            && knows
            && device.announced.iter().any(named)
            && !served
            && let Some(device) = self.devices.get_mut(&volume)
        {
            device.announced.retain(|uuid| !named(uuid));
            device.exposed_uuid = set.current;
        }
    }

    /// The peer's disk is at an ancestor of what this node has exposed, as a third node shows that
    /// has it: its state, which follows, calls it UpToDate all the same.
    pub(crate) fn remember_left_behind(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let set = |pd: &crate::device::PeerDevice| pd.uuids.clone();
        let Some(old) = device.peers.get(&peer).and_then(set).map(|s| s.current) else {
            return;
        };
        let exposed = device.exposed_uuid;
        let shown = device.peers.iter().any(|(node, pd)| {
            let third = pd.uuids.as_ref().filter(|_| *node != peer);
            third.is_some_and(|set| set.current.same_generation(exposed) && set.knows(old))
        });
        if shown && !old.same_generation(exposed) && !device.left_behind.contains(&old) {
            device.left_behind.push(old);
            let most = device.left_behind.len().saturating_sub(LEFT_BEHIND_COUNT);
            device.left_behind.drain(..most);
        }
    }

    /// The peer called itself UpToDate while its disk was at such an ancestor, and has moved on since. No state
    /// packet says so, because nothing changed there.
    pub(crate) fn catches_up_again(&mut self, volume: VolumeNr, peer: NodeId, set: &PeerUuids) {
        let p = self.state.peer_device(volume, peer);
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let said = device.peers.get(&peer).and_then(|pd| pd.last_state);
        if self.state.role == Role::Secondary
            && p.repl == ReplState::Established
            && p.disk == DiskState::Outdated
            && said.is_some_and(|state| state.disk == DiskState::UpToDate)
            && set.current.same_generation(device.exposed_uuid)
        {
            let change = Change::new().peer_disk(volume, peer, DiskState::UpToDate);
            self.hard_change(change);
        }
    }

    /// The same, seen from that disk: a node without one calls it Outdated, and exposes a
    /// generation that nobody here has heard of. There is newer data then.
    pub(crate) fn left_behind_as_exposed(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
    ) {
        let Some(state) = self.state.devices.get(&volume) else {
            return;
        };
        let quiet = |repl: ReplState| repl <= ReplState::Established;
        let concerned = theirs.disk == DiskState::Diskless
            && theirs.pdsk == DiskState::Outdated
            && state.disk == DiskState::UpToDate
            && self.state.role == Role::Secondary
            && state.peers.values().all(|p| quiet(p.repl))
            && self.is_lockstep(peer);
        let exposed = self.peer_uuids(volume, peer).map(|set| set.current);
        let Some(disk) = self.devices.get(&volume).and_then(|d| d.attached()) else {
            return;
        };
        let unknown = |uuid: Uuid| is_real(uuid) && !disk.generations.knows(uuid);
        if concerned && exposed.is_some_and(unknown) {
            self.hard_change(Change::new().disk(volume, DiskState::Outdated));
        }
    }

    /// A Primary without a disk says that this one lacks what its applications have seen: it sends no writes here,
    /// and a disk that followed all the same would count as whole without them.
    pub(crate) fn is_called_weak(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        told: CurrentUuid,
    ) -> bool {
        let device = self.devices.get(&volume);
        let own = device.map_or(Uuid::ZERO, Device::current_uuid);
        let weak = told.weak_nodes.contains(self.node_id)
            && self.is_lockstep(peer)
            && self.state.role == Role::Secondary
            && self.state.disk(volume) == DiskState::UpToDate
            && self.state.peer_device(volume, peer).disk < DiskState::Inconsistent
            && !told.uuid.same_generation(own);
        if weak {
            self.hard_change(Change::new().disk(volume, DiskState::Outdated));
        }
        weak
    }

    /// A kernel's Primary goes by what a node said of its disk when it connected, and may leave it out of a
    /// generation that it makes before it hears that the disk is UpToDate: its slot for the node keeps the
    /// one before, and writes under the new one were not sent. Who followed it all the same would be taken for
    /// current without them. This node meets that Primary again, as the target of a resync.
    pub(crate) fn is_left_out(&mut self, peer: NodeId, volume: VolumeNr, set: &PeerUuids) -> bool {
        let device = self.devices.get(&volume);
        let own = device.map_or(Uuid::ZERO, Device::current_uuid);
        let before = set.bitmap[usize::from(self.node_id.0)];
        let left_out = set.flags.contains(UuidFlags::NEW_DATAGEN)
            && set.node_mask.contains(self.node_id)
            && !self.is_lockstep(peer)
            && self.state.role == Role::Secondary
            && self.state.disk(volume) == DiskState::UpToDate
            && self.state.peer_device(volume, peer).repl == ReplState::Established
            && !set.current.same_generation(own)
            && before.same_generation(own);
        if left_out {
            let text = "the Primary's new generation leaves this node out: connecting again";
            self.log(Level::Info, Some(peer), Some(volume), text.into());
            self.hard_change(Change::new().disk(volume, DiskState::Outdated));
            self.drop_connection(peer, ConnState::NetworkFailure);
        }
        left_out
    }

    /// A peer that asked around when it connected, or one that is Outdated at this generation, is about to
    /// call itself UpToDate, beside this Primary: the state that says so, or says that it waits for somebody
    /// else, is on its way. Until it is here the peer would count as a follower, but get no writes.
    pub(crate) fn awaits_first_state(&self, volume: VolumeNr) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return false;
        };
        device.peers.iter().any(|(peer, pd)| {
            let p = self.state.peer_device(volume, *peer);
            p.repl == ReplState::Established
                && (p.disk == DiskState::Consistent
                    || p.disk == DiskState::Outdated && self.same_current(volume, *peer))
                && pd.last_state.is_some_and(|s| s.repl == ReplState::Off)
                && self.is_lockstep(*peer)
                && !self.is_legacy(*peer)
                && self.is_established(*peer)
        })
    }

    /// A Primary beside this node made a generation while it waited, and has written since; or another node has
    /// copied one from elsewhere. The comparison with it comes.
    pub(crate) fn another_went_on(&self, volume: VolumeNr) -> bool {
        self.state.connections.iter().any(|(peer, c)| {
            let p = self.state.peer_device(volume, *peer);
            (c.peer_role == Role::Primary || !planted!(self, OnlyPrimariesGoOn))
                && p.repl == ReplState::Established
                && p.disk == DiskState::UpToDate
                && self.is_lockstep(*peer)
                && !self.is_legacy(*peer)
                && !self.same_current(volume, *peer)
        })
    }
}

/// The disk is of the generation before `uuid`, which is noted: the set as it was before that. Whether it was of
/// that one.
fn go_back(found: &mut Generations, base: &Generations, uuid: Uuid) -> bool {
    if !found.current.same_generation(uuid) {
        return false;
    }
    found.current = base.current;
    found.history = base.history;
    for (slot, before) in found.slots.iter_mut().zip(&base.slots) {
        slot.bitmap_uuid = before.bitmap_uuid;
        slot.bitmap_dagtag = before.bitmap_dagtag;
    }
    found.note_planned(uuid);
    true
}
