//! The connect without a two-phase commit, and the step of a resync that only 8.4 has.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, Packet, ReplState, Role};

use crate::before_resync::ResyncGate;
use crate::command::ErrorCode;
use crate::connection::Phase;
use crate::device::AfterMeta;
use crate::event::Stream;
use crate::generation::Rotation;
use crate::resource::Resource;
use crate::time::Duration;
use crate::timers::Timer;
use crate::transition::Change;
use crate::twopc::Transaction;
use crate::validity::Refusal;

impl Resource {
    /// `P_PROTOCOL` was exchanged: the volumes' packets follow, each side decides by itself.
    pub(crate) fn legacy_handshake(&mut self, peer: NodeId) {
        let ready = self.state.conn(peer) == ConnState::Connecting
            && self.legacy_phase(peer) == Some(Phase::Ready);
        if !ready {
            return;
        }
        if !self.may_connect_now(peer) || self.twopc.current.is_some() {
            let at = self.now + Duration::from_millis(50);
            self.timers.set(Timer::ConnectTwopc(peer), at);
            return;
        }
        let role = self.state.role;
        if let Some(link) = self
            .connections
            .get_mut(&peer)
            .and_then(|c| c.link.as_mut())
        {
            link.sent_role = Some(role);
        }
        self.send_handshake(peer);
        if self.devices.is_empty() {
            self.legacy_connect(peer);
        }
    }

    fn legacy_phase(&self, peer: NodeId) -> Option<Phase> {
        let conn = self.connections.get(&peer).filter(|c| c.is_legacy())?;
        conn.link.as_ref().map(|link| link.phase.clone())
    }

    /// A handshake without a two-phase commit is under way with the volumes' packets sent.
    pub(crate) fn in_legacy_handshake(&self) -> bool {
        self.connections.values().any(|c| {
            c.is_legacy()
                && c.link
                    .as_ref()
                    .is_some_and(|l| l.phase == Phase::Ready && l.sent_role.is_some())
        })
    }

    /// The decision for each volume may be complete: the connection stands, or it is refused.
    pub(crate) fn legacy_connect(&mut self, peer: NodeId) {
        let started = self.legacy_phase(peer) == Some(Phase::Ready)
            && self.state.conn(peer) == ConnState::Connecting
            && self.handshake_ready(peer);
        if !started {
            return;
        }
        if self.changed_since_handshake(peer) {
            let text = "the state changed during the handshake; connecting again";
            self.log(crate::report::Level::Info, Some(peer), None, text.into());
            self.drop_connection(peer, ConnState::NetworkFailure);
            return;
        }
        let change = self.connect_change(peer, Role::Unknown);
        let verdict = self
            .handshake_verdict(peer)
            .and_then(|()| self.check_change(&change).map(|_| ()));
        if let Err(refusal) = verdict {
            self.handshake_refused(peer, &refusal);
            return;
        }
        self.connect_committed(peer);
        self.hard_change(change);
    }

    pub(crate) fn handshake_refused(&mut self, peer: NodeId, refusal: &Refusal) {
        let passes = matches!(
            refusal.code,
            ErrorCode::HANDSHAKE_RETRY
                | ErrorCode::IN_TRANSIENT_STATE
                | ErrorCode::CONCURRENT_ST_CHG
        );
        if passes {
            self.drop_connection(peer, ConnState::NetworkFailure);
        } else {
            let text = format!("the connection was refused: {}", refusal.text);
            self.go_standalone(peer, text);
        }
    }

    /// The peer decides with what was sent: it must still hold.
    fn changed_since_handshake(&self, peer: NodeId) -> bool {
        let role = self
            .connections
            .get(&peer)
            .and_then(|c| c.link.as_ref())
            .and_then(|l| l.sent_role);
        role != Some(self.state.role)
            || self.devices.iter().any(|(volume, device)| {
                device
                    .peers
                    .get(&peer)
                    .is_some_and(|pd| pd.sent_disk != self.state.disk(*volume))
            })
    }

    /// Whether the link to this peer speaks 8.4.
    pub(crate) fn is_legacy(&self, peer: NodeId) -> bool {
        self.connections.get(&peer).is_some_and(|c| c.is_legacy())
    }

    // Resync (semantics.md, 12.10).

    /// This source has the target's bitmap: the resync gets a UUID, which the target waits for.
    pub(crate) fn legacy_source_starts(&mut self, volume: VolumeNr, peer: NodeId) {
        let mut rng = self.rng.clone();
        let unnamed = planted!(self, WholeCopyUnnamed) && self.slot_uuid(volume, peer).is_zero();
        let theirs = self
            .peer_uuids(volume, peer)
            .filter(|_| !unnamed)
            .map_or(Uuid::ZERO, |u| u.current);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        disk.generations.sync_uuid_as_source(peer, theirs, &mut rng);
        self.rng = rng;
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.sync_uuid_due = true;
        }
        let uuid = self.slot_uuid(volume, peer);
        if planted!(self, SyncUuidEarly) {
            self.sync_uuid_durable(volume, peer, uuid);
            self.write_superblock(volume);
            return;
        }
        self.after_superblock(volume, AfterMeta::SyncUuid(peer, uuid));
    }

    /// A resync's UUID is durable here. That of one that a broken link has ended is not told any more, and
    /// one that began again with the same UUID is told once.
    pub(crate) fn sync_uuid_durable(&mut self, volume: VolumeNr, peer: NodeId, uuid: Uuid) {
        let repl = self.state.peer_device(volume, peer).repl;
        let is_source = matches!(repl, ReplState::SyncSource | ReplState::PausedSyncS);
        if !is_source || !self.is_legacy(peer) || self.slot_uuid(volume, peer) != uuid {
            return;
        }
        let pd = self.peer_device_mut(volume, peer);
        if pd.is_some_and(|pd| core::mem::take(&mut pd.sync_uuid_due)) {
            self.send(peer, Stream::Data, volume, Packet::SyncUuid(uuid));
        }
    }

    pub(crate) fn sync_uuid_received(&mut self, peer: NodeId, volume: VolumeNr, uuid: Uuid) {
        let repl = self.state.peer_device(volume, peer).repl;
        let asks = |t: &Transaction| t.wish.is_some() && t.waiting.contains(peer);
        let asks = self.twopc.current.as_ref().is_some_and(asks);
        if repl == ReplState::StartingSyncT || repl == ReplState::Established && asks {
            // The bitmap is still being written, or the peer's yes is behind it on the other stream.
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.early_sync_uuid = Some(uuid);
            }
            return;
        }
        if self.state.disk(volume) < DiskState::Inconsistent {
            // The disk failed meanwhile, and the source has not heard of it.
            return;
        }
        if !matches!(repl, ReplState::WfSyncUuid | ReplState::Behind) {
            let text = format!("the UUID of a resync in {repl:?}");
            self.legacy_protocol_error(peer, volume, text);
            return;
        }
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.generations.sync_uuid_as_target(peer, uuid);
        }
        let pd = self.peer_device_mut(volume, peer);
        if pd.is_some_and(|pd| core::mem::take(&mut pd.resync_agreed)) {
            self.hard_change(Change::new().repl(volume, peer, ReplState::SyncTarget));
        } else {
            self.before_resync_target(volume, peer, ResyncGate::SyncUuid);
        }
    }

    /// This target waits for the UUID of the resync, which may be here.
    pub(crate) fn legacy_target_waits(&mut self, volume: VolumeNr, peer: NodeId) {
        let early = self
            .peer_device_mut(volume, peer)
            .and_then(|pd| pd.early_sync_uuid.take());
        if let Some(uuid) = early {
            self.sync_uuid_received(peer, volume, uuid);
        }
    }

    /// All bits are set on both sides: a full sync with 8.4 needs no exchange of bitmaps.
    pub(crate) fn legacy_full_sync(&mut self, volume: VolumeNr, peer: NodeId) {
        match self.state.peer_device(volume, peer).repl {
            ReplState::StartingSyncS => {
                self.before_resync_source(volume, peer, ResyncGate::FullSync);
            }
            ReplState::StartingSyncT => {
                self.hard_change(Change::new().repl(volume, peer, ReplState::WfSyncUuid));
            }
            _ => {}
        }
    }

    /// The peer is Primary and its disk is gone: what it writes from now on is only here, and
    /// gets a generation that its disk does not know (semantics.md, 12.4 point 3).
    pub(crate) fn legacy_disk_lost(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        before: DiskState,
        after: DiskState,
    ) {
        let usable = |d: DiskState| d >= DiskState::Inconsistent && d != DiskState::DUnknown;
        let primary = self
            .state
            .connections
            .get(&peer)
            .is_some_and(|c| c.peer_role == Role::Primary);
        let lost = usable(before) && after < DiskState::Inconsistent;
        if lost && primary {
            self.legacy_label_peers(volume, peer);
        }
    }

    /// The peer writes without a disk. If that went together with the link nobody has labelled what it writes.
    pub(crate) fn legacy_diskless_writes(&mut self, volume: VolumeNr, peer: NodeId) {
        if self.is_legacy(peer) {
            self.legacy_label_peers(volume, peer);
        }
    }

    /// A new generation for what the peer writes without a disk, if there is none yet.
    fn legacy_label_peers(&mut self, volume: VolumeNr, peer: NodeId) {
        let p = self.state.peer_device(volume, peer);
        if planted!(self, LegacyLossUnlabelled)
            || !self.is_legacy(peer)
            || p.repl < ReplState::Established
            || self.state.disk(volume) != DiskState::UpToDate
            || !self.slot_uuid(volume, peer).is_zero()
        {
            return;
        }
        let views = self.peer_views(volume);
        let dagtag = self.io.dagtag;
        let mut rng = self.rng.clone();
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let rotation = Rotation {
            peers: &views,
            weak: NodeMask::of(peer),
            dagtag,
        };
        disk.generations
            .new_current(&rotation, Role::Secondary, &mut rng);
        self.rng = rng;
        self.keep_last_copy(volume);
        self.after_superblock(volume, AfterMeta::SpreadUuids);
    }

    /// This Primary's disk has gone. The 8.4 peer labels what is written from now on as soon as it
    /// agrees, and its word may come before the answer, while there was a disk here: without it the
    /// old disk would pass for what the applications see.
    pub(crate) fn legacy_label(&mut self, volume: VolumeNr) {
        let Some(peer) = self.legacy_peer() else {
            return;
        };
        let p = self.state.peer_device(volume, peer);
        let (me, good) = (self.node_id, p.disk == DiskState::UpToDate);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let exposed = device.exposed_uuid;
        let labelled = device
            .peers
            .get(&peer)
            .and_then(|pd| pd.uuids.as_ref())
            .filter(|set| set.slot(me).same_generation(exposed) && !exposed.is_zero())
            .map(|set| set.current);
        if let Some(current) = labelled.filter(|_| good && p.repl >= ReplState::Established) {
            device.exposed_uuid = current;
        }
    }

    fn legacy_protocol_error(&mut self, peer: NodeId, volume: VolumeNr, text: String) {
        self.log(crate::report::Level::Error, Some(peer), Some(volume), text);
        self.drop_connection(peer, ConnState::ProtocolError);
    }

    /// The target of a resync with an 8.4 source has everything.
    pub(crate) fn legacy_target_ends(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(source) = self.peer_uuids(volume, peer).cloned() else {
            return;
        };
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.generations.resync_ends_as_target_84(peer, &source);
            disk.crashed_primary = false;
        }
        self.legacy_sets_are_equal(volume, peer);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.resync_ready = false;
        }
        self.after_superblock(volume, AfterMeta::ResyncEnd(peer));
    }

    /// The 8.4 target of a resync says that it has everything.
    pub(crate) fn legacy_source_ends(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.generations.resync_ends_as_source(peer);
            self.write_superblock(volume);
        }
        self.legacy_sets_are_equal(volume, peer);
    }

    /// After a resync both nodes have the same set, and neither tells the other. The next one may
    /// go the other way, and takes over what is known of the source.
    fn legacy_sets_are_equal(&mut self, volume: VolumeNr, peer: NodeId) {
        let me = usize::from(self.node_id.0);
        let Some(disk) = self.devices.get(&volume).and_then(|d| d.attached()) else {
            return;
        };
        let (current, history) = (disk.generations.current, disk.generations.history);
        if let Some(set) = self
            .peer_device_mut(volume, peer)
            .and_then(|pd| pd.uuids.as_mut())
        {
            set.current = current.without_primary_bit();
            set.history = history;
            set.bitmap[me] = Uuid::ZERO;
        }
    }

    /// An 8.4 source ends a resync with the target's state only if it has all acks by then. They
    /// go on the other stream: a ping behind them tells when they have arrived (wire.md, 3).
    pub(crate) fn legacy_await_acks(&mut self, volume: VolumeNr, peer: NodeId) {
        if planted!(self, LegacyAcksNotAwaited) {
            self.tell_resync_end(volume, peer);
            return;
        }
        let link = self
            .connections
            .get_mut(&peer)
            .and_then(|c| c.link.as_mut());
        if let Some(link) = link {
            // A ping that is under way already went before the last acks.
            let answers = if link.ping_outstanding { 2 } else { 1 };
            link.ends_after_pings.push((volume, answers));
            self.ping(peer);
        }
    }

    /// A ping was answered.
    pub(crate) fn legacy_acks_arrived(&mut self, peer: NodeId) {
        let link = self
            .connections
            .get_mut(&peer)
            .and_then(|c| c.link.as_mut());
        let Some(link) = link.filter(|l| !l.ends_after_pings.is_empty()) else {
            return;
        };
        let mut due = Vec::new();
        link.ends_after_pings.retain_mut(|(volume, answers)| {
            *answers -= 1;
            if *answers == 0 {
                due.push(*volume);
            }
            *answers > 0
        });
        let more = !link.ends_after_pings.is_empty();
        for volume in due {
            self.tell_resync_end(volume, peer);
        }
        if more {
            self.ping(peer);
        }
    }

    /// A generation that an 8.4 peer would not follow is not made while it has all data: it is
    /// labelled when the peer is lost.
    pub(crate) fn legacy_follows(&self, volume: VolumeNr) -> bool {
        if planted!(self, LegacyFollowsIgnored) {
            return false;
        }
        self.legacy_peer().is_some_and(|peer| {
            let p = self.state.peer_device(volume, peer);
            p.repl >= ReplState::Established
                && matches!(
                    p.disk,
                    DiskState::Consistent | DiskState::UpToDate | DiskState::Negotiating
                )
        })
    }

    /// An 8.4 peer attaches a disk, and both compare what they said: a generation made meanwhile
    /// would come too late, a write without one would be missed.
    pub(crate) fn legacy_negotiates(&self) -> bool {
        self.legacy_peer().is_some_and(|peer| {
            let volumes = self.state.devices.values();
            volumes
                .filter_map(|d| d.peers.get(&peer))
                .any(|p| p.repl >= ReplState::Established && p.disk == DiskState::Negotiating)
        })
    }

    /// The end of a resync is the target's state. Its UUIDs come before that, and if the state is
    /// lost, the resync's UUID in the slot is what tells (semantics.md, 13.3 rule 35).
    /// A target that has lost its disk meanwhile, and attaches it, may never have heard how the resync is called.
    pub(crate) fn legacy_is_source_of(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let p = self.state.peer_device(volume, peer);
        let source = matches!(p.repl, ReplState::SyncSource | ReplState::PausedSyncS);
        let attaches = p.disk < DiskState::Inconsistent
            && self.out_of_sync_blocks(volume, peer) > 0
            && !planted!(self, SlotGoesWithDisk);
        self.is_legacy(peer) && (source || attaches)
    }

    /// Connections besides this one, of which an 8.4 peer knows nothing.
    pub(crate) fn has_other_connections(&self, peer: NodeId) -> bool {
        let others: Vec<&NodeId> = self.connections.keys().filter(|n| **n != peer).collect();
        !others.is_empty()
    }
}
