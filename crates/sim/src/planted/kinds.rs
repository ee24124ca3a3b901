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
    ("--nodes 4", &[Planted::PeerOutdatedUnnoted]),
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
            Planted::ConfirmsBeforeDurable,
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
            Planted::ReplacedNotMarked,
            Planted::ReplicaStaysCurrent,
            Planted::ResumeForgotten,
            Planted::ResyncRefusalIgnored,
            Planted::SeveralSources,
            Planted::SpreadsEarly,
            Planted::StartNotHeld,
            Planted::SuperblockCoversLater,
            Planted::SurvivorsNotCompared,
            Planted::TargetStartsEarly,
            Planted::ThirdMarksNotAwaited,
            Planted::TwopcBothGiveWay,
            Planted::UuidBeforeDurable,
            Planted::WeakVotesIgnored,
            Planted::WordsForgotten,
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
            Planted::UnstableCounts,
        ],
    ),
    ("--with openers", &[Planted::CloseNeverDemotes]),
    (
        "--faults order,order,invalidate-remote,partition,crash,handover --with every,openers",
        &[Planted::OrderNeverEnds],
    ),
    (
        "--with old",
        &[
            Planted::DurablePiecesNotFlushed,
            Planted::HandshakeNeverTimesOut,
            Planted::LegacyFollowsIgnored,
            Planted::LegacyLossUnlabelled,
            Planted::MaxBuffersIgnored,
            Planted::RateUnlimited,
        ],
    ),
    (
        "--nodes 2 --faults grow-one,grow-one,crash,partition",
        &[
            Planted::AbsentSizeIgnored,
            Planted::DiskSizeIgnored,
            Planted::LimitNotVoted,
        ],
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
            Planted::NewMarksNotAwaited,
            Planted::NoQuorumNoError,
            Planted::ReadsAnyUpToDate,
            Planted::RedundancyIgnored,
            Planted::SuspensionHoldsRanges,
        ],
    ),
    (
        "--with two-primaries",
        &[
            Planted::ConflictRuleReversed,
            Planted::ConflictsIgnoreAcks,
            Planted::ConflictsNotSeen,
            Planted::FenceFreezesNothing,
            Planted::SupersededInPart,
        ],
    ),
    ("--with blocks", &[Planted::ToldAloneMarked]),
    (
        "--nodes 2 --faults balance,stall,slowdisk --with every,hot",
        &[Planted::ReadOvertakesWrites],
    ),
    ("--with pmem", &[Planted::SlotNotFenced]),
    (
        "--faults freeze,stall,slowdisk,invalidate,reset,balance --with congestion,every,hot",
        &[
            Planted::AheadEndForgotten,
            Planted::OutOfSyncNotTold,
            Planted::PeerAcksMerged,
            Planted::ReadFromAnyPeer,
            Planted::StoodStillGivesUp,
            Planted::TargetNotBehind,
        ],
    ),
    (
        "--nodes 2 --faults badblock,badblock,crash,reset --with every",
        &[
            Planted::DagtagJumpUntold,
            Planted::FailedReadCounts,
            Planted::PassOnKeepsDisk,
            Planted::ReadErrorMarkedLazily,
            Planted::ReadErrorUnmarked,
        ],
    ),
    (
        "--nodes 2 --faults crash,partition,reset --with every,hot",
        &[
            Planted::DiscardEpochNotFlushed,
            Planted::KoCountIsOne,
            Planted::LostQuorumReversed,
        ],
    ),
    (
        "--nodes 2 --faults flusherror,flusherror,powercut,reset,handover --with every",
        &[Planted::FlushErrorIgnored, Planted::ResyncNegAckClears],
    ),
    (
        "--nodes 2 --faults grow-one,grow-one,crash,partition --with internal",
        &[
            Planted::EarlyRequestsLost,
            Planted::MoveErasesFirst,
            Planted::MoveUnstamped,
        ],
    ),
    (
        "--nodes 2 --faults handover,handover,slowdisk,stall --with every,hot,async",
        &[
            Planted::CrashedFlagStays,
            Planted::DagtagSkipsDiscards,
            Planted::ExtentNeverLetGo,
        ],
    ),
    (
        "--nodes 2 --faults hangdisk,freeze,freeze,reset --with every",
        &[
            Planted::DiskTimeoutHasty,
            Planted::DiskTimeoutIgnored,
            Planted::EvictBeforeFlush,
            Planted::LossForgetsUnacked,
        ],
    ),
    (
        "--nodes 2 --faults hangdisk,hangdisk,reset --with every,impatient",
        &[Planted::AgeTimerStops],
    ),
    (
        "--nodes 2 --faults hangdisk,reset,partition,crash,powercut,handover,invalidate --with blocks",
        &[
            Planted::CoarseBitsRounded,
            Planted::LastWordNotWritten,
            Planted::OwnBlocksOnly,
            Planted::PartialWritesUnmarked,
            Planted::PeerBlockIgnored,
        ],
    ),
    (
        "--nodes 2 --faults invalidate,invalidate,pause,reset,crash --with turns,every",
        &[Planted::ResyncAfterIgnored],
    ),
    (
        "--nodes 2 --faults metaerror,metaerror,powercut,crash,reset,handover --with every",
        &[
            Planted::LogErrorIgnored,
            Planted::MetaErrorPassedOn,
            Planted::SuperblockErrorIgnored,
        ],
    ),
    (
        "--nodes 2 --faults other-secret,other-secret,reset,partition,crash --with every,secret",
        &[
            Planted::AnySecretDoes,
            Planted::PageWriteMissesBits,
            Planted::RecoveryStampsEarly,
            Planted::ResyncForgetsBehindCursor,
        ],
    ),
    (
        "--nodes 2 --faults protocol,protocol,stall,crash,reset,handover --with every,hot",
        &[
            Planted::CrashedPrimaryForgotten,
            Planted::CrashedRowMissing,
            Planted::DiscardNotReplicated,
            Planted::FollowerNotesNobody,
            Planted::RecoveryWithoutFlush,
            Planted::ResyncReadIgnoresWrites,
            Planted::ZeroesShort,
        ],
    ),
    (
        "--nodes 2 --faults readerror,writeerror,flusherror,metaerror,crash,reset",
        &[
            Planted::FlushRequestAnsweredEarly,
            Planted::LostReadForgotten,
            Planted::NegAckIgnored,
        ],
    ),
    (
        "--nodes 2 --faults resize,cut-resize,crash,partition,powercut --with internal",
        &[
            Planted::MoveWithoutDrain,
            Planted::NewAreaUnmarked,
            Planted::SizeBeforeBits,
        ],
    ),
    (
        "--nodes 2 --faults resyncerror,resyncerror,crash,reset",
        &[Planted::ResyncWriteErrorIgnored],
    ),
    (
        "--nodes 2 --faults suspend,detach --with every,short-log",
        &[
            Planted::ConfirmWithoutFlush,
            Planted::DisklessKeepsGeneration,
            Planted::FlushEndsFrozen,
            Planted::FrozenWritesGoOn,
            Planted::LateReplyLeaked,
            Planted::OldLogCounts,
            Planted::PeerAckNamesFailed,
            Planted::ReadFromInconsistent,
        ],
    ),
    (
        "--nodes 2 --faults verifyspot,verifyspot,verifyspot,handover,disconnect --with every,hot",
        &[
            Planted::VerifyForgetsDifference,
            Planted::VerifyMarksBeside,
            Planted::VerifyStopsEarly,
        ],
    ),
    (
        "--nodes 2 --faults writeerror,writeerror,writeerror,suspend,reset,crash",
        &[Planted::CompletesBeforeNewUuid, Planted::LocalErrorIgnored],
    ),
    (
        "--nodes 2 --with handlers",
        &[
            Planted::DownStaysCurrent,
            Planted::FullSyncFlagStays,
            Planted::OutlivedFenceCounts,
            Planted::PutOffCountsAsCopied,
            Planted::ReconciledNotTold,
        ],
    ),
    (
        "--nodes 2 --with quiet",
        &[
            Planted::LoserNotDemoted,
            Planted::PromotionKeepsGeneration,
            Planted::ResyncEndNotDurable,
            Planted::SplitBrainReversed,
            Planted::VerifyStopIgnored,
        ],
    ),
    ("--nodes 3", &[Planted::FlushAskedOnce]),
    (
        "--nodes 3 --faults cut-command,cut-command,cut-command,reset,partition,powercut --with every,csums",
        &[Planted::CsumsAlwaysEqual],
    ),
    (
        "--nodes 3 --faults diskless,quorum,crash,partition,reset",
        &[
            Planted::ClientSendsToOne,
            Planted::CrashedDiskUnmet,
            Planted::HalfIsQuorum,
            Planted::NoDataForEver,
            Planted::ParkedNotResent,
            Planted::PromotesWithoutQuorum,
            Planted::QuorumLossStays,
            Planted::QuorumStaysFrozen,
            Planted::ReadFromOutdated,
            Planted::RedundancyCountsPresent,
            Planted::RetryCountsAsYes,
            Planted::TieBreakerGivesQuorum,
        ],
    ),
    (
        "--nodes 3 --faults handover,handover,handover,stall,reset,partition,crash,powercut --with migrations,every,hot",
        &[
            Planted::LonelyQuorumRestored,
            Planted::LostPeerAwaited,
            Planted::PeerPauseIgnored,
            Planted::QuorumNeverLost,
            Planted::TurnGivenEarly,
            Planted::TurnKept,
        ],
    ),
    (
        "--nodes 3 --faults promote,promote,disconnect,handover,detach,invalidate,suspend --with every",
        &[Planted::TwopcNoIgnored],
    ),
    (
        "--nodes 3 --faults quorum,disconnect,disconnect,down,outdate,crash --with every",
        &[Planted::LastManFalls],
    ),
    (
        "--nodes 3 --faults resize,cut-resize,crash,partition,powercut",
        &[Planted::PingsMoveTimeOut],
    ),
    (
        "--nodes 3 --faults stall,stall,stall,disconnect,handover,detach --with every,numb",
        &[
            Planted::DetachForgetsUnsettled,
            Planted::TwopcNeverTimesOut,
            Planted::UnackedNotApplied,
        ],
    ),
    (
        "--nodes 3 --faults verifyspot,verifyspot,verifyspot,stall,stall,slowdisk,handover --with every,hot",
        &[
            Planted::VerifyBufferLeaked,
            Planted::VerifyIgnoresDagtag,
            Planted::VerifyIgnoresWrites,
        ],
    ),
    (
        "--nodes 4 --faults takeover,crash,partition,reset",
        &[Planted::FailuresNeverEnd, Planted::FrozenAnsweredWell],
    ),
    (
        "--nodes 4 --with quiet",
        &[Planted::ReconciledStaysOutdated],
    ),
    ("--with congestion,thin", &[Planted::ZeroedShort]),
    ("--with kept-discards", &[Planted::ZeroesAsDiscard]),
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
