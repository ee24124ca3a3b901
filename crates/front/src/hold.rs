//! The holder: a small process that keeps copies of the descriptors of `/dev/fuse`, so that a
//! killed or upgraded server's devices wait for the next server instead of failing.
//!
//! It serves a unix socket of whole messages, accessible to its owner only, and does nothing else:
//! it reads no request of any device. It ends when it holds nothing and its last client has gone,
//! or when no client has been there for its patience: then all waiting I/O fails, so no process
//! waits for ever for a server that does not come back.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, recvmsg, sendmsg,
};

/// Longest message in bytes.
const MAX_MESSAGE_LEN: usize = 4096;
/// Descriptors that one holder keeps.
const MAX_HELD: usize = 4096;
/// Clients at the same time: a server, and an operator who looks.
const MAX_CLIENTS: usize = 8;
/// How long a client waits for the holder's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

const STORE: u8 = b'S';
const REMOVE: u8 = b'R';
const LIST: u8 = b'L';
const PATIENCE: u8 = b'P';
const OK: u8 = b'K';
const REFUSED: u8 = b'X';
const ENTRY: u8 = b'D';
const END: u8 = b'E';

/// A descriptor that the holder had.
#[derive(Debug)]
pub struct Held {
    /// What it was stored as.
    pub key: String,
    /// What was stored with it.
    pub state: String,
    /// A copy; the holder keeps its own.
    pub descriptor: OwnedFd,
}

/// A server's connection to its holder.
#[derive(Debug)]
pub struct HoldClient {
    socket: OwnedFd,
}

impl HoldClient {
    /// Connects to a running holder.
    pub fn connect(path: &Path) -> io::Result<HoldClient> {
        let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::SEQPACKET, None)?;
        socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        socket.connect(&socket2::SockAddr::unix(path)?)?;
        Ok(HoldClient {
            socket: socket.into(),
        })
    }

    /// Connects to the holder at `path`, or starts one with `command`, which must call [`run`] with
    /// its standard input. The holder gets a process group of its own, so that a signal to the
    /// server's does not end it. Returns the child if one was started.
    pub fn connect_or_start(
        path: &Path,
        command: &mut Command,
    ) -> io::Result<(HoldClient, Option<Child>)> {
        match Self::connect(path) {
            Ok(client) => return Ok((client, None)),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused
                ) => {}
            Err(error) => return Err(error),
        }
        Self::start(path, command).map(|(client, child)| (client, Some(child)))
    }

    /// Starts a holder in place of whatever was at `path`.
    pub fn start(path: &Path, command: &mut Command) -> io::Result<(HoldClient, Child)> {
        // The socket is made here, so that it can be connected to at once.
        let listener = listen(path)?;
        std::os::unix::process::CommandExt::process_group(command, 0);
        let child = command
            .stdin(Stdio::from(listener))
            .stdout(Stdio::null())
            .spawn()?;
        Ok((Self::connect(path)?, child))
    }

    /// Gives the holder a copy of a descriptor, in place of an older one of the same key.
    pub fn store(&self, key: &str, state: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        send(&self.socket, &message(STORE, key, state), Some(descriptor))?;
        self.confirmation()
    }

    /// Makes the holder close its copy.
    pub fn remove(&self, key: &str) -> io::Result<()> {
        send(&self.socket, &message(REMOVE, key, ""), None)?;
        self.confirmation()
    }

    /// Copies of everything that the holder has.
    pub fn list(&self) -> io::Result<Vec<Held>> {
        send(&self.socket, &message(LIST, "", ""), None)?;
        let mut held = Vec::new();
        loop {
            let received = receive(&self.socket)?;
            match (received.kind(), received.descriptor) {
                (Some(ENTRY), Some(descriptor)) => {
                    let (key, state) = parse(&received.bytes).ok_or(ErrorKind::InvalidData)?;
                    held.push(Held {
                        key,
                        state,
                        descriptor,
                    });
                }
                (Some(END), _) => return Ok(held),
                _ => return Err(ErrorKind::InvalidData.into()),
            }
        }
    }

    /// Makes the holder wait so many seconds for its next server, whatever it was started with. The
    /// error's kind is [`ErrorKind::BrokenPipe`] if the holder has just ended.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        let seconds = patience.as_secs().to_string();
        let answered = send(&self.socket, &message(PATIENCE, &seconds, ""), None)
            .and_then(|()| self.confirmation());
        answered.map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => ErrorKind::BrokenPipe.into(),
            _ => error,
        })
    }

    fn confirmation(&self) -> io::Result<()> {
        let received = receive(&self.socket)?;
        match received.kind() {
            Some(OK) => Ok(()),
            Some(REFUSED) => {
                let text = String::from_utf8_lossy(&received.bytes[1..]).into_owned();
                Err(io::Error::other(text))
            }
            _ => Err(ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Makes the holder's socket, in place of a dead one.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::SEQPACKET, None)?;
    rustix::fs::fchmod(&socket, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    socket.bind(&socket2::SockAddr::unix(path)?)?;
    socket.listen(MAX_CLIENTS as i32)?;
    Ok(socket.into())
}

/// The holder itself: serves until there is nothing left to do. `patience` is the longest time
/// without any client while something is held; `None` waits for ever.
pub fn run(listener: OwnedFd, patience: Option<Duration>) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&listener, true)?;
    let mut holder = Holder {
        listener,
        clients: Vec::new(),
        held: BTreeMap::new(),
        patience,
        alone_since: Instant::now(),
        had_client: false,
    };
    holder.serve()
}

struct Holder {
    listener: OwnedFd,
    clients: Vec<OwnedFd>,
    held: BTreeMap<String, (String, OwnedFd)>,
    patience: Option<Duration>,
    alone_since: Instant,
    had_client: bool,
}

impl Holder {
    fn serve(&mut self) -> io::Result<()> {
        loop {
            let left = self
                .patience
                .filter(|_| self.clients.is_empty())
                .map(|patience| patience.saturating_sub(self.alone_since.elapsed()));
            if left == Some(Duration::ZERO) {
                for (state, _) in self.held.values() {
                    // What comes behind the device's own words is the daemon's.
                    crate::block::end_waiting(state.split(';').next().unwrap_or_default());
                }
                return Ok(());
            }
            let ready = self.wait(left)?;
            for index in ready.into_iter().rev() {
                if !self.answer(index) {
                    self.clients.swap_remove(index);
                    self.alone_since = Instant::now();
                }
            }
            self.accept();
            if self.had_client && self.clients.is_empty() && self.held.is_empty() {
                return Ok(());
            }
        }
    }

    /// The indices of clients that can be read, ascending.
    fn wait(&self, left: Option<Duration>) -> io::Result<Vec<usize>> {
        let mut fds: Vec<PollFd<'_>> = self
            .clients
            .iter()
            .map(|client| PollFd::new(client, PollFlags::IN))
            .collect();
        fds.push(PollFd::new(&self.listener, PollFlags::IN));
        let timeout = left.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            // One more, so that the time is really over.
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let readable = |(index, fd): (usize, &PollFd<'_>)| {
            (index < self.clients.len() && !fd.revents().is_empty()).then_some(index)
        };
        Ok(fds.iter().enumerate().filter_map(readable).collect())
    }

    fn accept(&mut self) {
        while let Ok(client) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
            if self.clients.len() < MAX_CLIENTS {
                self.clients.push(client);
                self.had_client = true;
            }
        }
    }

    /// Answers one message; false if the client has gone.
    fn answer(&mut self, index: usize) -> bool {
        let client = &self.clients[index];
        let Ok(received) = receive(client) else {
            return false;
        };
        let parsed = parse(&received.bytes);
        let result = match (received.kind(), parsed, received.descriptor) {
            (None, _, _) => return false,
            (Some(STORE), Some((key, state)), Some(descriptor)) => {
                if self.held.len() < MAX_HELD || self.held.contains_key(&key) {
                    self.held.insert(key, (state, descriptor));
                    send(client, &[OK], None)
                } else {
                    let text = format!("{}the holder is full", char::from(REFUSED));
                    send(client, text.as_bytes(), None)
                }
            }
            (Some(REMOVE), Some((key, _)), _) => {
                self.held.remove(&key);
                send(client, &[OK], None)
            }
            (Some(LIST), _, _) => self.list(client),
            (Some(PATIENCE), Some((seconds, _)), _) => match seconds.parse() {
                Ok(seconds) if seconds > 0 => {
                    self.patience = Some(Duration::from_secs(seconds));
                    send(client, &[OK], None)
                }
                _ => {
                    let text = format!("{}not a number of seconds", char::from(REFUSED));
                    send(client, text.as_bytes(), None)
                }
            },
            _ => {
                let text = format!("{}unknown message", char::from(REFUSED));
                send(client, text.as_bytes(), None)
            }
        };
        result.is_ok()
    }

    fn list(&self, client: &OwnedFd) -> io::Result<()> {
        for (key, (state, descriptor)) in &self.held {
            send(
                client,
                &message(ENTRY, key, state),
                Some(descriptor.as_fd()),
            )?;
        }
        send(client, &[END], None)
    }
}

struct Received {
    bytes: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl Received {
    fn kind(&self) -> Option<u8> {
        self.bytes.first().copied()
    }
}

/// Kind, key and state: the key ends with a zero byte.
fn message(kind: u8, key: &str, state: &str) -> Vec<u8> {
    [&[kind], key.as_bytes(), &[0], state.as_bytes()].concat()
}

fn parse(bytes: &[u8]) -> Option<(String, String)> {
    let text = std::str::from_utf8(bytes.get(1..)?).ok()?;
    let (key, state) = text.split_once('\0')?;
    Some((key.into(), state.into()))
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    if bytes.len() > MAX_MESSAGE_LEN {
        return Err(ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    // A wait with a time limit is not begun again by the kernel after a signal, and an answer that is
    // not taken would be taken for that of the next message.
    let bytes = [IoSlice::new(bytes)];
    retry_on_intr(|| sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

fn receive(socket: &OwnedFd) -> io::Result<Received> {
    let mut bytes = vec![0; MAX_MESSAGE_LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let received = retry_on_intr(|| recvmsg(socket, &mut slices, &mut ancillary, flags))?;
    bytes.truncate(received.bytes);
    let mut descriptor = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            descriptor = descriptors.next();
        }
    }
    Ok(Received { bytes, descriptor })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::thread::JoinHandle;

    fn start(patience: Option<Duration>) -> (tempfile::TempDir, HoldClient, JoinHandle<()>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hold.sock");
        let listener = listen(&path).unwrap();
        let holder = std::thread::spawn(move || run(listener, patience).unwrap());
        let client = HoldClient::connect(&path).unwrap();
        (dir, client, holder)
    }

    #[test]
    fn what_is_stored_comes_back_alive_until_it_is_removed() {
        let (dir, client, holder) = start(None);
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        client.store("r0/0", "old", theirs.as_fd()).unwrap();
        client.store("r0/0", "1 2 3", theirs.as_fd()).unwrap();
        drop((client, theirs));

        let client = HoldClient::connect(&dir.path().join("hold.sock")).unwrap();
        let mut held = client.list().unwrap();
        assert_eq!(held.len(), 1);
        assert_eq!(
            (held[0].key.as_str(), held[0].state.as_str()),
            ("r0/0", "1 2 3")
        );
        let mut copy = std::os::unix::net::UnixStream::from(held.remove(0).descriptor);
        copy.write_all(b"x").unwrap();
        drop(copy);
        let mut byte = [0];
        ours.read_exact(&mut byte).unwrap();
        client.remove("r0/0").unwrap();
        assert_eq!(ours.read(&mut byte).unwrap(), 0, "the last copy is closed");
        assert!(client.list().unwrap().is_empty());
        drop(client);
        holder.join().unwrap();
    }

    #[test]
    fn a_holder_that_nobody_comes_back_to_lets_go() {
        let (_dir, client, holder) = start(Some(Duration::from_millis(20)));
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        client.store("r0/0", "", theirs.as_fd()).unwrap();
        drop((client, theirs));
        assert_eq!(ours.read(&mut [0]).unwrap(), 0);
        holder.join().unwrap();
    }

    #[test]
    fn the_next_server_may_want_another_patience() {
        let (_dir, client, holder) = start(None);
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        client.store("r0/0", "", theirs.as_fd()).unwrap();
        client.set_patience(Duration::from_secs(1)).unwrap();
        assert!(client.set_patience(Duration::ZERO).is_err());
        drop((client, theirs));
        assert_eq!(ours.read(&mut [0]).unwrap(), 0, "it waits for ever");
        holder.join().unwrap();
    }

    #[test]
    fn a_holder_that_ends_right_now_is_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hold.sock");
        // The socket of a process that takes nobody any more, and goes.
        let listener = listen(&path).unwrap();
        let client = HoldClient::connect(&path).unwrap();
        drop(listener);
        let error = client.set_patience(Duration::from_secs(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
    }

    #[test]
    fn nonsense_is_refused() {
        let (_dir, client, holder) = start(None);
        send(&client.socket, b"?", None).unwrap();
        assert!(
            client
                .confirmation()
                .unwrap_err()
                .to_string()
                .contains("unknown message")
        );
        send(&client.socket, &message(STORE, "k", ""), None).unwrap();
        assert!(
            client.confirmation().is_err(),
            "a store without a descriptor"
        );
        assert!(
            client
                .store(&"k".repeat(5000), "", client.socket.as_fd())
                .is_err()
        );
        drop(client);
        holder.join().unwrap();
    }
}
