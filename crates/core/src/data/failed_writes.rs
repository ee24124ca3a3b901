//! Writes that a disk refused while the other one has them (semantics.md, 15.7).
//!
//! A write is settled long after it failed: with the barrier of its epoch, or the peer ack. A resync may have copied its
//! blocks by then, and marks that were set at that moment would stay on disks that are equal. So they are set when it
//! fails, or when its failure is told, and settling it sets none.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, Sector, VolumeNr};

use super::peer_write::{PeerWrite, Stage};
use super::slab::Key;
use super::write::{AppRequest, Local};
use crate::resource::Resource;

impl AppRequest {
    /// The peer has it, and is in sync for it.
    pub(super) fn note_in_sync(&mut self, peer: NodeId) {
        if !self.replaced.contains(peer) {
            self.in_sync.insert(peer);
        }
    }
}

impl Resource {
    /// A peer does not have a write of this node.
    pub(super) fn mark_refused(&mut self, peer: NodeId, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        let (volume, sector, size_bytes) = (req.volume, req.sector, req.size_bytes);
        // Another disk than the one that it went to says nothing of what the peer lacks.
        let here = req.al == Some(self.al_serial(volume));
        self.peer_refuses(volume, peer);
        if !here || self.disk_io(volume).is_none() {
            return;
        }
        self.clear_in_sync(volume, peer, sector, size_bytes);
        self.mark_towards(volume, peer, sector, size_bytes);
        self.copies_differ(volume, NodeMask::of(peer), sector, size_bytes);
        if let Some(req) = self.io.requests.get_mut(key) {
            req.refused.insert(peer);
        }
    }

    /// A write is marked before it is settled. Older ones of these blocks, which the peer has and
    /// called in sync, clear their marks now: when they are settled, this mark would go with them.
    pub(super) fn clear_in_sync(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) {
        if planted!(self, EarlierClearsLater) {
            return;
        }
        let end = sector.end_of(size_bytes);
        let keys: Vec<Key> = self.io.log.iter().copied().collect();
        let serial = self.al_serial(volume);
        for key in keys {
            let Some(req) = self.io.requests.get_mut(key) else {
                continue;
            };
            let overlaps = req.sector < end && sector < req.sector.end_of(req.size_bytes);
            let acked = req.volume == volume && overlaps && req.in_sync.contains(peer);
            if !acked || req.local != Local::Ok || req.al.is_some_and(|al| al != serial) {
                continue;
            }
            req.in_sync.remove(peer);
            let (sector, size_bytes) = (req.sector, req.size_bytes);
            if let Some(io) = self.disk_io(volume)
                && let Some(slot) = io.slot(peer)
            {
                let cleared = io.bitmap.clear_range(slot, sector, size_bytes);
                self.own_write_cleared(volume, cleared);
            }
        }
    }

    /// This disk is to be copied from `peer`. What this node has written before that, as the other Primary, clears no mark
    /// when it is settled: the marks are the source's, which may have been set after it got the write, or for a
    /// newer one. They go as the blocks are copied.
    pub(crate) fn source_replaces_writes(&mut self, volume: VolumeNr, peer: NodeId) {
        if planted!(self, OlderClearsSource) {
            return;
        }
        for key in &self.io.log {
            if let Some(req) = self.io.requests.get_mut(*key)
                && req.volume == volume
                && req.sent.contains(peer)
            {
                req.in_sync.remove(peer);
                req.replaced.insert(peer);
            }
        }
    }

    /// A write of `peer` is not on this disk: it differs from all others.
    pub(super) fn mark_failed_peer_write(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        if planted!(self, NegAckIgnored) || self.disk_io(volume).is_none() {
            return;
        }
        let serial = self.al_serial(volume);
        let late = planted!(self, FailedNotRecopied);
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        let (sector, size_bytes) = (write.sector, write.size_bytes);
        if late {
            return self.mark_towards(volume, peer, sector, size_bytes);
        }
        write.recopied = Some(serial);
        self.overtake_older_writes(volume, peer, number);
        self.set_out_of_sync(volume, sector, size_bytes, NodeMask::EMPTY);
    }

    /// The acks of writes that came before this one clear no mark of it.
    fn overtake_older_writes(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        let (from, end) = (write.sector, write.sector.end_of(write.size_bytes));
        for conn in self.connections.values_mut() {
            let of_sender = conn.peer == peer;
            for write in conn.io.writes.iter_mut().filter(|w| w.volume == volume) {
                let older = !of_sender || write.number < number;
                let overlaps = from < write.sector.end_of(write.size_bytes) && write.sector < end;
                write.overtaken |= older && overlaps;
            }
        }
    }

    /// A resync from or to this node begins. What failed here when there was no disk to mark it on is part of that.
    pub(crate) fn recopy_failed_writes(&mut self, volume: VolumeNr, peer: NodeId) {
        if self.disk_io(volume).is_none() || planted!(self, FailedNotRecopied) {
            return;
        }
        let serial = self.al_serial(volume);
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let unmarked = |w: &&mut PeerWrite| {
            w.volume == volume && w.stage == Stage::Failed && w.recopied != Some(serial)
        };
        let mut ranges: Vec<(Sector, u32)> = Vec::new();
        for write in conn.io.writes.iter_mut().filter(unmarked) {
            write.recopied = Some(serial);
            ranges.push((write.sector, write.size_bytes));
        }
        for (sector, size) in ranges {
            self.set_out_of_sync(volume, sector, size, NodeMask::EMPTY);
        }
    }
}
