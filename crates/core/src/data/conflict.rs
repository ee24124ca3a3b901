//! Two Primaries: which of two overlapping writes that were made at the same time comes first.
//!
//! A received write *conflicts* with an own one that the peer has not answered. Own writes that
//! were not sent yet simply go behind it, and one that the peer has acknowledged was first there
//! as well. Because acks and writes come on two streams, a write waits for the acks that its sender
//! sent before it (wire.md, 6.4).
//!
//! What follows is what the peer's release does (wire.md, 6.12). DRBD 9 ends the connection. With
//! 8.4 the end with the role bit decides: its own write wins, and the peer's is superseded by it
//! or made again. The other end keeps the received write back until it knows the verdict about its
//! own one.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::packet::BlockAck;
use lockstep_format::wire::{ConnState, DiskState, Packet};

use super::Owner;
use super::slab::Key;
use super::write::{AppRequest, Local};
use crate::event::{Payload, Stream};
use crate::interval::Origin;
use crate::report::Level;
use crate::resource::Resource;
use crate::second_look::Over;
use crate::timers::Timer;

/// Most packets that wait behind one whose turn has not come.
const HELD_COUNT: usize = 20_000;

/// What a connection knows about conflicts.
#[derive(Debug, Default)]
pub(crate) struct Conflicts {
    /// Packets of the data stream behind a write that waits for acks, in order.
    held: VecDeque<HeldPacket>,
    /// Writes of each epoch sent that the peer did not take: superseded, or to be made again.
    refused: BTreeMap<u32, u32>,
}

impl Conflicts {
    /// Packets that wait.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }
}

#[derive(Debug)]
struct HeldPacket {
    volume: VolumeNr,
    packet: Packet,
    payload: Option<Payload>,
}

/// What becomes of a received write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clash {
    /// It takes its place.
    None,
    /// It is answered, and not written.
    Refused,
    /// The connection is over.
    Fatal,
}

/// A write that was received, as far as conflicts go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Incoming {
    pub(super) peer: NodeId,
    pub(super) volume: VolumeNr,
    pub(super) ack: BlockAck,
}

impl Resource {
    /// Passes a packet on, unless it has to wait for acks on the other stream or is behind one
    /// that does.
    pub(crate) fn in_turn(
        &mut self,
        peer: NodeId,
        stream: Stream,
        volume: VolumeNr,
        packet: Packet,
        payload: Option<Payload>,
    ) -> Option<(Packet, Option<Payload>)> {
        if !self.both_may_write(peer) {
            return Some((packet, payload));
        }
        let behind = self
            .connections
            .get(&peer)
            .is_some_and(|c| !c.io.conflicts.held.is_empty());
        let passes = match (stream, &packet) {
            // How the next packets are to be read.
            (Stream::Control, _) | (_, Packet::ProtocolUpdate(_)) => true,
            (Stream::Data, _) => !behind && !self.comes_early(peer, volume, &packet),
        };
        if passes {
            self.note_number(peer, volume, &packet);
            return Some((packet, payload));
        }
        let patience = self.connections.get(&peer)?.ping_timeout();
        let held = &mut self.connections.get_mut(&peer)?.io.conflicts.held;
        held.push_back(HeldPacket {
            volume,
            packet,
            payload,
        });
        let (first, full) = (held.len() == 1, held.len() > HELD_COUNT);
        if first {
            self.timers.set(Timer::Turn(peer), self.now + patience);
        }
        if full {
            self.turn_is_lost(peer);
        }
        None
    }

    /// Acks have come: what waited for them goes on.
    pub(crate) fn turns_come(&mut self, peer: NodeId) {
        while let Some(front) = self
            .connections
            .get(&peer)
            .and_then(|c| c.io.conflicts.held.front())
            .filter(|_| !planted!(self, TurnsLost))
        {
            if self.link(peer).is_none() || self.comes_early(peer, front.volume, &front.packet) {
                return;
            }
            let Some(conn) = self.connections.get_mut(&peer) else {
                return;
            };
            let patience = conn.ping_timeout();
            let Some(next) = conn.io.conflicts.held.pop_front() else {
                return;
            };
            match conn.io.conflicts.held.is_empty() {
                true => self.timers.clear(Timer::Turn(peer)),
                false => self.timers.set(Timer::Turn(peer), self.now + patience),
            }
            self.note_number(peer, next.volume, &next.packet);
            self.take_packet(peer, Stream::Data, next.volume, next.packet, next.payload);
        }
    }

    /// `Timer::Turn`: the acks that a write waits for do not come.
    pub(crate) fn turn_timer(&mut self, peer: NodeId, over: Over) {
        let waits = self
            .connections
            .get(&peer)
            .is_some_and(|c| !c.io.conflicts.held.is_empty());
        if waits && !self.looks_again(over) {
            self.turn_is_lost(peer);
        }
    }

    fn turn_is_lost(&mut self, peer: NodeId) {
        let text = "a write came without the acks that were sent before it";
        self.log(Level::Error, Some(peer), None, text.into());
        self.drop_connection(peer, ConnState::Timeout);
    }

    fn note_number(&mut self, peer: NodeId, volume: VolumeNr, packet: &Packet) {
        if let Some(number) = number_of(packet)
            && let Some(io) = self.peer_io(volume, peer)
            && is_later(number, io.peer_seq)
        {
            io.peer_seq = number;
        }
    }

    /// A write of which acks from before it are missing. It waits for them even if it conflicts
    /// with nothing: its number would hide from the next one that they are missing.
    fn comes_early(&self, peer: NodeId, volume: VolumeNr, packet: &Packet) -> bool {
        let number = match packet {
            Packet::Data(d) => d.seq_num,
            Packet::Trim(t) | Packet::Zeroes(t) => t.seq_num,
            _ => return false,
        };
        let waits_for_verdict = self.is_legacy(peer) && !self.resolves_conflicts(peer);
        let have = self
            .devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .map_or(0, |pd| pd.io.peer_seq);
        !waits_for_verdict
            && !planted!(self, ConflictsIgnoreAcks)
            && is_later(number.wrapping_sub(1), have)
    }

    /// Own writes that overlap a range and that the peer was sent, or will be sent again, and did
    /// not answer.
    fn conflicting(
        &self,
        peer: NodeId,
        volume: VolumeNr,
        sector: Sector,
        size_bytes: u32,
    ) -> Vec<Key> {
        let mut keys = self.overlapping_own(volume, sector, size_bytes);
        keys.retain(|key| {
            self.io
                .requests
                .get(*key)
                .is_some_and(|req| req.pending.contains(peer) || req.parked.contains(peer))
        });
        keys
    }

    fn overlapping_own(&self, volume: VolumeNr, sector: Sector, size_bytes: u32) -> Vec<Key> {
        let mut keys = Vec::new();
        if let Some(device) = self.devices.get(&volume) {
            device
                .io
                .ranges
                .any_overlap(sector, size_bytes, |origin, owner| {
                    if let (Origin::LocalWrite, Owner::App(key)) = (origin, owner) {
                        keys.push(key);
                    }
                    false
                });
        }
        keys
    }

    /// What becomes of a write that has come, before it is counted anywhere.
    pub(super) fn clash(&mut self, incoming: Incoming, payload: Option<Payload>) -> Clash {
        let Incoming { peer, volume, ack } = incoming;
        if !self.both_may_write(peer) || planted!(self, ConflictsNotSeen) {
            return Clash::None;
        }
        let own = self.conflicting(peer, volume, ack.sector, ack.size_bytes);
        if own.is_empty() {
            return Clash::None;
        }
        if !self.is_legacy(peer) {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            let text = format!(
                "concurrent writes detected: both nodes write sector {} at the same time",
                ack.sector
            );
            self.protocol_error(peer, Some(volume), text);
            return Clash::Fatal;
        }
        let decides = match planted!(self, ConflictRuleReversed) {
            true => !self.resolves_conflicts(peer),
            false => self.resolves_conflicts(peer),
        };
        if !decides {
            return Clash::None;
        }
        if let Some(payload) = payload {
            self.release(payload.buf);
        }
        let end = ack.sector.end_of(ack.size_bytes);
        let covered = own.iter().any(|key| {
            self.io.requests.get(*key).is_some_and(|req| {
                req.sector <= ack.sector && end <= req.sector.end_of(req.size_bytes)
            })
        });
        self.refuse_write(peer);
        let seq_num = self.next_seq(volume, peer);
        let ack = BlockAck { seq_num, ..ack };
        let packet = match covered || planted!(self, SupersededInPart) {
            true => Packet::Superseded(ack),
            false => Packet::RetryWrite(ack),
        };
        self.send(peer, Stream::Control, volume, packet);
        Clash::Refused
    }

    /// Own writes that were not sent yet let a received one pass. Says which start anew behind it;
    /// those that wait for the activity log do so when they have it.
    pub(super) fn let_pass(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        sector: Sector,
        size_bytes: u32,
    ) -> Vec<Key> {
        if !self.both_may_write(peer) {
            return Vec::new();
        }
        let mut again = Vec::new();
        for key in self.overlapping_own(volume, sector, size_bytes) {
            let Some(req) = self.io.requests.get(key).filter(|req| !req.submitted) else {
                continue;
            };
            let waits = req.range.is_some_and(|range| {
                self.devices
                    .get(&volume)
                    .is_some_and(|d| d.io.ranges.is_waiting(range))
            });
            self.drop_range(key);
            if waits {
                again.push(key);
            }
        }
        again
    }

    /// A write that is on its way to a peer that decides: what the peer sends for the range waits
    /// for the answer.
    pub(super) fn await_verdict(&mut self, peer: NodeId, key: Key) {
        if !self.both_may_write(peer)
            || !self.is_legacy(peer)
            || self.resolves_conflicts(peer)
            || planted!(self, VerdictNotAwaited)
        {
            return;
        }
        if let Some(req) = self.io.requests.get(key)
            && let Some(range) = req.range
            && let Some(device) = self.devices.get_mut(&req.volume)
        {
            device.io.ranges.await_verdict(range);
        }
    }

    /// The peer has answered a write, or never will.
    pub(super) fn verdict_is_in(&mut self, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        let volume = req.volume;
        if let (Some(range), Some(device)) = (req.range, self.devices.get_mut(&volume)) {
            let mut ready = Vec::new();
            device.io.ranges.verdict_is_in(range, &mut ready);
            self.wake_ranges(volume, ready);
        }
    }

    /// The link is gone: no answer and no missing ack will come on it.
    pub(super) fn conflicts_end(&mut self, peer: NodeId) {
        self.timers.clear(Timer::Turn(peer));
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let held = core::mem::take(&mut conn.io.conflicts).held;
        let sent: Vec<Key> = conn.io.sent.iter().copied().collect();
        for payload in held.into_iter().filter_map(|packet| packet.payload) {
            self.release(payload.buf);
        }
        if self.both_may_write(peer) {
            for key in sent {
                self.verdict_is_in(key);
            }
        }
    }

    /// `P_SUPERSEDED`: the peer's own write replaces this one everywhere.
    pub(super) fn write_superseded(&mut self, peer: NodeId, volume: VolumeNr, ack: &BlockAck) {
        let Some(key) = self.take_back(peer, volume, ack) else {
            return;
        };
        if let Some(req) = self.io.requests.get_mut(key) {
            req.ok.insert(peer);
        }
        self.verdict_is_in(key);
        self.try_complete(key);
        self.settle_log();
        self.settle_flushes(peer);
    }

    /// `P_RETRY_WRITE`: the peer's own write comes first, then this one is made again.
    pub(super) fn write_postponed(&mut self, peer: NodeId, volume: VolumeNr, ack: &BlockAck) {
        let Some(key) = self.take_back(peer, volume, ack) else {
            return;
        };
        if let Some(req) = self.io.requests.get_mut(key) {
            req.sent.remove(peer);
            req.again = true;
        }
        self.verdict_is_in(key);
        self.write_again(key);
        self.settle_flushes(peer);
    }

    /// A write that is to be made again starts when the local disk is done with it.
    pub(super) fn write_again(&mut self, key: Key) {
        let due = |req: &&AppRequest| req.again && req.local != Local::Pending;
        if self.io.requests.get(key).filter(due).is_none() {
            return;
        }
        self.drop_range(key);
        let Some(req) = self.io.requests.remove(key) else {
            return;
        };
        // Peers of 9.x that have it wait for a word of who else has.
        let told = req.sent.iter().any(|peer| !self.is_legacy(peer));
        let told = told && !req.settled && !planted!(self, RedoneUntold);
        self.attempt_ends(key, told.then(|| req.clone()));
        let fresh = AppRequest::new(&crate::event::Request {
            id: req.id,
            volume: req.volume,
            kind: req.kind,
            sector: req.sector,
            len: req.size_bytes,
            payload: req.payload,
        });
        // Its extents stay in use: the disk has it.
        let key = self.io.requests.insert(AppRequest {
            al: req.al,
            was_written: req.was_written || req.local != Local::None,
            ..fresh
        });
        self.start_write(key);
        self.settle_log();
    }

    /// A parked write is not resent because a resync begins, and this disk is its target: the
    /// resync would replace what was written here. The write is made again.
    pub(super) fn redo_on_target(&mut self, key: Key, peer: NodeId) {
        let redo = self.io.requests.get(key).is_some_and(|req| {
            self.state.disk(req.volume) <= DiskState::Inconsistent
                && self.state.peer_device(req.volume, peer).replicates()
                && req.local != Local::None
                && !req.completed
                && req.pending.is_empty()
                && req.unsettled.is_empty()
                && req.parked.is_empty()
        });
        if redo {
            if let Some(req) = self.io.requests.get_mut(key) {
                req.again = true;
            }
            self.write_again(key);
        }
    }

    /// Takes a write that the peer refused out of what was sent to it.
    fn take_back(&mut self, peer: NodeId, volume: VolumeNr, ack: &BlockAck) -> Option<Key> {
        let key = Key(ack.block_id.0);
        let known = self.both_may_write(peer)
            && self.is_legacy(peer)
            && self.io.requests.get(key).is_some_and(|req| {
                req.volume == volume && req.sector == ack.sector && req.pending.contains(peer)
            });
        let at = self
            .connections
            .get(&peer)
            .and_then(|c| c.io.sent.iter().position(|k| *k == key));
        let (true, Some(at)) = (known, at) else {
            let text = format!("refusal of an unknown write at sector {}", ack.sector);
            self.protocol_error(peer, Some(volume), text);
            return None;
        };
        let req = self.io.requests.get_mut(key)?;
        req.pending.remove(peer);
        req.unsettled.remove(peer);
        let (epoch, size) = (req.epoch, req.size_bytes);
        let io = &mut self.connections.get_mut(&peer)?.io;
        io.sent.remove(at);
        io.sent_count -= 1;
        let place = io.settled_count + at as u64 + 1;
        let sectors = u64::from(size) / Sector::SIZE;
        io.ap_in_flight_sectors = io.ap_in_flight_sectors.saturating_sub(sectors);
        *io.conflicts.refused.entry(epoch).or_default() += 1;
        // An epoch of which nothing is left is not acked.
        match io.unacked.iter().position(|(nr, _)| *nr == epoch) {
            Some(i) => {
                io.unacked[i].1 -= 1;
                if io.unacked[i].1 == 0 {
                    io.unacked.remove(i);
                    io.conflicts.refused.remove(&epoch);
                }
            }
            None => io.epoch_writes -= 1,
        }
        for flush in self.io.flushes.clone() {
            if let Some(req) = self.io.requests.get_mut(flush) {
                for (_, count) in req
                    .waits
                    .iter_mut()
                    .filter(|(n, c)| *n == peer && *c >= place)
                {
                    *count -= 1;
                }
            }
        }
        Some(key)
    }

    /// Of the epoch that is open towards a peer something was refused: a kernel that refused it never
    /// acks it, and must not take what follows for a part of it.
    pub(super) fn open_epoch_has_refused(&self, peer: NodeId) -> bool {
        let conn = self.connections.get(&peer);
        conn.is_some_and(|c| c.io.conflicts.refused.contains_key(&c.io.epoch))
    }

    /// An ack of another epoch or number than was expected: a kernel counts refused writes in its
    /// own way (wire.md, 6.12). Says whether that explains it.
    pub(super) fn uneven_barrier_ack(&mut self, peer: NodeId, barrier: u32, set_size: u32) -> bool {
        let Some(conn) = self.connections.get(&peer) else {
            return false;
        };
        let io = &conn.io;
        let refused = |epoch: u32| io.conflicts.refused.get(&epoch).copied().unwrap_or(0);
        let Some(at) = io.unacked.iter().position(|(nr, _)| *nr == barrier) else {
            return false;
        };
        let skipped: u32 = io.unacked.iter().take(at).map(|(_, count)| *count).sum();
        let explained = io.unacked.iter().take(at).all(|(nr, _)| refused(*nr) > 0);
        let count = io.unacked[at].1;
        let fits = (count..=count + refused(barrier)).contains(&set_size);
        if !fits || !explained || !conn.is_legacy() || conn.is_lockstep() {
            return false;
        }
        // The peer forgets to say that the skipped ones are stable. They are marked.
        let lost: Vec<Key> = io.sent.iter().take(skipped as usize).copied().collect();
        for key in lost {
            if let Some(req) = self.io.requests.get_mut(key) {
                req.ok.remove(peer);
                req.in_sync.remove(peer);
                let (volume, sector, size) = (req.volume, req.sector, req.size_bytes);
                self.mark_towards(volume, peer, sector, size);
            }
        }
        if let Some(conn) = self.connections.get_mut(&peer) {
            for (epoch, _) in conn.io.unacked.drain(..=at) {
                conn.io.conflicts.refused.remove(&epoch);
            }
            conn.io.barrier_since = self.now;
        }
        self.settle_sent(peer, skipped + count);
        true
    }

    /// The epoch is acked: nothing can be refused in it any more.
    pub(super) fn epoch_is_acked(&mut self, peer: NodeId, epoch: u32) {
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.conflicts.refused.remove(&epoch);
        }
    }
}

/// The number that a packet carries (wire.md, 6.4).
fn number_of(packet: &Packet) -> Option<u32> {
    match packet {
        Packet::Data(d) => Some(d.seq_num),
        Packet::Trim(t) | Packet::Zeroes(t) => Some(t.seq_num),
        Packet::RecvAck(a)
        | Packet::WriteAck(a)
        | Packet::WriteAckInSync(a)
        | Packet::NegAck(a)
        | Packet::Superseded(a)
        | Packet::RetryWrite(a)
        | Packet::RsWriteAck(a)
        | Packet::RsNegAck(a)
        | Packet::RsIsInSync(a)
        | Packet::RsCancel(a)
        | Packet::RsCancelAhead(a)
        | Packet::NegDreply(a)
        | Packet::NegRsDreply(a)
        | Packet::OvResult(a) => Some(a.seq_num),
        Packet::OvResultId(r) => Some(r.seq_num),
        _ => None,
    }
}

/// Numbers wrap around.
fn is_later(number: u32, than: u32) -> bool {
    number.wrapping_sub(than).cast_signed() > 0
}
