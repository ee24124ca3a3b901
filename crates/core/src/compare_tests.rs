//! Rows, policies and the mirror property of the sync decision.

use alloc::vec;

use super::*;
use crate::rng::Rng;

#[path = "compare_crashed_tests.rs"]
mod crashed;
#[path = "compare_unwritten_tests.rs"]
mod unwritten;

const A: NodeId = NodeId(0);
const B: NodeId = NodeId(1);

fn side(node: NodeId, current: u64) -> Side {
    let mut uuids = PeerUuids {
        current: Uuid(current),
        flags: UuidFlags::STABLE,
        ..PeerUuids::default()
    };
    for other in [A, B, NodeId(2), NodeId(3)] {
        uuids.bitmap[usize::from(other.0)] = Uuid::ZERO;
        uuids.slots.insert(other);
    }
    Side {
        node,
        uuids,
        disk: DiskState::UpToDate,
        role: Role::Secondary,
        quorate: true,
    }
}

/// Two sides and everything around them, to be bent by a test.
#[derive(Clone)]
struct Case {
    a: Side,
    b: Side,
    phase: Phase,
    version: u32,
    features: Features,
    a_resolves: bool,
    net: NetOptions,
    quorum: bool,
    lost: (Option<LostPrimary>, Option<LostPrimary>),
}

impl Case {
    fn new(a: u64, b: u64) -> Self {
        Case {
            a: side(A, a),
            b: side(B, b),
            phase: Phase::Connect,
            version: 124,
            features: Features::empty(),
            a_resolves: true,
            net: NetOptions::default(),
            quorum: false,
            lost: (None, None),
        }
    }

    fn with(mut self, bend: impl FnOnce(&mut Self)) -> Self {
        bend(&mut self);
        self
    }

    fn handshake(&self) -> Handshake<'_> {
        Handshake {
            own: &self.a,
            peer: &self.b,
            phase: self.phase,
            protocol_version: self.version,
            features: self.features,
            resolver: self.a_resolves,
            net: &self.net,
            quorum_configured: self.quorum,
            own_lost: self.lost.0,
            peer_lost: self.lost.1,
        }
    }

    fn decide(&self) -> Verdict {
        compare(&self.handshake())
    }

    fn peer_net(&self) -> NetOptions {
        let swap = |policy| match policy {
            AfterSplitBrain::DiscardLocal => AfterSplitBrain::DiscardRemote,
            AfterSplitBrain::DiscardRemote => AfterSplitBrain::DiscardLocal,
            other => other,
        };
        NetOptions {
            after_sb_0pri: swap(self.net.after_sb_0pri),
            after_sb_1pri: swap(self.net.after_sb_1pri),
            after_sb_2pri: swap(self.net.after_sb_2pri),
            ..self.net.clone()
        }
    }

    fn decide_at_peer(&self) -> Verdict {
        let net = self.peer_net();
        compare(&self.handshake().mirrored(&net))
    }

    /// Both ends: the expected strategy here, its mirror there, and the rule.
    fn expect(&self, strategy: Strategy, rule: Rule) {
        let here = self.decide();
        assert_eq!((here.strategy, here.rule), (strategy, rule));
        assert_eq!(
            self.decide_at_peer().strategy,
            strategy.mirrored(),
            "the peer of {rule:?}"
        );
    }
}

fn slot(side: &mut Side, node: NodeId, uuid: u64) {
    side.uuids.bitmap[usize::from(node.0)] = Uuid(uuid);
}

fn flag(side: &mut Side, flags: UuidFlags) {
    side.uuids.flags |= flags;
}

#[test]
fn rows_for_just_created_sides() {
    Case::new(4, 4).expect(Strategy::NoSync, Rule::JustCreatedBoth);
    Case::new(0, 4).expect(Strategy::NoSync, Rule::JustCreatedBoth);
    Case::new(4, 0x10).expect(Strategy::TargetSetBitmap, Rule::JustCreatedSelf);
    Case::new(0x10, 4).expect(Strategy::SourceSetBitmap, Rule::JustCreatedPeer);
    Case::new(0x10, 0).expect(Strategy::SourceSetBitmap, Rule::JustCreatedPeer);
}

#[test]
fn equal_uuids_without_any_mark_need_no_resync() {
    Case::new(0x10, 0x10).expect(Strategy::NoSync, Rule::BothOff);
    Case::new(0x10, 0x11).expect(Strategy::NoSync, Rule::BothOff);
}

#[test]
fn a_source_that_missed_the_end_of_the_resync_is_source_again() {
    let missed = Case::new(0x10, 0x10).with(|c| {
        slot(&mut c.a, B, 0x20);
        c.a.uuids.dirty_bits = 3;
    });
    let verdict = missed.decide();
    assert_eq!(verdict.strategy, Strategy::SourceUseBitmap);
    assert_eq!(verdict.rule.name(), "sync-source-missed-finish");
    assert_eq!(
        missed.decide_at_peer().rule.name(),
        "sync-target-peer-missed-finish"
    );
    // Without marks there is nothing to send, and older peers reconnect.
    let empty = missed.clone().with(|c| c.a.uuids.dirty_bits = 0);
    empty.expect(Strategy::NoSync, Rule::BothOff);
    let old = empty.with(|c| c.version = 123);
    assert_eq!(old.decide().strategy, Strategy::RetryConnect);
    let primary = old.with(|c| c.b.role = Role::Primary);
    assert_eq!(
        primary.decide_at_peer().strategy,
        Strategy::RequiresProtocol(124)
    );
    let outdated = missed
        .clone()
        .with(|c| c.a.disk = DiskState::Outdated)
        .decide();
    assert_eq!(
        (outdated.strategy, outdated.clear_own_slot),
        (Strategy::NoSync, true)
    );
    let running = missed
        .with(|c| flag(&mut c.b, UuidFlags::SYNC_TARGET))
        .decide();
    assert_eq!(running.rule, Rule::BothOff);
}

#[test]
fn reconnect_flags_on_both_sides_mean_no_resync() {
    let both = Case::new(0x10, 0x10).with(|c| {
        flag(&mut c.a, UuidFlags::RECONNECT | UuidFlags::CRASHED_PRIMARY);
        flag(&mut c.b, UuidFlags::RECONNECT);
    });
    both.expect(Strategy::NoSync, Rule::Reconnected);
    both.with(|c| c.version = 118)
        .expect(Strategy::NoSync, Rule::Reconnected);
    Case::new(0x10, 0x10)
        .with(|c| flag(&mut c.a, UuidFlags::RECONNECT))
        .expect(Strategy::NoSync, Rule::LostQuorum);
}

#[test]
fn the_primary_that_lost_quorum_is_source() {
    let peer = Case::new(0x10, 0x10).with(|c| flag(&mut c.b, UuidFlags::PRIMARY_LOST_QUORUM));
    peer.expect(Strategy::TargetIfBothFailed, Rule::LostQuorum);
    let both = peer.with(|c| flag(&mut c.a, UuidFlags::PRIMARY_LOST_QUORUM));
    both.expect(Strategy::SourceIfBothFailed, Rule::LostQuorum);
}

#[test]
fn slots_come_before_history_and_the_own_slot_before_others() {
    let mut c = Case::new(0x10, 0x20);
    c.b.uuids.history[0] = Uuid(0x10);
    c.expect(Strategy::TargetSetBitmap, Rule::HistoryPeer);
    slot(&mut c.b, NodeId(3), 0x11);
    c.expect(
        Strategy::TargetClearBitmap(NodeId(3)),
        Rule::BitmapPeerOther,
    );
    slot(&mut c.b, NodeId(2), 0x10);
    c.expect(
        Strategy::TargetClearBitmap(NodeId(2)),
        Rule::BitmapPeerOther,
    );
    slot(&mut c.b, A, 0x10);
    c.expect(Strategy::TargetUseBitmap, Rule::BitmapPeer);

    let mut c = Case::new(0x10, 0x20);
    c.a.uuids.history[31] = Uuid(0x20);
    c.expect(Strategy::SourceSetBitmap, Rule::HistorySelf);
    slot(&mut c.a, NodeId(2), 0x20);
    c.expect(Strategy::SourceCopyBitmap(NodeId(2)), Rule::BitmapSelfOther);
    slot(&mut c.a, B, 0x21);
    c.expect(Strategy::SourceUseBitmap, Rule::BitmapSelf);
}

#[test]
fn common_ancestors_are_a_split_brain_and_none_are_unrelated() {
    let mut c = Case::new(0x10, 0x20);
    c.expect(Strategy::UnrelatedData, Rule::NoRelation);
    c.a.uuids.history[0] = Uuid(0x30);
    c.b.uuids.history[5] = Uuid(0x30);
    c.expect(Strategy::SplitBrainDisconnect, Rule::HistoryBoth);
    // History matches on both sides decide nothing.
    c.a.uuids.history[1] = Uuid(0x20);
    c.b.uuids.history[1] = Uuid(0x10);
    c.expect(Strategy::SplitBrainDisconnect, Rule::HistoryBoth);
    slot(&mut c.a, B, 0x41);
    slot(&mut c.b, A, 0x40);
    c.expect(Strategy::SplitBrainDisconnect, Rule::BitmapBoth);
    let verdict = c.decide();
    assert!(verdict.split_brain && verdict.strategy.disconnects());
    assert_eq!(
        verdict.handlers,
        vec![Handler::InitialSplitBrain, Handler::SplitBrain]
    );
}

#[test]
fn who_only_announced_a_generation_follows_the_one_that_took_it() {
    let mut c = Case::new(0x10, 0x20);
    c.features = Features::LOCKSTEP;
    c.a.uuids.history[0] = Uuid(0x21);
    c.b.uuids.history[0] = Uuid(0x10);
    c.expect(Strategy::TargetSetBitmap, Rule::HistoryPeer);
    slot(&mut c.a, B, 0x50);
    slot(&mut c.b, A, 0x50);
    c.expect(Strategy::TargetUseBitmap, Rule::HistoryPeer);
}

#[test]
fn a_primary_that_lost_the_follower_of_its_announcement_is_no_target() {
    let announced = || {
        Case::new(0x10, 0x20).with(|c| {
            c.features = Features::LOCKSTEP;
            c.a.uuids.history[0] = Uuid(0x21);
            c.b.uuids.history[0] = Uuid(0x10);
            slot(&mut c.b, A, 0x10);
        })
    };
    announced().expect(Strategy::TargetUseBitmap, Rule::BitmapPeer);
    let lives_on = || announced().with(|c| c.a.role = Role::Primary);
    lives_on().expect(Strategy::SourceUseBitmap, Rule::HistorySelf);
    // Somebody wrote under that name, or the Primary never told it.
    for refused in [
        lives_on().with(|c| c.b.uuids.dirty_bits = 1),
        lives_on().with(|c| c.a.uuids.history[0] = Uuid(0x20)),
    ] {
        assert_ne!(refused.decide().strategy, Strategy::SourceUseBitmap);
    }
}

/// Its quorum went with the follower, and its applications were given errors.
#[test]
fn who_announced_in_vain_is_the_source_after_its_demotion() {
    let gave_up = || {
        Case::new(0x10, 0x20).with(|c| {
            c.features = Features::LOCKSTEP;
            c.a.uuids.history[0] = Uuid(0x21);
            c.a.uuids.dirty_bits = 5;
            c.b.uuids.history[0] = Uuid(0x10);
            slot(&mut c.b, A, 0x10);
            flag(&mut c.a, UuidFlags::RECONNECT);
        })
    };
    gave_up().expect(Strategy::SourceUseBitmap, Rule::HistorySelf);
    // Its last words are of before the demotion.
    gave_up()
        .with(|c| {
            c.b.uuids.flags.remove(UuidFlags::STABLE);
            c.b.uuids.node_mask.insert(A);
        })
        .expect(Strategy::SourceUseBitmap, Rule::HistorySelf);
    // They were connected all the time.
    gave_up()
        .with(|c| {
            c.phase = Phase::AfterUnstable;
            c.a.uuids.flags.remove(UuidFlags::RECONNECT);
        })
        .expect(Strategy::SourceUseBitmap, Rule::HistorySelf);
    let refused = [
        // It may have lost what was in its cache.
        gave_up().with(|c| c.a.uuids.flags.remove(UuidFlags::RECONNECT)),
        gave_up().with(|c| flag(&mut c.a, UuidFlags::CRASHED_PRIMARY)),
        // Others go on under that name.
        gave_up().with(|c| c.b.uuids.dirty_bits = 1),
        gave_up().with(|c| c.b.role = Role::Primary),
        gave_up().with(|c| {
            c.b.uuids.flags.remove(UuidFlags::STABLE);
            c.b.uuids.node_mask.insert(NodeId(2));
        }),
        gave_up().with(|c| c.a.disk = DiskState::Consistent),
    ];
    for case in refused {
        assert_ne!(case.decide().strategy, Strategy::SourceUseBitmap);
    }
}

/// The follower was thrown away meanwhile, and its resync cut short.
#[test]
fn a_disk_that_is_not_whole_is_no_source_for_who_announced_its_generation() {
    let announced = || {
        Case::new(0x10, 0x20).with(|c| {
            c.features = Features::LOCKSTEP;
            c.a.uuids.history[0] = Uuid(0x21);
            c.b.uuids.history[0] = Uuid(0x10);
            slot(&mut c.b, A, 0x10);
            c.b.disk = DiskState::Inconsistent;
        })
    };
    announced().expect(Strategy::SourceUseBitmap, Rule::BitmapPeer);
    // It was made: what was written under it is nowhere else.
    let made = announced().with(|c| c.a.uuids.history[0] = Uuid(0x20));
    assert_ne!(made.decide().strategy, Strategy::SourceUseBitmap);
}

/// The follower was brought up to date at an older generation, and took the next two in one.
#[test]
fn who_took_two_generations_at_once_is_known_as_a_follower() {
    let took = || {
        Case::new(0x10, 0x20).with(|c| {
            c.features = Features::LOCKSTEP;
            c.a.uuids.history[0] = Uuid(0x21);
            c.b.uuids.history[0] = Uuid(0x10);
            slot(&mut c.a, B, 0x50);
            slot(&mut c.b, A, 0x50);
        })
    };
    let lives_on = || took().with(|c| c.a.role = Role::Primary);
    lives_on().expect(Strategy::SourceUseBitmap, Rule::HistorySelf);
    // The announcing Primary died, and the follower became Primary: the two are no split brain.
    took()
        .with(|c| {
            c.b.uuids.current = Uuid(0x30);
            c.b.uuids.history[1] = Uuid(0x20);
            c.b.role = Role::Primary;
        })
        .expect(Strategy::TargetUseBitmap, Rule::HistoryPeer);
    let written = lives_on().with(|c| c.b.uuids.dirty_bits = 1);
    assert_ne!(written.decide().strategy, Strategy::SourceUseBitmap);
}

#[test]
fn an_announcement_decides_before_marks_do_and_marks_only_where_it_cannot() {
    let announced = |marks: (u64, u64)| {
        Case::new(0x10, 0x20).with(|c| {
            c.features = Features::LOCKSTEP;
            c.a.uuids.history[0] = Uuid(0x21);
            c.b.uuids.history[0] = Uuid(0x10);
            slot(&mut c.a, B, 0x50);
            slot(&mut c.b, A, 0x50);
            (c.a.uuids.dirty_bits, c.b.uuids.dirty_bits) = marks;
        })
    };
    // B took what A announced, so it got all that A had sent before: whatever is marked where.
    for marks in [(0, 0), (3, 0), (0, 3), (3, 3)] {
        announced(marks).expect(Strategy::TargetUseBitmap, Rule::HistoryPeer);
    }
    // Each took what the other had announced: neither was written to since, but for what was under
    // way. Then only who has no marks gives way, and who has some is never overwritten unasked.
    let both = |marks| announced(marks).with(|c| c.b.uuids.history[0] = Uuid(0x11));
    both((0, 0)).expect(Strategy::SourceUseBitmap, Rule::BitmapBoth);
    both((3, 0)).expect(Strategy::SourceUseBitmap, Rule::BitmapBoth);
    both((0, 3)).expect(Strategy::TargetUseBitmap, Rule::BitmapBoth);
    both((3, 3)).expect(Strategy::SplitBrainDisconnect, Rule::BitmapBoth);
    // An application uses it: it is asked as well.
    both((0, 3))
        .with(|c| c.a.role = Role::Primary)
        .expect(Strategy::SplitBrainDisconnect, Rule::BitmapBoth);
}

#[test]
fn who_follows_a_primary_is_the_source_where_the_choice_is_free() {
    let mut c = Case::new(0x10, 0x10);
    c.features = Features::LOCKSTEP;
    flag(&mut c.a, UuidFlags::CRASHED_PRIMARY);
    c.expect(Strategy::SourceIfBothFailed, Rule::BothOff);
    c.b.uuids.flags.remove(UuidFlags::STABLE);
    c.b.uuids.node_mask.insert(NodeId(2));
    c.expect(Strategy::TargetIfBothFailed, Rule::BothOff);
    c.a.role = Role::Primary;
    c.expect(Strategy::SourceIfBothFailed, Rule::BothOff);
}

#[test]
fn an_inconsistent_disk_is_no_branch_of_a_split_brain() {
    let mut c = Case::new(0x10, 0x20);
    c.features = Features::LOCKSTEP;
    slot(&mut c.a, B, 0x50);
    slot(&mut c.b, A, 0x50);
    c.a.uuids.dirty_bits = 3;
    c.b.uuids.dirty_bits = 4;
    c.expect(Strategy::SplitBrainDisconnect, Rule::BitmapBoth);
    c.a.disk = DiskState::Inconsistent;
    c.expect(Strategy::TargetUseBitmap, Rule::BitmapBoth);
    c.b.disk = DiskState::Inconsistent;
    c.expect(Strategy::NoSync, Rule::BitmapBoth);
    flag(&mut c.a, UuidFlags::SYNC_TARGET);
    c.expect(Strategy::RetryConnect, Rule::TargetOfAnother);
    c.phase = Phase::AfterUnstable;
    c.expect(Strategy::NoSync, Rule::TargetOfAnother);
}

#[test]
fn sets_that_contradict_each_other_never_make_both_sides_target() {
    let c = Case::new(0x10, 0x20).with(|c| {
        slot(&mut c.a, B, 0x20);
        slot(&mut c.b, A, 0x10);
    });
    c.expect(Strategy::SplitBrainDisconnect, Rule::Contradiction);
}

#[test]
fn who_came_back_from_an_announced_generation_is_the_source() {
    const D: NodeId = NodeId(3);
    let came_back = |c: &mut Case| {
        c.features = Features::LOCKSTEP;
        slot(&mut c.a, D, 0x20);
        c.a.uuids.history[0] = Uuid(0x21);
        slot(&mut c.b, D, 0x10);
    };
    let c = Case::new(0x10, 0x20).with(came_back);
    c.expect(Strategy::SourceSetBitmap, Rule::HistorySelf);
    // It may lack what the other one was given before.
    let mut lost = c.clone();
    lost.a.uuids.dirty_bits = 1;
    lost.expect(Strategy::SplitBrainDisconnect, Rule::Contradiction);
    flag(&mut lost.a, UuidFlags::RECONNECT);
    lost.expect(Strategy::SourceSetBitmap, Rule::HistorySelf);
    // Under that name something was written.
    lost.b.uuids.dirty_bits = 1;
    lost.expect(Strategy::SplitBrainDisconnect, Rule::Contradiction);
    // Who took it has been promoted meanwhile.
    let mut promoted = c.clone();
    promoted.b.role = Role::Primary;
    promoted.b.uuids.history[0] = Uuid(0x10);
    promoted.expect(Strategy::SplitBrainDisconnect, Rule::Contradiction);
    flag(&mut promoted.b, UuidFlags::RECONNECT);
    promoted.expect(Strategy::TargetSetBitmap, Rule::HistoryPeer);
    let mut two = promoted.clone();
    two.a.role = Role::Primary;
    two.expect(Strategy::SplitBrainDisconnect, Rule::Contradiction);
    // Without it something was written under the name of before.
    promoted.a.uuids.dirty_bits = 1;
    promoted.expect(Strategy::SplitBrainDisconnect, Rule::Contradiction);
}

#[test]
fn rules_for_old_peers_find_lost_starts_and_ends() {
    let old = |a, b| Case::new(a, b).with(|c| c.version = 101);
    // The target never got the sync UUID: the source's history and slot say what it did.
    let start = old(0x20, 0x50).with(|c| {
        c.a.uuids.history[0] = Uuid(0x50);
        slot(&mut c.a, B, 0x50 + Uuid::NEW_BM_OFFSET);
    });
    start.expect(Strategy::SourceUseBitmap, Rule::SyncSourceMissedStart);
    assert_eq!(start.decide().fixup, Some(Fixup::OwnMissedStart));
    assert_eq!(start.decide_at_peer().fixup, Some(Fixup::PeerMissedStart));

    // Promoted since: other generations have come into its history.
    let later = start
        .clone()
        .with(|c| c.a.uuids.history[..3].copy_from_slice(&[Uuid(0x40), Uuid(0x30), Uuid(0x50)]));
    later.expect(Strategy::SourceUseBitmap, Rule::SyncSourceMissedStart);

    // It missed two starts, or lost them with its power.
    let twice = start
        .clone()
        .with(|c| slot(&mut c.a, B, 0x50 + 2 * Uuid::NEW_BM_OFFSET));
    twice.expect(Strategy::SourceUseBitmap, Rule::SyncSourceMissedStart);

    let end = old(0x20, 0x20).with(|c| {
        slot(&mut c.a, B, 0x50);
        c.a.uuids.history[0] = Uuid(0x60);
        c.b.uuids.history[0] = Uuid(0x50);
        c.b.uuids.history[1] = Uuid(0x60);
    });
    end.expect(Strategy::SourceUseBitmap, Rule::SyncSourceMissedFinish);
    assert_eq!(end.decide().fixup, Some(Fixup::OwnMissedFinish));
    assert_eq!(end.decide_at_peer().fixup, Some(Fixup::PeerMissedFinish));
    let lost = end.clone().with(|c| c.b.uuids.history[1] = Uuid(0x70));
    lost.expect(Strategy::SourceUseBitmap, Rule::SyncSourcePeerMissedFinish);
    end.with(|c| c.version = 90)
        .expect(Strategy::RequiresProtocol(91), Rule::SyncSourceMissedFinish);
    // Slots of other nodes mean nothing to an old peer.
    old(0x10, 0x20)
        .with(|c| slot(&mut c.a, NodeId(2), 0x20))
        .expect(Strategy::UnrelatedData, Rule::NoRelation);
}

#[test]
fn the_better_disk_is_source_if_uuids_do_not_tell() {
    let inconsistent = Case::new(0x10, 0x10).with(|c| c.a.disk = DiskState::Inconsistent);
    inconsistent.expect(Strategy::TargetUseBitmap, Rule::BothOff);
    // Consistent disks of one generation need nothing ...
    let outdated = Case::new(0x10, 0x10).with(|c| c.a.disk = DiskState::Outdated);
    outdated.expect(Strategy::NoSync, Rule::BothOff);
    // ... but an arbitrary direction follows the better one.
    outdated
        .with(|c| flag(&mut c.a, UuidFlags::CRASHED_PRIMARY))
        .expect(Strategy::TargetUseBitmap, Rule::BothOff);
    let attaching = Case::new(0x10, 0x10).with(|c| {
        c.phase = Phase::Attach;
        c.a.disk = DiskState::Negotiating;
        flag(&mut c.a, UuidFlags::INCONSISTENT);
    });
    attaching.expect(Strategy::TargetUseBitmap, Rule::BothOff);
}

#[test]
fn a_crashed_primary_is_no_source_for_a_survivor_that_has_not_noticed_yet() {
    let back = Case::new(0x10, 0x10).with(|c| {
        flag(&mut c.a, UuidFlags::CRASHED_PRIMARY);
        c.a.uuids.dirty_bits = 5;
        flag(&mut c.b, UuidFlags::RECONNECT);
        c.b.disk = DiskState::Consistent;
    });
    // Kernels go by the disks.
    back.expect(Strategy::SourceUseBitmap, Rule::LostQuorum);
    let ours = back.with(|c| c.features = Features::LOCKSTEP);
    ours.expect(Strategy::TargetUseBitmap, Rule::LostQuorum);
    // An Outdated one has missed writes for sure.
    ours.clone()
        .with(|c| c.b.disk = DiskState::Outdated)
        .expect(Strategy::SourceUseBitmap, Rule::LostQuorum);
    // With A or B it has what the survivor lacks.
    ours.with(|c| c.net.protocol = Protocol::A)
        .expect(Strategy::SourceUseBitmap, Rule::CrashedPrimary);
}

#[test]
fn a_target_of_a_third_node_gets_the_bitmap_of_the_generation_it_came_from() {
    let target = Case::new(0x10, 0x10).with(|c| {
        c.b.disk = DiskState::Inconsistent;
        flag(&mut c.b, UuidFlags::SYNC_TARGET);
    });
    target.expect(Strategy::SourceSetBitmap, Rule::BothOff);
    // Where both follow, the marks say what differs, and the source may not know that it is a target.
    let lockstep = |c: &mut Case| c.features = Features::LOCKSTEP;
    let follows = target.clone().with(lockstep);
    follows.expect(Strategy::SourceUseBitmap, Rule::BothOff);
    follows
        .with(|c| slot(&mut c.a, B, 0x90))
        .expect(Strategy::SourceSetBitmap, Rule::BothOff);
    let cases = [
        (B, Strategy::SourceUseBitmap),
        (NodeId(2), Strategy::SourceCopyBitmap(NodeId(2))),
    ];
    for (node, strategy) in cases {
        let case = target.clone().with(|c| {
            slot(&mut c.b, A, 0x30);
            slot(&mut c.a, node, 0x30);
        });
        case.expect(strategy, Rule::BothOff);
    }
    let settled = target.with(|c| slot(&mut c.b, A, 0x10));
    settled.expect(Strategy::SourceUseBitmap, Rule::BothOff);
}

fn split(bend: impl FnOnce(&mut Case)) -> Case {
    let mut c = Case::new(0x10, 0x20);
    slot(&mut c.a, B, 0x30);
    slot(&mut c.b, A, 0x30);
    c.a.uuids.dirty_bits = 10;
    c.b.uuids.dirty_bits = 5;
    c.with(bend)
}

#[test]
fn split_brain_policies_without_a_primary() {
    use AfterSplitBrain as P;
    let (source, target) = (Strategy::SourceUseBitmap, Strategy::TargetUseBitmap);
    let none = Strategy::SplitBrainDisconnect;
    // policy, primary bit of a's and b's slot, marks of a and b, decision of a
    let cases = [
        (P::Disconnect, (0, 0), (10, 5), none),
        (P::DiscardYoungerPrimary, (0, 1), (10, 5), target),
        (P::DiscardYoungerPrimary, (1, 0), (5, 10), source),
        (P::DiscardYoungerPrimary, (1, 1), (10, 5), source),
        (P::DiscardOlderPrimary, (0, 1), (5, 10), source),
        (P::DiscardOlderPrimary, (1, 0), (10, 5), target),
        (P::DiscardOlderPrimary, (0, 0), (5, 10), target),
        (P::DiscardZeroChanges, (0, 0), (0, 0), target),
        (P::DiscardZeroChanges, (0, 0), (1, 0), source),
        (P::DiscardZeroChanges, (0, 0), (0, 1), target),
        (P::DiscardZeroChanges, (0, 0), (1, 1), none),
        (P::DiscardLeastChanges, (0, 0), (5, 10), target),
        (P::DiscardLeastChanges, (0, 0), (10, 5), source),
        (P::DiscardLeastChanges, (0, 0), (5, 5), target),
        (P::DiscardLocal, (0, 0), (10, 5), target),
        (P::DiscardRemote, (0, 0), (10, 5), source),
        (P::Consensus, (0, 0), (10, 5), none),
    ];
    for (policy, bits, marks, strategy) in cases {
        let case = split(|c| {
            c.net.after_sb_0pri = policy;
            c.net.rr_conflict = P::ViolentlyAs0p;
            slot(&mut c.a, B, 0x30 | bits.0);
            slot(&mut c.b, A, 0x30 | bits.1);
            c.a.uuids.dirty_bits = marks.0;
            c.b.uuids.dirty_bits = marks.1;
        });
        case.expect(strategy, Rule::BitmapBoth);
    }
}

#[test]
fn split_brain_policies_with_primaries() {
    use AfterSplitBrain as P;
    let (source, target) = (Strategy::SourceUseBitmap, Strategy::TargetUseBitmap);
    let none = Strategy::SplitBrainDisconnect;
    // 1pri or 2pri policy, 0pri policy, (a, b) are Primary, decision of a, demotion of a first
    let cases = [
        (P::Disconnect, P::DiscardRemote, (true, false), none, false),
        (P::Consensus, P::DiscardRemote, (true, false), source, false),
        (P::Consensus, P::DiscardLocal, (true, false), none, false),
        (
            P::DiscardSecondary,
            P::Disconnect,
            (true, false),
            source,
            false,
        ),
        (
            P::DiscardSecondary,
            P::Disconnect,
            (false, true),
            target,
            false,
        ),
        (
            P::ViolentlyAs0p,
            P::DiscardLocal,
            (true, false),
            target,
            false,
        ),
        (
            P::CallPriLostAfterSb,
            P::DiscardLocal,
            (true, false),
            target,
            true,
        ),
        (
            P::CallPriLostAfterSb,
            P::DiscardRemote,
            (true, false),
            source,
            false,
        ),
        (P::Disconnect, P::DiscardLocal, (true, true), none, false),
        (
            P::ViolentlyAs0p,
            P::DiscardRemote,
            (true, true),
            source,
            false,
        ),
        (
            P::CallPriLostAfterSb,
            P::DiscardLocal,
            (true, true),
            target,
            true,
        ),
        (
            P::DiscardSecondary,
            P::DiscardLocal,
            (true, true),
            none,
            false,
        ),
    ];
    for (policy, zero, (a, b), strategy, demote) in cases {
        let case = split(|c| {
            c.net.after_sb_0pri = zero;
            c.net.after_sb_1pri = policy;
            c.net.after_sb_2pri = policy;
            c.net.rr_conflict = P::ViolentlyAs0p;
            c.a.role = if a { Role::Primary } else { Role::Secondary };
            c.b.role = if b { Role::Primary } else { Role::Secondary };
        });
        case.expect(strategy, Rule::BitmapBoth);
        assert_eq!(case.decide().demote_first, demote);
    }
}

#[test]
fn a_split_brain_is_left_alone_while_a_side_is_unstable() {
    let case = split(|c| c.b.uuids.flags.remove(UuidFlags::STABLE));
    case.expect(Strategy::NoSync, Rule::BitmapBoth);
    assert!(case.decide().handlers.is_empty());
    let after = split(|c| c.phase = Phase::AfterUnstable);
    assert_eq!(after.decide().strategy, Strategy::SourceUseBitmap);
    let lockstep = after.with(|c| c.features = Features::LOCKSTEP);
    lockstep.expect(Strategy::SourceUseBitmap, Rule::BitmapBoth);
    lockstep
        .with(|c| c.a.disk = DiskState::Outdated)
        .expect(Strategy::TargetUseBitmap, Rule::BitmapBoth);
}

#[test]
fn the_quorate_side_wins_a_split_brain() {
    let case = split(|c| {
        c.quorum = true;
        c.a.quorate = false;
    });
    case.expect(Strategy::TargetUseBitmap, Rule::BitmapBoth);
    case.with(|c| c.phase = Phase::Attach)
        .expect(Strategy::SplitBrainDisconnect, Rule::BitmapBoth);
}

#[test]
fn a_name_alone_that_both_have_lost_the_bitmap_of_is_no_branch() {
    let lost = |bend: fn(&mut Case)| {
        let mut c = Case::new(0x10, 0x20);
        c.features = Features::LOCKSTEP;
        c.a.uuids.history[0] = Uuid(0x30);
        c.b.uuids.history[0] = Uuid(0x30);
        slot(&mut c.a, B, 0x40);
        slot(&mut c.b, A, 0x30);
        bend(&mut c);
        c
    };
    lost(|_| {}).expect(Strategy::SourceSetBitmap, Rule::HistoryBoth);
    let branches: [fn(&mut Case); 4] = [
        |c| c.b.uuids.dirty_bits = 1,
        |c| c.b.role = Role::Primary,
        |c| slot(&mut c.b, A, 0x50),
        |c| c.features = Features::empty(),
    ];
    for branch in branches {
        lost(branch).expect(Strategy::SplitBrainDisconnect, Rule::HistoryBoth);
    }
}

#[test]
fn discard_my_data_solves_a_split_brain_and_turns_a_direction() {
    split(|c| flag(&mut c.a, UuidFlags::DISCARD_MY_DATA))
        .expect(Strategy::TargetUseBitmap, Rule::BitmapBoth);
    let mut history = Case::new(0x10, 0x20).with(|c| {
        c.a.uuids.history[0] = Uuid(0x30);
        c.b.uuids.history[0] = Uuid(0x30);
    });
    history.net.always_asbp = true;
    history.net.after_sb_0pri = AfterSplitBrain::DiscardRemote;
    history.expect(Strategy::SourceSetBitmap, Rule::HistoryBoth);
    history.net.always_asbp = false;
    history.expect(Strategy::SplitBrainDisconnect, Rule::HistoryBoth);
    flag(&mut history.b, UuidFlags::DISCARD_MY_DATA);
    history.expect(Strategy::SourceSetBitmap, Rule::HistoryBoth);

    let mut plain = Case::new(0x10, 0x20).with(|c| slot(&mut c.a, B, 0x20));
    flag(&mut plain.a, UuidFlags::DISCARD_MY_DATA);
    plain.expect(Strategy::TargetUseBitmap, Rule::BitmapSelf);
    plain.b.disk = DiskState::Inconsistent;
    plain.expect(Strategy::SourceUseBitmap, Rule::BitmapSelf);
}

#[test]
fn rr_conflict_keeps_a_primary_from_becoming_target() {
    use AfterSplitBrain as P;
    let conflict = |policy| {
        Case::new(0x10, 0x20).with(|c| {
            slot(&mut c.b, A, 0x10);
            c.a.role = Role::Primary;
            c.b.uuids.dirty_bits = 1;
            c.net.rr_conflict = policy;
        })
    };
    let cases = [
        (P::Disconnect, Strategy::SyncTargetPrimaryDisconnect),
        (P::RetryConnect, Strategy::SyncTargetPrimaryReconnect),
        (P::ViolentlyAs0p, Strategy::TargetUseBitmap),
        (P::CallPriLostAfterSb, Strategy::SyncTargetPrimaryDisconnect),
        (P::AutoDiscard, Strategy::SyncTargetPrimaryDisconnect),
    ];
    for (policy, strategy) in cases {
        let verdict = conflict(policy).decide();
        assert_eq!(verdict.strategy, strategy);
        let calls = verdict.handlers == vec![Handler::PriLost];
        assert_eq!(calls, policy == P::CallPriLostAfterSb);
    }
    let empty = conflict(P::Disconnect).with(|c| c.b.uuids.dirty_bits = 0);
    empty.expect(Strategy::TargetUseBitmap, Rule::BitmapPeer);
}

#[test]
fn auto_discard_turns_the_crashed_primary_rule_on_both_ends() {
    Case::new(0x10, 0x10)
        .with(|c| {
            c.net.protocol = Protocol::A;
            c.net.rr_conflict = AfterSplitBrain::AutoDiscard;
            flag(&mut c.b, UuidFlags::CRASHED_PRIMARY);
            c.b.uuids.dirty_bits = 4;
            c.a.role = Role::Primary;
        })
        .expect(Strategy::SourceUseBitmap, Rule::CrashedPrimary);
}

#[test]
fn survivors_of_a_lost_primary_reconcile_equal_uuids() {
    let tag = |dagtag| {
        Some(LostPrimary {
            node: NodeId(2),
            dagtag: Dagtag(dagtag),
        })
    };
    let case = Case::new(0x10, 0x10).with(|c| {
        c.features = Features::RECONCILE_RECONNECT;
        flag(&mut c.a, UuidFlags::RECONNECT);
        flag(&mut c.b, UuidFlags::RECONNECT);
        c.a.uuids.dirty_bits = 1;
        c.lost = (tag(5), tag(7));
    });
    case.expect(Strategy::SourceUseBitmap, Rule::ReconcileOneSided);
    assert!(case.decide().reconciliation);
    let both = case.clone().with(|c| c.b.uuids.dirty_bits = 1);
    both.expect(Strategy::TargetUseBitmap, Rule::ReconcileDagtag);
    both.with(|c| c.lost.0 = tag(7))
        .expect(Strategy::SourceUseBitmap, Rule::ReconcileDagtag);
    case.clone()
        .with(|c| c.lost = (None, None))
        .expect(Strategy::NoSync, Rule::Reconnected);
    case.with(|c| c.features = Features::empty())
        .expect(Strategy::NoSync, Rule::Reconnected);
}

#[test]
fn marked_blocks_are_resynced_between_two_lockstep_nodes() {
    let base = Case::new(0x10, 0x10).with(|c| {
        flag(&mut c.a, UuidFlags::RECONNECT);
        flag(&mut c.b, UuidFlags::RECONNECT);
        c.a.uuids.dirty_bits = 2;
    });
    base.expect(Strategy::NoSync, Rule::Reconnected);
    let base = base.with(|c| c.features = Features::LOCKSTEP);
    let (source, target) = (Strategy::SourceUseBitmap, Strategy::TargetUseBitmap);
    let is = |case: Case, strategy| case.expect(strategy, Rule::MarkedBlocks);
    let both = base.clone().with(|c| c.b.uuids.dirty_bits = 3);
    is(base.clone(), source);
    is(both.clone(), target);
    is(both.clone().with(|c| c.a.uuids.dirty_bits = 3), source);
    is(both.clone().with(|c| c.a.role = Role::Primary), source);
    // A node that came back with marks may be stale, the survivor never is.
    is(
        base.clone()
            .with(|c| c.a.uuids.flags.remove(UuidFlags::RECONNECT)),
        target,
    );
    is(
        both.clone()
            .with(|c| c.b.uuids.flags.remove(UuidFlags::RECONNECT)),
        source,
    );
    let crashed = both
        .clone()
        .with(|c| flag(&mut c.b, UuidFlags::CRASHED_PRIMARY));
    is(crashed.clone(), source);
    is(crashed.with(|c| c.net.protocol = Protocol::B), target);
    // Two Primaries: late writes of one are fine, of both are not.
    let two = |c: &mut Case| {
        c.a.role = Role::Primary;
        c.b.role = Role::Primary;
    };
    is(base.with(two), source);
    let refused = both.clone().with(two);
    refused.expect(Strategy::NoSync, Rule::Reconnected);
    let came_back = |c: &mut Case| {
        two(c);
        c.net.allow_two_primaries = true;
        c.a.uuids.flags.remove(UuidFlags::RECONNECT);
        c.b.uuids.flags.remove(UuidFlags::RECONNECT);
    };
    both.clone()
        .with(came_back)
        .expect(Strategy::SplitBrainDisconnect, Rule::MarkedBlocks);
    // Where two are allowed, neither has completed anything without the other.
    let allowed = |c: &mut Case| {
        two(c);
        c.net.allow_two_primaries = true;
    };
    both.with(allowed)
        .expect(Strategy::NoSync, Rule::Reconnected);
}

#[test]
fn whoever_left_the_other_behind_has_what_it_missed() {
    let base = Case::new(0x10, 0x10).with(|c| {
        c.features = Features::LOCKSTEP;
        slot(&mut c.a, B, 0x20);
        c.a.uuids.dirty_bits = 2;
        c.b.uuids.dirty_bits = 300;
    });
    base.clone()
        .expect(Strategy::SourceUseBitmap, Rule::MarkedBlocks);
    // Somebody who stayed with a Primary, or with the other one's disk, knows better.
    let stayed = |c: &mut Case| flag(&mut c.b, UuidFlags::RECONNECT);
    base.with(stayed)
        .expect(Strategy::TargetUseBitmap, Rule::MarkedBlocks);
}

#[test]
fn a_stale_primary_that_has_served_nothing_gets_what_it_lacks() {
    // Its disk came back with marks, and it was promoted alone: on the same generation still.
    let promoted = Case::new(0x10, 0x11).with(|c| {
        c.features = Features::LOCKSTEP;
        c.a.role = Role::Primary;
        c.a.uuids.dirty_bits = 2;
        c.a.uuids.slots = NodeMask::of(A).with(B);
        c.b.uuids.slots = NodeMask::of(A).with(B);
    });
    promoted.expect(Strategy::TargetUseBitmap, Rule::MarkedBlocks);
    // A third node may have brought the peer to the Primary's generation.
    for known_to in [A, B] {
        let three = promoted.clone().with(|c| {
            let side = if known_to == A { &mut c.a } else { &mut c.b };
            side.uuids.slots.insert(NodeId(2));
        });
        assert_eq!(
            three.decide().strategy,
            Strategy::SyncTargetPrimaryDisconnect
        );
    }
    promoted
        .clone()
        .with(|c| flag(&mut c.b, UuidFlags::RECONNECT))
        .expect(Strategy::TargetUseBitmap, Rule::MarkedBlocks);
    // In an attach it may have served much.
    let attach = promoted.clone().with(|c| c.phase = Phase::Attach);
    assert_eq!(
        attach.decide().strategy,
        Strategy::SyncTargetPrimaryDisconnect
    );
    assert_eq!(attach.decide_at_peer().strategy, Strategy::SourceUseBitmap);
    // Nor is a Primary overwritten that followed the peer all the time.
    let survivor = Case::new(0x10, 0x10).with(|c| {
        c.features = Features::LOCKSTEP;
        c.a.role = Role::Primary;
        c.a.uuids.dirty_bits = 2;
        flag(&mut c.a, UuidFlags::RECONNECT);
    });
    survivor.expect(Strategy::SourceUseBitmap, Rule::MarkedBlocks);
}

#[test]
fn marks_between_a_good_disk_and_one_that_is_behind_are_resynced() {
    let case = Case::new(0x10, 0x11).with(|c| {
        c.features = Features::LOCKSTEP;
        c.a.disk = DiskState::Outdated;
        c.b.role = Role::Primary;
        c.b.uuids.dirty_bits = 2;
        flag(&mut c.a, UuidFlags::RECONNECT);
        flag(&mut c.b, UuidFlags::RECONNECT);
    });
    case.expect(Strategy::TargetUseBitmap, Rule::MarkedBlocks);
    case.clone()
        .with(|c| c.b.uuids.dirty_bits = 0)
        .expect(Strategy::NoSync, Rule::Reconnected);
    // A kernel peer has its own ways.
    case.with(|c| c.features = Features::empty())
        .expect(Strategy::NoSync, Rule::Reconnected);
}

#[test]
fn arbitrary_directions_follow_a_primary() {
    let state = Strategy::TargetIfBothFailed;
    let (primary, secondary) = (Role::Primary, Role::Secondary);
    assert_eq!(
        state.to_repl_state(primary, secondary),
        Some(ReplState::WfBitmapS)
    );
    assert_eq!(
        state.to_repl_state(secondary, primary),
        Some(ReplState::WfBitmapT)
    );
    assert_eq!(
        state.to_repl_state(primary, primary),
        Some(ReplState::Established)
    );
    assert_eq!(
        state.to_repl_state(secondary, secondary),
        Some(ReplState::WfBitmapT)
    );
    let fixed = Strategy::SourceSetBitmap;
    assert_eq!(
        fixed.to_repl_state(secondary, primary),
        Some(ReplState::WfBitmapS)
    );
    assert_eq!(
        Strategy::NoSync.to_repl_state(primary, secondary),
        Some(ReplState::Established)
    );
    assert_eq!(
        Strategy::UnrelatedData.to_repl_state(primary, secondary),
        None
    );
}

fn random_side(rng: &mut Rng, node: NodeId) -> Side {
    let pool = [0, 0, 4, 0x10, 0x11, 0x20, 0x30, 0x31, 0x40, u64::MAX];
    let pick = |rng: &mut Rng, from: &[u64]| Uuid(from[rng.below(from.len() as u64) as usize]);
    let mut side = side(node, 0);
    side.uuids.current = pick(rng, &[0, 4, 0x10, 0x10, 0x10, 0x11, 0x20, 0x30]);
    for index in 0..4 {
        side.uuids.bitmap[index] = pick(rng, &pool);
    }
    for index in 0..rng.below(4) as usize {
        side.uuids.history[index] = pick(rng, &[0x10, 0x20, 0x30, 0x40, 0x50]);
    }
    side.uuids.dirty_bits = rng.below(3);
    for bit in [0, 1, 2, 8, 10, 11] {
        if rng.below(4) == 0 {
            side.uuids.flags |= UuidFlags::from_bits_retain(1 << bit);
        }
    }
    if rng.below(8) == 0 {
        side.uuids.flags.remove(UuidFlags::STABLE);
    }
    let disks = [
        DiskState::Inconsistent,
        DiskState::Outdated,
        DiskState::Consistent,
        DiskState::UpToDate,
        DiskState::UpToDate,
        DiskState::UpToDate,
    ];
    side.disk = disks[rng.below(6) as usize];
    if rng.below(4) == 0 {
        side.role = Role::Primary;
    }
    side.quorate = rng.below(3) != 0;
    side
}

fn random_case(rng: &mut Rng) -> Case {
    use AfterSplitBrain as P;
    let mut case = Case::new(0, 0);
    case.a = random_side(rng, A);
    case.b = random_side(rng, B);
    case.version = [86, 95, 101, 118, 119, 120, 121, 123, 124][rng.below(9) as usize];
    let phases = [Phase::Connect, Phase::Attach, Phase::AfterUnstable];
    case.phase = phases[rng.below(3) as usize];
    if case.phase == Phase::Attach && rng.below(2) == 0 {
        case.a.disk = DiskState::Negotiating;
    }
    if case.version >= 124 && rng.below(2) == 0 {
        case.features = Features::LOCKSTEP | Features::RECONCILE_RECONNECT;
    }
    case.a_resolves = rng.below(2) == 0;
    case.quorum = rng.below(2) == 0;
    let zero = [
        P::Disconnect,
        P::DiscardYoungerPrimary,
        P::DiscardOlderPrimary,
        P::DiscardZeroChanges,
        P::DiscardLeastChanges,
        P::DiscardLocal,
        P::DiscardRemote,
    ];
    let more = [
        P::Disconnect,
        P::Consensus,
        P::ViolentlyAs0p,
        P::DiscardSecondary,
        P::CallPriLostAfterSb,
    ];
    case.net.after_sb_0pri = zero[rng.below(7) as usize];
    case.net.after_sb_1pri = more[rng.below(5) as usize];
    case.net.after_sb_2pri = more[rng.below(5) as usize];
    case.net.always_asbp = rng.below(2) == 0;
    case.net.protocol = [Protocol::A, Protocol::B, Protocol::C][rng.below(3) as usize];
    case.net.rr_conflict = [P::ViolentlyAs0p, P::AutoDiscard][rng.below(2) as usize];
    for lost in [&mut case.lost.0, &mut case.lost.1] {
        if rng.below(3) == 0 {
            *lost = Some(LostPrimary {
                node: NodeId(2),
                dagtag: Dagtag(rng.below(3)),
            });
        }
    }
    case
}

/// Results that one side may reach alone: the connection fails whatever the other decides.
fn ends_the_connection(strategy: Strategy) -> bool {
    strategy.disconnects() || strategy.retries()
}

#[test]
fn both_ends_decide_mirrored_for_random_sets() {
    let mut rng = Rng::new(0x5EED);
    let mut rules = [0u32; 32];
    for round in 0..200_000 {
        let case = random_case(&mut rng);
        let (here, there) = (case.decide(), case.decide_at_peer());
        rules[here.rule as usize] += 1;
        if ends_the_connection(here.strategy) || ends_the_connection(there.strategy) {
            continue;
        }
        let kernel_tie = case.phase == Phase::AfterUnstable && here.split_brain;
        if kernel_tie && !case.features.contains(Features::LOCKSTEP) {
            continue;
        }
        assert_eq!(
            there.strategy,
            here.strategy.mirrored(),
            "round {round}: {:?} {:?}\n{:?}\n{:?}",
            here.rule,
            there.rule,
            case.a,
            case.b
        );
        let roles = (case.a.role, case.b.role);
        let states = (
            here.strategy.to_repl_state(roles.0, roles.1),
            there.strategy.to_repl_state(roles.1, roles.0),
        );
        let fine = matches!(
            states,
            (Some(ReplState::Established), Some(ReplState::Established))
                | (Some(ReplState::WfBitmapS), Some(ReplState::WfBitmapT))
                | (Some(ReplState::WfBitmapT), Some(ReplState::WfBitmapS))
        );
        assert!(fine, "round {round}: {states:?}");
    }
    let reached = rules.iter().filter(|count| **count > 0).count();
    assert!(reached >= 22, "only {reached} rules were reached");
}

#[test]
fn an_unresolved_split_brain_is_seen_by_both_ends() {
    let mut rng = Rng::new(0xB0B);
    for _ in 0..100_000 {
        let case = random_case(&mut rng);
        let (here, there) = (case.decide(), case.decide_at_peer());
        assert_eq!(here.split_brain, there.split_brain);
        let apart = |verdict: &Verdict| {
            matches!(
                verdict.strategy,
                Strategy::SplitBrainDisconnect | Strategy::UnrelatedData
            )
        };
        assert_eq!(apart(&here), apart(&there));
    }
}
