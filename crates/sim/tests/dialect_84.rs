//! Two cores that speak the dialect of DRBD 8.4 to each other.

mod common;

use common::planned_holds;
use lockstep_core::options::Protocol;
use lockstep_format::disk::v08;
use lockstep_sim::disk::Lose;
use lockstep_sim::operator::{Operator, Settings};
use lockstep_sim::scenario::Scenario;
use lockstep_sim::swarm::{self, Fault, Limits, run};
use lockstep_sim::world::{Config, MS, World};

#[track_caller]
fn holds(seeds: impl IntoIterator<Item = u64>) {
    let limits = Limits {
        nodes: Some(2),
        protocol_max: Some(101),
        faults: Some(vec![
            Fault::Crash,
            Fault::Reset,
            Fault::Partition,
            Fault::Stall,
        ]),
        ..Limits::default()
    };
    hold(seeds, &limits);
}

/// Runs worlds with all the faults that the seeds choose.
#[track_caller]
fn holds_with_all(seeds: impl IntoIterator<Item = u64>) {
    let limits = Limits {
        nodes: Some(2),
        protocol_max: Some(101),
        ..Limits::default()
    };
    hold(seeds, &limits);
}

/// Worlds in which these nodes keep their metadata as 8.4 does.
#[track_caller]
fn holds_on_v08(nodes: &[usize], protocol_max: Option<u32>, seeds: impl IntoIterator<Item = u64>) {
    let limits = Limits {
        nodes: Some(2),
        protocol_max,
        v08: nodes.to_vec(),
        faults: Some(vec![
            Fault::Crash,
            Fault::PowerCut,
            Fault::Reset,
            Fault::Partition,
        ]),
        ..Limits::default()
    };
    hold(seeds, &limits);
}

#[track_caller]
fn hold(seeds: impl IntoIterator<Item = u64>, limits: &Limits) {
    for seed in seeds {
        let outcome = run(seed, limits);
        assert_eq!(outcome.violation, None, "seed {seed}: {}", outcome.shape);
    }
}

#[test]
fn cut_links_and_crashes_lose_nothing() {
    holds(0..40);
}

/// Both sides have to decide with what was sent, and 8.4 is not told of a reconnect.
#[test]
fn both_sides_decide_the_same_after_a_crash() {
    holds([10, 40, 46]);
}

/// Writes under way when the link broke left marks, but no new generation: with equal ones the
/// marks would not be looked at.
#[test]
fn writes_of_protocol_a_that_were_lost_make_a_generation() {
    holds([145]);
}

/// A Primary that lost its disk writes on through its peer, whose new generation tells it what it
/// misses when it attaches again.
#[test]
fn a_disk_that_comes_back_to_a_primary_is_synced() {
    holds_with_all([1, 3, 10, 27, 58, 65, 73]);
}

/// The peer labels the data of a Primary that detaches; that came before its consent, and was lost.
#[test]
fn a_label_that_overtakes_the_consent_to_a_detach_counts() {
    holds_with_all([2]);
}

/// A full sync on request has no exchange of bitmaps, and a pause is told.
#[test]
fn invalidated_and_paused_volumes_get_in_sync() {
    holds_with_all([30, 31, 32, 42, 45]);
}

#[test]
fn disks_with_the_metadata_of_84_recover() {
    holds_on_v08(&[0, 1], Some(101), 0..15);
    holds_on_v08(&[1], Some(101), 15..25);
}

/// The last step of a migration: nobody speaks 8.4 any more, but the disks are still as they were.
#[test]
fn nodes_of_today_run_on_the_metadata_of_84() {
    holds_on_v08(&[0, 1], None, 0..15);
}

/// What 8.3 spoke: short headers, one volume, short requests, plain bitmaps, no marks on the wire.
#[test]
fn the_dialects_of_83_lose_nothing() {
    for protocol_max in [86, 88, 90, 94, 95, 96, 97, 99, 100] {
        let limits = Limits {
            nodes: Some(2),
            protocol_max: Some(protocol_max),
            faults: Some(vec![Fault::Crash, Fault::Reset, Fault::Partition]),
            ..Limits::default()
        };
        hold(0..8, &limits);
    }
}

/// Kernel 8.4 writes PRIMARY_IND as Primary, and CRASHED_PRIMARY not before it finds that again.
#[test]
fn a_disk_of_a_crashed_primary_of_84_is_copied_from() {
    for seed in 0..10 {
        let config = Config {
            nodes: 2,
            protocol: Protocol::C,
            ..Config::small(seed)
        };
        let mut settings = Settings::new(config.protocol, config.resync_max_kib_s);
        settings.resource.protocol_max = 101;
        let operator = Operator::new(settings, &config);
        let mut s = Scenario {
            world: World::new(config),
            operator,
        };
        s.world.nodes[0].disks[0].downgrade();
        swarm::bring_up(&mut s.world, &mut s.operator, true);
        s.write_and_wait(0, 0, 64);

        s.cut(0, 1, true);
        s.write(0, 7, 20);
        s.pass(20 * MS);
        s.crash(0, Lose::InFlight);
        s.crash(1, Lose::InFlight);
        let disk = &mut s.world.nodes[0].disks[0];
        let at = disk.layout.superblock_byte();
        let mut block = disk.meta_at(at, 4096).try_into().unwrap();
        let mut old = v08::SuperBlock::decode(&block).unwrap();
        assert!(old.flags.contains(v08::Flags::PRIMARY_IND));
        old.flags.remove(v08::Flags::CRASHED_PRIMARY);
        old.encode(&mut block);
        disk.store_meta(at, &block);

        s.cut(0, 1, false);
        s.restart(0);
        s.restart(1);
        s.in_sync();
        assert_eq!(
            s.world.nodes[0].disks[0].content,
            s.world.nodes[1].disks[0].content
        );
    }
}

/// Both disks are Outdated after two crashes, as with kernels, and one is made current by force. It made a generation of
/// its own and waited for the other one's bitmap, who compared nothing, for ever.
#[test]
fn a_forced_promotion_beside_an_outdated_disk_ends_in_a_handshake() {
    planned_holds(Some(2), 700126730, (None, vec![]), "0-2", "none");
    planned_holds(Some(2), 856000000880, (None, vec![]), "2-3", "none");
    planned_holds(Some(2), 856000000880, (None, vec![]), "0-99", "0-9999");
}

/// A write waited for the activity log, went to the disk between the two bitmaps of a handshake, and was marked when
/// that disk was through with it: behind the end of the resync, whose target counted as one that has it.
#[test]
fn what_was_not_sent_during_an_exchange_is_marked_before_the_resync() {
    planned_holds(Some(2), 1890105440, (None, vec![]), "1-2,4", "32,34");
    planned_holds(Some(2), 1890105440, (None, vec![]), "0-99", "0-9999");
}

/// A peer asked to be copied, and lost its disk before it heard how the resync was called. It attached the disk again at the
/// source's generation: the source took it for one that has followed, with everything marked.
#[test]
fn a_target_that_lost_its_disk_is_copied_when_it_attaches_it() {
    planned_holds(Some(2), 1898501439, (None, vec![]), "0-99", "0-9999");
}
