//! A capture as a list of what happened on its replication connections, in order.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::alg::digest_len;
use lockstep_format::wire::packet::ConnectionFeatures;
use lockstep_format::wire::{
    Dialect, Packet, StateWord, Stream, decode, decode_header, decode_initial,
};

use crate::cluster;
use crate::inspect::pcap::{Capture, Content, content};
use crate::inspect::tcp::{Direction, TcpEvent, TcpTable};

/// Something that happened at a time, in nanoseconds since 1970.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) time_ns: u64,
    pub(crate) what: What,
}

/// What happened.
#[derive(Clone, Debug)]
pub(crate) enum What {
    /// Both streams of a connection stand. `acceptor` accepted the control stream.
    Up {
        nodes: [NodeId; 2],
        acceptor: NodeId,
    },
    /// A packet was on the wire.
    Packet(Box<Seen>),
    /// A stream of the connection was closed.
    Down { nodes: [NodeId; 2] },
    /// The operator did something on a node.
    Command { node: NodeId, text: String },
}

/// A packet with its payload.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) session: usize,
    pub(crate) from: NodeId,
    pub(crate) to: NodeId,
    pub(crate) stream: Stream,
    pub(crate) volume: VolumeNr,
    pub(crate) packet: Packet,
    pub(crate) payload: Vec<u8>,
}

#[derive(Default)]
struct Half {
    buf: Vec<u8>,
}

struct Flow {
    client: SocketAddr,
    server: SocketAddr,
    stream: Option<Stream>,
    other: bool,
    session: Option<usize>,
    halves: [Half; 2],
}

struct Session {
    nodes: [NodeId; 2],
    features: BTreeMap<NodeId, ConnectionFeatures>,
    integrity: BTreeMap<NodeId, u8>,
    acceptor: Option<NodeId>,
    closed: bool,
}

impl Session {
    fn dialect(&self, from: NodeId) -> Dialect {
        if self.features.len() < 2 {
            return Dialect::INITIAL;
        }
        let all = |f: fn(&ConnectionFeatures) -> u32| self.features.values().map(f).min();
        let protocol = all(|f| f.protocol_max).unwrap_or(0);
        let mut values = self.features.values();
        let features = match (values.next(), values.next()) {
            (Some(one), Some(other)) => one.features & other.features,
            _ => return Dialect::INITIAL,
        };
        Dialect {
            protocol,
            features,
            integrity_len: self.integrity.get(&from).copied().unwrap_or(0),
        }
    }
}

/// The nodes are numbered by the last byte of their addresses, from 1.
fn node(ip: IpAddr) -> NodeId {
    match ip {
        IpAddr::V4(ip) => NodeId(ip.octets()[3] - 1),
        IpAddr::V6(ip) => NodeId(ip.octets()[15] - 1),
    }
}

/// Reads a capture and its transcript.
pub(crate) fn read(path: &Path) -> Vec<Item> {
    let mut reader = Capture::open(path).expect("the capture can be opened");
    let mut table = TcpTable::default();
    let mut flows: Vec<Flow> = Vec::new();
    let mut sessions: Vec<Session> = Vec::new();
    let mut items = Vec::new();
    loop {
        let link = reader.link();
        let frame = match reader.next_frame() {
            Ok(Some(frame)) => frame,
            Ok(None) => break,
            Err(error) => panic!("{}: {error}", path.display()),
        };
        let time_ns = frame.time_ns;
        let Content::Tcp(segment) = content(link, frame.bytes) else {
            continue;
        };
        table.push(&segment, |event| {
            take(event, time_ns, &mut flows, &mut sessions, &mut items);
        });
    }
    let text = path.to_string_lossy().replace(".pcap.gz", ".txt");
    let text = std::fs::read_to_string(text).expect("the transcript is beside the capture");
    let day = items
        .first()
        .map_or(0, |i: &Item| i.time_ns / DAY_NS * DAY_NS);
    let captured = items.len();
    commands(&text, day, &mut items);
    if cluster::is_cluster(&items[..captured]) {
        let commands = items.split_off(captured);
        let placed = cluster::place(&items, commands);
        let losses = cluster::losses(&items, &text);
        items.extend(placed);
        items.extend(losses);
    } else {
        for at in captured..items.len() {
            items[at].time_ns = shown(&items[..captured], &items[at]);
        }
    }
    items.sort_by_key(|item| item.time_ns);
    items
}

const TOOL_MS: u64 = 100;
/// When the kernel was asked at the latest: its node's own proposal of the change shows it.
fn shown(captured: &[Item], item: &Item) -> u64 {
    let What::Command { node, text } = &item.what else {
        return item.time_ns;
    };
    let mut words = text.split_whitespace();
    // Of the role, or of the connection.
    let changes = match (words.next(), words.next()) {
        (Some("drbdadm"), Some("primary" | "secondary")) => StateWord::ROLE,
        (Some("drbdadm"), Some("disconnect" | "down")) => StateWord::CONN,
        _ => return item.time_ns,
    };
    let typed = item.time_ns - TOOL_MS * 1_000_000;
    let proposes = |seen: &Seen| match &seen.packet {
        Packet::TwopcPrepare(p) => {
            seen.from == *node
                && p.head.initiator_node_id == *node
                && p.change.mask.masked(changes) == changes
                // Connections are made by the same packet, with a role.
                && !(changes == StateWord::CONN && p.change.mask.has(StateWord::ROLE))
        }
        _ => false,
    };
    captured
        .iter()
        .filter(|other| (typed..item.time_ns).contains(&other.time_ns))
        .find(|other| matches!(&other.what, What::Packet(seen) if proposes(seen)))
        .map_or(item.time_ns, |other| other.time_ns - 1)
}

/// The same without `drbdadm` before it.
const SETUP_MS: u64 = 50;
const DAY_NS: u64 = 86_400 * 1_000_000_000;

fn take(
    event: TcpEvent<'_>,
    time_ns: u64,
    flows: &mut Vec<Flow>,
    sessions: &mut Vec<Session>,
    items: &mut Vec<Item>,
) {
    match event {
        TcpEvent::Opened { client, server, .. } => flows.push(Flow {
            client,
            server,
            stream: None,
            other: false,
            session: None,
            halves: Default::default(),
        }),
        TcpEvent::Bytes {
            id,
            direction,
            bytes,
        } => {
            let flow = &mut flows[id.0];
            if flow.other {
                return;
            }
            flow.halves[direction.index()].buf.extend_from_slice(bytes);
            if flow.stream.is_none() {
                let first = &mut flow.halves[0].buf;
                if first.len() < 8 {
                    return;
                }
                let Ok(Some(stream)) = decode_initial(&first[..8]) else {
                    flow.other = true;
                    return;
                };
                first.drain(..8);
                flow.stream = Some(stream);
            }
            open_session(flows, id.0, time_ns, sessions, items);
            for direction in [Direction::FromClient, Direction::FromServer] {
                while packet(flows, id.0, direction, time_ns, sessions, items) {}
            }
        }
        TcpEvent::Closed { id } => {
            let flow = &flows[id.0];
            if let Some(session) = flow.session
                && !std::mem::replace(&mut sessions[session].closed, true)
            {
                let nodes = sessions[session].nodes;
                items.push(Item {
                    time_ns,
                    what: What::Down { nodes },
                });
            }
        }
        TcpEvent::Lost { .. } | TcpEvent::Stray { .. } => {}
    }
}

/// A data connection begins a session when its features come; a control connection joins it.
fn open_session(
    flows: &mut [Flow],
    at: usize,
    time_ns: u64,
    sessions: &mut Vec<Session>,
    items: &mut Vec<Item>,
) {
    let flow = &flows[at];
    if flow.session.is_some() {
        return;
    }
    let mut nodes = [node(flow.client.ip()), node(flow.server.ip())];
    nodes.sort();
    if flow.stream == Some(Stream::Data) && flow.halves.iter().any(|h| !h.buf.is_empty()) {
        // The newest control connection between the two that has no session yet.
        let control = flows.iter().rposition(|f| {
            let mut ends = [node(f.client.ip()), node(f.server.ip())];
            ends.sort();
            f.stream == Some(Stream::Control) && f.session.is_none() && ends == nodes
        });
        let acceptor = control.map(|c| node(flows[c].server.ip()));
        let session = sessions.len();
        sessions.push(Session {
            nodes,
            features: BTreeMap::new(),
            integrity: BTreeMap::new(),
            acceptor,
            closed: false,
        });
        flows[at].session = Some(session);
        if let Some(control) = control {
            flows[control].session = Some(session);
        }
        items.push(Item {
            time_ns,
            what: What::Up {
                nodes,
                acceptor: sessions[session].acceptor.unwrap_or(nodes[0]),
            },
        });
    }
}

fn packet(
    flows: &mut [Flow],
    at: usize,
    direction: Direction,
    time_ns: u64,
    sessions: &mut [Session],
    items: &mut Vec<Item>,
) -> bool {
    let flow = &mut flows[at];
    let (Some(session), Some(stream)) = (flow.session, flow.stream) else {
        return false;
    };
    let (from, to) = match direction {
        Direction::FromClient => (flow.client, flow.server),
        Direction::FromServer => (flow.server, flow.client),
    };
    let (from, to) = (node(from.ip()), node(to.ip()));
    let mut dialect = sessions[session].dialect(from);
    let buf = &mut flow.halves[direction.index()].buf;
    if buf.is_empty() {
        return false;
    }
    if buf.len() >= 8 && buf[4..6] == [0xff, 0xfe] {
        dialect = Dialect::INITIAL;
    } else if dialect == Dialect::INITIAL && stream == Stream::Data {
        return false;
    }
    let Some(header) = decode_header(buf, stream, &dialect).expect("the capture has packets")
    else {
        return false;
    };
    let fixed = header.kind.len() + header.fixed_len(&dialect);
    let whole = fixed + header.payload_len(&dialect) as usize;
    if buf.len() < whole {
        return false;
    }
    let packet = decode(&header, &buf[header.kind.len()..fixed], &dialect).expect("a packet");
    let payload = buf[fixed..whole].to_vec();
    buf.drain(..whole);
    match &packet {
        Packet::ConnectionFeatures(features) => {
            sessions[session].features.insert(from, *features);
        }
        Packet::Protocol(p) | Packet::ProtocolUpdate(p) => {
            let len = digest_len(&p.integrity_alg).expect("a known algorithm");
            sessions[session].integrity.insert(from, len);
        }
        _ => {}
    }
    items.push(Item {
        time_ns,
        what: What::Packet(Box::new(Seen {
            session,
            from,
            to,
            stream,
            volume: header.volume,
            packet,
            payload,
        })),
    });
    true
}

/// Lines such as `19:41:43.079 node1 # drbdadm primary --force r0`.
fn commands(text: &str, day: u64, items: &mut Vec<Item>) {
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        let (Some(time), Some(who), Some("#"), Some(text)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        let Some(number) = who.strip_prefix("node").and_then(|n| n.parse::<u8>().ok()) else {
            continue;
        };
        let mut fields = time
            .split([':', '.'])
            .map(|f| f.parse::<u64>().unwrap_or(0));
        let mut next = || fields.next().unwrap_or(0);
        let ms = ((next() * 60 + next()) * 60 + next()) * 1000 + next();
        let tool_ms = match text.starts_with("drbdsetup verify") {
            true => SETUP_MS,
            false => TOOL_MS,
        };
        for text in text.split(';') {
            items.push(Item {
                // A tool needs a while on an emulated processor until the kernel is asked.
                time_ns: day + (ms + tool_ms) * 1_000_000,
                what: What::Command {
                    node: NodeId(number - 1),
                    text: text.trim().to_owned(),
                },
            });
        }
    }
}
