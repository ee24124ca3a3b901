//! Words about blocks that have been written since: they clear no mark (semantics.md, 18.3 and 19.7).

use lockstep_format::units::NodeMask;
use lockstep_format::wire::packet::PeersInSync;

use super::*;

/// Time passes, and no flush of node 2's disk ends.
fn pass_without_flush(w: &mut World, millis: u64) {
    let is_flush = |todo: &Todo| matches!(todo, Todo::Disk(_, _, DiskOp::Flush, _));
    w.hanging.node = Some(2);
    for _ in 0..=millis / 10 {
        w.pass(Duration::from_millis(10));
        loop {
            let held = core::mem::take(&mut w.hanging.held);
            let (held, others): (Vec<Todo>, Vec<Todo>) = held.into_iter().partition(is_flush);
            w.hanging.held = held;
            let idle = others.is_empty();
            w.todo.extend(others);
            w.run();
            if idle {
                break;
            }
        }
    }
}

/// The flush of node 2 that runs ends, and what follows of it happens; the next one waits.
#[track_caller]
fn end_flush(w: &mut World) {
    let held = core::mem::take(&mut w.hanging.held);
    assert_eq!(held.len(), 1, "one flush runs at a time");
    w.todo.extend(held);
    pass_without_flush(w, 0);
}

fn is_marked(w: &World, index: usize, peer: usize, block: u64) -> bool {
    let disk = w.nodes[index].resource.devices[&VOLUME].attached().unwrap();
    let slot = disk.io.slot(node_id(peer)).unwrap();
    disk.io.bitmap.next_set(slot, block) == Some(block)
}

/// Node 2 has got a block of node 1 and not flushed it, when the Primary loses node 1 and writes the block on nodes 0
/// and 2. The flush for that write ends first: the copy below it says nothing of node 1 any more.
#[test]
fn a_write_that_the_source_lacks_stays_marked_when_the_copy_below_it_is_flushed() {
    let mut setup = Setup::default();
    // The target gets the write itself.
    setup.peer.resync_without_replication = false;
    for seed in 0..4 {
        let mut w = clean(seed, 3, setup.clone());
        w.write(0, 8, 4096, 3);
        w.pass(Duration::from_secs(1));
        w.hanging.node = Some(2);
        let command = Command::Invalidate {
            volume: VOLUME,
            from: Some(node_id(1)),
            reset_bitmap: true,
        };
        w.command(2, command);
        pass_without_flush(&mut w, 0);
        end_flush(&mut w);
        // The last block that came is not part of the flush that runs.
        let block = *w.nodes[2].data.now.keys().next_back().unwrap();
        w.apart = vec![(0, 1)];
        w.cut_links_between(0, 1);
        pass_without_flush(&mut w, 200);
        let id = w.write(0, block * 8, 4096, 7);
        pass_without_flush(&mut w, 10);
        assert!(w.done(0, id), "{:#?}", w.log);
        end_flush(&mut w);
        end_flush(&mut w);
        pass_without_flush(&mut w, 500);
        assert!(is_marked(&w, 0, 1, block), "the write is settled");
        assert!(is_marked(&w, 2, 1, block));
        end_flush(&mut w);
        assert!(is_marked(&w, 2, 1, block), "seed {seed}: {:#?}", w.log);
        w.hanging.node = None;
        let held = core::mem::take(&mut w.hanging.held);
        w.todo.extend(held);
        w.pass(Duration::from_secs(5));
        w.apart.clear();
        w.pass_until("all are in sync", 60, World::in_sync);
        w.pass(Duration::from_secs(2));
        w.check_same_data();
    }
}

/// Node 1 said that node 3 was in sync with it when it was. Before that word comes to node 2, node 3 is away and a
/// write is made without it.
#[test]
fn an_old_word_that_nodes_are_in_sync_clears_no_mark_of_a_later_write() {
    let mut w = clean(3, 4, Setup::default());
    w.write(0, 8, 4096, 3);
    w.pass(Duration::from_secs(1));
    w.apart = vec![(0, 3), (1, 3), (2, 3)];
    w.cut_links_where(|a, b| a == 3 || b == 3);
    w.pass(Duration::from_secs(1));
    let id = w.write(0, 0, 4096, 7);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id) && is_marked(&w, 2, 3, 0));
    let between = |ends: &(usize, usize)| *ends == (1, 2);
    let link = *w.links.iter().find(|(_, ends)| between(ends)).unwrap().0;
    let word = PeersInSync {
        sector: Sector(0),
        mask: NodeMask::of(node_id(1)).with(node_id(3)),
        size_bytes: 4 << 20,
    };
    let packet = Input::Packet {
        peer: node_id(1),
        link: LinkId(link),
        stream: Stream::Control,
        volume: VOLUME,
        packet: Packet::PeersInSync(word),
        payload: None,
    };
    w.input(2, packet);
    assert!(is_marked(&w, 2, 3, 0));
    w.pass(Duration::from_secs(5));
    assert!(is_marked(&w, 2, 3, 0));
    w.apart.clear();
    w.pass_until("all are in sync", 60, World::in_sync);
    w.pass(Duration::from_secs(5));
    w.check_same_data();
    assert_eq!(w.bits(2, 3), 0, "{:#?}", w.log);
}

/// Nodes 0 and 1 lose their power, node 0 with a write that it had not flushed; node 2 has it, and has not noticed. Node
/// 1 is copied from node 0, and then from node 2, which takes node 0 for what it was.
#[test]
fn nobody_vouches_for_the_former_life_of_a_neighbour() {
    for seed in 0..3 {
        let mut w = clean(seed, 3, Setup::default());
        w.write(0, 8, 4096, 3);
        w.pass(Duration::from_secs(1));
        w.crash(1);
        w.write(0, 8, 4096, 7);
        w.pass(Duration::from_millis(300));
        let link = *w.links.iter().find(|(_, ends)| **ends == (0, 2)).unwrap().0;
        w.deaf = Some(2);
        w.crash(0);
        w.apart = vec![(1, 2)];
        w.restart(0);
        w.restart(1);
        w.pass(Duration::from_secs(3));
        w.apart.clear();
        // Node 1 is copied from both in turn until node 2 misses the answer to a ping.
        let until = w.now + Duration::from_millis(400);
        for _ in 0..20_000 {
            if !w.step() && !w.next_timer(until) {
                break;
            }
            let block = |node: usize| w.nodes[node].data.block(1)[0];
            let known = is_marked(&w, 0, 1, 1) || is_marked(&w, 1, 0, 1);
            assert!(block(0) == block(1) || known, "seed {seed}: {:#?}", w.log);
        }
        let down = Input::LinkDown {
            peer: node_id(0),
            link: LinkId(link),
            reason: LinkDownReason::Closed,
        };
        w.deaf = None;
        w.todo.push(Todo::Input(2, down));
        w.pass_until("all are in sync", 60, World::in_sync);
        w.pass(Duration::from_secs(5));
        w.check_same_data();
    }
}
