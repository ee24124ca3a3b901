//! Planned worlds of five nodes, of which one or two have no disk, with quorum.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

#[track_caller]
fn holds(seed: u64, faults: &str, requests: &str) {
    let kinds = Some("diskless,quorum,crash,partition,reset");
    planned_holds(Some(5), seed, (kinds, vec![Extra::Every]), faults, requests);
}

/// A client was promoted right after a node had gone: its votes were counted with the members of before, by which a
/// tie-breaker kept the quorum, and the commit took the lost one out, by which redundancy was missing. It became
/// Primary without quorum.
#[test]
fn a_promotion_counts_those_who_have_left_as_its_commit_does() {
    const FAULTS: &str = "0-4,10,13-15,19,22";
    holds(771_000_007_432, FAULTS, "0-13,15,17-18,21-24,26");
    holds(771_000_007_432, "0-99", "0-999");
}

/// A frozen Primary got its old follower back and needed it for its quorum. It passed a resync target's question on to
/// that one on the control stream, which overtook the commit of the connect on the other stream: the follower took that
/// for an error and dropped the connection. Meanwhile it was copied from another one, and its marks made the generation
/// look newer that the Primary had announced and not made, for good.
#[test]
fn a_question_that_overtakes_the_commit_of_a_connect_is_no_error() {
    holds(771_000_009_728, "0-2,7-8", "2");
}

/// A disk was outdated for a Primary that it had lost, while it was the source of two others. The Primary came back, but
/// who is a source was not compared with the UpToDate disk beside it, and its targets waited for it for good.
#[test]
fn an_outdated_source_becomes_the_target_of_a_disk_that_is_whole() {
    const FAULTS: &str = "0-4,7,9-11,13,17,20";
    const REQUESTS: &str =
        "10,13-20,22-24,26,33,35-36,38-39,41-74,150-163,165-168,171-191,194-201,217";
    holds(771_000_007_022, FAULTS, REQUESTS);
    holds(771_000_007_022, "0-99", "0-999");
}
