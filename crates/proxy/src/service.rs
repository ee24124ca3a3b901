//! Tells a service manager (systemd's protocol) that the proxy is ready, and which process the
//! service is after a hand-over.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType, sendmsg_addr, socket,
};
use rustix::pipe::{PipeFlags, pipe_with};

/// How long the manager may take to have read what it was told.
const BARRIER_S: i64 = 5;

/// Everything that was configured is there. Without a manager nothing happens.
pub fn tell_ready() {
    tell("READY=1");
}

/// The process that has taken over is the service from now on. Returns when the manager knows, so
/// that the end of this process is not taken for the service's.
pub(crate) fn tell_main_process(id: u32) {
    if tell(&format!("MAINPID={id}")) {
        let waited = await_manager();
        if let Err(error) = waited {
            tracing::warn!(%error, "the service manager has not answered");
        }
    }
}

/// Whether there is a manager that was told.
fn tell(text: &str) -> bool {
    let Ok(name) = std::env::var("NOTIFY_SOCKET") else {
        return false;
    };
    let sent = send(&name, text, None);
    if let Err(error) = &sent {
        tracing::warn!(%error, text, "the service manager was not told");
    }
    sent.is_ok()
}

/// The manager closes a descriptor when it has read everything before it.
fn await_manager() -> rustix::io::Result<()> {
    let Ok(name) = std::env::var("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
    send(&name, "BARRIER=1", Some(theirs))?;
    let limit = Timespec {
        tv_sec: BARRIER_S,
        tv_nsec: 0,
    };
    match poll(&mut [PollFd::new(&ours, PollFlags::empty())], Some(&limit))? {
        0 => Err(rustix::io::Errno::TIMEDOUT),
        _ => Ok(()),
    }
}

/// A datagram to the manager, with a descriptor that is closed here afterwards.
fn send(name: &str, text: &str, fd: Option<OwnedFd>) -> rustix::io::Result<()> {
    let address = match name.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        None => SocketAddrUnix::new(name)?,
    };
    let socket = socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
    if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(rustix::io::Errno::NOBUFS);
    }
    let pieces = [IoSlice::new(text.as_bytes())];
    sendmsg_addr(
        &socket,
        &address,
        &pieces,
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn what_is_said_arrives_and_the_descriptor_is_closed_behind_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        send(path.to_str().unwrap(), "BARRIER=1", Some(theirs)).unwrap();
        let mut bytes = [0; 32];
        // Received without room for the descriptor, which the kernel then closes.
        let len = manager.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"BARRIER=1");
        let mut polled = [PollFd::new(&ours, PollFlags::empty())];
        assert_eq!(poll(&mut polled, None).unwrap(), 1);
        assert!(polled[0].revents().contains(PollFlags::HUP));
        assert!(send("/nonexistent/socket", "READY=1", None).is_err());
    }
}
