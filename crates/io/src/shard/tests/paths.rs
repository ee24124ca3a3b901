//! Connections with several paths: which one is in use, and what follows when it is taken away.

use super::*;

#[test]
fn a_link_whose_path_is_removed_ends_and_comes_back_on_another() {
    on_both_rings(|ring| {
        let env = env();
        let (Some(a), Some(b)) = (Node::new(ring, &env), Node::new(ring, &env)) else {
            return;
        };
        let nodes = [a, b];
        let addresses = [[unique(), unique()], [unique(), unique()]];
        let path = |n: usize, path: usize| Path {
            local: addresses[n][path],
            peer: addresses[1 - n][path],
        };
        let tell = |n: usize, paths: &[usize]| {
            let mut net = net(addresses[n][0], addresses[1 - n][0]);
            net.paths = paths.iter().map(|p| path(n, *p)).collect();
            let node: &Node = &nodes[n];
            node.shard.set_peer(node.id, NodeId(1), net);
        };
        let connect_both = || {
            let answers = nodes
                .each_ref()
                .map(|node| node.shard.command(node.id, connect()));
            for answer in answers {
                answer.recv().unwrap().unwrap();
            }
            for node in &nodes {
                assert!(matches!(node.told.recv().unwrap(), Told::Up { .. }));
            }
        };
        let used = |n: usize| {
            let node: &Node = &nodes[n];
            let view = node.shard.view(node.id).unwrap().unwrap();
            view.paths.get(&NodeId(1))?.first().copied()
        };
        assert_eq!(used(0), None);
        for (n, node) in nodes.iter().enumerate() {
            node.attach(&format!("ram:{DISK_BYTES}:paths-{ring:?}-{n}"));
            // One end knows both.
            tell(n, if n == 0 { &[0, 1] } else { &[1] });
        }
        connect_both();
        assert_eq!((used(0), used(1)), (Some(path(0, 1)), Some(path(1, 1))));

        // A new path leaves the link alone; without the one in use it ends.
        tell(1, &[1, 0]);
        assert_eq!(used(1), Some(path(1, 1)));
        tell(0, &[0]);
        for node in &nodes {
            assert!(matches!(node.told.recv().unwrap(), Told::Down(_)));
        }
        assert_eq!((used(0), used(1)), (None, None));
        connect_both();
        assert_eq!((used(0), used(1)), (Some(path(0, 0)), Some(path(1, 0))));
    });
}
