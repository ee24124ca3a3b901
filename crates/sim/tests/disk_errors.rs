//! Disks that report errors: worlds that failed once, shrunk, and what was wrong.

use lockstep_sim::drive::{Trace, run};
use lockstep_sim::faults::parse;
use lockstep_sim::plan::{Numbers, Orders};

const ALL_ERRORS: &str = "readerror,writeerror,flusherror,metaerror,reset,crash";

/// Two nodes, only these faults and requests of the seed's plan; none are all.
fn holds(seed: u64, kinds: &str, only: Option<(&str, &str)>) {
    let numbers = |text| Numbers::parse(text).unwrap();
    let orders = Orders {
        nodes: Some(2),
        kinds: Some(parse(kinds).unwrap()),
        only_faults: only.map(|(faults, _)| numbers(faults)),
        only_requests: only.map(|(_, requests)| numbers(requests)),
        ..Orders::default()
    };
    let played = run(seed, &orders, Trace::Off);
    assert_eq!(played.violation, None, "{}", orders.command(seed));
}

#[test]
fn what_a_failed_write_left_is_not_read_from_the_disk_that_stays() {
    holds(8, "writeerror", Some(("5", "137,144")));
    holds(3, "writeerror", None);
}

#[test]
fn a_disk_whose_metadata_cannot_be_written_leaves() {
    holds(2, "metaerror", Some(("6", "none")));
    holds(69, "metaerror", None);
}

#[test]
fn a_failed_flush_spoils_no_other_volume() {
    holds(258, "flusherror", Some(("0", "42-43")));
}

#[test]
fn a_crashed_primary_whose_disk_was_not_whole_is_no_source() {
    holds(8, ALL_ERRORS, Some(("0,13", "6")));
}

#[test]
fn a_copy_on_a_disk_that_is_not_whole_counts_for_nothing_under_protocol_a() {
    holds(285, "readerror", None);
}
