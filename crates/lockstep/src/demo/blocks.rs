//! The demo's workload without root: clients that overwrite numbered blocks over NBD and remember
//! what was acknowledged to them.
//!
//! Each client owns a range of blocks. A block's content names the client, the block and a number
//! that grows with each write of the client, and the rest follows from these, so that a lost, an
//! older, a torn and a misplaced write are all told apart.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, bail, ensure};

use super::nbd::NbdClient;

/// Bytes of a block.
const BLOCK_BYTES: usize = 4096;
/// Blocks of one client, at the beginning of its part of the volume: few enough extents that the
/// resync of a killed Primary, which takes its hot extents as a whole, stays a part of the volume.
const BLOCKS: u64 = 512;

/// What one client knows of its blocks.
#[derive(Debug)]
pub(super) struct Ledger {
    client: u32,
    clients: u32,
    /// Number of the last acknowledged write of each block; 0 before the first.
    acknowledged: Vec<u64>,
    /// Block and number of a write without an answer: it may be there or not.
    open: Option<(u64, u64)>,
    last_number: u64,
}

impl Ledger {
    /// Clients of one volume, none of which has written yet.
    pub(super) fn all(clients: u32) -> Vec<Ledger> {
        let new = |client| Ledger {
            client,
            clients,
            acknowledged: vec![0; BLOCKS as usize],
            open: None,
            last_number: 0,
        };
        (0..clients).map(new).collect()
    }

    /// Acknowledged writes so far.
    pub(super) fn count(&self) -> u64 {
        self.last_number - u64::from(self.open.is_some())
    }

    fn offset(&self, block: u64, size_bytes: u64) -> u64 {
        let part = size_bytes / u64::from(self.clients) / BLOCK_BYTES as u64;
        let first = part * u64::from(self.client);
        (first + block) * BLOCK_BYTES as u64
    }

    /// Writes until told to stop or the volume dies.
    fn run(&mut self, nbd: &mut NbdClient, stop: &AtomicBool, done: &AtomicU64) {
        while !stop.load(Ordering::Relaxed) {
            let number = self.last_number + 1;
            let block = mix(u64::from(self.client) << 48 | number) % BLOCKS;
            self.last_number = number;
            self.open = Some((block, number));
            let offset = self.offset(block, nbd.size_bytes());
            if nbd
                .write(offset, &content(self.client, block, number))
                .is_err()
            {
                return;
            }
            self.acknowledged[block as usize] = number;
            self.open = None;
            done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Every block holds its last acknowledged write, or the one that had no answer. What is found
    /// is what counts from here on.
    pub(super) fn check(&mut self, nbd: &mut NbdClient) -> anyhow::Result<()> {
        for block in 0..BLOCKS {
            let expected = self.acknowledged[block as usize];
            let offset = self.offset(block, nbd.size_bytes());
            let found = nbd.read(offset, BLOCK_BYTES)?;
            let open = self.open.filter(|(open, _)| *open == block);
            if let Some((_, number)) = open
                && found == content(self.client, block, number)
            {
                self.acknowledged[block as usize] = number;
                continue;
            }
            ensure!(
                found == content(self.client, block, expected),
                "block {block} of client {} (byte {offset}) does not hold its acknowledged write \
                 {expected}; it holds {}",
                self.client,
                describe(&found)
            );
        }
        self.open = None;
        Ok(())
    }
}

/// What a block holds after a write; zeroes before the first.
fn content(client: u32, block: u64, number: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BLOCK_BYTES);
    if number == 0 {
        bytes.resize(BLOCK_BYTES, 0);
        return bytes;
    }
    for word in [u64::from(client), block, number] {
        bytes.extend(word.to_le_bytes());
    }
    let mut word = mix(number ^ block << 40 ^ u64::from(client) << 56);
    while bytes.len() < BLOCK_BYTES {
        word = mix(word);
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

fn describe(bytes: &[u8]) -> String {
    let word = |index: usize| {
        let bytes = bytes[index * 8..][..8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    };
    let [client, block, number] = [0, 1, 2].map(word);
    if bytes.iter().all(|byte| *byte == 0) {
        "zeroes".to_owned()
    } else if u32::try_from(client).is_ok_and(|c| bytes == content(c, block, number)) {
        format!("write {number} of block {block} of client {client}")
    } else {
        "parts of several writes".to_owned()
    }
}

/// Spreads numbers (splitmix64).
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Clients at work.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Ledger>>,
}

impl Load {
    /// Connects every client and lets it write.
    pub(super) fn start(ledgers: Vec<Ledger>, socket: &Path, export: &str) -> anyhow::Result<Load> {
        let mut connected = Vec::new();
        for ledger in ledgers {
            connected.push((ledger, NbdClient::connect(socket, export)?));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let mut threads = Vec::new();
        for (mut ledger, mut nbd) in connected {
            let (stop, done) = (stop.clone(), done.clone());
            let run = move || {
                ledger.run(&mut nbd, &stop, &done);
                ledger
            };
            let name = "client".to_owned();
            threads.push(std::thread::Builder::new().name(name).spawn(run)?);
        }
        Ok(Load {
            stop,
            done,
            threads,
        })
    }

    /// Writes acknowledged since the start.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Ends the clients; those of a dead node have ended by themselves.
    pub(super) fn stop(self) -> anyhow::Result<Vec<Ledger>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut ledgers = Vec::new();
        for thread in self.threads {
            match thread.join() {
                Ok(ledger) => ledgers.push(ledger),
                Err(_) => bail!("a client panicked"),
            }
        }
        Ok(ledgers)
    }
}

/// Reads everything back from a node. Gives the number of blocks that were compared.
pub(super) fn check_all(
    ledgers: &mut [Ledger],
    socket: &Path,
    export: &str,
) -> anyhow::Result<u64> {
    let mut nbd = NbdClient::connect(socket, export)?;
    for ledger in &mut *ledgers {
        ledger
            .check(&mut nbd)
            .context("acknowledged writes are missing")?;
    }
    Ok(ledgers.len() as u64 * BLOCKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocks_content_tells_whose_and_which_write_it_is() {
        let block = content(3, 17, 1234);
        assert_eq!(block.len(), BLOCK_BYTES);
        assert_eq!(describe(&block), "write 1234 of block 17 of client 3");
        let mut torn = block;
        torn[2048..].copy_from_slice(&content(3, 17, 1235)[2048..]);
        assert_eq!(describe(&torn), "parts of several writes");
        assert_eq!(describe(&content(3, 17, 0)), "zeroes");
    }

    #[test]
    fn no_two_blocks_share_a_place_and_all_lie_within_the_volume() {
        let size_bytes = 127 << 20;
        let mut places = std::collections::BTreeSet::new();
        for ledger in Ledger::all(4) {
            for block in 0..BLOCKS {
                let offset = ledger.offset(block, size_bytes);
                assert!(offset + BLOCK_BYTES as u64 <= size_bytes);
                assert!(places.insert(offset), "byte {offset} is used twice");
            }
        }
    }
}
