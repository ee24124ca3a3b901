//! The orderly end of a node.

use super::{Node, lock};
use crate::devices::End;

/// What is left of a node that has ended in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing: every volume is down and every shard has stopped.
    Nothing,
    /// Devices in use, which the holder keeps for the next daemon, and their resources, which are
    /// still up. This process has to end now, without an answer to any request.
    Devices,
}

impl Node {
    /// Takes everything down and stops the shards, but for what the next daemon goes on with.
    pub fn stop(&self) -> Left {
        // To take a resource down would give up its devices that wait.
        let waiting = self.devices().waiting();
        let names: Vec<String> = lock(&self.resources).keys().cloned().collect();
        for name in names.iter().filter(|name| !waiting.contains(*name)) {
            if let Err(error) = self.down(name) {
                tracing::warn!(resource = name, %error, "not taken down in order");
            }
        }
        if self.devices().end() == End::Devices {
            return Left::Devices;
        }
        self.board.close();
        for shard in &self.shards {
            if let Err(error) = shard.stop() {
                tracing::error!(%error, "a shard ended with an error");
            }
        }
        Left::Nothing
    }
}
