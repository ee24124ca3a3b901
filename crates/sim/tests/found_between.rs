//! Planned worlds that failed once, of a node without a disk between disks that do not meet each other, and
//! what was wrong in them.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

const SHUFFLED: &str = "shuffle,diskless,crash";
const TAKEN_OVER: &str = "diskless,crash,partition,reset,takeover";

/// A client was promoted between two UpToDate disks of which one was an ancestor of the other, and read from
/// the older one. Simulated operators had known better before, as no real one could.
#[test]
fn a_client_does_not_read_from_an_ancestor() {
    let extras = || vec![Extra::Every, Extra::Hot];
    for seed in [8084, 8194] {
        planned_holds(Some(3), seed, (Some(SHUFFLED), extras()), "0-99", "0-999");
    }
}

/// A Primary without a disk met a peer again, told it that it had all writes, and only then sent it the one that
/// had been frozen. A target of that peer asked for the block in between, and overwrote the write with what had
/// been there before.
#[test]
fn frozen_writes_do_not_count_as_sent() {
    let kinds = (Some(TAKEN_OVER), Vec::new());
    planned_holds(Some(3), 5331, kinds, "0,3-4,6", "76-77,133-134,141");
}

/// A write of a Primary without a disk was frozen, for want of quorum, when its only follower had it. That
/// follower had brought another node up to date before, which then connected, gave quorum, and counted as whole.
#[test]
fn who_has_no_part_in_a_frozen_write_is_not_whole() {
    let kinds = (Some(TAKEN_OVER), Vec::new());
    planned_holds(Some(3), 5212, kinds, "0-1,4,6", "150,153");
}

/// A check took a tie-breaker for gone before its Primary could know that it had died.
#[test]
fn a_tie_breaker_counts_until_its_loss_is_noticed() {
    let kinds = (Some("diskless,quorum,crash,partition,reset"), Vec::new());
    planned_holds(Some(3), 30748, kinds, "0-99", "0-999");
}

/// A Primary without a disk of its own attached one. What it marked towards an absent disk, as its last writes
/// were settled, was not durable when the resync took the same blocks.
#[test]
fn a_resync_waits_for_marks_that_were_made_before_its_reply() {
    planned_holds(Some(4), 8_300_222, (None, Vec::new()), "0,2-3", "0-99");
}

/// A node without a Primary of its own left the comparison with the Primary to that one, which it took for Outdated.
#[test]
fn a_primary_that_seems_outdated_is_compared_with() {
    planned_holds(Some(4), 33, (None, Vec::new()), "6,13-19", "none");
}
