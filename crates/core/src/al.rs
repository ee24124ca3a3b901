//! The activity log of one volume: which 4 MiB extents may be written (metadata.md, 9).
//!
//! An extent has to be in the log on stable storage before a write to it starts, and it leaves
//! the log only when nothing refers to it any more. New extents are gathered into transactions of
//! at most 64 changes, one in flight at a time; who needs one waits here, in order of arrival,
//! writes of peers before those of the application.
//!
//! It never does IO. The owner writes, for a [`Prepared`] transaction, first the bitmap pages of
//! the evicted extents, then its bytes, and says [`ActivityLog::committed`]. On persistent memory
//! these are the slots themselves instead of a block of a ring (metadata.md, 10).

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;
use core::ops::RangeInclusive;

use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::al::{
    FREE, SlotUpdate, Transaction, UPDATES_PER_TRANSACTION, encode_initialised, next_context_start,
};
use lockstep_format::disk::layout::AlGeometry;
use lockstep_format::disk::pmem;
use lockstep_format::units::{AlExtent, Sector};

/// Smallest number of slots (metadata.md, 9.6).
pub const MIN_EXTENTS: u32 = 67;
/// Most extents of one request: a discard of 128 MiB that is not aligned to an extent.
pub const MAX_EXTENTS_PER_REQUEST: u32 = 33;

/// Whether changes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlMode {
    /// Every change is a transaction on disk.
    Logged,
    /// `al-updates no`: extents are counted in memory only.
    Unlogged,
}

/// Who waits: a peer's writes go first, because its epoch may depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlPriority {
    /// A write received from a peer.
    Peer,
    /// A write of the local application.
    Local,
}

/// The extents that a write touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    first: u32,
    last: u32,
}

impl Extents {
    /// The extents of `size_bytes` (at least one byte) at `sector`.
    pub fn of(sector: Sector, size_bytes: u32) -> Extents {
        let last = Sector(sector.end_of(size_bytes.max(1)).0 - 1);
        Extents {
            first: sector.al_extent().0,
            last: last.al_extent().0,
        }
    }

    /// The extents in ascending order.
    pub fn iter(self) -> impl Iterator<Item = AlExtent> {
        let range: RangeInclusive<u32> = self.first..=self.last;
        range.map(AlExtent)
    }
}

/// A transaction to be written.
#[derive(Debug)]
pub struct Prepared {
    /// First byte within the activity-log area.
    pub offset: u64,
    /// One block; on persistent memory the words with the slots that change.
    pub bytes: Vec<u8>,
    /// Extents that leave the log: their data have to be flushed and the changed bitmap pages
    /// that cover them to be written before the bytes.
    pub evicted: Vec<AlExtent>,
}

#[derive(Debug)]
struct Waiter<W> {
    owner: W,
    /// Extents that it has no reference to yet.
    next: u32,
    last: u32,
    /// It refers to extents of the transaction being prepared.
    uses_pending: bool,
}

/// The log of one volume. `W` names who waits.
#[derive(Debug)]
pub struct ActivityLog<W> {
    mode: AlMode,
    geometry: AlGeometry,
    /// On disk is an array of slots, not a ring of transactions.
    in_place: bool,
    /// Number of slots.
    count: u16,
    /// Committed extent of each slot. This and the other tables of slots are empty until the first
    /// slot is needed: most of a node's volumes may never be written.
    slots: Vec<AlExtent>,
    refs: Vec<u32>,
    last_use: Vec<u64>,
    /// Slot of each committed extent that is not being evicted.
    index: BTreeMap<AlExtent, u16>,
    /// Unreferenced committed slots by last use.
    idle: BTreeMap<(u64, u16), ()>,
    free: Vec<u16>,
    /// The transaction in flight.
    updates: Vec<SlotUpdate>,
    pending: BTreeMap<AlExtent, u16>,
    in_flight: bool,
    granted: Vec<W>,
    peers: VecDeque<Waiter<W>>,
    locals: VecDeque<Waiter<W>>,
    /// The first waiter found no slot: nobody gets a reference before it does.
    starving: bool,
    /// Nobody gets a reference for now.
    frozen: bool,
    /// Slots that stay for writes of peers: with two Primaries each side's writes end only when
    /// the other's log has room for them.
    kept_for_peers: usize,
    number: u32,
    context_start: u16,
    clock: u64,
    written: u64,
    #[cfg(feature = "planted")]
    pub(crate) planted: Option<crate::planted::Planted>,
}

impl<W: Copy> ActivityLog<W> {
    /// An empty log of `extents` slots, clamped to what the ring on disk can hold.
    pub fn new(extents: u32, geometry: AlGeometry, mode: AlMode) -> Self {
        let most = u32::from(geometry.max_extents());
        ActivityLog {
            mode,
            geometry,
            in_place: false,
            count: extents.clamp(MIN_EXTENTS, most.max(MIN_EXTENTS)) as u16,
            slots: Vec::new(),
            refs: Vec::new(),
            last_use: Vec::new(),
            index: BTreeMap::new(),
            idle: BTreeMap::new(),
            free: Vec::new(),
            updates: Vec::new(),
            pending: BTreeMap::new(),
            in_flight: false,
            granted: Vec::new(),
            peers: VecDeque::new(),
            locals: VecDeque::new(),
            starving: false,
            frozen: false,
            kept_for_peers: 0,
            number: 0,
            context_start: 0,
            clock: 0,
            written: 0,
            #[cfg(feature = "planted")]
            planted: None,
        }
    }

    /// Takes a reference to each extent if all are in the log; otherwise the owner waits and is
    /// named later. After `false` the caller calls [`ActivityLog::prepare`].
    pub fn get(&mut self, extents: Extents, owner: W, priority: AlPriority) -> bool {
        if !self.starving
            && !self.frozen
            && extents
                .iter()
                .all(|extent| self.index.contains_key(&extent))
            && (priority == AlPriority::Peer || self.leaves_room(extents))
        {
            for extent in extents.iter() {
                let slot = self.index[&extent];
                self.take_ref(slot);
            }
            return true;
        }
        let waiter = Waiter {
            owner,
            next: extents.first,
            last: extents.last,
            uses_pending: false,
        };
        match priority {
            AlPriority::Peer => self.peers.push_back(waiter),
            AlPriority::Local => self.locals.push_back(waiter),
        }
        false
    }

    /// Gives the references back. If [`ActivityLog::has_waiters`], the caller calls
    /// [`ActivityLog::prepare`] then.
    pub fn put(&mut self, extents: Extents) {
        let most = if planted!(self, FirstExtentPut) {
            1
        } else {
            usize::MAX
        };
        for extent in extents.iter().take(most) {
            self.put_one(extent);
        }
    }

    /// Serves waiters until a transaction has to be written or none can go on. Owners that may
    /// go on at once are added to `ready`.
    pub fn prepare(&mut self, ready: &mut Vec<W>) -> Option<Prepared> {
        loop {
            if self.in_flight || self.frozen {
                return None;
            }
            self.starving = false;
            let mut peers = core::mem::take(&mut self.peers);
            let mut blocked = self.serve(&mut peers, ready, 0);
            self.peers = peers;
            if !blocked {
                let mut locals = core::mem::take(&mut self.locals);
                blocked = self.serve(&mut locals, ready, self.kept_for_peers);
                self.locals = locals;
            }
            if self.updates.is_empty() {
                assert!(
                    self.granted.is_empty(),
                    "only a transaction makes owners wait for it"
                );
                return None;
            }
            let evicted: Vec<AlExtent> = self
                .updates
                .iter()
                .map(|update| self.slots[usize::from(update.slot)])
                .filter(|extent| *extent != FREE)
                .collect();
            self.in_flight = true;
            if self.mode == AlMode::Logged {
                return Some(self.encode(evicted));
            }
            self.finish(ready);
            if !blocked {
                return None;
            }
        }
    }

    /// The transaction is durable. Owners that may go on are added to `ready`; the caller calls
    /// [`ActivityLog::prepare`] again.
    pub fn committed(&mut self, ready: &mut Vec<W>) {
        assert!(self.in_flight, "a transaction in flight is committed once");
        self.number = self.number.wrapping_add(1);
        if !planted!(self, LogContextStuck) {
            self.context_start = next_context_start(self.context_start, self.count);
        }
        self.written += 1;
        self.finish(ready);
    }

    /// Gives up: names everybody who waits. References that they held are gone with the log.
    pub fn abandon(&mut self) -> Vec<W> {
        self.in_flight = false;
        self.starving = false;
        let mut owners = core::mem::take(&mut self.granted);
        owners.extend(self.peers.drain(..).map(|waiter| waiter.owner));
        owners.extend(self.locals.drain(..).map(|waiter| waiter.owner));
        owners
    }

    /// Nobody gets a reference and no transaction starts until it is thawed; who asks waits. The
    /// transaction in flight goes on.
    pub fn freeze(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    /// Half of the log stays for writes of peers, or none of it.
    pub fn keep_room_for_peers(&mut self, keep: bool) {
        self.kept_for_peers = if keep { usize::from(self.count / 2) } else { 0 };
    }

    /// No transaction is in flight.
    pub fn is_settled(&self) -> bool {
        !self.in_flight
    }

    /// The whole area of the log with its present content, for a new place on disk: a ring of
    /// transactions without changes that carry all slots, or an initialised log where none is
    /// kept. No transaction may be in flight.
    pub fn rewrite(&mut self) -> Vec<u8> {
        assert!(!self.in_flight, "a log is rewritten between transactions");
        self.make_tables();
        if self.in_place {
            return pmem::encode_area(self.logged_slots(), self.geometry);
        }
        let blocks = self.geometry.blocks() as usize;
        let mut area = vec![0; blocks * BLOCK_BYTES];
        for _ in 0..blocks {
            let at = self.geometry.block_of(self.number) as usize * BLOCK_BYTES;
            let out: &mut [u8; BLOCK_BYTES] = (&mut area[at..at + BLOCK_BYTES])
                .try_into()
                .expect("the block has its size");
            match self.mode {
                AlMode::Logged => Transaction {
                    number: self.number,
                    context_start: self.context_start,
                    updates: &[],
                    slots: &self.slots,
                }
                .encode(out),
                AlMode::Unlogged => encode_initialised(out),
            }
            self.number = self.number.wrapping_add(1);
            self.context_start = next_context_start(self.context_start, self.count);
        }
        if self.mode == AlMode::Unlogged {
            self.number = 0;
            self.context_start = 0;
        }
        area
    }

    /// From now on the log on disk is an array of slots that are changed in place. No transaction
    /// may have been prepared.
    pub fn keep_in_place(&mut self) {
        assert!(!self.in_flight, "the form changes before the first use");
        self.in_place = true;
    }

    /// The log on disk is an array of slots that are changed in place.
    pub fn is_in_place(&self) -> bool {
        self.in_place
    }

    /// Number of slots.
    pub fn slot_count(&self) -> u32 {
        u32::from(self.count)
    }

    fn logged_slots(&self) -> &[AlExtent] {
        match self.mode {
            AlMode::Logged => &self.slots,
            AlMode::Unlogged => &[],
        }
    }

    /// The next transaction has the number of the last one; for a deliberate bug.
    pub(crate) fn repeat_number(&mut self) {
        self.number = self.number.wrapping_sub(1);
    }

    /// Owners that the transaction in flight makes wait; for a deliberate bug.
    pub(crate) fn granted_mut(&mut self) -> &mut Vec<W> {
        &mut self.granted
    }

    /// Somebody waits for a slot or a transaction.
    pub fn has_waiters(&self) -> bool {
        !self.peers.is_empty() || !self.locals.is_empty()
    }

    /// The first waiter waits for a reference to drop.
    pub fn is_starving(&self) -> bool {
        self.starving
    }

    /// A write refers to the extent.
    pub fn is_referenced(&self, extent: AlExtent) -> bool {
        let slot = self
            .index
            .get(&extent)
            .or_else(|| self.pending.get(&extent));
        slot.is_some_and(|slot| self.refs[usize::from(*slot)] > 0)
    }

    /// Extents with references.
    pub fn referenced(&self) -> usize {
        self.refs.iter().filter(|refs| **refs > 0).count()
    }

    /// Transactions written so far.
    pub fn transactions(&self) -> u64 {
        self.written
    }

    /// Whether changes are written; takes effect with the next transaction.
    pub fn set_mode(&mut self, mode: AlMode) {
        self.mode = mode;
    }

    /// Serves a queue from its head; says whether it stopped before the end.
    fn serve(&mut self, queue: &mut VecDeque<Waiter<W>>, ready: &mut Vec<W>, kept: usize) -> bool {
        while let Some(waiter) = queue.front_mut() {
            while waiter.next <= waiter.last {
                let extent = AlExtent(waiter.next);
                let Some(pending) = self.acquire(extent, kept) else {
                    return true;
                };
                waiter.uses_pending |= pending;
                waiter.next += 1;
            }
            if waiter.uses_pending {
                self.granted.push(waiter.owner);
            } else {
                ready.push(waiter.owner);
            }
            queue.pop_front();
        }
        false
    }

    /// A reference to one extent: says whether it needs the transaction; none without a slot
    /// beside those that are kept.
    fn acquire(&mut self, extent: AlExtent, kept: usize) -> Option<bool> {
        if kept > 0 && !self.is_referenced(extent) && self.unreferenced() <= kept {
            self.starving = true;
            return None;
        }
        if let Some(slot) = self.index.get(&extent).copied() {
            self.take_ref(slot);
            return Some(false);
        }
        if let Some(slot) = self.pending.get(&extent).copied() {
            self.refs[usize::from(slot)] += 1;
            return Some(true);
        }
        if self.updates.len() == UPDATES_PER_TRANSACTION {
            return None;
        }
        self.make_tables();
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let Some(((_, slot), ())) = self.idle.pop_first() else {
                    self.starving = true;
                    return None;
                };
                self.index.remove(&self.slots[usize::from(slot)]);
                slot
            }
        };
        self.refs[usize::from(slot)] = 1;
        self.updates.push(SlotUpdate { slot, extent });
        self.pending.insert(extent, slot);
        Some(true)
    }

    fn make_tables(&mut self) {
        if self.slots.is_empty() {
            let count = usize::from(self.count);
            self.slots = vec![FREE; count];
            self.refs = vec![0; count];
            self.last_use = vec![0; count];
            self.free = (0..self.count).collect();
        }
    }

    /// Slots without references.
    fn unreferenced(&self) -> usize {
        if self.slots.is_empty() {
            return usize::from(self.count);
        }
        self.free.len() + self.idle.len()
    }

    /// With these extents in use, what is kept for peers is still there.
    fn leaves_room(&self, extents: Extents) -> bool {
        let news = extents.iter().filter(|e| !self.is_referenced(*e)).count();
        self.kept_for_peers == 0 || self.unreferenced() >= self.kept_for_peers + news
    }

    fn take_ref(&mut self, slot: u16) {
        let at = usize::from(slot);
        if self.refs[at] == 0 {
            self.idle.remove(&(self.last_use[at], slot));
        }
        self.refs[at] += 1;
    }

    fn put_one(&mut self, extent: AlExtent) {
        let slot = self
            .index
            .get(&extent)
            .or_else(|| self.pending.get(&extent));
        let slot = *slot.expect("an extent with references is in the log");
        let at = usize::from(slot);
        assert!(self.refs[at] > 0, "references are given back once");
        self.refs[at] -= 1;
        if self.refs[at] == 0 && self.index.contains_key(&extent) {
            self.make_idle(slot);
        }
    }

    fn make_idle(&mut self, slot: u16) {
        self.clock += 1;
        self.last_use[usize::from(slot)] = self.clock;
        self.idle.insert((self.clock, slot), ());
    }

    fn encode(&self, evicted: Vec<AlExtent>) -> Prepared {
        if self.in_place {
            return self.encode_in_place(evicted);
        }
        let mut block = vec![0; BLOCK_BYTES];
        let transaction = Transaction {
            number: self.number,
            context_start: self.context_start,
            updates: &self.updates,
            slots: &self.slots,
        };
        let out: &mut [u8; BLOCK_BYTES] = block
            .as_mut_slice()
            .try_into()
            .expect("the block has its size");
        transaction.encode(out);
        Prepared {
            offset: u64::from(self.geometry.block_of(self.number)) * BLOCK_BYTES as u64,
            bytes: block,
            evicted,
        }
    }

    /// Slots between those that change are stored again as they are.
    fn encode_in_place(&self, evicted: Vec<AlExtent>) -> Prepared {
        let mut slots = self.slots.clone();
        let (mut first, mut last) = (u16::MAX, 0);
        for update in &self.updates {
            slots[usize::from(update.slot)] = update.extent;
            first = first.min(update.slot);
            last = last.max(update.slot);
        }
        let store = pmem::encode_slots(&slots, first, last);
        Prepared {
            offset: store.offset,
            bytes: store.bytes,
            evicted,
        }
    }

    fn finish(&mut self, ready: &mut Vec<W>) {
        self.in_flight = false;
        self.pending.clear();
        for update in core::mem::take(&mut self.updates) {
            let at = usize::from(update.slot);
            self.slots[at] = update.extent;
            self.index.insert(update.extent, update.slot);
            if self.refs[at] == 0 {
                self.make_idle(update.slot);
            }
        }
        ready.append(&mut self.granted);
        // What the head of a queue holds already is committed now.
        for queue in [&mut self.peers, &mut self.locals] {
            if let Some(waiter) = queue.front_mut() {
                waiter.uses_pending = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_format::disk::al::Update;

    fn log(extents: u32) -> ActivityLog<u32> {
        ActivityLog::new(extents, AlGeometry::DEFAULT, AlMode::Logged)
    }

    fn one(extent: u32) -> Extents {
        Extents {
            first: extent,
            last: extent,
        }
    }

    #[test]
    fn a_rewritten_log_tells_what_it_held() {
        let mut log = log(67);
        for extent in [3, 700, 12] {
            assert!(!log.get(one(extent), extent, AlPriority::Local));
            log.prepare(&mut Vec::new());
            log.committed(&mut Vec::new());
        }
        log.freeze(true);
        assert!(!log.get(one(3), 1, AlPriority::Peer));
        assert!(log.prepare(&mut Vec::new()).is_none());
        let area = log.rewrite();
        let replay = lockstep_format::disk::al::replay(&area, AlGeometry::DEFAULT).unwrap();
        assert_eq!(
            replay.coverage,
            lockstep_format::disk::al::Coverage::Complete
        );
        assert_eq!(replay.active, [AlExtent(3), AlExtent(12), AlExtent(700)]);
        // What follows continues the ring.
        log.freeze(false);
        let mut ready = Vec::new();
        assert!(log.prepare(&mut ready).is_none());
        assert_eq!(ready, [1]);
        assert!(!log.get(one(5), 2, AlPriority::Local));
        let prepared = log.prepare(&mut ready).unwrap();
        let mut area = area;
        let at = prepared.offset as usize;
        area[at..at + BLOCK_BYTES].copy_from_slice(&prepared.bytes);
        let replay = lockstep_format::disk::al::replay(&area, AlGeometry::DEFAULT).unwrap();
        assert_eq!(
            replay.coverage,
            lockstep_format::disk::al::Coverage::Complete
        );
        assert_eq!(replay.active.len(), 4);
    }

    #[test]
    fn a_cold_extent_waits_for_its_transaction_and_a_hot_one_does_not() {
        let mut al = log(67);
        let mut ready = Vec::new();
        assert!(!al.get(one(5), 1, AlPriority::Local));
        let prepared = al.prepare(&mut ready).expect("a transaction");
        assert!(ready.is_empty());
        assert_eq!((prepared.offset, prepared.evicted.len()), (0, 0));
        let block: [u8; BLOCK_BYTES] = prepared.bytes.try_into().unwrap();
        let format = lockstep_format::disk::al::Block::decode(&block).unwrap();
        let lockstep_format::disk::al::Block::Update(Update { number, .. }) = format else {
            panic!("an update");
        };
        assert_eq!(number, 0);
        assert!(!al.get(one(5), 2, AlPriority::Local), "not durable yet");
        assert!(
            al.prepare(&mut ready).is_none(),
            "one transaction at a time"
        );
        al.committed(&mut ready);
        assert_eq!(ready, [1]);
        assert!(al.prepare(&mut ready).is_none());
        assert_eq!(ready, [1, 2]);
        assert!(al.get(one(5), 3, AlPriority::Local));
        assert!(al.is_referenced(AlExtent(5)));
        for _ in 0..3 {
            al.put(one(5));
        }
        assert!(!al.is_referenced(AlExtent(5)));
        assert_eq!(al.referenced(), 0);
    }

    #[test]
    fn requests_that_arrive_meanwhile_share_the_next_transaction() {
        let mut al = log(100);
        let mut ready = Vec::new();
        al.get(one(0), 0, AlPriority::Local);
        al.prepare(&mut ready).unwrap();
        for extent in 1..=70 {
            al.get(one(extent), extent, AlPriority::Local);
        }
        al.committed(&mut ready);
        let second = al.prepare(&mut ready).unwrap();
        assert_eq!(second.offset, 4096);
        ready.clear();
        al.committed(&mut ready);
        assert_eq!(ready.len(), 64);
        al.prepare(&mut ready).unwrap();
        al.committed(&mut ready);
        assert_eq!(ready.len(), 70);
        assert_eq!(al.transactions(), 3);
    }

    #[test]
    fn only_the_least_recently_used_idle_extent_is_evicted() {
        let mut al = log(67);
        let mut ready = Vec::new();
        for extent in 0..67 {
            al.get(one(extent), extent, AlPriority::Local);
        }
        while al.prepare(&mut ready).is_some() {
            al.committed(&mut ready);
        }
        assert!(!al.get(one(100), 100, AlPriority::Local));
        assert!(al.prepare(&mut ready).is_none());
        assert!(al.is_starving());
        assert!(
            !al.get(one(3), 101, AlPriority::Local),
            "nobody overtakes a starving request"
        );
        al.put(one(8));
        al.put(one(7));
        let prepared = al.prepare(&mut ready).expect("a slot is idle");
        assert_eq!(prepared.evicted, [AlExtent(8)]);
        ready.clear();
        al.committed(&mut ready);
        assert_eq!(ready, [100]);
    }

    #[test]
    fn peers_go_first_and_a_request_over_two_extents_needs_both() {
        let mut al = log(67);
        let mut ready = Vec::new();
        let two = Extents::of(Sector(8191), 1024);
        assert_eq!(two, Extents { first: 0, last: 1 });
        assert_eq!(Extents::of(Sector(8184), 4096), one(0));
        al.get(one(9), 1, AlPriority::Local);
        al.get(two, 2, AlPriority::Peer);
        al.prepare(&mut ready).unwrap();
        al.committed(&mut ready);
        assert_eq!(ready, [2, 1]);
        al.put(two);
        assert_eq!(al.referenced(), 1);
    }

    #[test]
    fn on_persistent_memory_the_slots_are_the_log() {
        let mut al = log(67);
        al.keep_in_place();
        let mut ready = Vec::new();
        let mut area = al.rewrite();
        for extent in 0..80 {
            al.get(one(extent), extent, AlPriority::Local);
            if extent >= 67 {
                al.put(one(extent - 67));
            }
            let prepared = al.prepare(&mut ready).expect("each is cold");
            let evicted = extent.checked_sub(67).map(AlExtent);
            assert_eq!(prepared.evicted, Vec::from_iter(evicted));
            assert_eq!(prepared.bytes.len(), 8);
            let at = prepared.offset as usize;
            area[at..at + 8].copy_from_slice(&prepared.bytes);
            al.committed(&mut ready);
            let replay = lockstep_format::disk::al::replay_persistent_memory(&area, 67);
            let first = extent.saturating_sub(66);
            let expected: Vec<_> = (first..=extent).map(AlExtent).collect();
            assert_eq!(replay.active, expected);
            assert_eq!(area, al.rewrite());
        }
    }

    #[test]
    fn without_updates_extents_are_tracked_and_nothing_is_written() {
        let mut al: ActivityLog<u32> = ActivityLog::new(67, AlGeometry::DEFAULT, AlMode::Unlogged);
        let mut ready = Vec::new();
        for extent in 0..67 {
            al.get(one(extent), extent, AlPriority::Local);
        }
        assert!(al.prepare(&mut ready).is_none());
        assert_eq!(ready.len(), 67);
        al.get(one(70), 70, AlPriority::Local);
        assert!(al.prepare(&mut ready).is_none());
        assert!(al.is_starving());
        al.put(one(0));
        assert!(al.prepare(&mut ready).is_none());
        assert_eq!(ready.last(), Some(&70));
        assert_eq!(al.transactions(), 0);
    }
}
