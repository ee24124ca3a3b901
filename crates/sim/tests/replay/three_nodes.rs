//! Captures of three nodes: each is replayed for each of them.

use crate::replay;

/// A slot of the bitmap that is cleared a moment later is told to one peer before that.
fn slots_in_turn(uuid: &str) -> [String; 2] {
    let told = "dirty 0 flags UuidFlags(INCONSISTENT | SKIP_INITIAL_SYNC";
    [
        format!("missing Data Uuids110 {uuid} {told}"),
        format!("extra at the end of the connection: Data Uuids110 d20bc5a9e39422ee {told}"),
    ]
}

#[test]
fn fresh_full_sync() {
    let name = "20-3node-fresh-fullsync";
    // The kernel begins an empty two-phase commit before it has sent the outcome of the forced promotion,
    // which then goes out without its masks. It tells its generation once without who is weak.
    let mut node1 =
        vec!["missing Data TwopcCommit(TwopcOutcome { head: TwopcHead { tid: 221860183"; 2];
    node1.extend(["extra at the end of the connection: Data TwopcCommit("; 2]);
    node1.extend(["missing Data Uuids110 2200efdccdc9cc17"; 4]);
    replay("9x", name, 0, &node1);
    // The other target says that it is one before this one is; here that takes no time.
    let isp = [
        "missing Data State Secondary/Secondary Connected Established Inconsistent/Inconsistent quorum true susp 000 isp 110",
    ];
    replay("9x", name, 1, &isp);
    // When a resync ends is a matter of its pace.
    let pace = [
        "missing Data Uuids110 b856f50398e06c4a dirty 0 flags UuidFlags(INCONSISTENT",
        "missing Data State Secondary/Secondary Connected Established UpToDate/UpToDate",
        "missing Data Uuids110 2200efdccdc9cc16 dirty 0",
    ];
    replay("9x", name, 2, &pace);
}

#[test]
fn writes_with_protocol_c() {
    let name = "21-3node-writes-C";
    let slots = slots_in_turn("ff297f78d50929da");
    replay("9x", name, 0, &slots.each_ref().map(String::as_str));
    replay("9x", name, 1, &[]);
    replay("9x", name, 2, &[]);
}

#[test]
fn two_phase_commits() {
    let name = "22-3node-twopc";
    let slots = slots_in_turn("ba85f35566b39e8a");
    replay("9x", name, 0, &slots.each_ref().map(String::as_str));
    // A write without a peer ack is marked here before the bitmap is sent, and by a kernel when the
    // ack comes.
    let marks = [
        "missing Data CompressedBitmap(",
        "extra at the end of the connection: Data CompressedBitmap(",
    ];
    replay("9x", name, 1, &marks);
    // This belongs to a feature that this project does not offer (RECONCILE_RECONNECT).
    replay("9x", name, 2, &["missing Data PeerDagtag("]);
}

#[test]
fn primary_without_a_disk() {
    let name = "23-diskless-client";
    let slots = slots_in_turn("94e13120371892f0");
    replay("9x", name, 0, &slots.each_ref().map(String::as_str));
    // To the node without a disk it means nothing that the first sync was skipped.
    let skipped =
        ["missing Data Uuids110 94e13120371892f0 dirty 0 flags UuidFlags(SKIP_INITIAL_SYNC"];
    replay("9x", name, 1, &skipped);
    // A kernel without a disk gives the volume's size as that of its disk when it knows it, and tells its
    // generation twice.
    let sizes = [
        "missing Data Sizes(",
        "missing Data Sizes(",
        "extra at the end of the connection: Data Sizes(Sizes { d_size: Sector(0)",
        "extra at the end of the connection: Data Sizes(Sizes { d_size: Sector(0)",
        "missing Data CurrentUuid(",
    ];
    replay("9x", name, 2, &sizes);
}

#[test]
fn lost_quorum() {
    let name = "24-quorum";
    let slots = slots_in_turn("b340ccf3ec59e5d6");
    let mut node1: Vec<&str> = slots.iter().map(String::as_str).collect();
    // A kernel sets the Primary's bit with a new generation, not with the promotion; and it does not say
    // in each set who is weak. The cable was pulled before the answer went out.
    node1.extend([
        "missing Data Uuids110 b340ccf3ec59e5d6 dirty 0 flags UuidFlags(STABLE | RECONNECT | PRIMARY_LOST_QUORUM",
        "missing Data Uuids110 b22c799f5cd6b629 dirty 0 flags UuidFlags(STABLE | RECONNECT | HAS_UNALLOC",
        "extra at the end of the connection: Control TwopcYes(TwopcReply { tid: 3831986316",
        "missing Data Uuids110 b22c799f5cd6b628 dirty 0 flags UuidFlags(STABLE | RECONNECT | PRIMARY_LOST_QUORUM",
        "missing Data Uuids110 b22c799f5cd6b628 dirty 0 flags UuidFlags(STABLE | RECONNECT | PRIMARY_LOST_QUORUM",
    ]);
    replay("9x", name, 0, &node1);
    // Marked is first what the lost Primary had not acked, then the set is told.
    let node2 = [
        "missing Data Uuids110 b340ccf3ec59e5d6 dirty 0 flags UuidFlags(STABLE | GOT_STABLE)",
        "extra at the end of the connection: Data Uuids110 b340ccf3ec59e5d6 dirty 16 flags UuidFlags(STABLE | GOT_STABLE)",
    ];
    replay("9x", name, 1, &node2);
    // A kernel asks once more for a Primary than this project does.
    let node3 = [
        "missing Data Uuids110 b340ccf3ec59e5d6 dirty 0 flags UuidFlags(STABLE | GOT_STABLE)",
        "extra at the end of the connection: Data Uuids110 b340ccf3ec59e5d6 dirty 16 flags UuidFlags(STABLE | GOT_STABLE)",
        "missing Data TwopcPrepare(TwopcPrepare { head: TwopcHead { tid: 2281737676",
        "missing Data TwopcAbort(TwopcOutcome { head: TwopcHead { tid: 2281737676",
        "missing Data TwopcPrepare(TwopcPrepare { head: TwopcHead { tid: 3158299799",
        "missing Data TwopcCommit(TwopcOutcome { head: TwopcHead { tid: 3158299799",
    ];
    replay("9x", name, 2, &node3);
}

#[test]
fn crash_of_the_primary() {
    let name = "25-primary-crash-reconciliation";
    // The flag of a paused resync is not the kernel's.
    let [missing, _] = slots_in_turn("41e43a202bb3b82c");
    let node1 = [
        missing.as_str(),
        "missing Data State Secondary/Secondary Connected PausedSyncS Inconsistent/Outdated",
    ];
    replay("9x", name, 0, &node1);
    // Marked is first what the lost Primary had not acked, then the set is told; a kernel asks once more
    // for a Primary, and says Consistent of a disk that follows a moment later.
    let node2 = [
        "missing Data Uuids110 41e43a202bb3b82c dirty 0 flags UuidFlags(STABLE | GOT_STABLE)",
        "extra at the end of the connection: Data Uuids110 41e43a202bb3b82c dirty 54 flags UuidFlags(STABLE | GOT_STABLE)",
        "missing Data TwopcPrepare(TwopcPrepare { head: TwopcHead { tid: 3376841678",
        "missing Data TwopcCommit(TwopcOutcome { head: TwopcHead { tid: 3376841678",
        "missing Data State Secondary/Secondary Connected Established UpToDate/Consistent",
        "missing Data Uuids110 292920ea0269fcf7 dirty 0",
    ];
    replay("9x", name, 1, &node2);
    let node3 = [
        "missing Data Uuids110 41e43a202bb3b82c dirty 0 flags UuidFlags(STABLE | GOT_STABLE)",
        "extra at the end of the connection: Data Uuids110 41e43a202bb3b82c dirty 7 flags UuidFlags(STABLE | GOT_STABLE)",
        // The Primary had died.
        "extra at the end of the connection: Control BarrierAck(BarrierAck { barrier: 67108864",
        "missing Data State Secondary/Secondary Connected Established UpToDate/UpToDate",
        // The resync ends sooner here, and asks for its flush.
        "missing Data Uuids110 292920ea0269fcf6 dirty 0 flags UuidFlags(INCONSISTENT | SYNC_TARGET",
        "extra at the end of the connection: Data FlushRequests(",
    ];
    replay("9x", name, 2, &node3);
}
