//! What waits for one watcher. Putting something in never waits and memory is bounded: for a
//! reader that is too slow, newer states replace older ones of the same resource, so that what it
//! sees last is always true. Only the steps between are lost to it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::protocol::Reply;

/// Messages that may wait before states of a resource replace each other.
const BACKLOG: usize = 1024;

/// The side that is told.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    inner: Mutex<Inner>,
    ready: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    messages: VecDeque<Reply>,
    closed: bool,
    lost_helpers: u64,
}

impl Mailbox {
    /// Adds a message; `false` if nobody reads any more.
    pub(crate) fn put(&self, message: Reply) -> bool {
        let mut inner = self.lock();
        if inner.closed {
            return false;
        }
        inner.put(message);
        drop(inner);
        self.ready.notify_one();
        true
    }

    /// The reader gets what waits, and then the end.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.ready.notify_all();
    }

    /// Nobody reads any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn put(&mut self, message: Reply) {
        if self.messages.len() >= 2 * BACKLOG {
            // Only renames get here, which cannot be left out: the reader has to begin anew.
            self.closed = true;
            return;
        }
        if self.messages.len() >= BACKLOG && !is_rename(&message) {
            let Some(about) = state_of(&message) else {
                if self.lost_helpers == 0 {
                    tracing::warn!(BACKLOG, "a watcher is too slow for calls of handlers");
                }
                self.lost_helpers += 1;
                return;
            };
            self.messages
                .retain(|waiting| is_rename(waiting) || state_of(waiting) != Some(about));
        }
        self.messages.push_back(message);
    }
}

/// What follows a rename is about the new name.
fn is_rename(message: &Reply) -> bool {
    matches!(message, Reply::Renamed { .. })
}

/// The resource whose state a message tells.
fn state_of(message: &Reply) -> Option<&str> {
    match message {
        Reply::Changed { resource } => Some(&resource.name),
        Reply::Removed { name } => Some(name),
        Reply::Renamed { .. }
        | Reply::Helper { .. }
        | Reply::Done
        | Reply::Failed { .. }
        | Reply::Hello { .. }
        | Reply::Counts { .. }
        | Reply::Report { .. } => None,
    }
}

/// The side that reads. Dropping it ends the subscription.
#[derive(Debug)]
pub(crate) struct Subscription {
    mailbox: Arc<Mailbox>,
}

impl Subscription {
    pub(crate) fn new() -> (Arc<Mailbox>, Subscription) {
        let mailbox = Arc::new(Mailbox::default());
        let subscription = Subscription {
            mailbox: mailbox.clone(),
        };
        (mailbox, subscription)
    }

    /// The mailbox, for whoever ends the conversation.
    pub(crate) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    /// Waits for the next message.
    pub(crate) fn recv(&self) -> Option<Reply> {
        let mut inner = self.mailbox.lock();
        loop {
            if let Some(message) = inner.messages.pop_front() {
                return Some(message);
            }
            if inner.closed {
                return None;
            }
            inner = self
                .mailbox
                .ready
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.mailbox.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(name: &str) -> Reply {
        Reply::Removed {
            name: name.to_owned(),
        }
    }

    fn helper(status: Option<i32>) -> Reply {
        Reply::Helper {
            resource: "r".to_owned(),
            peer: None,
            volume: None,
            helper: "split-brain".to_owned(),
            status,
        }
    }

    #[test]
    fn messages_come_in_order_and_the_end_after_them() {
        let (mailbox, subscription) = Subscription::new();
        assert!(mailbox.put(gone("a")) && mailbox.put(gone("b")));
        mailbox.close();
        assert!(!mailbox.put(gone("c")));
        assert_eq!(subscription.recv(), Some(gone("a")));
        assert_eq!(subscription.recv(), Some(gone("b")));
        assert_eq!(subscription.recv(), None);
    }

    #[test]
    fn a_slow_reader_costs_bounded_memory_and_ends_with_the_last_state() {
        let (mailbox, subscription) = Subscription::new();
        for _ in 0..10 * BACKLOG {
            assert!(mailbox.put(helper(Some(0))));
            assert!(mailbox.put(gone("first")));
            assert!(mailbox.put(gone("last")));
        }
        mailbox.close();
        let seen: Vec<Reply> = std::iter::from_fn(|| subscription.recv()).collect();
        assert!(seen.len() <= BACKLOG + 2, "{}", seen.len());
        assert_eq!(seen[seen.len() - 2..], [gone("first"), gone("last")]);
    }

    #[test]
    fn who_drops_the_subscription_is_told_nothing_more() {
        let (mailbox, subscription) = Subscription::new();
        drop(subscription);
        assert!(mailbox.is_closed());
        assert!(!mailbox.put(gone("a")));
    }
}
