//! Disks that report errors: worlds that failed once, shrunk, and what was wrong.

use lockstep_core::event::RequestKind;
use lockstep_core::options::{OnIoError, Protocol};
use lockstep_sim::disk::Lose;
use lockstep_sim::drive::{Trace, run};
use lockstep_sim::faults::parse;
use lockstep_sim::operator::Settings;
use lockstep_sim::plan::{Numbers, Orders};
use lockstep_sim::scenario::{A, B, Scenario};
use lockstep_sim::world::{Config, MS, SECOND, World};

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

/// The superblock of a disk that was being attached could not be written, and the attach never
/// ended.
#[test]
fn an_attach_ends_whichever_metadata_operation_fails() {
    let mut s = Scenario::new(27, 2, Protocol::C);
    for step in 0..20 {
        s.write_and_wait(A, step * 50, 2);
        s.crash(B, Lose::InFlight);
        s.restart(B);
        s.world.run_for(step * MS / 4);
        s.world.nodes[B].disks[0].trouble.metas = 1;
        s.pass(500 * MS);
        s.world.nodes[B].disks[0].trouble.metas = 0;
        assert!(s.world.nodes[B].commands.is_empty(), "step {step}");
        s.operator.heal(&mut s.world);
        s.in_sync();
    }
}

/// Disks stop answering for a while, and are given up after `disk-timeout`; what was given up may
/// still happen when they answer again.
#[test]
fn a_disk_that_hangs_is_a_disk_that_failed() {
    for seed in 0..25 {
        holds(
            seed,
            "hangdisk,reset,crash,powercut,partition,handover",
            None,
        );
    }
}

/// A block could not be read. Its mark and the word that the disk is only Inconsistent were written at the same time: with the
/// second one alone on the disk, a node that lost its power was copied without that block.
#[test]
fn a_block_that_cannot_be_read_is_marked_before_the_disk_is_called_inconsistent() {
    for step in 0..60 {
        let config = Config {
            nodes: 2,
            ..Config::small(900 + step)
        };
        let pass_on = |settings: &mut Settings| settings.disk.on_io_error = OnIoError::PassOn;
        let mut s = Scenario::with(config, pass_on, false);
        s.write_and_wait(A, 50, 1);
        s.flush(A);
        s.pass(SECOND);
        let trouble = &mut s.world.nodes[A].disks[0].trouble;
        (trouble.reads, trouble.loses) = (1, true);
        s.world.request(A, 0, RequestKind::Read, 5000, 1);
        let failed = |w: &World| {
            w.nodes[A]
                .log
                .back()
                .is_some_and(|l| l.text.contains("Inconsistent"))
        };
        while !failed(&s.world) {
            s.world.run_for(MS / 100);
        }
        s.world.run_for(step % 20 * MS / 20);
        s.crash(A, Lose::Unflushed);
        s.pass(SECOND);
        s.restart(A);
        s.in_sync();
    }
}
