//! The format of the metadata on disk: v09, or v08 of a resource of two nodes.
//!
//! The rest of the core knows v09 only. v08 has one bitmap slot, two retired generations, and the
//! peer's flags among those of the device; it has no node ids, no data generation tags, and
//! nothing about quorum, which is lost with a restart (metadata.md, 4 and 5.3).

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::any::{AnySuperBlock, Format};
use lockstep_format::disk::v08;
use lockstep_format::disk::v09::{DeviceFlags, PeerFlags, SuperBlock};
use lockstep_format::units::{NodeId, NodeMask, Sector, VolumeNr};

use crate::command::{CommandError, ErrorCode};
use crate::device::LocalDisk;
use crate::generation::Generations;
use crate::options::Fencing;
use crate::resource::Resource;

impl Resource {
    /// The superblock of an attach, as it is in memory.
    pub(crate) fn decode_superblock(
        &self,
        volume: VolumeNr,
        path: &str,
        block: &[u8; BLOCK_BYTES],
    ) -> Result<(Format, SuperBlock), CommandError> {
        let invalid = |cause: &dyn core::fmt::Display| CommandError {
            code: ErrorCode::ERR_MD_INVALID,
            text: format!("{path}: {cause}; create metadata with `drbdadm create-md`"),
        };
        let old = match AnySuperBlock::decode(block).map_err(|e| invalid(&e))? {
            AnySuperBlock::V09(superblock) => return Ok((Format::V09, superblock)),
            AnySuperBlock::V08(superblock) => superblock,
        };
        let peers: Vec<NodeId> = self
            .devices
            .get(&volume)
            .map(|d| d.peers.keys().copied().collect())
            .unwrap_or_default();
        if peers.len() > 1 {
            return Err(CommandError {
                code: ErrorCode::ERR_INVALID_REQUEST,
                text: format!(
                    "{path}: the metadata are of version v08, which knows of one peer, but {} are \
                     configured; convert them with `drbdadm create-md` after a clean down",
                    peers.len()
                ),
            });
        }
        let peer = peers.first().copied();
        let mut superblock = old.in_memory(self.node_id, peer);
        if let Some(peer) = peer {
            // 8.4 goes by the configuration here.
            let fences = self
                .connections
                .get(&peer)
                .is_some_and(|c| c.net.fencing != Fencing::DontCare);
            superblock.peers[usize::from(peer.0)]
                .flags
                .set(PeerFlags::FENCING, fences);
        }
        Ok((Format::V08, superblock))
    }

    /// A volume whose metadata have no place for one more peer.
    pub(crate) fn volume_of_one_peer(&self) -> Option<VolumeNr> {
        let full = |disk: &LocalDisk| {
            disk.format == Format::V08 && disk.generations.free_index().is_none()
        };
        let mut devices = self.devices.iter();
        devices.find_map(|(volume, d)| d.attached().is_some_and(full).then_some(*volume))
    }
}

impl LocalDisk {
    /// The superblock's place and its bytes with everything that is in memory.
    pub(crate) fn encode_superblock(
        &mut self,
        size_sectors: u64,
        members: NodeMask,
        persist_size: bool,
    ) -> Option<(u64, Vec<u8>)> {
        let idle = self.discards_the_log();
        let layout = self.layout.as_ref()?;
        let offset = layout.superblock_byte();
        let block = self.superblock.as_mut()?;
        self.generations.store(block);
        block.members = members;
        if persist_size && size_sectors != 0 {
            block.effective_size = Sector(size_sectors);
        }
        block.al_extents = match self.io.al.is_in_place() {
            // A replay ignores slots behind these.
            true => self.io.al.slot_count(),
            false => self.options.al_extents,
        };
        let mut bytes = [0u8; BLOCK_BYTES];
        match self.format {
            Format::V09 => block.encode(&mut bytes),
            Format::V08 => {
                let peer = block.peer(v08_peer(&self.generations));
                let mut old = v08::SuperBlock::from_v09(block, peer, layout);
                // Only 8.3 would take the log of 8.4 for its own.
                old.magic_84_unclean = !old.flags.contains(v08::Flags::AL_CLEAN);
                if !idle {
                    old.flags |= v08::Flags::PRIMARY_IND;
                }
                old.written_for_peer = old.flags.contains(v08::Flags::PRIMARY_IND)
                    && !old.flags.contains(v08::Flags::CRASHED_PRIMARY);
                old.encode(&mut bytes);
            }
        }
        Some((offset, bytes.to_vec()))
    }

    /// What the superblock says now makes whoever attaches the disk after a crash ignore the
    /// activity log: then all data have to be durable, and all marks.
    pub(crate) fn discards_the_log(&self) -> bool {
        let flags = self.generations.flags;
        let pages = self.io.bitmap.all_pages();
        let marks_durable = !self.io.bitmap.is_dirty() && !self.io.bitmap.is_writing_in(pages);
        flags.contains(DeviceFlags::AL_CLEAN)
            || (self.format == Format::V08
                && !flags.contains(DeviceFlags::PRIMARY_IND)
                && marks_durable)
    }
}

/// The node that slot 0 belongs to; without one all entries are the same.
fn v08_peer(generations: &Generations) -> NodeId {
    let mut others = (0..NodeId::COUNT)
        .map(NodeId)
        .filter(|node| *node != generations.node);
    others
        .clone()
        .find(|node| generations.slot(*node).bitmap_index.is_some())
        .or_else(|| others.next())
        .unwrap_or(generations.node)
}
