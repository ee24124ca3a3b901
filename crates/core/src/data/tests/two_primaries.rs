//! Two Primaries: who may become one, and whose write wins (semantics.md, 7.1; wire.md, 6.12).

use lockstep_format::wire::Features;

use super::*;
use crate::command::ErrorCode;
use crate::options::{AfterSplitBrain, Fencing};
use crate::state::{ConnState, Role};

const BOTH_DIALECTS: [u32; 2] = [101, 124];

fn setup(protocol_max: u32) -> Setup {
    let mut setup = Setup::default();
    setup.options.protocol_max = protocol_max;
    setup.net.allow_two_primaries = true;
    setup
}

/// Two nodes in sync, both Primary.
fn pair(seed: u64, setup: Setup) -> World {
    pair_of(seed, 2, setup)
}

/// The first two of them Primary.
fn pair_of(seed: u64, count: usize, setup: Setup) -> World {
    let mut w = clean(seed, count, setup);
    let id = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
    w
}

fn role(w: &World, index: usize) -> Role {
    w.nodes[index].resource.state.role
}

fn conn(w: &World, index: usize) -> ConnState {
    w.nodes[index].resource.state.conn(node_id(1 - index))
}

fn code(w: &World, id: u64) -> Option<ErrorCode> {
    w.answers[&id].as_ref().err().map(|e| e.code)
}

fn logged(w: &World, words: &str) -> bool {
    w.log.iter().any(|text| text.contains(words))
}

#[test]
fn a_second_primary_needs_the_option_and_one_of_both_may_go() {
    for protocol_max in BOTH_DIALECTS {
        let mut refused = setup(protocol_max);
        refused.net.allow_two_primaries = false;
        let mut w = clean(1, 2, refused);
        let id = w.command(1, Command::Primary { force: false });
        w.pass(Duration::from_secs(3));
        assert!(code(&w, id).is_some(), "{protocol_max}");
        assert_eq!(role(&w, 1), Role::Secondary);

        let mut w = pair(1, setup(protocol_max));
        assert_eq!((role(&w, 0), role(&w, 1)), (Role::Primary, Role::Primary));
        let ids: Vec<u64> = (0..40)
            .map(|n| w.write((n % 2) as usize, n * 16, 4096, n as u8 + 1))
            .collect();
        w.pass(Duration::from_secs(2));
        assert!((0..40).all(|n| w.done(n % 2, ids[n])), "{:#?}", w.log);
        w.check_same_data();
        w.check_idle();
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        assert_eq!((role(&w, 0), role(&w, 1)), (Role::Secondary, Role::Primary));
        let id = w.write(1, 0, 8192, 99);
        w.pass(Duration::from_secs(2));
        assert!(w.done(1, id) && w.in_sync());
        w.check_same_data();
        w.check_idle();
    }
}

#[test]
fn the_option_goes_with_protocol_c_and_stays_while_both_are_primary() {
    let mut w = pair(2, setup(124));
    let peer = node_id(1);
    let mut net = w.setup.net.clone();
    net.protocol = Protocol::B;
    let id = w.command(0, Command::NetOptions { peer, net });
    w.run();
    assert_eq!(code(&w, id), Some(ErrorCode::ERR_NOT_PROTO_C));
    let mut net = w.setup.net.clone();
    net.allow_two_primaries = false;
    let off = Command::NetOptions { peer, net };
    let id = w.command(0, off.clone());
    w.run();
    assert_eq!(code(&w, id), Some(ErrorCode::ERR_NEED_ALLOW_TWO_PRI));
    w.command(1, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    let id = w.command(0, off);
    w.pass(Duration::from_secs(1));
    assert_eq!(code(&w, id), None);
    let id = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(3));
    assert!(code(&w, id).is_some(), "the peer has adopted it");
}

/// What two Primaries need beside a third disk.
fn fenced() -> Setup {
    let mut setup = setup(124);
    setup.net.fencing = Fencing::ResourceAndStonith;
    setup.options.handlers = vec!["fence-peer".into()];
    setup
}

fn suspended(w: &World, index: usize) -> bool {
    !w.nodes[index].resource.snapshot().suspended.is_empty()
}

/// Ends a call of `fence-peer`: the peer was shot.
fn shot(w: &mut World, index: usize) {
    let call = w.handlers.iter().position(|(node, ..)| *node == index);
    let (.., tag) = w.handlers.remove(call.expect("the node calls fence-peer"));
    w.input(index, Input::HandlerDone { tag, exit_code: 7 });
    w.run();
}

#[test]
fn beside_a_third_disk_two_primaries_at_once_need_fencing_and_its_handler() {
    let mut no_handler = fenced();
    no_handler.options.handlers.clear();
    for refused in [setup(124), no_handler] {
        let mut w = clean(3, 3, refused);
        let id = w.command(1, Command::Primary { force: false });
        w.pass(Duration::from_secs(3));
        assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)));
        assert_eq!(role(&w, 1), Role::Secondary);
        assert!(w.nodes[1].resource.snapshot().stands_by);
    }
}

#[test]
fn a_third_disk_gets_the_writes_of_two_primaries_and_a_third_primary_is_refused() {
    for seed in 1..9 {
        let mut w = pair_of(seed, 3, fenced());
        let third = w.command(2, Command::Primary { force: false });
        let ids: Vec<u64> = (0..40)
            .map(|n| w.write((n % 2) as usize, n * 16, 4096, n as u8 + 1))
            .collect();
        w.pass(Duration::from_secs(5));
        assert_eq!(code(&w, third), Some(ErrorCode::TWO_PRIMARIES));
        assert!((0..40).all(|n| w.done(n % 2, ids[n])), "{:#?}", w.log);
        w.check_same_data();
        w.check_idle();
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        let roles = (role(&w, 0), role(&w, 1), role(&w, 2));
        assert_eq!(roles, (Role::Secondary, Role::Primary, Role::Secondary));
    }
}

/// The third node has more of the dead Primary's writes than the living one, which stays the source.
#[test]
fn when_one_of_two_primaries_dies_the_third_disk_follows_the_other_one() {
    for seed in 1..25 {
        let mut w = pair_of(seed, 3, fenced());
        w.write(1, 0, 4096, 1);
        w.pass(Duration::from_secs(1));
        w.handlers.clear();
        let lost: Vec<u64> = (0..20).map(|n| w.write(1, n * 16, 8192, 50)).collect();
        for _ in 0..w.random(60) {
            w.step();
        }
        w.crash(1);
        let goes_on: Vec<u64> = (0..20)
            .map(|n| w.write(0, 4096 + n * 16, 4096, 60 + n as u8))
            .collect();
        w.pass(Duration::from_secs(12));
        assert!(suspended(&w, 0), "seed {seed}: {:#?}", w.log);
        shot(&mut w, 0);
        w.pass(Duration::from_secs(5));
        assert!(
            goes_on.iter().all(|id| w.done(0, *id)),
            "seed {seed}: {:#?}",
            w.log
        );
        assert!(!lost.is_empty() && !suspended(&w, 0));
        w.restart(1);
        w.pass_until("all three", 60, World::in_sync);
        w.check_same_data();
        let id = w.command(1, Command::Primary { force: false });
        w.pass(Duration::from_secs(2));
        assert_eq!(code(&w, id), None, "seed {seed}: {:#?}", w.log);
    }
}

/// Both freeze, although each of them sees the third disk.
#[test]
fn two_primaries_that_lose_each_other_beside_a_third_disk_complete_nothing() {
    for seed in 1..9 {
        let mut w = pair_of(seed, 3, fenced());
        w.write(0, 0, 4096, 1);
        w.pass(Duration::from_secs(1));
        w.handlers.clear();
        w.cut_links_between(0, 1);
        let ids = [w.write(0, 8, 4096, 2), w.write(1, 4096, 4096, 3)];
        w.step();
        assert!((0..2).all(|node| !w.done(node, ids[node])), "{:#?}", w.log);
        w.pass_until("the connection", 60, World::in_sync);
        w.pass(Duration::from_secs(2));
        assert!((0..2).all(|node| w.done(node, ids[node])), "{:#?}", w.log);
        w.check_same_data();
    }
}

/// It was no peer when both were promoted.
#[test]
fn a_third_disk_does_not_connect_to_two_primaries_without_fencing() {
    let mut w = clean(3, 3, setup(124));
    w.crash(2);
    w.pass(Duration::from_secs(12));
    let peer = node_id(2);
    for node in 0..2 {
        w.command(node, Command::Disconnect { peer, force: false });
        w.pass(Duration::from_secs(1));
        w.command(node, Command::DelPeer { peer });
        w.pass(Duration::from_secs(1));
    }
    let id = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
    w.restart(2);
    for node in 0..2 {
        let net = w.setup.net.clone();
        w.command(node, Command::NewPeer { peer, net });
        let connect = Command::Connect {
            peer,
            discard_my_data: false,
            tentative: false,
        };
        w.command(node, connect);
    }
    w.pass(Duration::from_secs(20));
    let state = |w: &World, node: usize| w.nodes[node].resource.state.conn(peer);
    assert_ne!(state(&w, 0), ConnState::Connected, "{:#?}", w.log);
    assert_ne!(state(&w, 1), ConnState::Connected, "{:#?}", w.log);
    assert!(logged(&w, "may have a disk as well"), "{:#?}", w.log);
    assert_eq!((role(&w, 0), role(&w, 1)), (Role::Primary, Role::Primary));
    assert_eq!(conn(&w, 0), ConnState::Connected);
}

/// Two Primaries and a client beside them.
fn beside_a_client(seed: u64) -> World {
    pair_of(
        seed,
        3,
        Setup {
            diskless: Some(2),
            client: true,
            ..setup(124)
        },
    )
}

#[test]
fn a_client_beside_two_primaries_comes_and_goes_and_is_no_third_one() {
    for seed in 1..9 {
        let mut w = beside_a_client(seed);
        let id = w.command(2, Command::Primary { force: false });
        w.pass(Duration::from_secs(3));
        assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)));
        assert_eq!(role(&w, 2), Role::Secondary);
        w.crash(2);
        let ids: Vec<u64> = (0..40)
            .map(|n| w.write((n % 2) as usize, n * 16, 4096, n as u8 + 1))
            .collect();
        w.pass(Duration::from_secs(12));
        assert!((0..40).all(|n| w.done(n % 2, ids[n])), "{:#?}", w.log);
        w.restart(2);
        w.pass_until("the client", 60, World::in_sync);
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        assert_eq!((role(&w, 0), role(&w, 1)), (Role::Secondary, Role::Primary));
        w.check_same_data();
        w.check_idle();
    }
}

/// Each asks for Primaries beyond the client, and finds the other one, which is not behind.
#[test]
fn a_client_between_two_parted_primaries_makes_neither_outdated() {
    for seed in 1..9 {
        let mut w = beside_a_client(seed);
        w.write(0, 0, 4096, 1);
        w.pass(Duration::from_secs(1));
        w.cut_links_between(0, 1);
        w.pass(Duration::from_millis(60));
        let outdated = |w: &World, node: usize| {
            let device = &w.nodes[node].resource.state.devices[&VOLUME];
            device.peers[&node_id(1 - node)].disk == DiskState::Outdated
        };
        assert!(!outdated(&w, 0) && !outdated(&w, 1), "{:#?}", w.log);
        w.pass_until("the connection", 60, World::in_sync);
        w.check_same_data();
    }
}

#[test]
fn overlapping_writes_of_8_4_nodes_end_equal() {
    for seed in 1..25 {
        let mut w = pair(seed, setup(101));
        let mut ids = Vec::new();
        for n in 0..60u64 {
            let node = w.random(2);
            let (sector, len) = (w.random(4) as u64 * 8, 4096 * (1 + w.random(4) as u32));
            let kind = match w.random(8) {
                0 => RequestKind::Zeroes { unmap: false },
                1 => RequestKind::Discard,
                _ => RequestKind::Write { fua: false },
            };
            ids.push((node, w.request(node, kind, sector, len, n as u8 + 1)));
            if w.random(3) == 0 {
                w.step();
            }
        }
        w.pass(Duration::from_secs(5));
        for (node, id) in ids {
            assert!(w.done(node, id), "seed {seed}: {:#?}", w.log);
        }
        assert!(w.in_sync(), "seed {seed}: {:#?}", w.log);
        assert!(!logged(&w, "was lost"), "seed {seed}: {:#?}", w.log);
        w.check_same_data();
        w.check_idle();
    }
}

/// What the peer of a sender knows of the epochs, by what came over the wire.
#[derive(Debug, Default)]
pub(super) struct KernelEpochs {
    open: usize,
    writes: BTreeMap<u64, usize>,
    ended: BTreeMap<u32, usize>,
    /// Something in them was refused.
    refused: Vec<usize>,
}

impl World {
    /// Makes a packet what a kernel 8.4 sends. It never acks an epoch in which it has refused a write
    /// (wire.md, 6.12): says whether the packet is sent.
    pub(super) fn as_kernels(&mut self, index: usize, packet: &mut Packet) -> bool {
        let [own, theirs] = match index {
            0 => [0, 1],
            _ => [1, 0],
        };
        match packet {
            Packet::ConnectionFeatures(f) => f.features.remove(Features::LOCKSTEP),
            Packet::Data(d) => {
                let sent = &mut self.kernel_epochs[own];
                sent.writes.insert(d.block_id.0, sent.open);
            }
            Packet::Barrier(b) => {
                let sent = &mut self.kernel_epochs[own];
                sent.ended.insert(b.barrier, sent.open);
                sent.open += 1;
            }
            Packet::Superseded(a) | Packet::RetryWrite(a) => {
                let received = &mut self.kernel_epochs[theirs];
                let epoch = received.writes[&a.block_id.0];
                received.refused.push(epoch);
            }
            Packet::BarrierAck(b) => {
                let received = &self.kernel_epochs[theirs];
                return !received.refused.contains(&received.ended[&b.barrier]);
            }
            _ => {}
        }
        true
    }
}

#[test]
fn a_kernel_that_never_acks_an_epoch_of_which_it_refused_a_part_stays_connected() {
    let mut refused = 0;
    for seed in 1..60 {
        let mut w = pair(
            seed,
            Setup {
                kernels: true,
                ..setup(101)
            },
        );
        let mut ids = Vec::new();
        for n in 0..60u64 {
            let node = w.random(2);
            let sector = w.random(4) as u64 * 8;
            ids.push((node, w.write(node, sector, 4096, n as u8 + 1)));
            // Epochs of one write and of several.
            if w.random(3) == 0 {
                for _ in 0..w.random(12) {
                    w.step();
                }
            }
        }
        w.pass(Duration::from_secs(2));
        for (node, id) in ids {
            assert!(w.done(node, id), "seed {seed}: {:#?}", w.log);
        }
        assert!(!logged(&w, "barrier ack"), "seed {seed}: {:#?}", w.log);
        assert_eq!(conn(&w, 0), ConnState::Connected, "seed {seed}");
        // What comes after it is acked again, so that a flush ends.
        let after = [w.write(0, 4000, 4096, 1), w.write(1, 5000, 4096, 1)];
        w.pass(Duration::from_secs(2));
        let flushes = [0, 1].map(|n| w.request(n, RequestKind::Flush, 0, 0, 0));
        w.pass(Duration::from_secs(5));
        for n in 0..2 {
            assert!(w.done(n, after[n]) && w.done(n, flushes[n]), "seed {seed}");
        }
        refused += w
            .kernel_epochs
            .iter()
            .map(|e| e.refused.len())
            .sum::<usize>();
        w.check_same_data();
    }
    assert!(refused > 200, "{refused} writes refused");
}

#[test]
fn overlapping_writes_of_9_end_the_connection() {
    let mut w = pair(4, setup(124));
    // The first writes of both wait for a new generation.
    w.write(0, 800, 4096, 1);
    w.write(1, 1600, 4096, 1);
    w.pass(Duration::from_secs(1));
    w.write(0, 8, 4096, 1);
    w.write(1, 8, 4096, 2);
    w.run();
    assert!(logged(&w, "concurrent writes detected"), "{:#?}", w.log);
}

#[test]
fn a_write_after_the_end_of_the_peers_one_is_no_conflict() {
    for protocol_max in BOTH_DIALECTS {
        let mut w = pair(5, setup(protocol_max));
        for n in 0..30 {
            let node = (n % 2) as usize;
            let id = w.write(node, 8, 8192, n as u8 + 1);
            w.run();
            assert!(w.done(node, id), "{:#?}", w.log);
            assert_eq!(w.read(1 - node, 8, 8192), vec![n as u8 + 1; 8192]);
        }
        assert!(w.in_sync());
        w.pass(Duration::from_secs(2));
        w.check_same_data();
        w.check_idle();
    }
}

#[test]
fn full_activity_logs_of_two_primaries_do_not_wait_for_each_other() {
    for protocol_max in BOTH_DIALECTS {
        for seed in 1..4 {
            let mut setup = setup(protocol_max);
            setup.size = 2400 << 20;
            let mut w = pair(seed, setup);
            let ids: Vec<(usize, u64)> = (0..560)
                .map(|n| {
                    let node = (n % 2) as usize;
                    (node, w.write(node, n * 8192 + 8184, 8192, 7))
                })
                .collect();
            w.pass(Duration::from_secs(3));
            let open = ids.iter().filter(|(n, id)| !w.done(*n, *id)).count();
            assert_eq!(open, 0, "{:#?}", w.log);
            w.check_same_data();
            w.check_idle();
        }
    }
}

#[test]
fn a_split_brain_of_two_primaries_follows_after_sb_2pri() {
    for protocol_max in BOTH_DIALECTS {
        for policy in [AfterSplitBrain::Disconnect, AfterSplitBrain::ViolentlyAs0p] {
            let mut setup = setup(protocol_max);
            setup.net.after_sb_0pri = AfterSplitBrain::DiscardLeastChanges;
            setup.net.after_sb_2pri = policy;
            setup.net.rr_conflict = AfterSplitBrain::ViolentlyAs0p;
            let mut w = pair(6, setup);
            w.write(0, 0, 4096, 1);
            w.pass(Duration::from_secs(1));
            w.cut = true;
            w.cut_links();
            w.pass(Duration::from_secs(12));
            let ids = [
                (0, w.write(0, 0, 4096, 2)),
                (1, w.write(1, 800, 4096, 3)),
                (1, w.write(1, 900, 4096, 3)),
            ];
            w.pass(Duration::from_secs(2));
            assert!(ids.iter().all(|(n, id)| w.done(*n, *id)), "{:#?}", w.log);
            w.cut = false;
            w.pass(Duration::from_secs(30));
            let apart = (conn(&w, 0), conn(&w, 1));
            if policy == AfterSplitBrain::Disconnect {
                let alone = (ConnState::StandAlone, ConnState::StandAlone);
                assert_eq!(apart, alone, "{protocol_max} {:#?}", w.log);
                continue;
            }
            assert!(w.in_sync(), "{protocol_max} {apart:?} {:#?}", w.log);
            // Node 0 has changed less.
            assert_eq!(w.read(0, 0, 4096), vec![1; 4096]);
            assert_eq!(w.read(0, 800, 4096), vec![3; 4096]);
            w.check_same_data();
        }
    }
}

/// Its own epochs say nothing of what the other one wrote, which may be in that one's cache only.
#[test]
fn a_flush_makes_the_other_primary_flush() {
    let mut w = pair(3, setup(124));
    let written = w.write(0, 0, 4096, 7);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, written));
    assert!(!w.nodes[0].data.dirty.is_empty());
    let flush = w.request(1, RequestKind::Flush, 0, 0, 0);
    w.pass(Duration::from_secs(1));
    assert!(w.done(1, flush), "{:#?}", w.log);
    assert!(w.nodes[0].data.dirty.is_empty());
    w.check_idle();
}
