//! Watchers are told of every step of a change, and the cores tell steps only while somebody
//! watches: each costs a report of the whole resource.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockstep_core::resource::Resource;
use lockstep_io::shard::ShardHandle;

use crate::board::{Board, Statistics};
use crate::mailbox::Subscription;
use crate::report::ResourceReport;

/// Who asks the cores of a node for steps.
pub(crate) struct Watching {
    board: Arc<Board>,
    shards: Vec<ShardHandle<Resource>>,
    /// The cores tell steps.
    told: Mutex<bool>,
}

impl Watching {
    pub(crate) fn new(board: Arc<Board>, shards: Vec<ShardHandle<Resource>>) -> Watching {
        Watching {
            board,
            shards,
            told: Mutex::new(false),
        }
    }

    /// The present reports, and every later step without a gap.
    pub(crate) fn watch(
        &self,
        resource: Option<String>,
        statistics: Statistics,
    ) -> (Vec<ResourceReport>, Subscription) {
        let mut told = self.lock();
        self.tell(&mut told, true);
        self.board.watch(resource, statistics)
    }

    /// Once a second: the last watcher may have gone.
    pub(crate) fn look(&self) {
        let mut told = self.lock();
        if *told && !self.board.is_watched() {
            self.tell(&mut told, false);
        }
    }

    fn tell(&self, told: &mut bool, wanted: bool) {
        if std::mem::replace(told, wanted) != wanted {
            for shard in &self.shards {
                // A shard that has ended has nothing to tell.
                let _ = shard.tell_steps(wanted);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
