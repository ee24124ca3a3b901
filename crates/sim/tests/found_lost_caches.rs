//! Disks that lost their power together with what a Primary had been told is written.

mod common;

use common::planned_holds;
use lockstep_core::options::Protocol;
use lockstep_core::state::{ConnState, DiskState};
use lockstep_sim::disk::Lose;
use lockstep_sim::scenario::{A, B, Scenario};
use lockstep_sim::world::{SECOND, World};

/// A Primary whose own disk was gone took a peer back that had lost its power with an acknowledged write, because
/// its generation was the one that applications saw: they read older data, and the Primary's disk, which had that
/// write, was made equal to the peer's when it came back.
#[test]
fn a_peer_that_lost_its_cache_does_not_take_the_place_of_the_own_disk() {
    planned_holds(Some(2), 3726398650, (None, vec![]), "1-2", "105-109");
    planned_holds(Some(2), 3726398650, (None, vec![]), "0-99", "0-9999");
    const REQUESTS: &str = "228,242-256,258-272,278,280,283,289,292-294,301";
    planned_holds(None, 792000008014, (None, vec![]), "3-4,16,19-20", REQUESTS);
}

/// The same beside a third disk that has everything and is out of reach.
#[test]
fn of_two_disks_the_one_that_lost_its_cache_waits_for_the_other() {
    planned_holds(Some(3), 2500003479, (None, vec![]), "0-1,7", "2-14");
    planned_holds(Some(3), 2500003479, (None, vec![]), "0-99", "0-9999");
}

/// Both lost their power one after the other, while the Primary's own disk was being copied: nobody has what it was
/// told is written, and it says so instead of going on with what they have.
#[test]
fn a_primary_whose_disk_is_being_copied_does_not_go_on_with_less() {
    planned_holds(Some(3), 3100001231, (None, vec![]), "0-2,6", "1-3,9-18");
    planned_holds(Some(3), 3100001231, (None, vec![]), "0-99", "0-9999");
}

/// A Primary without its own disk, whose peer came back after these deaths. Whether it took the peer's disk back.
fn takes_back(deaths: &[Lose]) -> bool {
    let mut s = Scenario::new(3, 2, Protocol::C);
    s.write_and_wait(A, 100, 8);
    s.operator.detach(&mut s.world, A, 0, true);
    s.run_until("A has no disk", |w| {
        w.snapshot(A).unwrap().devices[0].disk_state == DiskState::Diskless
    });
    s.crash(B, deaths[0]);
    s.cut(A, B, true);
    s.restart(B);
    s.pass(5 * SECOND);
    for death in &deaths[1..] {
        s.crash(B, *death);
        s.restart(B);
        s.pass(5 * SECOND);
    }
    s.cut(A, B, false);
    s.pass(10 * SECOND);
    let connected = |w: &World| w.snapshot(A).unwrap().connections[0].state == ConnState::Connected;
    let taken = connected(&s.world);
    if taken {
        s.read(A, 100, 8);
    }
    // The Primary's own disk has everything.
    s.operator.heal(&mut s.world);
    s.in_sync();
    s.read(A, 100, 8);
    taken
}

/// The process of a peer died, and its disk had kept what it had acknowledged: a Primary that had lost its own disk
/// refused it, with the only data that it could reach, until it was demoted.
#[test]
fn a_peer_whose_process_alone_died_is_taken_back() {
    assert!(takes_back(&[Lose::InFlight]));
    assert!(takes_back(&[Lose::InFlight, Lose::InFlight]));
}

/// What a disk lost with its power is not there again because its process died as well, before the Primary had heard.
#[test]
fn a_lost_cache_is_told_after_another_crash() {
    assert!(!takes_back(&[Lose::Unflushed]));
    assert!(!takes_back(&[Lose::Unflushed, Lose::InFlight]));
    assert!(!takes_back(&[
        Lose::Unflushed,
        Lose::InFlight,
        Lose::InFlight
    ]));
}

/// Clients, quorum and processes that die: a frozen Primary without a disk waited for its operator beside a good disk.
#[test]
fn a_frozen_client_takes_a_disk_back_that_lost_nothing() {
    let kinds = Some("diskless,quorum,crash,partition,reset");
    planned_holds(Some(4), 17, (kinds, vec![]), "0-99", "0-9999");
}
