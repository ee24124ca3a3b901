//! Gives the kernel's NBD client an export over TCP and keeps it connected: `nbd-attach ADDRESS
//! EXPORT INDEX SECONDS` makes `/dev/nbdINDEX`. While the server is away its requests wait up to so
//! many seconds; each time that it goes, this connects again. Ends with an error only.
//!
//! For tests in a guest, which have no `nbd-client`. What it says to the kernel is the generic
//! netlink family `nbd` of `linux/nbd-netlink.h`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, netlink, recv, send};

const IHAVEOPT: &[u8; 8] = b"IHAVEOPT";
const OPT_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
/// `NBD_FLAG_READ_ONLY` of an export.
const READ_ONLY: u16 = 1 << 1;

const CONNECT: u8 = 1;
const RECONFIGURE: u8 = 3;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [address, export, index, seconds] = &words[..] else {
        bail!("usage: nbd-attach ADDRESS EXPORT INDEX SECONDS");
    };
    let address: SocketAddr = address.parse().context("ADDRESS:PORT")?;
    let (index, seconds): (u32, u64) = (index.parse()?, seconds.parse()?);
    let (mut stream, size_bytes, flags) = open(address, export)?;
    let mut kernel = Kernel::new()?;
    let mut given = vec![number32(1, index)];
    given.push(number64(2, size_bytes));
    given.push(number64(3, 4096));
    given.push(number64(5, u64::from(flags)));
    given.push(sockets(&stream));
    given.push(number64(8, seconds));
    kernel.ask(CONNECT, &given)?;
    println!("attached");
    loop {
        // The kernel reads; here only the end of the stream shows.
        let mut ends = [PollFd::new(&stream, PollFlags::RDHUP)];
        poll(&mut ends, None)?;
        println!("the server has gone");
        let until = Instant::now() + Duration::from_secs(seconds);
        let (new, size, _) = loop {
            match open(address, export) {
                // The kernel does not look whether the device may still be written.
                Ok(opened) if (opened.2 ^ flags) & READ_ONLY == 0 => break opened,
                Ok((_, _, flags)) => {
                    println!("another kind of export: {flags:#x}");
                    ensure!(Instant::now() < until, "no export as before");
                }
                Err(error) => ensure!(Instant::now() < until, "{error:#}"),
            }
            // Polled: a server that is not there yet tells nobody when it comes.
            std::thread::sleep(Duration::from_millis(20));
        };
        ensure!(size == size_bytes, "the export has another size");
        kernel.ask(RECONFIGURE, &[number32(1, index), sockets(&new)])?;
        println!("attached again");
        stream = new;
    }
}

/// Connects and negotiates; the stream is in transmission then.
fn open(address: SocketAddr, export: &str) -> Result<(TcpStream, u64, u16)> {
    let limit = Duration::from_secs(10);
    let mut stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(limit))?;
    let greeting: [u8; 18] = read(&mut stream)?;
    ensure!(&greeting[..16] == b"NBDMAGICIHAVEOPT", "{greeting:?}");
    // Fixed newstyle, and no zeroes at the end.
    stream.write_all(&3u32.to_be_bytes())?;
    let mut option = IHAVEOPT.to_vec();
    option.extend(OPT_GO.to_be_bytes());
    option.extend((export.len() as u32 + 6).to_be_bytes());
    option.extend((export.len() as u32).to_be_bytes());
    option.extend(export.as_bytes());
    option.extend(0u16.to_be_bytes());
    stream.write_all(&option)?;
    let mut found = None;
    loop {
        let head: [u8; 20] = read(&mut stream)?;
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("4 bytes"));
        let mut body = vec![0; word(16) as usize];
        stream.read_exact(&mut body)?;
        match word(12) {
            REPLY_INFO if body.len() == 12 && body[..2] == [0, 0] => {
                let size = u64::from_be_bytes(body[2..10].try_into()?);
                found = Some((size, u16::from_be_bytes(body[10..12].try_into()?)));
            }
            REPLY_INFO => {}
            REPLY_ACK => break,
            other => bail!("{export}: {other:#x} {}", String::from_utf8_lossy(&body)),
        }
    }
    let (size, flags) = found.context("the server told no size")?;
    stream.set_read_timeout(None)?;
    Ok((stream, size, flags))
}

fn read<const N: usize>(stream: &mut TcpStream) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A netlink attribute, padded.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = (value.len() as u16 + 4).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn number32(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_ne_bytes())
}

fn number64(kind: u16, value: u64) -> Vec<u8> {
    attribute(kind, &value.to_ne_bytes())
}

/// The list of sockets, of one.
fn sockets(stream: &TcpStream) -> Vec<u8> {
    const NESTED: u16 = 1 << 15;
    let fd = number32(1, stream.as_raw_fd() as u32);
    attribute(7 | NESTED, &attribute(1 | NESTED, &fd))
}

/// The kernel's side, by generic netlink.
struct Kernel {
    socket: OwnedFd,
    family: u16,
}

impl Kernel {
    fn new() -> Result<Kernel> {
        let kind = Some(netlink::GENERIC);
        let socket = rustix::net::socket(AddressFamily::NETLINK, SocketType::RAW, kind)?;
        let mut kernel = Kernel { socket, family: 16 };
        // The controller, which is family 16, names the others: GETFAMILY by FAMILY_NAME.
        let answer = kernel.ask(3, &[attribute(2, b"nbd\0")])?;
        let mut rest = answer.get(4..).context("a short answer")?;
        while rest.len() >= 4 {
            let len = usize::from(u16::from_ne_bytes([rest[0], rest[1]]));
            let kind = u16::from_ne_bytes([rest[2], rest[3]]);
            if kind == 1 && len == 6 {
                kernel.family = u16::from_ne_bytes([rest[4], rest[5]]);
                return Ok(kernel);
            }
            let next = len.max(4).next_multiple_of(4);
            rest = rest.get(next..).unwrap_or_default();
        }
        bail!("the kernel has no family nbd; is the module loaded?")
    }

    /// Sends a command; answers with the data that came before the acknowledgement.
    fn ask(&mut self, command: u8, attributes: &[Vec<u8>]) -> Result<Vec<u8>> {
        const REQUEST_AND_ACK: u16 = 1 | 4;
        let body = attributes.concat();
        let mut message = (20 + body.len() as u32).to_ne_bytes().to_vec();
        message.extend(self.family.to_ne_bytes());
        message.extend(REQUEST_AND_ACK.to_ne_bytes());
        // Sequence and port, which nobody needs; then the command, its version and a pad.
        message.extend([0; 8]);
        message.extend([command, 1, 0, 0]);
        message.extend(body);
        send(self.socket.as_fd(), &message, SendFlags::empty())?;
        let mut data = Vec::new();
        loop {
            let mut buffer = vec![0; 16 << 10];
            let (count, _) = recv(
                self.socket.as_fd(),
                buffer.as_mut_slice(),
                RecvFlags::empty(),
            )?;
            let mut rest = &buffer[..count];
            while rest.len() >= 16 {
                let len = u32::from_ne_bytes(rest[..4].try_into()?) as usize;
                ensure!((16..=rest.len()).contains(&len), "a message of {len} bytes");
                let body = &rest[16..len];
                match u16::from_ne_bytes([rest[4], rest[5]]) {
                    // An error or, with number 0, the acknowledgement.
                    2 => match i32::from_ne_bytes(body[..4].try_into()?) {
                        0 => return Ok(data),
                        errno => bail!(std::io::Error::from_raw_os_error(-errno)),
                    },
                    _ => data = body.to_vec(),
                }
                rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}
