//! A superblock of either format, for tools that handle both.

use super::layout::{Geometry, Layout, Placement, StoredOffsets};
use super::{BLOCK_BYTES, DiskError, LayoutError, Magic, v08, v09};
use crate::units::{Sector, Uuid};

/// The formats that can be read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// DRBD 8.3 and 8.4.
    V08,
    /// DRBD 9.
    V09,
}

impl Format {
    /// The name that the tools use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V08 => "v08",
            Self::V09 => "v09",
        }
    }
}

/// A superblock of either format.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // Few exist, and never in a collection.
pub enum AnySuperBlock {
    /// DRBD 8.3 and 8.4.
    V08(v08::SuperBlock),
    /// DRBD 9.
    V09(v09::SuperBlock),
}

impl AnySuperBlock {
    /// What `create-md` writes.
    pub fn fresh(format: Format, layout: &Layout) -> Self {
        match format {
            Format::V08 => Self::V08(v08::SuperBlock::fresh(layout)),
            Format::V09 => Self::V09(v09::SuperBlock::fresh(layout)),
        }
    }

    /// Reads a superblock, of whichever format its magic says.
    pub fn decode(block: &[u8; BLOCK_BYTES]) -> Result<Self, DiskError> {
        match Magic::of(block) {
            Some(Magic::V08 | Magic::V08Unclean) => v08::SuperBlock::decode(block).map(Self::V08),
            Some(Magic::V09 | Magic::V06 | Magic::V07) | None => {
                v09::SuperBlock::decode(block).map(Self::V09)
            }
        }
    }

    /// Writes the whole 4 KiB.
    pub fn encode(&self, out: &mut [u8; BLOCK_BYTES]) {
        match self {
            Self::V08(sb) => sb.encode(out),
            Self::V09(sb) => sb.encode(out),
        }
    }

    /// Which format it is.
    pub const fn format(&self) -> Format {
        match self {
            Self::V08(_) => Format::V08,
            Self::V09(_) => Format::V09,
        }
    }

    /// The areas that this superblock describes, checked against the device it was read from.
    pub fn layout(&self, placement: Placement, device_bytes: u64) -> Result<Layout, LayoutError> {
        match self {
            Self::V08(sb) => sb.layout(placement, device_bytes),
            Self::V09(sb) => sb.layout(placement, device_bytes),
        }
    }

    /// Takes over another layout, as after a move. v08 has no slots and bytes per bit to take.
    pub fn set_layout(&mut self, layout: &Layout) {
        match self {
            Self::V08(sb) => {
                sb.offsets = layout.offsets();
                sb.al = layout.geometry().al;
            }
            Self::V09(sb) => sb.set_layout(layout),
        }
    }

    /// True if the activity log needs no replay before attach.
    pub fn is_clean(&self) -> bool {
        match self {
            Self::V08(sb) => sb.is_clean(),
            Self::V09(sb) => sb.is_clean(),
        }
    }

    /// Marks the activity log as applied.
    pub fn set_clean(&mut self) {
        match self {
            Self::V08(sb) => sb.set_clean(),
            Self::V09(sb) => sb.flags |= v09::DeviceFlags::AL_CLEAN,
        }
    }

    /// Takes that mark away.
    pub fn set_unclean(&mut self) {
        match self {
            Self::V08(sb) => sb.magic_84_unclean = true,
            Self::V09(sb) => sb.flags.remove(v09::DeviceFlags::AL_CLEAN),
        }
    }

    /// Device flags; the common bits have the same place in both formats.
    pub const fn device_flags(&self) -> v09::DeviceFlags {
        match self {
            Self::V08(sb) => v09::DeviceFlags::from_bits_retain(
                // The peer's bits of v08 mean nothing in v09.
                sb.flags.bits() & !0x2c,
            ),
            Self::V09(sb) => sb.flags,
        }
    }

    /// Sets or clears flags that both formats have.
    pub fn change_device_flags(&mut self, flags: v09::DeviceFlags, set: FlagChange) {
        let change = |old: u32| match set {
            FlagChange::Set => old | flags.bits(),
            FlagChange::Clear => old & !flags.bits(),
        };
        match self {
            Self::V08(sb) => sb.flags = v08::Flags::from_bits_retain(change(sb.flags.bits())),
            Self::V09(sb) => sb.flags = v09::DeviceFlags::from_bits_retain(change(sb.flags.bits())),
        }
    }

    /// Size of the replicated device that the cluster agreed on.
    pub const fn effective_size(&self) -> Sector {
        match self {
            Self::V08(sb) => sb.effective_size,
            Self::V09(sb) => sb.effective_size,
        }
    }

    /// The agreed size, for changes.
    pub const fn effective_size_mut(&mut self) -> &mut Sector {
        match self {
            Self::V08(sb) => &mut sb.effective_size,
            Self::V09(sb) => &mut sb.effective_size,
        }
    }

    /// Generation of the data.
    pub const fn current_uuid(&self) -> Uuid {
        match self {
            Self::V08(sb) => sb.current_uuid,
            Self::V09(sb) => sb.current_uuid,
        }
    }

    /// Random identity of this metadata.
    pub const fn device_uuid(&self) -> u64 {
        match self {
            Self::V08(sb) => sb.device_uuid,
            Self::V09(sb) => sb.device_uuid,
        }
    }

    /// Sets the random identity of this metadata.
    pub const fn set_device_uuid(&mut self, uuid: u64) {
        match self {
            Self::V08(sb) => sb.device_uuid = uuid,
            Self::V09(sb) => sb.device_uuid = uuid,
        }
    }

    /// Activity-log slots of the running configuration.
    pub const fn al_extents(&self) -> u32 {
        match self {
            Self::V08(sb) => sb.al_extents,
            Self::V09(sb) => sb.al_extents,
        }
    }

    /// Last agreed largest request in bytes.
    pub const fn peer_max_bio_bytes(&self) -> u32 {
        match self {
            Self::V08(sb) => sb.peer_max_bio_bytes,
            Self::V09(sb) => sb.peer_max_bio_bytes,
        }
    }

    /// Slots, bytes per bit and activity-log shape.
    pub const fn geometry(&self) -> Geometry {
        match self {
            Self::V08(sb) => sb.geometry(),
            Self::V09(sb) => sb.geometry,
        }
    }

    /// Offsets as stored.
    pub const fn offsets(&self) -> StoredOffsets {
        match self {
            Self::V08(sb) => sb.offsets,
            Self::V09(sb) => sb.offsets,
        }
    }
}

/// What to do with flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagChange {
    /// Turn them on.
    Set,
    /// Turn them off.
    Clear,
}
