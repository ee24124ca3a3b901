//! A node that leaves one source for another one has replies of both under way.

use lockstep_format::units::{NodeId, Sector, VolumeNr};

use crate::resource::Resource;

use super::Stage;

impl Resource {
    /// A reply of `source` is going to replace what other sources have sent before: once that is flushed, it is not
    /// what this disk has, and settles no mark.
    pub(super) fn overtake_copies(
        &mut self,
        volume: VolumeNr,
        source: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) {
        if planted!(self, OtherSourceClears) {
            return;
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let end = sector.end_of(size_bytes);
        let others = device.peers.iter_mut().filter(|(node, _)| **node != source);
        for sync in others.filter_map(|(_, pd)| pd.io.target.as_mut()) {
            for key in sync.requests.keys() {
                if let Some(request) = sync.requests.get_mut(key)
                    && request.stage >= Stage::Replied
                {
                    request.marked_again |=
                        request.sector < end && sector < request.sector.end_of(request.size_bytes);
                }
            }
        }
    }
}
