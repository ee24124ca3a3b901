//! Resync requests that nobody answers: DRBD 8.4 drops, without a word, what it was asked for by a node
//! whose disk is gone when the block has been read. Newer ones send `P_RS_CANCEL` (wire.md, 7.6).

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::ConnState;

use super::{Key, Stage};
use crate::report::Level;
use crate::resource::Resource;

impl Resource {
    /// Before a resync begins: forgets what was asked for on behalf of a disk before this one, so that
    /// it is asked for again. What the peer did answer of that came before the words that began this
    /// resync, on the same stream. Returns the number of this disk.
    pub(super) fn forget_unanswered(&mut self, volume: VolumeNr, peer: NodeId) -> u64 {
        let serial = self
            .devices
            .get(&volume)
            .map_or(0, |device| device.io.disk_serial);
        if !self.is_legacy(peer) || self.is_lockstep(peer) {
            return serial;
        }
        let unanswered: Vec<Key> = match self.target(volume, peer) {
            Some(sync) if sync.disk_serial != serial => {
                let keys = sync.requests.keys().into_iter();
                keys.filter(|key| {
                    let request = sync.requests.get(*key);
                    request.is_some_and(|r| r.stage == Stage::Sent)
                })
                .collect()
            }
            _ => return serial,
        };
        for key in unanswered {
            if let Some(sync) = self.target(volume, peer)
                && let Some(request) = sync.requests.get(key)
            {
                let forgotten = (request.sector, request.size_bytes);
                sync.forgotten.push(forgotten);
            }
            self.target_end(volume, peer, key);
        }
        serial
    }

    /// A reply that nobody waits for may be one to a request of before an attach: the source was still
    /// reading, and heard of the new disk before it looked whether there is one. It counts on an ack
    /// that cannot be given, because what it read may be older than the marks that the two exchanged
    /// since. The connection is made anew; says whether it was that.
    pub(super) fn answers_forgotten(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        (sector, size_bytes): (Sector, u32),
    ) -> bool {
        let forgotten = self
            .target(volume, peer)
            .is_some_and(|sync| sync.forgotten.contains(&(sector, size_bytes)));
        if forgotten {
            let text = format!(
                "the block at sector {sector} was asked for before the disk was attached: the \
                 connection is made anew"
            );
            self.log(Level::Info, Some(peer), Some(volume), text);
            self.drop_connection(peer, ConnState::NetworkFailure);
        }
        forgotten
    }
}
