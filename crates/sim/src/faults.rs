//! Kinds of trouble: how each comes over a world and how it ends.

use lockstep_core::command::Command;
use lockstep_core::options::{OnIoError, ReadBalancing};
use lockstep_core::state::DiskState;
use lockstep_format::units::VolumeNr;

use crate::check;
use crate::disk::Lose;
use crate::operator::Operator;
use crate::rng::{Rng, mixed};
use crate::world::{MS, SECOND, World, name};

/// Kinds of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A connection breaks.
    Reset,
    /// Nothing passes between two nodes for a while.
    Partition,
    /// Nothing passes in one direction for a while.
    OneWay,
    /// One stream stands still for a while.
    Stall,
    /// A process dies and comes back.
    Crash,
    /// A node loses its power and comes back.
    PowerCut,
    /// All nodes lose their power at once.
    PowerCutAll,
    /// Another node becomes Primary in good order.
    Handover,
    /// The operator disconnects two nodes for a while.
    Disconnect,
    /// The operator takes a disk away for a while.
    Detach,
    /// The operator throws a replica away.
    Invalidate,
    /// The operator pauses resyncs for a while.
    Pause,
    /// The operator takes a node down for a while.
    Down,
    /// Nothing passes between a node and all others for a while.
    Isolate,
    /// One side of the next link hears of it late.
    LateLink,
    /// A process stands still for a while.
    Freeze,
    /// A node's clock jumps ahead.
    Clock,
    /// A disk is slow for a while.
    SlowDisk,
    /// A node loses its power, and once more while it recovers.
    PowerCutTwice,
    /// Reads fail.
    ReadError,
    /// Writes fail.
    WriteError,
    /// Flushes fail.
    FlushError,
    /// Metadata operations fail.
    MetaError,
    /// A disk acknowledges a write that never happens.
    LostWrite,
    /// A disk writes to a wrong place.
    Misdirect,
    /// The operator suspends requests for a while.
    Suspend,
    /// The operator changes options.
    Options,
    /// The operator makes a new generation on the Primary.
    NewUuid,
    /// The operator starts an online verify.
    Verify,
    /// The operator changes where reads go.
    Balance,
    /// The network changes payloads on their way; needs `--with integrity`.
    Corrupt,
    /// Some nodes have no disk; here: another node becomes Primary, perhaps one of those.
    Diskless,
    /// Quorum is configured; here: nothing passes between the Primary and all others for a while.
    Quorum,
    /// A disk stops answering for a while; `disk-timeout` is configured.
    HangDisk,
    /// The Primary is cut off until it freezes, and another node takes over.
    Takeover,
    /// The operator resizes a volume; mostly all disks have grown before.
    Resize,
    /// A node is cut off for a while, and writes fail there when it is brought up to date.
    ResyncError,
    /// The operator starts an online verify of a part where requests go.
    VerifyPart,
    /// Who can reach whom changes several times: nodes fall behind one after the other and meet in
    /// any order.
    Shuffle,
    /// The operator tries to promote a node beside the Primary, which has to be refused.
    Promote,
    /// The node's order of resyncs lets those of a volume wait for a while.
    Order,
    /// The operator of the Primary throws a replica away.
    InvalidateRemote,
    /// One node's disk grows, and the operator resizes the volume: it becomes as large as all disks.
    GrowOne,
    /// The operator starts an online verify of a few blocks where requests go.
    VerifySpot,
    /// The operator outdates a disk that is apart from the Primary.
    Outdate,
    /// The operator disconnects two nodes, and one of them forgets the other before they meet again.
    Regroup,
    /// The operator gives a node a command that changes its metadata, and the node loses its power soon.
    CutCommand,
    /// The operator resizes a volume, and the node loses its power soon.
    CutResize,
    /// Reads fail, and what they were to give is gone.
    BadBlock,
    /// The operator changes the protocol of all connections.
    Protocol,
    /// Two nodes do not have the same secret for a while; they must not connect.
    Secret,
    /// Writes of the bitmap fail.
    BitmapError,
}

/// The kinds that worlds of the first design draw from, with the words of the command line. Its
/// order and length are part of what a seed means there.
pub const FAULTS: [(Fault, &str); 13] = [
    (Fault::Reset, "reset"),
    (Fault::Partition, "partition"),
    (Fault::OneWay, "oneway"),
    (Fault::Stall, "stall"),
    (Fault::Crash, "crash"),
    (Fault::PowerCut, "powercut"),
    (Fault::PowerCutAll, "powercut-all"),
    (Fault::Handover, "handover"),
    (Fault::Disconnect, "disconnect"),
    (Fault::Detach, "detach"),
    (Fault::Invalidate, "invalidate"),
    (Fault::Pause, "pause"),
    (Fault::Down, "down"),
];

/// The kinds that only planned worlds know, with the words of the command line.
pub const MORE_FAULTS: [(Fault, &str); 15] = [
    (Fault::Isolate, "isolate"),
    (Fault::LateLink, "latelink"),
    (Fault::Freeze, "freeze"),
    (Fault::Clock, "clock"),
    (Fault::SlowDisk, "slowdisk"),
    (Fault::PowerCutTwice, "powercut-twice"),
    (Fault::ReadError, "readerror"),
    (Fault::WriteError, "writeerror"),
    (Fault::FlushError, "flusherror"),
    (Fault::MetaError, "metaerror"),
    (Fault::LostWrite, "lostwrite"),
    (Fault::Misdirect, "misdirect"),
    (Fault::Suspend, "suspend"),
    (Fault::Options, "options"),
    (Fault::NewUuid, "newuuid"),
];

/// Kinds that happen only where the command line names them. In worlds of the first design they
/// draw nothing from the common numbers: the worlds without them stay as they were.
pub const BY_NAME: [(Fault, &str); 24] = [
    (Fault::Verify, "verify"),
    (Fault::Balance, "balance"),
    (Fault::Corrupt, "corrupt"),
    (Fault::Diskless, "diskless"),
    (Fault::Quorum, "quorum"),
    (Fault::HangDisk, "hangdisk"),
    (Fault::Takeover, "takeover"),
    (Fault::Resize, "resize"),
    (Fault::ResyncError, "resyncerror"),
    (Fault::VerifyPart, "verifypart"),
    (Fault::Shuffle, "shuffle"),
    (Fault::Promote, "promote"),
    (Fault::Order, "order"),
    (Fault::InvalidateRemote, "invalidate-remote"),
    (Fault::GrowOne, "grow-one"),
    (Fault::VerifySpot, "verifyspot"),
    (Fault::Outdate, "outdate"),
    (Fault::Regroup, "regroup"),
    (Fault::CutCommand, "cut-command"),
    (Fault::CutResize, "cut-resize"),
    (Fault::BadBlock, "badblock"),
    (Fault::Protocol, "protocol"),
    (Fault::Secret, "other-secret"),
    (Fault::BitmapError, "bitmaperror"),
];

/// Kinds that make a disk report errors.
pub const ERRORS: [Fault; 6] = [
    Fault::BitmapError,
    Fault::BadBlock,
    Fault::ReadError,
    Fault::WriteError,
    Fault::FlushError,
    Fault::MetaError,
];

/// Kinds that break no link and let no node die: only beside these nobody can become Primary while
/// there is one, so that an attempt must be refused.
pub const CALM: [Fault; 17] = [
    Fault::Promote,
    Fault::Handover,
    Fault::Diskless,
    Fault::Disconnect,
    Fault::Detach,
    Fault::Invalidate,
    Fault::Pause,
    Fault::SlowDisk,
    Fault::Suspend,
    Fault::Options,
    Fault::NewUuid,
    Fault::Verify,
    Fault::VerifyPart,
    Fault::VerifySpot,
    Fault::Balance,
    Fault::Order,
    Fault::InvalidateRemote,
];

/// Every kind with its word.
pub fn all() -> impl Iterator<Item = (Fault, &'static str)> {
    FAULTS.into_iter().chain(MORE_FAULTS).chain(BY_NAME)
}

/// The word of a kind.
pub fn word(fault: Fault) -> &'static str {
    all()
        .find(|(f, _)| *f == fault)
        .map_or("unknown", |(_, word)| word)
}

/// The kinds of a list of words separated by commas.
pub fn parse(list: &str) -> Result<Vec<Fault>, String> {
    list.split(',')
        .filter(|w| !w.is_empty())
        .map(|word| {
            all()
                .find(|(_, name)| *name == word)
                .map(|(fault, _)| fault)
                .ok_or_else(|| {
                    let known: Vec<_> = all().map(|(_, name)| name).collect();
                    format!("no fault is called {word}; there are {}", known.join(", "))
                })
        })
        .collect()
}

const POLICIES: [ReadBalancing; 7] = [
    ReadBalancing::PreferLocal,
    ReadBalancing::PreferRemote,
    ReadBalancing::RoundRobin,
    ReadBalancing::LeastPending,
    ReadBalancing::WhenCongestedRemote,
    ReadBalancing::Striping(15),
    ReadBalancing::Striping(20),
];

fn pause_of(rng: &mut Rng) -> u64 {
    rng.pick(&[20 * MS, 300 * MS, 3 * SECOND])
}

/// How a fault ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Undo {
    Open(usize, usize),
    Start(usize),
    Reconnect,
    Regroup(usize, usize),
    SameSecret,
    Reattach,
    Pause(usize, usize, u16),
    InOrder(usize, u16),
    OpenAll(usize),
    Cure(usize, u16),
    Resume(usize),
    CutAgain(usize),
    /// It loses its power soon, for a while.
    Cut(usize),
    /// Shapes of the network that are still to come, and what they are drawn from.
    Shuffle(u32, u64),
}

impl Undo {
    /// What follows it, and so much later.
    pub(crate) fn next(self) -> Option<(u64, Undo)> {
        match self {
            Undo::CutAgain(node) | Undo::Cut(node) => Some((100 * MS, Undo::Start(node))),
            Undo::Shuffle(left @ 1.., seed) => {
                let mut rng = Rng::new(mixed(&[seed, u64::from(left)]));
                let typical = rng.pick(&[5 * MS, 50 * MS, 300 * MS, SECOND]);
                Some((rng.delay(typical), Undo::Shuffle(left - 1, seed)))
            }
            _ => None,
        }
    }
}

/// Any pairs of nodes can reach each other, the others lose their links at once; in the end all can.
fn shuffle(w: &mut World, left: u32, seed: u64) {
    let mut rng = Rng::new(mixed(&[seed, 1 << 32 | u64::from(left)]));
    for a in 0..w.nodes.len() {
        for b in a + 1..w.nodes.len() {
            let cut = left > 0 && rng.permille(500);
            let was = w.blocked.contains(&(a, b));
            w.set_blocked(a, b, cut);
            w.set_blocked(b, a, cut);
            if cut && !was {
                w.trace(a, || format!("== no network to {} any more", name(b)));
                w.reset(a, b);
            } else if was && !cut {
                w.trace(a, || format!("== the network to {} works again", name(b)));
            }
        }
    }
}

/// Ends a fault.
pub(crate) fn revert(w: &mut World, o: &mut Operator, what: Undo) {
    match what {
        Undo::Open(a, b) => {
            w.trace(a, || format!("== the network to {} works again", name(b)));
            w.set_blocked(a, b, false);
            w.set_blocked(b, a, false);
        }
        Undo::Start(node) => o.start(w, node),
        Undo::Reconnect => {
            o.reconnect(w);
        }
        Undo::Regroup(node, peer) => {
            o.forget_and_know(w, node, peer);
            o.reconnect(w);
        }
        Undo::SameSecret => o.same_secret(w),
        Undo::Reattach => {
            o.reattach(w);
        }
        Undo::Pause(node, peer, volume) => {
            o.toggle_pause(w, node, peer, volume);
        }
        Undo::InOrder(node, volume) => o.in_order(w, node, volume),
        Undo::OpenAll(node) => {
            w.trace(node, || "== the network works again".into());
            for peer in (0..w.nodes.len()).filter(|p| *p != node) {
                w.set_blocked(node, peer, false);
                w.set_blocked(peer, node, false);
            }
        }
        Undo::Cure(node, volume) => {
            w.trace(node, || {
                format!("== the disk of volume {volume} works again")
            });
            w.cure(node, volume);
            o.reattach(w);
        }
        Undo::Resume(node) => {
            if o.is_up(node) {
                w.command(node, Command::ResumeIo);
            }
        }
        Undo::CutAgain(node) | Undo::Cut(node) => o.crash(w, node, Lose::Unflushed),
        Undo::Shuffle(left, seed) => shuffle(w, left, seed),
    }
}

/// Lets a fault happen; says how it ends, if it does not end by itself.
pub(crate) fn happen(w: &mut World, o: &mut Operator, rng: &mut Rng, fault: Fault) -> Option<Undo> {
    let nodes = w.nodes.len();
    let a = rng.below(nodes as u64) as usize;
    let b = (a + 1 + rng.below(nodes as u64 - 1) as usize) % nodes;
    let volume = rng.below(u64::from(w.config.volumes)) as u16;
    w.trace(a, || format!("== {fault:?} (other node {})", name(b)));
    match fault {
        Fault::Reset => {
            w.reset(a, b);
            None
        }
        Fault::Partition => {
            w.set_blocked(a, b, true);
            w.set_blocked(b, a, true);
            Some(Undo::Open(a, b))
        }
        Fault::OneWay => {
            w.set_blocked(a, b, true);
            Some(Undo::Open(a, b))
        }
        Fault::Stall => {
            let time = rng.delay(300 * MS);
            w.stall(a, b, rng.below(2) as usize, time);
            None
        }
        Fault::Crash | Fault::PowerCut => {
            check::differences_are_marked(w);
            let lose = if fault == Fault::Crash {
                Lose::InFlight
            } else {
                Lose::Unflushed
            };
            o.crash(w, a, lose);
            check::differences_are_marked(w);
            Some(Undo::Start(a))
        }
        Fault::PowerCutAll => {
            for node in 0..nodes {
                o.crash(w, node, Lose::Unflushed);
            }
            for node in 0..nodes {
                if node != a && rng.permille(700) {
                    o.start(w, node);
                }
            }
            Some(Undo::Start(a))
        }
        Fault::Handover if o.settings.migrates => {
            o.migrate(w, rng);
            None
        }
        Fault::Handover | Fault::Diskless => {
            o.demote(w);
            None
        }
        Fault::Disconnect => {
            let force = rng.permille(300);
            o.disconnect(w, a, b, force).then_some(Undo::Reconnect)
        }
        Fault::Regroup => {
            let may = o.may_regroup(w, a, b) && o.disconnect(w, a, b, false);
            may.then_some(Undo::Regroup(a, b))
        }
        Fault::Outdate => {
            o.outdate(w, a, volume);
            None
        }
        Fault::CutCommand => {
            match rng.below(6) {
                0..=2 => {
                    o.invalidate(w, a, volume, true);
                }
                3 => {
                    o.invalidate_remote(w, a, volume, true);
                }
                4 => {
                    o.detach(w, a, volume, false);
                }
                _ => o.outdate(w, a, volume),
            }
            Some(Undo::Cut(a))
        }
        Fault::CutResize => {
            o.resize(w, rng, a, volume);
            Some(Undo::Cut(a))
        }
        Fault::Detach => {
            let force = rng.permille(300);
            // With 8.4 the peer labels what a Primary without a disk writes, from the detach on
            // and whether it writes or not: a link that breaks then leaves two branches.
            let labelled = o.settings.resource.protocol_max <= 101 && o.primary == Some(a);
            (!labelled && o.detach(w, a, volume, force)).then_some(Undo::Reattach)
        }
        Fault::Invalidate => {
            let reset = rng.permille(500);
            o.invalidate(w, a, volume, reset);
            None
        }
        Fault::Pause => o
            .toggle_pause(w, a, b, volume)
            .then_some(Undo::Pause(a, b, volume)),
        Fault::Order => o
            .order(w, rng, a, volume)
            .then_some(Undo::InOrder(a, volume)),
        Fault::InvalidateRemote => {
            let reset = rng.permille(500);
            o.invalidate_remote(w, a, volume, reset);
            None
        }
        Fault::Down => o.down(w, a).then_some(Undo::Start(a)),
        Fault::Isolate => {
            w.isolate(a);
            Some(Undo::OpenAll(a))
        }
        Fault::Shuffle => {
            let (steps, seed) = (rng.range(2, 7) as u32, rng.bits());
            shuffle(w, steps, seed);
            Some(Undo::Shuffle(steps - 1, seed))
        }
        Fault::Quorum => o.primary.map(|primary| {
            w.isolate(primary);
            Undo::OpenAll(primary)
        }),
        Fault::Takeover => {
            let primary = o.take_over_soon(w)?;
            w.isolate(primary);
            Some(Undo::OpenAll(primary))
        }
        Fault::Resize => {
            o.resize(w, rng, a, volume);
            None
        }
        Fault::GrowOne => {
            o.grow_one(w, rng, a, volume);
            None
        }
        Fault::LateLink => {
            w.next_link_late(a, rng.delay(2 * SECOND));
            w.reset(a, b);
            None
        }
        Fault::Freeze => {
            let typical = pause_of(rng);
            w.freeze(a, rng.delay(typical));
            None
        }
        Fault::Clock => {
            let typical = pause_of(rng);
            w.jump(a, rng.delay(typical));
            None
        }
        Fault::PowerCutTwice => {
            o.crash(w, a, Lose::Unflushed);
            Some(Undo::CutAgain(a))
        }
        Fault::ResyncError => {
            let a = *w.bad_node.get_or_insert(a % w.storage().len());
            if o.primary == Some(a) {
                return None;
            }
            let trouble = &mut w.nodes[a].disks[usize::from(volume)].trouble;
            trouble.spares_last = o.settings.disk.on_io_error == OnIoError::PassOn;
            trouble.writes = rng.range(1, 6) as u32;
            w.isolate(a);
            Some(Undo::OpenAll(a))
        }
        Fault::SlowDisk
        | Fault::BadBlock
        | Fault::ReadError
        | Fault::WriteError
        | Fault::FlushError
        | Fault::MetaError
        | Fault::BitmapError
        | Fault::LostWrite
        | Fault::HangDisk
        | Fault::Misdirect => {
            let is_error = !matches!(fault, Fault::SlowDisk);
            let a = a % w.storage().len();
            // If the disks of several nodes fail, nobody can demand that the data survives.
            let a = if is_error {
                *w.bad_node.get_or_insert(a)
            } else {
                a
            };
            let trouble = &mut w.nodes[a].disks[usize::from(volume)].trouble;
            let count = rng.range(1, 4) as u32;
            trouble.spares_last = o.settings.disk.on_io_error == OnIoError::PassOn;
            match fault {
                Fault::SlowDisk => trouble.slowness = rng.pick(&[10, 50, 300]),
                Fault::ReadError => trouble.reads = count,
                Fault::BadBlock => (trouble.reads, trouble.loses) = (count, true),
                Fault::WriteError => trouble.writes = count,
                Fault::FlushError => trouble.flushes = count,
                Fault::MetaError => trouble.metas = count,
                Fault::BitmapError => trouble.bitmaps = count,
                Fault::HangDisk => trouble.hangs = true,
                Fault::LostWrite => trouble.lost = count,
                _ => trouble.misdirected = count,
            }
            Some(Undo::Cure(a, volume))
        }
        Fault::Suspend => {
            if !o.is_up(a) {
                return None;
            }
            w.command(a, Command::SuspendIo);
            Some(Undo::Resume(a))
        }
        Fault::Options => {
            if o.is_up(a) {
                o.change_options(w, rng, a, b, volume);
            }
            None
        }
        Fault::Secret => o.other_secret(w, a, b).then(|| {
            w.reset(a, b);
            Undo::SameSecret
        }),
        Fault::Protocol => {
            o.change_protocol(w, rng);
            None
        }
        Fault::Verify => {
            o.verify(w, a, b, volume, None);
            None
        }
        Fault::VerifyPart => {
            let touched = w.history.touched_blocks(volume);
            if !touched.is_empty() {
                let middle = touched[rng.below(touched.len() as u64) as usize];
                let first = middle.saturating_sub(rng.below(200));
                o.verify(w, a, b, volume, Some((first, first + 300)));
            }
            None
        }
        Fault::VerifySpot => {
            let touched = w.history.touched_blocks(volume);
            if !touched.is_empty() {
                let first = touched[rng.below(touched.len() as u64) as usize];
                let first = first.saturating_sub(rng.below(4));
                o.verify(w, a, b, volume, Some((first, first + rng.range(1, 12))));
            }
            None
        }
        Fault::Balance => {
            let policy = rng.pick(&POLICIES);
            o.balance(w, a, volume, policy);
            None
        }
        Fault::Promote => {
            o.try_promote(w, a);
            None
        }
        Fault::Corrupt => {
            w.corrupt_next(a, b, rng.range(1, 4) as u32);
            None
        }
        Fault::NewUuid => {
            // On a disk that is not current it would be a second branch.
            let is_current = |node: usize| {
                let mut disks = w.snapshot(node).into_iter().flat_map(|s| s.devices);
                disks.any(|d| d.volume.0 == volume && d.disk_state == DiskState::UpToDate)
            };
            if let Some(primary) = o.primary.filter(|p| o.is_up(*p) && is_current(*p)) {
                w.command(
                    primary,
                    Command::NewCurrentUuid {
                        volume: VolumeNr(volume),
                        clear_bitmap: false,
                        force_resync: false,
                    },
                );
            }
            None
        }
    }
}
