//! A node without a disk between disks that may never meet each other (semantics.md, 13.8).

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, Uuid, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState, Role, UuidFlags};

use crate::change::Change;
use crate::command::ErrorCode;
use crate::resource::Resource;
use crate::state::{PeerDeviceState, State};
use crate::uuids::{PeerUuids, is_real};
use crate::validity::Refusal;

impl Resource {
    /// What speaks against the connect besides the verdicts of the volumes.
    pub(crate) fn may_be_joined(&self, peer: NodeId) -> Result<(), Refusal> {
        self.third_disk(peer)?;
        let mut volumes = self.devices.keys();
        let refusal = volumes.find_map(|volume| {
            let verdict = self
                .devices
                .get(volume)?
                .peers
                .get(&peer)?
                .verdict
                .as_ref()?;
            let whole = verdict.peer_disk == DiskState::UpToDate;
            let without = || self.without_held(*volume, peer);
            let parted = || self.has_parted_from_another(*volume, peer);
            whole.then(|| without().or_else(parted)).flatten()
        });
        refusal.map_or(Ok(()), Err)
    }

    /// What an UpToDate peer of the generation that this node exposes is to a Primary without a disk.
    pub(crate) fn disk_without_held(&self, volume: VolumeNr, peer: NodeId) -> DiskState {
        match self.lacks_held(volume, peer) {
            true => DiskState::Outdated,
            false => DiskState::UpToDate,
        }
    }

    /// The same when it is to be connected: what was held back has gone to others in the meantime.
    fn without_held(&self, volume: VolumeNr, peer: NodeId) -> Option<Refusal> {
        self.lacks_held(volume, peer).then(|| Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!("node {peer} has no part in a write of volume {volume} that is frozen"),
        })
    }

    /// A write of this Primary without a disk went to others and is not complete, because no generation
    /// without the peer can be made as long as there is no quorum. The peer was brought up to date by one of
    /// the others before that, so that its generation does not show it. When it has been copied again it has
    /// that write.
    pub(crate) fn lacks_held(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let settled = |req: &crate::data::AppRequest| {
            !req.completed
                && !req.sent.is_empty()
                && req.parked.is_empty()
                && !req.sent.contains(peer)
        };
        let writes = self.io.log.iter().chain(&self.io.held_completions);
        let mut writes = writes.filter_map(|key| self.io.requests.get(*key));
        self.state.role == Role::Primary
            && self.state.disk(volume) < DiskState::Inconsistent
            && !planted!(self, HeldWritesForgotten)
            && writes.any(|req| req.volume == volume && settled(req))
    }

    /// The same, seen from that peer: a Primary without a disk and without quorum calls it Outdated, or has not said yet
    /// what it calls it. Whoever has that write is not to be copied from this node.
    pub(crate) fn may_lack_held(&self, volume: VolumeNr, primary: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let said = device.and_then(|d| d.peers.get(&primary)?.last_state);
        said.is_some_and(|theirs| {
            theirs.disk < DiskState::Inconsistent
                && !theirs.quorum
                && (theirs.repl == ReplState::Off || theirs.pdsk == DiskState::Outdated)
                && self.is_lockstep(primary)
                && !planted!(self, HeldWritesForgotten)
        })
    }

    /// This node has no disk, and of two peers with whole ones the one knows the other's generation as an
    /// ancestor of its own. Those two may not be connected, and there is no Primary that would tell the older
    /// one: it learns that it is Outdated from here, and nothing is read from it.
    pub(crate) fn look_at_ancestors(&mut self, old: &State, new: &State) {
        self.look_at_new_primaries(old, new);
        let is_whole =
            |p: &PeerDeviceState| p.repl == ReplState::Established && p.disk == DiskState::UpToDate;
        // A Primary may have left one of them behind that has not noticed, and goes.
        let was_primary =
            |peer| old.connections.get(peer).map(|c| c.peer_role) == Some(Role::Primary);
        let mut connections = new.connections.iter();
        let demoted =
            connections.any(|(peer, c)| c.peer_role == Role::Secondary && was_primary(peer));
        for (volume, device) in &new.devices {
            let before = |peer| old.peer_device(*volume, peer);
            let mut peers = device.peers.iter();
            let came = peers.any(|(peer, p)| is_whole(p) && !is_whole(&before(*peer)));
            let left = demoted && !planted!(self, AncestorsReadAfterDemotion);
            if came {
                self.others_catch_up(*volume);
            }
            if came || left {
                self.outdate_ancestors(*volume);
            }
        }
    }

    /// This node without a disk exposes what the one has that came, or what one told: others are at it, too, and were called
    /// Outdated for it.
    pub(crate) fn others_catch_up(&mut self, volume: VolumeNr) {
        if self.state.disk(volume) >= DiskState::Inconsistent || planted!(self, OthersStayBehind) {
            return;
        }
        for peer in self.established_peers().iter() {
            if let Some(set) = self.peer_uuids(volume, peer).cloned() {
                self.catches_up_again(volume, peer, &set);
            }
        }
    }

    pub(crate) fn outdate_ancestors(&mut self, volume: VolumeNr) {
        let mut connections = self.state.connections.values();
        let writes = connections.any(|c| c.peer_role == Role::Primary);
        if writes
            || self.state.role == Role::Primary
            || self.state.disk(volume) >= DiskState::Inconsistent
            || planted!(self, AncestorsTrusted)
        {
            return;
        }
        let whole =
            |peer: &NodeId| self.state.peer_device(volume, *peer).disk == DiskState::UpToDate;
        let peers = self.established_peers();
        let whole: Vec<(NodeId, PeerUuids)> = peers
            .iter()
            .filter(whole)
            .filter_map(|peer| Some((peer, self.peer_uuids(volume, peer)?.clone())))
            .collect();
        let has_newer = |old: &PeerUuids| whole.iter().any(|(_, set)| is_newer(set, old));
        // One of the same generation may know that the other one came before it: then none of them is behind.
        let alone = planted!(self, TwinsDisagree);
        let same = |a: &PeerUuids, b: &PeerUuids| a.current.same_generation(b.current);
        let twins_have = |old: &PeerUuids| {
            let mut twins = whole.iter().filter(|(_, set)| same(set, old));
            alone || twins.all(|(_, set)| has_newer(set))
        };
        let is_behind = |old: &PeerUuids| has_newer(old) && twins_have(old);
        let (behind, good): (Vec<_>, Vec<_>) = whole.iter().partition(|(_, set)| is_behind(set));
        let (Some((_, newest)), Some(device)) = (good.first(), self.devices.get_mut(&volume))
        else {
            return;
        };
        if !behind.is_empty() || is_after(newest, device.exposed_uuid) {
            device.exposed_uuid = newest.current;
        }
        for (peer, _) in behind {
            self.remember_left_behind(volume, *peer);
            self.hard_change(Change::new().peer_disk(volume, *peer, DiskState::Outdated));
            self.send_uuids(*peer, volume, UuidFlags::empty());
            let state = self.state.clone();
            self.send_state(*peer, volume, &state);
        }
    }

    /// A neighbour is Primary, with a whole disk, and tells this node without one which generation is served. A follower
    /// may have one already that the Primary has announced, and will not make.
    pub(crate) fn is_told_by_primary(&self, volume: VolumeNr, follower: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let mut primaries = self.state.primaries();
        device.is_some_and(|d| !d.exposed_uuid.is_zero())
            && self.state.role == Role::Secondary
            && self.peer_role(follower) != Role::Primary
            && primaries.any(|primary| {
                let p = self.state.peer_device(volume, primary);
                p.repl >= ReplState::Established
                    && p.disk == DiskState::UpToDate
                    && self.is_lockstep(primary)
            })
    }

    /// Two peers have whole disks of which neither knows the other's generation: they have parted, and a node
    /// without a disk would read now from the one and now from the other.
    fn has_parted_from_another(&self, volume: VolumeNr, peer: NodeId) -> Option<Refusal> {
        if self.state.disk(volume) >= DiskState::Inconsistent {
            return None;
        }
        let set = self.peer_uuids(volume, peer)?;
        let strange = |third: &PeerUuids| !third.knows(set.current) && !set.knows(third.current);
        let others = self.established_peers().without(peer);
        let parted = others.iter().find(|other| {
            self.state.peer_device(volume, *other).disk == DiskState::UpToDate
                && self.peer_uuids(volume, *other).is_some_and(strange)
        })?;
        let third = self.peer_uuids(volume, parted)?;
        let own = self.node_id;
        if set.yields_to(third, own) || third.yields_to(set, own) {
            return Some(Refusal {
                code: ErrorCode::HANDSHAKE_RETRY,
                text: format!(
                    "nodes {peer} and {parted} have different generations of volume {volume}, and under one of \
                     them nothing was written: that one is to be copied from the other"
                ),
            });
        }
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_DISCONNECT,
            text: format!(
                "the data of volume {volume} on node {peer} and on node {parted} have parted (split brain)"
            ),
        })
    }
}

/// The data have gone on from that generation. A target that names its source's at the end of a resync does so before
/// its disk counts.
fn is_after(set: &PeerUuids, exposed: Uuid) -> bool {
    let made = set.knows(exposed) && !set.history_notes(exposed);
    is_real(exposed) && made && !set.current.same_generation(exposed)
}

/// The data of the other set are an ancestor of these. What is only noted as announced may never have been made.
fn is_newer(set: &PeerUuids, old: &PeerUuids) -> bool {
    let made = |of: &PeerUuids, uuid| of.knows(uuid) && !of.history_notes(uuid);
    !set.current.same_generation(old.current) && made(set, old.current) && !made(old, set.current)
}
