//! Deliberate bugs, for the test that the simulator finds each of them.
//!
//! They exist only with the cargo feature `planted`, which no shipping crate enables; without it
//! every hook is the constant `false`. Which bug a resource has is said at run time, with
//! `Resource::plant`, so one build holds all of them and no state is shared.

/// The deliberate bugs are compiled in. Whatever ships asserts that this is false.
pub const COMPILED_IN: bool = cfg!(feature = "planted");

/// Whether a resource has this deliberate bug: a constant `false` without feature `planted`.
#[cfg(feature = "planted")]
macro_rules! planted {
    ($resource:expr, $bug:ident) => {
        $resource.planted == Some($crate::planted::Planted::$bug)
    };
}

/// Whether a resource has this deliberate bug: a constant `false` without feature `planted`.
#[cfg(not(feature = "planted"))]
macro_rules! planted {
    ($resource:expr, $bug:ident) => {
        false
    };
}

macro_rules! registry {
    ($($variant:ident $name:literal $text:literal;)*) => {
        /// A deliberate bug.
        #[cfg(feature = "planted")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Planted {
            $(#[doc = $text] $variant,)*
        }

        #[cfg(feature = "planted")]
        impl Planted {
            /// All of them.
            pub const ALL: &[Planted] = &[$(Planted::$variant,)*];

            /// Its name on the command line.
            pub fn name(self) -> &'static str {
                match self {
                    $(Planted::$variant => $name,)*
                }
            }

            /// What is wrong with it, in words.
            pub fn text(self) -> &'static str {
                match self {
                    $(Planted::$variant => $text,)*
                }
            }
        }
    };
}

registry! {
    AckBeforeDiskWrite "ack-before-disk-write"
        "A received write is acknowledged before it is on disk.";
    DataBeforeActivityLog "data-before-activity-log"
        "A write starts before the activity-log transaction of its extent is durable.";
    ResyncReadIgnoresWrites "resync-read-ignores-writes"
        "A resync read is not ordered with writes: its ack clears the bit of a newer write.";
    EvictBeforeFlush "evict-before-flush"
        "An extent leaves the activity log before its data are flushed.";
    EvictBeforeBitmap "evict-before-bitmap"
        "An extent leaves the activity log before its bitmap pages are durable.";
    LossForgetsUnacked "loss-forgets-unacked"
        "The loss of a peer takes unacknowledged writes for acknowledged ones.";
    UuidBeforeDurable "uuid-before-durable"
        "A new current UUID is used before it is durable.";
    CompletesBeforeNewUuid "completes-before-new-uuid"
        "A write that a lost peer missed completes before the new current UUID is made.";
    NoNewUuidOnLoss "no-new-uuid-on-loss"
        "A Primary that loses a peer does not note that a new current UUID is due.";
    DisklessKeepsGeneration "diskless-keeps-generation"
        "A Primary that lost its disk writes on under the old generation.";
    WritesAskedForWithoutFlush "writes-asked-for-without-flush"
        "A resync asks for writes again, and not for the marks that are under way.";
    PlannedUuidNotNoted "planned-uuid-not-noted"
        "A planned UUID is told to followers before it is noted as an ancestor.";
    WrongRowBitmapSelf "wrong-row-bitmap-self"
        "The row bitmap-self of the comparison table gives the wrong direction.";
    MarkedBlocksRowMissing "marked-blocks-row-missing"
        "Marks between nodes of one generation start no resync.";
    HistoryNotInherited "history-not-inherited"
        "A resync target does not inherit its source's history.";
    RleOffByOne "rle-off-by-one"
        "The last block of each run of a compressed bitmap is dropped.";
    InFlightNotInBitmap "in-flight-not-in-bitmap"
        "Writes that are on their way when a bitmap is sent are not marked in it.";
    BitsNotSetWhileAway "bits-not-set-while-away"
        "A write that a peer was never sent is not marked.";
    TwopcRetryAppliedTwice "twopc-retry-applied-twice"
        "A two-phase commit that is retried stays queued as well and runs twice.";
    BarrierAckAcrossEpochs "barrier-ack-across-epochs"
        "A barrier ack settles one write of the next epoch, too.";
    BarrierAckWithoutFlush "barrier-ack-without-flush"
        "A barrier is acked without a flush of the disks that its epoch wrote to.";
    ReadFromInconsistent "read-from-inconsistent"
        "Reads are served from an Inconsistent disk.";
    ReadOvertakesWrites "read-overtakes-writes"
        "A peer's read does not wait for what was received before it.";
    LostRangeWakeUp "lost-range-wake-up"
        "A write that waited for an overlapping one is not woken.";
    LostLogWakeUp "lost-log-wake-up"
        "Of the writes that one activity-log transaction serves only the first is woken.";
    PingTimerNotRearmed "ping-timer-not-rearmed"
        "The ping timer is not set again after an answer.";
    ResyncTimerNotRearmed "resync-timer-not-rearmed"
        "The timer of the resync's next pass is not set.";
    ResyncAckBeforeFlush "resync-ack-before-flush"
        "Resync data are acked before they are flushed.";
    ResyncReplyOverWrite "resync-reply-over-write"
        "A resync reply is written although a newer write of the block is under way.";
    ResyncForgetsBehindCursor "resync-forgets-behind-cursor"
        "A resync ends although blocks were marked behind its cursor.";
    LogNotReplayed "log-not-replayed"
        "An attach does not apply the activity log of a crashed node.";
    DetachForgetsUnsettled "detach-forgets-unsettled"
        "A detach calls the log clean without marking unsettled writes.";
    FlushWaitsForNoPeer "flush-waits-for-no-peer"
        "A flush completes before the peers have what was written before.";
    FlushSkipsLocalDisk "flush-skips-local-disk"
        "A flush does not reach the local disk.";
    FuaIgnored "fua-ignored"
        "A write with FUA stays in the disk's cache.";
    LostBuffer "lost-buffer"
        "The buffer of a received write is never released.";
    PeerAckNeverSent "peer-ack-never-sent"
        "Peer acks are gathered and not sent.";
    PeerAckClearsAll "peer-ack-clears-all"
        "A peer ack clears the bits of nodes that do not have the write.";
    DrainForgetsThirdNodes "drain-forgets-third-nodes"
        "The loss of a Primary does not mark its last writes towards the other survivors.";
    LogSkipsLastExtent "log-skips-last-extent"
        "Of a write across extents the log gets only the first.";
    BitmapEndNotMerged "bitmap-end-not-merged"
        "The last bits of a bitmap that is received are dropped.";
    BarrierFlushesOneVolume "barrier-flushes-one-volume"
        "A barrier flushes one of the volumes that its epoch wrote to.";
    ZeroesShort "zeroes-short"
        "A zero-out reaches only the first half of its range.";
    NegAckIgnored "neg-ack-ignored"
        "A failed write of a peer counts as done on both sides.";
    CsumsAlwaysEqual "csums-always-equal"
        "A resync by checksums takes every block for equal.";
    ReadFromAnyPeer "read-from-any-peer"
        "A read without a usable disk here goes to an Inconsistent peer.";
    RecoveryStampsEarly "recovery-stamps-early"
        "An attach calls the log clean before the bits that it stands for are durable.";
    PageWriteMissesBits "page-write-misses-bits"
        "Bits set during the write of their page count as written.";
    PeerFuaIgnored "peer-fua-ignored"
        "A received write with FUA stays in the disk's cache.";
    LastCopyInCache "last-copy-in-cache"
        "What a Primary without a disk writes is acknowledged from the only disk's cache.";
    DemotionWithoutFlush "demotion-without-flush"
        "A demoted node is called clean while its writes are in the disk's cache.";
    MarkedAtEndForgotten "marked-at-end-forgotten"
        "A resync ends although the source marked blocks while the end was written down.";
    SlotNotFenced "slot-not-fenced"
        "On persistent memory a write starts before the fence behind its extent's slot.";
    ResyncRequestIgnoresDagtag "resync-request-ignores-dagtag"
        "A resync source reads before it has what the target has seen of a third node.";
    ConflictsNotSeen "conflicts-not-seen"
        "A write of a peer that conflicts with an own one is written behind it.";
    ConflictRuleReversed "conflict-rule-reversed"
        "The wrong end of a connection decides which of two overlapping writes wins.";
    ConflictsIgnoreAcks "conflicts-ignore-acks"
        "A conflict is decided before the acks have come that were sent before the write.";
    OutOfSyncNotMarked "out-of-sync-not-marked"
        "A target does not mark what its source says it changed.";
    AckClearsLaterMark "ack-clears-later-mark"
        "A late peer ack clears marks of newer data.";
    BarrierAckBeforeWrites "barrier-ack-before-writes"
        "A barrier is acked while writes of its epoch are under way.";
    CopyOnFailedDiskCounts "copy-on-failed-disk-counts"
        "A write completes with its only copy on a disk that has failed meanwhile.";
    LocalFailureNotMarked "local-failure-not-marked"
        "A write that failed here and reached the peer is not marked.";
    HeldWritesForgotten "held-writes-forgotten"
        "A frozen Primary without a disk takes a peer for whole that has no part in its frozen writes.";
    ParkedCountAsSent "parked-count-as-sent"
        "A peer hears that it has all writes, while some that were parked are still to be sent again.";
    ParkedNotResent "parked-not-resent"
        "A write that waited for a lost peer is not sent again when the peer is back.";
    UnsentNotMarked "unsent-not-marked"
        "Writes under way that a connecting peer was never sent are not marked.";
    PeerDiskLossForgetsSent "peer-disk-loss-forgets-sent"
        "Writes on their way to a peer that loses its disk are not marked.";
    FlushJoinsRunningOne "flush-joins-running-one"
        "A flush that is asked for while another runs takes that one's end for its own.";
    MarkedAgainForgotten "marked-again-forgotten"
        "A resync request settles a mark that came after it was sent.";
    ResyncWriteErrorIgnored "resync-write-error-ignored"
        "A resync write that failed counts as done.";
    ResyncNegAckClears "resync-neg-ack-clears"
        "A source clears the mark of a resync write that failed at its target.";
    VerifyForgetsDifference "verify-forgets-difference"
        "The driver of a verify does not mark what differs.";
    AncestorsTrusted "ancestors-trusted"
        "A node without a disk takes a disk for whole of which another one shows that it is older.";
    CrashedPrimaryForgotten "crashed-primary-forgotten"
        "A node that crashed as Primary does not say so.";
    SilentPeerKept "silent-peer-kept"
        "A peer that answers no ping stays connected.";
    TwopcBothGiveWay "twopc-both-give-way"
        "Of two transactions that meet each gives way to the other.";
    QuorumNeverLost "quorum-never-lost"
        "A node that sees too few others keeps its quorum.";
    OldLogCounts "old-log-counts"
        "A write keeps its place in the activity log of a disk that was replaced.";
    ExtentLetGoEarly "extent-let-go-early"
        "A write's place in the activity log is given back before all peers have it on stable storage.";
    AheadForgetsMarks "ahead-forgets-marks"
        "What was written Ahead and is not settled is not marked when the resync begins.";
    LocalErrorIgnored "local-error-ignored"
        "A write that failed on the Primary's disk counts as done.";
    PostponedLost "postponed-lost"
        "The first of the writes that waited for the end of a suspension is forgotten.";
    DrainWaitsForNothing "drain-waits-for-nothing"
        "A lost connection is taken for drained while its writes are on their way to the disk.";
    InSyncWhileBusy "in-sync-while-busy"
        "What a third node calls equal is taken for equal while it is being written.";
    PeerDiscardShort "peer-discard-short"
        "A received discard reaches only the first half of its range.";
    FlushRequestAnsweredEarly "flush-request-answered-early"
        "A resync ends before the peer acks of earlier writes are out.";
    ReplacedNotMarked "replaced-not-marked"
        "A block that a resync replaces is not marked towards third nodes.";
    FrozenWritesGoOn "frozen-writes-go-on"
        "Writes are submitted and completed while requests are frozen.";
    LogMarksFirstPeer "log-marks-first-peer"
        "An attach after a crash marks the activity log's extents towards one peer only.";
    FlushErrorIgnored "flush-error-ignored"
        "A flush that failed counts as done.";
    LogErrorIgnored "log-error-ignored"
        "An activity-log write that failed counts as done.";
    ZeroUnchecked "zero-unchecked"
        "A thin resync takes every block for zeroes.";
    NewAreaUnmarked "new-area-unmarked"
        "The area that a resize adds is not marked, and so not copied.";
    SizeBeforeBits "size-before-bits"
        "A resize makes the new size durable before the marks of the new area.";
    FailedReadCounts "failed-read-counts"
        "A read that failed on the Primary's disk counts as done.";
    LostReadForgotten "lost-read-forgotten"
        "A read that waited for a lost peer is not sent another way.";
    HalfIsQuorum "half-is-quorum"
        "Half of the nodes are enough for quorum.";
    VerifyStopsEarly "verify-stops-early"
        "A verify leaves out the last block.";
    OutdateIgnored "outdate-ignored"
        "A node that hears of a Primary out of its reach does not outdate itself.";
    EpochNeverCloses "epoch-never-closes"
        "Writes that depend on completed ones stay in their epoch.";
    DagtagSkipsDiscards "dagtag-skips-discards"
        "A received discard does not advance the dagtag.";
    ResyncRefusalIgnored "resync-refusal-ignored"
        "A target ignores that its source could not read a block.";
    PutOffCountsAsCopied "put-off-counts-as-copied"
        "A target clears the mark of a block that its source puts off.";
    FailedBlocksForgotten "failed-blocks-forgotten"
        "A resync in which blocks failed ends as if it were complete.";
    OutdatedCountsForQuorum "outdated-counts-for-quorum"
        "An absent node that is Outdated has a vote.";
    AncestorsForgotten "ancestors-forgotten"
        "A new generation forgets the history.";
    VerifyMarksBeside "verify-marks-beside"
        "A verify marks the block behind the one that differs.";
    KoCountIgnored "ko-count-ignored"
        "A peer that answers pings and no writes stays connected.";
    TwopcNoIgnored "twopc-no-ignored"
        "A two-phase commit is committed although somebody refuses it.";
    OvertakenReadClears "overtaken-read-clears"
        "A source clears the mark of a block that its own resync has replaced since it was read.";
    AckBeforeMetadata "ack-before-metadata"
        "A received write is acked before the metadata that it needs are durable.";
    VouchesForAnybody "vouches-for-anybody"
        "A node calls nodes equal of which it does not know that.";
    EqualWhileWritten "equal-while-written"
        "A node calls others equal in an extent that is being written.";
    DiscardSkipsLog "discard-skips-log"
        "A discard starts without its extent in the activity log.";
    InconsistentNotNoted "inconsistent-not-noted"
        "The metadata of a resync target still call it consistent.";
    OutdatedNotNoted "outdated-not-noted"
        "The metadata of a node that became Outdated still call it current.";
    DiscardsNotMarked "discards-not-marked"
        "A discard that a peer was never sent is not marked.";
    WrittenCountsAsInSync "written-counts-as-in-sync"
        "A write ack clears marks that the peer keeps.";
    PromotionUnchecked "promotion-unchecked"
        "A node without current data may become Primary.";
    DetachWritesNoBitmap "detach-writes-no-bitmap"
        "A detach calls the log clean without writing the bitmap.";
    ReadFromOutdated "read-from-outdated"
        "A peer's read is served from an Outdated disk.";
    DiskTimeoutIgnored "disk-timeout-ignored"
        "A disk that does not answer is never given up.";
    WrongSlot "wrong-slot"
        "Marks towards one peer go to the first slot of the bitmap.";
    ZeroesAsDiscard "zeroes-as-discard"
        "A zero-out is done as a discard although that may leave old data.";
    TwopcNeverTimesOut "twopc-never-times-out"
        "A two-phase commit waits for ever for a node that does not answer.";
    ExtentNeverLetGo "extent-never-let-go"
        "A received discard keeps its place in the activity log.";
    MajorityNotEnough "majority-not-enough"
        "A node asks for one vote more than a majority.";
    ClearsPartialBits "clears-partial-bits"
        "A write clears the bits of bitmap blocks that it covers in part.";
    MarksMissLastBlock "marks-miss-last-block"
        "The last block of a write that a peer was never sent is not marked.";
    DiscardNotReplicated "discard-not-replicated"
        "A discard is done here only.";
    OneVolumeGetsUuid "one-volume-gets-uuid"
        "A Primary that loses a peer makes a new current UUID for its first volume only.";
    PeerAckNamesEverybody "peer-ack-names-everybody"
        "A peer ack says that all nodes have a write.";
    TargetMarksNotMerged "target-marks-not-merged"
        "A source ignores what its target has marked.";
    DisklessVotes "diskless-votes"
        "A node without a disk has a vote for quorum.";
    OutOfSyncNotTold "out-of-sync-not-told"
        "A source marks what it does not send, and does not say so.";
    PromotionKeepsGeneration "promotion-keeps-generation"
        "A promotion makes no new current UUID.";
    FlushWaitsForOnePeer "flush-waits-for-one-peer"
        "A flush waits for the first of several peers.";
    LostThereKept "lost-there-kept"
        "A question that was older than the connection makes its first write end it.";
    ResyncEndNotDurable "resync-end-not-durable"
        "The end of a resync is told before it is durable.";
    VoteForgotten "vote-forgotten"
        "A target of a resync forgets the Primary that it counted for.";
    CloseNeverDemotes "close-never-demotes"
        "The last close of a volume leaves its node Primary.";
    OrderNeverEnds "order-never-ends"
        "A resync that has waited for another volume of the node waits for ever.";
    DurablePiecesNotFlushed "durable-pieces-not-flushed"
        "A durable write for a peer of an old version is not followed by a flush.";
    EarlyRequestsLost "early-requests-lost"
        "Requests for a new area that come before this node knows of it are forgotten.";
    LimitNotVoted "limit-not-voted"
        "A vote for a resize does not say how much room the node's disk has.";
    ShrinkKeepsMarks "shrink-keeps-marks"
        "A volume that shrinks keeps the marks behind its end.";
    VerifyGoesOnBehind "verify-goes-on-behind"
        "A verify that was cut short goes on behind the blocks that were under way.";
    VerifyStopIgnored "verify-stop-ignored"
        "A verify goes on behind its stop sector.";
    VerifyIgnoresWrites "verify-ignores-writes"
        "A verify compares blocks that are written meanwhile.";
    VerifyNotTold "verify-not-told"
        "The node that answers a verify does not mark what its driver finds.";
    ResumeForgotten "resume-forgotten"
        "A resync that was paused does not go on.";
    RateUnlimited "rate-unlimited"
        "A resync asks for all that is left at once.";
    LostRequestsKept "lost-requests-kept"
        "Resync requests of a lost link stay in the tables.";
    TargetStartsEarly "target-starts-early"
        "A resync target writes before its metadata call it Inconsistent.";
    UnstableCounts "unstable-counts"
        "A resync from a source that is not stable ends as one from a stable one.";
    LostCacheTrusted "lost-cache-trusted"
        "A Primary whose own disk is gone takes back a peer that lost acknowledged writes with its power.";
    StepsBack "steps-back"
        "A Primary whose disk is not whole is copied from a node with older data than its applications saw.";
    FullSyncNotNoted "full-sync-not-noted"
        "The metadata do not call for the full sync whose bits are being written.";
    HashedNotFlushed "hashed-not-flushed"
        "The digest of a block leaves before what was read is durable.";
    EqualThoughChanged "equal-though-changed"
        "A block counts as equal by a digest from before it was written.";
    RotationMissesOutdated "rotation-misses-outdated"
        "A new generation forgets the peers that are connected and Outdated.";
    CopiedWithoutBits "copied-without-bits"
        "A node that learns the generation of another does not take over its marks.";
    BehindForgotten "behind-forgotten"
        "A resync target does not take over which nodes its source knows to be behind.";
    ProvisionalKept "provisional-kept"
        "A slot that names a generation until its node follows keeps it.";
    FullSyncUsesBitmap "full-sync-uses-bitmap"
        "Where only the history relates two nodes, marks alone are copied.";
    LostQuorumReversed "lost-quorum-reversed"
        "The row lost-quorum gives the wrong direction.";
    CrashedRowReversed "crashed-row-reversed"
        "The row crashed-primary gives the wrong direction.";
    ReconcileReversed "reconcile-reversed"
        "Of two survivors of a Primary the one with fewer of its writes is the source.";
    LostPrimaryUnnamed "lost-primary-unnamed"
        "A survivor does not say which Primary it has lost.";
    RetryCountsAsYes "retry-counts-as-yes"
        "A node that asks to try a cluster-wide change again counts as agreeing.";
    LostVoteCountsAsYes "lost-vote-counts-as-yes"
        "A node that is lost before it answers counts as agreeing to a cluster-wide change.";
    CommitNotForwarded "commit-not-forwarded"
        "A commit does not reach the nodes behind a neighbour.";
    AbortNotForwarded "abort-not-forwarded"
        "An abort does not reach the nodes behind a neighbour.";
    FarPrimaryOverlooked "far-primary-overlooked"
        "A node becomes Primary although another one further away is.";
    WeakVotesIgnored "weak-votes-ignored"
        "Who cannot be reached by a Primary is not told in a commit.";
    TieBreakerGivesQuorum "tie-breaker-gives-quorum"
        "A tie-breaker gives quorum to nodes that had none.";
    RedundancyIgnored "redundancy-ignored"
        "quorum-minimum-redundancy is not asked for.";
    LastManFalls "last-man-falls"
        "Absent nodes that are known to be Outdated keep their votes.";
    LonelyQuorumRestored "lonely-quorum-restored"
        "A node that had quorum with others has it alone after a restart.";
    FallenSourceCounts "fallen-source-counts"
        "A source that fell back makes another one stable as before.";
    RestoredQuorumStays "restored-quorum-stays"
        "A last man that started again keeps its quorum, whoever joins it and leaves.";
    LostQuorumForgotten "lost-quorum-forgotten"
        "A Primary that lost quorum and died does not say so.";
    RecoveryWithoutFlush "recovery-without-flush"
        "An attach calls the log clean while data are in the disk's cache.";
    FullSyncFlagIgnored "full-sync-flag-ignored"
        "An attach does not mark what a full sync that was cut short calls for.";
    DisabledLogTrusted "disabled-log-trusted"
        "An attach after a crash trusts an activity log that was switched off.";
    DetachIgnoresRequests "detach-ignores-requests"
        "A detach does not wait for requests that are under way.";
    OnlyCopyNotAwaited "only-copy-not-awaited"
        "A Primary without a disk goes by the protocol although the peer's copy is the only one.";
    LocalReadTooEarly "local-read-too-early"
        "A read on the own disk does not wait for writes that are on their way to it.";
    DagtagJumpUntold "dagtag-jump-untold"
        "A peer does not hear of writes that it was not sent.";
    PeerAcksMerged "peer-acks-merged"
        "One peer ack stands for writes that different nodes have.";
    PeerAckNamesFailed "peer-ack-names-failed"
        "A peer ack names the Primary although the write failed there.";
    AbsentSizeIgnored "absent-size-ignored"
        "A resize does not ask how large the disks of absent nodes are.";
    NewAreaTwoSources "new-area-two-sources"
        "A Secondary copies the new area to others beside the Primary.";
    MoveErasesFirst "move-erases-first"
        "Metadata that move are erased at the old place before the new superblock is durable.";
    MoveUnstamped "move-unstamped"
        "Metadata that overlap their new place move without the call for a full sync.";
    MoveWithoutDrain "move-without-drain"
        "Metadata move while log and bitmap are being written.";
    AheadKeepsGeneration "ahead-keeps-generation"
        "A Primary that pulls ahead makes no new generation.";
    WasAheadForgotten "was-ahead-forgotten"
        "The loss of a peer that was Behind does not tell that it misses writes.";
    AheadEndForgotten "ahead-end-forgotten"
        "The end of Ahead is not tried again after an earlier resync.";
    ConfirmWithoutFlush "confirm-without-flush"
        "An early confirmation does not wait for a flush.";
    FailedFlushAcked "failed-flush-acked"
        "A barrier is acked as if its flush had not failed.";
    ResentWithoutBarrier "resent-without-barrier"
        "No barrier follows writes that are sent again.";
    LostEpochsForgotten "lost-epochs-forgotten"
        "What a lost connection left in the disk's cache stays there.";
    PassOnKeepsDisk "pass-on-keeps-disk"
        "With pass_on a disk with an error stays UpToDate.";
    FailureUnnoted "failure-unnoted"
        "A write that failed here completes before the metadata say so.";
    ReadErrorUnmarked "read-error-unmarked"
        "A block that the Primary could not read is not marked.";
    SourceErrorUnmarked "source-error-unmarked"
        "A block that a resync source could not read is not marked.";
    OnlyCopiesNotAwaited "only-copies-not-awaited"
        "With protocol A a write that failed here completes before the peer has it.";
    DiskTimeoutHasty "disk-timeout-hasty"
        "A disk is given up without a second look after the process stood still.";
    OlderClearsFailed "older-clears-failed"
        "An older write of the same block clears the mark of one that has failed here.";
    DagtagOfLifeBefore "dagtag-of-life-before"
        "A resync request is answered before a Primary's write, by what it counted in the life before.";
    OnlyPrimariesGoOn "only-primaries-go-on"
        "A disk is UpToDate again beside a neighbour that has copied a newer generation.";
    HalfCopyInTheWay "half-copy-in-the-way"
        "The last copies stay Outdated while another disk is not whole.";
    LateWriteMisread "late-write-misread"
        "A write that was sent late is settled by the peer ack of newer ones.";
    ReturnedForgotten "returned-forgotten"
        "A survivor that has met the lost Primary again follows nobody's word of its loss.";
    NotHereInSync "not-here-in-sync"
        "A write from before this node's disk clears marks with it.";
    StoodStillGivesUp "stood-still-gives-up"
        "A peer is given up without a second look after the process stood still.";
    FlushEndsFrozen "flush-ends-frozen"
        "A flush completes while requests are frozen.";
    ThawForgotten "thaw-forgotten"
        "The end of a suspension does not look at writes that wait for lost peers.";
    ThawWithoutUuid "thaw-without-uuid"
        "The end of a suspension does not wait for the new generation that is due.";
    SuspensionHoldsRanges "suspension-holds-ranges"
        "Writes that wait for others keep their place during a suspension.";
    FenceFreezesNothing "fence-freezes-nothing"
        "resource-and-stonith does not freeze requests while the handler runs.";
    OutlivedFenceCounts "outlived-fence-counts"
        "The verdict of a fence-peer handler counts although the peer is back.";
    ProtocolBAsA "protocol-b-as-a"
        "With protocol B a write is acknowledged when it is sent.";
    WasAsyncForgotten "was-async-forgotten"
        "A change from protocol A forgets that earlier writes were only sent.";
    SyncUuidEarly "sync-uuid-early"
        "An 8.4 target hears of a resync whose UUID is not durable at its source.";
    LegacyAcksNotAwaited "legacy-acks-not-awaited"
        "The end of a resync overtakes its last acks to an 8.4 source.";
    LegacyLossUnlabelled "legacy-loss-unlabelled"
        "What an 8.4 Primary writes without its disk gets no generation of its own.";
    LegacyFollowsIgnored "legacy-follows-ignored"
        "A Primary makes a new generation that its 8.4 peer does not follow.";
    ToldAloneMarked "told-alone-marked"
        "A target with smaller bitmap blocks marks what it is told, and copies more than that.";
    CoarseBitsRounded "coarse-bits-rounded"
        "Marks for a part of a larger bitmap block are dropped.";
    OwnBlocksOnly "own-blocks-only"
        "Requests of a resync go by the own size of bitmap blocks only.";
    HandshakeNeverTimesOut "handshake-never-times-out"
        "A handshake waits for ever for its next packet.";
    KoCountIsOne "ko-count-is-one"
        "A peer is given up after one timeout, whatever ko-count says.";
    SupersededInPart "superseded-in-part"
        "A write that an own one covers in part is not made again.";
    VerdictNotAwaited "verdict-not-awaited"
        "A write of the peer that decides does not wait for the answer to an own one.";
    NoRoomForPeers "no-room-for-peers"
        "Own writes of two Primaries may fill the whole activity log.";
    NewcomersForgotten "newcomers-forgotten"
        "A write that is sent again leaves out peers that have come meanwhile.";
    LatePeerKept "late-peer-kept"
        "A peer that has all data under an old name stays so.";
    ForgottenKeepsBits "forgotten-keeps-bits"
        "The slot of a peer that is forgotten keeps its marks.";
    LeftMarksStay "left-marks-stay"
        "Marks between two nodes that a third one has brought up to date stay.";
    AttachedInHandshakeOverlooked "attached-in-handshake-overlooked"
        "A disk that was Negotiating in a handshake, and has been decided on since, is not compared.";
    ExtentsOutOfOrder "extents-out-of-order"
        "A received write that waits for an earlier one takes its extents after later ones.";
    CopyHidesLaterMark "copy-hides-later-mark"
        "A copied block clears a mark that a write has set since it was written.";
    WordHidesLaterMark "word-hides-later-mark"
        "The word that nodes are in sync clears a mark that is newer than it.";
    VouchesForTheLost "vouches-for-the-lost"
        "A node says that a peer is in sync which asks others as if it had lost the connection.";
    VouchesUnasked "vouches-unasked"
        "A node says that a neighbour is in sync which may live another life since it answered last.";
    FarNodesNotTold "far-nodes-not-told"
        "A Primary with a borrowed quorum does not wait until the nodes behind its peer are told.";
    StaleReplyCounts "stale-reply-counts"
        "An answer to an earlier two-phase commit counts for the present one.";
    PromotesInHandshake "promotes-in-handshake"
        "A node becomes Primary in the middle of a handshake.";
    PromotesWithoutQuorum "promotes-without-quorum"
        "A node without quorum may become Primary.";
    NegotiatesWithSome "negotiates-with-some"
        "An attach does not wait for the answers of all peers.";
    ReplicaStaysCurrent "replica-stays-current"
        "A replica of a Primary that may have crashed stays UpToDate.";
    SeveralSources "several-sources"
        "A target copies from all of its sources at once.";
    MarksForEver "marks-for-ever"
        "A peer that got marks during its resync gets no writes afterwards.";
    NoDataForEver "no-data-for-ever"
        "Requests that wait for data go on waiting when the data are back.";
    FrozenAnsweredWell "frozen-answered-well"
        "A forced demotion acknowledges what was frozen.";
    LogNumberStuck "log-number-stuck"
        "Activity-log transactions all have one number.";
    PeerBlockIgnored "peer-block-ignored"
        "Marks are cleared in smaller pieces than the peer clears them.";
    RetiredForgotten "retired-forgotten"
        "The end of a resync forgets the generation that its target was marked from.";
    HeldOvertaken "held-overtaken"
        "A new request overtakes those that are held.";
    EpochUnlimited "epoch-unlimited"
        "max-epoch-size is ignored.";
    AcksCoverCopies "acks-cover-copies"
        "The ack of a write clears a mark, though a newer copy of the block came from a source that sent marks.";
    OvertakenWritesCount "overtaken-writes-count"
        "A write that a resync has replaced counts for the nodes that have it.";
    MarksNotForwarded "marks-not-forwarded"
        "A node does not tell its targets that a block of theirs has changed here.";
    LateRefusalIgnored "late-refusal-ignored"
        "A write that a peer refuses after it has acknowledged its receipt counts as held there.";
    RedoneUnmarked "redone-unmarked"
        "A write that is made again, because its only copy is gone, is not marked.";
    AnySecretDoes "any-secret-does"
        "A peer that answers the challenge wrongly is let in.";
    HandlerFailureIgnored "handler-failure-ignored"
        "A resync begins although its handler has failed.";
    BrokenFenceCounts "broken-fence-counts"
        "A fence-peer handler that is broken counts as one that has fenced.";
    FollowerGivesUp "follower-gives-up"
        "A node that has followed a Primary in a handshake becomes the target that it was to be before.";
    HandshakeGoesStale "handshake-goes-stale"
        "A handshake ends although this node has got another generation in it, or a whole disk.";
    WrittenInHandshake "written-in-handshake"
        "A write that begins in a handshake is neither sent nor marked for the peer.";
    OwedForEver "owed-for-ever"
        "A source goes on taking its target for Inconsistent, whatever it sends.";
    DemotionLeavesBehind "demotion-leaves-behind"
        "A node is demoted before the generation that leaves a lost peer behind.";
    LostDagtagAwaited "lost-dagtag-awaited"
        "A resync waits for ever for writes of a node that is lost.";
    FullSyncFlagStays "full-sync-flag-stays"
        "The metadata go on calling for a full sync that has begun.";
    AbortKeepsHandshake "abort-keeps-handshake"
        "An aborted connect does not free its connection.";
    MembersForgotten "members-forgotten"
        "A commit does not say which nodes had quorum together.";
    GoneSourceKept "gone-source-kept"
        "The end of a resync leaves its target as one that is being copied.";
    DiskSizeIgnored "disk-size-ignored"
        "A connect does not ask how much room the peer's disk has.";
    PeerOutdatedUnnoted "peer-outdated-unnoted"
        "The metadata do not say which absent peers are Outdated.";
    CrashedFlagStays "crashed-flag-stays"
        "A node that was Primary counts as one that crashed, also after a demotion.";
    OneSlotInvalidated "one-slot-invalidated"
        "A replica that is thrown away is marked towards its source only.";
    LogContextStuck "log-context-stuck"
        "Every activity-log transaction carries the same part of the slots.";
    FirstExtentPut "first-extent-put"
        "Of a write across extents only the first is let go.";
    SlotMergedInPart "slot-merged-in-part"
        "Of the marks towards one peer only the first run is taken over for another.";
    FillNotWritten "fill-not-written"
        "The marks of a whole replica stay in memory.";
    LastWordNotWritten "last-word-not-written"
        "The last word of each write of the bitmap is empty.";
    InSyncSurvivesLoss "in-sync-survives-loss"
        "What a lost peer called in sync clears its marks when the write is settled.";
    EarlierClearsLater "earlier-clears-later"
        "A write that is settled clears the mark of a later one.";
    OlderClearsSource "older-clears-source"
        "A write of a Primary that is copied from another one since clears the marks of that one.";
    GivenUpUnnamed "given-up-unnamed"
        "What a Primary without a disk gave up leads to no generation before the next write.";
    CrossedEndStays "crossed-end-stays"
        "A target whose end crosses a generation of its source keeps the old one.";
    LateFailureUnmarked "late-failure-unmarked"
        "A refusal of a write that is long completed marks nothing.";
    ResentKeepsAge "resent-keeps-age"
        "A write that is sent again is as old as it was.";
    AgeTimerStops "age-timer-stops"
        "Whether a peer answers in time is looked at once.";
    GivesWayStaysCurrent "gives-way-stays-current"
        "A frozen Primary that gives way keeps its disk UpToDate.";
    AddedNotTriedAgain "added-not-tried-again"
        "A volume that could not be presented at once is not presented later.";
    LostPathsKept "lost-paths-kept"
        "Reads of a lost peer count as under way for ever.";
    LoadStopsResync "load-stops-resync"
        "A resync asks for nothing while applications write.";
    OwedOfOthersKept "owed-of-others-kept"
        "A source does not count what its target gets from others.";
    ExchangeAcksKept "exchange-acks-kept"
        "What a target called in sync in an earlier exchange of bitmaps counts in the next one.";
    AgainForgotten "again-forgotten"
        "A comparison that hit a running resync is not made up for.";
    DayZeroSlotEmpty "day-zero-slot-empty"
        "A peer without a bitmap slot counts as one towards which nothing is marked.";
    LostFlushAwaited "lost-flush-awaited"
        "The end of a resync waits for the answer of a node that is lost.";
    QuestionsSurviveLoss "questions-survive-loss"
        "A question of a lost link is answered on the next one.";
    TargetsToBeFollow "targets-to-be-follow"
        "A peer that is about to be resynced counts as a follower of a new generation.";
    UnmadeKept "unmade-kept"
        "A disk that goes keeps a generation that was not made.";
    OnlyDiskOutdated "only-disk-outdated"
        "The only disk of a volume becomes Outdated when it has lost a client.";
    FirstOfTwoUntold "first-of-two-untold"
        "A follower that takes two generations at once does not hear of the first.";
    FullSyncReplaced "full-sync-replaced"
        "A resync by bitmap replaces a full one that has not marked everything.";
    RoomIsDenied "room-is-denied"
        "A peer is blamed for a size that another one allows.";
    NewAreaWithoutSide "new-area-without-side"
        "The copy of a new area begins although the peer is the target of another node.";
    UntoldCompared "untold-compared"
        "An attach beside an old peer compares generations that the peer was not told.";
    CommandExposesEarly "command-exposes-early"
        "A generation that a command makes counts as seen before it is durable.";
    BusyCompared "busy-compared"
        "Marks that are left are compared while one who could settle them is resynced.";
    EpochsOutOfOrder "epochs-out-of-order"
        "A barrier is acked as soon as a later epoch is written.";
    DiscardEpochNotFlushed "discard-epoch-not-flushed"
        "A barrier is acked without a flush of the discards of its epoch.";
    FuaNotSent "fua-not-sent"
        "A write with FUA is sent as one without.";
    ProtocolCAsB "protocol-c-as-b"
        "With protocol C a write is acknowledged when it is in the memory of the peer.";
    FirstAckCompletes "first-ack-completes"
        "A write completes with the ack of the first of several peers.";
    WriteOvertakesResyncRead "write-overtakes-resync-read"
        "A write does not wait for a resync read of its block.";
    PeerWritesUnordered "peer-writes-unordered"
        "A write does not wait for an earlier received one of the same block.";
    ReplayMissesExtent "replay-misses-extent"
        "An attach after a crash leaves out an extent of the activity log.";
    ReplayLeavesLastBlock "replay-leaves-last-block"
        "An attach after a crash does not mark the last block of each extent.";
    CleanFlagStays "clean-flag-stays"
        "The metadata of a disk in use call its activity log clean.";
    PeerExtentLetGoEarly "peer-extent-let-go-early"
        "A received write gives its place in the activity log back before the peer ack.";
    PartialWritesUnmarked "partial-writes-unmarked"
        "A write marks only the bitmap blocks that it covers wholly.";
    PlainRunsShort "plain-runs-short"
        "The last block of each run of a plain bitmap is dropped.";
    BitmapReplacesMarks "bitmap-replaces-marks"
        "A bitmap that a target receives takes the place of its own marks.";
    ResyncAfterIgnored "resync-after-ignored"
        "A resync does not wait for the volume that goes first.";
    PeerPauseIgnored "peer-pause-ignored"
        "A pause of the peer does not pause the resync here.";
    VerifyIgnoresDagtag "verify-ignores-dagtag"
        "A verify reads before it has what the peer has seen of a third node.";
    ClientSendsToOne "client-sends-to-one"
        "A Primary without a disk sends its writes to one peer.";
    RedundancyCountsPresent "redundancy-counts-present"
        "quorum-minimum-redundancy counts disks that are not UpToDate.";
    QuorumStaysFrozen "quorum-stays-frozen"
        "Requests stay frozen when quorum is back.";
    NoQuorumNoError "no-quorum-no-error"
        "on-no-quorum io-error lets writes go on.";
    LostPeerAwaited "lost-peer-awaited"
        "A two-phase commit waits for the answer of a node that is lost.";
    CrashedRowMissing "crashed-row-missing"
        "Nodes of one generation of which one crashed as Primary count as equal.";
    HistoryReversed "history-reversed"
        "The rows history-self and history-peer give the wrong direction.";
    SplitBrainReversed "split-brain-reversed"
        "The policies for a split brain let the wrong side win.";
    FollowerNotesNobody "follower-notes-nobody"
        "A node that follows a new generation does not note who does not.";
    ReconnectFlagAlways "reconnect-flag-always"
        "A node that was started anew says that it was there all the time.";
    PageErrorIgnored "page-error-ignored"
        "A write of the bitmap that failed counts as done.";
    SuperblockErrorIgnored "superblock-error-ignored"
        "A write of the superblock that failed counts as done.";
    SuperblockCoversLater "superblock-covers-later"
        "The end of a superblock write counts for changes that were made meanwhile.";
    OutdatedTrusted "outdated-trusted"
        "An attach takes an Outdated disk for UpToDate.";
    BehindStaysCurrent "behind-stays-current"
        "A node that is Behind goes on taking its disk for UpToDate.";
    CongestionNeverFalls "congestion-never-falls"
        "What was sent and has arrived counts as under way for ever.";
    SurvivorsNotCompared "survivors-not-compared"
        "The survivors of a Primary do not tell each other how far they came.";
    LateReplyLeaked "late-reply-leaked"
        "The buffer of a resync reply that comes too late is never released.";
    VerifyBufferLeaked "verify-buffer-leaked"
        "The buffer of a block that a verify read is never released.";
    GatedAcksLost "gated-acks-lost"
        "Of the acks that waited for metadata only the first is sent.";
    DemotionPausesOpen "demotion-pauses-open"
        "Writes begin while a demotion waits to ask its peers again.";
    UnackedNotCounted "unacked-not-counted"
        "Received writes whose peer ack is on its way are no changes towards one who has left their generation.";
    NewMarksNotAwaited "new-marks-not-awaited"
        "What is marked during a resync is asked for before the mark is durable.";
    OldWordsCount "old-words-count"
        "What a peer told in an attempt to connect that came to nothing counts in the next one.";
    WritesDuringDemotion "writes-during-demotion"
        "Writes that come while a demotion runs begin.";
    HeldForgottenByDemotion "held-forgotten-by-demotion"
        "Requests that were held during a demotion are not looked at again.";
    ThirdMarksNotAwaited "third-marks-not-awaited"
        "Resync data are acked before the marks towards third nodes are durable.";
    AwayNotMarkedBefore "away-not-marked-before"
        "What a resync will copy is not marked towards nodes that are away before it begins.";
    StartNotHeld "start-not-held"
        "A resync asks for blocks before the marks towards nodes that are away are durable.";
    EndNotFlushed "end-not-flushed"
        "A resync ends without a flush of the writes that have cleared its marks.";
    ForeignNotFlushed "foreign-not-flushed"
        "A flush does not reach what a peer has got from another node.";
    ForeignFlushedOnce "foreign-flushed-once"
        "A flush does not reach a write of another node that was on its way to that one's disk at the flush before.";
    FlushAskedOnce "flush-asked-once"
        "The question before the end of a resync is not asked again.";
    OldFlushAnswerCounts "old-flush-answer-counts"
        "An answer to an earlier question before the end of a resync counts.";
    FirstFlushAnswerEnds "first-flush-answer-ends"
        "A resync ends when the first of several nodes has answered its question.";
    LatePrimaryNotAsked "late-primary-not-asked"
        "A Primary that comes while resyncs run is not asked before they end.";
    WritesNotAskedFor "writes-not-asked-for"
        "A resync that gets marks instead of writes does not ask for writes at its end.";
    ZeroedShort "zeroed-short"
        "Of a block that the source calls zero the last part is not written.";
    LookedAgainOnce "looked-again-once"
        "Nodes whose disks are not equal are compared again once.";
    UnequalNotWatched "unequal-not-watched"
        "Nodes whose disks are not equal after a change are not compared again.";
    FarPrimaryKept "far-primary-kept"
        "A Primary that is out of reach is never forgotten.";
    ShrinksInUse "shrinks-in-use"
        "A volume in use becomes as small as a peer that connects.";
    AbsentRoomStale "absent-room-stale"
        "A disk that was seen last before it grew limits what others have come to.";
    WishNotPassedOn "wish-not-passed-on"
        "The size that an operator asked for at a neighbour is not told to others.";
    RoomUntold "room-untold"
        "A peer does not hear that a disk has grown during its handshake.";
    FollowersNeverLate "followers-never-late"
        "A peer may take as long as it likes for a new generation.";
    FailuresNeverEnd "failures-never-end"
        "A demoted node goes on failing requests.";
    WaysToPeersOnly "ways-to-peers-only"
        "A frozen Primary gives way to a neighbour only.";
    PromotesUnsettled "promotes-unsettled"
        "A promotion does not wait until the loss of another Primary is settled.";
    LearnsWhileBusy "learns-while-busy"
        "What a set says about third nodes is learnt while they are resynced.";
    LearnsFromTargets "learns-from-targets"
        "A node that is being resynced says who has caught up.";
    NotesNotAdopted "notes-not-adopted"
        "Generations that a peer has noted and given up are not noted here.";
    RemainingCopyNotFlushed "remaining-copy-not-flushed"
        "When a peer's disk is lost what both have acknowledged stays in the cache of the other.";
    SpreadsEarly "spreads-early"
        "A generation that was taken over is told to others before it is durable.";
    LaterChangesUnwritten "later-changes-unwritten"
        "What changes in the metadata during their write is not written.";
    TargetNotBehind "target-not-behind"
        "A node that is being resynced does not follow when its source pulls ahead.";
    AheadMarksUntold "ahead-marks-untold"
        "The end of Ahead does not tell the marks of what was not sent.";
    ExchangeMarksUntold "exchange-marks-untold"
        "The start of a resync does not tell the marks of what was not sent during the exchange of bitmaps.";
    UnwrittenForEver "unwritten-for-ever"
        "That nothing was written since a generation was taken is noted after a write as well.";
    GoneOnServes "gone-on-serves"
        "A frozen Primary without a disk goes on with a peer that another Primary has brought further.";
    LeftAsPrimary "left-as-primary"
        "Whose turn comes after nobody waits for it any more remains Primary.";
    LostSourceCounts "lost-source-counts"
        "A neighbour of a Primary stays a good source when that one is lost, whose promotion was not heard.";
    UnwrittenUnsettled "unwritten-unsettled"
        "That nothing was written since a generation is noted while writes of before may be acknowledged later.";
    AheadEndsEarly "ahead-ends-early"
        "A Primary ends Ahead while writes are on their way.";
    MaxBuffersIgnored "max-buffers-ignored"
        "A resync asks for more than max-buffers.";
    SuperblockInOneGo "superblock-in-one-go"
        "On persistent memory the superblock is changed in any order of its words.";
    LateWordsCount "late-words-count"
        "What a peer says may clear marks that are newer than its words.";
    LateMarksForgotten "late-marks-forgotten"
        "That a mark is newer than what a peer says is forgotten with any answer to a ping.";
    DoubtsForgotten "doubts-forgotten"
        "What would be said of a peer that has to answer first is never said.";
    FailedNotRecopied "failed-not-recopied"
        "A resync does not copy what had failed before it began.";
    UnackedNotApplied "unacked-not-applied"
        "Received writes whose peer ack is missing are not marked when a resync with a third node begins.";
    ReadsStayAtPeers "reads-stay-at-peers"
        "A disk that has just become UpToDate is read before writes that peers have shown.";
    ReadsAnyUpToDate "reads-any-up-to-date"
        "A target reads what it lacks from any UpToDate peer, not from its source.";
    TriedPeersAgain "tried-peers-again"
        "A read that a peer refused goes to that peer again.";
    FlushFailureHidden "flush-failure-hidden"
        "A flush that fails on the own disk ends well.";
    OptionsNotMirrored "options-not-mirrored"
        "A change of options of a connection is not told to the peer.";
    ClientNotMetAnew "client-not-met-anew"
        "A disk that is Outdated beside equal ones stays so as long as the Primary has no disk.";
    OlderCopyInTheWay "older-copy-in-the-way"
        "Outdated disks without a Primary wait as long as an older one is not whole.";
    UnheardPrimaryCounts "unheard-primary-counts"
        "A target counts on a Primary whose promotion it has not heard of.";
    GoingDiskNamed "going-disk-named"
        "A generation that was planned names a disk that has failed meanwhile.";
    SlotGoesWithDisk "slot-goes-with-disk"
        "A source of 8.4's dialect forgets a resync whose target attaches its disk again.";
    UnseenNotFlushed "unseen-not-flushed"
        "A flush of a client does not reach what it has read of another Primary's writes.";
    OvertakenReadUntold "overtaken-read-untold"
        "A source does not tell what stays marked when a target has written a copy that was replaced here meanwhile.";
    MarkedNodeSettles "marked-node-settles"
        "A disk that was Consistent, and counts now, leaves its marks to a third node from which it differs itself.";
    ConsistentWaits "consistent-waits"
        "A disk that was Consistent, and counts now, is compared with one that counted before only after a while.";
    RenamedInHandshake "renamed-in-handshake"
        "A peer counts at the end of a handshake in which its Primary made another generation.";
    OthersStayBehind "others-stay-behind"
        "A node without a disk goes on calling disks Outdated that are at the generation which it exposes by now.";
    VotersUnasked "voters-unasked"
        "A Primary goes on under a new generation before the targets that count beside it have noted it.";
    ResentOutOfOrder "resent-out-of-order"
        "A frozen write is sent again while an earlier one of another volume still waits.";
    TwinsDisagree "twins-disagree"
        "A node without a disk calls one of two peers of one generation Outdated, and the other one not, without an end.";
    ComingPrimaryNotAsked "coming-primary-not-asked"
        "A Primary without a disk that comes during a resync is not asked for what its writes may leave marked.";
    RedoneUntold "redone-untold"
        "A frozen write is made again beside a resync, and peers that have it hear nothing of the first time.";
    LeftBehindCounts "left-behind-counts"
        "A Primary counts nodes as Outdated, and itself as the last one, that have gone on from its data.";
    ClientsVotersUnasked "clients-voters-unasked"
        "A Primary without a disk goes on under a new generation before the targets of its disk have noted it.";
    VoteFollowsSource "vote-follows-source"
        "A target forgets what a Primary without a disk has named while its source has not told it yet.";
    VoteUnnoted "vote-unnoted"
        "An Inconsistent disk does not note for which Primary it counts.";
    QuorumLossUnnoted "quorum-loss-unnoted"
        "A Primary does not note that it lost quorum.";
    ReconciledNotTold "reconciled-not-told"
        "Survivors of a Primary that have become equal do not ask whether they are UpToDate.";
    OldWordsKept "old-words-kept"
        "What a node said of a lost Primary holds although the two have met again.";
    LoserNotDemoted "loser-not-demoted"
        "A Primary that loses a split brain becomes a target as a Primary.";
    SizeDuringExchange "size-during-exchange"
        "Bitmaps that were exchanged while the size changed count.";
    AttachKeepsDagtag "attach-keeps-dagtag"
        "The dagtag of a node that starts anew begins before what its metadata name.";
    OutdatedStaysAtConnect "outdated-stays-at-connect"
        "An Outdated disk stays so beside an UpToDate one of its generation.";
    ConsistentTrustsAny "consistent-trusts-any"
        "A Consistent disk becomes UpToDate beside an UpToDate one of another generation.";
    RefusedByOldNews "refused-by-old-news"
        "A connection ends for good by what a disk was before it was copied.";
    AnnouncedGoesWithDisk "announced-goes-with-disk"
        "A Primary that loses its disk forgets what it had announced with it.";
    ReadErrorMarkedLazily "read-error-marked-lazily"
        "A block that could not be read is marked in memory only.";
    AncestorsReadAfterDemotion "ancestors-read-after-demotion"
        "A node without a disk reads from who was left behind by a Primary that has gone.";
    LonelyOutdatedStays "lonely-outdated-stays"
        "The only disk that there is stays Outdated.";
    ReconciledStaysOutdated "reconciled-stays-outdated"
        "A survivor that follows an Outdated one is Outdated, too.";
    OutdatedDoesNotLead "outdated-does-not-lead"
        "An Outdated survivor with more does not give it to the other one.";
    FollowsLeftBehind "follows-left-behind"
        "A follower of a Primary is copied from a disk that has lost that one and was told a newer generation before.";
    ServingWaits "serving-waits"
        "Two whole disks that differ wait for as long as one of them serves a resync.";
    LateLossForgotten "late-loss-forgotten"
        "A node that lost a Primary last is copied from who lost it first, and is Outdated as that one is.";
    FirstCopyCounts "first-copy-counts"
        "A node that lost a Primary last is Outdated after it was copied from another one than reconciled with it.";
    WordsForgotten "words-forgotten"
        "Marks that survivors of a Primary settle later go from the lower node id, not from who came further.";
    KeptWordsOfLess "kept-words-of-less"
        "A node that loses a Primary last forgets that an Outdated one had come further.";
    GenerationsNotReconciled "generations-not-reconciled"
        "Survivors of different generations are not reconciled at the end of their copy.";
    FlushOvertakesLoss "flush-overtakes-loss"
        "A flush ends before the generation that is due, although a lost peer may lack what it makes durable.";
    LeftInTwoSteps "left-in-two-steps"
        "A node that its Primary leaves is current and stable for a moment.";
    ClientNotAsked "client-not-asked"
        "An Outdated disk follows a neighbour, and a Primary without a disk has served newer data.";
    OldCopyServed "old-copy-served"
        "A Primary without a disk reads from a disk that lacks the generation that it has served.";
    FrozenDetachHasty "frozen-detach-hasty"
        "A frozen Primary gives its disk away before its peers have what was acknowledged.";
    CopiedWriteForgotten "copied-write-forgotten"
        "A target has copied a write that a third node lacks, and is lost: it is not marked for that.";
    NotNotedWhileSuspended "not-noted-while-suspended"
        "A disk becomes current while a generation ends a suspension: what was announced is not noted.";
    UnreplicatedFollows "unreplicated-follows"
        "A target that a Primary without a disk sends nothing takes its generation, whole by then.";
    ReadErrorMarkedLate "read-error-marked-late"
        "The metadata call a disk Inconsistent before the block that it could not read is marked on it.";
    SettledWhileFollowing "settled-while-following"
        "What is marked is compared with a peer to which a Primary's generation is on its way.";
    WholeCopyUnnamed "whole-copy-unnamed"
        "8.4's dialect: a resync of everything is not called after the generation that it began from.";
    LeftBehindFollows "left-behind-follows"
        "A disk that one connected node has left behind becomes UpToDate beside another one.";
    ConsistentNotCompared "consistent-not-compared"
        "A generation leaves a connected node behind, and it is not copied then.";
    TurnsLost "turns-lost"
        "What waits for acks among two Primaries is forgotten when they come.";
    ForwardsUnasked "forwards-unasked"
        "A source does not ask whether a peer's earlier writes are settled before it answers a flush.";
    PartCopied "part-copied"
        "A whole disk becomes the target of a part of its own generation.";
    DemotedAwaited "demoted-awaited"
        "A survivor waits for ever for what nobody says of a Primary that was demoted.";
    ResyncReversed "resync-reversed"
        "A source may be invalidated by its target.";
    SizeNotAwaited "size-not-awaited"
        "The activity log is written before the metadata name the volume's size.";
    ConfirmsBeforeDurable "confirms-before-durable"
        "A follower names a new generation to its Primary before it is written down.";
    CrashedCopyUntold "crashed-copy-untold"
        "A crashed Primary is ahead of the first peer that it meets only, and not whoever was copied from it.";
    OlderPrimaryElected "older-primary-elected"
        "A target votes for a Primary whose data are older than those that it is being given.";
    CrashedDiskUnmet "crashed-disk-unmet"
        "A client is Primary beside a disk that has crashed as Primary and others that it was not compared with.";
    DemotionGivesUpTold "demotion-gives-up-told"
        "A Primary is demoted while its peers take a new generation, which it does not make any more.";
    FarVoteCounts "far-vote-counts"
        "Who takes itself for the neighbour of a Primary that asks through others gives it its vote.";
    FollowersComparedEarly "followers-compared-early"
        "Two followers of a Primary compare while its generation is on its way to one of them.";
    OtherSourceClears "other-source-clears"
        "What one source has sent settles a mark though a reply of another source has replaced it.";
    LateBarrierForgotten "late-barrier-forgotten"
        "An epoch that has ended already when its writes are sent to a peer is not ended there.";
    OldAnswerOutdates "old-answer-outdates"
        "A question that began before a Primary was lost outdates who has lost it.";
    AttachToldTwice "attach-told-twice"
        "An attaching node that says so once more ends the resync that its first word has begun.";
    NewPrimaryUnasked "new-primary-unasked"
        "A target ends its resync beside a Primary that appeared meanwhile and did not know of it.";
    BehindCountsStable "behind-counts-stable"
        "A second source that is behind makes a resync from an unstable one count.";
    UnackedCountDurable "unacked-count-durable"
        "Marks of writes that not all peers have are taken for durable when a resync replaces the blocks.";
    SlotCountsDurable "slot-counts-durable"
        "Blocks are replaced though their marks in a slot that was filled are not durable.";
    OutdatedForEver "outdated-for-ever"
        "A Primary whose source was outdated because of it becomes Outdated itself.";
    AskerTrusted "asker-trusted"
        "A survivor that is being outdated counts for the next one that loses the Primary.";
    EndsUnconfirmed "ends-unconfirmed"
        "A target ends its resync though its source may be gone.";
    LeftTargetForgotten "left-target-forgotten"
        "A target that may have ended its resync is not left behind.";
    OwnOverwriteNotFlushed "own-overwrite-not-flushed"
        "A Primary that ends its resync as target does not flush what it has written over older data.";
    TurnKept "turn-kept"
        "A Primary never gives its turn away.";
    TurnGivenEarly "turn-given-early"
        "A Primary gives its turn away before its requests have ended.";
    TurnIgnored "turn-ignored"
        "Requests begin while a Primary gives its turn away.";
    LostHolderReplaced "lost-holder-replaced"
        "A node that stands by takes the turn of a Primary that is only out of sight.";
    EpochGoesOn "epoch-goes-on"
        "Writes of before and after a change of who gets them share an epoch.";
    ReturnedDiskUnlabelled "returned-disk-unlabelled"
        "A Primary whose disk returns makes no generation of what it announced without it.";
    LateSourceForgotten "late-source-forgotten"
        "A target that ends its resync does not note that its source has not begun yet.";
    UnstableUntold "unstable-untold"
        "A node does not say that it has become a source that may change unseen.";
    UuidsBeforeWorseState "uuids-before-worse-state"
        "A node tells its generations before it says that its disk is worse than before.";
    SourceNotSought "source-not-sought"
        "A resync that waited for a Primary is not tried again when there is one.";
    LostMemberNotAsked "lost-member-not-asked"
        "Who loses a node does not ask who else has lost it.";
    QuorumLossStays "quorum-loss-stays"
        "A Primary that has quorum again goes on saying that it lost it.";
    PingsMoveTimeOut "pings-move-time-out"
        "Each ping gives the peer the whole time again.";
    InvalidatedAloneUnmarked "invalidated-alone-unmarked"
        "A disk that is thrown away without a peer is not marked.";
    DownStaysCurrent "down-stays-current"
        "A node that leaves a Primary with quorum goes on calling its disk UpToDate.";
    MetaErrorPassedOn "meta-error-passed-on"
        "With pass_on a disk whose metadata cannot be written stays.";
    EarlyEndIgnored "early-end-ignored"
        "The end of a resync that comes before its begin is forgotten.";
    OldTargetNotCompared "old-target-not-compared"
        "The end of a resync as source is not followed by a comparison with an older target.";
    OutrunNotCompared "outrun-not-compared"
        "A source is not compared with a target that another source has brought beyond it.";
    ForgottenNotLeft "forgotten-not-left"
        "A Primary that forgets a lost peer writes on under the generation that this one has.";
    WaitingSourceCompared "waiting-source-compared"
        "Who has missed the commit of a resize compares with a source that waits already.";
    RefusedIsTaken "refused-is-taken"
        "A Primary whose disk is gone goes on with a peer that has refused its last writes.";
    OldEndCounts "old-end-counts"
        "A resync that ended before the target heard that its source pulled ahead ends the next one.";
    ClientsHoldSize "clients-hold-size"
        "Nodes without disks hold each other at an old size.";
    DifferencesForgotten "differences-forgotten"
        "Nodes that count as equal forget their marks.";
}

#[cfg(feature = "planted")]
use crate::compare;

#[cfg(feature = "planted")]
impl crate::resource::Resource {
    /// Wrong rows of the comparison table.
    pub(crate) fn planted_verdict(&self, mut verdict: compare::Verdict) -> compare::Verdict {
        use compare::{Rule, Strategy};
        let strategy = verdict.strategy;
        if planted!(self, WrongRowBitmapSelf) {
            verdict.strategy = match (verdict.rule, strategy) {
                (Rule::BitmapSelf, Strategy::SourceUseBitmap) => Strategy::TargetUseBitmap,
                (Rule::BitmapPeer, Strategy::TargetUseBitmap) => Strategy::SourceUseBitmap,
                _ => strategy,
            };
        }
        if planted!(self, MarkedBlocksRowMissing) && verdict.rule == Rule::MarkedBlocks {
            verdict.strategy = Strategy::NoSync;
        }
        use Rule as R;
        let crash_rows = [R::CrashedPrimary, R::BothOff];
        if planted!(self, CrashedRowMissing) && crash_rows.contains(&verdict.rule) {
            verdict.strategy = Strategy::NoSync;
        }
        let reversed = planted!(self, LostQuorumReversed) && verdict.rule == R::LostQuorum
            || planted!(self, CrashedRowReversed)
                && [R::CrashedPrimary, R::BothOff].contains(&verdict.rule)
            || planted!(self, ReconcileReversed) && verdict.rule == R::ReconcileDagtag
            || planted!(self, HistoryReversed)
                && [R::HistoryPeer, R::HistorySelf].contains(&verdict.rule)
            || planted!(self, SplitBrainReversed) && verdict.split_brain;
        if reversed {
            verdict.strategy = strategy.reversed().unwrap_or(strategy);
        }
        if planted!(self, FullSyncUsesBitmap)
            && [R::HistoryPeer, R::HistorySelf].contains(&verdict.rule)
        {
            verdict.strategy = match strategy {
                Strategy::SourceSetBitmap => Strategy::SourceUseBitmap,
                Strategy::TargetSetBitmap => Strategy::TargetUseBitmap,
                _ => strategy,
            };
        }
        verdict
    }
}
