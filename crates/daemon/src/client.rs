//! A tool's end of the control socket, and starting a daemon that does not run yet.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::place::Place;
use crate::protocol::{Reply, Request, to_line};

/// Why the daemon cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("lockstepd is not running: no answer on {}; start it with `lockstepd --dir {}`",
            .socket.display(), .dir.display())]
    NotRunning {
        /// The control socket.
        socket: PathBuf,
        /// The node's directory.
        dir: PathBuf,
    },
    /// The daemon hung up or could not be reached.
    #[error("talking to lockstepd on {}", .socket.display())]
    Lost {
        /// The control socket.
        socket: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The daemon did not answer in time.
    #[error("lockstepd did not answer within {seconds} s")]
    Late {
        /// The limit.
        seconds: u64,
    },
    /// An answer that this program does not understand.
    #[error("lockstepd answered something unknown: {text}")]
    Unknown {
        /// The parser's words.
        text: String,
    },
    /// The daemon could not be started.
    #[error("starting lockstepd (its log is {})", .log.display())]
    Start {
        /// Log file.
        log: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// A conversation with the daemon.
#[derive(Debug)]
pub struct Client {
    place: Place,
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the node's daemon.
    pub fn connect(place: &Place) -> Result<Client, ClientError> {
        let socket = place.client_socket();
        match UnixStream::connect(&socket) {
            Ok(stream) => Ok(Client {
                place: place.clone(),
                stream: BufReader::new(stream),
            }),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused
                ) =>
            {
                Err(ClientError::NotRunning {
                    socket,
                    dir: place.dir().to_owned(),
                })
            }
            Err(source) => Err(ClientError::Lost { socket, source }),
        }
    }

    /// Connects; starts the daemon in the background first if none runs.
    pub fn connect_or_start(place: &Place) -> Result<Client, ClientError> {
        match Client::connect(place) {
            Err(ClientError::NotRunning { .. }) => {}
            other => return other,
        }
        let log = place.log_file();
        let mut child = start(place).map_err(|source| ClientError::Start {
            log: log.clone(),
            source,
        })?;
        let until = Instant::now() + START_LIMIT;
        loop {
            match Client::connect(place) {
                Err(ClientError::NotRunning { .. }) if Instant::now() < until => {}
                other => return other,
            }
            // A daemon that has ended at once may have lost against one that is starting.
            let ended = child.try_wait().ok().flatten();
            if let Some(status) = ended.filter(|status| !status.success())
                && !is_locked(place)
            {
                let source = std::io::Error::other(format!("it ended with {status}"));
                return Err(ClientError::Start { log, source });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends a request. With `new-path` goes the network namespace of this process: the path is there.
    pub fn send(&mut self, request: &Request) -> Result<(), ClientError> {
        let line = to_line(request);
        let stream = self.stream.get_mut();
        let namespace = match request {
            // Without /proc the daemon takes its own.
            Request::NewPath { .. } => File::open("/proc/thread-self/ns/net").ok(),
            _ => None,
        };
        let sent = match namespace {
            Some(namespace) => send_with(stream, &line, namespace.as_fd()),
            None => Ok(0),
        };
        sent.and_then(|sent| stream.write_all(&line[sent..]))
            .map_err(|source| self.lost(source))
    }

    /// Another handle that only sends: for a thread beside the one that receives.
    pub fn sender(&self) -> Result<Sender, ClientError> {
        match self.stream.get_ref().try_clone() {
            Ok(stream) => Ok(Sender { stream }),
            Err(source) => Err(self.lost(source)),
        }
    }

    /// Waits for the next answer; `None` if `limit` passes first.
    pub fn receive(&mut self, limit: Option<Duration>) -> Result<Option<Reply>, ClientError> {
        let limit = limit.map(|limit| limit.max(Duration::from_millis(1)));
        self.stream
            .get_ref()
            .set_read_timeout(limit)
            .map_err(|source| self.lost(source))?;
        if self.stream.buffer().is_empty() {
            match self.stream.fill_buf() {
                Ok([]) => return Err(self.lost(ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    return Ok(None);
                }
                Err(source) => return Err(self.lost(source)),
            }
        }
        // The daemon writes whole lines, so the rest of a begun one is on its way.
        self.stream
            .get_ref()
            .set_read_timeout(None)
            .map_err(|source| self.lost(source))?;
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => Err(self.lost(ErrorKind::UnexpectedEof.into())),
            Ok(_) => serde_json::from_str(&line)
                .map(Some)
                .map_err(|error| ClientError::Unknown {
                    text: error.to_string(),
                }),
            Err(source) => Err(self.lost(source)),
        }
    }

    /// Sends a request and waits for its one answer.
    pub fn call(&mut self, request: &Request) -> Result<Reply, ClientError> {
        self.send(request)?;
        self.receive(Some(REPLY_LIMIT))?.ok_or(ClientError::Late {
            seconds: REPLY_LIMIT.as_secs(),
        })
    }

    /// The daemon has hung up.
    pub fn has_ended(error: &ClientError) -> bool {
        matches!(error, ClientError::Lost { source, .. }
            if matches!(source.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset))
    }

    fn lost(&self, source: std::io::Error) -> ClientError {
        ClientError::Lost {
            socket: self.place.client_socket(),
            source,
        }
    }
}

/// Sends what there is room for, at least a byte, and the descriptor with it.
fn send_with(
    stream: &UnixStream,
    line: &[u8],
    descriptor: BorrowedFd<'_>,
) -> std::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    assert!(
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)),
        "there is space for one descriptor"
    );
    let bytes = [IoSlice::new(line)];
    let send = || sendmsg(stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL);
    Ok(retry_on_intr(send)?)
}

/// A daemon of this place lives, though it may not answer yet.
fn is_locked(place: &Place) -> bool {
    let Ok(file) = std::fs::File::open(place.pid_file()) else {
        return false;
    };
    let lock = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockShared);
    lock == Err(rustix::io::Errno::WOULDBLOCK)
}

/// The sending half of a conversation.
#[derive(Debug)]
pub struct Sender {
    stream: UnixStream,
}

impl Sender {
    /// Sends a request. What is wrong with the connection is told to the receiver.
    pub fn send(&mut self, request: &Request) -> std::io::Result<()> {
        self.stream.write_all(&to_line(request))
    }
}

/// Starts the daemon, which makes itself a session of its own.
fn start(place: &Place) -> std::io::Result<std::process::Child> {
    std::fs::create_dir_all(place.dir())?;
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(place.log_file())?;
    // The one binary also is the daemon.
    Command::new(std::env::current_exe()?)
        .args(["lockstepd", "--new-session", "--dir"])
        .arg(place.dir())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
}

/// How long a daemon may take until its socket answers.
const START_LIMIT: Duration = Duration::from_secs(10);

/// How long a command may take.
const REPLY_LIMIT: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_a_daemon_holds_is_seen_and_let_be() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::find(Some(dir.path()));
        assert!(!is_locked(&place), "no daemon has ever run");
        let file = std::fs::File::create(place.pid_file()).unwrap();
        assert!(!is_locked(&place), "the daemon has ended");
        let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(&file, exclusive).unwrap();
        assert!(is_locked(&place));
        drop(file);
        assert!(!is_locked(&place));
    }
}
