//! Worlds in which two Primaries take turns, with seeds that failed.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

fn holds(seed: u64, kinds: &str) {
    let kinds = (Some(kinds), vec![Extra::Migrations, Extra::Every]);
    planned_holds(Some(3), seed, kinds, "0-99", "0-999");
}

/// A write of a lost connection was answered after the numbers of acks had begun anew, and the next connection, which
/// lets both ends write, waited in vain for that ack.
#[test]
fn answers_that_nobody_gets_are_not_counted_in_the_next_connection() {
    holds(50, "handover,handover,handover,reset,partition,crash");
}

/// A Primary was the target of a resync and wrote over blocks that were marked. At the end of the resync its disk was
/// called UpToDate with these writes in its cache, and with the power went what had been flushed before.
#[test]
fn a_primary_flushes_what_it_wrote_over_older_data_before_its_resync_ends() {
    holds(
        125,
        "handover,handover,diskless,quorum,crash,partition,reset",
    );
}

/// Requests that had begun waited until the turn comes back, and the turn waited for them.
#[test]
fn requests_that_have_begun_go_on_while_the_turn_passes() {
    holds(3, "handover,handover,stall");
    holds(28, "handover,handover,stall");
}
