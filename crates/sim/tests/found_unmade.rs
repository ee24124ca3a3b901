//! Planned worlds of generations that were announced or begun, and not made, or made late.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

/// A follower came up to date at a generation that its Primary had left already, and took the next one while a slow
/// line kept the other follower's answer away. It never heard of the one between, which the Primary was still at: had
/// the Primary died, its disk would have looked like another branch.
#[test]
fn a_follower_that_takes_two_generations_at_once_knows_both() {
    let kinds = Some("shuffle,invalidate,partition,crash");
    let turns = vec![Extra::Turns, Extra::Every];
    planned_holds(Some(3), 31, (kinds, turns), "0-99", "0-999");
}
