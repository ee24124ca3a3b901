//! The v08 superblock of DRBD 8.3 and 8.4, and conversion to and from v09 (sections 4, 5.3, 19).

use bitflags::bitflags;
use zerocopy::big_endian::{I32, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::layout::{AlGeometry, BitmapBlock, Geometry, Layout, Placement, StoredOffsets};
use super::v09::{DeviceFlags, PeerFlags};
use super::{
    BLOCK_BYTES, CREATE_AL_EXTENTS, DiskError, LayoutError, MAX_DEVICE_SECTORS, Magic, v09,
};
use crate::units::{NodeId, Sector, Uuid};

bitflags! {
    /// Flags of the device and its one peer (section 5.3). Unknown bits are kept.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Flags: u32 {
        /// The data was more than Inconsistent.
        const CONSISTENT = 0x001;
        /// A node is or may still be writing to our backend.
        const PRIMARY_IND = 0x002;
        /// Replication was established.
        const CONNECTED_IND = 0x004;
        /// The bitmap is unreliable: all bits count as set.
        const FULL_SYNC = 0x008;
        /// The data was more than Outdated.
        const WAS_UP_TO_DATE = 0x010;
        /// The peer's disk is Inconsistent or Outdated.
        const PEER_OUT_DATED = 0x020;
        /// We are primary, or crashed as one.
        const CRASHED_PRIMARY = 0x040;
        /// The activity log holds nothing to apply.
        const AL_CLEAN = 0x080;
        /// The activity log is not being written.
        const AL_DISABLED = 0x100;
        const _ = !0;
    }
}

/// The reserved bytes of a superblock with [`SuperBlock::written_for_peer`]: "LKSTPEER".
const WRITTEN_FOR_PEER: u64 = u64::from_be_bytes(*b"LKSTPEER");

/// A v08 superblock. It has one bitmap slot and 4096 bytes per bit, always.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuperBlock {
    /// Size of the replicated device that both nodes agreed on; zero if they never did.
    pub effective_size: Sector,
    /// Generation of the data here.
    pub current_uuid: Uuid,
    /// Current UUID that we had when the peer was last in sync.
    pub bitmap_uuid: Uuid,
    /// Retired generations, younger first.
    pub history: [Uuid; 2],
    /// Random identity of this metadata, zero if never set.
    pub device_uuid: u64,
    /// State of the device and the peer as last written.
    pub flags: Flags,
    /// True for the magic that an attached 8.4 writes: never clean, whatever AL_CLEAN says.
    pub magic_84_unclean: bool,
    /// True if PRIMARY_IND speaks of the peer: this node was not Primary. A mark of this project
    /// in bytes that every other program writes as zero; in its absence PRIMARY_IND means
    /// that this node was Primary, because 8.4 sets it for nothing else.
    pub written_for_peer: bool,
    /// Where activity log and bitmap are, relative to the superblock.
    pub offsets: StoredOffsets,
    /// Activity-log slots of the running configuration.
    pub al_extents: u32,
    /// Last agreed largest request of the peer in bytes; zero if unknown.
    pub peer_max_bio_bytes: u32,
    /// Shape of the activity log.
    pub al: AlGeometry,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    effective_size: U64,
    current_uuid: U64,
    bitmap_uuid: U64,
    history_uuids: [U64; 2],
    device_uuid: U64,
    reserved_u64: U64,
    flags: U32,
    magic: U32,
    md_size_sect: U32,
    al_offset: I32,
    al_nr_extents: U32,
    bm_offset: I32,
    bm_bytes_per_bit: U32,
    la_peer_max_bio_size: U32,
    al_stripes: U32,
    al_stripe_size_4k: U32,
    reserved: [u8; 4000],
}

const _: () = assert!(size_of::<Raw>() == BLOCK_BYTES);
const _: () = assert!(core::mem::offset_of!(Raw, magic) == 60);

impl SuperBlock {
    /// What `create-md` writes for this layout.
    pub fn fresh(layout: &Layout) -> Self {
        Self {
            effective_size: Sector::ZERO,
            current_uuid: Uuid::JUST_CREATED,
            bitmap_uuid: Uuid::ZERO,
            history: [Uuid::ZERO; 2],
            device_uuid: 0,
            flags: Flags::AL_CLEAN,
            magic_84_unclean: false,
            written_for_peer: false,
            offsets: layout.offsets(),
            al_extents: CREATE_AL_EXTENTS,
            peer_max_bio_bytes: 0,
            al: layout.geometry().al,
        }
    }

    /// Reads a superblock and checks everything that does not depend on where it lies.
    pub fn decode(block: &[u8; BLOCK_BYTES]) -> Result<Self, DiskError> {
        let raw: &Raw = zerocopy::transmute_ref!(block);
        let magic_84_unclean = match Magic::of(block) {
            Some(Magic::V08) => false,
            Some(Magic::V08Unclean) => true,
            Some(found) => {
                return Err(DiskError::OtherFormat {
                    found,
                    wanted: Magic::V08,
                });
            }
            None => {
                return Err(DiskError::NoMagic {
                    found: raw.magic.get(),
                });
            }
        };
        let bytes = raw.bm_bytes_per_bit.get();
        if bytes != BitmapBlock::DEFAULT.bytes() {
            return Err(DiskError::BitmapBlockSize {
                found: bytes,
                v08: true,
            });
        }
        let (stripes, stripe_blocks) = (raw.al_stripes.get(), raw.al_stripe_size_4k.get());
        let al = AlGeometry::new(stripes, stripe_blocks).ok_or(DiskError::AlGeometry {
            stripes,
            stripe_blocks,
        })?;
        let effective_size = Sector(raw.effective_size.get());
        if effective_size.0 > MAX_DEVICE_SECTORS {
            return Err(DiskError::EffectiveSize {
                found: effective_size.0,
            });
        }
        Ok(Self {
            effective_size,
            current_uuid: Uuid(raw.current_uuid.get()),
            bitmap_uuid: Uuid(raw.bitmap_uuid.get()),
            history: raw.history_uuids.each_ref().map(|uuid| Uuid(uuid.get())),
            device_uuid: raw.device_uuid.get(),
            flags: Flags::from_bits_retain(raw.flags.get()),
            magic_84_unclean,
            written_for_peer: raw.reserved_u64.get() == WRITTEN_FOR_PEER,
            offsets: StoredOffsets {
                md_size_sectors: raw.md_size_sect.get(),
                al_offset_sectors: raw.al_offset.get(),
                bm_offset_sectors: raw.bm_offset.get(),
            },
            al_extents: raw.al_nr_extents.get(),
            peer_max_bio_bytes: raw.la_peer_max_bio_size.get(),
            al,
        })
    }

    /// Writes the whole 4 KiB. Reserved bytes become zero, but for the mark
    /// [`written_for_peer`](Self::written_for_peer).
    pub fn encode(&self, out: &mut [u8; BLOCK_BYTES]) {
        let raw: &mut Raw = zerocopy::transmute_mut!(out);
        raw.zero();
        raw.effective_size = self.effective_size.0.into();
        raw.current_uuid = self.current_uuid.0.into();
        raw.bitmap_uuid = self.bitmap_uuid.0.into();
        raw.history_uuids = self.history.map(|uuid| uuid.0.into());
        raw.device_uuid = self.device_uuid.into();
        raw.flags = self.flags.bits().into();
        raw.magic = if self.magic_84_unclean {
            Magic::V08_UNCLEAN_VALUE
        } else {
            Magic::V08_VALUE
        }
        .into();
        if self.written_for_peer {
            raw.reserved_u64 = WRITTEN_FOR_PEER.into();
        }
        raw.md_size_sect = self.offsets.md_size_sectors.into();
        raw.al_offset = self.offsets.al_offset_sectors.into();
        raw.al_nr_extents = self.al_extents.into();
        raw.bm_offset = self.offsets.bm_offset_sectors.into();
        raw.bm_bytes_per_bit = BitmapBlock::DEFAULT.bytes().into();
        raw.la_peer_max_bio_size = self.peer_max_bio_bytes.into();
        raw.al_stripes = self.al.stripes().into();
        raw.al_stripe_size_4k = self.al.stripe_blocks().into();
    }

    /// One slot, 4096 bytes per bit, and the stored activity-log shape.
    pub const fn geometry(&self) -> Geometry {
        Geometry {
            max_peers: 1,
            bitmap_block: BitmapBlock::DEFAULT,
            al: self.al,
        }
    }

    /// The areas that this superblock describes, checked against the device it was read from.
    pub fn layout(&self, placement: Placement, device_bytes: u64) -> Result<Layout, LayoutError> {
        Layout::stored(
            placement,
            self.geometry(),
            self.offsets,
            self.effective_size.0,
            device_bytes,
        )
    }

    /// True if the activity log needs no replay before attach.
    pub fn is_clean(&self) -> bool {
        !self.magic_84_unclean && self.flags.contains(Flags::AL_CLEAN)
    }

    /// Marks the activity log as applied: clean flag, and the magic that 8.3 may read too.
    pub fn set_clean(&mut self) {
        self.flags |= Flags::AL_CLEAN;
        self.magic_84_unclean = false;
    }

    /// True if nobody has demoted this node since it wrote as Primary. 8.4 tells only by
    /// PRIMARY_IND, and sets CRASHED_PRIMARY not before it attaches the disk again.
    pub fn crashed_as_primary(&self) -> bool {
        self.flags.contains(Flags::CRASHED_PRIMARY)
            || (self.flags.contains(Flags::PRIMARY_IND) && !self.written_for_peer)
    }

    /// The same state as v09 metadata with one bitmap slot, which stays where it is.
    ///
    /// The original drops the bitmap UUID. Here every entry gets it: no entry has a slot yet,
    /// and whichever node gets slot 0 finds the generation that the bits in it are based on.
    pub fn to_v09(&self) -> v09::SuperBlock {
        let peer_map = [
            (Flags::CONNECTED_IND, PeerFlags::CONNECTED),
            (Flags::PEER_OUT_DATED, PeerFlags::OUTDATED),
            (Flags::FULL_SYNC, PeerFlags::FULL_SYNC),
        ];
        let mut flags = self.flags;
        let mut peer_flags = PeerFlags::empty();
        for (old, new) in peer_map {
            peer_flags.set(new, self.flags.contains(old));
            flags.remove(old);
        }
        if self.crashed_as_primary() {
            flags |= Flags::CRASHED_PRIMARY;
        }
        let entry = v09::Peer {
            bitmap_uuid: self.bitmap_uuid,
            ..v09::Peer::default()
        };
        let mut this = v09::SuperBlock {
            effective_size: self.effective_size,
            current_uuid: self.current_uuid,
            members: crate::units::NodeMask::EMPTY,
            device_uuid: self.device_uuid,
            flags: DeviceFlags::from_bits_retain(flags.bits()),
            offsets: self.offsets,
            al_extents: self.al_extents,
            peer_max_bio_bytes: self.peer_max_bio_bytes,
            geometry: self.geometry(),
            node_id: None,
            peers: [entry; super::PEERS_MAX],
            history: [Uuid::ZERO; super::HISTORY_UUIDS],
            unwritten_since: Uuid::ZERO,
            unwritten_for: crate::units::NodeMask::EMPTY,
        };
        this.peers[0].flags = peer_flags;
        this.history[..2].copy_from_slice(&self.history);
        this
    }

    /// What node `own` has in memory of these metadata: a v09 superblock whose slot 0 belongs to
    /// `peer`. Before the peer is known, every node may become it.
    pub fn in_memory(&self, own: NodeId, peer: Option<NodeId>) -> v09::SuperBlock {
        let mut this = self.to_v09();
        let mut entry = v09::Peer {
            flags: this.peers[0].flags,
            bitmap_uuid: self.bitmap_uuid,
            ..v09::Peer::default()
        };
        if self.effective_size != Sector::ZERO {
            // There is a size only since the nodes agreed on one.
            entry.flags |= PeerFlags::DEVICE_SEEN;
        }
        entry.bitmap_index = peer.map(|_| 0);
        for node in (0..NodeId::COUNT).map(NodeId) {
            let may_be_it = peer.is_none_or(|peer| peer == node) && node != own;
            this.peers[usize::from(node.0)] = if may_be_it {
                entry
            } else {
                v09::Peer::default()
            };
        }
        this
    }

    /// The state of v09 metadata towards one peer, `peer` (its node id), as v08 metadata in
    /// `layout`. The caller moves the bitmap, or sets [`Flags::FULL_SYNC`].
    pub fn from_v09(old: &v09::SuperBlock, peer: &v09::Peer, layout: &Layout) -> Self {
        let kept = DeviceFlags::CONSISTENT
            | DeviceFlags::PRIMARY_IND
            | DeviceFlags::WAS_UP_TO_DATE
            | DeviceFlags::CRASHED_PRIMARY
            | DeviceFlags::AL_CLEAN
            | DeviceFlags::AL_DISABLED;
        let mut flags = Flags::from_bits_retain((old.flags & kept).bits());
        flags.set(
            Flags::CONNECTED_IND,
            peer.flags.contains(PeerFlags::CONNECTED),
        );
        flags.set(
            Flags::PEER_OUT_DATED,
            peer.flags.contains(PeerFlags::OUTDATED),
        );
        flags.set(Flags::FULL_SYNC, peer.flags.contains(PeerFlags::FULL_SYNC));
        Self {
            effective_size: old.effective_size,
            current_uuid: old.current_uuid,
            bitmap_uuid: peer.bitmap_uuid,
            history: [old.history[0], old.history[1]],
            device_uuid: old.device_uuid,
            flags,
            magic_84_unclean: false,
            written_for_peer: false,
            offsets: layout.offsets(),
            al_extents: old.al_extents,
            peer_max_bio_bytes: old.peer_max_bio_bytes,
            al: layout.geometry().al,
        }
    }
}
