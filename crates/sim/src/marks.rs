//! `sometimes!` marks: rare paths with names. A run that leaves some unreached says so, because
//! what was never reached was never tested.

use lockstep_core::report::Snapshot;
use lockstep_core::state::{ConnState, DiskState, ReplState};
use lockstep_format::wire::Packet;

/// All marks: name and what it means that it was reached.
pub const MARKS: &[(&str, &str)] = &[
    (
        "crash-tears-write",
        "a crash left a write of several blocks on the disk in part",
    ),
    (
        "crash-cuts-metadata",
        "a crash came while a metadata write was in flight",
    ),
    (
        "power-cut-loses-writes",
        "a power cut took completed writes that no flush protected",
    ),
    (
        "power-cut-loses-nothing",
        "a power cut left all unflushed writes on the disk",
    ),
    (
        "crash-while-attaching",
        "a node died while it read its metadata",
    ),
    ("crash-of-primary", "the Primary died"),
    ("crash-of-sync-target", "a SyncTarget died"),
    ("crash-of-sync-source", "a SyncSource died"),
    ("all-nodes-down", "no node was up"),
    (
        "heir-promoted",
        "another node took over after the Primary had gone",
    ),
    (
        "heir-left-unused",
        "a successor went before it had served a request",
    ),
    (
        "gave-way",
        "a frozen Primary became Secondary after another had taken over",
    ),
    ("cold-extent", "a request waited for the activity log"),
    ("disk-failed", "a disk was given up after an error"),
    (
        "primary-without-disk",
        "the Primary served requests without a disk of its own",
    ),
    ("request-failed", "a request ended with an error"),
    (
        "corrupt-payload-caught",
        "a payload that was changed on its way did not have its digest",
    ),
    ("command-refused", "a command was refused"),
    (
        "silent-corruption",
        "a disk lost or misdirected a write without an error",
    ),
    ("disk-outdated", "a disk was Outdated"),
    ("disk-inconsistent", "a disk was Inconsistent"),
    (
        "disk-consistent",
        "a disk was Consistent: nobody knew whether it is up to date",
    ),
    (
        "suspended-no-data",
        "requests waited because no data was accessible",
    ),
    ("suspended-uuid", "requests waited for a new generation"),
    ("resync-as-source", "a resync ran, seen from its source"),
    ("resync-as-target", "a resync ran, seen from its target"),
    (
        "resync-paused-source",
        "a resync was paused, seen from its source",
    ),
    (
        "resync-paused-target",
        "a resync was paused, seen from its target",
    ),
    (
        "resync-waits-its-turn",
        "a resync waited for one that goes first",
    ),
    (
        "resync-one-too-many",
        "a resync waited because enough of them ran",
    ),
    (
        "resync-near-max-buffers",
        "a resync waited for more than half of what max-buffers allows",
    ),
    ("bitmap-exchange-source", "the source sent its bitmap"),
    ("bitmap-exchange-target", "the target waited for the bitmap"),
    ("network-failure", "a connection was given up"),
    ("packet-data-request", "a read was served by a peer"),
    ("packet-neg-ack", "a peer reported a failed write"),
    ("packet-neg-dreply", "a peer reported a failed read"),
    (
        "packet-neg-rs-dreply",
        "a resync source reported a failed read",
    ),
    (
        "packet-rs-neg-ack",
        "a resync target reported a failed write",
    ),
    (
        "packet-out-of-sync",
        "a range was marked instead of written",
    ),
    (
        "packet-peers-in-sync",
        "third nodes were told what is in sync",
    ),
    (
        "packet-enable-replication",
        "a resync without replication asked for the writes again",
    ),
    ("packet-peer-ack", "nodes were told who has which writes"),
    (
        "packet-peer-dagtag",
        "survivors compared what they had of a lost Primary",
    ),
    (
        "packet-current-uuid",
        "a node without a disk named its generation",
    ),
    ("packet-twopc-no", "a two-phase commit was refused"),
    ("packet-twopc-retry", "a two-phase commit met another one"),
    ("packet-twopc-abort", "a two-phase commit was given up"),
    ("packet-trim", "a discard was replicated"),
    ("packet-zeroes", "a zero-out was replicated"),
    (
        "packet-rs-is-in-sync",
        "a digest was equal, so no data was sent",
    ),
    ("packet-compressed-bitmap", "a bitmap was sent compressed"),
    ("packet-bitmap", "a bitmap was sent as it is"),
    ("packet-rs-cancel", "a resync block was put off"),
    (
        "packet-flush-requests",
        "requests were flushed before a resync ended",
    ),
    ("packet-disconnect", "a handshake ended in a refusal"),
    ("rule-just-created-both", "two fresh disks met"),
    (
        "rule-sync-source-missed-finish",
        "only the source missed the end of a resync",
    ),
    (
        "rule-sync-target-missed-finish",
        "only the target missed the end of a resync",
    ),
    (
        "rule-sync-source-missed-start",
        "the source missed the start of a resync",
    ),
    (
        "rule-sync-target-missed-start",
        "the target missed the start of a resync",
    ),
    ("rule-reconnected", "the same connection came back"),
    ("rule-crashed-primary", "a crashed Primary came back"),
    (
        "rule-lost-quorum",
        "a node came back that may have lost writes",
    ),
    (
        "rule-both-off",
        "nothing happened while two nodes were apart",
    ),
    ("rule-bitmap-peer", "the peer's bitmap UUID decided"),
    (
        "rule-bitmap-peer-other",
        "a third node's bitmap UUID on the peer decided",
    ),
    ("rule-bitmap-self", "the own bitmap UUID decided"),
    (
        "rule-bitmap-self-other",
        "a third node's bitmap UUID decided",
    ),
    ("rule-history-peer", "the peer's history decided"),
    ("rule-history-self", "the own history decided"),
    (
        "rule-reconcile-one-sided",
        "survivors of a Primary: marks on one side decided",
    ),
    (
        "rule-reconcile-dagtag",
        "survivors of a Primary: the dagtag decided",
    ),
    (
        "rule-marked-blocks",
        "blocks that both had marked were exchanged",
    ),
    ("fault-reset", "fault: a connection was reset"),
    (
        "fault-partition",
        "fault: two nodes were cut off from each other",
    ),
    ("fault-oneway", "fault: one direction was cut"),
    ("fault-stall", "fault: a stream stood still"),
    ("fault-crash", "fault: a process died"),
    ("fault-powercut", "fault: a node lost its power"),
    (
        "fault-powercut-all",
        "fault: all nodes lost their power at once",
    ),
    (
        "fault-handover",
        "fault: another node became Primary in good order",
    ),
    (
        "fault-disconnect",
        "fault: the operator disconnected two nodes",
    ),
    ("fault-detach", "fault: the operator detached a disk"),
    (
        "fault-invalidate",
        "fault: the operator invalidated a replica",
    ),
    ("fault-pause", "fault: the operator paused a resync"),
    ("fault-down", "fault: the operator took a node down"),
    ("fault-isolate", "fault: a node was cut off from all others"),
    ("fault-latelink", "fault: one side heard late of a new link"),
    ("fault-freeze", "fault: a process stood still"),
    ("fault-clock", "fault: a clock jumped ahead"),
    ("fault-slowdisk", "fault: a disk became slow"),
    ("fault-hangdisk", "fault: a disk stopped answering"),
    (
        "stored-in-place",
        "metadata on persistent memory were changed in place",
    ),
    ("disk-given-up", "a disk that did not answer was given up"),
    (
        "fault-powercut-twice",
        "fault: a node lost its power again while it recovered",
    ),
    ("fault-readerror", "fault: a read failed"),
    ("fault-writeerror", "fault: a write failed"),
    ("fault-flusherror", "fault: a flush failed"),
    ("fault-metaerror", "fault: a metadata operation failed"),
    ("fault-bitmaperror", "fault: a write of the bitmap failed"),
    ("fault-lostwrite", "fault: a disk lost a write silently"),
    (
        "fault-misdirect",
        "fault: a disk wrote to a wrong place silently",
    ),
    (
        "fault-suspend",
        "fault: the operator suspended requests for a while",
    ),
    ("fault-options", "fault: the operator changed options"),
    ("fault-newuuid", "fault: the operator made a new generation"),
    (
        "fault-other-secret",
        "fault: two nodes had different secrets",
    ),
    ("fault-badblock", "fault: a disk could not read a block"),
    ("fault-protocol", "fault: the operator changed the protocol"),
    ("block-unreadable", "what a disk could not read was gone"),
    (
        "peer-forgotten",
        "a node forgot a peer and was told of it anew",
    ),
    (
        "fault-verifyspot",
        "fault: the operator started a verify of a few blocks",
    ),
    ("stands-by", "a second Primary stood by in a live migration"),
    ("turn-passed", "a Primary gave its turn to another one"),
    (
        "turn-taken-unseen",
        "a guest took its turn, and the Primary that it had lost did not know yet",
    ),
    (
        "turn-of-a-lost-one",
        "a node that stood by became the Primary after the other one had gone",
    ),
    (
        "verify-cut-short",
        "a link was lost under a verify, and the next one went on where it was",
    ),
];

/// The set of marks that were reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks([u64; 2]);

const _: () = assert!(MARKS.len() <= 128, "the set has room for all marks");

impl Marks {
    /// It was reached.
    pub fn set(&mut self, mark: u32) {
        self.0[mark as usize / 64] |= 1 << (mark % 64);
    }

    /// It was reached.
    pub fn has(&self, mark: u32) -> bool {
        self.0[mark as usize / 64] & 1 << (mark % 64) != 0
    }

    /// All of the other too.
    pub fn join(&mut self, other: &Marks) {
        self.0[0] |= other.0[0];
        self.0[1] |= other.0[1];
    }

    /// How many were reached.
    pub fn count(&self) -> u32 {
        self.0[0].count_ones() + self.0[1].count_ones()
    }

    /// Those that were not reached, in the order of the list.
    pub fn missing(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> + '_ {
        MARKS
            .iter()
            .enumerate()
            .filter(|(i, _)| !self.has(*i as u32))
            .map(|(_, mark)| mark)
    }
}

const fn equal(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

/// Number of the mark with this name. A name that is not in the list does not compile.
pub const fn number(name: &str) -> u32 {
    let mut i = 0;
    while i < MARKS.len() {
        if equal(MARKS[i].0, name) {
            return i as u32;
        }
        i += 1;
    }
    panic!("no mark has this name; add it to the list")
}

/// Number of a mark whose name was made at run time, from a prefix and a word.
pub fn find(prefix: &str, word: &str) -> Option<u32> {
    MARKS
        .iter()
        .position(|(name, _)| name.strip_prefix(prefix).is_some_and(|rest| rest == word))
        .map(|i| i as u32)
}

/// Notes that a rare path was reached: `sometimes!(marks, "name")`, or only if a condition holds:
/// `sometimes!(marks, condition, "name")`.
#[macro_export]
macro_rules! sometimes {
    ($marks:expr, $name:literal) => {{
        const MARK: u32 = $crate::marks::number($name);
        $marks.set(MARK);
    }};
    ($marks:expr, $condition:expr, $name:literal) => {{
        if $condition {
            $crate::sometimes!($marks, $name);
        }
    }};
}

/// Marks that a node's state shows.
pub(crate) fn see_state(marks: &mut Marks, snapshot: &Snapshot) {
    for device in &snapshot.devices {
        sometimes!(marks, device.al_suspended, "cold-extent");
        match device.disk_state {
            DiskState::Failed => sometimes!(marks, "disk-failed"),
            DiskState::Inconsistent => sometimes!(marks, "disk-inconsistent"),
            DiskState::Outdated => sometimes!(marks, "disk-outdated"),
            DiskState::Consistent => sometimes!(marks, "disk-consistent"),
            DiskState::Diskless
            | DiskState::Attaching
            | DiskState::Detaching
            | DiskState::Negotiating
            | DiskState::DUnknown
            | DiskState::UpToDate => {}
        }
        let diskless = device.disk_state < DiskState::Inconsistent && device.upper_pending > 0;
        sometimes!(marks, diskless, "primary-without-disk");
    }
    sometimes!(
        marks,
        snapshot.suspended.contains(&"no-data"),
        "suspended-no-data"
    );
    sometimes!(
        marks,
        snapshot.suspended.contains(&"uuid"),
        "suspended-uuid"
    );
    for connection in &snapshot.connections {
        let broken = matches!(
            connection.state,
            ConnState::NetworkFailure | ConnState::Timeout | ConnState::BrokenPipe
        );
        sometimes!(marks, broken, "network-failure");
        for p in &connection.peer_devices {
            match p.repl_state {
                ReplState::SyncSource => sometimes!(marks, "resync-as-source"),
                ReplState::SyncTarget => sometimes!(marks, "resync-as-target"),
                ReplState::PausedSyncS => sometimes!(marks, "resync-paused-source"),
                ReplState::PausedSyncT => sometimes!(marks, "resync-paused-target"),
                ReplState::WfBitmapS => sometimes!(marks, "bitmap-exchange-source"),
                ReplState::WfBitmapT => sometimes!(marks, "bitmap-exchange-target"),
                _ => {}
            }
        }
    }
}

/// Marks that a packet shows.
pub(crate) fn see_packet(marks: &mut Marks, packet: &Packet) {
    match packet {
        Packet::DataRequest(_) => sometimes!(marks, "packet-data-request"),
        Packet::NegAck(_) => sometimes!(marks, "packet-neg-ack"),
        Packet::NegDreply(_) => sometimes!(marks, "packet-neg-dreply"),
        Packet::NegRsDreply(_) => sometimes!(marks, "packet-neg-rs-dreply"),
        Packet::RsNegAck(_) => sometimes!(marks, "packet-rs-neg-ack"),
        Packet::OutOfSync(_) => sometimes!(marks, "packet-out-of-sync"),
        Packet::PeersInSync(_) => sometimes!(marks, "packet-peers-in-sync"),
        Packet::EnableReplication(_) => sometimes!(marks, "packet-enable-replication"),
        Packet::PeerAck(_) => sometimes!(marks, "packet-peer-ack"),
        Packet::PeerDagtag(_) => sometimes!(marks, "packet-peer-dagtag"),
        Packet::CurrentUuid(_) => sometimes!(marks, "packet-current-uuid"),
        Packet::TwopcNo(_) => sometimes!(marks, "packet-twopc-no"),
        Packet::TwopcRetry(_) => sometimes!(marks, "packet-twopc-retry"),
        Packet::TwopcAbort(_) => sometimes!(marks, "packet-twopc-abort"),
        Packet::Trim(_) => sometimes!(marks, "packet-trim"),
        Packet::RsIsInSync(_) => sometimes!(marks, "packet-rs-is-in-sync"),
        Packet::Zeroes(_) => sometimes!(marks, "packet-zeroes"),
        Packet::CompressedBitmap(_) => sometimes!(marks, "packet-compressed-bitmap"),
        Packet::Bitmap(_) => sometimes!(marks, "packet-bitmap"),
        Packet::RsCancel(_) => sometimes!(marks, "packet-rs-cancel"),
        Packet::FlushRequests(_) => sometimes!(marks, "packet-flush-requests"),
        Packet::Disconnect => sometimes!(marks, "packet-disconnect"),
        // The other packets are no rare sight.
        _ => {}
    }
}

/// Marks that a line of a node's log shows: the row of the comparison table that decided.
pub(crate) fn see_log(marks: &mut Marks, text: &str) {
    if let Some((_, rest)) = text.split_once("by rule ") {
        let word: &str = rest
            .split(|c: char| !c.is_ascii_lowercase() && c != '-')
            .next()
            .unwrap_or_default();
        if let Some(mark) = find("rule-", word) {
            marks.set(mark);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reached_mark_is_not_missing() {
        let mut marks = Marks::default();
        sometimes!(marks, "crash-of-primary");
        sometimes!(marks, 1 > 2, "all-nodes-down");
        assert_eq!(marks.count(), 1);
        assert!(marks.missing().all(|(name, _)| *name != "crash-of-primary"));
        assert_eq!(marks.missing().count(), MARKS.len() - 1);
        see_log(
            &mut marks,
            "sync decision: no-sync by rule lost-quorum (bits 0)",
        );
        assert!(marks.has(number("rule-lost-quorum")));
    }
}
