//! Resync without replication: marks instead of writes while the bulk is copied (semantics.md, 19.3).

use super::*;
use lockstep_format::wire::packet::PeersInSync;

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

#[test]
fn a_target_of_a_third_node_misses_no_mark_of_the_primary() {
    for seed in 721..741 {
        let mut w = clean(seed, 3, setup(true));
        w.invalidate_from(1, 2);
        w.pass_until("a resync", 20, |w| w.repl(1, 2) == ReplState::SyncTarget);
        w.packets.clear();
        let mut n = 0;
        while w.repl(1, 2) == ReplState::SyncTarget && n < 2000 {
            w.write(0, (n % 50) * 72, 4096, n as u8);
            w.pass(Duration::from_millis(10));
            n += 1;
        }
        // To both peers, which have to write now.
        assert_eq!(count(&w, "enable replication"), 2, "{:?}", w.packets);
        assert!(count(&w, "out of sync") > 20, "{:?}", w.packets);
        check_end(&mut w);
        assert_eq!((w.bits(0, 2), w.bits(2, 1), w.bits(1, 2)), (0, 0, 0));
    }
}

/// A packet that node `from` sent some time ago, and that comes now.
fn late_word(w: &mut World, from: usize, to: usize, mask: &[usize]) {
    let of = |(_, nodes): &(&u64, &(usize, usize))| **nodes == (from, to) || **nodes == (to, from);
    let link = *w.links.iter().find(of).unwrap().0;
    let word = PeersInSync {
        sector: Sector(0),
        mask: mask.iter().map(|node| node_id(*node)).collect(),
        size_bytes: 4 << 20,
    };
    let packet = Input::Packet {
        peer: node_id(from),
        link: LinkId(link),
        stream: Stream::Control,
        volume: VOLUME,
        packet: Packet::PeersInSync(word),
        payload: None,
    };
    w.input(to, packet);
}

#[test]
fn a_word_that_is_older_than_a_mark_clears_it_nowhere() {
    for seed in 771..781 {
        let mut w = clean(seed, 4, setup(true));
        w.invalidate_from(1, 2);
        // The first extent has been copied; one is under way behind it.
        w.pass_until("a resync", 20, |w| w.repl(1, 2) == ReplState::SyncTarget);
        w.pass(Duration::from_secs(2));
        let id = w.write(0, 8, 4096, 7);
        w.pass_until("the write", 1, |w| w.done(0, id));
        w.pass(Duration::from_millis(300));
        assert_eq!(
            w.repl(1, 2),
            ReplState::SyncTarget,
            "too fast for this test"
        );
        let marked = |w: &World| [(1, 0), (1, 2), (3, 1)].map(|(a, b)| w.bits(a, b));
        let before = marked(&w);
        late_word(&mut w, 2, 1, &[0, 1]);
        late_word(&mut w, 3, 1, &[1, 2]);
        late_word(&mut w, 2, 3, &[1, 3]);
        let after = marked(&w);
        for (before, after) in before.into_iter().zip(after) {
            assert!(before > 0 && after >= before, "{before} {after}");
        }
        check_end(&mut w);
        for a in 0..4 {
            let left: u64 = (0..4).filter(|b| *b != a).map(|b| w.bits(a, b)).sum();
            assert_eq!(left, 0, "node {a}: {:#?}", w.log);
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
