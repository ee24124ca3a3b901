//! `csums-alg`: a resync target sends digests, and gets data only where they differ.

use super::*;

fn setup(protocol_max: u32) -> Setup {
    let mut setup = Setup::default();
    setup.net.csums_alg = Some("sha1".into());
    setup.options.protocol_max = protocol_max;
    setup
}

fn count(w: &World, name: &str) -> u64 {
    w.packets.get(name).copied().unwrap_or(0)
}

fn same_sectors(w: &World, node: usize) -> u64 {
    let device = &w.nodes[node].resource.devices[&VOLUME];
    device.peers[&node_id(1 - node)].io.resync_same_sectors
}

/// 64 blocks on both nodes, one of them then changed on node 0 only, and node 1 invalidated.
fn invalidated(seed: u64, setup: Setup) -> World {
    let mut w = clean(seed, 2, setup);
    for n in 0..64 {
        w.write(0, n * 8, 4096, 1 + n as u8);
    }
    w.pass(Duration::from_secs(1));
    w.cut_links();
    w.write(0, 80, 4096, 200);
    w.pass(Duration::from_secs(5));
    w.pass_until("the first resync", 60, World::in_sync);
    // Silently different: only its digest shows it.
    w.nodes[1].data.write(Sector(160), &[3; 4096]);
    w.nodes[1].data.flush();
    w.invalidate();
    w.pass_until("the full resync", 200, World::in_sync);
    w
}

#[test]
fn only_what_differs_is_sent_in_both_dialects() {
    for protocol_max in [101, 124] {
        let mut w = invalidated(50, setup(protocol_max));
        w.check_idle();
        w.check_same_data();
        let sent = count(&w, "rs data reply");
        assert_eq!(sent, 1, "{:?}", w.packets);
        assert!(count(&w, "csum request") > 10);
        assert_eq!(count(&w, "resync request"), 0);
        // One request was as large as the block that differs, or larger.
        for node in 0..2 {
            let same = same_sectors(&w, node);
            assert!((SIZE / 512 - 4096..SIZE / 512).contains(&same), "{same}");
        }
    }
}

#[test]
fn without_a_crash_the_data_are_sent_if_so_configured() {
    let mut setup = setup(124);
    setup.net.csums_after_crash_only = true;
    let w = invalidated(51, setup);
    assert_eq!(count(&w, "csum request"), 0);
    assert_eq!(same_sectors(&w, 1), 0);
    w.check_same_data();
}

#[test]
fn after_the_crash_of_a_primary_digests_are_sent() {
    let mut setup = setup(124);
    setup.net.csums_after_crash_only = true;
    let mut w = clean(52, 2, setup);
    for n in 0..64 {
        w.write(0, n * 8, 4096, 1 + n as u8);
    }
    w.pass(Duration::from_secs(1));
    w.crash(0);
    w.restart(0);
    w.pass_until("the resync", 60, World::in_sync);
    assert!(count(&w, "csum request") > 0, "{:#?}", w.log);
    w.check_same_data();
}

#[test]
fn a_block_that_is_written_meanwhile_is_not_taken_for_equal() {
    for seed in 0..20 {
        let mut w = clean(60 + seed, 2, setup(124));
        for n in 0..16 {
            w.write(0, n * 8, 4096, 1 + n as u8);
        }
        w.pass(Duration::from_secs(1));
        let command = Command::Invalidate {
            volume: VOLUME,
            from: None,
            reset_bitmap: true,
        };
        w.command(1, command);
        for n in 0..400 {
            w.write(0, n % 16 * 8, 4096, n as u8);
            for _ in 0..12 {
                w.step();
            }
        }
        w.pass(Duration::from_secs(1));
        w.pass_until("the resync", 200, World::in_sync);
        w.pass(Duration::from_secs(1));
        w.check_same_data();
    }
}
