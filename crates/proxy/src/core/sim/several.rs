//! Several connections in one session: each has its own bytes, its own end and its own troubles;
//! what happens to the line or to a proxy happens to all of them.

use super::crash::{Trouble, each, expected, plan, seeds};
use super::*;
use crate::core::link::StreamPhase;

const COUNT: usize = 3;

/// Something that happens to one connection while the others must not notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Own {
    Nothing,
    /// DRBD resets one of its sockets.
    Reset,
    /// It is removed at one end, and added again.
    Removed,
}

fn start(seed: u64, rng: &mut Rng) -> World {
    let options = DaemonOptions {
        memory_max_bytes: 48 << 20,
        jobs_max: 1 + rng.below(4) as usize,
        ..DaemonOptions::default()
    };
    let mut world = World::new(seed, &options);
    let dial = [Dial::Auto, Dial::Auto, Dial::Always][rng.below(3) as usize];
    for node in 0..2 {
        for number in 1..COUNT as u16 {
            let mut config = numbered(node, number);
            config.options.dial = dial;
            let link = world.engines[node].add_link(Instant(0), config).unwrap();
            world.numbers[node].push(link);
        }
    }
    world
}

fn one_session(world: &World) -> bool {
    let sessions = [0, 1].map(|node| world.engines[node].trunk_snapshots());
    sessions
        .iter()
        .all(|list| list.len() == 1 && list[0].connections.len() == COUNT)
        && sessions[0][0].id == sessions[1][0].id
}

fn is_whole(world: &World, spared: Option<usize>) -> bool {
    let sockets = world.sockets.iter().enumerate();
    let mut all = sockets.flat_map(|(at, all)| all.values().map(move |socket| (at, socket)));
    all.all(|(at, socket)| {
        let want = world.expected[socket.number].of(at, &socket.first).len();
        Some(socket.number) == spared || socket.got.len() == want
    })
}

fn locals_of(world: &World, number: usize) -> Vec<(usize, LocalId)> {
    let sockets = world.sockets.iter().enumerate();
    let all =
        sockets.flat_map(|(at, all)| all.iter().map(move |(local, socket)| (at, local, socket)));
    let own = all.filter(|(_, _, socket)| socket.number == number && !socket.reset);
    own.map(|(at, local, _)| (at, *local)).collect()
}

/// Resets all sockets of DRBD that are still open.
fn give_up(world: &mut World) {
    for node in 0..2 {
        let open: Vec<LocalId> = world.engines[node].locals.keys().copied().collect();
        for local in open {
            world.sockets[node].get_mut(&local).unwrap().reset = true;
            world.feed(node, Input::LocalFailed(local, "reset".into()));
        }
    }
}

/// One world. Answers with the events that it took until all bytes had arrived.
fn world(seed: u64, crash: Option<(u64, usize)>) -> u64 {
    let mut rng = Rng::new(seed ^ 0x5e55);
    let mut world = start(seed, &mut rng);
    let own = match rng.below(3) {
        _ if crash.is_some() => Own::Nothing,
        0 => Own::Nothing,
        1 => Own::Reset,
        _ => Own::Removed,
    };
    world.plan = plan(&mut rng, false);
    if let Some((at, node)) = crash {
        let after = world.plan.partition_point(|(step, _)| *step <= at);
        world.plan.insert(after, (at, Trouble::Crash(node)));
    }
    let mut tries = 0;
    while !attempt(&mut world, &mut rng, own) {
        tries += 1;
        world.check(tries < 20, "DRBD does not come back");
    }
    let steps = world.steps;
    let rest = world.run(120_000, |w| {
        let mut engines = w.engines.iter();
        engines.all(|engine| {
            let empty = engine.links.values().all(|link| link.streams.is_empty());
            empty && engine.total_held == 0 && engine.running == 0
        })
    });
    world.check(rest, "something stays");
    let one = world.run(60_000, |w| w.live() && one_session(w));
    world.check(one, "not one session in the end");
    steps
}

/// DRBD opens all connections and each sends its bytes; false if they have to try again.
fn attempt(world: &mut World, rng: &mut Rng, own: Own) -> bool {
    let crashes = world.crashes;
    let crashed = |w: &World| w.crashes > crashes;
    let live = world.run(60_000, World::live);
    world.check(live, "no session");
    if crashed(world) {
        return false;
    }
    world.sockets = [BTreeMap::new(), BTreeMap::new()];
    world.expected = (0..COUNT).map(|_| expected(rng)).collect();
    for number in 0..COUNT {
        let (node, data, meta) = {
            let expected = &world.expected[number];
            (
                expected.opener,
                expected.data.clone(),
                expected.meta.clone(),
            )
        };
        world.drbd_opens_on(number, node, DATA_FIRST, 0, &data);
        world.drbd_opens_on(number, node, META_FIRST, 0, &meta);
    }
    let lost = |w: &World| w.sockets.iter().any(|all| all.values().any(|s| s.reset));
    let all = [2 * COUNT; 2];
    world.run(30_000, |w| {
        crashed(w) || lost(w) || w.count(StreamPhase::Open) == all
    });
    let ended = |world: &mut World, why: &str| {
        let ended = world.run(60_000, World::all_ended);
        world.check(ended, why);
        false
    };
    if crashed(world) {
        return ended(world, "a socket stays after a crash");
    }
    if lost(world) {
        give_up(world);
        return ended(world, "a socket stays after an interrupted opening");
    }
    world.check(world.count(StreamPhase::Open) == all, "not opened");
    for number in 0..COUNT {
        let (far, back) = (
            1 - world.expected[number].opener,
            world.expected[number].back.clone(),
        );
        for (node, local) in locals_of(world, number) {
            if node == far {
                let socket = world.sockets[node].get_mut(&local).unwrap();
                socket.to_send.extend(&back);
                world.at(0, Event::Read { node, local });
            }
        }
    }
    let victim = rng.below(COUNT as u64) as usize;
    let spared = (own != Own::Nothing).then_some(victim);
    world.run(rng.below(400), crashed);
    match own {
        Own::Nothing => {}
        Own::Reset => {
            let (node, local) = locals_of(world, victim)[rng.below(4) as usize];
            world.sockets[node].get_mut(&local).unwrap().reset = true;
            world.feed(node, Input::LocalFailed(local, "reset".into()));
        }
        Own::Removed => {
            let node = rng.below(2) as usize;
            let config = world.engines[node].config(world.numbers[node][victim]);
            let config = config.unwrap().clone();
            let now = Instant(world.now);
            world.engines[node].remove_link(now, &config.name).unwrap();
            world.run(rng.below(300), crashed);
            let now = Instant(world.now);
            let link = world.engines[node].add_link(now, config).unwrap();
            world.numbers[node][victim] = link;
            world.links[node] = world.numbers[node][0];
        }
    }
    let whole = world.run(300_000, |w| crashed(w) || is_whole(w, spared));
    if crashed(world) {
        return ended(world, "a socket stays after a crash");
    }
    world.check(whole, "not all bytes arrived");
    for sockets in &world.sockets {
        let mut others = sockets.values().filter(|s| Some(s.number) != spared);
        world.check(others.all(|s| !s.reset), "reset without a reason");
    }
    if let Some(victim) = spared {
        let gone = world.run(60_000, |w| {
            crashed(w)
                || locals_of(w, victim)
                    .iter()
                    .all(|(at, l)| w.sockets[*at][l].got_fin)
        });
        world.check(gone, "the connection in trouble does not end");
    }
    for number in 0..COUNT {
        for (node, local) in locals_of(world, number) {
            world.sockets[node].get_mut(&local).unwrap().closing = true;
            world.at(0, Event::Read { node, local });
        }
    }
    let done = world.run(120_000, |w| crashed(w) || w.all_ended());
    world.check(done, "no end");
    true
}

#[test]
fn after_a_cut_all_connections_are_back_at_once() {
    for seed in 0..20 {
        let mut world = start(seed, &mut Rng::new(seed));
        let live = world.run(2_000, |w| w.live() && one_session(w));
        world.check(live, "not up at once");
        for what in [Trouble::Cut(0), Trouble::CutOne, Trouble::HandOver(1)] {
            world.plan.push_back((world.steps, what));
            world.step();
            // Whoever learns of it last.
            world.run(350, |_| false);
            let live = world.run(1_500, |w| w.live() && one_session(w));
            world.check(live, "not back at once");
        }
    }
}

#[test]
fn connections_dialled_from_either_end_share_a_session_whose_dialler_says_how_many_carriers() {
    let mut dialled = [0, 0];
    for seed in 0..24 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(seed, &DaemonOptions::default());
        for node in 0..2 {
            for number in 0..COUNT {
                let mut config = numbered(node, number as u16);
                // Each is dialled by one end only; which one comes first differs by seed.
                let own = (node + number + seed as usize).is_multiple_of(2);
                config.options.dial = if own { Dial::Always } else { Dial::Never };
                let carriers = if node == 0 { "1" } else { "3" };
                config.options.set("carriers", carriers).unwrap();
                if number == 0 {
                    let name = config.name.clone();
                    world.engines[node].remove_link(Instant(0), &name).unwrap();
                    world.numbers[node].clear();
                }
                let link = world.engines[node].add_link(Instant(0), config).unwrap();
                world.numbers[node].push(link);
                world.links[node] = world.numbers[node][0];
            }
        }
        for what in [
            None,
            Some(Trouble::Cut(0)),
            Some(Trouble::CutOne),
            Some(Trouble::HandOver(0)),
            Some(Trouble::HandOver(1)),
        ] {
            if let Some(what) = what {
                world.plan.push_back((world.steps, what));
                world.step();
                world.run(350, |_| false);
            }
            let settled = |w: &World| {
                let sessions = [0, 1].map(|node| w.engines[node].trunk_snapshots());
                let dialler = sessions
                    .iter()
                    .position(|s| s.iter().all(|s| s.role == "dialer"));
                let want = 1 + [1, 3][dialler.unwrap_or(0)];
                let counts = sessions.iter().flatten().map(|s| s.tcp_connections);
                w.live() && one_session(w) && counts.into_iter().all(|count| count == want)
            };
            let up = world.run(20_000, settled);
            world.check(
                up,
                "not one session with the carriers of the end that dialled it",
            );
        }
        let dialler = world.engines[0].trunk_snapshots()[0].role == "dialer";
        dialled[usize::from(!dialler)] += 1;
        world.run(2000, |_| false);
        let done = attempt(&mut world, &mut rng, Own::Nothing);
        world.check(done, "the connections do not work");
    }
    assert!(dialled.iter().all(|count| *count > 0), "{dialled:?}");
}

#[test]
fn several_connections_share_a_session_through_troubles_and_hurt_each_other_never() {
    each(seeds(2000, 2060), |seed| {
        world(seed, None);
        1
    });
}

#[test]
fn soak_a_proxy_that_dies_takes_all_connections_of_its_session_and_all_come_back() {
    // Two halves of each world's events, so that one seed keeps two cores busy.
    let halves = seeds(3000, 3003);
    each(halves.start * 2..halves.end * 2, |half| {
        let (seed, odd) = (half / 2, half % 2);
        let steps = world(seed, None);
        let mut worlds = 1;
        for node in 0..2 {
            for at in (1 + odd..=steps).step_by(2) {
                world(seed, Some((at, node)));
                worlds += 1;
            }
        }
        worlds
    });
}
