//! Nodes with disks of unlike sizes, connected one after the other (semantics.md, 22).

use super::*;

/// Node 0's disk is the smallest.
fn unlike(seed: u64, count: usize) -> World {
    let mut w = World::stopped(seed, count, Setup::default());
    w.nodes[0].data_bytes = SIZE / 2;
    w
}

#[test]
fn a_smaller_primary_far_away_sets_the_size_of_a_node_that_joins() {
    for seed in 1..9 {
        let mut w = unlike(seed, 3);
        w.apart = vec![(0, 2)];
        w.start(0);
        w.pass(Duration::from_secs(1));
        w.command(0, Command::Primary { force: true });
        w.pass(Duration::from_secs(1));
        w.start(1);
        w.pass(Duration::from_secs(4));
        w.start(2);
        w.pass_until("the far node", 20, |w| {
            w.nodes[2].resource.state.conn(node_id(1)) == ConnState::Connected
        });
        w.apart.clear();
        w.pass_until("the resync", 30, World::in_sync);
        w.check_same_data();
    }
}

fn size(w: &World, node: usize) -> u64 {
    w.nodes[node].resource.devices[&VOLUME].size_sectors
}

/// Nodes 1 and 2 are larger than node 0 and know each other; node 0 comes as a Primary, and meets node 1.
fn larger_ones_meet_a_primary(seed: u64, with_data: bool) -> World {
    let mut w = unlike(seed, 3);
    w.apart = vec![(0, 1), (0, 2)];
    for node in 0..3 {
        w.start(node);
    }
    w.pass(Duration::from_secs(3));
    if with_data {
        w.command(2, Command::Primary { force: true });
        w.pass(Duration::from_secs(1));
    }
    w.command(0, Command::Primary { force: true });
    w.pass(Duration::from_secs(1));
    assert!(size(&w, 0) < size(&w, 1) && size(&w, 1) == size(&w, 2));
    w.apart = vec![(0, 2)];
    w.pass(Duration::from_secs(5));
    w
}

#[test]
fn larger_nodes_without_data_take_the_size_of_one_that_has_some() {
    for seed in 1..9 {
        let mut w = larger_ones_meet_a_primary(seed, false);
        let conn = w.nodes[0].resource.state.conn(node_id(1));
        assert_eq!(conn, ConnState::Connected, "seed {seed} {:#?}", w.log);
        // Node 2 never meets node 0.
        let sizes = [1, 2].map(|node| size(&w, node));
        assert_eq!(sizes, [size(&w, 0); 2], "seed {seed} {:#?}", w.log);
        w.apart.clear();
        w.pass_until("the resync", 30, World::in_sync);
        w.check_same_data();
    }
}

#[test]
fn larger_nodes_with_data_refuse_a_smaller_one() {
    for seed in 1..9 {
        let w = larger_ones_meet_a_primary(seed, true);
        for (node, peer) in [(0, 1), (1, 0)] {
            let conn = w.nodes[node].resource.state.conn(node_id(peer));
            assert_eq!(conn, ConnState::StandAlone, "seed {seed} {:#?}", w.log);
        }
        assert!(size(&w, 0) < size(&w, 1) && size(&w, 1) == size(&w, 2));
    }
}
