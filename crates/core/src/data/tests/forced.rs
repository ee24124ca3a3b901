//! `primary --force` where nobody has good data.

use super::*;
use crate::state::Role;

/// Node 0 was away while node 1 wrote; then node 1 was invalidated alone, and both meet.
fn nobody_is_whole(seed: u64) -> World {
    let mut w = clean(seed, 2, Setup::default());
    w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(12));
    w.command(1, Command::Primary { force: true });
    w.pass(Duration::from_secs(1));
    w.write(1, 800, 4096, 2);
    w.pass(Duration::from_secs(1));
    w.command(1, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    w.invalidate();
    assert_eq!(w.disk_state(1), DiskState::Inconsistent, "{:#?}", w.log);
    w.cut = false;
    w.pass(Duration::from_secs(20));
    w
}

#[test]
fn a_node_that_waits_for_an_inconsistent_source_can_be_promoted_by_force() {
    for seed in 1..9 {
        for node in 0..2 {
            let mut w = nobody_is_whole(seed);
            let id = w.command(node, Command::Primary { force: true });
            w.pass_until("the resync", 60, World::in_sync);
            assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
            w.pass(Duration::from_secs(1));
            assert_eq!(w.nodes[node].resource.state.role, Role::Primary);
            let second = if node == 0 { 0 } else { 2 };
            assert_eq!(w.read(node, 800, 4096), vec![second; 4096]);
            w.check_same_data();
            w.check_idle();
        }
    }
}
