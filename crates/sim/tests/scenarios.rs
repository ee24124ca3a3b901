//! Stories with a known end, each in a small world.

use lockstep_core::command::Command;
use lockstep_core::options::Protocol;
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState};
use lockstep_sim::disk::Lose;
use lockstep_sim::scenario::{A, B, C, Scenario};
use lockstep_sim::world::{Config, MS, SECOND, World};

#[test]
fn a_full_sync_copies_everything() {
    let config = Config {
        blocks: 2048,
        ..Config::small(1)
    };
    let mut s = Scenario::with(config, |_| {}, true);
    s.write_and_wait(A, 100, 8);
    s.in_sync();
}

#[test]
fn what_was_written_without_the_peer_is_copied_when_it_is_back() {
    let mut s = Scenario::new(2, 2, Protocol::C);
    s.cut(A, B, true);
    s.pass(20 * SECOND);
    for block in 0..20 {
        s.write_and_wait(A, block * 700, 2);
    }
    s.cut(A, B, false);
    s.in_sync();
    s.read(A, 700, 2);
}

#[test]
fn a_secondary_that_loses_power_under_writes_gets_what_its_cache_lost() {
    let mut s = Scenario::new(3, 2, Protocol::C);
    for block in 0..30 {
        s.write(A, block * 50, 1);
        s.pass(MS / 2);
    }
    s.crash(B, Lose::Unflushed);
    s.restart(B);
    s.in_sync();
}

#[test]
fn the_survivor_of_a_primary_has_every_acknowledged_write() {
    let mut s = Scenario::new(4, 2, Protocol::C);
    for block in 0..30 {
        s.write_and_wait(A, block * 50, 1);
    }
    s.crash(A, Lose::Unflushed);
    s.pass(10 * SECOND);
    s.promote(B);
    for block in 0..30 {
        s.read(B, block * 50, 1);
    }
    s.write_and_wait(B, 5, 4);
    s.restart(A);
    s.in_sync();
}

#[test]
fn flushed_writes_survive_a_power_cut_of_everything() {
    let mut s = Scenario::new(5, 2, Protocol::C);
    s.write_and_wait(A, 1000, 8);
    s.flush(A);
    s.write(A, 2000, 8);
    s.crash(A, Lose::Unflushed);
    s.crash(B, Lose::Unflushed);
    s.restart(A);
    s.restart(B);
    s.in_sync();
    s.promote(A);
    s.read(A, 1000, 8);
}

#[test]
fn roles_can_be_handed_over() {
    let mut s = Scenario::new(6, 2, Protocol::C);
    s.write_and_wait(A, 10, 4);
    s.demote(A);
    s.promote(B);
    s.read(B, 10, 4);
    s.write_and_wait(B, 10, 4);
    s.in_sync();
}

#[test]
fn three_nodes_hold_the_same_data() {
    let mut s = Scenario::new(7, 3, Protocol::C);
    for block in 0..20 {
        s.write_and_wait(A, block * 30, 3);
    }
    s.crash(C, Lose::Unflushed);
    s.write_and_wait(A, 40, 9);
    s.restart(C);
    s.in_sync();
}

/// What was written while both disks were good lies in the cache of the old Primary alone when the
/// other disk is detached: it was lost with that node's power.
#[test]
fn the_last_good_copy_is_flushed_when_the_other_disk_goes() {
    for seed in 0..5 {
        let mut s = Scenario::new(seed, 2, Protocol::C);
        s.write_and_wait(A, 100, 4);
        s.demote(A);
        s.promote(B);
        s.operator.detach(&mut s.world, B, 0, true);
        s.pass(500 * MS);
        s.crash(A, Lose::Unflushed);
        s.restart(A);
        s.operator.heal(&mut s.world);
        s.in_sync();
        s.read(B, 100, 4);
    }
}

/// A detach in the middle of an attach ends both; it left the disk Failed for ever.
#[test]
fn a_forced_detach_during_an_attach_leaves_a_disk_that_can_be_attached() {
    for delay in [0, MS / 10, MS / 2, MS] {
        let mut s = Scenario::new(8, 2, Protocol::C);
        s.operator.detach(&mut s.world, B, 0, true);
        s.pass(SECOND);
        s.operator.heal(&mut s.world);
        s.world.run_for(delay);
        s.operator.detach(&mut s.world, B, 0, true);
        s.pass(SECOND);
        s.write_and_wait(A, 10, 4);
        s.operator.heal(&mut s.world);
        s.in_sync();
    }
}

/// The new Primary's disk went away; what it wrote to the peer since then is a generation of its
/// own, so that the returning disk is the one that gets synced, not the one that is believed.
#[test]
fn the_disk_that_a_new_primary_had_lost_is_brought_up_to_date() {
    for seed in 0..8 {
        let mut s = Scenario::new(seed, 2, Protocol::C);
        s.write_and_wait(A, 10, 4);
        s.demote(A);
        s.promote(B);
        s.write_and_wait(B, 10, 4);
        s.operator.detach(&mut s.world, B, 0, false);
        s.pass(SECOND);
        s.write_and_wait(B, 10, 4);
        s.read(B, 10, 4);
        s.operator.heal(&mut s.world);
        s.in_sync();
        s.read(B, 10, 4);
    }
}

/// A write of a Primary without a disk reached the peer's disk after the link was gone, and was not
/// marked towards the Primary's own disk, because the peer did not know any more that it had none.
#[test]
fn a_write_of_a_diskless_primary_is_marked_also_when_the_link_breaks_meanwhile() {
    let mut reached = 0;
    for delay in 0..300 {
        let mut s = Scenario::new(delay / 50, 2, Protocol::C);
        s.operator.detach(&mut s.world, A, 0, false);
        s.pass(SECOND);
        s.write_and_wait(A, 10, 4);
        s.write(A, 12_000, 2);
        s.operator.heal(&mut s.world);
        s.world.run_for(delay % 50 * MS / 50);
        s.world.sever(A, B);
        s.pass(SECOND / 2);
        let written = s.world.nodes[B].disks[0].content[12_000] != 0;
        reached += u32::from(written);
        let b = s.world.snapshot(B).expect("B is up");
        let marked = b.connections[0].peer_devices[0].out_of_sync_sectors;
        assert_eq!(marked, if written { 48 } else { 32 });
    }
    assert!(reached > 0, "some links lived long enough");
}

/// The peer of a Primary may be back at once: requests may wait for it.
#[test]
fn a_lost_connection_is_made_again_without_a_long_pause() {
    let mut s = Scenario::new(9, 2, Protocol::C);
    let connected = |w: &World| {
        w.snapshot(A)
            .is_some_and(|s| s.connections[0].state == ConnState::Connected)
    };
    s.world.reset(A, B);
    s.run_until("the loss", |w| !connected(w));
    let lost = s.world.now;
    s.run_until("the next connection", connected);
    let took = s.world.now - lost;
    assert!(took < 300 * MS, "{} ms", took / MS);
    s.in_sync();
}

/// A forced promotion for a volume without good data made a new generation of the good one too,
/// which its peers took for a split brain.
#[test]
fn a_forced_promotion_leaves_volumes_with_good_data_alone() {
    let config = Config {
        volumes: 2,
        nodes: 3,
        blocks: 2048,
        ..Config::small(5)
    };
    let mut s = Scenario::with(config, |_| {}, false);
    s.write_and_wait(A, 5, 4);
    s.demote(A);
    let nodes = [A, B, C];
    let peers = |node| (0..3).map(NodeId).filter(move |n| usize::from(n.0) != node);
    for node in nodes {
        for peer in peers(node) {
            let force = false;
            s.world.command(node, Command::Disconnect { peer, force });
            s.pass(100 * MS);
        }
    }
    let volume = VolumeNr(1);
    for node in nodes {
        let command = Command::Invalidate {
            volume,
            from: None,
            reset_bitmap: true,
        };
        s.world.command(node, command);
        s.pass(100 * MS);
    }
    for node in nodes {
        for peer in peers(node) {
            let connect = Command::Connect {
                peer,
                discard_my_data: false,
                tentative: false,
            };
            s.world.command(node, connect);
        }
    }
    let connected = |w: &World| {
        nodes.iter().all(|node| {
            let all = w.snapshot(*node).map(|s| s.connections);
            all.is_some_and(|all| all.iter().all(|c| c.state == ConnState::Connected))
        })
    };
    s.run_until("the nodes are connected", connected);
    let disk = |w: &World, node, index: usize| {
        let snapshot = w.snapshot(node);
        snapshot.map(|s| s.devices[index].disk_state)
    };
    for node in nodes {
        assert_eq!(disk(&s.world, node, 1), Some(DiskState::Inconsistent));
    }
    s.pass(5 * SECOND);
    for node in nodes {
        assert_eq!(disk(&s.world, node, 0), Some(DiskState::UpToDate));
    }
    s.world.command(A, Command::Primary { force: true });
    s.run_until("the data of A are everywhere", |w| {
        assert!(connected(w), "a connection was lost");
        let good = |node, index| disk(w, node, index) == Some(DiskState::UpToDate);
        assert!(nodes.iter().all(|node| good(*node, 0)), "nothing to copy");
        nodes.iter().all(|node| good(*node, 1))
    });
    s.in_sync();
}
