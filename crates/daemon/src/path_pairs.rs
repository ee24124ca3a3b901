//! Pairs of addresses that lead to peers. Nothing in a handshake names the resource: with one pair for
//! two of them, a connection would reach either.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lockstep_core::command::CommandError;
use lockstep_io::tcp::{NetNamespace, Path};

use crate::address::{LOCAL_AND_PEER_ADDR, path};
use crate::report::ConfiguredPeer;

/// The paths of all resources of a node, each with its network namespace if that is not the daemon's.
#[derive(Default)]
pub(crate) struct PathPairs {
    taken: Mutex<HashSet<(Option<NetNamespace>, Path)>>,
}

impl PathPairs {
    pub(crate) fn take(
        &self,
        namespace: Option<NetNamespace>,
        new: Path,
    ) -> Result<(), CommandError> {
        if self.lock().insert((namespace, new)) {
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

    pub(crate) fn free(&self, namespace: &Option<NetNamespace>, local: &str, remote: &str) {
        if let Ok(old) = path(local, remote) {
            self.lock().remove(&(namespace.clone(), old));
        }
    }

    /// The peer is deleted.
    pub(crate) fn free_all(&self, peer: &ConfiguredPeer) {
        for path in &peer.paths {
            self.free(&peer.namespace, &path.local, &path.remote);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<(Option<NetNamespace>, Path)>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
