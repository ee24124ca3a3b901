//! Planned worlds in which every copy of a volume was Outdated, and nobody called one the last.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

#[track_caller]
fn holds(nodes: Option<usize>, seed: u64, kinds: Option<&str>, faults: &str, requests: &str) {
    planned_holds(nodes, seed, (kinds, Vec::new()), faults, requests);
}

/// A storage node outdates itself when it hears of a Primary far away, although that one has no data of one
/// volume and its neighbour copies this very disk. All copies were Outdated and of the generation that the
/// Primary's applications had seen, but the Primary had marks left towards one of them.
#[test]
fn marks_towards_an_outdated_copy_are_copied_and_the_primary_goes_on() {
    const TAKEOVER: Option<&str> = Some("takeover,crash,partition,reset");
    const DETACH: Option<&str> = Some("detach,detach,detach,stall,slowdisk,reset");
    holds(Some(3), 15_500_349, None, "3,8,12", "20-22");
    holds(Some(3), 15_500_349, None, "0-99", "0-999");
    holds(Some(3), 900_902, TAKEOVER, "1-5,7,9", "59");
    holds(Some(3), 900_902, TAKEOVER, "0-99", "0-999");
    holds(None, 100_341, DETACH, "1,4-5,8-10,13,15", "89,96");
    holds(None, 100_341, DETACH, "0-99", "0-999");
}

/// The same with a generation that the Primary had announced while it had no disk: everybody took it, but the
/// connection broke before all had answered.
#[test]
fn a_generation_that_was_announced_is_one_that_the_primary_knows() {
    const REQUESTS: &str = "2,6-8,22-27,29,34-37";
    holds(Some(3), 7_710_009, None, "3,6,9,14", REQUESTS);
    holds(Some(3), 7_710_009, None, "0-99", "0-999");
}

/// The Primary, a client, is demoted while its connection to the only disk is broken. The disk could not have
/// missed anything, and called itself Outdated, with nobody there to compare with.
#[test]
fn the_only_disk_misses_nothing_of_a_client_that_is_demoted_far_from_it() {
    const CLIENTS: Option<&str> = Some("diskless,quorum,crash,partition,reset");
    holds(Some(3), 3082, CLIENTS, "5,7-8", "none");
    holds(Some(3), 3082, CLIENTS, "0-99", "0-999");
}

/// The only whole disk was Outdated, because of the Primary that became its target: all had its data, and nobody was UpToDate.
#[test]
fn a_primary_takes_nobody_for_outdated_because_of_itself() {
    planned_holds(Some(4), 2_400_002_937, (None, Vec::new()), "0-99", "0-999");
}

/// A survivor asked who is there, was told of the Primary and outdated itself. The other one lost that Primary in the same moment, and
/// went by what the former had said before: both were Outdated, and nobody could be promoted.
#[test]
fn a_survivor_that_is_being_outdated_has_no_say() {
    let kinds = "promote,promote,disconnect,handover,detach,invalidate,suspend";
    let kinds = (Some(kinds), vec![Extra::Every]);
    planned_holds(Some(3), 46, kinds, "0-99", "0-999");
}

/// A node had voted when its Primary was there, which died before the commit: by that vote another one was Outdated, and by
/// that one all.
#[test]
fn a_vote_of_before_the_loss_outdates_nobody_who_asks_anew() {
    planned_holds(Some(4), 2_500_002_853, (None, Vec::new()), "0-99", "0-999");
}

/// A Primary without a disk had named a generation, and the disks that had it were Outdated: for they waited for a disk that was
/// not whole and could have nothing newer.
#[test]
fn the_last_copies_do_not_wait_for_one_that_is_not_whole() {
    planned_holds(Some(4), 3_200_000_305, (None, Vec::new()), "0-99", "0-999");
}

/// The survivors of a Primary lost it one after the other. One that still had it, and had not got its newest generation yet,
/// followed one that had lost it and was Outdated; or the last one to lose it was copied from one that had lost it first,
/// and was as Outdated in the end. All were, until the Primary was back.
#[test]
fn survivors_that_lose_a_primary_one_after_the_other_do_not_outdate_each_other() {
    holds(Some(4), 795_000_000_399, None, "none", "none");
    holds(Some(4), 795_000_000_399, None, "0-99", "0-999");
    holds(Some(5), 795_000_000_015, None, "1,5", "450");
    holds(None, 797_000_015_017, None, "none", "none");
    holds(Some(4), 801_100_000_062, None, "none", "none");
    holds(Some(4), 801_100_000_062, None, "0-99", "0-999");
    holds(Some(5), 802_000_003_239, None, "none", "none");
    holds(Some(5), 802_000_000_783, None, "none", "none");
    holds(Some(5), 803_100_005_464, None, "none", "none");
    holds(Some(5), 803_100_005_576, None, "none", "none");
}

/// A survivor of a Primary that had less met one that had more again: both knew how far, and nothing was copied, as marks
/// meant nothing where one of them was Outdated. A comparison chose the one with less later.
#[test]
fn survivors_that_meet_again_go_by_how_far_they_came() {
    holds(Some(5), 802_000_001_209, None, "none", "none");
    holds(Some(5), 803_100_002_095, None, "none", "none");
}

/// A copy between survivors was given up, as its source became a target itself; what was marked between the two later went
/// from the lower node id.
#[test]
fn marks_between_survivors_go_from_who_came_further() {
    holds(Some(5), 803_100_005_217, None, "none", "none");
}
