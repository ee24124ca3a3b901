//! The way into the I/O thread for all other threads: a queue and an eventfd that wakes it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::core::Input;
use crate::core::stats::Snapshot;

/// A message for the I/O thread.
#[derive(Debug)]
pub(crate) enum Mail {
    Input(Input),
    /// Control commands in order; each gets its answer, and the first error ends the list.
    Commands {
        commands: Vec<String>,
        json: bool,
        reply: Sender<Vec<Reply>>,
    },
    Snapshot(Sender<Box<Snapshot>>),
    /// A new process asks for everything, on this stream.
    HandOver(UnixStream, Sender<Result<(), String>>),
    Stop,
}

/// The answer to one control command.
pub(crate) type Reply = Result<String, String>;

/// The sending side; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    queue: Sender<Mail>,
    bell: Arc<OwnedFd>,
}

/// The receiving side.
#[derive(Debug)]
pub(crate) struct Mailbox {
    queue: Receiver<Mail>,
    bell: Arc<OwnedFd>,
}

/// A new mailbox and its post.
pub(crate) fn mailbox() -> std::io::Result<(Post, Mailbox)> {
    let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
    let (sender, receiver) = channel();
    Ok((
        Post {
            queue: sender,
            bell: Arc::clone(&bell),
        },
        Mailbox {
            queue: receiver,
            bell,
        },
    ))
}

impl Post {
    /// Sends a message; false when the I/O thread has ended.
    pub(crate) fn send(&self, mail: Mail) -> bool {
        let sent = self.queue.send(mail).is_ok();
        // A full counter wakes as well.
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
        sent
    }

    /// Sends a completion.
    pub(crate) fn input(&self, input: Input) {
        self.send(Mail::Input(input));
    }

    /// Asks for the state of everything.
    pub(crate) fn snapshot(&self) -> Option<Box<Snapshot>> {
        let (sender, receiver) = channel();
        self.send(Mail::Snapshot(sender))
            .then(|| receiver.recv().ok())?
    }

    /// Hands everything over to the process behind a stream.
    pub(crate) fn hand_over(&self, stream: UnixStream) -> Result<(), String> {
        let (sender, receiver) = channel();
        self.send(Mail::HandOver(stream, sender));
        let stopped = || Err("the proxy is stopping".into());
        receiver.recv().unwrap_or_else(|_| stopped())
    }

    /// Runs control commands.
    pub(crate) fn commands(&self, commands: Vec<String>, json: bool) -> Vec<Reply> {
        let (reply, receiver) = channel();
        self.send(Mail::Commands {
            commands,
            json,
            reply,
        });
        receiver
            .recv()
            .unwrap_or_else(|_| vec![Err("the proxy is stopping".into())])
    }
}

impl Mailbox {
    /// What becomes readable when mail is there.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Silences the bell; to be called before the queue is emptied.
    pub(crate) fn silence(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&*self.bell, &mut count);
    }

    /// The next message, if one comes in time.
    pub(crate) fn take_within(&self, limit: Duration) -> Option<Mail> {
        self.queue.recv_timeout(limit).ok()
    }

    /// The next message.
    pub(crate) fn take(&self) -> Option<Mail> {
        self.queue.try_recv().ok()
    }
}
