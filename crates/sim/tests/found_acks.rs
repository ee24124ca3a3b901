//! Planned worlds in which a write was missing at a peer that counted, or on one of two disks without a mark.

mod common;

use common::planned_holds as holds;
use lockstep_sim::extras::Extra;

/// A frozen write went on with one peer while another connected, whose last resync had ended unheard: both said
/// that nothing was marked, and the peer counted without the write.
#[test]
fn a_write_that_begins_during_a_handshake_is_marked_in_the_next_one() {
    let kinds = || (Some("takeover,crash,partition,reset"), Vec::new());
    holds(Some(3), 36_400_008, kinds(), "0-3", "0,9");
    holds(Some(3), 36_400_008, kinds(), "0-99", "0-999");
}

/// A client's frozen writes were sent again to the storage node that came back, and not to the one that this
/// node had brought up to date before it had them.
#[test]
fn what_is_sent_again_goes_to_those_who_came_since_as_well() {
    let kinds = || (Some("diskless,quorum,crash,partition,reset"), Vec::new());
    const REQUESTS: &str = "7,28-29,32,34,36-38,53-55,62,67";
    holds(Some(3), 90_013_188, kinds(), "0-1,3-4", REQUESTS);
}

/// A storage node was brought up to date by another one, away from the client that was Primary. It had the
/// generation that applications saw, and the client went on to write under it.
#[test]
fn a_node_that_caught_up_unseen_is_left_behind_by_a_new_generation() {
    let kinds = || (Some("diskless,quorum,crash,partition,reset"), Vec::new());
    const REQUESTS: &str = "7,28-29,32-34,36-38,42,48-51,53-64,66-70,73-85,87-107,178";
    holds(Some(3), 90_013_188, kinds(), "0-1,3-5,7,9", REQUESTS);
    holds(Some(3), 90_013_188, kinds(), "0-99", "0-999");
}

/// With protocol A a write was acknowledged that a peer never got. The Primary was demoted before it made the
/// generation that leaves that peer out, and the peer undid the write at a node that had it.
#[test]
fn a_demotion_does_not_forget_whom_a_write_did_not_reach() {
    let kinds = || {
        let stall = "stall,stall,stall,disconnect,handover,detach";
        (Some(stall), vec![Extra::Every, Extra::Numb])
    };
    holds(Some(3), 90_011_122, kinds(), "7-9", "57,59");
    holds(Some(3), 90_011_122, kinds(), "0-99", "0-999");
}

/// A write at the target of a resync was to be made again, because its peer was lost, and failed instead. The
/// disk had it from the first time, and nobody marked it.
#[test]
fn a_write_that_fails_when_it_is_made_again_is_marked() {
    let both = || (None, vec![Extra::TwoPrimaries]);
    const REQUESTS: &str = "50-51,155,162,227";
    holds(None, 90_014_091, both(), "6,10,12,14", REQUESTS);
    holds(None, 90_014_091, both(), "0-99", "0-999");
}

/// Of two Primaries one lost its power and the other died before it was back. The one that lost an unflushed
/// write was the source: both were gone at once, and only what was flushed is promised then.
#[test]
fn two_primaries_that_die_together_keep_what_was_flushed() {
    let both = || (None, vec![Extra::TwoPrimaries, Extra::TieBreaker]);
    const REQUESTS: &str = "0-3,5-9,12,14-16,19-20,23,25-26,28-35,39-40,46-58,60";
    holds(Some(2), 1542, both(), "2-3,5,7,10", REQUESTS);
    holds(Some(3), 1542, both(), "0-99", "0-999");
}

/// A Primary without whole data lost its source under a flush. With `on-no-data-accessible io-error` the flush did not
/// wait for the end of the suspension, which is right, but it was acknowledged: the other disk may have lost what was
/// to be flushed, and is the source when it comes back.
#[test]
fn a_flush_that_cannot_wait_for_the_source_fails() {
    for (nodes, seed) in [(3, 90), (2, 99_002_628)] {
        let kinds = (None, vec![Extra::TwoPrimaries, Extra::TieBreaker]);
        holds(Some(nodes), seed, kinds, "0-99", "0-999");
    }
}

/// The operator disconnected a node that still wrote what a lost connection had brought. It was taken for drained, and the
/// next connection got the ack.
#[test]
fn a_connection_that_drains_is_not_made_again_before_that() {
    holds(Some(2), 145_000_034, (None, vec![]), "0-2", "0-1,3,5-6");
    holds(Some(2), 145_000_034, (None, vec![]), "0-99", "0-999");
}

/// The same in the dialect of 8.4: an operator held requests back, so the generation was not made, and the demotion
/// dropped it. The peer compares nothing but generations, and what it lacked was forgotten.
#[test]
fn a_demotion_forgets_nobody_while_requests_are_held_back() {
    holds(Some(2), 902_736_588, (None, vec![]), "0,2-4", "94");
    holds(Some(2), 902_736_588, (None, vec![]), "0-99", "0-999");
}

/// A Primary copied two nodes that were connected with each other, and both lost their power. What one of them had been
/// given was marked by the other one in memory only, and the marks towards the Primary said nothing of the pair.
#[test]
fn two_targets_that_lose_their_power_know_where_they_differ() {
    let kinds = || (Some("resize,cut-resize,crash,partition,powercut"), vec![]);
    const REQUESTS: &str = "3-9,12,15-20,25-26";
    holds(Some(3), 5_200_069, kinds(), "0-1,3-4,6", REQUESTS);
    holds(Some(3), 5_200_069, kinds(), "0-99", "0-999");
}

/// A write failed for the application, but the Primary's disk had it. A resync took it back there before the Primary told its
/// peer that it has the write.
#[test]
fn a_resync_does_not_take_back_what_is_still_to_be_told() {
    holds(Some(2), 2_703_736_603, (None, vec![]), "0-3", "0-5");
    holds(Some(2), 2_703_736_603, (None, vec![]), "0-99", "0-999");
}

/// A client sent a write to another node after newer ones, which it had there at once: peer acks come in the order of the
/// writes, and were taken in the order in which these had come.
#[test]
fn peer_acks_of_late_writes_are_their_own() {
    holds(Some(3), 3_100_001_560, (None, Vec::new()), "0-99", "0-999");
}

/// A Primary was to be copied from another one, and what it had written before was settled after that: its acks were from
/// before the marks, and cleared them. The other one's stayed.
#[test]
fn a_write_from_before_a_resync_clears_none_of_its_marks() {
    let both = || (None, vec![Extra::TwoPrimaries]);
    holds(None, 779_000_012_633, both(), "1-3,6", "1-3,9-11,14-17");
    holds(None, 779_000_012_633, both(), "0-99", "0-999");
}
