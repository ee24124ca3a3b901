//! What `soak` runs beside the default worlds: kinds of worlds that others ask for by name, because
//! their faults are kept apart from the default ones. A bug that needs them would be found by nobody
//! who names nothing.

use crate::extras::Extra;
use crate::faults::Fault;
use crate::plan::{Orders, Size};

/// The kinds of worlds in turn: one to five of forty-one are default worlds, and two are short ones without
/// a fault (`quiet`), in which many bugs show at once. Themes go by the last digits of
/// the seed, so that a number without a common divisor leaves each of them its share.
pub fn orders(seed: u64) -> Orders {
    let of = |nodes: Option<usize>, kinds: &[Fault], extras: &[Extra]| Orders {
        nodes,
        kinds: (!kinds.is_empty()).then(|| kinds.to_vec()),
        extras: extras.to_vec(),
        ..Orders::default()
    };
    let turn = seed / KINDS;
    match seed % KINDS {
        1 => of(Some(3), CLIENTS, &[]),
        2 if turn.is_multiple_of(2) => of(Some(5), CLIENTS, &[Extra::Every]),
        2 => of(None, &[], &[Extra::Old]),
        3 => of(Some(2), RESYNC_ERRORS, &[]),
        5 => of(None, &[], &[Extra::TwoPrimaries]),
        6 => of(Some(2), WRITE_ERRORS, &[]),
        7 => of(None, DETACHES, &[]),
        4 if !turn.is_multiple_of(2) => of(Some(5), &[], &[Extra::Quiet]),
        8 if turn % 4 == 1 => of(Some(4), &[], &[Extra::Quiet]),
        8 if turn % 4 == 3 => of(Some(5), &[], &[Extra::Quiet]),
        9 if turn.is_multiple_of(2) => of(Some(2), HANGS, &[Extra::Blocks]),
        9 => of(Some(2), FLUSH_ERRORS, &[Extra::Every]),
        10 if turn.is_multiple_of(2) => of(None, &[], &[Extra::Congestion, Extra::Thin]),
        10 => of(Some(2), &[], &[Extra::Handlers]),
        11 if !turn.is_multiple_of(2) => of(Some(2), GROWTHS, &[]),
        11 => of(Some(2), RESIZES, &[]),
        12 if turn.is_multiple_of(2) => of(Some(3), PROMOTIONS, &[Extra::Every]),
        12 => of(Some(4), MEETINGS, &[Extra::Every, Extra::Hot]),
        16 if turn % 3 != 2 => of(None, &[], &[Extra::KeptDiscards]),
        13 if turn.is_multiple_of(3) => of(Some(2), META_ERRORS, &[Extra::Every]),
        13 if turn % 3 == 1 => of(Some(2), BITMAP_ERRORS, &[Extra::Every, Extra::ShortLog]),
        13 => of(Some(2), ERRORS, &[]),
        14 if turn % 3 == 2 => of(Some(3), LATE_VERIFIES, &[Extra::Every, Extra::Hot]),
        14 => of(Some(2), VERIFIES, &[Extra::Csums, Extra::Thin]),
        15 => of(Some(3), TAKEOVERS, &[]),
        17 => of(Some(3), SHUFFLES, &[Extra::Every, Extra::Hot]),
        18 => of(Some(2), FREEZES, &[Extra::Every, Extra::ShortLog]),
        19 => of(
            None,
            CONGESTED,
            &[Extra::Congestion, Extra::Every, Extra::Hot],
        ),
        20 => of(Some(3), MEETINGS, &[Extra::Every, Extra::Bursts]),
        21 if !turn.is_multiple_of(2) => of(Some(2), HANGING, &[Extra::Every, Extra::Impatient]),
        22 if turn.is_multiple_of(2) => of(
            Some(3),
            HANDOVERS,
            &[Extra::Every, Extra::Hot, Extra::Hasty],
        ),
        22 => of(Some(3), HANDOVERS, &[Extra::Every, Extra::Hot]),
        23 => of(Some(3), NUMB, &[Extra::Every, Extra::Numb]),
        24 => of(Some(4), MOVING_CLIENTS, &[Extra::Every, Extra::Hot]),
        25 => of(None, &[], &[Extra::Secret]),
        26 if turn.is_multiple_of(2) => of(None, &[], &[Extra::TwoPrimaries, Extra::TieBreaker]),
        26 if turn % 4 == 1 => of(
            Some(3),
            MIGRATIONS,
            &[Extra::Migrations, Extra::Every, Extra::Hot],
        ),
        26 => of(None, THIRD_DISKS, &[Extra::TwoPrimaries, Extra::ThirdDisk]),
        // Those that read back stay default worlds.
        5..=9 | 25..=32 if seed % 20 == 13 => Orders::default(),
        27 if turn.is_multiple_of(2) => of(Some(5), &[], &[Extra::Quiet]),
        28 if turn.is_multiple_of(4) => of(Some(3), &[], &[Extra::Quiet]),
        28 if turn % 4 == 2 => of(Some(2), &[], &[Extra::Quiet]),
        27 => of(None, &[], &[Extra::Openers]),
        28 => of(None, ORDERS, &[Extra::Every, Extra::Openers]),
        29 => of(Some(2), SPOTS, &[Extra::Every, Extra::Hot]),
        30 if turn.is_multiple_of(2) => of(Some(2), GROWTHS, &[Extra::Internal]),
        30 => of(Some(2), RESIZES, &[Extra::Internal]),
        31 if turn.is_multiple_of(2) => of(Some(2), SLEEPS, &[Extra::Every]),
        31 if turn % 4 == 1 => of(Some(2), PAUSES, &[Extra::Turns, Extra::Every]),
        31 => of(Some(3), TURNS, &[Extra::Turns, Extra::Every]),
        32 => of(Some(3), RESIZES, &[]),
        33 => of(Some(3), REGROUPS, &[Extra::Every]),
        34 => of(Some(2), REGROUPS, &[Extra::Every]),
        35 if turn.is_multiple_of(2) => of(Some(2), CUT_COMMANDS, &[Extra::Every]),
        35 => of(Some(3), CUT_COMMANDS, &[Extra::Every, Extra::Csums]),
        36 if turn.is_multiple_of(2) => of(Some(3), QUORUMS, &[Extra::Every]),
        36 => of(Some(3), LAST_MEN, &[Extra::Every]),
        37 if turn.is_multiple_of(2) => of(Some(2), BAD_BLOCKS, &[Extra::Every]),
        37 => of(Some(2), CRASHES, &[Extra::LongLog]),
        38 => of(Some(2), PROTOCOLS, &[Extra::Every, Extra::Hot]),
        39 => of(
            Some(2),
            SLOW_HANDOVERS,
            &[Extra::Every, Extra::Hot, Extra::Async],
        ),
        40 if turn.is_multiple_of(2) => of(None, &[], &[Extra::Blocks]),
        40 => of(Some(2), STRANGERS, &[Extra::Every, Extra::Secret]),
        _ => Orders::default(),
    }
}

/// How many there are.
const KINDS: u64 = 41;

/// Nothing is fixed that would say what kind of worlds is wanted.
pub fn is_open(orders: &Orders) -> bool {
    orders.nodes.is_none()
        && orders.volumes.is_none()
        && orders.kinds.is_none()
        && orders.extras.is_empty()
        && orders.size == Size::Any
}

/// Users move between nodes that are Primary in turn.
const MIGRATIONS: &[Fault] = &[
    Fault::Handover,
    Fault::Handover,
    Fault::Handover,
    Fault::Stall,
    Fault::Reset,
    Fault::Partition,
    Fault::Crash,
    Fault::PowerCut,
];

/// Disks cannot read some blocks, again and again.
const BAD_BLOCKS: &[Fault] = &[Fault::BadBlock, Fault::BadBlock, Fault::Crash, Fault::Reset];

/// Nodes die, links break, roles change.
const CRASHES: &[Fault] = &[
    Fault::Crash,
    Fault::PowerCut,
    Fault::Reset,
    Fault::Partition,
    Fault::Handover,
];

/// Nodes die and part, of which two are Primary and others have disks as well.
const THIRD_DISKS: &[Fault] = &[
    Fault::Crash,
    Fault::Partition,
    Fault::Reset,
    Fault::PowerCut,
];

/// The protocol changes while requests are under way.
const PROTOCOLS: &[Fault] = &[
    Fault::Protocol,
    Fault::Protocol,
    Fault::Stall,
    Fault::Crash,
    Fault::Reset,
    Fault::Handover,
];

/// Roles change while disks and streams are slow.
const SLOW_HANDOVERS: &[Fault] = &[
    Fault::Handover,
    Fault::Handover,
    Fault::SlowDisk,
    Fault::Stall,
];

/// Nodes do not have the same secret for a while.
const STRANGERS: &[Fault] = &[
    Fault::Secret,
    Fault::Secret,
    Fault::Reset,
    Fault::Partition,
    Fault::Crash,
];

/// Resyncs begin and wait for other volumes of their node, while front ends open and close volumes.
const ORDERS: &[Fault] = &[
    Fault::Order,
    Fault::Order,
    Fault::InvalidateRemote,
    Fault::Partition,
    Fault::Crash,
    Fault::Handover,
];

/// Three volumes take their turns: of two nodes, where resyncs are paused as well.
const PAUSES: &[Fault] = &[
    Fault::Invalidate,
    Fault::Invalidate,
    Fault::Pause,
    Fault::Reset,
    Fault::Crash,
];

/// The same of three nodes that meet and part.
const TURNS: &[Fault] = &[
    Fault::Shuffle,
    Fault::Invalidate,
    Fault::Partition,
    Fault::Crash,
];

/// Commands while streams of data stand still for long.
const NUMB: &[Fault] = &[
    Fault::Stall,
    Fault::Stall,
    Fault::Stall,
    Fault::Disconnect,
    Fault::Handover,
    Fault::Detach,
];

/// Nodes of which some have no disk meet and part again, and die.
const MOVING_CLIENTS: &[Fault] = &[Fault::Shuffle, Fault::Diskless, Fault::Crash];

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
    Fault::CutResize,
    Fault::Crash,
    Fault::Partition,
    Fault::PowerCut,
];

/// Disks grow one after the other, and the volume follows the smallest of them.
const GROWTHS: &[Fault] = &[
    Fault::GrowOne,
    Fault::GrowOne,
    Fault::Crash,
    Fault::Partition,
];

/// Nodes meet and part again while all writes go to the same blocks, on slow wires and disks.
const SHUFFLES: &[Fault] = &[Fault::Shuffle, Fault::Stall, Fault::SlowDisk];

/// The same with bursts of requests all over the device, and nodes die and are promoted.
const MEETINGS: &[Fault] = &[
    Fault::Shuffle,
    Fault::Shuffle,
    Fault::Crash,
    Fault::Handover,
];

/// Roles change among nodes that meet again and again, on streams that stand still.
const HANDOVERS: &[Fault] = &[
    Fault::Shuffle,
    Fault::Handover,
    Fault::Handover,
    Fault::Stall,
    Fault::Invalidate,
];

/// Disks are taken away and given back while requests are suspended.
const FREEZES: &[Fault] = &[Fault::Suspend, Fault::Detach];

/// The Primary pulls ahead of a peer, also of one that is being resynced, while it waits for others
/// or for its own disk.
const CONGESTED: &[Fault] = &[
    Fault::Freeze,
    Fault::Stall,
    Fault::SlowDisk,
    Fault::Invalidate,
    Fault::Reset,
    Fault::Balance,
];

/// The operator tries to promote nodes beside the Primary, among nodes that are kept apart.
const PROMOTIONS: &[Fault] = &[
    Fault::Promote,
    Fault::Promote,
    Fault::Disconnect,
    Fault::Handover,
    Fault::Detach,
    Fault::Invalidate,
    Fault::Suspend,
];

/// A few blocks are verified while they are written.
const SPOTS: &[Fault] = &[
    Fault::VerifySpot,
    Fault::VerifySpot,
    Fault::VerifySpot,
    Fault::Handover,
    Fault::Disconnect,
];

/// The same among three nodes, on streams that stand still: two of them may have got unlike parts of what the third writes.
const LATE_VERIFIES: &[Fault] = &[
    Fault::VerifySpot,
    Fault::VerifySpot,
    Fault::VerifySpot,
    Fault::Stall,
    Fault::Stall,
    Fault::SlowDisk,
    Fault::Handover,
];

/// Nodes lose their power while a command changes their metadata, beside what gives resyncs something to do.
const CUT_COMMANDS: &[Fault] = &[
    Fault::CutCommand,
    Fault::CutCommand,
    Fault::CutCommand,
    Fault::Reset,
    Fault::Partition,
    Fault::PowerCut,
];

/// Quorum among nodes with disks.
const QUORUMS: &[Fault] = &[
    Fault::Quorum,
    Fault::Quorum,
    Fault::Crash,
    Fault::Partition,
    Fault::Reset,
];

/// The same with nodes that leave in good order, until one is left.
const LAST_MEN: &[Fault] = &[
    Fault::Quorum,
    Fault::Disconnect,
    Fault::Disconnect,
    Fault::Down,
    Fault::Outdate,
    Fault::Crash,
];

/// Disks hang under processes that stand still themselves.
const SLEEPS: &[Fault] = &[Fault::HangDisk, Fault::Freeze, Fault::Freeze, Fault::Reset];

/// The operator outdates disks, and nodes forget their peers.
const REGROUPS: &[Fault] = &[
    Fault::Outdate,
    Fault::Regroup,
    Fault::Regroup,
    Fault::Partition,
    Fault::Disconnect,
    Fault::Handover,
    Fault::Crash,
];

/// A disk stops answering for long, and who waits for it gives it up.
const HANGING: &[Fault] = &[Fault::HangDisk, Fault::HangDisk, Fault::Reset];

/// The Primary is cut off and freezes without quorum, and another node takes over.
const TAKEOVERS: &[Fault] = &[
    Fault::Takeover,
    Fault::Crash,
    Fault::Partition,
    Fault::Reset,
];

/// Writes fail while a node is brought up to date.
const RESYNC_ERRORS: &[Fault] = &[
    Fault::ResyncError,
    Fault::ResyncError,
    Fault::Crash,
    Fault::Reset,
];

/// Disks are taken away and given back, under requests that wait for slow wires and disks.
const DETACHES: &[Fault] = &[
    Fault::Detach,
    Fault::Detach,
    Fault::Detach,
    Fault::Stall,
    Fault::SlowDisk,
    Fault::Reset,
];

/// Writes fail, also on a node that goes on with its disk, while requests are frozen and links
/// break.
const WRITE_ERRORS: &[Fault] = &[
    Fault::WriteError,
    Fault::WriteError,
    Fault::WriteError,
    Fault::Suspend,
    Fault::Reset,
    Fault::Crash,
];

/// Verifies, beside what gives resyncs something to do.
const VERIFIES: &[Fault] = &[
    Fault::VerifyPart,
    Fault::VerifyPart,
    Fault::Partition,
    Fault::Isolate,
    Fault::Reset,
    Fault::PowerCut,
    Fault::Handover,
];

/// Metadata cannot be written, and the node loses its power.
const META_ERRORS: &[Fault] = &[
    Fault::MetaError,
    Fault::MetaError,
    Fault::PowerCut,
    Fault::Crash,
    Fault::Reset,
    Fault::Handover,
];

/// Marks cannot be written, and the node loses its power.
const BITMAP_ERRORS: &[Fault] = &[
    Fault::BitmapError,
    Fault::BitmapError,
    Fault::Partition,
    Fault::PowerCut,
    Fault::Reset,
];

/// Flushes fail, and the node loses its power.
const FLUSH_ERRORS: &[Fault] = &[
    Fault::FlushError,
    Fault::FlushError,
    Fault::PowerCut,
    Fault::Reset,
    Fault::Handover,
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
    fn many_worlds_are_default_ones_and_a_command_repeats_the_others() {
        let all: Vec<Orders> = (0..KINDS).map(orders).collect();
        assert_eq!(all.iter().filter(|o| is_open(o)).count(), 4);
        let reads_back = (0..400).filter(|seed| seed % 20 == 13);
        assert!(reads_back.filter(|seed| is_open(&orders(*seed))).count() >= 5);
        let clients = orders(42).command(42);
        assert!(
            clients.ends_with("--seed 42 --nodes 3 --faults diskless,quorum,crash,partition,reset"),
            "{clients}"
        );
        assert!(orders(46).command(46).ends_with("--with two-primaries"));
    }
}
