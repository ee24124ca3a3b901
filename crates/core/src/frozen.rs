//! A frozen Primary that meets newer data (semantics.md, 9.2 and 11.4).
//!
//! It lost its quorum or its data, and the others went on without it. By default the connection is
//! refused and it stays frozen until the operator decides. With `on-suspended-primary-outdated
//! force-secondary` it becomes Secondary whoever has it open, its waiting requests fail, and the
//! next handshake makes it target of a resync.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState, Role};

use crate::command::ErrorCode;
use crate::compare::{Direction, Strategy};
use crate::device::PeerDevice;
use crate::open::Access;
use crate::options::OnSuspendedPrimaryOutdated;
use crate::report::Level;
use crate::resource::Resource;
use crate::state::{DeviceState, ReplSets};
use crate::transition::Change;
use crate::uuids::is_real;
use crate::validity::Refusal;

/// A demotion that is due because a peer has newer data.
#[derive(Debug, Default)]
pub(crate) struct GivesWay {
    /// To whom.
    peer: Option<NodeId>,
    /// Volumes whose data are older here.
    volumes: BTreeSet<VolumeNr>,
}

impl Resource {
    /// This node is a frozen Primary that gives way to newer data.
    pub(crate) fn would_give_way(&self) -> bool {
        self.state.role == Role::Primary
            && (self.state.susp_quorum || self.state.susp_nod)
            && self.options.on_suspended_primary_outdated
                == OnSuspendedPrimaryOutdated::ForceSecondary
    }

    /// The handshake shows that the peer's data are newer than those of this frozen Primary: it
    /// gives its role up, and the peer tries again.
    pub(crate) fn give_way(&mut self, peer: NodeId, volume: VolumeNr) -> Refusal {
        self.gives_way.peer = Some(peer);
        self.gives_way.volumes.insert(volume);
        Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!(
                "node {peer} has newer data of volume {volume}; this frozen Primary gives its \
                 role up"
            ),
        }
    }

    /// The comparison asks for it: this Primary's data would become older under its users, or the
    /// peer is Primary of a newer generation, or connected to one. Two Primaries cannot connect, though
    /// nothing may have been written since.
    pub(crate) fn has_to_give_way(
        &self,
        peer: NodeId,
        volume: VolumeNr,
        strategy: Strategy,
        peer_role: Role,
    ) -> bool {
        let mut primaries = self.primaries_beside(volume, peer);
        if peer_role == Role::Primary {
            primaries.insert(peer);
        }
        let to_primary = !primaries.iter().all(|p| self.may_both_be_primary(p))
            && strategy.direction() == Some(Direction::Target)
            && !self.same_current(volume, peer);
        self.would_give_way() && (outdates_primary(strategy) || to_primary)
    }

    /// Who is connected to a Primary names it in its UUIDs (semantics.md, 14.2).
    fn primaries_beside(&self, volume: VolumeNr, peer: NodeId) -> NodeMask {
        let named = (self.peer_uuids(volume, peer))
            .filter(|set| !self.is_stable_set(set) && !planted!(self, WaysToPeersOnly))
            .map_or(NodeMask::EMPTY, |set| set.node_mask);
        named.without(self.node_id)
    }

    /// What a connect that was refused has taught all the same (semantics.md, 9.2). To be called before
    /// the handshake's verdicts are dropped.
    pub(crate) fn learn_from_handshake(&mut self, peer: NodeId, code: ErrorCode) {
        self.apply_local_consequences(peer);
        self.give_way_to_another(peer, code);
    }

    /// A connect was refused because of a Primary elsewhere, perhaps beyond the peer: if the peer's
    /// data are the newer ones, this frozen Primary gives way to that one (semantics.md, 9.2).
    fn give_way_to_another(&mut self, peer: NodeId, code: ErrorCode) {
        let conflict = [ErrorCode::TWO_PRIMARIES, ErrorCode::CW_FAILED_BY_PEER].contains(&code);
        if !conflict || !self.would_give_way() || planted!(self, WaysToPeersOnly) {
            return;
        }
        let newer: BTreeSet<VolumeNr> = (self.devices.iter())
            .filter(|(volume, device)| {
                let verdict = device.peers.get(&peer).and_then(|pd| pd.verdict.as_ref());
                verdict.is_some_and(|v| v.repl.becomes_target())
                    && !self.same_current(**volume, peer)
            })
            .map(|(volume, _)| *volume)
            .collect();
        for volume in newer {
            // The connect has failed already.
            let _ = self.give_way(peer, volume);
        }
    }

    /// A diskless Primary sees newer data than those that it serves.
    pub(crate) fn older_than(&mut self, peer: NodeId, volume: VolumeNr) -> Refusal {
        if self.would_give_way() {
            return self.give_way(peer, volume);
        }
        Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!("node {peer} has newer data of volume {volume} than this Primary"),
        }
    }

    /// A peer that was not whole until now has gone on from what this Primary without a disk serves, with another
    /// Primary, and nobody else has that any more. What this one still has to write would replace newer data.
    pub(crate) fn has_gone_on(&self, volume: VolumeNr, peer: NodeId, role: Role) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return false;
        };
        let exposed = device.exposed_uuid;
        let Some(set) = self.peer_uuids(volume, peer) else {
            return false;
        };
        let named = |uuid: &Uuid| uuid.same_generation(set.current);
        let planned = self.new_uuid.as_ref();
        let own = device.announced.iter().any(named)
            || planned.is_some_and(|new| new.plans.contains_key(&volume));
        let state = self.state.devices.get(&volume);
        role == Role::Primary
            && is_real(exposed)
            && !exposed.same_generation(set.current)
            && set.knows(exposed)
            && !own
            && state.is_some_and(|state| !state.data_accessible())
            && !planted!(self, GoneOnServes)
    }

    /// After every input: such a peer is met again, and refused as long as this node is Primary.
    pub(crate) fn settle_gone_on(&mut self) {
        if self.state.role != Role::Primary {
            return;
        }
        let mut gone = Vec::new();
        let without_disk = |d: &DeviceState| d.disk <= DiskState::Failed;
        let devices = self.state.devices.iter();
        for (volume, state) in devices.filter(|(_, d)| without_disk(d)) {
            for (peer, p) in &state.peers {
                let device = self.devices.get(volume);
                let pd = device.and_then(|d| d.peers.get(peer));
                let said = pd.and_then(|pd| pd.last_state);
                if p.repl >= ReplState::Established
                    && p.disk == DiskState::Outdated
                    && said.is_some_and(|said| said.disk == DiskState::UpToDate)
                    && self.has_gone_on(*volume, *peer, Role::Primary)
                {
                    gone.push((*volume, *peer));
                }
            }
        }
        for (volume, peer) in gone {
            let refusal = self.older_than(peer, volume);
            self.log(Level::Warn, Some(peer), Some(volume), refusal.text);
            self.drop_connection(peer, ConnState::NetworkFailure);
        }
    }

    /// Others have gone on from what this Primary's disk has: one of them has shown it in a handshake that was refused,
    /// or a node without a disk that they told calls this disk Outdated. That they are Outdated themselves, because they
    /// do not reach this Primary, makes them no older than it.
    pub(crate) fn others_have_gone_on(&self, volume: VolumeNr) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return false;
        };
        let Some(disk) = device.attached() else {
            return false;
        };
        let own = disk.generations.current;
        let has_gone_on = |pd: &PeerDevice| {
            let Some(set) = &pd.uuids else { return false };
            let calls_outdated = || {
                let said = pd.last_state;
                said.is_some_and(|s| s.disk == DiskState::Diskless && s.pdsk == DiskState::Outdated)
            };
            is_real(set.current)
                && set.current != Uuid::JUST_CREATED
                && !disk.generations.knows(set.current)
                && (set.knows(own) && !set.history_notes(own) || calls_outdated())
        };
        device.peers.values().any(has_gone_on) && !planted!(self, LeftBehindCounts)
    }

    /// The demotion, once the input that showed the newer data is dealt with; and the end of the
    /// failures that go with it.
    pub(crate) fn settle_give_way(&mut self) {
        let due = core::mem::take(&mut self.gives_way);
        if let Some(peer) = due.peer
            && self.would_give_way()
        {
            self.log(
                Level::Error,
                Some(peer),
                None,
                "this Primary is frozen and the peer has newer data: it becomes Secondary, and \
                 its waiting requests fail"
                    .into(),
            );
            self.keep_turn();
            let mut change = Change::new().role(Role::Secondary).fail_io(true);
            change.ignore_openers = true;
            for volume in due.volumes {
                let stays = planted!(self, GivesWayStaysCurrent);
                if self.state.disk(volume) > DiskState::Outdated && !stays {
                    change = change.disk(volume, DiskState::Outdated);
                }
            }
            self.hard_change(change);
        }
        // Who has a volume open sees errors until it is closed (7.4).
        let open = self.has_openers(Access::Read) || self.has_openers(Access::Write);
        if self.state.fail_io
            && !planted!(self, FailuresNeverEnd)
            && self.state.role == Role::Secondary
            && !open
            && self.requests_are_answered()
        {
            self.hard_change(Change::new().fail_io(false));
        }
    }
}

/// This node is Primary and would have to become target of a resync.
pub(crate) const fn outdates_primary(strategy: Strategy) -> bool {
    matches!(
        strategy,
        Strategy::SyncTargetPrimaryDisconnect | Strategy::SyncTargetPrimaryReconnect
    )
}
