//! `lockstep bench`: every row measured in turns with what it is compared with, so that noise of
//! the machine hits both alike; the median of the rounds is shown.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::engine::{Disks, Nodes};
use crate::floor::{self, Store};
use crate::fronts::{Target, Volume, can_make_devices, has_qemu};
use crate::raw::{self, Direction};
use crate::stats::{Figure, Row};

/// What to measure and how long.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Rounds per row.
    pub rounds: usize,
    /// Time of one measurement.
    pub time: Duration,
    /// Bytes of each volume in files.
    pub file_bytes: u64,
    /// Bytes of each volume in memory.
    pub ram_bytes: u64,
    /// Where the files go.
    pub directory: PathBuf,
}

/// Runs everything; `progress` gets a line per row, and one for each that this machine cannot run.
pub fn run(plan: &Plan, mut progress: impl FnMut(&str)) -> io::Result<Vec<Row>> {
    let mut rows = Vec::new();
    let directory = Scratch::new(&plan.directory)?;
    progress("engine, RAM disks");
    let pair = Nodes::pair(&Disks::Ram, plan.ram_bytes)?;
    for qd in [1, 32] {
        rows.push(write_row(plan, &pair, "engine write, RAM disks", qd, None)?);
    }
    front_rows(plan, &pair, &directory.path, &mut rows, &mut progress)?;
    drop(pair);
    progress("engine, file disks (making the files)");
    let pair = Nodes::pair(&Disks::Files(directory.path.clone()), plan.file_bytes)?;
    for qd in [1, 32] {
        progress(&format!("engine, file disks, depth {qd}"));
        rows.push(write_row(
            plan,
            &pair,
            "engine write, file disks",
            qd,
            Some(&directory.path),
        )?);
        rows.push(read_row(plan, &pair, qd, &directory.path)?);
    }
    Ok(rows)
}

/// Each front end over the pair beside the floor, and alone beside its counterpart.
fn front_rows(
    plan: &Plan,
    pair: &Nodes,
    directory: &Path,
    rows: &mut Vec<Row>,
    progress: &mut impl FnMut(&str),
) -> io::Result<()> {
    let devices = can_make_devices();
    let qemu = has_qemu();
    if !devices {
        progress("no block device rows: they need root, /dev/fuse and /dev/loop-control");
    }
    if !qemu {
        progress("nothing to compare the front ends with: qemu-storage-daemon is not installed");
    }
    for front in [Front::Nbd, Front::Device] {
        if front == Front::Device && !devices {
            continue;
        }
        progress(&format!("{}, RAM disks, two nodes", front.name()));
        let mut ours = front.serve(&Volume::Pair(pair.opener()), directory)?;
        let bytes = plan.ram_bytes;
        let (mut local, mut remote) = (Store::ram(bytes as usize), Store::ram(bytes as usize));
        for qd in [1, 32] {
            let (mut floors, mut figures) = (Vec::new(), Vec::new());
            for _ in 0..plan.rounds {
                floors.push(floor::measure(
                    &mut local,
                    &mut remote,
                    bytes,
                    qd,
                    plan.time,
                )?);
                figures.push(ours.measure(Direction::Write, qd, plan.time)?);
            }
            let name = format!("{} write, RAM disks", front.name());
            let floor = Figure::median(floors);
            let figure = Figure::median(figures);
            rows.push(row(&name, qd, floor.iops, 0.0, "floor", figure));
        }
        drop(ours);
        progress(&format!("{} alone, volume in memory", front.name()));
        let volume = Volume::ram(plan.ram_bytes)?;
        let mut ours = front.serve(&volume, directory)?;
        let mut theirs = match qemu {
            true => Some(front.serve_by_qemu(plan.ram_bytes, directory)?),
            false => None,
        };
        for qd in [1, 32] {
            for (direction, what) in [(Direction::Write, "write"), (Direction::Read, "read")] {
                let (mut others, mut figures) = (Vec::new(), Vec::new());
                for _ in 0..plan.rounds {
                    if let Some(theirs) = &mut theirs {
                        others.push(theirs.measure(direction, qd, plan.time)?);
                    }
                    figures.push(ours.measure(direction, qd, plan.time)?);
                }
                let name = format!("{} {what}, front end alone", front.name());
                let other = Figure::median(others);
                let figure = Figure::median(figures);
                rows.push(row(
                    &name,
                    qd,
                    0.0,
                    other.iops,
                    "qemu-storage-daemon",
                    figure,
                ));
            }
        }
    }
    Ok(())
}

/// How the volume is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Front {
    /// NBD on a unix socket.
    Nbd,
    /// FUSE file and loop device.
    Device,
}

impl Front {
    fn name(self) -> &'static str {
        match self {
            Front::Nbd => "NBD",
            Front::Device => "FUSE+loop",
        }
    }

    fn serve(self, volume: &Volume, directory: &Path) -> io::Result<Target> {
        match self {
            Front::Nbd => Target::nbd(volume, directory),
            Front::Device => Target::device(volume),
        }
    }

    fn serve_by_qemu(self, bytes: u64, directory: &Path) -> io::Result<Target> {
        match self {
            Front::Nbd => Target::qemu_nbd(bytes, directory),
            Front::Device => Target::qemu_device(bytes, directory),
        }
    }
}

fn write_row(
    plan: &Plan,
    pair: &Nodes,
    name: &str,
    qd: usize,
    files: Option<&Path>,
) -> io::Result<Row> {
    let mut floors = Vec::new();
    let mut ours = Vec::new();
    let bytes = if files.is_some() {
        plan.file_bytes
    } else {
        plan.ram_bytes
    };
    let (mut local, mut remote) = match files {
        Some(directory) => (
            Store::File(raw::prepare(&directory.join("floor-a"), bytes)?),
            Store::File(raw::prepare(&directory.join("floor-b"), bytes)?),
        ),
        None => (Store::ram(bytes as usize), Store::ram(bytes as usize)),
    };
    for _ in 0..plan.rounds {
        floors.push(floor::measure(
            &mut local,
            &mut remote,
            bytes,
            qd,
            plan.time,
        )?);
        ours.push(pair.measure(Direction::Write, qd, plan.time)?);
    }
    let floor = Figure::median(floors);
    Ok(row(
        name,
        qd,
        floor.iops,
        0.0,
        "floor",
        Figure::median(ours),
    ))
}

fn read_row(plan: &Plan, pair: &Nodes, qd: usize, directory: &Path) -> io::Result<Row> {
    let file = raw::prepare(&directory.join("floor-a"), plan.file_bytes)?;
    let mut disks = Vec::new();
    let mut ours = Vec::new();
    for _ in 0..plan.rounds {
        disks.push(raw::measure(
            &file,
            plan.file_bytes,
            Direction::Read,
            qd,
            plan.time,
        )?);
        ours.push(pair.measure(Direction::Read, qd, plan.time)?);
    }
    let disk = Figure::median(disks);
    Ok(row(
        "local read, file disks",
        qd,
        0.0,
        disk.iops,
        "raw disk",
        Figure::median(ours),
    ))
}

pub(crate) fn row(path: &str, qd: usize, floor: f64, raw: f64, against: &str, ours: Figure) -> Row {
    let base = if floor > 0.0 { floor } else { raw };
    Row {
        path: path.to_string(),
        qd,
        floor_iops: floor,
        raw_iops: raw,
        iops: ours.iops,
        ratio: if base > 0.0 { ours.iops / base } else { 0.0 },
        against: against.to_string(),
        p50_us: ours.p50_us,
        p99_us: ours.p99_us,
        cpu_us_per_io: ours.cpu_us_per_io,
    }
}

/// A directory that goes with the measurement.
pub(crate) struct Scratch {
    pub(crate) path: PathBuf,
}

impl Scratch {
    pub(crate) fn new(parent: &Path) -> io::Result<Scratch> {
        let path = parent.join(format!("lockstep-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        // Daemons are told of it, and their working directory is another one.
        let path = path.canonicalize()?;
        Ok(Scratch { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is left in a directory that names its maker.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
