//! A line between two programs: a TCP relay on this host with delay, rate, stalls and cuts.
//!
//! It forwards bytes unchanged. Packet loss is not made here, for TCP hides it from a relay; a
//! stall is what loss looks like from above.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::spawn;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

/// What a line does with bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineState {
    /// Carries them.
    Up,
    /// Holds them back; connections stay open and nobody is told, as with a pulled cable.
    Stalled,
    /// Resets every connection, also new ones, as a router without a route does.
    Down,
}

/// One listening port and the target that it leads to. Ends with its connections when dropped.
#[derive(Debug)]
pub struct Line {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    source: Option<Ipv4Addr>,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug)]
struct Inner {
    state: LineState,
    stopped: bool,
    delay: Duration,
    bytes_per_second: Option<u64>,
    /// When each direction has carried what it was given: towards the target, and back.
    free_at: [Instant; 2],
    open: Vec<TcpStream>,
    carried_bytes: [u64; 2],
}

impl Line {
    /// A line from a free port of 127.0.0.1, below or above `bound` as `side` says.
    ///
    /// DRBD compares ports to decide who opens which connection first, so tests choose the side.
    pub fn beside(side: Side, bound: u16, target: SocketAddr) -> Result<Line> {
        // Ephemeral ports begin above; the process' number keeps parallel tests apart.
        let first = bound / 2 + (std::process::id() % 1000) as u16;
        for step in 0..2000 {
            let port = match side {
                Side::Below => first + step % (bound - first),
                Side::Above => bound + first + step,
            };
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            if let Ok(listener) = TcpListener::bind(address) {
                return Line::with(listener, target, None);
            }
        }
        bail!("no free port {side:?} {bound}");
    }

    /// A line from `listen` to `target`, which sees `source` as its peer's address.
    pub fn new(listen: SocketAddr, target: SocketAddr, source: Option<Ipv4Addr>) -> Result<Line> {
        let listener = TcpListener::bind(listen).with_context(|| format!("line at {listen}"))?;
        Line::with(listener, target, source)
    }

    fn with(listener: TcpListener, target: SocketAddr, source: Option<Ipv4Addr>) -> Result<Line> {
        let address = listener.local_addr()?;
        let now = Instant::now();
        let shared = Arc::new(Shared {
            target,
            source,
            inner: Mutex::new(Inner {
                state: LineState::Up,
                stopped: false,
                delay: Duration::ZERO,
                bytes_per_second: None,
                free_at: [now, now],
                open: Vec::new(),
                carried_bytes: [0, 0],
            }),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        spawn(move || accept(&listener, &accepting));
        Ok(Line { address, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Delay of each direction, for bytes that arrive from now on.
    pub fn set_delay(&self, delay: Duration) {
        self.shared.inner().delay = delay;
    }

    /// What each direction carries at most, all connections together; `None` is no limit.
    pub fn set_rate(&self, bytes_per_second: Option<u64>) {
        self.shared.inner().bytes_per_second = bytes_per_second;
    }

    /// Cuts, stalls or mends the line.
    pub fn set_state(&self, state: LineState) {
        let mut inner = self.shared.inner();
        inner.state = state;
        if state == LineState::Down {
            close_all(&mut inner);
        }
        self.shared.changed.notify_all();
    }

    /// Bytes carried towards the target and back.
    pub fn carried_bytes(&self) -> [u64; 2] {
        self.shared.inner().carried_bytes
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let mut inner = self.shared.inner();
        inner.stopped = true;
        close_all(&mut inner);
        drop(inner);
        self.shared.changed.notify_all();
        // Wakes the thread that accepts; if that fails it has ended already.
        let _ = TcpStream::connect(self.address);
    }
}

/// Which ports [`Line::beside`] takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Smaller ones.
    Below,
    /// Greater ones.
    Above,
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dial(&self) -> Result<TcpStream> {
        let Some(source) = self.source else {
            return Ok(TcpStream::connect(self.target)?);
        };
        let fd = socket(AddressFamily::INET, SocketType::STREAM, None)?;
        bind(&fd, &SocketAddr::new(IpAddr::V4(source), 0))?;
        connect(&fd, &self.target)?;
        Ok(TcpStream::from(fd))
    }

    /// Waits for the line's capacity; answers when the bytes arrive at the far end.
    fn arrival(&self, direction: usize, bytes: usize) -> Instant {
        let mut inner = self.inner();
        let now = Instant::now();
        let delay = inner.delay;
        let Some(rate) = inner.bytes_per_second else {
            return now + delay;
        };
        let start = inner.free_at[direction].max(now);
        let end = start + Duration::from_secs_f64(bytes as f64 / rate as f64);
        inner.free_at[direction] = end;
        drop(inner);
        // The reader is held, so that a queue builds up with the sender and not in the line.
        std::thread::sleep(end.saturating_duration_since(now));
        end + delay
    }

    /// Blocks while the line is stalled; false when it has ended.
    fn may_pass(&self) -> bool {
        let mut inner = self.inner();
        while inner.state == LineState::Stalled && !inner.stopped {
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
        !inner.stopped && inner.state == LineState::Up
    }
}

fn close_all(inner: &mut Inner) {
    for stream in inner.open.drain(..) {
        // One that is closed already is as good.
        let _ = stream.shutdown(Shutdown::Both);
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for near in listener.incoming() {
        if shared.inner().stopped {
            return;
        }
        let Ok(near) = near else { continue };
        let shared = Arc::clone(shared);
        // Dialling may take long and must not hold up the next one.
        spawn(move || {
            if let Err(error) = relay(near, &shared) {
                eprintln!("line to {}: {error:#}", shared.target);
            }
        });
    }
}

fn relay(near: TcpStream, shared: &Arc<Shared>) -> Result<()> {
    if !shared.may_pass() {
        return Ok(());
    }
    // A target that refuses closes the near side, which is the refusal passed on.
    let Ok(far) = shared.dial() else {
        return Ok(());
    };
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
    }
    {
        let mut inner = shared.inner();
        if inner.state == LineState::Down || inner.stopped {
            return Ok(());
        }
        inner.open.push(near.try_clone()?);
        inner.open.push(far.try_clone()?);
    }
    for (direction, from, to) in [(0, &near, &far), (1, &far, &near)] {
        let (from, to) = (from.try_clone()?, to.try_clone()?);
        let (sender, receiver) = sync_channel(QUEUE_PIECES);
        let (reading, writing) = (Arc::clone(shared), Arc::clone(shared));
        spawn(move || read(from, &sender, direction, &reading));
        spawn(move || write(to, &receiver, direction, &writing));
    }
    Ok(())
}

fn read(
    mut from: TcpStream,
    sender: &SyncSender<(Instant, Vec<u8>)>,
    direction: usize,
    shared: &Shared,
) {
    let mut buffer = [0; PIECE_BYTES];
    // An error ends the connection as its orderly end does: the writer closes the other side.
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let at = shared.arrival(direction, count);
        if sender.send((at, buffer[..count].to_vec())).is_err() {
            return;
        }
    }
}

fn write(
    mut to: TcpStream,
    receiver: &Receiver<(Instant, Vec<u8>)>,
    direction: usize,
    shared: &Shared,
) {
    while let Ok((at, bytes)) = receiver.recv() {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        if !shared.may_pass() || to.write_all(&bytes).is_err() {
            break;
        }
        shared.inner().carried_bytes[direction] += bytes.len() as u64;
    }
    // Half an end is passed on as half an end.
    let _ = to.shutdown(Shutdown::Write);
}

/// Bytes read at once; small, so that connections share a slow line fairly.
const PIECE_BYTES: usize = 8 << 10;

/// Pieces under way per connection and direction: 8 MiB.
const QUEUE_PIECES: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(line: &Line, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let near = TcpStream::connect(line.address()).unwrap();
        let (far, _) = listener.accept().unwrap();
        (near, far)
    }

    #[test]
    fn a_line_carries_stalls_and_cuts() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        let source = Ipv4Addr::new(127, 9, 9, 9);
        let line = Line::new("127.0.0.1:0".parse().unwrap(), target, Some(source)).unwrap();
        let (mut near, mut far) = pair(&line, &listener);
        assert_eq!(far.peer_addr().unwrap().ip(), IpAddr::V4(source));
        let mut got = [0; 4];
        near.write_all(b"ping").unwrap();
        far.read_exact(&mut got).unwrap();
        line.set_state(LineState::Stalled);
        near.write_all(b"held").unwrap();
        far.set_read_timeout(Some(Duration::from_millis(50)))
            .unwrap();
        assert!(far.read(&mut got).is_err());
        far.set_read_timeout(None).unwrap();
        line.set_state(LineState::Up);
        far.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"held");
        line.set_state(LineState::Down);
        assert_eq!(near.read(&mut got).unwrap_or(0), 0);
        assert_eq!(far.read(&mut got).unwrap_or(0), 0);
    }

    #[test]
    fn rate_and_delay_hold() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        let line = Line::beside(Side::Below, 7788, target).unwrap();
        assert!(line.address().port() < 7788);
        line.set_rate(Some(1_000_000));
        line.set_delay(Duration::from_millis(50));
        let (mut near, mut far) = pair(&line, &listener);
        let begin = Instant::now();
        near.write_all(&vec![1; 200_000]).unwrap();
        far.read_exact(&mut vec![0; 200_000]).unwrap();
        // At least: other work on the machine can only make it longer.
        assert!(begin.elapsed() >= Duration::from_millis(245));
    }
}
