//! All time-outs of a resource in one table, so that "which timers run?" has one answer.

use alloc::collections::{BTreeMap, BTreeSet};

use lockstep_format::units::{NodeId, VolumeNr};

use crate::second_look::Over;
use crate::time::Instant;

/// A time-out. Each runs at most once at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    /// Try to connect again.
    Reconnect(NodeId),
    /// The handshake's next packet is overdue.
    Handshake(NodeId),
    /// Start the connect two-phase commit.
    ConnectTwopc(NodeId),
    /// Present volumes again that were added to the connection.
    Added(NodeId),
    /// Send a ping, or the answer is overdue.
    Ping(NodeId),
    /// The oldest request towards the peer is too old.
    RequestAge(NodeId),
    /// The peer has not taken a new generation that waits for it.
    Follower(NodeId),
    /// The two-phase commit takes too long.
    Twopc,
    /// Try the two-phase commit again.
    TwopcRetry,
    /// A command waits for something to settle.
    CommandRetry,
    /// Start the empty two-phase commit.
    EmptyTwopc,
    /// Pings sent before writing a new current UUID are overdue.
    NewUuidPings,
    /// Write dirty metadata.
    MetaSync(VolumeNr),
    /// Send the pending peer ack.
    PeerAck,
    /// The resync's next step as target.
    ResyncStep(VolumeNr, NodeId),
    /// The next step of an online verify as its driver.
    VerifyStep(VolumeNr, NodeId),
    /// Resync requests of the peer make way for the application.
    SourcePace(VolumeNr, NodeId),
    /// The target of a full sync, a kernel, has not said that it is one.
    ResyncStart(VolumeNr, NodeId),
    /// Write changed bitmap pages.
    BitmapWrite(VolumeNr),
    /// A queued flush of received resync data.
    ResyncFlush(VolumeNr),
    /// Ask third nodes about marks that a resync with them left behind.
    LeftMarks(VolumeNr),
    /// The congestion towards the peer may be over.
    AheadEnd(NodeId),
    /// Compare again with a peer that is not equal.
    LookAgain(VolumeNr),
    /// The oldest operation of the volume's disk may be overdue.
    DiskTimeout(VolumeNr),
    /// Resync requests or verifies wait for writes of a node, and none come.
    WriteAwaited(NodeId),
    /// Acks that a peer's write waits for do not come.
    Turn(NodeId),
}

/// The running time-outs.
#[derive(Debug, Default)]
pub struct Timers {
    at: BTreeMap<Timer, Instant>,
    order: BTreeSet<(Instant, Timer)>,
    /// Those that run for a second look.
    second: BTreeSet<Timer>,
}

impl Timers {
    /// Starts the timer, or moves it if it runs.
    pub fn set(&mut self, timer: Timer, at: Instant) {
        if let Some(old) = self.at.insert(timer, at) {
            self.order.remove(&(old, timer));
        }
        self.order.insert((at, timer));
        self.second.remove(&timer);
    }

    /// The same for a second look at what was due before.
    pub(crate) fn set_second_look(&mut self, timer: Timer, at: Instant) {
        self.set(timer, at);
        self.second.insert(timer);
    }

    /// Starts the timer unless it runs already for an earlier time.
    pub fn set_earliest(&mut self, timer: Timer, at: Instant) {
        if self.at.get(&timer).is_none_or(|old| *old > at) {
            self.set(timer, at);
        }
    }

    /// Stops the timer.
    pub fn clear(&mut self, timer: Timer) {
        if let Some(old) = self.at.remove(&timer) {
            self.order.remove(&(old, timer));
            self.second.remove(&timer);
        }
    }

    /// The timer runs.
    pub fn is_set(&self, timer: Timer) -> bool {
        self.at.contains_key(&timer)
    }

    /// Those that run.
    pub fn running(&self) -> impl Iterator<Item = Timer> + '_ {
        self.at.keys().copied()
    }

    /// When the next one is due.
    pub fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Takes one that is due.
    pub fn pop_due(&mut self, now: Instant) -> Option<Over> {
        let (at, timer) = *self.order.first()?;
        if at > now {
            return None;
        }
        self.order.remove(&(at, timer));
        self.at.remove(&timer);
        let is_second = self.second.remove(&timer);
        Some(Over {
            timer,
            at,
            is_second,
        })
    }

    /// Stops all timers that belong to a connection.
    pub fn clear_peer(&mut self, peer: NodeId) {
        for timer in [
            Timer::Reconnect(peer),
            Timer::Handshake(peer),
            Timer::ConnectTwopc(peer),
            Timer::Added(peer),
            Timer::Ping(peer),
            Timer::RequestAge(peer),
            Timer::Follower(peer),
            Timer::AheadEnd(peer),
        ] {
            self.clear(timer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_timer_fires_once_at_its_new_time() {
        let mut timers = Timers::default();
        timers.set(Timer::Twopc, Instant(10));
        timers.set(Timer::PeerAck, Instant(15));
        timers.set(Timer::Twopc, Instant(20));
        assert_eq!(timers.next(), Some(Instant(15)));
        let due = |timer, at, is_second| {
            let at = Instant(at);
            Some(Over {
                timer,
                at,
                is_second,
            })
        };
        assert_eq!(timers.pop_due(Instant(30)), due(Timer::PeerAck, 15, false));
        assert_eq!(timers.pop_due(Instant(30)), due(Timer::Twopc, 20, false));
        assert_eq!(timers.pop_due(Instant(30)), None);
        assert_eq!(timers.next(), None);
        timers.set_second_look(Timer::Twopc, Instant(40));
        assert_eq!(timers.pop_due(Instant(40)), due(Timer::Twopc, 40, true));
        timers.set_second_look(Timer::Twopc, Instant(50));
        timers.set(Timer::Twopc, Instant(60));
        assert_eq!(timers.pop_due(Instant(60)), due(Timer::Twopc, 60, false));
    }
}
