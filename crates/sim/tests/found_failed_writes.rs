//! Writes that a disk refused while the other one has them.

mod common;

use common::planned_holds;

/// A disk had refused writes, was copied from the other one, and whoever settled those writes after that marked their blocks
/// once more: the marks stayed on disks that are equal.
#[test]
fn a_write_that_was_refused_is_marked_once() {
    let kinds = (None, vec![]);
    planned_holds(Some(2), 3588704863, kinds.clone(), "1-3", "4-5,8,17");
    planned_holds(Some(2), 3588704863, kinds, "0-99", "0-999");
    let kinds = (Some("resyncerror,resyncerror,crash,reset"), vec![]);
    let requests = "8,68-71,73";
    planned_holds(Some(2), 815000002607, kinds.clone(), "4,9-11", requests);
    planned_holds(Some(2), 760000849, kinds, "0,2", "9,16");
}

/// A write failed on a Primary's disk, and the other node acknowledged it from its cache, before it heard that its copy was the
/// only one. It lost its power, and the Primary, which lived on, had told its application that the write was done.
#[test]
fn a_write_that_failed_here_is_complete_when_the_other_disk_has_it_for_good() {
    planned_holds(Some(2), 2513025563, (None, vec![]), "0-99", "0-999");
    planned_holds(Some(2), 2816724703, (None, vec![]), "0-99", "0-999");
}
