//! A volume that is added while the nodes are connected.

use super::*;

/// Connected nodes without a volume.
fn connected(seed: u64, count: usize, setup: Setup) -> World {
    let mut w = World::without_volume(seed, count, setup);
    w.pass_until("the connections", 60, |w| {
        (0..w.nodes.len()).all(|a| {
            let states = &w.nodes[a].resource.state.connections;
            states.values().all(|c| c.conn == ConnState::Connected)
        })
    });
    w
}

fn attach(w: &mut World, index: usize) {
    let attach = Command::Attach {
        volume: VOLUME,
        data_path: "data".into(),
        meta_path: Some("meta".into()),
        index: w.setup.index,
        options: w.setup.disk.clone(),
    };
    w.command(index, attach);
}

fn add(w: &mut World, index: usize) {
    let volume = Command::NewVolume {
        volume: VOLUME,
        minor: 0,
        diskless: w.setup.diskless == Some(index),
    };
    w.command(index, volume);
}

fn some_steps(w: &mut World) {
    for _ in 0..w.random(40) {
        w.step();
    }
}

fn joined(w: &World) -> bool {
    let count = w.nodes.len();
    (0..count).all(|a| (0..count).all(|b| a == b || w.repl(a, b) == ReplState::Established))
}

fn skip_first_sync(w: &mut World) {
    let command = Command::NewCurrentUuid {
        volume: VOLUME,
        clear_bitmap: true,
        force_resync: false,
    };
    let id = w.command(0, command);
    w.pass_until("equal disks", 20, World::in_sync);
    w.pass(Duration::from_secs(1));
    assert!(matches!(w.answers.get(&id), Some(Ok(_))), "{:#?}", w.log);
}

/// Promotes node 0, and writes.
fn use_it(w: &mut World) {
    w.command(0, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    let id = w.write(0, 64, 1 << 16, 5);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id), "{:#?}", w.log);
    w.check_same_data();
    w.check_idle();
}

#[test]
fn a_volume_added_node_by_node_is_replicated_without_another_connection() {
    for (seed, count) in [(1, 2), (2, 2), (3, 2), (4, 3), (5, 3), (6, 3)] {
        let mut w = connected(seed, count, Setup::default());
        let links = w.next_link;
        for index in 0..count {
            add(&mut w, index);
            w.pass(Duration::from_millis(200));
            attach(&mut w, index);
            w.pass(Duration::from_secs(1));
        }
        assert!(joined(&w), "seed {seed}: {:#?}", w.log);
        assert_eq!(w.next_link, links, "seed {seed}: {:#?}", w.log);
        skip_first_sync(&mut w);
        use_it(&mut w);
    }
}

#[test]
fn a_volume_added_everywhere_at_once_is_replicated() {
    for seed in 0..60 {
        let count = 2 + seed as usize % 2;
        let mut setup = Setup::default();
        if seed % 5 == 4 {
            setup.diskless = Some(count - 1);
        }
        let mut w = connected(seed, count, setup);
        let mut order: Vec<usize> = (0..count).collect();
        for at in (1..count).rev() {
            let other = w.random(at + 1);
            order.swap(at, other);
        }
        for index in order.clone() {
            add(&mut w, index);
            some_steps(&mut w);
        }
        for index in order {
            if w.setup.diskless != Some(index) {
                attach(&mut w, index);
            }
            some_steps(&mut w);
        }
        w.pass_until("replication", 30, joined);
        w.pass(Duration::from_secs(1));
        for index in 0..count {
            if w.disk_state(index) == DiskState::Diskless && w.setup.diskless != Some(index) {
                // Another node attached at the same time: refused.
                attach(&mut w, index);
                w.pass(Duration::from_secs(1));
            }
        }
        skip_first_sync(&mut w);
        w.command(0, Command::Primary { force: false });
        w.pass(Duration::from_secs(1));
        let id = w.write(0, 64, 1 << 16, 5);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, id), "seed {seed}: {:#?}", w.log);
    }
}

/// The first node has data already when the second one adds the volume.
#[test]
fn who_adds_the_volume_later_gets_the_data() {
    for seed in 0..20 {
        let mut w = connected(seed, 2, Setup::default());
        add(&mut w, 0);
        w.pass(Duration::from_millis(200));
        attach(&mut w, 0);
        w.pass(Duration::from_secs(1));
        w.command(0, Command::Primary { force: true });
        w.pass(Duration::from_secs(1));
        w.write(0, 8, 1 << 20, 9);
        w.pass(Duration::from_secs(1));
        add(&mut w, 1);
        some_steps(&mut w);
        // Not everything that is on its way has arrived.
        w.write(0, 4096, 1 << 18, 7);
        some_steps(&mut w);
        attach(&mut w, 1);
        some_steps(&mut w);
        w.write(0, 8000, 1 << 16, 8);
        w.pass_until("the copy", 60, World::in_sync);
        w.pass(Duration::from_secs(1));
        w.check_idle();
        w.check_same_data();
    }
}

#[test]
fn a_first_sync_is_not_skipped_past_a_disk_that_has_not_joined() {
    let mut refused = 0;
    for seed in 0..40 {
        let mut w = connected(seed, 2, Setup::default());
        for index in 0..2 {
            w.stalled = (index == 1).then_some(0);
            add(&mut w, index);
            w.pass(Duration::from_millis(200));
            attach(&mut w, index);
            w.pass(Duration::from_millis(200));
        }
        w.stalled = None;
        // It is heard of, and does not replicate yet.
        let waits = |w: &World| {
            w.repl(0, 1) == ReplState::Off && w.nodes[0].resource.joining_peer(VOLUME).is_some()
        };
        while !waits(&w) && w.step() {}
        if !waits(&w) {
            continue;
        }
        let command = Command::NewCurrentUuid {
            volume: VOLUME,
            clear_bitmap: true,
            force_resync: false,
        };
        let id = w.command(0, command);
        assert!(matches!(w.answers.get(&id), Some(Err(_))), "seed {seed}");
        refused += 1;
        w.pass_until("replication", 30, joined);
        w.pass(Duration::from_secs(1));
        skip_first_sync(&mut w);
        use_it(&mut w);
    }
    assert!(refused > 0);
}

#[test]
fn a_volume_that_was_taken_away_joins_again() {
    let mut w = connected(1, 2, Setup::default());
    for index in 0..2 {
        add(&mut w, index);
        attach(&mut w, index);
        w.pass(Duration::from_secs(1));
    }
    skip_first_sync(&mut w);
    w.detach(1);
    w.pass(Duration::from_secs(1));
    w.command(1, Command::DelVolume { volume: VOLUME });
    w.pass(Duration::from_secs(1));
    add(&mut w, 1);
    w.pass(Duration::from_millis(300));
    attach(&mut w, 1);
    w.pass_until("the old disk", 60, World::in_sync);
    use_it(&mut w);
}

#[test]
fn a_primary_lets_a_volume_go_that_has_never_had_a_size() {
    let mut w = connected(1, 2, Setup::default());
    let promote = w.command(0, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    assert!(matches!(w.answers.get(&promote), Some(Ok(_))));
    add(&mut w, 0);
    w.pass(Duration::from_secs(1));
    let gone = w.command(0, Command::DelVolume { volume: VOLUME });
    w.pass(Duration::from_secs(1));
    assert!(matches!(w.answers.get(&gone), Some(Ok(_))));
    // One that has been used belongs to the Primary, also without its disk.
    for index in 0..2 {
        add(&mut w, index);
        attach(&mut w, index);
        w.pass(Duration::from_secs(1));
    }
    w.command(0, Command::Primary { force: true });
    w.pass_until("the first sync", 60, World::in_sync);
    w.detach(0);
    w.pass(Duration::from_secs(1));
    let refused = w.command(0, Command::DelVolume { volume: VOLUME });
    w.pass(Duration::from_secs(1));
    assert!(matches!(w.answers.get(&refused), Some(Err(_))));
}

#[test]
fn a_volume_takes_no_requests_that_are_too_small_for_a_disk_of_a_peer() {
    for client in [None, Some(0)] {
        let setup = Setup {
            logical_block_bytes: alloc::vec![512, 2048, 4096],
            diskless: client,
            client: client.is_some(),
            ..Setup::default()
        };
        let mut w = World::new(1, 3, setup);
        let block = |w: &World, index: usize| {
            w.nodes[index].resource.snapshot().devices[0].logical_block_bytes
        };
        w.pass(Duration::from_secs(3));
        assert_eq!([0, 1, 2].map(|index| block(&w, index)), [4096; 3]);
        // It may come back while the volume is in use.
        w.command(
            2,
            Command::Disconnect {
                peer: NodeId(0),
                force: false,
            },
        );
        w.pass(Duration::from_secs(1));
        assert_eq!(block(&w, 0), 4096);
    }
}

#[test]
fn nodes_that_speak_8_4_take_the_first_words() {
    for seed in 0..20 {
        let mut setup = Setup::default();
        setup.options.protocol_max = 101;
        let mut w = connected(seed, 2, setup);
        let first = seed as usize % 2;
        for index in [first, 1 - first] {
            add(&mut w, index);
            if seed < 10 {
                w.pass(Duration::from_millis(200));
            } else {
                some_steps(&mut w);
            }
            attach(&mut w, index);
            w.pass(Duration::from_secs(1));
        }
        w.pass_until("replication", 30, joined);
        skip_first_sync(&mut w);
        use_it(&mut w);
    }
}

/// The volume that is added to a Primary has no data anywhere yet.
#[test]
fn a_primary_makes_a_volume_that_was_added_good_by_force() {
    for (seed, count) in [(1, 2), (2, 2), (3, 3), (4, 3)] {
        let mut w = connected(seed, count, Setup::default());
        w.command(0, Command::Primary { force: false });
        w.pass(Duration::from_secs(1));
        for index in 0..count {
            add(&mut w, index);
            w.pass(Duration::from_millis(200));
            attach(&mut w, index);
            w.pass(Duration::from_secs(1));
        }
        assert!(joined(&w), "seed {seed}: {:#?}", w.log);
        assert_eq!(w.disk_state(0), DiskState::Inconsistent);
        let id = w.command(0, Command::Primary { force: true });
        w.pass_until("the first sync", 60, World::in_sync);
        assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
        let generation = w.generation(0);
        let again = w.command(0, Command::Primary { force: true });
        use_it(&mut w);
        assert!(matches!(w.answers.get(&again), Some(Ok(_))));
        assert_eq!(w.generation(0), generation, "good data stay what they are");
    }
}
