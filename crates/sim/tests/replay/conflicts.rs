//! Two Primaries that write the same blocks. Whether two writes met is not on the wire, since one begins
//! before it is sent; but the answers tell. A write that was superseded met one of the captured node
//! that was under way, and one that was written met none, whatever the order of the two streams in the capture.

use lockstep_format::units::Sector;
use lockstep_format::wire::Packet;
use lockstep_format::wire::packet::{BlockAck, Data};

use crate::capture::{Item, Seen, What};
use crate::compare::Replay;

/// What the captured node and its peer have under way.
#[derive(Default)]
pub(crate) struct Conflicts {
    /// The captured node decides which of two writes counts; the other one waits for its word.
    pub(crate) decides: bool,
    /// Own writes without an answer: captured block id and range.
    own: Vec<(u64, Sector, u32)>,
    /// Own writes that began before they are in the capture, by number.
    begun: Vec<u32>,
    /// Packets of the peer that came before their place in the capture.
    fed: Vec<(u64, u32)>,
}

impl Conflicts {
    /// Whether a write began already. It is under way from here on.
    pub(crate) fn began(&mut self, seen: &Seen) -> bool {
        let Packet::Data(data) = &seen.packet else {
            return false;
        };
        let begun = self.begun.iter().position(|number| *number == data.seq_num);
        match begun {
            Some(at) => drop(self.begun.swap_remove(at)),
            None => self.own.push(entry(data)),
        }
        begun.is_some()
    }

    fn acked(&mut self, packet: &Packet) {
        if let Packet::WriteAck(ack) | Packet::Superseded(ack) = packet {
            self.own.retain(|(id, _, _)| *id != ack.block_id.0);
        }
    }

    fn meets(&self, data: &Data) -> Option<u64> {
        let overlaps = |(_, sector, len): &&(u64, Sector, u32)| {
            *sector < data.sector.end_of(data.payload_len) && data.sector < sector.end_of(*len)
        };
        self.own.iter().find(overlaps).map(|(id, _, _)| *id)
    }
}

impl Replay<'_> {
    fn decides(&self) -> bool {
        self.both_write() && self.conflicts.decides
    }

    /// A packet of a peer, in the order in which the kernel must have taken it.
    pub(crate) fn feed_in_order(&mut self, seen: &Seen, ahead: &[Item]) {
        if let Some(key) = key(&seen.packet)
            && let Some(at) = self.conflicts.fed.iter().position(|fed| *fed == key)
        {
            self.conflicts.fed.swap_remove(at);
            return;
        }
        match &seen.packet {
            Packet::Data(data) if self.decides() => self.meet(data, seen, ahead),
            Packet::WriteAck(ack) if self.decides() => self.overtaken(ack, seen, ahead),
            _ => {}
        }
        self.conflicts.acked(&seen.packet);
        self.feed(seen, ahead);
    }

    /// A write of the peer: what it met, and what not, is settled first.
    fn meet(&mut self, data: &Data, seen: &Seen, ahead: &[Item]) {
        // Acks that its sender sent before it came before it: the receiver waits for them.
        let sent_before = |ack: &BlockAck| is_later(data.seq_num, ack.seq_num);
        while self.feed_ack(seen, ahead, sent_before) {}
        match (answer(seen, data, ahead), self.conflicts.meets(data)) {
            (Some(true), None) => self.begin_met(data, seen, ahead),
            (Some(false), Some(id)) => {
                self.feed_ack(seen, ahead, |ack| ack.block_id.0 == id);
            }
            _ => {}
        }
    }

    /// Feeds the next ack of this kind, if there is one.
    fn feed_ack(
        &mut self,
        seen: &Seen,
        ahead: &[Item],
        wanted: impl Fn(&BlockAck) -> bool,
    ) -> bool {
        let next = ahead.iter().position(|item| match &item.what {
            What::Packet(s) if s.to == seen.to && s.session == seen.session => match &s.packet {
                Packet::WriteAck(ack) => {
                    wanted(ack) && !self.conflicts.fed.contains(&(ack.block_id.0, ack.seq_num))
                }
                _ => false,
            },
            _ => false,
        });
        let Some(at) = next else { return false };
        let What::Packet(ack) = &ahead[at].what else {
            return false;
        };
        self.conflicts.fed.extend(key(&ack.packet));
        self.conflicts.acked(&ack.packet);
        self.feed(ack, &ahead[at..]);
        true
    }

    /// The next write of the captured node to these blocks began already.
    fn begin_met(&mut self, data: &Data, seen: &Seen, ahead: &[Item]) {
        let met = ahead.iter().find_map(|item| match &item.what {
            What::Packet(own) if own.from == seen.to && own.session == seen.session => {
                match &own.packet {
                    Packet::Data(d) if overlap(d, data) => Some((d, own)),
                    _ => None,
                }
            }
            _ => None,
        });
        if let Some((d, own)) = met {
            self.conflicts.begun.push(d.seq_num);
            self.conflicts.own.push(entry(d));
            self.node.write(d.sector, own.payload.clone(), false);
        }
    }

    /// An ack that its sender sent behind a write which met the acknowledged one: it came later.
    fn overtaken(&mut self, ack: &BlockAck, seen: &Seen, ahead: &[Item]) {
        let write = ahead.iter().position(|item| match &item.what {
            What::Packet(s) if s.to == seen.to && s.session == seen.session => match &s.packet {
                Packet::Data(d) => {
                    is_later(ack.seq_num, d.seq_num)
                        && !self.conflicts.fed.contains(&(d.block_id.0, d.seq_num))
                        && self.conflicts.meets(d) == Some(ack.block_id.0)
                        && answer(s, d, &ahead[1..]) == Some(true)
                }
                _ => false,
            },
            _ => false,
        });
        if let Some(at) = write
            && let What::Packet(write) = &ahead[at].what
        {
            self.conflicts.fed.extend(key(&write.packet));
            self.feed(write, &ahead[at..]);
        }
    }
}

/// Whether the captured node answered that a write is superseded.
fn answer(seen: &Seen, data: &Data, ahead: &[Item]) -> Option<bool> {
    ahead.iter().find_map(|item| match &item.what {
        What::Packet(s) if s.from == seen.to && s.session == seen.session => match &s.packet {
            Packet::WriteAck(ack) if ack.block_id == data.block_id => Some(false),
            Packet::Superseded(ack) if ack.block_id == data.block_id => Some(true),
            _ => None,
        },
        _ => None,
    })
}

fn overlap(a: &Data, b: &Data) -> bool {
    a.sector < b.sector.end_of(b.payload_len) && b.sector < a.sector.end_of(a.payload_len)
}

fn entry(data: &Data) -> (u64, Sector, u32) {
    (data.block_id.0, data.sector, data.payload_len)
}

fn is_later(number: u32, than: u32) -> bool {
    number.wrapping_sub(than).cast_signed() > 0
}

/// What tells a write or an ack from others: a kernel uses its block ids again.
fn key(packet: &Packet) -> Option<(u64, u32)> {
    match packet {
        Packet::Data(data) => Some((data.block_id.0, data.seq_num)),
        Packet::WriteAck(ack) => Some((ack.block_id.0, ack.seq_num)),
        _ => None,
    }
}
