//! Primaries that take turns: live migration between nodes of which at most one is Primary at a time
//! (semantics.md, 7.1).
//!
//! Where two nodes must not be Primary at once, because a third disk follows them or one of them has none,
//! and `allow-two-primaries` asks for it all the same, the second one stands by: its users hold it as a Primary, and
//! what they ask for waits until the role has come here. The other one is asked for it, lets its own requests end, and
//! stands by in turn. So each read and each write is that of the only Primary, and no two nodes can part.

use alloc::format;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, Role, StateWord};

use crate::admin::fail;
use crate::command::{Answer, CommandError, ErrorCode};
use crate::open::Access;
use crate::options::{Fencing, Quorum};
use crate::report::{Event, Level};
use crate::resource::Resource;
use crate::state::{ConnectionState, DeviceState};
use crate::time::{Duration, Instant};
use crate::timers::Timer;
use crate::transition::Change;
use crate::twopc::{Transaction, Wish, WishKind};
use crate::validity::Refusal;

/// A Primary keeps its turn for so long, unless it has nothing to do. Where a disk is away each turn makes a
/// generation, of which metadata remember some thirty, and the next one lasts twice as long.
const TURN: Duration = Duration::from_millis(50);
/// The longest turn is that, so often doubled.
const MOST_DOUBLED: u32 = 14;
/// Who has just given its turn away does not ask for it before this.
const PAUSE: Duration = Duration::from_millis(20);
/// Between two questions.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// A question counts for so long.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two looks at what has to end before the turn passes on.
const LOOK: Duration = Duration::from_millis(2);
/// Nobody is Primary, nobody asks: so long after the last change one of those that stand by becomes it.
const VACANT: Duration = Duration::from_millis(500);

/// Of a resource.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// Users here hold this node as a Primary, whoever is it just now.
    pub(crate) stands_by: bool,
    /// `primary` was asked for in words.
    explicit: bool,
    /// This Primary is giving its turn away.
    pub(crate) yields: bool,
    /// Who wants it, and when that was said.
    asked: Option<(NodeId, Instant)>,
    /// Requests wait here since then.
    wants: Option<Instant>,
    /// No question before this.
    next: Instant,
    /// Since when this node has its turn.
    since: Instant,
    /// How many turns have begun since all disks were here.
    turns: u32,
    /// Something was written in a turn of this node.
    had_turn: bool,
    /// Whose turn it was last.
    holder: Option<NodeId>,
    /// That the holder is lost was said.
    told: bool,
}

impl Resource {
    /// This node and the peer may take turns as Primary.
    fn may_take_turns(&self, peer: NodeId) -> bool {
        self.both_may_write(peer)
            && self.is_lockstep(peer)
            && self.is_established(peer)
            && !self.may_both_be_primary(peer)
    }

    /// The peer, a kernel, knows no turns. This node may stand by for it until it is Secondary, as the target of a
    /// migration does.
    fn may_wait_for(&self, peer: NodeId) -> bool {
        self.both_may_write(peer)
            && self.is_kernel(peer)
            && self.is_established(peer)
            && !self.may_both_be_primary(peer)
    }

    /// The peer, a kernel, asks to be Primary as if it were the only other disk: it takes no turns, and writes as soon as
    /// it has the role.
    pub(crate) fn waits_for_demotion(&self, peer: NodeId) -> bool {
        self.state.role == Role::Primary && self.may_wait_for(peer)
    }

    /// Standing by for a kernel, whose turn may be long, users read what they would read as a second Primary beside
    /// it: a migration's target looks at its disk before the source has stopped.
    pub(crate) fn reads_beside_primary(&self) -> bool {
        let mut primaries = self.state.primaries().peekable();
        self.waits_for_turn()
            && primaries.peek().is_some()
            && primaries.all(|peer| self.may_wait_for(peer))
    }

    /// This Secondary could be Primary but for those that are it, and these may take turns with it, or it waits for
    /// them.
    pub(crate) fn may_stand_by(&self) -> bool {
        let ready = |d: &DeviceState| d.have_quorum && d.data_accessible();
        let mut primaries = self.state.primaries().peekable();
        self.state.role == Role::Secondary
            && !self.state.fail_io
            && !self.in_handshake()
            && primaries.peek().is_some()
            && primaries.all(|peer| self.may_take_turns(peer) || self.may_wait_for(peer))
            && self.state.devices.values().all(ready)
    }

    /// Another node is Primary; users here wait for their turn.
    pub(crate) fn stand_by(&mut self, explicit: bool) {
        let now = self.now;
        let turns = &mut self.turns;
        if !turns.stands_by {
            turns.had_turn = false;
            turns.next = now;
            turns.since = now;
        }
        turns.stands_by = true;
        turns.explicit |= explicit;
        turns.told = false;
        if explicit {
            // Whoever says so knows what has become of the last holder.
            turns.holder = None;
        }
        self.note_holder();
        self.event(Event::Resource);
    }

    /// Nobody holds this node as a Primary any more.
    fn stand_down(&mut self) {
        if !self.turns.stands_by {
            return;
        }
        self.turns = Turns::default();
        self.event(Event::Resource);
        // Requests of who does not hold it any more.
        self.admission_changed();
    }

    /// This node stands by, and is not Primary.
    pub(crate) fn waits_for_turn(&self) -> bool {
        self.turns.stands_by && self.state.role != Role::Primary
    }

    /// No request begins, since this Primary gives its turn away. Those that have begun go on.
    pub(crate) fn turn_ends(&self) -> bool {
        self.turns.yields && !planted!(self, TurnIgnored)
    }

    /// A flush of users that have had no turn yet: they have written nothing.
    pub(crate) fn flush_is_void(&self) -> bool {
        self.state.role != Role::Primary && !(self.turns.stands_by && self.turns.had_turn)
    }

    /// The last one that holds an automatic Primary has closed.
    pub(crate) fn turn_closed(&mut self) {
        if self.waits_for_turn() && !self.turns.explicit && !self.has_openers(Access::Write) {
            self.stand_down();
        }
    }

    /// `secondary` on a node that stands by.
    pub(crate) fn stop_standing_by(&mut self, force: bool) -> Result<Answer, CommandError> {
        let used = self.has_openers(Access::Write) || !self.io.held.is_empty();
        if used && !force {
            return fail(
                ErrorCode::DEVICE_IN_USE,
                "a volume is held open for writing; unmount it first",
            );
        }
        if used {
            self.hard_change(Change::new().fail_io(true));
        }
        self.stand_down();
        Ok(Answer::Done)
    }

    /// Demoted: by giving its turn away, or for good.
    pub(crate) fn turn_ended(&mut self) {
        if !core::mem::take(&mut self.turns.yields) {
            self.stand_down();
            return;
        }
        let to = self.turns.asked.take();
        self.turns.next = self.now + PAUSE;
        self.turns.since = self.now;
        self.turns.wants = None;
        self.turns.holder = None;
        if let Some((peer, _)) = to {
            let text = "gives its turn as Primary to this peer, and stands by";
            self.log(Level::Info, Some(peer), None, text.into());
        }
    }

    /// A peer that may take turns with this Primary was refused: it asks for its turn.
    pub(crate) fn turn_is_asked(&mut self, t: &Transaction, refusal: &Refusal) {
        let peer = t.initiator;
        let promotes = t.change.mask.has(StateWord::ROLE) && !t.change.mask.has(StateWord::CONN);
        if promotes
            && refusal.code == ErrorCode::TWO_PRIMARIES
            && self.state.role == Role::Primary
            && self.may_take_turns(peer)
        {
            self.turns.asked = Some((peer, self.now));
        }
    }

    /// The own check refuses a promotion because of a Primary that can be asked for its turn.
    pub(crate) fn asks_for_turn(&self, kind: &WishKind, refusal: &Refusal) -> bool {
        matches!(kind, WishKind::Promote { .. })
            && refusal.code == ErrorCode::TWO_PRIMARIES
            && self.waits_for_turn()
            && self.state.primaries().all(|peer| self.may_take_turns(peer))
    }

    /// A promotion or demotion of its own accord has ended.
    pub(crate) fn turn_answered(&mut self, wish: &Wish, result: &Result<Answer, Refusal>) {
        match (&wish.kind, result) {
            (WishKind::Promote { .. }, Ok(_)) if self.turns.stands_by => {
                self.explicit_primary |= self.turns.explicit;
                self.turns.since = self.now;
                self.turns.turns = match self.disks_are_whole() {
                    true => 0,
                    false => self.turns.turns + 1,
                };
                self.turns.had_turn = true;
                self.turns.wants = None;
                self.turns.asked = None;
                self.turns.told = false;
                self.admission_changed();
            }
            (WishKind::Promote { .. }, Ok(_)) if wish.command.is_none() => {
                // Who waited for the turn was told to leave, or did, before this promotion had its turn.
                let held = self.explicit_primary || self.has_openers(Access::Write);
                if !held && !planted!(self, LeftAsPrimary) {
                    self.opens.demote_at = Some(self.now);
                }
            }
            (WishKind::Promote { .. }, Err(refusal)) if self.turns.stands_by => {
                if refusal.code == ErrorCode::PRIMARY_NOP {
                    self.fence_for_promotion();
                }
                // A Primary beyond a peer has to be met first, and that takes a two-phase commit, too.
                let seen = self.state.primary_peer().is_some();
                self.turns.next = self.now + if seen { ASK_AGAIN } else { PATIENCE };
                self.timers
                    .set_earliest(Timer::CommandRetry, self.turns.next);
            }
            (WishKind::Demote { .. }, Err(_)) => self.keep_turn(),
            // By an operator's word, who may have come while the turn was given away.
            (WishKind::Demote { .. }, Ok(_)) if wish.command.is_some() => self.stand_down(),
            _ => {}
        }
    }

    /// What was begun to give the turn away ends; requests go on.
    pub(crate) fn keep_turn(&mut self) {
        self.turns.asked = None;
        if core::mem::take(&mut self.turns.yields) {
            self.admission_changed();
        }
    }

    /// Looks at whose turn it is; called after each input.
    pub(crate) fn settle_turns(&mut self) {
        if self.state.role == Role::Primary {
            self.settle_yield();
        } else if self.turns.stands_by {
            self.settle_standby();
        }
    }

    /// A Primary that is asked for its turn: it lets the requests end that it has begun.
    fn settle_yield(&mut self) {
        let Some((peer, asked)) = self.turns.asked else {
            return;
        };
        if self.turns.yields && self.is_demoting() {
            // It can come about at any moment now: its end decides.
            return;
        }
        let gone = self.now >= asked + PATIENCE || !self.may_take_turns(peer);
        if gone || self.state.suspended() || planted!(self, TurnKept) {
            self.keep_turn();
            return;
        }
        if !self.turns.yields {
            let whole = self.disks_are_whole();
            let doubled = if whole {
                0
            } else {
                self.turns.turns.min(MOST_DOUBLED)
            };
            let until = self.turns.since + TURN.times(1 << doubled);
            let busy = !whole || !self.io.held.is_empty() || !self.begun_are_answered();
            if busy && self.now < until {
                self.timers.set_earliest(Timer::CommandRetry, until);
                return;
            }
            if !self.may_pass_turn() {
                self.timers
                    .set_earliest(Timer::CommandRetry, self.now + LOOK.times(5));
                return;
            }
            let held = self.explicit_primary || self.has_openers(Access::Write);
            if !held || self.is_demoting() {
                // It becomes Secondary of its own accord.
                return;
            }
            self.turns.explicit = self.explicit_primary;
            self.turns.stands_by = true;
            self.turns.yields = true;
            self.close_epoch();
        }
        let through = self.begun_are_through() || planted!(self, TurnGivenEarly);
        let calm = self.may_pass_turn();
        if through && calm && self.twopc.current.is_none() && !self.is_demoting() {
            self.wish(WishKind::Demote { force: true }, None);
        } else {
            let at = self.now + LOOK;
            self.timers.set_earliest(Timer::CommandRetry, at);
        }
    }

    /// All disks are here and whole.
    fn disks_are_whole(&self) -> bool {
        self.devices.iter().all(|(volume, device)| {
            let diskless = device.intentional_diskless;
            let own = diskless || self.state.disk(*volume) == DiskState::UpToDate;
            own && device.peers.iter().all(|(peer, pd)| {
                !pd.options.bitmap
                    || self.state.peer_device(*volume, *peer).disk == DiskState::UpToDate
            })
        })
    }

    /// Nobody is just being met or left, and all whole disks are known to have the generation that applications see: the
    /// next Primary begins where this one ends.
    fn may_pass_turn(&self) -> bool {
        let rests = |c: &ConnectionState| {
            let at_rest = [
                ConnState::StandAlone,
                ConnState::Unconnected,
                ConnState::Connecting,
            ];
            c.conn == ConnState::Connected || at_rest.contains(&c.conn)
        };
        let told = |volume: &VolumeNr| {
            let peers = self.established_peers();
            peers.iter().all(|peer| {
                let whole = self.state.peer_device(*volume, peer).disk == DiskState::UpToDate;
                !whole || self.same_current(*volume, peer)
            })
        };
        self.settled()
            && self.new_uuid.is_none()
            && self.state.connections.values().all(rests)
            && self.devices.keys().all(told)
    }

    /// A node that stands by: it asks for its turn when somebody waits for it.
    fn settle_standby(&mut self) {
        self.note_holder();
        let vacant = self.state.primary_peer().is_none();
        let waits = !self.io.held.is_empty();
        let due = waits || vacant && self.now >= self.turns.since + VACANT;
        if !due {
            self.turns.wants = None;
            if vacant {
                let at = self.turns.since + VACANT;
                self.timers.set_earliest(Timer::CommandRetry, at);
            }
            return;
        }
        if self.holder_is_lost() || self.reads_beside_primary() {
            // A kernel that is asked would say yes.
            return;
        }
        let promotes = |kind: &WishKind| matches!(kind, WishKind::Promote { .. });
        if self.wants(promotes) {
            return;
        }
        let since = *self.turns.wants.get_or_insert(self.now);
        if self.now < self.turns.next {
            self.timers
                .set_earliest(Timer::CommandRetry, self.turns.next);
            return;
        }
        if !self.settled() && self.now < since + self.settle_patience() {
            self.timers
                .set_earliest(Timer::CommandRetry, self.now + LOOK);
            return;
        }
        let kind = WishKind::Promote {
            force_up_to_date: false,
            outdate_absent: false,
        };
        self.wish(kind, None);
    }

    fn note_holder(&mut self) {
        if let Some(peer) = self.state.primary_peer() {
            if self.turns.holder != Some(peer) {
                self.turns.holder = Some(peer);
                self.turns.since = self.now;
            }
            self.turns.told = false;
        } else if let Some(holder) = self.turns.holder
            && self.state.conn(holder) == ConnState::Connected
        {
            // It has given the role up.
            self.turns.holder = None;
            self.turns.since = self.now;
            self.turns.next = self.now;
        }
    }

    /// The one whose turn it was is lost, and nothing keeps it from going on: somebody has to say that it
    /// does not.
    fn holder_is_lost(&mut self) -> bool {
        let Some(holder) = self.turns.holder else {
            return false;
        };
        let conn = self.connections.get(&holder);
        let fences = conn.is_some_and(|c| c.net.fencing >= Fencing::ResourceOnly);
        let lost = self.state.conn(holder) != ConnState::Connected
            && conn.is_some()
            && !fences
            && self.options.quorum == Quorum::Off
            && !planted!(self, LostHolderReplaced);
        if lost && !self.turns.told {
            self.turns.told = true;
            let text = format!(
                "node {holder} was Primary when its connection was lost: requests wait until it is back, or `drbdadm \
                 primary` says that it has stopped"
            );
            self.log(Level::Warn, Some(holder), None, text);
        }
        lost
    }
}
