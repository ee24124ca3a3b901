//! Placement of the metadata areas on a device, and the size formulas (section 2).
//!
//! All byte offsets are absolute on the metadata device. Nothing here reads a device.

use core::fmt;

use super::al::CONTEXT_PER_TRANSACTION;
use super::bitmap::BitmapShape;
use super::{BLOCK_SECTORS, LayoutError, MAX_DEVICE_SECTORS, SECTOR_BYTES};

/// Where the metadata of a volume is kept (configuration; not stored on disk).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// At the end of the data device: data, bitmap, activity log, superblock.
    Internal,
    /// Alone on its own device: superblock, activity log, bitmap.
    FlexExternal,
    /// One of the 128 MiB slots, 0..=255, of a shared device.
    Indexed(u8),
}

impl Placement {
    /// True if data and metadata share one device.
    pub const fn is_internal(self) -> bool {
        matches!(self, Self::Internal)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Internal => f.write_str("internal"),
            Self::FlexExternal => f.write_str("flex-external"),
            Self::Indexed(slot) => write!(f, "index {slot}"),
        }
    }
}

/// Bytes that one bitmap bit stands for: a power of two from 4096 to 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BitmapBlock {
    shift: u8,
}

impl BitmapBlock {
    /// 4 KiB, the only size that v08 and fixed slots know.
    pub const DEFAULT: Self = Self { shift: 12 };

    /// From the size in bytes; `None` unless a power of two from 4096 to 1048576.
    pub const fn from_bytes(bytes: u32) -> Option<Self> {
        let shift = bytes.trailing_zeros() as u8;
        if bytes.is_power_of_two() && shift >= 12 && shift <= 20 {
            Some(Self { shift })
        } else {
            None
        }
    }

    /// From the binary logarithm of the size in bytes, 12..=20.
    pub const fn from_shift(shift: u8) -> Option<Self> {
        if shift >= 12 && shift <= 20 {
            Some(Self { shift })
        } else {
            None
        }
    }

    /// Binary logarithm of the size in bytes.
    pub const fn shift(self) -> u8 {
        self.shift
    }

    /// Size in bytes.
    pub const fn bytes(self) -> u32 {
        1 << self.shift
    }

    /// Size in sectors.
    pub const fn sectors(self) -> u64 {
        1 << (self.shift - 9)
    }
}

impl Default for BitmapBlock {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Shape of the activity-log ring: stripes times 4 KiB blocks per stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AlGeometry {
    stripes: u32,
    stripe_blocks: u32,
}

impl AlGeometry {
    /// One stripe of eight blocks (32 kB).
    pub const DEFAULT: Self = Self {
        stripes: 1,
        stripe_blocks: 8,
    };
    /// Smallest number of 4 KiB blocks in the ring.
    pub const MIN_BLOCKS: u64 = 8;
    /// Largest number of blocks that the tools create (32 MiB).
    pub const MAX_TOOL_BLOCKS: u64 = 8192;
    /// Largest number of blocks that may be attached (16 GiB).
    pub const MAX_BLOCKS: u64 = 4_194_304;

    /// `None` unless the ring has 8 to 4194304 blocks. Both numbers zero is the old fixed shape.
    pub const fn new(stripes: u32, stripe_blocks: u32) -> Option<Self> {
        if stripes == 0 && stripe_blocks == 0 {
            return Some(Self::DEFAULT);
        }
        let blocks = stripes as u64 * stripe_blocks as u64;
        if blocks < Self::MIN_BLOCKS || blocks > Self::MAX_BLOCKS {
            return None;
        }
        Some(Self {
            stripes,
            stripe_blocks,
        })
    }

    /// Number of stripes.
    pub const fn stripes(self) -> u32 {
        self.stripes
    }

    /// 4 KiB blocks of one stripe.
    pub const fn stripe_blocks(self) -> u32 {
        self.stripe_blocks
    }

    /// Blocks of the whole ring (`mx` in the specification).
    pub const fn blocks(self) -> u32 {
        self.stripes * self.stripe_blocks
    }

    /// Sectors of the whole ring.
    pub const fn sectors(self) -> u64 {
        self.blocks() as u64 * BLOCK_SECTORS
    }

    /// Bytes of the whole ring.
    pub const fn bytes(self) -> u64 {
        self.sectors() * SECTOR_BYTES
    }

    /// Block within the area, 0-based, where ring position `position` lies (section 9.4):
    /// neighbours in the ring go to different stripes.
    pub const fn block_of_position(self, position: u32) -> u32 {
        (position % self.stripes) * self.stripe_blocks + position / self.stripes
    }

    /// Block within the area that transaction `number` goes to.
    pub const fn block_of(self, number: u32) -> u32 {
        self.block_of_position(number % self.blocks())
    }

    /// Largest usable `al-extents` (section 9.6): one block may be torn, the others must still
    /// hold the whole context.
    pub const fn max_extents(self) -> u16 {
        if self.blocks() > 72 {
            65534
        } else {
            (self.blocks() as u16 - 1) * CONTEXT_PER_TRANSACTION as u16
        }
    }
}

impl Default for AlGeometry {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The choices of `create-md` that decide the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bitmap slots, 1..=31 (v08: 1).
    pub max_peers: u8,
    /// Bytes per bitmap bit.
    pub bitmap_block: BitmapBlock,
    /// Shape of the activity log.
    pub al: AlGeometry,
}

impl Geometry {
    /// Default activity log and bitmap block for so many peers.
    pub const fn for_peers(max_peers: u8) -> Self {
        Self {
            max_peers,
            bitmap_block: BitmapBlock::DEFAULT,
            al: AlGeometry::DEFAULT,
        }
    }

    fn bitmap_sectors(&self, sectors: u64) -> u64 {
        BitmapShape::new(sectors, self.max_peers, self.bitmap_block).area_bytes() / SECTOR_BYTES
    }
}

/// Where the superblock, activity log and bitmap of one volume are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    placement: Placement,
    geometry: Geometry,
    superblock_sector: u64,
    md_size_sectors: u32,
    al_offset_sectors: i32,
    bm_offset_sectors: i32,
}

/// Offsets as a superblock stores them: in sectors, relative to the superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredOffsets {
    /// Size of the whole metadata area.
    pub md_size_sectors: u32,
    /// Start of the activity log.
    pub al_offset_sectors: i32,
    /// Start of the bitmap.
    pub bm_offset_sectors: i32,
}

/// Sectors of one fixed external slot (128 MiB).
pub const FIXED_SLOT_SECTORS: u32 = 262_144;
const FIXED_SLOT_BM_OFFSET: i32 = 72;

impl Layout {
    /// The layout that `create-md` makes on a metadata device of `device_bytes`.
    pub fn new(
        placement: Placement,
        geometry: Geometry,
        device_bytes: u64,
    ) -> Result<Self, LayoutError> {
        let too_small = LayoutError::TooSmall {
            device_bytes,
            placement,
        };
        let too_large = LayoutError::TooLarge { device_bytes };
        let superblock_sector =
            superblock_sector(placement, device_bytes).ok_or(too_small.clone())?;
        let al_sectors = geometry.al.sectors();
        let layout = match placement {
            Placement::Internal => {
                let device_sectors = device_bytes / SECTOR_BYTES;
                let behind = al_sectors + geometry.bitmap_sectors(device_sectors);
                if behind > superblock_sector {
                    return Err(too_small);
                }
                let behind = i32::try_from(behind).map_err(|_| too_large)?;
                Self {
                    placement,
                    geometry,
                    superblock_sector,
                    md_size_sectors: behind as u32 + BLOCK_SECTORS as u32,
                    al_offset_sectors: -(al_sectors as i32),
                    bm_offset_sectors: -behind,
                }
            }
            Placement::FlexExternal => {
                let device_sectors = device_bytes / SECTOR_BYTES;
                let bm_offset = BLOCK_SECTORS + al_sectors;
                if device_sectors <= bm_offset {
                    return Err(too_small);
                }
                Self {
                    placement,
                    geometry,
                    superblock_sector,
                    md_size_sectors: u32::try_from(device_sectors).map_err(|_| too_large)?,
                    al_offset_sectors: BLOCK_SECTORS as i32,
                    bm_offset_sectors: bm_offset as i32,
                }
            }
            Placement::Indexed(_) => {
                if geometry.al != AlGeometry::DEFAULT
                    || geometry.bitmap_block != BitmapBlock::DEFAULT
                {
                    return Err(LayoutError::FixedSlotOptions);
                }
                Self {
                    placement,
                    geometry,
                    superblock_sector,
                    md_size_sectors: FIXED_SLOT_SECTORS,
                    al_offset_sectors: BLOCK_SECTORS as i32,
                    bm_offset_sectors: FIXED_SLOT_BM_OFFSET,
                }
            }
        };
        Ok(layout)
    }

    /// The layout that a superblock found on a device of `device_bytes` describes, with the
    /// checks of section 14, step 3: every area fits, none overlaps another, and the bitmap
    /// covers `effective_sectors`.
    pub fn stored(
        placement: Placement,
        geometry: Geometry,
        offsets: StoredOffsets,
        effective_sectors: u64,
        device_bytes: u64,
    ) -> Result<Self, LayoutError> {
        let too_small = LayoutError::TooSmall {
            device_bytes,
            placement,
        };
        let layout = Self {
            placement,
            geometry,
            superblock_sector: superblock_sector(placement, device_bytes)
                .ok_or(too_small.clone())?,
            md_size_sectors: offsets.md_size_sectors,
            al_offset_sectors: offsets.al_offset_sectors,
            bm_offset_sectors: offsets.bm_offset_sectors,
        };
        layout.check_offsets()?;
        let fits = if placement.is_internal() {
            layout.superblock_sector as i64 + i64::from(layout.bm_offset_sectors) >= 0
        } else {
            layout.superblock_sector + u64::from(layout.md_size_sectors)
                <= device_bytes / SECTOR_BYTES
        };
        if !fits {
            return Err(too_small);
        }
        let needed_sectors = geometry.bitmap_sectors(effective_sectors);
        let area_sectors = layout.bitmap_area_sectors();
        if needed_sectors > area_sectors {
            return Err(LayoutError::BitmapTooSmall {
                effective_sectors,
                needed_sectors,
                area_sectors,
            });
        }
        Ok(layout)
    }

    /// What a superblock stores of this layout.
    pub const fn offsets(&self) -> StoredOffsets {
        StoredOffsets {
            md_size_sectors: self.md_size_sectors,
            al_offset_sectors: self.al_offset_sectors,
            bm_offset_sectors: self.bm_offset_sectors,
        }
    }

    /// Where the metadata is kept.
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// Slots, bitmap block and activity-log shape.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Byte offset of the superblock.
    pub const fn superblock_byte(&self) -> u64 {
        self.superblock_sector * SECTOR_BYTES
    }

    /// Byte offset of the activity log.
    pub const fn al_byte(&self) -> u64 {
        self.relative_byte(self.al_offset_sectors)
    }

    /// Byte offset of the block that transaction `number` of the activity log goes to.
    pub const fn al_block_byte(&self, number: u32) -> u64 {
        self.al_byte() + self.geometry.al.block_of(number) as u64 * BLOCK_SECTORS * SECTOR_BYTES
    }

    /// Byte offset of the bitmap.
    pub const fn bitmap_byte(&self) -> u64 {
        self.relative_byte(self.bm_offset_sectors)
    }

    /// Sectors between the start of the bitmap and what follows it (or the device's end).
    pub const fn bitmap_area_sectors(&self) -> u64 {
        if self.al_offset_sectors < 0 {
            (self.al_offset_sectors as i64 - self.bm_offset_sectors as i64) as u64
        } else {
            (self.md_size_sectors as i64 - self.bm_offset_sectors as i64) as u64
        }
    }

    /// Bytes of the bitmap area that whole 4 KiB blocks cover; nothing behind it is touched.
    pub const fn bitmap_area_bytes(&self) -> u64 {
        self.bitmap_area_sectors() / BLOCK_SECTORS * BLOCK_SECTORS * SECTOR_BYTES
    }

    /// Bitmap of a replicated device of `effective_sectors` in this layout.
    pub const fn bitmap_shape(&self, effective_sectors: u64) -> BitmapShape {
        BitmapShape::new(
            effective_sectors,
            self.geometry.max_peers,
            self.geometry.bitmap_block,
        )
    }

    /// Sectors that may be used for data: with internal metadata what lies before it, else as
    /// many of `data_sectors` as the bitmap can describe. Never more than 2^41.
    ///
    /// For external metadata this is the smaller of the tools' and the kernel's limit
    /// (section 2.2), so that both accept the result.
    pub fn usable_sectors(&self, data_sectors: u64) -> u64 {
        let limit = self.limit_of_area(self.bitmap_area_bytes());
        self.first_limits(data_sectors)
            .min(limit)
            .min(MAX_DEVICE_SECTORS)
    }

    /// The limit as `drbdmeta` computes it: it counts a partial last 4 KiB block of the bitmap
    /// area too. It clips the effective size in `restore-md`.
    pub fn tool_usable_sectors(&self) -> u64 {
        let limit = self.limit_of_area(self.bitmap_area_sectors() * SECTOR_BYTES);
        self.first_limits(u64::MAX).min(limit)
    }

    /// True if attach accepts metadata on a device of this size (section 2.3).
    pub const fn attachable_on(placement: Placement, device_bytes: u64) -> bool {
        let sectors = device_bytes / SECTOR_BYTES;
        match placement {
            Placement::Internal | Placement::FlexExternal => sectors >= 2048,
            Placement::Indexed(slot) => sectors >= FIXED_SLOT_SECTORS as u64 * (slot as u64 + 1),
        }
    }

    fn first_limits(&self, data_sectors: u64) -> u64 {
        match self.placement {
            Placement::Internal => {
                (self.superblock_sector as i64 + i64::from(self.bm_offset_sectors)) as u64
            }
            Placement::FlexExternal | Placement::Indexed(_) => data_sectors,
        }
    }

    /// Each slot is padded to 64 bits, hence the divisions in this order.
    fn limit_of_area(&self, area_bytes: u64) -> u64 {
        let words_per_slot = area_bytes / 8 / u64::from(self.geometry.max_peers);
        words_per_slot * 64 * self.geometry.bitmap_block.sectors()
    }

    const fn relative_byte(&self, offset_sectors: i32) -> u64 {
        ((self.superblock_sector as i64 + offset_sectors as i64) * SECTOR_BYTES as i64) as u64
    }

    fn check_offsets(&self) -> Result<(), LayoutError> {
        let wrong = |what, found: i64, needed: i64| LayoutError::Offset {
            what,
            placement: self.placement,
            found,
            needed,
        };
        let al = i64::from(self.al_offset_sectors);
        let bm = i64::from(self.bm_offset_sectors);
        let size = i64::from(self.md_size_sectors);
        let al_sectors = self.geometry.al.sectors() as i64;
        let block = BLOCK_SECTORS as i64;
        if bm % block != 0 {
            return Err(wrong("bm_offset", bm, bm / block * block));
        }
        match self.placement {
            Placement::Internal => {
                if al != -al_sectors {
                    return Err(wrong("al_offset", al, -al_sectors));
                }
                if bm > al {
                    return Err(wrong("bm_offset", bm, al));
                }
                if size < block - bm {
                    return Err(wrong("md_size_sect", size, block - bm));
                }
            }
            Placement::FlexExternal => {
                if al != block {
                    return Err(wrong("al_offset", al, block));
                }
                if bm != block + al_sectors {
                    return Err(wrong("bm_offset", bm, block + al_sectors));
                }
                if size <= bm {
                    return Err(wrong("md_size_sect", size, bm + block));
                }
            }
            Placement::Indexed(_) => {
                if self.geometry.al != AlGeometry::DEFAULT
                    || self.geometry.bitmap_block != BitmapBlock::DEFAULT
                {
                    return Err(LayoutError::FixedSlotOptions);
                }
                if al != block {
                    return Err(wrong("al_offset", al, block));
                }
                if bm != i64::from(FIXED_SLOT_BM_OFFSET) {
                    return Err(wrong("bm_offset", bm, i64::from(FIXED_SLOT_BM_OFFSET)));
                }
                if self.md_size_sectors != FIXED_SLOT_SECTORS {
                    return Err(wrong("md_size_sect", size, i64::from(FIXED_SLOT_SECTORS)));
                }
            }
        }
        Ok(())
    }
}

/// Sector of the superblock on a device of `device_bytes`; `None` if the device is too small to
/// have one. A reader needs this before it knows anything else.
pub const fn superblock_sector(placement: Placement, device_bytes: u64) -> Option<u64> {
    let device_sectors = device_bytes / SECTOR_BYTES;
    match placement {
        Placement::Internal => {
            (device_sectors / BLOCK_SECTORS * BLOCK_SECTORS).checked_sub(BLOCK_SECTORS)
        }
        Placement::FlexExternal => {
            if device_sectors >= BLOCK_SECTORS {
                Some(0)
            } else {
                None
            }
        }
        Placement::Indexed(slot) => {
            let sector = slot as u64 * FIXED_SLOT_SECTORS as u64;
            if device_sectors >= sector + BLOCK_SECTORS {
                Some(sector)
            } else {
                None
            }
        }
    }
}
