//! What every pair of nodes does: sync, replicate, lose each other, crash, come back.

use super::*;

#[test]
fn a_fresh_pair_syncs_and_replicates() {
    let mut w = World::synced(1, 2);
    assert!(w.packets["resync request"] > 10);
    let ids: Vec<u64> = (0..50)
        .map(|n| w.write(0, n * 8, 4096, n as u8 + 1))
        .collect();
    w.run();
    for id in ids {
        assert!(w.done(0, id), "{:#?}", w.log);
    }
    w.pass(Duration::from_secs(1));
    w.check_same_data();
    w.check_idle();
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0));
    assert_eq!(w.read(0, 8, 4096), vec![2; 4096]);
    assert!(w.packets["peer ack"] > 0);
}

#[test]
fn writes_that_a_cut_off_peer_misses_are_resynced() {
    for seed in 1..6 {
        let mut w = World::synced(seed, 2);
        let mut ids = Vec::new();
        for n in 0..40 {
            ids.push(w.write(0, n * 800, 8192, n as u8 + 1));
            for _ in 0..w.random(6) {
                w.step();
            }
        }
        w.cut = true;
        w.cut_links();
        w.pass(Duration::from_secs(20));
        for n in 0..20 {
            ids.push(w.write(0, n * 777 + 3, 4096, 200 + n as u8));
        }
        w.pass(Duration::from_secs(5));
        for id in ids {
            assert!(w.done(0, id), "{:#?}", w.log);
        }
        assert!(w.bits(0, 1) > 0);
        w.cut = false;
        w.pass_until("resync", 60, World::in_sync);
        w.pass(Duration::from_secs(1));
        w.check_same_data();
        w.check_idle();
        assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0), "seed {seed}");
    }
}

#[test]
fn a_crashed_secondary_gets_what_it_lost_with_its_cache() {
    for seed in 1..5 {
        let mut w = World::synced(seed, 2);
        for n in 0..60 {
            w.write(0, n * 512, 4096, n as u8 + 1);
            for _ in 0..w.random(12) {
                w.step();
            }
        }
        w.crash(1);
        w.pass(Duration::from_secs(20));
        w.write(0, 5, 1024, 99);
        w.pass(Duration::from_secs(1));
        w.restart(1);
        w.pass_until("resync", 60, World::in_sync);
        w.pass(Duration::from_secs(1));
        w.check_same_data();
        w.check_idle();
    }
}

#[test]
fn all_protocols_replicate_discards_zeroes_and_odd_sizes() {
    for protocol in [Protocol::A, Protocol::B, Protocol::C] {
        let net = NetOptions {
            protocol,
            ..NetOptions::default()
        };
        let mut w = clean(
            3,
            2,
            Setup {
                net,
                ..Setup::default()
            },
        );
        let mut ids = Vec::new();
        for n in 0..30 {
            ids.push(w.write(0, n * 24, 4096 + 512 * n as u32, n as u8 + 1));
        }
        ids.push(w.request(0, RequestKind::Discard, 16, 8192, 0));
        ids.push(w.request(0, RequestKind::Zeroes { unmap: false }, 100, 12288, 0));
        ids.push(w.request(0, RequestKind::Write { fua: true }, 8000, 1 << 20, 7));
        w.pass(Duration::from_secs(2));
        assert!(
            ids.iter().all(|id| w.done(0, *id)),
            "{protocol:?} {:#?}",
            w.log
        );
        w.check_same_data();
        w.check_idle();
        assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0), "{protocol:?}");
    }
}

#[test]
fn a_completed_flush_is_durable_on_both_nodes() {
    for seed in 1..20 {
        let mut w = clean(seed, 2, Setup::default());
        let ids: Vec<u64> = (0..10)
            .map(|n| w.write(0, n * 8, 4096, 1 + n as u8))
            .collect();
        while !ids.iter().all(|id| w.done(0, *id)) {
            assert!(w.step());
        }
        let flush = w.request(0, RequestKind::Flush, 0, 0, 0);
        while !w.done(0, flush) {
            assert!(w.step(), "{:#?}", w.log);
        }
        for node in &w.nodes {
            for n in 0..10 {
                assert_eq!(node.data.stable[&n][0], 1 + n as u8, "seed {seed}");
            }
        }
    }
}

#[test]
fn a_full_activity_log_on_both_nodes_stops_nothing() {
    let setup = Setup {
        size: 1200 << 20,
        ..Setup::default()
    };
    for seed in 1..4 {
        let mut w = clean(seed, 2, setup.clone());
        let ids: Vec<u64> = (0..280)
            .map(|n| w.write(0, n * 8192 + 8184, 8192, (n % 255) as u8 + 1))
            .collect();
        w.pass(Duration::from_secs(2));
        let open = ids.iter().filter(|id| !w.done(0, **id)).count();
        assert_eq!(open, 0, "{:#?}", w.log);
        w.check_same_data();
        w.check_idle();
    }
}

#[test]
fn a_resync_ends_under_writes_to_the_blocks_it_copies() {
    let mut w = clean(5, 2, Setup::default());
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(20));
    for n in 0..500 {
        w.write(0, n * 64, 4096, n as u8 | 1);
        w.pass(Duration::from_millis(1));
    }
    w.cut = false;
    let mut ids = Vec::new();
    for round in 0..3000 {
        let sector = w.random(500) as u64 * 64;
        ids.push(w.write(0, sector, 4096, round as u8));
        w.pass(Duration::from_millis(10));
        if w.in_sync() {
            break;
        }
    }
    assert!(w.in_sync(), "{} bits left: {:#?}", w.bits(1, 0), w.log);
    w.pass(Duration::from_secs(2));
    assert!(ids.iter().all(|id| w.done(0, *id)));
    w.check_same_data();
    w.check_idle();
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0));
}

#[test]
fn a_diskless_primary_reads_and_writes_at_its_peers() {
    let setup = Setup {
        diskless: Some(0),
        ..Setup::default()
    };
    let mut w = clean(9, 3, setup);
    let ids: Vec<u64> = (0..20)
        .map(|n| w.write(0, n * 8, 4096, 1 + n as u8))
        .collect();
    w.pass(Duration::from_secs(1));
    assert!(ids.iter().all(|id| w.done(0, *id)), "{:#?}", w.log);
    assert_eq!(w.read(0, 8, 8192), [vec![2; 4096], vec![3; 4096]].concat());
    w.crash(1);
    w.pass(Duration::from_secs(20));
    assert_eq!(w.read(0, 16, 4096), vec![3; 4096]);
    let late = w.write(0, 16, 4096, 77);
    w.pass(Duration::from_secs(2));
    assert!(w.done(0, late), "{:#?}", w.log);
    w.restart(1);
    w.pass_until("resync", 60, World::in_sync);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.nodes[1].data.block(2), w.nodes[2].data.block(2));
    assert_eq!(w.nodes[1].data.block(2)[0], 77);
    w.check_idle();
}

#[test]
fn a_failing_disk_is_left_and_its_peer_serves() {
    let mut w = clean(4, 2, Setup::default());
    w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    w.nodes[0].fail_data_writes = true;
    let id = w.write(0, 8, 4096, 2);
    w.pass(Duration::from_secs(2));
    assert!(w.done(0, id), "{:#?}", w.log);
    assert_eq!(w.disk_state(0), DiskState::Diskless);
    assert_eq!(w.read(0, 0, 8192), [vec![1; 4096], vec![2; 4096]].concat());
}

#[test]
fn survivors_of_a_dead_primary_become_equal() {
    for seed in 1..8 {
        let mut w = clean(seed, 3, Setup::default());
        let mut acked = Vec::new();
        for n in 0..40 {
            acked.push((n, w.write(0, n * 40, 4096, 1 + n as u8)));
            for _ in 0..w.random(10) {
                w.step();
            }
        }
        let acked: Vec<u64> = acked
            .iter()
            .filter(|(_, id)| w.done(0, *id))
            .map(|(n, _)| *n)
            .collect();
        w.crash(0);
        w.pass(Duration::from_secs(15));
        w.command(1, Command::Primary { force: false });
        w.pass(Duration::from_secs(15));
        for n in acked {
            assert_eq!(
                w.read(1, n * 40, 4096),
                vec![1 + n as u8; 4096],
                "seed {seed}"
            );
        }
        w.restart(0);
        w.pass_until("all in sync", 120, World::in_sync);
        w.pass(Duration::from_secs(2));
        w.check_same_data();
        w.check_idle();
    }
}

#[test]
fn what_was_sent_on_a_closed_link_keeps_its_dialect() {
    let mut w = clean(31, 2, Setup::default());
    let before = w.nodes[0].resource.dialect(node_id(1));
    assert!(before.protocol >= 118);
    let peer = node_id(1);
    w.command(0, Command::Disconnect { peer, force: false });
    w.pass(Duration::from_secs(2));
    assert_eq!(w.nodes[0].resource.link(peer), None);
    let after = w.nodes[0].resource.dialect(peer);
    assert_eq!(before.protocol, after.protocol);
    assert_eq!(before.features, after.features);
}

/// The streams of a link are not in step: what the peer sends on one after it has agreed may be here
/// before its features on the other one.
#[test]
fn a_ping_before_the_versions_are_agreed_on_is_answered_afterwards() {
    let mut world = World::new(1, 2, Setup::default());
    world.connect();
    while world.links.is_empty() {
        if !world.step() {
            let due = |n: &Node| n.resource.next_timeout();
            world.now = world.nodes.iter().filter_map(due).min().unwrap();
            (0..2).for_each(|index| world.input(index, Input::Timeout));
        }
        world.connect();
    }
    let link = *world.links.keys().next().unwrap();
    let ping = Input::Packet {
        peer: node_id(1),
        link: LinkId(link),
        stream: Stream::Control,
        volume: VolumeNr::NONE,
        packet: Packet::Ping,
        payload: None,
    };
    world.input(0, ping);
    let answers = |world: &World| {
        let sent = world.wires.get(&(0, 1, link, false)).into_iter().flatten();
        sent.filter(|(_, packet, _)| matches!(packet, Packet::PingAck))
            .count()
    };
    assert_eq!(answers(&world), 0, "in a header that nobody expects");
    assert!(world.deliver((1, 0, link, true)), "the features");
    assert_eq!(answers(&world), 1);
}

#[test]
fn nodes_of_one_connection_have_unlike_roles_whatever_their_first_paths_say() {
    for load_balance_paths in [false, true] {
        let setup = Setup {
            net: NetOptions {
                load_balance_paths,
                ..Setup::default().net
            },
            ..Setup::default()
        };
        let mut w = World::new(1, 2, setup);
        w.pass(Duration::from_secs(3));
        let decides = |index: usize| {
            let resource = &w.nodes[index].resource;
            assert!(resource.connections[&node_id(1 - index)].is_lockstep());
            resource.resolves_conflicts(node_id(1 - index))
        };
        assert_ne!(decides(0), decides(1), "{load_balance_paths}");
    }
}

/// Whoever compares how much two followers have received connects them anew first.
#[test]
fn what_is_sent_and_received_counts_from_the_last_connect_command() {
    let peer = |index: usize| node_id(1 - index);
    let counts = |w: &World, index: usize| {
        let pd = &w.nodes[index].resource.devices[&VolumeNr(0)].peers[&peer(index)];
        (pd.io.received_sectors, pd.io.sent_sectors)
    };
    let mut w = clean(1, 2, Setup::default());
    w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    assert_eq!((counts(&w, 0), counts(&w, 1)), ((0, 8), (8, 0)));
    // A link that was lost goes on with what it had.
    w.cut_links_between(0, 1);
    w.pass(Duration::from_secs(5));
    w.write(0, 8, 4096, 2);
    w.pass(Duration::from_secs(1));
    assert_eq!((counts(&w, 0), counts(&w, 1)), ((0, 16), (16, 0)));
    let disconnect = Command::Disconnect {
        peer: peer(1),
        force: false,
    };
    w.command(1, disconnect);
    w.pass(Duration::from_secs(1));
    let connect = Command::Connect {
        peer: peer(1),
        discard_my_data: false,
        tentative: false,
    };
    w.command(1, connect);
    w.pass(Duration::from_secs(5));
    assert_eq!((counts(&w, 0), counts(&w, 1)), ((0, 16), (0, 0)));
}

/// A write that its sender had kept back for a peer that was lost is sent to another one behind newer writes. Its peer
/// ack comes before theirs, and theirs says nothing of it.
#[test]
fn a_write_that_was_sent_late_is_settled_by_its_own_peer_ack() {
    let mut w = clean(5, 3, Setup::default());
    let first = w.write(0, 0, 4096, 1);
    w.run();
    let second = w.write(0, 80, 4096, 2);
    w.run();
    assert!(w.done(0, first) && w.done(0, second), "{:#?}", w.log);
    let primary = NodeId(0);
    let follower = &mut w.nodes[1].resource;
    let io = &mut follower.connections.get_mut(&primary).unwrap().io;
    let dagtags: Vec<_> = io.writes.iter().map(|write| write.dagtag()).collect();
    let [older, newer] = dagtags[..] else {
        panic!("{dagtags:?} wait for their peer acks");
    };
    io.writes.swap(0, 1);
    io.has_late = true;
    let two = lockstep_format::units::NodeMask::of(primary).with(NodeId(1));
    follower.peer_ack(primary, older, two);
    follower.peer_ack(primary, newer, two.with(NodeId(2)));
    let device = &follower.devices[&VOLUME];
    let io = &device.attached().unwrap().io;
    let slot = io.slot(NodeId(2)).unwrap();
    let marks = |sector: u64| io.bitmap.count_touched(slot, Sector(sector), 4096);
    assert_eq!((marks(0), marks(80)), (1, 0));
    assert!(follower.connections[&primary].io.writes.is_empty());
}
