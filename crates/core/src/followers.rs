//! Peers that take a new generation before the Primary does. Requests wait for them, so they have no longer than for a
//! write: one whose disk hangs would keep all of them waiting.

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::NodeId;
use lockstep_format::wire::ConnState;

use crate::report::Level;
use crate::resource::Resource;
use crate::second_look::Over;
use crate::timers::Timer;
use crate::uuid_spread::SpreadStep;

impl Resource {
    /// A new generation was announced.
    pub(crate) fn watch_followers(&mut self) {
        for peer in self.late_followers() {
            if let Some(limit) = self.answer_limit(peer)
                && !planted!(self, FollowersNeverLate)
            {
                self.timers.set(Timer::Follower(peer), self.now + limit);
            }
        }
    }

    /// `Timer::Follower`.
    pub(crate) fn follower_timer(&mut self, peer: NodeId, over: Over) {
        let limit = self.answer_limit(peer);
        if let Some(limit) = limit.filter(|_| self.late_followers().contains(&peer))
            && !self.looks_again(over)
        {
            let text = format!(
                "the peer did not take a new generation within {} ms",
                limit.as_millis()
            );
            self.log(Level::Error, Some(peer), None, text);
            self.drop_connection(peer, ConnState::Timeout);
        }
    }

    fn late_followers(&self) -> Vec<NodeId> {
        let new = self.new_uuid.iter();
        let plans = new.flat_map(|new| new.plans.iter().map(|plan| (new.step, plan)));
        plans
            .flat_map(|(step, (volume, plan))| {
                let follows = |peer: &NodeId| {
                    let known = self.peer_uuids(*volume, *peer);
                    !known.is_some_and(|u| u.current.same_generation(plan.uuid))
                };
                let late: Vec<NodeId> = match step {
                    SpreadStep::Confirm => plan.confirm.iter().filter(follows).collect(),
                    SpreadStep::Writing => plan.voters.iter().collect(),
                    SpreadStep::Pings | SpreadStep::Noting => Vec::new(),
                };
                late
            })
            .collect()
    }
}
