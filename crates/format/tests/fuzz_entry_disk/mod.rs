//! What the metadata fuzzers call: the readers with any bytes a disk may hold, and the properties
//! that must hold whatever they are. Shared by the smoke test here and the targets in `/fuzz`.

use lockstep_format::disk::al::{self, AlForm, Block};
use lockstep_format::disk::any::AnySuperBlock;
use lockstep_format::disk::layout::{AlGeometry, Placement};
use lockstep_format::disk::{dump, gi, v08, v09};
use lockstep_format::units::NodeId;

/// A superblock of either format, and the layout it describes on devices of several sizes.
pub(crate) fn superblock(data: &[u8]) {
    let mut block = [0; 4096];
    let len = data.len().min(4096);
    block[..len].copy_from_slice(&data[..len]);
    let _ = v08::SuperBlock::decode(&block);
    let _ = v09::SuperBlock::decode(&block);
    let Ok(read) = AnySuperBlock::decode(&block) else {
        return;
    };
    let mut written = [0; 4096];
    read.encode(&mut written);
    assert!(
        AnySuperBlock::decode(&written).as_ref() == Ok(&read),
        "written is read again"
    );
    for placement in [
        Placement::Internal,
        Placement::FlexExternal,
        Placement::Indexed(1),
    ] {
        for device_bytes in [0, 4096, 1 << 20, 64 << 20, 1 << 30, 1 << 50] {
            let Ok(layout) = read.layout(placement, device_bytes) else {
                continue;
            };
            let end = |start: u64, len: u64| start.checked_add(len).unwrap();
            let al_end = end(layout.al_byte(), layout.geometry().al.bytes());
            let bitmap_end = end(layout.bitmap_byte(), layout.bitmap_area_bytes());
            assert!(
                al_end <= device_bytes && bitmap_end <= device_bytes,
                "within the device"
            );
            assert!(layout.usable_sectors(u64::MAX) <= layout.tool_usable_sectors());
            let shape = layout.bitmap_shape(read.effective_size().0);
            assert!(
                shape.area_bytes() <= layout.bitmap_area_bytes(),
                "the bitmap fits"
            );
        }
    }
}

/// A list of generations as `set-gi` gets it, behind a superblock: what was taken reads back.
pub(crate) fn generations(data: &[u8]) {
    let Some((block, list)) = data.split_first_chunk::<4096>() else {
        return;
    };
    let (Ok(mut superblock), Ok(list)) = (AnySuperBlock::decode(block), std::str::from_utf8(list))
    else {
        return;
    };
    let before = superblock.clone();
    let node = NodeId(list.len() as u8 % 32);
    if gi::apply(&mut superblock, node, list).is_err() {
        assert!(superblock == before, "an error changes nothing");
        return;
    }
    let printed = gi::print(&superblock, node);
    gi::picture(&superblock, node);
    let mut again = superblock.clone();
    assert!(gi::apply(&mut again, node, &printed).is_ok(), "{printed}");
    assert!(again == superblock, "{printed} is read as it was printed");
}

/// An activity log of eight blocks in each form.
pub(crate) fn activity_log(data: &[u8]) {
    let mut area = vec![0; 8 * 4096];
    let len = data.len().min(area.len());
    area[..len].copy_from_slice(&data[..len]);
    for block in area.chunks_exact(4096) {
        if let Ok(read) = Block::decode(block.first_chunk().unwrap()) {
            let mut written = [0; 4096];
            read.encode(&mut written);
            assert_eq!(Block::decode(&written).as_ref(), Ok(&read));
        }
    }
    let geometry = AlGeometry::DEFAULT;
    if let Ok(replay) = al::replay(&area, geometry) {
        assert!(replay.active.len() <= al::SLOTS_MAX);
        assert!(replay.active.is_sorted());
    }
    let form = AlForm::of(&area, geometry, true);
    let _ = al::replay_persistent_memory(&area, 67);
    let _ = al::replay_legacy(&area, 1237);
    let _ = dump::print_al(&area, geometry, 67, form);
}

/// The text of a dump.
pub(crate) fn dump_text(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(parsed) = dump::parse(&text) {
        let slots = usize::from(parsed.superblock.geometry().max_peers);
        assert_eq!(parsed.bitmap.len(), slots);
    }
}
