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

use lockstep_format::units::{NodeId, Uuid, VolumeNr};
use lockstep_format::wire::{Role, UuidFlags};

use crate::device::LocalDisk;
use crate::generation::Generations;
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::uuids::is_real;

impl Generations {
    /// A generation that was announced is taken by a node that had `old` and notes this base of it.
    pub(crate) fn note_unwritten(&mut self, old: Uuid, base: Uuid, role: Role) {
        let base = match is_real(base) {
            true => base,
            false => old,
        };
        let useful = role == Role::Secondary && is_real(base) && base != Uuid::JUST_CREATED;
        self.unwritten_since = match useful {
            true => base.without_primary_bit(),
            false => Uuid::ZERO,
        };
    }

    /// Nothing was written here since the generation in the slot of that node, or if it has none, since the newest of
    /// the history ([`base_for`](crate::uuids::PeerUuids::base_for)).
    pub(crate) fn is_unwritten_for(&self, node: NodeId) -> bool {
        let (base, slot) = (self.unwritten_since, self.slot(node).bitmap_uuid);
        if slot.is_zero() {
            return is_real(base) && self.history[0].same_generation(base);
        }
        let age = |uuid: Uuid| self.history.iter().position(|e| e.same_generation(uuid));
        let later = || matches!((age(slot), age(base)), (Some(slot), Some(base)) if slot < base);
        is_real(base) && is_real(slot) && (slot.same_generation(base) || later())
    }
}

impl LocalDisk {
    /// The metadata have room for the note.
    pub(crate) fn notes_unwritten(&self) -> bool {
        !self.io.al.is_in_place()
    }
}

impl Resource {
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
            .and_then(|set| set.base_for(own));
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.copied_since = base.unwrap_or(Uuid::ZERO);
        }
    }

    /// That resync is over, and the generation of its source is taken.
    pub(crate) fn copied_unwritten(&mut self, volume: VolumeNr, peer: NodeId) {
        let own = self.node_id;
        let base = self
            .peer_uuids(volume, peer)
            .and_then(|set| set.base_for(own));
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
            disk.generations.note_unwritten(base, base, role);
        }
    }
}
