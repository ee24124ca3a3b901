//! `read-balancing`: where a Primary with a good disk reads (semantics.md, 16.1).

use super::*;
use crate::data::balance::ReadPath;
use crate::options::ReadBalancing;

const READS: u64 = 40;

/// Two nodes in sync, node 0 Primary with the policy, 40 blocks of 4 KiB written.
fn world(policy: ReadBalancing) -> World {
    let mut w = clean(3, 2, Setup::default());
    let options = DiskOptions {
        al_extents: 67,
        read_balancing: policy,
        ..DiskOptions::default()
    };
    let volume = VOLUME;
    w.command(0, Command::DiskOptions { volume, options });
    for n in 0..READS {
        w.write(0, n * 8, 4096, 1 + n as u8);
    }
    w.pass(Duration::from_secs(1));
    w
}

/// How many of the reads went to the peer.
fn remote_reads(w: &mut World) -> u64 {
    let before = requests(w);
    for n in 0..READS {
        assert_eq!(w.read(0, n * 8, 4096), vec![1 + n as u8; 4096]);
    }
    requests(w) - before
}

fn requests(w: &World) -> u64 {
    w.packets.get("data request").copied().unwrap_or(0)
}

#[test]
fn each_policy_reads_where_it_says() {
    let shares = [
        (ReadBalancing::PreferLocal, 0),
        (ReadBalancing::PreferRemote, READS),
        (ReadBalancing::RoundRobin, READS / 2),
        // Every read finds both sides idle.
        (ReadBalancing::LeastPending, 0),
        (ReadBalancing::WhenCongestedRemote, 0),
        // 160 KiB: the stripes 1 and 3 of five.
        (ReadBalancing::Striping(15), 16),
    ];
    for (policy, share) in shares {
        let mut w = world(policy);
        assert_eq!(remote_reads(&mut w), share, "{policy:?}");
        w.check_idle();
    }
}

#[test]
fn without_a_good_peer_every_policy_reads_here() {
    let mut w = world(ReadBalancing::PreferRemote);
    w.crash(1);
    w.pass(Duration::from_secs(20));
    assert_eq!(remote_reads(&mut w), 0);
}

#[test]
fn reads_at_a_lost_peer_come_from_the_local_disk() {
    let mut w = world(ReadBalancing::PreferRemote);
    let ids: Vec<u64> = (0..10)
        .map(|n| w.request(0, RequestKind::Read, n * 8, 4096, 0))
        .collect();
    w.crash(1);
    w.pass(Duration::from_secs(20));
    assert!(ids.iter().all(|id| w.done(0, *id)), "{:#?}", w.log);
    assert!(
        w.nodes[0].resource.devices[&VOLUME]
            .io
            .read_paths
            .is_empty()
    );
}

#[test]
fn a_queue_in_front_of_the_local_disk_sends_reads_to_a_quicker_peer() {
    let mut w = world(ReadBalancing::WhenCongestedRemote);
    let mut go = |local_depth: u32, local_us: u64, peer_us: u64| {
        let now = w.now;
        let path = |depth, us: u64| ReadPath::known(depth, us * 1000, now);
        let device = w.nodes[0].resource.devices.get_mut(&VOLUME).unwrap();
        device.io.local_reads = path(local_depth, local_us);
        device.io.read_paths.insert(node_id(1), path(0, peer_us));
        let before = requests(&w);
        assert_eq!(w.read(0, 8, 4096), vec![2; 4096]);
        requests(&w) - before == 1
    };
    assert!(!go(3, 1000, 10), "three reads are no queue");
    assert!(go(8, 1000, 200), "9 ms here, 0.2 ms there");
    assert!(!go(8, 20, 200), "0.18 ms here, 0.2 ms there");
    assert!(go(8, 100, 0), "the peer is measured first");
}
