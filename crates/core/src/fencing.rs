//! Fencing (semantics.md, 11.5): the `fence-peer` handler is asked to keep a lost peer from serving
//! its data, and `unfence-peer` is called when the peer has caught up.
//!
//! A handler runs outside and may take as long as it likes; nothing here waits for it but what the
//! policy freezes: with `resource-and-stonith` the requests of a Primary, and always a promotion
//! that needs the peer fenced.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::NodeId;
use lockstep_format::wire::{ConnState, DiskState, ReplState, Role};

use crate::event::Output;
use crate::options::Fencing;
use crate::report::Level;
use crate::resource::{Pending, Resource};
use crate::state::State;
use crate::transition::Change;

/// The handler's name.
const FENCE: &str = "fence-peer";
/// The handler that undoes it.
const UNFENCE: &str = "unfence-peer";

/// What is known of fencing a peer since its connection was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fence {
    /// The handler runs.
    Runs,
    /// It runs, but the peer has been connected meanwhile: what it says does not count.
    Outlived,
    /// It ended with this code while a handshake with the peer is under way.
    Ended(u8),
    /// Its verdict: whether the peer is fenced.
    Done(bool),
}

/// Fencing of all peers; peers that were not lost are not in it.
#[derive(Debug, Default)]
pub(crate) struct Fences {
    peers: BTreeMap<NodeId, Fence>,
}

impl Resource {
    /// What follows for fencing from a state change.
    pub(crate) fn after_fencing(&mut self, old: &State, new: &State) {
        self.thaw_fenced(new);
        self.fence_when_whole(old, new);
        for (peer, c) in &new.connections {
            let before = old.conn(*peer);
            if before < ConnState::Connected && c.conn == ConnState::Connected {
                self.fence_outlived(*peer);
            }
            let lost = before == ConnState::Connected && c.conn < ConnState::Connected;
            if lost
                && new.role == Role::Primary
                && self.fencing_of(*peer) != Fencing::DontCare
                && highest_disk(new, *peer) >= DiskState::DUnknown
            {
                self.fence_peer(*peer);
            }
            if self.fencing_of(*peer) != Fencing::DontCare
                && all_up_to_date(new, *peer)
                && !all_up_to_date(old, *peer)
            {
                self.run_handler(UNFENCE, None, Some(*peer));
            }
        }
    }

    /// Frozen for fencing no longer (semantics.md, 11.5): the peer is connected again, or nobody writes
    /// here. That it is known to be outdated is a step of its own before, see `thaw_fenced`.
    pub(crate) fn sanitize_fencing(&self, new: &mut State) {
        let role = new.role;
        let frozen: Vec<NodeId> = new
            .connections
            .iter()
            .filter(|(_, c)| c.susp_fen)
            .map(|(peer, _)| *peer)
            .collect();
        for peer in frozen {
            let mut volumes = new.devices.keys().map(|v| new.peer_device(*v, peer));
            let connected = volumes.all(|p| p.repl >= ReplState::Established);
            if let Some(c) = new.connections.get_mut(&peer)
                && (connected || role != Role::Primary)
            {
                c.susp_fen = false;
            }
        }
    }

    /// The peer is known to be outdated: who watches sees that first, and then that I/O goes on, as with a
    /// kernel.
    fn thaw_fenced(&mut self, new: &State) {
        let frozen = new.connections.iter().filter(|(_, c)| c.susp_fen);
        let settled = |peer: &NodeId| {
            let mut volumes = new.devices.keys().map(|v| new.peer_device(*v, *peer));
            volumes.all(|p| p.repl >= ReplState::Established || p.disk <= DiskState::Outdated)
        };
        let thawed: Vec<NodeId> = frozen.map(|(peer, _)| *peer).filter(settled).collect();
        for peer in thawed {
            self.hard_change(Change::new().susp_fen(peer, false));
        }
    }

    /// A Primary that is frozen has good data now, and may ask what it was not to ask before.
    fn fence_when_whole(&mut self, old: &State, new: &State) {
        let best = |state: &State| state.devices.values().map(|d| d.disk).max();
        let whole = |state: &State| best(state) >= Some(DiskState::Consistent);
        if whole(old) || !whole(new) {
            return;
        }
        let frozen = new.connections.iter().filter(|(_, c)| c.susp_fen);
        let frozen: Vec<NodeId> = frozen.map(|(peer, _)| *peer).collect();
        for peer in frozen {
            self.fence_peer(peer);
        }
    }

    /// A `fence-peer` handler has ended.
    pub(crate) fn fence_ended(&mut self, peer: NodeId, exit_code: u8) {
        match self.fences.peers.get(&peer) {
            Some(Fence::Runs) => {
                self.fences.peers.insert(peer, Fence::Ended(exit_code));
                self.settle_fencing();
            }
            Some(Fence::Outlived) => {
                self.fences.peers.remove(&peer);
                let text = format!(
                    "{FENCE} ended with {exit_code}, which is ignored: the peer has been \
                     connected since it was called"
                );
                self.log(Level::Info, Some(peer), None, text);
            }
            Some(Fence::Ended(_) | Fence::Done(_)) | None => {}
        }
    }

    /// Looks at answers that had to wait for the end of a handshake.
    pub(crate) fn settle_fencing(&mut self) {
        let ended: Vec<(NodeId, u8)> = self
            .fences
            .peers
            .iter()
            .filter_map(|(peer, fence)| match fence {
                Fence::Ended(code) => Some((*peer, *code)),
                Fence::Runs | Fence::Outlived | Fence::Done(_) => None,
            })
            .collect();
        for (peer, code) in ended {
            // A handshake that succeeds makes the answer void, one that fails leaves it valid.
            if self.link(peer).is_none() {
                self.fence_verdict(peer, code);
            }
        }
    }

    /// A promotion that was refused may go when these peers are fenced: calls their handlers.
    /// False if there is none to call that was not called before.
    pub(crate) fn fence_for_promotion(&mut self) -> bool {
        let peers: Vec<NodeId> = self
            .unfenced_peers()
            .into_iter()
            .filter(|peer| self.fencing_of(*peer) != Fencing::DontCare)
            .filter(|peer| !matches!(self.fences.peers.get(peer), Some(Fence::Done(_))))
            .collect();
        for peer in &peers {
            self.fence_peer(*peer);
        }
        !peers.is_empty()
    }

    /// Own disks that only want the word that no lost peer has newer data.
    pub(crate) fn only_fencing_is_missing(&self) -> bool {
        let disks = || self.state.devices.values().map(|d| d.disk);
        disks().all(|disk| disk >= DiskState::Consistent && disk != DiskState::DUnknown)
            && disks().any(|disk| disk == DiskState::Consistent)
            && self
                .unfenced_peers()
                .iter()
                .all(|peer| self.fencing_of(*peer) != Fencing::DontCare)
    }

    /// A handler is still asked.
    pub(crate) fn is_fencing(&self) -> bool {
        let asked = |fence: &Fence| matches!(fence, Fence::Runs | Fence::Ended(_));
        self.fences.peers.values().any(asked)
    }

    /// Every peer that is not connected is known to be outdated.
    pub(crate) fn all_are_fenced(&self) -> bool {
        self.unfenced_peers()
            .iter()
            .all(|peer| self.fences.peers.get(peer) == Some(&Fence::Done(true)))
    }

    /// An operator promotes: handlers that failed are asked again.
    pub(crate) fn forget_failed_fences(&mut self) {
        self.fences
            .peers
            .retain(|_, fence| *fence != Fence::Done(false));
    }

    /// The peer is a peer no more.
    pub(crate) fn forget_fence(&mut self, peer: NodeId) {
        self.fences.peers.remove(&peer);
    }

    fn unfenced_peers(&self) -> Vec<NodeId> {
        let lost = |peer: &NodeId| {
            self.state.conn(*peer) < ConnState::Connected
                && highest_disk(&self.state, *peer) > DiskState::Outdated
        };
        self.connections.keys().copied().filter(lost).collect()
    }

    /// While the peer may be Primary too and is lost, nothing is completed here before a handler has
    /// seen to it.
    pub(crate) fn freezes_for(&self, peer: NodeId) -> bool {
        self.fencing_of(peer) == Fencing::ResourceAndStonith
            && self.options.handlers.iter().any(|name| name == FENCE)
    }

    pub(crate) fn fencing_of(&self, peer: NodeId) -> Fencing {
        self.connections
            .get(&peer)
            .map_or(Fencing::DontCare, |c| c.net.fencing)
    }

    fn fence_peer(&mut self, peer: NodeId) {
        if matches!(
            self.fences.peers.get(&peer),
            Some(Fence::Runs | Fence::Ended(_))
        ) {
            return;
        }
        let best = self.best_disk();
        let client = self.devices.values().all(|d| d.intentional_diskless);
        if best < DiskState::Consistent && !client {
            // Whoever has no good data must not outdate those of others.
            let text = format!("{FENCE} is not called: the disk here is only {best:?}");
            self.log(Level::Warn, Some(peer), None, text);
            self.fences.peers.insert(peer, Fence::Done(false));
            if self.both_may_write(peer) && self.established_peers().count() > 0 {
                // It may be Primary as well. Others have good data, and would take from both what neither
                // gets from the other.
                return;
            }
            self.hard_change(Change::new().susp_fen(peer, false));
            return;
        }
        if !self.options.handlers.iter().any(|name| name == FENCE) {
            // Handlers are switched off on this node: nothing is frozen for them.
            self.fences.peers.insert(peer, Fence::Done(true));
            self.hard_change(Change::new().susp_fen(peer, false));
            return;
        }
        self.fences.peers.insert(peer, Fence::Runs);
        let tag = self.tags.insert(Pending::Fence(peer));
        self.output(Output::Handler {
            tag,
            name: FENCE,
            volume: None,
            peer: Some(peer),
        });
    }

    fn fence_outlived(&mut self, peer: NodeId) {
        match self.fences.peers.get(&peer) {
            Some(Fence::Runs) if planted!(self, OutlivedFenceCounts) => {}
            Some(Fence::Runs) => {
                self.fences.peers.insert(peer, Fence::Outlived);
            }
            Some(Fence::Ended(_) | Fence::Done(_)) => {
                self.fences.peers.remove(&peer);
            }
            Some(Fence::Outlived) | None => {}
        }
    }

    fn fence_verdict(&mut self, peer: NodeId, exit_code: u8) {
        let at_most = match exit_code {
            3 => Some(DiskState::Inconsistent),
            4 | 7 => Some(DiskState::Outdated),
            5 if self.best_disk() == DiskState::UpToDate => Some(DiskState::Outdated),
            _ if planted!(self, BrokenFenceCounts) => Some(DiskState::Outdated),
            _ => None,
        };
        let meaning = match exit_code {
            3 => "the peer's disk is Inconsistent",
            4 => "the peer is outdated",
            5 => "the peer cannot be reached",
            6 => "the peer is Primary",
            7 => "the peer was shot",
            _ => "the handler is broken: 3 to 7 is expected; nothing is known of the peer",
        };
        let level = match exit_code {
            3..=5 => Level::Info,
            7 if self.fencing_of(peer) == Fencing::ResourceAndStonith => Level::Info,
            7 => Level::Warn,
            _ => Level::Error,
        };
        let text = format!("{FENCE} ended with {exit_code}: {meaning}");
        self.log(level, Some(peer), None, text);
        if let Some(at_most) = at_most {
            let mut change = Change::new();
            for (volume, device) in &self.state.devices {
                if let Some(p) = device.peers.get(&peer)
                    && p.disk > at_most
                {
                    change = change.peer_disk(*volume, peer, at_most);
                }
            }
            self.hard_change(change);
        }
        if exit_code == 6 {
            let mut change = Change::new().lower_disks(DiskState::Outdated);
            change.ignore_impossible_outdate = true;
            if let Err(refusal) = self.soft_change(change) {
                let text = format!("the disks here cannot be outdated: {}", refusal.text);
                self.log(Level::Error, Some(peer), None, text);
            }
        }
        let fenced = highest_disk(&self.state, peer) <= DiskState::Outdated;
        self.fences.peers.insert(peer, Fence::Done(fenced));
        if fenced && self.state.role == Role::Primary {
            self.want_new_uuid_now();
        }
    }

    fn best_disk(&self) -> DiskState {
        let disks = self.state.devices.values().map(|d| d.disk);
        disks.max().unwrap_or(DiskState::Diskless)
    }
}

/// The best that a peer's disks may be.
fn highest_disk(state: &State, peer: NodeId) -> DiskState {
    let disks = state
        .devices
        .keys()
        .map(|v| state.peer_device(*v, peer).disk);
    disks.max().unwrap_or(DiskState::Diskless)
}

/// The own and the peer's disks of all volumes are UpToDate.
fn all_up_to_date(state: &State, peer: NodeId) -> bool {
    !state.devices.is_empty()
        && state.devices.iter().all(|(volume, d)| {
            let p = state.peer_device(*volume, peer);
            d.disk == DiskState::UpToDate
                && p.disk == DiskState::UpToDate
                && p.repl >= ReplState::Established
        })
}
