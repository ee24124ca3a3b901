//! Writes of a Primary without a disk of its own that is whole, where this disk is the only one
//! that gets them.
//!
//! A disk under a Primary may lose what is in its cache with its power, because the Primary's own
//! disk has it, marks it and copies it again. Under a Primary without a disk nobody has it: the
//! Primary lives on, its applications hold the writes for done, a later flush would succeed, and
//! the data would be gone. It cannot even notice, since a disk that comes back does not tell why
//! it was away. A Primary whose disk is Inconsistent is no better: the resync that goes on once the
//! other disk is back copies what that one has over its newer blocks. So what such a Primary writes
//! is made durable before it is acknowledged, and what it wrote before it lost its disk is, before
//! this disk takes over the new generation.

use alloc::collections::{BTreeSet, VecDeque};

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState};

use super::Key;
use super::peer_write::PeerWrite;
use crate::event::DiskError;
use crate::resource::Resource;

impl Resource {
    /// What `peer` writes is on this disk and on no other one.
    pub(crate) fn holds_last_copy(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let flushes = self
            .devices
            .get(&volume)
            .and_then(|d| d.attached())
            .is_some_and(|disk| disk.options.disk_flushes);
        let others = self.state.devices.get(&volume).is_some_and(|d| {
            d.peers
                .values()
                .any(|p| p.disk == DiskState::UpToDate && p.repl > ReplState::Off)
        });
        let sender = self.state.peer_device(volume, peer);
        let flushes = flushes && !planted!(self, LastCopyInCache);
        flushes && !others && sender.repl > ReplState::Off && sender.disk <= DiskState::Inconsistent
    }

    /// Writes of this node are marked towards the peer, or will be: it was never sent them.
    pub(crate) fn lacks_writes(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let requests = self
            .io
            .log
            .iter()
            .filter_map(|key| self.io.requests.get(*key));
        self.out_of_sync_blocks(volume, peer) > 0
            || requests
                .filter(|req| req.volume == volume)
                .any(|req| !req.sent.contains(peer))
    }

    /// This disk holds the last copy from now on: what it has of it becomes durable with the
    /// generation that says so.
    pub(crate) fn keep_last_copy(&mut self, volume: VolumeNr) {
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.writer.flush_data = true;
        }
    }

    /// A lost connection left epochs whose barriers will not come. The next Primary knows nothing of
    /// them, so no flush of its applications reaches here either: they become durable with the next
    /// superblock, which no new generation overtakes.
    pub(super) fn keep_lost_epochs(&mut self, writes: &VecDeque<PeerWrite>) {
        let cached = writes.iter().filter(|w| w.may_be_in_a_cache());
        let volumes: BTreeSet<VolumeNr> = cached.map(|w| w.volume).collect();
        for volume in volumes {
            if planted!(self, LostEpochsForgotten) {
                return;
            }
            self.keep_last_copy(volume);
            self.write_superblock(volume);
        }
    }

    pub(crate) fn last_copy_flushed(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        number: u64,
        result: Result<(), DiskError>,
    ) {
        match result {
            Ok(()) => self.peer_write_landed(volume, peer, number),
            Err(_) => self.peer_write_failed(volume, peer, number),
        }
    }

    /// Nothing here says what a lost peer misses before the generation is made that leaves it out.
    /// If it comes back before that it has to get the write.
    pub(super) fn cannot_mark(&self, key: Key) -> bool {
        self.io.requests.get(key).is_some_and(|req| {
            self.state.disk(req.volume) < DiskState::UpToDate
                && !self.io_fails(req.volume)
                && self
                    .devices
                    .get(&req.volume)
                    .is_some_and(|d| d.new_uuid_pending)
        })
    }
}
