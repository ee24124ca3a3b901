//! Tells when somebody has opened a block device, and when somebody who could write to it has closed it.
//!
//! It is a hint, no more: who opened another node of the same device is not seen, and others may still
//! have it open. Nor is an open held up until it is told, and a mount is none.

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

/// What somebody has done with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Touch {
    /// Opened it, for whatever.
    Opened,
    /// Closed it, and could write to it.
    Closed,
}

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
        let id = add_watch(
            &self.queue,
            node,
            WatchFlags::CLOSE_WRITE | WatchFlags::OPEN,
        )?;
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

    /// Waits until some devices were opened or closed.
    pub fn wait(&self) -> io::Result<Vec<(BlockNumber, Touch)>> {
        let mut memory = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(&self.queue, &mut memory);
        let mut touches = Vec::new();
        loop {
            match events.next() {
                Ok(event) if event.events().contains(ReadFlags::CLOSE_WRITE) => {
                    touches.push((event.wd(), Touch::Closed));
                }
                Ok(event) if event.events().contains(ReadFlags::OPEN) => {
                    touches.push((event.wd(), Touch::Opened));
                }
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if events.is_buffer_empty() && !touches.is_empty() {
                let watched = self.watched();
                let known = touches
                    .drain(..)
                    .filter_map(|(id, touch)| Some((*watched.get(&id)?, touch)));
                let known: Vec<_> = known.collect();
                if !known.is_empty() {
                    return Ok(known);
                }
            }
        }
    }

    fn watched(&self) -> MutexGuard<'_, BTreeMap<i32, BlockNumber>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sees whether somebody opens a file.
#[derive(Debug)]
pub(crate) struct Opens {
    queue: OwnedFd,
}

impl Opens {
    /// From now on.
    pub(crate) fn watch(path: &Path) -> io::Result<Opens> {
        let queue = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        add_watch(&queue, path, WatchFlags::OPEN)?;
        Ok(Opens { queue })
    }

    /// Somebody has opened it since this was asked last.
    pub(crate) fn seen(&self) -> io::Result<bool> {
        let mut memory = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(&self.queue, &mut memory);
        let mut seen = false;
        loop {
            match events.next() {
                Ok(_) => seen = true,
                Err(rustix::io::Errno::AGAIN) => return Ok(seen),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::LoopNumber;

    #[test]
    fn opens_and_the_closes_of_who_could_write_are_told_of_what_is_watched() {
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
        let both = [(third, Touch::Opened), (third, Touch::Closed)];
        let read = [(first, Touch::Opened)];
        assert_eq!(closes.wait().unwrap(), [&read[..], &both].concat());
        write(&a);
        let both = [(first, Touch::Opened), (first, Touch::Closed)];
        assert_eq!(closes.wait().unwrap(), both);
    }

    #[test]
    fn an_open_is_seen_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        drop(File::create(&path).unwrap());
        let opens = Opens::watch(&path).unwrap();
        assert!(!opens.seen().unwrap());
        drop(File::open(&path).unwrap());
        drop(File::open(&path).unwrap());
        assert!(opens.seen().unwrap());
        assert!(!opens.seen().unwrap());
    }
}
