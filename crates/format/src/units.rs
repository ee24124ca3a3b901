//! Numbers with a unit: sectors, node ids, volume numbers, generation identifiers, dagtags.
//!
//! Each type is a plain number in memory; conversions between units are its methods, so that no
//! caller multiplies by 512 on its own.

use core::fmt;

/// Position or length on a device in 512-byte sectors, whatever the logical block size is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sector(pub u64);

/// Number of a 4 MiB activity-log extent of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AlExtent(pub u32);

impl Sector {
    /// Bytes in one sector.
    pub const SIZE: u64 = 512;
    /// The first sector.
    pub const ZERO: Sector = Sector(0);

    /// The 4 MiB activity-log extent that holds this sector.
    pub const fn al_extent(self) -> AlExtent {
        AlExtent((self.0 >> (22 - 9)) as u32)
    }

    /// The sector at byte `bytes`, `None` if that is not a sector border.
    pub const fn from_bytes(bytes: u64) -> Option<Sector> {
        if bytes.is_multiple_of(Self::SIZE) {
            Some(Sector(bytes / Self::SIZE))
        } else {
            None
        }
    }

    /// The sector that holds byte `bytes`.
    pub const fn from_bytes_floor(bytes: u64) -> Sector {
        Sector(bytes / Self::SIZE)
    }

    /// The first sector at or behind byte `bytes`.
    pub const fn from_bytes_ceil(bytes: u64) -> Sector {
        Sector(bytes.div_ceil(Self::SIZE))
    }

    /// Byte position, `None` if it does not fit in 64 bits (only a peer's nonsense does not).
    pub const fn checked_bytes(self) -> Option<u64> {
        self.0.checked_mul(Self::SIZE)
    }

    /// Byte position, saturating: `u64::MAX` lies behind the end of every device.
    pub const fn bytes(self) -> u64 {
        self.0.saturating_mul(Self::SIZE)
    }

    /// Position `count` sectors further, `None` on overflow.
    pub const fn checked_add(self, count: Sector) -> Option<Sector> {
        match self.0.checked_add(count.0) {
            Some(sum) => Some(Sector(sum)),
            None => None,
        }
    }

    /// Distance from `start` to this position, `None` if `start` lies behind it.
    pub const fn checked_sub(self, start: Sector) -> Option<Sector> {
        match self.0.checked_sub(start.0) {
            Some(difference) => Some(Sector(difference)),
            None => None,
        }
    }

    /// Position behind a range of `size_bytes` that starts here, saturating, rounded up.
    pub const fn end_of(self, size_bytes: u32) -> Sector {
        Sector(
            self.0
                .saturating_add(Self::from_bytes_ceil(size_bytes as u64).0),
        )
    }
}

impl fmt::Display for Sector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl AlExtent {
    /// Bytes of one extent.
    pub const SIZE: u64 = 4 << 20;

    /// First sector of the extent.
    pub const fn first_sector(self) -> Sector {
        Sector((self.0 as u64) << (22 - 9))
    }
}

/// Node id of a DRBD node, 0..=31.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u8);

impl NodeId {
    /// Number of possible node ids.
    pub const COUNT: u8 = 32;

    /// The node id of this number, `None` outside 0..=31.
    pub const fn new(id: u32) -> Option<NodeId> {
        if id < Self::COUNT as u32 {
            Some(NodeId(id as u8))
        } else {
            None
        }
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Volume number inside a resource; 0xFFFF stands for the connection as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeNr(pub u16);

impl VolumeNr {
    /// No volume: a packet with it concerns the connection.
    pub const NONE: VolumeNr = VolumeNr(0xFFFF);

    /// Whether this names no volume.
    pub const fn is_none(self) -> bool {
        self.0 == Self::NONE.0
    }
}

impl fmt::Display for VolumeNr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            f.write_str("-")
        } else {
            fmt::Display::fmt(&self.0, f)
        }
    }
}

/// Minor number of a volume's block device, unique on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Minor(pub u32);

impl fmt::Display for Minor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Set of nodes: bit *n* is node id *n*. Bits above 31 occur in complements and mean nothing.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeMask(pub u64);

impl NodeMask {
    /// No node.
    pub const EMPTY: NodeMask = NodeMask(0);
    /// Every bit set, also those of nodes that cannot exist.
    pub const ALL: NodeMask = NodeMask(u64::MAX);

    /// The set of one node.
    pub const fn of(node: NodeId) -> NodeMask {
        NodeMask(1 << (node.0 & 63))
    }

    /// Whether `node` is in the set.
    pub const fn contains(self, node: NodeId) -> bool {
        self.0 & Self::of(node).0 != 0
    }

    /// The set with `node` added.
    #[must_use]
    pub const fn with(self, node: NodeId) -> NodeMask {
        NodeMask(self.0 | Self::of(node).0)
    }

    /// The set without `node`.
    #[must_use]
    pub const fn without(self, node: NodeId) -> NodeMask {
        NodeMask(self.0 & !Self::of(node).0)
    }

    /// Adds `node`.
    pub const fn insert(&mut self, node: NodeId) {
        self.0 |= Self::of(node).0;
    }

    /// Removes `node`.
    pub const fn remove(&mut self, node: NodeId) {
        self.0 &= !Self::of(node).0;
    }

    /// Nodes in either set.
    #[must_use]
    pub const fn union(self, other: NodeMask) -> NodeMask {
        NodeMask(self.0 | other.0)
    }

    /// Nodes in both sets.
    #[must_use]
    pub const fn intersection(self, other: NodeMask) -> NodeMask {
        NodeMask(self.0 & other.0)
    }

    /// Nodes of this set that are not in `other`.
    #[must_use]
    pub const fn difference(self, other: NodeMask) -> NodeMask {
        NodeMask(self.0 & !other.0)
    }

    /// All 64 bits inverted.
    #[must_use]
    pub const fn complement(self) -> NodeMask {
        NodeMask(!self.0)
    }

    /// Whether no bit is set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of set bits.
    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// The nodes 0..=31 of the set in ascending order.
    pub fn iter(self) -> impl Iterator<Item = NodeId> {
        (0..NodeId::COUNT)
            .map(NodeId)
            .filter(move |node| self.contains(*node))
    }
}

impl FromIterator<NodeId> for NodeMask {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> Self {
        nodes.into_iter().fold(Self::EMPTY, Self::with)
    }
}

impl fmt::Debug for NodeMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeMask({:#x})", self.0)
    }
}

/// Identifier of a data generation. Bit 0 says "created while Primary".
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub u64);

impl Uuid {
    /// No generation.
    pub const ZERO: Uuid = Uuid(0);
    /// Value of a current UUID whose device was created and never written.
    pub const JUST_CREATED: Uuid = Uuid(4);
    /// Bit that says "created while Primary"; most comparisons ignore it.
    pub const PRIMARY_BIT: u64 = 1;
    /// Added to a bitmap UUID to derive the UUID of a resync (protocol below 110).
    pub const NEW_BM_OFFSET: u64 = 0x0001_0000_0000_0000;
    /// Sent for a bitmap UUID while the sender is sync target of that node (wire.md 4.2).
    pub const ALL_ONES: Uuid = Uuid(u64::MAX);

    /// The identifier without the "created while Primary" bit.
    #[must_use]
    pub const fn without_primary_bit(self) -> Uuid {
        Uuid(self.0 & !Self::PRIMARY_BIT)
    }

    /// Whether both name one generation, ignoring the "created while Primary" bit.
    pub const fn same_generation(self, other: Uuid) -> bool {
        self.without_primary_bit().0 == other.without_primary_bit().0
    }

    /// What a resync from this generation is called below protocol 110 (semantics.md, 12.10).
    #[must_use]
    pub const fn resync_name(self) -> Uuid {
        Uuid(self.0.wrapping_add(Uuid::NEW_BM_OFFSET))
    }

    /// Whether this is what a resync from `start` is called, or one that began again from there
    /// without the other's knowledge.
    #[must_use]
    pub const fn is_resync_from(self, start: Uuid) -> bool {
        let (name, start) = (self.without_primary_bit(), start.without_primary_bit());
        let steps = name.0.wrapping_sub(start.0);
        let most = 0xFF * Uuid::NEW_BM_OFFSET;
        steps != 0 && steps <= most && steps.is_multiple_of(Uuid::NEW_BM_OFFSET)
    }

    /// Whether no generation is named.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uuid({:016X})", self.0)
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016X}", self.0)
    }
}

/// Data generation tag: sectors written by a primary so far. Compared as a signed difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dagtag(pub u64);

impl Dagtag {
    /// Whether this tag is newer than `other`, by the sign of the 64-bit difference.
    pub const fn is_newer_than(self, other: Dagtag) -> bool {
        (self.0.wrapping_sub(other.0) as i64) > 0
    }

    /// The tag after a write of `size_bytes`.
    #[must_use]
    pub const fn advanced_by_bytes(self, size_bytes: u32) -> Dagtag {
        Dagtag(self.0.wrapping_add(size_bytes as u64 / Sector::SIZE))
    }
}

#[cfg(test)]
mod tests {
    use super::{AlExtent, Dagtag, NodeId, NodeMask, Sector, Uuid};

    #[test]
    fn an_activity_log_extent_is_four_mebibytes() {
        assert_eq!(Sector(8191).al_extent(), AlExtent(0));
        assert_eq!(Sector(8192).al_extent(), AlExtent(1));
        assert_eq!(AlExtent(3).first_sector().bytes(), 3 * AlExtent::SIZE);
    }

    #[test]
    fn a_byte_inside_a_sector_is_no_sector_border() {
        assert_eq!(Sector::from_bytes(1024), Some(Sector(2)));
        assert_eq!(Sector::from_bytes(1025), None);
        assert_eq!(Sector::from_bytes_ceil(1025), Sector(3));
        assert_eq!(Sector(8).end_of(4096), Sector(16));
        assert_eq!(Sector(u64::MAX).checked_bytes(), None);
    }

    #[test]
    fn a_mask_lists_its_nodes_in_ascending_order() {
        let mask: NodeMask = [NodeId(5), NodeId(0)].into_iter().collect();
        assert_eq!(mask, NodeMask(0x21));
        assert!(mask.iter().eq([NodeId(0), NodeId(5)]));
        assert_eq!(NodeId::new(32), None);
    }

    #[test]
    fn dagtags_compare_by_signed_difference() {
        assert!(Dagtag(1).is_newer_than(Dagtag(u64::MAX)));
        assert!(!Dagtag(u64::MAX).is_newer_than(Dagtag(1)));
    }

    #[test]
    fn the_primary_bit_does_not_distinguish_generations() {
        assert!(Uuid(0x11).same_generation(Uuid(0x10)));
    }
}
