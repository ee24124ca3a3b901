//! Words for scenario tests: nodes by letter, and steps that read like a story.

use lockstep_core::event::RequestKind;
use lockstep_core::options::Protocol;
use lockstep_core::state::Role;

use crate::check;
use crate::disk::Lose;
use crate::operator::{Operator, Settings};
use crate::swarm;
use crate::world::{Config, MS, SECOND, World};

/// The first node.
pub const A: usize = 0;
/// The second node.
pub const B: usize = 1;
/// The third node.
pub const C: usize = 2;

/// A world with an operator, as a test sees it.
pub struct Scenario {
    /// The world.
    pub world: World,
    /// The operator.
    pub operator: Operator,
}

impl Scenario {
    /// Nodes that are in sync; the first is Primary.
    pub fn new(seed: u64, nodes: usize, protocol: Protocol) -> Self {
        let config = Config {
            nodes,
            protocol,
            ..Config::small(seed)
        };
        Self::with(config, |_| {}, false)
    }

    /// As `new`, with other settings; `full_sync`: in sync by copying everything.
    pub fn with(config: Config, change: impl FnOnce(&mut Settings), full_sync: bool) -> Self {
        let mut settings = Settings::new(config.protocol, config.resync_max_kib_s);
        change(&mut settings);
        let operator = Operator::new(settings, &config);
        let mut s = Scenario {
            world: World::new(config),
            operator,
        };
        swarm::bring_up(&mut s.world, &mut s.operator, full_sync);
        s.holds();
        s
    }

    /// Nothing went wrong so far.
    #[track_caller]
    pub fn holds(&self) {
        if let Some(text) = &self.world.violation {
            let logs: Vec<_> = self.world.nodes.iter().map(|n| &n.log).collect();
            panic!("{text}\n{logs:#?}");
        }
    }

    /// Lets time pass.
    #[track_caller]
    pub fn pass(&mut self, time: u64) {
        let end = self.world.now + time;
        while self.world.now < end && self.world.violation.is_none() {
            let slice = (end - self.world.now).min(10 * MS);
            self.world.run_for(slice);
            self.operator.tick(&mut self.world);
        }
        self.holds();
    }

    /// Runs until something holds; fails after two virtual minutes.
    #[track_caller]
    pub fn run_until(&mut self, what: &str, done: impl Fn(&World) -> bool) {
        let end = self.world.now + 120 * SECOND;
        while !done(&self.world) {
            assert!(self.world.now < end, "{what} within 120 s");
            let slice = self.world.now + MS / 10;
            while self.world.step(slice) {}
            if self.world.violation.is_none() {
                self.world.now = self.world.now.max(slice);
            }
            self.operator.tick(&mut self.world);
            self.holds();
        }
    }

    /// Starts a write of so many blocks on volume 0.
    pub fn write(&mut self, node: usize, block: u64, count: u64) -> u64 {
        let kind = RequestKind::Write { fua: false };
        self.world.request(node, 0, kind, block, count)
    }

    /// Writes and waits for the acknowledgement.
    #[track_caller]
    pub fn write_and_wait(&mut self, node: usize, block: u64, count: u64) {
        let id = self.write(node, block, count);
        self.done(node, id);
    }

    /// Waits for a request.
    #[track_caller]
    pub fn done(&mut self, node: usize, id: u64) {
        self.run_until("the request ends", |w| {
            !w.nodes[node].requests.contains_key(&id)
        });
    }

    /// Reads; what comes back is checked against the history.
    #[track_caller]
    pub fn read(&mut self, node: usize, block: u64, count: u64) {
        let id = self.world.request(node, 0, RequestKind::Read, block, count);
        self.done(node, id);
    }

    /// Flushes and waits.
    #[track_caller]
    pub fn flush(&mut self, node: usize) {
        let id = self.world.request(node, 0, RequestKind::Flush, 0, 0);
        self.done(node, id);
    }

    /// The node dies.
    #[track_caller]
    pub fn crash(&mut self, node: usize, lose: Lose) {
        self.operator.crash(&mut self.world, node, lose);
        check::differences_are_marked(&mut self.world);
        self.holds();
    }

    /// The node is taken down by command.
    #[track_caller]
    pub fn down(&mut self, node: usize) {
        assert!(self.operator.down(&mut self.world, node));
        let end = self.world.now + 60 * SECOND;
        while !self.operator.is_down(node) {
            assert!(self.world.now < end, "down within 60 s");
            self.pass(10 * MS);
        }
    }

    /// The node comes back and is configured.
    pub fn restart(&mut self, node: usize) {
        self.operator.start(&mut self.world, node);
    }

    /// Promotes and waits; the node must be a legitimate heir.
    #[track_caller]
    pub fn promote(&mut self, node: usize) {
        assert!(
            self.operator.promote(&mut self.world, node, false),
            "node {node} may become Primary: {:?}",
            self.operator
        );
        self.run_until("the promotion", |w| {
            w.snapshot(node).is_some_and(|s| s.role == Role::Primary)
        });
        self.pass(20 * MS);
    }

    /// Demotes and waits.
    #[track_caller]
    pub fn demote(&mut self, node: usize) {
        assert!(self.operator.demote(&mut self.world));
        self.run_until("the demotion", |w| {
            w.snapshot(node).is_some_and(|s| s.role == Role::Secondary)
        });
        self.pass(20 * MS);
    }

    /// Cuts the network between two nodes, or mends it.
    pub fn cut(&mut self, a: usize, b: usize, cut: bool) {
        self.world.set_blocked(a, b, cut);
        self.world.set_blocked(b, a, cut);
    }

    /// Waits until everything is connected, UpToDate and quiet, then compares all replicas.
    #[track_caller]
    pub fn in_sync(&mut self) {
        let end = self.world.now + 300 * SECOND;
        while let Some(missing) = check::not_converged(&self.world) {
            if self.world.now >= end {
                let logs: Vec<_> = self.world.nodes.iter().map(|n| &n.log).collect();
                panic!("not in sync: {missing}\n{logs:#?}");
            }
            self.pass(100 * MS);
        }
        self.pass(2 * SECOND);
        check::replicas_are_equal(&mut self.world);
        check::differences_are_marked(&mut self.world);
        check::one_primary(&mut self.world);
        self.holds();
    }
}
