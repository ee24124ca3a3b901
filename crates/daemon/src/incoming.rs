//! A client's side of the control socket: its bytes, and the descriptors that come with them.

use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// What a client sends.
#[derive(Debug)]
pub(crate) struct Incoming {
    stream: UnixStream,
    descriptor: Option<OwnedFd>,
}

impl Incoming {
    pub(crate) fn new(stream: UnixStream) -> Incoming {
        Incoming {
            stream,
            descriptor: None,
        }
    }

    /// The last descriptor that came with what was read and was not taken yet.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptor.take()
    }
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        // One has room; the kernel closes what has none.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(into)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = retry_on_intr(|| recvmsg(&self.stream, &mut slices, &mut ancillary, flags))?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                // Dropping the others closes them.
                self.descriptor = descriptors.last().or(self.descriptor.take());
            }
        }
        Ok(received.bytes)
    }
}
