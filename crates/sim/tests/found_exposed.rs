//! Planned worlds of Primaries that work with the data of others.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

/// A node whose disk was merely Consistent became Primary beside a current one, and began a generation there. The other
/// two took it; the Primary's own disk stayed at the one before, so the three parted as after a split brain.
#[test]
fn a_consistent_disk_of_a_primary_gets_the_generation_that_it_exposes() {
    let kinds = || (None, vec![Extra::Handlers]);
    let requests = "18,20-21,23-26,31,35,37-38,41-42,47-48,51-53";
    planned_holds(Some(3), 5_000_100, kinds(), "2,6", requests);
    planned_holds(Some(3), 5_000_100, kinds(), "0-99", "0-999");
}
