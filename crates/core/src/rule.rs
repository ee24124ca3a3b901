//! The rows of the comparison tables by name (semantics.md, 13.3 and 13.4).

/// The row of the table that decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the rows of semantics.md 13.4 by their names")]
pub enum Rule {
    JustCreatedBoth,
    JustCreatedSelf,
    JustCreatedPeer,
    SyncSourceMissedFinish,
    SyncSourcePeerMissedFinish,
    SyncTargetMissedFinish,
    SyncTargetPeerMissedFinish,
    Reconnected,
    CrashedPrimary,
    LostQuorum,
    BothOff,
    BitmapPeer,
    BitmapPeerOther,
    SyncTargetMissedStart,
    BitmapSelf,
    BitmapSelfOther,
    SyncSourceMissedStart,
    HistoryPeer,
    HistorySelf,
    BitmapBoth,
    HistoryBoth,
    NoRelation,
    /// Lockstep's own rule: a resync target of another node is asked again when it is through.
    TargetOfAnother,
    /// Both sides say that they are the older one: no true pair of sets does.
    Contradiction,
    /// Equal-UUID reconcile, direction by marks on one side only.
    ReconcileOneSided,
    /// Equal-UUID reconcile, direction by dagtag or node id.
    ReconcileDagtag,
    /// Lockstep's own rule, see the module's head.
    MarkedBlocks,
}

impl Rule {
    /// Name as logged.
    pub const fn name(self) -> &'static str {
        match self {
            Rule::JustCreatedBoth => "just-created-both",
            Rule::JustCreatedSelf => "just-created-self",
            Rule::JustCreatedPeer => "just-created-peer",
            Rule::SyncSourceMissedFinish => "sync-source-missed-finish",
            Rule::SyncSourcePeerMissedFinish => "sync-source-peer-missed-finish",
            Rule::SyncTargetMissedFinish => "sync-target-missed-finish",
            Rule::SyncTargetPeerMissedFinish => "sync-target-peer-missed-finish",
            Rule::Reconnected => "reconnected",
            Rule::CrashedPrimary => "crashed-primary",
            Rule::LostQuorum => "lost-quorum",
            Rule::BothOff => "both-off",
            Rule::BitmapPeer => "bitmap-peer",
            Rule::BitmapPeerOther => "bitmap-peer-other",
            Rule::SyncTargetMissedStart => "sync-target-missed-start",
            Rule::BitmapSelf => "bitmap-self",
            Rule::BitmapSelfOther => "bitmap-self-other",
            Rule::SyncSourceMissedStart => "sync-source-missed-start",
            Rule::HistoryPeer => "history-peer",
            Rule::HistorySelf => "history-self",
            Rule::BitmapBoth => "bitmap-both",
            Rule::HistoryBoth => "history-both",
            Rule::NoRelation => "unrelated-data",
            Rule::TargetOfAnother => "target-of-another",
            Rule::Contradiction => "contradiction",
            Rule::ReconcileOneSided => "reconcile-one-sided",
            Rule::ReconcileDagtag => "reconcile-dagtag",
            Rule::MarkedBlocks => "marked-blocks",
        }
    }
}
