//! A client of a node's holder, to make its record of a device older than it is: as if the daemon
//! had been killed before it could tell the newest.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType, connect, recvmsg, sendmsg, socket,
};

/// What a holder has of one device.
pub struct Record {
    key: String,
    state: String,
    descriptor: OwnedFd,
}

impl Record {
    /// The record of a volume, `r0/0`, at the node of this directory.
    pub fn read(node_dir: &Path, volume: &str) -> Result<Record> {
        let socket = open(node_dir)?;
        send(&socket, b"L\0", None)?;
        loop {
            let (bytes, descriptor) = receive(&socket)?;
            ensure!(bytes.first() == Some(&b'D'), "the holder has no {volume}");
            let text = String::from_utf8(bytes[1..].to_vec())?;
            let (key, state) = text.split_once('\0').context("a key")?;
            if key == volume {
                return Ok(Record {
                    key: key.to_owned(),
                    state: state.to_owned(),
                    descriptor: descriptor.context("a descriptor")?,
                });
            }
        }
    }

    /// The data generation in it.
    pub fn generation(&self) -> Result<&str> {
        self.state.split(';').nth(1).context("a generation")
    }

    /// Puts it in place of what the holder has now.
    pub fn put_back(&self, node_dir: &Path) -> Result<()> {
        let socket = open(node_dir)?;
        let message = format!("S{}\0{}", self.key, self.state);
        send(&socket, message.as_bytes(), Some(&self.descriptor))?;
        let (answer, _) = receive(&socket)?;
        ensure!(answer == b"K", "the holder refuses");
        Ok(())
    }
}

fn open(node_dir: &Path) -> Result<OwnedFd> {
    let path = node_dir.join("hold.sock");
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    connect(&socket, &SocketAddrUnix::new(&path)?).context("the holder")?;
    Ok(socket)
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptor: Option<&OwnedFd>) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().map(OwnedFd::as_fd).collect();
    if !descriptors.is_empty() {
        ensure!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    }
    sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn receive(socket: &OwnedFd) -> Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut bytes = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    bytes.truncate(received.bytes);
    let mut descriptor = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            descriptor = descriptors.next();
        }
    }
    Ok((bytes, descriptor))
}
