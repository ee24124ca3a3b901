//! The count of files that a daemon may hold open. Each connection takes several sockets, and the
//! usual soft limit of 1,024 is enough for a hundred of them only.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises the soft limit to the hard one. Without the right to it the daemon works as before.
pub(crate) fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
