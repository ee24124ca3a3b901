//! What worlds of `soak` have shown.

mod common;

use lockstep_sim::extras::Extra;

use common::planned_holds;

fn holds(
    seed: u64,
    nodes: Option<usize>,
    kinds: Option<&str>,
    extras: &[Extra],
    faults: &str,
    requests: &str,
) {
    planned_holds(nodes, seed, (kinds, extras.to_vec()), faults, requests);
}

/// The look at the own disk was for a peer with a new size, and ended when that was lost: what the peer had told
/// before ended the next connection for good.
#[test]
fn the_size_of_a_peer_that_is_lost_is_not_followed() {
    let kinds = "resize,cut-resize,crash,partition,powercut";
    holds(771000003321, Some(3), Some(kinds), &[], "0-1", "30-35");
}

/// A resync was paused and went on from the first mark, with requests of other sizes than those in flight: a block
/// was asked for twice.
#[test]
fn a_resync_that_goes_on_asks_for_nothing_that_is_in_flight() {
    let kinds = "invalidate,invalidate,pause,reset,crash";
    let extras = [Extra::Turns, Extra::Every];
    holds(771000000368, Some(2), Some(kinds), &extras, "none", "0-999");
}

/// Checks that were wrong: a disk that was opened after a write does not fail it, and a volume that is smaller by its
/// metadata marks what is new when it grows.
#[test]
fn disks_that_come_and_grow_are_seen_as_they_are() {
    let kinds = "hangdisk,freeze,freeze,reset";
    let every = [Extra::Every];
    holds(
        771000000901,
        Some(2),
        Some(kinds),
        &every,
        "19,21",
        "114,126-128",
    );
    let kinds = "resize,cut-resize,crash,partition,powercut";
    let requests = "156,158-159,222-224,226,231";
    holds(
        771000004920,
        Some(3),
        Some(kinds),
        &[],
        "0-2,9-12",
        requests,
    );
}

/// A commit came after the node had given that transaction up. It took the new Primary for a Secondary until the
/// connection was made anew, for whatever reason.
#[test]
fn who_gave_up_what_was_committed_connects_again() {
    let kinds = "stall,stall,stall,disconnect,handover,detach";
    let extras = [Extra::Every, Extra::Numb];
    holds(771000010405, Some(3), Some(kinds), &extras, "2-4,7", "none");
}

/// What a peer had said of its disk before it heard that the initial sync is skipped came during a verify, and was
/// taken for its disk's end: writes were marked and not sent, and then the disk counted as UpToDate without them.
#[test]
fn an_old_word_of_a_new_disk_does_not_count_in_a_verify_either() {
    let kinds = "verifyspot,verifyspot,verifyspot,handover,disconnect";
    let extras = [Extra::Every, Extra::Hot];
    holds(
        773000007016,
        Some(2),
        Some(kinds),
        &extras,
        "0-1",
        "2-3,8-11",
    );
}

/// Two Primaries each made a generation: one was durable when the disk had the other one already, and stayed known as
/// one that had not been made.
#[test]
fn a_generation_is_made_also_when_the_next_one_is_there_already() {
    let two = [Extra::TwoPrimaries];
    holds(773000005967, None, None, &two, "6-7", "480-481");
    holds(860000015, None, None, &two, "0-999", "0-9999");
    let extras = [Extra::TwoPrimaries, Extra::TieBreaker];
    holds(
        771000007866,
        Some(2),
        None,
        &extras,
        "1-4,8,22",
        "0,7,9,12-25",
    );
}

/// A disk came back that had been larger than the volume is by now: its marks behind the end were asked for for ever.
#[test]
fn a_disk_that_comes_back_to_a_smaller_volume_has_no_marks_behind_its_end() {
    let kinds = "resize,cut-resize,crash,partition,powercut";
    holds(
        775000006576,
        Some(3),
        Some(kinds),
        &[],
        "0-1,5,7-8,10-11",
        "0,10",
    );
}

/// A third node had followed a generation that was given up when the next one was announced: its neighbour took it for
/// another branch.
#[test]
fn who_follows_an_announced_generation_knows_which_were_given_up() {
    let kinds = "handover,handover,handover,stall,reset,partition,crash,powercut";
    let extras = [Extra::Migrations, Extra::Every, Extra::Hot];
    holds(
        771000012007,
        Some(2),
        Some(kinds),
        &extras,
        "0-1,3",
        "268,277-278",
    );
}

/// An Outdated disk met its equal, whose news of a newer generation were on a slow wire, and became UpToDate beside the
/// Primary without a disk that served that one.
#[test]
fn nobody_becomes_current_beside_a_client_of_another_generation() {
    let kinds = "stall,stall,stall,disconnect,handover,detach";
    let extras = [Extra::Every, Extra::Numb];
    holds(
        774000007424,
        Some(3),
        Some(kinds),
        &extras,
        "1,3,6-8",
        "1,23-25",
    );
}

/// A target had two sources, of which one fell back. When the other one's copy was complete it went on with the older
/// one, and replaced what a Primary had written meanwhile.
#[test]
fn a_source_that_fell_back_is_not_copied_behind_a_better_one() {
    let kinds = "diskless,quorum,crash,partition,reset";
    let requests = "0-2,40-49,52-62,64-70,72-74,151-154,164-177,181-183,185-190,200,203-205";
    let faults = "0-2,4-6,8,16";
    let every = [Extra::Every];
    holds(773000004898, Some(5), Some(kinds), &every, faults, requests);
}

/// A tie-breaker stood in for a second copy until the next change of members, which was the commit of the promotion
/// itself: a node became Primary without quorum.
#[test]
fn nobody_loses_quorum_by_the_own_promotion() {
    let kinds = "diskless,quorum,crash,partition,reset";
    holds(774000010067, Some(3), Some(kinds), &[], "1,3", "none");
}

/// Checks that were wrong: a majority had a write before it went out of reach, handlers took their time, and a crash at
/// the moment when the protocol was changed left the ends with different ones.
#[test]
fn what_takes_long_or_was_told_before_is_no_fault() {
    let kinds = "diskless,quorum,crash,partition,reset";
    let requests = "5,7-12,14-25,27-40,50,52-58,282";
    let every = [Extra::Every];
    holds(774000010888, Some(5), Some(kinds), &every, "2,7", requests);
    holds(775000001675, Some(2), None, &[Extra::Handlers], "1-3", "6");
    let kinds = "protocol,protocol,stall,crash,reset,handover";
    let extras = [Extra::Every, Extra::Hot];
    holds(775000003589, Some(2), Some(kinds), &extras, "0-2,5", "none");
}

/// One source made another one stable, whose Primary the target did not reach, and fell back itself. The copy of the
/// other one was taken for final all the same: a disk that no Primary wrote to was UpToDate.
#[test]
fn a_source_that_fell_back_makes_no_other_one_stable() {
    holds(3600000276, Some(4), None, &[], "0-999", "0-9999");
}

/// A disk was taken away by force while nodes were asked about its attach, and attached again. The old question was
/// answered, and the new disk took part before its metadata were read: its bitmap never came.
#[test]
fn an_attach_that_was_taken_back_does_not_end_the_next_one() {
    let kinds = "detach,detach,detach,stall,slowdisk,reset";
    holds(774000009212, None, Some(kinds), &[], "5,9-11,13-15", "61");
}

/// A look at a disk's size was answered later than one that had been asked for after it: the disk was said to have shrunk.
#[test]
fn what_an_earlier_look_saw_is_over_when_a_later_one_was_answered() {
    let kinds = "resize,cut-resize,crash,partition,powercut";
    let of = |seed, nodes, faults| holds(seed, Some(nodes), Some(kinds), &[], faults, "none");
    of(779000006838, 3, "0,3,13,16");
    of(774000005649, 2, "0-5");
    of(778000004825, 3, "10-11,13");
}

/// A Primary that was being copied was not compared with a disk that came back, and that disk took itself for UpToDate,
/// without what the Primary had written meanwhile; then so did the Primary.
#[test]
fn a_disk_that_attaches_beside_a_primary_target_waits_for_its_end() {
    let kinds = "detach,detach,detach,stall,slowdisk,reset";
    holds(779000001196, None, Some(kinds), &[], "0-999", "0-9999");
}

/// A Primary's own disk was written under a generation that only that node had seen, and lived. One of the others had
/// lost its power, the third one was copied from it, and had more marks: it was taken for the better one.
#[test]
fn who_left_another_one_behind_is_not_copied_from_it() {
    holds(779000004391, None, None, &[], "0,10-12", "0-28");
}

/// A write was made again, because the only whole disk was going. The next peer ack of another write said that all had
/// the first attempt.
#[test]
fn peers_hear_what_became_of_each_attempt_of_a_write() {
    let extras = [Extra::Every, Extra::ShortLog];
    let requests = "12,18-19,162,168,187";
    let kinds = "suspend,detach";
    holds(
        779000000346,
        Some(2),
        Some(kinds),
        &extras,
        "4,7-8",
        requests,
    );
    holds(700125842, Some(2), None, &[], "0-999", "0-9999");
}

/// A generation was given up with its disk, whose superblock had it. The first attach knew that and was refused; the
/// second one found the generation on the disk, and took it for another branch.
#[test]
fn a_generation_that_was_given_up_stays_so_until_the_disk_says_it() {
    let kinds = "detach,detach,detach,stall,slowdisk,reset";
    holds(775000009831, None, Some(kinds), &[], "0-999", "0-9999");
}

/// A Primary without a disk had shown a generation that only a lost disk had. Its own one came back, was copied from a
/// disk that was older still, and the Primary went on with that.
#[test]
fn a_primary_is_not_copied_from_what_is_older_than_it_has_shown() {
    let kinds = "detach,detach,detach,stall,slowdisk,reset";
    holds(773000001131, None, Some(kinds), &[], "0-999", "0-9999");
}

/// A check that was wrong: what one of two Primaries had sent before it died is written behind the other one's own write.
#[test]
fn a_dead_primary_s_write_may_come_last() {
    let requests = "12-13,18,21,23-24,31-35,38-46,49,51-58,60,62-69,71-73,100,103";
    holds(
        779000005499,
        None,
        None,
        &[Extra::TwoPrimaries],
        "1",
        requests,
    );
}

/// A source's bitmap had come for a disk that was going, and was taken for that of the next resync: the new disk did
/// not wait for it.
#[test]
fn a_bitmap_that_came_for_another_disk_does_not_count() {
    holds(776000006673, None, None, &[Extra::Old], "0-999", "0-9999");
}

/// A follower took a new generation before it knew that the Primary has it, and copied marks of another node towards
/// that Primary, which stayed for ever. While that was so nobody vouched for the rest, and third nodes were copied from
/// each other in turn, all of their blocks each time.
#[test]
fn a_primary_that_others_follow_is_not_behind_them() {
    let kinds = "promote,promote,disconnect,handover,detach,invalidate,suspend";
    let every = [Extra::Every];
    holds(
        776000002542,
        Some(3),
        Some(kinds),
        &every,
        "0-999",
        "0-9999",
    );
}

/// A Primary that waits for the answer to a generation that it has announced compared with the follower by news from
/// before, which were on a slow wire.
#[test]
fn a_primary_compares_after_its_followers_have_answered() {
    let kinds = "stall,stall,stall,disconnect,handover,detach";
    let extras = [Extra::Every, Extra::Numb];
    holds(776000011942, Some(3), Some(kinds), &extras, "1-2", "27-28");
    let kinds = "verifyspot,verifyspot,verifyspot,stall,stall,slowdisk,handover";
    let extras = [Extra::Every, Extra::Hot];
    holds(774000015123, Some(3), Some(kinds), &extras, "0-999", "0");
}

/// A Consistent disk compared with a Primary whose disk was being copied, by the name of what that one served.
#[test]
fn a_primary_that_is_copied_itself_is_not_asked() {
    let kinds = "stall,stall,stall,disconnect,handover,detach";
    let extras = [Extra::Every, Extra::Numb];
    holds(773000006149, Some(3), Some(kinds), &extras, "0-5,10", "0-1");
}

/// A target waited for the bitmap of a second source when the first one had brought it beyond that: it was copied back to
/// the older data.
#[test]
fn a_source_that_was_passed_meanwhile_copies_nothing() {
    let kinds = "diskless,quorum,crash,partition,reset";
    let every = [Extra::Every];
    let faults = "1-2,4-5,8-9";
    holds(772000000100, Some(5), Some(kinds), &every, faults, "3-5,8");
}

/// A follower of a generation that was announced in vain was copied from its Primary, and met another follower.
#[test]
fn who_came_back_from_an_announced_generation_is_the_source() {
    let kinds = "diskless,quorum,crash,partition,reset";
    let every = [Extra::Every];
    let faults = "1-3,10";
    holds(772000004271, Some(5), Some(kinds), &every, faults, "2-3,5");
}

/// What an attempt to connect was refused for counted in the next one, though the peer had grown since.
#[test]
fn a_refusal_does_not_outlive_its_attempt() {
    let kinds = "resize,cut-resize,crash,partition,powercut";
    holds(774000016043, Some(3), Some(kinds), &[], "0-999", "0-999");
}

/// Errors of the simulated operator: a generation by command on a disk that is not current is a second branch.
#[test]
fn only_current_data_get_a_generation_by_command() {
    let handlers = [Extra::Handlers];
    let requests = "57-58,60,67-70";
    holds(
        776000008731,
        Some(2),
        None,
        &handlers,
        "2-3,5,14-15,17",
        requests,
    );
}

/// A Primary whose own disk was being copied came back as the one that had announced what the others followed, and was to
/// be their source.
#[test]
fn who_is_copied_itself_is_no_source_of_its_followers() {
    holds(773000013440, None, None, &[], "1,7", "0");
}

/// A node without a disk heard of a newer generation before the disk that has it was whole, and served the older one.
#[test]
fn a_client_goes_by_what_a_disk_has_when_it_becomes_whole() {
    let kinds = "shuffle,diskless,crash";
    let extras = [Extra::Every, Extra::Hot];
    let faults = "8-9,12-15";
    holds(773000014514, Some(4), Some(kinds), &extras, faults, "98-99");
}

/// A survivor that was Outdated had more of the lost Primary's writes than the one that went on, and both said so. Where
/// they did not compare, it was copied over, and acknowledged writes were gone.
#[test]
fn an_outdated_survivor_has_its_part_in_a_reconciliation() {
    holds(783000010029, Some(3), None, &[], "0-999", "0-9999");
}

/// A Primary without a disk had announced a generation, and its follower, the only whole one, became the target of the
/// Primary's disk as that was attached, which became the target of one that the follower was copying: none was whole.
#[test]
fn a_disk_that_comes_back_follows_who_served_its_primary() {
    let kinds = "detach,detach,detach,stall,slowdisk,reset";
    holds(779300002009, None, Some(kinds), &[], "0-999", "0-9999");
}

/// A check that was wrong: a flush was asked for while the Primary had no disk, and failed with the peer that it had gone
/// to.
#[test]
fn a_disk_that_comes_after_a_flush_does_not_answer_it() {
    let kinds = "detach,detach,detach,stall,slowdisk,reset";
    holds(778000000987, None, Some(kinds), &[], "0-2,4", "3,8-11");
}

/// A source with larger bitmap blocks marked a write for its target, which marked what it was told, and was copied the
/// rest of the source's block as well: a third node would not have heard of that from it.
#[test]
fn a_target_marks_all_that_a_told_mark_makes_it_ask_for() {
    let requests = "6,9,11,13-18,41-76,81,94";
    holds(782000012188, None, None, &[Extra::Blocks], "1,3", requests);
}

/// A target's disk was detached while its source asked its handler, which kept that as the end of the resync, and ended
/// the next one with it.
#[test]
fn the_end_of_a_resync_is_not_that_of_the_next_one() {
    let handlers = [Extra::Handlers];
    holds(782000027041, Some(2), None, &handlers, "0,12", "0,2");
}

/// Two Secondaries with marks became target of each other, as one of them was outdated by a third node meanwhile, and
/// connected again.
#[test]
fn two_targets_of_each_other_stay_connected() {
    let faults = "5,9,11,13-14,20";
    holds(782000006699, None, None, &[], faults, "19-20,25");
}

/// A resync ended while its target met a client, which knew its generation and not what came before, and took another
/// disk for one that had parted from it.
#[test]
fn a_client_hears_what_a_resync_brought_while_it_connected() {
    let kinds = "shuffle,diskless,crash";
    let extras = [Extra::Every, Extra::Hot];
    holds(782000019388, Some(4), Some(kinds), &extras, "0-7", "1-6,12");
}

/// A Primary whose disk came back left a connected, Consistent node behind in its next generation, wrote alone and
/// was demoted; that node became UpToDate beside a third one before the two compared again.
#[test]
fn who_is_left_behind_is_copied_at_once() {
    let kinds = "stall,stall,stall,disconnect,handover,detach";
    let extras = [Extra::Every, Extra::Numb];
    holds(
        786000001199,
        Some(3),
        Some(kinds),
        &extras,
        "0-2,4,10,15-16",
        "0-1,4-5,33-34",
    );
}

/// A connection ended for good as a split brain by what a disk had been before it was copied from a third node.
#[test]
fn what_a_disk_was_before_it_was_copied_ends_no_connection() {
    let kinds = "stall,stall,stall,disconnect,handover,detach";
    let extras = [Extra::Every, Extra::Numb];
    let requests = "0,2,8,10,14";
    holds(
        782000009219,
        Some(3),
        Some(kinds),
        &extras,
        "0-1,6-7",
        requests,
    );
    let kinds = "detach,stall,slowdisk,reset";
    holds(794000000265, Some(3), Some(kinds), &[], "20", "19,22,24");
}

/// A Primary lost its disk with a generation that it had announced: it refused who had taken that. Then it refused
/// whom its attached disk had marks for.
#[test]
fn a_primary_whose_disk_comes_back_meets_who_took_its_generation() {
    holds(795000000859, Some(3), None, &[], "0-1,10-11,14", "0");
    let kinds = "stall,stall,stall,disconnect,handover,detach";
    let extras = [Extra::Every, Extra::Numb];
    let faults = "9-10,14-19,21,23";
    holds(
        792000010489,
        Some(3),
        Some(kinds),
        &extras,
        faults,
        "14-15,23,26",
    );
}

/// With protocol B a former Primary that had lost its cache with its power was copied over its peer.
#[test]
fn with_protocol_b_nobody_is_copied_over_who_has_been_here_all_the_time() {
    let kinds = "hangdisk,reset,partition,crash,powercut,handover,invalidate";
    let extras = [Extra::Blocks];
    holds(792000016051, Some(2), Some(kinds), &extras, "0,2,4", "27");
}

/// A block could not be read, and its mark was in memory only: neither disk knew that they differ there.
#[test]
fn a_block_that_cannot_be_read_is_marked_on_disk() {
    let kinds = "badblock,badblock,crash,reset";
    holds(
        792000024443,
        Some(2),
        Some(kinds),
        &[Extra::Every],
        "0",
        "113",
    );
}

/// Two stalls of a stream, the second one shorter: a check took what the first one held for rest.
#[test]
fn what_a_stream_holds_is_no_rest() {
    let kinds = "detach,detach,detach,stall,slowdisk,reset";
    holds(792000021502, None, Some(kinds), &[], "0,4", "27");
}

/// The only disk that there is stayed Outdated beside clients: there was no disk that it would have compared with.
#[test]
fn the_only_disk_beside_clients_is_not_outdated_for_ever() {
    let kinds = "diskless,quorum,crash,partition,reset";
    holds(798000000291, Some(3), Some(kinds), &[], "4-8", "none");
}

/// A Primary wrote without a node that had not noticed, and gave its role up: a client took over and read there.
#[test]
fn a_client_does_not_read_from_who_was_left_behind() {
    let kinds = "diskless,quorum,crash,partition,reset";
    holds(792000012558, Some(3), Some(kinds), &[], "0-99", "2,11,21");
}

/// Two survivors of a Primary, one of which had lost it first, was Outdated and had more: the other one followed it,
/// and both stayed Outdated until the Primary was back.
#[test]
fn survivors_give_each_other_what_they_have_though_one_is_outdated() {
    let requests = "547,573-574,579-580,591,593,595,597";
    holds(3100001254, Some(3), None, &[], "0", requests);
    holds(796000000696, Some(3), None, &[], "0,14,16", "0");
}

/// An Outdated disk followed a neighbour of its generation, beside a Primary without a disk that had served a newer
/// one: that Primary read there, and its next generation began without what it had written.
#[test]
fn a_client_is_asked_before_an_outdated_disk_counts_again() {
    let kinds = "shuffle,diskless,crash";
    let extras = [Extra::Every, Extra::Hot];
    let requests = "37,155,157,159";
    holds(795000000556, Some(4), Some(kinds), &extras, "0-5", requests);
}

/// With protocol A a frozen Primary gave its disk away by command while a slow peer had not flushed what was
/// acknowledged, and all lost their power.
#[test]
fn a_frozen_primary_gives_its_disk_away_when_its_peers_have_everything() {
    let requests = "1-3,6,8,13-14";
    holds(884000766, Some(3), None, &[], "10,13,17,20", requests);
}

/// A target copied a write that a third node lacked, lost its source and was copied from that node: the source
/// forgot that the two differ, and nothing was marked.
#[test]
fn who_copied_a_write_is_marked_until_everybody_has_it() {
    holds(799500000326, Some(3), None, &[], "0,3,5-6,8", "14-15");
}

/// Two whole disks that differed waited for a third one, which was being copied from one of them and could not tell.
#[test]
fn a_resync_that_is_served_does_not_keep_two_disks_different() {
    let requests = "153-154,164,175,194,196-197,219,221-223,540-542,544";
    holds(801100000223, Some(4), None, &[], "0-1,4,8,10-11", requests);
}

/// A Primary that was being copied announced a generation to end a suspension. Its disk became current before the answer came,
/// and did not note what it had announced: the node that took it had diverged.
#[test]
fn a_disk_that_becomes_current_during_a_suspension_notes_what_was_announced() {
    const SEED: u64 = 797_000_012_554;
    let extras = [Extra::Every, Extra::ShortLog];
    let kinds = Some("suspend,detach");
    holds(SEED, Some(2), kinds, &extras, "1-2,4", "2-7,9-11");
    holds(SEED, Some(2), kinds, &extras, "0-99", "0-999");
}

/// A write failed at a node that had no disk for a moment, and was sent again. The ack of its epoch came after the resync, and
/// marked it at the source.
#[test]
fn a_write_that_failed_at_the_source_is_part_of_its_resync() {
    const SEED: u64 = 792_000_019_422;
    let extras = [Extra::Every, Extra::ShortLog];
    let kinds = Some("suspend,detach");
    let requests = "28,42-43,45-49,51-56,61-62,69-74";
    holds(SEED, Some(2), kinds, &extras, "0,3,7,9-10,14", requests);
    holds(SEED, Some(2), kinds, &extras, "0-99", "0-999");
}

/// Two followers had marks between them. One took the generation of a Primary without a disk and compared them, while that
/// generation was still on its way to the other one: both wanted to be the source, and dropped their connection.
#[test]
fn marks_are_compared_when_both_have_the_generation_of_their_primary() {
    let kinds = Some("diskless,quorum,crash,partition,reset");
    let requests = "0,1,15,18,78,79,89";
    let extras = [Extra::Every];
    holds(799_300_000_389, Some(4), kinds, &extras, "0-3,5", requests);
}

/// A Primary without a disk had not heard yet that a disk was whole, sent it no writes, and named what it wrote. That disk took the
/// name, and counted as whole without what was written.
#[test]
fn a_target_that_gets_no_writes_takes_no_name_of_a_primary_without_a_disk() {
    const SEED: u64 = 815_000_001_562;
    let extras = [Extra::Every, Extra::Hot];
    let kinds = Some("shuffle,diskless,crash");
    holds(SEED, Some(4), kinds, &extras, "0,2-4", "0,20,22");
    holds(SEED, Some(4), kinds, &extras, "0-99", "0-999");
}

/// A flush passed the generation of a promotion, and what the former Primary had acknowledged was in its cache still.
#[test]
fn a_flush_waits_for_the_generation_of_a_promotion() {
    holds(2513025637, Some(2), None, &[], "0-99", "0-999");
}

/// A write of one Primary was in its cache and at the other one, which flushed: only its own disk. Both lost their power, and the
/// first one was the source.
#[test]
fn a_flush_reaches_what_the_other_primary_has_written() {
    let extras = [Extra::TwoPrimaries, Extra::TieBreaker];
    holds(782_000_001_350, Some(2), None, &extras, "0-99", "0-999");
    let extras = [Extra::Migrations, Extra::Every, Extra::Hot];
    let kinds = Some("handover,handover,handover,stall,reset,partition,crash,powercut");
    holds(812_000_000_079, Some(2), kinds, &extras, "0-99", "0-999");
}

/// A Primary wrote what it did not send, since bitmaps travelled. The target copied it, and marked the third node; the late ack of
/// an older write to the same block, which all three had, cleared that mark.
#[test]
fn the_ack_of_a_write_clears_no_mark_of_a_newer_copy() {
    let requests = "5-11,13,18,27,29,31,46,49,57,63,65,75-76,78,91,93-94";
    holds(851_100_000_171, Some(3), None, &[], "2,6,12", requests);
    holds(851_100_000_171, Some(3), None, &[], "0-99", "0-999");
}
