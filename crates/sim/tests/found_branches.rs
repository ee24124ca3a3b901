//! Worlds that failed when two sides were made to write apart, or a target's metadata were looked at before each write.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

/// The loser of a split brain of two Primaries had demoted itself for the next attempt to connect. What it had told in the
/// first one arrived when that was over, and counted in the next one: it was refused as a Primary.
#[test]
fn words_of_an_attempt_that_is_over_do_not_count_in_the_next_one() {
    planned_holds(Some(2), 400027, (None, vec![]), "0", "none");
}

/// The source of a resync marked blocks while it ran. They were asked for and written at once, and neither the target's
/// metadata nor those of a third node that was away would have told of the difference after a power cut.
#[test]
fn what_is_marked_during_a_resync_is_durable_before_it_is_copied() {
    planned_holds(Some(3), 79100017, (None, vec![]), "1-2", "470,476");
    planned_holds(Some(3), 79100019, (None, vec![]), "0-999", "0-9999");
    planned_holds(Some(3), 79100065, (None, vec![]), "0-999", "0-9999");
}

/// A follower of a Primary heard late that its writes were everywhere, and told another branch meanwhile that nothing had
/// changed here: by `discard-zero-changes` it became the target of that, and its Primary's changes were dropped with it.
#[test]
fn received_writes_count_as_changes_before_their_peer_ack() {
    let faults = "1-2,5,8,11-12,14-15,17,20";
    planned_holds(Some(3), 79100076, (None, vec![]), faults, "0");
}

/// A demotion lost a peer that it had asked, and waited to ask again. A write that came meanwhile began, and was acknowledged when the node
/// was Secondary, and was only in its disk's cache.
#[test]
fn no_write_begins_while_a_demotion_waits_to_ask_again() {
    let kinds = Some("handover,handover,stall,slowdisk");
    let extras = vec![Extra::Every, Extra::Hot, Extra::Hasty];
    planned_holds(Some(2), 18, (kinds, extras), "0,2-3,9", "0-4");
}

/// The winner of a split brain of two Primaries heard of the loser's demotion late, and refused it once more as a second
/// Primary: both stayed alone.
#[test]
fn the_winner_waits_for_the_losers_demotion() {
    for seed in [1_320_131_934, 3_486_036_134] {
        planned_holds(Some(2), seed, (None, Vec::new()), "0-99", "0-999");
    }
}

/// A node lost a Primary whose demotion was on its way, and waited for ever for the words of another node, which
/// had lost nothing. It was promoted with a disk that was Consistent only; its generation was made on its peer alone, so that it followed the
/// other branch and took its peer with it.
#[test]
fn a_demoted_primary_is_no_lost_one() {
    planned_holds(Some(3), 2_400_002_416, (None, Vec::new()), "0-99", "0-999");
}

/// A node was invalidated while its source went away, and until all had agreed to that the source had come back as the node's
/// own target: the only whole disk was given up for a part of itself.
#[test]
fn a_source_is_not_invalidated_by_its_target() {
    planned_holds(Some(4), 2_400_001_381, (None, Vec::new()), "0-99", "0-999");
}

/// A node had announced a generation and lost its power before it was made. A full copy to one of those that had taken it named that
/// generation as where the target was left, so that the other one, which is the newer of the two, looked like another branch.
#[test]
fn a_target_is_not_left_at_a_generation_that_was_not_made() {
    planned_holds(Some(4), 2_400_001_054, (None, Vec::new()), "0-99", "0-999");
}

/// The same, and the other node was disconnected from the former Primary before it could say anything of it.
#[test]
fn a_demoted_primary_is_no_lost_one_where_everybody_leaves_it() {
    planned_holds(Some(3), 2_400_007_529, (None, Vec::new()), "0-99", "0-999");
}

/// A node was the source of a Primary, and became the target of another survivor of an earlier one: what the Primary's
/// applications had seen was gone, and nobody was whole.
#[test]
fn the_source_of_a_primary_is_no_target_of_its_equals() {
    planned_holds(Some(3), 2_400_008_904, (None, Vec::new()), "0-99", "0-999");
}

/// A follower named a generation, because another one had, before it was written down; a third dropped its slot by that, the
/// follower lost its power, and its disk was unrelated to theirs.
#[test]
fn nothing_is_said_of_a_generation_that_is_not_durable() {
    planned_holds(Some(3), 2_500_002_438, (None, Vec::new()), "0-99", "0-999");
}

/// A clock jumped, and a node stopped waiting to know whether its disk was current and became Primary beside one that was:
/// it wrote to its disk under a generation that only the other one had.
#[test]
fn nobody_is_promoted_before_its_disk_is_compared() {
    planned_holds(Some(3), 2_500_006_787, (None, Vec::new()), "0-99", "0-999");
    planned_holds(Some(4), 2_400_003_411, (None, Vec::new()), "0-99", "0-999");
}

/// A node was copied from one that followed a Primary, and called itself current because another source, half copied
/// itself, had heard of none. From there its old data went on to others, and back.
#[test]
fn a_source_that_is_behind_makes_no_other_one_stable() {
    planned_holds(Some(4), 2_700_001_568, (None, Vec::new()), "0-99", "0-999");
}

/// A survivor had told the others of its lost Primary, and met that one again, before they lost it. They went by its word, and
/// waited for its copy; it took the Primary for alive and their words for old ones, and all stayed as they were.
#[test]
fn who_has_met_the_lost_primary_again_keeps_its_word() {
    planned_holds(Some(4), 3_100_000_976, (None, Vec::new()), "0-99", "0-999");
}

/// The last whole copy was to be copied from a node that followed a Primary, as that one had made a generation. It followed
/// that one as well before the handshake was over, became a target all the same, and no node had a whole copy.
#[test]
fn who_follows_a_primary_in_a_handshake_does_not_give_its_copy_up() {
    planned_holds(Some(3), 3_100_001_918, (None, Vec::new()), "0-99", "0-999");
}

/// A survivor that had met the lost Primary again was its source. As the target of another survivor it would be in a circle
/// of targets.
#[test]
fn who_has_met_the_lost_primary_again_is_no_target() {
    planned_holds(Some(4), 3_200_005_644, (None, Vec::new()), "0-99", "0-999");
}
