//! The handlers that decide about a resync before it starts: `before-resync-target` and
//! `before-resync-source` (semantics.md, 11.5 and 19.2). With another exit code than 0, or 3 of the
//! source's, the connection is given up.
//!
//! The target's runs before this node answers the source's bitmap, so that nothing is written here
//! while it looks at the disk: a handler may make a snapshot of it. At the end of Behind and in a
//! full sync with a kernel the source does not wait for an answer; its writes come meanwhile.

use alloc::format;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState};

use crate::event::{LinkId, Output, Tag};
use crate::report::Level;
use crate::resource::{Pending, Resource};
use crate::time::Duration;
use crate::timers::Timer;
use crate::transition::Change;

const SOURCE: &str = "before-resync-source";
const TARGET: &str = "before-resync-target";
/// How long the source of a full sync waits for a kernel to say that it is target.
const TARGET_DELAY: Duration = Duration::from_secs(10);
/// The exit code that a source's handler may have besides 0.
const SOURCE_IGNORED: u8 = 3;

/// What a handler is asked about, and what happens when it agrees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResyncGate {
    /// The source's bitmap is here: this node's is sent, and it is target.
    Answer,
    /// Both bitmaps are one: this node is source.
    Exchanged,
    /// The end of Ahead: this node is source.
    Ahead,
    /// The end of Behind: this node is target.
    Behind,
    /// The 8.4 source told the UUID of the resync: this node is target.
    SyncUuid,
    /// A full sync without an exchange of bitmaps: this node is source.
    FullSync,
    /// The same: this node is target.
    FullTarget,
    /// Of a resync that has started already.
    Started,
}

impl Resource {
    /// A resync may start unless the handler says no. `name` is the handler's.
    fn ask_handler(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        name: &'static str,
        gate: ResyncGate,
    ) {
        let configured = self.options.handlers.iter().any(|h| h == name);
        let Some(link) = self.link(peer) else {
            return;
        };
        let Some(pd) = self.peer_device_mut(volume, peer) else {
            return;
        };
        if !configured {
            self.pass_gate(volume, peer, gate);
            return;
        }
        if let Some((asked, _)) = pd.resync_gate.as_mut() {
            // It runs, and its answer is that for this one, too.
            *asked = gate;
            return;
        }
        let tag = self.tags.insert(Pending::BeforeResync(volume, peer, link));
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.resync_gate = Some((gate, tag));
        }
        self.output(Output::Handler {
            tag,
            name,
            volume: Some(volume),
            peer: Some(peer),
        });
    }

    /// Asks the target's handler.
    pub(crate) fn before_resync_target(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        gate: ResyncGate,
    ) {
        self.ask_handler(volume, peer, TARGET, gate);
    }

    /// Asks the source's handler.
    pub(crate) fn before_resync_source(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        gate: ResyncGate,
    ) {
        self.ask_handler(volume, peer, SOURCE, gate);
    }

    /// A handler of this kind has ended.
    pub(crate) fn before_resync_ended(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        (link, tag): (LinkId, Tag),
        exit_code: u8,
    ) {
        if self.link(peer) != Some(link) {
            return;
        }
        // What it was asked about may be over, and another one may run for the next resync.
        let Some((gate, _)) = self
            .peer_device_mut(volume, peer)
            .and_then(|pd| pd.resync_gate.take_if(|(_, asked)| *asked == tag))
        else {
            return;
        };
        let repl = self.state.peer_device(volume, peer).repl;
        let source = matches!(
            gate,
            ResyncGate::Exchanged | ResyncGate::Ahead | ResyncGate::FullSync
        ) || repl == ReplState::SyncSource;
        let name = if source { SOURCE } else { TARGET };
        if exit_code == 0 || planted!(self, HandlerFailureIgnored) {
            self.pass_gate(volume, peer, gate);
        } else if source && exit_code == SOURCE_IGNORED {
            let text = format!("{name} ended with {exit_code}, which is ignored");
            self.log(Level::Info, Some(peer), Some(volume), text);
            self.pass_gate(volume, peer, gate);
        } else {
            let text = format!(
                "{name} ended with {exit_code}: the connection is given up; repair the handler \
                 and run `drbdadm connect`"
            );
            self.go_standalone(peer, text);
        }
    }

    /// The resync starts, if it is still wanted.
    fn pass_gate(&mut self, volume: VolumeNr, peer: NodeId, gate: ResyncGate) {
        let repl = self.state.peer_device(volume, peer).repl;
        match (gate, repl) {
            (ResyncGate::Answer, ReplState::WfBitmapT) => {
                let legacy = self.is_legacy(peer);
                if let Some(pd) = self.peer_device_mut(volume, peer) {
                    pd.resync_agreed = legacy;
                }
                self.answer_bitmap(volume, peer);
            }
            (ResyncGate::Exchanged, ReplState::WfBitmapS) => {
                self.bitmap_exchanged(volume, peer);
            }
            (ResyncGate::Ahead, ReplState::Ahead) => self.end_ahead(volume, peer),
            (ResyncGate::Behind | ResyncGate::SyncUuid, ReplState::Behind)
            | (ResyncGate::SyncUuid, ReplState::WfSyncUuid) => {
                self.hard_change(Change::new().repl(volume, peer, ReplState::SyncTarget));
            }
            (ResyncGate::FullSync, ReplState::StartingSyncS) => {
                if self.is_kernel(peer) && !self.is_told_target(volume, peer) {
                    // A kernel that hears of its source before it is target itself takes a third node,
                    // whose resync is paused for this one, and which knows of none (semantics.md, 19.2).
                    let at = self.now + TARGET_DELAY;
                    self.timers.set(Timer::ResyncStart(volume, peer), at);
                    return;
                }
                self.full_sync_starts(volume, peer);
            }
            (ResyncGate::FullTarget, ReplState::StartingSyncT) => {
                self.hard_change(Change::new().repl(volume, peer, ReplState::SyncTarget));
            }
            // Something else has happened to the resync meanwhile.
            _ => {}
        }
    }

    /// The peer's last state says that it is target.
    fn is_told_target(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let told = device
            .and_then(|d| d.peers.get(&peer))
            .and_then(|pd| pd.last_state);
        told.is_some_and(|state| {
            matches!(state.repl, ReplState::SyncTarget | ReplState::PausedSyncT)
        })
    }

    /// The peer has told its state: the source of a full sync may have waited for it.
    pub(crate) fn full_sync_target_told(&mut self, volume: VolumeNr, peer: NodeId) {
        let timer = Timer::ResyncStart(volume, peer);
        if self.timers.is_set(timer) && self.is_told_target(volume, peer) {
            self.timers.clear(timer);
            self.full_sync_starts(volume, peer);
        }
    }

    /// This node is source of a full sync without an exchange of bitmaps, if that is still wanted. It is the
    /// handler of `Timer::ResyncStart` as well: the target has not told that it is one.
    pub(crate) fn full_sync_starts(&mut self, volume: VolumeNr, peer: NodeId) {
        if self.state.peer_device(volume, peer).repl != ReplState::StartingSyncS {
            return;
        }
        self.source_starts(volume, peer);
    }

    /// This node is source from now on, without an exchange of bitmaps.
    pub(crate) fn source_starts(&mut self, volume: VolumeNr, peer: NodeId) {
        let change = Change::new()
            .repl(volume, peer, ReplState::SyncSource)
            .peer_disk(volume, peer, DiskState::Inconsistent);
        self.hard_change(change);
        if self.is_legacy(peer) {
            self.legacy_source_starts(volume, peer);
        }
    }
}
