//! Answers that came before their question: a kernel that asked sooner than the core does. They
//! wait for the question, and what is behind them in their stream waits, too.

use std::collections::VecDeque;

use lockstep_format::wire::Packet;

use crate::capture::{Item, Seen};
use crate::compare::Replay;

/// A packet that waits, what follows it in the capture, and for how long.
pub(crate) struct Early<'a> {
    pub(crate) seen: &'a Seen,
    ahead: &'a [Item],
    until_ns: u64,
}

/// How long an answer waits for its question.
const PATIENCE_NS: u64 = 500_000_000;

impl<'a> Replay<'a> {
    /// Feeds a packet, or lets it wait.
    pub(crate) fn feed_or_wait(&mut self, seen: &'a Seen, ahead: &'a [Item], now: u64) {
        let behind = |early: &Early<'_>| {
            (early.seen.session, early.seen.stream) == (seen.session, seen.stream)
        };
        if self.early.iter().any(behind) || !self.was_asked(seen) {
            self.early.push_back(Early {
                seen,
                ahead,
                until_ns: now + PATIENCE_NS,
            });
            return;
        }
        self.feed_in_order(seen, ahead);
    }

    /// Whether a packet is no answer, or one to something that the core has sent.
    fn was_asked(&self, seen: &Seen) -> bool {
        match &seen.packet {
            Packet::TwopcYes(r) | Packet::TwopcNo(r) | Packet::TwopcRetry(r) => {
                r.initiator_node_id != self.me || self.tids.contains_key(&r.tid)
            }
            _ => true,
        }
    }

    /// Feeds what does not have to wait any more.
    pub(crate) fn feed_early(&mut self, now: u64) {
        let mut waiting = Vec::new();
        for early in std::mem::take(&mut self.early) {
            let stream = (early.seen.session, early.seen.stream);
            let behind = waiting.contains(&stream);
            if behind || (now < early.until_ns && !self.was_asked(early.seen)) {
                waiting.push(stream);
                self.early.push_back(early);
            } else {
                self.feed_in_order(early.seen, early.ahead);
            }
        }
    }
}

/// What waits.
pub(crate) type Waiting<'a> = VecDeque<Early<'a>>;
