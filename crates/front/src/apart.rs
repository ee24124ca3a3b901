//! Work on a device that this process serves itself.
//!
//! The kernel lets nothing interrupt a thread that waits for such a device's I/O, and a killed
//! process closes its descriptors only when its last thread has gone. A thread that shared them
//! would keep the FUSE connection open whose end it waits for: neither would ever go.

use std::io;

use crate::sys;

/// Runs `work`, which may have to wait for a device of this process, on a thread that has the
/// standard streams and no other open file of the process. It must not use descriptors from outside,
/// nor return any.
pub fn apart<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let run = || {
        sys::leave_open_files()?;
        work()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("device".into());
        let thread = thread.spawn_scoped(scope, run)?;
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn is_open(descriptor: i32) -> bool {
        std::path::Path::new(&format!("/proc/thread-self/fd/{descriptor}")).exists()
    }

    #[test]
    fn open_files_stay_with_the_caller() {
        let file = tempfile::tempfile().unwrap();
        let descriptor = file.as_raw_fd();
        let seen = apart(|| Ok((is_open(2), is_open(descriptor)))).unwrap();
        assert_eq!(seen, (true, false));
        assert!(is_open(descriptor));
    }

    #[test]
    fn errors_come_back() {
        let error = apart::<()>(|| Err(io::ErrorKind::NotFound.into())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
