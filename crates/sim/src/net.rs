//! The network of a world: links with two ordered streams per direction, and what breaks them.

use lockstep_core::event::{Input, LinkDownReason, LinkId, Stream};
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire;

use crate::acks;
use crate::asking;
use crate::cover;
use crate::digest::digest_of;
use crate::disk::BLOCK;
use crate::limits;
use crate::marks;
use crate::sometimes;
use crate::story;
use crate::world::{Ev, Link, Message, Place, SECOND, Weather, World, id, name, stream_index};

impl World {
    /// Both ends want a link and the network lets them: it comes up a little later.
    pub(crate) fn consider_connect(&mut self, a: usize, b: usize) {
        let (a, b) = (a.min(b), a.max(b));
        let wanted = self.nodes[a].connecting.contains(&b) && self.nodes[b].connecting.contains(&a);
        let passes = !self.blocked.contains(&(a, b)) && !self.blocked.contains(&(b, a));
        if wanted && passes && self.connect_pending.insert((a, b)) {
            let delay = self.delay(Place::Wire(a, b, 0), self.config.net_delay * 3);
            self.at(delay, Ev::Connect { a, b });
        }
    }

    pub(crate) fn connect(&mut self, a: usize, b: usize) {
        self.connect_pending.remove(&(a, b));
        let wanted = self.nodes[a].connecting.contains(&b) && self.nodes[b].connecting.contains(&a);
        if !wanted || self.blocked.contains(&(a, b)) || self.blocked.contains(&(b, a)) {
            return;
        }
        let link = self.next_link;
        self.next_link += 1;
        self.links.insert(
            link,
            Link {
                ends: [a, b],
                lives: [self.nodes[a].life, self.nodes[b].life],
                up: [false; 2],
                closed: [false; 2],
                ended: [false; 2],
                wires: Default::default(),
                received: Default::default(),
                untold: Default::default(),
                open: Default::default(),
                broken: false,
                dead: false,
            },
        );
        for side in 0..2 {
            let (node, peer) = if side == 0 { (a, b) } else { (b, a) };
            self.nodes[node].connecting.remove(&peer);
            let mut delay = self.delay(Place::Wire(node, peer, 0), self.config.net_delay);
            if let Some(late) = self.nodes[node].late_link.take() {
                self.trace(node, || "== hears late of the new link".into());
                delay += late;
            }
            self.at(delay, Ev::LinkUp { link, side });
        }
    }

    pub(crate) fn link_up(&mut self, link: u64, side: usize) {
        let Some(l) = self.links.get_mut(&link) else {
            return;
        };
        let node = l.ends[side];
        let peer = l.ends[1 - side];
        if l.closed[side] || l.lives[side] != self.nodes[node].life {
            return;
        }
        l.up[side] = true;
        let resolver = (link + side as u64).is_multiple_of(2);
        self.nodes[node].links.insert(link, peer);
        self.input(
            node,
            Input::LinkUp {
                peer: id(peer),
                link: LinkId(link),
                resolve_conflicts: resolver,
            },
        );
        for stream in 0..2 {
            self.schedule_wire(link, 1 - side, stream);
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn send(
        &mut self,
        node: usize,
        peer: NodeId,
        link: LinkId,
        stream: Stream,
        volume: VolumeNr,
        packet: &wire::Packet,
        payload: Option<Vec<u64>>,
    ) {
        let Some(resource) = self.nodes[node].resource.as_ref() else {
            return;
        };
        // A send on a link that is gone is dropped. One that the core closes with this input is
        // still open: what was said before the end goes out first.
        let is_open = self
            .links
            .get(&link.0)
            .is_some_and(|l| !l.closed[usize::from(l.ends[0] != node)]);
        if !is_open || resource.link(peer).is_some_and(|present| present != link) {
            return;
        }
        let dialect = resource.dialect(peer);
        acks::said(self, node, peer, link, packet, volume);
        limits::sent(self, node, link, packet);
        asking::sent(self, (node, peer), link.0, packet, volume);
        let mut bytes = Vec::with_capacity(64);
        wire::encode(packet, volume, &dialect, &mut bytes);
        self.packets += 1;
        if let wire::Packet::RsDataReply(data) = packet {
            self.copied += u64::from(data.payload_len) / BLOCK;
        }
        marks::see_packet(&mut self.marks, packet);
        if self.is_traced() {
            let text = story::sent(usize::from(peer.0), volume, packet, payload.as_deref());
            self.trace(node, || text);
        }
        let payload =
            payload.map(|content| self.change_payload(node, usize::from(peer.0), content));
        self.mix(
            bytes
                .iter()
                .fold(0, |h: u64, b| h.wrapping_mul(31) + u64::from(*b)),
        );
        self.enqueue(link.0, node, stream_index(stream), Some(bytes), payload);
    }

    /// The next payloads from one node to another arrive changed.
    pub(crate) fn corrupt_next(&mut self, from: usize, to: usize, count: u32) {
        *self.spoils.entry((from, to)).or_default() += count;
    }

    fn change_payload(&mut self, from: usize, to: usize, mut content: Vec<u64>) -> Vec<u64> {
        if let Some(left) = self.spoils.get_mut(&(from, to)).filter(|left| **left > 0) {
            *left -= 1;
            let at = content.len() / 2;
            if let Some(value) = content.get_mut(at) {
                *value ^= 1 << 40;
            }
            self.trace(from, || format!("== a payload to {} is changed", name(to)));
        }
        content
    }

    pub(crate) fn enqueue(
        &mut self,
        link: u64,
        node: usize,
        stream: usize,
        bytes: Option<Vec<u8>>,
        payload: Option<Vec<u64>>,
    ) {
        let now = self.now;
        let Some(l) = self.links.get(&link) else {
            if self.config.weather == Weather::OneStream {
                self.rng.delay(1);
            }
            return;
        };
        let side = usize::from(l.ends[0] != node);
        let peer = l.ends[1 - side];
        let delay = self.wire_delay(node, peer, stream);
        let len = bytes.as_ref().map_or(0, Vec::len) as u64
            + payload.as_ref().map_or(0, Vec::len) as u64 * BLOCK;
        let bandwidth = self.config.bandwidth;
        let Some(l) = self.links.get_mut(&link) else {
            return;
        };
        let wire = &mut l.wires[side][stream];
        if wire.cut && bytes.is_some() {
            // A stream has no holes: what was before it is lost.
            return;
        }
        let at = match bandwidth {
            // The bytes follow each other on the wire, and then they travel.
            Some(bandwidth) => {
                wire.busy_until = wire.busy_until.max(now) + len * 1_000_000_000 / bandwidth;
                wire.busy_until + delay
            }
            None => now + delay,
        };
        let at = at.max(wire.last).max(wire.stalled_until);
        wire.last = at;
        wire.queue.push_back(Message { at, bytes, payload });
        self.schedule_wire(link, side, stream);
    }

    /// What one node says now reaches the other within a second: not much is before it on the line.
    pub(crate) fn is_heard_soon(&self, node: usize, peer: usize) -> bool {
        let soon = self.now + SECOND;
        let sides = |l: &Link| [(l.ends[0], l.ends[1], 0), (l.ends[1], l.ends[0], 1)];
        let late = |l: &Link| {
            let mut sides = sides(l).into_iter();
            sides.any(|(from, to, side)| (from, to) == (node, peer) && l.wires[side][0].last > soon)
        };
        !self.links.values().any(|l| !l.dead && late(l))
    }

    pub(crate) fn schedule_wire(&mut self, link: u64, side: usize, stream: usize) {
        let now = self.now;
        let Some(l) = self.links.get_mut(&link) else {
            return;
        };
        let passes = !self.blocked.contains(&(l.ends[side], l.ends[1 - side]));
        let wire = &mut l.wires[side][stream];
        if wire.scheduled || !passes || !l.up[1 - side] {
            return;
        }
        if let Some(first) = wire.queue.front() {
            wire.scheduled = true;
            let delay = first.at.max(wire.stalled_until).saturating_sub(now);
            self.at(delay, Ev::Deliver { link, side, stream });
        }
    }

    pub(crate) fn deliver(&mut self, link: u64, side: usize, stream: usize) {
        let now = self.now;
        let Some(l) = self.links.get_mut(&link) else {
            return;
        };
        let (from, to) = (l.ends[side], l.ends[1 - side]);
        let wire = &mut l.wires[side][stream];
        wire.scheduled = false;
        if wire.stalled_until > now {
            self.schedule_wire(link, side, stream);
            return;
        }
        if self.blocked.contains(&(from, to)) {
            return;
        }
        let frozen_until = self.nodes[to].frozen_until;
        if frozen_until > now {
            wire.scheduled = true;
            self.at(frozen_until - now, Ev::Deliver { link, side, stream });
            return;
        }
        let Some(message) = wire.queue.pop_front() else {
            return;
        };
        let receives = !l.closed[1 - side] && l.lives[1 - side] == self.nodes[to].life;
        if receives {
            match message.bytes {
                Some(bytes) => {
                    self.receive(link, from, to, stream, &bytes, message.payload);
                }
                None => self.link_down(link, to, LinkDownReason::Closed),
            }
        }
        self.schedule_wire(link, side, stream);
        self.forget_link(link);
    }

    pub(crate) fn receive(
        &mut self,
        link: u64,
        from: usize,
        to: usize,
        stream: usize,
        bytes: &[u8],
        payload: Option<Vec<u64>>,
    ) {
        let Some(resource) = self.nodes[to].resource.as_ref() else {
            return;
        };
        let peer = id(from);
        if resource.link(peer) != Some(LinkId(link)) {
            return;
        }
        let dialect = resource.dialect(peer);
        let (wire_stream, stream) = if stream == 0 {
            (wire::Stream::Data, Stream::Data)
        } else {
            (wire::Stream::Control, Stream::Control)
        };
        let decoded = wire::decode_header(bytes, wire_stream, &dialect)
            .map_err(|e| e.to_string())
            .and_then(|h| h.ok_or_else(|| "short header".to_string()))
            .and_then(|h| {
                let body = &bytes[h.kind.len()..];
                wire::decode(&h, body, &dialect)
                    .map(|p| (h, p))
                    .map_err(|e| e.to_string())
            });
        let (header, packet) = match decoded {
            Ok(found) => found,
            // What comes behind a gap means nothing.
            Err(_) if self.links.get(&link).is_some_and(|l| l.broken) => return,
            Err(text) => {
                self.fail(format!(
                    "{} cannot decode a packet of {}: {text}",
                    name(to),
                    name(from)
                ));
                return;
            }
        };
        let blocks = payload.as_ref().map_or(0, Vec::len) as u64 * BLOCK;
        if u64::from(packet.payload_len()) != blocks {
            self.fail(format!(
                "{} sent {:?} with {blocks} bytes of payload",
                name(from),
                packet.command()
            ));
            return;
        }
        let alg = self.nodes[to]
            .resource
            .as_ref()
            .and_then(|r| r.peer_integrity(peer));
        if let (Some(alg), Some(wanted), Some(content)) = (alg, packet.integrity(), &payload)
            && digest_of(alg.name(), content) != wanted.as_bytes()
        {
            sometimes!(self.marks, true, "corrupt-payload-caught");
            let (link, volume) = (LinkId(link), header.volume);
            self.input(
                to,
                Input::Corrupt {
                    peer,
                    link,
                    volume,
                    packet,
                },
            );
            return;
        }
        acks::received(self, link, to, &packet, payload.as_deref(), header.volume);
        limits::heard(self, to, link, &packet);
        asking::heard(self, to, link, &packet, header.volume);
        let payload = payload.map(|content| self.new_buffer(to, content));
        let claim = match &packet {
            wire::Packet::PeersInSync(sync) => Some(*sync),
            _ => None,
        };
        self.input(
            to,
            Input::Packet {
                peer,
                link: LinkId(link),
                stream,
                volume: header.volume,
                packet,
                payload,
            },
        );
        if let Some(sync) = claim {
            cover::range_is_known(self, to, header.volume, sync.sector, sync.size_bytes);
        }
        self.count_delivery(from, to);
    }

    /// A node hears that a link is gone.
    pub(crate) fn link_down(&mut self, link: u64, node: usize, reason: LinkDownReason) {
        let Some(l) = self.links.get_mut(&link) else {
            return;
        };
        let side = usize::from(l.ends[0] != node);
        if l.closed[side] {
            return;
        }
        l.closed[side] = true;
        let peer = l.ends[1 - side];
        self.nodes[node].links.remove(&link);
        self.input(
            node,
            Input::LinkDown {
                peer: id(peer),
                link: LinkId(link),
                reason,
            },
        );
        self.close(link, node, false, false);
    }

    /// One side is done with a link. What it sent may still arrive, in part unless `flush`.
    pub(crate) fn close(&mut self, link: u64, node: usize, flush: bool, silent: bool) {
        let Some(l) = self.links.get_mut(&link) else {
            return;
        };
        let side = usize::from(l.ends[0] != node);
        l.closed[side] = true;
        let ended = std::mem::replace(&mut l.ended[side], true);
        if l.closed[1 - side] {
            l.dead = true;
        }
        let peer = l.ends[1 - side];
        if ended {
            self.forget_link(link);
            return;
        }
        for stream in 0..2 {
            if let Some(l) = self.links.get_mut(&link) {
                l.wires[1 - side][stream].queue.clear();
            }
            if !flush {
                self.lose_tail(link, side, stream, (node, peer));
            }
        }
        if !silent {
            // The driver ends the control stream after the peer has ended the data stream, so that
            // the end of one does not overtake the last packet of the other.
            for stream in 0..if flush { 1 } else { 2 } {
                self.enqueue(link, node, stream, None, None);
            }
        }
        self.forget_link(link);
    }

    /// Of what is under way on a stream, only some of the oldest still arrives.
    fn lose_tail(&mut self, link: u64, side: usize, stream: usize, (from, to): (usize, usize)) {
        let len = match self.links.get(&link) {
            Some(l) => l.wires[side][stream].queue.len() as u64,
            None => return,
        };
        let keep = self.chance(Place::Wire(from, to, stream)).below(len + 1) as usize;
        if let Some(l) = self.links.get_mut(&link) {
            l.wires[side][stream].queue.truncate(keep);
        }
    }

    pub(crate) fn forget_link(&mut self, link: u64) {
        if self.links.get(&link).is_some_and(|l| l.dead) {
            self.links.remove(&link);
        }
    }

    /// The network breaks every link between two nodes; each hears of it at its own time.
    pub fn reset(&mut self, a: usize, b: usize) {
        let links: Vec<u64> = self
            .links
            .iter()
            .filter(|(_, l)| l.ends == [a.min(b), a.max(b)] && !l.dead)
            .map(|(link, _)| *link)
            .collect();
        for link in links {
            self.trace(a, || format!("== reset of link {link} with {}", name(b)));
            if let Some(l) = self.links.get_mut(&link) {
                l.broken = true;
            }
            for side in 0..2 {
                let ends = if side == 0 {
                    (a.min(b), a.max(b))
                } else {
                    (a.max(b), a.min(b))
                };
                let place = Place::Wire(ends.0, ends.1, 0);
                let delay = self.delay(place, self.config.net_delay * 4);
                for stream in 0..2 {
                    self.lose_tail(link, side, stream, ends);
                }
                let Some(l) = self.links.get_mut(&link) else {
                    continue;
                };
                l.wires[side].iter_mut().for_each(|wire| wire.cut = true);
                let node = l.ends[side];
                let life = l.lives[side];
                let peer = id(l.ends[1 - side]);
                if l.up[side] {
                    self.at(
                        delay,
                        Ev::Input {
                            node,
                            life,
                            input: Box::new(Input::LinkDown {
                                peer,
                                link: LinkId(link),
                                reason: LinkDownReason::Broken,
                            }),
                        },
                    );
                }
            }
        }
    }

    /// The node has a link to the peer, and the peer did not restart since it came up.
    pub fn shares_link(&self, node: usize, peer: usize) -> bool {
        let ends = [node.min(peer), node.max(peer)];
        self.nodes[node].links.keys().any(|link| {
            self.links.get(link).is_some_and(|l| {
                l.ends == ends && (0..2).all(|side| l.lives[side] == self.nodes[ends[side]].life)
            })
        })
    }

    /// Blocks that resyncs have sent.
    pub fn copied(&self) -> u64 {
        self.copied
    }

    /// Nothing passes between the node and all others.
    pub fn isolate(&mut self, node: usize) {
        for peer in (0..self.nodes.len()).filter(|p| *p != node) {
            self.set_blocked(node, peer, true);
            self.set_blocked(peer, node, true);
        }
    }

    /// The node hears of its next link so much later than the peer.
    pub fn next_link_late(&mut self, node: usize, time: u64) {
        self.nodes[node].late_link = Some(time);
    }

    /// Nothing of a stream moves for a while.
    pub fn stall(&mut self, from: usize, to: usize, stream: usize, time: u64) {
        let until = self.now + time;
        let ends = [from.min(to), from.max(to)];
        for l in self.links.values_mut().filter(|l| l.ends == ends) {
            let side = usize::from(l.ends[0] != from);
            let wire = &mut l.wires[side][stream];
            // What an earlier stall holds up comes at its end.
            wire.stalled_until = wire.stalled_until.max(until);
        }
    }

    /// Something is on its way between nodes.
    pub fn carries_packets(&self) -> bool {
        let links = self.links.values().filter(|l| !l.dead);
        let mut wires = links.flat_map(|l| l.wires.iter().flatten());
        wires.any(|wire| !wire.queue.is_empty())
    }

    /// Some stream does not move, or some process.
    pub fn stands_still(&self) -> bool {
        let mut wires = self.links.values().flat_map(|l| l.wires.iter().flatten());
        let frozen = self.nodes.iter().any(|n| n.frozen_until > self.now);
        // What a disk began while it was slow takes its time although it works again.
        let mut disks = self.nodes.iter().flat_map(|n| &n.disks);
        frozen
            || wires.any(|wire| wire.stalled_until > self.now)
            || disks.any(|disk| !disk.flying_meta.is_empty())
    }

    /// Opens or closes a direction.
    pub fn set_blocked(&mut self, from: usize, to: usize, blocked: bool) {
        if blocked {
            self.blocked.insert((from, to));
            return;
        }
        if !self.blocked.remove(&(from, to)) {
            return;
        }
        let ends = [from.min(to), from.max(to)];
        let links: Vec<u64> = self
            .links
            .iter()
            .filter(|(_, l)| l.ends == ends)
            .map(|(link, _)| *link)
            .collect();
        for link in links {
            for stream in 0..2 {
                let side = usize::from(ends[0] != from);
                self.schedule_wire(link, side, stream);
            }
        }
        self.consider_connect(from, to);
    }
}
