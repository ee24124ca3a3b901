//! What several files of tests use.

use lockstep_sim::drive::{Trace, run};
use lockstep_sim::extras::Extra;
use lockstep_sim::faults::parse;
use lockstep_sim::plan::{Numbers, Orders};

/// A planned world of these kinds of faults, with such options, holds; of its faults and requests those
/// that `swarm` shrunk it to.
#[track_caller]
pub(crate) fn planned_holds(
    nodes: Option<usize>,
    seed: u64,
    (kinds, extras): (Option<&str>, Vec<Extra>),
    faults: &str,
    requests: &str,
) {
    let orders = Orders {
        nodes,
        kinds: kinds.map(|kinds| parse(kinds).unwrap()),
        extras,
        only_faults: Some(Numbers::parse(faults).unwrap()),
        only_requests: Some(Numbers::parse(requests).unwrap()),
        ..Orders::default()
    };
    let played = run(seed, &orders, Trace::Off);
    assert_eq!(played.violation, None, "{}", orders.command(seed));
}
