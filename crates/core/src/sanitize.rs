//! Turns a wanted state into a self-consistent one (semantics.md, 4), and counts quorum (11.1).

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState, Role, UuidFlags};

use crate::device::Reconcile;
use crate::few::Few;
use crate::options::{Fencing, OnLoss, Quorum};
use crate::resource::Resource;
use crate::state::{ConnectionState, PeerDeviceState, ReplSets, State};

/// A difference in marked blocks below which the active source is kept (semantics.md, 14.3).
const SOURCE_CHANGE_BLOCKS: u64 = 256;

impl Resource {
    /// Applies the rules of semantics.md 4 in their order.
    pub(crate) fn sanitize(&self, old: &State, new: &mut State, graceful: bool) {
        self.sanitize_connections(new);
        let volumes: Vec<VolumeNr> = new.devices.keys().copied().collect();
        for volume in &volumes {
            self.sanitize_negotiating(*volume, old, new);
            self.sanitize_peers_first(*volume, old, new);
            self.select_resync_source(*volume, old, new);
        }
        for volume in &volumes {
            self.sanitize_peers_second(*volume, old, new);
            self.select_resync_source(*volume, old, new);
            self.clamp(*volume, new);
        }
        for volume in &volumes {
            self.sanitize_device_last(*volume, old, new, graceful);
        }
        self.sanitize_resource(old, new);
    }

    fn sanitize_connections(&self, new: &mut State) {
        for conn in new.connections.values_mut() {
            if conn.conn < ConnState::Connected {
                conn.peer_role = Role::Unknown;
            }
        }
    }

    /// The end of Negotiating (semantics.md, 4.2 rule 2).
    fn sanitize_negotiating(&self, volume: VolumeNr, old: &State, new: &mut State) {
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let negotiated_alone = self.negotiated_alone(volume, new);
        // Nor is it copied from a node that has less than this Primary has shown.
        let stale = negotiated_alone == DiskState::Detaching;
        let Some(state) = new.devices.get_mut(&volume) else {
            return;
        };
        if state.disk != DiskState::Negotiating || old.disk(volume) != DiskState::Negotiating {
            return;
        }
        let mut all = 0;
        let mut targets = 0;
        let mut refused = 0;
        let mut up_to_date = false;
        for (peer, p) in &state.peers {
            if p.disk < DiskState::Negotiating || p.repl == ReplState::Off {
                continue;
            }
            if p.disk == DiskState::DUnknown {
                continue;
            }
            match device.peers.get(peer).and_then(|pd| pd.negotiation) {
                None if planted!(self, NegotiatesWithSome) => continue,
                None => return,
                Some(None) => refused += 1,
                Some(Some(ReplState::WfBitmapT)) => targets += 1,
                Some(Some(_)) => {}
            }
            all += 1;
            up_to_date |= p.disk == DiskState::UpToDate;
        }
        state.disk = if refused > 0 && refused == all || stale {
            DiskState::Detaching
        } else if targets > 0 {
            DiskState::Inconsistent
        } else if up_to_date {
            DiskState::UpToDate
        } else {
            negotiated_alone
        };
        let inconsistent = state.disk == DiskState::Inconsistent;
        for (peer, p) in &mut state.peers {
            if p.repl == ReplState::Off {
                continue;
            }
            let lockstep = self.is_lockstep(*peer);
            let result = device
                .peers
                .get(peer)
                .and_then(|pd| pd.negotiation)
                .flatten();
            p.repl = result.unwrap_or(ReplState::Established);
            // A Lockstep peer waits for the bitmap first; the resync pauses when both have it.
            if p.repl == ReplState::WfBitmapS && inconsistent && !lockstep {
                p.repl = ReplState::PausedSyncS;
                p.susp_other = true;
            }
        }
    }

    /// What a disk becomes if no UpToDate peer is left to negotiate with.
    fn negotiated_alone(&self, volume: VolumeNr, new: &State) -> DiskState {
        let stale = self
            .devices
            .get(&volume)
            .and_then(|d| d.attached())
            .is_some_and(|disk| self.serves_newer_data(volume, &disk.generations, new));
        if stale {
            return DiskState::Detaching;
        }
        let by_metadata = self.disk_state_from_metadata(volume);
        match self.beside_primary_target(volume, new) {
            true => by_metadata.min(DiskState::Outdated),
            false => by_metadata,
        }
    }

    /// A Primary that is being copied from another node serves a generation that this node's attaching disk does not
    /// know. The two are not compared before that has ended (rule target-of-another), and that the disk is not
    /// whole there says nothing about what applications see.
    fn beside_primary_target(&self, volume: VolumeNr, new: &State) -> bool {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let (Some(disk), Some(state)) = (disk, new.devices.get(&volume)) else {
            return false;
        };
        state.peers.iter().any(|(peer, p)| {
            let is_primary = new.connections.get(peer).map(|c| c.peer_role) == Some(Role::Primary);
            let target = self
                .peer_uuids(volume, *peer)
                .filter(|set| set.flags.contains(UuidFlags::SYNC_TARGET));
            is_primary
                && p.repl > ReplState::Off
                && self.is_lockstep(*peer)
                && target.is_some_and(|set| !disk.generations.knows(set.current))
        })
    }

    fn sanitize_peers_first(&self, volume: VolumeNr, old: &State, new: &mut State) {
        let role = new.role;
        let was_primary = old.role == Role::Primary;
        let connections = new.connections.clone();
        let Some(state) = new.devices.get_mut(&volume) else {
            return;
        };
        let own = state.disk;
        for (peer, p) in &mut state.peers {
            let before = old.peer_device(volume, *peer);
            if p.repl < ReplState::Established {
                p.susp_peer = false;
                if p.disk > DiskState::DUnknown || p.disk < DiskState::Inconsistent {
                    p.disk = DiskState::DUnknown;
                }
                if before.repl >= ReplState::Established {
                    p.resync_active = false;
                    let known = (before.disk, p.disk);
                    if known == (DiskState::Inconsistent, DiskState::Inconsistent)
                        && self.may_have_caught_up(volume, *peer, old)
                    {
                        // It has a vote then, and may serve this node's generation.
                        p.disk = DiskState::DUnknown;
                    }
                }
            } else if own <= DiskState::Failed
                && p.disk == DiskState::UpToDate
                && (self.is_left_behind(volume, *peer)
                    || before.disk < DiskState::UpToDate && self.has_gone_on(volume, *peer, role)
                    || before.disk == DiskState::Outdated
                        && (self.lacks_held(volume, *peer)
                            || self.lacks_exposed(volume, *peer, role)))
            {
                // Rule 13 of 4.3: applications have seen newer data than the peer's.
                p.disk = DiskState::Outdated;
            }
            let conn = connections.get(peer).copied().unwrap_or_default();
            if conn.conn == ConnState::StandAlone
                && own == DiskState::Diskless
                && role == Role::Secondary
            {
                p.susp_dependency = false;
                p.susp_max_parallel = false;
            }
            if p.repl > ReplState::Established
                && (own <= DiskState::Failed || p.disk <= DiskState::Failed)
            {
                p.repl = ReplState::Established;
                p.resync_active = false;
            }
        }
        let _ = was_primary;
        // Fencing freezes IO when contact to a peer is lost (semantics.md, 4.2 rule 3).
        let peers: Vec<(NodeId, PeerDeviceState)> =
            state.peers.iter().map(|(n, p)| (*n, *p)).collect();
        for (peer, p) in peers {
            let stonith = self
                .connections
                .get(&peer)
                .is_some_and(|c| c.net.fencing == Fencing::ResourceAndStonith);
            let before = old.peer_device(volume, peer);
            if stonith
                && !planted!(self, FenceFreezesNothing)
                && role == Role::Primary
                && p.repl < ReplState::Established
                && p.disk == DiskState::DUnknown
                && (old.role != Role::Primary || before.disk != DiskState::DUnknown)
                && let Some(c) = new.connections.get_mut(&peer)
            {
                c.susp_fen = true;
            }
        }
    }

    /// One active source at a time (semantics.md, 14.3).
    fn select_resync_source(&self, volume: VolumeNr, old: &State, new: &mut State) {
        let connections = &new.connections;
        let Some(state) = new.devices.get_mut(&volume) else {
            return;
        };
        if !state.peers.values().any(|p| p.repl.is_sync_target()) {
            for (peer, p) in &mut state.peers {
                let was_target = old.peer_device(volume, *peer).repl.is_sync_target();
                if p.susp_other && (was_target || p.repl <= ReplState::Established) {
                    p.susp_other = false;
                }
            }
            return;
        }
        // One that is not UpToDate itself may lack writes of a Primary, which a target that is connected to that one
        // asks for; it gets them from another node only, and that with a comparison that waits for the target.
        let candidates: Vec<(NodeId, (bool, bool), u64)> = state
            .peers
            .iter()
            .filter(|(n, p)| {
                p.repl.is_sync_target()
                    && !self.is_unasked(volume, **n)
                    && !p.susp_user
                    && !p.susp_peer
                    && !p.susp_dependency
                    && !p.susp_max_parallel
                    && p.disk >= DiskState::Outdated
                    && p.disk != DiskState::DUnknown
            })
            .map(|(n, p)| {
                let unstable = self.ends_unstable(volume, *n, connections);
                let rank = (p.disk != DiskState::UpToDate, unstable);
                (*n, rank, self.out_of_sync_blocks(volume, *n))
            })
            .collect();
        let starting = |p: &PeerDeviceState| p.repl == ReplState::StartingSyncT;
        let starting = state.peers.iter().find(|(_, p)| starting(p));
        let current = candidates.iter().find(|(n, ..)| {
            let before = old.peer_device(volume, *n).repl;
            matches!(before, ReplState::SyncTarget | ReplState::StartingSyncT)
        });
        let best = candidates
            .iter()
            .min_by_key(|(n, rank, blocks)| (*rank, *blocks, n.0));
        let desired = match (current, best) {
            // The operator has chosen.
            _ if let Some((chosen, _)) = starting => Some(*chosen),
            (Some(current), Some(best))
                if (best.1 < current.1
                    && (!best.1.0 && current.1.0 || self.knows_its_part(volume, best.0)))
                    || (best.1 == current.1 && best.2 + SOURCE_CHANGE_BLOCKS <= current.2) =>
            {
                Some(best.0)
            }
            (Some(current), _) => Some(current.0),
            (None, best) => best.map(|b| b.0),
        };
        let draining = state
            .peers
            .iter()
            .any(|(n, p)| p.resync_active && Some(*n) != desired && p.repl.is_sync_target());
        let own = state.disk;
        let any_desired = desired.is_some();
        for (peer, p) in &mut state.peers {
            // A kernel tells its neighbours, too, that it has a source; nodes of this project see it.
            let told = any_desired && p.repl <= ReplState::Established && self.is_kernel(*peer);
            let chosen = Some(*peer) == desired || planted!(self, SeveralSources);
            if p.repl.is_sync_target() {
                p.susp_other = any_desired && !chosen;
                let paused = p.resync_suspended(own) || !chosen || draining;
                p.repl = if paused {
                    ReplState::PausedSyncT
                } else {
                    ReplState::SyncTarget
                };
            } else {
                p.susp_other = told || p.repl.is_sync_source() || p.repl == ReplState::WfBitmapS;
            }
        }
    }

    /// The peer has answered this resync. A kernel does not hear of one that makes it a source beside the one
    /// that was chosen for a full sync (4.3, rule 3).
    pub(crate) fn knows_its_part(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let heard = device.and_then(|d| d.peers.get(&peer)?.last_state);
        !self.is_kernel(peer) || heard.is_some_and(|state| state.repl > ReplState::Established)
    }

    /// What the source sends will not make this disk whole, because a Primary that this node did not
    /// reach may have changed it meanwhile (14.2). A source that does comes first, so that what it
    /// copies has not been copied before for nothing.
    fn ends_unstable(
        &self,
        volume: VolumeNr,
        source: NodeId,
        connections: &Few<NodeId, ConnectionState>,
    ) -> bool {
        let device = self.devices.get(&volume);
        let began = device
            .and_then(|d| d.peers.get(&source))
            .is_some_and(|pd| pd.resync_ready && pd.unstable_resync);
        let primary = connections
            .get(&source)
            .is_some_and(|c| c.peer_role == Role::Primary);
        let stable = self
            .peer_uuids(volume, source)
            .is_some_and(|u| self.is_stable_set(u));
        began || !(primary || stable)
    }

    fn sanitize_peers_second(&self, volume: VolumeNr, old: &State, new: &mut State) {
        let stable = new.stable();
        let weak = self.is_weak(new);
        let is_target = new
            .devices
            .get(&volume)
            .is_some_and(|d| d.peers.values().any(|p| p.repl.is_sync_target()));
        let connections = new.connections.clone();
        let Some(state) = new.devices.get_mut(&volume) else {
            return;
        };
        let peers: Vec<NodeId> = state.peers.keys().copied().collect();
        // A full resync as target stops the others (rule 3).
        let starting = peers.iter().any(|n| {
            state.peers[n].repl == ReplState::StartingSyncT
                && old.peer_device(volume, *n).repl != ReplState::StartingSyncT
        });
        for peer in &peers {
            let before = old.peer_device(volume, *peer);
            let own = state.disk;
            let Some(p) = state.peers.get_mut(peer) else {
                continue;
            };
            if p.repl.is_sync_source() && !before.repl.is_sync_source() && is_target {
                p.susp_other = true;
            }
            if p.repl.is_sync_source() {
                if !is_target {
                    p.susp_other = false;
                }
                let suspended = p.resync_suspended(own);
                p.repl = if suspended {
                    ReplState::PausedSyncS
                } else {
                    ReplState::SyncSource
                };
            }
            // A Lockstep peer serves nobody that it did not compare with, and the end of the full
            // resync settles it, too.
            if starting
                && !self.is_lockstep(*peer)
                && p.repl == ReplState::Established
                && p.disk >= DiskState::Inconsistent
                && p.disk != DiskState::DUnknown
            {
                p.repl = ReplState::PausedSyncT;
            }
        }
        self.clamp_device(state);
        // Which disk state follows from a peer's (rules 7 to 12).
        for peer in &peers {
            let before = old.peer_device(volume, *peer);
            let own = state.disk;
            let Some(p) = state.peers.get(peer).copied() else {
                continue;
            };
            let uuids = self.peer_uuids(volume, *peer);
            let peer_stable = uuids.is_some_and(|u| self.is_stable_set(u));
            let just_connected =
                before.repl < ReplState::Established && p.repl >= ReplState::Established;
            let mut next = own;
            if p.repl == ReplState::Established
                && own == DiskState::Outdated
                && p.disk >= DiskState::Consistent
                && uuids.is_some()
                && peer_stable
                && (before.repl < ReplState::Established
                    || self.peer_got_stable(volume, *peer)
                    || before.disk == DiskState::Outdated)
                && self.same_current(volume, *peer)
                && !weak
                && (!self.diskless_primary_of_other_generation(volume)
                    || planted!(self, ClientNotAsked))
                && !planted!(self, OutdatedStaysAtConnect)
            {
                next = p.disk;
            }
            let given_up = p.repl == ReplState::Established && self.is_lockstep(*peer);
            if before.repl == ReplState::WfBitmapT
                && (p.repl == ReplState::Off || given_up)
                && own == DiskState::Outdated
                && self.may_be_up_to_date(volume, new_peers(state))
            {
                let neighbour = state.peers.iter().any(|(n, q)| {
                    n != peer
                        && q.disk == DiskState::UpToDate
                        && q.repl > ReplState::Off
                        && self
                            .peer_uuids(volume, *n)
                            .is_some_and(|u| self.is_stable_set(u))
                        && self.same_current(volume, *n)
                });
                if neighbour {
                    next = DiskState::UpToDate;
                }
            }
            if just_connected
                && own == DiskState::Consistent
                && !matches!(p.repl, ReplState::WfBitmapT)
                && p.disk == DiskState::UpToDate
                && self.may_be_up_to_date(volume, new_peers(state))
                && self.same_current(volume, *peer)
            {
                next = DiskState::UpToDate;
            }
            if own == DiskState::Consistent
                && before.disk == DiskState::Consistent
                && p.disk == DiskState::UpToDate
                && p.repl >= ReplState::Established
                && peer_stable
                && (self.same_current(volume, *peer) || planted!(self, ConsistentTrustsAny))
                && !self.is_left_by_another(volume, &new_peers(state))
            {
                next = DiskState::UpToDate;
            }
            // An 8.4 Primary without a disk tells no generation; it is the one that decides.
            let diskless_primary = !self.is_legacy(*peer)
                && connections.get(peer).is_some_and(|c| {
                    c.peer_role == Role::Primary
                        && old
                            .connections
                            .get(peer)
                            .is_none_or(|o| o.peer_role == Role::Unknown)
                })
                && p.disk == DiskState::Diskless;
            if diskless_primary && own >= DiskState::Negotiating && !is_target {
                if self.same_current(volume, *peer) {
                    if own > DiskState::Inconsistent {
                        next = DiskState::UpToDate;
                    }
                } else if own == DiskState::UpToDate {
                    next = DiskState::Consistent;
                }
            }
            state.disk = next;
        }
        let _ = stable;
        // Replication to and from Inconsistent nodes (rule 14).
        for peer in &peers {
            let before = old.peer_device(volume, *peer);
            let Some(p) = state.peers.get_mut(peer) else {
                continue;
            };
            let stays = planted!(self, MarksForEver);
            if before.disk == DiskState::Inconsistent && p.disk != DiskState::Inconsistent && !stays
            {
                p.replication = true;
            }
            let asked = self.devices.get(&volume).and_then(|d| d.peers.get(peer));
            let Some(asked) = asked.filter(|_| p.repl >= ReplState::Established) else {
                continue;
            };
            let was = before.repl >= ReplState::Established;
            if self.connections.len() > 1 && self.is_kernel(*peer) {
                // It believes a third node's word about who is in sync, which may be older than a mark.
                p.replication = true;
            } else if p.repl.is_sync_source() && !before.repl.is_sync_source() {
                p.replication = asked.replicates_to_target || asked.replicates_early;
            } else if p.disk == DiskState::Inconsistent
                && !(was && before.disk == DiskState::Inconsistent)
            {
                p.replication = asked.replicates_now;
            }
        }
    }

    /// Limits the disk states to what the replication states allow (rule 5).
    fn clamp(&self, volume: VolumeNr, new: &mut State) {
        if let Some(state) = new.devices.get_mut(&volume) {
            self.clamp_device(state);
        }
    }

    fn clamp_device(&self, state: &mut crate::state::DeviceState) {
        use DiskState::{Consistent, DUnknown, Diskless, Inconsistent, Outdated, UpToDate};
        for p in state.peers.values_mut() {
            let (own_min, own_max, peer_min, peer_max) = match p.repl {
                ReplState::Behind if planted!(self, BehindStaysCurrent) => {
                    (Inconsistent, UpToDate, Inconsistent, UpToDate)
                }
                ReplState::Off => (Diskless, UpToDate, Inconsistent, DUnknown),
                ReplState::Established => (Diskless, UpToDate, Diskless, UpToDate),
                ReplState::WfBitmapT
                | ReplState::StartingSyncT
                | ReplState::WfSyncUuid
                | ReplState::Behind => (Inconsistent, Outdated, Inconsistent, UpToDate),
                ReplState::SyncTarget | ReplState::PausedSyncT => {
                    (Inconsistent, Inconsistent, Inconsistent, UpToDate)
                }
                ReplState::WfBitmapS
                | ReplState::PausedSyncS
                | ReplState::StartingSyncS
                | ReplState::Ahead => (Inconsistent, UpToDate, Inconsistent, Consistent),
                ReplState::SyncSource => (Inconsistent, UpToDate, Inconsistent, Inconsistent),
                ReplState::VerifyS | ReplState::VerifyT => {
                    (Inconsistent, UpToDate, Inconsistent, UpToDate)
                }
            };
            if matches!(
                state.disk,
                DiskState::Attaching | DiskState::Negotiating | DiskState::Detaching
            ) && p.repl <= ReplState::Established
            {
                p.disk = p.disk.clamp(peer_min, peer_max);
                continue;
            }
            state.disk = state.disk.clamp(own_min, own_max);
            if p.repl > ReplState::Established && p.disk == DUnknown {
                p.disk = Consistent.min(peer_max);
            }
            p.disk = p.disk.clamp(peer_min, peer_max);
        }
    }

    fn sanitize_device_last(&self, volume: VolumeNr, old: &State, new: &mut State, graceful: bool) {
        let lost_negotiation = {
            let Some(state) = new.devices.get(&volume) else {
                return;
            };
            state.disk == DiskState::Negotiating
                && old.disk(volume) == DiskState::Negotiating
                && state.peers.values().all(|p| p.repl == ReplState::Off)
        };
        if lost_negotiation {
            let disk = self.negotiated_alone(volume, new);
            if let Some(state) = new.devices.get_mut(&volume) {
                state.disk = disk;
            }
        }
        // A Primary may have crashed (4.4): whoever was its replica asks around first.
        let crashed = !graceful
            && old.connections.iter().any(|(peer, before)| {
                let after = new.conn(*peer);
                before.peer_role == Role::Primary
                    && before.conn == ConnState::Connected
                    && ((ConnState::Timeout..=ConnState::ProtocolError).contains(&after)
                        || after == ConnState::Disconnecting)
            });
        let no_primary = new.primary_peer().is_none();
        let trusts = planted!(self, ReplicaStaysCurrent);
        if crashed && no_primary && new.role == Role::Secondary && !trusts {
            let alone = self.sole_authority(volume, old, new);
            if let Some(state) = new.devices.get_mut(&volume)
                && state.disk == DiskState::UpToDate
                && !alone
            {
                state.disk = DiskState::Consistent;
            }
        }
        let quorum = self.count_quorum(volume, old, new);
        if let Some(state) = new.devices.get_mut(&volume) {
            state.quorum = quorum.have || planted!(self, QuorumNeverLost);
            state.have_quorum = state.quorum || self.options.quorum == Quorum::Off;
            let restore = self
                .devices
                .get(&volume)
                .and_then(|d| d.attached())
                .is_some_and(|d| d.restore_quorum);
            if !state.have_quorum && state.disk == DiskState::UpToDate && restore {
                state.have_quorum = true;
            }
        }
    }

    /// The lost Primary's disk was no good and nobody else's may be newer (4.4).
    fn sole_authority(&self, volume: VolumeNr, old: &State, new: &State) -> bool {
        let Some(state) = old.devices.get(&volume) else {
            return false;
        };
        state.peers.iter().all(|(peer, p)| {
            let lost_primary = old
                .connections
                .get(peer)
                .is_some_and(|c| c.peer_role == Role::Primary && c.conn == ConnState::Connected);
            if lost_primary {
                p.disk <= DiskState::Outdated
            } else {
                new.peer_device(volume, *peer).disk < DiskState::Consistent
            }
        })
    }

    fn sanitize_resource(&self, old: &State, new: &mut State) {
        self.sanitize_fencing(new);
        let wait_for_data = self.options.on_no_data_accessible == OnLoss::SuspendIo;
        let all_data = new.devices.values().all(|d| d.data_accessible());
        if all_data && !planted!(self, NoDataForEver) {
            new.susp_nod = false;
        } else if wait_for_data {
            let lost = new.devices.iter().any(|(v, d)| {
                !d.data_accessible()
                    && old
                        .devices
                        .get(v)
                        .is_some_and(crate::state::DeviceState::data_accessible)
            });
            if lost && new.role == Role::Primary {
                new.susp_nod = true;
            }
        }
        let stays = planted!(self, QuorumStaysFrozen) && old.susp_quorum;
        new.susp_quorum = new.role == Role::Primary && (stays || self.waits_for_quorum(new));
        if !new.susp_uuid
            && !planted!(self, ThawWithoutUuid)
            && old.suspended()
            && !new.suspended()
            && new.role == Role::Primary
            && self.devices.values().any(|d| d.new_uuid_pending)
        {
            new.susp_uuid = true;
        }
        let demoted = old.role == Role::Primary && new.role == Role::Secondary;
        if demoted {
            // Nobody waits for data here any more.
            new.susp_nod = false;
        }
        // What waited for the end of a suspension is not acknowledged by the demotion that ends it.
        let frozen =
            old.suspended() && !self.requests_are_answered() && !planted!(self, FrozenAnsweredWell);
        let yields = self.turns.yields;
        if demoted && !yields && (frozen || self.devices.values().any(|d| d.openers.writers > 0)) {
            new.fail_io = true;
        }
    }

    /// Some volume lacks quorum, and requests wait for it. A kernel tells that of a Secondary, too.
    pub(crate) fn waits_for_quorum(&self, state: &State) -> bool {
        self.options.on_no_quorum == OnLoss::SuspendIo
            && self.options.quorum != Quorum::Off
            && state.devices.values().any(|d| !d.have_quorum)
    }

    /// A reconciliation is owed or runs: a Consistent node does not become UpToDate (14.5).
    pub(crate) fn reconcile_hold(&self, volume: VolumeNr) -> bool {
        self.connections.values().any(|c| c.notify_lost_primary)
            || self
                .devices
                .get(&volume)
                .is_some_and(|d| d.peers.values().any(|p| p.reconcile != Reconcile::No))
    }

    /// Quorum of a volume (semantics.md, 11.1).
    pub(crate) fn count_quorum(&self, volume: VolumeNr, old: &State, new: &State) -> QuorumCount {
        let Some(state) = new.devices.get(&volume) else {
            return QuorumCount::default();
        };
        let Some(device) = self.devices.get(&volume) else {
            return QuorumCount::default();
        };
        let mut n = QuorumCount::default();
        let with_disk = state.disk > DiskState::Attaching && device.attached().is_some();
        match state.disk {
            DiskState::UpToDate => n.up_to_date += 1,
            DiskState::Diskless if device.intentional_diskless => n.diskless += 1,
            DiskState::Diskless => n.unknown += 1,
            _ => n.present += 1,
        }
        let have_now = old.devices.get(&volume).is_some_and(|d| d.have_quorum);
        // Outdated for somebody else: who has gone on may do so again.
        let left_behind = new.role == Role::Primary && self.others_have_gone_on(volume);
        let mut quorate_peers = 0;
        for peer in self.quorum_nodes(volume, with_disk) {
            let p = state.peers.get(&peer).copied();
            let options = device.peers.get(&peer).map(|pd| &pd.options);
            let diskless_on_purpose = match options {
                Some(options) => !options.bitmap,
                None => !self.slot_seen_with_disk(volume, peer),
            };
            let readable = self
                .connections
                .get(&peer)
                .is_none_or(|c| c.net.allow_remote_read);
            if !readable || (diskless_on_purpose && options.is_some_and(|o| !o.peer_tiebreaker)) {
                continue;
            }
            let p = p.unwrap_or_default();
            if p.repl == ReplState::Off {
                if diskless_on_purpose {
                    n.missing_diskless += 1;
                } else if (p.disk <= DiskState::Outdated && p.disk >= DiskState::Inconsistent)
                    || (with_disk && self.slot_is_outdated(volume, peer))
                {
                    match planted!(self, OutdatedCountsForQuorum) {
                        true => n.present += 1,
                        false if planted!(self, LastManFalls) => n.unknown += 1,
                        false if left_behind => n.unknown += 1,
                        false => n.outdated += 1,
                    }
                } else if have_now && !new.members.contains(peer) {
                    n.quorumless += 1;
                } else {
                    n.unknown += 1;
                }
            } else if p.disk == DiskState::Diskless && (diskless_on_purpose || !with_disk) {
                match planted!(self, DisklessVotes) {
                    true => n.present += 1,
                    false => n.diskless += 1,
                }
            } else if p.disk == DiskState::UpToDate {
                n.up_to_date += 1;
                if !with_disk && self.peer_is_quorate(volume, peer) {
                    quorate_peers += 1;
                }
            } else if planted!(self, RedundancyCountsPresent) {
                n.up_to_date += 1;
            } else {
                n.present += 1;
                let joins = old.peer_device(volume, peer).repl == ReplState::Off
                    || device.peers.get(&peer).is_some_and(|pd| pd.joined_behind);
                n.late += u32::from(joins);
            }
        }
        n.decide(
            self.options.quorum,
            match planted!(self, RedundancyIgnored) {
                true => Quorum::Off,
                false => self.options.quorum_minimum_redundancy,
            },
            quorate_peers,
            old.devices.get(&volume).is_some_and(|d| d.quorum)
                || planted!(self, TieBreakerGivesQuorum),
        );
        if planted!(self, HalfIsQuorum) {
            n.have |= (n.up_to_date + n.present) * 2 + 1 >= n.voters;
        }
        if planted!(self, MajorityNotEnough) {
            n.have &= n.up_to_date + n.present > n.needed || n.up_to_date + n.present == n.voters;
        }
        n
    }
}

fn new_peers(state: &crate::state::DeviceState) -> Vec<(NodeId, PeerDeviceState)> {
    state.peers.iter().map(|(n, p)| (*n, *p)).collect()
}

/// How the nodes of a volume were counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuorumCount {
    /// Connected and UpToDate.
    pub up_to_date: u32,
    /// Connected with a disk that is not UpToDate.
    pub present: u32,
    /// Of these: it came back so, and was not UpToDate since.
    pub late: u32,
    /// Gone, known to be outdated.
    pub outdated: u32,
    /// Gone, and not in this node's partition when it had quorum.
    pub quorumless: u32,
    /// Gone, nothing known.
    pub unknown: u32,
    /// Connected, without a disk on purpose.
    pub diskless: u32,
    /// Gone, without a disk on purpose.
    pub missing_diskless: u32,
    /// Nodes that have a vote.
    pub voters: u32,
    /// Votes needed.
    pub needed: u32,
    /// UpToDate nodes needed.
    pub needed_up_to_date: u32,
    /// The verdict.
    pub have: bool,
    /// It is that of a peer: by the votes alone there would be none.
    pub borrowed: bool,
}

impl QuorumCount {
    fn decide(&mut self, quorum: Quorum, redundancy: Quorum, quorate_peers: u32, have_now: bool) {
        let before = *self;
        self.decide_by_votes(quorum, redundancy, quorate_peers, have_now);
        if quorate_peers > 0 {
            let mut own = before;
            own.decide_by_votes(quorum, redundancy, 0, have_now);
            self.borrowed = !own.have;
        }
        let redundant = self.up_to_date >= self.needed_up_to_date;
        if !self.have && have_now && before.late > 0 && !redundant {
            // Whoever went on without a node needs no more redundancy because it comes back; it
            // would never be let in.
            let present = before.present - before.late;
            let outdated = QuorumCount {
                present,
                outdated: before.outdated + before.late,
                ..before
            };
            let unknown = QuorumCount {
                present,
                unknown: before.unknown + before.late,
                ..before
            };
            self.have = [outdated, unknown].into_iter().any(|mut without| {
                without.decide_by_votes(quorum, redundancy, quorate_peers, have_now);
                without.have
            });
        }
    }

    fn decide_by_votes(
        &mut self,
        quorum: Quorum,
        redundancy: Quorum,
        quorate_peers: u32,
        have_now: bool,
    ) {
        let needed = |setting: Quorum, voters: u32| match setting {
            Quorum::Off => 0,
            Quorum::Majority => voters / 2 + 1,
            Quorum::All => voters,
            Quorum::Number(n) => u32::from(n),
        };
        let here = self.up_to_date + self.present;
        let mut voters = self.outdated + self.quorumless + self.unknown + here;
        if self.outdated + self.quorumless + self.unknown >= needed(quorum, voters) {
            self.unknown += self.quorumless;
            self.quorumless = 0;
        }
        if self.unknown == 0 {
            voters = here;
        }
        self.voters = voters;
        self.needed = needed(quorum, voters);
        self.needed_up_to_date = needed(redundancy, voters);
        self.have =
            quorate_peers > 0 || (here >= self.needed && self.up_to_date >= self.needed_up_to_date);
        let majority = needed(Quorum::Majority, self.diskless + self.missing_diskless);
        if !self.have
            && voters != 0
            && voters.is_multiple_of(2)
            && here + 1 == self.needed
            && self.diskless >= majority
            && have_now
        {
            self.have = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(up_to_date: u32, unknown: u32, outdated: u32, quorum: Quorum) -> QuorumCount {
        let mut n = QuorumCount {
            up_to_date,
            unknown,
            outdated,
            ..QuorumCount::default()
        };
        n.decide(quorum, Quorum::Off, 0, true);
        n
    }

    #[test]
    fn majority_of_three_survives_one_loss_and_not_two() {
        assert!(count(2, 1, 0, Quorum::Majority).have);
        assert!(!count(1, 2, 0, Quorum::Majority).have);
    }

    #[test]
    fn the_last_man_standing_keeps_quorum_when_the_others_are_outdated() {
        assert!(count(1, 0, 2, Quorum::Majority).have);
        assert!(!count(1, 1, 1, Quorum::Majority).have);
    }

    #[test]
    fn a_diskless_tie_breaker_keeps_quorum_but_never_gives_it() {
        let mut n = QuorumCount {
            up_to_date: 1,
            unknown: 1,
            diskless: 1,
            ..Default::default()
        };
        n.decide(Quorum::Majority, Quorum::Off, 0, true);
        assert!(n.have);
        let mut n = QuorumCount {
            up_to_date: 1,
            unknown: 1,
            diskless: 1,
            ..Default::default()
        };
        n.decide(Quorum::Majority, Quorum::Off, 0, false);
        assert!(!n.have);
    }

    #[test]
    fn a_node_that_comes_back_behind_takes_no_redundancy_away() {
        let back = |late: u32, unknown: u32, have_now: bool| {
            let mut n = QuorumCount {
                up_to_date: 1,
                present: 1,
                late,
                unknown,
                ..QuorumCount::default()
            };
            n.decide(Quorum::Majority, Quorum::Majority, 0, have_now);
            n.have
        };
        assert!(back(1, 0, true));
        assert!(!back(0, 0, true), "it was lost as a copy while it was here");
        assert!(!back(1, 1, true), "somebody else may have quorum");
        assert!(!back(1, 0, false), "it gives none");
        // Nor from the half that a tie-breaker keeps going.
        let mut n = QuorumCount {
            up_to_date: 1,
            present: 1,
            late: 1,
            diskless: 1,
            ..QuorumCount::default()
        };
        n.decide(Quorum::Majority, Quorum::Number(2), 0, true);
        assert!(n.have);
    }

    #[test]
    fn without_a_quorum_setting_nothing_is_needed() {
        assert!(count(0, 3, 0, Quorum::Off).have);
    }
}
