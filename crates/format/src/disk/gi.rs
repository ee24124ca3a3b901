//! Generation identifiers as text: get-gi, set-gi and the picture of show-gi (section 21).

use alloc::format;
use alloc::string::String;

use super::any::AnySuperBlock;
use super::v09::{DeviceFlags, PeerFlags};
use super::{v08, v09};
use crate::units::{NodeId, Uuid};

/// Why a list of generation identifiers cannot be used; the tools' own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GiError {
    /// Not a hexadecimal UUID or not a number.
    #[error("'{field}' is not a number.")]
    NotANumber {
        /// The field.
        field: String,
    },
    /// A flag that is neither 0 nor 1.
    #[error("'{field}' is not 0 or 1.")]
    NotAFlag {
        /// The field.
        field: String,
    },
}

const V08_FLAGS: [v08::Flags; 7] = [
    v08::Flags::CONSISTENT,
    v08::Flags::WAS_UP_TO_DATE,
    v08::Flags::PRIMARY_IND,
    v08::Flags::CONNECTED_IND,
    v08::Flags::FULL_SYNC,
    v08::Flags::PEER_OUT_DATED,
    v08::Flags::CRASHED_PRIMARY,
];

/// UUIDs before the flags of a list.
const UUID_FIELDS: usize = 4;

const V09_FLAGS: [DeviceFlags; 7] = [
    DeviceFlags::CONSISTENT,
    DeviceFlags::WAS_UP_TO_DATE,
    DeviceFlags::PRIMARY_IND,
    DeviceFlags::CRASHED_PRIMARY,
    DeviceFlags::AL_CLEAN,
    DeviceFlags::AL_DISABLED,
    DeviceFlags::PRIMARY_LOST_QUORUM,
];

const V09_PEER_FLAGS: [PeerFlags; 5] = [
    PeerFlags::CONNECTED,
    PeerFlags::OUTDATED,
    PeerFlags::FENCING,
    PeerFlags::FULL_SYNC,
    PeerFlags::DEVICE_SEEN,
];

/// The line of `get-gi`. v08 has one peer, so `node` says nothing there.
pub fn print(superblock: &AnySuperBlock, node: NodeId) -> String {
    let (uuids, flags) = match superblock {
        AnySuperBlock::V08(sb) => (v08_uuids(sb), bits(&V08_FLAGS, |f| sb.flags.contains(f))),
        AnySuperBlock::V09(sb) => {
            let peer = sb.peer(node);
            let mut flags = bits(&V09_FLAGS, |f| sb.flags.contains(f));
            flags += &bits(&V09_PEER_FLAGS, |f| peer.flags.contains(f));
            let uuids = [
                sb.current_uuid,
                peer.bitmap_uuid,
                sb.history[0],
                sb.history[1],
            ];
            (uuids, flags)
        }
    };
    format!("{}:{}:{}:{}{flags}", uuids[0], uuids[1], uuids[2], uuids[3])
}

fn v08_uuids(sb: &v08::SuperBlock) -> [Uuid; 4] {
    [
        sb.current_uuid,
        sb.bitmap_uuid,
        sb.history[0],
        sb.history[1],
    ]
}

fn bits<F: Copy>(flags: &[F], is_set: impl Fn(F) -> bool) -> String {
    flags
        .iter()
        .map(|flag| if is_set(*flag) { ":1" } else { ":0" })
        .collect()
}

/// Takes over a list as `set-gi` gets it: an empty field or an early end keeps what is there.
/// On an error nothing is changed.
pub fn apply(superblock: &mut AnySuperBlock, node: NodeId, list: &str) -> Result<(), GiError> {
    let mut fields = list.split(':').map(str::trim);
    match superblock {
        AnySuperBlock::V08(sb) => {
            let mut new = sb.clone();
            for uuid in [&mut new.current_uuid, &mut new.bitmap_uuid] {
                set_uuid(uuid, fields.next())?;
            }
            for uuid in &mut new.history {
                set_uuid(uuid, fields.next())?;
            }
            for flag in V08_FLAGS {
                if let Some(on) = flag_field(fields.next())? {
                    new.flags.set(flag, on);
                }
            }
            *sb = new;
        }
        AnySuperBlock::V09(sb) => {
            let mut new: v09::SuperBlock = sb.clone();
            set_uuid(&mut new.current_uuid, fields.next())?;
            set_uuid(&mut new.peer_mut(node).bitmap_uuid, fields.next())?;
            for uuid in &mut new.history[..2] {
                set_uuid(uuid, fields.next())?;
            }
            for flag in V09_FLAGS {
                if let Some(on) = flag_field(fields.next())? {
                    new.flags.set(flag, on);
                }
            }
            for flag in V09_PEER_FLAGS {
                if let Some(on) = flag_field(fields.next())? {
                    new.peer_mut(node).flags.set(flag, on);
                }
            }
            *sb = new;
        }
    }
    Ok(())
}

/// Whether a list says what AL_CLEAN shall be. v08 has no field for it.
pub fn names_al_clean(superblock: &AnySuperBlock, list: &str) -> bool {
    let al_clean = V09_FLAGS.iter().position(|f| *f == DeviceFlags::AL_CLEAN);
    let field = match superblock {
        AnySuperBlock::V08(_) => None,
        AnySuperBlock::V09(_) => al_clean.and_then(|flag| list.split(':').nth(UUID_FIELDS + flag)),
    };
    field.is_some_and(|field| !field.trim().is_empty())
}

fn set_uuid(uuid: &mut Uuid, field: Option<&str>) -> Result<(), GiError> {
    let Some(field) = field.filter(|f| !f.is_empty()) else {
        return Ok(());
    };
    let digits = field.trim_start_matches("0x").trim_start_matches("0X");
    let value = u64::from_str_radix(digits, 16);
    *uuid = Uuid(value.map_err(|_| GiError::NotANumber {
        field: field.into(),
    })?);
    Ok(())
}

fn flag_field(field: Option<&str>) -> Result<Option<bool>, GiError> {
    let Some(field) = field.filter(|f| !f.is_empty()) else {
        return Ok(None);
    };
    let (digits, radix) = match field.strip_prefix("0x") {
        Some(hex) => (hex, 16),
        None if field.len() > 1 && field.starts_with('0') => (&field[1..], 8),
        None => (field, 10),
    };
    match u32::from_str_radix(digits, radix) {
        Ok(0) => Ok(Some(false)),
        Ok(1) => Ok(Some(true)),
        Ok(_) => Err(GiError::NotAFlag {
            field: field.into(),
        }),
        Err(_) => Err(GiError::NotANumber {
            field: field.into(),
        }),
    }
}

/// The text of `show-gi`.
pub fn picture(superblock: &AnySuperBlock, node: NodeId) -> String {
    let mut text = String::from(PICTURE_HEAD);
    text += &print(superblock, node);
    text.push('\n');
    match superblock {
        AnySuperBlock::V08(sb) => {
            text += PICTURE_V08;
            text += &format!("flags: {}\n", v08_flag_words(sb.flags));
            let clean = if sb.is_clean() {
                "clean"
            } else {
                "need apply-al"
            };
            text += &format!("meta-data: {clean}\n");
        }
        AnySuperBlock::V09(_) => text += PICTURE_V09,
    }
    let sectors = superblock.effective_size().0;
    if sectors > 0 {
        text += &format!(
            "last agreed size: {} ({sectors} sectors)\n",
            size_words(sectors)
        );
        text += &format!(
            "last agreed max bio size: {} Byte\n",
            superblock.peer_max_bio_bytes()
        );
    } else {
        text += "zero size device -- never seen peer yet?\n";
    }
    text
}

fn v08_flag_words(flags: v08::Flags) -> String {
    use v08::Flags;
    let pick = |flag, yes, no| if flags.contains(flag) { yes } else { no };
    let disk = if !flags.contains(Flags::CONSISTENT) {
        "Inconsistent"
    } else if !flags.contains(Flags::WAS_UP_TO_DATE) {
        "Outdated"
    } else {
        "UpToDate"
    };
    format!(
        "{}{}, {}, {disk}{}{}",
        pick(Flags::CRASHED_PRIMARY, "crashed ", ""),
        pick(Flags::PRIMARY_IND, "Primary", "Secondary"),
        pick(Flags::CONNECTED_IND, "Connected", "StandAlone"),
        pick(Flags::FULL_SYNC, ", need full sync", ""),
        pick(Flags::PEER_OUT_DATED, ", peer Outdated", ""),
    )
}

/// A size in the largest unit that leaves a number below 10000, rounded to whole units.
pub fn size_words(sectors: u64) -> String {
    let mut size = sectors / 2;
    let mut units = ["KB", "MB", "GB", "TB", "PB"].iter();
    let mut unit = units.next().expect("five units");
    while size >= 10_000 {
        let Some(larger) = units.next() else { break };
        size = size / 1024 + u64::from(size % 1024 >= 512);
        unit = larger;
    }
    format!("{size} {unit}")
}

const PICTURE_HEAD: &str = "
       +--<  Current data generation UUID  >-
       |               +--<  Bitmap's base data generation UUID  >-
       |               |                 +--<  younger history UUID  >-
       |               |                 |         +-<  older history  >-
       V               V                 V         V
";

const PICTURE_V09: &str = concat!(
    "                                                                    ^ ^ ^ ^ ^ ^ ^ ^ ^ ^ ^ ^\n",
    "                                      -<  Data consistency flag  >--+ | | | | | | | | | | |\n",
    "                             -<  Data was/is currently up-to-date  >--+ | | | | | | | | | |\n",
    "                                  -<  Node was/is currently primary  >--+ | | | | | | | | |\n",
    " -<  This node was a crashed primary, and has not seen its peer since  >--+ | | | | | | | |\n",
    "             -<  The activity-log was applied, the disk can be attached  >--+ | | | | | | |\n",
    "        -<  The activity-log was disabled, peer is completely out of sync  >--+ | | | | | |\n",
    "                              -<  This node was primary when it lost quorum  >--+ | | | | |\n",
    "                                          -<  Node was/is currently connected  >--+ | | | |\n",
    "                              -<  The peer's disk was out-dated or inconsistent  >--+ | | |\n",
    "                                 -<   A fence policy other the dont-care was used  >--+ | |\n",
    "                  -<  Node was in the progress of marking all blocks as out of sync  >--+ |\n",
    "                     -<  At least once we saw this node with a backing device attached >--+\n",
    "\n",
);

const PICTURE_V08: &str = concat!(
    "                                                                    ^ ^ ^ ^ ^ ^ ^\n",
    "                                      -<  Data consistency flag  >--+ | | | | | |\n",
    "                             -<  Data was/is currently up-to-date  >--+ | | | | |\n",
    "                                  -<  Node was/is currently primary  >--+ | | | |\n",
    "                                  -<  Node was/is currently connected  >--+ | | |\n",
    "         -<  Node was in the progress of setting all bits in the bitmap  >--+ | |\n",
    "                        -<  The peer's disk was out-dated or inconsistent  >--+ |\n",
    "      -<  This node was a crashed primary, and has not seen its peer since   >--+\n",
    "\n",
);
