//! The hand-over to a new process, over the control socket: the state as JSON, descriptors of
//! listeners, DRBD's sockets and spilled segments, then the buffered bytes. The new process answers when it has
//! everything; until then the old one can go on as before.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use socket2::Socket;

use super::{Reactor, Source};
use crate::core::frame::{Bytes, CHUNK_MAX};
use crate::core::handover::{HandedEngine, VERSION};
use crate::core::{Input, LinkId, LocalId};
use crate::daemon::Request;
use crate::mail::Mail;
use crate::spill::Handed;

/// Begins a hand-over; a refusal begins with `[`, as every answer of the control socket.
const MAGIC: [u8; 4] = *b"LSHO";
/// How long codec jobs may take to end, and each step of the transfer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Descriptors in one message.
const FDS_MAX: usize = 16;
/// Bytes of the state.
const STATE_MAX: u64 = 256 << 20;

/// What a descriptor is for.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum FdKind {
    Inside(u32),
    Outside(SocketAddr),
    Local(u64),
    Segment(u32),
}

#[derive(Serialize, Deserialize)]
struct State {
    engine: HandedEngine,
    fds: Vec<FdKind>,
    /// Keys of the segments, in their order among the descriptors.
    keys: Vec<[u8; 32]>,
}

/// What a running proxy has given.
pub(crate) struct Given {
    state: State,
    fds: Vec<OwnedFd>,
    pieces: Vec<Bytes>,
    stream: UnixStream,
}

impl Reactor {
    /// Gives everything away; afterwards this process has nothing to do any more. On an error
    /// everything goes on here.
    pub(super) fn hand_over(&mut self, stream: &UnixStream) -> Result<(), String> {
        let result = self.let_go(stream);
        if result.is_err() {
            let now = self.now();
            self.engine.thaw(now);
            self.perform();
            self.spread();
        }
        result
    }

    fn let_go(&mut self, stream: &UnixStream) -> Result<(), String> {
        self.recall()?;
        // What the shards had read and written until then is in the mail.
        while let Some(mail) = self.mailbox.take() {
            self.mail_meanwhile(mail)?;
        }
        let now = self.now();
        self.engine.freeze(now);
        self.perform();
        self.finish_jobs()?;
        self.give(stream).map_err(|error| error.to_string())
    }

    fn finish_jobs(&mut self) -> Result<(), String> {
        let end = Clock::now() + PATIENCE;
        while self.engine.is_busy() {
            let left = end.saturating_duration_since(Clock::now());
            let mail = self.mailbox.take_within(left);
            self.mail_meanwhile(mail.ok_or("the codec jobs do not end")?)?;
        }
        Ok(())
    }

    /// Mail that comes while everything is handed over.
    fn mail_meanwhile(&mut self, mail: Mail) -> Result<(), String> {
        match mail {
            Mail::Input(input) => {
                let now = self.now();
                self.engine.handle(now, input);
                self.perform();
            }
            Mail::News(news) => {
                self.news(news);
                self.perform();
            }
            Mail::Commands { reply, .. } => {
                // Who asked may have gone.
                let _ = reply.send(vec![Err("the proxy hands over to a new process".into())]);
            }
            Mail::Snapshot(reply) => {
                let _ = reply.send(Box::new(self.snapshot()));
            }
            Mail::HandOver(_, reply) => {
                let _ = reply.send(Err("another hand-over is under way".into()));
            }
            Mail::Stop => {
                self.stopping = true;
                return Err("the proxy stops".into());
            }
        }
        Ok(())
    }

    fn give(&self, mut stream: &UnixStream) -> std::io::Result<()> {
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let unwritten = |local: LocalId| {
            let sock = self.locals.get(&local);
            sock.map(super::LocalSock::unwritten).unwrap_or_default()
        };
        let (engine, pieces) = self.engine.give(self.now(), unwritten);
        let mut fds: Vec<(FdKind, BorrowedFd<'_>)> = Vec::new();
        for (id, (socket, _)) in &self.inside {
            fds.push((FdKind::Inside(id.0), socket.as_fd()));
        }
        for (addr, (socket, ..)) in &self.outside {
            fds.push((FdKind::Outside(*addr), socket.as_fd()));
        }
        for handed in engine.links.iter().flat_map(|link| &link.streams) {
            let sock = self.locals.get(&LocalId(handed.local));
            let sock = sock.ok_or_else(|| std::io::Error::other("a socket is missing"))?;
            fds.push((FdKind::Local(handed.local), sock.as_fd()));
        }
        let segments = match &self.spill {
            Some(spill) => spill.give()?,
            None => Vec::new(),
        };
        for segment in &segments {
            fds.push((FdKind::Segment(segment.number), segment.file.as_fd()));
        }
        let state = State {
            engine,
            keys: segments.iter().map(|segment| segment.key).collect(),
            fds: fds.iter().map(|(kind, _)| *kind).collect(),
        };
        let text = serde_json::to_vec(&state)?;
        let mut head = MAGIC.to_vec();
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&(text.len() as u64).to_le_bytes());
        stream.write_all(&head)?;
        stream.write_all(&text)?;
        for group in fds.chunks(FDS_MAX) {
            let group: Vec<BorrowedFd<'_>> = group.iter().map(|(_, fd)| *fd).collect();
            send_fds(stream, &group)?;
        }
        for piece in pieces {
            stream.write_all(&piece)?;
        }
        let mut answer = [0];
        stream.read_exact(&mut answer)
    }

    /// Continues what another process gave; this reactor must be new.
    pub(crate) fn take_over(&mut self, given: Given) -> Result<UnixStream, String> {
        let Given {
            state,
            fds,
            pieces,
            stream,
        } = given;
        let now = self.now();
        let unwritten = state.engine.unwritten(&pieces)?;
        self.engine
            .handle(now, Input::Wall(crate::wall::minute_of_week()));
        self.engine.take_over(now, &state.engine, pieces)?;
        let text = |error: std::io::Error| error.to_string();
        let needed = state.engine.spilled();
        let mut keys = state.keys.into_iter();
        let mut segments = Vec::new();
        for (kind, fd) in state.fds.iter().zip(fds) {
            if let FdKind::Segment(number) = *kind {
                let key = keys.next().ok_or("a segment's key is missing")?;
                let file = File::from(fd);
                let live = needed.get(&number).copied().unwrap_or(0);
                segments.push((Handed { number, key, file }, live));
                continue;
            }
            let socket = Socket::from(fd);
            match *kind {
                FdKind::Inside(id) => {
                    let id = LinkId(id);
                    let token = self.watch(&socket, Source::Inside(id)).map_err(text)?;
                    self.inside.insert(id, (socket, token));
                }
                FdKind::Outside(addr) => {
                    let links = state.engine.links.iter();
                    let users = links.filter(|link| link.my_outside == addr).count();
                    let token = self.watch(&socket, Source::Outside(addr)).map_err(text)?;
                    self.outside.insert(addr, (socket, token, users));
                }
                FdKind::Local(local) => {
                    let local = LocalId(local);
                    let rest = unwritten.get(&local).cloned().unwrap_or_default();
                    self.adopt_handed(local, socket, rest);
                }
                FdKind::Segment(_) => unreachable!("taken above"),
            }
        }
        for link in &state.engine.links {
            if !self.inside.contains_key(&link.id()) || !self.outside.contains_key(&link.my_outside)
            {
                return Err("a listener is missing in the hand-over".into());
            }
        }
        let has = |number: &u32| segments.iter().any(|(handed, _)| handed.number == *number);
        if !needed.keys().all(has) {
            return Err("a spilled segment is missing in the hand-over".into());
        }
        if let Some(spill) = &self.spill {
            spill.adopt(segments);
        }
        self.perform();
        Ok(stream)
    }
}

/// Asks the proxy behind a control socket for everything. `None`: nobody listens there.
pub(crate) fn ask(path: &Path) -> Result<Option<Given>, String> {
    let mut stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(format!("control socket {}: {error}", path.display())),
    };
    let request = Request {
        hand_over: true,
        ..Request::default()
    };
    receive(&mut stream, &request)
        .map_err(|error| format!("hand-over from {}: {error}", path.display()))
        .map(|(state, fds, pieces)| {
            Some(Given {
                state,
                fds,
                pieces,
                stream,
            })
        })
}

type Received = (State, Vec<OwnedFd>, Vec<Bytes>);

fn receive(stream: &mut UnixStream, request: &Request) -> std::io::Result<Received> {
    let wrong = |text: String| std::io::Error::new(ErrorKind::InvalidData, text);
    stream.set_read_timeout(Some(PATIENCE * 2))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut magic = [0; 4];
    stream.read_exact(&mut magic)?;
    if magic != MAGIC {
        let mut text = String::from_utf8_lossy(&magic).into_owned();
        stream.take(4096).read_to_string(&mut text)?;
        return Err(wrong(format!("the running proxy refuses: {}", text.trim())));
    }
    let mut head = [0; 12];
    stream.read_exact(&mut head)?;
    let (version, len) = head.split_at(4);
    let version = u32::from_le_bytes(version.try_into().expect("four of twelve bytes"));
    let len = u64::from_le_bytes(len.try_into().expect("eight of twelve bytes"));
    if version != VERSION || len > STATE_MAX {
        return Err(wrong(format!(
            "the running proxy hands over in form {version}, this one takes form {VERSION}"
        )));
    }
    let mut text = vec![0; len as usize];
    stream.read_exact(&mut text)?;
    let state: State = serde_json::from_slice(&text)?;
    let mut fds = Vec::new();
    while fds.len() < state.fds.len() {
        let before = fds.len();
        receive_fds(stream, &mut fds)?;
        if fds.len() == before {
            return Err(wrong("descriptors are missing".into()));
        }
    }
    let mut pieces = Vec::new();
    for len in state.engine.lengths() {
        // A socket's queue may be larger than a chunk; it is bounded by the window.
        if len > CHUNK_MAX << 8 {
            return Err(wrong(format!("a piece of {len} bytes")));
        }
        let mut piece = vec![0; len];
        stream.read_exact(&mut piece)?;
        pieces.push(Arc::new(piece.into()));
    }
    Ok((state, fds, pieces))
}

impl Given {
    /// How long the giving proxy had run.
    pub(crate) fn uptime(&self) -> Duration {
        Duration::from_millis(self.state.engine.uptime_ms)
    }

    /// Whether some of its bytes are on disk.
    pub(crate) fn has_spilled(&self) -> bool {
        !self.state.engine.spilled().is_empty()
    }

    /// How many connections come.
    pub(crate) fn count(&self) -> usize {
        self.state.engine.links.len()
    }
}

/// Tells the old process that it may end, and waits until it has let go.
pub(crate) fn confirm(mut stream: UnixStream) -> Result<(), String> {
    stream.write_all(b"1").map_err(|error| error.to_string())?;
    // Its end closes the stream; an error says the same.
    let _ = stream.read(&mut [0]);
    Ok(())
}

fn send_fds(stream: &UnixStream, fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(std::io::Error::other("too many descriptors in a message"));
    }
    sendmsg(
        stream,
        &[IoSlice::new(b"f")],
        &mut control,
        SendFlags::empty(),
    )?;
    Ok(())
}

fn receive_fds(stream: &UnixStream, fds: &mut Vec<OwnedFd>) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let got = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if got.bytes != 1 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    Ok(())
}
