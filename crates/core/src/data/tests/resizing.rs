//! `resize`: agreement, the new area, the move of internal metadata, and crashes in between.

use super::*;
use crate::command::{Answer, ErrorCode};
use lockstep_format::disk::v09::PeerFlags;

const MIB: u64 = 1 << 20;

fn resize(w: &mut World, node: usize, size_sectors: u64) -> u64 {
    w.command(
        node,
        Command::Resize {
            volume: VOLUME,
            size_sectors,
            assume_clean: false,
            assume_peer_has_space: false,
        },
    )
}

fn size(w: &World, node: usize) -> u64 {
    w.nodes[node].resource.devices[&VOLUME].size_sectors * 512
}

/// The backing disk grows; what is new on it is other rubbish on every node.
fn grow_disk(w: &mut World, node: usize, bytes: u64) {
    let n = &mut w.nodes[node];
    let old = n.data_bytes;
    n.data_bytes = bytes;
    if w.setup.index == MetaIndex::Internal {
        n.meta.resize(bytes as usize, 0xa0 + node as u8);
    }
    for block in (old / 4096..bytes / 4096).step_by(7) {
        n.data.write(Sector(block * 8), &[0xb0 + node as u8; 4096]);
    }
    n.data.flush();
}

fn at(w: &World, node: usize, bytes: u64) -> Option<SuperBlock> {
    let block = &w.nodes[node].meta[bytes as usize - BLOCK_BYTES..bytes as usize];
    SuperBlock::decode(block.try_into().unwrap()).ok()
}

/// What `drbdmeta check-resize` does before an attach: moves metadata that are still where the
/// disk ended before it grew.
fn check_resize(w: &mut World, node: usize) {
    let (now, before) = (w.nodes[node].data_bytes, w.setup.size);
    if w.setup.index != MetaIndex::Internal || now == before || at(w, node, now).is_some() {
        return;
    }
    let mut superblock = at(w, node, before).expect("metadata at the old end or at the new one");
    let old = superblock.layout(Placement::Internal, before).unwrap();
    let new = Layout::new(Placement::Internal, old.geometry(), now).unwrap();
    let shape = old.bitmap_shape(superblock.effective_size.0);
    superblock.set_layout(&new);
    let meta = &mut w.nodes[node].meta;
    let al = old.al_byte() as usize..(old.al_byte() + old.geometry().al.bytes()) as usize;
    let al = meta[al].to_vec();
    let bitmap = old.bitmap_byte() as usize..(old.bitmap_byte() + shape.used_bytes()) as usize;
    let bitmap = meta[bitmap].to_vec();
    let mut block = [0u8; BLOCK_BYTES];
    superblock.encode(&mut block);
    for (at, bytes) in [
        (new.al_byte(), &al[..]),
        (new.bitmap_byte(), &bitmap[..]),
        (new.superblock_byte(), &block[..]),
    ] {
        meta[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }
}

fn setup(index: MetaIndex) -> Setup {
    Setup {
        index,
        ..Setup::default()
    }
}

/// Two nodes in sync with some data, node 0 Primary.
fn pair(seed: u64, index: MetaIndex) -> World {
    let mut w = clean(seed, 2, setup(index));
    for n in 0..20 {
        w.write(0, n * 1000, 4096, 1 + n as u8);
    }
    w.pass(Duration::from_secs(1));
    w
}

fn check_data(w: &mut World, node: usize) {
    for n in 0..20 {
        let seen = w.nodes[node].data.read(Sector(n * 1000), 4096);
        assert!(seen == [1 + n as u8; 4096], "block {n}: {:#?}", w.log);
    }
    // The area that the volume covers, up to the smallest.
    let sectors = size(w, 0).min(size(w, 1)) / 512;
    let (a, b) = (&w.nodes[0].data, &w.nodes[1].data);
    for block in 0..sectors / 8 {
        assert!(
            a.block(block) == b.block(block),
            "block {block}: {:#?}",
            w.log
        );
    }
}

#[test]
fn both_grow_and_only_the_new_area_is_copied() {
    for seed in 0..4 {
        let mut w = pair(seed, MetaIndex::FlexExternal);
        grow_disk(&mut w, 0, SIZE + 4 * MIB);
        grow_disk(&mut w, 1, SIZE + 6 * MIB);
        let id = resize(&mut w, 0, 0);
        w.run();
        assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
        assert_eq!([size(&w, 0), size(&w, 1)], [SIZE + 4 * MIB; 2]);
        w.pass_until("resync of the new area", 30, World::in_sync);
        let copied = w.nodes[0].resource.devices[&VOLUME].peers[&node_id(1)]
            .io
            .resync_total_bits;
        assert_eq!(copied, 4 * MIB / 4096);
        assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0));
        check_data(&mut w, 1);
        let end = (SIZE + 4 * MIB) / 512;
        let last = w.write(0, end - 8, 4096, 77);
        let behind = w.write(0, end, 4096, 78);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, last));
        assert_eq!(w.nodes[0].completed[&behind], Err(RequestError::Invalid));
        assert!(w.nodes[1].data.read(Sector(end - 8), 4096) == [77; 4096]);
        w.check_idle();
    }
}

/// A kernel that is asked for what lies behind its end closes the connection, and it sends the commit of a resize
/// before it follows itself.
#[test]
fn a_kernel_is_not_asked_for_a_new_area_before_it_says_that_it_is_source() {
    for seed in 0..16 {
        let mut setup = setup(MetaIndex::FlexExternal);
        setup.options.kernel_rules = true;
        let mut w = clean(seed, 2, setup);
        grow_disk(&mut w, 0, SIZE + 4 * MIB);
        grow_disk(&mut w, 1, SIZE + 4 * MIB);
        w.sent.clear();
        let id = resize(&mut w, 0, 0);
        w.run();
        assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
        w.pass_until("resync of the new area", 30, World::in_sync);
        let asks = |s: &(usize, usize, &str)| s.0 == 1 && s.2 == "resync request";
        let first = w.sent.iter().position(asks).expect("a request");
        let said = |s: &(usize, usize, &str)| s.0 == 0 && s.2 == "state";
        assert!(w.sent[..first].iter().any(said), "{:?}", w.sent);
        assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0));
        w.check_idle();
    }
}

#[test]
fn assume_clean_copies_nothing() {
    let mut w = pair(5, MetaIndex::Internal);
    grow_disk(&mut w, 0, SIZE + 8 * MIB);
    grow_disk(&mut w, 1, SIZE + 8 * MIB);
    let before = w.packets.get("resync request").copied();
    let id = w.command(
        1,
        Command::Resize {
            volume: VOLUME,
            size_sectors: 0,
            assume_clean: true,
            assume_peer_has_space: false,
        },
    );
    w.pass(Duration::from_secs(3));
    assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
    assert!(size(&w, 0) > SIZE && size(&w, 0) == size(&w, 1));
    assert!(w.in_sync());
    assert_eq!(w.packets.get("resync request").copied(), before);
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0));
}

#[test]
fn internal_metadata_move_to_the_new_end() {
    // With and without an overlap of old and new place.
    for (seed, more) in [(1, 8 * MIB), (2, 8192), (3, 64 << 10), (4, 4096)] {
        let mut w = pair(seed, MetaIndex::Internal);
        let before = size(&w, 0);
        for node in 0..2 {
            grow_disk(&mut w, node, SIZE + more);
        }
        let id = resize(&mut w, 1, 0);
        w.run();
        assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
        w.pass_until("resync of the new area", 30, World::in_sync);
        for node in 0..2 {
            assert_eq!(size(&w, node), before + more);
            let superblock = at(&w, node, SIZE + more).expect("a superblock at the new end");
            assert_eq!(superblock.effective_size.0 * 512, before + more);
            assert!(at(&w, node, SIZE).is_none(), "the old superblock is gone");
        }
        // Written marks and the log are at the new place.
        w.cut_links();
        w.cut = true;
        w.request(0, RequestKind::Write { fua: true }, 800, 4096, 99);
        w.pass(Duration::from_secs(1));
        w.crash(0);
        w.cut = false;
        w.restart(0);
        w.pass_until("both again", 60, World::in_sync);
        assert!(w.nodes[1].data.read(Sector(800), 4096) == [99; 4096]);
        w.pass(Duration::from_secs(1));
        w.check_idle();
    }
}

/// A crash of either node after each of the first steps of a resize.
fn crash_anywhere(index: MetaIndex, more: u64, stride: usize) {
    for victim in 0..2 {
        let mut steps = 0;
        loop {
            let mut w = pair(11 + steps as u64 % 3, index);
            let before = size(&w, 0);
            for node in 0..2 {
                grow_disk(&mut w, node, SIZE + more);
            }
            let id = resize(&mut w, 0, 0);
            let mut ended = false;
            for _ in 0..steps {
                ended |= !w.step();
            }
            let answered = w.answers.contains_key(&id);
            w.crash(victim);
            w.pass(Duration::from_secs(1));
            check_resize(&mut w, victim);
            w.restart(victim);
            w.pass(Duration::from_secs(3));
            if w.nodes[0].resource.state.role != lockstep_format::wire::Role::Primary {
                w.command(0, Command::Primary { force: false });
            }
            w.pass_until("both in sync again", 60, World::in_sync);
            assert_eq!(
                (w.bits(0, 1), w.bits(1, 0)),
                (0, 0),
                "step {steps}: {:#?}",
                w.log
            );
            assert_eq!(size(&w, 0), size(&w, 1), "step {steps}: {:#?}", w.log);
            if answered {
                assert_eq!(size(&w, 0), before + more, "step {steps}: {:#?}", w.log);
            }
            check_data(&mut w, victim);
            // And once more, if it did not come through.
            let id = resize(&mut w, 0, 0);
            w.pass_until("the second resize", 60, |w| {
                w.answers.contains_key(&id) && w.in_sync()
            });
            assert!(w.answers[&id].is_ok(), "step {steps}: {:#?}", w.log);
            assert_eq!(size(&w, 0), before + more, "step {steps}: {:#?}", w.log);
            check_data(&mut w, victim);
            w.pass(Duration::from_secs(1));
            w.check_idle();
            if ended {
                break;
            }
            steps += stride;
        }
    }
}

#[test]
fn a_crash_while_it_grows_loses_nothing() {
    crash_anywhere(MetaIndex::FlexExternal, 256 << 10, 3);
}

#[test]
fn a_crash_while_metadata_move_loses_nothing() {
    crash_anywhere(MetaIndex::Internal, 256 << 10, 3);
}

#[test]
fn a_crash_while_metadata_move_over_themselves_loses_nothing() {
    crash_anywhere(MetaIndex::Internal, 16 << 10, 3);
}

#[test]
fn an_interrupted_move_calls_for_everything() {
    let mut w = pair(4, MetaIndex::Internal);
    for node in 0..2 {
        grow_disk(&mut w, node, SIZE + 8192);
    }
    resize(&mut w, 1, 0);
    let stamped = |w: &World| {
        at(w, 1, SIZE + 8192).is_some_and(|s| {
            (0..32).all(|n| s.peer(NodeId(n)).flags.contains(PeerFlags::FULL_SYNC))
        })
    };
    while !stamped(&w) {
        assert!(w.step(), "{:#?}", w.log);
    }
    w.crash(1);
    w.pass(Duration::from_secs(1));
    w.restart(1);
    w.pass_until("full sync", 60, World::in_sync);
    assert!(
        w.nodes[1].resource.devices[&VOLUME]
            .attached()
            .is_some_and(|d| {
                !d.generations
                    .slot(node_id(0))
                    .flags
                    .contains(PeerFlags::FULL_SYNC)
            })
    );
    check_data(&mut w, 1);
}

#[test]
fn writes_go_on_while_it_grows() {
    for seed in 0..6 {
        let index = if seed % 2 == 0 {
            MetaIndex::Internal
        } else {
            MetaIndex::FlexExternal
        };
        let mut w = pair(seed, index);
        for node in 0..2 {
            grow_disk(&mut w, node, SIZE + 8 * MIB);
        }
        let id = resize(&mut w, seed as usize % 2, 0);
        let mut ids = Vec::new();
        for n in 0..60 {
            for _ in 0..5 {
                w.step();
            }
            let limit = size(&w, 0) / 512 / 8;
            let block = limit - 1 - n * 31 % limit;
            ids.push((
                block,
                n as u8 + 100,
                w.write(0, block * 8, 4096, n as u8 + 100),
            ));
        }
        w.pass_until("resize under load", 60, |w| {
            w.answers.contains_key(&id) && w.in_sync()
        });
        assert_eq!(w.answers[&id], Ok(Answer::Done));
        for (_, _, id) in &ids {
            assert!(w.done(0, *id), "{:#?}", w.log);
        }
        let sectors = size(&w, 0) / 512;
        for block in 0..sectors / 8 {
            let (a, b) = (&w.nodes[0].data, &w.nodes[1].data);
            assert!(a.block(block) == b.block(block), "block {block}");
        }
        w.pass(Duration::from_secs(1));
        w.check_idle();
    }
}

#[test]
fn the_smallest_disk_and_the_wanted_size_set_the_limit() {
    let mut w = pair(6, MetaIndex::FlexExternal);
    grow_disk(&mut w, 0, SIZE + 4 * MIB);
    // The peer has no more room: nothing changes.
    let id = resize(&mut w, 0, 0);
    w.pass(Duration::from_secs(1));
    assert!(w.answers.contains_key(&id), "{:#?}", w.log);
    assert_eq!(w.answers[&id], Ok(Answer::NothingToDo));
    // More than this node has is refused.
    let id = resize(&mut w, 0, (SIZE + 5 * MIB) / 512);
    w.run();
    let error = w.answers[&id].clone().unwrap_err();
    assert_eq!(error.code, ErrorCode::ERR_DISK_TOO_SMALL);
    grow_disk(&mut w, 1, SIZE + 2 * MIB);
    let id = resize(&mut w, 1, (SIZE + MIB) / 512);
    w.pass_until("resync", 30, |w| w.answers.contains_key(&id) && w.in_sync());
    assert_eq!(w.answers[&id], Ok(Answer::Done));
    assert_eq!([size(&w, 0), size(&w, 1)], [SIZE + MIB; 2]);
    // Only what was named explicitly shrinks, and grown again it is copied again.
    let id = resize(&mut w, 0, 8 * MIB / 512);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
    assert_eq!([size(&w, 0), size(&w, 1)], [8 * MIB; 2]);
    let behind = w.write(0, 8 * MIB / 512, 4096, 78);
    w.run();
    assert_eq!(w.nodes[0].completed[&behind], Err(RequestError::Invalid));
    let id = resize(&mut w, 0, 0);
    w.pass_until("resync", 30, |w| w.answers.contains_key(&id) && w.in_sync());
    assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
    assert_eq!([size(&w, 0), size(&w, 1)], [SIZE + 2 * MIB; 2]);
    w.check_idle();
}

#[test]
fn an_absent_node_keeps_the_size_unless_told_otherwise() {
    let mut w = pair(7, MetaIndex::Internal);
    let before = size(&w, 0);
    w.crash(1);
    w.pass(Duration::from_secs(1));
    grow_disk(&mut w, 0, SIZE + 4 * MIB);
    let id = resize(&mut w, 0, 0);
    w.run();
    assert_eq!(w.answers[&id], Ok(Answer::NothingToDo), "{:#?}", w.log);
    assert_eq!(size(&w, 0), before);
    let id = w.command(
        0,
        Command::Resize {
            volume: VOLUME,
            size_sectors: 0,
            assume_clean: false,
            assume_peer_has_space: true,
        },
    );
    w.run();
    assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
    assert_eq!(size(&w, 0), before + 4 * MIB);
    w.write(0, before / 512 + 64, 4096, 55);
    w.pass(Duration::from_secs(1));
    grow_disk(&mut w, 1, SIZE + 4 * MIB);
    check_resize(&mut w, 1);
    w.restart(1);
    w.pass_until("the absent node follows", 60, World::in_sync);
    assert_eq!(size(&w, 1), before + 4 * MIB);
    check_data(&mut w, 1);
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0));
}

#[test]
fn it_is_refused_while_data_are_copied_and_without_a_disk() {
    let mut w = World::new(8, 2, Setup::default());
    w.pass(Duration::from_secs(3));
    w.command(0, Command::Primary { force: true });
    while w.repl(0, 1) != ReplState::SyncSource {
        w.pass(Duration::from_millis(10));
    }
    grow_disk(&mut w, 0, SIZE + MIB);
    let id = resize(&mut w, 0, 0);
    let error = w.answers[&id].clone().unwrap_err();
    assert_eq!(error.code, ErrorCode::ERR_RESIZE_RESYNC);
    let mut w = clean(
        9,
        3,
        Setup {
            diskless: Some(2),
            ..Setup::default()
        },
    );
    let id = resize(&mut w, 2, 0);
    assert_eq!(
        w.answers[&id].clone().unwrap_err().code,
        ErrorCode::ERR_NO_DISK
    );
    // The node without a disk follows.
    for node in 0..2 {
        grow_disk(&mut w, node, SIZE + MIB);
    }
    let id = resize(&mut w, 1, 0);
    w.pass_until("resync", 30, |w| w.answers.contains_key(&id) && w.in_sync());
    assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
    assert_eq!([size(&w, 0), size(&w, 1), size(&w, 2)], [SIZE + MIB; 3]);
}

#[test]
fn three_nodes_grow_together() {
    for seed in (0..30).chain([58, 64]) {
        let mut w = clean(20 + seed, 3, setup(MetaIndex::Internal));
        let before = size(&w, 0);
        for node in 0..3 {
            grow_disk(&mut w, node, SIZE + 2 * MIB);
        }
        let id = resize(&mut w, seed as usize % 3, 0);
        w.pass_until("resync", 30, |w| w.answers.contains_key(&id) && w.in_sync());
        assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
        assert_eq!([0, 1, 2].map(|n| size(&w, n)), [before + 2 * MIB; 3]);
        w.pass(Duration::from_secs(3));
        for a in 0..3 {
            for b in (0..3).filter(|b| *b != a) {
                assert_eq!(w.bits(a, b), 0, "{a} {b}: {:#?}", w.log);
            }
        }
        check_data_equal(&w);
    }
}

fn check_data_equal(w: &World) {
    for block in 0..size(w, 0) / 4096 {
        for node in 1..w.nodes.len() {
            let (a, b) = (&w.nodes[0].data, &w.nodes[node].data);
            assert!(a.block(block) == b.block(block), "block {block} of {node}");
        }
    }
}

#[test]
fn an_84_pair_follows_sizes() {
    for (seed, node) in [(1, 0), (2, 1), (3, 0), (4, 1)] {
        let mut setup = setup(MetaIndex::Internal);
        setup.options.protocol_max = 101;
        let mut w = clean(seed, 2, setup);
        let before = size(&w, 0);
        for n in 0..2 {
            grow_disk(&mut w, n, SIZE + 4 * MIB);
        }
        // To a size, then as far as it goes; the Primary is the source.
        for wanted in [before + MIB, 0] {
            let sectors = if wanted == 0 { 0 } else { wanted / 512 };
            let id = resize(&mut w, node, sectors);
            w.pass(Duration::from_secs(5));
            let expected = if wanted == 0 {
                before + 4 * MIB
            } else {
                wanted
            };
            w.pass_until("resync", 30, |w| {
                w.answers.contains_key(&id) && w.in_sync() && size(w, 1 - node) == expected
            });
            assert_eq!(w.answers[&id], Ok(Answer::Done), "{:#?}", w.log);
            assert_eq!(size(&w, node), expected, "{:#?}", w.log);
            assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0), "{:#?}", w.log);
            check_data_equal(&w);
        }
        w.check_idle();
    }
}

/// The nodes meet again.
fn reconnect(w: &mut World) {
    w.cut = false;
    w.pass_until("both in sync again", 60, |w| w.in_sync() && !w.cut);
    w.pass(Duration::from_secs(3));
}

#[test]
fn disks_that_have_grown_are_seen_at_a_connect() {
    for (seed, index) in [
        (1, MetaIndex::Internal),
        (2, MetaIndex::FlexExternal),
        (3, MetaIndex::Internal),
        (4, MetaIndex::FlexExternal),
        (5, MetaIndex::Internal),
        (6, MetaIndex::FlexExternal),
    ] {
        for first in [4, 6] {
            let mut w = pair(seed, index);
            let before = size(&w, 0);
            w.cut_links();
            w.cut = true;
            w.pass(Duration::from_secs(1));
            grow_disk(&mut w, 0, SIZE + first * MIB);
            grow_disk(&mut w, 1, SIZE + 5 * MIB);
            reconnect(&mut w);
            let expected = before + first.min(5) * MIB;
            let anew = w.log.iter().filter(|line| line.contains("connecting anew"));
            assert_eq!(anew.count(), 0, "{:#?}", w.log);
            assert_eq!([size(&w, 0), size(&w, 1)], [expected; 2], "{:#?}", w.log);
            assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0), "{:#?}", w.log);
            check_data(&mut w, 1);
            w.check_idle();
        }
    }
}

#[test]
fn a_handshake_waits_for_the_look_at_the_disks_but_not_for_ever() {
    for (seed, answered) in [(7, true), (8, false)] {
        let mut w = pair(seed, MetaIndex::FlexExternal);
        let before = size(&w, 0);
        w.cut_links();
        w.cut = true;
        w.pass(Duration::from_secs(1));
        grow_disk(&mut w, 0, SIZE + 4 * MIB);
        grow_disk(&mut w, 1, SIZE + 4 * MIB);
        w.hold_looks = true;
        w.cut = false;
        w.pass_until("a look on each node", 60, |w| w.held_looks.len() >= 2);
        w.pass(Duration::from_millis(300));
        let connected = |w: &World| w.repl(0, 1) >= ReplState::Established;
        assert!(!connected(&w), "{:#?}", w.log);
        if answered {
            w.hold_looks = false;
            let looks = core::mem::take(&mut w.held_looks);
            w.todo.extend(looks);
            w.pass_until("both in sync again", 60, World::in_sync);
            w.pass(Duration::from_secs(3));
            let anew = w.log.iter().filter(|line| line.contains("connecting anew"));
            assert_eq!(anew.count(), 0, "{:#?}", w.log);
            assert_eq!([size(&w, 0), size(&w, 1)], [before + 4 * MIB; 2]);
            w.check_idle();
        } else {
            w.pass_until("a connection without an answer", 5, |w| connected(w));
        }
    }
}

#[test]
fn one_disk_that_has_grown_changes_nothing_at_a_connect() {
    let mut w = pair(5, MetaIndex::Internal);
    let before = size(&w, 0);
    w.cut_links();
    w.cut = true;
    w.pass(Duration::from_secs(1));
    grow_disk(&mut w, 0, SIZE + 4 * MIB);
    reconnect(&mut w);
    assert_eq!([size(&w, 0), size(&w, 1)], [before; 2], "{:#?}", w.log);
    assert!(
        at(&w, 0, SIZE + 4 * MIB).is_some(),
        "the metadata follow the disk"
    );
    check_data(&mut w, 1);
    w.check_idle();
}
