//! When a packet of the core stands for one of the kernel, and what it teaches about UUIDs and ids.

use lockstep_format::units::Uuid;
use lockstep_format::wire::{self, DataFlags, Packet, UuidFlags};

use crate::capture::Seen;
use crate::compare::Replay;
use crate::packets::{ancestors, clean, without_seq};
use crate::stand_in::Sent;

impl Replay<'_> {
    pub(crate) fn equivalent(&self, seen: &Seen, sent: &Sent) -> bool {
        if sent.payload != seen.payload {
            return false;
        }
        let uuid = |captured: Uuid, own: Uuid| self.same_uuid(captured, own);
        match (&seen.packet, &sent.packet) {
            (Packet::ConnectionFeatures(a), Packet::ConnectionFeatures(b)) => {
                // The dialects and features are each node's own affair; 8.4 has no node ids.
                a.protocol_max <= wire::PROTOCOL_MAX_84
                    || (a.sender_node_id, a.receiver_node_id)
                        == (b.sender_node_id, b.receiver_node_id)
            }
            (Packet::AuthChallenge(_), Packet::AuthChallenge(_)) => true,
            (Packet::RsThinDagtagReq(a), Packet::RsThinDagtagReq(b)) => {
                let mut a = *a;
                a.block_id = b.block_id;
                a == *b
            }
            (Packet::RsCsumDagtagReq(a), Packet::RsCsumDagtagReq(b)) => {
                let mut a = *a;
                a.block_id = b.block_id;
                a == *b
            }
            (Packet::Uuids110(a), Packet::Uuids110(b)) => {
                let flags = |f: UuidFlags| f;
                a.dirty_bits == b.dirty_bits
                    && flags(a.flags) == flags(b.flags)
                    && a.node_mask == b.node_mask
                    && uuid(a.current, b.current)
                    && a.bitmap_uuids.len() == b.bitmap_uuids.len()
                    && a.bitmap_uuids
                        .iter()
                        .zip(&b.bitmap_uuids)
                        .all(|(x, y)| x.0 == y.0 && uuid(clean(x.1), clean(y.1)))
                    && ancestors(&a.history).all(|x| ancestors(&b.history).any(|y| uuid(x, y)))
            }
            (Packet::Uuids(a), Packet::Uuids(b)) => {
                // 8.4 names a disk that never had data as the generation before the first, and
                // does not say of an Inconsistent disk that it is.
                let old = |a: Uuid, b: Uuid| a == Uuid::JUST_CREATED || uuid(clean(a), clean(b));
                // One ancestor more does no harm.
                let ancestor = |a: Uuid, b: Uuid| a.is_zero() || old(a, b);
                let known = |f: UuidFlags| f.difference(UuidFlags::INCONSISTENT);
                a.dirty_bits == b.dirty_bits
                    && known(a.flags) == known(b.flags)
                    && uuid(a.current, b.current)
                    && old(a.bitmap, b.bitmap)
                    && ancestor(a.history[0], b.history[0])
                    && ancestor(a.history[1], b.history[1])
            }
            (Packet::SyncUuid(a), Packet::SyncUuid(b)) => uuid(clean(*a), clean(*b)),
            (Packet::CurrentUuid(a), Packet::CurrentUuid(b)) => {
                a.weak_nodes == b.weak_nodes && uuid(a.uuid, b.uuid)
            }
            (Packet::TwopcPrepRsz(a), Packet::TwopcPrepRsz(b)) => {
                let mut a = *a;
                a.head.tid = b.head.tid;
                a == *b
            }
            (Packet::TwopcPrepare(a), Packet::TwopcPrepare(b)) => {
                let mut a = *a;
                a.head.tid = b.head.tid;
                a == *b
            }
            (Packet::TwopcCommit(a), Packet::TwopcCommit(b))
            | (Packet::TwopcAbort(a), Packet::TwopcAbort(b)) => {
                let mut a = *a;
                if let Some(tid) = self.tids.get(&a.head.tid) {
                    a.head.tid = *tid;
                }
                a == *b
                    && matches!(seen.packet, Packet::TwopcCommit(_))
                        == matches!(sent.packet, Packet::TwopcCommit(_))
            }
            (Packet::Data(a), Packet::Data(b)) => {
                let mut a = *a;
                a.block_id = b.block_id;
                if self.setup.net.allow_two_primaries {
                    // It counts the acks as well.
                    a.seq_num = b.seq_num;
                }
                // Hints of the sender's kernel. A flush in front of a write is a request of its
                // own at a front end here, and completes before the write is asked for.
                let hints = DataFlags::RW_SYNC | DataFlags::UNPLUG | DataFlags::FLUSH;
                a.flags.remove(hints);
                let mut b = *b;
                b.flags.remove(hints);
                a == b
            }
            (Packet::DataRequest(a), Packet::DataRequest(b)) => {
                (a.sector, a.size_bytes) == (b.sector, b.size_bytes)
            }
            (Packet::Trim(a), Packet::Trim(b)) | (Packet::Zeroes(a), Packet::Zeroes(b)) => {
                let (mut a, mut b) = (*a, *b);
                a.block_id = b.block_id;
                a.flags.remove(DataFlags::RW_SYNC);
                b.flags.remove(DataFlags::RW_SYNC);
                a == b && seen.packet.command() == sent.packet.command()
            }
            // Without a volume only the role means something.
            (Packet::State(a), Packet::State(b)) if seen.volume.is_none() => {
                sent.volume.is_none() && a.role == b.role
            }
            (Packet::Sizes(a), Packet::Sizes(b)) => {
                let (mut a, mut b) = (*a, *b);
                // Limits of the disk below, and of the bitmap, which is not negotiated here.
                a.limits = None;
                b.limits = None;
                a == b
            }
            (a, b) if without_seq(a).is_some() && a.command() == b.command() => {
                without_seq(a) == without_seq(b)
            }
            (a, b) => a == b,
        }
    }

    pub(crate) fn same_uuid(&self, captured: Uuid, own: Uuid) -> bool {
        if captured.0 & 1 != own.0 & 1 {
            return false;
        }
        match self.uuids.get(&(captured.0 & !1)) {
            Some(known) => *known == own.0 & !1,
            // Small values and ones that a peer made are given; others may be made here.
            None => {
                captured == own
                    || (captured.0 > 4
                        && own.0 > 4
                        && captured.0 != u64::MAX
                        && own.0 != u64::MAX
                        && !self.uuids.values().any(|v| *v == own.0 & !1))
            }
        }
    }

    pub(crate) fn learn(&mut self, seen: &Seen, sent: &Sent) {
        let mut pairs = Vec::new();
        match (&seen.packet, &sent.packet) {
            (Packet::Uuids110(a), Packet::Uuids110(b)) => {
                pairs.push((a.current, b.current));
                pairs.extend(
                    a.bitmap_uuids
                        .iter()
                        .zip(&b.bitmap_uuids)
                        .map(|(x, y)| (x.1, y.1)),
                );
            }
            (Packet::Uuids(a), Packet::Uuids(b)) => pairs.extend([
                (a.current, b.current),
                (a.bitmap, b.bitmap),
                (a.history[0], b.history[0]),
                (a.history[1], b.history[1]),
            ]),
            (Packet::RsThinReq(_), Packet::RsThinReq(b)) => {
                self.hashed.insert(b.sector, b.block_id);
            }
            (Packet::RsThinDagtagReq(_), Packet::RsThinDagtagReq(b)) => {
                self.hashed.insert(b.sector, b.block_id);
            }
            (Packet::RsCsumDagtagReq(_), Packet::RsCsumDagtagReq(b)) => {
                self.hashed.insert(b.sector, b.block_id);
            }
            (Packet::SyncUuid(a), Packet::SyncUuid(b)) => pairs.push((*a, *b)),
            (Packet::AuthChallenge(_), Packet::AuthChallenge(own)) => self.challenge = Some(*own),
            (Packet::TwopcPrepRsz(a), Packet::TwopcPrepRsz(b)) => {
                self.tids.insert(a.head.tid, b.head.tid);
            }
            (Packet::TwopcPrepare(a), Packet::TwopcPrepare(b)) => {
                self.tids.insert(a.head.tid, b.head.tid);
            }
            (Packet::Data(a), Packet::Data(b)) => {
                self.blocks.insert((seen.to, a.block_id.0), b.block_id.0);
            }
            (Packet::DataRequest(a), Packet::DataRequest(b)) => {
                self.blocks.insert((seen.to, a.block_id.0), b.block_id.0);
            }
            (Packet::Trim(a), Packet::Trim(b)) | (Packet::Zeroes(a), Packet::Zeroes(b)) => {
                self.blocks.insert((seen.to, a.block_id.0), b.block_id.0);
            }
            _ => {}
        }
        for (captured, own) in pairs {
            let real = |uuid: Uuid| uuid.0 > 4 && uuid.0 != u64::MAX;
            if real(captured) && real(own) && captured.0 & !1 != own.0 & !1 {
                self.uuids.insert(captured.0 & !1, own.0 & !1);
            }
        }
    }
}
