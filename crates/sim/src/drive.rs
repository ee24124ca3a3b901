//! Runs a planned world: brings the cluster up, lets its faults and requests happen when the plan
//! says, heals, and waits until everything is whole again.

use std::panic::{AssertUnwindSafe, catch_unwind};

use lockstep_core::options::Protocol;
use lockstep_core::options::Quorum;

use crate::absence;
use crate::at_rest;
use crate::branches;
use crate::calm;
use crate::check;
use crate::cover;
use crate::disk::Lose;
use crate::faults::{Fault, Undo, happen, revert, word};
use crate::marks::{self, Marks};
use crate::operator::Operator;
use crate::pair::Pair;
use crate::plan::{Orders, Plan, PlannedFault};
use crate::promises;
use crate::rng::{Rng, mixed};
use crate::rot;
use crate::story::{self, Tail};
use crate::swarm::{bring_up, rest, wait_for};
use crate::world::{MS, SECOND, World, name};

/// How much of a world's trace is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trace {
    /// Nothing.
    #[default]
    Off,
    /// Every line goes to standard output.
    Print,
    /// The last lines of each node are kept.
    Keep(usize),
}

/// What became of a planned world.
#[derive(Clone, Debug)]
pub struct Played {
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
    /// Rare paths that were reached.
    pub marks: Marks,
    /// In words: what kind of world it was.
    pub shape: String,
    /// The last lines of each node, if they were kept.
    pub tail: Option<Tail>,
    /// Each node's state at the end, in words; only with a trace.
    pub states: Vec<String>,
    /// Nodes.
    pub nodes: usize,
}

impl Played {
    /// Before anything happened.
    pub(crate) fn nothing(seed: u64) -> Self {
        Played {
            seed,
            violation: None,
            fingerprint: 0,
            steps: 0,
            time: 0,
            acked: 0,
            marks: Marks::default(),
            shape: String::new(),
            tail: None,
            states: Vec::new(),
            nodes: 0,
        }
    }
}

/// Runs the planned world of a seed.
pub fn run(seed: u64, orders: &Orders, trace: Trace) -> Played {
    let mut plan = Plan::new(seed, orders);
    plan.config.trace = trace == Trace::Print;
    let shape = plan.describe();
    let mut w = World::new(plan.config.clone());
    for node in &plan.theme.old_metadata {
        for disk in &mut w.nodes[*node].disks {
            disk.downgrade();
        }
    }
    for node in 0..w.nodes.len() {
        for disk in &mut w.nodes[node].disks {
            disk.keeps_discarded = plan.keeps_discarded >> node & 1 == 1;
        }
    }
    if let Trace::Keep(lines) = trace {
        w.tail = Some(Tail::new(w.nodes.len(), lines));
    }
    let mut o = Operator::new(plan.settings.clone(), &w.config);
    let played = catch_unwind(AssertUnwindSafe(|| {
        Drive::new(&plan).play(&mut w, &mut o);
    }));
    if let Err(panic) = played {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()))
            .unwrap_or_default();
        w.violation = Some(format!("panic: {text}"));
    }
    let states = match trace {
        Trace::Off => Vec::new(),
        Trace::Print | Trace::Keep(_) => (0..w.nodes.len()).map(|n| state(&w, n)).collect(),
    };
    Played {
        states,
        violation: w.violation,
        fingerprint: w.fingerprint,
        steps: w.steps,
        time: w.now,
        acked: w.acked,
        marks: w.marks,
        shape,
        tail: w.tail,
        nodes: w.nodes.len(),
        ..Played::nothing(seed)
    }
}

fn state(w: &World, node: usize) -> String {
    let snapshot = catch_unwind(AssertUnwindSafe(|| w.snapshot(node)));
    match snapshot {
        Ok(Some(snapshot)) => story::state(&snapshot),
        Ok(None) => "down".to_string(),
        Err(_) => "broken".to_string(),
    }
}

struct Drive<'a> {
    plan: &'a Plan,
    /// When the trouble began.
    start: u64,
    next_fault: usize,
    next_request: usize,
    undo: Vec<(u64, Undo)>,
    /// When the operator looks next.
    look_at: u64,
    /// When the operator promotes an heir; none while there is a Primary.
    promote_at: Option<u64>,
    promotions: u64,
    /// When followers are compared with what was acknowledged.
    compare_at: u64,
    /// When nodes are asked next whether they know of each difference.
    know_at: u64,
    /// When the operator mends things next; none while there is trouble.
    heal_at: Option<u64>,
    /// The operator of two Primaries.
    pair: Option<Pair>,
}

impl<'a> Drive<'a> {
    fn new(plan: &'a Plan) -> Self {
        Drive {
            plan,
            start: 0,
            next_fault: 0,
            next_request: 0,
            undo: Vec::new(),
            look_at: 0,
            promote_at: None,
            promotions: 0,
            compare_at: 0,
            know_at: 0,
            heal_at: None,
            pair: None,
        }
    }

    fn play(&mut self, w: &mut World, o: &mut Operator) {
        bring_up(w, o, self.plan.full_sync);
        if w.violation.is_some() {
            return;
        }
        if let Some(shares) = self.plan.shares {
            self.pair = Some(Pair::new(self.plan, shares, w, o));
        }
        w.history.takes_turns = o.settings.migrates;
        self.start = w.now;
        self.look_at = w.now;
        w.watches = self.plan.watches;
        w.read_back = self.plan.theme.reads_back.then(Vec::new);
        self.go_on(w, o, |d| {
            d.next_fault < d.plan.faults.len() || !d.undo.is_empty()
        });
        if w.violation.is_some() {
            return;
        }
        check::differences_are_marked(w);
        w.trace(0, || "== the trouble is over".into());
        self.heal(w, o);
        self.heal_at = Some(w.now + SECOND);
        // The news of the last fault must arrive before anybody asks whether all is well.
        let settled = w.now + SECOND;
        self.go_on(w, o, |d| {
            d.look_at < settled || d.next_request < d.plan.requests.len()
        });
        let mut round = 0u64;
        let takeover = self.plan.takeover;
        let mut whole_since = None;
        let mut refused = false;
        let protocol = o.settings.resource.protocol_max;
        let mut progress = Progress::of(w);
        let what = "everything is in sync again";
        wait_for(w, o, PATIENCE * 20, what, |w, o| {
            if round.is_multiple_of(50) {
                o.heal(w);
                promises::followers_are_current(w);
                promises::replicas_agree(w);
                promises::changes_end(w, o.settings.resource.twopc_timeout_tenths);
                progress.look(w, what);
            }
            round += 1;
            if let Some(pair) = self.pair.as_mut() {
                pair.look(w, o);
            } else if round > takeover / (20 * MS) && o.primary.is_none() && !o.is_changing() {
                promote_an_heir(w, o, round);
            }
            if check::is_refused_for_its_age(w, protocol) {
                refused = true;
                return None;
            }
            let lacks_a_disk = check::lacks_a_disk(w);
            // With protocol A nobody waits for what a stream or a process holds that stands still.
            let holds = || {
                w.stands_still()
                    .then(|| "a stream, a process or a disk stands still".to_string())
            };
            // With protocol A the wire may be so slow that what was written last is on its way for seconds.
            let sends = || {
                let unsettled = w
                    .nodes
                    .iter()
                    .any(|n| n.resource.as_ref().is_some_and(|r| r.unsettled() > 0));
                let early = w.config.protocol == Protocol::A;
                (early && unsettled).then(|| "the last writes are on their way".to_string())
            };
            let missing = match lacks_a_disk {
                true => Some(String::new()),
                false => rest(w)
                    .or_else(holds)
                    .or_else(sends)
                    .or_else(|| at_rest::change_waits(w, 0..w.nodes.len())),
            };
            // It must stay so for a while: a late link or a ping may still end a connection.
            whole_since = match missing {
                None => whole_since.or(Some(w.now)),
                Some(_) => None,
            };
            missing.or_else(|| {
                let stays = whole_since.is_some_and(|since| w.now >= since + 3 * SECOND);
                (!stays).then(|| "it does not stay so".to_string())
            })
        });
        if refused {
            check::differences_are_marked(w);
            check::one_primary(w);
        }
        if refused || w.violation.is_some() {
            return;
        }
        check::writes_are_settled(w);
        at_rest::is_clean(w);
        if self.plan.shares.is_none() {
            check::metadata_are_at_rest(w, o.primary);
        }
        if self.plan.goes_on() {
            calm::goes_on(w, o, self.plan);
            w.run_for(3 * SECOND);
            // On a slow wire nothing went on, and a late ping may just have ended a connection.
            if w.config.slow.is_none() {
                at_rest::is_clean(w);
            }
        }
        if self.plan.verifies() && w.violation.is_none() {
            rot::is_found(w, o, self.plan.seed);
        }
        check::replicas_are_equal(w);
        check::differences_are_marked(w);
        check::generations_agree(w);
        check::one_primary(w);
        if self.plan.goes_on() {
            absence::is_borne(w, o, self.plan);
            branches::are_mended(w, o, self.plan);
        }
    }

    /// Lets time pass, with everything that is due, while a condition holds.
    fn go_on(&mut self, w: &mut World, o: &mut Operator, wanted: impl Fn(&Drive<'_>) -> bool) {
        let end = w.now + 600 * SECOND;
        while w.violation.is_none() && w.now < end && wanted(self) {
            let until = self.next_at(w);
            while w.step(until) {}
            if w.violation.is_some() {
                return;
            }
            w.now = w.now.max(until);
            self.requests(w, o);
            if w.now >= self.look_at {
                self.look_at = w.now + 5 * MS;
                self.look(w, o);
            }
            self.faults(w, o);
        }
    }

    fn next_at(&self, w: &World) -> u64 {
        let mut at = self.look_at;
        if let Some(fault) = self.plan.faults.get(self.next_fault) {
            at = at.min(self.start + fault.at);
        }
        if let Some(request) = self.plan.requests.get(self.next_request) {
            let due = self.start + request.at;
            // One that is due already waits for the Primary; the operator's looks poll for that.
            if due > w.now {
                at = at.min(due);
            }
        }
        at.max(w.now)
    }

    fn requests(&mut self, w: &mut World, o: &Operator) {
        while let Some(request) = self.plan.requests.get(self.next_request) {
            let placed = match &self.pair {
                Some(pair) => pair.place(w, request),
                None => o
                    .accepts_io()
                    .map(|node| (o.user(w, node, request.number), request.block)),
            };
            let Some((node, block)) = placed else { return };
            let is_due = self.start + request.at <= w.now;
            if !is_due || !w.is_up(node) || w.nodes[node].requests.len() >= self.plan.depth {
                return;
            }
            self.next_request += 1;
            w.request(node, request.volume, request.kind, block, request.count);
        }
    }

    fn look(&mut self, w: &mut World, o: &mut Operator) {
        o.tick(w);
        if self.heal_at.is_some_and(|at| at <= w.now) {
            self.heal_at = Some(w.now + SECOND);
            o.heal(w);
        }
        if w.now >= self.know_at {
            self.know_at = w.now + 20 * MS;
            cover::differences_are_known(w);
        }
        if self.plan.watches && w.violation.is_none() {
            check::differences_are_marked(w);
            check::losses_are_marked(w);
        }
        if w.now >= self.compare_at {
            self.compare_at = w.now + SECOND;
            promises::followers_are_current(w);
            promises::replicas_agree(w);
            if let Some(limit) = self.plan.answers_within {
                promises::writes_are_answered(w, limit);
            }
            promises::changes_end(w, o.settings.resource.twopc_timeout_tenths);
            promises::pauses_are_known(w);
            promises::disks_are_given_up(w, o.settings.disk.disk_timeout_tenths);
            let redundancy = o.settings.resource.quorum_minimum_redundancy != Quorum::Off;
            promises::majority_is_enough(w, redundancy);
            promises::losses_of_quorum_are_noted(w);
            crate::noted::states_are_noted(w);
        }
        check::memory_is_bounded(w, self.plan.depth * 33);
        if let Some(pair) = self.pair.as_mut() {
            pair.look(w, o);
            return;
        }
        if o.primary.is_some() || o.is_changing() {
            self.promote_at = None;
            return;
        }
        match self.promote_at {
            None => {
                let mut rng = Rng::new(mixed(&[self.plan.seed, 77, self.promotions]));
                self.promotions += 1;
                self.promote_at = Some(w.now + rng.delay(self.plan.takeover));
            }
            Some(at) if at <= w.now => {
                if promote_an_heir(w, o, self.plan.seed ^ self.promotions) {
                    self.promote_at = None;
                }
            }
            Some(_) => {}
        }
    }

    fn faults(&mut self, w: &mut World, o: &mut Operator) {
        let now = w.now;
        let mut due = Vec::new();
        self.undo.retain(|(at, what)| {
            let is_due = *at <= now;
            if is_due {
                due.push(*what);
            }
            !is_due
        });
        for what in due {
            if let Some((later, next)) = what.next() {
                self.undo.push((now + later, next));
            }
            revert(w, o, what);
        }
        while let Some(fault) = self.plan.faults.get(self.next_fault)
            && self.start + fault.at <= w.now
            && w.violation.is_none()
        {
            self.next_fault += 1;
            self.strike(w, o, fault);
        }
    }

    fn strike(&mut self, w: &mut World, o: &mut Operator, planned: &PlannedFault) {
        let kind = word(planned.fault);
        w.trace(0, || {
            format!("== fault {} of the plan: {kind}", planned.number)
        });
        if let Some(mark) = marks::find("fault-", kind) {
            w.reached(mark);
        }
        let mut rng = Rng::new(planned.seed);
        let long = planned.fault == Fault::HangDisk && self.plan.answers_within.is_some();
        let ends = w.now + planned.lasts + if long { 20 * SECOND } else { 0 };
        if let Some(pair) = self.pair.as_mut() {
            let node = rng.below(w.config.nodes as u64) as usize;
            match planned.fault {
                _ if !pair.has(node) => {}
                Fault::Crash => return pair.kill(w, o, node, Lose::InFlight),
                Fault::PowerCut => return pair.kill(w, o, node, Lose::Unflushed),
                Fault::Handover => return pair.demote(w, o, node % 2, planned.lasts),
                _ => {}
            }
        }
        if planned.fault == Fault::Stall && self.plan.numb {
            let nodes = w.nodes.len() as u64;
            let from = rng.below(nodes) as usize;
            let to = (from + 1 + rng.below(nodes - 1) as usize) % w.nodes.len();
            let time = rng.range(2, 12) * SECOND;
            w.trace(from, || format!("== no data reach {} for long", name(to)));
            w.stall(from, to, 0, time);
            return;
        }
        match happen(w, o, &mut rng, planned.fault) {
            Some(Undo::CutAgain(node)) => {
                // It starts soon, and falls again before it is quite there.
                let start = w.now + rng.delay(20 * MS);
                self.undo.push((start, Undo::Start(node)));
                let soon = rng.pick(&[MS / 2, 5 * MS, 50 * MS]);
                self.undo
                    .push((start + rng.delay(soon), Undo::CutAgain(node)));
            }
            Some(Undo::Cut(node)) => {
                let soon = rng.pick(&[w.config.disk_delay, w.config.disk_delay * 4, 5 * MS]);
                let soon = rng.delay(soon) + rng.delay(w.config.net_delay);
                self.undo.push((w.now + soon, Undo::Cut(node)));
            }
            Some(undo) => self.undo.push((ends, undo)),
            None => {}
        }
        if planned.fault != Fault::PowerCutAll {
            check::differences_are_marked(w);
        }
        for node in w.storage() {
            check::generations_are_sound(w, node);
        }
    }

    fn heal(&mut self, w: &mut World, o: &mut Operator) {
        for a in 0..w.nodes.len() {
            for b in 0..w.nodes.len() {
                w.set_blocked(a, b, false);
            }
            for volume in 0..w.config.volumes {
                w.cure(a, volume);
            }
        }
        o.calm = true;
        w.handlers_behave = true;
        o.heal(w);
    }
}

fn promote_an_heir(w: &mut World, o: &mut Operator, number: u64) -> bool {
    let mut heirs: Vec<usize> = o.heirs().into_iter().filter(|n| o.is_up(*n)).collect();
    heirs.extend(o.clients(w));
    let Some(heir) = heirs.get(number as usize % heirs.len().max(1)) else {
        return false;
    };
    let force = o.nobody_is_current(w, *heir);
    o.promote(w, *heir, force)
}

/// How long the cluster may take to become whole, from the last block of a resync.
pub(crate) const PATIENCE: u64 = 400 * SECOND;

/// How far the resyncs of a world have come.
pub(crate) struct Progress {
    left: u64,
    since: u64,
}

impl Progress {
    pub(crate) fn of(w: &World) -> Progress {
        Progress {
            left: u64::MAX,
            since: w.now,
        }
    }

    /// A slow resync may take long, but not stand still or begin again.
    pub(crate) fn look(&mut self, w: &mut World, what: &str) {
        let left = check::left_to_sync(w);
        if left < self.left {
            self.since = w.now;
        } else if w.now >= self.since + PATIENCE {
            let missing = check::not_converged(w).unwrap_or_default();
            let limit = PATIENCE / SECOND;
            w.fail(format!("{what} within {limit} s: {missing}"));
        }
        self.left = left;
    }
}
