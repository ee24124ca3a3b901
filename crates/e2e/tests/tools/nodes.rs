//! Nodes that are driven by tools of others: each command runs in a mount namespace of its own,
//! so that what a tool leaves in `/run/drbd` or `/var/lib/drbd` stays within the test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lockstep_e2e::{NAMES, PATIENCE, machine_has};

/// Version of DRBD that the tools are told, because there is no kernel module to ask.
pub(crate) const DRIVER: &str = "9.3.3";

/// Where Debian installs its drbdadm.
pub(crate) const STOCK: &str = "/usr/sbin/drbdadm";

/// Root, namespaces, loop devices and Debian's tools.
pub(crate) fn can_run_stock_tools() -> bool {
    machine_has("root", rustix::process::geteuid().is_root())
        && machine_has("/dev/loop-control", Path::new("/dev/loop-control").exists())
        && machine_has("unshare", Path::new("/usr/bin/unshare").exists())
        && machine_has("drbd-utils", Path::new(STOCK).exists())
}

/// Some nodes of one resource `r0`, whose disks are loop devices.
pub(crate) struct Nodes {
    dir: tempfile::TempDir,
    nodes: Vec<Node>,
    test: u8,
}

struct Node {
    name: &'static str,
    dir: PathBuf,
    disk: PathBuf,
    daemon: Option<Child>,
}

/// How nodes are made.
pub(crate) struct Setup {
    /// Number of nodes, 2 or 3.
    pub(crate) nodes: usize,
    /// Lines for the resource.
    pub(crate) lines: &'static str,
    /// A number that no other test uses; makes addresses and minors.
    pub(crate) test: u8,
    /// Arguments for the daemons.
    pub(crate) daemon: &'static [&'static str],
}

impl Nodes {
    /// Starts the daemons; nothing is configured yet.
    pub(crate) fn new(setup: &Setup) -> Result<Nodes> {
        let dir = tempfile::Builder::new()
            .prefix("lockstep-tools-")
            .tempdir()?;
        let mut nodes = Nodes {
            dir,
            nodes: Vec::new(),
            test: setup.test,
        };
        let bin = nodes.dir.path().join("bin");
        fs::create_dir(&bin)?;
        let binary = binary()?;
        for name in ["lockstep", "lockstepd", "drbdsetup", "drbdmeta"] {
            std::os::unix::fs::symlink(&binary, bin.join(name))?;
        }
        for name in &NAMES[..setup.nodes] {
            let node_dir = nodes.dir.path().join(name);
            for part in ["run", "lib", "lock"] {
                fs::create_dir_all(node_dir.join(part))?;
            }
            fs::write(node_dir.join("node-name"), format!("{name}\n"))?;
            let image = node_dir.join("image");
            fs::File::create(&image)?.set_len(48 << 20)?;
            let found = output(
                Command::new("losetup")
                    .args(["--find", "--show"])
                    .arg(&image),
            )?;
            nodes.nodes.push(Node {
                name,
                dir: node_dir,
                disk: PathBuf::from(found.trim()),
                daemon: None,
            });
        }
        nodes.configure(setup.lines)?;
        for node in 0..setup.nodes {
            nodes.start(node, setup.daemon)?;
        }
        Ok(nodes)
    }

    /// Writes the configuration anew with other lines for the resource.
    pub(crate) fn configure(&self, lines: &str) -> Result<()> {
        let mut text =
            String::from("global { usage-count no; disable-ip-verification; }\nresource r0 {\n");
        text.push_str(lines);
        text.push('\n');
        for (id, node) in self.nodes.iter().enumerate() {
            text.push_str(&format!(
                "  on {} {{\n    node-id {id};\n    address ipv4 127.8.{}.{}:7788;\n    \
                 volume 0 {{ device minor {}; disk {}; meta-disk internal; }}\n  }}\n",
                node.name,
                self.test,
                id + 1,
                self.minor(id),
                node.disk.display()
            ));
        }
        let names: Vec<&str> = self.nodes.iter().map(|node| node.name).collect();
        text.push_str(&format!(
            "  connection-mesh {{ hosts {}; }}\n}}\n",
            names.join(" ")
        ));
        for node in &self.nodes {
            fs::write(node.dir.join("drbd.conf"), &text)?;
        }
        Ok(())
    }

    /// The minor number of the volume on a node.
    pub(crate) fn minor(&self, node: usize) -> u32 {
        30_000 + u32::from(self.test) * 100 + node as u32 * 10
    }

    /// Starts a node's daemon and waits until it answers.
    pub(crate) fn start(&mut self, node: usize, args: &[&str]) -> Result<()> {
        let n = &self.nodes[node];
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(n.dir.join("log"))?;
        let child = Command::new(self.dir.path().join("bin/lockstepd"))
            .args(args)
            .env("LOCKSTEP_DIR", &n.dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting lockstepd")?;
        self.nodes[node].daemon = Some(child);
        self.wait("the daemon answers", |c| {
            Ok(c.setup(node, &["status"])?.status.success()
                && c.nodes[node].dir.join("control.sock").exists())
        })
    }

    /// SIGKILL to a node's daemon.
    pub(crate) fn kill(&mut self, node: usize) -> Result<()> {
        let mut child = self.nodes[node].daemon.take().context("it runs")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// A node's directory.
    pub(crate) fn node_dir(&self, node: usize) -> &Path {
        &self.nodes[node].dir
    }

    /// The disk of a node.
    pub(crate) fn disk(&self, node: usize) -> &Path {
        &self.nodes[node].disk
    }

    /// A command in the node's own view of the machine.
    pub(crate) fn command(&self, node: usize, program: &str, args: &[&str]) -> Command {
        let n = &self.nodes[node];
        let script = "set -e\n\
             mkdir -p /run/drbd /var/lib/drbd\n\
             mount --bind \"$LOCKSTEP_DIR/run\" /run/drbd\n\
             mount --bind \"$LOCKSTEP_DIR/lib\" /var/lib/drbd\n\
             if [ -f \"$LOCKSTEP_DIR/view\" ]; then . \"$LOCKSTEP_DIR/view\"; fi\n\
             exec \"$@\"";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "bash", "-c", script, "bash", program])
            .args(args)
            .env("LOCKSTEP_DIR", &n.dir)
            .env("__DRBD_NODE__", n.name)
            .env("DRBD_DRIVER_VERSION_OVERRIDE", DRIVER)
            .env("PATH", self.path())
            .env_remove("LOCKSTEP_SHOW_DIALECT")
            .stdin(Stdio::null());
        command
    }

    fn path(&self) -> String {
        format!(
            "{}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            self.dir.path().join("bin").display()
        )
    }

    /// Debian's drbdadm, however it ends; it finds our drbdsetup and drbdmeta by PATH.
    pub(crate) fn stock_raw(&self, node: usize, args: &[&str]) -> Result<Output> {
        let conf = self.nodes[node].dir.join("drbd.conf");
        // Without a slash in its name it looks for its helpers in PATH.
        let mut all = vec!["-c", "exec -a drbdadm \"$@\"", "bash", STOCK];
        let conf = conf.to_str().context("the path is UTF-8")?;
        all.extend(["-c", conf]);
        all.extend(args);
        self.command(node, "bash", &all)
            .output()
            .with_context(|| format!("drbdadm {args:?}"))
    }

    /// Debian's drbdadm, which must succeed. Standard output.
    pub(crate) fn stock(&self, node: usize, args: &[&str]) -> Result<String> {
        let output = self.stock_raw(node, args)?;
        if !output.status.success() {
            bail!(
                "{}: drbdadm {}: {}\n{}{}",
                self.nodes[node].name,
                args.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Our drbdsetup, however it ends.
    pub(crate) fn setup(&self, node: usize, args: &[&str]) -> Result<Output> {
        self.tool(node, "drbdsetup", args)
    }

    /// One of our programs, however it ends.
    pub(crate) fn tool(&self, node: usize, tool: &str, args: &[&str]) -> Result<Output> {
        Command::new(self.dir.path().join("bin").join(tool))
            .args(args)
            .env("LOCKSTEP_DIR", &self.nodes[node].dir)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("{tool} {args:?}"))
    }

    /// Our drbdsetup, which must succeed. Standard output.
    pub(crate) fn asked(&self, node: usize, args: &[&str]) -> Result<String> {
        let output = self.setup(node, args)?;
        ensure!(
            output.status.success(),
            "drbdsetup {args:?}: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// `drbdsetup status --json` of the resource.
    pub(crate) fn status(&self, node: usize) -> Result<serde_json::Value> {
        let text = self.asked(node, &["status", "r0", "--json"])?;
        let value: serde_json::Value = serde_json::from_str(&text)?;
        Ok(value[0].clone())
    }

    /// Every disk UpToDate, every connection Established, as every node sees it.
    pub(crate) fn wait_in_sync(&self) -> Result<()> {
        let peers = self.nodes.len() - 1;
        for node in 0..self.nodes.len() {
            self.wait("everything UpToDate", |c| {
                let status = c.status(node)?;
                let connections = status["connections"].as_array().context("connections")?;
                let good = connections
                    .iter()
                    .filter(|c| {
                        let device = &c["peer_devices"][0];
                        device["peer-disk-state"] == "UpToDate"
                            && device["replication-state"] == "Established"
                    })
                    .count();
                Ok(status["devices"][0]["disk-state"] == "UpToDate" && good == peers)
            })?;
        }
        Ok(())
    }

    /// Waits until the condition holds; fails with every node's status and log.
    pub(crate) fn wait(
        &self,
        what: &str,
        mut condition: impl FnMut(&Self) -> Result<bool>,
    ) -> Result<()> {
        let begin = Instant::now();
        loop {
            if condition(self).unwrap_or(false) {
                return Ok(());
            }
            if begin.elapsed() > PATIENCE {
                bail!("not within {PATIENCE:?}: {what}\n{}", self.story());
            }
            // Polled: not every condition has a command that waits for it.
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Status and log of every node, for a failure's text.
    pub(crate) fn story(&self) -> String {
        let mut text = String::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let status = self
                .setup(index, &["status", "--verbose", "--statistics"])
                .map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            let log = fs::read_to_string(node.dir.join("log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(25)..].join("\n");
            text.push_str(&format!(
                "--- {}\n{}{tail}\n",
                node.name,
                status.unwrap_or_default()
            ));
        }
        text
    }

    /// `create-md` and `up` everywhere with Debian's drbdadm; node 0 has the first data.
    pub(crate) fn bring_up(&self) -> Result<()> {
        for node in 0..self.nodes.len() {
            self.stock(node, &["create-md", "--force", "r0"])?;
            self.stock(node, &["up", "r0"])?;
        }
        for node in 0..self.nodes.len() {
            self.stock(node, &["wait-connect", "r0"])?;
        }
        self.stock(0, &["primary", "--force", "r0"])?;
        self.wait_in_sync()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            if let Some(mut child) = node.daemon.take() {
                lockstep_e2e::terminate(&mut child);
            }
            // Everything that used it has ended.
            let _ = Command::new("losetup").arg("-d").arg(&node.disk).status();
        }
    }
}

/// Standard output of a command that must succeed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The program under test.
pub(crate) fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("LOCKSTEP_BIN") {
        return Ok(PathBuf::from(path));
    }
    // target/<profile>/deps/<test> -> target/<profile>/lockstep
    let test = std::env::current_exe()?;
    let path = test
        .ancestors()
        .nth(2)
        .context("the test lies in a build directory")?
        .join("lockstep");
    ensure!(path.exists(), "{} is missing", path.display());
    Ok(path)
}
