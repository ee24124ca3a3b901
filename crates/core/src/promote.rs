//! Promotion by command: what it waits for, and what its next try does differently (semantics.md, 7.1).

use alloc::boxed::Box;
use alloc::format;

use lockstep_format::units::VolumeNr;
use lockstep_format::wire::{DiskState, ReplState, Role};

use crate::admin::{Wait, Waiting};
use crate::command::ErrorCode;
use crate::connection::Connection;
use crate::event::CommandId;
use crate::resource::Resource;
use crate::state::{DeviceState, ReplSets};
use crate::time::Duration;
use crate::timers::Timer;
use crate::twopc::WishKind;
use crate::validity::Refusal;

/// Tries of a promotion (semantics.md, 7.1).
const PROMOTE_TRIES: u32 = 4;
/// Longest time for which a promotion beside another Primary is tried again.
const MOST_PAUSE_TENTHS: u64 = 10;

impl Resource {
    pub(crate) fn command_primary(&mut self, id: CommandId, force: bool) {
        if force && self.state.role == Role::Primary && self.force_next(id, None) {
            return;
        }
        self.ping_everybody();
        self.forget_failed_fences();
        let patience = self.settle_patience();
        let what = Wait::Promote {
            force,
            force_up_to_date: false,
            outdate_absent: false,
            tries: PROMOTE_TRIES,
        };
        let until = self.now + patience;
        self.waiting.push(Waiting { id, what, until });
    }

    pub(crate) fn settle_patience(&self) -> Duration {
        let tenths = u64::from(self.options.auto_promote_timeout_tenths);
        Duration::from_tenths(tenths + self.longest_ping_tenths())
    }

    /// All tries together last a ping-timeout, or a second where that is longer: the other Primary may have
    /// died, or is leaving.
    fn pause_beside_primary(&self) -> Duration {
        let tenths = self.longest_ping_tenths().min(MOST_PAUSE_TENTHS);
        Duration::from_millis(tenths * 100 / u64::from(PROMOTE_TRIES - 1))
    }

    fn longest_ping_tenths(&self) -> u64 {
        let tenths = |c: &Connection| u64::from(c.net.ping_timeout_tenths);
        self.connections.values().map(tenths).max().unwrap_or(0)
    }

    /// Primary-lost events have settled (semantics.md, 7.1).
    pub(crate) fn settled(&self) -> bool {
        let pings = self
            .connections
            .values()
            .any(|c| c.link.as_ref().is_some_and(|l| l.ping_outstanding));
        let unclear = self.state.devices.iter().any(|(volume, d)| {
            d.disk == DiskState::Consistent
                || d.peers.iter().any(|(_, p)| {
                    p.disk == DiskState::Consistent && p.repl > ReplState::Off && !p.repl.is_sync()
                })
                || self.reconcile_hold(*volume)
        });
        planted!(self, PromotesUnsettled)
            || !pings && !unclear && !self.timers.is_set(Timer::EmptyTwopc) && !self.in_handshake()
    }

    /// A volume whose disk here may be current or not, which is being found out, though there is one that is. As a Primary
    /// this node would write to its own disk under a generation that only others have.
    pub(crate) fn not_compared_yet(&self) -> Option<VolumeNr> {
        let unclear = |d: &DeviceState| {
            let mut peers = d.peers.values();
            d.disk == DiskState::Consistent
                && peers.any(|p| p.repl >= ReplState::Established && p.disk == DiskState::UpToDate)
        };
        let mut volumes = self.state.devices.iter();
        let found = volumes.find(|(_, d)| unclear(d)).map(|(volume, _)| *volume);
        found.filter(|_| !planted!(self, PromotesUnsettled))
    }

    /// This node wants it, now or later.
    pub(crate) fn has_wish(&self, kind: &WishKind) -> bool {
        self.wants(|wish| wish == kind)
    }

    /// This node asks its peers whether it may become Secondary, or is about to: what began now would outlive that.
    pub(crate) fn is_demoting(&self) -> bool {
        let only_asks = planted!(self, DemotionPausesOpen) && self.twopc.current.is_none();
        !only_asks && self.wants(|wish| matches!(wish, WishKind::Demote { .. }))
    }

    pub(crate) fn wants(&self, is_it: impl Fn(&WishKind) -> bool) -> bool {
        let current = self.twopc.current.as_ref().and_then(|t| t.wish.as_ref());
        let later = self.twopc.retry.iter().chain(&self.twopc.queue);
        let mut wishes = current.into_iter().chain(later.map(|(wish, _)| wish));
        wishes.any(|wish| is_it(&wish.kind))
    }

    pub(crate) fn ping_everybody(&mut self) {
        for peer in self.established_peers().iter() {
            self.ping(peer);
        }
    }

    /// What the next try of a promotion does differently (semantics.md, 7.1).
    pub(crate) fn next_promotion(
        &mut self,
        force: bool,
        force_up_to_date: bool,
        outdate_absent: bool,
        tries: u32,
        refusal: &Refusal,
    ) -> Option<Wait> {
        let tries = tries.checked_sub(1).filter(|t| *t > 0)?;
        let same = Wait::Promote {
            force,
            force_up_to_date,
            outdate_absent,
            tries,
        };
        match refusal.code {
            ErrorCode::TIMEOUT | ErrorCode::CONCURRENT_ST_CHG | ErrorCode::IN_TRANSIENT_STATE => {
                Some(same)
            }
            ErrorCode::TWO_PRIMARIES => Some(Wait::Pause {
                at: self.now + self.pause_beside_primary(),
                then: Box::new(same),
            }),
            ErrorCode::NO_UP_TO_DATE_DISK if force && !force_up_to_date => Some(Wait::Promote {
                force,
                force_up_to_date: true,
                outdate_absent,
                tries,
            }),
            ErrorCode::NO_UP_TO_DATE_DISK
                if !force
                    && !force_up_to_date
                    && self.only_fencing_is_missing()
                    && self.fence_for_promotion() =>
            {
                Some(Wait::Fencing {
                    force,
                    force_up_to_date,
                    outdate_absent,
                    tries,
                    refusal: refusal.clone(),
                })
            }
            ErrorCode::NO_UP_TO_DATE_DISK if !force && !self.settled() => Some(same),
            ErrorCode::CW_FAILED_BY_PEER if force_up_to_date && !force => Some(Wait::Promote {
                force,
                force_up_to_date: false,
                outdate_absent,
                tries,
            }),
            ErrorCode::PRIMARY_NOP if !outdate_absent && self.fence_for_promotion() => {
                Some(Wait::Fencing {
                    force,
                    force_up_to_date,
                    outdate_absent,
                    tries,
                    refusal: refusal.clone(),
                })
            }
            ErrorCode::PRIMARY_NOP | ErrorCode::NO_QUORUM if force && !outdate_absent => {
                Some(Wait::Promote {
                    force,
                    force_up_to_date,
                    outdate_absent: true,
                    tries,
                })
            }
            _ => None,
        }
    }
}

/// The refusal of a promotion that has waited long enough.
pub(crate) fn not_compared(volume: VolumeNr) -> Refusal {
    let text = format!(
        "volume {volume}: this node's disk is still being compared with the one that is UpToDate; try again"
    );
    Refusal {
        code: ErrorCode::IN_TRANSIENT_STATE,
        text,
    }
}
