//! Bitmaps whose bits stand for different sizes (wire.md, 7.4).

use super::*;

/// Two nodes in sync whose bitmap blocks have 2^shift bytes, node 0 Primary.
fn world(shifts: [u8; 2], net: NetOptions) -> World {
    let setup = Setup {
        block_shifts: shifts.to_vec(),
        net,
        ..Setup::default()
    };
    clean(7, 2, setup)
}

fn no_bits_left(w: &World) {
    assert_eq!((w.bits(0, 1), w.bits(1, 0)), (0, 0), "{:#?}", w.log);
}

/// The link is away while node 0 writes; then both are in sync without a mark on either side.
fn lose_and_resync(w: &mut World, blocks: &[u64], fill: u8) {
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(2));
    for block in blocks {
        let id = w.write(0, block * 8, 4096, fill);
        w.pass(Duration::from_millis(100));
        assert!(w.done(0, id));
    }
    assert!(w.bits(0, 1) > 0);
    w.cut = false;
    w.pass_until("in sync again", 60, World::in_sync);
    w.pass(Duration::from_secs(5));
    for block in blocks {
        for node in &w.nodes {
            assert_eq!(node.data.block(*block), [fill; 4096], "block {block}");
        }
    }
    no_bits_left(w);
    w.check_same_data();
}

#[test]
fn every_pair_of_block_sizes_resyncs_and_leaves_no_mark() {
    for shifts in [[12, 16], [16, 12], [20, 14], [13, 20], [20, 20]] {
        for use_rle in [true, false] {
            let net = NetOptions {
                use_rle,
                max_buffers: 256,
                ..NetOptions::default()
            };
            let mut w = world(shifts, net);
            let sizes = w.nodes[0].resource.devices[&VOLUME].peers[&node_id(1)].sizes;
            assert_eq!(sizes.map(|s| s.bitmap_block_shift), Some(shifts[1]));
            // Within one large block, over borders, and the device's ends.
            lose_and_resync(&mut w, &[0, 3, 9, 15, 16, 700, 1023, 1024, 4095], 1);
            // The other node is the source.
            w.command(0, Command::Secondary { force: false });
            w.pass(Duration::from_secs(1));
            lose_one(&mut w, 1, 2);
        }
    }
}

/// Node `index` is Primary while the link is away.
fn lose_one(w: &mut World, index: usize, fill: u8) {
    w.command(index, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(2));
    let id = w.write(index, 40, 3 * 4096, fill);
    w.pass(Duration::from_secs(1));
    assert!(w.done(index, id), "{:#?}", w.log);
    w.cut = false;
    w.pass_until("in sync again", 60, World::in_sync);
    w.pass(Duration::from_secs(5));
    no_bits_left(w);
    w.check_same_data();
}

/// Small writes during a resync clear no part of a large block: the peer could not, and would keep
/// its mark for ever.
#[test]
fn writes_during_a_resync_leave_no_mark_on_the_coarse_side() {
    for shifts in [[12, 18], [18, 12]] {
        let mut w = world(
            shifts,
            NetOptions {
                max_buffers: 256,
                ..NetOptions::default()
            },
        );
        w.cut = true;
        w.cut_links();
        w.pass(Duration::from_secs(2));
        for block in 0..64 {
            w.write(0, block * 64 * 8, 4096, 3);
        }
        w.pass(Duration::from_secs(1));
        w.cut = false;
        for round in 0..2000_u64 {
            w.step();
            if round % 20 == 0 {
                w.write(0, round / 20 % 64 * 8, 4096, 4);
            }
        }
        w.pass_until("in sync again", 60, World::in_sync);
        w.pass(Duration::from_secs(5));
        no_bits_left(&w);
        w.check_same_data();
    }
}

#[test]
fn a_verify_goes_by_the_larger_block_and_its_finds_are_resynced() {
    for shifts in [[12, 16], [16, 12]] {
        let net = NetOptions {
            verify_alg: Some("crc32c".into()),
            max_buffers: 256,
            ..NetOptions::default()
        };
        let mut w = world(shifts, net);
        w.nodes[1].data.write(Sector(5 * 8), &[0x77; 4096]);
        w.command(
            0,
            Command::Verify {
                peer: node_id(1),
                volume: VOLUME,
                start: None,
                stop: None,
            },
        );
        w.pass(Duration::from_secs(60));
        assert_eq!(
            w.bits(0, 1) << (shifts[0] - 12),
            16,
            "one block of 64 KiB: {:#?}",
            w.log
        );
        w.cut = true;
        w.cut_links();
        w.pass(Duration::from_secs(2));
        w.cut = false;
        w.pass_until("in sync again", 60, World::in_sync);
        w.pass(Duration::from_secs(5));
        no_bits_left(&w);
        w.check_same_data();
    }
}

#[test]
fn what_is_out_of_sync_is_reported_in_sectors_of_whole_blocks() {
    let mut w = world([16, 12], NetOptions::default());
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_secs(2));
    w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    let report = w.nodes[0].resource.snapshot();
    let peer = &report.connections[0].peer_devices[0];
    assert_eq!(peer.out_of_sync_sectors, 128);
}
