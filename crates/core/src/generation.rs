//! Generation identifiers of one volume's data on this node (semantics.md, 12): how they change.
//!
//! Pure: nothing here writes metadata or sends packets. A caller that must be able to go back (a
//! failed metadata write) keeps a clone. Every change of a slot or of the current UUID has to be
//! durable before a write that depends on it completes.

use alloc::vec::Vec;

use lockstep_format::disk::v09::{DeviceFlags, Peer, PeerFlags, SuperBlock};
use lockstep_format::units::{Dagtag, NodeId, NodeMask, Uuid};
use lockstep_format::wire::{DiskState, Role, UuidFlags};

use crate::rng::Rng;
use crate::uuids::{PeerUuids, UUID_SLOTS, is_real};

/// The UUID set of a volume, as it lies in the superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generations {
    /// This node.
    pub node: NodeId,
    /// Number of bitmap slots in the metadata.
    pub max_peers: u8,
    /// Generation of the data here; bit 0 is set while Primary.
    pub current: Uuid,
    /// Retired generations, newest first, zeros at the end, primary bit clear. Set, it marks one
    /// that was announced as the next and perhaps never made (see `note_planned`).
    pub history: [Uuid; UUID_SLOTS],
    /// Entry of each node id; the own one has nothing but NODE_EXISTS and the vote of a target
    /// (`vote.rs`).
    pub slots: [Peer; UUID_SLOTS],
    /// Flags of the device.
    pub flags: DeviceFlags,
    /// The data had this older generation, and nothing was written here since (`unwritten.rs`); else zero.
    pub unwritten_since: Uuid,
    /// Nodes of which the disk did not differ at that time, as far as is known here.
    pub unwritten_for: NodeMask,
}

/// What a rotation has to know of a configured peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerView {
    /// The peer.
    pub node: NodeId,
    /// Its disk.
    pub disk: DiskState,
    /// There is a connection to it.
    pub connected: bool,
    /// It is configured to have a bitmap here.
    pub has_bitmap: bool,
}

/// Input of a rotation: who does not follow any more.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// Every configured peer.
    pub peers: &'a [PeerView],
    /// Nodes that do not follow although their disk looks as if.
    pub weak: NodeMask,
    /// Tag of the last write before the rotation.
    pub dagtag: Dagtag,
}

/// What a received UUID set taught about third nodes (12.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learned {
    /// The node caught up: its slot is zero now. Clear its bits if `clear_bits`.
    CaughtUp {
        /// The node.
        node: NodeId,
        /// False for the sender itself: the resync clears its bits.
        clear_bits: bool,
    },
    /// The bits of slot `from` have to be copied to slot `to`, whose UUID is already changed.
    Copy {
        /// Bitmap index to read.
        from: u8,
        /// Bitmap index to overwrite.
        to: u8,
        /// Node of the overwritten slot.
        node: NodeId,
    },
}

/// State of the connections that matters when learning from a peer's set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnContext {
    /// Who sent the set.
    pub sender: NodeId,
    /// Nodes with a replication state above Established here.
    pub busy: NodeMask,
    /// Connected nodes.
    pub connected: NodeMask,
    /// Nodes whose slots are set for the time being (`PeerDevice::provisional`): they have left nothing.
    pub provisional: NodeMask,
    /// This node or the sender is sync target of anybody.
    pub any_sync_target: bool,
}

/// What goes into a `P_UUIDS110` besides the set itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendContext {
    /// The receiver.
    pub receiver: NodeId,
    /// Resolved current UUID if it is not the own one (13.1).
    pub resolved_current: Option<Uuid>,
    /// Nodes that this node is sync target of, at another generation.
    pub target_of: NodeMask,
    /// Blocks marked for the receiver.
    pub dirty_bits: u64,
    /// Flags, without HAS_UNALLOC.
    pub flags: UuidFlags,
    /// Weak or authoritative nodes.
    pub node_mask: NodeMask,
}

/// What `forget-peer` leaves to do with the bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgotten {
    /// The bitmap index that became free.
    pub freed: u8,
    /// Unallocated index whose bits it gets; none: set all its bits.
    pub copy_from: Option<u8>,
}

impl Generations {
    /// A set that never had data.
    pub fn just_created(node: NodeId, max_peers: u8) -> Self {
        Generations {
            node,
            max_peers,
            current: Uuid::JUST_CREATED,
            history: [Uuid::ZERO; UUID_SLOTS],
            slots: [Peer::default(); UUID_SLOTS],
            flags: DeviceFlags::empty(),
            unwritten_since: Uuid::ZERO,
            unwritten_for: NodeMask::EMPTY,
        }
    }

    /// The set of a superblock.
    pub fn from_superblock(block: &SuperBlock, node: NodeId) -> Self {
        Generations {
            node,
            max_peers: block.geometry.max_peers,
            current: block.current_uuid,
            history: block.history,
            slots: block.peers,
            flags: block.flags,
            unwritten_since: block.unwritten_since,
            unwritten_for: block.unwritten_for,
        }
    }

    /// Generations from which the current one descends, as far as the set knows.
    pub fn ancestors(&self) -> impl Iterator<Item = Uuid> + '_ {
        let slots = self.others().map(|node| self.slot(node).bitmap_uuid);
        let known = self.history.iter().copied().chain(slots);
        known.filter(|uuid| is_real(*uuid) && !uuid.same_generation(self.current))
    }

    /// Those of them that came before the current one. What was announced since then and not made
    /// is none: who follows it is not behind.
    pub fn older(&self) -> impl Iterator<Item = Uuid> + '_ {
        let since = self.announced_since().count();
        self.ancestors()
            .filter(move |uuid| !self.history[..since].contains(uuid))
    }

    /// What was announced here since the current generation began, and not made; the newest first.
    pub fn announced_since(&self) -> impl Iterator<Item = Uuid> + '_ {
        let announced = |uuid: &&Uuid| uuid.0 & Uuid::PRIMARY_BIT != 0;
        self.history.iter().take_while(announced).copied()
    }

    /// Puts the set into a superblock that will be written.
    pub fn store(&self, block: &mut SuperBlock) {
        block.node_id = Some(self.node);
        block.current_uuid = self.current;
        block.history = self.history;
        block.peers = self.slots;
        block.flags = self.flags;
        block.unwritten_since = self.unwritten_since;
        block.unwritten_for = self.unwritten_for;
    }

    /// 12.3: retires a generation into the history.
    pub fn push_history(&mut self, uuid: Uuid) {
        let uuid = uuid.without_primary_bit();
        let is_current = uuid.same_generation(self.current);
        if !is_real(uuid) || uuid == Uuid::JUST_CREATED || is_current {
            return;
        }
        if self.history[0].is_zero() {
            self.history[0] = uuid;
            return;
        }
        // Entries of nodes that do not exist are not sent: a peer of that generation has to find it
        // in the history, else its next handshake ends in a split brain.
        let in_slot = self
            .others()
            .any(|node| self.exists(node) && self.slot(node).bitmap_uuid.same_generation(uuid));
        if in_slot || self.has_retired(uuid) {
            return;
        }
        self.history.rotate_right(1);
        self.history[0] = uuid;
    }

    /// Whether the history has the generation. One that was only noted there is an ancestor from
    /// now on.
    fn has_retired(&mut self, uuid: Uuid) -> bool {
        let found = self.history.iter_mut().find(|e| e.same_generation(uuid));
        if let Some(entry) = found {
            *entry = entry.without_primary_bit();
            return true;
        }
        false
    }

    /// Whether the history names the generation, noted or made.
    pub(crate) fn history_has(&self, uuid: Uuid) -> bool {
        self.history.iter().any(|e| e.same_generation(uuid))
    }

    /// Whether the generation was announced here and perhaps never made.
    fn notes(&self, uuid: Uuid) -> bool {
        let mut history = self.history.iter();
        history.any(|e| e.0 & Uuid::PRIMARY_BIT != 0 && e.same_generation(uuid))
    }

    /// Notes a generation that is going to be announced: given up after a follower took it, also
    /// by a crash, it counts as an ancestor of the next one. The mark tells that the follower is
    /// the newer of the two as long as this node has not moved on.
    pub(crate) fn note_planned(&mut self, uuid: Uuid) {
        let known = self.history_has(uuid);
        if known || uuid.same_generation(self.current) {
            return;
        }
        self.history.rotate_right(1);
        self.history[0] = Uuid(uuid.0 | Uuid::PRIMARY_BIT);
    }

    fn forget_history(&mut self, uuid: Uuid) {
        let at = self.history.iter().position(|e| e.same_generation(uuid));
        if let Some(at) = at {
            self.history[at..].rotate_left(1);
            self.history[UUID_SLOTS - 1] = Uuid::ZERO;
        }
    }

    /// A node of the same generation noted some that it gave up: they are ancestors here, too, so
    /// that a follower that kept one finds its way back. Whether there was any news.
    pub(crate) fn adopt_notes(&mut self, set: &PeerUuids) -> bool {
        let mut news = false;
        for entry in set.history.iter().filter(|e| set.history_notes(**e)) {
            let entry = entry.without_primary_bit();
            let known = self.history_has(entry);
            if !known && !entry.same_generation(self.current) {
                self.history.rotate_right(1);
                self.history[0] = entry;
                news = true;
            }
        }
        news
    }

    /// 12.6: the current data becomes a new generation. Gives the new UUID, or none if everybody
    /// who could diverge already does. `role` decides over the primary bit.
    pub fn new_current(
        &mut self,
        rotation: &Rotation<'_>,
        role: Role,
        rng: &mut Rng,
    ) -> Option<Uuid> {
        let day0 = self.is_day0();
        let previous = if self.current == Uuid::JUST_CREATED {
            rng.uuid()
        } else {
            self.current
        };
        if self.rotate(previous, rotation).is_empty() && !day0 {
            return None;
        }
        let old = self.current;
        self.set_current(with_role(rng.uuid(), role));
        if day0 {
            self.push_history(old);
        }
        Some(self.current)
    }

    /// A new generation although nobody's slot changes: the old one is retired all the same.
    pub(crate) fn fork(&mut self, role: Role, rng: &mut Rng) {
        let old = self.current;
        self.set_current(with_role(rng.uuid(), role));
        self.push_retired_current(old);
    }

    /// 12.6: a Primary told its new generation, and this node follows it. Not to be called while
    /// this node is sync target of it or Behind. For a diskless sender add it to `rotation.weak`;
    /// `rotation.dagtag` is that of the sender's stream. Gives the slots that changed.
    pub fn receive_new_datagen(
        &mut self,
        uuid: Uuid,
        rotation: &Rotation<'_>,
        own_disk: DiskState,
        role: Role,
    ) -> NodeMask {
        if uuid.same_generation(self.current) {
            return NodeMask::EMPTY;
        }
        let before = self.slots;
        let old = self.current;
        let mut retired = Vec::new();
        if own_disk == DiskState::UpToDate {
            if is_real(old) && old != Uuid::JUST_CREATED {
                self.rotate(old, rotation);
            }
            for node in self.others() {
                let slot = self.slot_mut(node);
                let follows = !rotation.weak.contains(node) && slot.bitmap_index.is_some();
                if follows && !slot.bitmap_uuid.is_zero() {
                    retired.push(slot.bitmap_uuid);
                    slot.bitmap_uuid = uuid;
                }
            }
        }
        self.set_current(with_role(uuid, role));
        for uuid in retired {
            self.push_history(uuid);
        }
        self.push_retired_current(old);
        self.others()
            .filter(|node| before[usize::from(node.0)] != *self.slot(*node))
            .collect()
    }

    /// 12.8: `new-current-uuid` of the operator. All knowledge about peers is retired first.
    pub fn new_current_by_command(
        &mut self,
        rotation: &Rotation<'_>,
        role: Role,
        rng: &mut Rng,
    ) -> Option<Uuid> {
        for node in self.others() {
            self.retire_slot(node);
        }
        self.new_current(rotation, role, rng)
    }

    /// 12.8, `--clear-bitmap`: these peers count as equal; their bitmaps are cleared before.
    pub fn zero_slots(&mut self, nodes: NodeMask) {
        for node in nodes.iter() {
            self.set_slot(node, Uuid::ZERO, Dagtag(0));
        }
    }

    /// 12.8: a just created node skips the initial resync and takes the peer's generation.
    pub fn adopt_without_resync(&mut self, uuid: Uuid, peer: NodeId, role: Role) {
        self.set_current(with_role(uuid, role));
        self.set_slot(peer, Uuid::ZERO, Dagtag(0));
    }

    /// 12.10: a resync starts, this node is target (protocol 110 and later). Gives
    /// `rs_start_uuid`, to be kept until the end.
    pub fn resync_starts_as_target(&mut self, source: &PeerUuids, rotation: &Rotation<'_>) -> Uuid {
        if self.current == Uuid::JUST_CREATED {
            let known_as = source.slot(self.node);
            if is_real(known_as) && known_as != Uuid::JUST_CREATED {
                self.set_current(known_as.without_primary_bit());
            }
        }
        let start = self.current;
        self.unwritten_since = Uuid::ZERO;
        if is_real(start) && start != Uuid::JUST_CREATED {
            self.rotate(
                start,
                &Rotation {
                    weak: NodeMask::EMPTY,
                    ..*rotation
                },
            );
        }
        start
    }

    /// 12.10: a full resync starts, this node is source and the peer's whole slot is set and
    /// durable. After an interruption it continues by bitmap.
    pub fn full_resync_starts_as_source(&mut self, peer: NodeId, peer_current: Uuid) {
        let initialised = |uuid: Uuid| is_real(uuid) && uuid != Uuid::JUST_CREATED;
        // A target of another node goes by that one's generation: it says nothing about its data.
        let own = peer_current.same_generation(self.current);
        // One that was announced here and not made: another node that took it is newer by that name.
        let noted = self.notes(peer_current);
        if !initialised(peer_current) || !initialised(self.current) || own || noted {
            return;
        }
        let old = self.slot(peer).bitmap_uuid;
        self.slot_mut(peer).bitmap_uuid = peer_current;
        self.push_history(old);
    }

    /// 12.10: a *stable* resync ended, this node was target. `at_source` are the peers known to be
    /// at least Inconsistent with the source's current UUID. Gives the nodes that the source knows
    /// to be behind: those shown as Consistent or better become Outdated.
    pub fn resync_ends_as_target(
        &mut self,
        source_node: NodeId,
        source: &PeerUuids,
        start: Uuid,
        at_source: NodeMask,
    ) -> NodeMask {
        let old_current = self.current;
        let mut retired: Vec<Uuid> = source.history.iter().rev().copied().collect();
        let known: Vec<NodeId> = self.others().collect();
        retired.extend(known.iter().map(|node| source.slot(*node)));
        // That is a generation between the two, if the source was given a new one before this resync.
        retired.push(source.slot(self.node));
        let behind: NodeMask = known
            .iter()
            .copied()
            .filter(|node| {
                *node != source_node && source.slot_is_real(*node) && !at_source.contains(*node)
            })
            .collect();
        let usable_start = is_real(start) && start != Uuid::JUST_CREATED;
        // Within one generation the slots go on from where they began.
        let same = start.same_generation(source.current);
        for node in known {
            let slot = self.slot(node).bitmap_uuid;
            // An unallocated slot tracks what changed since the generation that it names.
            let nobodys = self.slot(node).bitmap_index.is_none();
            if nobodys || (same && behind.contains(node) && is_real(slot)) {
                continue;
            }
            retired.push(self.slot(node).bitmap_uuid);
            if behind.contains(node) && usable_start {
                self.slot_mut(node).bitmap_uuid = start.without_primary_bit();
            } else {
                self.set_slot(node, Uuid::ZERO, Dagtag(0));
            }
        }
        self.set_vote(Uuid::ZERO);
        self.set_current(source.current.without_primary_bit());
        for uuid in retired {
            self.push_history(uuid);
        }
        self.push_retired_current(old_current);
        if source.history_notes(old_current) {
            // Back at the generation of who announced the old one in vain, this node has what that one has.
            self.forget_history(old_current);
            self.note_planned(old_current);
        }
        behind
    }

    /// 12.10: the resync to `peer` has ended, as its UUIDs say (below protocol 110: at once).
    pub fn resync_ends_as_source(&mut self, peer: NodeId) {
        self.retire_slot(peer);
    }

    /// 12.10, protocol below 110: a resync starts, this node is source. Gives the UUID for
    /// `P_SYNC_UUID`. A target that is at `theirs` and missed the last start hears the same again.
    pub fn sync_uuid_as_source(&mut self, peer: NodeId, theirs: Uuid, rng: &mut Rng) -> Uuid {
        let old = self.slot(peer).bitmap_uuid;
        if is_real(theirs) && is_real(old) && old.is_resync_from(theirs) {
            // What comes after it in the history is what the target gets now.
            self.forget_history(theirs);
            self.push_retired_current(theirs);
            return old;
        }
        // A target without a slot is copied as a whole, and may miss the start as well.
        let named = |uuid: &Uuid| is_real(*uuid) && *uuid != Uuid::JUST_CREATED;
        let sync = match [old, theirs].into_iter().find(named) {
            Some(before) => {
                let mut name = before.resync_name();
                while self.history_has(name) {
                    name = name.resync_name();
                }
                name
            }
            None => rng.uuid(),
        };
        self.slot_mut(peer).bitmap_uuid = sync;
        // Also if entries of nodes that do not exist hold it: 8.4 has no such entries, and a target
        // that misses the start looks for its generation here (13.3, rule 51).
        self.push_retired_current(old);
        sync
    }

    /// 12.10, protocol below 110: `P_SYNC_UUID` arrived at the target.
    pub fn sync_uuid_as_target(&mut self, source: NodeId, uuid: Uuid) {
        self.set_current(uuid);
        self.set_slot(source, Uuid::ZERO, Dagtag(0));
    }

    /// 12.10, protocol below 110: the resync ended, this node was target. `source` is the set of
    /// the handshake. Both sets end equal.
    pub fn resync_ends_as_target_84(&mut self, source_node: NodeId, source: &PeerUuids) {
        let sync = self.current;
        self.set_slot(source_node, Uuid::ZERO, Dagtag(0));
        self.current = source.current.without_primary_bit();
        self.history = [Uuid::ZERO; UUID_SLOTS];
        for &uuid in source.history.iter().rev() {
            self.push_history(uuid);
        }
        self.push_history(source.slot(self.node));
        self.push_history(sync);
    }

    /// 12.2: marks the current generation as that of a Primary, or not any more.
    pub fn set_primary_bit(&mut self, role: Role) {
        if is_real(self.current) && self.current != Uuid::JUST_CREATED {
            self.current = with_role(self.current, role);
        }
        if role == Role::Primary {
            self.unwritten_since = Uuid::ZERO;
        }
    }

    /// 12.11: what the set of a peer says about third nodes. Slots and history are changed; the
    /// bitmap has to follow. Afterwards resend the own UUIDs: to all peers if something was
    /// copied, to all but the sender if something else changed.
    pub fn learn(&mut self, set: &PeerUuids, context: &LearnContext) -> Vec<Learned> {
        let mut learned = Vec::new();
        let equal = set.current_or_created() != Uuid::JUST_CREATED
            && set.current.same_generation(self.current);
        for node in self.others() {
            let about = if node == context.sender {
                self.node
            } else {
                node
            };
            let exists = self.exists(node);
            let busy = node != context.sender && context.busy.contains(node);
            let news = set.slots.contains(about) && set.slot(about).is_zero();
            if !exists || busy || !news || self.slot(node).bitmap_uuid.is_zero() {
                continue;
            }
            if equal {
                if !context.any_sync_target {
                    self.retire_slot(node);
                    let clear_bits = node != context.sender;
                    learned.push(Learned::CaughtUp { node, clear_bits });
                }
            } else if !context.provisional.contains(node) {
                learned.extend(self.copy_newer(node, set.current));
            }
        }
        self.learn_from_equal_slots(set, context, &mut learned);
        learned
    }

    /// The own set for a peer: node slots that exist, and one unallocated day-0 slot.
    pub fn to_send(&self, context: &SendContext) -> PeerUuids {
        let mut set = PeerUuids {
            current: context.resolved_current.unwrap_or(self.current),
            history: self.history,
            dirty_bits: context.dirty_bits,
            flags: context.flags,
            node_mask: context.node_mask,
            ..PeerUuids::default()
        };
        set.slots = (0..NodeId::COUNT)
            .map(NodeId)
            .filter(|node| self.exists(*node))
            .collect();
        if let Some(node) = self.advertised_day0_slot() {
            set.slots.insert(node);
            let id = UuidFlags::from_bits_retain(u64::from(node.0) << 56);
            set.flags |= UuidFlags::HAS_UNALLOC | id;
        }
        for node in set.slots.iter() {
            let uuid = self.slot(node).bitmap_uuid;
            let unknown = uuid.is_zero() && context.target_of.contains(node);
            set.bitmap[usize::from(node.0)] = match unknown {
                true => Uuid::ALL_ONES,
                false if node == self.node => Uuid::ZERO,
                false => uuid,
            };
        }
        set
    }

    /// 12.1: remembers the nodes that a peer lists and for which this node has no bitmap.
    pub fn note_existing_nodes(&mut self, set: &PeerUuids) {
        let unallocated = set.flags.unallocated_slot();
        for node in set.slots.iter() {
            let slot = self.slot_mut(node);
            if unallocated != Some(node.0) && slot.bitmap_index.is_none() {
                slot.flags |= PeerFlags::NODE_EXISTS;
            }
        }
    }

    /// Gives `peer` the lowest free bitmap slot, if it has none; none if all are taken.
    pub fn allocate_slot(&mut self, peer: NodeId) -> Option<u8> {
        if let Some(index) = self.slot(peer).bitmap_index {
            return Some(index);
        }
        let index = self.free_index()?;
        self.slot_mut(peer).bitmap_index = Some(index);
        Some(index)
    }

    /// 12.9: frees the slot of a peer. `keep_existing`: the node stays, as a diskless one.
    /// None if it had no slot; its entry is reset all the same. What the slot named becomes an
    /// ancestor: a node that comes back with its old metadata is behind, and no branch.
    pub fn forget_peer(&mut self, peer: NodeId, keep_existing: bool) -> Option<Forgotten> {
        let copy_from = self.free_index();
        let day0 = self.day0_slot();
        let freed = self.slot(peer).bitmap_index;
        let left_at = self.slot(peer).bitmap_uuid;
        let mut entry = Peer::default();
        if keep_existing {
            entry.flags = PeerFlags::NODE_EXISTS;
        } else if let Some(day0) = day0 {
            entry.bitmap_uuid = self.slot(day0).bitmap_uuid;
            entry.bitmap_dagtag = self.slot(day0).bitmap_dagtag;
        }
        *self.slot_mut(peer) = entry;
        self.push_retired_current(left_at);
        freed.map(|freed| Forgotten { freed, copy_from })
    }

    /// Entry of a node.
    pub fn slot(&self, node: NodeId) -> &Peer {
        &self.slots[usize::from(node.0) % UUID_SLOTS]
    }

    /// Whether the data have the name of a generation: the metadata are not just created.
    pub fn is_named(&self) -> bool {
        is_real(self.current) && self.current != Uuid::JUST_CREATED
    }

    /// Whether the current data is the provisioned one: never rotated.
    pub fn is_day0(&self) -> bool {
        self.is_named()
            && self.history.iter().all(|uuid| uuid.is_zero())
            && self
                .others()
                .all(|node| self.slot(node).bitmap_uuid.is_zero())
    }

    /// Whether there is evidence of the node: a bitmap slot or the flag.
    pub fn exists(&self, node: NodeId) -> bool {
        let slot = self.slot(node);
        slot.bitmap_index.is_some() || slot.flags.contains(PeerFlags::NODE_EXISTS)
    }

    /// The lowest bitmap index that no node holds.
    pub fn free_index(&self) -> Option<u8> {
        (0..self.max_peers).find(|index| self.owner_of(*index).is_none())
    }

    fn owner_of(&self, index: u8) -> Option<NodeId> {
        self.others()
            .find(|node| self.slot(*node).bitmap_index == Some(index))
    }

    fn others(&self) -> impl Iterator<Item = NodeId> + use<> {
        let own = self.node;
        (0..NodeId::COUNT)
            .map(NodeId)
            .filter(move |node| *node != own)
    }

    /// Entry of a node, to be changed.
    pub(crate) fn slot_mut(&mut self, node: NodeId) -> &mut Peer {
        &mut self.slots[usize::from(node.0) % UUID_SLOTS]
    }

    fn set_slot(&mut self, node: NodeId, uuid: Uuid, dagtag: Dagtag) {
        let slot = self.slot_mut(node);
        slot.bitmap_uuid = uuid;
        slot.bitmap_dagtag = dagtag;
    }

    /// The slot names no generation any more; what it named goes to the history.
    pub(crate) fn retire_slot(&mut self, node: NodeId) {
        let old = self.slot(node).bitmap_uuid;
        self.set_slot(node, Uuid::ZERO, Dagtag(0));
        self.push_history(old);
    }

    /// Sets the current UUID and keeps it out of the history (invariant U5).
    fn set_current(&mut self, uuid: Uuid) {
        if !uuid.same_generation(self.current) {
            self.unwritten_since = Uuid::ZERO;
        }
        self.current = uuid;
        let mut kept = [Uuid::ZERO; UUID_SLOTS];
        let others = self
            .history
            .iter()
            .filter(|entry| !entry.same_generation(uuid));
        for (to, from) in kept.iter_mut().zip(others) {
            *to = *from;
        }
        self.history = kept;
    }

    /// Retires an old current UUID, also one that a slot holds: slots that are not sent hold it,
    /// too, and a peer that missed the change must find its generation in what it is sent, else a
    /// later handshake ends in unrelated data (12.6).
    pub(crate) fn push_retired_current(&mut self, uuid: Uuid) {
        let uuid = uuid.without_primary_bit();
        let known = self.has_retired(uuid) || uuid.same_generation(self.current);
        if known || !is_real(uuid) || uuid == Uuid::JUST_CREATED {
            return;
        }
        self.history.rotate_right(1);
        self.history[0] = uuid;
    }

    /// Puts `previous` into the slots of those that do not follow. Gives the nodes that count,
    /// that is: whose changes a real bitmap tracks.
    fn rotate(&mut self, previous: Uuid, rotation: &Rotation<'_>) -> NodeMask {
        let mut counted = NodeMask::EMPTY;
        let configured: NodeMask = rotation.peers.iter().map(|peer| peer.node).collect();
        for peer in rotation.peers {
            // With a slot from the time when it had a disk it is tracked as before, or the disk
            // could come back with the same generation and other data.
            let untracked = !peer.has_bitmap && self.slot(peer.node).bitmap_index.is_none();
            let leaves = peer.connected && peer.disk == DiskState::Diskless && untracked;
            let behind = (peer.disk <= DiskState::DUnknown && peer.disk != DiskState::Negotiating)
                || rotation.weak.contains(peer.node);
            if !leaves
                && behind
                && self.mark_diverged(peer.node, previous, rotation.dagtag)
                && self.slot(peer.node).bitmap_index.is_some()
            {
                counted.insert(peer.node);
            }
        }
        // Nodes without an index stand for the unallocated bitmaps, lowest first. An index that
        // belongs to a node is never theirs, so that no slot in use is left out.
        let owned: Vec<u8> = self
            .others()
            .filter_map(|node| self.slot(node).bitmap_index)
            .collect();
        let mut free = (0..self.max_peers).filter(|index| !owned.contains(index));
        for node in self.others().filter(|node| !configured.contains(*node)) {
            let tracked = self.slot(node).bitmap_index.is_some() || free.next().is_some();
            if self.mark_diverged(node, previous, rotation.dagtag) && tracked {
                counted.insert(node);
            }
        }
        counted
    }

    /// Sets the slot unless the node diverged earlier. False in that case.
    fn mark_diverged(&mut self, node: NodeId, previous: Uuid, dagtag: Dagtag) -> bool {
        let slot = self.slot(node).bitmap_uuid;
        if node == self.node || !(slot.is_zero() || slot.same_generation(previous)) {
            return false;
        }
        self.set_slot(node, previous, dagtag);
        true
    }

    /// 12.11 (ii): `node` was synced up to the level of another slot.
    fn copy_newer(&mut self, node: NodeId, sender_current: Uuid) -> Option<Learned> {
        let to = self.slot(node).bitmap_index?;
        let old = *self.slot(node);
        let other = self.others().find(|&other| {
            let slot = self.slot(other);
            other != node
                && slot.bitmap_index.is_some()
                && is_real(slot.bitmap_uuid)
                && slot.bitmap_uuid.same_generation(sender_current)
                && slot.bitmap_dagtag.is_newer_than(old.bitmap_dagtag)
        })?;
        self.copy_slot(other, node, to)
    }

    fn copy_slot(&mut self, other: NodeId, node: NodeId, to: u8) -> Option<Learned> {
        let source = *self.slot(other);
        let old = self.slot(node).bitmap_uuid;
        self.set_slot(node, source.bitmap_uuid, source.bitmap_dagtag);
        self.push_history(old);
        Some(Learned::Copy {
            from: source.bitmap_index?,
            to,
            node,
        })
    }

    /// 12.11: two nodes that the sender knows to be at one generation are so here, too.
    fn learn_from_equal_slots(
        &mut self,
        set: &PeerUuids,
        context: &LearnContext,
        learned: &mut Vec<Learned>,
    ) {
        let usable = |this: &Self, node: NodeId| {
            set.slots.contains(node)
                && set.slot_is_real(node)
                && this.slot(node).bitmap_index.is_some()
                && !context.connected.contains(node)
        };
        for node in self.others() {
            let Some(to) = self.slot(node).bitmap_index.filter(|_| usable(self, node)) else {
                continue;
            };
            let uuid = set.slot(node);
            let twin = self.others().any(|other| {
                other != node && usable(self, other) && set.slot(other).same_generation(uuid)
            });
            if !twin || self.slot(node).bitmap_uuid.same_generation(uuid) {
                continue;
            }
            let holder = self.others().find(|&other| {
                let slot = self.slot(other);
                slot.bitmap_index.is_some() && slot.bitmap_uuid.same_generation(uuid)
            });
            if let Some(holder) = holder {
                learned.extend(self.copy_slot(holder, node, to));
            }
        }
    }

    /// Day-0 slot that is advertised: the lowest one, if an unallocated bitmap exists.
    fn advertised_day0_slot(&self) -> Option<NodeId> {
        self.free_index()?;
        self.others().find(|node| self.is_day0_slot(*node))
    }

    /// Day-0 slot to copy from: the highest one, since old versions damaged low ones.
    fn day0_slot(&self) -> Option<NodeId> {
        self.others().filter(|node| self.is_day0_slot(*node)).last()
    }

    fn is_day0_slot(&self, node: NodeId) -> bool {
        let slot = self.slot(node);
        slot.bitmap_index.is_none() && slot.flags.is_empty() && is_real(slot.bitmap_uuid)
    }
}

fn with_role(uuid: Uuid, role: Role) -> Uuid {
    match role {
        Role::Primary => Uuid(uuid.0 | Uuid::PRIMARY_BIT),
        Role::Secondary | Role::Unknown => uuid.without_primary_bit(),
    }
}

/// 12.6: nodes that do not get the new generation, to be announced along with it.
pub fn weak_nodes(own: NodeId, own_disk: DiskState, peers: &[PeerView]) -> NodeMask {
    let follows = |peer: &&PeerView| {
        !matches!(peer.disk, DiskState::DUnknown | DiskState::Outdated)
            && peer.disk > DiskState::Failed
    };
    let mut strong: NodeMask = peers.iter().filter(follows).map(|peer| peer.node).collect();
    if own_disk == DiskState::UpToDate {
        strong.insert(own);
    }
    strong.complement()
}

/// 8.2: disk state that the flags of the metadata allow.
pub fn disk_state_of(flags: DeviceFlags, may_be_up_to_date: bool) -> DiskState {
    if !flags.contains(DeviceFlags::CONSISTENT) {
        DiskState::Inconsistent
    } else if !flags.contains(DeviceFlags::WAS_UP_TO_DATE) {
        DiskState::Outdated
    } else if may_be_up_to_date {
        DiskState::UpToDate
    } else {
        DiskState::Consistent
    }
}

impl Generations {
    /// The data are of this generation or have come from it.
    pub fn knows(&self, uuid: Uuid) -> bool {
        let slots = self.others().map(|node| self.slot(node).bitmap_uuid);
        let ancestors = self.history.iter().copied().chain(slots);
        self.current.same_generation(uuid) || ancestors.into_iter().any(|u| u.same_generation(uuid))
    }

    /// 8.2: whether no fenced-off peer can have newer data. `disk_of` gives the disk of each
    /// node as known (DUnknown without a connection), `diskless_by_config` the nodes configured
    /// without a disk. The caller checks a diskless Primary's generation and owed reconciles.
    pub fn may_be_up_to_date(
        &self,
        disk_of: impl Fn(NodeId) -> DiskState,
        diskless_by_config: NodeMask,
    ) -> bool {
        self.others().all(|node| {
            let flags = self.slot(node).flags;
            if !self.exists(node) || !flags.contains(PeerFlags::FENCING) {
                return true;
            }
            match disk_of(node) {
                DiskState::Inconsistent
                | DiskState::Outdated
                | DiskState::Consistent
                | DiskState::UpToDate => true,
                DiskState::Diskless if !flags.contains(PeerFlags::DEVICE_SEEN) => true,
                DiskState::Diskless
                | DiskState::Attaching
                | DiskState::Detaching
                | DiskState::Failed
                | DiskState::Negotiating
                | DiskState::DUnknown => {
                    diskless_by_config.contains(node) || flags.contains(PeerFlags::OUTDATED)
                }
            }
        })
    }
}

#[cfg(test)]
#[path = "generation_tests.rs"]
mod tests;
