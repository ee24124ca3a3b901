//! A target of a resync counts for quorum, and remembers for whom.

mod common;

use common::planned_holds;
use lockstep_core::command::Command;
use lockstep_core::options::{
    AfterSplitBrain, OnLoss, OnSuspendedPrimaryOutdated, Protocol, Quorum,
};
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState};
use lockstep_sim::disk::Lose;
use lockstep_sim::extras::Extra;
use lockstep_sim::scenario::{A, B, C, Scenario};
use lockstep_sim::world::{Config, SECOND, World};

const TAKEOVER: Option<&str> = Some("takeover,crash,partition,reset");

/// The majority of a Primary was its own disk and a target. It died, and its predecessor, frozen until then,
/// had a majority with that target and went on without its writes.
#[test]
fn a_target_that_counted_for_a_primary_is_no_target_of_an_older_node() {
    let holds = |seed, faults, requests| {
        planned_holds(Some(3), seed, (TAKEOVER, Vec::new()), faults, requests);
    };
    holds(77_500_034, "0-99", "0-999");
    holds(60_400_172, "0-99", "0-999");
}

/// The same, where the Primary had made a generation, and the target had not heard of it: its line was slow.
#[test]
fn a_primary_waits_until_its_targets_have_noted_what_they_count_for() {
    planned_holds(Some(3), 322, (TAKEOVER, Vec::new()), "0-99", "0-999");
    // Who was asked was whole when it answered, and followed the next generation, which was not durable.
    let kinds = Some("takeover,crash,partition,reset,powercut");
    let seed = 1_898_300_320;
    planned_holds(Some(4), seed, (kinds, Vec::new()), "0-99", "0-999");
}

/// A target of a node with newer data was also the neighbour of an older one, which was not connected to its source.
/// That one had a majority with it, and was promoted: the two parted, though the target knew both.
#[test]
fn a_target_votes_for_nobody_who_is_older_than_its_source() {
    let kinds = || {
        let faults = "handover,handover,diskless,quorum,crash,partition,reset";
        (Some(faults), vec![Extra::Migrations, Extra::Every])
    };
    let seed = 1_898_300_263;
    let (faults, requests) = ("0-3,6-9,11-12,14-15", "9-10,13-21,26-47,49-65");
    planned_holds(Some(2), seed, kinds(), faults, requests);
    planned_holds(Some(3), seed, kinds(), "0-99", "0-999");
}

fn connection(w: &World, node: usize, peer: usize) -> ConnState {
    let snapshot = w.snapshot(node).expect("it is up");
    let mut connections = snapshot.connections.iter();
    let found = connections.find(|c| usize::from(c.peer.0) == peer);
    found.expect("it is configured").state
}

/// C becomes a target of B.
fn make_target(s: &mut Scenario) {
    let invalidate = Command::Invalidate {
        volume: VolumeNr(0),
        from: Some(NodeId(1)),
        reset_bitmap: true,
    };
    s.world.command(C, invalidate);
    s.run_until("C is target of B", |w| {
        let snapshot = w.snapshot(C).expect("it is up");
        let mut peers = snapshot.connections.iter().flat_map(|c| &c.peer_devices);
        peers.any(|p| p.repl_state == ReplState::SyncTarget)
    });
}

/// A was the Primary and is cut off; B is its successor, with C, which it copies, as its majority. B dies,
/// and A meets C.
fn successor_dies() -> (Scenario, u64) {
    let config = Config {
        nodes: 3,
        protocol: Protocol::C,
        blocks: 4096,
        resync_max_kib_s: 500,
        ..Config::small(5)
    };
    let mut s = Scenario::with(
        config,
        |settings| {
            settings.resource.quorum = Quorum::Majority;
            settings.resource.on_no_data_accessible = OnLoss::SuspendIo;
            settings.resource.on_suspended_primary_outdated =
                OnSuspendedPrimaryOutdated::ForceSecondary;
            settings.net.rr_conflict = AfterSplitBrain::RetryConnect;
        },
        false,
    );
    s.write_and_wait(A, 10, 8);
    assert_eq!(s.operator.take_over_soon(&mut s.world), Some(A));
    s.world.isolate(A);
    s.pass(30 * SECOND);
    let held = s.write(A, 30, 1);
    make_target(&mut s);
    s.promote(B);
    s.write_and_wait(B, 10, 4);
    s.crash(B, Lose::InFlight);
    s.cut(A, C, false);
    s.pass(20 * SECOND);
    let disk = |node| s.world.snapshot(node).expect("it is up").devices[0].disk_state;
    assert_eq!(disk(C), DiskState::Inconsistent);
    assert_ne!(connection(&s.world, A, C), ConnState::Connected);
    assert!(s.world.nodes[A].requests.contains_key(&held));
    (s, held)
}

#[test]
fn the_target_waits_for_the_primary_that_it_counted_for() {
    let (mut s, _) = successor_dies();
    // It remembers that over a crash of its own.
    s.crash(C, Lose::Unflushed);
    s.restart(C);
    s.pass(20 * SECOND);
    assert_ne!(connection(&s.world, A, C), ConnState::Connected);
    s.cut(A, B, false);
    s.restart(B);
    s.operator.heal(&mut s.world);
    s.in_sync();
    s.promote(B);
    s.read(B, 10, 4);
}

#[test]
fn the_operator_may_give_up_what_the_target_waits_for() {
    let (mut s, held) = successor_dies();
    let peer = NodeId(0);
    s.world
        .command(C, Command::Disconnect { peer, force: false });
    s.run_until("C has disconnected", |w| {
        connection(w, C, A) == ConnState::StandAlone
    });
    let connect = Command::Connect {
        peer,
        discard_my_data: true,
        tentative: false,
    };
    s.world.command(C, connect);
    s.run_until("A and C meet", |w| {
        connection(w, A, C) == ConnState::Connected
    });
    s.done(A, held);
}

/// A Primary without a disk writes to its only whole disk under a generation that the target of that disk counts for, but
/// has not heard of from its source. The Primary and the source are lost, and the target meets an older node.
#[test]
fn a_primary_without_a_disk_waits_until_the_targets_have_noted_what_they_count_for() {
    let config = Config {
        nodes: 4,
        diskless: 1,
        protocol: Protocol::C,
        blocks: 4096,
        resync_max_kib_s: 500,
        ..Config::small(7)
    };
    let client = 3;
    let mut s = Scenario::with(
        config,
        |settings| {
            settings.resource.quorum = Quorum::Majority;
            settings.resource.on_no_data_accessible = OnLoss::SuspendIo;
            settings.net.rr_conflict = AfterSplitBrain::RetryConnect;
        },
        false,
    );
    s.demote(A);
    s.promote(client);
    s.write_and_wait(client, 10, 8);
    make_target(&mut s);
    s.world.stall(B, C, 0, SECOND);
    s.world.isolate(A);
    s.write_and_wait(client, 10, 4);
    s.crash(B, Lose::InFlight);
    s.crash(client, Lose::InFlight);
    for peer in [B, C, client] {
        s.cut(A, peer, false);
    }
    s.pass(20 * SECOND);
    assert_ne!(connection(&s.world, A, C), ConnState::Connected);
    s.restart(B);
    s.restart(client);
    s.operator.heal(&mut s.world);
    s.in_sync();
    s.promote(B);
    s.read(B, 10, 4);
}
