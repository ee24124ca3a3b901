//! `drbdsetup get-gi` and `show-gi` (config-and-cli.md, 14).

use lockstep_daemon::report::{DeviceReport, PeerDeviceReport};
use lockstep_format::disk::v09::{DeviceFlags, PeerFlags};

/// The line of identifiers and flags.
pub(super) fn line(device: &DeviceReport, peer_device: &PeerDeviceReport) -> String {
    let mut out = format!(
        "{:016X}:{:016X}:",
        device.current_uuid, peer_device.bitmap_uuid
    );
    for index in 0..2 {
        let uuid = device.history_uuids.get(index).copied().unwrap_or(0);
        out.push_str(&format!("{uuid:016X}:"));
    }
    let mut bits = Vec::new();
    for flag in DEVICE_FLAGS {
        bits.push(if device.flags & flag.bits() != 0 {
            "1"
        } else {
            "0"
        });
    }
    for flag in PEER_FLAGS {
        bits.push(if peer_device.flags & flag.bits() != 0 {
            "1"
        } else {
            "0"
        });
    }
    out.push_str(&bits.join(":"));
    out
}

/// consistent, was-up-to-date, primary-indicator, crashed-primary, al-clean, al-disabled,
/// primary-lost-quorum: bits of the superblock (metadata.md).
const DEVICE_FLAGS: [DeviceFlags; 7] = [
    DeviceFlags::CONSISTENT,
    DeviceFlags::WAS_UP_TO_DATE,
    DeviceFlags::PRIMARY_IND,
    DeviceFlags::CRASHED_PRIMARY,
    DeviceFlags::AL_CLEAN,
    DeviceFlags::AL_DISABLED,
    DeviceFlags::PRIMARY_LOST_QUORUM,
];

/// peer-connected, peer-outdated, peer-fencing, peer-full-sync, peer-device-seen.
const PEER_FLAGS: [PeerFlags; 5] = [
    PeerFlags::CONNECTED,
    PeerFlags::OUTDATED,
    PeerFlags::FENCING,
    PeerFlags::FULL_SYNC,
    PeerFlags::DEVICE_SEEN,
];

/// The line with its legend.
pub(super) fn with_legend(line: &str) -> String {
    format!("\n{HEAD}{line}\n{TAIL}\n")
}

const HEAD: &str = "       +--<  Current data generation UUID  >-
       |               +--<  Bitmap's base data generation UUID  >-
       |               |                 +--<  younger history UUID  >-
       |               |                 |         +-<  older history  >-
       V               V                 V         V
";

const TAIL: &str =
    "                                                                    ^ ^ ^ ^ ^ ^ ^ ^ ^ ^ ^ ^
                                      -<  Data consistency flag  >--+ | | | | | | | | | | |
                             -<  Data was/is currently up-to-date  >--+ | | | | | | | | | |
                                  -<  Node was/is currently primary  >--+ | | | | | | | | |
 -<  This node was a crashed primary, and has not seen its peer since  >--+ | | | | | | | |
             -<  The activity-log was applied, the disk can be attached  >--+ | | | | | | |
        -<  The activity-log was disabled, peer is completely out of sync  >--+ | | | | | |
                              -<  This node was primary when it lost quorum  >--+ | | | | |
                                          -<  Node was/is currently connected  >--+ | | | |
                              -<  The peer's disk was out-dated or inconsistent  >--+ | | |
                                 -<   A fence policy other the dont-care was used  >--+ | |
                  -<  Node was in the progress of marking all blocks as out of sync  >--+ |
                     -<  At least once we saw this node with a backing device attached >--+
";

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn the_line_has_identifiers_and_twelve_flags() {
        let mut web = sample::web();
        web.devices[0].flags = 0x1 | 0x10 | 0x2 | 0x80;
        web.connections[0].peer_devices[1].flags = 0x1_0011;
        assert_eq!(
            line(&web.devices[0], &web.connections[0].peer_devices[1]),
            "1122334455667789:99887766554433FF:AAAAAAAAAAAAAAA0:BBBBBBBBBBBBBBB0:\
             1:1:1:0:1:0:0:1:0:0:0:1"
        );
    }
}
