//! Commands and what follows the last close of a device.

use std::time::{Duration, Instant};

use lockstep_core::command::Command;
use lockstep_core::state::Role;

use super::{Entry, Node, lock};
use crate::report::ResourceReport;

/// How long a command waits for the demotion that follows the last close.
const DEMOTION: Duration = Duration::from_secs(1);

impl Node {
    /// An automatic Primary whose last user has closed its device is Secondary before the next command,
    /// as with a kernel, where closing demotes.
    pub(super) fn settle(&self, entry: &Entry, command: &Command) {
        // Promotions are asked for by the thread of devices, too.
        if matches!(command, Command::Primary { .. }) {
            return;
        }
        let name = lock(&entry.configured).configured.name.clone();
        self.settle_closed(&name);
    }

    /// The same for commands that are no commands of the core, or by an operator only.
    pub(super) fn settle_closed(&self, name: &str) {
        if !self.devices().settle(name) {
            return;
        }
        // The first answer may be from before the close, which is on its way.
        self.refresh(name);
        let begin = Instant::now();
        while begin.elapsed() < DEMOTION {
            self.refresh(name);
            let report = self.board.report(name);
            let waits = |r: ResourceReport| {
                r.role == Role::Primary && !r.devices.iter().any(|device| device.open)
            };
            if !report.is_some_and(waits) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
