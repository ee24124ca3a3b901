//! A Lockstep node on this machine whose peer is in a guest, or was before.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::guest_drbd::DRBD_LIMIT;

/// One node with its own directory, tools and daemon. The resource is `r0`.
pub struct HostNode {
    dir: PathBuf,
    first_minor: u32,
    daemon: Option<Child>,
    daemon_args: Vec<String>,
    /// File that stands for the network namespace of its daemon.
    network: Option<PathBuf>,
}

impl HostNode {
    /// Makes the node's directory below `parent`; the daemon does not run yet.
    pub fn new(parent: &Path, name: &str, first_minor: u32) -> Result<HostNode> {
        let dir = parent.join(format!("node-{name}"));
        let bin = dir.join("bin");
        fs::create_dir_all(&bin)?;
        fs::write(dir.join("node-name"), format!("{name}\n"))?;
        let binary = crate::binary()?;
        for name in ["lockstepd", "drbdadm", "drbdsetup", "drbdmeta"] {
            std::os::unix::fs::symlink(&binary, bin.join(name))?;
        }
        Ok(HostNode {
            dir,
            first_minor,
            daemon: None,
            daemon_args: Vec::new(),
            network: None,
        })
    }

    /// Options of the daemon, from its next start on.
    pub fn set_daemon_args(&mut self, args: &[&str]) {
        self.daemon_args = args.iter().map(ToString::to_string).collect();
    }

    /// The network namespace of the daemon, from its next start on.
    pub fn set_network(&mut self, namespace: PathBuf) {
        self.network = Some(namespace);
    }

    /// The log of all starts of the daemon.
    pub fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.dir.join("log"))?)
    }

    /// Its `drbd.conf`, from the next `up` or `adjust` on.
    pub fn write_configuration(&self, text: &str) -> Result<()> {
        Ok(fs::write(self.dir.join("drbd.conf"), text)?)
    }

    /// Starts the daemon and waits until it answers.
    pub fn start_daemon(&mut self) -> Result<()> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("log"))?;
        let child = self
            .program("lockstepd")
            .args(&self.daemon_args)
            .env("LOCKSTEP_DIR", &self.dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting lockstepd")?;
        self.daemon = Some(child);
        // Not `drbdsetup status`, which is content without a daemon.
        self.wait("the daemon answers", |node| {
            Ok(UnixStream::connect(node.dir.join("control.sock")).is_ok())
        })
    }

    /// SIGKILL to the daemon.
    pub fn kill_daemon(&mut self) -> Result<()> {
        let mut child = self.daemon.take().context("the daemon does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// A tool of this node, however it ends.
    pub fn tool(&self, tool: &str, args: &[&str]) -> Result<Output> {
        self.program(tool)
            .args(args)
            .env("LOCKSTEP_DIR", &self.dir)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("{tool} {args:?}"))
    }

    /// A program of this node, in its network.
    fn program(&self, name: &str) -> Command {
        let path = self.dir.join("bin").join(name);
        let Some(namespace) = &self.network else {
            return Command::new(path);
        };
        // Becomes the program, without a process between.
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", namespace.display()));
        command.arg(path);
        command
    }

    /// `drbdadm`, which must succeed.
    pub fn adm(&self, args: &[&str]) -> Result<()> {
        let output = self.tool("drbdadm", args)?;
        ensure!(
            output.status.success(),
            "drbdadm {}: {}\n{}{}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    /// `drbdsetup status`.
    pub fn status(&self) -> Result<serde_json::Value> {
        let output = self.tool("drbdsetup", &["status", "r0", "--json"])?;
        let value: serde_json::Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        Ok(value[0].clone())
    }

    /// The words for the connection, and for a volume's disk, the peer's disk and the replication.
    pub fn state(&self, volume: u32) -> Result<[String; 4]> {
        let status = self.status()?;
        let connection = &status["connections"][0];
        let peer = &connection["peer_devices"][volume as usize];
        let text = |value: &serde_json::Value| value.as_str().unwrap_or("").to_string();
        Ok([
            text(&connection["connection-state"]),
            text(&status["devices"][volume as usize]["disk-state"]),
            text(&peer["peer-disk-state"]),
            text(&peer["replication-state"]),
        ])
    }

    /// Blocks that are marked, in KiB.
    pub fn out_of_sync_kib(&self, volume: u32) -> Result<u64> {
        let status = self.status()?;
        let peer = &status["connections"][0]["peer_devices"][volume as usize];
        peer["out-of-sync"]
            .as_u64()
            .context("the status has no count of marks")
    }

    /// Whether a volume is connected, UpToDate on both sides, and has nothing marked.
    pub fn is_in_sync(&self, volume: u32) -> Result<bool> {
        let good = ["Connected", "UpToDate", "UpToDate", "Established"];
        Ok(self.state(volume)? == good && self.out_of_sync_kib(volume)? == 0)
    }

    /// A volume's block device, while this node is Primary.
    pub fn device(&self, volume: u32) -> Result<PathBuf> {
        let link = self
            .dir
            .join(format!("dev/drbd{}", self.first_minor + volume));
        self.wait("the block device", |_| Ok(link.exists()))?;
        Ok(link.canonicalize()?)
    }

    /// Waits for something of this node.
    pub fn wait(&self, what: &str, mut condition: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let begin = Instant::now();
        while !condition(self).unwrap_or(false) {
            if begin.elapsed() > DRBD_LIMIT {
                bail!("not within {DRBD_LIMIT:?}: {what}\n{}", self.report());
            }
            // Polled: the tools have no wait for every condition.
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// State and last log lines.
    pub fn report(&self) -> String {
        let status = self.tool("drbdsetup", &["status", "--verbose", "--statistics"]);
        let status = status.map_or_else(
            |e| e.to_string(),
            |o| String::from_utf8_lossy(&o.stdout).into_owned(),
        );
        let log = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(30)..].join("\n");
        format!("{status}{tail}")
    }
}

impl Drop for HostNode {
    fn drop(&mut self) {
        if let Some(mut child) = self.daemon.take() {
            // A clean end takes the block device along.
            let _ = self.tool("drbdadm", &["down", "r0"]);
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            let begin = Instant::now();
            while begin.elapsed().as_secs() < 10 {
                if matches!(child.try_wait(), Ok(Some(_))) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
