//! What a node says of its data, compared with what its metadata would say after a loss of power.

use lockstep_core::state::{DiskState, ReplState, Role};
use lockstep_format::units::{NodeId, Uuid, VolumeNr};
use lockstep_format::wire::packet::Uuids110;

use crate::packets::generation;
use crate::world::{World, name};

/// A node names its generation to a peer, which goes by that from now on: a loss of power must not make it another one.
pub(crate) fn generation_is_durable(
    w: &mut World,
    node: usize,
    peer: NodeId,
    volume: VolumeNr,
    uuids: &Uuids110,
) {
    let disk = &w.nodes[node].disks[usize::from(volume.0)];
    let snapshot = w.snapshot(node).filter(|s| s.role == Role::Secondary);
    let works = disk.open && !disk.had_errors && !disk.given_up && !disk.trouble.hangs;
    let Some(snapshot) = snapshot.filter(|_| works) else {
        return;
    };
    let mut devices = snapshot.devices.iter().filter(|d| d.volume == volume);
    let mut connections = snapshot.connections.iter();
    let to_peer = connections.find(|c| c.peer == peer);
    let mut of_peer = to_peer.into_iter().flat_map(|c| &c.peer_devices);
    let counts = devices.any(|d| d.disk_state == DiskState::UpToDate)
        && of_peer.any(|p| {
            // One that attaches waits for the generations, and its Primary does not take them for a confirmation.
            let attaches = matches!(p.disk_state, DiskState::Attaching | DiskState::Negotiating);
            p.volume == volume && p.repl_state == ReplState::Established && !attaches
        });
    // A disk that is new has nothing to lose.
    let noted = disk.superblock().ok().map(|s| Uuid(s.current_uuid.0 & !1));
    let noted = noted.filter(|uuid| counts && *uuid > Uuid::JUST_CREATED);
    let Some(noted) = noted.filter(|uuid| uuid.0 != uuids.current.0 & !1) else {
        return;
    };
    let text = format!(
        "{} names generation {} of volume {volume} to {}, and its metadata {}",
        name(node),
        generation(uuids.current),
        name(usize::from(peer.0)),
        generation(noted)
    );
    w.fail(text);
}
