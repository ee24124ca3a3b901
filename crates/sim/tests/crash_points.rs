//! Every metadata write, torn at every sector; and the recovery from that torn again.

use lockstep_sim::crash_points::{Points, cut_once, cut_twice};
use lockstep_sim::cuts::Story;
use lockstep_sim::disk::{Lose, Where};
use lockstep_sim::scenario::{A, B};
use lockstep_sim::stories::{ALONE, ALONE_IN_PLACE, STORIES};

#[track_caller]
fn all_recover(points: &Points, least: u64) {
    let worlds = points.worlds.iter().sum::<u64>();
    println!("{} writes, {worlds} worlds", points.writes);
    assert!(worlds >= least, "only {worlds} crash points");
    assert!(
        points.failed.is_empty(),
        "{} of {worlds} crash points failed:\n{}",
        points.failed.len(),
        points.failed.join("\n")
    );
}

fn story(name: &str) -> &'static Story {
    STORIES.iter().find(|s| s.name == name).expect("a story")
}

#[test]
fn a_primary_that_runs_through_its_log_recovers_from_a_crash_in_every_write() {
    all_recover(&cut_once(&ALONE, A, Lose::Unflushed), 100);
}

#[test]
fn the_recovery_from_a_crash_recovers_from_a_crash_in_every_write() {
    all_recover(&cut_twice(&ALONE, A, Lose::Unflushed, 8), 100);
}

#[test]
fn a_resync_target_recovers_from_a_crash_in_every_write() {
    all_recover(&cut_once(story("resync"), B, Lose::Unflushed), 25);
    all_recover(&cut_twice(story("resync"), B, Lose::InFlight, 2), 100);
}

#[test]
fn a_resync_source_recovers_from_a_crash_in_every_write() {
    all_recover(
        &cut_once(story("resync-under-writes"), A, Lose::InFlight),
        25,
    );
}

#[test]
fn both_sides_of_a_handover_recover_from_a_crash_in_every_write() {
    all_recover(&cut_once(story("handover"), A, Lose::Unflushed), 10);
    all_recover(&cut_once(story("handover"), B, Lose::Unflushed), 10);
}

#[test]
fn an_attach_recovers_from_a_crash_in_every_write() {
    all_recover(&cut_once(story("attach"), B, Lose::Unflushed), 50);
}

#[test]
fn a_returning_primary_recovers_from_a_crash_in_every_write() {
    all_recover(&cut_once(story("crashed-primary"), A, Lose::Unflushed), 50);
}

/// The story with metadata on persistent memory: cut at every line of 64 bytes.
fn in_place(name: &str) -> Story {
    Story {
        metadata: Where::Persistent,
        ..*story(name)
    }
}

#[test]
fn a_log_of_slots_recovers_from_a_crash_in_every_store() {
    all_recover(&cut_once(&ALONE_IN_PLACE, A, Lose::Unflushed), 100);
}

#[test]
fn the_recovery_of_slots_recovers_from_a_crash_in_every_store() {
    all_recover(&cut_twice(&ALONE_IN_PLACE, A, Lose::Unflushed, 16), 100);
}

#[test]
fn attach_and_resync_recover_from_a_crash_in_every_store() {
    all_recover(&cut_once(&in_place("attach"), B, Lose::Unflushed), 50);
    all_recover(&cut_once(&in_place("resync"), B, Lose::InFlight), 50);
}

#[test]
fn a_full_resync_recovers_from_a_crash_in_every_write() {
    all_recover(&cut_once(story("full-resync"), B, Lose::Unflushed), 20);
}
