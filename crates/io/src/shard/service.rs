//! Front ends that live on a shard's thread: no thread change between them and the cores.

use std::sync::Arc;

use super::mailbox::{Mailbox, Message};
use super::{Engine, Owner, Shard};
use crate::arena::{Arena, Key};
use crate::pool::BufferPool;
use crate::ring::{Done, Fd, Op, OpKey, Ring};

/// Something that runs on a shard's thread. Nothing in it may block.
pub trait Service: Send {
    /// The service was added; start the first operations.
    fn start(&mut self, cx: &mut ServiceCx<'_>);

    /// An operation that was started with [`ServiceCx::run`] is done; `done.token` is its token.
    fn completed(&mut self, cx: &mut ServiceCx<'_>, done: Done);

    /// Somebody called [`ServiceWaker::wake`]. Called once for many wakes, after the cores have
    /// been fed; from a port's sink call `wake` in `batch_end`.
    fn turn(&mut self, cx: &mut ServiceCx<'_>);
}

/// Names a service on its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceId(u64);

/// What a service can do in its calls.
pub struct ServiceCx<'a> {
    ring: &'a mut dyn Ring,
    ops: &'a mut Arena<PendingOp>,
    pool: &'a BufferPool,
    service: Key,
}

impl ServiceCx<'_> {
    /// Starts an operation on the shard's ring, together with everything else of this turn.
    pub fn run(&mut self, token: u64, op: Op) -> OpKey {
        let key = self.ops.insert(PendingOp {
            service: self.service,
            token,
        });
        self.ring.push(Owner::Service.token(key), op)
    }

    /// Waits for poll(2) events of a descriptor, once.
    pub fn poll(&mut self, token: u64, fd: Fd, events: i16) -> OpKey {
        self.run(token, Op::Poll { fd, events })
    }

    /// Asks for an operation's early end; it still completes.
    pub fn cancel(&mut self, key: OpKey) {
        self.ring.cancel(key);
    }

    /// The shard's payload memory.
    pub fn pool(&self) -> &BufferPool {
        self.pool
    }
}

/// Gives a service its turn, from any thread.
pub struct ServiceWaker {
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl Clone for ServiceWaker {
    fn clone(&self) -> Self {
        ServiceWaker {
            wake: self.wake.clone(),
        }
    }
}

impl ServiceWaker {
    /// Calls the service's `turn` soon.
    pub fn wake(&self) {
        (self.wake)();
    }
}

/// A service on its shard.
pub(super) struct Entry {
    /// Taken while it runs.
    service: Option<Box<dyn Service>>,
    /// In the queue of the woken.
    queued: bool,
}

/// An operation of a service.
pub(super) struct PendingOp {
    service: Key,
    token: u64,
}

impl<E: Engine> Shard<E> {
    /// Adds a service that `make` builds with its own waker.
    pub(super) fn add_service(
        &mut self,
        make: impl FnOnce(ServiceWaker) -> Box<dyn Service>,
    ) -> ServiceId {
        let key = self.services.insert(Entry {
            service: None,
            queued: false,
        });
        let service = make(waker(&self.mailbox, key));
        self.with_service(key, Some(service), |service, cx| service.start(cx));
        ServiceId(key.0)
    }

    /// Removes a service. Its operations are dropped when they complete.
    pub(super) fn remove_service(&mut self, id: ServiceId) {
        self.services.remove(Key(id.0));
    }

    pub(super) fn service_completed(&mut self, key: Key, mut done: Done) {
        let Some(PendingOp { service, token }) = self.service_ops.remove(key) else {
            return;
        };
        done.token = token;
        self.with_service(service, None, |service, cx| service.completed(cx, done));
    }

    pub(super) fn turn_services(&mut self) {
        let woken = std::mem::take(&mut self.woken_services);
        for key in &woken {
            if let Some(entry) = self.services.get_mut(*key) {
                entry.queued = true;
            }
        }
        for key in woken {
            let queued = self.services.get_mut(key).map(|entry| &mut entry.queued);
            if queued.is_some_and(std::mem::take) {
                self.with_service(key, None, |service, cx| service.turn(cx));
            }
        }
    }

    fn with_service(
        &mut self,
        key: Key,
        new: Option<Box<dyn Service>>,
        call: impl FnOnce(&mut dyn Service, &mut ServiceCx<'_>),
    ) {
        let service = new.or_else(|| self.services.get_mut(key)?.service.take());
        let Some(mut service) = service else { return };
        let mut cx = ServiceCx {
            ring: &mut *self.ring,
            ops: &mut self.service_ops,
            pool: &self.pool,
            service: key,
        };
        call(&mut *service, &mut cx);
        if let Some(entry) = self.services.get_mut(key) {
            entry.service = Some(service);
        }
    }
}

fn waker<E: Engine>(mailbox: &Arc<Mailbox<E>>, service: Key) -> ServiceWaker {
    let mailbox = mailbox.clone();
    // A shard that has ended has no service to wake.
    ServiceWaker {
        wake: Arc::new(move || drop(mailbox.post(Message::Wake { service }))),
    }
}
