//! Requests of front ends: admission, reads with their retries, flushes.

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::{BlockAck, BlockId, BlockRequest, Data};
use lockstep_format::wire::{
    BIO_LEN_MAX, BIO_LEN_MAX_P80, DISCARD_LEN_MAX, DiskState, Packet, ReplState, Role,
};

use super::balance::ReadPath;
use super::disk::FlushWaiter;
use super::slab::Key;
use super::write::{AppRequest, Local};
use super::{DataOp, DiskFault, Owner, Serving};
use crate::event::{
    DiskError, DiskOp, Output, Payload, Request, RequestError, RequestKind, Stream,
};
use crate::interval::Origin;
use crate::options::{OnLoss, Protocol};
use crate::resource::Resource;

impl Resource {
    /// A request of a front end: refused, admitted, or held until it may be.
    pub(crate) fn front_request(&mut self, request: Request) {
        if let Err(error) = self.check_request(&request) {
            self.complete(request.id, Err(error));
            return;
        }
        let durable = request.kind == RequestKind::Write { fua: true };
        let special = request.len > BIO_LEN_MAX_P80 || durable;
        if special && self.goes_in_pieces(&request) {
            return;
        }
        self.take_request(request);
    }

    /// A checked request, or a piece of one.
    pub(super) fn take_request(&mut self, request: Request) {
        let io = &self.io;
        let full = io.requests.len() >= self.options.nr_requests as usize;
        let volume = request.volume;
        if request.kind == RequestKind::Flush && self.flush_is_void() {
            // A reader has written nothing.
            self.complete(request.id, Ok(()));
        } else if self.io_fails(volume) {
            self.complete(request.id, Err(RequestError::Io));
        } else if full
            || self.is_behind_held(request.kind) && !planted!(self, HeldOvertaken)
            || self.request_waits(volume, request.kind)
        {
            self.io.held.push_back(request);
            self.want_held_uuids();
        } else {
            self.admit(&request);
        }
    }

    /// Requests are admitted in order, but for reads that go on while writes wait for a kernel's demotion.
    fn is_behind_held(&self, kind: RequestKind) -> bool {
        let passes = kind == RequestKind::Read && self.reads_beside_primary();
        !self.io.held.is_empty() && !passes
    }

    /// What no waiting can heal.
    fn check_request(&self, request: &Request) -> Result<(), RequestError> {
        let device = self
            .devices
            .get(&request.volume)
            .ok_or(RequestError::NoMedium)?;
        if self.state.fail_io {
            // Whoever had it open at a forced demotion is told that his data did not arrive.
            return Err(RequestError::Io);
        }
        let writes = !matches!(request.kind, RequestKind::Read | RequestKind::Flush);
        if self.state.role != Role::Primary
            && !self.waits_for_turn()
            && (writes || !self.secondary_reads(request.volume))
        {
            return Err(if writes {
                RequestError::ReadOnly
            } else {
                RequestError::NoMedium
            });
        }
        let (needs_payload, most) = match request.kind {
            RequestKind::Read | RequestKind::Write { .. } => (true, BIO_LEN_MAX),
            RequestKind::Discard | RequestKind::Zeroes { .. } => {
                if self.lacks_discards() {
                    return Err(RequestError::Unsupported);
                }
                (false, DISCARD_LEN_MAX)
            }
            RequestKind::Flush => return Ok(()),
        };
        let fits = request.len > 0
            && request.len <= most
            && u64::from(request.len).is_multiple_of(Sector::SIZE)
            && request.sector.end_of(request.len).0 <= device.size_sectors
            && request.sector.0 < device.size_sectors;
        let has_payload = request.payload.is_some_and(|p| p.len == request.len);
        if !fits || (needs_payload && !has_payload) {
            return Err(RequestError::Invalid);
        }
        Ok(())
    }

    /// All IO of a volume fails (semantics.md, 3.6).
    pub(crate) fn io_fails(&self, volume: VolumeNr) -> bool {
        let Some(device) = self.state.devices.get(&volume) else {
            return true;
        };
        self.state.fail_io
            || (self.options.on_no_quorum == OnLoss::IoError
                && !device.have_quorum
                && !planted!(self, NoQuorumNoError))
            || (self.options.on_no_data_accessible == OnLoss::IoError
                && !device.data_accessible()
                && !device.unstable()
                && (!self.waits_for_turn() || self.settled()))
    }

    /// No such request is admitted now (semantics.md, 3.6).
    fn request_waits(&self, volume: VolumeNr, kind: RequestKind) -> bool {
        self.turn_ends() || self.begun_waits(volume, kind)
    }

    /// No such request goes on now, whether it has been admitted or not.
    fn begun_waits(&self, volume: VolumeNr, kind: RequestKind) -> bool {
        let waits_for_turn = match kind {
            RequestKind::Read => self.waits_for_turn() && !self.reads_beside_primary(),
            RequestKind::Flush
            | RequestKind::Write { .. }
            | RequestKind::Discard
            | RequestKind::Zeroes { .. } => self.waits_for_turn(),
        };
        waits_for_turn || self.uuid_holds(volume, kind) || self.all_wait(volume)
    }

    /// No write goes on now, whether it has been admitted or not.
    pub(crate) fn begun_wait(&self, volume: VolumeNr) -> bool {
        self.waits_for_turn() || self.uuid_hold(volume) || self.all_wait(volume)
    }

    /// A generation that is due has to be durable before such a request. A flush changes nothing and tells nothing:
    /// it waits only where a peer that is lost may lack what it makes durable.
    fn uuid_holds(&self, volume: VolumeNr, kind: RequestKind) -> bool {
        let settled = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.new_uuid_pending && !d.new_uuid_for_flush);
        let settled = settled || planted!(self, FlushOvertakesLoss);
        let passes = kind == RequestKind::Flush && settled && self.new_uuid.is_none();
        !passes && self.uuid_hold(volume)
    }

    fn all_wait(&self, volume: VolumeNr) -> bool {
        // What the metadata say of a promotion has to be durable before its first write.
        self.state.suspended() && !planted!(self, FrozenWritesGoOn)
            || !self.meta_is_durable(volume)
            || self.is_demoting() && !planted!(self, WritesDuringDemotion)
            || self.waits_for_detach(volume)
            || self.waits_for_old_target(volume)
            || self.awaits_first_state(volume)
            || self
                .state
                .devices
                .get(&volume)
                .is_some_and(|d| d.unstable() || d.peer_decides())
    }

    /// No write is completed now.
    pub(crate) fn completions_wait(&self, volume: VolumeNr) -> bool {
        self.state.suspended() && !planted!(self, FrozenWritesGoOn) || self.uuid_hold(volume)
    }

    /// A request failed on this disk, which stays (`pass_on`), and the metadata do not say yet that it
    /// is not whole: after a power cut it would count as if the request had succeeded.
    pub(super) fn failure_is_unnoted(&self, volume: VolumeNr, local: Local) -> bool {
        local == Local::Failed
            && !planted!(self, FailureUnnoted)
            && self.state.disk(volume) == DiskState::Inconsistent
            && !self.meta_is_durable(volume)
    }

    /// Somebody waits for a new current UUID that is due: it is written now.
    pub(crate) fn want_held_uuids(&mut self) {
        if self.state.suspended() && !self.state.susp_uuid {
            return;
        }
        let pending = self.is_new_uuid_due();
        let waits_for_it = |key: &Key| {
            let req = self.io.requests.get(*key);
            req.is_some_and(|req| self.uuid_holds(req.volume, req.kind))
        };
        let holds = |r: &Request| self.uuid_holds(r.volume, r.kind);
        let waits = self.io.held.iter().any(holds)
            || self.io.parked > 0
            || !self.io.held_completions.is_empty()
            || !self.io.postponed.is_empty()
            || self.io.flushes.iter().any(waits_for_it);
        if pending && waits {
            self.want_new_uuid_now();
        }
    }

    /// What keeps requests waiting may have changed.
    pub(crate) fn admission_changed(&mut self) {
        if planted!(self, HeldForgottenByDemotion)
            && self.state.role == lockstep_format::wire::Role::Secondary
        {
            return;
        }
        self.io.parked_due |= self.io.parked > 0;
        self.want_held_uuids();
    }

    /// Admits what may be admitted, in order.
    pub(crate) fn admit_held(&mut self) {
        if !self.io.postponed.is_empty() {
            let waits = self.io.postponed.iter().all(|key| {
                self.io.requests.get(*key).is_some_and(|req| {
                    let no_data = !self.io_fails(req.volume)
                        && self
                            .state
                            .devices
                            .get(&req.volume)
                            .is_some_and(|d| !d.data_accessible());
                    (self.begun_waits(req.volume, req.kind) && !self.io_fails(req.volume))
                        || no_data
                })
            });
            if !waits {
                self.retry_postponed();
            }
        }
        let mut kept = alloc::collections::VecDeque::new();
        while let Some(request) = self.io.held.pop_front() {
            let volume = request.volume;
            let full = self.io.requests.len() >= self.options.nr_requests as usize;
            if let Err(error) = self.check_request(&request) {
                self.complete(request.id, Err(error));
            } else if self.io_fails(volume) {
                self.complete(request.id, Err(RequestError::Io));
            } else if full || self.request_waits(volume, request.kind) {
                let all = full || self.state.suspended();
                kept.push_back(request);
                if all {
                    break;
                }
            } else {
                self.admit(&request);
            }
        }
        kept.append(&mut self.io.held);
        self.io.held = kept;
    }

    /// A suspension begins. Writes that wait for one whose completion it holds would keep resync
    /// reads waiting, and the resync may be what the suspension waits for: they start anew at its
    /// end.
    pub(crate) fn postpone_waiting(&mut self) {
        if planted!(self, SuspensionHoldsRanges) {
            return;
        }
        for key in self.io.requests.keys() {
            let waits = self.io.requests.get(key).is_some_and(|req| {
                let device = self.devices.get(&req.volume);
                !req.submitted
                    && !matches!(req.kind, RequestKind::Read | RequestKind::Flush)
                    && req
                        .range
                        .is_some_and(|range| device.is_some_and(|d| d.io.ranges.is_waiting(range)))
            });
            if waits {
                self.drop_range(key);
                self.io.postponed.push_back(key);
            }
        }
    }

    fn admit(&mut self, request: &Request) {
        let key = self.io.requests.insert(AppRequest::new(request));
        if let Some(device) = self.devices.get_mut(&request.volume) {
            device.io.upper_pending += 1;
        }
        match request.kind {
            RequestKind::Read => self.start_read(key),
            RequestKind::Flush => self.start_flush_request(key),
            RequestKind::Write { .. } | RequestKind::Discard | RequestKind::Zeroes { .. } => {
                self.start_write(key);
            }
        }
    }

    pub(crate) fn request_ended(&mut self, volume: VolumeNr) {
        if let Some(device) = self.devices.get_mut(&volume) {
            device.io.upper_pending = device.io.upper_pending.saturating_sub(1);
        }
    }

    // Reads (semantics.md, 16).

    fn start_read(&mut self, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        let (volume, sector, size, tried) = (req.volume, req.sector, req.size_bytes, req.sent);
        let mut local = req.local != Local::Failed && self.reads_locally(volume, sector, size);
        let balances = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.balances_reads());
        let peer = if local && !balances {
            None
        } else {
            self.read_peer(volume, tried)
        };
        if let Some(peer) = peer {
            // The turn passes on even if the read stays here.
            if let Some(device) = self.devices.get_mut(&volume) {
                device.io.last_read_peer = Some(peer);
            }
            local = local && !self.reads_at_peer(volume, peer, sector);
        }
        if local {
            // Just promoted: what the last Primary wrote may still be on its way to the disk here,
            // and with protocol A and B it is acknowledged.
            let early = planted!(self, LocalReadTooEarly);
            let waits = self.peer_writes_in_flight(volume) || self.was_read_at_peer(volume);
            if (balances || waits) && !early {
                self.queue_local_read(key);
            } else {
                self.local_read(key);
            }
            return;
        }
        if let Some(peer) = peer {
            let now = self.now;
            let depth = self.devices.get_mut(&volume).map_or(0, |d| {
                d.io.read_at_peer = true;
                d.io.read_paths.entry(peer).or_default().issue()
            });
            if let Some(req) = self.io.requests.get_mut(key) {
                req.sent.insert(peer);
                req.pending = NodeMask::of(peer);
                req.submitted_at = now;
                req.depth = depth;
            }
            let request = BlockRequest {
                sector,
                block_id: BlockId(key.0),
                size_bytes: size,
            };
            self.send(peer, Stream::Data, volume, Packet::DataRequest(request));
            return;
        }
        let Some(req) = self.io.requests.remove(key) else {
            return;
        };
        self.request_ended(volume);
        if self.options.on_no_data_accessible == OnLoss::SuspendIo
            && !self
                .state
                .devices
                .get(&volume)
                .is_some_and(|d| d.data_accessible())
        {
            self.io.held.push_back(Request {
                id: req.id,
                volume,
                kind: req.kind,
                sector,
                len: size,
                payload: req.payload,
            });
        } else {
            self.complete(req.id, Err(RequestError::Io));
        }
    }

    /// The disk became UpToDate a moment ago: writes that are on their way to it may have been read
    /// already, where a peer has them. Local reads queue until no read of a peer and no range is left.
    fn was_read_at_peer(&mut self, volume: VolumeNr) -> bool {
        let hasty = planted!(self, ReadsStayAtPeers);
        let Some(device) = self.devices.get_mut(&volume) else {
            return false;
        };
        let io = &mut device.io;
        io.read_at_peer = io.read_at_peer
            && !hasty
            && !(io.ranges.is_empty() && io.read_paths.values().all(ReadPath::is_idle));
        io.read_at_peer
    }

    /// A read that stays here waits for writes in flight that a peer may have shown to an earlier
    /// read: it must not find what was there before them.
    fn queue_local_read(&mut self, key: Key) {
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        let Some(device) = self.devices.get_mut(&req.volume) else {
            return;
        };
        let (range, clear) = device.io.ranges.insert(
            Origin::LocalRead,
            req.sector,
            req.size_bytes,
            Owner::Read(key),
        );
        req.range = Some(range);
        if clear {
            self.local_read(key);
        }
    }

    /// Reads from the local disk, if that is still possible.
    pub(crate) fn local_read(&mut self, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        let (volume, sector, size, payload) = (req.volume, req.sector, req.size_bytes, req.payload);
        let Some(payload) = payload else { return };
        if !self.reads_locally(volume, sector, size) {
            self.read_range_over(key);
            self.start_read(key);
            return;
        }
        let now = self.now;
        let depth = self
            .devices
            .get_mut(&volume)
            .filter(|d| d.balances_reads())
            .map_or(0, |d| d.io.local_reads.issue());
        if let Some(req) = self.io.requests.get_mut(key) {
            req.local = Local::Pending;
            req.submitted_at = now;
            req.depth = depth;
        }
        let op = DiskOp::Read { sector, payload };
        self.disk_op(volume, op, DataOp::AppRead(key));
    }

    fn read_range_over(&mut self, key: Key) {
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        let volume = req.volume;
        if let (Some(range), Some(device)) = (req.range.take(), self.devices.get_mut(&volume)) {
            let mut ready = Vec::new();
            device.io.ranges.remove(range, &mut ready);
            self.wake_ranges(volume, ready);
        }
    }

    fn reads_locally(&self, volume: VolumeNr, sector: Sector, size_bytes: u32) -> bool {
        let Some(disk) = self.devices.get(&volume).and_then(|d| d.attached()) else {
            return false;
        };
        match self.state.disk(volume) {
            DiskState::UpToDate => true,
            DiskState::Inconsistent if planted!(self, ReadFromInconsistent) => true,
            DiskState::Inconsistent if self.others_may_write() => false,
            DiskState::Inconsistent => !disk.io.bitmap.any_set_in_all(sector, size_bytes),
            _ => false,
        }
    }

    /// The next peer to read from: the one that this disk is copied from, which decides what the blocks
    /// have in the end (other UpToDate disks may still differ from it in what a lost Primary left), then
    /// by protocol, then in turn.
    fn read_peer(&self, volume: VolumeNr, tried: NodeMask) -> Option<NodeId> {
        let device = self.devices.get(&volume)?;
        let last = device.io.last_read_peer;
        let mut best: Option<(u8, u8, bool, NodeId)> = None;
        for (peer, conn) in &self.connections {
            let p = self.state.peer_device(volume, *peer);
            let usable = (p.disk == DiskState::UpToDate
                || planted!(self, ReadFromAnyPeer) && p.disk == DiskState::Inconsistent
                || planted!(self, ReadFromOutdated) && p.disk == DiskState::Outdated)
                && p.repl > ReplState::Off
                && !matches!(p.repl, ReplState::Ahead | ReplState::Behind)
                && conn.net.allow_remote_read
                && (!tried.contains(*peer) || planted!(self, TriedPeersAgain));
            if !usable {
                continue;
            }
            let source = match p.repl {
                ReplState::SyncTarget if planted!(self, ReadsAnyUpToDate) => 3,
                ReplState::SyncTarget => 0,
                ReplState::PausedSyncT => 1,
                _ => 2,
            };
            let class = match conn.net.protocol {
                Protocol::C => 0,
                Protocol::B => 1,
                Protocol::A => 2,
            };
            let turn = last.is_some_and(|l| *peer <= l);
            let candidate = (source, class, turn, *peer);
            if best.is_none_or(|b| candidate < b) {
                best = Some(candidate);
            }
        }
        best.map(|(.., peer)| peer)
    }

    pub(crate) fn app_read_done(&mut self, key: Key, result: Result<(), DiskError>) {
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        let (volume, sector, size) = (req.volume, req.sector, req.size_bytes);
        let (issued, depth, now) = (req.submitted_at, req.depth, self.now);
        self.read_range_over(key);
        if depth > 0
            && let Some(device) = self.devices.get_mut(&volume)
        {
            device.io.local_reads.answered(issued, depth, now);
        }
        if result.is_ok() || planted!(self, FailedReadCounts) {
            if let Some(device) = self.devices.get_mut(&volume) {
                device.io.read_sectors += u64::from(size) / Sector::SIZE;
            }
            self.finish_read(key);
            return;
        }
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        req.local = Local::Failed;
        if planted!(self, ReadErrorUnmarked) {
            self.disk_failed(volume, DiskFault::Data);
        } else {
            self.unreadable(volume, sector, size);
        }
        self.start_read(key);
    }

    fn finish_read(&mut self, key: Key) {
        let Some(req) = self.io.requests.remove(key) else {
            return;
        };
        self.request_ended(req.volume);
        self.complete(req.id, Ok(()));
    }

    pub(crate) fn read_reply(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        data: &Data,
        payload: Option<Payload>,
    ) {
        let key = Key(data.block_id.0);
        let wanted = self.io.requests.get(key).filter(|req| {
            req.kind == RequestKind::Read
                && req.volume == volume
                && req.sector == data.sector
                && req.size_bytes == data.payload_len
                && req.pending.contains(peer)
        });
        let timing = wanted.map(|req| (req.submitted_at, req.depth));
        let into = wanted.and_then(|req| req.payload);
        let now = self.now;
        let path = self.read_path(volume, peer);
        if let (Some((issued, depth)), Some(path)) = (timing, path) {
            path.answered(issued, depth, now);
        }
        match (into, payload) {
            (Some(to), Some(from)) => {
                self.output(Output::Copy { from, to });
                self.release(from.buf);
                self.finish_read(key);
            }
            (_, payload) => {
                if let Some(payload) = payload {
                    self.release(payload.buf);
                }
                let text = format!("reply to an unknown read at sector {}", data.sector);
                self.protocol_error(peer, Some(volume), text);
            }
        }
    }

    pub(crate) fn read_refused(&mut self, peer: NodeId, volume: VolumeNr, ack: &BlockAck) {
        let key = Key(ack.block_id.0);
        let Some(req) = self.io.requests.get_mut(key) else {
            return;
        };
        if req.kind == RequestKind::Read && req.volume == volume && req.pending.contains(peer) {
            req.pending = NodeMask::EMPTY;
            if let Some(path) = self.read_path(volume, peer) {
                path.forget();
            }
            self.start_read(key);
        }
    }

    fn read_path(&mut self, volume: VolumeNr, peer: NodeId) -> Option<&mut ReadPath> {
        let device = self.devices.get_mut(&volume)?;
        device.io.read_paths.get_mut(&peer)
    }

    /// Reads that waited for a lost peer go another way.
    pub(crate) fn lose_reads(&mut self, peer: NodeId) {
        let kept = planted!(self, LostPathsKept);
        for device in self.devices.values_mut() {
            if !kept {
                device.io.read_paths.remove(&peer);
            }
        }
        for key in self.io.requests.keys() {
            let waits = self
                .io
                .requests
                .get(key)
                .is_some_and(|r| r.kind == RequestKind::Read && r.pending.contains(peer));
            if waits && !planted!(self, LostReadForgotten) {
                if let Some(req) = self.io.requests.get_mut(key) {
                    req.pending = NodeMask::EMPTY;
                }
                self.start_read(key);
            }
        }
    }

    /// A peer reads from this node.
    pub(crate) fn serve_read(&mut self, peer: NodeId, volume: VolumeNr, request: BlockRequest) {
        let link = self.link(peer);
        let fits = self.is_block_of(peer, volume, &request);
        let (Some(link), true) = (link, fits) else {
            let text = format!(
                "read of {} bytes at sector {}",
                request.size_bytes, request.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        };
        let has_disk = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.attached().is_some());
        if !self.may_serve(volume) || !has_disk {
            self.refuse_read(peer, volume, &request);
            return;
        }
        let key = self.io.serving.insert(Serving {
            peer,
            link,
            volume,
            request,
            range: None,
        });
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let (range, clear) = device.io.ranges.insert(
            Origin::RemoteRead,
            request.sector,
            request.size_bytes,
            Owner::Serve(key),
        );
        if let Some(serving) = self.io.serving.get_mut(key) {
            serving.range = Some(range);
        }
        if clear || planted!(self, ReadOvertakesWrites) {
            self.serve_start(key);
        }
    }

    fn may_serve(&self, volume: VolumeNr) -> bool {
        let disk = self.state.disk(volume);
        disk == DiskState::UpToDate
            || planted!(self, ReadFromAnyPeer) && disk == DiskState::Inconsistent
            || planted!(self, ReadFromOutdated) && disk == DiskState::Outdated
    }

    /// Everything received of the range is on disk: read.
    pub(crate) fn serve_start(&mut self, key: Key) {
        let Some(serving) = self.io.serving.get(key).copied() else {
            return;
        };
        let Serving {
            volume, request, ..
        } = serving;
        let has_disk = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.attached().is_some());
        if !self.may_serve(volume) || !has_disk {
            self.serve_over(key);
            if self.link(serving.peer) == Some(serving.link) {
                self.refuse_read(serving.peer, volume, &request);
            }
            return;
        }
        let op = DiskOp::ReadNew {
            sector: request.sector,
            len: request.size_bytes,
        };
        self.disk_op(volume, op, DataOp::Serve(key));
    }

    /// Takes a read for a peer out of the tables.
    fn serve_over(&mut self, key: Key) -> Option<Serving> {
        let serving = self.io.serving.remove(key)?;
        if let (Some(range), Some(device)) = (serving.range, self.devices.get_mut(&serving.volume))
        {
            let mut ready = Vec::new();
            device.io.ranges.remove(range, &mut ready);
            self.wake_ranges(serving.volume, ready);
        }
        Some(serving)
    }

    pub(crate) fn serve_done(&mut self, key: Key, result: Result<Option<Payload>, DiskError>) {
        let serving = self.serve_over(key);
        let payload = result.ok().flatten();
        let Some(Serving {
            peer,
            link,
            volume,
            request,
            ..
        }) = serving
        else {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            return;
        };
        let current = self.link(peer) == Some(link);
        match payload {
            Some(payload) => {
                if current {
                    let data = Data {
                        sector: request.sector,
                        block_id: request.block_id,
                        payload_len: request.size_bytes,
                        ..Data::default()
                    };
                    let packet = Packet::DataReply(data);
                    self.send_payload(peer, Stream::Data, volume, packet, Some(payload), None);
                }
                self.release(payload.buf);
            }
            None => {
                self.unreadable(volume, request.sector, request.size_bytes);
                if current {
                    self.refuse_read(peer, volume, &request);
                }
            }
        }
    }

    fn refuse_read(&mut self, peer: NodeId, volume: VolumeNr, request: &BlockRequest) {
        let seq_num = self.next_seq(volume, peer);
        let ack = BlockAck {
            sector: request.sector,
            block_id: request.block_id,
            size_bytes: request.size_bytes,
            seq_num,
        };
        self.send(peer, Stream::Control, volume, Packet::NegDreply(ack));
    }

    // Flushes.

    /// Durable here, and at every Lockstep peer of protocol C that follows (without a disk here: of
    /// whatever protocol). A kernel peer answers
    /// no flush; what it has acked before is all that can be had (semantics.md, 23.1 D6).
    fn start_flush_request(&mut self, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        let volume = req.volume;
        self.close_epoch();
        let (mut waits, mut asked) = (Vec::new(), Vec::new());
        let local = self.takes_writes(volume);
        for (peer, conn) in &self.connections {
            let p = self.state.peer_device(volume, *peer);
            let promises = conn.net.protocol == Protocol::C || !local;
            let counts = conn.is_lockstep() && promises && p.replicates();
            if !counts || planted!(self, FlushWaitsForNoPeer) {
                continue;
            }
            asked.push(*peer);
            if conn.io.sent_count > conn.io.settled_count {
                waits.push((*peer, conn.io.sent_count));
            }
        }
        if planted!(self, FlushWaitsForOnePeer) {
            waits.truncate(1);
            asked.truncate(1);
        }
        let barriers = asked
            .into_iter()
            .filter_map(|peer| Some((peer, self.flush_foreign(peer)?)))
            .collect();
        self.io.flushes.push(key);
        if let Some(req) = self.io.requests.get_mut(key) {
            req.waits = waits;
            req.barriers = barriers;
            req.local = if local { Local::Pending } else { Local::None };
        }
        if local {
            self.flush_disk(volume, FlushWaiter::App(key));
        } else {
            self.try_finish_flush(key);
        }
    }

    pub(crate) fn app_flush_done(&mut self, key: Key, result: Result<(), DiskError>) {
        if let Some(req) = self.io.requests.get_mut(key) {
            req.local = if result.is_ok() {
                Local::Ok
            } else {
                Local::Failed
            };
        }
        self.try_finish_flush(key);
    }

    /// Writes were settled at this peer, or it was lost.
    pub(crate) fn settle_flushes(&mut self, peer: NodeId) {
        let conn = self.connections.get(&peer).filter(|c| c.link.is_some());
        let settled = conn.map_or(u64::MAX, |c| c.io.settled_count);
        let unacked: Vec<u32> = conn
            .map(|c| c.io.unacked.iter().map(|(barrier, _)| *barrier).collect())
            .unwrap_or_default();
        let flushes = self.io.flushes.clone();
        for key in flushes {
            if let Some(req) = self.io.requests.get_mut(key) {
                req.waits
                    .retain(|(node, count)| *node != peer || *count > settled);
                req.barriers
                    .retain(|(node, barrier)| *node != peer || unacked.contains(barrier));
            }
            self.try_finish_flush(key);
        }
    }

    pub(crate) fn try_finish_flush(&mut self, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        if req.local == Local::Pending || !req.waits.is_empty() || !req.barriers.is_empty() {
            return;
        }
        let volume = req.volume;
        let frozen = self.state.suspended() && !planted!(self, FrozenWritesGoOn);
        let waits = (frozen || self.uuid_holds(volume, req.kind))
            && !planted!(self, FlushEndsFrozen)
            || self.failure_is_unnoted(volume, req.local);
        if waits && !self.io_fails(volume) {
            return;
        }
        let peer_has_data = self.state.devices.get(&volume).is_some_and(|d| {
            d.peers
                .values()
                .any(|p| p.disk == DiskState::UpToDate && p.repl > ReplState::Off)
        });
        // Where it would have to wait and fails instead (io-error), what a lost peer did not make durable
        // may be lost: this disk alone can be the target of that peer.
        let hides = planted!(self, FlushFailureHidden);
        let ok = !waits && (req.local == Local::Ok || peer_has_data || hides);
        let Some(req) = self.io.requests.remove(key) else {
            return;
        };
        self.io.flushes.retain(|k| *k != key);
        self.request_ended(volume);
        self.complete(req.id, if ok { Ok(()) } else { Err(RequestError::Io) });
    }
}
