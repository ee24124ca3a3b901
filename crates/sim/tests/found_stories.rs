//! Stories that once ended badly and that no random world had told.

use lockstep_core::command::{Command, ErrorCode, MetaIndex};
use lockstep_core::event::RequestKind;
use lockstep_core::options::Protocol;
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState};
use lockstep_sim::disk::Lose;
use lockstep_sim::scenario::{A, B, C, Scenario};
use lockstep_sim::world::{MS, SECOND, World};

fn disk(w: &World, node: usize) -> DiskState {
    w.snapshot(node).expect("it is up").devices[0].disk_state
}

fn is_connected(w: &World, node: usize, connection: usize) -> bool {
    let snapshot = w.snapshot(node).expect("it is up");
    snapshot.connections[connection].state == ConnState::Connected
}

#[track_caller]
fn attach(s: &mut Scenario, node: usize) {
    let command = Command::Attach {
        volume: VolumeNr(0),
        data_path: "data0".into(),
        meta_path: Some("meta0".into()),
        index: MetaIndex::FlexExternal,
        options: Default::default(),
    };
    let id = s.world.command(node, command);
    s.run_until("the disk is attached", |w| {
        let answer = w.nodes[node].answers.get(&id);
        assert!(answer.is_none_or(Result::is_ok), "{answer:?}");
        answer.is_some()
    });
}

/// Applications of a Primary without a disk had seen newer data, its disk came back and was to be
/// copied from those, but their node was lost. A third node, connected without its disk, attached
/// that one: it was of the generation of the Primary's, became its source, and both served old data.
#[test]
fn an_old_disk_that_a_peer_attaches_is_no_source_for_what_a_primary_has_shown() {
    let mut s = Scenario::new(1, 3, Protocol::C);
    s.write_and_wait(A, 100, 8);
    s.crash(C, Lose::Unflushed);
    s.operator.detach(&mut s.world, A, 0, false);
    s.run_until("A has no disk", |w| disk(w, A) == DiskState::Diskless);
    s.cut(A, C, true);
    s.cut(B, C, true);
    s.restart(C);
    s.pass(SECOND);
    s.operator.detach(&mut s.world, C, 0, false);
    s.write_and_wait(A, 102, 4);
    s.operator.toggle_pause(&mut s.world, A, B, 0);
    s.pass(SECOND);
    attach(&mut s, A);
    assert_eq!(disk(&s.world, A), DiskState::Inconsistent);
    s.read(A, 100, 8);
    s.cut(A, B, true);
    s.run_until("A loses B", |w| !is_connected(w, A, 0));
    s.cut(A, C, false);
    s.run_until("A and C meet", |w| is_connected(w, A, 1));
    s.pass(SECOND);
    attach(&mut s, C);
    s.pass(5 * SECOND);
    // It has no data until B is back.
    s.world.request(A, 0, RequestKind::Read, 100, 8);
    s.pass(5 * SECOND);
    assert_eq!(disk(&s.world, A), DiskState::Inconsistent);
    s.cut(A, B, false);
    s.cut(C, B, false);
    s.operator.heal(&mut s.world);
    s.in_sync();
    s.read(A, 100, 8);
    s.read(A, 100, 8);
}

/// An operator invalidated a disk from a node whose connection broke while a third node still had to
/// agree. The resync began without a connection, and told its state in the middle of the next handshake.
#[test]
fn a_resync_that_lost_its_peer_before_all_agreed_does_not_begin() {
    let mut s = Scenario::new(1, 3, Protocol::C);
    s.write_and_wait(A, 100, 8);
    s.world.set_blocked(B, C, true);
    let id = s.world.command(
        C,
        Command::Invalidate {
            volume: VolumeNr(0),
            from: Some(NodeId(0)),
            reset_bitmap: false,
        },
    );
    s.pass(50 * MS);
    assert!(!s.world.nodes[C].answers.contains_key(&id), "B has agreed");
    s.world.reset(A, C);
    s.run_until("C loses A", |w| !is_connected(w, C, 0));
    s.world.set_blocked(B, C, false);
    s.run_until("the command ends", |w| {
        let snapshot = w.snapshot(C).expect("it is up");
        let to_a = &snapshot.connections[0];
        let repl = to_a.peer_devices[0].repl_state;
        assert!(to_a.state == ConnState::Connected || repl == ReplState::Off);
        w.nodes[C].answers.contains_key(&id)
    });
    let answer = &s.world.nodes[C].answers[&id];
    let refused = answer.as_ref().expect_err("the peer is gone");
    assert_eq!(refused.code, ErrorCode::NEED_CONNECTION);
    s.in_sync();
}
