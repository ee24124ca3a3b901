//! Planned worlds in which a generation was a name only.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

/// A node took a generation that its Primary announced and gave up, and went. Its successor began one of its own, and the
/// operator another one, which retires what the slots said: a split brain without a change on one side.
#[test]
fn a_name_that_was_given_up_is_no_branch_after_the_operator_has_made_a_generation() {
    const SEED: u64 = 641_666_000_745;
    planned_holds(Some(3), SEED, (None, Vec::new()), "0-1,6-7", "2-16");
    planned_holds(Some(3), SEED, (None, Vec::new()), "0-99", "0-999");
}

/// 8.4's dialect has room for two ancestors. A source lost the end of a resync with its power and was promoted again and again: its
/// target, which had come to the end, did not find the generation that it was copied to.
#[test]
fn a_target_that_came_to_the_end_is_known_to_a_source_that_forgot_it() {
    let old = || vec![Extra::Old];
    planned_holds(None, 779_300_004_095, (None, old()), "0-2,4", "57,62");
    planned_holds(None, 779_300_004_095, (None, old()), "0-99", "0-999");
    for seed in [2_911_001_799, 3_800_000_642] {
        planned_holds(Some(2), seed, (None, Vec::new()), "0-99", "0-999");
    }
}

/// The same where the start of a resync of everything did not reach the target: its name was made by chance, and said nothing
/// of the generation that the target was still at.
#[test]
fn a_resync_of_everything_is_called_after_the_generation_that_it_begins_from() {
    const SEED: u64 = 785_000_001_275;
    planned_holds(Some(2), SEED, (None, Vec::new()), "0-1,4,12", "1,6,8");
    planned_holds(Some(2), SEED, (None, Vec::new()), "0-99", "0-999");
}
