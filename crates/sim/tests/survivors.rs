//! Two nodes lose their Primary one after the other: whatever lies between, one of them may be promoted without it.

use lockstep_core::options::Protocol;
use lockstep_sim::scenario::{A, B, C, Scenario};
use lockstep_sim::world::{MS, SECOND};

const US: u64 = MS / 1000;

/// The Primary's links to the others are cut, the second one so much later.
fn lost_apart(seed: u64, apart: u64) {
    let mut s = Scenario::new(seed, 3, Protocol::C);
    for block in 0..5 {
        s.write_and_wait(A, block * 3, 2);
    }
    s.pass(SECOND);
    s.cut(A, B, true);
    s.world.reset(A, B);
    s.world.run_for(apart / 2);
    s.write(A, 40, 2);
    s.world.run_for(apart / 2);
    s.write(A, 50, 2);
    s.cut(A, C, true);
    s.world.reset(A, C);
    s.pass(10 * SECOND);
    let disks = [B, C].map(|node| {
        let snapshot = s.world.snapshot(node).unwrap();
        format!("{:?}", snapshot.devices[0].disk_state)
    });
    assert!(
        disks.contains(&"UpToDate".into()),
        "seed {seed}, {apart} ns apart: {disks:?}"
    );
}

#[test]
fn one_of_two_survivors_stays_up_to_date_however_far_apart_their_losses_are() {
    for seed in 0..3 {
        for step in 0..600 {
            lost_apart(seed, step * 50 * US);
        }
    }
}
