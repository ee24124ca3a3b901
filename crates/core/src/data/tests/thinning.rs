//! `rs-discard-granularity`: blocks of zeroes are resynced without data (wire.md, 7.5 and 7.6).

use super::*;

fn setup(protocol_max: u32, granularity_bytes: u32) -> Setup {
    let mut setup = Setup::default();
    setup.disk.rs_discard_granularity_bytes = granularity_bytes;
    setup.options.protocol_max = protocol_max;
    setup
}

fn count(w: &World, name: &str) -> u64 {
    w.packets.get(name).copied().unwrap_or(0)
}

/// 16 MiB of zeroes with data in some blocks on node 0; node 1 is full of old data, but for a few
/// blocks, and is copied whole.
fn invalidated(seed: u64, setup: Setup) -> World {
    let mut w = clean(seed, 2, setup);
    for block in [0, 5, 100, 4095] {
        w.write(0, block * 8, 4096, (1 + block % 200) as u8);
    }
    w.pass(Duration::from_secs(1));
    for block in (0..4096).filter(|b| b % 7 > 0) {
        w.nodes[1].data.write(Sector(block * 8), &[0xaa; 4096]);
    }
    w.nodes[1].data.flush();
    w.invalidate();
    w.pass_until("the full resync", 200, World::in_sync);
    w.pass(Duration::from_secs(3));
    w.check_idle();
    w.check_same_data();
    w
}

#[test]
fn only_blocks_with_data_are_sent_in_both_dialects() {
    for protocol_max in [101, 124] {
        let w = invalidated(60, setup(protocol_max, 65536));
        assert_eq!(count(&w, "thin request"), 256, "{:?}", w.packets);
        assert_eq!(count(&w, "resync request"), 0);
        assert_eq!(count(&w, "deallocated"), 253);
        assert_eq!(count(&w, "rs data reply"), 3);
        assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0));
    }
}

#[test]
fn without_a_granularity_everything_is_sent() {
    let w = invalidated(61, setup(124, 0));
    assert_eq!(count(&w, "thin request") + count(&w, "deallocated"), 0);
}

#[test]
fn what_is_smaller_than_the_granularity_is_asked_for_with_data() {
    for protocol_max in [101, 124] {
        let mut w = clean(62, 2, setup(protocol_max, 65536));
        w.cut = true;
        w.cut_links();
        w.pass(Duration::from_secs(1));
        w.request(0, RequestKind::Discard, 800, 8192, 0);
        w.write(0, 0, 4096, 9);
        w.pass(Duration::from_secs(1));
        w.packets.clear();
        w.cut = false;
        w.pass_until("the resync", 60, World::in_sync);
        assert_eq!(count(&w, "thin request"), 0);
        assert!(count(&w, "rs data reply") >= 2);
        w.check_same_data();
    }
}

#[test]
fn writes_during_a_thin_resync_win() {
    for seed in 70..90 {
        let mut w = clean(seed, 2, setup(124, 4096));
        for block in 0..1024 {
            w.nodes[1].data.write(Sector(block * 8), &[0xaa; 4096]);
        }
        let command = Command::Invalidate {
            volume: VOLUME,
            from: None,
            reset_bitmap: true,
        };
        w.command(1, command);
        for n in 0..200u64 {
            for _ in 0..20 {
                w.step();
            }
            w.write(0, n * 5 % 1024 * 8, 4096, n as u8 + 1);
        }
        w.pass(Duration::from_secs(1));
        w.pass_until("the full resync", 200, World::in_sync);
        w.pass(Duration::from_secs(3));
        assert!(count(&w, "deallocated") > 1000);
        w.check_idle();
        w.check_same_data();
    }
}
