//! Flushes that reach what peers hold of other nodes (semantics.md, 15.8).

use super::*;
use crate::state::Role;

/// Nothing reaches this node any more.
fn stalls(w: &mut World, node: usize) {
    w.stalled = Some(node);
    w.stalled_acks = true;
}

/// The peer was asked when this node became Primary, or they met: a flush of what it has not sent waits for nothing.
#[test]
fn the_first_flush_waits_for_no_peer_that_is_cut_off_now() {
    for promoted in [false, true] {
        let mut w = clean(3, 3, Setup::default());
        if promoted {
            w.command(0, Command::Secondary { force: false });
            w.pass(Duration::from_secs(1));
            assert_eq!(w.nodes[0].resource.state.role, Role::Secondary);
            w.command(0, Command::Primary { force: false });
        } else {
            w.cut_links_between(0, 1);
        }
        w.pass(Duration::from_secs(2));
        assert!(w.in_sync());
        assert_eq!(w.nodes[0].resource.state.role, Role::Primary);
        // The generation that its loss is owed.
        let written = w.write(0, 0, 4096, 7);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, written));
        stalls(&mut w, 1);
        let flush = w.request(0, RequestKind::Flush, 0, 0, 0);
        w.pass(Duration::from_millis(100));
        assert!(w.done(0, flush), "{promoted} {:#?}", w.log);
        w.stalled = None;
        w.pass(Duration::from_secs(1));
        w.check_idle();
    }
}

/// A resync ends while a write that its target got, too, is not completed: that one's epoch ends before the question.
#[test]
fn a_peer_that_becomes_whole_under_a_write_is_asked_in_an_epoch_of_its_own() {
    let mut setup = Setup::default();
    setup.peer.resync_without_replication = false;
    let mut w = clean(3, 3, setup);
    let command = Command::Invalidate {
        volume: VOLUME,
        from: Some(node_id(0)),
        reset_bitmap: true,
    };
    w.command(1, command);
    while w.repl(0, 1) != ReplState::SyncSource {
        assert!(w.step(), "{:#?}", w.log);
    }
    w.hanging.node = Some(2);
    let id = w.write(0, 0, 4096, 7);
    w.pass_until("the resync has ended", 20, |w| {
        w.repl(0, 1) == ReplState::Established
    });
    assert!(!w.done(0, id));
    w.pass(Duration::from_secs(1));
    assert!(!w.log.iter().any(|text| text.contains("barrier ack")));
    w.hanging.node = None;
    let held = core::mem::take(&mut w.hanging.held);
    w.todo.extend(held);
    w.pass(Duration::from_secs(2));
    assert!(w.done(0, id) && w.in_sync(), "{:#?}", w.log);
    w.check_idle();
}

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
