//! What can be wrong with metadata, as values.

use super::layout::Placement;

/// Kind of superblock, told by the magic number at byte 60 (sections 4 and 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Magic {
    /// 0x83740269.
    V06,
    /// 0x8374026a; the magic is at byte 28 there.
    V07,
    /// 0x8374026b: clean only if its AL_CLEAN flag is set.
    V08,
    /// 0x8374026c: written by an attached 8.4, never clean.
    V08Unclean,
    /// 0x8374026d.
    V09,
}

impl Magic {
    /// Value of the v07 magic.
    pub const V07_VALUE: u32 = 0x8374_026a;
    /// Value of the v08 magic.
    pub const V08_VALUE: u32 = 0x8374_026b;
    /// Value of the magic of v08 metadata that is attached.
    pub const V08_UNCLEAN_VALUE: u32 = 0x8374_026c;
    /// Value of the v09 magic.
    pub const V09_VALUE: u32 = 0x8374_026d;

    /// Looks at the places where a magic number may be; `None` if none is there.
    pub fn of(block: &[u8; 4096]) -> Option<Self> {
        let at =
            |i: usize| u32::from_be_bytes([block[i], block[i + 1], block[i + 2], block[i + 3]]);
        match (at(60), at(28)) {
            (Self::V09_VALUE, _) => Some(Self::V09),
            (Self::V08_VALUE, _) => Some(Self::V08),
            (Self::V08_UNCLEAN_VALUE, _) => Some(Self::V08Unclean),
            (_, Self::V07_VALUE) => Some(Self::V07),
            (_, 0x8374_0269) => Some(Self::V06),
            _ => None,
        }
    }

    /// The format's name as the tools write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V06 => "v06",
            Self::V07 => "v07",
            Self::V08 | Self::V08Unclean => "v08",
            Self::V09 => "v09",
        }
    }
}

/// A superblock that cannot be used, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// No known magic number.
    #[error("no metadata here: the magic number is {found:#010x}")]
    NoMagic {
        /// The 32 bits at byte 60.
        found: u32,
    },
    /// Metadata of another format.
    #[error("found {} metadata, expected {}", .found.name(), .wanted.name())]
    OtherFormat {
        /// What the magic says.
        found: Magic,
        /// What was asked for.
        wanted: Magic,
    },
    /// Bytes per bit is not a power of two within 4096..=1048576 (v08: not 4096).
    #[error("bytes per bitmap bit is {found}; it must be {}", if *.v08 { "4096" } else {
        "a power of two from 4096 to 1048576" })]
    BitmapBlockSize {
        /// Value on disk.
        found: u32,
        /// True for v08, which knows one size only.
        v08: bool,
    },
    /// The number of bitmap slots is not within 1..=31.
    #[error("max-peers is {found}; it must be 1 to 31")]
    MaxPeers {
        /// Value on disk.
        found: u32,
    },
    /// The own node id is not within -1..=31.
    #[error("node-id is {found}; it must be -1 to 31")]
    NodeId {
        /// Value on disk.
        found: i32,
    },
    /// Peer entry with a bitmap slot that does not exist.
    #[error("peer {node_id}: bitmap-index is {found}; it must be -1 to {}", .max_peers - 1)]
    BitmapIndex {
        /// Whose entry it is.
        node_id: u8,
        /// Value on disk.
        found: i32,
        /// Number of slots.
        max_peers: u8,
    },
    /// Two peers share a bitmap slot.
    #[error("peers {first} and {second} both have bitmap-index {index}")]
    BitmapIndexTwice {
        /// Node id of the lower entry.
        first: u8,
        /// Node id of the upper entry.
        second: u8,
        /// The slot that both name.
        index: u8,
    },
    /// Our own entry has a bitmap slot.
    #[error("the own node {node_id} has bitmap-index {index}; the own entry must have none")]
    OwnBitmapIndex {
        /// Own node id.
        node_id: u8,
        /// The slot.
        index: u8,
    },
    /// Impossible activity-log geometry.
    #[error(
        "activity log of {stripes} stripes of {stripe_blocks} blocks; the product must be 8 to \
         4194304, or both numbers zero"
    )]
    AlGeometry {
        /// Value on disk.
        stripes: u32,
        /// Value on disk.
        stripe_blocks: u32,
    },
    /// The effective size is larger than any device.
    #[error("the effective size of {found} sectors is above the limit of 2^41")]
    EffectiveSize {
        /// Value on disk.
        found: u64,
    },
}

/// A layout that cannot be, or one that a superblock claims and that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The device cannot hold the metadata.
    #[error("a device of {device_bytes} bytes is too small for {placement} metadata")]
    TooSmall {
        /// Size of the device that should hold it.
        device_bytes: u64,
        /// Where it should go.
        placement: Placement,
    },
    /// The device is larger than the fields of a superblock can describe.
    #[error("a device of {device_bytes} bytes is too large for this metadata layout")]
    TooLarge {
        /// Size of the device that should hold it.
        device_bytes: u64,
    },
    /// Fixed external slots have one activity-log geometry and one bitmap block size only.
    #[error(
        "fixed external metadata must have a 32 kB activity log of one stripe and 4096 bytes per \
         bitmap bit; use flexible external metadata"
    )]
    FixedSlotOptions,
    /// Fixed slot numbers go from 0 to 255.
    #[error("metadata index {found} is out of range 0..=255")]
    SlotNumber {
        /// The number asked for.
        found: u32,
    },
    /// The superblock's offsets contradict its placement or its own geometry.
    #[error(
        "{what} in the superblock is {found}, but {placement} metadata with this geometry needs \
         {needed}"
    )]
    Offset {
        /// Field name.
        what: &'static str,
        /// Where the metadata is.
        placement: Placement,
        /// Value on disk, sectors.
        found: i64,
        /// Value that fits (or its limit), sectors.
        needed: i64,
    },
    /// The bitmap area cannot hold the agreed size.
    #[error(
        "the effective size of {effective_sectors} sectors needs {needed_sectors} sectors of \
         bitmap, but there are {area_sectors}"
    )]
    BitmapTooSmall {
        /// Agreed size.
        effective_sectors: u64,
        /// Bitmap sectors for it.
        needed_sectors: u64,
        /// Bitmap sectors that exist.
        area_sectors: u64,
    },
}
