//! The after-sb policies: who gives up its changes in a split brain (semantics.md, 13.6).

use lockstep_format::units::Uuid;

use super::{Direction, Handshake, Verdict, resolver_is};
use crate::options::AfterSplitBrain;
use crate::uuids::is_real;

pub(super) fn by_policies(h: &Handshake<'_>, verdict: &mut Verdict) -> Option<Direction> {
    match (h.own.is_primary(), h.peer.is_primary()) {
        (false, false) => policy_without_primary(h),
        (true, true) => match h.net.after_sb_2pri {
            AfterSplitBrain::ViolentlyAs0p => policy_without_primary(h),
            AfterSplitBrain::CallPriLostAfterSb => {
                let direction = policy_without_primary(h)?;
                verdict.demote_first = direction == Direction::Target;
                Some(direction)
            }
            _ => None,
        },
        (own, _) => policy_with_one_primary(h, own, verdict),
    }
}

fn policy_with_one_primary(
    h: &Handshake<'_>,
    own_is_primary: bool,
    verdict: &mut Verdict,
) -> Option<Direction> {
    let secondary_loses = if own_is_primary {
        Direction::Source
    } else {
        Direction::Target
    };
    match h.net.after_sb_1pri {
        AfterSplitBrain::Consensus => {
            policy_without_primary(h).filter(|direction| *direction == secondary_loses)
        }
        AfterSplitBrain::ViolentlyAs0p => policy_without_primary(h),
        AfterSplitBrain::DiscardSecondary => Some(secondary_loses),
        AfterSplitBrain::CallPriLostAfterSb => {
            let direction = policy_without_primary(h)?;
            verdict.demote_first = own_is_primary && direction == Direction::Target;
            Some(direction)
        }
        _ => None,
    }
}

fn policy_without_primary(h: &Handshake<'_>) -> Option<Direction> {
    let was_primary = |slot: Uuid| is_real(slot) && slot.0 & Uuid::PRIMARY_BIT != 0;
    let wrote = (was_primary(h.own_slot()), was_primary(h.peer_slot()));
    let (own_bits, peer_bits) = (h.own.uuids.dirty_bits, h.peer.uuids.dirty_bits);
    let equal = resolver_is(h, Direction::Target);
    let least_changes = match own_bits.cmp(&peer_bits) {
        core::cmp::Ordering::Less => Direction::Target,
        core::cmp::Ordering::Greater => Direction::Source,
        core::cmp::Ordering::Equal => equal,
    };
    match h.net.after_sb_0pri {
        AfterSplitBrain::DiscardYoungerPrimary => Some(match wrote {
            (false, true) => Direction::Target,
            (true, false) => Direction::Source,
            (true, true) | (false, false) => least_changes,
        }),
        AfterSplitBrain::DiscardOlderPrimary => Some(match wrote {
            (false, true) => Direction::Source,
            (true, false) => Direction::Target,
            (true, true) | (false, false) => least_changes,
        }),
        AfterSplitBrain::DiscardZeroChanges => match (own_bits, peer_bits) {
            (0, 0) => Some(equal),
            (_, 0) => Some(Direction::Source),
            (0, _) => Some(Direction::Target),
            (_, _) => None,
        },
        AfterSplitBrain::DiscardLeastChanges => Some(least_changes),
        AfterSplitBrain::DiscardLocal => Some(Direction::Target),
        AfterSplitBrain::DiscardRemote => Some(Direction::Source),
        _ => None,
    }
}
