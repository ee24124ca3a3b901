//! What a target of this node's resync lacks for certain.
//!
//! A resync ends at its target, and the source hears of it later. If the link breaks in between, the
//! peer is UpToDate and may be promoted, or have a vote, while the source has it down as
//! Inconsistent. So the source keeps a lower bound of the blocks that its target still has marked:
//! those of the exchanged bitmap, without every block that anything was sent for since. Only while
//! that is more than zero is a peer whose link is lost known to be Inconsistent.

use lockstep_format::units::{NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState};

use crate::resource::Resource;
use crate::state::{ReplSets, State};

impl Resource {
    /// The bitmap goes to the target: all that it names is marked there before a resync begins.
    pub(crate) fn owe_bitmap(&mut self, volume: VolumeNr, peer: NodeId) {
        let marked = self.out_of_sync_blocks(volume, peer);
        if let Some(io) = self.peer_io(volume, peer) {
            io.owed_blocks = marked;
        }
    }

    /// The target named blocks in its bitmap that this node had not marked.
    pub(crate) fn owe_more(&mut self, volume: VolumeNr, peer: NodeId, blocks: u64) {
        if let Some(io) = self.peer_io(volume, peer) {
            io.owed_blocks += blocks;
        }
    }

    /// Something is sent to the peer, by which it may clear its marks of the range.
    pub(crate) fn owe_less(&mut self, volume: VolumeNr, peer: NodeId, sector: Sector, size: u32) {
        if self
            .peer_io(volume, peer)
            .is_none_or(|io| io.owed_blocks == 0)
        {
            return;
        }
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let Some(slot) = io.slot(peer) else { return };
        let marked = io.bitmap.count_touched(slot, sector, size);
        self.no_longer_owed(volume, peer, marked);
    }

    /// A write of `sender` is here, and perhaps with the targets of this node as well.
    pub(crate) fn owe_less_to_others(
        &mut self,
        volume: VolumeNr,
        sender: NodeId,
        sector: Sector,
        size: u32,
    ) {
        let targets: NodeMask = self.devices.get(&volume).map_or(NodeMask::EMPTY, |d| {
            let owed = d.peers.iter().filter(|(_, pd)| pd.io.owed_blocks > 0);
            owed.map(|(node, _)| *node).collect()
        });
        if planted!(self, OwedOfOthersKept) {
            return;
        }
        for node in targets.without(sender).iter() {
            self.owe_less(volume, node, sector, size);
        }
    }

    /// So many blocks of those that were owed are the peer's by now, or may be.
    pub(crate) fn no_longer_owed(&mut self, volume: VolumeNr, peer: NodeId, blocks: u64) {
        if planted!(self, OwedForEver) {
            return;
        }
        if let Some(io) = self.peer_io(volume, peer) {
            io.owed_blocks = io.owed_blocks.saturating_sub(blocks);
        }
    }

    /// A resync as source is over, or another source serves the target: what it lacks is not known.
    pub(crate) fn forget_owed(&mut self, volume: VolumeNr, old: &State, new: &State) {
        let Some(device) = new.devices.get(&volume) else {
            return;
        };
        for (peer, p) in &device.peers {
            let before = old.peer_device(volume, *peer).repl;
            let over = before > ReplState::Established && p.repl <= ReplState::Established;
            let served = p.repl == ReplState::PausedSyncS
                && p.susp_peer
                && has_another_source(volume, *peer, new);
            if before != p.repl
                && p.repl == ReplState::WfBitmapS
                && !planted!(self, ExchangeAcksKept)
                && let Some(io) = self.peer_io(volume, *peer)
            {
                io.acked_in_exchange.clear();
            }
            if (over || served)
                && let Some(io) = self.peer_io(volume, *peer)
            {
                io.owed_blocks = 0;
            }
        }
    }

    /// The peer was Inconsistent when it was last heard of, and may have become UpToDate since: its
    /// resync had nothing to wait for but what was on its way, or another node may be its source.
    pub(crate) fn may_have_caught_up(&self, volume: VolumeNr, peer: NodeId, old: &State) -> bool {
        let repl = old.peer_device(volume, peer).repl;
        if repl.is_sync_source() || matches!(repl, ReplState::WfBitmapS | ReplState::Ahead) {
            return self
                .devices
                .get(&volume)
                .and_then(|d| d.peers.get(&peer))
                .is_none_or(|pd| pd.io.owed_blocks == 0);
        }
        has_another_source(volume, peer, old)
    }
}

/// A third node has data that the peer could get from it.
fn has_another_source(volume: VolumeNr, peer: NodeId, state: &State) -> bool {
    state.devices.get(&volume).is_some_and(|d| {
        d.peers.iter().any(|(node, p)| {
            *node != peer && p.repl > ReplState::Off && p.disk >= DiskState::Consistent
        })
    })
}
