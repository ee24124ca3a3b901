//! Worlds of three nodes that once failed; each names the bug that it showed.

use lockstep_sim::swarm::{FAULTS, Limits, run};

/// Runs the world of a seed with three nodes and only the faults with these names.
#[track_caller]
fn holds(seed: u64, faults: &str) {
    let faults = FAULTS
        .iter()
        .filter(|(_, name)| faults.split(',').any(|word| word == *name))
        .map(|(fault, _)| *fault)
        .collect();
    let limits = Limits {
        nodes: Some(3),
        faults: Some(faults),
        ..Limits::default()
    };
    let outcome = run(seed, &limits);
    assert_eq!(outcome.violation, None, "seed {seed}: {}", outcome.shape);
}

const KILLS_AND_LINKS: &str = "crash,reset,partition,stall";

/// The news of who is in sync was dropped because of a write in the same extent, and the marks
/// between two nodes that were both copied from the third stayed for ever.
#[test]
fn marks_between_two_targets_of_one_source_go() {
    holds(43, KILLS_AND_LINKS);
    holds(1, KILLS_AND_LINKS);
}

/// A Primary told a follower its next generation, lost it before the confirmation, and made
/// another one: later both looked like branches of a split brain.
#[test]
fn a_generation_that_was_given_up_is_no_split_brain() {
    holds(53, KILLS_AND_LINKS);
}

/// A resync target names its source's generation; a third node found no relation between that and
/// its own and disconnected for good.
#[test]
fn a_target_of_another_node_is_not_unrelated() {
    holds(38, KILLS_AND_LINKS);
    holds(86, KILLS_AND_LINKS);
}

/// A node compared before it had heard its peer's new disk state, found nothing to do, and the
/// peer waited for its bitmap for ever.
#[test]
fn a_source_that_decided_with_newer_knowledge_is_followed() {
    holds(10, KILLS_AND_LINKS);
}

/// One survivor's old word about a Primary that was only cut off from it served for another loss
/// of that Primary, and only one side began a reconciliation.
#[test]
fn an_old_word_about_a_lost_primary_starts_no_reconciliation() {
    holds(69, KILLS_AND_LINKS);
}

/// A Primary crashed after it had told its followers a generation and before that was on its own
/// disk; alone it made another one, and both looked like branches of a split brain.
#[test]
fn a_generation_that_only_the_followers_have_is_no_split_brain() {
    holds(114, KILLS_AND_LINKS);
}

/// The end of an unstable resync waited for its source to become stable, although a stable Primary
/// was connected.
#[test]
fn after_an_unstable_resync_a_stable_neighbour_is_asked() {
    holds(104, KILLS_AND_LINKS);
}

/// A handshake went by a disk state that had changed since it was sent, and only one side became
/// a resync target.
#[test]
fn a_handshake_goes_by_the_disk_state_that_was_sent() {
    holds(6, KILLS_AND_LINKS);
}

/// A survivor owed a reconciliation to another one that it lost as well, and stayed Consistent.
#[test]
fn a_reconciliation_with_a_node_that_is_gone_is_not_owed() {
    holds(17, KILLS_AND_LINKS);
}

/// Two targets of one source ended at almost the same time; one took the other for outdated. And
/// the source compared while the acks of the last blocks were on their way, and disconnected.
#[test]
fn two_targets_that_end_together_see_each_other_as_equal() {
    holds(105, KILLS_AND_LINKS);
    holds(50, KILLS_AND_LINKS);
}

/// Two nodes compared at the same time, each with an older disk state of the other, and both became
/// source.
#[test]
fn two_that_choose_to_be_source_decide_again() {
    holds(47, KILLS_AND_LINKS);
}

/// All faults.
const ALL: &str = "reset,partition,oneway,stall,crash,powercut,powercut-all,handover,disconnect,\
                   detach,invalidate,pause,down";

/// A second resync within one generation made the slot of a third node name the generation itself:
/// where that node was left was forgotten, and it was called unrelated. It had lost its power while
/// it announced that generation.
#[test]
fn a_resync_within_a_generation_keeps_where_third_nodes_were_left() {
    holds(63, ALL);
}

/// A resync target goes by its source's generation. A second source put that into the slot that
/// says where a full resync goes on from; interrupted, the target looked like a branch.
#[test]
fn an_interrupted_target_of_two_sources_is_no_split_brain() {
    holds(44, ALL);
}

/// Two Inconsistent nodes, one of them target of a third, compared what they were made of.
#[test]
fn two_inconsistent_nodes_are_no_split_brain() {
    holds(66, ALL);
}

/// A follower was lost while the new generation was being written, and what was written after that
/// had no generation of its own; and a slot left over from an announced generation looked like a
/// resync whose end was missed, so that the follower became the source.
#[test]
fn a_follower_lost_while_a_generation_is_written_misses_what_comes() {
    holds(2060, ALL);
    holds(2021, KILLS_AND_LINKS);
    holds(1425, KILLS_AND_LINKS);
}

/// The checker took a block that was read before its write was acknowledged for durable. (Power is
/// not cut, so that nothing else excuses what the survivor lacks.)
#[test]
fn a_read_of_an_unacknowledged_write_binds_no_survivor() {
    holds(2215, KILLS_AND_LINKS);
}

/// A node that was connected to the Primary and a restarted one compared marks of before; the
/// stale one became the source, and the Primary, who saw no marks of its own, vouched for the rest.
#[test]
fn who_follows_the_primary_is_the_source_of_who_does_not() {
    holds(1984, ALL);
    holds(2229, ALL);
}

/// A Primary became Secondary with writes in flight, and acknowledged one after the next Primary
/// had begun without it.
#[test]
fn a_demotion_waits_for_the_writes_in_flight() {
    holds(1686, ALL);
}

/// A target's source was a target itself: a block that it had sent before it got the newer one was
/// acknowledged after, and both forgot the mark.
#[test]
fn an_ack_of_an_overtaken_block_clears_no_mark() {
    holds(228, KILLS_AND_LINKS);
}

/// A resync waited for a third node to answer for the Primary's writes; that one had not been
/// connected to the Primary, and came back UpToDate in between.
#[test]
fn an_answer_that_cannot_come_does_not_hold_the_end_of_a_resync() {
    holds(1829, KILLS_AND_LINKS);
    holds(1213, KILLS_AND_LINKS);
}

/// A handshake was decided with packets of the attempt before, on one side only, which then waited
/// for a bitmap.
#[test]
fn a_handshake_goes_by_packets_of_its_own_attempt() {
    holds(292, KILLS_AND_LINKS);
}

/// Where nothing tells who is newer, a node that crashed as Primary was preferred to one that was
/// the only good disk of a Primary by now.
#[test]
fn the_disk_that_a_primary_lives_on_is_no_target() {
    holds(113, ALL);
}

/// Each of these ended connected, with one disk Outdated or of an older generation, and nobody
/// compared again.
#[test]
fn an_unequal_pair_compares_again() {
    holds(199, ALL);
    holds(209, ALL);
    holds(257, ALL);
}

/// A resync read waited for a write to the same range, and went to the disk after this was closed.
#[test]
fn a_resync_read_that_waited_does_not_use_a_closed_disk() {
    holds(52, ALL);
}

/// A Primary that crashed with a write in flight became target of another node's slot for a third
/// one, and cleared its own marks for it: the write stayed on its disk alone.
#[test]
fn a_target_of_a_copied_bitmap_keeps_its_own_marks() {
    holds(214, ALL);
}

/// A Primary without a disk lost its last peer before it wrote; when that came back nothing made
/// the generation that was due before, and the old disk was attached as if it had missed nothing.
#[test]
fn a_generation_that_was_due_without_data_is_made_when_they_are_back() {
    holds(559, ALL);
}

/// A source waited for a Primary's writes of before its connection, of which it was never told.
/// And once it was told at the start of replication, it served what it had not got yet.
#[test]
fn a_source_hears_how_far_the_primary_has_come_and_serves_nothing_older() {
    holds(1001, ALL);
    holds(376, ALL);
    holds(932, ALL);
}

/// `invalidate` made the node a target of the third node as well, which did not know of it.
#[test]
fn a_full_resync_from_one_node_asks_no_other() {
    holds(1222, ALL);
    holds(487, ALL);
}

/// An attached disk that became target of one node was to be the source of another, which waited
/// for its bitmap.
#[test]
fn a_target_that_is_source_as_well_sends_its_bitmap() {
    holds(35, ALL);
    holds(871, ALL);
}

/// Survivors compared with a generation that the new Primary was only planning.
#[test]
fn a_planned_generation_is_no_split_brain() {
    holds(838, ALL);
}

/// Each of these waited for a resync or a node for ever.
#[test]
fn resyncs_of_three_nodes_end() {
    holds(76, ALL);
    holds(129, ALL);
    holds(217, ALL);
    holds(224, ALL);
}
