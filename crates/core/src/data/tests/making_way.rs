//! `c-min-rate`: a resync makes way for an application.

use super::*;

/// 8 MiB behind, of which 10 are copied in a second, and the resync has begun.
fn behind(seed: u64) -> World {
    let mut setup = Setup::default();
    setup.peer.c_max_rate_kib_s = 10 << 10;
    let mut w = clean(seed, 2, setup);
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(1));
    for n in 0..128 {
        w.write(0, 16384 + n * 128, 65536, 1);
        w.run();
    }
    w.pass(Duration::from_secs(1));
    w.cut = false;
    w.pass_until("the start", 60, |w| w.repl(0, 1) == ReplState::SyncSource);
    w
}

#[test]
fn a_source_makes_way_for_writes_that_its_target_is_not_sent() {
    let mut w = behind(90);
    let before = w.bits(0, 1);
    // 10 MiB/s, of what is marked already most of the time: the target hears next to nothing.
    for _ in 0..20 {
        for n in 0..16 {
            w.write(0, 16384 + n * 128, 65536, 7);
        }
        w.pass(Duration::from_millis(100));
    }
    assert_eq!(w.repl(0, 1), ReplState::SyncSource);
    assert!(w.bits(0, 1) > before / 4, "{} of {before}", w.bits(0, 1));
    w.pass_until("the end, beside nobody", 10, World::in_sync);
    w.pass(Duration::from_secs(3));
    w.check_idle();
    w.check_same_data();
}

#[test]
fn beside_nobody_a_resync_takes_what_it_can_get() {
    let mut w = behind(91);
    w.pass_until("the end", 3, World::in_sync);
    w.check_same_data();
}
