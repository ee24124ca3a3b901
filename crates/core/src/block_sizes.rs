//! Bitmaps of different granularity (wire.md, 7.4): one bit stands for 4 KiB to 1 MiB, as `create-md`
//! decided on each node for itself.
//!
//! Neither side can clear a part of a bit, so between two nodes the larger block counts: resync and
//! verify go by it, and a node with smaller blocks clears bits only in groups of the peer's size.
//! Else the side with the larger blocks would keep marks that nobody ever asks for.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::packet::Sizes;
use lockstep_format::wire::{Features, ReplState};

use crate::resource::Resource;

impl Resource {
    /// What `P_SIZES` says of this node's bitmap: log2 of the block less 12.
    pub(crate) fn block_shift_for(&self, peer: NodeId, volume: VolumeNr) -> u8 {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        match disk {
            Some(disk) if self.features(peer).contains(Features::BM_BLOCK_SHIFT) => {
                let block = disk.io.bitmap.shape().block();
                (block.bytes().trailing_zeros() - SHIFT_LEAST) as u8
            }
            _ => 0,
        }
    }

    /// log2 of the peer's bitmap block; a peer that does not know the feature has 4 KiB.
    pub(crate) fn peer_block_shift(
        &self,
        peer: NodeId,
        volume: VolumeNr,
        sizes: &Sizes,
    ) -> Result<u8, String> {
        let known = self.features(peer).contains(Features::BM_BLOCK_SHIFT);
        let said = sizes.limits.filter(|_| known);
        let shift = SHIFT_LEAST + said.map_or(0, |l| u32::from(l.bm_block_shift_minus_12));
        if shift > SHIFT_MOST {
            return Err(format!(
                "the peer's bitmap of volume {volume} has 2^{shift} bytes per bit; known are 4 KiB \
                 to 1 MiB"
            ));
        }
        Ok(shift as u8)
    }

    /// What is known of the peers' bitmap blocks counts for this disk's bitmap.
    pub(crate) fn adopt_block_sizes(&mut self, volume: VolumeNr) {
        let ignores = planted!(self, PeerBlockIgnored);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let known = device.peers.iter();
        let known: Vec<(NodeId, u64)> = known
            .filter_map(|(node, pd)| Some((*node, pd.sizes?.bitmap_block_sectors())))
            .collect();
        let Some(disk) = device.attached_mut() else {
            return;
        };
        for (node, sectors) in known {
            if let Some(slot) = disk.io.slot(node).filter(|_| !ignores) {
                disk.io.bitmap.set_peer_block(slot, sectors);
            }
        }
    }

    /// The larger of the two bitmap blocks, in sectors.
    pub(crate) fn common_block_sectors(&self, volume: VolumeNr, peer: NodeId) -> u64 {
        let device = self.devices.get(&volume);
        let own = device.and_then(|d| d.attached());
        let own = own.map_or(8, |d| d.io.bitmap.shape().block().sectors());
        if planted!(self, OwnBlocksOnly) {
            return own;
        }
        own.max(self.peer_block_sectors(volume, peer))
    }

    /// What a resync from the peer asks for where it has marked this range: whole blocks of both bitmaps. Without a
    /// resync it is the range alone.
    pub(crate) fn asked_with(
        &self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) -> (Sector, u32) {
        let copied = self.state.peer_device(volume, peer).repl == ReplState::SyncTarget;
        if !copied || planted!(self, ToldAloneMarked) {
            return (sector, size_bytes);
        }
        let block = self.common_block_sectors(volume, peer);
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let start = sector.0 / block * block;
        let end = sector.end_of(size_bytes).0.next_multiple_of(block);
        let sectors = end.min(size).saturating_sub(start);
        (Sector(start), (sectors * Sector::SIZE) as u32)
    }

    /// The peer's bitmap block in sectors.
    pub(crate) fn peer_block_sectors(&self, volume: VolumeNr, peer: NodeId) -> u64 {
        let device = self.devices.get(&volume);
        let theirs = device.and_then(|d| d.peers.get(&peer)?.sizes);
        theirs.map_or(8, |s| s.bitmap_block_sectors())
    }
}

/// log2 of the smallest and the largest bitmap block in bytes.
const SHIFT_LEAST: u32 = 12;
const SHIFT_MOST: u32 = 20;
