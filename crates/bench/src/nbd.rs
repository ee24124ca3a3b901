//! A load over NBD: random 4 KiB operations at a depth on one connection to a unix socket, the same
//! for every server.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::raw::{BLOCK, Direction};
use crate::stats::{Figure, Latencies, process_cpu};

const MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const REPLY_LEN: usize = 16;
/// Fixed newstyle, no padding.
const CLIENT_FLAGS: u32 = 3;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const MAX_OPTION_REPLY_LEN: u32 = 1 << 16;
/// A server that answers nothing for so long is given up.
const PATIENCE: Duration = Duration::from_secs(30);

fn wrong(text: impl Into<String>) -> io::Error {
    io::Error::other(text.into())
}

/// Opens an export.
pub fn connect(socket: &Path, export: &str) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if greeting[..8] != MAGIC.to_be_bytes() || greeting[8..16] != OPTION_MAGIC.to_be_bytes() {
        return Err(wrong("no NBD server"));
    }
    let mut hello = CLIENT_FLAGS.to_be_bytes().to_vec();
    hello.extend(OPTION_MAGIC.to_be_bytes());
    hello.extend(OPTION_GO.to_be_bytes());
    hello.extend((export.len() as u32 + 6).to_be_bytes());
    hello.extend((export.len() as u32).to_be_bytes());
    hello.extend(export.as_bytes());
    hello.extend([0; 2]);
    stream.write_all(&hello)?;
    loop {
        let mut head = [0; 20];
        stream.read_exact(&mut head)?;
        let word =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (kind, len) = (word(12), word(16));
        if head[..8] != OPTION_REPLY_MAGIC.to_be_bytes() || len > MAX_OPTION_REPLY_LEN {
            return Err(wrong("a wrong option reply"));
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data)?;
        match kind {
            REPLY_ACK => return Ok(stream),
            REPLY_INFO => {}
            _ => return Err(wrong(format!("the export {export} is refused"))),
        }
    }
}

/// Random operations at depth `qd` over the first `bytes`, for `time`.
pub fn measure(
    stream: &mut UnixStream,
    bytes: u64,
    direction: Direction,
    qd: usize,
    time: Duration,
) -> io::Result<Figure> {
    let blocks = bytes / BLOCK as u64;
    let (command, payload, reply_len) = match direction {
        Direction::Read => (0u32, 0, REPLY_LEN + BLOCK),
        Direction::Write => (1u32, BLOCK, REPLY_LEN),
    };
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut started = vec![Instant::now(); qd];
    let mut ready: Vec<usize> = (0..qd).collect();
    let mut out = Vec::with_capacity(qd * (28 + payload));
    let mut input = vec![0; (qd * reply_len).max(1 << 16)];
    let mut filled = 0;
    let mut in_flight = 0;
    let mut latencies = Latencies::with_capacity(1 << 20);
    let begin = Instant::now();
    let cpu = process_cpu();
    loop {
        if begin.elapsed() < time {
            out.clear();
            let now = Instant::now();
            for slot in ready.drain(..) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                out.extend(REQUEST_MAGIC.to_be_bytes());
                out.extend(command.to_be_bytes());
                out.extend((slot as u64).to_be_bytes());
                out.extend((random % blocks * BLOCK as u64).to_be_bytes());
                out.extend((BLOCK as u32).to_be_bytes());
                out.resize(out.len() + payload, 0x5a);
                started[slot] = now;
                in_flight += 1;
            }
            stream.write_all(&out)?;
        }
        if in_flight == 0 {
            break;
        }
        let count = match stream.read(&mut input[filled..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        if count == 0 {
            return Err(wrong("the server closed the connection"));
        }
        filled += count;
        let now = Instant::now();
        let whole = filled / reply_len * reply_len;
        for reply in input[..whole].chunks_exact(reply_len) {
            let word = |at: usize| {
                u32::from_be_bytes([reply[at], reply[at + 1], reply[at + 2], reply[at + 3]])
            };
            let slot = word(12) as usize;
            if word(0) != REPLY_MAGIC || word(4) != 0 || slot >= qd {
                return Err(wrong(format!("NBD error {}", word(4))));
            }
            latencies.add(now - started[slot]);
            ready.push(slot);
            in_flight -= 1;
        }
        input.copy_within(whole..filled, 0);
        filled -= whole;
    }
    let elapsed = begin.elapsed();
    Ok(Figure::new(
        latencies,
        elapsed,
        process_cpu().saturating_sub(cpu),
    ))
}
