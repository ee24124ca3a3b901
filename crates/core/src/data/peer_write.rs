//! Writes received from peers: order, acks, epochs, and what is owed until the peer ack.
//!
//! A received write takes its place among the ranges in flight at once, so that the dagtag of the
//! connection never names a write that a resync read could miss. Its activity-log extents stay
//! until the sender's peer ack says who else has it, or until the sender is lost (semantics.md,
//! 15.9 and 18.3 to 18.4).

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::{
    BarrierAck, BlockAck, BlockDesc, BlockId, ConfirmStable, Data, Trim,
};
use lockstep_format::wire::{
    BIO_LEN_MAX, DISCARD_LEN_MAX, DataFlags, DiskState, Features, Packet, ReplState,
};

use super::conflict::{Clash, Incoming};
use super::disk::FlushWaiter;
use super::late_words::LateMarks;
use super::{DataOp, DiskFault, Owner};
use crate::event::{DiskError, Payload, RequestKind, Stream};
use crate::interval::{Origin, RangeId};
use crate::resource::Resource;
use crate::state::ReplSets;

/// A write received from a peer, until its peer ack.
#[derive(Debug)]
pub(crate) struct PeerWrite {
    /// In the order in which they came.
    pub(super) number: u64,
    pub(crate) volume: VolumeNr,
    pub(crate) sector: Sector,
    pub(crate) size_bytes: u32,
    kind: RequestKind,
    payload: Option<Payload>,
    block_id: BlockId,
    flags: DataFlags,
    dagtag: Dagtag,
    epoch: u64,
    range: Option<RangeId>,
    /// Nothing overlaps any more.
    clear: bool,
    /// It holds its extents, of the activity log named so.
    al: Option<u64>,
    /// It waits for its extents.
    asked: bool,
    pub(super) stage: Stage,
    /// The sender knows that it is on stable storage.
    confirmed: bool,
    /// Newer data have come for the range.
    pub(super) overtaken: bool,
    /// Its sender may have written there since without sending it here: a copy of the block may be newer.
    pub(super) followed_by_marks: bool,
    /// It is not on this disk, and its marks are set: the serial of the disk that has them.
    pub(super) recopied: Option<u64>,
    /// It is on stable storage once it is off the disk's queue.
    durable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits for ranges, extents or the disk.
    Active,
    /// On the disk; the ack is held until metadata are durable.
    Written,
    /// Acked.
    Done,
    /// Not on the disk, and the sender knows.
    Failed,
}

impl PeerWrite {
    /// It is on the disk, and no flush since is known of.
    pub(super) fn may_be_in_a_cache(&self) -> bool {
        let written = matches!(self.stage, Stage::Written | Stage::Done);
        written && !self.durable && !self.confirmed
    }

    /// Its place in the sender's order.
    pub(crate) fn dagtag(&self) -> Dagtag {
        self.dagtag
    }

    /// It is not acked yet.
    pub(crate) fn is_active(&self) -> bool {
        matches!(self.stage, Stage::Active | Stage::Written)
    }
}

/// An epoch of a peer.
#[derive(Debug, Default)]
pub(crate) struct ReceivedEpoch {
    /// Number in the peer's barrier, once that has come.
    barrier: Option<u32>,
    /// Writes that were neither acked with a barrier nor confirmed.
    writes: u32,
    /// Writes without an ack yet.
    active: u32,
    volumes: Vec<VolumeNr>,
    /// Some of its writes lost against writes of this node.
    has_refused: bool,
}

/// A flush that makes epochs durable.
#[derive(Debug)]
pub(crate) struct EpochFlush {
    serial: u64,
    /// Epochs that are acked when it is done.
    epochs: usize,
    /// Writes of the oldest epoch that are confirmed when it is done.
    confirm: u32,
    disks: usize,
    /// Volumes whose flush failed.
    failed: Vec<VolumeNr>,
}

impl Resource {
    pub(crate) fn peer_data(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        data: &Data,
        payload: Option<Payload>,
    ) {
        let fits = payload.is_some_and(|p| p.len == data.payload_len);
        if !fits || !self.is_within(volume, data.sector, data.payload_len, BIO_LEN_MAX) {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            let text = format!(
                "write of {} bytes at sector {}",
                data.payload_len, data.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        }
        let fua = data.flags.contains(DataFlags::FUA) && !planted!(self, PeerFuaIgnored);
        let kind = RequestKind::Write { fua };
        self.receive_write(
            peer,
            volume,
            kind,
            data.sector,
            data.payload_len,
            payload,
            (data.block_id, data.flags),
        );
    }

    pub(crate) fn peer_trim(&mut self, peer: NodeId, volume: VolumeNr, trim: &Trim, zero: bool) {
        if !self.is_within(volume, trim.sector, trim.size_bytes, DISCARD_LEN_MAX) {
            let text = format!(
                "discard of {} bytes at sector {}",
                trim.size_bytes, trim.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        }
        let features = self
            .connections
            .get(&peer)
            .map_or(Features::empty(), |c| c.features());
        // Without the feature a trim may have been a zero-out.
        let zero = zero && !planted!(self, ZeroesAsDiscard);
        let kind = if zero || !features.contains(Features::WZEROES) {
            RequestKind::Zeroes {
                unmap: !zero || trim.flags.contains(DataFlags::DISCARD),
            }
        } else {
            RequestKind::Discard
        };
        self.receive_write(peer, volume, kind, trim.sector, trim.size_bytes, None, {
            (trim.block_id, trim.flags)
        });
    }

    pub(super) fn is_within(
        &self,
        volume: VolumeNr,
        sector: Sector,
        size_bytes: u32,
        most: u32,
    ) -> bool {
        // A diskless node may not know the size yet.
        let end = self
            .devices
            .get(&volume)
            .filter(|d| d.size_sectors > 0)
            .map(|d| d.size_sectors.max(d.growth.shrunk_from));
        size_bytes > 0
            && size_bytes <= most
            && u64::from(size_bytes).is_multiple_of(Sector::SIZE)
            && self.devices.contains_key(&volume)
            && end.is_none_or(|end| sector.end_of(size_bytes).0 <= end)
    }

    #[allow(clippy::too_many_arguments)]
    fn receive_write(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        kind: RequestKind,
        sector: Sector,
        size_bytes: u32,
        payload: Option<Payload>,
        (block_id, mut flags): (BlockId, DataFlags),
    ) {
        let incoming = Incoming {
            peer,
            volume,
            ack: BlockAck {
                sector,
                block_id,
                size_bytes,
                seq_num: 0,
            },
        };
        if self.clash(incoming, payload) != Clash::None {
            return;
        }
        let has_disk = self.takes_writes(volume);
        if self.state.peer_device(volume, peer).disk < DiskState::Inconsistent {
            // The sender has no disk, so it misses the block. Marked at once: later the link may
            // be lost, and with it what is known of the peer's disk, or the sender may have
            // attached one and have got the bitmap.
            flags.remove(DataFlags::MAY_SET_IN_SYNC);
            if has_disk {
                self.legacy_diskless_writes(volume, peer);
                self.mark_towards(volume, peer, sector, size_bytes);
                // It may have got a copy of the block before it lost the disk, and its ack may come late.
                self.overtake_source_reads_of(volume, peer, sector, size_bytes);
            }
        }
        let sectors = u64::from(size_bytes) / Sector::SIZE;
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        if conn.io.epochs.is_empty() {
            conn.io.epochs.push_back(ReceivedEpoch::default());
        }
        self.io.foreign_count += 1;
        let epoch = conn.io.first_epoch + conn.io.epochs.len() as u64 - 1;
        if let Some(open) = conn.io.epochs.back_mut() {
            open.writes += 1;
            open.active += 1;
            let left_out = payload.is_none() && planted!(self, DiscardEpochNotFlushed);
            if !open.volumes.contains(&volume) && !left_out {
                open.volumes.push(volume);
            }
        }
        let counts = payload.is_some() || !planted!(self, DagtagSkipsDiscards);
        let counted = if counts { size_bytes } else { 0 };
        let dagtag = conn.last_dagtag.advanced_by_bytes(counted);
        let number = conn.io.next_write;
        conn.io.next_write += 1;
        let last = conn.io.writes.back();
        conn.io.has_late |= last.is_some_and(|last| last.dagtag.is_newer_than(dagtag));
        conn.io.writes.push_back(PeerWrite {
            number,
            volume,
            sector,
            size_bytes,
            kind,
            payload,
            block_id,
            flags,
            dagtag,
            epoch,
            range: None,
            clear: false,
            al: None,
            asked: false,
            stage: Stage::Active,
            confirmed: false,
            overtaken: false,
            followed_by_marks: false,
            recopied: None,
            durable: false,
        });
        self.overtake_peer_writes(volume, sector, size_bytes, Some(peer));
        if let Some(io) = self.peer_io(volume, peer) {
            io.received_sectors += sectors;
        }
        if !has_disk {
            self.set_peer_dagtag(peer, dagtag);
            self.peer_write_failed(volume, peer, number);
            return;
        }
        let shared = self.both_may_write(peer);
        let behind = self.let_pass(peer, volume, sector, size_bytes);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let local = device.io.ranges.overlaps_local_write(sector, size_bytes);
        let concurrent = !shared && local;
        let owner = Owner::Peer(peer, number);
        #[cfg(feature = "planted")]
        (device.io.ranges.planted = self.planted);
        let (range, clear) =
            device
                .io
                .ranges
                .insert(Origin::PeerWrite(peer), sector, size_bytes, owner);
        if let Some(write) = self.peer_write(peer, number) {
            write.range = Some(range);
        }
        self.set_peer_dagtag(peer, dagtag);
        if concurrent {
            let text = format!("both nodes write sector {sector} at the same time");
            self.protocol_error(peer, Some(volume), text);
            return;
        }
        if flags.contains(DataFlags::SEND_RECEIVE_ACK) || planted!(self, AckBeforeDiskWrite) {
            let ack = self.block_ack(volume, peer, sector, block_id, size_bytes);
            self.send(peer, Stream::Control, volume, Packet::RecvAck(ack));
        }
        if clear {
            self.peer_write_submit(volume, peer, number);
        } else if !local && !planted!(self, ExtentsOutOfOrder) {
            // In the order of arrival: later writes could take all extents, and none of them is settled before
            // this one. A write of this node is served after those of peers, so nothing is held that waits for it.
            self.peer_write_ask(volume, peer, number);
        }
        for key in behind {
            self.start_write(key);
        }
    }

    /// A write of the open epoch is not written here, and not counted.
    pub(super) fn refuse_write(&mut self, peer: NodeId) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        if conn.io.epochs.is_empty() {
            conn.io.epochs.push_back(ReceivedEpoch::default());
        }
        if let Some(open) = conn.io.epochs.back_mut() {
            open.has_refused = true;
        }
    }

    fn set_peer_dagtag(&mut self, peer: NodeId, dagtag: Dagtag) {
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.last_dagtag = dagtag;
            conn.dagtag_fresh = true;
        }
        self.dagtag_progress(peer);
    }

    /// `P_DAGTAG`: writes that were not sent here.
    pub(crate) fn peer_dagtag_jump(&mut self, peer: NodeId, dagtag: Dagtag) {
        self.set_peer_dagtag(peer, dagtag);
    }

    pub(super) fn peer_write(&mut self, peer: NodeId, number: u64) -> Option<&mut PeerWrite> {
        let io = &mut self.connections.get_mut(&peer)?.io;
        // No number is left out but for those of late writes.
        let first = io.writes.front()?.number;
        let mut at = usize::try_from(number.checked_sub(first)?).ok()?;
        if io.writes.get(at).is_none_or(|write| write.number != number) {
            at = io.writes.partition_point(|write| write.number < number);
        }
        io.writes.get_mut(at).filter(|write| write.number == number)
    }

    fn block_ack(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        block_id: BlockId,
        size_bytes: u32,
    ) -> BlockAck {
        let seq_num = self.next_seq(volume, peer);
        BlockAck {
            sector,
            block_id,
            size_bytes,
            seq_num,
        }
    }

    /// Nothing overlaps any more: activity log next.
    pub(crate) fn peer_write_submit(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        let serial = self.al_serial(volume);
        let takes_writes = self.takes_writes(volume);
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        write.clear = true;
        if !takes_writes {
            self.peer_write_failed(volume, peer, number);
        } else if write.al == Some(serial) {
            self.peer_write_start(volume, peer, number);
        } else if !write.asked {
            self.peer_write_ask(volume, peer, number);
        }
    }

    /// Takes its extents, or its place in the queue for them.
    fn peer_write_ask(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        write.asked = true;
        let (sector, size) = (write.sector, write.size_bytes);
        if self.al_get(volume, sector, size, Owner::Peer(peer, number)) {
            self.peer_write_hot(volume, peer, number);
        }
    }

    /// It holds its extents, unless the log is gone.
    pub(crate) fn peer_write_hot(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        let serial = self.al_serial(volume);
        let gone = self.disk_io(volume).is_none() || !self.takes_writes(volume);
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        write.asked = false;
        if write.stage != Stage::Active {
            // It failed while it waited.
            let (sector, size) = (write.sector, write.size_bytes);
            if !gone {
                self.al_put(volume, sector, size, serial);
            }
            return;
        }
        if !write.clear {
            // It starts, or fails, when the range is free.
            write.al = (!gone).then_some(serial);
        } else if gone {
            self.peer_write_failed(volume, peer, number);
        } else {
            write.al = Some(serial);
            self.peer_write_start(volume, peer, number);
        }
    }

    fn peer_write_start(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        let (sector, size) = (write.sector, write.size_bytes);
        let (mut kind, payload) = (write.kind, write.payload);
        if let RequestKind::Write { fua } = &mut kind {
            *fua |= self.holds_last_copy(volume, peer);
            let durable = *fua;
            if let Some(write) = self.peer_write(peer, number) {
                write.durable = durable;
            }
        }
        let short = planted!(self, PeerDiscardShort) && payload.is_none();
        let reach = match short {
            true => size.div_ceil(2).next_multiple_of(4096),
            false => size,
        };
        self.data_change(volume);
        let op = self.disk_write(volume, kind, sector, reach, payload);
        self.disk_op(volume, op, DataOp::PeerWrite(volume, peer, number));
    }

    /// Sets the bits of a range towards one peer.
    pub(crate) fn mark_towards(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
    ) {
        let wrong = planted!(self, WrongSlot).then_some(0);
        if let Some(io) = self.disk_io(volume)
            && let Some(slot) = io.slot(peer)
        {
            io.mark(wrong.unwrap_or(slot), sector, size_bytes);
        }
    }

    pub(crate) fn peer_write_done(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        number: u64,
        result: Result<(), DiskError>,
    ) {
        let sectors = self
            .peer_write(peer, number)
            .map_or(0, |w| u64::from(w.size_bytes) / 512);
        if let Some(device) = self.devices.get_mut(&volume) {
            device.io.written_sectors += sectors;
        }
        if result.is_err() {
            self.disk_failed(volume, DiskFault::Data);
            self.peer_write_failed(volume, peer, number);
            return;
        }
        let durable = self.peer_write(peer, number).is_none_or(|w| w.durable);
        if !durable && self.holds_last_copy(volume, peer) {
            self.flush_disk(volume, FlushWaiter::LastCopy(peer, number));
            return;
        }
        self.peer_write_landed(volume, peer, number);
    }

    /// A write is on the disk, as safe as it has to be.
    pub(crate) fn peer_write_landed(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        self.peer_write_off_disk(volume, peer, number);
        if let Some(write) = self.peer_write(peer, number) {
            write.stage = Stage::Written;
        }
        // The ack says that the generation is here, too.
        if self.meta_is_durable(volume) || planted!(self, AckBeforeMetadata) {
            self.peer_write_acked(volume, peer, number);
        } else if self.connections.get(&peer).is_some_and(|c| c.io.draining) {
            // Nobody waits for the ack, and what ends next may end the connection: marks and extent first.
            self.drain_writes(peer);
        } else if let Some(device) = self.devices.get_mut(&volume) {
            device.io.gated_acks.push((peer, number));
        }
    }

    /// The volume's metadata are durable: acks that waited for it go out.
    pub(crate) fn acks_ungated(&mut self, volume: VolumeNr) {
        if !self.meta_is_durable(volume) {
            return;
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let most = match planted!(self, GatedAcksLost) {
            true => 1,
            false => usize::MAX,
        };
        for (peer, number) in core::mem::take(&mut device.io.gated_acks)
            .into_iter()
            .take(most)
        {
            self.peer_write_acked(volume, peer, number);
        }
    }

    /// Range and payload of a write are not needed any more.
    fn peer_write_off_disk(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        let (range, payload) = (write.range.take(), write.payload.take());
        if let (Some(range), Some(device)) = (range, self.devices.get_mut(&volume)) {
            let mut ready = Vec::new();
            device.io.ranges.remove(range, &mut ready);
            self.wake_ranges(volume, ready);
        }
        if let Some(payload) = payload.filter(|_| !planted!(self, LostBuffer)) {
            self.release(payload.buf);
        }
    }

    fn peer_write_acked(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        let progress = self.state.peer_device(volume, peer).repl.has_progress();
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        if write.stage != Stage::Written {
            return;
        }
        write.stage = Stage::Done;
        let (sector, size, id) = (write.sector, write.size_bytes, write.block_id);
        let flags = write.flags;
        // The sender may tell its other replicas that this node and they are equal here.
        self.owe_less_to_others(volume, peer, sector, size);
        if flags.contains(DataFlags::SEND_WRITE_ACK) {
            let in_sync = flags.contains(DataFlags::MAY_SET_IN_SYNC) && progress;
            if in_sync
                && let Some(io) = self.disk_io(volume)
                && let Some(slot) = io.slot(peer)
                && io.bitmap.clear_range(slot, sector, size) > 0
            {
                self.target_overwritten(volume, peer);
            }
            let ack = self.block_ack(volume, peer, sector, id, size);
            let packet = if in_sync {
                Packet::WriteAckInSync(ack)
            } else {
                Packet::WriteAck(ack)
            };
            self.send(peer, Stream::Control, volume, packet);
        }
        self.peer_write_ended(volume, peer, number);
    }

    /// A write that is not on this disk.
    pub(crate) fn peer_write_failed(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        self.peer_write_off_disk(volume, peer, number);
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        write.stage = Stage::Failed;
        let (sector, size, id) = (write.sector, write.size_bytes, write.block_id);
        self.mark_failed_peer_write(volume, peer, number);
        let ack = self.block_ack(volume, peer, sector, id, size);
        self.send(peer, Stream::Control, volume, Packet::NegAck(ack));
        self.peer_write_ended(volume, peer, number);
    }

    fn peer_write_ended(&mut self, volume: VolumeNr, peer: NodeId, number: u64) {
        let Some(write) = self.peer_write(peer, number) else {
            return;
        };
        let epoch = write.epoch;
        if planted!(self, PeerExtentLetGoEarly)
            && let Some(write) = self.peer_write(peer, number)
            && let Some(serial) = write.al.take()
        {
            let (sector, size) = (write.sector, write.size_bytes);
            self.al_put(volume, sector, size, serial);
        }
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        if conn.io.draining {
            self.drain_writes(peer);
            return;
        }
        let at = epoch.checked_sub(conn.io.first_epoch).map(|at| at as usize);
        if let Some(epoch) = at.and_then(|at| conn.io.epochs.get_mut(at)) {
            epoch.active -= 1;
        }
        self.finish_epochs(peer);
        if self.is_legacy(peer) {
            self.settle_without_ack(peer);
        } else if self.disk_io(volume).is_some_and(|io| io.al.is_starving()) {
            self.confirm_early(volume, peer);
        }
    }

    // Epochs (wire.md, 6.2).

    pub(crate) fn peer_barrier(&mut self, peer: NodeId, barrier: u32) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        // A node of this project asks for a flush of what it has not sent itself.
        let asks = conn.is_lockstep();
        if asks && conn.io.epochs.is_empty() {
            conn.io.epochs.push_back(ReceivedEpoch::default());
        }
        match conn.io.epochs.back_mut() {
            Some(open) => {
                open.barrier = Some(barrier);
                if asks && open.writes == 0 && !open.has_refused {
                    open.volumes = self.devices.keys().copied().collect();
                }
                conn.io.epochs.push_back(ReceivedEpoch::default());
                self.finish_epochs(peer);
            }
            None => {
                self.protocol_error(peer, None, format!("barrier {barrier} of an empty epoch"));
            }
        }
    }

    /// Flushes for epochs whose writes are done, oldest first.
    fn finish_epochs(&mut self, peer: NodeId) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        if conn.io.flushing.is_some() || conn.io.draining {
            return;
        }
        let skipped = usize::from(planted!(self, EpochsOutOfOrder));
        let done = conn.io.epochs.iter().skip(skipped).take_while(|e| {
            e.barrier.is_some() && (e.active == 0 || planted!(self, BarrierAckBeforeWrites))
        });
        let mut volumes: Vec<VolumeNr> = Vec::new();
        let mut epochs = 0;
        for epoch in done {
            epochs += 1;
            for volume in &epoch.volumes {
                if !volumes.contains(volume) {
                    volumes.push(*volume);
                }
            }
        }
        if epochs > 0 {
            self.flush_for(peer, epochs, 0, volumes);
        }
    }

    fn flush_for(&mut self, peer: NodeId, epochs: usize, confirm: u32, volumes: Vec<VolumeNr>) {
        let disks: Vec<VolumeNr> = volumes
            .into_iter()
            .filter(|v| self.takes_writes(*v) && !planted!(self, BarrierAckWithoutFlush))
            .filter(|_| epochs > 0 || !planted!(self, ConfirmWithoutFlush))
            .collect();
        let disks = match planted!(self, BarrierFlushesOneVolume) {
            true => disks.into_iter().take(1).collect(),
            false => disks,
        };
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        conn.io.flush_serial += 1;
        let serial = conn.io.flush_serial;
        conn.io.flushing = Some(EpochFlush {
            serial,
            epochs,
            confirm,
            disks: disks.len(),
            failed: Vec::new(),
        });
        if disks.is_empty() {
            self.epochs_durable(peer);
        }
        for volume in disks {
            self.flush_disk(volume, FlushWaiter::Epochs(peer, serial));
        }
    }

    pub(crate) fn epochs_flushed(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        serial: u64,
        result: Result<(), DiskError>,
    ) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let Some(flush) = conn.io.flushing.as_mut().filter(|f| f.serial == serial) else {
            return;
        };
        flush.disks -= 1;
        if result.is_err() {
            flush.failed.push(volume);
        }
        if flush.disks == 0 {
            self.epochs_durable(peer);
        }
    }

    /// The flush for some epochs is done: the peer may forget their writes.
    fn epochs_durable(&mut self, peer: NodeId) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let Some(flush) = conn.io.flushing.take() else {
            return;
        };
        if !flush.failed.is_empty() && !planted!(self, FailedFlushAcked) {
            self.disown_writes(peer, &flush);
        }
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let mut acks = Vec::new();
        for _ in 0..flush.epochs {
            if let Some(epoch) = conn.io.epochs.pop_front() {
                conn.io.first_epoch += 1;
                if epoch.has_refused && epoch.writes == 0 {
                    // The sender has nothing to forget (wire.md, 6.12).
                    continue;
                }
                acks.push(BarrierAck {
                    barrier: epoch.barrier.unwrap_or_default(),
                    set_size: epoch.writes,
                });
            }
        }
        let first = conn.io.first_epoch;
        for write in conn.io.writes.iter_mut().filter(|w| w.epoch < first) {
            write.confirmed = true;
        }
        for ack in acks {
            self.send(
                peer,
                Stream::Control,
                VolumeNr::NONE,
                Packet::BarrierAck(ack),
            );
        }
        if flush.confirm > 0 {
            self.send_confirmation(peer, flush.confirm);
        }
        self.finish_epochs(peer);
    }

    /// Flushes of some volumes failed: nothing that they should have made durable may count as held.
    fn disown_writes(&mut self, peer: NodeId, flush: &EpochFlush) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let first = conn.io.first_epoch + flush.epochs as u64;
        let mut lost = Vec::new();
        let mut open = flush.confirm;
        for write in conn.io.writes.iter_mut().filter(|w| !w.confirmed) {
            let covered = write.epoch < first || open > 0;
            if write.epoch >= first && open > 0 {
                open -= 1;
            }
            if covered && write.stage == Stage::Done && flush.failed.contains(&write.volume) {
                write.stage = Stage::Failed;
                let range = (write.sector, write.size_bytes, write.block_id);
                lost.push((write.volume, write.number, range));
            }
        }
        for (volume, number, (sector, size, id)) in lost {
            self.mark_failed_peer_write(volume, peer, number);
            let ack = self.block_ack(volume, peer, sector, id, size);
            self.send(peer, Stream::Control, volume, Packet::NegAck(ack));
        }
    }

    /// The activity log is full of this peer's oldest epoch: what is written of it is made durable
    /// early, so that the sender can settle it (`P_CONFIRM_STABLE`). Its barrier may have come, since packets
    /// are read while writes wait for extents.
    pub(crate) fn confirm_early(&mut self, volume: VolumeNr, peer: NodeId) {
        if self.is_legacy(peer) {
            return;
        }
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        if conn.io.flushing.is_some() || conn.io.draining {
            return;
        }
        let oldest = conn.io.first_epoch;
        let mut count = 0;
        let mut volumes = Vec::new();
        for write in conn
            .io
            .writes
            .iter()
            .filter(|w| w.epoch == oldest && !w.confirmed)
        {
            if !matches!(write.stage, Stage::Done | Stage::Failed) {
                break;
            }
            count += 1;
            if !volumes.contains(&write.volume) {
                volumes.push(write.volume);
            }
        }
        if count > 0 && volumes.contains(&volume) {
            self.flush_for(peer, 0, count, volumes);
        }
    }

    fn send_confirmation(&mut self, peer: NodeId, count: u32) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let mut ids = Vec::new();
        for write in conn
            .io
            .writes
            .iter_mut()
            .filter(|w| !w.confirmed)
            .take(count as usize)
        {
            write.confirmed = true;
            ids.push(write.block_id);
        }
        if let Some(epoch) = conn.io.epochs.front_mut() {
            epoch.writes -= count;
        }
        if let (Some(oldest), Some(youngest)) = (ids.first(), ids.last()) {
            let confirm = ConfirmStable {
                oldest_block_id: *oldest,
                youngest_block_id: *youngest,
                set_size: count,
            };
            self.send(
                peer,
                Stream::Control,
                VolumeNr::NONE,
                Packet::ConfirmStable(confirm),
            );
        }
    }

    // What is owed until the peer ack (semantics.md, 18.3).

    pub(crate) fn peer_ack(&mut self, peer: NodeId, dagtag: Dagtag, mask: NodeMask) {
        self.settle_acked(peer, dagtag, mask);
        self.settle_flush_requests();
    }

    fn settle_acked(&mut self, peer: NodeId, dagtag: Dagtag, mask: NodeMask) {
        let in_order = planted!(self, LateWriteMisread);
        let mut at = 0;
        loop {
            let Some(conn) = self.connections.get_mut(&peer) else {
                return;
            };
            let Some(write) = conn.io.writes.get(at) else {
                let dagtags = conn.io.writes.iter().map(PeerWrite::dagtag);
                conn.io.has_late &= !dagtags.is_sorted_by(|a, b| !a.is_newer_than(*b));
                return;
            };
            if write.dagtag.is_newer_than(dagtag) {
                if !conn.io.has_late || in_order {
                    return;
                }
                // What was sent late, or again, stands behind it.
                at += 1;
                continue;
            }
            if !matches!(write.stage, Stage::Done | Stage::Failed) {
                let text = format!("peer ack of a write at sector {} in flight", write.sector);
                self.protocol_error(peer, None, text);
                return;
            }
            let Some(write) = conn.io.writes.remove(at) else {
                return;
            };
            self.settle_peer_write(peer, &write, mask);
        }
    }

    /// An 8.4 peer sends no peer acks: what is written is settled, both nodes have it.
    fn settle_without_ack(&mut self, peer: NodeId) {
        let both = NodeMask::of(peer).with(self.node_id);
        loop {
            let Some(conn) = self.connections.get_mut(&peer) else {
                return;
            };
            let ended = conn
                .io
                .writes
                .front()
                .is_some_and(|w| matches!(w.stage, Stage::Done | Stage::Failed));
            let Some(write) = conn.io.writes.pop_front_if(|_| ended) else {
                return;
            };
            self.settle_peer_write(peer, &write, both);
        }
    }

    /// Who has the write is known: bits, then the extents.
    fn settle_peer_write(&mut self, peer: NodeId, write: &PeerWrite, mask: NodeMask) {
        let (volume, sector, size) = (write.volume, write.sector, write.size_bytes);
        let serial = self.al_serial(volume);
        if write.recopied == Some(serial) && write.stage == Stage::Failed {
            if let Some(serial) = write.al {
                self.al_put(volume, sector, size, serial);
            }
            return;
        }
        let failed = write.stage == Stage::Failed && !planted!(self, NegAckIgnored);
        let clears_all = planted!(self, PeerAckClearsAll);
        let clears_later = clears_all || planted!(self, AckClearsLaterMark);
        if let Some(io) = self.disk_io(volume) {
            let sender = io.slot_mask(NodeMask::of(peer));
            let in_sync = if failed { 0 } else { io.slot_mask(mask) };
            for slot in 0..io.bitmap.shape().slots() {
                if sender >> slot & 1 == 1 && !failed {
                    continue;
                }
                if in_sync >> slot & 1 == 1 || clears_all {
                    if !write.overtaken || clears_later {
                        io.bitmap.clear_range(slot, sector, size);
                    }
                } else {
                    io.mark(slot, sector, size);
                }
            }
        }
        let have = match failed {
            true => NodeMask::EMPTY,
            false => mask.with(peer),
        };
        self.copies_differ(volume, have.complement(), sector, size);
        if !failed {
            self.note_late_marks(volume, peer, mask, (sector, size));
        }
        self.forward_marks(volume, peer, mask, sector, size);
        let kept = planted!(self, ExtentNeverLetGo) && write.kind == RequestKind::Discard;
        if let Some(serial) = write.al.filter(|_| !kept) {
            self.al_put(volume, sector, size, serial);
        }
    }

    /// Newer data have come for a range: what an earlier Primary still has to say of its last writes
    /// there clears no mark any more. `except`: who wrote them, in the order of its own acks.
    pub(crate) fn overtake_peer_writes(
        &mut self,
        volume: VolumeNr,
        sector: Sector,
        size_bytes: u32,
        except: Option<NodeId>,
    ) {
        let end = sector.end_of(size_bytes);
        let careless = planted!(self, OvertakenWritesCount);
        for conn in self.connections.values_mut() {
            let counts = Some(conn.peer) == except;
            for write in conn.io.writes.iter_mut().filter(|w| w.volume == volume) {
                write.overtaken |= (!counts || write.followed_by_marks)
                    && !careless
                    && write.sector < end
                    && sector < write.sector.end_of(write.size_bytes);
            }
        }
    }

    /// Tells nodes that sync from this one that they miss a range.
    pub(crate) fn forward_marks(
        &mut self,
        volume: VolumeNr,
        except: NodeId,
        have: NodeMask,
        sector: Sector,
        size_bytes: u32,
    ) {
        for other in self.established() {
            if planted!(self, MarksNotForwarded) {
                continue;
            }
            let repl = self.state.peer_device(volume, other).repl;
            let source = repl.is_sync_source() || repl == ReplState::WfBitmapS;
            if other != except && source && !have.contains(other) {
                let desc = BlockDesc { sector, size_bytes };
                self.send(other, Stream::Data, volume, Packet::OutOfSync(desc));
            }
        }
    }

    /// A resync with a third node starts: what is not known to be everywhere is marked, because
    /// the bitmap that is about to be sent has to contain it (semantics.md, 18.4).
    pub(crate) fn apply_unacked(&mut self, volume: VolumeNr) {
        let peers: Vec<NodeId> = self.connections.keys().copied().collect();
        for peer in peers {
            let Some(conn) = self.connections.get(&peer) else {
                continue;
            };
            let ranges: Vec<(Sector, u32)> = conn
                .io
                .writes
                .iter()
                .filter(|w| w.volume == volume && !planted!(self, UnackedNotApplied))
                .map(|w| (w.sector, w.size_bytes))
                .collect();
            for (sector, size) in ranges {
                self.set_out_of_sync(volume, sector, size, NodeMask::of(peer));
            }
        }
    }

    /// Received writes of this volume are not settled.
    pub(crate) fn peer_writes_in_flight(&self, volume: VolumeNr) -> bool {
        self.connections
            .values()
            .any(|c| c.io.writes.iter().any(|w| w.volume == volume))
    }

    // A lost connection.

    /// The link is gone: what it had received is written to the end, then `connection_drained`.
    pub(crate) fn drain_connection(&mut self, peer: NodeId) {
        self.conflicts_end(peer);
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            self.target_link_lost(volume, peer);
            self.source_link_lost(volume, peer);
            self.verify_left(volume, peer);
            if let Some(io) = self.peer_io(volume, peer) {
                io.bitmap_in = 0;
                io.acked_in_exchange.clear();
                io.late_marks = LateMarks::default();
                io.bitmap_received = false;
            }
        }
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        conn.io.draining = true;
        conn.io.flushing = None;
        conn.io.first_epoch += conn.io.epochs.len() as u64;
        conn.io.epochs.clear();
        self.dagtag_lost(peer);
        self.drain_writes(peer);
    }

    /// Settles the finished writes of a lost connection; says so when none is left.
    fn drain_writes(&mut self, peer: NodeId) {
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            // Metadata gate acks only, and nobody waits for those any more.
            let Some(device) = self.devices.get_mut(&volume) else {
                continue;
            };
            device.io.gated_acks.retain(|(node, _)| *node != peer);
        }
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let mut settled = Vec::new();
        let mut left = false;
        for write in &mut conn.io.writes {
            if write.stage == Stage::Active {
                left = true;
            } else if let Some(serial) = write.al.take() {
                settled.push((write.volume, write.sector, write.size_bytes, serial));
            }
        }
        for (volume, sector, size, serial) in settled {
            // Everybody but the lost node may miss it.
            if !planted!(self, DrainForgetsThirdNodes) {
                self.set_out_of_sync(volume, sector, size, NodeMask::of(peer));
            }
            self.forward_marks(volume, peer, NodeMask::EMPTY, sector, size);
            self.al_put(volume, sector, size, serial);
        }
        if left && !planted!(self, DrainWaitsForNothing) {
            return;
        }
        self.drained(peer);
    }

    /// Answers to what a lost connection has left, which nobody gets, are not counted in the next one.
    pub(crate) fn numbers_begin_anew(&mut self, peer: NodeId) {
        let volumes = self.devices.values_mut();
        for pd in volumes.filter_map(|device| device.peers.get_mut(&peer)) {
            pd.io.seq = 0;
            pd.io.peer_seq = 0;
        }
    }

    /// Says `connection_drained` once nothing of the lost connection is in flight.
    pub(crate) fn drained(&mut self, peer: NodeId) {
        let busy = self
            .devices
            .values()
            .any(|d| d.peers.get(&peer).is_some_and(|p| p.io.target.is_some()));
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let writes = conn.io.writes.iter().any(|w| w.stage == Stage::Active)
            && !planted!(self, DrainWaitsForNothing);
        if !conn.io.draining || busy || writes {
            return;
        }
        conn.io.draining = false;
        let writes = core::mem::take(&mut conn.io.writes);
        self.keep_lost_epochs(&writes);
        self.connection_drained(peer);
        self.settle_flush_requests();
    }

    // Marks and their opposite.

    /// `P_OUT_OF_SYNC`: the sender has something newer here.
    pub(crate) fn peer_out_of_sync(&mut self, peer: NodeId, volume: VolumeNr, desc: &BlockDesc) {
        if !self.is_within(volume, desc.sector, desc.size_bytes, DISCARD_LEN_MAX) {
            if self.sizes_differ(peer, volume) {
                return;
            }
            let text = format!(
                "mark of {} bytes at sector {}",
                desc.size_bytes, desc.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        }
        // What the sender's application writes there makes way for it here, too.
        if let Some(device) = self.devices.get_mut(&volume) {
            device.io.told_sectors += u64::from(desc.size_bytes) / Sector::SIZE;
        }
        // A write received before and still in flight is older than the mark.
        let (start, end) = (desc.sector, desc.sector.end_of(desc.size_bytes));
        if let Some(conn) = self.connections.get_mut(&peer) {
            for write in conn.io.writes.iter_mut().filter(|w| w.volume == volume) {
                if write.sector < end && start < write.sector.end_of(write.size_bytes) {
                    write.flags.remove(DataFlags::MAY_SET_IN_SYNC);
                }
            }
        }
        // Nor will an ack of the sender follow for what it has now: this node never gets it as a write.
        self.overtake_peer_writes(volume, desc.sector, desc.size_bytes, None);
        self.target_marked_again(volume, peer, desc.sector, desc.size_bytes);
        if planted!(self, OutOfSyncNotMarked) {
            return;
        }
        let before = self.out_of_sync_blocks(volume, peer);
        let (sector, size_bytes) = self.asked_with(volume, peer, desc.sector, desc.size_bytes);
        self.mark_towards(volume, peer, sector, size_bytes);
        if self.out_of_sync_blocks(volume, peer) > before {
            self.hold_for_new_marks(volume, peer);
        }
        self.target_kick(volume, peer);
    }
}
