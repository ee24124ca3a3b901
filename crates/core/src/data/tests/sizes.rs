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
