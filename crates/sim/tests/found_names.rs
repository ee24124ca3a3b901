//! Planned worlds in which a generation was a name only.

mod common;

use common::planned_holds;

/// A node took a generation that its Primary announced and gave up, and went. Its successor began one of its own, and the
/// operator another one, which retires what the slots said: a split brain without a change on one side.
#[test]
fn a_name_that_was_given_up_is_no_branch_after_the_operator_has_made_a_generation() {
    const SEED: u64 = 641_666_000_745;
    planned_holds(Some(3), SEED, (None, Vec::new()), "0-1,6-7", "2-16");
    planned_holds(Some(3), SEED, (None, Vec::new()), "0-99", "0-999");
}
