//! Planned worlds of two nodes that nobody had seen before, and what was wrong in them.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

fn holds(seed: u64, kinds: Option<&str>, extras: Vec<Extra>, faults: &str, requests: &str) {
    planned_holds(Some(2), seed, (kinds, extras), faults, requests);
}

const ALL: (&str, &str) = ("0-99", "0-999");

/// A Primary lost its disk in a resync, and its next write came to the source before the acks of the last blocks,
/// which were in a slow stream. The write waited for such an ack, and that one cleared the mark of what the Primary's
/// disk lacks.
#[test]
fn a_late_ack_of_a_copy_clears_no_mark_of_a_write_that_waits_for_it() {
    const REQUESTS: &str = "0-15,20-21,24-25,27,29,33-39,41-49,51,56-71,73-76,78-79,81-82,84,86,91-100,112,117-130,\
        133-150,152-153,159-164,179,181,183-189,201,204,206,208-212,214,222,224-228,230-236,238-239,241-243,245-251,\
        253,255,272";
    holds(1_256_340_080, None, vec![], "0-2", REQUESTS);
    holds(1_256_340_080, None, vec![], ALL.0, ALL.1);
}

/// The operator gave a Primary a new generation while its metadata could not be written. Its peer, which had missed
/// the one before as well, knew only the new one after its resync: the one in the Primary's metadata was no ancestor.
#[test]
fn a_target_knows_the_generation_at_which_its_source_had_left_it() {
    holds(
        1_256_345_383,
        None,
        vec![],
        "1,5,7,11,13",
        "5-6,9-10,14,23-24,26",
    );
    holds(1_256_345_383, None, vec![], ALL.0, ALL.1);
}

/// In 8.4's dialect a pause ended while the target made a full sync ready, of which an 8.4 is told nothing: the source
/// stayed paused for ever.
#[test]
fn an_84_hears_that_a_pause_is_over_though_the_resync_had_not_begun() {
    holds(1_256_343_379, None, vec![], "19-21", "none");
    holds(1_256_343_379, None, vec![], ALL.0, ALL.1);
}

/// A node without its disk refused writes, attached the disk and copied them. The Primary's peer ack of those writes
/// came only then, and marked them again: all was copied twice.
#[test]
fn a_late_peer_ack_of_refused_writes_has_nothing_copied_twice() {
    holds(1_256_342_481, None, vec![], "2", "none");
    holds(1_256_342_481, None, vec![], ALL.0, ALL.1);
}

/// A Primary's write failed on its own disk, and was copied from its peer before that one acknowledged it. The ack settled the write,
/// and it was marked once more as one that this disk lacks; nothing copied it then.
#[test]
fn a_failed_write_that_was_copied_before_it_is_settled_is_not_marked_again() {
    holds(430_003, None, vec![], "17,20,23", "14,25");
    holds(430_003, None, vec![], ALL.0, ALL.1);
}

/// On a slow line a verify makes pings late, and each comes only so far: the operator tries again while it comes
/// further.
#[test]
fn a_verify_on_a_slow_line_ends_in_the_end() {
    holds(1_256_346_081, None, vec![], "6", "none");
}

/// A follower took a generation that its Primary had announced, and was invalidated. The Primary lost its power before it made
/// that generation: it became the target of a disk that was not whole, and no disk was.
#[test]
fn a_disk_that_is_not_whole_is_no_source_of_the_one_that_is() {
    holds(2_113_603_669, None, vec![], "0-1,3", "0");
    holds(2_113_603_669, None, vec![], ALL.0, ALL.1);
}

/// A disk was taken away by force while it was looked at for a peer that connects, and the log called that an error of the
/// peer.
#[test]
fn a_disk_that_is_detached_during_a_connect_is_no_error_of_the_peer() {
    holds(2_503_593_040, None, vec![], ALL.0, ALL.1);
}

/// In 8.4's dialect blocks that an attach had marked counted as changes of a branch, and the check did not count them.
#[test]
fn what_an_attach_has_marked_counts_as_changed_with_84() {
    holds(2_503_594_863, None, vec![], ALL.0, ALL.1);
}

/// A disk was invalidated without a peer, the command was answered, and a crash left half of the marks: the rest of
/// what was there counted as good.
#[test]
fn a_disk_that_was_invalidated_alone_is_copied_as_a_whole() {
    holds(700_125_571, None, vec![], ALL.0, ALL.1);
    holds(3_100_002_078, None, vec![], ALL.0, ALL.1);
}

/// A source was disconnected by force and went on, and its target came to the end of the resync with what was still
/// on its way, so that it had the generation of a Primary that did not count on it any more.
#[test]
fn a_target_ends_its_resync_only_while_its_source_is_there() {
    holds(1_433_430_761, None, vec![], ALL.0, ALL.1);
}

/// A node that had lost its Primary, and did not know that it went on, called its disk UpToDate, and the check took
/// what that Primary flushed afterwards for something that it had.
#[test]
fn what_is_flushed_without_a_node_is_not_its_own() {
    holds(1_433_430_379, None, vec![], ALL.0, ALL.1);
}

/// In 8.4's dialect a target had asked for a full resync, was told to pause it before the answer came, and said so
/// in a state without that resync, which its source took for the end.
#[test]
fn a_pause_is_not_told_before_the_resync_that_was_asked_for() {
    holds(1_433_431_662, None, vec![], ALL.0, ALL.1);
    holds(700_123_895, None, vec![], ALL.0, ALL.1);
}

/// A forced promotion was answered before the metadata that called the data good were durable: a crash left disks that
/// nobody took for good, and whoever had given the command did not know.
#[test]
fn a_forced_promotion_is_answered_when_it_lasts() {
    const KINDS: &str = "diskless,quorum,crash,partition,reset";
    for seed in [815_000_004_450, 794_000_000_362] {
        planned_holds(Some(3), seed, (Some(KINDS), vec![]), ALL.0, ALL.1);
    }
}

/// Checks that were wrong. In 8.4's dialect a crashed Primary that lost its power after it had come back is the source of what it
/// lacks, as if it had lost it at once. And a node without a disk, while it was promoted beside the only one that had everything
/// that protocol A had acknowledged, lost that one and went on with what another one had.
#[test]
fn what_a_crashed_primary_takes_with_it_is_not_asked_for() {
    holds(2_513_025_578, None, vec![], ALL.0, ALL.1);
    holds(2_513_022_649, None, vec![], ALL.0, ALL.1);
    let kinds = (
        Some("diskless,quorum,crash,partition,reset"),
        vec![Extra::Every],
    );
    planned_holds(Some(5), 820_000_011_482, kinds, ALL.0, ALL.1);
}
