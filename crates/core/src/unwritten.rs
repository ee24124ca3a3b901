//! Generations under which nothing was written here (semantics.md, 12.6).
//!
//! Who follows a generation that its Primary announces has it in its metadata before that Primary makes it. If the
//! Primary dies in between, or is given up, the new name means nothing: the data are those of the generation before.
//! Others who were at that one may go on from there, and then each of the two has a generation that the other does
//! not know. So the follower notes which generation its data really have, until something is written: the first
//! write takes the note away, and is not acknowledged before that is durable. It tells those who it thinks are
//! still at that generation (UUID flag UNWRITTEN; only Lockstep says it), and may be copied from them.
//!
//! Only in superblocks that are written as a whole: a kernel that uses the disk in between writes zeros there. On
//! persistent memory it changes single fields, and the note would survive what it writes.

use lockstep_format::units::{NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{Role, UuidFlags};

use crate::device::LocalDisk;
use crate::generation::Generations;
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::uuids::is_real;

impl Generations {
    /// Notes that the data are those of that generation, and that nothing which they have is missing at these nodes.
    pub(crate) fn note_unwritten(&mut self, base: Uuid, nodes: NodeMask, role: Role) {
        let useful = role == Role::Secondary && is_real(base) && base != Uuid::JUST_CREATED;
        (self.unwritten_since, self.unwritten_for) = match useful {
            true => (base.without_primary_bit(), nodes),
            false => (Uuid::ZERO, NodeMask::EMPTY),
        };
    }

    /// Nothing was written here since the generation in the slot of that node, or if it has none, since the newest of
    /// the history ([`base_for`](crate::uuids::PeerUuids::base_for)).
    pub(crate) fn is_unwritten_for(&self, node: NodeId) -> bool {
        let (base, slot) = (self.unwritten_since, self.slot(node).bitmap_uuid);
        if !self.unwritten_for.contains(node) {
            return false;
        }
        if slot.is_zero() {
            return is_real(base) && self.history[0].same_generation(base);
        }
        let age = |uuid: Uuid| self.history.iter().position(|e| e.same_generation(uuid));
        let later = || matches!((age(slot), age(base)), (Some(slot), Some(base)) if slot < base);
        is_real(base) && is_real(slot) && (slot.same_generation(base) || later())
    }

    /// The same holds for every node that there is.
    pub(crate) fn is_unwritten_for_all(&self) -> bool {
        let mut nodes = (0..NodeId::COUNT).map(NodeId);
        is_real(self.unwritten_since)
            && nodes.all(|node| {
                node == self.node || !self.exists(node) || self.unwritten_for.contains(node)
            })
    }
}

impl LocalDisk {
    /// The metadata have room for the note.
    pub(crate) fn notes_unwritten(&self) -> bool {
        !self.io.al.is_in_place()
    }

    /// Nodes that are not marked to lack anything.
    fn without_marks(&self) -> NodeMask {
        let clean = |node: &NodeId| {
            let slot = self.io.slot(*node);
            slot.is_none_or(|slot| self.io.bitmap.count(slot) == 0)
        };
        (0..NodeId::COUNT).map(NodeId).filter(clean).collect()
    }
}

impl Resource {
    /// What the note of a generation that is about to be taken will say: since when nothing was written, and who lacks
    /// nothing. A write that its Primary has not settled everywhere may be acknowledged once that has made the
    /// generation, and others may lack it.
    pub(crate) fn note_of_next(&self, volume: VolumeNr) -> (Uuid, NodeMask) {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let Some(disk) = disk.filter(|disk| disk.notes_unwritten()) else {
            return (Uuid::ZERO, NodeMask::EMPTY);
        };
        let generations = &disk.generations;
        let unsettled = !planted!(self, UnwrittenUnsettled) && self.peer_writes_in_flight(volume);
        match is_real(generations.unwritten_since) {
            true => (generations.unwritten_since, generations.unwritten_for),
            false if unsettled => (Uuid::ZERO, NodeMask::EMPTY),
            false => (generations.current, disk.without_marks()),
        }
    }

    /// Something is about to be written. Acknowledgements wait for the metadata, and who is copied from here hears of
    /// it before what is written.
    pub(crate) fn data_change(&mut self, volume: VolumeNr) {
        if planted!(self, UnwrittenForEver) {
            return;
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        for pd in device.peers.values_mut() {
            pd.copied_since = Uuid::ZERO;
        }
        let Some(disk) = device.disk.as_mut() else {
            return;
        };
        if disk.generations.unwritten_since.is_zero() {
            return;
        }
        disk.generations.unwritten_since = Uuid::ZERO;
        self.write_superblock(volume);
        for peer in self.established_peers().iter() {
            let p = self.state.peer_device(volume, peer);
            if self.is_lockstep(peer) && p.repl.is_sync_source() {
                self.send_uuids(peer, volume, UuidFlags::empty());
            }
        }
    }

    /// A resync from the peer starts: where nothing was written there since an older generation, this disk will be
    /// like that.
    pub(crate) fn note_source_unwritten(&mut self, volume: VolumeNr, peer: NodeId) {
        let own = self.node_id;
        let base = self
            .peer_uuids(volume, peer)
            .and_then(|set| set.base_of_all(own));
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.copied_since = base.unwrap_or(Uuid::ZERO);
        }
    }

    /// That resync is over, and the generation of its source is taken.
    pub(crate) fn copied_unwritten(&mut self, volume: VolumeNr, peer: NodeId) {
        let own = self.node_id;
        let base = self
            .peer_uuids(volume, peer)
            .and_then(|set| set.base_of_all(own));
        let role = self.state.role;
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let since = device
            .peers
            .get_mut(&peer)
            .map(|pd| core::mem::take(&mut pd.copied_since));
        let same = since
            .zip(base)
            .is_some_and(|(since, base)| since.same_generation(base));
        if let Some(disk) = device.disk.as_mut()
            && let (true, Some(base)) = (same && disk.notes_unwritten(), base)
        {
            disk.generations.note_unwritten(base, NodeMask::ALL, role);
        }
    }
}
