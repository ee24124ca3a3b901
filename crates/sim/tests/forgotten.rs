//! `forget-peer`, after which the node comes back with the metadata it had.

use lockstep_core::command::{Command, ErrorCode};
use lockstep_core::options::Protocol;
use lockstep_core::state::ConnState;
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState};
use lockstep_sim::disk::Lose;
use lockstep_sim::scenario::{A, B, C, Scenario};
use lockstep_sim::world::{Config, SECOND, World};

fn id(node: usize) -> NodeId {
    NodeId(u8::try_from(node).unwrap())
}

/// A command that succeeds.
#[track_caller]
fn command(s: &mut Scenario, node: usize, command: Command) {
    let id = s.world.command(node, command);
    s.run_until("an answer", |w| w.nodes[node].answers.contains_key(&id));
    let answer = s.world.nodes[node].answers[&id].clone();
    answer.map(|_| ()).map_err(|error| error.code).unwrap();
}

/// The node's connection and slot for a peer that is down go.
fn forget(s: &mut Scenario, node: usize, peer: usize) {
    let peer = id(peer);
    let refused = s.world.command(node, Command::ForgetPeer { peer });
    command(s, node, Command::Disconnect { peer, force: false });
    command(s, node, Command::DelPeer { peer });
    command(s, node, Command::ForgetPeer { peer });
    let refused = s.world.nodes[node].answers[&refused].clone();
    assert_eq!(refused.unwrap_err().code, ErrorCode::ERR_NET_CONFIGURED);
}

fn add_again(s: &mut Scenario, node: usize, peer: usize) {
    let mut net = s.operator.settings.net.clone();
    net.peer_name = lockstep_sim::world::name(peer).to_string();
    let peer = id(peer);
    command(s, node, Command::NewPeer { peer, net });
    let options = s.operator.settings.peer.clone();
    let volume = VolumeNr(0);
    let options = Command::PeerDeviceOptions {
        peer,
        volume,
        options,
    };
    command(s, node, options);
    s.operator.connect_all(&mut s.world, node);
}

/// Three nodes that have become equal by a full copy: the generation before is no ancestor of theirs.
fn copied(seed: u64) -> Scenario {
    let config = Config {
        nodes: 3,
        ..Config::small(seed)
    };
    Scenario::with(config, |_| {}, true)
}

fn disk(w: &World, node: usize) -> DiskState {
    w.snapshot(node).unwrap().devices[0].disk_state
}

/// C is a peer of both again, and comes back with its old metadata.
fn returns(s: &mut Scenario) {
    add_again(s, A, C);
    add_again(s, B, C);
    s.restart(C);
    s.in_sync();
    s.read(A, 0, 16);
}

/// C's generation was known by its slot alone: it counted as a branch of a split brain.
#[test]
fn a_forgotten_node_that_is_behind_comes_back_by_a_full_copy() {
    let mut s = copied(1);
    s.write_and_wait(A, 0, 8);
    s.crash(C, Lose::InFlight);
    s.run_until("the loss of C", |w| {
        let connections = w.snapshot(A).unwrap().connections;
        connections
            .iter()
            .all(|c| c.peer != id(C) || c.state < ConnState::Connected)
    });
    s.write_and_wait(A, 4, 8);
    forget(&mut s, A, C);
    forget(&mut s, B, C);
    s.write_and_wait(A, 100, 8);
    returns(&mut s);
}

/// Nothing was written between C's end and its removal: it came back as equal.
#[test]
fn a_forgotten_node_that_was_equal_is_no_more_after_a_write() {
    for (seed, demoted_at) in [(2, None), (3, Some(false)), (4, Some(true))] {
        let mut s = copied(seed);
        s.write_and_wait(A, 0, 8);
        if demoted_at.is_some() {
            s.demote(A);
        }
        s.crash(C, Lose::InFlight);
        s.pass(SECOND);
        if demoted_at == Some(false) {
            s.promote(A);
        }
        forget(&mut s, A, C);
        forget(&mut s, B, C);
        if demoted_at == Some(true) {
            s.promote(A);
        }
        s.write_and_wait(A, 4, 8);
        s.write_and_wait(A, 100, 8);
        returns(&mut s);
    }
}

/// A node whose source has a Primary that it does not reach itself has copied what there is. The two
/// did so every few seconds, for ever.
#[test]
fn a_target_of_an_unstable_source_waits_for_a_stable_one() {
    let mut s = Scenario::new(3, 3, Protocol::C);
    s.write_and_wait(A, 0, 8);
    s.crash(C, Lose::InFlight);
    s.pass(SECOND);
    s.write_and_wait(A, 4, 8);
    s.cut(A, C, true);
    s.restart(C);
    let ends = |w: &World| {
        let lines = w.nodes[C].log.iter();
        let unstable = "its source was not stable";
        lines.filter(|line| line.text.contains(unstable)).count()
    };
    s.run_until("the first resync", |w| w.is_up(C) && ends(w) > 0);
    s.pass(60 * SECOND);
    assert_eq!(ends(&s.world), 1);
    assert_eq!(disk(&s.world, C), DiskState::Inconsistent);
    s.write_and_wait(A, 50, 8);
    s.cut(A, C, false);
    s.in_sync();
    let peers = &s.world.snapshot(C).unwrap().connections;
    assert!((peers.iter()).all(|c| c.peer_devices[0].repl_state == ReplState::Established));
}

/// The same, and the Primary goes while the target waits: its source becomes stable.
#[test]
fn a_target_goes_on_when_its_source_becomes_stable() {
    let mut s = Scenario::new(4, 3, Protocol::C);
    s.crash(C, Lose::InFlight);
    s.pass(SECOND);
    s.write_and_wait(A, 4, 8);
    s.cut(A, C, true);
    s.restart(C);
    s.pass(20 * SECOND);
    assert_eq!(disk(&s.world, C), DiskState::Inconsistent);
    s.write_and_wait(A, 50, 8);
    s.demote(A);
    s.run_until("C follows B", |w| disk(w, C) == DiskState::UpToDate);
    s.cut(A, C, false);
    s.in_sync();
}
