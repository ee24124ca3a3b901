//! Planned worlds in which a handshake went by what did not hold any more.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

#[track_caller]
fn holds(nodes: usize, seed: u64, kinds: Option<&str>, faults: &str, requests: &str) {
    planned_holds(Some(nodes), seed, (kinds, Vec::new()), faults, requests);
}

const TAKEOVER: Option<&str> = Some("takeover,crash,partition,reset");

/// A node ended a resync while it connected to a third node, and the third node became its source by what it
/// had been told before: newer data were overwritten with older ones.
#[test]
fn a_resync_that_ends_during_a_handshake_is_compared_anew() {
    holds(3, 88_100_017, TAKEOVER, "0-1,3,10", "0");
    holds(3, 88_100_017, TAKEOVER, "0-99", "0-999");
}

/// A follower took a new generation of its Primary in the middle of a handshake, and did not tell it when it
/// compared at once for marks: the peer had gone on with the Primary and saw another branch.
#[test]
fn a_generation_of_a_handshake_is_told_before_marks_are_compared() {
    const REQUESTS: &str = "6,17,20-21,24-26,28,32-33,35,38-45,50,52,58-59";
    holds(4, 8_300_218, None, "0-1", REQUESTS);
    holds(4, 8_300_218, None, "0-99", "0-999");
}

/// These stayed suspended for want of quorum, or did not connect any more.
#[test]
fn nobody_waits_for_ever_after_a_takeover() {
    holds(3, 5100, TAKEOVER, "0-99", "0-999");
    holds(3, 5157, TAKEOVER, "0-99", "0-999");
}

/// The checker of verifies took one that a lost link had cut short for one that had ended.
#[test]
fn a_verify_that_is_cut_short_is_made_again() {
    const REQUESTS: &str = "95-96,99-100,103,193-194,204-205,207,248-251,266-268,272-274";
    holds(2, 79_000_069, None, "7", REQUESTS);
    holds(2, 79_000_069, None, "0-99", "0-999");
}

/// A question of a node came through a third one, on a stream that had stood still for longer than there was a
/// connection with that node. It was taken for a sign that the connection had been lost there, and half a minute later
/// the node's first write as Primary ended it, although nothing was wrong.
#[test]
fn a_question_that_is_older_than_a_connection_says_nothing_of_it() {
    const KINDS: &str = "stall,stall,stall,disconnect,handover,detach";
    for seed in [24, 44, 55] {
        let kinds = (Some(KINDS), vec![Extra::Every, Extra::Numb]);
        planned_holds(Some(3), seed, kinds, "0-99", "0-999");
    }
}

/// A node had lost the Primary alone and was UpToDate. It met a third one again and again, which was being
/// resynced from that Primary and told so, but two such nodes connect only when that has ended.
#[test]
fn a_node_that_meets_a_target_of_a_newer_primary_is_outdated() {
    holds(3, 60_100_251, None, "1-3", "0-1");
    holds(3, 60_100_251, None, "0-99", "0-999");
}

/// A Primary was promoted beside a Consistent node, which was source of a third one and got no writes: the
/// third one waited for those for ever. The two were not compared, because a resync ran.
#[test]
fn a_primary_compares_with_a_consistent_node_beside_a_resync() {
    let handlers = || (None, vec![Extra::Handlers]);
    planned_holds(Some(3), 2, handlers(), "2,4", "5,7");
    planned_holds(Some(3), 2, handlers(), "0-99", "0-999");
}

/// A node of 8.3's dialect asked its peer for an `invalidate`. The UUID of the resync came before the peer's yes, which
/// is on the other stream, and was taken for one that nobody had asked for: the connection ended.
#[test]
fn the_uuid_of_a_resync_may_come_before_the_peer_has_agreed_to_it() {
    planned_holds(Some(2), 63, (None, vec![Extra::Old]), "0", "none");
    planned_holds(Some(2), 63, (None, vec![Extra::Old]), "0-99", "0-999");
    planned_holds(Some(2), 152, (None, vec![Extra::Old]), "0-99", "0-999");
}

/// Protocol B: a Primary crashed and came back, was copied from a third node, and met the last good copy in the
/// middle of that. It became the source, as a crashed Primary, with a disk that was not whole: no good copy was left.
#[test]
fn a_crashed_primary_that_is_being_copied_is_no_source() {
    const KINDS: &str = "cut-command,cut-command,cut-command,reset,partition,powercut";
    let kinds = || (Some(KINDS), vec![Extra::Every, Extra::Csums]);
    planned_holds(Some(3), 8, kinds(), "0,8,10-11,17-20", "1-16");
    planned_holds(Some(3), 8, kinds(), "0-99", "0-999");
}

/// A Primary's disk was Negotiating when a peer connected, so nothing was decided between the two, and became UpToDate
/// by other nodes before the connect was committed. The peer counted as UpToDate with 34 marked blocks.
#[test]
fn a_disk_that_is_attached_during_a_handshake_is_compared() {
    holds(
        4,
        79_200_009,
        None,
        "0,2-3,6-8,11,13-14,17-18",
        "2-5,9,12-13",
    );
    holds(4, 79_200_009, None, "0-99", "0-999");
}

/// A Primary lost its power and was back, and one node had not noticed. It asked the old connection already, since the
/// returned one's question had come through another node, and still told that one that the two were equal: two
/// disks differed, and neither knew it.
#[test]
fn nobody_vouches_for_a_peer_that_asks_as_if_it_were_lost() {
    holds(4, 79_200_079, None, "12,14", "0");
    holds(4, 79_200_079, None, "0-99", "0-999");
}

/// A node refused a connect for the moment and heard all that the peer told of itself for it. The next attempt was decided
/// by that at once: the peer's disk was Outdated and had marks then, and the two looked like a split brain. They did because a
/// client had given up a generation that one node had taken, and never told it to those that followed the next one.
#[test]
fn what_was_told_for_a_refused_connect_does_not_count_for_the_next_one() {
    let kinds = || {
        let extras = vec![Extra::Every, Extra::Hot];
        (Some("shuffle,diskless,crash"), extras)
    };
    planned_holds(Some(4), 98_001_464, kinds(), "0,2,7-8,10", "1,4");
    planned_holds(Some(4), 98_001_464, kinds(), "0-99", "0-999");
}

/// In the dialect of 8.4 a disk failed as its attach was compared, and its node took the source's bitmap without one. At the next
/// attach that bitmap, which no disk had got, counted as the other half of the exchange.
#[test]
fn a_bitmap_without_a_disk_is_none_of_the_next_exchange() {
    holds(2, 3_854_990_099, None, "12,15-17", "none");
    holds(2, 3_854_990_099, None, "0-99", "0-999");
}

/// In the dialect of 8.4 a target died before it heard what its resync is called, and its source was promoted twice: the
/// generation that the name comes from was too far back in the source's history. Another one lost two names with its power.
#[test]
fn a_target_that_missed_a_resyncs_name_is_known_by_the_name() {
    holds(2, 181_176_683, None, "0-99", "0-999");
    const REQUESTS: &str = "1-2,57,60-68,71-74";
    holds(2, 2_703_733_889, None, "0-2,4-5,9,11", REQUESTS);
    holds(2, 2_703_733_889, None, "0-99", "0-999");
}

/// A Primary stood still while a barrier was to be answered, and looked at the clock before it read the answer.
#[test]
fn who_stood_still_reads_the_answers_before_it_gives_a_peer_up() {
    holds(2, 62_921_695, None, "0", "50,64");
    holds(2, 62_921_695, None, "0-99", "0-999");
}

/// The same where it stood still until less than 0.1 s after the time was over: how late a look was did not tell. In the
/// second row it had looked before it stood still once more, for 13 ms, which the check did not count.
#[test]
fn who_stood_still_until_just_after_the_time_was_over_reads_the_answers_too() {
    for seed in [2_710_000_425, 1_270_898_475, 850_140_001_706] {
        holds(2, seed, None, "0-99", "0-999");
    }
    holds(3, 3_300_001_001, None, "0-99", "0-999");
    for seed in [654_567_377, 402_675] {
        holds(2, seed, None, "0-99", "0-999");
    }
    let hanging = Some("hangdisk,freeze,freeze,reset");
    let kinds = (hanging, vec![Extra::Every]);
    planned_holds(Some(2), 820_000_008_231, kinds, "0-99", "0-999");
    for (seed, nodes) in [(795_000_000_410, 3), (796_000_000_012, 3)] {
        let kinds = Some("freeze,stall,slowdisk,invalidate,reset");
        let extras = vec![Extra::Congestion, Extra::Every, Extra::Hot];
        planned_holds(Some(nodes), seed, (kinds, extras), "0-99", "0-999");
    }
}

/// In the dialect of 8.4 a source on a slow disk answered, after its target had detached and attached on the same link, what the
/// target had asked for before, which the target took for data that nobody had asked for.
#[test]
fn a_late_answer_from_before_an_attach_is_no_error() {
    holds(2, 2_703_735_256, None, "1-2,6,9", "2,5");
    holds(2, 2_703_735_256, None, "0-99", "0-999");
}

/// A node that attached its disk said so twice. By the second word its target ended the resync that the first one had
/// begun, and the two waited for each other.
#[test]
fn an_attach_that_is_told_twice_ends_no_resync() {
    const KINDS: Option<&str> =
        Some("promote,promote,disconnect,handover,detach,invalidate,suspend");
    planned_holds(Some(3), 1180, (KINDS, vec![Extra::Every]), "0-99", "0-999");
}
