//! Whose disk holds what a crashed Primary alone has completed (protocols A and B).
//!
//! A Primary that comes back after a crash is the source of its peers (semantics.md, 13.4, rule crashed-primary):
//! with these protocols it may have completed writes that none of them has. It says so to each peer that it meets
//! until that one is whole, and not only to the first: the others are of the same generation, and their marks
//! alone do not tell who is ahead. Whoever was copied from such a disk says it in its place. So does one that lost
//! quorum and was demoted: it may have completed writes before it knew that nobody was left.

use alloc::format;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState, Role, UuidFlags};

use crate::command::ErrorCode;
use crate::device::{Device, LocalDisk};
use crate::options::Protocol;
use crate::resource::Resource;
use crate::state::{DeviceState, PeerDeviceState};
use crate::validity::Refusal;

impl LocalDisk {
    /// The Primary has no quorum. Peers that are gone, or not whole, may lack what it has completed.
    pub(crate) fn is_left_alone(&mut self, state: &DeviceState) {
        let whole =
            |p: &PeerDeviceState| p.disk == DiskState::UpToDate && p.repl >= ReplState::Established;
        let lacking = state.peers.iter().filter(|(_, p)| !whole(p));
        self.crashed_for = lacking.map(|(peer, _)| *peer).collect();
        self.primary_lost_quorum = true;
    }

    /// There is quorum again. Behind a Primary nobody is taken for ahead of it; who was demoted is ahead until the
    /// others have met it.
    pub(crate) fn left_alone_ends(&mut self, role: Role) {
        if self.primary_lost_quorum && role == Role::Primary {
            self.crashed_for = NodeMask::EMPTY;
        }
        self.primary_lost_quorum = false;
    }
}

impl Device {
    /// The peer and this node are whole. `before` is what the peer was until now. Behind a Primary there is no
    /// crashed one any more: what it writes is newer.
    pub(crate) fn met_whole(&mut self, peer: NodeId, before: &PeerDeviceState, primary: bool) {
        let was_whole = before.disk == DiskState::UpToDate && before.repl >= ReplState::Established;
        if let Some(disk) = self.disk.as_mut() {
            disk.crashed_primary = false;
            if primary {
                disk.crashed_for = NodeMask::EMPTY;
            } else if !was_whole {
                disk.crashed_for.remove(peer);
            }
        }
        if let Some(pd) = self.peers.get_mut(&peer)
            && !pd.consider_resync
            && let Some(uuids) = pd.uuids.as_mut()
        {
            uuids.flags.remove(UuidFlags::CRASHED_PRIMARY);
        }
    }
}

impl Resource {
    /// The peer hears that this disk holds what a crashed Primary has completed.
    pub(crate) fn speaks_for_crashed(&self, peer: NodeId, volume: VolumeNr) -> bool {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let waits = disk.is_some_and(|disk| disk.crashed_for.contains(peer));
        let conn = self.connections.get(&peer);
        let early = conn.is_some_and(|c| c.is_lockstep() && c.net.protocol != Protocol::C);
        waits && early && !planted!(self, CrashedCopyUntold)
    }

    /// A node without a disk is Primary, or would be, beside this disk and others, and reads now here and now
    /// there. This one came back after a crash as Primary: it may have what the others lack, or lack what they
    /// have, and only a comparison tells. `seen`: whom that node is connected to.
    pub(crate) fn unmet_beside(
        &self,
        client: NodeId,
        role: Role,
        seen: NodeMask,
    ) -> Result<(), Refusal> {
        let met = self.established_peers().with(client);
        let unmet = self.devices.iter().find_map(|(volume, device)| {
            let with_disk = |node| device.peers.get(&node).is_some_and(|pd| pd.options.bitmap);
            let reads = !with_disk(client)
                || self.state.peer_device(*volume, client).disk == DiskState::Diskless;
            let whole = self.state.disk(*volume) == DiskState::UpToDate;
            let crashed = device.attached()?.crashed_for;
            let mut unmet = crashed.intersection(seen).difference(met).iter();
            let unmet = unmet.find(|node| with_disk(*node))?;
            (whole && reads).then_some((*volume, unmet))
        });
        match unmet.filter(|_| role == Role::Primary && !planted!(self, CrashedDiskUnmet)) {
            None => Ok(()),
            Some((volume, node)) => Err(Refusal {
                code: ErrorCode::IN_TRANSIENT_STATE,
                text: format!(
                    "this node crashed as Primary, and volume {volume} was not compared with node {node} since"
                ),
            }),
        }
    }

    /// This disk was copied from `source`'s.
    pub(crate) fn copied_from_crashed(&mut self, source: NodeId, volume: VolumeNr) {
        let crashed = self
            .peer_uuids(volume, source)
            .is_some_and(|set| set.flags.contains(UuidFlags::CRASHED_PRIMARY));
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let others = device.peers.keys().copied().filter(|node| *node != source);
        let others = if crashed {
            others.collect()
        } else {
            NodeMask::EMPTY
        };
        if let Some(disk) = device.disk.as_mut() {
            disk.crashed_for = others;
        }
    }

    /// Both have compared: what a crashed Primary has completed is on its way.
    pub(crate) fn compared_beside_crashed(&mut self, peer: NodeId, volume: VolumeNr) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        if let Some(disk) = device.disk.as_mut() {
            disk.crashed_for.remove(peer);
        }
        let up = self.state.peer_device(volume, peer).disk == DiskState::UpToDate;
        if let Some(uuids) = self
            .peer_device_mut(volume, peer)
            .and_then(|pd| pd.uuids.as_mut())
            && up
        {
            uuids.flags.remove(UuidFlags::CRASHED_PRIMARY);
        }
    }
}
