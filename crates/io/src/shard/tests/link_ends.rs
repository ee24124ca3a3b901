//! How links end: closed by either side, given up, or broken by nonsense.

use super::*;

#[test]
fn a_closed_link_delivers_its_last_packet_and_can_be_made_again() {
    on_both_rings(|ring| {
        let Some([a, b]) = pair(ring, "close") else {
            return;
        };
        a.run(Command::Disconnect {
            peer: NodeId(1),
            force: false,
        })
        .unwrap();
        // The toy reports the peer's last packet in this way.
        assert_eq!(b.told.recv().unwrap(), Told::Sent(u64::MAX));
        let answers = [&a, &b].map(|node| node.shard.command(node.id, connect()));
        for answer in answers {
            answer.recv().unwrap().unwrap();
        }
        assert!(matches!(b.told.recv().unwrap(), Told::Up { .. }));
        // The other way: one side closes hard, the other learns it.
        a.run(Command::Disconnect {
            peer: NodeId(1),
            force: true,
        })
        .unwrap();
        let Told::Down(reason) = b.told.recv().unwrap() else {
            panic!()
        };
        assert!(matches!(
            reason,
            LinkDownReason::Closed | LinkDownReason::Broken
        ));
    });
}

#[test]
fn a_closed_link_ends_each_path_after_its_peer() {
    use std::io::Read;
    on_both_rings(|ring| {
        let Some(node) = Node::new(ring, &env()) else {
            return;
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut net = net(unique(), listener.local_addr().unwrap());
        net.load_balance_paths = true;
        net.ping_timeout = Duration::from_secs(60);
        node.shard.set_peer(node.id, NodeId(1), net);
        let answer = node.shard.command(node.id, connect());
        let mut streams = [listener.accept().unwrap().0, listener.accept().unwrap().0];
        answer.recv().unwrap().unwrap();
        assert!(matches!(node.told.recv().unwrap(), Told::Up { .. }));
        node.run(Command::Disconnect {
            peer: NodeId(1),
            force: false,
        })
        .unwrap();
        let chunk = |stream: &mut TcpStream| {
            let mut header = [0; 8];
            stream.read_exact(&mut header).unwrap();
            let len = u32::from_be_bytes(header[4..].try_into().unwrap());
            let mut bytes = vec![0; len as usize];
            stream.read_exact(&mut bytes).unwrap();
            bytes
        };
        // The first packet of each, and the last one of the link.
        let first = streams.each_mut().map(chunk);
        let data = usize::from(first[1][..6] == [0x83, 0x74, 0x02, 0x67, 0xff, 0xf2]);
        chunk(&mut streams[data]);
        // Whichever the peer ends first ends, and the other one does not.
        let mut end = [0];
        for (ends, stays) in [(1 - data, Some(data)), (data, None)] {
            streams[ends].shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(streams[ends].read(&mut end).unwrap(), 0);
            if let Some(stays) = stays {
                streams[stays].set_nonblocking(true).unwrap();
                let read = streams[stays].read(&mut end).unwrap_err();
                assert_eq!(read.kind(), std::io::ErrorKind::WouldBlock);
                streams[stays].set_nonblocking(false).unwrap();
            }
        }
    });
}

#[test]
fn a_peer_that_takes_no_bytes_is_given_up() {
    on_both_rings(|ring| {
        let env = env();
        let Some(node) = Node::new(ring, &env) else {
            return;
        };
        node.attach(&format!("ram:{DISK_BYTES}:stall-{ring:?}"));
        // A peer that connects both streams and never reads.
        let address = unique();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut net = net(address, listener.local_addr().unwrap());
        net.send_timeout = Duration::from_millis(20);
        net.ko_count = 2;
        net.send_buffer_bytes = 4096;
        node.shard.set_peer(node.id, NodeId(1), net);
        let answer = node.shard.command(node.id, connect());
        let streams = [listener.accept().unwrap().0, listener.accept().unwrap().0];
        answer.recv().unwrap().unwrap();
        assert!(matches!(
            node.told.recv().unwrap(),
            Told::Up {
                resolve_conflicts: false
            }
        ));
        // More than the socket buffers of both sides, in requests that cannot complete.
        let mut port = node.port();
        let reason = loop {
            if let Ok(Told::Down(reason)) = node.told.try_recv() {
                break reason;
            }
            let Some(buf) = port.port.alloc(1 << 20) else {
                // The pool is full of what waits to be sent.
                match node.told.recv().unwrap() {
                    Told::Down(reason) => break reason,
                    _ => continue,
                }
            };
            let kind = RequestKind::Write { fua: false };
            let (id, sector, len) = (RequestId(port.next), Sector(0), 1 << 20);
            port.next += 1;
            let request = PortRequest {
                id,
                kind,
                sector,
                len,
                buf: Some(buf),
                buf_offset: 0,
            };
            port.port.submit(request).unwrap();
            port.port.kick();
        };
        assert_eq!(reason, LinkDownReason::SendTimeout);
        drop(streams);
    });
}

#[test]
fn nonsense_from_a_peer_ends_the_link() {
    use std::io::Write;
    on_both_rings(|ring| {
        let env = env();
        let Some(node) = Node::new(ring, &env) else {
            return;
        };
        let address = unique();
        // Bound, but not listening: attempts to connect are refused, and nobody else gets it.
        let peer =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        peer.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
            .unwrap();
        let nobody = peer.local_addr().unwrap().as_socket().unwrap();
        node.shard
            .set_peer(node.id, NodeId(1), net(address, nobody));
        let answer = node.shard.command(node.id, connect());
        // The peer makes both connections itself, once somebody listens.
        let connect = || loop {
            if let Ok(stream) = std::net::TcpStream::connect(address) {
                break stream;
            }
        };
        let (mut data, mut control) = (connect(), connect());
        data.write_all(&[0x83, 0x74, 0x02, 0x67, 0xff, 0xf2, 0, 0])
            .unwrap();
        control
            .write_all(&[0x83, 0x74, 0x02, 0x67, 0xff, 0xf1])
            .unwrap();
        control.write_all(&[0, 0]).unwrap();
        answer.recv().unwrap().unwrap();
        assert_eq!(
            node.told.recv().unwrap(),
            Told::Up {
                resolve_conflicts: true
            }
        );
        data.write_all(&[0x55; 32]).unwrap();
        assert_eq!(
            node.told.recv().unwrap(),
            Told::Down(LinkDownReason::Protocol)
        );
    });
}
