//! The orderly end of a node.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::{Node, lock};
use crate::devices::End;

/// How long the end waits for what has to be said and written. A transaction of the cluster takes
/// as long by default before it is given up (`twopc-timeout`).
const PATIENCE: Duration = Duration::from_secs(30);

/// What is left of a node that has ended in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing: every volume is down and every shard has stopped.
    Nothing,
    /// Devices in use, which the holder keeps for the next daemon, and their resources, which are
    /// still up. This process has to end now, without an answer to any request.
    Devices,
    /// Resources that could not be taken down, because their requests may not go on, a disk hangs,
    /// or a peer does not answer. This process has to end now, as if it were killed.
    Resources,
}

impl Node {
    /// Takes everything down and stops the shards, but for what the next daemon goes on with. It
    /// comes back, whatever the state of a resource is.
    pub fn stop(self: &Arc<Self>) -> Left {
        // To take a resource down would give up its devices that wait.
        let waiting = self.devices().waiting();
        let mut names: BTreeSet<String> = lock(&self.resources).keys().cloned().collect();
        names.retain(|name| !waiting.contains(name));
        let node = self.clone();
        let names = each_within(PATIENCE, names, move |name| {
            if let Err(error) = node.down(name) {
                tracing::warn!(resource = name, %error, "not taken down in order");
            }
        });
        if !names.is_empty() {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            tracing::error!(
                resources = names.join(" "),
                "not taken down within {PATIENCE:?}: they are left as by a crash"
            );
            return Left::Resources;
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

/// Does something for each name, beside the others; gives those for which it has not ended in time.
fn each_within(
    patience: Duration,
    mut names: BTreeSet<String>,
    act: impl Fn(&str) + Clone + Send + 'static,
) -> BTreeSet<String> {
    let deadline = Instant::now() + patience;
    let (done, ended) = channel();
    for name in &names {
        let (act, name, done) = (act.clone(), name.clone(), done.clone());
        let thread = std::thread::Builder::new().name("down".into());
        let acts = move || {
            act(&name);
            // Who waits may have given up.
            let _ = done.send(name);
        };
        if let Err(error) = thread.spawn(acts) {
            tracing::error!(%error, "starting a thread");
        }
    }
    drop(done);
    while !names.is_empty()
        && let Ok(name) = ended.recv_timeout(deadline.saturating_duration_since(Instant::now()))
    {
        names.remove(&name);
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_in_time_is_named_and_keeps_nobody_waiting() {
        let names = ["good", "stuck"].map(String::from).into();
        let act = |name: &str| {
            if name == "stuck" {
                loop {
                    std::thread::park();
                }
            }
        };
        let left = each_within(Duration::from_millis(200), names, act);
        assert_eq!(left, ["stuck".to_owned()].into());
        assert_eq!(each_within(PATIENCE, left, |_| {}), BTreeSet::new());
    }
}
