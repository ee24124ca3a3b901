//! Captures of three nodes: each is replayed for each of them.

use crate::replay;

/// A slot of the bitmap that is cleared a moment later is told to one peer before that.
const SLOTS_IN_TURN: [&str; 2] = [
    "missing Data Uuids110 ba85f35566b39e8a dirty 0 flags UuidFlags(INCONSISTENT | SKIP_INITIAL_SYNC",
    "extra at the end of the connection: Data Uuids110 d20bc5a9e39422ee dirty 0 flags UuidFlags(INCONSISTENT | SKIP_INITIAL_SYNC",
];

#[test]
fn two_phase_commits() {
    let name = "22-3node-twopc";
    replay("9x", name, 0, &SLOTS_IN_TURN);
    // This belongs to a feature that this project does not offer (RECONCILE_RECONNECT).
    replay("9x", name, 2, &["missing Data PeerDagtag("]);
}

#[test]
fn writes_with_protocol_c() {
    let name = "21-3node-writes-C";
    let [_, extra] = SLOTS_IN_TURN;
    let missing = "missing Data Uuids110 ff297f78d50929da dirty 0 flags UuidFlags(INCONSISTENT | SKIP_INITIAL_SYNC";
    replay("9x", name, 0, &[missing, extra]);
    replay("9x", name, 1, &[]);
    replay("9x", name, 2, &[]);
}
