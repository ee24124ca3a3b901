//! Feeds the stand-in and compares what it sends with what the kernel sent.
//!
//! Free are: the timing of pings, hints, the ids of blocks, transactions and epochs, UUIDs that the
//! node itself made (each captured one must always stand for the same one here), the pace and the
//! cut of resync requests, how far ahead the driver of a verify is, and when peer acks are sent.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use lockstep_core::auth::{Authenticator, HmacAlg};
use lockstep_core::event::{RequestKind, Stream};
use lockstep_core::options::{DiskOptions, NetOptions, PeerDeviceOptions, ResourceOptions};
use lockstep_format::disk::layout::Geometry;
use lockstep_format::units::{NodeId, Sector, Uuid, VolumeNr};
use lockstep_format::wire::packet::{BarrierAck, BlockId, Data, PeerAck, Trim};
use lockstep_format::wire::{self, DataFlags, Packet, Role, UuidFlags};

use crate::capture::{Item, Seen, What};
use crate::conflicts::Conflicts;
use crate::copies::Copies;
use crate::early::Waiting;
use crate::epochs::Epochs;
use crate::packets::{event_stream, is_cut_off, is_free, is_told_again, show};
use crate::stand_in::{Sent, StandIn};
use crate::verify::{Verify, is_driven};

/// How the captured node was configured.
pub(crate) struct Setup {
    pub(crate) geometry: Geometry,
    pub(crate) net: NetOptions,
    pub(crate) disk: DiskOptions,
    pub(crate) peer_disk: PeerDeviceOptions,
    pub(crate) options: ResourceOptions,
    /// Nodes without a disk.
    pub(crate) diskless: BTreeSet<NodeId>,
    /// The peer's secret, where it has another one.
    pub(crate) peer_secret: Option<String>,
}

impl Setup {
    pub(crate) fn is_legacy(&self) -> bool {
        self.options.protocol_max <= wire::PROTOCOL_MAX_84
    }
}

/// A packet that is missing, and until when it may.
pub(crate) struct Late {
    seen: Seen,
    sent_ns: u64,
    until_ns: u64,
}

/// Something that the core sent and the kernel did not, or the other way round.
pub(crate) struct Difference {
    pub(crate) text: String,
    /// When it was sent.
    pub(crate) at_ns: u64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.at_ns / 1_000_000;
        write!(f, "{:3}.{:03} {}", ms / 1000, ms % 1000, self.text)
    }
}

/// A replay under way.
pub(crate) struct Replay<'a> {
    pub(crate) node: StandIn,
    pub(crate) me: NodeId,
    pub(crate) peers: Vec<NodeId>,
    pub(crate) setup: &'a Setup,
    /// Captured UUID, without the Primary bit, to the one that the core made instead.
    pub(crate) uuids: BTreeMap<u64, u64>,
    /// By the peer that has the id.
    pub(crate) blocks: BTreeMap<(NodeId, u64), u64>,
    pub(crate) tids: BTreeMap<u32, u32>,
    /// Content of the peers' disks as far as resyncs showed it, by sector.
    pub(crate) image: BTreeMap<u64, Vec<u8>>,
    /// Resync requests of the core that wait for the capture's replies to come as far.
    pub(crate) requests: VecDeque<Sent>,
    /// Requests that were answered and not acked yet.
    pub(crate) served: Vec<(Sector, u32)>,
    pub(crate) credit: BTreeMap<NodeId, u64>,
    /// The present options of the connections, and towards the peers.
    pub(crate) net: NetOptions,
    pub(crate) peer_disk: PeerDeviceOptions,
    /// Requests with digests: block id by sector.
    pub(crate) hashed: BTreeMap<Sector, BlockId>,
    pub(crate) epochs: BTreeMap<NodeId, Epochs>,
    /// The network is slow: the peer acks nothing before the core goes Ahead.
    pub(crate) congested: bool,
    /// The write that made it go Ahead was issued, and is the first that is only marked.
    pub(crate) pulled_ahead: bool,
    /// Last peer ack of the kernel and of the core.
    pub(crate) peer_acks: BTreeMap<NodeId, [Option<PeerAck>; 2]>,
    /// What the kernel announced last, by kind of packet: it likes to repeat itself.
    pub(crate) announced: BTreeMap<(NodeId, u16), Packet>,
    /// The core's own challenge, which the kernel's response has to answer.
    pub(crate) challenge: Option<[u8; 64]>,
    /// Packets that the core did not send yet, and until when it may.
    pub(crate) late: Vec<Late>,
    /// A command that waits for the packet that shows it.
    pub(crate) postponed: Option<&'a str>,
    /// A disconnect stands before writes in one line of the shell: they come when it is done.
    pub(crate) alone: Option<&'a [Item]>,
    /// What the capture shows of writes of two Primaries to the same blocks.
    pub(crate) conflicts: Conflicts,
    /// Own writes of which more copies are to come.
    pub(crate) copies: Copies,
    /// Answers that came before their questions.
    pub(crate) early: Waiting<'a>,
    /// What the core sends as the driver of an online verify.
    pub(crate) verify: Verify,
    /// A peer that was cut off.
    pub(crate) lost: Option<NodeId>,
    pub(crate) differences: Vec<Difference>,
}

/// How long a packet may be missing until others were fed.
const LATE_NS: u64 = 1_000_000_000;
/// With more differences than this, what follows tells nothing, and to look for all that is missing with
/// every packet of the capture takes too long.
const MOST_DIFFERENCES: usize = 500;
/// How long the core may take longer than the kernel did.
pub(crate) const PATIENCE_NS: u64 = 400_000_000;

impl<'a> Replay<'a> {
    /// Replays everything; returns what differs.
    pub(crate) fn run(items: &'a [Item], me: NodeId, setup: &'a Setup) -> Vec<Difference> {
        let mut peers: Vec<NodeId> = items
            .iter()
            .filter_map(|item| match &item.what {
                What::Up { nodes, .. } if nodes.contains(&me) => {
                    nodes.iter().copied().find(|n| *n != me)
                }
                _ => None,
            })
            .collect();
        peers.sort();
        peers.dedup();
        let start = items[0].time_ns;
        let node = StandIn::new(me, 0, setup.geometry, setup.options.clone());
        let mut replay = Replay {
            node,
            me,
            peers,
            setup,
            uuids: BTreeMap::new(),
            blocks: BTreeMap::new(),
            tids: BTreeMap::new(),
            image: BTreeMap::new(),
            requests: VecDeque::new(),
            served: Vec::new(),
            credit: BTreeMap::new(),
            net: setup.net.clone(),
            peer_disk: setup.peer_disk.clone(),
            hashed: BTreeMap::new(),
            epochs: BTreeMap::new(),
            congested: false,
            pulled_ahead: false,
            peer_acks: BTreeMap::new(),
            announced: BTreeMap::new(),
            challenge: None,
            late: Vec::new(),
            postponed: None,
            alone: None,
            conflicts: Conflicts::default(),
            copies: Copies::default(),
            early: Waiting::default(),
            verify: Verify::default(),
            lost: None,
            differences: Vec::new(),
        };
        replay.images(items);
        for (index, item) in items.iter().enumerate() {
            let now = item.time_ns - start;
            replay.node.advance(now);
            replay.serve();
            replay.cut_off(&item.what);
            match &item.what {
                What::Command { node, text } if *node == me => {
                    if replay.follows_writes(items, index) {
                        replay.postponed = Some(text);
                    } else if replay.follows_disconnect(items, index) {
                        replay.alone = Some(&items[index..]);
                    } else {
                        replay.operator(text, &items[index..]);
                    }
                }
                What::Command { node, text } if is_cut_off(text) && !replay.is_cluster() => {
                    replay.lose(*node);
                }
                What::Up {
                    nodes, acceptor, ..
                } if nodes.contains(&me) => {
                    replay.writes_while_lost(&items[index..]);
                    replay.up(*nodes, *acceptor);
                }
                What::Down { nodes, .. } if nodes.contains(&me) => {
                    if let Some(peer) = nodes.iter().find(|n| **n != me) {
                        replay.down(*peer);
                    }
                }
                What::Packet(seen) if seen.to == me => {
                    replay.feed_or_wait(seen, &items[index..], now);
                }
                // What was sent to a node that is cut off is written all the same: its marks show.
                What::Packet(seen) if seen.from == me && replay.is_lost(seen) => {
                    // Or it was the last that was sent.
                    if let Some(at) = replay.find(seen) {
                        let sent = replay.node.sent.remove(at);
                        replay.learn(seen, &sent);
                    }
                }
                What::Packet(seen) if seen.from == me => {
                    replay.congest(&items[index..]);
                    let demoted =
                        matches!(&seen.packet, Packet::State(s) if s.role == Role::Secondary);
                    if let Some(text) = replay.postponed.take_if(|_| demoted) {
                        replay.operator(text, &items[index..]);
                        replay.serve();
                    }
                    replay.expect(seen, now, &items[index + 1..]);
                }
                _ => {}
            }
            replay.serve();
            replay.feed_early(now);
            replay.serve();
            replay.find_late(now);
            if replay.late.len() + replay.differences.len() > MOST_DIFFERENCES {
                let text = format!("gives up: there are more than {MOST_DIFFERENCES} differences");
                replay.differ(now, text);
                break;
            }
        }
        replay.leftovers(None, "the end");
        replay.differences
    }

    /// Collects what resyncs of the capture show of disks that were not written before.
    pub(crate) fn images(&mut self, items: &[Item]) {
        let mut written: Vec<(u64, u64)> = Vec::new();
        for item in items {
            let What::Packet(seen) = &item.what else {
                continue;
            };
            match &seen.packet {
                Packet::RsDataReply(data) if seen.to == self.me => {
                    for (i, block) in seen.payload.chunks(512).enumerate() {
                        self.image.insert(data.sector.0 + i as u64, block.to_vec());
                    }
                }
                Packet::RsDataReply(data) if seen.from == self.me => {
                    let (from, to) = (data.sector.0, data.sector.end_of(data.payload_len).0);
                    let dirty = written.iter().any(|(a, b)| *a < to && from < *b);
                    if !dirty {
                        let at = (from * 512) as usize;
                        self.node.data[at..at + seen.payload.len()].copy_from_slice(&seen.payload);
                    }
                }
                Packet::Data(data) => {
                    let (from, to) = (data.sector.0, data.sector.end_of(data.payload_len).0);
                    written.push((from, to));
                }
                _ => {}
            }
        }
    }

    pub(crate) fn both_write(&self) -> bool {
        self.setup.net.allow_two_primaries
    }

    pub(crate) fn differ(&mut self, at_ns: u64, text: String) {
        self.differences.push(Difference { text, at_ns });
    }

    pub(crate) fn forget_links(&mut self) {
        self.requests.clear();
        self.served.clear();
        self.verify.rest(None);
        self.credit.clear();
        self.epochs.clear();
        self.late.clear();
        self.peer_acks.clear();
        self.announced.clear();
    }

    pub(crate) fn up(&mut self, nodes: [NodeId; 2], acceptor: NodeId) {
        let Some(peer) = nodes.iter().copied().find(|n| *n != self.me) else {
            return;
        };
        // Its old connection was never closed: the cable was pulled.
        if self.node.links.contains_key(&peer) {
            self.down(peer);
        }
        let until = self.node.now + 3_000_000_000;
        while self.node.connecting.get(&peer) != Some(&true) {
            if !self.node.step(until) {
                self.differ(
                    self.node.now,
                    format!("does not want to connect to node {peer}"),
                );
                return;
            }
        }
        self.conflicts.decides = acceptor == self.me;
        self.node.link_up(peer, acceptor == self.me);
    }

    pub(crate) fn down(&mut self, peer: NodeId) {
        self.early.retain(|early| early.seen.from != peer);
        self.leftovers(Some(peer), "the end of the connection");
        self.node.link_down(peer);
        self.requests.retain(|r| r.to != peer);
        self.credit.remove(&peer);
        self.epochs.remove(&peer);
        let [kernel, core] = self.peer_acks.remove(&peer).unwrap_or_default();
        if kernel != core {
            self.differ(
                self.node.now,
                format!("last peer ack {core:?} instead of {kernel:?}"),
            );
        }
        if let Some(ahead) = self.alone.take_if(|_| self.node.links.is_empty()) {
            self.write_alone(ahead);
        }
    }

    /// Sends of the core that the kernel did not send.
    pub(crate) fn leftovers(&mut self, peer: Option<NodeId>, at: &str) {
        self.serve();
        let concerns = |other: NodeId| peer.is_none_or(|peer| peer == other);
        let (late, rest) = std::mem::take(&mut self.late)
            .into_iter()
            .partition(|late| concerns(late.seen.to));
        self.late = late;
        self.find_late(u64::MAX);
        self.late = rest;
        let (sent, rest) = std::mem::take(&mut self.node.sent)
            .into_iter()
            .partition(|sent| concerns(sent.to));
        self.node.sent = rest;
        let mut sent: Vec<Sent> = sent;
        sent.extend(self.verify.rest(peer));
        for sent in sent {
            // A state more than the kernel tells is information, never a command.
            let asks = UuidFlags::NEW_DATAGEN
                | UuidFlags::GOT_STABLE
                | UuidFlags::RESYNC
                | UuidFlags::SKIP_INITIAL_SYNC;
            let told = match &sent.packet {
                Packet::State(_) => true,
                Packet::Uuids110(uuids) => !uuids.flags.intersects(asks),
                Packet::Uuids(uuids) => !uuids.flags.intersects(asks),
                _ => false,
            };
            if !is_free(&sent.packet) && !told {
                let text = format!("extra at {at}: {:?} {}", sent.stream, show(&sent.packet));
                self.differ(sent.at_ns, text);
            }
        }
    }

    /// Answers what the peer answers by itself: barriers, and resync requests at the pace of the
    /// capture.
    pub(crate) fn serve(&mut self) {
        loop {
            let mut again = false;
            let sent = std::mem::take(&mut self.node.sent);
            let mut rest = Vec::new();
            for packet in sent {
                match packet.packet {
                    ref driven if is_driven(driven) => self.verify.take(packet),
                    Packet::RsDataRequest(_) | Packet::RsDagtagReq(_) => {
                        self.requests.push_back(packet);
                    }
                    Packet::RsWriteAck(ack)
                        if self.served.contains(&(ack.sector, ack.size_bytes)) =>
                    {
                        self.served.retain(|s| *s != (ack.sector, ack.size_bytes));
                    }
                    Packet::PeerAck(ack) => {
                        self.peer_acks.entry(packet.to).or_default()[1] = Some(ack);
                    }
                    Packet::Barrier(barrier) => {
                        let epochs = self.epochs.entry(packet.to).or_default();
                        let open = std::mem::take(&mut epochs.writes);
                        let unanswered = std::mem::take(&mut epochs.unanswered);
                        if open > 0 || !std::mem::take(&mut epochs.refused) {
                            epochs.closed.push_back((barrier.barrier, open, unanswered));
                        }
                        again |= self.ack_epochs(packet.to);
                    }
                    Packet::Data(Data {
                        block_id, flags, ..
                    })
                    | Packet::Trim(Trim {
                        block_id, flags, ..
                    })
                    | Packet::Zeroes(Trim {
                        block_id, flags, ..
                    }) if !packet.counted => {
                        let epochs = self.epochs.entry(packet.to).or_default();
                        epochs.writes += 1;
                        let wants = DataFlags::SEND_WRITE_ACK | DataFlags::SEND_RECEIVE_ACK;
                        if flags.intersects(wants) {
                            epochs.unanswered.push(block_id.0);
                        }
                        rest.push(Sent {
                            counted: true,
                            ..packet
                        });
                    }
                    _ => rest.push(packet),
                }
            }
            rest.append(&mut self.node.sent);
            self.node.sent = rest;
            while let Some(request) = self.requests.front() {
                let (sector, block_id, size) = match request.packet {
                    Packet::RsDataRequest(r) => (r.sector, r.block_id, r.size_bytes),
                    Packet::RsDagtagReq(r) => (r.sector, r.block_id, r.size_bytes),
                    _ => break,
                };
                let to = request.to;
                let credit = self.credit.entry(to).or_default();
                if *credit < u64::from(size) {
                    break;
                }
                *credit -= u64::from(size);
                self.requests.pop_front();
                let mut payload = Vec::with_capacity(size as usize);
                for i in 0..u64::from(size) / 512 {
                    match self.image.get(&(sector.0 + i)) {
                        Some(bytes) => payload.extend_from_slice(bytes),
                        None => payload.extend_from_slice(&[0; 512]),
                    }
                }
                self.served.push((sector, size));
                let packet = Packet::RsDataReply(Data {
                    sector,
                    block_id,
                    payload_len: size,
                    ..Data::default()
                });
                self.node
                    .packet(to, Stream::Data, VolumeNr(0), packet, payload);
                again = true;
            }
            if !again {
                return;
            }
        }
    }

    /// Acks the epochs whose writes all have their answers.
    pub(crate) fn ack_epochs(&mut self, peer: NodeId) -> bool {
        let mut any = false;
        if self.congested {
            return any;
        }
        while let Some(epochs) = self.epochs.get_mut(&peer)
            && let Some((number, writes, unanswered)) = epochs.closed.front().cloned()
            && unanswered.is_empty()
        {
            epochs.closed.pop_front();
            let ack = Packet::BarrierAck(BarrierAck {
                barrier: number,
                set_size: writes,
            });
            self.node
                .packet(peer, Stream::Control, VolumeNr::NONE, ack, Vec::new());
            any = true;
        }
        any
    }

    /// A packet of a peer.
    pub(crate) fn feed(&mut self, seen: &Seen, ahead: &[Item]) {
        let stream = event_stream(seen.stream);
        let mut packet = seen.packet.clone();
        match &mut packet {
            Packet::PingAck | Packet::InitialData | Packet::InitialMeta => return,
            // The stand-in for the peer answers for itself.
            Packet::BarrierAck(_) => return,
            // The answer to a digest: the request was the same here.
            Packet::RsDataReply(data) if self.hashed.contains_key(&data.sector) => {
                if let Some(id) = self.hashed.remove(&data.sector) {
                    data.block_id = id;
                }
                self.served.push((data.sector, data.payload_len));
            }
            Packet::RsDeallocated(desc) => self.served.push((desc.sector, desc.size_bytes)),
            Packet::RsDeallocatedId(ack) => {
                if let Some(id) = self.hashed.remove(&ack.sector) {
                    ack.block_id = id;
                }
                self.served.push((ack.sector, ack.size_bytes));
            }
            Packet::RsDataReply(data) => {
                *self.credit.entry(seen.from).or_default() += u64::from(data.payload_len);
                let me = self.me;
                let last = !ahead[1..].iter().any(|item| {
                    matches!(&item.what, What::Packet(s) if s.to == me
                        && s.session == seen.session
                        && matches!(s.packet, Packet::RsDataReply(_)))
                });
                if last {
                    self.credit.insert(seen.from, u64::MAX / 2);
                }
                return;
            }
            Packet::ConnectionFeatures(_) => {}
            Packet::Uuids110(u) => {
                u.current = self.here(u.current);
                for (_, uuid) in &mut u.bitmap_uuids {
                    *uuid = self.here(*uuid);
                }
                for uuid in &mut u.history {
                    *uuid = self.here(*uuid);
                }
            }
            Packet::Uuids(u) => {
                u.current = self.here(u.current);
                u.bitmap = self.here(u.bitmap);
                u.history = [self.here(u.history[0]), self.here(u.history[1])];
            }
            Packet::AuthResponse(response) => {
                if let Some(own) = self.response(seen.from) {
                    *response = own;
                }
            }
            Packet::SyncUuid(uuid) => *uuid = self.here(*uuid),
            Packet::CurrentUuid(c) => c.uuid = self.here(c.uuid),
            Packet::TwopcYes(r) | Packet::TwopcNo(r) | Packet::TwopcRetry(r) => {
                if let Some(tid) = self.tids.get(&r.tid) {
                    r.tid = *tid;
                }
            }
            Packet::RecvAck(ack)
            | Packet::WriteAck(ack)
            | Packet::WriteAckInSync(ack)
            | Packet::NegAck(ack)
            | Packet::RsWriteAck(ack)
            | Packet::Superseded(ack)
            | Packet::NegDreply(ack) => {
                if let Some(id) = self.blocks.get(&(seen.from, ack.block_id.0)) {
                    ack.block_id = BlockId(*id);
                }
            }
            Packet::OvDagtagReply(reply) => {
                reply.block_id = self.verify.own_id(seen.from, reply.sector, reply.block_id);
            }
            Packet::DataReply(data) => {
                if let Some(id) = self.blocks.get(&(seen.from, data.block_id.0)) {
                    data.block_id = BlockId(*id);
                }
            }
            _ => {}
        }
        let answered = match &packet {
            Packet::RecvAck(ack)
            | Packet::WriteAck(ack)
            | Packet::WriteAckInSync(ack)
            | Packet::NegAck(ack)
            | Packet::Superseded(ack)
            | Packet::RsWriteAck(ack) => Some(ack.block_id.0),
            _ => None,
        };
        self.node
            .packet(seen.from, stream, seen.volume, packet, seen.payload.clone());
        if let Some(id) = answered
            && let Some(epochs) = self.epochs.get_mut(&seen.from)
        {
            epochs.answered(id, matches!(seen.packet, Packet::Superseded(_)));
            self.ack_epochs(seen.from);
        }
    }

    /// What a peer with the same secret answers to the core's challenge.
    pub(crate) fn response(&self, peer: NodeId) -> Option<wire::Digest> {
        let alg = HmacAlg::from_name(self.setup.net.cram_hmac_alg.as_deref()?).ok()?;
        let setup = self.setup;
        let secret = setup
            .peer_secret
            .as_ref()
            .or(setup.net.shared_secret.as_ref())?;
        let nodes = (!self.setup.is_legacy()).then_some((peer, self.me));
        let own = Authenticator::new(alg, secret, [0; 64], nodes);
        own.respond(&self.challenge?).ok()
    }

    /// The core's UUID for a captured one.
    pub(crate) fn here(&self, captured: Uuid) -> Uuid {
        let bit = captured.0 & 1;
        match self.uuids.get(&(captured.0 & !1)) {
            Some(own) => Uuid(own | bit),
            None => captured,
        }
    }

    /// A packet that the kernel sent: the core has to send it, too.
    pub(crate) fn expect(&mut self, seen: &Seen, now: u64, ahead: &[Item]) {
        match &seen.packet {
            Packet::Uuids110(uuids) if is_told_again(seen, uuids, ahead) => return,
            packet if is_free(packet) => return,
            Packet::InitialData | Packet::InitialMeta | Packet::Barrier(_) => return,
            Packet::PeerAck(ack) => {
                self.peer_acks.entry(seen.to).or_default()[0] = Some(*ack);
                return;
            }
            Packet::RsDataRequest(_) | Packet::RsDagtagReq(_) => return,
            driven if is_driven(driven) => return self.expect_driven(seen, now),
            // At 8.4 such an ack may also be that of an application write.
            Packet::RsWriteAck(ack)
                if ack.block_id == BlockId::SYNCER || !self.setup.is_legacy() =>
            {
                return;
            }
            Packet::Data(_) | Packet::Trim(_) | Packet::Zeroes(_)
                if !self.copies.is_first(seen, self.peers.len()) => {}
            Packet::Data(_) if self.conflicts.began(seen) => {}
            Packet::Data(data) => {
                let fua = data.flags.contains(DataFlags::FUA);
                self.node.write(data.sector, seen.payload.clone(), fua);
            }
            Packet::DataRequest(read) => {
                let payload = self.node.room(read.size_bytes);
                self.node.request(
                    RequestKind::Read,
                    read.sector,
                    read.size_bytes,
                    Some(payload),
                );
            }
            Packet::Trim(trim) => {
                self.node
                    .request(RequestKind::Discard, trim.sector, trim.size_bytes, None);
            }
            Packet::Zeroes(trim) => {
                let unmap = trim.flags.contains(DataFlags::DISCARD);
                let kind = RequestKind::Zeroes { unmap };
                self.node.request(kind, trim.sector, trim.size_bytes, None);
            }
            _ => {}
        }
        let announces = matches!(
            seen.packet,
            Packet::State(_) | Packet::Uuids110(_) | Packet::Uuids(_)
        );
        let repeated = announces
            && self
                .announced
                .insert(
                    (seen.to, seen.packet.command().to_wire()),
                    seen.packet.clone(),
                )
                .is_some_and(|before| before == seen.packet);
        let until = now + PATIENCE_NS;
        loop {
            self.serve();
            if let Some(at) = self.find(seen) {
                let sent = self.node.sent.remove(at);
                self.learn(seen, &sent);
                return;
            }
            if repeated {
                return;
            }
            if !self.node.step(until) {
                break;
            }
        }
        self.late.push(Late {
            seen: seen.clone(),
            sent_ns: now,
            until_ns: now + LATE_NS,
        });
    }

    /// Looks again for what was missing: the order of the two directions is free.
    pub(crate) fn find_late(&mut self, now: u64) {
        for late in std::mem::take(&mut self.late) {
            if let Some(at) = self.find(&late.seen) {
                let sent = self.node.sent.remove(at);
                self.learn(&late.seen, &sent);
            } else if now < late.until_ns {
                self.late.push(late);
            } else {
                self.missing(&late.seen, late.sent_ns);
            }
        }
    }

    pub(crate) fn missing(&mut self, seen: &Seen, at_ns: u64) {
        let near = self
            .node
            .sent
            .iter()
            .find(|s| s.to == seen.to && s.packet.command() == seen.packet.command())
            .map(|s| show(&s.packet))
            .unwrap_or_else(|| "nothing of this kind".into());
        let text = format!(
            "missing {:?} {}; instead {near}",
            seen.stream,
            show(&seen.packet)
        );
        self.differ(at_ns, text);
    }

    pub(crate) fn find(&self, seen: &Seen) -> Option<usize> {
        self.node.sent.iter().position(|sent| {
            sent.to == seen.to
                && sent.stream == event_stream(seen.stream)
                && self.equivalent(seen, sent)
        })
    }
}
