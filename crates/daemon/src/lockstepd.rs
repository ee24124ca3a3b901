//! The daemon's life: lock, sockets, signals, orderly end.

use std::fs::File;
use std::io::{Seek, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use lockstep_front::nbd::{
    ExportDescription, ExportRefusal, Exports, Listen, NbdLimits, NbdServer,
};
use lockstep_io::disk::runs;
use lockstep_io::port::{PortSink, VolumePort};
use rustix::fs::FlockOperation;
use rustix::mm::MlockAllFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::devices::Silent;
use crate::metrics;
use crate::node::{Left, Node, NodeConfig};
use crate::notify::Manager;
use crate::place::Place;
use crate::server;

/// How the daemon is started.
#[derive(Clone, Debug)]
pub struct DaemonConfig {
    /// The node's directory.
    pub place: Place,
    /// Become a session of its own: started in the background by a tool.
    pub new_session: bool,
    /// Shards, memory, devices.
    pub node: NodeConfig,
    /// Where metrics are given out; nowhere if not said.
    pub metrics: Option<SocketAddr>,
    /// TCP addresses that serve every volume by NBD, to whoever reaches them.
    pub nbd: Vec<SocketAddr>,
}

/// Runs the daemon until SIGTERM, SIGINT or a client's `stop`.
pub fn run(config: &DaemonConfig) -> anyhow::Result<()> {
    if config.new_session {
        // It fails only for a leader of a group, which is apart from its starter already.
        let _ = rustix::process::setsid();
    }
    let place = &config.place;
    make_dir(place.dir())?;
    let _lock = take_lock(place)?;
    allow_files();
    lock_memory();
    serve_write_back();
    let (stop, stopped) = sync_channel(1);
    let mut signals = signal_hook::iterator::Signals::new([
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGINT,
    ])
    .context("taking signals")?;
    let node = Node::start(place, &config.node).context("starting the node")?;
    let mut listen = vec![Listen::Unix(place.nbd_socket())];
    listen.extend(config.nbd.iter().copied().map(Listen::Tcp));
    let nbd = NbdServer::start(
        Arc::new(Volumes(node.clone())),
        &listen,
        NbdLimits::default(),
    )
    .context("starting the NBD server")?;
    for address in nbd.addresses() {
        if let Listen::Tcp(address) = address {
            tracing::warn!(
                %address,
                "NBD has neither authentication nor encryption: whoever reaches this address reads \
                 and writes every volume"
            );
        }
    }
    if let Some(address) = config.metrics {
        metrics::start(address, node.clone())
            .with_context(|| format!("listening on {address} for metrics"))?;
    }
    let path = place.control_socket();
    let (listener, owner) =
        server::listen(&path).with_context(|| format!("listening on {}", path.display()))?;
    let (served, by_client) = (node.clone(), stop.clone());
    std::thread::Builder::new()
        .name("accept".into())
        .spawn(move || server::serve(&listener, &served, &by_client))
        .context("starting a thread")?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in &mut signals {
                tracing::info!(signal, "asked to end");
                // Full means that the end has begun.
                let _ = stop.try_send(());
            }
        })
        .context("starting a thread")?;
    tracing::info!(dir = %place.dir().display(), pid = std::process::id(), "lockstepd is ready");
    if let Some(manager) = Manager::of_environment() {
        manager.say("READY=1");
        manager
            .watch(Arc::downgrade(&node))
            .context("starting a thread")?;
    }
    stopped.recv().context("waiting for the end")?;
    if let Some(manager) = Manager::of_environment() {
        manager.say("STOPPING=1");
    }
    nbd.stop();
    let left = node.stop();
    if owner == server::Owner::Daemon {
        // Who comes now finds that nobody listens.
        let _ = std::fs::remove_file(&path);
    }
    match left {
        Left::Nothing => tracing::info!("lockstepd has ended in order"),
        Left::Devices => {
            tracing::info!("lockstepd has ended in order");
            // As if it were killed: no thread may say anything more about I/O that waits.
            std::process::exit(0);
        }
        Left::Resources => std::process::exit(1),
    }
    Ok(())
}

fn make_dir(dir: &Path) -> anyhow::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .with_context(|| format!("making the directory {}", dir.display()))
}

/// One daemon per directory: an advisory lock that ends with the process, however it ends.
fn take_lock(place: &Place) -> anyhow::Result<File> {
    let path = place.pid_file();
    let mut file = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("protecting {}", path.display()))?;
    let begin = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let pid = std::fs::read_to_string(&path).unwrap_or_default();
                // A child that a killed daemon was starting has its lock until it is a program of
                // its own.
                if !runs(pid.trim()) && begin.elapsed() < LOCK_PATIENCE {
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
                bail!(
                    "another lockstepd (pid {}) runs in {}; stop it with SIGTERM, or choose \
                     another directory with --dir",
                    pid.trim(),
                    place.dir().display()
                );
            }
            Err(error) => bail!("locking {}: {error}", path.display()),
        }
    }
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(file)
}

/// How long a dead daemon's children may keep its lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// A volume needs a file, and each connection two; with devices more. A shell's limit would do for
/// some hundreds.
fn allow_files() {
    let before = getrlimit(Resource::Nofile);
    let wish = Rlimit {
        current: Some(before.current.map_or(FILES, |files| files.max(FILES))),
        maximum: before.maximum.map(|files| files.max(FILES)),
    };
    // More than the hard limit needs CAP_SYS_RESOURCE.
    let most = Rlimit {
        current: before.maximum,
        maximum: before.maximum,
    };
    if before.current.is_some()
        && setrlimit(Resource::Nofile, wish).is_err()
        && let Err(error) = setrlimit(Resource::Nofile, most)
    {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// Open files that are enough for some 16,000 resources with several peers and devices.
const FILES: u64 = 1 << 20;

/// The daemon may be what write-back waits for, so its memory must not be.
fn lock_memory() {
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = rustix::mm::mlockall(flags) {
        tracing::warn!(
            %error,
            "memory is not locked (root or a larger RLIMIT_MEMLOCK is needed); under memory \
             pressure the machine may wait for itself"
        );
    }
}

/// Tells the kernel that this process serves block devices: its own allocations then never wait for
/// write-back, which may be what it has to serve. Threads inherit it, so it comes before all others.
fn serve_write_back() {
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::info!(
            %error,
            "the kernel does not know this process as a server of block devices (that needs \
             CAP_SYS_RESOURCE); under memory pressure its allocations may wait for its own devices"
        );
    }
}

/// The node's volumes as NBD exports.
struct Volumes(Arc<Node>);

impl Volumes {
    fn port(
        &self,
        name: &str,
        sink: Box<dyn PortSink>,
    ) -> Result<Box<dyn VolumePort + Send>, ExportRefusal> {
        let unknown =
            || ExportRefusal::Unknown(format!("no volume is named '{name}' (RESOURCE/VOLUME)"));
        let (resource, volume) = name.rsplit_once('/').ok_or_else(unknown)?;
        let volume = volume.parse().map_err(|_| unknown())?;
        self.0.open_port(resource, volume, sink).ok_or_else(unknown)
    }
}

impl Exports for Volumes {
    fn names(&self) -> Vec<String> {
        let reports = self.0.board().reports();
        reports
            .iter()
            .flat_map(|r| r.devices.iter().map(|d| format!("{}/{}", r.name, d.volume)))
            .collect()
    }

    fn describe(&self, name: &str) -> Result<ExportDescription, ExportRefusal> {
        let port = self.port(name, Box::new(Silent))?;
        Ok(ExportDescription {
            properties: port.properties(),
            text: format!("replicated volume {name}"),
        })
    }

    fn connect(
        &self,
        name: &str,
        sink: Box<dyn PortSink>,
    ) -> Result<Box<dyn VolumePort + Send>, ExportRefusal> {
        self.port(name, sink)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A locked file that names the process.
    fn locked(place: &Place, pid: u32) -> File {
        let mut file = File::create(place.pid_file()).unwrap();
        writeln!(file, "{pid}").unwrap();
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        file
    }

    #[test]
    fn the_lock_of_a_dead_daemons_child_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::find(Some(dir.path()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let file = locked(&place, child.id());
        // Dead, and its parent has not asked yet: a zombie.
        while runs(&child.id().to_string()) {
            std::thread::yield_now();
        }
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| take_lock(&place));
            assert!(!taken.is_finished());
            drop(file);
            taken.join().unwrap().expect("the lock is free");
        });
        child.wait().unwrap();
        let pid = std::fs::read_to_string(place.pid_file()).unwrap();
        assert_eq!(pid.trim(), std::process::id().to_string());
    }

    #[test]
    fn a_second_daemon_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::find(Some(dir.path()));
        let _file = locked(&place, std::process::id());
        let begin = Instant::now();
        let error = take_lock(&place).expect_err("there is one").to_string();
        assert!(error.starts_with("another lockstepd (pid "), "{error}");
        assert!(begin.elapsed() < LOCK_PATIENCE, "it waits for nothing");
    }
}
