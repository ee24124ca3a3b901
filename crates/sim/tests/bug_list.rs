//! Bugs of the originals (docs/spec/semantics.md, 24), each told as a story with its right end.

use lockstep_core::options::Protocol;
use lockstep_core::state::DiskState;
use lockstep_sim::disk::Lose;
use lockstep_sim::scenario::{A, B, C, Scenario};
use lockstep_sim::world::{MS, SECOND};

/// 24.1: a race between a write and a very short resync; that write was never resynced.
#[test]
fn a_write_that_races_with_a_brief_resync_is_copied() {
    for delay in 0..40 {
        let mut s = Scenario::new(20 + delay, 2, Protocol::C);
        s.world.sever(A, B);
        s.pass(MS);
        s.write_and_wait(A, 50, 1);
        s.pass(SECOND - 5 * MS);
        for step in 0..20 {
            s.write(A, 50 + step % 3, 1);
            s.world.run_for(MS / 4 + delay * MS / 100);
        }
        s.in_sync();
    }
}

/// 24.2: a target did not inherit the history at the end of a resync, and a node that had been away
/// since before that later had "unrelated data".
#[test]
fn a_resync_target_knows_the_ancestors_that_it_was_not_there_for() {
    let mut s = Scenario::new(61, 3, Protocol::C);
    s.write_and_wait(A, 10, 2);
    s.crash(C, Lose::InFlight);
    s.pass(SECOND);
    s.write_and_wait(A, 20, 2);
    s.crash(B, Lose::InFlight);
    s.pass(SECOND);
    s.write_and_wait(A, 30, 2);
    s.restart(B);
    s.pass(20 * SECOND);
    s.demote(A);
    s.promote(B);
    s.write_and_wait(B, 40, 2);
    s.restart(C);
    s.in_sync();
}

/// 24.2: a promotion next to a demotion made a split brain that showed only later.
#[test]
fn roles_that_change_again_and_again_make_no_split_brain() {
    let mut s = Scenario::new(62, 2, Protocol::C);
    for round in 0..4 {
        let (from, to) = if round % 2 == 0 { (A, B) } else { (B, A) };
        s.write_and_wait(from, 10 + round, 2);
        s.demote(from);
        s.promote(to);
        s.world.sever(A, B);
        s.pass(5 * SECOND);
    }
    s.in_sync();
}

/// 24.2: a connect raced with a promotion, the new generation was not sent, and later refused.
#[test]
fn a_promotion_during_a_connect_is_heard_of() {
    for delay in 0..30 {
        let mut s = Scenario::new(63, 2, Protocol::C);
        s.demote(A);
        s.world.sever(A, B);
        s.pass(SECOND);
        s.world.run_for(delay * MS / 5);
        s.promote(A);
        s.write_and_wait(A, 70, 2);
        s.in_sync();
    }
}

/// 24.3: a disconnect on a link that was down already pretended that the peer is Outdated.
#[test]
fn a_disconnect_without_a_connection_outdates_nobody() {
    let mut s = Scenario::new(64, 2, Protocol::C);
    s.cut(A, B, true);
    s.pass(20 * SECOND);
    s.operator.disconnect(&mut s.world, A, B, false);
    s.pass(2 * SECOND);
    let a = s.world.snapshot(A).expect("A is up");
    let believed = a.connections[0].peer_devices[0].disk_state;
    assert_eq!(believed, DiskState::DUnknown);
    s.cut(A, B, false);
    s.operator.heal(&mut s.world);
    s.in_sync();
}

/// 24.4: a resync did not end when bits were set behind its cursor.
#[test]
fn a_resync_ends_although_blocks_behind_its_cursor_are_written() {
    let mut s = Scenario::new(65, 2, Protocol::C);
    s.cut(A, B, true);
    s.pass(20 * SECOND);
    for block in 0..60 {
        s.write(A, block * 200, 1);
    }
    s.pass(SECOND);
    s.cut(A, B, false);
    for step in 0..400 {
        s.write(A, step % 5 * 200, 1);
        s.pass(5 * MS);
    }
    s.in_sync();
}

/// 24.4: a read that waited for a lost peer was not sent to another one.
#[test]
fn a_read_of_a_diskless_primary_goes_to_another_peer_when_its_first_is_lost() {
    for victim in [B, C] {
        let mut s = Scenario::new(66, 3, Protocol::C);
        s.write_and_wait(A, 10, 4);
        s.operator.detach(&mut s.world, A, 0, false);
        s.pass(SECOND);
        for block in 10..14 {
            s.world
                .request(A, 0, lockstep_core::event::RequestKind::Read, block, 1);
        }
        s.crash(victim, Lose::InFlight);
        s.run_until("all reads are answered", |w| w.nodes[A].requests.is_empty());
        s.restart(victim);
        s.operator.heal(&mut s.world);
        s.pass(30 * SECOND);
        s.read(A, 10, 4);
    }
}
