//! The floor: the least that a replicated write can cost on this machine.
//!
//! Two threads with a ring each, joined by TCP on loopback. The first writes 4 KiB locally and
//! sends it; the second writes it and sends a 40-byte ack. No activity log, no epochs, no flush.

use std::fs::File;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use crate::raw::{Aligned, BLOCK};
use crate::stats::{Figure, Latencies, process_cpu};

const HEADER: usize = 40;
const MESSAGE: usize = HEADER + BLOCK;
const ACK: usize = 40;
/// The second thread's receive buffer in bytes.
const RECEIVE: usize = 256 * 1024;

const DISK: u64 = 1 << 32;
const SEND: u64 = 2 << 32;
const RECEIVED: u64 = 3 << 32;
const KIND: u64 = !0 << 32;

/// Where a side's blocks go.
pub enum Store {
    /// To a file opened with O_DIRECT.
    File(File),
    /// To memory.
    Ram(Vec<u8>),
}

impl Store {
    /// Memory of so many bytes.
    pub fn ram(bytes: usize) -> Self {
        Store::Ram(vec![0; bytes])
    }
}

/// Random replicated writes at depth `qd` over `bytes` for `time`.
pub fn measure(
    local: &mut Store,
    remote: &mut Store,
    bytes: u64,
    qd: usize,
    time: Duration,
) -> io::Result<Figure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let primary = TcpStream::connect(listener.local_addr()?)?;
    let (secondary, _) = listener.accept()?;
    primary.set_nodelay(true)?;
    secondary.set_nodelay(true)?;
    let cpu = process_cpu();
    std::thread::scope(|scope| {
        let other = scope.spawn(move || serve(&secondary, remote, qd));
        let result = drive(&primary, local, bytes, qd, time);
        primary.shutdown(std::net::Shutdown::Both).ok();
        drop(primary);
        let served = other
            .join()
            .map_err(|_| io::Error::other("the second thread panicked"))?;
        let (latencies, elapsed) = result?;
        served?;
        Ok(Figure::new(
            latencies,
            elapsed,
            process_cpu().saturating_sub(cpu),
        ))
    })
}

fn ring(entries: usize) -> io::Result<IoUring> {
    IoUring::builder()
        .setup_single_issuer()
        .setup_coop_taskrun()
        .build(u32::try_from(entries.next_power_of_two()).unwrap_or(4096))
}

fn push(ring: &mut IoUring, entry: &io_uring::squeue::Entry) -> io::Result<()> {
    // SAFETY: every caller names memory that it owns and keeps until the completion was taken.
    unsafe { ring.submission().push(entry) }.map_err(|_| io::Error::other("the ring is full"))
}

struct Pending {
    started: Instant,
    local: bool,
    acked: bool,
}

fn drive(
    socket: &TcpStream,
    store: &mut Store,
    bytes: u64,
    qd: usize,
    time: Duration,
) -> io::Result<(Latencies, Duration)> {
    let mut ring = ring(2 * qd + 8)?;
    let mut memory = Aligned::new(qd);
    let mut pending: Vec<Pending> = (0..qd)
        .map(|_| Pending {
            started: Instant::now(),
            local: false,
            acked: false,
        })
        .collect();
    let mut sending: Vec<u8> = Vec::with_capacity(qd * MESSAGE);
    let mut queued: Vec<u8> = Vec::with_capacity(qd * MESSAGE);
    let mut sent = 0;
    let mut acks = vec![0u8; qd * ACK + ACK];
    let mut have = 0;
    let fd = types::Fd(socket.as_raw_fd());
    let blocks = bytes / BLOCK as u64;
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let mut latencies = Latencies::with_capacity(1 << 20);
    let mut ready: Vec<usize> = (0..qd).collect();
    let mut in_flight = 0usize;
    let mut send_busy = false;
    let mut receive_busy = false;
    let begin = Instant::now();
    loop {
        if begin.elapsed() < time {
            for slot in ready.drain(..) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let offset = random % blocks * BLOCK as u64;
                pending[slot] = Pending {
                    started: Instant::now(),
                    local: false,
                    acked: false,
                };
                let pointer = memory.pointer(slot);
                let mut header = [0u8; HEADER];
                header[..8].copy_from_slice(&offset.to_le_bytes());
                header[8..16].copy_from_slice(&(slot as u64).to_le_bytes());
                queued.extend_from_slice(&header);
                // SAFETY: the block of `slot` is 4 KiB of initialised memory that nobody writes.
                queued.extend_from_slice(unsafe { std::slice::from_raw_parts(pointer, BLOCK) });
                match store {
                    Store::File(file) => push(
                        &mut ring,
                        &opcode::Write::new(types::Fd(file.as_raw_fd()), pointer, BLOCK as u32)
                            .offset(offset)
                            .build()
                            .user_data(DISK | slot as u64),
                    )?,
                    Store::Ram(ram) => {
                        let at = offset as usize;
                        let end = queued.len();
                        ram[at..at + BLOCK].copy_from_slice(&queued[end - BLOCK..]);
                        pending[slot].local = true;
                    }
                }
                in_flight += 1;
            }
        }
        if in_flight == 0 {
            break;
        }
        if !send_busy && (sent < sending.len() || !queued.is_empty()) {
            if sent >= sending.len() {
                sending.clear();
                sent = 0;
                std::mem::swap(&mut sending, &mut queued);
            }
            let left = &sending[sent..];
            push(
                &mut ring,
                &opcode::Send::new(fd, left.as_ptr(), left.len() as u32)
                    .build()
                    .user_data(SEND),
            )?;
            send_busy = true;
        }
        if !receive_busy {
            let room = &mut acks[have..];
            push(
                &mut ring,
                &opcode::Recv::new(fd, room.as_mut_ptr(), room.len() as u32)
                    .build()
                    .user_data(RECEIVED),
            )?;
            receive_busy = true;
        }
        crate::raw::submit_and_wait(&ring)?;
        let now = Instant::now();
        let mut done = Vec::new();
        for entry in ring.completion() {
            let result = entry.result();
            if result < 0 {
                return Err(io::Error::from_raw_os_error(-result));
            }
            match entry.user_data() & KIND {
                DISK => {
                    let slot = (entry.user_data() & !KIND) as usize;
                    pending[slot].local = true;
                    if pending[slot].acked {
                        done.push(slot);
                    }
                }
                SEND => {
                    sent += result as usize;
                    send_busy = false;
                }
                _ => {
                    if result == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    receive_busy = false;
                    have += result as usize;
                    let whole = have / ACK;
                    for ack in acks[..whole * ACK].chunks_exact(ACK) {
                        let mut slot = [0u8; 8];
                        slot.copy_from_slice(&ack[8..16]);
                        let slot = u64::from_le_bytes(slot) as usize;
                        pending[slot].acked = true;
                        if pending[slot].local {
                            done.push(slot);
                        }
                    }
                    acks.copy_within(whole * ACK..have, 0);
                    have -= whole * ACK;
                }
            }
        }
        for slot in done {
            latencies.add(now - pending[slot].started);
            ready.push(slot);
            in_flight -= 1;
        }
    }
    Ok((latencies, begin.elapsed()))
}

fn serve(socket: &TcpStream, store: &mut Store, qd: usize) -> io::Result<()> {
    let mut ring = ring(2 * qd + 8)?;
    let mut memory = Aligned::new(2 * qd);
    let mut free: Vec<usize> = (0..2 * qd).collect();
    let mut slots = vec![0u64; 2 * qd];
    let mut buffer = vec![0u8; RECEIVE];
    let mut have = 0;
    let mut acks: Vec<u8> = Vec::new();
    let mut sending: Vec<u8> = Vec::new();
    let mut sent = 0;
    let fd = types::Fd(socket.as_raw_fd());
    let mut receive_busy = false;
    let mut send_busy = false;
    loop {
        if !receive_busy && have < buffer.len() {
            let room = &mut buffer[have..];
            push(
                &mut ring,
                &opcode::Recv::new(fd, room.as_mut_ptr(), room.len() as u32)
                    .build()
                    .user_data(RECEIVED),
            )?;
            receive_busy = true;
        }
        if !send_busy && (sent < sending.len() || !acks.is_empty()) {
            if sent >= sending.len() {
                sending.clear();
                sent = 0;
                std::mem::swap(&mut sending, &mut acks);
            }
            let left = &sending[sent..];
            push(
                &mut ring,
                &opcode::Send::new(fd, left.as_ptr(), left.len() as u32)
                    .build()
                    .user_data(SEND),
            )?;
            send_busy = true;
        }
        crate::raw::submit_and_wait(&ring)?;
        let completions: Vec<(u64, i32)> = ring
            .completion()
            .map(|entry| (entry.user_data(), entry.result()))
            .collect();
        for (data, result) in completions {
            let kind = data & KIND;
            if kind == RECEIVED && result <= 0 {
                // The other side is done; what is left does not count.
                return Ok(());
            }
            if result < 0 {
                return if kind == SEND {
                    Ok(())
                } else {
                    Err(io::Error::from_raw_os_error(-result))
                };
            }
            match kind {
                DISK => {
                    let index = (data & !KIND) as usize;
                    ack(&mut acks, slots[index]);
                    free.push(index);
                }
                SEND => {
                    sent += result as usize;
                    send_busy = false;
                }
                _ => {
                    have += result as usize;
                    receive_busy = false;
                }
            }
        }
        let mut used = 0;
        while have - used >= MESSAGE && !free.is_empty() {
            let message = &buffer[used..used + MESSAGE];
            let mut word = [0u8; 8];
            word.copy_from_slice(&message[..8]);
            let offset = u64::from_le_bytes(word);
            word.copy_from_slice(&message[8..16]);
            let slot = u64::from_le_bytes(word);
            let block = &message[HEADER..];
            match store {
                Store::Ram(ram) => {
                    let at = offset as usize;
                    ram[at..at + BLOCK].copy_from_slice(block);
                    ack(&mut acks, slot);
                }
                Store::File(file) => {
                    let Some(index) = free.pop() else { break };
                    slots[index] = slot;
                    let pointer = memory.pointer(index);
                    // SAFETY: the block of `index` was free, so no operation uses it.
                    unsafe { pointer.copy_from_nonoverlapping(block.as_ptr(), BLOCK) };
                    push(
                        &mut ring,
                        &opcode::Write::new(types::Fd(file.as_raw_fd()), pointer, BLOCK as u32)
                            .offset(offset)
                            .build()
                            .user_data(DISK | index as u64),
                    )?;
                }
            }
            used += MESSAGE;
        }
        if used > 0 && !receive_busy {
            buffer.copy_within(used..have, 0);
            have -= used;
        } else if used > 0 {
            return Err(io::Error::other(
                "a receive was under way while its buffer moved",
            ));
        }
    }
}

fn ack(acks: &mut Vec<u8>, slot: u64) {
    let mut bytes = [0u8; ACK];
    bytes[8..16].copy_from_slice(&slot.to_le_bytes());
    acks.extend_from_slice(&bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_hold_the_same_bytes_afterwards() {
        let bytes = 64 * BLOCK;
        let mut local = Store::ram(bytes);
        let mut remote = Store::ram(bytes);
        let figure = measure(
            &mut local,
            &mut remote,
            bytes as u64,
            8,
            Duration::from_millis(50),
        )
        .unwrap();
        assert!(figure.iops > 0.0);
        let (Store::Ram(a), Store::Ram(b)) = (&local, &remote) else {
            unreachable!()
        };
        assert!(a == b && a.contains(&0x5a));
    }
}
