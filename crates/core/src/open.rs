//! Opening and closing volumes, and the promotion and demotion that follow (semantics.md, 7.3).
//!
//! A front end that opens a volume for writing makes the resource Primary, if `auto-promote` says
//! so, and waits for that. The last writer's close makes it Secondary again, unless somebody asked
//! for `primary` in words.

use alloc::format;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, Role};

use crate::admin::{Wait, Waiting, fail, no_volume};
use crate::command::{Answer, CommandError, ErrorCode};
use crate::event::CommandId;
use crate::report::Event;
use crate::resource::Resource;
use crate::time::{Duration, Instant};
use crate::timers::Timer;
use crate::transition::Change;
use crate::twopc::{WishKind, command_error};
use crate::validity::Refusal;

/// Between two tries to promote for an opener.
const RETRY: Duration = Duration::from_millis(100);
/// Between two tries to demote after the last close.
const DEMOTE_RETRY: Duration = Duration::from_secs(1);

/// How a volume is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// What an open that waits does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenStep {
    /// Looks from this moment on.
    From(Instant),
    /// Waits for the two-phase commit.
    Promoting,
}

/// What is left to do for openers.
#[derive(Debug, Default)]
pub(crate) struct Opens {
    /// The last writer of an automatic Primary has closed: demote, not before this.
    pub(crate) demote_at: Option<Instant>,
    /// How long a peer's promotion is put off because of readers here.
    readers_until: Option<Instant>,
}

impl Resource {
    /// A front end opens a volume. The answer may take `auto-promote-timeout`.
    pub(crate) fn command_open(&mut self, id: CommandId, volume: VolumeNr, write: bool) {
        let access = if write { Access::Write } else { Access::Read };
        if self.state.role != Role::Primary && write && self.options.auto_promote {
            // Who does not answer is no Primary any more.
            for peer in self.established_peers().iter() {
                self.ping(peer);
            }
        }
        let patience = u64::from(self.options.auto_promote_timeout_tenths);
        let item = Waiting {
            id,
            what: Wait::Open {
                volume,
                access,
                step: OpenStep::From(self.now),
            },
            until: self.now + Duration::from_tenths(patience),
        };
        self.open_step(item, volume, access, OpenStep::From(self.now));
    }

    /// Looks whether a waiting open can be answered or has to be tried again.
    pub(crate) fn open_step(
        &mut self,
        item: Waiting,
        volume: VolumeNr,
        access: Access,
        step: OpenStep,
    ) {
        let expired = self.now >= item.until;
        let due = match step {
            OpenStep::Promoting => false,
            OpenStep::From(at) => self.now >= at || expired,
        };
        if !due {
            self.waiting.push(item);
        } else if let Some(error) = self.open_refusal(volume) {
            self.answer(item.id, Err(error));
        } else if self.state.role == Role::Primary {
            if self.is_demoting() {
                self.waiting.push(item);
            } else {
                self.opened(item.id, volume, access);
            }
        } else if self.waits_for_turn() || access == Access::Write && self.may_stand_by() {
            if !self.waits_for_turn() {
                self.stand_by(false);
            }
            self.opened(item.id, volume, access);
        } else if access == Access::Read {
            match self.reader_refusal(volume) {
                None => self.opened(item.id, volume, access),
                Some(error) if expired || !self.connections_may_improve() => {
                    self.answer(item.id, Err(error));
                }
                Some(_) => self.waiting.push(item),
            }
        } else if expired || self.settled() {
            let id = item.id;
            let what = Wait::Open {
                volume,
                access,
                step: OpenStep::Promoting,
            };
            self.waiting.push(Waiting { what, ..item });
            let kind = WishKind::Promote {
                force_up_to_date: false,
                outdate_absent: false,
            };
            self.wish(kind, Some(id));
        } else {
            self.waiting.push(item);
        }
    }

    /// The two-phase commit for an opener has ended.
    pub(crate) fn open_answered(
        &mut self,
        id: CommandId,
        volume: VolumeNr,
        until: Instant,
        result: Result<Answer, Refusal>,
    ) {
        let again = match &result {
            Ok(_) => self.state.role != Role::Primary || self.is_demoting(),
            Err(refusal) => self.now < until && self.promotion_may_improve(refusal.code, volume),
        };
        if again {
            let what = Wait::Open {
                volume,
                access: Access::Write,
                step: OpenStep::From(self.now + RETRY),
            };
            self.waiting.push(Waiting { id, what, until });
            let at = self.now + RETRY;
            self.timers.set_earliest(Timer::CommandRetry, at);
            return;
        }
        match result {
            Err(refusal) => self.answer(id, Err(command_error(refusal))),
            Ok(_) => match self.open_refusal(volume) {
                Some(error) => self.answer(id, Err(error)),
                None => self.opened(id, volume, Access::Write),
            },
        }
    }

    /// A front end closes what it opened.
    pub(crate) fn close_volume(
        &mut self,
        volume: VolumeNr,
        write: bool,
    ) -> Result<Answer, CommandError> {
        let Some(device) = self.devices.get_mut(&volume) else {
            return Err(no_volume(volume));
        };
        let count = if write {
            &mut device.openers.writers
        } else {
            &mut device.openers.readers
        };
        *count = count.saturating_sub(1);
        self.event(Event::Device(volume));
        if !self.has_openers(Access::Read) && !self.has_openers(Access::Write) && self.state.fail_io
        {
            self.hard_change(Change::new().fail_io(false));
        }
        if write && !self.has_openers(Access::Write) && !planted!(self, CloseNeverDemotes) {
            self.opens.demote_at = Some(self.now);
            self.turn_closed();
        }
        Ok(Answer::Done)
    }

    /// Demotes after the last close, when all writes are through.
    pub(crate) fn settle_auto_demote(&mut self) {
        let Some(at) = self.opens.demote_at else {
            return;
        };
        let opens = self
            .waiting
            .iter()
            .any(|w| matches!(w.what, Wait::Open { .. }));
        if self.state.role != Role::Primary
            || self.explicit_primary
            || self.has_openers(Access::Write)
        {
            self.opens.demote_at = None;
            return;
        }
        if self.now < at || opens || self.twopc.current.is_some() || !self.requests_are_through() {
            self.close_epoch();
            let next = at.max(self.now + RETRY);
            self.timers.set_earliest(Timer::CommandRetry, next);
            return;
        }
        let next = self.now + DEMOTE_RETRY;
        self.opens.demote_at = Some(next);
        self.timers.set_earliest(Timer::CommandRetry, next);
        self.wish(WishKind::Demote { force: false }, None);
    }

    /// This Primary loses a split brain by the policy `call-pri-lost-after-sb`: it is demoted
    /// first, and the next handshake drops its changes; with open volumes it cannot be
    /// (semantics.md, 13.6).
    pub(crate) fn give_role_up(&mut self, peer: NodeId, volume: VolumeNr) -> Refusal {
        if self.has_openers(Access::Write) {
            self.run_handler("pri-lost-after-sb", Some(volume), Some(peer));
            return Refusal {
                code: ErrorCode::HANDSHAKE_DISCONNECT,
                text: format!(
                    "split brain on volume {volume}: this Primary's changes are to be dropped, but \
                     it cannot be demoted, because a volume is open for writing"
                ),
            };
        }
        self.explicit_primary = false;
        self.opens.demote_at = Some(self.now);
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.lost_split_brain = true;
        }
        Refusal {
            code: ErrorCode::HANDSHAKE_RETRY,
            text: format!(
                "split brain on volume {volume}: this Primary gives its role up before its \
                 changes are dropped"
            ),
        }
    }

    /// Demoted: where a split brain was lost, the next handshake drops the changes, whatever
    /// `after-sb-1pri` says. A kernel 9 node goes on in the handshake that demoted it.
    pub(crate) fn discard_what_lost(&mut self) {
        for conn in self.connections.values_mut() {
            conn.discard_my_data |= conn.lost_split_brain;
        }
    }

    /// Promoted: what this node has counts again.
    pub(crate) fn discard_nothing(&mut self) {
        for conn in self.connections.values_mut() {
            conn.forget_lost_split_brain();
        }
    }

    /// This node was to give up its changes to the peer by a policy, which was for a split brain
    /// only. It does not any more.
    pub(crate) fn keeps_changes(&mut self, peer: NodeId) -> bool {
        let conn = self.connections.get_mut(&peer);
        conn.is_some_and(|conn| conn.discard_my_data && conn.forget_lost_split_brain())
    }

    /// A volume is open in this way.
    pub(crate) fn has_openers(&self, access: Access) -> bool {
        self.devices.values().any(|d| match access {
            Access::Read => d.openers.readers > 0,
            Access::Write => d.openers.writers > 0,
        })
    }

    /// A Secondary's volume that is open for reading can be read now.
    pub(crate) fn secondary_reads(&self, volume: VolumeNr) -> bool {
        self.state.role != Role::Primary
            && self
                .devices
                .get(&volume)
                .is_some_and(|d| d.openers.readers > 0)
            && self.reader_refusal(volume).is_none()
    }

    /// A peer wants to be Primary while a volume is open for reading here: its promotion is put off
    /// for a while, since readers use to be short.
    pub(crate) fn puts_promotion_off(&mut self, refusal: &Refusal) -> bool {
        if refusal.code != ErrorCode::PRIMARY_READER {
            return false;
        }
        let tenths = u64::from(self.options.auto_promote_timeout_tenths);
        let patience = Duration::from_tenths(tenths);
        let known = self.opens.readers_until;
        let until = known.filter(|until| self.now < *until + patience);
        let until = until.unwrap_or(self.now + patience);
        self.opens.readers_until = Some(until);
        self.now < until
    }

    fn opened(&mut self, id: CommandId, volume: VolumeNr, access: Access) {
        if let Some(device) = self.devices.get_mut(&volume) {
            match access {
                Access::Read => device.openers.readers += 1,
                Access::Write => device.openers.writers += 1,
            }
        }
        self.event(Event::Device(volume));
        self.answer(id, Ok(Answer::Done));
    }

    /// Why a volume cannot be opened at all.
    fn open_refusal(&self, volume: VolumeNr) -> Option<CommandError> {
        let error = if !self.devices.contains_key(&volume) {
            return Some(no_volume(volume));
        } else if self.state.fail_io {
            fail(
                ErrorCode::DEVICE_IN_USE,
                "the resource was demoted by force: all openers of before have to close first",
            )
        } else if self.state.role != Role::Primary
            && !self.options.auto_promote
            && !self.waits_for_turn()
        {
            fail(
                ErrorCode::ERR_INVALID_REQUEST,
                "the resource is Secondary and auto-promote is off; run `drbdadm primary` first",
            )
        } else {
            Ok(())
        };
        error.err()
    }

    /// Why a Secondary's volume cannot be read.
    fn reader_refusal(&self, volume: VolumeNr) -> Option<CommandError> {
        let Some(device) = self.state.devices.get(&volume) else {
            return Some(no_volume(volume));
        };
        let error = if !self.options.auto_promote {
            fail(
                ErrorCode::ERR_INVALID_REQUEST,
                "the resource is Secondary and auto-promote is off",
            )
        } else if let Some(peer) = self.state.primary_peer() {
            fail(
                ErrorCode::TWO_PRIMARIES,
                format!("node {peer} is Primary; its volume changes under a reader here"),
            )
        } else if !device.have_quorum {
            fail(
                ErrorCode::NO_QUORUM,
                format!("volume {volume} has no quorum"),
            )
        } else if !device.data_accessible() {
            fail(
                ErrorCode::NO_UP_TO_DATE_DISK,
                format!("volume {volume} has no UpToDate data, neither here nor at a peer"),
            )
        } else {
            Ok(())
        };
        error.err()
    }

    fn connections_may_improve(&self) -> bool {
        !self.settled()
            || self
                .state
                .connections
                .values()
                .any(|c| c.conn > ConnState::Disconnecting && c.conn < ConnState::Connected)
    }

    /// A promotion that was refused with this code may go a moment later.
    fn promotion_may_improve(&mut self, code: ErrorCode, volume: VolumeNr) -> bool {
        match code {
            ErrorCode::CW_FAILED_BY_PEER
            | ErrorCode::TWO_PRIMARIES
            | ErrorCode::TIMEOUT
            | ErrorCode::CONCURRENT_ST_CHG
            | ErrorCode::IN_TRANSIENT_STATE => true,
            // The handlers go on when this open has given up; the next one finds their answers.
            ErrorCode::PRIMARY_NOP => self.fence_for_promotion(),
            // Where the volume itself can be read by now, it was a moment ago, or it is for another
            // volume, which may follow.
            ErrorCode::NO_UP_TO_DATE_DISK | ErrorCode::NO_QUORUM => {
                self.connections_may_improve()
                    || self.disks_may_improve()
                    || self.reader_refusal(volume).is_none()
            }
            _ => false,
        }
    }

    fn disks_may_improve(&self) -> bool {
        let comes = |disk| matches!(disk, DiskState::Attaching | DiskState::Negotiating);
        self.state.devices.values().any(|d| comes(d.disk))
    }
}
