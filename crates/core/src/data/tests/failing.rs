//! A forced demotion under openers (`secondary --force`): their requests fail, what is suspended
//! too, and nobody opens a volume before all have closed (semantics.md, 7.2 and 7.3).

use super::*;
use crate::command::ErrorCode;
use crate::options::{Fencing, OnLoss, Quorum};
use crate::state::Role;

fn open(w: &mut World, on: bool) -> u64 {
    let command = Command::Open {
        volume: VOLUME,
        open: on,
        write: true,
    };
    w.command(0, command)
}

/// Nodes in sync, node 0 Primary and open for writing.
fn opened(count: usize, setup: Setup) -> World {
    let diskless = setup.diskless;
    let mut w = match diskless {
        None => clean(5, count, setup),
        Some(_) => {
            let mut w = World::new(5, count, setup);
            w.pass(Duration::from_secs(3));
            let command = Command::NewCurrentUuid {
                volume: VOLUME,
                clear_bitmap: true,
                force_resync: false,
            };
            w.command(1, command);
            w.pass_until("clean start", 20, World::in_sync);
            w.pass(Duration::from_secs(1));
            w.command(0, Command::Primary { force: false });
            w.pass(Duration::from_secs(1));
            w
        }
    };
    let id = open(&mut w, true);
    let first = w.write(0, 800, 4096, 9);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
    assert!(w.done(0, first), "{:#?}", w.log);
    w
}

fn fails_io(w: &World) -> bool {
    w.nodes[0].resource.snapshot().force_io_failures
}

/// Something suspends the I/O of node 0; then it is demoted by force.
fn check(mut w: World, early: &[u64]) {
    let late = [
        w.write(0, 16, 4096, 2),
        w.request(0, RequestKind::Read, 0, 4096, 0),
        w.request(0, RequestKind::Flush, 0, 0, 0),
    ];
    w.pass(Duration::from_secs(5));
    for id in &late {
        assert_eq!(w.nodes[0].completed.get(id), None, "it is held");
    }
    let gentle = w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    let refused = w.answers[&gentle].as_ref().err().map(|e| e.code);
    assert_eq!(refused, Some(ErrorCode::DEVICE_IN_USE));
    let forced = w.command(0, Command::Secondary { force: true });
    w.pass(Duration::from_secs(5));
    assert_eq!(
        w.answers.get(&forced),
        Some(&Ok(Answer::Done)),
        "{:#?}",
        w.log
    );
    assert_eq!(w.nodes[0].resource.state.role, Role::Secondary);
    assert!(fails_io(&w));
    for id in early.iter().chain(&late) {
        let result = w.nodes[0].completed.get(id);
        assert!(result.is_some(), "request {id} has ended: {:#?}", w.log);
        assert!(result.is_some_and(|r| r.is_err()), "{result:?}");
    }
    // Whoever has it open gets errors, and nobody opens it.
    let more = w.write(0, 0, 4096, 3);
    let second = open(&mut w, true);
    w.pass(Duration::from_secs(3));
    assert_eq!(
        w.nodes[0].completed.get(&more),
        Some(&Err(RequestError::Io))
    );
    let refused = w.answers[&second].as_ref().err().map(|e| e.code);
    assert_eq!(refused, Some(ErrorCode::DEVICE_IN_USE));
    let primary = w.command(0, Command::Primary { force: false });
    w.pass(Duration::from_secs(20));
    let refused = w.answers[&primary].as_ref().err().map(|e| e.code);
    assert_eq!(refused, Some(ErrorCode::DEVICE_IN_USE));
    // The last one closes.
    open(&mut w, false);
    w.pass(Duration::from_millis(100));
    assert!(!fails_io(&w));
    w.cut = false;
    w.command(0, Command::ResumeIo);
    w.pass_until("in sync again", 90, World::in_sync);
    let again = open(&mut w, true);
    w.pass(Duration::from_secs(5));
    assert_eq!(w.answers[&again], Ok(Answer::Done), "{:#?}", w.log);
    let id = w.write(0, 0, 4096, 7);
    w.pass(Duration::from_secs(2));
    assert!(w.done(0, id), "{:#?}", w.log);
}

#[test]
fn a_forced_demotion_fails_what_an_operator_suspended() {
    let mut w = opened(2, Setup::default());
    w.command(0, Command::SuspendIo);
    w.run();
    check(w, &[]);
}

#[test]
fn a_forced_demotion_fails_what_waits_for_quorum() {
    let setup = Setup {
        options: ResourceOptions {
            quorum: Quorum::Majority,
            on_no_quorum: OnLoss::SuspendIo,
            ..ResourceOptions::default()
        },
        ..Setup::default()
    };
    let mut w = opened(3, setup);
    w.stalled = Some(1);
    let early = w.write(0, 8, 4096, 1);
    w.run();
    w.cut = true;
    w.cut_links();
    w.stalled = None;
    w.pass(Duration::from_secs(2));
    assert_eq!(w.nodes[0].completed.get(&early), None);
    check(w, &[]);
}

/// Whoever waits for an error rather than for quorum gets it, also for a write that was under way when the
/// peers were lost.
#[test]
fn a_frozen_write_ends_when_errors_are_wanted_instead() {
    let setup = Setup {
        options: ResourceOptions {
            quorum: Quorum::Majority,
            on_no_quorum: OnLoss::SuspendIo,
            ..ResourceOptions::default()
        },
        ..Setup::default()
    };
    let options = ResourceOptions {
        on_no_quorum: OnLoss::IoError,
        ..setup.options.clone()
    };
    for under_way in [false, true] {
        let mut w = opened(3, setup.clone());
        w.cut = true;
        let early = under_way.then(|| w.write(0, 8, 4096, 1));
        w.cut_links();
        w.pass(Duration::from_secs(2));
        let write = early.unwrap_or_else(|| w.write(0, 8, 4096, 1));
        w.pass(Duration::from_secs(2));
        assert_eq!(w.nodes[0].completed.get(&write), None);
        let options = options.clone();
        w.command(0, Command::ResourceOptions { options });
        w.pass(Duration::from_secs(2));
        let result = w.nodes[0].completed.get(&write);
        let failed = Some(&Err(RequestError::Io));
        assert_eq!(result, failed, "{under_way} {:#?}", w.log);
        w.cut = false;
        w.pass_until("in sync again", 90, World::in_sync);
    }
}

/// Requests of an application count as well, if nobody said that the volume is open.
#[test]
fn a_forced_demotion_without_openers_acknowledges_nothing_that_was_frozen() {
    let setup = Setup {
        options: ResourceOptions {
            quorum: Quorum::Majority,
            on_no_quorum: OnLoss::SuspendIo,
            ..ResourceOptions::default()
        },
        ..Setup::default()
    };
    let mut w = clean(5, 3, setup);
    w.cut = true;
    let write = w.write(0, 8, 4096, 1);
    w.cut_links();
    w.pass(Duration::from_secs(2));
    assert_eq!(w.nodes[0].completed.get(&write), None);
    w.command(0, Command::Secondary { force: true });
    w.pass(Duration::from_secs(2));
    let result = w.nodes[0].completed.get(&write);
    assert_eq!(result, Some(&Err(RequestError::Io)), "{:#?}", w.log);
    assert!(!fails_io(&w));
    w.cut = false;
    w.pass_until("in sync again", 90, World::in_sync);
}

#[test]
fn a_forced_demotion_fails_what_waits_for_data() {
    let setup = Setup {
        options: ResourceOptions {
            on_no_data_accessible: OnLoss::SuspendIo,
            ..ResourceOptions::default()
        },
        diskless: Some(0),
        ..Setup::default()
    };
    let mut w = opened(2, setup);
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(2));
    check(w, &[]);
}

#[test]
fn a_forced_demotion_fails_what_waits_for_a_fence() {
    let setup = Setup {
        net: NetOptions {
            fencing: Fencing::ResourceAndStonith,
            ..NetOptions::default()
        },
        options: ResourceOptions {
            handlers: vec!["fence-peer".into()],
            ..ResourceOptions::default()
        },
        ..Setup::default()
    };
    let mut w = opened(2, setup);
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(2));
    check(w, &[]);
}
