//! Connect, bitmap exchange, resync and two-phase commits, cut at every packet.
//!
//! A cut that fails is shown event by event by `lockstep-sim cuts STORY --trace FROM-TO-PACKET-BLOW`.

use lockstep_sim::cuts::cut_everywhere;
use lockstep_sim::stories::STORIES;

/// Plays every cut of a story. Each of them has to end well.
#[track_caller]
fn every_cut_heals(name: &str) {
    let story = STORIES.iter().find(|s| s.name == name).expect("a story");
    let report = cut_everywhere(story, |_, _| {}).expect("the uncut story ends well");
    assert!(
        report.packets >= story.least_packets,
        "only {} packets",
        report.packets
    );
    let list: Vec<String> = report
        .failed
        .iter()
        .map(|(cut, text)| format!("{cut}: {text}"))
        .collect();
    assert!(
        list.is_empty(),
        "{} of {} cuts failed:\n{}",
        list.len(),
        report.cuts,
        list.join("\n")
    );
}

#[test]
fn a_reconnect_without_changes_heals_after_every_cut() {
    every_cut_heals("reconnect");
}

#[test]
fn a_reconnect_with_a_resync_heals_after_every_cut() {
    every_cut_heals("resync");
}

#[test]
fn a_resync_under_writes_heals_after_every_cut() {
    every_cut_heals("resync-under-writes");
}

#[test]
fn a_handover_heals_after_every_cut() {
    every_cut_heals("handover");
}

#[test]
fn a_detach_and_an_attach_heal_after_every_cut() {
    every_cut_heals("attach");
}

#[test]
fn a_disconnect_and_a_connect_heal_after_every_cut() {
    every_cut_heals("disconnect");
}

#[test]
fn a_full_resync_heals_after_every_cut() {
    every_cut_heals("full-resync");
}

#[test]
fn the_return_of_a_crashed_primary_heals_after_every_cut() {
    every_cut_heals("crashed-primary");
}

#[test]
fn a_reconnect_next_to_a_third_node_heals_after_every_cut() {
    every_cut_heals("resync-of-three");
}

#[test]
fn a_primary_that_gets_a_disk_back_heals_after_every_cut() {
    every_cut_heals("primary-attach");
}

/// The Primary died in the resync of its own disk. One survivor called its copy Outdated on the other one's
/// word, and became its target, while that one, Outdated by then, became its target, too.
#[test]
fn a_primary_of_three_that_gets_a_disk_back_heals_after_every_cut() {
    every_cut_heals("primary-attach-of-three");
}

#[test]
fn a_handover_among_three_nodes_heals_after_every_cut() {
    every_cut_heals("handover-of-three");
}

/// The targets of the last node with quorum finish when it is cut off and has not heard of it: they
/// have a majority then, and it had counted them as Inconsistent, which is no vote. The same if it
/// dies at that moment and comes back alone.
#[test]
fn only_one_partition_has_quorum_after_every_cut() {
    every_cut_heals("last-man");
}

/// The follower of a new Primary dies before it gets the first write of the new generation, comes
/// back, and brings the dead Primary to that generation: the write is not marked anywhere yet,
/// because it still waits for the follower.
#[test]
fn the_loss_of_a_primary_and_its_return_heal_after_every_cut() {
    every_cut_heals("two-survivors");
}

#[test]
fn resyncs_in_the_dialect_of_84_heal_after_every_cut() {
    every_cut_heals("resync-84");
    every_cut_heals("crashed-primary-84");
}

#[test]
fn a_handover_with_protocol_a_heals_after_every_cut() {
    every_cut_heals("handover-async");
}

#[test]
fn a_secondary_that_goes_down_and_comes_back_heals_after_every_cut() {
    every_cut_heals("down-and-up");
}
