//! Options of a connection that change while it is established.

use super::*;

fn change(w: &mut World, index: usize, net: &NetOptions) {
    let (peer, net) = (node_id(1 - index), net.clone());
    w.command(index, Command::NetOptions { peer, net });
}

fn net_of(w: &World, index: usize) -> NetOptions {
    w.nodes[index].resource.connections[&node_id(1 - index)]
        .net
        .clone()
}

fn connected(w: &World) -> bool {
    let lost = |text: &&String| text.contains("was lost") || text.contains("does not have its");
    !w.log.iter().any(|text| lost(&text))
}

#[test]
fn a_new_protocol_asks_for_other_acks_and_the_peer_adopts_it() {
    for protocol_max in [101, 124] {
        let mut setup = Setup::default();
        setup.options.protocol_max = protocol_max;
        setup.net.protocol = Protocol::A;
        let mut w = clean(70, 2, setup.clone());
        w.write(0, 0, 4096, 1);
        w.pass(Duration::from_secs(1));
        assert_eq!(w.packets.get("write ack"), None);
        for (protocol, acks) in [(Protocol::C, true), (Protocol::B, false)] {
            let mut net = setup.net.clone();
            net.protocol = protocol;
            let open = w.write(0, 8, 4096, 2);
            change(&mut w, 0, &net);
            w.pass(Duration::from_secs(1));
            w.packets.clear();
            let id = w.write(0, 16, 4096, 3);
            w.pass(Duration::from_secs(1));
            assert!(w.done(0, open) && w.done(0, id));
            assert_eq!(w.packets.contains_key("write ack"), acks, "{protocol:?}");
            assert_eq!(net_of(&w, 1).protocol, protocol);
        }
        assert!(connected(&w), "{:#?}", w.log);
        w.check_same_data();
        w.cut_links();
        w.pass(Duration::from_secs(5));
        w.pass_until("the next connection", 60, World::in_sync);
        w.check_idle();
    }
}

#[test]
fn digests_are_switched_in_the_stream() {
    for seed in 0..10 {
        let mut w = clean(80 + seed, 2, Setup::default());
        let algs = [Some("crc32c"), Some("sha256"), None, Some("md5"), None];
        for (round, alg) in algs.into_iter().enumerate() {
            let mut net = w.setup.net.clone();
            net.data_integrity_alg = alg.map(Into::into);
            for n in 0..20 {
                w.write(0, n * 8, 4096, (round * 20) as u8 + n as u8);
                // The other side follows a little later.
                if n == 5 || n == 11 {
                    change(&mut w, usize::from(n == 11), &net);
                }
                for _ in 0..10 {
                    w.step();
                }
            }
            w.pass(Duration::from_secs(1));
            assert_eq!(net_of(&w, 1).data_integrity_alg, net.data_integrity_alg);
        }
        assert!(connected(&w), "{:#?}", w.log);
        w.check_idle();
        w.check_same_data();
    }
}

#[test]
fn a_digest_that_was_switched_on_is_checked() {
    let mut w = clean(90, 2, Setup::default());
    let mut net = w.setup.net.clone();
    net.data_integrity_alg = Some("sha1".into());
    change(&mut w, 0, &net);
    w.spoil = Some("data");
    w.write(0, 80, 4096, 5);
    w.pass(Duration::from_secs(5));
    w.pass_until("the write and the resync", 60, World::in_sync);
    assert!(w.log.iter().any(|text| text.contains("does not have its")));
    assert_eq!(w.nodes[1].data.block(10), &[5; 4096]);
}

#[test]
fn algorithms_in_use_stay() {
    let mut w = clean(91, 2, Setup::default());
    let mut net = w.setup.net.clone();
    net.csums_alg = Some("sha1".into());
    net.verify_alg = Some("md5".into());
    change(&mut w, 0, &net);
    w.pass(Duration::from_secs(1));
    let found = net_of(&w, 1);
    assert_eq!(
        (found.csums_alg, found.verify_alg),
        (net.csums_alg.clone(), net.verify_alg.clone())
    );
    let command = Command::Invalidate {
        volume: VOLUME,
        from: None,
        reset_bitmap: true,
    };
    w.command(1, command);
    for _ in 0..20_000 {
        if w.repl(0, 1) == ReplState::SyncSource || !w.step() {
            break;
        }
    }
    assert_eq!(w.repl(0, 1), ReplState::SyncSource);
    net.csums_alg = None;
    change(&mut w, 0, &net);
    assert!(
        w.log
            .last()
            .unwrap()
            .contains("csums-alg cannot be changed")
    );
    assert_eq!(net_of(&w, 0).csums_alg.as_deref(), Some("sha1"));
}

/// Marks count for nothing where a disk did without a bitmap: a peer that comes then gets everything (spec/metadata.md, 5.2).
#[test]
fn a_disk_that_did_without_a_bitmap_marks_everything_for_peers_to_come() {
    let all = |w: &World| {
        let disk = w.nodes[0].resource.devices[&VOLUME].attached().unwrap();
        let shape = disk.io.bitmap.shape();
        (0..shape.slots()).all(|slot| disk.io.bitmap.count(slot) == shape.bits())
    };
    for at_attach in [true, false] {
        let mut w = clean(40, 2, Setup::default());
        w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        let peer = node_id(1);
        w.command(0, Command::Disconnect { peer, force: false });
        w.pass(Duration::from_secs(1));
        w.command(0, Command::DelPeer { peer });
        let mut options = w.setup.disk.clone();
        options.bitmap = false;
        if at_attach {
            w.command(
                0,
                Command::Detach {
                    volume: VOLUME,
                    force: false,
                    diskless: false,
                },
            );
            w.pass(Duration::from_secs(1));
            assert!(w.disk_state(0) == DiskState::Diskless);
            w.setup.disk = options;
            w.attach(0);
        } else {
            w.command(
                0,
                Command::DiskOptions {
                    volume: VOLUME,
                    options,
                },
            );
        }
        w.pass(Duration::from_secs(1));
        assert!(all(&w), "{:#?}", w.log);
    }
}
