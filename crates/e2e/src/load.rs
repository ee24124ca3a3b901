//! Clients that overwrite numbered blocks of a device and remember what was acknowledged to them.
//!
//! Each client owns a range of blocks, writes past the kernel's cache, and has one write in flight.
//! A block names its client, its place and the number of the write, and its other bytes follow from
//! these, so a lost, an older, a torn and a misplaced write are told apart.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};

use crate::PATIENCE;

const BLOCK_BYTES: usize = 4096;
/// Blocks of one client.
const BLOCKS: u64 = 256;
/// Blocks from one client's range to the next one's, two extents of the activity log.
const STRIDE: u64 = 2048;

#[repr(C, align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// Clients at work.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    clients: Vec<JoinHandle<Client>>,
}

/// One client's blocks.
#[derive(Debug)]
struct Client {
    number: u64,
    acknowledged: Vec<u64>,
    /// Block and number of a write that failed or has no answer.
    open: Option<(u64, u64)>,
    error: Option<io::Error>,
}

/// What was acknowledged to the clients of a load.
#[derive(Debug)]
pub struct Ledger(Vec<Client>);

impl Load {
    /// Starts clients on a device; they go on until they are stopped or a write fails.
    pub fn start(device: &Path, clients: u64) -> Result<Load> {
        let fresh = |number| Client {
            number,
            acknowledged: vec![0; BLOCKS as usize],
            open: None,
            error: None,
        };
        Load::with(device, (0..clients).map(fresh).collect())
    }

    /// Goes on with what an earlier load has written, on the same or another node's device.
    pub fn resume(device: &Path, mut ledger: Ledger) -> Result<Load> {
        for client in &mut ledger.0 {
            client.error = None;
        }
        Load::with(device, ledger.0)
    }

    fn with(device: &Path, clients: Vec<Client>) -> Result<Load> {
        let stop = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let mut threads = Vec::new();
        for mut client in clients {
            let file = fs::File::options()
                .write(true)
                .custom_flags(libc::O_DIRECT)
                .open(device)?;
            let (stop, done) = (stop.clone(), done.clone());
            threads.push(std::thread::spawn(move || {
                client.run(&file, &stop, &done);
                client
            }));
        }
        Ok(Load {
            stop,
            done,
            clients: threads,
        })
    }

    /// Acknowledged writes so far.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Waits until some more writes are acknowledged.
    pub fn wait_for_progress(&self) -> Result<()> {
        let enough = self.done() + 50;
        let begin = Instant::now();
        while self.done() < enough {
            ensure!(begin.elapsed() < PATIENCE, "no write is acknowledged");
            let ended = self.clients.iter().any(JoinHandle::is_finished);
            ensure!(!ended, "a write failed");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Ends the clients; whether a write failed is in the ledger.
    pub fn end(self) -> Result<Ledger> {
        self.stop.store(true, Ordering::Relaxed);
        let begin = Instant::now();
        while !self.clients.iter().all(JoinHandle::is_finished) {
            ensure!(begin.elapsed() < PATIENCE, "a write has no answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        let join = |thread: JoinHandle<Client>| thread.join().map_err(|_| anyhow!("a panic"));
        Ok(Ledger(
            self.clients.into_iter().map(join).collect::<Result<_>>()?,
        ))
    }
}

impl Ledger {
    /// The first write that failed.
    pub fn error(&self) -> Option<&io::Error> {
        self.0.iter().find_map(|client| client.error.as_ref())
    }

    /// Every block of a device or of a file with the same bytes holds its last acknowledged write,
    /// or a later one that had no answer; what is found is what counts from here on.
    pub fn check(&mut self, device: &Path) -> Result<()> {
        let file = fs::File::options()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(device)?;
        let mut block = Box::new(Block([0; BLOCK_BYTES]));
        for client in &mut self.0 {
            for index in 0..BLOCKS {
                file.read_exact_at(&mut block.0, client.offset(index))?;
                let acknowledged = &mut client.acknowledged[index as usize];
                let open = client.open.filter(|(open, _)| *open == index);
                let open = open.map_or(0, |(_, number)| number);
                if block.0 == content(client.number, index, *acknowledged) {
                    continue;
                }
                if open > 0 && block.0 == content(client.number, index, open) {
                    *acknowledged = open;
                    continue;
                }
                let words = block.0.chunks_exact(8).take(3);
                let words: Vec<u64> = words
                    .map(|word| word.iter().rev().fold(0, |sum, b| sum << 8 | u64::from(*b)))
                    .collect();
                bail!(
                    "block {index} of client {} lost its acknowledged write {acknowledged} (open: \
                     {open}); it names client, block and write {words:?}",
                    client.number
                );
            }
            client.open = None;
        }
        Ok(())
    }
}

impl Client {
    fn offset(&self, block: u64) -> u64 {
        (self.number * STRIDE + block) * BLOCK_BYTES as u64
    }

    fn run(&mut self, file: &fs::File, stop: &AtomicBool, done: &AtomicU64) {
        let mut number = self.acknowledged.iter().copied().max().unwrap_or(0);
        let mut bytes = Box::new(Block([0; BLOCK_BYTES]));
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            let block = mix(number ^ self.number << 32) % BLOCKS;
            bytes.0 = content(self.number, block, number);
            self.open = Some((block, number));
            if let Err(error) = file.write_all_at(&bytes.0, self.offset(block)) {
                self.error = Some(error);
                return;
            }
            self.acknowledged[block as usize] = number;
            self.open = None;
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What a block holds after a write; zeroes before the first.
fn content(client: u64, block: u64, number: u64) -> [u8; BLOCK_BYTES] {
    let mut bytes = [0; BLOCK_BYTES];
    if number > 0 {
        let head = [client, block, number].into_iter();
        let mut word = number ^ block << 40 ^ client << 56;
        let rest = std::iter::repeat_with(|| {
            word = mix(word);
            word
        });
        for (place, word) in bytes.chunks_exact_mut(8).zip(head.chain(rest)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
    bytes
}

/// Spreads numbers (splitmix64).
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
