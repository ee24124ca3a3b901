//! Looks for data that creating metadata would destroy: file systems, swap, LVM.

/// What lies at the start of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Only zeros.
    Nothing,
    /// Something that is not recognised.
    SomeData,
    /// A swap area.
    Swap,
    /// A physical volume of LVM2; its size is not known here.
    PhysicalVolume,
    /// A file system and its size in KiB.
    FileSystem {
        /// Name as the original prints it.
        name: &'static str,
        /// Size in KiB.
        size_kib: u64,
    },
}

/// Bytes to look at.
pub(crate) const LOOK_BYTES: usize = 69_632;

impl Content {
    /// Recognises the content of the first [`LOOK_BYTES`] of a device.
    pub(crate) fn of(start: &[u8]) -> Self {
        if start.iter().all(|b| *b == 0) {
            return Self::Nothing;
        }
        let at = |offset: usize, magic: &[u8]| {
            start
                .get(offset..offset + magic.len())
                .is_some_and(|found| found == magic)
        };
        if at(4086, b"SWAPSPACE2") || at(4086, b"SWAP-SPACE") {
            return Self::Swap;
        }
        if (0..4).any(|sector| at(sector * 512, b"LABELONE") && at(sector * 512 + 24, b"LVM2 001"))
        {
            return Self::PhysicalVolume;
        }
        file_system(start, &at).unwrap_or(Self::SomeData)
    }

    /// The words behind `Found `.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Nothing => "nothing".to_owned(),
            Self::SomeData => "some data".to_owned(),
            Self::Swap => "swap space signature".to_owned(),
            Self::PhysicalVolume => "LVM2 physical volume signature".to_owned(),
            Self::FileSystem { name, .. } => name.to_owned(),
        }
    }
}

fn file_system(start: &[u8], at: &dyn Fn(usize, &[u8]) -> bool) -> Option<Content> {
    let le32 = |o: usize| Some(u32::from_le_bytes(start.get(o..o + 4)?.try_into().ok()?));
    let be32 = |o: usize| Some(u32::from_be_bytes(start.get(o..o + 4)?.try_into().ok()?));
    let be64 = |o: usize| Some(u64::from_be_bytes(start.get(o..o + 8)?.try_into().ok()?));
    let le64 = |o: usize| Some(u64::from_le_bytes(start.get(o..o + 8)?.try_into().ok()?));
    if at(1080, &[0x53, 0xef]) {
        let has_journal = le32(1024 + 92)? & 4 != 0;
        let block_kib = 1u64.checked_shl(le32(1024 + 24)?.min(20))?;
        let large = if le32(1024 + 96)? & 0x80 != 0 {
            le32(1024 + 336)?
        } else {
            0
        };
        let blocks = u64::from(le32(1024 + 4)?) | u64::from(large) << 32;
        let name = if has_journal {
            "ext3 filesystem"
        } else {
            "ext2 filesystem"
        };
        return Some(Content::FileSystem {
            name,
            size_kib: blocks.saturating_mul(block_kib),
        });
    }
    if at(0, b"XFSB") {
        let size = u64::from(be32(4)?).saturating_mul(be64(8)?);
        return Some(Content::FileSystem {
            name: "xfs filesystem",
            size_kib: size / 1024,
        });
    }
    if at(32768, b"JFS1") {
        // Counted in blocks of the device's sector size.
        let size = le64(32768 + 8)?.saturating_mul(u64::from(le32(32768 + 24)?));
        return Some(Content::FileSystem {
            name: "jfs filesystem",
            size_kib: size / 1024,
        });
    }
    for place in [65536, 8192] {
        if at(place + 52, b"ReIsErFs") || at(place + 52, b"ReIsEr2F") || at(place + 52, b"ReIsEr3F")
        {
            let block = start.get(place + 44..place + 46)?;
            let block = u64::from(u16::from_le_bytes([block[0], block[1]]));
            let size = u64::from(le32(place)?).saturating_mul(block);
            return Some(Content::FileSystem {
                name: "reiser filesystem",
                size_kib: size / 1024,
            });
        }
    }
    None
}
