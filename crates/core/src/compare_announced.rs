//! Generations that a Primary announced and did not make (semantics.md, 12.6): who follows whom where one
//! node took it and the other did not go on to it. Between two Lockstep nodes only.

use lockstep_format::units::Uuid;
use lockstep_format::wire::{DiskState, UuidFlags};

use super::{
    Direction, Handshake, Phase, Row, Rule, Side, SlotOf, Strategy, Verdict, find_slot, row,
};
use crate::uuids::is_real;

/// Between two Lockstep nodes: a Primary told its next generation, lost the follower before it made
/// it, and is still Primary; without that follower it may lack the quorum to make another one. The
/// follower has nothing that the Primary lacks as long as nobody else wrote under that name, which
/// its marks would tell. Nor has it if the Primary was demoted since: what it wrote last, and what its
/// applications saw fail, is at its disk alone. One that is being copied itself has nothing to give.
pub(super) fn announcer_lives_on(h: &Handshake<'_>, own: Uuid, peer: Uuid) -> Option<Row> {
    let announced = |primary: &Side, follower: &Side, to: Uuid, base: Uuid| {
        let slot = follower.uuids.slot(primary.node);
        // It may have been at an older one, and taken both at once.
        let both_at_once = is_real(slot)
            && slot.same_generation(primary.uuids.slot(follower.node))
            && follower.uuids.history_has(base);
        // A Primary whose disk is only being attached has shown its applications what the follower has.
        let served = primary.disk == DiskState::Negotiating && follower.disk == DiskState::UpToDate;
        (primary.is_primary() || gave_up(h, primary, follower))
            && primary.effective_disk() > DiskState::Inconsistent
            && !served
            && !follower.is_primary()
            && primary.uuids.history_notes(to)
            && (slot.same_generation(base) || both_at_once)
            && (follower.uuids.dirty_bits == 0 || follower.flag(UuidFlags::UNWRITTEN))
    };
    if !h.is_lockstep() {
        None
    } else if announced(h.own, h.peer, peer, own) {
        Some(row(Strategy::SourceUseBitmap, Rule::HistorySelf))
    } else if announced(h.peer, h.own, own, peer) {
        Some(row(Strategy::TargetUseBitmap, Rule::HistoryPeer))
    } else {
        None
    }
}

/// Between two Lockstep nodes: one of them took a generation that its Primary announced, and that Primary, which did
/// not make it, has copied its data here since. The other one has kept it: each knows the other's as an older one. It
/// has nothing that the former lacks, as above. If it has been promoted since, it gives nothing up, and need not: who
/// would have written under the older name meanwhile, without it, would have made a new one, or marks for it.
pub(super) fn came_back(h: &Handshake<'_>, own: Uuid, peer: Uuid) -> Option<Row> {
    let came_back = |back: &Side, follower: &Side| {
        let (to, base) = (follower.uuids.current, back.uuids.current);
        // Nor may its disk have lost anything since.
        let lived_on = back.flag(UuidFlags::RECONNECT) || back.uuids.dirty_bits == 0;
        back.uuids.history_notes(to)
            && lived_on
            && !back.flag(UuidFlags::CRASHED_PRIMARY)
            && back.effective_disk() > DiskState::Inconsistent
            && !follower.uuids.history_notes(base)
            && !follower.is_primary()
            && follower.uuids.dirty_bits == 0
    };
    let stays = |follower: &Side, back: &Side| {
        let (to, base) = (follower.uuids.current, back.uuids.current);
        follower.is_primary()
            && follower.disk == DiskState::UpToDate
            && follower.flag(UuidFlags::RECONNECT)
            && !follower.flag(UuidFlags::CRASHED_PRIMARY)
            && follower.uuids.history_has(base)
            && !follower.uuids.history_notes(base)
            && back.uuids.history_notes(to)
            && !back.is_primary()
            && back.uuids.dirty_bits == 0
    };
    if !h.is_lockstep() || !is_real(own) || !is_real(peer) {
        None
    } else if came_back(h.own, h.peer) || stays(h.own, h.peer) {
        Some(row(Strategy::SourceSetBitmap, Rule::HistorySelf))
    } else if came_back(h.peer, h.own) || stays(h.peer, h.own) {
        Some(row(Strategy::TargetSetBitmap, Rule::HistoryPeer))
    } else {
        None
    }
}

/// Between two Lockstep nodes, where else there would be a split brain: one of them has written nothing since the
/// generation that it names for the other, which has gone on from there. The new name of its data means nothing.
pub(super) fn unwritten(h: &Handshake<'_>) -> Option<Row> {
    let one_base = is_real(h.own_slot()) && h.own_slot().same_generation(h.peer_slot());
    let yields = |side: &Side, other: &Side| {
        // What it had got before may have been in the other's cache alone, and be here still.
        let lost = other.flag(UuidFlags::CACHE_LOST) && !side.flag(UuidFlags::CACHE_LOST);
        !lost
            && side.uuids.yields_to(&other.uuids, other.node)
            && !side.is_primary()
            && other.effective_disk() > DiskState::Inconsistent
    };
    if !h.is_lockstep() {
        return None;
    }
    let direction = match (yields(h.own, h.peer), yields(h.peer, h.own)) {
        (true, false) => Direction::Target,
        (false, true) => Direction::Source,
        (true, true) if one_base => {
            // A Primary goes on writing under the generation of its follower.
            let own = (follows(h.own, h.peer), h.own.effective_disk());
            let peer = (follows(h.peer, h.own), h.peer.effective_disk());
            match own > peer || own == peer && h.own.node < h.peer.node {
                true => Direction::Source,
                false => Direction::Target,
            }
        }
        (true, true) | (false, false) => return None,
    };
    let rule = match direction {
        Direction::Source => Rule::HistorySelf,
        Direction::Target => Rule::HistoryPeer,
    };
    Some(match one_base {
        true => row(direction.use_bitmap(), rule),
        false => row(direction.set_bitmap(), rule),
    })
}

/// The slot of `side` that calls `other` older, which is at that generation.
pub(super) fn newer(h: &Handshake<'_>, side: &Side, other: &Side, uuid: Uuid) -> Option<SlotOf> {
    find_slot(h, side, other.node, uuid).filter(|slot| !names_source(h, side, other, *slot))
}

/// Between two Lockstep nodes: the slot of a third node names what a target is being copied from, and its own generation
/// is one that the other node has left. That one is not older.
fn names_source(h: &Handshake<'_>, target: &Side, other: &Side, slot: SlotOf) -> bool {
    h.is_lockstep()
        && matches!(slot, SlotOf::Other(_))
        && target.flag(UuidFlags::SYNC_TARGET)
        && target.flag(UuidFlags::INCONSISTENT)
        && other.uuids.history_has(target.uuids.current)
}

/// Between two Lockstep nodes that call each other older: one has written nothing since the very generation of the other
/// one, which lost what it had in its cache since then. What both had acknowledged is at the former.
pub(super) fn lost_its_cache(h: &Handshake<'_>) -> Option<Row> {
    let keeps = |side: &Side, other: &Side| {
        let base = side.uuids.base_for(other.node);
        other.flag(UuidFlags::CACHE_LOST)
            && !side.flag(UuidFlags::CACHE_LOST)
            && base.is_some_and(|base| base.same_generation(other.uuids.current))
            && side.effective_disk() > DiskState::Inconsistent
            && !other.is_primary()
            // It may have what the former never got.
            && other.uuids.dirty_bits == 0
    };
    match h.is_lockstep() {
        true if keeps(h.own, h.peer) => Some(row(Strategy::SourceSetBitmap, Rule::HistorySelf)),
        true if keeps(h.peer, h.own) => Some(row(Strategy::TargetSetBitmap, Rule::HistoryPeer)),
        true | false => None,
    }
}

/// This node has a Primary that is not the other one (its last words may still name that one).
fn follows(side: &Side, other: &Side) -> bool {
    let primaries = side.uuids.node_mask.without(other.node);
    !side.flag(UuidFlags::STABLE) && !primaries.is_empty()
}

/// It was demoted without that follower, and lived on: its disk lost nothing. Nor has it where both were
/// connected all the time. A follower that has another Primary by now stays with that one.
fn gave_up(h: &Handshake<'_>, primary: &Side, follower: &Side) -> bool {
    let lived_on = match h.phase {
        Phase::Connect => primary.flag(UuidFlags::RECONNECT),
        // Neither is just being attached, as is asked below.
        Phase::Attach | Phase::AfterUnstable => true,
    };
    lived_on
        && !primary.flag(UuidFlags::CRASHED_PRIMARY)
        && primary.disk == DiskState::UpToDate
        && follower.disk != DiskState::Negotiating
        && !follows(follower, primary)
}

/// Between two Lockstep nodes: a disk that is not whole took a generation that its Primary had announced, and not
/// made when it died. Nothing was written under it that the Primary's disk lacks, which is the source.
pub(super) fn apply_announced(h: &Handshake<'_>, verdict: &mut Verdict) {
    let Some(direction) = verdict.strategy.direction() else {
        return;
    };
    let (source, target) = match direction {
        Direction::Source => (h.own, h.peer),
        Direction::Target => (h.peer, h.own),
    };
    let whole = [
        DiskState::Outdated,
        DiskState::Consistent,
        DiskState::UpToDate,
    ];
    if h.is_lockstep()
        && source.effective_disk() == DiskState::Inconsistent
        && !source.is_primary()
        && whole.contains(&target.effective_disk())
        && target.uuids.history_notes(source.uuids.current)
    {
        verdict.strategy = direction.mirrored().use_bitmap();
    }
}
