//! Planned worlds in which somebody took a generation that its Primary had announced, and nothing was written under it.

mod common;

use lockstep_sim::extras::Extra;

use common::planned_holds;

#[track_caller]
fn whole(nodes: usize, seed: u64, kinds: (Option<&str>, Vec<Extra>)) {
    planned_holds(Some(nodes), seed, kinds, "0-99", "0-9999");
}

#[track_caller]
fn clients(seed: u64) {
    let kinds = Some("handover,handover,diskless,quorum,crash,partition,reset");
    whole(3, seed, (kinds, vec![Extra::Migrations, Extra::Every]));
}

/// A Primary died before it made what it had announced, one survivor took the new name, and another one went on from the
/// generation before. A third node was copied from the one with the new name meanwhile, and has nothing else either.
#[test]
fn who_was_copied_from_a_name_without_writes_has_written_nothing_either() {
    let kinds = Some("shuffle,shuffle,crash,handover");
    whole(4, 855_000_009_131, (kinds, vec![Extra::Every, Extra::Hot]));
}

/// The same, where the one with the new name believes that the other one followed: its slot names nothing.
#[test]
fn who_was_thought_to_follow_knows_the_one_before_all_the_same() {
    let kinds = Some("shuffle,shuffle,crash,handover");
    whole(
        3,
        782_000_005_690,
        (kinds, vec![Extra::Every, Extra::Bursts]),
    );
}

/// A client was frozen, and others went on with another Primary, which lost its quorum later. The client met one of
/// them before that one knew that it is whole, went on with it, and wrote its old requests over newer data.
#[test]
fn a_frozen_client_does_not_go_on_with_those_who_have_gone_on_without_it() {
    clients(1_891_000_210);
}

/// A Primary announced a generation and gave it up. One follower took it, and was promoted; the other one was copied from
/// it, and later from the former Primary, back to the generation before. The two called each other older, and the new
/// Primary, frozen without quorum, had nobody to go on with.
#[test]
fn a_primary_is_the_source_of_who_went_back_behind_its_generation() {
    clients(1_894_000_114);
}

/// A node without a disk met both of them before they had met each other, and called it a split brain.
#[test]
fn a_client_of_both_waits_until_they_have_met() {
    clients(1_891_100_064);
}

/// A guest took its turn while the Primary did not know yet that it was alone: who asked that one saw older data. And
/// of two frozen Primaries that others had left behind, the simulated operator knew one.
#[test]
fn the_operator_of_migrations_sees_who_goes_on() {
    clients(1_891_100_181);
    for seed in [1_891_100_230, 1_891_000_064, 874_000_003_265] {
        clients(seed);
    }
}

/// A guest was told to leave while it asked for its turn, which came a moment later: it was Primary for ever, held by
/// nobody, and gave its turn to nobody.
#[test]
fn a_turn_that_nobody_waits_for_any_more_ends_at_once() {
    clients(1_892_000_114);
}

/// A client died beside its last copy, which was no heir any more: what had gone just before the operator knew nothing of.
#[test]
fn the_operator_knows_who_had_the_data_of_a_client_last() {
    let kinds = Some("shuffle,diskless,crash");
    whole(4, 7270, (kinds, vec![Extra::Every, Extra::Hot]));
}
