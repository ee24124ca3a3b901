//! What a disk changes behind everybody's back: an online verify finds it, and the resync of the
//! next connect mends it.

use lockstep_core::command::Command;
use lockstep_core::state::ReplState;
use lockstep_format::units::VolumeNr;

use crate::cover;
use crate::drive::PATIENCE;
use crate::operator::Operator;
use crate::rng::{Rng, mixed};
use crate::swarm::{rest, wait_for};
use crate::world::{SECOND, World, id, name};

/// Blocks at a device's end among which some change.
const REACH: u64 = 200;

/// So many verifies may be cut short by a link that is lost under them.
const ATTEMPTS: usize = 4;

/// Two nodes are whole and at rest. One disk changes, a verify runs, the nodes part and meet.
pub(crate) fn is_found(w: &mut World, o: &mut Operator, seed: u64) {
    let mut rng = Rng::new(mixed(&[seed, 0x726f_7474_656e]));
    // Between two Secondaries only an operator can say whose data are right.
    let Some(primary) = o.primary.filter(|_| !o.is_changing()) else {
        return;
    };
    let mut changed = Vec::new();
    let mut from = Vec::new();
    for volume in 0..usize::from(w.config.volumes) {
        let devices = w.snapshot(primary).map(|s| s.devices).unwrap_or_default();
        let size = devices
            .iter()
            .find(|d| usize::from(d.volume.0) == volume)
            .map_or(0, |d| d.size_sectors / 8);
        let touched = w.history.touched(volume as u16);
        let node = rng.below(2) as usize;
        from.push(size.saturating_sub(REACH));
        for number in 0..3 {
            let block = match number {
                0 => size.saturating_sub(1),
                _ => from[volume] + rng.below(REACH.min(size)),
            };
            if touched.binary_search(&block).is_err() {
                w.trace(node, || {
                    format!("== block {block} of volume {volume} changes on its disk")
                });
                w.nodes[node].disks[volume].content[block as usize] = (1 << 52) + block;
                changed.push((volume, block));
            }
        }
    }
    let driver = rng.below(2) as usize;
    if !verify(w, o, driver, &from) {
        return;
    }
    for (volume, block) in &changed {
        let knows = |node: usize| cover::suspects(w, *volume, node, 1 - node, *block);
        let content = |node: usize| w.nodes[node].disks[*volume].content[*block as usize];
        // A verify that was cut short may have found it, and the next connect copied it.
        let copied = content(0) == content(1);
        if w.violation.is_none() && !knows(0) && !knows(1) && !copied {
            w.fail(format!(
                "a verify has ended, but neither node marks block {block} of volume {volume}, \
                 which differs"
            ));
        }
    }
    if w.violation.is_some() || !o.disconnect(w, driver, 1 - driver, false) {
        return;
    }
    wait_for(w, o, 60 * SECOND, "the nodes part", |w, _| {
        let linked = w.shares_link(0, 1) || !w.nodes[driver].commands.is_empty();
        linked.then(|| "they have not".into())
    });
    o.reconnect(w);
    let mut round = 0u64;
    wait_for(w, o, PATIENCE, "the difference is copied", |w, o| {
        round += 1;
        if round.is_multiple_of(50) {
            o.heal(w);
        }
        rest(w)
    });
    if w.violation.is_some() {
        return;
    }
    for (volume, block) in changed {
        let content = |node: usize| w.nodes[node].disks[volume].content[block as usize];
        let (a, b) = (content(0), content(1));
        if a != b {
            w.fail(format!(
                "block {block} of volume {volume} is {a} on A and {b} on B, although a verify has \
                 found it and the nodes have met again"
            ));
            return;
        }
    }
}

/// Verifies each volume from a block on, again where the link was lost under it; false if that failed.
fn verify(w: &mut World, o: &mut Operator, driver: usize, from: &[u64]) -> bool {
    for _ in 0..ATTEMPTS {
        let links = w.nodes[driver].links.clone();
        for (volume, first) in from.iter().enumerate() {
            let command = Command::Verify {
                peer: id(1 - driver),
                volume: VolumeNr(volume as u16),
                start: Some(first * 8),
                stop: None,
            };
            w.command(driver, command);
        }
        wait_for(w, o, 100 * SECOND, "a verify ends", |w, _| {
            let verifies = |node: usize| {
                let snapshot = w.snapshot(node)?;
                let mut devices = snapshot.connections.iter().flat_map(|c| &c.peer_devices);
                let runs = devices
                    .any(|p| matches!(p.repl_state, ReplState::VerifyS | ReplState::VerifyT));
                (runs || !w.nodes[node].commands.is_empty())
                    .then(|| format!("{} still verifies", name(node)))
            };
            (0..2).find_map(verifies)
        });
        if w.violation.is_some() {
            return false;
        }
        if w.nodes[driver].links == links && w.shares_link(0, 1) {
            return true;
        }
        w.trace(driver, || "== the verify was cut short".into());
        let mut round = 0u64;
        wait_for(w, o, PATIENCE, "the nodes meet after a verify", |w, o| {
            round += 1;
            if round.is_multiple_of(50) {
                o.heal(w);
            }
            rest(w)
        });
    }
    if w.violation.is_none() {
        w.fail(format!(
            "{ATTEMPTS} verifies were cut short, one after the other"
        ));
    }
    false
}
