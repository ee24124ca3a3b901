//! What a node goes by for seconds its metadata say: after a crash it, and others, go by those.

use lockstep_core::report::{ConnectionReport, PeerDeviceReport, Snapshot};
use lockstep_core::state::{DiskState, ReplState, Role};
use lockstep_format::disk::v09::{DeviceFlags, PeerFlags, SuperBlock};
use lockstep_format::units::VolumeNr;

use crate::world::{SECOND, Weather, World, name};

/// How long metadata may say something else: a slow disk needs that for some writes in turn.
const UNNOTED_MOST: u64 = 5 * SECOND;

/// Called once a second.
pub(crate) fn states_are_noted(w: &mut World) {
    let before = std::mem::take(&mut w.seen.unsaid);
    if w.config.weather != Weather::ByPlace || !w.flushes_peers {
        return;
    }
    for node in w.storage() {
        let Some(snapshot) = w.snapshot(node) else {
            continue;
        };
        for volume in 0..w.nodes[node].disks.len() {
            let disk = &w.nodes[node].disks[volume];
            let sleeps = w.nodes[node].frozen_until + UNNOTED_MOST > w.now;
            let works = disk.open && !disk.trouble.hangs && !disk.given_up && !disk.had_errors;
            if !works || sleeps || disk.busy_since().is_some() {
                continue;
            }
            let Ok(superblock) = disk.superblock() else {
                continue;
            };
            let volume_nr = VolumeNr(volume as u16);
            let resource = w.nodes[node].resource.as_ref();
            let current = resource.and_then(|r| r.generation(volume_nr));
            let generation = current.map(|uuid| uuid.0 & !1);
            let Some(what) = unsaid(&snapshot, volume_nr, generation, &superblock) else {
                continue;
            };
            let since = before.get(&(node, volume)).copied().unwrap_or(w.now);
            w.seen.unsaid.insert((node, volume), since);
            if w.now >= since + UNNOTED_MOST {
                w.fail(format!(
                    "the metadata of volume {volume} of {} have not said for {} s that {what}",
                    name(node),
                    UNNOTED_MOST / SECOND
                ));
                return;
            }
        }
    }
}

/// What the metadata do not say, or not any more.
fn unsaid(
    snapshot: &Snapshot,
    volume: VolumeNr,
    generation: Option<u64>,
    superblock: &SuperBlock,
) -> Option<String> {
    let own = snapshot.devices.iter().find(|d| d.volume == volume)?;
    if own.disk_state < DiskState::Inconsistent {
        return None;
    }
    let flags = superblock.flags;
    let has = |flag: DeviceFlags| flags.contains(flag);
    let is_primary = snapshot.role == Role::Primary;
    let is_led = snapshot.connections.iter().any(|c| c.role == Role::Primary);
    let partial = own.disk_state == DiskState::Inconsistent;
    if has(DeviceFlags::CONSISTENT) == partial
        || has(DeviceFlags::WAS_UP_TO_DATE) != (own.disk_state > DiskState::Outdated)
    {
        return Some(format!("its disk is {:?}", own.disk_state));
    }
    if is_primary && !partial && !has(DeviceFlags::CRASHED_PRIMARY) {
        return Some("it is Primary".into());
    }
    if (is_primary || is_led) && !has(DeviceFlags::PRIMARY_IND) {
        return Some("there is a Primary".into());
    }
    if generation.is_some_and(|g| g != superblock.current_uuid.0 & !1) {
        return Some("it has another generation".into());
    }
    let peers = snapshot.connections.iter();
    peers
        .map(|c| (c, c.peer_devices.iter().find(|p| p.volume == volume)))
        .find_map(|(c, p)| unsaid_of(c, p?, superblock))
}

fn unsaid_of(
    c: &ConnectionReport,
    p: &PeerDeviceReport,
    superblock: &SuperBlock,
) -> Option<String> {
    let flags = superblock.peer(c.peer).flags;
    let is_met = p.repl_state > ReplState::Off;
    let peer = name(usize::from(c.peer.0));
    // One that has not heard yet that this node's cache was lost stays noted, too.
    if is_met && !flags.contains(PeerFlags::CONNECTED) {
        return Some(format!("{peer} is here"));
    }
    let is_behind = matches!(p.disk_state, DiskState::Inconsistent | DiskState::Outdated);
    let counts = is_behind && !is_met;
    (flags.contains(PeerFlags::OUTDATED) != counts).then(|| {
        format!(
            "{peer} is{} known to be behind",
            if counts { "" } else { " not" }
        )
    })
}
