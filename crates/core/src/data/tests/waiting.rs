//! Blocks that are wanted after a write of a node's former life, which never comes (semantics.md, 5.1).

use lockstep_format::units::Dagtag;

use super::*;

/// Node 2 has heard of node 0 that its writes have come as far as this.
fn hears(w: &mut World, dagtag: u64) {
    let of = |(_, nodes): &(&u64, &(usize, usize))| **nodes == (0, 2) || **nodes == (2, 0);
    let link = *w.links.iter().find(of).unwrap().0;
    let packet = Input::Packet {
        peer: node_id(0),
        link: LinkId(link),
        stream: Stream::Data,
        volume: VolumeNr::NONE,
        packet: Packet::Dagtag(Dagtag(dagtag)),
        payload: None,
    };
    w.input(2, packet);
}

fn cancelled(w: &World) -> u64 {
    w.packets.get("cancel").copied().unwrap_or(0)
}

#[test]
fn a_resync_ends_whose_target_knew_a_former_life_of_the_primary() {
    let mut w = clean(31, 3, Setup::default());
    w.write(0, 800, 4096, 7);
    w.pass(Duration::from_secs(1));
    let dagtag = w.nodes[0].resource.io.dagtag.0;
    hears(&mut w, dagtag + 1_000_000);
    w.packets.clear();
    w.invalidate_from(2, 1);
    w.pass(Duration::from_millis(800));
    assert_eq!(cancelled(&w), 0);
    w.pass(Duration::from_secs(3));
    assert!(cancelled(&w) > 0, "{:?}", w.packets);
    // It notices.
    hears(&mut w, dagtag);
    w.pass_until("the end", 20, World::in_sync);
    w.pass(Duration::from_secs(3));
    w.check_idle();
    w.check_same_data();
}

#[test]
fn writes_of_a_new_life_are_no_reason_to_wait_for_ever() {
    let mut w = clean(32, 3, Setup::default());
    hears(&mut w, 1_000_000);
    w.invalidate_from(2, 1);
    w.packets.clear();
    // They come to node 1 only: node 2 is told of none of them.
    for n in 0..65_u64 {
        if n == 55 {
            assert_eq!(cancelled(&w), 0, "they come, and were waited for");
        }
        w.write(0, n * 8, 4096, n as u8);
        w.pass(Duration::from_millis(950));
    }
    assert!(cancelled(&w) > 0, "{:?}", w.packets);
}

#[test]
fn a_verify_skips_what_waits_for_a_former_life_of_the_primary() {
    let mut setup = Setup::default();
    setup.net.verify_alg = Some("crc32c".into());
    let mut w = clean(33, 3, setup);
    w.write(0, 800, 4096, 7);
    w.pass(Duration::from_secs(1));
    hears(&mut w, 1_000_000);
    w.packets.clear();
    let verify = Command::Verify {
        peer: node_id(1),
        volume: VOLUME,
        start: None,
        stop: Some(1024),
    };
    w.command(2, verify);
    w.pass(Duration::from_millis(800));
    assert_eq!(cancelled(&w), 0);
    w.pass_until("end of the verify", 100, |w| {
        w.log.iter().any(|line| line.contains("512 KiB skipped"))
    });
    w.pass(Duration::from_secs(2));
    w.check_idle();
}

/// A kernel answers a verify's requests only when the writes have come to where the requests say, also if those are
/// the asking node's own.
#[test]
fn a_peer_that_comes_back_hears_how_far_the_writes_have_come() {
    let mut w = clean(34, 2, Setup::default());
    w.write(0, 800, 4096, 7);
    w.pass(Duration::from_secs(1));
    w.cut_links();
    w.pass_until("the resync", 60, World::in_sync);
    w.pass(Duration::from_secs(1));
    let written = w.nodes[0].resource.io.dagtag;
    assert_ne!(written, Dagtag(0));
    let conn = &w.nodes[1].resource.connections[&node_id(0)];
    assert_eq!((conn.last_dagtag, conn.dagtag_fresh), (written, true));
}

/// A kernel that is Primary counts a write before it sends it, and asks for the block in between. What it gets goes
/// over its own write there (seen live).
#[test]
fn a_block_that_a_kernel_asks_for_is_read_behind_the_writes_that_it_has_counted() {
    for kernel_rules in [true, false] {
        let mut setup = Setup::default();
        setup.options.kernel_rules = kernel_rules;
        let mut w = clean(35, 2, setup);
        w.write(0, 800, 4096, 7);
        w.pass(Duration::from_secs(1));
        let counted = w.nodes[0].resource.io.dagtag.0 + 8;
        w.packets.clear();
        w.invalidate_from_counted(0, 1, counted);
        let answers = |w: &World| w.packets.get("rs data reply").copied().unwrap_or(0);
        assert_eq!(answers(&w) == 0, kernel_rules, "{:?}", w.packets);
        assert_eq!(cancelled(&w), 0);
        w.write(0, 8000, 4096, 8);
        w.pass_until("the resync", 60, World::in_sync);
        assert!(answers(&w) > 0 && cancelled(&w) == 0, "{:?}", w.packets);
        w.pass(Duration::from_secs(1));
        w.check_same_data();
    }
}

impl World {
    /// As [`World::invalidate_from`], but the first requests name a write that is still to come.
    fn invalidate_from_counted(&mut self, node: usize, from: usize, counted: u64) {
        let command = Command::Invalidate {
            volume: VOLUME,
            from: Some(node_id(from)),
            reset_bitmap: true,
        };
        self.command(node, command);
        let end = self.now + Duration::from_millis(500);
        while self.now < end {
            for (key, sent) in &mut self.wires {
                for (_, packet, _) in sent.iter_mut().filter(|_| (key.0, key.1) == (node, from)) {
                    if let Packet::RsDagtagReq(request) = packet {
                        assert_eq!(usize::from(request.dagtag_node_id.0), node);
                        request.dagtag = Dagtag(counted);
                    }
                }
            }
            super::kernel_rules::step(self);
        }
    }
}
