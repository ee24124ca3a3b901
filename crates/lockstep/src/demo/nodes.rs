//! The demo's three nodes: directories, configuration, daemons, tools.

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Workload;
use anyhow::{Context, bail, ensure};
use lockstep_daemon::client::Client;
use lockstep_daemon::place::Place;
use lockstep_daemon::protocol::{Reply, Request};
use lockstep_daemon::report::ResourceReport;

/// Names of the nodes.
pub(super) const NAMES: [&str; 3] = ["alfa", "bravo", "charlie"];
/// Name of the resource.
pub(super) const RESOURCE: &str = "demo";

/// All of it.
pub(super) struct Nodes {
    dir: PathBuf,
    nodes: Vec<Node>,
    interrupted: Arc<AtomicBool>,
}

struct Node {
    name: &'static str,
    dir: PathBuf,
    daemon: Option<Child>,
}

impl Nodes {
    /// Directories, programs by name, sparse disks and the configuration.
    pub(super) fn create(
        dir: &Path,
        disk_bytes: u64,
        interrupted: Arc<AtomicBool>,
    ) -> anyhow::Result<Nodes> {
        let bin = dir.join("bin");
        fs::create_dir_all(&bin).with_context(|| format!("making {}", bin.display()))?;
        let own = std::env::current_exe().context("finding this program")?;
        for name in ["drbdadm", "drbdsetup", "drbdmeta", "lockstepd"] {
            std::os::unix::fs::symlink(&own, bin.join(name)).context("linking the tools")?;
        }
        let mut nodes = Vec::new();
        for name in NAMES {
            let dir = dir.join(name);
            fs::create_dir_all(&dir)?;
            fs::File::create(dir.join("disk.img"))?.set_len(disk_bytes)?;
            nodes.push(Node {
                name,
                dir,
                daemon: None,
            });
        }
        let all = Nodes {
            dir: dir.to_owned(),
            nodes,
            interrupted,
        };
        let config = all.config()?;
        for node in &all.nodes {
            fs::write(node.dir.join("drbd.conf"), &config)?;
            fs::write(node.dir.join("node-name"), format!("{}\n", node.name))?;
        }
        Ok(all)
    }

    /// Three nodes on loopback addresses with ports that are free now.
    fn config(&self) -> anyhow::Result<String> {
        let mut out = format!(
            "resource {RESOURCE} {{\n    options {{ quorum majority; on-no-quorum io-error; }}\n    \
             net {{ protocol C; ping-timeout 10; }}\n    \
             disk {{ al-extents 67; c-max-rate 4G; c-fill-target 4M; }}\n    \
             device minor 0;\n    meta-disk internal;\n"
        );
        let mut held = Vec::new();
        for (id, node) in self.nodes.iter().enumerate() {
            // A listener tells its peers apart by address, so each node has one of its own.
            let address = format!("127.77.0.{}", id + 1);
            let listener =
                TcpListener::bind(format!("{address}:0")).context("finding a free port")?;
            let port = listener.local_addr()?.port();
            held.push(listener);
            out.push_str(&format!(
                "    on {} {{\n        node-id {id};\n        address ipv4 {address}:{port};\n        \
                 disk {};\n    }}\n",
                node.name,
                node.dir.join("disk.img").display()
            ));
        }
        out.push_str(&format!(
            "    connection-mesh {{ hosts {}; }}\n}}\n",
            NAMES.join(" ")
        ));
        Ok(out)
    }

    /// Starts a node's daemon and waits until it answers.
    pub(super) fn start(&mut self, index: usize, workload: Workload) -> anyhow::Result<()> {
        let bin = self.dir.join("bin/lockstepd");
        let node = &mut self.nodes[index];
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(node.dir.join("log"))?;
        let mut command = Command::new(bin);
        if workload == Workload::Blocks {
            command.arg("--no-device");
        }
        let child = command
            .args(["--pool-mib", "64", "--shards", "1", "--dir"])
            .arg(&node.dir)
            .env("__DRBD_NODE__", node.name)
            .env("LOCKSTEP_USERMODE_HELPER", "disabled")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C is for the demo, which ends the daemons in order.
            .process_group(0)
            .spawn()
            .context("starting lockstepd")?;
        node.daemon = Some(child);
        let place = Place::find(Some(&node.dir));
        let what = format!("lockstepd of {} to answer", node.name);
        self.wait_until(&what, 15, || {
            Ok(Client::connect(&place).is_ok().then_some(()))
        })
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self, index: usize) -> anyhow::Result<()> {
        if let Some(mut child) = self.nodes[index].daemon.take() {
            child.kill().context("killing lockstepd")?;
            child.wait().context("waiting for lockstepd's end")?;
        }
        Ok(())
    }

    /// The daemons go on when this program ends.
    pub(super) fn leave_all(&mut self) {
        for node in &mut self.nodes {
            node.daemon = None;
        }
    }

    /// SIGTERM to all, and SIGKILL to who does not end.
    pub(super) fn stop_all(&mut self) {
        for node in &mut self.nodes {
            if let Some(child) = &node.daemon
                && let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32)
            {
                // A daemon that has ended is collected below.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
        }
        let until = Instant::now() + Duration::from_secs(20);
        for node in &mut self.nodes {
            let Some(mut child) = node.daemon.take() else {
                continue;
            };
            while Instant::now() < until && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
            // Both fail only for a process that has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Runs `drbdadm` on a node.
    pub(super) fn drbdadm(&self, index: usize, args: &[&str]) -> anyhow::Result<()> {
        let node = &self.nodes[index];
        let bin = self.dir.join("bin");
        let path = format!(
            "{}:{}",
            bin.display(),
            std::env::var("PATH").unwrap_or_default()
        );
        let output = Command::new(bin.join("drbdadm"))
            .arg("-c")
            .arg(node.dir.join("drbd.conf"))
            .args(args)
            .env("LOCKSTEP_DIR", &node.dir)
            .env("LOCKSTEP_AUTOSTART", "no")
            .env("__DRBD_NODE__", node.name)
            .env("PATH", path)
            .stdin(Stdio::null())
            .output()
            .context("running drbdadm")?;
        ensure!(
            output.status.success(),
            "drbdadm {} on {}: {}\n{}",
            args.join(" "),
            node.name,
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }

    /// The resource as a node sees it.
    pub(super) fn report(&self, index: usize) -> anyhow::Result<ResourceReport> {
        let place = Place::find(Some(&self.nodes[index].dir));
        let reply = Client::connect(&place)?.call(&Request::Report {
            resource: Some(RESOURCE.to_owned()),
        })?;
        match reply {
            Reply::Report { resources } => resources
                .into_iter()
                .next()
                .context("the resource is not up"),
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// The mountable device of a node.
    pub(super) fn device(&self, index: usize) -> PathBuf {
        self.nodes[index].dir.join("dev/drbd0")
    }

    /// The socket that serves a node's volumes by NBD.
    pub(super) fn nbd_socket(&self, index: usize) -> PathBuf {
        self.nodes[index].dir.join("nbd.sock")
    }

    /// The disk image of a node.
    pub(super) fn image(&self, index: usize) -> PathBuf {
        self.nodes[index].dir.join("disk.img")
    }

    /// Asks again and again until there is a result, the time is over or ctrl-C came.
    pub(super) fn wait_until<T>(
        &self,
        what: &str,
        seconds: u64,
        mut ask: impl FnMut() -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<T> {
        let until = Instant::now() + Duration::from_secs(seconds);
        loop {
            self.check()?;
            if let Some(found) = ask()? {
                return Ok(found);
            }
            if Instant::now() >= until {
                bail!(
                    "waited {seconds} s in vain for {what}; logs are in {}",
                    self.dir.display()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// An error once ctrl-C was pressed.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.interrupted.load(Ordering::Relaxed), "interrupted");
        Ok(())
    }
}

/// What an earlier demo that was killed has left in its directory: daemons, mounts, files.
pub(super) fn clean_leftovers(dir: &Path) -> anyhow::Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    ensure!(
        dir.join(MARK).exists() || fs::read_dir(dir)?.next().is_none(),
        "{} exists and is no demo's directory; choose another with --dir",
        dir.display()
    );
    unmount_below(dir);
    for name in NAMES {
        let node = dir.join(name);
        let pid = fs::read_to_string(node.join("lockstepd.pid")).unwrap_or_default();
        let Ok(pid) = pid.trim().parse::<i32>() else {
            continue;
        };
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let ours = String::from_utf8_lossy(&command).contains(&*node.to_string_lossy());
        if let (true, Some(pid)) = (ours, rustix::process::Pid::from_raw(pid)) {
            // It may end meanwhile.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
    fs::remove_dir_all(dir).with_context(|| format!("removing {}", dir.display()))
}

/// Marks a directory as a demo's, so that no other is ever removed.
pub(super) const MARK: &str = "lockstep-demo";

/// Unmounts what is mounted below the directory, also from devices whose daemon is dead.
pub(super) fn unmount_below(dir: &Path) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for line in mounts.lines() {
        if let Some(target) = line.split(' ').nth(1)
            && Path::new(target).starts_with(dir)
        {
            // What cannot be unmounted is seen when the directory is removed.
            let _ = Command::new("umount").arg("-l").arg(target).status();
        }
    }
}
