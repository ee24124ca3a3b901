//! Thin resync as target: a request of `rs-discard-granularity` bytes may be answered without
//! data if the source's block is all zero; this node's is discarded then (wire.md, 7.5 and 7.6).

use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::{BIO_LEN_MAX, Features};

use super::super::slab::Key;
use crate::resource::Resource;

impl Resource {
    /// Size of the requests that may be answered without data, in sectors; 0 for none.
    pub(super) fn thin_sectors(&self, volume: VolumeNr, peer: NodeId) -> u64 {
        let offered = self
            .connections
            .get(&peer)
            .is_some_and(|c| c.features().contains(Features::THIN_RESYNC));
        let Some(disk) = self.devices.get(&volume).and_then(|d| d.attached()) else {
            return 0;
        };
        let bytes = disk.options.rs_discard_granularity_bytes.min(BIO_LEN_MAX);
        let sectors = u64::from(bytes) / Sector::SIZE;
        let block = self.common_block_sectors(volume, peer);
        match offered && bytes > 0 && sectors.is_multiple_of(block) {
            true => sectors,
            false => 0,
        }
    }

    /// `P_RS_DEALLOCATED` and its successor: the source's block is all zero.
    pub(crate) fn target_deallocated(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        sector: Sector,
        size_bytes: u32,
    ) {
        let asked = self.target_asked(volume, peer, sector, size_bytes);
        let thin = |resource: &mut Self, key: Key| {
            let sync = resource.target(volume, peer)?;
            sync.requests.get(key).map(|request| request.thin)
        };
        let Some((key, over)) = asked.filter(|(key, _)| thin(self, *key) == Some(true)) else {
            let text = alloc::format!(
                "{size_bytes} bytes at sector {sector} are said to be zero, which was not asked for"
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        };
        if over || !self.takes_writes(volume) {
            self.target_failed(volume, peer, key);
            return;
        }
        self.target_answered(volume, peer, key, None);
    }
}
