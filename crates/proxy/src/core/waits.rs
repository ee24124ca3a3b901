//! For what the bytes at the front of a connection's queue wait on their way to the peer, and for
//! how long each cause has held them up.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::LinkId;
use super::engine::{Engine, is_live};
use super::link::{CARRIER_QUEUE, StreamPhase};
use super::stream::{Body, Class};
use super::time::Instant;

/// Why the first byte that no carrier has is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The way to the peer proxy is lost, or has no carrier for data.
    Session,
    /// The peer has no room: its DRBD takes less than comes.
    Window,
    /// `bwlimit`, `schedule`, `--rate`, or the turn of another connection.
    Shaping,
    /// No worker, or one that is not done.
    Codec,
    /// To be read from the spill disk.
    Spill,
    /// The carriers are full: the line takes no more.
    Line,
}

/// Time by cause, in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waits {
    pub(crate) session_us: u64,
    pub(crate) window_us: u64,
    pub(crate) shaping_us: u64,
    pub(crate) codec_us: u64,
    pub(crate) spill_us: u64,
    pub(crate) line_us: u64,
}

impl Waits {
    /// Adds what one cause has taken.
    pub(crate) fn add(&mut self, wait: Wait, time: Duration) {
        let sum = match wait {
            Wait::Session => &mut self.session_us,
            Wait::Window => &mut self.window_us,
            Wait::Shaping => &mut self.shaping_us,
            Wait::Codec => &mut self.codec_us,
            Wait::Spill => &mut self.spill_us,
            Wait::Line => &mut self.line_us,
        };
        *sum += time.as_micros() as u64;
    }

    /// Every cause with its name.
    pub(crate) fn each(&self) -> [(&'static str, u64); 6] {
        [
            ("session", self.session_us),
            ("window", self.window_us),
            ("shaping", self.shaping_us),
            ("codec", self.codec_us),
            ("spill", self.spill_us),
            ("line", self.line_us),
        ]
    }
}

impl Engine {
    /// Looks at what the connection waits for now; a change closes the time of the cause before.
    pub(crate) fn note_wait(&mut self, now: Instant, id: LinkId) {
        let wait = self.wait_of(id);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if link.waiting.map(|(before, _)| before) == wait {
            return;
        }
        if let Some((before, since)) = link.waiting {
            let time = now.since(since);
            link.counters.send_blocked.add(before, time);
        }
        link.waiting = wait.map(|wait| (wait, now));
    }

    fn wait_of(&mut self, id: LinkId) -> Option<Wait> {
        let link = self.links.get_mut(&id)?;
        let carriers = || link.bulk.iter().filter_map(|id| self.carriers.get(id));
        if carriers().any(|carrier| carrier.wants_write) {
            return Some(Wait::Shaping);
        }
        let way = is_live(link) && !link.bulk.is_empty();
        let full = carriers().all(|carrier| carrier.queued_bytes >= CARRIER_QUEUE);
        for stream in link.streams.values_mut() {
            if stream.class == Class::Control || stream.phase != StreamPhase::Open {
                continue;
            }
            let Some(first) = stream.tx.unsent(1).first().copied() else {
                continue;
            };
            let window_end = stream.tx.window_end;
            let Some(chunk) = stream.tx.chunk(first) else {
                continue;
            };
            return match &chunk.body {
                _ if !way => Some(Wait::Session),
                _ if full => Some(Wait::Line),
                _ if chunk.offset + u64::from(chunk.raw_len) > window_end => Some(Wait::Window),
                Body::Raw(_) | Body::Encoding => Some(Wait::Codec),
                Body::Spilled(..) | Body::SpillIn(..) => Some(Wait::Spill),
                Body::Ready(_) | Body::SpillOut(_) | Body::Fin => None,
            };
        }
        None
    }
}
