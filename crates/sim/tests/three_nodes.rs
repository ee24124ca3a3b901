//! Worlds of three nodes that once failed; each names the bug that it showed.

use lockstep_sim::swarm::{FAULTS, Limits, run};

/// Runs the world of a seed with three nodes and only the faults with these names.
#[track_caller]
fn holds(seed: u64, faults: &str) {
    let faults = FAULTS
        .iter()
        .filter(|(_, name)| faults.split(',').any(|word| word == *name))
        .map(|(fault, _)| *fault)
        .collect();
    let limits = Limits {
        nodes: Some(3),
        faults: Some(faults),
        ..Limits::default()
    };
    let outcome = run(seed, &limits);
    assert_eq!(outcome.violation, None, "seed {seed}: {}", outcome.shape);
}

const KILLS_AND_LINKS: &str = "crash,reset,partition,stall";

/// The news of who is in sync was dropped because of a write in the same extent, and the marks
/// between two nodes that were both copied from the third stayed for ever.
#[test]
fn marks_between_two_targets_of_one_source_go() {
    holds(43, KILLS_AND_LINKS);
    holds(1, KILLS_AND_LINKS);
}
