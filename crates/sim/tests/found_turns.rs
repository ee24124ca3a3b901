//! Worlds in which two Primaries take turns, with seeds that failed.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

fn holds(seed: u64, kinds: &str) {
    holds_with(seed, kinds, &[]);
}

fn holds_with(seed: u64, kinds: &str, more: &[Extra]) {
    let extras = [&[Extra::Migrations, Extra::Every], more].concat();
    planned_holds(Some(3), seed, (Some(kinds), extras), "0-99", "0-999");
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

/// A Primary and a node that stands by had marks against each other. The latter went by the role that the former
/// had told last, before its turn, both wanted to be source, and when that ended the connection the one that stood by took the other one's
/// disk for Inconsistent, and so itself for quorate.
#[test]
fn who_stands_by_is_no_source_of_the_primary() {
    let kinds = "handover,handover,handover,stall,reset,partition,crash,powercut";
    holds_with(24, kinds, &[Extra::Hot]);
}

/// A node that was to stand by lost the Primary before it was asked, and became Primary by itself. Its users were served
/// while those of the other one, which had not noticed yet, read what they had read before.
#[test]
fn a_guest_that_takes_over_waits_until_the_other_one_is_frozen() {
    let kinds = "handover,handover,handover,stall,reset,partition,crash,powercut";
    let extras = vec![Extra::Migrations, Extra::Every, Extra::Hot];
    for requests in ["0-999", "86,114,116,120"] {
        let kinds = (Some(kinds), extras.clone());
        planned_holds(Some(2), 786_000_004_031, kinds, "0-99", requests);
    }
}
