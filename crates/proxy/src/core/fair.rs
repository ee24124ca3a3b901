//! Shares of the rates of the daemon and of a session. Each connection has a count of the bulk bytes that it was given,
//! divided by its weight; while the rate is short, who is furthest behind goes first, and nobody
//! gets further ahead of one that waits than a quantum. Who had nothing to send saves up little.

use std::time::Duration;

use super::engine::{Engine, WRITE_MIN};
use super::time::Instant;
use super::{CarrierId, LinkId};

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
    /// Whether the connection may use the rates of its session and of the daemon before the others
    /// that wait for them.
    pub(crate) fn has_turn(&mut self, now: Instant, id: LinkId) -> bool {
        if !self.has_session_turn(now, id) {
            return false;
        }
        if self.bucket.rate() == 0 {
            return true;
        }
        let floor = self.most_served.saturating_sub(CREDIT * SCALE);
        let Some(link) = self.links.get(&id) else {
            return true;
        };
        let (own, session) = (link.served.max(floor), link.config.peer_outside.ip());
        let limited = self.session_rate(session) != 0;
        let ahead_of: Vec<LinkId> = self
            .links
            .iter()
            .filter(|(other, link)| {
                // Within a limited session its own shares have decided.
                let same = limited && link.config.peer_outside.ip() == session;
                **other != id && !same && own > link.served.max(floor) + QUANTUM * SCALE
            })
            .map(|(other, _)| *other)
            .collect();
        ahead_of.into_iter().all(|other| {
            !self.waits_to_write(now, other)
                // Its own rates hold it back, not the others.
                || self.held_by_own_rates(now, other)
                // It waits for one of its session, which is looked at too.
                || !self.has_session_turn(now, other)
        })
    }

    /// The same among the connections of one session, if it has a rate.
    fn has_session_turn(&mut self, now: Instant, id: LinkId) -> bool {
        let Some(link) = self.links.get(&id) else {
            return true;
        };
        let (served, session) = (link.served_in_session, link.config.peer_outside.ip());
        let Some(limit) = self.sessions.get(&session) else {
            return true;
        };
        if limit.bucket.rate() == 0 {
            return true;
        }
        let floor = limit.most_served.saturating_sub(CREDIT * SCALE);
        let own = served.max(floor);
        let ahead_of: Vec<LinkId> = self
            .links
            .iter()
            .filter(|(other, link)| {
                **other != id
                    && link.config.peer_outside.ip() == session
                    && own > link.served_in_session.max(floor) + QUANTUM * SCALE
            })
            .map(|(other, _)| *other)
            .collect();
        ahead_of.into_iter().all(|other| {
            let link = self.links.get_mut(&other);
            let short = link.is_some_and(|link| link.bucket.available(now) < WRITE_MIN);
            short || !self.waits_to_write(now, other)
        })
    }

    fn waits_to_write(&self, now: Instant, id: LinkId) -> bool {
        let bulk = self.links.get(&id).into_iter().flat_map(|link| &link.bulk);
        let mut carriers = bulk.filter_map(|id| self.carriers.get(id));
        carriers.any(|carrier| {
            let woken = carrier.woken.is_some_and(|at| now.since(at) < WOKEN);
            carrier.wants_write || woken
        })
    }

    fn held_by_own_rates(&mut self, now: Instant, id: LinkId) -> bool {
        let Some(link) = self.links.get_mut(&id) else {
            return false;
        };
        let session = self.sessions.get_mut(&link.config.peer_outside.ip());
        link.bucket.available(now) < WRITE_MIN
            || session.is_some_and(|session| session.bucket.available(now) < WRITE_MIN)
    }

    /// The share of a carrier's connection against those with which it has a wire in common.
    pub(crate) fn weight_of(&self, carrier: CarrierId) -> u32 {
        let link = self.carriers.get(&carrier).and_then(|entry| entry.link);
        let config = link.and_then(|id| self.config(id));
        config.map_or(1, |config| config.options.weight)
    }

    /// Counts what a bulk carrier was given.
    pub(crate) fn count_served(&mut self, id: LinkId, bytes: usize) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let part = bytes as u64 * SCALE / u64::from(link.config.options.weight.max(1));
        let count = |served: &mut u64, most: &mut u64| {
            *served = (*served).max(most.saturating_sub(CREDIT * SCALE)) + part;
            *most = (*most).max(*served);
        };
        count(&mut link.served, &mut self.most_served);
        match self.sessions.get_mut(&link.config.peer_outside.ip()) {
            Some(session) => count(&mut link.served_in_session, &mut session.most_served),
            None => link.served_in_session = 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::core::config::{DaemonOptions, LinkConfig, LinkOptions};
    use crate::core::frame::HEADER_LEN;
    use crate::core::limits::Origin;
    use crate::core::link::{Carrier, CarrierState};
    use crate::core::shaper::Limit;
    use crate::core::{CarrierKind, Input, Output};

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
            let with_peer: Vec<_> = links.iter().map(|(w, rate)| (*w, *rate, 1)).collect();
            World::with_peers(RATE, &with_peer)
        }

        /// Weight, own rate and last part of the peer's address of each connection.
        fn with_peers(rate: u64, links: &[(u32, u64, u8)]) -> World {
            let options = DaemonOptions {
                limit: Limit::flat(rate),
                ..DaemonOptions::default()
            };
            let now = Instant(1);
            let mut engine = Engine::new(now, options, [1; 32]);
            let mut carriers = Vec::new();
            for (at, (weight, rate, peer)) in links.iter().enumerate() {
                let addr = |ip: &str, port: usize| format!("{ip}:{}", port + at).parse().unwrap();
                let config = LinkConfig {
                    name: format!("r{at}"),
                    inside: addr("127.0.0.1", 7800),
                    // The higher address: it waits for the peer to dial.
                    peer_outside: addr(&format!("192.0.2.{peer}"), 7700),
                    my_outside: addr("192.0.2.200", 7700),
                    local_drbd: addr("127.0.0.1", 7900),
                    options: LinkOptions {
                        weight: *weight,
                        limit: Limit::flat(*rate),
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
                *self.sent.entry(carrier).or_default() += (bytes + HEADER_LEN) as u64;
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
    fn a_session_has_a_rate_that_its_connections_share_by_weight() {
        let mut world = World::with_peers(0, &[(1, 0, 1), (3, 0, 1), (1, RATE, 2)]);
        let (now, peer) = (world.now, "192.0.2.1".parse().unwrap());
        let set = |world: &mut World, option: &str, value: &str| {
            let engine = &mut world.engine;
            engine.set_session_limit(now, peer, option, value, Origin::Command)
        };
        let rate = (2 * RATE).to_string();
        assert_eq!(set(&mut world, "bwlimit", &rate), Ok(()));
        let sent = world.run(10_000);
        for (is, want) in sent.iter().zip([5 * RATE, 15 * RATE, 10 * RATE]) {
            assert!(near(*is, want), "{sent:?}");
        }
        let shown = world.engine.snapshot(now).sessions;
        assert_eq!(shown.len(), 1);
        assert_eq!(shown[0].peer, "192.0.2.1");
        assert_eq!(
            (shown[0].rate_limit, shown[0].burst_bytes),
            (2 * RATE, 64 << 10)
        );
        let error = set(&mut world, "weight", "2").unwrap_err().to_string();
        assert!(error.contains("'weight' of a session"), "{error}");
        let error = set(&mut world, "burst", "5").unwrap_err().to_string();
        assert!(error.contains("session burst '5'"), "{error}");
        assert_eq!(set(&mut world, "bwlimit", "0"), Ok(()));
        assert!(world.engine.sessions.is_empty());
    }

    #[test]
    fn one_session_with_a_low_rate_leaves_the_daemons_to_the_others() {
        let mut world = World::with_peers(RATE, &[(1, 0, 1), (1, 0, 1), (1, 0, 2)]);
        let peer = "192.0.2.1".parse().unwrap();
        let engine = &mut world.engine;
        let limited =
            engine.set_session_limit(world.now, peer, "bwlimit", "200000", Origin::Command);
        assert_eq!(limited, Ok(()));
        let sent = world.run(10_000);
        for (is, want) in sent.iter().zip([RATE, RATE, 8 * RATE]) {
            assert!(near(*is, want), "{sent:?}");
        }
        // The daemon's own, while it runs.
        let rate = (3 * RATE).to_string();
        let done = world.engine.set_daemon_limit(world.now, "bwlimit", &rate);
        assert_eq!(done, Ok(()));
        let sent = world.run(10_000);
        assert!(near(sent[0], RATE) && near(sent[2], 28 * RATE), "{sent:?}");
    }

    #[test]
    fn a_burst_passes_at_once_on_every_level() {
        let burst = |world: &mut World| {
            world.idle.extend(world.carriers.clone());
            world.run(30_000);
            world.idle.clear();
            world.run(1)[0]
        };
        let mut world = World::new(&[(1, RATE)]);
        assert!(near_bytes(burst(&mut world), 64 << 10));
        let mut options = LinkOptions::default();
        options.set("bwlimit", &RATE.to_string()).unwrap();
        options.set("burst", "3M").unwrap();
        world.engine.set_options(world.now, "r0", options).unwrap();
        assert!(
            near_bytes(burst(&mut world), 64 << 10),
            "the daemon's is smaller"
        );
        let set = world.engine.set_daemon_limit(world.now, "burst", "2M");
        assert_eq!(set, Ok(()));
        assert!(near_bytes(burst(&mut world), 2 << 20));
        let peer = "192.0.2.1".parse().unwrap();
        for (option, value) in [("bwlimit", "1M"), ("burst", "1M")] {
            let engine = &mut world.engine;
            let set = engine.set_session_limit(world.now, peer, option, value, Origin::Command);
            assert_eq!(set, Ok(()));
        }
        assert!(near_bytes(burst(&mut world), 1 << 20));
    }

    /// Equal, but for what comes in within a millisecond.
    fn near_bytes(is: u64, want: u64) -> bool {
        is.abs_diff(want) < 4000
    }

    #[test]
    fn a_connection_with_a_lower_rate_of_its_own_holds_nobody_back() {
        let mut world = World::new(&[(1, 100_000), (1, 0)]);
        let sent = world.run(10_000);
        assert!(near(sent[0], RATE) && near(sent[1], 9 * RATE), "{sent:?}");
    }
}
