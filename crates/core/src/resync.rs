//! The frame of a resync: what has to be durable before it starts and when it ends, and how its
//! end changes generations and disk states (semantics.md, 19.2, 19.8 and 12.10).
//!
//! The requests in between are the data path's.

use alloc::format;

use lockstep_format::disk::v09::PeerFlags;
use lockstep_format::units::{NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState, Role, UuidFlags};

use crate::before_resync::ResyncGate;
use crate::command::ErrorCode;
use crate::compare;
use crate::data::BitmapThen;
use crate::device::{AfterMeta, PeerDevice};
use crate::generation::Rotation;
use crate::report::Level;
use crate::resource::Resource;
use crate::rule::Rule;
use crate::state::ReplSets;
use crate::timers::Timer;
use crate::transition::Change;
use crate::uuids::{PeerUuids, is_real};
use crate::validity::Refusal;

impl Resource {
    /// Bitmap exchange begins, this node is source.
    pub(crate) fn prepare_resync_source(&mut self, volume: VolumeNr, peer: NodeId) {
        self.send_bitmap(volume, peer);
    }

    /// Bitmap exchange begins, this node is target: it waits for the source's bitmap.
    pub(crate) fn prepare_resync_target(&mut self, volume: VolumeNr, peer: NodeId) {
        self.source_replaces_writes(volume, peer);
        self.await_bitmap(volume, peer);
    }

    /// Both bitmaps are one (called by the data path): the resync proper begins.
    pub(crate) fn bitmap_exchanged(&mut self, volume: VolumeNr, peer: NodeId) {
        let legacy = self.is_legacy(peer);
        let repl = match self.state.peer_device(volume, peer).repl {
            ReplState::WfBitmapS => ReplState::SyncSource,
            ReplState::WfBitmapT if legacy => ReplState::WfSyncUuid,
            ReplState::WfBitmapT => ReplState::SyncTarget,
            _ => return,
        };
        let mut change = Change::new().repl(volume, peer, repl);
        if repl == ReplState::SyncSource {
            // What was not sent meanwhile has no mark before it is settled, and that may be behind the end.
            if !planted!(self, ExchangeMarksUntold) {
                self.tell_marks(volume, peer);
            }
            // Also where the resync starts paused: writes go to the peer from now on.
            change = change.peer_disk(volume, peer, DiskState::Inconsistent);
        }
        self.hard_change(change);
        if legacy && repl == ReplState::SyncSource {
            self.legacy_source_starts(volume, peer);
        }
        let early = self
            .peer_device_mut(volume, peer)
            .and_then(|pd| pd.finished_early.take())
            .filter(|_| !planted!(self, EarlyEndIgnored));
        if let Some(disk) = early {
            self.resync_finished_by_peer(volume, peer, disk);
        }
    }

    /// SyncTarget or PausedSyncT is entered: first the disk is known to be Inconsistent, then
    /// data may come.
    pub(crate) fn enter_target(&mut self, volume: VolumeNr, peer: NodeId) {
        if self.is_legacy(peer) {
            // Its UUID came with the start.
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.unstable_resync = false;
                pd.resync_ready = false;
            }
            self.after_superblock(volume, AfterMeta::ResyncStart(peer));
            return;
        }
        let views = self.peer_views(volume);
        let dagtag = self.io.dagtag;
        let source = self.peer_uuids(volume, peer).cloned().unwrap_or_default();
        let stable = self.is_stable_set(&source);
        let unstable = !stable && !self.stable_source_present(volume, peer, &self.state);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let rotation = Rotation {
            peers: &views,
            weak: NodeMask::EMPTY,
            dagtag,
        };
        disk.generations.give_up_vote(&source);
        let start = disk.generations.resync_starts_as_target(&source, &rotation);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.resync_start_uuid = start;
            pd.unstable_resync = unstable;
            pd.resync_ready = false;
        }
        self.note_source_unwritten(volume, peer);
        self.after_superblock(volume, AfterMeta::ResyncStart(peer));
        if planted!(self, TargetStartsEarly) {
            self.resync_target_ready(volume, peer);
        }
    }

    /// The disk is known to be Inconsistent, durably.
    pub(crate) fn resync_target_ready(&mut self, volume: VolumeNr, peer: NodeId) {
        if !self.state.peer_device(volume, peer).repl.is_sync_target() {
            return;
        }
        let Some(pd) = self.peer_device_mut(volume, peer) else {
            return;
        };
        if pd.resync_ready {
            return;
        }
        pd.resync_ready = true;
        self.resync_entered(volume, peer);
    }

    /// Requests of a resync as target may be made.
    pub(crate) fn resync_is_ready(&self, volume: VolumeNr, peer: NodeId) -> bool {
        self.state.peer_device(volume, peer).repl == ReplState::SyncTarget
            && self
                .devices
                .get(&volume)
                .and_then(|d| d.peers.get(&peer))
                .is_some_and(|pd| pd.resync_ready)
    }

    /// The data path is through (all data are durable): the resync as target ends.
    pub(crate) fn resync_finished(&mut self, volume: VolumeNr, peer: NodeId, failed_blocks: u64) {
        let p = self.state.peer_device(volume, peer);
        if !p.repl.is_sync_target() {
            return;
        }
        let unstable = self
            .devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .is_some_and(|pd| pd.unstable_resync);
        let unstable = unstable || self.follows_one_of_two(peer);
        if failed_blocks > 0 && !planted!(self, FailedBlocksForgotten) {
            self.log(
                Level::Error,
                Some(peer),
                Some(volume),
                format!("resync ended with {failed_blocks} blocks that could not be copied"),
            );
            self.end_resync(volume, peer, None);
            return;
        }
        self.failures_are_copied(volume, peer);
        if unstable && !planted!(self, UnstableCounts) {
            self.log(
                Level::Info,
                Some(peer),
                Some(volume),
                "resync ended, but its source was not stable; waiting for a stable one".into(),
            );
            self.drop_older_sources(volume, p.disk);
            self.end_resync(volume, peer, None);
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.was_copied = true;
            }
            // As with a kernel: what was copied was copied, though the disk waits.
            self.run_handler("after-resync-target", Some(volume), Some(peer));
            self.seek_stable_source(volume);
            return;
        }
        if self.is_legacy(peer) {
            self.legacy_target_ends(volume, peer);
            return;
        }
        let Some(source) = self.peer_uuids(volume, peer).cloned() else {
            self.end_resync(volume, peer, None);
            return;
        };
        if self.exposes_newer(volume, &source) {
            self.log(
                Level::Info,
                Some(peer),
                Some(volume),
                "resync ended, but its source is behind what applications here have seen".into(),
            );
            self.end_resync(volume, peer, None);
            return;
        }
        let start = self
            .devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .map_or(Uuid::ZERO, |pd| pd.resync_start_uuid);
        let at_source: NodeMask = self
            .devices
            .get(&volume)
            .map(|d| {
                d.peers
                    .keys()
                    .copied()
                    .filter(|n| {
                        let q = self.state.peer_device(volume, *n);
                        q.disk >= DiskState::Inconsistent
                            && q.disk != DiskState::DUnknown
                            && self
                                .peer_uuids(volume, *n)
                                .is_some_and(|u| u.current.same_generation(source.current))
                    })
                    .collect()
            })
            .unwrap_or_default();
        let at_source = match planted!(self, BehindForgotten) {
            true => NodeMask::EMPTY.complement(),
            false => at_source,
        };
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let behind = disk
            .generations
            .resync_ends_as_target(peer, &source, start, at_source);
        if planted!(self, HistoryNotInherited) {
            disk.generations.history = Default::default();
        }
        disk.crashed_primary = false;
        self.copied_from_crashed(peer, volume);
        self.copied_unwritten(volume, peer);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.behind = behind;
            pd.resync_ready = false;
            pd.ended_at = source.current;
        }
        self.after_superblock(volume, AfterMeta::ResyncEnd(peer));
        if planted!(self, ResyncEndNotDurable) {
            self.tell_resync_end(volume, peer);
        }
    }

    /// Sources that wait, and whose data are older than what this disk has by now: a Primary's writes would be replaced.
    fn drop_older_sources(&mut self, volume: VolumeNr, disk: DiskState) {
        let peers = self.established_peers().iter();
        let mut change = Change::new();
        for peer in peers {
            let p = self.state.peer_device(volume, peer);
            if p.repl == ReplState::PausedSyncT && p.disk < disk {
                change = change.repl(volume, peer, ReplState::Established);
            }
        }
        self.hard_change(change);
    }

    /// While the bitmap of a source was on its way, another one has brought this disk beyond it.
    pub(crate) fn has_passed_source(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let own = self.state.disk(volume);
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let (Some(disk), Some(theirs)) = (disk, self.peer_uuids(volume, peer)) else {
            return false;
        };
        let slot = disk.generations.slot(peer).bitmap_uuid;
        // Who announced this one, and did not make it, is not behind.
        let left = is_real(theirs.current)
            && slot.same_generation(theirs.current)
            && !theirs.history_notes(disk.generations.current);
        left && !self.same_current(volume, peer)
            && self.is_lockstep(peer)
            && own >= DiskState::Outdated
            && self.state.peer_device(volume, peer).disk <= own
    }

    /// A stable source may have been there before the unstable resync ended.
    fn seek_stable_source(&mut self, volume: VolumeNr) {
        for peer in self.established_peers().iter() {
            let p = self.state.peer_device(volume, peer);
            let stable = self
                .peer_uuids(volume, peer)
                .is_some_and(|u| self.is_stable_set(u));
            if p.repl == ReplState::Established && p.disk == DiskState::UpToDate && stable {
                self.send_uuids(peer, volume, UuidFlags::RESYNC);
                self.compare_now(peer, volume);
                return;
            }
        }
        // A source that was not stable is good enough beside a Primary that this node has met meanwhile. A
        // kernel looks at it again only when it is asked.
        let connections = self.state.connections.iter();
        let primary = connections
            .filter(|(_, c)| c.conn == ConnState::Connected && c.peer_role == Role::Primary)
            .map(|(node, _)| *node)
            .next();
        if let Some(primary) = primary.filter(|_| !self.kernel_peers().is_empty()) {
            let state = self.state.clone();
            self.look_for_source(primary, &state);
        }
    }

    /// The new UUIDs are durable: now the state may say so.
    pub(crate) fn resync_end_durable(&mut self, volume: VolumeNr, peer: NodeId) {
        if !self.state.peer_device(volume, peer).repl.is_sync_target() {
            return;
        }
        let attached = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.attached().is_some());
        let pd = self.devices.get(&volume).and_then(|d| d.peers.get(&peer));
        let unstable = pd.is_some_and(|pd| pd.unstable_resync) && !planted!(self, UnstableCounts);
        if attached && unstable && !self.is_legacy(peer) {
            // A Primary has appeared since.
            self.resync_finished(volume, peer, 0);
            return;
        }
        let forgets = planted!(self, MarkedAtEndForgotten);
        let forgets = forgets || planted!(self, ResyncForgetsBehindCursor);
        let forgets = forgets || planted!(self, FailedBlocksForgotten);
        let marked_again = !forgets && self.out_of_sync_blocks(volume, peer) > 0;
        if self.is_legacy(peer) {
            self.legacy_await_acks(volume, peer);
        } else if attached && marked_again {
            // The source wrote meanwhile, and told only that.
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.resync_ready = true;
            }
            self.resync_entered(volume, peer);
        } else if attached && !self.same_current(volume, peer) {
            // The source has made a new generation meanwhile. Its writes came here, too.
            self.resync_finished(volume, peer, 0);
        } else {
            self.tell_resync_end(volume, peer);
        }
    }

    /// The source is Outdated because of a Primary that it had lost: this one, whose applications have seen nothing
    /// that it has not.
    fn outdated_for_this(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let exposed = self.devices.get(&volume).map(|d| d.exposed_uuid);
        let set = self.peer_uuids(volume, peer);
        let quorate = self.state.devices.get(&volume).map(|d| d.have_quorum);
        self.state.role == Role::Primary
            && self.state.peer_device(volume, peer).disk == DiskState::Outdated
            && self.is_lockstep(peer)
            && !self.is_legacy(peer)
            && quorate == Some(true)
            && exposed.is_some_and(|uuid| is_real(uuid) && set.is_some_and(|set| set.knows(uuid)))
            && !planted!(self, OutdatedForEver)
    }

    /// The source of a reconciliation is Outdated because this node still had the Primary that both have lost now: what
    /// is here is as good as it was, and this node asks whether that Primary is somewhere else.
    fn outdated_for_lost(&self, volume: VolumeNr, peer: NodeId) -> bool {
        self.reconciled_with(volume, peer).is_some()
            && self.state.peer_device(volume, peer).disk == DiskState::Outdated
            && self.is_lockstep(peer)
            && self.same_current(volume, peer)
            && !planted!(self, ReconciledStaysOutdated)
    }

    /// The source may hear that this target has everything.
    pub(crate) fn tell_resync_end(&mut self, volume: VolumeNr, peer: NodeId) {
        let p = self.state.peer_device(volume, peer);
        if p.repl.is_sync_target() {
            let disk = match self.outdated_for_this(volume, peer) {
                true => DiskState::UpToDate,
                false if self.outdated_for_lost(volume, peer) => DiskState::Consistent,
                false => p.disk,
            };
            self.end_resync(volume, peer, Some(disk));
        }
    }

    /// This node's resync has ended, or is not needed any more. The source may not have begun it: its handler runs.
    pub(crate) fn target_left(&mut self, volume: VolumeNr, peer: NodeId) {
        let forgets = planted!(self, LateSourceForgotten);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            let heard = pd.last_state.map(|state| state.repl);
            pd.source_is_late = heard == Some(ReplState::WfBitmapS) && !forgets;
        }
    }

    fn end_resync(&mut self, volume: VolumeNr, peer: NodeId, disk: Option<DiskState>) {
        let mut change = Change::new()
            .repl(volume, peer, ReplState::Established)
            .resync_active(volume, peer, false);
        let lost = self.reconciled_with(volume, peer);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.resync_ready = false;
            if let Some(uuids) = pd.uuids.as_mut().filter(|_| disk.is_some()) {
                // What the peer had marked at the start has been copied.
                uuids.dirty_bits = 0;
            }
        }
        if let Some(disk) = disk {
            change = change.disk(volume, disk);
            let behind = self
                .devices
                .get(&volume)
                .and_then(|d| d.peers.get(&peer))
                .map_or(NodeMask::EMPTY, |pd| pd.behind);
            for node in behind.iter() {
                let q = self.state.peer_device(volume, node);
                // It may have caught up while the superblock was being written.
                let caught_up = self.same_current(volume, node);
                if q.disk >= DiskState::Consistent && !caught_up {
                    change = change.peer_disk(volume, node, DiskState::Outdated);
                }
            }
            let waiting: alloc::vec::Vec<(NodeId, DiskState)> = self
                .state
                .devices
                .get(&volume)
                .map(|d| {
                    d.peers
                        .iter()
                        .filter(|(n, q)| **n != peer && q.repl == ReplState::PausedSyncT)
                        .map(|(n, q)| (*n, q.disk))
                        .collect()
                })
                .unwrap_or_default();
            let own = self.devices.get(&volume).map(|d| d.current_uuid());
            for (node, theirs) in waiting {
                let newer = own.is_some_and(|own| self.is_ahead_of(volume, node, own));
                // Nodes that are no better must not wait for each other in a circle.
                let better = disk < DiskState::UpToDate && theirs > disk;
                if newer && let Some(pd) = self.peer_device_mut(volume, node) {
                    // The source that is done was a step behind this one: the disk becomes whole
                    // only with the data of the latter.
                    pd.resync_start_uuid = own.unwrap_or_default();
                } else if !better && !planted!(self, GoneSourceKept) {
                    change = change.repl(volume, node, ReplState::Established);
                }
            }
        }
        self.hard_change(change);
        if let Some((lost, dagtag)) = lost
            && let Some(conn) = self.connections.get_mut(&lost)
            && dagtag.is_newer_than(conn.last_dagtag)
        {
            conn.last_dagtag = dagtag;
        }
        if disk.is_some() {
            self.run_handler("after-resync-target", Some(volume), Some(peer));
        }
        self.resync_over(volume, peer, true);
    }

    /// Nodes whose data are going to overwrite this node's.
    pub(crate) fn sources_of(&self, volume: VolumeNr) -> NodeMask {
        let device = self.state.devices.get(&volume);
        device.map_or(NodeMask::EMPTY, |d| {
            let sources = d.peers.iter().filter(|(_, p)| p.repl.becomes_target());
            sources.map(|(node, _)| *node).collect()
        })
    }

    /// A resync with another node than this peer changes the disk.
    pub(crate) fn is_target_of_another(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let is_source = |node| self.state.peer_device(volume, node).repl == ReplState::SyncTarget;
        self.sources_of(volume).without(peer).iter().any(is_source)
    }

    /// Applications of this Primary see the data of a connected peer, whose generation the source
    /// of a resync does not know.
    fn exposes_newer(&self, volume: VolumeNr, source: &PeerUuids) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return false;
        };
        let exposed = device.exposed_uuid;
        let is_exposed = |uuid: Uuid| is_real(exposed) && uuid.same_generation(exposed);
        self.state.role == Role::Primary
            && !source.knows(exposed)
            && device.peers.keys().any(|peer| {
                let p = self.state.peer_device(volume, *peer);
                let set = self.peer_uuids(volume, *peer);
                p.repl > ReplState::Off
                    && p.disk == DiskState::UpToDate
                    && set.is_some_and(|set| is_exposed(set.current))
            })
    }

    /// This Primary's disk is not whole, or old, and applications have seen the data of the node that was its
    /// source, or will be. A peer whose data do not come from those is no source in that one's place.
    fn refuse_step_back(&self, volume: VolumeNr, peer: NodeId) -> Option<Refusal> {
        let device = self.devices.get(&volume)?;
        let exposed = device.exposed_uuid;
        let beside_own = self.state.role == Role::Primary
            && (DiskState::Inconsistent..DiskState::UpToDate).contains(&self.state.disk(volume))
            && is_real(exposed)
            && !exposed.same_generation(device.current_uuid())
            && !self.is_legacy(peer)
            && !planted!(self, StepsBack);
        if !beside_own || self.peer_uuids(volume, peer)?.knows(exposed) {
            return None;
        }
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!(
                "node {peer} has older data of volume {volume} than applications of this Primary have \
                 seen; waiting for the node that has those"
            ),
        })
    }

    /// This node follows a Primary that announced the peer's generation, or another one did so of whose data the
    /// Primary goes on, and it was given up: the Primary knows it for an ancestor, this node need not. It takes the
    /// peer for newer, which itself is going to follow the Primary.
    fn refuse_given_up(&self, volume: VolumeNr, peer: NodeId) -> Option<Refusal> {
        if self.state.disk(volume) != DiskState::UpToDate || self.is_legacy(peer) {
            return None;
        }
        let theirs = self.peer_uuids(volume, peer)?.current;
        let (primary, _) = self.state.connections.iter().find(|(node, c)| {
            let p = self.state.peer_device(volume, **node);
            let set = self.peer_uuids(volume, **node);
            **node != peer
                && c.peer_role == Role::Primary
                && p.repl == ReplState::Established
                && p.disk == DiskState::UpToDate
                && self.same_current(volume, **node)
                && set.is_some_and(|set| is_real(theirs) && set.history_has(theirs))
        })?;
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!(
                "node {peer} has a generation of volume {volume} that the Primary {primary} has left behind; \
                 waiting until the two have met"
            ),
        })
    }

    /// This node has followed to the peer's generation since it told its own, by which both have decided. The peer's disk
    /// is not whole, and may be waiting for this one.
    fn refuse_equal_part(&self, volume: VolumeNr, peer: NodeId) -> Option<Refusal> {
        let device = self.devices.get(&volume)?;
        let theirs = device.peers.get(&peer)?.last_state?;
        let whole = self.state.disk(volume) == DiskState::UpToDate;
        let part = theirs.disk == DiskState::Inconsistent && self.same_current(volume, peer);
        // A kernel waits as such a target, paused, and goes by that.
        let part = part && self.is_lockstep(peer);
        (whole && part && !planted!(self, PartCopied)).then(|| Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!(
                "node {peer} has a part of volume {volume} only, which is whole here and of that generation by \
                 now; comparing again"
            ),
        })
    }

    /// A Primary is being copied from this node and reads here what it has not got yet. Another survivor
    /// of an earlier Primary, of the same generation, waits until the Primary is whole and can tell it what
    /// is true: as source it would replace what the Primary's applications have seen.
    pub(crate) fn refuse_while_primary_copies(
        &self,
        volume: VolumeNr,
        peer: NodeId,
        verdict: &compare::Verdict,
    ) -> Option<Refusal> {
        let survivors = matches!(
            verdict.rule,
            Rule::MarkedBlocks
                | Rule::ReconcileOneSided
                | Rule::ReconcileDagtag
                | Rule::Reconnected
                | Rule::LostQuorum
                | Rule::BothOff
        );
        let target = verdict.strategy.direction() == Some(compare::Direction::Target);
        if !survivors || !target || self.state.disk(volume) != DiskState::UpToDate {
            return None;
        }
        let primary = self.state.connections.iter().find(|(node, c)| {
            let p = self.state.peer_device(volume, **node);
            **node != peer && c.peer_role == Role::Primary && p.repl.is_sync_source()
        });
        let (primary, _) = primary?;
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!(
                "node {peer} differs in volume {volume}, which the Primary {primary} is being copied \
                 from here; waiting until that has ended"
            ),
        })
    }

    /// What speaks against being target of the peer. The log says it once.
    pub(crate) fn refuse_as_target(&mut self, volume: VolumeNr, peer: NodeId) -> Option<Refusal> {
        let refusal = self
            .refuse_step_back(volume, peer)
            .or_else(|| self.refuse_given_up(volume, peer))
            .or_else(|| self.refuse_equal_part(volume, peer))
            .or_else(|| self.refuse_as_voter(volume, peer));
        let told = |pd: &mut PeerDevice| core::mem::replace(&mut pd.wait_told, refusal.is_some());
        let told = self.peer_device_mut(volume, peer).is_some_and(told);
        if let Some(refusal) = refusal.as_ref().filter(|_| !told) {
            let text = refusal.text.clone();
            self.log(Level::Warn, Some(peer), Some(volume), text);
        }
        refusal
    }

    /// The same for a peer that is connected already. Without the connection its data are not used, and
    /// the next handshake refuses it until it has the newer ones.
    pub(crate) fn steps_back(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        strategy: compare::Strategy,
    ) -> bool {
        if strategy.direction() != Some(compare::Direction::Target) {
            return false;
        }
        if self.refuse_as_target(volume, peer).is_none() {
            return false;
        }
        self.drop_connection(peer, ConnState::NetworkFailure);
        true
    }

    /// The peer's data have left generation `uuid` behind.
    pub(crate) fn is_ahead_of(&self, volume: VolumeNr, peer: NodeId, uuid: Uuid) -> bool {
        self.peer_uuids(volume, peer)
            .is_some_and(|set| !set.current.same_generation(uuid) && set.knows(uuid))
    }

    /// The peer's state says that it is through (this node is source).
    pub(crate) fn resync_finished_by_peer(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        disk: DiskState,
    ) {
        let change = Change::new()
            .repl(volume, peer, ReplState::Established)
            .peer_disk(volume, peer, disk);
        if self.is_legacy(peer) && disk == DiskState::UpToDate {
            self.legacy_source_ends(volume, peer);
        }
        self.hard_change(change);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.was_copied = disk == DiskState::Inconsistent;
        }
        self.ahead_is_over(peer);
        self.resync_over(volume, peer, false);
        if !planted!(self, OldTargetNotCompared) {
            self.compare_with_old_target(volume, peer);
        }
    }

    fn resync_over(&mut self, volume: VolumeNr, peer: NodeId, was_target: bool) {
        self.write_bitmap(volume, BitmapThen::Nothing);
        let forgets = planted!(self, AgainForgotten);
        let again = self.peer_device_mut(volume, peer).is_some_and(|pd| {
            let again = pd.resync_again > 0 && !forgets;
            pd.resync_again = 0;
            pd.refuses = false;
            again
        });
        // The acks of the last blocks may still be on their way to a source, on the other stream:
        // it would compare with marks that are none. A Lockstep target compares and says so.
        let lockstep = self.connections.get(&peer).is_some_and(|c| c.is_lockstep());
        if again && self.is_kernel(peer) {
            let repl = match was_target {
                true => ReplState::WfBitmapT,
                false => ReplState::WfBitmapS,
            };
            self.hard_change(Change::new().repl(volume, peer, repl));
        } else if again && (was_target || !lockstep) {
            self.compare_now(peer, volume);
        }
        for peer in self.established_peers().iter() {
            self.ahead_is_settled(peer);
        }
        // A new generation of the source may have crossed the target's last packet.
        self.watch_generation(volume, peer);
        self.reconcile_settled();
    }

    // Full sync on an operator's word.

    /// StartingSyncS: the peer's slot is set, durably; between nodes of this project the bitmaps are exchanged then.
    pub(crate) fn start_full_sync_source(&mut self, volume: VolumeNr, peer: NodeId) {
        self.mark_full_sync(volume, peer);
    }

    /// StartingSyncT: all slots are set, durably; then as in [`Self::start_full_sync_source`].
    pub(crate) fn start_full_sync_target(&mut self, volume: VolumeNr, peer: NodeId) {
        self.mark_full_sync(volume, peer);
    }

    fn mark_full_sync(&mut self, volume: VolumeNr, peer: NodeId) {
        let noted = !planted!(self, FullSyncNotNoted);
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        disk.generations
            .slot_mut(peer)
            .flags
            .set(PeerFlags::FULL_SYNC, noted);
        self.after_superblock(volume, AfterMeta::FullSync(peer));
    }

    /// The connection is gone, perhaps before the intention was durable: the next one finds the bits, and the
    /// metadata do not call for a full sync for ever.
    pub(crate) fn full_sync_cut_short(&mut self, volume: VolumeNr, peer: NodeId, was: ReplState) {
        self.mark_all(volume, peer, was);
    }

    /// The intention is durable: the bits follow.
    pub(crate) fn full_sync_marked(&mut self, volume: VolumeNr, peer: NodeId) {
        let repl = self.state.peer_device(volume, peer).repl;
        self.mark_all(volume, peer, repl);
    }

    fn mark_all(&mut self, volume: VolumeNr, peer: NodeId, repl: ReplState) {
        match repl {
            ReplState::StartingSyncS => self.set_slot(volume, peer),
            ReplState::StartingSyncT if planted!(self, OneSlotInvalidated) => {
                self.set_slot(volume, peer);
            }
            ReplState::StartingSyncT => self.set_all_slots(volume),
            _ => return,
        }
        self.write_bitmap(volume, BitmapThen::FullSync(peer));
    }

    /// The bits are durable.
    pub(crate) fn full_sync_written(&mut self, volume: VolumeNr, peer: NodeId) {
        let stays = planted!(self, FullSyncFlagStays);
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.generations
                .slot_mut(peer)
                .flags
                .set(PeerFlags::FULL_SYNC, stays);
            self.write_superblock(volume);
        }
        if self.is_legacy(peer) {
            self.legacy_full_sync(volume, peer);
            return;
        }
        let lockstep = self.is_lockstep(peer);
        let repl = match self.state.peer_device(volume, peer).repl {
            ReplState::StartingSyncS if lockstep => ReplState::WfBitmapS,
            ReplState::StartingSyncT if lockstep => ReplState::WfBitmapT,
            // All is marked on both sides: a kernel sends no bitmap, and takes none.
            ReplState::StartingSyncS => {
                self.before_resync_source(volume, peer, ResyncGate::FullSync);
                return;
            }
            ReplState::StartingSyncT => {
                self.before_resync_target(volume, peer, ResyncGate::FullTarget);
                return;
            }
            _ => return,
        };
        self.hard_change(Change::new().repl(volume, peer, repl));
    }

    // Bits of a whole slot.

    pub(crate) fn set_slot(&mut self, volume: VolumeNr, peer: NodeId) {
        self.with_slot(volume, peer, |bitmap, slot| bitmap.fill(slot, true));
        if let Some(io) = self.disk_io(volume) {
            io.note_slot_fresh();
        }
    }

    /// Equal without a resync: the slot names nothing any more (semantics.md, 5.2 point 2). Beside an
    /// 8.4, what a verify marked, or a write whose fate is not known, does differ and stays marked, as
    /// it does there ("No resync, but N bits in bitmap!"): the next resync copies it. Where a crash
    /// left marks of the log alone, a kernel's Secondary would have none. A kernel 9 forgets.
    pub(crate) fn forget_differences(&mut self, volume: VolumeNr, peer: NodeId, connects: bool) {
        let lockstep = self.connections.get(&peer).is_some_and(|c| c.is_lockstep());
        let stayed = connects && self.both_stayed(volume, peer);
        let forgets = planted!(self, DifferencesForgotten);
        if self.marked_towards(volume, peer) && lockstep && !stayed && !forgets {
            // Marked blocks are resynced, not forgotten.
            if let Some(theirs) = self
                .devices
                .get(&volume)
                .and_then(|d| d.peers.get(&peer))
                .and_then(|pd| pd.last_state)
            {
                self.compare_established(peer, volume, theirs, compare::Phase::Attach);
            }
            return;
        }
        if !self.slot_uuid(volume, peer).is_zero() {
            self.retire_slot_uuid(volume, peer);
        }
        let of_log = self
            .peer_device_mut(volume, peer)
            .is_some_and(|pd| core::mem::take(&mut pd.marks_of_log));
        let keeps = lockstep || self.is_legacy(peer);
        if of_log || stayed || !keeps {
            self.clear_slot(volume, peer);
        }
    }

    pub(crate) fn clear_slot(&mut self, volume: VolumeNr, peer: NodeId) {
        self.with_slot(volume, peer, |bitmap, slot| bitmap.fill(slot, false));
    }

    pub(crate) fn set_all_slots(&mut self, volume: VolumeNr) {
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            for slot in 0..disk.io.bitmap.shape().slots() {
                disk.io.bitmap.fill(slot, true);
            }
        }
        self.schedule_bitmap_write(volume);
    }

    /// The slot of `to` gets the marks of `from`'s as well. Marks are never dropped by a copy.
    pub(crate) fn copy_slot(&mut self, volume: VolumeNr, from: NodeId, to: NodeId) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        let from = disk.generations.slot(from).bitmap_index;
        let to = disk.io.slot(to);
        match (from, to) {
            (Some(from), Some(to)) => disk.io.bitmap.merge_slot(from, to),
            (None, Some(_)) if planted!(self, DayZeroSlotEmpty) => {}
            (None, Some(to)) => {
                // No bitmap of its own: an unallocated one tracks everything since day 0.
                match disk.generations.free_index() {
                    Some(free) => disk.io.bitmap.merge_slot(free, to),
                    None => disk.io.bitmap.fill(to, true),
                }
            }
            (_, None) => {}
        }
        disk.io.note_slot_fresh();
        self.schedule_bitmap_write(volume);
    }

    fn with_slot(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        edit: impl FnOnce(&mut crate::bitmap::Bitmap, u8),
    ) {
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut())
            && let Some(slot) = disk.io.slot(peer)
        {
            edit(&mut disk.io.bitmap, slot);
        }
        self.schedule_bitmap_write(volume);
    }

    /// Changed bitmap pages are written soon; nothing waits for it.
    pub(crate) fn schedule_bitmap_write(&mut self, volume: VolumeNr) {
        let at = self.now + crate::time::Duration::from_secs(2);
        self.timers.set_earliest(Timer::BitmapWrite(volume), at);
    }
}
