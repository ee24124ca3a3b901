//! Clusters of real daemons on this machine, for end-to-end tests.
//!
//! Each node has a directory of its own with its configuration, disks, sockets and log, and a
//! network namespace of its own on a bridge with the others. `LOCKSTEP_BIN` names the binary;
//! without it the one beside the tests' build is taken.

pub mod hold;
pub mod load;
pub mod net;
pub mod postgres;
pub mod writer;

pub mod wan;

pub mod guest;
mod guest_base64;
pub mod guest_disks;
pub mod guest_drbd;
pub mod guest_drbd9;
pub mod guest_host;
pub mod guest_image;
pub mod guest_line;
pub mod guest_mixed;
pub mod guest_proxy;
pub mod guest_trouble;
pub mod guest_writes;

use std::fs;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use net::{Cut, Network};

/// Bounds every wait; a wait that ends here is a failure, not a pause.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Names of the nodes, by node id.
pub const NAMES: [&str; 8] = [
    "alfa", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel",
];

/// Whether this machine has what the test needs. A test that lacks it says so and ends; in CI it
/// fails.
pub fn machine_has(what: &str, present: bool) -> bool {
    if !present {
        let text = format!("this machine lacks: {what}");
        assert!(std::env::var_os("CI").is_none(), "{text}");
        eprintln!("skipped: {text}");
    }
    present
}

/// The test runs as root and the machine has FUSE and loop devices.
pub fn can_mount() -> bool {
    machine_has("root", rustix::process::geteuid().is_root())
        && machine_has("/dev/fuse", Path::new("/dev/fuse").exists())
        && machine_has("/dev/loop-control", Path::new("/dev/loop-control").exists())
        && machine_has(
            "network namespaces",
            Path::new("/proc/self/ns/net").exists(),
        )
        && has_program("ip")
}

/// A program is on the path.
pub fn has_program(name: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(name).exists()))
        || Path::new("/usr/sbin").join(name).exists();
    machine_has(name, found)
}

/// Some nodes of one resource `r0`.
pub struct Cluster {
    dir: tempfile::TempDir,
    nodes: Vec<Node>,
    network: Network,
    daemon: Vec<String>,
    mounts: Vec<PathBuf>,
    /// The proxies of a cluster across a long line, by node.
    proxies: Vec<Option<Child>>,
    shape: Shape,
}

/// What only some clusters have.
#[derive(Clone, Debug, Default)]
pub struct Shape {
    /// Nodes without a disk.
    pub clients: Vec<usize>,
    /// Lines for the `options` section.
    pub options: String,
    /// Further resources `r1` to this one, like `r0`.
    pub last_resource: usize,
}

struct Node {
    name: &'static str,
    dir: PathBuf,
    daemon: Option<Child>,
    /// It ended by SIGKILL at least once.
    killed: bool,
}

/// How a cluster is made.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Nodes, 2 to 8.
    pub nodes: usize,
    /// Volumes.
    pub volumes: usize,
    /// Size of each disk in MiB.
    pub disk_mib: u64,
    /// Lines for the `net` section.
    pub net: String,
    /// Lines for the `disk` section.
    pub disk: String,
    /// A node whose disks lie on a filesystem of so many MiB, less than their size.
    pub cramped: Option<(usize, u64)>,
    /// Further arguments of the daemons.
    pub daemon: Vec<String>,
    /// A number that no other test uses; makes minors.
    pub test: u8,
}

impl Setup {
    /// Size of each disk of [`Setup::quick`].
    pub const QUICK_DISK_MIB: u64 = 64;

    /// Small disks with protocol C; a dead link is noticed within about a second, and a resync makes
    /// no way for the test's writes.
    pub fn quick(test: u8, nodes: usize) -> Setup {
        Setup {
            nodes,
            volumes: 1,
            disk_mib: Setup::QUICK_DISK_MIB,
            net: "protocol C; timeout 9; ping-int 1; connect-int 1; ping-timeout 5;".into(),
            disk: "c-min-rate 0;".into(),
            cramped: None,
            daemon: Vec::new(),
            test,
        }
    }
}

impl Cluster {
    /// Starts the daemons and brings the resource up; nothing is Primary yet.
    pub fn new(setup: &Setup) -> Result<Cluster> {
        Cluster::shaped(setup, Shape::default())
    }

    /// The same with nodes without a disk, options or further resources.
    pub fn shaped(setup: &Setup, shape: Shape) -> Result<Cluster> {
        let network = Network::new(setup.nodes)?;
        Cluster::on(setup, shape, network, Cluster::configuration)
    }

    /// Two nodes with a long line between them, and a proxy at each end of it.
    pub fn across(setup: &Setup, line: wan::Line) -> Result<Cluster> {
        ensure!(setup.nodes == 2, "a line joins two nodes");
        let configuration = Cluster::proxied_configuration;
        Cluster::on(
            setup,
            Shape::default(),
            Network::across(line)?,
            configuration,
        )
    }

    fn on(
        setup: &Setup,
        shape: Shape,
        network: Network,
        configuration: fn(&Cluster, &Setup) -> String,
    ) -> Result<Cluster> {
        let dir = tempfile::Builder::new()
            .prefix("lockstep-e2e-")
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir()?;
        let bin = dir.path().join("bin");
        fs::create_dir(&bin)?;
        let binary = binary()?;
        let names = ["lockstep", "lockstepd", "drbdadm", "drbdsetup", "drbdmeta"];
        for name in names.into_iter().chain(["drbd-proxy-ctl"]) {
            std::os::unix::fs::symlink(&binary, bin.join(name))?;
        }
        let mut cluster = Cluster {
            nodes: Vec::new(),
            network,
            proxies: Vec::new(),
            daemon: setup.daemon.clone(),
            mounts: Vec::new(),
            shape,
            dir,
        };
        let conf = configuration(&cluster, setup);
        for (index, name) in NAMES[..setup.nodes].iter().enumerate() {
            let node_dir = cluster.dir.path().join(name);
            fs::create_dir_all(node_dir.join("disks"))?;
            if let Some((node, mib)) = setup.cramped
                && node == index
            {
                cluster.mount_cramped(&node_dir, mib)?;
            }
            fs::write(node_dir.join("drbd.conf"), &conf)?;
            fs::write(node_dir.join("node-name"), format!("{name}\n"))?;
            if !cluster.shape.clients.contains(&index) {
                for disk in cluster.disks(setup) {
                    let disk = fs::File::create(node_dir.join(disk))?;
                    disk.set_len(setup.disk_mib << 20)?;
                }
            }
            cluster.nodes.push(Node {
                name,
                dir: node_dir,
                daemon: None,
                killed: false,
            });
        }
        if cluster.network.wan().is_some() {
            fs::write(cluster.secret(), "0123456789abcdef0123456789abcdef")?;
            cluster.proxies = vec![None, None];
            for node in 0..setup.nodes {
                cluster.start_proxy(node)?;
            }
        }
        for node in 0..setup.nodes {
            cluster.start(node)?;
            if !cluster.shape.clients.contains(&node) {
                cluster.adm(node, &["create-md", "--force", "all"])?;
            }
            cluster.adm(node, &["up", "all"])?;
        }
        Ok(cluster)
    }

    /// The files below a node's directory that hold its volumes.
    fn disks(&self, setup: &Setup) -> Vec<String> {
        let resources = 0..=self.shape.last_resource;
        let of = |resource| (0..setup.volumes).map(move |volume| disk(resource, volume));
        resources.flat_map(of).collect()
    }

    fn configuration(&self, setup: &Setup) -> String {
        let mut text = String::from("global { usage-count no; }\n");
        for resource in 0..=self.shape.last_resource {
            self.configure_resource(&mut text, setup, resource);
        }
        text
    }

    fn configure_resource(&self, text: &mut String, setup: &Setup, resource: usize) {
        text.push_str(&format!("resource r{resource} {{\n"));
        text.push_str(&format!("  net {{ {} }}\n", setup.net));
        text.push_str(&format!("  disk {{ {} }}\n", setup.disk));
        text.push_str(&format!("  options {{ {} }}\n", self.shape.options));
        for (id, name) in NAMES[..setup.nodes].iter().enumerate() {
            text.push_str(&format!(
                "  on {name} {{\n    node-id {id};\n    address ipv4 {}:{};\n",
                net::address(id),
                7788 + resource
            ));
            for volume in 0..setup.volumes {
                let minor = minor(setup.test, id, volume) + resource as u32;
                let disk = match self.shape.clients.contains(&id) {
                    true => "disk none;".to_owned(),
                    false => {
                        let file = self.dir.path().join(name).join(disk(resource, volume));
                        format!("disk {}; meta-disk internal;", file.display())
                    }
                };
                text.push_str(&format!(
                    "    volume {volume} {{ device minor {minor}; {disk} }}\n"
                ));
            }
            text.push_str("  }\n");
        }
        text.push_str(&format!(
            "  connection-mesh {{ hosts {}; }}\n}}\n",
            NAMES[..setup.nodes].join(" ")
        ));
    }

    fn proxied_configuration(&self, setup: &Setup) -> String {
        let mut text = self.configuration(setup);
        let mesh = text.find("  connection-mesh").unwrap_or(text.len());
        text.truncate(mesh);
        text.push_str("  proxy { memlimit 64M; plugin { zstd level 1; } }\n  connection {\n");
        // Unlike inside ports, so that DRBD's ends agree on who opens which socket first.
        for (id, name) in NAMES[..2].iter().enumerate() {
            text.push_str(&format!(
                "    host {name} address ipv4 127.0.0.1:7915 via proxy on {name} {{\n      \
                 inside 127.0.0.2:{}; outside {}:7715; }}\n",
                7916 - 2 * id,
                net::address(id)
            ));
        }
        text.push_str("  }\n}\n");
        text
    }

    fn secret(&self) -> PathBuf {
        self.dir.path().join("proxy.secret")
    }

    /// Starts a node's proxy and gives it its connections.
    pub fn start_proxy(&mut self, node: usize) -> Result<()> {
        ensure!(self.proxies[node].is_none(), "the proxy runs already");
        let n = &self.nodes[node];
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(n.dir.join("proxy.log"))?;
        let mut command = Command::new(self.dir.path().join("bin/lockstep"));
        command
            .args(["proxy", "run", "--memory-max", "256M", "--secret-file"])
            .arg(self.secret())
            .env("LOCKSTEP_DIR", &n.dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let start = || command.spawn().context("starting the proxy");
        let child = self.network.inside(node, start)?;
        self.proxies[node] = Some(child);
        self.wait("the proxy answers", |c| {
            let socket = c.nodes[node].dir.join("proxy.sock");
            Ok(UnixStream::connect(socket).is_ok())
        })?;
        let ctl = self.dir.path().join("bin/drbd-proxy-ctl");
        let ctl = ctl.to_str().context("the path is UTF-8")?;
        self.adm(node, &["-p", ctl, "proxy-up", "r0"])?;
        Ok(())
    }

    /// Gives both proxies the same inside port, so that the ends of DRBD choose alike who opens
    /// which socket first.
    pub fn make_symmetric(&self) -> Result<()> {
        let ctl = self.dir.path().join("bin/drbd-proxy-ctl");
        let ctl = ctl.to_str().context("the path is UTF-8")?;
        for node in 0..2 {
            self.adm(node, &["down", "r0"])?;
            self.adm(node, &["-p", ctl, "proxy-down", "r0"])?;
            let path = self.nodes[node].dir.join("drbd.conf");
            let text = fs::read_to_string(&path)?;
            let other = text.replace("inside 127.0.0.2:7914", "inside 127.0.0.2:7916");
            ensure!(other != text, "{text}");
            fs::write(&path, other)?;
            self.adm(node, &["-p", ctl, "proxy-up", "r0"])?;
            self.adm(node, &["up", "r0"])?;
        }
        Ok(())
    }

    /// SIGKILL to a node's proxy.
    pub fn kill_proxy(&mut self, node: usize) -> Result<()> {
        let mut child = self.proxies[node]
            .take()
            .context("the proxy does not run")?;
        child.kill()?;
        gone(&mut child)
    }

    /// What a node's proxy says of its connection.
    pub fn proxy(&self, node: usize) -> Result<serde_json::Value> {
        let output = self.tool(node, "drbd-proxy-ctl", &["show", "connections", "--json"])?;
        let value: serde_json::Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        Ok(value["connections"][0].clone())
    }

    /// A command to a node's proxy, which must succeed.
    pub fn proxy_command(&self, node: usize, command: &str) -> Result<()> {
        let output = self.tool(node, "drbd-proxy-ctl", &["-c", command])?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{command}: {text}");
        Ok(())
    }

    /// The long line between the nodes.
    pub fn wan(&self) -> Result<&wan::Wan> {
        self.network.wan().context("the nodes are near each other")
    }

    /// Starts a node's daemon and waits until it answers.
    pub fn start(&mut self, node: usize) -> Result<()> {
        self.start_by(node, |network, start| network.inside(node, start))
    }

    /// The same in the test's own network namespace: the tools run in the node's nevertheless.
    pub fn start_outside(&mut self, node: usize) -> Result<()> {
        self.start_by(node, |_, start| start())
    }

    fn start_by(
        &mut self,
        node: usize,
        by: impl Fn(&Network, &mut (dyn FnMut() -> Result<Child> + Send)) -> Result<Child>,
    ) -> Result<()> {
        let bin = self.dir.path().join("bin");
        let network = &self.network;
        let n = &mut self.nodes[node];
        ensure!(n.daemon.is_none(), "{} runs already", n.name);
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(n.dir.join("log"))?;
        let mut command = Command::new(bin.join("lockstepd"));
        command
            .args(&self.daemon)
            .env("LOCKSTEP_DIR", &n.dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut start = || command.spawn().context("starting lockstepd");
        n.daemon = Some(by(network, &mut start)?);
        self.wait("the daemon answers", |c| {
            let socket = c.nodes[node].dir.join("control.sock");
            Ok(UnixStream::connect(socket).is_ok())
        })
    }

    /// Options of the daemons, from their next start on.
    pub fn set_daemon_args(&mut self, args: &[&str]) {
        self.daemon = args.iter().map(ToString::to_string).collect();
    }

    /// SIGKILL to a node's daemon.
    pub fn kill(&mut self, node: usize) -> Result<()> {
        let n = &mut self.nodes[node];
        let mut child = n.daemon.take().context("the node does not run")?;
        n.killed = true;
        child.kill()?;
        gone(&mut child)
    }

    /// Asks a node's daemon to end (SIGTERM), which it must do.
    pub fn stop(&mut self, node: usize) -> Result<()> {
        let n = &mut self.nodes[node];
        let mut child = n.daemon.take().context("the node does not run")?;
        terminate(&mut child);
        let status = child.try_wait()?.context("the daemon does not end")?;
        ensure!(status.success(), "{}: {status}", n.name);
        Ok(())
    }

    /// The cluster's directory; every user may enter it.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A node's directory.
    pub fn node_dir(&self, node: usize) -> &Path {
        &self.nodes[node].dir
    }

    /// The file behind a volume of a node.
    pub fn image(&self, node: usize, volume: usize) -> PathBuf {
        self.nodes[node].dir.join(disk(0, volume))
    }

    /// What a node's daemon has logged.
    pub fn log(&self, node: usize) -> Result<String> {
        Ok(fs::read_to_string(self.nodes[node].dir.join("log"))?)
    }

    /// Cuts a node off from the others.
    pub fn cut(&self, node: usize, cut: Cut) -> Result<()> {
        self.network.cut(node, cut)
    }

    /// Undoes a cut.
    pub fn mend(&self, node: usize, cut: Cut) -> Result<()> {
        self.network.mend(node, cut)
    }

    /// The network between the nodes.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Splits the network into groups of nodes, silently; nodes that are not named join the first.
    pub fn partition(&self, groups: &[&[usize]]) -> Result<()> {
        self.network.partition(groups)
    }

    /// What a node sends to another one is lost, silently; the other way works.
    pub fn mute(&self, node: usize, towards: usize) -> Result<()> {
        self.network.mute(node, towards)
    }

    /// Undoes `partition` and `mute`.
    pub fn heal(&self) -> Result<()> {
        self.network.heal()
    }

    /// A small filesystem for a node's disks.
    fn mount_cramped(&mut self, node_dir: &Path, mib: u64) -> Result<()> {
        let image = node_dir.join("cramped");
        fs::File::create(&image)?.set_len(mib << 20)?;
        run(Command::new("mkfs.ext4")
            .args(["-q", "-m", "0"])
            .arg(&image))?;
        let point = node_dir.join("disks");
        run(Command::new("mount")
            .args(["-o", "loop"])
            .args([&image, &point]))?;
        self.mounts.push(point);
        Ok(())
    }

    /// `drbdsetup` for a node from the test's own network namespace.
    pub fn setup_from_host(&self, node: usize, args: &[&str]) -> Result<Output> {
        let mut command = Command::new(self.dir.path().join("bin/drbdsetup"));
        command
            .args(args)
            .env("LOCKSTEP_DIR", &self.nodes[node].dir);
        let output = command.stdin(Stdio::null()).output();
        output.with_context(|| format!("drbdsetup {args:?}"))
    }

    fn tool(&self, node: usize, tool: &str, args: &[&str]) -> Result<Output> {
        let mut command = Command::new(self.dir.path().join("bin").join(tool));
        command
            .args(args)
            .env("LOCKSTEP_DIR", &self.nodes[node].dir)
            .stdin(Stdio::null());
        let output = || command.output().with_context(|| format!("{tool} {args:?}"));
        self.network.inside(node, output)
    }

    /// `drbdadm`, which must succeed.
    pub fn adm(&self, node: usize, args: &[&str]) -> Result<String> {
        let output = self.tool(node, "drbdadm", args)?;
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

    /// `drbdadm`, however it ends.
    pub fn adm_raw(&self, node: usize, args: &[&str]) -> Result<Output> {
        self.tool(node, "drbdadm", args)
    }

    /// `drbdsetup`, however it ends.
    pub fn setup_raw(&self, node: usize, args: &[&str]) -> Result<Output> {
        self.tool(node, "drbdsetup", args)
    }

    /// A second `lockstepd` in a node's directory, which has to end by itself.
    pub fn second_daemon(&self, node: usize) -> Result<Output> {
        self.tool(node, "lockstepd", &["--no-device"])
    }

    /// `drbdsetup status --json` of the resource.
    pub fn status(&self, node: usize) -> Result<serde_json::Value> {
        let output = self.setup_raw(node, &["status", "r0", "--json"])?;
        let value: serde_json::Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        Ok(value[0].clone())
    }

    /// KiB of a volume that a node knows to be out of sync on a peer.
    pub fn out_of_sync_kib(&self, node: usize, peer: usize, volume: usize) -> Result<u64> {
        self.peer_number(node, peer, volume, "out-of-sync")
    }

    /// KiB of a volume that a node has received from a peer since they are configured.
    pub fn received_kib(&self, node: usize, peer: usize, volume: usize) -> Result<u64> {
        self.peer_number(node, peer, volume, "received")
    }

    fn peer_number(&self, node: usize, peer: usize, volume: usize, key: &str) -> Result<u64> {
        let status = self.status(node)?;
        let connections = status["connections"].as_array().context("connections")?;
        let connection = connections
            .iter()
            .find(|c| c["peer-node-id"] == peer)
            .context("the peer")?;
        connection["peer_devices"][volume][key]
            .as_u64()
            .with_context(|| format!("{key} of {connection}"))
    }

    /// A node's connection to a peer is in this state.
    pub fn connection_is(&self, node: usize, peer: usize, state: &str) -> Result<bool> {
        let status = self.status(node)?;
        let connections = status["connections"].as_array().context("connections")?;
        Ok(connections
            .iter()
            .any(|c| c["peer-node-id"] == peer && c["connection-state"] == state))
    }

    /// Waits until the condition holds; fails with every node's status and log after `PATIENCE`.
    pub fn wait(&self, what: &str, mut condition: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let begin = Instant::now();
        loop {
            if condition(self).unwrap_or(false) {
                return Ok(());
            }
            if begin.elapsed() > PATIENCE {
                let mut text = format!("not within {PATIENCE:?}: {what}\n");
                for (index, node) in self.nodes.iter().enumerate() {
                    let status = self.setup_raw(index, &["status", "--verbose", "--statistics"])?;
                    text.push_str(&format!(
                        "--- {}\n{}",
                        node.name,
                        String::from_utf8_lossy(&status.stdout)
                    ));
                    let log = fs::read_to_string(node.dir.join("log")).unwrap_or_default();
                    let lines: Vec<&str> = log.lines().collect();
                    let tail = lines.len().saturating_sub(25);
                    text.push_str(&lines[tail..].join("\n"));
                    text.push('\n');
                }
                bail!(text);
            }
            // Polled: the tools are what is tested, and they have no wait for every condition.
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// This node sees itself and every peer UpToDate and nothing to resync.
    pub fn is_in_sync(&self, node: usize) -> Result<bool> {
        let status = self.status(node)?;
        let peers = self.nodes.len() - 1;
        let expected = |node: Option<u64>| {
            let client = |n: &usize| Some(*n as u64) == node;
            match self.shape.clients.iter().any(client) {
                true => "Diskless",
                false => "UpToDate",
            }
        };
        let devices = status["devices"].as_array().context("devices")?;
        let connections = status["connections"].as_array().context("connections")?;
        let own = expected(Some(node as u64));
        let own = devices.iter().all(|d| d["disk-state"] == own);
        let connected = connections
            .iter()
            .filter(|c| {
                c["connection-state"] == "Connected"
                    && c["peer_devices"].as_array().is_some_and(|p| {
                        !p.is_empty()
                            && p.iter().all(|p| {
                                p["peer-disk-state"] == expected(c["peer-node-id"].as_u64())
                                    && p["replication-state"] == "Established"
                            })
                    })
            })
            .count();
        Ok(own && !devices.is_empty() && connected == peers)
    }

    /// Waits until every node is in sync with every other.
    pub fn wait_in_sync(&self) -> Result<()> {
        for node in 0..self.nodes.len() {
            self.wait("everything UpToDate", |c| c.is_in_sync(node))?;
        }
        Ok(())
    }

    /// Makes a node the first Primary: its (empty) disks are the truth.
    pub fn first_primary(&self, node: usize) -> Result<()> {
        self.wait("connections", |c| {
            let status = c.status(node)?;
            let all = status["connections"].as_array().context("connections")?;
            Ok(all.iter().all(|c| c["connection-state"] == "Connected"))
        })?;
        self.adm(node, &["primary", "--force", "r0"])?;
        self.wait_in_sync()
    }

    /// Declares the (empty) disks equal, without any resync, and makes a node the first Primary.
    pub fn primary_of_equal_disks(&self, node: usize) -> Result<()> {
        let storage = (0..self.nodes.len()).find(|n| !self.shape.clients.contains(n));
        let storage = storage.context("a node with a disk")?;
        for node in 0..self.nodes.len() {
            self.wait("connections", |c| c.is_connected(node))?;
        }
        self.adm(storage, &["new-current-uuid", "--clear-bitmap", "r0/0"])?;
        self.wait_in_sync()?;
        self.adm(node, &["primary", "r0"])?;
        Ok(())
    }

    /// Every connection of a node is established.
    pub fn is_connected(&self, node: usize) -> Result<bool> {
        let status = self.status(node)?;
        let all = status["connections"].as_array().context("connections")?;
        let connected = |c: &serde_json::Value| c["connection-state"] == "Connected";
        Ok(all.len() + 1 == self.nodes.len() && all.iter().all(connected))
    }

    /// The block device of a volume on the node where it is Primary.
    pub fn device(&self, node: usize, test: u8, volume: usize) -> Result<PathBuf> {
        let minor = minor(test, node, volume);
        let link = self.nodes[node]
            .dir
            .join("dev")
            .join(format!("drbd{minor}"));
        self.wait("the block device", |_| Ok(link.exists()))?;
        Ok(link.canonicalize()?)
    }

    /// Mounts a device; it is unmounted at the end at the latest.
    pub fn mount(&mut self, device: &Path) -> Result<PathBuf> {
        let point = self.dir.path().join(format!("mnt{}", self.mounts.len()));
        fs::create_dir_all(&point)?;
        run(Command::new("mount").arg(device).arg(&point))?;
        self.mounts.push(point.clone());
        Ok(point)
    }

    /// Unmounts; a mount whose daemon is dead goes lazily.
    pub fn unmount(&mut self, point: &Path) -> Result<()> {
        self.mounts.retain(|m| m != point);
        let device = device_at(point)?;
        let plain = Command::new("umount")
            .arg(point)
            .stderr(Stdio::null())
            .status()?;
        if !plain.success() {
            return run(Command::new("umount").arg("-l").arg(point));
        }
        // Another process's mount namespace that was made meanwhile has a copy of the mount; the
        // filesystem lets go of the device when that process has ended too.
        self.wait("the filesystem lets go of the device", |_| {
            Ok(fs::File::options()
                .read(true)
                .custom_flags(libc::O_EXCL)
                .open(&device)
                .is_ok())
        })
    }

    /// The data areas of a volume are the same on every node. Everything must be Secondary.
    pub fn check_same_data(&self, volume: usize, mib: u64) -> Result<()> {
        let mut first: Option<Vec<u8>> = None;
        for (index, node) in self.nodes.iter().enumerate() {
            if self.shape.clients.contains(&index) {
                continue;
            }
            let mut bytes = fs::read(node.dir.join(disk(0, volume)))?;
            // Behind that lies the metadata, which differs by node.
            bytes.truncate((mib << 20) as usize);
            match &first {
                None => first = Some(bytes),
                Some(expected) => {
                    let same = expected == &bytes;
                    ensure!(
                        same,
                        "volume {volume} of {} differs from {}",
                        node.name,
                        NAMES[0]
                    );
                }
            }
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The last first: the first may be what lies below the nodes' disks.
        for point in self.mounts.drain(..).rev() {
            // What cannot be unmounted any more is left to the kernel.
            let _ = Command::new("umount").arg("-l").arg(point).status();
        }
        // A node that was killed for good has left its devices: a new daemon takes them away.
        for node in 0..self.nodes.len() {
            if self.nodes[node].killed
                && self.nodes[node].daemon.is_none()
                && let Err(error) = self.start(node)
            {
                eprintln!("devices of a killed node stay: {error:#}");
            }
        }
        let proxies = self.proxies.iter_mut().filter_map(Option::take);
        let daemons = self.nodes.iter_mut().filter_map(|node| node.daemon.take());
        for mut child in daemons.chain(proxies) {
            terminate(&mut child);
        }
    }
}

/// Waits for a process that was killed. One that hangs in the kernel is an error, and nobody waits
/// for it any more.
fn gone(child: &mut Child) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    while child.try_wait()?.is_none() {
        ensure!(
            Instant::now() < deadline,
            "process {} does not end after SIGKILL",
            child.id()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Asks a process to end and waits for that; after 10 s it is killed. One that does not even end
/// then hangs in the kernel: after 30 s nobody waits for it any more.
pub fn terminate(child: &mut Child) {
    let _ = rustix::process::kill_process(
        rustix::process::Pid::from_child(child),
        rustix::process::Signal::TERM,
    );
    let begin = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if begin.elapsed() > Duration::from_secs(10) {
            let _ = child.kill();
        }
        if begin.elapsed() > Duration::from_secs(30) {
            eprintln!("process {} hangs in the kernel", child.id());
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The file of a volume, below its node's directory.
fn disk(resource: usize, volume: usize) -> String {
    match resource {
        0 => format!("disks/{volume}"),
        _ => format!("disks/r{resource}-{volume}"),
    }
}

fn minor(test: u8, node: usize, volume: usize) -> u32 {
    u32::from(test) * 100 + node as u32 * 10 + volume as u32
}

/// What is mounted at a place.
fn device_at(point: &Path) -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut words = mounts.lines().map(|line| line.split(' '));
    let place = point.as_os_str();
    let line = words.find(|line| line.clone().nth(1).is_some_and(|at| place == at));
    let device = line.and_then(|mut line| line.next());
    Ok(device.context("nothing is mounted there")?.into())
}

/// Runs a command that must succeed.
pub fn run(command: &mut Command) -> Result<()> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

/// The binary under test.
pub fn binary() -> Result<PathBuf> {
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
    ensure!(
        path.exists(),
        "{} is missing: cargo build --bin lockstep",
        path.display()
    );
    Ok(path)
}
