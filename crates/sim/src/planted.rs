//! The simulator's own test: deliberate bugs in the core, each of which random worlds must find.
//!
//! A bug counts as found by a world that fails with it and passes without it: so what was found is
//! the bug, and nothing else that is wrong.

mod kinds;

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use lockstep_core::planted::Planted;

use crate::cuts::{Cut, Story, all_cuts};
use crate::drive::{self, Trace};
use crate::plan::Orders;
use crate::stories::STORIES;
use crate::swarm::{Limits, run};
use crate::variety;

thread_local! {
    /// The bug of the worlds that this thread runs.
    static PRESENT: Cell<Option<Planted>> = const { Cell::new(None) };
}

/// The bug that nodes of this thread's worlds start with.
pub fn present() -> Option<Planted> {
    PRESENT.get()
}

/// Runs worlds whose nodes have the bug.
pub fn with<T>(bug: Option<Planted>, body: impl FnOnce() -> T) -> T {
    let before = PRESENT.replace(bug);
    let result = body();
    PRESENT.set(before);
    result
}

/// What a bug can look like from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shows {
    /// Wrong data, or a difference that nobody marks. A cluster that stands still or disconnects
    /// does not count: a bug that only makes a world go another way may meet that by chance.
    Data,
    /// As `Data`, or nodes that take each other's generation for foreign.
    Generation,
    /// Anything.
    Anything,
}

fn shows(bug: Planted) -> Shows {
    use Planted as P;
    match bug {
        P::AckBeforeDiskWrite
        | P::DataBeforeActivityLog
        | P::ResyncReadIgnoresWrites
        | P::EvictBeforeFlush
        | P::EvictBeforeBitmap
        | P::LossForgetsUnacked
        | P::RleOffByOne
        | P::InFlightNotInBitmap
        | P::BitsNotSetWhileAway
        | P::BarrierAckAcrossEpochs
        | P::BarrierAckWithoutFlush
        | P::ReadFromInconsistent
        | P::ReadOvertakesWrites
        | P::ResyncAckBeforeFlush
        | P::ResyncReplyOverWrite
        | P::ResyncForgetsBehindCursor
        | P::LogNotReplayed
        | P::DetachForgetsUnsettled
        | P::FlushWaitsForNoPeer
        | P::ForeignNotFlushed
        | P::AcksCoverCopies
        | P::ForeignFlushedOnce
        | P::FlushSkipsLocalDisk
        | P::FuaIgnored
        | P::PeerAckClearsAll
        | P::DrainForgetsThirdNodes
        | P::LogSkipsLastExtent
        | P::BitmapEndNotMerged
        | P::BarrierFlushesOneVolume
        | P::ZeroesShort
        | P::NegAckIgnored
        | P::CsumsAlwaysEqual
        | P::ReadFromAnyPeer
        | P::RecoveryStampsEarly
        | P::PageWriteMissesBits
        | P::PeerFuaIgnored
        | P::LastCopyInCache
        | P::DemotionWithoutFlush
        | P::MarkedAtEndForgotten
        | P::ResyncRequestIgnoresDagtag
        | P::WritesAskedForWithoutFlush
        | P::SlotNotFenced
        | P::ConflictsNotSeen
        | P::ConflictRuleReversed
        | P::ConflictsIgnoreAcks
        | P::AckClearsLaterMark
        | P::BarrierAckBeforeWrites
        | P::CopyOnFailedDiskCounts
        | P::LocalFailureNotMarked
        | P::ParkedNotResent
        | P::ParkedCountAsSent
        | P::HeldWritesForgotten
        | P::AncestorsTrusted
        | P::UnsentNotMarked
        | P::FlushJoinsRunningOne
        | P::MarkedAgainForgotten
        | P::ResyncWriteErrorIgnored
        | P::ResyncNegAckClears
        | P::VerifyForgetsDifference
        | P::CrashedPrimaryForgotten
        | P::QuorumNeverLost
        | P::ExtentLetGoEarly
        | P::LocalErrorIgnored
        | P::InSyncWhileBusy
        | P::PeerDiscardShort
        | P::ReplacedNotMarked
        | P::LogMarksFirstPeer
        | P::FlushErrorIgnored
        | P::LogErrorIgnored
        | P::ZeroUnchecked
        | P::NewAreaUnmarked
        | P::SizeBeforeBits
        | P::FailedReadCounts
        | P::HalfIsQuorum
        | P::VerifyStopsEarly
        | P::PutOffCountsAsCopied
        | P::FailedBlocksForgotten
        | P::VerifyMarksBeside
        | P::OvertakenReadClears
        | P::AckBeforeMetadata
        | P::VouchesForAnybody
        | P::EqualWhileWritten
        | P::DiscardSkipsLog
        | P::InconsistentNotNoted
        | P::OutdatedNotNoted
        | P::DiscardsNotMarked
        | P::WrittenCountsAsInSync
        | P::DetachWritesNoBitmap
        | P::ReadFromOutdated
        | P::ZeroesAsDiscard
        | P::ClearsPartialBits
        | P::MarksMissLastBlock
        | P::DiscardNotReplicated
        | P::PeerAckNamesEverybody
        | P::TargetMarksNotMerged
        | P::FlushWaitsForOnePeer
        | P::DurablePiecesNotFlushed
        | P::OlderClearsFailed
        | P::DagtagOfLifeBefore
        | P::ReturnedForgotten
        | P::LateWriteMisread
        | P::OnlyPrimariesGoOn
        | P::NotHereInSync
        | P::ThirdMarksNotAwaited
        | P::AwayNotMarkedBefore
        | P::StartNotHeld
        | P::EndNotFlushed
        | P::EndsUnconfirmed
        | P::PartCopied
        | P::AskerTrusted
        | P::OutdatedForEver
        | P::SizeNotAwaited
        | P::CrashedCopyUntold
        | P::OtherSourceClears
        | P::NewPrimaryUnasked
        | P::BehindCountsStable
        | P::UnackedCountDurable
        | P::SlotCountsDurable
        | P::ResyncReversed
        | P::DemotedAwaited
        | P::LeftTargetForgotten
        | P::OwnOverwriteNotFlushed
        | P::ZeroedShort
        | P::RemainingCopyNotFlushed
        | P::AheadMarksUntold
        | P::UnwrittenUnsettled
        | P::LostSourceCounts
        | P::GoneOnServes
        | P::UnwrittenForEver
        | P::ExchangeMarksUntold
        | P::NewMarksNotAwaited
        | P::ResentOutOfOrder
        | P::ComingPrimaryNotAsked
        | P::OldLogCounts => Shows::Data,
        P::UuidBeforeDurable
        | P::CompletesBeforeNewUuid
        | P::NoNewUuidOnLoss
        | P::DisklessKeepsGeneration
        | P::PlannedUuidNotNoted
        | P::FrozenWritesGoOn
        | P::AncestorsForgotten
        | P::OutdatedCountsForQuorum
        | P::OneVolumeGetsUuid
        | P::PromotionKeepsGeneration
        | P::DisklessVotes
        | P::ResyncEndNotDurable
        | P::VoteForgotten
        | P::VotersUnasked
        | P::ClientsVotersUnasked
        | P::LeftBehindCounts
        | P::VoteFollowsSource
        | P::ConfirmsBeforeDurable
        | P::HistoryNotInherited => Shows::Generation,
        P::UnheardPrimaryCounts
        | P::UnseenNotFlushed
        | P::SlotGoesWithDisk
        | P::GoingDiskNamed
        | P::WrongRowBitmapSelf
        | P::MarkedBlocksRowMissing
        | P::TwopcRetryAppliedTwice
        | P::LostRangeWakeUp
        | P::LostLogWakeUp
        | P::PingTimerNotRearmed
        | P::ResyncTimerNotRearmed
        | P::LostBuffer
        | P::OutOfSyncNotMarked
        | P::SilentPeerKept
        | P::PeerDiskLossForgetsSent
        | P::AheadForgetsMarks
        | P::PostponedLost
        | P::LostReadForgotten
        | P::EpochNeverCloses
        | P::OutdateIgnored
        | P::DrainWaitsForNothing
        | P::FlushRequestAnsweredEarly
        | P::TwopcBothGiveWay
        | P::DagtagSkipsDiscards
        | P::DiskTimeoutIgnored
        | P::ExtentNeverLetGo
        | P::KoCountIgnored
        | P::PromotionUnchecked
        | P::ResyncRefusalIgnored
        | P::TwopcNeverTimesOut
        | P::TwopcNoIgnored
        | P::LostThereKept
        | P::MajorityNotEnough
        | P::OutOfSyncNotTold
        | P::WrongSlot
        | P::CloseNeverDemotes
        | P::OrderNeverEnds
        | P::EarlyRequestsLost
        | P::LimitNotVoted
        | P::ShrinkKeepsMarks
        | P::VerifyStopIgnored
        | P::VerifyIgnoresWrites
        | P::ResumeForgotten
        | P::RateUnlimited
        | P::LostRequestsKept
        | P::ProvisionalKept
        | P::LostQuorumReversed
        | P::CrashedRowReversed
        | P::ReconcileReversed
        | P::RetryCountsAsYes
        | P::LostVoteCountsAsYes
        | P::CommitNotForwarded
        | P::AbortNotForwarded
        | P::FarPrimaryOverlooked
        | P::RedundancyIgnored
        | P::LastManFalls
        | P::LostQuorumForgotten
        | P::DagtagJumpUntold
        | P::AbsentSizeIgnored
        | P::NewAreaTwoSources
        | P::AheadEndForgotten
        | P::ResentWithoutBarrier
        | P::ReadErrorUnmarked
        | P::SourceErrorUnmarked
        | P::DiskTimeoutHasty
        | P::StoodStillGivesUp
        | P::FlushEndsFrozen
        | P::ThawForgotten
        | P::SuspensionHoldsRanges
        | P::FenceFreezesNothing
        | P::OutlivedFenceCounts
        | P::LegacyAcksNotAwaited
        | P::OwnBlocksOnly
        | P::HandshakeNeverTimesOut
        | P::KoCountIsOne
        | P::NoRoomForPeers
        | P::LatePeerKept
        | P::LeftMarksStay
        | P::VerifyGoesOnBehind
        | P::VerifyNotTold
        | P::TargetStartsEarly
        | P::UnstableCounts
        | P::LostCacheTrusted
        | P::StepsBack
        | P::FullSyncNotNoted
        | P::HashedNotFlushed
        | P::EqualThoughChanged
        | P::RotationMissesOutdated
        | P::CopiedWithoutBits
        | P::BehindForgotten
        | P::FullSyncUsesBitmap
        | P::LostPrimaryUnnamed
        | P::WeakVotesIgnored
        | P::TieBreakerGivesQuorum
        | P::LonelyQuorumRestored
        | P::RestoredQuorumStays
        | P::FallenSourceCounts
        | P::RecoveryWithoutFlush
        | P::FullSyncFlagIgnored
        | P::DisabledLogTrusted
        | P::DetachIgnoresRequests
        | P::OnlyCopyNotAwaited
        | P::LocalReadTooEarly
        | P::PeerAcksMerged
        | P::PeerAckNamesFailed
        | P::MoveErasesFirst
        | P::MoveUnstamped
        | P::MoveWithoutDrain
        | P::AheadKeepsGeneration
        | P::WasAheadForgotten
        | P::ConfirmWithoutFlush
        | P::FailedFlushAcked
        | P::LostEpochsForgotten
        | P::PassOnKeepsDisk
        | P::FailureUnnoted
        | P::OnlyCopiesNotAwaited
        | P::ThawWithoutUuid
        | P::ProtocolBAsA
        | P::WasAsyncForgotten
        | P::SyncUuidEarly
        | P::LegacyLossUnlabelled
        | P::LegacyFollowsIgnored
        | P::ToldAloneMarked
        | P::CoarseBitsRounded
        | P::SupersededInPart
        | P::VerdictNotAwaited
        | P::NewcomersForgotten
        | P::ForgottenKeepsBits
        | P::StaleReplyCounts
        | P::PromotesInHandshake
        | P::PromotesWithoutQuorum
        | P::NegotiatesWithSome
        | P::ReplicaStaysCurrent
        | P::SeveralSources
        | P::MarksForEver
        | P::NoDataForEver
        | P::FrozenAnsweredWell
        | P::LogNumberStuck
        | P::PeerBlockIgnored
        | P::RetiredForgotten
        | P::HeldOvertaken
        | P::EpochUnlimited
        | P::OvertakenWritesCount
        | P::MarksNotForwarded
        | P::LateRefusalIgnored
        | P::RedoneUnmarked
        | P::AnySecretDoes
        | P::HandlerFailureIgnored
        | P::BrokenFenceCounts
        | P::HandshakeGoesStale
        | P::WrittenInHandshake
        | P::OwedForEver
        | P::DemotionLeavesBehind
        | P::LostDagtagAwaited
        | P::FullSyncFlagStays
        | P::AbortKeepsHandshake
        | P::MembersForgotten
        | P::GoneSourceKept
        | P::DiskSizeIgnored
        | P::PeerOutdatedUnnoted
        | P::CrashedFlagStays
        | P::OneSlotInvalidated
        | P::LogContextStuck
        | P::FirstExtentPut
        | P::SlotMergedInPart
        | P::FillNotWritten
        | P::LastWordNotWritten
        | P::InSyncSurvivesLoss
        | P::EarlierClearsLater
        | P::OlderClearsSource
        | P::GivenUpUnnamed
        | P::CrossedEndStays
        | P::LateFailureUnmarked
        | P::ResentKeepsAge
        | P::AgeTimerStops
        | P::GivesWayStaysCurrent
        | P::AddedNotTriedAgain
        | P::LostPathsKept
        | P::LoadStopsResync
        | P::OwedOfOthersKept
        | P::ExchangeAcksKept
        | P::AgainForgotten
        | P::DayZeroSlotEmpty
        | P::LostFlushAwaited
        | P::QuestionsSurviveLoss
        | P::TargetsToBeFollow
        | P::UnmadeKept
        | P::OnlyDiskOutdated
        | P::FirstOfTwoUntold
        | P::FullSyncReplaced
        | P::RoomIsDenied
        | P::NewAreaWithoutSide
        | P::UntoldCompared
        | P::CommandExposesEarly
        | P::BusyCompared
        | P::EpochsOutOfOrder
        | P::DiscardEpochNotFlushed
        | P::FuaNotSent
        | P::ProtocolCAsB
        | P::FirstAckCompletes
        | P::WriteOvertakesResyncRead
        | P::PeerWritesUnordered
        | P::ReplayMissesExtent
        | P::ReplayLeavesLastBlock
        | P::CleanFlagStays
        | P::PeerExtentLetGoEarly
        | P::PartialWritesUnmarked
        | P::PlainRunsShort
        | P::BitmapReplacesMarks
        | P::ResyncAfterIgnored
        | P::PeerPauseIgnored
        | P::VerifyIgnoresDagtag
        | P::ClientSendsToOne
        | P::RedundancyCountsPresent
        | P::QuorumStaysFrozen
        | P::NoQuorumNoError
        | P::LostPeerAwaited
        | P::CrashedRowMissing
        | P::HistoryReversed
        | P::SplitBrainReversed
        | P::FollowerNotesNobody
        | P::ReconnectFlagAlways
        | P::PageErrorIgnored
        | P::SuperblockErrorIgnored
        | P::SuperblockCoversLater
        | P::OutdatedTrusted
        | P::BehindStaysCurrent
        | P::CongestionNeverFalls
        | P::SurvivorsNotCompared
        | P::LateReplyLeaked
        | P::VerifyBufferLeaked
        | P::GatedAcksLost
        | P::AttachedInHandshakeOverlooked
        | P::ExtentsOutOfOrder
        | P::VouchesForTheLost
        | P::VouchesUnasked
        | P::FarNodesNotTold
        | P::CopyHidesLaterMark
        | P::WordHidesLaterMark
        | P::FlushAskedOnce
        | P::OldFlushAnswerCounts
        | P::FirstFlushAnswerEnds
        | P::LatePrimaryNotAsked
        | P::WritesNotAskedFor
        | P::LookedAgainOnce
        | P::UnequalNotWatched
        | P::HalfCopyInTheWay
        | P::FollowerGivesUp
        | P::FarPrimaryKept
        | P::ShrinksInUse
        | P::AbsentRoomStale
        | P::WishNotPassedOn
        | P::RoomUntold
        | P::FollowersNeverLate
        | P::FailuresNeverEnd
        | P::WaysToPeersOnly
        | P::PromotesUnsettled
        | P::LearnsWhileBusy
        | P::LearnsFromTargets
        | P::NotesNotAdopted
        | P::SpreadsEarly
        | P::LaterChangesUnwritten
        | P::TargetNotBehind
        | P::AheadEndsEarly
        | P::MaxBuffersIgnored
        | P::SuperblockInOneGo
        | P::LateWordsCount
        | P::LateMarksForgotten
        | P::DoubtsForgotten
        | P::FailedNotRecopied
        | P::UnackedNotApplied
        | P::ReadsStayAtPeers
        | P::ReadsAnyUpToDate
        | P::TriedPeersAgain
        | P::FlushFailureHidden
        | P::OptionsNotMirrored
        | P::VoteUnnoted
        | P::OthersStayBehind
        | P::RenamedInHandshake
        | P::ConsistentWaits
        | P::OvertakenReadUntold
        | P::MarkedNodeSettles
        | P::OlderCopyInTheWay
        | P::ClientNotMetAnew
        | P::QuorumLossUnnoted
        | P::ReconciledNotTold
        | P::OldWordsKept
        | P::LoserNotDemoted
        | P::SizeDuringExchange
        | P::AttachKeepsDagtag
        | P::OutdatedStaysAtConnect
        | P::ConsistentTrustsAny
        | P::NotNotedWhileSuspended
        | P::WholeCopyUnnamed
        | P::SettledWhileFollowing
        | P::ReadErrorMarkedLate
        | P::UnreplicatedFollows
        | P::LeftBehindFollows
        | P::CopiedWriteForgotten
        | P::FrozenDetachHasty
        | P::ClientNotAsked
        | P::OldCopyServed
        | P::ReconciledStaysOutdated
        | P::OutdatedDoesNotLead
        | P::FollowsLeftBehind
        | P::KeptWordsOfLess
        | P::WordsForgotten
        | P::FirstCopyCounts
        | P::LateLossForgotten
        | P::ServingWaits
        | P::GenerationsNotReconciled
        | P::FlushOvertakesLoss
        | P::LeftInTwoSteps
        | P::LonelyOutdatedStays
        | P::AncestorsReadAfterDemotion
        | P::ReadErrorMarkedLazily
        | P::AnnouncedGoesWithDisk
        | P::RefusedByOldNews
        | P::ConsistentNotCompared
        | P::TurnsLost
        | P::ForwardsUnasked
        | P::WritesDuringDemotion
        | P::HeldForgottenByDemotion
        | P::OldWordsCount
        | P::UnackedNotCounted
        | P::DemotionPausesOpen
        | P::TurnKept
        | P::LeftAsPrimary
        | P::TurnGivenEarly
        | P::TurnIgnored
        | P::LostHolderReplaced
        | P::EpochGoesOn
        | P::ReturnedDiskUnlabelled
        | P::LateSourceForgotten
        | P::UnstableUntold
        | P::UuidsBeforeWorseState
        | P::SourceNotSought
        | P::LostMemberNotAsked
        | P::QuorumLossStays
        | P::PingsMoveTimeOut
        | P::InvalidatedAloneUnmarked
        | P::DownStaysCurrent
        | P::MetaErrorPassedOn
        | P::EarlyEndIgnored
        | P::OldTargetNotCompared
        | P::OutrunNotCompared
        | P::ClientsHoldSize
        | P::OldEndCounts
        | P::RefusedIsTaken
        | P::ForgottenNotLeft
        | P::WaitingSourceCompared
        | P::DifferencesForgotten
        | P::LateBarrierForgotten
        | P::OldAnswerOutdates
        | P::AttachToldTwice
        | P::CrashedDiskUnmet
        | P::OlderPrimaryElected
        | P::DemotionGivesUpTold
        | P::FarVoteCounts
        | P::FollowersComparedEarly
        | P::RedoneUntold
        | P::TwinsDisagree
        | P::PeerAckNeverSent => Shows::Anything,
    }
}

impl Shows {
    fn accepts(self, violation: &str) -> bool {
        let stands_still = violation.contains(" within ") && violation.contains(" s: ");
        let foreign = violation.contains("split-brain") || violation.contains("unrelated");
        match self {
            Shows::Data => !stands_still && !foreign,
            Shows::Generation => !stands_still,
            Shows::Anything => true,
        }
    }
}

/// What became of the search for a bug.
#[derive(Clone, Debug)]
pub struct Search {
    /// The bug.
    pub bug: Planted,
    /// The world that shows it, and what it says; none if the time was over.
    pub found: Option<(u64, String)>,
    /// Worlds that were run with the bug.
    pub worlds: u64,
    /// Of them, those that fail without it as well and so prove nothing.
    pub failing_anyway: u64,
    /// Time of one core that it took.
    pub time: Duration,
}

/// Where and how long to search.
#[derive(Clone, Debug)]
pub struct Patience {
    /// What is fixed of the worlds; if nothing is, they are of all kinds.
    pub orders: Orders,
    /// First seed.
    pub from: u64,
    /// At most so many worlds.
    pub worlds: u64,
    /// At most so much time of one core.
    pub time: Duration,
    /// The planned worlds of `soak` alone, without those of the first design and cuts.
    pub as_soak: bool,
}

/// Time that this thread has run, or since `start` where the system does not say.
fn core_time(start: Instant) -> Duration {
    std::fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .map_or_else(|| start.elapsed(), Duration::from_nanos)
}

/// Runs a world of either kind: the planned ones, as `soak` runs them, and those of the first design
/// have the seeds in turn. Gives what went wrong.
pub fn world(seed: u64, trace: Trace) -> Option<String> {
    if seed.is_multiple_of(2) {
        let limits = Limits {
            trace: trace == Trace::Print,
            ..Limits::default()
        };
        run(seed / 2, &limits).violation
    } else {
        drive::run(seed / 2, &variety::orders(seed / 2), trace).violation
    }
}

/// As `world`, or a world of the kind in which the bug can show. Orders that fix something come first.
pub fn world_for(bug: Planted, seed: u64, orders: &Orders, trace: Trace) -> Option<String> {
    if !variety::is_open(orders) {
        return drive::run(seed, orders, trace).violation;
    }
    match kinds::of(bug) {
        Some(orders) => drive::run(seed, &orders, trace).violation,
        None => world(seed, trace),
    }
}

/// Runs one world after the other until one fails because of the bug.
pub fn search(bug: Planted, patience: &Patience) -> Search {
    let clock = Instant::now();
    let started = core_time(clock);
    let mut search = Search {
        bug,
        found: None,
        worlds: 0,
        failing_anyway: 0,
        time: Duration::ZERO,
    };
    let is_open = variety::is_open(&patience.orders);
    // Each cut of each story is played once among the worlds.
    let cuts = (is_open && !patience.as_soak).then(|| all_cuts(STORIES));
    let mut cuts = cuts.and_then(Result::ok).unwrap_or_default().into_iter();
    for seed in patience.from..patience.from.saturating_add(patience.worlds) {
        search.worlds += 1;
        let play = || match patience.as_soak && is_open {
            true => drive::run(seed, &variety::orders(seed), Trace::Off).violation,
            false => world_for(bug, seed, &patience.orders, Trace::Off),
        };
        let violation = with(Some(bug), play);
        if let Some(text) = violation.filter(|text| shows(bug).accepts(text)) {
            if play().is_none() {
                search.found = Some((seed, text));
                break;
            }
            search.failing_anyway += 1;
        }
        if let Some(text) = cuts
            .by_ref()
            .take(CUTS_PER_WORLD)
            .find_map(|c| cut_shows(bug, c))
        {
            search.found = Some((seed, text));
            break;
        }
        if core_time(clock).saturating_sub(started) > patience.time {
            break;
        }
    }
    search.time = core_time(clock).saturating_sub(started);
    search
}

/// Cuts that are played between two worlds.
const CUTS_PER_WORLD: usize = 12;

/// A story that is cut there ends well without the bug only: what it says with it.
fn cut_shows(bug: Planted, (story, cut): (&Story, Cut)) -> Option<String> {
    let text = with(Some(bug), || story.survives(cut)).err()?;
    // A bug makes stories shorter and longer as well.
    let is_bad = !text.contains("ended before the packet") && shows(bug).accepts(&text);
    let is_bug = is_bad && story.survives(cut).is_ok();
    is_bug.then(|| format!("story {} cut at {cut}: {text}", story.name))
}

impl Search {
    /// The result as a line of text.
    pub fn line(&self) -> String {
        let name = self.bug.name();
        let seconds = self.time.as_secs_f64();
        let worlds = self.worlds;
        match &self.found {
            Some((seed, text)) => format!(
                "{name:<30} found in world {worlds:>5}, {seconds:>5.1} s, seed {seed}: {}",
                shortened(text)
            ),
            None => format!(
                "{name:<30} NOT FOUND in {worlds} worlds, {seconds:.1} s ({} failed anyway): {}",
                self.failing_anyway,
                self.bug.text()
            ),
        }
    }

    /// The result as one JSON object.
    pub fn json(&self) -> String {
        let (seed, violation) = match &self.found {
            Some((seed, text)) => (seed.to_string(), quoted(text)),
            None => ("null".into(), "null".into()),
        };
        format!(
            "{{\"name\":{},\"text\":{},\"found\":{},\"worlds\":{},\"failing_anyway\":{},\
             \"seconds\":{:.3},\"seed\":{seed},\"violation\":{violation}}}",
            quoted(self.bug.name()),
            quoted(self.bug.text()),
            self.found.is_some(),
            self.worlds,
            self.failing_anyway,
            self.time.as_secs_f64(),
        )
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(140) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.into(),
    }
}

fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out += &format!("\\u{:04x}", u32::from(c)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Bugs that take hundreds of worlds on average: too long for a check of every commit.
const RARE: &[Planted] = &[
    Planted::ResyncRequestIgnoresDagtag,
    Planted::LostCacheTrusted,
    Planted::ToldAloneMarked,
    Planted::DemotionGivesUpTold,
    Planted::FarVoteCounts,
    Planted::FollowersComparedEarly,
    Planted::FarNodesNotTold,
    Planted::VouchesForTheLost,
    Planted::VouchesUnasked,
    Planted::CopyHidesLaterMark,
    Planted::WordHidesLaterMark,
    Planted::ExtentsOutOfOrder,
    Planted::AttachedInHandshakeOverlooked,
    Planted::BitmapEndNotMerged,
    Planted::MarkedAtEndForgotten,
    Planted::AckClearsLaterMark,
    Planted::CopyOnFailedDiskCounts,
    Planted::LocalFailureNotMarked,
    Planted::ParkedCountAsSent,
    Planted::HeldWritesForgotten,
    Planted::AncestorsTrusted,
    Planted::UnsentNotMarked,
    Planted::PeerDiskLossForgetsSent,
    Planted::MarkedAgainForgotten,
    Planted::ExtentLetGoEarly,
    Planted::AheadForgetsMarks,
    Planted::InSyncWhileBusy,
    Planted::FailedBlocksForgotten,
    Planted::OutdatedCountsForQuorum,
    Planted::KoCountIgnored,
    Planted::OvertakenReadClears,
    Planted::VouchesForAnybody,
    Planted::EqualWhileWritten,
    Planted::WrittenCountsAsInSync,
    Planted::MajorityNotEnough,
    Planted::ClearsPartialBits,
    Planted::OneVolumeGetsUuid,
    Planted::TargetMarksNotMerged,
    Planted::DisklessVotes,
    Planted::FullSyncNotNoted,
    Planted::HashedNotFlushed,
    Planted::EqualThoughChanged,
    Planted::CopiedWithoutBits,
    Planted::BehindForgotten,
    Planted::ProvisionalKept,
    Planted::FullSyncUsesBitmap,
    Planted::ReconcileReversed,
    Planted::LostVoteCountsAsYes,
    Planted::FarPrimaryOverlooked,
    Planted::RestoredQuorumStays,
    Planted::FallenSourceCounts,
    Planted::LostQuorumForgotten,
    Planted::FullSyncFlagIgnored,
    Planted::DisabledLogTrusted,
    Planted::DetachIgnoresRequests,
    Planted::LocalReadTooEarly,
    Planted::NewAreaTwoSources,
    Planted::AheadKeepsGeneration,
    Planted::WasAheadForgotten,
    Planted::FailedFlushAcked,
    Planted::ResentWithoutBarrier,
    Planted::LostEpochsForgotten,
    Planted::SourceErrorUnmarked,
    Planted::OnlyCopiesNotAwaited,
    Planted::OlderClearsFailed,
    Planted::NotHereInSync,
    Planted::DagtagOfLifeBefore,
    Planted::FollowerGivesUp,
    Planted::ReturnedForgotten,
    Planted::LateWriteMisread,
    Planted::HalfCopyInTheWay,
    Planted::OnlyPrimariesGoOn,
    Planted::ThawForgotten,
    Planted::ThawWithoutUuid,
    Planted::WasAsyncForgotten,
    Planted::SyncUuidEarly,
    Planted::LegacyAcksNotAwaited,
    Planted::VerdictNotAwaited,
    Planted::NoRoomForPeers,
    Planted::NewcomersForgotten,
    Planted::LatePeerKept,
    Planted::ForgottenKeepsBits,
    Planted::StaleReplyCounts,
    Planted::PromotesInHandshake,
    Planted::NegotiatesWithSome,
    Planted::MarksForEver,
    Planted::LogNumberStuck,
    Planted::RetiredForgotten,
    Planted::HeldOvertaken,
    Planted::OvertakenWritesCount,
    Planted::MarksNotForwarded,
    Planted::LateRefusalIgnored,
    Planted::RedoneUnmarked,
    Planted::HandlerFailureIgnored,
    Planted::BrokenFenceCounts,
    Planted::HandshakeGoesStale,
    Planted::WrittenInHandshake,
    Planted::OwedForEver,
    Planted::DemotionLeavesBehind,
    Planted::LostDagtagAwaited,
    Planted::AbortKeepsHandshake,
    Planted::MembersForgotten,
    Planted::OneSlotInvalidated,
    Planted::SlotMergedInPart,
    Planted::InSyncSurvivesLoss,
    Planted::EarlierClearsLater,
    Planted::OlderClearsSource,
    Planted::GivenUpUnnamed,
    Planted::CrossedEndStays,
    Planted::LateFailureUnmarked,
    Planted::ResentKeepsAge,
    Planted::GivesWayStaysCurrent,
    Planted::AddedNotTriedAgain,
    Planted::LostPathsKept,
    Planted::OwedOfOthersKept,
    Planted::ExchangeAcksKept,
    Planted::AgainForgotten,
    Planted::DayZeroSlotEmpty,
    Planted::LostFlushAwaited,
    Planted::QuestionsSurviveLoss,
    Planted::TargetsToBeFollow,
    Planted::UnmadeKept,
    Planted::OnlyDiskOutdated,
    Planted::FirstOfTwoUntold,
    Planted::FullSyncReplaced,
    Planted::RoomIsDenied,
    Planted::NewAreaWithoutSide,
    Planted::UntoldCompared,
    Planted::CommandExposesEarly,
    Planted::BusyCompared,
    Planted::ReconnectFlagAlways,
    Planted::AwayNotMarkedBefore,
    Planted::EndNotFlushed,
    Planted::EndsUnconfirmed,
    Planted::PartCopied,
    Planted::AskerTrusted,
    Planted::OutdatedForEver,
    Planted::SizeNotAwaited,
    Planted::CrashedCopyUntold,
    Planted::OtherSourceClears,
    Planted::LateBarrierForgotten,
    Planted::OldAnswerOutdates,
    Planted::AttachToldTwice,
    Planted::NewPrimaryUnasked,
    Planted::BehindCountsStable,
    Planted::UnackedCountDurable,
    Planted::SlotCountsDurable,
    Planted::ResyncReversed,
    Planted::DemotedAwaited,
    Planted::LeftTargetForgotten,
    Planted::OwnOverwriteNotFlushed,
    Planted::TurnIgnored,
    Planted::LostHolderReplaced,
    Planted::OldFlushAnswerCounts,
    Planted::FirstFlushAnswerEnds,
    Planted::LatePrimaryNotAsked,
    Planted::LookedAgainOnce,
    Planted::UnequalNotWatched,
    Planted::ShrinksInUse,
    Planted::AbsentRoomStale,
    Planted::WishNotPassedOn,
    Planted::RoomUntold,
    Planted::FollowersNeverLate,
    Planted::WaysToPeersOnly,
    Planted::PromotesUnsettled,
    Planted::LearnsWhileBusy,
    Planted::LearnsFromTargets,
    Planted::NotesNotAdopted,
    Planted::RemainingCopyNotFlushed,
    Planted::AheadMarksUntold,
    Planted::ExchangeMarksUntold,
    Planted::VoteForgotten,
    Planted::VotersUnasked,
    Planted::ClientsVotersUnasked,
    Planted::PageErrorIgnored,
    Planted::ComingPrimaryNotAsked,
    Planted::TwinsDisagree,
    Planted::ResentOutOfOrder,
    Planted::RedoneUntold,
    Planted::LeftBehindCounts,
    Planted::VoteFollowsSource,
    Planted::OthersStayBehind,
    Planted::RenamedInHandshake,
    Planted::ConsistentWaits,
    Planted::OvertakenReadUntold,
    Planted::MarkedNodeSettles,
    Planted::FailureUnnoted,
    Planted::RotationMissesOutdated,
    Planted::UnseenNotFlushed,
    Planted::SlotGoesWithDisk,
    Planted::GoingDiskNamed,
    Planted::UnheardPrimaryCounts,
    Planted::OlderCopyInTheWay,
    Planted::ClientNotMetAnew,
    Planted::UnwrittenUnsettled,
    Planted::LostSourceCounts,
    Planted::LeftAsPrimary,
    Planted::GoneOnServes,
    Planted::AheadEndsEarly,
    Planted::SuperblockInOneGo,
    Planted::LateWordsCount,
    Planted::LateMarksForgotten,
    Planted::DoubtsForgotten,
    Planted::FailedNotRecopied,
    Planted::ReadsStayAtPeers,
    Planted::TriedPeersAgain,
    Planted::FlushFailureHidden,
    Planted::OptionsNotMirrored,
    Planted::VoteUnnoted,
    Planted::OlderPrimaryElected,
    Planted::QuorumLossUnnoted,
    Planted::OldWordsKept,
    Planted::SizeDuringExchange,
    Planted::AttachKeepsDagtag,
    Planted::OutdatedStaysAtConnect,
    Planted::ConsistentTrustsAny,
    Planted::NotNotedWhileSuspended,
    Planted::WholeCopyUnnamed,
    Planted::SettledWhileFollowing,
    Planted::ReadErrorMarkedLate,
    Planted::UnreplicatedFollows,
    Planted::LeftBehindFollows,
    Planted::CopiedWriteForgotten,
    Planted::FrozenDetachHasty,
    Planted::ClientNotAsked,
    Planted::OldCopyServed,
    Planted::OutdatedDoesNotLead,
    Planted::FollowsLeftBehind,
    Planted::KeptWordsOfLess,
    Planted::FirstCopyCounts,
    Planted::LateLossForgotten,
    Planted::ServingWaits,
    Planted::GenerationsNotReconciled,
    Planted::FlushOvertakesLoss,
    Planted::LeftInTwoSteps,
    Planted::LonelyOutdatedStays,
    Planted::AncestorsReadAfterDemotion,
    Planted::AnnouncedGoesWithDisk,
    Planted::RefusedByOldNews,
    Planted::ConsistentNotCompared,
    Planted::TurnsLost,
    Planted::ForwardsUnasked,
    Planted::HeldForgottenByDemotion,
    Planted::OldWordsCount,
    Planted::UnackedNotCounted,
    Planted::DemotionPausesOpen,
    Planted::EpochGoesOn,
    Planted::ReturnedDiskUnlabelled,
    Planted::LateSourceForgotten,
    Planted::UnstableUntold,
    Planted::UuidsBeforeWorseState,
    Planted::SourceNotSought,
    Planted::LostMemberNotAsked,
    Planted::EarlyEndIgnored,
    Planted::OldTargetNotCompared,
    Planted::OutrunNotCompared,
    Planted::ClientsHoldSize,
    Planted::OldEndCounts,
    Planted::RefusedIsTaken,
    Planted::ForgottenNotLeft,
    Planted::WaitingSourceCompared,
    Planted::DifferencesForgotten,
    Planted::WritesDuringDemotion,
    Planted::OnlyCopyNotAwaited,
    Planted::ForeignFlushedOnce,
    Planted::AcksCoverCopies,
];

/// Searches several bugs, one on each of `threads` threads at a time; tells `report` of each.
pub fn search_all(
    bugs: &[Planted],
    patience: &Patience,
    threads: usize,
    report: impl Fn(&Search) + Sync,
) -> usize {
    let next = AtomicUsize::new(0);
    let found = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                while let Some(bug) = bugs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let search = search(*bug, patience);
                    found.fetch_add(usize::from(search.found.is_some()), Ordering::Relaxed);
                    report(&search);
                }
            });
        }
    });
    found.into_inner()
}

/// The bugs that a command names: one, a third that begins with a number's, or all; of a third
/// only those that show soon.
pub fn choose(name: Option<&str>, third: Option<u64>) -> anyhow::Result<Vec<Planted>> {
    let all = Planted::ALL.iter().copied();
    if let Some(name) = name {
        return match all.clone().find(|b| b.name() == name) {
            Some(bug) => Ok(vec![bug]),
            None => bail!(
                "no deliberate bug is called {name}; there are {}",
                all.map(Planted::name).collect::<Vec<_>>().join(", ")
            ),
        };
    }
    Ok(match third {
        Some(number) => all
            .filter(|bug| !RARE.contains(bug))
            .skip((number % 3) as usize)
            .step_by(3)
            .collect(),
        None => all.collect(),
    })
}

#[cfg(test)]
mod tests;
