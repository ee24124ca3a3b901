//! How long a peer may owe the answer to a write or a barrier (`ko-count` × `timeout`).

use alloc::format;

use lockstep_format::units::NodeId;
use lockstep_format::wire::ConnState;

use crate::resource::Resource;
use crate::second_look::Over;
use crate::time::Duration;
use crate::timers::Timer;

impl Resource {
    /// How long a write or a barrier may be without an answer; none if for ever.
    pub(crate) fn answer_limit(&self, peer: NodeId) -> Option<Duration> {
        let ko = if planted!(self, KoCountIsOne) {
            1
        } else {
            u64::MAX
        };
        let net = &self.connections.get(&peer)?.net;
        let limit = Duration::from_tenths(u64::from(net.timeout_tenths))
            .times(u64::from(net.ko_count).min(ko));
        (limit.0 > 0).then_some(limit)
    }

    pub(super) fn watch_age(&mut self, peer: NodeId) {
        if let Some(limit) = self.answer_limit(peer)
            && !self.timers.is_set(Timer::RequestAge(peer))
        {
            self.timers.set(Timer::RequestAge(peer), self.now + limit);
        }
    }

    /// `Timer::RequestAge`: drops a connection whose oldest write or barrier is without an answer for
    /// `ko-count` × `timeout`.
    pub(crate) fn check_request_age(&mut self, peer: NodeId, over: Over) {
        let (Some(limit), Some(conn)) = (self.answer_limit(peer), self.connections.get(&peer))
        else {
            return;
        };
        if conn.link.is_none() || planted!(self, KoCountIgnored) {
            return;
        }
        let io = &conn.io;
        let oldest = io.sent.front().and_then(|key| self.io.requests.get(*key));
        let (what, since) = match oldest.filter(|req| req.pending.contains(peer)) {
            Some(oldest) => ("write", oldest.submitted_at.max(io.resent_at)),
            None if !io.unacked.is_empty() => ("barrier", io.barrier_since),
            // An epoch that is still open, for instance because another peer has not answered, is
            // not this one's fault.
            None => return,
        };
        let due = since + limit;
        if due <= self.now {
            if self.looks_again(over) {
                return;
            }
            let text = format!("a {what} is without an answer for {} ms", limit.as_millis());
            self.log(crate::report::Level::Error, Some(peer), None, text);
            self.drop_connection(peer, ConnState::Timeout);
        } else if !planted!(self, AgeTimerStops) {
            self.timers.set(Timer::RequestAge(peer), due);
        }
    }
}
