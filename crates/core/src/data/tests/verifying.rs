//! Online verify (semantics.md, 20).

use alloc::format;

use lockstep_format::units::NodeMask;
use lockstep_format::wire::packet::PeersInSync;

use super::*;

const BLOCKS: u64 = SIZE / 4096;

fn setup() -> Setup {
    let mut setup = Setup::default();
    setup.net.verify_alg = Some("crc32c".into());
    setup
}

fn verify(w: &mut World, index: usize, peer: usize, start: Option<u64>, stop: Option<u64>) -> u64 {
    w.command(
        index,
        Command::Verify {
            peer: node_id(peer),
            volume: VOLUME,
            start,
            stop,
        },
    )
}

/// Changes a block of a disk behind the node's back.
fn spoil(w: &mut World, index: usize, block: u64) {
    let sector = Sector(block * 8);
    w.nodes[index].data.write(sector, &[0x5a; 4096]);
}

fn ends(w: &mut World) {
    w.pass_until("end of the verify", 600, |w| {
        let states = [w.repl(0, 1), w.repl(1, 0)];
        states == [ReplState::Established; 2]
    });
    w.pass(Duration::from_secs(1));
    w.check_idle();
}

fn said(w: &World, text: &str) -> bool {
    w.log.iter().any(|line| line.contains(text))
}

#[test]
fn equal_replicas_verify_clean() {
    let mut w = clean(1, 2, setup());
    w.write(0, 80, 65536, 9);
    w.pass(Duration::from_secs(1));
    verify(&mut w, 0, 1, None, None);
    ends(&mut w);
    assert!(
        said(&w, "16384 KiB compared, 0 KiB out of sync, 0 KiB skipped"),
        "{:#?}",
        w.log
    );
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0));
}

#[test]
fn planted_differences_are_marked_on_both_nodes_and_the_next_connect_copies_them() {
    let mut w = clean(4, 2, setup());
    let spoiled = [0, 1, 77, BLOCKS - 1];
    for block in spoiled {
        spoil(&mut w, 1, block);
    }
    // The Secondary drives.
    verify(&mut w, 1, 0, None, None);
    ends(&mut w);
    assert!(said(&w, "16 KiB out of sync"), "{:#?}", w.log);
    // Both tell which blocks, adjacent ones together.
    let last = format!("start={}, size=8", (BLOCKS - 1) * 8);
    for range in ["start=0, size=16", "start=616, size=8", &last] {
        let text = format!("Out of sync: {range} (sectors)");
        let lines = w.log.iter().filter(|line| line.contains(&text));
        assert_eq!(lines.count(), 2, "{text}: {:#?}", w.log);
    }
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (4, 4));
    w.cut_links();
    w.pass_until("resync", 60, |w| w.in_sync() && w.bits(0, 1) == 0);
    w.pass(Duration::from_secs(1));
    w.check_same_data();
    assert_eq!(w.nodes[1].data.block(77), [0; 4096]);
}

/// A third node has not looked at the blocks and takes both for equal. A kernel that hears it say so clears the marks.
#[test]
fn a_third_node_is_not_asked_about_what_a_verify_marked() {
    let mut w = clean(22, 3, setup());
    for block in [0, 1, 77] {
        spoil(&mut w, 1, block);
    }
    verify(&mut w, 0, 1, None, None);
    w.pass_until("marks on both", 60, |w| {
        (w.bits(0, 1), w.bits(1, 0)) == (3, 3)
    });
    w.pass(Duration::from_secs(1));
    w.packets.clear();
    w.pass(Duration::from_secs(10));
    assert_eq!(w.packets.get("peers in sync"), None, "{:?}", w.packets);
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (3, 3));
}

/// What the nodes of a world hear of who is in sync, said by one of them.
fn say_in_sync(w: &mut World, from: usize, to: usize, mask: NodeMask) {
    let link = w.links.iter().find(|(_, ends)| {
        let ends = (ends.0.min(ends.1), ends.0.max(ends.1));
        ends == (from.min(to), from.max(to))
    });
    let link = LinkId(*link.expect("a link").0);
    let word = PeersInSync {
        sector: Sector(0),
        mask,
        size_bytes: 4 << 20,
    };
    let packet = Input::Packet {
        peer: node_id(from),
        link,
        stream: Stream::Control,
        volume: VOLUME,
        packet: Packet::PeersInSync(word),
        payload: None,
    };
    w.input(to, packet);
    w.pass(Duration::from_millis(50));
}

/// A kernel says at the end of a verify with a third node that this one is equal to it. The third node has no mark
/// towards either of those between which another verify has found differences, and a kernel that hears so clears them.
#[test]
fn a_kernel_is_not_answered_after_a_verify() {
    let mut setup = setup();
    setup.options.kernel_rules = true;
    let mut w = clean(23, 3, setup);
    // The last thing before is a resync from the node that is to be silent.
    w.invalidate_from(2, 1);
    w.pass_until("the resync", 60, World::in_sync);
    w.pass(Duration::from_secs(2));
    spoil(&mut w, 0, 77);
    for peer in [0, 1] {
        verify(&mut w, 2, peer, None, None);
    }
    w.pass_until("marks on both", 60, |w| {
        let idle = [(2, 0), (2, 1)].map(|(a, b)| w.repl(a, b)) == [ReplState::Established; 2];
        idle && (w.bits(0, 2), w.bits(2, 0)) == (1, 1)
    });
    w.pass(Duration::from_secs(1));
    w.packets.clear();
    say_in_sync(&mut w, 2, 1, NodeMask::of(node_id(1)));
    assert_eq!(w.packets.get("peers in sync"), None, "{:?}", w.packets);
}

/// The last word of a kernel's resync may come behind its end, and marks of third nodes would stay without an answer.
#[test]
fn a_kernel_that_was_copied_is_answered_behind_the_end() {
    let mut setup = setup();
    setup.options.kernel_rules = true;
    let mut w = clean(24, 3, setup);
    w.invalidate_from(2, 1);
    w.pass_until("the resync", 60, World::in_sync);
    w.pass(Duration::from_secs(2));
    w.packets.clear();
    say_in_sync(&mut w, 2, 1, NodeMask::of(node_id(1)));
    assert_eq!(w.packets.get("peers in sync"), Some(&2), "{:?}", w.packets);
    // The other one begins a verify, of which this node hears.
    verify(&mut w, 2, 0, None, None);
    w.pass(Duration::from_secs(20));
    assert_eq!(w.repl(2, 0), ReplState::Established);
    w.packets.clear();
    say_in_sync(&mut w, 2, 1, NodeMask::of(node_id(1)));
    assert_eq!(w.packets.get("peers in sync"), None, "{:?}", w.packets);
}

/// As in a kernel: equal generations need no resync, but what is known to differ stays known, over
/// reconnects and restarts, until a resync copies it.
#[test]
fn what_a_verify_between_two_secondaries_of_84_marked_is_not_forgotten() {
    let mut setup = setup();
    setup.options.protocol_max = 101;
    let mut w = clean(2, 2, setup);
    w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    for block in [0, 1, 77] {
        spoil(&mut w, 1, block);
    }
    verify(&mut w, 1, 0, None, None);
    ends(&mut w);
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (3, 3));
    w.cut_links();
    w.pass(Duration::from_secs(30));
    assert_eq!((w.repl(0, 1), w.bits(0, 1)), (ReplState::Established, 3));
    assert_eq!((w.repl(1, 0), w.bits(1, 0)), (ReplState::Established, 3));
    w.command(
        1,
        Command::Invalidate {
            volume: VOLUME,
            from: None,
            reset_bitmap: true,
        },
    );
    w.pass_until("resync", 60, |w| w.in_sync() && w.bits(0, 1) == 0);
    w.pass(Duration::from_secs(1));
    w.check_same_data();
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0));
}

#[test]
fn start_and_stop_bound_what_is_compared() {
    let mut w = clean(3, 2, setup());
    spoil(&mut w, 1, 10);
    spoil(&mut w, 1, 50);
    // Sector 401 is within block 50: the start is rounded down.
    verify(&mut w, 0, 1, Some(401), Some(800));
    ends(&mut w);
    assert!(
        said(
            &w,
            "up to the stop sector: 200 KiB compared, 4 KiB out of sync"
        ),
        "{:#?}",
        w.log
    );
    assert_eq!(w.bits(0, 1), 1);
}

#[test]
fn writes_during_a_verify_are_no_differences() {
    for (seed, driver) in [(4, 0), (5, 1), (6, 0), (7, 1)] {
        let mut w = clean(seed, 2, setup());
        verify(&mut w, driver, 1 - driver, None, None);
        let mut rounds = 0;
        while w.repl(driver, 1 - driver) != ReplState::Established || rounds == 0 {
            for _ in 0..40 {
                let block = w.random(BLOCKS as usize) as u64;
                let fill = w.random(255) as u8;
                w.write(0, block * 8, 4096, fill);
                for _ in 0..w.random(30) {
                    w.step();
                }
            }
            w.pass(Duration::from_millis(100));
            rounds += 1;
            assert!(rounds < 2000, "it ends: {:#?}", w.log);
        }
        ends(&mut w);
        assert!(said(&w, " 0 KiB out of sync"), "{:#?}", w.log);
        w.check_same_data();
    }
}

#[test]
fn three_nodes_verify_under_writes_of_the_third() {
    let mut w = clean(8, 3, setup());
    spoil(&mut w, 2, 3000);
    verify(&mut w, 1, 2, None, None);
    for round in 0..30 {
        for n in 0..20 {
            w.write(0, (round * 20 + n) % 2000 * 8, 4096, round as u8);
        }
        w.pass(Duration::from_millis(100));
    }
    w.pass_until("end of the verify", 600, |w| {
        w.repl(1, 2) == ReplState::Established
    });
    w.pass(Duration::from_secs(5));
    assert!(said(&w, " 4 KiB out of sync"), "{:#?}", w.log);
    // Nobody's word but a resync's clears what was found.
    assert_eq!((w.bits(1, 2), w.bits(2, 1)), (1, 1));
}

#[test]
fn a_cut_link_ends_a_verify_and_the_next_goes_on_where_it_was() {
    let mut w = clean(9, 2, setup());
    let started = |w: &mut World| {
        verify(w, 0, 1, None, None);
        for _ in 0..50_000 {
            let report = w.nodes[0].resource.verify_report(VOLUME, node_id(1));
            // More than can be in flight, so something has been compared.
            if let Some(report) = report.filter(|r| r.position_sector > r.start_sector + 4096) {
                return report;
            }
            w.step();
        }
        panic!("it does not start: {:#?}", w.log);
    };
    let first = started(&mut w);
    assert_eq!(first.start_sector, 0);
    w.cut_links();
    w.pass_until("connection", 60, World::in_sync);
    assert_eq!(w.repl(0, 1), ReplState::Established);
    let second = started(&mut w);
    assert!(
        second.start_sector > 0 && second.start_sector <= first.position_sector + 8,
        "{first:?} {second:?}"
    );
    ends(&mut w);
    assert!(said(&w, " 0 KiB out of sync"));
    let third = started(&mut w);
    assert_eq!(third.start_sector, 0, "the second was complete");
    ends(&mut w);
}

#[test]
fn a_verify_that_cannot_run_is_refused_by_name() {
    let mut w = clean(10, 2, Setup::default());
    verify(&mut w, 0, 1, None, None);
    w.pass(Duration::from_secs(1));
    assert!(said(&w, "verify-alg is not configured"), "{:#?}", w.log);
    let mut w = clean(11, 2, setup());
    verify(&mut w, 0, 1, Some(SIZE / 512), None);
    verify(&mut w, 0, 1, Some(80), Some(80));
    assert_eq!(
        w.log
            .iter()
            .filter(|l| l.contains("nothing to verify"))
            .count(),
        2
    );
    let mut different = setup();
    different.net.verify_alg = Some("sha1".into());
    w.nodes[1].resource = World::resource(1, 99, &different);
    w.crash(1);
    w.setup = different;
    w.restart(1);
    w.pass_until("connection", 60, World::in_sync);
    verify(&mut w, 0, 1, None, None);
    w.pass(Duration::from_secs(1));
    assert!(said(&w, "verify-alg differs"), "{:#?}", w.log);
    assert_eq!(w.repl(0, 1), ReplState::Established);
}

#[test]
fn a_verify_keeps_below_c_max_rate() {
    let mut w = clean(12, 2, setup());
    let options = crate::options::PeerDeviceOptions {
        c_max_rate_kib_s: 1024,
        ..crate::options::PeerDeviceOptions::default()
    };
    let (peer, volume) = (node_id(1), VOLUME);
    w.command(
        0,
        Command::PeerDeviceOptions {
            peer,
            volume,
            options,
        },
    );
    verify(&mut w, 0, 1, None, None);
    // 16 MiB at 1 MiB/s.
    w.pass(Duration::from_secs(10));
    let report = w.nodes[0].resource.verify_report(VOLUME, peer);
    let done = report.expect("it still runs").position_sector / 2;
    assert!((5_000..=11_000).contains(&done), "{done} KiB in 10 s");
    ends(&mut w);
}
