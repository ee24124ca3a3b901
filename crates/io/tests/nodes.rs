//! Real cores on real shards over loopback TCP: two nodes sync, replicate, lose each other and come
//! back. The whole driver against the whole core; the simulator has the finer questions.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration as Time;

use lockstep_core::command::{Command, MetaIndex};
use lockstep_core::event::{RequestError, RequestId, RequestKind};
use lockstep_core::options::{DiskOptions, NetOptions, ResourceOptions};
use lockstep_core::report::{Event, Level, Snapshot};
use lockstep_core::resource::{Resource, ResourceConfig};
use lockstep_core::state::{ConnState, DiskState, ReplState, Role};
use lockstep_core::time::Duration;
use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::al::encode_initialised;
use lockstep_format::disk::layout::{Geometry, Layout, Placement};
use lockstep_format::disk::v09::SuperBlock;
use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_io::disk::RamDisk;
use lockstep_io::port::{PortEvent, PortRequest, PortSink, VolumePort};
use lockstep_io::ring::RingKind;
use lockstep_io::shard::{
    HandlerCall, HandlerDone, HandlerExecutor, ResourceId, ShardConfig, ShardEnv, ShardHandle,
    ShardPort,
};
use lockstep_io::tcp::{Acceptor, Path, PeerNet};

const VOLUME: VolumeNr = VolumeNr(0);
const DATA_BYTES: u64 = 16 << 20;
const META_BYTES: u64 = 1 << 20;

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
    data: Arc<RamDisk>,
}

impl Node {
    /// A node with a fresh disk that is not connected yet.
    fn new(ring: RingKind, env: &ShardEnv, name: &str, own: u8) -> Option<Node> {
        let config = ShardConfig {
            ring: Some(ring),
            pool_bytes: 32 << 20,
            reserve_bytes: 16 << 20,
            ..ShardConfig::default()
        };
        let shard = match ShardHandle::start("node", config, env.clone()) {
            Ok(shard) => shard,
            Err(error) => {
                eprintln!("skipped: {ring:?} ({error})");
                return None;
            }
        };
        let (sender, events) = channel();
        // The test may have ended before the shard.
        shard.subscribe(Box::new(move |_, event, _| {
            drop(sender.send(event.clone()))
        }));
        let node_id = NodeId(own);
        let options = ResourceOptions::default();
        let config = ResourceConfig {
            name: "r0".to_owned(),
            node_id,
            options,
        };
        let id = shard
            .add_resource("r0", Resource::new(config, u64::from(own) + 7))
            .ok()?;
        let data_path = format!("ram:{DATA_BYTES}:{name}-{ring:?}-{own}");
        let meta_path = format!("ram:{META_BYTES}:{name}-{ring:?}-{own}-meta");
        write_fresh_metadata(&meta_path, node_id);
        let data = RamDisk::of_path(&data_path).unwrap();
        let node = Node {
            shard,
            id,
            events,
            data,
        };
        node.run(Command::NewVolume {
            volume: VOLUME,
            minor: 0,
            diskless: false,
        });
        let (peer, net) = (NodeId(1 - own), NetOptions::default());
        node.run(Command::NewPeer { peer, net });
        node.run(Command::Attach {
            volume: VOLUME,
            data_path,
            meta_path: Some(meta_path),
            index: MetaIndex::FlexExternal,
            options: DiskOptions::default(),
        });
        Some(node)
    }

    fn run(&self, command: Command) {
        let text = format!("{command:?}");
        let result = self.shard.command(self.id, command).recv().unwrap();
        assert!(result.is_ok(), "{text}: {result:?}");
    }

    fn snapshot(&self) -> Snapshot {
        self.shard.snapshot(self.id).unwrap().unwrap()
    }

    /// Waits for events until the condition holds.
    fn until(&self, what: &str, condition: impl Fn(&Snapshot) -> bool) {
        let mut log = Vec::new();
        loop {
            let snapshot = self.snapshot();
            if condition(&snapshot) {
                return;
            }
            match self.events.recv_timeout(Time::from_secs(15)) {
                Ok(Event::Log { level, text, .. }) if level != Level::Debug => log.push(text),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("{what}: {snapshot:#?}\n{log:#?}")
                }
            }
        }
    }
}

fn write_fresh_metadata(path: &str, node_id: NodeId) {
    let geometry = Geometry::for_peers(1);
    let layout = Layout::new(Placement::FlexExternal, geometry, META_BYTES).unwrap();
    let disk = RamDisk::of_path(path).unwrap();
    let mut superblock = SuperBlock::fresh(&layout);
    superblock.node_id = Some(node_id);
    let mut block = [0u8; BLOCK_BYTES];
    superblock.encode(&mut block);
    assert!(disk.write(layout.superblock_byte(), &block));
    encode_initialised(&mut block);
    for number in 0..8 {
        assert!(disk.write(layout.al_byte() + number * BLOCK_BYTES as u64, &block));
    }
}

/// A loopback address that is this test's alone.
fn address(test: u8, ring: RingKind, own: u8) -> SocketAddr {
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    let last = test * 8 + if ring == RingKind::Uring { 4 } else { 0 } + own + 1;
    TcpListener::bind(SocketAddr::from(([127, high | 128, low, last], 0)))
        .unwrap()
        .local_addr()
        .unwrap()
}

fn connect(nodes: &[Node; 2], addresses: [SocketAddr; 2]) {
    for (n, node) in nodes.iter().enumerate() {
        let paths = vec![Path {
            local: addresses[n],
            peer: addresses[1 - n],
        }];
        let mut net = PeerNet::new(paths, &NetOptions::default());
        net.connect_int = Duration::from_millis(70);
        net.socket_check = Duration::from_millis(20);
        let peer = NodeId(1 - n as u8);
        node.shard.set_peer(node.id, peer, net);
        node.run(Command::Connect {
            peer,
            discard_my_data: false,
            tentative: false,
        });
    }
}

fn is_connected(snapshot: &Snapshot) -> bool {
    snapshot
        .connections
        .iter()
        .all(|connection| connection.state == ConnState::Connected)
}

fn is_in_sync(snapshot: &Snapshot) -> bool {
    let mut peers = snapshot
        .connections
        .iter()
        .flat_map(|connection| &connection.peer_devices);
    is_connected(snapshot)
        && snapshot
            .devices
            .iter()
            .all(|device| device.disk_state == DiskState::UpToDate)
        && peers.all(|peer| {
            peer.disk_state == DiskState::UpToDate && peer.repl_state == ReplState::Established
        })
}

struct Sink(std::sync::mpsc::Sender<PortEvent>);

impl PortSink for Sink {
    fn event(&mut self, event: PortEvent) {
        // The test may have ended before the port.
        let _ = self.0.send(event);
    }
}

struct Port {
    port: ShardPort<Resource>,
    events: Receiver<PortEvent>,
    next: u64,
}

impl Port {
    fn new(node: &Node) -> Port {
        let (sender, events) = channel();
        let port = node
            .shard
            .open_port(node.id, VOLUME, Box::new(Sink(sender)))
            .unwrap()
            .unwrap();
        Port {
            port,
            events,
            next: 1,
        }
    }

    fn submit(&mut self, kind: RequestKind, sector: u64, fill: u8, len: u32) {
        let mut buf = self.port.alloc(len as usize).unwrap();
        buf[..len as usize].fill(fill);
        let (id, sector) = (RequestId(self.next), Sector(sector));
        self.next += 1;
        let request = PortRequest {
            id,
            kind,
            sector,
            len,
            buf: Some(buf),
            buf_offset: 0,
        };
        self.port.submit(request).unwrap();
        self.port.kick();
    }

    fn done(&mut self) -> Result<Option<Vec<u8>>, RequestError> {
        loop {
            match self.events.recv_timeout(Time::from_secs(15)).unwrap() {
                PortEvent::Done(done) => {
                    return done.result.map(|()| done.buf.map(|buf| buf.to_vec()));
                }
                PortEvent::Changed(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

fn contents(node: &Node) -> Vec<u8> {
    let mut bytes = vec![0; DATA_BYTES as usize];
    assert!(node.data.read(0, &mut bytes));
    bytes
}

fn nodes_sync_and_replicate(ring: RingKind) {
    let env = ShardEnv {
        acceptor: Acceptor::new().unwrap(),
        handlers: Arc::new(NoHandlers),
    };
    let Some(a) = Node::new(ring, &env, "pair", 0) else {
        return;
    };
    let Some(b) = Node::new(ring, &env, "pair", 1) else {
        return;
    };
    let nodes = [a, b];
    // Something to resync: the first Primary's data goes to the other node.
    let old: Vec<u8> = (0..DATA_BYTES).map(|n| (n / 4096) as u8 ^ 0x5A).collect();
    assert!(nodes[0].data.write(0, &old));
    connect(&nodes, [0, 1].map(|own| address(0, ring, own)));
    nodes
        .iter()
        .for_each(|node| node.until("connected", is_connected));
    nodes[0].run(Command::Primary { force: true });
    nodes
        .iter()
        .for_each(|node| node.until("in sync", is_in_sync));
    assert!(contents(&nodes[1]) == old, "the resync copied everything");
    let mut port = Port::new(&nodes[0]);
    let mut expected = old;
    for round in 0..20u64 {
        for n in 0..16 {
            let (block, fill) = ((round * 977 + n * 131) % 4096, (round * 16 + n) as u8);
            port.submit(RequestKind::Write { fua: n == 3 }, block * 8, fill, 4096);
            expected[block as usize * 4096..][..4096].fill(fill);
        }
        (0..16).for_each(|_| drop(port.done().unwrap()));
    }
    port.submit(RequestKind::Read, 977 * 8, 0, 4096);
    assert_eq!(
        port.done().unwrap().unwrap(),
        expected[977 * 4096..978 * 4096]
    );
    // Protocol C: what was acknowledged is on both disks.
    nodes
        .iter()
        .for_each(|node| assert!(contents(node) == expected));
    // The peer goes, writes go on, the peer comes back and gets what it missed.
    nodes[1].run(Command::Disconnect {
        peer: NodeId(0),
        force: false,
    });
    let alone = |snapshot: &Snapshot| !is_connected(snapshot);
    nodes[0].until("alone", alone);
    for n in 0..32u64 {
        port.submit(RequestKind::Write { fua: false }, n * 64, n as u8, 4096);
        expected[n as usize * 32768..][..4096].fill(n as u8);
    }
    (0..32).for_each(|_| drop(port.done().unwrap()));
    let (peer, discard_my_data, tentative) = (NodeId(0), false, false);
    nodes[1].run(Command::Connect {
        peer,
        discard_my_data,
        tentative,
    });
    if nodes[0].snapshot().connections[0].state == ConnState::StandAlone {
        let peer = NodeId(1);
        nodes[0].run(Command::Connect {
            peer,
            discard_my_data,
            tentative,
        });
    }
    nodes
        .iter()
        .for_each(|node| node.until("in sync again", is_in_sync));
    nodes
        .iter()
        .for_each(|node| assert!(contents(node) == expected));
    drop(port);
    nodes[0].run(Command::Secondary { force: false });
    assert_eq!(nodes[0].snapshot().role, Role::Secondary);
    for node in &nodes {
        node.run(Command::Down);
        assert!(node.shard.remove_resource(node.id).unwrap());
    }
    for node in &nodes {
        node.shard.stop().unwrap();
        let pool = node.shard.pool();
        assert_eq!(pool.free_bytes(), pool.total_bytes(), "no buffer is lost");
    }
}

#[test]
fn two_nodes_sync_and_replicate_on_io_uring() {
    nodes_sync_and_replicate(RingKind::Uring);
}

#[test]
fn two_nodes_sync_and_replicate_on_epoll() {
    nodes_sync_and_replicate(RingKind::Epoll);
}
