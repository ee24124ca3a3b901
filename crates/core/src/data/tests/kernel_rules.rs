//! What a node does beside a kernel of DRBD 9, seen with a live one. Here both nodes treat each other so.

use lockstep_format::wire::UuidFlags;
use lockstep_format::wire::packet::FlushRequestsAck;

use super::*;

fn kernels(seed: u64) -> World {
    some_kernels(seed, 2)
}

fn some_kernels(seed: u64, count: usize) -> World {
    let mut setup = Setup::default();
    setup.options.kernel_rules = true;
    clean(seed, count, setup)
}

/// The next thing that happens, whenever that is.
pub(super) fn step(w: &mut World) {
    if !w.step() {
        let due = |n: &Node| n.resource.next_timeout();
        w.now = w.nodes.iter().filter_map(due).min().unwrap();
        (0..w.nodes.len()).for_each(|index| w.input(index, Input::Timeout));
    }
}

/// A kernel takes no bitmap in StartingSyncT ("unexpected repl_state (SyncTarget) in receive_bitmap"), and asks
/// for blocks that nobody would send.
#[test]
fn a_full_sync_on_request_exchanges_no_bitmaps() {
    let mut w = kernels(1);
    w.write(0, 800, 4096, 7);
    w.pass(Duration::from_secs(1));
    w.invalidate();
    w.pass_until("the resync", 60, World::in_sync);
    assert_eq!(w.packets.get("bitmap"), None, "{:?}", w.packets);
    w.packets.clear();
    let remote = Command::InvalidateRemote {
        peer: node_id(1),
        volume: VOLUME,
        reset_bitmap: true,
    };
    w.command(0, remote);
    w.pass(Duration::from_secs(1));
    w.pass_until("the resync asked for by its source", 60, World::in_sync);
    assert_eq!(w.packets.get("bitmap"), None, "{:?}", w.packets);
    assert!(w.packets["resync request"] > 0, "{:?}", w.packets);
    w.pass(Duration::from_secs(1));
    w.check_idle();
    w.check_same_data();
}

/// A kernel may take the state that answers its attach before its disk is Negotiating, and does nothing then. A
/// bitmap that follows stops it for ever, if no other state comes before.
#[test]
fn an_attaching_kernel_hears_of_the_resync_before_the_bitmap() {
    let mut w = kernels(2);
    w.detach(1);
    w.pass(Duration::from_secs(1));
    w.write(0, 800, 4096, 7);
    w.pass(Duration::from_secs(1));
    w.sent.clear();
    w.attach(1);
    w.pass_until("the resync", 60, World::in_sync);
    let own: Vec<&str> = w.sent.iter().filter(|s| s.0 == 0).map(|s| s.2).collect();
    let bitmap = own
        .iter()
        .position(|name| *name == "bitmap")
        .expect("a bitmap");
    let states = own[..bitmap].iter().filter(|name| **name == "state");
    assert!(states.count() >= 2, "{own:?}");
}

/// A kernel forgets the UUIDs of its peers when its disk becomes Negotiating, which is after its two-phase commit. Those
/// that answer the commit may come too early; it waits for ever in the bitmap that follows then, and its attach with it.
#[test]
fn an_attaching_kernel_is_told_the_generation_when_it_negotiates() {
    for seed in 0..30 {
        let mut w = kernels(100 + seed);
        w.detach(1);
        w.pass(Duration::from_secs(1));
        w.write(0, 800, 4096, 7);
        w.pass(Duration::from_secs(1));
        w.sent.clear();
        w.attach(1);
        w.pass_until("the resync", 60, World::in_sync);
        let place = |w: &World, from: usize, name: &str, after: usize| {
            let found = w.sent[after..]
                .iter()
                .position(|s| s.0 == from && s.2 == name);
            after + found.unwrap_or_else(|| panic!("{name}: {:?}", w.sent))
        };
        let told = place(&w, 1, "uuids", 0);
        let bitmap = place(&w, 0, "bitmap", told);
        let uuids = place(&w, 0, "uuids", told);
        let answered = w.sent[told..bitmap]
            .iter()
            .filter(|s| s.0 == 0 && s.2 == "state");
        assert!(uuids < bitmap && answered.count() >= 2, "{:?}", w.sent);
    }
}

/// A kernel's Primary that still takes a node for Outdated, as it said when it connected, makes a generation without it
/// and does not send it what is written then. Followed all the same, that node would be a source without those blocks.
#[test]
fn a_generation_that_leaves_this_node_out_is_not_followed() {
    for seed in 0..10 {
        let mut w = some_kernels(200 + seed, 3);
        w.write(0, 800, 4096, 7);
        w.pass(Duration::from_secs(1));
        let device = w.nodes[0].resource.devices.get_mut(&VOLUME).unwrap();
        device.new_uuid_pending = true;
        let device = w.nodes[0].resource.state.devices.get_mut(&VOLUME).unwrap();
        device.peers.get_mut(&node_id(1)).unwrap().disk = DiskState::Outdated;
        w.write(0, 800, 4096, 8);
        w.pass(Duration::from_millis(50));
        w.pass_until("the resync", 60, World::in_sync);
        w.pass(Duration::from_secs(3));
        w.check_idle();
        w.check_same_data();
        assert_eq!(w.nodes[1].data.block(100), &[8; 4096]);
        let [primary, follower] = [0, 1].map(|index| w.generation(index).expect("a disk"));
        assert!(primary.same_generation(follower));
    }
}

/// A third node is told nothing of a resync that it has no part in; asked for blocks, it would serve them all the same.
#[test]
fn a_full_sync_on_request_asks_its_source_only() {
    for (seed, source) in [(3, 0), (4, 2)] {
        let mut w = some_kernels(seed, 3);
        w.write(0, 800, 4096, 7);
        w.pass(Duration::from_secs(1));
        w.sent.clear();
        w.invalidate_from(1, source);
        w.pass_until("the resync", 60, World::in_sync);
        let asked = |peer: usize| {
            let asks = |s: &&(usize, usize, &str)| **s == (1, peer, "resync request");
            w.sent.iter().filter(asks).count()
        };
        assert!(asked(source) > 0);
        assert_eq!(asked(2 - source), 0, "{:#?}", w.log);
        w.pass(Duration::from_secs(1));
        w.check_idle();
        w.check_same_data();
    }
}

/// Node 1 is invalidated, and loses the source of its full sync.
fn loses_its_source(seed: u64, source: usize, protocol_max: u32) -> World {
    let mut setup = Setup::default();
    setup.options.kernel_rules = true;
    setup.options.protocol_max = protocol_max;
    setup.peer.c_plan_ahead_tenths = 0;
    setup.peer.resync_rate_kib_s = 250;
    let mut w = clean(seed, 3, setup);
    w.write(0, 800, 4096, 7);
    w.pass(Duration::from_secs(1));
    w.invalidate_from(1, source);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.repl(1, source), ReplState::SyncTarget);
    w.sent.clear();
    let (peer, force) = (node_id(source), false);
    w.command(1, Command::Disconnect { peer, force });
    w
}

fn meets_it_again(w: &mut World, source: usize) {
    w.command(
        1,
        Command::Connect {
            peer: node_id(source),
            discard_my_data: false,
            tentative: false,
        },
    );
    w.pass_until("the resync", 400, World::in_sync);
    w.pass(Duration::from_secs(1));
    w.check_idle();
    w.check_same_data();
}

/// A kernel that loses the source of its full sync goes on with a node that was not asked for one, and asks it for ever
/// if it does not answer. (So does a node of this project, where a resync by bitmap cannot be asked for.)
#[test]
fn an_invalidated_kernel_that_has_lost_its_source_is_copied_from_another_node() {
    for (seed, source) in [(13, 0), (14, 2)] {
        let mut w = loses_its_source(seed, source, 119);
        let other = 2 - source;
        let copied = |w: &World| w.sent.contains(&(other, 1, "rs data reply"));
        w.pass_until("blocks of the other node", 10, copied);
        assert_eq!(w.repl(other, 1), ReplState::Established);
        meets_it_again(&mut w, source);
    }
}

/// Only a kernel that knows that it is a source says who is in sync with whom. Without that word all blocks stay
/// marked towards the source that was lost, at both ends.
#[test]
fn another_kernel_is_asked_when_the_source_of_a_full_sync_is_lost() {
    for (seed, source) in [(15, 0), (16, 2)] {
        let mut w = loses_its_source(seed, source, 124);
        let other = 2 - source;
        let source_now = |w: &World| w.repl(other, 1) == ReplState::SyncSource;
        w.pass_until("a source that knows its part", 10, source_now);
        assert!(w.sent.contains(&(1, other, "bitmap")), "{:?}", w.sent);
        // What was copied from the lost source is not copied once more.
        let marks = w.bits(other, 1);
        let all = w.nodes[1].resource.devices[&VOLUME].size_sectors / 8;
        assert!(marks > 0 && marks < all, "{marks} of {all}");
        meets_it_again(&mut w, source);
    }
}

/// A Primary passes the question on to all its peers, and these answer by any stream that they have, even before
/// their features.
#[test]
fn an_answer_to_a_flush_may_come_before_the_nodes_are_connected() {
    for (secret, packets) in [(None, 3), (Some("x"), 5)] {
        for behind in 0..packets {
            let mut setup = Setup::default();
            setup.options.kernel_rules = true;
            setup.net.cram_hmac_alg = secret.map(|_| "sha256".into());
            setup.net.shared_secret = secret.map(Into::into);
            let mut w = clean(5, 2, setup);
            w.cut_links_between(0, 1);
            let link = loop {
                if let Some(link) = w.links.keys().next() {
                    break *link;
                }
                step(&mut w);
            };
            // The features, what proves who it is, the protocol.
            for _ in 0..behind {
                while !w.deliver((0, 1, link, true)) {
                    step(&mut w);
                }
            }
            assert_eq!(
                w.nodes[1].resource.state.conn(node_id(0)),
                ConnState::Connecting
            );
            w.log.clear();
            let packet = Input::Packet {
                peer: node_id(0),
                link: LinkId(link),
                stream: Stream::Data,
                volume: VolumeNr::NONE,
                packet: Packet::FlushRequestsAck(FlushRequestsAck {
                    flush_sequence: 1,
                    primary_node_id: node_id(0),
                }),
                payload: None,
            };
            w.input(1, packet);
            w.pass_until("in sync", 20, World::in_sync);
            assert_eq!(w.links.keys().next(), Some(&link), "{behind}: {:#?}", w.log);
        }
    }
}

/// A kernel that meets a Primary without a disk during a resync asks for another resync, and waits for its bitmap
/// when the first one has ended, though nothing is left to copy.
#[test]
fn another_resync_that_was_asked_for_during_one_follows_it() {
    let mut setup = Setup::default();
    setup.options.kernel_rules = true;
    setup.peer.c_plan_ahead_tenths = 0;
    setup.peer.resync_rate_kib_s = 250;
    let mut w = clean(7, 2, setup);
    w.cut = true;
    w.cut_links_between(0, 1);
    w.run();
    for n in 0..100 {
        w.write(0, n * 16, 4096, n as u8);
    }
    w.pass(Duration::from_secs(1));
    w.cut = false;
    w.pass_until("the resync", 20, |w| {
        w.repl(1, 0) == ReplState::SyncTarget && w.repl(0, 1) == ReplState::SyncSource
    });
    let flags = UuidFlags::RESYNC | UuidFlags::DISKLESS_PRIMARY;
    let target = &mut w.nodes[1].resource;
    target.send_uuids(node_id(0), VOLUME, flags);
    let state = target.state.clone();
    target.send_state(node_id(0), VOLUME, &state);
    w.input(1, Input::Timeout);
    w.pass_until("the source waits for the next one", 20, |w| {
        w.repl(0, 1) == ReplState::WfBitmapS
    });
}

/// A target meets a client that is Primary while it is copied from a node that follows that Primary: what it has got
/// then does not count, and the source has to be asked again.
#[test]
fn a_client_primary_that_is_met_during_a_resync_makes_its_end_count() {
    let mut setup = Setup {
        diskless: Some(0),
        client: true,
        ..Setup::default()
    };
    setup.options.kernel_rules = true;
    setup.peer.c_plan_ahead_tenths = 0;
    setup.peer.resync_rate_kib_s = 250;
    let mut w = clean(8, 3, setup);
    w.apart = vec![(0, 2), (1, 2)];
    w.cut_links_between(0, 2);
    w.cut_links_between(1, 2);
    w.run();
    for n in 0..200 {
        w.write(0, n * 16, 4096, n as u8);
    }
    w.pass(Duration::from_secs(2));
    w.apart = vec![(0, 2)];
    w.pass_until("a resync", 20, |w| w.repl(2, 1) == ReplState::SyncTarget);
    w.apart.clear();
    w.pass_until("in sync", 60, World::in_sync);
    w.pass(Duration::from_secs(2));
    assert!(w.nodes[1].data.now == w.nodes[2].data.now);
}

/// A kernel that gets a write without its disk refuses it (`P_NEG_ACK`) and knows nothing of it afterwards: a peer ack
/// of it makes it drop the connection.
#[test]
fn a_write_that_a_kernel_has_refused_gets_no_peer_ack() {
    for (seed, kernels) in [(9, true), (10, false)] {
        let mut setup = Setup::default();
        setup.options.kernel_rules = kernels;
        let mut w = clean(seed, 2, setup);
        w.nodes[1].fail_data_writes = true;
        w.packets.clear();
        w.write(0, 800, 4096, 7);
        w.pass(Duration::from_secs(1));
        let acks = w.packets.get("peer ack").copied().unwrap_or(0);
        assert_eq!(acks, u64::from(!kernels), "{:?}", w.packets);
        assert_eq!(w.bits(0, 1), 1, "{:#?}", w.log);
    }
}

/// A kernel that is to be copied from one node, and is told anything before its handler has ended and it is target, takes a
/// third node instead, which knows of no resync: nobody says then that the two others are equal.
#[test]
fn the_source_of_a_full_sync_is_silent_until_its_target_is_one() {
    let target = "before-resync-target";
    for (seed, told) in [(11, true), (12, false)] {
        let mut setup = Setup::default();
        setup.options.kernel_rules = true;
        setup.options.handlers = vec![target.into()];
        let mut w = clean(seed, 3, setup);
        w.sent.clear();
        w.handlers.clear();
        w.invalidate_from(1, 2);
        w.pass(Duration::from_secs(3));
        let says = |s: &&(usize, usize, &str)| **s == (2, 1, "state");
        assert_eq!(w.sent.iter().find(says), None);
        assert_eq!(w.repl(2, 1), ReplState::StartingSyncS);
        if !told {
            // A handler that takes long, or a kernel that waits in turn.
            w.pass(Duration::from_secs(8));
            assert_eq!(w.repl(2, 1), ReplState::SyncSource);
        }
        let (index, name, tag) = w.handlers.remove(0);
        assert_eq!((index, name), (1, target));
        w.input(1, Input::HandlerDone { tag, exit_code: 0 });
        w.pass(Duration::from_millis(50));
        assert!(w.sent.contains(&(2, 1, "state")));
        w.pass_until("the resync", 60, World::in_sync);
        w.pass(Duration::from_secs(1));
        w.check_idle();
        w.check_same_data();
    }
}

/// A kernel that was source of a paused resync shows the pause until it is told its end twice.
#[test]
fn the_end_of_a_paused_resync_is_told_twice() {
    let mut setup = Setup::default();
    setup.options.kernel_rules = true;
    setup.peer.c_plan_ahead_tenths = 0;
    setup.peer.resync_rate_kib_s = 250;
    let mut w = clean(13, 3, setup);
    w.crash(1);
    for n in 0..100 {
        w.write(0, n * 16, 4096, n as u8);
    }
    w.pass(Duration::from_secs(1));
    w.restart(1);
    let paused = |w: &World| {
        [0, 2]
            .into_iter()
            .find(|n| w.repl(1, *n) == ReplState::PausedSyncT)
    };
    w.pass_until("two sources", 60, |w| paused(w).is_some());
    let source = paused(&w).expect("one of the two");
    let mut states = Vec::new();
    while w.repl(1, source) == ReplState::PausedSyncT {
        w.sent.clear();
        step(&mut w);
        states = w.sent.clone();
    }
    let says = |s: &&(usize, usize, &str)| **s == (1, source, "state");
    assert_eq!(states.iter().filter(says).count(), 2, "{states:?}");
    w.pass_until("in sync", 60, World::in_sync);
}

/// Nobody is Primary any more after a crash: kernels clear the mark of one when they attach, and compare with it.
#[test]
fn an_attach_after_a_crash_clears_the_mark_of_a_primary() {
    let mut w = kernels(14);
    let is_marked = |w: &World| w.generation(0).expect("a disk").0 & Uuid::PRIMARY_BIT != 0;
    assert!(is_marked(&w));
    w.cut = true;
    w.crash(0);
    w.restart(0);
    w.pass(Duration::from_secs(1));
    assert!(!is_marked(&w));
    w.cut = false;
    w.pass_until("in sync", 60, World::in_sync);
}
