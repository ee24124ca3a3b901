//! Bounds of what a world does and keeps: a core that runs in circles, or that fills its queues,
//! fails with a name before the machine's memory is full.

use crate::world::{SECOND, World, name};

/// Events of one second that requests and timers may need, without resyncs.
const EVENTS_MOST: u64 = 300_000;
/// Events that may be under way in a world.
const PENDING_MOST: usize = 100_000;
/// Packets that may wait on one stream.
const PACKETS_MOST: usize = 50_000;

impl World {
    /// Nobody runs in circles, and nothing piles up: the events of one second have a bound, and so
    /// has what is on its way.
    pub(crate) fn check_pace(&mut self) {
        let second = self.now / SECOND;
        if second != self.second.0 {
            self.second = (second, self.steps);
        }
        if !self.steps.is_multiple_of(1024) || self.violation.is_some() {
            return;
        }
        let blocks = u64::from(self.config.resync_max_kib_s) / 4;
        let pairs = (self.nodes.len() * (self.nodes.len() - 1)) as u64;
        let most = EVENTS_MOST + pairs * u64::from(self.config.volumes) * blocks * 16;
        if self.steps - self.second.1 > most {
            self.fail(format!(
                "more than {most} events in one second: somebody runs in circles"
            ));
            return;
        }
        if self.heap.len() > PENDING_MOST {
            self.fail(format!(
                "{} timers, disk operations and inputs are under way (at most {PENDING_MOST} are right)",
                self.heap.len()
            ));
            return;
        }
        let wires = self.links.values().flat_map(|link| {
            let sides = link.wires.iter().enumerate();
            sides.flat_map(move |(side, wires)| wires.iter().map(move |w| (link.ends[side], w)))
        });
        let longest = wires.max_by_key(|(_, wire)| wire.queue.len());
        if let Some((node, len)) = longest.map(|(node, wire)| (node, wire.queue.len()))
            && len > PACKETS_MOST
        {
            self.fail(format!(
                "{len} packets of {} wait on one stream (at most {PACKETS_MOST} are right)",
                name(node)
            ));
        }
    }
}
