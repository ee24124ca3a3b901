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

/// Protocol A: a Primary crashed with a write that nobody else has and came back, connected to a client that saw two survivors
/// without it as well. All three were UpToDate and of one generation, and the client became Primary and read the old block.
#[test]
fn a_client_waits_until_a_crashed_primary_has_met_the_others() {
    holds(772_000_000_039, "5,9-10,12", "384,386,411,413");
}

/// Protocol A: a Primary without quorum was demoted and copied to one survivor. A third one, which had met neither before,
/// copied its older blocks over them.
#[test]
fn who_was_copied_from_a_primary_without_quorum_is_ahead_of_the_others() {
    holds(772_000_000_039, "0-99", "0-999");
}

/// Protocol A: a Primary that nobody reached any more completed a write before it knew, and was demoted. A survivor with
/// more marks, of writes that both had, was its source.
#[test]
fn what_a_primary_completed_before_it_lost_quorum_is_kept() {
    holds(772_000_002_107, "0-2,9,11-12", "76,96,107");
    holds(772_000_002_107, "0-99", "0-999");
}

/// A client with the quorum of its only neighbour told two disks behind that one of itself, and they took themselves for
/// its neighbours still: they would have gone on without it as UpToDate.
#[test]
fn a_vote_of_who_does_not_know_yet_that_it_is_far_is_no_word() {
    holds(772_000_000_281, "0-5", "13");
    holds(772_000_000_281, "0-99", "0-999");
}

/// Protocol B: a Primary told a follower of its next generation while the others voted for its demotion, and gave it up with
/// that. The follower took it, and the client that was Primary next wrote without it.
#[test]
fn a_generation_that_was_told_is_made_before_the_demotion() {
    holds(772_000_000_546, "0-4,6", "0-2,129");
    holds(772_000_000_546, "0-99", "0-999");
}

/// Protocol A: the operator made a client Primary that took a dead Primary for alive, whose disk was just being attached: he
/// took the survivors, without that one's last writes, for disks of another generation.
#[test]
fn a_client_is_promoted_only_beside_a_disk_that_has_everything() {
    const REQUESTS: &str = "1-9,11-14,16-17,19,41-42,44,49-51";
    holds(772_000_003_123, "0,2", REQUESTS);
    holds(772_000_003_123, "0-99", "0-999");
}

/// A Primary lost all its peers at the same moment, and acknowledged a write between two of them that the second one had:
/// the check counted the copies that were left after the moment.
#[test]
fn a_write_is_acknowledged_between_two_losses_of_one_moment() {
    holds(772_000_003_654, "0-2", "0,8");
    holds(772_000_003_654, "0-99", "0-999");
}

/// Two followers of a Primary compared when only one of them had said that it has the next generation. The other one had taken
/// one before that, which was given up and told to it alone, and the pair reported a split brain.
#[test]
fn followers_are_not_compared_while_a_generation_is_on_its_way() {
    holds(772_000_003_756, "0-3,5-6", "0");
    holds(772_000_003_756, "0-99", "0-999");
}
