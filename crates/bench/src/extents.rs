//! What a cold extent of the activity log costs a write.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::engine::{BLOCKS_PER_EXTENT, Disks, Nodes, Places, Shape};
use crate::raw::{self, Aligned, BLOCK};
use crate::run::{Plan, Scratch};
use crate::stats::{Figure, Latencies, process_cpu};

/// Extents that the activity log has room for: the least.
const AL_EXTENTS: u32 = 67;
/// Extents that are written in turn: each has left the log when it is its turn again.
const COLD_EXTENTS: u64 = 128;
/// Extents that stay in the log.
const HOT_EXTENTS: u64 = 16;
/// Blocks of a file that durable writes go to in turn, as in the log.
const LOG_BLOCKS: u64 = 8;

/// Medians, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct ExtentRow {
    /// What was measured.
    pub path: String,
    /// One durable write of 4 KiB to a file, which costs what a transaction must.
    pub durable_us: f64,
    /// A write to an extent in the log.
    pub hot_us: f64,
    /// A write to one that is not, while the log is full.
    pub cold_us: f64,
    /// What the transaction adds: cold less hot.
    pub transaction_us: f64,
    /// That beside the durable write; less is better.
    pub ratio: f64,
}

/// Writes of a Primary with its disk and metadata in files. Its peer's are in memory, so that no
/// other transaction is measured.
pub fn extents(plan: &Plan, mut progress: impl FnMut(&str)) -> io::Result<Vec<ExtentRow>> {
    let directory = Scratch::new(&plan.directory)?;
    progress("cold extents, file disks (making the files)");
    let bytes = COLD_EXTENTS * BLOCKS_PER_EXTENT * BLOCK as u64;
    let mut shape = Shape::of(&Disks::Ram, 2, 0, bytes);
    shape.disks[0] = Some(Disks::Files(directory.path.clone()));
    shape.al_extents = AL_EXTENTS;
    let nodes = Nodes::new(&shape)?;
    let log = directory.path.join("log");
    raw::prepare(&log, LOG_BLOCKS * BLOCK as u64)?;
    progress("cold extents, file disks");
    let (mut durable, mut hot, mut cold) = (Vec::new(), Vec::new(), Vec::new());
    let warm = Places::Within(HOT_EXTENTS * BLOCKS_PER_EXTENT);
    for _ in 0..plan.rounds {
        durable.push(durable_writes(&log, plan.time)?);
        // What was cold before becomes hot.
        nodes.measure_writes(Places::Extents(HOT_EXTENTS), plan.time / 10)?;
        hot.push(nodes.measure_writes(warm, plan.time)?);
        cold.push(nodes.measure_writes(Places::Extents(COLD_EXTENTS), plan.time)?);
    }
    let [durable, hot, cold] = [durable, hot, cold].map(|all| Figure::median(all).p50_us);
    let transaction = cold - hot;
    Ok(vec![ExtentRow {
        path: "cold extent, file disks".to_owned(),
        durable_us: durable,
        hot_us: hot,
        cold_us: cold,
        transaction_us: transaction,
        ratio: transaction / durable,
    }])
}

/// The figures as a table.
pub fn extents_table(rows: &[ExtentRow]) -> String {
    let mut text = format!(
        "{:<26} {:>13} {:>8} {:>8} {:>12} {:>6}\n",
        "p50 us", "durable write", "hot", "cold", "transaction", "ratio"
    );
    for row in rows {
        text.push_str(&format!(
            "{:<26} {:>13.0} {:>8.0} {:>8.0} {:>12.0} {:>6.2}\n",
            row.path, row.durable_us, row.hot_us, row.cold_us, row.transaction_us, row.ratio
        ));
    }
    text
}

/// Durable writes of one block each, one after the other.
fn durable_writes(path: &std::path::Path, time: Duration) -> io::Result<Figure> {
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_DIRECT | libc::O_DSYNC)
        .open(path)?;
    let mut block = Aligned::new(1);
    let pointer = block.pointer(0);
    let (begin, cpu) = (Instant::now(), process_cpu());
    let mut latencies = Latencies::with_capacity(1 << 16);
    for number in 0.. {
        if begin.elapsed() >= time {
            break;
        }
        let at = number % LOG_BLOCKS * BLOCK as u64;
        let started = Instant::now();
        // SAFETY: `pointer` leads to one block that lives until the end of this function.
        let done =
            unsafe { libc::pwrite(file.as_raw_fd(), pointer.cast(), BLOCK, at as libc::off_t) };
        if done != BLOCK as isize {
            return Err(io::Error::last_os_error());
        }
        latencies.add(started.elapsed());
    }
    let cpu = process_cpu().saturating_sub(cpu);
    Ok(Figure::new(latencies, begin.elapsed(), cpu))
}
