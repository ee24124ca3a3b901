//! Messages to a shard from other threads, and from front ends on its own.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lockstep_core::event::Tag;

use super::Shard;
use crate::arena::Key;
use crate::port::PortRequest;
use crate::ring::Waker;

/// Something to do on the shard's thread.
pub(super) type Job<E> = Box<dyn FnOnce(&mut Shard<E>) + Send>;

/// A message.
pub(super) enum Message<E: super::Engine> {
    /// Anything rare.
    Run(Job<E>),
    /// A front end's request.
    Submit { port: Key, request: PortRequest },
    /// The acceptor has a connection of a peer.
    Accepted {
        connecting: Key,
        path: usize,
        socket: OwnedFd,
    },
    /// A handler ended.
    Handled {
        resource: Key,
        tag: Tag,
        exit_code: u8,
    },
    /// A service wants its turn.
    Wake { service: Key },
}

/// The queue. Its length is bounded by what may be in flight: requests per port, commands.
pub(super) struct Mailbox<E: super::Engine> {
    queue: Mutex<Queue<E>>,
    /// Something is queued that the shard has been or will be woken for.
    signalled: AtomicBool,
    /// The shard sleeps or is about to.
    asleep: AtomicBool,
    waker: Waker,
}

struct Queue<E: super::Engine> {
    messages: Vec<Message<E>>,
    closed: bool,
}

impl<E: super::Engine> Mailbox<E> {
    /// For a shard that sleeps in the ring of this waker.
    pub(super) fn new(waker: Waker) -> Mailbox<E> {
        let queue = Mutex::new(Queue {
            messages: Vec::new(),
            closed: false,
        });
        Mailbox {
            queue,
            signalled: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            waker,
        }
    }

    /// Queues a message without waking the shard; gives it back if the shard has ended.
    pub(super) fn push(&self, message: Message<E>) -> Result<(), Message<E>> {
        let mut queue = self.lock();
        if queue.closed {
            return Err(message);
        }
        queue.messages.push(message);
        Ok(())
    }

    /// Makes sure that the shard sees what was pushed; a system call only if it sleeps.
    pub(super) fn kick(&self) {
        self.signalled.store(true, Ordering::SeqCst);
        // The shard looks in the other order, so one of the two sees the other.
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
    }

    /// The shard wants to sleep: from now on it is woken. `false` if messages wait already.
    pub(super) fn may_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.is_signalled() {
            self.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// The shard sleeps no more.
    pub(super) fn woke_up(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// `push` and `kick`.
    pub(super) fn post(&self, message: Message<E>) -> Result<(), Message<E>> {
        self.push(message)?;
        self.kick();
        Ok(())
    }

    /// Whether messages wait for the shard.
    pub(super) fn is_signalled(&self) -> bool {
        self.signalled.load(Ordering::SeqCst)
    }

    /// Takes all messages. `into` is empty and its memory is used for the next ones.
    pub(super) fn take(&self, into: &mut Vec<Message<E>>) {
        if self.signalled.swap(false, Ordering::SeqCst) {
            std::mem::swap(&mut self.lock().messages, into);
        }
    }

    /// Whether the shard has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Refuses all messages from now on and gives the last ones.
    pub(super) fn close(&self) -> Vec<Message<E>> {
        let mut queue = self.lock();
        queue.closed = true;
        std::mem::take(&mut queue.messages)
    }

    fn lock(&self) -> MutexGuard<'_, Queue<E>> {
        // Pushing and swapping leave a whole queue, also when a thread panics elsewhere.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
