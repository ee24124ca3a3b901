//! A few random worlds, and that a seed fixes everything.

use lockstep_sim::swarm::{Limits, run};

#[test]
fn worlds_without_trouble_stay_in_sync() {
    let limits = Limits {
        nodes: Some(2),
        max_faults: Some(0),
        max_requests: Some(200),
        ..Limits::default()
    };
    for seed in 0..6 {
        let outcome = run(seed, &limits);
        assert_eq!(outcome.violation, None, "seed {seed}: {}", outcome.shape);
        assert!(outcome.acked > 0);
    }
}

#[test]
fn a_seed_gives_the_same_world_twice() {
    let limits = Limits {
        max_requests: Some(100),
        ..Limits::default()
    };
    let (first, second) = (run(2, &limits), run(2, &limits));
    assert_eq!(first.fingerprint, second.fingerprint);
    assert_eq!(first.steps, second.steps);
    assert_ne!(first.fingerprint, run(3, &limits).fingerprint);
}
