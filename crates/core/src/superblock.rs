//! The superblock on disk: one write at a time, and what waits for it to be durable.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::{DiskState, ReplState, UuidFlags};

use crate::device::AfterMeta;
use crate::event::MetaOp;
use crate::report::Level;
use crate::resource::{Pending, Resource};

impl Resource {
    // The superblock on disk.

    /// Writes the superblock with all changes up to now; changes during a write go with the next.
    pub(crate) fn write_superblock(&mut self, volume: VolumeNr) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        disk.writer.changed += 1;
        self.push_superblock(volume);
    }

    /// The peer's disk, which was good, is gone or is to be copied anew, and this one is good. What
    /// both have acknowledged may lie in this disk's cache alone now: a power cut must not take it.
    pub(crate) fn only_copy_remains(
        &mut self,
        volume: VolumeNr,
        before: DiskState,
        after: DiskState,
    ) {
        let lost = before == DiskState::UpToDate
            && (after < DiskState::Negotiating || after == DiskState::Inconsistent);
        let unflushed = planted!(self, RemainingCopyNotFlushed);
        if !lost || unflushed || self.state.disk(volume) != DiskState::UpToDate {
            return;
        }
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.writer.flush_data = true;
            self.write_superblock(volume);
        }
    }

    /// Runs `then` once everything up to now is durable.
    pub(crate) fn after_superblock(&mut self, volume: VolumeNr, then: AfterMeta) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        disk.writer.changed += 1;
        let count = disk.writer.changed;
        disk.writer.waiting.push_back((count, then));
        self.push_superblock(volume);
    }

    pub(crate) fn push_superblock(&mut self, volume: VolumeNr) {
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let members = self.state.members;
        let up_to_date_somewhere = self
            .state
            .devices
            .get(&volume)
            .is_some_and(|d| d.data_accessible());
        let stays = self.state.disk(volume) > DiskState::Failed;
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return;
        };
        if disk.writer.in_flight.is_some()
            || disk.writer.hold
            || stays && disk.writer.unmarked > 0
            || disk.writer.changed == disk.writer.durable
        {
            return;
        }
        let count = disk.writer.changed;
        let persist_size = up_to_date_somewhere || disk.writer.size_awaited;
        let Some((offset, bytes)) = disk.encode_superblock(size, members, persist_size) else {
            return;
        };
        let named = disk
            .superblock
            .as_ref()
            .map_or(Sector(0), |b| b.effective_size);
        disk.writer.size_in_flight = named.0 != 0;
        disk.writer.in_flight = Some(count);
        // A clean log says that nothing has to be copied after a power cut: so nothing may be
        // left in the disk's cache.
        let only_copy = core::mem::take(&mut disk.writer.flush_data);
        let flush_data = (disk.discards_the_log() || only_copy) && disk.options.disk_flushes;
        self.meta(
            volume,
            MetaOp::Write {
                offset,
                bytes,
                flush_data,
            },
            Pending::Superblock(volume, count),
        );
    }

    pub(crate) fn superblock_written(
        &mut self,
        volume: VolumeNr,
        count: u64,
        result: Result<(), crate::event::DiskError>,
    ) {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.disk.as_mut()) else {
            return;
        };
        if disk.writer.in_flight != Some(count) {
            return;
        }
        disk.writer.in_flight = None;
        if result.is_err() && !planted!(self, SuperblockErrorIgnored) {
            self.log(
                Level::Error,
                None,
                Some(volume),
                "writing the metadata superblock failed".into(),
            );
            self.disk_failed(volume, crate::data::DiskFault::Meta);
            return;
        }
        let count = match planted!(self, SuperblockCoversLater) {
            true => disk.writer.changed,
            false => count,
        };
        disk.writer.durable = count;
        disk.writer.size_named |= disk.writer.size_in_flight;
        let logged = disk.writer.size_named && core::mem::take(&mut disk.writer.size_awaited);
        let mut due = Vec::new();
        while disk
            .writer
            .waiting
            .front()
            .is_some_and(|(at, _)| *at <= count)
        {
            if let Some((_, then)) = disk.writer.waiting.pop_front() {
                due.push(then);
            }
        }
        if !planted!(self, LaterChangesUnwritten) {
            self.push_superblock(volume);
        }
        if logged {
            self.write_al_block(volume);
        }
        for then in due {
            self.meta_durable(volume, then);
        }
        self.admission_changed();
        self.acks_ungated(volume);
        self.detach_progress(volume);
    }

    fn meta_durable(&mut self, volume: VolumeNr, then: AfterMeta) {
        match then {
            AfterMeta::NewUuid => self.new_uuid_durable(volume),
            AfterMeta::PlannedUuid => self.planned_uuid_durable(volume),
            AfterMeta::ForcedUuid => self.forced_uuid_durable(volume),
            AfterMeta::SpreadUuids if self.spreads_later(volume) => {}
            AfterMeta::SpreadUuids => self.spread_uuids(volume),
            AfterMeta::Attached => self.attach_stamped(volume),
            AfterMeta::Answer(id) => self.answer(id, Ok(crate::command::Answer::Done)),
            AfterMeta::NamedByCommand(id, uuid) => {
                let made = self.generation_made(volume, uuid);
                let gone = || crate::attach::taken_away(volume);
                self.answer(
                    id,
                    made.then_some(crate::command::Answer::Done)
                        .ok_or_else(gone),
                );
            }
            AfterMeta::ResyncStart(peer) => self.resync_target_ready(volume, peer),
            AfterMeta::ResyncEnd(peer) => self.resync_end_durable(volume, peer),
            AfterMeta::FullSync(peer) => self.full_sync_marked(volume, peer),
            AfterMeta::SyncUuid(peer, uuid) => self.sync_uuid_durable(volume, peer, uuid),
            AfterMeta::Voted(peer, uuid) => self.tell_vote(volume, peer, uuid),
            AfterMeta::Resized => self.resize_durable(volume),
        }
    }

    /// A newer generation has been taken over, and is not durable: who hears of it counts on that. It is told once it is.
    pub(crate) fn spreads_later(&self, volume: VolumeNr) -> bool {
        let disk = self.devices.get(&volume).and_then(|d| d.disk.as_ref());
        let mut waiting = disk.into_iter().flat_map(|d| &d.writer.waiting);
        waiting.any(|(_, then)| matches!(then, AfterMeta::SpreadUuids))
            && !planted!(self, SpreadsEarly)
    }

    /// The peer hears of that generation when it is durable, and nothing of it before. Who attaches waits for the
    /// UUIDs, and its Primary does not take them for a confirmation.
    pub(crate) fn spreads_to(&self, peer: NodeId, volume: VolumeNr) -> bool {
        let p = self.state.peer_device(volume, peer);
        let attaches = [DiskState::Attaching, DiskState::Negotiating];
        p.repl >= ReplState::Established
            && !attaches.contains(&p.disk)
            && !attaches.contains(&self.state.disk(volume))
            && self.spreads_later(volume)
            && !planted!(self, ConfirmsBeforeDurable)
    }

    /// The same for these flags. That this node is stable is told with that generation.
    pub(crate) fn spreads_with(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        flags: UuidFlags,
    ) -> bool {
        let waits = UuidFlags::GOT_STABLE.contains(flags) && self.spreads_to(peer, volume);
        if let Some(pd) = self.peer_device_mut(volume, peer).filter(|_| waits) {
            pd.spread_flags |= flags;
        }
        waits
    }

    pub(crate) fn take_spread_flags(&mut self, volume: VolumeNr, peer: NodeId) -> UuidFlags {
        let stable = self.state.stable();
        let waiting = self.peer_device_mut(volume, peer);
        let flags = waiting.map(|pd| core::mem::take(&mut pd.spread_flags));
        flags.filter(|_| stable).unwrap_or_default()
    }

    /// All metadata changes of the volume up to now are durable.
    pub(crate) fn meta_is_durable(&self, volume: VolumeNr) -> bool {
        self.devices
            .get(&volume)
            .and_then(|d| d.disk.as_ref())
            .is_none_or(|d| d.writer.durable == d.writer.changed)
    }
}
