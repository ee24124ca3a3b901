//! TCP sockets as wire.md, 2.2 and 2.7 want them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use lockstep_core::event::Stream;
use lockstep_core::options::NetOptions;
use lockstep_core::time::Duration;
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, TcpKeepalive, Type};

use super::first::Framing;
use super::info::TcpInfo;
use super::namespace::NetNamespace;
use crate::ring::Fd;

/// A pair of addresses over which a peer can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Path {
    /// Own address and port, to listen on and to connect from.
    pub local: SocketAddr,
    /// The peer's address and port.
    pub peer: SocketAddr,
}

/// How a peer is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerNet {
    /// Paths in the configuration's order; alternatives, or all used at once.
    pub paths: Vec<Path>,
    /// `load-balance-paths`: all paths are used at once.
    pub load_balance_paths: bool,
    /// Where their addresses are, if not in the process's own namespace.
    pub namespace: Option<NetNamespace>,
    /// `connect-int`.
    pub connect_int: Duration,
    /// `ping-int`: a path must show that it works about so often.
    pub ping_int: Duration,
    /// `ping-timeout`.
    pub ping_timeout: Duration,
    /// `socket-check-timeout`; zero means `ping-timeout`.
    pub socket_check: Duration,
    /// `timeout`: a send without any progress for so long …
    pub send_timeout: Duration,
    /// … and so many times (`ko-count`) breaks the link; 0 never does.
    pub ko_count: u32,
    /// `sndbuf-size` in bytes; 0 leaves it to the kernel.
    pub send_buffer_bytes: usize,
    /// `rcvbuf-size` in bytes; 0 leaves it to the kernel.
    pub receive_buffer_bytes: usize,
}

impl PeerNet {
    /// From the options of the `net` section; buffers are left to the kernel.
    pub fn new(paths: Vec<Path>, net: &NetOptions) -> PeerNet {
        PeerNet {
            paths,
            load_balance_paths: net.load_balance_paths,
            namespace: None,
            connect_int: Duration::from_secs(u64::from(net.connect_int_s)),
            ping_int: Duration::from_secs(u64::from(net.ping_int_s)),
            ping_timeout: Duration::from_tenths(u64::from(net.ping_timeout_tenths)),
            socket_check: Duration::from_tenths(u64::from(net.socket_check_timeout_tenths)),
            send_timeout: Duration::from_tenths(u64::from(net.timeout_tenths)),
            ko_count: net.ko_count,
            send_buffer_bytes: 0,
            receive_buffer_bytes: 0,
        }
    }

    /// The same for each path alone.
    pub fn each_path(&self) -> impl Iterator<Item = PeerNet> + '_ {
        self.paths.iter().map(|path| PeerNet {
            paths: vec![*path],
            ..self.clone()
        })
    }

    /// How the bytes on its connections are framed.
    pub fn framing(&self) -> Framing {
        if self.load_balance_paths {
            Framing::Chunks
        } else {
            Framing::Plain
        }
    }

    /// How long both connections must stand before they count.
    pub fn check_time(&self) -> Duration {
        if self.socket_check.0 == 0 {
            self.ping_timeout
        } else {
            self.socket_check
        }
    }

    /// How long a send may make no progress; `None` is for ever.
    pub fn stall_time(&self, stream: Stream) -> Option<Duration> {
        match stream {
            Stream::Data if self.ko_count == 0 => None,
            Stream::Data => Some(self.send_timeout.times(u64::from(self.ko_count))),
            Stream::Control => Some(self.send_timeout),
        }
    }
}

/// Whether the own address is the larger one: bytes of the kernel's structures, port first.
pub fn address_is_larger(own: SocketAddr, peer: SocketAddr) -> bool {
    let (own, peer) = (kernel_bytes(own), kernel_bytes(peer));
    let len = own.len().min(peer.len());
    own[..len] > peer[..len]
}

fn kernel_bytes(address: SocketAddr) -> Vec<u8> {
    let family = match address {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    let mut bytes = (family as u16).to_ne_bytes().to_vec();
    bytes.extend(address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            bytes.extend(v4.ip().octets());
            bytes.extend([0; 8]);
        }
        SocketAddr::V6(v6) => {
            bytes.extend(v6.flowinfo().to_be_bytes());
            bytes.extend(v6.ip().octets());
            bytes.extend(v6.scope_id().to_ne_bytes());
        }
    }
    bytes
}

/// A socket that listens on `local`.
pub(crate) fn listen(
    local: SocketAddr,
    send_bytes: usize,
    receive_bytes: usize,
) -> io::Result<Socket> {
    let socket = new(local, send_bytes, receive_bytes)?;
    socket.set_reuse_address(true)?;
    if local.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&SockAddr::from(local))?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// A socket from which to connect on `path`: bound to the own address with any port.
pub(crate) fn for_connect(path: &Path, net: &PeerNet) -> io::Result<Fd> {
    NetNamespace::of(net.namespace.as_ref(), || {
        let socket = new(path.local, net.send_buffer_bytes, net.receive_buffer_bytes)?;
        let mut from = path.local;
        from.set_port(0);
        socket.bind(&SockAddr::from(from))?;
        Ok(std::sync::Arc::new(OwnedFd::from(socket)))
    })
}

fn new(local: SocketAddr, send_bytes: usize, receive_bytes: usize) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(local),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    if send_bytes > 0 {
        socket.set_send_buffer_size(send_bytes)?;
    }
    if receive_bytes > 0 {
        socket.set_recv_buffer_size(receive_bytes)?;
    }
    Ok(socket)
}

/// Sets the options of an established stream.
pub(crate) fn prepare_stream(fd: &impl AsFd, stream: Stream) -> io::Result<()> {
    let socket = SockRef::from(fd);
    socket.set_tcp_nodelay(true)?;
    let priority = match stream {
        Stream::Data => {
            let interval = std::time::Duration::from_secs(23);
            let keepalive = TcpKeepalive::new()
                .with_time(interval)
                .with_interval(interval)
                .with_retries(9);
            socket.set_tcp_keepalive(&keepalive)?;
            4
        }
        Stream::Control => 6,
    };
    // Priority 6 needs a capability outside of a container; it only orders queues.
    let _ = set_priority(fd, priority);
    Ok(())
}

/// Makes the kernel find out within about `ping-int` and `ping-timeout` that a path is broken over
/// which nothing is sent. It asks twice in that time, so that what is sent then has time for its
/// acknowledgement before the path counts as silent.
pub(crate) fn watch(fd: &impl AsFd, ping_int: Duration, ping_timeout: Duration) -> io::Result<()> {
    let seconds = |time: Duration| std::time::Duration::from_secs(time.0.div_ceil(1_000_000_000));
    let keepalive = TcpKeepalive::new()
        .with_time(seconds(Duration(ping_int.0 / 2)))
        .with_interval(seconds(ping_timeout))
        .with_retries(WATCH_PROBES);
    SockRef::from(fd).set_tcp_keepalive(&keepalive)
}

/// Nothing has been acknowledged for so long although something was sent, again and again.
pub(crate) fn is_silent(fd: &impl AsFd, silence: Duration) -> bool {
    TcpInfo::of(fd).is_ok_and(|info| {
        let since_ack = Duration::from_millis(u64::from(info.since_acknowledgement_ms));
        info.unacknowledged_segments > 0 && info.retransmissions > 0 && since_ack >= silence
    })
}

/// How full a socket's send buffer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SendRoom {
    /// Bytes that it has.
    pub(crate) used: usize,
    /// Bytes that it may get.
    pub(crate) free: usize,
}

impl SendRoom {
    /// It may wait for ever.
    pub(crate) const ENDLESS: SendRoom = SendRoom {
        used: 0,
        free: usize::MAX,
    };

    /// It is to get so many bytes.
    pub(crate) fn take(&mut self, bytes: usize) {
        if *self != SendRoom::ENDLESS {
            self.used += bytes;
            self.free = self.free.saturating_sub(bytes);
        }
    }
}

/// Asks for a socket's send buffer. The kernel lets a buffer grow only when it was too small for a
/// while, so a small one may get more than it takes without waiting.
pub(crate) fn send_room(fd: &impl AsFd) -> SendRoom {
    /// Place of the buffer's size in `SO_MEMINFO`.
    const SIZE: usize = 3;
    /// Place of what is used of it.
    const USED: usize = 5;
    let raw = fd.as_fd().as_raw_fd();
    let mut words = [0u32; 9];
    let mut size = size_of_val(&words) as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes, which `words` has, and any bytes are valid.
    let result = unsafe {
        let to = words.as_mut_ptr().cast();
        libc::getsockopt(raw, libc::SOL_SOCKET, libc::SO_MEMINFO, to, &raw mut size)
    };
    if result < 0 {
        return SendRoom::default();
    }
    SendRoom {
        used: words[USED] as usize,
        free: words[SIZE].max(SEND_ROOM_MIN).saturating_sub(words[USED]) as usize,
    }
}

/// Bytes that were sent and are not acknowledged.
pub(crate) fn unacknowledged(fd: &impl AsFd) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: the request writes one `int`, which `count` is.
    let result = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
    if result < 0 { 0 } else { count.max(0) as usize }
}

fn set_priority(fd: &impl AsFd, priority: libc::c_int) -> io::Result<()> {
    let raw = fd.as_fd().as_raw_fd();
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    let value = &raw const priority;
    // SAFETY: the option takes one `int`, which `value` points to.
    let result =
        unsafe { libc::setsockopt(raw, libc::SOL_SOCKET, libc::SO_PRIORITY, value.cast(), size) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Whether the connection is in TCP state ESTABLISHED.
pub(crate) fn is_established(fd: &impl AsFd) -> bool {
    const ESTABLISHED: u8 = 1;
    let mut state = 0u8;
    let mut size = size_of::<u8>() as libc::socklen_t;
    let raw = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `size` bytes, and the state is the first.
    let result = unsafe {
        let to = (&raw mut state).cast();
        libc::getsockopt(raw, libc::IPPROTO_TCP, libc::TCP_INFO, to, &raw mut size)
    };
    result == 0 && size > 0 && state == ESTABLISHED
}

/// The address as it is compared: IPv4 addresses that came over an IPv6 socket are IPv4 addresses.
pub(crate) fn plain_ip(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// Bytes that a send buffer is given in any case.
const SEND_ROOM_MIN: u32 = 256 << 10;
/// So many unanswered probes mean that a path is broken.
const WATCH_PROBES: u32 = 3;
/// Twice the largest number of peers.
const BACKLOG: i32 = 64;

#[cfg(test)]
mod tests {
    use super::address_is_larger;

    #[test]
    fn the_port_is_compared_before_the_address() {
        let larger = |a: &str, b: &str| address_is_larger(a.parse().unwrap(), b.parse().unwrap());
        assert!(larger("10.0.0.1:7790", "10.0.0.2:7789"));
        assert!(!larger("10.0.0.2:7789", "10.0.0.1:7790"));
        assert!(larger("10.0.0.2:7789", "10.0.0.1:7789"));
        // Big-endian: 0x0100 is larger than 0x00ff.
        assert!(larger("10.0.0.1:256", "10.0.0.1:255"));
        assert!(larger("[fe80::2]:7789", "[fe80::1]:7789"));
        assert!(!larger("10.0.0.1:7789", "10.0.0.1:7789"));
    }
}
