//! Network namespaces other than the process's own: opening sockets there.
//!
//! A socket stays in the namespace in which it was made, whoever uses it later. So only the making
//! happens elsewhere, on a thread of its own that ends afterwards: no thread ever has to come back.

use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace that is not the process's own. It exists as long as this does.
#[derive(Clone, Debug)]
pub struct NetNamespace(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    device: u64,
    inode: u64,
}

impl NetNamespace {
    /// The namespace of a descriptor of `/proc/PID/ns/net`; `None` if it is the process's own. An
    /// error tells that it is no network namespace, or one that this process may not enter.
    pub fn new(descriptor: OwnedFd) -> io::Result<Option<NetNamespace>> {
        let file = File::from(descriptor);
        let (found, own) = (file.metadata()?, std::fs::metadata("/proc/self/ns/net")?);
        let [device, inode] = [found.dev(), found.ino()];
        if [device, inode] == [own.dev(), own.ino()] {
            return Ok(None);
        }
        let new = NetNamespace(Arc::new(Inner {
            file,
            device,
            inode,
        }));
        new.inside(|| Ok(()))?;
        Ok(Some(new))
    }

    /// Its number, as in `net:[4026531833]`.
    pub fn inode(&self) -> u64 {
        self.0.inode
    }

    /// Does `work` in the namespace.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("netns".into());
            let thread = thread.spawn_scoped(scope, || {
                move_into_link_name_space(self.0.file.as_fd(), Some(LinkNameSpaceType::Network))?;
                work()
            })?;
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Does `work` in the namespace, or here without one.
    pub(crate) fn of<T: Send>(
        namespace: Option<&NetNamespace>,
        work: impl FnOnce() -> io::Result<T> + Send,
    ) -> io::Result<T> {
        match namespace {
            Some(namespace) => namespace.inside(work),
            None => work(),
        }
    }
}

impl PartialEq for NetNamespace {
    fn eq(&self, other: &NetNamespace) -> bool {
        (self.0.device, self.0.inode) == (other.0.device, other.0.inode)
    }
}

impl Eq for NetNamespace {}

impl Hash for NetNamespace {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.0.device, self.0.inode).hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_namespace_is_none_and_another_file_an_error() {
        let own = File::open("/proc/self/ns/net").unwrap();
        assert_eq!(NetNamespace::new(own.into()).unwrap(), None);
        assert!(NetNamespace::new(tempfile::tempfile().unwrap().into()).is_err());
        let other_kind = File::open("/proc/self/ns/uts").unwrap();
        assert!(NetNamespace::new(other_kind.into()).is_err());
    }
}
