//! Which changes a peer is told of by this node's state (semantics.md, 5.2 point 8), and when.

use lockstep_format::wire::{DiskState, ReplState};

use crate::state::PeerDeviceState;

/// The peer has to be told (5.2 point 8).
pub(crate) fn wants_state(
    before: &PeerDeviceState,
    after: &PeerDeviceState,
    disk_before: DiskState,
    disk_after: DiskState,
) -> bool {
    let newly = before.repl < ReplState::Established;
    let changed_flags = pauses(before) != pauses(after);
    newly || before.repl != after.repl || changed_flags || disk_before != disk_after
}

/// Who pauses the resync here: the operator, its order, or another volume.
pub(crate) fn pauses(p: &PeerDeviceState) -> (bool, bool, bool) {
    let own = p.susp_dependency || p.susp_max_parallel;
    (p.susp_user, own, p.susp_other)
}

/// Something else comes first that a kernel has to hear before, or has to do by itself. One that is to be target
/// and is told anything before it is one takes a third node whose resync is paused for this one (19.2).
pub(crate) fn later(before: &PeerDeviceState, after: &PeerDeviceState) -> bool {
    crate::legacy::names_resync_first(before, after) || after.repl == ReplState::StartingSyncS
}

/// A kernel source takes the first state for the end of the resync, and does not look at its flags: it would show
/// for ever that the peer pauses resyncs. A kernel target repeats its state, too.
pub(crate) fn again(before: &PeerDeviceState, after: &PeerDeviceState) -> bool {
    (before.repl, after.repl) == (ReplState::PausedSyncT, ReplState::Established)
}
