//! Nodes without disks, and what quorum promises.

use lockstep_core::options::{
    AfterSplitBrain, OnLoss, OnSuspendedPrimaryOutdated, Protocol, Quorum,
};
use lockstep_core::state::Role;
use lockstep_sim::check;
use lockstep_sim::disk::Lose;
use lockstep_sim::drive::{Trace, run};
use lockstep_sim::faults::parse;
use lockstep_sim::plan::{Numbers, Orders};
use lockstep_sim::scenario::{A, B, C, Scenario};
use lockstep_sim::world::{Config, MS, SECOND, World};

/// Nodes of which the last `diskless` have no disk; without quorum requests wait.
fn cluster(seed: u64, nodes: usize, diskless: usize, quorum: Quorum) -> Scenario {
    let config = Config {
        nodes,
        diskless,
        protocol: Protocol::C,
        ..Config::small(seed)
    };
    Scenario::with(
        config,
        |settings| {
            settings.resource.quorum = quorum;
            settings.resource.on_no_data_accessible = OnLoss::SuspendIo;
        },
        false,
    )
}

fn waits(w: &World, node: usize, id: u64) -> bool {
    w.nodes[node].requests.contains_key(&id)
}

/// The storage nodes of a client die one after the other and return. What it wrote meanwhile is on
/// the last one only, so the other's old data must not be taken for it.
#[test]
fn a_client_survives_the_loss_of_all_its_storage_nodes() {
    const CLIENT: usize = C;
    for first_back in [A, B] {
        let mut s = cluster(7, 3, 1, Quorum::Off);
        s.write_and_wait(A, 10, 4);
        s.demote(A);
        s.promote(CLIENT);
        s.read(CLIENT, 10, 4);
        s.crash(B, Lose::Unflushed);
        s.write_and_wait(CLIENT, 10, 4);
        s.read(CLIENT, 10, 4);
        s.crash(A, Lose::InFlight);
        s.pass(SECOND);
        let write = s.write(CLIENT, 10, 4);
        s.pass(SECOND);
        assert!(waits(&s.world, CLIENT, write), "nobody could take it");
        s.restart(first_back);
        s.pass(10 * SECOND);
        assert_eq!(waits(&s.world, CLIENT, write), first_back == B);
        s.restart(A);
        s.restart(B);
        s.done(CLIENT, write);
        s.read(CLIENT, 10, 4);
        s.in_sync();
    }
}

#[test]
fn a_tie_breaker_keeps_quorum_for_the_half_that_sees_it() {
    let alone = |diskless| {
        let mut s = cluster(8, 2 + diskless, diskless, Quorum::Majority);
        s.write_and_wait(A, 10, 1);
        s.crash(B, Lose::InFlight);
        s.pass(SECOND);
        let write = s.write(A, 10, 1);
        s.pass(10 * SECOND);
        let waited = waits(&s.world, A, write);
        s.restart(B);
        s.done(A, write);
        s.in_sync();
        waited
    };
    assert!(alone(0), "one of two nodes is no majority");
    assert!(!alone(1), "with the tie-breaker it is");
}

#[test]
fn the_last_man_has_no_quorum_if_the_others_died() {
    let mut s = cluster(9, 3, 0, Quorum::Majority);
    s.crash(C, Lose::InFlight);
    s.write_and_wait(A, 10, 1);
    s.crash(B, Lose::InFlight);
    s.pass(SECOND);
    let write = s.write(A, 10, 1);
    s.pass(10 * SECOND);
    assert!(waits(&s.world, A, write));
    s.restart(C);
    s.done(A, write);
    s.restart(B);
    s.in_sync();
}

/// What is restored for a last man that starts again alone holds until it is counted with others.
#[test]
fn a_last_man_that_started_again_loses_quorum_like_any_other_node() {
    let mut s = cluster(9, 3, 0, Quorum::Majority);
    s.write_and_wait(A, 10, 1);
    for gone in [C, B] {
        s.down(gone);
    }
    s.write_and_wait(A, 10, 1);
    s.crash(A, Lose::InFlight);
    s.restart(A);
    s.pass(SECOND);
    s.promote(A);
    s.write_and_wait(A, 10, 1);
    s.restart(B);
    s.restart(C);
    s.in_sync();
    s.world.isolate(A);
    s.pass(20 * SECOND);
    let write = s.write(A, 10, 1);
    s.pass(10 * SECOND);
    assert!(waits(&s.world, A, write));
    for peer in [B, C] {
        s.cut(A, peer, false);
    }
    s.done(A, write);
    s.in_sync();
}

/// Requests that are on their way when quorum is lost are neither failed nor done twice.
#[test]
fn lost_quorum_holds_requests_and_its_return_ends_them() {
    for delay in 0..12 {
        let mut s = cluster(10 + delay, 3, 0, Quorum::Majority);
        s.write_and_wait(A, 10, 8);
        let before = s.world.acked;
        let early: Vec<u64> = (10..18).map(|block| s.write(A, block, 1)).collect();
        s.world.run_for(delay * MS / 8);
        s.world.isolate(A);
        s.pass(20 * SECOND);
        let late = s.write(A, 30, 1);
        s.pass(10 * SECOND);
        assert!(waits(&s.world, A, late));
        for peer in [B, C] {
            s.cut(A, peer, false);
        }
        for write in early.iter().chain([&late]) {
            s.done(A, *write);
        }
        assert_eq!(s.world.acked, before + 9, "each write succeeds, once");
        s.read(A, 10, 8);
        s.in_sync();
    }
}

/// 24.1, and an open report of a lost-quorum rule that clears the bitmap: writes that only the
/// isolated Primary has stay marked when the nodes meet again, whether it lives on or died.
#[test]
fn what_a_primary_without_quorum_wrote_stays_marked() {
    for delay in 0..24 {
        let mut s = cluster(30 + delay, 3, 0, Quorum::Majority);
        s.write_and_wait(A, 10, 8);
        for block in 10..18 {
            s.write(A, block, 1);
        }
        s.world.run_for(delay % 12 * MS / 8);
        s.world.isolate(A);
        s.write(A, 200, 4);
        s.pass(20 * SECOND);
        check::differences_are_marked(&mut s.world);
        if delay % 2 == 0 {
            s.crash(A, Lose::InFlight);
            s.restart(A);
            s.pass(SECOND);
        }
        for peer in [B, C] {
            s.cut(A, peer, false);
        }
        s.pass(5 * SECOND);
        check::differences_are_marked(&mut s.world);
        s.in_sync();
    }
}

/// A client lost all nodes at once while a generation was due, found nothing to label, and forgot
/// it: the first node that returned got writes under the generation that the others had, too.
#[test]
fn a_generation_that_could_not_be_made_stays_due() {
    let orders = Orders {
        nodes: Some(4),
        kinds: Some(parse("quorum,diskless").unwrap()),
        only_faults: Some(Numbers::parse("0-2,4,6-7,10-11").unwrap()),
        only_requests: Some(Numbers::parse("5,7,9,11,13-25,27-28,32,34-37").unwrap()),
        ..Orders::default()
    };
    let played = run(26, &orders, Trace::Off);
    assert_eq!(played.violation, None);
}

/// `new-current-uuid --clear-bitmap` took a connected node without a disk for one that is in sync.
#[test]
fn skipping_the_first_sync_gives_no_disk_to_a_client() {
    let s = cluster(11, 2, 1, Quorum::Off);
    assert_eq!(check::not_converged(&s.world), None);
}

#[test]
fn worlds_with_clients_and_quorum_hold() {
    for (nodes, kinds) in [(2, "diskless,crash,reset"), (3, "quorum,crash,partition")] {
        let orders = Orders {
            nodes: Some(nodes),
            kinds: Some(parse(kinds).unwrap()),
            ..Orders::default()
        };
        for seed in 0..8 {
            let played = run(seed, &orders, Trace::Off);
            assert_eq!(played.violation, None, "{}", orders.command(seed));
        }
    }
}

/// Three nodes with a quorum that go on connecting to a frozen Primary.
fn three_that_retry(seed: u64, policy: OnSuspendedPrimaryOutdated) -> Scenario {
    let config = Config {
        nodes: 3,
        protocol: Protocol::C,
        ..Config::small(seed)
    };
    Scenario::with(
        config,
        |settings| {
            settings.resource.quorum = Quorum::Majority;
            settings.resource.on_suspended_primary_outdated = policy;
            settings.net.rr_conflict = AfterSplitBrain::RetryConnect;
        },
        false,
    )
}

/// semantics.md, 11.4: the Primary is cut off and freezes, another takes over and writes. When it
/// comes back, its waiting requests fail and it follows, at once or when the operator says so.
#[test]
fn a_frozen_primary_gives_way_to_its_successor() {
    use OnSuspendedPrimaryOutdated::{Disconnect, ForceSecondary};
    for (seed, policy) in [(40, ForceSecondary), (41, Disconnect), (42, ForceSecondary)] {
        let mut s = three_that_retry(seed, policy);
        s.write_and_wait(A, 10, 8);
        let early = s.write(A, 12, 2);
        assert_eq!(s.operator.take_over_soon(&mut s.world), Some(A));
        s.world.isolate(A);
        s.pass(30 * SECOND);
        let late = s.write(A, 30, 1);
        s.promote(B);
        s.write_and_wait(B, 10, 4);
        s.write_and_wait(B, 40, 4);
        assert!(waits(&s.world, A, early) && waits(&s.world, A, late));
        for peer in [B, C] {
            s.cut(A, peer, false);
        }
        s.pass(30 * SECOND);
        let role = |s: &Scenario, node: usize| s.world.snapshot(node).map(|s| s.role);
        assert_eq!(role(&s, B), Some(Role::Primary));
        if policy == Disconnect {
            assert_eq!(
                role(&s, A),
                Some(Role::Primary),
                "it waits for its operator"
            );
            assert!(waits(&s.world, A, late));
            s.operator.heal(&mut s.world);
        }
        s.done(A, early);
        s.done(A, late);
        s.run_until("the frozen Primary is demoted", |w| {
            w.snapshot(A).is_some_and(|s| s.role == Role::Secondary)
        });
        s.in_sync();
        assert_eq!(role(&s, B), Some(Role::Primary));
        s.read(B, 10, 8);
    }
}

/// The same, but the frozen Primary reaches its successor through the third node only, and nothing is
/// marked: it could follow that node, and is refused because of the Primary behind it.
#[test]
fn a_frozen_primary_gives_way_to_one_behind_its_peer() {
    for seed in [43, 44, 45] {
        let mut s = three_that_retry(seed, OnSuspendedPrimaryOutdated::ForceSecondary);
        s.write_and_wait(A, 10, 8);
        // Nothing is left marked.
        s.pass(20 * SECOND);
        s.flush(A);
        s.pass(20 * SECOND);
        assert_eq!(s.operator.take_over_soon(&mut s.world), Some(A));
        s.world.isolate(A);
        s.pass(30 * SECOND);
        s.promote(B);
        s.read(B, 10, 4);
        s.cut(A, C, false);
        s.run_until("the frozen Primary is demoted", |w| {
            w.snapshot(A).is_some_and(|s| s.role == Role::Secondary)
        });
        s.cut(A, B, false);
        s.in_sync();
        s.read(B, 10, 8);
    }
}
