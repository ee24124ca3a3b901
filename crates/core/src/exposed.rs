//! When a Primary without usable data of its own starts a new generation (semantics.md, 12.6).
//!
//! It labels the data that it exposes to applications. The decision is pure; the caller makes the
//! UUID, remembers the predecessor and announces both.

use lockstep_format::units::{NodeId, NodeMask, Uuid};
use lockstep_format::wire::{DiskState, UuidFlags};

use crate::uuids::PeerUuids;

/// What a diskless Primary knows of a configured peer.
#[derive(Clone, Copy, Debug)]
pub struct ExposedPeer<'a> {
    /// The peer.
    pub node: NodeId,
    /// There is a connection to it.
    pub connected: bool,
    /// Its disk, as known or remembered.
    pub disk: DiskState,
    /// Its last UUID set.
    pub uuids: Option<&'a PeerUuids>,
}

/// The Primary's own situation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// This node.
    pub node: NodeId,
    /// Generation of the data that applications see.
    pub uuid: Uuid,
    /// Configured without a disk, not merely detached.
    pub intentionally_diskless: bool,
    /// The generation is not confirmed yet and `on-no-quorum` is suspend-io (12.7).
    pub waits_for_confirmation: bool,
    /// Configured nodes with `bitmap no`.
    pub without_bitmap: NodeMask,
}

impl Exposed {
    /// Whether somebody still sits on the exposed generation who would miss a write.
    pub fn needs_new_generation(&self, peers: &[ExposedPeer<'_>]) -> bool {
        if self.waits_for_confirmation {
            return false;
        }
        let follows = |peer: &&ExposedPeer<'_>| peer.connected && peer.disk == DiskState::UpToDate;
        let told = peers.iter().filter(follows).any(|peer| {
            let Some(set) = peer.uuids else { return false };
            self.has_open_slot(peer.node, set)
                || (self.intentionally_diskless && self.has_no_record(peer.node, set, peers))
        });
        told || peers.iter().any(|peer| self.may_return_unnoticed(peer))
    }

    fn has_open_slot(&self, sender: NodeId, set: &PeerUuids) -> bool {
        set.slots.iter().any(|node| {
            let skipped = node == sender
                || self.without_bitmap.contains(node)
                || (self.intentionally_diskless && node == self.node);
            // The slot of this node may be set provisionally (`PeerDevice::provisional`): whoever
            // is on the exposed generation sits on it all the same.
            let follows = node == self.node && set.current.same_generation(self.uuid);
            !skipped && (set.slot(node).is_zero() || follows)
        })
    }

    fn has_no_record(&self, sender: NodeId, set: &PeerUuids, peers: &[ExposedPeer<'_>]) -> bool {
        let mut thirds = peers.iter().filter(|third| third.node != sender);
        let clients = |third: &ExposedPeer<'_>| self.without_bitmap.contains(third.node);
        // Where nobody could record it in a slot, what an absent one was last at does.
        let recorded = thirds.clone().all(clients) && thirds.clone().any(|t| self.was_excluded(t));
        !recorded && thirds.all(|third| !set.slot_is_real(third.node))
    }

    /// An absent peer went away at an older generation than the exposed one.
    fn was_excluded(&self, peer: &ExposedPeer<'_>) -> bool {
        let known = peer.uuids.map_or(Uuid::ZERO, |set| set.current);
        !peer.connected
            && !known.without_primary_bit().is_zero()
            && !known.same_generation(self.uuid)
    }

    fn may_return_unnoticed(&self, peer: &ExposedPeer<'_>) -> bool {
        let remembered = peer.disk >= DiskState::Inconsistent && peer.disk <= DiskState::DUnknown;
        if peer.connected || !remembered {
            return false;
        }
        peer.uuids.is_none_or(|set| {
            let known = set.current.without_primary_bit();
            !set.flags.contains(UuidFlags::SYNC_TARGET)
                && (known.is_zero() || known.same_generation(self.uuid))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId(0);
    const B: NodeId = NodeId(1);
    const C: NodeId = NodeId(2);

    fn set(current: u64, slots: &[(NodeId, u64)]) -> PeerUuids {
        let mut set = PeerUuids {
            current: Uuid(current),
            ..PeerUuids::default()
        };
        for (node, uuid) in slots {
            set.bitmap[usize::from(node.0)] = Uuid(*uuid);
            set.slots.insert(*node);
        }
        set
    }

    fn needs(bend: impl FnOnce(&mut Exposed), b: &PeerUuids, c: Option<&PeerUuids>) -> bool {
        let mut exposed = Exposed {
            node: ME,
            uuid: Uuid(0x10),
            intentionally_diskless: true,
            waits_for_confirmation: false,
            without_bitmap: NodeMask::EMPTY,
        };
        bend(&mut exposed);
        exposed.needs_new_generation(&[
            ExposedPeer {
                node: B,
                connected: true,
                disk: DiskState::UpToDate,
                uuids: Some(b),
            },
            ExposedPeer {
                node: C,
                connected: false,
                disk: DiskState::DUnknown,
                uuids: c,
            },
        ])
    }

    #[test]
    fn an_absent_peer_on_the_exposed_generation_needs_a_new_one() {
        let recorded = set(0x10, &[(C, 0x90)]);
        assert!(needs(|_| {}, &recorded, Some(&set(0x11, &[]))));
        assert!(needs(|_| {}, &recorded, Some(&set(0, &[]))));
        assert!(needs(|_| {}, &recorded, None));
        assert!(!needs(|_| {}, &recorded, Some(&set(0x90, &[]))));
        let mut target = set(0x10, &[]);
        target.flags = UuidFlags::SYNC_TARGET;
        assert!(!needs(|_| {}, &recorded, Some(&target)));
        assert!(!needs(
            |own| own.waits_for_confirmation = true,
            &recorded,
            None
        ));
    }

    #[test]
    fn an_open_slot_at_an_up_to_date_peer_needs_a_new_generation() {
        let gone = set(0x90, &[]);
        assert!(needs(|_| {}, &set(0x10, &[(C, 0)]), Some(&gone)));
        assert!(!needs(|_| {}, &set(0x10, &[(C, 0x90)]), Some(&gone)));
        // Nodes without a configuration count, those without a bitmap do not.
        assert!(needs(
            |_| {},
            &set(0x10, &[(C, 0x90), (NodeId(9), 0)]),
            Some(&gone)
        ));
        let without = |own: &mut Exposed| own.without_bitmap = NodeMask::of(NodeId(9));
        assert!(!needs(
            without,
            &set(0x10, &[(C, 0x90), (NodeId(9), 0)]),
            Some(&gone)
        ));
        // The own slot counts only for a node that merely lost its disk.
        let own_open = set(0x10, &[(ME, 0), (C, 0x90)]);
        assert!(!needs(|_| {}, &own_open, Some(&gone)));
        assert!(needs(
            |own| own.intentionally_diskless = false,
            &own_open,
            Some(&gone)
        ));
    }

    #[test]
    fn an_absent_client_is_excluded_once() {
        let silent = set(0x10, &[]);
        let client = |own: &mut Exposed| own.without_bitmap = NodeMask::of(C);
        assert!(needs(client, &silent, Some(&set(0x10, &[]))));
        assert!(!needs(client, &silent, Some(&set(0x90, &[]))));
        // After a restart nobody knows what it was at.
        assert!(needs(client, &silent, Some(&set(0, &[]))));
        assert!(needs(client, &silent, None));
    }

    #[test]
    fn a_peer_that_never_recorded_a_generation_needs_one() {
        let gone = set(0x90, &[]);
        let silent = set(0x10, &[]);
        assert!(needs(|_| {}, &silent, Some(&gone)));
        assert!(!needs(
            |own| own.intentionally_diskless = false,
            &silent,
            Some(&gone)
        ));
    }
}
