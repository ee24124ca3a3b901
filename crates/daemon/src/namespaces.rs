//! Network namespaces of connections, and when they have ended.
//!
//! With a kernel module, a namespace ends under its connections when `ip netns del` takes its name away
//! and the last process has left it. The sockets and the descriptor of a daemon would keep it, so the
//! daemon looks itself: what had a name, has none, and no process is in it, is to be let go of. A
//! namespace without a name (of a container runtime, in another mount namespace) stays as long as
//! connections are in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::node::Node;

/// Namespaces in which connections are.
#[derive(Default)]
pub(crate) struct Namespaces {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The thread runs.
    started: bool,
    /// By number; whether it has been seen with a name.
    watched: BTreeMap<u64, Named>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Named {
    Yes,
    NotYet,
}

/// Whether namespaces are without a name, but still have processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// None.
    None,
    /// They are to be looked at again.
    Some,
}

/// How often a namespace without a name is looked for processes.
const LOOK: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

impl Namespaces {
    /// Starts to watch, if that has not been done.
    pub(crate) fn start(&self, node: &Arc<Node>) -> std::io::Result<()> {
        let mut state = self.lock();
        if state.started {
            return Ok(());
        }
        // Opened here: what changes from now on is told.
        let mounts = File::open("/proc/self/mountinfo")?;
        let weak = Arc::downgrade(node);
        let thread = std::thread::Builder::new().name("namespaces".into());
        thread.spawn(move || {
            let mut ending = Ending::None;
            loop {
                let limit = (ending == Ending::Some).then_some(&LOOK);
                // An error means a signal: it looks again.
                let _ = poll(&mut [PollFd::new(&mounts, PollFlags::PRI)], limit);
                let Some(node) = weak.upgrade() else { return };
                ending = node.leave_ended_namespaces();
            }
        })?;
        state.started = true;
        Ok(())
    }

    /// A connection is in this namespace now.
    pub(crate) fn add(&self, inode: u64) {
        let named = if names().contains(&inode) {
            Named::Yes
        } else {
            Named::NotYet
        };
        self.lock().watched.entry(inode).or_insert(named);
    }

    /// Which of those that are used have ended.
    pub(crate) fn ended(&self, used: &BTreeSet<u64>) -> (BTreeSet<u64>, Ending) {
        let mut state = self.lock();
        state.watched.retain(|inode, _| used.contains(inode));
        if state.watched.is_empty() {
            return (BTreeSet::new(), Ending::None);
        }
        let names = names();
        for (inode, named) in &mut state.watched {
            if names.contains(inode) {
                *named = Named::Yes;
            }
        }
        let nameless = |(inode, named): (&u64, &Named)| {
            (*named == Named::Yes && !names.contains(inode)).then_some(*inode)
        };
        let mut ended: BTreeSet<u64> = state.watched.iter().filter_map(nameless).collect();
        drop(state);
        let mut ending = Ending::None;
        if !ended.is_empty() {
            let inhabited = inhabited();
            ended.retain(|inode| {
                let stays = inhabited.contains(inode);
                if stays {
                    ending = Ending::Some;
                }
                !stays
            });
        }
        (ended, ending)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // Changed by single insertions and removals, so it is always whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Network namespaces that a file stands for, as `ip netns add` makes them.
fn names() -> BTreeSet<u64> {
    // Without a list nothing has a name, and so nothing ends.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let roots = mounts.lines().filter_map(|line| line.split(' ').nth(3));
    roots.filter_map(number).collect()
}

/// Network namespaces with processes.
fn inhabited() -> BTreeSet<u64> {
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return BTreeSet::new();
    };
    let namespace = |process: std::fs::DirEntry| {
        let link = std::fs::read_link(process.path().join("ns/net")).ok()?;
        number(link.to_str()?)
    };
    processes.flatten().filter_map(namespace).collect()
}

/// The number in `net:[4026531833]`.
fn number(text: &str) -> Option<u64> {
    let number = text.strip_prefix("net:[")?.strip_suffix(']')?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_in_its_namespace() {
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        let own = number(own.to_str().unwrap()).unwrap();
        assert!(inhabited().contains(&own));
        assert_eq!(number("mnt:[4026531832]"), None);
        assert_eq!(number("/"), None);
    }

    #[test]
    fn only_what_had_a_name_ends() {
        let namespaces = Namespaces::default();
        // Numbers that no namespace has.
        let (never, once) = (1, 2);
        namespaces.add(never);
        namespaces.lock().watched.insert(once, Named::Yes);
        let used = BTreeSet::from([never, once]);
        assert_eq!(
            namespaces.ended(&used),
            (BTreeSet::from([once]), Ending::None)
        );
        let (ended, _) = namespaces.ended(&BTreeSet::from([never]));
        assert!(ended.is_empty());
        assert!(
            !namespaces.lock().watched.contains_key(&once),
            "not used any more"
        );
    }
}
