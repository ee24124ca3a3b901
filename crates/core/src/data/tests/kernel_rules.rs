//! What a node does beside a kernel of DRBD 9, seen with a live one. Here both nodes treat each other so.

use super::*;

fn kernels(seed: u64) -> World {
    let mut setup = Setup::default();
    setup.options.kernel_rules = true;
    clean(seed, 2, setup)
}

/// A kernel takes no bitmap in StartingSyncT ("unexpected repl_state (SyncTarget) in receive_bitmap"), and asks
/// for blocks that nobody would send.
#[test]
fn a_full_sync_on_request_exchanges_no_bitmaps() {
    let mut w = kernels(1);
    w.write(0, 800, 4096, 7);
    w.pass(Duration::from_secs(1));
    w.invalidate();
    w.pass_until("the resync", 60, World::in_sync);
    assert_eq!(w.packets.get("bitmap"), None, "{:?}", w.packets);
    w.packets.clear();
    let remote = Command::InvalidateRemote {
        peer: node_id(1),
        volume: VOLUME,
        reset_bitmap: true,
    };
    w.command(0, remote);
    w.pass(Duration::from_secs(1));
    w.pass_until("the resync asked for by its source", 60, World::in_sync);
    assert_eq!(w.packets.get("bitmap"), None, "{:?}", w.packets);
    assert!(w.packets["resync request"] > 0, "{:?}", w.packets);
    w.pass(Duration::from_secs(1));
    w.check_idle();
    w.check_same_data();
}

/// A kernel may take the state that answers its attach before its disk is Negotiating, and does nothing then. A
/// bitmap that follows stops it for ever, if no other state comes before.
#[test]
fn an_attaching_kernel_hears_of_the_resync_before_the_bitmap() {
    let mut w = kernels(2);
    let detach = Command::Detach {
        volume: VOLUME,
        force: false,
        diskless: false,
    };
    w.command(1, detach);
    w.pass(Duration::from_secs(1));
    w.write(0, 800, 4096, 7);
    w.pass(Duration::from_secs(1));
    w.sent.clear();
    w.attach(1);
    w.pass_until("the resync", 60, World::in_sync);
    let own: Vec<&str> = w.sent.iter().filter(|s| s.0 == 0).map(|s| s.1).collect();
    let bitmap = own
        .iter()
        .position(|name| *name == "bitmap")
        .expect("a bitmap");
    let states = own[..bitmap].iter().filter(|name| **name == "state");
    assert!(states.count() >= 2, "{own:?}");
}
