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

/// The operator made a new generation, and took the disk away by force while it was being written. The disk had never
/// heard of it, so its own Primary refused it.
#[test]
fn a_generation_that_the_operator_wanted_counts_once_it_is_written() {
    let kinds = || (None, vec![Extra::LongLog]);
    planned_holds(Some(2), 7, kinds(), "3-4,7,11", "13,16");
    planned_holds(Some(2), 7, kinds(), "0-99", "0-999");
}

/// A Primary that had stood still lost its peer, and with the same breath its disk. The generation that was to leave
/// the peer behind was written on the disk's way out, although nobody could write under it any more, and the peer was
/// promoted: the two parted as after a split brain.
#[test]
fn a_disk_that_goes_takes_its_unmade_generation_back() {
    let plain = || (None, Vec::new());
    planned_holds(None, 1_256_336_291, plain(), "2-3,15,19", "4-5,7-9,11-15");
    planned_holds(None, 1_256_336_291, plain(), "0-99", "0-999");
}

/// A crashed Primary came back Consistent, was promoted while its follower sent bitmaps to become its target, and made a
/// generation. The follower did not take it, and nothing said that it was left behind: the connection broke, and the two
/// looked like a split brain.
#[test]
fn who_is_about_to_be_resynced_is_left_behind() {
    let handlers = || (None, vec![Extra::Handlers]);
    let secret = || (None, vec![Extra::Secret, Extra::Handlers]);
    planned_holds(None, 121_000_162, handlers(), "0-99", "0-999");
    planned_holds(None, 121_000_012, secret(), "0,4-5,11,13,19", "none");
    planned_holds(None, 121_000_012, secret(), "0-99", "0-999");
}

/// A target ended its resync while its source, a Primary, made a generation without it, and the two words crossed. The Primary
/// died before it made the further one, and the former target was another branch for it.
#[test]
fn a_target_that_ends_while_its_source_makes_a_generation_follows() {
    let kinds = || (None, vec![]);
    const REQUESTS: &str = "0,2,115-118,120,123-124,126,130-134,137-138,140-141,143-144,146-150,152-158,\
                            164-167,169-171,173-176,178-179,182,184-186,191-192,195,198,201,203-205,216,\
                            221-224";
    planned_holds(Some(3), 818000000172, kinds(), "0-1,3-6", REQUESTS);
    planned_holds(Some(3), 818000000172, kinds(), "0-99", "0-999");
}

/// The operator made a generation on a Primary while it met its peer, which had been told the one before: they went on
/// without a resync, and the peer counted at the older one.
#[test]
fn a_generation_that_is_made_during_a_handshake_reaches_the_peer() {
    planned_holds(None, 1_899_200_332, (None, vec![]), "0-99", "0-999");
}
