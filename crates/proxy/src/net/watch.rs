//! A socket in an epoll set: what it is asked to tell.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;

#[derive(Debug, Default)]
pub(super) struct Watch {
    /// What is asked for; none while the socket is not in the set.
    interest: Option<epoll::EventFlags>,
}

impl Watch {
    /// Asks for these events. A failure of the socket is told whatever is asked for.
    pub(super) fn set(
        &mut self,
        epoll: &OwnedFd,
        socket: &impl AsFd,
        token: u64,
        interest: epoll::EventFlags,
    ) -> rustix::io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        match self.interest.replace(interest) {
            None => epoll::add(epoll, socket, data, interest),
            Some(before) if before != interest => epoll::modify(epoll, socket, data, interest),
            Some(_) => Ok(()),
        }
    }

    /// Takes the socket out of the set.
    pub(super) fn end(&mut self, epoll: &OwnedFd, socket: &impl AsFd) {
        if self.interest.take().is_some() {
            let _ = epoll::delete(epoll, socket);
        }
    }
}
