//! A resync ends at its target, and the link breaks before the source hears of it.

use super::*;

/// One thing happens, or time passes until something does.
fn go_on(w: &mut World) {
    if w.step() {
        return;
    }
    let ups = w.nodes.iter().enumerate().filter(|(_, n)| n.up);
    let next = ups
        .filter_map(|(i, n)| n.resource.next_timeout().map(|at| (at, i)))
        .min();
    let (at, index) = next.expect("a connected node has timers");
    w.now = w.now.max(at);
    w.input(index, Input::Timeout);
}

fn peer_disk(w: &World, index: usize, peer: usize) -> DiskState {
    let state = &w.nodes[index].resource.state;
    state.peer_device(VOLUME, node_id(peer)).disk
}

/// What became of a resync that was cut off.
#[derive(Default)]
struct Seen {
    /// The target had finished, and the source did not know.
    unheard: u32,
    /// The target lacked something, and the source knew.
    certain: u32,
}

/// Node 1 is resynced by node 0, which writes; both links are cut after so many steps.
fn cut_after(steps: usize, seed: u64, seen: &mut Seen) -> bool {
    let mut w = clean(seed, 2, Setup::default());
    w.cut = true;
    w.cut_links();
    w.pass(Duration::from_millis(10));
    for block in [3, 700, 701, 2000] {
        w.write(0, block * 8, 4096, 1);
    }
    w.pass(Duration::from_secs(1));
    assert_eq!(w.bits(0, 1), 4);
    w.cut = false;
    for step in 0..steps {
        if step % 40 == 39 {
            let block = [3, 30, 2000][step / 40 % 3];
            w.write(0, block * 8, 4096, 2);
        }
        go_on(&mut w);
    }
    let done = w.in_sync();
    let known = peer_disk(&w, 0, 1);
    w.cut = true;
    w.cut_links();
    w.run();
    let (finished, believed) = (
        w.disk_state(1) >= DiskState::Consistent,
        peer_disk(&w, 0, 1),
    );
    if known == DiskState::Inconsistent {
        seen.unheard += u32::from(finished);
        seen.certain += u32::from(believed == DiskState::Inconsistent);
    }
    if finished {
        assert_eq!(believed, DiskState::DUnknown, "seed {seed}, {steps} steps");
        w.write(0, 80, 4096, 3);
        w.pass(Duration::from_secs(1));
        let (mine, theirs) = (w.generation(0), w.generation(1));
        let bare = |uuid: Option<Uuid>| uuid.map(Uuid::without_primary_bit);
        assert_ne!(
            bare(mine),
            bare(theirs),
            "the peer may be promoted: seed {seed}"
        );
    }
    w.cut = false;
    w.pass_until("in sync again", 60, World::in_sync);
    w.check_same_data();
    done
}

#[test]
fn a_target_that_has_finished_unheard_is_not_taken_for_inconsistent() {
    let mut seen = Seen::default();
    for seed in 1..4 {
        let ended = (1..1000).find(|steps| cut_after(*steps, seed, &mut seen));
        assert!(ended.is_some(), "seed {seed}: the resync ends");
    }
    assert!(seen.unheard > 3, "{} ends were not heard of", seen.unheard);
    assert!(seen.certain > 3, "{} were certain", seen.certain);
}
