//! The state-change engine (semantics.md, 3): edit, sanitise, check, commit, and what follows.
//!
//! What follows a commit comes in two parts. *Finish* actions run at once with the change. *After*
//! actions (packets, disk work) run in order of the changes, when the handler that made the change
//! has returned to `run_steps`: peers see every state in order.

use alloc::format;
use alloc::vec::Vec;
use core::mem;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, Packet, PeerState, ReplState, Role, UuidFlags};

use crate::attach::Leaving;
pub use crate::change::Change;
use crate::device::Reconcile;
use crate::event::{LinkEnd, Output, Stream};
use crate::options::{OnIoError, Protocol, Quorum};
use crate::report::{Event, Level};
use crate::resource::Resource;
use crate::state::{PeerDeviceState, ReplSets, State};
use crate::time::Duration;
use crate::timers::Timer;
use crate::told;
use crate::validity::Refusal;
use lockstep_format::disk::v09::{DeviceFlags, PeerFlags};

/// Pause before the next connect when an established connection was lost: a peer that restarts is
/// back at once, and the I/O of a Primary may wait for it.
const RECONNECT_AFTER_LOSS: Duration = Duration::from_millis(100);

/// The same when the handshake failed, which the next one may do as well.
const RECONNECT_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// A committed change whose after actions are due.
#[derive(Debug)]
pub struct Step {
    old: State,
    new: State,
    graceful: bool,
}

impl Resource {
    /// A fact: nothing can refuse it.
    pub(crate) fn hard_change(&mut self, change: Change) {
        let new = self.edited(&change);
        if new == self.state {
            return;
        }
        if let Err(refusal) = self.hard_validity(&self.state, &new) {
            self.log(
                Level::Debug,
                None,
                None,
                format!("no state change: {}", refusal.text),
            );
            return;
        }
        self.commit(new, change.graceful);
    }

    /// A wish: refused if a rule of semantics.md 3.4 says so. `Ok(false)`: nothing differs.
    pub(crate) fn soft_change(&mut self, change: Change) -> Result<bool, Refusal> {
        let new = self.checked(&change)?;
        if new == self.state {
            return Ok(false);
        }
        self.commit(new, change.graceful);
        Ok(true)
    }

    /// What `soft_change` would say (PREPARE, semantics.md 3.1).
    pub(crate) fn check_change(&self, change: &Change) -> Result<bool, Refusal> {
        Ok(self.checked(change)? != self.state)
    }

    fn checked(&self, change: &Change) -> Result<State, Refusal> {
        let new = self.edited(change);
        if new != self.state {
            self.hard_validity(&self.state, &new)?;
            self.soft_validity(&self.state, &new, change.ignore_openers)?;
        }
        Ok(new)
    }

    fn edited(&self, change: &Change) -> State {
        let mut new = self.state.clone();
        change.apply(&mut new);
        self.sanitize(&self.state, &mut new, change.graceful);
        new
    }

    fn commit(&mut self, mut new: State, graceful: bool) {
        for (peer, c) in &new.connections {
            if c.conn == ConnState::Connected && self.state.conn(*peer) != ConnState::Connected {
                new.members.insert(*peer);
            }
        }
        let old = self.state.clone();
        let changed = self.finish_actions(&old, &new, graceful);
        self.state = new.clone();
        for volume in changed {
            // Members are part of it: those of the new state.
            self.write_superblock(volume);
        }
        self.steps.push_back(Step { old, new, graceful });
    }

    /// Runs the after actions of all committed changes, in order.
    pub(crate) fn run_steps(&mut self) {
        if self.in_steps {
            return;
        }
        self.in_steps = true;
        while let Some(step) = self.steps.pop_front() {
            self.after_actions(&step);
        }
        self.in_steps = false;
    }

    // Finish actions (semantics.md, 5.1).

    /// Gives the volumes whose superblocks have changed.
    fn finish_actions(&mut self, old: &State, new: &State, graceful: bool) -> Vec<VolumeNr> {
        let mut changed = Vec::new();
        self.finish_replication(old, new);
        self.finish_uuid_triggers(old, new);
        self.finish_connections(old, new);
        for volume in new.devices.keys().copied().collect::<Vec<_>>() {
            self.finish_peer_devices(volume, old, new);
            self.forget_owed(volume, old, new);
            let named = self.take_exposed_generation(volume, old, new);
            if self.finish_metadata_flags(volume, old, new, graceful) || named {
                changed.push(volume);
            }
        }
        if old.role == Role::Primary && new.role == Role::Secondary {
            self.queue_peer_ack();
        }
        if old.role != Role::Primary && new.role == Role::Primary {
            self.discard_nothing();
        }
        changed
    }

    fn finish_replication(&mut self, old: &State, new: &State) {
        let mut changed = false;
        let mut started = Vec::new();
        let mut rewritten = false;
        for (volume, device) in &new.devices {
            for (peer, p) in &device.peers {
                let before = old.peer_device(*volume, *peer);
                rewritten |= p.repl.is_sync_target() && !before.repl.is_sync_target();
                if before.replicates() != p.replicates() {
                    changed = true;
                    if p.replicates() {
                        started.push(*peer);
                    }
                }
            }
        }
        if rewritten {
            // This disk has what they say only until the resync takes a refused write back.
            self.queue_peer_ack();
        }
        if changed && !planted!(self, EpochGoesOn) {
            self.close_epoch();
        }
        for peer in started {
            self.replication_started(peer);
        }
    }

    /// When a new current UUID becomes due (semantics.md, 12.4).
    fn finish_uuid_triggers(&mut self, old: &State, new: &State) {
        let waits = old.susp_uuid && !self.is_writing_new_uuid();
        let unsettled = !self.io.log.is_empty();
        for (volume, after) in &new.devices {
            let Some(before) = old.devices.get(volume) else {
                continue;
            };
            let back = before.disk < DiskState::UpToDate && after.disk == DiskState::UpToDate;
            // One for each suspension; that of another volume says nothing of this one. What was announced without a
            // disk is noted all the same when that becomes current.
            let leaves = !back || planted!(self, NotNotedWhileSuspended);
            if waits && leaves && self.devices.get(volume).is_some_and(|d| d.new_uuid_pending) {
                continue;
            }
            let accessible = before.data_accessible() || after.data_accessible();
            let promoted = old.role != Role::Primary && new.role == Role::Primary;
            let mut due = promoted;
            for (peer, p) in &after.peers {
                let was = old.peer_device(*volume, *peer);
                due |= new.role == Role::Primary && accessible && lost_contact(was.disk, p.disk);
                due |= new.role == Role::Primary
                    && after.disk == DiskState::UpToDate
                    && was.disk == DiskState::DUnknown
                    && matches!(
                        p.disk,
                        DiskState::Diskless | DiskState::Failed | DiskState::Outdated
                    )
                    && self.slot_uuid(*volume, *peer).is_zero();
                due |= p.repl == ReplState::Ahead
                    && was.repl != ReplState::Ahead
                    && !planted!(self, AheadKeepsGeneration);
            }
            let failed = (before.disk > DiskState::Failed && after.disk == DiskState::Failed)
                || (before.disk >= DiskState::Inconsistent && after.disk < DiskState::Inconsistent);
            due |= failed && new.role == Role::Primary && after.data_accessible();
            // Somebody may go by a generation that this node announced while it had no disk, and
            // has to see that the data here went on without it.
            let announced = self
                .devices
                .get(volume)
                .is_some_and(|d| !d.announced.is_empty());
            let returns =
                back && new.role == Role::Primary && !planted!(self, ReturnedDiskUnlabelled);
            let noted = self.announced_last(*volume);
            // What is written from now on may count on a target of this disk.
            let thaws = !before.have_quorum && after.have_quorum && new.role == Role::Primary;
            let forced = promoted
                || (returns && (announced || noted))
                || thaws && !self.voters(*volume, new).is_empty();
            due |= forced;
            // What became due while there were no data at all was dropped: whoever was lost before
            // they returned is still to be excluded.
            due |=
                new.role == Role::Primary && !before.data_accessible() && after.data_accessible();
            if planted!(self, NoNewUuidOnLoss) {
                due = promoted;
            }
            if planted!(self, PromotionKeepsGeneration) {
                due &= !promoted;
            }
            if planted!(self, OneVolumeGetsUuid) {
                due &= promoted || volume.0 == 0;
            }
            let demoted = new.role != Role::Primary;
            if let Some(device) = self.devices.get_mut(volume) {
                if due {
                    device.uuid_is_due(forced, unsettled);
                }
                if returns && (announced || noted) {
                    // By the next handshake the peer that took it must not look newer.
                    self.new_uuid_wanted = true;
                }
                if back {
                    // A follower may have kept one; it is no other branch than this disk's.
                    let announced = core::mem::take(&mut device.announced);
                    if let Some(disk) = device.attached_mut() {
                        for uuid in &announced {
                            disk.generations.note_planned(*uuid);
                        }
                    }
                }
                if demoted {
                    device.new_uuid_pending = false;
                    device.new_uuid_forced = false;
                }
                if failed && !demoted && !planted!(self, AnnouncedGoesWithDisk) {
                    device.keep_announced();
                }
            }
        }
    }

    fn finish_connections(&mut self, old: &State, new: &State) {
        for (peer, c) in &new.connections {
            let before = old.connections.get(peer).copied().unwrap_or_default();
            if before.conn == ConnState::Connected && c.conn < ConnState::Connected {
                let was_primary = before.peer_role == Role::Primary;
                let named = !planted!(self, LostPrimaryUnnamed);
                for conn in self.connections.values_mut() {
                    conn.told_lost.remove(*peer);
                }
                if let Some(conn) = self.connections.get_mut(peer) {
                    conn.told_lost = NodeMask::EMPTY;
                    conn.notify_lost_primary = was_primary && named;
                    conn.dagtag_fresh = false;
                }
                if was_primary {
                    self.twopc.lost_primaries.insert(*peer);
                }
                for device in self.devices.values_mut() {
                    if let Some(pd) = device.peers.get_mut(peer) {
                        pd.leaves(old.peer_device(device.volume, *peer).disk);
                        // Its word about a lost Primary will not come any more.
                        pd.reconcile = Reconcile::No;
                    }
                }
            }
            if before.conn < ConnState::Connected && c.conn == ConnState::Connected {
                // A Primary that was lost is back: its handshake decides.
                self.twopc.lost_primaries.remove(*peer);
                for pd in self.devices.values_mut().flat_map(|d| d.peers.values_mut()) {
                    if pd.reconcile == (Reconcile::Pending { lost: *peer }) {
                        pd.reconcile = Reconcile::No;
                    }
                }
            }
            if before.conn == c.conn {
                continue;
            }
            if c.conn < ConnState::Connecting {
                for device in self.devices.values_mut() {
                    if let Some(pd) = device.peers.get_mut(peer) {
                        pd.link_is_gone();
                    }
                }
            }
        }
        if old.suspended() && !new.suspended() {
            self.thawed();
        }
    }

    fn finish_peer_devices(&mut self, volume: VolumeNr, old: &State, new: &State) {
        let Some(after) = new.devices.get(&volume) else {
            return;
        };
        let own_up = after.disk == DiskState::UpToDate;
        let primary = new.primary_peer().is_some() || new.role == Role::Primary;
        for (peer, p) in &after.peers {
            let before = old.peer_device(volume, *peer);
            self.target_heard(volume, *peer, (before.repl, p.repl));
            if (before.repl, before.disk, old.disk(volume)) != (p.repl, p.disk, after.disk)
                && let Some(pd) = self.peer_device_mut(volume, *peer)
            {
                pd.was_copied = false;
            }
            if before.repl > ReplState::Established && p.repl <= ReplState::Established {
                self.resync_left(volume, *peer);
                self.ask_soon(volume);
            }
            if before.repl.is_sync_target() && p.repl == ReplState::Behind {
                self.resync_left(volume, *peer);
            }
            if before.repl.is_verify() && !p.repl.is_verify() {
                self.verify_left(volume, *peer);
            }
            if before.disk >= DiskState::Inconsistent
                && before.disk != DiskState::DUnknown
                && p.disk < DiskState::Inconsistent
            {
                self.mark_sent(volume, *peer);
            }
            let equal = (
                DiskState::UpToDate,
                DiskState::UpToDate,
                ReplState::Established,
            );
            if (after.disk, p.disk, p.repl) == equal
                && (old.disk(volume), before.disk, before.repl) != equal
            {
                self.watch_left_marks(volume);
                let was = [old.disk(volume), before.disk];
                if was.contains(&DiskState::Consistent) {
                    self.consistent_counts(volume, *peer, was, after);
                }
                if before.repl >= ReplState::Established {
                    self.note_unsettled(volume, *peer);
                }
            }
            let lost_primary = new
                .connections
                .get(peer)
                .is_some_and(|c| c.peer_role != Role::Primary)
                && old
                    .connections
                    .get(peer)
                    .is_some_and(|c| c.peer_role == Role::Primary);
            // One that made another source stable may do so no more.
            let is_worse = before.repl.is_sync_target()
                && before.disk == DiskState::UpToDate
                && p.disk < DiskState::UpToDate
                && !planted!(self, FallenSourceCounts);
            // It may have become Primary after it had lost this node.
            let is_lost = before.repl >= ReplState::Established
                && p.repl == ReplState::Off
                && !planted!(self, LostSourceCounts);
            if lost_primary || is_worse || is_lost {
                self.note_unstable_targets(volume, new);
            }
            let Some(device) = self.devices.get_mut(&volume) else {
                return;
            };
            if own_up && p.disk == DiskState::UpToDate && p.repl >= ReplState::Established {
                device.met_whole(*peer, &before, primary);
            }
            let Some(pd) = device.peers.get_mut(peer) else {
                continue;
            };
            if before.repl > ReplState::Established && p.repl <= ReplState::Established {
                pd.reconcile = Reconcile::No;
                // What the peer said of its end was of the resync that is over.
                pd.finished_early = None;
                pd.resync_gate = None;
                pd.resync_agreed = false;
            }
            pd.joined_behind = p.repl > ReplState::Off
                && p.disk != DiskState::UpToDate
                && (before.repl == ReplState::Off || pd.joined_behind);
            let forced = after.disk == DiskState::Inconsistent
                && before.disk == DiskState::Inconsistent
                && p.disk == DiskState::UpToDate
                && new
                    .connections
                    .get(peer)
                    .is_some_and(|c| c.peer_role == Role::Primary)
                && old
                    .connections
                    .get(peer)
                    .is_some_and(|c| c.peer_role == Role::Secondary);
            if forced {
                pd.consider_resync = true;
            }
        }
    }

    /// Flags of the superblock that follow from the state (semantics.md, 5.1 points 9 and 13).
    /// True: it has to be written.
    fn finish_metadata_flags(
        &mut self,
        volume: VolumeNr,
        old: &State,
        new: &State,
        graceful: bool,
    ) -> bool {
        let Some(after) = new.devices.get(&volume) else {
            return false;
        };
        let own = after.disk;
        let before_own = old.disk(volume);
        let primary_known = new.role == Role::Primary || new.primary_peer().is_some();
        let received = self.peer_writes_in_flight(volume);
        let keeps_cache = planted!(self, DemotionWithoutFlush);
        let keeps_consistent = planted!(self, InconsistentNotNoted);
        let keeps_current = planted!(self, OutdatedNotNoted);
        let unnoted = planted!(self, PeerOutdatedUnnoted);
        let never_clean = planted!(self, CrashedFlagStays);
        let forgets_quorum = planted!(self, QuorumLossUnnoted);
        let quorum_lost_stays = planted!(self, QuorumLossStays);
        let uncounted = self.options.quorum == Quorum::Off || planted!(self, RestoredQuorumStays);
        let primary_elsewhere = new.connections.iter().any(|(n, c)| {
            c.peer_role == Role::Primary && new.peer_device(volume, *n).disk == DiskState::UpToDate
        });
        let Some(device) = self.devices.get_mut(&volume) else {
            return false;
        };
        let intentional: Vec<NodeId> = device
            .peers
            .iter()
            .filter(|(_, pd)| !pd.options.bitmap)
            .map(|(n, _)| *n)
            .collect();
        let Some(disk) = device.attached_mut() else {
            return false;
        };
        let old_flags = disk.generations.flags;
        let mut flags = old_flags;
        // A disk that is not whole would be no source after a crash: its Primary worked with the
        // data of a peer.
        let whole = match own >= DiskState::Inconsistent {
            true => own > DiskState::Inconsistent,
            false => old_flags.contains(DeviceFlags::CONSISTENT),
        };
        let leaves = graceful && own < DiskState::Negotiating;
        let crashes_as_primary =
            disk.crashed_primary || (new.role == Role::Primary && whole && !leaves);
        // The last superblock of a detach says that nothing is left in the log, and so do later ones.
        if disk.leaving != Some(Leaving::Superblock) && !planted!(self, CleanFlagStays) {
            flags.remove(DeviceFlags::AL_CLEAN);
        }
        let stays = never_clean && old_flags.contains(DeviceFlags::CRASHED_PRIMARY);
        flags.set(DeviceFlags::CRASHED_PRIMARY, crashes_as_primary || stays);
        if own >= DiskState::Inconsistent {
            let partial = own == DiskState::Inconsistent && !keeps_consistent;
            flags.set(DeviceFlags::CONSISTENT, !partial);
            let current = own > DiskState::Outdated
                || keeps_current && old_flags.contains(DeviceFlags::WAS_UP_TO_DATE);
            flags.set(DeviceFlags::WAS_UP_TO_DATE, current);
        } else if matches!(own, DiskState::Failed | DiskState::Detaching) && primary_elsewhere {
            flags.remove(DeviceFlags::WAS_UP_TO_DATE);
        }
        if primary_known {
            flags.insert(DeviceFlags::PRIMARY_IND);
        } else if !received && own >= DiskState::Inconsistent {
            flags.remove(DeviceFlags::PRIMARY_IND);
        }
        flags.set(DeviceFlags::HAVE_QUORUM, after.have_quorum);
        disk.restore_quorum &= !after.quorum || uncounted;
        if new.role == Role::Primary && !after.have_quorum && !forgets_quorum {
            disk.is_left_alone(after);
        } else if after.have_quorum
            && !quorum_lost_stays
            && (new.role == Role::Primary || own == DiskState::UpToDate)
        {
            // A Secondary has been compared with the others and has what they have: a later comparison with one
            // of them would begin a resync for nothing.
            disk.left_alone_ends(new.role);
        }
        flags.set(DeviceFlags::PRIMARY_LOST_QUORUM, disk.primary_lost_quorum);
        let mut changed = flags != old_flags;
        disk.generations.flags = flags;
        if old.role == Role::Primary && new.role != Role::Primary && !keeps_cache {
            // A disk that is not a Primary's is believed to have what it acknowledged: already the
            // first superblock that calls it so comes after a flush.
            disk.writer.flush_data = true;
        }
        changed |= old.members != new.members;
        if before_own != DiskState::Negotiating || own != DiskState::Negotiating {
            for (peer, p) in &after.peers {
                let fences = self
                    .connections
                    .get(peer)
                    .is_some_and(|c| c.net.fencing != crate::options::Fencing::DontCare);
                let old_slot = disk.generations.slot(*peer).flags;
                self.caches_unnoted |= disk.note_connected(*peer, p.repl, own);
                let slot = disk.generations.slot_mut(*peer);
                if p.repl > ReplState::Off && slot.bitmap_index.is_none() {
                    // A tie-breaker counts for quorum once it was seen.
                    slot.flags.insert(PeerFlags::NODE_EXISTS);
                }
                // Of a connected peer the next packet may say something else; after a crash here
                // nobody would know of it.
                let outdated = matches!(p.disk, DiskState::Inconsistent | DiskState::Outdated);
                slot.flags.set(
                    PeerFlags::OUTDATED,
                    outdated && p.repl == ReplState::Off && !unnoted,
                );
                if p.disk >= DiskState::Inconsistent && p.disk != DiskState::DUnknown {
                    slot.flags.insert(PeerFlags::DEVICE_SEEN);
                } else if p.disk == DiskState::Diskless && intentional.contains(peer) {
                    slot.flags.remove(PeerFlags::DEVICE_SEEN);
                }
                slot.flags.set(PeerFlags::FENCING, fences);
                changed |= slot.flags != old_slot;
            }
        }
        if before_own < DiskState::Consistent && own >= DiskState::Consistent {
            device.exposed_uuid = device.current_uuid();
        }
        changed
    }

    /// A target whose source may change unseen (semantics.md, 14.2).
    pub(crate) fn note_unstable_targets(&mut self, volume: VolumeNr, new: &State) {
        let Some(after) = new.devices.get(&volume) else {
            return;
        };
        for (peer, p) in &after.peers {
            if !p.repl.is_sync_target() {
                continue;
            }
            let stable = self
                .peer_uuids(volume, *peer)
                .is_some_and(|u| self.is_stable_set(u));
            if !stable
                && !self.stable_source_present(volume, *peer, new)
                && let Some(pd) = self
                    .devices
                    .get_mut(&volume)
                    .and_then(|d| d.peers.get_mut(peer))
            {
                pd.unstable_resync = true;
            }
        }
    }

    // After actions (semantics.md, 5.2).

    fn after_actions(&mut self, step: &Step) {
        let Step { old, new, graceful } = step;
        self.after_events(old, new);
        // Before anything is compared, and the peer hears what came of it.
        for peer in new.connected().iter() {
            if old.conn(peer) != ConnState::Connected {
                self.tell_generation_of_handshake(peer);
            }
        }
        for volume in new.devices.keys() {
            self.after_in_sync(*volume, old, new);
        }
        self.after_connections(old, new, *graceful);
        for volume in new.devices.keys() {
            self.after_disk(*volume, old, new);
            self.after_replication(*volume, old, new);
        }
        self.after_announcements(old, new);
        self.after_resource(old, new, *graceful);
        self.after_fencing(old, new);
        self.flush_foreign_early(old, new);
        self.primaries_have_come(old, new);
        self.watch_unequal(new);
        self.relabel_targets(old, new);
        self.look_at_ancestors(old, new);
        self.note_votes(new);
    }

    fn after_events(&mut self, old: &State, new: &State) {
        self.tell_step(old, new);
        if (old.role, old.suspended(), old.fail_io) != (new.role, new.suspended(), new.fail_io) {
            self.event(Event::Resource);
        }
        let mut lines = Vec::new();
        if old.role != new.role {
            lines.push((
                None,
                None,
                format!("role: {:?} -> {:?}", old.role, new.role),
            ));
        }
        for (peer, c) in &new.connections {
            let before = old.connections.get(peer).copied().unwrap_or_default();
            if before != *c {
                self.event(Event::Connection(*peer));
                if before.conn != c.conn {
                    lines.push((
                        Some(*peer),
                        None,
                        format!("connection: {:?} -> {:?}", before.conn, c.conn),
                    ));
                }
            }
        }
        for (volume, d) in &new.devices {
            let Some(before) = old.devices.get(volume) else {
                continue;
            };
            if (before.disk, before.have_quorum) != (d.disk, d.have_quorum) {
                self.event(Event::Device(*volume));
                lines.push((
                    None,
                    Some(*volume),
                    format!("disk: {:?} -> {:?}", before.disk, d.disk),
                ));
            }
            for (peer, p) in &d.peers {
                let was = old.peer_device(*volume, *peer);
                if was != *p {
                    self.event(Event::PeerDevice(*peer, *volume));
                    if (was.repl, was.disk) != (p.repl, p.disk) {
                        lines.push((
                            Some(*peer),
                            Some(*volume),
                            format!(
                                "replication: {:?} -> {:?}, peer disk: {:?} -> {:?}",
                                was.repl, p.repl, was.disk, p.disk
                            ),
                        ));
                    }
                }
            }
        }
        for (peer, volume, text) in lines {
            self.log(Level::Info, peer, volume, text);
        }
    }

    /// Connected without a resync and of the same generation: nothing differs (5.2 point 2).
    fn after_in_sync(&mut self, volume: VolumeNr, old: &State, new: &State) {
        let Some(after) = new.devices.get(&volume) else {
            return;
        };
        if after.disk < DiskState::Outdated || after.disk == DiskState::DUnknown {
            return;
        }
        for (peer, p) in &after.peers {
            let before = old.peer_device(volume, *peer);
            let reached = p.repl == ReplState::Established
                && (before.repl == ReplState::Off
                    || (before.disk == DiskState::Diskless && p.disk >= DiskState::Outdated));
            if reached
                && p.disk >= DiskState::Outdated
                && p.disk != DiskState::DUnknown
                && self.same_current(volume, *peer)
                && self.state.peer_device(volume, *peer).repl == ReplState::Established
            {
                let connects = before.repl == ReplState::Off;
                self.forget_differences(volume, *peer, connects);
            }
        }
    }

    fn after_connections(&mut self, old: &State, new: &State, graceful: bool) {
        for (peer, c) in &new.connections {
            let before = old.connections.get(peer).copied().unwrap_or_default();
            if before.conn == c.conn {
                continue;
            }
            match c.conn {
                ConnState::Unconnected if before.conn == ConnState::StandAlone => {
                    let now = self.now;
                    self.timers.set(Timer::Reconnect(*peer), now);
                }
                ConnState::Connecting => {
                    if let Some(conn) = self.connections.get_mut(peer) {
                        conn.connecting = true;
                        self.output(Output::Connect { peer: *peer });
                    }
                }
                ConnState::Timeout
                | ConnState::BrokenPipe
                | ConnState::NetworkFailure
                | ConnState::ProtocolError
                | ConnState::TearDown
                | ConnState::Disconnecting => {
                    self.connection_lost(*peer, before.conn, c.conn, graceful);
                }
                ConnState::Connected | ConnState::StandAlone | ConnState::Unconnected => {}
            }
        }
    }

    /// The cleanup of a lost connection (semantics.md, 9.3): streams first, then what was
    /// received, then what was sent.
    fn connection_lost(
        &mut self,
        peer: NodeId,
        before: ConnState,
        after: ConnState,
        graceful: bool,
    ) {
        let agreed = graceful && before == ConnState::Connected;
        let end = match agreed {
            true => LinkEnd::Agreed,
            false => LinkEnd::Flushed,
        };
        self.lose_link(peer, end);
        self.twopc_peer_lost(peer);
        let was_up = before >= ConnState::Connecting;
        let mut drains = false;
        if let Some(conn) = self.connections.get_mut(&peer) {
            drains = conn.draining;
            conn.draining |= was_up;
            conn.was_established |= before == ConnState::Connected;
        }
        if was_up {
            // Answers by `connection_drained`, at once if nothing is in flight.
            self.drain_connection(peer);
        } else if !drains {
            self.connection_cleaned(peer);
        }
        // Lost before, and the operator disconnects while that still drains: it ends as it would have.
        let _ = after;
    }

    /// Nothing that the lost link had received is in flight any more.
    pub(crate) fn connection_drained(&mut self, peer: NodeId) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        if !conn.draining {
            return;
        }
        conn.draining = false;
        self.numbers_begin_anew(peer);
        // A request is completed only after the generation that leaves the dead peer out is on
        // disk; `settle_new_uuid` writes it before held completions go.
        let ahead = self.was_ahead(peer);
        let unknown = self.unsettled_towards(peer) || self.verify_found(peer) || ahead;
        self.lose_requests(peer);
        let early = self
            .connections
            .get(&peer)
            .is_some_and(|c| c.net.protocol != Protocol::C);
        if unknown && (early || self.last_was_kernel(peer)) {
            // It cannot tell by marks alone that it misses something: the generation has to. What is
            // acknowledged before the peer has it may be lost with this disk before the next write.
            self.want_new_uuid_now();
        }
        self.run_handler("disconnected", None, Some(peer));
        self.connection_cleaned(peer);
    }

    fn connection_cleaned(&mut self, peer: NodeId) {
        let conn_state = self.state.conn(peer);
        let was_established = self
            .connections
            .get_mut(&peer)
            .is_some_and(|c| mem::take(&mut c.was_established));
        if conn_state == ConnState::Disconnecting {
            self.hard_change(Change::new().conn(peer, ConnState::StandAlone));
            self.connection_is_down(peer);
        } else if conn_state != ConnState::StandAlone {
            self.hard_change(Change::new().conn(peer, ConnState::Unconnected));
            let pause = if was_established {
                RECONNECT_AFTER_LOSS
            } else {
                RECONNECT_AFTER_FAILURE
            };
            self.timers.set(Timer::Reconnect(peer), self.now + pause);
        }
        self.notify_lost_primary(peer);
        self.reconcile_settled();
    }

    fn after_disk(&mut self, volume: VolumeNr, old: &State, new: &State) {
        let Some(after) = new.devices.get(&volume) else {
            return;
        };
        let before = old.disk(volume);
        if before == after.disk {
            return;
        }
        match after.disk {
            DiskState::Failed => {
                self.tell_of_disk_error(volume);
                self.begin_detach(volume);
            }
            DiskState::Detaching => self.begin_detach(volume),
            DiskState::Diskless if new.role == Role::Primary => self.legacy_label(volume),
            _ => {}
        }
        if after.disk == DiskState::Negotiating {
            // What was said before does not count for the comparison (8.3 step 8).
            if let Some(device) = self.devices.get_mut(&volume) {
                for pd in device.peers.values_mut() {
                    pd.uuids = None;
                    pd.negotiation = None;
                }
            }
        }
        if before == DiskState::Attaching && after.disk > DiskState::Attaching {
            for peer in new.connected().iter() {
                if new.peer_device(volume, peer).repl == ReplState::Off {
                    continue;
                }
                self.send_sizes(peer, volume);
                self.send_uuids(peer, volume, UuidFlags::empty());
                self.send_state(peer, volume, new);
            }
            self.present_volume(volume);
        }
        if before == DiskState::Negotiating && after.disk != DiskState::Negotiating {
            self.attach_finished(volume);
        }
    }

    /// The handler may end the machine, so it is called only where `on-io-error` says so.
    fn tell_of_disk_error(&mut self, volume: VolumeNr) {
        let disk = self.devices.get(&volume).and_then(|d| d.disk.as_ref());
        if disk.is_some_and(|d| d.options.on_io_error == OnIoError::CallLocalIoError) {
            self.run_handler("local-io-error", Some(volume), None);
        }
    }

    fn after_replication(&mut self, volume: VolumeNr, old: &State, new: &State) {
        let Some(after) = new.devices.get(&volume) else {
            return;
        };
        for (peer, p) in &after.peers {
            let before = old.peer_device(volume, *peer);
            if before.disk < DiskState::Negotiating && p.disk == DiskState::Negotiating {
                self.answer_attaching_peer(volume, *peer);
            }
            self.legacy_disk_lost(volume, *peer, before.disk, p.disk);
            self.only_copy_remains(volume, before.disk, p.disk);
            if p.replicates() && !before.replicates() {
                self.send_dagtag(*peer);
            }
            if before.repl == p.repl {
                continue;
            }
            if let Some(pd) = self.peer_device_mut(volume, *peer) {
                pd.replicates_early = false;
            }
            if before.repl.is_sync_target() && !p.repl.is_sync_target() {
                self.target_left(volume, *peer);
            }
            self.note_unasked(volume, *peer, before.repl, p.repl);
            match p.repl {
                ReplState::WfSyncUuid => self.legacy_target_waits(volume, *peer),
                ReplState::WfBitmapS | ReplState::WfBitmapT => {
                    if !self.is_lockstep(*peer) && crate::legacy::names_resync_first(&before, p) {
                        self.send_state(*peer, volume, new);
                    }
                    if p.repl == ReplState::WfBitmapS {
                        self.prepare_resync_source(volume, *peer);
                    } else {
                        self.prepare_resync_target(volume, *peer);
                    }
                }
                ReplState::Off if after.disk >= DiskState::Negotiating => {
                    self.full_sync_cut_short(volume, *peer, before.repl);
                }
                ReplState::StartingSyncS => self.start_full_sync_source(volume, *peer),
                ReplState::StartingSyncT => self.start_full_sync_target(volume, *peer),
                ReplState::VerifyS => self.verify_entered(volume, *peer, true),
                ReplState::VerifyT => self.verify_entered(volume, *peer, false),
                ReplState::SyncSource | ReplState::PausedSyncS if !before.repl.is_sync() => {
                    self.resync_entered(volume, *peer);
                }
                ReplState::SyncTarget | ReplState::PausedSyncT => {
                    if before.repl.is_sync_target() {
                        if p.repl == ReplState::SyncTarget {
                            self.resync_resumed(volume, *peer);
                        }
                    } else {
                        self.enter_target(volume, *peer);
                    }
                }
                _ => {}
            }
        }
    }

    /// State and UUID packets that a change calls for (5.2 points 3, 5, 8, 11).
    fn after_announcements(&mut self, old: &State, new: &State) {
        let became_stable = !old.stable() && new.stable();
        let became_unstable = old.stable() && !new.stable() && !planted!(self, UnstableUntold);
        for (volume, after) in &new.devices {
            let Some(before) = old.devices.get(volume) else {
                continue;
            };
            let finished_target = after.peers.iter().any(|(n, p)| {
                before.peers.get(n).is_some_and(|b| b.repl.is_sync_target())
                    && p.repl == ReplState::Established
            });
            for (peer, p) in &after.peers {
                if p.repl < ReplState::Established {
                    continue;
                }
                let was = before.peers.get(peer).copied().unwrap_or_default();
                let has_disk = after.disk > DiskState::Attaching;
                let mut uuids = None;
                if finished_target {
                    uuids = Some(UuidFlags::empty());
                }
                if self.told_as_target(*volume, *peer) && was.repl == ReplState::Off {
                    uuids = Some(UuidFlags::empty());
                }
                let target_of = was.repl.is_sync_target();
                if has_disk && (became_stable || (finished_target && new.stable())) {
                    let demoted = old.connections.get(peer).is_some_and(|c| {
                        c.peer_role == Role::Primary && new.conn(*peer) == ConnState::Connected
                    });
                    let skip = target_of || (became_stable && demoted);
                    if !skip {
                        uuids = Some(UuidFlags::GOT_STABLE);
                    } else if became_stable && !self.is_lockstep(*peer) {
                        // The one that was Primary is told all the same, without the question.
                        uuids = Some(UuidFlags::empty());
                    }
                } else if has_disk && became_unstable {
                    uuids = Some(uuids.unwrap_or(UuidFlags::empty()));
                }
                let kernel = !self.is_lockstep(*peer);
                let silent = self.is_legacy(*peer)
                    && ([before.disk, after.disk].contains(&DiskState::Attaching)
                        || crate::legacy::is_silent(was.repl, p.repl)
                        || self.legacy_asks_for_resync(*volume) && p.repl == was.repl)
                    || kernel && told::later(&was, p);
                // The state that answered its attach may have come before a kernel was ready for it: it compares
                // generations when it hears one that comes after its own.
                let settled = kernel
                    && was.disk == DiskState::Negotiating
                    && p.disk != DiskState::Negotiating;
                let tells = told::wants_state(&was, p, before.disk, after.disk)
                    || before.have_quorum != after.have_quorum
                    || settled && !self.is_legacy(*peer);
                let owed = self.owes_pause(*peer, *volume, (&was, p), silent);
                let tells = tells && !silent || owed;
                // Whoever gets the UUIDs of a stable node takes its own disk for what that node's
                // is: it must not be what that was before.
                let worse = after.disk < before.disk && !planted!(self, UuidsBeforeWorseState);
                if tells && worse {
                    self.send_state(*peer, *volume, new);
                }
                if let Some(flags) = uuids {
                    self.send_uuids(*peer, *volume, flags);
                }
                if tells && !worse {
                    self.send_state(*peer, *volume, new);
                }
                if self.is_kernel(*peer) && told::again(&was, p) {
                    self.send_state(*peer, *volume, new);
                }
            }
        }
    }

    /// A resync of an 8.4 runs, and somebody who pauses it has changed their mind in a step that is not told.
    fn owes_pause(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        (before, after): (&PeerDeviceState, &PeerDeviceState),
        silent: bool,
    ) -> bool {
        let Some(pd) = self.peer_device_mut(volume, peer) else {
            return false;
        };
        pd.pause_untold |= silent && told::pauses(before) != told::pauses(after);
        let known = after.repl.is_sync() || !silent;
        known && core::mem::take(&mut pd.pause_untold)
    }

    fn after_resource(&mut self, old: &State, new: &State, graceful: bool) {
        if old.role == Role::Primary && new.role == Role::Secondary {
            self.after_demotion(new);
        }
        if old.role != Role::Primary && new.role == Role::Primary {
            self.set_primary_bit(true);
            // The commit says it already; a kernel tells it all the same.
            for peer in self.kernel_peers() {
                self.send_role(peer, new);
            }
        }
        for (peer, c) in &new.connections {
            let before = old.connections.get(peer).copied().unwrap_or_default();
            if before.peer_role == Role::Primary && c.peer_role == Role::Secondary {
                self.write_all_bitmaps();
            }
            if before.peer_role != Role::Primary && c.peer_role == Role::Primary {
                self.look_for_source(*peer, new);
            }
        }
        // A lost member or an open question whether a Primary is left somewhere (10.7).
        let lost_member = new.connections.iter().any(|(n, c)| {
            old.conn(*n) == ConnState::Connected
                && c.conn < ConnState::Connected
                && c.conn != ConnState::TearDown
                && !graceful
                && new.members.contains(*n)
        });
        let fell = new
            .devices
            .iter()
            .any(|(v, d)| d.disk == DiskState::Consistent && old.disk(*v) == DiskState::UpToDate);
        let regained = new.role == Role::Primary
            && new.devices.iter().any(|(v, d)| {
                d.data_accessible() && old.devices.get(v).is_some_and(|o| !o.data_accessible())
            })
            && (old.role == Role::Primary || !self.kernel_peers().is_empty());
        self.settle_told(new);
        if lost_member && !planted!(self, LostMemberNotAsked) || fell || regained {
            self.schedule_empty_twopc();
        }
        if new.susp_uuid && !old.susp_uuid {
            self.want_new_uuid_now();
        }
        if new.suspended() && !old.suspended() {
            self.postpone_waiting();
        }
        for (volume, d) in &new.devices {
            for (peer, p) in &d.peers {
                let was = old.peer_device(*volume, *peer);
                if was.disk == DiskState::UpToDate
                    && matches!(p.disk, DiskState::Failed | DiskState::Inconsistent)
                    && p.repl > ReplState::Off
                {
                    self.want_new_uuid_now();
                }
            }
        }
        if new.role == Role::Primary {
            let lost = new.devices.iter().filter(|(v, d)| {
                let had = |o: &crate::state::DeviceState| o.data_accessible();
                !d.data_accessible() && old.devices.get(v).is_some_and(had)
            });
            for volume in lost.map(|(v, _)| *v).collect::<Vec<_>>() {
                self.run_handler("pri-on-incon-degr", Some(volume), None);
            }
        }
        if old.devices.iter().any(|(v, d)| {
            d.have_quorum
                && new.devices.get(v).is_some_and(|n| !n.have_quorum)
                && new.role == Role::Primary
        }) {
            self.run_handler("quorum-lost", None, None);
        }
        self.admission_changed();
    }

    /// A Primary is a neighbour now, so that a resync sees all its writes: what an unstable one
    /// could not finish is tried again (semantics.md, 14.6).
    pub(crate) fn look_for_source(&mut self, primary: NodeId, new: &State) {
        for (volume, d) in &new.devices {
            let behind = matches!(d.disk, DiskState::Inconsistent | DiskState::Outdated);
            let silent = planted!(self, SourceNotSought);
            let busy = d.peers.values().any(|p| p.repl > ReplState::Established);
            if silent || !behind || (busy && !crate::look_again::only_serves(d)) {
                continue;
            }
            let source = d.peers.iter().find(|(peer, p)| {
                **peer != primary
                    && p.repl == ReplState::Established
                    && p.disk == DiskState::UpToDate
            });
            if let Some((peer, _)) = source {
                let mut flags = UuidFlags::RESYNC;
                // A kernel that has a Primary itself compares only for this reason.
                let diskless = new.peer_device(*volume, primary).disk == DiskState::Diskless;
                flags.set(UuidFlags::DISKLESS_PRIMARY, diskless);
                self.send_uuids(*peer, *volume, flags);
                self.compare_now(*peer, *volume);
            }
        }
    }

    fn after_demotion(&mut self, new: &State) {
        self.explicit_primary = false;
        self.turn_ended();
        self.discard_what_lost();
        let flushes = !planted!(self, DemotionWithoutFlush);
        for device in self.devices.values_mut() {
            if let Some(disk) = device.attached_mut() {
                // A disk that is not a Primary's is believed to have what it acknowledged.
                disk.writer.flush_data = flushes;
            }
        }
        self.set_primary_bit(false);
        self.write_all_bitmaps();
        for peer in self.kernel_peers() {
            if self.connections.get(&peer).is_some_and(|c| !c.is_legacy()) {
                self.send(
                    peer,
                    Stream::Data,
                    VolumeNr::NONE,
                    Packet::State(role_only(Role::Secondary)),
                );
            }
        }
        for peer in new.connected().iter() {
            if self.is_established(peer) {
                self.send_role(peer, new);
            }
        }
    }

    /// Connected peers that are no Lockstep nodes.
    pub(crate) fn kernel_peers(&self) -> Vec<NodeId> {
        self.established_peers()
            .iter()
            .filter(|peer| !self.is_lockstep(*peer))
            .collect()
    }

    /// The other end of the present link is a kernel 9.
    pub(crate) fn is_kernel(&self, peer: NodeId) -> bool {
        self.connections
            .get(&peer)
            .is_some_and(|c| c.protocol() != 0 && !c.is_lockstep() && !c.is_legacy())
    }

    /// The other end of the present link is a Lockstep node.
    pub(crate) fn is_lockstep(&self, peer: NodeId) -> bool {
        self.connections.get(&peer).is_some_and(|c| c.is_lockstep())
    }

    /// Sends this node's state for a volume as `state` has it (semantics.md, 5.2).
    pub(crate) fn send_state(&mut self, peer: NodeId, volume: VolumeNr, state: &State) {
        let packet = self.state_packet(peer, volume, state);
        self.send(peer, Stream::Data, volume, Packet::State(packet));
    }
}

/// The state word without a volume (wire.md, 4.2): only the role means something.
fn role_only(role: Role) -> PeerState {
    PeerState {
        role,
        peer: Role::Unknown,
        conn: ConnState::StandAlone,
        repl: ReplState::Off,
        disk: DiskState::Diskless,
        pdsk: DiskState::Diskless,
        susp: false,
        susp_nod: false,
        susp_fen: false,
        aftr_isp: false,
        peer_isp: false,
        user_isp: false,
        quorum: false,
    }
}

/// Lost contact to peer data (semantics.md, 2.1).
fn lost_contact(before: DiskState, after: DiskState) -> bool {
    matches!(
        before,
        DiskState::Negotiating
            | DiskState::Inconsistent
            | DiskState::Consistent
            | DiskState::UpToDate
    ) && (after < DiskState::Inconsistent
        || matches!(after, DiskState::DUnknown | DiskState::Outdated))
}
