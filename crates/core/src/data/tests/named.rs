//! Metadata that name a generation before they were ever attached (metadata.md, 7: day 0).

use super::*;
use lockstep_format::disk::v09::DeviceFlags;

const DAY_0: Uuid = Uuid(0xC1E4_00DA_7000_DA7A);

/// Changes the superblock of a node that was not started yet.
fn edit(w: &mut World, index: usize, change: impl FnOnce(&mut SuperBlock)) {
    let peers = w.nodes.len() as u8 - 1;
    let geometry = Geometry::for_peers(peers);
    let layout = Layout::new(Placement::Internal, geometry, SIZE).unwrap();
    let at = layout.superblock_byte() as usize;
    let block = w.nodes[index].meta[at..].first_chunk_mut().unwrap();
    let mut superblock = SuperBlock::decode(block).unwrap();
    change(&mut superblock);
    superblock.encode(block);
}

/// `create-md --initial-current-uuid=DAY_0 --uptodate --rotate-uuids` on node 0.
fn first_node(w: &mut World) {
    edit(w, 0, |superblock| {
        superblock.flags |= DeviceFlags::CONSISTENT | DeviceFlags::WAS_UP_TO_DATE;
        superblock.current_uuid = Uuid(0x1234_5678_9ABC_DEF0);
        superblock.history[0] = DAY_0;
        for peer in &mut superblock.peers {
            peer.bitmap_uuid = DAY_0;
        }
    });
}

#[test]
fn a_client_of_day_0_that_gets_a_disk_of_day_0_is_sent_what_was_written_since() {
    for writes in [0, 3] {
        let setup = Setup {
            diskless: Some(1),
            client: true,
            index: MetaIndex::Internal,
            ..Setup::default()
        };
        let mut w = World::stopped(11, 2, setup);
        first_node(&mut w);
        edit(&mut w, 1, |superblock| superblock.current_uuid = DAY_0);
        w.start(0);
        w.start(1);
        w.pass(Duration::from_secs(3));
        if writes > 0 {
            w.command(0, Command::Primary { force: false });
            w.pass(Duration::from_secs(1));
        }
        for n in 0..writes {
            w.write(0, n * 800, 4096, 7);
        }
        w.pass(Duration::from_secs(1));
        let options = Command::PeerDeviceOptions {
            peer: node_id(1),
            volume: VOLUME,
            options: PeerDeviceOptions::default(),
        };
        w.command(0, options);
        w.pass(Duration::from_secs(1));
        assert_eq!(w.bits(0, 1), writes);
        w.packets.clear();
        w.attach(1);
        w.pass(Duration::from_secs(1));
        w.pass_until("the resync", 20, World::in_sync);
        let copied = w.packets.get("rs data reply").copied().unwrap_or(0);
        assert_eq!(copied, writes, "{:#?}", w.packets);
        w.check_same_data();
    }
}
