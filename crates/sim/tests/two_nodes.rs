//! Worlds of two nodes that once failed; each names the bug that it showed.

use lockstep_sim::swarm::{Limits, run};

/// Runs the world of a seed with two nodes and the faults that the seed chooses.
#[track_caller]
fn holds(seed: u64) {
    let limits = Limits {
        nodes: Some(2),
        ..Limits::default()
    };
    let outcome = run(seed, &limits);
    assert_eq!(outcome.violation, None, "seed {seed}: {}", outcome.shape);
}

/// A Primary without a disk read from its peer a block whose write the peer had received, and by
/// protocol B acknowledged, but not yet written.
#[test]
fn a_remote_read_finds_what_was_received_before_it() {
    holds(789);
    holds(544);
}
