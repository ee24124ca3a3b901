//! What the target of a resync has taken part in (semantics.md, 11.1).
//!
//! A target's copy is not whole, but the node counts for the quorum of the Primary that it is copied
//! from. What that Primary completes meanwhile is on its own disk alone. If it is lost, and the target
//! meets an older node, the two would be a majority again and go on without those writes. So a target
//! remembers the Primary's generation, in the entry of its own node in the superblock, which nothing else
//! uses, and is no target of a node that does not know it, until the Primary's data are back or the
//! operator gives them up (`connect --discard-my-data`). The entry is never sent, but to the Primary: that one
//! waits with what is written under a new generation until everybody who counts beside it has noted it. So does a
//! Primary without a disk: its targets are not copied from it, and may hear of its generation from their source later.
//!
//! With `quorum off` nobody counts, and nothing is remembered.

use alloc::format;

use lockstep_format::units::{NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::packet::Uuids110;
use lockstep_format::wire::{DiskState, Packet, ReplState, Role, UuidFlags};

use crate::command::ErrorCode;
use crate::device::AfterMeta;
use crate::event::Stream;
use crate::generation::Generations;
use crate::options::Quorum;
use crate::resource::Resource;
use crate::state::{ConnectionState, ReplSets, State};
use crate::uuids::{PeerUuids, is_real};
use crate::validity::Refusal;

impl Generations {
    /// The generation of a Primary that this node has counted for, zero if it has been copied since.
    pub(crate) fn vote(&self) -> Uuid {
        self.slot(self.node).bitmap_uuid
    }

    pub(crate) fn set_vote(&mut self, uuid: Uuid) {
        let own = self.node;
        self.slot_mut(own).bitmap_uuid = uuid.without_primary_bit();
    }

    /// A resync from this source begins: its data take the place of those that were counted for.
    pub(crate) fn give_up_vote(&mut self, source: &PeerUuids) {
        if is_real(self.vote()) && !source.knows(self.vote()) {
            self.set_vote(Uuid::ZERO);
        }
    }
}

impl Resource {
    /// After a state change.
    pub(crate) fn note_votes(&mut self, state: &State) {
        for volume in state.devices.keys() {
            if planted!(self, VoteUnnoted) {
                continue;
            }
            self.note_vote(*volume);
        }
    }

    /// Remembers the generation of a Primary that this Inconsistent disk counts for; a disk that is
    /// whole says itself what it has.
    pub(crate) fn note_vote(&mut self, volume: VolumeNr) {
        let disk = self.state.disk(volume);
        let old = self.vote(volume);
        let uuid = match disk {
            DiskState::Inconsistent => match self.primary_generation(volume, old) {
                Some(uuid) => uuid,
                None => return,
            },
            DiskState::Outdated | DiskState::Consistent | DiskState::UpToDate => Uuid::ZERO,
            DiskState::Diskless
            | DiskState::Attaching
            | DiskState::Detaching
            | DiskState::Failed
            | DiskState::Negotiating
            | DiskState::DUnknown => return,
        };
        if old.same_generation(uuid) {
            return;
        }
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.generations.set_vote(uuid);
            // Acks wait for it.
            self.write_superblock(volume);
        }
    }

    /// A set of generations from the peer, and what Lockstep peers say beside it of their votes.
    pub(crate) fn uuids_arrived(&mut self, peer: NodeId, volume: VolumeNr, mut packet: Uuids110) {
        let lockstep = self.is_lockstep(peer);
        let flags = packet.flags;
        if lockstep && flags.contains(UuidFlags::VOTE_NOTED) {
            let own = |(node, _): &(NodeId, Uuid)| *node == peer;
            let noted = packet.bitmap_uuids.iter().position(own);
            let noted = noted.map(|at| packet.bitmap_uuids.remove(at).1);
            if let (Some(noted), Some(pd)) = (noted, self.peer_device_mut(volume, peer)) {
                pd.voted = noted;
            }
        }
        if lockstep && flags.contains(UuidFlags::VOTE_ASKED) {
            // Nothing but a generation: the set came before, if the Primary has one.
            self.vote_for(volume, peer, packet.current);
            return;
        }
        self.uuids_received(peer, volume, &packet);
    }

    /// The Primary waits until this node has noted what its data are called.
    fn vote_for(&mut self, volume: VolumeNr, peer: NodeId, uuid: Uuid) {
        let counts = self.state.disk(volume) == DiskState::Inconsistent
            && self.options.quorum != Quorum::Off;
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        if counts && is_real(uuid) && !disk.generations.knows(uuid) {
            disk.generations.set_vote(uuid);
        }
        self.after_superblock(volume, AfterMeta::Voted(peer, uuid));
    }

    /// The vote is durable.
    pub(crate) fn tell_vote(&mut self, volume: VolumeNr, peer: NodeId, uuid: Uuid) {
        if !self.is_established(peer) {
            return;
        }
        if self.spreads_later(volume) {
            // It is whole by now, and follows the next one: named before that is durable, it would count for it.
            self.after_superblock(volume, AfterMeta::Voted(peer, uuid));
            return;
        }
        let Some(mut set) = self.own_uuids(peer, volume, UuidFlags::VOTE_NOTED) else {
            return;
        };
        set.slots.insert(self.node_id);
        if let Some(slot) = set.bitmap.get_mut(usize::from(self.node_id.0)) {
            *slot = uuid;
        }
        let packet = set.to_packet110();
        self.send(peer, Stream::Data, volume, Packet::Uuids110(packet));
    }

    /// Lockstep peers that count for this Primary's quorum and are not whole.
    pub(crate) fn voters(&self, volume: VolumeNr, state: &State) -> NodeMask {
        if self.options.quorum == Quorum::Off || planted!(self, VotersUnasked) {
            return NodeMask::EMPTY;
        }
        let counts = |peer: &NodeId| {
            let p = state.peer_device(volume, *peer);
            p.disk == DiskState::Inconsistent && p.repl >= ReplState::Established
        };
        let connected = state.connected().iter().filter(counts);
        connected.filter(|peer| self.is_lockstep(*peer)).collect()
    }

    /// What this Primary without a disk writes from now on may count on the target of a disk that has it.
    pub(crate) fn has_targets_to_ask(&self, volume: VolumeNr) -> bool {
        !self.voters(volume, &self.state).is_empty() && !planted!(self, ClientsVotersUnasked)
    }

    /// A new generation is durable here, or, for a Primary without a disk, where that one's data are. What is written
    /// under it may be on that disk alone, so that who counts beside it has to know of it first.
    pub(crate) fn ask_voters(&mut self, volume: VolumeNr) {
        let mut voters = self.voters(volume, &self.state);
        if planted!(self, ClientsVotersUnasked) && self.state.disk(volume) != DiskState::UpToDate {
            voters = NodeMask::EMPTY;
        }
        let plans = self.new_uuid.as_mut().map(|new| &mut new.plans);
        let Some(plan) = plans.and_then(|plans| plans.get_mut(&volume)) else {
            return;
        };
        plan.voters = voters;
        let question = PeerUuids {
            current: plan.uuid,
            flags: UuidFlags::VOTE_ASKED,
            ..PeerUuids::default()
        };
        for peer in voters.iter() {
            // The same may have been asked before, and forgotten there since.
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.voted = Uuid::ZERO;
            }
            let packet = Packet::Uuids110(question.to_packet110());
            self.send(peer, Stream::Data, volume, packet);
        }
        self.watch_followers();
    }

    /// Who is lost, or whole, counts no more or says itself what it has.
    pub(crate) fn settle_voters(&mut self) {
        let Some(mut new) = self.new_uuid.take() else {
            return;
        };
        for (volume, plan) in new.plans.iter_mut().filter(|(_, p)| !p.voters.is_empty()) {
            let counts = self.voters(*volume, &self.state);
            let unnoted = |peer: &NodeId| {
                let pd = self.devices.get(volume).and_then(|d| d.peers.get(peer));
                counts.contains(*peer) && pd.is_some_and(|pd| !pd.voted.same_generation(plan.uuid))
            };
            plan.voters = plan.voters.iter().filter(unnoted).collect();
        }
        self.new_uuid = Some(new);
        self.end_new_uuid();
    }

    fn vote(&self, volume: VolumeNr) -> Uuid {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        disk.map_or(Uuid::ZERO, |disk| disk.generations.vote())
    }

    /// What the data are called that a connected Primary serves, if this node's set does not know it. `asked`: what it
    /// counts for already.
    fn primary_generation(&self, volume: VolumeNr, asked: Uuid) -> Option<Uuid> {
        if self.options.quorum == Quorum::Off || self.state.role == Role::Primary {
            return None;
        }
        let disk = self.devices.get(&volume)?.attached()?;
        let mut without_disk = false;
        let mut source = None;
        for (peer, connection) in &self.state.connections {
            let p = self.state.peer_device(volume, *peer);
            let primary = connection.peer_role == Role::Primary;
            let good = p.disk == DiskState::UpToDate && p.repl > ReplState::Off;
            if primary && good {
                source = Some(*peer);
                break;
            }
            without_disk |= primary && p.disk == DiskState::Diskless;
            if good && p.repl.becomes_target() {
                source = Some(*peer);
            }
        }
        let source = source?;
        let is_primary = |c: &ConnectionState| c.peer_role == Role::Primary;
        if !without_disk && !self.state.connections.get(&source).is_some_and(is_primary) {
            return None;
        }
        let set = self.peer_uuids(volume, source)?;
        let uuid = set.current;
        if without_disk && is_real(asked) && !set.knows(asked) && !planted!(self, VoteFollowsSource)
        {
            // The Primary has named a newer one; that its disk has it is on the way here.
            return None;
        }
        let known = disk.generations.knows(uuid) || uuid == Uuid::JUST_CREATED;
        (is_real(uuid) && !known).then_some(uuid)
    }

    /// This node is being copied from one that is UpToDate, and that has gone on from what the node that wants to be
    /// Primary serves: the two would part. `seen`: whom that node is connected to, and compares with itself.
    pub(crate) fn refuse_older_primary(
        &self,
        asker: NodeId,
        role: Role,
        seen: NodeMask,
    ) -> Result<(), Refusal> {
        if role != Role::Primary || planted!(self, OlderPrimaryElected) {
            return Ok(());
        }
        for (volume, device) in &self.state.devices {
            let newer = device.peers.iter().find(|(source, p)| {
                p.repl.becomes_target()
                    && p.disk == DiskState::UpToDate
                    && **source != asker
                    && !seen.contains(**source)
                    && self.has_gone_on_from(*volume, **source, asker)
            });
            if let Some((source, _)) = newer {
                return Err(Refusal {
                    code: ErrorCode::NO_UP_TO_DATE_DISK,
                    text: format!(
                        "volume {volume} is being resynced from node {source}, whose data are newer than those \
                         of node {asker}; connect these two, or wait for the end of the resync"
                    ),
                });
            }
        }
        Ok(())
    }

    /// One peer's set knows what the other one is at as an older generation, and the other one does not know its own.
    fn has_gone_on_from(&self, volume: VolumeNr, newer: NodeId, older: NodeId) -> bool {
        let sets = (self.peer_uuids(volume, newer)).zip(self.peer_uuids(volume, older));
        sets.is_some_and(|(new, old)| {
            new.knows(old.current) && !new.history_notes(old.current) && !old.knows(new.current)
        })
    }

    /// This disk has counted for a generation that the peer does not know: it is not its target.
    pub(crate) fn refuse_as_voter(&self, volume: VolumeNr, peer: NodeId) -> Option<Refusal> {
        let vote = self.vote(volume);
        let discards = self.connections.get(&peer)?.discard_my_data;
        let theirs = self.peer_uuids(volume, peer)?;
        if !is_real(vote)
            || planted!(self, VoteForgotten)
            || discards
            || self.state.role == Role::Primary
            || self.options.quorum == Quorum::Off
            || self.state.disk(volume) != DiskState::Inconsistent
            || theirs.flags.contains(UuidFlags::INCONSISTENT)
            || theirs.knows(vote)
        {
            return None;
        }
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!(
                "volume {volume} was being resynced from a Primary whose data node {peer} does not have, \
                 and counted for its quorum; waiting for a node that has them; if they are lost, run \
                 here `drbdadm disconnect` and `drbdadm connect --discard-my-data`"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use lockstep_format::units::Uuid;

    use crate::device::PeerDevice;
    use crate::options::PeerDeviceOptions;

    #[test]
    fn an_answer_on_a_former_link_does_not_count() {
        let mut pd = PeerDevice::new(PeerDeviceOptions::default());
        pd.voted = Uuid(0x10);
        pd.link_is_gone();
        assert_eq!(pd.voted, Uuid::ZERO);
    }
}
