//! A node's order of resyncs (`resync-after`, `max-parallel-resyncs`): the driver looks at all volumes after each
//! change and tells each of them whether it waits, as the daemon does. Whether they keep to it is
//! counted here without the core's order.

use std::collections::BTreeMap;

use lockstep_core::command::Command;
use lockstep_core::report::Snapshot;
use lockstep_core::resync_order::{OrderVerdict, OrderedVolume, order};
use lockstep_core::state::{DiskState, ReplSets};
use lockstep_format::units::VolumeNr;

use crate::operator::Operator;
use crate::sometimes;
use crate::world::{MAX_VOLUMES, SECOND, World, name};

/// The order of every node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turns {
    /// `resync-after`, by volume.
    pub after: [Option<u32>; MAX_VOLUMES],
    /// `max-parallel-resyncs`; 0 is no limit.
    pub max_parallel: usize,
}

/// What nodes were told, and since when one does not keep to it.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// By node and volume, with the node's life and the number of its peers, since a process that began anew
    /// and a new peer know nothing.
    verdicts: BTreeMap<(usize, u32), (u32, usize, OrderVerdict)>,
    wrong: BTreeMap<(usize, u32), u64>,
}

/// How long a node may take to do as it was told.
const PROMPT: u64 = SECOND / 10;

/// Tells the volumes of a node what has changed for them.
pub(crate) fn take(o: &mut Operator, w: &mut World) {
    let Some(turns) = o.settings.turns else {
        return;
    };
    for node in 0..w.nodes.len() {
        let Some(snapshot) = w.snapshot(node).filter(|_| o.is_up(node)) else {
            continue;
        };
        let volumes = seen(&turns, &snapshot);
        let (life, peers) = (w.nodes[node].life, snapshot.connections.len());
        for (volume, verdict) in order(&volumes, turns.max_parallel) {
            let new = (life, peers, verdict);
            let known = o.drivers.told.verdicts.insert((node, volume), new);
            let before = known.filter(|(l, p, _)| (*l, *p) == (life, peers));
            if before.map_or(OrderVerdict::default(), |(_, _, verdict)| verdict) != verdict {
                sometimes!(w.marks, verdict.dependency, "resync-waits-its-turn");
                sometimes!(w.marks, verdict.max_parallel, "resync-one-too-many");
                let volume = VolumeNr(volume as u16);
                w.command(node, Command::ResyncOrder { volume, verdict });
            }
        }
        if w.nodes[node].frozen_until <= w.now {
            keeps_to(o, w, node, &turns, &volumes);
        }
    }
}

fn seen(turns: &Turns, snapshot: &Snapshot) -> BTreeMap<u32, OrderedVolume> {
    let mut volumes = BTreeMap::new();
    for device in &snapshot.devices {
        let connections = snapshot.connections.iter();
        let towards: Vec<_> = connections
            .flat_map(|c| &c.peer_devices)
            .filter(|p| p.volume == device.volume)
            .collect();
        let busy = towards.iter().filter(|p| p.repl_state.has_progress());
        let paused = |reason: &&str| ["user", "peer"].contains(reason);
        let volume = OrderedVolume {
            after: turns.after[usize::from(device.volume.0)],
            attached: device.disk_state > DiskState::Diskless,
            busy: busy.clone().count() > 0,
            runs: busy.clone().any(|p| p.resync_suspended.is_empty()),
            paused: towards
                .iter()
                .any(|p| p.resync_suspended.iter().any(paused)),
        };
        volumes.insert(u32::from(device.volume.0), volume);
    }
    volumes
}

/// No resync runs whose turn it is not.
fn keeps_to(
    o: &mut Operator,
    w: &mut World,
    node: usize,
    turns: &Turns,
    volumes: &BTreeMap<u32, OrderedVolume>,
) {
    let running = volumes.values().filter(|v| v.runs).count();
    let too_many = turns.max_parallel > 0 && running > turns.max_parallel;
    for (volume, of) in volumes {
        let mut first = of.after;
        let mut waits = false;
        for before in std::iter::from_fn(|| {
            let before = volumes.get(&first?)?;
            first = before.after;
            Some(before).filter(|b| b.attached)
        }) {
            waits |= before.busy;
        }
        if !of.runs || !waits && !too_many {
            o.drivers.told.wrong.remove(&(node, *volume));
            continue;
        }
        let since = *o.drivers.told.wrong.entry((node, *volume)).or_insert(w.now);
        if w.now >= since + PROMPT {
            let reason = match waits {
                true => "one that goes first is not over".to_owned(),
                false => format!("max-parallel-resyncs is {}", turns.max_parallel),
            };
            w.fail(format!(
                "{} resyncs volume {volume} beside {} others, and {reason}",
                name(node),
                running - 1
            ));
            return;
        }
    }
}
