//! Planned worlds of two nodes that failed once, shrunk, and what was wrong.

mod common;

use common::planned_holds;
use lockstep_sim::drive::{Trace, run};
use lockstep_sim::extras::Extra;
use lockstep_sim::plan::{Numbers, Orders, Size};
use lockstep_sim::swarm::{self, Limits};

/// Only these faults and requests of a seed's plan.
fn holds(seed: u64, size: Size, faults: &str, requests: &str) {
    let orders = Orders {
        size,
        nodes: Some(2),
        only_faults: Some(Numbers::parse(faults).unwrap()),
        only_requests: Some(Numbers::parse(requests).unwrap()),
        ..Orders::default()
    };
    let played = run(seed, &orders, Trace::Off);
    assert_eq!(played.violation, None, "{}", orders.command(seed));
}

/// A world of the first design.
fn first_design_holds(seed: u64) {
    let limits = Limits {
        nodes: Some(2),
        ..Limits::default()
    };
    let outcome = swarm::run(seed, &limits);
    assert_eq!(outcome.violation, None, "seed {seed}: {}", outcome.shape);
}

#[test]
fn two_disks_that_come_back_at_once_are_compared() {
    // The Primary's own disk, on its way back, has the newer generation.
    holds(511, Size::Small, "8-9,14,16", "1125,1701,1743");
}

#[test]
fn a_node_that_lost_its_disk_does_not_serve_an_ancestor_of_what_it_has_shown() {
    first_design_holds(6166);
}

#[test]
fn a_generation_that_its_source_makes_at_the_end_of_a_resync_reaches_the_target() {
    holds(20150, Size::Any, "1,4", "11");
}

#[test]
fn an_inconsistent_disk_gets_no_generation_of_its_own() {
    // `new-current-uuid` on a SyncTarget that had lost its source made it the source.
    holds(929, Size::Any, "4-6,8,10,12", "3");
}

#[test]
fn a_generation_made_while_the_target_ends_its_resync_is_followed_at_once() {
    // Its source dies before the pair is compared again.
    holds(20150, Size::Any, "1,7", "0,13");
    holds(1979, Size::Any, "3-5,7", "39,42,44,59");
}

#[test]
fn a_target_knows_the_generation_of_a_source_that_lost_its_disk_at_the_end() {
    holds(31144, Size::Any, "0,3-4", "0-4,6-8,11,14,17-18");
}

#[test]
fn what_the_last_copy_under_a_primary_without_a_disk_has_survives_a_power_cut() {
    holds(9618, Size::Any, "0-2", "3-14,19-38,41-43,45-62,67,70");
}

#[test]
fn a_disk_that_an_84_peer_attaches_is_compared_with_the_generation_made_for_it() {
    holds(9816, Size::Any, "0-1,5", "12,49");
}

#[test]
fn the_lost_end_of_a_resync_with_84_does_not_hide_what_was_marked_meanwhile() {
    holds(
        30171,
        Size::Any,
        "1-3",
        "30,56-58,61,88,103,105-108,114,167,169-170,182,185-186,201-202,212,214,216,221,240-242",
    );
}

#[test]
fn a_demoted_node_has_flushed_what_it_wrote() {
    holds(30448, Size::Any, "0,8", "0");
}

#[test]
fn a_write_that_conflicts_with_nothing_does_not_hide_that_an_ack_is_missing() {
    // The next write of the same sender overlapped one that this ack was about.
    let both = (None, vec![Extra::TwoPrimaries]);
    planned_holds(None, 603, both, "none", "238,249,262,269,271");
}

#[test]
fn the_superblock_that_calls_a_demoted_node_no_crashed_primary_comes_after_a_flush() {
    holds(90040, Size::Any, "4", "0");
    holds(90058, Size::Any, "0", "0");
}

#[test]
fn what_the_last_whole_copy_under_a_primary_in_a_resync_acknowledges_is_durable() {
    let orders = Orders {
        nodes: Some(2),
        volumes: Some(1),
        only_faults: Some(Numbers::parse("0,4,14").unwrap()),
        only_requests: Some(Numbers::parse("14-35").unwrap()),
        ..Orders::default()
    };
    assert_eq!(run(90037, &orders, Trace::Off).violation, None);
}

#[test]
fn a_planned_generation_is_not_told_in_the_middle_of_a_handshake() {
    holds(81473, Size::Any, "5-6,9,12,14", "11,13");
}

#[test]
fn an_inconsistent_disk_that_is_detached_gets_no_new_generation() {
    holds(100659, Size::Any, "6-7,11-14", "15,24");
}

#[test]
fn a_flush_waits_for_no_write_that_only_a_read_has_seen() {
    // The peer's disk, which serves the read, has it before the own one.
    holds(
        201357,
        Size::Any,
        "0-1,3",
        "0-1,3,6-7,10-14,16-17,19-24,32-33,40-41,43,45-46,51-52,55,59-66,77,82,112,114,120,124,126,\
         132,134,140-141,143,145,156,170",
    );
}

#[test]
fn a_disk_that_has_just_refused_a_write_need_not_have_it() {
    // Its refusal overtakes the state that follows from it.
    holds(201423, Size::Any, "0,14-15", "61-62");
}

#[test]
fn a_generation_that_is_confirmed_while_the_own_disk_comes_back_is_no_ancestor_there() {
    holds(600244, Size::Any, "0", "0-2,8-10");
}

#[test]
fn an_84_peer_hears_of_each_generation_that_the_first_promotion_makes() {
    // A late state from before the initial sync was skipped made one more.
    holds(300705, Size::Any, "0", "0");
}

#[test]
fn a_crashed_84_primary_keeps_its_peers_generation_among_the_ancestors() {
    holds(400102, Size::Any, "0-1,9-10", "1-2,21-23,25-57,59-64,67-74");
}

#[test]
fn marks_of_an_84_disk_that_was_detached_alone_stay() {
    holds(410037, Size::Any, "6-7,10,15-16", "8");
}

#[test]
fn who_was_lost_just_before_the_primarys_disk_is_no_heir() {
    holds(401436, Size::Any, "0-1,3", "1,24");
}

#[test]
fn disks_fail_under_protocol_c_only() {
    // Under protocol A the write was on the failed disk alone.
    holds(401724, Size::Any, "6-7,9", "26,28");
}

#[test]
fn a_write_that_failed_on_the_own_disk_ends_when_the_metadata_say_so() {
    // Acknowledged before, it was gone after a power cut of both nodes, and nothing said so.
    holds(992123, Size::Any, "0", "2,5");
}

#[test]
fn the_operator_demotes_a_primary_that_refuses_the_data_of_a_crashed_one() {
    first_design_holds(7294);
}

#[test]
fn marks_between_two_disks_that_become_up_to_date_together_are_looked_at() {
    // Neither of two Consistent disks could be the source of a resync.
    planned_holds(Some(2), 2, (None, vec![Extra::Handlers]), "2,6,10", "0");
}

#[test]
fn a_disk_with_the_generation_that_a_primary_without_one_serves_is_good() {
    // With fencing the Primary counted as one that may have newer data.
    planned_holds(Some(2), 19, (None, vec![Extra::Handlers]), "0-2", "2,8,12");
}

#[test]
fn a_disk_that_was_given_up_while_it_got_the_next_generation_comes_back() {
    const KINDS: &str = "metaerror,hangdisk,resize,powercut,crash,diskless,readerror,writeerror";
    planned_holds(None, 1055, (Some(KINDS), Vec::new()), "0", "0");
}

#[test]
fn the_operator_demotes_a_frozen_primary_whose_successor_has_written_nothing() {
    const KINDS: &str = "takeover,crash,partition,reset";
    planned_holds(Some(3), 28, (Some(KINDS), Vec::new()), "5", "none");
}

#[test]
fn a_copy_on_a_disk_that_is_being_resynced_is_no_copy() {
    // Its source refused the write, and came back without it.
    const KINDS: &str = "detach,stall,slowdisk,reset";
    planned_holds(
        None,
        114,
        (Some(KINDS), Vec::new()),
        "8-9,11,14",
        "155-160,165-166,169-172,175-182,185-192,195-206,209-210,213-220,223-224,227-232,237-238,\
         241-246,249-254,275-290,295-302,305-314,319-398,403-438,441-479,481-483,485,487,489-491,\
         493-504,506",
    );
}

/// A resync ended while its source still waited for its handler. The target took the source's next
/// state for the begin of another resync, and waited for it in vain; the source knew the target's disk
/// as it had been at the end.
#[test]
fn a_source_in_its_handler_does_not_keep_a_target_that_has_finished() {
    let handlers = || (None, vec![Extra::Handlers]);
    planned_holds(Some(3), 14, handlers(), "4,6-7", "none");
    planned_holds(Some(3), 14, handlers(), "0-99", "0-99");
}

#[test]
fn a_primary_without_a_disk_takes_the_generation_that_it_announced_to_a_peer_that_was_lost() {
    // It refused that peer, and then its own disk, for ever.
    const KINDS: &str = "writeerror,writeerror,writeerror,suspend,reset,crash";
    let kinds = || (Some(KINDS), Vec::new());
    planned_holds(Some(2), 500_026, kinds(), "6,8-9", "31,35,57");
}

#[test]
fn the_operator_shrinks_the_rest_after_a_growth_was_refused() {
    let kinds = || (Some("resize,crash,partition,powercut"), Vec::new());
    planned_holds(Some(2), 100_719, kinds(), "13-16", "none");
}

/// A Primary lost its disk while a generation was announced that one peer had taken already: it took
/// that peer for one that stayed behind, wrote without it, and gave it the next generation all the same.
#[test]
fn who_took_an_announced_generation_is_not_behind_when_the_primarys_disk_goes() {
    const REQUESTS: &str = "0-13,16-17,19-20,22-26,28-29,31,37,57,59-60,63-70";
    planned_holds(Some(4), 8_300_222, (None, Vec::new()), "0,2-3", REQUESTS);
    planned_holds(Some(4), 8_300_222, (None, Vec::new()), "0-99", "0-999");
}

/// A Primary whose disk was being resynced lost its source, and with it its quorum. A third node with
/// older data became the source, and gave the quorum back: applications read what they had overwritten.
#[test]
fn a_node_with_older_data_does_not_take_the_place_of_a_primarys_source() {
    const KINDS: &str = "takeover,crash,partition,reset";
    let kinds = || (Some(KINDS), Vec::new());
    planned_holds(Some(3), 900_902, kinds(), "0-99", "0-999");
}

/// A node came back while the disk of the Primary was on its way out. Its own word made an UpToDate disk
/// of one that the handshake had found to be old, and reads went there.
#[test]
fn a_peer_that_returns_while_the_primarys_disk_goes_stays_outdated() {
    const REQUESTS: &str = "1,3-4,33-34,39-41,43-50,54-57,65,67-74,77-78,81-82,96-107,110-115,117-119,\
                            128-130";
    planned_holds(Some(3), 8_600_057, (None, Vec::new()), "0,4,6", REQUESTS);
    planned_holds(Some(3), 8_600_057, (None, Vec::new()), "0-99", "0-999");
}

/// A Primary died with a write under way, came back, was promoted again and had marks. A follower whose
/// disk was Consistent became UpToDate beside it without a resync.
#[test]
fn a_consistent_disk_that_a_primary_has_marks_for_is_resynced() {
    planned_holds(Some(3), 8_610_130, (None, Vec::new()), "0-99", "0-999");
}

/// A Primary died before its followers had the barrier of its last writes. A flush under the next
/// Primary was acknowledged while one follower still had those writes only in its cache.
#[test]
fn what_a_dead_primary_left_in_a_followers_cache_is_durable_under_the_next_one() {
    planned_holds(
        Some(3),
        9_100_444,
        (None, Vec::new()),
        "1",
        "11-12,15-16,25",
    );
    planned_holds(Some(3), 9_100_444, (None, Vec::new()), "0-99", "0-999");
}

#[test]
fn a_write_that_comes_while_a_peer_decides_about_its_disk_is_not_missed() {
    // The peer attached, took its disk for whole, and got neither the write nor a mark.
    let extras = vec![Extra::Every, Extra::ShortLog];
    let kinds = (Some("suspend,detach"), extras);
    planned_holds(Some(2), 40, kinds, "0-24", "1,39,363");
}

#[test]
fn the_ack_of_an_older_write_clears_no_mark_of_what_came_instead_of_a_newer_one() {
    // The Primary had pulled ahead of both; one was resynced, and forgot that the other was not.
    let extras = vec![Extra::Congestion, Extra::Every, Extra::Hot];
    let kinds = (Some("freeze,stall,slowdisk,invalidate,reset"), extras);
    planned_holds(Some(3), 894, kinds, "1", "3,7");
}

/// A node resynced from one source and was in line for another one, which had itself got newer blocks
/// from the Primary. The first source had not heard of that, called all three equal, and marks went.
#[test]
fn an_old_word_about_a_waiting_source_clears_no_marks_towards_it() {
    const REQUESTS: &str = "2-3,11,21-24,28";
    planned_holds(Some(4), 9_200_033, (None, Vec::new()), "0-4", REQUESTS);
    planned_holds(Some(4), 9_200_033, (None, Vec::new()), "0-99", "0-999");
}

/// A node without a majority died in the middle of its attach, and took itself for the last man standing
/// when it came back: it became Primary alone among three.
#[test]
fn an_attach_that_is_cut_short_gives_no_quorum() {
    const KINDS: &str = "takeover,detach,detach,partition,crash,reset";
    let kinds = || (Some(KINDS), Vec::new());
    planned_holds(Some(3), 20_057, kinds(), "2-4,6,8,12-13,15", "28");
    planned_holds(Some(3), 20_057, kinds(), "0-99", "0-999");
}

/// `new-current-uuid` was obeyed while the disk of a Primary was on its way in: the old data counted as
/// newer than what applications had seen on the peers, and were served.
#[test]
fn a_disk_that_is_being_attached_gets_no_new_generation() {
    planned_holds(Some(4), 8_300_171, (None, Vec::new()), "0,2,9", "0");
    planned_holds(Some(4), 8_300_171, (None, Vec::new()), "0-99", "0-999");
}

/// A Primary whose disk was being resynced read a peer's. Its own became UpToDate while a write that the
/// peer had already was on its way to it, and a later read returned what was there before.
#[test]
fn a_disk_that_becomes_up_to_date_shows_nothing_older_than_the_peer_did() {
    let kinds = || (Some("takeover,crash,partition,reset"), Vec::new());
    planned_holds(Some(3), 61, kinds(), "0-99", "0-999");
}

/// What a frozen Primary alone had read of a write that it never acknowledged may be missing at the node
/// that takes over, as after a crash.
#[test]
fn a_takeover_loses_what_was_never_acknowledged() {
    let kinds = || (Some("takeover,crash,partition,reset"), Vec::new());
    for seed in [900_918, 900_930] {
        planned_holds(Some(3), seed, kinds(), "0-99", "0-999");
    }
}

/// A source was asked for blocks "after dagtag 248" of a Primary, which its target knew of the Primary's
/// life before. The source was connected to the new life, whose dagtags are small, and waited for ever.
#[test]
fn a_source_does_not_wait_for_writes_of_a_former_life() {
    planned_holds(
        Some(3),
        12_916_339,
        (None, Vec::new()),
        "2-4",
        "156,172-185",
    );
    planned_holds(Some(3), 12_916_339, (None, Vec::new()), "0-99", "0-999");
}

/// A node was copied from one of two UpToDate nodes, whose last writes differed, and what it had marked
/// towards the other stayed marked and different: its resync with that one was closed, and nobody compared.
#[test]
fn what_another_source_left_marked_is_compared() {
    planned_holds(None, 400_715, (None, Vec::new()), "4", "7-8,11");
}

/// A target ended its resync while its source was promoted and began a generation: for three seconds
/// writes were acknowledged that the target had under the generation before.
#[test]
fn a_promotion_beside_the_end_of_a_resync_reaches_the_target() {
    const KINDS: &str = "writeerror,writeerror,writeerror,suspend,reset,crash";
    const REQUESTS: &str = "228-229,232-233,239,244,254-262";
    planned_holds(
        Some(2),
        99_000_470,
        (Some(KINDS), Vec::new()),
        "2,6",
        REQUESTS,
    );
}

/// All copies of a volume were Outdated and equal, beside a Primary whose applications had seen nothing
/// newer: they waited for the operator.
#[test]
fn a_primary_goes_on_with_what_everybody_has() {
    let shuffled = (
        Some("shuffle,shuffle,crash,handover"),
        vec![Extra::Every, Extra::Bursts],
    );
    planned_holds(Some(3), 172, shuffled, "0-99", "0-999");
}

/// A storage node of a diskless Primary was detached under a write and attached again. The marks that the
/// other storage node had of this write made it count as one that came back: the write was lost.
#[test]
fn a_disk_that_is_attached_is_no_source_of_what_it_missed() {
    const KINDS: &str = "detach,detach,handover,partition,reset,invalidate,diskless";
    let kinds = || (Some(KINDS), Vec::new());
    planned_holds(Some(3), 7, kinds(), "0,3,9", "0,3-6,8,10,14-16,19");
    planned_holds(Some(3), 7, kinds(), "0-99", "0-999");
}

const TAKEOVER: &str = "takeover,crash,partition,reset";

/// The target of a resync forgot the generation at which a dead third node had stopped: an entry of no node
/// held it as well, which nobody is sent. The third node came back and its data were taken for a split brain.
#[test]
fn a_dead_primary_meets_one_that_was_resynced_meanwhile() {
    planned_holds(Some(3), 15_500_142, (None, Vec::new()), "5,7", "117-118");
    planned_holds(Some(3), 15_500_142, (None, Vec::new()), "0-99", "0-999");
}

/// A frozen Primary that may give way saw a successor of a newer generation that had written nothing since:
/// an empty resync was no reason to give way, and two Primaries did not connect.
#[test]
fn a_frozen_primary_gives_way_to_one_that_has_written_nothing() {
    let kinds = || (Some(TAKEOVER), Vec::new());
    planned_holds(Some(3), 422_145_001_147, kinds(), "0-1,7", "2-10");
    planned_holds(Some(3), 421_414_000_542, kinds(), "9,13,15", "none");
    planned_holds(Some(3), 421_414_000_542, kinds(), "0-99", "0-999");
}

/// The source of a resync got a Primary that its target did not reach. The target became UpToDate at the end,
/// and lacked what was written from then on.
#[test]
fn a_target_that_does_not_reach_the_primary_of_its_source_is_not_whole() {
    let kinds = || (Some(TAKEOVER), Vec::new());
    planned_holds(Some(3), 422_145_000_940, kinds(), "6,14-16,20", "0-1,23,28");
    planned_holds(Some(3), 422_145_000_940, kinds(), "0-99", "0-999");
}

/// A client without a disk called a storage node Outdated when it connected, since the other one showed
/// newer data, and the node's next state made it UpToDate again: the client read what was overwritten.
#[test]
fn an_old_copy_stays_old_for_a_client() {
    const KINDS: &str = "detach,detach,handover,partition,reset,invalidate,diskless";
    let kinds = || (Some(KINDS), Vec::new());
    planned_holds(Some(3), 269, kinds(), "0,4,7,10-12", "188,208,221-222");
    planned_holds(Some(3), 269, kinds(), "0-99", "0-999");
}

/// While a suspension ended, and one volume waited for its generation, another volume lost its disk: it
/// went on with the generation of that disk, which came back and overwrote what was written meanwhile.
#[test]
fn a_volume_that_loses_its_disk_when_a_suspension_ends_gets_a_generation() {
    let kinds = || (Some("suspend,detach"), vec![Extra::Every, Extra::ShortLog]);
    planned_holds(Some(2), 421_414_000_545, kinds(), "14-15,19", "226,248,257");
    planned_holds(Some(2), 421_414_000_545, kinds(), "0-99", "0-999");
}

/// A write that a peer missed while this Primary was Ahead was marked, and the mark went when an older
/// write of the same block, which the peer had called in sync, was settled.
#[test]
fn a_mark_outlives_the_older_write_of_its_block() {
    const KINDS: &str = "freeze,stall,slowdisk,invalidate,reset";
    let extras = || vec![Extra::Congestion, Extra::Every, Extra::Hot];
    let shrunk = "21-22,28,31-33,35,72";
    planned_holds(Some(3), 290, (Some(KINDS), extras()), "1-2,6,8-9", shrunk);
    planned_holds(Some(3), 290, (Some(KINDS), extras()), "0-99", "0-999");
}

/// A peer that came back was Consistent beside the Primary: it got no writes, but the generation called
/// it a follower, so that it became UpToDate without what was acknowledged.
#[test]
fn a_peer_that_asks_around_is_no_follower() {
    planned_holds(None, 99_000_417, (None, Vec::new()), "0,2-3", "16,20");
    planned_holds(None, 99_000_417, (None, Vec::new()), "0-3,6", "16,20");
}

/// A Primary lost a peer that did not know it yet, and was demoted. The peer was resynced from the next
/// Primary; then the network worked again, and what was left in the old stream replaced newer data.
#[test]
fn what_a_former_primary_left_in_a_dead_connection_is_not_written() {
    let shrunk = "25,42,44-46,51,54";
    planned_holds(Some(3), 77_800_173, (None, Vec::new()), "2,6,9", shrunk);
    planned_holds(Some(3), 77_800_173, (None, Vec::new()), "0-99", "0-999");
}

/// Of two nodes that were whole and differed by a write that was under way when their Primary died, one was
/// copied over the other. A third node, a copy of the former as it had been, went on saying that both were
/// equal: the marks went, and the difference stayed.
#[test]
fn nobody_vouches_for_a_node_that_was_copied_from_another_one_since() {
    let kinds = || (None, Vec::new());
    planned_holds(Some(4), 88_400_034, kinds(), "0-1,4", "0");
    planned_holds(Some(4), 88_400_034, kinds(), "0-99", "0-999");
    let shrunk = "172,179-180,286";
    planned_holds(None, 99_000_959, kinds(), "3-4,14-16", shrunk);
    planned_holds(None, 99_000_959, kinds(), "0-99", "0-999");
    planned_holds(Some(5), 8_820_010, kinds(), "8,10,15", "10-11,13,26");
    planned_holds(Some(5), 8_820_010, kinds(), "0-99", "0-999");
}

/// A node was copied from two whole nodes in turn, for ever: these two had marks between them, and who has
/// them began to count from the start again each time that the third one became whole.
#[test]
fn marks_between_two_nodes_are_compared_though_a_third_one_is_copied_again_and_again() {
    let shrunk = "225-299";
    planned_holds(Some(3), 61_000_339, (None, Vec::new()), "7,12", shrunk);
    planned_holds(Some(3), 61_000_339, (None, Vec::new()), "0-99", "0-999");
}

/// Under protocol A a write was still to come to a process that stood still when the world ended.
#[test]
fn replicas_are_compared_when_every_process_goes_on() {
    planned_holds(Some(2), 63_000_279, (None, Vec::new()), "0-99", "152");
}
