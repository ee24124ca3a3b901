//! Worlds in which a deliberate bug can show, where the default ones show it seldom or never: most
//! bugs need a kind of fault or an option that few worlds have.

use lockstep_core::planted::Planted;

use crate::plan::Orders;
use crate::{extras, faults};

/// What is fixed of the worlds in which this bug is searched.
pub(super) fn of(bug: Planted) -> Option<Orders> {
    let (text, _) = KINDS.iter().find(|(_, bugs)| bugs.contains(&bug))?;
    parse(text)
}

/// Options of the command line.
fn parse(text: &str) -> Option<Orders> {
    let mut orders = Orders::default();
    let mut words = text.split_whitespace();
    while let Some(option) = words.next() {
        let value = words.next()?;
        match option {
            "--nodes" => orders.nodes = Some(value.parse().ok()?),
            "--faults" => orders.kinds = Some(faults::parse(value).ok()?),
            "--with" => orders.extras = extras::parse(value).ok()?,
            _ => return None,
        }
    }
    Some(orders)
}

/// Options, and the bugs that are searched in the worlds that they name.
const KINDS: &[(&str, &[Planted])] = &[
    ("--nodes 2", &[Planted::LoadStopsResync]),
    (
        "--nodes 5 --with quiet",
        &[
            Planted::AbortNotForwarded,
            Planted::AckBeforeDiskWrite,
            Planted::AckBeforeMetadata,
            Planted::BarrierAckAcrossEpochs,
            Planted::BarrierAckWithoutFlush,
            Planted::BarrierFlushesOneVolume,
            Planted::CommitNotForwarded,
            Planted::CongestionNeverFalls,
            Planted::CrashedRowReversed,
            Planted::DetachWritesNoBitmap,
            Planted::DrainForgetsThirdNodes,
            Planted::EpochNeverCloses,
            Planted::EpochUnlimited,
            Planted::FillNotWritten,
            Planted::FirstCopyCounts,
            Planted::FlushWaitsForNoPeer,
            Planted::FlushWaitsForOnePeer,
            Planted::FollowsLeftBehind,
            Planted::GatedAcksLost,
            Planted::GenerationsNotReconciled,
            Planted::GoneSourceKept,
            Planted::HistoryReversed,
            Planted::KeptWordsOfLess,
            Planted::LateLossForgotten,
            Planted::LogSkipsLastExtent,
            Planted::LostPrimaryUnnamed,
            Planted::LostRequestsKept,
            Planted::LostThereKept,
            Planted::MarksMissLastBlock,
            Planted::OutdateIgnored,
            Planted::OutdatedDoesNotLead,
            Planted::OutdatedNotNoted,
            Planted::PeerAckNamesEverybody,
            Planted::PeerFuaIgnored,
            Planted::PlannedUuidNotNoted,
            Planted::ProtocolBAsA,
            Planted::ReconciledStaysOutdated,
            Planted::ReplacedNotMarked,
            Planted::ReplicaStaysCurrent,
            Planted::ResumeForgotten,
            Planted::ResyncRefusalIgnored,
            Planted::SeveralSources,
            Planted::StartNotHeld,
            Planted::SuperblockCoversLater,
            Planted::SurvivorsNotCompared,
            Planted::TargetStartsEarly,
            Planted::ThirdMarksNotAwaited,
            Planted::TwopcBothGiveWay,
            Planted::UuidBeforeDurable,
            Planted::WeakVotesIgnored,
            Planted::WordsForgotten,
            Planted::WritesDuringDemotion,
        ],
    ),
    (
        "--nodes 2 --with long-log --faults crash,powercut,reset,partition,handover",
        &[Planted::LogContextStuck],
    ),
    (
        "--nodes 3 --faults takeover,crash,partition,reset",
        &[
            Planted::LeftMarksStay,
            Planted::StepsBack,
            Planted::ThawWithoutUuid,
            Planted::VoteForgotten,
        ],
    ),
    ("--with openers", &[Planted::CloseNeverDemotes]),
    (
        "--faults order,order,invalidate-remote,partition,crash,handover --with every,openers",
        &[Planted::OrderNeverEnds],
    ),
    ("--with old", &[Planted::DurablePiecesNotFlushed]),
    (
        "--nodes 2 --faults grow-one,grow-one,crash,partition",
        &[Planted::LimitNotVoted],
    ),
    (
        "--nodes 2 --faults resize,cut-resize,crash,partition,powercut",
        &[Planted::ShrinkKeepsMarks],
    ),
    (
        "--nodes 2 --faults verifypart,stall,reset",
        &[Planted::VerifyGoesOnBehind, Planted::VerifyNotTold],
    ),
    (
        "--nodes 3 --faults quorum,quorum,crash,partition,reset --with every",
        &[
            Planted::LatePeerKept,
            Planted::NoQuorumNoError,
            Planted::RedundancyIgnored,
            Planted::SuspensionHoldsRanges,
        ],
    ),
    (
        "--nodes 2 --faults detach,stall,slowdisk,reset --with every",
        &[Planted::OnlyCopyNotAwaited],
    ),
    (
        "--with two-primaries",
        &[
            Planted::ConflictRuleReversed,
            Planted::ConflictsIgnoreAcks,
            Planted::ConflictsNotSeen,
        ],
    ),
    ("--with blocks", &[Planted::ToldAloneMarked]),
    (
        "--nodes 2 --faults balance,stall,slowdisk --with every,hot",
        &[Planted::ReadOvertakesWrites],
    ),
    ("--with pmem", &[Planted::SlotNotFenced]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variety;

    #[test]
    fn kinds_are_options_and_no_bug_has_two() {
        let mut seen = Vec::new();
        for (text, bugs) in KINDS {
            let orders = parse(text).unwrap_or_else(|| panic!("{text}"));
            assert!(!variety::is_open(&orders), "{text}");
            for bug in *bugs {
                assert!(!seen.contains(bug), "{}", bug.name());
                seen.push(*bug);
            }
        }
        assert!(parse("--nodes").is_none());
        assert!(parse("--faults none-such").is_none());
    }
}
