//! Planned worlds that did not come to rest.

mod common;

use common::planned_holds;
use lockstep_sim::extras::Extra;

#[track_caller]
fn holds(nodes: usize, seed: u64, kinds: &str, faults: &str, requests: &str) {
    planned_holds(
        Some(nodes),
        seed,
        (Some(kinds), Vec::new()),
        faults,
        requests,
    );
}

const RESIZES: &str = "resize,crash,partition,powercut";

/// A follower sent its bitmap, and both were larger before it arrived, since a third node had come with a larger disk.
/// The target waited for the bits of the new area for ever, Outdated beside the Primary.
#[test]
fn a_size_that_changes_while_bitmaps_are_exchanged_ends_the_exchange() {
    holds(3, 33_700_001, RESIZES, "2-3,5-7", "0");
    holds(3, 33_700_001, RESIZES, "0-99", "0-999");
}

/// While the new size became durable on the Primary its follower met a third node and became its target. The Primary took
/// itself for the source of the new area all the same, and the follower waited for its bitmap for ever.
#[test]
fn who_has_become_the_target_of_another_node_does_not_copy_the_new_area() {
    holds(3, 1_320_000_018, RESIZES, "0,2-4,6", "14");
    holds(3, 1_320_000_018, RESIZES, "0-99", "0-999");
}

/// A node had been made smaller alone, and the other one, later, less small: the operator of the simulator named the
/// last size again, though no node lets a connection shrink what it uses (semantics.md, 22.4).
#[test]
fn nodes_that_were_made_smaller_apart_are_made_equal_by_the_operator() {
    holds(2, 77_000_231, RESIZES, "0,2-3,7", "none");
    holds(2, 77_000_231, RESIZES, "0-99", "0-999");
    holds(2, 90_002_294, RESIZES, "0-99", "0-999");
}

/// The Primary looked at the pair again while its disk grew: the follower was the target of the new area already, and
/// the Primary waited for its bitmap for ever.
#[test]
fn a_pair_whose_volume_grows_is_not_compared() {
    holds(2, 5_100_269, RESIZES, "3", "none");
    holds(2, 5_100_269, RESIZES, "0-99", "0-999");
}

/// Of three nodes one heard of an agreed size later than another one, which asked it for the new area already. That was
/// taken for a fault of the other one.
#[test]
fn whoever_is_ahead_with_a_size_makes_no_mistake() {
    for seed in [5_200_020, 5_200_054, 5_200_084, 5_200_118, 5_200_156] {
        holds(3, seed, RESIZES, "0-99", "0-999");
    }
}

/// A Primary without a disk announced a generation to a disk, the link broke before the answer, and the disk went
/// before the next handshake. When it came back, nobody knew its generation: it stayed Consistent, and the Primary's
/// own disk was refused for want of it.
#[test]
fn a_disk_that_took_an_announced_generation_is_known_when_it_comes_back() {
    let kinds = (Some("suspend,detach"), vec![Extra::Every, Extra::ShortLog]);
    planned_holds(Some(2), 90_012_045, kinds, "0-99", "0-999");
}

const TAKEOVER: &str = "takeover,crash,partition,reset";

/// A Primary announced a generation, a follower took it, and both died before it was made. The Primary came back with
/// another follower, which took the first one for newer and became its target: without a quorum the Primary could not
/// leave the announced generation behind, and refused the node that has it. Where both followers have it, the
/// operator demotes the frozen Primary.
#[test]
fn a_generation_that_was_announced_and_given_up_is_left_behind() {
    holds(3, 35_200_046, TAKEOVER, "0,3,6,16", "27,29");
    holds(3, 35_200_046, TAKEOVER, "0-99", "0-999");
}

/// A write came to its disk while its connection was being given up, and its ack waited for metadata. Another operation
/// ended first and with it the connection: the extent of the activity log was held for ever, and nobody told
/// the third node that two of them were equal there, so that one block was copied from both in turn.
#[test]
fn a_write_that_lands_while_its_connection_drains_is_settled() {
    holds(3, 36_400_057, TAKEOVER, "0-99", "0-999");
    let kinds = (
        Some("shuffle,shuffle,crash,handover"),
        vec![Extra::Every, Extra::Hot],
    );
    planned_holds(Some(4), 90_005_079, kinds, "0-99", "0-999");
}

/// A node was UpToDate at a generation that a client had seen left behind, and went on to the present one. That
/// changed nothing in its state, so no packet told the client, which called it Outdated for ever.
#[test]
fn a_disk_that_a_client_had_seen_left_behind_may_catch_up() {
    let kinds = (
        Some("diskless,quorum,crash,partition,reset"),
        vec![Extra::Every],
    );
    planned_holds(Some(5), 90_018_380, kinds, "0-99", "0-999");
}

/// A peer said late, over a slow link, that its new disk was Inconsistent, after the initial sync had been skipped. The
/// Primary made its first generation without it, and the next one with it: a split brain with a third node.
#[test]
fn what_was_said_before_the_initial_sync_was_skipped_does_not_count() {
    let kinds = (
        Some("shuffle,shuffle,crash,handover"),
        vec![Extra::Every, Extra::Hot],
    );
    planned_holds(Some(4), 95_002_243, kinds, "0-99", "0-999");
}

/// A node was promoted after its Primary had lost its power, and demoted before anybody had asked it for
/// anything. The dead Primary came back as the source, without what it had not flushed, which it may.
#[test]
fn a_successor_that_nobody_used_begins_no_generation() {
    let plain = || (None, Vec::new());
    planned_holds(Some(2), 88_600_665, plain(), "3,8", "0,23");
    planned_holds(Some(2), 88_600_665, plain(), "0-99", "0-999");
}

/// The target of a resync without replication got a write, then the source's bitmap with its mark, answered
/// with its own, and acked the write in sync. The ack was at the source before the bitmap, whose mark stayed.
#[test]
fn an_ack_that_overtakes_a_bitmap_clears_its_mark() {
    let plain = || (None, Vec::new());
    planned_holds(Some(2), 88_600_240, plain(), "0-99", "4,7-10,15,18-19");
    planned_holds(Some(2), 88_600_240, plain(), "0-99", "0-999");
    planned_holds(Some(2), 53_000_107, plain(), "0-99", "0-999");
}

/// A peer's operator ended a pause of resyncs while this node's disk was being attached: what the peer said counted for
/// the attach only, and the resync stayed paused for ever.
#[test]
fn the_end_of_a_pause_is_heard_during_an_attach() {
    planned_holds(None, 1378, (None, vec![Extra::Old]), "1,4,13", "5");
    planned_holds(None, 1378, (None, vec![Extra::Old]), "0-99", "0-999");
}

fn numb_holds(seed: u64, faults: &str, requests: &str) {
    let numb = "stall,stall,stall,disconnect,handover,detach";
    let kinds = (Some(numb), vec![Extra::Every, Extra::Numb]);
    planned_holds(Some(3), seed, kinds, faults, requests);
}

/// A stream of data stood still for longer than `twopc-timeout` while a node attached its disk: a peer heard of the
/// attach by a state packet alone, compared at once, and never said that it had heard. The disk stayed Negotiating, and
/// its peers waited for its bitmap.
#[test]
fn an_attach_whose_commit_came_too_late_is_answered() {
    numb_holds(120_000_544, "0-99", "0-999");
    numb_holds(120_006_576, "3,7,13,15,17", "11");
    numb_holds(120_006_576, "0-99", "0-999");
    numb_holds(88_900_103, "0,2", "60");
    numb_holds(88_900_103, "0-99", "0-999");
}

/// While a Primary noted the generation that it was about to announce, it sent its UUIDs for another reason. The
/// follower took the note for a generation that was given up, and did not answer when it was announced: the
/// generation was never made, and its requests and connections waited for ever.
#[test]
fn a_generation_that_is_about_to_be_announced_is_not_told_as_given_up() {
    numb_holds(98_004_653, "0", "0");
    numb_holds(98_004_653, "0-99", "0-999");
}

/// A volume was made smaller, one node started again, and knew the wanted size from its neighbour only. A third node
/// with the old size connected to it, and each kept its own.
#[test]
fn a_wanted_size_is_told_by_whoever_knows_it() {
    let kinds = "resize,cut-resize,crash,partition,powercut";
    holds(3, 99_001_635, kinds, "2,7,10,13,15-16,18", "2");
    holds(3, 99_001_635, kinds, "0-99", "0-999");
}

/// A target followed a third node to a smaller size, and its source, which used the larger one, broke the connection.
#[test]
fn a_target_stays_as_large_as_its_source() {
    let kinds = (Some(RESIZES), vec![Extra::Internal]);
    planned_holds(Some(3), 28, kinds, "0-99", "0-999");
}

const STALLS: &str = "stall,stall,stall,disconnect,handover,detach";

/// A Primary without a disk waited until a Consistent peer had taken its generation. Such a peer takes none.
#[test]
fn only_whole_disks_confirm_what_a_client_exposes() {
    let kinds = || (Some(STALLS), vec![Extra::Every, Extra::Numb]);
    planned_holds(Some(3), 120_010_607, kinds(), "0,2,5-6,8-9", "15,23,27");
    planned_holds(Some(3), 120_010_607, kinds(), "0-99", "0-999");
}

/// The operator threw a replica away, as a whole and again by its marks. The second resync began before the first had
/// marked everything, so the call for a full one stayed in the metadata, and the next attach marked all blocks.
#[test]
fn a_full_sync_that_begins_is_replaced_by_none_by_bitmap() {
    let kinds = || (Some("invalidate,reset"), vec![Extra::Csums, Extra::Blocks]);
    planned_holds(Some(2), 113, kinds(), "0,4,7", "0");
    planned_holds(Some(2), 113, kinds(), "0-99", "0-999");
}

/// Three nodes grew twice, and came together in turn. One of them was still in a handshake with a smaller size when
/// another one, which had room, followed the Primary: the Primary blamed that one, and left it.
#[test]
fn only_who_has_less_room_is_blamed_for_it() {
    let kinds = "resize,cut-resize,crash,partition,powercut";
    holds(3, 141_000_344, kinds, "0-99", "0-999");
}

/// In the dialect of 8.4 a crashed Primary compared with a disk that was being attached, and knew of itself that it had been
/// connected before. That is not told in that dialect: the disk waited for a bitmap that nobody sent.
#[test]
fn an_attach_is_compared_by_what_both_were_told() {
    let kinds = Some("readerror,writeerror,flusherror,metaerror,crash,reset");
    let old = || (kinds, vec![Extra::Old]);
    planned_holds(None, 121_000_047, old(), "8-10,16", "none");
    planned_holds(None, 121_000_047, old(), "0-99", "0-999");
}

/// In the dialect of 8.4 a link broke when not all volumes of a promotion had been asked for. The questions that were left were
/// kept until the next change.
#[test]
fn questions_of_a_broken_link_are_not_kept() {
    planned_holds(Some(2), 910_001_984, (None, vec![]), "7,13", "2,4,6");
    planned_holds(Some(2), 910_001_984, (None, vec![]), "0-99", "0-999");
}

/// Frozen writes of two epochs were sent once more to a peer. Nothing ended the second one there, and the Primary met nobody
/// else before it was.
#[test]
fn an_epoch_that_is_sent_late_is_ended() {
    planned_holds(Some(4), 2_500_000_678, (None, Vec::new()), "0-99", "0-999");
}
