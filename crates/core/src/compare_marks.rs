//! Equal generations with marked blocks: reconciliation of survivors (semantics.md, 13.5), and the
//! rule marked-blocks (head of `compare.rs`).

use lockstep_format::wire::{DiskState, Features, UuidFlags};

use super::{Direction, Handshake, Phase, Rule, Strategy, Verdict, follower, may_be_stale};
use crate::options::Protocol;
use crate::uuids::is_real;

/// Equal UUIDs and both UpToDate, but marked blocks: reconcile (13.5) or the rule marked-blocks.
pub(super) fn apply_marks(h: &Handshake<'_>, verdict: &mut Verdict) {
    let both_up_to_date = h.own.effective_disk() == DiskState::UpToDate
        && h.peer.effective_disk() == DiskState::UpToDate;
    let equal = !matches!(verdict.rule, Rule::JustCreatedBoth);
    if verdict.strategy != Strategy::NoSync || !h.has_dirty_bits() || !equal {
        return;
    }
    if let Some(direction) = by_one_up_to_date(h) {
        verdict.rule = Rule::MarkedBlocks;
        verdict.strategy = direction.use_bitmap();
        return;
    }
    if let Some((direction, rule)) = survivors(h) {
        verdict.strategy = direction.use_bitmap();
        verdict.reconciliation = rule == Rule::ReconcileDagtag;
        verdict.rule = rule;
        return;
    }
    if !both_up_to_date || both_stayed(h) {
        return;
    }
    if let Some((direction, rule)) = reconcile(h) {
        verdict.strategy = direction.use_bitmap();
        verdict.rule = rule;
        verdict.reconciliation = true;
    } else if h.is_lockstep() {
        verdict.strategy = match marked_blocks_source(h) {
            Some(direction) => direction.use_bitmap(),
            // They cannot connect before one of them gives its role up, whatever is marked: both are of one
            // generation still, and a frozen one waits.
            None if !h.net.allow_two_primaries => return,
            None => Strategy::SplitBrainDisconnect,
        };
        verdict.rule = Rule::MarkedBlocks;
    }
}

/// Between two Lockstep nodes: one disk is UpToDate, and the other is known to have missed
/// something. (One that is Consistent becomes UpToDate when it knows that it may. Beside a Primary
/// that would be without another comparison.)
fn by_one_up_to_date(h: &Handshake<'_>) -> Option<Direction> {
    match (h.own.effective_disk(), h.peer.effective_disk()) {
        _ if !h.is_lockstep() => None,
        (DiskState::UpToDate, DiskState::Outdated) => Some(Direction::Source),
        (DiskState::Outdated, DiskState::UpToDate) => Some(Direction::Target),
        (DiskState::UpToDate, DiskState::Consistent) if h.own.is_primary() => {
            Some(Direction::Source)
        }
        (DiskState::Consistent, DiskState::UpToDate) if h.peer.is_primary() => {
            Some(Direction::Target)
        }
        _ => None,
    }
}

/// Between two Lockstep nodes that meet again: both have lost a Primary, and at least one of them does not know yet whether
/// anybody still has it. Whoever came further is copied from. If that is not known, it is not the one that is Outdated.
fn survivors(h: &Handshake<'_>) -> Option<(Direction, Rule)> {
    let disks = (h.own.effective_disk(), h.peer.effective_disk());
    let (outdated, consistent) = (DiskState::Outdated, DiskState::Consistent);
    let by_disk = match disks {
        (a, b) if a == consistent && b == outdated => Some(Direction::Source),
        (a, b) if a == outdated && b == consistent => Some(Direction::Target),
        (a, b) if a == consistent && b == consistent => None,
        _ => return None,
    };
    let primary = h.own.is_primary() || h.peer.is_primary();
    if !h.is_lockstep() || h.phase != Phase::Connect || primary {
        return None;
    }
    let by_disk = by_disk.map(|direction| (direction, Rule::MarkedBlocks));
    let by_words = by_words(h).map(|direction| (direction, Rule::ReconcileDagtag));
    by_words.or(by_disk)
}

/// Both have lost one Primary, and one of them came further.
fn by_words(h: &Handshake<'_>) -> Option<Direction> {
    let (own, peer) = h.own_lost.zip(h.peer_lost)?;
    if own.node != peer.node || own.dagtag == peer.dagtag {
        return None;
    }
    match own.dagtag.is_newer_than(peer.dagtag) {
        true => Some(Direction::Source),
        false => Some(Direction::Target),
    }
}

/// Two Primaries that lost nothing but their connection, and completed nothing without each other,
/// or their generations would differ. Their marks are of writes that both have.
fn both_stayed(h: &Handshake<'_>) -> bool {
    let stayed = |side: &super::Side| {
        side.is_primary()
            && side.disk == DiskState::UpToDate
            && side.flag(UuidFlags::RECONNECT)
            && !side.flag(UuidFlags::CRASHED_PRIMARY)
    };
    let allowed = h.net.allow_two_primaries;
    allowed && h.phase == Phase::Connect && stayed(h.own) && stayed(h.peer)
}

fn reconcile(h: &Handshake<'_>) -> Option<(Direction, Rule)> {
    let troubled = UuidFlags::CRASHED_PRIMARY | UuidFlags::PRIMARY_LOST_QUORUM;
    if !h.features.contains(Features::RECONCILE_RECONNECT)
        || h.phase != Phase::Connect
        || h.own.uuids.flags.intersects(troubled)
        || h.peer.uuids.flags.intersects(troubled)
    {
        return None;
    }
    if h.is_lockstep() && may_be_stale(h, h.own) != may_be_stale(h, h.peer) {
        // The rule "the side with marks is source" would spread stale blocks.
        return None;
    }
    match (h.own.uuids.dirty_bits != 0, h.peer.uuids.dirty_bits != 0) {
        (own, peer) if own != peer => {
            if h.own_lost.is_none() && h.peer_lost.is_none() {
                return None;
            }
            let direction = if own {
                Direction::Source
            } else {
                Direction::Target
            };
            Some((direction, Rule::ReconcileOneSided))
        }
        _ => {
            let (own, peer) = (h.own_lost?, h.peer_lost?);
            if own.node != peer.node {
                return None;
            }
            let ahead = if own.dagtag == peer.dagtag {
                h.own.node < h.peer.node
            } else {
                own.dagtag.is_newer_than(peer.dagtag)
            };
            let direction = if ahead {
                Direction::Source
            } else {
                Direction::Target
            };
            Some((direction, Rule::ReconcileDagtag))
        }
    }
}

/// Source of the rule marked-blocks, none if both sides are Primary with marks (module's head).
fn marked_blocks_source(h: &Handshake<'_>) -> Option<Direction> {
    let prefer = |own: bool, peer: bool| match (own, peer) {
        (true, false) => Some(Direction::Source),
        (false, true) => Some(Direction::Target),
        (true, true) | (false, false) => None,
    };
    let crashed = prefer(
        h.own.flag(UuidFlags::CRASHED_PRIMARY),
        h.peer.flag(UuidFlags::CRASHED_PRIMARY),
    );
    let lost_quorum = prefer(
        h.own.flag(UuidFlags::PRIMARY_LOST_QUORUM),
        h.peer.flag(UuidFlags::PRIMARY_LOST_QUORUM),
    );
    let by_crash = match h.net.protocol {
        Protocol::C => crashed.map(Direction::mirrored),
        // Before it knew of its loss it completed writes alone.
        Protocol::A | Protocol::B => crashed.or(lost_quorum),
    };
    let marks = (h.own.uuids.dirty_bits, h.peer.uuids.dirty_bits);
    let by_node = || prefer(h.own.node < h.peer.node, h.peer.node < h.own.node);
    let two_primaries = h.own.is_primary() && h.peer.is_primary();
    if h.phase == Phase::AfterUnstable && !two_primaries {
        // Nobody came back: the marks are of a Primary that both lost. Each side may know the
        // other's marks of before that only, so that nothing may depend on their number.
        return follower(h)
            .or_else(|| prefer(h.own.is_primary(), h.peer.is_primary()))
            .or(by_crash)
            .or_else(|| by_words(h))
            .or_else(by_node);
    }
    let decided = follower(h)
        .or_else(|| prefer(may_be_stale(h, h.peer), may_be_stale(h, h.own)))
        .or_else(|| prefer(h.own.is_primary(), h.peer.is_primary()))
        .or(by_crash)
        .or_else(|| prefer(marks.0 != 0, marks.1 != 0))
        .or_else(|| by_words(h));
    if decided.is_some() {
        return decided;
    }
    if two_primaries {
        return None;
    }
    prefer(is_real(h.own_slot()), is_real(h.peer_slot()))
        .or_else(|| prefer(marks.0 > marks.1, marks.1 > marks.0))
        .or_else(by_node)
}
