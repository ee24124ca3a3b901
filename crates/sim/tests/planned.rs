//! Planned worlds: a seed fixes everything, its trace too, and worlds of many kinds hold.

use lockstep_sim::drive::{Trace, run};
use lockstep_sim::extras::Extra;
use lockstep_sim::faults::parse;
use lockstep_sim::plan::{Numbers, Orders, Size};

fn orders(faults: &str) -> Orders {
    Orders {
        kinds: Some(parse(faults).unwrap()),
        ..Orders::default()
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let orders = orders("reset,crash,freeze");
    let trace = |seed| {
        let played = run(seed, &orders, Trace::Keep(usize::MAX));
        let tail = played.tail.expect("the trace was kept");
        let lines: Vec<Vec<String>> = (0..played.nodes)
            .map(|n| tail.of(n).map(str::to_string).collect())
            .collect();
        (lines, played.fingerprint)
    };
    let (first, second) = (trace(3), trace(3));
    assert!(first.0.iter().all(|lines| lines.len() > 100));
    assert!(first == second);
    // Reading along changes nothing.
    assert_eq!(run(3, &orders, Trace::Off).fingerprint, first.1);
    assert_ne!(trace(4).1, first.1);
}

#[test]
fn a_world_without_its_faults_holds_and_writes_all() {
    let orders = Orders {
        size: Size::Small,
        only_faults: Some(Numbers::default()),
        ..Orders::default()
    };
    let played = run(1, &orders, Trace::Off);
    assert_eq!(played.violation, None);
    assert!(played.acked > 500, "{} writes", played.acked);
}

#[test]
fn worlds_of_two_nodes_with_kills_and_cuts_hold() {
    let orders = Orders {
        nodes: Some(2),
        ..orders("reset,partition,stall,crash,freeze,latelink,slowdisk")
    };
    for seed in 0..20 {
        let played = run(seed, &orders, Trace::Off);
        assert_eq!(played.violation, None, "{}", orders.command(seed));
    }
}

#[test]
fn digests_catch_what_the_network_changes() {
    let mut orders = Orders {
        nodes: Some(2),
        ..orders("corrupt,reset,crash")
    };
    // Without them it reaches the disk, which the world notices.
    let bare = run(
        0,
        &Orders {
            kinds: Some(parse("corrupt").unwrap()),
            ..orders.clone()
        },
        Trace::Off,
    );
    assert!(bare.violation.is_some());
    orders.extras = vec![Extra::Integrity];
    for seed in 0..12 {
        let played = run(seed, &orders, Trace::Off);
        assert_eq!(played.violation, None, "{}", orders.command(seed));
    }
}

#[test]
fn checksum_resyncs_leave_no_difference() {
    let orders = Orders {
        nodes: Some(2),
        extras: vec![Extra::Csums],
        ..orders("invalidate,reset,crash,powercut,disconnect")
    };
    for seed in 0..12 {
        let played = run(seed, &orders, Trace::Off);
        assert_eq!(played.violation, None, "{}", orders.command(seed));
    }
}

#[test]
fn nodes_that_pull_ahead_lose_nothing() {
    let orders = Orders {
        nodes: Some(2),
        extras: vec![Extra::Congestion],
        ..orders("reset,stall,latelink,slowdisk,crash,powercut,invalidate,disconnect")
    };
    for seed in 0..12 {
        let played = run(seed, &orders, Trace::Off);
        assert_eq!(played.violation, None, "{}", orders.command(seed));
    }
}

#[test]
fn thin_resyncs_leave_no_difference() {
    let orders = Orders {
        nodes: Some(2),
        extras: vec![Extra::Thin],
        ..orders("invalidate,reset,crash,powercut,disconnect")
    };
    for seed in 0..12 {
        let played = run(seed, &orders, Trace::Off);
        assert_eq!(played.violation, None, "{}", orders.command(seed));
    }
}

#[test]
fn bitmaps_of_different_granularity_hold_together() {
    for (nodes, seeds) in [(2, 0..20), (3, 0..8)] {
        for seed in seeds {
            let orders = Orders {
                nodes: Some(nodes),
                extras: vec![Extra::Blocks],
                ..orders("reset,partition,crash,powercut,handover,invalidate")
            };
            let played = run(seed, &orders, Trace::Off);
            assert_eq!(played.violation, None, "{}", orders.command(seed));
        }
    }
}
