//! Which resyncs of a node wait for others: `resync-after` and `max-parallel-resyncs`
//! (semantics.md, 19.9).
//!
//! The order is the node's, over all its resources; so the driver asks [`order`] with what all of
//! them report, and gives each resource its part as `Command::ResyncOrder`.

use alloc::collections::BTreeMap;
use alloc::format;

use lockstep_format::units::VolumeNr;

use crate::admin::no_volume;
use crate::command::{Answer, CommandError, ErrorCode};
use crate::resource::Resource;
use crate::state::PeerDeviceState;
use crate::transition::Change;

/// What the order needs to know of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OrderedVolume {
    /// `resync-after`: the minor that goes first.
    pub after: Option<u32>,
    /// It has a disk.
    pub attached: bool,
    /// A resync or verify with some peer, also a paused one.
    pub busy: bool,
    /// Some resync or verify is not paused.
    pub runs: bool,
    /// Paused by the operator here or by a peer.
    pub paused: bool,
}

/// Why a volume's resyncs wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OrderVerdict {
    /// A volume before it in its chain resyncs or is paused.
    pub dependency: bool,
    /// So many resync already.
    pub max_parallel: bool,
}

/// Who waits. `volumes` by minor; `max_parallel` 0 is no limit.
pub fn order(
    volumes: &BTreeMap<u32, OrderedVolume>,
    max_parallel: usize,
) -> BTreeMap<u32, OrderVerdict> {
    let mut verdicts: BTreeMap<u32, OrderVerdict> = volumes
        .iter()
        .map(|(minor, volume)| {
            let verdict = OrderVerdict {
                dependency: waits_for_another(volumes, volume),
                max_parallel: false,
            };
            (*minor, verdict)
        })
        .collect();
    if max_parallel > 0 {
        let candidate = |minor: &&u32| {
            let volume = volumes[*minor];
            // Paused with one peer, it may run with another.
            let counts = volume.runs || volume.busy && !volume.paused;
            counts && !verdicts[*minor].dependency
        };
        let (mut first, mut rest): (alloc::vec::Vec<u32>, alloc::vec::Vec<u32>) = volumes
            .keys()
            .filter(candidate)
            .partition(|minor| volumes[minor].runs);
        first.append(&mut rest);
        first.truncate(max_parallel);
        // What a peer has paused waits here, too, if there is no room: else both nodes would let it go at once, and it
        // would be one too many on both.
        let is_full = first.len() == max_parallel;
        let waits = |minor: &&u32| is_full && volumes[*minor].busy && !first.contains(*minor);
        for minor in volumes.keys().filter(waits) {
            verdicts.entry(*minor).or_default().max_parallel = true;
        }
    }
    verdicts
}

/// Whether a volume would wait for itself if it came after `after`.
pub fn makes_cycle(minor: u32, after: u32, follows: impl Fn(u32) -> Option<u32>) -> bool {
    let mut seen = alloc::collections::BTreeSet::from([minor]);
    let mut next = Some(after);
    while let Some(minor) = next {
        if !seen.insert(minor) {
            return true;
        }
        next = follows(minor);
    }
    false
}

/// A volume without disk, or one that does not exist, ends the chain.
fn waits_for_another(volumes: &BTreeMap<u32, OrderedVolume>, volume: &OrderedVolume) -> bool {
    let mut next = volume.after;
    // Cycles are refused when options are given; this bound is for what came by other ways.
    for _ in 0..volumes.len() {
        let Some(before) = next.and_then(|minor| volumes.get(&minor)) else {
            return false;
        };
        if !before.attached {
            return false;
        }
        if before.busy || before.paused {
            return true;
        }
        next = before.after;
    }
    false
}

impl Resource {
    /// The node's order has changed for a volume.
    pub(crate) fn resync_order(
        &mut self,
        volume: VolumeNr,
        verdict: OrderVerdict,
    ) -> Result<Answer, CommandError> {
        let Some(device) = self.state.devices.get(&volume) else {
            return Err(no_volume(volume));
        };
        let mut change = Change::new();
        for (peer, p) in &device.peers {
            let kept = p.susp_dependency && planted!(self, OrderNeverEnds);
            change = change
                .pause_dependency(
                    volume,
                    *peer,
                    (verdict.dependency || kept) && !planted!(self, ResyncAfterIgnored),
                )
                .pause_max_parallel(volume, *peer, verdict.max_parallel);
        }
        self.hard_change(change);
        Ok(Answer::Done)
    }
}

/// Why `resume-sync` cannot resume what nobody here has paused.
pub(crate) fn resume_refusal(p: &PeerDeviceState) -> CommandError {
    let text = "the sync-pause flag is not set";
    let (code, text) = if p.susp_dependency {
        let note = "the pause is caused by resync-after here";
        (ErrorCode::ERR_PIC_AFTER_DEP, format!("{text}; {note}"))
    } else if p.susp_peer {
        let note = "the pause is caused by the peer";
        (ErrorCode::ERR_PIC_PEER_DEP, format!("{text}; {note}"))
    } else {
        (ErrorCode::ERR_PAUSE_IS_CLEAR, text.into())
    };
    CommandError { code, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(after: Option<u32>, busy: bool) -> OrderedVolume {
        OrderedVolume {
            after,
            attached: true,
            busy,
            runs: busy,
            paused: false,
        }
    }

    fn waits(volumes: &[(u32, OrderedVolume)], max_parallel: usize) -> alloc::vec::Vec<u32> {
        let volumes = volumes.iter().copied().collect();
        order(&volumes, max_parallel)
            .iter()
            .filter(|(_, v)| v.dependency || v.max_parallel)
            .map(|(minor, _)| *minor)
            .collect()
    }

    #[test]
    fn whoever_comes_after_waits_through_idle_links_of_the_chain() {
        let chain = |first: bool, second: bool| {
            [
                (1, volume(None, first)),
                (2, volume(Some(1), second)),
                (3, volume(Some(2), true)),
            ]
        };
        assert_eq!(waits(&chain(true, false), 0), [2, 3]);
        assert_eq!(waits(&chain(false, true), 0), [3]);
        assert_eq!(waits(&chain(false, false), 0), [0; 0]);
    }

    #[test]
    fn a_paused_volume_holds_the_others_and_a_missing_one_ends_the_chain() {
        let mut volumes = [
            (1, volume(None, false)),
            (2, volume(Some(1), false)),
            (3, volume(Some(2), true)),
        ];
        volumes[0].1.paused = true;
        assert_eq!(waits(&volumes, 0), [2, 3]);
        volumes[1].1.attached = false;
        assert_eq!(waits(&volumes, 0), [2]);
        assert_eq!(waits(&volumes[2..], 0), [0; 0]);
    }

    #[test]
    fn free_slots_go_to_those_that_run() {
        let mut volumes = [
            (1, volume(None, true)),
            (2, volume(None, true)),
            (3, volume(None, true)),
        ];
        assert_eq!(waits(&volumes, 2), [3]);
        volumes[0].1.runs = false;
        assert_eq!(waits(&volumes, 2), [1]);
        volumes[1].1.paused = true;
        assert_eq!(
            waits(&volumes, 2),
            [1],
            "the second one runs with another peer"
        );
        volumes[1].1.runs = false;
        assert_eq!(waits(&volumes, 2), [2], "the peer's pause is no room");
        assert_eq!(waits(&volumes, 3), [0; 0]);
        assert_eq!(waits(&volumes, 1), [1, 2]);
        assert_eq!(waits(&volumes, 0), [0; 0]);
    }

    #[test]
    fn a_chain_that_comes_back_is_a_cycle() {
        let follows = |minor| match minor {
            2 => Some(1),
            3 => Some(2),
            _ => None,
        };
        assert!(makes_cycle(1, 3, follows));
        assert!(makes_cycle(4, 4, follows));
        assert!(!makes_cycle(4, 3, follows));
        assert!(!makes_cycle(1, 7, follows));
    }
}
