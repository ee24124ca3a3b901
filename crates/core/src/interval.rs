//! Ranges in flight on one volume, and which of them has to wait for which.
//!
//! Overlapping IO of different origin (application, peers, resync in both directions) is ordered
//! here by the rules of semantics.md, 15.10, made fair: a range waits only for ranges that came
//! before it, and it waits for those also while they wait themselves. So nothing starves, and a
//! cycle of waits is impossible within one node.
//!
//! It never does IO: the owner is told when its range may go on.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, Sector};

/// Names a range in the table until it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RangeId(u32);

/// Names a watched range until it is let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchId {
    start: u64,
    serial: u64,
}

/// Where the IO on a range comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A write of the local application.
    LocalWrite,
    /// A write received from a peer.
    PeerWrite(NodeId),
    /// A resync request of this node to its sync source, later the write of the reply.
    ResyncTarget(NodeId),
    /// A read for the resync of a peer, held until the peer has written it.
    ResyncSource(NodeId),
    /// A read of the local application, where reads may also go to peers or writes of peers are in
    /// flight: it waits for the writes in flight, which a peer may have shown already.
    LocalRead,
    /// A read for a peer's application. It waits for what this node has received of the range.
    RemoteRead,
}

impl Origin {
    /// The data on disk change, at the latest when the range goes on.
    fn writes(self) -> bool {
        match self {
            Origin::LocalWrite | Origin::PeerWrite(_) | Origin::ResyncTarget(_) => true,
            Origin::ResyncSource(_) | Origin::RemoteRead | Origin::LocalRead => false,
        }
    }
}

/// How far a range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Waits before it is submitted or, for a resync request, sent.
    Waiting,
    /// Submitted; a resync request was sent.
    Active,
    /// The reply of a resync request is here; waits or is being written.
    Replied,
    /// The local disk is done with it.
    DiskDone,
}

#[derive(Debug)]
struct Range<T> {
    origin: Origin,
    phase: Phase,
    start: u64,
    end: u64,
    /// Order of arrival.
    seq: u64,
    /// Ranges that this one waits for.
    blockers: u32,
    /// Ranges that wait for this one.
    waiters: Vec<u32>,
    /// Writes of peers wait until a peer has decided about this one.
    undecided: bool,
    owner: T,
}

impl<T> Range<T> {
    /// A later range of this origin waits for it.
    fn holds(&self, later: Origin) -> bool {
        blocks(self.origin, self.phase, later)
            || self.undecided && matches!(later, Origin::PeerWrite(_))
    }
}

/// All ranges in flight on one volume. `T` says who owns a range.
#[derive(Debug)]
pub struct Intervals<T> {
    ranges: Vec<Option<Range<T>>>,
    free: Vec<u32>,
    /// By length class, then by start: an overlap search looks back by the class's length only.
    by_start: [BTreeMap<(u64, u32), ()>; CLASS_SECTORS.len()],
    next_seq: u64,
    waiting: usize,
    /// Ranges that wait for nothing and keep nothing waiting: end, and whether a write overlapped.
    watches: BTreeMap<WatchId, (u64, bool)>,
    #[cfg(feature = "planted")]
    pub(crate) planted: Option<crate::planted::Planted>,
}

/// Longest watched range in sectors: 1 MiB.
const WATCH_SECTORS: u64 = 2048;

/// Upper length of each class in sectors: 4 KiB, 64 KiB, 1 MiB, 128 MiB, whole device.
const CLASS_SECTORS: [u64; 5] = [8, 128, 2048, 262_144, u64::MAX];

impl<T> Default for Intervals<T> {
    fn default() -> Self {
        Intervals {
            ranges: Vec::new(),
            free: Vec::new(),
            by_start: Default::default(),
            next_seq: 0,
            waiting: 0,
            watches: BTreeMap::new(),
            #[cfg(feature = "planted")]
            planted: None,
        }
    }
}

impl<T: Copy> Intervals<T> {
    /// Adds a range; says whether it may go on at once.
    pub fn insert(
        &mut self,
        origin: Origin,
        sector: Sector,
        size_bytes: u32,
        owner: T,
    ) -> (RangeId, bool) {
        let start = sector.0;
        let end = sector.end_of(size_bytes).0.max(start.saturating_add(1));
        let mut range = Range {
            origin,
            phase: Phase::Waiting,
            start,
            end,
            seq: self.next_seq,
            blockers: 0,
            waiters: Vec::new(),
            undecided: false,
            owner,
        };
        self.next_seq += 1;
        if !self.watches.is_empty() && origin.writes() {
            self.mark_watches(start, end);
        }
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.ranges.push(None);
                u32::try_from(self.ranges.len() - 1).expect("fewer than 2^32 ranges in flight")
            }
        };
        let careless = planted!(self, WriteOvertakesResyncRead);
        let unordered = planted!(self, PeerWritesUnordered);
        for other in self.overlapping(start, end) {
            let earlier = self.range_mut(other);
            let skips = careless && matches!(earlier.origin, Origin::ResyncSource(_))
                || unordered && matches!(earlier.origin, Origin::PeerWrite(_));
            if earlier.holds(origin) && !skips {
                earlier.waiters.push(index);
                range.blockers += 1;
            }
        }
        let ready = range.blockers == 0;
        if ready {
            range.phase = Phase::Active;
        } else {
            self.waiting += 1;
        }
        self.by_start[class(start, end)].insert((start, index), ());
        self.ranges[index as usize] = Some(range);
        (RangeId(index), ready)
    }

    /// Watches a range of at most 1 MiB for writes, those in flight included.
    pub fn watch(&mut self, sector: Sector, size_bytes: u32) -> WatchId {
        self.watch_but(sector.0, sector.end_of(size_bytes).0, None)
    }

    /// Watches a range in flight for other writes, those in flight included. It is at most 1 MiB.
    pub fn watch_beside(&mut self, id: RangeId) -> WatchId {
        let (start, end) = {
            let range = self.range(id.0);
            (range.start, range.end)
        };
        self.watch_but(start, end, Some(id.0))
    }

    fn watch_but(&mut self, start: u64, end: u64, own: Option<u32>) -> WatchId {
        assert!(end - start <= WATCH_SECTORS, "a watched range is short");
        let overlapped = self.overlapping(start, end).into_iter().any(|index| {
            let range = self.range(index);
            Some(index) != own && range.origin.writes() && range.phase != Phase::DiskDone
        });
        let id = WatchId {
            start,
            serial: self.next_seq,
        };
        self.next_seq += 1;
        self.watches.insert(id, (end, overlapped));
        id
    }

    /// A write overlapped the range since it was watched.
    pub fn is_overlapped(&self, id: WatchId) -> bool {
        self.watches
            .get(&id)
            .is_some_and(|(_, overlapped)| *overlapped)
    }

    /// Ends a watch.
    pub fn unwatch(&mut self, id: WatchId) {
        self.watches.remove(&id);
    }

    fn mark_watches(&mut self, start: u64, end: u64) {
        let first = WatchId {
            start: start.saturating_sub(WATCH_SECTORS),
            serial: 0,
        };
        let behind = WatchId {
            start: end,
            serial: 0,
        };
        for (_, (watch_end, overlapped)) in self.watches.range_mut(first..behind) {
            if *watch_end > start {
                *overlapped = true;
            }
        }
    }

    /// The reply to a resync request is here: says whether it may be written at once. If not, its
    /// owner is named when it may.
    pub fn reply(&mut self, id: RangeId) -> bool {
        let (start, end, origin) = {
            let range = self.range(id.0);
            assert!(
                range.phase == Phase::Active,
                "a reply follows a request that was sent"
            );
            (range.start, range.end, range.origin)
        };
        let Origin::ResyncTarget(source) = origin else {
            panic!("only resync requests have replies");
        };
        let mut blockers = 0;
        for other in self.overlapping(start, end) {
            if other == id.0 {
                continue;
            }
            let range = self.range_mut(other);
            // What the source sent before the reply is older than the reply, also if it waits.
            let blocks = match (range.origin, range.phase) {
                (Origin::LocalWrite | Origin::PeerWrite(_), Phase::Active) => true,
                (Origin::PeerWrite(peer), Phase::Waiting) => peer == source,
                _ => false,
            };
            if blocks {
                range.waiters.push(id.0);
                blockers += 1;
            }
        }
        let range = self.range_mut(id.0);
        range.phase = Phase::Replied;
        range.blockers = blockers;
        if blockers > 0 {
            self.waiting += 1;
        }
        blockers == 0
    }

    /// The range waits for others before it is submitted.
    pub fn is_waiting(&self, id: RangeId) -> bool {
        let range = self.range(id.0);
        range.phase == Phase::Waiting && range.blockers > 0
    }

    /// The local disk is done with the range. Owners that may go on now are added to `ready`.
    pub fn disk_done(&mut self, id: RangeId, ready: &mut Vec<T>) {
        self.range_mut(id.0).phase = Phase::DiskDone;
        self.look_at_waiters(id, ready);
    }

    /// Writes of peers wait for this range until a verdict about it is in, whatever its phase.
    pub fn await_verdict(&mut self, id: RangeId) {
        self.range_mut(id.0).undecided = true;
    }

    /// The verdict is in. Owners that may go on now are added to `ready`.
    pub fn verdict_is_in(&mut self, id: RangeId, ready: &mut Vec<T>) {
        if core::mem::take(&mut self.range_mut(id.0).undecided) {
            self.look_at_waiters(id, ready);
        }
    }

    /// Lets those go on that do not wait for this range any more.
    fn look_at_waiters(&mut self, id: RangeId, ready: &mut Vec<T>) {
        let waiters = core::mem::take(&mut self.range_mut(id.0).waiters);
        let mut kept = Vec::new();
        for waiter in waiters {
            let origin = self.range(waiter).origin;
            if self.range(id.0).holds(origin) {
                kept.push(waiter);
            } else {
                self.unblock(waiter, ready);
            }
        }
        self.range_mut(id.0).waiters = kept;
    }

    /// Takes the range out. Owners that may go on now are added to `ready`.
    pub fn remove(&mut self, id: RangeId, ready: &mut Vec<T>) {
        let range = self.ranges[id.0 as usize]
            .take()
            .expect("a range is removed once");
        self.by_start[class(range.start, range.end)].remove(&(range.start, id.0));
        if range.blockers > 0 {
            self.waiting -= 1;
            for other in self.overlapping(range.start, range.end) {
                self.range_mut(other).waiters.retain(|w| *w != id.0);
            }
        }
        for waiter in range.waiters {
            self.unblock(waiter, ready);
        }
        self.free.push(id.0);
    }

    /// Whether any range that `pick` accepts overlaps this one.
    pub fn any_overlap(
        &self,
        sector: Sector,
        size_bytes: u32,
        mut pick: impl FnMut(Origin, T) -> bool,
    ) -> bool {
        self.overlapping(sector.0, sector.end_of(size_bytes).0)
            .into_iter()
            .any(|index| {
                let range = self.range(index);
                pick(range.origin, range.owner)
            })
    }

    /// Sectors of the ranges that overlap, of those origins that are picked.
    pub fn overlaps(
        &self,
        sector: Sector,
        size_bytes: u32,
        pick: impl Fn(Origin) -> bool,
    ) -> Vec<core::ops::Range<u64>> {
        self.overlapping(sector.0, sector.end_of(size_bytes).0)
            .into_iter()
            .map(|index| self.range(index))
            .filter(|range| pick(range.origin))
            .map(|range| range.start..range.end)
            .collect()
    }

    /// A write of the local application that overlaps and is not completed to it.
    pub fn overlaps_local_write(&self, sector: Sector, size_bytes: u32) -> bool {
        self.any_overlap(sector, size_bytes, |origin, _| origin == Origin::LocalWrite)
    }

    /// Ranges in the table.
    pub fn len(&self) -> usize {
        self.ranges.len() - self.free.len()
    }

    /// No range is in flight.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ranges that wait for others.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    fn unblock(&mut self, index: u32, ready: &mut Vec<T>) {
        let range = self.range_mut(index);
        range.blockers -= 1;
        if range.blockers > 0 {
            return;
        }
        if range.phase == Phase::Waiting {
            range.phase = Phase::Active;
        }
        let owner = range.owner;
        ready.push(owner);
        self.waiting -= 1;
    }

    /// Ranges that overlap, in order of arrival. Empty, without memory, in the normal case.
    fn overlapping(&self, start: u64, end: u64) -> Vec<u32> {
        let mut found = Vec::new();
        for (map, longest) in self.by_start.iter().zip(CLASS_SECTORS) {
            if map.is_empty() {
                continue;
            }
            let from = start.saturating_sub(longest);
            for (other_start, index) in map.range((from, 0)..(end, 0)).map(|(key, ())| *key) {
                if other_start < end && self.range(index).end > start {
                    found.push(index);
                }
            }
        }
        found.sort_unstable_by_key(|index| self.range(*index).seq);
        found
    }

    fn range(&self, index: u32) -> &Range<T> {
        self.ranges[index as usize]
            .as_ref()
            .expect("a range that others name exists")
    }

    fn range_mut(&mut self, index: u32) -> &mut Range<T> {
        self.ranges[index as usize]
            .as_mut()
            .expect("a range that others name exists")
    }
}

fn class(start: u64, end: u64) -> usize {
    let length = end - start;
    CLASS_SECTORS
        .iter()
        .position(|longest| length <= *longest)
        .expect("the last class takes every length")
}

/// Whether an `earlier` range in `phase` makes a `later` one wait that is not submitted or sent.
fn blocks(earlier: Origin, phase: Phase, later: Origin) -> bool {
    use Origin::{LocalRead, LocalWrite, PeerWrite, RemoteRead, ResyncSource, ResyncTarget};
    match (earlier, later) {
        // Protocol A and B promise a write that is received; a read has to find it.
        (PeerWrite(_), RemoteRead) => phase != Phase::DiskDone,
        (LocalWrite | PeerWrite(_) | ResyncTarget(_), LocalRead) => phase != Phase::DiskDone,
        (LocalRead, _) | (_, LocalRead) => false,
        // The reader orders its own writes behind its reads.
        (RemoteRead, _) | (_, RemoteRead) => false,
        // Completed to the application, so that overlapping writes have one replicated order.
        (LocalWrite, LocalWrite) => true,
        (LocalWrite | PeerWrite(_), LocalWrite | PeerWrite(_)) => phase != Phase::DiskDone,
        (ResyncTarget(source), PeerWrite(peer)) if source == peer => phase == Phase::Replied,
        (ResyncTarget(_), LocalWrite | PeerWrite(_)) => phase != Phase::DiskDone,
        // Held until the peer has written the block.
        (ResyncSource(_), LocalWrite | PeerWrite(_)) => true,
        // What the source sent before is ordered by its stream.
        (PeerWrite(peer), ResyncTarget(source)) if source == peer => false,
        (LocalWrite | PeerWrite(_), ResyncTarget(_) | ResyncSource(_)) => phase != Phase::DiskDone,
        (ResyncTarget(_), ResyncTarget(_)) => true,
        (ResyncTarget(_), ResyncSource(_)) => phase == Phase::Replied,
        (ResyncSource(_), ResyncSource(_) | ResyncTarget(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);

    fn table() -> Intervals<u32> {
        Intervals::default()
    }

    #[test]
    fn a_watch_sees_writes_in_flight_and_later_ones_that_overlap() {
        let mut t = table();
        let mut ready = Vec::new();
        let before = t.watch(Sector(8), 4096);
        let (write, _) = t.insert(Origin::LocalWrite, Sector(15), 512, 1);
        let during = t.watch(Sector(8), 4096);
        let beside = t.watch(Sector(16), 4096);
        assert!(t.is_overlapped(before) && t.is_overlapped(during));
        assert!(!t.is_overlapped(beside));
        t.disk_done(write, &mut ready);
        let after = t.watch(Sector(8), 4096);
        assert!(!t.is_overlapped(after), "it is on disk");
        let (_, go) = t.insert(Origin::PeerWrite(A), Sector(0), 65536, 2);
        assert!(go && t.is_overlapped(after) && t.is_overlapped(beside));
        for id in [before, during, beside, after] {
            t.unwatch(id);
        }
        assert!(t.watches.is_empty());
    }

    #[test]
    fn a_remote_read_waits_for_received_writes_and_keeps_none_waiting() {
        let mut t = table();
        let mut ready = Vec::new();
        let (write, _) = t.insert(Origin::PeerWrite(A), Sector(8), 4096, 1);
        let (read, go) = t.insert(Origin::RemoteRead, Sector(8), 4096, 2);
        assert!(!go);
        let (later, go) = t.insert(Origin::PeerWrite(A), Sector(8), 4096, 3);
        assert!(!go, "it waits for the first write only");
        t.remove(write, &mut ready);
        assert_eq!(ready, [2, 3]);
        t.remove(read, &mut ready);
        t.remove(later, &mut ready);
        assert!(t.is_empty());
    }

    #[test]
    fn overlapping_application_writes_wait_until_completion_to_the_application() {
        let mut t = table();
        let mut ready = Vec::new();
        let (first, go) = t.insert(Origin::LocalWrite, Sector(8), 4096, 1);
        assert!(go);
        let (_, go) = t.insert(Origin::LocalWrite, Sector(16), 4096, 2);
        assert!(go, "neighbours do not overlap");
        let (second, go) = t.insert(Origin::LocalWrite, Sector(12), 4096, 3);
        assert!(!go);
        t.disk_done(first, &mut ready);
        assert!(ready.is_empty());
        t.remove(first, &mut ready);
        assert!(ready.is_empty(), "it overlaps the neighbour too");
        assert_eq!(t.waiting(), 1);
        t.remove(second, &mut ready);
        assert_eq!((t.waiting(), t.len()), (0, 1));
    }

    #[test]
    fn writes_of_one_peer_keep_their_order_also_when_the_first_waits() {
        let mut t = table();
        let mut ready = Vec::new();
        let (rs, go) = t.insert(Origin::ResyncTarget(B), Sector(0), 4096, 1);
        assert!(go);
        let (w1, go) = t.insert(Origin::PeerWrite(A), Sector(0), 4096, 2);
        assert!(!go, "a write of a third node waits for the reply");
        let (_w2, go) = t.insert(Origin::PeerWrite(A), Sector(0), 4096, 3);
        assert!(!go);
        assert!(t.reply(rs));
        t.disk_done(rs, &mut ready);
        assert_eq!(ready, [2]);
        t.disk_done(w1, &mut ready);
        assert_eq!(ready, [2, 3]);
    }

    #[test]
    fn a_write_of_the_source_passes_its_request_but_the_reply_waits_for_it() {
        let mut t = table();
        let mut ready = Vec::new();
        let (rs, _) = t.insert(Origin::ResyncTarget(A), Sector(0), 65536, 1);
        let (w, go) = t.insert(Origin::PeerWrite(A), Sector(8), 4096, 2);
        assert!(go);
        assert!(!t.reply(rs));
        let (_, go) = t.insert(Origin::PeerWrite(A), Sector(16), 4096, 3);
        assert!(!go, "sent after the reply, so written after it");
        t.disk_done(w, &mut ready);
        assert_eq!(ready, [1]);
        t.disk_done(rs, &mut ready);
        assert_eq!(ready, [1, 3]);
    }

    #[test]
    fn a_resync_request_that_waits_is_not_overtaken_by_later_application_writes() {
        let mut t = table();
        let mut ready = Vec::new();
        let (w, _) = t.insert(Origin::LocalWrite, Sector(0), 4096, 1);
        let (rs, go) = t.insert(Origin::ResyncTarget(A), Sector(0), 4096, 2);
        assert!(!go);
        let (_, go) = t.insert(Origin::LocalWrite, Sector(0), 4096, 3);
        assert!(!go);
        t.disk_done(w, &mut ready);
        assert_eq!(ready, [2]);
        t.remove(w, &mut ready);
        assert_eq!(ready, [2], "the second write now waits for the resync");
        assert!(t.reply(rs));
        t.disk_done(rs, &mut ready);
        assert_eq!(ready, [2, 3]);
    }

    #[test]
    fn a_read_for_a_resync_holds_writes_until_the_peer_has_written() {
        let mut t = table();
        let mut ready = Vec::new();
        let (rs, go) = t.insert(Origin::ResyncSource(A), Sector(0), 4096, 1);
        assert!(go);
        let (_, go) = t.insert(Origin::LocalWrite, Sector(0), 4096, 2);
        assert!(!go);
        t.disk_done(rs, &mut ready);
        assert!(ready.is_empty());
        t.remove(rs, &mut ready);
        assert_eq!(ready, [2]);
    }

    #[test]
    fn long_ranges_are_found_by_short_ones() {
        let mut t = table();
        let (_, go) = t.insert(Origin::LocalWrite, Sector(100), 128 << 20, 1);
        assert!(go);
        let (_, go) = t.insert(Origin::LocalWrite, Sector(200_000), 4096, 2);
        assert!(!go);
        assert!(t.overlaps_local_write(Sector(262_243), 512));
        assert!(!t.overlaps_local_write(Sector(262_252), 512));
    }

    #[test]
    fn a_removed_waiter_is_forgotten_by_those_it_waited_for() {
        let mut t = table();
        let mut ready = Vec::new();
        let (w, _) = t.insert(Origin::LocalWrite, Sector(0), 4096, 1);
        let (rs, _) = t.insert(Origin::ResyncTarget(A), Sector(0), 4096, 2);
        t.remove(rs, &mut ready);
        let (_, go) = t.insert(Origin::LocalWrite, Sector(64), 4096, 9);
        assert!(go, "takes the freed place");
        t.remove(w, &mut ready);
        assert!(ready.is_empty());
    }
}
