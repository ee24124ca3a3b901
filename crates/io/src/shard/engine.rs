//! The seams of a shard: the core it drives, and who runs handlers.

use lockstep_core::event::{Input, Output};
use lockstep_core::report::Snapshot;
use lockstep_core::resource::Resource;
use lockstep_core::time::Instant;
use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::Dialect;
use lockstep_format::wire::alg::DigestAlg;

/// A core as the shard drives it (see `lockstep_core::event` for the rules).
pub trait Engine: Send + 'static {
    /// Feeds one event.
    fn handle(&mut self, now: Instant, input: Input);

    /// The next thing to do.
    fn poll_output(&mut self) -> Option<Output>;

    /// When to feed `Input::Timeout` at the latest.
    fn next_timeout(&self) -> Option<Instant>;

    /// How the next packet of or to this peer is coded.
    fn dialect(&self, peer: NodeId) -> Dialect;

    /// The digest that the next packet with payload of this peer has to have.
    fn peer_integrity(&self, peer: NodeId) -> Option<DigestAlg>;

    /// Everything at once, for reports.
    fn snapshot(&self) -> Snapshot;

    /// Whether every step of a change is told from now on.
    fn tell_steps(&mut self, told: bool);
}

impl Engine for Resource {
    fn handle(&mut self, now: Instant, input: Input) {
        Resource::handle(self, now, input);
    }

    fn poll_output(&mut self) -> Option<Output> {
        Resource::poll_output(self)
    }

    fn next_timeout(&self) -> Option<Instant> {
        Resource::next_timeout(self)
    }

    fn dialect(&self, peer: NodeId) -> Dialect {
        Resource::dialect(self, peer)
    }

    fn peer_integrity(&self, peer: NodeId) -> Option<DigestAlg> {
        Resource::peer_integrity(self, peer)
    }

    fn snapshot(&self) -> Snapshot {
        Resource::snapshot(self)
    }

    fn tell_steps(&mut self, told: bool) {
        Resource::tell_steps(self, told);
    }
}

/// A handler to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandlerCall {
    /// The resource's name.
    pub resource: String,
    /// The handler's name (`split-brain`, `fence-peer`, …).
    pub handler: &'static str,
    /// The volume it is about.
    pub volume: Option<VolumeNr>,
    /// The peer it is about.
    pub peer: Option<NodeId>,
    /// The resource's state when the core called it: reports may still show what was before.
    pub snapshot: Snapshot,
}

/// Runs handlers of the configuration as child processes.
pub trait HandlerExecutor: Send + Sync {
    /// Starts the handler and returns at once; `done` is told its exit code later.
    fn run(&self, call: HandlerCall, done: HandlerDone);
}

/// Reports the end of a handler. Dropped without that, it reports [`HandlerDone::LOST`].
pub struct HandlerDone(Option<Box<dyn FnOnce(u8) + Send>>);

impl HandlerDone {
    /// The exit code of a handler whose end nobody saw, as of a command that was not found.
    pub const LOST: u8 = 127;

    pub(super) fn new(report: impl FnOnce(u8) + Send + 'static) -> HandlerDone {
        HandlerDone(Some(Box::new(report)))
    }

    /// The handler ended with this exit code.
    pub fn finish(mut self, exit_code: u8) {
        if let Some(report) = self.0.take() {
            report(exit_code);
        }
    }
}

impl Drop for HandlerDone {
    fn drop(&mut self) {
        if let Some(report) = self.0.take() {
            report(HandlerDone::LOST);
        }
    }
}
