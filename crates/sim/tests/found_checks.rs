//! Worlds that failed, found by checks of what nodes promise each other.

mod common;

use common::planned_holds;
use lockstep_core::event::RequestKind;
use lockstep_sim::disk::Lose;
use lockstep_sim::extras::Extra;
use lockstep_sim::operator::Settings;
use lockstep_sim::scenario::{A, B, Scenario};
use lockstep_sim::world::{Config, SECOND};

/// Of two volumes that were detached by `down` the end of one wrote the superblock of the other once more, behind the one
/// that called its log clean. At the next attach everything in the log was copied.
#[test]
fn a_node_that_goes_down_with_two_volumes_leaves_both_logs_clean() {
    for seed in 0..12 {
        let config = Config {
            volumes: 2,
            ..Config::small(seed)
        };
        let mut s = Scenario::with(config, |_| {}, false);
        for volume in 0..2 {
            let kind = RequestKind::Write { fua: false };
            let id = s.world.request(A, volume, kind, 100, 2);
            s.done(A, id);
        }
        s.pass(SECOND);
        assert!(s.operator.down(&mut s.world, B));
        s.pass(SECOND);
        assert!(s.operator.is_down(B));
        s.restart(B);
        s.in_sync();
        assert_eq!(s.world.copied(), 0, "seed {seed}");
    }
}

/// Without an activity log only the memory of a replica knew what a Primary without a disk wrote there: after a crash
/// of both the Primary's disk came back, and differed without a mark.
#[test]
fn a_replica_without_a_log_that_crashes_marks_all_towards_a_disk_that_was_left_behind() {
    for lose in [Lose::InFlight, Lose::Unflushed] {
        let change = |settings: &mut Settings| settings.disk.al_updates = false;
        let mut s = Scenario::with(Config::small(3), change, false);
        assert!(s.operator.detach(&mut s.world, A, 0, false));
        s.pass(SECOND);
        s.write_and_wait(A, 700, 2);
        s.crash(B, lose);
        s.restart(B);
        // Until the Primary has missed it, and both are connected again.
        s.pass(15 * SECOND);
        assert!(s.operator.reattach(&mut s.world));
        s.in_sync();
    }
}

/// A Primary was Ahead of a node, had told it of a block and then written it again, and then copied what was marked. When that
/// node heard from where the Primary's writes came as data again, it sent the block, as it had it, to a target that had got the new
/// data from the Primary.
#[test]
fn whoever_is_behind_is_no_source_of_what_it_lacks() {
    let kinds = (None, vec![Extra::Congestion, Extra::Thin]);
    let requests = "4-136,155-190,200-224,525-526,536-544";
    planned_holds(None, 131_001_488, kinds.clone(), "0-2", requests);
    planned_holds(None, 131_001_488, kinds, "0-99", "0-999");
}

/// A write was begun before the connection and is too long for the peer's old version, which ends the connection. It and
/// all later ones waited for that peer to make it durable.
#[test]
fn a_write_that_ends_the_connection_waits_for_no_peer() {
    let kinds = (None, vec![Extra::Old]);
    let requests = "7,9-14,22,59-63,65-68,71-74,76-80,83,85,98";
    planned_holds(None, 131_001_193, kinds.clone(), "1,3", requests);
    planned_holds(None, 131_001_193, kinds, "0-99", "0-999");
}

/// The target of a full sync was gone before the source had noted it, since its disk was slow. The source copied what the target had
/// marked, and its metadata went on calling for a full sync.
#[test]
fn a_full_sync_that_is_cut_short_is_not_called_for_for_ever() {
    planned_holds(None, 132_001_763, (None, Vec::new()), "1,3,5", "none");
    planned_holds(None, 132_001_763, (None, Vec::new()), "0-99", "0-999");
}

/// A follower's disk hung while it took a new generation, and with it all requests of the Primary.
#[test]
fn a_follower_that_does_not_take_a_generation_is_given_up() {
    let kinds = || {
        let extras = vec![Extra::Every, Extra::Impatient];
        (Some("hangdisk,hangdisk,reset"), extras)
    };
    for seed in [132_002_924, 133_001_848] {
        planned_holds(Some(2), seed, kinds(), "0", "0");
        planned_holds(Some(2), seed, kinds(), "0-99", "0-999");
    }
}

/// Three nodes grew one after the other, and a mark of the new area came to the one that had not heard of it. That was taken for a
/// fault of the sender.
#[test]
fn a_mark_behind_the_own_end_is_no_fault_of_a_larger_peer() {
    let kinds = || {
        (
            Some("resize,cut-resize,crash,partition,powercut"),
            Vec::new(),
        )
    };
    let requests = "2-4,6,8,10,14-15,18,38-40,42-45,47,49";
    planned_holds(Some(3), 133_001_818, kinds(), "4-6", requests);
    planned_holds(Some(3), 133_001_818, kinds(), "0-99", "0-999");
}

/// A follower was told of a second generation while its slow disk wrote the first one. When that was durable it confirmed the
/// second one, and its metadata did not know it for seconds.
#[test]
fn a_generation_is_not_confirmed_by_the_end_of_an_earlier_write() {
    let kinds = || {
        let extras = vec![Extra::Every, Extra::Hot];
        (Some("shuffle,stall,slowdisk"), extras)
    };
    planned_holds(Some(3), 198, kinds(), "12,14-15", "50,63");
    planned_holds(Some(3), 198, kinds(), "0-99", "0-999");
}

/// A node was cut off, and the Primary began a generation with the other two and died. One of those had not noticed yet that
/// the first was gone, and the operator of the simulator took that one for an heir.
#[test]
fn a_node_of_an_older_generation_is_no_heir() {
    planned_holds(
        Some(4),
        9_201_194,
        (None, Vec::new()),
        "3,6-7,12-13",
        "11,19,22",
    );
    planned_holds(Some(4), 9_201_194, (None, Vec::new()), "0-99", "0-999");
}

/// With protocol B a slow disk needed forty seconds for one write, for which a later one of the same blocks waited. The checker took
/// that for a copy that nobody makes.
#[test]
fn what_waits_for_a_slow_disk_is_on_its_way() {
    planned_holds(Some(5), 1_300_000_124, (None, Vec::new()), "1", "0-1");
    planned_holds(Some(5), 1_300_000_124, (None, Vec::new()), "0-99", "0-999");
}

/// A ping was late on a slow wire right before the last look at what is left at rest. The connection was being made anew.
#[test]
fn who_connects_again_on_a_slow_wire_is_not_at_rest() {
    const KINDS: &str = "shuffle,handover,handover,stall,invalidate";
    let holds = |faults, requests| {
        let kinds = (Some(KINDS), vec![Extra::Every, Extra::Hot]);
        planned_holds(Some(3), 648_844_002_538, kinds, faults, requests);
    };
    holds("2,4-5,9", "none");
    holds("0-99", "0-999");
}

/// Verifies of three volumes were cut short on a slow line, and the operator began those again that had ended, so that
/// the others never came further.
#[test]
fn a_verify_that_has_ended_is_not_begun_again_with_the_others() {
    planned_holds(Some(2), 1_256_335_225, (None, Vec::new()), "0-99", "0-999");
    const KINDS: &str = "verifyspot,verifyspot,verifyspot,handover,disconnect";
    let kinds = (Some(KINDS), vec![Extra::Every, Extra::Hot]);
    planned_holds(Some(2), 137_000_463, kinds, "0-99", "0-999");
    // Here it ended some milliseconds before the link was lost, and began anew.
    planned_holds(Some(2), 3_469_654_113, (None, Vec::new()), "0-99", "0-999");
}

/// A full copy of 512 MiB with 32 buffers on slow disks takes longer than the check of calm worlds waited.
#[test]
fn a_calm_world_waits_for_no_long_copy() {
    planned_holds(Some(2), 902_738_069, (None, Vec::new()), "none", "none");
}

/// Two nodes of 8.4's dialect had kept the marks of 36 extents that an attach had made, and copied them at 2 MiB/s when they
/// had been apart: that was still going on when the check wanted rest.
#[test]
fn marks_that_old_dialects_keep_take_their_time() {
    planned_holds(Some(2), 1_270_900_222, (None, Vec::new()), "0-99", "0-999");
}

/// A node said that a resync goes on while nothing passed between the two, and the check wanted the other one to know.
#[test]
fn what_is_said_while_nothing_passes_is_not_known() {
    for seed in [2_360_655_817, 3_486_038_309, 961_000_454] {
        planned_holds(Some(2), seed, (None, Vec::new()), "0-99", "0-999");
    }
}

/// Options changed while a ping was under way, which begins its time-out anew, and the check counted from the ping.
#[test]
fn new_options_move_the_time_out_of_a_ping() {
    for seed in [3_038_226_741, 1_171_031_559] {
        planned_holds(Some(2), seed, (None, Vec::new()), "0-99", "0-999");
    }
}

/// The last copy of a write had lost its power with what no application had flushed, and the check wanted it there.
#[test]
fn who_has_lost_power_is_not_expected_to_have_all() {
    planned_holds(Some(3), 2_710_002_390, (None, Vec::new()), "0-99", "0-999");
}

/// A read that began before a write of its block failed had seen it, on the disk that it failed on, and the check wanted all
/// later reads to see it.
#[test]
fn what_is_read_beside_a_failing_write_does_not_stay() {
    for seed in [3_200_000_042, 1_707_743_477, 3_486_036_805] {
        planned_holds(Some(2), seed, (None, Vec::new()), "0-99", "0-999");
    }
}

/// Disks had grown before two sides wrote apart, and what one of them had marked of the new area when they met counted as
/// changes.
#[test]
fn sides_that_have_grown_are_not_judged_by_their_changes() {
    const SEED: u64 = 792_000_008_036;
    let kinds = Some("grow-one,grow-one,crash,partition");
    let extras = || vec![Extra::Internal];
    planned_holds(Some(2), SEED, (kinds, extras()), "12,18-19,21", "none");
    planned_holds(Some(2), SEED, (kinds, extras()), "0-99", "0-999");
}

/// Of two Primaries one was demoted while a write of the other one was on its way to its disk, and the check took that for
/// its own.
#[test]
fn a_demoted_node_has_not_flushed_what_another_primary_writes() {
    let extras = || vec![Extra::TwoPrimaries];
    planned_holds(None, 855_000_007_279, (None, extras()), "0", "0");
}

/// With protocol A the last writes were still on a slow wire when the checks took the cluster for one at rest.
#[test]
fn what_protocol_a_has_on_its_wire_is_not_at_rest() {
    planned_holds(Some(2), 2078311191, (None, vec![]), "none", "0-9999");
}

/// A resync of everything in 8.4's dialect takes as long as its rate says.
#[test]
fn a_whole_copy_has_its_time() {
    const REQUESTS: &str = "2-4,6-8,10-13,16,18-22,25,27-28,30,35,38,41,43,47,49,51-52,54-55";
    planned_holds(Some(2), 654566053, (None, vec![]), "5", REQUESTS);
}

/// A Primary that has given way has written nothing that those who left would lack.
#[test]
fn the_operator_sees_who_has_given_way() {
    let kinds = Some("takeover,crash,partition,reset");
    planned_holds(Some(3), 795000000172, (kinds, vec![]), "0-99", "0-9999");
}

/// A node that looks again soon, with less and less haste, remembers until then how often it has looked.
#[test]
fn how_often_a_node_has_looked_it_forgets_when_it_looks() {
    let extras = vec![Extra::Every, Extra::Hot];
    let kinds = Some("shuffle,diskless,crash");
    planned_holds(Some(4), 779300004322, (kinds, extras.clone()), "none", "3");
    planned_holds(Some(4), 779300004322, (kinds, extras), "0-99", "0-9999");
}

/// A Primary made a generation without its peer, lost its disk, and died before the operator looked again, who took the
/// peer for an heir.
#[test]
fn who_had_been_left_just_before_the_last_disk_went_is_no_heir() {
    planned_holds(Some(2), 1_893_002_094, (None, vec![]), "0,2-4", "0-2");
    planned_holds(Some(2), 1_893_002_094, (None, vec![]), "0-99", "0-9999");
    planned_holds(Some(2), 1_306_731_472, (None, vec![]), "0-99", "0-9999");
}

/// A Primary that is being copied refused its source, which had lost its cache. It said so once, and the operator forgot
/// it after three seconds, and did not demote it.
#[test]
fn the_operator_remembers_whom_a_primary_refuses() {
    planned_holds(Some(3), 1_898_110_334, (None, vec![]), "0-99", "0-9999");
}

/// A process stood still for a minute, and was then demoted by force, which ends what waits with an error.
#[test]
fn what_a_forced_demotion_fails_is_no_error_of_the_disk() {
    planned_holds(Some(2), 1_898_401_491, (None, vec![]), "0-99", "0-9999");
}

/// A line with little room carried much that was sent before the word that a resync is paused.
#[test]
fn a_pause_is_heard_behind_what_is_on_the_line() {
    planned_holds(Some(3), 1_898_410_478, (None, vec![]), "0-99", "0-9999");
}

/// Two nodes lost a third, and compared what they had of its writes. One of them was cut off meanwhile.
#[test]
fn who_is_to_write_apart_is_whole() {
    let kinds = Some("quorum,disconnect,disconnect,down,outdate,crash");
    let extras = vec![Extra::Every];
    planned_holds(Some(3), 876_000_003_991, (kinds, extras), "0-99", "0-9999");
}
