//! Kernels that are to be the source of a full sync and do not know it (semantics.md, 19.2).
//!
//! Who is invalidated asks one peer for a full sync, and is PausedSyncT towards the others at once. A node of this
//! project sees that; a kernel is Established and knows of nothing. When the chosen source is lost, such a kernel is
//! asked for a resync by bitmap: as a source that knows its part it says who is in sync with whom, and without that word
//! all blocks would stay marked towards the lost source.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState, Role};

use crate::resource::Resource;
use crate::state::{PeerDeviceState, ReplSets};
use crate::transition::Change;
use crate::twopc::{Wish, WishKind};

/// From here on a resync by bitmap can be asked for.
const WITH_BITMAP_RESYNC: u32 = 120;

/// How far it has come with a kernel that does not know its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unasked {
    /// It was not asked yet.
    Waits,
    /// It has refused: it is used as it is.
    Refused,
}

impl Resource {
    /// This node is a target of the peer, a kernel that does not know it, and asks before it goes on with that one.
    pub(crate) fn is_unasked(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let pd = self.devices.get(&volume).and_then(|d| d.peers.get(&peer));
        let waits = pd.is_some_and(|pd| pd.unasked == Some(Unasked::Waits));
        waits && self.is_kernel(peer) && !self.knows_its_part(volume, peer)
    }

    /// The replication state towards a peer has changed.
    pub(crate) fn note_unasked(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        before: ReplState,
        after: ReplState,
    ) {
        let silent = before == ReplState::Established && after.is_sync_target();
        let can_be_asked = self.is_kernel(peer) && self.spoken(peer) >= WITH_BITMAP_RESYNC;
        let unasked = match (silent && can_be_asked, after.is_sync_target()) {
            (true, _) => Some(Unasked::Waits),
            (false, false) => None,
            (false, true) => return,
        };
        self.unasked |= unasked.is_some();
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.unasked = unasked;
        }
    }

    /// The chosen source is lost, and nobody else that knows of a resync is left: another one is asked. Called after
    /// each input.
    pub(crate) fn settle_unasked(&mut self) {
        if !self.unasked {
            return;
        }
        let mut peers = self.devices.values().flat_map(|d| d.peers.values());
        self.unasked = peers.any(|pd| pd.unasked == Some(Unasked::Waits));
        let mut due = Vec::new();
        for (volume, device) in &self.state.devices {
            let is_source = |p: &PeerDeviceState| {
                let starts = matches!(p.repl, ReplState::StartingSyncT | ReplState::WfBitmapT);
                starts || p.repl == ReplState::SyncTarget || p.resync_active
            };
            if device.peers.values().any(is_source) {
                continue;
            }
            let waits = |(peer, p): &(&NodeId, &PeerDeviceState)| {
                p.repl == ReplState::PausedSyncT
                    && p.disk == DiskState::UpToDate
                    && !p.resync_suspended(device.disk)
                    && self.is_unasked(*volume, **peer)
            };
            let primary = |peer: &NodeId| self.peer_role(*peer) == Role::Primary;
            let peers = device.peers.iter().filter(waits).map(|(peer, _)| *peer);
            if let Some(peer) = peers.max_by_key(primary) {
                due.push((*volume, peer));
            }
        }
        for (volume, peer) in due {
            let of_volume = |kind: &WishKind| matches!(kind, WishKind::Resync { volume: v, .. } if *v == volume);
            if !self.wants(of_volume) {
                let repl = ReplState::WfBitmapT;
                self.wish(WishKind::Resync { volume, peer, repl }, None);
            }
        }
    }

    /// A kernel was asked for a resync by bitmap.
    pub(crate) fn source_answered(&mut self, wish: &Wish, agrees: bool) {
        let (WishKind::Resync { volume, peer, .. }, None) = (&wish.kind, wish.command) else {
            return;
        };
        if !agrees && self.is_unasked(*volume, *peer) {
            if let Some(pd) = self.peer_device_mut(*volume, *peer) {
                pd.unasked = Some(Unasked::Refused);
            }
            // It becomes the source all the same.
            self.hard_change(Change::new());
        }
    }
}
