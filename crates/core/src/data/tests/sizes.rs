//! Nodes with disks of unlike sizes, connected one after the other (semantics.md, 22).

use lockstep_format::wire::DeviceDescFlags;

use super::*;

/// Node 0's disk is the smallest.
fn unlike(seed: u64, count: usize) -> World {
    let mut w = World::stopped(seed, count, Setup::default());
    w.nodes[0].data_bytes = SIZE / 2;
    w
}

#[test]
fn a_smaller_primary_far_away_sets_the_size_of_a_node_that_joins() {
    for seed in 1..9 {
        let mut w = unlike(seed, 3);
        w.apart = vec![(0, 2)];
        w.start(0);
        w.pass(Duration::from_secs(1));
        w.command(0, Command::Primary { force: true });
        w.pass(Duration::from_secs(1));
        w.start(1);
        w.pass(Duration::from_secs(4));
        w.start(2);
        w.pass_until("the far node", 20, |w| {
            w.nodes[2].resource.state.conn(node_id(1)) == ConnState::Connected
        });
        w.apart.clear();
        w.pass_until("the resync", 30, World::in_sync);
        w.check_same_data();
    }
}

fn size(w: &World, node: usize) -> u64 {
    w.nodes[node].resource.devices[&VOLUME].size_sectors
}

/// Nodes 1 and 2 are larger than node 0 and know each other; node 0 comes as a Primary, and meets node 1.
fn larger_ones_meet_a_primary(seed: u64, with_data: bool) -> World {
    let mut w = unlike(seed, 3);
    w.apart = vec![(0, 1), (0, 2)];
    for node in 0..3 {
        w.start(node);
    }
    w.pass(Duration::from_secs(3));
    if with_data {
        w.command(2, Command::Primary { force: true });
        w.pass(Duration::from_secs(1));
    }
    w.command(0, Command::Primary { force: true });
    w.pass(Duration::from_secs(1));
    assert!(size(&w, 0) < size(&w, 1) && size(&w, 1) == size(&w, 2));
    w.apart = vec![(0, 2)];
    w.pass(Duration::from_secs(5));
    w
}

#[test]
fn larger_nodes_without_data_take_the_size_of_one_that_has_some() {
    for seed in 1..9 {
        let mut w = larger_ones_meet_a_primary(seed, false);
        let conn = w.nodes[0].resource.state.conn(node_id(1));
        assert_eq!(conn, ConnState::Connected, "seed {seed} {:#?}", w.log);
        // Node 2 never meets node 0.
        let sizes = [1, 2].map(|node| size(&w, node));
        assert_eq!(sizes, [size(&w, 0); 2], "seed {seed} {:#?}", w.log);
        w.apart.clear();
        w.pass_until("the resync", 30, World::in_sync);
        w.check_same_data();
    }
}

#[test]
fn larger_nodes_with_data_refuse_a_smaller_one() {
    for seed in 1..9 {
        let w = larger_ones_meet_a_primary(seed, true);
        for (node, peer) in [(0, 1), (1, 0)] {
            let conn = w.nodes[node].resource.state.conn(node_id(peer));
            assert_eq!(conn, ConnState::StandAlone, "seed {seed} {:#?}", w.log);
        }
        assert!(size(&w, 0) < size(&w, 1) && size(&w, 1) == size(&w, 2));
    }
}

/// A kernel takes the disk of a third node, which it has not met yet, to be as small as it was, and cannot read a
/// bitmap of another length than its own (seen live).
#[test]
fn a_kernel_that_was_away_during_a_growth_is_told_that_the_third_node_has_room() {
    for seed in 1..5 {
        let mut setup = Setup::default();
        setup.options.kernel_rules = true;
        let mut w = clean(seed, 3, setup);
        let (before, grown) = (size(&w, 0), size(&w, 0) + 8192);
        w.apart = vec![(0, 2), (1, 2)];
        w.cut_links();
        w.pass_until("two nodes", 20, |w| w.repl(0, 1) == ReplState::Established);
        for node in 0..3 {
            w.nodes[node].data_bytes += 4 << 20;
        }
        let resize = Command::Resize {
            volume: VOLUME,
            size_sectors: 0,
            assume_clean: false,
            assume_peer_has_space: true,
        };
        w.command(0, resize);
        w.pass_until("the new size", 20, |w| size(w, 1) == grown);
        w.apart = vec![(1, 2)];
        w.log.clear();
        let (mut told, mut links) = (false, Vec::new());
        while w.repl(0, 2) != ReplState::Established || w.disk_state(2) != DiskState::UpToDate {
            for (key, sent) in &mut w.wires {
                for (_, packet, _) in sent {
                    match (key, packet) {
                        ((2, 0, _, true), Packet::Sizes(sizes)) if !told => {
                            sizes.c_size = Sector(before);
                        }
                        ((0, 2, link, true), Packet::Sizes(sizes)) => {
                            let assumes = DeviceDescFlags::ASSUME_UNCONNECTED_PEER_HAS_SPACE;
                            told |= sizes.dds_flags.contains(assumes);
                            if told
                                && w.nodes[0].resource.state.conn(node_id(2))
                                    == ConnState::Connecting
                            {
                                assert_eq!((sizes.d_size.0, sizes.c_size.0), (grown, grown));
                            }
                            links.push(*link);
                        }
                        _ => {}
                    }
                }
            }
            super::kernel_rules::step(&mut w);
        }
        assert!(told, "{:#?}", w.log);
        links.dedup();
        assert_eq!(links.len(), 1, "{:#?}", w.log);
        w.apart.clear();
        w.pass_until("in sync", 60, World::in_sync);
        w.check_same_data();
    }
}
