//! Planned worlds in which a Primary without a disk wrote to one node while a majority was connected behind it.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

#[track_caller]
fn holds(seed: u64, faults: &str, requests: &str) {
    const KINDS: &str = "diskless,quorum,crash,partition,reset";
    let kinds = (Some(KINDS), vec![Extra::Every]);
    planned_holds(Some(5), seed, kinds, faults, requests);
}

/// The client had the quorum of the only node that it reached. Its writes were acknowledged when that one had them,
/// and the others, a majority, still called themselves UpToDate: without that node they would have gone on without
/// the writes (semantics.md, 10.8 and 11.1).
#[test]
fn a_borrowed_quorum_counts_once_the_nodes_behind_it_are_outdated() {
    for (seed, faults, requests) in [
        (95_000_986, "3,9,17", "64,69"),
        (95_001_218, "1,10-11", "316"),
        (98_000_862, "6,10", "11-12"),
        (98_007_068, "0,5-7", "114,117,124"),
        (99_000_162, "0-99", "0-999"),
    ] {
        holds(seed, faults, requests);
        holds(seed, "0-99", "0-999");
    }
}

/// A target ended its resync while the client made a generation, and its source heard of that a moment too late: the
/// client counted on a disk that did not know what its writes were called.
#[test]
fn a_target_that_ends_beside_a_new_generation_is_told_its_name() {
    holds(6008, "1-5,9,11-12", "8-12,16,18,32,40-41,45");
    holds(6008, "0-99", "0-999");
}

/// Three targets were each other's sources, and paused. The fourth node had everything, but was compared with none of
/// them, because they had a resync already.
#[test]
fn targets_that_wait_for_each_other_are_compared_with_a_whole_disk() {
    holds(88_500_065, "0,2,4-6,14,17", "0,12,14");
    holds(88_500_065, "0-99", "0-999");
}

/// A target asked a source that was Consistent itself for blocks behind a write of the client, which that source never
/// got; and the source was compared with nobody while it was one.
#[test]
fn a_source_that_is_up_to_date_comes_first() {
    holds(88_500_066, "0,2-3,5,9-12", "0,313-314,330,332");
    holds(88_500_066, "0-99", "0-999");
}
