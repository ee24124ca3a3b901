//! Two sides went on from one generation, and one of them has written nothing since (13.5).

use super::*;

/// Both have left generation 0x10: A for 0x20, B for 0x30, with marks on both sides.
fn parted() -> Case {
    Case::new(0x20, 0x30).with(|c| {
        c.features = Features::LOCKSTEP;
        slot(&mut c.a, B, 0x10);
        slot(&mut c.b, A, 0x10);
        c.a.uuids.dirty_bits = 3;
        c.b.uuids.dirty_bits = 5;
    })
}

#[test]
fn who_has_written_nothing_is_the_target() {
    parted().expect(Strategy::SplitBrainDisconnect, Rule::BitmapBoth);
    let unwritten = parted().with(|c| flag(&mut c.a, UuidFlags::UNWRITTEN));
    unwritten.expect(Strategy::TargetUseBitmap, Rule::HistoryPeer);
    // A kernel says nothing of the kind.
    let mut kernel = unwritten.clone();
    kernel.features = Features::empty();
    kernel.expect(Strategy::SplitBrainDisconnect, Rule::BitmapBoth);
    // Its applications write.
    let mut primary = unwritten.clone();
    primary.a.role = Role::Primary;
    assert!(primary.decide().strategy.is_split_brain());
    // The other one has lost what was in its cache, and this one has not.
    let mut lost = unwritten.clone();
    flag(&mut lost.b, UuidFlags::CACHE_LOST);
    lost.expect(Strategy::SplitBrainDisconnect, Rule::BitmapBoth);
    flag(&mut lost.a, UuidFlags::CACHE_LOST);
    lost.expect(Strategy::TargetUseBitmap, Rule::HistoryPeer);
    // The other one has nothing to give.
    let mut copied = unwritten;
    copied.b.disk = DiskState::Inconsistent;
    assert_ne!(copied.decide().strategy, Strategy::TargetUseBitmap);
}

#[test]
fn of_two_that_have_written_nothing_the_better_disk_is_the_source() {
    let mut both = parted();
    flag(&mut both.a, UuidFlags::UNWRITTEN);
    flag(&mut both.b, UuidFlags::UNWRITTEN);
    both.expect(Strategy::SourceUseBitmap, Rule::HistorySelf);
    // The other one follows a Primary, which may write under that generation at any time.
    let mut followed = both.clone();
    followed.b.uuids.flags.remove(UuidFlags::STABLE);
    followed.b.uuids.node_mask = NodeMask::of(NodeId(2));
    followed.expect(Strategy::TargetUseBitmap, Rule::HistoryPeer);
    both.a.disk = DiskState::Outdated;
    both.expect(Strategy::TargetUseBitmap, Rule::HistoryPeer);
}

#[test]
fn without_a_slot_the_newest_of_the_history_is_meant() {
    let mut c = parted().with(|c| flag(&mut c.a, UuidFlags::UNWRITTEN));
    slot(&mut c.a, B, 0);
    c.a.uuids.history[0] = Uuid(0x10);
    c.expect(Strategy::TargetSetBitmap, Rule::HistoryPeer);
    c.a.uuids.history = Default::default();
    c.a.uuids.history[0] = Uuid(0x50);
    c.expect(Strategy::UnrelatedData, Rule::NoRelation);
}

/// Both call each other older: A took 0x20 and wrote nothing, B is where A comes from, and a third node at A's
/// generation was copied from B.
#[test]
fn who_lost_its_cache_is_no_source_of_who_has_written_nothing() {
    let mut c = Case::new(0x20, 0x10).with(|c| {
        c.features = Features::LOCKSTEP;
        slot(&mut c.a, B, 0x10);
        slot(&mut c.b, NodeId(2), 0x20);
        flag(&mut c.a, UuidFlags::UNWRITTEN);
    });
    c.expect(Strategy::TargetSetBitmap, Rule::HistoryPeer);
    flag(&mut c.b, UuidFlags::CACHE_LOST);
    c.expect(Strategy::SourceSetBitmap, Rule::HistorySelf);
    // What it has marked may be nowhere else.
    let mut marked = c.clone();
    marked.b.uuids.dirty_bits = 3;
    marked.expect(Strategy::SplitBrainDisconnect, Rule::Contradiction);
    // Neither may a Primary be overwritten, nor does a generation of its own yield.
    let mut primary = c.clone();
    primary.b.role = Role::Primary;
    primary.expect(Strategy::SplitBrainDisconnect, Rule::Contradiction);
    slot(&mut c.a, B, 0x50);
    slot(&mut c.a, NodeId(3), 0x10);
    c.expect(Strategy::SplitBrainDisconnect, Rule::Contradiction);
}

/// B is copied from a third node, which is at A's generation, as its slot says; it names a generation that A has left.
#[test]
fn a_target_of_a_third_node_is_not_newer_than_that_one() {
    let mut c = Case::new(0x20, 0x10).with(|c| {
        c.features = Features::LOCKSTEP;
        c.a.uuids.history[0] = Uuid(0x10);
        slot(&mut c.b, NodeId(2), 0x20);
        c.b.disk = DiskState::Inconsistent;
        flag(&mut c.b, UuidFlags::INCONSISTENT);
    });
    // Not a target: it has gone on from there.
    c.expect(
        Strategy::TargetClearBitmap(NodeId(2)),
        Rule::BitmapPeerOther,
    );
    flag(&mut c.b, UuidFlags::SYNC_TARGET);
    c.expect(Strategy::SourceSetBitmap, Rule::HistorySelf);
}
