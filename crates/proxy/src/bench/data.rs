//! Sample data, and a stream of it that is checked to the last byte at the other end.

use std::io::{IoSlice, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use super::pair::text;
use crate::core::rng::Rng;

/// Bytes written or read at once.
const BLOCK: usize = 1 << 20;
const PAGE: usize = 4096;
/// Parts that the kernel takes at once.
const PARTS_MAX: usize = 1024;

pub(super) fn read_sample(path: &Path, len: usize) -> Result<Vec<u8>, String> {
    let named = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut data = Vec::new();
    std::fs::File::open(path)
        .map_err(named)?
        .take(len as u64)
        .read_to_end(&mut data)
        .map_err(named)?;
    if data.is_empty() {
        return Err(format!("{} is empty", path.display()));
    }
    Ok(data)
}

/// Half text of small vocabulary, a quarter noise, a quarter zeros.
pub(super) fn made_up(len: usize) -> Vec<u8> {
    let mut rng = Rng::new(42);
    let words: Vec<Vec<u8>> = (0..2000)
        .map(|_| {
            (0..2 + rng.below(9))
                .map(|_| b'a' + rng.below(26) as u8)
                .collect()
        })
        .collect();
    let mut data = Vec::with_capacity(len + (64 << 10));
    while data.len() < len {
        let end = data.len() + (16 << 10);
        match rng.below(4) {
            0 => data.extend((0..16 << 10).map(|_| rng.next() as u8)),
            1 => data.resize(end, 0),
            _ => {
                while data.len() < end {
                    data.extend_from_slice(&words[rng.below(2000) as usize]);
                    data.push(b' ');
                }
            }
        }
    }
    data.truncate(len);
    data
}

pub(super) fn noise(len: usize) -> Vec<u8> {
    let mut rng = Rng::new(43);
    let mut data = Vec::with_capacity(len + 8);
    while data.len() < len {
        data.extend_from_slice(&rng.next().to_le_bytes());
    }
    data.truncate(len);
    data
}

/// `total` bytes, made of a sample again and again; each page carries its number, so that no byte
/// can come from another place unseen.
pub(super) struct Flow {
    sample: Arc<Vec<u8>>,
    total: u64,
    got: Arc<AtomicU64>,
}

impl Flow {
    pub(super) fn new(sample: Arc<Vec<u8>>, total: u64) -> Flow {
        Flow {
            sample,
            total,
            got: Arc::default(),
        }
    }

    /// Bytes that have arrived.
    pub(super) fn received(&self) -> u64 {
        self.got.load(Ordering::Relaxed)
    }

    /// Writes everything; answers with the time that it took.
    pub(super) fn send(&self, mut socket: TcpStream) -> JoinHandle<Result<Duration, String>> {
        let (sample, total) = (Arc::clone(&self.sample), self.total);
        spawn(move || {
            let begun = Instant::now();
            let mut at = 0;
            while at < total {
                let stamps = stamps(at, total);
                let mut parts = parts(&sample, at, total, &stamps);
                let mut rest = &mut parts[..];
                while !rest.is_empty() {
                    let count = rest.len().min(PARTS_MAX);
                    let written = socket.write_vectored(&rest[..count]).map_err(text)?;
                    if written == 0 {
                        return Err("the proxy takes no more bytes".into());
                    }
                    IoSlice::advance_slices(&mut rest, written);
                }
                at += BLOCK as u64;
            }
            Ok(begun.elapsed())
        })
    }

    /// Reads and compares everything; answers with the moment of the last byte.
    pub(super) fn receive(&self, mut socket: TcpStream) -> JoinHandle<Result<Instant, String>> {
        let (sample, total) = (Arc::clone(&self.sample), self.total);
        let got = Arc::clone(&self.got);
        spawn(move || {
            let mut room = vec![0; BLOCK];
            let mut at = 0;
            while at < total {
                let len = (total - at).min(BLOCK as u64) as usize;
                let mut done = 0;
                while done < len {
                    let count = socket
                        .read(&mut room[done..len])
                        .map_err(|error| format!("after {at} bytes: {error}"))?;
                    if count == 0 {
                        return Err(format!("only {} of {total} bytes came", at + done as u64));
                    }
                    done += count;
                    got.fetch_add(count as u64, Ordering::Relaxed);
                }
                if !is_block(&sample, at, &room[..len]) {
                    return Err(format!("wrong bytes after {at}"));
                }
                at += len as u64;
            }
            Ok(Instant::now())
        })
    }
}

/// What each page of the block that begins at `at` begins with.
fn stamps(at: u64, total: u64) -> Vec<[u8; 8]> {
    let end = total.min(at + BLOCK as u64);
    let pages = (at..end).step_by(PAGE);
    pages.map(u64::to_le_bytes).collect()
}

/// The block of the flow that begins at `at`: the sample where it is, but for the stamps. Nothing is
/// copied for it.
fn parts<'a>(sample: &'a [u8], at: u64, total: u64, stamps: &'a [[u8; 8]]) -> Vec<IoSlice<'a>> {
    let begin = (at as usize / BLOCK * BLOCK) % sample.len().max(1);
    let len = (total - at).min(BLOCK as u64) as usize;
    let mut parts = Vec::with_capacity(2 * stamps.len() + 1);
    for (number, stamp) in stamps.iter().enumerate() {
        let page = number * PAGE;
        let end = len.min(page + PAGE);
        let mut done = page;
        // A page that is too short for it has none.
        if end - page >= stamp.len() {
            parts.push(IoSlice::new(stamp));
            done += stamp.len();
        }
        while done < end {
            // The sample begins anew at its end.
            let from = (begin + done) % sample.len();
            let take = (end - done).min(sample.len() - from);
            parts.push(IoSlice::new(&sample[from..from + take]));
            done += take;
        }
    }
    parts
}

/// Whether these are all bytes of the block that begins at `at`; nothing is copied for it.
fn is_block(sample: &[u8], at: u64, block: &[u8]) -> bool {
    let begin = (at as usize / BLOCK * BLOCK) % sample.len().max(1);
    let same = |from: usize, bytes: &[u8]| {
        // The sample begins anew at its end.
        let mut from = from % sample.len();
        let mut rest = bytes;
        while !rest.is_empty() {
            let take = rest.len().min(sample.len() - from);
            if rest[..take] != sample[from..from + take] {
                return false;
            }
            (rest, from) = (&rest[take..], 0);
        }
        true
    };
    block.chunks(PAGE).enumerate().all(|(number, page)| {
        let from = begin + number * PAGE;
        let stamp = at + (number * PAGE) as u64;
        match page.split_first_chunk::<8>() {
            Some((head, rest)) => *head == stamp.to_le_bytes() && same(from + 8, rest),
            None => same(from, page),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_byte_of_a_block_is_seen() {
        for (sample_len, total) in [(PAGE * 3 + 5, BLOCK as u64 + PAGE as u64 + 3), (3, 9000)] {
            let sample = noise(sample_len);
            let mut at = 0;
            while at < total {
                let stamps = stamps(at, total);
                let parts = parts(&sample, at, total, &stamps);
                let bytes = parts.iter().flat_map(|part| part.iter());
                let mut block: Vec<u8> = bytes.copied().collect();
                assert_eq!(block.len() as u64, (total - at).min(BLOCK as u64));
                assert!(is_block(&sample, at, &block));
                for wrong in [0, 7, 8, PAGE - 1, PAGE, block.len() - 1] {
                    let Some(byte) = block.get_mut(wrong) else {
                        continue;
                    };
                    *byte ^= 1;
                    assert!(!is_block(&sample, at, &block), "{sample_len} {at} {wrong}");
                    block[wrong] ^= 1;
                }
                assert!(!is_block(&sample, at + BLOCK as u64, &block) || block.len() < 8);
                at += block.len() as u64;
            }
        }
    }
}
