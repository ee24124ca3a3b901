//! Writes that wait for a lost peer, and peers that came since they were sent.
//!
//! A write that is frozen without its peer is sent again when that one is back. Meanwhile another peer may
//! have been brought up to date by it, before the write was there. Nobody marks the write for that one before
//! it is settled, so that it would count as UpToDate without it: it gets the write as well.

use lockstep_format::units::NodeMask;

use super::slab::Key;
use crate::resource::Resource;

impl Resource {
    /// The write goes again to a peer that it was sent to: and now to all that it would be sent to if it
    /// was new.
    pub(super) fn send_to_newcomers(&mut self, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        if req.completed || req.again || planted!(self, NewcomersForgotten) {
            return;
        }
        let known = req.sent.union(req.accounted).union(req.mark);
        let Some(device) = self.state.devices.get(&req.volume) else {
            return;
        };
        let new: NodeMask = device
            .peers
            .iter()
            .filter(|(peer, p)| p.replicates() && !known.contains(**peer))
            .map(|(peer, _)| *peer)
            .collect();
        for peer in new.iter() {
            if let Some(req) = self.io.requests.get_mut(key) {
                req.sent.insert(peer);
                req.unsettled.insert(peer);
            }
            self.send_write(peer, key);
        }
    }
}
