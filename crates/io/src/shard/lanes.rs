//! Links over all paths at once (`load-balance-paths`; wire.md, 9.1): each path is a lane for both
//! streams.
//!
//! Data goes to the lane with room that has the fewest bytes waiting, control packets to the one that stands for longest.
//! A lane joins at any time, and leaves when its path is removed, its peer ends it or its network
//! fails. What a lane took with it that its peer had not acknowledged would be a gap in the stream,
//! so then the whole link ends.

use std::collections::BTreeSet;

use lockstep_core::event::{Input, LinkDownReason, Stream};
use lockstep_core::report::Event;
use lockstep_core::time::{Duration, Instant};
use socket2::SockRef;

use super::links::{Half, Link, STREAMS, Way};
use super::{Engine, LaneRef, Owner, Shard, TimerKey};
use crate::arena::Key;
use crate::reassembly::{ChunkError, Inlet, Paths, Reassembly};
use crate::receive::Target;
use crate::ring::{Done, Errno, Fd, Memory, Op, OpKey, SendList};
use crate::spread::Spread;
use crate::tcp::socket::SendRoom;
use crate::tcp::{Path, PeerNet, socket};

/// A stream over several paths.
#[derive(Default)]
pub(super) struct Lanes {
    /// In the order in which they joined.
    lanes: Vec<Lane>,
    reassembly: Reassembly,
    spread: Spread,
}

/// One path of a stream.
struct Lane {
    /// In `Shard::lanes`.
    key: Key,
    path: Path,
    fd: Fd,
    inlet: Inlet,
    receiving: Option<OpKey>,
    /// The peer sends nothing more.
    ended: bool,
    /// What is sent next; empty between two turns.
    list: SendList,
    /// The chunks in the list that is being sent.
    chunks: Vec<u32>,
    sending: Option<OpKey>,
    /// What the socket has and takes without waiting, as far as is known in this turn.
    room: SendRoom,
    /// Until then the peer may not have noticed that the path stands.
    usable_at: Instant,
    /// It gets no new chunks, and has to be empty until then.
    leaving: Option<Instant>,
    /// The peer ends it before this node does, until then.
    awaits_end: Option<Instant>,
    /// This node sends nothing more.
    shut: bool,
}

/// Which of two nodes ends a path first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndOrder {
    /// The peer, which takes an end that comes before its own for the loss of the path.
    Peer,
    /// This node, all paths at the same time: the peer knows nothing of it, or had its time.
    Here,
}

/// Who gives a path up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaver {
    /// The peer: it ends its two connections one after the other.
    Peer,
    /// This node.
    Here,
}

impl Lane {
    fn shut(&mut self) {
        if self.sending.is_none() && !std::mem::replace(&mut self.shut, true) {
            // An error means that the connection has ended already.
            let _ = SockRef::from(&self.fd).shutdown(std::net::Shutdown::Write);
        }
    }

    /// No bytes are under way that its end would lose.
    fn is_between_chunks(&self) -> bool {
        let unacknowledged = socket::unacknowledged(&self.fd);
        // The end of the stream counts as a byte.
        let unacknowledged = unacknowledged.saturating_sub(usize::from(self.shut));
        self.inlet.is_between_chunks() && self.sending.is_none() && unacknowledged == 0
    }
}

impl Lanes {
    fn get(&mut self, key: Key) -> Option<&mut Lane> {
        self.lanes.iter_mut().find(|lane| lane.key == key)
    }

    /// Paths that are in use.
    pub(super) fn paths(&self) -> impl Iterator<Item = Path> + '_ {
        let stay = self.lanes.iter().filter(|lane| lane.leaving.is_none());
        stay.map(|lane| lane.path)
    }

    /// One of the lanes has ended.
    pub(super) fn begin_to_end(&self) -> bool {
        self.lanes.iter().any(|lane| lane.ended)
    }

    /// All lanes have ended.
    pub(super) fn have_ended(&self) -> bool {
        self.lanes.iter().all(|lane| lane.ended)
    }

    /// Nobody reads them any more.
    pub(super) fn discard(&mut self) {
        for lane in &mut self.lanes {
            lane.inlet.discard();
        }
    }

    /// Ends this node's side of the lanes as far as it is due.
    pub(super) fn shut(&mut self, order: EndOrder) {
        let due = |lane: &&mut Lane| lane.ended || order == EndOrder::Here;
        self.lanes.iter_mut().filter(due).for_each(Lane::shut);
    }

    /// The end, at once; the operations that are to be cancelled and the lanes' keys.
    pub(super) fn close(&mut self) -> (Vec<OpKey>, Vec<Key>) {
        let mut ops = Vec::new();
        for lane in &mut self.lanes {
            let _ = SockRef::from(&lane.fd).shutdown(std::net::Shutdown::Both);
            ops.extend(
                [lane.receiving.take(), lane.sending.take()]
                    .into_iter()
                    .flatten(),
            );
        }
        (ops, self.lanes.iter().map(|lane| lane.key).collect())
    }

    /// The lanes that a new chunk may be given to. A lane that is new here may be newer still at
    /// the peer, and would keep its chunk waiting.
    fn usable(&self, now: Instant) -> impl Fn(&Lane) -> bool + use<> {
        let stays = |lane: &Lane| lane.leaving.is_none() && !lane.shut;
        let any = self.lanes.iter().any(|l| stays(l) && l.usable_at <= now);
        move |lane| stays(lane) && (!any || lane.usable_at <= now)
    }

    /// The idle lanes that take part in this turn, by their places.
    fn candidates(&mut self, now: Instant, stream: Stream) -> Vec<usize> {
        let usable = self.usable(now);
        let mut at = (0..self.lanes.len()).filter(|n| usable(&self.lanes[*n]));
        let mut found: Vec<usize> = match stream {
            Stream::Control => at.next().into_iter().collect(),
            Stream::Data => at.collect(),
        };
        let alone = found.len() == 1;
        found.retain(|n| self.lanes[*n].sending.is_none());
        for n in &found {
            let lane = &mut self.lanes[*n];
            lane.room = if alone {
                SendRoom::ENDLESS
            } else {
                socket::send_room(&lane.fd)
            };
        }
        found
    }
}

/// Lanes of a link whose paths are looked at.
pub(super) type LanePaths = BTreeSet<(std::net::SocketAddr, std::net::SocketAddr)>;

impl<E: Engine> Shard<E> {
    /// A path joins a link, or is its first one.
    pub(super) fn add_lane(&mut self, key: Key, path: Path, fds: [Fd; 2]) {
        let now = self.now;
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let first = link.paths().next().is_none();
        let peer = link.peer.0;
        let local = path.local;
        if first {
            tracing::info!(peer, %local, "the first path is established");
        } else {
            tracing::info!(peer, %local, "a further path is established");
        }
        for (fd, stream) in fds.into_iter().zip(STREAMS) {
            let prepared = socket::prepare_stream(&fd, stream)
                .and_then(|()| socket::watch(&fd, link.net.ping_int, link.net.ping_timeout));
            if let Err(error) = prepared {
                tracing::warn!(%error, peer, ?stream, "cannot set a socket option");
            }
            let usable_at = if first {
                now
            } else {
                now + link.net.check_time()
            };
            let Way::Lanes(lanes) = &mut link.half(stream).way else {
                return;
            };
            let lane = self.lanes.insert(LaneRef { link: key, stream });
            lanes.lanes.push(Lane {
                key: lane,
                path,
                fd,
                inlet: Inlet::default(),
                receiving: None,
                ended: false,
                list: SendList::default(),
                chunks: Vec::new(),
                sending: None,
                room: SendRoom::default(),
                usable_at,
                leaving: None,
                awaits_end: None,
                shut: false,
            });
        }
        let resource = link.resource;
        if first {
            link.watch_at = Some(now + watch_interval(&link.net));
            self.arm_link(key);
            return;
        }
        STREAMS
            .into_iter()
            .for_each(|stream| self.parse(key, stream));
        self.event(
            resource,
            &Event::Connection(lockstep_format::units::NodeId(peer)),
        );
    }

    /// Cuts what is queued into chunks and gives them to lanes that send nothing now.
    pub(super) fn spread_out(&mut self, key: Key, stream: Stream) {
        let now = self.now;
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let half = link.half(stream);
        let Way::Lanes(lanes) = &mut half.way else {
            return;
        };
        if !lanes.spread.is_waiting(&mut half.transmitter) {
            return;
        }
        let found = lanes.candidates(now, stream);
        // One chunk waits for room in the best lane; the others wait for a lane with room.
        for at_all in std::iter::once(true).chain(std::iter::repeat(false)) {
            // Buffers grow with what a path has carried, so the most room would be that of the path
            // that was used first, for ever. Of equal ones the first is taken.
            let best = found.iter().min_by_key(|n| {
                let room = lanes.lanes[**n].room;
                (room.free == 0, room.used)
            });
            let Some(lane) = best.map(|n| &mut lanes.lanes[*n]) else {
                break;
            };
            if lane.room.free == 0 && !at_all {
                break;
            }
            let cut = lanes
                .spread
                .cut(&mut half.transmitter, &mut lane.list, lane.room.free);
            let Some((sequence, bytes)) = cut else {
                break;
            };
            lane.chunks.push(sequence);
            lane.room.take(bytes);
        }
        for n in found {
            let lane = &mut lanes.lanes[n];
            if lane.list.left() > 0 {
                let op = Op::Send {
                    fd: lane.fd.clone(),
                    list: std::mem::take(&mut lane.list),
                };
                lane.sending = Some(self.ring.push(Owner::LaneSend.token(lane.key), op));
            }
        }
    }

    pub(super) fn lane_sent(&mut self, lane: Key, done: Done) {
        let now = self.now;
        let Some(LaneRef { link: key, stream }) = self.lanes.get(lane).copied() else {
            return;
        };
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let (peer, resource) = (link.peer.0, link.resource);
        let half = link.half(stream);
        let Way::Lanes(lanes) = &mut half.way else {
            return;
        };
        let Some(entry) = lanes.lanes.iter_mut().find(|entry| entry.key == lane) else {
            return;
        };
        entry.sending = None;
        let Op::Send { fd, mut list } = done.op else {
            return;
        };
        match done.result {
            Ok(count) => list.advance(count as usize),
            Err(errno) => {
                let local = entry.path.local;
                tracing::info!(peer, ?stream, %local, %errno, "a path failed with bytes to send");
                return self.link_down(key, LinkDownReason::Broken);
            }
        }
        if list.left() > 0 {
            half.transmitter.progress(now, 0);
            let op = Op::Send { fd, list };
            entry.sending = Some(self.ring.push(Owner::LaneSend.token(lane), op));
            return;
        }
        list.clear();
        entry.list = list;
        for sequence in entry.chunks.drain(..) {
            let bytes = lanes.spread.left(sequence);
            half.transmitter.progress(now, bytes);
        }
        while let Some(tag) = half.transmitter.next_sent() {
            self.inputs.push_back((resource, Input::Sent { tag }));
        }
        self.pump();
        self.start_send(key, stream);
        self.settle_lanes(key);
        self.drain(key);
    }

    /// Receives on all lanes that have room for more.
    pub(super) fn receive_on_lanes(&mut self, key: Key, stream: Stream) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let half = link.half(stream);
        let Way::Lanes(lanes) = &mut half.way else {
            return;
        };
        for lane in &mut lanes.lanes {
            if lane.receiving.is_some() || lane.ended {
                continue;
            }
            let direct = Reassembly::direct(&lane.inlet, &mut half.receiver);
            let Some(target) = direct.or_else(|| lane.inlet.target()) else {
                continue;
            };
            let Target { memory, start, len } = target;
            let op = Op::Recv {
                fd: lane.fd.clone(),
                into: memory,
                start,
                len,
            };
            lane.receiving = Some(self.ring.push(Owner::LaneReceive.token(lane.key), op));
        }
    }

    pub(super) fn lane_received(&mut self, lane: Key, done: Done) {
        let now = self.now;
        let Some(LaneRef { link: key, stream }) = self.lanes.get(lane).copied() else {
            return;
        };
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let (peer, draining) = (link.peer.0, link.draining.is_some());
        let half = link.half(stream);
        let Way::Lanes(lanes) = &mut half.way else {
            return;
        };
        let Some(entry) = lanes.lanes.iter_mut().find(|entry| entry.key == lane) else {
            return;
        };
        entry.receiving = None;
        let Op::Recv { into, .. } = done.op else {
            return;
        };
        let count = done.result.unwrap_or(0) as usize;
        match into {
            Memory::Bytes(bytes) => entry.inlet.received(bytes, count),
            Memory::Buf(_) if draining => {}
            Memory::Buf(_) => {
                half.receiver.received(into, count);
                lanes.reassembly.received_directly(&mut entry.inlet, count);
            }
        }
        let left = entry.path;
        match done.result {
            Ok(0) => {
                entry.ended = true;
                if draining {
                    return self.drain(key);
                }
                if !entry.inlet.is_between_chunks() {
                    let local = left.local;
                    tracing::info!(peer, ?stream, %local, "the peer ended a path within a chunk");
                    return self.link_down(key, LinkDownReason::Closed);
                }
                self.leave_path(key, Leaver::Peer, |path| *path == left);
            }
            Ok(_) => {
                // What the peer uses already it takes bytes from.
                entry.usable_at = entry.usable_at.min(now);
                self.parse(key, stream);
            }
            Err(errno) => self.lane_failed(key, lane, stream, errno),
        }
    }

    fn lane_failed(&mut self, key: Key, lane: Key, stream: Stream, errno: Errno) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let (peer, draining) = (link.peer.0, link.draining.is_some());
        let Way::Lanes(lanes) = &mut link.half(stream).way else {
            return;
        };
        let Some(entry) = lanes.get(lane) else {
            return;
        };
        entry.ended = true;
        if draining {
            return self.drain(key);
        }
        let (left, local) = (entry.path, entry.path.local);
        if !entry.is_between_chunks() {
            tracing::info!(peer, ?stream, %local, %errno, "a path failed with bytes under way");
            return self.link_down(key, LinkDownReason::Broken);
        }
        tracing::info!(peer, ?stream, %local, %errno, "a path failed");
        self.leave_path(key, Leaver::Peer, |path| *path == left);
    }

    /// Gives the receiver the stream's next bytes; `false` if they have not come.
    pub(super) fn supply(&mut self, key: Key, stream: Stream) -> Result<bool, ChunkError> {
        let Some(link) = self.links.get_mut(key) else {
            return Ok(false);
        };
        let all = link.paths().count() == link.net.paths.len() && link.joining.is_empty();
        let half = link.half(stream);
        let Way::Lanes(lanes) = &mut half.way else {
            return Ok(false);
        };
        let paths = if all && lanes.lanes.iter().all(|lane| lane.leaving.is_none()) {
            Paths::All
        } else {
            Paths::Some
        };
        lanes.reassembly.supply(
            &mut lanes.lanes,
            |lane| &mut lane.inlet,
            paths,
            &mut half.receiver,
        )
    }

    pub(super) fn bad_chunk(&mut self, key: Key, stream: Stream, error: ChunkError) {
        let peer = self.links.get(key).map(|link| link.peer.0);
        if error.is_new_beginning() {
            tracing::info!(peer, ?stream, %error, "the peer has begun a new connection");
            return self.link_down(key, LinkDownReason::Closed);
        }
        tracing::warn!(peer, ?stream, %error, "the peer broke the protocol");
        self.link_down(key, LinkDownReason::Protocol);
    }

    /// Paths for which this holds get no new chunks, and leave when they are empty.
    pub(super) fn leave_path(&mut self, key: Key, leaver: Leaver, leaves: impl Fn(&Path) -> bool) {
        let now = self.now;
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let (peer, resource) = (link.peer, link.resource);
        let until = now + link.net.ping_timeout.times(LEAVE_PING_TIMEOUTS);
        // A kernel whose own end of a socket comes after this node's is in a wrong state (wire.md, 9.1).
        let peer_first = now + link.net.ping_timeout;
        // A path that may not stand yet at the peer that ends it, and brought nothing, is begun anew there.
        let is_used = |half: &Half| match &half.way {
            Way::Lanes(lanes) => {
                let all = &mut lanes.lanes.iter();
                all.any(|lane| leaves(&lane.path) && lane.usable_at <= now)
            }
            Way::Socket(_) => false,
        };
        let is_new = !is_used(&link.data) && !is_used(&link.control);
        let mut any = false;
        for stream in STREAMS {
            let Way::Lanes(lanes) = &mut link.half(stream).way else {
                return;
            };
            for lane in &mut lanes.lanes {
                if leaves(&lane.path) && lane.leaving.is_none() {
                    lane.leaving = Some(until);
                    lane.awaits_end = match leaver {
                        Leaver::Peer if is_new => Some(now),
                        Leaver::Peer => Some(peer_first),
                        Leaver::Here => None,
                    };
                    any = true;
                }
            }
        }
        if any && link.paths().next().is_none() {
            tracing::info!(peer = peer.0, "the last path is gone");
            return self.link_down(key, LinkDownReason::Closed);
        }
        if any {
            let at = match leaver {
                Leaver::Peer => peer_first,
                Leaver::Here => until,
            };
            self.timers.arm(&mut link.armed, TimerKey::Link(key), at);
            // What waits for a lane that leaves goes to others.
            STREAMS
                .into_iter()
                .for_each(|stream| self.start_send(key, stream));
            self.event(resource, &Event::Connection(peer));
        }
        self.settle_lanes(key);
    }

    /// Goes on with lanes that leave.
    fn settle_lanes(&mut self, key: Key) {
        let now = self.now;
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        if link.draining.is_some() {
            return;
        }
        let (mut busy, mut gone, mut broken) = (LanePaths::new(), LanePaths::new(), false);
        let mut by_peer = false;
        for stream in STREAMS {
            let Way::Lanes(lanes) = &mut link.half(stream).way else {
                return;
            };
            for lane in &mut lanes.lanes {
                let Some(until) = lane.leaving else {
                    continue;
                };
                if lane.ended || lane.awaits_end.is_none_or(|at| at <= now) {
                    lane.shut();
                }
                let name = (lane.path.local, lane.path.peer);
                by_peer |= lane.awaits_end.is_some();
                let had_its_time = lane.awaits_end.is_some_and(|at| at <= now);
                let is_done = lane.ended || (had_its_time && lane.is_between_chunks());
                if is_done && lane.shut {
                    gone.insert(name);
                } else if until <= now {
                    broken |= !lane.is_between_chunks();
                    gone.insert(name);
                } else {
                    busy.insert(name);
                }
            }
        }
        if broken {
            tracing::info!(
                peer = link.peer.0,
                "a path that was left keeps bytes under way"
            );
            return self.link_down(key, LinkDownReason::Broken);
        }
        let gone: LanePaths = gone.difference(&busy).copied().collect();
        if gone.is_empty() {
            return;
        }
        if by_peer {
            // It is ending its other paths too, for the most part.
            let at = now + REJOIN_TIME;
            link.watch_at = link.watch_at.map(|watch| watch.min(at));
            self.timers.arm(&mut link.armed, TimerKey::Link(key), at);
            return self.remove_lanes(key, &gone);
        }
        self.remove_lanes(key, &gone);
        self.join_paths(key);
    }

    fn remove_lanes(&mut self, key: Key, gone: &LanePaths) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        for stream in STREAMS {
            let Way::Lanes(lanes) = &mut link.half(stream).way else {
                return;
            };
            let goes = |lane: &mut Lane| gone.contains(&(lane.path.local, lane.path.peer));
            for mut lane in lanes.lanes.extract_if(.., goes) {
                let _ = SockRef::from(&lane.fd).shutdown(std::net::Shutdown::Both);
                for op in [lane.receiving.take(), lane.sending.take()] {
                    op.into_iter().for_each(|op| self.ring.cancel(op));
                }
                self.lanes.remove(lane.key);
            }
        }
    }

    /// Looks whether lanes still lead to the peer, and goes on with those that leave.
    pub(super) fn look_at_lanes(&mut self, key: Key) {
        let now = self.now;
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        if link.draining.is_none() && link.watch_at.is_some_and(|at| at <= now) {
            link.watch_at = Some(now + watch_interval(&link.net));
            let silence = Duration(link.net.ping_int.0 + link.net.ping_timeout.0);
            for stream in STREAMS {
                let Way::Lanes(lanes) = &mut link.half(stream).way else {
                    return;
                };
                let dead = |lane: &&Lane| socket::is_silent(&lane.fd, silence);
                if let Some(lane) = lanes.lanes.iter().find(dead) {
                    let local = lane.path.local;
                    let peer = link.peer.0;
                    tracing::warn!(peer, ?stream, %local, "a path acknowledges nothing any more");
                    return self.link_down(key, LinkDownReason::Broken);
                }
            }
            self.join_paths(key);
        }
        self.settle_lanes(key);
    }

    /// Begins with the paths of a link that do not stand.
    pub(super) fn join_paths(&mut self, key: Key) {
        let Some(link) = self.links.get(key) else {
            return;
        };
        if !link.net.load_balance_paths || link.draining.is_some() {
            return;
        }
        let mut taken: Vec<Path> = link.all_lane_paths();
        taken.extend(
            link.joining
                .iter()
                .filter_map(|key| self.connecting.get(*key))
                .flat_map(|connecting| connecting.paths().iter().copied()),
        );
        let missing: Vec<Path> = link.net.paths.clone();
        for path in missing.into_iter().filter(|path| !taken.contains(path)) {
            self.begin_joining(key, path);
        }
    }
}

impl Link {
    /// The paths of its lanes, with those that leave.
    fn all_lane_paths(&self) -> Vec<Path> {
        match &self.data.way {
            Way::Lanes(lanes) => lanes.lanes.iter().map(|lane| lane.path).collect(),
            Way::Socket(_) => Vec::new(),
        }
    }
}

/// How often lanes are looked at.
fn watch_interval(net: &PeerNet) -> Duration {
    Duration((net.ping_int.0 / 4).max(WATCH_MIN.0))
}

/// A path that was left may need so many `ping-timeout`s to become empty.
const LEAVE_PING_TIMEOUTS: u64 = 10;
/// When a path that the peer has ended is tried again.
const REJOIN_TIME: Duration = Duration::from_secs(1);
const WATCH_MIN: Duration = Duration::from_millis(100);
