//! Extents of the activity log that received writes wait for (metadata.md, 9).

use super::*;

const EXTENT_SECTORS: u64 = 8192;

/// Three nodes; only the log of node 0 has room for all that is written.
fn small_logs(seed: u64, protocol: Protocol) -> World {
    let net = Setup::default().net;
    let setup = |al_extents| Setup {
        size: 512 << 20,
        net: NetOptions {
            protocol,
            ..net.clone()
        },
        disk: DiskOptions {
            al_extents,
            ..DiskOptions::default()
        },
        ..Setup::default()
    };
    let mut w = World::stopped(seed, 3, setup(1237));
    w.start(0);
    w.setup = setup(67);
    w.start(1);
    w.start(2);
    w.start_clean();
    w
}

/// The disk of node 1 writes its log, and no data.
fn run_without_data(w: &mut World) {
    w.hanging.node = Some(1);
    loop {
        w.run();
        let held = core::mem::take(&mut w.hanging.held);
        let (meta, data): (Vec<Todo>, Vec<Todo>) =
            (held.into_iter()).partition(|todo| matches!(todo, Todo::Meta(..)));
        w.hanging.held = data;
        if meta.is_empty() {
            return;
        }
        w.todo.extend(meta);
    }
}

/// All data are written now, and everything written is on all disks in the end.
fn all_are_written(w: &mut World, ids: &[u64]) {
    w.hanging.node = None;
    let held = core::mem::take(&mut w.hanging.held);
    w.todo.extend(held);
    w.pass(Duration::from_secs(2));
    let left: Vec<usize> = (0..ids.len()).filter(|n| !w.done(0, ids[*n])).collect();
    assert_eq!(left, [], "{:#?}", w.packets);
    w.check_idle();
    w.check_same_data();
}

/// The second write waits until the first one is on the disk, and needs an extent more. The others need every
/// extent of the log, and keep theirs until a peer ack, which comes in the order of the writes.
#[test]
fn a_write_that_waits_for_another_keeps_its_place_in_the_log() {
    for seed in 0..4 {
        let mut w = small_logs(seed, Protocol::A);
        let mut ids = vec![w.write(0, EXTENT_SECTORS - 16, 8192, 1)];
        run_without_data(&mut w);
        ids.push(w.write(0, EXTENT_SECTORS - 8, 8192, 2));
        run_without_data(&mut w);
        ids.extend((2..100).map(|n| w.write(0, n * EXTENT_SECTORS, 4096, 3)));
        run_without_data(&mut w);
        all_are_written(&mut w, &ids);
    }
}

/// The second write is sent in another epoch, since the first one is acked before. Of that one's epoch some writes wait for extents
/// that others of it hold until they are confirmed.
#[test]
fn what_is_written_of_an_epoch_is_confirmed_though_its_barrier_has_come() {
    for seed in 0..4 {
        let mut w = small_logs(seed, Protocol::C);
        let mut ids = vec![
            w.write(0, EXTENT_SECTORS - 16, 8192, 1),
            w.write(0, EXTENT_SECTORS - 8, 8192, 2),
        ];
        ids.extend((2..100).map(|n| w.write(0, n * EXTENT_SECTORS, 4096, 3)));
        run_without_data(&mut w);
        all_are_written(&mut w, &ids);
    }
}
