//! The sync decision (semantics.md, 13): from two exchanged UUID sets to "who is source".
//!
//! A pure function of what both sides sent, so that both ends reach mirrored results. It changes
//! nothing: what has to be done along with a result is in the [`Verdict`].
//!
//! Between two Lockstep nodes there is one more rule, **marked-blocks**: if everything says "no
//! resync" (equal UUIDs, both disks UpToDate) but blocks are marked on either side, then the marked
//! blocks of both sides are resynced instead of being forgotten. If only one disk is UpToDate and
//! the other Outdated, it is source. Else the source is chosen so that no write that protocol C
//! acknowledged is lost. Any node that lived through the loss of the connection holds all of them;
//! only a node that came back (no RECONNECT flag, or being attached: then only that one) *and* has
//! marks may lack some, because its disk may have lost its volatile cache. Call that node stale. In
//! this order:
//!
//! 1. exactly one side is connected to a Primary, and the other is not one: it has what that
//!    acknowledged and is source;
//! 2. exactly one side is stale: the other is source. If the stale one is Primary by now,
//!    `rr-conflict` decides; but where no third node is known it was promoted alone, and has served
//!    no request yet, since the first one would have begun a new generation: it gives up nothing
//!    (but for an attach);
//! 3. exactly one side is Primary: it is source;
//! 4. exactly one side crashed as Primary: the other is source with protocol C, the crashed one
//!    with A and B (it may hold acknowledged writes that the survivor never got), and so is one that lost
//!    quorum as Primary;
//! 5. only one side has marks: it is source, its marks are writes that the other did not confirm;
//! 6. both are Primary and both have marks: no side may lose, split brain; where two are not allowed
//!    the connection is refused for that reason alone;
//! 7. only one side's slot for the other names a generation: it is source. The other was away when this one began,
//!    and has what a third node had of it, which may have lost its power since;
//! 8. the side with more marks, at last the lower node id. (Both are stale, that is: the machines
//!    lost power together, and only flushed writes are promised; or none is, and both have all.)
//!
//! While connected (a Primary that both followed was lost) nobody is stale, and the numbers of marks
//! that one side knows may be older than those of the other: 2, 5, 7 and the marks of 8 do not count.
//!
//! Further differences between Lockstep nodes: where the better disk is source (13.5), a stale one
//! of protocol C is none, even beside a survivor that is still Consistent; a generation found in the
//! other's history needs no full resync if both slots begin at the same generation; a node that is
//! target of another one is asked again later instead of being called unrelated or a split brain;
//! an Inconsistent disk is no branch of a split brain.

use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Uuid};
use lockstep_format::wire::{DiskState, Features, ReplState, Role, UuidFlags};

use crate::options::{AfterSplitBrain, NetOptions, Protocol};
pub use crate::rule::Rule;
use crate::uuids::{PeerUuids, is_real};

/// One side of a handshake, as it told the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// Node id.
    pub node: NodeId,
    /// UUID set as sent.
    pub uuids: PeerUuids,
    /// Disk; Negotiating counts as what the INCONSISTENT flag says.
    pub disk: DiskState,
    /// Role.
    pub role: Role,
    /// Has quorum (the bit of its state word).
    pub quorate: bool,
}

/// When the comparison takes place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// While the connection is being established.
    Connect,
    /// While Established, because one side attached its disk (13.7).
    Attach,
    /// While Established, because a node became stable (14.2).
    AfterUnstable,
}

/// What both know of a Primary that both lost (`P_PEER_DAGTAG`, semantics.md 13.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostPrimary {
    /// The node that was lost.
    pub node: NodeId,
    /// Last dagtag seen from it.
    pub dagtag: Dagtag,
}

/// Everything that the decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct Handshake<'a> {
    /// This side, as sent.
    pub own: &'a Side,
    /// The peer, as received.
    pub peer: &'a Side,
    /// When.
    pub phase: Phase,
    /// Agreed protocol version.
    pub protocol_version: u32,
    /// Agreed features.
    pub features: Features,
    /// This side is the conflict resolver of the connection (wire.md 2.4).
    pub resolver: bool,
    /// `net` options.
    pub net: &'a NetOptions,
    /// `quorum` is not off.
    pub quorum_configured: bool,
    /// The lost Primary that this side named to the peer.
    pub own_lost: Option<LostPrimary>,
    /// The lost Primary that the peer named.
    pub peer_lost: Option<LostPrimary>,
}

/// What to do (semantics.md, 13.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// No resync.
    NoSync,
    /// Source, bitmap based.
    SourceUseBitmap,
    /// Target, bitmap based.
    TargetUseBitmap,
    /// Source, full.
    SourceSetBitmap,
    /// Target, full.
    TargetSetBitmap,
    /// Source, with the bitmap of the slot of that node.
    SourceCopyBitmap(NodeId),
    /// Target, sends an empty bitmap; the source uses its slot of that node.
    TargetClearBitmap(NodeId),
    /// Source by an arbitrary choice; a Primary overrides it.
    SourceIfBothFailed,
    /// Target by an arbitrary choice; a Primary overrides it.
    TargetIfBothFailed,
    /// Split brain, for which the after-sb policies hold.
    SplitBrainAutoRecover,
    /// Split brain, which only always-asbp or discard-my-data solve.
    SplitBrainDisconnect,
    /// The data have nothing in common.
    UnrelatedData,
    /// Needs at least that protocol version.
    RequiresProtocol(u32),
    /// A Primary would be target: disconnect.
    SyncTargetPrimaryDisconnect,
    /// A Primary would be target: try again later.
    SyncTargetPrimaryReconnect,
    /// Try again later.
    RetryConnect,
}

/// Direction of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// This side sends.
    Source,
    /// This side receives.
    Target,
}

impl Direction {
    /// The direction seen from the other side.
    #[must_use]
    pub const fn mirrored(self) -> Direction {
        match self {
            Direction::Source => Direction::Target,
            Direction::Target => Direction::Source,
        }
    }

    const fn use_bitmap(self) -> Strategy {
        match self {
            Direction::Source => Strategy::SourceUseBitmap,
            Direction::Target => Strategy::TargetUseBitmap,
        }
    }

    const fn set_bitmap(self) -> Strategy {
        match self {
            Direction::Source => Strategy::SourceSetBitmap,
            Direction::Target => Strategy::TargetSetBitmap,
        }
    }

    const fn if_both_failed(self) -> Strategy {
        match self {
            Direction::Source => Strategy::SourceIfBothFailed,
            Direction::Target => Strategy::TargetIfBothFailed,
        }
    }
}

impl Strategy {
    /// Direction of a resync, none if there is none.
    pub const fn direction(self) -> Option<Direction> {
        match self {
            Strategy::SourceUseBitmap
            | Strategy::SourceSetBitmap
            | Strategy::SourceCopyBitmap(_)
            | Strategy::SourceIfBothFailed => Some(Direction::Source),
            Strategy::TargetUseBitmap
            | Strategy::TargetSetBitmap
            | Strategy::TargetClearBitmap(_)
            | Strategy::TargetIfBothFailed => Some(Direction::Target),
            Strategy::NoSync
            | Strategy::SplitBrainAutoRecover
            | Strategy::SplitBrainDisconnect
            | Strategy::UnrelatedData
            | Strategy::RequiresProtocol(_)
            | Strategy::SyncTargetPrimaryDisconnect
            | Strategy::SyncTargetPrimaryReconnect
            | Strategy::RetryConnect => None,
        }
    }

    /// Whether the direction is arbitrary.
    pub const fn is_arbitrary(self) -> bool {
        matches!(
            self,
            Strategy::SourceIfBothFailed | Strategy::TargetIfBothFailed
        )
    }

    /// Whether it is an unresolved split brain.
    pub const fn is_split_brain(self) -> bool {
        matches!(
            self,
            Strategy::SplitBrainAutoRecover | Strategy::SplitBrainDisconnect
        )
    }

    /// Whether the connection cannot be established with it: disconnect and stay apart.
    pub const fn disconnects(self) -> bool {
        matches!(
            self,
            Strategy::SplitBrainAutoRecover
                | Strategy::SplitBrainDisconnect
                | Strategy::UnrelatedData
                | Strategy::RequiresProtocol(_)
                | Strategy::SyncTargetPrimaryDisconnect
        )
    }

    /// Whether the connection shall be tried again.
    pub const fn retries(self) -> bool {
        matches!(
            self,
            Strategy::RetryConnect | Strategy::SyncTargetPrimaryReconnect
        )
    }

    /// The same strategy in the other direction, none if it has no reverse.
    pub const fn reversed(self) -> Option<Strategy> {
        match self {
            Strategy::SourceUseBitmap => Some(Strategy::TargetUseBitmap),
            Strategy::TargetUseBitmap => Some(Strategy::SourceUseBitmap),
            Strategy::SourceSetBitmap => Some(Strategy::TargetSetBitmap),
            Strategy::TargetSetBitmap => Some(Strategy::SourceSetBitmap),
            Strategy::SourceIfBothFailed => Some(Strategy::TargetIfBothFailed),
            Strategy::TargetIfBothFailed => Some(Strategy::SourceIfBothFailed),
            Strategy::NoSync
            | Strategy::SourceCopyBitmap(_)
            | Strategy::TargetClearBitmap(_)
            | Strategy::SplitBrainAutoRecover
            | Strategy::SplitBrainDisconnect
            | Strategy::UnrelatedData
            | Strategy::RequiresProtocol(_)
            | Strategy::SyncTargetPrimaryDisconnect
            | Strategy::SyncTargetPrimaryReconnect
            | Strategy::RetryConnect => None,
        }
    }

    /// What the other side has to decide if this side decides this.
    #[must_use]
    pub const fn mirrored(self) -> Strategy {
        match self {
            Strategy::SourceCopyBitmap(node) => Strategy::TargetClearBitmap(node),
            Strategy::TargetClearBitmap(node) => Strategy::SourceCopyBitmap(node),
            other => match other.reversed() {
                Some(reverse) => reverse,
                None => other,
            },
        }
    }

    /// Replication state that follows; none if the connection is not established.
    pub const fn to_repl_state(self, own: Role, peer: Role) -> Option<ReplState> {
        let primary = (matches!(own, Role::Primary), matches!(peer, Role::Primary));
        if self.is_arbitrary() {
            match primary {
                (true, false) => return Some(ReplState::WfBitmapS),
                (false, true) => return Some(ReplState::WfBitmapT),
                (true, true) => return Some(ReplState::Established),
                (false, false) => {}
            }
        }
        match self.direction() {
            Some(Direction::Source) => Some(ReplState::WfBitmapS),
            Some(Direction::Target) => Some(ReplState::WfBitmapT),
            None if matches!(self, Strategy::NoSync) => Some(ReplState::Established),
            None => None,
        }
    }

    /// Name as logged.
    pub const fn name(self) -> &'static str {
        match self {
            Strategy::NoSync => "no-sync",
            Strategy::SourceUseBitmap => "source-use-bitmap",
            Strategy::TargetUseBitmap => "target-use-bitmap",
            Strategy::SourceSetBitmap => "source-set-bitmap",
            Strategy::TargetSetBitmap => "target-set-bitmap",
            Strategy::SourceCopyBitmap(_) => "source-copy-other-bitmap",
            Strategy::TargetClearBitmap(_) => "target-clear-bitmap",
            Strategy::SourceIfBothFailed => "source-if-both-failed",
            Strategy::TargetIfBothFailed => "target-if-both-failed",
            Strategy::SplitBrainAutoRecover => "split-brain-auto-recover",
            Strategy::SplitBrainDisconnect => "split-brain-disconnect",
            Strategy::UnrelatedData => "unrelated-data",
            Strategy::RequiresProtocol(_) => "requires-newer-protocol",
            Strategy::SyncTargetPrimaryDisconnect => "sync-target-primary-disconnect",
            Strategy::SyncTargetPrimaryReconnect => "sync-target-primary-reconnect",
            Strategy::RetryConnect => "retry-connect",
        }
    }
}

/// Correction of a UUID set that goes with a rule for protocols below 110 (13.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fixup {
    /// This side missed the end of the resync that it was source of: the bitmap UUID goes to the
    /// history and becomes 0.
    OwnMissedFinish,
    /// The peer missed it: the same in the copy of the peer's set.
    PeerMissedFinish,
    /// The peer started as source, but its UUID never arrived here: undo it in the copy of its set.
    PeerMissedStart,
    /// The start as source did not get through: undo it in the own set.
    OwnMissedStart,
}

/// A handler to run, in DRBD's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handler {
    /// A split brain was found; policies come next.
    InitialSplitBrain,
    /// A split brain that no policy solved.
    SplitBrain,
    /// `rr-conflict call-pri-lost`: this Primary would be target.
    PriLost,
}

impl Handler {
    /// Name of the handler in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Handler::InitialSplitBrain => "initial-split-brain",
            Handler::SplitBrain => "split-brain",
            Handler::PriLost => "pri-lost",
        }
    }
}

/// The decision and what goes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// What to do.
    pub strategy: Strategy,
    /// The row that decided.
    pub rule: Rule,
    /// The table said split brain; `strategy` tells whether it was resolved.
    pub split_brain: bool,
    /// Handlers to run, in this order.
    pub handlers: Vec<Handler>,
    /// This Primary has to be demoted first (`call-pri-lost-after-sb`). If that fails: run the
    /// handler `pri-lost-after-sb` and disconnect.
    pub demote_first: bool,
    /// Resync between survivors of a lost Primary: checksums are forced (13.5).
    pub reconciliation: bool,
    /// The own slot for the peer is outdated knowledge: its UUID goes to the history, then 0.
    pub clear_own_slot: bool,
    /// Correction of a UUID set (protocol below 110).
    pub fixup: Option<Fixup>,
}

impl Handshake<'_> {
    /// The same handshake as the peer sees it, for tests and for the simulator's checker.
    /// `net` are the peer's options.
    #[must_use]
    pub fn mirrored<'b>(&'b self, net: &'b NetOptions) -> Handshake<'b> {
        Handshake {
            own: self.peer,
            peer: self.own,
            resolver: !self.resolver,
            net,
            own_lost: self.peer_lost,
            peer_lost: self.own_lost,
            ..*self
        }
    }

    const fn is_old(&self) -> bool {
        self.protocol_version < 110
    }

    fn is_lockstep(&self) -> bool {
        self.features.contains(Features::LOCKSTEP)
    }

    fn has_dirty_bits(&self) -> bool {
        self.own.uuids.dirty_bits != 0 || self.peer.uuids.dirty_bits != 0
    }

    fn own_slot(&self) -> Uuid {
        self.own.uuids.slot(self.peer.node)
    }

    fn peer_slot(&self) -> Uuid {
        self.peer.uuids.slot(self.own.node)
    }
}

impl Side {
    fn flag(&self, flag: UuidFlags) -> bool {
        self.uuids.flags.contains(flag)
    }

    fn is_primary(&self) -> bool {
        self.role == Role::Primary
    }

    /// Disk for the decision. Both ends use the flag for a Negotiating disk, because the flag is
    /// all that the peer knows.
    fn effective_disk(&self) -> DiskState {
        match self.disk {
            DiskState::Negotiating if self.flag(UuidFlags::INCONSISTENT) => DiskState::Inconsistent,
            DiskState::Negotiating => DiskState::UpToDate,
            disk => disk,
        }
    }

    /// Connected to a Primary that is not this node (an unstable node names them).
    fn follows(&self) -> bool {
        !self.flag(UuidFlags::STABLE) && self.uuids.node_mask.count() > 0
    }
}

/// This side came back with marks, so its disk may have lost acknowledged writes (module's head).
/// Means nothing for nodes that were connected all the time. Beside a disk that is being attached
/// the other side was there all the time.
fn may_be_stale(h: &Handshake<'_>, side: &Side) -> bool {
    let attaching = |side: &Side| side.disk == DiskState::Negotiating;
    let came_back = match h.phase {
        Phase::Attach if attaching(h.own) || attaching(h.peer) => attaching(side),
        _ => !side.flag(UuidFlags::RECONNECT) || attaching(side),
    };
    came_back && side.uuids.dirty_bits != 0
}

/// Decides: comparison table, disk states, reconcile, split brain policies, discard-my-data and
/// rr-conflict. Only for two sides with disks; diskless nodes have no sync decision (13.8).
pub fn compare(handshake: &Handshake<'_>) -> Verdict {
    let row = table(handshake);
    let mut verdict = Verdict {
        strategy: row.strategy,
        rule: row.rule,
        split_brain: false,
        handlers: Vec::new(),
        demote_first: false,
        reconciliation: false,
        clear_own_slot: row.clear_own_slot,
        fixup: row.fixup,
    };
    apply_disk_states(handshake, &mut verdict);
    apply_followers(handshake, &mut verdict);
    marks::apply_marks(handshake, &mut verdict);
    apply_inconsistent(handshake, &mut verdict);
    announced::apply_announced(handshake, &mut verdict);
    apply_split_brain(handshake, &mut verdict);
    apply_discard_my_data(handshake, &mut verdict);
    apply_primary_conflict(handshake, &mut verdict);
    verdict
}

struct Row {
    strategy: Strategy,
    rule: Rule,
    fixup: Option<Fixup>,
    clear_own_slot: bool,
}

const fn row(strategy: Strategy, rule: Rule) -> Row {
    Row {
        strategy,
        rule,
        fixup: None,
        clear_own_slot: false,
    }
}

const fn row_with(strategy: Strategy, rule: Rule, fixup: Option<Fixup>) -> Row {
    Row {
        strategy,
        rule,
        fixup,
        clear_own_slot: false,
    }
}

/// Rows 1..=24 of 13.4.
fn table(h: &Handshake<'_>) -> Row {
    let own = h.own.uuids.current_or_created();
    let peer = h.peer.uuids.current_or_created();
    match (own == Uuid::JUST_CREATED, peer == Uuid::JUST_CREATED) {
        (true, true) => row(Strategy::NoSync, Rule::JustCreatedBoth),
        (true, false) => row(Strategy::TargetSetBitmap, Rule::JustCreatedSelf),
        (false, true) => row(Strategy::SourceSetBitmap, Rule::JustCreatedPeer),
        (false, false) if own == peer => equal_row(h),
        (false, false) => different_row(h, own, peer),
    }
}

/// Rows 4..=13: equal current UUIDs.
fn equal_row(h: &Handshake<'_>) -> Row {
    let missed = if h.is_old() {
        missed_finish_84(h)
    } else {
        missed_finish(h)
    };
    if let Some(missed) = missed {
        return missed;
    }
    let reconnect = (
        h.own.flag(UuidFlags::RECONNECT),
        h.peer.flag(UuidFlags::RECONNECT),
    );
    let crashed = (
        h.own.flag(UuidFlags::CRASHED_PRIMARY),
        h.peer.flag(UuidFlags::CRASHED_PRIMARY),
    );
    let quorum_lost = (
        h.own.flag(UuidFlags::PRIMARY_LOST_QUORUM),
        h.peer.flag(UuidFlags::PRIMARY_LOST_QUORUM),
    );

    if h.protocol_version >= 120 && reconnect == (true, true) {
        return row(Strategy::NoSync, Rule::Reconnected);
    }
    // With protocol B who has been here all the time has everything that was acknowledged, and the crashed Primary may
    // have lost its cache.
    let survived = match crashed {
        (true, false) => reconnect == (false, true),
        (false, true) => reconnect == (true, false),
        (true, true) | (false, false) => false,
    };
    let by_survivor = h.is_lockstep() && h.net.protocol == Protocol::B && survived;
    if h.protocol_version >= 121 && h.net.protocol != Protocol::C && !by_survivor {
        match crashed {
            (true, false) => return row(Strategy::SourceUseBitmap, Rule::CrashedPrimary),
            (false, true) => return row(Strategy::TargetUseBitmap, Rule::CrashedPrimary),
            (true, true) | (false, false) => {}
        }
    }
    match quorum_lost {
        (false, true) => return row(Strategy::TargetIfBothFailed, Rule::LostQuorum),
        (true, false) => return row(Strategy::SourceIfBothFailed, Rule::LostQuorum),
        (true, true) => {
            return row(
                resolver_is(h, Direction::Source).if_both_failed(),
                Rule::LostQuorum,
            );
        }
        (false, false) => {}
    }
    if reconnect == (true, true) {
        return row(Strategy::NoSync, Rule::Reconnected);
    }
    let rule = if h.protocol_version >= 120 {
        Rule::LostQuorum
    } else {
        Rule::Reconnected
    };
    if crashed.1 && reconnect.0 {
        return row(Strategy::SourceIfBothFailed, rule);
    }
    if crashed.0 && reconnect.1 {
        return row(Strategy::TargetIfBothFailed, rule);
    }
    if reconnect.0 || reconnect.1 {
        return row(Strategy::NoSync, rule);
    }
    let strategy = match crashed {
        (true, false) => Strategy::SourceIfBothFailed,
        (false, true) => Strategy::TargetIfBothFailed,
        (true, true) => resolver_is(h, Direction::Target).if_both_failed(),
        (false, false) => Strategy::NoSync,
    };
    row(strategy, Rule::BothOff)
}

const fn resolver_is(h: &Handshake<'_>, direction: Direction) -> Direction {
    if h.resolver {
        direction
    } else {
        direction.mirrored()
    }
}

/// Rows 5 and 6: one side did not hear that the resync had ended (12.11).
fn missed_finish(h: &Handshake<'_>) -> Option<Row> {
    let any_target = h.own.flag(UuidFlags::SYNC_TARGET) || h.peer.flag(UuidFlags::SYNC_TARGET);
    // Between two Lockstep nodes the marks tell who has what the other lacks, and the sets are
    // learned anyway: a slot may be left over from a generation that was being announced as well.
    if h.phase != Phase::Connect || any_target || h.is_lockstep() {
        return None;
    }
    let current = h.own.uuids.current;
    let left_over = |slot: Uuid| is_real(slot) && !slot.same_generation(current);
    let own_missed = left_over(h.own_slot()) && h.peer_slot().is_zero();
    let peer_missed = left_over(h.peer_slot()) && h.own_slot().is_zero();
    if !own_missed && !peer_missed {
        return None;
    }
    let (rule, strategy, source) = if own_missed {
        (
            Rule::SyncSourceMissedFinish,
            Strategy::SourceUseBitmap,
            h.own,
        )
    } else {
        (
            Rule::SyncTargetPeerMissedFinish,
            Strategy::TargetUseBitmap,
            h.peer,
        )
    };
    if !h.has_dirty_bits() {
        if h.protocol_version >= 124 {
            // Nothing to transfer: the slot is cleared when the sets are learned (12.11).
            return None;
        }
        if own_missed {
            return Some(row(Strategy::RetryConnect, rule));
        }
        if h.own.is_primary() {
            return Some(row(Strategy::RequiresProtocol(124), rule));
        }
    }
    if source.effective_disk() != DiskState::UpToDate {
        let clear_own_slot = own_missed;
        return Some(Row {
            clear_own_slot,
            ..row(Strategy::NoSync, rule)
        });
    }
    Some(row(strategy, rule))
}

/// Row 4: the same for protocols below 110, rules 34 to 37 of 13.3.
fn missed_finish_84(h: &Handshake<'_>) -> Option<Row> {
    let (own_slot, peer_slot) = (h.own_slot(), h.peer_slot());
    let (own_history, peer_history) = (&h.own.uuids.history, &h.peer.uuids.history);
    if peer_slot.is_zero() && is_real(own_slot) {
        let stored = own_slot.same_generation(peer_history[0])
            && own_history[0].same_generation(peer_history[1]);
        if stored && h.protocol_version < 91 {
            let strategy = Strategy::RequiresProtocol(91);
            return Some(row(strategy, Rule::SyncSourceMissedFinish));
        }
        let (rule, fixup) = if stored {
            (Rule::SyncSourceMissedFinish, Some(Fixup::OwnMissedFinish))
        } else {
            (Rule::SyncSourcePeerMissedFinish, None)
        };
        return Some(row_with(Strategy::SourceUseBitmap, rule, fixup));
    }
    if own_slot.is_zero() && is_real(peer_slot) {
        let stored = own_history[0].same_generation(peer_slot)
            && own_history[1].same_generation(peer_history[0]);
        if stored && h.protocol_version < 91 {
            let strategy = Strategy::RequiresProtocol(91);
            return Some(row(strategy, Rule::SyncTargetPeerMissedFinish));
        }
        let (rule, fixup) = if stored {
            (
                Rule::SyncTargetPeerMissedFinish,
                Some(Fixup::PeerMissedFinish),
            )
        } else {
            (Rule::SyncTargetMissedFinish, None)
        };
        return Some(row_with(Strategy::TargetUseBitmap, rule, fixup));
    }
    None
}

/// Rows 14..=24: different current UUIDs, neither just created.
fn different_row(h: &Handshake<'_>, own: Uuid, peer: Uuid) -> Row {
    let peer_newer = announced::newer(h, h.peer, h.own, own);
    let own_newer = announced::newer(h, h.own, h.peer, peer);
    let peer_started = started_84(h, h.peer, h.own, own);
    let own_started = started_84(h, h.own, h.peer, peer);
    if (peer_newer.is_some() || peer_started) && (own_newer.is_some() || own_started) {
        return announced::came_back(h, own, peer)
            .or_else(|| announced::unwritten(h))
            .or_else(|| announced::lost_its_cache(h))
            .unwrap_or_else(|| row(Strategy::SplitBrainDisconnect, Rule::Contradiction));
    }
    if let Some(row) = announced::announcer_lives_on(h, own, peer) {
        return row;
    }
    match peer_newer {
        Some(SlotOf::Receiver) => return row(Strategy::TargetUseBitmap, Rule::BitmapPeer),
        Some(SlotOf::Other(node)) => {
            return row(Strategy::TargetClearBitmap(node), Rule::BitmapPeerOther);
        }
        None => {}
    }
    if peer_started {
        let fixup = Some(Fixup::PeerMissedStart);
        return row_with(
            Strategy::TargetUseBitmap,
            Rule::SyncTargetMissedStart,
            fixup,
        );
    }
    match own_newer {
        Some(SlotOf::Receiver) => return row(Strategy::SourceUseBitmap, Rule::BitmapSelf),
        Some(SlotOf::Other(node)) => {
            return row(Strategy::SourceCopyBitmap(node), Rule::BitmapSelfOther);
        }
        None => {}
    }
    if own_started {
        let fixup = Some(Fixup::OwnMissedStart);
        return row_with(
            Strategy::SourceUseBitmap,
            Rule::SyncSourceMissedStart,
            fixup,
        );
    }
    let one_base = is_real(h.own_slot()) && h.own_slot().same_generation(h.peer_slot());
    match (h.peer.uuids.history_has(own), h.own.uuids.history_has(peer)) {
        // Both bitmaps begin at the same generation: together they hold every difference.
        (true, false) if one_base && h.is_lockstep() => {
            return row(Strategy::TargetUseBitmap, Rule::HistoryPeer);
        }
        (false, true) if one_base && h.is_lockstep() => {
            return row(Strategy::SourceUseBitmap, Rule::HistorySelf);
        }
        (true, false) => return row(Strategy::TargetSetBitmap, Rule::HistoryPeer),
        (false, true) => return row(Strategy::SourceSetBitmap, Rule::HistorySelf),
        (true, true) if h.is_lockstep() => {
            // The one that only announced the other's generation never left its own.
            let noted = (
                h.own.uuids.history_notes(peer),
                h.peer.uuids.history_notes(own),
            );
            let direction = match noted {
                (true, false) => Some((Direction::Target, Rule::HistoryPeer)),
                (false, true) => Some((Direction::Source, Rule::HistorySelf)),
                (true, true) | (false, false) => None,
            };
            match direction {
                Some((direction, rule)) if one_base => return row(direction.use_bitmap(), rule),
                Some((direction, rule)) => return row(direction.set_bitmap(), rule),
                None => {}
            }
        }
        (true, true) | (false, false) => {}
    }
    let target = h.own.flag(UuidFlags::SYNC_TARGET) || h.peer.flag(UuidFlags::SYNC_TARGET);
    if target && h.is_lockstep() {
        // A target names its source's generation, but not yet that one's ancestors, and its slots
        // say when its resync began: it is asked again, and knows them once it is through.
        let strategy = match h.phase {
            Phase::Connect => Strategy::RetryConnect,
            Phase::Attach | Phase::AfterUnstable => Strategy::NoSync,
        };
        return row(strategy, Rule::TargetOfAnother);
    }
    if let Some(row) = announced::unwritten(h) {
        return row;
    }
    let rule = if one_base {
        Rule::BitmapBoth
    } else if h.own.uuids.shares_history(&h.peer.uuids) {
        Rule::HistoryBoth
    } else {
        Rule::NoRelation
    };
    if rule == Rule::BitmapBoth {
        return row(Strategy::SplitBrainAutoRecover, rule);
    }
    if rule == Rule::HistoryBoth {
        return row(Strategy::SplitBrainDisconnect, rule);
    }
    row(Strategy::UnrelatedData, rule)
}

#[derive(Clone, Copy)]
enum SlotOf {
    Receiver,
    Other(NodeId),
}

/// The slot of `side` that holds `uuid`: that of `receiver` first, else the lowest other one.
/// Zero is never found, and the own slot of `side` means nothing.
fn find_slot(h: &Handshake<'_>, side: &Side, receiver: NodeId, uuid: Uuid) -> Option<SlotOf> {
    if !is_real(uuid) {
        return None;
    }
    let holds =
        |node: NodeId| side.uuids.slot_is_real(node) && side.uuids.slot(node).same_generation(uuid);
    if holds(receiver) {
        return Some(SlotOf::Receiver);
    }
    if h.is_old() {
        return None;
    }
    (0..NodeId::COUNT)
        .map(NodeId)
        .find(|&node| node != receiver && node != side.node && holds(node))
        .map(SlotOf::Other)
}

/// Rules 51 and 71 of 13.3: `source` started a resync, but `target`, which still is at `current`,
/// never heard of it. Only below protocol 110. The name of the resync says so by itself: the source
/// may have been promoted since, and its history is short.
fn started_84(h: &Handshake<'_>, source: &Side, target: &Side, current: Uuid) -> bool {
    if !h.is_old() || !is_real(current) {
        return false;
    }
    if h.protocol_version < 96 {
        current.same_generation(source.uuids.history[0])
            && target.uuids.history[0].same_generation(source.uuids.history[1])
    } else {
        let slot = source.uuids.slot(target.node);
        is_real(slot) && slot.is_resync_from(current)
    }
}

/// Between two Lockstep nodes: one came back and may have lost acknowledged writes, the other lived
/// through it, and is Consistent only because it does not know yet that the Primary is gone.
fn survivor(h: &Handshake<'_>) -> Option<Direction> {
    let lived = |side: &Side, other: &Side| {
        let holds = side.flag(UuidFlags::RECONNECT) && side.disk >= DiskState::Consistent;
        holds && !may_be_stale(h, side) && may_be_stale(h, other)
    };
    match (lived(h.own, h.peer), lived(h.peer, h.own)) {
        _ if !h.is_lockstep() || h.net.protocol != Protocol::C => None,
        (true, false) => Some(Direction::Source),
        (false, true) => Some(Direction::Target),
        (true, true) | (false, false) => None,
    }
}

/// 13.5: if the table has no reason to prefer a side, the better disk is source.
fn apply_disk_states(h: &Handshake<'_>, verdict: &mut Verdict) {
    let (own, peer) = (h.own.effective_disk(), h.peer.effective_disk());
    let known = |disk: DiskState| disk >= DiskState::Inconsistent && disk != DiskState::DUnknown;
    if own == peer || !known(own) || !known(peer) {
        return;
    }
    let one_inconsistent = own == DiskState::Inconsistent || peer == DiskState::Inconsistent;
    let no_sync = verdict.strategy == Strategy::NoSync
        && verdict.rule != Rule::TargetOfAnother
        && one_inconsistent;
    let applies = if h.protocol_version >= 119 {
        let by_rule = matches!(
            verdict.rule,
            Rule::Reconnected | Rule::LostQuorum | Rule::BothOff
        );
        // What a crashed Primary may have that its peer lacks is worth nothing on a disk that is not whole.
        let source = match verdict.strategy.direction() {
            Some(Direction::Source) => own,
            _ => peer,
        };
        let crashed = h.is_lockstep()
            && verdict.rule == Rule::CrashedPrimary
            && source == DiskState::Inconsistent;
        (by_rule && verdict.strategy.is_arbitrary()) || no_sync || crashed
    } else {
        one_inconsistent && (verdict.rule == Rule::BothOff || no_sync)
    };
    if !applies {
        return;
    }
    let direction = match (own > peer, survivor(h)) {
        (_, Some(direction)) => direction,
        (true, None) => Direction::Source,
        (false, None) => Direction::Target,
    };
    let (source, target) = match direction {
        Direction::Source => (h.own, h.peer),
        Direction::Target => (h.peer, h.own),
    };
    verdict.strategy = bitmap_choice(h, direction, source, target);
}

/// Which bitmap covers what a target with equal UUIDs lacks (13.5).
fn bitmap_choice(
    h: &Handshake<'_>,
    direction: Direction,
    source: &Side,
    target: &Side,
) -> Strategy {
    let slot = target.uuids.slot(source.node);
    let settled = is_real(slot) && slot.same_generation(target.uuids.current);
    // Both follow this generation and mark what they miss. The target is one because of marks that it had with a third
    // node: the source may not have heard of that.
    let follow = h.is_lockstep() && slot.is_zero() && source.uuids.slot(target.node).is_zero();
    if h.is_old() || !target.flag(UuidFlags::SYNC_TARGET) || settled || follow {
        return direction.use_bitmap();
    }
    match (find_slot(h, source, target.node, slot), direction) {
        (Some(SlotOf::Receiver), _) => direction.use_bitmap(),
        (Some(SlotOf::Other(node)), Direction::Source) => Strategy::SourceCopyBitmap(node),
        (Some(SlotOf::Other(node)), Direction::Target) => Strategy::TargetClearBitmap(node),
        (None, _) => direction.set_bitmap(),
    }
}

/// The side that is connected to a Primary, if the other is not and neither is one.
fn follower(h: &Handshake<'_>) -> Option<Direction> {
    if h.own.is_primary() || h.peer.is_primary() {
        return None;
    }
    match (h.own.follows(), h.peer.follows()) {
        (true, false) => Some(Direction::Source),
        (false, true) => Some(Direction::Target),
        (true, true) | (false, false) => None,
    }
}

/// Between two Lockstep nodes: where the direction is arbitrary, a Primary's writes may be at the
/// node that is connected to it already, and nowhere else if that Primary is being resynced.
fn apply_followers(h: &Handshake<'_>, verdict: &mut Verdict) {
    if h.is_lockstep()
        && verdict.strategy.is_arbitrary()
        && let Some(direction) = follower(h)
    {
        verdict.strategy = direction.if_both_failed();
    }
}

/// Between two Lockstep nodes: an Inconsistent disk under no application holds no data that could
/// be a branch of their own. It gets the other's; two of them wait for somebody who has any.
fn apply_inconsistent(h: &Handshake<'_>, verdict: &mut Verdict) {
    if !h.is_lockstep() || !verdict.strategy.is_split_brain() {
        return;
    }
    let inconsistent = |side: &Side| side.effective_disk() == DiskState::Inconsistent;
    let direction = match (inconsistent(h.own), inconsistent(h.peer)) {
        (true, true) => {
            verdict.strategy = Strategy::NoSync;
            return;
        }
        (true, false) if !h.own.is_primary() => Direction::Target,
        (false, true) if !h.peer.is_primary() => Direction::Source,
        _ => return,
    };
    verdict.strategy = match verdict.rule {
        Rule::BitmapBoth => direction.use_bitmap(),
        _ => direction.set_bitmap(),
    };
}

/// 13.6, steps 1 to 5.
fn apply_split_brain(h: &Handshake<'_>, verdict: &mut Verdict) {
    let found = verdict.strategy;
    if !found.is_split_brain() {
        return;
    }
    verdict.split_brain = true;
    let auto = found == Strategy::SplitBrainAutoRecover;
    if auto && h.phase == Phase::AfterUnstable {
        if let Some(direction) = by_disks_after_unstable(h) {
            verdict.strategy = direction.use_bitmap();
            return;
        }
    } else if auto && !(h.own.flag(UuidFlags::STABLE) && h.peer.flag(UuidFlags::STABLE)) {
        // A neighbour of a Primary is never stable, and a disk of another branch must not be
        // attached beside one.
        if !h.is_lockstep() || h.phase != Phase::Attach {
            verdict.strategy = Strategy::NoSync;
            return;
        }
    }
    if auto && let Some(direction) = without_changes(h) {
        verdict.split_brain = false;
        verdict.strategy = direction.use_bitmap();
        return;
    }
    if verdict.rule == Rule::HistoryBoth
        && let Some(direction) = still_an_ancestor(h)
    {
        verdict.split_brain = false;
        verdict.strategy = direction.set_bitmap();
        return;
    }
    verdict.handlers.push(Handler::InitialSplitBrain);
    let decision = if auto || h.net.always_asbp {
        by_quorum(h).or_else(|| policies::by_policies(h, verdict))
    } else {
        None
    };
    let resolved = decision.or_else(|| by_discard_flag(h));
    match resolved {
        Some(direction) if auto => verdict.strategy = direction.use_bitmap(),
        Some(direction) => verdict.strategy = direction.set_bitmap(),
        None => {
            verdict.strategy = Strategy::SplitBrainDisconnect;
            verdict.handlers.push(Handler::SplitBrain);
        }
    }
}

/// Between two Lockstep nodes: both left the same generation, but one of them has changed no block
/// since, and no application uses it. Its generation is a name only (a Primary died while it
/// announced one), so that following the other loses nothing.
fn without_changes(h: &Handshake<'_>) -> Option<Direction> {
    if !h.is_lockstep() {
        return None;
    }
    let unchanged = |side: &Side| side.uuids.dirty_bits == 0 && !side.is_primary();
    match (unchanged(h.own), unchanged(h.peer)) {
        (true, true) if h.own.node < h.peer.node => Some(Direction::Source),
        (true, _) => Some(Direction::Target),
        (false, true) => Some(Direction::Source),
        (false, false) => None,
    }
}

/// Between two Lockstep nodes: one of them has changed nothing since the other left it, which descends from
/// what it had then. No bitmap is of that time any more (`new-current-uuid` begins all of them anew).
fn still_an_ancestor(h: &Handshake<'_>) -> Option<Direction> {
    if !h.is_lockstep() {
        return None;
    }
    let left = |side: &Side, other: &Side| {
        let at = side.uuids.slot(other.node);
        is_real(at)
            && side.uuids.dirty_bits == 0
            && !side.is_primary()
            && other.uuids.history_has(at)
    };
    match (left(h.own, h.peer), left(h.peer, h.own)) {
        (true, false) => Some(Direction::Target),
        (false, true) => Some(Direction::Source),
        (true, true) | (false, false) => None,
    }
}

/// 14.2. If both are UpToDate a kernel peer always chooses to be target, so this side is source;
/// between two Lockstep nodes the lower node id is.
fn by_disks_after_unstable(h: &Handshake<'_>) -> Option<Direction> {
    let own = h.own.effective_disk() == DiskState::UpToDate;
    let peer = h.peer.effective_disk() == DiskState::UpToDate;
    match (own, peer) {
        (true, true) if !h.is_lockstep() || h.own.node < h.peer.node => Some(Direction::Source),
        (_, true) => Some(Direction::Target),
        (true, false) => Some(Direction::Source),
        (false, false) => None,
    }
}

fn by_quorum(h: &Handshake<'_>) -> Option<Direction> {
    if !h.quorum_configured || h.protocol_version < 113 || h.phase == Phase::Attach {
        return None;
    }
    match (h.own.quorate, h.peer.quorate) {
        (true, false) => Some(Direction::Source),
        (false, true) => Some(Direction::Target),
        (true, true) | (false, false) => None,
    }
}

fn by_discard_flag(h: &Handshake<'_>) -> Option<Direction> {
    if h.phase == Phase::Attach {
        return None;
    }
    discard_wish(h)
}

/// Direction that discard-my-data on exactly one side asks for.
fn discard_wish(h: &Handshake<'_>) -> Option<Direction> {
    match (
        h.own.flag(UuidFlags::DISCARD_MY_DATA),
        h.peer.flag(UuidFlags::DISCARD_MY_DATA),
    ) {
        (true, false) => Some(Direction::Target),
        (false, true) => Some(Direction::Source),
        (true, true) | (false, false) => None,
    }
}

/// 13.6, step 6: discard-my-data without a split brain turns the direction.
fn apply_discard_my_data(h: &Handshake<'_>, verdict: &mut Verdict) {
    if verdict.split_brain || h.protocol_version < 121 || h.phase == Phase::Attach {
        return;
    }
    let (Some(wish), Some(direction)) = (discard_wish(h), verdict.strategy.direction()) else {
        return;
    };
    let new_source = match wish {
        Direction::Source => h.own,
        Direction::Target => h.peer,
    };
    if wish != direction
        && new_source.effective_disk() > DiskState::Inconsistent
        && let Some(reverse) = verdict.strategy.reversed()
    {
        verdict.strategy = reverse;
    }
}

/// `rr-conflict`: a Primary with good data shall be target.
fn apply_primary_conflict(h: &Handshake<'_>, verdict: &mut Verdict) {
    let Some(direction) = verdict.strategy.direction() else {
        return;
    };
    let (loser, source) = match direction {
        Direction::Target => (h.own, h.peer),
        Direction::Source => (h.peer, h.own),
    };
    // Its applications do not see its own disk, which is not current, but that of a peer.
    let served_by_others = h.is_lockstep()
        && h.phase == Phase::AfterUnstable
        && loser.disk < DiskState::UpToDate
        && source.disk == DiskState::UpToDate;
    // Marks on one side only, both Primary: they are writes in flight of the other Primary, which
    // this one gets late. Nothing of its own is given up.
    let late_writes = verdict.rule == Rule::MarkedBlocks
        && h.own.is_primary()
        && h.peer.is_primary()
        && loser.uuids.dirty_bits == 0;
    // Promoted since it came back, and still on the peer's generation: it has served nothing. (The
    // peer may have got that from a third node.)
    let pair = NodeMask::of(h.own.node).with(h.peer.node);
    let third = |side: &Side| !side.uuids.slots.difference(pair).is_empty();
    let unused = verdict.rule == Rule::MarkedBlocks
        && h.phase == Phase::Connect
        && may_be_stale(h, loser)
        && !(h.own.is_primary() && h.peer.is_primary())
        && !third(h.own)
        && !third(h.peer);
    // A disk that is just being attached to a Primary is not the data that it serves.
    if !loser.is_primary()
        || loser.disk < DiskState::Consistent
        || served_by_others
        || verdict.strategy.is_arbitrary()
        || !h.has_dirty_bits()
        || verdict.demote_first
        || late_writes
        || unused
    {
        return;
    }
    let auto_discard = h.net.rr_conflict == AfterSplitBrain::AutoDiscard
        && verdict.rule == Rule::CrashedPrimary
        && matches!(
            verdict.strategy,
            Strategy::TargetUseBitmap | Strategy::SourceUseBitmap
        );
    if auto_discard && let Some(reverse) = verdict.strategy.reversed() {
        verdict.strategy = reverse;
        return;
    }
    if direction == Direction::Source {
        return;
    }
    match h.net.rr_conflict {
        AfterSplitBrain::ViolentlyAs0p => {}
        AfterSplitBrain::RetryConnect => {
            verdict.strategy = Strategy::SyncTargetPrimaryReconnect;
        }
        AfterSplitBrain::CallPriLostAfterSb => {
            verdict.handlers.push(Handler::PriLost);
            verdict.strategy = Strategy::SyncTargetPrimaryDisconnect;
        }
        _ => verdict.strategy = Strategy::SyncTargetPrimaryDisconnect,
    }
}

#[path = "compare_announced.rs"]
mod announced;
#[path = "compare_marks.rs"]
mod marks;
#[path = "compare_policies.rs"]
mod policies;

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
