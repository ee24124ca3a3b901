//! Making links: listeners, attempts to connect, first packets, all steered by the pairing.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use lockstep_core::event::Stream;
use lockstep_core::time::{Duration, Instant};
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{self, Dialect, Packet};
use socket2::{SockAddr, SockRef};

use super::mailbox::Message;
use super::{Engine, Owner, Shard, TimerKey};
use crate::arena::Key;
use crate::ring::{Done, Fd, Memory, Op, OpKey};
use crate::tcp::first::Framing;
use crate::tcp::pairing::{Action, Pairing, PairingConfig, SocketId};
use crate::tcp::{ListenGuard, Path, PeerNet, address_is_larger, socket};
use crate::timers::Armed;

/// The attempts to get a link to one peer.
pub(super) struct Connecting {
    resource: Key,
    peer: NodeId,
    /// The link that the path is to join.
    joins: Option<Key>,
    net: PeerNet,
    pairing: Pairing,
    /// One per path; `None` where listening has not succeeded yet.
    listeners: Vec<Option<ListenGuard>>,
    /// When listening is tried again.
    listen_again: Option<Instant>,
    sockets: BTreeMap<SocketId, Fd>,
    next_socket: u64,
    attempt: Option<Attempt>,
    arrivals: Vec<Arrival>,
    armed: Armed,
}

/// An own attempt to connect.
struct Attempt {
    fd: Fd,
    op: OpKey,
    until: Instant,
}

/// A connection of the peer whose first packet has not come yet.
struct Arrival {
    fd: Fd,
    path: usize,
    bytes: Vec<u8>,
    op: OpKey,
    until: Instant,
}

/// Connections of one peer that wait for their first packet; more are closed.
const ARRIVALS_MAX: usize = 8;
const FIRST_PACKET_BYTES: usize = 8;

impl Connecting {
    fn deadline(&self) -> Option<Instant> {
        let arrivals = self.arrivals.iter().map(|arrival| arrival.until);
        let attempt = self.attempt.as_ref().map(|attempt| attempt.until);
        let times = [self.pairing.deadline(), self.listen_again, attempt];
        times.into_iter().flatten().chain(arrivals).min()
    }

    /// The paths that are tried.
    pub(super) fn paths(&self) -> &[Path] {
        &self.net.paths
    }

    fn keep(&mut self, fd: Fd) -> SocketId {
        let id = SocketId(self.next_socket);
        self.next_socket += 1;
        self.sockets.insert(id, fd);
        id
    }

    fn alive(sockets: &BTreeMap<SocketId, Fd>) -> impl Fn(SocketId) -> bool + '_ {
        |id| sockets.get(&id).is_some_and(socket::is_established)
    }
}

impl<E: Engine> Shard<E> {
    /// The core wants a link to the peer.
    pub(super) fn connect(&mut self, resource: Key, peer: NodeId) {
        let Some(slot) = self.resources.get_mut(resource) else {
            return;
        };
        slot.connecting.entry(peer).or_default();
        self.begin_connecting(resource, peer);
    }

    /// The core does not want one any more.
    pub(super) fn stop_connecting(&mut self, resource: Key, peer: NodeId) {
        let Some(slot) = self.resources.get_mut(resource) else {
            return;
        };
        for key in slot.connecting.remove(&peer).unwrap_or_default() {
            self.remove_connecting(key);
        }
    }

    /// The peer's paths or options changed; attempts start anew, and a link stays unless its path
    /// is gone, or the last one of several.
    pub(super) fn set_peer(&mut self, resource: Key, peer: NodeId, net: PeerNet) {
        let Some(slot) = self.resources.get_mut(resource) else {
            return;
        };
        slot.nets.insert(peer, net.clone());
        if let Some(connecting) = slot.connecting.get_mut(&peer) {
            for key in std::mem::take(connecting) {
                self.remove_connecting(key);
            }
            self.begin_connecting(resource, peer);
        }
        self.follow_paths(resource, peer, &net);
    }

    fn begin_connecting(&mut self, resource: Key, peer: NodeId) {
        let Some(slot) = self.resources.get_mut(resource) else {
            return;
        };
        let (Some(net), Some([])) = (
            slot.nets.get(&peer),
            slot.connecting.get(&peer).map(Vec::as_slice),
        ) else {
            return;
        };
        if net.paths.is_empty() {
            tracing::warn!(resource = slot.name, peer = peer.0, "the peer has no path");
            return;
        }
        let attempts = if net.load_balance_paths {
            net.each_path().collect()
        } else {
            vec![net.clone()]
        };
        let keys: Vec<Key> = attempts
            .into_iter()
            .map(|net| self.new_connecting(resource, peer, net, None))
            .collect();
        if let Some(slot) = self.resources.get_mut(resource) {
            slot.connecting.insert(peer, keys.clone());
        }
        for key in keys {
            self.listen(key);
            self.act(key);
        }
    }

    /// Begins to connect over one more path of a link.
    pub(super) fn begin_joining(&mut self, link: Key, path: Path) {
        let Some(found) = self.links.get(link) else {
            return;
        };
        let (resource, peer) = (found.resource, found.peer);
        let net = PeerNet {
            paths: vec![path],
            ..found.net.clone()
        };
        let key = self.new_connecting(resource, peer, net, Some(link));
        if let Some(found) = self.links.get_mut(link) {
            found.joining.push(key);
        }
        self.listen(key);
        self.act(key);
    }

    /// The attempts over other paths of a new link are to join it.
    pub(super) fn adopt_joining(&mut self, link: Key) {
        let joining = self.links.get(link).map(|found| found.joining.clone());
        for key in joining.unwrap_or_default() {
            if let Some(connecting) = self.connecting.get_mut(key) {
                connecting.joins = Some(link);
            }
        }
    }

    /// Ends the attempts to connect over further paths of a link.
    pub(super) fn drop_joining(&mut self, link: Key) {
        if let Some(found) = self.links.get_mut(link) {
            for key in std::mem::take(&mut found.joining) {
                self.remove_connecting(key);
            }
        }
    }

    fn new_connecting(
        &mut self,
        resource: Key,
        peer: NodeId,
        net: PeerNet,
        joins: Option<Key>,
    ) -> Key {
        let random = self.random();
        let larger = |path: &Path| address_is_larger(path.local, path.peer);
        let all = self
            .resources
            .get(resource)
            .and_then(|slot| slot.nets.get(&peer));
        // A kernel looks after one path after the other, each for this long, and a second connection
        // over one that it has not come to yet crosses its own.
        let patience = match all {
            Some(all) if net.load_balance_paths => net.check_time().times(all.paths.len() as u64),
            _ => Duration(0),
        };
        let config = PairingConfig {
            connect_int: net.connect_int,
            patience,
            socket_check: net.check_time(),
            larger: net.paths.iter().map(larger).collect(),
        };
        self.connecting.insert(Connecting {
            resource,
            peer,
            joins,
            listeners: net.paths.iter().map(|_| None).collect(),
            net,
            pairing: Pairing::new(config, random),
            listen_again: None,
            sockets: BTreeMap::new(),
            next_socket: 0,
            attempt: None,
            arrivals: Vec::new(),
            armed: Armed::default(),
        })
    }

    /// Opens the listeners that are missing.
    fn listen(&mut self, key: Key) {
        let Some(connecting) = self.connecting.get_mut(key) else {
            return;
        };
        connecting.listen_again = None;
        for (n, path) in connecting.net.paths.iter().enumerate() {
            if connecting.listeners[n].is_some() {
                continue;
            }
            let mailbox = self.mailbox.clone();
            let route = Box::new(move |socket: OwnedFd| {
                // Without a shard the socket is closed, which is what a stranger gets.
                let _ = mailbox.post(Message::Accepted {
                    connecting: key,
                    path: n,
                    socket,
                });
            });
            let net = &connecting.net;
            let (send, receive) = (net.send_buffer_bytes, net.receive_buffer_bytes);
            let namespace = net.namespace.as_ref();
            match self.env.acceptor.listen(
                namespace,
                path.local,
                path.peer.ip(),
                send,
                receive,
                route,
            ) {
                Ok(guard) => connecting.listeners[n] = Some(guard),
                Err(error) => {
                    tracing::warn!(%error, peer = connecting.peer.0, "listening is tried again");
                    connecting.listen_again = Some(self.now + net.connect_int);
                }
            }
        }
    }

    /// Does what the pairing wants.
    fn act(&mut self, key: Key) {
        loop {
            let Some(connecting) = self.connecting.get_mut(key) else {
                return;
            };
            let Some(action) = connecting.pairing.poll() else {
                break;
            };
            match action {
                Action::Connect { path } => self.start_attempt(key, path),
                Action::AbortConnect => {
                    if let Some(attempt) = connecting.attempt.take() {
                        self.ring.cancel(attempt.op);
                    }
                }
                Action::SendInitial { socket, stream } => {
                    let fd = connecting.sockets.get(&socket);
                    // A socket that is dead already is found dead by the next check.
                    let _ =
                        fd.map(|fd| SockRef::from(fd).send(&first_packet(stream, &connecting.net)));
                }
                Action::Close { socket } => {
                    if let Some(fd) = connecting.sockets.remove(&socket) {
                        let _ = SockRef::from(&fd).shutdown(std::net::Shutdown::Both);
                    }
                }
                Action::Established {
                    data,
                    control,
                    path,
                    resolve_conflicts,
                } => {
                    return self.established(key, path, [data, control], resolve_conflicts);
                }
            }
        }
        if let Some(connecting) = self.connecting.get_mut(key)
            && let Some(at) = connecting.deadline()
        {
            self.timers
                .arm(&mut connecting.armed, TimerKey::Connecting(key), at);
        }
    }

    fn start_attempt(&mut self, key: Key, path: usize) {
        let now = self.now;
        let Some(connecting) = self.connecting.get_mut(key) else {
            return;
        };
        let path = connecting.net.paths[path];
        match socket::for_connect(&path, &connecting.net) {
            Ok(fd) => {
                let address = Box::new(SockAddr::from(path.peer));
                let op = Op::Connect {
                    fd: fd.clone(),
                    address,
                };
                let op = self.ring.push(Owner::Connect.token(key), op);
                let until = now + connecting.net.connect_int;
                connecting.attempt = Some(Attempt { fd, op, until });
            }
            Err(error) => {
                let (peer, local) = (connecting.peer.0, path.local);
                tracing::info!(%error, peer, %local, "cannot connect from the own address");
                connecting.pairing.connect_failed(now);
            }
        }
    }

    pub(super) fn connect_completed(&mut self, key: Key, done: Done) {
        let Op::Connect { fd, .. } = &done.op else {
            return;
        };
        let now = self.now;
        let Some(connecting) = self.connecting.get_mut(key) else {
            return;
        };
        // An attempt that was given up meanwhile is not this one.
        if connecting
            .attempt
            .take_if(|attempt| Arc::ptr_eq(&attempt.fd, fd))
            .is_none()
        {
            return;
        }
        match done.result {
            Ok(_) if !is_connected_to_itself(fd) => {
                let id = connecting.keep(fd.clone());
                connecting.pairing.connected(now, id);
            }
            result => {
                tracing::debug!(peer = connecting.peer.0, ?result, "connecting failed");
                connecting.pairing.connect_failed(now);
            }
        }
        self.act(key);
    }

    /// The acceptor has a connection of the peer.
    pub(super) fn accepted(&mut self, key: Key, path: usize, socket: OwnedFd) {
        let Some(connecting) = self.connecting.get_mut(key) else {
            return;
        };
        if connecting.arrivals.len() >= ARRIVALS_MAX {
            tracing::warn!(
                peer = connecting.peer.0,
                "too many connections without a first packet"
            );
            return;
        }
        let fd: Fd = Arc::new(socket);
        let framing = connecting.net.framing();
        // Accepted sockets inherit this from the listener in some systems; the ring wants to wait.
        let _ = SockRef::from(&fd).set_nonblocking(false);
        let op = self.ring.push(
            Owner::FirstPacket.token(key),
            first_packet_op(&fd, 0, framing),
        );
        let until = self.now + connecting.net.ping_timeout.times(4);
        connecting.arrivals.push(Arrival {
            fd,
            path,
            bytes: Vec::new(),
            op,
            until,
        });
        self.timers
            .arm(&mut connecting.armed, TimerKey::Connecting(key), until);
    }

    pub(super) fn first_packet_received(&mut self, key: Key, done: Done) {
        let Op::Recv {
            fd,
            into: Memory::Bytes(bytes),
            ..
        } = done.op
        else {
            return;
        };
        let now = self.now;
        let Some(connecting) = self.connecting.get_mut(key) else {
            return;
        };
        let of = |arrival: &Arrival| Arc::ptr_eq(&arrival.fd, &fd);
        let Some(at) = connecting.arrivals.iter().position(of) else {
            return;
        };
        let arrival = &mut connecting.arrivals[at];
        let count = done.result.unwrap_or(0) as usize;
        arrival.bytes.extend_from_slice(&bytes[..count]);
        let framing = connecting.net.framing();
        let first = match framing.first(&arrival.bytes) {
            Ok(None) if count > 0 => {
                let op = first_packet_op(&fd, arrival.bytes.len(), framing);
                arrival.op = self.ring.push(Owner::FirstPacket.token(key), op);
                return;
            }
            Ok(Some(wire::Stream::Data)) => Some(Stream::Data),
            Ok(Some(wire::Stream::Control)) => Some(Stream::Control),
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(peer = connecting.peer.0, %error, "this is no peer of ours");
                None
            }
        };
        let Arrival { fd, path, .. } = connecting.arrivals.swap_remove(at);
        let id = connecting.keep(fd);
        let sockets = &connecting.sockets;
        connecting
            .pairing
            .accepted(now, path, id, first, &Connecting::alive(sockets));
        self.act(key);
    }

    pub(super) fn connecting_timer(&mut self, at: Instant, key: Key) {
        let now = self.now;
        let Some(connecting) = self.connecting.get_mut(key) else {
            return;
        };
        if !connecting.armed.fired(at) {
            return;
        }
        for arrival in connecting
            .arrivals
            .extract_if(.., |arrival| arrival.until <= now)
        {
            self.ring.cancel(arrival.op);
        }
        if let Some(attempt) = connecting.attempt.take_if(|attempt| attempt.until <= now) {
            self.ring.cancel(attempt.op);
            connecting.pairing.connect_failed(now);
        }
        let sockets = &connecting.sockets;
        connecting.pairing.timeout(now, &Connecting::alive(sockets));
        if connecting.listen_again.is_some_and(|at| at <= now) {
            self.listen(key);
        }
        self.act(key);
    }

    fn established(&mut self, key: Key, path: usize, streams: [SocketId; 2], resolve: bool) {
        let Some(mut connecting) = self.take_connecting(key) else {
            return;
        };
        let streams = streams.map(|id| connecting.sockets.remove(&id));
        let [Some(data), Some(control)] = streams else {
            return;
        };
        let (resource, peer) = (connecting.resource, connecting.peer);
        let path = connecting.net.paths[path];
        let joins = connecting.joins;
        // Dropping it closes the listeners: further attempts of the peer are refused.
        drop(connecting);
        if let Some(link) = joins {
            if let Some(found) = self.links.get_mut(link) {
                found.joining.retain(|other| *other != key);
            }
            return self.add_lane(link, path, [data, control]);
        }
        let Some(slot) = self.resources.get_mut(resource) else {
            return;
        };
        let Some(net) = slot.nets.get(&peer).cloned() else {
            return;
        };
        let mut others = slot.connecting.remove(&peer).unwrap_or_default();
        others.retain(|other| *other != key);
        self.link_up(
            resource,
            peer,
            [data, control],
            (net, path),
            others,
            resolve,
        );
    }

    pub(super) fn remove_connecting(&mut self, key: Key) {
        if let Some(connecting) = self.take_connecting(key) {
            for fd in connecting.sockets.values() {
                let _ = SockRef::from(fd).shutdown(std::net::Shutdown::Both);
            }
        }
    }

    /// Takes the attempts out of the shard, with nothing in flight that is still wanted.
    fn take_connecting(&mut self, key: Key) -> Option<Connecting> {
        let mut connecting = self.connecting.remove(key)?;
        if let Some(attempt) = connecting.attempt.take() {
            self.ring.cancel(attempt.op);
        }
        for arrival in connecting.arrivals.drain(..) {
            self.ring.cancel(arrival.op);
        }
        Some(connecting)
    }
}

fn first_packet(stream: Stream, net: &PeerNet) -> Vec<u8> {
    let packet = match stream {
        Stream::Data => Packet::InitialData,
        Stream::Control => Packet::InitialMeta,
    };
    let mut bytes = net.framing().prefix().to_vec();
    wire::encode(&packet, VolumeNr::NONE, &Dialect::INITIAL, &mut bytes);
    bytes
}

/// Receives the rest of a first packet, and not one byte more.
fn first_packet_op(fd: &Fd, have: usize, framing: Framing) -> Op {
    let len = framing.prefix().len() + FIRST_PACKET_BYTES - have;
    Op::Recv {
        fd: fd.clone(),
        into: Memory::Bytes(vec![0; len]),
        start: 0,
        len: len as u32,
    }
}

/// With nobody listening, a connect within one machine can meet itself.
fn is_connected_to_itself(fd: &Fd) -> bool {
    let socket = SockRef::from(fd);
    match (socket.local_addr(), socket.peer_addr()) {
        (Ok(local), Ok(peer)) => local.as_socket() == peer.as_socket(),
        _ => false,
    }
}
