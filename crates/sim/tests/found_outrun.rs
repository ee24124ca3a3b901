//! Disks that others have left behind, where no generation said so.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

/// A target of two sources was brought up to date by the one that had the later generation. The other source, whose data
/// were older, still counted as UpToDate, took the next generation with the rest, and had stale blocks under it.
#[test]
fn a_source_that_another_one_has_outrun_is_compared() {
    let kinds = Some("order,order,invalidate-remote,partition,crash,handover");
    let extras = vec![Extra::Every, Extra::Openers];
    const REQUESTS: &str = "0,167,239-241";
    planned_holds(
        None,
        855000009475,
        (kinds, extras.clone()),
        "0-1,3,5-6,11-12",
        REQUESTS,
    );
    planned_holds(None, 855000009475, (kinds, extras), "0-99", "0-9999");
}

/// A Primary forgot a peer that it had lost, and wrote before it knew it anew. Its slot, which would have asked for a new
/// generation, was gone: both disks were of one, and the Primary's was made equal to the other.
#[test]
fn a_peer_that_is_forgotten_is_left_behind_all_the_same() {
    let kinds = Some("outdate,regroup,regroup,partition,disconnect,handover,crash");
    planned_holds(
        Some(2),
        855000010998,
        (kinds, vec![Extra::Every]),
        "0,2-3",
        "23,27",
    );
    planned_holds(
        Some(2),
        855000010998,
        (kinds, vec![Extra::Every]),
        "0-99",
        "0-9999",
    );
}

/// A peer without a disk refused a Primary's writes, which went on with its own disk and lost that as well, before it
/// heard what had become of the peer's. That came back under the same generation, and applications read old data.
#[test]
fn a_peer_that_has_refused_writes_does_not_take_the_place_of_the_own_disk() {
    let kinds = Some("detach,detach,detach,stall,slowdisk,reset");
    planned_holds(None, 862000000831, (kinds, vec![]), "0-99", "0-9999");
}

/// The commit of a resize did not reach one of three. It followed the Primary's size, which was a source of the new area
/// already, and wanted a bitmap of it, for ever.
#[test]
fn who_missed_the_commit_of_a_resize_is_target_of_a_source_that_waits() {
    let kinds = Some("resize,cut-resize,crash,partition,powercut");
    planned_holds(Some(3), 855000013620, (kinds, vec![]), "23", "none");
    planned_holds(Some(3), 855000013620, (kinds, vec![]), "0-99", "0-9999");
}

/// The simulated operator had promoted a node that stood by, and took its own freeze for a reason to give its writes up.
#[test]
fn the_operator_does_not_give_up_the_writes_of_who_has_its_turn() {
    let kinds = Some("handover,handover,handover,stall,reset,partition,crash,powercut");
    let extras = vec![Extra::Migrations, Extra::Every, Extra::Hot];
    planned_holds(Some(2), 855000011195, (kinds, extras), "0-99", "0-9999");
}

/// A target ended its resync, and heard only then that its source had pulled ahead. When the source heard of that end it
/// was source again, and took it for the end of the next resync: the target waited for a bitmap's answer for ever.
#[test]
fn the_end_of_a_resync_before_the_source_pulled_ahead_is_not_that_of_the_next() {
    let kinds = Some("freeze,stall,slowdisk,invalidate,reset,balance");
    let extras = vec![Extra::Congestion, Extra::Every, Extra::Hot];
    const REQUESTS: &str = "62-63,66,150,153,156-157";
    planned_holds(
        None,
        863000000560,
        (kinds, extras.clone()),
        "0,3,7",
        REQUESTS,
    );
    planned_holds(None, 863000000560, (kinds, extras), "0-99", "0-9999");
}

/// Others brought both what a Primary had been ahead with. It took the peer for one that misses something for ever, and
/// made a generation at the next loss of the link for that.
#[test]
fn a_node_is_ahead_no_more_when_others_have_brought_both_up_to_date() {
    let extras = vec![Extra::Congestion, Extra::Thin];
    planned_holds(None, 815000002368, (None, extras.clone()), "0-99", "0-9999");
    planned_holds(None, 850002416, (None, extras), "0-99", "0-9999");
}

/// Two nodes without disks were connected when a third one attached its disk, which had grown meanwhile: each of them held
/// the other at the old size.
#[test]
fn nodes_without_disks_do_not_hold_each_other_at_an_old_size() {
    let kinds = Some("metaerror,hangdisk,resize,powercut,crash,diskless,readerror,writeerror");
    planned_holds(Some(3), 1053, (kinds, vec![]), "6,9-10", "none");
    planned_holds(Some(3), 1053, (kinds, vec![]), "0-99", "0-9999");
}

/// A target went by the neighbour of a Primary because the Primary was there as well, as it thought: that one had lost
/// it before it was promoted. When it lost that one, too, it went on, and missed what was written meanwhile.
#[test]
fn a_source_beside_a_primary_that_is_lost_does_not_make_whole() {
    planned_holds(
        Some(4),
        1_894_020_045,
        (None, vec![]),
        "0-4,6",
        "28,30,33-38",
    );
    planned_holds(Some(4), 1_894_020_045, (None, vec![]), "0-99", "0-9999");
}

/// A node without a disk became Primary while another was being copied. The target heard of that from its source only: the
/// commit was still on its way, and the marks of the first writes behind it. It ended as whole without them.
#[test]
fn a_target_does_not_count_on_a_primary_of_which_it_has_not_heard() {
    let kinds = Some("diskless,quorum,crash,partition,reset");
    let holds = |faults, requests| {
        planned_holds(Some(3), 876_000_003_587, (kinds, vec![]), faults, requests);
    };
    holds("0-1,3,8-9,12", "3-10");
    holds("0-99", "0-9999");
}
