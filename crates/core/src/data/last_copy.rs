//! Writes of a Primary without a disk of its own that is whole, where this disk is the only one
//! that gets them.
//!
//! A disk under a Primary may lose what is in its cache with its power, because the Primary's own
//! disk has it, marks it and copies it again. Under a Primary without a disk nobody has it: the
//! Primary lives on, its applications hold the writes for done, a later flush would succeed, and
//! the data would be gone. It cannot even notice, since a disk that comes back does not tell why
//! it was away. A Primary whose disk is Inconsistent is no better: the resync that goes on once the
//! other disk is back copies what that one has over its newer blocks. So what such a Primary writes
//! is made durable before it is acknowledged, and what it wrote before it lost its disk is, before
//! this disk takes over the new generation.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use lockstep_format::disk::v09::DeviceFlags;
use lockstep_format::units::{NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState, Role};

use super::Key;
use super::peer_write::PeerWrite;
use super::write::Local;
use crate::event::DiskError;
use crate::generation::{Generations, Rotation};
use crate::options::Protocol;
use crate::report::Level;
use crate::resource::Resource;
use crate::state::ReplSets;
use crate::uuids::is_real;

impl Resource {
    /// The local copy failed: a peer that merely was sent the write (protocol A) counts when it
    /// says that it has it, which it does with the barrier of the epoch.
    pub(super) fn await_only_copies(&mut self, key: Key) {
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        let sent_only: NodeMask = req
            .ok
            .intersection(req.unsettled)
            .iter()
            .filter(|peer| {
                self.connections
                    .get(peer)
                    .is_some_and(|c| c.net.protocol == Protocol::A || c.io.was_async)
            })
            .collect();
        if req.completed || sent_only.is_empty() {
            return;
        }
        for peer in sent_only.iter() {
            req.ok.remove(peer);
            req.pending.insert(peer);
        }
        self.close_epoch();
    }

    /// The write is on no whole disk of this node, and one peer has it. That one may have acknowledged it from its cache, when
    /// it took this node's disk for another copy: it counts when it says that it is on stable storage, with the barrier of the
    /// epoch. Whether the write is not complete for that.
    pub(super) fn awaits_stable_copy(&mut self, key: Key, lost_copy: bool) -> bool {
        let Some(req) = self.io.requests.get(key) else {
            return false;
        };
        let volume = req.volume;
        let lost = lost_copy || req.local == Local::Failed;
        let is_whole =
            |peer: &NodeId| self.state.peer_device(volume, *peer).disk > DiskState::Inconsistent;
        let mut copies = req.ok.iter().filter(is_whole);
        let (Some(peer), None) = (copies.next(), copies.next()) else {
            return false;
        };
        let cached = req.unsettled.contains(peer) && req.relied.contains(peer);
        if !lost || !cached || planted!(self, LastCopyInCache) {
            return false;
        }
        if let Some(req) = self.io.requests.get_mut(key) {
            req.ok.remove(peer);
            req.pending.insert(peer);
        }
        self.close_epoch();
        true
    }

    /// What `peer` writes is on this disk and on no other one.
    pub(crate) fn holds_last_copy(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let flushes = self
            .devices
            .get(&volume)
            .and_then(|d| d.attached())
            .is_some_and(|disk| disk.options.disk_flushes);
        let others = self.state.devices.get(&volume).is_some_and(|d| {
            d.peers
                .values()
                .any(|p| p.disk == DiskState::UpToDate && p.repl > ReplState::Off)
        });
        let sender = self.state.peer_device(volume, peer);
        let flushes = flushes && !planted!(self, LastCopyInCache);
        // A sender that is about to be this disk's target may be one already: its state is on the way.
        let overwritten = sender.repl == ReplState::WfBitmapS || sender.repl.is_sync_source();
        flushes
            && !others
            && sender.repl > ReplState::Off
            && (sender.disk <= DiskState::Inconsistent || overwritten)
    }

    /// Writes of this node are marked towards the peer, or will be: it was never sent them.
    pub(crate) fn lacks_writes(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let requests = self
            .io
            .log
            .iter()
            .filter_map(|key| self.io.requests.get(*key));
        self.out_of_sync_blocks(volume, peer) > 0
            || requests
                .filter(|req| req.volume == volume)
                .any(|req| !req.sent.contains(peer))
    }

    /// This disk holds the last copy from now on: what it has of it becomes durable with the
    /// generation that says so.
    pub(crate) fn keep_last_copy(&mut self, volume: VolumeNr) {
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.writer.flush_data = true;
        }
    }

    /// A lost connection left epochs whose barriers will not come. The next Primary knows nothing of
    /// them, so no flush of its applications reaches here either: they become durable with the next
    /// superblock, which no new generation overtakes.
    pub(super) fn keep_lost_epochs(&mut self, writes: &VecDeque<PeerWrite>) {
        let cached = writes.iter().filter(|w| w.may_be_in_a_cache());
        let volumes: BTreeSet<VolumeNr> = cached.map(|w| w.volume).collect();
        for volume in volumes {
            if planted!(self, LostEpochsForgotten) {
                return;
            }
            self.keep_last_copy(volume);
            self.write_superblock(volume);
        }
    }

    /// The link broke before the peer had a write that applications take for done: with protocol A it was merely sent.
    /// If this node's disk is gone as well no other disk has it, and the peer's data must not pass for what
    /// applications have seen. They get a generation that the peer does not know; the own disk, if it comes back,
    /// takes it.
    pub(super) fn copies_are_lost(&mut self, volumes: Vec<VolumeNr>, peer: NodeId) {
        let conn = self.connections.get(&peer);
        if conn.is_none_or(|conn| conn.net.protocol != Protocol::A) {
            // The peer has acknowledged them.
            return;
        }
        for volume in volumes {
            self.keep_alone(volume, peer);
        }
    }

    /// The same, where the link broke first and nothing was written since, or where the peer has refused writes: no
    /// generation says what it misses.
    pub(crate) fn disk_is_lost(&mut self, volume: VolumeNr) {
        let is_off = |peer: NodeId| self.state.peer_device(volume, peer).repl == ReplState::Off;
        let unsent: Vec<NodeId> = self
            .connections
            .values()
            .filter(|conn| conn.net.protocol == Protocol::A)
            .map(|conn| conn.peer)
            .filter(|peer| is_off(*peer) && self.lacks_writes(volume, *peer))
            .collect();
        let refused: Vec<NodeId> = self
            .devices
            .get(&volume)
            .iter()
            .flat_map(|device| &device.peers)
            .filter(|(peer, pd)| pd.refuses && self.out_of_sync_blocks(volume, **peer) > 0)
            .filter(|_| !planted!(self, RefusedIsTaken) && !self.another_has_all(volume))
            .map(|(peer, _)| *peer)
            .collect();
        for peer in unsent.into_iter().chain(refused) {
            self.keep_alone(volume, peer);
        }
    }

    /// A connected peer with a whole disk has everything: the generation that is made with it leaves out who has not.
    fn another_has_all(&self, volume: VolumeNr) -> bool {
        let refuses = |peer: NodeId| {
            let pd = self.devices.get(&volume).and_then(|d| d.peers.get(&peer));
            pd.is_some_and(|pd| pd.refuses)
        };
        self.established_peers().iter().any(|peer| {
            let p = self.state.peer_device(volume, peer);
            p.repl == ReplState::Established
                && p.disk == DiskState::UpToDate
                && !refuses(peer)
                && !self.lacks_writes(volume, peer)
        })
    }

    /// The peer has no write that applications may take for done, and has not said yet what became of its disk.
    pub(super) fn peer_refuses(&mut self, volume: VolumeNr, peer: NodeId) {
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.refuses = true;
        }
    }

    fn keep_alone(&mut self, volume: VolumeNr, peer: NodeId) {
        let gone = self.state.disk(volume) <= DiskState::Failed;
        let mut rng = self.rng.clone();
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let old = device.exposed_uuid;
        let set = device.peers.get(&peer).and_then(|pd| pd.uuids.as_ref());
        let follows = set.is_some_and(|set| set.current.same_generation(old));
        if self.state.role != Role::Primary || !gone || !follows || !is_real(old) {
            return;
        }
        let given = Uuid(rng.uuid().0 | Uuid::PRIMARY_BIT);
        device.exposed_uuid = given;
        device.kept_alone = Some((old, given));
        device.left_behind.push(old);
        self.rng = rng;
        let text = "writes that were acknowledged are on no disk but the one that failed: attach it again, or \
                    demote this node to go on with older data";
        self.log(Level::Error, None, Some(volume), text.into());
    }

    /// This disk has what `copies_are_lost` speaks of.
    pub(crate) fn was_kept_alone(&self, volume: VolumeNr, on_disk: &Generations) -> bool {
        let kept = self.devices.get(&volume).and_then(|d| d.kept_alone);
        kept.is_some_and(|(kept, _)| kept.same_generation(on_disk.current))
    }

    /// The disk is back, and this node still Primary: its data get the generation that is exposed, which makes
    /// it the source of whoever lacks them.
    pub(crate) fn take_kept_generation(&mut self, volume: VolumeNr) {
        let views = self.peer_views(volume);
        let (dagtag, role) = (self.io.dagtag, self.state.role);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let exposed = device.exposed_uuid;
        let Some((kept, given)) = device.kept_alone.take() else {
            return;
        };
        let Some(disk) = device.disk.as_mut() else {
            return;
        };
        let same = kept.same_generation(disk.generations.current);
        if !same || !given.same_generation(exposed) {
            return;
        }
        if role != Role::Primary || !disk.generations.flags.contains(DeviceFlags::CONSISTENT) {
            device.exposed_uuid = kept;
            return;
        }
        let rotation = Rotation {
            peers: &views,
            weak: views.iter().map(|view| view.node).collect(),
            dagtag,
        };
        let generations = &mut disk.generations;
        generations.receive_new_datagen(exposed, &rotation, DiskState::UpToDate, role);
    }

    pub(crate) fn last_copy_flushed(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        number: u64,
        result: Result<(), DiskError>,
    ) {
        match result {
            Ok(()) => self.peer_write_landed(volume, peer, number),
            Err(_) => self.peer_write_failed(volume, peer, number),
        }
    }

    /// Nothing here says what a lost peer misses before the generation is made that leaves it out.
    /// If it comes back before that it has to get the write.
    pub(super) fn cannot_mark(&self, key: Key) -> bool {
        self.io.requests.get(key).is_some_and(|req| {
            self.state.disk(req.volume) < DiskState::UpToDate
                && !self.io_fails(req.volume)
                && self
                    .devices
                    .get(&req.volume)
                    .is_some_and(|d| d.new_uuid_pending)
        })
    }
}
