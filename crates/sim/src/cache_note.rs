//! What the driver notes beside a disk, for the next process, of what the disk still has in its cache.

use lockstep_core::event::DiskCache;
use lockstep_format::units::NodeMask;

use crate::disk::Lose;

/// A note that stays when the process dies, and goes with the node's power.
#[derive(Debug, Default)]
pub(crate) struct CacheNote {
    untold: Option<NodeMask>,
    has_failed: bool,
}

impl CacheNote {
    /// What a process finds that opens the disk.
    pub(crate) fn found(&self) -> DiskCache {
        match self.untold {
            Some(untold) => DiskCache::Kept { untold },
            None => DiskCache::MayBeLost,
        }
    }

    /// The core asks for it.
    pub(crate) fn write(&mut self, untold: NodeMask) {
        self.untold = Some(untold).filter(|_| !self.has_failed);
    }

    /// An operation of the disk has failed.
    pub(crate) fn disk_fails(&mut self) {
        *self = CacheNote {
            untold: None,
            has_failed: true,
        };
    }

    /// The disk is closed, or the node gives it up.
    pub(crate) fn disk_goes(&mut self) {
        *self = CacheNote::default();
    }

    /// The node dies.
    pub(crate) fn crash(&mut self, lose: Lose) {
        self.has_failed = false;
        self.untold = self.untold.filter(|_| lose == Lose::InFlight);
    }
}
