//! Two whole nodes in this process, each on its shard, joined by TCP on loopback: the engine
//! without a front end, protocol C.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use lockstep_core::command::{Command, MetaIndex};
use lockstep_core::event::{RequestId, RequestKind};
use lockstep_core::options::{DiskOptions, NetOptions, ResourceOptions};
use lockstep_core::report::{Event, Snapshot};
use lockstep_core::resource::{Resource, ResourceConfig};
use lockstep_core::state::{DiskState, ReplState};
use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::al::encode_initialised;
use lockstep_format::disk::layout::{Geometry, Layout, Placement};
use lockstep_format::disk::v09::SuperBlock;
use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_io::disk::RamDisk;
use lockstep_io::port::{PortEvent, PortRequest, PortSink, VolumePort};
use lockstep_io::shard::{
    HandlerCall, HandlerDone, HandlerExecutor, ResourceId, ShardConfig, ShardEnv, ShardHandle,
    ShardPort,
};
use lockstep_io::tcp::{Acceptor, Path, PeerNet};

use crate::raw::{BLOCK, Direction};
use crate::stats::{Figure, Latencies, process_cpu};

const VOLUME: VolumeNr = VolumeNr(0);
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
}

/// Two connected, UpToDate nodes; the first is Primary.
pub struct Pair {
    nodes: Vec<Node>,
    bytes: u64,
}

fn other(text: impl std::fmt::Display) -> io::Error {
    io::Error::other(text.to_string())
}

impl Pair {
    /// Brings the pair up with volumes of `bytes`.
    pub fn new(disks: &Disks, bytes: u64) -> io::Result<Pair> {
        let env = ShardEnv {
            acceptor: Acceptor::new()?,
            handlers: Arc::new(NoHandlers),
        };
        let addresses = [free_address()?, free_address()?];
        let mut nodes = Vec::new();
        for own in 0..2u8 {
            nodes.push(Node::new(&env, disks, bytes, own, addresses)?);
        }
        let pair = Pair { nodes, bytes };
        for node in &pair.nodes {
            node.until("connected", |s| {
                s.connections.iter().all(|c| {
                    c.peer_devices
                        .iter()
                        .all(|p| p.repl_state == ReplState::Established)
                })
            })?;
        }
        pair.nodes[0].run(Command::NewCurrentUuid {
            volume: VOLUME,
            clear_bitmap: true,
            force_resync: false,
        })?;
        for node in &pair.nodes {
            node.until("UpToDate", |s| {
                s.devices
                    .iter()
                    .all(|d| d.disk_state == DiskState::UpToDate)
                    && s.connections.iter().all(|c| {
                        c.peer_devices
                            .iter()
                            .all(|p| p.disk_state == DiskState::UpToDate)
                    })
            })?;
        }
        pair.nodes[0].run(Command::Primary { force: false })?;
        Ok(pair)
    }

    /// For front ends on the Primary.
    pub fn opener(&self) -> Opener {
        Opener {
            shard: self.nodes[0].shard.clone(),
            id: self.nodes[0].id,
        }
    }

    /// Random 4 KiB operations at depth `qd` on the Primary for `time`.
    pub fn measure(&self, direction: Direction, qd: usize, time: Duration) -> io::Result<Figure> {
        let (sender, events) = channel();
        let node = &self.nodes[0];
        let mut port = node
            .shard
            .open_port(node.id, VOLUME, Box::new(Sink(sender, Vec::new())))
            .map_err(|_| other("the shard has ended"))?
            .ok_or_else(|| other("the resource is gone"))?;
        run_load(&mut port, &events, self.bytes, direction, qd, time)
    }
}

/// Opens ports of a pair's Primary; the pair must live as long as they.
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

struct Sink(Sender<Vec<PortEvent>>, Vec<PortEvent>);

impl PortSink for Sink {
    fn event(&mut self, event: PortEvent) {
        self.1.push(event);
    }

    fn batch_end(&mut self) {
        if !self.1.is_empty() {
            // The measurement may have ended before the port.
            let _ = self.0.send(std::mem::take(&mut self.1));
        }
    }
}

fn run_load(
    port: &mut ShardPort<Resource>,
    events: &Receiver<Vec<PortEvent>>,
    bytes: u64,
    direction: Direction,
    qd: usize,
    time: Duration,
) -> io::Result<Figure> {
    let blocks = bytes / BLOCK as u64;
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut started = vec![Instant::now(); qd];
    let mut buffers: Vec<_> = (0..qd).map(|_| None).collect();
    let mut ready: Vec<usize> = (0..qd).collect();
    let mut in_flight = 0;
    let mut latencies = Latencies::with_capacity(1 << 20);
    let begin = Instant::now();
    let cpu = process_cpu();
    loop {
        if begin.elapsed() < time {
            for slot in ready.drain(..) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let buf = match buffers[slot].take().or_else(|| port.alloc(BLOCK)) {
                    Some(buf) => buf,
                    None => return Err(other("the buffer pool is used up")),
                };
                started[slot] = Instant::now();
                let request = PortRequest {
                    id: RequestId(slot as u64),
                    kind: match direction {
                        Direction::Read => RequestKind::Read,
                        Direction::Write => RequestKind::Write { fua: false },
                    },
                    sector: Sector(random % blocks * (BLOCK as u64 / 512)),
                    len: BLOCK as u32,
                    buf: Some(buf),
                    buf_offset: 0,
                };
                port.submit(request)
                    .map_err(|error| other(format!("{error:?}")))?;
                in_flight += 1;
            }
            port.kick();
        }
        if in_flight == 0 {
            break;
        }
        let batch = events
            .recv_timeout(Duration::from_secs(30))
            .map_err(|_| other("no request completed for 30 s"))?;
        let now = Instant::now();
        for event in batch {
            if let PortEvent::Done(done) = event {
                let slot = done.id.0 as usize;
                done.result
                    .map_err(|error| other(format!("a request failed: {error:?}")))?;
                latencies.add(now - started[slot]);
                buffers[slot] = done.buf;
                ready.push(slot);
                in_flight -= 1;
            }
        }
    }
    let elapsed = begin.elapsed();
    Ok(Figure::new(
        latencies,
        elapsed,
        process_cpu().saturating_sub(cpu),
    ))
}

impl Node {
    fn new(
        env: &ShardEnv,
        disks: &Disks,
        bytes: u64,
        own: u8,
        addresses: [SocketAddr; 2],
    ) -> io::Result<Node> {
        let shard = ShardHandle::start("bench", ShardConfig::default(), env.clone())?;
        let (sender, events) = channel();
        shard.subscribe(Box::new(move |_, event| drop(sender.send(event.clone()))));
        let config = ResourceConfig {
            name: "bench".to_owned(),
            node_id: NodeId(own),
            options: ResourceOptions::default(),
        };
        let id = shard
            .add_resource("bench", Resource::new(config, u64::from(own) + 1))
            .map_err(|_| other("the shard has ended"))?;
        let node = Node { shard, id, events };
        let unique = format!("bench-{}-{own}", std::process::id());
        let (data_path, meta_path) = match disks {
            Disks::Ram => {
                let meta = format!("ram:{META_BYTES}:{unique}-meta");
                let disk = RamDisk::of_path(&meta).map_err(|error| other(format!("{error:?}")))?;
                for (at, block) in fresh_metadata(own)? {
                    disk.write(at, &block);
                }
                (format!("ram:{bytes}:{unique}"), meta)
            }
            Disks::Files(directory) => {
                let data = directory.join(format!("{unique}.data"));
                crate::raw::prepare(&data, bytes)?;
                let meta = directory.join(format!("{unique}.meta"));
                write_meta_file(&meta, own)?;
                (data.display().to_string(), meta.display().to_string())
            }
        };
        node.run(Command::NewVolume {
            volume: VOLUME,
            minor: 0,
            diskless: false,
        })?;
        let peer = NodeId(1 - own);
        node.run(Command::NewPeer {
            peer,
            net: NetOptions::default(),
        })?;
        node.run(Command::Attach {
            volume: VOLUME,
            data_path,
            meta_path: Some(meta_path),
            index: MetaIndex::FlexExternal,
            options: DiskOptions {
                al_extents: 6007,
                ..DiskOptions::default()
            },
        })?;
        let mine = addresses[usize::from(own)];
        let theirs = addresses[usize::from(1 - own)];
        let paths = vec![Path {
            local: mine,
            peer: theirs,
        }];
        node.shard
            .set_peer(node.id, peer, PeerNet::new(paths, &NetOptions::default()));
        node.run(Command::Connect {
            peer,
            discard_my_data: false,
            tentative: false,
        })?;
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

fn fresh_metadata(own: u8) -> io::Result<Vec<(u64, [u8; BLOCK_BYTES])>> {
    let layout =
        Layout::new(Placement::FlexExternal, Geometry::for_peers(1), META_BYTES).map_err(other)?;
    let mut superblock = SuperBlock::fresh(&layout);
    superblock.node_id = Some(NodeId(own));
    let mut block = [0u8; BLOCK_BYTES];
    superblock.encode(&mut block);
    let mut blocks = vec![(layout.superblock_byte(), block)];
    encode_initialised(&mut block);
    for number in 0..8u64 {
        blocks.push((layout.al_byte() + number * BLOCK_BYTES as u64, block));
    }
    Ok(blocks)
}

fn write_meta_file(path: &FilePath, own: u8) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path)?;
    file.set_len(META_BYTES)?;
    for (at, block) in fresh_metadata(own)? {
        file.write_all_at(&block, at)?;
    }
    file.sync_all()
}

fn free_address() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}
