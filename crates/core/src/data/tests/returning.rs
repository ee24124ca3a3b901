//! A node that comes back to several others is copied once (semantics.md, 14.3 and 19.7).

use super::*;

const BLOCKS: u64 = 800;

/// How node 2 goes, and whom it finds first.
#[derive(Clone, Copy, Debug, PartialEq)]
enum First {
    Both,
    Primary,
    Secondary,
}

/// Node 2 misses writes all over the device, comes back to `first`, and to the other node later. Says
/// how many blocks were copied, with how many writes meanwhile, and how often it was a target.
fn comes_back(seed: u64, dies: bool, first: First, later_ms: u64, writes: bool) -> (u64, usize) {
    comes_back_with(seed, dies, first, later_ms, (writes, false))
}

/// The same; the writes are sent to the target, or only marked there and copied.
fn comes_back_with(
    seed: u64,
    dies: bool,
    first: First,
    later_ms: u64,
    (writes, marks): (bool, bool),
) -> (u64, usize) {
    let mut setup = Setup::default();
    setup.peer.resync_without_replication = marks;
    setup.peer.c_max_rate_kib_s = 4096;
    let mut w = clean(seed, 3, setup);
    w.apart = vec![(0, 2), (1, 2)];
    if dies {
        w.crash(2);
    } else {
        w.cut_links_between(0, 2);
        w.cut_links_between(1, 2);
    }
    w.run();
    for n in 0..BLOCKS {
        w.write(0, n * 40, 4096, n as u8);
        if n % 50 == 0 {
            w.pass(Duration::from_millis(20));
        }
    }
    w.pass(Duration::from_secs(5));
    assert_eq!(w.bits(0, 2), BLOCKS);
    w.packets.clear();
    w.log.clear();
    if dies {
        w.restart(2);
    }
    match first {
        First::Both => w.apart.clear(),
        First::Primary => w.apart = vec![(1, 2)],
        First::Secondary => w.apart = vec![(0, 2)],
    }
    let goes_on = |w: &mut World, from: u64, ms: u64| {
        for n in 0..ms / 10 {
            w.pass(Duration::from_millis(10));
            if writes {
                // Beside the borders of blocks, so that no write settles a whole one.
                w.write(0, from + n * 8, 4096, n as u8);
            }
        }
    };
    goes_on(&mut w, 3, later_ms);
    w.apart.clear();
    goes_on(&mut w, 5003, 8000);
    w.pass_until("in sync", 60, World::in_sync);
    w.pass(Duration::from_secs(8));
    w.check_idle();
    w.check_same_data();
    for a in 0..3 {
        let left: u64 = (0..3).filter(|b| *b != a).map(|b| w.bits(a, b)).sum();
        assert_eq!(left, 0, "node {a}: {:#?}", w.log);
    }
    let copied = w.packets.get("rs data reply").copied().unwrap_or(0);
    let began = w.log.iter().filter(|l| l.contains("-> SyncTarget")).count();
    (copied, began)
}

/// As many blocks as are in flight when the source changes.
const OVERLAP: u64 = BLOCKS / 7;
/// As many as are written while the rest is copied, in about a second.
const WRITTEN: u64 = 110;

#[test]
fn whom_it_finds_first_makes_no_difference() {
    for dies in [false, true] {
        for seed in 9000..9006 {
            let (copied, _) = comes_back(seed, dies, First::Both, 0, false);
            assert!(copied <= BLOCKS + OVERLAP, "seed {seed}: {copied} blocks");
            for later_ms in [300, 3000] {
                let (copied, began) = comes_back(seed, dies, First::Primary, later_ms, false);
                assert_eq!((copied, began), (BLOCKS, 1), "seed {seed}, {later_ms} ms");
                let (copied, _) = comes_back(seed, dies, First::Secondary, later_ms, false);
                assert!(copied <= BLOCKS + 2, "seed {seed}, {later_ms} ms: {copied}");
            }
        }
    }
}

#[test]
fn writes_meanwhile_are_not_copied_once_more_from_the_other_node() {
    for seed in 9000..9004 {
        for (first, later_ms) in [
            (First::Both, 0),
            (First::Primary, 300),
            (First::Secondary, 300),
        ] {
            let changes = usize::from(first != First::Primary);
            for (marks, more) in [(false, 40), (true, 40 + WRITTEN)] {
                let (copied, began) = comes_back_with(seed, false, first, later_ms, (true, marks));
                assert!(
                    copied <= BLOCKS + more + changes as u64 * OVERLAP && began <= 1 + changes,
                    "seed {seed}, {first:?}, {marks}: {copied} blocks, {began} resyncs"
                );
            }
        }
    }
}

/// The peer acks of these writes are still to come, and as in a kernel none is sent before its time.
#[test]
fn what_was_written_right_before_a_parting_is_marked_until_the_nodes_meet() {
    for seed in 300..320 {
        for who in [0, 2] {
            let mut w = clean(seed, 3, Setup::default());
            for n in 0..20 {
                w.write(0, n * 40, 4096, n as u8);
            }
            w.pass(Duration::from_millis(20));
            w.request(0, RequestKind::Flush, 0, 0, 0);
            w.pass(Duration::from_millis(20));
            let peer = node_id(2 - who);
            w.command(who, Command::Disconnect { peer, force: false });
            w.pass(Duration::from_millis(20));
            assert_eq!(w.bits(2, 1), 20, "seed {seed}, by node {who}");
            w.command(
                who,
                Command::Connect {
                    peer,
                    discard_my_data: false,
                    tentative: false,
                },
            );
            w.pass(Duration::from_secs(10));
            let marks = [(0, 2), (1, 2), (2, 0), (2, 1)].map(|(of, to)| w.bits(of, to));
            assert_eq!(marks, [0; 4], "seed {seed}: {:#?}", w.log);
            w.check_same_data();
        }
    }
}

/// While a peer's disk is away or being attached, what is asked for between the disks is refused: it would take the place of
/// the resync that the attach needs.
#[test]
fn nothing_is_asked_of_a_disk_that_is_being_attached() {
    for reset_bitmap in [true, false] {
        let mut w = World::synced(2_900 + u64::from(reset_bitmap), 2);
        w.detach(1);
        w.pass(Duration::from_secs(1));
        w.write(0, 800, 4096, 7);
        w.pass(Duration::from_secs(1));
        let remote = || Command::InvalidateRemote {
            peer: node_id(1),
            volume: VOLUME,
            reset_bitmap,
        };
        let refused = |w: &mut World, command: Command| {
            let id = w.command(0, command);
            for _ in 0..20_000 {
                if let Some(answer) = w.answers.get(&id) {
                    return answer.as_ref().err().map(|e| e.code.0);
                }
                w.step();
            }
            panic!("no answer");
        };
        let code = refused(&mut w, remote());
        assert_eq!(code, Some(-5), "{:?} {:#?}", w.repl(0, 1), w.log);
        w.attach(1);
        // Until the resync has begun.
        let mut asked = 0;
        while w.repl(0, 1) == ReplState::Established && w.disk_state(1) < DiskState::Inconsistent {
            let code = refused(&mut w, remote());
            assert!(code.is_some(), "{:#?}", w.log);
            asked += 1;
            w.step();
        }
        assert!(asked > 0);
        w.pass_until("the resync", 60, World::in_sync);
        w.pass(Duration::from_secs(1));
        w.check_idle();
        w.check_same_data();
    }
}

/// With protocol A a crashed Primary has completed a write alone. It comes back and meets one survivor, and that one the
/// other, which is of the same generation: the write goes on to it, and not the other way.
#[test]
fn what_a_crashed_primary_completed_alone_reaches_everybody() {
    let mut seen = 0;
    for seed in 0..40 {
        let mut setup = Setup::default();
        setup.net.protocol = Protocol::A;
        let mut w = clean(seed, 3, setup);
        w.pass(Duration::from_secs(1));
        let early = w.write(0, 800, 4096, 1);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, early));
        let id = w.request(0, RequestKind::Write { fua: true }, 8, 4096, 7);
        while !w.done(0, id) {
            w.step();
        }
        w.crash(0);
        w.apart = [(0, 1)].into();
        w.pass(Duration::from_secs(20));
        let has = |w: &World, index: usize| w.nodes[index].data.block(1) == [7; 4096];
        if has(&w, 1) || has(&w, 2) || !has(&w, 0) {
            continue;
        }
        seen += 1;
        w.restart(0);
        w.pass(Duration::from_secs(20));
        assert!(has(&w, 0) && has(&w, 2), "seed {seed}: {:#?}", w.log);
        w.apart.clear();
        w.pass_until("in sync again", 60, World::in_sync);
        assert!(
            (0..3).all(|index| has(&w, index)),
            "seed {seed}: {:#?}",
            w.log
        );
    }
    assert!(seen > 0, "in no world was it alone");
}
