//! A Primary that leaves its peers one after the other, and is gone then (semantics.md, 10.7).

use super::*;
use crate::options::Quorum;
use crate::state::Role;

fn leave(w: &mut World, from: usize, peer: usize) {
    let peer = node_id(peer);
    w.command(from, Command::Disconnect { peer, force: true });
}

#[test]
fn survivors_that_lost_the_primary_one_after_the_other_can_be_promoted() {
    for (seed, pause_ms) in (0..40).map(|n| (n, n % 8 * 10)) {
        let options = ResourceOptions {
            quorum: Quorum::Majority,
            ..ResourceOptions::default()
        };
        let setup = Setup {
            options,
            ..Setup::default()
        };
        let mut w = clean(seed, 3, setup);
        w.write(0, 0, 4096, 9);
        w.pass(Duration::from_millis(seed % 5 * 5));
        leave(&mut w, 0, 1);
        w.pass(Duration::from_millis(pause_ms));
        leave(&mut w, 0, 2);
        w.pass(Duration::from_millis(40));
        w.crash(0);
        w.pass(Duration::from_millis(500));
        for node in 1..3 {
            assert_eq!(
                w.disk_state(node),
                DiskState::UpToDate,
                "seed {seed} {:#?}",
                w.log
            );
        }
        let id = w.command(1, Command::Primary { force: false });
        w.pass(Duration::from_secs(10));
        assert_eq!(
            w.answers.get(&id),
            Some(&Ok(Answer::Done)),
            "seed {seed} {:#?}",
            w.log
        );
        assert_eq!(w.nodes[1].resource.state.role, Role::Primary);
        assert_eq!(w.bits(1, 2), 0, "seed {seed} {:#?}", w.log);
        assert_eq!(w.disk_state(2), DiskState::UpToDate);
    }
}

/// The second one loses it between its word about the Primary and the outcome of the first one's transaction.
#[test]
fn survivors_that_lost_the_primary_during_one_transaction_can_be_promoted() {
    for seed in 0..400 {
        let options = ResourceOptions {
            quorum: Quorum::Majority,
            ..ResourceOptions::default()
        };
        let setup = Setup {
            options,
            ..Setup::default()
        };
        let mut w = clean(seed, 3, setup);
        w.write(0, 0, 4096, 9);
        w.pass(Duration::from_millis(100));
        leave(&mut w, 0, 1);
        w.run();
        // The first one begins to ask.
        let soon = w.now + Duration::from_millis(10);
        while w.next_timer(soon) {
            let begun = w
                .nodes
                .iter()
                .any(|node| node.resource.twopc.current.is_some());
            if begun {
                break;
            }
            w.run();
        }
        for _ in 0..seed % 40 {
            w.step();
        }
        leave(&mut w, 0, 2);
        w.pass(Duration::from_millis(40));
        w.crash(0);
        w.pass(Duration::from_secs(1));
        for node in 1..3 {
            assert_eq!(
                w.disk_state(node),
                DiskState::UpToDate,
                "seed {seed} {:#?}",
                w.log
            );
        }
        let id = w.command(1, Command::Primary { force: false });
        w.pass(Duration::from_secs(10));
        let answer = w.answers.get(&id);
        assert_eq!(answer, Some(&Ok(Answer::Done)), "seed {seed} {:#?}", w.log);
    }
}

#[test]
fn a_promotion_waits_a_ping_timeout_for_the_other_primary_to_leave() {
    for (pause_ms, waits) in [(1000, true), (2500, false)] {
        let mut setup = Setup::default();
        setup.net.ping_timeout_tenths = 20;
        let mut w = clean(3, 3, setup);
        w.write(0, 0, 4096, 9);
        w.pass(Duration::from_millis(100));
        let id = w.command(2, Command::Primary { force: false });
        w.pass(Duration::from_millis(pause_ms));
        assert_eq!(w.answers.contains_key(&id), !waits, "{:#?}", w.log);
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(3));
        let role = w.nodes[2].resource.state.role;
        assert_eq!(role == Role::Primary, waits, "{:#?}", w.log);
    }
}

/// Of two Secondaries one leaves, by `down` or `disconnect`. Before, a third one may have left.
#[test]
fn of_two_secondaries_the_one_that_stays_keeps_quorum() {
    for (seed, count, down) in [(1, 2, true), (2, 2, false), (3, 3, true), (4, 3, false)] {
        let options = ResourceOptions {
            quorum: Quorum::Majority,
            ..ResourceOptions::default()
        };
        let setup = Setup {
            options,
            diskless: (count == 3).then_some(2),
            client: true,
            ..Setup::default()
        };
        let mut w = clean(seed, count, setup);
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        for node in (1..count).rev() {
            if down {
                w.command(node, Command::Down);
                w.pass(Duration::from_secs(1));
            }
            for peer in (0..count).map(node_id) {
                w.command(node, Command::Disconnect { peer, force: false });
                w.pass(Duration::from_millis(200));
            }
        }
        let quorum = |n: usize| {
            let devices = &w.nodes[n].resource.state.devices;
            devices.get(&VOLUME).is_some_and(|d| d.quorum)
        };
        assert!(quorum(0) && !quorum(1), "seed {seed} {:#?}", w.log);
    }
}

/// A chain of nodes: those that the Primary at its end does not reach are no current ones, also when the
/// last one was connected to it for a while.
#[test]
fn nodes_behind_others_stay_outdated_when_the_primary_leaves_the_last_one() {
    for (seed, how) in (0..24).map(|n| (n, n % 3)) {
        let count = 4 + seed as usize % 2;
        let last = count - 1;
        let mut w = clean(seed, count, Setup::default());
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        for a in 0..count {
            for b in a + 2..count {
                let peer = node_id(b);
                w.command(a, Command::Disconnect { peer, force: false });
                w.pass(Duration::from_millis(100));
            }
        }
        w.command(0, Command::Primary { force: false });
        w.pass(Duration::from_secs(1));
        let outdated = |w: &World, from: usize| {
            for node in from..count {
                let disk = w.disk_state(node);
                assert_eq!(
                    disk,
                    DiskState::Outdated,
                    "seed {seed} node {node} {:#?}",
                    w.log
                );
            }
        };
        outdated(&w, 2);
        let connect = |w: &mut World, from: usize, to: usize| {
            let connect = Command::Connect {
                peer: node_id(to),
                discard_my_data: false,
                tentative: false,
            };
            w.command(from, connect);
        };
        connect(&mut w, 0, last);
        w.pass(Duration::from_secs(1));
        assert_eq!(
            w.disk_state(last),
            DiskState::UpToDate,
            "seed {seed} {:#?}",
            w.log
        );
        let force = how == 0;
        let (from, peer) = match how {
            1 => (last, node_id(0)),
            _ => (0, node_id(last)),
        };
        w.command(from, Command::Disconnect { peer, force });
        w.pass(Duration::from_secs(2));
        outdated(&w, 2);
        let id = w.command(0, Command::Secondary { force: false });
        w.pass_until("the demotion", 5, |w| w.answers.contains_key(&id));
        w.pass(Duration::from_secs(1));
        for node in 1..count {
            let disk = w.disk_state(node);
            assert_eq!(
                disk,
                DiskState::UpToDate,
                "seed {seed} node {node} {:#?}",
                w.log
            );
        }
    }
}
