//! Measurements of clusters: read balancing, clients, replicas, resync, promotion.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use lockstep_core::command::Command;
use lockstep_core::options::{PeerDeviceOptions, ReadBalancing};
use lockstep_core::state::DiskState;
use lockstep_format::units::NodeId;
use serde::Serialize;

use crate::engine::{Disks, Nodes, Shape, VOLUME, fill_ram, ram_is_equal};
use crate::raw::{self, Aligned, BLOCK, Direction};
use crate::run::{Plan, Scratch, row};
use crate::stats::{Figure, Latencies, Row};

/// Operations in flight where a disk's queue matters.
const DEEP: usize = 32;
/// Bytes of one transfer of a sequential measurement.
const CHUNK_BYTES: usize = 1 << 20;
/// Sequential transfers in flight.
const STREAMS: u64 = 4;

/// Random reads through two nodes by each policy, the local disk throttled to half of its
/// throughput.
pub fn read_balancing(plan: &Plan, mut progress: impl FnMut(&str)) -> io::Result<Vec<Row>> {
    let directory = Scratch::new(&plan.directory)?;
    progress("two nodes, file disks (making the files)");
    let mut shape = Shape::of(&Disks::Files(directory.path.clone()), 2, 0, plan.file_bytes);
    shape.paced = true;
    let nodes = Nodes::new(&shape)?;
    let mut rows = Vec::new();
    let mut measure = |name: &str, base: Option<Figure>, policy| -> io::Result<Figure> {
        progress(name);
        nodes.read_balancing(0, policy)?;
        let mut figures = Vec::new();
        for _ in 0..plan.rounds {
            figures.push(nodes.measure(Direction::Read, DEEP, plan.time)?);
        }
        let figure = Figure::median(figures);
        let raw = base.map_or(0.0, |base: Figure| base.iops);
        rows.push(row(name, DEEP, 0.0, raw, "prefer-local, throttled", figure));
        Ok(figure)
    };
    let free = measure(
        "read, disk as it is, prefer-local",
        None,
        ReadBalancing::PreferLocal,
    )?;
    nodes.slow_reads(0, NonZeroU32::new((free.iops / 2.0) as u32));
    let base = measure(
        "read, disk at half, prefer-local",
        None,
        ReadBalancing::PreferLocal,
    )?;
    for (name, policy) in [
        ("prefer-remote", ReadBalancing::PreferRemote),
        ("round-robin", ReadBalancing::RoundRobin),
        ("least-pending", ReadBalancing::LeastPending),
        ("when-congested-remote", ReadBalancing::WhenCongestedRemote),
        ("32K-striping", ReadBalancing::Striping(15)),
        ("64K-striping", ReadBalancing::Striping(16)),
        ("128K-striping", ReadBalancing::Striping(17)),
        ("256K-striping", ReadBalancing::Striping(18)),
        ("512K-striping", ReadBalancing::Striping(19)),
        ("1M-striping", ReadBalancing::Striping(20)),
    ] {
        let name = format!("read, disk at half, {name}");
        measure(&name, Some(base), policy)?;
    }
    Ok(rows)
}

/// Figures by direction and depth: a client with two storage nodes beside one of these, or three
/// replicas beside two.
struct Beside {
    direction: Direction,
    qd: usize,
    base: Vec<Figure>,
    ours: Vec<Figure>,
}

impl Beside {
    fn all(directions: &[Direction]) -> Vec<Beside> {
        let mut all = Vec::new();
        for qd in [1, DEEP] {
            for direction in directions {
                all.push(Beside {
                    direction: *direction,
                    qd,
                    base: Vec::new(),
                    ours: Vec::new(),
                });
            }
        }
        all
    }

    fn rows(all: Vec<Beside>, name: &str, against: &str) -> Vec<Row> {
        let row = |beside: Beside| {
            let what = match beside.direction {
                Direction::Read => "read",
                Direction::Write => "write",
            };
            row(
                &format!("{name} {what}, RAM disks"),
                beside.qd,
                0.0,
                Figure::median(beside.base).iops,
                against,
                Figure::median(beside.ours),
            )
        };
        all.into_iter().map(row).collect()
    }
}

/// A client without a disk beside a storage node of the same cluster.
pub fn client(plan: &Plan, mut progress: impl FnMut(&str)) -> io::Result<Vec<Row>> {
    progress("two storage nodes and a client, RAM disks");
    let nodes = Nodes::new(&Shape::of(&Disks::Ram, 2, 1, plan.ram_bytes))?;
    let mut all = Beside::all(&[Direction::Write, Direction::Read]);
    for _ in 0..plan.rounds {
        for beside in &mut all {
            let (direction, qd) = (beside.direction, beside.qd);
            let base = nodes.measure(direction, qd, plan.time)?;
            nodes.demote(0)?;
            nodes.promote(2)?;
            let ours = nodes.measure_at(2, direction, qd, plan.time)?;
            nodes.demote(2)?;
            nodes.promote(0)?;
            beside.base.push(base);
            beside.ours.push(ours);
        }
    }
    Ok(Beside::rows(all, "client", "storage node"))
}

/// Three replicas beside two.
pub fn replicas(plan: &Plan, mut progress: impl FnMut(&str)) -> io::Result<Vec<Row>> {
    progress("two and three replicas, RAM disks");
    let two = Nodes::pair(&Disks::Ram, plan.ram_bytes)?;
    let three = Nodes::new(&Shape::of(&Disks::Ram, 3, 0, plan.ram_bytes))?;
    let mut all = Beside::all(&[Direction::Write]);
    for _ in 0..plan.rounds {
        for beside in &mut all {
            let (direction, qd) = (beside.direction, beside.qd);
            beside.base.push(two.measure(direction, qd, plan.time)?);
            beside.ours.push(three.measure(direction, qd, plan.time)?);
        }
    }
    Ok(Beside::rows(all, "three replicas", "two replicas"))
}

/// One line of the resync's figures, in MiB/s.
#[derive(Clone, Debug, Serialize)]
pub struct ResyncRow {
    /// What was measured.
    pub path: String,
    /// Bytes that were copied.
    pub bytes: u64,
    /// The source's disk, read in order.
    pub disk_read_mib_s: f64,
    /// The target's disk, written in order.
    pub disk_write_mib_s: f64,
    /// One read while the other is written: both are on the same device here.
    pub disk_copy_mib_s: f64,
    /// One TCP connection on loopback.
    pub link_mib_s: f64,
    /// The full resync.
    pub resync_mib_s: f64,
    /// The resync by the slowest of the four.
    pub ratio: f64,
}

/// A full resync beside what disks and link can do.
pub fn resync(plan: &Plan, mut progress: impl FnMut(&str)) -> io::Result<Vec<ResyncRow>> {
    let directory = Scratch::new(&plan.directory)?;
    let mut rows = Vec::new();
    for (name, disks, bytes) in [
        ("resync, RAM disks", Disks::Ram, plan.ram_bytes),
        (
            "resync, file disks",
            Disks::Files(directory.path.clone()),
            plan.file_bytes,
        ),
    ] {
        progress(name);
        let nodes = Nodes::pair(&disks, bytes)?;
        for node in 0..2u8 {
            // As fast as it goes; by default a resync leaves room for the application.
            nodes.run(
                usize::from(node),
                Command::PeerDeviceOptions {
                    peer: NodeId(1 - node),
                    volume: VOLUME,
                    options: PeerDeviceOptions {
                        c_plan_ahead_tenths: 0,
                        resync_rate_kib_s: 4 << 20,
                        c_max_rate_kib_s: 4 << 20,
                        ..PeerDeviceOptions::default()
                    },
                },
            )?;
        }
        let files = match &disks {
            Disks::Ram => None,
            Disks::Files(_) => {
                let [from, to] = ["raw", "raw-copy"].map(|name| directory.path.join(name));
                Some((raw::prepare(&from, bytes)?, raw::prepare(&to, bytes)?))
            }
        };
        let (mut reads, mut writes, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        let (mut links, mut resyncs) = (Vec::new(), Vec::new());
        for round in 0..plan.rounds {
            if let Some((from, to)) = &files {
                reads.push(sequential(bytes, &[(from, Direction::Read)])?);
                writes.push(sequential(bytes, &[(to, Direction::Write)])?);
                let both = [(from, Direction::Read), (to, Direction::Write)];
                copies.push(sequential(bytes, &both)?);
            }
            links.push(link(bytes)?);
            if let (Disks::Ram, Some(to)) = (&disks, nodes.data_path(1)) {
                fill_ram(to, 2 + (round % 8) as u8)?;
            }
            let begin = Instant::now();
            nodes.run(
                1,
                Command::Invalidate {
                    volume: VOLUME,
                    from: None,
                    reset_bitmap: true,
                },
            )?;
            nodes.wait_for(1, "resynced", |snapshot| {
                let mut devices = snapshot.devices.iter();
                devices.all(|device| device.disk_state == DiskState::UpToDate)
            })?;
            resyncs.push(mib_s(bytes, begin.elapsed()));
            nodes.until_in_sync()?;
            if let (Disks::Ram, Some(from), Some(to)) =
                (&disks, nodes.data_path(0), nodes.data_path(1))
                && !ram_is_equal(from, to)?
            {
                return Err(io::Error::other("the disks differ after a resync"));
            }
        }
        let (read, write, copy) = (median(reads), median(writes), median(copies));
        let (link, resync) = (median(links), median(resyncs));
        let limits = [read, write, copy, link];
        let limits = limits.into_iter().filter(|rate| *rate > 0.0);
        rows.push(ResyncRow {
            path: name.to_owned(),
            bytes,
            disk_read_mib_s: read,
            disk_write_mib_s: write,
            disk_copy_mib_s: copy,
            link_mib_s: link,
            resync_mib_s: resync,
            ratio: resync / limits.fold(f64::INFINITY, f64::min),
        });
    }
    Ok(rows)
}

/// The resync's figures as a table.
pub fn resync_table(rows: &[ResyncRow]) -> String {
    let mut text = format!(
        "{:<22} {:>8} {:>11} {:>12} {:>10} {:>10} {:>13} {:>6}\n",
        "MiB/s", "MiB", "disk read", "disk write", "both", "link", "resync", "ratio"
    );
    for row in rows {
        text.push_str(&format!(
            "{:<22} {:>8} {:>11.0} {:>12.0} {:>10.0} {:>10.0} {:>13.0} {:>6.2}\n",
            row.path,
            row.bytes >> 20,
            row.disk_read_mib_s,
            row.disk_write_mib_s,
            row.disk_copy_mib_s,
            row.link_mib_s,
            row.resync_mib_s,
            row.ratio
        ));
    }
    text
}

/// How long a state change takes, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct ChangeRow {
    /// What was measured.
    pub path: String,
    /// How often.
    pub count: usize,
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// Promotions and demotions of each node of a cluster of three in turn, agreed on by all of them.
pub fn promote(plan: &Plan, mut progress: impl FnMut(&str)) -> io::Result<Vec<ChangeRow>> {
    progress("three nodes, RAM disks");
    let nodes = Nodes::new(&Shape::of(&Disks::Ram, 3, 0, 32 << 20))?;
    let (mut up, mut down) = (Latencies::default(), Latencies::default());
    down.add(nodes.demote(0)?);
    for count in 0..100 * plan.rounds {
        let node = count % 3;
        up.add(nodes.promote(node)?);
        down.add(nodes.demote(node)?);
    }
    let row = |path: &str, mut latencies: Latencies| ChangeRow {
        path: path.to_owned(),
        count: latencies.len(),
        p50_us: latencies.percentile_us(500),
        p99_us: latencies.percentile_us(990),
        max_us: latencies.percentile_us(1000),
    };
    Ok(vec![
        row("primary, three nodes", up),
        row("secondary, three nodes", down),
    ])
}

/// State changes as a table.
pub fn change_table(rows: &[ChangeRow]) -> String {
    let mut text = format!(
        "{:<24} {:>7} {:>10} {:>10} {:>10}\n",
        "state change", "count", "p50 us", "p99 us", "max us"
    );
    for row in rows {
        text.push_str(&format!(
            "{:<24} {:>7} {:>10.0} {:>10.0} {:>10.0}\n",
            row.path, row.count, row.p50_us, row.p99_us, row.max_us
        ));
    }
    text
}

fn mib_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / f64::from(1 << 20) / time.as_secs_f64()
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
}

/// MiB/s of files in order, past the kernel's cache, all of them at the same time.
fn sequential(bytes: u64, files: &[(&File, Direction)]) -> io::Result<f64> {
    let chunks = bytes / CHUNK_BYTES as u64;
    let begin = Instant::now();
    std::thread::scope(|scope| -> io::Result<()> {
        let mut threads = Vec::new();
        for (file, direction) in files {
            for stream in 0..STREAMS {
                threads.push(scope.spawn(move || transfer(file, stream, chunks, *direction)));
            }
        }
        for thread in threads {
            thread
                .join()
                .map_err(|_| io::Error::other("a thread panicked"))??;
        }
        for (file, direction) in files {
            if *direction == Direction::Write {
                file.sync_data()?;
            }
        }
        Ok(())
    })?;
    Ok(mib_s(chunks * CHUNK_BYTES as u64, begin.elapsed()))
}

/// Every fourth chunk of a file.
fn transfer(file: &File, stream: u64, chunks: u64, direction: Direction) -> io::Result<()> {
    let mut memory = Aligned::new(CHUNK_BYTES / BLOCK);
    let pointer = memory.pointer(0);
    let fd = file.as_raw_fd();
    for chunk in (stream..chunks).step_by(STREAMS as usize) {
        let at = (chunk * CHUNK_BYTES as u64) as libc::off_t;
        // SAFETY: `pointer` leads to CHUNK_BYTES bytes of `memory`, which lives until the end of
        // this function, and the calls are synchronous.
        let done = unsafe {
            match direction {
                Direction::Read => libc::pread(fd, pointer.cast(), CHUNK_BYTES, at),
                Direction::Write => libc::pwrite(fd, pointer.cast(), CHUNK_BYTES, at),
            }
        };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        if done as usize != CHUNK_BYTES {
            return Err(io::Error::other("a transfer ended short"));
        }
    }
    Ok(())
}

/// MiB/s of one TCP connection on loopback.
fn link(bytes: u64) -> io::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiver, _) = listener.accept()?;
    let begin = Instant::now();
    std::thread::scope(|scope| -> io::Result<()> {
        let sent = scope.spawn(move || -> io::Result<()> {
            let chunk = vec![0x5a; CHUNK_BYTES];
            for _ in 0..bytes / CHUNK_BYTES as u64 {
                sender.write_all(&chunk)?;
            }
            Ok(())
        });
        let mut chunk = vec![0; CHUNK_BYTES];
        while receiver.read(&mut chunk)? > 0 {}
        sent.join()
            .map_err(|_| io::Error::other("a thread panicked"))?
    })?;
    Ok(mib_s(bytes, begin.elapsed()))
}
