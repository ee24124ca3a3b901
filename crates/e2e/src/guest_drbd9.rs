//! Clusters of Lockstep nodes on this machine and kernel DRBD 9 nodes in guests.
//!
//! All are joined by a bridge in a network namespace, because DRBD 9 takes a connection only from
//! the address that its configuration has. Commands, states and configuration are the same words
//! for both kinds, so a scenario runs with either kind in each role. The resource is `r0`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::guest::{COMMAND_LIMIT, Guest, GuestNetwork, GuestSetup, HostFiles, can_emulate};
use crate::guest_drbd::DRBD_LIMIT;
use crate::guest_host::HostNode;
use crate::guest_image::{BALANCING, DRBD9_MODULES, DrbdModule};
use crate::net::{Cut, Network, address, second_address};
use crate::{NAMES, can_mount};

/// Size of each disk unless a test asks for another one.
pub const DISK_MIB: u64 = 33;

/// Lines of a `net` section with which nodes find each other soon after a loss, and that leave an
/// emulated machine time to answer.
pub const PACE: &str = "connect-int 1; ping-timeout 30; timeout 60;";

/// A pace of resyncs that small disks do not wait for.
pub const FAST_RESYNC: &str = "c-plan-ahead 0; resync-rate 100M;";

/// Whether this machine can run these tests. No distribution ships the module, so CI may lack it.
pub fn can_join_drbd9() -> bool {
    if std::env::var_os(DRBD9_MODULES).is_none() {
        eprintln!(
            "skipped: this machine lacks: {DRBD9_MODULES} (a directory with DRBD 9's modules)"
        );
        return false;
    }
    can_emulate() && can_mount()
}

/// Whether the kernel's nodes can use all paths at once: their module is there, and their tools know the option.
pub fn can_balance_with_drbd9() -> bool {
    if !can_join_drbd9() {
        return false;
    }
    let directory = std::env::var_os(DRBD9_MODULES).unwrap_or_default();
    let module = std::path::Path::new(&directory).join(format!("{BALANCING}.ko"));
    let tool = fs::read("/usr/sbin/drbdsetup").unwrap_or_default();
    let known = b"load-balance-paths";
    let present = module.exists() && tool.windows(known.len()).any(|words| words == known);
    if !present {
        eprintln!(
            "skipped: this machine lacks: {BALANCING} and drbd-utils that know load-balance-paths"
        );
    }
    present
}

/// Whether the tools of the kernel's nodes make metadata with other bitmap blocks than 4 KiB.
pub fn can_enlarge_drbd9_blocks() -> bool {
    if !can_join_drbd9() {
        return false;
    }
    let tool = fs::read("/usr/sbin/drbdadm").unwrap_or_default();
    let known = b"bitmap-block-size";
    let present = tool.windows(known.len()).any(|words| words == known);
    if !present {
        eprintln!("skipped: this machine lacks: drbd-utils that know --bitmap-block-size");
    }
    present
}

/// What a node runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// This project.
    Lockstep,
    /// Kernel DRBD 9.
    Kernel,
}

/// How a cluster is made.
#[derive(Clone, Debug)]
pub struct NineSetup {
    /// Nodes by their number, which is their node id.
    pub nodes: Vec<Kind>,
    /// Nodes without a disk.
    pub diskless: Vec<usize>,
    /// Lines of the `net` section.
    pub net: String,
    /// Lines of the `disk` section.
    pub disk: String,
    /// Lines of the `options` section.
    pub options: String,
    /// First minor, of the volumes of all nodes; no other test of this machine uses it.
    pub minor: u32,
    /// Volumes.
    pub volumes: u32,
    /// Size of each disk.
    pub disk_mib: u64,
    /// Whether each connection has a second path.
    pub two_paths: bool,
    /// Handlers and how they exit. Each notes its name for [`Nine::called`].
    pub handlers: &'static [(&'static str, u8)],
    /// Further words of `drbdadm create-md` of Lockstep nodes; the tools of the kernel's nodes may not know them.
    pub create_md: &'static str,
    /// The same of the kernel's nodes.
    pub kernels_create_md: &'static str,
}

impl NineSetup {
    /// One volume, protocol C, nothing else.
    pub fn new(nodes: &[Kind], minor: u32) -> NineSetup {
        NineSetup {
            nodes: nodes.to_vec(),
            diskless: Vec::new(),
            net: format!("protocol C; {PACE}"),
            disk: FAST_RESYNC.to_string(),
            options: String::new(),
            minor,
            volumes: 1,
            disk_mib: DISK_MIB,
            two_paths: false,
            handlers: &[],
            create_md: "",
            kernels_create_md: "",
        }
    }

    /// The same with further lines in the `net` section.
    pub fn net(mut self, lines: &str) -> NineSetup {
        self.net = format!("{} {lines}", self.net);
        self
    }
}

enum Member {
    Lockstep(HostNode),
    Kernel(Guest),
}

/// A running cluster.
pub struct Nine {
    /// What it was made of; changes count from the next [`Nine::configure`] on.
    pub setup: NineSetup,
    members: Vec<Member>,
    /// Whose disk and node id a node has: its own, unless disks were exchanged.
    disk_of: Vec<usize>,
    network: Network,
    dump: Option<Child>,
    dir: tempfile::TempDir,
}

impl Nine {
    /// Boots guests, starts daemons, makes metadata and brings all nodes up.
    pub fn start(setup: NineSetup) -> Result<Nine> {
        let cluster = Nine::prepare(setup)?;
        cluster.configure()?;
        for node in 0..cluster.members.len() {
            if !cluster.setup.diskless.contains(&node) {
                cluster.create_md(node)?;
            }
        }
        for node in 0..cluster.members.len() {
            cluster.adm(node, "up r0")?;
        }
        Ok(cluster)
    }

    /// [`Nine::start`] with connected nodes whose (empty) disks count as equal.
    pub fn start_equal(setup: NineSetup) -> Result<Nine> {
        let cluster = Nine::start(setup)?;
        cluster.wait_connected()?;
        let first = cluster.disks().next().context("a node with a disk")?;
        for volume in 0..cluster.setup.volumes {
            let words = format!("new-current-uuid --clear-bitmap r0/{volume}");
            cluster.adm(first, &words)?;
        }
        cluster.wait_in_sync()?;
        Ok(cluster)
    }

    fn prepare(setup: NineSetup) -> Result<Nine> {
        let dir = tempfile::Builder::new()
            .prefix("lockstep-nine-")
            .tempdir()?;
        let network = Network::new(setup.nodes.len())?;
        if setup.two_paths {
            network.add_second_link()?;
        }
        for (node, _) in setup.nodes.iter().enumerate() {
            for volume in 0..setup.volumes {
                let path = image_of(dir.path(), node, volume);
                fs::File::create(&path)?.set_len(setup.disk_mib << 20)?;
            }
        }
        let mut members = Vec::new();
        for (node, kind) in setup.nodes.iter().enumerate() {
            members.push(match kind {
                Kind::Lockstep => {
                    let mut host = HostNode::new(dir.path(), NAMES[node], setup.minor)?;
                    host.set_network(network.node_path(node));
                    Member::Lockstep(host)
                }
                Kind::Kernel => {
                    let (namespace, interfaces) = network.join_guest(node)?;
                    Member::Kernel(Guest::start(GuestSetup {
                        disks: images(dir.path(), &setup, node),
                        network: GuestNetwork::Taps {
                            namespace,
                            interfaces,
                        },
                        drbd: DrbdModule::Nine,
                        host_files: HostFiles::Hidden,
                        ..GuestSetup::new(NAMES[node])
                    })?)
                }
            });
        }
        let mut cluster = Nine {
            dump: dump(&network)?,
            disk_of: (0..setup.nodes.len()).collect(),
            setup,
            members,
            network,
            dir,
        };
        cluster.configure()?;
        for member in &mut cluster.members {
            if let Member::Lockstep(host) = member {
                host.start_daemon()?;
            }
        }
        Ok(cluster)
    }

    /// Writes the configuration of all nodes; `adjust` or `up` makes it count.
    pub fn configure(&self) -> Result<()> {
        (0..self.members.len()).try_for_each(|node| self.configure_node(node))
    }

    /// [`Nine::configure`] for one node.
    pub fn configure_node(&self, node: usize) -> Result<()> {
        let text = self.configuration(node);
        match &self.members[node] {
            Member::Lockstep(host) => host.write_configuration(&text),
            Member::Kernel(guest) => guest.write_file("/etc/drbd.conf", &text),
        }
    }

    /// [`Nine::configure`] and `drbdadm adjust` on each node.
    pub fn adjust(&self) -> Result<()> {
        self.configure()?;
        for node in 0..self.members.len() {
            self.adm(node, "adjust r0")?;
        }
        Ok(())
    }

    fn configuration(&self, own: usize) -> String {
        let setup = &self.setup;
        let mut text = format!(
            "global {{ usage-count no; }}\nresource r0 {{\n net {{ {} }}\n disk {{ {} }}\n \
             options {{ {} }}\n",
            setup.net, setup.disk, setup.options
        );
        text += " handlers {\n";
        for (name, code) in setup.handlers {
            let calls = self.calls(own);
            text += &format!("  {name} \"echo {name} >> {calls}; exit {code}\";\n");
        }
        text += " }\n";
        for (node, (name, id)) in NAMES.iter().zip(&self.disk_of).enumerate() {
            text += &format!(" on {name} {{\n  node-id {id};\n");
            if !setup.two_paths {
                text += &format!("  address {}:{PORT};\n", address(node));
            }
            for volume in 0..setup.volumes {
                let disk = self.disk_word(own, node, volume);
                text += &format!(
                    "  volume {volume} {{ device minor {}; ",
                    setup.minor + volume
                );
                text += &match disk {
                    Some(disk) => format!("disk {disk}; meta-disk internal; }}\n"),
                    None => "disk none; }\n".to_string(),
                };
            }
            text += " }\n";
        }
        for a in 0..setup.nodes.len() {
            for b in a + 1..setup.nodes.len() {
                text += &self.connection(a, b);
            }
        }
        text + "}\n"
    }

    /// Where the handlers of a node note their names.
    fn calls(&self, node: usize) -> String {
        match self.setup.nodes[node] {
            Kind::Lockstep => {
                let name = format!("called-{}", NAMES[node]);
                self.dir.path().join(name).display().to_string()
            }
            Kind::Kernel => "/tmp/called".into(),
        }
    }

    /// The handlers that a node has called since the last question, one a line.
    pub fn called(&self, node: usize) -> Result<String> {
        let path = self.calls(node);
        self.sh(node, 0, &format!("cat {path} 2>/dev/null; rm -f {path}"))
    }

    fn connection_of(&self, status: &Value, peer: usize) -> Value {
        let all = status["connections"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let id = self.disk_of[peer];
        let found = all.into_iter().find(|c| c["peer-node-id"] == id);
        found.unwrap_or(Value::Null)
    }

    fn connection(&self, a: usize, b: usize) -> String {
        let host = |node: usize, address: String| {
            format!("host {} address {address}:{PORT};", NAMES[node])
        };
        if !self.setup.two_paths {
            return format!(" connection {{ host {}; host {}; }}\n", NAMES[a], NAMES[b]);
        }
        format!(
            " connection {{\n  path {{ {} {} }}\n  path {{ {} {} }}\n }}\n",
            host(a, address(a)),
            host(b, address(b)),
            host(a, second_address(a)),
            host(b, second_address(b)),
        )
    }

    /// How a node's configuration names the disk of a node; that of others does not matter.
    fn disk_word(&self, own: usize, node: usize, volume: u32) -> Option<String> {
        if self.setup.diskless.contains(&node) {
            return None;
        }
        let owner = self.disk_of[node];
        if node != own || self.setup.nodes[node] == Kind::Lockstep {
            return Some(
                image_of(self.dir.path(), owner, volume)
                    .display()
                    .to_string(),
            );
        }
        let image = image_of(self.dir.path(), owner, volume);
        let all = images(self.dir.path(), &self.setup, node);
        let index = all.iter().position(|path| *path == image)?;
        Some(format!("/dev/vd{}", char::from(b'a' + index as u8)))
    }

    /// Makes new metadata on a node.
    pub fn create_md(&self, node: usize) -> Result<()> {
        let words = match self.setup.nodes[node] {
            Kind::Lockstep => self.setup.create_md,
            Kind::Kernel => self.setup.kernels_create_md,
        };
        for volume in 0..self.setup.volumes {
            self.adm(node, &format!("create-md --force {words} r0/{volume}"))?;
        }
        Ok(())
    }

    /// The first two nodes take each other's disks, and the node ids with them, which metadata name. Both
    /// are down; a kernel among them sees the other's disks only if there is no third node.
    pub fn swap_disks(&mut self) -> Result<()> {
        self.disk_of.swap(0, 1);
        self.configure()
    }

    /// `drbdadm` of a node with these words, however it ends.
    pub fn adm_raw(&self, node: usize, words: &str) -> Result<(bool, String)> {
        self.tool(node, "drbdadm", words)
    }

    /// `drbdadm` of a node with these words, which must succeed.
    pub fn adm(&self, node: usize, words: &str) -> Result<String> {
        let (good, text) = self.adm_raw(node, words)?;
        ensure!(good, "{}: drbdadm {words}: {text}", NAMES[node]);
        Ok(text)
    }

    /// `drbdadm` on a node, which must fail, and says these words.
    pub fn refused(&self, node: usize, words: &str, says: &str) -> Result<()> {
        let (good, text) = self.adm_raw(node, words)?;
        ensure!(!good, "{}: drbdadm {words} succeeded", NAMES[node]);
        ensure!(
            text.contains(says),
            "{}: drbdadm {words}: {text}",
            NAMES[node]
        );
        Ok(())
    }

    /// `drbdsetup` of a node with these words, which must succeed.
    pub fn setup_tool(&self, node: usize, words: &str) -> Result<String> {
        let (good, text) = self.tool(node, "drbdsetup", words)?;
        ensure!(good, "{}: drbdsetup {words}: {text}", NAMES[node]);
        Ok(text)
    }

    fn tool(&self, node: usize, tool: &str, words: &str) -> Result<(bool, String)> {
        match &self.members[node] {
            Member::Lockstep(host) => {
                let words: Vec<&str> = words.split_whitespace().collect();
                let output = host.tool(tool, &words)?;
                let text = [output.stdout, output.stderr].concat();
                let text = String::from_utf8_lossy(&text).into_owned();
                Ok((output.status.success(), text))
            }
            Member::Kernel(guest) => {
                let (status, text) = guest.sh_raw(&format!("{tool} {words}"), COMMAND_LIMIT)?;
                Ok((status == 0, text))
            }
        }
    }

    /// Runs a script on a node where `$D` is a volume's block device; the node is Primary. It must succeed.
    pub fn sh(&self, node: usize, volume: u32, script: &str) -> Result<String> {
        let (good, text) = self.sh_raw(node, volume, script)?;
        ensure!(good, "{}: {script}: {text}", NAMES[node]);
        Ok(text)
    }

    /// The same, however it ends.
    pub fn sh_raw(&self, node: usize, volume: u32, script: &str) -> Result<(bool, String)> {
        match &self.members[node] {
            Member::Lockstep(host) => {
                let output = Command::new("sh")
                    .args(["-c", script])
                    .env("D", host.device(volume)?)
                    .stdin(Stdio::null())
                    .output()?;
                let text = [output.stdout, output.stderr].concat();
                let text = String::from_utf8_lossy(&text).into_owned();
                Ok((output.status.success(), text))
            }
            Member::Kernel(guest) => {
                let device = format!("/dev/drbd{}", self.setup.minor + volume);
                let (status, text) =
                    guest.sh_raw(&format!("D={device}; {script}"), COMMAND_LIMIT)?;
                Ok((status == 0, text))
            }
        }
    }

    /// Starts a script as [`Nine::sh`] has them, in the background.
    pub fn job(&self, node: usize, volume: u32, script: &str) -> Result<Job> {
        match &self.members[node] {
            Member::Lockstep(host) => {
                let child = Command::new("sh")
                    .args(["-c", script])
                    .env("D", host.device(volume)?)
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(fs::File::create(self.dir.path().join("job"))?)
                    .spawn()?;
                Ok(Job::Here(child))
            }
            Member::Kernel(guest) => {
                let device = format!("/dev/drbd{}", self.setup.minor + volume);
                guest.start_job("job", &format!("D={device}; {script}"))?;
                Ok(Job::Guest(node))
            }
        }
    }

    /// Waits for the end of a job, which must be good.
    pub fn finish(&self, job: Job) -> Result<()> {
        match job {
            Job::Here(mut child) => {
                let begin = Instant::now();
                let status = loop {
                    if let Some(status) = child.try_wait()? {
                        break status;
                    }
                    if begin.elapsed() > DRBD_LIMIT {
                        child.kill()?;
                        bail!("the job does not end\n{}", self.report());
                    }
                    std::thread::sleep(Duration::from_millis(50));
                };
                let text = fs::read_to_string(self.dir.path().join("job"))?;
                ensure!(status.success(), "the job: {text}");
                Ok(())
            }
            Job::Guest(node) => self
                .guest(node)
                .finish_job("job", DRBD_LIMIT)
                .map(drop)
                .with_context(|| self.report()),
        }
    }

    /// Writes random blocks at 20 places of a volume, durably. The node is Primary.
    pub fn scribble(&self, node: usize, volume: u32) -> Result<()> {
        self.sh(node, volume, &scribble_words(node, 20)).map(drop)
    }

    /// The node that a node's volume is Primary on becomes Secondary, and `node` Primary.
    pub fn make_primary(&self, node: usize) -> Result<()> {
        for other in 0..self.members.len() {
            if other != node && self.status(other)?["role"] == "Primary" {
                self.adm(other, "secondary r0")?;
            }
        }
        self.adm(node, "primary r0").map(drop)
    }

    /// `drbdsetup status --json` of a node.
    pub fn status(&self, node: usize) -> Result<Value> {
        let (_, text) = self.tool(node, "drbdsetup", "status r0 --json --statistics --verbose")?;
        let value: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        Ok(value[0].clone())
    }

    /// State of a node's connection to a peer; empty if it has none.
    pub fn connection_state(&self, node: usize, peer: usize) -> Result<String> {
        let status = self.status(node)?;
        Ok(word(&self.connection_of(&status, peer)["connection-state"]))
    }

    /// Replication state of a node's volume towards a peer.
    pub fn replication(&self, node: usize, peer: usize, volume: u32) -> Result<String> {
        let status = self.status(node)?;
        let peer = self.connection_of(&status, peer);
        Ok(word(
            &peer["peer_devices"][volume as usize]["replication-state"],
        ))
    }

    /// State of a node's own disk.
    pub fn disk_state(&self, node: usize, volume: u32) -> Result<String> {
        Ok(word(
            &self.status(node)?["devices"][volume as usize]["disk-state"],
        ))
    }

    /// What a node has marked for a peer, in KiB.
    pub fn out_of_sync_kib(&self, node: usize, peer: usize, volume: u32) -> Result<u64> {
        let status = self.status(node)?;
        let peer = self.connection_of(&status, peer);
        peer["peer_devices"][volume as usize]["out-of-sync"]
            .as_u64()
            .context("the status has no count of marks")
    }

    /// Waits for something of the cluster; a failure shows all nodes.
    pub fn wait(&self, what: &str, mut condition: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let begin = Instant::now();
        loop {
            // A tool may find the resource in the moment in which it is not there.
            if condition(self).unwrap_or(false) {
                return Ok(());
            }
            if begin.elapsed() > LIMIT {
                bail!("not within {LIMIT:?}: {what}\n{}", self.report());
            }
            // Polled: the tools have no wait for every condition.
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until all nodes are connected with each other.
    pub fn wait_connected(&self) -> Result<()> {
        self.wait("all connected", |cluster| {
            for (a, b) in cluster.pairs() {
                if cluster.connection_state(a, b)? != "Connected" {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    /// Waits until two nodes are apart in the eyes of both.
    pub fn wait_apart(&self, a: usize, b: usize) -> Result<()> {
        self.wait("two nodes apart", |cluster| {
            Ok(cluster.connection_state(a, b)? != "Connected"
                && cluster.connection_state(b, a)? != "Connected")
        })
    }

    /// Waits until a node of two has lost its connection.
    pub fn wait_apart_one(&self, node: usize) -> Result<()> {
        self.wait("a lost connection", |cluster| {
            Ok(cluster.connection_state(node, 1 - node)? != "Connected")
        })
    }

    /// Waits until every node sees every disk UpToDate, and nothing is marked or under way.
    pub fn wait_in_sync(&self) -> Result<()> {
        self.wait("all Connected and UpToDate", Nine::is_in_sync)
    }

    /// All nodes are Connected and UpToDate, and nothing is marked.
    pub fn is_in_sync(&self) -> Result<bool> {
        self.is_in_sync_but(|_, _| false)
    }

    /// As [`Self::is_in_sync`], but some pairs may have marks.
    pub fn is_in_sync_but(&self, may_have_marks: impl Fn(usize, usize) -> bool) -> Result<bool> {
        let expected = |node: usize| {
            let diskless = self.setup.diskless.contains(&node);
            if diskless { "Diskless" } else { "UpToDate" }
        };
        for node in 0..self.members.len() {
            let status = self.status(node)?;
            for volume in 0..self.setup.volumes as usize {
                if status["devices"][volume]["disk-state"] != expected(node) {
                    return Ok(false);
                }
                for peer in (0..self.members.len()).filter(|peer| *peer != node) {
                    let connection = self.connection_of(&status, peer);
                    let device = &connection["peer_devices"][volume];
                    if connection["connection-state"] != "Connected"
                        || device["replication-state"] != "Established"
                        || device["peer-disk-state"] != expected(peer)
                        || device["out-of-sync"] != 0 && !may_have_marks(node, peer)
                    {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    /// Cuts a node off without a word, or mends it.
    pub fn cut(&self, node: usize, cut: bool) -> Result<()> {
        if cut {
            self.network.cut(node, Cut::Silent)
        } else {
            self.network.mend(node, Cut::Silent)
        }
    }

    /// The network, for other cuts.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// SIGKILL to a node's daemon, or to QEMU.
    pub fn kill(&mut self, node: usize) -> Result<()> {
        match &mut self.members[node] {
            Member::Lockstep(host) => host.kill_daemon(),
            Member::Kernel(guest) => guest.power_cut(),
        }
    }

    /// Starts what was killed, and brings its resource up.
    pub fn revive(&mut self, node: usize) -> Result<()> {
        let text = self.configuration(node);
        match &mut self.members[node] {
            Member::Lockstep(host) => host.start_daemon()?,
            Member::Kernel(guest) => {
                guest.boot()?;
                guest.write_file("/etc/drbd.conf", &text)?;
            }
        }
        self.adm(node, "up r0").map(drop)
    }

    /// Changes the size of all disks, and waits until the kernels know.
    pub fn resize_disks(&mut self, mib: u64) -> Result<()> {
        self.setup.disk_mib = mib;
        for node in self.disks() {
            for volume in 0..self.setup.volumes {
                let image = image_of(self.dir.path(), node, volume);
                fs::File::options()
                    .write(true)
                    .open(&image)?
                    .set_len(mib << 20)?;
                if let Member::Kernel(guest) = &self.members[node] {
                    let all = images(self.dir.path(), &self.setup, node);
                    let index = all.iter().position(|path| *path == image);
                    guest.resize_disk(index.context("one of its images")?, mib << 20)?;
                }
            }
        }
        Ok(())
    }

    /// Size of a volume in the eyes of a node, in KiB.
    pub fn size_kib(&self, node: usize, volume: u32) -> Result<u64> {
        let status = self.status(node)?;
        status["devices"][volume as usize]["size"]
            .as_u64()
            .context("a size")
    }

    /// The file of a node's disk.
    pub fn image(&self, node: usize, volume: u32) -> PathBuf {
        image_of(self.dir.path(), self.disk_of[node], volume)
    }

    /// The guest of a kernel node.
    pub fn guest(&self, node: usize) -> &Guest {
        match &self.members[node] {
            Member::Kernel(guest) => guest,
            Member::Lockstep(_) => panic!("{} is not a kernel node", NAMES[node]),
        }
    }

    /// A kernel node's log.
    pub fn kernel_log(&self, node: usize) -> Result<String> {
        self.guest(node).sh("dmesg")
    }

    /// A Lockstep node's log.
    pub fn own_log(&self, node: usize) -> Result<String> {
        match &self.members[node] {
            Member::Lockstep(host) => host.log(),
            Member::Kernel(_) => bail!("{} is not a Lockstep node", NAMES[node]),
        }
    }

    /// States and ends of the logs of all nodes.
    pub fn report(&self) -> String {
        let mut text = String::new();
        for (node, member) in self.members.iter().enumerate() {
            text += &format!("--- {}\n", NAMES[node]);
            text += &match member {
                Member::Lockstep(host) => host.report(),
                Member::Kernel(guest) => guest
                    .sh("drbdsetup status --verbose --statistics; \
                         dmesg | grep drbd | grep -v 'Closing unexpected' | tail -150")
                    .unwrap_or_else(|e| e.to_string()),
            };
            text.push('\n');
        }
        text
    }

    /// No log has an error that the test did not ask for. Expected lines are named by a part of them.
    pub fn check_logs(&self, expected: &[&str]) -> Result<()> {
        let allowed = |line: &str| {
            LOST_LINK
                .iter()
                .chain(expected)
                .any(|text| line.contains(text))
        };
        for (node, member) in self.members.iter().enumerate() {
            let (log, bad): (String, Vec<String>) = match member {
                Member::Kernel(guest) => {
                    let log = guest.sh("dmesg")?;
                    let mut bad = guest.kernel_errors()?;
                    let suspects = log
                        .lines()
                        .filter(|l| SUSPECT.iter().any(|s| l.contains(s)));
                    bad.extend(suspects.map(str::to_string));
                    (log, bad)
                }
                Member::Lockstep(host) => {
                    let log = host.log()?;
                    let is_bad = |l: &&str| l.contains(" WARN ") || l.contains("ERROR");
                    let bad = log.lines().filter(is_bad).map(str::to_string).collect();
                    (log, bad)
                }
            };
            let bad: Vec<String> = bad.into_iter().filter(|line| !allowed(line)).collect();
            if !bad.is_empty() {
                let lines: Vec<&str> = log.lines().collect();
                let tail = lines[lines.len().saturating_sub(200)..].join("\n");
                bail!("{}: {bad:#?} in\n{tail}\n{}", NAMES[node], self.report());
            }
        }
        Ok(())
    }

    /// The end of a test: everything in sync, clean logs, and after `down` equal lower disks.
    pub fn check_end(&self, expected: &[&str]) -> Result<()> {
        self.wait_in_sync()?;
        let mut sizes = Vec::new();
        let first = self.disks().next().context("a node with a disk")?;
        for volume in 0..self.setup.volumes {
            sizes.push(self.size_kib(first, volume)? as usize * 1024);
        }
        for node in 0..self.members.len() {
            self.adm(node, "down r0")?;
        }
        self.check_logs(expected)?;
        self.compare(&sizes)
    }

    /// Compares the lower disks of all nodes; all are down.
    fn compare(&self, sizes: &[usize]) -> Result<()> {
        for (node, member) in self.members.iter().enumerate() {
            if let Member::Kernel(guest) = member {
                guest.sh("sync").with_context(|| NAMES[node])?;
            }
        }
        for (volume, bytes) in (0..).zip(sizes) {
            ensure!(*bytes > 0, "the volume has no size");
            let mut first: Option<Vec<u8>> = None;
            for node in self.disks() {
                let data = fs::read(self.image(node, volume))?;
                let Some(first) = &first else {
                    first = Some(data);
                    continue;
                };
                let differs = (0..*bytes).find(|&at| data[at] != first[at]);
                ensure!(
                    differs.is_none(),
                    "{}: volume {volume} differs from byte {differs:?} on, of {bytes}",
                    NAMES[node]
                );
            }
        }
        Ok(())
    }

    /// Nodes with a disk.
    fn disks(&self) -> impl Iterator<Item = usize> + use<> {
        let diskless = self.setup.diskless.clone();
        (0..self.members.len()).filter(move |node| !diskless.contains(node))
    }

    /// Ordered pairs of nodes.
    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let count = self.members.len();
        (0..count).flat_map(move |a| (0..count).filter(move |b| *b != a).map(move |b| (a, b)))
    }
}

impl Drop for Nine {
    fn drop(&mut self) {
        if let Some(mut child) = self.dump.take() {
            // tcpdump writes what it has when it is asked to end.
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            let _ = child.wait();
        }
    }
}

/// A script that runs in the background.
#[derive(Debug)]
pub enum Job {
    /// On this machine.
    Here(Child),
    /// On a kernel node.
    Guest(usize),
}

/// A script that writes random blocks at so many places of `$D`, which differ from node to node.
pub fn scribble_words(node: usize, places: u32) -> String {
    let step = [7919, 6997, 5003, 3989][node % 4];
    format!(
        "for n in $(seq {places}); do dd if=/dev/urandom of=$D bs=4k count=2 conv=notrunc,fsync \
         seek=$((n * {step} % 8000)) 2>/dev/null || exit 1; done"
    )
}

fn image_of(dir: &Path, node: usize, volume: u32) -> PathBuf {
    dir.join(format!("{}{volume}", NAMES[node]))
}

/// What a guest sees as disks: in a cluster of two also the other node's, which it may get.
fn images(dir: &Path, setup: &NineSetup, node: usize) -> Vec<PathBuf> {
    let volumes = |node| (0..setup.volumes).map(move |volume| image_of(dir, node, volume));
    let mut all: Vec<PathBuf> = volumes(node).collect();
    let kernels = setup.nodes.iter().filter(|kind| **kind == Kind::Kernel);
    if setup.nodes.len() == 2 && kernels.count() == 1 {
        all.extend(volumes(1 - node));
    }
    all
}

fn word(value: &Value) -> String {
    value.as_str().unwrap_or("").to_string()
}

/// tcpdump on both bridges, if a file for it is named.
fn dump(network: &Network) -> Result<Option<Child>> {
    let Some(file) = std::env::var_os("LOCKSTEP_GUEST_PCAP") else {
        return Ok(None);
    };
    let child = Command::new("nsenter")
        .arg(format!("--net={}", network.switch_path().display()))
        .args([
            "tcpdump", "-q", "-U", "-B", "65536", "-s", "0", "-i", "any", "-w",
        ])
        .arg(file)
        .arg("tcp")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("tcpdump")?;
    Ok(Some(child))
}

const PORT: u16 = 7789;

/// Bounds every wait.
const LIMIT: Duration = Duration::from_secs(90);

/// What no log of a kernel may say, whatever its level.
const SUSPECT: &[&str] = &[
    "ASSERT",
    "BAD!",
    "unexpected",
    "Unexpected",
    "ProtocolError",
    "Split-Brain",
    "BUG",
    "WARNING",
];

/// What is logged as an error although only the link is gone.
const LOST_LINK: &[&str] = &[
    "PingAck did not arrive in time.",
    "the peer did not answer a ping",
    "sock_recvmsg returned -",
    "sock_sendmsg returned -",
    "error receiving P_",
    "Sending resync reply failed",
    // A node that is being brought up listens as soon as its first connection is made, and hears those
    // to which the others belong that it has not made yet.
    "Closing unexpected connection from",
];
