//! Whole nodes in this process, each on its shard, joined by TCP on loopback: the engine
//! without a front end, protocol C.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU32;
use std::path::{Path as FilePath, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lockstep_core::command::{Command, MetaIndex};
use lockstep_core::event::{RequestId, RequestKind};
use lockstep_core::options::{DiskOptions, NetOptions, ReadBalancing, ResourceOptions};
use lockstep_core::report::{Event, Snapshot};
use lockstep_core::resource::{Resource, ResourceConfig};
use lockstep_core::state::{DiskState, ReplState};
use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::al::encode_initialised;
use lockstep_format::disk::layout::{Geometry, Layout, Placement};
use lockstep_format::disk::v09::SuperBlock;
use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_io::disk::{FaultPlan, RamDisk};
use lockstep_io::pool::IoBuf;
use lockstep_io::port::{PortEvent, PortRequest, PortSink, VolumePort};
use lockstep_io::shard::{
    HandlerCall, HandlerDone, HandlerExecutor, ResourceId, ShardConfig, ShardEnv, ShardHandle,
    ShardPort,
};
use lockstep_io::tcp::{Acceptor, Path, PeerNet};

use crate::raw::{BLOCK, Direction};
use crate::stats::{Figure, Latencies, process_cpu};

/// The volume of every node.
pub const VOLUME: VolumeNr = VolumeNr(0);
const META_BYTES: u64 = 4 << 20;
/// How long a pair may take to come up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the nodes keep their data.
#[derive(Clone, Debug)]
pub enum Disks {
    /// In memory.
    Ram,
    /// In files of this directory.
    Files(PathBuf),
}

struct NoHandlers;

impl HandlerExecutor for NoHandlers {
    fn run(&self, _call: HandlerCall, done: HandlerDone) {
        done.finish(0);
    }
}

struct Node {
    shard: ShardHandle<Resource>,
    id: ResourceId,
    events: Receiver<Event>,
    data_path: Option<String>,
    pace: Option<Arc<FaultPlan>>,
}

/// Blocks of one extent of the activity log.
pub(crate) const BLOCKS_PER_EXTENT: u64 = (4 << 20) / BLOCK as u64;

/// Where operations go.
#[derive(Clone, Copy, Debug)]
pub enum Places {
    /// Anywhere in the first so many blocks.
    Within(u64),
    /// To each of so many extents in turn.
    Extents(u64),
}

/// How a cluster is made.
#[derive(Clone, Debug)]
pub struct Shape {
    /// For each node where its data lie; a client has none.
    pub disks: Vec<Option<Disks>>,
    /// Bytes of the volume.
    pub bytes: u64,
    /// Options of every connection.
    pub net: NetOptions,
    /// The reads of the disks can be made slow.
    pub paced: bool,
    /// Extents of the activity log.
    pub al_extents: u32,
}

impl Shape {
    /// Nodes with disks of this kind, and clients.
    pub fn of(disks: &Disks, replicas: usize, clients: usize, bytes: u64) -> Shape {
        let with = (0..replicas).map(|_| Some(disks.clone()));
        Shape {
            disks: with.chain((0..clients).map(|_| None)).collect(),
            bytes,
            net: NetOptions::default(),
            paced: false,
            al_extents: AL_EXTENTS,
        }
    }
}

/// Connected nodes whose disks are UpToDate; the first is Primary.
pub struct Nodes {
    nodes: Vec<Node>,
    bytes: u64,
}

fn other(text: impl std::fmt::Display) -> io::Error {
    io::Error::other(text.to_string())
}

impl Nodes {
    /// Brings two nodes up with volumes of `bytes`.
    pub fn pair(disks: &Disks, bytes: u64) -> io::Result<Nodes> {
        Nodes::new(&Shape::of(disks, 2, 0, bytes))
    }

    /// Brings the nodes up.
    pub fn new(shape: &Shape) -> io::Result<Nodes> {
        let env = ShardEnv {
            acceptor: Acceptor::new()?,
            handlers: Arc::new(NoHandlers),
        };
        let count = shape.disks.len();
        let addresses: Vec<SocketAddr> = (0..count)
            .map(|_| free_address())
            .collect::<io::Result<_>>()?;
        let mut nodes = Vec::new();
        for own in 0..count {
            nodes.push(Node::new(&env, shape, own, &addresses)?);
        }
        let nodes = Nodes {
            nodes,
            bytes: shape.bytes,
        };
        nodes.until("connected", |s| {
            s.connections.len() + 1 == count
                && s.connections.iter().all(|c| {
                    c.peer_devices
                        .iter()
                        .all(|p| p.repl_state == ReplState::Established)
                })
        })?;
        nodes.nodes[0].run(Command::NewCurrentUuid {
            volume: VOLUME,
            clear_bitmap: true,
            force_resync: false,
        })?;
        nodes.until_in_sync()?;
        nodes.nodes[0].run(Command::Primary { force: false })?;
        Ok(nodes)
    }

    fn until(&self, what: &str, condition: impl Fn(&Snapshot) -> bool) -> io::Result<()> {
        let mut nodes = self.nodes.iter();
        nodes.try_for_each(|node| node.until(what, &condition))
    }

    /// Waits until every disk is UpToDate in everybody's eyes.
    pub fn until_in_sync(&self) -> io::Result<()> {
        let client = |node: NodeId| self.nodes[usize::from(node.0)].data_path.is_none();
        let good = |node: NodeId, disk: DiskState| {
            disk == match client(node) {
                true => DiskState::Diskless,
                false => DiskState::UpToDate,
            }
        };
        for (own, node) in self.nodes.iter().enumerate() {
            let own = NodeId(own as u8);
            node.until("UpToDate", |s| {
                s.devices.iter().all(|d| good(own, d.disk_state))
                    && s.connections.iter().all(|c| {
                        let mut devices = c.peer_devices.iter();
                        devices.all(|p| {
                            good(c.peer, p.disk_state) && p.repl_state == ReplState::Established
                        })
                    })
            })?;
        }
        Ok(())
    }

    /// Makes a node Primary, from whom it was; how long that took it.
    pub fn promote(&self, node: usize) -> io::Result<Duration> {
        let begin = Instant::now();
        self.nodes[node].run(Command::Primary { force: false })?;
        Ok(begin.elapsed())
    }

    /// Makes a node Secondary; how long that took.
    pub fn demote(&self, node: usize) -> io::Result<Duration> {
        let begin = Instant::now();
        self.nodes[node].run(Command::Secondary { force: false })?;
        Ok(begin.elapsed())
    }

    /// Runs a command on a node.
    pub fn run(&self, node: usize, command: Command) -> io::Result<()> {
        self.nodes[node].run(command)
    }

    /// Waits until a node's state is as wished.
    pub fn wait_for(
        &self,
        node: usize,
        what: &str,
        condition: impl Fn(&Snapshot) -> bool,
    ) -> io::Result<()> {
        self.nodes[node].until(what, condition)
    }

    /// The path of a node's data disk; none for a client.
    pub fn data_path(&self, node: usize) -> Option<&str> {
        self.nodes[node].data_path.as_deref()
    }

    /// At most so many reads per second from a node's disk, if the nodes are paced.
    pub fn slow_reads(&self, node: usize, per_second: Option<NonZeroU32>) {
        if let Some(pace) = &self.nodes[node].pace {
            pace.slow_reads(per_second);
        }
    }

    /// Changes the options of a node's disk.
    pub fn read_balancing(&self, node: usize, policy: ReadBalancing) -> io::Result<()> {
        let read_balancing = policy;
        self.nodes[node].run(Command::DiskOptions {
            volume: VOLUME,
            options: DiskOptions {
                read_balancing,
                ..disk_options(AL_EXTENTS)
            },
        })
    }

    /// For front ends on the first node.
    pub fn opener(&self) -> Opener {
        Opener {
            shard: self.nodes[0].shard.clone(),
            id: self.nodes[0].id,
        }
    }

    /// Random 4 KiB operations at depth `qd` on the first node for `time`.
    pub fn measure(&self, direction: Direction, qd: usize, time: Duration) -> io::Result<Figure> {
        self.measure_at(0, direction, qd, time)
    }

    /// Writes of 4 KiB on the first node, one after the other, to places of a kind.
    pub fn measure_writes(&self, places: Places, time: Duration) -> io::Result<Figure> {
        self.measure_places(0, (Direction::Write, places), 1, time)
    }

    /// The same on any node; it must be Primary.
    pub fn measure_at(
        &self,
        node: usize,
        direction: Direction,
        qd: usize,
        time: Duration,
    ) -> io::Result<Figure> {
        let all = Places::Within(self.bytes / BLOCK as u64);
        self.measure_places(node, (direction, all), qd, time)
    }

    fn measure_places(
        &self,
        node: usize,
        (direction, places): (Direction, Places),
        qd: usize,
        time: Duration,
    ) -> io::Result<Figure> {
        let (over, result) = channel();
        let shared = SharedLoad::default();
        let sink = LoadSink {
            load: shared.clone(),
            batch: Vec::new(),
            over,
        };
        let node = &self.nodes[node];
        let port = node
            .shard
            .open_port(node.id, VOLUME, Box::new(sink))
            .map_err(|_| other("the shard has ended"))?
            .ok_or_else(|| other("the resource is gone"))?;
        let mut load = Load {
            port,
            direction,
            places,
            count: 0,
            random: 0x9e37_79b9_7f4a_7c15,
            started: vec![Instant::now(); qd],
            buffers: (0..qd).map(|_| None).collect(),
            ready: (0..qd).collect(),
            in_flight: 0,
            latencies: Latencies::with_capacity(1 << 20),
            begin: Instant::now(),
            time,
            cpu: process_cpu(),
        };
        let mut running = shared.lock().unwrap_or_else(PoisonError::into_inner);
        load.turn(&mut Vec::new())?;
        *running = Some(load);
        drop(running);
        result
            .recv_timeout(time + PATIENCE)
            .map_err(|_| other(format!("the load did not end within {PATIENCE:?}")))?
    }
}

/// Opens ports of the first node; the nodes must live as long as they.
#[derive(Clone)]
pub struct Opener {
    shard: ShardHandle<Resource>,
    id: ResourceId,
}

impl Opener {
    /// A port of the volume.
    pub fn port(&self, sink: Box<dyn PortSink>) -> io::Result<Box<dyn VolumePort + Send>> {
        let port = self
            .shard
            .open_port(self.id, VOLUME, sink)
            .map_err(|_| other("the shard has ended"))?
            .ok_or_else(|| other("the resource is gone"))?;
        Ok(Box::new(port))
    }
}

/// Random operations through a port. The load runs on the node's own thread, as that of the floor
/// and of the raw disk runs on theirs: what is compared is the engine, not a hand-over between
/// threads.
struct Load {
    port: ShardPort<Resource>,
    direction: Direction,
    places: Places,
    count: u64,
    random: u64,
    started: Vec<Instant>,
    buffers: Vec<Option<IoBuf>>,
    ready: Vec<usize>,
    in_flight: usize,
    latencies: Latencies,
    begin: Instant,
    time: Duration,
    cpu: Duration,
}

impl Load {
    /// Deals with what completed and submits what follows; the figure, when all is over.
    fn turn(&mut self, batch: &mut Vec<PortEvent>) -> io::Result<Option<Figure>> {
        let now = Instant::now();
        for event in batch.drain(..) {
            if let PortEvent::Done(done) = event {
                let slot = done.id.0 as usize;
                done.result
                    .map_err(|error| other(format!("a request failed: {error:?}")))?;
                self.latencies.add(now - self.started[slot]);
                self.buffers[slot] = done.buf;
                self.ready.push(slot);
                self.in_flight -= 1;
            }
        }
        if self.begin.elapsed() < self.time {
            while let Some(slot) = self.ready.pop() {
                self.submit(slot)?;
            }
            self.port.kick();
        }
        if self.in_flight > 0 {
            return Ok(None);
        }
        Ok(Some(Figure::new(
            std::mem::take(&mut self.latencies),
            self.begin.elapsed(),
            process_cpu().saturating_sub(self.cpu),
        )))
    }

    fn block(&mut self) -> u64 {
        let number = self.count;
        self.count += 1;
        match self.places {
            Places::Within(blocks) => self.random % blocks,
            Places::Extents(extents) => {
                number % extents * BLOCKS_PER_EXTENT + number / extents % BLOCKS_PER_EXTENT
            }
        }
    }

    fn submit(&mut self, slot: usize) -> io::Result<()> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let buf = self.buffers[slot].take().or_else(|| self.port.alloc(BLOCK));
        let buf = buf.ok_or_else(|| other("the buffer pool is used up"))?;
        self.started[slot] = Instant::now();
        let request = PortRequest {
            id: RequestId(slot as u64),
            kind: match self.direction {
                Direction::Read => RequestKind::Read,
                Direction::Write => RequestKind::Write { fua: false },
            },
            sector: Sector(self.block() * (BLOCK as u64 / 512)),
            len: BLOCK as u32,
            buf: Some(buf),
            buf_offset: 0,
        };
        self.port
            .submit(request)
            .map_err(|error| other(format!("{error:?}")))?;
        self.in_flight += 1;
        Ok(())
    }
}

/// What the measuring thread and the node's share: nothing before the start and after the end.
type SharedLoad = Arc<Mutex<Option<Load>>>;

struct LoadSink {
    load: SharedLoad,
    batch: Vec<PortEvent>,
    over: Sender<io::Result<Figure>>,
}

impl PortSink for LoadSink {
    fn event(&mut self, event: PortEvent) {
        self.batch.push(event);
    }

    fn batch_end(&mut self) {
        let mut load = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(running) = load.as_mut() else {
            self.batch.clear();
            return;
        };
        let result = match running.turn(&mut self.batch) {
            Ok(None) => return,
            Ok(Some(figure)) => Ok(figure),
            Err(error) => Err(error),
        };
        *load = None;
        // Nobody waits any more if it took too long.
        let _ = self.over.send(result);
    }
}

impl Node {
    fn new(
        env: &ShardEnv,
        shape: &Shape,
        own: usize,
        addresses: &[SocketAddr],
    ) -> io::Result<Node> {
        let shard = ShardHandle::start("bench", ShardConfig::default(), env.clone())?;
        let (sender, events) = channel();
        shard.subscribe(Box::new(move |_, event, _| {
            drop(sender.send(event.clone()))
        }));
        let node_id = NodeId(own as u8);
        let config = ResourceConfig {
            name: "bench".to_owned(),
            node_id,
            options: ResourceOptions::default(),
        };
        let id = shard
            .add_resource("bench", Resource::new(config, own as u64 + 1))
            .map_err(|_| other("the shard has ended"))?;
        let mut node = Node {
            shard,
            id,
            events,
            data_path: None,
            pace: None,
        };
        node.run(Command::NewVolume {
            volume: VOLUME,
            minor: 0,
            diskless: shape.disks[own].is_none(),
        })?;
        let peers = (0..addresses.len()).filter(|peer| *peer != own);
        for peer in peers.clone() {
            node.run(Command::NewPeer {
                peer: NodeId(peer as u8),
                net: shape.net.clone(),
            })?;
        }
        if let Some(disks) = &shape.disks[own] {
            let (data_path, meta_path) = make_disks(disks, shape.bytes, own, addresses)?;
            if shape.paced {
                node.pace = Some(FaultPlan::of_path(&data_path));
            }
            node.data_path = Some(data_path.clone());
            node.run(Command::Attach {
                volume: VOLUME,
                data_path,
                meta_path: Some(meta_path),
                index: MetaIndex::FlexExternal,
                options: disk_options(shape.al_extents),
            })?;
        }
        for peer in peers {
            let paths = vec![Path {
                local: addresses[own],
                peer: addresses[peer],
            }];
            let peer = NodeId(peer as u8);
            node.shard
                .set_peer(node.id, peer, PeerNet::new(paths, &shape.net));
            node.run(Command::Connect {
                peer,
                discard_my_data: false,
                tentative: false,
            })?;
        }
        Ok(node)
    }

    fn run(&self, command: Command) -> io::Result<()> {
        let text = format!("{command:?}");
        match self.shard.command(self.id, command).recv() {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(other(format!("{text}: {error}"))),
            Err(_) => Err(other("the shard has ended")),
        }
    }

    fn until(&self, what: &str, condition: impl Fn(&Snapshot) -> bool) -> io::Result<()> {
        let begin = Instant::now();
        loop {
            let snapshot = self
                .shard
                .snapshot(self.id)
                .ok()
                .flatten()
                .ok_or_else(|| other("the resource is gone"))?;
            if condition(&snapshot) {
                return Ok(());
            }
            if begin.elapsed() > PATIENCE {
                return Err(other(format!(
                    "not {what} after {PATIENCE:?}: {snapshot:?}"
                )));
            }
            // Woken by the next event; the time-out only bounds the wait.
            let _ = self.events.recv_timeout(Duration::from_secs(1));
        }
    }
}

/// So many that every measured file is hot all over.
const AL_EXTENTS: u32 = 6007;

fn disk_options(al_extents: u32) -> DiskOptions {
    DiskOptions {
        al_extents,
        ..DiskOptions::default()
    }
}

/// A fresh data disk and its metadata.
fn make_disks(
    disks: &Disks,
    bytes: u64,
    own: usize,
    addresses: &[SocketAddr],
) -> io::Result<(String, String)> {
    let peers = addresses.len() - 1;
    // A RAM disk lives as long as the process: every cluster has its own.
    let unique = format!("{own}-{}", addresses[own].port());
    match disks {
        Disks::Ram => {
            let meta = format!("ram:{META_BYTES}:{unique}-meta");
            let disk = RamDisk::of_path(&meta).map_err(other)?;
            for (at, block) in fresh_metadata(own, peers)? {
                disk.write(at, &block);
            }
            let data = format!("ram:{bytes}:{unique}");
            fill_ram(&data, own as u8)?;
            Ok((data, meta))
        }
        Disks::Files(directory) => {
            let data = directory.join(format!("{unique}.data"));
            crate::raw::prepare(&data, bytes)?;
            let meta = directory.join(format!("{unique}.meta"));
            write_meta_file(&meta, own, peers)?;
            Ok((data.display().to_string(), meta.display().to_string()))
        }
    }
}

/// Writes a RAM disk full: memory that was never written is one page of zeroes, which no disk is as
/// fast as.
pub(crate) fn fill_ram(path: &str, key: u8) -> io::Result<()> {
    let disk = RamDisk::of_path(path).map_err(other)?;
    let mut piece = vec![0u8; 1 << 20];
    for (n, byte) in piece.iter_mut().enumerate() {
        *byte = (n % 251) as u8 ^ key;
    }
    let mut at = 0;
    while at < disk.size_bytes() {
        let len = (disk.size_bytes() - at).min(piece.len() as u64) as usize;
        assert!(disk.write(at, &piece[..len]), "the range is inside");
        at += len as u64;
    }
    Ok(())
}

/// Whether two RAM disks have the same bytes.
pub(crate) fn ram_is_equal(one: &str, other_one: &str) -> io::Result<bool> {
    let one = RamDisk::of_path(one).map_err(other)?;
    let other = RamDisk::of_path(other_one).map_err(other)?;
    let (mut a, mut b) = (vec![0u8; 1 << 20], vec![0u8; 1 << 20]);
    let mut at = 0;
    while at < one.size_bytes() {
        let len = (one.size_bytes() - at).min(a.len() as u64) as usize;
        if !one.read(at, &mut a[..len]) || !other.read(at, &mut b[..len]) || a[..len] != b[..len] {
            return Ok(false);
        }
        at += len as u64;
    }
    Ok(true)
}

fn fresh_metadata(own: usize, peers: usize) -> io::Result<Vec<(u64, [u8; BLOCK_BYTES])>> {
    let geometry = Geometry::for_peers(peers as u8);
    let layout = Layout::new(Placement::FlexExternal, geometry, META_BYTES).map_err(other)?;
    let mut superblock = SuperBlock::fresh(&layout);
    superblock.node_id = Some(NodeId(own as u8));
    let mut block = [0u8; BLOCK_BYTES];
    superblock.encode(&mut block);
    let mut blocks = vec![(layout.superblock_byte(), block)];
    encode_initialised(&mut block);
    for number in 0..8u64 {
        blocks.push((layout.al_byte() + number * BLOCK_BYTES as u64, block));
    }
    Ok(blocks)
}

fn write_meta_file(path: &FilePath, own: usize, peers: usize) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path)?;
    file.set_len(META_BYTES)?;
    for (at, block) in fresh_metadata(own, peers)? {
        file.write_all_at(&block, at)?;
    }
    file.sync_all()
}

fn free_address() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}
