//! Connections that use all their paths at once.

use lockstep_core::command::CommandError;

use super::*;

/// Two nodes with two paths between them.
struct Balanced {
    nodes: [Node; 2],
    addresses: [[SocketAddr; 2]; 2],
}

impl Balanced {
    fn new(ring: RingKind, name: &str) -> Option<Balanced> {
        let env = env();
        let nodes = [Node::new(ring, &env)?, Node::new(ring, &env)?];
        let addresses = [[unique(), unique()], [unique(), unique()]];
        for (n, node) in nodes.iter().enumerate() {
            node.attach(&format!("ram:{DISK_BYTES}:{name}-{ring:?}-{n}"));
        }
        Some(Balanced { nodes, addresses })
    }

    fn path(&self, n: usize, path: usize) -> Path {
        Path {
            local: self.addresses[n][path],
            peer: self.addresses[1 - n][path],
        }
    }

    fn tell(&self, n: usize, paths: &[usize]) {
        let mut net = net(self.addresses[n][0], self.addresses[1 - n][0]);
        net.paths = paths.iter().map(|p| self.path(n, *p)).collect();
        net.load_balance_paths = true;
        let node = &self.nodes[n];
        node.shard.set_peer(node.id, NodeId(1), net);
    }

    fn connect(&self) {
        let answers = self.begin_to_connect();
        self.wait_for_up(answers);
    }

    fn begin_to_connect(&self) -> [Receiver<Result<Answer, CommandError>>; 2] {
        let command = |node: &Node| node.shard.command(node.id, connect());
        self.nodes.each_ref().map(command)
    }

    fn wait_for_up(&self, answers: [Receiver<Result<Answer, CommandError>>; 2]) {
        for answer in answers {
            answer.recv().unwrap().unwrap();
        }
        for node in &self.nodes {
            assert!(matches!(node.told.recv().unwrap(), Told::Up { .. }));
        }
    }

    /// Waits until both nodes use exactly these paths.
    fn wait_for(&self, paths: &[usize]) {
        for (n, node) in self.nodes.iter().enumerate() {
            let mut wanted: Vec<Path> = paths.iter().map(|p| self.path(n, *p)).collect();
            wanted.sort_by_key(|path| path.local);
            loop {
                let view = node.shard.view(node.id).unwrap().unwrap();
                let mut used = view.paths.get(&NodeId(1)).cloned().unwrap_or_default();
                used.sort_by_key(|path| path.local);
                if used == wanted {
                    break;
                }
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn writes_reach_the_peer_over_paths_that_come_and_go() {
    on_both_rings(|ring| {
        let Some(pair) = Balanced::new(ring, "balanced") else {
            return;
        };
        let mut port = None;
        let mut expected = vec![0; DISK_BYTES as usize];
        let mut salt = 0;
        let mut write = |pair: &Balanced| {
            let port = port.get_or_insert_with(|| pair.nodes[0].port());
            for (sector, len) in [(0, 4096), (64, 1 << 20), (4000, 512), (2100, 300_032)] {
                salt += 1;
                let bytes = pattern(len, salt);
                port.write(sector, &bytes).unwrap();
                expected[sector as usize * 512..][..len].copy_from_slice(&bytes);
                assert!(matches!(pair.nodes[0].told.recv().unwrap(), Told::Sent(_)));
            }
            for n in 0..2 {
                let path = format!("ram:{DISK_BYTES}:balanced-{ring:?}-{n}");
                let mut found = vec![0; DISK_BYTES as usize];
                assert!(RamDisk::of_path(&path).unwrap().read(0, &mut found));
                assert!(found == expected, "node {n}");
            }
        };
        // The link stands with its first path, the other joins it.
        pair.tell(0, &[0, 1]);
        pair.tell(1, &[0, 1]);
        pair.connect();
        write(&pair);
        pair.wait_for(&[0, 1]);
        write(&pair);
        // Each path leaves and joins again, told to one node or to both.
        for left in [0, 1] {
            let stays = [1 - left];
            pair.tell(left, &stays);
            pair.wait_for(&stays);
            write(&pair);
            pair.tell(1 - left, &stays);
            write(&pair);
            pair.tell(0, &[0, 1]);
            pair.tell(1, &[0, 1]);
            pair.wait_for(&[0, 1]);
            write(&pair);
        }
        // Without any path in common the link ends.
        pair.tell(0, &[0]);
        pair.wait_for(&[0]);
        pair.tell(0, &[1]);
        for node in &pair.nodes {
            assert!(matches!(node.told.recv().unwrap(), Told::Down(_)));
        }
    });
}

#[test]
fn a_peer_that_does_not_balance_its_paths_is_not_taken() {
    on_both_rings(|ring| {
        let Some(pair) = Balanced::new(ring, "unlike") else {
            return;
        };
        pair.tell(0, &[0, 1]);
        let node = &pair.nodes[1];
        let plain = net(pair.addresses[1][0], pair.addresses[0][0]);
        node.shard.set_peer(node.id, NodeId(1), plain);
        let answers = pair.begin_to_connect();
        // Many attempts fail; then both are told the same.
        let stranger = std::net::TcpListener::bind(pair.addresses[1][1]).unwrap();
        for _ in 0..6 {
            drop(stranger.accept().unwrap());
        }
        drop(stranger);
        pair.tell(1, &[0, 1]);
        pair.wait_for_up(answers);
    });
}

/// What a peer does with its data connection.
#[derive(PartialEq, Eq)]
enum Then {
    Wait,
    Reset,
}

/// A peer that makes both connections of the only path itself, and then sends this on the data
/// stream: why the link ends.
fn end_after(ring: RingKind, bytes: &[u8], then: Then) -> Option<LinkDownReason> {
    use std::io::Write;
    let env = env();
    let node = Node::new(ring, &env)?;
    let address = unique();
    // Bound, but not listening: attempts to connect are refused, and nobody else gets it.
    let peer = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    peer.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
        .unwrap();
    let nobody = peer.local_addr().unwrap().as_socket().unwrap();
    let mut to = net(address, nobody);
    to.load_balance_paths = true;
    node.shard.set_peer(node.id, NodeId(1), to);
    let answer = node.shard.command(node.id, connect());
    let connect = |command: u8| loop {
        if let Ok(mut stream) = std::net::TcpStream::connect(address) {
            let first = [
                0, 0, 0, 0, 0, 0, 0, 8, 0x83, 0x74, 0x02, 0x67, 0xff, command, 0, 0,
            ];
            stream.write_all(&first[..11]).unwrap();
            stream.write_all(&first[11..]).unwrap();
            break stream;
        }
    };
    let (mut data, control) = (connect(0xf2), connect(0xf1));
    answer.recv().unwrap().unwrap();
    assert!(matches!(node.told.recv().unwrap(), Told::Up { .. }));
    data.write_all(bytes).unwrap();
    if then == Then::Reset {
        socket2::SockRef::from(&data)
            .set_linger(Some(std::time::Duration::ZERO))
            .unwrap();
        drop(data);
    }
    let Told::Down(reason) = node.told.recv().unwrap() else {
        panic!("nothing else happens")
    };
    drop(control);
    Some(reason)
}

#[test]
fn chunks_that_cannot_be_end_the_link() {
    on_both_rings(|ring| {
        let wrong: [(&[u8], LinkDownReason); 4] = [
            // Empty; too large; far ahead; the first one again, as of a new connection.
            (&[0, 0, 0, 1, 0, 0, 0, 0], LinkDownReason::Protocol),
            (&[0, 0, 0, 1, 1, 0, 0, 1], LinkDownReason::Protocol),
            (&[9, 0, 0, 1, 0, 0, 0, 1, 5], LinkDownReason::Protocol),
            (
                &[0, 0, 0, 1, 0, 0, 0, 1, 0x86, 0, 0, 0, 1, 0, 0, 0, 1, 0x20],
                LinkDownReason::Closed,
            ),
        ];
        for (bytes, reason) in wrong {
            let Some(found) = end_after(ring, bytes, Then::Wait) else {
                return;
            };
            assert_eq!(found, reason, "{bytes:?}");
        }
    });
}

#[test]
fn the_only_path_takes_the_link_with_it() {
    on_both_rings(|ring| {
        for bytes in [&[][..], &[0, 0, 0, 1, 0, 0, 0, 2, 0x86]] {
            let Some(found) = end_after(ring, bytes, Then::Reset) else {
                return;
            };
            let inside = if bytes.is_empty() {
                LinkDownReason::Closed
            } else {
                LinkDownReason::Broken
            };
            assert_eq!(found, inside, "{bytes:?}");
        }
    });
}

/// The first packet of a connection, as a chunk.
fn first(command: u8) -> [u8; 16] {
    [
        0, 0, 0, 0, 0, 0, 0, 8, 0x83, 0x74, 0x02, 0x67, 0xff, command, 0, 0,
    ]
}

/// Waits until the other end sends nothing more.
fn wait_for_end(stream: &mut std::net::TcpStream) {
    use std::io::Read;
    stream.read_to_end(&mut Vec::new()).unwrap();
}

/// Nothing has come, and no end either, for as long as it takes to be sure enough.
fn is_quiet(stream: &std::net::TcpStream) -> bool {
    std::thread::sleep(std::time::Duration::from_millis(20));
    stream.set_nonblocking(true).unwrap();
    let found = stream.peek(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    found.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

/// A link over two paths to a peer that is played here: the streams of each path, data and control.
fn played(node: &Node, ping_timeout: Duration) -> [[TcpStream; 2]; 2] {
    use std::io::{Read, Write};
    let own = [unique(), unique()];
    let peers = [unique(), unique()];
    let listeners = peers.map(|address| TcpListener::bind(address).unwrap());
    let mut to = net(own[0], peers[0]);
    to.paths = std::iter::zip(own, peers)
        .map(|(local, peer)| Path { local, peer })
        .collect();
    to.load_balance_paths = true;
    to.ping_timeout = ping_timeout;
    // Each node makes one connection of each path.
    to.connect_int = Duration::from_secs(2);
    node.shard.set_peer(node.id, NodeId(1), to);
    let mut up = Some(node.shard.command(node.id, connect()));
    let streams = [0, 1].map(|path| {
        let mut theirs = listeners[path].accept().unwrap().0;
        let mut bytes = [0; 16];
        theirs.read_exact(&mut bytes).unwrap();
        let is_data = bytes == first(0xf2);
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket
            .bind(&SocketAddr::new(peers[path].ip(), 0).into())
            .unwrap();
        socket.connect(&own[path].into()).unwrap();
        let mut ours = TcpStream::from(socket);
        let command = if is_data { 0xf1 } else { 0xf2 };
        ours.write_all(&first(command)).unwrap();
        if let Some(answer) = up.take() {
            answer.recv().unwrap().unwrap();
            assert!(matches!(node.told.recv().unwrap(), Told::Up { .. }));
        }
        if is_data {
            [theirs, ours]
        } else {
            [ours, theirs]
        }
    });
    let paths = || {
        let view = node.shard.view(node.id).unwrap().unwrap();
        view.paths.get(&NodeId(1)).map_or(0, Vec::len)
    };
    while paths() < 2 {
        std::thread::yield_now();
    }
    streams
}

#[test]
fn paths_end_together_when_the_peer_has_had_its_time() {
    on_both_rings(|ring| {
        let Some(node) = Node::new(ring, &env()) else {
            return;
        };
        let streams = played(&node, Duration::from_millis(200));
        let command = Command::Disconnect {
            peer: NodeId(1),
            force: false,
        };
        let answer = node.shard.command(node.id, command);
        for mut stream in streams.into_iter().flatten() {
            wait_for_end(&mut stream);
        }
        answer.recv().unwrap().unwrap();
    });
}

/// A kernel that ends a connection without a word ends one socket after the other, and is in a wrong state afterwards
/// if this node ends one of them first (wire.md, 9.1).
#[test]
fn a_peer_that_ends_its_paths_one_after_the_other_is_followed() {
    on_both_rings(|ring| {
        let Some(node) = Node::new(ring, &env()) else {
            return;
        };
        let streams = played(&node, Duration::from_secs(60));
        // Until the further path counts as one that stands at the peer too.
        std::thread::sleep(std::time::Duration::from_millis(40));
        let mut streams: VecDeque<_> = streams.into_iter().flatten().collect();
        while let Some(mut stream) = streams.pop_front() {
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            wait_for_end(&mut stream);
            assert!(streams.iter().all(is_quiet), "the others wait");
        }
        assert!(matches!(node.told.recv().unwrap(), Told::Down(_)));
    });
}
