//! What a checker outside may ask: whether this node knows of a difference to a peer.

use lockstep_format::disk::v09::PeerFlags;
use lockstep_format::units::{NodeId, Sector, Uuid, VolumeNr};
use lockstep_format::wire::DiskState;

use crate::resource::Resource;

impl Resource {
    /// Whether this node, as it is in memory, would not take a block for equal to a peer's: it is
    /// marked, or a write that covers it is not settled, after which it is marked if it has to be.
    /// None without a disk whose metadata are in memory, or without a bitmap for the peer.
    pub fn suspects(&self, volume: VolumeNr, peer: NodeId, sector: Sector) -> Option<bool> {
        let disk = self.devices.get(&volume)?.attached()?;
        if self.state.disk(volume) <= DiskState::Failed {
            return None;
        }
        let slot = disk.io.slot(peer)?;
        let bit = sector.0 / disk.io.bitmap.shape().block().sectors();
        let full = PeerFlags::FULL_SYNC;
        let marked = disk.io.bitmap.word(slot, bit / 64) >> (bit % 64) & 1 == 1
            || disk.generations.slot(peer).flags.contains(full);
        Some(marked || self.is_unsettled(volume, sector))
    }

    /// What this node knows of a volume's state and generations, counted in changes: how many are durable, and
    /// how many there were. None without a disk that takes writes.
    pub fn noted(&self, volume: VolumeNr) -> Option<(u64, u64)> {
        let disk = self.devices.get(&volume)?.disk.as_ref()?;
        let counts = (disk.writer.durable, disk.writer.changed);
        self.takes_writes(volume).then_some(counts)
    }

    /// The generation of this node's data: of its disk, or what it has exposed without one.
    pub fn generation(&self, volume: VolumeNr) -> Option<Uuid> {
        self.devices.get(&volume).map(|d| d.current_uuid())
    }

    /// What this node takes for a peer's generation, and whether the peer has quorum as it sees it. None before
    /// the peer has told.
    pub fn believes_of(&self, volume: VolumeNr, peer: NodeId) -> Option<(Uuid, bool)> {
        let p = self.devices.get(&volume)?.peers.get(&peer)?;
        let current = p.uuids.as_ref().map_or(p.current_uuid, |u| u.current);
        Some((current, p.quorate))
    }

    /// Own writes that some peer has not made durable yet, or this node has not settled for another reason.
    pub fn unsettled(&self) -> usize {
        let keys = self.io.log.iter();
        keys.filter(|key| self.io.requests.get(**key).is_some())
            .count()
    }

    /// The cluster-wide change that this node takes part in: its number and who began it.
    pub fn transaction(&self) -> Option<(u32, NodeId)> {
        let running = self.twopc.current.as_ref()?;
        Some((running.tid, running.initiator))
    }

    fn is_unsettled(&self, volume: VolumeNr, sector: Sector) -> bool {
        let covers = |from: Sector, size: u32| from <= sector && sector < from.end_of(size);
        let own = self.io.log.iter().any(|key| {
            let req = self.io.requests.get(*key);
            req.is_some_and(|r| r.volume == volume && covers(r.sector, r.size_bytes))
        });
        own || self.connections.values().any(|conn| {
            let mut writes = conn.io.writes.iter();
            writes.any(|w| w.volume == volume && covers(w.sector, w.size_bytes))
        })
    }
}
