//! Handlers that decide whether a resync starts (semantics.md, 11.5 and 19.2).

use super::*;
use crate::device::LostDisk;
use crate::options::{AfterSplitBrain, OnIoError};
use crate::state::Role;

const BOTH: [&str; 2] = ["before-resync-target", "before-resync-source"];

fn setup(protocol_max: u32) -> Setup {
    let mut setup = Setup::default();
    setup.options.protocol_max = protocol_max;
    setup.options.handlers = BOTH.iter().map(|name| (*name).into()).collect();
    setup
}

/// Ends the handlers of this name with this code; says whether there were any.
fn answer(w: &mut World, name: &str, exit_code: u8) -> bool {
    let (ended, rest): (Vec<_>, Vec<_>) = core::mem::take(&mut w.handlers)
        .into_iter()
        .partition(|(_, handler, _)| *handler == name);
    w.handlers = rest;
    for (node, _, tag) in &ended {
        let tag = *tag;
        w.input(*node, Input::HandlerDone { tag, exit_code });
    }
    w.run();
    !ended.is_empty()
}

/// Node 1 missed ten blocks and is connected again; node 0 is Primary.
fn reconnected(seed: u64, protocol_max: u32) -> World {
    let mut w = clean(seed, 2, setup(protocol_max));
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(1));
    for n in 0..10 {
        w.write(0, n * 8, 4096, 1 + n as u8);
    }
    w.pass(Duration::from_secs(1));
    w.cut = false;
    w.pass(Duration::from_secs(5));
    w
}

#[test]
fn a_resync_waits_for_the_handlers_of_both_sides_in_both_dialects() {
    for protocol_max in [101, 124] {
        for seed in 0..10 {
            let mut w = reconnected(seed, protocol_max);
            // The target's first: nothing is written there before.
            assert_eq!(w.repl(1, 0), ReplState::WfBitmapT);
            assert_eq!(w.handlers.len(), 1);
            let before = w.nodes[1].data.block(3).to_vec();
            w.write(0, 24, 4096, 99);
            w.pass(Duration::from_secs(5));
            assert_eq!(w.nodes[1].data.block(3), before);
            assert!(answer(&mut w, BOTH[0], 0));
            w.pass(Duration::from_secs(5));
            assert_eq!(w.repl(0, 1), ReplState::WfBitmapS);
            assert!(answer(&mut w, BOTH[1], if seed % 2 == 0 { 0 } else { 3 }));
            w.pass_until("the resync", 20, World::in_sync);
            w.pass(Duration::from_secs(3));
            assert!(w.handlers.is_empty(), "each is called once");
            w.check_idle();
            w.check_same_data();
        }
    }
}

#[test]
fn a_handler_that_refuses_ends_the_connection() {
    for protocol_max in [101, 124] {
        for (name, code) in [(BOTH[0], 1), (BOTH[0], 3), (BOTH[1], 1)] {
            let mut w = reconnected(20, protocol_max);
            if name == BOTH[1] {
                assert!(answer(&mut w, BOTH[0], 0));
                w.pass(Duration::from_secs(1));
            }
            let refuses = w.handlers.iter().find(|h| h.1 == name).unwrap().0;
            assert!(answer(&mut w, name, code));
            w.pass(Duration::from_secs(5));
            let state = &w.nodes[refuses].resource.state;
            let conn = state.conn(node_id(1 - refuses));
            assert_eq!(conn, lockstep_format::wire::ConnState::StandAlone);
            assert_eq!(w.nodes[1].data.block(9), &[0; 4096], "nothing was copied");
            assert_eq!(w.bits(0, 1), 10, "what differs is still known");
        }
    }
}

#[test]
fn an_answer_for_a_lost_connection_does_not_count() {
    for protocol_max in [101, 124] {
        let mut w = reconnected(30, protocol_max);
        let old = core::mem::take(&mut w.handlers);
        w.cut_links();
        w.pass(Duration::from_secs(5));
        assert_eq!(w.handlers.len(), 1, "it is asked again");
        for (node, _, tag) in old {
            w.input(node, Input::HandlerDone { tag, exit_code: 1 });
        }
        w.pass(Duration::from_secs(1));
        assert_eq!(w.repl(1, 0), ReplState::WfBitmapT);
        assert!(answer(&mut w, BOTH[0], 0));
        w.pass(Duration::from_secs(1));
        assert!(answer(&mut w, BOTH[1], 0));
        w.pass_until("the resync", 20, World::in_sync);
        w.check_same_data();
    }
}

#[test]
fn a_full_sync_is_asked_about_on_both_sides() {
    for protocol_max in [101, 124] {
        let mut w = clean(40, 2, setup(protocol_max));
        w.invalidate();
        let mut asked = Vec::new();
        for _ in 0..4 {
            for name in BOTH {
                if answer(&mut w, name, 0) {
                    asked.push(name);
                }
            }
            w.pass(Duration::from_secs(1));
        }
        asked.sort_unstable();
        assert_eq!(asked, ["before-resync-source", "before-resync-target"]);
        w.pass_until("the full sync", 60, World::in_sync);
        w.check_same_data();
    }
}

#[test]
fn a_primary_without_data_calls_its_handler() {
    let mut setup = Setup::default();
    setup.options.handlers = vec!["pri-on-incon-degr".into(), "local-io-error".into()];
    let mut w = clean(50, 2, setup);
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(1));
    assert!(w.handlers.is_empty(), "its own disk is good");
    w.nodes[0].fail_data_writes = true;
    w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    let called: Vec<_> = w.handlers.iter().map(|h| (h.0, h.1)).collect();
    assert!(called.contains(&(0, "pri-on-incon-degr")), "{called:?}");
    assert!(!called.contains(&(0, "local-io-error")), "{called:?}");
}

#[test]
fn the_handler_for_disk_errors_is_called_only_where_it_is_asked_for() {
    for (policy, asked) in [
        (OnIoError::Detach, false),
        (OnIoError::CallLocalIoError, true),
    ] {
        for failing in [0, 1] {
            let mut setup = Setup::default();
            setup.options.handlers = vec!["local-io-error".into()];
            setup.disk.on_io_error = policy;
            let mut w = clean(51, 2, setup);
            w.nodes[failing].fail_data_writes = true;
            w.write(0, 0, 4096, 1);
            w.pass(Duration::from_secs(1));
            let called: Vec<_> = w.handlers.iter().map(|h| (h.0, h.1)).collect();
            let expected = [(failing, "local-io-error")];
            assert_eq!(called, expected[..usize::from(asked)]);
            let why = w.nodes[failing].resource.devices[&VOLUME].lost_disk;
            assert_eq!(why, Some(LostDisk::Data));
        }
    }
}

/// Both nodes have changes of their own: node 0, which is Primary, one block, node 1 ten.
fn split(protocol_max: u32) -> World {
    let mut setup = Setup::default();
    setup.options.protocol_max = protocol_max;
    setup.options.auto_promote = true;
    setup.options.handlers = vec!["pri-lost-after-sb".into()];
    setup.net.after_sb_0pri = AfterSplitBrain::DiscardLeastChanges;
    setup.net.after_sb_1pri = AfterSplitBrain::CallPriLostAfterSb;
    let mut w = clean(60, 2, setup);
    w.write(0, 8000, 4096, 99);
    w.pass(Duration::from_secs(1));
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(1));
    w.write(0, 0, 4096, 1);
    w.command(1, Command::Primary { force: true });
    w.pass(Duration::from_secs(1));
    for n in 0..10 {
        w.write(1, n * 8, 4096, 101 + n as u8);
    }
    w.pass(Duration::from_secs(1));
    w.command(1, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    w
}

#[test]
fn a_primary_that_loses_a_split_brain_is_demoted_before_its_changes_are_dropped() {
    for protocol_max in [101, 124] {
        let mut w = split(protocol_max);
        w.cut = false;
        w.pass_until("one side's changes are dropped", 60, World::in_sync);
        assert_eq!(w.nodes[0].resource.state.role, Role::Secondary);
        assert!(w.handlers.is_empty());
        assert_eq!(w.nodes[0].data.block(0), &[101; 4096]);
        w.check_same_data();
    }
}

/// Both are Primary and stay so while they are apart; node 0 has fewer changes.
fn both_primary_and_apart(protocol_max: u32) -> World {
    let mut setup = Setup::default();
    setup.options.protocol_max = protocol_max;
    setup.options.auto_promote = true;
    setup.net.allow_two_primaries = true;
    setup.net.after_sb_0pri = AfterSplitBrain::DiscardLeastChanges;
    setup.net.after_sb_2pri = AfterSplitBrain::CallPriLostAfterSb;
    let mut w = clean(61, 2, setup);
    w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    assert_eq!(w.nodes[1].resource.state.role, Role::Primary);
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(1));
    w.write(0, 0, 4096, 1);
    for n in 0..10 {
        w.write(1, n * 8, 4096, 101 + n as u8);
    }
    w.pass(Duration::from_secs(1));
    w
}

#[test]
fn a_demoted_loser_beside_a_primary_needs_no_other_policy() {
    for protocol_max in [101, 124] {
        let mut w = both_primary_and_apart(protocol_max);
        w.cut = false;
        w.pass_until("the loser's changes are dropped", 60, World::in_sync);
        assert_eq!(w.nodes[0].resource.state.role, Role::Secondary);
        assert_eq!(w.nodes[1].resource.state.role, Role::Primary);
        assert_eq!(w.nodes[0].data.block(0), &[101; 4096]);
        w.check_same_data();
        // It held for that split brain only: in the next one nobody gives way unasked.
        let conn = &w.nodes[0].resource.connections[&node_id(1)];
        assert!(!conn.discard_my_data && !conn.lost_split_brain);
    }
}

#[test]
fn a_loser_that_is_promoted_again_keeps_its_changes() {
    for protocol_max in [101, 124] {
        let mut w = both_primary_and_apart(protocol_max);
        w.cut = false;
        let lost = |w: &World| {
            let conn = &w.nodes[0].resource.connections[&node_id(1)];
            conn.discard_my_data
        };
        for _ in 0..2000 {
            if lost(&w) {
                break;
            }
            w.pass(Duration::from_millis(10));
        }
        assert!(lost(&w), "it was demoted");
        w.cut = true;
        w.cut_links();
        w.command(0, Command::Primary { force: true });
        w.pass(Duration::from_secs(1));
        assert_eq!(w.nodes[0].resource.state.role, Role::Primary);
        assert!(!lost(&w));
        assert_eq!(w.nodes[0].data.block(0), &[1; 4096]);
    }
}

#[test]
fn a_primary_in_use_that_loses_a_split_brain_keeps_its_data_and_calls_its_handler() {
    for protocol_max in [101, 124] {
        let mut w = split(protocol_max);
        let open = Command::Open {
            volume: VOLUME,
            open: true,
            write: true,
        };
        w.command(0, open);
        w.run();
        w.cut = false;
        w.pass(Duration::from_secs(10));
        let state = &w.nodes[0].resource.state;
        assert_eq!(state.role, Role::Primary);
        assert_eq!(
            state.conn(node_id(1)),
            lockstep_format::wire::ConnState::StandAlone
        );
        assert!(w.handlers.iter().any(|h| h.1 == "pri-lost-after-sb"));
        assert_eq!(w.nodes[0].data.block(0), &[1; 4096]);
        assert_eq!(w.read(0, 0, 4096), vec![1; 4096]);
    }
}
