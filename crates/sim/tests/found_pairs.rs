//! Planned worlds of two nodes that failed once, and what was wrong in them.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

fn holds(seed: u64, kinds: Option<&str>, extras: Vec<Extra>, faults: &str, requests: &str) {
    planned_holds(Some(2), seed, (kinds, extras), faults, requests);
}

const ALL: (&str, &str) = ("0-99", "0-999");

/// A write of the source took the place of a block that was still to be copied, and whose older data applications
/// had flushed. The target was called UpToDate while that write lay in its disk's cache alone.
#[test]
fn a_target_flushes_what_the_source_wrote_before_it_is_up_to_date() {
    const KINDS: &str = "outdate,regroup,regroup,partition,disconnect,handover,crash";
    const REQUESTS: &str =
        "0-2,5-13,16-20,34-39,42-49,51-57,63,65,67-68,90,92,95,105-106,109-112,114-123,125-127,131";
    let every = || vec![Extra::Every];
    holds(99_005_226, Some(KINDS), every(), "0,4-5,7", REQUESTS);
    holds(99_005_226, Some(KINDS), every(), ALL.0, ALL.1);
}

/// With protocol A a durable write was acknowledged when the Primary's own disk had it. That disk was detached, the
/// peer took over the generation that says so, and lost the write, which it had received only, with its power.
#[test]
fn a_detach_waits_until_the_peer_has_what_was_acknowledged() {
    holds(52_100_108, None, vec![], "0,3", "0-15,17-21,23-28,40");
    holds(52_100_108, None, vec![], ALL.0, ALL.1);
}

/// A handler kept the source in the exchange of bitmaps, when its target had begun already. What the target wrote as
/// Primary counted as kept by its own disk, which was to be overwritten, and was not made durable at the source.
#[test]
fn a_source_that_waits_for_a_handler_holds_the_last_copy() {
    holds(1040, None, vec![Extra::Handlers], "0-3,5,7", "3-23");
    holds(1040, None, vec![Extra::Handlers], ALL.0, ALL.1);
}

/// The same, and the target had nothing to ask for: it called itself UpToDate, while the source told only marks of
/// what it wrote.
#[test]
fn a_target_does_not_end_before_its_source_has_begun() {
    let extras = || vec![Extra::Secret, Extra::Handlers];
    holds(46, None, extras(), "0,17", "1");
    holds(46, None, extras(), ALL.0, ALL.1);
}

/// The same, and the target had asked for the source's writes: its request was forgotten when the source began, so
/// that writes went on as marks to a disk that was UpToDate in the end.
#[test]
fn a_request_for_writes_that_comes_early_is_kept() {
    let extras = || vec![Extra::Secret, Extra::Handlers];
    holds(56, None, extras(), "0-1", "150-158");
    holds(56, None, extras(), ALL.0, ALL.1);
}

/// A node whose disk was detached could not leave a Primary with `fencing`: it would have had to be outdated, and has
/// nothing to outdate. Its disk comes back as an outdated one.
#[test]
fn a_node_without_its_disk_leaves_a_primary_that_fences() {
    let extras = || vec![Extra::Secret, Extra::Handlers];
    holds(7, None, extras(), "15,18", "none");
    holds(7, None, extras(), ALL.0, ALL.1);
}

/// In 8.4's dialect a Primary lost its disk and its link in one, and wrote through the peer at the old
/// generation. Its disk came back as that of a crashed Primary, and was the source.
#[test]
fn an_84_peer_labels_what_a_primary_writes_without_a_disk() {
    const KINDS: &str = "readerror,writeerror,flusherror,metaerror,crash,reset";
    holds(26, Some(KINDS), vec![Extra::Old], "0,8-10", "65");
    holds(26, Some(KINDS), vec![Extra::Old], ALL.0, ALL.1);
}

/// The UUID of a resync became durable when its link was gone and the next resync had begun: it was told twice.
#[test]
fn the_uuid_of_a_resync_that_is_over_is_not_told() {
    holds(120_000_122, None, vec![Extra::Old], "1,3,5,7", "84");
    holds(120_000_122, None, vec![Extra::Old], ALL.0, ALL.1);
}

/// The target's disk failed while the UUID of its resync was on its way.
#[test]
fn the_uuid_of_a_resync_may_cross_the_loss_of_the_disk() {
    const KINDS: &str = "readerror,writeerror,flusherror,metaerror,crash,reset";
    holds(120_000_099, Some(KINDS), vec![Extra::Old], "0,2", "57");
    holds(120_000_099, Some(KINDS), vec![Extra::Old], ALL.0, ALL.1);
}

/// With protocol A the Primary's disk failed after a write, and the link broke before the peer had it. The peer came
/// back, its older data passed for what applications had seen, and the disk was made equal to it.
#[test]
fn a_peer_that_missed_what_a_failed_disk_has_is_not_up_to_date() {
    const KINDS: &str = "hangdisk,reset,partition,crash,powercut,handover,invalidate";
    let blocks = || vec![Extra::Blocks];
    holds(120_000_016, Some(KINDS), blocks(), "0-1,9,11", "1-2");
    holds(120_000_016, Some(KINDS), blocks(), ALL.0, ALL.1);
    holds(7_720_035, None, vec![], ALL.0, ALL.1);
}

/// Before protocol 91 the comparison has no answer where one node missed the end of a resync: such a pair
/// stays apart, and the operator writes new metadata.
#[test]
fn an_old_pair_that_missed_the_end_of_a_resync_needs_the_operator() {
    const KINDS: &str = "readerror,writeerror,flusherror,metaerror,crash,reset";
    holds(120_000_483, None, vec![Extra::Old], ALL.0, ALL.1);
    holds(120_000_199, Some(KINDS), vec![Extra::Old], ALL.0, ALL.1);
}

/// In 8.4's dialect an operator held requests back at the Primary when its peer detached its disk: the due generation
/// waited for them, and the peer attached the disk again as an equal one, without a write that the Primary
/// acknowledged afterwards.
#[test]
fn an_old_peer_that_attaches_finds_the_generation_that_was_due() {
    holds(3_367_177_128, None, vec![], "0-2", "4");
    holds(3_367_177_128, None, vec![], ALL.0, ALL.1);
}
