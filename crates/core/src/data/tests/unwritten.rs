//! Generations under which nothing was written (`unwritten.rs`), and those that look so.

use super::*;

/// Node 2 is cut off with a write on its way to all, and the Primary goes on with node 1, which gets nothing more before
/// the Primary dies. Node 2 is made Primary by force. Then the two meet.
fn parted(seed: u64, lost_write: bool) -> World {
    let mut w = clean(seed, 3, Setup::default());
    w.write(0, 8000, 4096, 99);
    w.pass(Duration::from_secs(2));
    let kind = RequestKind::Write { fua: false };
    let id = lost_write.then(|| w.request(0, kind, 0, 4096, 7));
    w.apart.push((0, 2));
    w.apart.push((1, 2));
    w.cut_links_between(0, 2);
    w.cut_links_between(1, 2);
    if !lost_write {
        w.command(
            0,
            Command::NewCurrentUuid {
                volume: VOLUME,
                clear_bitmap: false,
                force_resync: false,
            },
        );
    }
    w.pass(Duration::from_millis(300));
    if let Some(id) = id {
        assert!(w.done(0, id), "seed {seed}");
    }
    let name = |n| w.generation(n).map(Uuid::without_primary_bit);
    assert_eq!(name(0), name(1), "seed {seed}");
    w.crash(0);
    w.pass(Duration::from_secs(1));
    w.command(2, Command::Primary { force: true });
    w.pass(Duration::from_secs(1));
    w.write(2, 80, 4096, 8);
    w.pass(Duration::from_secs(1));
    w.command(2, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    w.apart.retain(|pair| *pair != (1, 2));
    w.pass(Duration::from_secs(5));
    w
}

#[test]
fn a_write_that_was_settled_later_is_not_taken_for_none() {
    for seed in 700..720 {
        let w = parted(seed, true);
        assert_eq!(w.nodes[1].data.block(0)[0], 7, "seed {seed}");
        assert_eq!(w.nodes[2].data.block(10)[0], 8, "seed {seed}");
        assert_eq!(w.repl(1, 2), ReplState::Off, "seed {seed}");
    }
}

#[test]
fn under_a_generation_without_writes_nothing_is_kept() {
    for seed in 700..720 {
        let w = parted(seed, false);
        assert_eq!(w.nodes[1].data.block(10)[0], 8, "seed {seed}");
        assert_eq!(w.repl(1, 2), ReplState::Established, "seed {seed}");
    }
}
