//! Planned worlds in which a write was acknowledged that a peer which counted did not have.

mod common;

use common::planned_holds as holds;

/// A frozen write went on with one peer while another connected, whose last resync had ended unheard: both said
/// that nothing was marked, and the peer counted without the write.
#[test]
fn a_write_that_begins_during_a_handshake_is_marked_in_the_next_one() {
    let kinds = || (Some("takeover,crash,partition,reset"), Vec::new());
    holds(Some(3), 36_400_008, kinds(), "0-3", "0,9");
    holds(Some(3), 36_400_008, kinds(), "0-99", "0-999");
}

/// A client's frozen writes were sent again to the storage node that came back, and not to the one that this
/// node had brought up to date before it had them.
#[test]
fn what_is_sent_again_goes_to_those_who_came_since_as_well() {
    let kinds = || (Some("diskless,quorum,crash,partition,reset"), Vec::new());
    const REQUESTS: &str = "7,28-29,32,34,36-38,53-55,62,67";
    holds(Some(3), 90_013_188, kinds(), "0-1,3-4", REQUESTS);
}

/// A storage node was brought up to date by another one, away from the client that was Primary. It had the
/// generation that applications saw, and the client went on to write under it.
#[test]
fn a_node_that_caught_up_unseen_is_left_behind_by_a_new_generation() {
    let kinds = || (Some("diskless,quorum,crash,partition,reset"), Vec::new());
    const REQUESTS: &str = "7,28-29,32-34,36-38,42,48-51,53-64,66-70,73-85,87-107,178";
    holds(Some(3), 90_013_188, kinds(), "0-1,3-5,7,9", REQUESTS);
    holds(Some(3), 90_013_188, kinds(), "0-99", "0-999");
}
