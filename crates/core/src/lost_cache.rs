//! Disks of peers that lost their power together with what applications of this Primary hold for written.
//!
//! A peer acknowledges a write that its disk has in a cache, where this node's disk has it as well. If the peer
//! loses its power then, this node marks the block and copies it again. But its own disk may go before that, and
//! nothing was written since, so that no generation tells the two apart: the peer comes back with what applications
//! have seen, as it seems, and they would read older data. The same holds for two peers of a node without a disk.
//! Whether the peer lost anything only the two of them can tell: this node knows that there was something to
//! lose, and the peer says whether its disk was attached after a crash that it did not part from this node before
//! (UUID flag CACHE_LOST; only Lockstep says it). Its metadata remember that: CONNECTED in this node's slot goes with a
//! flush of the data. Where only its process ended the disk's cache is kept, which the driver tells at the attach
//! ([`DiskCache`]); who has not heard of an earlier loss then is noted with it.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use lockstep_format::disk::v09::PeerFlags;
use lockstep_format::units::{NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, PeerState, ReplState, Role, UuidFlags};

use crate::command::ErrorCode;
use crate::device::{Device, LocalDisk, PeerDevice};
use crate::event::{DiskCache, Output};
use crate::options::Protocol;
use crate::report::Level;
use crate::resource::Resource;
use crate::validity::Refusal;

/// What a peer's disk may have had in its cache when its link broke.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PeerCache {
    /// Nothing that matters.
    #[default]
    Safe,
    /// Writes that applications hold for done. Whether the peer still has them is not known.
    InDoubt,
    /// The same, and the peer has lost its cache. Applications saw this generation then.
    Lost(Uuid),
}

impl LocalDisk {
    /// The metadata are in memory: with these nodes the disk was connected when its node crashed with its cache.
    pub(crate) fn note_crash(&mut self) {
        let untold = match self.info.cache {
            DiskCache::MayBeLost => (0..NodeId::COUNT).map(NodeId).collect(),
            DiskCache::Kept { untold } => untold,
        };
        let was_connected = |node: &NodeId| {
            let slot = self.generations.slot(*node);
            untold.contains(*node) && slot.flags.contains(PeerFlags::CONNECTED)
        };
        self.crashed_with = (0..NodeId::COUNT)
            .map(NodeId)
            .filter(was_connected)
            .collect();
    }

    /// The peer is connected to this node, or is not. What it hears of a crash it hears before that. Whether the driver
    /// has to note something else than before.
    pub(crate) fn note_connected(&mut self, peer: NodeId, repl: ReplState, own: DiskState) -> bool {
        let connected = repl > ReplState::Off;
        let before = self.crashed_with;
        if connected && own >= DiskState::Inconsistent {
            self.crashed_with.remove(peer);
        }
        let is_noted = connected || self.crashed_with.contains(peer);
        let slot = self.generations.slot_mut(peer);
        // What came from it is durable when the metadata say that it is gone.
        self.writer.flush_data |= slot.flags.contains(PeerFlags::CONNECTED) && !is_noted;
        slot.flags.set(PeerFlags::CONNECTED, is_noted);
        self.crashed_with != before
    }

    /// The last superblock of a detach in good order: everything is durable.
    pub(crate) fn parts_clean(&mut self) {
        for node in (0..NodeId::COUNT).map(NodeId) {
            if !self.crashed_with.contains(node) {
                let slot = self.generations.slot_mut(node);
                slot.flags.remove(PeerFlags::CONNECTED);
            }
        }
    }
}

impl PeerDevice {
    /// The connection is gone, and this was the peer's disk.
    pub(crate) fn leaves(&mut self, disk: DiskState) {
        self.reconnect = true;
        self.left_whole = disk == DiskState::UpToDate;
    }
}

impl Device {
    /// Some peer has lost what applications hold for done, and this is the generation that they saw then.
    fn seen_before_loss(&self) -> Option<Uuid> {
        self.peers.values().find_map(|pd| match pd.cache {
            PeerCache::Lost(seen) => Some(seen),
            PeerCache::Safe | PeerCache::InDoubt => None,
        })
    }
}

impl Resource {
    /// The link to the peer is gone, and requests still wait for its words about stable storage.
    pub(crate) fn note_cached(&mut self, peer: NodeId) {
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        // With protocol A nobody says that a peer has a write (`copies_are_lost`).
        let answers = conn.net.protocol != Protocol::A;
        if !answers || !self.last_was_lockstep(peer) || planted!(self, LostCacheTrusted) {
            return;
        }
        let requests = conn.io.sent.iter();
        let volumes: Vec<VolumeNr> = requests
            .filter_map(|key| self.io.requests.get(*key))
            .filter(|req| req.completed && req.ok.contains(peer))
            .filter(|req| req.unsettled.contains(peer))
            .filter(|req| req.relied.union(req.beside).contains(peer))
            .map(|req| req.volume)
            .collect();
        for volume in volumes {
            if let Some(pd) = self.peer_device_mut(volume, peer)
                && pd.cache == PeerCache::Safe
            {
                pd.cache = PeerCache::InDoubt;
                self.caches_in_doubt = true;
            }
        }
    }

    /// A peer that is sent a write may take another one's disk for a second copy, and acknowledge what its own has in
    /// a cache.
    pub(crate) fn has_copies_beside(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let may_be_whole = |node: NodeId| {
            let p = self.state.peer_device(volume, node);
            let known = self.state.conn(node) == ConnState::Connected;
            // Others hear of a disk that goes a moment later.
            !known
                || matches!(
                    p.disk,
                    DiskState::UpToDate | DiskState::Detaching | DiskState::Failed
                )
        };
        let peers = self.devices.get(&volume).map(|d| d.peers.iter());
        peers.is_some_and(|mut peers| {
            peers.any(|(node, pd)| *node != peer && pd.options.bitmap && may_be_whole(*node))
        })
    }

    /// What speaks against the use of the peer's disk, which has told its UUIDs and its state.
    pub(crate) fn refuse_lost_cache(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
    ) -> Option<Refusal> {
        if !self.caches_in_doubt {
            return None;
        }
        let device = self.devices.get(&volume)?;
        let pd = device.peers.get(&peer)?;
        let (before, exposed) = (pd.cache, device.exposed_uuid);
        let set = self.peer_uuids(volume, peer)?;
        let lost = set.flags.contains(UuidFlags::CACHE_LOST);
        let is_at = |seen: Uuid| seen.same_generation(set.current) || !set.knows(seen);
        let usable = theirs.disk > DiskState::Inconsistent && theirs.disk != DiskState::DUnknown;
        let after = match before {
            _ if !self.needs_cache_of_peers(volume) => PeerCache::Safe,
            PeerCache::InDoubt if lost => PeerCache::Lost(exposed),
            PeerCache::InDoubt if !usable => before,
            // Else it was copied since then.
            PeerCache::Lost(seen) if is_at(seen) => before,
            PeerCache::Lost(_) => PeerCache::Safe,
            // What it has may come from the one that lost something.
            PeerCache::Safe | PeerCache::InDoubt => match device.seen_before_loss() {
                Some(seen)
                    if seen.same_generation(set.current)
                        && (lost || !pd.left_whole)
                        && self.who_keeps_all(volume).is_empty() =>
                {
                    PeerCache::Lost(seen)
                }
                _ => PeerCache::Safe,
            },
        };
        let first = before == PeerCache::InDoubt;
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            // Without a disk, or with one that is being copied, it shows later what it has.
            pd.cache = match before {
                PeerCache::Safe if !usable => before,
                _ => after,
            };
        }
        if after == PeerCache::Safe || !usable {
            return None;
        }
        let text = format!(
            "node {peer} came back after a crash and may lack writes to volume {volume} that it had acknowledged to \
             this Primary, which has no whole disk itself; attach one that has them, connect another node, or demote \
             this one to go on with older data"
        );
        if first {
            self.log(Level::Error, Some(peer), Some(volume), text.clone());
        }
        Some(Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text,
        })
    }

    /// An attach has read what the disk lost.
    pub(crate) fn log_lost_cache(&mut self, volume: VolumeNr) {
        let disk = self.devices.get(&volume).and_then(|d| d.disk.as_ref());
        let lost_for = disk.map_or(NodeMask::EMPTY, |disk| disk.crashed_with);
        if lost_for.is_empty() {
            return;
        }
        let nodes: Vec<String> = lost_for.iter().map(|n| n.to_string()).collect();
        let text = format!(
            "the disk was in use when the machine or the disk went down: what it had in its cache of writes from node \
             {} may be lost",
            nodes.join(", ")
        );
        self.log(Level::Info, None, Some(volume), text);
    }

    /// From here on the driver tells a crash of the process from one of the machine.
    fn note_caches(&mut self) {
        if !self.caches_unnoted {
            return;
        }
        self.caches_unnoted = false;
        let noted: Vec<Output> = self
            .devices
            .iter()
            .filter_map(|(volume, d)| {
                let disk = d.disk.as_ref().filter(|disk| disk.superblock.is_some())?;
                Some(Output::NoteCache {
                    volume: *volume,
                    untold: disk.crashed_with,
                })
            })
            .collect();
        for output in noted {
            self.output(output);
        }
    }

    /// After every input: disks that lack something are not used as long as nobody has copied it there.
    pub(crate) fn settle_caches(&mut self) {
        self.note_caches();
        if !self.caches_in_doubt {
            return;
        }
        let doubts: Vec<(VolumeNr, NodeId, PeerCache)> = self
            .devices
            .iter()
            .flat_map(|(volume, d)| {
                let peers = d.peers.iter().filter(|(_, pd)| pd.cache != PeerCache::Safe);
                peers.map(|(peer, pd)| (*volume, *peer, pd.cache))
            })
            .collect();
        self.caches_in_doubt = !doubts.is_empty();
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            self.look_who_keeps_all(volume);
        }
        for (volume, peer, cache) in doubts {
            let p = self.state.peer_device(volume, peer);
            let connected = self.state.conn(peer) == ConnState::Connected;
            let others = !self.who_keeps_all(volume).without(peer).is_empty();
            let copied = connected && others && p.disk == DiskState::Inconsistent;
            let target = connected && self.state.disk(volume) == DiskState::UpToDate;
            if self.state.role == Role::Secondary || copied || target {
                if let Some(pd) = self.peer_device_mut(volume, peer) {
                    pd.cache = PeerCache::Safe;
                }
                continue;
            }
            let PeerCache::Lost(seen) = cache else {
                self.look_at_late_disk(volume, peer);
                continue;
            };
            if self.needs_cache_of_peers(volume) && others {
                self.leave_cache_behind(volume, seen);
            }
        }
    }

    /// A peer in doubt connected without a disk, and attaches it.
    fn look_at_late_disk(&mut self, volume: VolumeNr, peer: NodeId) {
        let p = self.state.peer_device(volume, peer);
        let lost = self
            .peer_uuids(volume, peer)
            .is_some_and(|set| set.flags.contains(UuidFlags::CACHE_LOST));
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let exposed = device.exposed_uuid;
        let attaches =
            p.repl > ReplState::Off && p.disk > DiskState::Failed && p.disk != DiskState::DUnknown;
        if let Some(pd) = device.peers.get_mut(&peer).filter(|_| attaches) {
            match (lost, p.disk) {
                (true, _) => pd.cache = PeerCache::Lost(exposed),
                (false, DiskState::Negotiating) => {}
                (false, _) => pd.cache = PeerCache::Safe,
            }
        }
    }

    /// Of the peers that are connected, those with everything remain. One that becomes UpToDate beside them is one of
    /// them; without them it has what it has from a node that lost something, or is that node.
    fn look_who_keeps_all(&mut self, volume: VolumeNr) {
        let needed = self.needs_cache_of_peers(volume);
        let connected = self.established_peers();
        let whole: NodeMask = connected
            .iter()
            .filter(|node| self.state.peer_device(volume, *node).disk == DiskState::UpToDate)
            .collect();
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let Some(seen) = device.seen_before_loss().filter(|_| needed) else {
            device.keeps_all = whole;
            return;
        };
        device.keeps_all = device.keeps_all.intersection(whole);
        let at_seen = |pd: &PeerDevice| {
            let set = pd.uuids.as_ref();
            set.is_some_and(|set| set.current.same_generation(seen) || !set.knows(seen))
        };
        for (node, pd) in device.peers.iter_mut() {
            pd.left_whole &= !connected.contains(*node) || whole.contains(*node);
        }
        let mut lacking = NodeMask::EMPTY;
        for node in whole.difference(device.keeps_all).iter() {
            let Some(pd) = device.peers.get_mut(&node) else {
                continue;
            };
            let is_lost = matches!(pd.cache, PeerCache::Lost(_));
            let alone = device.keeps_all.is_empty() && at_seen(pd);
            // Its handshake was admitted.
            let admitted = pd.left_whole && pd.cache == PeerCache::Safe;
            if is_lost || alone && !admitted {
                pd.cache = PeerCache::Lost(seen);
                lacking.insert(node);
            } else {
                device.keeps_all.insert(node);
            }
        }
        for node in lacking.iter() {
            self.drop_connection(node, ConnState::NetworkFailure);
        }
    }

    fn who_keeps_all(&self, volume: VolumeNr) -> NodeMask {
        let device = self.devices.get(&volume);
        device.map_or(NodeMask::EMPTY, |d| d.keeps_all)
    }

    /// Applications see the data of others: what a peer lost is nowhere but with those.
    fn needs_cache_of_peers(&self, volume: VolumeNr) -> bool {
        self.state.role == Role::Primary && self.state.disk(volume) < DiskState::UpToDate
    }

    /// What applications see gets a name that the peer does not know, by which the others copy it again.
    fn leave_cache_behind(&mut self, volume: VolumeNr, seen: Uuid) {
        if self.new_uuid.is_some() {
            return;
        }
        if let Some(device) = self.devices.get_mut(&volume)
            && device.exposed_uuid.same_generation(seen)
            && !device.new_uuid_forced
        {
            device.uuid_is_due(true, false);
            self.want_new_uuid_now();
        }
    }

    fn last_was_lockstep(&self, peer: NodeId) -> bool {
        let conn = self.connections.get(&peer);
        conn.is_some_and(|c| c.link.is_some() || c.last_dialect.is_some())
            && !self.last_was_kernel(peer)
    }
}
