//! The comparison table of DRBD 8.4 (semantics.md 13.3), for what a kernel 8.4 peer decides.
//!
//! Only the table: numbered rules over one bitmap UUID and two history entries. What this node
//! itself decides at protocols below 110 is in [`crate::compare`].

use lockstep_format::units::Uuid;
use lockstep_format::wire::{Features, Role, UuidFlags};

use crate::compare::{Direction, Fixup, Handshake, Side};
use crate::uuids::is_real;

/// Result of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome84 {
    /// No resync (0).
    NoSync,
    /// By bitmap (1 as source, -1 as target).
    Bitmap(Direction),
    /// Full (2 as source, -2 as target).
    Full(Direction),
    /// Split brain for the after-sb policies (100).
    AutoRecover,
    /// Split brain that needs the operator (-100).
    SplitBrain,
    /// Nothing in common (-1000).
    Unrelated,
    /// Needs at least that protocol version (-1000 - version).
    RequiresProtocol(u32),
    /// Needs a peer with the feature WSAME.
    RequiresNewerPeer,
}

impl Outcome84 {
    /// What the other side has to decide.
    #[must_use]
    pub const fn mirrored(self) -> Outcome84 {
        match self {
            Outcome84::Bitmap(direction) => Outcome84::Bitmap(direction.mirrored()),
            Outcome84::Full(direction) => Outcome84::Full(direction.mirrored()),
            other => other,
        }
    }
}

/// Result, number of the rule, and the correction that goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict84 {
    /// What to do.
    pub outcome: Outcome84,
    /// The rule's number.
    pub rule: u8,
    /// Correction of a UUID set.
    pub fixup: Option<Fixup>,
}

const fn verdict(outcome: Outcome84, rule: u8) -> Verdict84 {
    Verdict84 {
        outcome,
        rule,
        fixup: None,
    }
}

const SOURCE: Direction = Direction::Source;
const TARGET: Direction = Direction::Target;

struct Set {
    current: Uuid,
    bitmap: Uuid,
    history: [Uuid; 2],
}

impl Set {
    fn of(side: &Side, other: &Side) -> Set {
        let history = [side.uuids.history[0], side.uuids.history[1]];
        let bitmap = side.uuids.slot(other.node);
        Set {
            current: side.uuids.current_or_created(),
            bitmap,
            history,
        }
    }

    fn history_has(&self, uuid: Uuid) -> bool {
        self.history.iter().any(|entry| entry.same_generation(uuid))
    }

    /// The side with this set started a resync as source, and the other never heard of it.
    fn started(&self, other: &Set, protocol_version: u32) -> bool {
        let before = self.history[0];
        other.current.same_generation(before)
            && if protocol_version < 96 {
                other.history[0].same_generation(self.history[1])
            } else {
                Uuid(before.0.wrapping_add(Uuid::NEW_BM_OFFSET)).same_generation(self.bitmap)
            }
    }
}

/// The table of 13.3. A zero current UUID counts as just created on both sides.
pub fn compare84(h: &Handshake<'_>) -> Verdict84 {
    let (own, peer) = (Set::of(h.own, h.peer), Set::of(h.peer, h.own));
    match (
        own.current == Uuid::JUST_CREATED,
        peer.current == Uuid::JUST_CREATED,
    ) {
        (true, true) => verdict(Outcome84::NoSync, 10),
        (true, false) => verdict(Outcome84::Full(TARGET), 20),
        (false, true) => verdict(Outcome84::Full(SOURCE), 30),
        (false, false) if own.current == peer.current => equal(h, &own, &peer),
        (false, false) => different(h, &own, &peer),
    }
}

fn equal(h: &Handshake<'_>, own: &Set, peer: &Set) -> Verdict84 {
    if peer.bitmap.is_zero() && is_real(own.bitmap) {
        let stored = own.bitmap.same_generation(peer.history[0])
            && own.history[0].same_generation(peer.history[1]);
        return missed(h, stored, SOURCE, (34, 36), Fixup::OwnMissedFinish);
    }
    if own.bitmap.is_zero() && is_real(peer.bitmap) {
        let stored = own.history[0].same_generation(peer.bitmap)
            && own.history[1].same_generation(peer.history[0]);
        return missed(h, stored, TARGET, (35, 37), Fixup::PeerMissedFinish);
    }
    let crashed = |side: &Side| side.uuids.flags.contains(UuidFlags::CRASHED_PRIMARY);
    let crashed = (crashed(h.own), crashed(h.peer));
    if crashed == (false, false) {
        return verdict(Outcome84::NoSync, 40);
    }
    let primary = (h.own.role == Role::Primary, h.peer.role == Role::Primary);
    if primary != (false, false) {
        if !h.features.contains(Features::WSAME) {
            return verdict(Outcome84::RequiresNewerPeer, 41);
        }
        return match primary {
            (true, true) => verdict(Outcome84::SplitBrain, 41),
            (true, false) => verdict(Outcome84::Bitmap(SOURCE), 41),
            (false, _) => verdict(Outcome84::Bitmap(TARGET), 41),
        };
    }
    match crashed {
        (true, false) => verdict(Outcome84::Bitmap(SOURCE), 40),
        (false, true) => verdict(Outcome84::Bitmap(TARGET), 40),
        (_, _) if h.resolver => verdict(Outcome84::Bitmap(TARGET), 40),
        (_, _) => verdict(Outcome84::Bitmap(SOURCE), 40),
    }
}

fn missed(
    h: &Handshake<'_>,
    stored: bool,
    direction: Direction,
    rules: (u8, u8),
    fixup: Fixup,
) -> Verdict84 {
    if !stored {
        return verdict(Outcome84::Bitmap(direction), rules.1);
    }
    if h.protocol_version < 91 {
        return verdict(Outcome84::RequiresProtocol(91), rules.0);
    }
    Verdict84 {
        outcome: Outcome84::Bitmap(direction),
        rule: rules.0,
        fixup: Some(fixup),
    }
}

fn different(h: &Handshake<'_>, own: &Set, peer: &Set) -> Verdict84 {
    let with = |direction, rule, fixup| Verdict84 {
        outcome: Outcome84::Bitmap(direction),
        rule,
        fixup: Some(fixup),
    };
    if own.current.same_generation(peer.bitmap) {
        return verdict(Outcome84::Bitmap(TARGET), 50);
    }
    if peer.started(own, h.protocol_version) {
        return with(TARGET, 51, Fixup::PeerMissedStart);
    }
    if peer.history_has(own.current) {
        return verdict(Outcome84::Full(TARGET), 60);
    }
    if own.bitmap.same_generation(peer.current) {
        return verdict(Outcome84::Bitmap(SOURCE), 70);
    }
    if own.started(peer, h.protocol_version) {
        return with(SOURCE, 71, Fixup::OwnMissedStart);
    }
    if own.history_has(peer.current) {
        return verdict(Outcome84::Full(SOURCE), 80);
    }
    if is_real(own.bitmap) && own.bitmap.same_generation(peer.bitmap) {
        return verdict(Outcome84::AutoRecover, 90);
    }
    // 8.4 compares zero entries as well.
    if own.history.iter().any(|entry| peer.history_has(*entry)) {
        return verdict(Outcome84::SplitBrain, 100);
    }
    verdict(Outcome84::Unrelated, 110)
}

#[cfg(test)]
mod tests {
    use lockstep_format::units::NodeId;
    use lockstep_format::wire::DiskState;

    use super::*;
    use crate::compare::Phase;
    use crate::options::NetOptions;
    use crate::uuids::PeerUuids;

    /// Current, bitmap, two history entries.
    type Four = [u64; 4];

    fn side(node: u8, set: Four, crashed: bool, role: Role) -> Side {
        let peer = NodeId(1 - node);
        let mut uuids = PeerUuids {
            current: Uuid(set[0]),
            ..PeerUuids::default()
        };
        uuids.bitmap[usize::from(peer.0)] = Uuid(set[1]);
        uuids.history[..2].copy_from_slice(&[Uuid(set[2]), Uuid(set[3])]);
        if crashed {
            uuids.flags |= UuidFlags::CRASHED_PRIMARY;
        }
        Side {
            node: NodeId(node),
            uuids,
            disk: DiskState::UpToDate,
            role,
            quorate: true,
        }
    }

    fn both(
        sides: &[Side; 2],
        version: u32,
        features: Features,
        resolver: bool,
    ) -> (Verdict84, Verdict84) {
        let net = NetOptions::default();
        let handshake = Handshake {
            own: &sides[0],
            peer: &sides[1],
            phase: Phase::Connect,
            protocol_version: version,
            features,
            resolver,
            net: &net,
            quorum_configured: false,
            own_lost: None,
            peer_lost: None,
        };
        (compare84(&handshake), compare84(&handshake.mirrored(&net)))
    }

    #[test]
    fn each_rule_has_its_mirror_at_the_peer() {
        let next = 0x50 + Uuid::NEW_BM_OFFSET;
        let (to, from) = (Outcome84::Bitmap(SOURCE), Outcome84::Bitmap(TARGET));
        let (full_to, full_from) = (Outcome84::Full(SOURCE), Outcome84::Full(TARGET));
        // own set, peer's set, outcome, rule here and at the peer
        let cases: [(Four, Four, Outcome84, u8, u8); 15] = [
            ([4, 0, 0, 0], [4, 0, 0, 0], Outcome84::NoSync, 10, 10),
            ([4, 0, 0, 0], [0x10, 0, 0, 0], full_from, 20, 30),
            ([0x10, 0, 0, 0], [0, 0, 0, 0], full_to, 30, 20),
            ([0x10, 0x50, 0x60, 0], [0x10, 0, 0x50, 0x60], to, 34, 35),
            ([0x10, 0x50, 0x60, 0], [0x10, 0, 0x70, 0], to, 36, 37),
            ([0x10, 0, 0, 0], [0x11, 0, 0, 0], Outcome84::NoSync, 40, 40),
            ([0x10, 0, 0, 0], [0x20, 0x10, 0, 0], from, 50, 70),
            ([0x50, 0, 0, 0], [0x20, next, 0x50, 0], from, 51, 71),
            ([0x10, 0, 0, 0], [0x20, 0, 0x30, 0x10], full_from, 60, 80),
            ([0x10, 0x20, 0, 0], [0x20, 0, 0, 0], to, 70, 50),
            ([0x20, next, 0x50, 0], [0x50, 0, 0, 0], to, 71, 51),
            ([0x10, 0, 0x20, 0], [0x20, 0, 0, 0], full_to, 80, 60),
            (
                [0x10, 0x30, 0, 0],
                [0x20, 0x31, 0, 0],
                Outcome84::AutoRecover,
                90,
                90,
            ),
            (
                [0x10, 0, 0x30, 0],
                [0x20, 0, 0x40, 0],
                Outcome84::SplitBrain,
                100,
                100,
            ),
            (
                [0x10, 0, 1 << 4, 2 << 8],
                [0x20, 0, 3 << 8, 4 << 8],
                Outcome84::Unrelated,
                110,
                110,
            ),
        ];
        for (own, peer, outcome, rule, peer_rule) in cases {
            let secondary = Role::Secondary;
            let sides = [
                side(0, own, false, secondary),
                side(1, peer, false, secondary),
            ];
            let (here, there) = both(&sides, 101, Features::WSAME, true);
            assert_eq!((here.outcome, here.rule), (outcome, rule));
            assert_eq!((there.outcome, there.rule), (outcome.mirrored(), peer_rule));
        }
    }

    #[test]
    fn a_crashed_primary_is_source_unless_there_is_a_primary_now() {
        let equal = [0x10, 0, 0, 0];
        let (primary, secondary) = (Role::Primary, Role::Secondary);
        let (to, from) = (Outcome84::Bitmap(SOURCE), Outcome84::Bitmap(TARGET));
        let cases = [
            ((true, secondary), (false, secondary), to, 40),
            ((false, secondary), (true, secondary), from, 40),
            ((true, secondary), (true, secondary), from, 40),
            ((true, secondary), (false, primary), from, 41),
            ((false, primary), (true, secondary), to, 41),
            ((true, primary), (false, primary), Outcome84::SplitBrain, 41),
        ];
        for (own, peer, outcome, rule) in cases {
            let sides = [side(0, equal, own.0, own.1), side(1, equal, peer.0, peer.1)];
            let (here, there) = both(&sides, 101, Features::WSAME, true);
            assert_eq!((here.outcome, here.rule), (outcome, rule));
            assert_eq!(there.outcome, outcome.mirrored());
            if rule == 41 {
                let (here, _) = both(&sides, 101, Features::empty(), true);
                assert_eq!(here.outcome, Outcome84::RequiresNewerPeer);
            }
        }
    }

    #[test]
    fn a_missed_end_needs_protocol_91() {
        let secondary = Role::Secondary;
        let sides = [
            side(0, [0x10, 0x50, 0x60, 0], false, secondary),
            side(1, [0x10, 0, 0x50, 0x60], false, secondary),
        ];
        let (here, there) = both(&sides, 90, Features::WSAME, true);
        assert_eq!(here.outcome, Outcome84::RequiresProtocol(91));
        assert_eq!(there.outcome, Outcome84::RequiresProtocol(91));
    }
}
