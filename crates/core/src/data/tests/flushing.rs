//! Flushes that reach what peers hold of other nodes (semantics.md, 15.8).

use super::*;
use crate::state::Role;

/// A node without a disk does not get what the other Primary writes, but reads it.
#[test]
fn a_client_beside_another_primary_asks_each_time() {
    let mut setup = Setup {
        diskless: Some(0),
        ..Setup::default()
    };
    setup.net.allow_two_primaries = true;
    let mut w = clean(3, 2, setup);
    w.command(0, Command::Primary { force: false });
    w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(2));
    for index in [0, 1] {
        assert_eq!(w.nodes[index].resource.state.role, Role::Primary);
    }
    for round in 1..4 {
        let written = w.write(1, 0, 4096, round);
        w.pass(Duration::from_secs(1));
        assert!(w.done(1, written));
        assert_eq!(w.read(0, 0, 4096), vec![round; 4096]);
        // The first use makes a generation, whose superblock is written with a flush.
        assert!(round == 1 || !w.nodes[1].data.dirty.is_empty());
        let flush = w.request(0, RequestKind::Flush, 0, 0, 0);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, flush), "{:#?}", w.log);
        assert!(w.nodes[1].data.dirty.is_empty(), "{round}");
    }
    w.check_idle();
}
