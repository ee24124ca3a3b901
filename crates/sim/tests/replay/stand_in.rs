//! The core in the place of a captured node, with a disk in memory and time from the capture.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use lockstep_core::command::{Answer, Command, CommandError, MetaIndex};
use lockstep_core::event::{
    ALL_ZERO, BufId, CommandId, DiskCache, DiskError, DiskInfo, DiskOp, Input, LinkDownReason,
    LinkId, MetaOp, Output, Payload, Request, RequestError, RequestId, RequestKind, Stream,
};
use lockstep_core::options::{DiskOptions, NetOptions, PeerDeviceOptions, ResourceOptions};
use lockstep_core::report::Event;
use lockstep_core::resource::{Resource, ResourceConfig};
use lockstep_core::time::Instant;
use lockstep_format::disk::layout::{Geometry, Layout, Placement};
use lockstep_format::disk::v09::SuperBlock;
use lockstep_format::disk::{BLOCK_BYTES, al};
use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::alg::DigestAlg;
use lockstep_format::wire::{Digest, Packet};

/// Bytes of the disks of the captured nodes.
pub(crate) const DISK_BYTES: u64 = 34_603_008;

/// What the core may have to deal with in a millisecond of the capture. A core that keeps itself busy, or a
/// timer that is always due, would go on for ever: the clock is the capture's, and stands still meanwhile.
const MOST_INPUTS: u32 = 200_000;
const BUSY_NS: u64 = 1_000_000;

/// A packet that the core sent.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) to: NodeId,
    pub(crate) stream: Stream,
    pub(crate) volume: VolumeNr,
    pub(crate) packet: Packet,
    pub(crate) payload: Vec<u8>,
    pub(crate) at_ns: u64,
    /// The comparison knows of it.
    pub(crate) counted: bool,
}

/// The core and its surroundings.
pub(crate) struct StandIn {
    pub(crate) core: Resource,
    me: NodeId,
    pub(crate) now: u64,
    buffers: HashMap<u64, Vec<u8>>,
    next: u64,
    pub(crate) data: Vec<u8>,
    inputs: VecDeque<Input>,
    /// What was sent and not looked at yet, in order.
    pub(crate) sent: Vec<Sent>,
    pub(crate) links: BTreeMap<NodeId, LinkId>,
    pub(crate) connecting: BTreeMap<NodeId, bool>,
    pub(crate) answers: BTreeMap<u64, Result<Answer, CommandError>>,
    pub(crate) completed: BTreeMap<u64, Result<(), RequestError>>,
    /// Peers that cannot be reached, and do not answer.
    pub(crate) cut_off: BTreeSet<NodeId>,
    /// Nodes without a disk: nobody keeps marks for them.
    pub(crate) diskless: BTreeSet<NodeId>,
    /// The disk fails every operation.
    pub(crate) broken: bool,
    /// Inputs since this moment.
    busy: (u64, u32),
    trace: bool,
}

impl StandIn {
    pub(crate) fn new(
        me: NodeId,
        now: u64,
        geometry: Geometry,
        options: ResourceOptions,
    ) -> StandIn {
        let config = ResourceConfig {
            name: "r0".into(),
            node_id: me,
            options,
        };
        let mut data = vec![0; DISK_BYTES as usize];
        create_md(&mut data, me, geometry);
        StandIn {
            core: Resource::new(config, 0x7265_706c_6179),
            me,
            now,
            buffers: HashMap::new(),
            next: 1,
            data,
            inputs: VecDeque::new(),
            sent: Vec::new(),
            links: BTreeMap::new(),
            connecting: BTreeMap::new(),
            answers: BTreeMap::new(),
            completed: BTreeMap::new(),
            cut_off: BTreeSet::new(),
            diskless: BTreeSet::new(),
            broken: false,
            busy: (now, 0),
            trace: std::env::var_os("REPLAY_TRACE").is_some(),
        }
    }

    /// The node loses its power and boots again, with what is on its disk.
    pub(crate) fn power_cut(&mut self, options: ResourceOptions) {
        let config = ResourceConfig {
            name: "r0".into(),
            node_id: self.me,
            options,
        };
        self.core = Resource::new(config, 0x626f_6f74);
        self.inputs.clear();
        self.sent.clear();
        self.links.clear();
        self.connecting.clear();
        self.broken = false;
    }

    /// What `drbdadm up` does.
    pub(crate) fn up(
        &mut self,
        peers: &[NodeId],
        net: &NetOptions,
        disk: &DiskOptions,
        peer_disk: &PeerDeviceOptions,
    ) {
        let volume = VolumeNr(0);
        self.command(Command::NewVolume {
            volume,
            minor: 0,
            diskless: self.diskless.contains(&self.me),
        });
        for peer in peers {
            let (peer, net) = (*peer, net.clone());
            self.command(Command::NewPeer { peer, net });
            let options = PeerDeviceOptions {
                bitmap: !self.diskless.contains(&peer),
                ..peer_disk.clone()
            };
            self.command(Command::PeerDeviceOptions {
                peer,
                volume,
                options,
            });
        }
        if !self.diskless.contains(&self.me) {
            self.attach(disk);
        }
        for peer in peers {
            self.connect(*peer, false);
        }
    }

    pub(crate) fn attach(&mut self, disk: &DiskOptions) {
        self.command(Command::Attach {
            volume: VolumeNr(0),
            data_path: "vda".into(),
            meta_path: None,
            index: MetaIndex::Internal,
            options: disk.clone(),
        });
    }

    pub(crate) fn connect(&mut self, peer: NodeId, discard_my_data: bool) {
        self.command(Command::Connect {
            peer,
            discard_my_data,
            tentative: false,
        });
    }

    pub(crate) fn command(&mut self, command: Command) -> u64 {
        let id = self.fresh();
        if self.trace {
            println!("{} command {command:?}", self.clock());
        }
        self.input(Input::Command {
            id: CommandId(id),
            command,
        });
        id
    }

    /// The workload's pattern on a block of the lower disk that nobody is told of.
    pub(crate) fn plant(&mut self, block: u64, seed: u64) {
        for sector in block * 8..block * 8 + 8 {
            let at = (sector * 512) as usize;
            let bytes = &mut self.data[at..at + 512];
            bytes.fill(0);
            bytes[..8].copy_from_slice(&sector.to_le_bytes());
            bytes[8..16].copy_from_slice(&seed.to_le_bytes());
            bytes[16..24].copy_from_slice(b"LOCKSSEC");
            for word in (8..64).step_by(8) {
                let value = sector ^ seed ^ word as u64;
                bytes[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
            }
        }
    }

    pub(crate) fn write(&mut self, sector: Sector, bytes: Vec<u8>, fua: bool) -> u64 {
        let len = bytes.len() as u32;
        let payload = self.buffer(bytes);
        self.request(RequestKind::Write { fua }, sector, len, Some(payload))
    }

    pub(crate) fn request(
        &mut self,
        kind: RequestKind,
        sector: Sector,
        len: u32,
        payload: Option<Payload>,
    ) -> u64 {
        let id = self.fresh();
        self.input(Input::Request(Request {
            id: RequestId(id),
            volume: VolumeNr(0),
            kind,
            sector,
            len,
            payload,
        }));
        id
    }

    pub(crate) fn link_up(&mut self, peer: NodeId, resolve_conflicts: bool) {
        self.cut_off.remove(&peer);
        let link = LinkId(self.fresh());
        self.links.insert(peer, link);
        self.connecting.insert(peer, false);
        self.input(Input::LinkUp {
            peer,
            link,
            resolve_conflicts,
        });
    }

    pub(crate) fn link_down(&mut self, peer: NodeId) {
        if let Some(link) = self.links.remove(&peer) {
            self.input(Input::LinkDown {
                peer,
                link,
                reason: LinkDownReason::Closed,
            });
        }
    }

    pub(crate) fn packet(
        &mut self,
        peer: NodeId,
        stream: Stream,
        volume: VolumeNr,
        packet: Packet,
        payload: Vec<u8>,
    ) {
        let Some(link) = self.links.get(&peer).copied() else {
            return;
        };
        if self.trace {
            println!("{} <- {peer} {stream:?} {packet:?}", self.clock());
        }
        // What the comparison made up has no digest; every digest of a kernel is right.
        if let Some(captured) = packet.integrity().filter(|d| !d.is_empty()) {
            let alg = self.core.peer_integrity(peer).expect("it was announced");
            assert_eq!(*captured, digest_by(alg, &payload), "{packet:?}");
        }
        let payload = (!payload.is_empty()).then(|| self.buffer(payload));
        self.input(Input::Packet {
            peer,
            link,
            stream,
            volume,
            packet,
            payload,
        });
    }

    /// Runs timers up to a moment.
    pub(crate) fn advance(&mut self, to: u64) {
        while let Some(at) = self.core.next_timeout().filter(|at| at.0 <= to) {
            self.now = self.now.max(at.0);
            self.input(Input::Timeout);
        }
        self.now = self.now.max(to);
    }

    /// The next thing that the core does by itself, if that is before `until`.
    pub(crate) fn step(&mut self, until: u64) -> bool {
        match self.core.next_timeout() {
            Some(at) if at.0 <= until => {
                self.now = self.now.max(at.0);
                self.input(Input::Timeout);
                true
            }
            _ => false,
        }
    }

    fn clock(&self) -> String {
        let ms = self.now / 1_000_000;
        format!("{:3}.{:03} n{}", ms / 1000 % 1000, ms % 1000, self.me)
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Memory for what is read.
    pub(crate) fn room(&mut self, len: u32) -> Payload {
        self.buffer(vec![0; len as usize])
    }

    fn buffer(&mut self, bytes: Vec<u8>) -> Payload {
        let buf = self.fresh();
        let len = bytes.len() as u32;
        self.buffers.insert(buf, bytes);
        Payload {
            buf: BufId(buf),
            offset: 0,
            len,
        }
    }

    fn bytes(&self, payload: Payload) -> &[u8] {
        let from = payload.offset as usize;
        let buffer = self.buffers.get(&payload.buf.0).expect("a live buffer");
        &buffer[from..from + payload.len as usize]
    }

    fn input(&mut self, input: Input) {
        self.inputs.push_back(input);
        while let Some(input) = self.inputs.pop_front() {
            self.count(&input);
            self.core.handle(Instant(self.now), input);
            while let Some(output) = self.core.poll_output() {
                self.output(output);
            }
        }
    }

    /// Ends a replay that does not come any further.
    fn count(&mut self, input: &Input) {
        let (since, inputs) = self.busy;
        self.busy = if self.now - since < BUSY_NS {
            (since, inputs + 1)
        } else {
            (self.now, 1)
        };
        if self.busy.1 > MOST_INPUTS {
            panic!(
                "the replay stands still at {}: {MOST_INPUTS} inputs within a millisecond, the last {input:?}",
                self.clock()
            );
        }
    }

    fn output(&mut self, output: Output) {
        match output {
            Output::OpenDisk { tag, .. }
            | Output::ProbeDisk { tag, .. }
            | Output::LookAtDisk { tag, .. } => {
                let result = Ok(DiskInfo {
                    data_bytes: DISK_BYTES,
                    meta_bytes: DISK_BYTES,
                    logical_block_bytes: 512,
                    physical_block_bytes: 512,
                    discard: true,
                    discard_zeroes: true,
                    discard_granularity_bytes: 512,
                    max_discard_bytes: 128 << 20,
                    write_through: false,
                    persistent_memory: false,
                    cache: DiskCache::MayBeLost,
                });
                self.inputs.push_back(Input::DiskOpened { tag, result });
            }
            Output::AbandonDisk { .. } => panic!("these disks answer"),
            Output::NoteCache { .. } => {}
            Output::CloseDisk { tag, .. } => self.inputs.push_back(Input::DiskClosed { tag }),
            Output::Disk { tag, .. } if self.broken => {
                let result = Err(DiskError::Io { errno: 5 });
                self.inputs.push_back(Input::DiskDone { tag, result });
            }
            Output::Meta { tag, .. } if self.broken => {
                let result = Err(DiskError::Io { errno: 5 });
                self.inputs.push_back(Input::MetaDone { tag, result });
            }
            Output::Disk { tag, op, .. } => {
                let result = Ok(self.disk(op));
                self.inputs.push_back(Input::DiskDone { tag, result });
            }
            Output::Meta { tag, op, .. } => {
                let bytes = match op {
                    MetaOp::Read { offset, len } => {
                        self.data[offset as usize..][..len as usize].to_vec()
                    }
                    MetaOp::Write { offset, bytes, .. } => {
                        self.data[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                        Vec::new()
                    }
                    MetaOp::Store { .. } => panic!("these disks are no persistent memory"),
                };
                let result = Ok(bytes);
                self.inputs.push_back(Input::MetaDone { tag, result });
            }
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
                let mut packet = packet;
                if let Some(tag) = want_sent {
                    self.inputs.push_back(Input::Sent { tag });
                }
                if self.links.get(&peer) != Some(&link) {
                    return;
                }
                if self.trace {
                    println!("{} -> {peer} {stream:?} {packet:?}", self.clock());
                }
                if packet == Packet::Ping && self.cut_off.contains(&peer) {
                    return;
                }
                if packet == Packet::Ping {
                    // Answered at once: the timing of pings is free.
                    self.inputs.push_back(Input::Packet {
                        peer,
                        link,
                        stream: Stream::Control,
                        volume,
                        packet: Packet::PingAck,
                        payload: None,
                    });
                    return;
                }
                let payload = payload.map(|p| self.bytes(p).to_vec()).unwrap_or_default();
                if let Some(alg) = integrity {
                    packet.set_integrity(digest_by(alg, &payload));
                }
                self.sent.push(Sent {
                    to: peer,
                    stream,
                    volume,
                    packet,
                    payload,
                    at_ns: self.now,
                    counted: false,
                });
            }
            Output::Connect { peer } => {
                self.connecting.insert(peer, true);
            }
            Output::StopConnecting { peer } => {
                self.connecting.insert(peer, false);
            }
            Output::CloseLink { peer, link, .. } => {
                if self.links.get(&peer) == Some(&link) {
                    self.links.remove(&peer);
                }
                if self.trace {
                    println!("{} closes the link to {peer}", self.clock());
                }
            }
            Output::Complete { id, result } => {
                self.completed.insert(id.0, result);
            }
            Output::Answer { id, result } => {
                if self.trace {
                    println!("{} answer {result:?}", self.clock());
                }
                self.answers.insert(id.0, result);
            }
            Output::Digest {
                tag,
                algorithm,
                payload,
            } => {
                let bytes = self.bytes(payload);
                let digest = if algorithm == ALL_ZERO {
                    vec![u8::from(bytes.iter().all(|byte| *byte == 0))]
                } else {
                    let alg = DigestAlg::from_name(&algorithm).expect("a known algorithm");
                    digest_by(alg, bytes).as_bytes().to_vec()
                };
                self.inputs.push_back(Input::DigestDone { tag, digest });
            }
            Output::Copy { from, to } => {
                let bytes = self.bytes(from).to_vec();
                let at = to.offset as usize;
                let buffer = self.buffers.get_mut(&to.buf.0).expect("a live buffer");
                buffer[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            Output::Handler { tag, .. } => {
                let exit_code = 0;
                self.inputs.push_back(Input::HandlerDone { tag, exit_code });
            }
            // Buffers live as long as the test.
            Output::Release { .. } => {}
            Output::Event(Event::Log { text, level, .. }) => {
                if self.trace {
                    println!("{} log {level:?} {text}", self.clock());
                }
            }
            Output::Event(_) => {}
        }
    }

    fn disk(&mut self, op: DiskOp) -> Option<Payload> {
        let at = |sector: Sector| (sector.0 * 512) as usize;
        match op {
            DiskOp::Read { sector, payload } => {
                let bytes = self.data[at(sector)..][..payload.len as usize].to_vec();
                let from = payload.offset as usize;
                let buffer = self.buffers.get_mut(&payload.buf.0).expect("a live buffer");
                buffer[from..from + bytes.len()].copy_from_slice(&bytes);
                None
            }
            DiskOp::ReadNew { sector, len } => {
                let bytes = self.data[at(sector)..][..len as usize].to_vec();
                Some(self.buffer(bytes))
            }
            DiskOp::Write {
                sector, payload, ..
            } => {
                let bytes = self.bytes(payload).to_vec();
                self.data[at(sector)..][..bytes.len()].copy_from_slice(&bytes);
                None
            }
            DiskOp::Flush => None,
            DiskOp::Discard { sector, len } | DiskOp::Zeroes { sector, len, .. } => {
                self.data[at(sector)..][..len as usize].fill(0);
                None
            }
        }
    }
}

/// The digests that the captures have.
fn digest_by(alg: DigestAlg, bytes: &[u8]) -> Digest {
    use sha1::Digest as _;
    let digest = match alg {
        DigestAlg::Crc32c => Digest::new(&crc32c::crc32c(bytes).to_le_bytes()),
        DigestAlg::Sha1 => Digest::new(&sha1::Sha1::digest(bytes)),
        other => panic!("no capture has {}", other.name()),
    };
    digest.expect("a digest fits")
}

/// What `drbdadm create-md` leaves on a fresh disk.
fn create_md(data: &mut [u8], me: NodeId, geometry: Geometry) {
    let layout =
        Layout::new(Placement::Internal, geometry, DISK_BYTES).expect("the disk is large enough");
    let mut superblock = SuperBlock::fresh(&layout);
    superblock.node_id = Some(me);
    let mut block = [0u8; BLOCK_BYTES];
    superblock.encode(&mut block);
    let at = layout.superblock_byte() as usize;
    data[at..at + BLOCK_BYTES].copy_from_slice(&block);
    al::encode_initialised(&mut block);
    for number in 0..layout.geometry().al.blocks() {
        let at = layout.al_byte() as usize + number as usize * BLOCK_BYTES;
        data[at..at + BLOCK_BYTES].copy_from_slice(&block);
    }
}
