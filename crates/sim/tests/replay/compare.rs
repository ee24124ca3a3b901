//! Feeds the stand-in and compares what it sends with what the kernel sent.
//!
//! Free are: the timing of pings, hints, the ids of blocks, transactions and epochs, UUIDs that the
//! node itself made (each captured one must always stand for the same one here), the pace and the
//! cut of resync requests, and when peer acks are sent.

use std::collections::{BTreeMap, VecDeque};

use lockstep_core::auth::{Authenticator, HmacAlg};
use lockstep_core::command::Command;
use lockstep_core::event::{RequestKind, Stream};
use lockstep_core::options::{
    DiskOptions, NetOptions, PeerDeviceOptions, Protocol, ResourceOptions,
};
use lockstep_format::disk::layout::Geometry;
use lockstep_format::units::{NodeId, Sector, Uuid, VolumeNr};
use lockstep_format::wire::packet::{BarrierAck, BlockId, Data, PeerAck, Trim};
use lockstep_format::wire::{self, DataFlags, Packet, ReplState, Role, UuidFlags};

use crate::capture::{Item, Seen, What};
use crate::conflicts::Conflicts;
use crate::epochs::Epochs;
use crate::packets::{
    ancestors, clean, event_stream, is_cut_off, is_free, set_runs, show, without_seq,
};
use crate::stand_in::{Sent, StandIn};

/// How the captured node was configured.
pub(crate) struct Setup {
    pub(crate) geometry: Geometry,
    pub(crate) net: NetOptions,
    pub(crate) disk: DiskOptions,
    pub(crate) peer_disk: PeerDeviceOptions,
    pub(crate) options: ResourceOptions,
    /// The peer's secret, where it has another one.
    pub(crate) peer_secret: Option<String>,
}

impl Setup {
    fn is_legacy(&self) -> bool {
        self.options.protocol_max <= wire::PROTOCOL_MAX_84
    }
}

/// A replay under way.
pub(crate) struct Replay<'a> {
    pub(crate) node: StandIn,
    pub(crate) me: NodeId,
    peers: Vec<NodeId>,
    setup: &'a Setup,
    /// Captured UUID, without the Primary bit, to the one that the core made instead.
    uuids: BTreeMap<u64, u64>,
    blocks: BTreeMap<u64, u64>,
    tids: BTreeMap<u32, u32>,
    /// Content of the peers' disks as far as resyncs showed it, by sector.
    image: BTreeMap<u64, Vec<u8>>,
    /// Resync requests of the core that wait for the capture's replies to come as far.
    requests: VecDeque<Sent>,
    /// Requests that were answered and not acked yet.
    served: Vec<(Sector, u32)>,
    credit: u64,
    /// The present options of the connections, and towards the peers.
    net: NetOptions,
    peer_disk: PeerDeviceOptions,
    /// Requests with digests: block id by sector.
    hashed: BTreeMap<Sector, BlockId>,
    epochs: BTreeMap<NodeId, Epochs>,
    /// The network is slow: the peer acks nothing before the core goes Ahead.
    congested: bool,
    /// The write that made it go Ahead was issued, and is the first that is only marked.
    pulled_ahead: bool,
    /// Last peer ack of the kernel and of the core.
    peer_acks: [Option<PeerAck>; 2],
    /// What the kernel announced last, by kind of packet: it likes to repeat itself.
    announced: BTreeMap<(NodeId, u16), Packet>,
    /// The core's own challenge, which the kernel's response has to answer.
    challenge: Option<[u8; 64]>,
    /// Packets that the core did not send yet, and until when it may.
    late: Vec<(Seen, u64)>,
    /// A command that waits for the packet that shows it.
    postponed: Option<&'a str>,
    /// A disconnect stands before writes in one line of the shell: they come when it is done.
    alone: Option<&'a [Item]>,
    /// What the capture shows of writes of two Primaries to the same blocks.
    pub(crate) conflicts: Conflicts,
    /// A peer that was cut off.
    lost: Option<NodeId>,
    differences: Vec<String>,
}

/// How long a packet may be missing until others were fed.
const LATE_NS: u64 = 1_000_000_000;
/// How long the core may take longer than the kernel did.
const PATIENCE_NS: u64 = 400_000_000;

impl<'a> Replay<'a> {
    /// Replays everything; returns what differs.
    pub(crate) fn run(items: &'a [Item], me: NodeId, setup: &'a Setup) -> Vec<String> {
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
            credit: 0,
            net: setup.net.clone(),
            peer_disk: setup.peer_disk.clone(),
            hashed: BTreeMap::new(),
            epochs: BTreeMap::new(),
            congested: false,
            pulled_ahead: false,
            peer_acks: [None; 2],
            announced: BTreeMap::new(),
            challenge: None,
            late: Vec::new(),
            postponed: None,
            alone: None,
            conflicts: Conflicts::default(),
            lost: None,
            differences: Vec::new(),
        };
        replay.images(items);
        for (index, item) in items.iter().enumerate() {
            let now = item.time_ns - start;
            replay.node.advance(now);
            replay.serve();
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
                What::Command { node, text } if is_cut_off(text) => replay.lose(*node),
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
                What::Packet(seen) if seen.to == me => replay.feed_in_order(seen, &items[index..]),
                // What was sent to a node that is cut off is written all the same: its marks show.
                What::Packet(seen) if seen.from == me && replay.is_lost(seen) => {}
                What::Packet(seen) if seen.from == me => {
                    replay.congest(&items[index..]);
                    let demoted =
                        matches!(&seen.packet, Packet::State(s) if s.role == Role::Secondary);
                    if let Some(text) = replay.postponed.take_if(|_| demoted) {
                        replay.operator(text, &items[index..]);
                        replay.serve();
                    }
                    replay.expect(seen, now);
                }
                _ => {}
            }
            replay.serve();
            replay.find_late(now);
        }
        replay.leftovers("the end");
        replay.differences
    }

    /// Whether a demotion stands behind writes in one line of the shell, which has one time: it
    /// comes when the packets show it.
    fn follows_writes(&self, items: &[Item], index: usize) -> bool {
        let What::Command { text, .. } = &items[index].what else {
            return false;
        };
        let before = index.checked_sub(1).map(|before| &items[before]);
        let writes = before.is_some_and(|before| match &before.what {
            What::Command { node, text } => {
                *node == self.me && text.contains("wl ") && before.time_ns == items[index].time_ns
            }
            _ => false,
        });
        writes && text.starts_with("drbdadm secondary") && !self.node.links.is_empty()
    }

    fn follows_disconnect(&self, items: &[Item], index: usize) -> bool {
        let own =
            |item: &&Item| matches!(&item.what, What::Command { node, .. } if *node == self.me);
        let text = |item: &Item| match &item.what {
            What::Command { text, .. } => text.clone(),
            _ => String::new(),
        };
        let before = items[..index].iter().rfind(own);
        text(&items[index]).starts_with("wl ")
            && before.is_some_and(|before| text(before).starts_with("drbdadm disconnect"))
            && !self.node.links.is_empty()
    }

    /// Collects what resyncs of the capture show of disks that were not written before.
    fn images(&mut self, items: &[Item]) {
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

    /// The applications write on while the kernel sends marks. It went Ahead because two writes
    /// were on their way.
    fn congest(&mut self, ahead: &[Item]) {
        let mut own = ahead.iter().filter_map(|item| match &item.what {
            What::Packet(seen) if seen.from == self.me => Some(&seen.packet),
            _ => None,
        });
        let goes_ahead = |packet: &&Packet| match packet {
            Packet::State(state) => state.repl == ReplState::Ahead,
            _ => false,
        };
        let marked = match own.next() {
            Some(Packet::Data(_)) => {
                let next = own.filter(|p| matches!(p, Packet::Data(_) | Packet::State(_)));
                self.congested |= next.take(2).any(|p| goes_ahead(&p));
                None
            }
            Some(state) if goes_ahead(&state) => {
                self.pulled_ahead = true;
                own.find_map(|packet| match packet {
                    Packet::OutOfSync(mark) => Some(*mark),
                    _ => None,
                })
            }
            Some(Packet::OutOfSync(mark)) => {
                self.congested = false;
                for peer in self.peers.clone() {
                    self.ack_epochs(peer);
                }
                let first = std::mem::take(&mut self.pulled_ahead);
                (!first).then_some(*mark)
            }
            _ => None,
        };
        if let Some(mark) = marked {
            let from = (mark.sector.0 * 512) as usize;
            let bytes = self.node.data[from..from + mark.size_bytes as usize].to_vec();
            self.node.write(mark.sector, bytes, false);
        }
    }

    pub(crate) fn both_write(&self) -> bool {
        self.setup.net.allow_two_primaries
    }

    fn differ(&mut self, text: String) {
        let ms = self.node.now / 1_000_000;
        self.differences
            .push(format!("{:3}.{:03} {text}", ms / 1000, ms % 1000));
    }

    fn operator(&mut self, text: &str, ahead: &[Item]) {
        let words: Vec<&str> = text.split_whitespace().collect();
        let volume = VolumeNr(0);
        match words[..] {
            ["drbdadm", "up", ..] => {
                let setup = self.setup;
                let peers = self.peers.clone();
                self.node
                    .up(&peers, &setup.net, &setup.disk, &setup.peer_disk);
            }
            ["drbdadm", "primary", ref rest @ ..] => {
                let force = rest.contains(&"--force");
                self.node.command(Command::Primary { force });
            }
            ["drbdadm", "secondary", ..] => {
                self.node.command(Command::Secondary { force: false });
            }
            ["drbdadm", "down", ..] => {
                self.node.command(Command::Down);
            }
            ["drbdadm", "disconnect", ref rest @ ..] => {
                for peer in self.meant(rest) {
                    self.node
                        .command(Command::Disconnect { peer, force: false });
                }
            }
            ["drbdadm", "connect", ref rest @ ..] => {
                let discard = rest.contains(&"--discard-my-data");
                for peer in self.meant(rest) {
                    self.node.connect(peer, discard);
                }
            }
            ["(QEMU", "killed:", ..] => {
                self.node.power_cut(self.setup.options.clone());
                self.forget_links();
            }
            ["printf", "\"0", "67584", what, ..] => self.node.broken = what == "error\"",
            ["drbdadm", "new-current-uuid", ref rest @ ..] => {
                self.node.command(Command::NewCurrentUuid {
                    volume,
                    clear_bitmap: rest.contains(&"--clear-bitmap"),
                    force_resync: false,
                });
            }
            ["drbdadm", ref rest @ ..] if rest.contains(&"resize") => {
                // The configuration was changed before; the packets say to what.
                let wanted = ahead.iter().find_map(|item| match &item.what {
                    What::Packet(seen) if seen.from == self.me => match &seen.packet {
                        Packet::TwopcPrepRsz(resize) => Some(resize.user_size.0),
                        Packet::Sizes(sizes) => Some(sizes.u_size.0),
                        _ => None,
                    },
                    _ => None,
                });
                self.node.command(Command::Resize {
                    volume,
                    size_sectors: wanted.unwrap_or(0),
                    assume_clean: rest.contains(&"--assume-clean"),
                    assume_peer_has_space: false,
                });
            }
            ["drbdadm", "detach", ..] => {
                self.node.command(Command::Detach {
                    volume,
                    force: false,
                    diskless: false,
                });
            }
            ["drbdadm", "attach", ..] => self.node.attach(&self.setup.disk.clone()),
            ["drbdadm", "invalidate", ..] => {
                self.node.command(Command::Invalidate {
                    volume,
                    from: None,
                    reset_bitmap: true,
                });
            }
            ["drbdadm", "invalidate-remote", ..] => {
                for peer in self.peers.clone() {
                    self.node.command(Command::InvalidateRemote {
                        peer,
                        volume,
                        reset_bitmap: true,
                    });
                }
            }
            ["drbdsetup", "net-options", _, _, ref rest @ ..] => {
                for option in rest {
                    match option.split_once('=') {
                        Some(("--protocol", "A")) => self.net.protocol = Protocol::A,
                        Some(("--protocol", "C")) => self.net.protocol = Protocol::C,
                        Some(("--csums-alg", alg)) => self.net.csums_alg = Some(alg.into()),
                        Some(("--verify-alg", alg)) => self.net.verify_alg = Some(alg.into()),
                        _ => panic!("net-options {option}"),
                    }
                }
                for peer in self.peers.clone() {
                    let net = self.net.clone();
                    self.node.command(Command::NetOptions { peer, net });
                }
            }
            ["drbdsetup", "disk-options", _, "--c-plan-ahead=0", rate] => {
                let mib = rate
                    .strip_prefix("--resync-rate=")
                    .and_then(|rate| rate.strip_suffix('M')?.parse::<u32>().ok());
                self.peer_disk.resync_rate_kib_s = mib.expect("a number of MiB") * 1024;
                for peer in self.peers.clone() {
                    let options = self.peer_disk.clone();
                    self.node.command(Command::PeerDeviceOptions {
                        peer,
                        volume,
                        options,
                    });
                }
            }
            // Between a disconnect and this the configuration changed, or not.
            ["drbdadm", "adjust", ..] => {
                for peer in self.peers.clone() {
                    let net = self.net.clone();
                    self.node.command(Command::NetOptions { peer, net });
                    self.node.connect(peer, false);
                }
            }
            [_, "cram-hmac-alg", "and", "shared-secret", "removed", ..] => {
                self.net.cram_hmac_alg = None;
                self.net.shared_secret = None;
            }
            // Blocks of the lower disk, behind the node's back.
            ["for", "o", "in", ref blocks @ ..] => {
                for block in blocks {
                    let block: u64 = block.parse().expect("the number of a block");
                    self.node.plant(block, 666);
                }
            }
            ["drbdsetup", "verify", _, start, stop] => {
                let sector = |word: &str, name| {
                    let text = word.strip_prefix(name)?.strip_suffix('s')?;
                    text.parse::<u64>().ok()
                };
                for peer in self.peers.clone() {
                    self.node.command(Command::Verify {
                        peer,
                        volume,
                        start: sector(start, "--start="),
                        stop: sector(stop, "--stop="),
                    });
                }
            }
            ["drbdadm", "verify", ..] => {
                for peer in self.peers.clone() {
                    self.node.command(Command::Verify {
                        peer,
                        volume,
                        start: None,
                        stop: None,
                    });
                }
            }
            ["drbdadm", "outdate", ..] => {
                self.node.command(Command::Outdate { volume });
            }
            ["drbdadm", "pause-sync", ..] => {
                for peer in self.peers.clone() {
                    self.node.command(Command::PauseSync { peer, volume });
                }
            }
            ["drbdadm", "resume-sync", ..] => {
                for peer in self.peers.clone() {
                    self.node.command(Command::ResumeSync { peer, volume });
                }
            }
            ref words
                if self.node.links.is_empty()
                    && (words.contains(&"randw") || words.contains(&"seqw")) =>
            {
                self.write_alone(ahead);
            }
            // Reads, checksums and reports do nothing that is on the wire; writes come with the
            // packets that they caused.
            _ => {}
        }
    }

    /// Writes without a connection: where they went is in the bitmap that the node sends next,
    /// and what was written in the resync, if the node is its source.
    fn write_alone(&mut self, ahead: &[Item]) {
        let mut theirs = Vec::new();
        let mut mine = None;
        // A plain bitmap comes in parts, of which the last is empty.
        let mut plain: BTreeMap<NodeId, (u64, Vec<u64>)> = BTreeMap::new();
        for (index, item) in ahead.iter().enumerate() {
            let What::Packet(seen) = &item.what else {
                continue;
            };
            let whole = match &seen.packet {
                Packet::CompressedBitmap(code) => set_runs(code),
                Packet::Bitmap(part) if part.words.is_empty() => plain
                    .remove(&seen.from)
                    .map_or(Vec::new(), |(_, bits)| bits),
                Packet::Bitmap(part) => {
                    let (from, bits) = plain.entry(seen.from).or_default();
                    let set = |i: &u64| part.words[(i / 8) as usize] >> (i % 8) & 1 == 1;
                    let count = part.words.len() as u64 * 8;
                    bits.extend((0..count).filter(set).map(|i| *from + i));
                    *from += count;
                    continue;
                }
                _ => continue,
            };
            if seen.from == self.me {
                mine = Some((whole, &ahead[index..]));
                break;
            } else if seen.to == self.me {
                theirs = whole;
            }
        }
        let Some((mine, after)) = mine else { return };
        // A target's bitmap is both together.
        let bits = mine.into_iter().filter(|bit| !theirs.contains(bit));
        for bit in bits {
            let from = (bit * 4096) as usize;
            let mut bytes = self.node.data[from..from + 4096].to_vec();
            let shown = after.iter().find_map(|item| match &item.what {
                What::Packet(seen) if seen.from == self.me => match &seen.packet {
                    Packet::RsDataReply(data)
                        if data.sector.0 <= bit * 8
                            && bit * 8 < data.sector.end_of(data.payload_len).0 =>
                    {
                        let at = ((bit * 8 - data.sector.0) * 512) as usize;
                        Some(seen.payload[at..at + 4096].to_vec())
                    }
                    Packet::RsDeallocated(desc)
                        if desc.sector.0 <= bit * 8
                            && bit * 8 < desc.sector.end_of(desc.size_bytes).0 =>
                    {
                        Some(vec![0; 4096])
                    }
                    _ => None,
                },
                _ => None,
            });
            if let Some(shown) = shown {
                bytes = shown;
            }
            self.node.write(Sector(bit * 8), bytes, false);
        }
    }

    /// The peers that a command names: `r0:node3` one, `r0` all.
    fn meant(&self, words: &[&str]) -> Vec<NodeId> {
        let named = words.iter().find_map(|word| {
            let number = word.strip_prefix("r0:node")?.parse::<u8>().ok()?;
            Some(NodeId(number - 1))
        });
        match named {
            Some(peer) => vec![peer],
            None => self.peers.clone(),
        }
    }

    /// A peer loses its power, or its cable. The kernel notices when it does not answer a ping.
    fn lose(&mut self, peer: NodeId) {
        if self.node.links.contains_key(&peer) {
            self.lost = Some(peer);
            // When they are sent is free, so those of the end may be missing.
            self.peer_acks = [None; 2];
            self.down(peer);
        }
    }

    fn is_lost(&self, seen: &Seen) -> bool {
        self.lost == Some(seen.to) && !self.node.links.contains_key(&seen.to)
    }

    fn forget_links(&mut self) {
        self.requests.clear();
        self.served.clear();
        self.credit = 0;
        self.epochs.clear();
        self.late.clear();
        self.peer_acks = [None; 2];
        self.announced.clear();
    }

    /// The applications of a Primary go on when it has taken its peer for lost.
    fn writes_while_lost(&mut self, ahead: &[Item]) {
        if self.lost.take().is_some() {
            self.write_alone(ahead);
        }
    }

    fn up(&mut self, nodes: [NodeId; 2], acceptor: NodeId) {
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
                self.differ(format!("does not want to connect to node {peer}"));
                return;
            }
        }
        self.conflicts.decides = acceptor == self.me;
        self.node.link_up(peer, acceptor == self.me);
    }

    fn down(&mut self, peer: NodeId) {
        self.leftovers("the end of the connection");
        self.node.link_down(peer);
        self.requests.retain(|r| r.to != peer);
        self.credit = 0;
        self.epochs.remove(&peer);
        let [kernel, core] = std::mem::take(&mut self.peer_acks);
        if kernel != core {
            self.differ(format!("last peer ack {core:?} instead of {kernel:?}"));
        }
        if let Some(ahead) = self.alone.take_if(|_| self.node.links.is_empty()) {
            self.write_alone(ahead);
        }
    }

    /// Sends of the core that the kernel did not send.
    fn leftovers(&mut self, at: &str) {
        self.serve();
        self.find_late(u64::MAX);
        for sent in std::mem::take(&mut self.node.sent) {
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
                self.differ(text);
            }
        }
    }

    /// Answers what the peer answers by itself: barriers, and resync requests at the pace of the
    /// capture.
    fn serve(&mut self) {
        loop {
            let mut again = false;
            let sent = std::mem::take(&mut self.node.sent);
            let mut rest = Vec::new();
            for packet in sent {
                match packet.packet {
                    Packet::RsDataRequest(_) | Packet::RsDagtagReq(_) => {
                        self.requests.push_back(packet);
                    }
                    Packet::RsWriteAck(ack)
                        if self.served.contains(&(ack.sector, ack.size_bytes)) =>
                    {
                        self.served.retain(|s| *s != (ack.sector, ack.size_bytes));
                    }
                    Packet::PeerAck(ack) => self.peer_acks[1] = Some(ack),
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
                if self.credit < u64::from(size) {
                    break;
                }
                self.credit -= u64::from(size);
                let to = request.to;
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
    fn ack_epochs(&mut self, peer: NodeId) -> bool {
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
                self.credit += u64::from(data.payload_len);
                let me = self.me;
                let last = !ahead[1..].iter().any(|item| {
                    matches!(&item.what, What::Packet(s) if s.to == me
                        && s.session == seen.session
                        && matches!(s.packet, Packet::RsDataReply(_)))
                });
                if last {
                    self.credit = u64::MAX / 2;
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
                if let Some(id) = self.blocks.get(&ack.block_id.0) {
                    ack.block_id = BlockId(*id);
                }
            }
            Packet::DataReply(data) => {
                if let Some(id) = self.blocks.get(&data.block_id.0) {
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
    fn response(&self, peer: NodeId) -> Option<wire::Digest> {
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
    fn here(&self, captured: Uuid) -> Uuid {
        let bit = captured.0 & 1;
        match self.uuids.get(&(captured.0 & !1)) {
            Some(own) => Uuid(own | bit),
            None => captured,
        }
    }

    /// A packet that the kernel sent: the core has to send it, too.
    fn expect(&mut self, seen: &Seen, now: u64) {
        match &seen.packet {
            packet if is_free(packet) => return,
            Packet::InitialData | Packet::InitialMeta | Packet::Barrier(_) => return,
            Packet::PeerAck(ack) => {
                self.peer_acks[0] = Some(*ack);
                return;
            }
            Packet::RsDataRequest(_) | Packet::RsDagtagReq(_) => return,
            // At 8.4 such an ack may also be that of an application write.
            Packet::RsWriteAck(ack)
                if ack.block_id == BlockId::SYNCER || !self.setup.is_legacy() =>
            {
                return;
            }
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
        self.late.push((seen.clone(), now + LATE_NS));
    }

    /// Looks again for what was missing: the order of the two directions is free.
    fn find_late(&mut self, now: u64) {
        for (seen, until) in std::mem::take(&mut self.late) {
            if let Some(at) = self.find(&seen) {
                let sent = self.node.sent.remove(at);
                self.learn(&seen, &sent);
            } else if now < until {
                self.late.push((seen, until));
            } else {
                self.missing(&seen);
            }
        }
    }

    fn missing(&mut self, seen: &Seen) {
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
        self.differ(text);
    }

    fn find(&self, seen: &Seen) -> Option<usize> {
        self.node.sent.iter().position(|sent| {
            sent.to == seen.to
                && sent.stream == event_stream(seen.stream)
                && self.equivalent(seen, sent)
        })
    }

    fn equivalent(&self, seen: &Seen, sent: &Sent) -> bool {
        if sent.payload != seen.payload {
            return false;
        }
        let uuid = |captured: Uuid, own: Uuid| self.same_uuid(captured, own);
        match (&seen.packet, &sent.packet) {
            (Packet::ConnectionFeatures(a), Packet::ConnectionFeatures(b)) => {
                // The dialects and features are each node's own affair; 8.4 has no node ids.
                a.protocol_max <= wire::PROTOCOL_MAX_84
                    || (a.sender_node_id, a.receiver_node_id)
                        == (b.sender_node_id, b.receiver_node_id)
            }
            (Packet::AuthChallenge(_), Packet::AuthChallenge(_)) => true,
            (Packet::RsThinDagtagReq(a), Packet::RsThinDagtagReq(b)) => {
                let mut a = *a;
                a.block_id = b.block_id;
                a == *b
            }
            (Packet::RsCsumDagtagReq(a), Packet::RsCsumDagtagReq(b)) => {
                let mut a = *a;
                a.block_id = b.block_id;
                a == *b
            }
            (Packet::Uuids110(a), Packet::Uuids110(b)) => {
                let flags = |f: UuidFlags| f;
                a.dirty_bits == b.dirty_bits
                    && flags(a.flags) == flags(b.flags)
                    && a.node_mask == b.node_mask
                    && uuid(a.current, b.current)
                    && a.bitmap_uuids.len() == b.bitmap_uuids.len()
                    && a.bitmap_uuids
                        .iter()
                        .zip(&b.bitmap_uuids)
                        .all(|(x, y)| x.0 == y.0 && uuid(clean(x.1), clean(y.1)))
                    && ancestors(&a.history).all(|x| ancestors(&b.history).any(|y| uuid(x, y)))
            }
            (Packet::Uuids(a), Packet::Uuids(b)) => {
                // 8.4 names a disk that never had data as the generation before the first, and
                // does not say of an Inconsistent disk that it is.
                let old = |a: Uuid, b: Uuid| a == Uuid::JUST_CREATED || uuid(clean(a), clean(b));
                // One ancestor more does no harm.
                let ancestor = |a: Uuid, b: Uuid| a.is_zero() || old(a, b);
                let known = |f: UuidFlags| f.difference(UuidFlags::INCONSISTENT);
                a.dirty_bits == b.dirty_bits
                    && known(a.flags) == known(b.flags)
                    && uuid(a.current, b.current)
                    && old(a.bitmap, b.bitmap)
                    && ancestor(a.history[0], b.history[0])
                    && ancestor(a.history[1], b.history[1])
            }
            (Packet::SyncUuid(a), Packet::SyncUuid(b)) => uuid(clean(*a), clean(*b)),
            (Packet::CurrentUuid(a), Packet::CurrentUuid(b)) => {
                a.weak_nodes == b.weak_nodes && uuid(a.uuid, b.uuid)
            }
            (Packet::TwopcPrepRsz(a), Packet::TwopcPrepRsz(b)) => {
                let mut a = *a;
                a.head.tid = b.head.tid;
                a == *b
            }
            (Packet::TwopcPrepare(a), Packet::TwopcPrepare(b)) => {
                let mut a = *a;
                a.head.tid = b.head.tid;
                a == *b
            }
            (Packet::TwopcCommit(a), Packet::TwopcCommit(b))
            | (Packet::TwopcAbort(a), Packet::TwopcAbort(b)) => {
                let mut a = *a;
                if let Some(tid) = self.tids.get(&a.head.tid) {
                    a.head.tid = *tid;
                }
                a == *b
                    && matches!(seen.packet, Packet::TwopcCommit(_))
                        == matches!(sent.packet, Packet::TwopcCommit(_))
            }
            (Packet::Data(a), Packet::Data(b)) => {
                let mut a = *a;
                a.block_id = b.block_id;
                if self.setup.net.allow_two_primaries {
                    // It counts the acks as well.
                    a.seq_num = b.seq_num;
                }
                // Hints of the sender's kernel. A flush in front of a write is a request of its
                // own at a front end here, and completes before the write is asked for.
                let hints = DataFlags::RW_SYNC | DataFlags::UNPLUG | DataFlags::FLUSH;
                a.flags.remove(hints);
                let mut b = *b;
                b.flags.remove(hints);
                a == b
            }
            (Packet::DataRequest(a), Packet::DataRequest(b)) => {
                (a.sector, a.size_bytes) == (b.sector, b.size_bytes)
            }
            (Packet::Trim(a), Packet::Trim(b)) | (Packet::Zeroes(a), Packet::Zeroes(b)) => {
                let (mut a, mut b) = (*a, *b);
                a.block_id = b.block_id;
                a.flags.remove(DataFlags::RW_SYNC);
                b.flags.remove(DataFlags::RW_SYNC);
                a == b && seen.packet.command() == sent.packet.command()
            }
            // Without a volume only the role means something.
            (Packet::State(a), Packet::State(b)) if seen.volume.is_none() => {
                sent.volume.is_none() && a.role == b.role
            }
            (Packet::Sizes(a), Packet::Sizes(b)) => {
                let (mut a, mut b) = (*a, *b);
                // Limits of the disk below, and of the bitmap, which is not negotiated here.
                a.limits = None;
                b.limits = None;
                a == b
            }
            (a, b) if without_seq(a).is_some() && a.command() == b.command() => {
                without_seq(a) == without_seq(b)
            }
            (a, b) => a == b,
        }
    }

    fn same_uuid(&self, captured: Uuid, own: Uuid) -> bool {
        if captured.0 & 1 != own.0 & 1 {
            return false;
        }
        match self.uuids.get(&(captured.0 & !1)) {
            Some(known) => *known == own.0 & !1,
            // Small values and ones that a peer made are given; others may be made here.
            None => {
                captured == own
                    || (captured.0 > 4
                        && own.0 > 4
                        && captured.0 != u64::MAX
                        && own.0 != u64::MAX
                        && !self.uuids.values().any(|v| *v == own.0 & !1))
            }
        }
    }

    fn learn(&mut self, seen: &Seen, sent: &Sent) {
        let mut pairs = Vec::new();
        match (&seen.packet, &sent.packet) {
            (Packet::Uuids110(a), Packet::Uuids110(b)) => {
                pairs.push((a.current, b.current));
                pairs.extend(
                    a.bitmap_uuids
                        .iter()
                        .zip(&b.bitmap_uuids)
                        .map(|(x, y)| (x.1, y.1)),
                );
            }
            (Packet::Uuids(a), Packet::Uuids(b)) => pairs.extend([
                (a.current, b.current),
                (a.bitmap, b.bitmap),
                (a.history[0], b.history[0]),
                (a.history[1], b.history[1]),
            ]),
            (Packet::RsThinReq(_), Packet::RsThinReq(b)) => {
                self.hashed.insert(b.sector, b.block_id);
            }
            (Packet::RsThinDagtagReq(_), Packet::RsThinDagtagReq(b)) => {
                self.hashed.insert(b.sector, b.block_id);
            }
            (Packet::RsCsumDagtagReq(_), Packet::RsCsumDagtagReq(b)) => {
                self.hashed.insert(b.sector, b.block_id);
            }
            (Packet::SyncUuid(a), Packet::SyncUuid(b)) => pairs.push((*a, *b)),
            (Packet::AuthChallenge(_), Packet::AuthChallenge(own)) => self.challenge = Some(*own),
            (Packet::TwopcPrepRsz(a), Packet::TwopcPrepRsz(b)) => {
                self.tids.insert(a.head.tid, b.head.tid);
            }
            (Packet::TwopcPrepare(a), Packet::TwopcPrepare(b)) => {
                self.tids.insert(a.head.tid, b.head.tid);
            }
            (Packet::Data(a), Packet::Data(b)) => {
                self.blocks.insert(a.block_id.0, b.block_id.0);
            }
            (Packet::DataRequest(a), Packet::DataRequest(b)) => {
                self.blocks.insert(a.block_id.0, b.block_id.0);
            }
            (Packet::Trim(a), Packet::Trim(b)) | (Packet::Zeroes(a), Packet::Zeroes(b)) => {
                self.blocks.insert(a.block_id.0, b.block_id.0);
            }
            _ => {}
        }
        for (captured, own) in pairs {
            let real = |uuid: Uuid| uuid.0 > 4 && uuid.0 != u64::MAX;
            if real(captured) && real(own) && captured.0 & !1 != own.0 & !1 {
                self.uuids.insert(captured.0 & !1, own.0 & !1);
            }
        }
    }
}
