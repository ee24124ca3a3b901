//! The v09 superblock of DRBD 9: 4096 bytes, big-endian (sections 3, 5, 7).

use core::fmt;

use bitflags::bitflags;
use zerocopy::big_endian::{I32, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::layout::{AlGeometry, BitmapBlock, Geometry, Layout, Placement, StoredOffsets};
use super::{
    BLOCK_BYTES, CREATE_AL_EXTENTS, DiskError, HISTORY_UUIDS, LayoutError, MAX_BITMAP_SLOTS,
    MAX_DEVICE_SECTORS, Magic, PEERS_MAX, pmem,
};
use crate::units::{Dagtag, NodeId, NodeMask, Sector, Uuid};

bitflags! {
    /// Flags of the device (section 5.1). Unknown bits are kept.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct DeviceFlags: u32 {
        /// The data was more than Inconsistent.
        const CONSISTENT = 0x001;
        /// Some node is or may still be writing to our backend: after a crash the activity log
        /// must be applied.
        const PRIMARY_IND = 0x002;
        /// The data was more than Outdated.
        const WAS_UP_TO_DATE = 0x010;
        /// We are primary, or crashed as one and no handshake has resolved it yet.
        const CRASHED_PRIMARY = 0x040;
        /// The activity log holds nothing to apply. Only create-md and apply-al set it.
        const AL_CLEAN = 0x080;
        /// The activity log is not being written and must not be trusted.
        const AL_DISABLED = 0x100;
        /// We were primary when quorum was lost.
        const PRIMARY_LOST_QUORUM = 0x200;
        /// We had quorum at the last write.
        const HAVE_QUORUM = 0x400;
        const _ = !0;
    }
}

bitflags! {
    /// Flags of a peer entry (section 5.2). Unknown bits are kept; bit 31 never leaves memory.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct PeerFlags: u32 {
        /// Replication was established.
        const CONNECTED = 0x0_0001;
        /// The peer's disk is Inconsistent or Outdated, or it was fenced.
        const OUTDATED = 0x0_0002;
        /// A fencing policy is configured.
        const FENCING = 0x0_0004;
        /// The slot on disk is unreliable: all its bits count as set.
        const FULL_SYNC = 0x0_0008;
        /// The peer once had a disk.
        const DEVICE_SEEN = 0x0_0010;
        /// There is evidence that the node exists.
        const NODE_EXISTS = 0x1_0000;
        const _ = !0;
    }
}

impl PeerFlags {
    /// In-core bit of the original; ignored on disk and never written.
    const IN_CORE: u32 = 0x8000_0000;

    /// Flags from the value on disk.
    pub const fn from_disk(bits: u32) -> Self {
        Self::from_bits_retain(bits & !Self::IN_CORE)
    }
}

/// Entry of one node id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// Current UUID that we had when this peer was last in sync; zero if it is.
    pub bitmap_uuid: Uuid,
    /// Data generation tag at the moment `bitmap_uuid` was set; zero if that is zero.
    pub bitmap_dagtag: Dagtag,
    /// State of the peer as last seen.
    pub flags: PeerFlags,
    /// Bitmap slot, `None` if the node has none.
    pub bitmap_index: Option<u8>,
}

/// A v09 superblock.
#[derive(Clone, PartialEq, Eq)]
pub struct SuperBlock {
    /// Size of the replicated device that the cluster agreed on; zero if it never did.
    pub effective_size: Sector,
    /// Generation of the data here.
    pub current_uuid: Uuid,
    /// Node ids that were members at the last write; zero if unknown.
    pub members: NodeMask,
    /// Random identity of this metadata, zero if never set.
    pub device_uuid: u64,
    /// State of the device as last written.
    pub flags: DeviceFlags,
    /// Where activity log and bitmap are, relative to the superblock.
    pub offsets: StoredOffsets,
    /// Activity-log slots (`al-extents`) of the running configuration.
    pub al_extents: u32,
    /// Last agreed largest request of the peers in bytes; zero if unknown.
    pub peer_max_bio_bytes: u32,
    /// Slots, bytes per bit and activity-log shape.
    pub geometry: Geometry,
    /// Own node id, `None` if not assigned yet.
    pub node_id: Option<NodeId>,
    /// Entries, indexed by node id.
    pub peers: [Peer; PEERS_MAX],
    /// Retired generations, newest first.
    pub history: [Uuid; HISTORY_UUIDS],
    /// Nothing was written here since the data were called by this older generation; zero if something was, or if
    /// that is not known. Only Lockstep writes it, and kernels write zero. It is void where `current_uuid` is not the
    /// one that was written with it.
    pub unwritten_since: Uuid,
    /// Nodes of which this disk was known not to differ then; none without that generation.
    pub unwritten_for: NodeMask,
}

/// Reserved bytes of a superblock with [`SuperBlock::unwritten_since`]: "LKSU", then a bit of each node id.
const UNWRITTEN: u64 = (u32::from_be_bytes(*b"LKSU") as u64) << 32;
/// The bits of node ids in that word.
const UNWRITTEN_NODES: u64 = u32::MAX as u64;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPeer {
    bitmap_uuid: U64,
    bitmap_dagtag: U64,
    flags: U32,
    bitmap_index: I32,
    reserved: [U32; 2],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    effective_size: U64,
    current_uuid: U64,
    members: U64,
    reserved_u64: [U64; 3],
    device_uuid: U64,
    flags: U32,
    magic: U32,
    md_size_sect: U32,
    al_offset: I32,
    al_nr_extents: U32,
    bm_offset: I32,
    bm_bytes_per_bit: U32,
    la_peer_max_bio_size: U32,
    bm_max_peers: U32,
    node_id: I32,
    al_stripes: U32,
    al_stripe_size_4k: U32,
    reserved_u32: [U32; 2],
    peers: [RawPeer; PEERS_MAX],
    history_uuids: [U64; HISTORY_UUIDS],
    padding: [u8; 2704],
}

const _: () = assert!(size_of::<Raw>() == BLOCK_BYTES);
const _: () = assert!(core::mem::offset_of!(Raw, magic) == 60);
const _: () = assert!(core::mem::offset_of!(Raw, peers) == 112);
const _: () = assert!(core::mem::offset_of!(Raw, history_uuids) == 1136);

impl SuperBlock {
    /// What `create-md` writes for this layout: just created, clean, all peers unassigned.
    pub fn fresh(layout: &Layout) -> Self {
        Self {
            effective_size: Sector::ZERO,
            current_uuid: Uuid::JUST_CREATED,
            members: NodeMask::EMPTY,
            device_uuid: 0,
            flags: DeviceFlags::AL_CLEAN,
            offsets: layout.offsets(),
            al_extents: CREATE_AL_EXTENTS,
            peer_max_bio_bytes: 0,
            geometry: layout.geometry(),
            node_id: None,
            peers: [Peer::default(); PEERS_MAX],
            history: [Uuid::ZERO; HISTORY_UUIDS],
            unwritten_since: Uuid::ZERO,
            unwritten_for: NodeMask::EMPTY,
        }
    }

    /// Reads a superblock and checks everything that does not depend on where it lies; see
    /// [`SuperBlock::layout`] for the rest.
    pub fn decode(block: &[u8; BLOCK_BYTES]) -> Result<Self, DiskError> {
        let update = pmem::interrupted(block);
        let block = update.as_ref().unwrap_or(block);
        let raw: &Raw = zerocopy::transmute_ref!(block);
        match Magic::of(block) {
            Some(Magic::V09) => {}
            Some(found) => {
                return Err(DiskError::OtherFormat {
                    found,
                    wanted: Magic::V09,
                });
            }
            None => {
                return Err(DiskError::NoMagic {
                    found: raw.magic.get(),
                });
            }
        }
        let mut this = Self {
            effective_size: Sector(raw.effective_size.get()),
            current_uuid: Uuid(raw.current_uuid.get()),
            members: NodeMask(raw.members.get()),
            device_uuid: raw.device_uuid.get(),
            flags: DeviceFlags::from_bits_retain(raw.flags.get()),
            offsets: StoredOffsets {
                md_size_sectors: raw.md_size_sect.get(),
                al_offset_sectors: raw.al_offset.get(),
                bm_offset_sectors: raw.bm_offset.get(),
            },
            al_extents: raw.al_nr_extents.get(),
            peer_max_bio_bytes: raw.la_peer_max_bio_size.get(),
            geometry: raw.geometry()?,
            node_id: raw.node_id()?,
            peers: [Peer::default(); PEERS_MAX],
            history: raw.history_uuids.each_ref().map(|uuid| Uuid(uuid.get())),
            unwritten_since: raw.unwritten().0,
            unwritten_for: raw.unwritten().1,
        };
        if this.effective_size.0 > MAX_DEVICE_SECTORS {
            return Err(DiskError::EffectiveSize {
                found: this.effective_size.0,
            });
        }
        for (id, (peer, raw)) in (0u8..).zip(this.peers.iter_mut().zip(&raw.peers)) {
            *peer = raw.decode(id, this.geometry.max_peers)?;
        }
        this.check_slots()?;
        Ok(this)
    }

    /// Writes the whole 4 KiB. Reserved bytes become zero, but for [`SuperBlock::unwritten_since`].
    ///
    /// # Panics
    /// If the slots of the peers contradict each other: such a superblock must not reach a disk.
    pub fn encode(&self, out: &mut [u8; BLOCK_BYTES]) {
        self.check_slots()
            .expect("bitmap slots are consistent before they are written");
        let raw: &mut Raw = zerocopy::transmute_mut!(out);
        raw.zero();
        raw.effective_size = self.effective_size.0.into();
        raw.current_uuid = self.current_uuid.0.into();
        raw.members = self.members.0.into();
        raw.device_uuid = self.device_uuid.into();
        if self.unwritten_since != Uuid::ZERO {
            let nodes = UNWRITTEN | self.unwritten_for.0 & UNWRITTEN_NODES;
            let note = [nodes, self.current_uuid.0, self.unwritten_since.0];
            raw.reserved_u64 = note.map(U64::new);
        }
        raw.flags = self.flags.bits().into();
        raw.magic = Magic::V09_VALUE.into();
        raw.md_size_sect = self.offsets.md_size_sectors.into();
        raw.al_offset = self.offsets.al_offset_sectors.into();
        raw.al_nr_extents = self.al_extents.into();
        raw.bm_offset = self.offsets.bm_offset_sectors.into();
        raw.bm_bytes_per_bit = self.geometry.bitmap_block.bytes().into();
        raw.la_peer_max_bio_size = self.peer_max_bio_bytes.into();
        raw.bm_max_peers = u32::from(self.geometry.max_peers).into();
        raw.node_id = self.node_id.map_or(-1, |id| i32::from(id.0)).into();
        raw.al_stripes = self.geometry.al.stripes().into();
        raw.al_stripe_size_4k = self.geometry.al.stripe_blocks().into();
        for (raw, peer) in raw.peers.iter_mut().zip(&self.peers) {
            raw.bitmap_uuid = peer.bitmap_uuid.0.into();
            raw.bitmap_dagtag = peer.bitmap_dagtag.0.into();
            raw.flags = (peer.flags.bits() & !PeerFlags::IN_CORE).into();
            raw.bitmap_index = peer.bitmap_index.map_or(-1, i32::from).into();
        }
        for (raw, uuid) in raw.history_uuids.iter_mut().zip(&self.history) {
            *raw = uuid.0.into();
        }
    }

    /// The areas that this superblock describes, checked against the device it was read from.
    pub fn layout(&self, placement: Placement, device_bytes: u64) -> Result<Layout, LayoutError> {
        Layout::stored(
            placement,
            self.geometry,
            self.offsets,
            self.effective_size.0,
            device_bytes,
        )
    }

    /// Takes over another layout's offsets and geometry, as after a move or a resize.
    pub fn set_layout(&mut self, layout: &Layout) {
        self.offsets = layout.offsets();
        self.geometry = layout.geometry();
    }

    /// True if the activity log needs no replay before attach.
    pub fn is_clean(&self) -> bool {
        self.flags.contains(DeviceFlags::AL_CLEAN)
    }

    /// Entry of a node.
    pub fn peer(&self, node: NodeId) -> &Peer {
        &self.peers[usize::from(node.0)]
    }

    /// Entry of a node, for changes.
    pub fn peer_mut(&mut self, node: NodeId) -> &mut Peer {
        &mut self.peers[usize::from(node.0)]
    }

    /// The lowest bitmap slot that no entry holds (section 7); `None` if all are taken.
    pub fn free_bitmap_index(&self) -> Option<u8> {
        (0..self.geometry.max_peers).find(|index| {
            self.peers
                .iter()
                .all(|peer| peer.bitmap_index != Some(*index))
        })
    }

    /// The entry that says which generation the data had before its first change: no slot, no
    /// flags. Of several the highest node id, since old versions damaged low ones.
    pub fn day0_peer(&self) -> Option<&Peer> {
        self.peers
            .iter()
            .enumerate()
            .filter(|(id, _)| self.node_id.is_none_or(|own| usize::from(own.0) != *id))
            .map(|(_, peer)| peer)
            .rfind(|peer| peer.is_day0())
    }

    pub(super) fn check_slots(&self) -> Result<(), DiskError> {
        let mut owner = [None; MAX_BITMAP_SLOTS as usize];
        for (id, peer) in (0u8..).zip(&self.peers) {
            let Some(index) = peer.bitmap_index else {
                continue;
            };
            if index >= self.geometry.max_peers {
                return Err(DiskError::BitmapIndex {
                    node_id: id,
                    found: index.into(),
                    max_peers: self.geometry.max_peers,
                });
            }
            if self.node_id == Some(NodeId(id)) {
                return Err(DiskError::OwnBitmapIndex { node_id: id, index });
            }
            if let Some(first) = owner[usize::from(index)].replace(id) {
                return Err(DiskError::BitmapIndexTwice {
                    first,
                    second: id,
                    index,
                });
            }
        }
        Ok(())
    }
}

impl fmt::Debug for SuperBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = |peer: &&Peer| **peer != Peer::default();
        f.debug_struct("SuperBlock")
            .field("effective_size", &self.effective_size)
            .field("current_uuid", &self.current_uuid)
            .field("members", &self.members)
            .field("device_uuid", &self.device_uuid)
            .field("flags", &self.flags)
            .field("offsets", &self.offsets)
            .field("al_extents", &self.al_extents)
            .field("peer_max_bio_bytes", &self.peer_max_bio_bytes)
            .field("geometry", &self.geometry)
            .field("node_id", &self.node_id)
            .field("peers_in_use", &self.peers.iter().filter(used).count())
            .field("history0", &self.history[0])
            .finish_non_exhaustive()
    }
}

impl Peer {
    /// True if the entry has no slot and no flags, so that its UUID names the data before the
    /// first change (section 7).
    pub fn is_day0(&self) -> bool {
        self.bitmap_index.is_none() && self.flags.is_empty()
    }
}

impl Raw {
    fn geometry(&self) -> Result<Geometry, DiskError> {
        let bytes = self.bm_bytes_per_bit.get();
        let bitmap_block = BitmapBlock::from_bytes(bytes).ok_or(DiskError::BitmapBlockSize {
            found: bytes,
            v08: false,
        })?;
        let found = self.bm_max_peers.get();
        let max_peers = u8::try_from(found)
            .ok()
            .filter(|n| (1..=MAX_BITMAP_SLOTS).contains(n))
            .ok_or(DiskError::MaxPeers { found })?;
        let (stripes, stripe_blocks) = (self.al_stripes.get(), self.al_stripe_size_4k.get());
        let al = AlGeometry::new(stripes, stripe_blocks).ok_or(DiskError::AlGeometry {
            stripes,
            stripe_blocks,
        })?;
        Ok(Geometry {
            max_peers,
            bitmap_block,
            al,
        })
    }

    fn unwritten(&self) -> (Uuid, NodeMask) {
        let [nodes, generation, since] = self.reserved_u64.each_ref().map(|word| word.get());
        let current = Uuid(self.current_uuid.get());
        let noted = nodes & !UNWRITTEN_NODES == UNWRITTEN && since != 0;
        match noted && current.same_generation(Uuid(generation)) {
            true => (Uuid(since), NodeMask(nodes & UNWRITTEN_NODES)),
            false => (Uuid::ZERO, NodeMask::EMPTY),
        }
    }

    fn node_id(&self) -> Result<Option<NodeId>, DiskError> {
        match self.node_id.get() {
            -1 => Ok(None),
            id @ 0..=31 => Ok(Some(NodeId(id as u8))),
            found => Err(DiskError::NodeId { found }),
        }
    }
}

impl RawPeer {
    fn decode(&self, node_id: u8, max_peers: u8) -> Result<Peer, DiskError> {
        let found = self.bitmap_index.get();
        let bitmap_index = match found {
            -1 => None,
            index if index >= 0 && index < i32::from(max_peers) => Some(index as u8),
            _ => {
                return Err(DiskError::BitmapIndex {
                    node_id,
                    found,
                    max_peers,
                });
            }
        };
        Ok(Peer {
            bitmap_uuid: Uuid(self.bitmap_uuid.get()),
            bitmap_dagtag: Dagtag(self.bitmap_dagtag.get()),
            flags: PeerFlags::from_disk(self.flags.get()),
            bitmap_index,
        })
    }
}
