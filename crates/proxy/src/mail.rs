//! The way into the control lane for all other threads: a queue and an eventfd that wakes it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::core::Input;
use crate::core::stats::Snapshot;
use crate::net::shard::News;

/// A message for the control lane.
#[derive(Debug)]
pub(crate) enum Mail {
    Input(Input),
    /// What an I/O shard has done.
    News(News),
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
    bell: Bell,
}

/// The receiving side.
#[derive(Debug)]
pub(crate) struct Mailbox {
    queue: Receiver<Mail>,
    bell: Bell,
}

/// Wakes a thread that waits with epoll. Ringing again before the thread has looked costs no
/// system call.
#[derive(Clone, Debug)]
pub(crate) struct Bell {
    fd: Arc<OwnedFd>,
    rung: Arc<AtomicBool>,
}

impl Bell {
    pub(crate) fn new() -> std::io::Result<Bell> {
        let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Bell {
            fd: Arc::new(fd),
            rung: Arc::default(),
        })
    }

    /// To be called after something was put into the queue.
    pub(crate) fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // A full counter wakes as well.
            let _ = rustix::io::write(&*self.fd, &1u64.to_ne_bytes());
        }
    }

    /// To be called before the queue is emptied. First the counter, then the mark: the other way
    /// round a ring in between would be swallowed, and the mark would keep all others from ringing.
    pub(crate) fn silence(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&*self.fd, &mut count);
        self.rung.swap(false, Ordering::AcqRel);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A new mailbox and its post.
pub(crate) fn mailbox() -> std::io::Result<(Post, Mailbox)> {
    let bell = Bell::new()?;
    let (sender, receiver) = channel();
    Ok((
        Post {
            queue: sender,
            bell: bell.clone(),
        },
        Mailbox {
            queue: receiver,
            bell,
        },
    ))
}

impl Post {
    /// Sends a message; false when the control lane has ended.
    pub(crate) fn send(&self, mail: Mail) -> bool {
        let sent = self.put(mail);
        self.ring();
        sent
    }

    /// Sends a message that may lie until somebody rings.
    pub(crate) fn put(&self, mail: Mail) -> bool {
        self.queue.send(mail).is_ok()
    }

    /// Wakes the control lane.
    pub(crate) fn ring(&self) {
        self.bell.ring();
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
        self.bell.silence();
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
