//! Planned worlds in which a node took over from another one and both were there a moment later.

mod common;

use lockstep_sim::extras::Extra;

use common::planned_holds;

#[track_caller]
fn holds(seed: u64, faults: &str, requests: &str) {
    let takeover = Some("takeover,crash,partition,reset");
    planned_holds(Some(3), seed, (takeover, Vec::new()), faults, requests);
}

/// A Primary was frozen without quorum and another node took over. The third one lost that one as well and met the
/// frozen Primary, which has a majority with it. The new Primary had lost its own and hears of it by a ping: what
/// it writes until then is not completed, and the simulator counted it.
#[test]
fn a_primary_whom_most_have_left_does_not_count_before_it_knows() {
    holds(95_000_361, "2-3,6", "none");
    holds(95_000_361, "0-99", "0-999");
}

/// The same with marks on both sides, of the same generation: a split brain was reported, and both were left alone.
/// Now the connection is refused because there are two Primaries, and tried again.
#[test]
fn two_primaries_of_one_generation_are_no_split_brain() {
    holds(88_200_140, "0-1", "0");
    holds(88_200_140, "0-99", "0-999");
    holds(88_200_194, "0-99", "0-999");
}

/// A target acknowledged the last write that the end of its resync waited for, and went on to the generation of its
/// next source in the same step. The simulator asked whether the metadata said so, but the ack was of before.
#[test]
fn an_ack_that_ends_a_resync_is_of_the_generation_before() {
    holds(88_200_486, "0-2,4-5,9", "2,4-5,30-31");
    holds(88_200_486, "0-99", "0-999");
    holds(35_200_052, "0-1,9", "0,3,13");
    holds(35_200_052, "0-99", "0-999");
}

/// Two nodes had been Primary without quorum. They were demoted, and brought up to date, and called themselves that
/// for ever: when the next Primary was demoted, followers resynced for nothing, each by its own view.
#[test]
fn a_node_that_was_brought_up_to_date_has_lost_no_quorum() {
    holds(88_200_298, "0-99", "0-999");
}

/// A frozen Primary hears through the third node that another one has taken over, and is not let in before its operator
/// demotes it. The simulator wanted it to give up its disk.
#[test]
fn a_frozen_primary_waits_for_its_operator() {
    holds(648_844_001_711, "0,16", "8");
    holds(648_844_001_711, "0-99", "0-999");
}

#[track_caller]
fn with_clients(seed: u64) {
    let kinds = Some("diskless,crash,partition,reset,takeover");
    planned_holds(Some(3), seed, (kinds, Vec::new()), "0-99", "0-999");
}

/// A frozen Primary was told to become Primary, which it was: the simulator wanted it to have quorum for that.
#[test]
fn a_frozen_primary_stays_one_when_it_is_promoted() {
    with_clients(856_300_000_250);
}

/// A Primary was frozen and others went on without it, until the last one of them was demoted. They have newer data,
/// which it does not take under its users, and as long as it has the role nobody is promoted, or the neighbour of a
/// node that has met it is Outdated. The simulated operator waited for ever.
#[test]
fn a_frozen_primary_that_all_have_left_is_demoted() {
    with_clients(5_863);
    with_clients(798_000_000_184);
    with_clients(798_000_000_430);
    with_clients(856_300_000_107);
    with_clients(856_300_000_167);
    with_clients(856_300_000_399);
}

/// A frozen Primary that may give way met a follower of its successor, which had written nothing that was marked. That
/// one refused, as there were two Primaries, and the frozen one, which had not begun the handshake, was not told why.
#[test]
fn a_frozen_primary_gives_way_to_a_successor_beyond_its_peer() {
    with_clients(798_000_000_095);
}

/// A frozen client had a write on one disk. The other one, which it took for Outdated because of that, met it and then
/// the first: as somebody who follows a Primary it was the source, and the write, which the client counted on, was gone.
#[test]
fn a_follower_that_lacks_a_frozen_write_is_not_the_source_of_one_that_has_it() {
    with_clients(5_212);
}

/// A migration's target had taken over from a Primary that it had lost, and which had not noticed that yet. The simulated
/// operator took its death for that of the Primary, which nobody demoted any more.
#[test]
fn a_primary_whose_guest_dies_early_is_still_one() {
    migrations(64);
}

/// Another node had taken over, had nothing to do, and was left by most; the frozen Primary met them and went on. The
/// simulated operator still took the successor for the Primary.
#[test]
fn a_frozen_primary_goes_on_when_its_successor_is_left() {
    holds(795_000_000_172, "0-99", "0-999");
    holds(874_000_005_274, "0-99", "0-999");
}

/// A demotion waited for the requests of a frozen Primary, and the simulated operator for the demotion, while the others
/// had newer data.
#[test]
fn a_demotion_that_waits_for_frozen_requests_is_forced() {
    migrations(227);
    migrations(874_000_003_282);
    let quorum = Some("diskless,quorum,crash,partition,reset");
    planned_holds(
        Some(3),
        773_000_000_879,
        (quorum, Vec::new()),
        "0-99",
        "0-999",
    );
    let handovers = Some("handover,handover,handover,stall,reset,partition,crash,powercut");
    let hot = || vec![Extra::Migrations, Extra::Every, Extra::Hot];
    for (nodes, seed) in [
        (2, 773_000_010_047),
        (2, 778_000_004_655),
        (3, 830_000_002_158),
    ] {
        planned_holds(Some(nodes), seed, (handovers, hot()), "0-99", "0-999");
    }
}

/// A node became stable by a demotion, and told it with a generation that was not durable there yet.
#[test]
fn a_node_that_becomes_stable_names_no_generation_before_it_is_durable() {
    migrations(1_898_000_117);
    // Here it compares.
    let kinds = Some("takeover,crash,partition,reset,powercut");
    planned_holds(Some(4), 1_898_200_330, (kinds, Vec::new()), "0-99", "0-999");
}

/// A Secondary lost a node that it took for the Primary, and that was none any more: it was Outdated, and beside a Primary
/// without a disk nobody said that it has everything.
#[test]
fn a_disk_that_is_as_good_as_its_neighbours_meets_the_client_anew() {
    migrations(1_894_000_096);
}

/// All whole disks were Outdated, of one generation, and no Primary was left; a third disk, an older one, was being copied,
/// and was taken for one that may have newer data.
#[test]
fn outdated_disks_do_not_wait_for_an_older_one_that_is_not_whole() {
    migrations(1_898_000_165);
}

/// A node without a disk called two disks Outdated, which were at a generation that it had outlived. It met a third one
/// later, exposed that generation, and went on calling the two Outdated.
#[test]
fn disks_that_a_client_called_outdated_are_not_when_it_exposes_what_they_have() {
    migrations(1_898_100_147);
}

#[track_caller]
/// A frozen Primary with older data met the nodes that had gone on without it: through a node without a disk, so that they
/// called themselves Outdated, and in handshakes that were refused. It counted them as Outdated, itself as the last one,
/// and went on.
#[test]
fn who_has_gone_on_from_a_frozen_primary_does_not_give_it_quorum() {
    migrations(1_899_740_271);
}

/// A Primary whose own disk was Outdated used that of a peer, and had written to it under a new generation. The next node
/// that came was as old as its own disk, which became a target of that one, and reads and writes used both.
#[test]
fn a_primary_beside_its_old_disk_uses_no_other_old_one() {
    migrations(1_899_840_203);
}

/// A target ended its resync while the Primary without a disk waited for its vote, and kept the older name.
#[test]
fn a_target_that_ends_while_it_is_asked_is_told_the_new_name() {
    migrations(1_899_860_014);
}

/// A frozen write was made again beside a resync. A peer that had it from the first time heard nothing of it any more,
/// and kept its extents for ever.
#[test]
fn a_write_that_is_made_again_is_told_of_as_well() {
    migrations(1_899_863_718);
}

/// Of two peers of one generation one noted another generation as announced, the other one as made. A node without a disk
/// called the first one Outdated for that, and UpToDate as it was of the generation of the other, and so on: it hung.
#[test]
fn a_client_makes_up_its_mind_about_two_peers_of_one_generation() {
    migrations(1_899_866_127);
}

/// A node without a disk exposed what a peer told, and went on calling another peer Outdated, which had told the same before.
#[test]
fn a_client_that_is_told_another_generation_looks_at_all_peers_again() {
    migrations(1_899_940_294);
}

/// A target met the Primary, which has no disk, in the middle of its resync. What that one had written to the source alone
/// was not settled, and the target was whole before the source told it of that.
#[test]
fn a_target_asks_a_primary_that_comes_for_what_it_lacks() {
    migrations_of(4, 1_899_950_074);
}

/// Frozen writes of one volume were sent again before earlier ones of another volume. A peer that heard of the later ones
/// took the earlier ones for arrived, and was the source of a resync without them.
#[test]
fn frozen_writes_are_sent_again_in_their_order() {
    migrations(1_899_864_359);
}

#[track_caller]
fn migrations(seed: u64) {
    migrations_of(3, seed);
}

#[track_caller]
fn migrations_of(nodes: usize, seed: u64) {
    let kinds = Some("handover,handover,diskless,quorum,crash,partition,reset");
    let extras = vec![Extra::Migrations, Extra::Every];
    planned_holds(Some(nodes), seed, (kinds, extras), "0-99", "0-999");
}

/// A Primary announced a generation, lost those that had taken it, and gave it up. A node without a disk had heard of it
/// from them, and took everybody who came to the Primary later for Outdated, and the Primary itself.
#[test]
fn a_client_exposes_what_the_primary_serves() {
    let kinds = Some("diskless,quorum,crash,partition,reset");
    let extras = vec![Extra::Every];
    planned_holds(Some(5), 820_000_017_386, (kinds, extras), "0-99", "0-999");
}

#[track_caller]
fn takeovers(seed: u64) {
    let kinds = Some("takeover,crash,partition,reset,powercut");
    planned_holds(Some(4), seed, (kinds, vec![]), "0-99", "0-999");
}

/// A target of two sources was whole at the end of the resync with one of them. The other source, which was Consistent,
/// counted again and became Primary before the two compared what was marked between them.
#[test]
fn a_disk_that_counts_again_is_compared_before_its_node_is_primary() {
    takeovers(1_898_300_197);
}

/// A source was copied itself while its answer was on its way: the target's ack cleared no mark there, but all of them at
/// the target. A later write of such a block marked nothing new, and the target was not told.
#[test]
fn a_target_hears_what_stays_marked_after_a_copy_that_was_replaced() {
    takeovers(1_899_330_012);
}

/// A frozen Primary was not given up, and sent its old requests when it thawed, which the check had called dead since
/// another node lost its power.
#[test]
fn what_a_frozen_primary_holds_back_goes_on() {
    takeovers(1_899_330_041);
}

/// A follower took two generations that were announced in vain. The Primary, and who was copied from it, went on from
/// before them, with their caches lost; each of the two sides called the other one older.
#[test]
fn who_lost_its_cache_and_a_follower_of_what_was_announced_do_not_split() {
    takeovers(1_899_330_279);
}

/// Two frozen clients were left behind. The operator wanted to promote a third node, which was refused because of them, and
/// took that one for the Primary; one of them had everybody connected, and nobody was where its applications were.
#[test]
fn clients_that_migrations_left_behind_are_demoted() {
    migrations(1_899_500_233);
    migrations(1_899_500_322);
}
