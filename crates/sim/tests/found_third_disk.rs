//! Planned worlds of two Primaries beside a third disk that failed once, and what was wrong in them.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

fn holds(seed: u64) {
    const KINDS: Option<&str> = Some("crash,partition,reset,powercut");
    let extras = vec![Extra::TwoPrimaries, Extra::ThirdDisk];
    planned_holds(Some(3), seed, (KINDS, extras), "0-99", "0-999");
}

/// A Primary that was still noting a generation dropped that of the other one for it, and gave its own up afterwards
/// without a word. What it had dropped was everybody else's generation by then.
#[test]
fn a_generation_that_is_only_being_noted_does_not_come_first() {
    for seed in [191, 201, 496] {
        holds(seed);
    }
}

/// The generation of the other Primary came while an own one was being noted, which was told all the same, and then
/// given up. The other node had it when it died, and came back as the newer of both.
#[test]
fn a_generation_that_is_void_when_it_is_noted_is_not_told() {
    for seed in [198, 286] {
        holds(seed);
    }
}

/// A Primary that had taken the other one's generation made a further one for whoever had not taken it yet, and so did the
/// other one, again and again.
#[test]
fn who_takes_a_generation_late_is_left_to_the_primary_that_made_it() {
    for seed in [591, 907] {
        holds(seed);
    }
}

/// Both were promoted with blocks marked between them, which were never compared any more.
#[test]
fn a_second_primary_is_not_promoted_over_marks() {
    holds(296);
}

/// A target was to be copied from another target, as they had told each other, and had become whole when they were
/// connected: it gave that up for a disk that was Inconsistent, and the third one went the same way.
#[test]
fn who_became_whole_in_a_handshake_gives_nothing_up_for_an_inconsistent_disk() {
    holds(16);
}

/// The only whole disk lost its Primary while it connected to the third node, and took that Primary for one that had gone
/// on far away: it was Outdated for ever.
#[test]
fn a_neighbour_that_is_lost_in_a_handshake_is_no_primary_far_away() {
    holds(229);
}
