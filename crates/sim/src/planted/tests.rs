//! The registry against what worlds show.

use super::*;

#[test]
fn names_are_unique_and_the_thirds_are_all() {
    let mut names: Vec<_> = Planted::ALL.iter().map(|b| b.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Planted::ALL.len());
    assert!(names.len() >= 25, "{} deliberate bugs", names.len());
    let thirds = (0..3).map(|n| choose(None, Some(n)).unwrap().len());
    assert_eq!(thirds.sum::<usize>(), names.len() - RARE.len());
    assert!(choose(Some("no-such-bug"), None).is_err());
}

#[test]
fn without_a_bug_a_world_is_the_same_as_in_a_build_that_has_none() {
    let limits = Limits {
        max_requests: Some(50),
        ..Limits::default()
    };
    let plain = run(6, &limits);
    let inside = with(None, || run(6, &limits));
    assert_eq!(plain.fingerprint, inside.fingerprint);
    assert_eq!(present(), None);
}

/// Crash points are no random worlds: they show these bugs in any case.
#[test]
fn crash_points_of_planted_bugs_fail() {
    use crate::crash_points::{cut_once, cut_twice};
    use crate::disk::Lose;
    use crate::scenario::A;
    use crate::stories::{ALONE, ALONE_IN_PLACE};
    let once = |bug| with(Some(bug), || cut_once(&ALONE, A, Lose::Unflushed));
    assert!(!once(Planted::LogNotReplayed).failed.is_empty());
    assert!(!once(Planted::EvictBeforeBitmap).failed.is_empty());
    let in_place = with(Some(Planted::SlotNotFenced), || {
        cut_once(&ALONE_IN_PLACE, A, Lose::Unflushed)
    });
    assert!(!in_place.failed.is_empty());
    let twice = with(Some(Planted::RecoveryStampsEarly), || {
        cut_twice(&ALONE, A, Lose::Unflushed, 4)
    });
    assert!(!twice.failed.is_empty());
}

#[test]
fn a_search_says_what_it_found_as_json() {
    let bug = Planted::LostBuffer;
    let patience = Patience {
        orders: Orders::default(),
        from: 0,
        worlds: 20,
        time: Duration::MAX,
        as_soak: false,
    };
    let search = search(bug, &patience);
    let found = search.found.as_ref().expect("the first worlds show it");
    assert!(!found.1.is_empty());
    let json = search.json();
    assert!(json.contains("\"found\":true"), "{json}");
    assert_eq!(quoted("a\"b\n"), "\"a\\\"b\\u000a\"");
}
