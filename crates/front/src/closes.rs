//! Tells when somebody who could write to a block device has closed it.
//!
//! It is a hint, no more: who opened another node of the same device is not seen, and others may still
//! have it open.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::inotify::{
    CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch,
};

use crate::BlockNumber;

/// Watches the nodes of block devices.
#[derive(Debug)]
pub struct Closes {
    queue: OwnedFd,
    watched: Mutex<BTreeMap<i32, BlockNumber>>,
}

impl Closes {
    /// Watches nothing yet.
    pub fn new() -> io::Result<Closes> {
        Ok(Closes {
            queue: init(CreateFlags::CLOEXEC)?,
            watched: Mutex::default(),
        })
    }

    /// Tells of this device from now on.
    pub fn watch(&self, number: BlockNumber) -> io::Result<()> {
        self.watch_node(&number.path(), number)
    }

    fn watch_node(&self, node: &Path, number: BlockNumber) -> io::Result<()> {
        // An event may come before its number is known, so both are one step for `wait`.
        let mut watched = self.watched();
        let id = add_watch(&self.queue, node, WatchFlags::CLOSE_WRITE)?;
        watched.insert(id, number);
        Ok(())
    }

    /// Tells of this device no more. Its node may be that of another device soon.
    pub fn forget(&self, number: BlockNumber) {
        let mut watched = self.watched();
        let known = watched.iter().find(|(_, known)| **known == number);
        if let Some(id) = known.map(|(id, _)| *id) {
            watched.remove(&id);
            // A node that was removed is not watched any more.
            let _ = remove_watch(&self.queue, id);
        }
    }

    /// Waits until some devices were closed.
    pub fn wait(&self) -> io::Result<Vec<BlockNumber>> {
        let mut memory = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(&self.queue, &mut memory);
        let mut ids = Vec::new();
        loop {
            match events.next() {
                Ok(event) if event.events().contains(ReadFlags::CLOSE_WRITE) => {
                    ids.push(event.wd());
                }
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if events.is_buffer_empty() && !ids.is_empty() {
                let watched = self.watched();
                let numbers = ids.drain(..).filter_map(|id| watched.get(&id).copied());
                let numbers: Vec<BlockNumber> = numbers.collect();
                if !numbers.is_empty() {
                    return Ok(numbers);
                }
            }
        }
    }

    fn watched(&self) -> MutexGuard<'_, BTreeMap<i32, BlockNumber>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::LoopNumber;

    #[test]
    fn only_who_could_write_and_only_what_is_watched_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| {
            let path = directory.path().join(name);
            File::create(&path).unwrap();
            path
        });
        let closes = Closes::new().unwrap();
        let [first, second, third] = [1, 2, 3].map(|n| BlockNumber::from(LoopNumber(n)));
        closes.watch_node(&a, first).unwrap();
        closes.watch_node(&b, second).unwrap();
        closes.watch_node(&c, third).unwrap();
        closes.forget(second);
        let write = |path| drop(File::options().write(true).open(path).unwrap());
        drop(File::open(&a).unwrap());
        write(&b);
        write(&c);
        assert_eq!(closes.wait().unwrap(), [third]);
        write(&a);
        assert_eq!(closes.wait().unwrap(), [first]);
    }
}
