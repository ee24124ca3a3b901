//! States that cannot be together, whatever happens: what a replication state says of the two disks (semantics.md, 4.3, rule 5).

use lockstep_core::report::{PeerDeviceReport, Snapshot};
use lockstep_core::state::{ConnState, DiskState, ReplState};

/// What is wrong with a node's state, if anything is.
pub(crate) fn odd(snapshot: &Snapshot) -> Option<&'static str> {
    let is_copied = |p: &&PeerDeviceReport| p.repl_state == ReplState::SyncTarget;
    let several = snapshot.devices.iter().any(|d| {
        let pairs = snapshot.connections.iter().flat_map(|c| &c.peer_devices);
        pairs
            .filter(|p| p.volume == d.volume)
            .filter(is_copied)
            .count()
            > 1
    });
    if several {
        return Some("is being resynced from two nodes at the same time");
    }
    snapshot.connections.iter().find_map(|c| {
        let is_up = c.state == ConnState::Connected;
        c.peer_devices.iter().find_map(|p| {
            let own = snapshot.devices.iter().find(|d| d.volume == p.volume)?;
            match is_up {
                true => of_pair(own.disk_state, p),
                false if p.repl_state == ReplState::Off => None,
                false => Some("replicates over a connection that is none"),
            }
        })
    })
}

fn of_pair(own: DiskState, p: &PeerDeviceReport) -> Option<&'static str> {
    let is_whole = p.disk_state > DiskState::Consistent;
    match p.repl_state {
        ReplState::WfBitmapT
        | ReplState::StartingSyncT
        | ReplState::WfSyncUuid
        | ReplState::Behind
            if own > DiskState::Outdated =>
        {
            Some("is behind its peer, and takes its disk for a good one")
        }
        ReplState::SyncTarget | ReplState::PausedSyncT if own != DiskState::Inconsistent => {
            Some("is being resynced, and its disk is not Inconsistent")
        }
        ReplState::WfBitmapS
        | ReplState::PausedSyncS
        | ReplState::StartingSyncS
        | ReplState::Ahead
            if is_whole =>
        {
            Some("has more than its peer, whose disk it takes for UpToDate")
        }
        ReplState::SyncSource if p.disk_state != DiskState::Inconsistent => {
            Some("is the source of a disk that it does not take for Inconsistent")
        }
        state if state > ReplState::Established && own < DiskState::Inconsistent => {
            Some("takes part in a resync or verify without a disk")
        }
        _ => None,
    }
}
