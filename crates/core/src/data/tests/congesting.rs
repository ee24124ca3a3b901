//! `on-congestion`: a protocol A peer that does not keep up (semantics.md, 17).

use super::*;
use crate::command::ErrorCode;
use crate::options::OnCongestion;

fn setup(protocol_max: u32, policy: OnCongestion) -> Setup {
    let mut setup = Setup::default();
    setup.net.protocol = Protocol::A;
    setup.net.on_congestion = policy;
    setup.net.congestion_fill_sectors = 16;
    setup.options.protocol_max = protocol_max;
    setup
}

fn repl(w: &World) -> (ReplState, ReplState) {
    (w.repl(0, 1), w.repl(1, 0))
}

fn count(w: &World, name: &str) -> u64 {
    w.packets.get(name).copied().unwrap_or(0)
}

/// Node 0 is Ahead of node 1, whose data stream stands still. Blocks 0 to 9 are written, of which
/// node 1 is sent the first two.
fn ahead(seed: u64, protocol_max: u32) -> World {
    ahead_with(seed, setup(protocol_max, OnCongestion::PullAhead))
}

fn ahead_with(seed: u64, setup: Setup) -> World {
    let mut w = clean(seed, 2, setup);
    // A new Primary's first write makes a generation.
    w.write(0, 8000, 4096, 99);
    w.pass(Duration::from_secs(1));
    w.packets.clear();
    w.stalled = Some(1);
    let ids: Vec<u64> = (0..10)
        .map(|n| {
            let id = w.write(0, n * 8, 4096, 1 + n as u8);
            w.pass(Duration::from_millis(10));
            id
        })
        .collect();
    assert_eq!(repl(&w).0, ReplState::Ahead, "{:#?}", w.log);
    assert_eq!(count(&w, "data"), 2);
    for id in ids {
        assert!(w.done(0, id), "nobody waits for the peer: {:#?}", w.log);
    }
    w
}

/// The peer has everything, and both know it.
fn check_equal(w: &mut World) {
    w.pass(Duration::from_secs(3));
    w.check_idle();
    w.check_same_data();
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0), "{:#?}", w.log);
}

#[test]
fn marks_instead_of_writes_and_a_resync_when_the_network_is_free_in_both_dialects() {
    for protocol_max in [101, 124] {
        for seed in 0..20 {
            let mut w = ahead(seed, protocol_max);
            w.stalled = None;
            w.pass(Duration::from_millis(500));
            assert_eq!(count(&w, "out of sync"), 8);
            assert_eq!(repl(&w), (ReplState::Ahead, ReplState::Behind));
            assert_eq!(w.disk_state(1), DiskState::Outdated);
            w.write(0, 800, 4096, 77);
            w.pass_until("the resync", 20, World::in_sync);
            // The resync copied what was marked and nothing else.
            assert!((1..=9).contains(&count(&w, "rs data reply")));
            assert_eq!(count(&w, "data"), 2);
            assert_eq!(w.read(0, 800, 4096), vec![77; 4096]);
            w.write(0, 1600, 4096, 78);
            check_equal(&mut w);
            assert_eq!(count(&w, "data"), 3);
        }
    }
}

#[test]
fn what_is_written_while_the_resync_begins_is_not_missed() {
    for protocol_max in [101, 124] {
        for seed in 100..130 {
            let mut w = ahead(seed, protocol_max);
            w.stalled = None;
            for n in 0..40u64 {
                w.write(0, n % 13 * 8, 4096, n as u8 + 20);
                w.pass(Duration::from_millis(50));
            }
            w.pass_until("the resync", 60, World::in_sync);
            check_equal(&mut w);
        }
    }
}

#[test]
fn a_lost_link_in_ahead_leaves_marks_that_a_resync_copies() {
    for protocol_max in [101, 124] {
        for seed in 200..210 {
            let mut w = ahead(seed, protocol_max);
            w.stalled = None;
            w.cut_links();
            w.pass_until("the resync", 60, World::in_sync);
            check_equal(&mut w);
        }
    }
}

#[test]
fn a_crash_in_ahead_loses_no_mark() {
    for protocol_max in [101, 124] {
        for seed in 300..310 {
            let mut w = ahead(seed, protocol_max);
            w.nodes[0].data.flush();
            w.crash(0);
            w.stalled = None;
            w.pass(Duration::from_secs(1));
            w.restart(0);
            w.pass_until("the resync", 60, World::in_sync);
            w.pass(Duration::from_secs(3));
            w.check_same_data();
            assert_eq!(w.nodes[0].data.block(9), &[10; 4096], "the writer's data");
        }
    }
}

#[test]
fn a_resync_that_is_congested_itself_ends_all_the_same() {
    for protocol_max in [101, 124] {
        for seed in 400..430 {
            let mut setup = setup(protocol_max, OnCongestion::PullAhead);
            setup.peer.resync_without_replication = false;
            let mut w = ahead_with(seed, setup);
            // Its resync is asked for, but nothing arrives.
            w.stalled = Some(0);
            w.pass_until("a resync", 20, |w| repl(w).0 == ReplState::SyncSource);
            w.stalled = Some(1);
            for n in 0..12u64 {
                w.write(0, (seed % 9 + n) * 8, 4096, n as u8 + 20);
                w.pass(Duration::from_millis(10));
            }
            assert_eq!(repl(&w).0, ReplState::Ahead);
            w.stalled = None;
            w.pass_until("the resync", 60, World::in_sync);
            check_equal(&mut w);
        }
    }
}

#[test]
fn the_policy_disconnect_gives_the_connection_up() {
    let mut w = clean(1, 2, setup(124, OnCongestion::Disconnect));
    w.write(0, 8000, 4096, 99);
    w.pass(Duration::from_secs(1));
    w.stalled = Some(1);
    for n in 0..4 {
        w.write(0, n * 8, 4096, 1);
        w.pass(Duration::from_millis(10));
    }
    let conn = w.nodes[0].resource.state.conn(node_id(1));
    assert_eq!(conn, lockstep_format::wire::ConnState::StandAlone);
    assert_eq!(w.bits(0, 1), 4);
}

#[test]
fn the_policy_block_sends_on() {
    let mut w = clean(2, 2, setup(124, OnCongestion::Block));
    w.write(0, 8000, 4096, 99);
    w.pass(Duration::from_secs(1));
    w.stalled = Some(1);
    for n in 0..20 {
        w.write(0, n * 8, 4096, 1);
    }
    w.run();
    assert_eq!(w.repl(0, 1), ReplState::Established);
    w.stalled = None;
    check_equal(&mut w);
}

#[test]
fn a_policy_with_another_protocol_is_refused() {
    let mut w = clean(3, 2, Setup::default());
    let net = NetOptions {
        on_congestion: OnCongestion::PullAhead,
        ..NetOptions::default()
    };
    let peer = node_id(1);
    let id = w.command(0, Command::NetOptions { peer, net });
    w.run();
    let refusal = w.answers[&id].clone().expect_err("protocol C");
    assert_eq!(refusal.code, ErrorCode::ERR_CONG_NOT_PROTO_A);
}

#[test]
fn no_limit_of_extents_is_no_congestion() {
    for (extents, is_ahead) in [(0, false), (1, true)] {
        let mut setup = setup(124, OnCongestion::PullAhead);
        setup.net.congestion_fill_sectors = 0;
        setup.net.congestion_extents = extents;
        let mut w = clean(7, 2, setup);
        w.write(0, 8000, 4096, 99);
        w.pass(Duration::from_secs(1));
        w.stalled = Some(1);
        for n in 0..4 {
            w.write(0, n * 8, 4096, 1);
            w.pass(Duration::from_millis(10));
        }
        assert_eq!(repl(&w).0 == ReplState::Ahead, is_ahead, "{:#?}", w.log);
    }
}

#[test]
fn nobody_waits_for_a_peer_that_has_fallen_silent() {
    for kernel_rules in [false, true] {
        let mut setup = setup(124, OnCongestion::PullAhead);
        setup.options.kernel_rules = kernel_rules;
        let mut w = clean(5, 2, setup);
        w.write(0, 8000, 4096, 99);
        w.pass(Duration::from_secs(1));
        w.stalled = Some(1);
        w.stalled_acks = true;
        for n in 0..40 {
            let id = w.write(0, n * 8, 4096, 1);
            w.pass(Duration::from_millis(10));
            assert!(
                w.done(0, id),
                "write {n}, kernel {kernel_rules}: {:#?}",
                w.log
            );
        }
        assert_eq!(w.repl(0, 1), ReplState::Ahead);
    }
}
