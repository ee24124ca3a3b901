//! What the cores of a node touched, from the shards' threads to the one that keeps reports fresh.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockstep_core::report::{Event, Level};
use lockstep_io::shard::{ResourceId, ResourceView, UsedPaths};

use crate::generations::{Generations, plain};

/// What cores touched since it was last looked at.
pub(crate) struct Touched {
    set: Mutex<BTreeSet<(usize, ResourceId)>>,
    /// Changes that watchers were not told of yet, each resource's in their order.
    steps: Mutex<BTreeMap<(usize, ResourceId), VecDeque<ResourceView>>>,
    wake: SyncSender<()>,
    /// All resources of the node.
    names: Mutex<BTreeMap<(usize, ResourceId), String>>,
    generations: Arc<Generations>,
}

impl Touched {
    /// `wake` is told when something new is in it.
    pub(crate) fn new(wake: SyncSender<()>) -> Touched {
        Touched {
            set: Mutex::default(),
            steps: Mutex::default(),
            wake,
            names: Mutex::default(),
            generations: Arc::default(),
        }
    }

    /// The generations that the cores make.
    pub(crate) fn generations(&self) -> Arc<Generations> {
        self.generations.clone()
    }

    /// Names of the resources that were touched since the last call.
    pub(crate) fn take(&self) -> BTreeSet<String> {
        let touched = std::mem::take(&mut *lock(&self.set));
        let names = lock(&self.names);
        let named = touched.iter().filter_map(|id| names.get(id));
        named.cloned().collect()
    }

    /// The shard of so many that has the fewest resources.
    pub(crate) fn least_loaded(&self, shards: usize) -> usize {
        let names = lock(&self.names);
        let mut loads = vec![0_usize; shards];
        for (shard, _) in names.keys() {
            if let Some(load) = loads.get_mut(*shard) {
                *load += 1;
            }
        }
        let least = (0..shards).min_by_key(|shard| loads.get(*shard).copied());
        least.unwrap_or(0)
    }

    /// The resource's name in the log.
    pub(crate) fn name(&self, shard: usize, id: ResourceId, name: &str) {
        lock(&self.names).insert((shard, id), name.to_owned());
    }

    /// The resource has gone.
    pub(crate) fn forget(&self, shard: usize, id: ResourceId) {
        lock(&self.names).remove(&(shard, id));
        lock(&self.steps).remove(&(shard, id));
    }

    /// Takes the oldest change of a resource up to this step.
    pub(crate) fn step(&self, shard: usize, id: ResourceId, last: u64) -> Option<ResourceView> {
        let mut all = lock(&self.steps);
        let steps = all.get_mut(&(shard, id))?;
        let due = steps.front()?.snapshot.step <= last;
        let step = if due { steps.pop_front() } else { None };
        if steps.is_empty() {
            all.remove(&(shard, id));
        }
        step
    }

    fn add_step(&self, key: (usize, ResourceId), step: ResourceView) {
        let mut all = lock(&self.steps);
        let steps = all.entry(key).or_default();
        if steps.len() >= MAX_STEPS {
            // The next ones tell what has changed with it.
            steps.pop_front();
        }
        steps.push_back(step);
    }

    /// Called on a shard's thread.
    pub(crate) fn event(&self, shard: usize, id: ResourceId, event: &Event, paths: &UsedPaths) {
        if let Event::Log {
            level,
            peer,
            volume,
            text,
        } = event
        {
            let (peer, volume) = (peer.map(|p| p.0), volume.map(|v| v.0));
            let names = lock(&self.names);
            let resource = names.get(&(shard, id));
            match level {
                Level::Error => tracing::error!(resource, peer, volume, "{text}"),
                Level::Warn => tracing::warn!(resource, peer, volume, "{text}"),
                Level::Info => tracing::info!(resource, peer, volume, "{text}"),
                Level::Debug => tracing::debug!(resource, peer, volume, "{text}"),
            }
            return;
        }
        if let Event::NewGeneration { from, to, .. } = event {
            return self.generations.made(plain(from.0), plain(to.0));
        }
        if let Event::Step(snapshot) = event {
            let step = ResourceView {
                snapshot: (**snapshot).clone(),
                paths: paths.clone(),
            };
            self.add_step((shard, id), step);
        }
        if lock(&self.set).insert((shard, id)) {
            // Full means that it is going to look anyway.
            let _ = self.wake.try_send(());
        }
    }
}

/// Changes of one resource that wait for watchers.
const MAX_STEPS: usize = 256;

/// Waits for something touched or the next second; `true` once a second.
pub(crate) fn wait(woken: &Receiver<()>, last_tick: &mut Instant) -> bool {
    let left = SECOND.saturating_sub(last_tick.elapsed());
    match woken.recv_timeout(left) {
        Ok(()) => {}
        Err(RecvTimeoutError::Timeout) => {}
        Err(RecvTimeoutError::Disconnected) => std::thread::sleep(left),
    }
    let tick = last_tick.elapsed() >= SECOND;
    if tick {
        *last_tick = Instant::now();
    }
    tick
}

const SECOND: Duration = Duration::from_secs(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
