//! New generations: when one is made, how it spreads, and what a received UUID set changes
//! (semantics.md, 12.4 to 12.11).
//!
//! A new current UUID is made in this order, so that no crash at any point leaves two nodes with
//! generations that look unrelated:
//!
//! 1. Requests are held; every connected peer answers a ping, or is dropped.
//! 2. It is noted in the history here, as an ancestor of whatever comes if it is given up.
//!    Lockstep peers that follow are told, write it, and confirm with their own UUIDs. Until a
//!    node has heard the new UUID from another one it keeps the old one in that node's slot.
//! 3. It becomes durable here. Kernel peers, who would not confirm, are told now.
//! 4. Requests go on.
//!
//! A peer that is lost between 2 and 3 starts it over with another UUID: no node may hold a UUID
//! whose first writes it missed without the others knowing.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::packet::{CurrentUuid, Uuids110};
use lockstep_format::wire::{ConnState, DiskState, Packet, ReplState, Role, UuidFlags};

use crate::device::AfterMeta;
use crate::event::Stream;
use crate::exposed::{Exposed, ExposedPeer};
use crate::generation::{Generations, LearnContext, Learned, PeerView, Rotation};
use crate::look_again::diskful;
use crate::report::Event;
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::transition::Change;
use crate::uuids::{PeerUuids, is_real};

/// A new current UUID on its way.
#[derive(Debug)]
pub struct NewUuid {
    /// Peers whose ping is not answered yet.
    pings: NodeMask,
    /// The volumes and what they become.
    pub(crate) plans: BTreeMap<VolumeNr, Plan>,
    pub(crate) step: SpreadStep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpreadStep {
    Pings,
    Noting,
    Confirm,
    Writing,
}

#[derive(Debug)]
pub(crate) struct Plan {
    /// The sets before and after; none for a Primary that has no usable disk and labels what it
    /// exposes.
    pub(crate) sets: Option<(Generations, Generations)>,
    pub(crate) uuid: Uuid,
    views: Vec<PeerView>,
    pub(crate) confirm: NodeMask,
    noted: bool,
    pub(crate) written: bool,
    /// Peers that have to note it before requests go on (`vote.rs`).
    pub(crate) voters: NodeMask,
}

impl Resource {
    /// A request waits for the new generation, or a completed one must not be answered without.
    pub(crate) fn want_new_uuid_now(&mut self) {
        self.new_uuid_wanted = true;
    }

    /// A new generation is due, and there are data that it can name.
    pub(crate) fn is_new_uuid_due(&self) -> bool {
        self.devices
            .iter()
            .any(|(volume, d)| d.new_uuid_pending && self.can_label(*volume))
    }

    /// Without quorum or data there is nothing to label. What is due stays due: whoever missed
    /// something must be told from the others when they return.
    pub(crate) fn can_label(&self, volume: VolumeNr) -> bool {
        self.state
            .devices
            .get(&volume)
            .is_some_and(|s| s.have_quorum && s.data_accessible())
    }

    /// Drives the new generation on; called after every input.
    pub(crate) fn settle_new_uuid(&mut self) {
        if self.state.susp_uuid && self.new_uuid.is_none() && !self.is_new_uuid_due() {
            self.hard_change(Change::new().susp_uuid(false));
        }
        if self.new_uuid.is_none() {
            if !self.is_new_uuid_due() {
                self.new_uuid_wanted = false;
                return;
            }
            let blocked = self.in_handshake()
                || self.connections.values().any(|c| c.draining)
                || self.devices.keys().any(|v| self.awaits_first_state(*v))
                || (self.state.suspended()
                    && !self.state.susp_uuid
                    && !self.old_peer_may_attach()
                    && !self.demotion_wants_uuid());
            let wanted = self.is_new_uuid_wanted();
            if !(wanted || self.state.susp_uuid) || blocked {
                return;
            }
            self.begin_new_uuid();
        }
        let Some(new) = self.new_uuid.as_ref() else {
            return;
        };
        match new.step {
            SpreadStep::Pings => self.settle_pings(),
            SpreadStep::Noting => self.settle_noted(),
            SpreadStep::Confirm => self.settle_confirm(),
            SpreadStep::Writing => self.settle_writing(),
        }
    }

    /// The new generation is on its way to the disk: who is lost now is in it, but will miss what
    /// is written under it, so that another one becomes due.
    pub(crate) fn is_writing_new_uuid(&self) -> bool {
        self.new_uuid
            .as_ref()
            .is_some_and(|new| new.step == SpreadStep::Writing)
    }

    /// A disk that failed meanwhile writes nothing any more.
    fn settle_writing(&mut self) {
        let gone: Vec<VolumeNr> = self
            .new_uuid
            .iter()
            .flat_map(|new| &new.plans)
            .filter(|(_, plan)| !plan.written)
            .map(|(volume, _)| *volume)
            .filter(|volume| {
                self.devices
                    .get(volume)
                    .is_none_or(|d| d.attached().is_none())
            })
            .collect();
        for volume in gone {
            self.new_uuid_done(volume);
        }
        self.settle_voters();
    }

    /// A peer of 8.4 is connected without its disk, which it may attach again at any time, and it compares
    /// generations alone. So it has to find the due one also while an operator holds requests back: none of
    /// these can reach that disk any more.
    fn old_peer_may_attach(&self) -> bool {
        let lost = |peer: NodeId| {
            let mut devices = self.state.devices.values();
            devices.any(|d| {
                d.peers
                    .get(&peer)
                    .is_some_and(|p| p.disk <= DiskState::Failed)
            })
        };
        self.only_operator_suspends() && self.legacy_peer().is_some_and(lost)
    }

    /// Requests may be held back by an operator, but by nothing that the data or their names depend on.
    pub(crate) fn only_operator_suspends(&self) -> bool {
        !self.state.susp_nod
            && !self.state.susp_quorum
            && !self.state.connections.values().any(|c| c.susp_fen)
    }

    fn begin_new_uuid(&mut self) {
        // An 8.4 peer whose disk is gone may attach it again at once; it has to find the generation
        // then, and nobody else is connected.
        let peers = match self.legacy_peer() {
            Some(_) => NodeMask::EMPTY,
            // Who is left behind does not follow, alive or not, and its line is slow.
            None => self.established_peers().difference(self.left_behind()),
        };
        for peer in peers.iter() {
            self.ping(peer);
        }
        self.new_uuid = Some(NewUuid {
            pings: peers,
            plans: BTreeMap::new(),
            step: SpreadStep::Pings,
        });
    }

    fn settle_pings(&mut self) {
        if self.legacy_negotiates() {
            return;
        }
        let outstanding: NodeMask = self
            .connections
            .values()
            .filter(|c| c.link.as_ref().is_some_and(|l| l.ping_outstanding))
            .map(|c| c.peer)
            .collect();
        let Some(new) = self.new_uuid.as_mut() else {
            return;
        };
        new.pings = new.pings.intersection(outstanding);
        let draining = self.connections.values().any(|c| c.draining);
        if !new.pings.is_empty() || draining || self.demotion_is_voted() {
            return;
        }
        if self.state.connections.values().any(|c| c.susp_fen) {
            // The lost peer may be Primary and shoot this node: it is for the survivor to do.
            self.new_uuid = None;
            return;
        }
        self.plan_new_uuid();
    }

    /// Chooses the UUIDs and tells the followers.
    fn plan_new_uuid(&mut self) {
        let volumes: Vec<VolumeNr> = self
            .devices
            .iter()
            .filter(|(v, d)| d.new_uuid_pending && self.can_label(**v))
            .map(|(v, _)| *v)
            .collect();
        let mut plans = BTreeMap::new();
        let mut behind = Vec::new();
        let role = self.state.role;
        for volume in volumes {
            let up_to_date = self.state.disk(volume) == DiskState::UpToDate;
            let late = self.late_is_behind(volume);
            behind.extend(late.map(|peer| (peer, volume)));
            if role != Role::Primary || self.legacy_follows(volume) || late.is_some() {
                if let Some(device) = self.devices.get_mut(&volume) {
                    device.new_uuid_pending = false;
                }
                continue;
            }
            if !up_to_date {
                match self.plan_exposed(volume) {
                    Some(plan) => {
                        plans.insert(volume, plan);
                    }
                    None => {
                        if let Some(device) = self.devices.get_mut(&volume) {
                            device.new_uuid_pending = false;
                        }
                    }
                }
                continue;
            }
            let views = self.peer_views(volume);
            let dagtag = self.io.dagtag;
            let unheard = self.ended_unheard(volume);
            let mut rng = self.rng.clone();
            let weak = self.targets_to_be(volume);
            let Some(disk) = self.devices.get(&volume).and_then(|d| d.attached()) else {
                continue;
            };
            let base = disk.generations.clone();
            let mut next = base.clone();
            for peer in unheard.iter() {
                next.retire_slot(peer);
            }
            let rotation = Rotation {
                peers: &views,
                weak,
                dagtag,
            };
            let made = next.new_current(&rotation, role, &mut rng);
            if planted!(self, AncestorsForgotten) {
                next.history = Default::default();
            }
            let device = self.devices.get(&volume);
            let may_be_planned = self.connections.values().any(|c| {
                // A kernel that is connected plans nothing that it gives up.
                !self.is_established(c.peer) || c.is_lockstep()
            });
            // Who took a plan that was given up goes by it, and must not look newer than what is written from
            // now on, although everybody follows.
            let given_up = self.announced_last(volume);
            let forced = (given_up || device.is_some_and(|d| d.new_uuid_forced)) && may_be_planned;
            if made.is_none() && forced {
                next.fork(role, &mut rng);
            }
            self.rng = rng;
            if next == base {
                if let Some(device) = self.devices.get_mut(&volume) {
                    device.new_uuid_pending = false;
                }
                continue;
            }
            self.event(Event::NewGeneration {
                volume,
                from: base.current,
                to: next.current,
            });
            let confirm = self.followers(&views);
            let mut base = base;
            let mut noted = true;
            if confirm.count() > 0 && !planted!(self, PlannedUuidNotNoted) {
                // Given up after it was told, also by a crash, it must count as an ancestor of
                // the next one, not as another branch.
                noted = false;
                base.note_planned(next.current);
                if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
                    disk.generations = base.clone();
                }
                self.after_superblock(volume, AfterMeta::PlannedUuid);
            }
            plans.insert(
                volume,
                Plan {
                    uuid: next.current,
                    sets: Some((base, next)),
                    views,
                    confirm,
                    noted,
                    written: false,
                    voters: NodeMask::EMPTY,
                },
            );
        }
        if plans.is_empty() {
            self.new_uuid = None;
            self.new_uuid_wanted = false;
            for (peer, volume) in behind {
                self.send_uuids(peer, volume, UuidFlags::RESYNC);
                self.compare_now(peer, volume);
            }
            self.admission_changed();
            return;
        }
        self.new_uuid = Some(NewUuid {
            pings: NodeMask::EMPTY,
            plans,
            step: SpreadStep::Noting,
        });
        self.settle_noted();
    }

    /// The plans are noted on disk: the followers hear of them.
    fn settle_noted(&mut self) {
        let noted = self.new_uuid.as_ref().is_some_and(|new| {
            new.step == SpreadStep::Noting
                && new.plans.iter().all(|(volume, plan)| {
                    plan.noted
                        || self
                            .devices
                            .get(volume)
                            .is_none_or(|d| d.attached().is_none())
                })
        });
        let Some(mut new) = self.new_uuid.take_if(|_| noted) else {
            return;
        };
        if (self.is_shared() || self.named_disk_goes(&new)) && self.is_plan_void(&new) {
            // The other Primary's came meanwhile: told now, this one would look like the newer of both.
            self.plan_anew();
            return;
        }
        new.step = SpreadStep::Confirm;
        if self.state.role == Role::Primary {
            for (volume, plan) in &new.plans {
                match &plan.sets {
                    Some((_, next)) => {
                        for peer in plan.confirm.iter() {
                            self.send_planned(*volume, peer, next);
                        }
                    }
                    None => self.send_exposed(*volume, plan.uuid),
                }
            }
        }
        self.new_uuid = Some(new);
        self.watch_followers();
        self.settle_confirm();
    }

    pub(crate) fn planned_uuid_durable(&mut self, volume: VolumeNr) {
        if let Some(plan) = self
            .new_uuid
            .as_mut()
            .and_then(|new| new.plans.get_mut(&volume))
        {
            plan.noted = true;
        }
        self.settle_noted();
    }

    /// Lockstep peers that are about to be resynced from here. While bitmaps are exchanged their disks may look as if
    /// they followed, but they take no generation before that is over, and the connection may break first.
    fn targets_to_be(&self, volume: VolumeNr) -> NodeMask {
        let state = self.state.devices.get(&volume);
        let Some(state) = state.filter(|_| !planted!(self, TargetsToBeFollow)) else {
            return NodeMask::EMPTY;
        };
        let source = |repl| matches!(repl, ReplState::StartingSyncS | ReplState::WfBitmapS);
        let targets = state.peers.iter().filter(|(_, p)| source(p.repl));
        let targets = targets.map(|(node, _)| *node);
        targets.filter(|node| self.is_lockstep(*node)).collect()
    }

    /// Lockstep peers that follow and will confirm.
    fn followers(&self, views: &[PeerView]) -> NodeMask {
        views
            .iter()
            .filter(|v| {
                v.connected
                    && matches!(
                        v.disk,
                        DiskState::Consistent | DiskState::UpToDate | DiskState::Negotiating
                    )
                    && self
                        .connections
                        .get(&v.node)
                        .is_some_and(|c| c.is_lockstep())
                    && self.is_established(v.node)
            })
            .map(|v| v.node)
            .collect()
    }

    /// A Primary without a usable disk labels the data that it exposes (semantics.md, 12.6).
    fn plan_exposed(&mut self, volume: VolumeNr) -> Option<Plan> {
        let views = self.peer_views(volume);
        let device = self.devices.get(&volume)?;
        let peers: Vec<ExposedPeer<'_>> = views
            .iter()
            .map(|v| ExposedPeer {
                node: v.node,
                connected: v.connected,
                disk: v.disk,
                uuids: self.peer_uuids(volume, v.node),
            })
            .collect();
        let exposed = Exposed {
            node: self.node_id,
            uuid: device.exposed_uuid,
            intentionally_diskless: device.intentional_diskless,
            waits_for_confirmation: false,
            without_bitmap: views
                .iter()
                .filter(|v| !v.has_bitmap)
                .map(|v| v.node)
                .collect(),
        };
        // A disk that was merely detached comes back: it must not look like a follower.
        let keeps = device.intentional_diskless && !exposed.needs_new_generation(&peers);
        let asks = keeps && device.new_uuid_forced && self.has_targets_to_ask(volume);
        let asks = asks && is_real(exposed.uuid);
        if keeps && !asks || planted!(self, DisklessKeepsGeneration) {
            return None;
        }
        // Who counts for the present one has to have noted it, too.
        let uuid = match asks {
            true => exposed.uuid,
            false => Uuid(self.rng.uuid().0 | Uuid::PRIMARY_BIT),
        };
        // One that is Consistent takes no generation of a Primary without a disk (12.6).
        let whole = |peer: &NodeId| {
            !asks && self.state.peer_device(volume, *peer).disk == DiskState::UpToDate
        };
        let confirm = self.followers(&views).iter().filter(whole).collect();
        Some(Plan {
            sets: None,
            uuid,
            views,
            confirm,
            noted: true,
            written: false,
            voters: NodeMask::EMPTY,
        })
    }

    /// Tells everybody what the data are called that this node exposes from now on. A name that was given up
    /// before, because nobody answered, may have been taken all the same: whoever hears of the new one has to know
    /// it as an ancestor, or the node that took it would look like one of another branch.
    fn send_exposed(&mut self, volume: VolumeNr, uuid: Uuid) {
        let mut given_up = Vec::new();
        if let Some(device) = self.devices.get_mut(&volume) {
            if device.exposed_uuid.same_generation(uuid) {
                return;
            }
            given_up.clone_from(&device.announced);
            device.remember_announced([uuid]);
        }
        let weak_nodes = self.weak_nodes(volume).union(self.unreplicated(volume));
        for peer in self.established_peers().iter() {
            let takes = self.state.peer_device(volume, peer).disk == DiskState::UpToDate;
            let known = self.peer_uuids(volume, peer).filter(|_| takes);
            let unknown = |old: &&Uuid| known.is_some_and(|set| !set.knows(**old));
            let names: Vec<Uuid> = given_up.iter().filter(unknown).copied().collect();
            for uuid in names.into_iter().chain([uuid]) {
                let packet = CurrentUuid { uuid, weak_nodes };
                self.send(peer, Stream::Data, volume, Packet::CurrentUuid(packet));
            }
        }
    }

    /// Lockstep peers that are being copied and are not sent what is written. One of them may be whole by now: if it followed,
    /// it would count as whole without that.
    fn unreplicated(&self, volume: VolumeNr) -> NodeMask {
        if planted!(self, UnreplicatedFollows) {
            return NodeMask::EMPTY;
        }
        let copied = |peer: &NodeId| {
            let p = self.state.peer_device(volume, *peer);
            p.disk == DiskState::Inconsistent && !p.replicates() && self.is_lockstep(*peer)
        };
        self.established_peers().iter().filter(copied).collect()
    }

    /// Tells a follower the generation that is coming.
    fn send_planned(&mut self, volume: VolumeNr, peer: NodeId, next: &Generations) {
        // While the plan was noted the peer may have gone, and may be back in a handshake.
        if !self.is_established(peer) {
            return;
        }
        let weak = self.weak_nodes(volume);
        let Some(mut set) = self.own_uuids(peer, volume, UuidFlags::NEW_DATAGEN) else {
            return;
        };
        // A follower that was brought up to date at an older one has to know it as an ancestor. And the other Primary
        // may plan one as well: which of both came first, a third node tells by that.
        if planted!(self, FirstOfTwoUntold) {
            set.current = next.current;
        } else {
            set.precede(next.current);
        }
        set.node_mask = weak;
        self.send(
            peer,
            Stream::Data,
            volume,
            Packet::Uuids110(set.to_packet110()),
        );
    }

    /// Something changed since it was planned, or this is no Primary any more.
    fn is_plan_void(&self, new: &NewUuid) -> bool {
        let changed = new.plans.iter().any(|(volume, plan)| {
            let disk = self.devices.get(volume).and_then(|d| d.attached());
            let moved = match &plan.sets {
                Some((base, _)) => disk.is_none_or(|d| d.generations != *base),
                // A disk that came meanwhile noted it as given up: confirmed, it would be taken for
                // an ancestor of what that disk has.
                None => {
                    self.state.disk(*volume) == DiskState::UpToDate
                        || disk.is_some_and(|d| d.generations.history_has(plan.uuid))
                }
            };
            moved || self.peer_views(*volume) != plan.views
        });
        changed || self.state.role != Role::Primary || self.named_disk_goes(new)
    }

    /// Whatever changed meanwhile starts it over with a UUID that nobody has.
    fn plan_anew(&mut self) {
        self.new_uuid = None;
        if self.state.role == Role::Primary {
            self.new_uuid_wanted = true;
            self.begin_new_uuid();
        }
    }

    fn settle_confirm(&mut self) {
        let Some(new) = self.new_uuid.as_ref() else {
            return;
        };
        if self.is_plan_void(new) {
            self.plan_anew();
            return;
        }
        // A peer that has it may have taken the next one already, from the other Primary.
        let shared = self.is_shared();
        let takes = |set: &PeerUuids, uuid: Uuid| {
            let went_on = shared && set.knows(uuid) && !set.history_notes(uuid);
            set.current.same_generation(uuid) || went_on
        };
        let waiting = new.plans.iter().any(|(volume, plan)| {
            plan.confirm.iter().any(|peer| {
                let set = self.peer_uuids(*volume, peer);
                !set.is_some_and(|set| takes(set, plan.uuid))
            })
        });
        if waiting || self.awaits_far_nodes() {
            return;
        }
        let Some(new) = self.new_uuid.as_mut() else {
            return;
        };
        new.step = SpreadStep::Writing;
        let volumes: Vec<VolumeNr> = new.plans.keys().copied().collect();
        for volume in volumes {
            let Some(plan) = self.new_uuid.as_ref().and_then(|n| n.plans.get(&volume)) else {
                continue;
            };
            let uuid = plan.uuid;
            let alone = plan.confirm.is_empty();
            let next = plan.sets.as_ref().map(|(_, next)| next.clone());
            let Some(next) = next else {
                // Nothing to write here: the followers have it, and they have the data.
                if let Some(device) = self.devices.get_mut(&volume) {
                    device.exposed_uuid = uuid;
                    device.new_uuid_pending = false;
                    device.new_uuid_forced = false;
                    device.announced.retain(|u| *u != uuid);
                }
                self.clients_follow(volume, uuid);
                self.ask_voters(volume);
                self.new_uuid_done(volume);
                continue;
            };
            if let Some(device) = self.devices.get_mut(&volume) {
                // From here on a loss makes another one due.
                device.new_uuid_pending = false;
                device.new_uuid_forced = false;
            }
            if let Some(device) = self.devices.get_mut(&volume)
                && let Some(disk) = device.attached_mut()
            {
                let base = core::mem::replace(&mut disk.generations, next);
                // Nobody else has it: should it reach the disk after that was given up, it is none.
                device.unmade = alone.then_some((base, uuid));
            }
            if planted!(self, UuidBeforeDurable) {
                self.new_uuid_durable(volume);
                continue;
            }
            self.after_superblock(volume, AfterMeta::NewUuid);
        }
        self.close_epoch();
    }

    /// The new current UUID is durable on a volume.
    pub(crate) fn new_uuid_durable(&mut self, volume: VolumeNr) {
        if let Some(uuid) = self.devices.get(&volume).map(|d| d.current_uuid()) {
            self.generation_made(volume, uuid);
        }
        for peer in self.established_peers().iter() {
            if self.state.peer_device(volume, peer).repl < ReplState::Established {
                continue;
            }
            let confirmed = self.connections.get(&peer).is_some_and(|c| c.is_lockstep());
            let flags = if confirmed {
                UuidFlags::empty()
            } else {
                UuidFlags::NEW_DATAGEN
            };
            self.send_uuids(peer, volume, flags);
        }
        self.ask_voters(volume);
        self.new_uuid_done(volume);
    }

    /// The disk has its new generation, and maybe the next one by now, and will be written under it, unless it is
    /// being given up (`give_up_unmade`). Whether it is not.
    pub(crate) fn generation_made(&mut self, volume: VolumeNr, uuid: Uuid) -> bool {
        let stays = self.state.disk(volume) > DiskState::Failed;
        if let Some(device) = self.devices.get_mut(&volume) {
            let disk = device.attached().map(|disk| &disk.generations);
            let followed = |of: Uuid| disk.is_some_and(|disk| disk.history_has(of));
            let followed = device.unmade.as_ref().is_some_and(|(_, of)| followed(*of));
            let unmade = device
                .unmade
                .take_if(|(_, of)| of.same_generation(uuid) || followed);
            match unmade.filter(|_| !stays) {
                None => device.exposed_uuid = uuid,
                kept => device.unmade = kept,
            }
        }
        stays
    }

    fn new_uuid_done(&mut self, volume: VolumeNr) {
        let plans = self.new_uuid.as_mut().map(|new| &mut new.plans);
        if let Some(plan) = plans.and_then(|plans| plans.get_mut(&volume)) {
            plan.written = true;
        }
        self.end_new_uuid();
    }

    pub(crate) fn end_new_uuid(&mut self) {
        let over = |plan: &Plan| plan.written && plan.voters.is_empty();
        let over = |new: &mut NewUuid| new.plans.values().all(over);
        if let Some(new) = self.new_uuid.take_if(over) {
            self.new_uuid_wanted = false;
            for volume in new.plans.into_keys() {
                self.renew_for_late(volume);
            }
            self.compare_with_old_targets();
            self.admission_changed();
        }
    }

    pub(crate) fn pings_progress(&mut self) {
        self.settle_new_uuid();
        self.twopc_progress();
    }

    /// A forced promotion made old data of these volumes current: a new generation that no peer
    /// follows.
    pub(crate) fn forced_generation(&mut self, volumes: &[VolumeNr]) {
        for volume in volumes.iter().copied() {
            let views = self.peer_views(volume);
            let weak: NodeMask = views
                .iter()
                .filter(|v| v.disk == DiskState::Inconsistent)
                .map(|v| v.node)
                .collect();
            let weak = weak.union(self.targets_to_be(volume));
            let dagtag = self.io.dagtag;
            let role = self.state.role;
            let unheard = self.ended_unheard(volume);
            let mut rng = self.rng.clone();
            let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
                continue;
            };
            for peer in unheard.iter() {
                disk.generations.retire_slot(peer);
            }
            let rotation = Rotation {
                peers: &views,
                weak,
                dagtag,
            };
            if disk
                .generations
                .new_current(&rotation, role, &mut rng)
                .is_none()
            {
                // Nobody is tracked: the data still become a generation of their own.
                disk.generations.current = rng.uuid();
                disk.generations.set_primary_bit(role);
            }
            self.rng = rng;
            if let Some(device) = self.devices.get_mut(&volume) {
                device.new_uuid_pending = false;
                device.exposed_uuid = device.current_uuid();
            }
            self.after_superblock(volume, AfterMeta::ForcedUuid);
        }
    }

    /// The forced generation is durable: the peers compare.
    pub(crate) fn forced_uuid_durable(&mut self, volume: VolumeNr) {
        for peer in self.established_peers().iter() {
            let disk = self.state.peer_device(volume, peer).disk;
            if self.is_legacy(peer) && disk != DiskState::Inconsistent && diskful(disk) {
                // With 8.4 such a disk is compared in a handshake only.
                self.drop_connection(peer, ConnState::NetworkFailure);
                continue;
            }
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.consider_resync = true;
            }
            // A kernel peer compares when it reads the state.
            let flags = match self.connections.get(&peer) {
                Some(c) if c.is_lockstep() => UuidFlags::RESYNC,
                _ => UuidFlags::empty(),
            };
            self.send_uuids(peer, volume, flags);
            let state = self.state.clone();
            self.send_state(peer, volume, &state);
            self.compare_now(peer, volume);
        }
        self.admission_changed();
    }

    pub(crate) fn set_primary_bit(&mut self, primary: bool) {
        let role = if primary {
            Role::Primary
        } else {
            Role::Secondary
        };
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
                disk.generations.set_primary_bit(role);
                self.write_superblock(volume);
            }
        }
    }

    // Received UUIDs.

    pub(crate) fn uuids_received(&mut self, peer: NodeId, volume: VolumeNr, packet: &Uuids110) {
        if !self.devices.contains_key(&volume) {
            return;
        }
        let set = PeerUuids::from_packet110(packet);
        let flags = set.flags;
        if flags.contains(UuidFlags::NEW_DATAGEN)
            && self.is_lockstep(peer)
            && self.state.disk(volume) != DiskState::UpToDate
            && self.state.disk(volume) >= DiskState::Inconsistent
        {
            // It is only planned, and who is not whole does not follow: the end of a resync must
            // not adopt what may be given up. What is made of it is told to everybody.
            return;
        }
        if flags.contains(UuidFlags::NEW_DATAGEN) && self.precedes(peer, volume, &set) {
            // Both Primaries plan one at the same time: the peer drops its own for this node's.
            self.note_dropped(volume, set.current);
            return;
        }
        if flags.contains(UuidFlags::NEW_DATAGEN) && self.will_be_dropped(peer, volume, &set) {
            return;
        }
        if self.is_left_out(peer, volume, &set) {
            return;
        }
        self.notice_caught_up(peer, volume, &set);
        self.note_taken_elsewhere(peer, volume, &set);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.current_uuid = set.current;
            pd.uuids = Some(set.clone());
        }
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.generations.note_existing_nodes(&set);
        }
        if self.state.conn(peer) != ConnState::Connected || self.is_off(peer, volume) {
            return;
        }
        let own = self.state.disk(volume);
        if own < DiskState::Inconsistent {
            self.catches_up_again(volume, peer, &set);
            self.expose_from(peer, volume, &set);
            self.expose_announced(volume, peer, &set);
            self.others_catch_up(volume);
            if !planted!(self, AncestorsReadAfterDemotion) {
                self.outdate_ancestors(volume);
            }
            self.vouch_for(peer, volume, set.current);
            return;
        }
        // The source of a resync may have a Primary now that this node does not reach.
        let state = self.state.clone();
        self.note_unstable_targets(volume, &state);
        let created = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.current_uuid() == Uuid::JUST_CREATED);
        let established = self.state.peer_device(volume, peer).repl == ReplState::Established;
        if flags.contains(UuidFlags::SKIP_INITIAL_SYNC) && created && established {
            self.skip_initial_sync(peer, volume, set.current);
            return;
        }
        if flags.contains(UuidFlags::NEW_DATAGEN) {
            self.new_datagen(peer, volume, &set, Some(set.node_mask));
        } else if self.ended_before(peer, volume, &set) {
            self.new_datagen(peer, volume, &set, None);
        } else if !self.legacy_is_source_of(volume, peer) {
            self.learn(peer, volume, &set);
        }
        self.retire_provisional(peer, volume, &set);
        if flags.contains(UuidFlags::GOT_STABLE) || flags.contains(UuidFlags::RESYNC) {
            self.stable_news(peer, volume, flags);
        }
        self.follow_neighbour(peer, volume);
        self.watch_generation(volume, peer);
        self.note_vote(volume);
    }

    /// The other end is stable now, or wants a comparison (semantics.md, 14.2).
    fn stable_news(&mut self, peer: NodeId, volume: VolumeNr, flags: UuidFlags) {
        let mine = self.state.peer_device(volume, peer);
        let lockstep = self.connections.get(&peer).is_some_and(|c| c.is_lockstep());
        if lockstep
            && mine.repl == ReplState::Established
            && mine.disk == DiskState::Inconsistent
            && !flags.contains(UuidFlags::INCONSISTENT)
        {
            // Its disk state is on the way behind the UUIDs; the comparison waits for it.
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.consider_resync = true;
            }
            return;
        }
        if flags.contains(UuidFlags::GOT_STABLE)
            && mine.repl == ReplState::Established
            && self.state.stable()
        {
            if self.is_asking(volume, peer) || self.awaits_follower(volume, peer) {
                // What is still marked when the answers are there is compared.
                self.watch_marks(volume, peer);
                return;
            }
            self.send_uuids(peer, volume, UuidFlags::RESYNC);
            self.compare_now(peer, volume);
        } else if flags.contains(UuidFlags::RESYNC) {
            if self.awaits_follower(volume, peer) {
                self.watch_marks(volume, peer);
                return;
            }
            self.compare_now(peer, volume);
        }
    }

    /// The peer may have taken the generation that is on its way here, and these news may be older than that. Compared
    /// now, this Primary would look behind a follower of its own.
    fn awaits_follower(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let plan = self.new_uuid.as_ref().and_then(|n| n.plans.get(&volume));
        plan.is_some_and(|plan| plan.confirm.contains(peer))
    }

    /// Equal and nothing marked: an Outdated or Consistent disk takes the neighbour's state.
    fn follow_neighbour(&mut self, peer: NodeId, volume: VolumeNr) {
        let mine = self.state.peer_device(volume, peer);
        let own = self.state.disk(volume);
        let stable = self
            .peer_uuids(volume, peer)
            .is_some_and(|u| self.is_stable_set(u));
        if mine.repl == ReplState::Established
            && own == DiskState::Outdated
            && mine.disk >= DiskState::Consistent
            && stable
            && self.peer_got_stable(volume, peer)
            && self.same_current(volume, peer)
            && !self.is_weak(&self.state)
            && !self.diskless_primary_of_other_generation(volume)
        {
            self.hard_change(Change::new().disk(volume, mine.disk));
        }
    }

    /// A Primary made a new generation (semantics.md, 12.6, receiver).
    fn new_datagen(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        set: &PeerUuids,
        weak: Option<NodeMask>,
    ) {
        let Some(state) = self.state.devices.get(&volume) else {
            return;
        };
        let behind = state.peers.values().any(|p| {
            p.repl.is_sync_target() || matches!(p.repl, ReplState::Behind | ReplState::WfBitmapT)
        });
        if behind || state.disk != DiskState::UpToDate {
            return;
        }
        let views = self.peer_views(volume);
        let conn = self.connections.get(&peer);
        let dagtag = conn.map_or(Dagtag(0), |c| c.last_dagtag);
        let lockstep = conn.is_some_and(|c| c.is_lockstep());
        let (planned, mut weak) = (weak.is_some(), weak.unwrap_or(NodeMask::EMPTY));
        let mut provisional = NodeMask::EMPTY;
        if lockstep {
            // Nobody counts as following before it said so.
            let diskless = self.state.peer_device(volume, peer).disk < DiskState::Inconsistent;
            if diskless {
                // Its own disk, wherever it is, does not follow.
                weak.insert(peer);
            }
            for view in &views {
                if diskless && view.node == peer {
                    continue;
                }
                let follows = self
                    .peer_uuids(volume, view.node)
                    .is_some_and(|u| u.current.same_generation(set.current));
                if view.node == peer && planned || !follows {
                    provisional.insert(view.node);
                }
            }
        } else if self.state.peer_device(volume, peer).disk == DiskState::Diskless {
            weak.insert(peer);
        }
        let role = self.state.role;
        let own = state.disk;
        let untold = planted!(self, FirstOfTwoUntold);
        let forgets = planted!(self, FollowerNotesNobody);
        let unadopted = planted!(self, NotesNotAdopted);
        let (since, nodes) = self.note_of_next(volume);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let old = disk.generations.current;
        // It may have been on its way for long: a resync from somebody else has brought this disk
        // further meanwhile.
        let is_past =
            |entry: &Uuid| entry.0 & Uuid::PRIMARY_BIT == 0 && entry.same_generation(set.current);
        if old.same_generation(set.current) || disk.generations.history.iter().any(is_past) {
            return;
        }
        let rotation = Rotation {
            peers: &views,
            weak: weak.union(provisional),
            dagtag,
        };
        let before = disk.generations.slots;
        disk.generations
            .receive_new_datagen(set.current, &rotation, own, role);
        if forgets {
            disk.generations.slots = before;
        }
        if lockstep {
            disk.generations.note_unwritten(since, nodes, role);
        }
        if lockstep && !untold {
            disk.generations.push_history(set.history[0]);
            // A third node may have followed one that was given up.
            if !unadopted {
                disk.generations.adopt_notes(set);
            }
        }
        let after = disk.generations.slots;
        for node in provisional.iter() {
            let at = usize::from(node.0);
            let slot = after[at].bitmap_uuid;
            let made_now =
                before[at].bitmap_uuid.is_zero() && slot.same_generation(old) && !slot.is_zero();
            if made_now && let Some(pd) = self.peer_device_mut(volume, node) {
                pd.provisional = Some(slot);
            }
        }
        if let Some(device) = self.devices.get_mut(&volume) {
            device.exposed_uuid = device.current_uuid();
        }
        if self.state.peer_device(volume, peer).disk <= DiskState::Inconsistent {
            self.keep_last_copy(volume);
        }
        self.after_superblock(volume, AfterMeta::SpreadUuids);
    }

    /// A node that reports the new generation follows: its slot names nothing any more.
    fn retire_provisional(&mut self, peer: NodeId, volume: VolumeNr, set: &PeerUuids) {
        let keeps = planted!(self, ProvisionalKept);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let own = device.current_uuid();
        let pd = device.peers.get_mut(&peer);
        let Some((pd, provisional)) = pd.and_then(|pd| pd.provisional.map(|uuid| (pd, uuid)))
        else {
            return;
        };
        let announced = set.flags.contains(UuidFlags::NEW_DATAGEN);
        if announced || keeps || !set.current.same_generation(own) {
            return;
        }
        pd.provisional = None;
        let Some(disk) = device.attached_mut() else {
            return;
        };
        if disk
            .generations
            .slot(peer)
            .bitmap_uuid
            .same_generation(provisional)
        {
            disk.generations.retire_slot(peer);
            self.write_superblock(volume);
            self.send_uuids(peer, volume, UuidFlags::empty());
            self.tell_diskless(peer, volume);
        }
    }

    /// The new generation is durable on this follower: everybody hears it from here.
    pub(crate) fn spread_uuids(&mut self, volume: VolumeNr) {
        for peer in self.established_peers().iter() {
            if self.state.peer_device(volume, peer).repl >= ReplState::Established {
                let flags = self.take_spread_flags(volume, peer);
                self.send_uuids(peer, volume, flags);
            }
        }
        self.acks_ungated(volume);
    }

    /// What the set says about third nodes (semantics.md, 12.11). Bits are never cleared on
    /// hearsay: a mark too many costs a block of resync, one too few costs data.
    fn learn(&mut self, peer: NodeId, volume: VolumeNr, set: &PeerUuids) {
        let Some(state) = self.state.devices.get(&volume) else {
            return;
        };
        let peers = self.devices.get(&volume).into_iter().flat_map(|d| &d.peers);
        let provisional = peers.filter(|(_, pd)| pd.provisional.is_some());
        let context = LearnContext {
            provisional: provisional.map(|(n, _)| *n).collect(),
            sender: peer,
            busy: state
                .peers
                .iter()
                .filter(|(_, p)| {
                    p.repl > ReplState::Established && !planted!(self, LearnsWhileBusy)
                })
                .map(|(n, _)| *n)
                .collect(),
            connected: self.state.connected(),
            any_sync_target: (state.peers.values().any(|p| p.repl.becomes_target())
                || set.flags.contains(UuidFlags::SYNC_TARGET))
                && !planted!(self, LearnsFromTargets),
        };
        let lockstep = self.is_lockstep(peer);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let equal = is_real(set.current) && set.current.same_generation(disk.generations.current);
        let follows = equal && lockstep && !set.flags.contains(UuidFlags::SYNC_TARGET);
        let follows = follows && !planted!(self, NotesNotAdopted);
        let adopted = follows && disk.generations.adopt_notes(set);
        let learned = disk.generations.learn(set, &context);
        if learned.is_empty() {
            if adopted {
                self.write_superblock(volume);
            }
            return;
        }
        let mut copied = false;
        for item in &learned {
            if let Learned::Copy { from, to, .. } = item {
                copied = true;
                let bits = !planted!(self, CopiedWithoutBits);
                bits.then(|| disk.io.bitmap.merge_slot(*from, *to));
            }
        }
        self.write_superblock(volume);
        self.watch_left_marks(volume);
        for other in self.established_peers().iter() {
            let up = self.state.peer_device(volume, other).repl >= ReplState::Established;
            if up && (copied || other != peer) {
                self.send_uuids(other, volume, UuidFlags::empty());
            }
        }
    }

    /// A diskless node follows the generation of an UpToDate peer.
    fn expose_from(&mut self, peer: NodeId, volume: VolumeNr, set: &PeerUuids) {
        let p = self.state.peer_device(volume, peer);
        let secondary = self.state.role == Role::Secondary;
        // An 8.4 node with a disk labels the data of a Primary without one.
        let legacy = self.is_legacy(peer);
        let told = self.is_told_by_primary(volume, peer);
        if let Some(device) = self.devices.get_mut(&volume) {
            let follows = p.repl >= ReplState::Established && p.disk == DiskState::UpToDate;
            if follows
                && !told
                && (secondary
                    || legacy
                    || device.exposed_uuid.is_zero()
                    || set.flags.contains(UuidFlags::NEW_DATAGEN))
            {
                device.exposed_uuid = set.current;
            }
        }
    }

    /// `P_CURRENT_UUID`: a diskless node's generation, or a survivor's before a reconciliation.
    pub(crate) fn current_uuid_received(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        packet: CurrentUuid,
    ) {
        if !self.devices.contains_key(&volume) {
            return;
        }
        let connected = self.state.conn(peer) == ConnState::Connected && !self.is_off(peer, volume);
        let from_primary = self
            .state
            .connections
            .get(&peer)
            .is_some_and(|c| c.peer_role == Role::Primary);
        if connected && from_primary {
            self.catch_up_with(peer, volume);
        }
        let Some(pd) = self.peer_device_mut(volume, peer) else {
            return;
        };
        pd.current_uuid = packet.uuid;
        let mut set = pd.uuids.clone().unwrap_or_default();
        set.current = packet.uuid;
        if !connected {
            set.dirty_bits = 0;
            set.flags = UuidFlags::STABLE;
        }
        pd.uuids = Some(set.clone());
        let follows = connected && from_primary && !self.is_called_weak(peer, volume, packet);
        if follows && self.state.disk(volume) == DiskState::UpToDate {
            self.new_datagen(peer, volume, &set, Some(packet.weak_nodes));
        }
        let same = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.current_uuid().same_generation(packet.uuid));
        if connected
            && from_primary
            && same
            && self.state.disk(volume) == DiskState::Consistent
            && self.is_whole_beside_primary(volume)
        {
            self.hard_change(Change::new().disk(volume, DiskState::UpToDate));
        }
        if connected && from_primary && same && self.is_lockstep(peer) {
            self.vouched_for(volume);
        }
    }
}
