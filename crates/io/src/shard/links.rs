//! Established links: bytes in and out, progress, and the end.

use lockstep_core::event::{Input, LinkDownReason, LinkEnd, LinkId, Payload, Stream, Tag};
use lockstep_core::report::Event;
use lockstep_core::time::{Duration, Instant};
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::Packet;
use lockstep_format::wire::alg::DigestAlg;
use socket2::SockRef;

use super::lanes::{EndOrder, Lanes, Leaver};
use super::{Engine, Owner, Shard, TimerKey, UsedPaths};
use crate::arena::Key;
use crate::digest::digest_by;
use crate::pool::{Claim, IoBuf};
use crate::receive::{Parsed, Receiver, Target};
use crate::ring::{Done, Errno, Fd, Op, OpKey};
use crate::tcp::{Path, PeerNet, socket};
use crate::timers::Armed;
use crate::transmit::Transmitter;

/// Two streams to a peer.
pub(super) struct Link {
    pub(super) resource: Key,
    pub(super) peer: NodeId,
    pub(super) data: Half,
    pub(super) control: Half,
    pub(super) net: PeerNet,
    /// Its path, or the first one.
    path: Path,
    pub(super) armed: Armed,
    /// Attempts to connect over further paths.
    pub(super) joining: Vec<Key>,
    /// When to look at its lanes.
    pub(super) watch_at: Option<Instant>,
    /// It is in `Shard::dirty_links`.
    dirty: bool,
    /// The core closed it, or the peer is ending it path after path; the end has time until then.
    pub(super) draining: Option<Instant>,
    /// The core knows that it ended: nothing that is queued goes out any more.
    is_lost: bool,
    /// Until then the peer ends each path of the closed link before this node does.
    awaits_end: Option<Instant>,
}

/// How the bytes of a stream travel.
pub(super) enum Way {
    /// Over one connection.
    Socket(Fd),
    /// In chunks over the connections of several paths.
    Lanes(Lanes),
}

/// One stream.
pub(super) struct Half {
    pub(super) way: Way,
    pub(super) receiver: Receiver,
    pub(super) transmitter: Transmitter,
    receiving: Option<OpKey>,
    /// When something was received last.
    received: Instant,
    /// The receive is being cancelled, to go on with less memory.
    resting: bool,
    sending: Option<OpKey>,
    /// The peer's side has ended (only while draining).
    ended: bool,
    /// Nothing more is sent (only while draining).
    shut: bool,
}

/// A packet to send.
pub(super) struct Outgoing {
    pub(super) stream: Stream,
    pub(super) volume: VolumeNr,
    pub(super) packet: Packet,
    pub(super) payload: Option<Payload>,
    pub(super) integrity: Option<DigestAlg>,
    pub(super) want_sent: Option<Tag>,
}

/// How long a stream has received nothing when it gives memory back.
const QUIET_TIME: Duration = Duration::from_secs(5);
/// How long a closed link may need to get its last packets to the peer.
const DRAIN_TIME: Duration = Duration::from_secs(2);

impl Half {
    fn new(way: Way, stream: Stream) -> Half {
        Half {
            way,
            receiver: Receiver::new(stream),
            transmitter: Transmitter::default(),
            receiving: None,
            received: Instant(0),
            resting: false,
            sending: None,
            ended: false,
            shut: false,
        }
    }
}

impl Half {
    /// When the stream has been quiet for long enough to give memory back.
    fn rest_at(&self) -> Option<Instant> {
        let may = self.receiving.is_some() && !self.resting && self.receiver.may_rest();
        may.then(|| self.received + QUIET_TIME)
    }
}

impl Link {
    pub(super) fn half(&mut self, stream: Stream) -> &mut Half {
        match stream {
            Stream::Data => &mut self.data,
            Stream::Control => &mut self.control,
        }
    }

    /// The paths in use.
    pub(super) fn paths(&self) -> impl Iterator<Item = Path> + '_ {
        let (one, lanes) = match &self.data.way {
            Way::Socket(_) => (Some(self.path), None),
            Way::Lanes(lanes) => (None, Some(lanes.paths())),
        };
        one.into_iter().chain(lanes.into_iter().flatten())
    }

    /// The earliest moment at which something has taken too long.
    fn deadline(&self) -> Option<Instant> {
        if self.draining.is_some() {
            return self.draining.into_iter().chain(self.awaits_end).min();
        }
        let halves = [(&self.data, Stream::Data), (&self.control, Stream::Control)];
        let stalls = halves.into_iter().filter_map(|(half, stream)| {
            Some(half.transmitter.waiting_since()? + self.net.stall_time(stream)?)
        });
        stalls.min()
    }

    /// When to look next.
    fn next_look(&self) -> Option<Instant> {
        let rests = [&self.data, &self.control].into_iter();
        let times = rests.filter_map(Half::rest_at).chain(self.deadline());
        times.chain(self.watch()).min()
    }

    /// When to look at its lanes.
    fn watch(&self) -> Option<Instant> {
        self.watch_at.filter(|_| self.draining.is_none())
    }
}

fn receive_owner(stream: Stream) -> Owner {
    match stream {
        Stream::Data => Owner::ReceiveData,
        Stream::Control => Owner::ReceiveControl,
    }
}

fn send_owner(stream: Stream) -> Owner {
    match stream {
        Stream::Data => Owner::SendData,
        Stream::Control => Owner::SendControl,
    }
}

fn stream_of(owner: Owner) -> Stream {
    match owner {
        Owner::ReceiveControl | Owner::SendControl => Stream::Control,
        _ => Stream::Data,
    }
}

pub(super) const STREAMS: [Stream; 2] = [Stream::Data, Stream::Control];

impl<E: Engine> Shard<E> {
    /// Both connections to a peer stand.
    pub(super) fn link_up(
        &mut self,
        resource: Key,
        peer: NodeId,
        [data, control]: [Fd; 2],
        (net, path): (PeerNet, Path),
        joining: Vec<Key>,
        resolve_conflicts: bool,
    ) {
        let balanced = net.load_balance_paths;
        let half = |fd: &Fd, stream| {
            if balanced {
                return Half::new(Way::Lanes(Lanes::default()), stream);
            }
            if let Err(error) = socket::prepare_stream(fd, stream) {
                // Slower at worst; an unusable socket shows itself at the first transfer.
                tracing::warn!(%error, peer = peer.0, ?stream, "cannot set a socket option");
            }
            Half::new(Way::Socket(fd.clone()), stream)
        };
        let link = Link {
            resource,
            peer,
            data: half(&data, Stream::Data),
            control: half(&control, Stream::Control),
            net,
            path,
            armed: Armed::default(),
            joining,
            watch_at: None,
            dirty: false,
            draining: None,
            is_lost: false,
            awaits_end: None,
        };
        let key = self.links.insert(link);
        if balanced {
            self.add_lane(key, path, [data, control]);
            self.adopt_joining(key);
        }
        if let Some(slot) = self.resources.get_mut(resource) {
            slot.links.push(key);
        }
        let input = Input::LinkUp {
            peer,
            link: LinkId(key.0),
            resolve_conflicts,
        };
        self.inputs.push_back((resource, input));
        self.pump();
        STREAMS
            .into_iter()
            .for_each(|stream| self.start_receive(key, stream));
        // The path is in use now, whatever the handshake will say.
        self.event(resource, &Event::Connection(peer));
    }

    /// The paths that links of a resource run over.
    pub(super) fn used_paths(&self, resource: Key) -> UsedPaths {
        let links = self.resources.get(resource).map(|slot| &slot.links[..]);
        let links = links.unwrap_or_default().iter();
        links
            .filter_map(|key| self.links.get(*key))
            .filter(|link| link.draining.is_none())
            .map(|link| (link.peer, link.paths().collect()))
            .collect()
    }

    /// The paths to a peer are these now: its link ends without one that it uses, or lets the one
    /// go and takes new ones if it uses all.
    pub(super) fn follow_paths(&mut self, resource: Key, peer: NodeId, net: &PeerNet) {
        let paths = &net.paths;
        let links = self.resources.get(resource).map(|slot| slot.links.clone());
        for key in links.unwrap_or_default() {
            let Some(link) = self.links.get_mut(key) else {
                continue;
            };
            if link.peer != peer || link.draining.is_some() {
                continue;
            }
            if link.net.load_balance_paths {
                link.net = net.clone();
                self.drop_joining(key);
                self.leave_path(key, Leaver::Here, |path| !paths.contains(path));
                self.join_paths(key);
            } else if !paths.contains(&link.path) {
                tracing::info!(peer = peer.0, "the path in use was removed");
                self.link_down(key, LinkDownReason::Closed);
            }
        }
    }

    pub(super) fn send(&mut self, resource: Key, peer: NodeId, key: Key, what: Outgoing) {
        let Outgoing {
            stream,
            volume,
            mut packet,
            payload,
            integrity,
            want_sent,
        } = what;
        let gone = match self.links.get(key) {
            Some(link) => link.resource != resource || link.draining.is_some(),
            None => true,
        };
        if gone {
            // A send on a link that is gone is dropped, but its tag still completes.
            if let Some(tag) = want_sent {
                self.inputs.push_back((resource, Input::Sent { tag }));
            }
            return;
        }
        let Some(slot) = self.resources.get(resource) else {
            return;
        };
        let dialect = slot.engine.dialect(peer);
        let payload = match payload {
            None => None,
            Some(payload) => match self.payload(payload) {
                Some(buf) => Some((buf, payload.offset as usize, payload.len as usize)),
                // Without its payload the stream would be out of step; so it ends here.
                None => return self.link_down(key, LinkDownReason::Broken),
            },
        };
        let payload_len = payload.as_ref().map_or(0, |(_, _, len)| *len);
        if payload_len != packet.payload_len() as usize {
            tracing::error!(
                payload_len,
                ?packet,
                "the core gave a packet the wrong payload"
            );
            return self.link_down(key, LinkDownReason::Broken);
        }
        if let (Some(alg), Some((buf, start, len))) = (integrity, &payload) {
            let digest = buf.with_bytes(*start, *len, |bytes| digest_by(alg, bytes));
            packet.set_integrity(digest);
        }
        let now = self.now;
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let half = link.half(stream);
        half.transmitter
            .push(now, &packet, volume, &dialect, payload, want_sent);
        if !std::mem::replace(&mut link.dirty, true) {
            self.dirty_links.push(key);
        }
    }

    /// Hands what was queued in this turn to the ring.
    pub(super) fn flush_links(&mut self) {
        let mut links = std::mem::take(&mut self.dirty_links);
        for key in links.drain(..) {
            if let Some(link) = self.links.get_mut(key) {
                link.dirty = false;
            }
            STREAMS
                .into_iter()
                .for_each(|stream| self.start_send(key, stream));
            self.arm_link(key);
        }
        self.dirty_links = links;
    }

    pub(super) fn start_send(&mut self, key: Key, stream: Stream) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let half = link.half(stream);
        let Way::Socket(fd) = &half.way else {
            return self.spread_out(key, stream);
        };
        if let Some(list) = half.transmitter.take() {
            let op = Op::Send {
                fd: fd.clone(),
                list,
            };
            half.sending = Some(self.ring.push(send_owner(stream).token(key), op));
        }
    }

    pub(super) fn sent(&mut self, owner: Owner, key: Key, done: Done) {
        let (now, stream) = (self.now, stream_of(owner));
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let half = link.half(stream);
        half.sending = None;
        let Op::Send { fd, list } = done.op else {
            return;
        };
        let count = match done.result {
            Ok(count) => count as usize,
            Err(errno) => {
                let peer = link.peer.0;
                tracing::info!(peer, ?stream, %errno, "sending to the peer failed");
                return self.link_down(key, LinkDownReason::Broken);
            }
        };
        let rest = half.transmitter.sent(now, list, count);
        let resource = link.resource;
        let half = link.half(stream);
        if let Some(list) = rest {
            let op = Op::Send { fd, list };
            half.sending = Some(self.ring.push(send_owner(stream).token(key), op));
        }
        while let Some(tag) = half.transmitter.next_sent() {
            self.inputs.push_back((resource, Input::Sent { tag }));
        }
        self.pump();
        self.start_send(key, stream);
        self.drain(key);
    }

    fn start_receive(&mut self, key: Key, stream: Stream) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let half = link.half(stream);
        let Way::Socket(fd) = &half.way else {
            return self.receive_on_lanes(key, stream);
        };
        let Target {
            memory: into,
            start,
            len,
        } = half.receiver.target();
        let op = Op::Recv {
            fd: fd.clone(),
            into,
            start,
            len,
        };
        half.receiving = Some(self.ring.push(receive_owner(stream).token(key), op));
        if let Some(at) = half.rest_at() {
            self.timers.arm(&mut link.armed, TimerKey::Link(key), at);
        }
    }

    pub(super) fn received(&mut self, owner: Owner, key: Key, done: Done) {
        let stream = stream_of(owner);
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let (peer, draining) = (link.peer.0, link.draining.is_some());
        let now = self.now;
        let half = link.half(stream);
        half.receiving = None;
        let resting = std::mem::take(&mut half.resting);
        let Op::Recv { into, .. } = done.op else {
            return;
        };
        let count = match done.result {
            Err(Errno::CANCELED) if resting => {
                half.receiver.received(into, 0);
                half.receiver.rest();
                return self.start_receive(key, stream);
            }
            Ok(0) => {
                half.ended = true;
                if draining {
                    return self.drain(key);
                }
                return self.link_down(key, LinkDownReason::Closed);
            }
            Ok(count) => count as usize,
            Err(errno) => {
                tracing::info!(peer, ?stream, %errno, "receiving from the peer failed");
                return self.link_down(key, LinkDownReason::Broken);
            }
        };
        if draining {
            // Nobody reads it any more, but unread bytes would make the close a reset.
            half.receiver = Receiver::new(stream);
            return self.start_receive(key, stream);
        }
        half.received = now;
        half.receiver.received(into, count);
        self.parse(key, stream);
    }

    /// Feeds all whole packets, then receives more. The amount per turn is bounded by the memory of
    /// one receive, so one peer cannot keep the others waiting.
    pub(super) fn parse(&mut self, key: Key, stream: Stream) {
        let mut packets = 0u32;
        loop {
            let Some(link) = self.links.get_mut(key) else {
                return;
            };
            if link.draining.is_some() {
                let half = link.half(stream);
                half.receiver = Receiver::new(stream);
                if let Way::Lanes(lanes) = &mut half.way {
                    lanes.discard();
                }
                return self.start_receive(key, stream);
            }
            let (resource, peer) = (link.resource, link.peer);
            let Some(slot) = self.resources.get(resource) else {
                return;
            };
            let dialect = slot.engine.dialect(peer);
            let integrity = slot.engine.peer_integrity(peer);
            let pool = &self.pool;
            let alloc = |len| pool.alloc(len, Claim::Receive).map(IoBuf::share);
            match link.half(stream).receiver.next(&dialect, alloc) {
                Parsed::Packet {
                    volume,
                    packet,
                    payload,
                } => {
                    packets += 1;
                    if let Some(alg) = integrity
                        && let (Some(wanted), Some((buf, len))) = (packet.integrity(), &payload)
                        && buf.with_bytes(0, *len as usize, |b| digest_by(alg, b)) != *wanted
                    {
                        let link = LinkId(key.0);
                        let input = Input::Corrupt {
                            peer,
                            link,
                            volume,
                            packet,
                        };
                        self.inputs.push_back((resource, input));
                        self.pump();
                        continue;
                    }
                    let payload = payload.map(|(buf, len)| {
                        let buf = self.table.insert(resource.0, buf);
                        Payload {
                            buf,
                            offset: 0,
                            len,
                        }
                    });
                    let link = LinkId(key.0);
                    let input = Input::Packet {
                        peer,
                        link,
                        stream,
                        volume,
                        packet,
                        payload,
                    };
                    self.inputs.push_back((resource, input));
                    self.pump();
                }
                Parsed::More { partial } => {
                    match self.supply(key, stream) {
                        Ok(true) => continue,
                        Ok(false) => {}
                        Err(error) => return self.bad_chunk(key, stream, error),
                    }
                    if partial && packets == 0 {
                        let input = Input::Progress {
                            peer,
                            link: LinkId(key.0),
                            stream,
                        };
                        self.inputs.push_back((resource, input));
                        self.pump();
                    }
                    return self.start_receive(key, stream);
                }
                Parsed::NoBuffer => return self.starved.park(key, stream),
                Parsed::Bad(error) => {
                    let peer = peer.0;
                    tracing::warn!(peer, ?stream, %error, "the peer broke the protocol");
                    return self.link_down(key, LinkDownReason::Protocol);
                }
            }
        }
    }

    pub(super) fn arm_link(&mut self, key: Key) {
        if let Some(link) = self.links.get_mut(key)
            && let Some(at) = link.deadline().into_iter().chain(link.watch()).min()
        {
            self.timers.arm(&mut link.armed, TimerKey::Link(key), at);
        }
    }

    pub(super) fn link_timer(&mut self, at: Instant, key: Key) {
        let now = self.now;
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        if !link.armed.fired(at) {
            return;
        }
        match link.deadline() {
            Some(due) if due <= now && link.draining.is_some() => {
                if link.awaits_end.take_if(|at| *at <= now).is_none() {
                    return self.remove_link(key);
                }
                self.arm_link(key);
                return self.drain(key);
            }
            Some(due) if due <= now => {
                tracing::warn!(peer = link.peer.0, "the peer takes no bytes any more");
                return self.link_down(key, LinkDownReason::SendTimeout);
            }
            Some(_) | None => {}
        }
        for stream in STREAMS {
            let half = link.half(stream);
            if half.rest_at().is_some_and(|at| at <= now)
                && let Some(receive) = half.receiving
            {
                half.resting = true;
                half.transmitter.rest();
                self.ring.cancel(receive);
            }
        }
        if link.net.load_balance_paths {
            self.look_at_lanes(key);
        }
        if let Some(link) = self.links.get_mut(key)
            && let Some(later) = link.next_look()
        {
            self.timers.arm(&mut link.armed, TimerKey::Link(key), later);
        }
    }

    /// A link ended by itself: the core is told, unless it closed the link.
    pub(super) fn link_down(&mut self, key: Key, reason: LinkDownReason) {
        let Some(link) = self.links.get(key) else {
            return;
        };
        let (resource, peer) = (link.resource, link.peer);
        if link.draining.is_none() {
            let input = Input::LinkDown {
                peer,
                link: LinkId(key.0),
                reason,
            };
            self.inputs.push_back((resource, input));
            if self.follow_end(key) {
                return self.event(resource, &Event::Connection(peer));
            }
        }
        self.remove_link(key);
        self.event(resource, &Event::Connection(peer));
    }

    /// Whether the peer is ending the paths of a lost link one after the other. Each of them ends
    /// here after it has ended there, as with an agreed end.
    fn follow_end(&mut self, key: Key) -> bool {
        let now = self.now;
        let Some(link) = self.links.get_mut(key) else {
            return false;
        };
        let begun = |half: &Half| matches!(&half.way, Way::Lanes(lanes) if lanes.begin_to_end());
        if !begun(&link.data) && !begun(&link.control) {
            return false;
        }
        link.draining = Some(now + DRAIN_TIME);
        link.awaits_end = Some(now + link.net.ping_timeout);
        link.is_lost = true;
        let resource = link.resource;
        for stream in STREAMS {
            for tag in link.half(stream).transmitter.take_marks() {
                self.inputs.push_back((resource, Input::Sent { tag }));
            }
        }
        self.drop_joining(key);
        self.arm_link(key);
        // What was parked for memory reads on only to see the end.
        STREAMS
            .into_iter()
            .for_each(|stream| self.parse(key, stream));
        self.drain(key);
        true
    }

    /// The core has closed it, and what was sent before is on its way.
    pub(super) fn is_draining(&self, key: Key) -> bool {
        self.links
            .get(key)
            .is_some_and(|link| link.draining.is_some())
    }

    pub(super) fn close_link(&mut self, resource: Key, key: Key, end: LinkEnd) {
        let now = self.now;
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        if link.resource != resource {
            return;
        }
        if end == LinkEnd::AtOnce {
            return self.remove_link(key);
        }
        link.draining = Some(now + DRAIN_TIME);
        if link.net.load_balance_paths && end == LinkEnd::Agreed {
            // A kernel ends all paths by itself, some 10 ms from socket to socket. One that it sees
            // ended before is left over in its next connection, which then hangs (wire.md, 9.1).
            link.awaits_end = Some(now + link.net.ping_timeout);
        }
        self.drop_joining(key);
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        // A stream that was parked for memory reads on only to see the end.
        if !std::mem::replace(&mut link.dirty, true) {
            self.dirty_links.push(key);
        }
        self.arm_link(key);
        self.drain(key);
    }

    /// Goes on with closing: what is queued leaves, then the end of the data stream is announced,
    /// and when the peer has ended it too, that of the control stream. So the peer does not see
    /// the end of one stream before the last packet of the other, and no reset loses bytes.
    pub(super) fn drain(&mut self, key: Key) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        let queued = |half: &Half| half.transmitter.queued_bytes() > 0;
        let waits = !link.is_lost && (queued(&link.data) || queued(&link.control));
        if link.draining.is_none() || waits {
            return;
        }
        for half in [&mut link.data, &mut link.control] {
            if let Way::Lanes(lanes) = &half.way {
                half.ended = lanes.have_ended();
            }
        }
        for stream in STREAMS {
            let due = stream == Stream::Data || link.data.ended;
            let half = link.half(stream);
            if due && !std::mem::replace(&mut half.shut, true) {
                match &mut half.way {
                    // An error means that the connection has ended already.
                    Way::Socket(fd) => {
                        let _ = SockRef::from(&*fd).shutdown(std::net::Shutdown::Write);
                    }
                    Way::Lanes(_) => {}
                }
            }
        }
        if let (Way::Lanes(data), Way::Lanes(control)) = (&mut link.data.way, &mut link.control.way)
        {
            let order = match link.awaits_end {
                Some(_) => EndOrder::Peer,
                None => EndOrder::Here,
            };
            data.shut(order);
            control.shut(order);
        }
        if link.data.ended && link.control.ended {
            self.remove_link(key);
        }
    }

    /// Forgets a link. Its sockets close when the ring gives their operations back.
    pub(super) fn remove_link(&mut self, key: Key) {
        self.drop_joining(key);
        let Some(mut link) = self.links.remove(key) else {
            return;
        };
        for stream in STREAMS {
            let half = link.half(stream);
            match &mut half.way {
                // The end reaches the peer now, although operations still own the descriptor.
                Way::Socket(fd) => {
                    let _ = SockRef::from(&*fd).shutdown(std::net::Shutdown::Both);
                }
                Way::Lanes(lanes) => {
                    let (ops, lanes) = lanes.close();
                    ops.into_iter().for_each(|op| self.ring.cancel(op));
                    for key in lanes {
                        self.lanes.remove(key);
                    }
                }
            }
            for op in [half.receiving.take(), half.sending.take()]
                .into_iter()
                .flatten()
            {
                self.ring.cancel(op);
            }
            for tag in half.transmitter.take_marks() {
                self.inputs.push_back((link.resource, Input::Sent { tag }));
            }
        }
        if let Some(slot) = self.resources.get_mut(link.resource) {
            slot.links.retain(|other| *other != key);
        }
    }

    /// Bytes that wait to be sent to a peer, on both streams of its link.
    pub(super) fn queued_bytes(&self, resource: Key, peer: NodeId) -> u64 {
        let Some(slot) = self.resources.get(resource) else {
            return 0;
        };
        let links = slot.links.iter().filter_map(|key| self.links.get(*key));
        let links = links.filter(|link| link.peer == peer && link.draining.is_none());
        links
            .map(|link| {
                link.data.transmitter.queued_bytes() + link.control.transmitter.queued_bytes()
            })
            .sum()
    }
}
