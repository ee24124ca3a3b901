//! Nodes without a disk that get one, and peers that keep no bitmap for them.

use super::*;
use crate::command::ErrorCode;
use crate::options::Quorum;
use crate::state::Role;

/// Three nodes, of which the last one is a client.
fn with_client(seed: u64) -> World {
    let setup = Setup {
        diskless: Some(2),
        client: true,
        ..Setup::default()
    };
    clean(seed, 3, setup)
}

/// Nodes 1 and 2 have disks, node 0 is a client and Primary.
fn with_diskless_primary() -> World {
    let setup = Setup {
        diskless: Some(0),
        client: true,
        ..Setup::default()
    };
    clean(5, 3, setup)
}

/// Nodes 0 and 1 keep a bitmap for node 2, or do not any more.
fn set_bitmap(w: &mut World, bitmap: bool) {
    for index in 0..2 {
        let id = set_bitmap_of(w, index, bitmap);
        assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
    }
    w.pass(Duration::from_secs(1));
}

fn set_bitmap_of(w: &mut World, index: usize, bitmap: bool) -> u64 {
    let options = PeerDeviceOptions {
        bitmap,
        ..w.setup.peer.clone()
    };
    let (peer, volume) = (node_id(2), VOLUME);
    w.command(
        index,
        Command::PeerDeviceOptions {
            peer,
            volume,
            options,
        },
    )
}

fn attach(w: &mut World, index: usize) -> Result<Answer, CommandError> {
    w.attach(index);
    let id = w.next_id;
    w.pass(Duration::from_secs(5));
    w.answers.get(&id).expect("an answer").clone()
}

fn code(w: &World, id: u64) -> Option<ErrorCode> {
    w.answers.get(&id)?.as_ref().err().map(|e| e.code)
}

/// Every node has the disk state that it is to have, and replicates.
fn quiet(w: &World, disks: [DiskState; 3]) -> bool {
    (0..3).all(|a| {
        w.disk_state(a) == disks[a]
            && (0..3).filter(|b| *b != a).all(|b| {
                let state = &w.nodes[a].resource.state;
                let p = state.peer_device(VOLUME, node_id(b));
                p.repl == ReplState::Established && p.disk == disks[b]
            })
    })
}

const CLIENT: [DiskState; 3] = [
    DiskState::UpToDate,
    DiskState::UpToDate,
    DiskState::Diskless,
];
const ALL: [DiskState; 3] = [DiskState::UpToDate; 3];

#[test]
fn a_disk_without_a_bitmap_at_the_peers_is_refused_and_nothing_else_changes() {
    for seed in 1..9 {
        let mut w = with_client(seed);
        w.write(0, 0, 1 << 16, 1);
        w.pass(Duration::from_secs(1));
        for _ in 0..2 {
            let error = attach(&mut w, 2).expect_err("no peer has a bitmap");
            assert_eq!(error.code, ErrorCode::CW_FAILED_BY_PEER);
            assert!(error.text.contains("bitmap no"), "{}", error.text);
            assert!(quiet(&w, CLIENT), "seed {seed}: {:#?}", w.log);
        }
        let id = set_bitmap_of(&mut w, 0, true);
        assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)));
        attach(&mut w, 2).expect_err("one peer has none");
        assert!(quiet(&w, CLIENT), "seed {seed}: {:#?}", w.log);
        set_bitmap(&mut w, true);
        assert_eq!(attach(&mut w, 2), Ok(Answer::Done), "{:#?}", w.log);
        w.pass_until("the first sync", 60, |w| quiet(w, ALL));
        w.check_same_data_of(2);
        let id = w.write(0, 64, 4096, 2);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, id));
        w.check_same_data_of(2);
        w.check_idle();
    }
}

#[test]
fn a_disk_that_left_comes_back_with_what_was_written_while_there_was_no_bitmap() {
    for seed in 1..9 {
        let mut w = clean(seed, 3, Setup::default());
        w.write(0, 0, 1 << 16, 1);
        w.pass(Duration::from_secs(1));
        let detach = Command::Detach {
            volume: VOLUME,
            force: false,
            diskless: true,
        };
        w.command(2, detach);
        w.pass(Duration::from_secs(1));
        assert!(quiet(&w, CLIENT), "seed {seed}: {:#?}", w.log);
        set_bitmap(&mut w, false);
        w.write(0, 64, 1 << 16, 2);
        w.pass(Duration::from_secs(1));
        if seed % 2 == 0 {
            w.cut_links();
            w.pass_until("connections", 30, |w| quiet(w, CLIENT));
            w.write(0, 128, 4096, 3);
            w.pass(Duration::from_secs(1));
        }
        attach(&mut w, 2).expect_err("no peer has a bitmap");
        set_bitmap(&mut w, true);
        assert_eq!(attach(&mut w, 2), Ok(Answer::Done), "{:#?}", w.log);
        w.pass_until("the resync", 60, |w| quiet(w, ALL));
        w.check_same_data();
        w.check_idle();
    }
}

/// Metadata for one peer: the second one is a client, or is refused.
#[test]
fn a_peer_that_is_added_takes_a_bitmap_slot_when_it_connects() {
    let setup = Setup {
        diskless: Some(2),
        client: true,
        ..Setup::default()
    };
    let mut w = World::stopped(1, 3, setup);
    for index in 0..2 {
        w.nodes[index].meta = fresh_meta(index, 1, &w.setup);
    }
    for index in 0..3 {
        w.start(index);
    }
    w.pass(Duration::from_secs(3));
    let peer = node_id(2);
    let id = set_bitmap_of(&mut w, 0, true);
    assert_eq!(code(&w, id), Some(ErrorCode::ERR_INVALID_REQUEST));
    w.command(0, Command::Disconnect { peer, force: false });
    w.pass(Duration::from_secs(1));
    w.command(0, Command::DelPeer { peer });
    let net = w.setup.net.clone();
    let id = w.command(0, Command::NewPeer { peer, net });
    assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
    let connect = Command::Connect {
        peer,
        discard_my_data: false,
        tentative: false,
    };
    let id = w.command(0, connect.clone());
    assert_eq!(code(&w, id), Some(ErrorCode::ERR_INVALID_REQUEST));
    let id = set_bitmap_of(&mut w, 0, false);
    assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)));
    let id = w.command(0, connect);
    assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)));
    w.pass(Duration::from_secs(3));
    assert_eq!(w.repl(0, 2), ReplState::Established, "{:#?}", w.log);
}

#[test]
fn a_disk_that_is_smaller_than_the_volume_is_refused_and_no_connection_is_lost() {
    let mut w = clean(1, 2, Setup::default());
    w.detach(1);
    w.pass(Duration::from_secs(1));
    let links = w.next_link;
    w.nodes[1].data_bytes -= 1 << 20;
    w.nodes[1].meta = fresh_meta(1, 1, &w.setup);
    let error = attach(&mut w, 1).expect_err("too small");
    assert_eq!(error.code, ErrorCode::ERR_DISK_TOO_SMALL, "{}", error.text);
    assert_eq!(w.next_link, links);
    assert_eq!(w.repl(0, 1), ReplState::Established, "{:#?}", w.log);
    w.nodes[1].data_bytes += 1 << 20;
    assert_eq!(attach(&mut w, 1), Ok(Answer::Done));
    w.pass_until("the resync", 60, World::in_sync);
}

/// A peer that loses its disk beside a Primary without one misses what is written then, and must not look as if it
/// were of the same generation when the disk is back.
#[test]
fn a_detach_beside_a_diskless_primary_makes_a_generation() {
    let mut w = with_diskless_primary();
    let first = w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, first), "{:#?}", w.log);
    let current = |w: &World| w.nodes[1].resource.devices[&VOLUME].current_uuid();
    let before = current(&w);
    w.detach(2);
    w.pass(Duration::from_secs(1));
    let second = w.write(0, 8, 4096, 2);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, second), "{:#?}", w.log);
    assert!(!current(&w).same_generation(before), "{:#?}", w.log);
}

/// A Primary without a disk tells its peers who has its last writes before it is Secondary: they have nothing
/// to copy among themselves then.
#[test]
fn a_demotion_leaves_nothing_to_resync_between_others() {
    let mut w = with_diskless_primary();
    for round in 0..5 {
        let open = |open| Command::Open {
            volume: VOLUME,
            open,
            write: true,
        };
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        w.command(0, open(true));
        w.pass(Duration::from_secs(1));
        w.log.clear();
        let write = w.write(0, round * 8, 4096, round as u8);
        w.pass_until("written", 5, |w| w.done(0, write));
        w.command(0, open(false));
        w.pass(Duration::from_secs(2));
        assert_eq!(w.nodes[0].resource.state.role, Role::Secondary);
        let copied = w.log.iter().any(|line| line.contains("marked-blocks"));
        assert!(!copied, "{:#?}", w.log);
    }
}

/// Nodes 0 and 1 have disks, node 0 is Primary. It ends its connection with node 1, which does not hear of that,
/// writes, and is Secondary again; the client in the middle passes that on.
#[test]
fn a_disk_that_a_demoted_primary_wrote_without_is_outdated_when_that_shows() {
    let setup = Setup {
        diskless: Some(2),
        client: true,
        options: ResourceOptions {
            quorum: Quorum::Majority,
            ..ResourceOptions::default()
        },
        ..Setup::default()
    };
    let mut w = clean(7, 3, setup);
    let first = w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, first), "{:#?}", w.log);
    w.deaf = Some(1);
    let (peer, force) = (node_id(1), true);
    w.command(0, Command::Disconnect { peer, force });
    let second = w.write(0, 8, 4096, 2);
    w.run();
    assert!(w.done(0, second), "{:#?}", w.log);
    let conn = |w: &World| w.nodes[1].resource.state.conn(node_id(0));
    assert_eq!(conn(&w), ConnState::Connected);
    w.command(0, Command::Secondary { force: false });
    w.run();
    assert_eq!(w.nodes[0].resource.state.role, Role::Secondary);
    let promotion = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(20));
    assert_eq!(w.disk_state(1), DiskState::Outdated, "{:#?}", w.log);
    assert_eq!(code(&w, promotion), Some(ErrorCode::NO_UP_TO_DATE_DISK));
}

/// Its peers were not stable beside a Primary; without one they are.
#[test]
fn a_client_may_be_promoted_again_after_its_own_demotion() {
    let mut w = with_diskless_primary();
    assert!(!w.nodes[0].resource.snapshot().may_promote);
    w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    assert!(w.nodes[0].resource.snapshot().may_promote);
}

#[test]
fn a_peer_without_volumes_has_a_role() {
    let mut w = World::without_volume(1, 3, Setup::default());
    w.pass(Duration::from_secs(3));
    for a in 0..3 {
        for b in (0..3).filter(|b| *b != a) {
            let role = w.nodes[a].resource.peer_role(node_id(b));
            assert_eq!(role, Role::Secondary, "{a} {b}");
        }
    }
}

/// A node comes to one that follows a Primary which it does not reach itself. It is no current one from the
/// moment on at which it is connected: nobody is told otherwise in between.
#[test]
fn who_joins_far_from_the_primary_is_outdated_with_the_connect() {
    let mut w = with_diskless_primary();
    w.apart = vec![(0, 2), (1, 2)];
    w.cut_links_between(0, 2);
    w.cut_links_between(1, 2);
    w.pass(Duration::from_secs(3));
    w.apart = vec![(0, 2)];
    w.nodes[2].resource.tell_steps(true);
    w.pass_until("the connect", 20, |w| {
        w.nodes[2].resource.state.conn(node_id(1)) == ConnState::Connected
    });
    let mut connected = w.steps.iter().filter(|(_, snapshot)| {
        let mut connections = snapshot.connections.iter();
        connections.any(|c| c.state == ConnState::Connected)
    });
    let (_, first) = connected.next().expect("it is connected");
    assert_eq!(first.devices[0].disk_state, DiskState::Outdated);
}

/// A client was demoted, with one disk away from its last writes, and starts again. It meets the older disk
/// first, or the newer one, or both at once; the two never meet.
#[test]
fn a_client_that_starts_again_between_two_disks_outdates_the_older_one() {
    for (first, second) in [(2, 1), (1, 2), (0, 0)] {
        let mut w = with_diskless_primary();
        w.write(0, 0, 4096, 1);
        w.pass(Duration::from_secs(1));
        w.apart = vec![(0, 2), (1, 2)];
        w.cut_links_between(0, 2);
        w.cut_links_between(1, 2);
        w.pass(Duration::from_secs(1));
        let newer = w.write(0, 0, 4096, 2);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, newer), "{:#?}", w.log);
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        w.crash(0);
        w.apart = vec![(0, second), (1, 2)];
        w.restart(0);
        w.pass(Duration::from_secs(2));
        w.apart = vec![(1, 2)];
        w.pass(Duration::from_secs(2));
        assert_eq!(w.disk_state(1), DiskState::UpToDate, "{first} {:#?}", w.log);
        assert_eq!(w.disk_state(2), DiskState::Outdated, "{first} {:#?}", w.log);
        let seen = |w: &World, peer| {
            let state = &w.nodes[0].resource.state;
            state.peer_device(VOLUME, node_id(peer)).disk
        };
        assert_eq!(seen(&w, 1), DiskState::UpToDate);
        assert_eq!(seen(&w, 2), DiskState::Outdated);
        let promotion = w.command(0, Command::Primary { force: false });
        w.pass(Duration::from_secs(2));
        assert_eq!(w.answers.get(&promotion), Some(&Ok(Answer::Done)));
        assert_eq!(w.read(0, 0, 4096), vec![2; 4096]);
        w.apart = Vec::new();
        w.pass_until("the resync", 30, |w| seen(w, 2) == DiskState::UpToDate);
        w.check_same_data_of(0);
    }
}

/// Two disks were written apart from each other. A client between them has one of the two, never both.
#[test]
fn a_client_does_not_join_two_disks_that_have_parted() {
    let mut w = with_client(3);
    w.apart = vec![(0, 1), (0, 2), (1, 2)];
    w.cut_links();
    w.pass(Duration::from_secs(1));
    w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    w.command(0, Command::Secondary { force: false });
    let promotion = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    assert_eq!(
        w.answers.get(&promotion),
        Some(&Ok(Answer::Done)),
        "{:#?}",
        w.log
    );
    w.write(1, 0, 4096, 2);
    w.pass(Duration::from_secs(1));
    w.command(1, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    w.crash(2);
    w.apart = vec![(0, 1), (1, 2)];
    w.restart(2);
    w.pass(Duration::from_secs(2));
    w.apart = vec![(0, 1)];
    w.pass(Duration::from_secs(5));
    let state = &w.nodes[2].resource.state;
    let seen = |peer| state.peer_device(VOLUME, node_id(peer)).disk;
    let good = (0..2)
        .filter(|peer| seen(*peer) == DiskState::UpToDate)
        .count();
    assert_eq!(good, 1, "{:#?}", w.log);
}

/// A flush changes nothing: with all that was written durable at a peer that is lost, it makes no generation that
/// the peer would have to be copied for.
#[test]
fn a_flush_makes_no_generation_if_who_is_lost_has_everything() {
    for settled in [true, false] {
        let mut w = with_client(11);
        w.write(0, 0, 4096, 1);
        w.pass(Duration::from_secs(1));
        let before = w.generation(0);
        if !settled {
            let write = w.write(0, 80, 4096, 1);
            while !w.done(0, write) {
                w.step();
            }
        }
        w.apart = vec![(0, 1), (0, 2)];
        w.cut_links_between(0, 1);
        w.cut_links_between(0, 2);
        w.pass(Duration::from_secs(1));
        let flush = w.request(0, RequestKind::Flush, 0, 0, 0);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, flush));
        assert_eq!(w.generation(0) == before, settled);
        let write = w.write(0, 80, 4096, 2);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, write));
        assert_ne!(w.generation(0), before);
    }
}

/// A client is Primary and idle when a disk comes back that was written alone. Applications that have read the
/// older data get nothing any more, as with a kernel, and nobody is without whole data for good.
#[test]
fn an_idle_client_gives_way_to_a_disk_that_was_written_alone() {
    let mut w = with_client(12);
    w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    w.apart = vec![(0, 1), (0, 2)];
    w.cut_links_between(0, 1);
    w.cut_links_between(0, 2);
    w.pass(Duration::from_secs(1));
    let write = w.write(0, 80, 4096, 2);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, write));
    w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    w.crash(0);
    let promotion = w.command(2, Command::Primary { force: false });
    w.pass(Duration::from_secs(3));
    assert_eq!(w.answers.get(&promotion), Some(&Ok(Answer::Done)));
    w.apart = vec![(0, 2)];
    w.restart(0);
    w.pass(Duration::from_secs(3));
    w.apart = Vec::new();
    w.pass(Duration::from_secs(20));
    assert!((0..2).all(|n| w.disk_state(n) != DiskState::UpToDate));
    let stale = w.request(2, RequestKind::Read, 80, 4096, 0);
    w.pass(Duration::from_secs(1));
    assert!(!w.done(2, stale), "{:#?}", w.log);
    w.command(2, Command::Secondary { force: false });
    w.pass_until("whole disks", 20, World::in_sync);
    w.command(2, Command::Primary { force: false });
    w.pass(Duration::from_secs(3));
    assert_eq!(w.read(2, 80, 4096), vec![2; 4096]);
    w.check_same_data();
}

/// A peer has refused writes when the Primary loses its disk. A third node has them all, and the Primary goes on with that.
#[test]
fn a_primary_whose_disk_goes_goes_on_with_the_peer_that_refused_nothing() {
    let mut w = clean(9, 3, Setup::default());
    let id = w.write(0, 0, 4096, 5);
    w.run();
    assert!(w.done(0, id), "{:#?}", w.log);
    let resource = &mut w.nodes[0].resource;
    resource.peer_refuses(VOLUME, node_id(1));
    resource.mark_towards(VOLUME, node_id(1), Sector(0), 4096);
    let detach = Command::Detach {
        volume: VOLUME,
        force: true,
        diskless: false,
    };
    w.command(0, detach);
    w.pass(Duration::from_secs(1));
    let id = w.write(0, 4096, 4096, 6);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id), "{:#?}", w.log);
}
