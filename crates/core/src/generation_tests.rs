//! Rules of the UUID set one by one, and the invariants of semantics.md 23.5 over random histories.

use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::compare::{Handshake, Phase, Side, Strategy, compare};
use crate::options::NetOptions;
use lockstep_format::wire::Features;

const ME: NodeId = NodeId(0);
const B: NodeId = NodeId(1);
const C: NodeId = NodeId(2);

fn view(node: NodeId, disk: DiskState) -> PeerView {
    let connected = disk != DiskState::DUnknown;
    PeerView {
        node,
        disk,
        connected,
        has_bitmap: true,
    }
}

fn rotation<'a>(peers: &'a [PeerView]) -> Rotation<'a> {
    Rotation {
        peers,
        weak: NodeMask::EMPTY,
        dagtag: Dagtag(7),
    }
}

/// A set with bitmap slots for nodes 1 and 2 and a current UUID.
fn set() -> Generations {
    let mut set = Generations::just_created(ME, 2);
    set.allocate_slot(B);
    set.allocate_slot(C);
    set.current = Uuid(0x100);
    set
}

fn named(current: u64, slots: &[(NodeId, u64)]) -> PeerUuids {
    let mut set = PeerUuids {
        current: Uuid(current),
        ..PeerUuids::default()
    };
    for (node, uuid) in slots {
        set.bitmap[usize::from(node.0)] = Uuid(*uuid);
        set.slots.insert(*node);
    }
    set
}

#[test]
fn history_takes_each_ancestor_once_and_newest_first() {
    let mut set = set();
    set.push_history(Uuid(0x11));
    set.push_history(Uuid(0x20));
    for ignored in [0, 4, 0x100, 0x101, 0x20, 0x21, 0x10, u64::MAX] {
        set.push_history(Uuid(ignored));
    }
    assert_eq!(set.history[..3], [Uuid(0x20), Uuid(0x10), Uuid(0)]);
    set.slots[1].bitmap_uuid = Uuid(0x31);
    set.push_history(Uuid(0x30));
    assert_eq!(set.history[0], Uuid(0x20));
}

#[test]
fn the_first_entry_of_the_history_is_kept_even_if_a_slot_holds_it() {
    let mut set = set();
    set.slots[1].bitmap_uuid = Uuid(0x30);
    set.push_history(Uuid(0x30));
    assert_eq!(set.history[0], Uuid(0x30));
}

#[test]
fn history_overflows_at_its_old_end() {
    let mut set = set();
    for uuid in 1..=40u64 {
        set.push_history(Uuid(uuid * 0x1000));
    }
    assert_eq!(set.history[0], Uuid(40 * 0x1000));
    assert_eq!(set.history[31], Uuid(9 * 0x1000));
}

#[test]
fn a_new_generation_marks_the_absent_peer_only() {
    let mut rng = Rng::new(1);
    let mut set = set();
    set.history[0] = Uuid(0x50);
    let peers = [view(B, DiskState::UpToDate), view(C, DiskState::DUnknown)];
    let new = set.new_current(&rotation(&peers), Role::Primary, &mut rng);
    assert_eq!(new, Some(set.current));
    assert_eq!(set.current.0 & 1, 1);
    assert_eq!(set.slot(B).bitmap_uuid, Uuid(0));
    assert_eq!(set.slot(C).bitmap_uuid, Uuid(0x100));
    assert_eq!(set.slot(C).bitmap_dagtag, Dagtag(7));
    // Nothing changes for a peer that already diverged.
    let before = set.clone();
    assert_eq!(
        set.new_current(&rotation(&peers), Role::Primary, &mut rng),
        None
    );
    assert_eq!(set.current, before.current);
    assert_eq!(set.slot(C), before.slot(C));
    // A weak peer does not follow although it looks UpToDate.
    let weak = Rotation {
        weak: NodeMask::of(B),
        ..rotation(&peers)
    };
    assert!(set.new_current(&weak, Role::Primary, &mut rng).is_some());
    assert_eq!(set.slot(B).bitmap_uuid, before.current);
}

#[test]
fn a_diskless_client_without_bitmap_is_no_reason_for_a_generation() {
    let mut rng = Rng::new(1);
    let mut set = Generations::just_created(ME, 1);
    set.current = Uuid(0x100);
    set.history[0] = Uuid(0x50);
    set.allocate_slot(B);
    let client = PeerView {
        has_bitmap: false,
        ..view(C, DiskState::Diskless)
    };
    let peers = [view(B, DiskState::UpToDate), client];
    assert_eq!(
        set.new_current(&rotation(&peers), Role::Primary, &mut rng),
        None
    );
    assert_eq!(set.slot(C).bitmap_uuid, Uuid(0));
}

#[test]
fn day_zero_goes_to_the_history_and_to_the_unused_slots() {
    let mut rng = Rng::new(1);
    let mut set = Generations::just_created(ME, 3);
    set.current = Uuid(0x100);
    set.allocate_slot(B);
    assert!(set.is_day0());
    let peers = [view(B, DiskState::UpToDate)];
    assert!(
        set.new_current(&rotation(&peers), Role::Primary, &mut rng)
            .is_some()
    );
    assert_eq!(set.history[0], Uuid(0x100));
    assert_eq!(set.slot(NodeId(9)).bitmap_uuid, Uuid(0x100));
    assert_eq!(set.slot(B).bitmap_uuid, Uuid(0));
    assert_eq!(set.slot(ME).bitmap_uuid, Uuid(0));
    assert!(!set.is_day0());
    // It is advertised with the lowest unused node id.
    let context = SendContext {
        receiver: B,
        resolved_current: None,
        target_of: NodeMask::EMPTY,
        dirty_bits: 3,
        flags: UuidFlags::STABLE,
        node_mask: NodeMask::EMPTY,
    };
    let sent = set.to_send(&context);
    assert_eq!(sent.flags.unallocated_slot(), Some(2));
    assert_eq!(sent.slots, NodeMask(0b110));
    assert_eq!((sent.slot(B), sent.slot(C)), (Uuid(0), Uuid(0x100)));
    assert_eq!(sent.slot(ME), Uuid::ALL_ONES);
    // A node that comes later gets a slot that remembers everything since.
    assert_eq!(set.allocate_slot(C), Some(1));
    assert_eq!(set.slot(C).bitmap_uuid, Uuid(0x100));
    // Forgetting it gives the slot back to day 0.
    let forgotten = set.forget_peer(C, false);
    assert_eq!(
        forgotten,
        Some(Forgotten {
            freed: 1,
            copy_from: Some(2)
        })
    );
    assert_eq!(set.slot(C).bitmap_uuid, Uuid(0x100));
    assert_eq!(
        set.forget_peer(B, true),
        Some(Forgotten {
            freed: 0,
            copy_from: Some(1)
        })
    );
    assert_eq!(set.slot(B).flags, PeerFlags::NODE_EXISTS);
    assert_eq!(set.slot(B).bitmap_uuid, Uuid(0));
}

#[test]
fn a_removed_peer_that_still_has_a_slot_is_tracked() {
    let mut rng = Rng::new(1);
    let mut set = Generations::just_created(ME, 2);
    set.current = Uuid(0x100);
    set.history[0] = Uuid(0x50);
    set.allocate_slot(B);
    set.slots[3].bitmap_index = Some(1);
    let peers = [view(B, DiskState::UpToDate)];
    assert!(
        set.new_current(&rotation(&peers), Role::Primary, &mut rng)
            .is_some()
    );
    assert_eq!(set.slot(NodeId(3)).bitmap_uuid, Uuid(0x100));
}

#[test]
fn a_secondary_follows_the_primary_and_remembers_where_it_was() {
    let mut secondary = set();
    secondary.slots[2].bitmap_uuid = Uuid(0x90);
    let peers = [view(B, DiskState::UpToDate), view(C, DiskState::DUnknown)];
    // Node 2 is with the Primary, though not connected here.
    let changed = secondary.receive_new_datagen(
        Uuid(0x201),
        &rotation(&peers),
        DiskState::UpToDate,
        Role::Secondary,
    );
    assert!(changed.contains(C) && !changed.contains(B));
    assert_eq!(secondary.current, Uuid(0x200));
    assert_eq!(secondary.slot(C).bitmap_uuid, Uuid(0x201));
    assert_eq!(secondary.history[..2], [Uuid(0x100), Uuid(0x90)]);

    let mut secondary = set();
    let weak = Rotation {
        weak: NodeMask::of(C),
        ..rotation(&peers)
    };
    let disk = DiskState::UpToDate;
    secondary.receive_new_datagen(Uuid(0x201), &weak, disk, Role::Secondary);
    assert_eq!(secondary.slot(C).bitmap_uuid, Uuid(0x100));
    assert_eq!(secondary.history[0], Uuid(0x100));
}

#[test]
fn the_end_of_a_resync_makes_the_target_a_copy_of_the_source() {
    let mut target = set();
    target.slots[2].bitmap_uuid = Uuid(0x70);
    let mut source = named(0x301, &[(ME, 0x100), (C, 0x100), (NodeId(3), 0)]);
    source.history[0] = Uuid(0x80);
    source.history[1] = Uuid(0x60);
    let peers = [view(B, DiskState::UpToDate), view(C, DiskState::DUnknown)];
    let start = target.resync_starts_as_target(&source, &rotation(&peers));
    assert_eq!(start, Uuid(0x100));
    let behind = target.resync_ends_as_target(B, &source, start, NodeMask::EMPTY);
    assert_eq!(behind, NodeMask::of(C));
    assert_eq!(target.current, Uuid(0x300));
    assert_eq!(target.slot(C).bitmap_uuid, Uuid(0x100));
    assert_eq!(target.slot(B).bitmap_uuid, Uuid(0));
    for uuid in [0x60, 0x80, 0x70, 0x100] {
        assert!(target.history.contains(&Uuid(uuid)), "{uuid:#x}");
    }
}

#[test]
fn an_interrupted_initial_resync_goes_on_by_bitmap() {
    let mut target = Generations::just_created(ME, 1);
    target.allocate_slot(B);
    let source = named(0x300, &[(ME, 0x200)]);
    let start = target.resync_starts_as_target(&source, &rotation(&[]));
    assert_eq!((start, target.current), (Uuid(0x200), Uuid(0x200)));
    let mut source = set();
    source.full_resync_starts_as_source(B, Uuid(0x700));
    assert_eq!(source.slot(B).bitmap_uuid, Uuid(0x700));
    source.full_resync_starts_as_source(C, Uuid::JUST_CREATED);
    assert_eq!(source.slot(C).bitmap_uuid, Uuid(0));
    source.resync_ends_as_source(B);
    assert_eq!(
        (source.slot(B).bitmap_uuid, source.history[0]),
        (Uuid(0), Uuid(0x700))
    );
}

#[test]
fn a_resync_with_an_old_peer_ends_with_equal_sets() {
    let mut rng = Rng::new(1);
    let mut source = Generations::just_created(ME, 1);
    source.current = Uuid(0x300);
    source.allocate_slot(B);
    source.slots[1].bitmap_uuid = Uuid(0x200);
    source.history[0] = Uuid(0x50);
    let sent = named(0x300, &[(B, 0x200)]);
    let sent = PeerUuids {
        history: source.history,
        ..sent
    };
    let mut target = Generations::just_created(B, 1);
    target.current = Uuid(0x200);
    target.allocate_slot(ME);
    let sync = source.sync_uuid_as_source(B, target.current, &mut rng);
    assert_eq!(sync, Uuid(0x200 + Uuid::NEW_BM_OFFSET));
    assert_eq!(source.history[0], Uuid(0x200));
    // The target did not hear it, and the source was promoted since: nothing new begins.
    let before = source.clone();
    let again = source.sync_uuid_as_source(B, target.current, &mut rng);
    assert_eq!((again, &source), (sync, &before));
    target.sync_uuid_as_target(ME, sync);
    assert_eq!(target.current, sync);
    target.resync_ends_as_target_84(ME, &sent);
    source.resync_ends_as_source(B);
    assert_eq!(target.current, source.current);
    assert_eq!(target.history, source.history);
    assert_eq!(source.history[..3], [sync, Uuid(0x200), Uuid(0x50)]);
}

#[test]
fn the_primary_bit_never_touches_a_device_without_data() {
    let mut set = Generations::just_created(ME, 1);
    set.set_primary_bit(Role::Primary);
    assert_eq!(set.current, Uuid::JUST_CREATED);
    set.current = Uuid(0x10);
    set.set_primary_bit(Role::Primary);
    assert_eq!(set.current, Uuid(0x11));
    set.set_primary_bit(Role::Secondary);
    assert_eq!(set.current, Uuid(0x10));
}

fn context(sender: NodeId) -> LearnContext {
    LearnContext {
        sender,
        busy: NodeMask::EMPTY,
        connected: NodeMask::of(sender),
        provisional: NodeMask::EMPTY,
        any_sync_target: false,
    }
}

#[test]
fn a_node_that_caught_up_elsewhere_is_learned_from_a_third() {
    let mut set = set();
    set.slots[1].bitmap_uuid = Uuid(0x90);
    set.slots[2].bitmap_uuid = Uuid(0x80);
    let news = named(0x101, &[(ME, 0), (C, 0)]);
    let target = LearnContext {
        any_sync_target: true,
        ..context(B)
    };
    assert_eq!(set.clone().learn(&news, &target), vec![]);
    let busy = LearnContext {
        busy: NodeMask::of(C),
        ..context(B)
    };
    assert_eq!(set.clone().learn(&news, &busy).len(), 1);
    let expected = vec![
        Learned::CaughtUp {
            node: B,
            clear_bits: false,
        },
        Learned::CaughtUp {
            node: C,
            clear_bits: true,
        },
    ];
    assert_eq!(set.learn(&news, &context(B)), expected);
    assert_eq!(set.slot(C).bitmap_uuid, Uuid(0));
    assert!(set.history.contains(&Uuid(0x80)) && set.history.contains(&Uuid(0x90)));
    // A slot that the sender did not name teaches nothing.
    set.slots[2].bitmap_uuid = Uuid(0x70);
    assert_eq!(set.learn(&named(0x101, &[(ME, 0)]), &context(B)), vec![]);
}

#[test]
fn a_node_synced_to_the_level_of_another_gets_its_bitmap() {
    let mut set = set();
    set.slots[1].bitmap_uuid = Uuid(0x90);
    set.slots[1].bitmap_dagtag = Dagtag(9);
    set.slots[2].bitmap_uuid = Uuid(0x80);
    set.slots[2].bitmap_dagtag = Dagtag(5);
    let news = named(0x90, &[(ME, 0x55), (C, 0)]);
    let copied = Learned::Copy {
        from: 0,
        to: 1,
        node: C,
    };
    // Not one that is on its way to the newer generation, which this node took first.
    let provisional = LearnContext {
        provisional: NodeMask::of(C),
        ..context(B)
    };
    assert_eq!(set.clone().learn(&news, &provisional), vec![]);
    assert_eq!(set.learn(&news, &context(B)), vec![copied]);
    assert_eq!(set.slot(C).bitmap_uuid, Uuid(0x90));
    assert!(set.history.contains(&Uuid(0x80)));
}

#[test]
fn fencing_decides_whether_a_disk_may_be_up_to_date() {
    let mut set = set();
    let flags = DeviceFlags::CONSISTENT | DeviceFlags::WAS_UP_TO_DATE;
    assert_eq!(
        disk_state_of(DeviceFlags::empty(), true),
        DiskState::Inconsistent
    );
    assert_eq!(
        disk_state_of(DeviceFlags::CONSISTENT, true),
        DiskState::Outdated
    );
    assert_eq!(disk_state_of(flags, false), DiskState::Consistent);
    assert_eq!(disk_state_of(flags, true), DiskState::UpToDate);
    let away = |_: NodeId| DiskState::DUnknown;
    assert!(set.may_be_up_to_date(away, NodeMask::EMPTY));
    set.slots[1].flags |= PeerFlags::FENCING;
    assert!(!set.may_be_up_to_date(away, NodeMask::EMPTY));
    assert!(set.may_be_up_to_date(away, NodeMask::of(B)));
    assert!(set.may_be_up_to_date(|_| DiskState::Outdated, NodeMask::EMPTY));
    assert!(set.may_be_up_to_date(|_| DiskState::Diskless, NodeMask::EMPTY));
    set.slots[1].flags |= PeerFlags::DEVICE_SEEN;
    assert!(!set.may_be_up_to_date(|_| DiskState::Diskless, NodeMask::EMPTY));
    set.slots[1].flags |= PeerFlags::OUTDATED;
    assert!(set.may_be_up_to_date(away, NodeMask::EMPTY));
}

#[test]
fn weak_nodes_are_all_that_do_not_follow() {
    let peers = [view(B, DiskState::UpToDate), view(C, DiskState::Outdated)];
    assert_eq!(
        weak_nodes(ME, DiskState::UpToDate, &peers),
        NodeMask(!0b011)
    );
    assert_eq!(
        weak_nodes(ME, DiskState::Diskless, &peers),
        NodeMask(!0b010)
    );
}

fn check_set(set: &Generations) {
    let history: Vec<Uuid> = set
        .history
        .iter()
        .copied()
        .take_while(|uuid| !uuid.is_zero())
        .collect();
    assert!(
        set.history[history.len()..]
            .iter()
            .all(|uuid| uuid.is_zero()),
        "a hole"
    );
    for (index, uuid) in history.iter().enumerate() {
        assert!(!uuid.same_generation(set.current), "U5: current in history");
        assert!(!history[..index].contains(uuid), "U5: twice in history");
        assert_eq!(uuid.0 & 1, 0);
    }
    assert!(
        set.slot(set.node).bitmap_uuid.is_zero(),
        "a slot for itself"
    );
}

/// Two nodes with data that a model follows: which blocks each wrote.
struct Pair {
    sets: [Generations; 2],
    data: [[u64; 8]; 2],
    marks: [[bool; 8]; 2],
    connected: bool,
    primary: [bool; 2],
    due: [bool; 2],
    stamp: u64,
    /// Primaries that wrote apart since the two were equal.
    wrote_apart: [bool; 2],
    rng: Rng,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let make = |own: u8, peer: u8| {
            let mut set = Generations::just_created(NodeId(own), 1);
            set.current = Uuid(0x1000);
            set.allocate_slot(NodeId(peer));
            set
        };
        Pair {
            sets: [make(0, 1), make(1, 0)],
            data: [[0; 8]; 2],
            marks: [[false; 8]; 2],
            connected: true,
            primary: [false; 2],
            due: [false; 2],
            stamp: 0,
            wrote_apart: [false; 2],
            rng: Rng::new(seed),
        }
    }

    fn peer_of(me: usize) -> NodeId {
        NodeId(1 - me as u8)
    }

    fn role(&self, me: usize) -> Role {
        if self.primary[me] {
            Role::Primary
        } else {
            Role::Secondary
        }
    }

    fn promote(&mut self, me: usize) {
        if self.primary[me] || (self.connected && self.primary[1 - me]) {
            return;
        }
        self.primary[me] = true;
        self.due[me] = true;
        self.sets[me].set_primary_bit(Role::Primary);
    }

    fn demote(&mut self, me: usize) {
        self.primary[me] = false;
        self.due[me] = false;
        self.sets[me].set_primary_bit(Role::Secondary);
    }

    fn disconnect(&mut self) {
        self.connected = false;
        self.due = self.primary;
    }

    fn write(&mut self, me: usize) {
        if !self.primary[me] {
            return;
        }
        let disk = if self.connected {
            DiskState::UpToDate
        } else {
            DiskState::DUnknown
        };
        let peers = [view(Self::peer_of(me), disk)];
        if core::mem::take(&mut self.due[me]) {
            let new = self.sets[me].new_current(&rotation(&peers), Role::Primary, &mut self.rng);
            if let (Some(new), true) = (new, self.connected) {
                let back = [view(Self::peer_of(1 - me), DiskState::UpToDate)];
                let disk = DiskState::UpToDate;
                let role = Role::Secondary;
                self.sets[1 - me].receive_new_datagen(new, &rotation(&back), disk, role);
            }
        }
        self.stamp += 1;
        let block = self.rng.below(8) as usize;
        self.data[me][block] = self.stamp;
        if self.connected {
            self.data[1 - me][block] = self.stamp;
        } else {
            self.marks[me][block] = true;
            self.wrote_apart[me] = true;
            let slot = self.sets[me].slot(Self::peer_of(me)).bitmap_uuid;
            assert!(!slot.is_zero(), "U4: marks without a generation");
            let (own, peer) = (self.sets[me].current, self.sets[1 - me].current);
            assert!(
                !own.same_generation(peer),
                "U3: a missed write within one generation"
            );
        }
    }

    fn side(&self, me: usize) -> Side {
        let context = SendContext {
            receiver: Self::peer_of(me),
            resolved_current: None,
            target_of: NodeMask::EMPTY,
            dirty_bits: self.marks[me].iter().filter(|mark| **mark).count() as u64,
            flags: UuidFlags::STABLE | UuidFlags::RECONNECT,
            node_mask: NodeMask::EMPTY,
        };
        Side {
            node: NodeId(me as u8),
            uuids: self.sets[me].to_send(&context),
            disk: DiskState::UpToDate,
            role: self.role(me),
            quorate: true,
        }
    }

    fn connect(&mut self) -> Option<&'static str> {
        if self.connected || self.primary == [true, true] {
            return None;
        }
        let sides = [self.side(0), self.side(1)];
        let net = NetOptions::default();
        let handshake = Handshake {
            own: &sides[0],
            peer: &sides[1],
            phase: Phase::Connect,
            protocol_version: 124,
            features: Features::LOCKSTEP,
            resolver: true,
            net: &net,
            quorum_configured: false,
            own_lost: None,
            peer_lost: None,
        };
        let verdict = compare(&handshake);
        let mirror = compare(&handshake.mirrored(&net));
        if self.wrote_apart == [true, true] {
            assert!(verdict.strategy.is_split_brain(), "U10: {verdict:?}");
            self.force_equal(0);
            return Some("split brain");
        }
        assert!(!verdict.split_brain, "U9: {verdict:?} {:x?}", self.sets);
        assert_ne!(verdict.strategy, Strategy::UnrelatedData, "U9");
        let source = match verdict.strategy {
            Strategy::NoSync => {
                assert_eq!(self.data[0], self.data[1], "U1");
                self.learn(&sides);
                self.connected = true;
                return Some("no resync");
            }
            Strategy::SourceUseBitmap => 0,
            Strategy::TargetUseBitmap => 1,
            Strategy::SyncTargetPrimaryDisconnect => return Some("primary would lose"),
            other => panic!("unexpected {other:?} by {:?}", verdict.rule),
        };
        assert!(
            mirror.strategy == verdict.strategy.mirrored() || mirror.strategy.disconnects(),
            "U8"
        );
        if mirror.strategy.disconnects() {
            return Some("primary would lose");
        }
        self.resync(source, &sides);
        Some("resync")
    }

    fn resync(&mut self, source: usize, sides: &[Side; 2]) {
        let target = 1 - source;
        let to_source = [view(Self::peer_of(target), DiskState::UpToDate)];
        let start =
            self.sets[target].resync_starts_as_target(&sides[source].uuids, &rotation(&to_source));
        if self.rng.below(4) == 0 {
            // Interrupted before anything arrived.
            return;
        }
        for block in 0..8 {
            if self.marks[0][block] || self.marks[1][block] {
                self.data[target][block] = self.data[source][block];
            }
        }
        assert_eq!(
            self.data[0], self.data[1],
            "U4: the marks did not cover the difference"
        );
        self.marks = [[false; 8]; 2];
        self.wrote_apart = [false; 2];
        let source_node = Self::peer_of(target);
        let uuids = &sides[source].uuids;
        self.sets[target].resync_ends_as_target(source_node, uuids, start, NodeMask::EMPTY);
        self.sets[source].resync_ends_as_source(Self::peer_of(source));
        self.connected = true;
    }

    fn learn(&mut self, sides: &[Side; 2]) {
        for me in 0..2 {
            let sender = Self::peer_of(me);
            self.sets[me].learn(&sides[1 - me].uuids, &context(sender));
        }
        self.wrote_apart = [false; 2];
    }

    /// The operator solves a split brain in favour of `winner`.
    fn force_equal(&mut self, winner: usize) {
        let sides = [self.side(0), self.side(1)];
        let loser = 1 - winner;
        self.demote(loser);
        self.data[loser] = self.data[winner];
        self.marks = [[false; 8]; 2];
        self.wrote_apart = [false; 2];
        let start = self.sets[loser].current;
        let uuids = &sides[winner].uuids;
        let winner_node = Self::peer_of(loser);
        self.sets[loser].resync_ends_as_target(winner_node, uuids, start, NodeMask::EMPTY);
        self.sets[winner].resync_ends_as_source(Self::peer_of(winner));
        self.connected = true;
    }
}

#[test]
fn two_nodes_keep_the_invariants_over_random_histories() {
    let mut seen = alloc::collections::BTreeMap::new();
    for seed in 0..300 {
        let mut pair = Pair::new(seed);
        for _ in 0..300 {
            let me = pair.rng.below(2) as usize;
            match pair.rng.below(8) {
                0 => pair.promote(me),
                1 => pair.demote(me),
                2 => pair.disconnect(),
                3 | 4 => {
                    if let Some(what) = pair.connect() {
                        *seen.entry(what).or_insert(0u32) += 1;
                    }
                }
                _ => pair.write(me),
            }
            for set in &pair.sets {
                check_set(set);
            }
            if pair.connected {
                assert_eq!(pair.data[0], pair.data[1], "seed {seed}");
            }
        }
    }
    for what in ["resync", "no resync", "split brain", "primary would lose"] {
        assert!(
            seen.get(what).is_some_and(|count| *count > 20),
            "{what}: {seen:?}"
        );
    }
}

#[test]
fn a_resync_within_one_generation_keeps_the_slots_of_those_left_behind() {
    let mut set = set();
    set.slots[2].bitmap_uuid = Uuid(0x60);
    let start = set.current;
    let source = named(0x100, &[(ME, 0), (C, 0x50)]);
    let behind = set.resync_ends_as_target(B, &source, start, NodeMask::EMPTY);
    assert!(behind.contains(C));
    assert_eq!(set.slot(C).bitmap_uuid, Uuid(0x60));
    assert_eq!(set.slot(B).bitmap_uuid, Uuid::ZERO);
}

#[test]
fn a_noted_generation_becomes_an_ancestor_when_it_is_retired_elsewhere() {
    let mut set = set();
    set.note_planned(Uuid(0x200));
    assert_eq!(set.history[0], Uuid(0x201));
    set.note_planned(Uuid(0x200));
    set.push_history(Uuid(0x200));
    assert_eq!(set.history[..2], [Uuid(0x200), Uuid::ZERO]);
}

#[test]
fn what_was_announced_and_not_made_is_not_older() {
    let mut set = set();
    set.push_history(Uuid(0x50));
    set.note_planned(Uuid(0x200));
    set.current = Uuid(0x300);
    set.push_history(Uuid(0x100));
    set.note_planned(Uuid(0x400));
    set.note_planned(Uuid(0x500));
    let older: Vec<Uuid> = set.older().map(Uuid::without_primary_bit).collect();
    assert_eq!(older, [Uuid(0x100), Uuid(0x200), Uuid(0x50)]);
    assert_eq!(set.ancestors().count(), 5);
}

#[test]
fn what_a_slot_named_that_is_not_sent_stays_an_ancestor() {
    // Both bitmaps are in use, so entries of nodes that do not exist are not sent. They keep the
    // generation that the set began with.
    let mut target = set();
    target.history[0] = Uuid(0x50);
    let peers = [view(B, DiskState::UpToDate), view(C, DiskState::DUnknown)];
    target.current = Uuid(0x60);
    let mut rng = Rng::new(1);
    let next = target.new_current(&rotation(&peers), Role::Primary, &mut rng);
    let lost = next.unwrap().without_primary_bit();
    assert_eq!(target.slot(C).bitmap_uuid, Uuid(0x60));
    assert_eq!(target.slot(NodeId(9)).bitmap_uuid, Uuid(0x60));
    // B went on alone since; C has stayed behind at the first generation.
    let mut source = named(0x300, &[(ME, lost.0), (C, 0x60)]);
    source.history[0] = Uuid(0x60);
    source.history[1] = Uuid(0x50);
    let start = target.resync_starts_as_target(&source, &rotation(&peers));
    target.resync_ends_as_target(B, &source, start, NodeMask::EMPTY);
    assert_eq!(target.slot(C).bitmap_uuid, lost);
    for uuid in [Uuid(0x60), Uuid(0x50), lost] {
        assert!(target.history.contains(&uuid), "{uuid:?}");
    }
}

#[test]
fn a_target_inherits_the_generation_that_its_source_had_in_its_slot() {
    // The source had left this node at 0x200 when it was given a new generation, and this node has older data still.
    let mut target = set();
    let mut source = named(0x300, &[(ME, 0x200)]);
    source.history[0] = Uuid(0x100);
    let peers = [view(B, DiskState::UpToDate)];
    let start = target.resync_starts_as_target(&source, &rotation(&peers));
    target.resync_ends_as_target(B, &source, start, NodeMask::EMPTY);
    assert_eq!(target.current, Uuid(0x300));
    assert_eq!(target.history[..2], [Uuid(0x200), Uuid(0x100)]);
}
