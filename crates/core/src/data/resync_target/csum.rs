//! Checksum-based resync as target: a request carries the digest of this node's block, and the
//! source sends data only if its own block has another one (wire.md, 7.5 and 7.6).
//!
//! The source forgets an equal block at once, so what was read here is flushed before its digest
//! leaves: the block may come from a resync whose link was lost before its flush. A block that is
//! written while its digest is on its way stays marked and is asked for again.

use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::alg::DigestAlg;
use lockstep_format::wire::packet::{BlockAck, BlockRequest, DigestDagtagRequest, DigestRequest};
use lockstep_format::wire::{BlockId, Digest, Packet, ReplState, UuidFlags};

use super::super::slab::Key;
use super::super::{DataOp, FlushWaiter};
use super::Stage;
use crate::event::{DiskError, DiskOp, Output, Payload};
use crate::resource::{Pending, Resource};

impl Resource {
    /// The algorithm of `csums-alg`, if this resync uses one.
    fn csums_of(&self, volume: VolumeNr, peer: NodeId) -> Option<DigestAlg> {
        let conn = self.connections.get(&peer)?;
        if conn.protocol() < crate::legacy::WITH_CSUMS {
            return None;
        }
        let alg = DigestAlg::from_name(conn.net.csums_alg.as_deref()?)?;
        if conn.net.csums_after_crash_only {
            let pd = self.devices.get(&volume)?.peers.get(&peer)?;
            let crashed = |flags: UuidFlags| flags.contains(UuidFlags::CRASHED_PRIMARY);
            let own = pd.sent_uuids.as_ref().is_some_and(|u| crashed(u.flags));
            let theirs = pd.uuids.as_ref().is_some_and(|u| crashed(u.flags));
            if !own && !theirs {
                return None;
            }
        }
        Some(alg)
    }

    /// Reads the block for its digest; false if the request goes without one.
    pub(super) fn target_hash(&mut self, volume: VolumeNr, peer: NodeId, key: Key) -> bool {
        if self.csums_of(volume, peer).is_none() || self.disk_io(volume).is_none() {
            return false;
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return false;
        };
        let Some(request) = device
            .peers
            .get_mut(&peer)
            .and_then(|p| p.io.target.as_mut())
            .and_then(|sync| sync.requests.get_mut(key))
        else {
            return false;
        };
        let Some(range) = request.range else {
            return false;
        };
        request.stage = Stage::Hashing;
        request.watch = Some(device.io.ranges.watch_beside(range));
        let op = DiskOp::ReadNew {
            sector: request.sector,
            len: request.size_bytes,
        };
        self.disk_op(volume, op, DataOp::TargetRead(volume, peer, key));
        true
    }

    pub(crate) fn target_read_done(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        key: Key,
        result: Result<Option<Payload>, DiskError>,
    ) {
        let alg = self.csums_of(volume, peer);
        let payload = result.ok().flatten();
        let request = self
            .target(volume, peer)
            .and_then(|sync| sync.requests.get_mut(key))
            .filter(|request| request.stage == Stage::Hashing);
        let Some(request) = request else {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            return;
        };
        let (Some(payload), Some(alg)) = (payload, alg) else {
            // What cannot be read here is written again.
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            self.target_send(volume, peer, key);
            return;
        };
        request.payload = Some(payload);
        let op = DataOp::TargetDigest(volume, peer, key);
        let tag = self.tags.insert(Pending::Data(op));
        self.output(Output::Digest {
            tag,
            algorithm: alg.name().into(),
            payload,
        });
    }

    pub(crate) fn target_digest_done(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        key: Key,
        digest: &[u8],
    ) {
        let request = self
            .target(volume, peer)
            .and_then(|sync| sync.requests.get_mut(key))
            .filter(|request| request.stage == Stage::Hashing);
        let Some(request) = request else {
            return;
        };
        request.digest = Digest::new(digest).filter(|d| !d.is_empty());
        if let Some(payload) = request.payload.take() {
            self.release(payload.buf);
        }
        if let Some(sync) = self.target(volume, peer) {
            sync.hashed.push(key);
        }
        self.flush_hashed(volume, peer);
    }

    fn flush_hashed(&mut self, volume: VolumeNr, peer: NodeId) {
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        if sync.hash_flushing.is_empty() && !sync.hashed.is_empty() {
            sync.hash_flushing = core::mem::take(&mut sync.hashed);
            if planted!(self, HashedNotFlushed) {
                self.hashed_flushed(volume, peer, Ok(()));
                return;
            }
            self.flush_disk(volume, FlushWaiter::Hashed(peer));
        }
    }

    /// What was read is durable: the digests leave.
    pub(crate) fn hashed_flushed(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        result: Result<(), DiskError>,
    ) {
        let Some(sync) = self.target(volume, peer) else {
            return;
        };
        for key in core::mem::take(&mut sync.hash_flushing) {
            let waits = self
                .target(volume, peer)
                .and_then(|sync| sync.requests.get(key))
                .is_some_and(|request| request.stage == Stage::Hashing);
            if waits && result.is_ok() {
                self.target_send(volume, peer, key);
            } else if waits {
                // The disk goes, and the resync with it.
                self.target_end(volume, peer, key);
            }
        }
        self.target_gone_if_empty(volume, peer);
        self.flush_hashed(volume, peer);
    }

    /// The request with this block's digest.
    pub(super) fn csum_request(
        &mut self,
        peer: NodeId,
        key: Key,
        (sector, size_bytes): (Sector, u32),
        digest: Digest,
    ) -> Packet {
        let block_id = BlockId(key.0);
        let request = BlockRequest {
            sector,
            block_id,
            size_bytes,
        };
        match self.after_primary(peer, request) {
            Some(after) => Packet::RsCsumDagtagReq(DigestDagtagRequest {
                sector,
                block_id,
                size_bytes,
                dagtag_node_id: after.dagtag_node_id,
                dagtag: after.dagtag,
                digest,
            }),
            None => Packet::CsumRsRequest(DigestRequest {
                sector,
                block_id,
                size_bytes,
                digest,
            }),
        }
    }

    /// `P_RS_IS_IN_SYNC`: the source's block has the same digest.
    pub(crate) fn target_equal(&mut self, peer: NodeId, volume: VolumeNr, ack: &BlockAck) {
        let runs = matches!(
            self.state.peer_device(volume, peer).repl,
            ReplState::SyncTarget | ReplState::PausedSyncT
        );
        let careless = planted!(self, EqualThoughChanged);
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        let Some(pd) = device.peers.get_mut(&peer) else {
            return;
        };
        let Some(sync) = pd.io.target.as_mut() else {
            return;
        };
        let Some(key) = sync.by_sector.get(&ack.sector).copied() else {
            return;
        };
        let Some(request) = sync.requests.get(key) else {
            return;
        };
        let asked = request.digest.is_some()
            && request.stage == Stage::Sent
            && request.size_bytes == ack.size_bytes;
        if !asked {
            let text = alloc::format!(
                "no digest was sent of the {} bytes at sector {} that are said to be equal",
                ack.size_bytes,
                ack.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return;
        }
        let (sector, size_bytes) = (request.sector, request.size_bytes);
        let changed = request
            .watch
            .is_none_or(|watch| device.io.ranges.is_overlapped(watch))
            && !careless;
        let settled = runs && !sync.over && !request.marked_again && !changed;
        if settled {
            pd.io.resync_same_sectors += u64::from(size_bytes) / Sector::SIZE;
            if let Some(io) = self.disk_io(volume)
                && let Some(slot) = io.slot(peer)
            {
                io.bitmap.clear_range(slot, sector, size_bytes);
            }
        }
        self.target_end(volume, peer, key);
        if settled {
            self.tell_settled(volume, &[(sector, size_bytes)]);
            self.bits_cleared(volume);
        }
        self.target_gone_if_empty(volume, peer);
        self.target_kick(volume, peer);
    }
}
