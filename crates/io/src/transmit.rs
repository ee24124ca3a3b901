//! The sending half of a stream: packets of a turn gather in one list and leave in one call.

use std::collections::VecDeque;
use std::convert::Infallible;

use lockstep_core::event::Tag;
use lockstep_core::time::Instant;
use lockstep_format::units::VolumeNr;
use lockstep_format::wire::{self, Dialect, Packet};

use crate::pool::BufRef;
use crate::ring::SendList;

/// Queue, marks and progress of a stream's sends.
#[derive(Debug, Default)]
pub struct Transmitter {
    filling: SendList,
    /// An empty list, kept for its memory.
    spare: Option<SendList>,
    in_flight: bool,
    /// Bytes ever queued and ever sent.
    queued: u64,
    sent: u64,
    /// Tags and the byte count at which they are due, ascending.
    marks: VecDeque<(u64, Tag)>,
    /// Since when bytes wait without any progress.
    waiting_since: Option<Instant>,
}

impl Transmitter {
    /// Queues a packet with its payload.
    pub fn push(
        &mut self,
        now: Instant,
        packet: &Packet,
        volume: VolumeNr,
        dialect: &Dialect,
        payload: Option<(BufRef, usize, usize)>,
        want_sent: Option<Tag>,
    ) {
        let before = self.filling.left();
        let Ok(()) = self.filling.push_head(|head| -> Result<(), Infallible> {
            wire::encode(packet, volume, dialect, head);
            Ok(())
        });
        if let Some((buf, start, len)) = payload {
            self.filling.push_buf(buf, start, len);
        }
        self.queued += (self.filling.left() - before) as u64;
        self.waiting_since.get_or_insert(now);
        if let Some(tag) = want_sent {
            self.marks.push_back((self.queued, tag));
        }
    }

    /// The list to send now; `None` if one is on its way or there is nothing.
    pub fn take(&mut self) -> Option<SendList> {
        if self.in_flight || self.filling.left() == 0 {
            return None;
        }
        self.in_flight = true;
        Some(std::mem::replace(
            &mut self.filling,
            self.spare.take().unwrap_or_default(),
        ))
    }

    /// A call sent `count` bytes. Gives the list back if it is not empty.
    pub fn sent(&mut self, now: Instant, mut list: SendList, count: usize) -> Option<SendList> {
        list.advance(count);
        self.sent += count as u64;
        self.waiting_since = (self.sent < self.queued).then_some(now);
        if list.left() > 0 {
            return Some(list);
        }
        list.clear();
        self.spare = Some(list);
        self.in_flight = false;
        None
    }

    /// The list was given out in parts, and none is left of it.
    pub fn given_out(&mut self, mut list: SendList) {
        list.clear();
        self.spare = Some(list);
        self.in_flight = false;
    }

    /// Parts of a list went on, and the first `count` unsent bytes have all left.
    pub fn progress(&mut self, now: Instant, count: u64) {
        self.sent += count;
        self.waiting_since = (self.sent < self.queued).then_some(now);
    }

    /// Gives back the memory that past packets needed.
    pub fn rest(&mut self) {
        self.spare = None;
        if self.filling.left() == 0 {
            self.filling = SendList::default();
        }
    }

    /// The next tag whose bytes have all left.
    pub fn next_sent(&mut self) -> Option<Tag> {
        let (due, tag) = *self.marks.front()?;
        if due > self.sent {
            return None;
        }
        self.marks.pop_front();
        Some(tag)
    }

    /// All tags, at the end of the stream.
    pub fn take_marks(&mut self) -> impl Iterator<Item = Tag> + use<> {
        std::mem::take(&mut self.marks)
            .into_iter()
            .map(|(_, tag)| tag)
    }

    /// Bytes that wait or are on their way.
    pub fn queued_bytes(&self) -> u64 {
        self.queued - self.sent
    }

    /// Since when bytes wait without progress.
    pub fn waiting_since(&self) -> Option<Instant> {
        self.waiting_since
    }
}

#[cfg(test)]
mod tests {
    use lockstep_core::event::Tag;
    use lockstep_core::time::Instant;
    use lockstep_format::units::VolumeNr;
    use lockstep_format::wire::{Dialect, Packet};

    use super::Transmitter;

    #[test]
    fn tags_are_due_when_their_last_byte_has_left() {
        let mut transmitter = Transmitter::default();
        let ping = |transmitter: &mut Transmitter, tag| {
            let dialect = Dialect::INITIAL;
            let now = Instant(5);
            transmitter.push(now, &Packet::Ping, VolumeNr::NONE, &dialect, None, tag);
        };
        ping(&mut transmitter, Some(Tag(1)));
        ping(&mut transmitter, None);
        ping(&mut transmitter, Some(Tag(2)));
        assert_eq!(transmitter.waiting_since(), Some(Instant(5)));
        let list = transmitter.take().unwrap();
        assert_eq!(list.left(), 24);
        // What comes while a list is on its way goes with the next one.
        ping(&mut transmitter, Some(Tag(3)));
        assert!(transmitter.take().is_none());
        let list = transmitter.sent(Instant(6), list, 7).unwrap();
        assert_eq!(transmitter.next_sent(), None);
        assert_eq!(transmitter.waiting_since(), Some(Instant(6)));
        let list = transmitter.sent(Instant(7), list, 1).unwrap();
        assert_eq!(
            (transmitter.next_sent(), transmitter.next_sent()),
            (Some(Tag(1)), None)
        );
        assert!(transmitter.sent(Instant(8), list, 16).is_none());
        assert_eq!(transmitter.next_sent(), Some(Tag(2)));
        assert_eq!(transmitter.queued_bytes(), 8);
        let list = transmitter.take().unwrap();
        assert!(transmitter.sent(Instant(9), list, 8).is_none());
        assert_eq!(
            (transmitter.next_sent(), transmitter.waiting_since()),
            (Some(Tag(3)), None)
        );
    }
}
