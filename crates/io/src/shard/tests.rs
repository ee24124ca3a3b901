//! Shards with a toy core: two of them keep a copy of each write on the other's disk.

use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use lockstep_core::command::{Answer, Command, MetaIndex};
use lockstep_core::event::{
    BufId, CommandId, DiskOp, Input, LinkDownReason, LinkEnd, LinkId, MetaOp, Output, Payload,
    RequestError, RequestId, RequestKind, Stream, Tag,
};
use lockstep_core::options::{DiskOptions, NetOptions};
use lockstep_core::report::{DeviceReport, Event, Snapshot};
use lockstep_core::state::{DiskState, Role};
use lockstep_core::time::{Duration, Instant};
use lockstep_format::units::{NodeId, Sector, Uuid, VolumeNr};
use lockstep_format::wire::alg::DigestAlg;
use lockstep_format::wire::packet::{BlockAck, BlockId, Data};
use lockstep_format::wire::{DataFlags, Dialect, Digest, Features, Packet};

use super::{
    Engine, HandlerCall, HandlerDone, HandlerExecutor, ResourceId, Service, ServiceCx, ShardConfig,
    ShardEnv, ShardHandle, ShardPort,
};
use crate::disk::{FaultOn, FaultPlan, RamDisk};
use crate::port::{PortEvent, PortRequest, PortSink, SubmitError, VolumePort};
use crate::ring::{Done, Errno, RingKind};
use crate::tcp::test_address::unique;
use crate::tcp::{Acceptor, Path, PeerNet};

mod balanced;
mod link_ends;
mod paths;
mod services;
mod stalls;

const VOLUME: VolumeNr = VolumeNr(3);
const DISK_BYTES: u64 = 4 << 20;

/// What a toy tells its test.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Up {
        resolve_conflicts: bool,
    },
    Down(LinkDownReason),
    Sent(u64),
    Timeout,
    /// A volume is opened, or closed.
    Open(bool),
    Secondary,
    Handler(u8),
    Digest(Vec<u8>),
    Corrupt(Sector),
    Meta(Vec<u8>),
}

/// A core that replicates without any safety.
struct Toy {
    told: Sender<Told>,
    outputs: VecDeque<Output>,
    link: Option<LinkId>,
    tags: u64,
    /// Requests: what they wait for, and whether all went well.
    requests: BTreeMap<u64, (u32, bool, Option<BufId>)>,
    /// Disk operations: of a request, or of a peer's write.
    disk: BTreeMap<u64, For>,
    commands: BTreeMap<u64, CommandId>,
    connect: Option<CommandId>,
    timeout: Option<Instant>,
    size_sectors: u64,
    copies: bool,
    /// Digests of what is sent and of what is received.
    integrity: Option<DigestAlg>,
    peer_integrity: Option<DigestAlg>,
    now: Instant,
}

enum For {
    Request(u64),
    /// A read into a buffer of the core, on behalf of a request with this destination.
    Copied(u64, Payload),
    Peer(Data, BufId),
}

impl Toy {
    fn new(told: Sender<Told>) -> Toy {
        Toy {
            told,
            outputs: VecDeque::new(),
            link: None,
            tags: 0,
            requests: BTreeMap::new(),
            disk: BTreeMap::new(),
            commands: BTreeMap::new(),
            connect: None,
            timeout: None,
            size_sectors: 0,
            copies: false,
            integrity: None,
            peer_integrity: None,
            now: Instant(0),
        }
    }

    fn tag(&mut self) -> Tag {
        self.tags += 1;
        Tag(self.tags)
    }

    fn tell(&self, told: Told) {
        // The test may have ended already.
        let _ = self.told.send(told);
    }

    fn answer(&mut self, id: CommandId) {
        self.outputs.push_back(Output::Answer {
            id,
            result: Ok(Answer::Done),
        });
    }

    fn send(&mut self, stream: Stream, mut packet: Packet, payload: Option<Payload>, mark: bool) {
        if let (None, Some(alg)) = (self.integrity, self.peer_integrity) {
            // A digest that is wrong, on purpose.
            let zeroes = vec![0; usize::from(alg.digest_len())];
            packet.set_integrity(Digest::new(&zeroes).unwrap());
        }
        let Some(link) = self.link else { return };
        let want_sent = mark.then(|| self.tag());
        let (peer, volume) = (NodeId(1), VOLUME);
        let output = Output::Send {
            peer,
            link,
            stream,
            volume,
            packet,
            payload,
            integrity: self.integrity.filter(|_| payload.is_some()),
            want_sent,
        };
        self.outputs.push_back(output);
    }

    fn done(&mut self, request: u64, ok: bool) {
        let Some((left, good, _)) = self.requests.get_mut(&request) else {
            return;
        };
        *left -= 1;
        *good &= ok;
        if *left > 0 {
            return;
        }
        let (_, good, _) = self.requests.remove(&request).unwrap();
        let result = if good { Ok(()) } else { Err(RequestError::Io) };
        self.outputs.push_back(Output::Complete {
            id: RequestId(request),
            result,
        });
    }

    fn request(&mut self, request: lockstep_core::event::Request) {
        let sector = request.sector;
        if let (true, RequestKind::Read, Some(to)) = (self.copies, request.kind, request.payload) {
            let tag = self.tag();
            self.disk.insert(tag.0, For::Copied(request.id.0, to));
            let op = DiskOp::ReadNew {
                sector,
                len: request.len,
            };
            self.outputs.push_back(Output::Disk {
                tag,
                volume: VOLUME,
                op,
            });
            self.requests.insert(request.id.0, (1, true, None));
            return;
        }
        let op = match (request.kind, request.payload) {
            (RequestKind::Read, Some(payload)) => DiskOp::Read { sector, payload },
            (RequestKind::Write { fua }, Some(payload)) => DiskOp::Write {
                sector,
                payload,
                fua,
            },
            (RequestKind::Flush, _) => DiskOp::Flush,
            (RequestKind::Discard, _) => DiskOp::Discard {
                sector,
                len: request.len,
            },
            _ => DiskOp::Zeroes {
                sector,
                len: request.len,
                unmap: false,
            },
        };
        let tag = self.tag();
        self.disk.insert(tag.0, For::Request(request.id.0));
        self.outputs.push_back(Output::Disk {
            tag,
            volume: VOLUME,
            op,
        });
        let mut waits = 1;
        if let (RequestKind::Write { .. }, true) = (request.kind, self.link.is_some()) {
            waits = 2;
            let data = Data {
                sector,
                block_id: BlockId(request.id.0),
                seq_num: 0,
                flags: DataFlags::empty(),
                digest: Digest::EMPTY,
                payload_len: request.len,
            };
            self.send(Stream::Data, Packet::Data(data), request.payload, true);
        }
        let buf = request.payload.map(|payload| payload.buf);
        self.requests.insert(request.id.0, (waits, true, buf));
    }

    fn packet(&mut self, packet: Packet, payload: Option<Payload>) {
        match (packet, payload) {
            (Packet::Data(data), Some(payload)) => {
                let tag = self.tag();
                let op = DiskOp::Write {
                    sector: data.sector,
                    payload,
                    fua: false,
                };
                self.disk.insert(tag.0, For::Peer(data, payload.buf));
                self.outputs.push_back(Output::Disk {
                    tag,
                    volume: VOLUME,
                    op,
                });
            }
            (Packet::WriteAck(ack), None) => self.done(ack.block_id.0, true),
            (packet, _) => panic!("the toy does not know {packet:?}"),
        }
    }

    fn command(&mut self, id: CommandId, command: Command) {
        match command {
            Command::Attach {
                data_path,
                meta_path,
                ..
            } => {
                let tag = self.tag();
                self.commands.insert(tag.0, id);
                let volume = VOLUME;
                self.outputs.push_back(Output::OpenDisk {
                    tag,
                    volume,
                    data_path,
                    meta_path,
                });
            }
            Command::Detach { force, .. } => {
                if force {
                    let volume = VOLUME;
                    self.outputs.push_back(Output::AbandonDisk { volume });
                }
                let tag = self.tag();
                self.commands.insert(tag.0, id);
                self.outputs.push_back(Output::CloseDisk {
                    tag,
                    volume: VOLUME,
                });
            }
            Command::Connect { peer, .. } => {
                self.connect = Some(id);
                self.outputs.push_back(Output::Connect { peer });
            }
            Command::Disconnect { force, .. } => {
                let (peer, link) = (NodeId(1), self.link.take().unwrap());
                // With a last packet that must get through.
                if !force {
                    self.link = Some(link);
                    self.send(Stream::Data, Packet::Disconnect, None, false);
                    self.link = None;
                }
                self.outputs.push_back(Output::CloseLink {
                    peer,
                    link,
                    end: if force {
                        LinkEnd::AtOnce
                    } else {
                        LinkEnd::Agreed
                    },
                });
                self.answer(id);
            }
            Command::SuspendIo => {
                self.timeout = Some(self.now + Duration::from_millis(3));
                self.answer(id);
            }
            Command::ResumeIo => {
                let tag = self.tag();
                let (name, volume, peer) = ("split-brain", Some(VOLUME), Some(NodeId(1)));
                self.outputs.push_back(Output::Handler {
                    tag,
                    name,
                    volume,
                    peer,
                });
                self.answer(id);
            }
            Command::Outdate { .. } => {
                // A durable write of metadata, then a read of it.
                let (write, read) = (self.tag(), self.tag());
                let op = MetaOp::Write {
                    offset: 8192,
                    bytes: vec![7; 4096],
                    flush_data: true,
                };
                self.outputs.push_back(Output::Meta {
                    tag: write,
                    volume: VOLUME,
                    op,
                });
                self.commands.insert(write.0, id);
                self.commands.insert(read.0 | 1 << 63, id);
            }
            Command::NewCurrentUuid { .. } => {
                // From now on reads are answered from a buffer of the core, by a copy.
                self.copies = true;
                self.answer(id);
            }
            Command::NetOptions { net, .. } => {
                self.peer_integrity = net.integrity();
                let own = net.csums_alg.as_deref();
                self.integrity = own.and_then(DigestAlg::from_name);
                self.answer(id);
            }
            Command::Open { open, .. } => {
                self.tell(Told::Open(open));
                self.answer(id);
            }
            Command::Secondary { .. } => {
                self.tell(Told::Secondary);
                self.answer(id);
            }
            Command::NewPeer { .. } => panic!("a bug of the toy, on purpose"),
            Command::Primary { .. } => {
                self.outputs.push_back(Output::Event(Event::Resource));
                self.answer(id);
            }
            _ => self.answer(id),
        }
    }
}

impl Engine for Toy {
    fn handle(&mut self, now: Instant, input: Input) {
        assert!(now >= self.now);
        self.now = now;
        if self.timeout.is_some_and(|at| at <= now) {
            self.timeout = None;
            self.tell(Told::Timeout);
        }
        match input {
            Input::Timeout | Input::Progress { .. } => {}
            Input::Request(request) => self.request(request),
            Input::LinkUp {
                link,
                resolve_conflicts,
                ..
            } => {
                self.link = Some(link);
                self.tell(Told::Up { resolve_conflicts });
                if let Some(id) = self.connect.take() {
                    self.answer(id);
                }
            }
            Input::LinkDown { link, reason, .. } => {
                assert_eq!(self.link.take(), Some(link));
                self.tell(Told::Down(reason));
            }
            Input::Packet {
                packet: Packet::Disconnect,
                ..
            } => {
                let (peer, link) = (NodeId(1), self.link.take().unwrap());
                self.outputs.push_back(Output::CloseLink {
                    peer,
                    link,
                    end: LinkEnd::AtOnce,
                });
                self.tell(Told::Sent(u64::MAX));
            }
            Input::Packet {
                link,
                volume,
                packet,
                payload,
                ..
            } => {
                assert_eq!((self.link, volume), (Some(link), VOLUME));
                self.packet(packet, payload);
            }
            Input::Corrupt { packet, .. } => {
                let Packet::Data(data) = packet else {
                    panic!("{packet:?}")
                };
                self.tell(Told::Corrupt(data.sector));
            }
            Input::Sent { tag } => self.tell(Told::Sent(tag.0)),
            Input::DiskOpened { tag, result } => {
                let id = self.commands.remove(&tag.0).unwrap();
                match result {
                    Ok(info) => {
                        self.size_sectors = info.data_bytes / 512;
                        self.outputs.push_back(Output::Event(Event::Device(VOLUME)));
                        self.answer(id);
                    }
                    Err(text) => {
                        let code = lockstep_core::command::ErrorCode::ERR_OPEN_DISK;
                        let error = lockstep_core::command::CommandError { code, text };
                        self.outputs.push_back(Output::Answer {
                            id,
                            result: Err(error),
                        });
                    }
                }
            }
            Input::DiskClosed { tag } => {
                let id = self.commands.remove(&tag.0).unwrap();
                self.answer(id);
            }
            Input::DiskDone { tag, result } => match self.disk.remove(&tag.0).unwrap() {
                For::Request(id) => self.done(id, result.is_ok()),
                For::Copied(id, to) => {
                    let from = result.unwrap().unwrap();
                    let (tag, algorithm) = (self.tag(), "crc32c".to_owned());
                    let digest = Output::Digest {
                        tag,
                        algorithm,
                        payload: from,
                    };
                    let release = Output::Release { buf: from.buf };
                    self.outputs
                        .extend([digest, Output::Copy { from, to }, release]);
                    self.done(id, true);
                }
                For::Peer(data, buf) => {
                    let ack = BlockAck {
                        sector: data.sector,
                        block_id: data.block_id,
                        size_bytes: data.payload_len,
                        seq_num: 0,
                    };
                    self.send(Stream::Control, Packet::WriteAck(ack), None, false);
                    self.outputs.push_back(Output::Release { buf });
                }
            },
            Input::MetaDone { tag, result } => {
                let read = Tag(tag.0 + 1);
                if let Some(id) = self.commands.remove(&(read.0 | 1 << 63)) {
                    result.unwrap();
                    self.commands.insert(read.0, id);
                    let op = MetaOp::Read {
                        offset: 12280,
                        len: 16,
                    };
                    self.outputs.push_back(Output::Meta {
                        tag: read,
                        volume: VOLUME,
                        op,
                    });
                    return;
                }
                self.tell(Told::Meta(result.unwrap()));
                let id = self.commands.remove(&tag.0).unwrap();
                self.answer(id);
            }
            Input::DigestDone { digest, .. } => self.tell(Told::Digest(digest)),
            Input::HandlerDone { exit_code, .. } => self.tell(Told::Handler(exit_code)),
            Input::Command { id, command } => self.command(id, command),
        }
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.timeout
    }

    fn dialect(&self, _peer: NodeId) -> Dialect {
        Dialect {
            integrity_len: self.peer_integrity.map_or(0, DigestAlg::digest_len),
            ..Dialect::new(122, Features::empty())
        }
    }

    fn peer_integrity(&self, _peer: NodeId) -> Option<DigestAlg> {
        self.peer_integrity
    }

    fn snapshot(&self) -> Snapshot {
        let device = DeviceReport {
            volume: VOLUME,
            minor: 0,
            disk_state: DiskState::UpToDate,
            lost_disk: None,
            client: false,
            quorum: true,
            open: false,
            size_sectors: self.size_sectors,
            logical_block_bytes: 512,
            size_limit_sectors: None,
            read_sectors: 0,
            written_sectors: 0,
            al_writes: 0,
            bm_writes: 0,
            upper_pending: self.requests.len() as u64,
            lower_pending: 0,
            al_suspended: false,
            current_uuid: Uuid(0),
            history_uuids: Vec::new(),
            flags: 0,
        };
        Snapshot {
            step: 0,
            node_id: NodeId(0),
            role: Role::Primary,
            stands_by: false,
            suspended: Vec::new(),
            may_promote: false,
            promotion_score: 0,
            force_io_failures: false,
            devices: vec![device],
            connections: Vec::new(),
        }
    }

    fn tell_steps(&mut self, _told: bool) {}
}

/// Answers every handler with 5, or loses it.
struct Handlers(Mutex<Vec<HandlerCall>>);

impl HandlerExecutor for Handlers {
    fn run(&self, call: HandlerCall, done: HandlerDone) {
        let mut calls = self.0.lock().unwrap();
        if calls.is_empty() {
            done.finish(5);
        }
        calls.push(call);
    }
}

/// A shard with one toy.
struct Node {
    shard: ShardHandle<Toy>,
    id: ResourceId,
    told: Receiver<Told>,
}

fn env() -> ShardEnv {
    let handlers = Arc::new(Handlers(Mutex::new(Vec::new())));
    ShardEnv {
        acceptor: Acceptor::new().unwrap(),
        handlers,
    }
}

fn config(ring: RingKind) -> ShardConfig {
    ShardConfig {
        ring: Some(ring),
        pool_bytes: 8 << 20,
        reserve_bytes: 4 << 20,
        ..ShardConfig::default()
    }
}

impl Node {
    fn new(ring: RingKind, env: &ShardEnv) -> Option<Node> {
        let shard = match ShardHandle::start("test", config(ring), env.clone()) {
            Ok(shard) => shard,
            Err(error) => {
                eprintln!("skipped: {ring:?} ({error})");
                return None;
            }
        };
        let (sender, told) = channel();
        let id = shard.add_resource("toy", Toy::new(sender)).unwrap();
        Some(Node { shard, id, told })
    }

    fn run(&self, command: Command) -> Result<Answer, lockstep_core::command::CommandError> {
        self.shard.command(self.id, command).recv().unwrap()
    }

    fn attach(&self, path: &str) {
        self.run(attach(path)).unwrap();
    }

    fn port(&self) -> Port {
        let (sender, events) = channel();
        let sink = Box::new(Sink(sender));
        let port = self
            .shard
            .open_port(self.id, VOLUME, sink)
            .unwrap()
            .unwrap();
        let mut port = Port {
            port,
            events,
            next: 1,
        };
        assert!(matches!(port.event(), PortEvent::Changed(_)));
        port
    }
}

fn attach(path: &str) -> Command {
    Command::Attach {
        volume: VOLUME,
        data_path: path.to_owned(),
        meta_path: None,
        index: MetaIndex::Internal,
        options: DiskOptions::default(),
    }
}

fn connect() -> Command {
    Command::Connect {
        peer: NodeId(1),
        discard_my_data: false,
        tentative: false,
    }
}

struct Sink(Sender<PortEvent>);

impl PortSink for Sink {
    fn event(&mut self, event: PortEvent) {
        let _ = self.0.send(event);
    }
}

struct Port {
    port: ShardPort<Toy>,
    events: Receiver<PortEvent>,
    next: u64,
}

impl Port {
    fn event(&mut self) -> PortEvent {
        self.events.recv().unwrap()
    }

    fn submit(&mut self, kind: RequestKind, sector: u64, bytes: Option<&[u8]>, len: u32) -> u64 {
        let id = self.next;
        self.next += 1;
        let buf = match kind {
            RequestKind::Read | RequestKind::Write { .. } => {
                let mut buf = self.port.alloc(4096 + len as usize).unwrap();
                if let Some(bytes) = bytes {
                    buf[4096..4096 + bytes.len()].copy_from_slice(bytes);
                }
                Some(buf)
            }
            _ => None,
        };
        let (id, sector) = (RequestId(id), Sector(sector));
        let request = PortRequest {
            id,
            kind,
            sector,
            len,
            buf,
            buf_offset: 4096,
        };
        self.port.submit(request).unwrap();
        self.port.kick();
        id.0
    }

    fn finish(&mut self, id: u64) -> Result<Option<Vec<u8>>, RequestError> {
        match self.event() {
            PortEvent::Done(done) => {
                assert_eq!(done.id, RequestId(id));
                done.result
                    .map(|()| done.buf.map(|buf| buf[4096..].to_vec()))
            }
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, sector: u64, bytes: &[u8]) -> Result<Option<Vec<u8>>, RequestError> {
        let kind = RequestKind::Write { fua: false };
        let id = self.submit(kind, sector, Some(bytes), bytes.len() as u32);
        self.finish(id)
    }

    fn read(&mut self, sector: u64, len: u32) -> Vec<u8> {
        let id = self.submit(RequestKind::Read, sector, None, len);
        let mut bytes = self.finish(id).unwrap().unwrap();
        bytes.truncate(len as usize);
        bytes
    }
}

fn on_both_rings(claim: impl Fn(RingKind)) {
    claim(RingKind::Epoll);
    claim(RingKind::Uring);
}

/// Options with times that a test can wait for.
fn net(local: SocketAddr, peer: SocketAddr) -> PeerNet {
    let mut net = PeerNet::new(vec![Path { local, peer }], &NetOptions::default());
    net.connect_int = Duration::from_millis(70);
    net.socket_check = Duration::from_millis(20);
    net
}

/// Two connected nodes on RAM disks with this name.
fn pair(ring: RingKind, name: &str) -> Option<[Node; 2]> {
    let env = env();
    let nodes = [Node::new(ring, &env)?, Node::new(ring, &env)?];
    let addresses = [unique(), unique()];
    for (n, node) in nodes.iter().enumerate() {
        node.attach(&format!("ram:{DISK_BYTES}:{name}-{ring:?}-{n}"));
        node.shard
            .set_peer(node.id, NodeId(1), net(addresses[n], addresses[1 - n]));
    }
    let answers = nodes
        .each_ref()
        .map(|node| node.shard.command(node.id, connect()));
    for answer in answers {
        answer.recv().unwrap().unwrap();
    }
    let roles = nodes.each_ref().map(|node| node.told.recv().unwrap());
    let [
        Told::Up {
            resolve_conflicts: a,
        },
        Told::Up {
            resolve_conflicts: b,
        },
    ] = roles
    else {
        panic!("{roles:?}")
    };
    assert_ne!(a, b, "exactly one side accepted the control stream");
    Some(nodes)
}

fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|n| (n / 3) as u8 ^ salt).collect()
}

#[test]
fn a_write_reaches_both_disks() {
    on_both_rings(|ring| {
        let Some([a, b]) = pair(ring, "both") else {
            return;
        };
        let mut port = a.port();
        assert_eq!(port.port.properties().size_bytes, DISK_BYTES);
        let mut expected = vec![0; DISK_BYTES as usize];
        for (n, (sector, len)) in [(0, 4096), (64, 1 << 20), (4000, 512)]
            .into_iter()
            .enumerate()
        {
            let bytes = pattern(len, n as u8);
            port.write(sector, &bytes).unwrap();
            expected[sector as usize * 512..][..len].copy_from_slice(&bytes);
            assert!(matches!(a.told.recv().unwrap(), Told::Sent(_)));
        }
        for n in 0..2 {
            let path = format!("ram:{DISK_BYTES}:both-{ring:?}-{n}");
            let mut found = vec![0; DISK_BYTES as usize];
            assert!(RamDisk::of_path(&path).unwrap().read(0, &mut found));
            assert!(found == expected, "node {n}");
        }
        assert!(port.read(64, 1 << 20) == pattern(1 << 20, 1));
        assert_eq!(a.shard.queued_bytes(a.id, NodeId(1)), Ok(0));
        drop(port);
        for node in [a, b] {
            node.shard.stop().unwrap();
            let pool = node.shard.pool();
            assert_eq!(pool.free_bytes(), pool.total_bytes(), "no buffer is lost");
        }
    });
}

#[test]
fn a_payload_without_its_digest_does_not_reach_the_core() {
    on_both_rings(|ring| {
        for alg in DigestAlg::ALL {
            let name = alg.name();
            let Some([a, b]) = pair(ring, name) else {
                return;
            };
            let options = |own: Option<&str>| Command::NetOptions {
                peer: NodeId(1),
                net: NetOptions {
                    data_integrity_alg: Some(name.into()),
                    csums_alg: own.map(Into::into),
                    ..NetOptions::default()
                },
            };
            a.run(options(Some(name))).unwrap();
            b.run(options(Some(name))).unwrap();
            let mut port = a.port();
            let bytes = pattern(12_288, 7);
            port.write(8, &bytes).unwrap();
            assert!(matches!(a.told.recv().unwrap(), Told::Sent(_)));
            let path = format!("ram:{DISK_BYTES}:{name}-{ring:?}-1");
            let mut found = vec![0; 12_288];
            assert!(RamDisk::of_path(&path).unwrap().read(4096, &mut found));
            assert!(found == bytes);
            a.run(options(None)).unwrap();
            port.submit(RequestKind::Write { fua: false }, 16, Some(&bytes), 12_288);
            assert_eq!(b.told.recv().unwrap(), Told::Corrupt(Sector(16)));
            assert!(RamDisk::of_path(&path).unwrap().read(4096, &mut found));
            assert!(found == bytes, "nothing of the second write");
        }
    });
}

#[test]
fn many_writes_at_once_all_complete_once() {
    on_both_rings(|ring| {
        let Some([a, b]) = pair(ring, "many") else {
            return;
        };
        let mut port = a.port();
        let mut open = std::collections::BTreeSet::new();
        for n in 0..600u64 {
            let bytes = pattern(4096, n as u8);
            let kind = RequestKind::Write { fua: n % 7 == 0 };
            open.insert(port.submit(kind, n * 8, Some(&bytes), 4096));
            while open.len() >= 32 {
                let PortEvent::Done(done) = port.event() else {
                    panic!()
                };
                assert!(done.result.is_ok() && open.remove(&done.id.0));
            }
        }
        while !open.is_empty() {
            let PortEvent::Done(done) = port.event() else {
                panic!()
            };
            assert!(done.result.is_ok() && open.remove(&done.id.0));
        }
        let path = format!("ram:{DISK_BYTES}:many-{ring:?}-1");
        let disk = RamDisk::of_path(&path).unwrap();
        for n in 0..600 {
            let mut found = vec![0; 4096];
            assert!(disk.read(n * 4096, &mut found) && found == pattern(4096, n as u8));
        }
        a.shard.stop().unwrap();
        assert_eq!(b.told.recv().unwrap(), Told::Down(LinkDownReason::Closed));
        b.shard.stop().unwrap();
    });
}

#[test]
fn disk_errors_and_metadata_reach_the_core() {
    on_both_rings(|ring| {
        let env = env();
        let Some(node) = Node::new(ring, &env) else {
            return;
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(DISK_BYTES).unwrap();
        let path = file.path().to_str().unwrap();
        let plan = FaultPlan::of_path(path);
        let error = node.run(attach("/nowhere/disk")).unwrap_err();
        assert!(error.text.contains("/nowhere/disk"), "{error}");
        node.attach(path);
        let mut port = node.port();
        plan.fail(FaultOn::Write, 0, 1, Errno(libc::EIO));
        assert_eq!(port.write(0, &pattern(4096, 1)), Err(RequestError::Io));
        port.write(0, &pattern(4096, 2)).unwrap();
        assert!(port.read(0, 4096) == pattern(4096, 2));
        let id = port.submit(RequestKind::Flush, 0, None, 0);
        port.finish(id).unwrap();
        let id = port.submit(RequestKind::Zeroes { unmap: true }, 0, None, 4096);
        port.finish(id).unwrap();
        assert!(port.read(0, 4096) == vec![0; 4096]);
        node.run(Command::Outdate { volume: VOLUME }).unwrap();
        let expected = [[7; 8], [0; 8]].concat();
        assert_eq!(node.told.recv().unwrap(), Told::Meta(expected));
        node.run(Command::Detach {
            volume: VOLUME,
            force: false,
            diskless: false,
        })
        .unwrap();
        assert_eq!(port.write(0, &pattern(4096, 2)), Err(RequestError::Io));
        // The lock is gone with the disk.
        assert!(crate::disk::Disk::open(path, None).is_ok());
    });
}

#[test]
fn reads_into_new_buffers_wait_for_memory_and_are_copied() {
    on_both_rings(|ring| {
        let env = env();
        let Some(node) = Node::new(ring, &env) else {
            return;
        };
        node.attach(&format!("ram:{DISK_BYTES}:copies-{ring:?}"));
        let mut port = node.port();
        let bytes = pattern(1 << 20, 5);
        port.write(0, &bytes).unwrap();
        let volume = VOLUME;
        let force_resync = false;
        node.run(Command::NewCurrentUuid {
            volume,
            clear_bitmap: false,
            force_resync,
        })
        .unwrap();
        assert!(port.read(0, 1 << 20) == bytes);
        let digest = crate::digest::digest("crc32c", &bytes).unwrap();
        assert_eq!(node.told.recv().unwrap(), Told::Digest(digest));
        // Take all memory but the reserve: the read waits until some comes back.
        let pool = node.shard.pool().clone();
        let buf = port.port.alloc(8192).unwrap();
        let take = || pool.alloc(1, crate::pool::Claim::Ordinary);
        let mut taken: Vec<_> = std::iter::from_fn(take).collect();
        let (id, kind, sector) = (RequestId(9), RequestKind::Read, Sector(8));
        let buf = Some(buf);
        let request = PortRequest {
            id,
            kind,
            sector,
            len: 4096,
            buf,
            buf_offset: 4096,
        };
        port.port.submit(request).unwrap();
        port.port.kick();
        node.run(Command::SuspendIo).unwrap();
        assert!(port.events.try_recv().is_err());
        taken.clear();
        assert!(port.finish(9).unwrap().unwrap() == bytes[4096..8192]);
    });
}

#[test]
fn timers_and_handlers_come_back() {
    on_both_rings(|ring| {
        let env = env();
        let Some(node) = Node::new(ring, &env) else {
            return;
        };
        node.run(Command::SuspendIo).unwrap();
        assert_eq!(node.told.recv().unwrap(), Told::Timeout);
        node.run(Command::ResumeIo).unwrap();
        assert_eq!(node.told.recv().unwrap(), Told::Handler(5));
        node.run(Command::ResumeIo).unwrap();
        assert_eq!(node.told.recv().unwrap(), Told::Handler(HandlerDone::LOST));
    });
}

#[test]
fn a_removed_resource_ends_its_port_and_its_commands() {
    let env = env();
    let Some(node) = Node::new(RingKind::Epoll, &env) else {
        return;
    };
    node.attach(&format!("ram:{DISK_BYTES}:removed"));
    let mut port = node.port();
    port.port.open(RequestId(77), true);
    assert!(matches!(
        port.event(),
        PortEvent::Opened {
            id: RequestId(77),
            result: Ok(())
        }
    ));
    // A command that the toy answers only with a link.
    let never = node.shard.command(node.id, connect());
    assert_eq!(node.shard.remove_resource(node.id), Ok(true));
    assert_eq!(never.recv().unwrap().unwrap_err().code.0, 158);
    assert!(matches!(port.event(), PortEvent::Gone));
    let (id, kind, sector) = (RequestId(1), RequestKind::Flush, Sector(0));
    let request = PortRequest {
        id,
        kind,
        sector,
        len: 0,
        buf: None,
        buf_offset: 0,
    };
    assert!(matches!(
        port.port.submit(request),
        Err(SubmitError::Gone(_))
    ));
    assert_eq!(node.shard.remove_resource(node.id), Ok(false));
    assert_eq!(node.shard.snapshot(node.id), Ok(None));
    assert!(node.run(Command::SuspendIo).is_err());
    node.shard.stop().unwrap();
    assert!(node.shard.snapshot(node.id).is_err());
}

#[test]
fn watchers_see_events_and_ports_see_changes() {
    let env = env();
    let Some(node) = Node::new(RingKind::Epoll, &env) else {
        return;
    };
    let (sender, events) = channel();
    let id = node.id;
    node.shard.subscribe(Box::new(move |resource, event, _| {
        assert_eq!(resource, id);
        let _ = sender.send(event.clone());
    }));
    let mut port = node.port();
    node.attach(&format!("ram:{DISK_BYTES}:watched"));
    assert_eq!(events.recv().unwrap(), Event::Device(VOLUME));
    let PortEvent::Changed(properties) = port.event() else {
        panic!()
    };
    assert_eq!(
        (properties.size_bytes, properties.writable),
        (DISK_BYTES, true)
    );
    assert_eq!(port.port.properties(), properties);
    // An event that changes nothing is told to watchers only.
    node.run(Command::Primary { force: false }).unwrap();
    assert_eq!(events.recv().unwrap(), Event::Resource);
    let id = port.submit(RequestKind::Flush, 0, None, 0);
    port.finish(id).unwrap();
}

#[test]
fn a_port_that_goes_before_its_open_is_answered_has_closed_before_the_next_command() {
    let env = env();
    let Some(node) = Node::new(RingKind::Epoll, &env) else {
        return;
    };
    let mut port = node.port();
    let (came, comes) = channel();
    let (go, goes) = channel();
    node.shard.subscribe(Box::new(move |_, _, _| {
        came.send(()).unwrap();
        goes.recv().unwrap();
    }));
    // The shard finds all that follows at once.
    let primary = node
        .shard
        .command(node.id, Command::Primary { force: false });
    comes.recv().unwrap();
    port.port.open(RequestId(77), true);
    drop(port);
    let secondary = node
        .shard
        .command(node.id, Command::Secondary { force: false });
    go.send(()).unwrap();
    primary.recv().unwrap().unwrap();
    secondary.recv().unwrap().unwrap();
    let told: Vec<Told> = node.told.try_iter().collect();
    assert_eq!(told, [Told::Open(true), Told::Open(false), Told::Secondary]);
}

#[test]
fn a_request_without_its_memory_is_refused_before_the_core() {
    let env = env();
    let Some(node) = Node::new(RingKind::Epoll, &env) else {
        return;
    };
    let mut port = node.port();
    let (id, kind, sector) = (RequestId(1), RequestKind::Read, Sector(0));
    let buf = port.port.alloc(4096);
    let request = PortRequest {
        id,
        kind,
        sector,
        len: 4096,
        buf,
        buf_offset: 1,
    };
    port.port.submit(request).unwrap();
    port.port.kick();
    let PortEvent::Done(done) = port.event() else {
        panic!()
    };
    assert_eq!(done.result, Err(RequestError::Invalid));
    assert!(done.buf.is_some());
}
