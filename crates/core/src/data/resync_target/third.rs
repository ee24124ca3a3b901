//! Marks towards third nodes that are away, before a resync begins.
//!
//! What a target is given replaces blocks that such a node may have as they were. If this node
//! loses its power, and the source is gone for good, only its own marks can tell the third one;
//! so they are durable before the first block is written, not only before the source may forget
//! it. A third node that is connected hears of the resync itself.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState};

use crate::data::BitmapThen;
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::timers::Timer;

impl Resource {
    /// Marks what a resync from `peer` will copy towards whoever is away; requests wait until
    /// that is durable.
    pub(super) fn mark_third_nodes(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let away: Vec<NodeId> = device
            .peers
            .keys()
            .copied()
            .filter(|node| *node != peer && self.state.conn(*node) != ConnState::Connected)
            .collect();
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let Some(from) = io.slot(peer) else {
            return;
        };
        let slots: Vec<u8> = away.iter().filter_map(|node| io.slot(*node)).collect();
        if slots.is_empty() || io.bitmap.count(from) == 0 {
            return;
        }
        for slot in slots {
            io.bitmap.merge_slot(from, slot);
        }
        if let Some(sync) = self.target(volume, peer) {
            sync.held += 1;
        }
        self.write_bitmap(volume, BitmapThen::Started(peer));
    }

    /// Marks towards third nodes are durable: requests may be sent.
    pub(crate) fn third_nodes_marked(&mut self, volume: VolumeNr, peer: NodeId) {
        let now = self.now;
        if let Some(sync) = self.target(volume, peer) {
            sync.held = sync.held.saturating_sub(1);
            if sync.held == 0 && !sync.over {
                self.timers.set(Timer::ResyncStep(volume, peer), now);
            }
        }
    }

    /// Marks towards the peer tell all that differs. A node that is behind, or that resyncs with
    /// somebody else, differs where nothing is marked here.
    pub(crate) fn vouches_for(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let p = self.state.peer_device(volume, peer);
        let equal = p.repl == ReplState::Established
            && p.disk == DiskState::UpToDate
            && self.state.disk(volume) == DiskState::UpToDate;
        let careless = planted!(self, VouchesForAnybody) && p.repl == ReplState::Established;
        equal || p.repl.is_sync() || careless
    }
}
