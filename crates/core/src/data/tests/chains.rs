//! Nodes in a row: who copies from a node that is not whole itself (semantics.md, 13.5, 14.3 and 19.5).

use super::*;
use crate::device::ConnectVerdict;

/// Node 1 is between the Primary, node 0, and node 2, which do not reach each other.
fn row(seed: u64) -> World {
    let mut setup = Setup::default();
    setup.peer.c_max_rate_kib_s = 512;
    let mut w = clean(seed, 3, setup);
    w.apart = vec![(0, 2)];
    w.cut_links_between(0, 2);
    w.pass(Duration::from_secs(2));
    w
}

fn write_all(w: &mut World, from: u64, fill: u8) {
    for n in 0..200 {
        w.write(0, from + n * 80, 4096, fill);
    }
    w.pass(Duration::from_secs(3));
}

fn reaches(w: &mut World, apart: &[(usize, usize)]) {
    for (a, b) in apart {
        w.cut_links_between(*a, *b);
    }
    w.apart = apart.to_vec();
    w.run();
}

/// Node 1 missed writes and is in the middle of copying them from node 0; node 2 missed them as well.
fn in_the_middle(seed: u64) -> World {
    let mut w = row(seed);
    reaches(&mut w, &[(0, 1), (0, 2), (1, 2)]);
    write_all(&mut w, 0, 7);
    reaches(&mut w, &[(0, 2), (1, 2)]);
    w.pass_until("a resync", 20, |w| w.repl(1, 0) == ReplState::SyncTarget);
    w.pass(Duration::from_millis(100));
    assert_eq!(w.disk_state(1), DiskState::Inconsistent);
    w
}

#[test]
fn a_target_is_source_of_the_next_one_when_it_is_whole() {
    for seed in 9100..9106 {
        let mut w = in_the_middle(seed);
        w.packets.clear();
        w.log.clear();
        reaches(&mut w, &[(0, 2)]);
        w.pass_until("node 1 is whole", 60, |w| {
            w.disk_state(1) == DiskState::UpToDate
        });
        w.pass(Duration::from_secs(10));
        // Node 2 has the same, but cannot hear of what the Primary writes (14.2).
        assert_eq!(w.repl(2, 1), ReplState::Established, "{:#?}", w.log);
        assert_eq!(w.disk_state(2), DiskState::Inconsistent);
        // It got nothing of a disk that was not whole: no block came twice.
        let copied = w.packets.get("rs data reply").copied().unwrap_or(0);
        assert!(copied <= 400, "{copied} blocks: {:#?}", w.log);
        w.command(0, Command::Secondary { force: false });
        w.pass_until("node 2 is whole", 60, |w| {
            w.disk_state(2) == DiskState::UpToDate
        });
        w.pass(Duration::from_secs(5));
        w.check_same_data();
    }
}

#[test]
fn without_its_source_a_target_goes_back_to_a_whole_disk_that_is_older() {
    for seed in 9110..9116 {
        let mut w = in_the_middle(seed);
        reaches(&mut w, &[(0, 1), (0, 2), (1, 2)]);
        w.apart = vec![(0, 1), (0, 2)];
        w.pass_until("a decision", 60, |w| {
            w.repl(1, 2) == ReplState::Established && w.disk_state(1) > DiskState::Inconsistent
        });
        w.pass(Duration::from_secs(2));
        // The two are equal again, at the generation that both had, and neither is a current disk
        // beside a Primary that may be alive.
        assert_eq!(w.generation(1), w.generation(2));
        let (a, b) = (&w.nodes[1].data, &w.nodes[2].data);
        for block in 0..SIZE / 4096 {
            assert_eq!(
                a.block(block),
                b.block(block),
                "block {block}: {:#?}",
                w.log
            );
        }
        // What the Primary has written wins when it is back.
        w.apart.clear();
        w.pass_until("in sync", 60, World::in_sync);
        w.pass(Duration::from_secs(5));
        w.check_same_data();
        assert_eq!(w.read(0, 80, 4096), vec![7; 4096]);
    }
}

#[test]
fn two_disks_that_are_not_whole_wait_for_a_source() {
    for seed in 9120..9126 {
        let mut w = row(seed);
        reaches(&mut w, &[(0, 1), (0, 2), (1, 2)]);
        write_all(&mut w, 0, 7);
        // Both are copied from the Primary and lose it in the middle.
        reaches(&mut w, &[(1, 2)]);
        w.pass_until("two resyncs", 20, |w| {
            [1, 2]
                .iter()
                .all(|n| w.repl(*n, 0) == ReplState::SyncTarget)
        });
        w.pass(Duration::from_millis(100));
        reaches(&mut w, &[(0, 1), (0, 2)]);
        w.pass(Duration::from_secs(30));
        for (n, peer) in [(1, 2), (2, 1)] {
            assert_eq!(w.disk_state(n), DiskState::Inconsistent, "{:#?}", w.log);
            assert_eq!(w.repl(n, peer), ReplState::Established, "{:#?}", w.log);
        }
        // Nobody is promoted by mistake; an operator who has no other node chooses one of them.
        let id = w.command(1, Command::Primary { force: false });
        w.pass(Duration::from_secs(5));
        assert!(
            matches!(w.answers.get(&id), Some(Err(_))),
            "{:?}",
            w.answers.get(&id)
        );
        if seed % 2 == 0 {
            w.apart.clear();
            w.pass_until("in sync", 60, World::in_sync);
        } else {
            let id = w.command(1, Command::Primary { force: true });
            w.pass(Duration::from_secs(5));
            assert!(
                matches!(w.answers.get(&id), Some(Ok(_))),
                "{:?}",
                w.answers.get(&id)
            );
            w.pass_until("a copy", 60, |w| w.disk_state(2) == DiskState::UpToDate);
            w.pass(Duration::from_secs(2));
            let (a, b) = (&w.nodes[1].data, &w.nodes[2].data);
            for block in 0..SIZE / 4096 {
                assert_eq!(
                    a.block(block),
                    b.block(block),
                    "block {block}: {:#?}",
                    w.log
                );
            }
            continue;
        }
        w.pass(Duration::from_secs(5));
        w.check_same_data();
    }
}

/// Node 2 lost the Primary, a client, which goes on with node 1. A resync from node 1 could not end, and would
/// have made a mixture of old data that are whole.
#[test]
fn an_outdated_disk_stays_whole_while_its_neighbour_has_a_primary_that_it_does_not_reach() {
    for seed in 9130..9136 {
        let setup = Setup {
            diskless: Some(0),
            client: true,
            ..Setup::default()
        };
        let mut w = clean(seed, 3, setup);
        w.write(0, 0, 4096, 1);
        w.pass(Duration::from_secs(1));
        reaches(&mut w, &[(0, 2)]);
        write_all(&mut w, 0, 7);
        w.packets.clear();
        w.pass(Duration::from_secs(20));
        assert_eq!(w.disk_state(2), DiskState::Outdated, "{:#?}", w.log);
        assert_eq!(w.repl(2, 1), ReplState::Established, "{:#?}", w.log);
        assert_eq!(w.packets.get("rs data reply"), None, "{:#?}", w.log);
        // Without the Primary it follows at once.
        reaches(&mut w, &[(0, 1), (0, 2)]);
        w.pass_until("a copy", 5, |w| w.disk_state(2) == DiskState::UpToDate);
        w.apart.clear();
        w.pass_until("in sync", 60, World::in_sync);
        w.pass(Duration::from_secs(5));
        let (a, b) = (&w.nodes[1].data, &w.nodes[2].data);
        for block in 0..SIZE / 4096 {
            assert_eq!(a.block(block), b.block(block), "block {block}");
        }
    }
}

/// Two targets of one source have marks towards each other, which it settles when both are through. It is demoted
/// at that moment, so that they are stable news to each other.
#[test]
fn two_targets_that_have_just_ended_do_not_compare_what_their_source_is_asked_about() {
    for seed in 9140..9180 {
        let mut w = World::new(seed, 3, Setup::default());
        w.pass(Duration::from_secs(3));
        w.command(0, Command::Primary { force: true });
        let through = |w: &World| {
            w.nodes[0].resource.state.devices[&VOLUME]
                .peers
                .values()
                .all(|p| (p.repl, p.disk) == (ReplState::Established, DiskState::UpToDate))
        };
        for _ in 0..1_000_000 {
            if through(&w) {
                break;
            }
            if !w.step() {
                let end = Instant(w.now.0 + 1_000_000_000);
                w.next_timer(end);
            }
        }
        assert!(through(&w), "seed {seed} {:#?}", w.log);
        w.command(0, Command::Secondary { force: false });
        w.log.clear();
        w.packets.clear();
        w.pass(Duration::from_secs(20));
        assert!(
            !w.log.iter().any(|line| line.contains("marked-blocks")),
            "seed {seed} {:#?}",
            w.log
        );
        assert_eq!(
            (w.bits(1, 2), w.bits(2, 1)),
            (0, 0),
            "seed {seed} {:#?}",
            w.log
        );
        assert!(w.in_sync(), "seed {seed} {:#?}", w.log);
        w.check_same_data();
    }
}

/// Node 0 wrote without both others. Node 1 is copied from it in the middle of being the source of node 2, and
/// copies the rest to that one; then nodes 0 and 2 meet. What node 0 keeps for node 2, node 1 has copied.
#[test]
fn what_a_neighbour_has_copied_is_not_copied_again_by_the_first_source() {
    for seed in 9130..9142 {
        let mut w = row(seed);
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        w.command(0, Command::Primary { force: false });
        w.pass(Duration::from_secs(1));
        reaches(&mut w, &[(0, 2), (1, 2)]);
        write_all(&mut w, 0, 7);
        reaches(&mut w, &[(0, 1), (0, 2), (1, 2)]);
        write_all(&mut w, 8, 8);
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        reaches(&mut w, &[(0, 1), (0, 2)]);
        w.pass_until("a resync", 20, |w| w.repl(2, 1) == ReplState::SyncTarget);
        w.pass(Duration::from_millis(100));
        reaches(&mut w, &[(0, 2)]);
        let whole = |w: &World| (0..3).all(|n| w.disk_state(n) == DiskState::UpToDate);
        w.pass_until("all are whole", 60, whole);
        w.pass(Duration::from_millis(400));
        assert_eq!(
            (w.bits(0, 2), w.bits(2, 0)),
            (0, 0),
            "seed {seed} {:#?}",
            w.log
        );
        w.packets.clear();
        reaches(&mut w, &[]);
        w.pass_until("in sync", 60, World::in_sync);
        let copied = w.packets.get("rs data reply").copied().unwrap_or(0);
        assert_eq!(copied, 0, "seed {seed} {:#?}", w.log);
        w.check_same_data();
        w.check_idle();
    }
}

/// Node 2 was copied from node 0 as a whole while node 1 was away, so that all of it is marked towards that one.
/// Node 0 knows that all are equal as soon as it has met node 1.
#[test]
fn what_was_copied_while_a_node_was_away_is_settled_when_a_neighbour_meets_it() {
    for seed in 9150..9162 {
        let mut w = clean(seed, 3, Setup::default());
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        reaches(&mut w, &[(0, 1), (1, 2)]);
        w.invalidate_from(2, 0);
        w.pass_until("a copy", 60, |w| w.disk_state(2) == DiskState::UpToDate);
        w.pass(Duration::from_secs(2));
        assert!(w.bits(2, 1) > 0, "node 2 cannot know yet");
        reaches(&mut w, &[(1, 2)]);
        for _ in 0..20_000 {
            if w.repl(0, 1) == ReplState::Established {
                break;
            }
            w.pass(Duration::from_millis(1));
        }
        w.pass(Duration::from_millis(10));
        assert_eq!(w.bits(2, 1), 0, "seed {seed} {:#?}", w.log);
        reaches(&mut w, &[]);
        w.packets.clear();
        w.pass_until("in sync", 60, World::in_sync);
        assert_eq!(w.packets.get("rs data reply"), None, "seed {seed}");
        w.check_same_data();
        w.check_idle();
    }
}

/// As in a chain of four, of which the last one meets the Primary and loses it in good order: both of its
/// neighbours are outdated for it, and neither ends a connection over that.
#[test]
fn the_weak_end_of_a_row_loses_its_primary_and_no_connection() {
    for seed in 9200..9260 {
        let mut w = clean(seed, 4, Setup::default());
        for (a, b) in [(0, 2), (0, 3), (1, 3)] {
            w.command(
                a,
                Command::Disconnect {
                    peer: node_id(b),
                    force: false,
                },
            );
            w.pass(Duration::from_millis(50));
        }
        w.pass(Duration::from_secs(2));
        w.command(0, Command::Secondary { force: false });
        w.pass_until("all whole", 20, |w| {
            (0..4).all(|n| w.disk_state(n) == DiskState::UpToDate)
        });
        w.command(0, Command::Primary { force: false });
        w.pass(Duration::from_millis(20));
        w.write(0, 0, 4096, 1);
        w.pass(Duration::from_millis(20));
        w.command(0, Command::Secondary { force: false });
        w.pass_until("all whole", 20, |w| {
            (0..4).all(|n| w.disk_state(n) == DiskState::UpToDate)
        });
        for (a, b) in [(0, 3), (3, 0)] {
            w.command(
                a,
                Command::Connect {
                    peer: node_id(b),
                    discard_my_data: false,
                    tentative: false,
                },
            );
        }
        w.command(0, Command::Primary { force: false });
        w.pass_until("the end follows", 20, |w| {
            // Inconsistent if it was copied from node 3 meanwhile, whose Primary may write.
            w.disk_state(2) < DiskState::Consistent && w.disk_state(3) == DiskState::UpToDate
        });
        w.write(0, 80, 4096, 2);
        w.pass(Duration::from_millis(100));
        w.command(0, Command::Secondary { force: false });
        w.pass_until("node 2 whole", 20, |w| {
            w.disk_state(2) == DiskState::UpToDate
        });
        let pause = w.random(30);
        w.pass(Duration::from_millis(pause as u64));
        w.command(0, Command::Primary { force: false });
        let pause = w.random(30);
        w.pass(Duration::from_millis(pause as u64));
        w.log.clear();
        w.command(
            0,
            Command::Disconnect {
                peer: node_id(3),
                force: false,
            },
        );
        w.pass(Duration::from_millis(100));
        w.write(0, 160, 4096, 3);
        w.pass(Duration::from_millis(100));
        w.command(0, Command::Secondary { force: false });
        w.pass_until("all whole", 20, |w| {
            (0..4).all(|n| w.disk_state(n) == DiskState::UpToDate)
        });
        w.check_same_data();
        assert!(
            !w.log.iter().any(|l| l.contains("connecting again")),
            "seed {seed}: {:#?}",
            w.log
        );
    }
}

/// Two disks are Inconsistent when the handshake of their nodes says which one is copied. A third node makes one of them
/// whole before the commit.
#[test]
fn a_disk_that_a_handshake_finds_inconsistent_and_leaves_whole_is_compared_again() {
    let mut w = clean(9130, 2, Setup::default());
    let peer = node_id(1);
    let mut is_void = |repl: ReplState, told: DiskState| {
        let resource = &mut w.nodes[0].resource;
        let device = resource.devices.get_mut(&VOLUME).unwrap();
        let pd = device.peers.get_mut(&peer).unwrap();
        pd.sent_handshake = true;
        pd.sent_disk = told;
        pd.verdict = Some(ConnectVerdict {
            repl,
            peer_role: lockstep_format::wire::Role::Secondary,
            peer_disk: DiskState::Inconsistent,
            susp_peer: false,
            own_disk: None,
            strategy: None,
            reconciliation: false,
            clear_own_slot: false,
            refusal: None,
        });
        resource.handshake_changed(peer).is_some()
    };
    assert!(is_void(ReplState::WfBitmapT, DiskState::Inconsistent));
    assert!(!is_void(ReplState::WfBitmapS, DiskState::Inconsistent));
    assert!(!is_void(ReplState::WfBitmapT, DiskState::UpToDate));
}
