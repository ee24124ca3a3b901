//! Random worlds: one seed says which faults happen, how often, and everything else.

use std::panic::{AssertUnwindSafe, catch_unwind};

use lockstep_core::command::Command;
use lockstep_core::event::RequestKind;
use lockstep_core::options::Protocol;
use lockstep_format::units::VolumeNr;

use crate::check;
use crate::disk::Where;
use crate::drive::{PATIENCE, Progress};
use crate::faults::{BY_NAME, Undo, happen, revert};
pub use crate::faults::{FAULTS, Fault};
use crate::operator::{Operator, Settings};
use crate::rng::Rng;
use crate::world::{Config, MS, SECOND, Weather, World, name};

/// What the command line fixes; the rest follows from the seed.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Newest protocol version that the nodes offer instead of the newest that there is.
    pub protocol_max: Option<u32>,
    /// Number of nodes.
    pub nodes: Option<usize>,
    /// Only these faults.
    pub faults: Option<Vec<Fault>>,
    /// At most so many faults.
    pub max_faults: Option<u64>,
    /// At most so many requests.
    pub max_requests: Option<u64>,
    /// Nodes whose disks have the metadata of DRBD 8.4.
    pub v08: Vec<usize>,
    /// Print everything.
    pub trace: bool,
}

/// What became of a world.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// What went wrong.
    pub violation: Option<String>,
    /// Hash over everything that happened.
    pub fingerprint: u64,
    /// Events.
    pub steps: u64,
    /// Virtual time in nanoseconds.
    pub time: u64,
    /// Acknowledged writes.
    pub acked: u64,
    /// In words: what kind of world it was.
    pub shape: String,
}

struct Load {
    kinds: [u32; 6],
    regions: Vec<u64>,
    depth: usize,
    think: u64,
    left: u64,
    next_at: u64,
}

/// Runs the world of a seed.
pub fn run(seed: u64, limits: &Limits) -> Outcome {
    let mut shape = String::new();
    let mut rng = Rng::new(seed ^ 0x5eed);
    let (config, settings, plan, load) = draw(seed, &mut rng, limits, &mut shape);
    let mut w = World::new(config);
    for node in &limits.v08 {
        for disk in &mut w.nodes[*node].disks {
            disk.downgrade();
        }
    }
    let mut operator = Operator::new(settings, &w.config);
    let result = catch_unwind(AssertUnwindSafe(|| {
        play(&mut w, &mut operator, &mut rng, plan, load);
    }));
    if let Err(panic) = result {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()))
            .unwrap_or_default();
        w.violation = Some(format!("panic: {text}"));
    }
    Outcome {
        seed,
        violation: w.violation,
        fingerprint: w.fingerprint,
        steps: w.steps,
        time: w.now,
        acked: w.acked,
        shape,
    }
}

/// Which faults happen in this world, and when.
struct Plan {
    faults: Vec<Fault>,
    left: u64,
    pause: u64,
    full_sync: bool,
    busy_end: bool,
}

fn draw(
    seed: u64,
    rng: &mut Rng,
    limits: &Limits,
    shape: &mut String,
) -> (Config, Settings, Plan, Load) {
    let nodes = limits
        .nodes
        .unwrap_or(if rng.permille(600) { 2 } else { 3 });
    let protocol = match rng.below(8) {
        0 => Protocol::A,
        1 => Protocol::B,
        _ => Protocol::C,
    };
    // Before 90 the first sync cannot be skipped.
    let skips = limits.protocol_max.is_none_or(|newest| newest >= 90);
    let large = rng.permille(250) && skips;
    let mut config = Config {
        seed,
        nodes,
        protocol,
        volumes: if rng.permille(200) { 2 } else { 1 },
        blocks: if large { 131_072 } else { 8192 },
        net_delay: rng.pick(&[MS / 20, MS / 5, MS, MS * 5]),
        disk_delay: rng.pick(&[MS / 20, MS / 5, MS, MS * 5]),
        resync_max_kib_s: rng.pick(&[2048, 10_240, 102_400]),
        trace: limits.trace,
        weather: Weather::OneStream,
        bandwidth: None,
        metadata: Where::External,
        diskless: 0,
        slow: None,
        handlers: false,
        bitmap_shifts: Vec::new(),
    };
    let mut settings = Settings::new(protocol, config.resync_max_kib_s);
    if rng.permille(600) {
        settings.net.timeout_tenths = 20;
        settings.net.ping_int_s = 3;
        settings.net.connect_int_s = 3;
    }
    settings.peer.resync_without_replication = config.seed % 4 != 1;
    settings.connect_first = rng.permille(300);
    if let Some(newest) = limits.protocol_max {
        settings.resource.protocol_max = newest;
        if newest < 100 {
            config.volumes = 1;
        }
    }
    settings.net.max_epoch_size = rng.pick(&[20, 2048]);
    settings.net.use_rle = rng.permille(700);
    let mut faults = Vec::new();
    for (fault, word) in FAULTS {
        let on = rng.permille(400);
        let wanted = limits.faults.as_ref().is_none_or(|l| l.contains(&fault));
        if on && wanted {
            faults.push(fault);
            *shape += word;
            shape.push(' ');
        }
    }
    for (fault, word) in BY_NAME {
        if limits.faults.as_ref().is_some_and(|l| l.contains(&fault)) {
            faults.push(fault);
            *shape += word;
            shape.push(' ');
        }
    }
    let left = rng.range(0, 24);
    let requests = rng.range(20, 600);
    let plan = Plan {
        faults,
        left: limits.max_faults.map_or(left, |m| m.min(left)),
        pause: rng.pick(&[20 * MS, 200 * MS, 2 * SECOND]),
        full_sync: (!large && rng.permille(400)) || !skips,
        busy_end: rng.permille(500),
    };
    let count = rng.range(1, 6);
    let regions = if large && rng.permille(700) {
        (0..120).map(|i| i * 1024 + 17).collect()
    } else {
        (0..count).map(|_| rng.below(config.blocks - 64)).collect()
    };
    let kinds = [
        40 + rng.below(60) as u32,
        rng.below(60) as u32,
        rng.below(12) as u32,
        rng.below(12) as u32,
        rng.below(8) as u32 * u32::from(rng.permille(400)),
        rng.below(8) as u32 * u32::from(rng.permille(400)),
    ];
    let mut kinds = kinds;
    if limits.protocol_max.is_some_and(|newest| newest < 100) {
        // Without discards, and with one volume (above).
        kinds[4..].fill(0);
    }
    let load = Load {
        kinds,
        regions,
        depth: rng.range(1, 20) as usize,
        think: rng.pick(&[MS / 10, MS, 10 * MS, 50 * MS]),
        left: limits.max_requests.map_or(requests, |m| m.min(requests)),
        next_at: 0,
    };
    *shape = format!(
        "{nodes} nodes, {protocol:?}, {} volumes, {} MiB, faults: {shape}",
        config.volumes,
        config.blocks / 256
    );
    (config, settings, plan, load)
}

fn play(w: &mut World, o: &mut Operator, rng: &mut Rng, plan: Plan, mut load: Load) {
    bring_up(w, o, plan.full_sync);
    trouble(
        w,
        o,
        rng,
        plan.faults.as_slice(),
        plan.left,
        plan.pause,
        &mut load,
    );
    if w.violation.is_some() {
        return;
    }
    check::differences_are_marked(w);
    w.trace(0, || "== the trouble is over".into());
    converge(w, o, rng, plan.busy_end, &mut load);
}

/// Runs until something holds; a violation after `limit`.
pub(crate) fn wait_for(
    w: &mut World,
    o: &mut Operator,
    limit: u64,
    what: &str,
    mut done: impl FnMut(&mut World, &mut Operator) -> Option<String>,
) {
    let end = w.now + limit;
    loop {
        if w.violation.is_some() {
            return;
        }
        let Some(mut missing) = done(w, o) else {
            return;
        };
        if w.now >= end {
            if missing.is_empty() {
                missing = check::not_converged(w).unwrap_or_default();
            }
            w.fail(format!("{what} within {} s: {missing}", limit / SECOND));
            return;
        }
        w.run_for(20 * MS);
        o.tick(w);
    }
}

/// The same with a limit from the last block that was copied.
pub(crate) fn wait_for_copies(
    w: &mut World,
    o: &mut Operator,
    limit: u64,
    what: &str,
    mut done: impl FnMut(&mut World, &mut Operator) -> Option<String>,
) {
    let (mut left, mut moved) = (u64::MAX, w.now);
    wait_for(w, o, PATIENCE * 20, what, |w, o| {
        let missing = done(w, o);
        let now_left = check::left_to_sync(w);
        if now_left < left {
            moved = w.now;
        }
        left = now_left;
        if let Some(missing) = &missing
            && w.now >= moved + limit
        {
            w.fail(format!("{what} within {} s: {missing}", limit / SECOND));
        }
        missing
    });
}

/// What is missing to rest; an empty text if that is plain without looking closely.
pub(crate) fn rest(w: &World) -> Option<String> {
    if check::is_busy(w) {
        Some(String::new())
    } else {
        check::not_converged(w)
    }
}

/// All nodes up, connected, in sync, and the first one Primary.
pub fn bring_up(w: &mut World, o: &mut Operator, full_sync: bool) {
    for node in 0..w.nodes.len() {
        o.start(w, node);
    }
    wait_for(w, o, 60 * SECOND, "all nodes connect", |w, o| {
        for node in 0..w.nodes.len() {
            if !o.is_up(node) {
                return Some(format!("{} is not up", name(node)));
            }
            let snapshot = w.snapshot(node)?;
            for c in snapshot.connections {
                for p in c.peer_devices {
                    if p.repl_state != lockstep_core::state::ReplState::Established {
                        return Some(format!(
                            "{} with node {}: {:?} {:?}",
                            name(node),
                            c.peer,
                            c.state,
                            p.repl_state
                        ));
                    }
                }
            }
        }
        None
    });
    if w.violation.is_some() {
        return;
    }
    if !full_sync {
        for volume in 0..w.config.volumes {
            w.command(
                0,
                Command::NewCurrentUuid {
                    volume: VolumeNr(volume),
                    clear_bitmap: true,
                    force_resync: false,
                },
            );
        }
        // A state of 8.4 from before, which arrives late, would look like a peer that lost its data
        // and got them back: the new Primary would make a generation that the peer never hears of.
        let is_old =
            o.settings.resource.protocol_max <= 101 && w.config.weather == Weather::ByPlace;
        wait_for(w, o, 60 * SECOND, "the initial sync is skipped", |w, _| {
            rest(w).or_else(|| {
                (is_old && w.carries_packets()).then(|| "packets are on their way".into())
            })
        });
    }
    o.promote(w, 0, full_sync);
    wait_for(w, o, 60 * SECOND, "the first promotion", |_, o| {
        o.primary.is_none().then(|| "not Primary yet".into())
    });
    wait_for(w, o, 600 * SECOND, "the first sync ends", |w, _| rest(w));
    o.ready = true;
    // A handler that fails sooner ends a connection that nobody looks after yet.
    w.handlers_behave = false;
}

fn offer(w: &mut World, o: &Operator, load: &mut Load, rng: &mut Rng) {
    load.next_at = w.now + rng.delay(load.think);
    let Some(node) = o.accepts_io() else { return };
    if !w.is_up(node) || w.nodes[node].requests.len() >= load.depth || load.left == 0 {
        return;
    }
    load.left -= 1;
    let total: u32 = load.kinds.iter().sum();
    let mut pick = rng.below(u64::from(total)) as u32;
    let mut kind = 0;
    while pick >= load.kinds[kind] {
        pick -= load.kinds[kind];
        kind += 1;
    }
    let kind = match kind {
        0 => RequestKind::Write { fua: false },
        1 => RequestKind::Read,
        2 => RequestKind::Flush,
        3 => RequestKind::Write { fua: true },
        4 => RequestKind::Discard,
        _ => RequestKind::Zeroes { unmap: false },
    };
    let volume = rng.below(u64::from(w.config.volumes)) as u16;
    let block = rng.pick(&load.regions) + rng.below(16);
    let count = match rng.below(10) {
        0 => rng.range(8, 33),
        1..=4 => rng.range(1, 9),
        _ => 1,
    };
    let (block, count) = match kind {
        RequestKind::Flush => (0, 0),
        _ => (block, count),
    };
    w.request(node, volume, kind, block, count);
}

#[allow(clippy::too_many_arguments)]
fn trouble(
    w: &mut World,
    o: &mut Operator,
    rng: &mut Rng,
    faults: &[Fault],
    mut left: u64,
    pause: u64,
    load: &mut Load,
) {
    let mut fault_at = w.now + rng.delay(pause);
    let mut operator_at = w.now;
    let mut undo: Vec<(u64, Undo)> = Vec::new();
    let end = w.now + 600 * SECOND;
    while w.violation.is_none() && w.now < end && (left > 0 && !faults.is_empty() || load.left > 0)
    {
        let until = fault_at.min(operator_at).min(load.next_at);
        while w.step(until) {}
        if w.violation.is_some() {
            return;
        }
        w.now = w.now.max(until);
        if w.now >= load.next_at {
            offer(w, o, load, rng);
        }
        if w.now >= operator_at {
            operator_at = w.now + 5 * MS;
            o.tick(w);
            check::one_primary(w);
            if o.primary.is_none() && !o.is_changing() && rng.permille(100) {
                let heirs = o.heirs();
                if !heirs.is_empty() {
                    let heir = rng.pick(&heirs);
                    o.promote(w, heir, false);
                }
            }
            let now = w.now;
            let mut due = Vec::new();
            undo.retain(|(at, what)| {
                let is_due = *at <= now;
                if is_due {
                    due.push(*what);
                }
                !is_due
            });
            for what in due {
                revert(w, o, what);
            }
        }
        if w.now >= fault_at {
            fault_at = w.now + rng.delay(pause);
            if left > 0 && !faults.is_empty() {
                left -= 1;
                let fault = rng.pick(faults);
                let undone = w.now + rng.delay(pause.max(200 * MS) * 2);
                if let Some(what) = happen(w, o, rng, fault) {
                    undo.push((undone, what));
                }
                if rng.permille(250) {
                    fault_at = w.now + rng.delay(2 * MS);
                }
            }
        }
    }
    for (_, what) in undo {
        if !matches!(what, Undo::Start(_)) || rng.permille(500) {
            revert(w, o, what);
        }
    }
}

/// Marks between nodes that a third one has brought together count as rest, and nodes ask each other about them
/// for some seconds; what then nobody can vouch for is copied. That ends, too.
pub(crate) fn settle_marks(w: &mut World, o: &mut Operator) {
    let until = w.now + 15 * SECOND;
    // After a violation time stands still.
    while w.violation.is_none()
        && w.storage().len() > 2
        && check::marks_are_left(w)
        && w.now < until
    {
        w.run_for(SECOND / 10);
        o.tick(w);
    }
    wait_for(w, o, PATIENCE * 20, "left marks are copied", |w, _| rest(w));
}

/// The faults stop; everything must come together.
fn converge(w: &mut World, o: &mut Operator, rng: &mut Rng, busy: bool, load: &mut Load) {
    for a in 0..w.nodes.len() {
        for b in 0..w.nodes.len() {
            w.set_blocked(a, b, false);
        }
    }
    o.calm = true;
    let mut round = 0u64;
    let busy_until = w.now + 20 * SECOND;
    load.left = 2000;
    load.think = load.think.max(MS);
    let what = "everything is in sync again";
    let mut progress = Progress::of(w);
    wait_for(w, o, PATIENCE * 20, what, |w, o| {
        if round.is_multiple_of(50) {
            o.heal(w);
            progress.look(w, what);
        }
        round += 1;
        if busy && w.now < busy_until {
            if o.primary.is_none() && !o.is_changing() && rng.permille(100) {
                let heirs = o.heirs();
                if let Some(heir) = heirs.first() {
                    o.promote(w, *heir, false);
                }
            }
            for _ in 0..4 {
                offer(w, o, load, rng);
            }
        }
        if w.stands_still() {
            // The last fault may still end a connection.
            return Some(String::new());
        }
        rest(w)
    });
    if w.violation.is_some() {
        return;
    }
    settle_marks(w, o);
    if w.violation.is_some() {
        return;
    }
    w.run_for(3 * SECOND);
    o.tick(w);
    if let Some(text) = check::not_converged(w) {
        w.fail(format!("it does not stay in sync: {text}"));
        return;
    }
    check::replicas_are_equal(w);
    check::differences_are_marked(w);
    check::one_primary(w);
}
