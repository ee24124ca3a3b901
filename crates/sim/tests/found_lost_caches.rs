//! Disks that lost their power together with what a Primary had been told is written.

mod common;

use common::planned_holds;

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
