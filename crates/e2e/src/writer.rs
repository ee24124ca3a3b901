//! Durable writes to a device in the background, while a test does something to it.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use crate::PATIENCE;

/// Writes blocks, each durable, until it is told to end.
pub struct Writer {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    thread: JoinHandle<Result<()>>,
}

impl Writer {
    /// Writes of so many bytes over the first so many places of that size.
    pub fn start(device: &Path, bytes: usize, places: u64) -> Result<Writer> {
        let file = fs::File::options().write(true).open(device)?;
        let stop = Arc::new(AtomicBool::new(false));
        let written = Arc::new(AtomicU64::new(0));
        let (told, count) = (stop.clone(), written.clone());
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                let n = count.load(Ordering::Relaxed);
                let content: Vec<u8> = (0..bytes).map(|at| (at / 512) as u8 ^ n as u8).collect();
                file.write_all_at(&content, n * 7 % places * bytes as u64)?;
                file.sync_all()?;
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        Ok(Writer {
            stop,
            written,
            thread,
        })
    }

    /// Blocks that are durable.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Waits until some more blocks are written.
    pub fn wait_for_progress(&self) -> Result<()> {
        let enough = self.written() + 10;
        let begin = Instant::now();
        while self.written() < enough {
            ensure!(begin.elapsed() < PATIENCE, "no write returns");
            ensure!(!self.thread.is_finished(), "a write failed");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends it; a write that failed is an error.
    pub fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("a panic"))?
    }
}
