//! What nodes rely on without looking: that a disk which counts as UpToDate has what was
//! acknowledged, that the last copy keeps it, and that who is no Primary any more has flushed.
//! Seen from outside the core, at each change of a state.

use std::collections::BTreeMap;

use lockstep_core::command::Answer;
use lockstep_core::options::{Protocol, Quorum, ResourceOptions};
use lockstep_core::report::Snapshot;
use lockstep_core::state::{ConnState, DiskState, ReplState, Role};
use lockstep_format::disk::v09::DeviceFlags;
use lockstep_format::units::{NodeId, VolumeNr};

use crate::check::is_whole;
use crate::disk::Disk;
use crate::legal;
use crate::world::{Asked, Commanded, MAX_VOLUMES, MS, SECOND, World, name};

/// The part of a node's state that the operator and the checkers ask for all the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Role.
    pub role: Role,
    /// For each volume a bit for each node that has all its data according to this one.
    pub holders: [u32; MAX_VOLUMES],
    /// All volumes have quorum.
    pub quorate: bool,
    /// Those that have none, a bit each.
    pub(crate) lacking: u32,
    /// Requests are suspended.
    pub suspended: bool,
    /// It sees fewer nodes with disks than it does not know the whereabouts of: who asks for a
    /// majority has none, whatever is counted for this node itself.
    pub outnumbered: bool,
    /// Of nodes with disks, a bit each: those that are away, and of which it knows in every volume that
    /// they are Outdated or worse.
    pub outdated: u32,
    /// For each volume a bit for each node with which a resync is paused, or would be.
    pub paused: [u32; MAX_VOLUMES],
    /// States that cannot be together.
    pub odd: Option<&'static str>,
}

impl View {
    pub(crate) fn of(node: usize, snapshot: &Snapshot, storage: usize) -> View {
        View {
            role: snapshot.role,
            holders: crate::operator::holders(node, snapshot),
            quorate: snapshot.devices.iter().all(|d| d.quorum),
            lacking: lacking(snapshot),
            suspended: !snapshot.suspended.is_empty(),
            outnumbered: outnumbered(snapshot, storage),
            outdated: outdated(snapshot, storage),
            paused: paused(snapshot),
            odd: legal::odd(snapshot),
        }
    }
}

/// What a node's last known state amounts to, while it is up.
#[derive(Clone, Debug, Default)]
struct Relied {
    is_primary: bool,
    /// Its requests were suspended when something last happened.
    suspended: bool,
    /// Volumes that had no quorum when something last happened, a bit each.
    lacking: u32,
    /// The generation of the last acknowledged write, and since when.
    generation: [Option<(u64, u64)>; MAX_VOLUMES],
    /// This Primary has no disk, and only that node has the data, since then.
    lone: [Option<(usize, u64)>; MAX_VOLUMES],
    /// It was demoted when so many writes had reached its disk, and its metadata do not say so yet.
    demoted: [Option<u64>; MAX_VOLUMES],
    /// When it was demoted by force the last time.
    forced_at: Option<u64>,
    /// Peers that this Primary refuses, as they may lack what they have acknowledged.
    refused: u32,
    /// While it was Primary: who had all data the last time that anybody had them.
    holders: [u32; MAX_VOLUMES],
}

/// By two nodes, a volume and a block of it: the nodes' values, and since when.
type Differing = BTreeMap<(usize, usize, u16, u64), (u64, u64, u64)>;

/// What the checkers saw last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    relied: Vec<Relied>,
    /// Disks that are taken for current and are not, by node and volume: since when.
    stale: BTreeMap<(usize, u16), u64>,
    /// Disks that are taken for current and lack the generation: since when.
    late: BTreeMap<(usize, u16), u64>,
    /// Blocks that differ between nodes which take each other for equal.
    differing: Differing,
    /// By two nodes and a volume: since when they do not know of a difference, one of them not whole.
    pub(crate) unknown: BTreeMap<(usize, usize, usize), u64>,
    /// By node: the cluster-wide change that it takes part in, and since when.
    changes: BTreeMap<usize, ((u32, NodeId), u64)>,
    /// By node, peer and volume: since when the node has paused a resync which the peer takes for running.
    one_sided: BTreeMap<(usize, usize, u16), u64>,
    /// By node: since when it sees a majority and has no quorum.
    deprived: BTreeMap<usize, u64>,
    /// Primaries that another node has taken over from.
    pub(crate) outlived: u32,
    /// By node and volume: since when it is Primary without quorum, and its metadata do not say so.
    unnoted: BTreeMap<(usize, usize), u64>,
    /// By node and volume: since when its metadata say something else than it goes by.
    pub(crate) unsaid: BTreeMap<(usize, usize), u64>,
    /// By volume: what the node that is being told of the end of a disk operation knew before, counted in
    /// changes of its metadata.
    pub(crate) known: [Option<u64>; MAX_VOLUMES],
    /// Copies without which nothing is acknowledged.
    pub(crate) copies: u32,
}

impl Seen {
    /// Of so many nodes.
    pub(crate) fn of(nodes: usize) -> Self {
        Seen {
            relied: vec![Relied::default(); nodes],
            stale: BTreeMap::new(),
            late: BTreeMap::new(),
            differing: BTreeMap::new(),
            unknown: BTreeMap::new(),
            changes: BTreeMap::new(),
            one_sided: BTreeMap::new(),
            deprived: BTreeMap::new(),
            outlived: 0,
            unnoted: BTreeMap::new(),
            unsaid: BTreeMap::new(),
            known: [None; MAX_VOLUMES],
            copies: 0,
        }
    }

    /// Who had all data of a volume when a Primary, as it sees it, last had any; 0 if it is unknown.
    pub(crate) fn last_holders(&self, primary: usize, volume: usize) -> u32 {
        self.relied[primary].holders[volume]
    }

    /// The node says something of a peer. That it refuses the peer it says once, and it holds until both are connected.
    pub(crate) fn log_line(&mut self, node: usize, peer: NodeId, text: &str) {
        let refused = &mut self.relied[node].refused;
        let bit = 1 << peer.0;
        if text.contains("came back after a crash") {
            *refused |= bit;
        } else if text.starts_with("connection: ") && text.ends_with("-> Connected") {
            *refused &= !bit;
        }
    }

    /// The node is demoted by force: what waits fails.
    pub(crate) fn is_forced_down(&self, node: usize, now: u64) -> bool {
        self.relied[node].forced_at == Some(now)
    }

    /// This node refuses a peer for that.
    pub(crate) fn refuses(&self, node: usize) -> bool {
        self.relied[node].refused != 0
    }

    /// The node is not up any more.
    pub(crate) fn forget(&mut self, node: usize) {
        self.relied[node] = Relied::default();
    }
}

/// A command was answered. Whoever became Primary, and was not forced to, has quorum; a frozen Primary stays one.
pub(crate) fn answered(w: &mut World, node: usize, asked: &Commanded, became: Option<&Answer>) {
    if asked.text.starts_with("Secondary { force: true") {
        w.seen.relied[node].forced_at = Some(w.now);
    }
    let promotes = asked.text.starts_with("Primary { force: false");
    if !promotes || became != Some(&Answer::Done) || !w.wants_majority {
        return;
    }
    let lacks = |s: Snapshot| s.role == Role::Primary && s.devices.iter().any(|d| !d.quorum);
    if w.snapshot(node).is_some_and(lacks) {
        w.fail(format!("{} becomes Primary without quorum", name(node)));
    }
}

/// A disk that answers is not given up, however long the node itself stood still.
pub(crate) fn gives_up_what_hangs(w: &mut World, node: usize, volume: usize) {
    let disk = &w.nodes[node].disks[volume];
    let is_slow = disk.trouble.hangs || !disk.hung.is_empty() || disk.trouble.slowness > 1;
    let was_slow = w.now < disk.answers_since + 5 * SECOND;
    if !is_slow && !was_slow && !disk.is_forced && w.nodes[node].skew == 0 {
        w.fail(format!(
            "{} gives up the disk of volume {volume}, which answers",
            name(node)
        ));
    }
}

/// A state has changed somewhere: compares with what was before.
pub(crate) fn states_changed(w: &mut World) {
    for node in 0..w.nodes.len() {
        let Some(view) = w.view(node) else {
            w.seen.forget(node);
            continue;
        };
        if let Some(what) = view.odd {
            w.fail(format!("{} {what}", name(node)));
        }
        let is_primary = view.role == Role::Primary && view.quorate;
        for volume in 0..w.nodes[node].disks.len() {
            let holders = if is_primary { view.holders[volume] } else { 0 };
            let alone = holders & 1 << node == 0 && holders.count_ones() == 1;
            let lone = alone.then(|| holders.trailing_zeros() as usize);
            let sequence = w.nodes[node].disks[volume].sequence();
            // One with an Inconsistent disk is called no crashed Primary in any case.
            let would_crash = view.holders[volume] & 1 << node != 0
                && is_crashed_primary(&w.nodes[node].disks[volume]);
            let now = w.now;
            let relied = &mut w.seen.relied[node];
            if lone != relied.lone[volume].map(|(holder, _)| holder) {
                relied.lone[volume] = lone.map(|holder| (holder, now));
            }
            if view.role == Role::Primary {
                relied.demoted[volume] = None;
                if view.holders[volume] != 0 {
                    relied.holders[volume] = view.holders[volume];
                }
            } else if relied.is_primary && would_crash {
                relied.demoted[volume] = Some(sequence);
            }
        }
        w.seen.relied[node].is_primary = view.role == Role::Primary;
        w.seen.relied[node].suspended = view.suspended;
        w.seen.relied[node].lacking = view.lacking;
    }
}

/// A node whose requests are suspended acknowledges no write.
pub(crate) fn goes_on(w: &mut World, node: usize) {
    // The end of a suspension may still be told.
    let is_now = || w.snapshot(node).is_some_and(|s| !s.suspended.is_empty());
    if w.seen.relied[node].suspended && is_now() {
        w.fail(format!(
            "{} completes a request while its requests are suspended",
            name(node)
        ));
    }
}

/// The generation of a node's data: that of its disk, or that which a Primary without one shows.
pub(crate) fn generation(w: &World, node: usize, volume: usize) -> Option<u64> {
    let disk = &w.nodes[node].disks[volume];
    if disk.open {
        return disk.generation();
    }
    let resource = w.nodes[node].resource.as_ref()?;
    let uuid = resource.generation(VolumeNr(volume as u16))?;
    Some(uuid.0 & !1).filter(|uuid| *uuid > 4)
}

/// With protocol C, a write is acknowledged: the Primary's generation, or that under which it got
/// the request, is on stable storage of every node that it counts on. Without that, a node could be
/// promoted that has the write and not its generation.
pub(crate) fn generation_is_there(w: &mut World, primary: usize, asked: &Asked) {
    let v = usize::from(asked.volume);
    let (Some(before), Some(now)) = (asked.generation, generation(w, primary, v)) else {
        return;
    };
    if w.config.protocol != Protocol::C || !w.flushes_peers {
        return;
    }
    // A target that ends its resync just then hears of it a moment later.
    let last = &mut w.seen.relied[primary].generation[v];
    let since = last
        .filter(|(of, _)| *of == now)
        .map_or(w.now, |(_, since)| since);
    *last = Some((now, since));
    if w.now < since + STALE_MOST {
        return;
    }
    let holders = w.view(primary).map_or(0, |view| view.holders[v]);
    for node in w.storage() {
        let counts = node != primary && holders & 1 << node != 0 && linked(w, primary, node);
        let disk = &w.nodes[node].disks[v];
        if counts
            && is_whole(w, node, v)
            && !disk.had_errors
            && !disk.knows(before)
            && !disk.knows(now)
        {
            w.fail(format!(
                "{} acknowledges a write of volume {v}, but the metadata of {} do not know its \
                 generation",
                name(primary),
                name(node)
            ));
            return;
        }
    }
}

/// With protocol C, each disk that the Primary takes for current, and that takes itself for it, has
/// all that was acknowledged. While nodes meet again this may be untrue for a moment.
pub fn followers_are_current(w: &mut World) {
    if w.config.protocol != Protocol::C || w.violation.is_some() {
        return;
    }
    let before = std::mem::take(&mut w.seen.stale);
    let late_before = std::mem::take(&mut w.seen.late);
    let views: Vec<_> = (0..w.nodes.len()).map(|node| w.view(node)).collect();
    let primary = (0..w.nodes.len())
        .find(|node| views[*node].is_some_and(|v| v.role == Role::Primary && v.quorate));
    let Some((primary, of_primary)) = primary.and_then(|p| Some((p, views[p]?))) else {
        return;
    };
    for volume in 0..w.config.volumes {
        let v = usize::from(volume);
        let touched = w.history.touched(volume);
        for node in w.storage() {
            let counts = |view: &View| view.holders[v] & 1 << node != 0;
            let agree = counts(&of_primary) && views[node].as_ref().is_some_and(counts);
            if !agree || !linked(w, primary, node) || !is_whole(w, node, v) {
                // A Primary that is frozen serves nobody, and waits for its operator.
                let frozen = |view: &View| view.role == Role::Primary && !view.quorate;
                let serves = |view: &View| counts(view) && !frozen(view);
                let counts_itself = views[node].as_ref().is_some_and(serves);
                if counts_itself && is_whole(w, node, v) {
                    hears_of_primary(w, (primary, node, volume), &touched, &before);
                }
                continue;
            }
            if is_late(w, primary, node, v) {
                let since = late_before.get(&(node, volume)).copied().unwrap_or(w.now);
                w.seen.late.insert((node, volume), since);
                if w.now >= since + LATE_MOST {
                    w.fail(format!(
                        "{} has acknowledged a write of volume {volume}, and counted on the disk of {} for \
                         {} s, whose metadata do not know its generation",
                        name(primary),
                        name(node),
                        LATE_MOST / SECOND
                    ));
                    return;
                }
            }
            let Some(block) = stale_block(w, node, volume, &touched) else {
                continue;
            };
            let since = before.get(&(node, volume)).copied().unwrap_or(w.now);
            w.seen.stale.insert((node, volume), since);
            if w.now >= since + STALE_MOST {
                let text = format!(
                    "{} has counted on the disk of {} for {} s, where block {block} of volume \
                     {volume} has version {}, which is older than what was acknowledged; {}",
                    name(primary),
                    name(node),
                    STALE_MOST / SECOND,
                    w.nodes[node].disks[v].content[block as usize],
                    w.history.describe(volume, block)
                );
                w.fail(text);
                return;
            }
        }
    }
}

/// A block that has something older on this disk than what was acknowledged.
pub(crate) fn stale_block(w: &World, node: usize, volume: u16, touched: &[u64]) -> Option<u64> {
    let content = &w.nodes[node].disks[usize::from(volume)].content;
    touched.iter().copied().find(|block| {
        let value = content[*block as usize];
        !w.spoiled.contains_key(&(volume, *block))
            && !w.history.is_current(volume, *block, value, w.now)
    })
}

/// A node that cannot reach the Primary hears of it through a third one: it does not go on taking
/// itself for UpToDate while it lacks what was acknowledged.
fn hears_of_primary(
    w: &mut World,
    (primary, node, volume): (usize, usize, u16),
    touched: &[u64],
    before: &BTreeMap<(usize, u16), u64>,
) {
    let third = |n: &usize| *n != node && *n != primary && w.nodes[*n].frozen_until <= w.now;
    let mut thirds = (0..w.nodes.len()).filter(third);
    let hears = thirds.any(|n| linked(w, node, n) && linked(w, n, primary));
    if !hears || node == primary || linked(w, primary, node) || w.nodes[node].frozen_until > w.now {
        return;
    }
    let v = usize::from(volume);
    let Some(block) = stale_block(w, node, volume, touched) else {
        return;
    };
    let since = before.get(&(node, volume)).copied().unwrap_or(w.now);
    w.seen.stale.insert((node, volume), since);
    if w.now >= since + FAR_MOST {
        let text = format!(
            "{} hears of the Primary {} through others and has taken its disk for UpToDate for {} s, \
             where block {block} of volume {volume} has {}, which is older than what was \
             acknowledged; {}",
            name(node),
            name(primary),
            FAR_MOST / SECOND,
            w.nodes[node].disks[v].content[block as usize],
            w.history.describe(volume, block)
        );
        w.fail(text);
    }
}

/// A peer whose disk hangs keeps nobody's writes waiting for ever, if this node's own disk works.
pub(crate) fn writes_are_answered(w: &mut World, limit: u64) {
    for node in 0..w.nodes.len() {
        let Some(view) = w.view(node) else { continue };
        let hangs = w.nodes[node]
            .disks
            .iter()
            .any(|d| d.trouble.hangs || !d.hung.is_empty());
        let whole = view.holders.iter().take(usize::from(w.config.volumes));
        let whole = whole.into_iter().all(|holders| holders & 1 << node != 0);
        if hangs || view.suspended || !whole || w.nodes[node].frozen_until > w.now {
            w.nodes[node].works_since = w.now;
            continue;
        }
        let works_since = w.nodes[node].works_since;
        let mut requests = w.nodes[node].requests.values();
        let late = requests.find(|r| w.now > r.start.max(works_since) + limit);
        if let Some(late) = late {
            let text = format!(
                "{} waits for {} for {} s, and its own disk works",
                name(node),
                crate::story::asked(late),
                limit / SECOND
            );
            w.fail(text);
            return;
        }
    }
}

/// With `disk-timeout`, a disk that has not ended an operation for longer is given up.
pub(crate) fn disks_are_given_up(w: &mut World, tenths: u32) {
    let limit = u64::from(tenths) * SECOND / 10 + 2 * SECOND;
    for node in 0..w.nodes.len() {
        let is_up = w.is_up(node) && w.nodes[node].frozen_until <= w.now;
        for volume in 0..w.nodes[node].disks.len() {
            let disk = &mut w.nodes[node].disks[volume];
            let waits = tenths > 0 && is_up && disk.open && !disk.given_up && !disk.hung.is_empty();
            if !waits {
                disk.hangs_since = None;
                continue;
            }
            let since = *disk.hangs_since.get_or_insert(w.now);
            if w.now > since + limit {
                w.fail(format!(
                    "{} keeps the disk of volume {volume}, which has not answered for {} s",
                    name(node),
                    limit / SECOND
                ));
                return;
            }
        }
    }
}

/// The Primary has acknowledged a write of its generation, and the metadata of that node lack it.
fn is_late(w: &World, primary: usize, node: usize, v: usize) -> bool {
    let now = generation(w, primary, v);
    let acknowledged = w.seen.relied[primary].generation[v].map(|(generation, _)| generation);
    let disk = &w.nodes[node].disks[v];
    w.flushes_peers
        && node != primary
        && !disk.had_errors
        && acknowledged.is_some_and(|of| Some(of) == now && !disk.knows(of))
}

/// Two connected nodes that take each other's disks and their own for UpToDate have the same data;
/// what one has written and the other not yet is on its way.
pub fn replicas_agree(w: &mut World) {
    if w.violation.is_some() {
        return;
    }
    let before = std::mem::take(&mut w.seen.differing);
    let views: Vec<_> = (0..w.nodes.len()).map(|node| w.view(node)).collect();
    for volume in 0..w.config.volumes {
        let v = usize::from(volume);
        for x in w.storage() {
            for y in x + 1..w.storage().end {
                let both = 1 << x | 1 << y;
                let counts = |view: &View| view.holders[v] & both == both;
                let agree = [x, y].iter().all(|n| {
                    views[*n].as_ref().is_some_and(counts)
                        && is_whole(w, *n, v)
                        && w.nodes[*n].frozen_until <= w.now
                });
                if agree && linked(w, x, y) {
                    look_at_pair(w, (x, y, volume), &before);
                }
            }
        }
    }
}

fn look_at_pair(w: &mut World, (x, y, volume): (usize, usize, u16), before: &Differing) {
    let stands_still = |node: usize| {
        let busy = w.nodes[node].disks[usize::from(volume)].busy_since();
        busy.is_some_and(|since| w.now >= since + SLOW_MOST)
    };
    if stands_still(x) || stands_still(y) {
        return;
    }
    let content = |w: &World, node: usize, block: u64| {
        w.nodes[node].disks[usize::from(volume)].content[block as usize]
    };
    for block in w.history.touched(volume) {
        let (a, b) = (content(w, x, block), content(w, y, block));
        if a == b || w.spoiled.contains_key(&(volume, block)) {
            continue;
        }
        if crate::cover::is_asked_for(w, usize::from(volume), block) {
            continue;
        }
        let key = (x, y, volume, block);
        let same = before.get(&key).filter(|(c, d, _)| (*c, *d) == (a, b));
        let since = same.map_or(w.now, |(_, _, since)| *since);
        w.seen.differing.insert(key, (a, b, since));
        if w.now >= since + DIFFERENT_MOST {
            let text = format!(
                "block {block} of volume {volume} has been version {a} on {} and {b} on {} for {} s, which \
                 are connected and UpToDate, and nobody copies it; {}",
                name(x),
                name(y),
                DIFFERENT_MOST / SECOND,
                w.history.describe(volume, block)
            );
            w.fail(text);
            return;
        }
    }
}

/// How long what one of two nodes has may be on its way to the other: a wire may stand still until
/// a ping finds that out.
const DIFFERENT_MOST: u64 = 40 * SECOND;

/// A slow disk that has needed longer for one operation may need half a minute more, and others wait for that one.
const SLOW_MOST: u64 = 5 * SECOND;

/// How long a disk may be taken for current that is not.
const STALE_MOST: u64 = 5 * SECOND;

/// How long a node may take its disk for current beside a Primary that it hears of through others.
const FAR_MOST: u64 = 10 * SECOND;

/// How long a disk may be taken for current that does not know the generation of acknowledged writes.
const LATE_MOST: u64 = SECOND;

/// Both have the same link and none has restarted since.
fn linked(w: &World, a: usize, b: usize) -> bool {
    w.shares_link(a, b) && w.shares_link(b, a)
}

/// A Primary without a disk acknowledges a write that one disk alone has: there it is durable,
/// since nobody could copy it again.
pub(crate) fn last_copy_is_durable(w: &mut World, primary: usize, asked: &Asked) {
    if w.config.protocol != Protocol::C || w.nodes.len() != 2 {
        return;
    }
    let Some((holder, since)) = w.seen.relied[primary].lone[usize::from(asked.volume)] else {
        return;
    };
    // Another Primary lets its own write win over this one.
    let follows = w.view(holder).is_some_and(|v| v.role == Role::Secondary);
    if asked.start > since && follows && linked(w, primary, holder) {
        crate::check::is_durable_at(w, primary, asked, holder);
    }
}

/// A crash now would make the disk that of a crashed Primary.
pub(crate) fn is_crashed_primary(disk: &Disk) -> bool {
    let flags = disk.flags();
    flags.is_some_and(|f| f.contains(DeviceFlags::CRASHED_PRIMARY))
}

/// A superblock was written. After a demotion the first one that would not make the node a crashed
/// Primary any more comes with a flush: what the node wrote must not be left in the disk's cache.
pub(crate) fn superblock_written(w: &mut World, node: usize, volume: usize) {
    let Some(sequence) = w.seen.relied[node].demoted[volume] else {
        return;
    };
    let disk = &w.nodes[node].disks[volume];
    if is_crashed_primary(disk) {
        return;
    }
    let volatile = disk.first_volatile(sequence);
    w.seen.relied[node].demoted[volume] = None;
    // Beside another Primary it may be that one's, on its way to the disk at the demotion and promised to nobody.
    let is_another = |block: &u64| {
        w.history.several_writers && crate::cover::is_asked_for_writing(w, volume, *block)
    };
    if let Some(block) = volatile.filter(|block| !is_another(block)) {
        w.fail(format!(
            "{} would not come back as a crashed Primary any more, but block {block} of volume \
             {volume}, which it wrote as Primary, is only in its disk's cache",
            name(node)
        ));
    }
}

/// A node sees fewer nodes with disks, itself among them, than are away without a word.
fn outnumbered(snapshot: &Snapshot, storage: usize) -> bool {
    let mut seen = 1;
    let mut away = 0;
    for connection in &snapshot.connections {
        if usize::from(connection.peer.0) >= storage {
            continue;
        }
        let disks = || connection.peer_devices.iter().map(|p| p.disk_state);
        if connection.state == ConnState::Connected {
            seen += 1;
        } else if disks().all(|disk| disk == DiskState::DUnknown) {
            // One that left in good order is Outdated.
            away += 1;
        }
    }
    away > seen
}

/// Nodes that are away and known to be behind: they left in good order, or were outdated.
fn outdated(snapshot: &Snapshot, storage: usize) -> u32 {
    let is_behind =
        |disk: DiskState| (DiskState::Inconsistent..=DiskState::Outdated).contains(&disk);
    let away = snapshot.connections.iter().filter(|c| {
        let mut disks = c.peer_devices.iter().map(|p| p.disk_state);
        usize::from(c.peer.0) < storage && c.state != ConnState::Connected && disks.all(is_behind)
    });
    away.fold(0, |all, c| all | 1 << c.peer.0)
}

/// Volumes without quorum, a bit each.
fn lacking(snapshot: &Snapshot) -> u32 {
    let without = snapshot.devices.iter().filter(|d| !d.quorum);
    without.fold(0, |all, d| all | 1 << d.volume.0)
}

/// Peers with which each volume's resync is paused.
fn paused(snapshot: &Snapshot) -> [u32; MAX_VOLUMES] {
    let mut paused = [0; MAX_VOLUMES];
    for connection in &snapshot.connections {
        let waits = connection.peer_devices.iter();
        for p in waits.filter(|p| !p.resync_suspended.is_empty()) {
            paused[usize::from(p.volume.0)] |= 1 << connection.peer.0;
        }
    }
    paused
}

/// A cluster-wide change ends at the latest when `twopc-timeout` is over, whoever does not answer.
pub(crate) fn changes_end(w: &mut World, timeout_tenths: u32) {
    for node in 0..w.nodes.len() {
        let is_awake = w.nodes[node].frozen_until < w.now;
        let resource = w.nodes[node].resource.as_ref().filter(|_| is_awake);
        let Some(change) = resource.and_then(|r| r.transaction()) else {
            w.seen.changes.remove(&node);
            continue;
        };
        let entry = w.seen.changes.entry(node).or_insert((change, w.now));
        if entry.0 != change {
            *entry = (change, w.now);
        }
        let took = w.now - entry.1;
        if took > u64::from(timeout_tenths) * 100 * MS + CHANGE_MOST {
            w.fail(format!(
                "{} has taken part in a cluster-wide change of {} for {} s, longer than twopc-timeout",
                name(node),
                name(usize::from(change.1.0)),
                took / SECOND
            ));
        }
    }
}

/// What one node has paused is paused on the other one soon.
pub(crate) fn pauses_are_known(w: &mut World) {
    let before = std::mem::take(&mut w.seen.one_sided);
    if w.stands_still() || w.config.slow.is_some() {
        return;
    }
    let nodes = w.nodes.len();
    for (node, peer) in (0..nodes * nodes).map(|pair| (pair / nodes, pair % nodes)) {
        let waits = w.view(node).map_or([0; MAX_VOLUMES], |view| view.paused);
        let waits = |volume: u16| waits[usize::from(volume)] & 1 << peer != 0;
        // What is said while nothing passes comes later, or with the next connection.
        let hears = linked(w, node, peer)
            && w.is_heard_soon(node, peer)
            && ![(node, peer), (peer, node)]
                .iter()
                .any(|way| w.blocked.contains(way));
        if node == peer || !(0..w.config.volumes).any(waits) || !hears {
            continue;
        }
        let connections = w.snapshot(peer).map(|s| s.connections).unwrap_or_default();
        let to_node = connections
            .into_iter()
            .find(|c| usize::from(c.peer.0) == node);
        for p in to_node.into_iter().flat_map(|c| c.peer_devices) {
            let runs = matches!(p.repl_state, ReplState::SyncTarget | ReplState::SyncSource);
            if !runs || !waits(p.volume.0) {
                continue;
            }
            let key = (node, peer, p.volume.0);
            let since = before.get(&key).copied().unwrap_or(w.now);
            w.seen.one_sided.insert(key, since);
            if w.now >= since + STALE_MOST {
                w.fail(format!(
                    "{} has paused the resync of volume {} with {}, where it has gone on for {} s",
                    name(node),
                    p.volume.0,
                    name(peer),
                    STALE_MOST / SECOND
                ));
                return;
            }
        }
    }
}

/// How long a cluster-wide change may outlive its time-out: it is looked at once a second.
const CHANGE_MOST: u64 = 3 * SECOND;

/// Where a majority is asked for, and no more, a node that has one goes on.
pub(crate) fn majority_is_enough(w: &mut World, redundancy: bool) {
    if !w.wants_majority || redundancy {
        return;
    }
    let (storage, volumes) = (w.storage().len() as u32, usize::from(w.config.volumes));
    for node in 0..w.nodes.len() {
        if w.view(node).is_none_or(|view| view.role != Role::Primary) {
            w.seen.outlived &= !(1 << node);
        }
        let outlived = w.seen.outlived & 1 << node != 0;
        let has = |view: &View| {
            let mut of_volumes = view.holders.iter().take(volumes);
            let all = (1 << storage) - 1;
            // Or nobody is left who could go on without it, or has done so: the last one.
            let last = |h: &u32| h & 1 << node != 0 && h | view.outdated == all && !outlived;
            of_volumes.all(|h| h.count_ones() * 2 > storage || last(h))
        };
        let deprived = w.view(node).is_some_and(|view| !view.quorate && has(&view));
        if !deprived || w.nodes[node].frozen_until > w.now {
            w.seen.deprived.remove(&node);
            continue;
        }
        let since = *w.seen.deprived.entry(node).or_insert(w.now);
        if w.now >= since + STALE_MOST {
            w.fail(format!(
                "{} has had no quorum for {} s, and sees most disks UpToDate, or nobody else has one",
                name(node),
                STALE_MOST / SECOND
            ));
            return;
        }
    }
}

/// The metadata of a Primary without quorum say so: after a crash others go by that.
pub(crate) fn losses_of_quorum_are_noted(w: &mut World) {
    let before = std::mem::take(&mut w.seen.unnoted);
    for node in w.storage() {
        let view = w.view(node).filter(|v| v.role == Role::Primary);
        let lacking = view.map_or(0, |v| v.lacking);
        for volume in 0..w.nodes[node].disks.len() {
            let disk = &w.nodes[node].disks[volume];
            let flags = disk.flags().filter(|_| disk.open && !disk.trouble.hangs);
            let is_noted = flags.is_none_or(|f| f.contains(DeviceFlags::PRIMARY_LOST_QUORUM));
            let sleeps = w.nodes[node].frozen_until + STALE_MOST > w.now;
            if lacking & 1 << volume == 0 || is_noted || sleeps || disk.busy_since().is_some() {
                continue;
            }
            let since = before.get(&(node, volume)).copied().unwrap_or(w.now);
            w.seen.unnoted.insert((node, volume), since);
            if w.now >= since + STALE_MOST {
                w.fail(format!(
                    "{} has been Primary without quorum for {} s, and the metadata of volume {volume} do not say so",
                    name(node),
                    STALE_MOST / SECOND
                ));
                return;
            }
        }
    }
}

/// What `quorum-minimum-redundancy` asks for, where it is a number.
pub(crate) fn copies(options: &ResourceOptions) -> u32 {
    match options.quorum_minimum_redundancy {
        Quorum::Number(copies) if options.quorum != Quorum::Off => u32::from(copies),
        _ => 0,
    }
}

/// As far as the node knows.
fn takes_for_connected(w: &World, node: usize, peer: usize) -> bool {
    w.snapshot(node).is_some_and(|snapshot| {
        let mut connections = snapshot.connections.iter();
        connections.any(|c| usize::from(c.peer.0) == peer && c.state == ConnState::Connected)
    })
}

/// Where so many copies are asked for, a node that counts on fewer acknowledges nothing. One without a
/// disk goes by its peers.
fn copies_are_there(w: &mut World, node: usize, asked: &Asked) {
    let copies = w.seen.copies;
    // With a tie-breaker one copy may be enough, also if the node has not heard yet that it is gone.
    let mut clients = w.storage().end..w.nodes.len();
    if copies == 0 || clients.any(|client| takes_for_connected(w, node, client)) {
        return;
    }
    let volume = usize::from(asked.volume);
    let holders = w.view(node).map_or(0, |v| v.holders[volume]);
    // It may have lost several at once, and acknowledged the write in between.
    let before = w.seen.relied[node].holders[volume];
    let enough = [holders, before].iter().any(|h| h.count_ones() >= copies);
    if !enough && holders & 1 << node != 0 {
        w.fail(format!(
            "{} acknowledges a write with {} copies, and {copies} are asked for",
            name(node),
            holders.count_ones()
        ));
    }
}

/// The node has no disk, and most disks are connected to one that has its data and a quorum. Those that the node
/// has no connection to take themselves for outdated.
fn majority_is_behind(w: &mut World, node: usize, volume: usize) -> bool {
    let Some(view) = w.view(node) else {
        return false;
    };
    let holders = view.holders[volume];
    if holders & 1 << node != 0 {
        return false;
    }
    let connected = |w: &World, from: usize| {
        let snapshot = w.snapshot(from).expect("it is up");
        let mut nodes = 1_u32 << from;
        for connection in &snapshot.connections {
            if connection.state == ConnState::Connected {
                nodes |= 1 << connection.peer.0;
            }
        }
        nodes
    };
    let near = connected(w, node);
    let storage = w.storage();
    for peer in storage.clone().filter(|peer| holders & 1 << *peer != 0) {
        if !w.view(peer).is_some_and(|v| v.quorate) {
            continue;
        }
        let seen = connected(w, peer);
        let seen: Vec<usize> = (storage.clone()).filter(|n| seen & 1 << *n != 0).collect();
        let knows = |n: &usize| {
            let disk = |s: Snapshot| s.devices.get(volume).map(|d| d.disk_state);
            near & 1 << *n != 0 || w.snapshot(*n).and_then(disk) <= Some(DiskState::Outdated)
        };
        if seen.len() * 2 > storage.len() && seen.iter().all(knows) {
            return true;
        }
    }
    false
}

/// Where a majority is asked for, a node without one acknowledges nothing. One without a disk may have that of a
/// peer, if whoever is behind it knows that its data are not current.
pub(crate) fn majority_is_there(w: &mut World, node: usize, asked: &Asked) {
    copies_are_there(w, node, asked);
    let before = w.seen.relied[node].lacking;
    let lacking = w.view(node).map_or(0, |view| view.lacking) & before;
    if lacking & 1 << asked.volume != 0 {
        w.fail(format!(
            "{} acknowledges a write of volume {}, which has no quorum",
            name(node),
            asked.volume
        ));
    }
    let outnumbered = w.wants_majority && w.view(node).is_some_and(|v| v.outnumbered);
    let storage = w.storage();
    let copies = storage
        .clone()
        .filter(|n| crate::acks::has_it(w, *n, asked));
    // Those that have it have said so, before they went out of reach.
    let is_kept = copies.count() * 2 > storage.len();
    if outnumbered && !is_kept && !majority_is_behind(w, node, usize::from(asked.volume)) {
        w.fail(format!(
            "{} acknowledges a write, but most nodes are out of its reach",
            name(node)
        ));
    }
}
