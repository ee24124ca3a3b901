//! Thousands of idle resources in one daemon: what they cost.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lockstep_core::state::ConnState;
use lockstep_daemon::client::{Client, ClientError};
use lockstep_daemon::place::Place;
use lockstep_daemon::protocol::{Reply, Request};
use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::al::encode_initialised;
use lockstep_format::disk::layout::{Geometry, Layout, Placement};
use lockstep_format::disk::v09::SuperBlock;
use lockstep_format::units::NodeId;
use serde::Serialize;

use crate::run::Scratch;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Resources of the node.
    pub resources: u32,
    /// How long the idle node is watched.
    pub idle: Duration,
    /// Where the files go.
    pub directory: PathBuf,
}

/// What one node costs.
#[derive(Clone, Debug, Serialize)]
pub struct ScaleRow {
    /// What was measured.
    pub path: String,
    /// Resources, each with one volume on a file.
    pub resources: u32,
    /// From the daemon's start until every resource is attached (and connected).
    pub start_s: f64,
    /// Resident memory of the daemon.
    pub memory_mib: f64,
    /// Its threads.
    pub threads: u64,
    /// Its open files.
    pub files: u64,
    /// Processor time that it uses while nothing happens, in percent of one core.
    pub idle_cpu_percent: f64,
    /// A report of all resources.
    pub status_ms: f64,
    /// From SIGTERM to its end.
    pub stop_s: f64,
}

const DISK_BYTES: u64 = 4 << 20;
/// Files that a daemon has open besides.
const OTHER_FILES: u64 = 100;
/// Below the ports that clients get.
const FIRST_PORT: u32 = 10_000;
const ADDRESSES: [&str; 2] = ["127.0.0.1", "127.0.0.2"];
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// One node alone, then a node whose resources are all connected to a second one.
pub fn run(plan: &Plan, mut progress: impl FnMut(&str)) -> io::Result<Vec<ScaleRow>> {
    let scratch = Scratch::new(&plan.directory)?;
    let mut rows = Vec::new();
    for nodes in [1, 2] {
        let path = match nodes {
            1 => "idle, without a peer",
            _ => "idle, connected",
        };
        let resources = plan.resources.min(most_resources(nodes));
        if resources < plan.resources {
            progress(&format!(
                "{path}: this shell's limit of open files (ulimit -n) allows {resources} resources"
            ));
        }
        progress(&format!("{path}: making {resources} disks"));
        let directories: Vec<PathBuf> = (0..nodes)
            .map(|node| scratch.path.join(format!("{nodes}-{node}")))
            .collect();
        for (node, directory) in directories.iter().enumerate() {
            make_disks(directory, node, resources)?;
        }
        progress(&format!("{path}: starting"));
        let mut daemons = Vec::new();
        // The second one first, so that the first one is measured from its start until it is
        // connected.
        for (node, directory) in directories.iter().enumerate().rev() {
            let begin = Instant::now();
            let mut daemon = Daemon::start(directory)?;
            daemon.configure(node, nodes, resources)?;
            daemons.push((daemon, begin));
        }
        let Some((mut daemon, begin)) = daemons.pop() else {
            return Err(io::Error::other("there is one node at least"));
        };
        let status = daemon.wait_until_settled(nodes - 1, resources)?;
        let start = begin.elapsed();
        progress(&format!("{path}: idle"));
        // What the start has left to do is not idleness.
        std::thread::sleep(Duration::from_secs(2));
        let cpu = daemon.cpu()?;
        let from = Instant::now();
        std::thread::sleep(plan.idle);
        let idle_cpu = (daemon.cpu()? - cpu) / from.elapsed().as_secs_f64() * 100.0;
        let mut row = ScaleRow {
            path: path.to_owned(),
            resources,
            start_s: start.as_secs_f64(),
            memory_mib: daemon.status_number("VmRSS")? as f64 / 1024.0,
            threads: daemon.status_number("Threads")?,
            files: fs::read_dir(daemon.proc("fd"))?.count() as u64,
            idle_cpu_percent: idle_cpu,
            status_ms: status.as_secs_f64() * 1000.0,
            stop_s: 0.0,
        };
        progress(&format!("{path}: stopping"));
        let begin = Instant::now();
        daemon.stop()?;
        row.stop_s = begin.elapsed().as_secs_f64();
        for (mut other, _) in daemons {
            other.stop()?;
        }
        rows.push(row);
    }
    Ok(rows)
}

/// How many resources a daemon may have with so many nodes: each has a disk, and two streams to a
/// peer.
fn most_resources(nodes: usize) -> u32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let files = limit
        .maximum
        .unwrap_or(u64::MAX)
        .saturating_sub(OTHER_FILES);
    let each = 1 + 2 * (nodes as u64 - 1);
    u32::try_from(files / each).unwrap_or(u32::MAX)
}

/// The rows as a table.
pub fn table(rows: &[ScaleRow]) -> String {
    let mut text = format!(
        "{:<22} {:>9} {:>8} {:>8} {:>8} {:>8} {:>10} {:>10} {:>7}\n",
        "", "resources", "start s", "MiB", "threads", "files", "idle cpu %", "status ms", "stop s"
    );
    for row in rows {
        text.push_str(&format!(
            "{:<22} {:>9} {:>8.1} {:>8.0} {:>8} {:>8} {:>10.1} {:>10.0} {:>7.1}\n",
            row.path,
            row.resources,
            row.start_s,
            row.memory_mib,
            row.threads,
            row.files,
            row.idle_cpu_percent,
            row.status_ms,
            row.stop_s
        ));
    }
    text
}

fn disk(directory: &Path, resource: u32) -> PathBuf {
    directory.join("disks").join(resource.to_string())
}

/// Sparse files with fresh internal metadata.
fn make_disks(directory: &Path, node: usize, resources: u32) -> io::Result<()> {
    fs::create_dir_all(directory.join("disks"))?;
    let layout = Layout::new(Placement::Internal, Geometry::for_peers(1), DISK_BYTES)
        .map_err(|error| io::Error::other(error.to_string()))?;
    let mut superblock = SuperBlock::fresh(&layout);
    superblock.node_id = Some(NodeId(node as u8));
    let mut first = [0u8; BLOCK_BYTES];
    superblock.encode(&mut first);
    let mut log = [0u8; BLOCK_BYTES];
    encode_initialised(&mut log);
    for resource in 0..resources {
        let file = File::create(disk(directory, resource))?;
        file.set_len(DISK_BYTES)?;
        file.write_all_at(&first, layout.superblock_byte())?;
        for block in 0..8u64 {
            file.write_all_at(&log, layout.al_byte() + block * BLOCK_BYTES as u64)?;
        }
    }
    Ok(())
}

/// A daemon and a conversation with it.
struct Daemon {
    child: Child,
    client: Client,
    directory: PathBuf,
}

fn failed(error: ClientError) -> io::Error {
    io::Error::other(format!("{error}"))
}

impl Daemon {
    fn start(directory: &Path) -> io::Result<Daemon> {
        let log = File::create(directory.join("log"))?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["lockstepd", "--no-device", "--dir"])
            .arg(directory)
            .env("LOCKSTEP_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let place = Place::find(Some(directory));
        let begin = Instant::now();
        let client = loop {
            match Client::connect(&place) {
                Ok(client) => break client,
                Err(ClientError::NotRunning { .. }) if child.try_wait()?.is_none() => {}
                Err(error) => return Err(failed(error)),
            }
            if begin.elapsed() > PATIENCE {
                child.kill()?;
                return Err(io::Error::other("the daemon does not answer"));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Ok(Daemon {
            child,
            client,
            directory: directory.to_owned(),
        })
    }

    fn call(&mut self, request: &Request) -> io::Result<Reply> {
        match self.client.call(request).map_err(failed)? {
            Reply::Failed { text, .. } => Err(io::Error::other(text)),
            reply => Ok(reply),
        }
    }

    fn configure(&mut self, node: usize, nodes: usize, resources: u32) -> io::Result<()> {
        for number in 0..resources {
            let resource = format!("r{number}");
            self.call(&Request::NewResource {
                resource: resource.clone(),
                node_id: node as u32,
                options: Default::default(),
            })?;
            self.call(&Request::NewMinor {
                resource: resource.clone(),
                minor: number,
                volume: 0,
                options: Default::default(),
            })?;
            let path = disk(&self.directory, number).display().to_string();
            if nodes == 2 {
                let peer = 1 - node as u32;
                self.call(&Request::NewPeer {
                    resource: resource.clone(),
                    peer,
                    options: [("_name".to_owned(), format!("node{peer}"))].into(),
                })?;
                let port = FIRST_PORT + number;
                let address = |node: usize| format!("ipv4:{}:{port}", ADDRESSES[node]);
                self.call(&Request::NewPath {
                    resource: resource.clone(),
                    peer,
                    local: address(node),
                    remote: address(1 - node),
                })?;
            }
            self.call(&Request::Attach {
                minor: number,
                data_path: path.clone(),
                meta_path: path,
                meta_index: "internal".to_owned(),
                options: Default::default(),
            })?;
            if nodes == 2 {
                self.call(&Request::Connect {
                    resource,
                    peer: 1 - node as u32,
                    discard_my_data: false,
                    tentative: false,
                })?;
            }
        }
        Ok(())
    }

    /// Waits until everything is attached and connected; how long a report of everything takes.
    fn wait_until_settled(&mut self, peers: usize, resources: u32) -> io::Result<Duration> {
        let begin = Instant::now();
        loop {
            let asked = Instant::now();
            let Reply::Report { resources: all } =
                self.call(&Request::Report { resource: None })?
            else {
                return Err(io::Error::other("no report"));
            };
            let took = asked.elapsed();
            let settled = all.iter().filter(|resource| {
                resource.connections.len() == peers
                    && resource
                        .connections
                        .iter()
                        .all(|c| c.state == ConnState::Connected)
            });
            if settled.count() == resources as usize {
                return Ok(took);
            }
            if begin.elapsed() > PATIENCE {
                return Err(io::Error::other("the resources do not connect"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.child.id()))
    }

    /// A number of `/proc/PID/status`.
    fn status_number(&self, name: &str) -> io::Result<u64> {
        let text = fs::read_to_string(self.proc("status"))?;
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.ok_or_else(|| io::Error::other(format!("no {name} in /proc")))
    }

    /// Processor time of its threads so far, in seconds.
    fn cpu(&self) -> io::Result<f64> {
        let mut nanoseconds = 0;
        for task in fs::read_dir(self.proc("task"))? {
            let text = fs::read_to_string(task?.path().join("schedstat"))?;
            let first = text.split_whitespace().next();
            nanoseconds += first.and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(nanoseconds as f64 / 1e9)
    }

    fn stop(&mut self) -> io::Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let status = self.child.wait()?;
        match status.success() {
            true => Ok(()),
            false => Err(io::Error::other(format!("the daemon ended with {status}"))),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It has ended if everything went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
