//! Addresses and numbers in the tools' words.

use std::net::SocketAddr;

use lockstep_core::command::{CommandError, ErrorCode};
use lockstep_format::units::VolumeNr;
use lockstep_io::tcp::Path;

/// A volume's number, checked.
pub(crate) fn volume_nr(number: u32) -> Result<VolumeNr, CommandError> {
    match u16::try_from(number).map(VolumeNr) {
        Ok(volume) if !volume.is_none() => Ok(volume),
        _ => Err(CommandError {
            code: ErrorCode::ERR_INVALID_REQUEST,
            text: format!("volume {number}: the largest is {}", u16::MAX - 1),
        }),
    }
}

/// A path of two addresses as the tools write them.
pub(crate) fn path(local: &str, remote: &str) -> Result<Path, CommandError> {
    Ok(Path {
        local: socket_address(local)?,
        peer: socket_address(remote)?,
    })
}

fn socket_address(text: &str) -> Result<SocketAddr, CommandError> {
    let plain = text
        .strip_prefix("ipv4:")
        .or_else(|| text.strip_prefix("ipv6:"));
    match plain.and_then(|plain| plain.parse().ok()) {
        Some(address) => Ok(address),
        None => Err(CommandError {
            code: ErrorCode::ERR_INVALID_REQUEST,
            text: format!("'{text}' is not an address: ipv4:ADDRESS:PORT or ipv6:[ADDRESS]:PORT"),
        }),
    }
}
