//! What a disk changes behind everybody's back: an online verify finds it, and the resync of the
//! next connect mends it.

use std::collections::{BTreeMap, BTreeSet};

use lockstep_core::command::Command;
use lockstep_core::state::{ReplSets, ReplState};
use lockstep_format::disk::v09::DeviceFlags;
use lockstep_format::units::VolumeNr;

use crate::cover;
use crate::drive::PATIENCE;
use crate::operator::Operator;
use crate::plan::SMALL_BLOCKS;
use crate::rng::{Rng, mixed};
use crate::sometimes;
use crate::swarm::{rest, wait_for};
use crate::world::{MS, SECOND, Weather, World, id, name};

/// Versions from here on are those that a disk has made up.
pub(crate) const BY_ITSELF: u64 = 1 << 52;

/// Blocks at a device's end among which some change.
const REACH: u64 = 200;

/// The same where the verify is cut short in between, and so many of them.
const FAR: u64 = 1200;
const FAR_COUNT: u64 = 40;

/// So many verifies that come no further may be cut short by a link that is lost under them.
const ATTEMPTS: usize = 4;

/// What becomes of the verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// It runs to the volume's end.
    Through,
    /// The link is lost under it, and the next one goes on where it was.
    CutShort,
    /// It ends at a stop sector, and another one begins there.
    Stops,
}

/// Two nodes are whole and at rest. One disk changes, a verify runs, the nodes part and meet.
pub(crate) fn is_found(w: &mut World, o: &mut Operator, seed: u64) {
    let mut rng = Rng::new(mixed(&[seed, 0x726f_7474_656e]));
    // Between two Secondaries only an operator can say whose data are right.
    let Some(primary) = o.primary.filter(|_| !o.is_changing()) else {
        return;
    };
    let way = match mixed(&[seed, 0x77_6179]) % 4 {
        // All of a large device takes longer than anybody waits.
        0 | 1 if w.config.blocks <= SMALL_BLOCKS => Way::CutShort,
        2 => Way::Stops,
        _ => Way::Through,
    };
    let (reach, count) = match way {
        Way::CutShort => (FAR, FAR_COUNT),
        Way::Through | Way::Stops => (REACH, 3),
    };
    let mut changed = Vec::new();
    let mut from = Vec::new();
    for volume in 0..usize::from(w.config.volumes) {
        let devices = w.snapshot(primary).map(|s| s.devices).unwrap_or_default();
        let size = devices
            .iter()
            .find(|d| usize::from(d.volume.0) == volume)
            .map_or(0, |d| d.size_sectors / 8);
        let touched = w.history.touched(volume as u16);
        let node = rng.below(2) as usize;
        from.push(size.saturating_sub(reach));
        for number in 0..count {
            let block = match number {
                0 => size.saturating_sub(1),
                _ => from[volume] + rng.below(reach.min(size)),
            };
            let is_new = !changed.contains(&(volume, block));
            if is_new && touched.binary_search(&block).is_err() {
                w.trace(node, || {
                    format!("== block {block} of volume {volume} changes on its disk")
                });
                w.nodes[node].disks[volume].content[block as usize] = BY_ITSELF + block;
                changed.push((volume, block));
            }
        }
    }
    let driver = rng.below(2) as usize;
    let from: Vec<_> = from.into_iter().map(Some).collect();
    let all = vec![None; from.len()];
    let verified = match way {
        Way::Through => verify(w, o, driver, &from, &all),
        Way::CutShort => cut_short(w, o, (driver, &mut rng), &from, &all),
        Way::Stops => {
            let middle = |first: &Option<u64>| first.map(|first| first + rng.range(1, reach));
            let stops: Vec<_> = from.iter().map(middle).collect();
            let verified = verify(w, o, driver, &from, &stops);
            if verified {
                nothing_behind_is_marked(w, &changed, &stops);
            }
            verified && w.violation.is_none() && verify(w, o, driver, &stops, &all)
        }
    };
    if !verified {
        return;
    }
    // The driver's word may be on its way.
    let until = w.now + 20 * SECOND;
    wait_for(w, o, 30 * SECOND, "news arrive", |w, _| {
        unmarked(w, &changed).filter(|_| w.now < until)
    });
    if let Some(text) = unmarked(w, &changed) {
        w.fail(text);
    }
    if w.violation.is_some() || !o.disconnect(w, driver, 1 - driver, false) {
        return;
    }
    wait_for(w, o, 60 * SECOND, "the nodes part", |w, _| {
        let linked = w.shares_link(0, 1) || !w.nodes[driver].commands.is_empty();
        linked.then(|| "they have not".into())
    });
    o.reconnect(w);
    let mut round = 0u64;
    wait_for(w, o, PATIENCE, "the difference is copied", |w, o| {
        round += 1;
        if round.is_multiple_of(50) {
            o.heal(w);
        }
        rest(w)
    });
    if w.violation.is_some() {
        return;
    }
    for (volume, block) in changed {
        let content = |node: usize| w.nodes[node].disks[volume].content[block as usize];
        let (a, b) = (content(0), content(1));
        if a != b {
            w.fail(format!(
                "block {block} of volume {volume} is {a} on A and {b} on B, although a verify has \
                 found it and the nodes have met again"
            ));
            return;
        }
    }
}

impl World {
    /// A replica is about to be thrown away as a whole: the reason is that something is wrong with it.
    pub(crate) fn expect_rot(&mut self, node: usize, volume: u16, whole: bool) {
        if self.config.weather == Weather::ByPlace && whole {
            self.nodes[node].disks[usize::from(volume)].is_bad = true;
        }
    }
}

/// A disk that is thrown away is not called consistent any more: from now on what is wrong with it may be
/// seen, in blocks that nobody has written.
pub(crate) fn comes_to_light(w: &mut World, node: usize, volume: usize) {
    let disk = &w.nodes[node].disks[volume];
    let flags = disk.flags().filter(|_| disk.is_bad);
    if flags.is_none_or(|f| f.contains(DeviceFlags::CONSISTENT)) {
        return;
    }
    let connections = w.snapshot(node).map(|s| s.connections).unwrap_or_default();
    let mut devices = connections.iter().flat_map(|c| &c.peer_devices);
    let begins = ReplState::StartingSyncT;
    if !devices.any(|p| usize::from(p.volume.0) == volume && p.repl_state == begins) {
        return;
    }
    become_bad(w, node, volume);
}

/// Some blocks that nobody has written to are not what they were.
pub(crate) fn become_bad(w: &mut World, node: usize, volume: usize) {
    let touched = w.history.touched(volume as u16);
    let mut rng = Rng::new(mixed(&[w.config.seed, w.now, 0x62_6164]));
    let size = w.config.blocks;
    for _ in 0..4 {
        let block = rng.below(size);
        if touched.binary_search(&block).is_err() {
            w.nodes[node].disks[volume].content[block as usize] = (1 << 51) + block;
        }
    }
    w.nodes[node].disks[volume].is_bad = false;
    w.trace(node, || format!("== blocks of volume {volume} are bad"));
}

/// A block that differs and is not marked on both nodes.
fn unmarked(w: &World, changed: &[(usize, u64)]) -> Option<String> {
    let misses = |(volume, block): &&(usize, u64)| {
        let knows = |node: usize| cover::suspects(w, *volume, node, 1 - node, *block);
        let content = |node: usize| w.nodes[node].disks[*volume].content[*block as usize];
        // A verify that was cut short may have found it, and the next connect copied it.
        content(0) != content(1) && !(knows(0) && knows(1))
    };
    let (volume, block) = changed.iter().find(misses)?;
    Some(format!(
        "a verify has ended, but not both nodes mark block {block} of volume {volume}, which differs"
    ))
}

/// A verify that was told to stop has not looked behind.
fn nothing_behind_is_marked(w: &mut World, changed: &[(usize, u64)], stops: &[Option<u64>]) {
    let behind = |(volume, block): &&(usize, u64)| stops[*volume].is_some_and(|s| *block >= s);
    for (volume, block) in changed.iter().filter(behind) {
        if (0..2).any(|node| cover::suspects(w, *volume, node, 1 - node, *block)) {
            let stop = stops[*volume].unwrap_or(0);
            w.fail(format!(
                "a verify that was to stop at block {stop} of volume {volume} has marked block {block}"
            ));
            return;
        }
    }
}

/// Which volumes' verifies have begun, and which of them have ended on the link on which they did.
#[derive(Default)]
struct Verified {
    running: BTreeSet<usize>,
    begun: BTreeSet<usize>,
    ended: BTreeSet<usize>,
}

impl Verified {
    /// Often enough that no link is lost and made again in between.
    fn look(&mut self, w: &World, driver: usize) {
        let running: BTreeSet<usize> = in_state(w, driver, |repl| repl.is_verify()).collect();
        let idle = in_state(w, driver, |repl| repl == ReplState::Established);
        let ended = idle.filter(|volume| self.running.contains(volume));
        self.ended.extend(ended);
        self.begun.extend(running.iter().copied());
        self.running = running;
    }
}

/// Begins verifies of the volumes where none has ended; where the last one was cut short, from there.
fn start(
    w: &mut World,
    driver: usize,
    from: &[Option<u64>],
    to: &[Option<u64>],
    before: &Verified,
) {
    for (volume, (first, end)) in from.iter().zip(to).enumerate() {
        if before.ended.contains(&volume) {
            continue;
        }
        let first = first.filter(|_| !before.begun.contains(&volume));
        let command = Command::Verify {
            peer: id(1 - driver),
            volume: VolumeNr(volume as u16),
            start: first.map(|first| first * 8),
            stop: end.map(|end| end * 8),
        };
        w.command(driver, command);
    }
}

/// Each volume's verify loses its link, and the next one goes on.
fn cut_short(
    w: &mut World,
    o: &mut Operator,
    (driver, rng): (usize, &mut Rng),
    from: &[Option<u64>],
    all: &[Option<u64>],
) -> bool {
    let mut verified = Verified::default();
    start(w, driver, from, all, &verified);
    let share = rng.below(8);
    let until = w.now + 20 * SECOND;
    while w.now < until && w.violation.is_none() && !is_in_the_middle(w, driver, share) {
        w.run_for(MS / 10);
        o.tick(w);
        verified.look(w, driver);
        if w.nodes[driver].commands.is_empty() && !verifies(w, driver) {
            break;
        }
    }
    let begun = verifies(w, driver);
    sometimes!(w.marks, begun, "verify-cut-short");
    // What is under way is lost.
    w.set_blocked(0, 1, true);
    w.set_blocked(1, 0, true);
    w.reset(0, 1);
    w.run_for(50 * MS);
    w.set_blocked(0, 1, false);
    w.set_blocked(1, 0, false);
    meet_again(w, o);
    w.violation.is_none() && go_on(w, o, driver, from, all, verified)
}

/// A verify has asked for blocks that were not compared yet, and so many eighths of all.
fn is_in_the_middle(w: &World, driver: usize, share: u64) -> bool {
    let Some(snapshot) = w.snapshot(driver) else {
        return false;
    };
    let size = |volume: VolumeNr| {
        let mut devices = snapshot.devices.iter().filter(|d| d.volume == volume);
        devices.next().map_or(0, |d| d.size_sectors)
    };
    let mut devices = snapshot.connections.iter().flat_map(|c| &c.peer_devices);
    devices.any(|p| {
        p.verify.as_ref().is_some_and(|v| {
            let all = size(p.volume).saturating_sub(v.start_sector);
            let asked = v.position_sector.saturating_sub(v.start_sector);
            let compared = all.saturating_sub(v.left_sectors);
            p.repl_state == ReplState::VerifyS && asked > compared && asked * 8 >= all * share
        })
    })
}

fn verifies(w: &World, node: usize) -> bool {
    in_state(w, node, |repl| repl.is_verify()).next().is_some()
}

/// The volumes towards the peer that are in some state.
fn in_state(w: &World, node: usize, is: impl Fn(ReplState) -> bool) -> impl Iterator<Item = usize> {
    let connections = w.snapshot(node).map(|s| s.connections).unwrap_or_default();
    let devices = connections.into_iter().flat_map(|c| c.peer_devices);
    let such = devices.filter(move |p| is(p.repl_state));
    such.map(|p| usize::from(p.volume.0))
}

fn meet_again(w: &mut World, o: &mut Operator) {
    let mut round = 0u64;
    wait_for(w, o, PATIENCE, "the nodes meet after a verify", |w, o| {
        round += 1;
        if round.is_multiple_of(50) {
            o.heal(w);
        }
        rest(w)
    });
}

/// Verifies each volume from a block on to another one; again where the link was lost under it. False if that failed.
fn verify(
    w: &mut World,
    o: &mut Operator,
    driver: usize,
    from: &[Option<u64>],
    to: &[Option<u64>],
) -> bool {
    go_on(w, o, driver, from, to, Verified::default())
}

/// The same, where some may have ended before and others were cut short.
fn go_on(
    w: &mut World,
    o: &mut Operator,
    driver: usize,
    from: &[Option<u64>],
    to: &[Option<u64>],
    mut verified: Verified,
) -> bool {
    let mut reached = BTreeMap::new();
    let mut idle = 0;
    while idle < ATTEMPTS {
        let links = w.nodes[driver].links.clone();
        verified.running.clear();
        start(w, driver, from, to, &verified);
        let mut further = false;
        wait_for(w, o, 100 * SECOND, "a verify ends", |w, _| {
            verified.look(w, driver);
            further |= begins_further(w, driver, &mut reached, &mut verified.ended);
            let waits = |node: usize| {
                (verifies(w, node) || !w.nodes[node].commands.is_empty())
                    .then(|| format!("{} still verifies", name(node)))
            };
            (0..2).find_map(waits)
        });
        if w.violation.is_some() {
            return false;
        }
        if w.nodes[driver].links == links && w.shares_link(0, 1) {
            return true;
        }
        w.trace(driver, || "== the verify was cut short".into());
        meet_again(w, o);
        // On a slow line each attempt may come only so far, because a ping is late among many packets; the next one
        // goes on there.
        idle = if further { 0 } else { idle + 1 };
    }
    if w.violation.is_none() {
        w.fail(format!(
            "{ATTEMPTS} verifies were cut short, one after the other, and came no further"
        ));
    }
    false
}

/// A verify of some volume has begun behind where all earlier ones began. One that begins before that shows that the last
/// one had ended, too soon before the link was lost for a look.
fn begins_further(
    w: &World,
    driver: usize,
    reached: &mut BTreeMap<VolumeNr, u64>,
    ended: &mut BTreeSet<usize>,
) -> bool {
    let connections = w
        .snapshot(driver)
        .map(|s| s.connections)
        .unwrap_or_default();
    let mut further = false;
    for p in connections.iter().flat_map(|c| &c.peer_devices) {
        let running = p.repl_state == ReplState::VerifyS;
        let Some(verify) = p.verify.as_ref().filter(|_| running) else {
            continue;
        };
        let most = reached.entry(p.volume).or_default();
        further |= verify.start_sector > *most;
        if verify.start_sector < *most {
            ended.insert(usize::from(p.volume.0));
        }
        *most = verify.start_sector.max(*most);
    }
    further
}
