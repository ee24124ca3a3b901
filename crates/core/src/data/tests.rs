//! Whole nodes against each other in memory: a small driver that reorders what it may, and
//! checks of what must hold. The simulator goes further; this finds a broken data path first.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::al::encode_initialised;
use lockstep_format::disk::layout::{BitmapBlock, Geometry, Layout, Placement};
use lockstep_format::disk::v09::SuperBlock;
use lockstep_format::units::{NodeId, Sector, Uuid, VolumeNr};
use lockstep_format::wire::alg::DigestAlg;
use lockstep_format::wire::{ConnState, Digest, DiskState, Packet, ReplState};

use crate::command::{Answer, Command, CommandError, MetaIndex};
use crate::event::{
    ALL_ZERO, BufId, CommandId, DiskCache, DiskInfo, DiskOp, Input, LinkDownReason, LinkEnd,
    LinkId, MetaOp, Output, Payload, Request, RequestError, RequestId, RequestKind, Stream, Tag,
};
use crate::options::{DiskOptions, NetOptions, PeerDeviceOptions, Protocol, ResourceOptions};
use crate::report::{Event, Snapshot};
use crate::resource::{Resource, ResourceConfig};
use crate::time::{Duration, Instant};

mod added;
mod balancing;
mod basics;
mod caught_up;
mod chains;
mod chaos;
mod clients;
mod congesting;
mod copies;
mod csums;
mod extents;
mod failing;
mod fencing;
mod flushing;
mod forced;
mod granularity;
mod handlers;
mod integrity;
mod kernel_rules;
mod late_words;
mod left;
mod making_way;
mod named;
mod numbering;
mod old_versions;
mod opening;
mod options;
mod ordering;
mod replicating;
mod resizing;
mod returning;
mod sizes;
mod stalling;
mod thinning;
mod turns;
mod two_primaries;
mod unwritten;
mod verifying;
mod waiting;

const VOLUME: VolumeNr = VolumeNr(0);
const SIZE: u64 = 16 << 20;
const META: u64 = 1 << 20;

/// A disk with a volatile cache, in blocks of 4 KiB that exist when written.
#[derive(Default)]
struct Store {
    now: BTreeMap<u64, Vec<u8>>,
    stable: BTreeMap<u64, Vec<u8>>,
    dirty: Vec<u64>,
}

impl Store {
    fn read(&self, sector: Sector, len: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len as usize);
        for at in 0..u64::from(len) / 512 {
            let sector = sector.0 + at;
            let block = self.now.get(&(sector / 8));
            let from = (sector % 8 * 512) as usize;
            bytes.extend_from_slice(block.map_or(&[0; 512][..], |b| &b[from..from + 512]));
        }
        bytes
    }

    fn write(&mut self, sector: Sector, bytes: &[u8]) {
        for (at, part) in bytes.chunks_exact(512).enumerate() {
            let sector = sector.0 + at as u64;
            let block = self.now.entry(sector / 8).or_insert_with(|| vec![0; 4096]);
            let from = (sector % 8 * 512) as usize;
            block[from..from + 512].copy_from_slice(part);
            if self.dirty.last() != Some(&(sector / 8)) {
                self.dirty.push(sector / 8);
            }
        }
    }

    fn flush(&mut self) {
        for block in core::mem::take(&mut self.dirty) {
            self.stable.insert(block, self.now[&block].clone());
        }
    }

    fn power_cut(&mut self) {
        for block in core::mem::take(&mut self.dirty) {
            match self.stable.get(&block) {
                Some(old) => self.now.insert(block, old.clone()),
                None => self.now.remove(&block),
            };
        }
    }

    fn block(&self, block: u64) -> &[u8] {
        self.now.get(&block).map_or(&[0; 4096], |b| b)
    }
}

type Wire = VecDeque<(VolumeNr, Packet, Option<Vec<u8>>)>;

struct Node {
    resource: Resource,
    up: bool,
    data: Store,
    meta: Vec<u8>,
    buffers: BTreeMap<u64, Vec<u8>>,
    next_buffer: u64,
    connecting: Vec<NodeId>,
    completed: BTreeMap<u64, Result<(), RequestError>>,
    read: BTreeMap<u64, u64>,
    fail_data_writes: bool,
    /// The data generation when the last event about the volume came, as a watcher knows it.
    shown: Option<Uuid>,
    /// Size of the data device; with internal metadata it is the metadata device, too.
    data_bytes: u64,
}

/// Packets on their way in one direction of one stream.
enum Todo {
    Disk(usize, Tag, DiskOp, Vec<u8>),
    Meta(usize, Tag, MetaOp),
    Input(usize, Input),
}

#[derive(Clone)]
struct Setup {
    size: u64,
    net: NetOptions,
    disk: DiskOptions,
    peer: PeerDeviceOptions,
    options: ResourceOptions,
    /// Every node says that it is the one that it takes the peer for.
    same_ids: bool,
    /// Every node takes the other for a kernel, which counts epochs as 8.4 does.
    kernels: bool,
    /// The node without a disk.
    diskless: Option<usize>,
    /// The configuration says of that node that it never has a disk.
    client: bool,
    /// Where the metadata lies.
    index: MetaIndex,
    /// log2 of each node's bitmap block; 4 KiB where none is given.
    block_shifts: Vec<u8>,
    /// Smallest unit of a request to each node's disk; 512 bytes where none is given.
    logical_block_bytes: Vec<u32>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            size: SIZE,
            net: NetOptions {
                max_buffers: 256,
                ..NetOptions::default()
            },
            peer: PeerDeviceOptions::default(),
            disk: DiskOptions {
                al_extents: 67,
                ..DiskOptions::default()
            },
            options: ResourceOptions::default(),
            same_ids: false,
            kernels: false,
            diskless: None,
            client: false,
            index: MetaIndex::FlexExternal,
            block_shifts: Vec::new(),
            logical_block_bytes: Vec::new(),
        }
    }
}

struct World {
    setup: Setup,
    nodes: Vec<Node>,
    now: Instant,
    seed: u64,
    todo: Vec<Todo>,
    wires: BTreeMap<(usize, usize, u64, bool), Wire>,
    links: BTreeMap<u64, (usize, usize)>,
    next_link: u64,
    next_id: u64,
    cut: bool,
    /// Looks at the disks are not answered for now: these.
    hold_looks: bool,
    held_looks: Vec<Todo>,
    /// Nodes that do not reach each other.
    apart: Vec<(usize, usize)>,
    /// What is sent to this node on data streams waits.
    stalled: Option<usize>,
    /// And so does the other stream to it.
    stalled_acks: bool,
    /// This node does not hear that a peer has closed a link.
    deaf: Option<usize>,
    hanging: stalling::Hanging,
    /// The next payload in a packet of this name is changed on its way.
    spoil: Option<&'static str>,
    /// What a kernel 8.4 would know of the epochs that each node has sent.
    kernel_epochs: [two_primaries::KernelEpochs; 2],
    packets: BTreeMap<&'static str, u64>,
    /// The same in order, each with its sender and receiver.
    sent: Vec<(usize, usize, &'static str)>,
    answers: BTreeMap<u64, Result<Answer, CommandError>>,
    /// Handlers that run: node, name, tag.
    handlers: Vec<(usize, &'static str, Tag)>,
    log: Vec<String>,
    /// What watchers of a node's states are told (`Resource::tell_steps`).
    steps: Vec<(usize, Snapshot)>,
    /// Generations that a Primary announced to its driver: node, of which, the new one.
    announced: Vec<(usize, Uuid, Uuid)>,
}

/// Stands for every algorithm: as many bytes, made of a sum over the payload.
fn integrity_of(alg: DigestAlg, bytes: &[u8]) -> Digest {
    let sum = bytes.iter().fold(11u64, |sum, byte| {
        sum.rotate_left(7).wrapping_mul(31) ^ u64::from(*byte)
    });
    let bytes = sum.to_le_bytes().repeat(8);
    Digest::new(&bytes[..usize::from(alg.digest_len())]).unwrap()
}

fn node_id(index: usize) -> NodeId {
    NodeId(index as u8)
}

fn fresh_meta(node: usize, peers: u8, setup: &Setup) -> Vec<u8> {
    let (placement, bytes) = match setup.index {
        MetaIndex::Internal => (Placement::Internal, setup.size),
        _ => (Placement::FlexExternal, META),
    };
    let mut geometry = Geometry::for_peers(peers);
    if let Some(shift) = setup.block_shifts.get(node) {
        geometry.bitmap_block = BitmapBlock::from_shift(*shift).unwrap();
    }
    let layout = Layout::new(placement, geometry, bytes).unwrap();
    let mut meta = vec![0u8; bytes as usize];
    let mut superblock = SuperBlock::fresh(&layout);
    superblock.node_id = Some(node_id(node));
    let mut block = [0u8; BLOCK_BYTES];
    superblock.encode(&mut block);
    let at = layout.superblock_byte() as usize;
    meta[at..at + BLOCK_BYTES].copy_from_slice(&block);
    encode_initialised(&mut block);
    for number in 0..8 {
        let at = layout.al_byte() as usize + number * BLOCK_BYTES;
        meta[at..at + BLOCK_BYTES].copy_from_slice(&block);
    }
    meta
}

impl World {
    fn new(seed: u64, count: usize, setup: Setup) -> World {
        let mut world = Self::stopped(seed, count, setup);
        for index in 0..count {
            world.start(index);
        }
        world
    }

    /// Connected nodes that have no volume yet.
    fn without_volume(seed: u64, count: usize, setup: Setup) -> World {
        let mut world = Self::stopped(seed, count, setup);
        for index in 0..count {
            world.meet(index);
        }
        world
    }

    fn stopped(seed: u64, count: usize, setup: Setup) -> World {
        let nodes = (0..count)
            .map(|index| Node {
                resource: Self::resource(index, seed, &setup),
                up: true,
                data: Store::default(),
                meta: fresh_meta(index, count as u8 - 1, &setup),
                data_bytes: setup.size,
                buffers: BTreeMap::new(),
                next_buffer: 1,
                connecting: Vec::new(),
                completed: BTreeMap::new(),
                read: BTreeMap::new(),
                fail_data_writes: false,
                shown: None,
            })
            .collect();
        World {
            setup,
            nodes,
            now: Instant(1),
            seed: seed.wrapping_mul(2).wrapping_add(1),
            todo: Vec::new(),
            wires: BTreeMap::new(),
            links: BTreeMap::new(),
            next_link: 1,
            next_id: 1,
            cut: false,
            hold_looks: false,
            held_looks: Vec::new(),
            apart: Vec::new(),
            stalled: None,
            stalled_acks: false,
            deaf: None,
            hanging: stalling::Hanging::default(),
            spoil: None,
            kernel_epochs: Default::default(),
            packets: BTreeMap::new(),
            sent: Vec::new(),
            answers: BTreeMap::new(),
            handlers: Vec::new(),
            log: Vec::new(),
            steps: Vec::new(),
            announced: Vec::new(),
        }
    }

    fn resource(index: usize, seed: u64, setup: &Setup) -> Resource {
        let config = ResourceConfig {
            name: "r0".into(),
            node_id: node_id(index),
            options: setup.options.clone(),
        };
        Resource::new(config, seed ^ (index as u64 + 1) << 32)
    }

    fn start(&mut self, index: usize) {
        self.command(
            index,
            Command::NewVolume {
                volume: VOLUME,
                minor: 0,
                diskless: self.setup.diskless == Some(index),
            },
        );
        self.make_peers(index);
        if self.setup.diskless != Some(index) {
            self.attach(index);
        }
        self.run();
        self.open_connections(index);
    }

    fn detach(&mut self, index: usize) {
        let detach = Command::Detach {
            volume: VOLUME,
            force: false,
            diskless: false,
        };
        self.command(index, detach);
    }

    fn attach(&mut self, index: usize) {
        self.command(
            index,
            Command::Attach {
                volume: VOLUME,
                data_path: "data".into(),
                meta_path: (self.setup.index != MetaIndex::Internal).then(|| "meta".into()),
                index: self.setup.index,
                options: self.setup.disk.clone(),
            },
        );
    }

    /// Starts a node without a volume.
    fn meet(&mut self, index: usize) {
        self.make_peers(index);
        self.open_connections(index);
    }

    fn make_peers(&mut self, index: usize) {
        let count = self.nodes.len();
        for peer in (0..count).filter(|p| *p != index) {
            let net = self.setup.net.clone();
            let peer_index = peer;
            let peer = node_id(peer);
            self.command(index, Command::NewPeer { peer, net });
            let mut options = self.setup.peer.clone();
            options.bitmap &= !(self.setup.client && self.setup.diskless == Some(peer_index));
            if options != PeerDeviceOptions::default() {
                let volume = VOLUME;
                self.command(
                    index,
                    Command::PeerDeviceOptions {
                        peer,
                        volume,
                        options,
                    },
                );
            }
        }
    }

    fn open_connections(&mut self, index: usize) {
        let count = self.nodes.len();
        for peer in (0..count).filter(|p| *p != index) {
            let peer = node_id(peer);
            let connect = Command::Connect {
                peer,
                discard_my_data: false,
                tentative: false,
            };
            self.command(index, connect);
        }
    }

    fn random(&mut self, limit: usize) -> usize {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(11);
        ((self.seed >> 33) % limit as u64) as usize
    }

    fn command(&mut self, index: usize, command: Command) -> u64 {
        self.next_id += 1;
        let id = CommandId(self.next_id);
        self.input(index, Input::Command { id, command });
        self.next_id
    }

    fn input(&mut self, index: usize, input: Input) {
        if !self.nodes[index].up {
            return;
        }
        let now = self.now;
        self.nodes[index].resource.handle(now, input);
        let mut told = false;
        while let Some(output) = self.nodes[index].resource.poll_output() {
            told |= matches!(output, Output::Event(Event::Device(VOLUME)));
            if let Output::Event(Event::Destroyed(_)) = output {
                self.nodes[index].shown = None;
            }
            self.output(index, output);
        }
        if told {
            self.nodes[index].shown = self.generation(index);
        }
    }

    /// The volume's data generation.
    fn generation(&self, index: usize) -> Option<Uuid> {
        let devices = self.nodes[index].resource.snapshot().devices;
        let device = devices.iter().find(|d| d.volume == VOLUME)?;
        Some(device.current_uuid)
    }

    fn bytes(&self, index: usize, payload: Payload) -> Vec<u8> {
        let buffer = &self.nodes[index].buffers[&payload.buf.0];
        buffer[payload.offset as usize..(payload.offset + payload.len) as usize].to_vec()
    }

    fn buffer(&mut self, index: usize, bytes: Vec<u8>) -> Payload {
        let node = &mut self.nodes[index];
        let id = node.next_buffer;
        node.next_buffer += 1;
        let len = bytes.len() as u32;
        node.buffers.insert(id, bytes);
        Payload {
            buf: BufId(id),
            offset: 0,
            len,
        }
    }

    fn output(&mut self, index: usize, output: Output) {
        match output {
            Output::OpenDisk { tag, .. }
            | Output::ProbeDisk { tag, .. }
            | Output::LookAtDisk { tag, .. } => {
                let unchanged = self.nodes[index].data_bytes == self.setup.size;
                let looks = matches!(output, Output::LookAtDisk { .. });
                let info = DiskInfo {
                    data_bytes: self.nodes[index].data_bytes,
                    meta_bytes: self.nodes[index].meta.len() as u64,
                    logical_block_bytes: *self.setup.logical_block_bytes.get(index).unwrap_or(&512),
                    physical_block_bytes: 4096,
                    discard: true,
                    discard_zeroes: true,
                    discard_granularity_bytes: 4096,
                    max_discard_bytes: 128 << 20,
                    write_through: false,
                    persistent_memory: false,
                    cache: DiskCache::MayBeLost,
                };
                let result = Ok(info);
                let input = Input::DiskOpened { tag, result };
                if looks && self.hold_looks {
                    self.held_looks.push(Todo::Input(index, input));
                } else if looks && unchanged {
                    // What every connect asks for takes no turn of the dice.
                    self.nodes[index].resource.handle(self.now, input);
                } else {
                    self.todo.push(Todo::Input(index, input));
                }
            }
            Output::NoteCache { .. } => {}
            Output::CloseDisk { tag, .. } => {
                if self.hanging.node == Some(index) {
                    self.hanging.abandoned = false;
                }
                self.todo
                    .push(Todo::Input(index, Input::DiskClosed { tag }));
            }
            Output::Disk { tag, op, .. } => {
                let bytes = match op {
                    DiskOp::Write { payload, .. } => self.bytes(index, payload),
                    _ => Vec::new(),
                };
                self.hang(index, Todo::Disk(index, tag, op, bytes));
            }
            Output::Meta { tag, op, .. } => self.hang(index, Todo::Meta(index, tag, op)),
            Output::AbandonDisk { .. } => self.abandon(index),
            Output::Send {
                peer,
                link,
                stream,
                volume,
                packet,
                payload,
                integrity,
                want_sent,
            } => {
                assert!(want_sent.is_none());
                let mut packet = packet;
                if let (Packet::ConnectionFeatures(f), true) = (&mut packet, self.setup.same_ids) {
                    core::mem::swap(&mut f.sender_node_id, &mut f.receiver_node_id);
                }
                if self.setup.kernels && !self.as_kernels(index, &mut packet) {
                    return;
                }
                let mut bytes = payload.map(|p| self.bytes(index, p));
                if let (Some(alg), Some(bytes)) = (integrity, &bytes) {
                    packet.set_integrity(integrity_of(alg, bytes));
                }
                if self.links.contains_key(&link.0) {
                    let name = packet_name(&packet);
                    if let Some(bytes) = bytes.as_mut().filter(|_| self.spoil == Some(name)) {
                        bytes[7] ^= 4;
                        self.spoil = None;
                    }
                    *self.packets.entry(name).or_default() += 1;
                    self.sent.push((index, usize::from(peer.0), name));
                    let key = (index, usize::from(peer.0), link.0, stream == Stream::Data);
                    self.wires
                        .entry(key)
                        .or_default()
                        .push_back((volume, packet, bytes));
                }
            }
            Output::Connect { peer } => self.nodes[index].connecting.push(peer),
            Output::StopConnecting { peer } => {
                self.nodes[index].connecting.retain(|p| *p != peer);
            }
            Output::CloseLink { peer, link, end } => {
                let flushes = end != LinkEnd::AtOnce;
                for data in [true, false].into_iter().filter(|_| flushes) {
                    let key = (index, usize::from(peer.0), link.0, data);
                    while self.deliver(key) {}
                }
                self.close_link(index, link.0);
            }
            Output::Complete { id, result } => {
                assert!(self.nodes[index].completed.insert(id.0, result).is_none());
            }
            Output::Copy { from, to } => {
                let bytes = self.bytes(index, from);
                let buffer = self.nodes[index].buffers.get_mut(&to.buf.0).unwrap();
                buffer[to.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            Output::Release { buf } => {
                assert!(
                    self.nodes[index].buffers.remove(&buf.0).is_some(),
                    "released once"
                );
            }
            Output::Event(Event::Log { text, level, .. }) => {
                self.log.push(alloc::format!("{index} {level:?} {text}"));
            }
            Output::Event(Event::NewGeneration { from, to, .. }) => {
                assert!(!self.is_known(to), "nobody may know it before its driver");
                self.announced.push((index, from, to));
            }
            Output::Answer { id, result } => {
                let known = self.answers.insert(id.0, result.clone());
                assert_eq!(known, None, "answered once");
                if let Err(error) = result {
                    self.log
                        .push(alloc::format!("{index} answer {id:?} {error:?}"));
                }
            }
            Output::Digest {
                tag,
                payload,
                algorithm,
            } if algorithm == ALL_ZERO => {
                let bytes = self.bytes(index, payload);
                let digest = vec![u8::from(bytes.iter().all(|byte| *byte == 0))];
                self.todo
                    .push(Todo::Input(index, Input::DigestDone { tag, digest }));
            }
            Output::Digest { tag, payload, .. } => {
                let sum = self.bytes(index, payload).iter().fold(7u32, |sum, byte| {
                    sum.rotate_left(5).wrapping_mul(31) ^ u32::from(*byte)
                });
                let digest = sum.to_le_bytes().to_vec();
                self.todo
                    .push(Todo::Input(index, Input::DigestDone { tag, digest }));
            }
            Output::Handler { tag, name, .. } => self.handlers.push((index, name, tag)),
            Output::Event(Event::Step(snapshot)) => self.steps.push((index, *snapshot)),
            Output::Event(_) => {}
        }
    }

    fn close_link(&mut self, index: usize, link: u64) {
        let Some((a, b)) = self.links.remove(&link) else {
            return;
        };
        self.wires.retain(|key, _| key.2 != link);
        let other = if a == index { b } else { a };
        if self.deaf == Some(other) {
            return;
        }
        let down = Input::LinkDown {
            peer: node_id(index),
            link: LinkId(link),
            reason: LinkDownReason::Closed,
        };
        self.todo.push(Todo::Input(other, down));
    }

    /// Whether a generation is on a disk, or on its way to one or to a peer.
    fn is_known(&self, uuid: Uuid) -> bool {
        let has = |bytes: &[u8]| bytes.windows(8).any(|w| w == uuid.0.to_be_bytes());
        let mut packets = self.wires.values().flatten();
        let to_disk = |todo: &Todo| match todo {
            Todo::Meta(_, _, MetaOp::Write { bytes, .. }) => has(bytes),
            _ => false,
        };
        self.nodes.iter().any(|n| has(&n.meta))
            || self.todo.iter().any(to_disk)
            || packets.any(|(_, packet, _)| match packet {
                Packet::Uuids110(set) => set.current.same_generation(uuid),
                _ => false,
            })
    }

    /// Cuts every link; both ends notice.
    fn cut_links(&mut self) {
        self.cut_links_where(|_, _| true);
    }

    /// Cuts the links of two nodes with each other.
    fn cut_links_between(&mut self, a: usize, b: usize) {
        self.cut_links_where(|x, y| (x, y) == (a, b) || (x, y) == (b, a));
    }

    fn cut_links_where(&mut self, cut: impl Fn(usize, usize) -> bool) {
        let links: Vec<_> = self
            .links
            .iter()
            .map(|(link, ends)| (*link, *ends))
            .collect();
        for (link, (a, b)) in links {
            if !cut(a, b) {
                continue;
            }
            self.links.remove(&link);
            self.wires.retain(|key, _| key.2 != link);
            for (index, peer) in [(a, b), (b, a)] {
                let down = Input::LinkDown {
                    peer: node_id(peer),
                    link: LinkId(link),
                    reason: LinkDownReason::Broken,
                };
                self.todo.push(Todo::Input(index, down));
            }
        }
    }

    /// The node stops without warning; what was not flushed is lost.
    fn crash(&mut self, index: usize) {
        let links: Vec<u64> = self
            .links
            .iter()
            .filter(|(_, l)| l.0 == index || l.1 == index)
            .map(|l| *l.0)
            .collect();
        for link in links {
            self.close_link(index, link);
        }
        self.todo.retain(|todo| match todo {
            Todo::Disk(node, ..) | Todo::Meta(node, ..) | Todo::Input(node, _) => *node != index,
        });
        let node = &mut self.nodes[index];
        node.up = false;
        node.data.power_cut();
        node.buffers.clear();
        node.connecting.clear();
    }

    fn restart(&mut self, index: usize) {
        self.seed += 99;
        let seed = self.seed;
        self.nodes[index].resource = Self::resource(index, seed, &self.setup);
        self.nodes[index].up = true;
        self.nodes[index].shown = None;
        self.start(index);
    }

    /// Links come up where both ends want one.
    fn connect(&mut self) {
        if self.cut {
            return;
        }
        for a in 0..self.nodes.len() {
            for b in a + 1..self.nodes.len() {
                let wants = |x: usize, y: usize| {
                    self.nodes[x].up && self.nodes[x].connecting.contains(&node_id(y))
                };
                if !wants(a, b) || !wants(b, a) || self.apart.contains(&(a, b)) {
                    continue;
                }
                let link = self.next_link;
                self.next_link += 1;
                self.links.insert(link, (a, b));
                for (x, y) in [(a, b), (b, a)] {
                    self.nodes[x].connecting.retain(|p| *p != node_id(y));
                    let up = Input::LinkUp {
                        peer: node_id(y),
                        link: LinkId(link),
                        // With several paths each may have accepted its own first one.
                        resolve_conflicts: x == a || self.setup.net.load_balance_paths,
                    };
                    self.input(x, up);
                }
            }
        }
    }

    /// One thing that is ready happens. False if nothing is.
    fn step(&mut self) -> bool {
        self.connect();
        let wires: Vec<_> = self
            .wires
            .iter()
            .filter(|(key, q)| {
                !(q.is_empty() || (key.3 || self.stalled_acks) && self.stalled == Some(key.1))
            })
            .map(|(key, _)| *key)
            .collect();
        let choices = self.todo.len() + wires.len();
        if choices == 0 {
            return false;
        }
        let pick = self.random(choices);
        if pick < self.todo.len() {
            match self.todo.swap_remove(pick) {
                Todo::Input(index, input) => self.input(index, input),
                Todo::Disk(index, tag, op, bytes) => self.disk(index, tag, op, &bytes),
                Todo::Meta(index, tag, op) => self.meta(index, tag, op),
            }
        } else {
            self.deliver(wires[pick - self.todo.len()]);
        }
        true
    }

    /// The next packet of one direction of one stream arrives.
    fn deliver(&mut self, key: (usize, usize, u64, bool)) -> bool {
        let Some((volume, packet, bytes)) = self.wires.get_mut(&key).and_then(VecDeque::pop_front)
        else {
            return false;
        };
        let core = &self.nodes[key.1].resource;
        let alg = core.peer_integrity(node_id(key.0));
        if let (Some(wanted), Some(bytes)) = (packet.integrity(), &bytes) {
            let found = alg.map_or(Digest::EMPTY, |alg| integrity_of(alg, bytes));
            if found != *wanted {
                assert_eq!(found.len(), wanted.len(), "both sides know the algorithm");
                let input = Input::Corrupt {
                    peer: node_id(key.0),
                    link: LinkId(key.2),
                    volume,
                    packet,
                };
                self.input(key.1, input);
                return true;
            }
        }
        let payload = bytes.map(|bytes| self.buffer(key.1, bytes));
        let stream = if key.3 { Stream::Data } else { Stream::Control };
        let input = Input::Packet {
            peer: node_id(key.0),
            link: LinkId(key.2),
            stream,
            volume,
            packet,
            payload,
        };
        self.input(key.1, input);
        true
    }

    fn disk(&mut self, index: usize, tag: Tag, op: DiskOp, bytes: &[u8]) {
        let mut result = Ok(None);
        let node = &mut self.nodes[index];
        match op {
            DiskOp::Read { sector, payload } => {
                let bytes = node.data.read(sector, payload.len);
                let buffer = node.buffers.get_mut(&payload.buf.0).unwrap();
                buffer[payload.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            DiskOp::ReadNew { sector, len } => {
                let bytes = node.data.read(sector, len);
                result = Ok(Some(self.buffer(index, bytes)));
            }
            DiskOp::Write { .. } if node.fail_data_writes => {
                result = Err(crate::event::DiskError::Io { errno: 5 });
            }
            DiskOp::Write { sector, fua, .. } => {
                node.data.write(sector, bytes);
                if fua {
                    node.data.flush();
                }
            }
            DiskOp::Flush => node.data.flush(),
            DiskOp::Discard { sector, len } | DiskOp::Zeroes { sector, len, .. } => {
                node.data.write(sector, &vec![0; len as usize]);
            }
        }
        self.input(index, Input::DiskDone { tag, result });
    }

    fn meta(&mut self, index: usize, tag: Tag, op: MetaOp) {
        let node = &mut self.nodes[index];
        let bytes = match op {
            MetaOp::Read { offset, len } => {
                node.meta[offset as usize..(offset + u64::from(len)) as usize].to_vec()
            }
            MetaOp::Write {
                offset,
                bytes,
                flush_data,
            } => {
                if flush_data {
                    node.data.flush();
                }
                node.meta[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
                Vec::new()
            }
            MetaOp::Store { .. } => panic!("these disks are no persistent memory"),
        };
        self.input(
            index,
            Input::MetaDone {
                tag,
                result: Ok(bytes),
            },
        );
    }

    /// Everything that can happen without time passing.
    fn run(&mut self) {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(
                steps < 2_000_000,
                "it settles: {:#?}",
                self.log.iter().rev().take(30).collect::<Vec<_>>()
            );
        }
        for (index, node) in self.nodes.iter().enumerate().filter(|(_, n)| n.up) {
            if let (Some(uuid), Some(shown)) = (self.generation(index), node.shown) {
                assert_eq!(
                    uuid, shown,
                    "watchers of node {index} know an old generation"
                );
            }
        }
    }

    /// Lets time pass.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        self.run();
        while self.next_timer(end) {
            self.run();
        }
        self.now = end;
    }

    /// The next timer that is due by `end` runs out. False if there is none.
    fn next_timer(&mut self, end: Instant) -> bool {
        let due = |(index, node): (usize, &Node)| {
            let at = node.resource.next_timeout().filter(|_| node.up)?;
            (at <= end).then_some((at, index))
        };
        let Some((at, index)) = self.nodes.iter().enumerate().filter_map(due).min() else {
            return false;
        };
        self.now = self.now.max(at);
        self.input(index, Input::Timeout);
        true
    }

    fn pass_until(&mut self, what: &str, limit_s: u64, done: impl Fn(&World) -> bool) {
        for _ in 0..limit_s * 10 {
            if done(self) {
                return;
            }
            self.pass(Duration::from_millis(100));
        }
        panic!("{what} within {limit_s} s: {:#?}", self.log);
    }

    fn request(&mut self, index: usize, kind: RequestKind, sector: u64, len: u32, fill: u8) -> u64 {
        self.next_id += 1;
        let id = self.next_id;
        let payload = match kind {
            RequestKind::Read | RequestKind::Write { .. } => {
                Some(self.buffer(index, vec![fill; len as usize]))
            }
            _ => None,
        };
        if let Some(payload) = payload {
            self.nodes[index].read.insert(id, payload.buf.0);
        }
        let request = Request {
            id: RequestId(id),
            volume: VOLUME,
            kind,
            sector: Sector(sector),
            len,
            payload,
        };
        self.input(index, Input::Request(request));
        id
    }

    fn write(&mut self, index: usize, sector: u64, len: u32, fill: u8) -> u64 {
        self.request(index, RequestKind::Write { fua: false }, sector, len, fill)
    }

    fn read(&mut self, index: usize, sector: u64, len: u32) -> Vec<u8> {
        let id = self.request(index, RequestKind::Read, sector, len, 0xee);
        self.run();
        assert_eq!(
            self.nodes[index].completed.get(&id),
            Some(&Ok(())),
            "{:#?}",
            self.log
        );
        let buffer = self.nodes[index].read[&id];
        self.nodes[index].buffers[&buffer].clone()
    }

    fn done(&self, index: usize, id: u64) -> bool {
        self.nodes[index].completed.get(&id) == Some(&Ok(()))
    }

    fn disk_state(&self, index: usize) -> DiskState {
        self.nodes[index].resource.state.disk(VOLUME)
    }

    fn repl(&self, index: usize, peer: usize) -> ReplState {
        self.nodes[index]
            .resource
            .state
            .peer_device(VOLUME, node_id(peer))
            .repl
    }

    fn in_sync(&self) -> bool {
        let count = self.nodes.len();
        (0..count).all(|a| {
            (self.disk_state(a) == DiskState::UpToDate || self.setup.diskless == Some(a))
                && (0..count).all(|b| a == b || self.repl(a, b) == ReplState::Established)
        })
    }

    fn bits(&self, index: usize, peer: usize) -> u64 {
        let disk = self.nodes[index].resource.devices[&VOLUME]
            .attached()
            .unwrap();
        disk.io.bitmap.count(disk.io.slot(node_id(peer)).unwrap())
    }

    /// What must hold when nothing is in flight any more.
    fn check_idle(&mut self) {
        for index in 0..self.nodes.len() {
            let r = &self.nodes[index].resource;
            assert_eq!(r.leftover(), None, "node {index}");
            let front: Vec<u64> = self.nodes[index].read.values().copied().collect();
            let left = self.nodes[index]
                .buffers
                .keys()
                .filter(|b| !front.contains(b))
                .count();
            assert_eq!(left, 0, "buffers of node {index}");
        }
    }

    fn check_same_data(&self) {
        for index in 1..self.nodes.len() {
            if self.setup.client && self.setup.diskless == Some(index) {
                continue;
            }
            self.check_same_data_of(index);
        }
    }

    /// A node has what node 0 has.
    fn check_same_data_of(&self, index: usize) {
        let (a, b) = (&self.nodes[0].data, &self.nodes[index].data);
        let differs = a
            .now
            .keys()
            .chain(b.now.keys())
            .find(|block| a.block(**block) != b.block(**block));
        assert_eq!(
            differs, None,
            "block of nodes 0 and {index}: {:#?}",
            self.log
        );
    }

    /// Node 1 drops all it has and copies it from the others; `packets` counts from here on.
    fn invalidate(&mut self) {
        self.packets.clear();
        let command = Command::Invalidate {
            volume: VOLUME,
            from: None,
            reset_bitmap: true,
        };
        self.command(1, command);
        self.pass(Duration::from_secs(1));
    }

    /// One node copies all it has from another one.
    fn invalidate_from(&mut self, node: usize, from: usize) {
        let command = Command::Invalidate {
            volume: VOLUME,
            from: Some(node_id(from)),
            reset_bitmap: true,
        };
        self.command(node, command);
        self.pass(Duration::from_millis(100));
    }

    /// The disks of fresh nodes count as equal, and node 0 is Primary.
    fn start_clean(&mut self) {
        self.pass(Duration::from_secs(3));
        let command = Command::NewCurrentUuid {
            volume: VOLUME,
            clear_bitmap: true,
            force_resync: false,
        };
        let with_disk = usize::from(self.setup.diskless == Some(0));
        self.command(with_disk, command);
        self.pass_until("clean start", 20, World::in_sync);
        self.command(0, Command::Primary { force: false });
        self.pass(Duration::from_secs(1));
    }

    /// Two or more fresh nodes, node 0 Primary, everything in sync.
    fn synced(seed: u64, count: usize) -> World {
        let mut world = World::new(seed, count, Setup::default());
        world.pass(Duration::from_secs(3));
        world.command(0, Command::Primary { force: true });
        world.pass_until("initial sync", 60, World::in_sync);
        world
    }
}

fn packet_name(packet: &Packet) -> &'static str {
    match packet {
        Packet::Data(_) => "data",
        Packet::DataReply(_) => "data reply",
        Packet::RsDataReply(_) => "rs data reply",
        Packet::Zeroes(_) => "zeroes",
        Packet::Barrier(_) => "barrier",
        Packet::BarrierAck(_) => "barrier ack",
        Packet::WriteAck(_) => "write ack",
        Packet::PeerAck(_) => "peer ack",
        Packet::RsDagtagReq(_) | Packet::RsDataRequest(_) => "resync request",
        Packet::RsThinDagtagReq(_) | Packet::RsThinReq(_) => "thin request",
        Packet::RsDeallocated(_) | Packet::RsDeallocatedId(_) => "deallocated",
        Packet::RsCsumDagtagReq(_) | Packet::CsumRsRequest(_) => "csum request",
        Packet::OutOfSync(_) => "out of sync",
        Packet::DataRequest(_) => "data request",
        Packet::RsCancel(_) => "cancel",
        Packet::ConfirmStable(_) => "confirm stable",
        Packet::EnableReplication(_) => "enable replication",
        Packet::CompressedBitmap(_) | Packet::Bitmap(_) => "bitmap",
        Packet::State(_) => "state",
        Packet::Uuids110(_) => "uuids",
        Packet::PeersInSync(_) => "peers in sync",
        _ => "other",
    }
}

/// As `World::synced`, without copying anything: the empty disks are declared equal.
fn clean(seed: u64, count: usize, setup: Setup) -> World {
    let mut w = World::new(seed, count, setup);
    w.start_clean();
    w
}
