//! A UUID set as it travels: what one side told the other about its data generations.
//!
//! The sync decision uses only such sets, for the own side too: both ends can reach mirrored
//! results only from what was sent (semantics.md, 13.1).

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, Uuid};
use lockstep_format::wire::UuidFlags;
use lockstep_format::wire::packet::{Uuids, Uuids110};

/// Number of history entries and of node slots.
pub const UUID_SLOTS: usize = 32;

/// A UUID set as it was sent or received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerUuids {
    /// Resolved current UUID (semantics.md, 13.1).
    pub current: Uuid,
    /// Bitmap UUID of each node's slot; all ones where the sender named none.
    pub bitmap: [Uuid; UUID_SLOTS],
    /// Nodes whose slot the sender named.
    pub slots: NodeMask,
    /// Ancestors, newest first, zeros at the end.
    pub history: [Uuid; UUID_SLOTS],
    /// Blocks that are marked in the sender's slot for the receiver.
    pub dirty_bits: u64,
    /// Flags.
    pub flags: UuidFlags,
    /// Weak nodes, or authoritative nodes of an unstable sender.
    pub node_mask: NodeMask,
}

impl Default for PeerUuids {
    fn default() -> Self {
        PeerUuids {
            current: Uuid::ZERO,
            bitmap: [Uuid::ALL_ONES; UUID_SLOTS],
            slots: NodeMask::EMPTY,
            history: [Uuid::ZERO; UUID_SLOTS],
            dirty_bits: 0,
            flags: UuidFlags::empty(),
            node_mask: NodeMask::EMPTY,
        }
    }
}

impl PeerUuids {
    /// Stores a received `P_UUIDS110`: missing slots become all ones, missing history zero.
    pub fn from_packet110(packet: &Uuids110) -> Self {
        let mut set = PeerUuids {
            current: packet.current,
            dirty_bits: packet.dirty_bits,
            flags: packet.flags,
            node_mask: packet.node_mask,
            ..Self::default()
        };
        for &(node, uuid) in &packet.bitmap_uuids {
            if let Some(slot) = set.bitmap.get_mut(usize::from(node.0)) {
                *slot = uuid;
                set.slots.insert(node);
            }
        }
        for (entry, &uuid) in set.history.iter_mut().zip(&packet.history) {
            *entry = uuid;
        }
        set
    }

    /// Stores a received `P_UUIDS` (protocol below 110) of a peer: its one bitmap UUID is its slot
    /// for `receiver`, and the sender counts as stable.
    pub fn from_packet84(packet: &Uuids, receiver: NodeId) -> Self {
        let mut set = PeerUuids {
            current: packet.current,
            dirty_bits: packet.dirty_bits,
            flags: packet.flags.intersection(UuidFlags::KNOWN_TO_84) | UuidFlags::STABLE,
            ..Self::default()
        };
        set.bitmap[usize::from(receiver.0 % NodeId::COUNT)] = packet.bitmap;
        set.slots.insert(receiver);
        set.history[..2].copy_from_slice(&packet.history);
        set
    }

    /// The packet that says this set, with all 32 history entries as kernel peers send them.
    pub fn to_packet110(&self) -> Uuids110 {
        Uuids110 {
            current: self.current,
            dirty_bits: self.dirty_bits,
            flags: self.flags,
            node_mask: self.node_mask,
            bitmap_uuids: self
                .slots
                .iter()
                .map(|node| (node, self.slot(node)))
                .collect(),
            history: Vec::from(self.history),
        }
    }

    /// The packet for a peer below protocol 110.
    ///
    /// There is room for two entries of the history. Where the slot is called after a resync, the
    /// generation that this resync began from is the first one, however old it is: a receiver that
    /// missed the start is still there (semantics.md, 13.3, rule 51). The next one is what came right after that: a
    /// receiver that came to the end, of which the sender does not know, is there.
    pub fn to_packet84(&self, receiver: NodeId) -> Uuids {
        let slot = self.slot(receiver);
        let began_from = |uuid: &&Uuid| is_real(**uuid) && slot.is_resync_from(**uuid);
        let mut history = [self.history[0], self.history[1]];
        if let Some(at) = self.history.iter().position(|uuid| began_from(&uuid))
            && at > 0
        {
            history = [self.history[at], self.history[at - 1]];
        }
        Uuids {
            current: self.current,
            bitmap: slot,
            history,
            dirty_bits: self.dirty_bits,
            flags: self.flags.intersection(UuidFlags::KNOWN_TO_84),
        }
    }

    /// Bitmap UUID of the slot of `node`; all ones if none was named.
    pub fn slot(&self, node: NodeId) -> Uuid {
        self.bitmap
            .get(usize::from(node.0))
            .copied()
            .unwrap_or(Uuid::ALL_ONES)
    }

    /// Whether the slot of `node` names a generation: neither zero nor "draw no conclusion".
    pub fn slot_is_real(&self, node: NodeId) -> bool {
        is_real(self.slot(node))
    }

    /// Current UUID for comparisons: zero counts as just created.
    pub fn current_or_created(&self) -> Uuid {
        if self.current.without_primary_bit().is_zero() {
            Uuid::JUST_CREATED
        } else {
            self.current.without_primary_bit()
        }
    }

    /// Whether the history names the generation of `uuid`.
    pub fn history_has(&self, uuid: Uuid) -> bool {
        is_real(uuid) && self.history.iter().any(|entry| entry.same_generation(uuid))
    }

    /// Takes a generation out of the history.
    pub(crate) fn forget(&mut self, uuid: Uuid) {
        if let Some(at) = self.history.iter().position(|e| e.same_generation(uuid)) {
            self.history[at..].rotate_left(1);
            if let Some(last) = self.history.last_mut() {
                *last = Uuid::ZERO;
            }
        }
    }

    /// Names the generation that follows the current one, which becomes the newest of the history.
    pub(crate) fn precede(&mut self, next: Uuid) {
        let current = core::mem::replace(&mut self.current, next);
        self.forget(next);
        self.forget(current);
        self.history.rotate_right(1);
        self.history[0] = current.without_primary_bit();
    }

    /// Whether the data are of this generation or have come from it, as far as the set knows.
    pub fn knows(&self, uuid: Uuid) -> bool {
        let slots = self.slots.iter().map(|node| self.slot(node));
        let known = self.history.iter().copied().chain(slots);
        let mut known = known.chain([self.current]);
        is_real(uuid) && known.any(|known| known.same_generation(uuid))
    }

    /// Whether the history has it only as announced and perhaps never made.
    pub fn history_notes(&self, uuid: Uuid) -> bool {
        let noted = |entry: &Uuid| entry.0 & Uuid::PRIMARY_BIT != 0;
        is_real(uuid)
            && self
                .history
                .iter()
                .any(|e| noted(e) && e.same_generation(uuid))
    }

    /// The older generation since which nothing was written to the sender's disk, as it tells this receiver.
    pub(crate) fn base_for(&self, receiver: NodeId) -> Option<Uuid> {
        let slot = self.slot(receiver);
        let base = match slot.is_zero() {
            true => self.history[0],
            false => slot,
        };
        let told = self.flags.contains(UuidFlags::UNWRITTEN);
        (told && is_real(base)).then(|| base.without_primary_bit())
    }

    /// The sender has written nothing since a generation from which the other set has gone on.
    pub(crate) fn yields_to(&self, other: &PeerUuids, receiver: NodeId) -> bool {
        self.base_for(receiver)
            .is_some_and(|base| other.knows(base))
    }

    /// [`base_for`](Self::base_for), if the sender's disk had nothing then that any other node lacks.
    pub(crate) fn base_of_all(&self, receiver: NodeId) -> Option<Uuid> {
        let all = self.flags.contains(UuidFlags::UNWRITTEN_FOR_ALL);
        self.base_for(receiver).filter(|_| all)
    }

    /// Whether both histories have an entry in common.
    pub fn shares_history(&self, other: &PeerUuids) -> bool {
        self.history.iter().any(|entry| other.history_has(*entry))
    }
}

/// Whether `uuid` names a generation: neither zero nor "draw no conclusion".
pub const fn is_real(uuid: Uuid) -> bool {
    let generation = uuid.without_primary_bit();
    !generation.is_zero() && !generation.same_generation(Uuid::ALL_ONES)
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn a_slot_that_the_packet_omits_draws_no_conclusion() {
        let packet = Uuids110 {
            current: Uuid(0x10),
            bitmap_uuids: vec![(NodeId(2), Uuid(0x20))],
            history: vec![Uuid(0x30)],
            ..Uuids110::default()
        };
        let set = PeerUuids::from_packet110(&packet);
        assert_eq!(set.slot(NodeId(2)), Uuid(0x20));
        assert_eq!(set.slot(NodeId(1)), Uuid::ALL_ONES);
        assert!(!set.slot_is_real(NodeId(1)));
        assert_eq!(set.history[1], Uuid::ZERO);
        let back = set.to_packet110();
        assert_eq!(back.bitmap_uuids, packet.bitmap_uuids);
        assert_eq!(back.history.len(), 32);
    }

    #[test]
    fn an_old_peer_hears_what_the_resync_began_from_that_it_missed() {
        let mut set = PeerUuids::from_packet110(&Uuids110 {
            current: Uuid(0x10),
            bitmap_uuids: vec![(NodeId(2), Uuid(0x50).resync_name())],
            history: vec![Uuid(0x30), Uuid(0x40), Uuid(0x50)],
            ..Uuids110::default()
        });
        let history = |set: &PeerUuids| set.to_packet84(NodeId(2)).history;
        // One that came to the end of that resync is where the sender was next.
        assert_eq!(history(&set), [Uuid(0x50), Uuid(0x40)]);
        set.history[..2].copy_from_slice(&[Uuid(0x50), Uuid(0x30)]);
        assert_eq!(history(&set), [Uuid(0x50), Uuid(0x30)]);
        set.bitmap[2] = Uuid(0x50);
        assert_eq!(history(&set), [Uuid(0x50), Uuid(0x30)]);
    }

    #[test]
    fn a_set_of_an_old_peer_is_stable_and_has_one_slot() {
        let packet = Uuids {
            current: Uuid(0x10),
            bitmap: Uuid(0x20),
            history: [Uuid(0x30), Uuid(0x40)],
            dirty_bits: 5,
            flags: UuidFlags::CRASHED_PRIMARY | UuidFlags::RECONNECT,
        };
        let set = PeerUuids::from_packet84(&packet, NodeId(0));
        assert_eq!(set.flags, UuidFlags::CRASHED_PRIMARY | UuidFlags::STABLE);
        assert_eq!(set.slots, NodeMask(1));
        let back = set.to_packet84(NodeId(0));
        assert_eq!((back.bitmap, back.history), (packet.bitmap, packet.history));
    }

    #[test]
    fn zero_entries_are_no_common_history() {
        let set = PeerUuids::default();
        assert!(!set.shares_history(&set.clone()));
        assert!(!set.history_has(Uuid::ZERO));
    }
}
