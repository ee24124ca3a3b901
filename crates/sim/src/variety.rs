//! What `soak` runs beside the default worlds: kinds of worlds that others ask for by name, because
//! their faults are kept apart from the default ones. A bug that needs them would be found by nobody
//! who names nothing.

use crate::extras::Extra;
use crate::faults::Fault;
use crate::plan::{Orders, Size};

/// The kinds of worlds in turn: eleven of sixteen are default worlds.
pub fn orders(seed: u64) -> Orders {
    let of = |nodes: Option<usize>, kinds: &[Fault], extras: &[Extra]| Orders {
        nodes,
        kinds: (!kinds.is_empty()).then(|| kinds.to_vec()),
        extras: extras.to_vec(),
        ..Orders::default()
    };
    match seed % 16 {
        1 => of(Some(3), CLIENTS, &[]),
        5 => of(None, &[], &[Extra::TwoPrimaries]),
        9 => of(Some(2), HANGS, &[Extra::Blocks]),
        11 => of(Some(2), RESIZES, &[]),
        13 => of(Some(2), ERRORS, &[]),
        _ => Orders::default(),
    }
}

/// Nothing is fixed that would say what kind of worlds is wanted.
pub fn is_open(orders: &Orders) -> bool {
    orders.nodes.is_none()
        && orders.volumes.is_none()
        && orders.kinds.is_none()
        && orders.extras.is_empty()
        && orders.size == Size::Any
}

/// Nodes without a disk, quorum, processes that die, links that break.
const CLIENTS: &[Fault] = &[
    Fault::Diskless,
    Fault::Quorum,
    Fault::Crash,
    Fault::Partition,
    Fault::Reset,
];

/// Disks that stop answering, beside what else happens.
const HANGS: &[Fault] = &[
    Fault::HangDisk,
    Fault::Reset,
    Fault::Partition,
    Fault::Crash,
    Fault::PowerCut,
    Fault::Handover,
    Fault::Invalidate,
];

/// Volumes and their disks grow, volumes shrink, nodes lose power.
const RESIZES: &[Fault] = &[
    Fault::Resize,
    Fault::Crash,
    Fault::Partition,
    Fault::PowerCut,
];

/// Disks report errors, processes die, links break.
const ERRORS: &[Fault] = &[
    Fault::ReadError,
    Fault::WriteError,
    Fault::FlushError,
    Fault::MetaError,
    Fault::Crash,
    Fault::Reset,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_worlds_are_default_ones_and_a_command_repeats_the_others() {
        let all: Vec<Orders> = (0..16).map(orders).collect();
        assert_eq!(all.iter().filter(|o| is_open(o)).count(), 11);
        let clients = orders(17).command(17);
        assert!(
            clients.ends_with("--seed 17 --nodes 3 --faults diskless,quorum,crash,partition,reset"),
            "{clients}"
        );
        assert!(orders(21).command(21).ends_with("--with two-primaries"));
    }
}
