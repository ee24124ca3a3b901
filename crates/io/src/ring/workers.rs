//! Threads for work that blocks. Started when needed, ended with the pool.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::{Errno, Op, OpKey, Waker, run_blocking};

/// A few threads and the queues to and from them.
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
}

struct Shared {
    state: Mutex<State>,
    more: Condvar,
    waker: Waker,
}

#[derive(Default)]
struct State {
    todo: VecDeque<(OpKey, Op)>,
    done: Vec<(OpKey, Op, Result<u32, Errno>)>,
    idle: usize,
    stop: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Work runs outside of the lock, so a panic cannot leave the queues half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Workers {
    pub(super) fn new(threads_max: usize, waker: Waker) -> Workers {
        let state = Mutex::default();
        let shared = Arc::new(Shared {
            state,
            more: Condvar::new(),
            waker,
        });
        Workers {
            shared,
            threads: Vec::new(),
            threads_max,
        }
    }

    /// Queues an operation; starts a thread if none is idle and the limit allows.
    pub(super) fn push(&mut self, key: OpKey, op: Op) {
        let mut state = self.shared.lock();
        state.todo.push_back((key, op));
        let wanted = state.todo.len() > state.idle;
        drop(state);
        if wanted && self.threads.len() < self.threads_max {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("lockstep-work".into());
            match thread.spawn(move || work(&shared)) {
                Ok(handle) => self.threads.push(handle),
                Err(error) => self.cannot_start(&error),
            }
        }
        self.shared.more.notify_one();
    }

    /// With other threads the work only waits; without any it must not hang, so it fails.
    fn cannot_start(&self, error: &std::io::Error) {
        tracing::warn!(%error, threads = self.threads.len(), "cannot start a worker thread");
        if !self.threads.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        while let Some((key, op)) = state.todo.pop_front() {
            state.done.push((key, op, Err(Errno(libc::EAGAIN))));
        }
        self.shared.waker.wake();
    }

    /// Moves what is done to `into`.
    pub(super) fn take_done(&self, into: &mut Vec<(OpKey, Op, Result<u32, Errno>)>) {
        into.append(&mut self.shared.lock().done);
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            // A panic in the work has been reported by the panic hook already.
            let _ = thread.join();
        }
    }
}

fn work(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        if let Some((key, mut op)) = state.todo.pop_front() {
            drop(state);
            let result = run_blocking(&mut op);
            state = shared.lock();
            state.done.push((key, op, result));
            if state.done.len() == 1 {
                shared.waker.wake();
            }
        } else if state.stop {
            return;
        } else {
            state.idle += 1;
            state = shared
                .more
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}
