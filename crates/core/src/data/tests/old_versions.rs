//! Protocols 86 to 99: what they lack is done another way or refused.

use super::*;

const VERSIONS: [u32; 9] = [86, 87, 88, 89, 90, 94, 95, 96, 99];

fn setup(protocol_max: u32) -> Setup {
    let mut setup = Setup::default();
    setup.options.protocol_max = protocol_max;
    setup.net.verify_alg = Some("crc32c".into());
    setup.net.csums_alg = Some("sha1".into());
    setup
}

/// A pair after its first, full sync.
fn synced_at(seed: u64, setup: Setup) -> World {
    let mut w = World::new(seed, 2, setup);
    w.pass(Duration::from_secs(3));
    w.command(0, Command::Primary { force: true });
    w.pass_until("the first sync", 600, World::in_sync);
    w.pass(Duration::from_secs(1));
    w
}

fn sent(w: &World, name: &str) -> u64 {
    w.packets.get(name).copied().unwrap_or(0)
}

fn spoken(w: &World) -> u32 {
    w.nodes[0].resource.dialect(node_id(1)).protocol
}

#[test]
fn every_version_syncs_replicates_and_resyncs() {
    for version in VERSIONS {
        for protocol in [Protocol::A, Protocol::B, Protocol::C] {
            let mut setup = setup(version);
            setup.net.protocol = protocol;
            let mut w = synced_at(u64::from(version), setup);
            assert_eq!(spoken(&w), version);
            let long = w.write(0, 8000, 1 << 20, 7);
            let fua = w.request(0, RequestKind::Write { fua: true }, 16, 4096, 8);
            w.pass(Duration::from_secs(2));
            assert!(w.done(0, long) && w.done(0, fua), "{version} {:#?}", w.log);
            w.check_same_data();
            assert_eq!(w.read(0, 8000, 1 << 20), vec![7; 1 << 20]);
            w.cut_links();
            for n in 0..40 {
                w.write(0, n * 64, 4096, n as u8);
            }
            w.pass(Duration::from_secs(5));
            w.pass_until("the resync", 200, World::in_sync);
            w.pass(Duration::from_secs(1));
            w.check_idle();
            w.check_same_data();
            assert_eq!(sent(&w, "out of sync"), 0, "{version}");
        }
    }
}

#[test]
fn writes_during_each_step_of_a_resync_reach_the_target() {
    for version in VERSIONS {
        for seed in 0..6 {
            let mut w = synced_at(100 + seed, setup(version));
            w.cut_links();
            for n in 0..30 {
                w.write(0, n * 8, 4096, 1 + n as u8);
            }
            for n in 0..600 {
                w.write(0, n % 40 * 8, 4096, n as u8);
                for _ in 0..8 {
                    w.step();
                }
            }
            w.pass(Duration::from_secs(5));
            w.pass_until("the resync", 200, World::in_sync);
            w.pass(Duration::from_secs(1));
            w.check_idle();
            w.check_same_data();
        }
    }
}

#[test]
fn what_a_version_lacks_is_refused() {
    let mut w = synced_at(1, setup(87));
    let verify = Command::Verify {
        peer: node_id(1),
        volume: VOLUME,
        start: None,
        stop: None,
    };
    let id = w.command(0, verify);
    w.pass(Duration::from_secs(1));
    assert!(w.answers[&id].is_err(), "{:?}", w.answers[&id]);
    let id = w.request(0, RequestKind::Discard, 16, 8192, 0);
    w.pass(Duration::from_secs(1));
    let result = w.nodes[0].completed[&id];
    assert_eq!(result, Err(RequestError::Unsupported));
    let mut net = w.setup.net.clone();
    net.protocol = Protocol::A;
    let peer = node_id(1);
    let id = w.command(0, Command::NetOptions { peer, net });
    w.pass(Duration::from_secs(1));
    assert!(w.answers[&id].is_err(), "{:?}", w.answers[&id]);
    w.check_same_data();
}
