//! Opening a volume promotes, the last close demotes (semantics.md, 7.3).

use super::*;
use crate::command::ErrorCode;
use crate::state::Role;

/// Nodes in sync, all Secondary.
fn secondaries(count: usize, options: ResourceOptions) -> World {
    let setup = Setup {
        options,
        ..Setup::default()
    };
    let mut w = clean(7, count, setup);
    w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    assert_eq!(role(&w, 0), Role::Secondary);
    w
}

fn role(w: &World, index: usize) -> Role {
    w.nodes[index].resource.state.role
}

fn open(w: &mut World, index: usize, write: bool) -> u64 {
    let command = Command::Open {
        volume: VOLUME,
        open: true,
        write,
    };
    w.command(index, command)
}

fn close(w: &mut World, index: usize, write: bool) {
    let command = Command::Open {
        volume: VOLUME,
        open: false,
        write,
    };
    w.command(index, command);
}

fn code(w: &World, id: u64) -> Option<ErrorCode> {
    w.answers[&id].as_ref().err().map(|e| e.code)
}

/// The driver of node 0 has looked for users; it says so once for each time that it was asked.
fn looked(w: &mut World) -> usize {
    let asked = core::mem::take(&mut w.handlers);
    for (node, name, tag) in &asked {
        assert_eq!((*node, *name), (0, crate::leaving::CLOSE_UNUSED));
        let tag = *tag;
        w.input(0, Input::HandlerDone { tag, exit_code: 0 });
    }
    w.run();
    asked.len()
}

/// An unmount is known some milliseconds later; a kernel is Secondary at once, and a peer that leaves then keeps good data.
#[test]
fn a_peer_that_leaves_behind_the_last_close_is_not_outdated() {
    for in_use in [false, true] {
        for seed in 0..5 {
            let mut options = ResourceOptions::default();
            options.handlers.push(crate::leaving::CLOSE_UNUSED.into());
            let mut w = secondaries(2 + seed % 2, options);
            open(&mut w, 0, true);
            w.run();
            let id = w.write(0, 0, 4096, 5);
            w.run();
            assert!(w.done(0, id), "{:#?}", w.log);
            let leave = Command::Disconnect {
                peer: node_id(0),
                force: false,
            };
            let left = w.command(1, leave.clone());
            w.pass(Duration::from_millis(20));
            assert!(
                !w.answers.contains_key(&left),
                "not before that was looked at"
            );
            if !in_use {
                close(&mut w, 0, true);
            }
            assert_eq!(looked(&mut w), 1);
            w.pass_until("the disconnect", 10, |w| w.answers.contains_key(&left));
            assert_eq!(w.answers[&left], Ok(Answer::Done));
            let disk = w.nodes[1].resource.state.disk(VOLUME);
            let expected = match in_use {
                true => (Role::Primary, DiskState::Outdated),
                false => (Role::Secondary, DiskState::UpToDate),
            };
            assert_eq!((role(&w, 0), disk), expected, "{:#?}", w.log);
            // The next time it is looked at anew.
            let connect = Command::Connect {
                peer: node_id(0),
                discard_my_data: false,
                tentative: false,
            };
            w.command(1, connect);
            w.pass_until("in sync", 10, World::in_sync);
            open(&mut w, 0, true);
            w.run();
            assert_eq!(role(&w, 0), Role::Primary);
            let left = w.command(1, leave);
            w.pass(Duration::from_millis(500));
            assert!(!w.answers.contains_key(&left));
            assert_eq!(looked(&mut w), 1);
            w.pass_until("the disconnect", 10, |w| w.answers.contains_key(&left));
        }
    }
}

#[test]
fn an_open_for_writing_promotes_and_the_last_close_demotes() {
    let mut w = secondaries(3, ResourceOptions::default());
    let first = open(&mut w, 1, true);
    let second = open(&mut w, 1, true);
    w.run();
    assert_eq!(w.answers[&first], Ok(Answer::Done));
    assert_eq!(w.answers[&second], Ok(Answer::Done));
    assert_eq!(role(&w, 1), Role::Primary);
    assert!(w.nodes[1].resource.snapshot().devices[0].open);
    let id = w.write(1, 0, 4096, 5);
    w.run();
    assert!(w.done(1, id), "{:#?}", w.log);
    close(&mut w, 1, true);
    w.pass(Duration::from_secs(3));
    assert_eq!(role(&w, 1), Role::Primary, "one writer is left");
    // The last writer leaves a write behind: the demotion waits for it.
    let id = w.write(1, 8, 4096, 6);
    close(&mut w, 1, true);
    w.pass(Duration::from_secs(3));
    assert!(w.done(1, id), "{:#?}", w.log);
    assert_eq!(role(&w, 1), Role::Secondary);
    assert!(!w.nodes[1].resource.snapshot().devices[0].open);
    w.check_idle();
    w.check_same_data();
    // Another node is next.
    let third = open(&mut w, 2, true);
    w.run();
    assert_eq!(w.answers[&third], Ok(Answer::Done));
    assert_eq!(w.read(2, 8, 4096), vec![6; 4096]);
}

#[test]
fn an_explicit_primary_stays_primary_after_the_last_close() {
    let mut w = secondaries(2, ResourceOptions::default());
    let id = open(&mut w, 0, true);
    w.run();
    assert_eq!(w.answers[&id], Ok(Answer::Done));
    w.command(0, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    close(&mut w, 0, true);
    w.pass(Duration::from_secs(3));
    assert_eq!(role(&w, 0), Role::Primary);
    w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    assert_eq!(role(&w, 0), Role::Secondary);
    // Promoted in words once, but not this time.
    let id = open(&mut w, 0, true);
    w.run();
    assert_eq!(w.answers[&id], Ok(Answer::Done));
    close(&mut w, 0, true);
    w.pass(Duration::from_secs(3));
    assert_eq!(role(&w, 0), Role::Secondary);
}

#[test]
fn an_open_beside_a_primary_waits_and_is_refused_in_time() {
    let mut w = secondaries(2, ResourceOptions::default());
    let a = open(&mut w, 0, true);
    w.run();
    assert_eq!(w.answers[&a], Ok(Answer::Done));
    let b = open(&mut w, 1, true);
    w.pass(Duration::from_millis(1900));
    assert!(!w.answers.contains_key(&b), "auto-promote-timeout is 2 s");
    w.pass(Duration::from_millis(700));
    assert_eq!(code(&w, b), Some(ErrorCode::TWO_PRIMARIES));
    // One that closes within the time makes room.
    let b = open(&mut w, 1, true);
    w.pass(Duration::from_secs(1));
    close(&mut w, 0, true);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answers[&b], Ok(Answer::Done), "{:#?}", w.log);
    assert_eq!((role(&w, 0), role(&w, 1)), (Role::Secondary, Role::Primary));
}

#[test]
fn without_auto_promote_a_secondary_cannot_be_opened() {
    let options = ResourceOptions {
        auto_promote: false,
        ..ResourceOptions::default()
    };
    let mut w = secondaries(2, options);
    for write in [true, false] {
        let id = open(&mut w, 0, write);
        assert_eq!(code(&w, id), Some(ErrorCode::ERR_INVALID_REQUEST));
    }
    assert_eq!(role(&w, 0), Role::Secondary);
    w.command(0, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    let id = open(&mut w, 0, true);
    assert_eq!(w.answers[&id], Ok(Answer::Done));
    close(&mut w, 0, true);
    w.pass(Duration::from_secs(3));
    assert_eq!(role(&w, 0), Role::Primary);
}

#[test]
fn a_reader_on_a_secondary_reads_and_holds_a_promotion_elsewhere_back() {
    let mut w = secondaries(2, ResourceOptions::default());
    let reader = open(&mut w, 1, false);
    assert_eq!(w.answers[&reader], Ok(Answer::Done));
    assert_eq!(role(&w, 1), Role::Secondary);
    assert_eq!(w.read(1, 0, 4096), vec![0; 4096]);
    let id = w.write(1, 0, 4096, 1);
    w.run();
    assert_eq!(
        w.nodes[1].completed.get(&id),
        Some(&Err(RequestError::ReadOnly))
    );
    // The reader goes in time.
    let primary = w.command(0, Command::Primary { force: false });
    w.pass(Duration::from_millis(500));
    assert!(!w.answers.contains_key(&primary));
    close(&mut w, 1, false);
    w.pass(Duration::from_secs(5));
    assert_eq!(w.answers[&primary], Ok(Answer::Done), "{:#?}", w.log);
    // Nobody reads what another node changes.
    let reader = open(&mut w, 1, false);
    assert_eq!(code(&w, reader), Some(ErrorCode::TWO_PRIMARIES));
}

#[test]
fn a_reader_who_stays_refuses_a_promotion_elsewhere() {
    let mut w = secondaries(2, ResourceOptions::default());
    let reader = open(&mut w, 1, false);
    assert_eq!(w.answers[&reader], Ok(Answer::Done));
    let primary = w.command(0, Command::Primary { force: false });
    w.pass(Duration::from_secs(20));
    assert_eq!(code(&w, primary), Some(ErrorCode::CW_FAILED_BY_PEER));
    assert_eq!(role(&w, 0), Role::Secondary);
    // Its own node it does not hinder.
    let primary = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answers[&primary], Ok(Answer::Done));
}

#[test]
fn an_open_waits_for_a_disk_that_is_being_attached() {
    let mut w = secondaries(2, ResourceOptions::default());
    w.cut = true;
    w.cut_links();
    w.command(
        0,
        Command::Disconnect {
            peer: node_id(1),
            force: true,
        },
    );
    w.pass(Duration::from_secs(1));
    w.detach(0);
    w.run();
    assert_eq!(w.disk_state(0), DiskState::Diskless);
    w.attach(0);
    assert_eq!(w.disk_state(0), DiskState::Attaching);
    let id = open(&mut w, 0, true);
    w.run();
    assert_eq!(w.disk_state(0), DiskState::UpToDate);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
    assert_eq!(role(&w, 0), Role::Primary);
}

#[test]
fn without_good_data_an_open_is_refused() {
    let mut w = secondaries(2, ResourceOptions::default());
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(20));
    let outdate = Command::Outdate { volume: VOLUME };
    w.command(1, outdate);
    let id = open(&mut w, 1, true);
    w.pass(Duration::from_secs(4));
    assert_eq!(code(&w, id), Some(ErrorCode::NO_UP_TO_DATE_DISK));
    assert_eq!(w.nodes[1].resource.snapshot().promotion_score, 0);
    assert!(!w.nodes[1].resource.snapshot().may_promote);
    let snapshot = w.nodes[0].resource.snapshot();
    assert_eq!(
        (snapshot.may_promote, snapshot.promotion_score),
        (true, 10_101)
    );
    let id = open(&mut w, 0, true);
    w.pass(Duration::from_secs(4));
    assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
    let snapshot = w.nodes[0].resource.snapshot();
    assert_eq!(
        (snapshot.may_promote, snapshot.promotion_score),
        (false, 10_101)
    );
}

/// A driver that does not answer keeps no peer that wants to leave until that one goes without being Outdated, beside a
/// Primary that goes on.
#[test]
fn a_look_without_an_end_keeps_no_peer() {
    let mut options = ResourceOptions::default();
    options.handlers.push(crate::leaving::CLOSE_UNUSED.into());
    let mut w = secondaries(2, options);
    open(&mut w, 0, true);
    w.run();
    let leave = Command::Disconnect {
        peer: node_id(0),
        force: false,
    };
    let left = w.command(1, leave);
    w.pass_until("the disconnect", 20, |w| w.answers.contains_key(&left));
    assert_eq!(w.answers[&left], Ok(Answer::Done));
    assert_eq!(w.nodes[1].resource.state.disk(VOLUME), DiskState::Outdated);
}
