//! What a Primary waits for before it gives its disk away by command (semantics.md, 6.2: requests are
//! suspended, then the disk is detached).
//!
//! Under protocol A or B a write is acknowledged, even as a durable one, when this disk has it and the peer has
//! merely been sent it, or holds it in memory. Once the disk is gone the peers' generation is the newer
//! one, so what they lose with their power is lost. New requests wait, those that were sent become
//! durable there, and only then the cluster is asked.

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{DiskState, Role};

use crate::admin::Wait;
use crate::connection::Connection;
use crate::options::Protocol;
use crate::resource::Resource;

impl Resource {
    /// Requests of the volume wait for a detach.
    pub(super) fn waits_for_detach(&self, volume: VolumeNr) -> bool {
        let detaches =
            |what: &Wait| matches!(what, Wait::Detach(v) | Wait::Detaching(v) if *v == volume);
        self.waiting.iter().any(|waiting| detaches(&waiting.what))
    }

    /// Whatever applications were told is in the peers' disks, as safe as it was here.
    pub(crate) fn may_lose_disk(&self, volume: VolumeNr) -> bool {
        let serves =
            self.state.role == Role::Primary && self.state.disk(volume) == DiskState::UpToDate;
        // What is frozen has not been acknowledged, and does not end before the suspension does.
        let frozen = self.state.suspended();
        let hasty = frozen && planted!(self, FrozenDetachHasty);
        let asynchronous = |conn: &&Connection| {
            conn.net.protocol != Protocol::C || conn.io.was_async || !conn.is_lockstep()
        };
        let peers = self.connections.values().filter(asynchronous);
        let peers: alloc::vec::Vec<NodeId> = peers.map(|conn| conn.peer).collect();
        let requests = self.io.requests.keys().into_iter();
        let mut requests = requests.filter_map(|key| self.io.requests.get(key));
        !serves
            || hasty
            || peers.is_empty()
            || requests.all(|req| {
                let kept = |peer: &NodeId| !req.unsettled.contains(*peer);
                // Reads go on elsewhere, and what was not submitted yet waits.
                let writes = req.submitted && req.volume == volume;
                !writes || !req.completed && frozen || req.completed && peers.iter().all(kept)
            })
    }
}
