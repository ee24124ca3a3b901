//! Pairs of addresses that lead to peers. Nothing in a handshake names the resource: with one pair for
//! two of them, a connection would reach either.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lockstep_core::command::CommandError;
use lockstep_io::tcp::Path;

use crate::address::{LOCAL_AND_PEER_ADDR, path};
use crate::report::ConfiguredPeer;

/// The paths of all resources of a node.
#[derive(Default)]
pub(crate) struct PathPairs {
    taken: Mutex<HashSet<Path>>,
}

impl PathPairs {
    pub(crate) fn take(&self, new: Path) -> Result<(), CommandError> {
        if self.lock().insert(new) {
            return Ok(());
        }
        Err(CommandError {
            code: LOCAL_AND_PEER_ADDR,
            text: format!(
                "path {} {} leads to a peer of another resource already",
                new.local, new.peer
            ),
        })
    }

    pub(crate) fn free(&self, local: &str, remote: &str) {
        if let Ok(old) = path(local, remote) {
            self.lock().remove(&old);
        }
    }

    /// The peer is deleted.
    pub(crate) fn free_all(&self, peer: &ConfiguredPeer) {
        for path in &peer.paths {
            self.free(&path.local, &path.remote);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<Path>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
