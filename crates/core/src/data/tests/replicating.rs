//! Resync without replication: marks instead of writes while the bulk is copied (semantics.md, 19.3).

use super::*;

fn setup(without_replication: bool) -> Setup {
    let mut setup = Setup::default();
    setup.peer.resync_without_replication = without_replication;
    setup.peer.c_max_rate_kib_s = 4096;
    setup
}

fn count(w: &World, name: &str) -> u64 {
    w.packets.get(name).copied().unwrap_or(0)
}

/// Node 1 is copied anew from node 0, which is written meanwhile, each block of the first half
/// once and some of them again and again.
fn written_during_resync(w: &mut World) {
    for n in 0..4096 / 2 / 16 {
        w.write(0, n * 16 * 8, 4096, n as u8);
    }
    w.pass(Duration::from_secs(1));
    w.invalidate();
    w.pass_until("a resync", 20, |w| w.repl(1, 0) == ReplState::SyncTarget);
    w.packets.clear();
    for n in 0..60 {
        w.write(0, (n % 20) * 72, 8192, n as u8 + 100);
        w.pass(Duration::from_millis(20));
    }
    assert_eq!(
        w.repl(1, 0),
        ReplState::SyncTarget,
        "too fast for this test"
    );
}

fn check_end(w: &mut World) {
    w.pass_until("the end", 100, World::in_sync);
    w.pass(Duration::from_secs(3));
    w.check_idle();
    w.check_same_data();
    for (a, b) in [(0, 1), (1, 0)] {
        assert_eq!(w.bits(a, b), 0, "{:#?}", w.log);
    }
}

#[test]
fn a_target_gets_marks_and_asks_for_writes_before_the_end() {
    for seed in 700..720 {
        let mut w = clean(seed, 2, setup(true));
        written_during_resync(&mut w);
        assert_eq!(count(&w, "data"), 0, "{:?}", w.packets);
        assert!(count(&w, "out of sync") >= 20, "{:?}", w.packets);
        assert_eq!(count(&w, "enable replication"), 0);
        check_end(&mut w);
        assert_eq!(count(&w, "enable replication"), 1, "{:?}", w.packets);
        w.write(0, 800, 4096, 77);
        w.pass(Duration::from_secs(1));
        assert_eq!(count(&w, "data"), 1, "{:?}", w.packets);
        w.check_same_data();
    }
}

#[test]
fn without_the_option_a_target_gets_all_writes() {
    let mut w = clean(720, 2, setup(false));
    written_during_resync(&mut w);
    assert_eq!(count(&w, "data"), 60, "{:?}", w.packets);
    assert_eq!(count(&w, "out of sync"), 0);
    check_end(&mut w);
    assert_eq!(count(&w, "enable replication"), 0);
}

/// Node 1 is copied from node 2 while node 0 writes: the writes go to node 2 alone, until the last pass.
#[test]
fn a_primary_beside_the_source_sends_marks_as_well() {
    for seed in 721..735 {
        let mut w = clean(seed, 3, setup(true));
        w.invalidate_from(1, 2);
        w.pass_until("a resync", 20, |w| w.repl(1, 2) == ReplState::SyncTarget);
        w.packets.clear();
        for n in 0..20 {
            w.write(0, n * 72, 4096, n as u8);
            w.pass(Duration::from_millis(10));
        }
        assert!(count(&w, "out of sync") >= 10, "{:?}", w.packets);
        assert_eq!(count(&w, "data"), 20, "{:?}", w.packets);
        check_end(&mut w);
        assert_eq!(count(&w, "enable replication"), 2, "{:?}", w.packets);
        w.packets.clear();
        w.write(0, 800, 4096, 77);
        w.pass(Duration::from_secs(1));
        assert_eq!(count(&w, "data"), 2, "{:?}", w.packets);
        w.check_same_data();
        for (a, b) in [(0, 2), (1, 2), (2, 0), (2, 1)] {
            assert_eq!(w.bits(a, b), 0, "{:#?}", w.log);
        }
    }
}

#[test]
fn a_primary_that_hands_over_during_a_resync_leaves_no_mark_behind() {
    for seed in 741..761 {
        let mut w = clean(seed, 3, setup(true));
        w.invalidate_from(1, 2);
        w.pass_until("a resync", 20, |w| w.repl(1, 2) == ReplState::SyncTarget);
        for n in 0..seed - 700 {
            w.write(0, n * 72, 4096, n as u8);
            w.pass(Duration::from_millis(5));
        }
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_millis(50));
        w.command(2, Command::Primary { force: false });
        w.pass(Duration::from_millis(50));
        for n in 0..20 {
            w.write(2, n * 144, 4096, n as u8 + 150);
            w.pass(Duration::from_millis(5));
        }
        check_end(&mut w);
    }
}

#[test]
fn where_two_nodes_write_all_writes_are_wanted() {
    let mut setup = setup(true);
    setup.net.allow_two_primaries = true;
    let mut w = clean(761, 2, setup);
    written_during_resync(&mut w);
    assert_eq!(count(&w, "out of sync"), 0, "{:?}", w.packets);
    check_end(&mut w);
}
