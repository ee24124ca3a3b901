//! Fencing policies and the answers of `fence-peer` (semantics.md, 11.5).

use super::*;
use crate::command::ErrorCode;
use crate::options::Fencing;
use crate::state::Role;

/// Two nodes in sync, node 0 Primary.
fn world(fencing: Fencing) -> World {
    let setup = Setup {
        net: NetOptions {
            fencing,
            ..NetOptions::default()
        },
        options: ResourceOptions {
            handlers: vec!["fence-peer".into(), "unfence-peer".into()],
            ..ResourceOptions::default()
        },
        ..Setup::default()
    };
    let mut w = clean(5, 2, setup);
    // The first write of a new Primary makes a generation.
    let id = w.write(0, 800, 4096, 9);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id));
    w.handlers.clear();
    w
}

/// Ends the oldest run of a handler.
fn answer(w: &mut World, index: usize, name: &str, exit_code: u8) {
    let at = w
        .handlers
        .iter()
        .position(|(node, handler, _)| (*node, *handler) == (index, name))
        .unwrap_or_else(|| panic!("node {index} has called {name}: {:#?}", w.log));
    let (_, _, tag) = w.handlers.remove(at);
    w.input(index, Input::HandlerDone { tag, exit_code });
    w.run();
}

fn calls(w: &World, index: usize, name: &str) -> usize {
    let of = |call: &&(usize, &'static str, Tag)| (call.0, call.1) == (index, name);
    w.handlers.iter().filter(of).count()
}

fn lose_link(w: &mut World) {
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(2));
}

fn mend(w: &mut World) {
    w.cut = false;
    w.pass_until("in sync again", 60, World::in_sync);
}

fn peer_disk(w: &World, index: usize) -> DiskState {
    let peer = node_id(1 - index);
    w.nodes[index].resource.state.peer_device(VOLUME, peer).disk
}

fn suspended(w: &World, index: usize) -> Vec<&'static str> {
    w.nodes[index].resource.snapshot().suspended
}

fn current(w: &World, index: usize) -> lockstep_format::units::Uuid {
    w.nodes[index].resource.devices[&VOLUME].current_uuid()
}

#[test]
fn with_stonith_io_waits_until_the_peer_is_outdated() {
    for code in [3, 4, 5, 7] {
        let mut w = world(Fencing::ResourceAndStonith);
        let before = current(&w, 0);
        // One write is on its way when the link breaks, one comes later.
        let early = w.write(0, 0, 4096, 1);
        w.cut = true;
        w.cut_links();
        w.pass(Duration::from_secs(5));
        let late = w.write(0, 8, 4096, 2);
        w.pass(Duration::from_secs(30));
        assert_eq!(suspended(&w, 0), ["fencing"]);
        assert_eq!(
            calls(&w, 0, "fence-peer"),
            1,
            "once, however often it reconnects"
        );
        assert!(!w.done(0, early) && !w.done(0, late));
        assert!(current(&w, 0).same_generation(before), "no generation yet");
        answer(&mut w, 0, "fence-peer", code);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, early) && w.done(0, late), "{:#?}", w.log);
        assert_eq!(suspended(&w, 0), Vec::<&str>::new());
        let expected = if code == 3 {
            DiskState::Inconsistent
        } else {
            DiskState::Outdated
        };
        assert_eq!(peer_disk(&w, 0), expected);
        assert!(!current(&w, 0).same_generation(before), "a new generation");
        mend(&mut w);
        w.pass(Duration::from_secs(1));
        w.check_same_data();
        assert_eq!(calls(&w, 0, "unfence-peer"), 1);
    }
}

#[test]
fn that_the_peer_is_outdated_is_told_before_io_goes_on() {
    let mut w = world(Fencing::ResourceAndStonith);
    lose_link(&mut w);
    assert_eq!(suspended(&w, 0), ["fencing"]);
    let call = w.handlers.iter().find(|call| call.1 == "fence-peer");
    let (_, _, tag) = *call.expect("fence-peer was called");
    let exit_code = 4;
    let now = w.now;
    let resource = &mut w.nodes[0].resource;
    resource.tell_steps(true);
    resource.handle(now, Input::HandlerDone { tag, exit_code });
    let told: Vec<(DiskState, Vec<&str>)> = core::iter::from_fn(|| resource.poll_output())
        .filter_map(|output| match output {
            Output::Event(Event::Step(s)) => {
                let disk = s.connections[0].peer_devices[0].disk_state;
                Some((disk, s.suspended.clone()))
            }
            _ => None,
        })
        .collect();
    let outdated = DiskState::Outdated;
    assert_eq!(told[0], (outdated, vec!["fencing"]));
    assert!(!told[1].1.contains(&"fencing"), "{told:?}");
}

#[test]
fn with_resource_only_io_goes_on_while_the_handler_runs() {
    let mut w = world(Fencing::ResourceOnly);
    lose_link(&mut w);
    assert_eq!(calls(&w, 0, "fence-peer"), 1);
    let id = w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id), "{:#?}", w.log);
    assert_eq!(peer_disk(&w, 0), DiskState::DUnknown);
    answer(&mut w, 0, "fence-peer", 4);
    assert_eq!(peer_disk(&w, 0), DiskState::Outdated);
    assert_eq!(calls(&w, 1, "fence-peer"), 0, "only a Primary fences");
    mend(&mut w);
    w.pass(Duration::from_secs(1));
    w.check_same_data();
}

#[test]
fn a_peer_that_comes_back_thaws_io_and_makes_the_answer_void() {
    let mut w = world(Fencing::ResourceAndStonith);
    let early = w.write(0, 0, 4096, 1);
    lose_link(&mut w);
    let late = w.write(0, 8, 4096, 2);
    w.pass(Duration::from_secs(3));
    assert!(!w.done(0, late));
    mend(&mut w);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, early) && w.done(0, late), "{:#?}", w.log);
    answer(&mut w, 0, "fence-peer", 4);
    w.pass(Duration::from_secs(1));
    assert_eq!(peer_disk(&w, 0), DiskState::UpToDate);
    w.check_idle();
    w.check_same_data();
    // The next loss is a new one.
    lose_link(&mut w);
    assert_eq!(calls(&w, 0, "fence-peer"), 1);
}

#[test]
fn a_broken_handler_leaves_io_frozen_until_resume_io() {
    let mut w = world(Fencing::ResourceAndStonith);
    lose_link(&mut w);
    let id = w.write(0, 8, 4096, 2);
    answer(&mut w, 0, "fence-peer", 127);
    w.pass(Duration::from_secs(60));
    assert!(!w.done(0, id));
    assert_eq!(suspended(&w, 0), ["fencing"]);
    assert_eq!(calls(&w, 0, "fence-peer"), 0, "not called again and again");
    w.command(0, Command::ResumeIo);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id), "{:#?}", w.log);
    mend(&mut w);
    w.pass(Duration::from_secs(1));
    w.check_same_data();
}

#[test]
fn dont_care_calls_nobody() {
    let mut w = world(Fencing::DontCare);
    lose_link(&mut w);
    let id = w.write(0, 8, 4096, 2);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id));
    assert_eq!(calls(&w, 0, "fence-peer"), 0);
    mend(&mut w);
    assert_eq!(calls(&w, 0, "unfence-peer"), 0);
}

#[test]
fn a_disconnect_by_command_outdates_and_calls_nobody() {
    for (by, peer) in [(0, 1), (1, 0)] {
        let mut w = world(Fencing::ResourceAndStonith);
        let command = Command::Disconnect {
            peer: node_id(peer),
            force: false,
        };
        w.command(by, command);
        w.pass(Duration::from_secs(2));
        assert_eq!(
            w.disk_state(1),
            DiskState::Outdated,
            "by {by}: {:#?}",
            w.log
        );
        assert_eq!(peer_disk(&w, 0), DiskState::Outdated);
        assert_eq!(calls(&w, 0, "fence-peer"), 0);
        assert_eq!(suspended(&w, 0), Vec::<&str>::new());
    }
    let mut w = world(Fencing::ResourceAndStonith);
    w.command(1, Command::Down);
    w.pass(Duration::from_secs(2));
    assert_eq!(calls(&w, 0, "fence-peer"), 0, "{:#?}", w.log);
    assert_eq!(peer_disk(&w, 0), DiskState::Outdated);
}

/// Capture 9x/34: the Primary disconnects, and its peer is Outdated.
#[test]
fn without_fencing_as_well_a_primary_that_disconnects_leaves_old_data_behind() {
    for (by, peer) in [(0, 1), (1, 0)] {
        let mut w = world(Fencing::DontCare);
        let command = Command::Disconnect {
            peer: node_id(peer),
            force: false,
        };
        w.command(by, command);
        w.pass(Duration::from_secs(2));
        assert_eq!(w.disk_state(1), DiskState::Outdated, "{:#?}", w.log);
        let id = w.command(1, Command::Primary { force: false });
        w.pass(Duration::from_secs(2));
        let refused = w.answers[&id].as_ref().unwrap_err();
        assert_eq!(refused.code, ErrorCode::NO_UP_TO_DATE_DISK, "by {by}");
        let command = Command::Connect {
            peer: node_id(peer),
            discard_my_data: false,
            tentative: false,
        };
        w.command(by, command);
        w.pass_until("nothing is old", 60, World::in_sync);
    }
    // What a Secondary leaves is not old.
    let mut w = world(Fencing::DontCare);
    w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    let command = Command::Disconnect {
        peer: node_id(1),
        force: false,
    };
    w.command(0, command);
    w.pass(Duration::from_secs(2));
    assert_eq!(w.disk_state(1), DiskState::UpToDate, "{:#?}", w.log);
}

#[test]
fn a_promotion_fences_the_lost_primary_first() {
    let mut w = world(Fencing::ResourceOnly);
    w.crash(0);
    w.pass(Duration::from_secs(20));
    let role = |w: &World| w.nodes[1].resource.state.role;
    // Not fenced: refused.
    let id = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(5));
    assert!(!w.answers.contains_key(&id), "waits for the handler");
    answer(&mut w, 1, "fence-peer", 1);
    w.pass(Duration::from_secs(5));
    let refused = w.answers[&id].as_ref().unwrap_err();
    assert_eq!(refused.code, ErrorCode::PRIMARY_NOP, "{:#?}", w.log);
    assert_eq!(role(&w), Role::Secondary);
    // Fenced.
    let id = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(5));
    answer(&mut w, 1, "fence-peer", 7);
    w.pass(Duration::from_secs(5));
    assert!(w.answers[&id].is_ok(), "{:#?}", w.log);
    assert_eq!(role(&w), Role::Primary);
    let write = w.write(1, 0, 4096, 9);
    w.pass(Duration::from_secs(1));
    assert!(w.done(1, write));
    w.restart(0);
    w.pass_until("the old Primary gets the new data", 60, World::in_sync);
    w.pass(Duration::from_secs(1));
    w.check_same_data();
}

#[test]
fn a_failed_fence_can_be_overruled_by_force() {
    let mut w = world(Fencing::ResourceAndStonith);
    w.crash(0);
    w.pass(Duration::from_secs(20));
    let id = w.command(1, Command::Primary { force: true });
    w.pass(Duration::from_secs(5));
    answer(&mut w, 1, "fence-peer", 1);
    w.pass(Duration::from_secs(5));
    assert!(w.answers[&id].is_ok(), "{:#?}", w.log);
    assert_eq!(w.nodes[1].resource.state.role, Role::Primary);
}

#[test]
fn a_node_that_starts_alone_is_consistent_until_the_peer_is_fenced() {
    let mut w = world(Fencing::ResourceOnly);
    w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    w.cut = true;
    w.crash(0);
    w.crash(1);
    w.restart(1);
    w.pass(Duration::from_secs(3));
    assert_eq!(w.disk_state(1), DiskState::Consistent);
    let id = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(10));
    answer(&mut w, 1, "fence-peer", 4);
    w.pass(Duration::from_secs(5));
    assert!(w.answers[&id].is_ok(), "{:#?}", w.log);
    assert_eq!(w.disk_state(1), DiskState::UpToDate);
}

/// A device that waits for a killed daemon is known by its generation, so its keeper has to know of
/// a new one before anybody can have it.
#[test]
fn a_new_generation_is_announced_before_it_is_on_disk_or_at_a_peer() {
    let mut w = world(Fencing::DontCare);
    let before = current(&w, 0);
    w.announced.clear();
    let id = w.write(0, 0, 4096, 1);
    lose_link(&mut w);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id), "{:#?}", w.log);
    assert!(!current(&w, 0).same_generation(before), "a new generation");
    assert_eq!(w.announced, [(0, before, current(&w, 0))]);
    assert!(
        w.is_known(current(&w, 0)),
        "on the disk, where it is looked for"
    );
    mend(&mut w);
    w.check_same_data();
}
