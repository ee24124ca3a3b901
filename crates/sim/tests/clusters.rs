//! Clusters of three nodes and more: what worlds found and what was mended, a seed or story each.

mod common;

use common::planned_holds;
use lockstep_core::options::{OnLoss, Protocol, Quorum};
use lockstep_sim::extras::Extra;
use lockstep_sim::scenario::{A, B, C, Scenario};
use lockstep_sim::world::{Config, SECOND};

const CLIENTS: &str = "diskless,quorum,crash,partition,reset";

/// The world that `swarm` shrunk to these faults and requests.
#[track_caller]
fn holds(nodes: usize, seed: u64, kinds: Option<&str>, faults: &str, requests: &str) {
    planned_holds(Some(nodes), seed, (kinds, Vec::new()), faults, requests);
}

/// A client lost the link to the only good disk for a while. With protocol A its writes are sent
/// again as well: a copy on a disk that is being resynced is none.
#[test]
fn writes_of_a_client_survive_a_cut_under_protocol_a() {
    let requests = "0,90,92-96,302,305-306";
    holds(3, 24, Some(CLIENTS), "0-1,7", requests);
}

/// A target of a resync acknowledged blocks while its marks towards a third, absent node were in
/// memory only.
#[test]
fn marks_towards_an_absent_node_come_before_the_end_of_a_resync() {
    holds(3, 1, None, "6,8,10,12,19", "15,24-25");
}

/// Two sources, one of which is a generation ahead of the other: the end of the resync with the
/// older one does not make the disk UpToDate.
#[test]
fn a_target_of_two_sources_waits_for_the_newer_one() {
    let requests = "502,505-518,528,531-535,537-539,541-544,547-551,557-560,562,564-567,570,572,\
                    574-575,592";
    holds(3, 207, None, "0-2,4,11,15,17,22", requests);
}

/// Requests are frozen until a resync brings the redundancy back; the resync must not wait for
/// them, neither for peer acks nor for ranges.
#[test]
fn a_resync_does_not_wait_for_requests_that_wait_for_it() {
    holds(3, 96, Some(CLIENTS), "1-2", "1-3,26");
    holds(3, 164, Some(CLIENTS), "0-1,6", "1");
    holds(4, 26, Some(CLIENTS), "4-6", "38,42");
}

/// A Primary on a disk that is being resynced announced a generation and gave it up when the
/// disk was whole; the node that took it is no other branch.
#[test]
fn a_generation_announced_during_a_resync_is_an_ancestor() {
    holds(4, 32, None, "1-2", "255,263");
}

/// A Primary told its next generation and lost the follower, and with it the quorum that making
/// another one takes. The follower comes back as a target.
#[test]
fn a_frozen_primary_is_the_source_of_who_took_its_announcement() {
    holds(4, 8, Some(CLIENTS), "0,3", "0");
}

/// A node that returns Outdated takes no redundancy away that was not there.
#[test]
fn a_primary_lets_a_node_in_that_is_behind() {
    holds(4, 55, Some(CLIENTS), "4,7", "none");
}

/// A client gave a write up towards a peer that was back before the generation was made that
/// leaves it out.
#[test]
fn a_peer_that_returns_before_the_new_generation_gets_what_it_missed() {
    holds(5, 10, Some(CLIENTS), "2-6", "9,13-15");
}

/// Three targets waited for each other in a circle, and then everybody was Outdated, equal, and
/// waited for a better disk that there was none of.
#[test]
fn nobody_waits_for_a_better_disk_than_there_is() {
    holds(5, 93, Some(CLIENTS), "0-2,4,6-8", "2-5");
}

/// Not everybody was connected with everybody: two nodes told each other of third nodes in sync
/// for ever, and every packet made several.
#[test]
fn answers_about_nodes_in_sync_end() {
    holds(5, 3, None, "0-8", "0-99");
}

/// A Primary's disk was taken away by force while a write was on its way to two peers that were
/// lost as well: the fourth node serves the data now and has to get the write before its end.
#[test]
fn a_copy_on_a_disk_that_is_gone_is_no_copy() {
    holds(4, 35, None, "0-23", "0-29");
}

/// A disk that a Primary attaches beside others brings a newer dagtag along. All its peers hear of
/// it: a source that did not would make a target wait for a write that never comes.
#[test]
fn a_dagtag_that_jumps_is_told_to_everybody() {
    holds(4, 10, None, "2,8-10,17", "18,25");
}

/// semantics.md, 11.1: nodes that leave in good order stop counting, so the last one goes on; and
/// they are let go one after the other.
#[test]
fn the_last_man_keeps_quorum_when_the_others_leave_in_good_order() {
    let config = Config {
        nodes: 3,
        protocol: Protocol::C,
        ..Config::small(12)
    };
    let mut s = Scenario::with(
        config,
        |settings| {
            settings.resource.quorum = Quorum::Majority;
            settings.resource.on_no_data_accessible = OnLoss::SuspendIo;
        },
        false,
    );
    s.write_and_wait(A, 10, 4);
    for leaver in [C, B] {
        assert!(s.operator.down(&mut s.world, leaver));
        s.pass(5 * SECOND);
        let logs: Vec<_> = s.world.nodes.iter().map(|n| &n.log).collect();
        assert!(
            s.operator.is_down(leaver),
            "node {leaver} may leave\n{logs:#?}"
        );
        s.write_and_wait(A, 10, 4);
    }
    for node in [B, C] {
        s.restart(node);
    }
    s.in_sync();
    s.read(A, 10, 4);
}

const RESIZES: Option<&str> = Some("resize,crash,partition,powercut");

#[test]
fn what_a_resize_adds_is_copied_whole() {
    // The last page of the bitmap was set as far as it went, and spoke for the new area as well.
    holds(2, 0, RESIZES, "1-3,5,14-15", "2");
    holds(2, 7, RESIZES, "2-5", "none");
}

#[test]
fn a_node_that_does_not_reach_all_grows_to_what_its_peer_has_grown_to() {
    holds(3, 2, RESIZES, "2-3,8-9", "none");
}

/// Two nodes that grew because a third one came back compare what is new: each may have become a
/// target of the third one meanwhile.
#[test]
fn nodes_that_grew_by_a_handshake_with_a_third_compare_what_is_new() {
    holds(3, 5, RESIZES, "1-2", "none");
}

/// A node that grows in a handshake says so before bitmaps are exchanged.
#[test]
fn bitmaps_are_exchanged_by_nodes_of_one_size() {
    holds(3, 48, RESIZES, "1-4,7", "none");
    holds(3, 48, RESIZES, "1-4,7", "73");
    let requests = "13,34,39,105,107-112,584,586-587,589,594,597,599";
    holds(3, 108, RESIZES, "0-1,5,8,11,14-16", requests);
}

/// A Primary lost its power and came back before the survivors took notice: they are Consistent, and
/// have what its disk may have lost.
#[test]
fn a_primary_that_comes_back_from_a_power_cut_takes_nothing_from_its_survivors() {
    holds(3, 7012, None, "0,7,9", "1");
    holds(3, 7145, None, "0", "26-27,219-220");
}

/// A target lost its power when it had written a block and not its marks; the third node came back
/// before the source.
#[test]
fn marks_towards_an_absent_node_come_before_resync_data() {
    holds(3, 35, RESIZES, "5-6,9-10,18-19", "11");
}

/// The source's handler runs for longer than an empty resync: its target does not compare again.
#[test]
fn a_target_that_is_through_waits_for_the_handler_of_its_source() {
    planned_holds(Some(2), 14, (None, vec![Extra::Handlers]), "1-2,4", "2-4");
}
