//! Near the end of some worlds nodes are gone for long, and those that are left come to rest without them. What a world that
//! ends with all nodes connected makes up for shows here: survivors of a Primary that are not alike, or that nobody may
//! promote, and data of long ago that are taken for the present ones.

use lockstep_core::command::Command;
use lockstep_core::event::RequestKind;
use lockstep_core::options::{Fencing, OnCongestion, Quorum};
use lockstep_core::report::Snapshot;
use lockstep_core::state::{ConnState, DiskState, ReplState, Role};
use lockstep_format::units::{Uuid, VolumeNr};

use crate::at_rest::change_waits;
use crate::calm;
use crate::check;
use crate::disk::Lose;
use crate::drive::{PATIENCE, Progress};
use crate::operator::{Operator, generations};
use crate::plan::Plan;
use crate::rng::{Rng, mixed};
use crate::rot;
use crate::swarm::{rest, settle_marks, wait_for, wait_for_copies};
use crate::world::{MS, SECOND, Weather, World, name};

/// The last protocol of 8.4.
const DIALECT_84: u32 = 101;
/// How long commands, requests, and survivors together may take.
const SOON: u64 = 60 * SECOND;
/// How long a node that has the past only is looked at.
const LOOKED_AT: u64 = 8 * SECOND;

/// All nodes are whole and at rest; now some go, and all come back in the end.
pub(crate) fn is_borne(w: &mut World, o: &mut Operator, plan: &Plan) {
    let mut rng = Rng::new(mixed(&[plan.seed, 0x0061_6273_656e_6365]));
    let share = rng.below(1000);
    if !is_possible(w, o) {
        return;
    }
    match share {
        0..=199 => primary_is_gone(w, o, plan, &mut rng),
        200..=299 => all_leave(w, o, plan, &mut rng),
        300..=399 => is_thrown_away(w, o, plan, &mut rng),
        _ => return,
    }
    if w.violation.is_none() {
        come_back(w, o);
    }
}

/// Nothing but the absence decides.
fn is_possible(w: &World, o: &Operator) -> bool {
    let settings = &o.settings;
    w.violation.is_none()
        && w.storage().len() == w.nodes.len()
        && w.config.weather == Weather::ByPlace
        && w.config.slow.is_none()
        && w.config.bandwidth.is_none()
        && (w.flushes_peers || settings.resource.protocol_max == DIALECT_84)
        && w.bad_node.is_none()
        && w.spoils.values().all(|left| *left == 0)
        && w.spoiled.is_empty()
        && !settings.openers
        && settings.turns.is_none()
        && settings.net.fencing == Fencing::DontCare
        && settings.net.on_congestion == OnCongestion::Block
        && settings.resource.quorum != Quorum::All
        && o.primary.is_some_and(|primary| has_role(w, primary))
        && !o.is_changing()
}

/// It has not given its role up by itself.
fn has_role(w: &World, node: usize) -> bool {
    w.snapshot(node).is_some_and(|s| s.role == Role::Primary)
}

/// The Primary dies under load, and what is left goes on without it.
fn primary_is_gone(w: &mut World, o: &mut Operator, plan: &Plan, rng: &mut Rng) {
    let Some(primary) = o.primary else { return };
    if o.settings.resource.quorum != Quorum::Off && w.nodes.len() < 3 {
        return;
    }
    w.trace(primary, || "== from here on this Primary is gone".into());
    let peers: Vec<usize> = (0..w.nodes.len()).filter(|n| *n != primary).collect();
    let all_stay = write_unevenly(w, o, rng, primary, &peers);
    let lose = rng.pick(&[Lose::InFlight, Lose::Unflushed]);
    check::differences_are_marked(w);
    o.crash(w, primary, lose);
    check::differences_are_marked(w);
    for peer in &peers {
        w.set_blocked(primary, *peer, false);
        w.set_blocked(*peer, primary, false);
    }
    if went_on_alone(w, &peers) || nobody_follows(w, primary, &peers) {
        let until = w.now + LOOKED_AT;
        let what = "the survivors of a Primary that went on alone are looked at";
        wait_for(w, o, SOON, what, |w, _| {
            (w.now < until).then(|| "they are".into())
        });
        if w.violation.is_some() || are_outdated(w, &peers) {
            return;
        }
    }
    let had = contents(w, &peers);
    are_alike(w, o, &peers, "its survivors come to rest");
    if all_stay {
        nothing_goes_back(w, peers[0], &had);
    }
    if peers.len() > 1 && rng.permille(300) && w.violation.is_none() {
        let node = rng.pick(&peers);
        o.crash(w, node, Lose::InFlight);
        w.run_for(rng.delay(SECOND));
        o.start(w, node);
        are_alike(w, o, &peers, "one of its survivors is started anew");
    }
    let number = rng.below(16) as usize;
    wait_for(w, o, SOON, "a survivor becomes Primary", |w, o| {
        if o.primary.is_some() && !o.is_changing() {
            return None;
        }
        let heirs: Vec<usize> = o.heirs().into_iter().filter(|n| o.is_up(*n)).collect();
        let mut asked = o.is_changing();
        if !heirs.is_empty() && !asked {
            asked = o.promote(w, heirs[number % heirs.len()], false);
        }
        // With protocols A and B nobody else has all that was acknowledged, and with 8.4 one lonely promotion may be too many.
        asked.then(|| format!("heirs are {heirs:?}"))
    });
    if o.primary.is_some() {
        calm::requests(w, o, plan, rng);
        are_alike(w, o, &peers, "survivors have got a Primary");
    }
}

/// The Primary has completed something that none of its survivors has: it had lost them all before.
fn went_on_alone(w: &World, peers: &[usize]) -> bool {
    (0..w.config.volumes).any(|volume| {
        let mut blocks = w.history.touched(volume).into_iter();
        blocks.any(|block| {
            peers.iter().all(|node| {
                let found = w.nodes[*node].disks[usize::from(volume)].content[block as usize];
                !w.history.is_current(volume, block, found, w.now)
            })
        })
    })
}

/// None of the survivors is of the generation that the Primary had made when it died.
fn nobody_follows(w: &World, primary: usize, peers: &[usize]) -> bool {
    let of = |node: usize, volume: u16| {
        let block = w.nodes[node].disks[usize::from(volume)].superblock();
        block.ok().map(|block| block.current_uuid)
    };
    (0..w.config.volumes).any(|volume| {
        of(primary, volume).is_some_and(|made| {
            let follows = |uuid: Uuid| uuid.same_generation(made);
            !peers
                .iter()
                .any(|node| of(*node, volume).is_some_and(follows))
        })
    })
}

/// They know that the data of some volume are elsewhere.
fn are_outdated(w: &World, nodes: &[usize]) -> bool {
    let of = |node: usize, volume: u16| {
        let snapshot = w.snapshot(node)?;
        let mut devices = snapshot.devices.iter();
        let device = devices.find(|d| d.volume.0 == volume)?;
        Some(device.disk_state)
    };
    (0..w.config.volumes).any(|volume| {
        let mut all = nodes.iter();
        all.all(|node| of(*node, volume) == Some(DiskState::Outdated))
    })
}

/// Writes of which not every peer gets as many: streams stand still, links break. Says whether none did: who is lost before
/// the Primary is has no say in what the others have.
fn write_unevenly(
    w: &mut World,
    o: &mut Operator,
    rng: &mut Rng,
    primary: usize,
    peers: &[usize],
) -> bool {
    let mut all_stay = true;
    let cuts = peers.len() > 1 && rng.permille(400);
    for peer in peers {
        if rng.permille(400) {
            let time = rng.delay(500 * MS);
            w.stall(primary, *peer, 0, time);
        }
    }
    for _ in 0..rng.range(1, 30) {
        let volume = rng.below(u64::from(w.config.volumes)) as u16;
        let kind = RequestKind::Write {
            fua: rng.permille(100),
        };
        let block = rng.pick(&[100, 5000]) + rng.below(12);
        w.request(primary, volume, kind, block, rng.range(1, 4));
        let pause = rng.pick(&[0, 0, MS / 5, 2 * MS, 20 * MS]);
        w.run_for(rng.delay(pause));
        o.tick(w);
        let cut = cuts.then(|| rng.pick(peers));
        if let Some(peer) = cut.filter(|_| rng.permille(160)) {
            all_stay = false;
            w.set_blocked(primary, peer, true);
            w.set_blocked(peer, primary, true);
            w.reset(primary, peer);
        }
    }
    all_stay
}

/// All leave in good order, one after the other, until the Primary dies as the last one. Nobody who comes back before it
/// takes its own data for the present ones.
fn all_leave(w: &mut World, o: &mut Operator, plan: &Plan, rng: &mut Rng) {
    let Some(primary) = o.primary else { return };
    let resource = &o.settings.resource;
    // The last one goes on where the others are known to be Outdated, and nothing else is asked for.
    if !matches!(resource.quorum, Quorum::Off | Quorum::Majority)
        || resource.quorum_minimum_redundancy != Quorum::Off
    {
        return;
    }
    w.trace(primary, || "== from here on all leave but this one".into());
    let mut leave: Vec<usize> = (0..w.nodes.len()).filter(|n| *n != primary).collect();
    let turns = rng.below(leave.len() as u64) as usize;
    leave.rotate_left(turns);
    let mut left = Vec::new();
    for node in leave {
        if !o.down(w, node) {
            return;
        }
        wait_for(w, o, SOON, "a node goes down", |_, o| {
            (!o.is_down(node)).then(|| "it does not".into())
        });
        left.push(node);
        let all = u64::from(w.config.volumes);
        for i in 0..rng.range(all, all + 6) {
            let kind = RequestKind::Write { fua: false };
            let block = rng.pick(&[100, 5000]) + rng.below(12);
            let volume = (i % all) as u16;
            w.request(primary, volume, kind, block, rng.range(1, 4));
        }
        wait_for(w, o, SOON, "the last nodes go on", |w, _| {
            let waits = !w.nodes[primary].requests.is_empty();
            waits.then(|| "some requests wait".into())
        });
    }
    if w.violation.is_some() {
        return;
    }
    calm::requests(w, o, plan, rng);
    o.crash(w, primary, rng.pick(&[Lose::InFlight, Lose::Unflushed]));
    let turns = rng.below(left.len() as u64) as usize;
    left.rotate_left(turns);
    for node in left {
        o.start(w, node);
        let until = w.now + LOOKED_AT;
        // With 8.4 a node that leaves does not become Outdated.
        let knows = w.flushes_peers;
        wait_for(w, o, SOON, "a node comes back", |w, o| {
            if knows {
                is_past(w, node);
            }
            (w.now < until || !o.is_up(node)).then(|| "it is looked at".into())
        });
        if knows {
            is_refused(w, o, node);
        }
    }
}

/// A node that nobody reaches throws its replica away, and may lose its power then: all is copied when it is back.
fn is_thrown_away(w: &mut World, o: &mut Operator, plan: &Plan, rng: &mut Rng) {
    let Some(primary) = o.primary else { return };
    let others: Vec<usize> = (0..w.nodes.len()).filter(|n| *n != primary).collect();
    let node = rng.pick(&others);
    let volume = rng.below(u64::from(w.config.volumes)) as u16;
    if !calm::takes_soon(w, plan) || !w.flushes_peers {
        return;
    }
    w.trace(node, || "== from here on this node is alone".into());
    for peer in (0..w.nodes.len()).filter(|n| *n != node) {
        o.disconnect(w, node, peer, false);
    }
    wait_for(w, o, SOON, "a node is left alone", |w, _| {
        let connected = |s: Snapshot| {
            s.connections
                .iter()
                .any(|c| c.state != ConnState::StandAlone)
        };
        let busy = !w.nodes[node].commands.is_empty() || w.snapshot(node).is_some_and(connected);
        busy.then(|| "it is not".into())
    });
    if w.violation.is_some() {
        return;
    }
    let command = Command::Invalidate {
        volume: VolumeNr(volume),
        from: None,
        reset_bitmap: true,
    };
    let id = w.command(node, command);
    wait_for(w, o, SOON, "a command is answered", |w, _| {
        let waits = !w.nodes[node].answers.contains_key(&id);
        waits.then(|| "a disk is thrown away".into())
    });
    rot::become_bad(w, node, usize::from(volume));
    if rng.permille(500) {
        o.crash(w, node, rng.pick(&[Lose::InFlight, Lose::Unflushed]));
    }
    if o.accepts_io()
        .is_some_and(|n| w.view(n).is_some_and(|v| v.quorate))
    {
        calm::requests(w, o, plan, rng);
    }
}

/// The node left before the last writes, and knows that.
fn is_past(w: &mut World, node: usize) {
    let Some(snapshot) = w.snapshot(node) else {
        return;
    };
    let device = snapshot.devices.iter();
    let mut good = device.filter(|d| d.disk_state > DiskState::Outdated);
    let wrong = match good.next() {
        Some(device) => format!("calls volume {} {:?}", device.volume, device.disk_state),
        None if snapshot.may_promote => "says that it may be promoted".into(),
        None => return,
    };
    w.fail(format!(
        "{} left in good order before the last writes, and {wrong}",
        name(node)
    ));
}

/// Nobody can make it Primary without force.
fn is_refused(w: &mut World, o: &mut Operator, node: usize) {
    if w.violation.is_some() {
        return;
    }
    let id = w.command(node, Command::Primary { force: false });
    wait_for(w, o, SOON, "a command is answered", |w, _| {
        let waits = !w.nodes[node].answers.contains_key(&id);
        waits.then(|| "a promotion waits".into())
    });
    if let Some(Ok(_)) = w.nodes[node].answers.get(&id) {
        w.fail(format!(
            "{} left before the last writes, and becomes Primary without them",
            name(node)
        ));
    }
}

/// All come back, and everything is whole again.
fn come_back(w: &mut World, o: &mut Operator) {
    let what = "after an absence everything is in sync again";
    let mut progress = Progress::of(w);
    let mut round = 0u64;
    let mut since = None;
    wait_for(w, o, PATIENCE * 20, what, |w, o| {
        if round.is_multiple_of(50) {
            o.heal(w);
            progress.look(w, what);
        }
        round += 1;
        let heirs: Vec<usize> = o.heirs().into_iter().filter(|n| o.is_up(*n)).collect();
        if o.primary.is_none() && !o.is_changing() && round > 100 && !heirs.is_empty() {
            o.promote(w, heirs[round as usize % heirs.len()], false);
        }
        let missing = rest(w);
        since = match missing {
            None => since.or(Some(w.now)),
            Some(_) => None,
        };
        missing.or_else(|| {
            let stays = since.is_some_and(|since| w.now >= since + 3 * SECOND);
            (!stays).then(|| "it does not stay so".into())
        })
    });
    settle_marks(w, o);
    if w.violation.is_none() {
        check::writes_are_settled(w);
        check::replicas_are_equal(w);
        check::differences_are_marked(w);
        check::generations_agree(w);
        check::one_primary(w);
    }
}

/// Those of the nodes that are left come to rest: connected, UpToDate, with equal data in which nothing is missing that was
/// acknowledged.
fn are_alike(w: &mut World, o: &mut Operator, nodes: &[usize], what: &str) {
    let mut since = None;
    let what = format!("while a node is away {what}");
    // What a crash has marked is copied at the rate of resyncs.
    wait_for_copies(w, o, SOON, &what, |w, _| {
        let missing = are_at_rest(w, nodes).or_else(|| change_waits(w, nodes.iter().copied()));
        since = match missing {
            None => since.or(Some(w.now)),
            Some(_) => None,
        };
        missing.or_else(|| {
            let stays = since.is_some_and(|since| w.now >= since + 2 * SECOND);
            (!stays).then(|| "it does not stay so".into())
        })
    });
    if w.violation.is_some() {
        return;
    }
    if let Some(text) = is_unlike(w, nodes) {
        return w.fail(format!("{what}, and {text}"));
    }
    for volume in 0..w.config.volumes {
        for block in w.history.touched(volume) {
            let of = |node: usize| w.nodes[node].disks[usize::from(volume)].content[block as usize];
            let value = of(nodes[0]);
            if let Some(other) = nodes.iter().find(|n| of(**n) != value) {
                let text = format!(
                    "{what}, and volume {volume} block {block} is {value} on {} and {} on {}; {}",
                    name(nodes[0]),
                    of(*other),
                    name(*other),
                    w.history.describe(volume, block)
                );
                return w.fail(text);
            }
        }
    }
}

/// They are of one generation, nothing is left of what they had to do with the others, and each may be promoted if none is.
fn is_unlike(w: &World, nodes: &[usize]) -> Option<String> {
    let first = generations(w, nodes[0]);
    if let Some(other) = nodes.iter().find(|n| generations(w, **n) != first) {
        let (a, b) = (name(nodes[0]), name(*other));
        return Some(format!("{a} and {b} are not of one generation"));
    }
    let is_led = nodes.iter().any(|n| {
        let snapshot = w.snapshot(*n);
        snapshot.is_some_and(|s| s.role == Role::Primary)
    });
    nodes.iter().find_map(|node| {
        let left = w.nodes[*node].resource.as_ref()?.leftover();
        let snapshot = w.snapshot(*node)?;
        let quorate = snapshot.devices.iter().all(|d| d.quorum);
        match left {
            Some(left) => Some(format!("{} still has {left}", name(*node))),
            None if !is_led && quorate && !snapshot.may_promote => {
                Some(format!("{} says that it may not be promoted", name(*node)))
            }
            None => None,
        }
    })
}

/// What each of some nodes has of the blocks that were written to, by volume and block.
type Had = Vec<(u16, u64, Vec<u64>)>;

fn contents(w: &World, nodes: &[usize]) -> Had {
    let mut had = Vec::new();
    for volume in 0..w.config.volumes {
        for block in w.history.touched(volume) {
            let of =
                |node: &usize| w.nodes[*node].disks[usize::from(volume)].content[block as usize];
            had.push((volume, block, nodes.iter().map(of).collect()));
        }
    }
    had
}

/// Who got most of the lost Primary's writes is the source of the others.
fn nothing_goes_back(w: &mut World, node: usize, had: &Had) {
    if w.violation.is_some() {
        return;
    }
    for (volume, block, values) in had {
        let now = w.nodes[node].disks[usize::from(*volume)].content[*block as usize];
        let mut newer = values.iter();
        if let Some(newer) = newer.find(|v| w.history.is_older(*volume, *block, now, **v)) {
            let text = format!(
                "survivors of a Primary agree on version {now} of volume {volume} block {block}, and one of them had {newer}; {}",
                w.history.describe(*volume, *block)
            );
            return w.fail(text);
        }
    }
}

fn are_at_rest(w: &World, nodes: &[usize]) -> Option<String> {
    nodes.iter().find_map(|node| {
        let Some(snapshot) = w.snapshot(*node) else {
            return Some(format!("{} is down", name(*node)));
        };
        let of = |text: String| Some(format!("{}: {text}", name(*node)));
        if !w.nodes[*node].requests.is_empty() || !w.nodes[*node].commands.is_empty() {
            return of("requests or commands wait".into());
        }
        for device in &snapshot.devices {
            if device.disk_state != DiskState::UpToDate {
                return of(format!(
                    "volume {} is {:?}",
                    device.volume, device.disk_state
                ));
            }
            if device.upper_pending + device.lower_pending > 0 {
                return of(format!("volume {} has something pending", device.volume));
            }
        }
        let near = |peer: usize| nodes.contains(&peer);
        for c in snapshot.connections.iter() {
            if !near(usize::from(c.peer.0)) {
                // A ping has to find out.
                if c.state == ConnState::Connected {
                    return of(format!("is connected to node {} still", c.peer));
                }
                continue;
            }
            if c.state != ConnState::Connected {
                return of(format!("connection to node {} is {:?}", c.peer, c.state));
            }
            let mut odd = c.peer_devices.iter().filter(|p| {
                p.repl_state != ReplState::Established
                    || p.disk_state != DiskState::UpToDate
                    || p.pending + p.unacked + p.out_of_sync_sectors > 0
            });
            if let Some(p) = odd.next() {
                return of(format!(
                    "volume {} with node {}: {:?}, peer disk {:?}, {} sectors out of sync",
                    p.volume, c.peer, p.repl_state, p.disk_state, p.out_of_sync_sectors
                ));
            }
        }
        None
    })
}
