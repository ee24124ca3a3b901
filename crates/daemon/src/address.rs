//! Addresses, names and numbers in the tools' words.

use std::net::SocketAddr;

use lockstep_core::command::{CommandError, ErrorCode};
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_io::tcp::Path;

use crate::report::Configured;

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

/// A resource's name: what the original takes with its strict names, which are its default.
pub(crate) fn check_name(name: &str) -> Result<(), CommandError> {
    let fine = |b: u8| b.is_ascii_alphanumeric() || b"+._-".contains(&b);
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(fine) || name == "all" {
        return Err(CommandError {
            code: ErrorCode::ERR_INVALID_REQUEST,
            text: format!(
                "resource name {name:?}: 1 to {MAX_NAME_BYTES} of the characters 0-9 A-Z a-z + . \
                 _ - are needed, and not 'all'"
            ),
        });
    }
    Ok(())
}

/// Longest name of a resource.
const MAX_NAME_BYTES: usize = 127;

/// A pair of addresses leads to one peer of a resource.
pub(crate) fn check_unused(
    configured: &Configured,
    peer: NodeId,
    local: &str,
    remote: &str,
) -> Result<(), CommandError> {
    for (id, other) in &configured.peers {
        if other
            .paths
            .iter()
            .any(|p| p.local == local && p.remote == remote)
        {
            return Err(if *id == peer.0 {
                CommandError {
                    code: ErrorCode::ERR_ALREADY_EXISTS,
                    text: format!("path {local} {remote} exists already"),
                }
            } else {
                CommandError {
                    code: LOCAL_AND_PEER_ADDR,
                    text: format!("path {local} {remote} leads to node {id} already"),
                }
            });
        }
    }
    Ok(())
}

/// `ERR_LOCAL_AND_PEER_ADDR` (config-and-cli.md, 16.2).
pub(crate) const LOCAL_AND_PEER_ADDR: ErrorCode = ErrorCode(173);

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
