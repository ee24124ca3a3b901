//! Online verify (semantics.md, 20; wire.md, 7.7): digests of each block are compared.
//!
//! The driver (VerifyS) asks block by block; the peer (VerifyT) answers with the digest of what it
//! has. Dagtags make both look at the same writes of a third node, and the streams order their
//! own. A block that a write overlaps at either node from the request to the comparison is
//! skipped, never waited for. What differs is marked at both nodes and stays marked until the next
//! resync between them.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::{
    BlockAck, BlockId, BlockRequest, DigestDagtagRequest, DigestRequest, OvResultId,
};
use lockstep_format::wire::{Digest, DiskState, OvResultCode};
use lockstep_format::wire::{Packet, ReplState};

use super::dagtag::Awaited;
use super::slab::{Key, Slab};
use super::{DataOp, DiskFault};
use crate::event::{DiskError, DiskOp, Output, Payload, Stream};
use crate::interval::WatchId;
use crate::rate::{Pace, STEP};
use crate::report::{Level, VerifyReport};
use crate::resource::{Pending, Resource};
use crate::state::ReplSets;
use crate::time::Instant;
use crate::timers::Timer;
use crate::transition::Change;

/// Most blocks of one peer device that are looked at here for a driver.
const MOST_BLOCKS: usize = 8192;

/// Id of an `P_OV_RESULT` that says that the data differ.
pub(crate) const DIFFERENT_ID: BlockId = BlockId(4712);

/// Id of the result in `P_OV_RESULT` of protocols below 122 (wire.md, 6.2).
fn legacy_result_id(result: OvResultCode) -> BlockId {
    BlockId(match result {
        OvResultCode::Skip => 4710,
        OvResultCode::InSync => 4711,
        OvResultCode::OutOfSync => return DIFFERENT_ID,
    })
}

/// An online verify with one peer, in either role.
#[derive(Debug, Default)]
pub(crate) struct Verify {
    blocks: Slab<Block>,
    by_sector: BTreeMap<Sector, Key>,
    /// This node drives.
    driver: Option<Driver>,
    /// This node answers: behind the last block that was asked for.
    position: u64,
    /// What the next start verifies, from a command or from a verify that was cut short.
    next: Span,
    /// Blocks were found different since the last resync with this peer.
    pub(crate) found: bool,
    listed: Listed,
}

/// What is told of the differences one by one.
#[derive(Debug, Default)]
struct Listed {
    /// Adjacent blocks that are told of together, when another one follows.
    run: Option<(Sector, u64)>,
    /// Runs that were told of since this verify began.
    runs: u32,
}

/// Runs that one verify tells of; a disk that differs everywhere does not fill the log.
const LISTED_MAX: u32 = 1000;

/// Sectors to verify; the end of the volume if there is no stop.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    start: u64,
    stop: Option<u64>,
}

impl Span {
    /// First sector and end on a volume of this size. Where one goes on that was cut short, but is
    /// told to stop before, the part before is meant.
    fn within(self, size: u64) -> (u64, u64) {
        let end = self.stop.unwrap_or(size).min(size);
        let start = if self.start < end { self.start } else { 0 };
        (start, end)
    }
}

#[derive(Debug)]
struct Driver {
    start: u64,
    end: u64,
    /// A stop sector was given.
    stops: bool,
    cursor: u64,
    done_sectors: u64,
    skipped_sectors: u64,
    different_sectors: u64,
    pace: Pace,
}

#[derive(Debug)]
struct Block {
    sector: Sector,
    size_bytes: u32,
    /// Id of the driver's request.
    id: BlockId,
    /// Write of a third node that has to be here before the block is read.
    after: Option<Awaited>,
    watch: WatchId,
    stage: Stage,
    /// Digest of the peer's block.
    theirs: Option<Digest>,
    payload: Option<Payload>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The driver's request is on its way.
    Asked,
    /// Waits for `after`.
    Waiting,
    /// Is read, or its digest computed.
    Reading,
}

/// Whether a block may be read.
enum Ready {
    Now,
    After(NodeId, Dagtag),
    Never,
}

impl Verify {
    /// Blocks under way.
    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.blocks.len() == 0
    }
}

impl Resource {
    fn verify(&mut self, volume: VolumeNr, peer: NodeId) -> Option<&mut Verify> {
        Some(&mut self.peer_io(volume, peer)?.verify)
    }

    /// A verify has found differences that no resync with this peer has settled since.
    pub(crate) fn verify_found(&self, peer: NodeId) -> bool {
        self.devices
            .values()
            .any(|d| d.peers.get(&peer).is_some_and(|pd| pd.io.verify.found))
    }

    /// The algorithm that both nodes use.
    fn verify_alg(&self, peer: NodeId) -> Option<alloc::string::String> {
        let alg = self.connections.get(&peer)?.net.verify_alg.clone()?;
        (!alg.is_empty()).then_some(alg)
    }

    /// `verify`: remembers what to verify. The state change starts it.
    pub(crate) fn verify_wanted(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        start: Option<u64>,
        stop: Option<u64>,
    ) {
        let block = self.common_block_sectors(volume, peer);
        let ignores = planted!(self, VerifyStopIgnored);
        let Some(verify) = self.verify(volume, peer) else {
            return;
        };
        if let Some(start) = start {
            verify.next.start = start / block * block;
        }
        verify.next.stop = stop.filter(|_| !ignores);
    }

    /// VerifyS or VerifyT begins.
    pub(crate) fn verify_entered(&mut self, volume: VolumeNr, peer: NodeId, drives: bool) {
        let now = self.now;
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        io.resync_started = now;
        let verify = &mut io.verify;
        verify.position = 0;
        if !drives {
            return;
        }
        let (start, end) = verify.next.within(size);
        verify.driver = Some(Driver {
            start,
            end,
            stops: end < size,
            cursor: start,
            done_sectors: 0,
            skipped_sectors: 0,
            different_sectors: 0,
            pace: Pace::new(now),
        });
        self.timers.set(Timer::VerifyStep(volume, peer), now);
    }

    /// The state says that no verify runs any more.
    pub(crate) fn verify_left(&mut self, volume: VolumeNr, peer: NodeId) {
        self.timers.clear(Timer::VerifyStep(volume, peer));
        let skips = planted!(self, VerifyGoesOnBehind);
        let Some(verify) = self.verify(volume, peer) else {
            return;
        };
        verify.position = 0;
        if let Some(driver) = verify.driver.take() {
            // Cut short: the next one goes on with the first block that was not compared.
            let first = verify
                .by_sector
                .keys()
                .next()
                .filter(|_| !skips)
                .map(|s| s.0);
            verify.next.start = first.unwrap_or(driver.cursor).min(driver.cursor);
            if verify.next.start >= driver.end {
                verify.next = Span::default();
            }
        }
        for key in self
            .verify(volume, peer)
            .map(|v| v.blocks.keys())
            .unwrap_or_default()
        {
            self.verify_forget(volume, peer, key);
        }
        self.verify_list(volume, peer, None);
        // What was found is on disk soon after the log has told it.
        if self.verify(volume, peer).is_some_and(|v| v.found) {
            let now = self.now;
            self.timers.set_earliest(Timer::BitmapWrite(volume), now);
        }
    }

    /// `Timer::VerifyStep`.
    pub(crate) fn verify_step_timer(&mut self, volume: VolumeNr, peer: NodeId) {
        if self.state.peer_device(volume, peer).repl != ReplState::VerifyS {
            return;
        }
        let at = self.now + STEP;
        self.timers.set(Timer::VerifyStep(volume, peer), at);
        self.verify_grant(volume, peer);
        self.verify_step(volume, peer);
    }

    fn verify_grant(&mut self, volume: VolumeNr, peer: NodeId) {
        let now = self.now;
        let load = self.resync_load(volume, peer);
        let Some(pd) = self
            .devices
            .get_mut(&volume)
            .and_then(|d| d.peers.get_mut(&peer))
        else {
            return;
        };
        if let Some(driver) = pd.io.verify.driver.as_mut() {
            driver.pace.grant(now, &pd.options, load);
        }
    }

    /// Asks for as many blocks as granted; notices the end.
    fn verify_step(&mut self, volume: VolumeNr, peer: NodeId) {
        loop {
            if self.state.peer_device(volume, peer).repl != ReplState::VerifyS {
                return;
            }
            if self.disk_io(volume).is_none() {
                return;
            }
            let block = self.common_block_sectors(volume, peer);
            let left_out = if planted!(self, VerifyStopsEarly) {
                block
            } else {
                0
            };
            let Some(verify) = self.verify(volume, peer) else {
                return;
            };
            let idle = verify.blocks.len() == 0;
            let Some(driver) = verify.driver.as_mut() else {
                return;
            };
            if driver.cursor + left_out >= driver.end {
                if idle {
                    self.verify_done(volume, peer);
                }
                return;
            }
            if driver.pace.grant_sectors == 0 {
                return;
            }
            let sector = Sector(driver.cursor);
            let sectors = block.min(driver.end - driver.cursor);
            driver.cursor += sectors;
            driver.pace.asked(sectors);
            let size_bytes = (sectors * Sector::SIZE) as u32;
            let Some(key) = self.verify_insert(volume, peer, sector, size_bytes, Stage::Asked)
            else {
                return;
            };
            let request = BlockRequest {
                sector,
                block_id: BlockId(key.0),
                size_bytes,
            };
            let packet = match self.after_primary(peer, request) {
                Some(request) => Packet::OvDagtagReq(request),
                None => Packet::OvRequest(request),
            };
            self.send(peer, Stream::Data, volume, packet);
        }
    }

    fn verify_insert(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
        size_bytes: u32,
        stage: Stage,
    ) -> Option<Key> {
        let device = self.devices.get_mut(&volume)?;
        let watch = device.io.ranges.watch(sector, size_bytes);
        let verify = &mut device.peers.get_mut(&peer)?.io.verify;
        let key = verify.blocks.insert(Block {
            sector,
            size_bytes,
            id: BlockId(0),
            after: None,
            watch,
            stage,
            theirs: None,
            payload: None,
        });
        verify.by_sector.insert(sector, key);
        Some(key)
    }

    /// Every block was compared or skipped.
    fn verify_done(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(verify) = self.verify(volume, peer) else {
            return;
        };
        verify.next = Span::default();
        let Some(driver) = verify.driver.take() else {
            return;
        };
        let different = driver.different_sectors;
        let level = if different > 0 {
            Level::Warn
        } else {
            Level::Info
        };
        let until = if driver.stops {
            " up to the stop sector"
        } else {
            ""
        };
        let text = format!(
            "online verify done{until}: {} KiB compared, {} KiB out of sync, {} KiB skipped because \
             of writes",
            (driver.done_sectors - driver.skipped_sectors) / 2,
            different / 2,
            driver.skipped_sectors / 2,
        );
        self.log(level, Some(peer), Some(volume), text);
        if different > 0 {
            self.run_handler("out-of-sync", Some(volume), Some(peer));
        }
        self.hard_change(Change::new().repl(volume, peer, ReplState::Established));
    }

    /// Whether what `after` names has come in here.
    fn verify_ready(&self, peer: NodeId, (node, dagtag): (NodeId, Dagtag)) -> Ready {
        if self.is_here_already(peer, (node, dagtag)) || planted!(self, VerifyIgnoresDagtag) {
            return Ready::Now;
        }
        match self.connections.get(&node) {
            Some(conn) if conn.link.is_some() && (conn.dagtag_fresh || node == peer) => {
                if dagtag.is_newer_than(conn.last_dagtag) {
                    Ready::After(node, dagtag)
                } else {
                    Ready::Now
                }
            }
            _ => Ready::Never,
        }
    }

    /// A driver asks for the digest of a block.
    pub(crate) fn verify_asked(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        request: BlockRequest,
        after: (NodeId, Dagtag),
    ) {
        if !self.is_block_of(peer, volume, &request) {
            let text = format!(
                "verify of {} bytes at sector {}",
                request.size_bytes, request.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        }
        let disk = self.state.disk(volume);
        let usable = disk >= DiskState::Outdated
            && disk != DiskState::DUnknown
            && self.disk_io(volume).is_some()
            && self.verify_alg(peer).is_some();
        let full = self.verify(volume, peer).is_none_or(|v| {
            v.driver.is_some()
                || v.blocks.len() >= MOST_BLOCKS
                || v.by_sector.contains_key(&request.sector)
        });
        let ready = self.verify_ready(peer, after);
        if !usable || full || matches!(ready, Ready::Never) {
            self.verify_cancel(volume, peer, &request);
            return;
        }
        let Some(key) = self.verify_insert(
            volume,
            peer,
            request.sector,
            request.size_bytes,
            Stage::Waiting,
        ) else {
            return;
        };
        let Some(verify) = self.verify(volume, peer) else {
            return;
        };
        verify.position = request.sector.end_of(request.size_bytes).0;
        if let Some(block) = verify.blocks.get_mut(key) {
            block.id = request.block_id;
        }
        self.verify_read_when(volume, peer, key, ready);
    }

    /// The digest of the peer's block is here.
    pub(crate) fn verify_answered(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        request: BlockRequest,
        after: (NodeId, Dagtag),
        digest: Digest,
    ) {
        let Some(key) = self.verify_asked_block(volume, peer, request.sector) else {
            // The verify ended while the answer was on its way.
            return;
        };
        let ready = self.verify_ready(peer, after);
        if let Some(block) = self
            .verify(volume, peer)
            .and_then(|v| v.blocks.get_mut(key))
        {
            if block.size_bytes != request.size_bytes {
                let text = format!("digest of another length at sector {}", request.sector);
                self.protocol_error(peer, Some(volume), text);
                return;
            }
            block.stage = Stage::Waiting;
            block.theirs = Some(digest);
        }
        self.verify_read_when(volume, peer, key, ready);
    }

    fn verify_asked_block(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        sector: Sector,
    ) -> Option<Key> {
        let verify = self.verify(volume, peer)?;
        let key = *verify.by_sector.get(&sector)?;
        let asked = verify.blocks.get(key)?.stage == Stage::Asked;
        asked.then_some(key)
    }

    fn verify_read_when(&mut self, volume: VolumeNr, peer: NodeId, key: Key, ready: Ready) {
        match ready {
            Ready::Now => self.verify_read(volume, peer, key),
            Ready::After(node, dagtag) => {
                let after = self.await_write(node, dagtag);
                if let Some(block) = self
                    .verify(volume, peer)
                    .and_then(|v| v.blocks.get_mut(key))
                {
                    block.after = Some(after);
                }
            }
            Ready::Never => self.verify_result(volume, peer, key, OvResultCode::Skip),
        }
    }

    fn verify_read(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let Some(block) = self
            .verify(volume, peer)
            .and_then(|v| v.blocks.get_mut(key))
        else {
            return;
        };
        block.after = None;
        block.stage = Stage::Reading;
        let op = DiskOp::ReadNew {
            sector: block.sector,
            len: block.size_bytes,
        };
        if self.disk_io(volume).is_none() {
            self.verify_result(volume, peer, key, OvResultCode::Skip);
            return;
        }
        self.disk_op(volume, op, DataOp::VerifyRead(volume, peer, key));
    }

    pub(crate) fn verify_read_done(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        key: Key,
        result: Result<Option<Payload>, DiskError>,
    ) {
        let failed = result.is_err();
        let payload = result.ok().flatten();
        let algorithm = self.verify_alg(peer);
        let found = self
            .verify(volume, peer)
            .and_then(|v| v.blocks.get_mut(key));
        let (Some(block), Some(payload), Some(algorithm)) = (found, payload, algorithm) else {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            if failed {
                self.verify_read_failed(volume, peer, key);
            } else {
                self.verify_result(volume, peer, key, OvResultCode::Skip);
            }
            return;
        };
        block.payload = Some(payload);
        let op = DataOp::VerifyDigest(volume, peer, key);
        let tag = self.tags.insert(Pending::Data(op));
        self.output(Output::Digest {
            tag,
            algorithm,
            payload,
        });
    }

    /// What cannot be read differs from everything: a driver is told zeroes.
    fn verify_read_failed(&mut self, volume: VolumeNr, peer: NodeId, key: Key) {
        let range = self
            .verify(volume, peer)
            .and_then(|v| v.blocks.get(key))
            .map(|b| (b.sector, b.size_bytes, b.theirs.is_some()));
        if let Some((sector, size_bytes, drives)) = range {
            self.set_out_of_sync(volume, sector, size_bytes, NodeMask::EMPTY);
            if drives {
                self.verify_result(volume, peer, key, OvResultCode::OutOfSync);
            } else {
                let len = self
                    .verify_alg(peer)
                    .map_or(0, |a| crate::auth::digest_len(&a));
                self.verify_reply(volume, peer, key, &[0; 64][..usize::from(len)]);
            }
            self.unreadable(volume, sector, size_bytes);
            return;
        }
        self.disk_failed(volume, DiskFault::Data);
    }

    pub(crate) fn verify_digest_done(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        key: Key,
        ours: &[u8],
    ) {
        let Some(block) = self
            .verify(volume, peer)
            .and_then(|v| v.blocks.get_mut(key))
        else {
            return;
        };
        let payload = block.payload.take();
        let theirs = block.theirs;
        let watch = block.watch;
        if let Some(payload) = payload.filter(|_| !planted!(self, VerifyBufferLeaked)) {
            self.release(payload.buf);
        }
        let overlapped = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.io.ranges.is_overlapped(watch));
        match theirs {
            _ if overlapped && !planted!(self, VerifyIgnoresWrites) => {
                self.verify_result(volume, peer, key, OvResultCode::Skip)
            }
            Some(theirs) if theirs.as_bytes() == ours => {
                self.verify_result(volume, peer, key, OvResultCode::InSync);
            }
            Some(_) => self.verify_result(volume, peer, key, OvResultCode::OutOfSync),
            None => self.verify_reply(volume, peer, key, ours),
        }
    }

    /// VerifyT: the digest goes to the driver.
    fn verify_reply(&mut self, volume: VolumeNr, peer: NodeId, key: Key, digest: &[u8]) {
        let Some(block) = self.verify_forget(volume, peer, key) else {
            return;
        };
        let Some(digest) = Digest::new(digest) else {
            return;
        };
        let (sector, block_id, size_bytes) = (block.sector, block.id, block.size_bytes);
        let packet = if self.resync_dagtags(peer) {
            let (dagtag_node_id, dagtag) = self.followed_primary(peer);
            Packet::OvDagtagReply(DigestDagtagRequest {
                sector,
                block_id,
                size_bytes,
                dagtag_node_id,
                dagtag,
                digest,
            })
        } else {
            Packet::OvReply(DigestRequest {
                sector,
                block_id,
                size_bytes,
                digest,
            })
        };
        self.send(peer, Stream::Data, volume, packet);
    }

    /// The block is through: the driver tells the result, the other node that it skips.
    fn verify_result(&mut self, volume: VolumeNr, peer: NodeId, key: Key, result: OvResultCode) {
        let Some(block) = self.verify_forget(volume, peer, key) else {
            return;
        };
        let drives = self
            .verify(volume, peer)
            .is_some_and(|v| v.driver.is_some());
        let request = BlockRequest {
            sector: block.sector,
            block_id: block.id,
            size_bytes: block.size_bytes,
        };
        if !drives {
            self.verify_cancel(volume, peer, &request);
            return;
        }
        if result == OvResultCode::OutOfSync && !planted!(self, VerifyForgetsDifference) {
            self.verify_mark(volume, peer, block.sector, block.size_bytes);
        }
        self.verify_count(volume, peer, block.size_bytes, result);
        let (sector, size_bytes) = (block.sector, block.size_bytes);
        let seq_num = self.next_seq(volume, peer);
        let modern = self
            .connections
            .get(&peer)
            .is_some_and(|c| c.protocol() >= 122);
        let packet = if modern {
            Packet::OvResultId(OvResultId {
                sector,
                block_id: BlockId(key.0),
                size_bytes,
                seq_num,
                result,
            })
        } else {
            Packet::OvResult(BlockAck {
                sector,
                block_id: legacy_result_id(result),
                size_bytes,
                seq_num,
            })
        };
        self.send(peer, Stream::Control, volume, packet);
        self.verify_go_on(volume, peer);
    }

    fn verify_count(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        size_bytes: u32,
        result: OvResultCode,
    ) {
        let Some(driver) = self.verify(volume, peer).and_then(|v| v.driver.as_mut()) else {
            return;
        };
        let sectors = u64::from(size_bytes) / Sector::SIZE;
        driver.pace.answered(sectors);
        driver.done_sectors += sectors;
        match result {
            OvResultCode::Skip => driver.skipped_sectors += sectors,
            OvResultCode::InSync => {}
            OvResultCode::OutOfSync => driver.different_sectors += sectors,
        }
    }

    fn verify_go_on(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(driver) = self.verify(volume, peer).and_then(|v| v.driver.as_mut()) else {
            return;
        };
        if driver.pace.runs_dry() && driver.cursor < driver.end {
            self.verify_grant(volume, peer);
        }
        self.verify_step(volume, peer);
    }

    /// `P_RS_CANCEL` or `P_NEG_RS_DREPLY`: whether it is about a block of a verify.
    pub(crate) fn verify_refused(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        ack: &BlockAck,
        failed: bool,
    ) -> bool {
        let Some(key) = self.verify_asked_block(volume, peer, ack.sector) else {
            // An answer to a verify that has ended is nobody's.
            return self
                .peer_io(volume, peer)
                .is_none_or(|io| io.target.is_none());
        };
        if !failed {
            // Both nodes skip it.
            if let Some(block) = self.verify_forget(volume, peer, key) {
                self.verify_count(volume, peer, block.size_bytes, OvResultCode::Skip);
                self.verify_go_on(volume, peer);
            }
        } else {
            self.verify_result(volume, peer, key, OvResultCode::Skip);
        }
        true
    }

    /// The driver's result.
    pub(crate) fn verify_told(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        sector: Sector,
        size_bytes: u32,
        different: bool,
    ) {
        let fits = self
            .devices
            .get(&volume)
            .is_some_and(|d| size_bytes > 0 && sector.end_of(size_bytes).0 <= d.size_sectors);
        if !fits {
            let text = format!("verify result of {size_bytes} bytes at sector {sector}");
            self.protocol_error(peer, Some(volume), text);
        } else if different && !planted!(self, VerifyNotTold) {
            self.verify_mark(volume, peer, sector, size_bytes);
            if !self.state.peer_device(volume, peer).repl.is_verify() {
                // The last results may be behind the end of the verify.
                self.verify_list(volume, peer, None);
            }
        }
    }

    fn verify_mark(&mut self, volume: VolumeNr, peer: NodeId, sector: Sector, size_bytes: u32) {
        let beside = if planted!(self, VerifyMarksBeside) {
            8
        } else {
            0
        };
        let sector = Sector(sector.0 + beside);
        if let Some(io) = self.disk_io(volume)
            && let Some(slot) = io.slot(peer)
        {
            io.bitmap.set_range(slot, sector, size_bytes);
        }
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.marks_of_log = false;
        }
        if let Some(verify) = self.verify(volume, peer) {
            verify.found = true;
        }
        self.bits_cleared(volume);
        self.verify_list(volume, peer, Some((sector, size_bytes)));
    }

    /// Tells which blocks differ, as a kernel does in its log; without one: there are no more.
    fn verify_list(&mut self, volume: VolumeNr, peer: NodeId, next: Option<(Sector, u32)>) {
        let Some(verify) = self.verify(volume, peer) else {
            return;
        };
        let listed = &mut verify.listed;
        let next = next.map(|(start, size_bytes)| (start, u64::from(size_bytes) / Sector::SIZE));
        if let (Some((start, len)), Some((more, sectors))) = (&mut listed.run, next)
            && start.0 + *len == more.0
        {
            *len += sectors;
            return;
        }
        let ended = core::mem::replace(&mut listed.run, next);
        let runs = listed.runs;
        if ended.is_some() {
            listed.runs = runs.saturating_add(1);
        }
        if next.is_none() {
            listed.runs = 0;
        }
        let Some((start, sectors)) = ended.filter(|_| runs <= LISTED_MAX) else {
            return;
        };
        let text = match runs {
            LISTED_MAX => "Out of sync: more blocks than are listed".into(),
            _ => format!("Out of sync: start={start}, size={sectors} (sectors)"),
        };
        self.log(Level::Info, Some(peer), Some(volume), text);
    }

    fn verify_cancel(&mut self, volume: VolumeNr, peer: NodeId, request: &BlockRequest) {
        let seq_num = self.next_seq(volume, peer);
        let ack = BlockAck {
            sector: request.sector,
            block_id: request.block_id,
            size_bytes: request.size_bytes,
            seq_num,
        };
        self.send(peer, Stream::Control, volume, Packet::RsCancel(ack));
    }

    fn verify_forget(&mut self, volume: VolumeNr, peer: NodeId, key: Key) -> Option<Block> {
        let device = self.devices.get_mut(&volume)?;
        let verify = &mut device.peers.get_mut(&peer)?.io.verify;
        let mut block = verify.blocks.remove(key)?;
        verify.by_sector.remove(&block.sector);
        device.io.ranges.unwatch(block.watch);
        if let Some(payload) = block.payload.take() {
            self.release(payload.buf);
        }
        Some(block)
    }

    /// Writes of a node came in: blocks that waited for them are read. Says whether some still wait.
    pub(super) fn verify_dagtag_progress(&mut self, node: NodeId) -> bool {
        let Some(conn) = self.connections.get(&node) else {
            return false;
        };
        let reached = conn.last_dagtag;
        let mut wait = false;
        for (volume, peer, key, after) in self.verify_waiting_for(node) {
            if after.is_met(reached) {
                self.verify_read(volume, peer, key);
            } else if after.is_too_old(self.now) {
                self.verify_result(volume, peer, key, OvResultCode::Skip);
            } else {
                wait = true;
            }
        }
        wait
    }

    /// Nobody can wait for writes of this node any more.
    pub(super) fn verify_dagtag_lost(&mut self, node: NodeId) {
        for (volume, peer, key, _) in self.verify_waiting_for(node) {
            self.verify_result(volume, peer, key, OvResultCode::Skip);
        }
    }

    fn verify_waiting_for(&self, node: NodeId) -> Vec<(VolumeNr, NodeId, Key, Awaited)> {
        let mut found = Vec::new();
        for (volume, device) in &self.devices {
            for (peer, pd) in &device.peers {
                let verify = &pd.io.verify;
                if verify.is_idle() {
                    continue;
                }
                for key in verify.by_sector.values() {
                    let after = verify.blocks.get(*key).and_then(|b| b.after);
                    if let Some(after) = after.filter(|after| after.node == node) {
                        found.push((*volume, *peer, *key, after));
                    }
                }
            }
        }
        found
    }

    /// Progress of a running verify.
    pub(crate) fn verify_report(&self, volume: VolumeNr, peer: NodeId) -> Option<VerifyReport> {
        let device = self.devices.get(&volume)?;
        let verify = &device.peers.get(&peer)?.io.verify;
        Some(
            match (self.state.peer_device(volume, peer).repl, &verify.driver) {
                (ReplState::VerifyS, Some(driver)) => VerifyReport {
                    start_sector: driver.start,
                    stop_sector: driver.stops.then_some(driver.end),
                    position_sector: driver.cursor,
                    left_sectors: (driver.end - driver.start).saturating_sub(driver.done_sectors),
                    skipped_sectors: driver.skipped_sectors,
                },
                // Agreed on; it begins when the peer knows as well.
                (ReplState::VerifyS, None) => {
                    let (start, end) = verify.next.within(device.size_sectors);
                    VerifyReport {
                        start_sector: start,
                        stop_sector: (end < device.size_sectors).then_some(end),
                        position_sector: start,
                        left_sectors: end - start,
                        skipped_sectors: 0,
                    }
                }
                (ReplState::VerifyT, _) => VerifyReport {
                    start_sector: 0,
                    stop_sector: None,
                    position_sector: verify.position,
                    left_sectors: device.size_sectors.saturating_sub(verify.position),
                    skipped_sectors: 0,
                },
                _ => return None,
            },
        )
    }

    /// Sectors that the driver has compared or skipped, and when it began.
    pub(crate) fn verify_done_sectors(
        &self,
        volume: VolumeNr,
        peer: NodeId,
    ) -> Option<(u64, Instant)> {
        let pd = self.devices.get(&volume)?.peers.get(&peer)?;
        let verify = &pd.io.verify;
        let done = verify
            .driver
            .as_ref()
            .map_or(verify.position, |d| d.done_sectors);
        Some((done, pd.io.resync_started))
    }
}
