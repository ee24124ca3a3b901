//! Shares of the daemon's rate. Each connection has a count of the bulk bytes that it was given,
//! divided by its weight; while the rate is short, who is furthest behind goes first, and nobody
//! gets further ahead of one that waits than a quantum. Who had nothing to send saves up little.

use std::time::Duration;

use super::LinkId;
use super::engine::{Engine, WRITE_MIN};
use super::time::Instant;

/// How far, in bytes of weight one, a connection may be ahead of another that waits.
const QUANTUM: u64 = 64 << 10;
/// How far a connection may have fallen behind while it had nothing to send.
const CREDIT: u64 = 4 * QUANTUM;
/// Parts of a byte, so that nothing is lost by dividing.
const SCALE: u64 = 1 << 8;
/// How long one that was told to write is waited for. It asks at once, unless its socket is full.
const WOKEN: Duration = Duration::from_millis(5);
/// Greatest weight of a connection.
pub(crate) const WEIGHT_MAX: u32 = 100;

impl Engine {
    /// Whether the connection may use the daemon's rate before the others that wait for it.
    pub(crate) fn has_turn(&mut self, now: Instant, id: LinkId) -> bool {
        if self.bucket.rate() == 0 {
            return true;
        }
        let floor = self.most_served.saturating_sub(CREDIT * SCALE);
        let Some(own) = self.links.get(&id).map(|link| link.served.max(floor)) else {
            return true;
        };
        let carriers = &self.carriers;
        self.links.iter_mut().all(|(other, link)| {
            let ahead = own > link.served.max(floor) + QUANTUM * SCALE;
            let mut bulk = link.bulk.iter().filter_map(|id| carriers.get(id));
            *other == id
                || !ahead
                || !bulk.any(|carrier| {
                    let woken = carrier.woken.is_some_and(|at| now.since(at) < WOKEN);
                    carrier.wants_write || woken
                })
                // Its own rate holds it back, not the others.
                || link.bucket.available(now) < WRITE_MIN
        })
    }

    /// Counts what a bulk carrier was given.
    pub(crate) fn count_served(&mut self, id: LinkId, bytes: usize) {
        let floor = self.most_served.saturating_sub(CREDIT * SCALE);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let part = bytes as u64 * SCALE / u64::from(link.config.options.weight.max(1));
        link.served = link.served.max(floor) + part;
        self.most_served = self.most_served.max(link.served);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::core::config::{DaemonOptions, LinkConfig, LinkOptions};
    use crate::core::link::{Carrier, CarrierState};
    use crate::core::shaper::Schedule;
    use crate::core::{CarrierId, CarrierKind, Input, Output};

    const RATE: u64 = 1_000_000;

    /// An engine with connections of these weights and own rates, each with a carrier that always
    /// has something to write.
    struct World {
        engine: Engine,
        carriers: Vec<CarrierId>,
        sent: BTreeMap<CarrierId, u64>,
        idle: Vec<CarrierId>,
        now: Instant,
    }

    impl World {
        fn new(links: &[(u32, u64)]) -> World {
            let options = DaemonOptions {
                rate: Schedule::flat(RATE),
                ..DaemonOptions::default()
            };
            let now = Instant(1);
            let mut engine = Engine::new(now, options, [1; 32]);
            let mut carriers = Vec::new();
            for (at, (weight, rate)) in links.iter().enumerate() {
                let addr = |ip: &str, port: usize| format!("{ip}:{}", port + at).parse().unwrap();
                let config = LinkConfig {
                    name: format!("r{at}"),
                    inside: addr("127.0.0.1", 7800),
                    // The higher address: it waits for the peer to dial.
                    peer_outside: addr("192.0.2.1", 7700),
                    my_outside: addr("192.0.2.2", 7700),
                    local_drbd: addr("127.0.0.1", 7900),
                    options: LinkOptions {
                        weight: *weight,
                        rate: Schedule::flat(*rate),
                        ..LinkOptions::default()
                    },
                };
                let id = engine.add_link(now, config).unwrap();
                let carrier = CarrierId(1000 + at as u64);
                let entry = Carrier::new(now, Some(id), CarrierKind::Bulk, CarrierState::Up);
                engine.carriers.insert(carrier, entry);
                engine.links.get_mut(&id).unwrap().bulk.push(carrier);
                carriers.push(carrier);
            }
            World {
                engine,
                carriers,
                sent: BTreeMap::new(),
                idle: Vec::new(),
                now,
            }
        }

        fn flush(&mut self, carrier: CarrierId) {
            while !self.idle.contains(&carrier) {
                let bytes = self.engine.carrier_allowance(self.now, carrier);
                if bytes == 0 {
                    return;
                }
                *self.sent.entry(carrier).or_default() += bytes as u64;
                self.engine
                    .handle(self.now, Input::CarrierSent(carrier, bytes));
                // The peer has it at once.
                let entry = self.engine.carriers.get_mut(&carrier).unwrap();
                entry.peer_received = entry.sent_bytes;
            }
        }

        /// What each has sent within so many milliseconds, as the shell would drive it.
        fn run(&mut self, ms: u64) -> Vec<u64> {
            self.sent.clear();
            for carrier in self.carriers.clone() {
                self.flush(carrier);
            }
            let end = self.now.0 + ms * 1_000_000;
            loop {
                while let Some(output) = self.engine.poll_output() {
                    if let Output::WantWrite(carrier) = output {
                        self.flush(carrier);
                    }
                }
                let next = self.engine.next_timeout().map_or(end, |at| at.0);
                if next >= end {
                    break;
                }
                self.now = Instant(next.max(self.now.0 + 1));
                self.engine.handle(self.now, Input::Tick);
            }
            self.now = Instant(end);
            let sent = |carrier| self.sent.get(carrier).copied().unwrap_or(0);
            self.carriers.iter().map(sent).collect()
        }
    }

    fn near(is: u64, want: u64) -> bool {
        is.abs_diff(want) < RATE / 5
    }

    #[test]
    fn a_short_rate_is_shared_by_weight() {
        let mut world = World::new(&[(1, 0), (3, 0), (1, 0)]);
        let sent = world.run(10_000);
        for (is, want) in sent.iter().zip([2 * RATE, 6 * RATE, 2 * RATE]) {
            assert!(near(*is, want), "{sent:?}");
        }
        // Changed while it runs.
        let mut options = LinkOptions::default();
        options.set("weight", "8").unwrap();
        world.engine.set_options(world.now, "r0", options).unwrap();
        let sent = world.run(12_000);
        for (is, want) in sent.iter().zip([8 * RATE, 3 * RATE, RATE]) {
            assert!(near(*is, want), "{sent:?}");
        }
    }

    #[test]
    fn what_one_does_not_use_the_others_get_and_it_saves_up_nothing() {
        let mut world = World::new(&[(1, 0), (1, 0)]);
        world.idle.push(world.carriers[0]);
        let sent = world.run(10_000);
        assert_eq!(sent[0], 0);
        assert!(near(sent[1], 10 * RATE), "{sent:?}");
        world.idle.clear();
        let sent = world.run(10_000);
        assert!(
            near(sent[0], 5 * RATE) && near(sent[1], 5 * RATE),
            "{sent:?}"
        );
    }

    #[test]
    fn a_connection_with_a_lower_rate_of_its_own_holds_nobody_back() {
        let mut world = World::new(&[(1, 100_000), (1, 0)]);
        let sent = world.run(10_000);
        assert!(near(sent[0], RATE) && near(sent[1], 9 * RATE), "{sent:?}");
    }
}
