//! The node's order of resyncs over all its resources: `resync-after` and
//! `--max-parallel-resyncs` (semantics.md, 19.9).
//!
//! The core decides who waits; this collects what it has to know and tells each resource its part.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lockstep_core::command::{CommandError, ErrorCode};
use lockstep_core::resync_order::{OrderVerdict, OrderedVolume, makes_cycle, order};
use lockstep_core::state::{DiskState, ReplSets};
use lockstep_io::shard::ResourceId;

use crate::report::{DeviceReport, OptionTexts, ResourceReport};

/// A volume as a command needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ordered {
    pub(crate) resource: String,
    /// A resource that was made anew knows nothing of what its predecessor was told.
    pub(crate) id: (usize, ResourceId),
    pub(crate) volume: u16,
    /// Volumes towards new peers were told nothing.
    peers: Vec<u8>,
}

/// What the resources were told.
#[derive(Debug)]
pub(crate) struct ResyncOrder {
    max_parallel: usize,
    /// Some volume has an order.
    wanted: AtomicBool,
    turn: Mutex<()>,
    told: Mutex<BTreeMap<u32, (Ordered, OrderVerdict)>>,
}

impl ResyncOrder {
    /// `max_parallel` 0 is no limit.
    pub(crate) fn new(max_parallel: usize) -> ResyncOrder {
        ResyncOrder {
            max_parallel,
            wanted: AtomicBool::new(max_parallel > 0),
            turn: Mutex::default(),
            told: Mutex::default(),
        }
    }

    /// Anything is to be ordered on this node.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// To be held from looking at the volumes until all are told: what was seen first must not
    /// arrive last, or a resync would wait for good.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses `resync-after` options that cannot work; `follows` gives what is configured.
    pub(crate) fn check(
        &self,
        minor: u32,
        options: &OptionTexts,
        follows: impl Fn(u32) -> Option<u32>,
    ) -> Result<(), CommandError> {
        let Some(after) = resync_after(options) else {
            return Ok(());
        };
        if makes_cycle(minor, after, follows) {
            return Err(CommandError {
                code: ErrorCode::ERR_RESYNC_AFTER_CYCLE,
                text: format!(
                    "resync-after {after}: minor {minor} would wait for itself; change the \
                     resync-after of one of the volumes between them"
                ),
            });
        }
        self.wanted.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Which volumes have to be told what, by minor. What is returned counts as told.
    pub(crate) fn news(
        &self,
        volumes: BTreeMap<u32, (Ordered, OrderedVolume)>,
    ) -> Vec<(Ordered, OrderVerdict)> {
        let seen = volumes
            .iter()
            .map(|(minor, (_, seen))| (*minor, *seen))
            .collect();
        let verdicts = order(&seen, self.max_parallel);
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|minor, _| volumes.contains_key(minor));
        let mut news = Vec::new();
        for (minor, (volume, _)) in volumes {
            let verdict = verdicts.get(&minor).copied().unwrap_or_default();
            let new = (volume, verdict);
            let known = match told.get(&minor) {
                Some(known) => *known == new,
                None => verdict == OrderVerdict::default(),
            };
            if !known {
                news.push(new.clone());
                told.insert(minor, new);
            }
        }
        news
    }
}

/// The minor that goes first; none for -1.
pub(crate) fn resync_after(options: &OptionTexts) -> Option<u32> {
    options.get("resync-after")?.parse().ok()
}

/// What the order has to know of a volume.
pub(crate) fn seen(
    report: &ResourceReport,
    id: (usize, ResourceId),
    device: &DeviceReport,
    after: Option<u32>,
) -> (Ordered, OrderedVolume) {
    let towards = || {
        report
            .connections
            .iter()
            .flat_map(|c| &c.peer_devices)
            .filter(|p| p.volume == device.volume)
    };
    let has = |p: &crate::report::PeerDeviceReport, reason: &str| {
        p.resync_suspended.iter().any(|known| known == reason)
    };
    let volume = OrderedVolume {
        after,
        attached: device.disk_state > DiskState::Diskless,
        busy: towards().any(|p| p.repl_state.has_progress()),
        runs: towards().any(|p| p.repl_state.has_progress() && p.resync_suspended.is_empty()),
        paused: towards().any(|p| has(p, "user") || has(p, "peer")),
    };
    let ordered = Ordered {
        resource: report.name.clone(),
        id,
        volume: device.volume,
        peers: report.connections.iter().map(|c| c.peer_node_id).collect(),
    };
    (ordered, volume)
}
