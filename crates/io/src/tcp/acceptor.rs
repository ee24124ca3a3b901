//! Listeners, shared by everything in the process that waits for peers on the same address.
//!
//! One thread accepts; who gets a connection is decided by the listening address, in its network
//! namespace, and the peer's IP address alone (wire.md, 2.2). A listener exists only while somebody waits on it.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use socket2::Socket;

use super::namespace::NetNamespace;
use super::socket::{listen, plain_ip};

/// Takes a connection of the peer. Called on the acceptor's thread; must not block.
pub type Route = Box<dyn Fn(OwnedFd) + Send>;

/// Why one cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address cannot be listened on, at least not now.
    #[error("cannot listen on {local}: {source}")]
    Listen {
        /// The address.
        local: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// Another connection waits for the same peer on the same address.
    #[error("{local}: another connection waits for {peer} there already; give it another port")]
    Taken {
        /// The address.
        local: SocketAddr,
        /// The peer.
        peer: IpAddr,
    },
}

/// All listeners of a process.
#[derive(Clone)]
pub struct Acceptor {
    owner: Arc<Owner>,
}

/// Stops the thread with the last handle.
struct Owner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    epoll: OwnedFd,
    /// Wakes the thread to its end.
    stop: OwnedFd,
}

#[derive(Default)]
struct State {
    listeners: HashMap<Place, Listener>,
    /// Their places by the number that epoll tells.
    places: HashMap<u64, Place>,
    next: u64,
    stop: bool,
}

/// An address in a network namespace; none is the process's own.
type Place = (Option<NetNamespace>, SocketAddr);

struct Listener {
    number: u64,
    socket: Arc<Socket>,
    routes: HashMap<IpAddr, (u64, Route)>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The tables are changed by single insertions and removals, so they are always whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What epoll tells of [`Shared::stop`]; listeners have other numbers.
const STOP: u64 = u64::MAX;
/// Listeners that are looked at in one turn.
const EVENTS: usize = 256;

impl Acceptor {
    /// Starts the thread.
    pub fn new() -> io::Result<Acceptor> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            &stop,
            epoll::EventData::new_u64(STOP),
            epoll::EventFlags::IN,
        )?;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            epoll,
            stop,
        });
        let thread = std::thread::Builder::new().name("lockstep-accept".into());
        let thread = thread.spawn({
            let shared = shared.clone();
            move || run(&shared)
        })?;
        Ok(Acceptor {
            owner: Arc::new(Owner {
                shared,
                thread: Some(thread),
            }),
        })
    }

    /// Listens on `local` for `peer`, until the guard is dropped.
    pub fn listen(
        &self,
        namespace: Option<&NetNamespace>,
        local: SocketAddr,
        peer: IpAddr,
        send_bytes: usize,
        receive_bytes: usize,
        route: Route,
    ) -> Result<ListenGuard, ListenError> {
        let peer = plain_ip(peer);
        let place = (namespace.cloned(), local);
        let shared = &self.owner.shared;
        let mut state = shared.lock();
        let id = state.next;
        state.next += 1;
        if let Some(listener) = state.listeners.get_mut(&place) {
            if listener.routes.contains_key(&peer) {
                return Err(ListenError::Taken { local, peer });
            }
            listener.routes.insert(peer, (id, route));
        } else {
            let socket = NetNamespace::of(namespace, || listen(local, send_bytes, receive_bytes))
                .map_err(|source| ListenError::Listen { local, source })?;
            epoll::add(
                &shared.epoll,
                &socket,
                epoll::EventData::new_u64(id),
                epoll::EventFlags::IN,
            )
            .map_err(|error| ListenError::Listen {
                local,
                source: error.into(),
            })?;
            let listener = Listener {
                number: id,
                socket: Arc::new(socket),
                routes: HashMap::from([(peer, (id, route))]),
            };
            state.listeners.insert(place.clone(), listener);
            state.places.insert(id, place.clone());
        }
        drop(state);
        Ok(ListenGuard {
            owner: self.owner.clone(),
            place,
            peer,
            id,
        })
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        // It is full only if the thread is being woken already.
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// Keeps a listener open for one peer.
pub struct ListenGuard {
    owner: Arc<Owner>,
    place: Place,
    peer: IpAddr,
    id: u64,
}

impl Drop for ListenGuard {
    fn drop(&mut self) {
        let shared = &self.owner.shared;
        let mut state = shared.lock();
        let Some(listener) = state.listeners.get_mut(&self.place) else {
            return;
        };
        if listener
            .routes
            .get(&self.peer)
            .is_some_and(|(id, _)| *id == self.id)
        {
            listener.routes.remove(&self.peer);
        }
        if listener.routes.is_empty() {
            // The thread may still hold the socket; this ends the listening now, so that the
            // address is free at once and peers are refused.
            let _ = epoll::delete(&shared.epoll, &*listener.socket);
            let _ = listener.socket.shutdown(std::net::Shutdown::Both);
            let number = listener.number;
            state.listeners.remove(&self.place);
            state.places.remove(&number);
        }
    }
}

fn run(shared: &Shared) {
    let mut events = Vec::with_capacity(EVENTS);
    loop {
        events.clear();
        // An error means a signal: it looks again.
        let _ = epoll::wait(&shared.epoll, spare_capacity(&mut events), None);
        let mut full = Full::No;
        for event in &events {
            let found = {
                let state = shared.lock();
                if state.stop {
                    return;
                }
                let place = state.places.get(&event.data.u64());
                place.and_then(|place| {
                    Some((place.clone(), state.listeners.get(place)?.socket.clone()))
                })
            };
            // Without one it went while it was being told of.
            if let Some((place, socket)) = found
                && accept_all(shared, &place, &socket) == Full::Yes
            {
                full = Full::Yes;
            }
        }
        if full == Full::Yes {
            // Out of descriptors or memory: ask again later instead of at once.
            let pause = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            let _ = poll(
                &mut [PollFd::new(&shared.stop, PollFlags::IN)],
                Some(&pause),
            );
        }
    }
}

#[derive(PartialEq, Eq)]
enum Full {
    Yes,
    No,
}

fn accept_all(shared: &Shared, place: &Place, socket: &Socket) -> Full {
    let local = place.1;
    // A bound, so that a flood on one address leaves the others their turn.
    for _ in 0..64 {
        let (stream, from) = match socket.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                return match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => {
                        tracing::warn!(%error, %local, "cannot accept connections");
                        Full::Yes
                    }
                    _ => Full::No,
                };
            }
        };
        let Some(peer) = from.as_socket().map(|address| plain_ip(address.ip())) else {
            continue;
        };
        let state = shared.lock();
        match state
            .listeners
            .get(place)
            .and_then(|listener| listener.routes.get(&peer))
        {
            Some((_, route)) => route(OwnedFd::from(stream)),
            // Dropping closes it without a byte, as for every stranger.
            None => tracing::debug!(%local, %peer, "nobody waits for this peer here"),
        }
    }
    Full::No
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{SocketAddr, TcpStream};
    use std::sync::mpsc::{Sender, channel};

    use super::{Acceptor, ListenError, Route};
    use crate::tcp::test_address::unique;

    fn route(to: &Sender<&'static str>, name: &'static str) -> Route {
        let to = to.clone();
        Box::new(move |_| to.send(name).unwrap())
    }

    #[test]
    fn a_listener_is_shared_and_the_peer_address_decides() {
        let acceptor = Acceptor::new().unwrap();
        let local = unique();
        let (sender, receiver) = channel();
        let ip = |n: u8| [127, 0, 0, n].into();
        let one = acceptor
            .listen(None, local, ip(1), 0, 0, route(&sender, "one"))
            .unwrap();
        let two = acceptor
            .listen(None, local, ip(2), 0, 0, route(&sender, "two"))
            .unwrap();
        let taken = acceptor.listen(None, local, ip(2), 0, 0, route(&sender, "x"));
        assert!(matches!(taken, Err(ListenError::Taken { .. })));
        let connect = |n: u8| {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
            let socket = socket.unwrap();
            socket.bind(&SocketAddr::new(ip(n), 0).into()).unwrap();
            socket
                .connect(&local.into())
                .map(|()| TcpStream::from(socket))
        };
        let _a = connect(2).unwrap();
        assert_eq!(receiver.recv().unwrap(), "two");
        let _b = connect(1).unwrap();
        assert_eq!(receiver.recv().unwrap(), "one");
        // A stranger is closed without a byte.
        assert!(matches!(connect(3).unwrap().read(&mut [0]), Ok(0) | Err(_)));
        drop(two);
        assert!(matches!(connect(2).unwrap().read(&mut [0]), Ok(0) | Err(_)));
        drop(one);
        assert_eq!(
            connect(1).unwrap_err().kind(),
            std::io::ErrorKind::ConnectionRefused
        );
        // The address is free at once.
        let again = acceptor
            .listen(None, local, ip(1), 0, 0, route(&sender, "again"))
            .unwrap();
        let _c = connect(1).unwrap();
        assert_eq!(receiver.recv().unwrap(), "again");
        drop(again);
    }
}
