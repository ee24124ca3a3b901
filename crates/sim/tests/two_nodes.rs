//! Worlds of two nodes that once failed; each names the bug that it showed.

use lockstep_sim::swarm::{Limits, run};

/// Runs the world of a seed with two nodes and the faults that the seed chooses.
#[track_caller]
fn holds(seed: u64) {
    let limits = Limits {
        nodes: Some(2),
        ..Limits::default()
    };
    let outcome = run(seed, &limits);
    assert_eq!(outcome.violation, None, "seed {seed}: {}", outcome.shape);
}

/// A Primary without a disk read from its peer a block whose write the peer had received, and by
/// protocol B acknowledged, but not yet written.
#[test]
fn a_remote_read_finds_what_was_received_before_it() {
    holds(789);
    holds(544);
}

/// The link was lost between the reception of a write and its turn, and nobody remembered that its
/// sender had no disk: the block was marked nowhere.
#[test]
fn a_write_of_a_diskless_primary_is_marked_also_if_the_link_is_lost_before_its_turn() {
    holds(773);
}

/// A disk was attached after a crash, its log became bits, a resync cleared them, and a power cut
/// took data from its cache that it had never flushed.
#[test]
fn what_a_restarted_source_copied_is_durable_at_the_source() {
    holds(962);
    holds(1057);
}

/// The peer that knew of newer data was lost between the look at the metadata and the use of the
/// disk, and a Primary went on with its old disk.
#[test]
fn a_primary_does_not_go_on_with_an_old_disk_when_the_peer_is_lost_during_the_attach() {
    holds(1126);
}

/// A Primary without a disk used protocol A: acknowledged and flushed was what it had merely sent.
#[test]
fn a_primary_without_a_disk_acknowledges_only_what_the_peer_has() {
    holds(1131);
}

/// A Primary without some of its disks served the other volumes alone: nobody has everything.
#[test]
fn nobody_takes_over_from_a_primary_that_had_the_newest_data_of_one_volume_only() {
    holds(993);
    holds(1158);
}

/// The only node that had not lost power crashed as well, before it could tell the other one.
#[test]
fn unflushed_data_may_go_when_all_nodes_restart_after_a_power_cut_of_one() {
    holds(1028);
}

/// A disk came back to a Primary without one, at the very generation that this one served, and
/// stayed Consistent for ever because nobody said so.
#[test]
fn a_primary_without_a_disk_vouches_for_a_disk_that_comes_back() {
    holds(851);
}

/// A state that the peer had sent before it heard of the attach ended the negotiation: a Primary
/// took its old disk for UpToDate.
#[test]
fn only_an_answer_to_the_attach_ends_its_negotiation() {
    holds(868);
    holds(1718);
}

/// A write of a diskless Primary waited for the activity log while its disk came back: the bitmap
/// that this one got did not have the block.
#[test]
fn a_write_of_a_diskless_primary_is_in_the_bitmap_that_its_disk_gets() {
    holds(2728);
    holds(4399);
}

/// The only good disk went away by agreement while the other one was being attached, because that
/// one would have been good without it, but by then it was a resync target.
#[test]
fn the_source_of_an_attach_does_not_leave_by_agreement_before_its_end() {
    holds(257);
}

/// Both nodes attached at the same time, and neither compared; an attach that a forced detach
/// ended was never answered.
#[test]
fn two_attaches_at_the_same_time_end_in_sync() {
    holds(416);
    holds(673);
}

/// A source was demoted with marks of its last writes unsent, and its target ended without them.
#[test]
fn a_target_waits_for_the_marks_of_a_source_that_was_demoted() {
    holds(518);
}

/// A write was on its way when the peer's disk was detached and attached again; the peer refused
/// it, and both went on as equal.
#[test]
fn a_write_on_its_way_to_a_disk_that_goes_is_marked() {
    holds(2350);
}

/// With protocol A a write was acknowledged and received, but not on disk yet, when the receiver
/// became Primary and read the block.
#[test]
fn a_new_primary_reads_what_the_last_one_has_sent() {
    holds(1560);
}

/// With protocol A a flush waits for no peer, and a demotion did not either: all lost their power
/// right after it, and the new Primary had not what the old one had flushed.
#[test]
fn a_demotion_waits_until_the_peer_has_everything_on_stable_storage() {
    holds(4879);
}

/// A Primary without a disk announced a generation, took its disk back when the peer had gone, and
/// wrote on at the old generation: to the peer its data looked older.
#[test]
fn a_disk_that_returns_to_a_primary_alone_begins_a_new_generation() {
    holds(248);
}

/// Both attached at the same time, one as Outdated: equal in generation, but with marks.
#[test]
fn marks_bring_an_outdated_disk_up_to_date() {
    holds(3260);
}

/// The Primary had detached its disk, all lost their power, and the other one was promoted alone:
/// its marks made it a target, which a Primary refused for ever.
#[test]
fn a_primary_that_has_served_nothing_may_be_target() {
    holds(3679);
    holds(4095);
}

/// A Primary without a disk attached its old one, lost the peer and was demoted meanwhile: the old
/// disk became UpToDate.
#[test]
fn an_old_disk_is_outdated_also_after_a_demotion() {
    holds(453);
}

/// The simulated network delivered what was sent after bytes that it had lost.
#[test]
fn a_broken_stream_ends_and_has_no_holes() {
    holds(4798);
}

/// Both disks failed, the peer's came back first, and the Primary wrote to it at the generation of
/// its own disk: that one could not be told from a current one.
#[test]
fn a_primary_that_gets_data_back_begins_a_new_generation() {
    holds(5053);
}
