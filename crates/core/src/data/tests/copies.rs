//! What counts as a copy of a write: one that no resync overwrites.

use super::*;
use crate::options::OnLoss;

/// All but node 1 are to copy everything from it, and wait; then its disk refuses a write. When it
/// comes back, the write is made again beside the resync that may overwrite it.
fn source_refuses(seed: u64, count: usize) {
    let options = ResourceOptions {
        on_no_data_accessible: OnLoss::SuspendIo,
        ..ResourceOptions::default()
    };
    let setup = Setup {
        options,
        ..Setup::default()
    };
    let mut w = clean(seed, count, setup);
    let (peer, volume) = (node_id(1), VOLUME);
    for node in (0..count).filter(|node| *node != 1) {
        w.command(node, Command::PauseSync { peer, volume });
        w.invalidate_from(node, 1);
        assert_eq!(w.disk_state(node), DiskState::Inconsistent, "{:#?}", w.log);
    }
    w.nodes[1].fail_data_writes = true;
    let id = w.write(0, 8, 4096, 77);
    w.pass(Duration::from_secs(3));
    assert_eq!(w.disk_state(1), DiskState::Diskless, "{:#?}", w.log);
    assert_eq!(w.nodes[0].completed.get(&id), None, "it waits for data");
    w.nodes[1].fail_data_writes = false;
    w.attach(1);
    for node in (0..count).filter(|node| *node != 1) {
        w.command(node, Command::ResumeSync { peer, volume });
    }
    w.pass_until("all are in sync", 120, World::in_sync);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id), "{:#?}", w.log);
    w.check_same_data();
    w.check_idle();
    assert_eq!(w.read(0, 8, 4096), vec![77; 4096], "{seed}");
}

#[test]
fn a_copy_on_a_disk_that_is_being_resynced_completes_no_write() {
    for seed in 0..40 {
        source_refuses(seed, 2);
    }
}

#[test]
fn nor_do_copies_on_several_of_them() {
    for seed in 0..40 {
        source_refuses(seed, 3);
    }
}

/// The first one may not have marked anything yet, on a slow disk: it was called done, and nothing was done.
#[test]
fn a_second_invalidate_is_refused_from_the_first_moment_on() {
    for seed in 0..20 {
        let mut w = clean(seed, 2, Setup::default());
        let invalidate = || Command::Invalidate {
            volume: VOLUME,
            from: None,
            reset_bitmap: true,
        };
        let first = w.command(1, invalidate());
        while !w.answers.contains_key(&first) {
            assert!(w.step(), "the first one is answered: {:#?}", w.log);
        }
        let second = w.command(1, invalidate());
        w.pass_until("an answer", 5, |w| w.answers.contains_key(&second));
        assert!(w.answers[&first].is_ok(), "{:#?}", w.log);
        let Err(error) = &w.answers[&second] else {
            panic!("seed {seed}: {:#?}", w.log);
        };
        assert_eq!(
            error.code,
            crate::command::ErrorCode::RESYNC_RUNNING,
            "seed {seed}"
        );
        w.pass_until("all are in sync", 120, World::in_sync);
        w.check_same_data();
    }
}
