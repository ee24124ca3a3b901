//! Resync requests that nobody answers: DRBD 8.4 drops, without a word, what it was asked for by a node
//! whose disk is gone when the block has been read. Newer ones send `P_RS_CANCEL` (wire.md, 7.6).

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};

use super::{Key, Stage};
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
            self.target_end(volume, peer, key);
        }
        serial
    }
}
