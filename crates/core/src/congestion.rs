//! Ahead and Behind: what is done about a protocol A peer that does not keep up
//! (semantics.md, 17; wire.md, 7.9).
//!
//! A node that pulls ahead sends marks instead of writes, and is source of a resync when all that
//! it had sent before has arrived. The marks are as durable here as those of a lost connection:
//! the activity log names their extents until the bitmap is written. With a peer of DRBD 9 the
//! first write that is not sent waits for a new generation, so that nobody takes the peer for
//! current afterwards. 8.4 knows no generation that its peer does not follow; there it is made
//! when the connection is lost.

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState};

use crate::before_resync::ResyncGate;
use crate::options::{OnCongestion, Protocol};
use crate::report::Level;
use crate::resource::Resource;
use crate::state::{DeviceState, PeerDeviceState, ReplSets};
use crate::time::Duration;
use crate::timers::Timer;
use crate::transition::Change;

/// How long a connection has to be empty before the resync begins.
const QUIET: Duration = Duration::from_secs(1);
/// When to look again while an earlier resync is not through.
const RETRY: Duration = Duration::from_millis(100);

impl Resource {
    /// A write is about to be submitted: peers that do not keep up do not get it.
    pub(crate) fn relieve_congestion(&mut self, volume: VolumeNr) {
        if self.state.disk(volume) != DiskState::UpToDate {
            return;
        }
        let congested: Vec<(NodeId, OnCongestion, &str)> = self
            .connections
            .iter()
            .filter(|(_, conn)| conn.net.on_congestion != OnCongestion::Block)
            .filter_map(|(peer, conn)| {
                let why = self.congestion(volume, *peer)?;
                Some((*peer, conn.net.on_congestion, why))
            })
            .collect();
        for (peer, policy, why) in congested {
            match policy {
                OnCongestion::Block => {}
                OnCongestion::PullAhead => self.pull_ahead(volume, peer, why),
                OnCongestion::Disconnect => {
                    self.go_standalone(peer, format!("the connection is congested: {why}"));
                }
            }
        }
    }

    /// Why the connection is congested, as far as the next write of this volume is concerned.
    fn congestion(&self, volume: VolumeNr, peer: NodeId) -> Option<&'static str> {
        let conn = self.connections.get(&peer)?;
        let p = self.state.peer_device(volume, peer);
        let sent_sectors = conn.io.ap_in_flight_sectors;
        let knows = conn.protocol() >= crate::legacy::WITH_OUT_OF_SYNC;
        if !knows || conn.net.protocol != Protocol::A || sent_sectors == 0 || !may_pull_ahead(&p) {
            return None;
        }
        let in_flight_sectors = match conn.is_legacy() {
            // 8.4 counts writes only.
            true => sent_sectors,
            false => sent_sectors + conn.io.resync_in_flight_sectors,
        };
        let fill_sectors = conn.net.congestion_fill_sectors;
        let extents = self
            .devices
            .get(&volume)
            .and_then(|d| d.attached())
            .map_or(0, |disk| disk.io.al.referenced());
        if self.is_ahead(peer) {
            Some("another volume is Ahead")
        } else if fill_sectors > 0 && in_flight_sectors >= fill_sectors {
            Some("congestion-fill is reached")
        } else if conn.net.congestion_extents > 0 && extents >= conn.net.congestion_extents as usize
        {
            Some("congestion-extents is reached")
        } else {
            None
        }
    }

    fn pull_ahead(&mut self, volume: VolumeNr, peer: NodeId, why: &str) {
        self.log(Level::Info, Some(peer), Some(volume), why.into());
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.was_ahead = true;
        }
        let lockstep = self.is_lockstep(peer);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.behind_unheard = lockstep;
        }
        self.hard_change(Change::new().repl(volume, peer, ReplState::Ahead));
    }

    /// A target ended its resync before it heard that this node had pulled ahead, which may be source again when that
    /// comes: the end is none of the resync of now.
    pub(crate) fn ended_before_it_was_behind(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: ReplState,
    ) -> bool {
        let source = self.state.peer_device(volume, peer).repl.is_sync_source();
        let counts = planted!(self, OldEndCounts);
        let Some(pd) = self.peer_device_mut(volume, peer) else {
            return false;
        };
        pd.behind_unheard &= !matches!(theirs, ReplState::Behind | ReplState::WfBitmapT);
        pd.behind_unheard && source && theirs == ReplState::Established && !counts
    }

    /// What this node's state becomes by that of a peer that pulls ahead or ends it. An 8.4 peer
    /// ends it with the UUID of the resync.
    pub(crate) fn mirrored_congestion(
        &self,
        peer: NodeId,
        mine: ReplState,
        theirs: ReplState,
    ) -> Option<ReplState> {
        let follows = mine == ReplState::Established || mine.is_verify() || mine.is_sync_target();
        let follows = follows && (!mine.is_sync_target() || !planted!(self, TargetNotBehind));
        match theirs {
            ReplState::Ahead if follows => Some(ReplState::Behind),
            ReplState::SyncSource | ReplState::PausedSyncS
                if mine == ReplState::Behind && !self.is_legacy(peer) =>
            {
                Some(ReplState::SyncTarget)
            }
            _ => None,
        }
    }

    /// What was sent to the peer has arrived, maybe all of it.
    pub(crate) fn ahead_progress(&mut self, peer: NodeId) {
        let empty = self
            .connections
            .get(&peer)
            .is_some_and(|c| c.io.was_ahead && c.io.ap_in_flight_sectors == 0);
        if empty && self.is_ahead(peer) && !self.timers.is_set(Timer::AheadEnd(peer)) {
            let at = self.now + QUIET;
            self.timers.set(Timer::AheadEnd(peer), at);
        }
    }

    /// `Timer::AheadEnd`.
    pub(crate) fn ahead_end_timer(&mut self, peer: NodeId) {
        let in_flight = self
            .connections
            .get(&peer)
            .is_none_or(|c| c.io.ap_in_flight_sectors > 0);
        if in_flight && !planted!(self, AheadEndsEarly) {
            // The last answer starts the time again.
            return;
        }
        for volume in self.volumes_ahead(peer) {
            let busy = self
                .devices
                .get(&volume)
                .and_then(|d| d.peers.get(&peer))
                .is_some_and(|pd| pd.io.source_requests() > 0);
            if busy && planted!(self, AheadEndForgotten) {
                continue;
            }
            if busy {
                let at = self.now + RETRY;
                self.timers.set(Timer::AheadEnd(peer), at);
            } else {
                self.before_resync_source(volume, peer, ResyncGate::Ahead);
            }
        }
    }

    /// From here on writes are sent again; a resync brings what was marked.
    pub(crate) fn end_ahead(&mut self, volume: VolumeNr, peer: NodeId) {
        if !planted!(self, AheadMarksUntold) {
            self.tell_marks(volume, peer);
        }
        self.source_starts(volume, peer);
    }

    /// A resync of the peer is through: it has what it missed, unless it misses more.
    pub(crate) fn ahead_is_over(&mut self, peer: NodeId) {
        let misses = |d: &DeviceState| {
            let p = d.peers.get(&peer);
            p.is_some_and(|p| p.repl == ReplState::Ahead || p.repl.is_sync_source())
        };
        if !self.state.devices.values().any(misses)
            && let Some(conn) = self.connections.get_mut(&peer)
        {
            conn.io.was_ahead = false;
        }
    }

    /// The same where this node became current by others, which have also brought what the peer missed.
    pub(crate) fn ahead_is_settled(&mut self, peer: NodeId) {
        let good = DiskState::UpToDate;
        let equal = |(volume, d): (&VolumeNr, &DeviceState)| {
            let p = d.peers.get(&peer);
            let whole = p.is_none_or(|p| p.repl == ReplState::Established && p.disk == good);
            whole && d.disk == good && self.same_current(*volume, peer)
        };
        let was_ahead = self.connections.get(&peer).is_some_and(|c| c.io.was_ahead);
        if was_ahead && self.state.devices.iter().all(equal) {
            self.ahead_is_over(peer);
        }
    }

    /// A lost link on which the peer missed writes, whatever it acknowledged. Forgets it.
    pub(crate) fn was_ahead(&mut self, peer: NodeId) -> bool {
        let forgets = planted!(self, WasAheadForgotten);
        self.connections
            .get_mut(&peer)
            .is_some_and(|c| core::mem::take(&mut c.io.was_ahead) && !forgets)
    }

    /// The generation of the data is still that of a peer that misses some: this node must not
    /// stop being Primary, which would hide it.
    pub(crate) fn is_ahead_of_legacy(&self) -> bool {
        self.legacy_peer().is_some_and(|peer| self.is_ahead(peer))
    }

    fn is_ahead(&self, peer: NodeId) -> bool {
        self.state
            .devices
            .values()
            .filter_map(|d| d.peers.get(&peer))
            .any(|p| p.repl == ReplState::Ahead)
    }

    /// Peers that get none of this node's writes, because it is Ahead of them with every volume.
    pub(crate) fn left_behind(&self) -> NodeMask {
        let misses_all = |peer: &NodeId| {
            let mut devices = self.state.devices.values();
            devices.all(|d| {
                d.peers
                    .get(peer)
                    .is_some_and(|p| p.repl == ReplState::Ahead)
            })
        };
        let peers = self.connections.keys().copied();
        peers.filter(|peer| misses_all(peer)).collect()
    }

    fn volumes_ahead(&self, peer: NodeId) -> Vec<VolumeNr> {
        self.state
            .devices
            .iter()
            .filter(|(_, d)| {
                d.peers
                    .get(&peer)
                    .is_some_and(|p| p.repl == ReplState::Ahead)
            })
            .map(|(volume, _)| *volume)
            .collect()
    }
}

/// Writes are sent, and what the peer has is this node's, so that it can be its resync target.
fn may_pull_ahead(p: &PeerDeviceState) -> bool {
    let whole =
        p.disk == DiskState::UpToDate && (p.repl == ReplState::Established || p.repl.is_verify());
    p.replicates() && (whole || p.repl.is_sync_source())
}
