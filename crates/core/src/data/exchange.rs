//! The bitmap exchange before a resync (wire.md, 7.2 to 7.4).
//!
//! On the wire one bit is always 4 KiB. Received bits are only ever added.

use alloc::format;
use alloc::vec::Vec;
use core::ops::Range;

use lockstep_format::units::{NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::{BitmapWords, CompressedBitmap, RunKind};
use lockstep_format::wire::vli::{Pushed, RleEncoder, for_each_set_run};
use lockstep_format::wire::{ConnState, Packet, ReplState};

use crate::before_resync::ResyncGate;
use crate::bitmap::Bitmap;
use crate::event::Stream;
use crate::report::Level;
use crate::resource::Resource;
use crate::state::ReplSets;

/// Sectors of one bit on the wire.
const WIRE_BIT_SECTORS: u64 = 8;

impl Resource {
    /// Sends this node's whole bitmap for a peer.
    pub(crate) fn send_bitmap(&mut self, volume: VolumeNr, peer: NodeId) {
        if self.state.peer_device(volume, peer).repl == ReplState::WfBitmapS {
            // Replication has stopped with this state: what is on its way belongs into the bitmap.
            if !planted!(self, InFlightNotInBitmap) {
                self.mark_in_flight(volume, peer);
            }
            self.recopy_failed_writes(volume, peer);
            self.apply_unacked(volume);
            self.owe_bitmap(volume, peer);
        }
        let dialect = self.dialect(peer);
        let use_rle = self.connections.get(&peer).is_some_and(|c| c.net.use_rle)
            && dialect.protocol >= crate::legacy::WITH_COMPRESSED_BITMAP;
        let total = self.wire_bits(volume);
        let theirs = self.peer_block_sectors(volume, peer);
        let rounds = planted!(self, CoarseBitsRounded);
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let Some(slot) = io.slot(peer) else { return };
        // A kernel with large blocks reads plain words wrongly if this side's differ: a bitmap of
        // whole blocks of both sides always compresses.
        let unequal = theirs != io.bitmap.shape().block().sectors();
        let unit = match rounds {
            true => 1,
            false => theirs.max(io.bitmap.shape().block().sectors()) / WIRE_BIT_SECTORS,
        };
        let use_rle = use_rle || unequal;
        let mut packets = Vec::new();
        let mut at = 0;
        let mut plain_end = false;
        while at < total {
            let code = if use_rle {
                compress(
                    &io.bitmap,
                    slot,
                    at..total,
                    unit,
                    dialect.bitmap_code_len_max(),
                )
            } else {
                None
            };
            match code {
                Some((packet, end)) => {
                    packets.push(Packet::CompressedBitmap(packet));
                    at = end;
                    plain_end = false;
                }
                None => {
                    // Words are sent whole; merging a part twice does no harm.
                    let first = at / 64;
                    let most = dialect.bitmap_words_len_max() as u64 / 8;
                    let end = total.div_ceil(64).min(first + most);
                    let mut words = Vec::with_capacity(((end - first) * 8) as usize);
                    for index in first..end {
                        words.extend_from_slice(&wire_word(&io.bitmap, slot, index).to_le_bytes());
                    }
                    packets.push(Packet::Bitmap(BitmapWords { words }));
                    at = (end * 64).min(total);
                    plain_end = true;
                }
            }
        }
        if plain_end || total == 0 {
            packets.push(Packet::Bitmap(BitmapWords { words: Vec::new() }));
        }
        for packet in packets {
            self.send(peer, Stream::Data, volume, packet);
        }
    }

    fn wire_bits(&self, volume: VolumeNr) -> u64 {
        self.devices
            .get(&volume)
            .map_or(0, |d| d.size_sectors.div_ceil(WIRE_BIT_SECTORS))
    }

    pub(crate) fn bitmap_words(&mut self, peer: NodeId, volume: VolumeNr, packet: &BitmapWords) {
        let total = self.wire_bits(volume);
        let most = self.dialect(peer).bitmap_words_len_max() as u64 / 8 * 8;
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        if packet.words.is_empty() {
            self.bitmap_complete(peer, volume);
            return;
        }
        let first = io.bitmap_in / 64;
        let left = (total.div_ceil(64) - first.min(total.div_ceil(64))) * 8;
        if packet.words.len() as u64 != left.min(most) {
            if self.sizes_differ(peer, volume) {
                return;
            }
            let text = format!("bitmap packet of {} bytes", packet.words.len());
            self.protocol_error(peer, Some(volume), text);
            return;
        }
        io.bitmap_in = (first + packet.words.len() as u64 / 8) * 64;
        let short = u64::from(planted!(self, PlainRunsShort));
        let mut runs = Vec::new();
        for (index, word) in packet.words.chunks_exact(8).enumerate() {
            let mut word = u64::from_le_bytes(word.try_into().unwrap_or_default());
            let mut at = (first + index as u64) * 64;
            while word != 0 {
                let skip = word.trailing_zeros();
                word >>= skip;
                at += u64::from(skip);
                let run = word.trailing_ones();
                runs.push((at, u64::from(run) - short));
                at += u64::from(run);
                word = if run == 64 { 0 } else { word >> run };
            }
        }
        self.merge_runs(peer, volume, total, &runs);
    }

    pub(crate) fn bitmap_code(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        packet: &CompressedBitmap,
    ) {
        let off_by_one = planted!(self, RleOffByOne);
        let total = self.wire_bits(volume);
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        let mut runs = Vec::new();
        let end = for_each_set_run(packet, io.bitmap_in, total, |at, run| runs.push((at, run)));
        if off_by_one {
            runs.iter_mut().for_each(|(_, run)| *run -= 1);
        }
        match end {
            Ok(end) => {
                io.bitmap_in = end;
                self.merge_runs(peer, volume, total, &runs);
                if end == total {
                    self.bitmap_complete(peer, volume);
                }
            }
            Err(_) if self.sizes_differ(peer, volume) => {}
            Err(error) => {
                self.protocol_error(peer, Some(volume), format!("compressed bitmap: {error}"));
            }
        }
    }

    fn merge_runs(&mut self, peer: NodeId, volume: VolumeNr, total: u64, runs: &[(u64, u64)]) {
        let forgets_end = planted!(self, BitmapEndNotMerged);
        let rounds = planted!(self, CoarseBitsRounded);
        let replaces = planted!(self, BitmapReplacesMarks);
        let is_source = self.state.peer_device(volume, peer).repl == ReplState::WfBitmapS;
        if is_source && planted!(self, TargetMarksNotMerged) {
            return;
        }
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        let Some(slot) = io.slot(peer) else { return };
        let total = if forgets_end { total & !63 } else { total };
        let scale = io.bitmap.shape().block().sectors() / WIRE_BIT_SECTORS;
        let acked: Vec<u64> = match is_source {
            true => self
                .peer_io(volume, peer)
                .map(|io| io.acked_in_exchange.iter().copied().collect())
                .unwrap_or_default(),
            false => Vec::new(),
        };
        let Some(io) = self.disk_io(volume) else {
            return;
        };
        if replaces
            && !is_source
            && let (Some((first, _)), Some((last, run))) = (runs.first(), runs.last())
        {
            io.bitmap
                .clear_bits(slot, first / scale..(last + run) / scale);
        }
        let mut news = 0;
        for (at, run) in runs {
            let end = (at + run).min(total);
            let end = if rounds {
                end / scale
            } else {
                end.div_ceil(scale)
            };
            let mut begin = at / scale;
            let from = acked.partition_point(|bit| *bit < begin);
            for bit in acked[from..].iter().take_while(|bit| **bit < end) {
                news += io.bitmap.set_bits(slot, begin..*bit);
                begin = bit + 1;
            }
            news += io.bitmap.set_bits(slot, begin..end);
        }
        if self.state.peer_device(volume, peer).repl == ReplState::WfBitmapS {
            self.owe_more(volume, peer, news);
        }
    }

    /// The targets in `peers` have a write that is in sync with it, and has cleared its marks. The ack may
    /// have overtaken the target's bitmap, which is on the other stream and is from before the write: what that
    /// says of these blocks is over, and would stay marked here for ever.
    pub(super) fn acked_in_exchange(
        &mut self,
        volume: VolumeNr,
        peers: NodeMask,
        sector: Sector,
        size_bytes: u32,
    ) {
        for peer in peers.iter() {
            if self.state.peer_device(volume, peer).repl != ReplState::WfBitmapS {
                continue;
            }
            let bits = self.disk_io(volume).and_then(|io| {
                let slot = io.slot(peer)?;
                Some(io.bitmap.whole_bits(slot, sector, size_bytes))
            });
            if let (Some(bits), Some(io)) = (bits, self.peer_io(volume, peer)) {
                io.acked_in_exchange.extend(bits);
            }
        }
    }

    /// The peer's whole bitmap is merged.
    fn bitmap_complete(&mut self, peer: NodeId, volume: VolumeNr) {
        // It was sent to a disk that is gone, and is in none; the next disk gets another one.
        let taken = self.disk_io(volume).is_some();
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        io.bitmap_in = 0;
        io.acked_in_exchange.clear();
        io.bitmap_received = taken;
        self.bitmap_exchange_step(volume, peer);
    }

    /// This side is target now: the source's bitmap may be here already.
    pub(crate) fn await_bitmap(&mut self, volume: VolumeNr, peer: NodeId) {
        self.bitmap_exchange_step(volume, peer);
    }

    /// Goes on with the exchange if the peer's bitmap is here and this side is ready for it: the
    /// target answers with its own, then both start.
    pub(crate) fn bitmap_exchange_step(&mut self, volume: VolumeNr, peer: NodeId) {
        let repl = self.state.peer_device(volume, peer).repl;
        let waits = matches!(repl, ReplState::WfBitmapS | ReplState::WfBitmapT);
        let Some(io) = self.peer_io(volume, peer) else {
            return;
        };
        if !io.bitmap_received {
            return;
        }
        if repl.is_sync() {
            io.bitmap_received = false;
            return;
        }
        if !waits {
            return;
        }
        io.bitmap_received = false;
        if repl == ReplState::WfBitmapT {
            if self.has_passed_source(volume, peer) {
                let text = "another source has copied newer data meanwhile: connecting anew";
                self.log(Level::Info, Some(peer), Some(volume), text.into());
                self.drop_connection(peer, ConnState::NetworkFailure);
                return;
            }
            self.before_resync_target(volume, peer, ResyncGate::Answer);
        } else {
            self.before_resync_source(volume, peer, ResyncGate::Exchanged);
        }
    }

    /// This node is target, and nothing speaks against it: both start.
    pub(crate) fn answer_bitmap(&mut self, volume: VolumeNr, peer: NodeId) {
        self.send_bitmap(volume, peer);
        self.bitmap_exchanged(volume, peer);
    }
}

/// 64 bits of 4 KiB from bit `index` × 64 on.
fn wire_word(bitmap: &Bitmap, slot: u8, index: u64) -> u64 {
    let scale = bitmap.shape().block().sectors() / WIRE_BIT_SECTORS;
    if scale == 1 {
        return bitmap.word(slot, index);
    }
    let mut word = 0;
    for bit in 0..64 {
        let own = (index * 64 + bit) / scale;
        if bitmap.word(slot, own / 64) >> (own % 64) & 1 == 1 {
            word |= 1 << bit;
        }
    }
    word
}

/// One compressed packet of the first bits in `bits` and the bit behind it; none if plain words are
/// shorter. Runs of set bits are made of whole groups of `unit`.
fn compress(
    bitmap: &Bitmap,
    slot: u8,
    bits: Range<u64>,
    unit: u64,
    code_bytes: usize,
) -> Option<(CompressedBitmap, u64)> {
    let (at, total) = (bits.start, bits.end);
    let scale = bitmap.shape().block().sectors() / WIRE_BIT_SECTORS;
    // The group's other bits count as set: the search begins where the group does.
    let next_set = |at: u64| {
        bitmap
            .next_set(slot, at / unit * unit / scale)
            .map_or(total, |bit| (bit * scale / unit * unit).max(at).min(total))
    };
    let next_clear = |at: u64| {
        let mut end = at;
        loop {
            let clear = bitmap.next_clear(slot, end / scale) * scale;
            end = clear.max(end + 1).next_multiple_of(unit);
            if end >= total {
                return total;
            }
            if next_set(end) != end {
                return end;
            }
        }
    };
    let mut set = next_set(at) == at;
    let kind = if set { RunKind::Set } else { RunKind::Clear };
    let mut encoder = RleEncoder::new(kind, code_bytes);
    let mut position = at;
    while position < total {
        let end = if set {
            next_clear(position)
        } else {
            next_set(position)
        };
        if end == position || encoder.push(end - position) == Pushed::Full {
            break;
        }
        position = end;
        set = !set;
    }
    if encoder.is_empty() || encoder.is_wasteful() {
        return None;
    }
    Some((encoder.finish(), position))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_format::disk::bitmap::BitmapShape;
    use lockstep_format::disk::layout::BitmapBlock;

    #[test]
    fn compressed_bits_come_back_in_both_granularities() {
        for shift in [12, 14] {
            let block = BitmapBlock::from_shift(shift).unwrap();
            let scale = block.sectors() / WIRE_BIT_SECTORS;
            let shape = BitmapShape::new(8 * 100_003, 2, block);
            let mut bitmap = Bitmap::new(shape);
            bitmap.set_bits(1, 3..17);
            bitmap.set_bits(1, 100..101);
            let last = shape.bits() - 1;
            bitmap.set_bits(1, last..last + 1);
            let mut at = 0;
            let mut copy = Bitmap::new(shape);
            let total = 100_003;
            while at < total {
                let (packet, end) = compress(&bitmap, 1, at..total, scale, 4).unwrap();
                let reached = for_each_set_run(&packet, at, total, |first, run| {
                    copy.set_bits(1, first / scale..(first + run).div_ceil(scale));
                });
                assert_eq!(reached, Ok(end));
                at = end;
            }
            assert_eq!(copy.count(1), bitmap.count(1));
            assert_eq!(copy.next_set(1, 0), Some(3));
            assert_eq!(copy.next_clear(1, 3), 17);
            assert_eq!(wire_word(&bitmap, 1, 0) >> (3 * scale) & 1, 1);
            assert_eq!(wire_word(&bitmap, 1, 0) >> (3 * scale - 1) & 1, 0);
        }
    }
}
