//! Planned worlds in which acknowledged data were lost, or disks differed and no node knew it.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

/// A Primary told its followers the generation that was coming and began again, because a third node had
/// caught up. Now nobody was behind, and it made none. A follower that had taken the first plan looked newer
/// from then on, and its disk replaced what was written after it was lost.
#[test]
fn a_generation_that_was_told_and_given_up_is_followed_by_another() {
    const KINDS: &str = "shuffle,handover,handover,stall,invalidate";
    let kinds = (Some(KINDS), vec![Extra::Every, Extra::Hot]);
    planned_holds(Some(3), 98_002_158, kinds, "0-99", "0-999");
}

/// A Primary got its quorum back by the handshake of a node that said it was Outdated, and answered what it had
/// frozen without sending it there. By the same handshake that node became UpToDate.
#[test]
fn a_frozen_primary_waits_for_what_an_outdated_peer_says_of_itself() {
    const KINDS: &str = "diskless,quorum,crash,partition,reset";
    let kinds = (Some(KINDS), Vec::new());
    planned_holds(Some(3), 98_001_876, kinds, "0-99", "0-999");
}

/// The word that a third node's disk is equal was on its way for long. That disk had left meanwhile, and its
/// marks for what it missed were cleared.
#[test]
fn nobody_vouches_for_a_disk_that_has_left() {
    const KINDS: &str = "detach,detach,detach,stall,slowdisk,reset";
    let holds = |faults, requests| {
        let kinds = (Some(KINDS), Vec::new());
        planned_holds(None, 98_006_638, kinds, faults, requests);
    };
    holds("2-3,5", "15,18");
    holds("0-99", "0-999");
}

/// A Primary without a disk told its next generation to a node that it knew to be behind, and that took itself for
/// UpToDate. That one followed, got none of the writes, and later replaced those that had.
#[test]
fn who_is_called_weak_does_not_follow() {
    const REQUESTS: &str = "113,118-119,122-139,147";
    let holds = |faults, requests| {
        planned_holds(Some(3), 88_400_550, (None, Vec::new()), faults, requests);
    };
    holds("0,4", REQUESTS);
    holds("0-99", "0-999");
}

/// Both nodes lost their power while a demotion was noted. The simulator let the superblock be written and lost
/// what the flush before it had made durable.
#[test]
fn a_superblock_that_was_written_has_its_flush_behind_it() {
    planned_holds(Some(2), 97_500_093, (None, Vec::new()), "0-1", "3");
    planned_holds(Some(2), 97_500_093, (None, Vec::new()), "0-99", "0-999");
}

/// A write was at one peer and not yet at the other when the first was lost. The third node, which did not have
/// the write yet, was the source of its next resync. Then the Primary told everybody that the lost one had the write.
#[test]
fn a_lost_peer_does_not_count_for_writes_that_others_lack() {
    const KINDS: &str = "stall,stall,stall,disconnect,handover,detach";
    let holds = |seed, faults, requests| {
        let kinds = (Some(KINDS), vec![Extra::Every, Extra::Numb]);
        planned_holds(Some(3), seed, kinds, faults, requests);
    };
    holds(120_005_416, "1,4,6,9,13", "22,33-34,36,151,161,163");
    holds(120_005_416, "0-99", "0-999");
    holds(88_900_118, "0-5", "8-9,426-429");
    holds(88_900_118, "0-99", "0-999");
}

/// A node vouched for one that followed a Primary which it did not reach itself: what that wrote was marked
/// there alone. A third node, which was copied from both in turn, dropped its marks, told the one that had
/// the write, and that dropped its own.
#[test]
fn nobody_vouches_for_who_follows_a_primary_out_of_reach() {
    let holds =
        |faults, requests| planned_holds(Some(4), 4167, (None, Vec::new()), faults, requests);
    holds("2,5-6,8-9", "0,15-19,21");
    holds("0-99", "0-999");
}

/// A Primary lost its power and came back without what it had not flushed, which one node had not noticed. A third node
/// was copied from both, and dropped its marks because the one said that the Primary was equal to them.
#[test]
fn nobody_vouches_for_a_neighbour_that_may_live_another_life() {
    let holds = |seed, kinds, faults, requests| {
        planned_holds(Some(3), seed, (kinds, Vec::new()), faults, requests);
    };
    holds(641_666_001_951, None, "12-13", "7,9");
    holds(641_666_001_951, None, "0-99", "0-999");
    const KINDS: Option<&str> = Some("resize,cut-resize,crash,partition,powercut");
    holds(648_844_000_047, KINDS, "3-4", "3-4");
    holds(648_844_000_047, KINDS, "0-99", "0-999");
}

/// A write that failed on its Primary's disk was marked, and then an older one of the same block, which its peer had cleared the
/// mark for, took that mark away. The resync ended, and what failed counted as copied.
#[test]
fn an_older_write_does_not_clear_the_mark_of_one_that_has_failed() {
    planned_holds(
        Some(2),
        3_203_443_703,
        (None, vec![]),
        "1-2,5",
        "9,11,22-24,27",
    );
    planned_holds(Some(2), 3_203_443_703, (None, vec![]), "0-99", "0-999");
}

/// The marks of a slot that was filled as a whole counted as durable, and blocks were replaced before they were.
#[test]
fn marks_of_a_whole_slot_are_durable_before_blocks_are_replaced() {
    planned_holds(Some(4), 2_400_001_433, (None, Vec::new()), "0-99", "0-999");
}

/// What had failed at a client, and a peer ack then marked towards everybody, counted as durable: a resync replaced these
/// blocks before it was.
#[test]
fn marks_of_a_peer_ack_are_durable_before_blocks_are_replaced() {
    planned_holds(Some(3), 2_500_002_256, (None, Vec::new()), "0-99", "0-999");
}

/// A follower wrote before its metadata named a size. It died, the log could mark nothing of no size, and what it had
/// written stood nowhere.
#[test]
fn the_log_is_not_used_before_the_size_is_written_down() {
    planned_holds(Some(3), 2_500_002_163, (None, Vec::new()), "0-99", "0-999");
}

/// A target left one source for another one, which replaced a block that the first had sent a moment before; when that
/// was flushed the block counted as equal with the first.
#[test]
fn what_another_source_has_replaced_settles_no_mark() {
    planned_holds(Some(4), 2_500_001_286, (None, Vec::new()), "0-99", "0-999");
}

/// With protocol A a crashed Primary came back and one survivor was copied from it. The other survivor, of the same
/// generation, was taken for the source of both, and what the Primary had completed alone was lost.
#[test]
fn who_was_copied_from_a_crashed_primary_speaks_for_it() {
    planned_holds(Some(3), 2_500_000_366, (None, Vec::new()), "0-99", "0-999");
}

/// A Primary appeared while a node was copied from another one, and had not heard of that. It wrote to who it knew to be
/// whole, and the target was whole without the write when it was acknowledged.
#[test]
fn a_primary_that_appears_during_a_resync_is_asked_at_its_end() {
    planned_holds(Some(4), 2_700_000_897, (None, Vec::new()), "0-99", "0-999");
}

/// Writes that waited for a disk were sent to another node, which had it copied to that disk, after the bitmaps were
/// exchanged. When they had arrived they took the marks of their blocks with them: the new disk did not have them.
#[test]
fn what_was_written_before_a_disk_came_clears_no_marks() {
    planned_holds(Some(3), 2_710_001_822, (None, Vec::new()), "0-99", "0-999");
}

/// A Primary had died and come back, and counted its writes from 0. A target had one of these, and its source had not,
/// but had heard of more in the life before: it answered with what the write was to replace.
#[test]
fn a_source_waits_for_the_writes_of_this_life() {
    planned_holds(Some(3), 2_710_002_029, (None, Vec::new()), "0-99", "0-999");
}

/// A target became Primary while its source, which was Consistent, did not get its writes. They were marked, as blocks to
/// ask the source for, which gave back what they had replaced.
#[test]
fn the_source_of_a_primary_gets_its_writes() {
    planned_holds(Some(4), 2_710_001_476, (None, Vec::new()), "0-99", "0-999");
}

/// A target left its Consistent source, as another node had newer data, and was whole with these. The one that was left
/// found no Primary anywhere, and took its old data for current.
#[test]
fn who_is_beside_newer_data_is_not_current_again() {
    planned_holds(Some(3), 2_710_000_976, (None, Vec::new()), "0-99", "0-999");
}

/// A Primary's disk was detached by force while a generation was being noted on it. Peers took that one, and so did the disk
/// that went: it looked as good as theirs when it came back, and was copied over what they had got meanwhile.
#[test]
fn a_disk_that_goes_is_not_named_by_the_generation_that_leaves_it_behind() {
    planned_holds(Some(3), 1_898_500_827, (None, vec![]), "0-99", "0-9999");
}
