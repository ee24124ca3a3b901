//! Commands in a state where they cannot be followed, and where they nearly could not.

use lockstep_core::command::{Command, ErrorCode};
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::ReplState;
use lockstep_sim::scenario::{A, B, Scenario};
use lockstep_sim::world::{Config, MS, SECOND, World};

const VOLUME: VolumeNr = VolumeNr(0);

fn id(node: usize) -> NodeId {
    NodeId(u8::try_from(node).unwrap())
}

/// Two nodes in sync whose disks are slow enough for a look at what is under way.
fn pair(seed: u64) -> Scenario {
    let config = Config {
        blocks: 4096,
        resync_max_kib_s: 1024,
        ..Config::small(seed)
    };
    let mut s = Scenario::with(config, |_| {}, false);
    s.in_sync();
    s
}

fn repl(w: &World, node: usize) -> ReplState {
    let snapshot = w.snapshot(node).unwrap();
    snapshot.connections[0].peer_devices[0].repl_state
}

/// The answer of a command, which comes soon.
#[track_caller]
fn answer(s: &mut Scenario, node: usize, command: Command) -> Result<(), ErrorCode> {
    let id = s.world.command(node, command);
    s.run_until("an answer", |w| w.nodes[node].answers.contains_key(&id));
    let answer = s.world.nodes[node].answers[&id].clone();
    answer.map(|_| ()).map_err(|error| error.code)
}

fn verify(peer: usize, start: Option<u64>, stop: Option<u64>) -> Command {
    Command::Verify {
        peer: id(peer),
        volume: VOLUME,
        start,
        stop,
    }
}

#[test]
fn a_verify_of_what_is_verified_already_is_refused_on_both_nodes() {
    let mut s = pair(1);
    assert_eq!(answer(&mut s, A, verify(B, None, None)), Ok(()));
    assert_eq!(repl(&s.world, A), ReplState::VerifyS);
    for (node, peer) in [(A, B), (B, A)] {
        let again = answer(&mut s, node, verify(peer, None, Some(64)));
        assert_eq!(again, Err(ErrorCode::RESYNC_RUNNING), "node {node}");
    }
    s.run_until("the whole volume is verified", |w| {
        repl(w, A) == ReplState::Established
    });
    s.in_sync();
}

#[test]
fn a_verify_with_a_stop_before_where_the_last_one_was_cut_short_begins_anew() {
    let mut s = pair(2);
    let size = s.world.snapshot(A).unwrap().devices[0].size_sectors;
    assert_eq!(answer(&mut s, A, verify(B, Some(size / 2), None)), Ok(()));
    s.pass(100 * MS);
    assert_eq!(repl(&s.world, A), ReplState::VerifyS);
    let (peer, force) = (id(B), false);
    let disconnect = Command::Disconnect { peer, force };
    assert_eq!(answer(&mut s, A, disconnect), Ok(()));
    let connect = Command::Connect {
        peer,
        discard_my_data: false,
        tentative: false,
    };
    assert_eq!(answer(&mut s, A, connect), Ok(()));
    s.in_sync();
    assert_eq!(answer(&mut s, A, verify(B, None, Some(1024))), Ok(()));
    let snapshot = s.world.snapshot(A).unwrap();
    let verified = snapshot.connections[0].peer_devices[0].verify.unwrap();
    assert_eq!(verified.start_sector, 0);
    assert_eq!(verified.stop_sector, Some(1024));
    s.run_until("the verify ends", |w| repl(w, A) == ReplState::Established);
    s.pass(SECOND);
    s.in_sync();
}

#[test]
fn nobody_without_a_disk_invalidates_a_peer() {
    let mut s = pair(3);
    let peer = id(B);
    let invalidate = |volume| Command::InvalidateRemote {
        peer,
        volume,
        reset_bitmap: true,
    };
    let unknown = answer(&mut s, A, invalidate(VolumeNr(9)));
    assert_eq!(unknown, Err(ErrorCode::ERR_MINOR_INVALID));
    let detach = Command::Detach {
        volume: VOLUME,
        force: false,
        diskless: false,
    };
    assert_eq!(answer(&mut s, A, detach), Ok(()));
    let refused = answer(&mut s, A, invalidate(VOLUME));
    assert_eq!(refused, Err(ErrorCode::ERR_NO_DISK));
    s.pass(SECOND);
    assert_eq!(repl(&s.world, A), ReplState::Established);
    s.holds();
}
