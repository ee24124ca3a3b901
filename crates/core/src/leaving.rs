//! A peer that disconnects from an automatic Primary (semantics.md, 7.3).
//!
//! Who leaves a Primary is Outdated. A kernel is told of each close of its device and is Secondary before the next
//! command runs anywhere; a front end of this project may learn of it some ten milliseconds later. So the driver looks for users
//! before this node agrees, and the peer tries again meanwhile, as it does when two changes meet.

use lockstep_format::units::NodeId;
use lockstep_format::wire::{DiskState, Role};

use crate::event::Output;
use crate::resource::{Pending, Resource};
use crate::time::{Duration, Instant};

/// By this name the driver is asked to close the volumes that nobody uses any more. It is no handler of the configuration;
/// a driver that can do it names it with those.
pub const CLOSE_UNUSED: &str = "close-unused";

/// How long a demotion has time, once the driver has looked.
const DEMOTION: Duration = Duration::from_secs(1);
/// How long a look may take.
const LONGEST: Duration = Duration::from_secs(5);
/// How long a look counts for the peer that it was made for.
const FRESH: Duration = Duration::from_secs(3);

/// What is known of the users of an automatic Primary.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Look {
    #[default]
    None,
    /// The driver looks since this moment, for this peer.
    Runs(Instant, NodeId),
    /// It had looked at this moment, for this peer.
    Done(Instant, NodeId),
}

impl Resource {
    /// The peer is to try again with its disconnect: it may be that nobody uses this Primary any more.
    pub(crate) fn puts_leaving_off(&mut self, peer: NodeId) -> bool {
        let mut disks = self
            .state
            .devices
            .values()
            .filter_map(|d| d.peers.get(&peer));
        let loses = disks.any(|p| p.disk > DiskState::Outdated);
        let looks = self.options.handlers.iter().any(|h| h == CLOSE_UNUSED);
        if let Look::Runs(since, _) = self.leaving {
            // One that does not come to an end keeps nobody here.
            return self.now < since + LONGEST;
        }
        // A look counts once: the device may be used and closed again before the next one.
        let look = core::mem::take(&mut self.leaving);
        if self.state.role != Role::Primary || self.explicit_primary || !loses || !looks {
            return false;
        }
        if let Look::Done(at, asked) = look {
            let demotes = self.opens.demote_at.is_some() || self.is_demoting();
            if demotes && self.now < at + DEMOTION {
                self.leaving = look;
                return true;
            }
            if asked == peer && self.now < at + FRESH {
                return false;
            }
        }
        self.leaving = Look::Runs(self.now, peer);
        let tag = self.tags.insert(Pending::CloseUnused);
        self.output(Output::Handler {
            tag,
            name: CLOSE_UNUSED,
            volume: None,
            peer: None,
        });
        true
    }

    /// Volumes that nobody used are closed.
    pub(crate) fn unused_closed(&mut self) {
        if let Look::Runs(_, peer) = self.leaving {
            self.leaving = Look::Done(self.now, peer);
        }
    }
}
