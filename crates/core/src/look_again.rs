//! A pair of nodes that is connected, but not equal, and does nothing about it, compares again.
//!
//! Every end of a resync, every new generation and every lost Primary leads to the comparison that
//! it calls for. Two nodes that do this at the same time, with what each knows of a third one, can
//! still end where both wait for the other. So whoever sees an unequal pair without a resync for a
//! while sends its UUIDs once more and compares; a comparison decides nothing that a reconnect
//! would not decide. Lockstep peers only: a kernel peer is asked by its own rules.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, PeerState, ReplState, Role, UuidFlags};

use crate::compare;
use crate::report::Level;
use crate::resource::Resource;
use crate::state::{ConnectionState, DeviceState, PeerDeviceState, ReplSets, State};
use crate::time::Duration;
use crate::timers::Timer;
use crate::transition::Change;
use crate::twopc::WishKind;
use crate::uuids::{PeerUuids, is_real};

/// How long a pair may be unequal before it is looked at.
const PATIENCE: Duration = Duration::from_secs(3);
/// The same for a node that is Outdated beside an UpToDate one of its generation.
const PATIENCE_OUTDATED: Duration = Duration::from_millis(100);
/// The pause doubles so many times at most.
const MOST_DOUBLINGS: u32 = 4;

/// Who knows that all Outdated copies of one generation are the last ones.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Word {
    /// This node, as Primary.
    Own,
    /// Primaries without a disk.
    OfClients,
    /// There is no Primary.
    Nobodys,
}

impl Resource {
    /// After a state change: unequal pairs are watched.
    pub(crate) fn watch_unequal(&mut self, state: &State) {
        for (volume, device) in &state.devices {
            let unequal = device.peers.values().any(|p| {
                p.repl == ReplState::Established
                    && diskful(device.disk)
                    && diskful(p.disk)
                    && (device.disk, p.disk) != (DiskState::UpToDate, DiskState::UpToDate)
            });
            if unequal && !planted!(self, UnequalNotWatched) {
                let patience = match self.was_outdated_in_vain(*volume, device) {
                    true => PATIENCE_OUTDATED,
                    false => PATIENCE,
                };
                let at = self.now + patience;
                self.timers.set_earliest(Timer::LookAgain(*volume), at);
            } else if let Some(device) = self.devices.get_mut(volume) {
                device.looked_again = 0;
            }
            // Clients alone are beside it: there is no other disk to compare with.
            let alone = !unequal && device.disk == DiskState::Outdated;
            let met = device
                .peers
                .values()
                .any(|p| p.repl == ReplState::Established);
            let weak = self.is_weak(state);
            if alone && met && !weak && !planted!(self, LonelyOutdatedStays) {
                let at = self.now + PATIENCE_OUTDATED;
                self.timers.set_earliest(Timer::LookAgain(*volume), at);
            }
            if !self.is_beside_primary() {
                self.renew_for_late(*volume);
            }
        }
    }

    /// A Primary that is not among the neighbours may write at any moment: equal data are no current ones.
    pub(crate) fn is_weak(&self, state: &State) -> bool {
        !self.far_primaries.difference(state.connected()).is_empty()
    }

    /// A transaction has shown all Primaries there are.
    pub(crate) fn note_primaries(&mut self, primary_nodes: NodeMask) {
        let near = self.state.connected().with(self.node_id);
        let mut far = primary_nodes.difference(near);
        if planted!(self, FarPrimaryKept) {
            far = far.union(self.far_primaries);
        }
        let before = core::mem::replace(&mut self.far_primaries, far);
        if before.is_empty() || !far.is_empty() {
            return;
        }
        for (volume, device) in &mut self.devices {
            if self.state.disk(*volume) == DiskState::Outdated {
                device.looked_again = 0;
                let at = self.now + PATIENCE_OUTDATED;
                self.timers.set_earliest(Timer::LookAgain(*volume), at);
            }
        }
    }

    /// This node was outdated for a Primary that others still had, and they are UpToDate without it now,
    /// with the same generation: there is nobody to wait for.
    fn was_outdated_in_vain(&self, volume: VolumeNr, state: &DeviceState) -> bool {
        let first = self.devices.get(&volume).map(|d| d.looked_again) == Some(0);
        first
            && !self.is_weak(&self.state)
            && state.disk == DiskState::Outdated
            && state.peers.iter().any(|(peer, p)| {
                p.repl == ReplState::Established
                    && p.disk == DiskState::UpToDate
                    && self.is_lockstep(*peer)
                    && self.same_current(volume, *peer)
            })
    }

    /// A peer's UUIDs came: a generation that it lacks is watched as well.
    pub(crate) fn watch_generation(&mut self, volume: VolumeNr, peer: NodeId) {
        // A generation that came from another Primary is taken by others now, which that one sees to.
        if !self.is_beside_primary() {
            self.renew_for_late(volume);
        }
        if self.is_unequal(volume, peer) {
            let at = self.now + PATIENCE;
            self.timers.set_earliest(Timer::LookAgain(volume), at);
        }
    }

    /// `Timer::LookAgain`.
    pub(crate) fn look_again_timer(&mut self, volume: VolumeNr) {
        let peers: Vec<NodeId> = self
            .established_peers()
            .iter()
            .filter(|peer| self.is_unequal(volume, *peer) || self.is_uncompared(volume, *peer))
            .collect();
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        if peers.is_empty() {
            device.looked_again = 0;
            self.revive_outdated(volume);
            return;
        }
        if self.is_beside_primary() {
            self.renew_for_late(volume);
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let doublings = device.looked_again.min(MOST_DOUBLINGS);
        device.looked_again += 1;
        let at = self.now + PATIENCE.times(1 << doublings);
        if !planted!(self, LookedAgainOnce) {
            self.timers.set_earliest(Timer::LookAgain(volume), at);
        }
        if self.is_busy(volume) {
            self.compare_with_consistent(volume);
            self.compare_while_serving(volume);
            self.compare_while_paused(volume, &peers);
            return;
        }
        if self.state.disk(volume) == DiskState::Consistent {
            self.schedule_empty_twopc();
        }
        let weak = self.state.disk(volume) == DiskState::Outdated && self.is_weak(&self.state);
        if weak {
            // Is it still one?
            self.schedule_empty_twopc();
        }
        // Beside two Primaries generations follow each other, and one may just be on its way. So it may to another
        // follower of one Primary.
        let good = |disk: DiskState| disk == DiskState::UpToDate;
        let both_good = |peer: NodeId| {
            good(self.state.disk(volume)) && good(self.state.peer_device(volume, peer).disk)
        };
        let follows =
            self.state.primary_peer().is_some() && !planted!(self, FollowersComparedEarly);
        let early = |peer: NodeId| self.is_shared() || (follows && both_good(peer));
        let peers: Vec<NodeId> = peers
            .into_iter()
            .filter(|p| !(doublings == 0 && early(*p) && self.may_follow_yet(volume, *p)))
            .filter(|peer| !self.waits_for_stable(volume, *peer))
            .filter(|peer| !weak && !self.is_for_peer(volume, *peer))
            .collect();
        if doublings > 0 && !weak && self.meets_client_anew(volume) {
            return;
        }
        let good_peer = |peer: &NodeId| good(self.state.peer_device(volume, *peer).disk);
        let primary = |peer: &NodeId| self.peer_role(*peer) == Role::Primary;
        // A Primary whose disk is being copied serves what another node has, by a name that its own disk has not.
        let whole = peers.iter().any(good_peer);
        let served = |peer: &NodeId| whole && primary(peer) && !good_peer(peer);
        let peers: Vec<NodeId> = peers.into_iter().filter(|peer| !served(peer)).collect();
        // Where a Primary is near, it is asked first: it has everything.
        let primary = peers.iter().copied().find(primary);
        for peer in peers {
            if primary.is_some_and(|primary| primary != peer) {
                continue;
            }
            self.tell_and_compare(volume, peer);
        }
    }

    /// This node was outdated for a Primary that was none any more, and is equal to disks that are UpToDate. They do not say
    /// so, as it is for the Primary, which has no disk, to say what is current: it does at a connect (4.3, rule 12).
    fn meets_client_anew(&mut self, volume: VolumeNr) -> bool {
        let primaries: Vec<NodeId> = self.state.primaries().collect();
        let [client] = *primaries.as_slice() else {
            return false;
        };
        let p = self.state.peer_device(volume, client);
        let serves = p.repl == ReplState::Established && p.disk == DiskState::Diskless;
        let peers = self.established_peers();
        let mut disks = peers
            .iter()
            .filter(|peer| diskful(self.state.peer_device(volume, *peer).disk));
        let equal = disks.all(|peer| {
            self.is_equal_with(volume, peer, DiskState::UpToDate)
                && !self.marked_towards(volume, peer)
        });
        if self.state.disk(volume) != DiskState::Outdated
            || !serves
            || !self.is_lockstep(client)
            || !equal
            || planted!(self, ClientNotMetAnew)
        {
            return false;
        }
        if !self.vouches(volume, client) {
            // It says what it exposes if that is what it is told.
            self.send_uuids(client, volume, UuidFlags::empty());
            return false;
        }
        let text =
            "this disk is as good as its neighbours', which follow this Primary; connecting again";
        self.log(Level::Info, Some(client), Some(volume), text.into());
        self.drop_connection(client, ConnState::NetworkFailure);
        true
    }

    /// Beside a Primary it is for the Outdated node to ask, which alone knows whether it reaches that
    /// one, too. The resync of a node that does not would end only with the Primary, and until then whole
    /// old data are better than a mixture. One that this node alone calls Outdated does not ask.
    fn is_for_peer(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let primary = |node: NodeId| self.peer_role(node) == Role::Primary;
        let device = self.devices.get(&volume);
        let said = device.and_then(|d| d.peers.get(&peer)?.last_state);
        self.state.role == Role::Secondary
            && self.established_peers().iter().any(primary)
            && self.state.disk(volume) == DiskState::UpToDate
            && said.is_some_and(|state| state.disk == DiskState::Outdated)
            && self.is_lockstep(peer)
    }

    /// The target has copied what a source has that is not stable, or would have: another resync from
    /// it would end in the same way. It says when it is stable (semantics.md, 14.2).
    fn waits_for_stable(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let own = self.state.disk(volume);
        let theirs = self.state.peer_device(volume, peer).disk;
        if own == DiskState::UpToDate && theirs == DiskState::Inconsistent {
            let primary = self.state.connections.get(&peer);
            let primary = primary.is_some_and(|c| c.peer_role == Role::Primary);
            return !self.state.stable() && !primary;
        }
        let pd = self.devices.get(&volume).and_then(|d| d.peers.get(&peer));
        let stable = |set: &PeerUuids| self.is_stable_set(set);
        own == DiskState::Inconsistent
            && theirs == DiskState::UpToDate
            && pd.is_some_and(|pd| pd.unstable_resync)
            && self.out_of_sync_blocks(volume, peer) == 0
            && !self.peer_uuids(volume, peer).is_some_and(stable)
            && !self.stable_source_present(volume, peer, &self.state)
    }

    /// A peer that is Consistent gets no writes of this Primary, and may be source of a third node, which
    /// then waits for it: it is compared although another resync runs.
    fn compare_with_consistent(&mut self, volume: VolumeNr) {
        let good = self.state.disk(volume) == DiskState::UpToDate;
        if self.state.role != Role::Primary || !good || self.new_uuid.is_some() {
            return;
        }
        for peer in self.established_peers().iter() {
            let consistent = self.state.peer_device(volume, peer).disk == DiskState::Consistent;
            if consistent && self.is_unequal(volume, peer) {
                self.tell_and_compare(volume, peer);
            }
        }
    }

    /// Being the source of others keeps this node from no comparison with one that counts as well and has not been compared.
    fn compare_while_serving(&mut self, volume: VolumeNr) {
        let good = DiskState::UpToDate;
        let Some(state) = self.state.devices.get(&volume) else {
            return;
        };
        let serves = |p: &PeerDeviceState| {
            p.repl <= ReplState::Established
                || p.repl.is_sync_source()
                || p.repl == ReplState::WfBitmapS
        };
        let idle = state.disk == good && state.peers.values().all(serves);
        if !idle || self.is_resizing(volume) || self.new_uuid.is_some() {
            return;
        }
        for peer in self.established_peers().iter() {
            let counts = self.state.peer_device(volume, peer).disk == good;
            if counts && self.is_uncompared(volume, peer) {
                self.tell_and_compare(volume, peer);
            }
        }
    }

    /// Targets that are each other's sources wait for one of them to be whole. This one is compared with a peer that
    /// is: a resync from that one goes on. So is one that is only a source, and Outdated: its targets would be no more
    /// than that.
    fn compare_while_paused(&mut self, volume: VolumeNr, unequal: &[NodeId]) {
        let Some(state) = self.state.devices.get(&volume) else {
            return;
        };
        let waits = |p: &PeerDeviceState| match p.repl {
            ReplState::Off | ReplState::Established | ReplState::PausedSyncS => true,
            ReplState::PausedSyncT => p.disk == DiskState::Inconsistent,
            _ => false,
        };
        let resizes = self.is_resizing(volume);
        let waits = state.disk == DiskState::Inconsistent && state.peers.values().all(waits);
        let serves = only_serves(state) && !self.is_weak(&self.state);
        let idle = (waits || serves) && !resizes && self.new_uuid.is_none();
        let whole = unequal.iter().copied().find(|peer| {
            self.state.peer_device(volume, *peer).disk == DiskState::UpToDate
                && !self.waits_for_stable(volume, *peer)
        });
        if let Some(peer) = whole.filter(|_| idle) {
            self.tell_and_compare(volume, peer);
        }
    }

    /// It has no disk, or one whose size changes.
    fn is_resizing(&self, volume: VolumeNr) -> bool {
        let devices = self.devices.get(&volume);
        devices.is_some_and(|d| d.attached().is_none_or(|a| a.resize.is_some()))
    }

    /// A resync ended whose source was promoted and began a generation while the target's last words
    /// were on their way: the target is UpToDate and lacks the generation. Until both compare, no
    /// acknowledged write would be known by its generation on the target's disk. Or another source has
    /// brought the target beyond this node, which counts as UpToDate until both compare.
    pub(crate) fn compare_with_old_target(&mut self, volume: VolumeNr, peer: NodeId) {
        let good = DiskState::UpToDate;
        let primary = self.state.role == Role::Primary;
        if (primary || self.is_outrun(volume, peer))
            && self.state.disk(volume) == good
            && self.state.peer_device(volume, peer).disk == good
            && self.is_unequal(volume, peer)
            && !self.is_busy(volume)
        {
            self.tell_and_compare(volume, peer);
        }
    }

    /// The peer's data are of a later generation, which no Primary here brings.
    fn is_outrun(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let own = disk.map_or(Uuid::ZERO, |d| d.generations.current);
        let primary = |(node, conn): (&NodeId, &ConnectionState)| {
            *node != peer && conn.peer_role == Role::Primary
        };
        is_real(own)
            && self.is_ahead_of(volume, peer, own)
            && !self.state.connections.iter().any(primary)
            && !planted!(self, OutrunNotCompared)
    }

    /// The same after the generation, which was being written while the resync ended.
    pub(crate) fn compare_with_old_targets(&mut self) {
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            for peer in self.established_peers().iter() {
                self.compare_with_old_target(volume, peer);
            }
            // It was left behind, and would be for as long as this node is Primary.
            if !planted!(self, ConsistentNotCompared) {
                self.compare_with_consistent(volume);
            }
        }
    }

    pub(crate) fn tell_and_compare(&mut self, volume: VolumeNr, peer: NodeId) {
        if self.spreads_to(peer, volume) {
            // A generation that is not durable yet is told to nobody.
            self.watch_marks(volume, peer);
            return;
        }
        self.compared(volume, peer);
        let state = self.state.clone();
        self.send_uuids(peer, volume, UuidFlags::RESYNC);
        self.send_state(peer, volume, &state);
        self.compare_now(peer, volume);
    }

    fn compared(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(device) = self.devices.get_mut(&volume) {
            device.growth.uncompared = device.growth.uncompared.without(peer);
        }
    }

    /// Both volumes have grown, and what is new is marked: a comparison decides who copies it, now
    /// or when nothing else is under way.
    pub(crate) fn compare_marks(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(device) = self.devices.get_mut(&volume) {
            device.growth.uncompared = device.growth.uncompared.with(peer);
        }
        if !self.is_uncompared(volume, peer) {
            self.compared(volume, peer);
        } else if self.is_busy(volume) {
            let at = self.now + PATIENCE;
            self.timers.set_earliest(Timer::LookAgain(volume), at);
        } else {
            self.tell_and_compare(volume, peer);
        }
    }

    /// Both disks have become UpToDate without a comparison of their marks: one follows if some are
    /// left after a while.
    pub(crate) fn watch_marks(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(device) = self.devices.get_mut(&volume) {
            device.growth.uncompared = device.growth.uncompared.with(peer);
        }
        let at = self.now + PATIENCE;
        self.timers.set_earliest(Timer::LookAgain(volume), at);
    }

    /// Both disks count now, and one of them was Consistent: nobody was asked for what one of the two lacks. A third node
    /// that has everything settles such marks by itself. Whose peer has counted all the time does not wait: it may become
    /// Primary in a moment, with what that one lacks.
    pub(crate) fn consistent_counts(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        was: [DiskState; 2],
        after: &DeviceState,
    ) {
        let good = DiskState::UpToDate;
        let settles = |(node, p): (&NodeId, &PeerDeviceState)| {
            *node != peer
                && (p.disk, p.repl) == (good, ReplState::Established)
                && (!self.marked_towards(volume, *node) || planted!(self, MarkedNodeSettles))
        };
        if after.peers.iter().any(settles) {
            return;
        }
        self.watch_marks(volume, peer);
        if was[1] == good && !planted!(self, ConsistentWaits) {
            self.timers.set_earliest(Timer::LookAgain(volume), self.now);
        }
    }

    fn is_uncompared(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let p = self.state.peer_device(volume, peer);
        p.repl == ReplState::Established
            && diskful(self.state.disk(volume))
            && diskful(p.disk)
            && self.is_lockstep(peer)
            && self.out_of_sync_blocks(volume, peer) > 0
            && self
                .devices
                .get(&volume)
                .is_some_and(|d| d.growth.uncompared.contains(peer))
    }

    /// A kernel decides during a resync whether another one in that direction follows it, and begins that
    /// without another look (semantics.md, 14.2). So does its peer, or it waits for a bitmap for ever.
    pub(crate) fn goes_on(
        &self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
        phase: compare::Phase,
    ) -> bool {
        let next = self
            .compare_with(peer, volume, theirs, phase)
            .and_then(|result| result.strategy.to_repl_state(self.state.role, theirs.role));
        let repl = self.state.peer_device(volume, peer).repl;
        let source = repl.is_sync_source() || repl == ReplState::WfBitmapS;
        let target = repl.is_sync_target() || repl == ReplState::WfBitmapT;
        next == Some(ReplState::WfBitmapS) && source || next == Some(ReplState::WfBitmapT) && target
    }

    /// The peer decided to resync and waits for this node's bitmap, but the comparison here was
    /// made with an older disk state of the peer: it is made again.
    pub(crate) fn answer_waiting_peer(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
    ) {
        let waits = |resource: &Self| {
            !(theirs.repl == ReplState::WfBitmapS && resource.source_is_late(volume, peer))
                && matches!(theirs.repl, ReplState::WfBitmapS | ReplState::WfBitmapT)
                && resource.state.peer_device(volume, peer).repl == ReplState::Established
        };
        let lockstep = self.connections.get(&peer).is_some_and(|c| c.is_lockstep());
        let is_source = |repl: ReplState| repl.is_sync_source() || repl == ReplState::WfBitmapS;
        if lockstep
            && is_source(theirs.repl)
            && is_source(self.state.peer_device(volume, peer).repl)
        {
            // Both chose to be source, each with an older disk state of the other, and no block
            // has moved: a new handshake decides for both.
            let text = "both nodes want to be the source of a resync; connecting again";
            self.log(Level::Warn, Some(peer), Some(volume), text.into());
            // Nothing was written there: it is what it says.
            self.hard_change(Change::new().peer_disk(volume, peer, theirs.disk));
            self.drop_connection(peer, ConnState::NetworkFailure);
            return;
        }
        let waits_here = self.state.peer_device(volume, peer).repl == ReplState::WfBitmapT;
        if lockstep && theirs.repl == ReplState::WfBitmapT && waits_here {
            if self.both_give_up(volume, peer, theirs) {
                return;
            }
            let text = "both nodes want to be the target of a resync; connecting again";
            self.log(Level::Warn, Some(peer), Some(volume), text.into());
            self.drop_connection(peer, ConnState::NetworkFailure);
            return;
        }
        if !lockstep || !waits(self) {
            return;
        }
        self.compare_established(peer, volume, theirs, compare::Phase::AfterUnstable);
        if !waits(self) {
            return;
        }
        // One generation: the peer's choice of a direction is as good as this node's.
        let own = self.state.disk(volume);
        let same = self.same_current(volume, peer);
        if !same {
            // Decided below.
        } else if theirs.repl == ReplState::WfBitmapS
            && self.state.role == Role::Secondary
            && theirs.disk == DiskState::UpToDate
            && own >= DiskState::Inconsistent
        {
            self.hard_change(Change::new().repl(volume, peer, ReplState::WfBitmapT));
        } else if theirs.repl == ReplState::WfBitmapT && own == DiskState::UpToDate {
            self.hard_change(Change::new().repl(volume, peer, ReplState::WfBitmapS));
        }
        if waits(self) {
            // Nothing to resync here. It would wait for ever; a new handshake decides for both.
            let text = "the peer waits for a resync that this node does not want; connecting again";
            self.log(Level::Warn, Some(peer), Some(volume), text.into());
            self.drop_connection(peer, ConnState::NetworkFailure);
        }
    }

    /// Both ends of a pair that is in one generation chose to be target, each with an older disk state of the other,
    /// and one of them is copied from a third node. None sends its marks first, so that none has begun: both see the
    /// same, stay connected as they were, and compare again later.
    fn both_give_up(&mut self, volume: VolumeNr, peer: NodeId, theirs: PeerState) -> bool {
        let secondary = |role: Role| role == Role::Secondary;
        let given_up = secondary(self.state.role)
            && secondary(self.peer_role(peer))
            && self.same_current(volume, peer);
        if given_up {
            let text = "both nodes want to be the target of a resync; neither is";
            self.log(Level::Info, Some(peer), Some(volume), text.into());
            let change = Change::new().repl(volume, peer, ReplState::Established);
            self.hard_change(change.peer_disk(volume, peer, theirs.disk));
            self.watch_marks(volume, peer);
        }
        given_up
    }

    /// Compares with the peer's last state.
    pub(crate) fn compare_now(&mut self, peer: NodeId, volume: VolumeNr) {
        let pd = self.devices.get(&volume).and_then(|d| d.peers.get(&peer));
        let theirs = pd.and_then(|p| p.last_state);
        let announces = pd
            .and_then(|p| p.uuids.as_ref())
            .is_some_and(|u| u.flags.contains(UuidFlags::NEW_DATAGEN));
        if announces && self.is_lockstep(peer) {
            // A generation that is only planned has no slots yet that would explain it.
            return;
        }
        if let Some(mut theirs) = theirs {
            // A promotion or demotion since then was told by a two-phase commit only.
            let connection = self.state.connections.get(&peer);
            theirs.role = connection.map_or(theirs.role, |c| c.peer_role);
            let told =
                core::mem::replace(&mut theirs.disk, self.state.peer_device(volume, peer).disk);
            self.compare_established(peer, volume, theirs, compare::Phase::AfterUnstable);
            let p = self.state.peer_device(volume, peer);
            // The end of a resync from a third node took the peer for one that is behind, by UUIDs
            // that it has left since.
            if p.repl == ReplState::Established
                && p.disk == DiskState::Outdated
                && told == DiskState::UpToDate
                && self.state.disk(volume) == DiskState::UpToDate
                && self.same_current(volume, peer)
                && !self.marked_towards(volume, peer)
            {
                self.hard_change(Change::new().peer_disk(volume, peer, told));
            }
        }
    }

    /// Every disk there is of this volume is connected, Outdated, and of one generation: nobody is
    /// left that could have newer data, so one of them begins to ask whether a Primary is. A Primary
    /// knows it, if that generation is the one whose data its applications have seen, and says so if it
    /// has no disk. What is marked towards others is copied first: they follow without a comparison.
    fn revive_outdated(&mut self, volume: VolumeNr) {
        if self.state.disk(volume) != DiskState::Outdated {
            return;
        }
        let Some(word) = self.word_for_outdated(volume) else {
            return;
        };
        let mut marked = Vec::new();
        for node in self.quorum_nodes(volume, true) {
            let has_disk = self.has_slot_for(volume, node);
            if !has_disk || (word == Word::OfClients && self.vouches(volume, node)) {
                continue;
            }
            let older = || word != Word::Nobodys || self.is_of_older_one(volume, node);
            if self.is_to_be_copied(volume, node) && older() {
                continue;
            }
            let leads = word == Word::Own || self.node_id < node;
            if !leads || !self.is_equal_with(volume, node, DiskState::Outdated) {
                return;
            }
            if word != Word::Nobodys && self.marked_towards(volume, node) {
                marked.push(node);
            }
        }
        if let Some(peer) = marked.first() {
            let repl = ReplState::WfBitmapS;
            let peer = *peer;
            self.wish(WishKind::Resync { volume, peer, repl }, None);
            let at = self.now + PATIENCE.times(1 << MOST_DOUBLINGS);
            self.timers.set_earliest(Timer::LookAgain(volume), at);
            return;
        }
        let disk = match word {
            Word::Own | Word::OfClients => DiskState::UpToDate,
            Word::Nobodys => DiskState::Consistent,
        };
        self.hard_change(Change::new().disk(volume, disk));
        if disk == DiskState::Consistent {
            self.schedule_empty_twopc();
        }
    }

    /// Who says that this node's generation is the last one; none if a Primary is near that does not.
    fn word_for_outdated(&self, volume: VolumeNr) -> Option<Word> {
        let connections = self.state.connections.iter();
        let primaries: Vec<NodeId> = connections
            .filter(|(_, c)| c.peer_role == Role::Primary)
            .map(|(peer, _)| *peer)
            .collect();
        if self.state.role == Role::Primary {
            // What it announced without a disk, and had no answer to in time, followed what was seen.
            let seen = self.devices.get(&volume).is_some_and(|device| {
                let exposed = core::iter::once(&device.exposed_uuid).filter(|u| is_real(**u));
                let mut named = exposed.chain(&device.announced);
                named.any(|uuid| uuid.same_generation(device.current_uuid()))
            });
            return (seen && primaries.is_empty()).then_some(Word::Own);
        }
        if primaries.is_empty() {
            return Some(Word::Nobodys);
        }
        let all = primaries.iter().all(|node| self.vouches(volume, *node));
        all.then_some(Word::OfClients)
    }

    /// A Primary without a disk, whose applications have seen this node's generation.
    fn vouches(&self, volume: VolumeNr, node: NodeId) -> bool {
        let connection = self.state.connections.get(&node);
        connection.is_some_and(|c| c.peer_role == Role::Primary)
            && self.is_equal_with(volume, node, DiskState::Diskless)
    }

    /// The node's disk is of a generation from which this one has come. One that was announced since, and not made here,
    /// is none: who took it may have newer data.
    fn is_of_older_one(&self, volume: VolumeNr, node: NodeId) -> bool {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let theirs = self.peer_uuids(volume, node).map(|set| set.current);
        let older = disk.zip(theirs).is_some_and(|(disk, theirs)| {
            let mut older = disk.generations.older();
            is_real(theirs) && older.any(|uuid| uuid.same_generation(theirs))
        });
        older && !planted!(self, OlderCopyInTheWay)
    }

    /// A node whose disk is not whole, so that it has no newer data.
    fn is_to_be_copied(&self, volume: VolumeNr, node: NodeId) -> bool {
        let p = self.state.peer_device(volume, node);
        p.repl >= ReplState::Established
            && p.disk == DiskState::Inconsistent
            && self.is_lockstep(node)
            && !planted!(self, HalfCopyInTheWay)
    }

    /// A node of this project in this disk state, of this node's generation, and no resync with it.
    fn is_equal_with(&self, volume: VolumeNr, node: NodeId, disk: DiskState) -> bool {
        let p = self.state.peer_device(volume, node);
        p.repl == ReplState::Established
            && p.disk == disk
            && self.is_lockstep(node)
            && self.same_current(volume, node)
    }

    /// Something may be written that this node's disk does not get.
    pub(crate) fn others_have_disks(&self) -> bool {
        self.devices.keys().any(|volume| {
            let mut others = self.quorum_nodes(*volume, true).into_iter();
            others.any(|node| self.has_slot_for(*volume, node))
        })
    }

    /// The node has, or had, a disk of the volume.
    fn has_slot_for(&self, volume: VolumeNr, node: NodeId) -> bool {
        let pd = self.devices.get(&volume).and_then(|d| d.peers.get(&node));
        pd.is_some_and(|pd| pd.options.bitmap) || self.slot_seen_with_disk(volume, node)
    }

    /// Connected with both disks usable, and different in state or generation.
    fn is_unequal(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let own = self.state.disk(volume);
        let p = self.state.peer_device(volume, peer);
        let good = |disk: DiskState| disk == DiskState::UpToDate;
        p.repl == ReplState::Established
            && diskful(own)
            && diskful(p.disk)
            && (good(own) || good(p.disk) || own == DiskState::Consistent)
            && self.is_lockstep(peer)
            && !self.is_legacy(peer)
            && !self.is_in_handler(volume, peer)
            && !(good(own) && good(p.disk) && self.same_current(volume, peer))
    }

    /// The peer is source of a resync that this node has been through already: its handler
    /// `before-resync-source` runs, and when that ends, it has heard of it.
    fn is_in_handler(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let pd = self.devices.get(&volume).and_then(|d| d.peers.get(&peer));
        pd.and_then(|p| p.last_state)
            .is_some_and(|state| state.repl == ReplState::WfBitmapS)
    }

    /// A resync or a new generation is under way, which ends in a comparison of its own.
    pub(crate) fn is_busy(&self, volume: VolumeNr) -> bool {
        // While a volume grows, its targets may have begun already.
        let mut disks = self.devices.get(&volume).into_iter();
        let resizes = disks.any(|d| d.attached().is_some_and(|disk| disk.resize.is_some()));
        resizes
            || self.new_uuid.is_some()
            || self.state.devices.get(&volume).is_some_and(|d| {
                d.disk == DiskState::Negotiating
                    || d.peers.values().any(|p| p.repl > ReplState::Established)
            })
    }
}

/// The disk is Outdated, and all that it does is to be copied.
pub(crate) fn only_serves(state: &DeviceState) -> bool {
    let serves = |p: &PeerDeviceState| p.repl <= ReplState::Established || p.repl.is_sync_source();
    state.disk == DiskState::Outdated && state.peers.values().all(serves)
}

pub(crate) fn diskful(disk: DiskState) -> bool {
    disk >= DiskState::Inconsistent && disk != DiskState::DUnknown
}
