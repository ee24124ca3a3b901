//! Planned worlds in which a read went back in time.

mod common;

use common::planned_holds;

#[track_caller]
fn holds(nodes: usize, seed: u64, faults: &str, requests: &str) {
    planned_holds(Some(nodes), seed, (None, Vec::new()), faults, requests);
}

/// A node was promoted while it was resynced, beside two UpToDate disks that had not been compared since they
/// lost a Primary. It read a block of the one that it was not copied from, and later had the other's.
#[test]
fn a_primary_that_is_resynced_reads_from_its_source() {
    const REQUESTS: &str = "119-120,122,136-139,141-142,144-147,149-150,152-153,160-162,164-171,177-178,\
                            180-181,188,190-195,199-205,207-212,215-217,219-222,226-227,231-234,237,239-242,\
                            244-248,250,254";
    holds(4, 70_303_001, "3,5-7,9", REQUESTS);
    holds(4, 70_303_001, "0-99", "0-999");
    holds(
        5,
        2_300_721,
        "3,5,7",
        "133,236-237,241-243,261-264,269-270,272",
    );
    holds(5, 2_300_721, "0-99", "0-999");
}

/// A verify was asked for while the Primary's disk was being attached, and began in the moment in which the resync of that disk
/// was to: the bitmaps were not exchanged, and the disk counted as one that lacks nothing.
#[test]
fn no_verify_takes_the_place_of_the_resync_of_an_attach() {
    const REQUESTS: &str = "76-96,98-113,122-132,134-141,144";
    holds(2, 181_178_002, "1-4", REQUESTS);
    holds(2, 181_178_002, "0-99", "0-999");
}

/// A write of a Primary without a disk failed when both its peers were lost, one of which had it. Both came back one after
/// the other and counted, not compared yet: what was read was old, and the write came with their resync.
#[test]
fn a_write_that_was_given_up_is_read_from_all_or_from_none() {
    holds(3, 3_800_000_079, "0-1,6,10-11,15", "6,9,80");
    holds(3, 3_800_000_079, "0-99", "0-999");
}
